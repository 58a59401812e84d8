"""delay: how exact the lab's networks with a delay are, and what their relay costs.

Round trips of single bytes over an idle link; then bulk: one link alone, after its first transfer,
and all links at once, each host to the next. Needs root or a user namespace; without, it says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from topreduce.lab.network.cluster import cluster_and_relay, obstacle, parse_rates, rate_words
from topreduce.lab.network.selftest import FRAME_PER_PAYLOAD, Line

HOSTS = 4
CASES = [("100mbit", 0.015), ("1gbit", 0.015), ("100mbit", 0.001)]


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(rate_asked: str, delay: float, seconds: float, trips: int) -> Sequence[str]:
    """A row of the table."""
    rates = parse_rates(rate_asked, HOSTS)
    rate = rates[0]
    assert rate is not None
    bulk = int(rate / 8 * seconds / FRAME_PER_PAYLOAD)

    def speed(line: Line) -> float:
        return 8 * bulk * FRAME_PER_PAYLOAD / (line.send(bulk) - delay)

    with cluster_and_relay(rates, delay) as (hosts, relay):
        assert relay is not None
        ring = [Line(host, hosts[(i + 1) % HOSTS]) for i, host in enumerate(hosts)]
        found = sorted(ring[0].round_trips(trips, most_seconds=60))
        ring[0].send(bulk)
        alone = speed(ring[0])
        with ThreadPoolExecutor(HOSTS) as pool:
            list(pool.map(speed, ring))  # opens TCP's windows
            relay.late()
            used, started = processor_seconds(relay.pid), time.perf_counter()
            together = list(pool.map(speed, ring))
            share = (processor_seconds(relay.pid) - used) / (time.perf_counter() - started)
            late = relay.late()
        for line in ring:
            line.close()
    return (
        rate_words(rate),
        f"{2e3 * delay:g}",
        f"{1e3 * statistics.median(found):.2f}",
        f"{1e3 * found[int(0.99 * len(found))]:.2f}",
        f"{alone / 1e6:.1f}",
        f"{min(together) / 1e6:.1f} - {max(together) / 1e6:.1f}",
        f"{share:.0%}",
        f"{late:.2%}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a bulk transfer")
    parser.add_argument("--trips", type=int, default=200)
    asked = parser.parse_args()
    reason = obstacle()
    if reason is not None:
        print(f"delay: no network namespaces here ({reason}); skipped")
        return 0
    print(f"{HOSTS} hosts; round trips in ms, rates in Mb/s, the relay's share of one core\n")
    headings = ("rate", "trip", "median", "99 %", "one link", "all links", "relay", "late")
    print("".join(f"{heading:>14}" for heading in headings))
    for rate, delay in CASES:
        print("".join(f"{cell:>14}" for cell in measure(rate, delay, asked.seconds, asked.trips)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
