"""Continues a prompt of random tokens with `transformers`, greedily and with its cache: tokens per second of the prompt and of what is drawn, as a JSON
line. `--make` writes GPT-2 with random weights to the folder first, unless it is there."""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--make", action="store_true")
parser.add_argument("--prompt", type=int, default=64)
parser.add_argument("--tokens", type=int, default=64)
args = parser.parse_args()

if args.make and not (Path(args.model) / "config.json").exists():
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(args.model)
model = GPT2LMHeadModel.from_pretrained(args.model).eval()
prompt = torch.randint(0, 256, (1, args.prompt), generator=torch.Generator().manual_seed(0))
settings = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(prompt))


def seconds(tokens):
    start = time.perf_counter()
    made = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **settings)
    assert made.shape[1] == args.prompt + tokens
    return time.perf_counter() - start


with torch.inference_mode():
    seconds(4)  # warms up
    first, all = seconds(1), seconds(args.tokens)
print(json.dumps({"prompt_tokens_per_s": args.prompt / first, "tokens_per_s": (args.tokens - 1) / (all - first)}))
