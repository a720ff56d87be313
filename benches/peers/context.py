"""Causal attention over a sequence that ranks over gloo cut, in zigzag order: GFLOP/s of all ranks, forward and backward.

    context.py [--ranks 2] [--shape BATCHxTOKENSxHEADSxFEATURES]

`torch.distributed.tensor.experimental.context_parallel` has no rule for the CPU's kernel of scaled_dot_product_attention
(what it says goes to standard error; where it runs, nothing is said). So its ring is called directly, with that kernel.
First it must give whole sequences' results at a small size.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention

import gpt

parse = argparse.ArgumentParser()
parse.add_argument("--ranks", type=int, default=2)
parse.add_argument("--shape", default="1x16384x6x64")
args = parse.parse_args()
aten, TURNS = torch.ops.aten, 5


def forward(q, k, v):
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return _attention._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)


def backward(dout, q, k, v, out, lse):
    def kernel(query, key, value, out, logsumexp, is_causal, grad_out):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    ring = _attention._templated_ring_attention_backward
    return ring(dist.group.WORLD, 2, kernel, dout, "grad_out", q, k, v, out, lse, is_causal=True)


def held(x):
    """This rank's chunks of a whole sequence: an early and a late one."""
    chunks = x.chunk(2 * args.ranks, dim=2)
    return torch.cat([chunks[dist.get_rank()], chunks[-1 - dist.get_rank()]], dim=2).contiguous()


def check():
    """The results of ranks are those of one."""
    q, k, v, dout = (torch.rand(2, 3, 32 * args.ranks, 16) - 0.5 for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*whole, is_causal=True)
    want.backward(dout)
    out, lse = forward(held(q), held(k), held(v))[:2]
    found = [out, *backward(held(dout), held(q), held(k), held(v), out, lse)[:3]]
    for name, found, want in zip(["out", "dq", "dk", "dv"], found, [want, *(x.grad for x in whole)]):
        error = (found - held(want)).abs().max().item()
        assert error < 1e-5, f"{name} is off by {error}"


def public():
    """What the public interface says."""
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    parts = [torch.rand(1, 1, 8 * args.ranks, 8) for _ in range(3)]
    try:
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
            F.scaled_dot_product_attention(*parts, is_causal=True)
    except (NotImplementedError, RuntimeError) as error:
        if dist.get_rank() == 0:
            print(f"context_parallel: {error}", file=sys.stderr, flush=True)


def seconds(call):
    call()
    times = []
    for _ in range(TURNS):
        dist.barrier()
        start = time.perf_counter()
        call()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


gpt.relaunch(args.ranks)
dist.init_process_group("gloo")
torch.manual_seed(0)
check()
batch, seq, heads, size = map(int, args.shape.split("x"))
q, k, v, dout = (torch.rand(batch, heads, seq // args.ranks, size) - 0.5 for _ in range(4))
out, lse = forward(q, k, v)[:2]
flops = 2 * batch * heads * size * seq * (seq + 1)
there = seconds(lambda: forward(q, k, v))
back = seconds(lambda: backward(dout, q, k, v, out, lse))
if dist.get_rank() == 0:
    for name, work, took in [("attention", flops, there), ("attention gradient", 2.5 * flops, back)]:
        print(json.dumps({"product": f"cp={args.ranks} {name} ring zigzag", "gflops": work / took / 1e9}), flush=True)
public()
dist.barrier()
dist.destroy_process_group()
