"""The Llama that gpt_train trains, in PyTorch: RMS norms, rotary positions, SwiGLU, grouped-query attention, no biases, an output
layer of its own. `torch.nn.functional.scaled_dot_product_attention` shares the heads of keys and values among those of queries.
With `experts`, a function of hidden size and inner width, each block has what it returns in place of its feed-forward network."""

import torch
import torch.nn as nn
import torch.nn.functional as F

STD = 0.02
THETA = 10_000.0
EPS = 1e-5


def rotate(x, cos, sin):
    """Turns each pair of features, the first half of a head's paired with the second; `x` is [batch, heads, seq, head size]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.sizes, self.head_size = [hidden, *2 * [hidden // heads * kv_heads]], hidden // heads
        self.qkv, self.out = nn.Linear(hidden, sum(self.sizes), bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(x).split(self.sizes, dim=-1))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, work, kv_heads, ffn, experts):
        super().__init__()
        hidden = work.hidden_size
        self.norm1, self.attention = nn.RMSNorm(hidden, EPS), Attention(hidden, work.num_heads, kv_heads)
        self.norm2, self.ffn = nn.RMSNorm(hidden, EPS), experts(hidden, ffn)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.ffn(self.norm2(x))


class Llama(nn.Module):
    """The whole model, for sequences of the work's length."""

    def __init__(self, work, kv_heads, ffn, experts=FeedForward):
        super().__init__()
        torch.manual_seed(1234)
        hidden, half = work.hidden_size, work.hidden_size // work.num_heads // 2
        self.embed = nn.Embedding(work.vocab_size, hidden)
        self.blocks = nn.ModuleList(Block(work, kv_heads, ffn, experts) for _ in range(work.num_layers))
        self.norm, self.head = nn.RMSNorm(hidden, EPS), nn.Linear(hidden, work.vocab_size, bias=False)
        angles = torch.outer(torch.arange(work.seq_len), THETA ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=STD)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))
