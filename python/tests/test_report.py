"""The report: opened in a real browser, which measures what it has drawn."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from topreduce.lab import report
from topreduce.lab.race import STAGES, RaceRow
from topreduce.lab.results import Results, load, named, save
from topreduce.lab.runs import Network
from topreduce.lab.svg import Bar, Series, bar_chart, line_chart
from topreduce.lab.tables import grids
from topreduce.lab.train import Evaluation, TrainRun

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
# bars of no size, a page wider than the window, colours of text and paper.
MEASURE = """
<script>
const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1
  && a.bottom <= b.bottom + 1;
const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1
  && b.top < a.bottom - 1;
const found = {charts: 0, outside: [], overlapping: [], empty: 0, lines: 0, bars: 0};
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
    race, _, training = grids(results)
    assert list(race.rows[3]) == [LONG, "460", "423 - 497", "1.10", "0.400", "2.900"]
    assert list(race.rows[1])[:2] == ["noop (A/A)", "430"]
    ours = training.rows[1]
    assert ours[0] == LONG
    assert ours[1] == "30 / 30 / 30"
    assert ours[2] == "10.80 (10.80 - 10.80)"
    assert ours[4] == "60 / 60 / 60"


def test_tables_and_page_name_the_delay(results: Results) -> None:
    words = Network(rates=[1e8] * 4, delay=0.015).words()
    assert words == "4 hosts at 100 Mb/s, 15 ms one way"
    delayed = replace(results, network=words, delay=0.015, late=0.001)
    race, _, training = grids(delayed)
    assert words in race.title and words in training.title
    assert any("held back for 15 ms" in note and "0.1 %" in note for note in race.notes)
    assert not any("too busy" in note for note in race.notes)
    assert any("too busy" in note for note in grids(replace(delayed, late=0.2))[0].notes)
    assert not any("held back" in note for note in grids(results)[0].notes)
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
    assert found["bars"] == (1 + 1 + 2 + 7) + 2
    assert found["outside"] == found["overlapping"] == []
    assert found["empty"] == found["loaded"] == 0
    assert not found["wide"]
    assert found["paper"] == paper
    assert "&lt;b&gt;&amp; not" in page


def test_a_browser_draws_several_runs_side_by_side(results: Results, tmp_path: Path) -> None:
    found = look(report.page([named(results, "a"), named(results, "b")]), tmp_path)
    assert found["lines"] == 2 * (6 + 6 + 3 * 3)
    assert found["outside"] == found["overlapping"] == []
    assert not found["wide"]
