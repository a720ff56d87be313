//! Products, bit by bit against the CPU.

use crate::{assert_bits, launch, values};
use half::bf16;
use meshwork_core::Buffer;
use meshwork_core::simd::{Level, level};
use meshwork_cpu::Cpu;
use meshwork_cpu::kernels::round::round;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{Gemm, Matmul};
use meshwork_tensor::tape::Terms;

fn rounded(x: &[f32]) -> Vec<bf16> {
    let mut rounded = vec![bf16::ZERO; x.len()];
    round(x, &mut rounded);
    rounded
}

#[test]
fn products_are_those_of_the_cpu() {
    if level() < Level::Avx2 {
        eprintln!("left out: this CPU has no fused multiply-add, and other bits");
        return;
    }
    let whole = Terms::WHOLE;
    let cases = [
        (Gemm::linear(1, 1, 1), whole),
        (Gemm::linear(7, 33, 700).accumulating(true), whole),
        (Gemm::linear_input_grad(5, 300, 17), whole),
        (Gemm::linear_weight_grad(520, 3, 9), Terms { segments: 4, blocks: 5 }),
        (Gemm::linear(3, 11, 97), Terms { segments: 1, blocks: 7 }),
        (Gemm::linear(2, 5, 6), Terms { segments: 2, blocks: 8 }), // blocks without terms
        (Gemm::linear(2, 3, 0), whole),
    ];
    for (spec, terms) in cases {
        let spec = spec.over(terms);
        let Gemm { m, n, k, a_transposed, b_transposed, accumulate, .. } = spec;
        let [a_row, a_term] = if a_transposed { [1, m] } else { [k, 1] };
        let [b_term, b_column] = if b_transposed { [1, k] } else { [n, 1] };
        let (a, b, old) = (values("a", m * k), values("b", k * n), values("c", m * n));
        let (Terms { segments, blocks }, add) = (terms, i32::from(accumulate));
        let want = |precision| {
            let mut c = Buffer::from_slice(&old);
            let [a, b] = [&a, &b].map(|x| Buffer::from_slice(x));
            Cpu::new(precision).gemm(spec, &a, &b, &mut c, 0).unwrap();
            c.as_slice::<f32>().unwrap().to_vec()
        };
        let sizes = [m * n, 0];
        let mut c = old.clone();
        #[rustfmt::skip]
        let there = launch!(
            "product_f32", sizes, &a, a_row, a_term, &b, b_term, b_column, &mut c, add, k, segments, blocks, m * n, n
        );
        if !there {
            return;
        }
        assert_bits(&format!("{spec:?}"), &c, &want(Precision::F32));
        let [of_a, of_b] = [&a, &b].map(in_tf32);
        let mut c = old.clone();
        #[rustfmt::skip]
        launch!(
            "product_f32", sizes, &of_a, a_row, a_term, &of_b, b_term, b_column, &mut c, add, k, segments, blocks, m * n, n
        );
        assert_bits(&format!("{spec:?} of TF32"), &c, &want(Precision::Tf32));
        let [a, b] = [&a, &b].map(|x| rounded(x));
        let mut c = old.clone();
        #[rustfmt::skip]
        launch!(
            "product_bf16", sizes, &a, a_row, a_term, &b, b_term, b_column, &mut c, add, k, segments, blocks, m * n, n
        );
        assert_bits(&format!("{spec:?} of bf16"), &c, &want(Precision::Bf16));
    }
}

/// By the kernel that rounds operands.
fn in_tf32(x: &Vec<f32>) -> Vec<f32> {
    let mut rounded = vec![f32::NAN; x.len()];
    launch!("f32_to_tf32", [x.len(), 0], x, &mut rounded, x.len());
    rounded
}

#[test]
fn sums_of_two_products_are_those_of_the_cpu() {
    if level() < Level::Avx2 {
        eprintln!("left out: this CPU has no fused multiply-add, and other bits");
        return;
    }
    let of = |segments, blocks| Terms { segments, blocks };
    for (first, second) in [
        (Gemm::linear_input_grad(3, 97, 11).over(of(1, 7)), Gemm::linear_input_grad(3, 520, 11).over(of(2, 7))),
        (Gemm::linear(2, 5, 3).over(of(1, 4)), Gemm::linear(2, 5, 600).over(of(1, 4))), // blocks without terms
        (Gemm::linear(4, 6, 9).over(of(1, 2)), Gemm::linear_weight_grad(30, 4, 6).over(of(5, 2))),
    ] {
        let (m, n, blocks) = (first.m, first.n, first.terms.blocks);
        let operands = |spec: Gemm, of: &str| [values(of, m * spec.k), values(of, spec.k * n)];
        let ([a, b], [a2, b2]) = (operands(first, "first"), operands(second, "second"));
        let strides = |spec: Gemm| {
            let Gemm { m, n, k, .. } = spec;
            [if spec.a_transposed { [1, m] } else { [k, 1] }, if spec.b_transposed { [1, k] } else { [n, 1] }]
        };
        let ([[row, term], [b_term, column]], [[row2, term2], [b_term2, column2]]) = (strides(first), strides(second));
        let (mut c, count) = (vec![f32::NAN; m * n], m * n);
        let (segments, segments2) = (first.terms.segments, second.terms.segments);
        #[rustfmt::skip]
        let there = launch!(
            "product_sum_f32", [count, 0], &a, row, term, &b, b_term, column, first.k, segments, &a2, row2, term2, &b2, b_term2, column2,
            second.k, segments2, blocks, &mut c, count, n
        );
        if !there {
            return;
        }
        let buffers = [[&a, &b], [&a2, &b2]].map(|two| two.map(|x| Buffer::from_slice(x)));
        let want = |precision| {
            let (mut want, [[a, b], [a2, b2]]) = (Buffer::from_vec(vec![0.0_f32; count]), &buffers);
            Cpu::new(precision).gemm_sum([first, second], [a, a2], [b, b2], &mut want, 0).unwrap();
            want.as_slice::<f32>().unwrap().to_vec()
        };
        assert_bits(&format!("{first:?} and {second:?}"), &c, &want(Precision::F32));
        let [[x, y], [x2, y2]] = [[&a, &b], [&a2, &b2]].map(|two| two.map(in_tf32));
        #[rustfmt::skip]
        launch!(
            "product_sum_f32", [count, 0], &x, row, term, &y, b_term, column, first.k, segments, &x2, row2, term2, &y2, b_term2, column2,
            second.k, segments2, blocks, &mut c, count, n
        );
        assert_bits(&format!("{first:?} and {second:?} of TF32"), &c, &want(Precision::Tf32));
        let [[a, b], [a2, b2]] = [[a, b], [a2, b2]].map(|two| two.map(|x| rounded(&x)));
        #[rustfmt::skip]
        launch!(
            "product_sum_bf16", [count, 0], &a, row, term, &b, b_term, column, first.k, segments, &a2, row2, term2, &b2, b_term2, column2,
            second.k, segments2, blocks, &mut c, count, n
        );
        assert_bits(&format!("{first:?} and {second:?} of bf16"), &c, &want(Precision::Bf16));
    }
}
