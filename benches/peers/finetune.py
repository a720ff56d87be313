"""One process that fine-tunes GPT-2 on answers: forward, backward, clipping, AdamW.
`--grouped`: batches of examples of similar lengths, instead of the order of the file.
`--dpo --lora N`: pairs of answers, by adapters of rank N of peft; without them the model is the frozen one.

Examples are padded to the longest of their batch, which attention and the loss leave out: what PyTorch's fused attention
takes on a CPU. A step is as many tokens of examples, or of both answers of pairs, as the work has in its batch."""

import json
import time

import torch
import torch.nn.functional as F

import gpt
import program

END, IGNORED = 256, -100

args, work = program.arguments(grouped=False, dpo=False, lora=0)
model = gpt.Gpt(work)
if args.lora:
    import peft

    layers = ["qkv.0", "attention.out", "up", "down"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=args.lora, lora_alpha=16, target_modules=layers))
optimizer = gpt.adamw(model)


def example(line, answer):
    """The tokens of an example, and its targets: those of the answer and of its end."""
    prompt = list(line["prompt"].encode())
    tokens = (prompt + list(line[answer].encode()) + [END])[: work.seq_len + 1]
    return tokens, [IGNORED] * (len(prompt) - 1) + tokens[len(prompt) :]


def padded(examples):
    """Tokens and targets of a batch, each `[examples, longest]`."""
    longest = max(len(targets) for _, targets in examples)
    tokens = torch.tensor([tokens[:-1] + [0] * (longest - len(targets)) for tokens, targets in examples])
    return tokens, torch.tensor([targets + [IGNORED] * (longest - len(targets)) for _, targets in examples])


def count(it):
    """The tokens of an example: of both answers of a pair."""
    return sum(len(targets) for _, targets in it)


def batches(examples):
    """Batches of examples whose tokens are those of a step, or almost; again and again."""
    order = sorted(examples, key=count) if args.grouped else examples
    made, batch, held = [], [], 0
    for it in order:
        batch, held = batch + [it], held + count(it)
        if held >= work.batch * work.seq_len:
            made, batch, held = made + [batch], [], 0
    if args.grouped:  # long and short ones in turn
        torch.manual_seed(0)
        made = [made[at] for at in torch.randperm(len(made)).tolist()]
    while True:
        yield from made


def log_probabilities(tokens, targets):
    logits = model(tokens)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -each.unflatten(0, targets.shape).sum(1)


def preference(pairs, beta=0.1):
    tokens, targets = padded([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs])
    with torch.no_grad(), model.disable_adapter():
        frozen = log_probabilities(tokens, targets)
    rewards = beta * (log_probabilities(tokens, targets) - frozen)
    margins = rewards[: len(pairs)] - rewards[len(pairs) :]
    return -F.logsigmoid(margins).mean()


with open(work.tokens, encoding="utf-8") as file:
    lines = [json.loads(line) for line in file]
answers = ["chosen", "rejected"] if args.dpo else ["completion"]
for step, batch in zip(range(work.steps), batches([[example(line, answer) for answer in answers] for line in lines])):
    start = time.perf_counter()
    if args.dpo:
        loss = preference(batch)
    else:
        tokens, targets = padded(sum(batch, []))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.MAX_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    share = sum(map(count, batch)) / (work.batch * work.seq_len)
    program.report(step, (time.perf_counter() - start) / share, loss.item())
