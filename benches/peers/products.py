"""Matrix products of a training step through torch.mm, measured as `cargo bench -p meshwork-cpu --bench gemm -- --json` does.

PyTorch multiplies f32 with MKL and bf16 with oneDNN. In bf16 its operands and results are bf16 in memory, where ours are f32 and
are rounded as they are packed.
"""

import argparse
import json
import os
import statistics
import time

import torch

# As in crates/cpu/benches/gemm.rs: tokens, hidden size, vocabulary; outputs of a layer in units of the last two, inputs
# of the hidden size.
PRESETS = {"tiny": (2048, 128, 256), "small": (3072, 384, 256), "medium": (2048, 512, 50257), "gpt2": (2048, 768, 50304)}
LAYERS = {"qkv": (3, 0, 1), "projection": (1, 0, 1), "up": (4, 0, 1), "down": (1, 0, 4), "head": (0, 1, 1)}
SECONDS = 0.25


def gflops(product, terms):
    product()
    begun, times = time.perf_counter(), []
    while not times or time.perf_counter() - begun < SECONDS:
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return 2 * terms / statistics.median(times) / 1e9


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("precision", choices=["f32", "bf16"])
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    tokens, hidden, vocabulary = PRESETS[args.preset]
    for layer, (of_hidden, of_vocabulary, inputs) in LAYERS.items():
        out, inner = of_hidden * hidden + of_vocabulary * vocabulary, inputs * hidden
        shapes = {"x": (tokens, inner), "w": (out, inner), "y": (tokens, out)}
        x, w, y = (torch.rand(shape, dtype=torch.float32).sub_(0.5).to(dtype) for shape in shapes.values())
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        passes = {
            "dx": lambda: torch.mm(y, w, out=dx),
            "dw": lambda: torch.mm(y.t(), x, out=dw),
            "y": lambda: torch.mm(x, w.t(), out=y),
        }
        for name, product in passes.items():
            rate = gflops(product, tokens * out * inner)
            print(json.dumps({"product": f"{layer} {name}", "gflops": rate}), flush=True)


main()
