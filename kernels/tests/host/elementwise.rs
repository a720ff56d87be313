//! Functions of one and of two numbers, the rectifier, chosen elements, sums over a dim and softmax, bit by bit against
//! the CPU.

use crate::{assert_bits, launch, values};
use meshwork_cpu::kernels::{elementwise, indexing, loss, preference, reduction, relu};
use meshwork_tensor::kernel::{Map, PairNumber, Picks, Preference, Zip};

#[test]
fn preferences_are_those_of_the_cpu() {
    let of = Preference { beta: 0.3, label_smoothing: 0.1 };
    // Margins on both sides of zero, at zero, and so large that e^margin overflows.
    let losses: Vec<f64> = (0..600).map(|i| f64::from(i % 7) * 1.7 - f64::from(i / 100)).collect();
    let mut reference: Vec<f64> = (0..600).map(|i| f64::from(i % 5) * 2.3 - 4.0).collect();
    (reference[0], reference[3]) = (1e5, 1e5);
    reference[4..6].copy_from_slice(&losses[4..6]);
    // Samples with room for three pairs, of which they have none to three.
    let pairs: Vec<i32> = (0..100).map(|sample| sample % 4).collect();
    let (mut got, mut want) = (vec![f64::NAN; 100], vec![f64::NAN; 100]);
    let numbers = [PairNumber::Loss, PairNumber::Chosen, PairNumber::Rejected, PairNumber::Margin, PairNumber::Correct];
    for (at, number) in numbers.into_iter().enumerate() {
        if !launch!(
            "preference_forward",
            [100, 0],
            &losses,
            &reference,
            &pairs,
            &mut got,
            of.beta,
            of.label_smoothing,
            at,
            6_usize,
            100_usize
        ) {
            return;
        }
        preference::forward(of, number, &losses, &reference, &pairs, &mut want);
        assert_eq!(got, want, "{number:?}");
    }
    let (dloss, mut got, mut want) = (vec![0.7_f64; 100], vec![f64::NAN; 600], vec![f64::NAN; 600]);
    launch!(
        "preference_backward",
        [100, 0],
        &losses,
        &reference,
        &pairs,
        &dloss,
        &mut got,
        of.beta,
        of.label_smoothing,
        6_usize,
        100_usize
    );
    preference::backward(of, &losses, &reference, &pairs, &dloss, &mut want);
    assert_eq!(got, want);
}

#[test]
fn sums_of_groups_are_those_of_the_cpu() {
    let (samples, places, groups) = (7, 33, 12);
    let values: Vec<f64> = values("values", samples * places).into_iter().map(f64::from).collect();
    let ids: Vec<i32> = (0..samples * places).map(|at| (at * 7 % 14) as i32 - 2).collect();
    let (mut got, mut want) = (vec![f64::NAN; samples * groups], vec![f64::NAN; samples * groups]);
    let count = samples * groups;
    if !launch!("group_sums_forward", [count, 0], &values, &ids, &mut got, places, groups, count) {
        return;
    }
    loss::group_sums(samples, &values, &ids, &mut want);
    assert_eq!(got, want);
    let (mut got, mut back, count) = (vec![f64::NAN; values.len()], vec![f64::NAN; values.len()], values.len());
    launch!("group_sums_backward", [count, 0], &want, &ids, &mut got, places, groups, count);
    loss::group_sums_backward(samples, &want, &ids, &mut back);
    assert_eq!(got, back);
}

/// Ordinary values and the ends of the range, NaN last.
fn awkward(name: &str, count: usize) -> Vec<f32> {
    let mut x: Vec<f32> = values(name, count).iter().map(|x| 4.0 * x).collect();
    let ends =
        [0.0, -0.0, 0.499_999, 88.5, 1e-40, -1e-30, -90.0, 1e20, -1e20, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    x.iter_mut().zip(ends).for_each(|(x, end)| *x = end);
    x
}

#[test]
fn sums_and_multiples_of_f64_are_those_of_the_cpu() {
    let [a, b] = [0.1, -0.7].map(|x| (0..300).map(|i| f64::from(i) * x).collect::<Vec<f64>>());
    let (mut got, mut want) = (vec![f64::NAN; 300], vec![0.0; 300]);
    if !launch!("scale_forward_f64", [300, 0], &a, &mut got, 300_usize, 0.01_f64) {
        return;
    }
    elementwise::map(Map::Scale(0.01), &a, &mut want);
    assert_eq!(got, want);
    launch!("add_f64", [300, 0], &a, &b, &mut got, 300_usize);
    assert_eq!(got, a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>());
}

const ZIPS: [(Zip, &str); 8] = [
    (Zip::Add, "zip_add"),
    (Zip::Sub, "zip_sub"),
    (Zip::Mul, "zip_mul"),
    (Zip::Div, "zip_div"),
    (Zip::Keep, "zip_keep"),
    (Zip::Drop, "zip_drop"),
    (Zip::Second, "zip_second"),
    (Zip::Greater, "zip_greater"),
];

/// Repeated over a dim inside of x.
#[test]
fn what_is_repeated_is_that_of_the_cpu() {
    for [outer, extent, inner] in [[3, 5, 7], [4, 3, 1], [2, 1, 9], [5, 2, 4]] {
        let count = outer * extent * inner;
        let (x, y, mut got, mut want) =
            (values("x", count), values("y", outer * inner), vec![f32::NAN; count], vec![0.0; count]);
        for (f, kernel) in ZIPS {
            if !launch!(kernel, [count, 0], &x, &y, &mut got, count, extent, inner) {
                return;
            }
            elementwise::zip(f, &x, &y, [extent, inner], &mut want);
            assert_bits(kernel, &got, &want);
        }
    }
}

#[test]
fn chosen_elements_are_those_of_the_cpu() {
    for [outer, extent, inner] in [[1, 1, 1], [3, 50, 7], [5, 33, 1]] {
        let (count, mut x) = (outer * inner, values("x", outer * extent * inner));
        x.iter_mut().for_each(|x| *x = x.round());
        x[outer * extent * inner / 2] = f32::NAN;
        let (mut got, mut want) = (vec![-1_i32; count], vec![-1_i32; count]);
        if !launch!("argmax_dim", [count, 0], &x, &mut got, count, extent, inner) {
            return;
        }
        indexing::argmax(&x, extent, inner, &mut want);
        assert_eq!(got, want);
        let some = Picks { outer, extent, inner, count: 6, each: false };
        let index: Vec<i32> = (0..6).map(|i| (i * 17 % extent) as i32).collect();
        for (picks, index) in [(Picks { count: 1, each: true, ..some }, &want), (some, &index)] {
            let (dy, each) = (values("dy", picks.taken()), i32::from(picks.each));
            let (mut got, mut want) = (vec![f32::NAN; picks.taken()], vec![0.0; picks.taken()]);
            launch!(
                "pick_forward",
                [got.len(), 0],
                &x,
                index,
                &mut got,
                picks.taken(),
                extent,
                inner,
                picks.count,
                each
            );
            indexing::pick(&x, index, picks, 0, &mut want);
            assert_bits("pick", &got, &want);
            let (mut got, mut want) = (vec![f32::NAN; x.len()], vec![0.0; x.len()]);
            launch!("pick_backward", [x.len(), 0], &dy, index, &mut got, x.len(), extent, inner, picks.count, each);
            indexing::pick_backward(&dy, index, picks, 0, &mut want);
            assert_bits("gradient of pick", &got, &want);
        }
    }
}

#[test]
fn functions_are_those_of_the_cpu() {
    for [rows, n] in [[1, 1], [1, 15], [7, 33], [3, 1001]] {
        let count = rows * n;
        let (x, dy, y, row) = (awkward("x", count), values("dy", count), values("y", count), values("row", n));
        let (mut got, mut want) = (vec![f32::NAN; count], vec![0.0; count]);
        if !launch!("scale_forward", [count, 0], &x, &mut got, count, -2.7_f32) {
            return;
        }
        elementwise::map(Map::Scale(-2.7), &x, &mut want);
        assert_bits("scale", &got, &want);
        for (f, forward, backward) in [
            (Map::Exp, "exp_forward", "exp_backward"),
            (Map::Tanh, "tanh_forward", "tanh_backward"),
            (Map::Sigmoid, "sigmoid_forward", "sigmoid_backward"),
            (Map::Silu, "silu_forward", "silu_backward"),
            (Map::Gelu, "exact_gelu_forward", "exact_gelu_backward"),
            (Map::Log, "log_forward", "log_backward"),
            (Map::Sqrt, "sqrt_forward", "sqrt_backward"),
        ] {
            launch!(forward, [count, 0], &x, &mut got, count);
            elementwise::map(f, &x, &mut want);
            assert_bits(forward, &got, &want);
            launch!(backward, [count, 0], &dy, &x, &mut got, count);
            elementwise::map_backward(f, &x, &dy, &mut want);
            assert_bits(backward, &got, &want);
        }
        let cap = Map::SoftCap(1.5);
        launch!("soft_cap_forward", [count, 0], &x, &mut got, count, 1.5_f32);
        elementwise::map(cap, &x, &mut want);
        assert_bits("soft_cap", &got, &want);
        launch!("soft_cap_backward", [count, 0], &dy, &x, &mut got, count, 1.5_f32);
        elementwise::map_backward(cap, &x, &dy, &mut want);
        assert_bits("gradient of soft_cap", &got, &want);
        let masks: Vec<f32> = y.iter().enumerate().map(|(i, &y)| if i % 3 == 0 { 0.0 } else { y }).collect();
        let column = masks[..rows].to_vec();
        for (f, kernel) in ZIPS {
            for (y, [extent, inner]) in [(&masks, [1, count]), (&row, [rows, n]), (&column, [n, 1])] {
                launch!(kernel, [count, 0], &x, y, &mut got, count, extent, inner);
                elementwise::zip(f, &x, y, [extent, inner], &mut want);
                assert_bits(kernel, &got, &want);
            }
        }
        let (mut bits, mut want_bits) = (vec![9_u8; count.div_ceil(8)], vec![7_u8; count.div_ceil(8)]);
        launch!("relu_forward", [count, 0], &x, &mut got, &mut bits, count);
        relu::relu(&x, &mut want, &mut want_bits);
        assert_bits("relu", &got, &want);
        assert_eq!(bits, want_bits, "what is above zero");
        launch!("relu_backward", [count, 0], &dy, &bits, &mut got, count);
        relu::relu_backward(&bits, &dy, &mut want);
        assert_bits("gradient of relu", &got, &want);
    }
}

#[test]
fn sums_over_a_dim_are_those_of_the_cpu() {
    for [outer, extent, inner] in [[1, 1, 1], [3, 50, 7], [5, 333, 1]] {
        let x = values("x", outer * extent * inner);
        for blocks in [1, 4] {
            let (mut got, mut want) = (vec![f32::NAN; blocks * outer * inner], vec![0.0; blocks * outer * inner]);
            let count = got.len();
            if !launch!("sum_dim", [count, 0], &x, &mut got, count, outer, extent, inner, blocks, 0.3_f64) {
                return;
            }
            for (block, want) in want.chunks_mut(outer * inner).enumerate() {
                let range = extent * block / blocks..extent * (block + 1) / blocks;
                reduction::sum(&x, extent, inner, range, 0.3, want);
            }
            assert_bits("sum", &got, &want);
        }
        let (dy, mut got, mut want) = (values("dy", outer * inner), x.clone(), x.clone());
        launch!("spread_dim", [x.len(), 0], &dy, &mut got, x.len(), extent, inner, 0.7_f32);
        reduction::spread(&dy, extent, inner, 0.7, &mut want);
        assert_bits("spread", &got, &want);
    }
}

#[test]
pub fn softmax_is_that_of_the_cpu() {
    for [rows, n] in [[1, 1], [33, 7], [5, 1025], [2, 5000]] {
        let count = rows * n;
        let (mut x, dy) = (values("x", count), values("dy", count));
        x[count - 1] = f32::NEG_INFINITY;
        x[0] = 1e30;
        let (mut y, mut want) = (vec![f32::NAN; count], vec![0.0; count]);
        if !launch!("softmax_forward", [rows, n], &x, &mut y, rows, n) {
            return;
        }
        reduction::softmax(&x, n, &mut want);
        assert_bits("softmax", &y, &want);
        let mut got = vec![f32::NAN; count];
        launch!("softmax_backward", [rows, n], &dy, &y, &mut got, rows, n);
        reduction::softmax_backward(&y, &dy, n, &mut want);
        assert_bits("gradient of softmax", &got, &want);
    }
}
