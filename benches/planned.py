#!/usr/bin/env python3
"""Predicted against measured steps of this machine: 40 meshes of the model `small`, every rank a thread.

    benches/planned.py              # writes benches/results/DATE-HARDWARE-planned.md; 7 minutes on two cores that do nothing else
    benches/planned.py --docs       # the summary in docs/planner.md too
    benches/planned.py --self-test  # two meshes of a tiny model, into a temporary folder: for .ci/run

`examples/plan --measure` measures the machine, by other models, before, between and after the runs, because rates change from minute to
minute; the measurement with the fastest products counts. Each mesh is run for some steps in turns. Of these the fastest counts, as in the
measurement: other programs and virtual machines only slow a step down. The median and the slowest are told beside it. Needs cargo and
Python 3.11.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path

from harness import machine

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "target" / "release" / "examples"
BATCH, TURNS, STEPS = 8, 2, 3
DOCS = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- benches/planned.py --docs -->\n", "<!-- end of the runs here -->"

ZERO, RECOMPUTE = "parallelism.zero_stage", "memory.recompute"
SEQUENCE, MICROS = "parallelism.sequence_parallel", "pipeline.num_microbatches"
SCHEDULE = "pipeline.schedule"
# Degrees of dp, tp, pp and cp, and other keys.
MESHES = [
    ((1, 1, 1, 1), {}),
    ((1, 1, 1, 1), {RECOMPUTE: "full"}),
    ((1, 1, 1, 1), {MICROS: 4}),
    ((2, 1, 1, 1), {}),
    ((2, 1, 1, 1), {ZERO: 1}),
    ((2, 1, 1, 1), {ZERO: 3}),
    ((2, 1, 1, 1), {RECOMPUTE: "full"}),
    ((2, 1, 1, 1), {RECOMPUTE: "selective"}),
    ((2, 1, 1, 1), {MICROS: 2}),
    ((4, 1, 1, 1), {}),
    ((4, 1, 1, 1), {ZERO: 1}),
    ((8, 1, 1, 1), {}),
    ((8, 1, 1, 1), {ZERO: 2}),
    ((1, 2, 1, 1), {}),
    ((1, 2, 1, 1), {SEQUENCE: "true"}),
    ((1, 2, 1, 1), {MICROS: 2}),
    ((1, 3, 1, 1), {}),
    ((1, 6, 1, 1), {}),
    ((1, 2, 1, 1), {SEQUENCE: "true", MICROS: 2}),
    ((1, 1, 2, 1), {}),
    ((1, 1, 2, 1), {MICROS: 2}),
    ((1, 1, 2, 1), {MICROS: 8}),
    ((1, 1, 2, 1), {SCHEDULE: "gpipe", MICROS: 4}),
    ((1, 1, 2, 1), {SCHEDULE: "zb_h1", MICROS: 4}),
    ((1, 1, 3, 1), {MICROS: 4}),
    ((1, 1, 6, 1), {MICROS: 8}),
    ((1, 1, 4, 1), {MICROS: 8}),
    ((1, 1, 1, 2), {}),
    ((1, 1, 1, 4), {}),
    ((1, 1, 1, 2), {RECOMPUTE: "full"}),
    ((2, 2, 1, 1), {}),
    ((2, 2, 1, 1), {SEQUENCE: "true", ZERO: 1}),
    ((2, 1, 2, 1), {}),
    ((2, 1, 2, 1), {ZERO: 1, MICROS: 4}),
    ((1, 2, 2, 1), {}),
    ((1, 2, 3, 1), {MICROS: 4}),
    ((2, 1, 1, 2), {}),
    ((1, 2, 1, 2), {}),
    ((2, 2, 2, 1), {}),
    ((4, 1, 2, 1), {MICROS: 2}),
]


def words(mesh, keys):
    """A mesh as the table has it."""
    degrees = ",".join(f"{axis}={degree}" for axis, degree in zip(["dp", "tp", "pp", "cp"], mesh) if degree > 1) or "dp=1"
    return " ".join([degrees, *(f"{key.split('.')[1]}={value}" for key, value in keys.items())])


def run(argv):
    told = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    if told.returncode:
        sys.exit(f"error: {' '.join(str(word) for word in argv)}\n{told.stderr}")
    return told.stdout


def machine_of(cluster):
    """The machine as it is now: operations a second of its products, and its file."""
    told = run([PROGRAMS / "plan", "--measure", cluster])
    return tomllib.loads(told)["card"]["f32"], told


def sets(preset, mesh, keys):
    degrees = {f"parallelism.{axis}": degree for axis, degree in zip(["dp", "tp", "pp", "cp"], mesh)}
    every = {"model.preset": preset, "training.global_batch_size": BATCH} | degrees | keys
    return [word for key, value in every.items() for word in ("--set", f"{key}={value}")]


def predicted(cluster, preset, mesh, keys):
    """Seconds of a step."""
    ranks = mesh[0] * mesh[1] * mesh[2] * mesh[3]
    told = run([PROGRAMS / "plan", "--cluster", cluster, "--cards", ranks, "--one", *sets(preset, mesh, keys), "--set", "training.steps=1"])
    line = json.loads(told)
    return line["predicted_s"] if "predicted_s" in line else sys.exit(f"error: {words(mesh, keys)}: {line}")


def measured(folder, preset, mesh, keys):
    """Seconds of each step but the first."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    run([PROGRAMS / "gpt_train", *sets(preset, mesh, keys), "--set", "metrics.sample_tokens=0", "--steps", STEPS + 1, "--metrics", metrics])
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line["step_ms"] / 1e3 for line in lines if line.get("event") == "step" and line["step"] > 1]


def summary(rows):
    off = sorted(abs(own / min(times) - 1) for _, own, times in rows)
    best = min(min(times) for *_, times in rows)
    chosen = min(rows, key=lambda row: row[1])
    spread = statistics.median(statistics.median(times) / min(times) for *_, times in rows)
    return (
        f"Of {len(rows)} meshes {sum(value <= 0.1 for value in off)} are predicted within 10% of their fastest step; the error is "
        f"{100 * statistics.median(off):.1f}% in the median, {100 * off[len(off) * 9 // 10]:.1f}% in nine of ten, {100 * off[-1]:.1f}% at most. "
        f"The mesh with the least predicted time, `{chosen[0]}`, took {100 * (min(chosen[2]) / best - 1):.1f}% longer than the fastest. "
        f"The median step of a mesh took {100 * (spread - 1):.0f}% longer than its fastest (the median over the meshes)."
    )


def report(rows, told, peaks, hardware):
    lines = [
        f"# Predicted and measured steps: {hardware}, {datetime.date.today().isoformat()}",
        "",
        f"`benches/planned.py`: model `small`, batches of {BATCH} sequences, every rank a thread; {TURNS} runs of {STEPS + 1} steps a mesh.",
        "",
        summary(rows),
        "",
        "| mesh | predicted | fastest step | off | median step | slowest step |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {own:.3f} s | {min(times):.3f} s | {100 * (own / min(times) - 1):+.1f}% | {statistics.median(times):.3f} s | {max(times):.3f} s |"
            for name, own, times in rows
        ),
        "",
        f"The machine, as `plan --measure` found it; peaks of all measurements, in GFLOP/s of a core: {', '.join(f'{peak / 1e9:.0f}' for peak in peaks)}.",
        "",
        "```toml",
        told.strip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--docs", action="store_true", help="write the summary into docs/planner.md")
    parse.add_argument("--self-test", action="store_true", help="two meshes of a tiny model, into a temporary folder")
    args = parse.parse_args()
    run(["cargo", "build", "--locked", "--release", "--example", "plan", "--example", "gpt_train"])
    preset, meshes, turns = ("tiny", MESHES[3:5], 1) if args.self_test else ("small", MESHES, TURNS)
    folder = Path(tempfile.mkdtemp(prefix="meshwork-planned-"))
    cluster = folder / "this-machine.toml"
    found = [machine_of(cluster)]
    times = [[] for _ in meshes]
    for turn in range(turns):
        # Every second turn is in reverse, so that a slow minute does not meet the same meshes again.
        for at, (mesh, keys) in list(enumerate(meshes))[:: -1 if turn % 2 else 1]:
            print(f"turn {turn + 1}/{turns}: {words(mesh, keys)}", file=sys.stderr, flush=True)
            times[at] += measured(folder, preset, mesh, keys)
        found.append(machine_of(cluster))
    peaks = [peak for peak, _ in found]
    told = max(found)[1]
    cluster.write_text(told, encoding="utf-8")
    rows = [(words(mesh, keys), predicted(cluster, preset, mesh, keys), times[at]) for at, (mesh, keys) in enumerate(meshes)]
    facts = machine.hardware(os.cpu_count())
    hardware = f"{facts['cpu']}, {facts['cores']} cores"
    text = report(rows, told, peaks, hardware)
    results = folder if args.self_test else ROOT / "benches" / "results"
    path = results / f"{datetime.date.today().isoformat()}-{machine.slug(facts)}-planned.md"
    path.write_text(text, encoding="utf-8")
    print(text)
    if args.docs:
        page = DOCS.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        named = f"{summary(rows)} ({hardware}; [all meshes](../{path.relative_to(ROOT)}))"
        named = textwrap.fill(named, 120, break_long_words=False, break_on_hyphens=False)
        DOCS.write_text(f"{before}{BEGIN}{named}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
