#!/usr/bin/env python3
"""Times our programs and those of PyTorch and JAX on the same work, in turn, and prints the ratios reached beside the targets.

    benches/compare.py                        # every row of rows.toml: about two hours on two cores
    benches/compare.py --only small tiny      # rows whose group or name has one of these in it
    benches/compare.py --instructions avx2    # both sides without AVX-512, on a CPU that has it; results have avx2 in their name
    benches/compare.py --list
    benches/compare.py --quick                # few steps, one turn: whether it works, not how fast it is
    benches/compare.py --self-test            # ours alone, tiny, once, into a temporary folder: for .ci/run

Results go to benches/results/DATE-HARDWARE.json and .md after every row, so that Ctrl-C loses none; rows of an earlier call
of the same day stay, or are replaced. PyTorch and JAX are those of MESHWORK_PEER_PYTHON, or are installed into target/peer-venv;
without them (`--no-peer`, or no network) our figures stand alone. Needs cargo and Python 3.11, and Linux for the binding to cores.
"""

import argparse
import datetime
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

from harness import machine, programs, results

ROWS = Path(__file__).with_name("rows.toml")
# For the time to expect: what an untuned step reaches, and what starting takes.
FLOPS = 1e11
STARTUP_S = {"gpt_train": 1, "mpirun": 2, "collectives": 40, "gemm": 6, "attention": 20, "context": 150, "train.py": 5, "finetune.py": 8, "mesh.py": 20, "jax_gpt.py": 15, "collectives.py": 60, "products.py": 12, "operations.py": 40, "context.py": 60, "compress": 3, "throttled": 30, "powersgd": 6, "powersgd.py": 20, "topk.py": 6}
COMPILE_S = 40


def say(words):
    print(words, file=sys.stderr, flush=True)


def definitions(text):
    """The rows, each with the values of its size, and the other settings."""
    settings = tomllib.loads(text)
    rows = settings.pop("rows")
    for row in rows:
        row["size"] = settings["sizes"][row["size"]] if "size" in row else {}
        row["environment"] = settings["environments"][row["environment"]] if "environment" in row else {}
        for text in sides(row, True).values():
            if text.split()[0] not in programs.NAMES:
                raise ValueError(f"{row['name']}: no program for `{text}`")
    if len({row["name"] for row in rows}) != len(rows):
        raise ValueError("two rows of one name")
    return rows, settings


def shortened(row):
    size = row["size"] and row["size"] | {"steps": min(row["size"]["steps"], 2), "warmup": 1}
    return row | {"size": size}


def sides(row, peer):
    """Name and command line of each side, ours first."""
    others = {side: text for side, text in row["against"].items() if peer or not programs.is_peer(text)}
    return {"ours": row["ours"]} | others


def expected_seconds(row, peer):
    """Of one turn of all sides, roughly."""
    size = row["size"]
    work = programs.step_flops(size) * (size["steps"] + size["warmup"]) / FLOPS if size else 0
    texts = sides(row, peer).values()
    return sum(STARTUP_S[text.split()[0]] + COMPILE_S * ("--compile" in text) + work for text in texts)


def run_row(row, makers, alternations):
    """Runs a row's sides in turn; its result. A side that fails ends the row, with what was measured before."""
    texts = sides(row, makers.python)
    result = {
        "group": row["group"],
        "targets": row["targets"],
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "commands": {},
        "runs": {side: [] for side in texts},
    }
    try:
        commands = {side: makers.command(text, row["size"], row["environment"], row.get("threads")) for side, text in texts.items()}
        result["commands"] = {side: str(command) for side, command in commands.items()}
        for _ in range(alternations):
            for side, command in commands.items():
                begun = time.monotonic()
                measured = programs.measure(command)
                result["runs"][side].append(measured)
                shown = ", ".join(f"{key} {measured[key]:,.4g}" for key in row["targets"] if key in measured)
                busy = f"; others had {measured['others_busy']:.1f} cores" if measured["others_busy"] > results.BUSY else ""
                say(f"  {side}: {shown}  [{time.monotonic() - begun:.0f} s{busy}]")
    except programs.Failed as failed:
        result["error"] = str(failed)
        say(f"  {failed}")
    return result


def compare(rows, makers, alternations, path, cores, instructions=None):
    """Runs rows and writes the results after each; returns them all, those of earlier calls too."""
    facts = machine.hardware(cores, instructions)
    found = results.load(path.with_name(path.name + ".json"))
    found = found | {
        "date": datetime.date.today().isoformat(),
        "hardware": facts,
        "peer": makers.python and programs.peers_of(makers.python),
        "command": shlex.join(["benches/compare.py", *sys.argv[1:]]),
    }
    left = {row["name"]: alternations * expected_seconds(row, makers.python) for row in rows}
    for number, row in enumerate(rows, 1):
        name = row["name"]
        say(f"[{number}/{len(rows)}] {name}: about {left[name]:.0f} s; all that is left about {sum(left.values()) / 60:.0f} min")
        found["rows"][name] = run_row(row, makers, alternations)
        results.write(path, found)
        del left[name]
    return found


def ends_with_its_starter():
    """A program whose starter is killed ends, and so does what it has bound to itself, as ranks under torchrun are."""
    bound = "from peers import lifetime; lifetime.bound();"
    wait, asked = "import time; time.sleep(60)", f"import subprocess, sys; {bound}"
    middle = f"{asked} subprocess.Popen([sys.executable, '-c', {bound + 'print(0, flush=True);' + wait!r}]); {wait}"
    starter = f"{asked} lifetime.run([sys.executable, '-c', {middle!r}])"
    folder = Path(__file__).parent
    child = subprocess.Popen([sys.executable, "-c", starter], cwd=folder, stdout=subprocess.PIPE)
    child.stdout.readline()  # all three have begun
    child.kill()
    # Its end is that of the last of them, which holds the pipe too.
    reader = threading.Thread(target=child.stdout.read, daemon=True)
    reader.start()
    reader.join(10)
    assert not reader.is_alive(), "a program outlives its starter"


CPUS = [("AuthenticAMD", 25, 1), ("AuthenticAMD", 25, 17), ("GenuineIntel", 6, 143)]


def self_test():
    """Everything but the peer, once: a mesh against one rank, through the files to the table."""
    text = """
        [sizes]
        least = { vocab_size = 256, num_layers = 2, hidden_size = 32, num_heads = 2, seq_len = 16, batch = 4, steps = 2, warmup = 1 }
        [[rows]]
        name = "a mesh"
        group = "steps"
        size = "least"
        ours = "gpt_train --mesh dp=2"
        against = { "one rank" = "gpt_train --mesh dp=1", "not there" = "train.py" }
        targets = { tokens_per_s = 1e-9, first_step_s = 1e9, peak_rss_mib = 1e-9 }
        [[rows]]
        name = "a failure"
        group = "steps"
        size = "least"
        ours = "gpt_train --mesh dp=3"
        against = {}
        targets = { tokens_per_s = 1 }
    """
    definitions(ROWS.read_text(encoding="utf-8"))
    milan, genoa, xeon = (f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n" for vendor, family, model in CPUS)
    assert [machine.generation(cpu) for cpu in (milan, genoa, xeon)] == [" (Zen 3)", " (Zen 4)", ""]
    ends_with_its_starter()
    for script in programs.PEERS.glob("*.py"):
        compile(script.read_text(encoding="utf-8"), script, "exec")
    rows, _ = definitions(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results" / "run"
        compare(rows, programs.Programs(2, folder=Path(folder)), 1, path, None, "avx2")
        found = results.load(path.with_name("run.json"))
        reached = {line.measure: line.reached for line in results.lines("a mesh", found["rows"]["a mesh"])}
        assert reached == {"tokens_per_s": True, "first_step_s": True, "peak_rss_mib": False}, reached
        assert "dp = 3" in found["rows"]["a failure"]["error"], found["rows"]["a failure"]
        shown = path.with_name("run.md").read_text(encoding="utf-8")
        assert "both sides kept to avx2; no products of bf16" in shown, shown
        assert shown.count("\n| a mesh |") == 3 and "| a failure | failed:" in shown, shown
        # A row of a later call stands beside the earlier ones.
        compare(rows[1:], programs.Programs(2, folder=Path(folder)), 1, path, None)
        assert len(results.load(path.with_name("run.json"))["rows"]) == 2
    # A program may be gone when its last line is read.
    script = """if True:
        import os, time
        print('{"step": 1, "seconds": 2}', flush=True)
        if os.fork() == 0:
            time.sleep(0.3)
            print('{"event": "end"}', flush=True)
    """
    gone = programs.measure(programs.Command([sys.executable, "-c", script], tokens=10))
    assert gone["tokens_per_s"] == 5, gone
    # Ratios of made-up runs: the medians' ratio against the best side, with the spread of the turns.
    turns = lambda *values: [{"tokens_per_s": value, "all_reduce 4 KiB": value} for value in values]
    made_up = {"group": "", "targets": {"tokens_per_s": 1.5, "all_reduce 4 KiB": 0.5}}
    made_up["runs"] = {"ours": turns(100, 160, 150), "slow": turns(20, 20, 20), "fast": turns(100, 80, 75)}
    speed, latency = results.lines("made up", made_up)
    assert (speed.best, speed.ratio, speed.reached) == ("fast", results.Spread(150 / 80, 1.0, 2.0), True), speed
    assert (latency.best, latency.ratio.median, latency.reached) == ("slow", 20 / 150, False), latency
    say("self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORDS", nargs="+", default=[""], help="rows with one of them in `group: name`")
    parser.add_argument("--list", action="store_true", help="show the rows and what they run")
    parser.add_argument("--quick", action="store_true", help="few steps, one turn; results to target/benches")
    parser.add_argument("--alternations", type=int, help="turns of each side")
    parser.add_argument("--instructions", metavar="NAME", help="both sides with these alone: a table of rows.toml, such as avx2")
    parser.add_argument("--no-peer", action="store_true", help="our figures alone")
    parser.add_argument("--results", type=Path, help="folder for the results")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test:
        return self_test()

    rows, settings = definitions(ROWS.read_text(encoding="utf-8"))
    rows = [row for row in rows if any(word in f"{row['group']}: {row['name']}" for word in args.only)]
    if not rows:
        sys.exit(f"no row has any of {args.only} in its group or name; see --list")
    limits = settings["instructions"]
    if args.instructions and args.instructions not in limits:
        sys.exit(f"--instructions {args.instructions}: rows.toml has {', '.join(limits)}")
    if args.list:
        for row in rows:
            print(f"{row['group']}: {row['name']}  {row['targets']}")
            for side, text in sides(row, True).items():
                print(f"    {side}: {text}")
        return None

    cores = machine.bind(settings["threads"])
    python = None
    if not args.no_peer and any(programs.is_peer(text) for row in rows for text in row["against"].values()):
        try:
            python = programs.peer_python()
        except programs.Failed as failed:
            say(f"note: our figures alone: {failed}")
    folder = args.results or (machine.ROOT / ("target/benches" if args.quick else "benches/results"))
    limited = f"-{args.instructions}" if args.instructions else ""
    path = folder / f"{datetime.date.today()}-{machine.slug(machine.hardware(cores))}{limited}"
    alternations = args.alternations or (1 if args.quick else settings["alternations"])
    rows = [shortened(row) for row in rows] if args.quick else rows
    try:
        makers = programs.Programs(settings["threads"], python, environment=limits.get(args.instructions))
        found = compare(rows, makers, alternations, path, cores, args.instructions)
    except KeyboardInterrupt:
        say(f"\nstopped; the rows that were finished are in {path}.md")
        return 130
    print("\n".join(results.markdown(found)))
    say(f"\nwritten: {path}.md and .json")
    return int(any(found["rows"][row["name"]].get("error") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
