"""The part that says whether GPUs of several processes join over NCCL, and train as one rank does."""

import json
from concurrent.futures import ThreadPoolExecutor

import correct
from harness.ports import free_port
from session import TINY, Late, Skipped

# Meshes of so many ranks, each a process on a GPU of its own.
MESHES = {"dp=2": 2, "tp=2": 2, "pp=2": 2, "dp=2,tp=2": 4, "dp=2,tp=2,pp=2": 8}


# The share of a vector's bytes that the busiest link carries in one direction, of n ranks.
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "send_recv": lambda n: 1,
}


def count(session):
    """How many GPUs processes may have; of the emulator as many as they ask for."""
    if session.emulated:
        return 2 if session.quick else 4
    smi = correct.tool("nvidia-smi")
    return sum(line.startswith("GPU ") for line in session.run([smi, "-L"]).lines) if smi else 1


def together(session, ranks, device, mesh, sets, steps):
    """What each of `ranks` processes of `gpt_train` wrote, which plain variables number and TCP joins, and the losses and norms of their steps."""
    metrics = session.folder / f"nccl-{mesh}.jsonl"
    metrics.unlink(missing_ok=True)
    argv = [session.program("gpt_train"), "--device", device, "--mesh", mesh, "--steps", steps, "--metrics", metrics]
    argv += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    with free_port() as port, ThreadPoolExecutor(ranks) as pool:
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        told = list(pool.map(lambda rank: session.run(argv, place | {"RANK": str(rank)}), range(ranks)))
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    taken = [event for event in map(json.loads, lines) if event.get("event") == "step"]
    return told, [(step["loss"], step.get("grad_norm")) for step in taken]


def refused(session, device):
    """A row: NCCL must refuse two processes on one GPU, and say so."""
    told, _ = together(session, 2, device, "dp=2", TINY | {"comm.kind": "tcp"}, 1)
    row = {"what": "two processes on one GPU"}
    if any(process.code == 0 for process in told):
        return row | {"state": "FAIL", "why": "they trained"}
    reasons = [process.errors for process in told]
    if any("Duplicate GPU detected" in reason or "ncclInvalidUsage" in reason for reason in reasons):
        return row | {"state": "PASS", "found": told[0].reason()}
    return row | {"state": "FAIL", "why": told[0].reason()}


def trained(session, mesh, ranks, sets, steps, wanted):
    """A row: whether a mesh over processes has the losses and norms of one rank, bit for bit."""
    device = f"{session.device}:0:{ranks}" if session.emulated else session.device
    told, found = together(session, ranks, device, mesh, sets | {"comm.kind": "tcp"}, steps)
    row = {"what": f"{mesh}, {ranks} processes", "seconds": max(process.seconds for process in told)}
    if failed := next((process for process in told if process.code), None):
        return row | {"state": "FAIL", "why": failed.reason()}
    if found != wanted:
        return row | {"state": "FAIL", "why": f"losses and norms are {found}, and one rank has {wanted}"}
    return row | {"state": "PASS"}


def bandwidths(session, there):
    """Rows: the algorithm bandwidth of each collective, the bytes that nccl-tests counts over the time, and the bus bandwidth, as its PERFORMANCE.md has it."""
    if there < 2:
        return [{"what": "bandwidth", "state": "SKIPPED", "why": f"it takes two GPUs, and this check has {there}"}]
    # The emulator has no speed.
    words = ["--bench", "--device", session.device, *(["--small"] if session.quick or session.emulated else [])]
    rows = []
    try:
        told = session.run([session.program("nccl"), *words], limit=0.5 * session.left())
    except Skipped as skipped:
        return [{"what": "bandwidth", "state": "SKIPPED", "why": str(skipped)}]
    except Late as late:  # What was measured until then counts.
        told = late.output
        rows.append({"what": "bandwidth", "state": "FAIL", "why": str(late)})
    for line in told.json():
        row = {"what": f"{line['operation']} by the {line['way']}", "ranks": line["ranks"], "bytes": line["bytes"], "ms": line["ms"]}
        share = BUS[line["operation"]](line["ranks"])
        rows.append(row | {"algorithm GB/s": line["gb_per_s"], "bus GB/s": share * line["gb_per_s"], "state": "PASS"})
    if not any(row["state"] == "FAIL" for row in rows) and (told.code or not rows):
        rows.append({"what": "bandwidth", "state": "FAIL", "why": told.reason()})
    return rows


def nccl(session):
    """Processes on GPUs of their own: NCCL call by call, two processes on one GPU refused, the losses of one rank; and the bandwidth of collectives."""
    session.there()
    rows = correct.rows(session, ["nccl::", "joins::"], {"STAND_IN_DEVICES": "5"})
    one = session.device if ":" in session.device or session.emulated else f"{session.device}:0"
    rows.append(refused(session, one))
    there, steps = (1 if ":" in session.device else count(session)), 2
    sets = TINY | {"training.numerics": "canonical"}
    taken, _ = session.train(sets, steps)
    wanted = [(step["loss"], step.get("grad_norm")) for step in taken]
    for mesh, ranks in MESHES.items():
        if ranks > there:
            rows.append({"what": mesh, "state": "SKIPPED", "why": f"it takes {ranks} GPUs, and this check has {there}"})
        else:
            rows.append(trained(session, mesh, ranks, sets, steps, wanted))
    return {"tables": {"over NCCL": rows, "bandwidth": bandwidths(session, there)}}
