#!/usr/bin/env python3
"""Asks the model of a run of `finetune` without data what the run held out, and counts the right answers.

    cargo run --release --example finetune
    benches/finetune_answers.py

Needs nothing but cargo and Python 3.9.
"""

import json
import subprocess

from harness.machine import ROOT

RUN = ROOT / "target" / "finetune"
HELD_OUT = 0.1  # validation.fraction of examples/finetune
GENERATE = ["cargo", "run", "-q", "--release", "--example", "generate", "--", "--temperature", "0", "--tokenizer", "bytes"]


def answer(prompt):
    command = [*GENERATE, "--model", str(RUN / "model"), "--prompt", prompt]
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    return ended.stdout.removeprefix(prompt).strip()


def main():
    examples = [json.loads(line) for line in (RUN / "capitals.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = examples[-int(len(examples) * HELD_OUT):]
    right = 0
    for example in asked:
        given = answer(example["prompt"])
        right += given == example["completion"]
        print(example["prompt"] + given, "" if given == example["completion"] else f"(right: {example['completion']})")
    print(f"{right} of {len(asked)} answers are right")


if __name__ == "__main__":
    main()
