//! The products against three loops, and against themselves: its bits are the same for every cut, layout, sharing and
//! epilogue.
//!
//! More than 400 lines: every path of a product is compared with the same formula.

use super::oracle::{assert_close, check_gradient, dot, rounding, values, widen};
use half::bf16;
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::matmul::MatmulOperand::{Full, Rounded};
use meshwork_cpu::kernels::matmul::*;
use meshwork_cpu::kernels::round::Stored;
use meshwork_cpu::kernels::{gelu, pointwise, swiglu};
use meshwork_tensor::Precision;
use meshwork_tensor::tape::Terms;
use proptest::prelude::*;

fn factors<'a, T>(
    precision: Precision,
    dims: [usize; 3],
    a: MatmulOperand<'a, T>,
    b: MatmulOperand<'a, T>,
) -> Factors<'a, T> {
    Factors { precision, dims, a, b }
}

fn exact<'a, T>(dims: [usize; 3], a: MatmulOperand<'a, T>, b: MatmulOperand<'a, T>) -> Factors<'a, T> {
    Factors { precision: Precision::F32, dims, a, b }
}

/// `Y[m, n] = X[m, k] · W[n, k]ᵀ`, the linear layer forward. Overwrites `y`.
fn linear<T: Float>([m, n, k]: [usize; 3], x: &[T], w: &[T], y: &mut [T]) {
    gemm(exact([m, n, k], Full(x, (k, 1)), Full(w, (1, k))), (y, (n, 1)), Update::Overwrite);
}

/// `dX[m, k] = dY[m, n] · W[n, k]`, the linear layer's gradient of its input. Overwrites `dx`.
fn linear_dx<T: Float>([m, n, k]: [usize; 3], dy: &[T], w: &[T], dx: &mut [T]) {
    gemm(exact([m, k, n], Full(dy, (n, 1)), Full(w, (k, 1))), (dx, (k, 1)), Update::Overwrite);
}

/// `dW[n, k] = dY[m, n]ᵀ · X[m, k]`, the linear layer's gradient of its weight, added to `dw` or replacing it.
fn linear_dw<T: Float>([m, n, k]: [usize; 3], dy: &[T], x: &[T], dw: &mut [T], update: Update) {
    gemm(exact([n, k, m], Full(dy, (1, n)), Full(x, (k, 1))), (dw, (k, 1)), update);
}

/// Three loops over flat operands with strides.
fn naive([m, n, k]: [usize; 3], a: (&[f64], Strides), b: (&[f64], Strides)) -> Vec<f64> {
    let at = |x: (&[f64], Strides), i: usize, j: usize| x.0[i * x.1.0 + j * x.1.1];
    let element = |i, j| (0..k).map(|l| at(a, i, l) * at(b, l, j)).sum();
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

proptest! {
    #[test]
    fn products_match_three_loops(m in 0..40_usize, n in 0..40_usize, k in 0..300_usize, pad in 0..3_usize) {
        let (lda, ldb, ldc) = (k + pad, k + pad, n + pad);
        let a: Vec<f32> = values("a", m * lda);
        let b: Vec<f32> = values("b", n * ldb);
        let old: Vec<f32> = values("c", m * ldc);
        let want = naive([m, n, k], (&widen(&a), (lda, 1)), (&widen(&b), (1, ldb)));
        for update in [Update::Overwrite, Update::Accumulate] {
            let mut c = old.clone();
            gemm(exact([m, n, k], Full(&a, (lda, 1)), Full(&b, (1, ldb))), (&mut c, (ldc, 1)), update);
            for i in 0..m {
                let base = |j: usize| if update == Update::Accumulate { old[i * ldc + j].to_f64() } else { 0.0 };
                let row: Vec<f64> = (0..n).map(|j| base(j) + want[i * n + j]).collect();
                assert_close(&c[i * ldc..][..n], &row, 2e-5);
                prop_assert_eq!(&c[i * ldc + n..][..pad], &old[i * ldc + n..][..pad]);
            }
        }
    }

    /// Any block of C computed alone has the same bits as in the whole, for every K.
    #[test]
    fn blocks_of_c_have_the_bits_of_the_whole(
        m in 1..70_usize, n in 1..70_usize, k in 1..700_usize, cut in prop::array::uniform4(0.0..1.0),
    ) {
        let span = |from: f64, to: f64, len: usize| {
            let at = ((from * len as f64) as usize).min(len - 1);
            (at, 1 + (to * (len - at) as f64) as usize)
        };
        let (i, rows) = span(cut[0], cut[1], m);
        let (j, columns) = span(cut[2], cut[3], n);
        let (rows, columns) = (rows.min(m - i), columns.min(n - j));
        split_case::<f32>([m, n, k], (i, rows), (j, columns));
        split_case::<f64>([m, n, k], (i, rows), (j, columns));
    }
}

#[track_caller]
fn split_case<T: Float>([m, n, k]: [usize; 3], (i, rows): (usize, usize), (j, columns): (usize, usize)) {
    let (x, w): (Vec<T>, Vec<T>) = (values("x", m * k), values("w", n * k));
    let mut whole = vec![T::ZERO; m * n];
    linear([m, n, k], &x, &w, &mut whole);
    let mut part = vec![T::ZERO; rows * columns];
    linear([rows, columns, k], &x[i * k..][..rows * k], &w[j * k..][..columns * k], &mut part);
    for r in 0..rows {
        let want = &whole[(i + r) * n + j..][..columns];
        assert_eq!(&part[r * columns..][..columns], want, "{m}x{n}x{k}, rows {i}+{rows}, columns {j}+{columns}");
    }
}

/// Splits that change bits in other libraries: one row or column, all but one, halves, edges of blocks.
#[test]
fn adversarial_splits_have_the_bits_of_the_whole() {
    for k in [1, 16, 63, 255, 256, 257, 511, 513, 1024, 2048] {
        for [m, n] in [[33, 65], [2, 96], [64, 7], [129, 34]] {
            let parts = |len: usize| [(0, 1), (len - 1, 1), (0, len - 1), (1, len - 1), (len / 2, len - len / 2)];
            for rows in parts(m) {
                split_case::<f32>([m, n, k], rows, (0, n));
            }
            for columns in parts(n) {
                split_case::<f32>([m, n, k], (0, m), columns);
            }
        }
    }
}

/// `matrixmultiply` in `f32`, which [`gemm`] only uses on CPUs without a path of our own: rectangles of C with a
/// transposed B against the whole, and that against three loops; in low precision against the product in f32 of
/// operands that are rounded before.
#[test]
fn portable_products_have_the_bits_of_the_whole() {
    let product = |precision, [m, n, k]: [usize; 3], a: MatmulOperand<'_, f32>, b: MatmulOperand<'_, f32>, update| {
        let mut c = vec![1.0; m * n];
        gemm_portable(factors(precision, [m, n, k], a, b), (&mut c, (n, 1)), update);
        c
    };
    for (i, [m, n, k]) in [[33, 65, 1], [2, 96, 300], [64, 7, 256], [29, 34, 513]].repeat(3).into_iter().enumerate() {
        let precision = Precision::ALL[i / 4];
        let (a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", k * n));
        let transposed: Vec<f32> = (0..k * n).map(|at| b[at % k * n + at / k]).collect();
        let round = rounding(precision);
        let want = naive([m, n, k], (&widen(&a), (k, 1)), (&widen(&b), (n, 1)));
        for (update, old) in [(Update::Overwrite, 0.0), (Update::Accumulate, 1.0)] {
            let whole = product(precision, [m, n, k], Full(&a, (k, 1)), Full(&b, (n, 1)), update);
            if precision == Precision::F32 {
                assert_close(&whole, &want.iter().map(|x| x + old).collect::<Vec<f64>>(), 2e-5);
            }
            let rounded = [&a, &b].map(|x| x.iter().map(|x| round(*x)).collect::<Vec<f32>>());
            let [left, right] = [Full(&rounded[0][..], (k, 1)), Full(&rounded[1], (n, 1))];
            assert!(whole == product(Precision::F32, [m, n, k], left, right, update), "[{m}, {n}, {k}], {precision:?}");
            for (i, j, rows, columns) in [(0, 0, 1, n), (1, 2, m - 1, 1), (m / 2, 3, m - m / 2, n - 3)] {
                let (a, b) = (Full(&a[i * k..], (k, 1)), Full(&transposed[j * k..], (1, k)));
                let part = product(precision, [rows, columns, k], a, b, update);
                for (r, part) in part.chunks(columns).enumerate() {
                    assert_eq!(part, &whole[(i + r) * n + j..][..columns], "[{m}, {n}, {k}], row {i} + {r}");
                }
            }
        }
    }
}

/// Layouts and accumulation do not change the order either: a product in two transposed layouts, and one added
/// to zero.
#[test]
fn layout_and_update_keep_the_bits() {
    for dims in [[5, 7, 300], [64, 33, 600], [1, 9, 257]] {
        let [m, n, k] = dims;
        let (a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", k * n));
        let transpose = |x: &[f32], rows: usize, columns: usize| -> Vec<f32> {
            (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
        };
        let mut plain = vec![f32::NAN; m * n];
        gemm(exact(dims, Full(&a, (k, 1)), Full(&b, (n, 1))), (&mut plain, (n, 1)), Update::Overwrite);
        let (at, bt) = (transpose(&a, m, k), transpose(&b, k, n));
        let mut other = vec![0.0; m * n];
        gemm(exact(dims, Full(&at, (1, m)), Full(&bt, (1, k))), (&mut other, (1, m)), Update::Accumulate);
        assert_eq!(transpose(&plain, m, n), other);
    }
}

/// The result of `gemm` followed by separate passes over C.
fn one_after_the_other<T: Float>(
    (precision, [m, n, k]): (Precision, [usize; 3]),
    (a, b, bias, old): (&[T], &[T], &[T], &[T]),
    update: Update,
) -> [Vec<T>; 4] {
    let mut c = old.to_vec();
    gemm(factors(precision, [m, n, k], Full(a, (k, 1)), Full(b, (n, 1))), (&mut c, (n, 1)), update);
    let (mut biased, mut activated) = (c.clone(), c.clone());
    pointwise::bias(&c, bias, &mut biased);
    gelu::bias_gelu(&c, bias, Stored::Full(&mut activated));
    let mut gated = vec![T::ZERO; c.len() / 2];
    swiglu::swiglu(&c[..2 * gated.len()], Stored::Full(&mut gated));
    [c, biased, activated, gated]
}

/// Each rounded to the nearest `bf16`, if the precision rounds.
fn stored<T: Float>(precision: Precision, x: &[T]) -> Vec<bf16> {
    if !T::narrows(precision) {
        return Vec::new();
    }
    let mut to = vec![bf16::ZERO; x.len()];
    T::round(x, &mut to);
    to
}

/// Shared or not, with epilogues, and with operands and results stored in bf16 where allowed: the bits of the plain
/// product.
fn same_bits_case<T: Float>(precision: Precision, dims @ [m, n, k]: [usize; 3], b_transposed: bool) {
    let (a, b, bias): (Vec<T>, Vec<T>, Vec<T>) = (values("a", m * k), values("b", k * n), values("bias", n));
    let old: Vec<T> = values("c", m * n);
    let b_transpose: Vec<T> = (0..k * n).map(|at| b[at % k * n + at / k]).collect();
    let (right, right_strides) = if b_transposed { (&b_transpose, (1, k)) } else { (&b, (n, 1)) };
    let (rounded_a, rounded_right) = (stored(precision, &a), stored(precision, right));
    for update in [Update::Overwrite, Update::Accumulate] {
        let want = one_after_the_other((precision, dims), (&a, &b, &bias, &old), update);
        let kinds = if n % 2 == 0 { 0..4 } else { 0..3 };
        for (threads, epilogue) in
            [1, 2, 3, 7, 64].into_iter().flat_map(|threads| kinds.clone().map(move |e| (threads, e)))
        {
            // Every combination occurs in one of the rounds.
            let rounds = |bit: usize| T::narrows(precision) && (threads + epilogue) >> bit & 1 == 1;
            let left = if rounds(0) { Rounded(&rounded_a, (k, 1)) } else { Full(&a, (k, 1)) };
            let right = if rounds(1) { Rounded(&rounded_right, right_strides) } else { Full(right, right_strides) };
            let results = if epilogue == 3 { m * n / 2 } else { m * n };
            let (mut c, mut out, mut rounded_out) = (old.clone(), old[..results].to_vec(), vec![bf16::ONE; results]);
            let to = if rounds(0) { Stored::Bf16(&mut rounded_out) } else { Stored::Full(&mut out) };
            let after = match epilogue {
                0 => Epilogue::Nothing,
                1 => Epilogue::Bias(&bias),
                2 => Epilogue::BiasGelu(&bias, to),
                _ => Epilogue::Swiglu(to),
            };
            if threads > 1 && k > 0 {
                gemm_cut(threads, factors(precision, dims, left, right), &mut c, update, after);
            } else {
                gemm_shared(factors(precision, dims, left, right), &mut c, update, after);
            }
            let at = format!("{precision:?}, {dims:?}, {update:?}, epilogue {epilogue}, for {threads} threads");
            assert!(c == want[usize::from(epilogue == 1)], "{at}");
            let activated = if epilogue >= 2 { &want[epilogue] } else { &old };
            if epilogue >= 2 && rounds(0) {
                assert!(rounded_out == stored(precision, activated), "{at}, rounded");
            } else {
                assert!(out == *activated, "{at}, out");
            }
        }
    }
}

#[test]
fn shared_and_finished_products_have_the_bits_of_the_plain_one() {
    for (i, dims) in [
        [1, 1, 1],
        [5, 40, 0],
        [37, 33, 257],
        [3, 900, 515],
        [300, 200, 100],
        [29, 800, 300],
        [57, 1601, 96],
        [700, 65, 1030],
        [113, 3100, 1300],
        [1, 3000, 1500],
        [4096, 33, 64],
    ]
    .into_iter()
    .enumerate()
    {
        same_bits_case::<f32>(Precision::F32, dims, i % 2 == 0);
        same_bits_case::<f32>(Precision::Tf32, dims, i % 3 == 0);
        same_bits_case::<f32>(Precision::Bf16, dims, i % 2 == 1);
    }
    same_bits_case::<f64>(Precision::Bf16, [170, 130, 300], true);
    same_bits_case::<f64>(Precision::F32, [3, 7, 5], false);
}

/// Tests all kinds of layouts and blocks, in parts of larger operands.
#[test]
fn leaves_of_rounded_factors_have_the_bits_of_full_ones() {
    for (i, [m, n, k]) in
        [[37, 33, 258], [128, 384, 642], [30, 3, 129], [3, 2100, 4101], [64, 64, 66]].into_iter().enumerate()
    {
        for terms in [Terms::WHOLE, Terms { segments: 1, blocks: 3 }, Terms { segments: 3, blocks: 4 }] {
            let (a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", k * n));
            let (a_strides, b_strides) = ([(1, m), (k, 1)][i % 2], [(n, 1), (1, k)][i / 2 % 2]);
            let (rounded_a, rounded_b) = (stored(Precision::Bf16, &a), stored(Precision::Bf16, &b));
            let (a, b) = (
                [Full(&a, a_strides), Rounded(&rounded_a, a_strides)],
                [Full(&b, b_strides), Rounded(&rounded_b, b_strides)],
            );
            let product = |a, b| {
                let mut c = vec![f32::NAN; m * n];
                gemm_blocks(factors(Precision::Bf16, [m, n, k], a, b), &mut c, terms);
                c
            };
            let want = product(a[0], b[0]);
            for (a, b) in [(a[0], b[1]), (a[1], b[0]), (a[1], b[1])] {
                assert!(product(a, b) == want, "[{m}, {n}, {k}], {terms:?}");
            }
        }
    }
}

/// Products of f32 widen what is stored in bf16 while they pack it: against the same products of widened copies, bit
/// for bit, in all layouts, with few rows and few columns, alone and shared by threads, in blocks and in sums.
#[test]
fn products_of_f32_widen_factors_in_bf16() {
    let cases =
        [[1, 700, 1030], [5, 40, 33], [16, 96, 300], [37, 33, 258], [300, 8, 384], [128, 384, 642], [70, 1601, 96]];
    for (dims @ [m, n, k], layouts) in cases.into_iter().flat_map(|dims| (0..4).map(move |layouts| (dims, layouts))) {
        let drawn = |name, len| values::<f32>(name, len).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let (a, b) = (drawn("a", m * k), drawn("b", k * n));
        let [wide_a, wide_b] = [&a, &b].map(|x| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
        let (a_strides, b_strides) = ([(k, 1), (1, m)][layouts % 2], [(n, 1), (1, k)][layouts / 2]);
        let (a, b) = (
            [Full(&wide_a[..], a_strides), Rounded(&a[..], a_strides)],
            [Full(&wide_b[..], b_strides), Rounded(&b[..], b_strides)],
        );
        type Of<'a> = dyn Fn(Factors<'_, f32>, &mut [f32]) + 'a;
        let cut =
            |factors: Factors<'_, f32>, c: &mut [f32]| gemm_cut(2, factors, c, Update::Overwrite, Epilogue::Nothing);
        let shared = |factors: Factors<'_, f32>, c: &mut [f32]| {
            gemm_shared(factors, c, Update::Overwrite, Epilogue::Nothing);
        };
        let portable =
            |factors: Factors<'_, f32>, c: &mut [f32]| gemm_portable(factors, (c, (n, 1)), Update::Overwrite);
        let in_blocks = |factors: Factors<'_, f32>, c: &mut [f32]| {
            gemm_blocks(factors, c, Terms { segments: 1, blocks: 3 });
        };
        let in_sums = |Factors { precision, a, b, .. }: Factors<'_, f32>, c: &mut [f32]| {
            let of = Summand { k, a, b, terms: Terms::WHOLE };
            gemm_sum(precision, [m, n], &[of, of], c);
        };
        let ways: [(&str, &Of<'_>); 5] = [
            ("cut", &cut),
            ("shared", &shared),
            ("portable", &portable),
            ("in blocks", &in_blocks),
            ("in sums", &in_sums),
        ];
        for (way, product) in ways {
            let product = |a, b| {
                let mut c = vec![f32::NAN; m * n];
                product(exact(dims, a, b), &mut c);
                c
            };
            let want = product(a[0], b[0]);
            for (a, b) in [(a[0], b[1]), (a[1], b[0]), (a[1], b[1])] {
                assert!(product(a, b) == want, "{dims:?}, {a_strides:?}, {b_strides:?}, {way}");
            }
        }
    }
}

/// The same over `matrixmultiply`.
#[test]
fn portable_products_of_rounded_factors_have_the_bits_of_full_ones() {
    let [m, n, k] = [29, 34, 300];
    let (mut a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", k * n));
    a[7] = 1e-40;
    let (rounded_a, rounded_b) = (stored(Precision::Bf16, &a), stored(Precision::Bf16, &b));
    let (a, b) = ([Full(&a, (k, 1)), Rounded(&rounded_a, (k, 1))], [Full(&b, (1, k)), Rounded(&rounded_b, (1, k))]);
    let product = |a: MatmulOperand<'_, f32>, b: MatmulOperand<'_, f32>| {
        let mut c = vec![f32::NAN; m * n];
        gemm_portable(factors(Precision::Bf16, [m, n, k], a, b), (&mut c, (n, 1)), Update::Overwrite);
        c
    };
    let want = product(a[0], b[0]);
    for (a, b) in [(a[0], b[1]), (a[1], b[0]), (a[1], b[1])] {
        assert!(product(a, b) == want);
    }
}

#[test]
#[should_panic(expected = "B: stored in bf16, but a product of f64 reads f64 alone")]
fn rounded_factors_are_refused_by_products_of_f64() {
    let (a, b) = (Full(&[0.0_f64; 2], (1, 1)), Rounded(&[bf16::ZERO; 3], (3, 1)));
    gemm_shared(factors(Precision::Bf16, [2, 3, 1], a, b), &mut [0.0; 6], Update::Overwrite, Epilogue::Nothing);
}

#[test]
#[should_panic(expected = "results in f64 are not stored in bf16")]
fn results_in_f64_are_not_rounded() {
    gelu::bias_gelu(&[0.0_f64; 2], &[0.0; 2], Stored::Bf16(&mut [bf16::ZERO; 2]));
}

#[test]
#[should_panic(expected = "bias: 1 by 3 with strides (0, 1) does not fit in 2 elements")]
fn short_biases_are_refused() {
    let (a, b) = (Full(&[1.0_f32; 2][..], (1, 1)), Full(&[1.0_f32; 3][..], (3, 1)));
    gemm_shared(factors(Precision::F32, [2, 3, 1], a, b), &mut [0.0; 6], Update::Overwrite, Epilogue::Bias(&[0.0; 2]));
}

#[test]
fn linear_gradients_match_finite_differences() {
    let [m, n, k] = [3, 4, 5];
    let (x, w, dy): (Vec<f64>, Vec<f64>, Vec<f64>) = (values("x", m * k), values("w", n * k), values("dy", m * n));
    let loss = |x: &[f64], w: &[f64]| {
        let mut y = vec![0.0; m * n];
        linear([m, n, k], x, w, &mut y);
        dot(&y, &dy)
    };
    let (mut dx, mut dw) = (vec![9.0; m * k], vec![9.0; n * k]);
    linear_dx([m, n, k], &dy, &w, &mut dx);
    linear_dw([m, n, k], &dy, &x, &mut dw, Update::Overwrite);
    check_gradient(&x, &dx, |x| loss(x, &w));
    check_gradient(&w, &dw, |w| loss(&x, w));
    let twice: Vec<f64> = dw.iter().map(|g| 2.0 * g).collect();
    linear_dw([m, n, k], &dy, &x, &mut dw, Update::Accumulate);
    assert_close(&dw, &twice, 1e-15);
}

#[test]
#[should_panic(expected = "B: 3 by 2 with strides (2, 1) does not fit in 5 elements")]
fn short_operands_are_refused() {
    let c = &mut [0.0_f32; 4];
    gemm(exact([2, 2, 3], Full(&[0.0; 6], (3, 1)), Full(&[0.0; 5], (2, 1))), (c, (2, 1)), Update::Overwrite);
}

#[test]
#[should_panic(expected = "C: 2 by 3 with strides (6, 2) is contiguous along no dim")]
fn outputs_with_gaps_both_ways_are_refused() {
    let c = &mut [0.0_f32; 12];
    gemm(exact([2, 3, 1], Full(&[0.0; 2], (1, 1)), Full(&[0.0; 3], (3, 1))), (c, (6, 2)), Update::Overwrite);
}

#[test]
#[should_panic(expected = "C: the elements of 2 by 3 overlap with strides (2, 1)")]
fn overlapping_outputs_are_refused() {
    let c = &mut [0.0_f32; 9];
    gemm(exact([2, 3, 1], Full(&[0.0; 2], (1, 1)), Full(&[0.0; 3], (3, 1))), (c, (2, 1)), Update::Overwrite);
}

/// A sum of two products is the product of longer sums, block by block, and also without blocks if the panels of terms
/// end at the same places. A row has the same bits whether it is multiplied with few other rows or many, with sums in
/// blocks or without: decoding token by token gives the results of a whole pass.
#[test]
fn few_rows_have_the_bits_of_many() {
    let (m, n, k) = (40, 700, 1030);
    let (a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", n * k));
    let rounded = stored(Precision::Bf16, &b);
    for precision in Precision::ALL {
        let right = match precision {
            Precision::F32 | Precision::Tf32 => [Full(&b[..], (1, k)), Full(&b, (n, 1))],
            Precision::Bf16 => [Rounded(&rounded[..], (1, k)), Rounded(&rounded, (n, 1))],
        };
        for (right, blocks) in right.into_iter().flat_map(|right| [1, 4].map(|blocks| (right, blocks))) {
            let terms = Terms { segments: 1, blocks };
            let product = |m: usize| {
                let mut c = vec![f32::NAN; m * n];
                gemm_blocks(factors(precision, [m, n, k], Full(&a, (k, 1)), right), &mut c, terms);
                c
            };
            let many = product(m);
            for few in [1, 2, 5, FEW_ROWS, FEW_ROWS + 1] {
                assert!(product(few) == many[..few * n], "{precision:?}, {few} rows, {blocks} blocks");
            }
        }
    }
}

#[test]
fn a_sum_of_products_has_the_bits_of_one_of_longer_sums() {
    for ([m, n, k], blocks) in [([5, 33, 40], 4), ([70, 64, 96], 8), ([300, 130, 256], 1), ([20, 900, 5000], 2)] {
        let [a, b]: [Vec<f32>; 2] = [values("a", m * 2 * k), values("b", 2 * k * n)];
        let mut want = vec![f32::NAN; m * n];
        let terms = if blocks == 1 { Terms::WHOLE } else { Terms { segments: 2, blocks } };
        let precision = Precision::F32;
        gemm_blocks(factors(precision, [m, n, 2 * k], Full(&a, (2 * k, 1)), Full(&b, (n, 1))), &mut want, terms);
        let terms = Terms { segments: 1, blocks };
        let half = |i: usize| Summand { k, a: Full(&a[i * k..], (2 * k, 1)), b: Full(&b[i * k * n..], (n, 1)), terms };
        let mut got = vec![f32::NAN; m * n];
        gemm_sum(precision, [m, n], &[half(0), half(1)], &mut got);
        assert!(got == want, "{m} by {n}, {k}, {blocks} blocks");
    }
}

/// The gradient of a matrix of few columns reads its left factor, which is stored by columns, as the right one of the
/// transposed product.
#[test]
fn few_columns_have_the_bits_of_many() {
    let (m, n, k) = (300, 2 * FEW_ROWS, 600);
    let (a, b, old): (Vec<f32>, Vec<f32>, Vec<f32>) = (values("a", k * m), values("b", k * n), values("c", m * n));
    for (precision, update) in Precision::ALL
        .into_iter()
        .flat_map(|precision| [Update::Overwrite, Update::Accumulate].map(|update| (precision, update)))
    {
        let product = |columns: usize| {
            let mut c: Vec<f32> = old.chunks(n).flat_map(|row| &row[..columns]).copied().collect();
            let left = Full(&a[..], (1, m));
            gemm_shared(factors(precision, [m, columns, k], left, Full(&b, (n, 1))), &mut c, update, Epilogue::Nothing);
            c
        };
        let many = product(n);
        for few in [1, 8, FEW_ROWS] {
            let want: Vec<f32> = many.chunks(n).flat_map(|row| &row[..few]).copied().collect();
            assert!(product(few) == want, "{precision:?}, {update:?}, {few} columns");
        }
    }
}

/// Products of some rows and a large transposed factor, which is read as the left one of the transposed product: with
/// parts of C, squares and tiles that are not whole, and rows whose addresses map to the same sets of the L1 cache.
#[test]
fn large_transposed_factors_have_the_bits_of_plain_products() {
    for dims @ [m, n, k] in [[17, 1000, 300], [61, 2003, 515], [96, 1120, 256], [150, 1601, 257], [37, 203, 1024]] {
        let (a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", n * k));
        let (rounded_a, rounded_b) = (stored(Precision::Bf16, &a), stored(Precision::Bf16, &b));
        for (precision, a_strides) in Precision::ALL.into_iter().flat_map(|of| [(of, (k, 1)), (of, (1, m))]) {
            for (left, right) in [
                (Full(&a[..], a_strides), Full(&b[..], (1, k))),
                (Rounded(&rounded_a, a_strides), Rounded(&rounded_b, (1, k))),
            ] {
                let [mut got, mut want] = [(); 2].map(|()| vec![f32::NAN; m * n]);
                gemm(factors(precision, dims, left, right), (&mut want, (n, 1)), Update::Overwrite);
                gemm_shared(factors(precision, dims, left, right), &mut got, Update::Overwrite, Epilogue::Nothing);
                assert!(got == want, "{precision:?}, {dims:?}, strides {a_strides:?}");
            }
        }
    }
}
