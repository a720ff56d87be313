//! Folders that are damaged, incomplete or of a model that is not supported: each is refused with everything that is
//! wrong, and nothing panics.

use crate::{copy, edit, edit_header, refused};
use meshwork_models::experts::{ExpertsConfig, MoeConfig, RouterKind};
use meshwork_models::huggingface::{Dtype, Lora, Pretrained, PretrainedAdapter, not_of_mixtral};
use meshwork_tensor::param::LocalSlice;
use meshwork_testkit::Rng;
use serde_json::json;
use std::fs;

#[test]
fn settings_that_are_not_supported_are_listed_together() {
    let llama = copy("llama_scaled");
    edit(&llama.path().join("config.json"), |config| {
        config["hidden_act"] = json!("gelu");
        config["sliding_window"] = json!(4096);
        config["attention_dropout"] = json!(0.5);
        config["rope_parameters"]["rope_type"] = json!("proportional");
        config["num_hidden_layers"] = json!("two");
    });
    assert_eq!(
        refused(&llama),
        "config.json: hidden_act is \"gelu\": supported is \"silu\"; attention_dropout is 0.5: supported is 0; \
         rope_parameters: rope_type is \"proportional\": supported is \"default\", \"linear\", \"dynamic\", \"llama3\", \
         \"yarn\", \"longrope\"; num_hidden_layers is \"two\": it must be a whole number above 0; sliding_window is 4096: supported is none"
    );
    let gpt2 = copy("gpt2");
    edit(&gpt2.path().join("config.json"), |config| {
        config["activation_function"] = json!("relu");
        config["attn_pdrop"] = json!(0.5);
        config.as_object_mut().unwrap().remove("n_embd");
    });
    assert_eq!(
        refused(&gpt2),
        "config.json: n_embd is missing; activation_function is \"relu\": supported is \"gelu_new\" or \"gelu_pytorch_tanh\" or \
         \"gelu_fast\"; attn_pdrop is 0.5 and resid_pdrop 0: supported is one probability for all"
    );
    edit(&gpt2.path().join("config.json"), |config| config["architectures"] = json!(["MambaForCausalLM"]));
    assert_eq!(
        refused(&gpt2),
        "config.json: architectures names \"MambaForCausalLM\": GPT2LMHeadModel, LlamaForCausalLM, \
         MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, \
         Qwen3ForCausalLM, Qwen3MoeForCausalLM, GemmaForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, Olmo2ForCausalLM, Phi3ForCausalLM, \
         GPTNeoXForCausalLM, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM are supported"
    );
}

#[test]
fn a_mixtral_with_more_than_experts_in_each_layer_is_refused() {
    let mixtral = copy("mixtral");
    edit(&mixtral.path().join("config.json"), |config| {
        config["sliding_window"] = json!(0);
        config["router_jitter_noise"] = json!(0.1);
        config["num_experts_per_tok"] = json!(5);
    });
    assert_eq!(
        refused(&mixtral),
        "config.json: router_jitter_noise is 0.1: supported is 0; sliding_window is 0: it must be a whole number above 0; \
         num_experts_per_tok is 5: it must be at most num_local_experts, 4"
    );
    let lost = copy("mixtral");
    edit_header(&lost.path().join("model.safetensors"), |header| {
        let header = header.as_object_mut().unwrap();
        let moved = header.remove("model.layers.1.block_sparse_moe.experts.3.w2.weight").unwrap();
        header.insert("model.layers.1.block_sparse_moe.experts.4.w2.weight".to_owned(), moved);
    });
    assert_eq!(
        refused(&lost),
        "model.safetensors: model.layers.1.block_sparse_moe.experts.3.w2.weight [16, 20] is missing; the model has no tensor \
         model.layers.1.block_sparse_moe.experts.4.w2.weight"
    );
    // What training alone reads is no part of the model.
    let moe = MoeConfig { aux_loss_coeff: 0.01, z_loss_coeff: 0.001, jitter: 0.1, ..MoeConfig::default() };
    let of = ExpertsConfig {
        moe,
        every_n_layers: 1,
        first_dense_layers: 0,
        num_shared_experts: 0,
        expert_hidden_size: 8,
        over_tp: true,
    };
    assert_eq!(not_of_mixtral(&of), Vec::<String>::new());
    let moe = MoeConfig { router: RouterKind::Switch, capacity_factor: 1.25, ..moe };
    let other = ExpertsConfig { moe, every_n_layers: 2, first_dense_layers: 0, num_shared_experts: 1, ..of };
    assert_eq!(
        not_of_mixtral(&other),
        ["router switch", "a capacity, of factor 1.25", "experts in one of 2 layers", "1 shared experts"]
    );
}

#[test]
fn missing_extra_and_misshapen_tensors_are_listed_together() {
    let folder = copy("gpt2");
    edit_header(&folder.path().join("model.safetensors"), |header| {
        let header = header.as_object_mut().unwrap();
        let moved = header.remove("transformer.h.1.ln_2.bias").unwrap();
        header.insert("transformer.h.1.ln_3.bias".to_owned(), moved);
        header["transformer.h.0.mlp.c_fc.weight"]["shape"] = json!([20, 16]);
    });
    assert_eq!(
        refused(&folder),
        "model.safetensors: transformer.h.0.mlp.c_fc.weight is [20, 16], and the model's is [16, 20]; transformer.h.1.ln_2.bias \
         [16] is missing; the model has no tensor transformer.h.1.ln_3.bias"
    );
    let integers = copy("gpt2");
    edit_header(&integers.path().join("model.safetensors"), |header| {
        header["transformer.ln_f.weight"]["dtype"] = json!("I32");
    });
    assert!(
        refused(&integers)
            .contains("transformer.ln_f.weight is of the type I32, which is not supported: F32, BF16 and F16 are")
    );
}

/// A tensor of doubles was read as numbers of 4 bytes: other numbers, without a word.
#[test]
fn tensors_that_an_adapter_does_not_have_are_listed_together() {
    let of = *Pretrained::open(copy("llama_scaled").path()).unwrap().architecture();
    let adapter = copy("../lora/llama_scaled");
    let lora = Lora::open(adapter.path()).unwrap().0;
    assert!(PretrainedAdapter::open(adapter.path(), &of, &lora).is_ok());
    let in_layer = |name: &str| format!("base_model.model.model.layers.0.{name}.weight");
    edit_header(&adapter.path().join("adapter_model.safetensors"), |header| {
        let header = header.as_object_mut().unwrap();
        let moved = header.remove(&in_layer("self_attn.v_proj.lora_A")).unwrap();
        header.insert(in_layer("self_attn.k_proj.lora_A"), moved);
        header[&in_layer("self_attn.q_proj.lora_A")]["shape"] = json!([16, 4]);
        header[&in_layer("mlp.up_proj.lora_B")]["dtype"] = json!("F64");
    });
    let told = PretrainedAdapter::open(adapter.path(), &of, &lora).map(drop).unwrap_err().to_string();
    for problem in [
        format!("{} [4, 16] is missing", in_layer("self_attn.v_proj.lora_A")),
        format!("no target has a tensor {}", in_layer("self_attn.k_proj.lora_A")),
        format!("{} is [16, 4], and that of this model and rank is [4, 16]", in_layer("self_attn.q_proj.lora_A")),
        format!("{} is of the type F64, which is not supported", in_layer("mlp.up_proj.lora_B")),
    ] {
        assert!(told.contains(&problem), "{told}");
    }
}

/// The folder of GPT-2 that most people have is one without the prefix: the same weights, and the same hash of them.
#[test]
fn a_folder_without_the_prefix_is_the_same_model() {
    let (with, without) = (copy("gpt2"), copy("gpt2"));
    edit_header(&without.path().join("model.safetensors"), |header| {
        let entries = std::mem::take(header.as_object_mut().unwrap());
        let bare = |name: String| name.strip_prefix("transformer.").map_or(name.clone(), str::to_owned);
        *header = entries.into_iter().map(|(name, entry)| (bare(name), entry)).collect();
    });
    let [with, without] = [with, without].map(|folder| (Pretrained::open(folder.path()).unwrap(), folder));
    assert_eq!(with.0.hash().unwrap(), without.0.hash().unwrap());
    for spec in with.0.architecture().parameters().unwrap() {
        let slice = LocalSlice::whole(spec.dims);
        assert_eq!(with.0.read(&spec, &slice).unwrap(), without.0.read(&spec, &slice).unwrap(), "{}", spec.name);
    }
}

/// The head of a model that is not tied is one of its weights.
#[test]
fn the_hash_of_a_folder_is_of_the_head_too() {
    let folder = copy("llama_scaled");
    let hash = || Pretrained::open(folder.path()).unwrap().hash().unwrap();
    let (before, path) = (hash(), folder.path().join("model.safetensors"));
    edit_header(&path, |header| {
        header["lm_head.weight"]["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"].clone();
    });
    assert_ne!(hash(), before);
}

#[test]
fn the_type_of_a_folder_is_that_of_all_its_weights() {
    let folder = copy("gpt2");
    assert_eq!(Pretrained::open(folder.path()).unwrap().dtype(), Some(Dtype::F32));
    edit_header(&folder.path().join("model.safetensors"), |header| {
        let norm = &mut header["transformer.ln_f.weight"];
        let [from, to] = [0, 1].map(|at| norm["data_offsets"][at].as_u64().unwrap());
        norm["dtype"] = json!("F16");
        norm["data_offsets"] = json!([from, (from + to) / 2]);
    });
    assert_eq!(Pretrained::open(folder.path()).unwrap().dtype(), None);
}

#[test]
fn files_that_lie_about_themselves_are_refused() {
    let truncated = copy("gpt2");
    let path = truncated.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    assert!(refused(&truncated).contains("lies in bytes"), "{}", refused(&truncated));
    fs::write(&path, [&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat()).unwrap();
    assert!(refused(&truncated).contains("its header has 18446744073709551615 bytes, in a file of"));

    let shards = copy("llama_tied_f16_shards");
    edit(&shards.path().join("model.safetensors.index.json"), |index| {
        index["weight_map"]["model.norm.weight"] = json!("../../etc/passwd");
    });
    assert!(refused(&shards).contains("is not the name of a file beside it"), "{}", refused(&shards));
    let lost = copy("llama_tied_f16_shards");
    fs::remove_file(lost.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert!(
        refused(&lost).ends_with("of its 3 shards one is missing: model-00002-of-00003.safetensors"),
        "{}",
        refused(&lost)
    );
    fs::remove_file(lost.path().join("model-00001-of-00003.safetensors")).unwrap();
    assert!(refused(&lost).contains("some are missing: model-00001-of-00003.safetensors; model-00002"));
}

/// Random damage: an error or, where it hits numbers, a model; never a panic.
#[test]
fn random_damage_does_not_panic() {
    let mut rng = Rng::new(11);
    for _ in 0..300 {
        let folder = copy("gpt2");
        let name = ["config.json", "model.safetensors"][rng.below(2)];
        let path = folder.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        for _ in 0..=rng.below(4) {
            let at = rng.below(bytes.len().min(4000));
            bytes[at] = rng.below(256) as u8;
        }
        bytes.truncate(bytes.len() - rng.below(2) * rng.below(bytes.len()));
        fs::write(&path, bytes).unwrap();
        if let Ok(read) = Pretrained::open(folder.path()) {
            for spec in read.architecture().parameters().unwrap_or_default() {
                let slice = LocalSlice::whole(spec.dims);
                _ = read.read(&spec, &slice);
            }
        }
    }
}
