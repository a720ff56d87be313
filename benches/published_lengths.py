#!/usr/bin/env python3
"""The longest sequences that another engine trained, predicted from a plan and a few constants.

    benches/published_lengths.py           # the table; fails where a length is not predicted within 10%
    benches/published_lengths.py --docs    # writes it into docs/long_sequences.md
    benches/published_lengths.py --self-test    # without our own plan at each length: for .ci/run

ALST (arXiv:2506.13996) publishes lengths, and hardly any memory. benches/published_lengths.toml has these lengths and the tensors of
a layer's backward in that engine. `--steps 0` says how many parameters the model has. Two numbers are fitted to some rows, and
the other rows test them: the bytes of a GPU that no tensor of a layer takes, and the bytes of host memory for each parameter.
A second table holds the memory that the same engine's files note at some lengths against the same counts. The plan of the
same settings is of meshwork itself. Needs cargo and Python 3.11.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from harness import machine, pages, programs

FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
UNITS = {unit: 1 << 10 * power for power, unit in enumerate(["B", "KiB", "MiB", "GiB", "TiB"])}
GB = 1e9
WITHIN = 0.10


def model_of(row):
    """The keys of the configuration that say which model it is."""
    model = FACTS["models"][row["model"]]
    if "preset" in model:
        return {"model.preset": model["preset"]}
    config = {
        "architectures": [model["family"]], "model_type": model["type"], "vocab_size": model["vocabulary"],
        "num_hidden_layers": model["layers"], "hidden_size": model["hidden"], "intermediate_size": model["inner"],
        "num_attention_heads": model["heads"], "num_key_value_heads": model["kv_heads"], "head_dim": model["head"],
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 40960,
        "hidden_act": "silu", "attention_bias": False,
    }
    return {"model.config": json.dumps(config)}


def plan(program, row, tokens):
    """The parameters of the model, and the bytes of a rank at the peak of a step on a sequence."""
    gpus, several = row["gpus"], row["gpus"] > 1
    sets = {
        **model_of(row), "model.seq_len": tokens, "training.global_batch_size": 1,
        "training.dtype": "bf16", "training.reduce_dtype": "bf16", "memory.recompute": "full",
        "memory.offload": "all" if row["inputs"] else "optimizer", "memory.offload_dir": ".",
    }
    sets |= {"parallelism.zero_stage": 3, "parallelism.context_parallel_method": "all_to_all"} if several else {}
    sets |= {"memory.sequence_block": 4096} if row["tiled"] else {}
    sets |= {"memory.loss_chunk": 4096} if row.get("fused", True) else {}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    argv = [program, "--steps", "0", "--mesh", f"cp={gpus}", *words]
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    found = re.search(r"([\d,]+) parameters .* states; ([\d.,]+) (\w+) at the peak", " ".join(said.split()))
    if not found:
        sys.exit(f"error: no memory in the report of {' '.join(map(str, argv))}:\n{said}")
    parameters, peak, unit = (group.replace(",", "") for group in found.groups())
    return int(parameters), float(peak) * UNITS[unit]


def widths(row):
    """Numbers for each token of a rank."""
    model = FACTS["models"][row["model"]]
    head = model.get("head", model["hidden"] // model["heads"])
    keys = max(model["kv_heads"], row["gpus"]) * head
    queries = model["heads"] * head
    return {
        "hidden": model["hidden"], "queries": queries, "inner": model["inner"], "keys": keys, "vocabulary": model["vocabulary"],
        "expanded": queries if keys < queries else 0,
    }


def moments(row):
    """Bytes of each token of a rank by moment."""
    of, model = widths(row), FACTS["models"][row["model"]]
    others = 0 if row["inputs"] else 2 * model["hidden"] * (model["layers"] - 1)
    absent = ["untiled"] * row["tiled"] + ["unfused"] * row.get("fused", True)
    for moment in FACTS["moments"]:
        if moment.get("only") not in absent:
            yield sum(of[width] * size for _, width, size in moment["tensors"]) + others, moment["name"]


def resident(row, parameters, fixed):
    """Bytes of a GPU that do not grow with the sequence."""
    model = FACTS["models"][row["model"]]
    of = widths(row)
    layer = 2 * (2 * of["hidden"] * of["queries"] + 2 * of["hidden"] * model["kv_heads"] * (of["queries"] // model["heads"]))
    layer += 2 * 3 * of["hidden"] * of["inner"]
    weights = 0 if row["gpus"] == 1 else 2 * parameters / row["gpus"]  # one GPU has its weights in host memory
    # Of the layer whose backward runs, the whole weights and their gradients.
    return weights + 2 * layer + fixed


def by_gpu(row, parameters, fixed):
    """The longest sequence that fits into the GPUs, and the moment that limits it."""
    each, moment = max(moments(row))
    memory = row["used"] * UNITS["GiB"] if "used" in row else FACTS["memory"][row["gpu"]]
    noted = f" of {row['used']} GiB" if "used" in row else ""
    return row["gpus"] * (memory - resident(row, parameters, fixed)) / each, f"GPU{noted}, at {moment}"


def memory_at(row, parameters, fixed):
    """GiB of a GPU at the length of the row."""
    each, _ = max(moments(row))
    return (resident(row, parameters, fixed) + each * row["tokens"] / row["gpus"]) / UNITS["GiB"]


def by_host(row, parameters, of_parameter):
    """The longest sequence whose inputs of layers fit into the memory of the hosts."""
    if not row["inputs"]:
        return float("inf"), "hosts"
    model, memory = FACTS["models"][row["model"]], FACTS["memory"]
    hosts = max(1, row["gpus"] // memory["gpus_of_a_host"])
    return (hosts * memory["host"] - of_parameter * parameters) / (2 * model["hidden"] * model["layers"]), "hosts"


def fit(rows, predict, candidates):
    """The candidate whose largest error over these rows is the smallest."""
    worst = lambda candidate: max(abs(predict(row, candidate)[0] / row["tokens"] - 1) for row in rows)
    return min(candidates, key=worst)


def settings(row):
    """The first cells of a line."""
    ways = ["yes" if row.get(way, True) else "no" for way in ("inputs", "tiled", "fused")]
    return " | ".join([f"| {row['gpus']} {row['gpu']}", row["model"], *ways])


def table(program, plans):
    rows = FACTS["rows"]
    parameters = {}
    for row in rows:
        if row["model"] not in parameters:
            parameters[row["model"]], _ = plan(program, row, 8192)
        if plans:
            ends = [row["tokens"] // 2, row["tokens"]]
            try:
                near = [plan(program, row, tokens)[1] for tokens in ends]
            except subprocess.CalledProcessError:  # more operations than are counted: the line of shorter plans goes on
                ends = [row["tokens"] // 4, row["tokens"] // 2]
                near = [plan(program, row, tokens)[1] for tokens in ends]
            each = (near[1] - near[0]) / (ends[1] - ends[0])
            row["peak"] = near[1] + each * (row["tokens"] - ends[1])
            row["ours"] = ends[1] + (FACTS["memory"][row["gpu"]] - near[1]) / each
    of = lambda kind: [row for row in rows if row.get("fit") == kind]
    gpu = lambda row, fixed: by_gpu(row, parameters[row["model"]], fixed)
    host = lambda row, each: by_host(row, parameters[row["model"]], each)
    fixed = fit(of("gpu"), gpu, [tenth * GB / 10 for tenth in range(500)])
    of_parameter = fit(of("host"), host, [tenth / 10 for tenth in range(500)])
    yield f"Fitted: {fixed / GB:.1f} GB of a GPU, and {of_parameter:.1f} bytes of host memory for each parameter.\n"
    ours = " | our plan at that length | longest that we plan" if plans else ""
    first = "| GPUs | model | inputs offloaded | networks in blocks | fused loss"
    yield f"{first} | published | predicted | off by | limit{ours} |"
    yield "|---|---|---|---|---|---|---|---|---|" + ("---|---|" if plans else "")
    longer = {(row["gpus"], row["model"]): (row["fit"], row["fail"]) for row in FACTS["longer"]}
    missed, known = [], []
    for row in rows:
        tokens, limit = min(gpu(row, fixed), host(row, of_parameter))
        # Where the loss and not memory stopped the source, memory ends between a length that fits and one that fails.
        fit_too, fail = longer.get((row["gpus"], row["model"]), ([], []))
        between = fit_too and fail
        low, high = (max(fit_too), min(fail)) if between else (row["tokens"], row["tokens"])
        off = tokens / min(max(tokens, low), high) - 1
        if abs(off) > WITHIN:
            missed.append(f"{row['gpus']} {row['gpu']}, {row['model']}, {row['tokens']:,} tokens: {off:+.0%}")
        rounded = lambda number: float(f"{number:.3g}")
        used = " (fitted)" if "fit" in row else " (between)" if between else ""
        published = f"{row['tokens']:,}" + (f" (its loss is NaN beyond; {low:,} fit, {high:,} do not)" if between else "")
        ours = f" | {row['peak'] / UNITS['GiB']:.1f} GiB | {rounded(row['ours']):,.0f}" if plans else ""
        whole = {key: value for key, value in row.items() if key != "used"}
        longest = min(gpu(whole, fixed)[0], host(whole, of_parameter)[0])
        known += [(True, length <= longest, length / longest) for length in [row["tokens"], *fit_too]]
        known += [(False, length <= longest, length / longest) for length in fail]
        yield f"{settings(row)} | {published} | {rounded(tokens):,.0f} | {off:+.1%}{used} | {limit}{ours} |"
    wrong = [abs(ratio - 1) for fits, predicted, ratio in known if fits != predicted]
    out = sum(not fits for fits, _, _ in known)
    yield (
        f"\n{len(known) - out} lengths are known to fit, and {out} to run out of memory. {len(known) - len(wrong)} of the {len(known)}"
        f" are predicted so; the others are within\n{max(wrong, default=0):.0%} of the longest length that is predicted to fit."
    )
    yield f"\n{first} | tokens | GiB in use, published | predicted | off by |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in FACTS["notes"]:
        memory = memory_at(row, parameters[row["model"]], fixed)
        yield f"{settings(row)} | {row['tokens']:,} | {row['used']:.2f} | {memory:.2f} | {memory / row['used'] - 1:+.1%} |"
    if missed:
        sys.exit("error: not within 10%: " + "; ".join(missed))


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--program", type=Path, help="a built gpt_train (by default it is built)")
    parse.add_argument("--self-test", action="store_true", help="without our own plan at each length")
    parse.add_argument("--docs", type=Path, nargs="?", const=machine.ROOT / "docs" / "long_sequences.md", help="the page that shows the table")
    args = parse.parse_args()
    program = args.program or programs.Programs(2).build("gpt_train")
    shown = "\n".join(table(program, not args.self_test))
    print(shown)
    if args.docs:
        pages.write_between(args.docs, "benches/published_lengths.py", shown)


if __name__ == "__main__":
    main()
