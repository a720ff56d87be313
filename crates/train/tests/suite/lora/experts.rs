//! Adapters of the matrices of experts: an A and a B of each, shared out with the experts.

use super::{Recorded, from_adapter, line, parse, run, tensors, trained};

/// Megatron-Bridge #5634, #5635 and #5229: adapters of experts computed other numbers, or were summed over the wrong
/// ranks, where experts are cut over other axes than the layers around them.
#[test]
fn adapters_of_experts_have_one_ranks_bits() {
    for (name, more, expert) in [
        ("mixtral", "", "block_sparse_moe.experts.3.w2"),
        ("qwen3_moe", "--set lora.rslora=true", "mlp.experts.3.up_proj"),
        ("qwen3_moe", "--set lora.targets=gate_proj", "mlp.experts.0.gate_proj"),
        ("deepseek_v2", "--set lora.targets=down_proj,up_proj,q_proj", "mlp.experts.1.down_proj"),
        ("deepseek_v3", "--set lora.quantization=nf4 --set lora.block_size=2", "mlp.experts.4.gate_proj"),
    ] {
        let method = "--set parallelism.context_parallel_method=all_gather"; // one rank's in canonical numerics
        let more = format!("--set training.numerics=canonical {method} {more}");
        let (_one, one) = trained(name, "dp=1", &more);
        let wanted = tensors(&one.join("adapter_model.safetensors"));
        for matrix in ["lora_A", "lora_B"] {
            let tensor = wanted.iter().find(|(name, _)| name.contains(&format!("{expert}.{matrix}")));
            let (name, values) = tensor.unwrap_or_else(|| panic!("{expert}: {:?}", wanted.keys()));
            assert!(values.iter().any(|&value| value != 0.0), "{name} is not trained");
        }
        for mesh in [
            "dp=2,ep=2",
            "dp=2,tp=2,ep=2 --set parallelism.sequence_parallel=true",
            "tp=2 --set parallelism.expert_tensor_parallel=2",
            "dp=2,ep=2,pp=2 --set parallelism.zero_stage=3",
            "cp=2,ep=2",
        ] {
            let (_cut, cut) = trained(name, mesh, &more);
            assert_eq!(tensors(&cut.join("adapter_model.safetensors")), wanted, "{name} {more} on {mesh}");
        }
    }
}

/// A checkpoint has A and B of all experts by name and slice.
#[test]
fn a_run_goes_on_on_a_mesh_that_shares_out_experts_otherwise() {
    let (folder, data) = (tempfile::tempdir().unwrap(), Recorded::of("qwen3_moe").data());
    let steps = |steps: usize, more: &str| {
        let more = format!("--set training.numerics=canonical --set training.steps={steps} {more}");
        run(&from_adapter("qwen3_moe", &more), &data)
    };
    let (whole, dir) = (steps(4, ""), format!("--set checkpoint.dir={}", folder.path().display()));
    assert_eq!(steps(2, &format!("{dir} --mesh dp=2,ep=2")), whole[..2]);
    let dir = format!("{dir} --set checkpoint.resume=true");
    let cut = "--mesh tp=2,pp=2 --set parallelism.expert_tensor_parallel=2";
    assert_eq!(steps(3, &format!("{dir} {cut}")), whole[2..3]);
    assert_eq!(steps(4, &format!("{dir} --mesh dp=2,ep=2 --set parallelism.zero_stage=3")), whole[3..]);
}

/// `peft` gives rsLoRA of experts another factor: gate and up are one matrix there, of twice the rank. It is written as
/// the alpha that gives the same factor by the rank alone, and read with it.
#[test]
fn rslora_of_experts_is_written_by_the_factor_that_peft_has() {
    let alpha = |name: &str| {
        let (_folder, out) = trained(name, "dp=1", "--set lora.rslora=true --set lora.alpha=6");
        let text = std::fs::read_to_string(out.join("adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let read = meshwork_models::huggingface::Lora::open(&out).unwrap().0;
        (config["use_rslora"].as_bool().unwrap(), config["lora_alpha"].as_f64().unwrap(), read.scale())
    };
    let (factor, rank) = (6.0 / 2f64.sqrt(), 2.0);
    for (name, wanted) in [("llama_scaled", (true, 6.0)), ("qwen3_moe", (false, factor * rank))] {
        let (rslora, written, scale) = alpha(name);
        assert_eq!((rslora, written), wanted, "{name}");
        assert!((scale - factor).abs() < 1e-12, "{name}: {scale}");
    }
}

#[test]
fn what_experts_have_no_adapter_for_is_refused() {
    let all = "use some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, with commas, or all-linear";
    for (name, more, told) in [
        (
            "qwen3_moe",
            "--set lora.targets=experts.0.gate_proj",
            &*format!(
                "layers.1.mlp.experts.0.gate_proj is named and layers.1.mlp.experts.1.gate_proj is not, and all experts \
                 of a layer have an adapter or none; {all}"
            ),
        ),
        (
            "mixtral",
            "--set lora.targets=q_proj,w1 --set lora.dropout=0.1",
            "layers.0.block_sparse_moe.experts.0.w1 is of an expert, to which tokens come in no order that dropout could \
             draw by; use lora.dropout = 0, or targets that name no experts",
        ),
        ("mixtral", "--set lora.rank=17", "use a rank of 1 to 16"),
        ("qwen3_moe", "--set lora.targets=gate", "gate names no linear layer of the blocks"),
    ] {
        let refused = parse(&line(name, &format!("--set lora.rank=2 {more}"))).unwrap_err();
        assert!(refused.contains(told), "{name} {more}: {refused}");
    }
    // What is suggested is valid.
    for target in ["q_proj", "gate_proj", "up_proj", "down_proj"] {
        parse(&line("qwen3_moe", &format!("--set lora.rank=2 --set lora.targets={target}"))).unwrap();
    }
}
