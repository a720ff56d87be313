#!/usr/bin/env python3
"""Compares the communicator over processes with mpi4py over the same library, in turn, on this machine.

    scripts/install_mpi.sh target/mpi && pip install --target target/mpi/python mpi4py numpy
    cargo build --release -p meshwork-mpi --benches
    python3 benches/mpi.py [--processes 2] [--rounds 5] [--library openmpi]
    python3 benches/mpi.py --overlap
    python3 benches/mpi.py --hybrid
    python3 benches/mpi.py --native [--processes 4]

Prints, for each library, operation and size, the medians of both in microseconds over the rounds, their spread
(largest by smallest), and theirs divided by ours: above 1 we are faster. mpi4py waits with a busy core; ours leaves it.

--overlap: a computation and an all-reduce of each rank, alone and both at once, with ours and with mpi4py's Iallreduce;
"pending" is the computation alone while the other ranks have not come to the all-reduce.
--native: sums by our tree beside sums by the library (comm.reduction = "native").
--hybrid: two processes of four ranks beside eight processes of one rank, and beside mpi4py over eight processes.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from peers import lifetime

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = [("mpich", "libmpi.so.12"), ("openmpi", "libmpi.so.40")]
SIZES = [4 << 10, 256 << 10, 4 << 20, 64 << 20]


def theirs():
    """One process of mpi4py: the same calls, sizes and numbers of calls as crates/mpi/benches/collectives.rs."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    n, rank = world.size, world.rank
    for size in SIZES:
        count = size // 4
        part = count // n
        whole, other = np.zeros(part * n, "f"), np.zeros(part * n, "f")
        x, y, piece = np.zeros(count, "f"), np.zeros(count, "f"), np.zeros(part, "f")

        def ping():
            if rank == 0:
                world.Send(x, n - 1)
                world.Recv(y, n - 1)
            elif rank == n - 1:
                world.Recv(y, 0)
                world.Send(x, 0)

        calls = {
            "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, x),
            "all_gather": lambda: world.Allgather(piece, whole),
            "reduce_scatter": lambda: world.Reduce_scatter_block(whole, piece),
            "all_to_all": lambda: world.Alltoall(whole, other),
            "send_recv": ping,
        }
        for name, call in calls.items():
            times = min(max((32 << 20) // size, 3), 200)
            for _ in range(-(-times // 4)):
                call()
            world.Barrier()
            begun = time.perf_counter()
            for _ in range(times):
                call()
            if rank == 0:
                print(name, size, f"{(time.perf_counter() - begun) / times:.9f}", flush=True)


def their_overlap():
    """One process of mpi4py: the lines of `overlap` of crates/mpi/benches/collectives.rs."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    values = np.ones(4096, "f")

    def compute():
        for _ in range(8000):
            np.multiply(values, 0.999, out=values)
            np.add(values, 0.001, out=values)

    def timed(computes, size, late=False):
        times = []
        for _ in range(15):
            x = np.zeros(size // 4, "f")
            world.Barrier()
            if late and world.rank:
                time.sleep(0.06)
            begun = time.perf_counter()
            request = world.Iallreduce(MPI.IN_PLACE, x) if size else None
            if computes and not (late and world.rank):
                compute()
            computed = time.perf_counter() - begun
            if request:
                request.Wait()
            times.append(computed if late else time.perf_counter() - begun)
        return statistics.median(times)

    lines = [("compute", 0, timed(True, 0))]
    for size in SIZES[1:]:
        lines += [("communicate", size, timed(False, size)), ("both", size, timed(True, size))]
    lines.append(("pending", 4 << 20, timed(True, 4 << 20, True)))
    if world.rank == 0:
        for name, size, seconds in lines:
            print(name, size, f"{seconds:.9f}")


def run(folder, file, processes, program):
    root = ROOT / "target/mpi" / folder
    command = [root / "bin/mpirun", "-n", str(processes)]
    env = dict(os.environ, LD_LIBRARY_PATH=str(root / "lib"), PYTHONPATH=str(ROOT / "target/mpi/python"))
    env["MPI4PY_LIBMPI"] = str(root / "lib" / file)
    if folder == "openmpi":
        command[1:1] = ["--oversubscribe", "--bind-to", "none"]
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OPAL_PREFIX=str(root))
    out = lifetime.run([*map(str, command), *map(str, program)], env=env, capture_output=True, text=True, timeout=600)
    if out.returncode:
        sys.exit(f"{folder}: {out.stderr[-2000:]}")
    lines = (line.split() for line in out.stdout.splitlines())
    return {(name, int(size)): float(seconds) for name, size, seconds in lines}


def in_turn(rounds, *sides):
    """The medians in microseconds of each side, and their spreads, by row: sides run in turn."""
    times = [[side() for side in sides] for _ in range(rounds)]
    rows = {key: [[us[at][key] * 1e6 for us in times] for at in range(len(sides))] for key in times[0][0]}
    return {key: [(statistics.median(us), max(us) / min(us)) for us in row] for key, row in rows.items()}


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--processes", type=int, default=2)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--library", choices=[name for name, _ in LIBRARIES], help="by default both")
    words.add_argument("--overlap", action="store_true")
    words.add_argument("--hybrid", action="store_true")
    words.add_argument("--native", action="store_true")
    words.add_argument("--program", type=Path, help="the benchmark of crates/mpi; by default the newest of a release build")
    words.add_argument("--theirs", choices=["calls", "overlap"], help=argparse.SUPPRESS)
    args = words.parse_args()
    if args.theirs:
        return theirs() if args.theirs == "calls" else their_overlap()
    programs = (path for path in (ROOT / "target/release/deps").glob("collectives-*") if not path.suffix)
    newest = [args.program.resolve()] if args.program else [path for path in programs if b"meshwork_mpi" in path.read_bytes()]
    if not newest:
        sys.exit("cargo build --release -p meshwork-mpi --benches comes first")
    program = max(newest, key=lambda path: path.stat().st_mtime)
    for folder, file in LIBRARIES:
        if args.library not in (None, folder):
            continue
        path = ROOT / "target/mpi" / folder / "lib" / file
        ours = lambda processes, *mode: lambda: run(folder, file, processes, [program, path, *mode])
        mpi4py = lambda processes, mode: lambda: run(folder, file, processes, [sys.executable, __file__, "--theirs", mode])
        if args.overlap:
            overlap(folder, in_turn(args.rounds, ours(args.processes, "overlap"), mpi4py(args.processes, "overlap")))
            continue
        if args.hybrid:
            names = ["2 x 4 us", "8 x 1 us", "mpi4py us"]
            rows = in_turn(args.rounds, ours(2, "4"), ours(8), mpi4py(8, "calls"))
        elif args.native:
            names = ["tree us", "native us", "mpi4py us"]
            sides = (ours(args.processes), ours(args.processes, "native"), mpi4py(args.processes, "calls"))
            rows = {key: row for key, row in in_turn(args.rounds, *sides).items() if "reduce" in key[0]}
        else:
            names = ["ours us", "mpi4py us"]
            rows = in_turn(args.rounds, ours(args.processes), mpi4py(args.processes, "calls"))
        print(f"{'library':8} {'operation':15} {'KiB':>6}" + "".join(f" {name:>10} spread  ratio" for name in names))
        for (name, size), sides in rows.items():
            cells = (f" {us:10.1f} {spread:6.2f} {us / sides[0][0]:6.2f}" for us, spread in sides)
            print(f"{folder:8} {name:15} {size >> 10:6}" + "".join(cells), flush=True)


def overlap(folder, rows):
    """Prints what of a communication is hidden behind a computation, and how much longer the computation takes."""
    print(f"{'library':8} {'side':7} {'KiB':>6} {'compute ms':>10} {'communicate':>11} {'both':>8} {'sum by both':>11}")
    for at, side in enumerate(["ours", "mpi4py"]):
        ms = {key: sides[at][0] / 1e3 for key, sides in rows.items()}
        alone = ms["compute", 0]
        for size in SIZES[1:]:
            one, both = ms["communicate", size], ms["both", size]
            print(f"{folder:8} {side:7} {size >> 10:6} {alone:10.2f} {one:11.2f} {both:8.2f} {(alone + one) / both:11.2f}")
        pending = ms["pending", 4 << 20]
        print(f"{folder:8} {side:7} an all-reduce is pending: the computation takes {pending:.2f} ms, {pending / alone:.3f} of alone")


if __name__ == "__main__":
    main()
