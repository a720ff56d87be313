"""Results: how runs become ratios, and the files that keep them.

A row's result has what its sides measured, turn by turn: `{"runs": {side: [{measure: value}]}}`, the side `ours` first.
"""

import json
import statistics
from dataclasses import dataclass

from .files import write_results


@dataclass(frozen=True)
class Measure:
    """How a measure is shown, and what its targets mean."""

    unit: str
    more_is_better: bool = False
    inverse: bool = False  # the ratio says how many times as fast we are: theirs / ours
    absolute: bool = False  # the target is a value of ours, not a ratio
    digits: int = 0

    def ratio(self, ours, theirs):
        return theirs / ours if self.inverse else ours / theirs

    @property
    def at_least(self):
        """Whether the target is to be exceeded, not undercut."""
        return self.more_is_better or self.inverse

    def reached(self, value, target):
        return value >= target if self.at_least else value <= target


BUSY = 0.1  # cores that other work may have during a turn, before the table says so

MEASURES = {
    "tokens_per_s": Measure("tokens/s", more_is_better=True),
    "peak_rss_mib": Measure("MiB at the peak"),
    "error": Measure("of the square", digits=5),
    "first_step_s": Measure("s to the end of step 1", absolute=True, digits=2),
}
COLLECTIVE = Measure("µs", inverse=True)
PRODUCT = Measure("GFLOP/s", more_is_better=True)
SHARE = Measure("of 1", more_is_better=True, absolute=True, digits=2)
EACH = "each"  # a target for everything that we measured beside the above and shares


def measure_of(name):
    return MEASURES.get(name) or (SHARE if name.startswith("share: ") else COLLECTIVE if name.endswith("iB") else PRODUCT)


def targets_of(result):
    """A row's targets by measure."""
    targets = dict(result["targets"])
    if EACH in targets:
        each = targets.pop(EACH)
        names = next(iter(result["runs"]["ours"]), {})
        targets |= {name: each for name in names if name not in {*MEASURES, "others_busy"} and measure_of(name) is not SHARE}
    return targets


@dataclass(frozen=True)
class Spread:
    """Median, least and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values):
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits):
        median, low, high = (f"{value:,.{digits}f}" for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low}..{high})"


@dataclass(frozen=True)
class Line:
    """A line of the table: one measure of one row."""

    row: str
    group: str
    measure: str
    target: float
    ours: Spread
    best: str | None = None  # of the other sides
    theirs: Spread | None = None
    ratio: Spread | None = None

    @property
    def reached(self):
        """Whether the target is reached; None where there is nothing to hold it against."""
        measure = measure_of(self.measure)
        value = self.ours if measure.absolute else self.ratio
        return None if value is None else measure.reached(value.median, self.target)


def lines(name, result):
    """The lines of a row's result. Our side is held against whichever other side has the best median."""
    runs = dict(result["runs"])
    ours = runs.pop("ours", [])
    for key, target in targets_of(result).items():
        measure = measure_of(key)
        mine = [run[key] for run in ours if key in run]
        theirs = {side: [run[key] for run in turns if key in run] for side, turns in runs.items()}
        medians = {side: statistics.median(values) for side, values in theirs.items() if values}
        if not mine:
            continue
        line = dict(row=name, group=result["group"], measure=key, target=target, ours=Spread.of(mine))
        if medians:
            best = (max if measure.more_is_better else min)(medians, key=medians.get)
            # The ratio of the medians; its spread is that of the turns, whose two sides ran one after the other.
            turns = [measure.ratio(mine, their) for mine, their in zip(mine, theirs[best])]
            ratio = Spread(measure.ratio(line["ours"].median, medians[best]), min(turns), max(turns))
            line |= dict(best=best, theirs=Spread.of(theirs[best]), ratio=ratio)
        yield Line(**line)


def table(results):
    """The table of all results, as lines of Markdown."""
    group = None
    for name, result in results["rows"].items():
        if result["group"] != group:
            group = result["group"]
            yield from ("", f"## {group[0].upper()}{group[1:]}", "")
            yield "| work | unit | ours | theirs, the best | ratio | target | reached |"
            yield "|---|---|---|---|---|---|---|"
        for line in lines(name, result):
            measure = measure_of(line.measure)
            unit = measure.unit if line.measure in MEASURES else f"{measure.unit}, {line.measure}"
            target = f"{'≥' if measure.at_least else '≤'} {line.target:g}{' s' if line.measure == 'first_step_s' else ''}"
            cells = [
                name,
                unit,
                line.ours.show(measure.digits),
                f"{line.theirs.show(measure.digits)}, {line.best}" if line.theirs else "",
                line.ratio.show(2) if line.ratio else "",
                target,
                {True: "yes", False: "**no**", None: ""}[line.reached],
            ]
            yield f"| {' | '.join(cells)} |"
        if result.get("error"):
            yield f"| {name} | failed: {' '.join(result['error'].split())[-300:].replace('|', '/')} | | | | | **no** |"


def markdown(results):
    facts = results["hardware"]
    huge = f"huge pages: {facts['huge_pages']}" if facts["huge_pages"] else "no huge pages"
    yield f"# Ours and the peers', {results['date']}"
    yield ""
    yield f"{facts['cpu']}, {facts['cores']} cores, both sides on cores {facts['cores_used']}; {facts['memory_gib']} GiB; {huge};"
    bf16 = {True: "products of bf16; ", False: "no products of bf16; ", None: ""}[facts.get("bf16_products")]
    kept = f"both sides kept to {facts['instructions']}; " if facts.get("instructions") else ""
    yield f"{kept}{bf16}{facts['system']}. Peers: {results['peer'] or 'none'}. Commits: {', '.join(commits(results))}."
    yield ""
    yield f"    {results['command']}"
    yield ""
    yield "Medians over the turns of each side (least..largest); a turn's tokens/s are the median of its steps. A ratio is that of"
    yield "the medians, in brackets those of the single turns. The file beside this one has every command and turn."
    yield from table(results)
    busy = {name: max(run["others_busy"] for turns in row["runs"].values() for run in turns) for name, row in measured(results)}
    busy = [f"{name} ({cores:.1f} cores)" for name, cores in busy.items() if cores > BUSY]
    if busy:
        yield ""
        yield f"**Not to be trusted**, for other work ran on the machine: {'; '.join(busy)}."


def measured(results):
    """Name and result of the rows that have runs."""
    return [(name, row) for name, row in results["rows"].items() if any(row["runs"].values())]


def commits(results):
    return sorted({row["commit"] or "unknown" for row in results["rows"].values()})


def load(path):
    """What the file has of an earlier call on the same day and machine."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": {}}


def write(path, results):
    """Writes `path`.json and `path`.md, each at once or not at all."""
    write_results(path, results, markdown(results))
