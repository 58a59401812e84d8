"""Laws over models, methods, ranks and cuts that nobody thought of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepping import Floats, flat_owed, random_buckets, run_step, snapshot
from transport import AGREE, STEP, Bytes, Mail, QueueRank, place_of, run_threads, start_of

import topreduce
from topreduce import CommError, Communicator, Layout, Reducer, WireError, run_ranks

METHODS = [method["name"] for method in topreduce.methods()]
SHAPES = st.sampled_from([(), (0,), (1,), (2, 0), (7,), (3, 5), (40,), (8, 17)])
quickly = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow], database=None
)


@dataclass
class Case:
    """A run to try; the same on all ranks."""

    shapes: list[tuple[int, ...]]
    ranks: int
    method: str
    settings: dict[str, Any]
    steps: int
    seed: int

    @property
    def layout(self) -> Layout:
        return Layout([(f"p{i}", shape) for i, shape in enumerate(self.shapes)])

    def reducer(self) -> Reducer:
        return Reducer(self.layout, self.method, bucket_cap_mb=0, **self.settings)

    def gradients(self, rank: int) -> list[Floats]:
        """Small integers, many of them zero, of a scale that jumps: every sum is exact."""
        rng = np.random.default_rng([self.seed, rank])
        n = self.layout.size
        return [
            (rng.integers(-9, 10, n) * rng.integers(0, 2, n) * 4 ** rng.integers(0, 4)).astype(
                np.float32
            )
            for _ in range(self.steps)
        ]

    def run(self, cut_seed: int) -> list[tuple[list[Floats], Reducer]]:
        """Every rank's means and, at the end, its reducer."""

        def body(comm: Communicator) -> tuple[list[Floats], Reducer]:
            rng = np.random.default_rng(cut_seed)
            reducer = self.reducer()
            means = [
                run_step(reducer, comm, mine, random_buckets(rng, len(self.shapes)))[0]
                for mine in self.gradients(comm.rank)
            ]
            return means, reducer

        return run_ranks(self.ranks, body)


@st.composite
def cases(draw: st.DrawFn, ranks: tuple[int, int] = (1, 4)) -> Case:
    method = draw(st.sampled_from(METHODS))
    chosen = {
        "granularity": draw(st.sampled_from(["model", "bucket"])),
        "values": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "feedback": "residual",
        "warmup_steps": draw(st.integers(0, 2)),
        "ramp_steps": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**50)),
    }
    if method != "dense":
        chosen["density"] = draw(st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.99, 1]))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    if draw(st.booleans()):
        chosen["keep_dense"] = f"p{draw(st.integers(0, len(shapes) - 1))}"
    return Case(
        shapes=shapes,
        ranks=draw(st.integers(*ranks)),
        method=method,
        settings=chosen,
        steps=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 10**6)),
    )


@quickly
@given(cases(), st.integers(0, 100))
def test_nothing_is_lost_and_all_ranks_are_alike(case: Case, cut: int) -> None:
    case.settings.pop("keep_dense", None)  # what is sent whole has no memory for its rounding
    results = case.run(cut)
    means = results[0][0]
    for others, _ in results[1:]:
        assert [mean.tobytes() for mean in others] == [mean.tobytes() for mean in means]
    fed = sum(sum(case.gradients(rank)) for rank in range(case.ranks))
    applied = sum(np.rint(mean.astype(np.float64) * case.ranks) for mean in means)
    owed = sum(flat_owed(reducer).astype(np.float64) for _, reducer in results)
    assert np.array_equal(fed, applied + owed)


@quickly
@given(cases(), st.integers(0, 100), st.integers(101, 200))
def test_the_cut_does_not_matter(case: Case, cut: int, other_cut: int) -> None:
    for one, other in zip(case.run(cut), case.run(other_cut), strict=True):
        assert [mean.tobytes() for mean in one[0]] == [mean.tobytes() for mean in other[0]]
        assert snapshot(one[1]) == snapshot(other[1])


@quickly
@given(cases(), st.integers(0, 100))
def test_a_state_survives_the_round_trip(case: Case, cut: int) -> None:
    for _, reducer in case.run(cut):
        second = case.reducer()
        second.load_state(reducer.state())
        assert snapshot(second) == snapshot(reducer)
        second.load_state(second.state())
        assert snapshot(second) == snapshot(reducer)


# ---- messages ------------------------------------------------------------------------------------

flips = st.builds(
    lambda place, mask: lambda message: flip(message, place, mask),
    st.integers(0, 10**6),
    st.integers(1, 255),
)
cuts = st.builds(lambda n: lambda message: message[: -n or None], st.integers(1, 60))
additions = st.builds(lambda extra: lambda message: message + extra, st.binary(min_size=1))
replacements = st.builds(lambda other: lambda message: other, st.binary(max_size=200))
shifts = st.just(lambda message: message[1:] + b"\0")
mutations = st.one_of(flips, cuts, additions, replacements, shifts)


def flip(message: bytes, place: int, mask: int) -> bytes:
    place %= len(message)
    return message[:place] + bytes([message[place] ^ mask]) + message[place + 1 :]


class Damaging(QueueRank):
    """On rank 0, one message from the last rank is not what was sent."""

    mutate: Callable[[bytes], bytes]
    kind = STEP  # of the place where that happens
    at = 0  # which frame; its first message
    frames = 0
    _is_there = False

    def accept(self, peer: int, frame: Bytes) -> None:
        if self.rank == 0 and peer == self.size - 1:
            place = place_of(frame)
            self._is_there = self._is_there if place is None else place[0] == self.kind
            self.frames += self._is_there
            if self._is_there and self.frames == self.at:
                frame = np.frombuffer(self._damage(frame.tobytes(), start_of(frame)), np.uint8)
        super().accept(peer, frame)

    def _damage(self, frame: bytes, start: int) -> bytes:
        ends = [i for i in range(start, len(frame)) if frame[i] < 128][:3]  # of three numbers
        number, length = frame[ends[1] + 1 : ends[2] + 1], 0
        for place, byte in enumerate(number):
            length |= (byte & 127) << 7 * place
        message, rest = frame[ends[2] + 1 :][:length], frame[ends[2] + 1 + length :]
        mutated = self.mutate(message) if message else b"?"
        assert mutated != message
        number = b""
        length = len(mutated)
        while length >= 128:
            number += bytes([length & 127 | 128])
            length >>= 7
        return frame[: ends[1] + 1] + number + bytes([length]) + mutated + rest


@quickly
@given(cases(ranks=(2, 3)), st.integers(0, 3), mutations)
def test_a_damaged_message_is_an_error(
    case: Case, call: int, mutate: Callable[[bytes], bytes]
) -> None:
    def make(rank: int, mail: Mail) -> Damaging:
        comm = Damaging(rank, mail)
        comm.mutate, comm.at = mutate, 1 + call
        return comm

    def body(comm: QueueRank) -> bool:
        assert isinstance(comm, Damaging)
        reducer = case.reducer()
        reducer.agree(comm)
        before = snapshot(reducer)
        buckets = [range(len(case.shapes))]
        try:
            run_step(reducer, comm, case.gradients(comm.rank)[0], buckets)
        except (CommError, WireError):
            assert snapshot(reducer) == before
            return True
        return comm.frames < comm.at  # the step had fewer frames than that

    outcomes = run_threads(case.ranks, body, make)
    assert outcomes[0] is True, outcomes
    assert all(isinstance(outcome, bool) for outcome in outcomes), outcomes


@quickly
@given(st.one_of(flips, additions, replacements, shifts))
def test_a_damaged_agreement_is_an_error(mutate: Callable[[bytes], bytes]) -> None:
    def make(rank: int, mail: Mail) -> Damaging:
        comm = Damaging(rank, mail)
        comm.mutate, comm.at, comm.kind = mutate, 1, AGREE
        return comm

    def body(comm: QueueRank) -> None:
        Reducer(Layout([("weight", (3,))]), "topk").agree(comm)

    mine, other = run_threads(2, body, make)
    assert isinstance(mine, (ValueError, CommError, WireError)), mine
    assert other is None
