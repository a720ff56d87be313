"""The sum of `small`'s gradients over two processes by PyTorch's PowerSGD hook over gloo, rank 4 with error feedback, as
`cargo bench -p meshwork-compress --bench powersgd` does it on the same gradients.

The time is that of the hook alone, added up over the buckets of a backward: the median of ten backwards behind two, of the slower
process. The error is that of the mean of all these sums: |mean - gradient|² / |gradient|².
"""

import json
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

RANKS, SUMS, WARMUP = 2, 12, 2
VOCAB, LAYERS, HIDDEN, SEQ = 256, 6, 384, 256


def shapes():
    block = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)]
    return [(VOCAB, HIDDEN), (SEQ, HIDDEN), *(LAYERS * block)], LAYERS * 13 * HIDDEN + 2 * HIDDEN


def gradient(number, rows, cols, rank):
    """That of our bench: a few directions that get weaker, common to all ranks, and noise."""
    k = torch.arange(12, dtype=torch.float64)
    wave = lambda count, step: torch.cos(step * (k + 1) * torch.arange(count, dtype=torch.float64)[:, None] + 1.3 * (k + number))
    common = (wave(rows, 0.37) / (k + 1) ** 2) @ wave(cols, 0.21).T
    at = torch.arange(rows * cols, dtype=torch.float64).reshape(rows, cols)
    return (common + ((at * 0.618033988749895 + 0.25 * rank) % 1.0 - 0.5) * 0.02).float()


class Gradients(torch.nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, gradients):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros_like(g)) for g in gradients)
        self.gradients = gradients

    def forward(self):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, self.gradients))


def run(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    matrices, vectors = shapes()
    gradients = [gradient(number, *shape, rank) for number, shape in enumerate(matrices)] + [torch.ones(vectors)]
    model = DistributedDataParallel(Gradients(gradients))
    state = powersgd.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    spent = 0.0

    def timed(state, bucket):
        nonlocal spent
        begun = time.perf_counter()
        future = powersgd.powerSGD_hook(state, bucket)
        future.wait()
        spent += time.perf_counter() - begun
        return future

    model.register_comm_hook(state, timed)
    times, means = [], [torch.zeros_like(g, dtype=torch.float64) for g in gradients]
    # The hook sums the first two backwards as they are.
    for step in range(2 + SUMS):
        model.zero_grad()
        loss = model()
        dist.barrier()
        spent = 0.0
        loss.backward()
        if step >= 2:
            slower = torch.tensor(spent)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            times.append(slower.item())
            for mean, weight in zip(means, model.module.weights):
                mean += weight.grad / SUMS
    lost = whole = 0.0
    for mean, own in list(zip(means, gradients))[:-1]:
        true = own.double()
        dist.all_reduce(true)
        true /= RANKS
        lost, whole = lost + (true - mean).square().sum().item(), whole + true.square().sum().item()
    if rank == 0:
        us, size = 1e6 * statistics.median(times[WARMUP:]), 4 * sum(g.numel() for g in gradients)
        print(json.dumps({"op": "powersgd", "bytes": size, "us": us, "error": lost / whole}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    # Bound until the ranks have ended, so that no connection gets the port before rank 0 listens there.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        torch.multiprocessing.spawn(run, (held.getsockname()[1],), RANKS)
