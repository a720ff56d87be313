//! Kernels that read and write 16 bits: the bits of those for f32 on the same values, rounded. That those have the
//! CPU's bits is tested beside them.

use crate::launch::Null;
use crate::tables::bucketed;
use crate::{assert_bits, launch, values};
use bytemuck::Pod;
use half::{bf16, f16};
use meshwork_cpu::kernels::round;
use meshwork_kernels::{NORM_WIDTH, RowParts};

/// A type of 16 bits, as kernels are told of it, and its casts.
trait Half: Pod {
    const F16: i32;
    fn round(from: &[f32], to: &mut [Self]);
    fn widen(from: &[Self], to: &mut [f32]);
}

impl Half for bf16 {
    const F16: i32 = 0;

    fn round(from: &[f32], to: &mut [bf16]) {
        round::round(from, to);
    }

    fn widen(from: &[bf16], to: &mut [f32]) {
        round::from_bf16(from, to);
    }
}

impl Half for f16 {
    const F16: i32 = 1;

    fn round(from: &[f32], to: &mut [f16]) {
        round::to_f16(from, to);
    }

    fn widen(from: &[f16], to: &mut [f32]) {
        round::from_f16(from, to);
    }
}

fn rounded<H: Half>(x: &[f32]) -> Vec<H> {
    let mut half = vec![H::zeroed(); x.len()];
    H::round(x, &mut half);
    half
}

fn widened<H: Half>(x: &[H]) -> Vec<f32> {
    let mut wide = vec![0.0; x.len()];
    H::widen(x, &mut wide);
    wide
}

/// Values in 16 bits, and the same in f32.
fn operand<H: Half>(name: &str, count: usize) -> (Vec<H>, Vec<f32>) {
    let half = rounded(&values(name, count));
    let wide = widened(&half);
    (half, wide)
}

#[track_caller]
fn assert_rounded<H: Half>(what: &str, got: &[H], want: &[f32]) {
    assert_bits(what, &widened(got), &widened(&rounded::<H>(want)));
}

fn elements<H: Half>() -> bool
where
    for<'a> crate::launch::Given<'a>: From<&'a Vec<H>> + From<&'a mut Vec<H>>,
{
    // One element, odd rows, and rows of whole 16 bytes.
    for [rows, n] in [[1, 1], [7, 33], [5, 264], [3, 1001]] {
        let count = rows * n;
        let ((x, x_wide), (y, y_wide), (bias, bias_wide)) =
            (operand::<H>("x", count), operand::<H>("y", count), operand::<H>("bias", n));
        let (mut got, mut want) = (rounded::<H>(&vec![9.0; count]), vec![9.0; count]);
        if !launch!("add_16", [count, 0], &x, &y, &mut got, count, H::F16) {
            return false;
        }
        launch!("add", [count, 0], &x_wide, &y_wide, &mut want, count);
        assert_rounded("add", &got, &want);
        (got, want) = (x.clone(), x_wide.clone());
        launch!("add_assign_16", [count, 0], &mut got, &y, count, H::F16);
        launch!("add_assign", [count, 0], &mut want, &y_wide, count);
        assert_rounded("add_assign", &got, &want);
        launch!("bias_16", [count, 0], &x, &bias, &mut got, count, n, H::F16);
        launch!("bias", [count, 0], &x_wide, &bias_wide, &mut want, count, n);
        assert_rounded("bias", &got, &want);
        launch!("bias_residual_16", [count, 0], &x, &bias, &y, &mut got, count, n, H::F16);
        launch!("bias_residual", [count, 0], &x_wide, &bias_wide, &y_wide, &mut want, count, n);
        assert_rounded("bias_residual", &got, &want);
        launch!("gelu_forward_16", [count, 0], &x, &bias, &mut got, count, n, H::F16);
        launch!("gelu_forward_f32", [count, 0], &x_wide, &bias_wide, &mut want, count, n);
        assert_rounded("gelu", &got, &want);
        launch!("gelu_forward_16", [count, 0], &x, Null, &mut got, count, 1_usize, H::F16);
        launch!("gelu_forward_f32", [count, 0], &x_wide, Null, &mut want, count, 1_usize);
        assert_rounded("gelu without a bias", &got, &want);
        (got, want) = (y.clone(), y_wide.clone());
        launch!("gelu_backward_16", [count, 0], &x, &bias, &mut got, count, n, H::F16);
        launch!("gelu_backward", [count, 0], &x_wide, &bias_wide, &mut want, count, n);
        assert_rounded("gradient of gelu", &got, &want);

        let cut = RowParts::new([rows as u32]);
        let parts = cut.rows.len() - 1;
        let (mut sums, mut want_sums, mut in_parts) = (vec![f32::NAN; parts * n], vec![f32::NAN; parts * n], y.clone());
        launch!("gelu_backward_parts_16", [parts, n], &x, &bias, &mut in_parts, &cut.rows, &mut sums, parts, n, H::F16);
        launch!("sum_parts", [parts, n], &want, &cut.rows, &mut want_sums, parts, n);
        assert_rounded("gradient of gelu in parts", &in_parts, &want);
        assert_bits("gradient of the bias of gelu", &sums, &want_sums);
        launch!("sum_parts_16", [parts, n], &x, &cut.rows, &mut sums, parts, n, H::F16);
        launch!("sum_parts", [parts, n], &x_wide, &cut.rows, &mut want_sums, parts, n);
        assert_bits("sums of rows", &sums, &want_sums);

        let (pairs, pairs_wide) = operand::<H>("pairs", 2 * count);
        launch!("swiglu_forward_16", [count, 0], &pairs, &mut got, count, H::F16);
        launch!("swiglu_forward_f32", [count, 0], &pairs_wide, &mut want, count);
        assert_rounded("swiglu", &got, &want);
        let (mut dx, mut dx_wide) = (pairs, pairs_wide);
        launch!("swiglu_backward_16", [count, 0], &y, &mut dx, count, H::F16);
        launch!("swiglu_backward", [count, 0], &y_wide, &mut dx_wide, count);
        assert_rounded("gradient of swiglu", &dx, &dx_wide);
    }
    true
}

fn logits<H: Half>(sizes: [usize; 2])
where
    for<'a> crate::launch::Given<'a>: From<&'a Vec<H>> + From<&'a mut Vec<H>>,
{
    let [rows, n] = sizes;
    let (x, x_wide) = operand::<H>("x", rows * n);
    let targets: Vec<i32> = (0..rows).map(|i| if i % 4 == 3 { -1 } else { (i * 7 % n) as i32 }).collect();
    let [mut max, mut sum, mut target] = [(); 3].map(|()| vec![f32::NAN; rows]);
    let (mut all, mut all_wide) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
    let (to, none) = ((&mut max, &mut sum, &mut target), 0_usize);
    launch!("cross_entropy_stats_16", sizes, &x, &targets, n, none, n, none, to.0, to.1, to.2, rows, H::F16);
    all.copy_from_slice(&sum);
    let to = (&mut max, &mut sum, &mut target);
    launch!("cross_entropy_stats", sizes, &x_wide, &targets, n, none, n, none, to.0, to.1, to.2, rows);
    all_wide.copy_from_slice(&sum);
    assert_bits("sums of exponentials", &all, &all_wide);
    let (mut logits, mut logits_wide, scale, one) = (x.clone(), x_wide.clone(), vec![0.25_f64], 1_usize);
    let (name, of) = ("cross_entropy_backward_16", &mut logits);
    launch!(name, sizes, of, &targets, &max, &scale, n, none, n, n, none, one, rows, H::F16);
    let (name, of) = ("cross_entropy_backward", &mut logits_wide);
    launch!(name, sizes, of, &targets, &max, &scale, n, none, n, n, none, one, rows);
    assert_rounded("gradient of cross entropy", &logits, &logits_wide);
}

fn rows<H: Half>() -> bool
where
    for<'a> crate::launch::Given<'a>: From<&'a Vec<H>> + From<&'a mut Vec<H>>,
{
    for [rows, n] in [[1, 1], [17, 33], [3, 1025], [2, 9000]] {
        logits::<H>([rows, n]);
        let (count, sizes, eps) = (rows * n, [rows, n], 1e-5_f32);
        let ((x, x_wide), (dy, dy_wide)) = (operand::<H>("x", count), operand::<H>("dy", count));
        let ((gamma, gamma_wide), (beta, beta_wide)) = (operand::<H>("gamma", n), operand::<H>("beta", n));
        let (mut y, mut y_wide) = (rounded::<H>(&vec![9.0; count]), vec![9.0; count]);
        let [mut mean, mut rstd, mut want_mean, mut want_rstd] = [(); 4].map(|()| vec![f32::NAN; rows]);
        let args = (&x, &gamma, &beta);
        let name = "layer_norm_forward_16";
        if !launch!(name, sizes, args.0, args.1, args.2, eps, &mut y, &mut mean, &mut rstd, rows, n, H::F16) {
            return false;
        }
        let (m, r) = (&mut want_mean, &mut want_rstd);
        launch!("layer_norm_forward_f32", sizes, &x_wide, &gamma_wide, &beta_wide, eps, &mut y_wide, m, r, rows, n);
        assert_rounded("layer norm", &y, &y_wide);
        assert_bits("mean", &mean, &want_mean);
        assert_bits("rstd", &rstd, &want_rstd);
        let cut = RowParts::new([rows as u32]);
        let parts = cut.rows.len() - 1;
        let [mut dgamma, mut dbeta, mut want_dgamma, mut want_dbeta] = [(); 4].map(|()| vec![f32::NAN; parts * n]);
        let starts = &cut.rows;
        for accumulate in [0, 1] {
            let (mut dx, mut dx_wide) = (x.clone(), x_wide.clone());
            let (to, to_wide) = ((&mut dx, &mut dgamma, &mut dbeta), (&mut dx_wide, &mut want_dgamma, &mut want_dbeta));
            let (of, of_wide) = ((&dy, &x, &gamma), (&dy_wide, &x_wide, &gamma_wide));
            let add = accumulate;
            if n as u64 <= NORM_WIDTH {
                let (name, sizes) = ("layer_norm_backward_16", [parts, n]);
                launch!(name, sizes, of.0, of.1, of.2, &mean, &rstd, starts, to.0, add, to.1, to.2, n, H::F16);
                let (name, of, to) = ("layer_norm_backward", of_wide, to_wide);
                launch!(name, sizes, of.0, of.1, of.2, &mean, &rstd, starts, to.0, add, to.1, to.2, n);
            } else {
                let name = "layer_norm_backward_wide_16";
                launch!(name, sizes, of.0, of.1, of.2, &mean, &rstd, to.0, add, rows, n, H::F16);
                let name = "layer_norm_backward_parts_16";
                launch!(name, [parts, n], of.0, of.1, &mean, &rstd, starts, to.1, to.2, parts, n, H::F16);
                let (name, of, to) = ("layer_norm_backward_wide", of_wide, to_wide);
                launch!(name, sizes, of.0, of.1, of.2, &mean, &rstd, to.0, add, rows, n);
                let name = "layer_norm_backward_parts";
                launch!(name, [parts, n], of.0, of.1, &mean, &rstd, starts, to.1, to.2, parts, n);
            }
            assert_rounded("gradient of a layer norm", &dx, &dx_wide);
            assert_bits("gradient of gains", &dgamma, &want_dgamma);
            assert_bits("gradient of biases", &dbeta, &want_dbeta);
            let (mut dx, mut dx_wide) = (x.clone(), x_wide.clone());
            let (to, to_wide) = ((&mut dx, &mut dgamma), (&mut dx_wide, &mut want_dgamma));
            if n as u64 <= NORM_WIDTH {
                let (name, sizes) = ("rms_norm_backward_16", [parts, n]);
                launch!(name, sizes, of.0, of.1, of.2, &rstd, starts, to.0, add, to.1, n, H::F16);
                let (name, of, to) = ("rms_norm_backward", of_wide, to_wide);
                launch!(name, sizes, of.0, of.1, of.2, &rstd, starts, to.0, add, to.1, n);
            } else {
                launch!("rms_norm_backward_wide_16", sizes, of.0, of.1, of.2, &rstd, to.0, add, rows, n, H::F16);
                launch!("rms_norm_backward_parts_16", [parts, n], of.0, of.1, &rstd, starts, to.1, parts, n, H::F16);
                let (of, to) = (of_wide, to_wide);
                launch!("rms_norm_backward_wide", sizes, of.0, of.1, of.2, &rstd, to.0, add, rows, n);
                launch!("rms_norm_backward_parts", [parts, n], of.0, of.1, &rstd, starts, to.1, parts, n);
            }
            assert_rounded("gradient of an RMS norm", &dx, &dx_wide);
            assert_bits("gradient of weights", &dgamma, &want_dgamma);
        }
        launch!("rms_norm_forward_16", sizes, &x, &gamma, eps, &mut y, &mut rstd, rows, n, H::F16);
        launch!("rms_norm_forward_f32", sizes, &x_wide, &gamma_wide, eps, &mut y_wide, &mut want_rstd, rows, n);
        assert_rounded("RMS norm", &y, &y_wide);
        assert_bits("rstd", &rstd, &want_rstd);
    }
    logits::<H>([1, 50_500]); // more than is kept
    true
}

fn tables<H: Half>() -> bool
where
    for<'a> crate::launch::Given<'a>: From<&'a Vec<H>> + From<&'a mut Vec<H>>,
{
    [37, 40].into_iter().all(|h| tables_of::<H>(h))
}

/// Rows of `h`: of whole 16 bytes, or not.
fn tables_of<H: Half>(h: usize) -> bool
where
    for<'a> crate::launch::Given<'a>: From<&'a Vec<H>> + From<&'a mut Vec<H>>,
{
    let (count, held, batch) = (84, 9, 2);
    let ids: Vec<i32> = (0..count).map(|i| ((i * i * 7 + i / 3) % (held + 3)) as i32).collect();
    let ((table, table_wide), (dout, dout_wide)) = (operand::<H>("table", count * h), operand::<H>("dout", count * h));
    let (mut out, mut want) = (rounded::<H>(&vec![9.0; count * h]), vec![9.0; count * h]);
    let (size, first) = ([count * h, 0], 1_usize);
    if !launch!("embedding_forward_16", size, &ids, &table, first, held, &mut out, count, h, H::F16) {
        return false;
    }
    launch!("embedding_forward", size, &ids, &table_wide, first, held, &mut want, count, h);
    assert_rounded("lookup", &out, &want);
    let seq = count / batch;
    launch!("positions_forward_16", size, &dout, &table, first, seq, &mut out, count * h, h, H::F16);
    launch!("positions_forward", size, &dout_wide, &table_wide, first, seq, &mut want, count * h, h);
    assert_rounded("positions", &out, &want);
    let [mut sums, mut want_sums] = [(); 2].map(|()| values("dtable", count * h));
    let (order, ends) = bucketed(&ids, first, held);
    for add in [0, 1] {
        let (run, runs, sizes) = (7_usize, count / 7, [held, h.div_ceil(4)]);
        let (name, of) = ("embedding_backward_16", (&ids, &order, &ends));
        launch!(name, [held, h.div_ceil(8)], of.0, of.1, of.2, &dout, first, &mut sums, add, h, H::F16);
        launch!("embedding_backward", sizes, of.0, of.1, of.2, &dout_wide, first, &mut want_sums, add, h);
        assert_bits("gradient of a table", &sums, &want_sums);
        let name = "embedding_backward_tree_16";
        launch!(name, sizes, of.0, of.1, of.2, &dout, first, &mut sums, add, runs, run, h, H::F16);
        let name = "embedding_backward_tree";
        launch!(name, sizes, of.0, of.1, of.2, &dout_wide, first, &mut want_sums, add, runs, run, h);
        assert_bits("gradient of a table in blocks", &sums, &want_sums);
        let (one, size) = (1_usize, [seq * h, 0]);
        launch!("positions_backward_16", size, &dout, first, seq, &mut sums, add, batch, one, h, H::F16);
        launch!("positions_backward", size, &dout_wide, first, seq, &mut want_sums, add, batch, one, h);
        assert_bits("gradient of positions", &sums, &want_sums);
    }
    let (sizes, dims, key) = (vec![count as i64, h as i64, 0, 0, count as i64, h as i64 + 2], 2, (5_u32, 9_u32));
    let (p, kept) = (0.25_f32, 1.0_f32 / 0.75);
    launch!("dropout_16", [count * h, 0], &dout, &sizes, dims, key.0, key.1, p, kept, &mut out, count * h, H::F16);
    launch!("dropout", [count * h, 0], &dout_wide, &sizes, dims, key.0, key.1, p, kept, &mut want, count * h);
    assert_rounded("dropout", &out, &want);

    // Heads of whole 16 bytes, and not; the rows of what is rotated are longer, and begin at any place.
    for (heads, head_dim) in [(3, 10), (2, 16)] {
        let (row, rows) = (heads * head_dim + 1, 5_usize);
        let ((x, x_wide), angles) = (operand::<H>("x", rows * row), values("angles", rows * head_dim));
        let (mut to, mut to_wide, sizes) = (x.clone(), x_wide.clone(), [rows * heads, head_dim / 2]);
        let name = "rotary_forward_16";
        launch!(name, sizes, &x, row, &angles, Null, &mut to, row, rows, rows, heads, head_dim, H::F16);
        launch!("rotary_forward", sizes, &x_wide, row, &angles, Null, &mut to_wide, row, rows, rows, heads, head_dim);
        assert_rounded("rotated", &to, &to_wide);
        (to, to_wide) = (x.clone(), x_wide.clone());
        launch!("rotary_backward_16", sizes, &mut to, row, &angles, Null, rows, rows, heads, head_dim, H::F16);
        launch!("rotary_backward", sizes, &mut to_wide, row, &angles, Null, rows, rows, heads, head_dim);
        assert_rounded("rotated back", &to, &to_wide);
    }
    true
}

#[test]
fn elements_in_16_bits_are_those_of_f32_rounded() {
    let _ = elements::<bf16>() && elements::<f16>();
}

#[test]
fn rows_in_16_bits_are_those_of_f32_rounded() {
    let _ = rows::<bf16>() && rows::<f16>();
}

#[test]
fn tables_in_16_bits_are_those_of_f32_rounded() {
    let _ = tables::<bf16>() && tables::<f16>();
}
