//! Sums of squares, updates and zeros over ranges of one piece and of several.

use meshwork_core::Buffer;
use meshwork_core::exact::{self, LIMBS};
use meshwork_cpu::Cpu;
use meshwork_cpu::kernels::Float;
use meshwork_optim::{OptimError, Optimizer, Rule, Update};
use meshwork_tensor::kernel::{FlatParts, Optim};
use meshwork_tensor::random::{fill_normal, key};

/// Elements that a thread takes at a time.
const PIECE: usize = 1 << 15;

fn buffer(x: &[f32]) -> Buffer {
    Buffer::from_slice(x)
}

/// The order spelled out with its own numbers, over ranges of one piece and several.
#[test]
fn squares_are_summed_in_the_documented_order() {
    let mut x = vec![0.0_f32; 100_000];
    fill_normal(key(0, "squares"), 0, &mut x);
    for range in [0..0, 3..20, 7..1000, 0..32_768, 5..32_774, 0..100_000] {
        let piece = |x: &[f32]| -> f64 {
            let lane = |l: usize| x.iter().skip(l).step_by(32).fold(0.0, |sum, x| sum + x.to_f64() * x.to_f64());
            (0..32).map(lane).sum()
        };
        let want: f64 = x[range.clone()].chunks(32_768).map(piece).sum();
        let mut sums = Buffer::from_vec(vec![0.5, 0.0, 0.5]);
        let vector = buffer(&x).slice(range.clone()).unwrap();
        Cpu::default().sum_of_squares(std::slice::from_ref(&vector), &mut sums, 1).unwrap();
        assert_eq!(sums.as_slice::<f64>().unwrap(), [0.5, want, 0.5], "{range:?}");
        // A second call adds to the first.
        Cpu::default().sum_of_squares(&[vector], &mut sums, 1).unwrap();
        assert_eq!(sums.as_slice::<f64>().unwrap(), [0.5, want + want, 0.5], "{range:?}");
    }
}

/// The digits of a sum are the same for every cut of the vector, and its value is near the sum in f64.
#[test]
fn exact_sums_do_not_depend_on_how_they_are_cut() {
    let mut x = vec![0.0_f32; 100_000];
    fill_normal(key(0, "exact"), 0, &mut x);
    let x = buffer(&x);
    let sum = |cuts: &[usize]| {
        let mut digits = Buffer::from_vec(vec![0.0; LIMBS + 1]);
        let vectors: Vec<Buffer> = cuts.windows(2).map(|cut| x.slice(cut[0]..cut[1]).unwrap()).collect();
        Cpu::default().exact_sum_of_squares(&vectors, &mut digits, 1).unwrap();
        exact::value(&digits.as_slice::<f64>().unwrap()[1..])
    };
    let whole = sum(&[0, 100_000]);
    assert_eq!([sum(&[0, 3, 40_000, 100_000]), sum(&[0, 32_768, 65_537, 100_000])], [whole; 2]);
    let mut near = Buffer::from_vec(vec![0.0_f64]);
    Cpu::default().sum_of_squares(&[x], &mut near, 0).unwrap();
    assert!((whole / near.as_slice::<f64>().unwrap()[0] - 1.0).abs() < 1e-13);
}

#[derive(Debug)]
struct Add;

impl Optimizer for Add {
    fn name(&self) -> &str {
        "add"
    }

    fn state_names(&self) -> &[&'static str] {
        &["sum", "difference"]
    }

    fn update(
        &self,
        update: Update,
        weights: &mut [f32],
        grads: &[f32],
        states: &mut [&mut [f32]],
    ) -> std::result::Result<(), OptimError> {
        assert_eq!(update.step, 3);
        assert_eq!(
            [grads.len(), states.len(), states[0].len(), states[1].len()],
            [weights.len(), 2, weights.len(), weights.len()]
        );
        for i in 0..weights.len() {
            states[0][i] += grads[i];
            states[1][i] -= grads[i];
            weights[i] += states[0][i];
        }
        let seen = OptimError::Custom { rule: "add".to_owned(), problem: "seen".to_owned() };
        if weights.contains(&1234.0) { Err(seen) } else { Ok(()) }
    }
}

/// Pieces of all vectors are updated together, only the ranges are changed, and an error of any piece is returned.
#[test]
fn updates_reach_each_element_of_the_ranges_once() {
    let count = 3 * PIECE;
    let grads: Vec<f32> = (0..count).map(|i| (i % 1000) as f32).collect();
    let (mut weights, mut states) = (buffer(&vec![0.5; count]), [buffer(&vec![1.0; count]), buffer(&vec![2.0; count])]);
    // The second range begins at the end of the first.
    let ranges = [5..2 * PIECE, 2 * PIECE..2 * PIECE + 9, 3 * PIECE - 1..3 * PIECE];
    let cpu = Cpu::default();
    let (rule, update) = (Rule::custom(Add), Update { step: 3, lr: 1.0, grad_scale: 1.0, decay_factor: 0.0 });
    let vectors = FlatParts { weights: &mut weights, grads: &buffer(&grads), states: &mut states, ranges: &ranges };
    cpu.update(&rule, update, &mut [vectors]).unwrap();
    for (i, &grad) in grads.iter().enumerate() {
        let updated = ranges.iter().any(|range| range.contains(&i));
        let (g, w) = if updated { (grad, 1.5 + grad) } else { (0.0, 0.5) };
        let got = [&weights, &states[0], &states[1]].map(|buffer| buffer.as_slice::<f32>().unwrap()[i]);
        assert_eq!(got, [w, 1.0 + g, 2.0 - g], "{i}");
    }
    weights.as_mut_slice::<f32>().unwrap()[PIECE] = 1234.0 - 1.0 - grads[PIECE] * 2.0;
    let vectors = FlatParts { weights: &mut weights, grads: &buffer(&grads), states: &mut states, ranges: &ranges };
    let refused = cpu.update(&rule, update, &mut [vectors]);
    assert_eq!(refused.unwrap_err().to_string(), "optimizer: add: seen");
}

#[test]
fn zeros_reach_each_element_of_the_range_and_no_other() {
    let (count, range) = (4 * PIECE, 7..3 * PIECE + 1);
    let mut x = buffer(&vec![0.5; count]);
    Cpu::default().zero(&mut x, range.clone()).unwrap();
    let x = x.as_slice::<f32>().unwrap();
    assert!((0..count).all(|i| x[i] == if range.contains(&i) { 0.0 } else { 0.5 }));
}
