#!/usr/bin/env python3
"""Compares the communicator over processes with mpi4py over the same library, in turn, on this machine.

    scripts/install_mpi.sh target/mpi && pip install --target target/mpi/python mpi4py numpy
    cargo build --release -p meshwork-mpi --benches
    python3 benches/mpi.py [--processes 2] [--rounds 5]

Prints, for each library, operation and size, the medians of both in microseconds over the rounds, their spread
(largest by smallest), and theirs divided by ours: above 1 we are faster. mpi4py waits with a busy core; ours leaves it.
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


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--processes", type=int, default=2)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--program", type=Path, help="the benchmark of crates/mpi; by default the newest of a release build")
    words.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    args = words.parse_args()
    if args.theirs:
        return theirs()
    programs = (path for path in (ROOT / "target/release/deps").glob("collectives-*") if not path.suffix)
    newest = [args.program.resolve()] if args.program else [path for path in programs if b"meshwork_mpi" in path.read_bytes()]
    if not newest:
        sys.exit("cargo build --release -p meshwork-mpi --benches comes first")
    program = max(newest, key=lambda path: path.stat().st_mtime)
    print(f"{'library':8} {'operation':15} {'KiB':>6} {'ours us':>10} {'spread':>6} {'mpi4py us':>10} {'spread':>6} {'ratio':>6}")
    for folder, file in LIBRARIES:
        path = ROOT / "target/mpi" / folder / "lib" / file
        rounds = [
            (
                run(folder, file, args.processes, [program, path]),
                run(folder, file, args.processes, [sys.executable, __file__, "--theirs"]),
            )
            for _ in range(args.rounds)
        ]
        for key in rounds[0][0]:
            ours, other = ([side[key] * 1e6 for side in sides] for sides in zip(*rounds))
            a, b = statistics.median(ours), statistics.median(other)
            spread = lambda times: max(times) / min(times)
            print(f"{folder:8} {key[0]:15} {key[1] >> 10:6} {a:10.1f} {spread(ours):6.2f} {b:10.1f} {spread(other):6.2f} {b / a:6.2f}", flush=True)


if __name__ == "__main__":
    main()
