"""The six update rules in f64, on matrices as a model of `transformers` has them: what it stores as one (c_attn, the experts) is cut apart.

AdamW, SGD, Adafactor and Muon are those of `torch.optim`. LAMB is algorithm 2 of You et al. (2019); 8-bit Adam is that of Dettmers et al.
(2022), with the numbers of its code as their `create_dynamic_map` makes them.
"""

import torch
from torch.nn import Parameter

LR, BETAS, EPS, DECAY, BLOCK = 1e-2, (0.9, 0.95), 1e-6, 0.1, 16
SETTINGS = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY, "momentum": 0.9, "block_size": BLOCK}
# The keys that a rule reads beside lr and weight_decay.
READS = {
    "adamw": ["beta1", "beta2", "eps"],
    "lamb": ["beta1", "beta2", "eps"],
    "muon": ["beta1", "beta2", "eps"],
    "adam8bit": ["beta1", "beta2", "eps", "block_size"],
    "sgd": ["momentum"],
    "adafactor": [],
}


def settings(rule):
    return {f"optimizer__{key}": SETTINGS[key] for key in ["lr", "weight_decay", *READS[rule]]} | {"optimizer__name": rule}


def cut(name, value):
    """The matrices `[out, in]` or vectors of a parameter."""
    if "c_attn" in name:
        return [transposed(part) for part in value.chunk(3, -1)]
    if value.dim() == 3:  # experts, and gate and up in one
        parts = 2 if "gate_up" in name else 1
        return [part for expert in value for part in expert.chunk(parts)]
    return [transposed(value) if "c_proj" in name or "c_fc" in name else value]


def transposed(value):
    return value.mT if value.dim() == 2 else value


def is_hidden(name, part):
    outside = ("embed_tokens", "lm_head", "wte", "wpe", "gate.weight")
    return part.dim() == 2 and not any(word in name for word in outside)


class Rule:
    """`step()` updates a model in place from its gradients."""

    def __init__(self, rule, model):
        self.whole, self.parts = list(model.named_parameters()), []
        for name, value in self.whole:
            self.parts += [(name, Parameter(part)) for part in cut(name, value.data)]
        pick = lambda hidden, decays: [p for name, p in self.parts if is_hidden(name, p) in hidden and (p.dim() == 2) == decays]
        groups = lambda hidden: [dict(params=pick(hidden, decays), weight_decay=DECAY * decays) for decays in (True, False)]
        everything, hidden, rest = groups([True, False]), groups([True]), groups([False])
        adamw = lambda groups: torch.optim.AdamW(groups, LR, BETAS, EPS)
        self.optimizers = {
            "adamw": lambda: [adamw(everything)],
            "sgd": lambda: [torch.optim.SGD(everything, LR, momentum=0.9)],
            "adafactor": lambda: [torch.optim.Adafactor(everything, LR, -0.8, (1e-30, 1e-3), d=1.0)],
            "muon": lambda: [Muon(hidden[:1], LR, momentum=0.95, adjust_lr_fn="match_rms_adamw"), adamw(rest)],
            "lamb": lambda: [Lamb(everything, {})],
            "adam8bit": lambda: [Adam8bit(hidden[:1], {}), adamw(rest)],
        }[rule]()

    def step(self):
        grads = [part for name, value in self.whole for part in cut(name, value.grad)]
        for (_, part), grad in zip(self.parts, grads, strict=True):
            part.grad = grad
        for optimizer in self.optimizers:
            optimizer.step()


class Muon(torch.optim.Muon):
    """Whose products would round to bf16."""

    def step(self):
        rounded, torch.bfloat16 = torch.bfloat16, torch.float64
        try:
            super().step()
        finally:
            torch.bfloat16 = rounded


class Adam(torch.optim.Optimizer):
    """The moments, for rules that do something else with them."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m, v = state.get("m", torch.zeros_like(p)), state.get("v", torch.zeros_like(p))
                m, v = m.lerp(p.grad, 1 - BETAS[0]), v.lerp(p.grad.square(), 1 - BETAS[1])
                u = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
                self.update(p, u, group["weight_decay"])
                state["m"], state["v"] = self.kept(m, True), self.kept(v, False)


class Lamb(Adam):
    def update(self, p, u, decay):
        u = u + decay * p
        norms = p.norm(), u.norm()
        p -= LR * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * u

    def kept(self, moment, signed):
        return moment


def dynamic_tree(signed):
    numbers = [0.0, 1.0]
    for exponent in range(7):
        items = 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1
        boundaries = torch.linspace(0.1, 1, items, dtype=torch.float32)
        means = 10.0 ** (exponent - 6) * (boundaries[:-1] + boundaries[1:]) / 2
        numbers += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float64)


class Adam8bit(Adam):
    def update(self, p, u, decay):
        p.mul_(1 - LR * decay).sub_(LR * u)

    def kept(self, moment, signed):
        code, blocks = dynamic_tree(signed), moment.reshape(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        nearest = (blocks.div(largest.clamp(min=1e-300))[..., None] - code).abs().argmin(-1)
        return (code[nearest] * largest).reshape(moment.shape)
