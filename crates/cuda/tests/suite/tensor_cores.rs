//! Which calls run on tensor cores, and by which kernels: the names of their launches.

use crate::{emulator, kernels};
use meshwork_core::DType;
use meshwork_cuda::device::Products;
use meshwork_cuda::tuning::Tuning;
use meshwork_cuda::{CudaDevice, Emulator, Order};
use meshwork_tensor::kernel::{AttentionDropout, AttentionMasks, AttentionShape, GroupedGemm, GroupedGrad};
use meshwork_tensor::random::key;
use meshwork_tensor::tape::Terms;
use meshwork_tensor::{Device, Precision};
use std::sync::Arc;

/// Attention runs on tensor cores where fast numerics round to bf16 or TF32, or tensors have f16, and nowhere else.
#[test]
fn tensor_cores_have_the_attention_that_rounds() {
    let dropout = AttentionDropout { p: 0.2, key: key(5, "a"), first_sample: 0, first_head: 0, global_heads: 2 };
    let (fast, cpu, f16) = (Products::OfTheLibrary, Products::OfTheCpu, DType::F16);
    for (products, precision, head_dim, dropout, of, wanted) in [
        (fast, Precision::Bf16, 16, None, DType::F32, 3),
        (fast, Precision::Bf16, 128, None, DType::F32, 3),
        (fast, Precision::Bf16, 256, None, DType::F32, 3),
        (fast, Precision::Bf16, 12, None, DType::F32, 0),
        (fast, Precision::Bf16, 16, Some(&dropout), DType::F32, 3),
        (fast, Precision::F32, 16, None, DType::F32, 0),
        (fast, Precision::Tf32, 16, None, DType::F32, 4),
        (fast, Precision::Tf32, 128, Some(&dropout), DType::F32, 4),
        (fast, Precision::Tf32, 256, None, DType::F32, 4),
        (fast, Precision::Tf32, 12, None, DType::F32, 0),
        (fast, Precision::Tf32, 16, None, DType::Bf16, 0),
        (fast, Precision::Tf32, 16, None, f16, 4),
        (cpu, Precision::Tf32, 16, None, DType::F32, 0),
        (cpu, Precision::Bf16, 16, None, DType::F32, 0),
        (fast, Precision::F32, 16, None, f16, 4),
        (fast, Precision::F32, 64, Some(&dropout), f16, 4),
        (cpu, Precision::F32, 16, None, f16, 0),
    ] {
        let Some(driver) = emulator(Order::AsQueued) else { return };
        let names = attention_of(&driver, (products, precision, of), head_dim, dropout);
        let got = names.iter().filter(|name| name.starts_with("flash_")).count();
        assert_eq!((names.len(), got), (4, wanted), "{names:?}"); // the dots too, of tensors in the kernels' type
    }
}

/// Cards have 99, 163 or 227 KiB of shared memory for a block: heads whose tiles of f32 do not fit, forward and
/// backward, run in the kernels of f32.
#[test]
fn tensor_cores_have_the_attention_of_tf32_that_fits() {
    let of_tf32 = (Products::OfTheLibrary, Precision::Tf32, DType::F32);
    for (shared, longest) in [(99 << 10, 64), (163 << 10, 128), (227 << 10, 256)] {
        for head_dim in [64, 72, 128, 136, 256] {
            let Some(kernels) = kernels() else { return };
            let driver = Arc::new(Emulator::new(kernels, 1 << 30, Order::AsQueued).shared(shared));
            let names = attention_of(&driver, of_tf32, head_dim, None);
            let on_tensor_cores = names.iter().all(|name| name.starts_with("flash_"));
            assert_eq!(on_tensor_cores, head_dim <= longest, "{head_dim} with {shared} bytes: {names:?}");
        }
    }
}

/// The kernels of attention of three tokens, forward and backward, with these products, precision and type of tensors.
fn attention_of(
    driver: &Arc<Emulator>,
    (products, precision, of): (Products, Precision, DType),
    head_dim: usize,
    dropout: Option<&AttentionDropout>,
) -> Vec<&'static str> {
    let device = CudaDevice::with_precision(driver.clone(), products, precision).unwrap();
    let shape = AttentionShape { batch: 1, seq: 3, heads: 2, head_dim };
    let masks = AttentionMasks { dropout, ..AttentionMasks::default() };
    driver.note_launches();
    let qkv = device.zeros(of, 18 * head_dim).unwrap();
    let (out, lse) = device.attention().unwrap().causal(shape, &qkv, masks).unwrap();
    device.attention().unwrap().causal_grad(shape, &out, &qkv, &out, &lse, masks).unwrap();
    device.synchronize().unwrap();
    let attention = |name: &&str| ["flash_", "attention_"].iter().any(|of| name.starts_with(of));
    driver.launches().into_iter().map(|(_, name)| name).filter(attention).collect()
}

/// A table chooses the kernels for sm_90a, each by itself, for bf16 alone: both directions write maps if one of their
/// kernels reads them.
#[test]
fn a_table_chooses_the_attention_for_sm_90a() {
    let [forward, q, kv] = ["flash_forward_64", "flash_backward_q_64", "flash_backward_kv_64"];
    let [forward_sm90, kv_sm90] = ["flash_forward_sm90_64", "flash_backward_sm90_kv_64"];
    for (precision, of, replaced, wanted) in [
        (Precision::Bf16, DType::Bf16, forward, vec!["flash_maps", forward_sm90, q, kv]),
        (Precision::Bf16, DType::F32, kv, vec![forward, "flash_maps", q, kv_sm90]),
        (Precision::F32, DType::F16, forward, vec![forward, q, kv]),
    ] {
        let Some(driver) = emulator(Order::AsQueued) else { return };
        let device = CudaDevice::with_precision(driver.clone(), Products::OfTheLibrary, precision).unwrap();
        let device = device.with_tuning(Tuning::only("emulated", replaced, "sm_90a").unwrap()).unwrap();
        let shape = AttentionShape { batch: 1, seq: 3, heads: 2, head_dim: 16 };
        driver.note_launches();
        let (qkv, masks) = (device.zeros(of, 18 * 16).unwrap(), AttentionMasks::default());
        let (out, lse) = device.attention().unwrap().causal(shape, &qkv, masks).unwrap();
        device.attention().unwrap().causal_grad(shape, &out, &qkv, &out, &lse, masks).unwrap();
        device.synchronize().unwrap();
        let attention = |name: &&str| name.starts_with("flash_") && *name != "flash_dots";
        let names: Vec<&str> = driver.launches().into_iter().map(|(_, name)| name).filter(attention).collect();
        assert_eq!(names, wanted);
    }
}

/// One launch has the products of all groups where fast numerics round to bf16, and the features and places are those
/// of whole chunks; a table may give them to the library.
#[test]
fn tensor_cores_have_the_products_of_groups_that_round() {
    let (fast, cpu) = (Products::OfTheLibrary, Products::OfTheCpu);
    for (products, precision, n, start, form, on_tensor_cores) in [
        (fast, Precision::Bf16, 8, 2, "usual", 3),
        (fast, Precision::Bf16, 8, 2, "columns=128", 3),
        (fast, Precision::Bf16, 8, 2, "library", 2),
        (fast, Precision::Bf16, 8, 1, "usual", 2),
        (fast, Precision::Bf16, 6, 2, "usual", 0),
        (fast, Precision::F32, 8, 2, "usual", 0),
        (cpu, Precision::Bf16, 8, 2, "usual", 0),
    ] {
        let Some(driver) = emulator(Order::AsQueued) else { return };
        let device = CudaDevice::with_precision(driver.clone(), products, precision).unwrap();
        let device = device.with_tuning(Tuning::only("emulated", "grouped_tensor_backward_w", form).unwrap()).unwrap();
        let (rows, k) = ([2, 0, 3], 16);
        let spec = GroupedGemm { rows: &rows, n, k, terms: Terms::WHOLE };
        let [x, w, dy] = [5 * k, 3 * n * k, 5 * n].map(|count| device.zeros(DType::F32, count).unwrap());
        let mut dw = device.zeros(DType::F32, start + 3 * n * k).unwrap();
        driver.note_launches();
        let of = device.grouped_matmul().unwrap();
        of.grouped_linear(spec, &x, &w).unwrap();
        of.grouped_input_grad(spec, &dy, &w).unwrap();
        let blocks = [0..2, 2..2, 2..5].map(|block| vec![block]);
        let grad = GroupedGrad { buffer: &mut dw, start, accumulate: false };
        of.grouped_weight_grad(spec, &blocks, &dy, &x, grad).unwrap();
        device.synchronize().unwrap();
        let names: Vec<&str> = driver.launches().into_iter().map(|(_, name)| name).collect();
        let found = names.iter().filter(|name| name.starts_with("grouped_tensor_")).count();
        assert_eq!(found, on_tensor_cores, "{precision:?}, {n} features, from {start}, {form}: {names:?}");
    }
}
