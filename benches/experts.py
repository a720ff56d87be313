#!/usr/bin/env python3
"""Trains models with experts, a dense model of the same FLOPs per token, each way to balance the load, and meshes; draws docs/img/experts.svg.

    benches/experts.py --docs [--text FILE]          # 1,000 steps, 3 seeds on the default text and on FILE: about an hour on two cores
    benches/experts.py --steps 20 --seeds 1 --runs DIR --picture FILE.svg    # a small one, elsewhere

Runs are kept in benches/results/experts, and those that are there are not run again. The picture goes to docs/img/experts.svg, the tables to
standard output and with --docs both into docs/moe.md. Needs cargo and Python 3.11.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import machine, pages, programs
from harness.svg import COLOURS, panel, path, power_of_ten, text
from peers import lifetime

LAST, WINDOW = 50, 20  # steps of which the final loss is the mean, and of which a point of a curve is
SHORT = 300  # steps of the runs that show balance and meshes, at most
DENSE, SWITCH = "dense", "switch, 8 experts"
MODELS = {
    DENSE: {"model.preset": "tiny"},
    SWITCH: {"model.preset": "tiny", "moe.num_experts": 8, "moe.router": "switch", "moe.capacity_factor": 1.25},
}
# How a text of the user's is trained on, which has more to learn than the default one: each of eight experts sees an
# eighth of the tokens, so batches are four times larger. In batches of 16 experts end level with the dense model, or
# behind it: docs/moe.md has the numbers.
OF_TEXT = {
    "training.global_batch_size": 64,
    "optimizer.lr": 2e-3,
    "lr_scheduler.warmup_steps": 100,
    "lr_scheduler.decay": "cosine",
}
# Two of eight experts for a token, and what keeps their load even.
TWO = {"model.preset": "tiny", "moe.num_experts": 8, "moe.top_k": 2}
BALANCES = {
    "nothing": TWO | {"moe.router": "topk", "moe.aux_loss_coeff": 0},
    "auxiliary loss, topk": TWO | {"moe.router": "topk"},
    "auxiliary loss, switch": MODELS[SWITCH],
    # GShard's loss divides by the experts where Switch's multiplies: 0.01 of Switch is 0.01 · 8² here.
    "auxiliary loss, gshard": TWO | {"moe.router": "gshard", "moe.aux_loss_coeff": 0.64},
    "bias": TWO | {"moe.router": "bias", "moe.bias_update_rate": 0.01},
    "expert choice": TWO | {"moe.router": "expert_choice"},
}
# Meshes against one rank: with fast numerics, and with canonical ones.
MESHES = {
    "dense, tp=4": MODELS[DENSE] | {"parallelism.tp": 4},
    "experts, tp=4": MODELS[SWITCH] | {"parallelism.tp": 4},
    "experts, dp=4,ep=4": MODELS[SWITCH] | {"parallelism.dp": 4, "parallelism.ep": 4},
    "experts, dp=4,ep=4, canonical": MODELS[SWITCH] | {"parallelism.dp": 4, "parallelism.ep": 4, "training.numerics": "canonical"},
}
FLOOR = 1e-9  # of relative differences that are drawn
WIDTH, LEFT, RIGHT = 860, 70, 838
TOP, PANEL, APART = 58, 200, 60


def run(program, sets, steps, seed, data, file):
    """Loss and load of each step of a run: from `file`, if the same settings and text are there, with as many steps."""
    settings = sets | {"training.seed": seed}
    of = {"steps": steps, "settings": settings, "text": data and hashlib.sha256(data.read_bytes()).hexdigest()}
    known = json.loads(file.read_text()) if file.exists() else {}
    if known.get("of") != of:
        print(f"{file.stem}", file=sys.stderr, flush=True)
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            argv = [program, "--steps", str(steps), "--metrics", metrics, *words, *(["--data", data] if data else [])]
            lifetime.run(argv, check=True, stdout=subprocess.DEVNULL)
            events = [json.loads(line) for line in metrics.read_text().splitlines()]
        events = [event for event in events if event["event"] == "step"]
        load = [event["moe"]["load_imbalance"] for event in events if "moe" in event]
        known = {"of": of, "loss": [event["loss"] for event in events], "load_imbalance": load}
        file.write_text(json.dumps(known) + "\n")
    return known


def smoothed(values):
    """(Step, mean of the steps around it), `WINDOW` steps apart."""
    return [(at + WINDOW / 2, statistics.fmean(values[at : at + WINDOW])) for at in range(0, len(values), WINDOW)]


def largest(values):
    return [(at + WINDOW / 2, max(values[at : at + WINDOW])) for at in range(0, len(values), WINDOW)]


def mean_of(runs):
    return [statistics.fmean(losses) for losses in zip(*runs)]


def differences(losses, single):
    return [abs(a - b) / b for a, b in zip(losses, single)]


def curves(number, title, lines, steps, low, high, ticks, legend=RIGHT - 230):
    """A panel with lines by name, and their legend from `legend` on."""
    top = TOP + number * (PANEL + APART)
    bottom = top + PANEL
    x_of = lambda step: LEFT + (RIGHT - LEFT) * step / steps
    y_of = lambda value: bottom - (bottom - top) * (min(max(value, low), high) - low) / (high - low)
    yield from panel(LEFT, RIGHT, top, bottom, title, ticks, y_of)
    for index, (name, values) in enumerate(lines.items()):
        yield path([(x_of(step), y_of(value)) for step, value in values], COLOURS[index], 2)
        y = top + 16 + 19 * index
        yield f'<path d="M{legend} {y}h28" stroke="{COLOURS[index]}" stroke-width="2.5"/>'
        yield text(legend + 36, y + 4.5, name, "start")
    for step in range(0, steps + 1, max(steps // 5, 1)):
        yield text(x_of(step), bottom + 18, step)


def named(ticks):
    return [(tick, f"{tick:g}") for tick in ticks]


def picture(losses, loads, drift, steps):
    height = TOP + (len(losses) + 2) * (PANEL + APART) - 10
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui,sans-serif">'
    yield "<title>Loss of a dense model and of one with experts, how even the load of experts is, and how far meshes are apart</title>"
    yield f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    yield text(LEFT, 24, "Eight experts against a dense model of the same FLOPs per token", "start", 17, "#111", ' font-weight="600"')
    for number, (corpus, of_model) in enumerate(losses.items()):
        lines = {name: smoothed(mean_of(runs)) for name, runs in of_model.items()}
        seen = [value for points in lines.values() for _, value in points]
        low, high = math.floor(2 * min(seen)) / 2, min(math.ceil(2 * max(seen)) / 2, 4)
        ticks = named(low + i / 2 for i in range(round(2 * (high - low)) + 1))
        runs = len(next(iter(of_model.values())))
        yield from curves(number, f"loss on {corpus}, mean of {runs} seeds", lines, steps, low, high, ticks)
    title = "load of the busiest expert over the mean load, mean of layers"
    lines = {name: smoothed(values) for name, values in loads.items()}
    yield from curves(len(losses), title, lines, min(steps, SHORT), 1, 5, named([1, 1.5, 2, 3, 4, 5]))
    title = "relative difference of the loss from one rank, largest of 20 steps (canonical numerics: none)"
    lines = {name: [(step, math.log10(max(value, FLOOR))) for step, value in largest(values)] for name, values in drift.items() if any(values)}
    low, high = round(math.log10(FLOOR)), 0
    ticks = [(power, power_of_ten(power)) for power in range(low, high + 1, 2)]
    yield from curves(len(losses) + 1, title, lines, min(steps, SHORT), low, high, ticks, LEFT + 20)
    yield text((LEFT + RIGHT) / 2, height - 8, "step")
    yield "</svg>"


def loss_table(losses):
    yield f"| text | model | loss of the last {LAST} steps | seeds |\n|---|---|---|---|"
    for corpus, of_model in losses.items():
        for model, runs in of_model.items():
            last = [statistics.fmean(losses[-LAST:]) for losses in runs]
            yield f"| {corpus} | {model} | {statistics.fmean(last):.4f} | {', '.join(f'{loss:.4f}' for loss in last)} |"


def load_table(loads):
    yield f"| balanced by | largest load over mean, step 1 to {LAST} | last {LAST} steps | largest of a step in these |\n|---|---|---|---|"
    for name, values in loads.items():
        last = values[-LAST:]
        yield f"| {name} | {statistics.fmean(values[:LAST]):.2f} | {statistics.fmean(last):.2f} | {max(last):.2f} |"


def drift_table(drift):
    yield "| mesh against one rank | loss apart by at most | first step that differs |\n|---|---|---|"
    for name, values in drift.items():
        first = next((str(step) for step, value in enumerate(values, 1) if value), "none")
        yield f"| {name} | {max(values):.0e} | {first} |"


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--text", type=Path, help="a text of your own, as a second corpus")
    parse.add_argument("--steps", type=int, default=1000)
    parse.add_argument("--seeds", type=int, default=3)
    parse.add_argument("--runs", type=Path, default=machine.ROOT / "benches" / "results" / "experts")
    parse.add_argument("--picture", type=Path, default=machine.ROOT / "docs" / "img" / "experts.svg")
    parse.add_argument("--docs", type=Path, nargs="?", const=machine.ROOT / "docs" / "moe.md", help="the page that shows picture and tables")
    args = parse.parse_args()
    program = programs.Programs(2).build("gpt_train")
    args.runs.mkdir(parents=True, exist_ok=True)
    short = min(args.steps, SHORT)
    corpora = {"the default text": None} | ({args.text.name: args.text} if args.text else {})
    losses = {}
    for corpus, data in corpora.items():
        for model, sets in MODELS.items():
            for seed in range(1, args.seeds + 1):
                file = args.runs / f"{corpus}, {model}, seed {seed}.json".replace(" ", "_").replace(",", "")
                found = run(program, sets | (OF_TEXT if data else {}), args.steps, seed, data, file)
                losses.setdefault(corpus, {}).setdefault(model, []).append(found["loss"])
    loads = {}
    for name, sets in BALANCES.items():
        found = run(program, sets, short, 1, None, args.runs / f"balance, {name}.json".replace(" ", "_").replace(",", ""))
        loads[name] = found["load_imbalance"]
    drift = {}
    for name, sets in MESHES.items():
        single = {key: value for key, value in sets.items() if not key.startswith("parallelism.")}
        alone = args.runs / f"one rank, {', '.join(str(value) for value in single.values())}.json".replace(" ", "_").replace(",", "")
        mesh = args.runs / f"mesh, {name}.json".replace(" ", "_").replace(",", "")
        losses_of = [run(program, sets, short, 1, None, file)["loss"] for sets, file in [(sets, mesh), (single, alone)]]
        drift[name] = differences(*losses_of)

    shown = "\n\n".join("\n".join(table) for table in [loss_table(losses), load_table(loads), drift_table(drift)])
    print(shown)
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    args.picture.write_text("\n".join(picture(losses, loads, drift, args.steps)) + "\n")
    if args.docs:
        drawn = os.path.relpath(args.picture, args.docs.parent)
        image = f"![Loss of eight experts and of a dense model, the load of experts, and how far meshes are apart]({drawn})"
        pages.write_between(args.docs, "benches/experts.py", f"{image}\n\n{shown}")


if __name__ == "__main__":
    main()
