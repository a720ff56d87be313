//! Adapters of layers that are whole on every rank.

use super::{tensors, trained};

/// Layers that are whole on every rank of tp have adapters too: those of latent vectors, in front of queries and of
/// keys.
#[test]
fn adapters_of_latent_attention_have_one_ranks_bits() {
    for (name, whole, queries) in
        [("deepseek_v2", "kv_a_proj_with_mqa", "q_proj"), ("deepseek_v3", "q_a_proj", "q_a_proj,q_b_proj")]
    {
        // All but experts, whose adapters have no dropout.
        let dense = ["mlp", "shared_experts"].map(|of| format!("{of}.gate_proj,{of}.up_proj,{of}.down_proj")).join(",");
        let targets = format!("{queries},kv_a_proj_with_mqa,kv_b_proj,o_proj,{dense}");
        let more = &format!("--set training.numerics=canonical --set lora.dropout=0.1 --set lora.targets={targets}");
        let (_one, one) = trained(name, "dp=1", more);
        let wanted = tensors(&one.join("adapter_model.safetensors"));
        assert!(wanted.keys().any(|tensor| tensor.contains(whole)), "{name}: {:?}", wanted.keys());
        assert!(wanted.iter().all(|(_, values)| values.iter().any(|&value| value != 0.0)), "{name}");
        for mesh in ["tp=2 --set parallelism.sequence_parallel=true", "dp=2,pp=2 --set parallelism.zero_stage=3"] {
            let (_cut, cut) = trained(name, mesh, more);
            assert_eq!(tensors(&cut.join("adapter_model.safetensors")), wanted, "{name} on {mesh}");
        }
    }
}
