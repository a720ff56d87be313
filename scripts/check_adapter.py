#!/usr/bin/env python3
"""Reads an adapter that meshwork exported with `peft`, and compares it with the model that meshwork merged it into.

    python check_adapter.py BASE ADAPTER MERGED      # three folders; needs peft, transformers, torch

The logits of the base with the adapter, of what `merge_and_unload` makes of it, and of the merged folder, for the same tokens.
"""

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

WITHIN = 2e-5


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


base, adapter, merged = sys.argv[1:]
adapted = PeftModel.from_pretrained(load(base), adapter).eval()
config = adapted.config
generator = torch.Generator().manual_seed(1)
tokens = torch.randint(config.vocab_size, (2, config.max_position_embeddings), generator=generator)
with torch.no_grad():
    plain, wanted, got = load(base)(tokens).logits, adapted(tokens).logits, load(merged)(tokens).logits
    unloaded = adapted.merge_and_unload()(tokens).logits
changed = (plain - wanted).abs().max().item()
for name, logits in [("the merged folder", got), ("merge_and_unload", unloaded)]:
    off = (logits - wanted).abs().max().item()
    print(f"{name}: largest difference {off:.1e}; the adapter changes logits by up to {changed:.1e}")
    if not off <= WITHIN or not changed > 100 * WITHIN:
        sys.exit(1)
