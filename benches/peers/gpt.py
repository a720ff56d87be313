"""The GPT-2 that gpt_train trains, in PyTorch, and what the programs in PyTorch share.

Pre-norm blocks, learned positions, GELU (tanh), biases, no dropout, output layer tied to the token embedding; AdamW and
clipping as in gpt_train's defaults.
"""

import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lifetime
import program

MAX_NORM = 1.0
STD = 0.02


class Attention(nn.Module):
    """`fused`: one product gives query, key and value. Tensor parallelism needs three: cut rows of one would mix them."""

    def __init__(self, hidden, heads, fused):
        super().__init__()
        self.head_size = hidden // heads
        self.qkv = nn.ModuleList([nn.Linear(hidden, 3 * hidden)] if fused else [nn.Linear(hidden, hidden) for _ in range(3)])
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x):
        parts = self.qkv[0](x).chunk(3, dim=-1) if len(self.qkv) == 1 else [linear(x) for linear in self.qkv]
        # -1: under tensor parallelism a rank has only its own heads.
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, hidden, heads, fused):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads, fused)
        self.norm2, self.ffn = nn.LayerNorm(hidden), FeedForward(hidden)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Gpt(nn.Module):
    """The whole model; `keep` cuts it down to a pipeline stage."""

    def __init__(self, work, fused=True):
        super().__init__()
        torch.manual_seed(1234)
        self.embed, self.position = nn.Embedding(work.vocab_size, work.hidden_size), nn.Embedding(work.seq_len, work.hidden_size)
        blocks = (Block(work.hidden_size, work.num_heads, fused) for _ in range(work.num_layers))
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.norm, self.head = nn.LayerNorm(work.hidden_size), nn.Linear(work.hidden_size, work.vocab_size, bias=False)
        self.register_buffer("positions", torch.arange(work.seq_len), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
                nn.init.normal_(p, std=STD / (2 * work.num_layers) ** 0.5 if residual else STD)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight

    def keep(self, layers, first, last):
        """Keeps the blocks of `layers`; the embeddings if `first`; the output layer if `last`."""
        self.blocks = nn.ModuleDict({str(index): self.blocks[str(index)] for index in layers})
        if not last:
            self.norm = self.head = None
        if not first:
            # The copy of the tied weight on the last stage is a parameter of its own.
            if last:
                self.head.weight = nn.Parameter(self.head.weight.detach().clone())
            self.embed = self.position = None
        return self

    def hidden(self, x):
        """What the head reads, or what goes to the next stage."""
        if self.embed is not None:
            x = self.embed(x) + self.position(self.positions[: x.shape[1]].unsqueeze(0))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None else self.norm(x)

    def forward(self, x):
        x = self.hidden(x)
        return x if self.head is None else self.head(x)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def chunked_cross_entropy(hidden, weight, targets, chunk, form):
    """The head and the loss for `chunk` tokens at a time. `function`: by PyTorch's own function, which computes the gradients in forward;
    `checkpoint`: written by hand, with the logits of each chunk computed once more in backward."""
    hidden, targets = hidden.flatten(0, 1), targets.flatten(0, 1)
    if form == "function":
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
        return F.linear_cross_entropy(hidden, weight, targets, options=options)

    def loss(hidden, targets):
        return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")

    chunks = zip(hidden.split(chunk), targets.split(chunk))
    return sum(checkpoint(loss, *part, use_reentrant=False) for part in chunks) / len(targets)


def adamw(model, fused=None):
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused or None)


class Batches(program.Batches):
    def get(self, step):
        return tuple(torch.from_numpy(part) for part in super().get(step))


def relaunch(ranks):
    """Goes on as `ranks` processes under torchrun, unless this is one of them already: then it ends with torchrun."""
    if "LOCAL_RANK" in os.environ:
        lifetime.bound()
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])
