"""Transports: ranks as threads, and those that users write in Python."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from stepping import Floats, random_buckets, run_step, snapshot
from transport import Bytes, Mail, QueueRank, alone, run_threads

import topreduce
from topreduce import CommError, Communicator, Layout, Reducer, WireError, run_ranks

LAYOUT = Layout([("weight", (40, 5)), ("bias", (5,)), ("unused", (0,)), ("scale", ())])
EVERYTHING = [0, 1, 2, 3]
BUCKETS = [[3, 1], [2, 0]]
METHODS = [method["name"] for method in topreduce.methods()]


def gradient(rank: int, step: int = 0) -> Floats:
    return np.random.default_rng([rank, step]).normal(size=LAYOUT.size).astype(np.float32)


def make_reducer(method: str, granularity: str) -> Reducer:
    settings: dict[str, object] = {} if method == "dense" else {"density": 0.1}
    return Reducer(LAYOUT, method, granularity=granularity, bucket_cap_mb=0, **settings)


# ---- run_ranks ----------------------------------------------------------------------------------


def test_results_come_in_rank_order() -> None:
    assert run_ranks(5, lambda comm: (comm.rank, comm.size)) == [(r, 5) for r in range(5)]
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        run_ranks(0, lambda comm: None)


def test_an_exception_releases_the_others_and_comes_out_as_it_is() -> None:
    released: list[Exception] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("my own")
        try:
            run_step(make_reducer("topk", "model"), comm, gradient(comm.rank), [EVERYTHING])
        except CommError as error:
            released.append(error)
            raise

    with pytest.raises(KeyError, match="my own"):
        run_ranks(3, body)
    assert len(released) == 2
    assert "rank 1 has left the group" in str(released[0])


def test_two_groups_at_the_same_time() -> None:
    results: dict[int, list[bytes]] = {}

    def body(comm: Communicator) -> bytes:
        mean, _ = run_step(make_reducer("topk", "bucket"), comm, gradient(comm.rank), BUCKETS)
        return mean.tobytes()

    def start(ranks: int) -> None:
        results[ranks] = run_ranks(ranks, body)

    threads = [threading.Thread(target=start, args=(ranks,)) for ranks in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(set(results[ranks])) for ranks in (2, 3)] == [1, 1]
    assert results[2] == run_ranks(2, body)


def test_a_rank_kept_too_long_is_an_error_not_a_crash() -> None:
    kept: list[Communicator] = []
    run_ranks(2, kept.append)
    with pytest.raises(CommError, match="its run_ranks is over"):
        kept[0].all_gather(np.zeros(3, np.uint8))
    with pytest.raises(CommError, match="its run_ranks is over"):
        kept[1].barrier()


def test_collectives_from_python() -> None:
    def body(comm: Communicator) -> None:
        mine = np.full(comm.rank + 1, comm.rank, np.uint8)
        received, counts = comm.all_gather(mine)
        assert (received.tolist(), counts) == ([0, 1, 1, 2, 2, 2], [1, 2, 3])
        received, counts = comm.all_to_all(mine, [0, comm.rank, 1])
        assert (received.size, sum(counts)) == ([0, 3, 3][comm.rank], received.size)
        comm.barrier()
        assert comm.rounds == 3
        assert comm.bytes_sent == 2 * (comm.rank + 1) + comm.rank + 1 - [0, 1, 1][comm.rank]
        with pytest.raises(ValueError, match="2 counts for 3 ranks"):
            comm.all_to_all(mine, [1, 2])

    run_ranks(3, body)


WAITING = """
import threading
import numpy as np
import topreduce

ticks = 0
inside = threading.Event()
enough = threading.Event()

def tick():
    global ticks
    while not enough.is_set():
        ticks += inside.is_set()
        if ticks == 1000:
            enough.set()

def body(comm):
    reducer = topreduce.Reducer(topreduce.Layout([("a", (10,))]), "topk", granularity="{}")
    reducer.begin(comm)
    if comm.rank == 0:
        inside.set()
    else:
        assert enough.wait(60)
    reducer.add([0], np.ones(10, np.float32))
    reducer.finish()

threading.Thread(target=tick).start()
topreduce.run_ranks(2, body)
print(ticks)
"""


# In a process of its own: if the interpreter were locked, nothing could end the wait.
@pytest.mark.parametrize("granularity", ["model", "bucket"])
def test_others_run_while_a_rank_waits(granularity: str) -> None:
    command = [sys.executable, "-c", WAITING.format(granularity)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1000\n", "")


# ---- a transport written in Python --------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize("method", METHODS)
def test_it_gives_the_same_as_the_built_in(method: str, granularity: str, ranks: int) -> None:
    def body(comm: Communicator) -> list[object]:
        reducer = make_reducer(method, granularity)
        rng = np.random.default_rng(3)
        seen: list[object] = []
        for step in range(5):
            buckets = random_buckets(rng, len(LAYOUT))
            mean, stats = run_step(reducer, comm, gradient(comm.rank, step), buckets)
            told = stats.as_dict()
            del told["seconds"], told["seconds_exchanging"]
            seen += [mean.tobytes(), snapshot(reducer), told]
        return [*seen, comm.bytes_sent, comm.bytes_received, comm.rounds]

    assert run_threads(ranks, body) == run_ranks(ranks, body)


class Trouble(QueueRank):
    """Rank 0's `at`-th call goes wrong; `calls` counts from 1, and the first is to agree."""

    at = 0

    def all_to_all(self, send: Bytes, counts: Sequence[int]) -> tuple[Bytes, list[int]]:
        received, counts_received = super().all_to_all(send, counts)
        if self.rank == 0 and self.calls == self.at:
            return self.spoil(received, counts_received)
        return received, counts_received

    def spoil(self, received: Bytes, counts: list[int]) -> tuple[Bytes, list[int]]:
        raise NotImplementedError


def fail_in_third_step(
    method: str, granularity: str, call: int, kind: type[Trouble]
) -> list[Exception | None]:
    """What every rank got; checks that a rank with an error has kept its state and gradient."""

    def body(comm: QueueRank) -> Exception | None:
        reducer = make_reducer(method, granularity)
        for _ in range(2):  # before the second they agree on the order of buckets
            run_step(reducer, comm, gradient(comm.rank, 0), BUCKETS)
        before = snapshot(reducer)
        assert isinstance(comm, Trouble)
        comm.at = comm.calls + call
        parts = [gradient(comm.rank, 1)[200:], gradient(comm.rank, 1)[:200]]
        content = [part.copy() for part in parts]
        try:
            reducer.begin(comm)
            for bucket, part in zip([[1, 2, 3], [0]], parts, strict=True):
                reducer.add(bucket, part)
            reducer.finish()
        except Exception as error:
            assert snapshot(reducer) == before
            assert all(a.tobytes() == b.tobytes() for a, b in zip(parts, content, strict=True))
            with pytest.raises(ValueError, match="no step is open"):
                reducer.finish()
            return error
        return None

    outcomes = run_threads(2, body, kind)
    assert not [error for error in outcomes if isinstance(error, AssertionError)], outcomes
    return outcomes


def calls_of_a_step(method: str, granularity: str) -> int:
    """As counted in the third step of two ranks that nothing happens to."""

    def body(comm: Communicator) -> int:
        reducer = make_reducer(method, granularity)
        for _ in range(2):
            run_step(reducer, comm, gradient(comm.rank, 0), BUCKETS)
        before = comm.rounds
        run_step(reducer, comm, gradient(comm.rank, 1), [[1, 2, 3], [0]])
        return comm.rounds - before

    return run_ranks(2, body)[0]


CASES = [
    (method, granularity, call)
    for method in METHODS
    for granularity in ("model", "bucket")
    for call in range(1, calls_of_a_step(method, granularity) + 1)
]


@pytest.mark.parametrize(("method", "granularity", "call"), CASES)
class TestWhateverGoesWrong:
    def test_what_it_raises_comes_out(self, method: str, granularity: str, call: int) -> None:
        class Cut(Exception):  # noqa: N818
            pass

        class Raising(Trouble):
            def spoil(self, received: Bytes, counts: list[int]) -> tuple[Bytes, list[int]]:
                raise Cut("the cable")

        mine, other = fail_in_third_step(method, granularity, call, Raising)
        assert type(mine) is Cut
        assert str(mine) == "the cable"
        # After the very last call the other rank cannot know.
        last = call == calls_of_a_step(method, granularity)
        assert type(other) is (type(None) if last else CommError)

    def test_damaged_bytes(self, method: str, granularity: str, call: int) -> None:
        class Damaging(Trouble):
            def spoil(self, received: Bytes, counts: list[int]) -> tuple[Bytes, list[int]]:
                if not received.size:  # damage where nothing was to come is a byte that did
                    return np.zeros(1, np.uint8), [0, 1]
                received = received.copy()
                received[-1] ^= 64
                return received, counts

        mine, _ = fail_in_third_step(method, granularity, call, Damaging)
        assert type(mine) is WireError
        assert "rank 0, step 2" in str(mine)
        assert "message from rank 1" in str(mine)

    def test_nonsense(self, method: str, granularity: str, call: int) -> None:
        class Short(Trouble):
            def spoil(self, received: Bytes, counts: list[int]) -> tuple[Bytes, list[int]]:
                return received, [counts[0], counts[1] + 1]

        mine, _ = fail_in_third_step(method, granularity, call, Short)
        assert type(mine) is CommError
        assert "bytes, but counts" in str(mine)


NONSENSE: dict[str, Any] = {
    "nothing": lambda mine: None,
    "one value": lambda mine: (mine,),
    "three values": lambda mine: (mine, [mine.size], 0),
    "a list": lambda mine: [mine, [mine.size]],
    "other numbers": lambda mine: (mine.astype(np.int32), [mine.size]),
    "two dimensions": lambda mine: (mine.reshape(1, -1), [mine.size]),
    "strided": lambda mine: (np.repeat(mine, 2)[::2], [mine.size]),
    "no counts": lambda mine: (mine, None),
    "counts in words": lambda mine: (mine, ["all"]),
    "a negative count": lambda mine: (mine, [-mine.size]),
    "a huge count": lambda mine: (mine, [2**70]),
    "too few counts": lambda mine: (mine, []),
    "too many counts": lambda mine: (mine, [mine.size, 0]),
    "too few bytes": lambda mine: (mine[1:], [mine.size]),
    "less than was sent": lambda mine: (mine[1:], [mine.size - 1]),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_of_every_kind(kind: str) -> None:
    class Nonsense(QueueRank):
        def all_gather(self, mine: Bytes) -> tuple[Bytes, list[int]]:
            nonsense: tuple[Bytes, list[int]] = NONSENSE[kind](mine.copy())
            return nonsense

    with pytest.raises(CommError):
        Reducer(LAYOUT, "topk").agree(Nonsense(0, Mail(1)))


def test_a_subclass_must_be_complete() -> None:
    class Half(Communicator):
        def all_gather(self, mine: Bytes) -> tuple[Bytes, list[int]]:
            return mine.copy(), [mine.size]

    with pytest.raises(ValueError, match="the subclass must implement all_gather"):
        Reducer(LAYOUT, "topk").agree(Communicator(0, 1))
    reducer = Reducer(LAYOUT, "dense")
    reducer.begin(Half(0, 1))
    with pytest.raises(ValueError, match="rank 2 of 2 does not exist"):
        Communicator(2, 2)
    assert alone().size == 1
