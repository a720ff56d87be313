//! Layers of images: what they declare, and how batch norm goes from its own statistics in training to the moving
//! averages in evaluation.

use meshwork_core::{Rank, Types};
use meshwork_cpu::Cpu;
use meshwork_nn::{BatchNorm2d, Conv2d, GroupNorm};
use meshwork_tensor::random::{key, normal};
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Init, Params, Role, Shape, Tape, Tensor, Var};
use meshwork_testkit::parity::assert_close;
use std::sync::Arc;

fn values(name: &str, count: usize) -> Vec<f32> {
    (0..count as u64).map(|i| normal(key(2, name), i)).collect()
}

/// A tape over these parameters with their initial values.
fn tape(declarations: &Declarations, mode: Mode, first_sample: u64) -> Tape {
    let (rank, device) = (Arc::new(Rank::alone().unwrap()), Cpu::device());
    let (shared, layout) = (Arc::new(declarations.clone()), [declarations.ids().collect()]);
    let params = Params::new(shared, rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
    Tape::new(rank, Arc::new(params), device, mode, Position { first_sample, ..Position::default() })
}

fn images(tape: &Tape, values: &[f32], shape: [usize; 4]) -> Var {
    tape.input(Tensor::from_slice(tape.device(), values, shape).unwrap(), Types::NONE)
}

fn wide(x: &Var) -> Vec<f64> {
    x.tensor().to_vec::<f32>().unwrap().into_iter().map(f64::from).collect()
}

#[test]
fn layers_declare_their_parameters_and_keep_extents() {
    let mut declared = Declarations::new();
    let conv = Conv2d::new(&mut declared, "conv", [4, 6], [3, 2], true, Init::kaiming_normal(36)).unwrap();
    let pixels = Conv2d::new(&mut declared, "pixels", [6, 8], [1, 1], false, Init::kaiming_normal(6)).unwrap();
    let norm = GroupNorm::new(&mut declared, "norm", 8, 4, true).unwrap();
    BatchNorm2d::new(&mut declared, "batch", 8, true).unwrap();
    GroupNorm::new(&mut declared, "scaled", 8, 4, false).unwrap();
    BatchNorm2d::new(&mut declared, "scaled_batch", 8, false).unwrap();
    let he = |terms: f32| Init::Normal { std: (2.0 / terms).sqrt() };
    let expected: [(&str, &[usize], Role, Init); 13] = [
        ("conv.weight", &[6, 3, 3, 4], Role::Weight, he(36.0)),
        ("conv.bias", &[6], Role::Bias, Init::Zeros),
        ("pixels.weight", &[8, 1, 1, 6], Role::Weight, he(6.0)),
        ("norm.weight", &[8], Role::Norm, Init::Ones),
        ("norm.bias", &[8], Role::Norm, Init::Zeros),
        ("batch.running_mean", &[8], Role::Buffer, Init::Zeros),
        ("batch.running_var", &[8], Role::Buffer, Init::Ones),
        ("batch.weight", &[8], Role::Norm, Init::Ones),
        ("batch.bias", &[8], Role::Norm, Init::Zeros),
        ("scaled.weight", &[8], Role::Norm, Init::Ones),
        ("scaled_batch.running_mean", &[8], Role::Buffer, Init::Zeros),
        ("scaled_batch.running_var", &[8], Role::Buffer, Init::Ones),
        ("scaled_batch.weight", &[8], Role::Norm, Init::Ones),
    ];
    assert_eq!(declared.specs().len(), expected.len());
    for (spec, (name, dims, role, init)) in declared.specs().iter().zip(expected) {
        assert_eq!((spec.name.as_str(), spec.dims, spec.role, spec.init), (name, Shape::new(dims), role, init));
    }
    let tape = tape(&declared, Mode::Train, 0);
    let x = images(&tape, &values("x", 2 * 7 * 5 * 4), [2, 7, 5, 4]);
    let y = conv.forward(&tape, &x).unwrap();
    assert_eq!(y.shape()[..], [2, 4, 3, 6]);
    let y = norm.forward(&tape, &pixels.forward(&tape, &y).unwrap()).unwrap();
    assert_eq!(y.shape()[..], [2, 4, 3, 8]);
}

/// Two micro-batches of a mini-batch, then evaluation: by hand, from all samples of the mini-batch. A bias begins with
/// zeros, so that a norm has the same results with it and without.
#[test]
fn evaluation_uses_moving_averages_of_whole_mini_batches() {
    for bias in [true, false] {
        check_moving_averages(bias);
    }
}

fn check_moving_averages(bias: bool) {
    const C: usize = 3;
    let mut declared = Declarations::new();
    let norm = BatchNorm2d::new(&mut declared, "norm", C, bias).unwrap();
    let x = values("x", 4 * 2 * 2 * C);
    let by = |mean: [f64; C], variance: [f64; C]| {
        let one = |(i, &x): (usize, &f32)| (f64::from(x) - mean[i % C]) / (variance[i % C] + BatchNorm2d::EPS).sqrt();
        x.iter().enumerate().map(one).collect::<Vec<f64>>()
    };
    let evaluation = tape(&declared, Mode::Evaluate, 0);
    let before = norm.forward(&evaluation, &images(&evaluation, &x, [4, 2, 2, C])).unwrap();
    assert_close("before training", &wide(&before), &by([0.0; C], [1.0; C]), 0.0);
    assert!(evaluation.take_notes().statistics.is_empty(), "evaluation notes nothing");

    let mut sums: Vec<f64> = Vec::new();
    let statistic = &declared.statistics()[0];
    for samples in [0..1, 1..4] {
        let tape = tape(&declared, Mode::Train, samples.start as u64);
        let part = &x[samples.start * 4 * C..samples.end * 4 * C];
        norm.forward(&tape, &images(&tape, part, [samples.len(), 2, 2, C])).unwrap();
        let notes = tape.take_notes().statistics;
        let [note] = &notes[..] else { panic!("one note for each micro-batch") };
        let values: Vec<f32> = note.values.iter().flat_map(|values| values.to_vec::<f32>().unwrap()).collect();
        let terms = statistic.rule.terms(note.weight, &values);
        sums.resize(terms.len(), 0.0);
        sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
    }
    let mut buffers = [vec![0.0; C], vec![1.0; C]];
    statistic.rule.update(&sums, &mut buffers);
    let m = BatchNorm2d::MOMENTUM;
    for c in 0..C {
        let of: Vec<f64> = x.iter().skip(c).step_by(C).map(|&x| f64::from(x)).collect();
        let mean = of.iter().sum::<f64>() / 16.0;
        let variance = of.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 15.0;
        assert!((f64::from(buffers[0][c]) - m * mean).abs() < 1e-6, "{buffers:?}");
        assert!((f64::from(buffers[1][c]) - (1.0 - m + m * variance)).abs() < 1e-6, "{buffers:?}");
    }
}
