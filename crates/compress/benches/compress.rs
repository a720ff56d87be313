//! Speed of compressing and restoring on one core, in bytes of the full value.
//!
//! `cargo bench -p meshwork-compress --bench compress -- [--json] [SCHEME...] [BYTES...]`. A time is that of the
//! fastest repeat, which other programs disturb least; all memory is touched before. `copy` is that of the standard
//! library, from one buffer to another, and the last column is a fraction of its rate at this size. Without `--bench`
//! (as under `cargo test`), everything runs once on small values. `benches/peers/topk.py` measures `torch.topk`.

use meshwork_compress::{Compressor, Draws, Fold, Message, Scheme, Shape};
use meshwork_core::random::{fill_uniform, key};
use std::hint::black_box;
use std::time::Instant;

const SCHEMES: [&str; 14] = [
    "bf16",
    "fp8:e4m3",
    "fp8:e4m3/block256",
    "quant:8/block256",
    "quant:4",
    "quant:4/block256",
    "quant:4/block256/stochastic",
    "quant:2/block256",
    "sign",
    "topk:0.1",
    "topk:0.01",
    "topk:0.1+quant:8",
    "randk:0.1",
    "powersgd:4",
];

/// Seconds of the fastest call.
fn fastest(full: bool, mut call: impl FnMut()) -> f64 {
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 5 || (full && times.len() < 1000 && start.elapsed().as_secs_f64() < 0.5) {
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64());
        if !full {
            break;
        }
    }
    times.into_iter().fold(f64::INFINITY, f64::min)
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (full, json) = (args.iter().any(|arg| arg == "--bench"), args.iter().any(|arg| arg == "--json"));
    let words: Vec<&String> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    let (sizes, names): (Vec<&String>, Vec<&String>) =
        words.into_iter().partition(|word| word.parse::<usize>().is_ok());
    let mut sizes: Vec<usize> = sizes.into_iter().filter_map(|size| size.parse().ok()).collect();
    if sizes.is_empty() {
        sizes = if full { vec![4 << 20, 64 << 20] } else { vec![16 << 10] };
    }
    for bytes in sizes {
        let rows = 64;
        let Ok(shape) = Shape::matrix(rows, bytes / 4 / rows) else { continue };
        let mut x = vec![0.0_f32; shape.len()];
        fill_uniform(key(1, "bench"), 0, &mut x);
        x.iter_mut().for_each(|x| *x = (2.0 * *x - 1.0).powi(3));
        let mut out = vec![0.0_f32; shape.len()];
        let report = |name: &str, what: &str, seconds: f64, copy: f64| {
            let (ms, speed) = (seconds * 1e3, bytes as f64 / seconds * 1e-9);
            match json {
                true => println!(
                    "{{\"kind\": \"compress\", \"scheme\": \"{name}\", \"op\": \"{what}\", \"bytes\": {bytes}, \"ms\": {ms:.4}, \
                     \"us\": {:.1}, \"of_copy\": {:.3}}}",
                    seconds * 1e6,
                    copy / seconds
                ),
                false => {
                    println!("{name:>28} {what:>9} {bytes:>10} {ms:>10.3} ms {speed:>7.2} GB/s {:>6.2}", copy / seconds)
                }
            }
        };
        let copy = fastest(full, || black_box(&mut out).copy_from_slice(black_box(&x)));
        // As `copy` it is what compressing and restoring are held against.
        match names.iter().any(|name| *name == "copy") {
            true => ["compress", "restore"].iter().for_each(|what| report("copy", what, copy, copy)),
            false => report("none", "copy", copy, copy),
        }
        for text in SCHEMES.iter().filter(|text| names.is_empty() || names.iter().any(|name| name == *text)) {
            let scheme: Scheme = text.parse().unwrap_or_else(|error| panic!("{error}"));
            let mut warm = vec![0.0; scheme.warm_len(shape)];
            let mut body = vec![0; scheme.body_bytes(shape)];
            let draws = Draws::new(1, "bench", 0);
            let seconds = fastest(full, || scheme.write(black_box(&x), shape, draws, &mut warm, black_box(&mut body)));
            report(text, "compress", seconds, copy);
            let message = Message::compress(&scheme, &x, shape, draws, &mut warm);
            let message = message.unwrap_or_else(|error| panic!("{error}"));
            let seconds = fastest(full, || {
                let restored = black_box(&message).restore(&scheme, shape, Fold::Replace, black_box(&mut out));
                restored.unwrap_or_else(|error| panic!("{error}"));
            });
            report(text, "restore", seconds, copy);
        }
    }
}
