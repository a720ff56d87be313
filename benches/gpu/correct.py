"""The parts that say whether the device is right: tests of kernels and steps, parity with the CPU and between meshes, sanitizers, curves."""

import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

from session import TINY, Failed, Late, Skipped

NAMES = ["nvidia-smi", "nvcc", "compute-sanitizer", "nsys", "g++"]
FOLDERS = "/usr/local/cuda/bin:/opt/nvidia/nsight-systems/bin"
# What a table of results says of the GPU, by the names of nvidia-smi.
FACTS = ["name", "driver_version", "memory.total", "compute_cap", "clocks.max.sm", "clocks.max.memory", "power.limit"]
TOOLS = ["memcheck", "initcheck", "racecheck", "synccheck"]
# How far the loss may be from the CPU's, relative to it, in fast numerics. Bits of f32 differ by the order of sums,
# bf16 by rounding.
NEAR = {"f32": 0.005, "bf16": 0.03}


def tool(name):
    return shutil.which(name) or shutil.which(name, path=FOLDERS)


def machine(session):
    """The GPU, its software, and whether our programs start here."""
    facts = {"device": session.device}
    if (smi := tool("nvidia-smi")) and not session.emulated:
        told = session.run([smi, f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader"])
        if told.code == 0 and told.lines:
            facts |= dict(zip(["gpu", *FACTS[1:]], told.lines[0].split(", ")))
    if nvcc := tool("nvcc"):
        facts["nvcc"] = next((line.strip() for line in session.run([nvcc, "--version"]).lines if "release" in line), None)
    torch = session.run([session.python, "-c", "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"])
    facts["PyTorch"] = torch.text if torch.code == 0 else f"none: {torch.reason()}"
    missing = [name for name in NAMES if not tool(name)]
    if missing:
        facts["not found"] = ", ".join(missing)
    rows = []
    for name in ["gpt_train", "mesh_diff", "generate"]:
        started = session.run([session.program(name), "--help"])
        rows.append({"what": name, "state": "PASS" if started.code == 0 else "FAIL", "why": "" if started.code == 0 else started.reason()})
    row = {"what": f"--device {session.device}", "state": "PASS"}
    rows.append(row)
    try:
        session.there()
    except Skipped as skipped:
        # A machine without the device is none to check; the parts that need it say so too.
        row |= {"state": "SKIPPED", "why": str(skipped)}
    return {"facts": facts, "tables": {"programs": rows}}


def rows(session, words, more=None):
    """A row for each of some tests of the program `gpu`, each run in a process of its own: a fault of a GPU stays with the process, and the tests behind it would fail too."""
    environment = {"STAND_IN_CACHE": str(session.folder / "cubins")} | stand_in(session) | (more or {})
    program = session.program("gpu")
    listed = session.run([program, *words, "--skip", "stand_in::", "--list"], environment)
    names = [line.removesuffix(": test") for line in listed.lines if line.endswith(": test")]
    if not names:
        raise Failed(f"{program.name} lists no tests: {listed.reason()}")
    with ThreadPoolExecutor(2 if session.emulated else 1) as pool:
        return list(pool.map(lambda name: test(session, program, name, environment), names))


def tests(session, words):
    """A part of such tests, all of which need the device."""
    told = rows(session, words)
    if skipped := next((row["why"] for row in told if row["state"] == "SKIPPED"), None):
        raise Skipped(skipped)
    return {"tables": {"tests": told}, "text": [f"{sum(row['state'] == 'PASS' for row in told)} of {len(told)} tests passed"]}


def test(session, program, name, environment):
    """The row of a test. One that fails runs once more and waits after each call, which names the kernel that failed."""
    row = {"what": name, "state": "FAIL"}
    words = [program, "--exact", name, "--nocapture", "--test-threads", "1"]
    try:
        told = session.run(words, environment, limit=session.limit / 3)
        if "SKIPPED: " in told.errors + told.text:
            return row | {"state": "SKIPPED", "why": (told.errors + told.text).partition("SKIPPED: ")[2].splitlines()[0]}
        if told.code == 0 and "test result: ok. 1 passed" in told.text:
            return row | {"state": "PASS"}
        row["why"] = why_of(told)
        row["waiting after each call"] = why_of(session.run(words, environment | {"MESHWORK_LAUNCH_BLOCKING": "1"}, limit=session.limit / 3))
        row["why"] += f"; waiting after each call: {row['waiting after each call']}"
    except Late as late:
        row["why"] = f"{row['why']}; {late}" if "why" in row else str(late)
    return row


def why_of(told):
    """Why a test failed: what it panicked with, or how its process ended."""
    if told.code == 0:
        return "it passes"
    lines = (told.errors + told.text).splitlines()
    # The message is on the line behind the place.
    panics = [" ".join([line.strip(), *lines[at + 1 : at + 2]]) for at, line in enumerate(lines) if "panicked at" in line]
    ended = f"signal {signal.Signals(-told.code).name}" if told.code < 0 else f"exit code {told.code}"
    return "; ".join([ended, *panics])[:500]


def stand_in(session):
    """For an emulated check: libraries that take the place of NVIDIA's, so that the same test program runs on them."""
    if not session.emulated:
        return {}
    compiler, folder = tool("g++"), session.folder / "stand_in"
    if not compiler:
        raise Skipped("no g++, which compiles the stand-in for NVIDIA's libraries")
    if not (folder / "stand_in.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = session.root / "crates/cuda/tests/gpu/stand_in.cpp"
        made = session.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", folder / "stand_in.so", "-ldl"])
        if made.code:
            raise Failed(f"the stand-in does not compile: {made.reason()}")
        for library in ["cuda.so", "nvrtc.so", "cublasLt.so", "nccl.so.2"]:
            (folder / f"lib{library}").symlink_to("stand_in.so")
    # Steps on the emulator left kernels that g++ compiled; the others are compiled now.
    made = session.run(
        [session.program("gpu"), "--exact", "stand_in::makes_kernels", "--nocapture"],
        {"STAND_IN_MAKES": str(session.folder / "cache/meshwork/kernels")},
    )
    kernels = dict(re.findall(r"(STAND_IN_KERNELS\w*)=(.*)", made.text))
    if made.code or not kernels:
        raise Failed(f"the kernels of the stand-in do not compile: {made.reason()}")
    return {"LD_LIBRARY_PATH": str(folder)} | kernels


def operations(session):
    """Every operation and every call of the driver, against the CPU's bits."""
    session.there()
    return tests(session, ["driver::", "ops::", "experts::"])


def steps(session):
    """Whole training steps, on one rank and on meshes, against the CPU's weights, states and norms."""
    session.there()
    return tests(session, ["train::"])


def diff(session, what, words, sets):
    """A row: whether `mesh_diff` finds a bit that differs."""
    argv = [session.program("mesh_diff"), *words, "--numerics", "canonical", "--steps", "1" if session.quick else "2"]
    argv += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    try:
        told = session.run(argv)
    except Late as late:
        return {"what": what, "state": "FAIL", "why": str(late)}
    found = next((line for line in told.lines if line.startswith(("identical", "the first divergence"))), "")
    if told.code == 0 and found.startswith("identical"):
        return {"what": what, "state": "PASS", "found": found}
    detail = " / ".join(line.strip() for line in told.lines if line.strip())[-400:]
    return {"what": what, "state": "FAIL", "found": found, "why": detail if found else told.reason()}


def canonical(session):
    """Each operation, gradient, weight and state of a few steps, bit by bit against the CPU (`mesh_diff`, canonical numerics)."""
    session.there()
    models = {"GPT-2 of two layers": TINY}
    if not session.quick:
        cut = {"model.num_layers": 2, "model.seq_len": 64, "training.global_batch_size": 4}
        models["GPT-2 `tiny`"] = {"model.preset": "tiny"}
        for preset in ["llama-tiny", "switch-tiny", "mixtral-tiny", "deepseek-tiny"]:
            models[preset] = cut | {"model.preset": preset}
        models["GPT-2 124M, 64 tokens"] = {"model.preset": "gpt2", "model.seq_len": 64, "training.global_batch_size": 2}
    words = ["--mesh", "dp=1", "--mesh", "dp=1", "--device", "cpu", "--device", session.device]
    return {"tables": {"cpu against device": [diff(session, what, words, sets) for what, sets in models.items()]}}


def meshes(session):
    """Ranks as threads that share the device, bit by bit against one rank on it."""
    session.there()
    meshes = ["dp=2,tp=2,pp=2"] if session.quick else ["dp=2", "tp=2", "pp=2", "dp=2,tp=2,pp=2"]
    sets = TINY if session.quick else {"model.preset": "tiny", "model.num_layers": 2}
    rows = [diff(session, mesh, ["--mesh", "dp=1", "--mesh", mesh, "--device", session.device], sets) for mesh in meshes]
    if not session.quick:
        words = ["--mesh", "dp=1", "--mesh", "dp=2", "--device", session.device]
        for stage in [1, 2, 3]:
            rows.append(diff(session, f"dp=2, ZeRO {stage}", [*words, "--set-b", f"parallelism.zero_stage={stage}"], sets))
        words = ["--mesh", "dp=1", "--mesh", "dp=2,ep=2", "--device", session.device]
        rows.append(diff(session, "dp=2,ep=2, experts", words, {"model.preset": "switch-tiny", "model.num_layers": 2, "model.seq_len": 32}))
    return {"tables": {"against dp=1": rows}}


# The kernel of a finding, as new and as older versions of compute-sanitizer say it.
AT_KERNEL = re.compile(r"\bat (\w+)\+0x|\bat 0x[0-9a-f]+ in (?:\S+:\d+:)?(\w+)")


def findings(lines):
    """{kernel: its findings} of a tool, the headings of each."""
    found, heading = {}, ""
    for line in lines:
        if re.search(r"Invalid|Race|hazard|ninitialized|Barrier|error", line) and "SUMMARY" not in line:
            heading = line.strip("= ")
        elif at := AT_KERNEL.search(line):
            found.setdefault(at[1] or at[2], []).append(heading)
    return found


def sanitizer(session):
    """Each kernel under compute-sanitizer, by the tests of operations: memory, reads of what nobody wrote, races in shared memory, barriers."""
    if not (program := tool("compute-sanitizer")):
        raise Skipped("compute-sanitizer is not on the path; it comes with CUDA's toolkit")
    if session.emulated:
        raise Skipped("compute-sanitizer needs a GPU; the emulator checks addresses, and the kernels' own tests races")
    session.there()
    rows, kernels = [], []
    for name in TOOLS:
        words = [program, "--tool", name, "--error-exitcode", "99", session.program("gpu"), "ops::", "experts::", "--test-threads", "1"]
        try:
            told = session.run(words, {"STAND_IN_CACHE": str(session.folder / "cubins")}, limit=session.limit / len(TOOLS))
        except Late as late:
            rows.append({"what": name, "state": "FAIL", "why": str(late)})
            continue
        lines = [line for line in (told.text + told.errors).splitlines() if line.startswith("=========")]
        summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), "no summary")
        fine = told.code == 0 and "test result: ok" in told.text
        of_kernels = findings(lines)
        kernels += [{"kernel": kernel, "tool": name, "findings": len(of), "first": of[0]} for kernel, of in of_kernels.items()]
        why = "" if fine else f"findings in {', '.join(of_kernels)}" if of_kernels else told.reason()
        rows.append({"what": name, "state": "PASS" if fine else "FAIL", "found": summary, "why": why})
    return {"tables": {"tools": rows, "kernels": kernels}}


def curves(session):
    """GPT-2 on text, in f32 and in bf16: the loss of each step beside the CPU's."""
    session.there()
    count = 3 if session.quick else 50
    sets = TINY if session.quick else {"model.preset": "gpt2", "model.seq_len": 128, "training.global_batch_size": 4}
    losses, rows = {}, []
    for dtype in ["f32", "bf16"]:
        row = {"what": dtype, "steps": count}
        rows.append(row)
        try:
            own = sets | {"training.dtype": dtype}
            for device in ["cpu", session.device]:
                taken, _ = session.train(own, count, device=device)
                losses[f"{dtype}, {device}"] = [step["loss"] for step in taken]
        except Failed as failed:
            # What the device does not have yet is refused before the first step.
            row |= {"state": "SKIPPED" if "--device" in str(failed) or "training." in str(failed) else "FAIL", "why": str(failed)}
            continue
        cpu, ours = losses[f"{dtype}, cpu"], losses[f"{dtype}, {session.device}"]
        apart = max(abs(a - b) / abs(a) for a, b in zip(cpu, ours))
        row |= {"first loss": ours[0], "last loss": ours[-1], "the CPU's last": cpu[-1], "most apart": apart, "allowed": NEAR[dtype]}
        row |= {"state": "PASS"} if apart <= NEAR[dtype] else {"state": "FAIL", "why": f"{apart:.2%} from the CPU's loss"}
    told = [dict(step=at + 1, **{name: f"{values[at]:.4f}" for name, values in losses.items()}) for at in range(count)]
    return {"tables": {"curves": rows, "losses": told}}
