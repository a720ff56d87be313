#!/usr/bin/env python3
"""Text from GPT-2 by `examples/generate` and by transformers, in turn: tokens per second of the prompt, and of the tokens that follow one by one.

    benches/generation.py                # random weights of GPT-2's shape, 124 million
    benches/generation.py --no-peer      # ours alone

Both sides are greedy, keep keys and values, and have the same two cores. Needs cargo, Python 3.11, and transformers beside PyTorch in the peers'
Python (target/peer-venv, or MESHWORK_PEER_PYTHON).
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys

from harness import machine, programs
from peers import lifetime

THREADS = 2
PROMPT, TOKENS = 64, 64
SAID = re.compile(r"(\d+) tokens of the prompt at ([\d.]+) tokens/s, (\d+) more at ([\d.]+) tokens/s")
OURS = {
    "meshwork, canonical": [],
    "meshwork, fast": ["--set", "training.numerics=fast"],
    "meshwork, fast, tp=2": ["--set", "training.numerics=fast", "--mesh", "tp=2"],
}
PEER = "transformers"


def ours(program, model, flags):
    """(tokens per second of the prompt, of the rest)."""
    argv = [program, "--model", model, "--tokenizer", "bytes", "--prompt", "x" * PROMPT, "--tokens", str(TOKENS), "--temperature", "0", *flags]
    environment = os.environ | {"MESHWORK_THREADS": str(THREADS)}
    said = lifetime.run(argv, env=environment, check=True, capture_output=True, text=True, errors="replace").stderr
    found = SAID.search(said)
    if not found or int(found[1]) != PROMPT or int(found[3]) != TOKENS:
        raise SystemExit(f"{program} did not say what it did: {said}")
    return float(found[2]), float(found[4])


def peer(python, model):
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    argv = [python, programs.PEERS / "generate.py", "--model", model, "--make", "--prompt", str(PROMPT), "--tokens", str(TOKENS)]
    line = lifetime.run(argv, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    measured = json.loads(line)
    return measured["prompt_tokens_per_s"], measured["tokens_per_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=str(machine.ROOT / "target" / "benches" / "gpt2"), help="folder in Hugging Face format")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    programs.OURS["generate"] = ["build", "--release", "--example", "generate"]
    program = programs.Programs(THREADS).build("generate")
    cores = machine.bind(THREADS)
    python = None if args.no_peer else programs.peer_python()
    sides = {name: (lambda flags=flags: ours(program, args.model, flags)) for name, flags in OURS.items()}
    if python:
        sides = {PEER: lambda: peer(python, args.model)} | sides  # first: it makes the model
    measured = {name: [] for name in sides}
    for turn in range(args.turns):
        for name, side in sides.items():
            print(f"turn {turn + 1} of {args.turns}: {name}", file=sys.stderr, flush=True)
            measured[name].append(side())
    print(machine.hardware(cores))
    print(f"\n| GPT-2, {PROMPT} tokens of a prompt and {TOKENS} more | prompt, tokens/s | then, tokens/s | ratio | spread of turns |\n|---|---|---|---|---|")
    base = statistics.median(rate for _, rate in measured[PEER]) if python else None
    for name, turns in measured.items():
        (prompt, rate), rates = map(statistics.median, zip(*turns)), [rate for _, rate in turns]
        ratio = f"{rate / base:.2f}" if base else ""
        print(f"| {name} | {prompt:.0f} | {rate:.1f} | {ratio} | {min(rates):.1f} to {max(rates):.1f} |")


if __name__ == "__main__":
    main()
