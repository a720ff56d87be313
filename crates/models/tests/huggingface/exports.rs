//! What an export keeps of the folder that its model comes from, and how it takes the place of a folder.

use crate::{copy, edit};
use meshwork_models::gpt2::Gpt2Config;
use meshwork_models::huggingface::{Architecture, Dtype, Error, Export, Pretrained, tokenizer_files};
use meshwork_tensor::ParamSpec;
use meshwork_tensor::op::RotaryScaling;
use meshwork_tensor::param::LocalSlice;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Elements 0, 1, 2, ... of each parameter, times `factor`.
fn weights(factor: f32) -> impl FnMut(&ParamSpec) -> Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>> {
    move |spec| Ok((0..spec.dims.count()).map(|at| at as f32 * factor).collect())
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The export of a model that comes from a folder, changed or not, read again: its settings.
fn exported(from: &Path, change: impl Fn(&mut Architecture), ends: &[u32], dtype: Dtype) -> (Value, Option<Value>) {
    let source = Pretrained::open(from).unwrap();
    let mut architecture = *source.architecture();
    change(&mut architecture);
    let export = Export {
        from: Some(source.settings().clone()),
        ends_of_text: ends.to_vec(),
        ..Export::new(architecture, dtype)
    };
    let out = tempfile::tempdir().unwrap();
    export.write(out.path(), weights(0.25)).unwrap();
    Pretrained::open(out.path()).unwrap();
    let generation = out.path().join("generation_config.json");
    (json(&out.path().join("config.json")), generation.exists().then(|| json(&generation)))
}

#[test]
fn what_the_folder_said_is_kept() {
    let families = ["gpt2", "llama_scaled", "mixtral", "llama_yarn", "qwen2_dynamic", "phi3_longrope", "qwen3_moe"];
    let deepseek = ["deepseek_v2", "deepseek_v3"];
    for (name, dtype) in families.into_iter().chain(deepseek).map(|name| (name, Dtype::F32)) {
        let folder = copy(name);
        edit(&folder.path().join("config.json"), |config| {
            config["eos_token_id"] = json!([2, 5, 7]);
            config["bos_token_id"] = json!(1);
            config["pad_token_id"] = json!(3);
            config["use_cache"] = json!(false);
            config["unknown_of_tomorrow"] = json!({"a": [1, null]});
        });
        edit(&folder.path().join("generation_config.json"), |generation| {
            generation["eos_token_id"] = json!([2, 5]);
            generation["temperature"] = json!(0.6);
        });
        let before = json(&folder.path().join("config.json"));
        let (config, generation) = exported(folder.path(), |_| {}, &[5], dtype);
        assert_eq!(config, before, "{name}: nothing changed, in {dtype:?}");
        assert_eq!(generation.unwrap(), json(&folder.path().join("generation_config.json")));
    }
    // The folder of a Llama that trains on shorter sequences keeps its positions, in the form that it had; a longer one
    // does not.
    let llama = copy("llama_scaled");
    let shorten = |architecture: &mut Architecture| architecture.decoder.seq_len = 8;
    let (config, _) = exported(llama.path(), shorten, &[], Dtype::Bf16);
    assert_eq!((&config["max_position_embeddings"], &config["dtype"]), (&json!(12), &json!("bfloat16")));
    assert_eq!(config["rope_parameters"], json(&llama.path().join("config.json"))["rope_parameters"]);
    let lengthen = |architecture: &mut Architecture| {
        architecture.decoder.seq_len = 64;
        let rotary = architecture.decoder.rotary.as_mut().unwrap();
        let Some(RotaryScaling::Llama3 { factor, .. }) = rotary.scaling.as_mut() else { panic!("not of Llama 3") };
        *factor = 16.0;
    };
    let (config, _) = exported(llama.path(), lengthen, &[], Dtype::F32);
    assert_eq!(config["max_position_embeddings"], json!(64));
    assert_eq!((&config["rope_scaling"]["factor"], &config["rope_theta"]), (&json!(16.0), &json!(100.0)));
    assert!(config.get("rope_parameters").is_none(), "one form of two that differ");
    // Code of the folder that is not carried over is not named, and an older folder keeps its key of the type.
    let older = copy("gpt2");
    edit(&older.path().join("config.json"), |config| {
        let config = config.as_object_mut().unwrap();
        config.remove("dtype");
        config.insert("torch_dtype".to_owned(), json!("float32"));
        config.insert("auto_map".to_owned(), json!({"AutoModelForCausalLM": "modeling_own.Model"}));
    });
    let (config, _) = exported(older.path(), |_| {}, &[], Dtype::F16);
    assert_eq!((&config["torch_dtype"], config.get("dtype"), config.get("auto_map")), (&json!("float16"), None, None));
}

/// Without the folder's own settings an export says all that is needed to read the same model.
#[test]
fn settings_of_families_are_written_in_full() {
    for name in ["llama_yarn", "qwen2_dynamic", "phi3_longrope", "qwen3_moe", "deepseek_v2", "deepseek_v3"] {
        let of = *Pretrained::open(copy(name).path()).unwrap().architecture();
        let out = tempfile::tempdir().unwrap();
        Export::new(of, Dtype::F32).write(out.path(), weights(0.25)).unwrap();
        assert_eq!(*Pretrained::open(out.path()).unwrap().architecture(), of, "{name}");
    }
}

/// A bias that were rounded would choose other experts: it has f32 where all weights have 16 bits, and those 16 bits
/// are still the type of the weights.
#[test]
fn the_bias_of_a_router_is_kept_in_f32() {
    let source = Pretrained::open(copy("deepseek_v3").path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let third = |spec: &ParamSpec| Ok(vec![1.0 / 3.0; spec.dims.count()]);
    Export::new(*source.architecture(), Dtype::Bf16).write(out.path(), third).unwrap();
    let written = Pretrained::open(out.path()).unwrap();
    assert_eq!(written.dtype(), Some(Dtype::Bf16));
    let specs = written.architecture().parameters().unwrap();
    let read = |name: &str| {
        let spec = specs.iter().find(|spec| spec.name == name).unwrap();
        written.read(spec, &LocalSlice::whole(spec.dims)).unwrap()
    };
    assert_eq!(read("layers.1.mlp.router.bias"), [1.0 / 3.0; 8]);
    assert_eq!(read("layers.1.mlp.router.weight")[0], 0.333_984_38);
    assert!(specs.iter().all(|spec| !spec.name.ends_with(".tokens")), "no folder has the tokens of experts");
}

/// A Llama with a sliding window is a Mistral; without one a Mistral is a Llama. A Mixtral keeps its class.
#[test]
fn a_sliding_window_is_read_and_written() {
    let window = |architecture: &Architecture| architecture.decoder.sliding_window;
    let set = |sliding_window| {
        move |architecture: &mut Architecture| {
            architecture.decoder.sliding_window = sliding_window;
            if architecture.experts.is_none() {
                *architecture = Architecture::llama(architecture.decoder);
            }
        }
    };
    let mistral = copy("llama_scaled");
    let class = |config: &mut Value, class: &str, of: &str| {
        config["architectures"] = json!([class]);
        config["model_type"] = json!(of);
    };
    edit(&mistral.path().join("config.json"), |config| {
        class(config, "MistralForCausalLM", "mistral");
        config["sliding_window"] = json!(5);
    });
    let opened = Pretrained::open(mistral.path()).unwrap();
    assert_eq!(window(opened.architecture()), Some(5));
    let before = json(&mistral.path().join("config.json"));
    assert_eq!(exported(mistral.path(), |_| {}, &[], Dtype::F32).0["sliding_window"], before["sliding_window"]);
    let (config, _) = exported(mistral.path(), set(None), &[], Dtype::F32);
    assert_eq!((&config["architectures"], config.get("sliding_window")), (&json!(["LlamaForCausalLM"]), None));
    let (config, _) = exported(copy("llama_scaled").path(), set(Some(7)), &[], Dtype::F32);
    assert_eq!(
        [&config["architectures"], &config["model_type"], &config["sliding_window"]],
        [&json!(["MistralForCausalLM"]), &json!("mistral"), &json!(7)]
    );
    // A class has its own value where the key is missing: transformers' Mistral 4096 tokens.
    for (given, told) in [(Some(Value::Null), None), (None, Some(4096))] {
        edit(&mistral.path().join("config.json"), |config| {
            config.as_object_mut().unwrap().remove("sliding_window");
            given.iter().for_each(|given| config["sliding_window"] = given.clone());
        });
        assert_eq!(window(Pretrained::open(mistral.path()).unwrap().architecture()), told);
    }
    let mixtral = copy("mixtral");
    edit(&mixtral.path().join("config.json"), |config| config["sliding_window"] = json!(9));
    assert_eq!(window(Pretrained::open(mixtral.path()).unwrap().architecture()), Some(9));
    let (config, _) = exported(mixtral.path(), set(Some(3)), &[], Dtype::F32);
    assert_eq!([&config["model_type"], &config["sliding_window"]], [&json!("mixtral"), &json!(3)]);
    let (config, _) = exported(mixtral.path(), set(None), &[], Dtype::F32);
    assert_eq!(config["sliding_window"], Value::Null);
}

/// Without the keys transformers takes 50256 for the end of a GPT-2's text and 2 for that of a Llama's.
#[test]
fn ends_of_text_are_always_said() {
    let llama = copy("llama_scaled");
    let (config, generation) = exported(llama.path(), |_| {}, &[2, 9], Dtype::F32);
    assert_eq!((&config["eos_token_id"], &generation.unwrap()["eos_token_id"]), (&json!([2, 9]), &json!([2, 9])));
    for (ends, told) in [(vec![], Value::Null), (vec![4], json!(4)), (vec![4, 6], json!([4, 6]))] {
        let out = tempfile::tempdir().unwrap();
        let tiny = *Pretrained::open(copy("gpt2").path()).unwrap().architecture();
        let export = Export { ends_of_text: ends.clone(), ..Export::new(tiny, Dtype::F32) };
        export.write(out.path(), weights(1.0)).unwrap();
        let config = json(&out.path().join("config.json"));
        assert_eq!(config.as_object().unwrap().get("eos_token_id"), Some(&told));
        assert_eq!(config.as_object().unwrap().get("bos_token_id"), Some(&Value::Null));
        assert_eq!(Pretrained::open(out.path()).unwrap().ends_of_text(), ends);
    }
}

#[test]
fn a_folder_of_another_model_is_replaced_only_when_asked_and_whole() {
    let shards = copy("llama_tied_f16_shards");
    let out = shards.path();
    fs::write(out.join("README.md"), "mine").unwrap();
    fs::write(out.join("pytorch_model.bin"), "old").unwrap();
    fs::write(out.join("tokenizer.model"), "old").unwrap();
    let tiny = *Pretrained::open(copy("gpt2").path()).unwrap().architecture();
    let mut export = Export::new(tiny, Dtype::F32);
    export.files.insert("tokenizer.json".to_owned(), b"{}".to_vec());
    export.files.insert("additional_chat_templates/tool.jinja".to_owned(), b"{{ x }}".to_vec());
    let before = names(out);
    let refused = export.write(out, weights(1.0)).unwrap_err();
    assert!(matches!(&refused, Error::Occupied { path, .. } if path.ends_with(out.file_name().unwrap())), "{refused}");
    assert!(
        refused.to_string().contains("has files of a model already: config.json, generation_config.json"),
        "{refused}"
    );
    assert_eq!((export.check(out).unwrap_err().to_string(), names(out)), (refused.to_string(), before.clone()));

    export.overwrite = true;
    export.check(out).unwrap();
    // At any time of the write the old model is there, whole, and a write that fails leaves it so.
    let is_old =
        || Pretrained::open(out).unwrap().architecture().family.class == "LlamaForCausalLM" && names(out) == before;
    let mut asked = 0;
    let failing = export.write(out, |spec| {
        assert!(is_old());
        asked += 1;
        if asked == 5 { Err("the disk is gone".into()) } else { weights(1.0)(spec) }
    });
    assert!(failing.unwrap_err().to_string().ends_with("the disk is gone"));
    assert!(is_old());
    let beside = out.parent().unwrap().join(format!(".{}.unfinished", out.file_name().unwrap().to_string_lossy()));
    assert!(!beside.exists(), "nothing is left of it");

    // What a killed process left is removed.
    fs::create_dir(&beside).unwrap();
    fs::write(beside.join("model-00001-of-00009.safetensors"), "half").unwrap();
    export.write(out, weights(2.0)).unwrap();
    assert!(!beside.exists());
    let after = [
        "README.md",
        "additional_chat_templates",
        "config.json",
        "generation_config.json",
        "logits.json",
        "model.safetensors",
        "tokenizer.json",
    ];
    assert_eq!(names(out), after, "no shard, index or tokenizer of the old model is left");
    assert_eq!(fs::read_to_string(out.join("README.md")).unwrap(), "mine");
    assert_eq!(Pretrained::open(out).unwrap().architecture(), &tiny);
    assert_eq!(tokenizer_files(out).unwrap(), export.files);
    export.write(out, weights(3.0)).unwrap(); // its own folder of templates is replaced too
    assert_eq!(names(out), after);
}

#[test]
fn folders_that_cannot_be_written_are_found_before() {
    let tiny = *Pretrained::open(copy("gpt2").path()).unwrap().architecture();
    let export = Export { overwrite: true, ..Export::new(tiny, Dtype::F32) };
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| export.check(path).unwrap_err().to_string();
    fs::write(folder.path().join("file"), "").unwrap();
    assert!(refused(&folder.path().join("file")).contains("is a file, not a folder"));
    assert!(
        refused(&folder.path().join("file/inside")).contains("Not a directory"),
        "{}",
        refused(&folder.path().join("file/inside"))
    );
    assert!(refused("/".as_ref()).contains("is where a file system begins"));
    assert!(refused("/proc".as_ref()).contains("is where a file system begins"));
    fs::create_dir_all(folder.path().join("parent/runs")).unwrap();
    let told = refused(&folder.path().join("parent"));
    assert!(told.contains("has folders in it (runs), and the whole folder is replaced"), "{told}");
    // No folder is made by the question, and none is left.
    export.check(&folder.path().join("deep/er/out")).unwrap();
    assert_eq!(names(folder.path()), ["file", "parent"]);
    let huge = Architecture::gpt2(Gpt2Config { vocab_size: 1 << 42, ..Gpt2Config::default() });
    let told = Export::new(huge, Dtype::F32).check(&folder.path().join("out")).unwrap_err();
    assert!(matches!(told, Error::Room { needed, .. } if needed > 1 << 50), "{told}");
    // One process writes a folder at a time.
    let out = folder.path().join("out");
    export
        .write(&out, |spec| {
            let other = export.write(&out, weights(1.0)).unwrap_err().to_string();
            assert!(other.contains("another process writes"), "{other}");
            weights(1.0)(spec)
        })
        .unwrap();
}

/// What appears in the folder meanwhile is not lost, and neither is the model.
#[test]
fn a_place_that_is_taken_meanwhile_leaves_the_model_beside_it() {
    let tiny = *Pretrained::open(copy("gpt2").path()).unwrap().architecture();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let export = Export::new(tiny, Dtype::F32);
    let error = export.write(&out, |spec| {
        fs::create_dir_all(&out).unwrap();
        fs::write(out.join("config.json"), "{}").unwrap();
        weights(1.0)(spec)
    });
    let error = error.unwrap_err();
    assert!(error.to_string().contains("; the model is whole in "), "{error}");
    let Error::Unplaced { written, .. } = error else { panic!("{error}") };
    assert_eq!(Pretrained::open(&written).unwrap().architecture(), &tiny);
    assert_eq!(fs::read_to_string(out.join("config.json")).unwrap(), "{}");
}

#[test]
fn weights_that_a_type_does_not_have_are_not_written() {
    let tiny = *Pretrained::open(copy("gpt2").path()).unwrap().architecture();
    for (dtype, value, held) in [
        (Dtype::F32, f32::NAN, false),
        (Dtype::F32, f32::INFINITY, false),
        (Dtype::F32, f32::MAX, true),
        (Dtype::Bf16, f32::MAX, false),
        (Dtype::Bf16, 1e38, true),
        (Dtype::F16, 65520.0, false),
        (Dtype::F16, 65504.0, true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let written = Export::new(tiny, dtype).write(&out, |spec| {
            let mut values = weights(0.0)(spec)?;
            if spec.name == "h.1.mlp.up.weight" {
                values[7] = value;
            }
            Ok(values)
        });
        assert_eq!(written.is_ok(), held, "{value} in {dtype:?}");
        if let Err(error) = written {
            let told = format!("the weights of h.1.mlp.up.weight: {value} is no number in {}", dtype.name());
            assert!(error.to_string().starts_with(&told), "{error}");
            assert!(names(folder.path()).is_empty());
        }
    }
}
