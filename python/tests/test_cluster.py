"""The emulated cluster: rates, delay, the self-test, and that nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from topreduce.lab.experiments.launch import RankError, launch
from topreduce.lab.experiments.race import begin_together
from topreduce.lab.network import cluster as emulated
from topreduce.lab.network.cluster import (
    Host,
    cluster,
    cluster_and_relay,
    obstacle,
    parse_rates,
    rate_words,
)
from topreduce.lab.network.namespaces import ClusterError, Namespace, bytes_through
from topreduce.lab.network.relay import Relay
from topreduce.lab.network.selftest import LinkCheck, check_links, refuse_if_off

needs_cluster = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "processes are left behind"
        time.sleep(0.05)


# ---- rates ----------------------------------------------------------------------------------


def test_rates_are_read() -> None:
    assert parse_rates("100mbit", 2) == [1e8, 1e8]
    assert parse_rates("none", 3) == [None] * 3
    assert parse_rates("1gbit, 2.5mbit,none", 3) == [1e9, 2.5e6, None]


@pytest.mark.parametrize("wrong", ["fast", "100", "0mbit", "1mbit,1mbit", "", "-1mbit"])
def test_wrong_rates_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rates(wrong, 3)


def test_rates_in_words() -> None:
    assert [rate_words(rate) for rate in (None, 1e9, 2.5e6, 500.0)] == [
        "unlimited",
        "1 Gb/s",
        "2.5 Mb/s",
        "0.5 kb/s",
    ]


# ---- the self-test --------------------------------------------------------------------------


def check(measured: float, small_seconds: float, trip: float = 1e-4, delay: float = 0) -> LinkCheck:
    expected = 0.02 + delay
    return LinkCheck(0, 1, 1e8, measured, 240_000, small_seconds, expected, trip, 2 * delay)


def test_a_link_may_be_a_tenth_off() -> None:
    refuse_if_off([check(0.92e8, 0.0215), check(1.08e8, 0.0185)])
    refuse_if_off([check(1e8, 0.0365, 0.0329, 0.015), check(1e8, 0.0335, 0.0271, 0.015)])
    refuse_if_off([LinkCheck(0, 1, None, 5e9, 100_000, 1e-4, None, 1e-4, 0.0)])


@pytest.mark.parametrize(
    ("measured", "small", "words"),
    [(0.8e8, 0.02, "bulk"), (1.2e8, 0.02, "bulk"), (1e8, 0.015, "240 kB"), (1e8, 0.03, "240 kB")],
)
def test_a_link_that_is_off_stops_everything(measured: float, small: float, words: str) -> None:
    with pytest.raises(ClusterError, match=f"10%.*\n.*host 0 to host 1: .*{words}"):
        refuse_if_off([check(1e8, 0.02), check(measured, small)])


@pytest.mark.parametrize(
    ("small", "trip", "words"),
    [
        (0.035, 0.034, "round trip took 34 ms instead of 30 ms"),
        (0.035, 0.015, "round trip took 15 ms"),
        (0.0379, 0.03, "240 kB took 37.9 ms instead of 35.0 ms"),
    ],
)
def test_a_delay_that_is_off_stops_everything(small: float, trip: float, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        refuse_if_off([check(1e8, small, trip, 0.015)])


def test_a_delay_is_checked_without_a_rate_too() -> None:
    with pytest.raises(ClusterError, match="round trip"):
        refuse_if_off([LinkCheck(0, 1, None, 5e9, 100_000, 1e-4, None, 0.02, 0.03)])


@needs_cluster
def test_a_bucket_that_is_too_large_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "_limit", lambda *_: "rate 2mbit burst 40000 limit 300000")
    with cluster([2e6, 2e6]) as hosts:
        checks = check_links(hosts)
    # 32 kB are to take 128 ms and take less than one: a busy machine does not hide that.
    assert all(each.small_seconds < 0.5 * (each.small_expected or 0) for each in checks), checks
    with pytest.raises(ClusterError, match="is off by more than 10%"):
        refuse_if_off(checks)


# ---- the network ----------------------------------------------------------------------------


@needs_cluster
def test_links_are_never_faster_than_asked_for() -> None:
    with cluster([None, 8e6, 4e6]) as hosts:
        speeds = [each.measured for each in check_links(hosts)]
    assert speeds[0] < 1.1 * 8e6, "the way down to host 1"
    assert speeds[1] < 1.1 * 4e6, "the way up of host 1, and down to host 2"
    assert speeds[2] < 1.1 * 4e6, "the way up of host 2"


@needs_cluster
def test_the_machines_own_interfaces_are_not_touched() -> None:
    before = interfaces()
    with cluster([None, 1e8]) as hosts:
        assert interfaces() == before
        assert hosts[0].namespace.run(interfaces) == {"lo", "eth0"}
        pids = [host.namespace.pid for host in hosts]
    assert interfaces() == before
    assert_gone(pids)


@needs_cluster
def test_an_error_takes_the_hosts_away() -> None:
    made: list[Host] = []

    def fail() -> None:
        with cluster([1e8] * 3) as hosts:
            made.extend(hosts)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_gone([host.namespace.pid for host in made])


KILLED = """
import time
from topreduce.lab.network.cluster import cluster_and_relay
with cluster_and_relay([1e8, 1e8], delay=0.01) as (hosts, relay):
    print(relay.pid, *[host.namespace.pid for host in hosts], flush=True)
    time.sleep(300)
"""


@needs_cluster
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_hosts_end_with_the_process_that_made_them(how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 3
    process.send_signal(how)
    process.wait(60)
    process.stdout.close()
    assert_gone(pids)


# ---- the delay ------------------------------------------------------------------------------


def held_back(hosts: list[Host], delay: float) -> list[LinkCheck]:
    checks = check_links(hosts, delay)
    assert all(each.round_trip >= 2 * delay for each in checks), checks
    assert all(each.small_seconds >= delay for each in checks), checks
    return checks


@needs_cluster
def test_every_packet_is_held_back_and_rates_stay() -> None:
    with cluster_and_relay([None, 8e6, 4e6], delay=0.02) as (hosts, relay):
        assert hosts[0].namespace.run(interfaces) == {"lo", "eth0"}
        speeds = [each.measured for each in held_back(hosts, 0.02)]
        assert relay is not None
        assert 0 <= relay.late() <= 1
    assert all(speed < 1.1 * rate for speed, rate in zip(speeds, (8e6, 4e6, 4e6), strict=True))


@pytest.mark.long
@needs_cluster
def test_a_delay_needs_no_root_of_the_machine() -> None:
    program = (
        "from test_cluster import held_back\n"
        "from topreduce.lab.network.cluster import cluster\n"
        "with cluster([None, 1e8], 0.02) as hosts: held_back(hosts, 0.02)"
    )
    command = ["unshare", "--user", "--map-root-user", "--", sys.executable, "-c", program]
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=paths)
    assert done.returncode == 0, done.stderr


@needs_cluster
def test_what_is_held_back_arrives_as_it_was() -> None:
    """From all hosts to each: what one sends at once is cut, or not, on its way to a slow one."""
    sent = [os.urandom(2_000_000 + number) for number in range(3)]
    with cluster([None, 1e9, 1e8], delay=0.003) as hosts:
        for receiver in hosts:
            listener = receiver.namespace.run(
                lambda place=receiver: socket.create_server((place.address, 29500))
            )
            with listener, ThreadPoolExecutor() as pool:
                for host, data in zip(hosts, sent, strict=True):
                    pool.submit(host.namespace.run, lambda d=data, to=receiver: deliver(to, d))
                arrived = list(pool.map(receive, [listener.accept()[0] for _ in hosts]))
            assert sorted(arrived, key=len) == sent


def deliver(receiver: Host, data: bytes) -> None:
    with socket.create_connection((receiver.address, 29500), timeout=60) as connection:
        connection.sendall(data)


def receive(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    with connection, connection.makefile("rb") as file:
        return file.read()


@needs_cluster
def test_a_relay_that_cannot_work_or_has_ended_is_told() -> None:
    hub = Namespace()
    try:
        with pytest.raises(ClusterError, match="nowhere0"):
            Relay(hub, 0.01, ["nowhere0"])
    finally:
        hub.close()
    with cluster_and_relay([None, None], delay=0.01) as (_, relay):
        assert relay is not None
        os.kill(relay.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="has ended"):
            relay.late()


# ---- ranks on hosts -------------------------------------------------------------------------


def add_up(
    rank: int, world_size: int, how: str, report: Callable[[int], None]
) -> tuple[float, int]:
    numbers = torch.full((250_000,), float(rank + 1))
    dist.all_reduce(numbers)
    if how == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return numbers[0].item(), bytes_through("eth0")[0]


def meet(rank: int, world_size: int, tries: int, report: Callable[[int], None]) -> list[float]:
    times = []
    for _ in range(tries):
        begin_together()
        times.append(time.monotonic())
    return times


@needs_cluster
def test_steps_begin_together_in_spite_of_a_delay() -> None:
    """A barrier lets two of three ranks go about a delay later than the first."""
    with cluster([None] * 3, delay=0.03) as hosts:
        ranks = launch(meet, 3, 5, places=[host.place for host in hosts])
    # The quietest try: a busy machine can only make some of them late.
    assert min(max(times) - min(times) for times in zip(*ranks, strict=True)) < 0.01


@needs_cluster
def test_ranks_talk_over_their_hosts_interfaces() -> None:
    with cluster([None, None]) as hosts:
        places = [host.place for host in hosts]
        results = launch(add_up, 2, "well", places=places)
        assert [sum_ for sum_, _ in results] == [3.0, 3.0]
        assert all(sent > 1_000_000 for _, sent in results), "a ring sends 1 MB"
        with pytest.raises(RankError, match="SIGKILL"):
            launch(add_up, 2, "die", places=places)
    assert_gone([host.namespace.pid for host in hosts])
