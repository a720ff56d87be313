//! What the driver promises, call by call.

use crate::gpu;
use meshwork_cuda::driver::{Address, Argument, Driver, DriverError, Event, Operand, Product, Stream, Work};
use meshwork_cuda::replay::Replaying;
use meshwork_kernels::{Launch, kernel};
use meshwork_tensor::Precision;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;

fn write(driver: &dyn Driver, stream: Stream, values: &[f32]) -> Address {
    let at = driver.alloc(size_of_val(values)).unwrap();
    driver.write(stream, at, bytemuck::cast_slice(values)).unwrap();
    at
}

fn read(driver: &dyn Driver, stream: Stream, at: Address, count: usize) -> Vec<f32> {
    let mut values = vec![0.0_f32; count];
    driver.read(stream, at, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| i as f32).collect()
}

/// More copies than there are slots of pinned memory, larger than one, none of them waited for: each has its own bytes.
#[test]
fn copies_from_the_host_keep_the_bytes_of_the_call() {
    let Some(driver) = gpu() else { return };
    let stream = driver.stream().unwrap();
    let large = write(&driver, stream, &numbers(3_000_001));
    let small: Vec<Address> = (0..40).map(|i| write(&driver, stream, &[i as f32; 3])).collect();
    for (i, at) in small.into_iter().enumerate() {
        assert_eq!(read(&driver, stream, at, 3), [i as f32; 3]);
        driver.free(at).unwrap();
    }
    assert!(read(&driver, stream, large, 3_000_001) == numbers(3_000_001));
    driver.free(large).unwrap();
}

#[test]
fn bytes_are_copied_and_zeroed_within_a_device() {
    let Some(driver) = gpu() else { return };
    let stream = driver.stream().unwrap();
    let (x, y) = (write(&driver, stream, &numbers(12)), write(&driver, stream, &[0.0; 12]));
    driver.copy(stream, x.offset(4), y, 12).unwrap();
    driver.copy(stream, x, y.offset(8), 0).unwrap();
    assert_eq!(read(&driver, stream, y, 4), [1.0, 2.0, 3.0, 0.0]);
    driver.zero(stream, y, 8).unwrap();
    driver.zero(stream, y.offset(8), 0).unwrap();
    assert_eq!(read(&driver, stream, y, 3), [0.0, 0.0, 3.0]);
    [x, y].into_iter().for_each(|at| driver.free(at).unwrap());
}

/// Also of events that were recorded so long ago that the driver has used theirs again.
#[test]
fn events_order_streams() {
    let Some(driver) = gpu() else { return };
    let (one, other) = (driver.stream().unwrap(), driver.stream().unwrap());
    let x = write(&driver, one, &[1.0; 8]);
    let events: Vec<Event> = (0..1000).map(|_| driver.record(one).unwrap()).collect();
    for &event in [&events[0], &events[999]] {
        driver.wait(other, event).unwrap();
        driver.finish(event).unwrap();
    }
    assert_eq!(read(&driver, other, x, 8), [1.0; 8]);
    let none = Event(events[999].0 + 256);
    assert_eq!(driver.wait(other, none).unwrap_err(), DriverError::Unknown { call: "wait", what: format!("{none:?}") });
    let gone = driver.record(Stream(7)).unwrap_err();
    assert_eq!(gone.to_string(), "record: Stream(7) is not one of this device");
    driver.free(x).unwrap();
}

#[test]
fn kernels_get_their_arguments() {
    let Some(driver) = gpu() else { return };
    let stream = driver.stream().unwrap();
    let (sum, x) = (write(&driver, stream, &[1.0; 300]), write(&driver, stream, &numbers(300)));
    let add = kernel("add_assign").unwrap();
    let launch = add.geometry.launch(299, 0).unwrap();
    driver.launch(stream, add, launch, &[sum.into(), x.into(), 299_usize.into()]).unwrap();
    let want: Vec<f32> = (0..300).map(|i| if i < 299 { i as f32 + 1.0 } else { 1.0 }).collect();
    assert_eq!(read(&driver, stream, sum, 300), want);
    let wrong: [Argument; 2] = [sum.into(), x.into()];
    let wrong = driver.launch(stream, add, launch, &wrong).unwrap_err().to_string();
    assert_eq!(wrong, "kernel add_assign takes 3 arguments and was given 2");
    [sum, x].into_iter().for_each(|at| driver.free(at).unwrap());
}

/// All ways to store the operands, of f32, rounded to TF32 and of bf16, with a bias and without, results of f32 and of
/// bf16, at addresses that are aligned to no more than their elements, but for the bias.
#[test]
fn products_are_those_of_row_major_matrices() {
    let Some(driver) = gpu() else { return };
    let stream = driver.stream().unwrap();
    let [m, n, k] = [2, 3, 4];
    let (a, b) = (numbers(m * k), numbers(k * n));
    let product = |i: usize, j: usize| (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum::<f32>();
    let want: Vec<f32> = (0..m * n).map(|at| product(at / n, at % n)).collect();
    let turned = |x: &[f32], rows: usize, columns: usize| -> Vec<f32> {
        (0..rows * columns).map(|at| x[at % rows * columns + at / rows]).collect()
    };
    let added = numbers(n);
    let bytes_of = |values: &[f32], bf16: bool| -> Vec<u8> {
        match bf16 {
            true => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
            false => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    };
    // A matrix stored behind one number of something else, or a bias stored behind 16 bytes.
    let stored_behind = |first: usize, values: &[f32], bf16: bool| {
        let bytes = bytes_of(values, bf16);
        let at = driver.alloc(first + bytes.len()).unwrap();
        driver.write(stream, at.offset(first), &bytes).unwrap();
        (at, at.offset(first))
    };
    let stored = |values: &[f32], bf16: bool| stored_behind(if bf16 { 2 } else { 4 }, values, bf16);
    let ways = [[false; 3], [false, true, false], [true, false, false], [false, false, true], [true, false, true]];
    let ways = ways.map(|[bf16, accumulate, biased]| (bf16, false, accumulate, biased));
    let rounded = [(true, true, false, false), (true, true, true, false), (true, true, false, true)];
    let ways = ways.into_iter().chain(rounded).map(|(bf16, rounded, accumulate, biased)| {
        (if bf16 { Precision::Bf16 } else { Precision::F32 }, rounded, accumulate, biased)
    });
    // The numbers have few bits, so that every precision has the same results.
    let of_tf32 =
        [(false, false), (true, false), (false, true)].map(|(add, biased)| (Precision::Tf32, false, add, biased));
    for (precision, rounded, accumulate, biased) in ways.chain(of_tf32) {
        let bf16 = precision == Precision::Bf16;
        for transposed in [[false, false], [false, true], [true, false], [true, true]] {
            let store = |x: &[f32], turn: bool, [rows, columns]: [usize; 2]| {
                let (whole, at) = stored(&if turn { turned(x, rows, columns) } else { x.to_vec() }, bf16);
                (whole, Operand { at, transposed: turn })
            };
            let (a, b) = (store(&a, transposed[0], [m, k]), store(&b, transposed[1], [k, n]));
            let ((c, at), bias) = (stored(&vec![0.5; m * n], rounded), stored_behind(16, &added, rounded));
            let bias_at = biased.then_some(bias.1);
            let operands = [a.1, b.1];
            let product = Product { mnk: [m, n, k], operands, precision, c: at, rounded, accumulate, bias: bias_at };
            driver.product(stream, product).unwrap();
            if let Some(bias) = bias_at {
                // An epilogue faults there, whatever alignment it was told of the result.
                let (bias, name) = (bias.offset(if rounded { 2 } else { 8 }), "bias");
                let refused = driver.product(stream, Product { bias: Some(bias), ..product }).unwrap_err();
                assert_eq!(refused, DriverError::Misaligned { call: "product", name, at: bias.0, multiple: 16 });
            }
            let result = || {
                let mut bytes = vec![0; m * n * if rounded { 2 } else { 4 }];
                driver.read(stream, at, &mut bytes).unwrap();
                bytes
            };
            let before = |at: usize| match (accumulate, biased) {
                (true, _) => 0.5,
                (_, true) => added[at % n],
                _ => 0.0,
            };
            let want: Vec<f32> = want.iter().enumerate().map(|(at, x)| x + before(at)).collect();
            let way = format!("{precision:?} {rounded} {accumulate} {biased} {transposed:?}");
            assert_eq!(result(), bytes_of(&want, rounded), "{way}");
            let nothing = Product { mnk: [m, n, 0], bias: None, ..product };
            driver.product(stream, nothing).unwrap();
            let left = if accumulate { want } else { vec![0.0; m * n] };
            assert_eq!(result(), bytes_of(&left, rounded), "sums of nothing, {way}");
            [a.0, b.0, c, bias.0].into_iter().for_each(|at| driver.free(at).unwrap());
        }
    }
}

/// Operands of 13 bits, which a library may round to TF32, cut off, or multiply as they are.
#[test]
fn the_library_may_round_to_tf32() {
    let Some(driver) = gpu() else { return };
    let stream = driver.stream().unwrap();
    let a = write(&driver, stream, &[4097.0, 4103.0, 4099.0, 1.0]);
    let (b, c) = (write(&driver, stream, &[1.0; 4]), driver.alloc(4).unwrap());
    let operands = [(a, false), (b, true)].map(|(at, transposed)| Operand { at, transposed });
    let product = |precision| {
        let product = Product { mnk: [1, 1, 4], operands, precision, c, rounded: false, accumulate: false, bias: None };
        driver.product(stream, product).unwrap();
        read(&driver, stream, c, 1)[0]
    };
    let (exact, tf32) = (product(Precision::F32), product(Precision::Tf32));
    assert_eq!(exact, 12_300.0);
    assert!((tf32 - exact).abs() <= exact * 2_f32.powi(-10), "{tf32}");
    if std::env::var_os("STAND_IN_CACHE").is_some() {
        assert_eq!(tf32, 4096.0 + 4104.0 + 4100.0 + 1.0);
    }
    [a, b, c].into_iter().for_each(|at| driver.free(at).unwrap());
}

/// Places of several pieces of pinned memory, of a few bytes and of none are read in one call.
#[test]
fn several_places_are_read_at_once() {
    let Some(driver) = gpu() else { return };
    let stream = driver.stream().unwrap();
    let sizes = [(9 << 20) + 3, 5, 0, 4 << 20];
    let given = sizes.map(|size: usize| (0..size).map(|at| (at * at / 7 + size) as u8).collect::<Vec<u8>>());
    let mut read = sizes.map(|size| vec![0_u8; size]);
    let at = sizes.map(|size| driver.alloc(size.max(1)).unwrap());
    at.iter().zip(&given).for_each(|(&at, bytes)| driver.write(stream, at, bytes).unwrap());
    let mut places: Vec<_> = at.iter().zip(&mut read).map(|(&at, into)| (at, &mut into[..])).collect();
    driver.read_all(stream, &mut places).unwrap();
    assert!(read == given);
    at.into_iter().for_each(|at| driver.free(at).unwrap());
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let Some(driver) = gpu() else { return };
    let more = driver.properties().memory as usize + 1;
    let full = driver.alloc(more).unwrap_err();
    assert!(matches!(full, DriverError::OutOfMemory { bytes, .. } if bytes == more), "{full}");
    let at = driver.alloc(1000).unwrap();
    assert_eq!(at.0 % 256, 0);
    driver.free(at).unwrap();
    let call = "cuMemFree";
    assert!(matches!(driver.free(Address(1)).unwrap_err(), DriverError::Call { call: other, .. } if other == call));
}

/// Memory that was given back while another thread captured a graph used to be refused, and a GPU that was dropped then
/// kept what it had.
#[test]
fn memory_is_given_back_while_another_thread_captures() {
    let (Some(capturing), Some(freeing)) = (gpu(), gpu()) else { return };
    let (times, ended) = (500, AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let stream = capturing.stream().unwrap();
            let at = write(&capturing, stream, &[1.0; 64]);
            for _ in 0..times {
                let zeros: Vec<Work> = (0..64).map(|_| Work::Zero { at, bytes: 256 }).collect();
                capturing.capture(stream, &zeros).unwrap();
            }
            assert_eq!(read(&capturing, stream, at, 64), [0.0; 64]);
            capturing.free(at).unwrap();
            ended.store(true, Relaxed);
        });
        while !ended.load(Relaxed) {
            let at = freeing.alloc(256).unwrap();
            freeing.free(at).unwrap();
        }
    });
}

/// A buffer that is dropped by another rank's thread queues a wait, whatever its owner does with the stream just then.
/// In a stream that is captured the wait was refused, and so lost, and it ended the capture.
#[test]
fn waits_of_other_threads_come_into_no_capture() {
    let Some(driver) = gpu() else { return };
    let (stream, other) = (driver.stream().unwrap(), driver.stream().unwrap());
    let (at, ended, tried) = (write(&driver, stream, &[1.0; 64]), AtomicBool::new(false), AtomicUsize::new(0));
    let event = driver.record(other).unwrap();
    let captured = thread::scope(|scope| {
        let capturing = scope.spawn(|| {
            let zeros: Vec<Work> = (0..64).map(|_| Work::Zero { at, bytes: 256 }).collect();
            let mut captured = 0;
            while !ended.load(Relaxed) {
                captured += usize::from(driver.capture(stream, &zeros).unwrap().is_some());
                tried.fetch_add(1, Relaxed);
            }
            captured
        });
        let mut rounds = 0;
        while rounds < 1000 || tried.load(Relaxed) < 100 {
            driver.wait_for(stream, &driver, event).unwrap();
            driver.wait(stream, event).unwrap();
            driver.record(stream).unwrap();
            driver.copy(stream, at, at.offset(128), 64).unwrap();
            rounds += 1;
        }
        ended.store(true, Relaxed);
        capturing.join().unwrap()
    });
    // None at all where the driver makes no graphs.
    let tried = tried.into_inner();
    assert!(captured == tried || captured == 0, "{captured} of {tried} captures");
    assert_eq!(read(&driver, stream, at, 64), [0.0; 64]);
    driver.free(at).unwrap();
}

/// Work that was held back for a graph and is refused when it is queued is lost. The error came out of the call that
/// queued it, where a buffer was dropped that nobody heard, and no later one knew of it.
#[test]
fn work_that_was_lost_comes_out_of_every_later_call() {
    let Some(gpu) = gpu().map(Arc::new) else { return };
    let driver = Replaying::new(gpu.clone());
    let stream = driver.stream().unwrap();
    let x = write(&driver, stream, &[1.0; 4]);
    let add = kernel("add_assign").unwrap();
    let launch = add.geometry.launch(4, 0).unwrap();
    let args = [x.into(), x.into(), 4_usize.into()];
    driver.launch(stream, add, Launch { shared: u32::MAX, ..launch }, &args).unwrap();
    let lost = driver.record(stream).unwrap_err();
    assert!(lost.to_string().starts_with("kernel add_assign: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"), "{lost}");
    assert_eq!(driver.record(stream).unwrap_err(), lost);
    assert_eq!(driver.launch(stream, add, launch, &args).unwrap_err(), lost);
    assert_eq!(driver.read(stream, x, &mut [0; 16]).unwrap_err(), lost);
    gpu.free(x).unwrap();
}
