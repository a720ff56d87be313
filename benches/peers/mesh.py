"""The same step over a mesh of processes with gloo: DDP or FSDP2, DTensor tensor parallelism, `torch.distributed.pipelining`.

What the libraries leave to their user is done here by hand: weights are tied again after `parallelize_module`; the
gradients of a tied weight on two pipeline stages are added; the norm for clipping spans stages, and plain tensors beside
DTensors.
"""

import contextlib
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import gpt
import program


def layers_of(stage, stages, num_layers, partition):
    """The layers of a stage: `partition` has the number of each, such as `6,0`; empty: the same for all."""
    counts = [int(count) for count in partition.split(",")] if partition else [num_layers // stages] * stages
    start = sum(counts[:stage])
    return range(start, start + counts[stage])


def tensor_parallel(model, mesh, layers, sequence):
    """Cuts the products over `mesh`; with `sequence`, what is between them along the sequence."""
    between = Shard(1) if sequence else Replicate()
    row = lambda: RowwiseParallel(output_layouts=between)
    plan = {}
    for block in (f"blocks.{index}." for index in layers):
        plan |= {block + f"attention.qkv.{part}": ColwiseParallel() for part in range(3)}
        plan |= {block + "ffn.up": ColwiseParallel(), block + "attention.out": row(), block + "ffn.down": row()}
        if sequence:
            gather = lambda: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {block + name: SequenceParallel() for name in ("norm1", "norm2")}
            plan |= {block + name: gather() for name in ("attention", "ffn")}
    if model.embed is not None:
        embedding = lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        plan |= {"embed": embedding()} | ({"position": embedding()} if sequence else {})
    if model.head is not None:
        plan["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        if sequence:
            plan["norm"] = SequenceParallel()
    model = parallelize_module(model, mesh, plan)
    if model.embed is not None and model.head is not None:
        model.tie()
    return model


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def norm_of(grads):
    return whole(torch.nn.utils.get_total_norm(grads))


def clip(model, pp_group):
    groups = {}
    for p in model.parameters():
        key = (p.grad.device_mesh, p.grad.placements) if isinstance(p.grad, DTensor) else None
        groups.setdefault(key, []).append(p)
    squares = sum(norm_of([p.grad for p in group]) ** 2 for group in groups.values())
    if pp_group:
        if model.head is not None:  # The first stage has counted the tied weight.
            squares = squares - norm_of([model.head.weight.grad]) ** 2
        dist.all_reduce(squares, group=pp_group)
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, gpt.MAX_NORM, squares.sqrt())


def main():
    args, work = program.arguments(dp=1, tp=1, pp=1, fsdp=False, sequence=False, micros=4, partition="")
    gpt.relaunch(args.dp * args.tp * args.pp)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    first, last = stage == 0, stage == args.pp - 1
    layers = layers_of(stage, args.pp, work.num_layers, args.partition)

    model = gpt.Gpt(work, fused=args.tp == 1).keep(layers, first, last)
    if args.tp > 1:
        model = tensor_parallel(model, mesh["tp"], layers, args.sequence)
    run = model
    if args.fsdp:
        for module in [*model.blocks.values(), model]:
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=args.pp == 1)
    elif args.dp > 1:
        run = DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)
    pp_group = mesh["pp"].get_group() if args.pp > 1 else None
    if pp_group:
        place = PipelineStage(run, stage, args.pp, torch.device("cpu"), group=pp_group)
        schedule = Schedule1F1B(place, args.micros, loss_fn=gpt.cross_entropy)
    optimizer = gpt.adamw(model)
    batches = gpt.Batches(work)
    rows = slice(replica * work.batch // args.dp, (replica + 1) * work.batch // args.dp)

    def backward(x, y):
        """Adds to the gradients; the mean loss, where this rank knows it."""
        if not pp_group:
            loss = gpt.cross_entropy(run(x), y)
            loss.backward()
            return whole(loss.detach())
        losses = []
        schedule.step(*[x] * first, **(dict(target=y, losses=losses) if last else {}))
        if first or last:
            tied = (model.embed if first else model.head).weight.grad
            dist.all_reduce(tied.to_local() if isinstance(tied, DTensor) else tied, group=pp_group)
        return sum(whole(loss.detach()) for loss in losses) / max(len(losses), 1)

    for step in range(work.steps):
        x, y = (part[rows] for part in batches.get(step))
        dist.barrier()
        start = time.perf_counter()
        with loss_parallel() if args.tp > 1 else contextlib.nullcontext():
            loss = backward(x, y)
        clip(model, pp_group)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        seconds = time.perf_counter() - start
        shown = torch.tensor([float(loss) / (args.dp * args.tp)])
        dist.all_reduce(shown)
        if dist.get_rank() == 0:
            program.report(step, seconds, shown.item())
    dist.barrier()
    dist.destroy_process_group()


main()
