#!/usr/bin/env python3
"""Draws the loss of runs of one model on several meshes, and how far each is from the first. Prints the table of docs/guarantees.md.

    benches/meshes.sh                                            # writes target/meshes/*.jsonl
    benches/loss_curves.py target/meshes/*.jsonl > docs/img/loss_curves.svg

Reads what `gpt_train --metrics` writes; needs nothing but Python 3.9. The picture goes to standard output, the table to
standard error. The upper panel has each step's loss. The lower one has each step's |loss - first run's loss| / first run's
loss, the largest of every five steps, on a logarithmic axis; smaller ones than 1e-11 count as 1e-11.
"""

import json
import math
import sys

from harness.svg import COLOURS, panel, path, power_of_ten, text

WIDTH, LEFT, RIGHT = 860, 70, 838
LOSS_PANEL, DIFFERENCE_PANEL = (58, 318), (372, 552)  # top and bottom
HEIGHT = 604
WINDOW = 5
FLOOR = 1e-11
ROUNDING = 2.0**-24  # relative error of rounding once to f32
LAST = 10


def read(path):
    """A run: (its name, its losses by step, where it ran)."""
    with open(path, encoding="utf-8") as lines:
        events = [json.loads(line) for line in lines]
    start = next(event for event in events if event["event"] == "start")
    parallelism, pipeline = start["config"]["parallelism"], start["config"]["pipeline"]
    axes = [f"{axis}={degree}" for axis, degree in start["mesh"].items() if degree > 1]
    name = ",".join(axes) or "one rank"
    if parallelism["sequence_parallel"]:
        name += ", sequence parallel"
    if parallelism["pp"] > 1:
        name += ", " + pipeline["schedule"]
    steps = [event for event in events if event["event"] == "step"]
    return {
        "name": name,
        "ranks": math.prod(start["mesh"].values()),
        "micros": pipeline["num_microbatches"],
        "loss": [step["loss"] for step in steps],
    }


def differences(run, first):
    return [abs(a - b) / b for a, b in zip(run["loss"], first["loss"])]


def table(runs):
    first = runs[0]
    steps = len(first["loss"])
    yield f"| mesh | ranks | loss of step 1 | loss of steps {steps - LAST + 1} to {steps} | apart by at most |"
    yield "|---|---|---|---|---|"
    for run in runs:
        mean = sum(run["loss"][-LAST:]) / LAST
        apart = "" if run is first else f"{max(differences(run, first)):.0e}".replace("e-0", "e-")
        yield f"| `{run['name']}` | {run['ranks']} | {run['loss'][0]:.5f} | {mean:.5f} | {apart} |"


def draw(runs):
    first, others = runs[0], runs[1:]
    steps = len(first["loss"])

    def x_of(step):
        return LEFT + (RIGHT - LEFT) * step / steps

    # Upper panel: losses, the first run broad and the others thin and dashed out of step, so that all can be seen.
    low = math.floor(2 * min(min(run["loss"]) for run in runs)) / 2
    high = math.ceil(2 * max(max(run["loss"]) for run in runs)) / 2
    top, bottom = LOSS_PANEL

    def loss_y(value):
        return bottom - (bottom - top) * (value - low) / (high - low)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui,sans-serif">'
    yield f"<title>Loss of one model trained on {len(runs)} meshes</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    yield text(LEFT, 24, f"One model on {len(runs)} meshes", "start", 17, "#111", ' font-weight="600"')
    ticks = [(low + i / 2, f"{low + i / 2:.1f}") for i in range(round(2 * (high - low)) + 1)]
    yield from panel(LEFT, RIGHT, top, bottom, "loss", ticks, loss_y)
    for index, run in enumerate(runs):
        points = [(x_of(step + 1), loss_y(loss)) for step, loss in enumerate(run["loss"])]
        if run is first:
            yield path(points, "#c4c4c4", 7)
            yield path(points, COLOURS[0], 1.2)
        else:
            # Each run shows one dash of the pattern that they share.
            dash = 7
            before = dash * (index - 1)
            after = dash * (len(others) - index)
            yield path(points, COLOURS[index], 2, f"0 {before} {dash} {after}")

    # Legend, in the empty upper right of the falling curve.
    yield f'<rect x="530" y="{top + 2}" width="{RIGHT - 530}" height="{21 * len(runs) + 4}" fill="#fff"/>'
    for index, run in enumerate(runs):
        y = top + 14 + 21 * index
        if run is first:
            yield f'<path d="M540 {y}h34" stroke="#c4c4c4" stroke-width="7"/>'
        yield f'<path d="M540 {y}h34" stroke="{COLOURS[index]}" stroke-width="{1.2 if run is first else 2.5}"/>'
        ranks = "" if run["ranks"] == 1 else f" ({run['ranks']} ranks)"
        yield text(584, y + 4.5, run["name"] + ranks, "start")

    # Lower panel: relative differences.
    top, bottom = DIFFERENCE_PANEL
    worst = max(max(differences(run, first)) for run in others)
    decades = (math.log10(FLOOR), max(math.ceil(math.log10(worst)), -7))

    def difference_y(value):
        return bottom - (bottom - top) * (math.log10(max(value, FLOOR)) - decades[0]) / (decades[1] - decades[0])

    ticks = [(10.0**power, power_of_ten(power)) for power in range(round(decades[0]), decades[1] + 1)]
    yield from panel(LEFT, RIGHT, top, bottom, "relative difference from one rank, largest of five steps", ticks, difference_y)
    y = round(difference_y(ROUNDING), 1)
    yield f'<path d="M{LEFT} {y:g}H{RIGHT}" stroke="#333" stroke-dasharray="2 4"/>'
    yield text(LEFT + 8, y + 15, "rounding one number to f32", "start", 12)
    for index, run in enumerate(others, 1):
        apart = differences(run, first)
        windows = [max(apart[at : at + WINDOW]) for at in range(0, steps, WINDOW)]
        points = [(x_of(min((at + 1) * WINDOW, steps)), difference_y(value)) for at, value in enumerate(windows)]
        yield path(points, COLOURS[index], 1.8)
    for step in range(0, steps + 1, max(steps // 6, 1)):
        for _, edge in (LOSS_PANEL, DIFFERENCE_PANEL):
            yield f'<path d="M{x_of(step):g} {edge}v5" stroke="#888"/>'
            yield text(x_of(step), edge + 20, step)
    yield text((LEFT + RIGHT) / 2, HEIGHT - 12, "step")
    yield "</svg>"


def main():
    runs = [read(path) for path in sys.argv[1:]]
    if len(runs) < 2:
        sys.exit(__doc__)
    if len({len(run["loss"]) for run in runs}) != 1 or len(runs) > len(COLOURS):
        sys.exit(f"give runs of the same number of steps, {len(COLOURS)} at most")
    print("\n".join(table(runs)), file=sys.stderr)
    print("\n".join(draw(runs)))


if __name__ == "__main__":
    main()
