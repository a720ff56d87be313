"""Collectives of gloo between processes of this host, measured as `cargo bench -p meshwork-core --bench collectives` does.

One time is that of one rank from the end of a barrier to the end of the operation; given is the median over the repeats, of
the rank where it is largest. The bytes are those of the full, uncut tensor of each rank.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

import gpt

SIZES = (4 << 10, 4 << 20, 64 << 20)
SECONDS, REPEATS = 1.2, (5, 300)


def seconds_of(operation):
    dist.barrier()
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def slowest(seconds):
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    args = parser.parse_args()
    gpt.relaunch(args.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in SIZES:
        # Filled, so that the memory is there; zeros, so that sums of sums stay finite.
        full, part = (torch.empty(size // 4 // cut).fill_(0) for cut in (1, args.ranks))
        operations = {
            "all_reduce": lambda: dist.all_reduce(full),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
            "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        }
        for name, operation in operations.items():
            warm = slowest([seconds_of(operation) for _ in range(3)][-1])
            repeats = int(min(max(SECONDS / warm, REPEATS[0]), REPEATS[1]))
            median = slowest(statistics.median(seconds_of(operation) for _ in range(repeats)))
            if dist.get_rank() == 0:
                print(json.dumps({"op": name, "bytes": size, "ranks": args.ranks, "us": median * 1e6}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
