"""The GPT-2 of gpt.py in JAX, its step compiled as a whole: alone, or over devices of this one process (`--dp N --tp N`).

XLA's partitioner makes the collectives: here is said only how weights are cut (products by column, then by row; the vocabulary by
row), and where activations follow them. `--rows N`: attention N rows at a time, each time with the columns that they see.
"""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import program

MAX_NORM = 1.0
STD = 0.02
# XLA removes barriers on CPUs before it fuses, and computes what is behind them again in every fusion that reads it.
XLA_FLAGS = "--xla_disable_hlo_passes=cse_barrier_expander"


def device_mesh(dp, tp):
    """A mesh of devices, which are threads. To be called before JAX is used."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", dp * tp)
    return Mesh(np.array(jax.devices()).reshape(dp, tp), ("dp", "tp"))


def weights(work):
    """Initial values, and beside them how each is cut."""
    draw = np.random.default_rng(1234)
    hidden, heads, layers = work.hidden_size, work.num_heads, work.num_layers

    def normal(*shape, std=STD):
        return draw.standard_normal(shape, np.float32) * np.float32(std)

    def linear(*shape, std=STD):  # from the first axis to the others
        return {"weight": normal(*shape, std=std), "bias": np.zeros(shape[1:], np.float32)}

    def norm():
        return {"weight": np.ones(hidden, np.float32), "bias": np.zeros(hidden, np.float32)}

    def block():
        residual = STD / (2 * layers) ** 0.5
        out = {"weight": normal(heads, hidden // heads, hidden, std=residual), "bias": np.zeros(hidden, np.float32)}
        qkv, up, down = linear(hidden, 3, heads, hidden // heads), linear(hidden, 4 * hidden), linear(4 * hidden, hidden, std=residual)
        return {"norm1": norm(), "qkv": qkv, "out": out, "norm2": norm(), "up": up, "down": down}

    embed, position = normal(work.vocab_size, hidden), normal(work.seq_len, hidden)
    values = {"embed": embed, "position": position, "blocks": [block() for _ in range(layers)], "norm": norm()}

    P = PartitionSpec
    whole = {"weight": P(), "bias": P()}
    row = {"weight": P("tp"), "bias": P()}
    qkv, up = {"weight": P(None, None, "tp"), "bias": P(None, "tp")}, {"weight": P(None, "tp"), "bias": P("tp")}
    cut = {"norm1": whole, "qkv": qkv, "out": row, "norm2": whole, "up": up, "down": row}
    return values, {"embed": P("tp"), "position": P(), "blocks": [cut] * layers, "norm": whole}


def layer_norm(x, w):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def attention(q, k, v, rows):
    """Causal attention of [batch, seq, heads, head size], `rows` of the sequence at a time."""
    parts = []
    for end in range(rows, q.shape[1] + 1, rows):
        seen = np.arange(end - rows, end)[:, None] >= np.arange(end)
        parts.append(jax.nn.dot_product_attention(q[:, end - rows : end], k[:, :end], v[:, :end], mask=seen[None, None]))
    return jnp.concatenate(parts, axis=1)


def loss_of(w, x, y, mesh, rows):
    """The mean cross entropy of a batch."""

    def cut(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def residual(x):
        return jax.lax.optimization_barrier(cut(x, "dp"))

    z = residual(jnp.take(w["embed"], x, axis=0, mode="clip") + w["position"])
    for b in w["blocks"]:
        qkv = jnp.einsum("bsh,hcnd->bscnd", layer_norm(z, b["norm1"]), b["qkv"]["weight"]) + b["qkv"]["bias"]
        qkv = cut(qkv, "dp", None, None, "tp")
        a = cut(attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], rows), "dp", None, "tp")
        z = residual(z + cut(jnp.einsum("bsnd,ndh->bsh", a, b["out"]["weight"]), "dp") + b["out"]["bias"])
        u = cut(layer_norm(z, b["norm2"]) @ b["up"]["weight"] + b["up"]["bias"], "dp", None, "tp")
        z = residual(z + cut(jax.nn.gelu(u, approximate=True) @ b["down"]["weight"], "dp") + b["down"]["bias"])
    logits = cut(jnp.einsum("bsh,vh->bsv", layer_norm(z, w["norm"]), w["embed"]), "dp", None, "tp")
    # A sum, not a gather, which would cross the cuts of the vocabulary.
    right = jnp.where(jnp.arange(logits.shape[-1]) == y[..., None], logits, 0).sum(-1)
    return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


class Trainer:
    """Weights, the optimizer's state and the compiled step."""

    def __init__(self, mesh, values, cuts, rows):
        at = lambda cut: NamedSharding(mesh, cut)
        whole, self.batch_place = at(PartitionSpec()), at(PartitionSpec("dp"))
        places = jax.tree.map(at, cuts, is_leaf=lambda cut: isinstance(cut, PartitionSpec))
        optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1))
        self.weights = jax.device_put(values, places)
        state = jax.eval_shape(optimizer.init, values)
        state_places = optax.tree.map_params(optimizer, lambda _, place: place, state, places, transform_non_params=lambda _: whole)
        self.state = jax.jit(optimizer.init, out_shardings=state_places)(self.weights)

        def step(weights, state, x, y):
            loss, grads = jax.value_and_grad(loss_of)(weights, x, y, mesh, rows)
            updates, state = optimizer.update(grads, state, weights)
            return optax.apply_updates(weights, updates), state, loss

        self.step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(places, state_places, whole))

    def place(self, batch):
        return jax.block_until_ready([jax.device_put(part.astype(np.int32), self.batch_place) for part in batch])

    def train(self, x, y):
        self.weights, self.state, loss = jax.block_until_ready(self.step(self.weights, self.state, x, y))
        return loss


def main():
    args, work = program.arguments(dp=1, tp=1, rows=0)
    trainer = Trainer(device_mesh(args.dp, args.tp), *weights(work), args.rows or work.seq_len)
    batches = program.Batches(work)
    for step in range(work.steps):
        x, y = trainer.place(batches.get(step))
        start = time.perf_counter()
        loss = trainer.train(x, y)
        program.report(step, time.perf_counter() - start, float(loss))


if __name__ == "__main__":
    main()
