#!/usr/bin/env python3
"""Compiles every kernel with nvcc, which needs no GPU, and holds what ptxas says of it against kernels/report.md.

    kernels/check.py [--write] [--venv FOLDER]

For each file of kernels/cuda and each target: PTX and machine code, warnings as errors. Faults: a register that is spilled, a stack frame, an
operation in PTX that may be fused or flushed where the source does not say so, or a line that differs from the report. `--write` writes the
report. It also counts instructions of sm_90a, from nvdisasm. The compiler comes from PyPI's wheels, once, into a virtual environment (by default target/cuda-venv): about 500 MB.
"""

import argparse
import heapq
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
WHEELS = ["nvidia-cuda-nvcc==13.5.37", "nvidia-nvvm==13.5.37", "nvidia-cuda-crt==13.5.37", "nvidia-cuda-runtime==13.5.37",
          "nvidia-cuda-nvdisasm==13.5.37"]
# The oldest that the project is for, Hopper with its own instructions, and the two newest that this compiler knows.
TARGETS = ["sm_80", "sm_90a", "sm_107", "sm_121"]
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# Products and sums of floats must name their rounding, or ptxas may fuse them; none may flush subnormal numbers.
# The target whose instructions are counted, and registers of its SMs.
COUNTED = "sm_90a"
SM_REGISTERS = 65536
# Kernels whose instructions are counted by the element: elements that a thread takes at a time.
STRAIGHT = {
    "add_16": 8, "bias_16": 8, "bias_residual_16": 8, "gelu_forward_16": 8, "gelu_backward_16": 8, "swiglu_forward_16": 8,
    "swiglu_backward_16": 8, "f32_to_operand": 8, "f32_to_bf16": 8, "f32_to_f16": 8, "f16_to_f32": 8, "bf16_to_f32": 8,
    "f32_to_tf32": 4, "gelu_forward_f32": 4, "swiglu_forward_f32": 4,
}
# Kernels with loops: for each loop an instruction that it has, and the elements of an iteration.
LOOPS = {
    "cross_entropy_stats": (("LDG.E.128", 4), ("FFMA", 8)),
    "cross_entropy_stats_16": (("LDG.E.128", 8), ("FFMA", 8)),
    "cross_entropy_backward_16": (("STG.E.128", 8),),
}
# Files with a loop over tiles of products.
PRODUCTS = ("flash_forward", "flash_backward", "grouped_tensor")
# Kernels that start products of four warps and compute powers of two before they wait.
STARTS_AHEAD = ("flash_forward_sm90_64", "flash_forward_sm90_128")
KERNEL = re.compile(r"^KERNEL (\w+)\(", re.MULTILINE)
# A flush to zero that the source asks for, the estimate of a reciprocal that Newton's steps make exact (math.cuh), a
# step of CUDA's own logarithm in f64, and the power of two of the tensor-core kernels, whose users promise no bits.
MEANT = re.compile(r"mul\.rn\.ftz\.f32 %\w+, %\w+, 0f3F800000|rcp\.approx\.ftz\.f(?:32|64)|ex2\.approx\.ftz\.f32")
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


def forms():
    """[(a file, the type of its operands, the macros that it defines)] of src/operands.rs."""
    found = re.findall(r'compiled!\("(\w+)", "(\w+)", (.*?)\),$', (ROOT / "kernels/src/operands.rs").read_text(encoding="utf-8"), re.MULTILINE)
    return [(CUDA / f"{file}.cu", name, [macro.replace(" ", "=") for macro in re.findall(r'"([^"]+)"', macros)]) for file, name, macros in found]


def of_forms():
    """Of each kernel of a form its name and the type of its operands."""
    return [(kernel, name) for source, name, _ in forms() for kernel in KERNEL.findall(source.read_text(encoding="utf-8"))]


def nvcc(venv):
    """The compiler, installed if need be."""
    found = sorted(venv.glob("lib/python3*/site-packages/nvidia/cu13/bin/nvcc"))
    if not found or not found[0].with_name("nvdisasm").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin/pip"), "install", "--quiet", *WHEELS], check=True)
        found = sorted(venv.glob("lib/python3*/site-packages/nvidia/cu13/bin/nvcc"))
    return found[0]


def compile_one(compiler, source, target, folder, variant=("", ""), macros=()):
    """(faults, {(kernel, target): (registers, shared bytes)}) of a file for a target; {((kernel, variant), target): ..} of a variant: of one kernel, or of
    all where it names none."""
    kept = Path(tempfile.mkdtemp(dir=folder))
    only, name = variant
    command = [str(compiler), *options(), f"-arch={target}", "-Werror", "all-warnings", "-I", str(CUDA), str(source)]
    command += [f"-D{macro}" for macro in macros]
    command += ["--cubin", "-Xptxas", "-v,-Werror", "-keep", "-keep-dir", str(kept), "-o", str(kept / "kernels.cubin")]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        return [f"{source.name} for {target}:\n{made.stdout}{made.stderr}"], {}
    faults, table, kernel = [], {}, None
    key = lambda kernel: (kernel, name) if name else kernel
    for line in made.stderr.splitlines():
        if found := ENTRY.search(line):
            kernel = found.group(1)
        elif found := STACK.search(line):
            if any(int(count) for count in found.groups()) and only in ("", kernel):
                faults.append(f"{source.name} for {target}: {kernel} {name}: {line.strip()}")
        elif found := USED.search(line):
            if only in ("", kernel):
                table[key(kernel), target] = (int(found.group(1)), int(found.group(2) or 0))
    ptx = MEANT.sub("", next(kept.glob("*.ptx")).read_text(encoding="utf-8"))
    for found in UNROUNDED.finditer(ptx):
        faults.append(f"{source.name} for {target}: rounds as ptxas likes: {found.group(0).strip()}")
    if target == COUNTED:
        threads = dict(re.findall(r"\.entry (\w+)\(.*?\.maxntid (\d+)", ptx, re.DOTALL))
        for kernel, code in functions(compiler, kept / "kernels.cubin").items():
            if only in ("", kernel) and kernel in threads:
                table[key(kernel), "code"] = (code, int(threads[kernel]))
    return faults, table


def functions(compiler, cubin):
    """{kernel: its instructions and labels}."""
    listing = subprocess.run([str(compiler.with_name("nvdisasm")), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    found, code = {}, []
    for line in listing.splitlines():
        if start := re.match(r"\.text\.(\w+):", line.strip()):
            code = found.setdefault(start.group(1), [])
        elif part := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;|\s*(\.L_x_\d+:)", line):
            code.append(part.group(1) or part.group(2))
    return found


def flow(code):
    """The instructions, and for each the places of those that may follow it."""
    places, instructions = {}, []
    for line in code:
        if line.endswith(":"):
            places[line[:-1]] = len(instructions)
        else:
            instructions.append(line)
    following = []
    for at, line in enumerate(instructions):
        name = re.sub(r"^@!?U?P\w+ ", "", line)
        to = [at + 1]
        if jump := re.match(r"BRA(.*)`\((\.L_x_\d+)\)", name):
            always = name == line and not re.search(r"[.P]", jump.group(1))
            to = [places[jump.group(2)], *([] if always else to)]
        elif name == line and re.match(r"(EXIT|RET|BRA)\b", name):
            to = []
        following.append([place for place in to if place < len(instructions)])
    return instructions, following


def steps(starts, following):
    """For each instruction the fewest instructions from one of the starts to it, with both."""
    fewest, queue = [None] * len(following), [(1, start) for start in starts]
    heapq.heapify(queue)
    while queue:
        count, at = heapq.heappop(queue)
        if fewest[at] is None:
            fewest[at] = count
            for place in following[at]:
                heapq.heappush(queue, (count + 1, place))
    return fewest


def cheapest(instructions, following, start, ends, through):
    """The fewest instructions from a start to an end through one with this text: without the ways for odd sizes."""
    before = [[] for _ in following]
    for at, places in enumerate(following):
        for place in places:
            before[place].append(at)
    there, back = steps([start], following), steps(ends, before)
    ways = [there[at] + back[at] - 1 for at, line in enumerate(instructions) if through in line and there[at] and back[at]]
    return min(ways, default=None)


def of_element(kernel, code):
    """Instructions for an element of a kernel of STRAIGHT or LOOPS."""
    instructions, following = flow(code)
    if kernel in STRAIGHT:
        ends = [at for at, line in enumerate(instructions) if "EXIT" in line]
        return cheapest(instructions, following, 0, ends, "STG.E.128") / STRAIGHT[kernel]
    loops = [(place, at) for at, places in enumerate(following) for place in places if place <= at]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    total = 0.0
    for through, elements in LOOPS[kernel]:
        ways = [cheapest(instructions[a:b + 1], [[to - a for to in tos if a <= to <= b and to != a] for tos in following[a:b + 1]], 0, [b - a], through)
                for a, b in inner]
        longest = {"FFMA": max}.get(through, min)  # loops over rests are shorter
        total += longest(way for way in ways if way) / elements
    return total


def busiest(instructions, following):
    """The instructions on the way from the first to the last with the most HMMA, of those the fewest, none twice."""
    best = [None] * len(instructions)  # HMMA and other instructions before each, and where from
    best[0] = (0, 0, None)
    for at, places in enumerate(following):
        if best[at] is None:
            continue
        products, others, _ = best[at]
        way = (products + 1, others, at) if "HMMA" in instructions[at] else (products, others + 1, at)
        for place in places:
            if place > at and (best[place] is None or (way[0], -way[1]) > (best[place][0], -best[place][1])):
                best[place] = way
    way, at = [], len(instructions) - 1
    while at is not None:
        way.append(instructions[at])
        at = best[at][2]
    return way


def of_products(kernel, table):
    """Loads of 512 bytes, HMMA, their ratio, all instructions and MUFU on the way through the loop over tiles, the share of an H100 and of an A100
    that they allow, and the blocks on an SM by registers; None without products."""
    code, threads = table[kernel, "code"]
    instructions, following = flow(code)
    loops = [(place, at) for at, places in enumerate(following) for place in places if place <= at]
    count = lambda lines, name: sum(re.match(rf"(@!?U?P\w+ )?(?:{name})\b", line) is not None for line in lines)
    first, last = max(loops, key=lambda loop: (count(instructions[loop[0]:loop[1] + 1], "HMMA"), loop[0] - loop[1]), default=(0, 0))
    way = busiest(instructions[first:last + 1], [[to - first for to in places if first <= to <= last] for places in following[first:last + 1]])
    loads, products, powers = count(way, r"LDSM|LDS\.128"), count(way, "HMMA"), count(way, "MUFU")
    if not loads:
        return None
    other = max(4 * loads, 2 * powers, len(way) / 4)
    most = [min(1, clocks * products / other) for clocks in (1, 2)]
    blocks = SM_REGISTERS // (threads * -(-table[kernel, COUNTED][0] // 8) * 8)
    return f"{loads} | {products} | {products / loads:.2f} | {len(way)} | {powers} | {most[0]:.0%} | {most[1]:.0%} | {blocks} |"


def waits(code):
    """Waits for products of four warps between the last of them before the powers of two, and these."""
    instructions, _ = flow(code)
    powers = next(at for at, line in enumerate(instructions) if "MUFU.EX2" in line)
    products = max(at for at, line in enumerate(instructions[:powers]) if "HGMMA" in line)
    return sum("WARPGROUP.DEPBAR" in line for line in instructions[products:powers])


def counts(sources, table, old):
    """Lines of the report about instructions."""
    lines = [
        "", f"## Instructions of {COUNTED}", "",
        "Counted in machine code. For an element: on the way for whole and aligned 16 bytes, without a bias; of the two types of 16 bits the",
        "cheaper one. For products: `LDSM` of four matrices (in TF32 also `LDS` of 16 bytes a lane), `HMMA` of 16 × 8 × 16 (of TF32 16 × 8 × 8), all",
        "instructions and `MUFU` (powers of two) on the way through the loop over tiles with the most products, of those the shortest: without masks. An",
        "SM of an H100 does an `HMMA` of either kind in 1 clock and one of an A100 in 2; both load an `LDSM` in 4 clocks (512 bytes for a warp), do a",
        "`MUFU` in 2, and issue 4 instructions a clock. The largest of these sums bounds the share of the card's peak for the type of the operands. Of two",
        "warps with the same rows both are counted, their common scores once. Blocks on an SM: by registers.",
        "", "| kernel | instructions an element |", "|---|---|",
    ]
    for kernel in [*STRAIGHT, *LOOPS]:
        lines.extend(row(old, f"| by the element: `{kernel}` | ", lambda: f"{of_element(kernel, table[kernel, 'code'][0]):.1f} |"))
    lines += ["", "| kernel | LDSM | HMMA | HMMA for each LDSM | instructions | MUFU | at most on an H100 | on an A100 | blocks on an SM |", "|---|" + 8 * "---|"]
    names = [name for source in sources if source.stem in PRODUCTS for name in KERNEL.findall(source.read_text(encoding="utf-8"))]
    of_products_alone = [key for key, (source, _) in variants().items() if source.stem in PRODUCTS]
    for key in [*names, *of_products_alone, *of_forms()]:
        name = f"`{key}`" if isinstance(key, str) else f"`{key[0]}`, {key[1]}"
        lines.extend(row(old, f"| by the product: {name} | ", lambda: of_products(key, table)))
    lines += ["", "Waits for products between those that are started last before the powers of two, and the powers:", ""]
    lines += ["| kernel of four warps | waits |", "|---|---|"]
    for kernel in STARTS_AHEAD:
        lines.extend(row(old, f"| by the wait: `{kernel}` | ", lambda: f"{waits(table[kernel, 'code'][0])} |"))
    return lines


def taken(table, kernel):
    """Shared bytes and registers."""
    shared = sorted({table[kernel, target][1] for target in TARGETS})
    return " | ".join([", ".join(map(str, shared)), *(str(table[kernel, target][0]) for target in TARGETS)]) + " |"


def row(old, start, rest):
    """The row of the report that begins so, in a list; the old one, if its file was left out; none without a rest."""
    try:
        made = rest()
        return [start + made] if made else []
    except KeyError:
        return [line for line in old.splitlines() if line.startswith(start)]


def report(sources, table, old):
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
        names = KERNEL.findall(source.read_text(encoding="utf-8"))
        for name in names:
            lines.extend(row(old, f"| {source.name} | `{name}` | ", lambda: taken(table, name)))
    lines += ["", "Variants (`src/variants.rs`), and the forms of f16 and TF32 (`src/operands.rs`):", "", *lines[5:7]]
    lines[-2] = lines[-2].replace("file | kernel", "kernel | variant")
    for variant in [*variants(), *of_forms()]:
        lines.extend(row(old, f"| `{variant[0]}` | {variant[1]} | ", lambda: taken(table, variant)))
    return "\n".join(lines + counts(sources, table, old)) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write kernels/report.md")
    parser.add_argument("--venv", type=Path, default=ROOT / "target/cuda-venv", help="where the compiler is, or is installed")
    parser.add_argument("--only", metavar="FILE", nargs="+", help="compile these files alone, as `gelu`: other rows of the report stay")
    arguments = parser.parse_args()
    compiler, sources = nvcc(arguments.venv), sorted(CUDA.glob("*.cu"))
    asked = [source for source in sources if not arguments.only or source.stem in arguments.only]
    jobs = [(source, target) for source in asked for target in TARGETS]
    jobs += [(source, target, variant, macros) for variant, (source, macros) in variants().items() if source in asked for target in TARGETS]
    jobs += [(source, target, ("", name), macros) for source, name, macros in forms() if source in asked for target in TARGETS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: compile_one(compiler, job[0], job[1], Path(folder), *job[2:]), jobs))
    faults, table = [fault for found, _ in results for fault in found], {}
    for _, found in results:
        table.update(found)
    if not faults:
        old = REPORT.read_text(encoding="utf-8") if REPORT.exists() else ""
        text = report(sources, table, old)
        if arguments.write:
            REPORT.write_text(text, encoding="utf-8")
            old = text
        pairs = set(old.splitlines()) ^ set(text.splitlines())
        faults += [f"report.md differs: {line}" for line in sorted(pairs)]
    for fault in faults:
        print(f"kernels: {fault}", file=sys.stderr)
    if not faults:
        print(f"{sum(key[1] == COUNTED for key in table)} kernels and variants in {len(asked)} files, each for {', '.join(TARGETS)}: as in kernels/report.md")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
