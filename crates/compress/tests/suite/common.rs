//! What the tests share.

use meshwork_compress::{Compressor, Draws, Fold, Message, Scheme, Shape};
use meshwork_core::random::{key, uniform};

/// One scheme of each kind and option.
pub const SCHEMES: [&str; 26] = [
    "none",
    "bf16",
    "fp8:e4m3",
    "fp8:e5m2/row",
    "quant:1",
    "quant:4",
    "quant:8/row",
    "quant:5/block16",
    "quant:3/block100/stochastic",
    "sign",
    "sign/block10",
    "int8",
    "int8/block10",
    "nf4/row",
    "nf4/block64",
    "nf4/e5m3",
    "nf4/block16/e5m3",
    "topk:0.1",
    "topk:0.5/row",
    "topk:3/block20",
    "topk:0.02",
    "topk:0.1+quant:8",
    "topk:0.3+bf16",
    "randk:0.1",
    "randk:0.25/unbiased+quant:4/block8/stochastic",
    "powersgd:2",
];

pub fn scheme(text: &str) -> Scheme {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

pub fn draws(step: u64) -> Draws {
    Draws::new(7, "test", step)
}

/// Numbers in [-1, 1), some of them repeated and zero.
pub fn values(name: &str, len: usize) -> Vec<f32> {
    let key = key(3, name);
    let value = |i: u64| match uniform(key, 2 * i) {
        u if u < 0.1 => 0.0,
        u if u < 0.2 => 0.25,
        _ => 2.0 * uniform(key, 2 * i + 1) - 1.0,
    };
    (0..len as u64).map(value).collect()
}

/// The message of a cold start.
pub fn compress(scheme: &Scheme, x: &[f32], shape: Shape, draws: Draws) -> Message {
    let mut warm = vec![0.0; scheme.warm_len(shape)];
    Message::compress(scheme, x, shape, draws, &mut warm).unwrap()
}

pub fn restore(scheme: &Scheme, message: &Message, shape: Shape) -> Vec<f32> {
    let mut out = vec![9.0; shape.len()];
    message.restore(scheme, shape, Fold::Replace, &mut out).unwrap();
    out
}

/// C(x).
pub fn lossy(scheme: &Scheme, x: &[f32], shape: Shape, draws: Draws) -> Vec<f32> {
    restore(scheme, &compress(scheme, x, shape, draws), shape)
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub fn square(x: impl IntoIterator<Item = f32>) -> f64 {
    x.into_iter().map(|x| f64::from(x).powi(2)).sum()
}
