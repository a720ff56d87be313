"""What the peers share: small models of `transformers` in folders, files of tokens, and runs of gpt_train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("MESHWORK_PROGRAM_FOLDER", ROOT / "target/debug/examples")) / "gpt_train"
SEQ, BATCH, VOCAB, HIDDEN = 16, 4, 61, 32
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
DEEPSEEK = EXPERTS | dict(
    num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, first_k_dense_replace=1, n_shared_experts=2, n_group=2,
    topk_group=1, n_routed_experts=8,
)  # fmt: skip
# The families beside GPT-2: the class of the config, and what is on of what the family does in its own way.
KINDS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(head_dim=16, sliding_window=5)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=12)),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | dict(head_dim=8, num_experts=4, decoder_sparse_step=2)),
    "gemma": ("Gemma", dict(head_dim=16)),
    "gemma2": ("Gemma2", dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3Text", dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"])),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", dict(partial_rotary_factor=0.5, sliding_window=5, pad_token_id=0)),
    "gpt_neox": ("GPTNeoX", {}),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK | dict(q_lora_rank=None, v_head_dim=6, topk_method="group_limited_greedy")),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK | dict(q_lora_rank=20, v_head_dim=14)),
}


def has_experts(kind):
    return kind in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def config(kind, **more):
    ids = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    if kind == "gpt2":
        free = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2Config(**(ids | free | dict(n_positions=SEQ, n_embd=HIDDEN, n_layer=2, n_head=4) | more))
    sizes = dict(hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(max_position_embeddings=64)
    name, own = KINDS[kind]
    return getattr(transformers, f"{name}Config")(**(ids | sizes | own | more))


def make(config, folder, dtype=torch.float32, seed=1, **saving):
    """A random model in a folder."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data.normal_(std=0.1)
    model.save_pretrained(folder, **saving)
    return model


def load(folder, dtype=torch.float64):
    """The model of a folder, which must lack nothing."""
    # Grouped products have no f64, and other attentions leave out caps of scores.
    more = dict(experts_implementation="eager", attn_implementation="eager", output_loading_info=True)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more)
    for what, names in loading.items():
        assert not names, f"{folder}: {what}: {names}"
    return model.eval()


def tokens(folder, count=2000):
    path, ids = Path(folder) / "tokens.bin", np.random.default_rng(7).integers(0, VOCAB, count)
    ids.astype("<u2").tofile(path)
    return path, torch.from_numpy(ids)


def batch(ids, step):
    """Inputs and targets of a step without shuffling."""
    first = range(step * BATCH, (step + 1) * BATCH)
    rows = torch.stack([ids[at * SEQ : at * SEQ + SEQ + 1] for at in first])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, ids, step):
    inputs, targets = batch(ids, step)
    logits = model(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def flags(folder, data, steps, **settings):
    """The settings of a run that starts from a folder."""
    keys = {"model.init_from": folder, "data.path": data, "data.shuffle": "false", "model.seq_len": SEQ}
    keys |= {"training.global_batch_size": BATCH, "metrics.sample_tokens": 0, "validation.every": 0}
    keys |= {key.replace("__", "."): value for key, value in settings.items()}
    return ["--steps", str(steps)] + [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def run(args):
    """(exit code, standard error) of gpt_train."""
    done = subprocess.run([PROGRAM, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stderr


def train(folder, data, steps, metrics, **settings):
    """The lines of the metrics of a run that must succeed."""
    code, told = run([*flags(folder, data, steps, **settings), "--metrics", metrics])
    if code:
        sys.exit(f"error: gpt_train ended with {code}: {told}")
    return [json.loads(line) for line in Path(metrics).read_text().splitlines()]
