"""A step of several ranks per machine.

    inside       one loss scale for the machine; ranks that have joined do not know theirs
    inside       sum over the ranks of the machine, in rank order, at its delegate     per bucket;
                 between their devices, if that is where gradients lie
    between      delegates: sum * machines / ranks, averaged by the method; they alone owe
    inside       the mean, and what the step cost, from the delegate to its machine    at the end

A step is a transaction here too: a rank that fails closes its connections, which fails its
delegate's next call, and so the other delegates' and their machines'. Nobody has committed by then.
A member that is lost after the vote misses the mean; all others have it, and stop a step later.
"""

import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from topreduce import CommError, Communicator, DriftError, Layout, Reducer, StepStats, WireError
from topreduce._core import Device
from topreduce.torch.machine_device import MachineDevice
from topreduce.torch.machines import Floats, Levels

_JOINED, _BY_PRESENT = 1, 2
_ANY = float(np.finfo(np.float32).max)


class Told:
    """What a step cost, as the delegate told its machine."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    def as_dict(self) -> dict[str, Any]:
        return self._stats


class _Part:
    """A rank's part: what delegates and members do alike.

    Settings, plan and number of the step are those of a Reducer; a delegate also averages with it.
    """

    def __init__(self, levels: Levels, layout: Layout, method: str, **settings: Any) -> None:
        self._reducer = Reducer(layout, method, **settings)
        self._levels = levels
        self._parameters = len(layout.names)
        self._bypassed = False
        self._loaded = False  # a state, since the last step or agreement
        self._scale, self._own = 1.0, np.float32(1.0)
        self._missing = 0  # parameters that the open step still waits for
        self._device: MachineDevice | None = None
        self._gradients: list[Floats | Tensor] = []
        self._added: list[int] = []  # parameters, in the order they came
        self._attendance = self._note((), "present", "ranks")
        self._fingerprint = 0  # of the parameters; 0: they are not compared in the open step
        self._seconds = 0.0  # for the open step, inside the machine
        self.compress()

    @property
    def layout(self) -> Layout:
        return self._reducer.layout

    @property
    def spec(self) -> dict[str, str]:
        return self._reducer.spec

    @property
    def step(self) -> int:
        return self._reducer.step

    @property
    def buckets(self) -> list[list[int]]:
        return self._reducer.buckets

    @property
    def density(self) -> float:
        return self._reducer.density

    @property
    def level(self) -> str:
        return self._reducer.level

    @property
    def reason(self) -> str:
        return self._reducer.reason

    @property
    def choices(self) -> str:
        return self._reducer.choices

    @property
    def stats(self) -> StepStats:
        return self._reducer.stats

    def configure(self, **changes: Any) -> None:
        self._reducer.configure(**changes)

    def commit_if(self, allows: Callable[[], bool] | None) -> None:
        self._reducer.commit_if(allows)

    def attend(self) -> bool:
        return self._reducer.attend()

    def timed(self, computed: float, waited: float) -> None:
        self._reducer.timed(computed, waited)

    # A machine that is alone has nobody to compress for: its steps are dense, whatever is asked.

    @property
    def bypassed(self) -> bool:
        return self._bypassed

    def bypass(self) -> None:
        self._reducer.bypass()
        self._bypassed = True

    def compress(self) -> None:
        if self._levels.ledgers > 1:
            self._reducer.compress()
        else:
            self._reducer.bypass()
        self._bypassed = False

    @property
    def on_device(self) -> bool:
        """Gradients are added up where they lie, wherever the delegate looks at the sums."""
        return self._device is not None

    def use(self, device: Device | None) -> None:
        assert device is None or isinstance(device, MachineDevice)
        self._device = device

    def add_on_device(self, parameters: Sequence[int], most: float = _ANY) -> None:
        """The bucket that the device holds of these parameters."""
        assert self._device is not None
        self._accept(parameters, self._device.bucket(parameters[0]), most)

    def add(self, parameters: Sequence[int], gradient: Floats, most: float = _ANY) -> None:
        self._accept(parameters, gradient, most)

    def _accept(self, parameters: Sequence[int], gradient: Floats | Tensor, most: float) -> None:
        """A gradient comes, be it in main memory or on the device."""
        self._collect(parameters, gradient)

    def begin(self, comm: Communicator, loss_scale: float = 1.0) -> None:
        self._levels.inside.start_step(self.step, after_change=self._loaded)
        self._scale = self._agree_on(loss_scale)
        self._loaded = False
        self._own = np.float32(loss_scale / self._scale if loss_scale else 1.0)
        self._missing = self._parameters
        self._gradients.clear()
        self._added.clear()
        self._attendance = self._note((), "present", "ranks")
        self._fingerprint = 0
        self._seconds = 0.0

    def verify(self, fingerprint: int) -> None:
        self._fingerprint = fingerprint

    def agree(self, comm: Communicator) -> None:
        self._reducer.agree(comm)
        self._loaded = False

    def participate(
        self, unused: Sequence[int] = (), presence: str = "present", divisor: str = "ranks"
    ) -> None:
        self._attendance |= self._note(unused, presence, divisor)

    def abandon(self) -> None:
        self._reducer.abandon()
        self._gradients.clear()

    def _note(self, unused: Sequence[int], presence: str, divisor: str) -> NDArray[np.uint8]:
        """[flags | a bit for every parameter that this rank did not use]"""
        bits = np.full(self._parameters, presence == "joined")
        bits[list(unused)] = True
        flags = _JOINED * (presence == "joined") | _BY_PRESENT * (divisor == "present")
        return np.concatenate([np.array([flags], np.uint8), np.packbits(bits)])

    def _collect(
        self, parameters: Sequence[int], gradient: Floats | Tensor
    ) -> NDArray[np.uint8] | None:
        """Adds up a bucket at the delegate; with the last one, every rank's participation."""
        started = time.perf_counter()
        inside = self._levels.inside
        self._gradients.append(gradient)
        self._added.extend(parameters)
        self._missing -= len(parameters)
        with np.errstate(all="ignore"):  # what is not finite is for the vote
            if self._own != 1:
                gradient /= self._number(self._own)
            if isinstance(gradient, Tensor):
                inside.expect_alike(gradient.numel())
                inside.devices.add_up(gradient)
            else:
                inside.add_up(gradient)
        notes = None
        if self._missing == 0:
            seen = np.array([self._fingerprint], np.uint64).view(np.uint8)
            received, _ = inside.all_gather(np.concatenate([seen, self._attendance, self._order()]))
            notes = received.reshape(inside.size, -1).copy()
            self._compare(notes[:, : seen.size])
            notes = notes[:, seen.size :]
            if len({note[-4:].tobytes() for note in notes}) > 1:
                raise WireError(
                    f"step {self.step}: the ranks of a machine hand over different parameters; all "
                    "must add the same buckets in the same order"
                )
            notes = notes[:, :-4]
            if len(set(notes[:, 0] & _BY_PRESENT)) > 1:
                raise ValueError("the ranks differ in what sums are divided by, inside a machine")
        self._seconds += time.perf_counter() - started
        return notes

    def _compare(self, seen: NDArray[np.uint8]) -> None:
        """Fingerprints of the parameters on the machine's ranks; machines compare theirs later."""
        by_rank = {tuple(each): rank for rank, each in reversed(list(enumerate(seen)))}
        if len(by_rank) > 1:
            ranks = self._levels.ranks_inside
            first, other = (ranks[place] for place in sorted(by_rank.values())[:2])
            raise DriftError(
                f"step {self.step}: the ranks have drifted apart: rank {other} has other "
                f"parameters than rank {first}, on the same machine"
            )

    def _order(self) -> NDArray[np.uint8]:
        """A fingerprint of the parameters of this step, in the order they came."""
        numbers = np.array(self._added, np.int64)
        return np.array([zlib.crc32(numbers.tobytes())], np.uint32).view(np.uint8)

    def _hand_out(self) -> None:
        """Every rank gets the delegate's gradients."""
        started = time.perf_counter()
        inside = self._levels.inside
        for gradient in self._gradients:
            if isinstance(gradient, Tensor):
                inside.devices.hand_out(gradient)
            else:
                inside.hand_out(gradient)
        self._seconds += time.perf_counter() - started

    def _rescale(self, unit: float) -> None:
        """Gradients times `unit`, from the machine's loss scale to this rank's own."""
        factor = np.float32(unit) * self._own
        if factor != 1:
            with np.errstate(all="ignore"):
                for gradient in self._gradients:
                    gradient *= self._number(factor)
        self._gradients.clear()
        if self._device is not None:
            self._device.give_back()

    def _number(self, value: np.float32) -> Any:
        """To multiply gradients by, or to divide."""
        return value if self._device is None else self._device.number(float(value))

    def _agree_on(self, loss_scale: float) -> float:
        """The largest of the machine's ranks; 0 if none of them knows it."""
        mine = np.array([loss_scale], np.float32)
        heard, _ = self._levels.inside.all_gather(mine.view(np.uint8))
        return float(heard.copy().view(np.float32).max())

    def _told(self, stats: dict[str, Any]) -> Told:
        """The machine's, with what this rank spent and sent inside it."""
        seconds = {**stats["seconds"], "inside": self._seconds}
        return Told({**stats, "bytes_inside": self._levels.inside.bytes_inside, "seconds": seconds})


class Delegate(_Part):
    """Exchanges for its machine, and owes for it: sum over the machine * machines / ranks.

    So the mean over the delegates is the mean over the ranks, also of machines of different sizes.
    """

    _lost: Exception | None = None  # what kept a member from getting the last mean

    def __init__(self, levels: Levels, layout: Layout, method: str, **settings: Any) -> None:
        self._images: list[tuple[Tensor, Tensor]] = []  # gradients, and where the core sees them
        super().__init__(levels, layout, method, **settings)

    def use(self, device: Device | None) -> None:
        self._reducer.use(device)
        super().use(device)

    def begin(self, comm: Communicator, loss_scale: float = 1.0) -> None:
        if self._lost is not None:
            raise self._lost
        super().begin(comm, loss_scale)
        self._unit = 1.0
        self._images.clear()
        self._reducer.begin(self._between, self._scale)

    def verify(self, fingerprint: int) -> None:
        super().verify(fingerprint)
        self._reducer.verify(fingerprint)

    def _accept(self, parameters: Sequence[int], gradient: Floats | Tensor, most: float) -> None:
        notes = self._collect(parameters, gradient)
        if notes is not None:
            self._attend_for_all(notes)
        divisor = np.float32(self._levels.size / self._levels.ledgers)
        if divisor != 1:
            gradient /= self._number(divisor)
        if not isinstance(gradient, Tensor):
            self._reducer.add(parameters, gradient, most)
        elif self._reducer.on_device:
            self._reducer.add_on_device(parameters, most)
        else:
            assert self._device is not None
            image = self._device.lane.to_host(gradient)
            self._images.append((gradient, image))
            self._reducer.add(parameters, image.numpy(), most)

    def finish(self) -> Told:
        stats: dict[str, Any] = dict(self._reducer.finish().as_dict())
        for gradient, image in self._images:
            gradient.copy_(image, non_blocking=True)
        self._images.clear()
        news = {"stats": stats, "next": self.step, "unit": self._unit}
        news |= {"density": self.density, "level": self.level, "reason": self.reason}
        try:
            self._levels.inside.all_gather(np.frombuffer(json.dumps(news).encode(), np.uint8))
            self._hand_out()
        except (CommError, WireError) as error:
            # All delegates have committed: this one goes along, and gives up before the next step.
            self._lost = error.with_traceback(None)
        self._rescale(self._unit)
        return self._told(stats)

    def state(self) -> dict[str, dict[str, Any]]:
        return self._reducer.state()

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        self._reducer.load_state(state)
        self._loaded = True

    def _attend_for_all(self, notes: NDArray[np.uint8]) -> None:
        """A machine used what one of its ranks used, and is present if one of them is."""
        present = int(np.count_nonzero(notes[:, 0] & _JOINED == 0))
        by_present = bool(notes[0, 0] & _BY_PRESENT)
        bits = np.unpackbits(np.bitwise_and.reduce(notes[:, 1:]), count=self._parameters)
        unused = np.flatnonzero(bits).tolist() if present else []
        if unused or not present or by_present:
            presence = "present" if present else "joined"
            divisor = "present" if by_present else "ranks"
            self._reducer.participate(unused, presence, divisor)
        if by_present:
            # The core divides by the machines that are present, and we mean ranks.
            counts, _ = self._between.all_gather(np.array([present], np.int32).view(np.uint8))
            ranks = counts.view(np.int32)
            machines = np.count_nonzero(ranks) / self._levels.ledgers
            self._unit = float(machines * self._levels.size / max(1, ranks.sum()))

    @property
    def _between(self) -> Communicator:
        assert self._levels.between is not None
        return self._levels.between


class Member(_Part):
    """Lends its delegate its gradients, and hears what became of them. It owes nothing."""

    _news: dict[str, Any] | None = None  # of the last step

    # What is found while running, the delegates find.

    @property
    def density(self) -> float:
        return float(self._found("density", super().density))

    @property
    def level(self) -> str:
        return str(self._found("level", super().level))

    @property
    def reason(self) -> str:
        return str(self._found("reason", super().reason))

    def _found(self, name: str, own: object) -> Any:
        told = self._news is not None and self.spec["density"] == "auto" and not self.bypassed
        return self._news[name] if told and self._news else own

    def finish(self) -> Told:
        heard, counts = self._levels.inside.all_gather(np.empty(0, np.uint8))
        try:
            news = json.loads(heard[: counts[0]].tobytes())
        except ValueError as error:
            raise WireError(f"step {self.step}: the delegate's message is not JSON") from error
        self._hand_out()
        self._rescale(news["unit"])
        self._reducer.skip_to(news["next"])
        self._news = news
        return self._told(news["stats"])

    def state(self) -> dict[str, dict[str, Any]]:
        return {"numbers": {"step": float(self.step)}, "parameters": {}, "entries": {}}

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        self._reducer.skip_to(int(state["numbers"]["step"]))
        self._loaded = True


def on_two_levels(
    levels: Levels, layout: Layout, method: str, settings: dict[str, Any]
) -> Delegate | Member:
    """This rank's part in averaging over machines."""
    kind = Member if levels.between is None else Delegate
    return kind(levels, layout, method, **settings)
