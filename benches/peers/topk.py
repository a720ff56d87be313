"""`torch.topk` on one thread, measured as `cargo bench -p meshwork-compress --bench compress` does: the indices and values of the
largest tenth of |x|, sorted and then not."""

import argparse
import json
import time

import torch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=4 << 20)
    parser.add_argument("--fraction", type=float, default=0.1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = (2 * torch.rand(args.bytes // 4, generator=torch.Generator().manual_seed(1)) - 1) ** 3
    keep = round(args.fraction * x.numel())
    for sort in (True, False):
        times = []
        while len(times) < 5 or sum(times) < 2:
            start = time.perf_counter()
            indices = torch.topk(x.abs(), keep, sorted=sort).indices
            values = x[indices]
            times.append(time.perf_counter() - start)
        assert values.numel() == keep
        us = 1e6 * min(times)
        row = {"kind": "torch.topk", "op": "compress", "sorted": sort, "bytes": args.bytes, "ms": us / 1e3, "us": us}
        print(json.dumps(row))


main()
