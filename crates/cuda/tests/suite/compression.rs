//! Compression on the device: messages, what is restored of them and what feedback keeps, byte by byte against the CPU.

use crate::ops::{devices, same, values};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse, wire_bytes};
use meshwork_core::random::key;
use meshwork_core::{Buffer, DType};
use meshwork_cuda::device::Products;
use meshwork_tensor::{Device, Result};

const SCHEMES: &[&str] = &[
    "none",
    "bf16",
    "fp8:e4m3",
    "fp8:e5m2/row",
    "fp8:e4m3/block7",
    "quant:1",
    "quant:4",
    "quant:3/row",
    "quant:8/block100",
    "quant:5/block33/stochastic",
    "sign",
    "sign/row",
    "sign/block9",
    "int8",
    "int8/block33",
    "nf4/row",
    "nf4/block64",
    "nf4/block33/e5m3",
    "topk:0.1",
    "topk:3",
    "topk:0.7/row",
    "topk:2/block20+quant:4",
    "topk:0.02+bf16",
    "randk:0.2",
    "randk:0.3/unbiased+fp8:e5m2",
    "randk:1+quant:6/stochastic",
];

fn draws() -> Draws {
    Draws { key: key(3, "compression"), start: 1001 }
}

/// Values of many sizes, with zeros, equal ones, the smallest and those of 2^±100.
fn mixed(name: &str, count: usize) -> Buffer {
    let mut x = values(name, count).as_slice::<f32>().unwrap().to_vec();
    let odd = [0.0, -0.0, 1.5, 1.5, -1.5, 1e-40, -3e-39, 1.3e30, -2e-30, 2e-8];
    x.iter_mut().skip(3).step_by(11).zip(odd).for_each(|(x, odd)| *x = odd);
    Buffer::from_vec(x)
}

/// Sizes that are no multiple of a tile or a byte, one above a tile, rows and single elements.
fn shapes() -> Vec<Shape> {
    [(1, 1), (1, 7), (3, 45), (1, 513), (9, 121), (2, 1024)]
        .map(|(rows, cols)| Shape::matrix(rows, cols).unwrap())
        .to_vec()
}

#[test]
fn messages_have_the_cpus_bytes_and_restore_to_its_values() {
    for (text, shape) in SCHEMES.iter().flat_map(|text| shapes().into_iter().map(move |shape| (*text, shape))) {
        let scheme: Scheme = text.parse().unwrap();
        let bytes = wire_bytes(&scheme, shape).unwrap();
        same(&format!("{text} of {shape}"), |device, up| {
            let (of, x) = (device.compression()?, up(&mixed(text, shape.len())));
            // A message in the middle of a buffer, at an odd byte.
            let mut message = up(&Buffer::from_vec(vec![0xa5_u8; bytes + 8]));
            let mut window = message.window(5..bytes + 8)?;
            of.pack(&scheme, shape, draws(), &x, &mut window)?;
            drop(window);
            let sent = message.slice(5..5 + bytes)?;
            let mut out = up(&values("old", shape.len() + 4));
            let mut window = out.window(3..shape.len() + 4)?;
            of.unpack(&scheme, shape, &sent, Fold::Replace, &mut window)?;
            drop(window);
            let mut sum = up(&values("old", shape.len() + 4));
            let mut window = sum.window(1..shape.len() + 4)?;
            of.unpack(&scheme, shape, &sent, Fold::Add, &mut window)?;
            drop(window);
            Ok(vec![message.clone(), out, sum])
        });
    }
}

/// A part with an infinity or a NaN is restored as NaN, and they are among the largest.
#[test]
fn what_is_not_finite_is_sent_as_on_the_cpu() {
    let shape = Shape::matrix(4, 30).unwrap();
    let mut x = values("x", 120).as_slice::<f32>().unwrap().to_vec();
    (x[5], x[40], x[95]) = (f32::INFINITY, f32::NAN, f32::NEG_INFINITY);
    let x = Buffer::from_vec(x);
    for text in ["fp8:e4m3/row", "quant:4/row", "sign/row", "int8/row", "nf4/row", "topk:0.1"] {
        let scheme: Scheme = text.parse().unwrap();
        let bytes = wire_bytes(&scheme, shape).unwrap();
        let restored = |device: &dyn Device| -> Result<Vec<f32>> {
            let (of, x) = (device.compression()?, device.upload(&x)?);
            let mut message = device.zeros(DType::U8, bytes)?;
            of.pack(&scheme, shape, draws(), &x, &mut message)?;
            let mut out = device.zeros(DType::F32, 120)?;
            of.unpack(&scheme, shape, &message, Fold::Replace, &mut out)?;
            Ok(device.download(&out)?.as_slice::<f32>()?.to_vec())
        };
        let Some([device, cpu]) = devices(Products::OfTheCpu) else { return };
        let [got, want] = [restored(&*device).unwrap(), restored(&*cpu).unwrap()];
        let same = |(got, want): (&f32, &f32)| got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        assert!(got.iter().zip(&want).all(same), "{text}: {got:?} and {want:?}");
        assert!(got.iter().any(|x| !x.is_finite()), "{text}");
    }
}

#[test]
fn indices_take_and_put_the_cpus_elements() {
    let shape = Shape::matrix(7, 61).unwrap();
    for text in ["topk:0.3", "topk:4", "topk:0.05/row"] {
        let Scheme::Sparse(sparse): Scheme = text.parse().unwrap() else { panic!("{text}") };
        same(text, |device, up| {
            let (of, x, y) = (device.compression()?, up(&mixed("x", shape.len())), up(&mixed("y", shape.len())));
            let indices = indices_of(device, &sparse, shape, &x)?;
            let taken = of.take(&sparse, shape, &indices, &y)?;
            let put = of.put(&sparse, shape, &indices, &taken)?;
            Ok(vec![indices, taken, put])
        });
    }
}

/// The index bytes of the message of a value.
fn indices_of(device: &dyn Device, sparse: &Sparse, shape: Shape, x: &Buffer) -> Result<Buffer> {
    let scheme = Scheme::Sparse(*sparse);
    let mut message = device.zeros(DType::U8, wire_bytes(&scheme, shape).unwrap())?;
    device.compression()?.pack(&scheme, shape, draws(), x, &mut message)?;
    Ok(message.slice(sparse.index_bytes(shape))?)
}

#[test]
fn feedback_has_the_cpus_bits() {
    for feedback in ["none", "ef", "ef21", "ef21m:0.3"].map(|text| text.parse::<Feedback>().unwrap()) {
        same(&feedback.to_string(), |device, up| {
            let of = device.compression()?;
            let Sender { residual, estimate, momentum } = feedback.sender(301);
            let mut sender = Sender { residual, estimate, momentum }.all().map(|state| up(&Buffer::from_slice(state)));
            let mut results = Vec::new();
            for step in 0..3 {
                let (x, sent) = (up(&values(&format!("x{step}"), 301)), up(&values(&format!("c{step}"), 301)));
                let [residual, estimate, momentum] = sender;
                let mut states = Sender { residual, estimate, momentum };
                let out = of.outgoing(feedback, &x, step == 0, &mut states)?;
                of.sent(feedback, &out, &sent, &mut states)?;
                results.push(out);
                sender = [states.residual, states.estimate, states.momentum];
            }
            results.extend(sender);
            Ok(results)
        });
    }
}

#[test]
fn factors_of_matrices_have_the_cpus_bits() {
    for (rank, rows, cols) in [(1, 1, 1), (2, 5, 37), (3, 70, 20), (4, 4, 300)] {
        let (of, shape) = (PowerSgd { rank }, Shape::matrix(rows, cols).unwrap());
        let [p_len, q_len] = of.factors(shape);
        same(&format!("{of} of {shape}"), |device, up| {
            let (kernels, m) = (device.compression()?, up(&values("m", rows * cols)));
            // The first column is drawn, the others are warm.
            let mut warm = values("q", q_len).as_slice::<f32>()?.to_vec();
            warm[..cols].fill(0.0);
            let (mut q, mut p) = (up(&Buffer::from_vec(warm)), up(&values("p", p_len)));
            kernels.left_factor(of, shape, draws(), &m, [&mut p, &mut q])?;
            let left = [
                device.layout()?.narrow(&p, 1, p_len, 1, 0..p_len)?,
                device.layout()?.narrow(&q, 1, q_len, 1, 0..q_len)?,
            ];
            kernels.right_factor(of, shape, &m, [&mut p, &mut q])?;
            let [mut out, mut mean] = [up(&values("out", rows * cols)), up(&values("out", rows * cols))];
            let factors = [p, q];
            kernels.join(of, shape, &factors, 1, &mut out)?;
            kernels.join(of, shape, &factors, 3, &mut mean)?;
            Ok([&left[..], &factors, &[out, mean]].concat())
        });
    }
}

/// A kernel finds a message of another scheme; a message of another length is refused at once.
#[test]
fn messages_that_are_none_are_errors() {
    let Some([device, _]) = devices(Products::OfTheCpu) else { return };
    let (shape, of) = (Shape::vector(40).unwrap(), device.compression().unwrap());
    let [one, other]: [Scheme; 2] = ["quant:4/block8", "quant:4/block9"].map(|text| text.parse().unwrap());
    assert_eq!(wire_bytes(&one, shape).unwrap(), wire_bytes(&other, shape).unwrap());
    let mut message = device.zeros(DType::U8, wire_bytes(&one, shape).unwrap()).unwrap();
    let mut out = device.zeros(DType::F32, 40).unwrap();
    let short = of.unpack(&one, shape, &message.slice(0..9).unwrap(), Fold::Replace, &mut out).unwrap_err();
    assert!(short.to_string().contains("9"), "{short}");
    let x = device.upload(&values("x", 40)).unwrap();
    of.pack(&one, shape, draws(), &x, &mut message).unwrap();
    of.unpack(&other, shape, &message, Fold::Replace, &mut out).unwrap();
    let error = device.download(&out).unwrap_err().to_string();
    assert!(error.starts_with("unpack: a message is not one of the scheme and shape"), "{error}");
}
