//! Layers of images: what they declare, and how batch norm goes from its own statistics in training to the moving averages in evaluation.

use meshwork_core::{Rank, Types};
use meshwork_nn::{Averages, BatchNorm2d, Conv2d, GroupNorm};
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::random::{key, normal};
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Device, Init, Params, Role, Shape, Tape, Tensor, Var};
use meshwork_testkit::opaque::Opaque;
use meshwork_testkit::parity::assert_close;
use std::sync::Arc;

fn values(name: &str, count: usize) -> Vec<f32> {
    (0..count as u64).map(|i| normal(key(2, name), i)).collect()
}

/// A tape over these parameters as they are at first.
fn tape(declarations: &Declarations, mode: Mode, first_sample: u64) -> Tape {
    tape_on(&Cpu::device(), declarations, mode, first_sample)
}

fn tape_on(device: &Arc<dyn Device>, declarations: &Declarations, mode: Mode, first_sample: u64) -> Tape {
    let rank = Arc::new(Rank::alone().unwrap());
    let (shared, layout) = (Arc::new(declarations.clone()), [declarations.ids().collect()]);
    let params = Params::new(shared, rank.mesh(), rank.coords(), device, &layout, 0).unwrap();
    let position = Position { first_sample, ..Position::default() };
    Tape::new(rank, Arc::new(params), Arc::clone(device), mode, position)
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
    let conv = Conv2d::new(&mut declared, "conv", 4, 6, 3, 2, true).unwrap();
    let pixels = Conv2d::new(&mut declared, "pixels", 6, 8, 1, 1, false).unwrap();
    let norm = GroupNorm::new(&mut declared, "norm", 8, 4).unwrap();
    BatchNorm2d::new(&mut declared, "batch", 8).unwrap();
    let he = |terms: f32| Init::Normal { std: (2.0 / terms).sqrt() };
    let expected: [(&str, &[usize], Role, Init); 7] = [
        ("conv.weight", &[6, 3, 3, 4], Role::Weight, he(36.0)),
        ("conv.bias", &[6], Role::Bias, Init::Zeros),
        ("pixels.weight", &[8, 1, 1, 6], Role::Weight, he(6.0)),
        ("norm.weight", &[8], Role::Norm, Init::Ones),
        ("norm.bias", &[8], Role::Norm, Init::Zeros),
        ("batch.weight", &[8], Role::Norm, Init::Ones),
        ("batch.bias", &[8], Role::Norm, Init::Zeros),
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

/// Two micro-batches of a mini-batch, then evaluation: by hand, from all samples of the mini-batch.
#[test]
fn evaluation_uses_moving_averages_of_whole_mini_batches() {
    const C: usize = 3;
    let (mut declared, mut averages) = (Declarations::new(), Averages::new(1.0));
    let norm = BatchNorm2d::new(&mut declared, "norm", C).unwrap();
    let x = values("x", 4 * 2 * 2 * C);
    let evaluate = |averages: &mut Averages| {
        let tape = tape(&declared, Mode::Evaluate, 0);
        wide(&norm.forward(&tape, &images(&tape, &x, [4, 2, 2, C]), averages).unwrap())
    };
    let by = |mean: [f64; C], variance: [f64; C]| {
        let one = |(i, &x): (usize, &f32)| (f64::from(x) - mean[i % C]) / (variance[i % C] + BatchNorm2d::EPS).sqrt();
        x.iter().enumerate().map(one).collect::<Vec<f64>>()
    };
    assert_close("before training", &evaluate(&mut averages), &by([0.0; C], [1.0; C]), 0.0);
    let mut train = |samples: std::ops::Range<usize>| {
        let tape = tape(&declared, Mode::Train, samples.start as u64);
        let part = &x[samples.start * 4 * C..samples.end * 4 * C];
        wide(&norm.forward(&tape, &images(&tape, part, [samples.len(), 2, 2, C]), &mut averages).unwrap())
    };
    let (first, second) = (train(0..1), train(1..4));
    assert_eq!(train(0..1), first, "again, as re-materialisation does");
    averages.update(|_| Ok(())).unwrap();
    let of = |channel: usize| x.iter().skip(channel).step_by(C).map(|&x| f64::from(x)).collect::<Vec<_>>();
    let mean = std::array::from_fn(|c| of(c).iter().sum::<f64>() / 16.0);
    let variance = std::array::from_fn(|c| of(c).iter().map(|x| (x - mean[c]).powi(2)).sum::<f64>() / 15.0);
    assert_close("after a step", &evaluate(&mut averages), &by(mean, variance), 0.0);
    assert_ne!(evaluate(&mut averages), [first, second].concat(), "not by those of the micro-batches");
}

/// The statistics of all layers and micro-batches come to the host at once, and are the same numbers wherever they were taken.
#[test]
fn a_step_brings_statistics_to_the_host_in_one_download() {
    const C: usize = 3;
    let mut declared = Declarations::new();
    let norms = ["first", "second"].map(|name| BatchNorm2d::new(&mut declared, name, C).unwrap());
    let x = values("x", 4 * 2 * 2 * C);
    let step = |device: &Arc<dyn Device>, micros: usize| {
        let mut averages = Averages::new(0.5);
        let before = device.meter().downloads().calls;
        let samples = 4 / micros;
        for first in (0..4).step_by(samples) {
            let tape = tape_on(device, &declared, Mode::Train, first as u64);
            let part = &x[first * 4 * C..(first + samples) * 4 * C];
            let mut y = images(&tape, part, [samples, 2, 2, C]);
            for norm in &norms {
                y = norm.forward(&tape, &y.relu().unwrap(), &mut averages).unwrap();
            }
        }
        averages.update(|_| Ok(())).unwrap();
        assert_eq!(device.meter().downloads().calls - before, 1, "{micros} micro-batches on {}", device.name());
        averages.update(|_| Ok(())).unwrap();
        assert_eq!(device.meter().downloads().calls - before, 1, "nothing was noted");
        averages.layers().map(|(_, mean, variance)| [mean, variance].concat()).collect::<Vec<_>>()
    };
    for micros in [1, 2, 4] {
        let (cpu, opaque) = (Cpu::device(), Opaque::device(Cpu::device()));
        let reference = step(&cpu, micros);
        assert_eq!(reference.len(), 2, "layers");
        assert_eq!(step(&opaque, micros), reference, "{micros} micro-batches");
    }
}
