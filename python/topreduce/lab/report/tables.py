"""The numbers as tables, once for terminal and page: ratios always beside what they are made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from topreduce.lab.experiments.methods import AGAIN, too_short
from topreduce.lab.experiments.race import RaceRow
from topreduce.lab.experiments.train import Evaluation
from topreduce.lab.report.names import OURS, THE_LAB, maker
from topreduce.lab.report.results import Results, mean
from topreduce.lab.report.verdict import noise

_CELL = 20  # characters of a cell that stand in one line
_MOST_LATE = 0.05  # of the packets of a network with a delay
_MOST_NOISE = 0.1  # of a race whose step times are to be a clock


@dataclass(frozen=True)
class Grid:
    """A table: the first column holds names, the others numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def is_ours(row: Sequence[str]) -> bool:
    """Whether a row tells of a method of ours: its second cell says whose it is."""
    return row[1] == OURS


def grids(results: Results) -> list[Grid]:
    """All tables that the results have something for, first what the verdict is about."""
    made = []
    if results.runs:
        made.append(train_grid(results))
    if results.race:
        made.append(race_grid(results))
    if any(row.stages for row in results.race):
        made.append(stage_grid(results))
    return made


def rich_table(grid: Grid) -> Group:
    """For a terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, *cells in zip(grid.headings, *grid.rows, strict=True):
        name = heading == grid.headings[0]
        table.add_column(
            heading,
            justify="left" if name else "right",
            overflow="fold",
            min_width=min(max(map(len, cells)), _CELL),
        )
    for row in grid.rows:
        table.add_row(*row, style="bold" if is_ours(row) else None)
    return Group(Text(grid.title, style="italic"), table)


def race_grid(results: Results) -> Grid:
    first = results.race[0]
    rows = []
    for row in results.race:
        low, high = _spread(row.seconds)
        rows.append(
            [
                row.label,
                maker(row.spec),
                f"{1e3 * row.median:.0f}",
                f"{1e3 * low:.0f} - {1e3 * high:.0f}",
                f"{row.median / first.median:.2f}",
                _megabytes(row.mean_bytes),
                f"{_last_loss(row):.3f}",
            ]
        )
    notes = [
        "ms/step: median, from the first rank's start to the last rank's end. middle 80 %: in "
        f"milliseconds. times {first.label}: how many times as long as a step of {first.label}.",
        "MB/step: what a host sent at its network interface, headers included; with --local all "
        "ranks share the loopback interface, and each counts an equal part of its bytes.",
        "training loss: in the last steps of the race. It says nothing about trainings: a race is "
        "short and has no warm-up, and methods that find their density have made more steps."
        if results.workload.get("compute") is None
        else "Ranks wait instead of computing, and their gradients are noise: no loss.",
    ]
    raced = {row.label for row in results.race}
    if unraced := [label for label in results.labels() if label not in raced]:
        notes.append(f"Not raced, as most of their steps send nothing: {', '.join(unraced)}.")
    if results.delay:
        notes.append(_delay_words(results))
    if any(AGAIN in row.label for row in results.race):
        notes.append("The A/A row is the first method a second time: what it differs by is noise.")
    return Grid(
        f"Step time ({results.network}, {first.parameters:,} parameters)",
        [
            "method",
            "by",
            "ms/step",
            "middle 80 %",
            f"times {first.label}",
            "MB/step",
            "training loss",
        ],
        rows,
        notes,
    )


def stage_grid(results: Results) -> Grid:
    """Where the time of our methods goes: a column for each."""
    ours = [row for row in results.race if row.stages]
    rows = [
        [stage, *(f"{1e3 * row.stages[stage]:.1f} ms" for row in ours)] for stage in ours[0].stages
    ]
    rows += [
        ["waited", *(f"{1e3 * row.stats['seconds_waited']:.1f} ms" for row in ours)],
        ["hidden", *(_percent(row.stats.get("hidden", 0.0)) for row in ours)],
        ["rounds", *(f"{row.stats['rounds']:.1f}" for row in ours)],
        *(
            [["level", *(row.level or "as set" for row in ours)]]
            if any(r.level for r in ours)
            else []
        ),
        ["sent", *(_percent(row.stats["selected"] / row.stats["entries"]) for row in ours)],
        ["energy", *(_percent(row.stats["kept_energy"]) for row in ours)],
    ]
    return Grid(
        "Our methods by stage, means over the steps",
        ["stage", *(row.label for row in ours)],
        rows,
        [
            "look: a pass over gradient and what is owed. choose: which entries to send. pack: "
            "they become bytes. network: messages are under way. unpack: bytes become sums. "
            "commit: the mean goes to the gradients, the rest to what is owed.",
            "Stages run beside the backward pass. waited: how long backward() had to wait for them "
            "in the end. hidden: share of the time of exchanges before the last gradient.",
            "rounds: how often messages went out and were waited for, in all exchanges and the "
            "vote. level: the density that was found, or the format if everything is sent. sent: "
            "share of the entries. energy: 1 - the squared norm of what a step did not settle, "
            "divided by that of owed + gradient.",
        ],
    )


def train_grid(results: Results) -> Grid:
    losses = {run.seed: results.target(run.seed) for run in results.runs}
    rows = []
    first = results.labels()[0]
    reference: dict[int, Evaluation] = {}
    for label in results.labels():
        runs = results.runs_of(label)
        reached = {
            run.seed: evaluation
            for run in runs
            if (loss := losses[run.seed]) is not None and (evaluation := run.reached(loss))
        }
        reference = reference or reached
        everyone = len(reached) == len(runs)
        ratios = [
            reference[seed].seconds / each.seconds
            for seed, each in reached.items()
            if seed in reference and each.seconds
        ]
        found = list(reached.values())
        rows.append(
            [
                label,
                maker(runs[0].spec),
                _over(found, everyone, [_seconds(each.seconds) for each in found]),
                _range(ratios) if everyone and ratios else "-",
                _over(found, everyone, [_megabytes(each.bytes_sent) for each in found]),
                _over(found, everyone, [str(each.step) for each in found]),
                str(max(run.evaluations[-1].step for run in runs)),
                f"{mean([run.final_loss for run in runs]):.3f}",
                _step_milliseconds([run.seconds for run in runs if run.seconds]),
            ]
        )
    again = any(label.endswith(AGAIN) for label in results.labels())
    aims = " / ".join(f"{loss:.3f}" for loss in losses.values() if loss is not None)
    clock = (
        "Trained without the limit; a step takes what it took in the race, more where it "
        f"sent more (a ramp, an averaging step).{_noise_words(results)}"
        if results.clock == "race"
        else "Seconds are real ones; evaluations do not count."
    )
    notes = [
        _aim_words(results, aims) + " A dash: not reached.",
        clock,
        f"seconds, MB and steps to the loss: until it was reached. times as fast: seconds of "
        f"{first}, divided by those of this method. steps in all, loss at the end: of the whole "
        "training, which may go on after the loss was reached. "
        + (
            "There is a number for each seed, or their mean; of times as fast also the smallest "
            "and the largest."
            if len(losses) > 1
            else "One seed: differences below about 15 % may be luck."
        ),
        "The A/A row of the race shows the noise of a step"
        + ("; here it is dense with other weights and batches." if again else "."),
    ]
    if any(maker(run.spec) == THE_LAB for run in results.runs):
        notes.append(f"by {THE_LAB}: not a part of PyTorch, but written here after its paper.")
    notes += _short_words(results)
    aim = f" to a loss of {aims}" if aims else ""
    return Grid(
        f"Training{aim} ({results.network})",
        [
            "method",
            "by",
            "seconds to the loss",
            f"times as fast as {first}",
            "MB to the loss",
            "steps to the loss",
            "steps in all",
            "loss at the end",
            "ms/step",
        ],
        rows,
        notes,
    )


def _delay_words(results: Results) -> str:
    words = f"Every packet is held back for {1e3 * results.delay:g} ms on its way"
    if results.late <= _MOST_LATE:
        return f"{words}; {_percent(results.late)} came a tenth of that too late."
    return (
        f"{words}; {_percent(results.late)} came a tenth of that too late: the machine is too busy "
        "for this delay, or the relay may not run in real time, which takes root."
    )


def _aim_words(results: Results, aims: str) -> str:
    if not aims:
        return "No loss to reach: dense was not among the methods, and --target-loss not given."
    where = " (where dense ended)" if results.target_loss is None else ""
    return f"The loss to reach, on held-out data: {aims}{where}."


def _short_words(results: Results) -> list[str]:
    runs = [results.runs_of(label)[0] for label in results.labels()]
    words = [too_short(run.label, run.spec, run.evaluations[-1].step) for run in runs]
    return [each for each in words if each]


def _noise_words(results: Results) -> str:
    """A warning if the race was too noisy for a clock."""
    ratio = noise(results.race)
    if ratio is None or abs(ratio - 1) <= _MOST_NOISE:
        return ""
    return f" Its A/A row is {ratio:.2f}: take more --rounds, or a calmer machine."


def _step_milliseconds(trainings: Sequence[Sequence[float]]) -> str:
    """One that began at the loss to reach has no step."""
    medians = [statistics.median(seconds) for seconds in trainings]
    return f"{1e3 * mean(medians):.0f}" if medians else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def _last_loss(row: RaceRow) -> float:
    """Mean over the end of the race: one batch alone says little."""
    return mean(row.losses[-4:])


def _over(found: Sequence[Evaluation], everyone: bool, words: Sequence[str]) -> str:
    return " / ".join(words) if found and everyone else "-"


def _range(numbers: Sequence[float]) -> str:
    middle = f"{mean(numbers):.2f}"
    return middle if len(numbers) == 1 else f"{middle} ({min(numbers):.2f} - {max(numbers):.2f})"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3f}" if count < 1e7 else f"{count / 1e6:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _spread(numbers: Sequence[float]) -> tuple[float, float]:
    if len(numbers) < 2:
        return numbers[0], numbers[0]
    tenths = statistics.quantiles(numbers, n=10, method="inclusive")
    return tenths[0], tenths[-1]
