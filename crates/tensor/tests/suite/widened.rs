//! Every operation on tensors in 16 bits: the result of the same operation in f32 on the same values, rounded.

use crate::common::{NoParams, on_mesh, tape_in, to_f64, values};
use crate::devices::{Case, MESH, cases, types};
use half::{bf16, f16};
use meshwork_core::{DType, Rank};
use meshwork_cpu::Cpu;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::Pointwise;
use meshwork_tensor::tape::{HalfType, Keep, Seed, Weights};
use meshwork_tensor::{Device, Tensor, Widened};
use meshwork_testkit::halves::{self, Operands};
use meshwork_testkit::parity::norm;
use std::rc::Rc;
use std::sync::Arc;

/// A tensor of the nearest values of 16 bits, in f32 or stored as such.
fn tensor(device: &Arc<dyn Device>, name: &str, shape: &[usize], (to, stored): (HalfType, DType)) -> Tensor {
    let rounded = |value: f64| match to {
        HalfType::Bf16 => bf16::from_f64(value).to_f32(),
        HalfType::F16 => f16::from_f64(value).to_f32(),
    };
    let values: Vec<f32> = values(name, shape.iter().product()).into_iter().map(rounded).collect();
    Tensor::from_slice(device, &values, shape).unwrap().cast(stored).unwrap()
}

/// The output of an operation, then the gradients of its inputs, and their types.
fn results(
    case: &Case,
    rank: &Arc<Rank>,
    device: Arc<dyn Device>,
    (to, half): (HalfType, Option<HalfType>),
) -> Vec<(DType, Vec<f32>)> {
    let tape = tape_in(rank, Arc::clone(&device), Rc::new(Keep), half);
    let of = (to, half.map_or(DType::F32, HalfType::dtype));
    let input = |(i, (shape, ty)): (usize, &(Vec<usize>, _))| {
        tape.input(tensor(&device, &format!("input {i}"), shape, of), types(*ty))
    };
    let inputs: Vec<_> = case.inputs.iter().enumerate().map(input).collect();
    let output = (case.run)(&tape, &inputs).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let numbers = |tensor: &Tensor| to_f64(tensor).into_iter().map(|value| value as f32).collect();
    let mut all = vec![(output.tensor().dtype(), numbers(output.tensor()))];
    if case.name != "max_reduce" {
        let shape = output.shape();
        let seed = match output.tensor().dtype() {
            DType::F64 => Tensor::from_slice(&device, &vec![0.5_f64; shape.count()], shape).unwrap(),
            dtype => tensor(&device, "seed", &shape, (to, dtype)),
        };
        tape.backward(&output, Seed::typed(seed, output.types().dual()), Weights::Now, &mut NoParams)
            .unwrap_or_else(|error| panic!("{}: {error}", case.name));
        all.extend(
            inputs.iter().map(|input| tape.take_grad(input).unwrap()).map(|grad| (grad.dtype(), numbers(&grad))),
        );
    }
    all
}

#[test]
fn every_operation_gives_the_rounded_result_of_f32() {
    // A few roundings: of the result, and of values on the way in cases of several operations.
    for (to, most) in [(HalfType::Bf16, 8.0 / 256.0), (HalfType::F16, 8.0 / 2048.0)] {
        for case in cases() {
            on_mesh(MESH, |rank| {
                let cpu = || Arc::new(Cpu::new(Precision::F32)) as Arc<dyn Device>;
                let wanted = results(&case, &rank, cpu(), (to, None));
                let got = results(&case, &rank, Widened::device(cpu()), (to, Some(to)));
                for (at, ((dtype, got), (exact, wanted))) in got.iter().zip(&wanted).enumerate() {
                    let stored = if *exact == DType::F64 { DType::F64 } else { to.dtype() };
                    assert_eq!(*dtype, stored, "{}, {to:?}: result {at}", case.name);
                    let difference: Vec<f32> = got.iter().zip(wanted).map(|(got, wanted)| got - wanted).collect();
                    let (off, size) = (norm(&difference), norm(wanted));
                    assert!(off <= most * size + 1e-6, "{}, {to:?}: result {at} is {:.1e} off", case.name, off / size);
                }
            });
        }
    }
}

/// What is read and written in 16 bits as it is has the bits of the operation in f32, rounded: at odd sizes, of rows
/// longer than a piece, and of products that are computed in several blocks.
#[test]
fn kernels_in_16_bits_have_the_rounded_bits_of_f32() {
    for precision in [Precision::F32, Precision::Bf16] {
        let device = Cpu::new(precision);
        let sizes = [[21, 33], [70, 521], [3, 40_007], [2100, 800]];
        for (half, dims) in [DType::Bf16, DType::F16].into_iter().flat_map(|half| sizes.map(|dims| (half, dims))) {
            for (name, call) in halves::CALLS.iter().filter(|(name, _)| dims[0] < 100 || *name == "products") {
                let run = |stored| call(&Operands { device: &device, half, stored, dims }).unwrap();
                for (at, (got, wide)) in run(half).iter().zip(run(DType::F32)).enumerate() {
                    let want = if got.dtype().is_half() { device.cast(&wide, half).unwrap() } else { wide };
                    let same = got.as_bytes().unwrap() == want.as_bytes().unwrap();
                    assert!(same, "{name} in {half} and {precision:?}, {dims:?}: result {at}");
                }
            }
        }
    }
}

/// One operation rounds once: nothing is lost on the way.
#[test]
fn a_sum_is_taken_in_f32_and_rounded_once() {
    let device = Widened::device(Cpu::device());
    let terms = vec![bf16::from_f32(1.0); 1000];
    let x = Tensor::from_slice(&device, &terms, [1000]).unwrap();
    let sum = device.reduction().unwrap().sum(x.buffer(), [1, 1000, 1], 1, 1.0).unwrap();
    assert_eq!(sum.as_slice::<bf16>().unwrap()[0].to_f32(), 1000.0, "added one by one in bf16 it would stop at 256");
}
