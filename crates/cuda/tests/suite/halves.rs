//! Every operation that reads and writes 16 bits as they are, against the CPU's: bit by bit.

use crate::driver;
use meshwork_core::{Buffer, DType};
use meshwork_cpu::Cpu;
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Order};
use meshwork_tensor::Device;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{Gemm, GroupedGemm};
use meshwork_tensor::tape::Terms;
use meshwork_testkit::halves::{CALLS, Operands};
use meshwork_testkit::parity::norm;

/// Odd sizes, and one whose rows begin at multiples of 16 bytes.
#[test]
pub fn operations_on_16_bits_are_those_of_the_cpu() {
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(driver) = driver(Order::Seeded(7)) else { return };
        let cuda = CudaDevice::with_precision(driver, Products::OfTheCpu, precision).unwrap();
        let cpu = Cpu::new(precision);
        for (half, dims) in
            [(DType::Bf16, [21, 33]), (DType::F16, [21, 33]), (DType::Bf16, [70, 64]), (DType::F16, [3, 1043])]
        {
            for (name, call) in CALLS {
                let [got, want] = [&cuda as &dyn Device, &cpu].map(|device| {
                    let results = call(&Operands { device, half, stored: half, dims });
                    let results = results.unwrap_or_else(|error| panic!("{name} in {half}: {error}"));
                    results.iter().map(|result| device.download(result).unwrap()).collect::<Vec<_>>()
                });
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert_eq!(
                        (got.dtype(), got.count()),
                        (want.dtype(), want.count()),
                        "{name} in {half}: result {at}"
                    );
                    let same = got.as_bytes().unwrap() == want.as_bytes().unwrap();
                    assert!(same, "{name} in {half} and {precision:?}, {dims:?}: result {at} has other bits");
                }
            }
        }
    }
}

/// Attention on tensor cores and products of the library read and write 16 bits as they are, attention rotated and in
/// groups too. They promise no order of sums.
#[test]
pub fn what_promises_no_order_of_sums_in_16_bits_is_near_the_cpus() {
    is_near_the_cpus(Precision::Bf16, DType::Bf16, 1e-2);
    is_near_the_cpus(Precision::F32, DType::F16, 2e-3);
}

fn is_near_the_cpus(precision: Precision, half: DType, bound: f64) {
    let Some(driver) = driver(Order::Seeded(8)) else { return };
    let cuda = CudaDevice::with_precision(driver, Products::OfTheLibrary, precision).unwrap();
    let cpu = Cpu::new(precision);
    for (name, call) in CALLS.iter().filter(|(name, _)| name.contains("attention") || *name == "products") {
        let [got, want] = [&cuda as &dyn Device, &cpu].map(|device| {
            let results = call(&Operands { device, half, stored: half, dims: [21, 33] });
            let wide = |result: &Buffer| match result.dtype().is_half() {
                true => device.pointwise().unwrap().cast(result, DType::F32).unwrap(),
                false => result.clone(),
            };
            let results = results.unwrap_or_else(|error| panic!("{name} in {half}: {error}"));
            results.iter().map(|result| device.download(&wide(result)).unwrap()).collect::<Vec<_>>()
        });
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            let (got, want) = (got.as_slice::<f32>().unwrap(), want.as_slice::<f32>().unwrap());
            let difference: Vec<f32> = got.iter().zip(want).map(|(got, want)| got - want).collect();
            let (off, size) = (norm(&difference), norm(want));
            assert!(off < bound * size, "{name} in {half}: result {at} is {:.1e} off", off / size);
        }
    }
}

/// The library writes results of bf16 itself. They are its results of f32, rounded once: what is added to, and a bias,
/// are added before.
#[test]
pub fn products_of_the_library_are_rounded_once() {
    let Some(driver) = driver(Order::Seeded(9)) else { return };
    let cuda = CudaDevice::with_precision(driver, Products::OfTheLibrary, Precision::Bf16).unwrap();
    let (pointwise, matmul) = (cuda.pointwise().unwrap(), cuda.matmul().unwrap());
    let [m, n, k] = [21, 34, 50];
    let of = |name: &str, count: usize| {
        let mut values = vec![0.0_f32; count];
        meshwork_tensor::random::fill_normal(meshwork_tensor::random::key(0, name), 0, &mut values);
        pointwise.cast(&cuda.upload(&Buffer::from_vec(values)).unwrap(), DType::Bf16).unwrap()
    };
    let (x, w, dy, bias, before) =
        (of("x", m * k), of("w", n * k), of("dy", m * n), of("b", n), of("c", 3 + m * n + n * k));
    let bytes = |x: &Buffer| cuda.download(x).unwrap().as_bytes().unwrap().to_vec();
    let wide = |x: &Buffer| pointwise.cast(x, DType::F32).unwrap();
    for (name, spec, a, b) in [
        ("forward", Gemm::linear(m, n, k), &x, &w),
        ("input gradient", Gemm::linear_input_grad(m, n, k), &dy, &w),
        ("weight gradient", Gemm::linear_weight_grad(m, n, k), &dy, &x),
    ] {
        for accumulate in [false, true] {
            let spec = spec.accumulating(accumulate);
            let (mut rounded, mut whole) = (pointwise.cast(&wide(&before), DType::Bf16).unwrap(), wide(&before));
            matmul.gemm(spec, a, b, &mut rounded, 3).unwrap();
            matmul.gemm(spec, a, b, &mut whole, 3).unwrap();
            let want = bytes(&pointwise.cast(&whole, DType::Bf16).unwrap());
            assert!(bytes(&rounded) == want, "{name}, accumulate {accumulate}");
        }
    }
    let rounded = matmul.linear_bias([m, n, k], &x, &w, &bias).unwrap();
    let whole = matmul.linear_bias([m, n, k], &x, &w, &wide(&bias)).unwrap();
    assert_eq!(rounded.dtype(), DType::Bf16);
    assert!(bytes(&rounded) == bytes(&pointwise.cast(&whole, DType::Bf16).unwrap()), "with a bias");
}

/// Products of groups give the type of their operands: those of bf16 the results of f32, rounded once.
#[test]
pub fn products_of_groups_have_the_16_bits_of_both_operands() {
    // The library takes any features, the kernels for tensor cores multiples of 8.
    let ways = [(Products::OfTheCpu, 34, 50), (Products::OfTheLibrary, 34, 50), (Products::OfTheLibrary, 40, 56)];
    for (products, n, k) in ways {
        let Some(driver) = driver(Order::Seeded(10)) else { return };
        let cuda = CudaDevice::with_precision(driver, products, Precision::Bf16).unwrap();
        let (pointwise, grouped) = (cuda.pointwise().unwrap(), cuda.grouped_matmul().unwrap());
        let rows = [3, 0, 17, 1];
        let total: usize = rows.iter().sum();
        let of = |name: &str, count: usize| {
            let mut values = vec![0.0_f32; count];
            meshwork_tensor::random::fill_normal(meshwork_tensor::random::key(0, name), 0, &mut values);
            pointwise.cast(&cuda.upload(&Buffer::from_vec(values)).unwrap(), DType::Bf16).unwrap()
        };
        let (x, w, dy) = (of("x", total * k), of("w", rows.len() * n * k), of("dy", total * n));
        let wide = pointwise.cast(&w, DType::F32).unwrap();
        for terms in [Terms::WHOLE, Terms { segments: 1, blocks: 2 }] {
            let spec = GroupedGemm { rows: &rows, n, k, terms };
            for (name, got, want) in [
                ("forward", grouped.grouped_linear(spec, &x, &w), grouped.grouped_linear(spec, &x, &wide)),
                ("gradient", grouped.grouped_input_grad(spec, &dy, &w), grouped.grouped_input_grad(spec, &dy, &wide)),
            ] {
                let (got, want) = (got.unwrap(), pointwise.cast(&want.unwrap(), DType::Bf16).unwrap());
                let [got, want] = [got, want].map(|x| cuda.download(&x).unwrap());
                assert_eq!(got.dtype(), DType::Bf16);
                assert!(
                    got.as_bytes().unwrap() == want.as_bytes().unwrap(),
                    "{name}, {products:?}, {n} of {k}, {terms:?}"
                );
            }
        }
    }
}
