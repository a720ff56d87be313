//! A base of 8 or 4 bits (QLoRA): its adapters train as in PyTorch on what the same blocks restore, on any mesh, and
//! are exported with what was restored.

use super::{ADAMW, Recorded, fixture, from_adapter, line, parse, run};
use serde_json::Value;
use std::path::Path;

/// Keys of a base that is stored in fewer bits. Blocks of 16 lie within a row of these matrices, so that they are those
/// of the tensors in the file, whatever is fused here.
fn stored_in(form: &str) -> String {
    format!("--set lora.quantization={form} --set lora.block_size=16")
}

/// 20 steps on what PyTorch restores from the same blocks.
#[test]
fn an_adapter_of_a_quantised_base_trains_as_in_pytorch() {
    for name in ["llama_scaled", "gpt2"] {
        let (recorded, file) = (Recorded::of(name), fixture("lora", name).join("quantised.json"));
        let wanted: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!(wanted["block_size"], 16);
        for (form, mesh) in [("int8", "dp=1"), ("nf4", "dp=1"), ("nf4", "dp=2,pp=2")] {
            let got = run(&from_adapter(name, &format!("{} --mesh {mesh}", stored_in(form))), &recorded.data());
            let wanted: Vec<f64> = serde_json::from_value(wanted["losses"][form].clone()).unwrap();
            assert_eq!(got.len(), wanted.len());
            for (step, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                let off = (got - wanted).abs() / wanted;
                assert!(
                    off <= 1e-6,
                    "{name}, {form} on {mesh}: loss {step} is {got}, in PyTorch {wanted}: {off:e} off"
                );
            }
        }
    }
}

/// A merged model has the weights that the adapter was trained beside: those that are restored. An adapter alone names
/// the base as it is in its folder.
#[test]
fn a_quantised_base_is_exported_as_it_is_read() {
    let (folder, data) = (tempfile::tempdir().unwrap(), Recorded::of("gpt2").data());
    let still = "--set optimizer.lr=1e-30 --set optimizer.weight_decay=0 --set training.steps=1";
    let export = |out: &Path, more: &str| {
        let more = format!("{still} --set checkpoint.export={} {more}", out.display());
        run(&from_adapter("llama_scaled", &more), &data)[0]
    };
    let [merged, adapter, plain] = ["merged", "adapter", "plain"].map(|name| folder.path().join(name));
    let loss = export(&merged, &stored_in("nf4"));
    let again = format!("--set model.init_from={} {ADAMW} {still}", merged.display());
    let again = run(&parse(&again).unwrap(), &data)[0];
    assert!((again - loss).abs() <= 1e-6 * loss, "{again} merged, {loss} adapted");

    assert_eq!(export(&adapter, &format!("{} --set lora.export=adapter", stored_in("nf4"))), loss);
    let original = export(&plain, "--set lora.export=adapter");
    assert!((original - loss).abs() > 1e-3 * loss, "four bits change nothing");
    let hash = |out: &Path| {
        let text = std::fs::read_to_string(out.join("adapter_config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        config["meshwork_base_hash"].as_str().unwrap().to_owned()
    };
    assert_eq!(hash(&adapter), hash(&plain));
}

/// A checkpoint has the restored numbers by name and slice. Stored again, on another mesh, they are the same codes.
#[test]
fn a_run_on_a_quantised_base_goes_on_on_another_mesh() {
    let (folder, data) = (tempfile::tempdir().unwrap(), Recorded::of("gpt2").data());
    let steps = |steps: usize, more: &str| {
        let base = "--set lora.quantization=nf4 --set lora.block_size=2 --set training.numerics=canonical";
        let base = format!("{base} --set training.global_batch_size=4 --set training.steps={steps}");
        run(&from_adapter("llama_scaled", &format!("{base} {more}")), &data)
    };
    let (whole, dir) = (steps(4, ""), format!("--set checkpoint.dir={}", folder.path().display()));
    assert_eq!(steps(2, &dir), whole[..2]);
    let dir = format!("{dir} --set checkpoint.resume=true");
    // A rank of four keeps two rows of gate and up, and half of one.
    assert_eq!(steps(3, &format!("{dir} --mesh dp=4,tp=2 --set parallelism.zero_stage=3")), whole[2..3]);
    assert_eq!(steps(4, &format!("{dir} --mesh pp=2")), whole[3..]);
}

/// Products read a base in bf16 as it is stored; where ranks share out its parts (ZeRO-3) it is restored to f32 first.
/// The bits are the same.
#[test]
fn a_base_in_bf16_has_the_bits_of_a_restored_one() {
    let losses = |name: &str, more: &str| {
        let canonical = "--set training.numerics=canonical --set training.global_batch_size=4 --set training.steps=3";
        run(&from_adapter(name, &format!("{} {canonical} {more}", stored_in("bf16"))), &Recorded::of(name).data())
    };
    for name in ["llama_scaled", "gpt2"] {
        let alone = losses(name, "");
        for more in ["--mesh dp=2 --set parallelism.zero_stage=3", "--mesh dp=2,tp=2"] {
            assert_eq!(losses(name, more), alone, "{name} {more}");
        }
    }
}

#[test]
fn a_mesh_that_cuts_blocks_is_refused_with_what_fits() {
    let refused = |more: &str| parse(&line("llama_scaled", &format!("--set lora.rank=2 {more}"))).map(drop);
    let cut = refused(&format!("--mesh tp=2 {}", stored_in("nf4"))).unwrap_err();
    let told = "tp=2 cuts its blocks of 16 elements, which have a scale each; use 2, or other degrees";
    assert!(cut.contains("lora.block_size = 16: ") && cut.contains(told), "{cut}");
    assert_eq!(refused("--mesh tp=2 --set lora.quantization=int8 --set lora.block_size=2"), Ok(()));
    // Two bytes each, without blocks.
    assert_eq!(refused(&format!("--mesh tp=2 {}", stored_in("bf16"))), Ok(()));
}
