"""The report: opened in a real browser, which measures what it has drawn."""

import html
import io
import json
import math
import re
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from topreduce.lab.experiments.methods import too_short
from topreduce.lab.experiments.race import STAGES, RaceRow
from topreduce.lab.experiments.runs import Network
from topreduce.lab.experiments.train import Evaluation, TrainRun
from topreduce.lab.report import page as report
from topreduce.lab.report.markdown import markdown
from topreduce.lab.report.names import in_words, maker
from topreduce.lab.report.plot import best_settings, loss_plot
from topreduce.lab.report.results import Results, load, named, save
from topreduce.lab.report.svg import Bar, Series, bar_chart, line_chart
from topreduce.lab.report.tables import grids, rich_table
from topreduce.lab.report.verdict import verdict

BROWSER = "chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1000,3600",
]

# What the browser found: texts outside of their picture, texts on top of each other, lines and
# bars of no size, colours that a chart or its legend has and the other has not, a page wider than
# the window, colours of text and paper.
MEASURE = """
<script>
const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1
  && a.bottom <= b.bottom + 1;
const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1
  && b.top < a.bottom - 1;
const found = {charts: 0, outside: [], overlapping: [], empty: 0, lines: 0, bars: 0, legends: 0,
  unnamed: [], absent: []};
for (const chart of document.querySelectorAll("svg")) {
  found.charts += 1;
  const frame = chart.getBoundingClientRect();
  const texts = [...chart.querySelectorAll("text")].map(t => [t.textContent,
    t.getBoundingClientRect()]);
  for (const [words, box] of texts) if (!inside(box, frame)) found.outside.push(words);
  texts.forEach(([words, box], i) => texts.slice(i + 1).forEach(([others, other]) => {
    if (over(box, other)) found.overlapping.push(words + " / " + others);
  }));
  for (const line of chart.querySelectorAll("path.line")) {
    found.lines += 1;
    if (!(line.getTotalLength() > 0)) found.empty += 1;
  }
  found.bars += chart.querySelectorAll("rect").length;
  const named = new Set();
  for (let next = chart.nextElementSibling; next && next.matches(".legend");
      next = next.nextElementSibling) {
    found.legends += 1;
    for (const swatch of next.querySelectorAll("i"))
      named.add(getComputedStyle(swatch).borderTopColor);
  }
  const lines = [...chart.querySelectorAll("path.line")].map(line => getComputedStyle(line).stroke);
  const bars = [...chart.querySelectorAll("rect.fill")];
  const drawn = new Set([...lines, ...bars.map(bar => getComputedStyle(bar).fill)]);
  const seen = new Set([...lines, ...bars.filter(bar => bar.getAttribute("width") >= 1).map(
    bar => getComputedStyle(bar).fill)]);
  if (named.size) {
    found.unnamed.push(...[...seen].filter(colour => !named.has(colour)));
    found.absent.push(...[...named].filter(colour => !drawn.has(colour)));
  }
}
found.wide = document.documentElement.scrollWidth > window.innerWidth;
found.loaded = performance.getEntriesByType("resource").length;
found.ink = getComputedStyle(document.body).color;
found.paper = getComputedStyle(document.body).backgroundColor;
const note = document.createElement("pre");
note.id = "found";
note.textContent = JSON.stringify(found);
document.body.append(note);
</script>
"""


def row(label: str, seconds: float, sent: float, ours: str = "") -> RaceRow:
    stats = dict.fromkeys(("selected", "entries", "rounds", "kept_energy"), 2.0)
    return RaceRow(
        label=label,
        spec=label.removesuffix(" (A/A)"),
        parameters=10_700_000,
        seconds=[seconds, 1.1 * seconds, 0.9 * seconds],
        bytes_sent=[sent] * 3,
        losses=[3.0, 2.9, 2.8],
        stages=dict.fromkeys(STAGES, 0.004) if ours else {},
        stats={**stats, "seconds_waited": 0.01} if ours else {},
    )


def run(label: str, seed: int, speed: float, ours: str = "") -> TrainRun:
    steps = 60
    values = [0.01 + 1 / (step + 1) for step in range(steps)] if ours else []
    return TrainRun(
        label=label,
        spec=label,
        seed=seed,
        parameters=10_700_000,
        seconds=[speed] * steps,
        bytes_sent=[1e6 * speed] * steps,
        losses=[3.0] * steps,
        density=values,
        kept_energy=values,
        owed_norm=values,
        evaluations=[
            Evaluation(step, step * speed, 1e6 * step * speed, 4.2 - step / 40 + 0.01 * seed)
            for step in range(0, steps + 1, 10)
        ],
        sample="To be <b>& not to be</b>" if ours else "",
    )


LONG = "ok_topk:density=0.01,values=bf16,granularity=model"


@pytest.fixture
def results() -> Results:
    return Results(
        command="topreduce lab train --methods '<all>'",
        ranks=4,
        network="4 hosts at 100 Mb/s",
        workload={"model": "gpt:10m", "batch": 4},
        clock="race",
        race=[
            row("noop", 0.42, 0.0),
            row("noop (A/A)", 0.43, 0.0),
            row("dense", 5.4, 65e6),
            row(LONG, 0.46, 4e5, "ours"),
        ],
        runs=[
            *(run("dense", seed, 5.4) for seed in range(3)),
            *(run(LONG, seed, 0.5, "ours") for seed in range(3)),
        ],
    )


def test_results_survive_the_round_trip(results: Results, tmp_path: Path) -> None:
    save(results, tmp_path / "results.json")
    assert load(tmp_path / "results.json") == results


def test_every_ratio_stands_beside_what_it_is_made_of(results: Results) -> None:
    training, race, _ = grids(results)
    assert list(race.rows[3]) == [LONG, "topreduce", "460", "423 - 497", "1.10", "0.400", "2.900"]
    assert list(race.rows[1])[:3] == ["noop (A/A)", "-", "430"]
    ours = dict(zip(training.headings, training.rows[1], strict=True))
    assert ours["method"] == LONG
    assert ours["seconds to the loss"] == "30 / 30 / 30"
    assert ours["times as fast as dense"] == "10.80 (10.80 - 10.80)"
    assert ours["steps to the loss"] == "60 / 60 / 60"
    assert (ours["steps in all"], ours["loss at the end"]) == ("60", "2.710")
    assert training.title == "Training to a loss of 2.700 / 2.710 / 2.720 (4 hosts at 100 Mb/s)"


def test_every_heading_is_explained(results: Results) -> None:
    training, race, stages = grids(results)
    for grid, plain in ((training, {"method", "by", "ms/step"}), (race, {"method", "by"})):
        notes = " ".join(grid.notes)
        for heading in {*grid.headings} - plain:
            first, _, of = heading.partition(" to ")
            word = re.escape(first.removesuffix(" as dense"))
            assert re.search(rf"(?<!\w){word}(?!\w)", notes), heading
            assert not of or "to the loss: " in notes
    notes = " ".join(stages.notes)
    for row in stages.rows:
        assert re.search(rf"\b{row[0]}(, unpack)?: ", notes), row[0]


def test_whose_a_method_is_stands_beside_it(results: Results) -> None:
    labels = ["noop", "dense", "powersgd:4", "diloco:30", "topreduce.dense", "auto", "a: topk"]
    specs = [label.removeprefix("a: ") for label in labels]
    makers = ["-", "PyTorch", "PyTorch", "the lab", *["topreduce"] * 3]
    assert [maker(spec) for spec in specs] == makers
    runs = [
        replace(run(label, 0, 1.0), spec=spec) for label, spec in zip(labels, specs, strict=True)
    ]
    rows = [
        replace(row(label, 1.0, 1e6), spec=spec) for label, spec in zip(labels, specs, strict=True)
    ]
    shown = replace(results, runs=runs, race=rows)
    for grid in grids(shown):
        assert [(each[0], each[1]) for each in grid.rows] == list(zip(labels, makers, strict=True))
    page = report.page([shown])
    assert page.count('<tr class="ours">') == 2 * 3, "in both tables"
    assert len(re.findall(r'<path class="line s\d ours"', page)) == 2 * 3, (
        "in both charts of losses"
    )
    assert len(re.findall(r'<text class="name"', page)) == 2 * 3, "in both charts of steps"
    (first, *_) = re.findall(r'<ul class="legend">.*?</ul>', page)
    assert re.findall(r"</i>(.*?)</li>", first) == labels[4:]
    assert first.startswith('<ul class="legend"><li><b>topreduce</b></li>')
    console = Console(width=110, file=io.StringIO(), force_terminal=True)
    console.print(rich_table(grids(shown)[0]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    bold = [any(re.search(rf"\x1b\[1m{label} *\x1b", line) for line in lines) for label in labels]
    assert bold == [made == "topreduce" for made in makers]


def test_the_answer_comes_first(results: Results) -> None:
    worth = verdict(results)
    assert worth == (
        f"Worth it, 10.8 times as fast as dense: {LONG} reaches a loss of 2.710 in 30 s, "
        "dense 324 s."
    )
    assert report.page([results]).index(worth) < report.page([results]).index("<svg")

    race = replace(results, runs=[])
    step = f"a step with {LONG} takes 460 ms, dense 5.4 s"
    assert verdict(race) == f"Worth it, 11.7 times as fast as dense: {step}."
    rows = {each.label: each for each in race.race}
    quick = row("bf16", 0.3, 3e7)
    assert verdict(replace(race, race=[*race.race, quick])) == (
        f"Not worth it, 11.7 times as fast as dense, but not the best: {step}; bf16, the best of "
        "the others, 300 ms."
    )
    near = row("bf16", 0.47, 3e7)
    assert verdict(replace(race, race=[*race.race, near])).startswith("No clear gain over bf16, ")
    restless = replace(rows["noop (A/A)"], seconds=[0.55] * 3)
    rough = [rows["noop"], restless, rows["dense"], rows[LONG], row("bf16", 0.55, 3e7)]
    told = verdict(replace(race, race=rough))
    assert told.startswith("No clear gain over bf16, ") and told.endswith(" A/A 1.31.")
    slow = replace(rows[LONG], seconds=[5.39] * 3)
    calm = [rows["noop"], replace(rows["noop (A/A)"], seconds=[0.42] * 3), rows["dense"], slow]
    assert verdict(replace(race, race=calm)).startswith("Not worth it: a step with ")
    noisy = replace(rows["noop (A/A)"], seconds=[0.5] * 3)
    slow = replace(rows[LONG], seconds=[5.0] * 3)
    told = verdict(replace(race, race=[rows["noop"], noisy, rows["dense"], slow]))
    assert told.startswith("Too noisy to tell: ") and "(A/A 1.19)" in told
    assert verdict(replace(race, race=race.race[:2])) == ""

    never = [replace(each, evaluations=each.evaluations[:2]) for each in results.runs_of(LONG)]
    late = replace(results, runs=[*results.runs_of("dense"), *never])
    assert verdict(late) == f"Not worth it: {LONG} did not reach a loss of 2.710."
    assert verdict(replace(results, runs=results.runs_of(LONG))) == "", "there is no loss to reach"


def test_a_training_that_is_too_short_says_so(results: Results) -> None:
    (note,) = (each for each in grids(results)[0].notes if "warm-up" in each)
    assert note.startswith(f"{LONG}: 60 steps of training, of which 110 are warm-up and ramp")
    for even in ("topreduce.dense", "powersgd:1"):  # they send as much in every step
        assert not too_short(even, even, 60)
    enough = [replace(each, spec=f"{LONG},ramp_steps=50") for each in results.runs]
    assert not any("warm-up" in each for each in grids(replace(results, runs=enough))[0].notes)


def test_bars_end_where_their_words_say(results: Results) -> None:
    """Stages that run beside the backward pass do not make a step longer than it was."""
    page = report.page([results])
    chart = page[page.index("milliseconds per step") :]
    chart = chart[: chart.index("</svg>")]
    ends = {
        y: float(x) + float(width)
        for x, y, width in re.findall(
            r'<rect [^>]*x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', chart
        )
    }
    words = [float(x) for x in re.findall(r'x="([\d.]+)"[^>]*text-anchor="start"', chart)]
    assert len(ends) == len(words) == 4
    assert all(
        x - end == pytest.approx(8, abs=0.3) for end, x in zip(ends.values(), words, strict=True)
    )


def test_a_logarithmic_axis_has_points_and_no_bars() -> None:
    bars = [Bar("a", [(0, 1.0)], "1"), Bar("b", [(0, 100.0)], "100")]
    chart = bar_chart("x", bars, "log")
    assert "<rect" not in chart
    first, second = (float(x) for x in re.findall(r'<circle [^>]*cx="([\d.]+)"', chart))
    assert first < second


def test_the_loss_to_reach_is_a_line() -> None:
    points = [(0.0, 4.0), (10.0, 2.0)]
    chart = line_chart(
        "x", "y", [Series("s", points, 0)], "linear", levels=[("to reach: 1.5", 1.5)]
    )
    assert "to reach: 1.5" in chart
    (y,) = re.findall(r'class="level" d="M[\d.]+ ([\d.]+)H', chart)
    (last,) = re.findall(r'class="line s0" d="M.*L[\d.]+ ([\d.]+)"', chart)
    assert float(y) > float(last), "below the lowest point"


def test_the_page_draws_how_a_density_was_found(results: Results) -> None:
    steps = [0.03] * 5 + [0.2] * 5 + [0.06] * 50
    auto = replace(
        row("auto", 0.43, 1e6, "ours"),
        densities=steps,
        waiting=[density / 2 for density in steps],
        level="0.06",
        reason="settled: waits 3 % of a step",
    )
    searched = replace(results, race=[*results.race, auto])
    shown = report.page([searched])
    assert "How the density was found" in shown
    assert "auto: 0.06; settled: waits 3 % of a step." in shown
    assert "part of the step that was waited against step of the race" in shown
    *_, stages = grids(searched)
    assert ["level", "as set", "0.06"] in [list(each) for each in stages.rows]
    assert "How the density was found" not in report.page([results])


def test_networks_that_change_say_so() -> None:
    words = Network(rates=[1e9] * 2, later=[[1e8] * 2, [1e9, 5e8]]).words()
    assert words == "2 hosts at 1 Gb/s, then 100 Mb/s, then 1 Gb/s, 500 Mb/s"


def test_tables_and_page_name_the_delay(results: Results) -> None:
    words = Network(rates=[1e8] * 4, delay=0.015).words()
    assert words == "4 hosts at 100 Mb/s, 15 ms one way"
    delayed = replace(results, network=words, delay=0.015, late=0.001)
    training, race, _ = grids(delayed)
    assert words in race.title and words in training.title
    assert any("held back for 15 ms" in note and "0.1 %" in note for note in race.notes)
    assert not any("too busy" in note for note in race.notes)
    assert any("too busy" in note for note in grids(replace(delayed, late=0.2))[1].notes)
    assert not any("held back" in note for note in grids(results)[1].notes)
    assert words in report.page([delayed])


def test_zero_is_the_left_edge_of_a_logarithmic_axis() -> None:
    chart = line_chart("x", "y", [Series("s", [(0.0, 1.0), (10.0, 2.0), (100.0, 3.0)], 0)], "log")
    (path,) = re.findall(r'class="line s0" d="M([^"]*)"', chart)
    places = [float(point.split()[0]) for point in path.split("L")]
    assert len(places) == 3
    assert places[0] < places[1] < places[2]
    assert line_chart("x", "y", [Series("s", [(0.0, 1.0)], 0)], "log") == ""


def test_charts_leave_out_what_has_no_place() -> None:
    points = [(0.0, 1.0), (1.0, float("nan")), (10.0, 2.0), (100.0, 3.0)]
    assert line_chart("x", "y", [Series("s", points, 0)], "linear").count("L") == 2
    assert line_chart("x", "y", [], "linear") == ""
    upwards = [(0.0, 0.0), (1.0, 1.0), (2.0, 10.0)]
    assert line_chart("x", "y", [Series("s", upwards, 0)], "linear", "log").count("L") == 1
    assert bar_chart("x", [Bar("a", [(0, 0.0)], "none")], "log") == ""
    assert "<script" not in line_chart("x", "y", [Series("<script>", points, 0)], "linear")


@pytest.fixture
def bad(results: Results) -> Results:
    """One method is lost for a while, another from its first step on, and one soon reached."""
    fine, high, lost = (run(label, 0, 5.0) for label in ("dense", "bf16", "fp16"))
    early = [replace(each, loss=4.2 + 8 * each.step) for each in high.evaluations[:3]]
    high = replace(high, evaluations=[*early, *high.evaluations[3:]])
    high.evaluations.append(replace(high.evaluations[-1], loss=math.inf))
    ends = [4.2, 1e3, math.nan, 1e6, 9.0, 8.0, 7.0]
    evaluations = [
        replace(each, loss=loss) for each, loss in zip(lost.evaluations, ends, strict=True)
    ]
    lost = replace(lost, evaluations=evaluations)
    reached = run("auto", 0, 5.0, "ours")
    reached = replace(reached, evaluations=reached.evaluations[:1], density=[])
    return replace(results, clock="real", runs=[fine, high, lost, reached])


def test_losses_of_one_method_do_not_press_the_others_together(bad: Results) -> None:
    drawn = report.page([bad])
    chart = drawn[drawn.index("loss on held-out data against seconds") :]
    chart = chart[: chart.index("</svg>")]
    lines = dict(re.findall(r'<path class="line[^"]*" d="([^"]*)"><title>(.*?)</title>', chart))
    lines = {label: path for path, label in lines.items()}
    assert list(lines) == ["dense", "bf16"]
    frame = [float(y) for y in re.findall(r'class="grid" d="M[\d.]+ ([\d.]+)V', chart)]
    heights = {
        label: [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
        for label, path in lines.items()
    }
    assert min(map(min, heights.values())) == frame[0], "nothing is drawn above"
    assert max(heights["dense"]) - min(heights["dense"]) > 250, "the fall has its room"
    assert lines["bf16"].count("M") == 2, "it comes back"
    said = "Losses above 4.2 are cut off: those of the first steps, and later ones of bf16, fp16."
    assert said in drawn
    assert "and later ones of dense in bf16, dense in fp16." in loss_plot(bad)
    assert "cut off" not in report.page([replace(bad, runs=[flat(bad.runs[0])])])


def flat(trained: TrainRun) -> TrainRun:
    return replace(trained, evaluations=[replace(each, loss=3.0) for each in trained.evaluations])


def test_the_loss_to_reach_is_never_cut_off(bad: Results) -> None:
    drawn = report.page([replace(bad, target_loss=30.0)])
    assert "to reach: 30.000" in drawn and "Losses above 30 are cut off" in drawn


def test_legends_name_what_is_drawn(bad: Results, results: Results, tmp_path: Path) -> None:
    for shown, legends in ((bad, 1 + 1 + 1 + 2), (results, 2 + 2 + 1 + 3)):
        found = look(report.page([shown]), tmp_path)
        assert found["legends"] == legends
        assert found["unnamed"] == found["absent"] == []
    page = report.page([results])
    parts = page[page.index("milliseconds per step") :]
    parts = parts[: parts.index("</ul>")]
    assert re.findall(r"</i>(.*?)</li>", parts) == ["compute", "averaging by PyTorch"]
    assert "averaging: network" in report.page(
        [replace(results, race=[each for each in results.race if each.label != "dense"])]
    )


def look(page: str, folder: Path, *flags: str) -> dict[str, object]:
    """What the browser says about a page."""
    browser = shutil.which(BROWSER)
    assert browser, f"{BROWSER} is missing: ./run setup installs it"
    file = folder / "report.html"
    file.write_text(page.replace("</body>", MEASURE + "</body>"))
    done = subprocess.run(
        [browser, *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    found: dict[str, object] = json.loads(html.unescape(match[1]))
    return found


@pytest.mark.parametrize(
    ("flag", "paper"),
    [
        ("preferredColorScheme=1", "rgb(253, 253, 252)"),
        ("preferredColorScheme=0", "rgb(23, 25, 28)"),
    ],
)
def test_a_browser_draws_the_page(results: Results, tmp_path: Path, flag: str, paper: str) -> None:
    page = report.page([results])
    assert "<script" not in page and "http" not in page, "nothing to load, nothing to run"
    found = look(page, tmp_path, f"--blink-settings={flag}")
    assert found["charts"] == 7
    assert found["lines"] == 6 + 6 + 3 * 3
    assert found["bars"] == 1 + 1 + 2 + 7
    assert found["outside"] == found["overlapping"] == []
    assert found["empty"] == found["loaded"] == 0
    assert found["unnamed"] == found["absent"] == []
    assert not found["wide"]
    assert found["paper"] == paper
    assert "&lt;b&gt;&amp; not" in page


def test_a_browser_draws_several_runs_side_by_side(results: Results, tmp_path: Path) -> None:
    found = look(report.page([named(results, "a"), named(results, "b")]), tmp_path)
    assert found["lines"] == 2 * (6 + 6 + 3 * 3)
    assert found["outside"] == found["overlapping"] == []
    assert not found["wide"]


# ---- the picture and the table of a README ------------------------------------------------------


@pytest.fixture
def compared(results: Results) -> Results:
    """Six methods on the real clock, whose lines end close to each other."""
    speeds = {"dense": 5.4, "bf16": 5.3, "powersgd:8": 5.0, "powersgd:16": 4.8, "diloco:30": 4.7}
    runs = [run(label, 0, speed) for label, speed in speeds.items()]
    ours = run("topk:density=0.01", 0, 4.6, "ours")
    return replace(results, clock="real", runs=[*runs, ours], date="2026-11-17 12:00 UTC")


def test_a_browser_draws_loss_against_seconds(compared: Results, tmp_path: Path) -> None:
    drawn = loss_plot(compared)
    names = ["dense (DDP)", "dense in bf16", "PowerSGD, rank 16", "DiLoCo, 30 steps", "topk 1 %"]
    assert re.findall(r'class="name s\d"[^>]*>([^<]*)<', drawn) == names, "from the highest loss"
    assert "Real clock: " in drawn and ">seconds<" in drawn and ">loss on held-out data<" in drawn
    assert "Not drawn, since slower: PowerSGD, rank 8." in drawn and "2026-11-17" in drawn
    assert drawn.count('class="line s') == 5 and drawn.count(" ours") == 1
    assert drawn.count('class="level"') == 1 and ">to reach: 2.700<" in drawn
    found = look(f"<body>{drawn}</body>", tmp_path)
    assert found["outside"] == found["overlapping"] == []
    assert found["empty"] == 0

    assert "Clock of a race: " in loss_plot(replace(compared, clock="race"))
    with pytest.raises(ValueError, match="no training among these results"):
        loss_plot(replace(compared, runs=[]))


def test_a_picture_is_for_light_and_dark_paper(compared: Results) -> None:
    style = re.search(r"<style>(.*)</style>", loss_plot(compared))
    assert style
    light, dark = style[1].split("@media (prefers-color-scheme:dark)")
    for rule in (".paper{fill:", "text{fill:", ".line.s0{stroke:", "text.s0{fill:"):
        assert light.split(rule)[1][:7] != dark.split(rule)[1][:7], rule


def test_of_each_method_the_best_setting_is_drawn(compared: Results) -> None:
    assert best_settings(compared) == [
        "dense",
        "bf16",
        "powersgd:16",
        "diloco:30",
        "topk:density=0.01",
    ]
    missed = [
        replace(each, evaluations=each.evaluations[:-1]) if each.label == "powersgd:16" else each
        for each in compared.runs
    ]
    assert "powersgd:8" in best_settings(replace(compared, runs=missed))


def test_methods_have_names_for_people() -> None:
    names = {
        "dense (A/A)": "dense (DDP) (A/A)",
        "post_local_sgd:10": "local SGD, 10 steps",
        "ok_topk:density=0.001": "ok_topk 0.1 %",
        "topk:density=0.01,values=bf16": "topk 1 % values=bf16",
        "auto": "auto",
        "topk:values=bf16": "topk:values=bf16",
    }
    assert {label: in_words(label) for label in names} == names


def test_the_table_of_a_readme(compared: Results) -> None:
    text = markdown(compared)
    lines = text.splitlines()
    assert lines[0].startswith(
        "Training on the real clock: gpt:10m, 10,700,000 parameters, 4 hosts"
    )
    assert "A/A 1.02" in lines[0] and "2026-11-17" in lines[0]
    assert lines[2].startswith("| method | by | seconds to the loss | times as fast as dense |")
    assert lines[4] == "| dense (DDP) | PyTorch | 324 | 1.00 | 324.0 | 60 | 60 | 2.700 | 5400 |"
    assert lines[9] == "| topk 1 % | topreduce | 276 | 1.17 | 276.0 | 60 | 60 | 2.700 | 4600 |"
    assert lines[-3:] == ["```", "topreduce lab train --methods '<all>'", "```"]
    race = markdown(replace(compared, runs=[]))
    assert race.startswith("Steps: gpt:10m") and "| dense (DDP) | PyTorch | 5400 |" in race

    long = markdown(replace(compared, command="topreduce " + "--word " * 30)).splitlines()
    assert max(map(len, long[-4:])) <= 100 and long[-3].endswith(" \\")


def test_the_readme_shows_what_was_measured(compared: Results, tmp_path: Path) -> None:
    """To put it right: .venv/bin/python docs/site/readme.py"""
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "docs/site/readme.py"))
    page = f"before\n{script['BEGIN']}old{script['END']}\nafter\n"
    filled = script["filled"](page, compared)
    assert filled.startswith("before\n") and filled.endswith("\nafter\n") and "old" not in filled
    assert markdown(compared) in filled and script["filled"](filled, compared) == filled
    script["keep"](compared, tmp_path / "loss.json")
    kept = load(tmp_path / "loss.json")
    assert markdown(kept) == markdown(compared) and loss_plot(kept) == loss_plot(compared)

    readme = (root / "README.md").read_text(encoding="utf-8")
    if (measured := root / "docs/loss.json").exists():
        assert script["filled"](readme, load(measured)) == readme
        assert loss_plot(load(measured)) == (root / "docs/loss.svg").read_text()
    else:
        assert readme.count(script["BEGIN"]) == readme.count(script["END"]) == 1
        assert "loss.svg" not in readme


def test_a_loss_that_is_not_finite_is_no_aim(results: Results) -> None:
    for wrong in (math.inf, math.nan):
        runs = list(results.runs)
        for number, run in enumerate(runs):
            if run.spec == "dense":
                end = replace(run.evaluations[-1], loss=wrong)
                runs[number] = replace(run, evaluations=[*run.evaluations[:-1], end])
        lost = replace(results, runs=runs)
        assert lost.aim() is None
        assert verdict(lost) == ""
        assert "<svg" in report.page([lost])
        assert "<svg" in loss_plot(lost)
