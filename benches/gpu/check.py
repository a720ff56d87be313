#!/usr/bin/env python3
"""Checks and times a GPU with the programs of scripts/gpu-pack.sh: no Rust toolchain, no network.

    scripts/gpu-check.sh                                   # every part, on the first GPU
    scripts/gpu-check.sh machine operations models         # these; a word takes all parts that begin with it
    scripts/gpu-check.sh --list
    scripts/gpu-check.sh --device cuda-emulated --quick    # whether the check itself works: on the emulator, tiny

Each part is a process of its own, ends within 9 minutes and is PASS, FAIL or SKIPPED, with the reason; one that crashes leaves the others their results. The report, DATE-GPU.json and .md, is written after every part; parts
of an earlier call of the same day stay until they are run again. PyTorch is that of --python; without it the peers' rows say so. Needs Python 3.9.
The exit code is 1 if a part fails.
"""

import argparse
import datetime
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benches, for what the harness shares
import correct
import nccl
import report
import speed
from session import Failed, Session, Skipped

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 540
GRACE_S = 30  # for a part to end its programs when its time is over
# The part knows all that was found out before it.
FORKS = multiprocessing.get_context("fork")
PARTS = {
    "machine": correct.machine,
    "operations": correct.operations,
    "steps": correct.steps,
    "canonical": correct.canonical,
    "meshes": correct.meshes,
    "nccl": nccl.nccl,
    "sanitizer": correct.sanitizer,
    "curves": correct.curves,
    **{f"models-{name}-{dtype}": speed.model(name, dtype) for name in speed.WORKS for dtype in ["f32", "bf16"]},
    "models-mesh": speed.mesh,
    "speed": speed.operations,
    "profile": speed.profile,
    "first": speed.first,
    "graphs": speed.graphs,
    "tune": speed.tune,
}


def say(words):
    print(words, flush=True)


def run(name, session):
    """The result of a part, whatever happens in it."""
    part = {"about": PARTS[name].__doc__, "tables": {}, "text": [], "commands": [], "facts": {}}
    begun = time.monotonic()
    session.start_part()
    try:
        part |= PARTS[name](session)
        part["state"], part["why"] = report.state([row for rows in part["tables"].values() for row in rows])
    except Skipped as skipped:
        part |= {"state": "SKIPPED", "why": str(skipped)}
    except Failed as failed:
        part |= {"state": "FAIL", "why": str(failed)}
    except Exception as error:  # A part that is wrong must not take the others' hour.
        part |= {"state": "FAIL", "why": f"the check itself: {type(error).__name__}: {error}"}
    return part | {"commands": session.commands, "seconds": round(time.monotonic() - begun, 1)}


def apart(name, session):
    """The result of a part that runs in a process of its own. A fault of a GPU stays with the process, and a crash is the part's own."""
    ours, theirs = FORKS.Pipe(duplex=False)
    session.start_part()
    child = FORKS.Process(target=lambda: theirs.send((run(name, session), session.known())))
    begun = time.monotonic()
    child.start()
    theirs.close()
    try:
        if not ours.poll(session.limit + GRACE_S):
            raise TimeoutError
        part, known = ours.recv()
        session.know(known)
        return part
    except (EOFError, TimeoutError) as error:
        child.kill() if isinstance(error, TimeoutError) else child.join()
        child.join()
        ended = signal.Signals(-child.exitcode).name if (child.exitcode or 0) < 0 else f"exit code {child.exitcode}"
        why = f"{name} did not end in time" if isinstance(error, TimeoutError) else f"{name} crashed: {ended}"
        part = {"about": PARTS[name].__doc__, "tables": {}, "text": [], "commands": [], "facts": {}, "state": "FAIL", "why": why}
        return part | {"seconds": round(time.monotonic() - begun, 1)}
    finally:
        child.join()
        session.end_all()


def chosen(words):
    """The parts that begin with one of the words, in their order; all without a word."""
    unknown = [word for word in words if not any(name.startswith(word) for name in PARTS)]
    if unknown:
        sys.exit(f"error: no part begins with {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    return [name for name in PARTS if not words or any(name.startswith(word) for word in words)]


def commit():
    """What the programs were built from."""
    packed = ROOT / "COMMIT"
    if packed.exists():
        return packed.read_text(encoding="utf-8").strip()
    told = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip()


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("parts", nargs="*", help="all without one")
    parse.add_argument("--list", action="store_true", help="the parts, and what each checks")
    parse.add_argument("--device", default="cuda", help="as gpt_train has it: cuda, cuda:1, cuda-emulated")
    parse.add_argument("--quick", action="store_true", help="the smallest of everything")
    parse.add_argument("--programs", type=Path, default=ROOT / "bin", help="the folder of our programs")
    parse.add_argument("--python", default=os.environ.get("MESHWORK_PEER_PYTHON", sys.executable), help="a Python that has PyTorch")
    parse.add_argument("--out", type=Path, default=ROOT / "benches" / "results", help="the folder of the report")
    parse.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a part may take")
    args = parse.parse_args()
    if args.list:
        for name, part in PARTS.items():
            say(f"{name:24} {part.__doc__}")
        return 0
    names = chosen(args.parts)
    folder = Path(tempfile.mkdtemp(prefix="meshwork-gpu-"))
    python = shutil.which(args.python) or args.python
    session = Session(ROOT, args.programs.resolve(), folder, args.device, args.quick, python, args.limit)
    try:
        machine = apart("machine", session)
        facts = machine["facts"]
        slug = re.sub(r"[^a-z0-9]+", "-", facts.get("gpu", args.device).lower()).strip("-")
        path = args.out / f"{datetime.date.today()}-{slug}{'-quick' if args.quick else ''}"
        results = report.load(path)
        results |= {"date": str(datetime.date.today()), "machine": facts, "commit": commit()}
        results["command"] = shlex.join(["scripts/gpu-check.sh", *sys.argv[1:]])
        states = []
        for name in names:
            say(f"{name}: {PARTS[name].__doc__}")
            part = results["parts"][name] = machine if name == "machine" else apart(name, session)
            for file, text in part.pop("files", {}).items():
                path.with_name(f"{path.name}-{file}").write_text(text, encoding="utf-8")
            # In the order of the parts, whatever was run before.
            results["parts"] = {name: results["parts"][name] for name in PARTS if name in results["parts"]}
            report.write(path, results)
            states.append(part["state"])
            say(f"    {part['state']} in {part['seconds']:.0f} s{': ' + part['why'] if part['why'] else ''}")
        say(f"{states.count('PASS')} PASS, {states.count('FAIL')} FAIL, {states.count('SKIPPED')} SKIPPED; {path}.md")
        return 1 if "FAIL" in states else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
