"""What would be chosen where: `topreduce advise`, from the formulas that the search itself uses."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from topreduce import _core
from topreduce._core import Layout

METHODS = (
    "topk:density=0.01",
    "topk:density=0.03",
    "ok_topk:density=0.01",
    "ok_topk:density=0.03",
    "arc_topk:density=0.2",
)
_LIMITLESS = 1e12  # bytes per second
_LONG = 0.3  # of a step: waiting
_EXAMPLE = Layout([("weight", [1000, 1000])])


@dataclass(frozen=True)
class Site:
    """Where a run would be; times in seconds, `rate` in bits per second, None without a limit."""

    entries: float
    ranks: int
    computed: float
    rate: float | None
    delay: float = 0.0

    def numbers(self) -> tuple[float, int, float, float, float]:
        """As the core wants them."""
        speed = _LIMITLESS if self.rate is None else self.rate / 8
        return self.entries, self.ranks, self.computed, speed, self.delay


@dataclass(frozen=True)
class Row:
    """What a step would cost."""

    method: str
    level: str  # the density, or the format of all entries
    bytes: float  # that each rank sends
    seconds: float
    waited: float


@dataclass(frozen=True)
class Advice:
    """The first row is what method `auto` would come to."""

    site: Site
    overhead: float
    rows: list[Row]
    words: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """As `topreduce advise` prints it."""
        return "\n".join(lines(self))


def advise(
    site: Site,
    *,
    overhead: float = 0.05,
    methods: Sequence[str] = METHODS,
    layout: Layout | None = None,
) -> Advice:
    """What density="auto" would find there, beside other methods; `layout`: of a model like it."""
    auto = "auto" if overhead == 0.05 else f"auto:overhead={overhead}"
    rows = [_row(spec, site, layout or _EXAMPLE) for spec in (auto, *methods)]
    rows += [_row_ddp(name, bits, site) for name, bits in (("dense", 32.0), ("fp16", 16.0))]
    return Advice(site, overhead, rows, list(_words(rows, site, overhead)))


def _row(spec: str, site: Site, layout: Layout) -> Row:
    told = _core.forecast(spec, layout, *site.numbers())
    return Row(spec, told["level"], told["bytes"], told["seconds"], told["waited"])


def _row_ddp(name: str, bits: float, site: Site) -> Row:
    told = _core.forecast_ddp(bits, *site.numbers())
    level = "fp32" if name == "dense" else name
    return Row(f"DDP, {name}", level, told["bytes"], told["seconds"], told["waited"])


def _words(rows: Sequence[Row], site: Site, overhead: float) -> Iterator[str]:
    """One verdict, and what else there is to do where even that waits for long."""
    auto, dense, half = rows[0], rows[-2], rows[-1]
    most = site.computed * (1 + overhead)
    fits = auto.waited <= overhead * auto.seconds
    denser = [row for row in rows[1:-2] if row.bytes > auto.bytes and row.seconds <= auto.seconds]
    times = dense.seconds / auto.seconds
    if dense.seconds <= most:
        yield "Plain DDP hides its all-reduce here: there is nothing to gain."
    elif half.seconds <= max(most, auto.seconds):
        yield "DDP with 16 bits (fp16_compress_hook) is quick enough here, if fp16 will do."
    elif times <= 1 + overhead:
        yield f"Hardly worth it: auto saves {1 - 1 / times:.0%} of a step; DDP learns more in each."
    elif denser and not fits:
        best = max(denser, key=lambda row: row.bytes)
        yield (
            f'attach(model, "{best.method}") sends more here in no more time than auto, which '
            f"finds no density that is quick enough: {dense.seconds / best.seconds:.1f} times "
            "quicker than DDP."
        )
    else:
        yield f'attach(model, "auto") makes steps {times:.1f} times quicker than DDP.'
    if auto.waited > _LONG * auto.seconds and half.seconds > auto.seconds:
        yield (
            f"Even so {auto.waited / auto.seconds:.0%} of a step are waiting: local updates (DDP's "
            "post_local_sgd), larger batches or several ranks per machine (local_group) could save "
            "more."
        )


def lines(advice: Advice) -> Iterator[str]:
    """For a terminal."""
    widest = max(len(row.method) for row in advice.rows)
    heads = ("method", "sends", "MB/step", "ms/step", "waited")
    yield f"{heads[0]:<{widest}}  {heads[1]:>8}  {heads[2]:>9}  {heads[3]:>9}  {heads[4]:>7}"
    for row in advice.rows:
        share = row.waited / row.seconds
        yield (
            f"{row.method:<{widest}}  {row.level:>8}  {row.bytes / 1e6:>9.3g}  "
            f"{1e3 * row.seconds:>9.1f}  {share:>7.1%}"
        )
    yield ""
    yield f"sends: a density, or everything in a format. {1e3 * advice.site.computed:g} ms of each"
    yield f"step are computing; waiting for at most {advice.overhead:.0%} of a step is wanted."
    yield from advice.words


def as_json(advice: Advice) -> str:
    """For machines."""
    return json.dumps(asdict(advice), indent=2)
