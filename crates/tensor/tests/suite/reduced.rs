//! What the policy [`Reduced`] keeps in 16 bits.

use crate::common::{NoParams, alone, tape_with};
use half::{bf16, f16};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::tape::{HalfType, Keep, Reduced, SavedPolicy, Seed, Weights};
use meshwork_tensor::{Device, Tensor};
use std::rc::Rc;
use std::sync::Arc;

const VALUES: [f32; 6] = [0.1, -3.3, 1000.7, 1e-3, -7e4, 0.0];

fn reduced(to: HalfType) -> Rc<dyn SavedPolicy> {
    Rc::new(Reduced::new(Rc::new(Keep), to))
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
