#!/usr/bin/env python3
"""Draws the loss of a fine-tuning run: each step's, and that of what is held out, with the best one marked.

    cargo run --release --example finetune -- --metrics run.jsonl
    benches/finetune_curve.py run.jsonl > docs/img/finetune.svg

Reads what `--metrics` writes; needs nothing but Python 3.9.
"""

import json
import math
import sys

from harness.svg import COLOURS, panel, path, text

WIDTH, LEFT, RIGHT = 860, 70, 838
TOP, BOTTOM = 58, 338
HEIGHT = 390


def draw(events):
    steps = [(event["step"], event["loss"]) for event in events if event["event"] == "step"]
    held = [(event["step"], event["loss"]) for event in events if event["event"] == "validation"]
    best = min(held, key=lambda point: point[1])
    high = math.ceil(max(loss for _, loss in steps))

    def place(point):
        step, loss = point
        return LEFT + (RIGHT - LEFT) * step / steps[-1][0], BOTTOM - (BOTTOM - TOP) * loss / high

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui,sans-serif">'
    yield "<title>Loss of a fine-tuning run</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    yield text(LEFT, 24, f"Loss of answers over {steps[-1][0]} steps", "start", 17, "#111", ' font-weight="600"')
    ticks = [(loss, str(loss)) for loss in range(high + 1)]
    yield from panel(LEFT, RIGHT, TOP, BOTTOM, "loss", ticks, lambda loss: place((0, loss))[1])
    yield path([place(point) for point in steps], COLOURS[0], 1.2)
    yield path([place(point) for point in held], COLOURS[1], 2)
    for point in held:
        x, y = place(point)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if point == best else 3}" fill="{COLOURS[1]}"/>'
    for index, what in enumerate(["of each step's examples", f"of examples held out; the lowest is {best[1]:.2g}, at step {best[0]}"]):
        y = TOP + 16 + 17 * index
        yield f'<path d="M430 {y}h34" stroke="{COLOURS[index]}" stroke-width="2.5"/>'
        yield text(474, y + 4.5, what, "start")
    for step in range(0, steps[-1][0] + 1, 50):
        yield text(place((step, 0))[0], BOTTOM + 20, str(step))
    yield text((LEFT + RIGHT) / 2, BOTTOM + 42, "step")
    yield "</svg>"


def main():
    with open(sys.argv[1], encoding="utf-8") as lines:
        print("\n".join(draw([json.loads(line) for line in lines])))


if __name__ == "__main__":
    main()
