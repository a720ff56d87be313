#!/usr/bin/env python3
"""Step time of our trainer against the size of the model and the number of ranks: fitted exponents, and where the model errs.

    benches/scaling.py                  # writes benches/results/DATE-HARDWARE-scaling.md and docs/img/scaling.svg
    benches/scaling.py --ceiling 232    # GFLOP/s that the machine can do; default: the best rate met on the way
    benches/scaling.py --self-test      # two points an axis of a tiny model, into a temporary folder: for .ci/run

The model says: time = arithmetic of a step (attention in full, its masked half too) / ceiling, whatever the mesh. Of each axis of
scaling.toml, straight lines through log(time) over log(value) give the exponent measured and the model's own. Where time over
model, the last column, is not level, something that is not arithmetic counts: memory, overhead of each op, communication.
Needs cargo and Python 3.11.
"""

import argparse
import datetime
import math
import statistics
import sys
import tempfile
import tomllib
from pathlib import Path

from harness import machine, programs, results
from harness.svg import COLOURS, panel, path, power_of_ten, text

GRID = Path(__file__).with_suffix(".toml")
MICROS = 4  # micro-batches of every pipeline, so that the axis pp changes nothing else
COLUMNS, CELL, LEFT, GAP = 3, (280, 230), 64, (20, 62)


def points(axis, base):
    """The points of an axis: (value, size, arguments of gpt_train)."""
    for value in axis["values"]:
        size = base | ({axis["key"]: value} if "key" in axis else {})
        mesh = f"{axis.get('mesh', 'dp')}={value if 'mesh' in axis else 1}"
        micros = f" --set pipeline.num_microbatches={MICROS}" if axis.get("mesh") == "pp" else ""
        yield value, size, f"gpt_train --mesh {mesh}{micros}"


def measured(grid, makers):
    """Seconds of a step at every point, as `[(axis name, [(value, flops, seconds)])]`, and the cores that others had at most."""
    runs = [(axis["name"], *point) for axis in grid["axes"] for point in points(axis, grid["base"])]
    times, busy = {}, 0
    for turn in range(grid["rounds"]):
        for name, value, size, text_of_command in runs:
            print(f"round {turn + 1}/{grid['rounds']}: {name} {value}", file=sys.stderr, flush=True)
            command = makers.command(text_of_command, size)
            run = programs.measure(command)
            times.setdefault((name, value), []).append(command.tokens / run["tokens_per_s"])
            busy = max(busy, run["others_busy"])
    rows = {}
    for name, value, size, _ in runs:
        rows.setdefault(name, []).append((value, programs.step_flops(size), statistics.median(times[name, value])))
    return list(rows.items()), busy


def exponent(pairs):
    """Slope of the least-squares line through (log x, log y)."""
    logs = [(math.log(x), math.log(y)) for x, y in pairs]
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*logs))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def report(axes, busy, ceiling, origin, base, facts):
    """Lines of Markdown: the exponents, then every point."""
    sizes = ", ".join(f"{key} {value}" for key, value in base.items() if key not in ("steps", "warmup"))
    yield from (f"# Scaling of a step, {datetime.date.today()}", "")
    yield f"{facts['cpu']}, {facts['cores']} cores, on cores {facts['cores_used']}; commit {machine.commit()}; `benches/scaling.py`."
    yield f"All but the axis at hand: {sizes}. Ceiling of the model: {ceiling / 1e9:.0f} GFLOP/s ({origin})."
    if busy > results.BUSY:
        yield f"**Not to be trusted**, for other work had up to {busy:.1f} cores."
    yield from ("", "| axis | exponent measured | of the model | time / model, from first to last |", "|---|---|---|---|")
    for name, rows in axes:
        slopes = (exponent([(value, seconds) for value, _, seconds in rows]), exponent([(value, flops) for value, flops, _ in rows]))
        ratios = " ".join(f"{seconds * ceiling / flops:.2f}" for _, flops, seconds in rows)
        yield f"| {name} | {slopes[0]:.2f} | {slopes[1]:.2f} | {ratios} |"
    yield from ("", "| axis | value | GFLOP | step ms | model ms | time / model |", "|---|---|---|---|---|---|")
    for name, rows in axes:
        for value, flops, seconds in rows:
            model = flops / ceiling
            yield f"| {name} | {value} | {flops / 1e9:.2f} | {seconds * 1e3:.2f} | {model * 1e3:.2f} | {seconds / model:.2f} |"


def draw(axes, ceiling):
    """A panel for each axis: step time measured, and the model's, both axes logarithmic."""
    lines = math.ceil(len(axes) / COLUMNS)
    width, height = COLUMNS * (CELL[0] + GAP[0]) + GAP[0], lines * (CELL[1] + GAP[1]) + 46
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui,sans-serif">'
    yield "<title>Time of a step against the size of the model and the number of ranks</title>"
    yield f'<rect width="{width}" height="{height}" fill="#fff"/>'
    for x, colour, words in ((GAP[0] + LEFT, COLOURS[5], "measured"), (GAP[0] + LEFT + 120, COLOURS[1], "arithmetic / ceiling")):
        yield f'<path d="M{x} 20h24" stroke="{colour}" stroke-width="2.5"/>'
        yield text(x + 32, 24.5, words, "start")
    times = [t for _, rows in axes for _, flops, seconds in rows for t in (seconds, flops / ceiling)]
    decades = math.floor(math.log10(min(times) * 1e3)), math.ceil(math.log10(max(times) * 1e3))
    for index, (name, rows) in enumerate(axes):
        left = GAP[0] + index % COLUMNS * (CELL[0] + GAP[0]) + LEFT
        right = left + CELL[0] - LEFT
        top = 66 + index // COLUMNS * (CELL[1] + GAP[1])
        bottom = top + CELL[1]
        first, last = math.log(rows[0][0]), math.log(rows[-1][0])

        def x_of(value):
            return left + 14 + (right - left - 28) * (math.log(value) - first) / (last - first)

        def y_of(milliseconds):
            return bottom - (bottom - top) * (math.log10(milliseconds) - decades[0]) / (decades[1] - decades[0])

        ticks = [(10.0**power, power_of_ten(power)) for power in range(decades[0], decades[1] + 1)]
        yield from panel(left, right, top, bottom, f"ms, by {name}", ticks, y_of)
        yield path([(x_of(value), y_of(1e3 * flops / ceiling)) for value, flops, _ in rows], COLOURS[1], 2, "6 4")
        yield path([(x_of(value), y_of(1e3 * seconds)) for value, _, seconds in rows], COLOURS[5], 2)
        for value, _, seconds in rows:
            yield f'<circle cx="{x_of(value):.1f}" cy="{y_of(1e3 * seconds):.1f}" r="3" fill="{COLOURS[5]}"/>'
            yield text(x_of(value), bottom + 18, value, size=12)
    yield "</svg>"


def run(grid, makers, ceiling, table, picture, cores):
    axes, busy = measured(grid, makers)
    origin = "given" if ceiling else "the best rate of all points"
    ceiling = ceiling or max(flops / seconds for _, rows in axes for _, flops, seconds in rows)
    for file, lines in (
        (table, report(axes, busy, ceiling, origin, grid["base"], machine.hardware(cores))),
        (picture, draw(axes, ceiling)),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def self_test(grid):
    assert abs(exponent([(x, 3 * x**1.5) for x in (1, 2, 5, 9)]) - 1.5) < 1e-12
    base = dict(vocab_size=256, num_layers=4, hidden_size=32, num_heads=4, seq_len=32, batch=4, steps=1, warmup=1)
    axes = [axis | {"values": axis["values"][:2]} for axis in grid["axes"]]
    with tempfile.TemporaryDirectory() as folder:
        table, picture = Path(folder) / "table.md", Path(folder) / "picture.svg"
        makers = programs.Programs(grid["threads"], folder=Path(folder))
        run({"base": base, "axes": axes, "rounds": 1}, makers, None, table, picture, None)
        lines = table.read_text(encoding="utf-8").splitlines()
        assert sum(line.startswith("| ") for line in lines) == 2 + 3 * len(axes), lines
        # The best point sets the ceiling, so the model is never above what was measured.
        assert min(float(line.split("|")[-2]) for line in lines[-2 * len(axes) :]) == 1, lines
        assert picture.read_text(encoding="utf-8").count("<circle") == 2 * len(axes)
    print("self-test passed", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ceiling", type=float, metavar="GFLOP/s", help="what the machine can do in f32")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    grid = tomllib.loads(GRID.read_text(encoding="utf-8"))
    if args.self_test:
        return self_test(grid)
    cores = machine.bind(grid["threads"])
    name = f"{datetime.date.today()}-{machine.slug(machine.hardware(cores))}-scaling.md"
    table, picture = machine.ROOT / "benches" / "results" / name, machine.ROOT / "docs" / "img" / "scaling.svg"
    run(grid, programs.Programs(grid["threads"]), args.ceiling and args.ceiling * 1e9, table, picture, cores)
    print(table.read_text(encoding="utf-8"))
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except programs.Failed as failed:
        sys.exit(str(failed))
