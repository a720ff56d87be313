#!/usr/bin/env python3
"""Compiles every kernel with nvcc, which needs no GPU, and holds what ptxas says of it against kernels/report.md.

    kernels/check.py [--write] [--venv FOLDER]

For each file of kernels/cuda and each target: PTX and machine code, warnings as errors. Faults: a register that is spilled, a stack frame, an
operation in PTX that may be fused or flushed where the source does not say so, or a line that differs from the report. `--write` writes the
report. The compiler comes from PyPI's wheels, once, into a virtual environment (by default target/cuda-venv): about 500 MB.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "kernels/cuda"
REPORT = ROOT / "kernels/report.md"
# One version of the compiler, so that the numbers of the report can be compared.
WHEELS = ["nvidia-cuda-nvcc==13.5.37", "nvidia-nvvm==13.5.37", "nvidia-cuda-crt==13.5.37", "nvidia-cuda-runtime==13.5.37"]
# The oldest that the project is for, Hopper with its own instructions, and the two newest that this compiler knows.
TARGETS = ["sm_80", "sm_90a", "sm_107", "sm_121"]
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# Products and sums of floats must name their rounding, or ptxas may fuse them; none may flush subnormal numbers.
UNROUNDED = re.compile(r"^\s*(?:mul|add|sub|fma|div|sqrt|rcp)\.(?!rn\b)[\w.]*f(?:32|64)\b|\.ftz\b|\.approx\b", re.MULTILINE)


def options():
    """OPTIONS of src/lib.rs: what a user of the crate gives NVRTC."""
    text = (ROOT / "kernels/src/lib.rs").read_text(encoding="utf-8")
    return re.findall(r'"(-[^"]+)"', text.partition("pub const OPTIONS")[2].partition(";\n")[0])


def variants():
    """{(kernel, variant): (its file, the macros that it defines)} of src/variants.rs."""
    line = re.compile(r'^    (\w+) in (\w+), "([^"]+)", .*?; (.*);$', re.MULTILINE)
    found = line.findall((ROOT / "kernels/src/variants.rs").read_text(encoding="utf-8"))
    return {(kernel, name): (CUDA / f"{file}.cu", macros.replace(" = ", "=").split(", ")) for kernel, file, name, macros in found}


def nvcc(venv):
    """The compiler, installed if need be."""
    found = sorted(venv.glob("lib/python3*/site-packages/nvidia/cu13/bin/nvcc"))
    if not found:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin/pip"), "install", "--quiet", *WHEELS], check=True)
        found = sorted(venv.glob("lib/python3*/site-packages/nvidia/cu13/bin/nvcc"))
    return found[0]


def compile_one(compiler, source, target, folder, variant=("", ""), macros=()):
    """(faults, {(kernel, target): (registers, shared bytes)}) of a file for a target; of a variant of a kernel, {((kernel, variant), target): ..}."""
    kept = Path(tempfile.mkdtemp(dir=folder))
    only, name = variant
    command = [str(compiler), *options(), f"-arch={target}", "-Werror", "all-warnings", "-I", str(CUDA), str(source)]
    command += [f"-D{macro}" for macro in macros]
    command += ["--cubin", "-Xptxas", "-v,-Werror", "-keep", "-keep-dir", str(kept), "-o", str(kept / "kernels.cubin")]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        return [f"{source.name} for {target}:\n{made.stdout}{made.stderr}"], {}
    faults, table, kernel = [], {}, None
    for line in made.stderr.splitlines():
        if found := ENTRY.search(line):
            kernel = found.group(1)
        elif found := STACK.search(line):
            if any(int(count) for count in found.groups()) and only in ("", kernel):
                faults.append(f"{source.name} for {target}: {kernel} {name}: {line.strip()}")
        elif found := USED.search(line):
            if only in ("", kernel):
                table[variant if only else kernel, target] = (int(found.group(1)), int(found.group(2) or 0))
    # The reciprocal is a step of CUDA's own logarithm in f64; the power of two is that of tensor_core.cuh, whose users
    # promise no bits.
    ptx = next(kept.glob("*.ptx")).read_text(encoding="utf-8")
    for allowed in ("rcp.approx.ftz.f64", "ex2.approx.ftz.f32"):
        ptx = ptx.replace(allowed, "")
    for found in UNROUNDED.finditer(ptx):
        faults.append(f"{source.name} for {target}: rounds as ptxas likes: {found.group(0).strip()}")
    return faults, table


def report(sources, table):
    lines = [
        "# What the kernels take of a GPU",
        "",
        "Written by `kernels/check.py --write`, which compiles every kernel for each target without a GPU and without a warning; `.ci/nightly kernels`",
        "compares. No kernel spills a register or has a stack frame. Shared bytes are those of the source; what a launch gives beside them is in the kernel's geometry. Compiler: " + WHEELS[0].replace("==", " ") + ", " + " ".join(options()) + ".",
        "",
        "| file | kernel | shared bytes | " + " | ".join(f"registers, {target}" for target in TARGETS) + " |",
        "|---|---|---|" + "---|" * len(TARGETS),
    ]
    for source in sources:
        names = re.findall(r"^KERNEL (\w+)\(", source.read_text(encoding="utf-8"), re.MULTILINE)
        for name in names:
            shared = {table[name, target][1] for target in TARGETS}
            counts = " | ".join(str(table[name, target][0]) for target in TARGETS)
            lines.append(f"| {source.name} | `{name}` | {', '.join(map(str, sorted(shared)))} | {counts} |")
    lines += ["", "Variants (`src/variants.rs`):", "", *lines[5:7]]
    lines[-2] = lines[-2].replace("file | kernel", "kernel | variant")
    for variant in variants():
        counts = " | ".join(str(table[variant, target][0]) for target in TARGETS)
        lines.append(f"| `{variant[0]}` | {variant[1]} | {table[variant, TARGETS[0]][1]} | {counts} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write kernels/report.md")
    parser.add_argument("--venv", type=Path, default=ROOT / "target/cuda-venv", help="where the compiler is, or is installed")
    arguments = parser.parse_args()
    compiler, sources = nvcc(arguments.venv), sorted(CUDA.glob("*.cu"))
    jobs = [(source, target) for source in sources for target in TARGETS]
    jobs += [(source, target, variant, macros) for variant, (source, macros) in variants().items() for target in TARGETS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: compile_one(compiler, job[0], job[1], Path(folder), *job[2:]), jobs))
    faults, table = [fault for found, _ in results for fault in found], {}
    for _, found in results:
        table.update(found)
    if not faults:
        text = report(sources, table)
        if arguments.write:
            REPORT.write_text(text, encoding="utf-8")
        old = REPORT.read_text(encoding="utf-8") if REPORT.exists() else ""
        pairs = set(old.splitlines()) ^ set(text.splitlines())
        faults += [f"report.md differs: {line}" for line in sorted(pairs)]
    for fault in faults:
        print(f"kernels: {fault}", file=sys.stderr)
    if not faults:
        print(f"{len(table) // len(TARGETS)} kernels and variants in {len(sources)} files, each for {', '.join(TARGETS)}: as in kernels/report.md")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
