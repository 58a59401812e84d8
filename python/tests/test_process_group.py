"""The transport under attach(): bytes over a Gloo group of its own, in real processes."""

from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist
from processes import Rank, group

from topreduce import CommError, WireError
from topreduce.torch.heading import SIZE, Doing, Heading, Place
from topreduce.torch.process_group import GroupCommunicator


def connect() -> GroupCommunicator:
    world = dist.group.WORLD
    assert world is not None
    return GroupCommunicator(world, timedelta(seconds=20))


def message(sender: int, receiver: int, length: int) -> np.ndarray:
    return np.random.default_rng([sender, receiver]).integers(0, 256, length, dtype=np.uint8)


# Bytes from each rank to each, up to three ranks: none, short, at the limit of one round, long.
LIMIT = 1 << 20
LENGTHS = {
    "nothing": np.zeros((3, 3), int),
    "short": np.array([[3, 1, 0], [7, LIMIT, 5], [0, 0, 90_000]]),
    "one long": np.array([[3, 1, 0], [7, 1, 5], [0, LIMIT + 1, 0]]),
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
    comm.concur("the same \u00e9\t\udc80")
    assert comm.ask("\x1b[2J\udc80") == [r"\x1b[2J\udc80"] * rank.ranks
    with pytest.raises(ValueError, match=r"rank 0: short; rank 1: (long){1000}"):
        comm.concur("long" * 1000 if rank.rank else "short")


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_and_empty_parts(ranks: int) -> None:
    group(ranks).run(send_everything)


def count_rounds(rank: Rank) -> None:
    comm = connect()
    transfer, rounds = comm._transfer, []

    def counted(*arguments: object) -> None:
        rounds.append(1)
        transfer(*arguments)  # type: ignore[arg-type]

    comm._transfer = counted  # type: ignore[method-assign]
    comm.all_gather(np.zeros(LIMIT if rank.rank else 0, np.uint8))
    assert len(rounds) == 1
    comm.all_gather(np.zeros(LIMIT + 1 if rank.rank else 0, np.uint8))
    assert len(rounds) == 3


def test_short_messages_take_one_round() -> None:
    group(2).run(count_rounds)


def send_much_then_little(rank: Rank) -> None:
    comm = connect()
    held = []
    for length in (2_000_000, 2_000_000, 5_000, 5_000):
        comm.all_gather(np.zeros(length, np.uint8))
        comm.trim()
        # What nobody wrote to takes no memory: most of the room for what may come.
        sizes = {name: buffer.numel() for name, buffer in comm._buffers.items()}
        held.append(sum(size for name, size in sizes.items() if name != "first in"))
    assert held[0] == held[1] > 2 * rank.ranks * 2_000_000
    assert held[3] < 200_000


def test_memory_of_a_large_message_is_given_back() -> None:
    group(2).run(send_much_then_little)


def fall_out_of_step(rank: Rank) -> None:
    comm = connect()
    comm._calls += rank.rank
    with pytest.raises(WireError, match=r"out of step, by \[(0, 1|-1, 0)\] calls"):
        comm.all_gather(np.zeros(5, np.uint8))

    comm = connect()
    comm.start_step(7 + rank.rank)
    words = r"rank 0: step 7, exchange 1; rank 1: step 8, exchange 1\. Call"
    with pytest.raises(ValueError, match=words):
        comm.all_gather(np.zeros(5, np.uint8))
    assert comm.calls_in_step == 0  # nobody got any further
    comm.start_step(8)
    comm.all_gather(np.zeros(5, np.uint8))

    comm = connect()
    if rank.rank == 1:
        transfer = comm._transfer

        def damage(send: np.ndarray, *arguments: object) -> None:
            send.reshape(2, -1)[0, 40] = 0xFF  # a length of 255, more than the longest
            transfer(send, *arguments)  # type: ignore[arg-type]

        comm._transfer = damage  # type: ignore[method-assign]
        comm.all_gather(np.zeros(5, np.uint8))
    else:
        with pytest.raises(WireError, match="damaged or foreign message from rank 1"):
            comm.all_gather(np.zeros(5, np.uint8))


def test_a_heading_that_cannot_be_trusted() -> None:
    group(2).run(fall_out_of_step)


def leave(rank: Rank) -> None:
    comm = connect()
    if rank.rank == 1:
        comm.close("the building is on fire")
        with pytest.raises(CommError, match="closed"):
            comm.all_gather(np.zeros(5, np.uint8))
    else:
        with pytest.raises(CommError, match="rank 1 gave up: the building is on fire"):
            comm.all_gather(np.zeros(5, np.uint8))


def test_a_rank_that_leaves_says_why() -> None:
    group(3).run(leave)


def test_no_heading_asks_for_more_memory_than_the_model_needs() -> None:
    heading = Heading(1, Place(Doing.STEP, 1, 1), 5000, 5000)
    data = np.empty(SIZE, np.uint8)
    heading.write(data)
    assert Heading.read(data, 5000) == heading
    assert Heading.read(data, 4999) is None


def claim_too_much(rank: Rank) -> None:
    comm = connect()
    comm.all_gather(np.zeros(10, np.uint8))
    comm.most_bytes = LIMIT
    with pytest.raises(WireError, match="damaged or foreign"):
        comm.all_gather(np.zeros(2 * LIMIT if rank.rank == 1 else 10, np.uint8))


def test_a_peer_that_claims_too_much_is_refused() -> None:
    group(2).run(claim_too_much)
