//! The losses against those of a published implementation, recorded by `tests/fixtures/losses.py`, and against numbers
//! worked out by hand.

use meshwork_core::{Rank, Types};
use meshwork_cpu::Cpu;
use meshwork_moe::balance::{Load, gshard_loss, switch_loss, z_loss};
use meshwork_moe::{MoeConfig, RouterKind, capacity};
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Mode, Normaliser, Position, Weights};
use meshwork_tensor::{Declarations, Params, Result, Tape, Tensor, Var};
use serde_json::Value;
use std::sync::Arc;

fn tape() -> Tape {
    let (rank, device) = (Arc::new(Rank::alone().unwrap()), Cpu::device());
    let params = Params::new(Arc::new(Declarations::new()), rank.mesh(), rank.coords(), &device, &[], 0).unwrap();
    Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default())
}

fn numbers(of: &Value) -> Vec<f64> {
    of.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The k largest of each row of probabilities `[samples, seq, experts]`.
fn top(probabilities: &Var, k: usize) -> Tensor {
    let shape = probabilities.shape();
    let chosen: Vec<i32> = probabilities
        .tensor()
        .to_vec::<f64>()
        .unwrap()
        .chunks(shape[2])
        .flat_map(|row| {
            let mut order: Vec<i32> = (0..row.len() as i32).collect();
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
            order[..k].to_vec()
        })
        .collect();
    Tensor::from_slice(probabilities.tape().device(), &chosen, [shape[0], shape[1], k]).unwrap()
}

/// The mean over sequences of a loss of the logits, and its gradient, against a recorded one times `factor`.
#[track_caller]
fn check(recorded: &Value, logits: &[f64], shape: [usize; 3], factor: f64, loss: impl Fn(&Var) -> Result<Var>) {
    let tape = tape();
    let x = tape.input(Tensor::from_slice(tape.device(), logits, shape).unwrap(), Types::NONE);
    let losses = loss(&x).unwrap();
    let values = losses.tensor().to_vec::<f64>().unwrap();
    tape.backward_from_loss(
        &losses,
        Normaliser::LocalTerms(values.len() as u64),
        Weights::Now,
        &mut Gradients::default(),
    )
    .unwrap();
    let mean = factor * values.iter().sum::<f64>() / values.len() as f64;
    let want = recorded["loss"].as_f64().unwrap();
    assert!((mean - want).abs() <= 1e-6 * want.abs(), "{mean}, recorded {want}");
    let gradient = tape.take_grad(&x).unwrap().to_vec::<f64>().unwrap();
    for (got, want) in gradient.iter().zip(numbers(&recorded["gradient"])) {
        assert!((factor * got - want).abs() <= 1e-6, "gradient {}, recorded {want}", factor * got);
    }
}

#[test]
fn losses_are_those_of_transformers() {
    let recorded: Value = serde_json::from_str(include_str!("../fixtures/losses.json")).unwrap();
    let logits = numbers(&recorded["logits"]);
    let [samples, seq, experts] = [0, 1, 2].map(|i| recorded["shape"][i].as_u64().unwrap() as usize);
    let shape = [samples, seq, experts];
    let switch = |x: &Var, k| {
        let probabilities = x.softmax()?;
        switch_loss(&probabilities, &Load::of_sequences(&top(&probabilities, k), experts)?)
    };
    check(&recorded["switch"], &logits, shape, 1.0, |x| switch(x, 1));
    check(&recorded["z_loss"], &logits, shape, 1.0, z_loss);
    for k in 1..=3 {
        check(&recorded["mixtral"][k.to_string()], &logits, [1, samples * seq, experts], k as f64, |x| switch(x, k));
    }
}

/// Four tokens, two experts, three tokens at expert 0.
#[test]
fn losses_by_hand() {
    let tape = tape();
    let probabilities = [0.75, 0.25, 0.75, 0.25, 0.5, 0.5, 0.25, 0.75];
    let p = tape.input(Tensor::from_slice(tape.device(), &probabilities, [1, 4, 2]).unwrap(), Types::NONE);
    let choices = Tensor::from_slice(tape.device(), &[0, 0, 0, 1], [1, 4, 1]).unwrap();
    let load = Load::of_sequences(&choices, 2).unwrap();
    let item = |loss: Var| loss.tensor().to_vec::<f64>().unwrap()[0];
    // f = (3/4, 1/4), P = (9/16, 7/16): Σ f P = 34/64.
    assert_eq!(item(switch_loss(&p, &load).unwrap()), 2.0 * 34.0 / 64.0);
    assert_eq!(item(gshard_loss(&p, &load).unwrap()), 34.0 / 64.0 / 2.0);
    // Even: the least there is.
    let even = Tensor::from_slice(tape.device(), &[0, 1, 0, 1], [1, 4, 1]).unwrap();
    let half = tape.input(Tensor::from_slice(tape.device(), &[0.5; 8], [1, 4, 2]).unwrap(), Types::NONE);
    assert_eq!(item(switch_loss(&half, &Load::of_sequences(&even, 2).unwrap()).unwrap()), 1.0);
    // Two experts of each token, all of which are chosen.
    let both = Tensor::from_slice(tape.device(), &[0, 1, 0, 1, 0, 1, 0, 1], [1, 4, 2]).unwrap();
    assert_eq!(item(switch_loss(&half, &Load::of_sequences(&both, 2).unwrap()).unwrap()), 1.0);
}

#[test]
fn an_even_share_times_the_factor() {
    let of = |router, top_k, capacity_factor, tokens| {
        capacity(&MoeConfig { num_experts: 8, top_k, router, capacity_factor, ..MoeConfig::default() }, tokens)
    };
    assert_eq!(of(RouterKind::Switch, 1, 1.0, 128), Some(16));
    assert_eq!(of(RouterKind::Switch, 1, 1.25, 128), Some(20));
    assert_eq!(of(RouterKind::Gshard, 2, 1.0, 128), Some(32), "GShard's 2N/(G·E)");
    assert_eq!(of(RouterKind::TopK, 2, 0.0, 128), None, "dropless");
    assert_eq!(of(RouterKind::Switch, 1, 1.0, 1), Some(1), "a sequence of one token");
    assert_eq!(of(RouterKind::Switch, 1, 1.0, 9), Some(2), "rounded up");
    assert_eq!(of(RouterKind::TopK, 2, 100.0, 6), Some(6), "no more than there are");
    assert_eq!(of(RouterKind::ExpertChoice, 2, 0.0, 128), Some(32));
}
