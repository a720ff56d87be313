//! The device's memory and precision.

use super::oracle::values;
use meshwork_compress::{Draws, Fold, Message, Scheme, Shape};
use meshwork_core::{Buffer, DType};
use meshwork_cpu::Cpu;
use meshwork_tensor::kernel::{Attention, AttentionMasks, AttentionShape};
use meshwork_tensor::{Device, Error, Precision, Result};

/// The error states the purpose of the memory and its current holders, and a failed allocation is not counted.
#[test]
fn memory_that_the_system_lacks_is_an_error_that_says_what_holds_it() {
    let cpu = Cpu::default();
    let _held = cpu.alloc(DType::U8, 4096).unwrap();
    let error = cpu.alloc(DType::U8, usize::MAX / 4).unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory { bytes, .. } if *bytes == (usize::MAX / 4) as u64), "{error}");
    assert!(error.to_string().contains("device cpu: the system has no memory for it"), "{error}");
    assert!(error.to_string().contains("this rank's buffers hold other 4.0 KiB"), "{error}");
    assert_eq!(cpu.meter().live_bytes(), 4096);
}

#[test]
fn a_dead_block_is_handed_out_again_and_zeroed_when_asked() {
    let cpu = Cpu::default();
    let mut first = cpu.alloc(DType::U8, 1000).unwrap();
    first.as_bytes_mut().unwrap().fill(7);
    assert_eq!(cpu.meter().live_bytes(), 1000);
    drop(first);
    assert_eq!((cpu.meter().live_bytes(), cpu.meter().peak_bytes()), (0, 1000));
    let second = cpu.zeros(DType::U8, 900).unwrap();
    assert_eq!(cpu.system_allocations(), 1);
    assert!(second.as_bytes().unwrap().iter().all(|&byte| byte == 0));
    // A request that is too small does not take the large block.
    drop(second);
    let _small = cpu.alloc(DType::U8, 64).unwrap();
    assert_eq!(cpu.system_allocations(), 2);
}

const NONE: AttentionMasks<'static> = AttentionMasks::CAUSAL;

/// Both directions compute in the precision of the device, the gradient from the same saved results.
#[test]
fn the_precision_is_that_of_the_device() -> Result<()> {
    let shape = AttentionShape { batch: 1, seq: 9, heads: 2, head_dim: 5 };
    let [f32, tf32, bf16] = Precision::ALL.map(Cpu::new);
    let qkv = Buffer::from_vec(values::<f32>("qkv", 270));
    let dout = Buffer::from_vec(values::<f32>("dout", 90));
    let (out, lse) = f32.causal(shape, &qkv, NONE)?;
    let results = [&f32, &tf32, &bf16].map(|device| {
        let (there, _) = device.causal(shape, &qkv, NONE)?;
        let back = device.causal_grad(shape, &dout, &qkv, &out, &lse, NONE)?;
        Ok([there.as_slice::<f32>()?.to_vec(), back.as_slice::<f32>()?.to_vec()])
    });
    let [exact, tf32, bf16]: [Result<[Vec<f32>; 2]>; 3] = results;
    for (exact, (tf32, bf16)) in exact?.iter().zip(tf32?.iter().zip(&bf16?)) {
        let error =
            |of: &[f32]| exact.iter().zip(of).map(|(exact, rounded)| (exact - rounded).abs()).fold(0.0, f32::max);
        let [few, more] = [error(tf32), error(bf16)];
        assert!((1e-5..2e-3).contains(&few) && (1e-4..0.1).contains(&more), "{few} off in TF32, {more} in bf16");
    }
    Ok(())
}

/// A message of several pieces, which threads restore: as one thread does.
#[test]
fn pieces_of_a_message_are_restored_as_the_whole() {
    let (cpu, x) = (Cpu::default(), values::<f32>("x", 100_001));
    let shape = Shape::vector(x.len()).unwrap();
    for text in ["nf4/block64", "nf4/block64/e5m3", "int8/block100", "quant:3", "bf16", "topk:0.1"] {
        let (scheme, draws): (Scheme, _) = (text.parse().unwrap(), Draws::new(1, "x", 0));
        let message = Message::compress(&scheme, &x, shape, draws, &mut []).unwrap();
        let mut wanted = vec![0.5; x.len()];
        message.restore(&scheme, shape, Fold::Add, &mut wanted).unwrap();
        let mut out = Buffer::from_vec(vec![0.5_f32; x.len() + 3]);
        let bytes = Buffer::from_vec(message.into_bytes());
        let mut window = out.window(2..x.len() + 3).unwrap();
        cpu.compression().unwrap().unpack(&scheme, shape, &bytes, Fold::Add, &mut window).unwrap();
        drop(window);
        let got = out.as_slice::<f32>().unwrap();
        assert_eq!(&got[2..x.len() + 2], wanted, "{text}");
        assert_eq!((got[0], got[1], got[x.len() + 2]), (0.5, 0.5, 0.5), "{text}");
        let mut other = bytes.as_slice::<u8>().unwrap().to_vec();
        other[4] ^= 1; // of another shape
        let wrong = cpu.compression().unwrap().unpack(&scheme, shape, &Buffer::from_vec(other), Fold::Add, &mut out);
        assert!(wrong.unwrap_err().to_string().contains("its scheme or shape is not"), "{text}");
    }
}
