#!/usr/bin/env python3
"""What ranks of 16 to 65,536 do beside training, on paper: messages, bytes and seconds of one rank, by the plans of crates/mpi.

    scripts/scale_on_paper.py [--message 3.3e-6] [--byte 5.5e-11] [--ranks-per-process 8]

The constants are the time of a message of few bytes and the time of a byte: `benches/mpi.py` measures both (the
all_gather of 4 KiB; the send_recv of 64 MiB, which is there and back, by its bytes). Times are those of the rank that does most, without the start of
the processes and the initialisation of MPI, which are the launcher's and the library's.
"""

import argparse
import math

HOST = 32  # bytes of the name of a host
MEET = 4  # cells that meet in a round: crates/mpi/src/cells.rs
SMALL = 16 << 10  # bytes that are exchanged in rounds: crates/mpi/src/wire.rs
REPORT = 80  # bytes of a rank in the report of a step: crates/engine
CLOCK = 8  # round trips by which a rank compares its clock: crates/core/src/comm/membership.rs


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--message", type=float, default=3.3e-6, help="seconds of a message of few bytes")
    words.add_argument("--byte", type=float, default=5.5e-11, help="seconds of a byte")
    words.add_argument("--ranks-per-process", type=int, default=8)
    args = words.parse_args()
    each = args.ranks_per_process

    def collective(ranks, size):
        """The messages and bytes that the first rank of a process sends for an exchange of `size` bytes in all."""
        processes = max(ranks // each, 1)
        inside = min(ranks, each) - 1
        if size <= SMALL:
            rounds = math.ceil(math.log(processes, MEET) - 1e-9) if processes > 1 else 0
            return 2 * inside + (MEET - 1) * rounds, (2 * inside + (MEET - 1) * rounds) * size
        return 2 * (inside + processes - 1), 2 * size

    def text(messages, size):
        seconds = messages * args.message + size * args.byte
        unit = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        return f"{messages:,}, {size / 1024:,.0f} KiB, {unit}"

    print("| ranks | clocks, before the first world | groups of the mesh | handshake | report of one step | memory of a rank for its groups |")
    print("|---|---|---|---|---|---|")
    for ranks in (16, 64, 256, 1024, 4096, 16384, 65536):
        processes = max(ranks // each, 1)
        clocks = CLOCK * 2 * max(math.ceil(math.log2(processes)), 1)
        # tp=8, pp up to 8, and dp: a group for each axis and each product of two.
        tp, pp = 8, min(8, ranks // 8)
        dp = ranks // tp // pp
        groups = [tp, pp, dp, tp * pp, tp * dp, pp * dp]
        # The first of a group tells each member what it is, by a hash; the others tell the first.
        splits = sum(size - 1 for size in groups)
        facts, names = collective(ranks, 200), collective(ranks, ranks * HOST)
        losses, report = collective(ranks, ranks * 8), collective(ranks, ranks * REPORT)
        # World ranks, cells, and places in them.
        memory = (ranks + sum(groups)) * (8 + 16 + 8)
        cells = [
            text(clocks, clocks * 64),
            text(splits, splits * 64),
            text(facts[0] + names[0], facts[1] + names[1]),
            text(losses[0] + report[0], losses[1] + report[1]),
            f"{memory / 1024:,.0f} KiB",
        ]
        print(f"| {ranks:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
