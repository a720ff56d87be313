#!/usr/bin/env python3
"""Predicted against measured steps of this machine: 40 meshes of the model `small`, every rank a thread or in processes.

    benches/planned.py              # writes benches/results/DATE-HARDWARE-planned.md; 8 minutes on two cores that do nothing else
    benches/planned.py --docs       # the summary in docs/planner.md too
    benches/planned.py --processes 2 [--docs]  # over two processes joined by TCP: those of the meshes that have an even number of ranks
    benches/planned.py --processes 2 --mpirun target/mpi/openmpi/bin/mpirun
    benches/planned.py --minutes 7 --rows FILE  # as many meshes as begin within 7 minutes; the next such call goes on, and the last one reports
    benches/planned.py --auto       # what `gpt_train --mesh auto` takes, against runs of all meshes of two ranks in turn: 3 minutes
    benches/planned.py --self-test  # two meshes of a tiny model, into a temporary folder: for .ci/run

`examples/plan --measure` measures the machine, by other models, before each run, because its speed changes from minute to minute: a run is
compared with the prediction by the measurement just before it. A measurement during which other programs took a core is made again. Both take
the median of equal steps: the fastest of short steps is faster than any long one where the speed changes within a second. Which mesh is the
best is predicted from one measurement, that of the median speed. The mesh that it chooses and those with the fastest runs then run in turn. With
--processes the links between processes are measured too. With --minutes a machine has to do nothing else for a few minutes at a time. Needs cargo and Python 3.11.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from pathlib import Path

from harness import machine, programs
from harness.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
OURS = programs.Programs(os.cpu_count())
BATCH, STEPS = 8, 5
TRIES = 3  # of a measurement, while other programs disturb it
ROUNDS, RIVALS = 3, 3  # of the chosen mesh against the fastest ones
BUSY = 5  # percent of the cores: what `plan --measure` warns of
DOCS = ROOT / "docs" / "planner.md"
END = "<!-- end of the runs here -->"

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


def check(argv, code, errors):
    if code:
        sys.exit(f"error: {' '.join(str(word) for word in argv)}\n{errors}")


def run(argv):
    told = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    check(argv, told.returncode, told.stderr)
    return told.stdout


class Processes:
    """How many processes the ranks of a run are in, and what joins them: mpirun, or without it TCP."""

    def __init__(self, count, mpirun):
        self.count, self.mpirun = count, mpirun

    def words(self):
        joined = "MPI" if self.mpirun else "TCP"
        return "every rank a thread" if self.count == 1 else f"ranks in {self.count} processes that {joined} joins"

    def run(self, argv):
        """What the process of rank 0 prints, and of mpirun all."""
        argv = [str(word) for word in argv]
        if self.count == 1:
            return run(argv)
        if self.mpirun:
            return run([*self.mpirun.split(), "-n", self.count, *argv])
        with free_port() as port:
            where = os.environ | {"WORLD_SIZE": str(self.count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            started = [subprocess.Popen(argv, env=where | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(self.count)]
            ends = [process.communicate() for process in started]
        for process, (_, errors) in zip(started, ends):
            check(argv, process.returncode, errors)
        return ends[0][0]

    def sets(self, ranks):
        """The keys of a run of so many ranks."""
        kind = {"comm.kind": "mpi" if self.mpirun else "tcp", "comm.ranks_per_process": ranks // self.count}
        return kind if self.count > 1 else {}


def measured_alone(cluster, tries):
    """The file of a measurement of this machine that other programs did not disturb, or the last of so many."""
    for _ in range(tries):
        told = run([OURS.build("plan"), "--measure", cluster])
        if int(re.search(r"other programs took (\d+)%", told)[1]) < BUSY:
            break
    return told


def machine_of(cluster, processes, tries):
    """The machine as it is now: operations a second of its products, and its file."""
    told = measured_alone(cluster, tries)
    if processes.count > 1:
        processes.run([OURS.build("plan"), "--measure", cluster])
        told = cluster.read_text(encoding="utf-8")
    return tomllib.loads(told)["card"]["f32"], told


def ranks_of(mesh):
    return mesh[0] * mesh[1] * mesh[2] * mesh[3]


def sets(preset, mesh, keys):
    degrees = {f"parallelism.{axis}": degree for axis, degree in zip(["dp", "tp", "pp", "cp"], mesh)}
    every = {"model.preset": preset, "training.global_batch_size": BATCH} | degrees | keys
    return [word for key, value in every.items() for word in ("--set", f"{key}={value}")]


def predicted(cluster, preset, mesh, keys, processes):
    """Seconds of a step."""
    where = [OURS.build("plan"), "--cluster", cluster, "--cards", ranks_of(mesh), "--processes", processes.count]
    told = run([*where, "--one", *sets(preset, mesh, keys), "--set", "training.steps=1"])
    line = json.loads(told)
    return line["predicted_s"] if "predicted_s" in line else sys.exit(f"error: {words(mesh, keys)}: {line}")


def measured(folder, preset, mesh, keys, processes):
    """Seconds of each step but the first."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    every = sets(preset, mesh, keys | processes.sets(ranks_of(mesh)))
    processes.run([OURS.build("gpt_train"), *every, "--set", "metrics.sample_tokens=0", "--steps", STEPS + 1, "--metrics", metrics])
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line["step_ms"] / 1e3 for line in lines if line.get("event") == "step" and line["step"] > 1]


def finalists(rows):
    """The mesh with the least predicted time, and after it those with the fastest runs."""
    chosen = min(rows, key=lambda row: row["common"])
    return [chosen, *sorted((row for row in rows if row is not chosen), key=lambda row: statistics.median(row["times"]))[:RIVALS]]


def summary(rows, turns):
    off = sorted(abs(row["own"] / statistics.median(row["times"]) - 1) for row in rows)
    chosen = finalists(rows)[0]["name"]
    fastest = min(turns, key=lambda name: statistics.median(turns[name]))
    lost = statistics.median(turns[chosen]) / statistics.median(turns[fastest]) - 1
    mean = statistics.mean(row["own"] / statistics.median(row["times"]) - 1 for row in rows)
    spread = statistics.median(max(row["times"]) / min(row["times"]) for row in rows)
    return (
        f"Of {len(rows)} meshes {sum(value <= 0.1 for value in off)} are predicted within 10% of their median step; the error is "
        f"{100 * statistics.median(off):.1f}% in the median, {100 * off[len(off) * 9 // 10]:.1f}% in nine of ten, {100 * off[-1]:.1f}% at most, "
        f"and {100 * mean:+.1f}% in the mean. "
        f"The mesh with the least predicted time, `{chosen}`, took {100 * lost:.1f}% longer than the fastest, `{fastest}`, in {ROUNDS} rounds of runs "
        f"in turn. Of a mesh's {STEPS} steps the slowest took {100 * (spread - 1):.0f}% longer than the fastest (the median over the meshes)."
    )


def auto(folder, preset, rounds):
    """What `--mesh auto` takes in each round, and the seconds of steps of all meshes that it chooses from, in turn."""
    batch = sets(preset, (1, 1, 1, 1), {})[:4]  # Of these keys only the model and the batch: --mesh has the degrees.
    alike = [mesh for mesh, keys in MESHES if ranks_of(mesh) <= os.cpu_count() and not keys]
    taken, turns = [], {words(mesh, {}): [] for mesh in alike}
    for _ in range(rounds):
        argv = [OURS.build("gpt_train"), "--mesh", "auto", *batch, "--set", "metrics.sample_tokens=0", "--steps", "1"]
        told = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
        check(argv, told.returncode, told.stderr)
        taken.append(re.search(r"--mesh auto takes (([\w=,]+): .*)", told.stdout + told.stderr).groups())
        for mesh in alike:
            turns[words(mesh, {})] += measured(folder, preset, mesh, {}, Processes(1, None))
    return taken, turns


def auto_report(taken, turns, hardware):
    best = min(turns, key=lambda name: statistics.median(turns[name]))
    least = statistics.median(turns[best])
    lost = [statistics.median(turns[name]) / least - 1 for _, name in taken]
    lines = [
        f"# What --mesh auto takes: {hardware}, {datetime.date.today().isoformat()}",
        "",
        f"`benches/planned.py --auto`: model `small`, batches of {BATCH} sequences; in each of {len(taken)} rounds `gpt_train --mesh auto`, and then",
        f"runs of {STEPS + 1} steps of every mesh that it chooses from, in turn. `{best}` is the fastest; steps of the slowest mesh that was taken",
        f"are {100 * max(lost):.1f}% longer.",
        "",
        "| mesh | median step | fastest | slowest | beside the fastest mesh |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {statistics.median(times):.3f} s | {min(times):.3f} s | {max(times):.3f} s | {100 * (statistics.median(times) / least - 1):+.1f}% |"
            for name, times in turns.items()
        ),
        "",
        "What it said:",
        "",
        *(f"- `{said}`" for said, _ in taken),
        "",
    ]
    return "\n".join(lines)


def report(rows, turns, told, hardware, processes):
    peaks = [row["peak"] / 1e9 for row in rows]
    lines = [
        f"# Predicted and measured steps: {hardware}, {datetime.date.today().isoformat()}",
        "",
        f"`benches/planned.py`: model `small`, batches of {BATCH} sequences, {processes.words()}; a run of {STEPS + 1} steps a mesh, after a measurement.",
        "",
        summary(rows, turns),
        "",
        "| mesh | machine | predicted | median step | off | fastest | slowest | predicted at the median speed |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['name']} | {row['peak'] / 1e9:.0f} GFLOP/s | {row['own']:.3f} s | {statistics.median(row['times']):.3f} s | "
            f"{100 * (row['own'] / statistics.median(row['times']) - 1):+.1f}% | {min(row['times']):.3f} s | {max(row['times']):.3f} s | {row['common']:.3f} s |"
            for row in rows
        ),
        "",
        f"In turn, {ROUNDS} runs of each: the mesh with the least predicted time, and those with the fastest runs.",
        "",
        "| mesh | median step | fastest | slowest |",
        "|---|---|---|---|",
        *(f"| {name} | {statistics.median(times):.3f} s | {min(times):.3f} s | {max(times):.3f} s |" for name, times in turns.items()),
        "",
        f"*machine*: products of a core, as `plan --measure` found them just before: {min(peaks):.0f} to {max(peaks):.0f} GFLOP/s. The measurement of the",
        "median speed:",
        "",
        "```toml",
        told.strip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def hardware_here():
    facts = machine.hardware(os.cpu_count())
    return f"{facts['cpu']}, {facts['cores']} cores"


def written(text, results, what):
    """Prints a report and returns the file that it is written to."""
    path = results / f"{datetime.date.today().isoformat()}-{machine.slug(machine.hardware(os.cpu_count()))}-{what}.md"
    path.write_text(text, encoding="utf-8")
    print(text)
    return path


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--docs", action="store_true", help="write the summary into docs/planner.md")
    parse.add_argument("--processes", type=int, default=1, help="processes of the ranks [default: 1]")
    parse.add_argument("--mpirun", metavar="COMMAND", help="what starts the processes, such as mpirun --oversubscribe [default: this script, over TCP]")
    parse.add_argument("--minutes", type=float, help="begin no run after so many minutes [default: all in one call]")
    parse.add_argument("--rows", metavar="FILE", type=Path, help="with --minutes: where the rows are kept between the calls")
    parse.add_argument("--auto", action="store_true", help="what --mesh auto takes, against runs in turn")
    parse.add_argument("--self-test", action="store_true", help="two meshes of a tiny model, into a temporary folder")
    args = parse.parse_args()
    preset, meshes, tries, rounds = ("tiny", MESHES[3:5], 1, 1) if args.self_test else ("small", MESHES, TRIES, ROUNDS)
    processes = Processes(args.processes, args.mpirun)
    hardware = hardware_here()
    meshes = [(mesh, keys) for mesh, keys in meshes if ranks_of(mesh) % processes.count == 0]
    folder = Path(tempfile.mkdtemp(prefix="meshwork-planned-"))
    results = folder if args.self_test else ROOT / "benches" / "results"
    if args.auto:
        written(auto_report(*auto(folder, preset, rounds), hardware), results, "mesh-auto")
        return
    cluster = folder / "this-machine.toml"
    kept = args.rows or folder / "rows.jsonl"
    meshes = {words(*mesh): mesh for mesh in meshes}
    found = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    found = {row["name"]: row for row in found}
    if others := found.keys() - meshes.keys():
        sys.exit(f"error: {kept} has rows of other meshes: {', '.join(others)}")
    begun = time.monotonic()
    for name, mesh in meshes.items():
        if name in found:
            continue
        if args.minutes and time.monotonic() - begun > 60 * args.minutes:
            print(f"{len(found)} of {len(meshes)} meshes are in {kept}; the same command goes on", file=sys.stderr)
            return
        print(f"{len(found) + 1}/{len(meshes)}: {name}", file=sys.stderr, flush=True)
        peak, told = machine_of(cluster, processes, tries)
        own = predicted(cluster, preset, *mesh, processes)
        found[name] = {"name": name, "peak": peak, "told": told, "own": own, "times": measured(folder, preset, *mesh, processes)}
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found[name]) + "\n")
    rows = [found[name] for name in meshes]
    told = sorted((row["peak"], row["told"]) for row in rows)[len(rows) // 2][1]
    cluster.write_text(told, encoding="utf-8")
    for row in rows:
        row["common"] = predicted(cluster, preset, *meshes[row["name"]], processes)
    turns = {row["name"]: [] for row in finalists(rows)}
    for _ in range(rounds):
        for name, times in turns.items():
            times += measured(folder, preset, *meshes[name], processes)
    over = f"-{processes.count}-processes" if processes.count > 1 else ""
    path = written(report(rows, turns, told, hardware, processes), results, f"planned{over}")
    if args.docs:
        page = DOCS.read_text(encoding="utf-8")
        begin = f"<!-- benches/planned.py{f' --processes {processes.count}' if processes.count > 1 else ''} --docs -->\n"
        before, rest = page.split(begin)
        named = f"{summary(rows, turns)} ({hardware}; [all meshes](../{path.relative_to(ROOT)}))"
        named = textwrap.fill(named, 120, break_long_words=False, break_on_hyphens=False)
        DOCS.write_text(f"{before}{begin}{named}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except programs.Failed as failed:
        sys.exit(f"error: {failed}")
