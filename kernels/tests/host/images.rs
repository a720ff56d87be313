//! Channel norms, squared errors and accuracy, bit by bit against the CPU.

use crate::launch::Null;
use crate::{assert_bits, launch, values};
use meshwork_core::Buffer;
use meshwork_cpu::Cpu;
use meshwork_kernels::RowParts;
use meshwork_tensor::kernel::{ChannelNorm, Groups, Loss, MeanVariance, Reduction, Statistics};
use meshwork_tensor::tape::Terms;

/// The parts' rows of each block summed.
fn finish(parts: &Vec<f32>, cut: &RowParts, n: usize) -> Vec<f32> {
    let blocks = cut.parts.len() - 1;
    let mut sums = vec![f32::NAN; blocks * n];
    launch!("sum_blocks", [blocks, n], parts, &cut.parts, &mut sums, Null, blocks, n);
    sums
}

fn slice(buffer: &Buffer) -> &[f32] {
    buffer.as_slice().unwrap()
}

#[test]
fn channel_norms_are_those_of_the_cpu() {
    for [blocks, rows, n, groups] in [[1, 1, 1, 1], [1, 130, 7, 7], [3, 77, 12, 4], [2, 5, 300, 2]] {
        let (of, cut) =
            (Groups { blocks, rows, channels: n, groups }, RowParts::new(std::iter::repeat_n(rows as u32, blocks)));
        let (what, parts, count) = (format!("{of:?}"), cut.rows.len() - 1, blocks * rows * n);
        let x: Vec<f32> = values("x", count).iter().map(|x| 2.0 * x + 30.0).collect();
        let (dy, gamma, beta) = (values("dy", count), values("gamma", n), values("beta", n));
        let (cpu, members, of_groups) = (Cpu::default(), of.members() as f32, blocks * groups);
        let mut sums = vec![f32::NAN; parts * n];
        if !launch!("sum_parts", [parts, n], &x, &cut.rows, &mut sums, parts, n) {
            return;
        }
        let means = |sums: &Vec<f32>| {
            let mut means = vec![f32::NAN; of_groups];
            launch!("channel_means", [of_groups, 0], sums, members, &mut means, of_groups, groups, n);
            means
        };
        let mean = means(&finish(&sums, &cut, n));
        launch!("channel_squares_parts", [parts, n], &x, &mean, &cut.rows, &mut sums, parts, rows, groups, n);
        let variance = means(&finish(&sums, &cut, n));
        let [x_, dy_, gamma_, beta_] = [&x, &dy, &gamma, &beta].map(|x| Buffer::from_slice(x));
        let (want_mean, want_variance) = cpu.moments(of, &x_).unwrap();
        assert_bits(&format!("mean of {what}"), &mean, slice(&want_mean));
        assert_bits(&format!("variance of {what}"), &variance, slice(&want_variance));

        let (by, eps) = (MeanVariance { mean: &want_mean, variance: &want_variance, eps: 1e-5 }, 1e-5_f32);
        let mut y = vec![f32::NAN; count];
        #[rustfmt::skip]
        launch!("channel_norm_forward", [blocks * rows, n], &x, &mean, &variance, eps, &gamma, &beta, &mut y, count, rows, groups, n);
        assert_bits(&format!("y of {what}"), &y, slice(&cpu.normalise(of, &x_, by, [&gamma_, &beta_]).unwrap()));

        for statistics in [Statistics::OfInput, Statistics::Given] {
            let [mut gains, mut biases] = [(); 2].map(|()| vec![f32::NAN; parts * n]);
            #[rustfmt::skip]
            launch!(
                "channel_norm_backward_parts", [parts, n], &dy, &x, &mean, &variance, eps, &cut.rows, &mut gains, &mut biases, parts, rows, groups, n
            );
            let (dgamma, dbeta) = (finish(&gains, &cut, n), finish(&biases, &cut, n));
            let scale = if statistics == Statistics::Given { 0.0 } else { (1.0 / of.members() as f64) as f32 };
            let means = |sums: &Vec<f32>| {
                let mut means = vec![f32::NAN; of_groups];
                let sizes = [of_groups, 0];
                launch!("channel_gradient_means", sizes, sums, &gamma, scale, &mut means, of_groups, groups, n);
                means
            };
            let (g, gx, mut dx) = (means(&dbeta), means(&dgamma), vec![f32::NAN; count]);
            #[rustfmt::skip]
            launch!(
                "channel_norm_backward", [blocks * rows, n], &dy, &x, &mean, &variance, eps, &gamma, &g, &gx, &mut dx, count, rows, groups, n
            );
            let want = cpu.normalise_grad(of, &dy_, &x_, by, statistics, &gamma_).unwrap();
            assert_bits(&format!("dx of {what}"), &dx, slice(&want.0));
            assert_bits(&format!("dgamma of {what}"), &dgamma, slice(&want.1));
            assert_bits(&format!("dbeta of {what}"), &dbeta, slice(&want.2));
        }
    }
}

#[test]
fn squared_errors_are_those_of_the_cpu() {
    let (samples, elements, cpu) = (3_usize, 60_usize, Cpu::default());
    let (x, t, count) = (values("x", samples * elements), values("t", samples * elements), samples * elements);
    let [x_, t_] = [&x, &t].map(|x| Buffer::from_slice(x));
    for (segments, blocks) in [(1, 1), (1, 7), (4, 4)] {
        let (mut loss, sums) = (vec![f64::NAN; samples * blocks], samples * blocks);
        if !launch!("squared_error", [sums, 0], &x, &t, &mut loss, 0.7_f64, samples, elements, segments, blocks) {
            return;
        }
        let want = cpu.squared_error(&x_, &t_, samples, Terms { segments, blocks }, 0.7).unwrap();
        assert_eq!(loss, want.as_slice::<f64>().unwrap(), "{blocks} blocks");
    }
    let (dloss, mut dx) = (vec![0.3_f64, -2.0, 1.7], vec![f32::NAN; count]);
    launch!("squared_error_backward", [count, 0], &x, &t, &dloss, 0.7_f64, &mut dx, count, elements);
    let want = cpu.squared_error_grad(&x_, &t_, &Buffer::from_slice(&dloss), 0.7).unwrap();
    assert_bits("gradient", &dx, slice(&want));
}

#[test]
fn right_answers_are_those_of_the_cpu() {
    let (samples, each, width) = (3_usize, 41_usize, 37_usize);
    let rows = samples * each;
    let mut logits: Vec<f32> = values("logits", rows * width).iter().map(|x| (x * 4.0).round()).collect();
    logits[5] = f32::NAN;
    // Most right answers of a row are its largest number; ties, masked rows and words beyond the width among them.
    let largest = |row: usize| {
        let row = &logits[row * width..][..width];
        (0..width).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i32
    };
    let targets: Vec<i32> = (0..rows).map(|row| [largest(row), -1, largest(row), 3, 99][row % 5]).collect();
    let (mut right, mut counts) = (vec![9_i32; rows], vec![f64::NAN; samples]);
    if !launch!("correct_rows", [rows, 0], &logits, &targets, width, &mut right, rows) {
        return;
    }
    launch!("correct_counts", [samples, 0], &right, &mut counts, samples, each);
    let want = Cpu::default().correct(&Buffer::from_slice(&logits), &Buffer::from_slice(&targets), width, samples);
    assert_eq!(counts, want.unwrap().as_slice::<f64>().unwrap());
    assert!(counts.iter().all(|count| (10.0..40.0).contains(count)), "{counts:?}");
}
