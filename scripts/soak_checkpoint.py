#!/usr/bin/env python3
"""Kills a training run with SIGKILL at random moments, and resumes it on random meshes: the losses must be those of a run that nobody killed.

    cargo build --release --example gpt_train
    scripts/soak_checkpoint.py                       # 100 kills
    scripts/soak_checkpoint.py --count 10 --seconds 90
    scripts/soak_checkpoint.py --seed 7 --chain 3    # one chain again

A chain is a run of `STEPS` steps that saves after every one or two steps, and is killed until it has been killed `KILLS` times; then it
runs to its end, unless it has come there before. Numerics are canonical, so each part of it may have another mesh, drawn at random. After each kill the script checks
that

- the next part resumes, and passes over no checkpoint: what a killed run leaves is whole, or has a name that is not that of a checkpoint;
- it goes on no earlier than the newest checkpoint that the killed part said it had saved;
- every loss and gradient norm in the metrics, also of steps that are trained twice, equals that of the uninterrupted run, bit by bit.

Half of the moments are random times after the start, half random times after a save began: the folder of a checkpoint that is being
written has appeared. A seed and the number of a chain draw the same meshes and moments again; what a process is doing at that moment is
up to the machine. Needs Python 3.11 and nothing else.
"""

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 40
KILLS = 5  # in a chain
MESHES = ["dp=1", "dp=2", "tp=2", "pp=2", "dp=2,tp=2", "dp=2,pp=2", "tp=2,pp=2", "dp=4", "tp=4", "pp=4", "dp=2,tp=2,pp=2"]
MODELS = {
    "gpt2": "model.hidden_size=64 model.num_layers=4 model.seq_len=32 model.dropout=0.1",
    "llama": "model.kind=llama model.hidden_size=64 model.num_layers=4 model.seq_len=32 model.num_heads=4 model.num_kv_heads=2 model.ffn_hidden_size=128",
}
COMMON = f"training.numerics=canonical training.global_batch_size=8 lr_scheduler.decay_steps={STEPS}"
PART_SECONDS = 120  # a part that takes longer hangs


class Failed(Exception):
    """What is wrong; the seed and the chain are added where it is reported."""


def command(program, model, mesh, folder, *more):
    """Trains to the last step."""
    sets = [*MODELS[model].split(), *COMMON.split(), *more]
    return [
        program, "--mesh", mesh, "--steps", str(STEPS), "--metrics", folder / "metrics.jsonl",
        *(word for one in sets for word in ("--set", one)),
    ]  # fmt: skip


def events(folder, kind):
    """The events of one kind in the metrics. A killed run leaves whole lines too."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def numbers(event):
    return event["loss"], event["grad_norm"]


def saved(output):
    """The steps that a part said it had saved."""
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ") and "  saved in " in line]


def run_part(argv, run, moment):
    """Runs a part, and kills it at a moment: what it printed, whether it was killed, and whether a save was under way."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begun = time.monotonic()
        child = subprocess.Popen(argv, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        try:
            if moment is None:
                child.wait(PART_SECONDS)
            else:
                kind, number, seconds = moment
                if kind == "save":  # that number of saves have begun
                    seen = set()
                    while child.poll() is None and len(seen) < number and time.monotonic() - begun < PART_SECONDS:
                        seen |= {path.name for path in run.glob("step-*.partial")}
                        time.sleep(0.0002)
                time.sleep(seconds)
        except subprocess.TimeoutExpired as late:
            raise Failed(f"did not end in {PART_SECONDS} s: {printable(argv)}") from late
        finally:
            killed = child.poll() is None
            child.kill()
            child.wait()
        out.seek(0)
        err.seek(0)
        texts = out.read(), err.read()
    if not killed and child.returncode:
        raise Failed(f"ended with {child.returncode}: {printable(argv)}\n{texts[1]}")
    return texts[0], killed, any(run.glob("step-*.*")) if killed else False


def printable(argv):
    return " ".join(str(word) for word in argv)


def run_chain(program, seed, number, wanted, kills, span):
    """One chain with so many kills. The moments at which it was killed, as text, and how many kills fell into a save."""
    draw = random.Random(f"{seed}/{number}")
    model, every = draw.choice(list(MODELS)), draw.choice([1, 2])
    told, in_save = [], 0
    with tempfile.TemporaryDirectory(prefix="meshwork-soak-") as name:
        folder, run = Path(name), Path(name) / "run"
        promised = None
        for part in range(kills + 1):
            mesh = draw.choice(MESHES)
            if draw.random() < 0.5:
                moment = ("time", 0, draw.uniform(0, span))
            else:
                moment = ("save", draw.randrange(1, 8), draw.expovariate(1 / 0.003))
            if part == kills:
                moment = None
            keys = [f"checkpoint.dir={run}", f"checkpoint.every={every}", "checkpoint.resume=true"]
            argv = command(program, model, mesh, folder, *keys)
            starts = len(events(folder, "start"))
            out, killed, saving = run_part(argv, run, moment)
            in_save += saving
            if "warning:" in out:
                raise Failed(f"part {part} on {mesh} said:\n{out}")
            begun = events(folder, "start")[starts:]
            if begun and promised is not None and (begun[0].get("resumed") or 0) < promised:
                raise Failed(f"part {part} on {mesh} resumed after step {begun[0].get('resumed')}, and {promised} was saved")
            promised = max([promised or 0, *saved(out)]) or None
            told.append(f"{mesh} {'killed' if killed else 'done'}")
            if not killed:
                break
        found = events(folder, "step")
        for event in found:
            if numbers(event) != wanted[model][event["step"] - 1]:
                right = wanted[model][event["step"] - 1]
                raise Failed(f"step {event['step']} has loss and norm {numbers(event)}, uninterrupted {right}: {', '.join(told)}")
        if found[-1]["step"] != STEPS or {event["step"] for event in found} != set(range(1, STEPS + 1)):
            raise Failed(f"the metrics lack steps: {sorted({event['step'] for event in found})}")
    return model, told, in_save


def uninterrupted(program):
    """Loss and norm of each step of each model, on one rank, and the seconds that the slowest takes."""
    wanted, seconds = {}, 0
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="meshwork-soak-") as name:
            argv, begun = command(program, model, "dp=1", Path(name)), time.monotonic()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=PART_SECONDS)
            seconds = max(seconds, time.monotonic() - begun)
            wanted[model] = [numbers(event) for event in events(Path(name), "step")]
    return wanted, seconds


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--count", type=int, default=100, help="kills (100)")
    parse.add_argument("--seconds", type=float, default=3600, help="start no chain after so many seconds, and fail then (3600)")
    parse.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of meshes and moments (random)")
    parse.add_argument("--chain", type=int, help="run this chain of the seed alone")
    parse.add_argument("--program", type=Path, default=ROOT / "target/release/examples/gpt_train", help="a built gpt_train")
    args = parse.parse_args()
    if not (args.program.exists() or shutil.which(str(args.program))):
        sys.exit(f"{args.program} is missing: cargo build --release --example gpt_train")
    print(f"seed {args.seed}", flush=True)
    begun = time.monotonic()
    wanted, span = uninterrupted(args.program)
    kills = in_saves = chains = 0
    for number in itertools.count() if args.chain is None else [args.chain]:
        if kills >= args.count:
            break
        if time.monotonic() - begun > args.seconds:
            sys.exit(f"error: {args.seconds:.0f} s are over after {kills} of {args.count} kills")
        chains += 1
        try:
            model, told, in_save = run_chain(args.program, args.seed, number, wanted, min(KILLS, args.count - kills), span)
        except Failed as error:
            sys.exit(f"error: chain {number}: {error}\nagain: {printable(sys.argv)} --seed {args.seed} --chain {number}")
        kills += sum(part.endswith("killed") for part in told)
        in_saves += in_save
        print(f"chain {number}: {model}: {', '.join(told)}", flush=True)
    print(f"{kills} kills in {chains} chains, {in_saves} of them in a save: every part resumed from a whole checkpoint,")
    print(f"and all losses and norms are those of the uninterrupted run, bit by bit ({time.monotonic() - begun:.0f} s)")


if __name__ == "__main__":
    main()
