"""An emulated cluster: hosts as network namespaces on a switch, each link as slow as asked for.

host 0  eth0 --tbf--> \\                 every host has a link of its own, limited both ways:
        eth0 <--tbf--  \\  switch        at its end on the way up, at the switch's on the way
host 1  eth0 --tbf-->  /  in a          down; the switch is in a namespace too, so that the
        eth0 <--tbf-- /   hub            machine's own interfaces are never touched

The switch is the kernel's bridge. To hold packets back on their way it is a program of ours
(python/relay): many kernels lack netem, and one way is enough.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from topreduce.lab.network.namespaces import TOOLS, ClusterError, Helper, Namespace, tool
from topreduce.lab.network.relay import Relay
from topreduce.units import parse_rate

Kept = TypeVar("Kept", bound=Helper)
Rate = float | None  # bits per second; None: as fast as the machine

INTERFACE = "eth0"
_BUCKET_SECONDS = 1e-3  # smaller starves fast links, larger lets small messages through for free
_QUEUE_SECONDS = 50e-3
_LONGEST_FRAME = 1600  # bytes
_INSIDE = "TOPREDUCE_LAB_USER_NAMESPACE"


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a namespace, or this machine's own if None, and its interface."""

    namespace: str | None = None
    interface: str = "lo"


@dataclass(frozen=True)
class Host:
    """A host of the cluster, and the rate of its link."""

    namespace: Namespace
    address: str
    rate: Rate
    hub: Namespace
    port: str  # of the switch

    def limit(self, rate: float, delay: float) -> None:
        """Makes its link as slow as this, both ways; it may have had another rate before."""
        limit = f"root handle 1: tbf {_limit(rate, delay)}"
        self.namespace.configure("tc", [f"qdisc replace dev {INTERFACE} {limit}"])
        self.hub.configure("tc", [f"qdisc replace dev {self.port} {limit}"])

    @property
    def place(self) -> Place:
        return Place(self.namespace.path, INTERFACE)


@contextlib.contextmanager
def cluster(rates: Sequence[Rate], delay: float = 0.0) -> Iterator[list[Host]]:
    """Hosts with links of these rates; `delay`: seconds from any host to any other, one way.

    ClusterError if the machine does not allow it; `obstacle` tells beforehand.
    """
    with cluster_and_relay(rates, delay) as (hosts, _):
        yield hosts


@contextlib.contextmanager
def cluster_and_relay(
    rates: Sequence[Rate], delay: float
) -> Iterator[tuple[list[Host], Relay | None]]:
    """The same with what holds the packets back: nothing if there is no delay."""
    with contextlib.ExitStack() as stack:

        def kept(made: Kept) -> Kept:
            stack.callback(made.close)
            return made

        hub = kept(Namespace())
        hub.configure("ip", ["link set lo up"])
        if not delay:
            hub.configure("ip", ["link add bridge type bridge", "link set bridge up"])
        hosts = []
        for number, rate in enumerate(rates):
            host = Host(kept(Namespace()), f"10.77.0.{number + 1}", rate, hub, f"port{number}")
            _connect(host, delay)
            hosts.append(host)
        ports = [f"port{number}" for number in range(len(rates))]
        yield hosts, kept(Relay(hub, delay, ports)) if delay else None


def _connect(host: Host, delay: float) -> None:
    bridge, port = "" if delay else "master bridge", host.port
    host.hub.configure(
        "ip",
        [
            f"link add {port} type veth peer name {INTERFACE} netns {host.namespace.pid}",
            f"link set {port} {bridge} addrgenmode none up",
        ],
    )
    host.namespace.configure(
        "ip",
        [
            "link set lo up",
            f"link set {INTERFACE} addrgenmode none up",
            f"address add {host.address}/24 dev {INTERFACE}",
        ],
    )
    if host.rate is None:
        return
    if delay:
        host.namespace.configure("ip", _offload(host.rate))
        host.namespace.run(functools.partial(_widen, 4 * host.rate / 8 * 2 * delay))
    host.limit(host.rate, delay)


def _offload(rate: float) -> list[str]:
    """Lets TCP hand over at once what tbf need not cut: fewer packets for the relay."""
    most = int(0.9 * bucket_bytes(rate))  # without the headers of the parts
    return [f"link set {INTERFACE} gso_max_size {most}"] if 4096 <= most < 65536 else []


def _widen(buffer: float) -> None:
    """Lets TCP's buffers grow so far; where we may not, the self-test finds what it costs."""
    for name in ("tcp_wmem", "tcp_rmem"):
        file = Path("/proc/sys/net/ipv4") / name
        with contextlib.suppress(OSError):
            least, first, most = (int(word) for word in file.read_text().split())
            file.write_text(f"{least} {first} {max(most, int(buffer))}")


def bucket_bytes(rate: float) -> float:
    """What tbf lets through at once: its bucket holds one frame at least."""
    return max(_LONGEST_FRAME, rate / 8 * _BUCKET_SECONDS)


def _limit(rate: float, delay: float) -> str:
    queue = max(64 * _LONGEST_FRAME, rate / 8 * max(_QUEUE_SECONDS, 2 * delay))
    return f"rate {rate:.0f}bit burst {bucket_bytes(rate):.0f} limit {queue:.0f}"


# ---- rates in words -------------------------------------------------------------------------


def parse_rates(words: str, hosts: int) -> list[Rate]:
    """One rate for all hosts, or one for each: "100mbit", "none", "1gbit,1gbit,10mbit"."""
    rates = [parse_rate(word.strip()) for word in words.split(",")]
    if len(rates) == 1:
        return rates * hosts
    if len(rates) != hosts:
        raise ValueError(f"rate {words!r}: give one rate, or one for each of the {hosts} hosts")
    return rates


def rate_words(rate: Rate) -> str:
    """A rate for people."""
    if rate is None:
        return "unlimited"
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3))
        if rate >= factor or unit == "kb/s"
    )
    return f"{rate / factor:g} {unit}"


# ---- may we? --------------------------------------------------------------------------------


def obstacle() -> str | None:
    """Why this machine lets us build no cluster, in words; None if it does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    try:
        for name in TOOLS:
            tool(name)
        Namespace().close()
    except ClusterError as error:
        return str(error)
    return None


def become_root(module: str, arguments: Sequence[str]) -> None:
    """Without root: starts this program again in a user namespace, where we are root of our own.

    Returns if we have what we need already, or if the machine does not allow it.
    """
    if os.geteuid() == 0 or os.environ.get(_INSIDE) or not sys.platform.startswith("linux"):
        return
    try:
        unshare = tool("unshare")
    except ClusterError:
        return
    command = [unshare, "--user", "--map-root-user", "--"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        return
    os.environ[_INSIDE] = "yes"
    sys.stdout.flush()
    os.execv(unshare, [*command, sys.executable, "-m", module, *arguments])
