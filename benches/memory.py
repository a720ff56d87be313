#!/usr/bin/env python3
"""What each way to save memory holds on every rank, predicted and measured, and what it costs; draws docs/img/memory.svg.

    benches/memory.py --docs             # three turns of every way: about five minutes on two cores
    benches/memory.py --steps 4 --turns 1 --picture FILE.svg    # a short one, elsewhere
    benches/memory.py --only bf16        # the first way and those with this in their name
    benches/memory.py --self-test        # a tiny model, a step of each way, and no picture: for .ci/run

The ways are run in turn, and their times are held against the first one of the same turn. The tables go to standard output, with --docs
into docs/memory.md. Needs cargo and Python 3.11.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import machine, pages, programs
from harness.svg import COLOURS, text
from peers import lifetime

MIB = 1 << 20
CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "buffers", "other"]
STATES = CATEGORIES[:3]
WARMUP = 2  # steps that do not count
MODEL = {"model.preset": "tiny", "model.num_layers": 8}
TINY = {"model.hidden_size": 16, "model.num_layers": 2, "model.seq_len": 16}

ZERO, RECOMPUTE, OFFLOAD, RULE = "parallelism.zero_stage", "memory.recompute", "memory.offload", "optimizer.name"

# Of each way: its settings, and the bytes of weights, gradients and states between steps for each of a rank's
# parameters, f of N ranks of dp, where they have a formula. Adafactor, Muon and 8-bit Adam depend on the shapes:
# docs/optimizers.md.
WAYS = {
    "nothing": ({}, "16 Ψ", lambda n: 16),
    "ZeRO 1": ({ZERO: 1}, "8 Ψ + 8 Ψ/N", lambda n: 8 + 8 / n),
    "ZeRO 2": ({ZERO: 2}, "4 Ψ + 12 Ψ/N", lambda n: 4 + 12 / n),
    "ZeRO 3": ({ZERO: 3}, "16 Ψ/N", lambda n: 16 / n),
    "recompute selective": ({RECOMPUTE: "selective"}, "16 Ψ", lambda n: 16),
    "recompute sqrt": ({RECOMPUTE: "sqrt"}, "16 Ψ", lambda n: 16),
    "recompute full": ({RECOMPUTE: "full"}, "16 Ψ", lambda n: 16),
    "activations in bf16": ({"memory.saved_dtype": "bf16"}, "16 Ψ", lambda n: 16),
    "bf16": ({"training.dtype": "bf16"}, "18 Ψ", lambda n: 18),
    "bf16, reduced in it": ({"training.dtype": "bf16", "training.reduce_dtype": "bf16"}, "16 Ψ", lambda n: 16),
    "bf16, ZeRO 3": ({"training.dtype": "bf16", "training.reduce_dtype": "bf16", ZERO: 3}, "16 Ψ/N", lambda n: 16 / n),
    "products of bf16": ({"training.matmul_dtype": "bf16"}, "16 Ψ", lambda n: 16),
    "offload optimizer": ({OFFLOAD: "optimizer"}, "8 Ψ", lambda n: 8),
    "offload activations": ({OFFLOAD: "activations"}, "16 Ψ", lambda n: 16),
    "offload all": ({OFFLOAD: "all"}, "4 Ψ", lambda n: 4),
    "bf16, offload all": ({"training.dtype": "bf16", OFFLOAD: "all"}, "2 Ψ", lambda n: 2),
    "SGD": ({RULE: "sgd"}, "8 Ψ", lambda n: 8),
    "Adafactor": ({RULE: "adafactor"}, "", None),
    "8-bit Adam": ({RULE: "adam8bit"}, "", None),
    "Muon": ({RULE: "muon"}, "", None),
    "ZeRO 3, full": ({ZERO: 3, RECOMPUTE: "full"}, "16 Ψ/N", lambda n: 16 / n),
    "ZeRO 3, full, offload all": ({ZERO: 3, RECOMPUTE: "full", OFFLOAD: "all"}, "4 Ψ/N", lambda n: 4 / n),
    "ZeRO 1, Adafactor, selective": ({ZERO: 1, RULE: "adafactor", RECOMPUTE: "selective"}, "", None),
}


def run(program, mesh, model, sets, steps):
    """(Predicted, measured) memory of each rank by category, and the median milliseconds of a step."""
    with tempfile.TemporaryDirectory(prefix="meshwork-memory-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        sets = model | sets | ({"memory.offload_dir": folder} if OFFLOAD in sets else {})
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        argv = [program, "--mesh", mesh, "--steps", str(steps + WARMUP), "--metrics", metrics, *words]
        lifetime.run(argv, check=True, stdout=subprocess.DEVNULL)
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = [event["step_ms"] for event in events if event["event"] == "step"]
    return events[0]["memory_predicted"], events[-1]["memory_measured"], statistics.median(times[WARMUP:])


def total(rank):
    return sum(rank.values())


def states(rank):
    return sum(rank[name] for name in STATES)


def kinds(ranks):
    """Ranks that hold the same, as (their numbers, what each holds)."""
    found = {}
    for number, rank in enumerate(ranks):
        found.setdefault(tuple(rank.values()), []).append(number)
    return [(f"{of[0]}–{of[-1]}" if len(of) > 1 else f"{of[0]}", ranks[of[0]]) for of in found.values()]


def table(ways, dp):
    """One line for each way, of the rank that holds most."""
    first = next(iter(ways.values()))
    parameters = [rank["parameters"] / 4 for rank in first["predicted"]]
    yield "| | predicted, MiB | measured | states, gradients, weights | by formula | | time of a step |\n|---|---|---|---|---|---|---|"
    for name, way in ways.items():
        _, words, each = WAYS[name]
        fullest = max(range(len(parameters)), key=lambda rank: total(way["predicted"][rank]))
        predicted, measured = way["predicted"][fullest], way["measured"][fullest]
        formula = f"{each(dp) * parameters[fullest] / MIB:.2f}" if each else ""
        ratios = way["ratios"]
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if way is not first else ""
        yield (
            f"| {name} | {total(predicted) / MIB:.2f} | {total(measured) / MIB:.2f} | {states(measured) / MIB:.2f} | {formula} | {words}"
            f" | {statistics.median(ratios):.2f}{spread} |"
        )


LEFT, RIGHT, BAR, APART, TOP = 220, 800, 11, 12, 84


def picture(ways, mesh):
    """A bar for each kind of rank, stacked by category."""
    bars = {name: kinds(way["measured"]) for name, way in ways.items()}
    height = TOP + sum(BAR * len(of) + APART for of in bars.values()) + 34
    most = max(total(rank) for of in bars.values() for _, rank in of)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if most / MIB / step <= 8) * MIB
    x_of = lambda size: LEFT + (RIGHT - LEFT) * size / most
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" font-family="system-ui,sans-serif">'
    yield "<title>What each rank holds when it holds most, by what it is for, with each way to save memory</title>"
    yield f'<rect width="860" height="{height}" fill="#fff"/>'
    yield text(16, 26, f"Memory of a rank when it holds most, {mesh}", "start", 17, "#111", ' font-weight="600"')
    for index, name in enumerate(CATEGORIES[:-1]):
        yield f'<rect x="{16 + 130 * index}" y="42" width="13" height="13" fill="{colour(index)}"/>'
        yield text(35 + 130 * index, 53, name, "start")
    for size in range(0, int(most) + 1, step):
        x = x_of(size)
        yield f'<path d="M{x:g} {TOP - 8}V{height - 34}" stroke="#e3e3e3"/>'
        yield text(x, height - 14, f"{size // MIB} MiB" if size else "0")
    y = TOP
    for name, of in bars.items():
        yield text(LEFT - 10, y + BAR * len(of) / 2 + 4, name, "end")
        for ranks, rank in of:
            below = 0
            for index, category in enumerate(CATEGORIES):
                size = rank[category]
                width = x_of(below + size) - x_of(below)
                if width >= 0.05:
                    yield f'<rect x="{x_of(below):.1f}" y="{y}" width="{width:.1f}" height="{BAR - 1.5}" fill="{colour(index)}"/>'
                below += size
            yield text(x_of(below) + 5, y + 9, f"ranks {ranks}", "start", 10, "#777")
            y += BAR
        y += APART
    yield "</svg>"


def colour(index):
    return COLOURS[[5, 2, 3, 1, 4, 7][index]]


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--mesh", default="dp=4,pp=2")
    parse.add_argument("--steps", type=int, default=12, help="steps that are timed in each turn (12)")
    parse.add_argument("--turns", type=int, default=3)
    parse.add_argument("--only", metavar="WORD", default="", help="the first way and those with this in their name: no picture")
    parse.add_argument("--picture", type=Path, default=machine.ROOT / "docs" / "img" / "memory.svg")
    parse.add_argument("--self-test", action="store_true", help="the smallest run")
    parse.add_argument("--docs", type=Path, nargs="?", const=machine.ROOT / "docs" / "memory.md", help="the page that shows picture and table")
    args = parse.parse_args()
    if args.only and args.docs:
        parse.error("--docs shows all ways: leave out --only")
    program = programs.Programs(2).build("gpt_train")
    if args.self_test:
        args.steps, args.turns, args.mesh = 1, 1, "dp=2,pp=2"
    model = TINY if args.self_test else MODEL
    dp = next((int(degree) for axis, degree in (part.split("=") for part in args.mesh.split(",")) if axis == "dp"), 1)
    first = next(iter(WAYS))
    ways = {name: {"ratios": []} for name in WAYS if name == first or args.only in name}
    off = []
    for turn in range(args.turns):
        for name in ways:
            sets = WAYS[name][0]
            print(f"{turn + 1}/{args.turns}  {name}", file=sys.stderr, flush=True)
            predicted, measured, time = run(program, args.mesh, model, sets, args.steps)
            base = time if name == first else base
            ways[name] |= {"predicted": predicted, "measured": measured}
            ways[name]["ratios"].append(time / base)
            if any(abs(total(a) - total(b)) > 0.05 * total(b) for a, b in zip(predicted, measured)):
                off.append(name)
    facts = machine.hardware(2, os.environ.get("MESHWORK_SIMD"))
    bf16 = "with" if facts["bf16_products"] else "without"
    kept = f" kept to {facts['instructions']}" if facts["instructions"] else ""
    on = f"Measured on 2 cores of {facts['cpu']}{kept}, {bf16} instructions for products of bf16:"
    shown = "\n".join([on, "", *table(ways, dp)])
    print(shown)
    drawing = "\n".join(picture(ways, args.mesh)) + "\n"
    if not (args.self_test or args.only):
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        args.picture.write_text(drawing)
    if args.docs:
        drawn = os.path.relpath(args.picture, args.docs.parent)
        image = f"![What each rank holds with each way to save memory, by what it is for]({drawn})"
        pages.write_between(args.docs, "benches/memory.py", f"{image}\n\n{shown}")
    if off:
        sys.exit(f"error: predicted and measured memory are more than 5% apart: {', '.join(sorted(set(off)))}")


if __name__ == "__main__":
    main()
