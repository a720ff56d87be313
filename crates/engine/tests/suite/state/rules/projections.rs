//! Every projection of every model is updated as a parameter of its own: two steps of each rule against the published
//! equations in f64, on the matrices `[out, in]` and vectors `[out]` that a Hugging Face file keeps apart: q, k, v,
//! gate and up, and those of each expert.

use super::super::{batch, llama, model, on, small_llama};
use super::{CANONICAL, cut, experts};
use crate::experts::in_every_layer;
use meshwork_core::Rank;
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{Compress, Numerics, Plan, StateKey, TrainError, Trainer, Vector, WholeState};
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::llama::Llama;
use meshwork_moe::{MoeConfig, RouterKind};
use meshwork_nn::Model;
use meshwork_optim::{Adafactor, AdamW, Lamb, Muon, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A Llama with four SwiGLU experts and a shared one in every other layer: a small Mixtral.
pub fn mixtral() -> Arc<dyn Model> {
    let moe = MoeConfig { num_experts: 4, router: RouterKind::TopK, top_k: 2, ..MoeConfig::default() };
    let experts = ExpertsConfig { every_n_layers: 2, num_shared_experts: 1, ..in_every_layer(moe, 32) };
    Arc::new(Llama::new(small_llama()).with_experts(Some(experts)))
}

/// How a parameter is kept apart: for each of its elements, by its name and dims, the projection and the place there,
/// with the extents of each projection.
fn apart(name: &str, dims: &[usize]) -> (impl Fn(usize) -> (usize, usize), [usize; 2], usize) {
    let (of_experts, dims) = match name.contains(".experts.") {
        true => (dims[0], &dims[1..]),
        false => (1, dims),
    };
    let (weight, pairs) = (name.ends_with(".weight"), name.contains("gate_up"));
    let stacked = if name.contains(".qkv.") || name.contains(".kv.") { dims[0] } else { 1 };
    let columns = match weight && dims.len() > 1 {
        true if name.contains(".out.") => dims[1..].iter().product(),
        true => dims[dims.len() - 1],
        false => 1,
    };
    let turns = if pairs { 2 } else { 1 };
    let all: usize = dims.iter().product();
    let rows = all / stacked / turns / columns;
    let place = move |element: usize| {
        let (expert, line, column) = (element / all, element % all / columns, element % columns);
        let (stack, line) = (line / (rows * turns), line % (rows * turns));
        let (row, turn) = (line / turns, line % turns);
        ((expert * stacked + stack) * turns + turn, row * columns + column)
    };
    (place, [rows, columns], of_experts * stacked * turns)
}

/// What the equations keep of a projection.
#[derive(Clone, Default)]
struct Kept(Vec<f64>, Vec<f64>);

const LR: f64 = 3e-4;

/// One step of a projection `[rows, columns]`, in f64.
fn step(
    (rule, t): (&Rule, i32),
    [rows, columns]: [usize; 2],
    (hidden, decays): (bool, bool),
    w: &mut [f64],
    g: &[f64],
    kept: &mut Kept,
) {
    let mean_square = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let Kept(first, second) = kept;
    first.resize(w.len(), 0.0);
    let decay = |weight_decay: f64| if decays { weight_decay } else { 0.0 };
    let adam = |of: &AdamW, w: &mut [f64], first: &mut [f64], second: &mut [f64]| {
        for at in 0..w.len() {
            first[at] += (1.0 - of.beta1) * (g[at] - first[at]);
            second[at] = of.beta2 * second[at] + (1.0 - of.beta2) * g[at] * g[at];
            let (m, v) = (first[at] / (1.0 - of.beta1.powi(t)), second[at] / (1.0 - of.beta2.powi(t)));
            w[at] = w[at] * (1.0 - LR * decay(of.weight_decay)) - LR * m / (v.sqrt() + of.eps);
        }
    };
    match rule {
        Rule::Lamb(of) => {
            second.resize(w.len(), 0.0);
            let step: Vec<f64> = (0..w.len())
                .map(|at| {
                    first[at] += (1.0 - of.beta1) * (g[at] - first[at]);
                    second[at] = of.beta2 * second[at] + (1.0 - of.beta2) * g[at] * g[at];
                    let (m, v) = (first[at] / (1.0 - of.beta1.powi(t)), second[at] / (1.0 - of.beta2.powi(t)));
                    m / (v.sqrt() + of.eps) + decay(of.weight_decay) * w[at]
                })
                .collect();
            let (size, of_step) = (mean_square(w).sqrt(), mean_square(&step).sqrt());
            let ratio = if size > 0.0 && of_step > 0.0 { size / of_step } else { 1.0 };
            w.iter_mut().zip(step).for_each(|(w, u)| *w -= LR * ratio * u);
        }
        Rule::Adafactor(of) => {
            let new = f64::from(t).powf(-of.decay_rate);
            let square = |at: usize| g[at] * g[at] + of.eps;
            let step: Vec<f64> = if rows > 1 && columns > 1 {
                second.resize(columns, 0.0);
                for (row, first) in first.iter_mut().enumerate().take(rows) {
                    let mean = (0..columns).map(|column| square(row * columns + column)).sum::<f64>() / columns as f64;
                    *first += new * (mean - *first);
                }
                for (column, second) in second.iter_mut().enumerate() {
                    let mean = (0..rows).map(|row| square(row * columns + column)).sum::<f64>() / rows as f64;
                    *second += new * (mean - *second);
                }
                let mean = first[..rows].iter().sum::<f64>() / rows as f64;
                (0..w.len()).map(|at| g[at] / (first[at / columns] * second[at % columns] / mean).sqrt()).collect()
            } else {
                (0..w.len()).for_each(|at| first[at] += new * (square(at) - first[at]));
                (0..w.len()).map(|at| g[at] / first[at].sqrt()).collect()
            };
            let size = match of.relative_step {
                true => mean_square(w).sqrt().max(of.eps_scale) * LR.min(1.0 / f64::from(t).sqrt()),
                false => LR,
            };
            let size = size / (mean_square(&step).sqrt() / of.clip_threshold).max(1.0);
            w.iter_mut().zip(step).for_each(|(w, u)| *w -= size * u);
        }
        Rule::Hidden { matrices, others } => {
            let (Rule::Muon(of), Rule::AdamW(adamw)) = (&**matrices, &**others) else { unreachable!() };
            if !hidden {
                second.resize(w.len(), 0.0);
                return adam(adamw, w, first, second);
            }
            (0..w.len()).for_each(|at| first[at] += (1.0 - of.momentum) * (g[at] - first[at]));
            let mut x: Vec<f64> = (0..w.len()).map(|at| g[at] + of.momentum * (first[at] - g[at])).collect();
            let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
            x.iter_mut().for_each(|x| *x /= norm);
            for _ in 0..5 {
                // In the smaller Gram matrix, whose powers have the same effect on either side.
                let product = |x: &[f64], y: &[f64], [m, k, n]: [usize; 3]| -> Vec<f64> {
                    let of = |i: usize| (0..k).map(|j| x[i / n * k + j] * y[j * n + i % n]).sum();
                    (0..m * n).map(of).collect()
                };
                let turned: Vec<f64> = (0..x.len()).map(|at| x[at % rows * columns + at / rows]).collect();
                let gram = product(&turned, &x, [columns, rows, columns]);
                let square = product(&gram, &gram, [columns; 3]);
                let (a, b, c) = (3.4445, -4.7750, 2.0315);
                let polynomial: Vec<f64> = gram.iter().zip(&square).map(|(one, two)| b * one + c * two).collect();
                let change = product(&x, &polynomial, [rows, columns, columns]);
                x.iter_mut().zip(change).for_each(|(x, change)| *x = a * *x + change);
            }
            let size = LR * 0.2 * (rows.max(columns) as f64).sqrt();
            w.iter_mut().zip(x).for_each(|(w, x)| *w = *w * (1.0 - LR * of.weight_decay) - size * x);
        }
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn every_projection_is_updated_as_a_parameter_of_its_own() {
    let rules = [
        Rule::from(Lamb::default()),
        Adafactor::default().into(),
        Adafactor { relative_step: false, ..Adafactor::default() }.into(),
        Rule::with_muon(Muon::default(), AdamW::default()),
    ];
    let mut fused: BTreeMap<String, usize> = BTreeMap::new();
    for (model, rule) in
        [model(), llama(), experts(), mixtral()].iter().flat_map(|model| rules.iter().map(move |rule| (model, rule)))
    {
        let mut plan = cut("dp=1", "gpipe", 0, CANONICAL, rule);
        plan.max_norm = 0.0;
        let mut trainer =
            Trainer::new(model.clone(), &plan, Arc::new(Rank::recording(&plan.mesh, 0).unwrap()), Cpu::device())
                .unwrap();
        let weights = |trainer: &Trainer, name: &str| -> Vec<f32> {
            let state = WholeState::merge(&[trainer.state().unwrap()]).unwrap();
            state.vector(&StateKey { parameter: name.to_owned(), state: None }).unwrap().to_vec()
        };
        let specs: Vec<_> = {
            let params = trainer.params();
            let declared = params.declarations();
            declared.ids().map(|id| (id, declared.spec(id).clone())).filter(|(_, spec)| !spec.group.frozen).collect()
        };
        let mut kept: BTreeMap<(String, usize), Kept> = BTreeMap::new();
        for t in 1..3 {
            let before: Vec<Vec<f32>> = specs.iter().map(|(_, spec)| weights(&trainer, &spec.name)).collect();
            trainer.step(&batch(t as u64, 0..16)).unwrap();
            for ((id, spec), before) in specs.iter().zip(before) {
                let (place, [rows, columns], projections) = apart(&spec.name, &spec.dims);
                if projections > 1 {
                    fused.insert(spec.name.trim_start_matches(|c: char| !c.is_ascii_digit()).to_owned(), projections);
                }
                let split = |values: &[f32]| {
                    let mut all = vec![vec![f64::NAN; rows * columns]; projections];
                    // Of a table canonical numerics pad the last rows.
                    let held = values.iter().take(spec.dims.iter().product()).enumerate();
                    held.for_each(|(at, x)| all[place(at).0][place(at).1] = f64::from(*x));
                    all
                };
                let [after, grads] = [weights(&trainer, &spec.name), trainer.gradient(*id).unwrap()].map(|x| split(&x));
                let weight = spec.name.ends_with("weight") && spec.dims.len() > 1;
                let hidden = weight
                    && !["wte", "wpe", "embed_tokens", "lm_head", "router"].iter().any(|of| spec.name.contains(of));
                for (number, mut wanted) in split(&before).into_iter().enumerate() {
                    let (state, start) = (kept.entry((spec.name.clone(), number)).or_default(), wanted.clone());
                    step((rule, t), [rows, columns], (hidden, weight), &mut wanted, &grads[number], state);
                    let (mut off, mut moved) = (0.0f64, 0.0f64);
                    for ((wanted, start), after) in wanted.iter().zip(&start).zip(&after[number]) {
                        off = off.max((wanted - after).abs());
                        moved = moved.max((wanted - start).abs());
                    }
                    // Weights in f32 of up to 1 are rounded by 6e-8; Newton-Schulz amplifies the rounding of its
                    // products.
                    assert!(
                        off < 1e-3 * moved + 1e-7,
                        "{} of {model:?}, projection {number}, step {t} of {rule:?}: {off:e} off, a step of {moved:e}",
                        spec.name
                    );
                }
            }
        }
    }
    // The fused parameters of all models.
    let ends = |end: &str| fused.iter().find(|(name, _)| name.ends_with(end)).map(|(_, projections)| *projections);
    for (name, projections) in [
        ("attn.qkv.weight", 3),
        ("attn.qkv.bias", 3),
        ("self_attn.kv.weight", 2),
        ("mlp.gate_up.weight", 2),
        ("shared.gate_up.weight", 2),
        ("experts.gate_up.weight", 8),
        ("experts.down.weight", 4),
        ("experts.up.bias", 4),
        ("experts.down.bias", 4),
    ] {
        assert_eq!(ends(name), Some(projections), "{name} of {fused:?}");
    }
}

/// What is left of a matrix `[rows, columns]` once `rank` pivots are eliminated, of the largest element: about 0 for a
/// matrix of that rank.
fn beyond(rank: usize, columns: usize, mut x: Vec<f64>) -> f64 {
    let most = |x: &[f64]| x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let whole = most(&x);
    for _ in 0..rank {
        let pivot = (0..x.len()).max_by(|&a, &b| x[a].abs().total_cmp(&x[b].abs())).unwrap();
        let (line, column, value) = (pivot / columns * columns, pivot % columns, x[pivot]);
        let row = x[line..line + columns].to_vec();
        for other in x.chunks_mut(columns) {
            let factor = other[column] / value;
            other.iter_mut().zip(&row).for_each(|(x, row)| *x -= factor * row);
        }
    }
    most(&x) / whole
}

/// Gradients that PowerSGD restores have the rank of its factors, in each projection: together they have more.
#[test]
fn powersgd_has_factors_of_each_projection() {
    let compress = Compress { gradients: "powersgd:2".parse().unwrap(), ..Compress::default() };
    for (mesh, model) in [("dp=2", model()), ("dp=2", llama()), ("dp=2,tp=2", llama()), ("dp=2", mixtral())] {
        let plan = Plan { compress, max_norm: 0.0, ..on(mesh, Numerics::Fast) };
        let fused = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
            trainer.step(&batch(0, trainer.samples()))?;
            let (params, mut fused) = (trainer.params(), 0);
            let declared = params.declarations();
            for id in declared.ids().filter(|&id| declared.spec(id).name.ends_with(".weight")) {
                let (spec, held) = (declared.spec(id), trainer.slices(id, Vector::Gradients).remove(0).stored);
                let hidden = ["qkv", "kv", "gate_up"].iter().any(|of| spec.name.contains(&format!(".{of}.")));
                let (place, [rows, columns], projections) = apart(&spec.name, &held);
                if !hidden || 2 * (rows + columns) >= rows * columns {
                    continue;
                }
                let gradient = trainer.gradient(id)?;
                let mut all = vec![vec![0.0; rows * columns]; projections];
                gradient.iter().enumerate().for_each(|(at, x)| all[place(at).0][place(at).1] = f64::from(*x));
                for one in &all {
                    let left = beyond(2, columns, one.clone());
                    assert!(left < 1e-3 || left.is_nan(), "{} on {mesh}: {left:e} beyond rank 2", spec.name);
                }
                // At first the gradients of queries and keys are far smaller than those of values.
                for one in &mut all {
                    let most = one.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    one.iter_mut().for_each(|x| *x /= most);
                }
                let left = beyond(2, columns, all.concat());
                assert!(left > 1e-2, "{} on {mesh}: all projections together have rank 2", spec.name);
                fused += 1;
            }
            Ok::<_, TrainError>(fused)
        });
        let fused = fused.unwrap_or_else(|error| panic!("{error}"));
        assert!(fused.iter().all(|&fused| fused > 1), "{mesh}: {fused:?}");
    }
}
