//! Two sides of `mesh_diff`, the CPU and the emulated CUDA device: no value differs, and a fault is named by the first
//! operation that has it.
//!
//! More than 400 lines: every configuration that trains on the emulated device is one table of one comparison.

use meshwork_core::{Axis, Mesh, Rank, World};
use meshwork_cpu::Cpu;
use meshwork_cuda::device::Products;
use meshwork_cuda::emulator::{Host, HostError};
use meshwork_cuda::{CudaDevice, Emulator, Order};
use meshwork_diff::{Report, Side, compare};
use meshwork_engine::{Decoder, Numerics, Plan, StateKey, StateSource, TrainError, Trainer, WholeState};
use meshwork_models::language;
use meshwork_models::layers::Norm;
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_nn::Model;
use meshwork_optim::Sgd;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Device, ParamSpec, Precision, random};
use meshwork_testkit::Sampled;
use meshwork_train::config::Args;
use meshwork_train::data::Images;
use meshwork_train::{Devices, load, train_in};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

const SMALL: &[&str] = &[
    "--set=training.numerics=canonical",
    "--set=model.hidden_size=16",
    "--set=model.num_layers=2",
    "--set=model.seq_len=16",
    "--set=model.dropout=0.1",
    "--set=training.global_batch_size=4",
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches/meshwork/kernels")
}

/// The kernels for the host. `None`, and a line that says so, without g++ or on another CPU than x86-64.
fn kernels() -> Option<Arc<Host>> {
    static KERNELS: OnceLock<Option<Arc<Host>>> = OnceLock::new();
    let compile = || match Host::new(&folder()) {
        Err(error @ (HostError::NoCompiler | HostError::Processor(_))) => {
            eprintln!("left out: {error}");
            None
        }
        host => Some(Arc::new(host.unwrap_or_else(|error| panic!("{error}")))),
    };
    KERNELS.get_or_init(compile).clone()
}

/// One rank of the CPU against the emulated devices of a mesh, with the emulators that `emulator` gives.
fn diff(
    mesh: &str,
    more: &[&str],
    emulator: impl Fn(usize) -> Arc<Emulator> + Send + Sync + 'static,
) -> Result<Report, String> {
    diff_of(&[], mesh, more, emulator)
}

/// The same of another model.
fn diff_of(
    model: &[&str],
    mesh: &str,
    more: &[&str],
    emulator: impl Fn(usize) -> Arc<Emulator> + Send + Sync + 'static,
) -> Result<Report, String> {
    diff_between(model, ["dp=1", mesh], more, emulator)
}

/// The CPU on one mesh against the emulated devices of another.
fn diff_between(
    model: &[&str],
    meshes: [&str; 2],
    more: &[&str],
    emulator: impl Fn(usize) -> Arc<Emulator> + Send + Sync + 'static,
) -> Result<Report, String> {
    diff_by(Products::OfTheCpu, model, meshes, more, emulator)
}

/// The same with other products on the emulated devices.
fn diff_by(
    products: Products,
    model: &[&str],
    [on_cpu, mesh]: [&str; 2],
    more: &[&str],
    emulator: impl Fn(usize) -> Arc<Emulator> + Send + Sync + 'static,
) -> Result<Report, String> {
    let loaded = |mesh: &str, more| {
        let mesh = format!("--mesh={mesh}");
        load(&Args::parse([&[&*mesh], SMALL, model, more].concat())).unwrap()
    };
    let ((a, data), (b, _)) = (loaded(on_cpu, &[]), loaded(mesh, more));
    let a = Side::new(&a, &data).unwrap();
    let precision = b.training.matmul_dtype.precision();
    let mut b = Side::new(&b, &data).unwrap();
    let of_rank = move |rank| Ok(Arc::new(CudaDevice::with_precision(emulator(rank), products, precision)?));
    b.devices = Devices::cuda(of_rank);
    compare([&a, &b], 2).map_err(|error| error.to_string())
}

fn emulator(kernels: &Arc<Host>, seed: usize) -> Arc<Emulator> {
    Arc::new(Emulator::new(kernels.clone(), 1 << 30, Order::Seeded(seed as u64)))
}

#[test]
fn the_emulated_device_has_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    // Inner features of one token of each reduction block at a time.
    let blocks = &["--set=memory.sequence_block=8", "--set=memory.loss_chunk=3"][..];
    for (model, mesh, more) in [
        (&[][..], "dp=1", &[][..]),
        (blocks, "dp=2,tp=2,pp=2", &[]),
        (blocks, "tp=2", &["--set=parallelism.sequence_parallel=true"]),
        (blocks, "dp=2", &["--set=memory.recompute=full"]),
        (&[], "dp=2", &["--set=parallelism.zero_stage=3"]),
        (&["--set=lora.rank=4", "--set=lora.dropout=0.1"], "dp=2,tp=2", &["--set=parallelism.sequence_parallel=true"]),
        (
            &["--set=model.kind=llama", "--set=model.dropout=0", "--set=lora.rank=4", "--set=lora.targets=v_proj"],
            "tp=2",
            &[],
        ),
        (&["--set=lora.rank=4", "--set=lora.quantization=nf4", "--set=lora.block_size=4"], "dp=2,tp=2", &[]),
        (&["--set=lora.rank=4", "--set=lora.quantization=int8"], "dp=2", &["--set=memory.recompute=full"]),
        (&[], "dp=2,pp=2", &["--device=cuda-emulated", "--set=memory.offload=all"]),
    ]
    .into_iter()
    .sampled(3)
    {
        let shared = emulator(&kernels, 0);
        let report = diff_of(model, mesh, more, move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{mesh} {more:?}: {error}"));
        assert!(report.identical() && report.steps == 2, "{mesh} {more:?}: {report}");
    }
}

/// A sequence that cp cuts, by each method, and with experts on ranks of dp, on all of cp and on a part of it.
#[test]
fn sequences_over_cp_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let llama = ["--set=model.kind=llama", "--set=model.dropout=0"];
    let experts = ["--set=model.preset=switch-tiny", "--set=model.dropout=0", "--set=memory.sequence_block=8"];
    for (model, mesh, method) in [
        (&[][..], "cp=2", "all_gather"),
        (&llama, "dp=2,cp=2", "all_to_all"),
        (&[&llama[..], &["--set=model.sliding_window=5"]].concat(), "tp=2,cp=2", "all_gather"),
        (&experts, "dp=2,cp=2,ep=2", "all_gather"),
        (&experts, "cp=2,ep=2", "all_to_all"),
        (&experts, "cp=4,ep=2", "all_gather"),
    ]
    .into_iter()
    .sampled(3)
    {
        let shared = emulator(&kernels, 3);
        let method = format!("--set=parallelism.context_parallel_method={method}");
        let report = diff_of(&[model, &[&method]].concat(), mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{mesh} {method}: {error}"));
        assert!(report.identical() && report.steps == 2, "{mesh} {method}: {report}");
    }
}

/// A ring of the CPU and of the emulated device, in the same order: what travels and what is joined has the same bits.
#[test]
fn rings_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    for (mesh, method, more) in [
        ("cp=2", "ring", &["--set=model.kind=gpt2"][..]),
        ("cp=4", "hybrid", &["--set=model.kind=llama", "--set=model.dropout=0"]),
        ("tp=2,cp=2", "ring", &["--set=model.kind=llama", "--set=model.dropout=0"]),
        ("cp=4", "ring", &["--set=model.kind=llama", "--set=model.dropout=0", "--set=model.sliding_window=5"]),
        ("cp=4,ep=2", "ring", &["--set=model.preset=switch-tiny", "--set=model.dropout=0"]),
        ("cp=4,ep=4", "hybrid", &["--set=model.preset=switch-tiny", "--set=model.dropout=0"]),
    ]
    .into_iter()
    .sampled(3)
    {
        let shared = emulator(&kernels, 5);
        let method = format!("--set=parallelism.context_parallel_method={method}");
        let model = ["--set=training.numerics=fast", "--set=parallelism.ring_degree=2", &method];
        let report = diff_between(&[&model[..], more].concat(), [mesh, mesh], &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{mesh} {method}: {error}"));
        assert!(report.identical() && report.steps == 2, "{mesh} {method}: {report}");
    }
}

/// Attention of TF32 on tensor cores, of sequences that cp cuts: joined from blocks of keys, in runs of tokens, and of
/// fewer heads. Nothing differs from the CPU by more than the rounding of TF32.
#[test]
fn attention_on_tensor_cores_over_cp_is_near_that_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let llama = ["--set=model.kind=llama", "--set=model.dropout=0", "--set=model.num_kv_heads=2"];
    for (mesh, method, more) in [
        ("cp=2", "ring", &[][..]),
        ("cp=2", "all_gather", &[&llama[..], &["--set=model.sliding_window=5"]].concat()),
        ("tp=2,cp=2", "all_to_all", &llama[..]),
    ] {
        let shared = emulator(&kernels, 6);
        shared.note_launches();
        let method = format!("--set=parallelism.context_parallel_method={method}");
        let heads = ["--set=model.hidden_size=64", "--set=model.num_heads=4", &method];
        let fast = ["--set=training.numerics=fast", "--set=training.matmul_dtype=tf32"];
        let (model, driver) = ([&heads[..], &fast, more].concat(), shared.clone());
        let report = diff_by(Products::OfTheLibrary, &model, [mesh, mesh], &[], move |_| driver.clone());
        let report = report.unwrap_or_else(|error| panic!("{mesh} {method}: {error}"));
        let beyond = (&report.unexplained, &report.broken, &report.failed);
        assert!(matches!(beyond, (None, None, None)) && report.steps == 2, "{mesh} {method}: {report}");
        assert!(!report.identical(), "{mesh} {method}: the same bits in another order of sums");
        let names: Vec<&str> = shared.launches().into_iter().map(|(_, name)| name).collect();
        for kernel in ["forward", "backward_q", "backward_kv"] {
            let of = |prefix: &str| names.iter().any(|name| name.starts_with(&format!("{prefix}{kernel}_")));
            assert!((of("flash_") || of("flash_dropout_")) && !of("attention_"), "{mesh} {method}: {kernel}");
        }
    }
}

/// Text with a cache that cp cuts, token by token: the logits of the CPU on the same mesh, in canonical numerics of one
/// rank.
#[test]
fn a_cache_that_cp_cuts_has_the_logits_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    for (numerics, one) in [("fast", "cp=2"), ("canonical", "dp=1")] {
        let logits = |mesh: &str, device: &(dyn Fn() -> Arc<dyn Device> + Sync)| {
            let (mesh, numerics) = (format!("--mesh={mesh}"), format!("--set=training.numerics={numerics}"));
            let more = [&*mesh, &*numerics, "--set=model.kind=llama", "--set=model.dropout=0"];
            let method = "--set=parallelism.context_parallel_method=all_gather";
            let (config, _) = load(&Args::parse([SMALL, &more, &[method]].concat())).unwrap();
            let (model, plan) = (config.model(), config.plan().unwrap());
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let alone = Plan { mesh: "dp=1".parse().unwrap(), ..plan.clone() };
                let own = Arc::new(Rank::recording(&alone.mesh, 0)?);
                let first = Trainer::new(model.clone(), &alone, own, Cpu::device());
                let weights = WholeState::merge(&[first?.state()?])?;
                let read = |spec: &ParamSpec, slice: &LocalSlice| {
                    let key = StateKey { parameter: spec.name.clone(), state: None };
                    weights.read(&key, spec.dims, slice)
                };
                let mut decoder = Decoder::new(model.clone(), &plan, rank, device(), 16, read)?;
                [5, 1, 4, 1]
                    .map(|count| {
                        let tokens = (0..count).map(|at| (decoder.past() + at) as i32 * 7 % 50).collect();
                        decoder.next(&language::batch(tokens, vec![-1; count], count)?, count, 50)
                    })
                    .into_iter()
                    .collect::<Result<Vec<_>, TrainError>>()
            });
            ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
        };
        let shared = emulator(&kernels, 7);
        let emulated = || -> Arc<dyn Device> {
            Arc::new(CudaDevice::with_precision(shared.clone(), Products::OfTheCpu, Precision::default()).unwrap())
        };
        assert_eq!(logits("cp=2", &emulated), logits(one, &Cpu::device), "{numerics}");
    }
}

/// Mixtures of experts of each kind of router, and Llama, whose gradients sum two products in blocks. The exchanges of
/// tokens have parts of any sizes.
#[test]
fn models_of_experts_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    for (preset, mesh) in [
        ("switch-tiny", "dp=1"),
        ("switch-tiny", "dp=2,ep=2"),
        ("mixtral-tiny", "dp=2,ep=2,tp=2"),
        ("deepseek-tiny", "dp=4,ep=2"),
        ("llama-tiny", "dp=2"),
    ]
    .into_iter()
    .sampled(2)
    {
        let (shared, preset) = (emulator(&kernels, 0), format!("--set=model.preset={preset}"));
        let report = diff_of(&[&preset, "--set=model.dropout=0"], mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{preset} on {mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{preset} on {mesh}: {report}");
    }
}

/// Latent attention with groups of experts and values wider than queries, on whole sequences and over cp; features that
/// turn and are scaled.
#[test]
fn families_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/huggingface");
    let over_cp = "--set=parallelism.context_parallel_method=all_to_all";
    for (name, mesh, more) in [
        ("deepseek_v3", "tp=2,dp=2,ep=2", &[][..]),
        ("deepseek_v3", "cp=2", &[over_cp]),
        ("deepseek_v2", "tp=2,pp=2", &["--set=parallelism.sequence_parallel=true"]),
        ("llama_yarn", "dp=2,tp=2", &[]),
    ]
    .into_iter()
    .sampled(3)
    {
        let text = std::fs::read_to_string(models.join(name).join("config.json")).unwrap();
        let of_bytes = text.replace("\"vocab_size\": 29", "\"vocab_size\": 256");
        assert_ne!(text, of_bytes);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("emulated_{name}_{mesh}.json"));
        std::fs::write(&path, of_bytes).unwrap();
        let (shared, config) = (emulator(&kernels, 0), format!("--set=model.config={}", path.display()));
        let report = diff_of(&[&[&config, "--set=model.dropout=0"], more].concat(), mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{name} on {mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{name} on {mesh}: {report}");
    }
}

/// Packed examples, whose documents attention keeps apart and of which only answers are learnt.
#[test]
fn packed_examples_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let folder = crate::sft::Folder::new(&crate::sft::examples(40));
    let settings = folder.settings("training.numerics=canonical model.kind=llama");
    let model: Vec<&str> = settings.iter().map(String::as_str).collect();
    for mesh in ["dp=2,tp=2", "dp=1", "cp=2"].into_iter().sampled(2) {
        let shared = emulator(&kernels, 8);
        let report = diff_of(&[&model[..], &["--set=model.dropout=0"]].concat(), mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{mesh}: {report}");
    }
}

/// Pairs of answers, and the pass of the frozen model in front of each step.
#[test]
fn pairs_of_answers_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let folder = crate::sft::Folder::new(&crate::dpo::pairs(20));
    let settings = folder.settings(&format!("{} model.kind=llama dpo.label_smoothing=0.1", crate::dpo::PAIRS));
    let model: Vec<&str> = settings.iter().map(String::as_str).collect();
    for mesh in ["dp=2,tp=2", "dp=1", "cp=2"].into_iter().sampled(2) {
        let shared = emulator(&kernels, 8);
        let report = diff_of(&[&model[..], &["--set=model.dropout=0"]].concat(), mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{mesh}: {report}");
    }
}

/// The logits of five of sixteen tokens at a time, of one or two ranks, in f32 and in 16 bits.
#[test]
fn a_loss_in_chunks_has_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    for (mesh, dtype) in [("dp=2", "f32"), ("tp=2", "f32"), ("tp=2", "bf16")].into_iter().sampled(2) {
        let (shared, dtype) = (emulator(&kernels, 0), format!("--set=training.dtype={dtype}"));
        let report = diff_of(&["--set=memory.loss_chunk=5", &dtype], mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{mesh}, {dtype}: {error}"));
        assert!(report.identical() && report.steps == 2, "{mesh}, {dtype}: {report}");
    }
}

/// Storage in 16 bits, products of bf16, both, and products of TF32: dense models and experts, on one rank and on
/// several.
#[test]
fn sixteen_bits_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let (bf16, f16, products) =
        ("--set=training.dtype=bf16", "--set=training.dtype=f16", "--set=training.matmul_dtype=bf16");
    let tf32 = "--set=training.matmul_dtype=tf32";
    let (llama, experts) = ("--set=model.preset=llama-tiny", "--set=model.preset=switch-tiny");
    let alike = "--set=model.dropout=0";
    for (settings, mesh) in [
        (&[products][..], "dp=1"),
        (&[bf16], "dp=2"),
        (&[f16], "tp=2"),
        (&[bf16, products], "dp=2,tp=2,pp=2"),
        (&[llama, alike, bf16, products], "tp=2"),
        (&[experts, alike, products], "dp=2,ep=2"),
        (&[experts, alike, bf16], "dp=1"),
        (&[tf32], "tp=2"),
        (&[llama, alike, tf32], "dp=1"),
        (&[experts, alike, tf32], "dp=2,ep=2"),
    ]
    .into_iter()
    .sampled(3)
    {
        let shared = emulator(&kernels, 2);
        let report = diff_of(settings, mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{settings:?} on {mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{settings:?} on {mesh}: {report}");
    }
}

/// Compression has no canonical numerics: both sides have the same mesh, and fast ones with products in the CPU's
/// order.
#[test]
fn what_is_compressed_has_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let fast = "--set=training.numerics=fast";
    for (mesh, more) in [
        (
            "pp=2",
            &["compress.activations=quant:4/row", "compress.activation_gradients=topk:0.1", "compress.feedback=ef"][..],
        ),
        ("pp=2", &["compress.activations=fp8:e4m3/row", "compress.activation_gradients=sign/row"]),
        ("dp=2", &["compress.gradients=topk:0.1", "compress.feedback=ef21"]),
        ("dp=2", &["compress.gradients=randk:0.25"]),
        ("dp=2", &["compress.gradients=powersgd:2", "compress.feedback=ef"]),
        ("dp=2", &["compress.gradients=quant:8/block256", "compress.rounding=stochastic"]),
        ("dp=2", &["compress.weights=quant:8/block256", "parallelism.zero_stage=3"]),
        ("dp=2,ep=2", &["model.preset=switch-tiny", "model.dropout=0", "compress.dispatch=fp8:e4m3/row"]),
    ]
    .into_iter()
    .sampled(3)
    {
        let mut settings = vec![format!("--mesh={mesh}"), fast.to_owned()];
        settings.extend(more.iter().map(|setting| format!("--set={setting}")));
        let all: Vec<&str> = SMALL.iter().copied().chain(settings.iter().map(String::as_str)).collect();
        let (config, data) = load(&Args::parse(all)).unwrap_or_else(|error| panic!("{more:?}: {error}"));
        let (a, mut b) = (Side::new(&config, &data).unwrap(), Side::new(&config, &data).unwrap());
        let shared = emulator(&kernels, 4);
        b.devices = Devices::cuda(move |_| Ok(Arc::new(CudaDevice::new(shared.clone(), Products::OfTheCpu)?)));
        let report = compare([&a, &b], 2).unwrap_or_else(|error| panic!("{more:?} on {mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{more:?} on {mesh}: {report}");
    }
}

/// A step that runs again on a mesh of other emulated devices.
#[test]
fn a_step_has_the_same_bits_where_it_runs_again() {
    use crate::replay;
    let Some(kernels) = kernels() else { return };
    let config = replay::config("dp=2,tp=2 --set training.replay_mesh=dp=4 --set training.dtype=bf16");
    let (shared, precision) = (emulator(&kernels, 6), config.training.matmul_dtype.precision());
    let of_rank = move |_| Ok(Arc::new(CudaDevice::with_precision(shared.clone(), Products::OfTheCpu, precision)?));
    let told = replay::run(&config, &Devices::cuda(of_rank), |world| world).unwrap();
    assert!(told.iter().all(|told| told.contains(": the same bits")), "{told:?}");
}

/// A snapshot of emulated devices in host memory, and the state on other ones after a loss.
#[test]
fn a_run_goes_on_from_memory_on_other_devices() {
    use crate::peers::{config, on_cpu, regrouped, whole};
    let Some(kernels) = kernels() else { return };
    let [before, after] = ["dp=2", "dp=1"].map(config);
    let shared = emulator(&kernels, 4);
    let devices = Devices::cuda(move |_| Ok(Arc::new(CudaDevice::new(shared.clone(), Products::OfTheCpu)?)));
    let (_, from, numbers) = regrouped([&before, &after], &|world| Ok(devices.rank(world)?), 1, [&[], &[1]]).unwrap();
    assert_eq!((from, numbers), (2, whole(&before, &on_cpu, 2..5)));
}

/// A vocabulary that is stored in more rows than it has, whole and over ranks, of which the last has fewer words: in
/// fast numerics, where rows are multiples of
/// 8. Both sides have the same mesh.
#[test]
fn tables_with_more_rows_than_words_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let fast = ["--set=training.numerics=fast", "--set=model.vocab_size=300"];
    for (mesh, more) in [
        ("dp=1", &["--set=training.dtype=bf16", "--set=model.tie_embeddings=false"][..]),
        ("tp=4", &[]),
        ("tp=2,pp=2", &["--set=training.dtype=f16", "--set=memory.loss_chunk=5"]),
    ]
    .into_iter()
    .sampled(2)
    {
        let mesh = format!("--mesh={mesh}");
        let all = [&[&*mesh], SMALL, &fast, more].concat();
        let (config, data) = load(&Args::parse(all)).unwrap_or_else(|error| panic!("{more:?}: {error}"));
        let (a, mut b) = (Side::new(&config, &data).unwrap(), Side::new(&config, &data).unwrap());
        let (shared, precision) = (emulator(&kernels, 1), config.training.matmul_dtype.precision());
        let of_rank = move |_| Ok(Arc::new(CudaDevice::with_precision(shared.clone(), Products::OfTheCpu, precision)?));
        b.devices = Devices::cuda(of_rank);
        let report = compare([&a, &b], 2).unwrap_or_else(|error| panic!("{more:?} on {mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{more:?} on {mesh}: {report}");
    }
}

/// The error of a full device says what holds its memory, and what would free how much.
#[test]
fn a_full_device_says_what_would_free_memory() {
    let Some(kernels) = kernels() else { return };
    let (config, data) = load(&Args::parse(SMALL)).unwrap();
    let least = meshwork_train::plan::memory(&config).unwrap()[0].total();
    let full = Arc::new(Emulator::new(kernels, least / 2, Order::Seeded(0)));
    let devices = Devices::cuda(move |_| Ok(Arc::new(CudaDevice::new(full.clone(), Products::OfTheCpu)?)));
    let (world, stop) = (config.world(), AtomicBool::new(false));
    let error = train_in(&world, &devices, &config, &data, None, &stop).unwrap_err().to_string();
    for part in [
        "more: device cuda-emulated: the device has no memory for ",
        "are in use by all ranks; this rank's buffers hold parameters ",
        "; on the fullest rank would free, each by itself: --set ",
        "--set memory.recompute=full ",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// Short documents in each sample, of which tokens see their own alone, or whose positions begin anew.
#[test]
fn packed_documents_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let path = folder().with_file_name("documents.jsonl");
    let line =
        |i: usize| format!("{{\"text\": \"{}\"}}\n", "some words of a document "[..5 + i * 7 % 19].repeat(1 + i % 2));
    std::fs::write(&path, (0..80).map(line).collect::<String>()).unwrap();
    let source = format!("--set=data.path={}", path.display());
    let cases =
        [("tiny", "attention", "dp=2"), ("llama-tiny", "attention", "tp=2"), ("llama-tiny", "positions", "dp=1")];
    for (preset, rule, mesh) in cases.into_iter().sampled(2) {
        let (shared, preset) = (emulator(&kernels, 1), format!("--set=model.preset={preset}"));
        let rule = format!("--set=data.documents={rule}");
        let model = [&*preset, &rule, &source, "--set=data.end_of_text=0", "--set=model.seq_len=40"];
        let report = diff_of(&model, mesh, &[], move |_| shared.clone());
        let report = report.unwrap_or_else(|error| panic!("{model:?} on {mesh}: {error}"));
        assert!(report.identical() && report.steps == 2, "{model:?} on {mesh}: {report}");
    }
}

/// ResNet and VGG. Group norm has canonical numerics, one rank's on any mesh; batch norm has none, so both sides have
/// the same mesh.
#[test]
fn image_classifiers_have_every_value_of_the_cpu() {
    let Some(kernels) = kernels() else { return };
    let mut pixels = vec![0.0; 64 * 64];
    random::fill_uniform(random::key(9, "pixels"), 0, &mut pixels);
    let images = Images::new([8, 8, 1], pixels, (0..64).map(|image| image * 7 % 10).collect());
    let resnet = |norm| ResNetConfig { groups: vec![(4, 2), (8, 2)], norm, ..ResNetConfig::digits() }.network();
    let vgg = VggConfig { groups: vec![vec![4], vec![8]], hidden: vec![12], norm: Norm::Batch, ..VggConfig::digits() };
    let canonical = Numerics::Canonical { blocks: 2 };
    for (model, numerics, meshes) in [
        (resnet(Norm::Batch), Numerics::Fast, ["dp=2,pp=2"; 2]),
        (resnet(Norm::Group(2)), canonical, ["dp=1", "dp=2"]),
        (vgg.network(), Numerics::Fast, ["dp=1"; 2]),
    ] {
        let model: Arc<dyn Model> = Arc::new(model);
        let plan = |mesh: &str| {
            let mesh: Mesh = mesh.parse().unwrap();
            Plan {
                num_microbatches: Some(2 / mesh.degree(Axis::Dp)),
                mesh,
                global_batch_size: 8,
                optimizer: Sgd { momentum: 0.9, weight_decay: 5e-4 }.into(),
                max_norm: 0.125,
                numerics,
                ..Plan::default()
            }
        };
        let [a, mut b] = meshes.map(|mesh| Side::from_model(model.clone(), plan(mesh), &images));
        let shared = emulator(&kernels, 3);
        b.devices = Devices::cuda(move |_| Ok(Arc::new(CudaDevice::new(shared.clone(), Products::OfTheCpu)?)));
        let report = compare([&a, &b], 2).unwrap_or_else(|error| panic!("{meshes:?}: {error}"));
        assert!(report.identical() && report.steps == 2, "{meshes:?}: {report}");
    }
}

/// A file of kernels, a line of it and what it becomes, and what the report must say of the first value that differs.
const WRONG: &[(&str, &str, &str, [&str; 2])] = &[
    (
        "gelu.cu",
        "fmaf(x * gate.slope, two_du, gate.sigma)",
        "x * gate.slope * two_du + gate.sigma",
        ["backward: gradient of ", "gelu"],
    ),
    ("norm.cuh", "round.thread, n) + eps)", "round.thread, n) + 2.0f * eps)", ["forward: output of ", "layer_norm"]),
    (
        "optimizer.cu",
        "(m.of[j] / (sqrtf(v.of[j]) / root_hat + eps))",
        "(m.of[j] / (sqrtf(v.of[j]) / root_hat + 2.0f * eps))",
        ["updated weights ", ""],
    ),
];

/// A kernel that is wrong in one place is found, by the first operation that runs it. Kernels of all files are compiled
/// again for one in a header, so CI tries the first alone.
#[test]
fn a_wrong_kernel_is_named_by_the_operation_that_runs_it() {
    let Some(_) = kernels() else { return };
    for (file, right, wrong, parts) in WRONG.iter().sampled(WRONG.len()) {
        let sources = meshwork_kernels::HEADERS.iter().chain(meshwork_kernels::SOURCES);
        let texts: Vec<(&str, String)> = sources
            .map(|source| match source.name == *file {
                true => {
                    assert_eq!(source.text.matches(right).count(), 1, "{file}");
                    (source.name, source.text.replacen(right, wrong, 1))
                }
                false => (source.name, source.text.to_owned()),
            })
            .collect();
        let texts: Vec<(&str, &str)> = texts.iter().map(|(name, text)| (*name, &**text)).collect();
        let kernels = Host::compile(&folder(), &texts, meshwork_kernels::KERNELS, false);
        let kernels = Arc::new(kernels.unwrap_or_else(|error| panic!("{error}")));
        let report = diff("dp=1", &[], move |rank| emulator(&kernels, rank)).unwrap();
        let told = report.to_string();
        let (_, first) = told.split_once("\nthe first divergence: ").unwrap_or_else(|| panic!("{file}: {told}"));
        let line = first.lines().next().unwrap_or_default();
        assert!(line.starts_with("step 1, ") && parts.iter().all(|part| line.contains(part)), "{file}: {told}");
    }
}

/// Waits of the second half of a run are left out one at a time. Most are before a download of what was long complete,
/// because every value of the step was downloaded; of the others some show in two orders of streams: a value differs,
/// which the report names, or the run fails. All of the sample are tried if `MESHWORK_SWEEP` is `all`, as in
/// `.ci/nightly`, else until one is found.
#[test]
fn a_wait_that_is_left_out_is_found() {
    let Some(kernels) = kernels() else { return };
    let run = |skipped: Option<u64>, seed: usize| {
        let emulator = emulator(&kernels, seed);
        skipped.into_iter().for_each(|nth| emulator.skip_wait(nth));
        let same = emulator.clone();
        (diff("dp=1", &[], move |_| same.clone()), emulator.waits())
    };
    let (whole, waits) = run(None, 0);
    assert!(whole.unwrap().identical());
    let sample: Vec<u64> = (waits / 2..waits).step_by((waits / 48) as usize).collect();
    let is_found = |nth: u64| {
        (0..2).any(|seed| match run(Some(nth), seed).0 {
            Ok(report) => !report.identical() && report.to_string().contains("the first divergence: step "),
            Err(_) => true,
        })
    };
    let enough = if meshwork_testkit::sweeps() { 3 } else { 1 };
    let tried = if meshwork_testkit::sweeps() { sample.len() } else { enough };
    let found: Vec<u64> = sample.iter().copied().filter(|&nth| is_found(nth)).take(tried).collect();
    assert!(found.len() >= enough, "of waits {sample:?} only {found:?} are missed");
}
