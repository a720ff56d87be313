//! Norms, bit by bit against the CPU.

use crate::launch::{At, AtMut, Null};
use crate::{assert_bits, launch, values};
use half::bf16;
use meshwork_core::{Buffer, DType};
use meshwork_cpu::Cpu;
use meshwork_kernels::{NORM_WIDTH, RowParts};
use meshwork_tensor::kernel::Norm;
use meshwork_tensor::tape::RowBlocks;

/// Rows and elements of each: rows that do not fill the last block of threads, blocks of every size, a team of half
/// warps a row that takes several rounds.
const SIZES: [[usize; 2]; 9] =
    [[1, 1], [3, 7], [77, 33], [21, 768], [5, 1024], [9, 1025], [3, 2100], [3, 5003], [2, 17_500]];

const EPS: f32 = 1e-5;

/// A gradient of gains or biases from the parts that a kernel left: the rows of each block summed.
fn finish(parts: &Vec<f32>, cut: &RowParts, n: usize) -> Vec<f32> {
    let blocks = cut.parts.len() - 1;
    let mut sums = vec![f32::NAN; blocks * n];
    launch!("sum_blocks", [blocks, n], parts, &cut.parts, &mut sums, Null, blocks, n);
    sums
}

fn row_parts(rows: usize, blocks: RowBlocks) -> RowParts {
    RowParts::new(blocks.rows(rows).map(|rows| rows as u32))
}

fn slice(buffer: &Buffer) -> &[f32] {
    buffer.as_slice().unwrap()
}

#[test]
pub fn layer_norms_are_those_of_the_cpu() {
    for [rows, n] in SIZES {
        let what = format!("{rows} rows of {n}");
        // A large mean, which a variance in one pass would not survive.
        let x: Vec<f32> = values("x", rows * n).iter().map(|x| 3.0 * x + 100.0).collect();
        let (gamma, beta) = (values("gamma", n), values("beta", n));
        let [mut y, mut mean, mut rstd] = [rows * n, rows, rows].map(|len| vec![f32::NAN; len]);
        let args = ("layer_norm_forward_f32", "layer_norm_forward_bf16");
        if !launch!(args.0, [rows, n], &x, &gamma, &beta, EPS, &mut y, &mut mean, &mut rstd, rows, n) {
            return;
        }
        let mut rounded = vec![bf16::NAN; rows * n];
        launch!(args.1, [rows, n], &x, &gamma, &beta, EPS, &mut rounded, &mut mean, &mut rstd, rows, n);
        let cpu = Cpu::new(meshwork_tensor::Precision::Bf16);
        let [x_, gamma_, beta_] = [&x, &gamma, &beta].map(|x| Buffer::from_slice(x));
        let want = cpu.layer_norm(&x_, [&gamma_, &beta_], f64::from(EPS), DType::F32).unwrap();
        let (want_rounded, ..) = cpu.layer_norm(&x_, [&gamma_, &beta_], f64::from(EPS), DType::Bf16).unwrap();
        assert_bits(&format!("y of {what}"), &y, slice(&want.0));
        assert_bits(&format!("mean of {what}"), &mean, slice(&want.1));
        assert_bits(&format!("rstd of {what}"), &rstd, slice(&want.2));
        assert_eq!(rounded, want_rounded.as_slice::<bf16>().unwrap(), "{what}");
    }
}

/// Rows of a gradient, elements of each, and blocks of rows: rows that fill rounds of a part and that do not, parts
/// with fewer rows than others, and rows that are too wide for one pass.
const GRADIENTS: [([usize; 2], usize); 12] = [
    ([1, 1], 1),
    ([3, 7], 1),
    ([17, 33], 2),
    ([21, 768], 1),
    ([5, 1024], 1),
    ([9, 1025], 3),
    ([3, 4096], 1),
    ([3, 5003], 1),
    ([2, 8192], 1),
    ([2, 17_500], 1),
    ([200, 40], 1),
    ([300, 3], 2),
];

#[test]
pub fn gradients_of_layer_norms_are_those_of_the_cpu() {
    for ([rows, n], slices) in GRADIENTS {
        let blocks = RowBlocks { samples: 1, slices };
        let what = format!("{rows} rows of {n}");
        let (x, gamma, dy) = (values("x", rows * n), values("gamma", n), values("dy", rows * n));
        let (mean, rstd) = (values("mean", rows), values("rstd", rows));
        let old = values("old", rows * n);
        let cpu = Cpu::default();
        let [dy_, x_, gamma_, mean_, rstd_] = [&dy, &x, &gamma, &mean, &rstd].map(|x| Buffer::from_slice(x));
        let cut = row_parts(rows, blocks);
        let (parts, starts) = (cut.rows.len() - 1, &cut.rows);
        for accumulate in [false, true] {
            let sum = accumulate.then(|| Buffer::from_slice(&old));
            let want = cpu.layer_norm_grad(&dy_, &x_, &gamma_, [&mean_, &rstd_], blocks, sum).unwrap();
            let (mut dx, add) = (old.clone(), i32::from(accumulate));
            let [mut dgamma, mut dbeta] = [(); 2].map(|()| vec![f32::NAN; parts * n]);
            let to = (&mut dx, &mut dgamma, &mut dbeta);
            if n as u64 <= NORM_WIDTH {
                let name = "layer_norm_backward";
                if !launch!(name, [parts, n], &dy, &x, &gamma, &mean, &rstd, starts, to.0, add, to.1, to.2, n) {
                    return;
                }
            } else {
                let name = "layer_norm_backward_wide";
                launch!(name, [rows, n], &dy, &x, &gamma, &mean, &rstd, to.0, add, rows, n);
                let name = "layer_norm_backward_parts";
                launch!(name, [parts, n], &dy, &x, &mean, &rstd, starts, to.1, to.2, parts, n);
            }
            assert_bits(&format!("dx of {what}"), &dx, slice(&want.0));
            assert_bits(&format!("dgamma of {what}"), &finish(&dgamma, &cut, n), slice(&want.1));
            assert_bits(&format!("dbeta of {what}"), &finish(&dbeta, &cut, n), slice(&want.2));
        }
    }
}

#[test]
fn rms_norms_are_those_of_the_cpu() {
    for [rows, n] in SIZES {
        let what = format!("{rows} rows of {n}");
        let (x, weight) = (values("x", rows * n), values("weight", n));
        let [mut y, mut rstd] = [rows * n, rows].map(|len| vec![f32::NAN; len]);
        if !launch!("rms_norm_forward_f32", [rows, n], &x, &weight, EPS, &mut y, &mut rstd, rows, n) {
            return;
        }
        let mut rounded = vec![bf16::NAN; rows * n];
        launch!("rms_norm_forward_bf16", [rows, n], &x, &weight, EPS, &mut rounded, &mut rstd, rows, n);
        let cpu = Cpu::new(meshwork_tensor::Precision::Bf16);
        let [x_, weight_] = [&x, &weight].map(|x| Buffer::from_slice(x));
        let want = cpu.rms_norm(&x_, &weight_, f64::from(EPS), DType::F32).unwrap();
        let (want_rounded, _) = cpu.rms_norm(&x_, &weight_, f64::from(EPS), DType::Bf16).unwrap();
        assert_bits(&format!("y of {what}"), &y, slice(&want.0));
        assert_bits(&format!("rstd of {what}"), &rstd, slice(&want.1));
        assert_eq!(rounded, want_rounded.as_slice::<bf16>().unwrap(), "{what}");
    }
}

#[test]
fn gradients_of_rms_norms_are_those_of_the_cpu() {
    for ([rows, n], slices) in GRADIENTS {
        let blocks = RowBlocks { samples: 1, slices };
        let what = format!("{rows} rows of {n}");
        let (x, weight, dy, rstd) =
            (values("x", rows * n), values("w", n), values("dy", rows * n), values("rstd", rows));
        let old = values("old", rows * n);
        let [dy_, x_, weight_, rstd_] = [&dy, &x, &weight, &rstd].map(|x| Buffer::from_slice(x));
        let cut = row_parts(rows, blocks);
        let (parts, starts) = (cut.rows.len() - 1, &cut.rows);
        for accumulate in [false, true] {
            let sum = accumulate.then(|| Buffer::from_slice(&old));
            let want = Cpu::default().rms_norm_grad(&dy_, &x_, &weight_, &rstd_, blocks, sum).unwrap();
            let (mut dx, add) = (old.clone(), i32::from(accumulate));
            let mut dweight = vec![f32::NAN; parts * n];
            let to = (&mut dx, &mut dweight);
            if n as u64 <= NORM_WIDTH {
                let name = "rms_norm_backward";
                if !launch!(name, [parts, n], &dy, &x, &weight, &rstd, starts, to.0, add, to.1, n) {
                    return;
                }
            } else {
                launch!("rms_norm_backward_wide", [rows, n], &dy, &x, &weight, &rstd, to.0, add, rows, n);
                launch!("rms_norm_backward_parts", [parts, n], &dy, &x, &rstd, starts, to.1, parts, n);
            }
            assert_bits(&format!("dx of {what}"), &dx, slice(&want.0));
            assert_bits(&format!("dweight of {what}"), &finish(&dweight, &cut, n), slice(&want.1));
        }
    }
}

/// Rows of whole 16 bytes and of others, that begin at a multiple of 16 bytes and elsewhere; of more parts than a block
/// of threads has.
#[test]
fn sums_of_rows_begin_anywhere() {
    for (rows, n) in [(130, 8), (70, 7), (300, 1028)] {
        for from in [0, 1, 2] {
            let (x, cut) = (values("x", from + rows * n), RowParts::new(std::iter::repeat_n(10, rows / 10)));
            let parts = cut.rows.len() - 1;
            let mut sums = vec![f32::NAN; from + parts * n];
            let to = AtMut(&mut sums, from);
            if !launch!("sum_parts", [parts, n], At(&x, from), &cut.rows, to, parts, n) {
                return;
            }
            let rows_of = |part: usize| cut.rows[part] as usize..cut.rows[part + 1] as usize;
            let sum = |part, column| rows_of(part).fold(0.0, |sum, row| sum + x[from + row * n + column]);
            let want: Vec<f32> = (0..parts * n).map(|at| sum(at / n, at % n)).collect();
            assert_bits(&format!("sums of {rows} rows of {n} from {from} on"), &sums[from..], &want);
        }
    }
}

/// The parts of one tensor and of two, fewer and more than a round of `sum_blocks` loads.
#[test]
pub fn sums_of_blocks_are_in_order() {
    for (starts, n) in [(vec![0_i64, 1], 1_usize), (vec![0, 64, 64, 67], 33), (vec![0, 3, 200], 40)] {
        let (blocks, all) = (starts.len() - 1, *starts.last().unwrap() as usize);
        let parts = values("parts", 2 * all * n);
        let (mut sums, mut second) = (vec![f32::NAN; blocks * n], vec![f32::NAN; blocks * n]);
        if !launch!("sum_blocks", [2 * blocks, n], &parts, &starts, &mut sums, &mut second, blocks, n) {
            return;
        }
        for (tensor, got) in [&sums, &second].into_iter().enumerate() {
            let parts_of = |block: usize| starts[block] as usize..starts[block + 1] as usize;
            let sum =
                |block, column| parts_of(block).fold(0.0, |sum, part| sum + parts[(tensor * all + part) * n + column]);
            let want: Vec<f32> = (0..blocks * n).map(|at| sum(at / n, at % n)).collect();
            assert_bits(&format!("sums of {blocks} blocks of tensor {tensor}"), got, &want);
        }
        let mut alone = vec![f32::NAN; blocks * n];
        launch!("sum_blocks", [blocks, n], &parts, &starts, &mut alone, Null, blocks, n);
        assert_bits("sums of one tensor", &alone, &sums);
    }
}
