//! Sums cut into blocks: each device operation that takes blocks, against its own result for one block at a time, added
//! up by the definition of the tree.

use crate::common::values;
use meshwork_core::{Buffer, tree};
use meshwork_cpu::Cpu;
use meshwork_tensor::Device;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{Gemm, TableGrad, VocabShard};
use meshwork_tensor::tape::{RowBlocks, Terms};
use meshwork_testkit::Rng;

fn numbers(name: &str, count: usize) -> Vec<f32> {
    values(name, count).iter().map(|&value| value as f32).collect()
}

fn buffer(values: &[f32]) -> Buffer {
    Buffer::from_slice(values)
}

fn floats(buffer: &Buffer) -> Vec<f32> {
    buffer.as_slice::<f32>().unwrap().to_vec()
}

/// Vectors of one length added up in the tree, element by element.
fn tree_of(blocks: &[Vec<f32>]) -> Vec<f32> {
    let element = |j: usize| {
        let column: Vec<f32> = blocks.iter().map(|block| block[j]).collect();
        tree::sum(&column, |a, b| a + b).unwrap()
    };
    (0..blocks[0].len()).map(element).collect()
}

#[track_caller]
fn assert_bits(what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}: elements");
    let differs = got.iter().zip(wanted).position(|(got, wanted)| got.to_bits() != wanted.to_bits());
    assert_eq!(differs, None, "{what}: the first element that differs");
}

/// Terms of A `[m, k]` (or `[k, m]`) and B `[k, n]` (or `[n, k]`), gathered.
fn gathered(x: &[f32], k_first: bool, other: usize, k: usize, terms: &[usize]) -> Vec<f32> {
    let at = |i: usize, l: usize| if k_first { x[l * other + i] } else { x[i * k + l] };
    match k_first {
        true => terms.iter().flat_map(|&l| (0..other).map(move |i| at(i, l))).collect(),
        false => (0..other).flat_map(|i| terms.iter().map(move |&l| at(i, l))).collect(),
    }
}

/// A product whose blocks are products of only their terms, added up by the definition.
fn one_block_at_a_time(device: &Cpu, spec: Gemm, a: &[f32], b: &[f32]) -> Vec<f32> {
    let Gemm { m, n, k, terms, .. } = spec;
    let block = |runs: &mut dyn Iterator<Item = std::ops::Range<usize>>| {
        let mut sum = buffer(&vec![0.0; m * n]);
        for (i, run) in runs.enumerate() {
            let of: Vec<usize> = run.collect();
            let (a, b) = (gathered(a, spec.a_transposed, m, k, &of), gathered(b, !spec.b_transposed, n, k, &of));
            let spec = Gemm { k: of.len(), terms: Terms::WHOLE, accumulate: i > 0, ..spec };
            device.matmul().unwrap().gemm(spec, &buffer(&a), &buffer(&b), &mut sum, 0).unwrap();
        }
        floats(&sum)
    };
    tree_of(&terms.runs(k).map(|mut runs| block(&mut runs)).collect::<Vec<_>>())
}

#[test]
fn products_of_leaves_add_up_in_the_tree() {
    let mut rng = Rng::new(3);
    let mut orders = 0;
    for case in 0..120 {
        let precision = if case % 3 == 2 { Precision::Bf16 } else { Precision::F32 };
        let device = Cpu::new(precision);
        let terms = Terms { segments: [1, 1, 3][rng.below(3)], blocks: [1, 2, 3, 4, 7, 8, 16][rng.below(7)] };
        let (m, n) = (1 + rng.below(60), 1 + rng.below(90));
        // Empty blocks, blocks of a few terms, of one panel of the product and of several.
        let k = terms.blocks * [rng.below(20), rng.below(300), 256 * terms.blocks, rng.below(3000)][rng.below(4)];
        let spec = Gemm {
            a_transposed: rng.below(2) == 0,
            b_transposed: rng.below(2) == 0,
            ..Gemm::linear(m, n, k).over(terms)
        };
        let (a, b) = (numbers(&format!("a {case}"), m * k), numbers(&format!("b {case}"), k * n));
        let product = |spec: Gemm, a: &[f32], b: &[f32]| {
            let mut c = buffer(&vec![9.0; m * n]);
            device.matmul().unwrap().gemm(spec, &buffer(a), &buffer(b), &mut c, 0).unwrap();
            floats(&c)
        };
        let wanted = one_block_at_a_time(&device, spec, &a, &b);
        let what = format!("case {case}: {spec:?} in {precision:?}");
        assert_bits(&what, &product(spec, &a, &b), &wanted);
        orders += usize::from(product(Gemm { terms: Terms::WHOLE, ..spec }, &a, &b) != wanted);
        // Half the columns alone have the same bits.
        let half = n.div_ceil(2);
        let part = gathered(&b, spec.b_transposed, k, n, &(0..half).collect::<Vec<_>>());
        let part = match spec.b_transposed {
            true => b[..half * k].to_vec(),
            false => part,
        };
        let mut c = buffer(&vec![9.0; m * half]);
        device.matmul().unwrap().gemm(Gemm { n: half, ..spec }, &buffer(&a), &buffer(&part), &mut c, 0).unwrap();
        let rows: Vec<f32> = wanted.chunks(n).flat_map(|row| row[..half].to_vec()).collect();
        assert_bits(&format!("{what}, {half} columns"), &floats(&c), &rows);
    }
    assert!(orders > 40, "the values must tell orders apart: {orders}");
}

/// Large enough to be shared by threads and cut into blocks, in the layouts of forward, input and weight gradients.
#[test]
fn large_products_of_leaves_add_up_in_the_tree() {
    let device = Cpu::default();
    let (m, n, k) = (300, 130, 2400);
    let (a, b) = (numbers("large a", m * k), numbers("large b", k * n));
    for (segments, blocks) in [(1, 8), (3, 8), (1, 5)] {
        let terms = Terms { segments, blocks };
        for spec in [Gemm::linear(m, n, k), Gemm::linear_input_grad(m, k, n), Gemm::linear_weight_grad(k, m, n)] {
            let mut c = buffer(&vec![9.0; m * n]);
            device.matmul().unwrap().gemm(spec.over(terms), &buffer(&a), &buffer(&b), &mut c, 0).unwrap();
            let wanted = one_block_at_a_time(&device, spec.over(terms), &a, &b);
            assert_bits(&format!("{spec:?} over {terms:?}"), &floats(&c), &wanted);
        }
    }
}

/// `f64` has no path of our own, so B is not packed.
#[test]
fn products_of_f64_add_up_in_the_tree() {
    let device = Cpu::default();
    let (m, n, k) = (13, 9, 60);
    let (a, b) = (values("wide a", m * k), values("wide b", n * k));
    for (segments, blocks) in [(1, 4), (3, 5)] {
        let terms = Terms { segments, blocks };
        let product = |spec: Gemm, a: &[f64], b: &[f64], c: &mut Buffer| {
            device.matmul().unwrap().gemm(spec, &Buffer::from_slice(a), &Buffer::from_slice(b), c, 0).unwrap();
        };
        let mut c = Buffer::from_slice(&vec![9.0f64; m * n]);
        product(Gemm::linear(m, n, k).over(terms), &a, &b, &mut c);
        let of = |x: &[f64], run: &[usize]| -> Vec<f64> {
            x.chunks(k).flat_map(|row| run.iter().map(|&l| row[l]).collect::<Vec<_>>()).collect()
        };
        let sums: Vec<Vec<f64>> = terms
            .runs(k)
            .map(|runs| {
                let mut sum = Buffer::from_slice(&vec![0.0f64; m * n]);
                for (i, run) in runs.enumerate() {
                    let run: Vec<usize> = run.collect();
                    let spec = Gemm::linear(m, n, run.len()).accumulating(i > 0);
                    product(spec, &of(&a, &run), &of(&b, &run), &mut sum);
                }
                sum.as_slice::<f64>().unwrap().to_vec()
            })
            .collect();
        for (j, &got) in c.as_slice::<f64>().unwrap().iter().enumerate() {
            let column: Vec<f64> = sums.iter().map(|sum| sum[j]).collect();
            let want = tree::sum(&column, |a, b| a + b).unwrap();
            assert_eq!(got.to_bits(), want.to_bits(), "{terms:?}, element {j}");
        }
    }
}

#[test]
fn a_tree_of_vectors_is_left_where_it_is_wanted() {
    let device = Cpu::default();
    for (count, n, start, to) in [(1, 3, 5, 2), (2, 4, 0, 0), (3, 70_000, 9, 1), (8, 5, 3, 3), (11, 1, 2, 0)] {
        let x = numbers("vectors", start + count * n);
        let mut sums = buffer(&x);
        device.pointwise().unwrap().tree_sum(&mut sums, start, count, n, to).unwrap();
        let blocks: Vec<Vec<f32>> = x[start..].chunks(n).map(<[f32]>::to_vec).collect();
        assert_bits(&format!("{count} of {n}"), &floats(&sums)[to..to + n], &tree_of(&blocks));
        assert_bits("what lies before", &floats(&sums)[..to], &x[..to]);
    }
}

/// Sums over rows, block by block: each block has the bits of the sum over only its rows.
#[test]
fn sums_over_rows_are_cut_at_samples_and_slices() {
    let device = Cpu::default();
    let n = 5;
    for (samples, tokens, slices) in [(1, 1, 1), (2, 8, 4), (3, 10, 8), (2, 3, 8), (2, 400, 2)] {
        let blocks = RowBlocks { samples, slices };
        let rows = samples * tokens;
        let [dy, x] = ["dy", "x"].map(|name| numbers(name, rows * n));
        let [gamma, bias] = ["gamma", "bias"].map(|name| buffer(&numbers(name, n)));
        let [mean, rstd] = ["mean", "rstd"].map(|name| numbers(name, rows));
        let bias_grad = |rows: &[f32], blocks| device.pointwise().unwrap().bias_grad(&buffer(rows), n, blocks).unwrap();
        let gelu = |dy: &[f32], x: &[f32], blocks| {
            let mut dx = buffer(dy);
            let db = device.pointwise().unwrap().bias_gelu_grad(&mut dx, &buffer(x), &bias, blocks).unwrap();
            [floats(&dx), floats(&db)]
        };
        let norm = |dy: &[f32], x: &[f32], mean: &[f32], rstd: &[f32], blocks| {
            let (dy, x, mean, rstd) = (buffer(dy), buffer(x), buffer(mean), buffer(rstd));
            let norm = device.norm().unwrap();
            let grads = norm.layer_norm_grad(&dy, &x, &gamma, [&mean, &rstd], blocks, None);
            let (dx, dgamma, dbeta) = grads.unwrap();
            [floats(&dx), floats(&dgamma), floats(&dbeta)]
        };
        let (mut at, mut wanted) = (0, vec![Vec::new(); 6]);
        for count in blocks.rows(rows) {
            let (of, row) = (at * n..(at + count) * n, at..at + count);
            wanted[0].extend(floats(&bias_grad(&dy[of.clone()], RowBlocks::WHOLE)));
            let parts = gelu(&dy[of.clone()], &x[of.clone()], RowBlocks::WHOLE);
            let normed = norm(&dy[of.clone()], &x[of], &mean[row.clone()], &rstd[row], RowBlocks::WHOLE);
            wanted[1..].iter_mut().zip(parts.into_iter().chain(normed)).for_each(|(all, part)| all.extend(part));
            at += count;
        }
        let [dx, db] = gelu(&dy, &x, blocks);
        let [dx_norm, dgamma, dbeta] = norm(&dy, &x, &mean, &rstd, blocks);
        let got = [floats(&bias_grad(&dy, blocks)), dx, db, dx_norm, dgamma, dbeta];
        for (which, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert_bits(&format!("{samples} samples of {tokens} in {slices}: result {which}"), got, wanted);
        }
    }
}

#[test]
fn gradients_of_tables_are_summed_by_samples() {
    let device = Cpu::default();
    let (rows, width, tokens, first) = (9, 4, 6, 2);
    for samples in [1, 2, 3, 5, 8] {
        let dout = numbers("dout", samples * tokens * width);
        let mut rng = Rng::new(samples as u64);
        let ids: Vec<i32> = (0..samples * tokens).map(|_| rng.below(rows + 4) as i32 - 2).collect();
        let sample = |i: usize| (i * tokens..(i + 1) * tokens, i * tokens * width..(i + 1) * tokens * width);
        let lookup = |ids: &[i32], dout: &[f32], blocks| {
            let mut table = buffer(&vec![7.0; rows * width]);
            let dtable = TableGrad { buffer: &mut table, start: 0, rows, width, accumulate: false, blocks };
            let held = first..first + rows - 1; // and one row of padding
            device.embedding().unwrap().lookup_grad(&Buffer::from_slice(ids), &buffer(dout), held, dtable).unwrap();
            floats(&table)
        };
        let positions = |dout: &[f32], blocks| {
            let mut table = buffer(&vec![7.0; rows * width]);
            let dtable = TableGrad { buffer: &mut table, start: 0, rows, width, accumulate: false, blocks };
            device.embedding().unwrap().positions_grad(&buffer(dout), first, tokens, dtable).unwrap();
            floats(&table)
        };
        let by_sample: Vec<Vec<f32>> =
            (0..samples).map(sample).map(|(at, of)| lookup(&ids[at], &dout[of], 1)).collect();
        assert_bits(&format!("lookup, {samples} samples"), &lookup(&ids, &dout, samples), &tree_of(&by_sample));
        let by_sample: Vec<Vec<f32>> = (0..samples).map(sample).map(|(_, of)| positions(&dout[of], 1)).collect();
        assert_bits(&format!("positions, {samples} samples"), &positions(&dout, samples), &tree_of(&by_sample));
    }
}

/// Parts of a vocabulary have the same statistics as by themselves.
#[test]
fn statistics_of_a_row_are_taken_by_parts_of_the_vocabulary() {
    let device = Cpu::default();
    let (rows, vocab, pitch) = (5, 13, 16);
    let logits = numbers("logits", rows * pitch);
    let targets: Vec<i32> = (0..rows as i32).map(|row| row * 3).collect();
    let stats = |logits: &[f32], shard| {
        let targets = Buffer::from_slice(&targets);
        let (max, sums) = device.loss().unwrap().row_stats(&buffer(logits), &targets, shard).unwrap();
        [floats(&max), floats(&sums)]
    };
    let whole = VocabShard { first: 0, valid: vocab, width: pitch, skipped: 0, pitch, vocab };
    let mut next = 0;
    for part in whole.parts(8) {
        assert_eq!((part.skipped, part.width, part.first), (next, 2, next.min(vocab)));
        let alone: Vec<f32> = logits.chunks(pitch).flat_map(|row| row[next..next + 2].to_vec()).collect();
        let [max, sums] = stats(&logits, part);
        let [max_alone, sums_alone] = stats(&alone, VocabShard { skipped: 0, pitch: 2, ..part });
        assert_bits(&format!("maxima of {part:?}"), &max, &max_alone);
        assert_bits(&format!("sums of {part:?}"), &sums, &sums_alone);
        next += 2;
    }
}
