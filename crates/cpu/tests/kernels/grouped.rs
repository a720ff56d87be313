//! Products of groups of rows, against a product for each group.

use meshwork_core::{Buffer, DType, tree};
use meshwork_cpu::Cpu;
use meshwork_tensor::kernel::{Gemm, GroupBlocks, Grouped, GroupedGemm, GroupedGrad, Matmul, Pointwise};
use meshwork_tensor::random::{key, normal};
use meshwork_tensor::tape::Terms;
use meshwork_tensor::{Device, Precision};
use std::ops::Range;

fn values(name: &str, count: usize) -> Buffer {
    Buffer::from_vec((0..count as u64).map(|i| normal(key(1, name), i)).collect::<Vec<f32>>())
}

fn part(x: &Buffer, range: Range<usize>) -> Buffer {
    Buffer::from_vec(x.as_slice::<f32>().unwrap()[range].to_vec())
}

fn one(cpu: &Cpu, spec: Gemm, a: &Buffer, b: &Buffer) -> Vec<f32> {
    let mut c = cpu.alloc(DType::F32, spec.m * spec.n).unwrap();
    cpu.gemm(spec, a, b, &mut c, 0).unwrap();
    c.as_slice::<f32>().unwrap().to_vec()
}

/// Uneven groups, one of them empty and one large enough to be shared: the bits of a product for each group.
#[test]
fn groups_have_the_bits_of_products_of_their_own() {
    let cpu = Cpu::default();
    for (n, k, scale) in [(5, 3, 1), (96, 80, 40)] {
        let rows = [3 * scale, 0, 17 * scale, 1];
        let total: usize = rows.iter().sum();
        let (x, w, dy) = (values("x", total * k), values("w", rows.len() * n * k), values("dy", total * n));
        for blocks in [1, 4] {
            let spec = GroupedGemm { rows: &rows, n, k, terms: Terms { segments: 1, blocks } };
            let y = cpu.grouped_linear(spec, &x, &w).unwrap();
            let dx = cpu.grouped_input_grad(spec, &dy, &w).unwrap();
            let mut first = 0;
            for (g, &m) in rows.iter().enumerate() {
                let w = part(&w, g * n * k..(g + 1) * n * k);
                let mine = part(&x, first * k..(first + m) * k);
                let want = one(&cpu, Gemm::linear(m, n, k).over(spec.terms), &mine, &w);
                assert_eq!(y.as_slice::<f32>().unwrap()[first * n..(first + m) * n], want, "group {g}");
                let mine = part(&dy, first * n..(first + m) * n);
                let want = one(&cpu, Gemm::linear_input_grad(m, n, k).over(spec.terms), &mine, &w);
                assert_eq!(dx.as_slice::<f32>().unwrap()[first * k..(first + m) * k], want, "group {g}");
                first += m;
            }
        }
    }
}

/// A fused activation is bitwise identical to one after the product, in each type in which it may be stored.
#[test]
fn the_swiglu_of_groups_has_the_bits_of_both_operations() {
    for (precision, n, k, scale) in [
        (Precision::F32, 6, 3, 1),
        (Precision::F32, 96, 80, 40),
        (Precision::Tf32, 96, 80, 40),
        (Precision::Bf16, 6, 4, 1),
        (Precision::Bf16, 96, 80, 40),
    ] {
        let cpu = Cpu::new(precision);
        let rows = [3 * scale, 0, 17 * scale, 1];
        let total: usize = rows.iter().sum();
        let (x, w) = (values("x", total * k), values("w", rows.len() * n * k));
        let spec = GroupedGemm { rows: &rows, n, k, terms: Terms::WHOLE };
        let product = cpu.grouped_linear(spec, &x, &w).unwrap();
        for stored in [DType::F32, cpu.operand_dtype(DType::F32)] {
            let (y, activated) = cpu.grouped_linear_swiglu(spec, &x, &w, stored).unwrap();
            let want = cpu.swiglu(&product, stored).unwrap();
            assert_eq!(y.as_slice::<f32>().unwrap(), product.as_slice::<f32>().unwrap());
            match stored {
                DType::F32 => assert_eq!(activated.as_slice::<f32>().unwrap(), want.as_slice::<f32>().unwrap()),
                _ => {
                    assert_eq!(activated.as_slice::<half::bf16>().unwrap(), want.as_slice::<half::bf16>().unwrap())
                }
            }
        }
    }
}

/// Blocks of any length, some without rows, whose sums are added in the tree.
#[test]
fn gradients_sum_blocks_in_the_tree() {
    let cpu = Cpu::default();
    for (n, k, scale) in [(6, 4, 1), (64, 48, 300)] {
        let blocks: [Vec<Range<usize>>; 3] = [
            vec![0..2 * scale, 2 * scale..2 * scale, 2 * scale..7 * scale],
            vec![7 * scale..7 * scale, 7 * scale..7 * scale, 7 * scale..7 * scale],
            vec![7 * scale..8 * scale, 8 * scale..9 * scale, 9 * scale..11 * scale],
        ];
        let total = 11 * scale;
        let (x, dy) = (values("x", total * k), values("dy", total * n));
        let spec = GroupedGemm { rows: &[], n, k, terms: Terms::WHOLE };
        let run = |blocks: &GroupBlocks, accumulate: bool, old: f32| {
            let (mut dw, mut db) = (Buffer::from_vec(vec![old; 1 + 3 * n * k]), Buffer::from_vec(vec![old; 1 + 3 * n]));
            let slot = |buffer| GroupedGrad { buffer, start: 1, accumulate };
            cpu.grouped_weight_grad(spec, blocks, &dy, &x, slot(&mut dw)).unwrap();
            cpu.grouped_bias_grad(blocks, n, &dy, slot(&mut db)).unwrap();
            [dw, db].map(|buffer| buffer.as_slice::<f32>().unwrap()[1..].to_vec())
        };
        let [dw, db] = run(&blocks, false, 9.0);
        for (g, blocks) in blocks.iter().enumerate() {
            let of_block = |rows: &Range<usize>| {
                let (dy, x) = (part(&dy, rows.start * n..rows.end * n), part(&x, rows.start * k..rows.end * k));
                one(&cpu, Gemm::linear_weight_grad(rows.len(), n, k), &dy, &x)
            };
            let products: Vec<Vec<f32>> = blocks.iter().map(of_block).collect();
            for i in 0..n * k {
                let terms: Vec<f32> = products.iter().map(|product| product[i]).collect();
                assert_eq!(Some(dw[g * n * k + i]), tree::sum(&terms, |a, b| a + b), "group {g}, element {i}");
            }
            for j in 0..n {
                let dy = dy.as_slice::<f32>().unwrap();
                let sum = |rows: &Range<usize>| rows.clone().fold(0.0, |sum, row| sum + dy[row * n + j]);
                let terms: Vec<f32> = blocks.iter().map(sum).collect();
                assert_eq!(Some(db[g * n + j]), tree::sum(&terms, |a, b| a + b), "group {g}, bias {j}");
            }
        }
        // One block each, added to the old contents.
        let whole = [[0, 7], [7, 7], [7, 11]].map(|[from, to]| {
            let all = from * scale..to * scale;
            vec![all]
        });
        let [fresh, added] = [run(&whole, false, 9.0), run(&whole, true, 1.0)];
        for (fresh, added) in fresh.iter().flatten().zip(added.iter().flatten()) {
            assert!((fresh + 1.0 - added).abs() <= 1e-4 * fresh.abs().max(1.0));
        }
        assert!(fresh[0][n * k..2 * n * k].iter().all(|&dw| dw == 0.0), "a group without rows");
    }
}

/// The device rounds operands.
#[test]
fn stored_operands_give_the_same_bits() {
    let cpu = Cpu::new(Precision::Bf16);
    let (rows, n, k) = ([2, 3], 4, 6);
    let (x, w) = (values("x", 5 * k), values("w", 2 * n * k));
    let stored: Vec<half::bf16> = {
        let mut to = vec![half::bf16::ZERO; 5 * k];
        meshwork_cpu::kernels::round::round(x.as_slice().unwrap(), &mut to);
        to
    };
    let spec = GroupedGemm { rows: &rows, n, k, terms: Terms::WHOLE };
    let got = cpu.grouped_linear(spec, &Buffer::from_vec(stored), &w).unwrap();
    assert_eq!(got.as_slice::<f32>().unwrap(), cpu.grouped_linear(spec, &x, &w).unwrap().as_slice::<f32>().unwrap());
}

/// Operands of 16 bits are read directly, and each result is rounded once: for small groups and for a group that
/// threads share in blocks, for whole sums and for cut ones.
#[test]
fn results_have_the_16_bits_of_both_operands() {
    let cpu = Cpu::new(Precision::Bf16);
    for (n, k, scale) in [(6, 4, 1), (800, 24, 150)] {
        let rows = [3 * scale, 0, 17 * scale, 1];
        let total: usize = rows.iter().sum();
        let [x, dy] = [values("x", total * k), values("dy", total * n)].map(|x| cpu.cast(&x, DType::Bf16).unwrap());
        let w = cpu.cast(&values("w", rows.len() * n * k), DType::Bf16).unwrap();
        let wide = cpu.cast(&w, DType::F32).unwrap();
        for blocks in [1, 4] {
            let spec = GroupedGemm { rows: &rows, n, k, terms: Terms { segments: 1, blocks } };
            for (got, want) in [
                (cpu.grouped_linear(spec, &x, &w), cpu.grouped_linear(spec, &x, &wide)),
                (cpu.grouped_input_grad(spec, &dy, &w), cpu.grouped_input_grad(spec, &dy, &wide)),
            ] {
                let (got, want) = (got.unwrap(), want.unwrap());
                assert_eq!([got.dtype(), want.dtype()], [DType::Bf16, DType::F32]);
                let want = cpu.cast(&want, DType::Bf16).unwrap();
                assert!(got.as_bytes().unwrap() == want.as_bytes().unwrap(), "{n} {k} {blocks}");
            }
        }
    }
}
