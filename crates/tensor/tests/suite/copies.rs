//! Copies into ranges of vectors, within a device and from the host, on every device; and the meter that counts the
//! latter.

use meshwork_core::profile::Recorder;
use meshwork_core::{Buffer, DType};
use meshwork_cpu::Cpu;
use meshwork_tensor::device::Transfers;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::profiled::Profiled;
use meshwork_tensor::{Device, Result};
use std::sync::Arc;
use std::time::Instant;

fn devices() -> [Arc<dyn Device>; 3] {
    [Cpu::device(), Meta::device(), Profiled::device(Cpu::device(), Recorder::new(Instant::now()))]
}

fn host(values: &[f64]) -> Buffer {
    Buffer::from_slice(values)
}

#[test]
fn ranges_are_copied_within_a_device() {
    for device in devices() {
        let src = device.upload(&host(&[1.0, 2.0, 3.0, 4.0])).unwrap();
        let mut dst = device.upload(&host(&[9.0; 5])).unwrap();
        let live = device.meter().live_bytes();
        device.layout().unwrap().copy_into(&src, 1..3, &mut dst, 2).unwrap();
        device.layout().unwrap().copy_into(&src, 4..4, &mut dst, 5).unwrap();
        assert_eq!(device.meter().live_bytes(), live, "no memory of its own");
        if device.has_values() {
            let got = device.download(&dst).unwrap();
            assert_eq!(got.as_slice::<f64>().unwrap(), [9.0, 9.0, 2.0, 3.0, 9.0], "{}", device.name());
        }
    }
}

/// Of any dtype, and out of a slice of a buffer.
#[test]
fn copies_move_bytes_of_any_dtype() {
    let device = Cpu::device();
    let src = device.upload(&Buffer::from_slice(&[0_u8, 1, 2, 3, 4, 5])).unwrap().slice(1..6).unwrap();
    let mut dst = device.zeros(DType::U8, 4).unwrap();
    device.layout().unwrap().copy_into(&src, 2..5, &mut dst, 1).unwrap();
    assert_eq!(dst.as_slice::<u8>().unwrap(), [0, 3, 4, 5]);
}

#[test]
fn the_host_writes_a_range() {
    for device in devices() {
        let mut dst = device.upload(&host(&[9.0; 4])).unwrap();
        let before = device.meter().uploads();
        let (live, peak) = (device.meter().live_bytes(), device.meter().peak_bytes());
        device.upload_into(&host(&[1.0, 2.0]), &mut dst, 1).unwrap();
        assert_eq!((device.meter().live_bytes(), device.meter().peak_bytes()), (live, peak), "no memory of its own");
        let after = device.meter().uploads();
        assert_eq!((after.calls - before.calls, after.bytes - before.bytes), (1, 16), "{}", device.name());
        if device.has_values() {
            assert_eq!(device.download(&dst).unwrap().as_slice::<f64>().unwrap(), [9.0, 1.0, 2.0, 9.0]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for device in devices() {
        let src = device.zeros(DType::F64, 4).unwrap();
        let mut dst = device.zeros(DType::F64, 4).unwrap();
        let layout = device.layout().unwrap();
        let message = |result: Result<()>| result.unwrap_err().to_string();
        let refused = message(layout.copy_into(&src, 2..5, &mut dst, 0));
        assert_eq!(refused, "elements 2..5 are not inside the buffer's 0..4");
        let refused = message(layout.copy_into(&src, 1..4, &mut dst, 2));
        assert_eq!(refused, "elements 2..5 are not inside the buffer's 0..4");
        let refused = message(layout.copy_into(&device.zeros(DType::F32, 4).unwrap(), 0..4, &mut dst, 0));
        assert_eq!(refused, "the buffer holds f64, it was asked for as f32");
        let refused = message(device.upload_into(&host(&[1.0, 2.0]), &mut dst, 3));
        assert_eq!(refused, "elements 3..5 are not inside the buffer's 0..4");
        let _shared = dst.clone();
        assert!(message(layout.copy_into(&src, 0..4, &mut dst, 0)).contains("is shared"));
    }
}

#[test]
fn the_meter_counts_copies_from_and_to_the_host() {
    for device in devices() {
        let x = device.upload(&host(&[1.0, 2.0, 3.0])).unwrap();
        device.download(&x.slice(1..3).unwrap()).unwrap();
        device.download(&x).unwrap();
        assert_eq!(device.meter().uploads(), Transfers { calls: 1, bytes: 24 });
        assert_eq!(device.meter().downloads(), Transfers { calls: 2, bytes: 40 });
    }
}
