#!/usr/bin/env python3
"""Checks that `transformers` loads an exported model, and computes the logits that meshwork computed.

    scripts/check_export.py FOLDER LOGITS

LOGITS is a JSON file, of which each part may be missing: `tokens` `[batch, seq]` with `logits` `[batch, seq, vocab]`; a `text` with the `ids`
that the folder's tokenizer must give, and which a pipeline must continue; `ends`, the tokens that must end a text. `cargo test -p meshwork-train --test suite huggingface::` writes
one and calls this, if MESHWORK_PEER_PYTHON names a Python that has torch and transformers.
"""

import json
import sys
from pathlib import Path

TOLERANCE = 1e-4  # of logits around 1, in f32


def check_logits(model, wanted):
    import torch

    with torch.no_grad():
        logits = model.eval()(torch.tensor(wanted["tokens"])).logits
    ours = torch.tensor(wanted["logits"])
    if logits.shape != ours.shape:
        sys.exit(f"error: logits {list(logits.shape)} in transformers, {list(ours.shape)} in meshwork")
    apart = (logits - ours).abs().max().item()
    if not apart <= TOLERANCE:  # NaN fails too
        sys.exit(f"error: logits are {apart:.1e} apart, more than {TOLERANCE}")
    print(f"{type(model).__name__}: {ours.numel()} logits of {ours.min():.3f} to {ours.max():.3f}, at most {apart:.1e} apart")


def main():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    folder, path = sys.argv[1:]
    wanted = json.loads(Path(path).read_text())
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for what, names in loading.items():
        if names:
            sys.exit(f"error: {what}: {names}")
    if "logits" in wanted:
        check_logits(model, wanted)
    if "ends" in wanted:
        ends = model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
        if ends != wanted["ends"]:
            sys.exit(f"error: texts end at {ends} in transformers, at {wanted['ends']} in meshwork")
    if "text" in wanted:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(wanted["text"])["input_ids"]
        if ids != wanted["ids"] or len(tokenizer) > model.config.vocab_size:
            sys.exit(f"error: {wanted['text']!r} is {ids} of {len(tokenizer)} tokens in transformers, {wanted['ids']} in meshwork")
        text = pipeline("text-generation", model=folder, tokenizer=folder)(wanted["text"], max_new_tokens=4, do_sample=False)
        if not text[0]["generated_text"].startswith(wanted["text"]):
            sys.exit(f"error: a pipeline continues {wanted['text']!r} as {text}")


if __name__ == "__main__":
    main()
