"""One process: forward, backward, clipping, AdamW. `--compile`: through torch.compile. `--bf16`: under autocast.
`--kv-heads N --ffn N`: a Llama of so many heads of keys and values and that inner width, instead of GPT-2.
`--experts N --top-k K --form loop|grouped`: that Llama with N experts in each block, K of them for a token.
`--lora N`: the model frozen, with adapters of rank N beside its linear layers, by peft; of experts beside their two weights (`target_parameters`).
`--loss-chunk N --chunks function|checkpoint`: GPT-2 with the logits of N tokens at a time.
`--device cuda`: on the first GPU, with the fused AdamW, and a last line that says how much of its memory was in use at most."""

import contextlib
import json
import time
from functools import partial

import torch

import experts
import gpt
import llama
import program

flags = dict(compile=False, bf16=False, kv_heads=0, ffn=0, experts=0, top_k=2, form="grouped", loss_chunk=0, lora=0, chunks="function", device="cpu")
args, work = program.arguments(**flags)
cuda = args.device != "cpu"
network = partial(experts.Experts, count=args.experts, top_k=args.top_k, form=args.form) if args.experts else llama.FeedForward
model = llama.Llama(work, args.kv_heads, args.ffn, network) if args.kv_heads else gpt.Gpt(work)
if args.lora:
    import peft

    layers = ["qkv", "attention.out", "gate_up", "down"] if args.kv_heads else ["qkv.0", "attention.out", "up", "down"]
    # The weights of experts are parameters, and no layers.
    weights = ["ffn.gate_up", "ffn.down"] if args.experts else None
    layers = layers[:2] if args.experts else layers
    model = peft.get_peft_model(model, peft.LoraConfig(r=args.lora, lora_alpha=16, target_modules=layers, target_parameters=weights))
model.to(args.device)
optimizer = gpt.adamw(model, fused=cuda)
batches = gpt.Batches(work)


def loss_of(x, y):
    if args.loss_chunk:
        return gpt.chunked_cross_entropy(model.hidden(x), model.head.weight, y, args.loss_chunk, args.chunks)
    return gpt.cross_entropy(model(x), y) + experts.aux_loss(model)


forward = torch.compile(loss_of) if args.compile else loss_of
for step in range(work.steps):
    x, y = (part.to(args.device) for part in batches.get(step))
    start = time.perf_counter()
    with torch.autocast(args.device.partition(":")[0], dtype=torch.bfloat16) if args.bf16 else contextlib.nullcontext():
        loss = forward(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.MAX_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    told = loss.item()
    if cuda:
        torch.cuda.synchronize()
    program.report(step, time.perf_counter() - start, told)
if cuda:
    print(json.dumps({"peak_device_bytes": torch.cuda.max_memory_allocated()}), flush=True)
