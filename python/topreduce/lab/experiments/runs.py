"""A race or a training from start to end: network, self-test, ranks, progress, results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from topreduce.lab.experiments.clock import as_found, on_the_clock_of
from topreduce.lab.experiments.launch import launch
from topreduce.lab.experiments.methods import Method, parse_methods, too_short
from topreduce.lab.experiments.progress import progress
from topreduce.lab.experiments.race import (
    RaceOptions,
    RaceRow,
    Turn,
    race_rank,
    race_rows,
    with_again,
)
from topreduce.lab.experiments.train import (
    REFERENCE,
    Progress,
    TrainOptions,
    TrainRun,
    in_order,
    train_rank,
)
from topreduce.lab.network.cluster import Host, Place, Rate, cluster_and_relay, obstacle, rate_words
from topreduce.lab.network.namespaces import ClusterError
from topreduce.lab.network.relay import Relay
from topreduce.lab.network.selftest import LinkCheck, check_links, refuse_if_off
from topreduce.lab.report.results import RESULTS, Results, save
from topreduce.lab.tasks.models import backends


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network that is asked for."""

    rates: Sequence[Rate]
    delay: float = 0.0  # seconds from any host to any other, one way
    kind: str = "cluster"  # or "local": processes that share this machine's loopback interface
    shards: int = 1  # ranks on each host
    later: Sequence[Sequence[float]] = ()  # rates that follow in the course of a race

    @property
    def hosts(self) -> int:
        return len(self.rates)

    @property
    def ranks(self) -> int:
        return self.hosts * self.shards

    def words(self) -> str:
        if self.kind == "local":
            return f"{self.ranks} local processes, unlimited"
        names = [rate_words(rate) for rate in self.rates]
        rates = names[0] if len(set(names)) == 1 else ", ".join(names)
        for after in self.later:
            rates += f", then {', '.join(dict.fromkeys(map(rate_words, after)))}"
        delay = f", {1e3 * self.delay:g} ms one way" if self.delay else ""
        shards = f" with {self.shards} shards each" if self.shards > 1 else ""
        return f"{self.hosts} hosts{shards} at {rates}{delay}"

    def unlimited(self) -> Network:
        return dataclasses.replace(self, rates=[None] * self.hosts, delay=0.0, later=())


@dataclass(frozen=True)
class Built:
    """Where the ranks run, what the self-test measured, and what holds packets back."""

    places: list[Place] | None = None
    checks: Sequence[LinkCheck] = ()
    relay: Relay | None = None
    hosts: Sequence[Host] = ()

    def late(self) -> float:
        """The share of packets, since the last call, that the machine was too busy to pass on."""
        return self.relay.late() if self.relay else 0.0


@contextlib.contextmanager
def built(console: Console, network: Network) -> Iterator[Built]:
    """The network; ClusterError if the self-test finds it off."""
    if network.kind == "local":
        yield Built()
        return
    if (reason := obstacle()) is not None:
        raise ClusterError(
            f"no emulated network here: {reason}\n"
            "It needs root, or a system that allows user namespaces (unshare -Urn true), and the "
            "packages iproute2 and util-linux. With --local ranks are plain processes of this "
            "machine on an unlimited network."
        )
    with cluster_and_relay(network.rates, network.delay) as (hosts, relay):
        checks: list[LinkCheck] = []
        if network.delay or any(rate is not None for rate in network.rates):
            console.print(f"network: {network.words()}; checking its links", highlight=False)
            checks = check_links(hosts, network.delay)
            refuse_if_off(checks)
        if checks:
            slowest = min(checks, key=lambda check: check.measured)
            longest = max(check.round_trip for check in checks)
            console.print(
                f"  slowest {slowest.measured / 1e6:.4g} Mb/s; {slowest.small_bytes / 1e3:.0f} kB "
                f"in {1e3 * slowest.small_seconds:.1f} ms; longest round trip "
                f"{1e3 * longest:.2f} ms",
                highlight=False,
                style="dim",
            )
        places = [host.place for host in hosts for _ in range(network.shards)]
        made = Built(places, checks, relay, hosts)
        made.late()  # what comes from here on counts
        yield made


def race(console: Console, network: Network, options: RaceOptions, command: str) -> Results:
    """Runs a race."""
    with built(console, network) as made:
        rows = _race(console, network, options, made)
        late = made.late()
    return Results(
        command=command,
        ranks=network.ranks,
        network=network.words(),
        delay=network.delay,
        late=late,
        workload=asdict(options.workload),
        links=[asdict(check) for check in made.checks],
        race=rows,
    )


def train(
    console: Console,
    network: Network,
    options: TrainOptions,
    clock: str,
    rounds: int,
    command: str,
    folder: Path,
) -> Results:
    """Runs a short race, for step times and their noise, then the trainings.

    Every one of them is saved in `folder` as it ends: a run of hours may be cut short.
    """
    if options.seconds is None:
        for method in options.methods:
            if told := too_short(method.label, method.spec, options.steps):
                console.print(told, style="bold", highlight=False)
    load = options.workload
    options = dataclasses.replace(options, workload=dataclasses.replace(load, compute=None))
    racing = RaceOptions(
        workload=load,
        methods=_racing_methods(options.methods),
        rounds=rounds,
        from_the_start=clock == "race",
    )

    def so_far(runs: list[TrainRun]) -> Results:
        return Results(
            command=command,
            ranks=network.ranks,
            network=network.words(),
            delay=network.delay,
            late=late,
            workload=asdict(load),
            clock=clock,
            links=[asdict(check) for check in slow.checks],
            race=rows,
            runs=on_the_clock_of(rows, runs) if clock == "race" else runs,
            target_loss=options.target_loss,
            seconds=options.seconds,
        )

    def next_run(runs: list[TrainRun]) -> None:
        save(so_far(runs), folder / RESULTS)

    with built(console, network) as slow:
        rows = _race(console, network, racing, slow)
        late = slow.late()
        if clock == "real":
            runs = _train(console, network, options, slow.places, next_run)
            late = max(late, slow.late())
    if clock == "race":
        options = dataclasses.replace(options, methods=as_found(options.methods, rows))
        with built(console, network.unlimited()) as fast:
            runs = _train(console, network, options, fast.places, next_run)
    return so_far(runs)


def _racing_methods(methods: Sequence[Method]) -> list[Method]:
    """What the race before a training compares: with the two ends of the scale."""
    ends = [each for each in parse_methods("noop,dense") if each not in methods]
    others = [each for each in methods if not each.is_local]
    return with_again(sorted([*ends, *others], key=lambda each: each.spec != "noop"))


def _race(console: Console, network: Network, options: RaceOptions, made: Built) -> list[RaceRow]:
    labels = [method.label for method in options.methods]
    phases = len(network.later) + 1
    starts = [options.rounds * phase // phases for phase in range(1, phases)]  # rounds done
    waiting = list(zip(starts, network.later, strict=True))
    with progress(console, labels, options.rounds, "rounds") as advance:

        def show(turn: Turn) -> None:
            advance(turn.label, turn.round, f"{1e3 * turn.seconds:.0f} ms")
            if waiting and turn.round >= waiting[0][0]:
                for host, rate in zip(made.hosts, waiting.pop(0)[1], strict=True):
                    host.limit(rate, network.delay)

        backend = backends(options.workload)
        ranks = launch(race_rank, network.ranks, options, show, made.places, backend)
    return race_rows(options, ranks)


def _train(
    console: Console,
    network: Network,
    options: TrainOptions,
    places: list[Place] | None,
    next_run: Callable[[list[TrainRun]], None],
) -> list[TrainRun]:
    seeds = range(options.workload.seed, options.workload.seed + options.seeds)
    labels = {
        (method.label, seed): f"{method.label}, seed {seed}" if options.seeds > 1 else method.label
        for seed in seeds
        for method in in_order(options)
    }
    runs: list[TrainRun] = []
    with progress(console, list(labels.values()), 100, "%") as advance:

        def show(news: Progress | TrainRun) -> None:
            if isinstance(news, TrainRun):
                runs.append(news)
                if news.label == REFERENCE and options.target_loss is None:
                    ended = f"{labels[news.label, news.seed]} ended at a loss of"
                    goal = f"{ended} {news.final_loss:.3f}: the loss to reach"
                    console.print(goal, highlight=False, soft_wrap=True)
                return next_run(runs)
            done = min(100, int(100 * news.share))
            label = labels[news.label, news.seed]
            words = [f"step {news.step}", f"loss {news.loss:.2f}", news.reached]
            advance(label, done, ", ".join(filter(None, words)))

        launch(train_rank, network.ranks, options, show, places)
    return runs
