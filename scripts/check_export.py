#!/usr/bin/env python3
"""Checks that `transformers` loads an exported model, and computes the logits that meshwork computed.

    scripts/check_export.py FOLDER LOGITS

LOGITS is a JSON file with `tokens` `[batch, seq]` and `logits` `[batch, seq, vocab]`. `cargo test -p meshwork-train --test huggingface` writes
one and calls this, if MESHWORK_PEER_PYTHON names a Python that has torch and transformers.
"""

import json
import sys
from pathlib import Path

TOLERANCE = 1e-4  # of logits around 1, in f32


def main():
    import torch
    from transformers import AutoModelForCausalLM

    folder, path = sys.argv[1:]
    wanted = json.loads(Path(path).read_text())
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for what, names in loading.items():
        if names:
            sys.exit(f"error: {what}: {names}")
    with torch.no_grad():
        logits = model.eval()(torch.tensor(wanted["tokens"])).logits
    ours = torch.tensor(wanted["logits"])
    if logits.shape != ours.shape:
        sys.exit(f"error: logits {list(logits.shape)} in transformers, {list(ours.shape)} in meshwork")
    apart = (logits - ours).abs().max().item()
    if not apart <= TOLERANCE:  # NaN fails too
        sys.exit(f"error: logits are {apart:.1e} apart, more than {TOLERANCE}")
    print(f"{type(model).__name__}: {ours.numel()} logits of {ours.min():.3f} to {ours.max():.3f}, at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
