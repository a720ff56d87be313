//! Llama against PyTorch (`fixtures/make_llama_fixtures.py` says what was recorded, and how it was checked in float64), over tp with
//! and without sequence parallelism; its parameters under any cut; and the sizes of the published presets.

use meshwork_core::{Axis, Mesh, Rank, Ty, Types};
use meshwork_models::llama::{LlamaConfig, LlamaStage, PRESETS};
use meshwork_models::{Part, Stage};
use meshwork_optim::{AdamW, Optimizer, Sgd, Update, clip_factor};
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::op::{Rotary, RotaryScaling};
use meshwork_tensor::tape::{GradSink, Mode, Position, Share, Weights};
use meshwork_tensor::{Declarations, ParamId, Params, Result, Role, Tape, Tensor};
use meshwork_tensor_parallel::Region;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Largest absolute differences: a few times what two orders of f32 sums differ by in numbers of this size.
const LOSS: f64 = 3e-6;
const LOGITS: f64 = 1e-5;
const GRADIENTS: f64 = 3e-6;
const WEIGHTS: f64 = 5e-6;

/// More ranks than heads of keys and values among them. The 37 ids are not divided by 2.
const MESHES: [(usize, Region); 5] = [
    (1, Region::Invariant),
    (2, Region::Invariant),
    (2, Region::SequenceParallel),
    (4, Region::Invariant),
    (4, Region::SequenceParallel),
];

/// Whole parameters, or their gradients, by name.
type Values = BTreeMap<String, Vec<f32>>;

struct Fixture(Value);

impl Fixture {
    fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama_micro.json");
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}")))
    }

    fn size(&self, name: &str) -> usize {
        self.0["config"][name].as_u64().unwrap() as usize
    }

    fn config(&self, tied: bool) -> LlamaConfig {
        let number = |name: &str| self.0["config"][name].as_f64().unwrap();
        let scaling = RotaryScaling {
            factor: number("factor"),
            low_frequency_factor: number("low_frequency_factor"),
            high_frequency_factor: number("high_frequency_factor"),
            original_positions: self.size("original_positions"),
        };
        LlamaConfig {
            vocab_size: self.size("vocab"),
            num_layers: self.size("layers"),
            hidden_size: self.size("hidden"),
            num_heads: self.size("heads"),
            num_kv_heads: self.size("kv_heads"),
            ffn_hidden_size: self.size("ffn"),
            seq_len: self.size("seq"),
            rotary: Rotary { theta: number("theta"), scaling: Some(scaling) },
            norm_eps: number("eps"),
            tie_embeddings: tied,
        }
    }

    /// The parameters at the start: the tied model takes all but the head.
    fn params(&self, tied: bool) -> Values {
        let all = self.0["params"].as_object().unwrap().iter();
        all.filter(|(name, _)| !(tied && *name == "lm_head.weight")).map(|(n, v)| (n.clone(), floats(v))).collect()
    }

    fn ids(&self, name: &str) -> Vec<i32> {
        self.0[name]["data"].as_array().unwrap().iter().map(|value| value.as_i64().unwrap() as i32).collect()
    }
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn floats(tensor: &Value) -> Vec<f32> {
    numbers(&tensor["data"]).into_iter().map(|value| value as f32).collect()
}

#[track_caller]
fn assert_near<A: Copy + Into<f64>, B: Copy + Into<f64>>(what: &str, got: &[A], wanted: &[B], tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}: number of elements");
    for (at, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let (got, wanted): (f64, f64) = (got.into(), wanted.into());
        let off = (got - wanted).abs();
        assert!(off <= tolerance, "{what}: element {at} is {got}, in PyTorch {wanted} ({off:.1e} off)");
    }
}

/// Gradients as they come.
#[derive(Default)]
struct Sums(BTreeMap<ParamId, Vec<f32>>);

impl GradSink for Sums {
    fn accumulate(&mut self, share: &Share, grad: Tensor) -> Result<()> {
        let sum = self.0.entry(share.id).or_insert_with(|| vec![0.0; grad.count()]);
        sum.iter_mut().zip(grad.to_vec::<f32>()?).for_each(|(sum, share)| *sum += share);
        Ok(())
    }

    fn ready(&mut self, _: ParamId) -> Result<()> {
        Ok(())
    }
}

/// What one rank gives: the loss, the logits, and of each parameter's gradient its runs by global place, and whether the
/// ranks' are to be summed.
type OfRank = (f64, Vec<f32>, Vec<(String, bool, Vec<(usize, Vec<f32>)>)>);

/// Loss, logits of the first sequence, and gradients of the whole model on a mesh.
fn run(fixture: &Fixture, tied: bool, (degree, region): (usize, Region), values: &Values) -> (f64, Vec<f32>, Values) {
    let mesh = Mesh::new([(Axis::Tp, degree)]).unwrap();
    let config = fixture.config(tied);
    let ranks: Vec<OfRank> = meshwork_testkit::run_world(degree, |world| {
        let rank = Arc::new(Rank::new(&mesh, Arc::clone(world.communicator())).unwrap());
        let mut declared = Declarations::new();
        let part = Part { layers: 0..config.num_layers, first: true, last: true };
        let stage = LlamaStage::new(&mut declared, &mesh, config, region, &part).unwrap();
        let (declared, device) = (Arc::new(declared), Cpu::device());
        let layout = [declared.ids().collect()];
        let mut params = Params::new(Arc::clone(&declared), &mesh, rank.coords(), &device, &layout, 0).unwrap();
        assert_eq!(declared.specs().len(), values.len());
        for id in declared.ids() {
            let (spec, (flat, place)) = (declared.spec(id), params.place(id));
            let local = &mut params.flats_mut()[flat].as_mut_slice::<f32>().unwrap()[place];
            spec.local(&mesh, rank.coords()).for_each_run(spec.dims, |start, range| {
                local[range.clone()].copy_from_slice(&values[&spec.name][start as usize..][..range.len()]);
            });
        }
        let tape = Tape::new(Arc::clone(&rank), Arc::new(params), device.clone(), Mode::Train, Position::default());
        let shape = [fixture.size("batch"), fixture.size("seq")];
        let ids = |name: &str| {
            let tensor = Tensor::from_slice(&device, &fixture.ids(name), shape).unwrap();
            tape.constant(tensor, Types::all(&mesh, Ty::Invariant))
        };
        let logits = stage.forward(&tape, &ids("inputs")).unwrap();
        let whole = stage.gather_logits(&logits).unwrap().tensor().to_vec::<f32>().unwrap();
        let loss = stage.loss(&logits, &ids("targets")).unwrap();
        let total: f64 = loss.tensor().to_vec::<f64>().unwrap().iter().sum();
        let unmasked = fixture.0["unmasked"].as_f64().unwrap();
        let mut sums = Sums::default();
        tape.backward_from_loss(&loss, 1.0 / unmasked, Weights::Now, &mut sums).unwrap();
        let gradients = declared.ids().map(|id| {
            let (spec, mut runs) = (declared.spec(id), Vec::new());
            spec.local(&mesh, rank.coords()).for_each_run(spec.dims, |start, range| {
                runs.push((start as usize, sums.0[&id][range].to_vec()));
            });
            (spec.name.clone(), tape.reads()[&id].get(Axis::Tp) == Some(Ty::Replicate), runs)
        });
        let columns = whole.len() / (shape[0] * shape[1]);
        let first = whole.chunks(columns).take(shape[1]).flat_map(|row| &row[..config.vocab_size]).copied().collect();
        (total / unmasked, first, gradients.collect())
    });
    let mut gradients: Values = values.iter().map(|(name, value)| (name.clone(), vec![0.0; value.len()])).collect();
    for (_, _, of_rank) in &ranks {
        for (name, partial, runs) in of_rank {
            let whole = gradients.get_mut(name).unwrap();
            for (start, run) in runs {
                for (to, from) in whole[*start..].iter_mut().zip(run) {
                    *to = if *partial { *to + from } else { *from };
                }
            }
        }
    }
    let (loss, logits, _) = ranks.into_iter().next().unwrap();
    (loss, logits, gradients)
}

fn norm(gradients: &Values) -> f64 {
    gradients.values().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt()
}

/// Three steps on the same batch against what was recorded of them. Gives the weights after them.
fn steps(
    what: &str,
    run: impl Fn(&Values) -> (f64, Vec<f32>, Values),
    mut weights: Values,
    (rule, lr, max_norm): (&dyn Optimizer, f64, Option<f64>),
    recorded: &Value,
) -> Values {
    let decayed = |name: &str| !name.contains("norm");
    let mut states: BTreeMap<String, Vec<Vec<f32>>> =
        weights.iter().map(|(name, w)| (name.clone(), vec![vec![0.0; w.len()]; rule.state_slots()])).collect();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 1..=3 {
        let (loss, _, gradients) = run(&weights);
        losses.push(loss);
        norms.push(norm(&gradients));
        let grad_scale = max_norm.map_or(1.0, |max_norm| clip_factor(norms[norms.len() - 1], max_norm));
        for (name, weights) in &mut weights {
            let mut slots: Vec<&mut [f32]> =
                states.get_mut(name).unwrap().iter_mut().map(|slot| &mut slot[..]).collect();
            let update = Update { step, lr, grad_scale, decay: decayed(name) };
            rule.update(update, weights, &gradients[name], &mut slots).unwrap();
        }
    }
    assert_near(&format!("{what}: losses"), &losses, &numbers(&recorded["losses"]), LOSS);
    assert_near(&format!("{what}: gradient norms"), &norms, &numbers(&recorded["grad_norms"]), 2.0 * LOSS);
    let after = run(&weights).0;
    assert_near(&format!("{what}: loss after"), &[after], &[recorded["loss_after"].as_f64().unwrap()], LOSS);
    weights
}

fn check(tied: bool) {
    let fixture = Fixture::read();
    let recorded = &fixture.0[if tied { "tied" } else { "untied" }];
    for mesh in MESHES {
        let what = format!("tp={}, {:?}, tied = {tied}", mesh.0, mesh.1);
        let run = |values: &Values| run(&fixture, tied, mesh, values);
        let params = fixture.params(tied);
        let (loss, logits, gradients) = run(&params);
        assert_near(&format!("{what}: loss"), &[loss], &[recorded["loss"].as_f64().unwrap()], LOSS);
        assert_near(&format!("{what}: logits"), &logits, &floats(&recorded["logits_0"]), LOGITS);
        let wanted = recorded["grads"].as_object().unwrap();
        assert_eq!(gradients.len(), wanted.len(), "{what}: number of gradients");
        for (name, wanted) in wanted {
            assert_near(&format!("{what}: gradient of {name}"), &gradients[name], &floats(wanted), GRADIENTS);
        }

        let value = |of: &str, name: &str| fixture.0[of][name].as_f64().unwrap();
        let of = |name: &str| value("adamw", name);
        let adamw = AdamW { beta1: of("beta1"), beta2: of("beta2"), eps: of("eps"), weight_decay: of("weight_decay") };
        let by = (&adamw as &dyn Optimizer, of("lr"), Some(of("max_norm")));
        let finals = steps(&format!("{what}, adamw"), run, params.clone(), by, &recorded["adamw"]);
        for (name, wanted) in recorded["adamw"]["final"].as_object().unwrap() {
            assert_near(&format!("{what}: {name} after adamw"), &finals[name], &floats(wanted), WEIGHTS);
        }
        let sgd = Sgd { momentum: value("sgd", "momentum"), weight_decay: 0.0 };
        steps(&format!("{what}, sgd"), run, params, (&sgd, value("sgd", "lr"), None), &recorded["sgd"]);
    }
}

#[test]
fn tied_embeddings_are_those_of_pytorch() {
    check(true);
}

#[test]
fn untied_embeddings_are_those_of_pytorch() {
    check(false);
}

fn preset(name: &str) -> LlamaConfig {
    PRESETS.into_iter().find(|(preset, _)| *preset == name).unwrap().1
}

fn declared(config: LlamaConfig, tp: usize, parts: &[Part]) -> Declarations {
    let (mut all, mesh) = (Declarations::new(), Mesh::new([(Axis::Tp, tp)]).unwrap());
    for part in parts {
        LlamaStage::new(&mut all, &mesh, config, Region::Invariant, part).unwrap();
    }
    all
}

/// As many parameters as the published models have.
#[test]
fn published_shapes_have_their_published_sizes() {
    let sizes = [
        ("llama-tiny", 803_968),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ];
    for (name, size) in sizes {
        let config = preset(name);
        let all = declared(config, 4, &Part::cut(&[config.num_layers]));
        assert_eq!(all.specs().iter().map(|spec| spec.global_elements()).sum::<usize>(), size, "{name}");
    }
}

/// Any cut into stages, and any degree, declares the same parameters; norms are not decayed.
#[test]
fn any_cut_and_degree_declares_the_same_parameters() {
    let config = preset("llama-tiny");
    let names = |all: &Declarations| {
        all.specs().iter().map(|spec| (spec.name.clone(), spec.dims, spec.role, spec.init)).collect::<Vec<_>>()
    };
    let whole = names(&declared(config, 1, &Part::cut(&[4])));
    for (tp, cut) in [(1, &[2, 2][..]), (2, &[0, 1, 3]), (4, &[4, 0])] {
        assert_eq!(names(&declared(config, tp, &Part::cut(cut))), whole, "tp={tp}, {cut:?}");
    }
    assert!(whole.iter().all(|(name, _, role, _)| name.contains("norm") == (*role == Role::Norm)));
    let tied = declared(LlamaConfig { tie_embeddings: true, ..config }, 1, &Part::cut(&[4]));
    assert_eq!(tied.specs().len(), whole.len() - 1);
}
