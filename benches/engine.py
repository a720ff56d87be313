#!/usr/bin/env python3
"""Where the time of a step goes on this CPU: products beside the peak, attention beside products, and the profile of steps.

    benches/engine.py                        # all of it on one thread and on two: about 20 minutes
    benches/engine.py --instructions avx2    # on a CPU that has AVX-512 too
    benches/engine.py --only small f32       # products and presets with all of these words
    benches/engine.py --self-test            # four products and the profile of a tiny model: for .ci/nightly

Writes benches/results/DATE-HARDWARE-engine.md. The peak is a loop of fused multiply-adds in registers, run after each product;
the share is the best product over the best loop. Attention's share is its rate over a product's, timed in turn. A profile is
that of `metrics.profile`: the share of each class of operations in a step. Needs cargo and Python 3.11.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from harness import machine, programs

ROWS = Path(__file__).with_name("rows.toml")
LLAMA = "--set model.kind=llama --set model.num_kv_heads=2 --set model.ffn_hidden_size=512"
MESHES = {"one rank": "dp=1", "dp=2,tp=2,pp=2": "dp=2,tp=2,pp=2"}
TARGETS = {"products": 0.9, "attention": 0.85}
PRODUCT = re.compile(r"^(\S+ \S+ \S+ \S+) +(\d+x\d+x\d+)" + 3 * r" +([\d.]+) \(([\d.]+)\) ([\d.]+)" + "$")
CLASS = re.compile(r"^(\S.*?)  +(?:\d+ +)?([\d.]+) +([\d.]+)%")


def output(command):
    """What a program prints."""
    environment = os.environ | command.environment
    done = subprocess.run([str(arg) for arg in command.argv], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise programs.Failed(f"{command}\nended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def products(makers, words):
    """Rows of products, `[name, shape, (GFLOP/s, share) of one thread, of all, of all from memory]`."""
    found = map(PRODUCT.match, output(makers.command(f"gemm {' '.join(words)}")).splitlines())
    return [(m[1], m[2], *[(m[at], float(m[at + 1])) for at in (4, 7, 10)]) for m in found if m]


def attention(makers):
    """Shares of the rate of a product, by size and direction, as `[(size, direction, share)]`."""
    rows, size = [], ""
    for event in map(json.loads, output(makers.command("attention --json")).splitlines()):
        size = event.get("product", size).partition(" f32 ")[2] or size
        if "share" in event:
            rows.append((size, event["share"].removesuffix(" of products"), event["value"]))
    return rows


def profile(makers, size, mesh, more, folder):
    """Milliseconds of a step, and the share of each class of operations."""
    sets = f"--set metrics.profile=true --set metrics.trace={folder}/trace.json --set metrics.schedule={folder}/schedule.svg"
    command = makers.command(f"gpt_train --mesh {mesh} {sets} --set metrics.sample_tokens=0 {more}", size)
    command.argv[command.argv.index("--metrics") + 1] = f"{folder}/run.jsonl"
    text = output(command)
    begun = re.search(r"^A step takes ([\d.]+) ms", text, re.MULTILINE)
    if not begun:
        raise programs.Failed(f"{command}\nprinted no profile: {text[-2000:]}")
    # A long name has a line of its own before its numbers.
    lines = map(CLASS.match, re.sub(r"\n {20,}(?=\d)", "  ", text[begun.end() :]).splitlines())
    return float(begun[1]), {line[1]: float(line[3]) for line in lines if line}


def page(facts, command, measured):
    yield f"# Where the time of a step goes, {datetime.date.today()}"
    yield ""
    yield f"{facts['cpu']}, {facts['cores']} cores; {facts['system']}. Commit: {machine.commit()}."
    yield ""
    yield f"    {command}"
    for threads, (rows, _, _) in measured.items():
        low = [row for row in rows if row[3][1] < TARGETS["products"]]
        yield from ["", f"## Products, {threads}", ""]
        yield f"Best GFLOP/s and share of the peak; {len(low)} of {len(rows)} rows below {TARGETS['products']} with operands in the caches."
        yield from ["", "| product | m×n×k | one thread | all threads | all, from memory |", "|---|---|---|---|---|"]
        for name, shape, *columns in rows:
            cells = [f"{rate}, {'**' if share < TARGETS['products'] else ''}{share:.2f}{'**' if share < TARGETS['products'] else ''}" for rate, share in columns]
            yield f"| {name} | {shape.replace('x', '×')} | {' | '.join(cells)} |"
    for threads, (_, shares, _) in measured.items():
        if shares:
            yield from ["", f"## Attention as a share of the rate of products, {threads}", "", "| batch×sequence×heads×features | direction | share |", "|---|---|---|"]
            yield from (f"| {size.replace('x', '×')} | {direction} | {share:.2f} |" for size, direction, share in shares)
    for threads, (_, _, steps) in measured.items():
        names = list(dict.fromkeys(name for _, _, _, classes in steps for name in classes))
        yield from ["", f"## Steps, {threads}", "", f"| model | mesh | ms | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
        for model, mesh, ms, classes in steps:
            cells = [f"{classes[name]:.1f}%" if name in classes else "" for name in names]
            yield f"| {model} | {mesh} | {ms:.1f} | {' | '.join(cells)} |"


def steps(makers, sizes, words, meshes, folder):
    rows = []
    for model, size in sizes.items():
        if all(word in (model, "f32") for word in words):
            more = LLAMA if model == "llama-tiny" else ""
            rows += [(model, name, *profile(makers, size, mesh, more, folder)) for name, mesh in meshes.items()]
    return rows


def run(sizes, words, threads, environment, meshes, with_attention, path, cores):
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in threads:
            makers = programs.Programs(count, environment=environment)
            name = f"{count} thread{'s' if count > 1 else ''}"
            print(name, file=sys.stderr, flush=True)
            # The products of one run are those of one thread and of all.
            rows = products(makers, words) if count == max(threads) else []
            shares = attention(makers) if with_attention else []
            measured[name] = (rows, shares, steps(makers, sizes, words, meshes, folder))
    text = page(machine.hardware(cores), shlex.join(["benches/engine.py", *sys.argv[1:]]), measured)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


def self_test():
    size = dict(vocab_size=256, num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch=4, steps=2, warmup=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.md"
        run({"square128": size}, ["square128", "f32"], [1], {}, {"one rank": "dp=1"}, False, path, None)
        lines = path.read_text(encoding="utf-8").splitlines()
        assert sum(line.startswith("| square128 projection") for line in lines) == 4, lines
        step = next(line for line in lines if line.startswith("| square128 | one rank |"))
        shares = [float(share) for share in re.findall(r"([\d.]+)%", step)]
        assert len(shares) > 5 and 99 < sum(shares) < 101, step
    print("self-test passed", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instructions", metavar="NAME", help="these alone: a table of rows.toml, such as avx2")
    parser.add_argument("--only", metavar="WORD", nargs="+", default=[], help="products and presets with all of these words")
    parser.add_argument("--threads", metavar="N", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    settings = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    sizes = settings["sizes"]
    sizes = {"tiny": sizes["tiny"], "llama-tiny": sizes["tiny"]} | {name: sizes[name] for name in ("small", "medium", "gpt2")}
    if args.instructions and args.instructions not in settings["instructions"]:
        sys.exit(f"--instructions {args.instructions}: rows.toml has {', '.join(settings['instructions'])}")
    environment = settings["instructions"].get(args.instructions)
    cores = machine.bind(max(args.threads))
    limited = f"-{args.instructions}" if args.instructions else ""
    name = f"{datetime.date.today()}-{machine.slug(machine.hardware(cores))}{limited}-engine.md"
    run(sizes, args.only, args.threads, environment, MESHES, not args.only, machine.ROOT / "benches" / "results" / name, cores)
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except programs.Failed as failed:
        sys.exit(str(failed))
