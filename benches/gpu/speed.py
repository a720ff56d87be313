"""The parts that say how fast the device is: models and operations against PyTorch and the card's own rates, first steps, a profile."""

import json
import statistics

from correct import tool
from harness.files import random_tokens
from session import TINY, Failed, Late, Skipped

WARMUP = {"ours": 3, "theirs": 6}  # steps that do not count; the compiler of PyTorch needs more of them
STEPS = 12
GPT2 = dict(vocab_size=50257, num_layers=12, hidden_size=768, num_heads=12)
LLAMA = dict(vocab_size=50257, num_layers=24, hidden_size=2048, num_heads=16)
LLAMA_OWN = {"model.kind": "llama", "model.num_kv_heads": 4, "model.ffn_hidden_size": 5632, "model.tie_embeddings": "false"}
LLAMA_PEER = ["--kv-heads", "4", "--ffn", "5632"]
# Name: sizes, our further settings, the peer's further words.
WORKS = {
    "gpt2-124m": ([GPT2 | dict(seq_len=1024, batch=32), GPT2 | dict(seq_len=4096, batch=8)], {}, []),
    "llama-1.3b": ([LLAMA | dict(seq_len=1024, batch=8), LLAMA | dict(seq_len=4096, batch=2)], LLAMA_OWN, LLAMA_PEER),
}
QUICK = dict(vocab_size=64, num_layers=2, hidden_size=32, num_heads=4, seq_len=16, batch=2)
# What is to be reached, and how a row says so.
TARGETS = {"of compiled PyTorch": 1.0, "of the measured bf16 rate at 1.3B": 0.5, "of the copy rate": 0.85, "of SDPA": 0.8, "of a dense product": 0.9, "of one rank": 0.75}
FIRST = {"cold": 10.0, "warm": 2.0}


def weights(size, further):
    """Weights of the products."""
    hidden, layers = size["hidden_size"], size["num_layers"]
    if not further:
        return 12 * layers * hidden**2 + size["vocab_size"] * hidden
    kv = hidden // size["num_heads"] * further["model.num_kv_heads"]
    return layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * further["model.ffn_hidden_size"]) + size["vocab_size"] * hidden


def flops(size, further):
    """Operations of a step as tables of training speed count them: 6 a weight and token, and attention with its masked half."""
    tokens = size["batch"] * size["seq_len"]
    return tokens * (6 * weights(size, further) + 12 * size["num_layers"] * size["hidden_size"] * size["seq_len"])


def ours(session, size, further, dtype, *words):
    sets = {f"model.{key}": value for key, value in size.items() if key != "batch"} | further
    sets |= {"training.global_batch_size": size["batch"], "training.dtype": dtype}
    warm, count = (1, 1) if session.quick else (WARMUP["ours"], STEPS)
    taken, first = session.train(sets, warm + count, *words, data=random_tokens(session.folder, size["vocab_size"]))
    peak = taken[-1].get("peak_bytes")
    return {
        "ms a step": statistics.median(step["step_ms"] for step in taken[warm:]),
        "first step s": first,
        "GiB at the peak": (max(peak) if isinstance(peak, list) else peak or 0) / 2**30,
        "loss": taken[-1]["loss"],
    }


def theirs(session, size, words, dtype, compiled):
    warm, count = (1, 1) if session.quick else (WARMUP["theirs"], STEPS)
    # Ours is stored in a multiple of 64 rows. PyTorch's users pad the vocabulary of the model.
    vocab = -(-size["vocab_size"] // 64) * 64
    work = size | {"vocab_size": vocab, "steps": warm + count, "tokens": str(random_tokens(session.folder, size["vocab_size"]))}
    argv = [session.python, session.root / "benches/peers/train.py", "--work", json.dumps(work), "--device", session.peer_device]
    argv += [*words, *(["--compile"] if compiled else []), *(["--bf16"] if dtype == "bf16" else [])]
    told = session.run(argv)
    lines = told.json()
    taken = [line for line in lines if "seconds" in line]
    if told.code or len(taken) < warm + count:
        raise Failed(told.reason())
    return {
        "ms a step": 1e3 * statistics.median(step["seconds"] for step in taken[warm:]),
        "first step s": told.times[told.lines.index(next(line for line in told.lines if '"seconds"' in line))],
        "GiB at the peak": next((line["peak_device_bytes"] / 2**30 for line in lines if "peak_device_bytes" in line), None),
        "loss": taken[-1]["loss"],
    }


def rate(session, dtype):
    """TFLOP/s of a large product by PyTorch on this device; None without PyTorch."""
    try:
        words = ["product", f" {dtype} ", *([] if session.quick else ["8192x8192x8192"])]
        return max(line["tflops"] for line in peer_operations(session, *words) if "tflops" in line)
    except (Skipped, Failed, ValueError):
        return None


def peer_operations(session, *words):
    argv = [session.python, session.root / "benches/peers/operations.py", "--device", session.peer_device, *words]
    told = session.run(argv + (["--small"] if session.quick else []))
    if told.code:
        raise Skipped(f"PyTorch's operations: {told.reason()}")
    return [line for line in told.json() if "operation" in line]


def model(name, dtype):
    """The part of one model in one type: tokens a second of ours, of PyTorch eager and compiled, in turn on the same batches."""

    def part(session):
        session.there()
        sizes, further, words = WORKS[name]
        if session.quick:
            further = further and further | {"model.num_kv_heads": 2, "model.ffn_hidden_size": 64}
            words, sizes = ["--kv-heads", "2", "--ffn", "64"] if words else [], [QUICK]
        peak, rows = rate(session, dtype), []
        for size in sizes:
            sides = {
                "meshwork": lambda: ours(session, size, further, dtype),
                "PyTorch, eager": lambda: theirs(session, size, words, dtype, False),
                "PyTorch, compiled": lambda: theirs(session, size, words, dtype, True),
            }
            times = {}
            for side, measure in sides.items():
                row = {"what": f"{name} {size['batch']}x{size['seq_len']}", "side": side}
                rows.append(row)
                try:
                    row |= measure()
                except Late as late:
                    row |= {"state": "FAIL", "why": str(late)}
                except (Failed, Skipped) as failed:
                    row |= {"state": "SKIPPED", "why": str(failed)}
                if "ms a step" not in row:
                    continue
                times[side] = row["ms a step"]
                row["tokens/s"] = size["batch"] * size["seq_len"] / times[side] * 1e3
                row["TFLOP/s"] = flops(size, further) / times[side] / 1e9
                if peak:
                    row["of the product's rate"] = row["TFLOP/s"] / peak
                row["state"] = "PASS"
            if peers := {side: time for side, time in times.items() if side != "meshwork"}:
                best = min(peers, key=peers.get)
                if "meshwork" in times:
                    mine = next(row for row in rows if row["side"] == "meshwork" and row["what"].endswith(f"x{size['seq_len']}"))
                    mine["of the best peer"] = peers[best] / times["meshwork"]
                    judge(session, mine, mine["of the best peer"], TARGETS["of compiled PyTorch"], f"of {best}")
        return {"tables": {"steps": rows}}

    part.__doc__ = f"{name} in {dtype}, sequences of 1024 and 4096: ours, and PyTorch eager and compiled with SDPA and fused AdamW, one after the other."
    return part


def judge(session, row, reached, target, what):
    """Says in the row whether a target is reached; on the emulator no time means anything."""
    if session.emulated:
        return
    row["target"], row["reached"] = target, reached >= target
    if reached < target:
        row |= {"state": "FAIL", "why": f"{reached:.2f} {what}, target {target:g}"}


def mesh(session):
    """Eight ranks as threads on one card against one rank, at 1.3 billion parameters."""
    session.there()
    sizes, further, _ = WORKS["llama-1.3b"]
    size = sizes[0]
    if session.quick:
        size, further = QUICK | {"batch": 4}, further | {"model.num_kv_heads": 2, "model.ffn_hidden_size": 64}
    rows = []
    for degrees in ["dp=1", "dp=2,tp=2,pp=2"]:
        row = {"what": degrees}
        rows.append(row)
        try:
            row |= ours(session, size, further, "f32", "--mesh", degrees) | {"state": "PASS"}
        except (Failed, Skipped) as failed:
            row |= {"state": "FAIL", "why": str(failed)}
    if all("ms a step" in row for row in rows):
        rows[1]["of one rank"] = rows[0]["ms a step"] / rows[1]["ms a step"]
        judge(session, rows[1], rows[1]["of one rank"], TARGETS["of one rank"], "of one rank")
    return {"tables": {"meshes": rows}}


def operations(session):
    """Each operation against the card's own rates, copies for those that memory limits, and against PyTorch's."""
    session.there()
    told = session.run([session.program("ops"), "--bench", "--device", session.device, *(["--small"] if session.quick else [])], limit=0.6 * session.left())
    if told.code:
        raise Failed(told.reason())
    own, note = [line for line in told.json() if "operation" in line], []
    try:
        peers = {line["operation"]: line for line in peer_operations(session)}
    except (Skipped, Failed) as failed:
        peers, note = {}, [str(failed)]
    copies = [line["gb_per_s"] for line in [*own, *peers.values()] if line["operation"].startswith("copy") and "gb_per_s" in line]
    copy, rows = max(copies, default=None), []
    for line in own:
        name, row = line["operation"], {"what": line["operation"]}
        rows.append(row)
        if "error" in line:
            row |= {"state": "SKIPPED", "why": line["error"]}
            continue
        peer = peers.get(name, {})
        row |= {"ms": line["ms"], "GB/s": line["gb_per_s"], "TFLOP/s": line["tflops"] or None, "PyTorch ms": peer.get("ms"), "state": "PASS"}
        if peer.get("ms"):
            row["of PyTorch"] = peer["ms"] / line["ms"]
        if not line["flops"] and copy and name != "upload":
            row["of the copy rate"] = line["gb_per_s"] / copy
            judge(session, row, row["of the copy rate"], TARGETS["of the copy rate"], "of the copy rate")
        elif name.startswith("grouped"):
            # One dense product of as many rows.
            if dense := next((other for other in own if other["operation"] == name[name.index("product") :] and "ms" in other), None):
                row["of a dense product"] = dense["ms"] / line["ms"]
                judge(session, row, row["of a dense product"], TARGETS["of a dense product"], "of a dense product")
        elif name.startswith("attention") and peer.get("ms"):
            judge(session, row, row["of PyTorch"], TARGETS["of SDPA"], "of SDPA")
    about = next((line for line in told.json() if "device" in line), {})
    files = {"card.toml": text} if (text := card(about, own)) else {}
    return {"tables": {"operations": rows}, "text": note, "files": files}


def card(about, operations):
    """The measured card as a file that `plan --cluster` reads; nothing if a rate is missing. Rates are those that were reached, so the shares of peaks that a system
    reaches are 1."""
    lines = [line for line in operations if line.get("ms")]
    rates = lambda amount, *words: [line[amount] / line["ms"] * 1e3 for line in lines if all(word in f"{line['operation']} " for word in words)]
    products = {dtype: rates("flops", "product", f" {dtype} ") for dtype in ["f32", "bf16"]}
    attention = [line for line in lines if line["operation"].startswith("attention") and " bf16 " in line["operation"]]
    found = {"bandwidth": rates("bytes", "copy "), "host": rates("bytes", "upload "), **products, "attention": attention}
    if "memory_bytes" not in about or not all(found.values()):
        return None
    f32, bf16 = (max(products[dtype]) for dtype in ["f32", "bf16"])
    bf16 = max(bf16, f32)  # what is slower in 16 bits is computed in f32
    attended = sum(line["flops"] for line in attention) / sum(line["ms"] for line in attention) * 1e3
    name = json.dumps(about["device"])
    return f"""\
# For more cards or hosts: [cluster], and in [links] also inside and between, in bytes a second of a card and direction.
source = "measured by scripts/gpu-check.sh speed"

[cluster]
name = {name}
hosts = 1
cards_per_host = 1

[card]
name = {name}
memory = {about["memory_bytes"]:.4e}
bandwidth = {max(found["bandwidth"]):.3e}
bf16 = {bf16:.3e}
f32 = {f32:.3e}
units = 1

[links]
host = {max(found["host"]):.3e}

[constants]
attention = {attended / bf16:.3f}
memory = 1.0
products = 1.0
unaligned = 1.0
wave = 0.0
"""


def profile(session):
    """Where the time of a step goes, by operation; by kernel too where nsys is installed."""
    session.there()
    sets = TINY if session.quick else {f"model.{key}": value for key, value in GPT2.items()} | {"model.seq_len": 1024, "training.global_batch_size": 8}
    sets = sets | {"metrics.profile": "true", "metrics.profile_steps": 2, "metrics.trace": session.folder / "trace.json"}
    argv = [session.program("gpt_train"), "--device", session.device, "--steps", 4]
    argv += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    told = session.run(argv)
    if told.code:
        raise Failed(told.reason())
    texts = [told.text[told.text.index("A step takes") :]]
    if session.emulated or not (nsys := tool("nsys")):
        return {"tables": {}, "text": [*texts, "nsys: not used" if session.emulated else "nsys is not on the path: no times by kernel"]}
    made = session.run([nsys, "profile", "--force-overwrite", "true", "-o", session.folder / "step", *argv[:3], "--steps", 4, *argv[5:9]])
    told = session.run([nsys, "stats", "--report", "cuda_gpu_kern_sum", "--format", "column", session.folder / "step.nsys-rep"])
    return {"tables": {}, "text": [*texts, told.text[:8000] if told.code == 0 else f"nsys: {made.reason()}; {told.reason()}"]}


def first(session):
    """From the start of the program to the end of the first step: with no compiled kernel on disk, and with all."""
    session.there()
    sets = TINY if session.quick else {"model.preset": "gpt2", "training.global_batch_size": 4}
    folder, rows = session.folder / "cold", []
    for what, target in FIRST.items():
        _, seconds = session.train(sets, 1, environment={"XDG_CACHE_HOME": str(folder)})
        row = {"what": what, "seconds": seconds, "state": "PASS"}
        rows.append(row)
        if not session.emulated:
            row |= {"target": target, "reached": seconds <= target}
            if seconds > target:
                row |= {"state": "FAIL", "why": f"{seconds:.1f} s, target {target:g} s"}
    return {"tables": {"kernel cache": rows}}


def graphs(session):
    """A step with and without CUDA graphs, in turn: the same losses, the launches of a step, and its time where there is little work for each launch."""
    session.there()
    sizes = [(TINY, "f32")] if session.quick else [({f"model.{key}": value for key, value in GPT2.items()} | {"model.seq_len": 1024, "training.global_batch_size": batch}, dtype) for batch in [1, 8] for dtype in ["f32", "bf16"]]
    rows, warm = [], 3 if session.quick else 5
    for sets, dtype in sizes:
        times, losses = {}, {}
        for turn in range(2):
            for on in ["false", "true"]:
                row = {"what": f"{sets['training.global_batch_size']}x{sets['model.seq_len']} {dtype}", "cuda.graphs": on}
                rows.append(row)
                try:
                    taken, _ = session.train(sets | {"training.dtype": dtype, "cuda.graphs": on}, warm + (2 if session.quick else STEPS))
                except (Failed, Skipped) as failed:
                    row |= {"state": "FAIL", "why": str(failed)}
                    continue
                row |= {"ms a step": statistics.median(step["step_ms"] for step in taken[warm:]), "state": "PASS"}
                times.setdefault(on, []).append(row["ms a step"])
                losses[on] = [step["loss"] for step in taken]
                if launches := session.ended.get("launches", {}).get("last_step"):
                    row |= {key: launches[key] for key in ["asked", "launches", "changed", "new", "short", "refused"]}
                    if launches["graphs"] == 0:
                        row |= {"state": "FAIL", "why": f"no graphs: {launches}"}
        if len(times) == 2 and "ms a step" in rows[-1]:
            rows[-1]["of without"] = min(times["true"]) / min(times["false"])
            if losses["true"] != losses["false"]:
                rows[-1] |= {"state": "FAIL", "why": "the losses are not those without graphs"}
    return {"tables": {"steps": rows}}


def tune(session):
    """Variants of kernels, each held against the usual form and timed; the fastest go into a table, which the library then reads."""
    session.there()
    table = session.folder / "tuning.toml"
    words = ["--bench", "--device", session.device, "--out", table, *(["--small"] if session.quick else [])]
    rows = []
    try:
        told = session.run([session.program("tune"), *words], limit=0.8 * session.left())
    except Late as late:  # The table has what was measured until then.
        told = late.output
        rows.append({"what": "all kernels", "state": "FAIL", "why": str(late)})
    for line in told.json():
        row = {"what": f"{line['kernel']} at {line['size']}", "variant": line["variant"]}
        rows.append(row)
        if wrong := line.get("error"):
            row |= {"state": "FAIL" if wrong.startswith("differs") else "SKIPPED", "why": wrong}
        else:
            row |= {"ms": line["ms"], "of the usual form": line["of_usual"], "state": "PASS"}
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    if told.code and not any(row["state"] == "FAIL" for row in rows):
        raise Failed(told.reason())
    read = {"what": "a step that reads the table"}
    rows.append(read)
    if "[[" not in text:
        read |= {"state": "SKIPPED", "why": "no variant is faster than the usual form"}
    else:
        session.train(TINY | {"cuda.tuning": table}, 1)
        read["state"] = "PASS"
    return {"tables": {"variants": rows}, "text": [text], "files": {"tuning.toml": text}}
