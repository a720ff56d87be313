#!/usr/bin/env python3
"""Memory of a rank against the length of its sequences, for cp = 1, 2, 4 and 8; draws docs/img/long_sequences.svg.

    benches/long_sequences.py --docs         # table and picture: some minutes on two cores
    benches/long_sequences.py --longest      # 131,072 tokens over cp=8 in one process of less than 8 GiB: for .ci/nightly
    benches/long_sequences.py --self-test    # short sequences and no picture: for .ci/run

A step of a small Llama on random letters, whole sequences one at a time, recomputed layers, logits and inner features of 256
tokens. The run without the last three keeps everything. Needs cargo and Python 3.11.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from math import log2
from pathlib import Path

from harness import machine, pages, programs
from harness.svg import COLOURS, panel, path, text
from peers import lifetime

MIB, GIB = 1 << 20, 1 << 30
MODEL = {
    "model.kind": "llama", "model.vocab_size": 256, "model.num_layers": 2, "model.hidden_size": 64, "model.num_heads": 2,
    "model.num_kv_heads": 1, "model.ffn_hidden_size": 256,
}
ONE = {"training.global_batch_size": 1, "data.tokenizer": "bytes"}
SAVING = {"memory.recompute": "full", "memory.loss_chunk": 256, "memory.sequence_block": 256}
RING = {"parallelism.context_parallel_method": "ring"}
LENGTHS = [2**power for power in range(10, 15)]
# The longest sequence takes its time in attention: one layer, one head of the same width.
LONGEST, RANKS, LIMIT = 131_072, 8, 8 * GIB
SMALLEST = MODEL | {"model.num_layers": 1, "model.hidden_size": 32, "model.num_heads": 1, "model.ffn_hidden_size": 128}


def run(program, mesh, sets):
    """The event of a run's end, the prediction of its beginning, the largest resident bytes of the process, and its seconds."""
    with tempfile.TemporaryDirectory(prefix="meshwork-long-") as folder:
        metrics, letters = Path(folder) / "metrics.jsonl", Path(folder) / "letters.txt"
        letters.write_bytes(bytes(random.Random(1).choices(range(97, 123), k=2 * sets["model.seq_len"] + 2)))
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        argv = [program, "--mesh", mesh, "--steps", "1", "--data", letters, "--metrics", metrics, *words]
        print("    " + " ".join(programs.shown(word) for word in argv), file=sys.stderr, flush=True)
        began = time.monotonic()
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, preexec_fn=lifetime.bound)
        _, status, used = os.wait4(child.pid, 0)
        if status:
            sys.exit(f"error: {mesh} of {sets['model.seq_len']} tokens ended with status {os.waitstatus_to_exitcode(status)}")
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return events[0]["memory_predicted"], events[-1]["memory_measured"], used.ru_maxrss * 1024, time.monotonic() - began


def most(ranks):
    return max(sum(rank.values()) for rank in ranks)


def curve(program, cp, lengths, saving):
    """The bytes of the fullest rank at each length; a run takes what was predicted."""
    found = []
    for length in lengths:
        ring = RING if cp > 1 else {}
        predicted, measured, *_ = run(program, f"cp={cp}", MODEL | ONE | ring | saving | {"model.seq_len": length})
        if predicted != measured:
            sys.exit(f"error: cp={cp} of {length} tokens was predicted to take {predicted}, and took {measured}")
        found.append(most(measured))
    return found


def table(curves, lengths):
    yield "| MiB of the fullest rank | " + " | ".join(f"{length:,}" for length in lengths) + " |"
    yield "|---|" + "---|" * len(lengths)
    for name, bytes_of in curves.items():
        yield f"| {name} | " + " | ".join(f"{each / MIB:.1f}" for each in bytes_of) + " |"


LEFT, RIGHT, TOP, BOTTOM = 90, 640, 70, 400


def picture(curves, lengths):
    """Both axes are logarithmic."""
    everything = [each for bytes_of in curves.values() for each in bytes_of]
    low, high = 1, 1
    while low * MIB * 2 <= min(everything):
        low *= 2
    while high * MIB < max(everything):
        high *= 2
    log = lambda power_of_two: power_of_two.bit_length() - 1
    x_of = lambda at: LEFT + 30 + (RIGHT - LEFT - 60) * at / (len(lengths) - 1)
    y_of = lambda mib: BOTTOM - (BOTTOM - TOP) * (log2(mib) - log(low)) / max(log(high) - log(low), 1)
    ticks = [(1 << power, f"{1 << power} MiB") for power in range(log(low), log(high) + 1)]
    yield '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 450" font-family="system-ui,sans-serif">'
    yield "<title>Memory of the fullest rank against the length of a sequence, for cp = 1, 2, 4 and 8</title>"
    yield '<rect width="860" height="450" fill="#fff"/>'
    yield text(16, 26, "Memory of a rank against the length of the sequence", "start", 17, "#111", ' font-weight="600"')
    yield from panel(LEFT, RIGHT, TOP, BOTTOM, "measured, at the peak of a step", ticks, y_of)
    for at, length in enumerate(lengths):
        yield text(x_of(at), BOTTOM + 20, f"{length:,}")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 42, "tokens of a sequence")
    below = TOP - 20
    for index, (name, bytes_of) in enumerate(curves.items()):
        colour = COLOURS[[7, 6, 1, 3, 5][index]]
        points = [(x_of(at), y_of(each / MIB)) for at, each in enumerate(bytes_of)]
        yield path(points, colour, 2, "6 4" if index == 0 else "")
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        below = max(below + 14, points[-1][1] + 4.5)  # names that do not touch
        yield text(RIGHT + 8, below, name, "start", 13, colour)
    yield "</svg>"


def longest(program):
    """A sequence of 131,072 tokens over eight ranks of one process."""
    sets = SMALLEST | ONE | RING | SAVING | {"model.seq_len": LONGEST}
    predicted, measured, resident, seconds = run(program, f"cp={RANKS}", sets)
    ranks = sum(sum(rank.values()) for rank in measured)
    print(
        f"{LONGEST:,} tokens over cp={RANKS}: a rank is predicted to take {most(predicted) / MIB:.1f} MiB and takes {most(measured) / MIB:.1f},"
        f" all ranks {ranks / MIB:.0f} MiB; the process holds at most {resident / MIB:.0f} MiB, in {seconds:.0f} s"
    )
    if predicted != measured or resident >= LIMIT:
        sys.exit(f"error: the process must hold less than {LIMIT / GIB:g} GiB, and ranks as much as is predicted")


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--program", type=Path, help="a built gpt_train (by default it is built)")
    parse.add_argument("--longest", action="store_true", help=f"{LONGEST:,} tokens alone")
    parse.add_argument("--self-test", action="store_true", help="short sequences")
    parse.add_argument("--picture", type=Path, default=machine.ROOT / "docs" / "img" / "long_sequences.svg")
    parse.add_argument("--docs", type=Path, nargs="?", const=machine.ROOT / "docs" / "long_sequences.md", help="the page that shows picture and table")
    args = parse.parse_args()
    program = args.program or programs.Programs(2).build("gpt_train")
    if args.longest:
        return longest(program)
    lengths = [64, 128] if args.self_test else LENGTHS
    curves = {"cp=1, everything kept": curve(program, 1, lengths, {})}
    curves |= {f"cp={cp}": curve(program, cp, lengths, SAVING) for cp in (1, 2, 4, 8)}
    shown = "\n".join(table(curves, lengths))
    print(shown)
    drawing = "\n".join(picture(curves, lengths)) + "\n"
    if not args.self_test:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        args.picture.write_text(drawing)
    if args.docs:
        image = f"![Memory of the fullest rank against the length of a sequence]({os.path.relpath(args.picture, args.docs.parent)})"
        pages.write_between(args.docs, "benches/long_sequences.py", f"{image}\n\n{shown}")


if __name__ == "__main__":
    main()
