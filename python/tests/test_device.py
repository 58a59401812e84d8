"""Steps whose dense work is done by torch operations, against the core's own, bit for bit.

The device is main memory that is treated as another one's, and an accelerator; ranks are threads.
"""

from collections.abc import Sequence
from typing import Any

import accelerators
import numpy as np
import pytest
import torch
from counting import count_step
from processes import Rank, accelerated
from stepping import Buckets, Floats, random_buckets, run_step, same_bits, snapshot
from transport import Bytes, QueueRank, run_threads

from topreduce import CommError, Communicator, Layout, Reducer, StepStats, run_ranks
from topreduce.torch import device as device_module
from topreduce.torch.device import GradientDevice, bucket_cap_mb
from topreduce.torch.lane import Lane

fake_only = pytest.mark.skipif(not accelerators.is_fake(), reason="stops are counted by fakegpu")

LAYOUT = Layout(
    [
        ("embed", [37, 23]),
        ("bias", [23]),
        ("nothing", [0, 4]),
        ("scale", []),
        ("hidden.weight", [61, 40]),
        ("hidden.bias", [40]),
        ("head", [40, 9]),
        ("nothing.bias", [0]),
    ]
)

# Those that keep gradients where they are.
ON_DEVICE = [
    "dense:values=bf16,feedback=residual",
    "topk:density=0.05,values=fp32",
    "topk:density=0.05,values=fp32,granularity=model",
    "topk:density=0.05,values=bf16",
    "topk:density=0.05,values=int4,granularity=model",
    "topk:density=0.2,values=int4",
    "topk:density=0.05,feedback=none",
    "topk:density=0.05,feedback=none,granularity=model",
    "topk:density=0.05,keep_dense=*bias,values=bf16",
    "topk:density=0.05,warmup_steps=1,ramp_steps=3,values=fp32",
    "topk:density=0.05,warmup_steps=1,ramp_steps=3,values=bf16,granularity=model",
    "topk:density=1",
    "ok_topk:density=0.05,values=fp32,period=3,tau=2",
    "ok_topk:density=0.05,period=3,tau=2,granularity=model,values=bf16",
    "ok_topk:density=0.2,values=int4,period=2,balance=1",
    "topk_dsa:density=0.05,values=bf16",
    "topk_dsa:density=0.4,granularity=model",
    "gtopk:density=0.05,values=int4",
    "gtopk:density=0.05,granularity=model",
    "gaussiank:density=0.05",
    "redsync:density=0.05",
]
# Those that have them come to main memory.
BY_COPY = [
    "randk:density=0.05",
    "arc_topk:density=0.2",
    "topk:density=0.05,feedback=ef21",
    "dgc:density=0.05",
    "gaussiank:density=0.05,granularity=model",
]


class Twins:
    """The same rank twice: with its gradients in main memory, and on a device."""

    def __init__(self, spec: str, layout: Layout = LAYOUT, device: str = "cpu") -> None:
        self.here, self.there = (Reducer(layout, spec, bucket_cap_mb=0) for _ in range(2))
        self.device = GradientDevice(torch.device(device))
        self.there.use(self.device)

    def step(
        self,
        comm: Communicator,
        gradient: Floats,
        buckets: Buckets,
        loss_scale: float = 1.0,
        unused: Sequence[int] = (),
    ) -> StepStats:
        """Both take it; everything that can be seen of them is the same afterwards."""
        mean, stats = run_step(self.here, comm, gradient, buckets, loss_scale, unused)
        other, other_stats = self.step_there(comm, gradient, buckets, loss_scale, unused)
        assert same_bits(other, mean)
        assert snapshot(self.there) == snapshot(self.here)
        ours, theirs = other_stats.as_dict(), stats.as_dict()
        for each in (ours, theirs):
            del each["seconds"], each["seconds_exchanging"], each["seconds_exposed"]
            del each["seconds_computed"], each["seconds_waited"]
        # The root of a difference of large sums, which are not the same in the last bits.
        norm = float(np.linalg.norm(np.nan_to_num(gradient, posinf=0, neginf=0)))
        owed = theirs.pop("owed_norm")
        assert ours.pop("owed_norm") == pytest.approx(owed, rel=0.01, abs=0.01 * norm)
        assert ours == pytest.approx(theirs, rel=1e-4)
        return stats

    def step_there(
        self,
        comm: Communicator,
        gradient: Floats,
        buckets: Buckets,
        loss_scale: float = 1.0,
        unused: Sequence[int] = (),
    ) -> tuple[Floats, StepStats]:
        if not self.there.on_device:
            return run_step(self.there, comm, gradient, buckets, loss_scale, unused)
        means = torch.from_numpy(gradient.copy()).to(self.device.device)
        lane = self.device.lane
        with lane.behind(lane.mark()):
            means, stats = self._step_there(comm, means, buckets, loss_scale, unused)
        lane.join()
        return means.cpu().numpy(), stats

    def _step_there(
        self,
        comm: Communicator,
        gradient: torch.Tensor,
        buckets: Buckets,
        loss_scale: float,
        unused: Sequence[int],
    ) -> tuple[torch.Tensor, StepStats]:
        sizes = self.there.layout.sizes
        means = list(gradient.split(sizes))
        self.there.begin(comm, loss_scale)
        for number, bucket in enumerate(buckets):
            if unused and number == len(buckets) - 1:
                self.there.participate(unused=unused)
            together = torch.cat([means[p] for p in bucket])
            self.device.hold(bucket, [sizes[p] for p in bucket], together)
            for p, mean in zip(bucket, together.split([sizes[p] for p in bucket]), strict=True):
                means[p] = mean
            self.there.add_on_device(bucket)
        stats = self.there.finish()
        self.device.release()
        return torch.cat(means), stats


def gradient_of(rank: int, step: int, layout: Layout = LAYOUT) -> Floats:
    """Heavy tails, zeros, and small integers that tie; now and then much larger than before."""
    rng = np.random.default_rng([rank, step])
    size = layout.size
    gradient = rng.standard_t(2, size) * (rng.random(size) < 0.7)
    ties = rng.random(size) < 0.3
    gradient[ties] = rng.integers(-3, 4, ties.sum())
    return (gradient * (100 if step == 4 else 1)).astype(np.float32)


def buckets_of(step: int) -> Buckets:
    return random_buckets(np.random.default_rng(step), len(LAYOUT))


ROWS = [*((spec, 3) for spec in ON_DEVICE + BY_COPY), (ON_DEVICE[1], 1), (ON_DEVICE[4], 1)]


@pytest.mark.parametrize(("spec", "ranks"), ROWS)
def test_the_same_bits_as_the_core(spec: str, ranks: int) -> None:
    def body(comm: Communicator) -> None:
        twins = Twins(spec)
        assert twins.there.on_device == (spec in ON_DEVICE)
        for step in range(6):
            scale = 2.0 ** (step % 3) * 1.1
            twins.step(comm, gradient_of(comm.rank, step), buckets_of(step), scale)
        owes_nothing = any(word in spec for word in ("none", "density=1", "ef21", "dense:"))
        assert owes_nothing or np.any(twins.there.owed("embed"))

    run_ranks(ranks, body)


def same_bits_on_the_accelerator(rank: Rank, specs: Sequence[str]) -> None:
    def body(comm: Communicator) -> None:
        for spec in specs:
            twins = Twins(spec, device=accelerators.name())
            for step in range(3):
                gradient = gradient_of(comm.rank, step)
                twins.step(comm, gradient, buckets_of(step), 1.1 * 2.0**step)

    run_ranks(2, body)
    accelerators.check_order()


def test_the_same_bits_on_an_accelerator() -> None:
    accelerated(1).run(same_bits_on_the_accelerator, ON_DEVICE + BY_COPY)


Rows = list[tuple[str, list[int]]]


def count(rank: Rank, rows: Rows, spec: str, cap_mb: float) -> tuple[dict[str, int], int]:
    return count_step(Layout(rows), spec, cap_mb, steps=4)


STOPPING = [
    "topk:density=0.01",
    "ok_topk:density=0.01,tau=1000,period=1000",
    "ok_topk:density=0.01,tau=1,period=1",  # every step is exact
    "arc_topk:density=0.2,reduce=native",
    "randk:density=0.01,reduce=native",
    "dense:reduce=native",
]


@fake_only
@pytest.mark.parametrize("spec", STOPPING)
def test_an_exchange_stops_the_device_twice(spec: str) -> None:
    rows = [(f"weight.{i}", [300, 100 + i]) for i in range(6)]
    counted, exchanges = accelerated(1).run(count, rows, spec, 0.3)[0]
    assert exchanges > 1
    each = 1 if "native" in spec else 2
    assert 0 < counted["stops"] <= each * exchanges + 1  # and one for the statistics
    assert counted["stops"] == counted["stop: event"]


def transformer(width: int, layers: int, words: int) -> Rows:
    shapes = {"attention": [3, 1], "merge": [1, 1], "up": [4, 1], "down": [1, 4]}
    rows: Rows = [("words", [words, width])]
    for layer in range(layers):
        for name, (out, into) in shapes.items():
            rows.append((f"{layer}.{name}", [out * width, into * width]))
    return rows


@fake_only
def test_a_billion_entries_stop_the_device_a_hundred_times() -> None:
    """Counted with a 1024th of the entries, in as many parts."""
    billion, rows = Layout(transformer(2048, 18, 50_304)), transformer(64, 18, 1572)
    assert billion.size > 1e9
    cap = bucket_cap_mb(billion.size)
    parts = len(Reducer(billion, "topk:density=0.01,feedback=none", bucket_cap_mb=cap).buckets)
    for spec in ("topk:density=0.01", "ok_topk:density=0.01,tau=1,period=1"):
        counted, exchanges = accelerated(1).run(count, rows, spec, cap / 1024)[0]
        assert exchanges == parts
        assert counted["stops"] <= 2 * exchanges + 1 <= 100


@pytest.mark.parametrize("spec", ON_DEVICE[::2])
def test_steps_that_are_lost_leave_no_trace(spec: str) -> None:
    """Not finite on one rank; and parameters that nobody, or only some, used."""

    def body(comm: Communicator) -> None:
        twins = Twins(spec)
        for step in range(5):
            gradient = gradient_of(comm.rank, step)
            if step in (1, 3) and comm.rank == 1:
                gradient[step * 700] = np.nan if step == 1 else -np.inf
            unused = [0, 4] if comm.rank == 0 or step == 4 else [0]
            before = snapshot(twins.there)
            stats = twins.step(comm, gradient, buckets_of(step), unused=unused if step > 1 else ())
            assert stats.finite == (step not in (1, 3))
            if not stats.finite:
                assert snapshot(twins.there) == before

    run_ranks(2, body)


def test_only_chosen_entries_come_to_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout([("one", [300, 1000]), ("two", [300_000])])
    come: list[int] = []
    to_host = Lane.to_host

    def count(lane: Lane, tensor: torch.Tensor) -> torch.Tensor:
        come.append(tensor.numel())
        return to_host(lane, tensor)

    monkeypatch.setattr(Lane, "to_host", count)

    def body(comm: Communicator) -> None:
        twins = Twins("topk:density=0.01", layout)
        for step in range(3):
            come.clear()
            gradient = np.random.default_rng(step).standard_normal(layout.size, np.float32)
            _, stats = twins.step_there(comm, gradient, [[1], [0]])
            assert stats.selected < 0.02 * layout.size
            sample = layout.size / (layout.size // 2**17 | 1)  # tells the next threshold
            assert sum(come) <= 2 * (stats.selected + sample) + 20  # counts and sums

    run_ranks(1, body)


class Breaking(QueueRank):
    """Until the network breaks."""

    broken = False

    def send_frame(self, peer: int, frame: Bytes) -> None:
        if self.broken:
            raise CommError("no network")
        super().send_frame(peer, frame)


@pytest.mark.parametrize("granularity", ["bucket", "model"])
def test_a_step_that_fails_leaves_the_device_untouched(granularity: str) -> None:
    def body(comm: QueueRank) -> None:
        assert isinstance(comm, Breaking)
        twins = Twins(f"topk:density=0.05,granularity={granularity}")
        twins.step(comm, gradient_of(comm.rank, 0), buckets_of(0))
        before, owed = snapshot(twins.there), twins.device.read().tobytes()
        together = torch.from_numpy(gradient_of(comm.rank, 1))
        comm.broken = True
        with pytest.raises(CommError, match="no network"):
            whole_model(twins, comm, together)
        assert same_bits(together.numpy(), gradient_of(comm.rank, 1))
        assert twins.device.read().tobytes() == owed
        assert snapshot(twins.there) == before
        comm.broken = False
        twins.step(comm, gradient_of(comm.rank, 2), buckets_of(2))

    assert run_threads(2, body, Breaking) == [None, None]


def whole_model(twins: Twins, comm: Communicator, together: torch.Tensor) -> None:
    everything = range(len(LAYOUT))
    twins.device.hold(everything, LAYOUT.sizes, together)
    twins.there.begin(comm)
    twins.there.add_on_device(everything)
    twins.there.finish()


def test_a_device_that_fails_leaves_itself_untouched() -> None:
    class Full(GradientDevice):
        def strongest(self, floor: float, limits: Sequence[int]) -> Any:
            raise torch.OutOfMemoryError("full")

    def body(comm: Communicator) -> None:
        reducer, device = Reducer(LAYOUT, "topk:density=0.05"), Full(torch.device("cpu"))
        reducer.use(device)
        together = torch.from_numpy(gradient_of(0, 0))
        device.hold(range(len(LAYOUT)), LAYOUT.sizes, together)
        before = snapshot(reducer)
        reducer.begin(comm)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            reducer.add_on_device(range(len(LAYOUT)))
        assert same_bits(together.numpy(), gradient_of(0, 0))
        assert snapshot(reducer) == before

    run_ranks(1, body)


def test_what_is_owed_travels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch pins for it once stays pinned."""
    device, owed = GradientDevice(torch.device("cpu")), np.arange(1000, dtype=np.float32)
    largest = 0

    def watched(lane: Lane, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(device_module, "_PIECE", 300)
    monkeypatch.setattr(Lane, "to_host", watched)
    monkeypatch.setattr(Lane, "to_device", watched)
    device.write(owed)
    assert same_bits(device.read(), owed)
    assert largest == 300


def test_checkpoints_fit_both() -> None:
    def body(comm: Communicator) -> None:
        twins = Twins("topk:density=0.05,values=bf16")
        for step in range(3):
            twins.step(comm, gradient_of(comm.rank, step), buckets_of(step))
        crossed = Twins("topk:density=0.05,values=bf16")
        crossed.here.load_state(twins.there.state())
        crossed.there.load_state(twins.here.state())
        for step in range(3, 6):
            for each in (twins, crossed):
                each.step(comm, gradient_of(comm.rank, step), buckets_of(step))
        assert snapshot(crossed.there) == snapshot(twins.there)

    run_ranks(2, body)


def test_what_is_owed_moves_when_the_method_changes() -> None:
    """topk works on the device, arc_topk does not; bypassed steps leave what is owed alone."""

    def body(comm: Communicator) -> None:
        twins = Twins("topk:density=0.05")
        places = []
        for step, change in enumerate(["topk", "arc_topk", "bypass", "topk", "ok_topk"]):
            for reducer in (twins.here, twins.there):
                if change == "bypass":
                    reducer.bypass()
                else:
                    reducer.compress()
                    reducer.configure(method=change)
            twins.step(comm, gradient_of(comm.rank, step), buckets_of(step))
            places.append(twins.there.on_device)
        assert places == [True, False, False, True, True]
        twins.there.use(None)
        assert not twins.there.on_device
        assert snapshot(twins.there) == snapshot(twins.here)

    run_ranks(2, body)


def test_mistakes_are_named() -> None:
    def body(comm: Communicator) -> None:
        twins = Twins("topk:density=0.05")
        twins.there.begin(comm)
        with pytest.raises(ValueError, match="must stay on the device"):
            twins.there.add([0], np.zeros(37 * 23, np.float32))
        twins.here.begin(comm)
        with pytest.raises(ValueError, match="must come to main memory"):
            twins.here.add_on_device([0])
        twins.there.begin(comm)
        with pytest.raises(ValueError, match="use: a step is open"):
            twins.there.use(None)

    run_ranks(1, body)
