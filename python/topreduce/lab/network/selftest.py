"""Is the emulated network what it says? Bulk, a small message and round trips over every link."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from topreduce.lab.network.cluster import Host, Rate, bucket_bytes, rate_words
from topreduce.lab.network.namespaces import ClusterError

TOLERANCE = 0.10
_BULK_SECONDS = 0.25
_SMALL_BUCKETS = 20  # a bucket that is too large lets most of such a message through at once
_SHORTEST_IDLE = 0.19  # seconds after which TCP keeps its window yet
_UNLIMITED_BYTES = 32 << 20
_ROUND_TRIPS = 20
_ATTEMPTS = 5  # the best counts: other work on this machine can only make a transfer slower
FRAME_PER_PAYLOAD = 1514 / 1448  # what TCP/IP over Ethernet adds
_PORT = 29400


@dataclass(frozen=True)
class LinkCheck:
    """What one host to the next was measured to do; rates in bits per second on the wire."""

    sender: int
    receiver: int
    asked: Rate
    measured: float
    small_bytes: int
    small_seconds: float
    small_expected: float | None
    round_trip: float  # of single bytes
    round_trip_expected: float

    def fault(self) -> str | None:
        """What is more than a tenth off, in words."""
        name = f"host {self.sender} to host {self.receiver}"
        expected = self.round_trip_expected
        if expected and abs(self.round_trip / expected - 1) > TOLERANCE:
            got = f"{1e3 * self.round_trip:.3g} ms"
            return f"{name}: a round trip took {got} instead of {1e3 * expected:.3g} ms"
        if self.asked is None or self.small_expected is None:
            return None
        if abs(self.measured / self.asked - 1) > TOLERANCE:
            got = rate_words(round(self.measured, -4))
            return f"{name}: a bulk transfer ran at {got} instead of {rate_words(self.asked)}"
        on_the_link = self.small_expected - self.round_trip_expected / 2
        if abs(self.small_seconds - self.small_expected) > TOLERANCE * on_the_link:
            return (
                f"{name}: {self.small_bytes / 1e3:.0f} kB took {1e3 * self.small_seconds:.1f} ms "
                f"instead of {1e3 * self.small_expected:.1f} ms"
            )
        return None


def check_links(hosts: Sequence[Host], delay: float = 0.0) -> list[LinkCheck]:
    """Measures each host to the next, so that every link is used once in each direction."""
    if len(hosts) < 2:
        return []
    return [_check(hosts, sender, (sender + 1) % len(hosts), delay) for sender in range(len(hosts))]


def refuse_if_off(checks: Sequence[LinkCheck]) -> None:
    """ClusterError if a link is not what was asked for."""
    faults = [fault for check in checks if (fault := check.fault())]
    if faults:
        raise ClusterError(
            f"the emulated network is off by more than {TOLERANCE:.0%}, so nothing measured on it "
            "would mean anything; is the machine busy, or the rate too high for it?\n  "
            + "\n  ".join(faults)
        )


def _check(hosts: Sequence[Host], sender: int, receiver: int, delay: float) -> LinkCheck:
    rates = [rate for rate in (hosts[sender].rate, hosts[receiver].rate) if rate is not None]
    asked = min(rates) if rates else None
    bulk = _UNLIMITED_BYTES if asked is None else _payload(asked, _BULK_SECONDS)
    short = 0.02 if asked is None else _SMALL_BUCKETS * 8 * bucket_bytes(asked) / asked
    small = 100_000 if asked is None else _payload(asked, short)
    with Line(hosts[sender], hosts[receiver]) as line:
        round_trip = min(line.round_trips(_ROUND_TRIPS, most_seconds=0.5))
        line.send(bulk)  # opens TCP's window
        measured, seconds = 0.0, float("inf")
        for _ in range(_ATTEMPTS):
            measured = max(measured, 8 * bulk * FRAME_PER_PAYLOAD / (line.send(bulk) - delay))
            if asked is None or abs(measured / asked - 1) <= TOLERANCE / 2:
                break
        for _ in range(_ATTEMPTS):
            time.sleep(min(2 * short, _SHORTEST_IDLE))  # the bucket fills again
            seconds = min(seconds, line.send(small))
    expected = None if asked is None else short + delay
    return LinkCheck(
        sender, receiver, asked, measured, small, seconds, expected, round_trip, 2 * delay
    )


def _payload(rate: float, seconds: float) -> int:
    return int(rate / 8 * seconds / FRAME_PER_PAYLOAD)


class Line:
    """A TCP connection from one host to another."""

    def __init__(self, sender: Host, receiver: Host) -> None:
        listener = receiver.namespace.run(lambda: socket.create_server((receiver.address, _PORT)))
        with listener:
            self._out = sender.namespace.run(
                lambda: socket.create_connection((receiver.address, _PORT), timeout=10)
            )
            self._in, _ = listener.accept()
        for end in (self._out, self._in):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(30)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def round_trips(self, most: int, most_seconds: float) -> list[float]:
        """Seconds of single bytes there and back."""
        found: list[float] = []
        while len(found) < most and (len(found) < _ATTEMPTS or sum(found) < most_seconds):
            started = time.perf_counter()
            for sender, receiver in ((self._out, self._in), (self._in, self._out)):
                sender.sendall(b".")
                if not receiver.recv(1):
                    raise ClusterError("the connection of the self-test broke")
            found.append(time.perf_counter() - started)
        return found

    def send(self, size: int) -> float:
        """Seconds from the first byte's leaving to the last one's arrival."""
        writer = threading.Thread(target=self._out.sendall, args=(bytes(size),))
        space, left = bytearray(1 << 20), size
        started = time.perf_counter()
        writer.start()
        while left:
            received = self._in.recv_into(space, min(left, len(space)))
            if not received:
                raise ClusterError("the connection of the self-test broke")
            left -= received
        seconds = time.perf_counter() - started
        writer.join()
        return seconds
