//! Operations of the device, each by itself: milliseconds, GB/s and TFLOP/s, as JSON lines.
//!
//! ```text
//! cargo bench -p meshwork-cuda --features cuda --bench ops [-- --device cuda-emulated] [--small] [WORD..]
//! ```
//! Bytes are those that must be read and written once, FLOPs those of matrix work; so `bytes / rate` or `flops / rate`
//! is the least time that a device can need. Each time is the median of some batches of calls; the host waits for a
//! whole batch. Without `--bench` (as under `cargo test`), and with `--small`, everything runs once on a few rows, on
//! the emulator if there is no GPU. An operation that the device lacks is a line that says so. The first line is the
//! device and its bytes of memory.
//!
//! More than 400 lines: the inputs and the call of each operation, one after the other.

mod bench;

use bench::{Asked, GROUPS, driver, median, numbers, uneven};
use meshwork_core::{Buffer, DType, random};
use meshwork_cuda::CudaDevice;
use meshwork_cuda::device::Products;
use meshwork_optim::{AdamW, Rule, Update};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{
    AttentionMasks, AttentionShape, DropoutMask, FlatParts, Gemm, GroupedGemm, GroupedGrad, GroupedShape, TableGrad,
    VocabShard,
};
use meshwork_tensor::tape::{RowBlocks, Terms};
use meshwork_tensor::{Device, Error};
use std::error::Error as AnyError;
use std::slice;

/// What a call does at least, and the call.
struct Work<'a> {
    bytes: usize,
    flops: u64,
    call: Box<dyn FnMut() -> Result<(), Error> + 'a>,
}

/// Makes an operation's inputs when its turn comes, and frees them with the work.
type Make<'a> = Box<dyn Fn() -> Result<Work<'a>, Error> + 'a>;

/// Sizes of a step: those of a model of 1.3 billion parameters, or a few rows.
struct Sizes {
    tokens: usize,
    hidden: usize,
    vocab: usize,
    /// Rows of logits, which are larger than all else.
    rows: usize,
    /// Elements of a flat vector.
    flat: usize,
    attention: Vec<[usize; 4]>,
    products: Vec<[usize; 3]>,
    groups: [usize; 3],
}

impl Sizes {
    fn large() -> Self {
        Self {
            tokens: 32_768,
            hidden: 2048,
            vocab: 50_304,
            rows: 8192,
            flat: 1 << 28,
            attention: vec![[32, 1024, 12, 64], [16, 1024, 16, 128], [4, 4096, 16, 128]],
            products: vec![[8192, 8192, 8192], [32_768, 3072, 768], [16_384, 8192, 2048], [16_384, 2048, 8192]],
            groups: [16_384, 8192, 2048],
        }
    }

    fn small() -> Self {
        Self {
            tokens: 6,
            hidden: 16,
            vocab: 33,
            rows: 6,
            flat: 100,
            attention: vec![[1, 6, 2, 8]],
            products: vec![[6, 8, 16]],
            groups: [6, 8, 16],
        }
    }
}

fn main() -> Result<(), Box<dyn AnyError>> {
    let asked = Asked::of_process();
    let Some(driver) = driver(&asked)? else { return Ok(()) };
    let small = asked.small;
    let about = driver.properties();
    println!(r#"{{"device":{:?},"memory_bytes":{}}}"#, about.name, about.memory);
    let open = |precision| CudaDevice::with_precision(driver.clone(), Products::OfTheLibrary, precision);
    let devices = [open(Precision::F32)?, open(Precision::Bf16)?];
    let sizes = if small { Sizes::small() } else { Sizes::large() };
    for (name, make) in works(&devices, &sizes).into_iter().filter(|(name, _)| asked.wants(name)) {
        let measured = make().and_then(|mut work| {
            let seconds = median(&devices[0], &mut work.call, small)?;
            Ok(format!(
                r#""ms":{:.4},"bytes":{},"flops":{},"gb_per_s":{:.1},"tflops":{:.2}"#,
                seconds * 1e3,
                work.bytes,
                work.flops,
                work.bytes as f64 / seconds / 1e9,
                work.flops as f64 / seconds / 1e12
            ))
        });
        let said = measured.unwrap_or_else(|error| format!(r#""error":{:?}"#, error.to_string()));
        println!(r#"{{"operation":"{name}",{said}}}"#);
    }
    Ok(())
}

/// On a device that computes in f32, and one that rounds operands to bf16.
fn works<'a>(devices: &'a [CudaDevice; 2], sizes: &'a Sizes) -> Vec<(String, Make<'a>)> {
    let mut works: Vec<(String, Make<'a>)> = Vec::new();
    let device = &devices[0];
    copies(&mut works, device, sizes);
    for (device, dtype) in devices.iter().zip([DType::F32, DType::Bf16]) {
        products(&mut works, device, dtype, sizes);
        groups(&mut works, device, dtype, sizes);
        attention(&mut works, device, dtype, sizes);
    }
    rows(&mut works, device, sizes);
    table_and_loss(&mut works, device, sizes);
    flat(&mut works, device, sizes);
    works
}

fn copies<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, sizes: &'a Sizes) {
    let make = move || {
        let count = sizes.flat;
        let (x, mut y) = (numbers(device, count, DType::F32)?, device.alloc(DType::F32, count)?);
        let call = move || device.layout()?.copy_into(&x, 0..count, &mut y, 0);
        Ok(Work { bytes: 8 * count, flops: 0, call: Box::new(call) })
    };
    works.push(("copy".to_owned(), Box::new(make)));
    let make = move || {
        let (host, mut y) = (Buffer::from_slice(&vec![1_f32; sizes.flat]), device.alloc(DType::F32, sizes.flat)?);
        let call = move || device.upload_into(&host, &mut y, 0);
        Ok(Work { bytes: 4 * sizes.flat, flops: 0, call: Box::new(call) })
    };
    works.push(("upload".to_owned(), Box::new(make)));
}

fn products<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, dtype: DType, sizes: &'a Sizes) {
    for &[m, n, k] in &sizes.products {
        let kinds = [
            ("nt", Gemm::linear(m, n, k)),
            ("nn", Gemm::linear_input_grad(m, n, k)),
            ("tn", Gemm::linear_weight_grad(m, n, k)),
        ];
        for (kind, spec) in kinds {
            let make = move || {
                let (a, b) = (numbers(device, spec.m * spec.k, dtype)?, numbers(device, spec.n * spec.k, dtype)?);
                let mut c = device.alloc(DType::F32, spec.m * spec.n)?;
                let bytes = a.bytes() + b.bytes() + c.bytes();
                let call = move || device.matmul()?.gemm(spec, &a, &b, &mut c, 0);
                Ok(Work { bytes, flops: spec.flops(), call: Box::new(call) })
            };
            works.push((format!("product {kind} {dtype} {}x{}x{}", spec.m, spec.n, spec.k), Box::new(make)));
        }
    }
}

/// Rows of groups that are uneven, and as many in all as those of a product of the same name: a linear layer's output,
/// and the gradients of its input and its weight.
fn groups<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, dtype: DType, sizes: &'a Sizes) {
    let &[m, n, k] = &sizes.groups;
    let (rows, flops) = (uneven(m), 2 * (m * n * k) as u64);
    let ends = rows.iter().scan(0, |end, rows| {
        *end += rows;
        Some(*end - rows..*end)
    });
    let blocks: Vec<_> = ends.map(|block| vec![block]).collect();
    let name = |kind, [m, n, k]: [usize; 3]| format!("grouped {GROUPS} product {kind} {dtype} {m}x{n}x{k}");
    for (kind, mnk, from) in [("nt", [m, n, k], k), ("nn", [m, k, n], n)] {
        let rows = rows.clone();
        let make = move || {
            let (x, w, rows) =
                (numbers(device, m * from, dtype)?, numbers(device, GROUPS * n * k, dtype)?, rows.clone());
            let bytes = x.bytes() + w.bytes() + GroupedGemm::result(&x, &w).size() * m * mnk[1];
            let call = move || {
                let (of, spec) = (device.grouped_matmul()?, GroupedGemm { rows: &rows, n, k, terms: Terms::WHOLE });
                if kind == "nt" { of.grouped_linear(spec, &x, &w) } else { of.grouped_input_grad(spec, &x, &w) }
                    .map(drop)
            };
            Ok(Work { bytes, flops, call: Box::new(call) })
        };
        works.push((name(kind, mnk), Box::new(make)));
    }
    let make = move || {
        let (dy, x, rows) = (numbers(device, m * n, dtype)?, numbers(device, m * k, dtype)?, rows.clone());
        let (mut dw, blocks) = (device.alloc(DType::F32, GROUPS * n * k)?, blocks.clone());
        let bytes = dy.bytes() + x.bytes() + dw.bytes();
        let call = move || {
            let spec = GroupedGemm { rows: &rows, n, k, terms: Terms::WHOLE };
            let grad = GroupedGrad { buffer: &mut dw, start: 0, accumulate: false };
            device.grouped_matmul()?.grouped_weight_grad(spec, &blocks, &dy, &x, grad)
        };
        Ok(Work { bytes, flops, call: Box::new(call) })
    };
    works.push((name("tn", [n, k, m]), Box::new(make)));
}

fn attention<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, dtype: DType, sizes: &'a Sizes) {
    for &[batch, seq, heads, head_dim] in &sizes.attention {
        let shape = AttentionShape { batch, seq, heads, head_dim };
        let (count, name) = (batch * seq * heads * head_dim, format!("{dtype} {batch}x{seq}x{heads}x{head_dim}"));
        // Stored in f32: a device that rounds operands to bf16 has casts before and behind its kernels.
        let stored = |count| numbers(device, count, DType::F32);
        let forward = move || {
            let qkv = stored(3 * count)?;
            let bytes = 4 * count * dtype.size();
            let call = move || device.attention()?.causal(shape, &qkv, AttentionMasks::default()).map(drop);
            Ok(Work {
                bytes,
                flops: GroupedShape::alone(shape).forward_flops(&AttentionMasks::default()),
                call: Box::new(call),
            })
        };
        works.push((format!("attention {name}"), Box::new(forward)));
        let backward = move || {
            let (qkv, dout) = (stored(3 * count)?, stored(count)?);
            let masks = AttentionMasks::default();
            let (out, lse) = device.attention()?.causal(shape, &qkv, masks)?;
            let call = move || device.attention()?.causal_grad(shape, &dout, &qkv, &out, &lse, masks).map(drop);
            Ok(Work {
                bytes: 8 * count * dtype.size(),
                flops: GroupedShape::alone(shape).backward_flops(&masks),
                call: Box::new(call),
            })
        };
        works.push((format!("attention gradient {name}"), Box::new(backward)));
    }
}

fn rows<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, sizes: &'a Sizes) {
    let &Sizes { tokens, hidden, .. } = sizes;
    let f32s = move |count| numbers(device, count, DType::F32);
    let mut push = |name: &str, make: Make<'a>| works.push((format!("{name} {tokens}x{hidden}"), make));
    push(
        "layer_norm",
        Box::new(move || {
            let (x, gain) = (f32s(tokens * hidden)?, f32s(hidden)?);
            let call = move || device.norm()?.layer_norm(&x, [&gain, &gain], 1e-5, DType::F32).map(drop);
            Ok(Work { bytes: 8 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "layer_norm_grad",
        Box::new(move || {
            let (x, dy, gain) = (f32s(tokens * hidden)?, f32s(tokens * hidden)?, f32s(hidden)?);
            let (_, mean, rstd) = device.norm()?.layer_norm(&x, [&gain, &gain], 1e-5, DType::F32)?;
            let call = move || {
                let norm = device.norm()?;
                norm.layer_norm_grad(&dy, &x, &gain, [&mean, &rstd], RowBlocks::WHOLE, None).map(drop)
            };
            Ok(Work { bytes: 12 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "rms_norm",
        Box::new(move || {
            let (x, gain) = (f32s(tokens * hidden)?, f32s(hidden)?);
            let call = move || device.norm()?.rms_norm(&x, &gain, 1e-5, DType::F32).map(drop);
            Ok(Work { bytes: 8 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "bias_gelu, four times as wide",
        Box::new(move || {
            let (x, bias) = (f32s(4 * tokens * hidden)?, f32s(4 * hidden)?);
            let call = move || device.pointwise()?.bias_gelu(&x, &bias, DType::F32).map(drop);
            Ok(Work { bytes: 32 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "bias_gelu_grad, four times as wide",
        Box::new(move || {
            // Where the slope is one a gradient does not change, however often it is taken.
            let (mut dy, x, bias) = (f32s(4 * tokens * hidden)?, f32s(4 * tokens * hidden)?, f32s(4 * hidden)?);
            let call = move || device.pointwise()?.bias_gelu_grad(&mut dy, &x, &bias, RowBlocks::WHOLE).map(drop);
            Ok(Work { bytes: 48 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "bias_residual",
        Box::new(move || {
            let (x, residual, bias) = (f32s(tokens * hidden)?, f32s(tokens * hidden)?, f32s(hidden)?);
            let call = move || device.pointwise()?.bias_residual(&x, &bias, &residual).map(drop);
            Ok(Work { bytes: 12 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "dropout",
        Box::new(move || {
            let x = f32s(tokens * hidden)?;
            let mask = DropoutMask {
                p: 0.1,
                key: random::key(0, "bench"),
                ndim: 2,
                local: [tokens, hidden, 1, 1, 1, 1],
                offset: [0; 6],
                global: [tokens as u64, hidden as u64, 1, 1, 1, 1],
            };
            let call = move || device.pointwise()?.dropout(&x, &mask).map(drop);
            Ok(Work { bytes: 8 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "cast to bf16",
        Box::new(move || {
            let x = f32s(tokens * hidden)?;
            let call = move || device.pointwise()?.cast(&x, DType::Bf16).map(drop);
            Ok(Work { bytes: 6 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
}

fn table_and_loss<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, sizes: &'a Sizes) {
    let &Sizes { tokens, hidden, vocab, rows, .. } = sizes;
    let f32s = move |count| numbers(device, count, DType::F32);
    let ids = move |count: usize| {
        let ids: Vec<i32> = (0..count).map(|i| (i * 7919 % vocab) as i32).collect();
        device.upload(&Buffer::from_slice(&ids))
    };
    let mut push = |name: String, make: Make<'a>| works.push((name, make));
    push(
        format!("lookup {tokens}x{hidden}"),
        Box::new(move || {
            let (ids, table) = (ids(tokens)?, f32s(vocab * hidden)?);
            let call = move || device.embedding()?.lookup(&ids, &table, 0..vocab, vocab, hidden).map(drop);
            Ok(Work { bytes: 8 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        format!("lookup_grad {tokens}x{hidden}"),
        Box::new(move || {
            let (ids, dy, mut table) =
                (ids(tokens)?, f32s(tokens * hidden)?, device.zeros(DType::F32, vocab * hidden)?);
            let call = move || {
                let into =
                    TableGrad { buffer: &mut table, start: 0, rows: vocab, width: hidden, accumulate: true, blocks: 1 };
                device.embedding()?.lookup_grad(&ids, &dy, 0..vocab, into)
            };
            Ok(Work { bytes: 12 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    let shard = VocabShard { first: 0, valid: vocab, width: vocab, skipped: 0, pitch: vocab, vocab };
    push(
        format!("cross entropy {rows}x{vocab}"),
        Box::new(move || {
            let (logits, ids) = (f32s(rows * vocab)?, ids(rows)?);
            let call = move || {
                let (max, sums) = device.loss()?.row_stats(&logits, &ids, shard)?;
                device.loss()?.total(&max, &sums, &ids, 1).map(drop)
            };
            Ok(Work { bytes: 4 * rows * vocab, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        format!("cross entropy gradient {rows}x{vocab}"),
        Box::new(move || {
            // With this lse, repeated gradients go to a fixed point.
            let (mut logits, ids, lse) =
                (f32s(rows * vocab)?, ids(rows)?, device.upload(&Buffer::from_slice(&vec![11_f32; rows]))?);
            let scale = device.upload(&Buffer::from_slice(&[1.0_f64]))?;
            let call = move || device.loss()?.grad(&mut logits, &ids, &lse, &scale, shard);
            Ok(Work { bytes: 8 * rows * vocab, flops: 0, call: Box::new(call) })
        }),
    );
}

fn flat<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, sizes: &'a Sizes) {
    let count = sizes.flat;
    let f32s = move || numbers(device, count, DType::F32);
    let mut push = |name: &str, make: Make<'a>| works.push((format!("{name} {count}"), make));
    push(
        "adamw",
        Box::new(move || {
            let (mut w, g, mut states) =
                (f32s()?, f32s()?, [device.zeros(DType::F32, count)?, device.zeros(DType::F32, count)?]);
            let update = Update { step: 7, lr: 1e-6, grad_scale: 0.9, decay_factor: 1.0 };
            let rule = Rule::from(AdamW::default());
            let call = move || {
                let all = 0..count;
                let flat = FlatParts { weights: &mut w, grads: &g, states: &mut states, ranges: slice::from_ref(&all) };
                device.optim()?.update(&rule, update, &mut [flat])
            };
            Ok(Work { bytes: 28 * count, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "sum_of_squares",
        Box::new(move || {
            let (x, mut sum) = ([f32s()?], device.zeros(DType::F64, 1)?);
            let call = move || device.optim()?.sum_of_squares(&x, &mut sum, 0);
            Ok(Work { bytes: 4 * count, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "zero",
        Box::new(move || {
            let mut x = device.alloc(DType::F32, count)?;
            let call = move || device.optim()?.zero(&mut x, 0..count);
            Ok(Work { bytes: 4 * count, flops: 0, call: Box::new(call) })
        }),
    );
}
