//! What the policy [`Encoded`] keeps: 16 bits of each element, and what is not zero.

use crate::common::{NoParams, alone, tape_with};
use half::{bf16, f16};
use meshwork_core::{Buffer, DType};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{Encoded, Encoding, HalfType, Keep, SavedPolicy, Seed, Weights};
use meshwork_tensor::{Device, Tensor};
use std::rc::Rc;
use std::sync::Arc;

const VALUES: [f32; 6] = [0.1, -3.3, 1000.7, 1e-3, -7e4, 0.0];

fn reduced(to: HalfType) -> Rc<dyn SavedPolicy> {
    Rc::new(Encoded::new(Rc::new(Keep), Encoding::Half(to)))
}

fn rounded(to: HalfType) -> [f32; 6] {
    VALUES.map(|value| match to {
        HalfType::Bf16 => bf16::from_f32(value).to_f32(),
        HalfType::F16 => f16::from_f32(value).to_f32(),
    })
}

/// The gradient of x² is 2x, of what was kept of x.
#[test]
fn backward_reads_rounded_values_and_forward_exact_ones() {
    for to in [HalfType::Bf16, HalfType::F16] {
        let tape = tape_with(&alone(), Cpu::device(), reduced(to));
        let x = tape.input(Tensor::from_slice(tape.device(), &VALUES, [1, 6]).unwrap(), Default::default());
        let y = x.mul(&x).unwrap();
        assert_eq!(y.tensor().to_vec::<f32>().unwrap(), VALUES.map(|value| value * value));
        let ones = Tensor::from_slice(tape.device(), &[1.0_f32; 6], [1, 6]).unwrap();
        tape.backward_from(vec![(&y, Seed::typed(ones, y.types().dual()))], Weights::Now, &mut NoParams).unwrap();
        let gradient = tape.take_grad(&x).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(gradient, rounded(to).map(|value| value + value), "{to:?}");
    }
}

#[test]
fn a_tensor_that_is_saved_twice_is_rounded_once_and_an_exact_one_never() {
    let device: Arc<dyn Device> = Cpu::device();
    let policy = reduced(HalfType::Bf16);
    let count = 1 << 12;
    let x = Tensor::from_slice(&device, &vec![0.1_f32; count], [count]).unwrap();
    let live = || device.meter().live_bytes();
    let before = live();
    let first = policy.save("op", x.clone()).unwrap();
    let of_one = live() - before;
    assert_eq!(of_one, 2 * count as u64);
    let second = policy.save("op", x.clone().reshape([2, count / 2]).unwrap()).unwrap();
    assert_eq!(live() - before, of_one);
    assert_eq!(second.restore().unwrap().shape()[..], [2, count / 2]);
    let half = Tensor::from_buffer(&device, x.buffer().slice(0..count / 2).unwrap(), [count / 2]).unwrap();
    let other = policy.save("op", half).unwrap();
    assert_eq!(live() - before, of_one + count as u64, "other elements of the same memory");
    let exact = policy.save_exact("op", x.clone()).unwrap();
    assert_eq!(exact.restore().unwrap().to_vec::<f32>().unwrap(), vec![0.1_f32; count]);
    let ids = Tensor::from_slice(&device, &[16_777_217_i32], [1]).unwrap();
    assert_eq!(policy.save("op", ids).unwrap().restore().unwrap().dtype(), DType::I32);
    drop((first, second, other, exact));
    assert_eq!(live(), before);
    // What was there is gone, and what is saved now is rounded anew.
    let again = policy.save("op", x).unwrap();
    assert_eq!(again.restore().unwrap().to_vec::<f32>().unwrap()[0], bf16::from_f32(0.1).to_f32());
}

#[test]
fn casts_are_those_of_half_and_other_types_are_refused() {
    let device: Arc<dyn Device> = Cpu::device();
    let x: Vec<f32> = (0..70_001).map(|i| (i as f32 - 35_000.0) * 1.37).collect();
    let buffer = device.upload(&Buffer::from_vec(x.clone())).unwrap();
    let pointwise = device.pointwise().unwrap();
    let bf = pointwise.cast(&buffer, DType::Bf16).unwrap();
    assert_eq!(bf.as_slice::<bf16>().unwrap(), x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>());
    let f = pointwise.cast(&buffer, DType::F16).unwrap();
    assert_eq!(f.as_slice::<f16>().unwrap(), x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>());
    let back = pointwise.cast(&f, DType::F32).unwrap();
    assert_eq!(back.as_slice::<f32>().unwrap(), x.iter().map(|&x| f16::from_f32(x).to_f32()).collect::<Vec<_>>());
    let error = pointwise.cast(&buffer, DType::I32).unwrap_err().to_string();
    assert!(error.contains("cast") && error.contains("i32") && error.contains("bf16 or f16"), "{error}");
}

fn sparse(policy: Rc<dyn SavedPolicy>) -> Rc<dyn SavedPolicy> {
    Rc::new(Encoded::new(policy, Encoding::Sparse))
}

/// `count` elements of which each `every`-th is a number, with zeros of both signs, NaN and subnormals among them.
fn with_zeros(count: usize, every: usize) -> Vec<f32> {
    let numbers = [1.5, -0.0, f32::NAN, 1e-40, f32::NEG_INFINITY];
    (0..count).map(|at| if at % every == 0 { numbers[at / every % numbers.len()] } else { 0.0 }).collect()
}

#[test]
fn zeros_are_left_out_and_every_bit_comes_back() {
    let device: Arc<dyn Device> = Cpu::device();
    let live = || device.meter().live_bytes();
    for count in [0, 1, 9, 4096, 100_003] {
        for every in [1, 2, 3, 1000] {
            let before = live();
            let x = with_zeros(count, every);
            let tensor = Tensor::from_slice(&device, &x, [count]).unwrap();
            let saved = sparse(Rc::new(Keep)).save("op", tensor).unwrap();
            let packed = count.div_ceil(8) + 4 * count.div_ceil(every);
            assert_eq!(live() - before, packed.min(4 * count) as u64, "{count} elements, each {every}th a number");
            let back = saved.restore().unwrap().to_vec::<f32>().unwrap();
            assert!(back.iter().map(|x| x.to_bits()).eq(x.iter().map(|x| x.to_bits())), "{count}, {every}");
        }
    }
}

#[test]
fn rounded_values_are_packed_too_and_ids_are_not() {
    let device: Arc<dyn Device> = Cpu::device();
    let count = 1 << 12;
    let x: Vec<f32> = with_zeros(count, 4).iter().map(|x| if x.is_nan() { 0.1 } else { *x }).collect();
    let policy = Rc::new(Encoded::new(sparse(Rc::new(Keep)), Encoding::Half(HalfType::Bf16)));
    let before = device.meter().live_bytes();
    let saved = policy.save("op", Tensor::from_slice(&device, &x, [2, count / 2]).unwrap()).unwrap();
    // What is subnormal in f32 is zero in bf16 (a fifth of the numbers).
    let numbers = x.iter().filter(|x| bf16::from_f32(**x).to_bits() != 0 && x.abs() != 1e-40).count();
    assert_eq!(device.meter().live_bytes() - before, (count / 8 + 2 * numbers) as u64);
    let back = saved.restore().unwrap();
    assert_eq!(back.shape()[..], [2, count / 2]);
    let rounded: Vec<f32> =
        x.iter().map(|&x| if x.abs() == 1e-40 { 0.0 } else { bf16::from_f32(x).to_f32() }).collect();
    assert_eq!(back.to_vec::<f32>().unwrap(), rounded);
    let ids = Tensor::from_slice(&device, &[0_i32; 64], [64]).unwrap();
    let before = device.meter().live_bytes();
    let saved = sparse(Rc::new(Keep)).save("op", ids.clone()).unwrap();
    assert_eq!((device.meter().live_bytes(), saved.restore().unwrap().dtype()), (before, DType::I32));
}

/// A device without values takes at least as much as any values.
#[test]
fn without_values_memory_is_the_most_that_it_may_be() {
    let meta: Arc<dyn Device> = Arc::new(meshwork_tensor::meta::Meta::default());
    let count = 1003;
    let of_meta = {
        let x = meta.alloc(DType::F32, count).unwrap();
        let parts = meta.layout().unwrap().pack_nonzeros(&x).unwrap().unwrap();
        parts.iter().map(Buffer::bytes).sum::<usize>()
    };
    let cpu: Arc<dyn Device> = Cpu::device();
    for every in 1..9 {
        let x = cpu.upload(&Buffer::from_vec(with_zeros(count, every))).unwrap();
        let parts = cpu.layout().unwrap().pack_nonzeros(&x).unwrap();
        let bytes = parts.map_or(x.bytes(), |parts| parts.iter().map(Buffer::bytes).sum());
        assert!(bytes <= of_meta, "each {every}th a number: {bytes} bytes, without values {of_meta}");
    }
}
