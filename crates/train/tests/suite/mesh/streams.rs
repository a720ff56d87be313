//! Asynchronous schedules against a serial simulation of the published update equations, by gradients of one rank.

use crate::mesh::cases::{BATCH, Case, HIDDEN, Model, SEQ, UNTIED};
use crate::mesh::schedules::{Whole, advance, batches, weights};
use crate::mesh::world::{cpu, on_mesh, pieces, train, try_on_mesh};
use meshwork_core::comm::thread::Options;
use meshwork_models::language::{self, TARGETS, TOKENS};
use meshwork_nn::Batch;
use meshwork_pipeline::lower;
use meshwork_testkit::parity::{assert_close, norm_of_all};
use meshwork_train::config::Config;

/// Gradient descent without clipping: the published equations of asynchronous training assume this.
const LR: f32 = 0.5;
pub const DESCENT: &str = "[optimizer]\nname = 'sgd'\nlr = 0.5\nmomentum = 0.0\nweight_decay = 0.0\n\
                       [training]\nmax_norm = 0.0\nglobal_batch_size = 16\n";

/// The gradients of one rank on `rows` of a batch at given weights, and the loss.
fn gradients(model: &'static Model, weights: &Whole, rows: &Batch) -> (f64, Whole) {
    let text = DESCENT.replace("global_batch_size = 16", &format!("global_batch_size = {}", rows.samples()));
    let config = Case::alone(model).config(&text);
    let mut ranks = on_mesh(&config, |mut trainer| {
        for (name, whole) in weights {
            trainer.load_parameter(name, whole)?;
        }
        let report = trainer.step(rows)?;
        let gradients = pieces(&trainer)?.into_iter().map(|piece| (piece.name, piece.gradient.values)).collect();
        Ok((report.loss, gradients))
    });
    ranks.remove(0)
}

fn unmasked(batch: &Batch) -> usize {
    language::unmasked(batch, 0..batch.samples()).unwrap() as usize
}

/// Training by an update equation, one micro-batch after the other: update k is by the gradients of micro-batches
/// [k·per_update, (k+1)·per_update), each at the weights after `version(stage, micro)` updates.
fn simulate(case: &Case, steps: u64, per_update: usize, version: impl Fn(usize, usize) -> usize) -> (Vec<f64>, Whole) {
    let model = case.model;
    let config = case.config(DESCENT);
    // Layers by stage: parameters of layer l are called `h.l.`.
    let mut stage_of_layer = Vec::new();
    for (stage, &layers) in config.pipeline.partition.iter().enumerate() {
        stage_of_layer.extend(vec![stage; layers]);
    }
    let stage_of = |name: &str| match name.strip_prefix("h.").and_then(|rest| rest.split('.').next()) {
        Some(layer) => stage_of_layer[layer.parse::<usize>().unwrap()],
        None if name.starts_with("w") => 0,
        None => case.pp - 1,
    };
    let start = on_mesh(&Case::alone(model).config(DESCENT), |trainer| pieces(&trainer));
    let mut versions = vec![weights("start", &start)];
    let data = model.data();
    let rows = BATCH / case.dp / case.micros;
    let mut losses = Vec::new();
    for step in 0..steps {
        let batch = data.batch(step, BATCH, 0..BATCH).unwrap();
        // Micro-batch k of all dp ranks together.
        let micro = |k: usize| {
            let pick = |field| {
                let all = batch.values::<i32>(field).unwrap();
                let of_rank = |dp| {
                    let first = dp * BATCH / case.dp + k * rows;
                    &all[first * SEQ..(first + rows) * SEQ]
                };
                (0..case.dp).flat_map(of_rank).copied().collect::<Vec<i32>>()
            };
            language::batch(pick(TOKENS), pick(TARGETS), SEQ).unwrap()
        };
        let (mut loss, mut tokens) = (0.0, 0);
        for first in (0..case.micros).step_by(per_update) {
            let parts: Vec<Batch> = (first..first + per_update).map(micro).collect();
            let total: usize = parts.iter().map(unmasked).sum();
            let mut sum: Whole = versions[0].iter().map(|(name, w)| (name.clone(), vec![0.0; w.len()])).collect();
            for (k, part) in parts.iter().enumerate() {
                let number = step as usize * case.micros + first + k;
                let at: Whole = versions[0]
                    .keys()
                    .map(|name| (name.clone(), versions[version(stage_of(name), number)][name].clone()))
                    .collect();
                let (mean, gradients) = gradients(model, &at, part);
                let share = unmasked(part) as f64 / total as f64;
                loss += mean * unmasked(part) as f64;
                for (name, gradient) in gradients {
                    let sum = sum.get_mut(&name).unwrap();
                    sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += (share * f64::from(g)) as f32);
                }
            }
            tokens += total;
            let mut next = versions.last().unwrap().clone();
            for (name, weights) in &mut next {
                weights.iter_mut().zip(&sum[name]).for_each(|(w, g)| *w -= LR * g);
            }
            versions.push(next);
        }
        losses.push(loss / tokens as f64);
    }
    (losses, versions.pop().unwrap())
}

/// Compares a stream of steps with the simulation, and its weight versions with the predicted ones.
fn check_stream(case: &Case, steps: u64, per_update: usize, version: impl Fn(usize, usize) -> usize) {
    check_config(case, &case.config(DESCENT), steps, per_update, version);
}

fn check_config(case: &Case, config: &Config, steps: u64, per_update: usize, version: impl Fn(usize, usize) -> usize) {
    let name = case.to_string();
    let spec = config.pipeline.spec().unwrap();
    let schedule = spec.build_steps(case.pp, config.pipeline.num_microbatches, steps as usize).unwrap();
    let promised = lower(&schedule).unwrap().report().clone();
    let ranks = on_mesh(config, |mut trainer| {
        let batches = batches(case.model, &trainer, steps);
        let reports = advance(&mut trainer, &batches, |_| {})?;
        let pp_rank = trainer.rank().coords().get(meshwork_core::Axis::Pp);
        Ok((reports, pp_rank, trainer.peaks(), pieces(&trainer)?))
    });
    let (losses, wanted) = simulate(case, steps, per_update, version);
    let mut held = Vec::new();
    for (reports, pp_rank, peaks, pieces) in ranks {
        let got: Vec<f64> = reports.iter().map(|report| report.loss).collect();
        for (step, (got, wanted)) in got.iter().zip(&losses).enumerate() {
            let off = (got - wanted).abs() / wanted;
            assert!(off < 1e-5, "{name}: loss of step {} is {got}, by the equation {wanted}", step + 1);
        }
        assert_eq!(got.len(), steps as usize, "{name}");
        let promise = (promised.peaks[pp_rank], promised.weight_versions[pp_rank]);
        assert_eq!(peaks, promise, "{name}: activations and weight versions of pp rank {pp_rank}");
        held.push(pieces);
    }
    let got = weights(&name, &held);
    let all = norm_of_all(wanted.values().map(Vec::as_slice));
    for (parameter, wanted) in &wanted {
        assert_close(&format!("{name}: weights of {parameter}"), &got[parameter], wanted, all);
    }
}

pub fn stream(dp: usize, pp: usize, micros: usize, schedule: &'static str) -> Case {
    Case { dp, pp, micros, schedule, ..Case::alone(&UNTIED) }
}

/// PipeDream (Narayanan et al. 2019, section 3.3), with n stages counted from 0: update t is by the gradient of
/// micro-batch t at the weights of stage s after t - (n - 1 - s) updates.
#[test]
fn pipedream_follows_its_equation() {
    for (dp, pp, micros, steps) in [(1, 2, 4, 3), (1, 4, 4, 3), (2, 2, 4, 2), (1, 1, 4, 2), (1, 4, 8, 1), (1, 4, 2, 4)]
    {
        let case = stream(dp, pp, micros, "pipedream");
        check_stream(&case, steps, 1, |stage, t| (t + stage + 1).saturating_sub(pp));
    }
}

/// With vertical sync (the same section): every stage at the weights after t - (n - 1) updates.
#[test]
fn vertical_sync_follows_its_equation() {
    for (dp, pp, micros, steps) in [(1, 2, 4, 3), (1, 4, 4, 3), (2, 2, 4, 2), (1, 4, 2, 4)] {
        let case = stream(dp, pp, micros, "pipedream");
        let mut config = case.config(DESCENT);
        config.pipeline.vertical_sync = true;
        check_config(&case, &config, steps, 1, |_, t| (t + 1).saturating_sub(pp));
    }
}

/// PipeDream-2BW (Narayanan et al. 2021, section 3.1): W(t+1) = W(t) - lr · ∇f(W(t-1)) over the batch t; W(-1) is W(0).
#[test]
fn pipedream_2bw_follows_its_equation() {
    for (dp, pp, micros, steps) in [(1, 2, 2, 4), (1, 4, 4, 3), (2, 2, 4, 3), (1, 1, 2, 3), (2, 2, 2, 2)] {
        let case = stream(dp, pp, micros, "pipedream_2bw");
        check_stream(&case, steps, micros, |_, k| (k / micros).saturating_sub(1));
    }
}

/// A stream that is drained after every step starts anew from its last weights.
#[test]
fn a_stream_may_be_drained_between_steps() {
    let case = stream(2, 2, 4, "pipedream_2bw");
    let config = case.config(DESCENT);
    let data = case.model.data();
    let held = on_mesh(&config, |mut trainer| {
        for _ in 0..3 {
            train(&mut trainer, &data, &config)?;
        }
        pieces(&trainer)
    });
    // Every batch at the newest weights: plain gradient descent.
    let (_, wanted) = simulate(&case, 3, 4, |_, k| k / 4);
    let got = weights("drained", &held);
    let all = norm_of_all(wanted.values().map(Vec::as_slice));
    for (parameter, wanted) in &wanted {
        assert_close(&format!("weights of {parameter}"), &got[parameter], wanted, all);
    }
}

/// Weights have been updated by the time that a bad step is noticed, so the error does not promise the old weights.
/// Ranks notice it at different times; all of them name the first rank that did.
#[test]
fn a_step_that_is_not_finite_is_told_as_it_is() {
    for schedule in ["pipedream", "pipedream_2bw"] {
        let case = stream(1, 2, 2, schedule);
        let config = case.config(DESCENT);
        let device = |_| cpu(&config);
        let ended = try_on_mesh(&config, Options::default(), device, |mut trainer| {
            trainer.load_parameter("wpe.weight", &[f32::MAX; SEQ * HIDDEN])?;
            let batches = batches(case.model, &trainer, 3);
            advance(&mut trainer, &batches, |_| {})
        });
        let told = ended.unwrap_err().to_string();
        assert!(told.contains("step 1: the loss is NaN, and weights have been updated with it"), "{schedule}: {told}");
    }
}
