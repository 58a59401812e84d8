"""The switch of a network with a delay: a program of ours, in the namespace of its ports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from topreduce.lab.network.namespaces import ClusterError, Helper, Namespace

_PROGRAM = Path(__file__).with_name("relay")  # python/relay/relay.cpp


class Relay(Helper):
    """Carries packets between interfaces, each held back for `delay` seconds, until `close`."""

    def __init__(self, hub: Namespace, delay: float, interfaces: Sequence[str]) -> None:
        super().__init__([*hub.inside(), str(_PROGRAM), f"{delay * 1e9:.0f}", *interfaces])

    def late(self) -> float:
        """Of the packets since the last call, the share held a tenth of the delay too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(b"late?\n")
            self._process.stdin.flush()
            packets, late = (int(word) for word in self._process.stdout.readline().split())
        except (OSError, ValueError):
            raise ClusterError("the relay between the hosts has ended") from None
        return late / max(1, packets)
