"""The transport under attach(): frames over connections of its own, in real processes."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from processes import Processes, Rank, group
from ranks import scripts
from stepping import run_step

from topreduce import CommError, Layout, Reducer, WireError
from topreduce.torch import connections, process_group
from topreduce.torch.process_group import GroupCommunicator


def connect(seconds: float = 20) -> GroupCommunicator:
    world = dist.group.WORLD
    assert world is not None
    return GroupCommunicator(world, timedelta(seconds=seconds))


@contextlib.contextmanager
def raw_socket(peer: int) -> Iterator[tuple[GroupCommunicator, socket.socket]]:
    """A communicator, and below it its connection to `peer`."""
    found: list[int] = []

    def keep(*arguments: Any) -> list[int]:
        found.extend(kept(*arguments))
        return found

    kept = connections.connect
    with mock.patch.object(connections, "connect", keep):
        comm = connect()
    with socket.socket(fileno=os.dup(found[peer])) as raw:
        yield comm, raw


def frame_of(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def message(sender: int, receiver: int, length: int) -> np.ndarray:
    return np.random.default_rng([sender, receiver]).integers(0, 256, length, dtype=np.uint8)


NOTHING = np.empty(0, np.uint8)

# Bytes from each rank to each, up to three ranks: none, short, around the limit of a frame, long.
LIMIT = (1 << 20) - 64
LENGTHS = {
    "nothing": np.zeros((3, 3), int),
    "short": np.array([[3, 1, 0], [7, LIMIT, 5], [0, 0, 90_000]]),
    "a frame": LIMIT + np.arange(9).reshape(3, 3) * 8,
    "one long": np.array([[3, 1, 0], [7, 1, 5], [0, 5_000_000, 0]]),
    "long": np.array([[3, 70_000, 0], [2_000_000, 5, LIMIT], [LIMIT + 1, 1, 3_000_000]]),
}


def send_everything(rank: Rank) -> None:
    comm = connect()
    assert (comm.rank, comm.size) == (rank.rank, rank.ranks)
    for lengths in [*LENGTHS.values(), *reversed(LENGTHS.values())]:  # buffers grow and shrink
        table = lengths[: rank.ranks, : rank.ranks]
        outgoing = [message(rank.rank, to, n) for to, n in enumerate(table[rank.rank])]
        received, counts = comm.all_to_all(np.concatenate(outgoing), [len(m) for m in outgoing])
        expected = [message(sender, rank.rank, n) for sender, n in enumerate(table[:, rank.rank])]
        assert counts == [len(m) for m in expected]
        assert np.array_equal(received, np.concatenate(expected))

        own = table.diagonal()
        received, counts = comm.all_gather(message(rank.rank, 0, own[rank.rank]))
        assert counts == own.tolist()
        expected = [message(sender, 0, n) for sender, n in enumerate(own)]
        assert np.array_equal(received, np.concatenate(expected))

        root = rank.ranks - 1
        mine = message(rank.rank, 7, table[0, 1])
        comm.broadcast(mine, root)
        assert np.array_equal(mine, message(root, 7, table[0, 1]))
        comm.barrier()
    comm.concur("the same \u00e9\t\udc80")
    assert comm.ask("\x1b[2J\udc80") == [r"\x1b[2J\udc80"] * rank.ranks
    with pytest.raises(ValueError, match=r"rank 0: short; rank 1: (long){1000}"):
        comm.concur("long" * 1000 if rank.rank else "short")


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_and_empty_parts(ranks: int) -> None:
    group(ranks).run(send_everything)


def reduce_natively(rank: Rank) -> None:
    """By Gloo's own all-reduce: the same as in rank order, but for rounding."""
    comm = connect()
    gradient = np.random.default_rng(rank.rank).normal(size=5000).astype(np.float32)
    for method, density in (
        ("dense", {}),
        ("arc_topk", {"density": 0.3}),
        ("randk", {"density": 0.3}),
    ):
        means = []
        for reduce in ("ordered", "native"):
            reducer = Reducer(
                Layout([("a", [3000]), ("b", [2000])]),
                method,
                reduce=reduce,
                compare="on",
                values="fp32",
                **density,
            )
            for _ in range(3):
                mean, stats = run_step(reducer, comm, gradient, [[1], [0]])
                assert stats.bytes_sent > 0
            means.append(mean)
        np.testing.assert_allclose(means[1], means[0], rtol=1e-5, atol=1e-5)
        assert np.count_nonzero(means[1]) > 1000


def test_the_all_reduce_of_gloo() -> None:
    group(3).run(reduce_natively)


def send_in_small_frames(rank: Rank) -> None:
    """As with hundreds of ranks; heads of messages are cut by frames too."""
    before, process_group._FRAMES = process_group._FRAMES, 1
    try:
        comm = connect()
    finally:
        process_group._FRAMES = before
    for length in (1_000_000, 16_384 - 64, *range(16_384 - 60, 16_384)):
        received, _ = comm.all_gather(message(rank.rank, 0, length))
        expected = [message(sender, 0, length) for sender in range(rank.ranks)]
        assert np.array_equal(received, np.concatenate(expected))


def test_frames_of_any_length() -> None:
    group(3).run(send_in_small_frames)


def run_ahead(rank: Rank) -> None:
    """What a peer sends early waits, however much it is."""
    comm = connect()
    for turn in range(3):
        dist.barrier()
        time.sleep(0.3 * (rank.rank == turn))
        for number in range(20):
            received, _ = comm.all_gather(np.full(50_000, 10 * rank.rank + number, np.uint8))
            values = received.reshape(rank.ranks, -1)[:, 0].tolist()
            assert values == [10 * sender + number for sender in range(rank.ranks)]


def test_a_peer_that_is_ahead() -> None:
    group(3).run(run_ahead)


def send_much_then_little(rank: Rank) -> None:
    comm = connect()

    def held() -> int:
        """Bytes, of the process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    comm.all_gather(np.zeros(5_000, np.uint8))
    before = held()
    for _ in range(2):
        comm.all_gather(np.zeros(60_000_000, np.uint8))
    full = held()
    for _ in range(2):
        comm.all_gather(np.zeros(5_000, np.uint8))
        comm.trim()
    assert full - held() > 60_000_000, (before, full, held())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_of_a_large_message_is_given_back() -> None:
    group(2).run(send_much_then_little)


# ---- ranks that are elsewhere -------------------------------------------------------------------


def fall_out_of_step(rank: Rank) -> None:
    comm = connect()
    comm.enter("step", 7 + (rank.rank == 1))
    assert comm.in_step
    words = r"rank \d of 3: .*rank 0: step 7; rank 1: step 8; rank 2: step 7\. Make the same calls"
    for _ in range(3):
        with pytest.raises(ValueError, match=words):
            comm.all_gather(np.zeros(5, np.uint8))
        assert comm.in_step  # nobody got any further
        comm.enter("step", 7 + (rank.rank == 1))
    comm.enter("configure", 8)
    comm.all_gather(np.zeros(5, np.uint8))
    assert not comm.in_step

    # One that goes on by itself, from a call that the others are in.
    comm.enter("step", 9)
    if rank.rank == 1:
        comm.all_gather(np.zeros(5, np.uint8))
        comm.enter("step", 10)
        with pytest.raises(CommError, match="gave up: WireError"):
            comm.all_gather(np.zeros(5, np.uint8))
    else:

        def go_on() -> None:
            for _ in range(2):
                comm.all_gather(np.zeros(5, np.uint8))

        with pytest.raises((WireError, CommError), match=r"rank 1 has gone on to step 10") as error:
            go_on()
        comm.close(f"{type(error.value).__name__}: {error.value}")
    dist.barrier()


def test_ranks_at_different_places_are_told() -> None:
    group(3).run(fall_out_of_step)


VERSION = 5
CHECK = bytes([0x4E, 0xD3])
HEAD = b"TP" + bytes([VERSION]) + b"\1" + b"\0" * 8 + b"\1\0\0\0" + CHECK  # of a frame: attach()


def send_rubbish(rank: Rank, rubbish: bytes, words: str) -> None:
    if rank.rank == 1:
        with raw_socket(0) as (_comm, raw):
            raw.sendall(rubbish)
            dist.barrier()
    else:
        comm = connect()
        with pytest.raises(
            WireError, match=f"^rank 1 sent {words}.*; noticed by rank 0 of 2, attach"
        ) as error:
            comm.all_gather(np.zeros(5, np.uint8))
        assert str(error.value).isprintable()
        dist.barrier()


@pytest.mark.parametrize(
    ("rubbish", "words"),
    [
        (frame_of(b""), "a frame that is none of topreduce's"),
        (frame_of(b"\xff" * 20), "a frame that is none of topreduce's"),
        (frame_of(b"TP\x63\1" + b"\0" * 8 + b"\1\0\0\0\0\0"), "a frame of version 99, this is "),
        (frame_of(HEAD[:4] + b"\1" + HEAD[5:]), "a frame whose head was damaged on its way"),
        (frame_of(HEAD + b"\xff" * 30), "a message without a head"),
    ],
)
def test_a_frame_that_cannot_be_trusted(rubbish: bytes, words: str) -> None:
    group(2).run(send_rubbish, rubbish, words)


def claim_too_much(rank: Rank) -> None:
    """A length is only a claim: it takes no memory."""
    if rank.rank == 1:
        with raw_socket(0) as (comm, raw):
            raw.sendall(frame_of(HEAD + b"\1\1" + b"\xff" * 6 + b"\1" + b"and so on"))
            comm.close("that was all")
    else:
        comm = connect()
        with pytest.raises(CommError, match="that was all"):
            comm.all_gather(np.zeros(5, np.uint8))


def test_a_peer_that_claims_too_much_gets_no_memory() -> None:
    group(2).run(claim_too_much)


def claim_a_huge_frame(rank: Rank) -> None:
    if rank.rank == 1:
        with raw_socket(0) as (_comm, raw):
            raw.sendall(b"\xff\xff\xff\x7f")
            dist.barrier()
    else:
        comm = connect()
        words = "rank 1 is gone: it sent bytes that are none of topreduce's"
        with pytest.raises(CommError, match=words):
            comm.all_gather(np.zeros(5, np.uint8))
        dist.barrier()


def test_a_frame_that_is_too_large() -> None:
    group(2).run(claim_a_huge_frame)


# ---- how ranks are connected --------------------------------------------------------------------


def connect_among_strangers(rank: Rank) -> None:
    """Callers that do not know the secret are sent away, also those that say nothing."""
    ports: list[int] = []
    listen = connections._listen

    def listen_and_be_called(ranks: int) -> socket.socket:
        listener = listen(ranks)
        ports.append(listener.getsockname()[1])
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 20):
            caller = socket.create_connection(("127.0.0.1", ports[0]))
            caller.sendall(words)
            callers.append(caller)
        callers[0].shutdown(socket.SHUT_WR)
        return listener

    callers: list[socket.socket] = []
    with mock.patch.object(connections, "_listen", listen_and_be_called):
        comm = connect()
    comm.all_gather(np.zeros(5, np.uint8))
    if rank.rank == 0:
        for caller in callers:
            caller.settimeout(5)
            assert caller.recv(1) == b""
    for caller in callers:
        caller.close()


def test_strangers_are_sent_away() -> None:
    group(2).run(connect_among_strangers)


def connect_where_nobody_is(rank: Rank) -> None:
    hosts = ["127.0.0.9", "127.0.0.8"]

    def listen_elsewhere(_: int) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))

    with (
        mock.patch.object(connections, "own_hosts", return_value=hosts),
        mock.patch.object(connections, "_listen", listen_elsewhere),
        pytest.raises(CommError) as error,
    ):
        connect(3)
    if rank.rank == 1:
        assert "no connection to rank 0 (127.0.0.9 port" in str(error.value)
    else:
        assert "no connection from rank 1 in time" in str(error.value)
    assert "set GLOO_SOCKET_IFNAME" in str(error.value)


def test_addresses_that_lead_nowhere() -> None:
    group(2).run(connect_where_nobody_is)


def connect_between_machines(rank: Rank) -> None:
    """Whose names stand for 127.0.1.1, and who know nothing better."""
    with (
        mock.patch.object(connections, "own_hosts", return_value=["127.0.1.1", "127.0.0.1"]),
        mock.patch.object(connections, "_network", return_value=str(rank.rank)),
        pytest.raises(CommError) as error,
    ):
        connect(1)
    if rank.rank == 1:
        assert "rank 0 knows no address of its machine" in str(error.value)
        assert "only 127.0.1.1, 127.0.0.1" in str(error.value)
    assert "set GLOO_SOCKET_IFNAME" in str(error.value)


def test_names_that_others_cannot_reach() -> None:
    group(2).run(connect_between_machines)


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert connections.own_hosts(dist.HashStore()) == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME='nope0': there is no such network"):
        connections.own_hosts(dist.HashStore())
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert connections.own_hosts(dist.HashStore())[0] == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert "127.0.0.1" in connections.own_hosts(dist.HashStore())


# ---- ranks that leave, die or are silent --------------------------------------------------------


def leave(rank: Rank) -> None:
    comm = connect()
    if rank.rank == 1:
        comm.close("the building is on fire \udc80\x1b")
        with pytest.raises(CommError, match="closed"):
            comm.all_gather(np.zeros(5, np.uint8))
    else:
        fire = r"rank 1 gave up: the building is on fire \\udc80\\x1b"
        words = rf"{fire}.*; noticed by rank {rank.rank} of 3, attach\(\)"
        with pytest.raises(CommError, match=words):
            comm.all_gather(np.zeros(5, np.uint8))


def test_a_rank_that_leaves_says_why() -> None:
    group(3).run(leave)


def leave_while_others_wait(rank: Rank) -> float:
    """Rank 0 waits for rank 1, which computes for long, when rank 2 gives up."""
    comm = connect()
    comm.barrier()
    started = time.monotonic()
    if rank.rank == 0:
        with pytest.raises(CommError, match="rank 2 gave up: enough"):
            comm.all_gather(np.zeros(5, np.uint8))
        waited = time.monotonic() - started
        comm.close("CommError: so do I")
    elif rank.rank == 1:
        time.sleep(4)
        waited = 0.0
        with pytest.raises(CommError, match="rank 2 gave up: enough"):
            comm.all_gather(np.zeros(5, np.uint8))
    else:
        time.sleep(0.5)
        comm.close("enough")
        waited = 0.0
    return waited


def test_a_rank_that_leaves_while_another_waits_for_a_third() -> None:
    assert 0.3 < group(3).run(leave_while_others_wait)[0] < 3


def leave_with_much_to_send(rank: Rank) -> None:
    """The connection is full, so the word goes by the store."""
    if rank.rank == 0:
        with raw_socket(1) as (comm, raw):
            frames = frame_of(HEAD) * 10_000
            with contextlib.suppress(BlockingIOError):
                while raw.send(frames) == len(frames):
                    pass
            comm.close("I cannot wait")
    else:
        comm = connect()
    dist.barrier()
    if rank.rank == 1:
        with pytest.raises(CommError, match=r"rank 0 is gone: .*rank 0 gave up: I cannot wait"):
            comm.all_gather(np.zeros(5, np.uint8))


def test_a_last_word_that_finds_no_room() -> None:
    group(2).run(leave_with_much_to_send)


def leave_in_peace(rank: Rank) -> None:
    """After the last call everyone may leave at once, whether others are through or not."""
    for _ in range(20):
        comm = connect()
        comm.all_gather(np.zeros(300_000, np.uint8))
        comm.close("that was all")


def test_ranks_that_leave_do_not_disturb() -> None:
    group(3).run(leave_in_peace)


def die(rank: Rank, waits: bool) -> float:
    comm = connect(50)
    comm.barrier()
    started = time.monotonic()
    if rank.rank == 1:
        time.sleep(1.0 if waits else 0.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.0 if waits else 1.0)
    with pytest.raises(CommError, match=r"rank 1 is gone: .*it gave no reason") as error:
        comm.all_gather(np.zeros(5, np.uint8))
    comm.close(f"CommError: {error.value}")
    return time.monotonic() - started


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_dies_is_noticed(waits: bool) -> None:
    """Also by those that have sent to it before, and wait."""
    for seconds in Processes(3).run(die, waits, dying=[1]):
        assert seconds is None or seconds < 10


def pause_for_long(rank: Rank) -> None:
    """Between calls nobody waits, so nothing times out."""
    comm = connect(1)
    for step in range(3):
        comm.enter("step", step)
        comm.all_gather(np.zeros(100, np.uint8))
        time.sleep(2)
    comm.enter("step", 3)
    if rank.rank == 1:
        dist.barrier()
        comm.all_gather(np.zeros(100, np.uint8))  # it has all it needs
        with pytest.raises(CommError, match="rank 0 gave up: CommError: Timed out waiting 1000ms"):
            comm.all_gather(np.zeros(100, np.uint8))
    else:
        started = time.monotonic()
        words = (
            r"^rank 1 is silent: Timed out waiting 1000ms \(rank 1 did not come.*"
            r"; noticed by rank 0 of 2, step 3"
        )
        with pytest.raises(CommError, match=words):
            comm.all_gather(np.zeros(100, np.uint8))
        assert 1 < time.monotonic() - started < 8
        dist.barrier()


def test_a_pause_is_no_silence() -> None:
    group(2).run(pause_for_long)


def end_a_wait(rank: Rank) -> None:
    """From another thread; and by Ctrl-C."""
    comm = connect()
    if rank.rank == 0:
        threading.Timer(0.3, comm.interrupt, ["is not needed any more"]).start()
        with pytest.raises(CommError, match="rank 1 is not needed any more"):
            comm.barrier()
        again = connect()
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            again.barrier()
    else:
        again = connect()
    dist.barrier()
    again.close()


def test_a_wait_can_be_ended() -> None:
    group(2).run(end_a_wait)


# ---- the end of a process -----------------------------------------------------------------------

PROGRAM = """
import contextlib, sys, threading, time, weakref
import numpy as np, torch
import torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
import topreduce.torch
from topreduce.torch import steps
dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
ddp = DistributedDataParallel(torch.nn.Linear(3, 4))
def threads():
    names = [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    ours = [each.name for each in threading.enumerate() if each.name == "topreduce"]
    return sorted(ours + [name for name in names if "gloo" in name])
def look(before):
    if threads() != before:
        print("left:", threads(), "not", before)
weakref.finalize(dist, look, threads())  # at exit, after those that were made later
native = {"method": "randk", "reduce": "native", "density": 0.5, "warmup_steps": 0, "ramp_steps": 0}
settings = native if how == "by Gloo" else {}
sync = topreduce.torch.attach(ddp, timeout=timedelta(seconds=60), **settings)
steps._LAST_WORDS = 1.0
for _ in range(2):
    ddp(torch.ones(2, 3)).sum().backward()
if how == "detach":
    sync.detach()
    assert [t.name for t in threading.enumerate()] == ["MainThread"], threading.enumerate()
def wait():
    with contextlib.suppress(topreduce.CommError):
        sync._comm.barrier()
if how == "while it waits" and rank == 0:  # the other rank never comes
    sync._steps._tasks.put(wait)
    time.sleep(0.5)
elif how == "while it waits":
    time.sleep(6)
if how == "while it asks the store":  # that does not answer
    sync._steps._tasks.put(lambda: time.sleep(3))
print("done")
"""

ENDS = ["detach", "at once", "by Gloo", "while it waits", "while it asks the store"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_in_peace(how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    outcomes = scripts("torch").run(2, str(program), how)
    assert [(each.code, each.output) for each in outcomes] == [(0, "done\n")] * 2, outcomes
