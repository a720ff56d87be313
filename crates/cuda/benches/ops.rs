//! Operations of the device, each by itself: milliseconds, GB/s and TFLOP/s, as JSON lines.
//!
//! ```text
//! cargo bench -p meshwork-cuda --features cuda --bench ops [-- --device cuda-emulated] [--small] [WORD..]
//! ```
//! Bytes are those that must be read and written once, FLOPs those of matrix work; so `bytes / rate` or `flops / rate` is the least time that a
//! device can need. Each time is the median of some batches of calls; the host waits for a whole batch. Without `--bench` (as under `cargo
//! test`), and with `--small`, everything runs once on a few rows, on the emulator if there is no GPU. An operation that the device lacks is a line
//! that says so.

use meshwork_core::{Buffer, DType, random};
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Driver};
use meshwork_optim::{AdamW, Rule, Update};
use meshwork_tensor::kernel::{AttentionMasks, AttentionShape, DropoutMask, Gemm, TableGrad, VocabShard};
use meshwork_tensor::tape::RowBlocks;
use meshwork_tensor::{Device, Error};
use std::error::Error as AnyError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Batches whose median counts, how long one takes at least, and how long all may take.
const BATCHES: usize = 9;
const BATCH: Duration = Duration::from_millis(10);
const BUDGET: Duration = Duration::from_secs(4);

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
        }
    }
}

fn main() -> Result<(), Box<dyn AnyError>> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let mut flag = |name: &str| args.iter().position(|arg| arg == name).map(|at| args.remove(at)).is_some();
    let small = !flag("--bench") | flag("--small");
    let named = args.iter().position(|arg| arg == "--device").filter(|at| at + 1 < args.len());
    let named = named.map(|at| args.drain(at..at + 2).nth(1).unwrap_or_default());
    let Some(device) = open(named.as_deref(), small)? else { return Ok(()) };
    let sizes = if small { Sizes::small() } else { Sizes::large() };
    let asked = |name: &str| args.iter().filter(|arg| !arg.starts_with('-')).all(|word| name.contains(word.as_str()));
    for (name, make) in works(&device, &sizes).into_iter().filter(|(name, _)| asked(name)) {
        let measured = make().and_then(|mut work| {
            let seconds = median(&device, &mut work.call, small)?;
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

/// The device of this name; the first GPU, or, on a few rows, the emulator where there is none.
fn open(name: Option<&str>, small: bool) -> Result<Option<Arc<CudaDevice>>, Box<dyn AnyError>> {
    #[cfg_attr(not(feature = "cuda"), expect(unused_mut, reason = "there is no GPU to open"))]
    let mut driver: Option<Arc<dyn Driver>> = None;
    #[cfg(feature = "cuda")]
    if name.is_none_or(|name| name.starts_with("cuda") && name != "cuda-emulated") {
        let number = name.and_then(|name| name.strip_prefix("cuda:")).map_or(Ok(0), str::parse)?;
        match meshwork_cuda::Gpu::open(number, &meshwork_cuda::cache::folder(), Products::OfTheLibrary) {
            Ok(gpu) => driver = Some(Arc::new(gpu)),
            Err(error) if name.is_none() && small => eprintln!("{error}"),
            Err(error) => return Err(error.into()),
        }
    }
    #[cfg(feature = "emulator")]
    if driver.is_none() {
        let host = meshwork_cuda::emulator::Host::new(&meshwork_cuda::cache::folder())?;
        driver = Some(Arc::new(meshwork_cuda::Emulator::new(host.into(), 1 << 46, meshwork_cuda::Order::AsQueued)));
    }
    match driver {
        Some(driver) => Ok(Some(Arc::new(CudaDevice::new(driver, Products::OfTheLibrary)?))),
        None => {
            eprintln!(
                "SKIPPED: {}: no such device without the features cuda and emulator (small: {small})",
                name.unwrap_or("cuda")
            );
            Ok(None)
        }
    }
}

/// Median seconds of a call.
fn median(device: &CudaDevice, call: &mut dyn FnMut() -> Result<(), Error>, once: bool) -> Result<f64, Error> {
    let mut batch = |calls: usize| {
        let start = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        device.synchronize()?;
        Ok::<_, Error>(start.elapsed().as_secs_f64().max(1e-9))
    };
    let first = batch(1)?; // compiles its kernels
    if once {
        return Ok(first);
    }
    let calls = (BATCH.as_secs_f64() / batch(1)?).ceil().clamp(1.0, 1e4) as usize;
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.len() < BATCHES && (times.is_empty() || begun.elapsed() < BUDGET) {
        times.push(batch(calls)? / calls as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Numbers between -0.5 and 0.5, on the device.
fn numbers(device: &CudaDevice, count: usize, dtype: DType) -> Result<Buffer, Error> {
    const PATTERN: usize = 1 << 20;
    let number = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 12) & 0xffff) as f32 / 65_536.0 - 0.5;
    let pattern: Vec<f32> = (0..PATTERN.min(count)).map(number).collect();
    let pattern = device.upload(&Buffer::from_slice(&pattern))?;
    let pattern = if dtype == DType::F32 { pattern } else { device.pointwise()?.cast(&pattern, dtype)? };
    let mut all = device.alloc(dtype, count)?;
    for at in (0..count).step_by(PATTERN) {
        device.layout()?.copy_into(&pattern, 0..PATTERN.min(count - at), &mut all, at)?;
    }
    Ok(all)
}

fn works<'a>(device: &'a CudaDevice, sizes: &'a Sizes) -> Vec<(String, Make<'a>)> {
    let mut works: Vec<(String, Make<'a>)> = Vec::new();
    copies(&mut works, device, sizes);
    products(&mut works, device, sizes);
    attention(&mut works, device, sizes);
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
}

fn products<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, sizes: &'a Sizes) {
    for dtype in [DType::F32, DType::Bf16] {
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
}

fn attention<'a>(works: &mut Vec<(String, Make<'a>)>, device: &'a CudaDevice, sizes: &'a Sizes) {
    for dtype in [DType::F32, DType::Bf16] {
        for &[batch, seq, heads, head_dim] in &sizes.attention {
            let shape = AttentionShape { batch, seq, heads, head_dim };
            let (count, name) = (batch * seq * heads * head_dim, format!("{dtype} {batch}x{seq}x{heads}x{head_dim}"));
            let forward = move || {
                let qkv = numbers(device, 3 * count, dtype)?;
                let bytes = 4 * count * dtype.size();
                let call = move || device.attention()?.causal(shape, &qkv, AttentionMasks::default()).map(drop);
                Ok(Work { bytes, flops: shape.forward_flops(), call: Box::new(call) })
            };
            works.push((format!("attention {name}"), Box::new(forward)));
            let backward = move || {
                let (qkv, dout) = (numbers(device, 3 * count, dtype)?, numbers(device, count, dtype)?);
                let masks = AttentionMasks::default();
                let (out, lse) = device.attention()?.causal(shape, &qkv, masks)?;
                let call = move || device.attention()?.causal_grad(shape, &dout, &qkv, &out, &lse, masks).map(drop);
                Ok(Work { bytes: 8 * count * dtype.size(), flops: shape.backward_flops(), call: Box::new(call) })
            };
            works.push((format!("attention gradient {name}"), Box::new(backward)));
        }
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
            let call = move || device.norm()?.layer_norm(&x, &gain, &gain, 1e-5, DType::F32).map(drop);
            Ok(Work { bytes: 8 * tokens * hidden, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "layer_norm_grad",
        Box::new(move || {
            let (x, dy, gain) = (f32s(tokens * hidden)?, f32s(tokens * hidden)?, f32s(hidden)?);
            let (_, mean, rstd) = device.norm()?.layer_norm(&x, &gain, &gain, 1e-5, DType::F32)?;
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
                let into = TableGrad { buffer: &mut table, start: 0, rows: vocab, accumulate: true, blocks: 1 };
                device.embedding()?.lookup_grad(&ids, &dy, 0..vocab, hidden, into)
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
            let call = move || device.optim()?.update(&rule, update, &mut w, &g, &mut states, 0..count);
            Ok(Work { bytes: 28 * count, flops: 0, call: Box::new(call) })
        }),
    );
    push(
        "sum_of_squares",
        Box::new(move || {
            let (x, mut sum) = (f32s()?, device.zeros(DType::F64, 1)?);
            let call = move || device.optim()?.sum_of_squares(&x, 0..count, &mut sum, 0);
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
