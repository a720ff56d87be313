"""Demands that jax_gpt.py trains the model of gpt.py: from the same values and on one batch, their losses are the same.

    target/peer-venv/bin/python benches/peers/agree.py [--dp N --tp N --rows N]
"""

import argparse
from types import SimpleNamespace

import jax
import numpy as np
import torch

import gpt
import jax_gpt

WORK = SimpleNamespace(vocab_size=256, num_layers=3, hidden_size=64, num_heads=4, seq_len=32, batch=8)
STEPS, TOLERANCE = 20, 1e-4


def torch_losses(model, x, y):
    optimizer = gpt.adamw(model)
    for _ in range(STEPS):
        loss = gpt.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def values_of(model, like):
    """The model's values, named and shaped as in `like`."""
    plain = lambda m: {"weight": m.weight, "bias": m.bias}
    linear = lambda m: {"weight": m.weight.T, "bias": m.bias}
    blocks = [
        {
            "norm1": plain(b.norm1),
            "qkv": linear(b.attention.qkv[0]),
            "out": linear(b.attention.out),
            "norm2": plain(b.norm2),
            "up": linear(b.ffn.up),
            "down": linear(b.ffn.down),
        }
        for b in model.blocks.values()
    ]
    values = {"embed": model.embed.weight, "position": model.position.weight, "blocks": blocks, "norm": plain(model.norm)}
    return jax.tree.map(lambda value, shaped: value.detach().numpy().reshape(shaped.shape).copy(), values, like)


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"dp": 1, "tp": 1, "rows": WORK.seq_len}.items():
        parser.add_argument("--" + name, type=int, default=default)
    args = parser.parse_args()
    tokens = np.random.default_rng(1).integers(0, WORK.vocab_size, (WORK.batch, WORK.seq_len + 1))
    x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()

    model = gpt.Gpt(WORK)
    shaped, cuts = jax_gpt.weights(WORK)
    trainer = jax_gpt.Trainer(jax_gpt.device_mesh(args.dp, args.tp), values_of(model, shaped), cuts, args.rows)
    for step, loss in enumerate(torch_losses(model, torch.from_numpy(x), torch.from_numpy(y)), 1):
        other = float(trainer.train(*trainer.place((x, y))))
        print(f"step {step}: {loss:.6f} in PyTorch, {other:.6f} in JAX")
        assert abs(loss - other) < TOLERANCE, "not the same model"


main()
