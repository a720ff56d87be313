//! Each operation of the device against the CPU's, at odd sizes: bit by bit, or norm-wise where said. On the emulator
//! here, and on a GPU or its stand-in in `tests/gpu`.
//!
//! More than 400 lines: one test for each family of operations, and nothing else.

use crate::driver;
use meshwork_core::exact::LIMBS;
use meshwork_core::simd::{Level, level};
use meshwork_core::{Buffer, DType, Element};
use meshwork_cpu::Cpu;
use meshwork_cuda::device::Products;
use meshwork_cuda::tuning::Tuning;
use meshwork_cuda::{CudaDevice, Driver, Order};
use meshwork_optim::{AdamW, Lamb, OptimError, Optimizer, Rule, Sgd, Update};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::*;
use meshwork_tensor::random::{fill_normal, key};
use meshwork_tensor::tape::{RowBlocks, Terms};
use meshwork_tensor::{Device, Error, MAX_DIMS, Result};
use meshwork_testkit::Sampled;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

/// Values of about 1 that depend on the name.
pub fn values(name: &str, count: usize) -> Buffer {
    let mut values = vec![0.0_f32; count];
    fill_normal(key(0, name), 0, &mut values);
    Buffer::from_vec(values)
}

fn ids(count: usize, vocab: usize) -> Buffer {
    Buffer::from_vec((0..count).map(|i| ((i * i * 7 + i / 3) % vocab) as i32).collect::<Vec<i32>>())
}

/// Both devices.
pub fn devices(products: Products) -> Option<[Box<dyn Device>; 2]> {
    devices_of(products, Precision::F32)
}

/// The same, with products in a precision.
pub fn devices_of(products: Products, precision: Precision) -> Option<[Box<dyn Device>; 2]> {
    let order = Order::Seeded(products as u64 + 11);
    let device = CudaDevice::with_precision(driver(order)?, products, precision).unwrap();
    Some([Box::new(device), Box::new(Cpu::new(precision))])
}

fn bits(buffer: &Buffer) -> Vec<u8> {
    buffer.as_bytes().unwrap().to_vec()
}

/// Runs the same operation on both and compares all results bit by bit. Inputs are uploaded by `with`.
#[track_caller]
pub fn same(what: &str, run: impl Fn(&dyn Device, &dyn Fn(&Buffer) -> Buffer) -> Result<Vec<Buffer>>) {
    let Some(devices) = devices(Products::OfTheCpu) else { return };
    let [got, want] = devices.map(|device| {
        let up = |host: &Buffer| device.upload(host).unwrap();
        let results = run(&*device, &up).unwrap_or_else(|error| panic!("{what}: {error}"));
        let down = |result: &Buffer| device.download(result).unwrap_or_else(|error| panic!("{what}: {error}"));
        results.iter().map(down).collect::<Vec<_>>()
    });
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!((got.dtype(), got.count()), (want.dtype(), want.count()), "{what}: result {i}");
        assert!(bits(got) == bits(want), "{what}: result {i} has other bits: {:?}", first_other(got, want));
    }
}

/// The first number that differs: its place, what it is and what the CPU has.
fn first_other(got: &Buffer, want: &Buffer) -> Option<(usize, f32, f32)> {
    let (got, want) = (got.as_slice::<f32>().ok()?, want.as_slice::<f32>().ok()?);
    (0..got.len()).find(|&i| got[i].to_bits() != want[i].to_bits()).map(|i| (i, got[i], want[i]))
}

#[test]
fn memory_goes_up_and_down() {
    same("copies", |device, up| {
        let mut x = up(&values("x", 1001));
        device.upload_into(&values("y", 7), &mut x, 33)?;
        let part = x.slice(30..50)?;
        let mut zeros = device.zeros(DType::F32, 70)?;
        let layout = device.layout()?;
        layout.copy_into(&part, 1..20, &mut zeros, 50)?;
        Ok(vec![
            part.clone(),
            zeros,
            up(&ids(13, 9)),
            layout.swap_blocks(&x, 7, 11, 13)?,
            layout.narrow(&x, 7, 11, 13, 2..9)?,
            layout.widen(&x, 7, 20, 11, 4..17)?,
            layout.copy(&part)?,
        ])
    });
}

/// By a kernel, in the largest elements that places and distances are multiples of.
#[test]
fn rows_are_copied_whatever_their_distance() {
    fn rows<T: Element>(element: impl Fn(usize) -> T) {
        let host = Buffer::from_vec((0..1010).map(element).collect::<Vec<T>>());
        same("rows", |device, up| {
            let (x, layout) = (up(&host), device.layout()?);
            let mut all = Vec::new();
            for first in [0, 1, 2, 8] {
                let part = x.slice(first..first + 1000)?;
                all.push(layout.swap_blocks(&part, 4, 25, 10)?);
                all.push(layout.swap_blocks(&part, 40, 25, 1)?);
                all.push(layout.narrow(&part, 10, 20, 5, 3..8)?);
                all.push(layout.narrow(&part, 25, 5, 8, 1..3)?);
                all.push(layout.narrow(&part, 1000, 1, 1, 0..1)?);
            }
            Ok(all)
        });
    }
    rows(|at| at as u8);
    rows(|at| half::bf16::from_bits(at as u16));
    rows(|at| at as f32);
    rows(|at| at as i64);
}

#[test]
fn pointwise_operations_have_the_cpus_bits() {
    for [rows, n] in [[1, 1], [7, 33], [130, 41]] {
        let (x, y, bias) = (values("x", rows * n), values("y", rows * n), values("bias", n));
        same("pointwise", |device, up| {
            let of = device.pointwise()?;
            let (mut sum, mut dy) = (up(&y), up(&y));
            let (x, y, bias) = (up(&x), up(&y), up(&bias));
            of.add_assign(&mut sum, n, &x.slice(0..(rows - 1) * n)?)?;
            let blocks = RowBlocks { samples: 1, slices: 3 };
            let dbias = of.bias_gelu_grad(&mut dy, &x, &bias, blocks)?;
            Ok(vec![
                of.add(&x, &y)?,
                sum,
                of.bias(&x, &bias)?,
                of.bias_grad(&x, n, RowBlocks::WHOLE)?,
                of.bias_grad(&x, n, blocks)?,
                of.bias_residual(&x, &bias, &y)?,
                of.bias_gelu(&x, &bias, DType::F32)?,
                dbias,
                dy,
                of.gelu(&x)?,
                of.gelu_grad(&y, &x)?,
            ])
        });
    }
}

#[test]
fn dropout_swiglu_casts_and_trees_have_the_cpus_bits() {
    let (x, dy) = (values("x", 7 * 26), values("dy", 7 * 13));
    let mut mask = DropoutMask {
        p: 0.3,
        key: key(3, "mask"),
        ndim: 2,
        local: [0; MAX_DIMS],
        offset: [0; MAX_DIMS],
        global: [0; MAX_DIMS],
    };
    mask.local[..2].copy_from_slice(&[7, 26]);
    mask.offset[1] = 3;
    mask.global[..2].copy_from_slice(&[7, 40]);
    same("dropout and swiglu", |device, up| {
        let of = device.pointwise()?;
        let (x, mut pairs) = (up(&x), up(&x));
        of.swiglu_grad(&up(&dy), &mut pairs)?;
        let (brain, half) = (of.cast(&x, DType::Bf16)?, of.cast(&x, DType::F16)?);
        let back = [of.cast(&brain, DType::F32)?, of.cast(&half, DType::F32)?];
        Ok([vec![of.dropout(&x, &mask)?, of.swiglu(&x, DType::F32)?, pairs, brain, half], back.into()].concat())
    });
    for (start, to) in [(26, 26), (26, 0), (26, 13), (27, 20)] {
        same("tree_sum", |device, up| {
            let mut x = up(&x);
            device.pointwise()?.tree_sum(&mut x, start, 5, 26, to)?;
            Ok(vec![x.slice(to..to + 26)?])
        });
    }
}

const ZIPS: [Zip; 8] = [Zip::Add, Zip::Sub, Zip::Mul, Zip::Div, Zip::Keep, Zip::Drop, Zip::Second, Zip::Greater];

#[test]
fn functions_of_numbers_the_rectifier_and_sums_have_the_cpus_bits() {
    for [rows, n] in [[1, 1], [7, 33], [130, 41]] {
        let (x, dy, row) = (values("x", rows * n), values("dy", rows * n), values("row", n));
        same("elementwise", |device, up| {
            let of = device.elementwise()?;
            let [x, dy, row] = [&x, &dy, &row].map(up);
            let mut results = Vec::new();
            for f in [Map::Scale(-2.7), Map::Exp, Map::Tanh, Map::Sigmoid, Map::Silu, Map::Gelu, Map::SoftCap(1.5)] {
                results.extend([of.map(f, &x)?, of.map_grad(f, &dy, &x)?]);
            }
            let positive = of.map(Map::Exp, &x)?;
            for f in [Map::Log, Map::Sqrt] {
                results.extend([of.map(f, &positive)?, of.map_grad(f, &dy, &positive)?]);
            }
            let column = x.slice(0..rows)?;
            for f in ZIPS {
                results.push(of.zip(f, &x, &dy, [1, 1, rows * n])?);
                results.push(of.zip(f, &x, &row, [1, rows, n])?);
                results.push(of.zip(f, &x, &column, [rows, n, 1])?);
            }
            let (y, above) = device.pointwise()?.relu(&x)?;
            results.extend([device.pointwise()?.relu_grad(&dy, &above)?, y, above]);
            Ok(results)
        });
    }
    let x = values("x", 5 * 11 * 7);
    for shape in [[5, 11, 7], [35, 11, 1], [1, 5, 77]] {
        same("inner dims", |device, up| {
            let (of, x) = (device.elementwise()?, up(&x));
            let y = x.slice(2..2 + shape[0] * shape[2])?;
            ZIPS.into_iter().map(|f| of.zip(f, &x, &y, shape)).collect()
        });
        same("chosen elements", |device, up| {
            let (of, x, [outer, extent, inner]) = (device.indexing()?, up(&x), shape);
            let largest = of.argmax(&x, shape)?;
            let some = Picks { outer, extent, inner, count: 4, each: false };
            let (index, dy) = (up(&ids(4, extent)), up(&values("dy", some.taken())));
            let of_each = Picks { count: 1, each: true, ..some };
            Ok(vec![
                of.pick(&x, &largest, of_each)?,
                of.pick_grad(&dy.slice(0..of_each.taken())?, &largest, of_each)?,
                of.pick(&x, &index, some)?,
                of.pick_grad(&dy, &index, some)?,
                largest,
            ])
        });
    }
    for (shape, blocks) in [([5, 11, 7], 1), ([5, 11, 7], 4), ([1, 385, 1], 3), ([55, 7, 1], 2), ([3, 0, 2], 2)] {
        same("sum", |device, up| {
            let (of, x) = (device.reduction()?, up(&x.slice(0..shape.iter().product())?));
            let sums = of.sum(&x, shape, blocks, 0.3)?;
            Ok(vec![of.spread(&sums.slice(0..shape[0] * shape[2])?, shape, 0.7)?, sums])
        });
    }
}

/// Losses and metrics are numbers of f64 for each sample.
#[test]
fn sums_and_multiples_of_f64_have_the_cpus_bits() {
    let [a, b] = [0.1, 0.7].map(|x| Buffer::from_vec((0..77).map(|i| f64::from(i) * x).collect::<Vec<f64>>()));
    same("f64", |device, up| {
        let (a, b) = (up(&a), up(&b));
        let scale = Map::Scale(0.01);
        let of = device.elementwise()?;
        Ok(vec![device.pointwise()?.add(&a, &b)?, of.map(scale, &a)?, of.map_grad(scale, &a, &b)?])
    });
}

#[test]
fn softmax_has_the_cpus_bits() {
    for [rows, n] in [[1, 1], [9, 33], [70, 130], [3, 2100]] {
        let (x, dy) = (values("x", rows * n), values("dy", rows * n));
        same("softmax", |device, up| {
            let (of, y) = (device.reduction()?, device.reduction()?.softmax(&up(&x), n)?);
            Ok(vec![of.softmax_grad(&up(&dy), &y, n)?, y])
        });
    }
}

#[test]
fn windows_have_the_cpus_bits() {
    let of = |samples, image, channels, kernel, stride, padding| Windows {
        samples,
        image,
        channels,
        kernel,
        stride,
        padding,
    };
    for windows in [
        of(2, [7, 5], 3, [3, 3], 1, 1),
        of(3, [9, 8], 5, [3, 2], 2, 1),
        of(1, [4, 4], 1, [2, 2], 2, 0),
        of(1, [19, 21], 2, [17, 17], 1, 8), // places beyond a byte
    ] {
        let (pixels, out) = (windows.samples * windows.pixels(), windows.rows() * windows.channels);
        let (x, dy, dpatches) = (values("x", pixels), values("dy", out), values("d", windows.rows() * windows.patch()));
        same("windows", |device, up| {
            let (of, [x, dy, dpatches]) = (device.window()?, [&x, &dy, &dpatches].map(up));
            let (largest, places) = of.max_pool(windows, &x)?;
            Ok(vec![
                of.patches(windows, &x)?,
                of.patches_grad(windows, &dpatches)?,
                of.max_pool_grad(windows, &dy, &places)?,
                largest,
                places,
                of.average_pool(windows, &x)?,
                of.average_pool_grad(windows, &dy)?,
            ])
        });
    }
}

#[test]
fn norms_have_the_cpus_bits() {
    for [rows, n] in [[1, 1], [9, 33], [70, 130], [3, 1100]] {
        let (x, dy, sum) = (values("x", rows * n), values("dy", rows * n), values("sum", rows * n));
        let (gamma, beta) = (values("gamma", n), values("beta", n));
        same("norms", |device, up| {
            let of = device.norm()?;
            let [x, dy, gamma, beta] = [&x, &dy, &gamma, &beta].map(up);
            let (y, mean, rstd) = of.layer_norm(&x, [&gamma, &beta], 1e-5, DType::F32)?;
            let blocks = RowBlocks { samples: 1, slices: 4 };
            let back = of.layer_norm_grad(&dy, &x, &gamma, [&mean, &rstd], RowBlocks::WHOLE, None)?;
            let more = of.layer_norm_grad(&dy, &x, &gamma, [&mean, &rstd], blocks, Some(up(&sum)))?;
            let (root, scale) = of.rms_norm(&x, &gamma, 1e-6, DType::F32)?;
            let roots = of.rms_norm_grad(&dy, &x, &gamma, &scale, blocks, Some(up(&sum)))?;
            let (dx, dgamma, dbeta) = back;
            Ok(vec![y, mean, rstd, dx, dgamma, dbeta, more.0, more.1, more.2, root, scale, roots.0, roots.1])
        });
    }
}

/// The sort of the ids is the device's own business: the meter counts what it counts on the CPU, and so what
/// `--steps 0` predicts.
#[test]
fn gradients_of_a_table_take_the_cpus_memory() {
    let Some(devices) = devices(Products::OfTheCpu) else { return };
    let [cuda, cpu] = devices.map(|device| {
        let up = |host: &Buffer| device.upload(host).unwrap();
        let (ids, dout, mut grad) = (up(&ids(600, 9)), up(&values("dout", 600)), up(&values("old", 9)));
        let into = TableGrad { buffer: &mut grad, start: 0, rows: 9, width: 1, accumulate: true, blocks: 1 };
        device.embedding().unwrap().lookup_grad(&ids, &dout, 0..9, into).unwrap();
        device.meter().peak_bytes()
    });
    assert_eq!(cuda, cpu);
}

#[test]
fn embeddings_have_the_cpus_bits() {
    for (vocab, rows, count, h) in [(9, 0..9, 5, 3), (300, 70..220, 560, 5), (20, 3..12, 28, 300)] {
        let (table, dout, held) = (values("table", rows.len() * h), values("dout", count * h), rows.len() + 2);
        for (blocks, accumulate) in [(1, false), (1, true), (4, true)] {
            if count % blocks > 0 {
                continue;
            }
            same("embedding", |device, up| {
                let of = device.embedding()?;
                let (ids, dout) = (up(&ids(count, vocab)), up(&dout));
                let mut grad = up(&values("old", 5 + held * h));
                let into = TableGrad { buffer: &mut grad, start: 5, rows: held, width: h, accumulate, blocks };
                of.lookup_grad(&ids, &dout, rows.clone(), into)?;
                Ok(vec![of.lookup(&ids, &up(&table), rows.clone(), vocab, h)?, grad])
            });
        }
    }
    for (batch, seq, first, h) in [(1, 1, 0, 1), (5, 7, 2, 33), (8, 3, 0, 100)] {
        let (x, rows) = (values("x", batch * seq * h), first + seq + 1);
        for (blocks, accumulate) in [(1, false), (3, true), (8, false)] {
            same("positions", |device, up| {
                let (x, mut grad) = (up(&x), up(&values("old", rows * h + 3)));
                let into = TableGrad { buffer: &mut grad, start: 3, rows, width: h, accumulate, blocks };
                device.embedding()?.positions_grad(&x, first, seq, into)?;
                Ok(vec![device.embedding()?.positions(&x, &up(&values("table", rows * h)), first, seq, h)?, grad])
            });
        }
    }
}

#[test]
fn products_and_attention_have_the_cpus_bits() {
    if level() < Level::Avx2 {
        eprintln!("left out: this CPU has no fused multiply-add, and other bits");
        return;
    }
    let specs = [
        Gemm::linear(7, 33, 700),
        Gemm::linear(7, 33, 70).accumulating(true),
        Gemm::linear_input_grad(5, 30, 17),
        Gemm::linear_weight_grad(52, 3, 9).over(Terms { segments: 4, blocks: 5 }),
    ];
    for spec in specs {
        let (a, b) = (values("a", spec.m * spec.k), values("b", spec.k * spec.n));
        same("products", |device, up| {
            let mut c = up(&values("c", spec.m * spec.n + 3));
            device.matmul()?.gemm(spec, &up(&a), &up(&b), &mut c, 2)?;
            Ok(vec![c])
        });
    }
    let (x, w, bias) = (values("x", 9 * 21), values("w", 34 * 21), values("bias", 34));
    same("linear", |device, up| {
        let (of, [x, w, bias]) = (device.matmul()?, [&x, &w, &bias].map(up));
        let (y, activated) = of.linear_bias_gelu([9, 34, 21], &x, &w, &bias, DType::F32)?;
        let (pairs, gated) = of.linear_swiglu([9, 34, 21], &x, &w, DType::F32)?;
        Ok(vec![of.linear_bias([9, 34, 21], &x, &w, &bias)?, y, activated, pairs, gated])
    });
    let dropout = AttentionDropout { p: 0.2, key: key(5, "a"), first_sample: 3, first_head: 2, global_heads: 11 };
    for (shape, dropout) in [
        (AttentionShape { batch: 2, seq: 37, heads: 2, head_dim: 20 }, None),
        (AttentionShape { batch: 1, seq: 45, heads: 3, head_dim: 72 }, Some(&dropout)),
    ] {
        let width = shape.batch * shape.seq * shape.heads * shape.head_dim;
        let (qkv, dout) = (values("qkv", 3 * width), values("dout", width));
        same("attention", |device, up| {
            let (of, qkv, masks) =
                (device.attention()?, up(&qkv), AttentionMasks { dropout, ..AttentionMasks::default() });
            let (out, lse) = of.causal(shape, &qkv, masks)?;
            let dqkv = of.causal_grad(shape, &up(&dout), &qkv, &out, &lse, masks)?;
            Ok(vec![out, lse, dqkv])
        });
    }
}

#[test]
fn grouped_attention_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    for (head_dim, group, kv_heads, first_kv_head, rotary) in [
        (10, 1, 6, 0, None),
        (10, 3, 4, 1, Some(Rotary::new(100.0))),
        (10, 2, 3, 0, None),
        (256, 6, 1, 0, Some(Rotary::new(100.0))),
    ] {
        let queries = AttentionShape { batch: 2, seq: 19, heads: 6, head_dim };
        let shape = GroupedShape { group, kv_heads, first_kv_head, rotary, ..GroupedShape::alone(queries) };
        let rows = queries.batch * queries.seq;
        let (width, kv_width) = (6 * head_dim, 2 * head_dim * kv_heads);
        let (q, kv, dout) = (values("q", rows * width), values("kv", rows * kv_width), values("dout", rows * width));
        same("grouped attention", |device, up| {
            let (of, q, kv, masks) = (device.attention()?, up(&q), up(&kv), AttentionMasks::default());
            let (out, lse) = of.grouped(shape, &q, &kv, masks)?;
            let (dq, dkv) = of.grouped_grad(shape, &up(&dout), &q, &kv, &out, &lse, masks)?;
            Ok(vec![out, lse, dq, dkv])
        });
    }
}

/// Cross attention with padded keys, bidirectional attention with slopes, a cap, a window and dropout, and a bias of
/// pairs with its gradient. The kernels for tensor cores have none of these.
#[test]
fn attention_of_every_pattern_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let queries = AttentionShape { batch: 2, seq: 19, heads: 4, head_dim: 6 };
    let (rows, dropout) = (
        queries.batch * queries.seq,
        AttentionDropout { p: 0.25, key: key(3, "rows"), first_sample: 1, first_head: 2, global_heads: 9 },
    );
    let (q, dout, bias) = (values("q", rows * 24), values("dout", rows * 24), values("bias", 4 * 19 * 37));
    let lengths = Buffer::from_vec(vec![31, 0]);
    for (pattern, keys, slopes, window) in [
        (Pattern::Cross, 37, None, None),
        (Pattern::Bidirectional, 19, Some(&[0.5, 0.25, 0.125, 0.0625][..]), Some(5)),
        (Pattern::Bidirectional, 19, None, None),
        (Pattern::Causal, 19, Some(&[0.5, 0.25, 0.125, 0.0625]), None),
    ] {
        let kv = values("kv", 2 * keys * 24);
        same("attention of a pattern", |device, up| {
            let (of, [q, kv, dout, bias]) = (device.attention()?, [&q, &kv, &dout, &bias].map(up));
            let (lengths, bias) = (up(&lengths), bias.slice(0..4 * 19 * keys)?);
            let sequence = keys.max(19);
            let shape = GroupedShape { keys, sequence, group: 2, kv_heads: 2, ..GroupedShape::alone(queries) };
            let crosses = pattern == Pattern::Cross;
            let lengths = crosses.then_some(&lengths);
            let plain =
                AttentionMasks { pattern, window, lengths, slopes, cap: Some(2.0), ..AttentionMasks::default() };
            let mut results = Vec::new();
            for (dropout, bias) in [(None, None), (Some(&dropout), None), (Some(&dropout), Some(&bias))] {
                let masks = AttentionMasks { dropout, bias, ..plain };
                let (out, lse) = of.grouped(shape, &q, &kv, masks)?;
                let (dq, dkv) = of.grouped_grad(shape, &dout, &q, &kv, &out, &lse, masks)?;
                if bias.is_some() {
                    let mut dbias = device.zeros(DType::F32, 4 * 19 * keys)?;
                    let (rows, width, blocks) = (4 * 19, keys, queries.batch);
                    let into = TableGrad { buffer: &mut dbias, start: 0, rows, width, accumulate: false, blocks };
                    of.pair_bias_grad(shape, &dout, &q, &kv, &out, &lse, masks, into)?;
                    results.push(dbias);
                }
                results.extend([out, lse, dq, dkv]);
            }
            Ok(results)
        });
    }
}

/// Two documents in one sample, and in the other one that began before it.
fn positions(seq: usize) -> Buffer {
    let of = |sample: usize| (0..seq).map(move |place| if place < 7 { place + sample * 3 } else { place - 7 } as i32);
    Buffer::from_vec((0..2).flat_map(of).collect::<Vec<i32>>())
}

#[test]
fn attention_within_documents_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let queries = AttentionShape { batch: 2, seq: 150, heads: 4, head_dim: 6 };
    let (rows, places) = (queries.batch * queries.seq, positions(queries.seq));
    let (q, kv, dout) = (values("q", rows * 24), values("kv", rows * 24), values("dout", rows * 24));
    let qkv = values("qkv", rows * 72);
    for apart in [false, true] {
        same("attention within documents", |device, up| {
            let of = device.attention()?;
            let [q, kv, qkv, dout, positions] = [&q, &kv, &qkv, &dout, &places].map(up);
            let documents = Some(DocumentPositions { positions: &positions, apart });
            let masks = AttentionMasks { documents, ..AttentionMasks::default() };
            let rotary = Some(Rotary::new(100.0));
            let shape = GroupedShape { group: 2, kv_heads: 2, rotary, ..GroupedShape::alone(queries) };
            let (out, lse) = of.grouped(shape, &q, &kv, masks)?;
            let (dq, dkv) = of.grouped_grad(shape, &dout, &q, &kv, &out, &lse, masks)?;
            let (fused, fused_lse) = of.causal(queries, &qkv, masks)?;
            let dqkv = of.causal_grad(queries, &dout, &qkv, &fused, &fused_lse, masks)?;
            Ok(vec![out, lse, dq, dkv, fused, fused_lse, dqkv])
        });
    }
}

/// Queries that are some of the tokens, over the keys of all tokens or of some before them, rotated, within documents
/// or not, with dropout; in both precisions, for tensor cores have no kernels that drop.
#[test]
fn attention_of_some_of_the_tokens_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let queries = AttentionShape { batch: 2, seq: 70, heads: 4, head_dim: 6 };
    let (rows, places) = (queries.batch * queries.seq, positions(150));
    let (q, kv, dout) = (values("q", rows * 24), values("kv", 2 * 150 * 24), values("dout", rows * 24));
    let dropout = AttentionDropout { p: 0.25, key: key(3, "rows"), first_sample: 1, first_head: 2, global_heads: 9 };
    for (apart, (first_key, keys)) in
        [None, Some(false), Some(true)].into_iter().flat_map(|apart| [(0, 150), (40, 60)].map(|keys| (apart, keys)))
    {
        same("attention of some of the tokens", |device, up| {
            let [q, kv, dout, positions] = [&q, &kv, &dout, &places].map(up);
            let kv = device.layout()?.narrow(&kv, 2, 150, 24, first_key..first_key + keys)?;
            let documents = apart.map(|apart| DocumentPositions { positions: &positions, apart });
            let masks = AttentionMasks { dropout: Some(&dropout), documents, ..AttentionMasks::default() };
            let heads = GroupedShape {
                group: 2,
                kv_heads: 2,
                rotary: Some(Rotary::new(100.0)),
                ..GroupedShape::alone(queries)
            };
            let shape = GroupedShape { keys, first_query: 75, first_key, sequence: 150, ..heads };
            results_of_grouped(device, shape, [&q, &kv, &dout], masks)
        });
    }
}

/// With products of bf16 and fast numerics: norm-wise, fused and grouped, rotated, within documents, with dropout of
/// the same elements.
#[test]
fn attention_on_tensor_cores_is_near_that_of_the_cpu() {
    for case in [
        (16, false, None, None),
        (16, false, Some(false), None),
        (16, false, Some(true), None),
        (16, false, Some(true), Some(70)),
        (16, false, None, Some(33)),
        (16, true, Some(true), None),
        (136, true, None, Some(70)),
    ]
    .into_iter()
    .sampled_in_turn(4, 2)
    {
        let Some(driver) = driver(Order::Seeded(31)) else { return };
        is_near_on_tensor_cores(driver, case, OF_BF16, Tuning::default());
    }
}

/// The same in TF32, eight times as near.
#[test]
fn attention_of_tf32_on_tensor_cores_is_near_that_of_the_cpu() {
    for case in [
        (16, false, None, Some(33)),
        (64, true, Some(true), None),
        (16, false, Some(false), None),
        (136, true, None, Some(70)),
        (128, false, Some(true), Some(70)),
        (16, false, Some(true), None),
    ]
    .into_iter()
    .sampled_in_turn(3, 1)
    {
        let Some(driver) = driver(Order::Seeded(35)) else { return };
        is_near_on_tensor_cores(driver, case, OF_TF32, Tuning::default());
    }
}

/// The same by the kernels for sm_90a, which a table chooses.
#[test]
fn attention_of_the_kernels_for_sm_90a_is_near_that_of_the_cpu() {
    for case in [(16, false, Some(true), Some(70)), (128, false, None, None)].into_iter().sampled_in_turn(2, 1) {
        let Some(driver) = driver(Order::Seeded(33)) else { return };
        let of = &driver.properties().architecture;
        let row = |kernel| format!("[[{of}]]\nkernel = \"flash_{kernel}\"\nvariant = \"sm_90a\"\n");
        let all = ["forward_64", "forward_128", "backward_q_64", "backward_q_128", "backward_kv_64", "backward_kv_128"];
        match Tuning::parse(&all.map(row).concat(), of) {
            Ok(tuning) => is_near_on_tensor_cores(driver, case, OF_BF16, tuning),
            Err(refused) => return eprintln!("left out: {refused}"),
        }
    }
}

/// The length of heads, whether elements are dropped, whether documents are apart where there are some, and the window.
type OnTensorCores = (usize, bool, Option<bool>, Option<usize>);

/// A precision, that of the CPU which it is held against, and the largest difference from it.
type Held = (Precision, Precision, f64);
const OF_BF16: Held = (Precision::Bf16, Precision::F32, 1e-2);
const OF_TF32: Held = (Precision::Tf32, Precision::Tf32, 1e-2 / 8.0);

fn is_near_on_tensor_cores(driver: Arc<dyn Driver>, case: OnTensorCores, held: Held, tuning: Tuning) {
    let (precision, of_cpu, bound) = held;
    let runs = [80..150, 3..33, 34..84];
    let dropout = AttentionDropout { p: 0.25, key: key(3, "rows"), first_sample: 1, first_head: 2, global_heads: 9 };
    let run = |device: &dyn Device, (head_dim, drops, apart, window): OnTensorCores| {
        let dropout = drops.then_some(&dropout);
        let queries = AttentionShape { batch: 2, seq: 150, heads: 4, head_dim };
        let (rows, places, width) = (queries.batch * queries.seq, positions(queries.seq), 4 * head_dim);
        let (q, kv, dout) =
            (values("q", rows * width), values("kv", rows * 6 * head_dim), values("dout", rows * width));
        let qkv = values("qkv", rows * 3 * width);
        let of = device.attention()?;
        let up = |host: &Buffer| device.upload(host);
        let (q, kv, qkv, dout, positions) = (up(&q)?, up(&kv)?, up(&qkv)?, up(&dout)?, up(&places)?);
        let documents = apart.map(|apart| DocumentPositions { positions: &positions, apart });
        let masks = AttentionMasks { dropout, documents, window, ..AttentionMasks::default() };
        let (heads, rotary) = (GroupedShape::alone(queries), Some(Rotary::new(100.0)));
        let shape = GroupedShape { group: 2, kv_heads: 3, first_kv_head: 1, rotary, ..heads };
        let (out, lse) = of.grouped(shape, &q, &kv, masks)?;
        let (dq, dkv) = of.grouped_grad(shape, &dout, &q, &kv, &out, &lse, masks)?;
        let (fused, fused_lse) = of.causal(queries, &qkv, masks)?;
        let dqkv = of.causal_grad(queries, &dout, &qkv, &fused, &fused_lse, masks)?;
        let of_runs = AttentionMasks { runs: Some(&runs), ..masks };
        let (some, some_lse) = of.grouped(shape, &q, &kv, of_runs)?;
        let (some_dq, some_dkv) = of.grouped_grad(shape, &dout, &q, &kv, &some, &some_lse, of_runs)?;
        let results = [out, lse, dq, dkv, fused, fused_lse, dqkv, some, some_lse, some_dq, some_dkv];
        results.iter().map(|result| device.download(result)).collect::<Result<Vec<Buffer>>>()
    };
    let device = CudaDevice::with_precision(driver, Products::OfTheLibrary, precision).unwrap();
    let device = device.with_tuning(tuning).unwrap();
    let (got, want) = (run(&device, case).unwrap(), run(&Cpu::new(of_cpu), case).unwrap());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let (got, want) = (got.as_slice::<f32>().unwrap(), want.as_slice::<f32>().unwrap());
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied());
        assert!(error > 0.0 && error < bound, "result {i} of {case:?} in {precision:?}: {error:e}");
    }
}

/// Parts of a flat buffer begin between multiples of 16 bytes: as a bias that an epilogue reads by 16 bytes, and as
/// operands of tensor cores, they have the bits that they have elsewhere. They were given to the library and to kernels
/// as they lie, and a GPU faults there.
#[test]
fn operands_may_begin_anywhere_in_a_flat_buffer() {
    let attended = AttentionShape { batch: 1, seq: 37, heads: 2, head_dim: 16 };
    let grouped = GroupedShape { group: 2, kv_heads: 1, ..GroupedShape::alone(attended) };
    let halves = |name: &str, count: usize| numbers::<f32>(&values(name, count)).into_iter().map(half::bf16::from_f32);
    let [m, n, k] = [5, 8, 24];
    let run = |device: &dyn Device, precision: Precision, first: usize| -> Result<Vec<Buffer>> {
        let bf16 = precision == Precision::Bf16;
        let up = |name: &str, count: usize, bf16: bool| {
            let [zeros, all] = [first, first + count];
            let flat = match bf16 {
                true => Buffer::from_vec(
                    vec![half::bf16::ZERO; zeros].into_iter().chain(halves(name, count)).collect::<Vec<_>>(),
                ),
                false => Buffer::from_vec([vec![0.0; zeros], numbers::<f32>(&values(name, count))].concat()),
            };
            Ok::<_, Error>(device.upload(&flat)?.slice(first..all)?)
        };
        let product = device.matmul()?.linear_bias(
            [m, n, k],
            &up("x", m * k, bf16)?,
            &up("w", n * k, bf16)?,
            &up("bias", n, bf16)?,
        )?;
        let mut results = vec![product];
        if precision != Precision::F32 {
            let (attention, none) = (device.attention()?, AttentionMasks::default());
            let (qkv, dout) = (up("qkv", 37 * 96, bf16)?, up("dout", 37 * 32, bf16)?);
            let (out, lse) = attention.causal(attended, &qkv, none)?;
            results.push(attention.causal_grad(attended, &dout, &qkv, &out, &lse, none)?);
            let (q, kv) = (up("q", 37 * 32, bf16)?, up("kv", 37 * 32, bf16)?);
            let (other, other_lse) = attention.grouped(grouped, &q, &kv, none)?;
            let (dq, dkv) = attention.grouped_grad(grouped, &dout, &q, &kv, &other, &other_lse, none)?;
            results.extend([out, other, dq, dkv]);
        }
        results.iter().map(|result| device.download(result)).collect()
    };
    for precision in Precision::ALL {
        let Some(driver) = driver(Order::Seeded(7)) else { return };
        let device = CudaDevice::with_precision(driver, Products::OfTheLibrary, precision).unwrap();
        let want = run(&device, precision, 0).unwrap();
        for first in [1, 2, 3, 4, 6] {
            let got =
                run(&device, precision, first).unwrap_or_else(|error| panic!("{precision:?}, from {first}: {error}"));
            assert!(got.iter().map(bits).eq(want.iter().map(bits)), "{precision:?}, from {first}");
        }
    }
}

/// A prompt, a token, several tokens, whose keys lie in a cache; a window or none.
#[test]
fn attention_with_a_cache_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    for window in [None, Some(7)] {
        same("attention with a cache", |device, up| {
            let (of, mut past, mut results) = (device.attention()?, 0, Vec::new());
            let masks = AttentionMasks { window, ..AttentionMasks::default() };
            let mut cache = device.zeros(DType::F32, 2 * 30 * 2 * 3 * 10)?;
            for seq in [19, 1, 4, 1] {
                let queries = AttentionShape { batch: 2, seq, heads: 6, head_dim: 10 };
                let new = GroupedShape { group: 2, kv_heads: 3, ..GroupedShape::alone(queries) };
                let shape = GroupedShape { keys: 30, first_query: past, ..new };
                let [q, kv] = [("q", 60), ("kv", 60)].map(|(name, width)| up(&values(name, 2 * seq * width)));
                let of_keys =
                    TurnedHeads { rotary: Rotary::new(100.0), seq, first: past, all: 6, heads: 3, head_dim: 10 };
                let kv = of.turn(of_keys, &kv)?;
                for sample in 0..2 {
                    let new = sample * seq * 60..(sample + 1) * seq * 60;
                    device.layout()?.copy_into(&kv, new, &mut cache, (sample * 30 + past) * 60)?;
                }
                let (out, lse) =
                    of.grouped(shape, &of.turn(TurnedHeads { heads: 6, ..of_keys }, &q)?, &cache, masks)?;
                results.extend([out, lse]);
                past += seq;
            }
            Ok([results, vec![cache]].concat())
        });
    }
}

/// Grouped attention, its gradients, and its result joined with another one.
fn results_of_grouped(
    device: &dyn Device,
    shape: GroupedShape,
    [q, kv, dout]: [&Buffer; 3],
    masks: AttentionMasks<'_>,
) -> Result<Vec<Buffer>> {
    let (attention, layout) = (device.attention()?, device.layout()?);
    let (out, lse) = attention.grouped(shape, q, kv, masks)?;
    let (dq, dkv) = attention.grouped_grad(shape, dout, q, kv, &out, &lse, masks)?;
    // The zeros of keys that no query sees have either sign.
    let mut sum = device.zeros(DType::F32, dkv.count())?;
    device.pointwise()?.add_assign(&mut sum, 0, &dkv)?;
    let [mut joined, mut sums] = [layout.copy(&out)?, layout.copy(&lse)?];
    let part_lse = layout.narrow(&dq, 1, dq.count(), 1, 0..lse.count())?;
    attention.join(shape.queries, &mut joined, &mut sums, &dq, &part_lse)?;
    Ok(vec![out, lse, dq, sum, joined, sums])
}

/// Queries of several runs of tokens in one call, rotated, within documents or not, with a window or not.
#[test]
fn attention_of_runs_of_tokens_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let queries = AttentionShape { batch: 2, seq: 70, heads: 4, head_dim: 6 };
    let (rows, places, runs) = (queries.batch * queries.seq, positions(150), [100..140, 3..33]);
    let (q, kv, dout) = (values("q", rows * 24), values("kv", 2 * 150 * 24), values("dout", rows * 24));
    for (apart, window) in [(None, None), (Some(false), Some(40)), (Some(true), None), (None, Some(9))] {
        same("attention of runs of tokens", |device, up| {
            let [q, kv, dout, positions] = [&q, &kv, &dout, &places].map(up);
            let documents = apart.map(|apart| DocumentPositions { positions: &positions, apart });
            let masks = AttentionMasks { documents, window, runs: Some(&runs), ..AttentionMasks::default() };
            let rotary = Some(Rotary::new(100.0));
            let heads = GroupedShape { group: 2, kv_heads: 2, rotary, ..GroupedShape::alone(queries) };
            let shape = GroupedShape { keys: 150, sequence: 150, ..heads };
            results_of_grouped(device, shape, [&q, &kv, &dout], masks)
        });
    }
}

/// A kernel finds it; the host hears of it when it next waits.
#[test]
fn positions_that_do_not_follow_are_an_error() {
    let Some([device, _]) = devices(Products::OfTheCpu) else { return };
    let up = |host: &Buffer| device.upload(host).unwrap();
    let shape = AttentionShape { batch: 1, seq: 3, heads: 1, head_dim: 2 };
    let positions = up(&Buffer::from_vec(vec![0_i32, 2, 3]));
    let documents = Some(DocumentPositions { positions: &positions, apart: true });
    let masks = AttentionMasks { documents, ..AttentionMasks::default() };
    let (out, _) = device.attention().unwrap().causal(shape, &up(&values("qkv", 18)), masks).unwrap();
    let error = device.download(&out).unwrap_err().to_string();
    assert!(error.starts_with("attention: token 1 of sample 0 is at position 2 of its document: 0 begins"), "{error}");
}

#[test]
fn losses_have_the_cpus_bits_but_for_logarithms() {
    let (rows, width, samples) = (21, 45, 3);
    let logits = values("logits", rows * width);
    let mut targets = ids(rows, 40);
    targets.as_mut_slice::<i32>().unwrap()[4] = -1;
    let shard = VocabShard { first: 0, valid: 40, width: 41, skipped: 2, pitch: width, vocab: 40 };
    let other = VocabShard { first: 7, valid: 11, width: 20, skipped: 3, pitch: width, vocab: 40 };
    same("cross entropy", |device, up| {
        let (of, mut logits, targets) = (device.loss()?, up(&logits), up(&targets));
        let ((max, sums), (local, mut part)) =
            (of.row_stats(&logits, &targets, shard)?, of.row_stats(&logits, &targets, other)?);
        of.rescale(&mut part, &local, &max)?;
        let mut larger = up(&values("max", rows));
        of.larger(&mut larger, &max)?;
        of.grad(&mut logits, &targets, &max, &up(&Buffer::from_vec(vec![0.5_f64, 0.1, 3.0])), shard)?;
        Ok(vec![max, sums, local, part, larger, logits])
    });
    let Some(devices) = devices(Products::OfTheCpu) else { return };
    let [got, want] = devices.map(|device| {
        let [logits, targets] = [&logits, &targets].map(|host| device.upload(host).unwrap());
        let (max, sums) = device.loss().unwrap().row_stats(&logits, &targets, shard).unwrap();
        let (totals, lse) = device.loss().unwrap().total(&max, &sums, &targets, samples).unwrap();
        let down = |buffer| device.download(buffer).unwrap();
        (numbers::<f64>(&down(&totals)), numbers::<f32>(&down(&lse)))
    });
    let near = |a: f64, b: f64, of: f64| (a - b).abs() <= of * b.abs();
    assert!(got.0.iter().zip(&want.0).all(|(&a, &b)| near(a, b, 1e-14)), "{:?} {:?}", got.0, want.0);
    assert!(got.1.iter().zip(&want.1).all(|(&a, &b)| near(a.into(), b.into(), 2e-7)), "{:?} {:?}", got.1, want.1);
}

pub fn numbers<T: Element>(buffer: &Buffer) -> Vec<T> {
    buffer.as_slice::<T>().unwrap().to_vec()
}

#[test]
fn updates_and_norms_have_the_cpus_bits() {
    let (w, g) = (values("w", 5001), values("g", 5001));
    let update = Update { step: 3, lr: 3e-3, grad_scale: 0.7, decay_factor: 0.5 };
    let momentum = Sgd { momentum: 0.9, weight_decay: 0.1 };
    for rule in [Rule::from(AdamW::default()), Rule::from(Sgd::default()), Rule::from(momentum)] {
        same(rule.name(), |device, up| {
            let (mut w, g) = (up(&w), up(&g));
            let mut states: Vec<Buffer> = rule.state_names().iter().map(|_| up(&g_squared(5001))).collect();
            let ranges = [3..4001, 4001..4001, 4002..4003, 4010..5001];
            let flat = FlatParts { weights: &mut w, grads: &g, states: &mut states, ranges: &ranges };
            device.optim()?.update(&rule, update, &mut [flat])?;
            states.push(w);
            Ok(states)
        });
    }
    same("sums of squares", |device, up| {
        let (x, of) = (up(&values("x", 70_000)), device.optim()?);
        let parts = |ranges: &[Range<usize>]| -> Vec<Buffer> {
            ranges.iter().map(|range| x.slice(range.clone()).unwrap()).collect()
        };
        let mut sums = up(&Buffer::from_vec(vec![0.5_f64; LIMBS + 3]));
        of.sum_of_squares(&parts(&[3..69_000, 0..0, 5..6, 1000..40_001]), &mut sums, 1)?;
        of.sum_of_squares(&parts(&[5..5, 9..9]), &mut sums, 0)?;
        of.exact_sum_of_squares(&parts(&[1..50_001, 7..7, 9..10, 60_000..70_000]), &mut sums, 2)?;
        let mut zeroed = up(&values("zeroed", 50));
        of.zero(&mut zeroed, 3..40)?;
        Ok(vec![sums, zeroed])
    });
}

fn g_squared(count: usize) -> Buffer {
    let mut values = values("state", count);
    values.as_mut_slice::<f32>().unwrap().iter_mut().for_each(|x| *x *= *x);
    values
}

/// Norm-wise 1e-5 where the library chooses the order of sums.
#[test]
fn products_of_the_library_are_near_the_cpus() {
    let Some([device, cpu]) = devices(Products::OfTheLibrary) else { return };
    for spec in [Gemm::linear(37, 65, 700), Gemm::linear_input_grad(5, 300, 17), Gemm::linear_weight_grad(520, 3, 9)] {
        let (a, b) = (values("a", spec.m * spec.k), values("b", spec.k * spec.n));
        let [got, want] = [&device, &cpu].map(|device| {
            let mut c = device.zeros(DType::F32, spec.m * spec.n).unwrap();
            let [a, b] = [&a, &b].map(|host| device.upload(host).unwrap());
            device.matmul().unwrap().gemm(spec, &a, &b, &mut c, 0).unwrap();
            numbers::<f32>(&device.download(&c).unwrap())
        });
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b));
        assert!(error <= 1e-5 * norm(&mut want.iter().copied()), "{spec:?}: {error:e}");
        assert!(error > 0.0, "{spec:?} has another order of sums");
    }
}

#[test]
fn channel_norms_squared_errors_and_accuracy_have_the_cpus_bits() {
    for [blocks, rows, channels, groups] in [[1, 130, 7, 7], [3, 77, 12, 4]] {
        let of = Groups { blocks, rows, channels, groups };
        let count = blocks * rows * channels;
        same("channel norms", |device, up| {
            let (norm, x, dy) = (device.channel_norm()?, up(&values("x", count)), up(&values("dy", count)));
            let [gamma, beta] = ["gamma", "beta"].map(|name| up(&values(name, channels)));
            let (mean, variance) = norm.moments(of, &x)?;
            let by = MeanVariance { mean: &mean, variance: &variance, eps: 1e-5 };
            let mut results = vec![norm.normalise(of, &x, by, [&gamma, &beta])?];
            for statistics in [Statistics::OfInput, Statistics::Given] {
                let (dx, dgamma, dbeta) = norm.normalise_grad(of, &dy, &x, by, statistics, &gamma)?;
                results.extend([dx, dgamma, dbeta]);
            }
            Ok([results, vec![mean.clone(), variance.clone()]].concat())
        });
    }
    let (x, t, dloss) = (values("x", 180), values("t", 180), Buffer::from_vec(vec![0.5_f64, -2.0, 3.0]));
    same("squared errors", |device, up| {
        let (of, x, t) = (device.reduction()?, up(&x), up(&t));
        let blocks = Terms { segments: 4, blocks: 5 };
        Ok(vec![
            of.squared_error(&x, &t, 3, Terms::WHOLE, 0.7)?,
            of.squared_error(&x, &t, 3, blocks, 0.7)?,
            of.squared_error_grad(&x, &t, &up(&dloss), 0.7)?,
        ])
    });
    same("preferences", |device, up| {
        let (loss, of) = (device.loss()?, Preference { beta: 0.3, label_smoothing: 0.1 });
        // Two samples with room for two pairs, of which the second has one.
        let losses = vec![1.0_f64, 2.0, 5.0, 3.5, 0.5, 2.5, 9.0, 9.0];
        let [losses, reference, dloss] =
            [losses, vec![1.5, 1.0, 5.0, 3.0, 1.0, 1.0, 8.0, 7.0], vec![0.5, 0.25]].map(|of| up(&Buffer::from_vec(of)));
        let pairs = up(&Buffer::from_vec(vec![2_i32, 1]));
        let answers = PairLosses { losses: &losses, reference: &reference, pairs: &pairs };
        let number = |number| loss.preference(of, number, answers);
        Ok(vec![
            number(PairNumber::Loss)?,
            number(PairNumber::Margin)?,
            number(PairNumber::Correct)?,
            loss.preference_grad(of, answers, &dloss)?,
        ])
    });
    same("sums of groups", |device, up| {
        let loss = device.loss()?;
        let values = up(&Buffer::from_vec((0..12).map(|at| f64::from(at).sin()).collect::<Vec<f64>>()));
        let ids = up(&Buffer::from_vec(vec![0_i32, 2, -1, 0, 2, 2, 1, 1, 1, -1, 0, 1]));
        let sums = loss.group_sums(&values, &ids, 2, 3)?;
        Ok(vec![loss.group_sums_grad(&sums, &ids, 2)?, sums])
    });
    same("accuracy", |device, up| {
        Ok(vec![device.loss()?.correct(
            &up(&x),
            &up(&Buffer::from_vec(vec![0_i32, 1, 2, -1, 8, 0, 1, 2, 3])),
            20,
            3,
        )?])
    });
}

/// As the gradient of an input that two products share, when its sums are cut into blocks.
#[test]
fn sums_of_two_products_have_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    for terms in [Terms::WHOLE, Terms { segments: 1, blocks: 4 }] {
        same("a sum of two products", |device, up| {
            let specs = [13, 40].map(|n| Gemm::linear_input_grad(7, n, 9).over(terms));
            let [dy, dz] = [13, 40].map(|n| up(&values("dy", 7 * n)));
            let [w, v] = [13, 40].map(|n| up(&values("w", n * 9)));
            let mut dx = up(&values("dx", 70));
            device.matmul()?.gemm_sum(specs, [&dy, &dz], [&w, &v], &mut dx, 5)?;
            Ok(vec![dx])
        });
    }
}

#[test]
fn what_the_device_lacks_is_named() {
    let Some([device, cpu]) = devices(Products::OfTheCpu) else { return };
    let x = device.upload(&values("x", 8)).unwrap();
    let (name, message) = (device.name(), |error: Error| error.to_string());
    assert_eq!(
        message(device.pointwise().unwrap().cast(&x, DType::U8).unwrap_err()),
        format!("cast: device {name} has no kernel for u8")
    );
    let doubles = device.upload(&Buffer::from_vec(vec![1.0_f64; 8])).unwrap();
    assert_eq!(
        message(device.elementwise().unwrap().zip(Zip::Sub, &doubles, &doubles, [1, 1, doubles.count()]).unwrap_err()),
        format!("zip: dtype f64 on device {name} is not supported: use f32")
    );
    let elsewhere = cpu.upload(&values("x", 8)).unwrap();
    assert_eq!(
        message(device.pointwise().unwrap().add(&elsewhere, &elsewhere).unwrap_err()),
        format!("add: device {name}: Buffer(f32, 8) is memory of another device")
    );
    let (mut w, update) = (x.clone(), Update { step: 1, lr: 0.1, grad_scale: 1.0, decay_factor: 1.0 });
    let optim = device.optim().unwrap();
    let refuse = |rule: &Rule, weights: &mut Buffer, states: &mut [Buffer]| {
        let all = 0..8;
        let flat = FlatParts { weights, grads: &x, states, ranges: slice::from_ref(&all) };
        message(optim.update(rule, update, &mut [flat]).unwrap_err())
    };
    assert!(refuse(&Rule::from(Sgd::default()), &mut w, &mut []).contains("is shared"));
    let mut w = device.upload(&values("w", 8)).unwrap();
    assert_eq!(refuse(&Rule::from(Lamb::default()), &mut w, &mut []), cpu_says(&Rule::from(Lamb::default()), update));
    assert!(refuse(&Rule::from(AdamW::default()), &mut w, &mut []).contains("0 state vectors given: adamw takes 2"));
    let refused = refuse(&Rule::custom(Own), &mut w, &mut []);
    assert!(refused.contains(&format!("device {name} has no kernel for the update rule own")), "{refused}");
    assert!(refused.contains("use adamw, sgd, lamb, adafactor, muon or adam8bit, or a device"), "{refused}");
    assert!(x.as_slice::<f32>().is_err(), "the host does not read device memory");
}

/// Vectors with few, some and many zeros, of each sign, with NaN; longer than one chunk.
#[test]
fn vectors_without_zeros_have_the_cpus_bits() {
    for (count, kept) in [(1_usize, 1_usize), (9, 3), (5000, 7), (70_001, 2), (40_000, 1000)] {
        let mut x = values("x", count).as_slice::<f32>().unwrap().to_vec();
        x.iter_mut().enumerate().filter(|(at, _)| at % kept > 0 || kept == 1000).for_each(|(_, x)| *x = 0.0);
        x[count / 2] = -0.0;
        x[count - 1] = f32::NAN;
        let x = Buffer::from_vec(x);
        for half in [false, true] {
            same(&format!("{count} elements, half {half}"), |device, up| {
                let (layout, mut x) = (device.layout()?, up(&x));
                if half {
                    x = device.pointwise()?.cast(&x, DType::F16)?;
                }
                let Some([bits, values]) = layout.pack_nonzeros(&x)? else { return Ok(vec![x]) };
                let back = layout.unpack_nonzeros(&bits, &values, count)?;
                Ok(vec![bits, values, back, x])
            });
        }
    }
}

/// A rule of a user's.
#[derive(Debug)]
struct Own;

impl Optimizer for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn state_names(&self) -> &[&'static str] {
        &[]
    }

    fn update(&self, _: Update, _: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) -> std::result::Result<(), OptimError> {
        Ok(())
    }
}

/// The CPU's error for an update by a rule.
fn cpu_says(rule: &Rule, update: Update) -> String {
    let (mut w, x) = (values("w", 8), values("x", 8));
    let all = 0..8;
    let flat = FlatParts { weights: &mut w, grads: &x, states: &mut [], ranges: slice::from_ref(&all) };
    let refused = Cpu::device().optim().unwrap().update(rule, update, &mut [flat]);
    refused.unwrap_err().to_string()
}

/// A kernel finds it; the host hears of it when it next waits.
#[test]
fn ids_outside_the_vocabulary_are_an_error() {
    let Some([device, _]) = devices(Products::OfTheCpu) else { return };
    let up = |host: &Buffer| device.upload(host).unwrap();
    let (table, ids) = (up(&values("table", 9 * 4)), up(&Buffer::from_vec(vec![3_i32, 9])));
    let out = device.embedding().unwrap().lookup(&ids, &table, 0..9, 9, 4).unwrap();
    let error = device.download(&out).unwrap_err().to_string();
    assert_eq!(error, "embedding: id 9 at place 1 is not in a vocabulary of 9");

    let Some([device, _]) = devices(Products::OfTheCpu) else { return };
    let up = |host: &Buffer| device.upload(host).unwrap();
    let (targets, shard) = (
        up(&Buffer::from_vec(vec![-1_i32, 4, 7])),
        VocabShard { first: 0, valid: 5, width: 5, skipped: 0, pitch: 5, vocab: 5 },
    );
    let (max, _) = device.loss().unwrap().row_stats(&up(&values("logits", 15)), &targets, shard).unwrap();
    let error = device.download(&max).unwrap_err().to_string();
    assert_eq!(error, "cross_entropy: id 7 at place 2 is not in a vocabulary of 5");

    let Some([device, _]) = devices(Products::OfTheCpu) else { return };
    let up = |host: &Buffer| device.upload(host).unwrap();
    let index = up(&Buffer::from_vec(vec![5_i32, 6, 0]));
    let rows = device.permutation().unwrap().gather(&up(&values("x", 12)), &index, 2, 4).unwrap();
    let error = device.download(&rows).unwrap_err().to_string();
    assert_eq!(error, "gather: index 6 at place 1: indices are from 0 to 5");

    let Some(others) = devices(Products::OfTheCpu) else { return };
    for device in others {
        let up = |host: &Buffer| device.upload(host).unwrap();
        let (values, ids) = (Buffer::from_vec(vec![1.0_f64; 4]), Buffer::from_vec(vec![0_i32, -1, 1, 2]));
        let sums = device.loss().unwrap().group_sums(&up(&values), &up(&ids), 2, 2);
        let error = sums.and_then(|sums| device.download(&sums)).unwrap_err().to_string();
        assert_eq!(error, "group_sums: index 2 at place 3: indices are from 0 to 1");
    }

    let Some(devices) = devices(Products::OfTheCpu) else { return };
    for device in devices {
        let up = |host: &Buffer| device.upload(host).unwrap();
        let picks = Picks { outer: 2, extent: 3, inner: 2, count: 2, each: false };
        let picked = device.indexing().unwrap().pick(&up(&values("x", 12)), &up(&Buffer::from_vec(vec![2, -1])), picks);
        let error = picked.and_then(|picked| device.download(&picked)).unwrap_err().to_string();
        assert_eq!(error, "index_select: index -1 at place 1: indices are from 0 to 2");
    }
}

#[test]
fn the_meter_counts_what_the_cpus_counts_and_dead_memory_is_used_again() {
    let Some(driver) = driver(Order::Seeded(5)) else { return };
    let device = CudaDevice::new(driver, Products::OfTheCpu).unwrap();
    let x = device.upload(&values("x", 1000)).unwrap();
    assert_eq!((device.meter().live_bytes(), device.meter().uploads().bytes), (4000, 4000));
    let of = device.pointwise().unwrap();
    let first = of.add(&x, &x).unwrap();
    drop(first);
    for _ in 0..100 {
        of.add(&x, &x).unwrap();
    }
    assert_eq!((device.meter().live_bytes(), device.meter().peak_bytes()), (4000, 8000));
    drop(x);
    assert_eq!(device.meter().live_bytes(), 0);
    device.alloc(DType::U8, 1 << 29).unwrap();
}
