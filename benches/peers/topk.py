"""`torch.topk` on one thread, measured as `cargo bench -p meshwork-compress --bench compress` does: the indices and values of the
largest tenth of |x|, sorted and not."""

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
        row = {"kind": "compress", "op": "torch.topk", "sorted": sort, "bytes": args.bytes, "ms": 1e3 * min(times)}
        print(json.dumps(row))


main()
