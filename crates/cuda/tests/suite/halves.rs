//! Every operation that reads and writes 16 bits as they are, against the CPU's: bit by bit.

use crate::driver;
use meshwork_core::{Buffer, DType};
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Order};
use meshwork_tensor::Device;
use meshwork_tensor::cpu::{Cpu, Precision};
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

/// Attention on tensor cores reads and writes bf16 as it is, rotated and in groups too. It promises no order of sums.
#[test]
pub fn attention_of_bf16_on_tensor_cores_is_near_the_cpus() {
    let Some(driver) = driver(Order::Seeded(8)) else { return };
    let cuda = CudaDevice::with_precision(driver, Products::OfTheLibrary, Precision::Bf16).unwrap();
    let cpu = Cpu::new(Precision::Bf16);
    for (name, call) in CALLS.iter().filter(|(name, _)| name.contains("attention")) {
        let [got, want] = [&cuda as &dyn Device, &cpu].map(|device| {
            let half = DType::Bf16;
            let results = call(&Operands { device, half, stored: half, dims: [21, 33] });
            let wide = |result: &Buffer| match result.dtype().is_half() {
                true => device.pointwise().unwrap().cast(result, DType::F32).unwrap(),
                false => result.clone(),
            };
            let results = results.unwrap_or_else(|error| panic!("{name}: {error}"));
            results.iter().map(|result| device.download(&wide(result)).unwrap()).collect::<Vec<_>>()
        });
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            let (got, want) = (got.as_slice::<f32>().unwrap(), want.as_slice::<f32>().unwrap());
            let difference: Vec<f32> = got.iter().zip(want).map(|(got, want)| got - want).collect();
            let (off, size) = (norm(&difference), norm(want));
            assert!(off < 1e-2 * size, "{name}: result {at} is {:.1e} off", off / size);
        }
    }
}
