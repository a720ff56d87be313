//! Variants of kernels on a device: each is held against the usual form's results, and timed; the fastest go into a
//! table that the device reads.
//!
//! ```text
//! cargo bench -p meshwork-cuda --features cuda --bench tune [-- --device cuda-emulated] [--small] [--out TABLE.toml] [WORD..]
//! ```
//! A JSON line for each kernel, size and form. Without `--bench`, and with `--small`, every form runs once on a few
//! rows: the results count then, and the times mean nothing.

mod bench;

use bench::{Asked, driver, median, numbers, uneven};
use meshwork_core::{Buffer, DType, random};
use meshwork_cuda::device::Products;
use meshwork_cuda::driver::Properties;
use meshwork_cuda::tuning::{Tuning, USUAL, names};
use meshwork_cuda::{CudaDevice, Driver};
use meshwork_kernels::{SM_90A, tuned};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{AttentionMasks, AttentionShape, DropoutMask, GroupedGemm, GroupedGrad};
use meshwork_tensor::tape::Terms;
use meshwork_tensor::{Device, Error};
use std::error::Error as AnyError;
use std::fmt::Write;
use std::sync::Arc;

/// A variant must be as much faster to be chosen: less is noise.
const WORTH: f64 = 0.97;

/// How a kernel is called, what may differ between its forms, and the sizes at which they are compared: each stands for
/// those up to the next one.
struct Tuned {
    /// What the names of its kernels begin with.
    family: &'static str,
    /// Of the norm of each result; 0: every bit is the same.
    tolerance: f64,
    sizes: &'static [usize],
    small: &'static [usize],
    call: fn(&CudaDevice, &str, usize) -> Result<Call, Error>,
}

/// Gives the results of the kernel.
type Call = Box<dyn Fn(&CudaDevice) -> Result<Vec<Buffer>, Error>>;

const TUNED: &[Tuned] = &[
    Tuned { family: "flash_", tolerance: 1e-2, sizes: &[1024, 4096], small: &[70], call: flash },
    Tuned { family: "grouped_tensor_", tolerance: 1e-3, sizes: &[1024, 4096], small: &[16], call: groups },
    Tuned { family: "dropout", tolerance: 0.0, sizes: &[1 << 26], small: &[1000], call: dropout },
];

/// Tokens of a call of full size.
const TOKENS: usize = 16_384;

fn flash(device: &CudaDevice, kernel: &str, seq: usize) -> Result<Call, Error> {
    let head_dim = [256, 128].into_iter().find(|dim| kernel.ends_with(&format!("_{dim}"))).unwrap_or(64);
    let shape = if seq < 1024 {
        AttentionShape { batch: 1, seq, heads: 2, head_dim }
    } else {
        AttentionShape { batch: TOKENS / seq, seq, heads: 1024 / head_dim, head_dim }
    };
    let count = shape.batch * seq * shape.heads * head_dim;
    let (qkv, dout) = (numbers(device, 3 * count, DType::F32)?, numbers(device, count, DType::F32)?);
    let masks = AttentionMasks::default();
    if kernel.contains("forward") {
        return Ok(Box::new(move |device| {
            let (out, lse) = device.attention()?.causal(shape, &qkv, masks)?;
            Ok(vec![out, lse])
        }));
    }
    let (out, lse) = device.attention()?.causal(shape, &qkv, masks)?;
    Ok(Box::new(move |device| Ok(vec![device.attention()?.causal_grad(shape, &dout, &qkv, &out, &lse, masks)?])))
}

fn squares(rows: &[usize], n: usize) -> GroupedGemm<'_> {
    GroupedGemm { rows, n, k: n, terms: Terms::WHOLE }
}

/// Products of groups with squares of `n` features: eight large groups of uneven sizes.
fn groups(device: &CudaDevice, kernel: &str, n: usize) -> Result<Call, Error> {
    let rows = uneven(if n < 1024 { 20 } else { TOKENS });
    let (total, matrices) = (rows.iter().sum::<usize>(), rows.len() * n * n);
    // Results have the type of both operands, or f32.
    let of = if kernel.ends_with("_bf16") { DType::Bf16 } else { DType::F32 };
    let (x, w) = (numbers(device, total * n, DType::Bf16)?, numbers(device, matrices, of)?);
    let dy = numbers(device, total * n, DType::Bf16)?;
    if kernel.contains("forward") {
        return Ok(Box::new(move |device| {
            Ok(vec![device.grouped_matmul()?.grouped_linear(squares(&rows, n), &x, &w)?])
        }));
    }
    if kernel.contains("backward_x") {
        return Ok(Box::new(move |device| {
            Ok(vec![device.grouped_matmul()?.grouped_input_grad(squares(&rows, n), &dy, &w)?])
        }));
    }
    let ends = rows.iter().scan(0, |end, rows| {
        *end += rows;
        Some(*end - rows..*end)
    });
    let blocks: Vec<_> = ends.map(|block| vec![block]).collect();
    Ok(Box::new(move |device| {
        let mut dw = device.alloc(DType::F32, matrices)?;
        let grad = GroupedGrad { buffer: &mut dw, start: 0, accumulate: false };
        device.grouped_matmul()?.grouped_weight_grad(squares(&rows, n), &blocks, &dy, &x, grad)?;
        Ok(vec![dw])
    }))
}

fn dropout(device: &CudaDevice, _: &str, count: usize) -> Result<Call, Error> {
    let (x, size) = (numbers(device, count, DType::F32)?, count as u64);
    let (local, global) = ([count, 1, 1, 1, 1, 1], [size, 1, 1, 1, 1, 1]);
    let mask = DropoutMask { p: 0.1, key: random::key(0, "tune"), ndim: 1, local, offset: [0; 6], global };
    Ok(Box::new(move |device| Ok(vec![device.pointwise()?.dropout(&x, &mask)?])))
}

/// One form of a kernel at a size.
struct Measured {
    name: &'static str,
    ms: f64,
}

/// A kernel, and its forms at each size, the usual one first.
struct Compared {
    kernel: &'static str,
    tuned: &'static Tuned,
    sizes: &'static [usize],
    forms: Vec<Vec<Measured>>,
}

fn main() -> Result<(), Box<dyn AnyError>> {
    let mut asked = Asked::of_process();
    let out = asked.value("--out");
    let Some(driver) = driver(&asked)? else { return Ok(()) };
    let (mut compared, mut wrong) = (Vec::new(), 0);
    for kernel in tuned().filter(|kernel| asked.wants(kernel)) {
        let tuned = TUNED.iter().find(|tuned| kernel.starts_with(tuned.family));
        let tuned =
            tuned.ok_or_else(|| format!("kernel {kernel} has variants, and this benchmark does not call it"))?;
        let sizes = if asked.small { tuned.small } else { tuned.sizes };
        compared.push(Compared { kernel, tuned, sizes, forms: sizes.iter().map(|_| Vec::new()).collect() });
    }
    // The kernels for sm_90a come last: one that stands still, or ends the device, leaves the others' rows.
    for last in [false, true] {
        for at in 0..compared.len() {
            let Compared { kernel, tuned, sizes, forms } = &mut compared[at];
            let names: Vec<&str> = names(kernel).filter(|name| (*name == SM_90A) == last).collect();
            for (&size, forms) in sizes.iter().zip(forms).filter(|_| !names.is_empty()) {
                wrong += measure(&driver, (kernel, tuned, size), &names, forms, asked.small)?;
            }
            if let Some(path) = &out {
                std::fs::write(path, table(driver.properties(), &compared, asked.small)?)?;
            }
        }
    }
    if wrong > 0 { Err(format!("{wrong} results of variants are not those of the usual form").into()) } else { Ok(()) }
}

/// Adds the forms of these names whose results are right, with their times; how many are wrong.
fn measure(
    driver: &Arc<dyn Driver>,
    (kernel, tuned, size): (&'static str, &Tuned, usize),
    names: &[&'static str],
    right: &mut Vec<Measured>,
    once: bool,
) -> Result<usize, Error> {
    let open = || CudaDevice::with_precision(driver.clone(), Products::OfTheLibrary, Precision::Bf16);
    let usual = open()?.with_tuning(Tuning::default())?;
    let call = (tuned.call)(&usual, kernel, size)?;
    let want = downloaded(&usual, call(&usual)?)?;
    let mut wrong = 0;
    for &name in names {
        let tuning = match Tuning::only(&driver.properties().architecture, kernel, name) {
            Ok(tuning) => tuning,
            Err(refused) => {
                println!(
                    r#"{{"kernel":"{kernel}","size":{size},"variant":"{name}","error":{:?}}}"#,
                    refused.to_string()
                );
                continue;
            }
        };
        // The same device, so that its memory is that of the operands.
        let device = usual.with_tuning(tuning)?;
        let got = call(&device).and_then(|results| downloaded(&device, results));
        let error = got.map(|got| got.iter().zip(&want).map(|(got, want)| distance(got, want)).fold(0.0, f64::max));
        let said = match error {
            Ok(error) if error <= tuned.tolerance => {
                let ms = 1e3 * median(&device, &mut || call(&device).map(drop), once)?;
                right.push(Measured { name, ms });
                format!(r#""ms":{ms:.4},"of_usual":{:.3},"differs":{error:.1e}"#, ms / right[0].ms)
            }
            Ok(error) => {
                wrong += 1;
                format!(r#""error":"differs by {error:.1e} of the norm, and {:.0e} is allowed""#, tuned.tolerance)
            }
            // A GPU with too little shared memory for it, say.
            Err(error) => format!(r#""error":{:?}"#, error.to_string()),
        };
        println!(r#"{{"kernel":"{kernel}","size":{size},"variant":"{name}",{said}}}"#);
    }
    Ok(wrong)
}

fn downloaded(device: &CudaDevice, results: Vec<Buffer>) -> Result<Vec<Vec<f32>>, Error> {
    let wide = |x: Buffer| if x.dtype() == DType::F32 { Ok(x) } else { device.pointwise()?.cast(&x, DType::F32) };
    results.into_iter().map(|x| Ok(device.download(&wide(x)?)?.as_slice::<f32>()?.to_vec())).collect()
}

/// The norm of the difference, of the norm of what is right.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut got.iter().zip(want).map(|(got, want)| f64::from(*got) - f64::from(*want)));
    let norm = squares(&mut want.iter().map(|&want| f64::from(want)));
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// The usual form, unless another one is faster than noise.
fn fastest(forms: &[Measured]) -> Option<&Measured> {
    let usual = forms.first()?;
    let best = forms.iter().min_by(|a, b| a.ms.total_cmp(&b.ms))?;
    Some(if best.ms < WORTH * usual.ms { best } else { usual })
}

/// The table of what was measured so far. Each size stands for those up to the middle between it and the next one, by
/// factors. Times of single calls mean nothing: then any form will do, so that there is a table to read.
fn table(of: &Properties, compared: &[Compared], once: bool) -> Result<String, std::fmt::Error> {
    let mut table = format!("# Written by the benchmark `tune` on: {}.\n", of.name);
    for Compared { kernel, sizes, forms, .. } in compared {
        let best = |forms: &Vec<Measured>| Some(if once { forms.last()? } else { fastest(forms)? }.name);
        let chosen: Vec<&str> = forms.iter().filter_map(best).collect();
        if chosen.iter().all(|&name| name == USUAL) {
            continue;
        }
        for (at, name) in chosen.iter().enumerate() {
            write!(table, "\n[[{}]]\nkernel = \"{kernel}\"\nvariant = \"{name}\"\n", of.architecture)?;
            if let Some(next) = sizes.get(at + 1) {
                writeln!(table, "up_to = {}", ((sizes[at] * next) as f64).sqrt() as u64)?;
            }
        }
    }
    Ok(table)
}
