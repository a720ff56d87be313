"""The experts that gpt_train trains in a Llama, in PyTorch: softmax router, the best few experts of a token with weights over their sum,
SwiGLU without biases, no capacity, and the loss of Switch that balances the load (eq. 4 to 6), over the whole batch.

Two forms: `loop`, one expert after the other as in `transformers`, and `grouped`, `torch.nn.functional.grouped_mm` over rows sorted by expert.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

BALANCE = 0.01  # moe.aux_loss_coeff
FORMS = ["loop", "grouped"]


class Experts(nn.Module):
    def __init__(self, hidden, ffn, count, top_k, form):
        super().__init__()
        assert form in FORMS, f"experts as {form}: take one of {FORMS}"
        self.count, self.top_k, self.form, self.aux_loss = count, top_k, form, None
        self.router = nn.Linear(hidden, count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * ffn, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, ffn))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        load = torch.bincount(chosen.flatten(), minlength=self.count)
        self.aux_loss = BALANCE * self.count * (load / chosen.numel() * scores.mean(dim=0)).sum()
        parts = self.loop(tokens, weights, chosen) if self.form == "loop" else self.grouped(tokens, weights, chosen, load)
        return parts.view_as(x)

    def loop(self, tokens, weights, chosen):
        y = torch.zeros_like(tokens)
        for expert in range(self.count):
            token, choice = torch.where(chosen == expert)
            gate, up = F.linear(tokens[token], self.gate_up[expert]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.down[expert])
            y = y.index_add(0, token, rows * weights[token, choice, None])
        return y

    def grouped(self, tokens, weights, chosen, load):
        order = chosen.flatten().argsort(stable=True)
        token, ends = order // self.top_k, load.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(tokens[token], self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        return torch.zeros_like(tokens).index_add(0, token, rows * weights.flatten()[order, None])


def aux_loss(model):
    """The balancing losses of all layers in the last forward pass."""
    return sum(module.aux_loss for module in model.modules() if isinstance(module, Experts))
