//! The emulator keeps what the seam promises, and no more than that.

use crate::{emulator, machine};
use meshwork_core::comm::device::Moment;
use meshwork_core::profile::Recorder;
use meshwork_core::{Buffer, DType};
use meshwork_cuda::device::Products;
use meshwork_cuda::driver::{Address, Argument, Driver, DriverError, Operand, Product, Reach, Remote, Stream};
use meshwork_cuda::{CudaDevice, Emulator, Order};
use meshwork_kernels::{Launch, kernel};
use meshwork_tensor::Device;
use meshwork_tensor::Precision::{self, F32};
use meshwork_tensor::profiled::Profiled;
use std::time::Instant;

const SEEDS: u64 = 64;

fn write(driver: &Emulator, stream: Stream, values: &[f32]) -> Address {
    let at = driver.alloc(size_of_val(values)).unwrap();
    driver.write(stream, at, bytemuck::cast_slice(values)).unwrap();
    at
}

fn read(driver: &Emulator, stream: Stream, at: Address, count: usize) -> Vec<f32> {
    let mut values = vec![0.0_f32; count];
    driver.read(stream, at, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

/// `to += x` for `count` elements.
fn add_assign(driver: &Emulator, stream: Stream, to: Address, x: Address, count: usize) -> Result<(), DriverError> {
    let add = kernel("add_assign").unwrap();
    let launch = add.geometry.launch(count as u64, 0).unwrap();
    driver.launch(stream, add, launch, &[to.into(), x.into(), count.into()])
}

/// A copy stream brings numbers, a compute stream adds them once they are there: the sum, and whether the driver was
/// content.
fn copy_then_compute(driver: &Emulator) -> Vec<f32> {
    let (copies, compute) = (driver.stream().unwrap(), driver.stream().unwrap());
    let sum = write(driver, compute, &[1.0; 300]);
    let x = write(driver, copies, &[2.0; 300]);
    let there = driver.record(copies).unwrap();
    driver.wait(compute, there).unwrap();
    add_assign(driver, compute, sum, x, 300).unwrap();
    read(driver, compute, sum, 300)
}

#[test]
fn a_wait_is_kept_in_every_order_and_missed_in_some() {
    let Some(_) = emulator(Order::AsQueued) else { return };
    for order in (0..SEEDS).map(Order::Seeded).chain([Order::AsQueued]) {
        let driver = emulator(order).unwrap();
        assert_eq!(copy_then_compute(&driver), [3.0; 300], "{order:?}");
        assert_eq!(driver.waits(), 1);
    }
    let forgotten = |order| {
        let driver = emulator(order).unwrap();
        driver.skip_wait(0);
        copy_then_compute(&driver)
    };
    let wrong = (0..SEEDS).filter(|&seed| forgotten(Order::Seeded(seed)) != [3.0; 300]).count();
    assert!(wrong >= SEEDS as usize / 4, "{wrong} of {SEEDS} orders show that a wait is missing");
    assert_eq!(forgotten(Order::AsQueued), [3.0; 300], "luck");
}

#[test]
fn the_host_waits_only_for_what_it_must() {
    let Some(_) = emulator(Order::AsQueued) else { return };
    let mut waiting = 0;
    for seed in 0..SEEDS {
        let driver = emulator(Order::Seeded(seed)).unwrap();
        let (one, other) = (driver.stream().unwrap(), driver.stream().unwrap());
        let (x, y) = (write(&driver, one, &[1.0; 8]), write(&driver, other, &[1.0; 8]));
        (0..10).try_for_each(|_| add_assign(&driver, one, x, x, 8)).unwrap();
        assert_eq!(read(&driver, other, y, 8), [1.0; 8]);
        waiting += usize::from(driver.queued() > 0);
        let event = driver.record(one).unwrap();
        driver.finish(event).unwrap();
        assert_eq!((driver.queued(), read(&driver, one, x, 8)), (0, vec![1024.0; 8]));
    }
    assert!(waiting > SEEDS as usize / 2, "work that nobody waits for was left in {waiting} of {SEEDS} orders");
}

/// A download reads its elements and what checks have found. The host waited for each of the two.
#[test]
fn a_download_waits_once() {
    let Some(driver) = emulator(Order::Seeded(1)) else { return };
    let device = CudaDevice::new(driver.clone(), Products::OfTheCpu).unwrap();
    let x = device.upload(&Buffer::from_slice(&[1.0_f32; 300])).unwrap();
    let before = driver.host_waits();
    let sum = device.pointwise().unwrap().add(&x, &x).unwrap();
    assert_eq!(device.download(&sum).unwrap().as_slice::<f32>().unwrap(), [2.0; 300]);
    assert_eq!(driver.host_waits(), before + 1);
}

#[test]
fn memory_without_an_owner_holds_no_numbers() {
    let Some(driver) = emulator(Order::Seeded(1)) else { return };
    let stream = driver.stream().unwrap();
    let fresh = driver.alloc(16).unwrap();
    assert!(read(&driver, stream, fresh, 4).iter().all(|x| x.is_nan()), "nobody wrote it");
    let x = write(&driver, stream, &[1.0; 4]);
    driver.discard(stream, x.offset(8), 8).unwrap();
    let left = read(&driver, stream, x, 4);
    assert!(left[..2] == [1.0, 1.0] && left[2].is_nan() && left[3].is_nan(), "{left:?}");
    driver.zero(stream, x, 12).unwrap();
    assert_eq!(read(&driver, stream, x, 3), [0.0; 3]);

    driver.free(x).unwrap();
    let late = driver.read(stream, x, &mut [0; 4]).unwrap_err();
    assert_eq!(late.to_string(), format!("read: 4 bytes at {:#x} lie in no allocation of the device", x.0));
    assert_eq!(
        driver.free(x).unwrap_err().to_string(),
        format!("free: 0 bytes at {:#x} lie in no allocation of the device", x.0)
    );
    add_assign(&driver, stream, fresh, x, 4).unwrap();
    let event = driver.record(stream);
    let late = event.and_then(|event| driver.finish(event)).unwrap_err();
    assert!(matches!(late, DriverError::Place { call: "add_assign", .. }), "{late}");
    assert_eq!(driver.record(stream).unwrap_err(), late, "a device that failed does no more work");
}

#[test]
fn writes_beyond_an_allocation_are_found() {
    let Some(driver) = emulator(Order::AsQueued) else { return };
    let stream = driver.stream().unwrap();
    let (to, x) = (write(&driver, stream, &[0.0; 4]), write(&driver, stream, &[1.0; 16]));
    let beyond = add_assign(&driver, stream, to, x, 5).unwrap_err();
    assert_eq!(beyond, DriverError::Beyond { call: "add_assign", at: to.0, bytes: 16 });
    assert_eq!(beyond.to_string(), format!("add_assign wrote beyond the 16 bytes at {:#x}", to.0));
}

#[test]
fn arguments_are_those_of_the_table() {
    let Some(driver) = emulator(Order::AsQueued) else { return };
    let stream = driver.stream().unwrap();
    let x = write(&driver, stream, &[0.0; 4]);
    let add = kernel("add_assign").unwrap();
    let launch = add.geometry.launch(4, 0).unwrap();
    let refused = |args: &[Argument]| driver.launch(stream, add, launch, args).unwrap_err().to_string();
    assert_eq!(refused(&[x.into(), x.into()]), "kernel add_assign takes 3 arguments and was given 2");
    assert_eq!(
        refused(&[x.into(), x.into(), 4.0_f32.into()]),
        "kernel add_assign: argument 2 (count) is a number of type float, and long long was expected"
    );
    assert_eq!(
        refused(&[x.into(), 4_usize.into(), 4_usize.into()]),
        "kernel add_assign: argument 1 (b) is a number of type long long, and const float* was expected"
    );
    let bias = kernel("bias").unwrap();
    let none = driver.launch(stream, bias, launch, &[x.into(), x.into(), x.into(), 4_usize.into(), 0_usize.into()]);
    let zero = "kernel bias: argument 4 (n) is 0, and the kernel divides by it: a size of at least 1 was expected";
    assert_eq!(none.unwrap_err().to_string(), zero);
    let other = driver.write(Stream(7), x, &[0]).unwrap_err();
    assert_eq!(other.to_string(), "a queue of work: Stream(7) is not one of this device");
}

#[test]
fn a_device_has_only_its_memory() {
    let Some(driver) = emulator(Order::AsQueued) else { return };
    let half = driver.alloc(512 << 20).unwrap();
    let full = driver.alloc(513 << 20).unwrap_err().to_string();
    assert_eq!(
        full,
        "the device has no memory for 537919488 bytes more: 536870912 of its 1073741824 are in use by all ranks"
    );
    driver.free(half).unwrap();
    driver.free(driver.alloc(513 << 20).unwrap()).unwrap();

    let device = CudaDevice::new(driver, Products::OfTheCpu).unwrap();
    let kept = device.alloc(DType::U8, 1000).unwrap();
    drop(device.alloc(DType::U8, 1 << 29).unwrap());
    let full = device.alloc(DType::U8, 2 << 30).unwrap_err().to_string();
    let why = "the device has no memory for 2147483648 bytes more";
    assert!(full.starts_with("2.0 GiB of other more: device cuda-emulated: ") && full.contains(why), "{full}");
    assert!(full.ends_with("; this rank's buffers hold other 1000 B"), "{full}");
    device.alloc(DType::U8, 1 << 29).unwrap();
    drop(kept);
}

/// Kernels use the memory of a peer once they asked; where two devices are none, copies between them alone do.
#[test]
fn memory_of_another_device_has_to_be_opened() {
    for peers in [true, false] {
        let devices = || machine(Order::Seeded(5), 2, if peers { |_, _| true } else { |_, _| false });
        let Some([one, other]) = devices().as_deref().map(|devices| [devices[0].clone(), devices[1].clone()]) else {
            return;
        };
        let (stream, far) = (one.stream().unwrap(), other.stream().unwrap());
        let (sum, x) = (write(&one, stream, &[1.0; 300]), write(&other, far, &[2.0; 300]));
        let ready = other.record(far).unwrap();
        one.wait_for(stream, &*other, ready).unwrap();
        let reach = one.reach(&*other).unwrap();
        assert_eq!(reach, if peers { Reach::Direct } else { Reach::Copies });
        let [from, to] = [(&*other, x), (&*one, sum)].map(|(driver, at)| Remote { driver, at });
        one.copy_between(stream, from, to, 1000).unwrap();
        add_assign(&one, stream, sum, x, 300).unwrap();
        let done = one.record(stream).and_then(|event| one.finish(event));
        if peers {
            let want: Vec<f32> = (0..300).map(|i| if i < 250 { 4.0 } else { 3.0 }).collect();
            assert_eq!((done, read(&one, stream, sum, 300)), (Ok(()), want));
            // It is asked for in each direction.
            add_assign(&other, far, x, sum, 300).unwrap();
        }
        let fault = other.record(far).and_then(|event| other.finish(event)).unwrap_err().to_string();
        let (by, of, at) = if peers { (1, 0, sum) } else { (0, 1, x) };
        let want =
            format!("add_assign: device {by} has no access to the memory of device {of}, where {:#x} lies", at.0);
        assert_eq!(fault, want);
        let stranger = emulator(Order::Seeded(5)).unwrap();
        let apart = "wait_for: no work of cuda-emulated 0 reaches cuda-emulated 0: they are devices of different machines or drivers";
        assert_eq!(one.wait_for(stream, &*stranger, ready).unwrap_err().to_string(), apart);
    }
}

#[test]
fn bytes_are_copied_and_products_computed() {
    let Some(driver) = emulator(Order::Seeded(3)) else { return };
    let stream = driver.stream().unwrap();
    // [2, 3] and its transpose, whose product with itself is [2, 2].
    let x = write(&driver, stream, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let transposed = write(&driver, stream, &[0.0; 6]);
    for at in 0..6 {
        driver.copy(stream, x.offset(4 * at), transposed.offset(4 * (at % 3 * 2 + at / 3)), 4).unwrap();
    }
    assert_eq!(read(&driver, stream, transposed, 6), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    let c = write(&driver, stream, &[1.0; 4]);
    for (a, b, accumulate, want) in [
        ((x, false), (x, true), true, [15.0, 33.0, 33.0, 78.0]),
        ((x, false), (transposed, false), false, [14.0, 32.0, 32.0, 77.0]),
        ((transposed, true), (x, true), false, [14.0, 32.0, 32.0, 77.0]),
    ] {
        let operands = [a, b].map(|(at, transposed)| Operand { at, transposed });
        driver
            .product(
                stream,
                Product { mnk: [2, 2, 3], operands, precision: F32, c, rounded: false, accumulate, bias: None },
            )
            .unwrap();
        assert_eq!(read(&driver, stream, c, 4), want);
    }
    let bias = write(&driver, stream, &[0.5, -1.0]);
    let operands = [(x, false), (x, true)].map(|(at, transposed)| Operand { at, transposed });
    driver
        .product(
            stream,
            Product {
                mnk: [2, 2, 3],
                operands,
                precision: F32,
                c,
                rounded: false,
                accumulate: false,
                bias: Some(bias),
            },
        )
        .unwrap();
    assert_eq!(read(&driver, stream, c, 4), [14.5, 31.0, 32.5, 76.0]);
    // Operands of 12 bits, which TF32 rounds away from zero.
    let x = write(&driver, stream, &[2049.0, -2051.0]);
    let operands = [(x, false), (x, true)].map(|(at, transposed)| Operand { at, transposed });
    for (precision, want) in
        [(F32, 2049.0 * 2049.0 + 2051.0 * 2051.0), (Precision::Tf32, 2050.0 * 2050.0 + 2052.0 * 2052.0)]
    {
        let product = Product { mnk: [1, 1, 2], operands, precision, c, rounded: false, accumulate: false, bias: None };
        driver.product(stream, product).unwrap();
        assert_eq!(read(&driver, stream, c, 1), [want], "{precision:?}");
        let refused = driver.product(stream, Product { rounded: true, ..product }).unwrap_err().to_string();
        assert!(refused.contains("a result of bf16 from operands of f32"), "{refused}");
    }
}

/// What a GPU faults at is refused when it is queued: addresses that are no multiples of what work reads at once, and
/// rows of tensor cores that are no multiples of eight.
#[test]
fn addresses_between_multiples_are_refused() {
    let Some(driver) = emulator(Order::AsQueued) else { return };
    let stream = driver.stream().unwrap();
    let x = write(&driver, stream, &[1.0; 256]);
    let misaligned =
        |call, name, at: Address, multiple| Err(DriverError::Misaligned { call, name, at: at.0, multiple });
    let operand = |at| Operand { at, transposed: false };
    let operands = [operand(x), operand(x.offset(64))];
    let (c, bias) = (x.offset(512), Some(x));
    let product = Product { mnk: [4; 3], operands, precision: F32, c, rounded: false, accumulate: false, bias };
    driver.product(stream, product).unwrap();
    for off in [4, 8, 12] {
        let at = x.offset(off);
        assert_eq!(
            driver.product(stream, Product { bias: Some(at), ..product }),
            misaligned("product", "bias", at, 16)
        );
    }
    let (at, a) = (x.offset(2), operand(x.offset(2)));
    assert_eq!(
        driver.product(stream, Product { operands: [a, operands[1]], ..product }),
        misaligned("product", "a", at, 4)
    );
    assert_eq!(add_assign(&driver, stream, at, x, 4), misaligned("add_assign", "a", at, 4));
    let dots = kernel("flash_dots").unwrap();
    let launch = |from: Address, head_dim: usize| {
        let args = [
            from.into(),
            x.into(),
            x.offset(512).into(),
            1_usize.into(),
            1_usize.into(),
            1_usize.into(),
            head_dim.into(),
        ];
        driver.launch(stream, dots, dots.geometry.launch(1, 0).unwrap(), &args)
    };
    launch(x.offset(16), 8).unwrap();
    assert_eq!(launch(x.offset(8), 8), misaligned("flash_dots", "dout", x.offset(8), 16));
    let (add, args) = (kernel("add_assign").unwrap(), [x.into(), x.into(), 4_usize.into()]);
    let fits = add.geometry.launch(4, 0).unwrap();
    for wrong in [
        Launch { grid: [0, 1, 1], ..fits },
        Launch { grid: [1, 1 << 16, 1], ..fits },
        Launch { block: [1025, 1, 1], ..fits },
        Launch { shared: 1 << 20, ..fits },
    ] {
        let refused = driver.launch(stream, add, wrong, &args).unwrap_err();
        assert!(matches!(refused, DriverError::Kernel { kernel: "add_assign", .. }), "{wrong:?}: {refused}");
    }
    let odd = launch(x, 12).unwrap_err().to_string();
    assert_eq!(odd, "kernel flash_dots: argument 6 (head_dim) is 12, and a multiple of 8 was expected");
}

/// Without its wait a rank would compute on what is not there yet. The wait is queued where a buffer is dropped, too,
/// and nobody hears its error there.
#[test]
fn a_wait_that_was_refused_comes_out_of_every_later_use() {
    let (Some(one), Some(other)) = (emulator(Order::Seeded(1)), emulator(Order::Seeded(2))) else { return };
    let [device, stranger] = [one, other].map(|driver| CudaDevice::new(driver, Products::OfTheCpu).unwrap());
    let [x, far] = [&device, &stranger].map(|device| device.upload(&Buffer::from_slice(&[1.0_f32; 4])).unwrap());
    let [near, far] = [&x, &far].map(|buffer| buffer.memory().on_device().unwrap().carrier);
    let why = "wait_for: no work of cuda-emulated 0 reaches cuda-emulated 0: they are devices of different machines or drivers";
    assert_eq!(near.resume(&[Moment { carrier: far, number: 0 }]).unwrap_err(), why);
    assert_eq!(near.moment().unwrap_err(), why);
    let add = device.pointwise().unwrap().add(&x, &x).unwrap_err().to_string();
    let download = device.download(&x).unwrap_err().to_string();
    assert!(add.contains(why) && download.contains(why), "{add}; {download}");
}

#[test]
fn a_profile_waits_for_what_it_times_and_a_run_without_one_does_not() {
    let Some(_) = emulator(Order::AsQueued) else { return };
    let driver = emulator(Order::Seeded(1)).unwrap();
    let device = std::sync::Arc::new(CudaDevice::new(driver.clone(), Products::OfTheCpu).unwrap());
    let recorder = Recorder::new(Instant::now());
    let device = Profiled::device(device, recorder.clone());
    let x = device.upload(&Buffer::from_slice(&vec![1.0_f32; 4099])).unwrap();
    for on in [true, false] {
        if on {
            recorder.resume()
        } else {
            recorder.pause()
        }
        let waits = driver.host_waits();
        let _sum = device.pointwise().unwrap().add(&x, &x).unwrap();
        assert_eq!((driver.queued() == 0, driver.host_waits() > waits), (on, on));
    }
    let spans = recorder.drain();
    assert_eq!(spans.iter().map(|span| span.name).collect::<Vec<_>>(), ["add"]);
}
