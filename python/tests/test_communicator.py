"""Transports: ranks as threads, and those that users write in Python."""

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from stepping import Floats, random_buckets, run_step, snapshot
from transport import STEP, Bytes, Mail, QueueRank, alone, place_of, run_threads

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
    return Reducer(LAYOUT, method, granularity=granularity, **settings)


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
        assert (comm.rounds, comm.messages) == (3, 6)
        payload = 2 * (comm.rank + 1) + comm.rank + 1 - [0, 1, 1][comm.rank]
        heads = 2 * 18 + 6 * (5 + 1 + 1 + 5)  # of the first frames, and of messages
        assert comm.bytes_sent == payload + heads
        root = np.full(5, comm.rank, np.uint8)
        comm.broadcast(root, 2)
        assert root.tolist() == [2] * 5
        with pytest.raises(ValueError, match="root 3 is not a rank"):
            comm.broadcast(root, 3)
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
        return [*seen, comm.bytes_sent, comm.bytes_received, comm.messages, comm.rounds]

    assert run_threads(ranks, body) == run_ranks(ranks, body)


class Trouble(QueueRank):
    """Of the frames of step 1 that rank 0 gets, the `at`-th goes wrong; counted from 1."""

    def __init__(self, rank: int, mail: Mail) -> None:
        super().__init__(rank, mail)
        self.at: int | None = None  # not yet in step 1
        self.frames = 0  # of step 1 that came
        self.sent = 0
        self._in_step_one = False  # the peer, with its last frame
        self._sends_step_one = False
        self._early: list[tuple[int, Bytes]] = []

    def send_frame(self, peer: int, frame: Bytes) -> None:
        place = place_of(frame)
        self._sends_step_one = self._sends_step_one if place is None else place == (STEP, 1)
        self.sent += self._sends_step_one
        super().send_frame(peer, frame)

    def receive_frames(self) -> None:
        if self.at is not None:
            while self._early:
                self.accept(*self._early.pop(0))
        super().receive_frames()

    def accept(self, peer: int, frame: Bytes) -> None:
        place = place_of(frame)
        self._in_step_one = self._in_step_one if place is None else place == (STEP, 1)
        if self._in_step_one and self.at is None:
            return self._early.append((peer, frame))
        if self._in_step_one:
            self.frames += 1
            if self.rank == 0 and self.frames == self.at:
                frame = self.spoil(frame.copy())
        super().accept(peer, frame)

    def spoil(self, frame: Bytes) -> Bytes:
        return frame


def fail_in_second_step(
    method: str, granularity: str, number: int, kind: type[Trouble]
) -> tuple[Exception, Exception | None] | None:
    """What both ranks got, or None if rank 0 got fewer frames than `number`. Checks that a rank
    with an error has kept its state and gradient, and that the other has none only after the very
    last frame: it may have all it needs then, and cannot know."""

    def body(comm: QueueRank) -> Exception | None:
        reducer = make_reducer(method, granularity)
        run_step(reducer, comm, gradient(comm.rank, 0), BUCKETS)
        before = snapshot(reducer)
        assert isinstance(comm, Trouble)
        comm.at = number
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
        assert comm.rank == 1 or comm.frames < number
        assert comm.rank == 0 or comm.sent <= number
        return None

    mine, other = run_threads(2, body, kind)
    assert not isinstance(mine, AssertionError), mine
    assert not isinstance(other, AssertionError), other
    assert mine is not None or other is None
    return None if mine is None else (mine, other)


def outcomes(
    method: str, granularity: str, kind: type[Trouble]
) -> Iterator[tuple[Exception, Exception | None]]:
    """With trouble in the first frame, in the second and so on. How many there are is chance:
    messages that are ready together share one."""
    for number in itertools.count(1):
        outcome = fail_in_second_step(method, granularity, number, kind)
        if outcome is None:
            assert number > 1
            return
        yield outcome


@pytest.mark.parametrize("granularity", ["model", "bucket"])
@pytest.mark.parametrize("method", METHODS)
class TestWhateverGoesWrong:
    def test_what_it_raises_comes_out(self, method: str, granularity: str) -> None:
        class Cut(Exception):  # noqa: N818
            pass

        class Raising(Trouble):
            def spoil(self, frame: Bytes) -> Bytes:
                raise Cut("the cable")

        for mine, other in outcomes(method, granularity, Raising):
            assert type(mine) is Cut
            assert str(mine) == "the cable"
            assert other is None or type(other) is CommError

    def test_damaged_bytes(self, method: str, granularity: str) -> None:
        class Damaging(Trouble):
            def spoil(self, frame: Bytes) -> Bytes:
                frame[-1] ^= 64
                return frame

        for mine, _ in outcomes(method, granularity, Damaging):
            assert type(mine) is WireError
            assert "rank 0, step 1" in str(mine)
            assert re.search("message from rank 1|the vote of rank 1", str(mine)), mine

    def test_nonsense(self, method: str, granularity: str) -> None:
        class Short(Trouble):
            def spoil(self, frame: Bytes) -> Bytes:
                frame[0] ^= 1
                return frame[:10]

        for mine, _ in outcomes(method, granularity, Short):
            assert type(mine) is WireError
            assert str(mine).startswith("rank 0, step 1, ")
            assert str(mine).endswith(": rank 1 sent a frame that is none of topreduce's")


def test_what_is_ready_together_travels_together() -> None:
    layout = Layout([(f"p{i}", (300,)) for i in range(40)])

    def body(comm: QueueRank) -> list[int]:
        assert isinstance(comm, Trouble)
        reducer = Reducer(layout, "topk:density=0.1", bucket_cap_mb=1e-3)
        for seconds in (0.004, 0.0):
            comm.at = 0
            reducer.begin(comm)
            for p in reversed(range(40)):
                reducer.add([p], np.full(300, p, np.float32))
                time.sleep(seconds)
            messages = reducer.finish().messages
        return [messages, comm.sent]

    for messages, frames in run_threads(2, body, Trouble):
        assert messages >= 40
        assert frames < messages / 2  # the first step had taken long


NONSENSE: dict[str, Any] = {
    "nothing": None,
    "a list": [1, 2, 3],
    "other numbers": np.zeros(20, np.int32),
    "two dimensions": np.zeros((4, 5), np.uint8),
    "strided": np.zeros(40, np.uint8)[::2],
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_frame_is_an_array_of_bytes(kind: str) -> None:
    comm = Communicator(0, 2)
    with pytest.raises(TypeError):
        comm.accept(1, NONSENSE[kind])


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_frames_come_from_peers(peer: int) -> None:
    comm = Communicator(0, 2)
    words = f"rank {peer} is no peer of rank 0 of 2"
    with pytest.raises(ValueError, match=words):
        comm.accept(peer, np.zeros(20, np.uint8))
    with pytest.raises(ValueError, match=words):
        comm.lose(peer, "has gone")


def test_a_subclass_must_be_complete() -> None:
    with pytest.raises(ValueError, match="the subclass must implement send_frame"):
        Reducer(LAYOUT, "topk").agree(Communicator(0, 2))
    Reducer(LAYOUT, "topk").agree(Communicator(0, 1))  # nothing to send
    with pytest.raises(ValueError, match="rank 2 of 2 does not exist"):
        Communicator(2, 2)
    with pytest.raises(ValueError, match="frames must have more than 18 bytes, not at most 18"):
        Communicator(0, 2, 18)
    assert alone().size == 1


class SmallFrames(QueueRank):
    def __init__(self, rank: int, mail: Mail) -> None:
        Communicator.__init__(self, rank, mail.ranks, 19)
        self._mail = mail


class FromThread(QueueRank):
    """Frames are passed on by whoever sends them."""

    everyone: ClassVar[dict[tuple[Mail, int], "FromThread"]] = {}
    receive_frames = Communicator.receive_frames

    def __init__(self, rank: int, mail: Mail) -> None:
        super().__init__(rank, mail)
        self.everyone[mail, rank] = self
        while len([1 for each, _ in self.everyone if each is mail]) < mail.ranks:
            time.sleep(0.001)

    def send_frame(self, peer: int, frame: Bytes) -> None:
        self.everyone[self._mail, peer].accept(self.rank, frame)


@pytest.mark.parametrize("kind", [SmallFrames, FromThread])
def test_other_ways_to_bring_frames(kind: type[QueueRank]) -> None:
    def body(comm: Communicator) -> list[bytes]:
        reducer = make_reducer("topk", "bucket")
        means = [run_step(reducer, comm, gradient(comm.rank, s), BUCKETS)[0] for s in range(3)]
        return [mean.tobytes() for mean in means]

    assert run_threads(3, body, kind) == run_ranks(3, body)


# ---- places of the program ----------------------------------------------------------------------


def test_ranks_at_different_places_are_told_and_go_on() -> None:
    def body(comm: QueueRank) -> str:
        calls = ["bypass", "resume", "configure"]
        comm.enter(calls[comm.rank], 3)
        with pytest.raises(ValueError, match="different places") as error:
            comm.barrier()
        assert comm.in_step
        comm.enter("step", 3)
        comm.barrier()
        assert not comm.in_step
        with pytest.raises(ValueError, match="there is no call 'tea'"):
            comm.enter("tea")
        return str(error.value)

    by_rank = (
        r"rank 0: bypass() before step 3; rank 1: resume() before step 3; "
        r"rank 2: configure() before step 3. Make the same calls"
    )
    for rank, text in enumerate(run_threads(3, body)):
        assert isinstance(text, str), text
        assert text.startswith(f"rank {rank}: the ranks are at") and by_rank in text


def test_a_step_that_one_rank_drops() -> None:
    """Before it has sent anything nobody notices; after that it is told of."""

    def body(comm: QueueRank) -> Exception | None:
        reducer = make_reducer("topk", "bucket")
        for step in range(2):  # and the ranks agree on an order
            run_step(reducer, comm, gradient(comm.rank, step), BUCKETS)
        if comm.rank == 1:
            reducer.begin(comm)
            reducer.abandon()
            assert comm.in_step
        run_step(reducer, comm, gradient(comm.rank, 2), BUCKETS)
        reducer.begin(comm)
        reducer.add(EVERYTHING, gradient(comm.rank, 3))
        assert not comm.in_step
        try:
            if comm.rank == 1:
                reducer.abandon()
                reducer.begin(comm)
                reducer.add(EVERYTHING, gradient(comm.rank, 3))
            reducer.finish()
        except (CommError, WireError) as error:
            return error
        return None

    mine, other = run_threads(2, body)
    assert type(mine) is WireError
    assert str(mine).startswith("rank 0, step 3, ")  # in an exchange, or in the vote
    assert str(mine).endswith(": rank 1 has gone on to step 3")
    assert type(other) is CommError


def test_errors_use_the_names_that_ranks_were_given() -> None:
    comm = QueueRank(0, Mail(2))
    with pytest.raises(ValueError, match="1 names for 2 ranks"):
        comm.set_names("rank 5 of 8", [5])
    comm.set_names("rank 5 of 8", [5, 7], all_hear=False)
    comm.lose(1, "has gone fishing")
    with pytest.raises(CommError, match="rank 5 of 8, before its first call: rank 7 has gone fish"):
        comm.barrier()
