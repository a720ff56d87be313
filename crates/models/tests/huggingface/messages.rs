//! What a person is told who gives a folder that is not what it seems: what it is, and what would be valid.

use crate::{copy, edit, edit_header, refused};
use meshwork_models::huggingface::{Lora, Pretrained, tokenizer_files};
use serde_json::{Value, json};
use std::fs;

const POINTER: &str =
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 5312\n";

#[test]
fn a_git_lfs_pointer_is_named_in_every_file() {
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        let folder = copy("gpt2");
        fs::write(folder.path().join(name), POINTER).unwrap();
        let told = refused(&folder);
        assert!(told.contains(&format!("{name}: is a Git LFS pointer")) && told.contains("git lfs pull"), "{told}");
    }
    let shards = copy("llama_tied_f16_shards");
    for shard in ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"] {
        fs::write(shards.path().join(shard), POINTER).unwrap();
    }
    let told = refused(&shards);
    assert_eq!(told.matches("is a Git LFS pointer").count(), 2, "all at once: {told}");
    fs::write(shards.path().join("tokenizer.json"), POINTER).unwrap();
    let told = tokenizer_files(shards.path()).unwrap_err().to_string();
    assert!(told.contains("tokenizer.json: is a Git LFS pointer"), "{told}");
}

#[test]
fn quantized_folders_are_refused_with_their_method() {
    for (config, told) in [
        (
            json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            "quantization_config names the method \"fp8\": ",
        ),
        (json!({"quant_method": "gptq", "bits": 4}), "quantization_config names the method \"gptq\" of 4 bits: "),
        (json!({"quant_method": "awq", "bits": 4}), "quantization_config names the method \"awq\" of 4 bits: "),
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "the method \"bitsandbytes\" of 4 bits: "),
        (json!({"load_in_8bit": true}), "the method \"unknown\" of 8 bits: "),
        (
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
            "the method \"compressed-tensors\": ",
        ),
    ] {
        let folder = copy("llama_scaled");
        edit(&folder.path().join("config.json"), |all| all["quantization_config"] = config.clone());
        let refused = refused(&folder);
        assert!(refused.contains(told) && refused.contains("use the folder in f32, bf16 or f16"), "{refused}");
    }
    // Of a folder whose config.json is silent, the types of its tensors say it.
    let silent = copy("llama_scaled");
    edit_header(&silent.path().join("model.safetensors"), |header| {
        header["model.norm.weight"]["dtype"] = json!("F8_E4M3");
    });
    assert!(refused(&silent).contains("model.norm.weight is of the type F8_E4M3"), "{}", refused(&silent));
}

#[test]
fn other_forms_of_weights_are_named() {
    let with = |name: &str, content: &[u8]| {
        let folder = copy("gpt2");
        fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        fs::write(folder.path().join(name), content).unwrap();
        refused(&folder)
    };
    for (name, told) in [
        ("pytorch_model.bin", "has its weights in pytorch_model.bin, in the form of PyTorch, and no model.safetensors"),
        ("pytorch_model.bin.index.json", "has its weights in pytorch_model.bin.index.json"),
        ("model.q4.gguf", "has its weights in model.q4.gguf, a GGUF file of llama.cpp"),
        ("tf_model.h5", "has its weights in tf_model.h5"),
        (
            "model-00001-of-00002.safetensors",
            "neither model.safetensors nor model.safetensors.index.json, which names the shards",
        ),
        ("notes.txt", "has neither model.safetensors nor model.safetensors.index.json with its shards"),
    ] {
        let refused = with(name, b"");
        assert!(refused.contains(told), "{name}: {refused}");
    }
    assert!(with("pytorch_model.bin", b"").contains("`save_pretrained` it"));
    for (content, told) in [
        (&b"PK\x03\x04more"[..], "model.safetensors: is a file of PyTorch, not of safetensors"),
        (b"\x80\x02}q\x00more", "model.safetensors: is a pickle"),
        (b"GGUF\x03\0\0\0", "model.safetensors: is a GGUF file"),
        (b"<!DOCTYPE html>", "model.safetensors: is a web page"),
        (b"", "model.safetensors: has 0 bytes: it is cut short"),
        (b"1234", "model.safetensors: has 4 bytes: it is cut short"),
        (b"\xff\x01\0\0\0\0\0\0{", "its header has 511 bytes, in a file of 9: it is cut short"),
    ] {
        let refused = with("model.safetensors", content);
        assert!(refused.contains(told), "{refused}");
    }
    let cut = copy("gpt2");
    let path = cut.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    assert!(refused(&cut).ends_with("the file is cut short"), "{}", refused(&cut));
}

#[test]
fn what_is_no_folder_of_a_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let told = |name: &str, content: &str| {
        _ = fs::remove_dir_all(folder.path());
        fs::create_dir_all(folder.path()).unwrap();
        fs::write(folder.path().join(name), content).unwrap();
        refused(&folder)
    };
    let adapter = json!({"peft_type": "LORA", "base_model_name_or_path": "some/base"}).to_string();
    let lora = told("adapter_config.json", &adapter);
    assert!(lora.contains("adapter_config.json: a LORA adapter, whose weights are changes of some/base"), "{lora}");
    assert!(lora.contains("merge_and_unload"), "{lora}");
    assert!(told("model.gguf", "").contains("has model.gguf, a GGUF file of llama.cpp, and no config.json"));
    assert!(told("params.json", "{}").contains("the original form of a Llama"));
    assert!(told("step-00000010", "").contains("a folder of checkpoints"));
    assert!(told("notes.txt", "").ends_with("has no config.json"));
    let file = folder.path().join("notes.txt");
    let told = Pretrained::open(&file).map(drop).unwrap_err().to_string();
    assert!(told.contains("is a file, not a folder"), "{told}");
    let hub = Pretrained::open("openai-community/gpt2".as_ref()).map(drop).unwrap_err().to_string();
    assert!(hub.contains("there is no such folder") && hub.contains("hf download"), "{hub}");
    // transformers loads another model from there, and the adapter onto it.
    let both = copy("gpt2");
    fs::write(both.path().join("adapter_config.json"), &adapter).unwrap();
    assert!(refused(&both).contains("a LORA adapter"), "{}", refused(&both));
}

/// With the defaults of PEFT for what is not said.
#[test]
fn the_settings_of_an_adapter_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let open = |config: Value| {
        fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        Lora::open(folder.path()).unwrap().0
    };
    let lora = |rank, alpha, rslora, dropout, targets: &[&str]| {
        let targets = targets.iter().map(|&target| target.to_owned()).collect();
        Lora { rank, alpha, rslora, dropout, targets }
    };
    let least = json!({"peft_type": "LORA", "target_modules": "all-linear"});
    assert_eq!(open(least), lora(8, 8.0, false, 0.0, &["all-linear"]));
    let all = json!({
        "peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": true, "lora_dropout": 0.25,
        "target_modules": ["q_proj", "mlp.up_proj"], "target_parameters": ["mlp.down_proj.weight"],
    });
    assert_eq!(open(all), lora(4, 6.0, true, 0.25, &["q_proj", "mlp.up_proj", "mlp.down_proj"]));
}

#[test]
fn an_adapter_with_settings_of_another_kind_is_refused_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let open = |more: &[(&str, Value)]| {
        let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]});
        more.iter().for_each(|(key, value)| config[*key] = value.clone());
        fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        Lora::open(folder.path()).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(open(&[("use_dora", json!(false)), ("rank_pattern", json!({}))]), Ok(()));
    let told = open(&[("use_dora", json!(true))]).unwrap_err();
    assert!(told.contains("adapter_config.json") && told.contains("use_dora is not supported: true"), "{told}");
    let told = open(&[("use_dora", json!(true)), ("modules_to_save", json!(["lm_head"]))]).unwrap_err();
    assert!(told.contains("use_dora is not") && told.contains("modules_to_save is not"), "all at once: {told}");
}

#[test]
fn settings_that_change_the_numbers_are_refused() {
    let refused_with = |name: &str, change: &dyn Fn(&mut Value)| {
        let folder = copy(name);
        edit(&folder.path().join("config.json"), change);
        Pretrained::open(folder.path()).map(drop).map_err(|error| error.to_string())
    };
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48});
    type Change = Box<dyn Fn(&mut Value)>;
    let set = |key: &'static str, value: Value| -> Change { Box::new(move |config| config[key] = value.clone()) };
    let cases: Vec<(&str, Change, &str)> = vec![
        (
            "llama_scaled",
            set("model_type", json!("mistral")),
            "model_type is \"mistral\", and that of the architectures entry",
        ),
        ("llama_scaled", set("attention_multiplier", json!(0.01)), "attention_multiplier is 0.01"),
        ("llama_scaled", set("residual_multiplier", json!(0.5)), "residual_multiplier is 0.5: supported is 1"),
        ("llama_scaled", set("final_logit_softcapping", json!(30.0)), "final_logit_softcapping is 30.0"),
        ("llama_scaled", set("qk_norm", json!(true)), "qk_norm is true"),
        ("llama_scaled", set("clip_qkv", json!(8.0)), "clip_qkv is 8.0"),
        ("llama_scaled", set("partial_rotary_factor", json!(0.5)), "partial_rotary_factor is 0.5"),
        ("llama_scaled", set("layer_types", json!(["full_attention", "sliding_attention"])), "layer_types is "),
        ("llama_scaled", set("mlp_bias", json!(true)), "layers.0.mlp.gate_proj.bias [20] is missing"),
        ("llama_scaled", set("head_dim", json!(8)), "q_proj.weight is [16, 16], and the model's is [32, 16]"),
        (
            "llama_scaled",
            set("rope_parameters", json!("llama3")),
            "rope_parameters is \"llama3\": it must be an object",
        ),
        ("llama_scaled", set("rope_parameters", json!({"factor": 8.0})), "it has a factor and no rope_type"),
        ("llama_scaled", set("rope_parameters", json!({"rope_type": 3})), "rope_type is \"3\""),
        ("llama_scaled", set("rope_parameters", json!({"rope_type": "llama3"})), "factor is missing"),
        (
            "llama_scaled",
            set("rope_parameters", json!({"full_attention": {"rope_type": "default"}})),
            "for each kind of layer",
        ),
        ("llama_scaled", set("rope_parameters", json!({"rope_type": "default", "type": "linear"})), "keep one of them"),
        ("llama_scaled", set("rope_scaling", scaling), "rope_parameters and rope_scaling say different things"),
        ("gpt2", set("scale_attn_by_inverse_layer_idx", json!(true)), "scale_attn_by_inverse_layer_idx is true"),
        ("gpt2", set("scale_attn_weights", json!(false)), "scale_attn_weights is false"),
        ("gpt2", set("pruned_heads", json!({"0": [1]})), "pruned_heads is {\"0\":[1]}"),
        ("gpt2", set("layer_norm_epsilon", json!(1e-6)), "layer_norm_epsilon is 1e-6: supported is 0.00001"),
        (
            "mixtral",
            set("sliding_window", json!("all")),
            "sliding_window is \"all\": it must be a whole number above 0",
        ),
    ];
    for (name, change, told) in cases {
        let refused = refused_with(name, &change).expect_err(told);
        assert!(refused.contains(told), "{refused}");
    }
    // What changes nothing is accepted, in either spelling of a number, and what is not known.
    let neutral = |config: &mut Value| {
        config["pruned_heads"] = json!({});
        config["residual_multiplier"] = json!(1);
        config["partial_rotary_factor"] = json!(1.0);
        config["attention_dropout"] = json!(0);
        config["layer_types"] = json!(["full_attention", "full_attention"]);
        config["some_tag_of_ours"] = json!({"a": [1, 2]});
        config["sliding_window"] = Value::Null;
    };
    refused_with("llama_scaled", &neutral).unwrap();
    // All that is wrong with a folder is told at once, its files too.
    let folder = copy("llama_tied_f16_shards");
    edit(&folder.path().join("config.json"), |config| config["hidden_act"] = json!("gelu"));
    fs::remove_file(folder.path().join("model-00002-of-00003.safetensors")).unwrap();
    let both = refused(&folder);
    assert!(both.contains("hidden_act is \"gelu\"") && both.contains("one is missing: model-00002"), "{both}");
}

/// A single file is read before an index, as transformers does; other programs read the index first, so that both with
/// weights of their own are refused.
#[test]
fn two_sets_of_weights_in_a_folder_are_refused() {
    let both = copy("llama_tied_f16_shards");
    let shard = |number: usize| both.path().join(format!("model-{number:05}-of-00003.safetensors"));
    fs::write(both.path().join("model.safetensors"), fs::read(copy("gpt2").path().join("model.safetensors")).unwrap())
        .unwrap();
    let told = refused(&both);
    assert!(told.contains("lies beside model-00001-of-00003.safetensors and other shards"), "{told}");
    assert!(told.contains("remove model.safetensors, or model.safetensors.index.json with its shards"), "{told}");

    // A stale index whose shards are gone names nothing that anyone could read.
    let gpt2 = copy("gpt2");
    let index = both.path().join("model.safetensors.index.json");
    fs::copy(&index, gpt2.path().join("model.safetensors.index.json")).unwrap();
    assert!(Pretrained::open(gpt2.path()).is_ok());
    fs::copy(shard(2), gpt2.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert!(refused(&gpt2).contains("two sets of weights"), "one shard of another model is enough");
    // An index of the one file says the same as none.
    fs::remove_file(gpt2.path().join("model-00002-of-00003.safetensors")).unwrap();
    edit(&gpt2.path().join("model.safetensors.index.json"), |index| {
        index["weight_map"] = json!({"transformer.wte.weight": "model.safetensors"});
    });
    assert!(Pretrained::open(gpt2.path()).is_ok());
}

/// Another program may have left the key: `transformers` does not read it there, and the one fused matrix has no
/// groups.
#[test]
fn a_gpt_neox_has_no_groups_of_heads() {
    let folder = copy("gpt_neox");
    edit(&folder.path().join("config.json"), |config| config["num_key_value_heads"] = json!(2));
    assert_eq!(Pretrained::open(folder.path()).unwrap().architecture().decoder.num_kv_heads, 4);
}

/// A family of its own is refused with the families that are supported and the settings that none has; one that is
/// supported, with each setting that it has in another form.
#[test]
fn families_are_refused_by_name_and_by_setting() {
    let told = |name: &str, change: &dyn Fn(&mut Value)| {
        let folder = copy(name);
        edit(&folder.path().join("config.json"), change);
        refused(&folder)
    };
    let unknown = told("qwen3", &|config| {
        config["architectures"] = json!(["FalconForCausalLM"]);
        config["model_type"] = json!("falcon");
        config["new_decoder_architecture"] = json!(true);
    });
    for part in
        ["names \"FalconForCausalLM\"", "Qwen3ForCausalLM", "GPTNeoXForCausalLM", "not known: new_decoder_architecture"]
    {
        assert!(unknown.contains(part), "{unknown}");
    }
    let cases: Vec<(&str, &str, Value, &str)> = vec![
        ("qwen2", "attention_dropout", json!(0.1), "attention_dropout is 0.1: supported is 0"),
        ("qwen2", "max_window_layers", json!(-1), "max_window_layers is -1"),
        ("qwen2", "layer_types", json!(["sliding_attention", "chunked_attention"]), "layer_types is "),
        ("qwen2", "layer_types", json!(["sliding_attention"]), "layer_types is "),
        ("qwen3", "rope_parameters", json!({"rope_type": "axial", "factor": 4.0}), "rope_type is \"axial\""),
        (
            "qwen3",
            "rope_parameters",
            json!({"rope_type": "yarn", "truncate": 1}),
            "truncate is 1: it must be true or false",
        ),
        ("llama_yarn", "original_max_position_embeddings", json!(4), "say different things"),
        ("qwen3", "rope_parameters", json!({"rope_type": "linear"}), "factor is missing"),
        ("qwen3_moe", "mlp_only_layers", json!([1]), "mlp_only_layers is [1]: it must be the first layers"),
        ("qwen3_moe", "num_experts_per_tok", json!(9), "at most num_local_experts, 4"),
        ("gemma", "hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        ("gemma2", "attn_logit_softcapping", json!("high"), "attn_logit_softcapping is \"high\": it must be a number"),
        ("gemma3", "attn_logit_softcapping", json!(50.0), "attn_logit_softcapping is 50.0"),
        ("gemma3", "use_bidirectional_attention", json!(true), "use_bidirectional_attention is true"),
        ("olmo2", "clip_qkv", json!(8.0), "clip_qkv is 8.0"),
        ("olmo2", "mlp_bias", json!(true), "mlp_bias is true: supported is false"),
        ("olmo2", "head_dim", json!(8), "head_dim is 8: supported is 4"),
        ("deepseek_v2", "topk_method", json!("noaux_tc"), "it must be \"greedy\" or \"group_limited_greedy\""),
        ("deepseek_v2", "norm_topk_prob", json!(true), "norm_topk_prob is true: supported is false"),
        ("deepseek_v2", "num_key_value_heads", json!(2), "num_key_value_heads is 2: supported is 4"),
        ("deepseek_v2", "n_group", Value::Null, "n_group is missing"),
        ("deepseek_v3", "scoring_func", json!("softmax"), "scoring_func is \"softmax\": supported is \"sigmoid\""),
        ("deepseek_v3", "moe_layer_freq", json!(2), "moe_layer_freq is 2: supported is 1"),
        ("deepseek_v3", "first_k_dense_replace", json!(2), "first_k_dense_replace is 2: no layer of 2 has experts"),
        (
            "deepseek_v3",
            "qk_rope_head_dim",
            json!(3),
            "qk_nope_head_dim is 4 and qk_rope_head_dim 3: both must be even",
        ),
        ("deepseek_v3", "attention_bias", json!(true), "attention_bias is true: supported is false"),
        (
            "phi3",
            "rope_parameters",
            json!({"rope_type": "longrope"}),
            "short_factor is null: it must be a list of at most 64",
        ),
        (
            "phi3",
            "rope_parameters",
            json!({"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [1, 0.5]}),
            "short_factor has 2 numbers and long_factor 2: 1 pairs of features turn",
        ),
        ("phi3", "resid_pdrop", json!(0.1), "resid_pdrop is 0.1"),
        ("gpt_neox", "hidden_act", json!("relu"), "hidden_act is \"relu\""),
        ("mistral", "num_key_value_heads", json!(3), "num_key_value_heads 3 does not divide num_attention_heads 4"),
    ];
    for (name, key, value, wanted) in cases {
        let told = told(name, &|config| config[key] = value.clone());
        assert!(told.contains(wanted), "{name}: {told}");
    }
}
