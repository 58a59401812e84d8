"""What TCP makes of the lab's links, measured with bare sockets, without a line of the library."""

from __future__ import annotations

import os
import select
import socket
import statistics
import time
from typing import Any

from topreduce.lab.network.cluster import Host, bucket_bytes, cluster

SIZES = (20_000, 60_000, 200_000)  # of a message in the races
HEADERS = (1514 + 33) / 1448  # Ethernet, IP and TCP, and half an acknowledgement
PORT = 29600
Pairs = dict[tuple[int, int], socket.socket]


def plain_tcp(count: int, rate: float, repeats: int) -> dict[str, Any]:
    """Hosts send as much to all others at once: what links of this rate would take, and what it
    took. `rate`: bits per second.

    "per_byte" is what a core does for a byte, at either end; "latency" half a round trip of a byte.
    """
    ideal = took = busy = moved = 0.0
    with cluster([rate] * count) as hosts:
        senders, receivers = _connected(hosts)
        _all_to_all(senders, receivers, max(SIZES))  # opens TCP's windows
        for size in SIZES:
            found = []
            for _ in range(repeats):
                time.sleep(0.05)  # buckets fill again
                before = _busy_seconds()
                found.append(_all_to_all(senders, receivers, size))
                busy += _busy_seconds() - before
                moved += size * len(senders)
            took += statistics.median(found)
            wire = (count - 1) * size * HEADERS
            ideal += max(0.0, 8 * (wire - bucket_bytes(rate)) / rate)
        trips = [_round_trip(senders[0, 1], receivers[0, 1]) for _ in range(50)]
        for each in (*senders.values(), *receivers.values()):
            each.close()
    return {
        "ideal": ideal, "seconds": took, "per_byte": busy / moved / 2,
        "latency": statistics.median(trips) / 2,
    }  # fmt: skip


def _connected(hosts: list[Host]) -> tuple[Pairs, Pairs]:
    senders: Pairs = {}
    receivers: Pairs = {}
    for to, host in enumerate(hosts):
        place = (host.address, PORT)
        with host.namespace.run(lambda place=place: socket.create_server(place)) as listener:
            for number, other in enumerate(hosts):
                if number == to:
                    continue
                pair = (number, to)
                senders[pair] = other.namespace.run(
                    lambda place=place: socket.create_connection(place)
                )
                receivers[pair], _ = listener.accept()
                for end in (senders[pair], receivers[pair]):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    end.setblocking(False)
    return senders, receivers


def _all_to_all(senders: Pairs, receivers: Pairs, size: int) -> float:
    """Seconds until the last byte is there. Each host begins with the next one, as ours do."""
    data, space = memoryview(bytes(size)), bytearray(1 << 20)
    files = {each.fileno(): (pair, True) for pair, each in senders.items()}
    files |= {each.fileno(): (pair, False) for pair, each in receivers.items()}
    sent, missing = dict.fromkeys(senders, 0), dict.fromkeys(receivers, size)
    ranks = max(to for _, to in senders) + 1
    with select.epoll() as poll:
        for each in receivers.values():
            poll.register(each.fileno(), select.EPOLLIN)
        started = time.perf_counter()
        for pair in sorted(senders, key=lambda pair: (pair[1] - pair[0]) % ranks):
            sent[pair] = senders[pair].send(data)
            if sent[pair] < size:
                poll.register(senders[pair].fileno(), select.EPOLLOUT)
        while missing:
            for file, _ in poll.poll():
                pair, sends = files[file]
                if sends:
                    sent[pair] += senders[pair].send(data[sent[pair] :])
                    if sent[pair] == size:
                        poll.unregister(file)
                    continue
                missing[pair] -= receivers[pair].recv_into(space)
                if not missing[pair]:
                    del missing[pair]
        return time.perf_counter() - started


def _round_trip(one: socket.socket, other: socket.socket) -> float:
    started = time.perf_counter()
    for sender, receiver in ((one, other), (other, one)):
        sender.send(b".")
        select.select([receiver], [], [])
        receiver.recv(1)
    return time.perf_counter() - started


def _busy_seconds() -> float:
    """Of all cores, since the machine started."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, interrupts, soft = map(int, file.readline().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
