#!/usr/bin/env python3
"""What saving costs a step: within one run, the steps during a save against the steps around it.

    benches/saving.py                        # preset small, a save after every 10 steps, 12 saves
    benches/saving.py --dir DIR -- --mesh dp=2    # saves in DIR, whose disk counts; more arguments of gpt_train
    benches/saving.py --memory               # snapshots in memory instead (checkpoint.peer_every), of two processes of Open MPI
    benches/saving.py --self-test            # a tiny model and two saves: for .ci/run

A save begins after a step. It copies the state, which delays the next step, and writes while further steps run. The steps from
the first after it until the save is over are compared with the median of the other steps between the save before and the next one.
A snapshot in memory is over before the next step begins, which it delays: the step is timed from the end of the one before.
Needs cargo and Python 3.11.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import programs
from peers import lifetime

EVERY = 10
SAVED = re.compile(r"step (\d+)  saved in .* \(([\d.]+) s\)")


def steps_of(saved, seconds, step_ms):
    """The steps that run while a save does: the next one, which the copy of the state delays, and all that begin before the save is over."""
    left, step = seconds * 1e3, saved
    while step + 1 in step_ms and (left > 0 or step == saved):
        step += 1
        left -= step_ms[step]
    return range(saved + 1, step + 1)


def compared(step_ms, saves):
    """Of each save that has steps beside it: (milliseconds of the slowest step during it, all it adds, median of the others)."""
    during = {saved: steps_of(saved, seconds, step_ms) for saved, seconds in saves.items()}
    busy = {step for steps in during.values() for step in steps}
    rows = []
    for saved, steps in during.items():
        others = [step_ms[step] for step in range(saved - EVERY + 1, saved + EVERY + 1) if step in step_ms and step not in busy]
        if steps and others:
            median = statistics.median(others)
            rows.append((max(step_ms[step] for step in steps), sum(step_ms[step] - median for step in steps), median))
    return rows


def run(command, memory, dir, saves, more):
    """Milliseconds of each step after the first ten, and seconds of each save: of snapshots in memory, after their step, none."""
    metrics = Path(dir) / "metrics.jsonl"
    sets = [f"checkpoint.peer_every={EVERY}"] if memory else [f"checkpoint.dir={Path(dir) / 'run'}", f"checkpoint.every={EVERY}"]
    steps = (saves + 2) * EVERY  # what comes first warms up, and after the last save there are steps beside it
    argv = [*command.argv, "--steps", str(steps), "--metrics", metrics, *more, *(word for one in sets for word in ("--set", one))]
    out = lifetime.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | command.environment).stdout
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    step_ms = {event["step"]: event["step_ms"] for event in events if event["event"] == "step" and event["step"] > EVERY}
    found = {int(step): float(seconds) for step, seconds in SAVED.findall(out)}
    if memory:
        found = dict.fromkeys(range(EVERY, steps, EVERY), 0.0)
    return step_ms, {step: seconds for step, seconds in found.items() if EVERY < step < steps}


def check_arithmetic():
    """`compared` on made-up steps of 10 ms, with a save of no measurable time after step 20 and one of 25 ms after step 30."""
    step_ms = dict.fromkeys(range(11, 41), 10.0) | {21: 12.0, 31: 15.0, 32: 11.0}
    expected = [(12.0, 2.0, 10.0), (15.0, 6.0, 10.0)]
    rows = compared(step_ms, {20: 0.0, 30: 0.025})
    assert rows == expected, f"{rows} and not {expected}"


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--saves", type=int, default=12, help="saves that are measured (12)")
    parse.add_argument("--dir", type=Path, help="where checkpoints are written (the system's place for temporary files)")
    parse.add_argument("--memory", action="store_true", help="snapshots in the memory of processes")
    parse.add_argument("--self-test", action="store_true", help="the smallest run")
    parse.add_argument("more", nargs="*", help="arguments of gpt_train, after --")
    args = parse.parse_args()
    jobs = programs.Programs(2)
    command = programs.Command([jobs.build("gpt_train")])
    more = ["--set", "model.preset=small", *args.more]
    if args.memory:
        command = jobs.command("mpirun -n 2 gpt_train --mesh dp=2 --set parallelism.elastic=dp")
    if args.self_test:
        check_arithmetic()
        args.saves, more = 2, "--set model.hidden_size=16 --set model.num_layers=1 --set model.seq_len=16".split()
    with tempfile.TemporaryDirectory(prefix="meshwork-saving-", dir=args.dir) as dir:
        step_ms, saves = run(command, args.memory, dir, args.saves, more)
    rows = compared(step_ms, saves)
    if len(saves) != args.saves or not rows:
        sys.exit(f"error: {len(saves)} saves and not {args.saves}, {len(rows)} of them with steps beside them: save less often")
    slowest, added, others = (statistics.median(column) for column in zip(*rows))
    ratios = sorted(row[0] / row[2] for row in rows)
    print(f"{len(rows)} saves of {statistics.median(saves.values()):.2f} s, one after every {EVERY} steps of {others:.1f} ms")
    print(f"slowest step during a save: {slowest:.1f} ms, {statistics.median(ratios):.2f} of the others ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"a save adds {added:.1f} ms to the run: {added / (EVERY * others):.1%} of its {EVERY} steps")


if __name__ == "__main__":
    main()
