//! Models as Hugging Face stores them, on any mesh: the logits are those of `transformers`, each rank reads its own
//! slices, and what is written again is what was read. `crates/models/tests/fixtures/make_huggingface_fixtures.py` made
//! the folders.

use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{Decoder, Numerics, Plan, ScheduleSpec, TrainError, Trainer, WholeState};
use meshwork_models::decoder::{DecoderConfig, DecoderModel};
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::huggingface::{Architecture, Dtype, Pretrained, export};
use meshwork_models::language;
use meshwork_nn::Model;
use meshwork_tensor::param::LocalSlice;
use meshwork_testkit::parity::assert_close;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MODELS: [&str; 5] = ["gpt2", "gpt2_untied_bf16", "llama_scaled", "llama_tied_f16_shards", "mixtral"];
/// Logits of `transformers` in f32, of numbers around 1.
const TOLERANCE: f64 = 1e-4;

/// The other families, each on a mesh: together they cut everything that a family has of its own. With them whether tp
/// cuts the sequence between blocks, and tokens of a block of feed-forward networks.
const FAMILIES: &[(&str, &str, bool, usize)] = &[
    ("mistral", "dp=2,tp=2", true, 0),
    ("qwen2", "tp=4", false, 0),
    ("qwen3", "tp=4", true, 0),
    ("qwen3_moe", "tp=2,dp=2,ep=2", false, 0),
    ("gemma", "pp=2", false, 4),
    ("gemma2", "tp=2,pp=2", false, 0),
    ("gemma3", "tp=2", true, 0),
    ("olmo2", "tp=4", true, 4),
    ("phi3", "tp=2,pp=2", false, 0),
    ("gpt_neox", "tp=2,dp=2", false, 4),
    ("gpt_neox", "tp=4", true, 0),
    ("deepseek_v2", "tp=2,dp=2,ep=2", true, 4),
    ("deepseek_v2", "tp=4", false, 0),
    ("deepseek_v3", "tp=2,dp=2,ep=2", false, 0),
    ("deepseek_v3", "tp=2,pp=2", true, 0),
    ("llama_yarn", "tp=2", true, 4),
    ("qwen2_dynamic", "tp=4", false, 0),
    ("phi3_longrope", "tp=2", true, 0),
];

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/huggingface").join(name)
}

pub(crate) fn plan(mesh: &str) -> Plan {
    let schedule = ScheduleSpec::named(if mesh.contains("pp") { "1f1b" } else { "gpipe" }).unwrap();
    Plan { mesh: mesh.parse().unwrap(), schedule, global_batch_size: 2, num_microbatches: Some(1), ..Plan::default() }
}

/// Token ids of each sample, and the logits of `transformers`.
pub(crate) fn wanted(folder: &Path) -> (Vec<Vec<i32>>, Vec<Vec<Vec<f32>>>) {
    let text = std::fs::read_to_string(folder.join("logits.json")).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let rows = |value: &serde_json::Value| value.as_array().unwrap().clone();
    let ids = |row: &serde_json::Value| rows(row).iter().map(|id| id.as_i64().unwrap() as i32).collect();
    let numbers = |row: &serde_json::Value| rows(row).iter().map(|x| x.as_f64().unwrap() as f32).collect();
    let tokens = rows(&value["tokens"]).iter().map(ids).collect();
    let logits = rows(&value["logits"]).iter().map(|sample| rows(sample).iter().map(numbers).collect()).collect();
    (tokens, logits)
}

/// The model of a folder; experts are cut over tp as other blocks are.
fn model(read: &Pretrained) -> Arc<dyn Model> {
    let of = *read.architecture();
    Architecture { experts: of.experts.map(|experts| ExpertsConfig { over_tp: true, ..experts }), ..of }.model()
}

/// These meshes, and those that share out the experts of a model that has some.
fn meshes(name: &str, dense: &[&'static str], experts: &[&'static str]) -> Vec<&'static str> {
    let experts = if name == "mixtral" { experts } else { &[] };
    dense.iter().chain(experts).copied().collect()
}

/// The trainer of a rank, with the weights of a folder.
fn load(read: &Pretrained, plan: &Plan, rank: Arc<meshwork_core::Rank>) -> Result<Trainer, TrainError> {
    let mut trainer = Trainer::new(model(read), plan, rank, Cpu::device())?;
    trainer.load_weights(|spec, slice| read.read(spec, slice))?;
    Ok(trainer)
}

#[test]
fn logits_are_those_of_transformers_on_any_mesh() {
    for name in MODELS {
        let folder = folder(name);
        let (tokens, logits) = wanted(&folder);
        let experts = ["dp=2,ep=2", "tp=2,dp=2,ep=2", "dp=2,ep=2,pp=2"];
        for mesh in meshes(name, &["dp=1", "tp=2", "tp=4", "pp=2", "tp=2,pp=2"], &experts) {
            let plan = plan(mesh);
            let read = Pretrained::open(&folder).unwrap();
            let (seq, vocab) = (tokens[0].len(), logits[0][0].len());
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let mut trainer = load(&read, &plan, rank)?;
                let mut rows = Vec::new();
                for row in 0..2 * seq {
                    let all = tokens.concat();
                    let batch = language::batch(all, vec![-1; 2 * seq], seq)?;
                    rows.push(trainer.predict(&batch, row, vocab)?);
                }
                Ok::<_, TrainError>(rows)
            });
            let ranks = ranks.unwrap_or_else(|error| panic!("{name} on {mesh}: {error}"));
            for (rank, rows) in ranks.iter().enumerate() {
                for (got, want) in rows.iter().zip(logits.concat()) {
                    let apart = got.iter().zip(&want).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
                    assert!(apart < TOLERANCE, "{name} on {mesh}, rank {rank}: {apart:e} apart");
                }
            }
        }
    }
}

/// On one rank the numbers of `transformers`; on a mesh the losses, gradient norms and weights of one rank, bit by bit,
/// and the same tokens' logits with the cache.
#[test]
fn families_have_the_logits_of_transformers_and_one_ranks_bits_on_a_mesh() {
    for &(name, mesh, cut, block) in FAMILIES {
        let folder = folder(name);
        let (tokens, logits) = wanted(&folder);
        let read = Pretrained::open(&folder).unwrap();
        let Architecture { decoder, experts, .. } = *read.architecture();
        let experts = experts.map(|experts| ExpertsConfig { over_tp: true, ..experts });
        // Of some models the file has the positions with which they were first trained.
        let decoder = DecoderConfig { seq_len: tokens[0].len(), ..decoder };
        let of = DecoderModel::new(decoder).with_experts(experts).sequence_parallel(cut).sequence_block(block);
        let model: Arc<dyn Model> = Arc::new(of.clone());
        let generator: Arc<dyn Model> = Arc::new(of.sequence_parallel(false));
        let (seq, vocab) = (tokens[0].len(), logits[0][0].len());
        let run = |mesh: &str, numerics: Numerics| {
            let plan = Plan { numerics, ..plan(mesh) };
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device())?;
                trainer.load_weights(|spec, slice| read.read(spec, slice))?;
                let all = language::batch(tokens.concat(), vec![-1; 2 * seq], seq)?;
                let rows: Vec<Vec<f32>> =
                    (0..2 * seq).map(|row| trainer.predict(&all, row, vocab)).collect::<Result<_, _>>()?;
                let mut decoder = Decoder::new(generator.clone(), &plan, rank, Cpu::device(), seq, |spec, slice| {
                    read.read(spec, slice)
                })?;
                let mut decoded = Vec::new();
                for at in [0..7, 7..8, 8..seq] {
                    let last = at.end - 1;
                    let now: Vec<i32> =
                        trainer.samples().flat_map(|sample| tokens[sample][at.clone()].to_vec()).collect();
                    let batch = language::batch(now.clone(), vec![-1; now.len()], at.len())?;
                    decoded.push((last, decoder.next(&batch, at.len(), vocab)?));
                }
                let own = tokens[trainer.samples()].concat();
                let targets = own.iter().map(|id| (id * 7 + 3) % vocab as i32).collect();
                let batch = language::batch(own, targets, seq)?;
                let reports = [trainer.step(&batch)?, trainer.step(&batch)?];
                let reports = reports.map(|report| [report.loss.to_bits(), report.grad_norm.to_bits()]);
                Ok::<_, TrainError>((rows, (trainer.samples(), decoded), reports, trainer.state()?))
            });
            ranks.unwrap_or_else(|error| panic!("{name} on {mesh}: {error}"))
        };
        for (rows, ..) in run("dp=1", Numerics::Fast).iter().chain(&run(mesh, Numerics::Fast)) {
            for (got, want) in rows.iter().zip(logits.concat()) {
                let apart = got.iter().zip(&want).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
                assert!(apart < 2e-5, "{name}: {apart:e} apart");
            }
        }
        let canonical = Numerics::Canonical { blocks: 4 };
        let [one, there] = ["dp=1", mesh].map(|mesh| run(mesh, canonical));
        let [alone, together] = [&one, &there].map(|ranks| {
            let states: Vec<_> = ranks.iter().map(|rank| rank.3.clone()).collect();
            let whole = WholeState::merge(&states).unwrap();
            let bits = |key| whole.vector(key).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            whole.keys().map(|key| (key.clone(), bits(key))).collect::<Vec<_>>()
        });
        for (rows, (samples, decoded), reports, _) in &there {
            assert_eq!((rows, reports), (&one[0].0, &one[0].2), "{name} on {mesh}");
            for (last, logits) in decoded {
                let whole: Vec<f32> =
                    samples.clone().flat_map(|sample| one[0].0[sample * seq + last].clone()).collect();
                assert_eq!(*logits, whole, "{name} on {mesh}: decoded after {last}");
            }
        }
        assert!(alone == together, "{name} on {mesh}: other weights");
    }
}

#[test]
fn each_rank_reads_the_bytes_of_its_slices() {
    let all = MODELS.into_iter().flat_map(|name| {
        meshes(name, &["dp=1", "tp=2", "tp=4,pp=2"], &["dp=2,ep=2", "tp=2,dp=4,ep=4,pp=2"])
            .into_iter()
            .map(move |mesh| (name, mesh))
    });
    for (name, mesh) in all.chain(FAMILIES.iter().map(|&(name, mesh, ..)| (name, mesh))) {
        let folder = folder(name);
        {
            let plan = Plan { global_batch_size: 4, ..plan(mesh) };
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let read = Pretrained::open(&folder).expect("a fixture");
                let trainer = load(&read, &plan, rank)?;
                // The folder has no buffers of routers, in which they count the tokens of experts.
                let mut counted = 0;
                trainer.visit_state(
                    |key| key.state.is_none() && key.parameter.ends_with(".tokens"),
                    |of| {
                        counted += of.values.len();
                        Ok::<_, TrainError>(())
                    },
                )?;
                Ok::<_, TrainError>((read.bytes_read(), (trainer.local_elements() - counted) as u64))
            });
            let bytes = if name.contains("16") { 2 } else { 4 };
            for (rank, (read, held)) in ranks.unwrap().into_iter().enumerate() {
                assert_eq!(read, bytes * held, "{name} on {mesh}, rank {rank}");
            }
        }
    }
}

#[test]
fn a_model_is_written_as_it_was_read() {
    let models = MODELS.into_iter().zip([Dtype::F32, Dtype::Bf16, Dtype::F32, Dtype::F16, Dtype::F32]);
    let models =
        models.map(|(name, dtype)| (name, dtype, if name == "mixtral" { "tp=2,dp=2,ep=2" } else { "tp=2,pp=2" }));
    for (name, dtype, mesh) in models.chain(FAMILIES.iter().map(|&(name, mesh, ..)| (name, Dtype::F32, mesh))) {
        let original = Pretrained::open(&folder(name)).unwrap();
        let plan = plan(mesh);
        let states =
            World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| load(&original, &plan, rank)?.state()).unwrap();
        let whole = WholeState::merge(&states).unwrap();
        let written = tempfile::tempdir().unwrap();
        export(written.path(), original.architecture(), dtype, |spec| {
            let key = meshwork_engine::StateKey { parameter: spec.name.clone(), state: None };
            whole.vector(&key).map(<[f32]>::to_vec).ok_or_else(|| "the run has none".into())
        })
        .unwrap();
        let again = Pretrained::open(written.path()).unwrap();
        assert_eq!(again.architecture(), original.architecture());
        for spec in original.architecture().parameters().unwrap() {
            let slice = LocalSlice::whole(spec.dims);
            let [first, second] = [&original, &again].map(|read| read.read(&spec, &slice).unwrap());
            assert_eq!(first, second, "{name}: {}", spec.name);
            assert_close(
                &spec.name,
                &first,
                whole.vector(&meshwork_engine::StateKey { parameter: spec.name.clone(), state: None }).unwrap(),
                0.0,
            );
        }
        let left: Vec<_> = std::fs::read_dir(written.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".part")), "{left:?}");
    }
}
