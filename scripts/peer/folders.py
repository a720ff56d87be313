"""Folders that `transformers` writes, in every variant that loads: the loss of each is that of `transformers`, and the export at a rate of 0 has its
weights, bit by bit.

    scripts/peer/folders.py
"""

import sys
import tempfile

import torch

import program

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5], "long_factor": [1.25, 3.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
F16, BF16 = torch.float16, torch.bfloat16
SHARDS = {"max_shard_size": "20KB"}
# (name, kind, settings of the config, type, saving)
VARIANTS = [
    ("gpt2", "gpt2", {}, torch.float32, {}),
    ("gpt2 untied", "gpt2", {"tie_word_embeddings": False}, torch.float32, {}),
    ("gpt2 bf16 in shards", "gpt2", {}, BF16, SHARDS),
    ("gpt2 f16, wider", "gpt2", {"n_inner": 96}, F16, {}),
    ("gpt2 three layers, eight heads", "gpt2", {"n_layer": 3, "n_head": 8}, torch.float32, SHARDS),
    ("llama", "llama", {}, torch.float32, {}),
    ("llama tied", "llama", {"tie_word_embeddings": True}, torch.float32, {}),
    ("llama tied f16 in shards", "llama", {"tie_word_embeddings": True}, F16, SHARDS),
    ("llama bf16", "llama", {}, BF16, {}),
    ("llama one head of keys", "llama", {"num_key_value_heads": 1}, torch.float32, {}),
    ("llama heads of its own", "llama", {"num_key_value_heads": 4}, torch.float32, {}),
    ("llama theta", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, torch.float32, {}),
    ("llama 3.1", "llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}, torch.float32, {}),
    ("llama epsilon", "llama", {"rms_norm_eps": 1e-3}, torch.float32, {}),
    ("mixtral", "mixtral", {}, torch.float32, {}),
    ("mixtral bf16 in shards", "mixtral", {}, BF16, SHARDS),
    ("mixtral tied, one of eight", "mixtral", {"tie_word_embeddings": True, "num_local_experts": 8, "num_experts_per_tok": 1}, torch.float32, {}),
    ("mixtral window", "mixtral", {"sliding_window": 8}, torch.float32, {}),
    ("llama linear", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, torch.float32, {}),
    ("llama yarn", "llama", {"rope_parameters": YARN}, torch.float32, {}),
    ("llama dynamic", "llama", {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, torch.float32, {}),
    ("llama biases", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}, torch.float32, {}),
    ("phi3 longrope", "phi3", {"original_max_position_embeddings": 8, "rope_parameters": LONG}, torch.float32, {}),
    ("phi3 longrope, shorter", "phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONG}, torch.float32, {}),
    ("qwen3_moe behind a dense layer", "qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0]}, torch.float32, {}),
    ("deepseek_v2 greedy, yarn", "deepseek_v2", {"topk_method": "greedy", "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}, torch.float32, {}),
    ("deepseek_v3 in halves", "deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}, torch.float32, {}),
    ("deepseek_v3 bf16 in shards", "deepseek_v3", {}, BF16, SHARDS),
]
VARIANTS += [(kind, kind, {}, torch.float32, {}) for kind in program.KINDS if kind not in ("llama", "mixtral")]
# What is refused, with the words of the error.
REFUSED = [
    ("llama dropout", "llama", {"attention_dropout": 0.1}, "attention_dropout"),
    ("llama gelu", "llama", {"hidden_act": "gelu"}, "gelu"),
    ("gpt2 relu", "gpt2", {"activation_function": "relu"}, "relu"),
    ("mixtral jitter", "mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("deepseek_v2 weights that add up to 1", "deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
]
MESHES = [{}, {"parallelism__tp": 2}, {"parallelism__tp": 4, "parallelism__dp": 2}, {"parallelism__pp": 2, "training__numerics": "canonical"}]
STILL = {"optimizer__name": "sgd", "optimizer__lr": 0, "moe__aux_loss_coeff": 0, "moe__z_loss_coeff": 0, "moe__bias_update_rate": 0}


def check(root, at, data, ids):
    """What is wrong with a variant."""
    name, kind, settings, dtype, saving = VARIANTS[at]
    folder, out = f"{root}/folder-{at}", f"{root}/out-{at}"
    program.make(program.config(kind, **settings), folder, dtype, **saving)
    model = program.load(folder)
    wanted = program.loss_of(model, ids, 0).item()
    still = {key: value for key, value in STILL.items() if program.has_experts(kind) or not key.startswith("moe")}
    for number, mesh in enumerate(MESHES):
        more = mesh | still | ({"checkpoint__dir": f"{out}-run", "checkpoint__export": out} if number == 0 else {})
        lines = program.train(folder, data, 1, f"{root}/metrics-{at}-{number}", **more)
        loss = next(line["loss"] for line in lines if line["event"] == "step")
        if not abs(loss - wanted) <= 2e-5 * wanted:
            return f"a loss of {loss} on {mesh}, {wanted} in transformers"
    exported, kept = program.load(out).state_dict(), model.state_dict()
    if exported.keys() != kept.keys():
        return f"exported {exported.keys() ^ kept.keys()}"
    differ = [key for key, value in kept.items() if not torch.equal(value, exported[key])]
    return f"exported with other {differ}" if differ else None


def main():
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        data, ids = program.tokens(root)
        for at, (name, *_) in enumerate(VARIANTS):
            wrong = check(root, at, data, ids)
            failed += wrong is not None
            print(f"FAILED: {name}: {wrong}" if wrong else f"ok: {name}", flush=True)
        for at, (name, kind, settings, words) in enumerate(REFUSED):
            folder = f"{root}/refused-{at}"
            program.make(program.config(kind, **settings), folder)
            code, told = program.run(program.flags(folder, data, 1))
            right = code == 2 and words in told
            failed += not right
            print(f"ok: {name} is refused" if right else f"FAILED: {name}: {code}, {told}", flush=True)
    sys.exit(f"error: {failed} folders" if failed else 0)


if __name__ == "__main__":
    main()
