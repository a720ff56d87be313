//! Graphs of repeated work: the same bits, and fewer launches, on the emulator here and on a GPU or its stand-in in
//! `tests/gpu`.

use crate::driver;
use crate::train::{small, train_watched};
use meshwork_core::simd::{Level, level};
use meshwork_cpu::Cpu;
use meshwork_cuda::device::Products;
use meshwork_cuda::driver::{Address, Stream};
use meshwork_cuda::replay::Replaying;
use meshwork_cuda::{CudaDevice, Driver, Order};
use meshwork_engine::Numerics;
use meshwork_kernels::kernel;
use meshwork_models::gpt2::Gpt2Config;
use meshwork_tensor::{Device, Launches};
use std::sync::Arc;

fn replaying(order: Order) -> Option<Arc<Replaying>> {
    Some(Arc::new(Replaying::new(driver(order)?)))
}

/// In random orders of streams. From the third step on each graph is captured, and replayed with the numbers of the
/// step: dropout has another key.
#[test]
fn steps_have_the_bits_that_they_have_without_graphs() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let numerics = Numerics::Canonical { blocks: 4 };
    for dropout in [0.0, 0.1] {
        let config = Gpt2Config { dropout, ..small() };
        let want = train_watched(config, numerics, 6, Cpu::device(), || ()).unwrap();
        for seed in 0..3 {
            let Some(driver) = replaying(Order::Seeded(seed)) else { return };
            let device = Arc::new(CudaDevice::new(driver, Products::OfTheCpu).unwrap());
            let mut counts = Vec::new();
            let mark = || counts.push(device.launches().unwrap());
            let got = train_watched(config, numerics, 6, device.clone(), mark).unwrap();
            got.assert_same("with graphs", &want);
            let steps: Vec<Launches> = counts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            eprintln!("dropout {dropout}: {steps:?}");
            let (first, last) = (steps[0], steps[5]);
            // A micro-batch may get the addresses of the one before, and be captured; all else is queued call by call.
            assert_eq!((first.graphs, first.launches), (first.captured, first.graphs + first.new + first.short));
            assert!(4 * first.new > 3 * first.asked, "the first step is queued call by call: {first:?}");
            assert_eq!(last.launches, last.graphs + last.new + last.short + last.refused);
            assert_eq!((last.captured, last.new, last.refused), (0, 0, 0), "{dropout}: {last:?}");
            // The update is two launches: too few for a graph.
            assert_eq!(last.changed > 0, dropout > 0.0, "{last:?}");
            assert!(10 * last.launches < last.asked, "{dropout}: {last:?}");
        }
    }
}

fn write(driver: &dyn Driver, stream: Stream, values: &[f32]) -> Address {
    let at = driver.alloc(size_of_val(values)).unwrap();
    driver.write(stream, at, bytemuck::cast_slice(values)).unwrap();
    at
}

fn read(driver: &dyn Driver, stream: Stream, at: Address) -> [f32; 3] {
    let mut values = [0.0_f32; 3];
    driver.read(stream, at, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

/// Queues `x += y` as often as `times` says, without a wait between.
fn add(driver: &dyn Driver, stream: Stream, [x, y]: [Address; 2], times: usize) {
    let add = kernel("add_assign").unwrap();
    for _ in 0..times {
        let args = [x.into(), y.into(), 3_usize.into()];
        driver.launch(stream, add, add.geometry.launch(3, 0).unwrap(), &args).unwrap();
    }
}

/// Nothing is lost or done twice, whether work is new, captured or replayed; a graph reads what lies there now.
#[test]
fn graphs_do_what_their_calls_do() {
    let Some(driver) = replaying(Order::Seeded(1)) else { return };
    let stream = driver.stream().unwrap();
    let (x, y) = (write(&*driver, stream, &[0.0; 3]), write(&*driver, stream, &[1.0, 2.0, 3.0]));
    let mut times = 0.0;
    for turn in 0..5 {
        add(&*driver, stream, [x, y], 5);
        times += 5.0;
        assert_eq!(read(&*driver, stream, x), [times, 2.0 * times, 3.0 * times], "turn {turn}");
    }
    // Five times new, then four graphs. Three times: too little. Seventy: a graph of 64 and another of the rest.
    let counts = driver.launches(&[stream]).unwrap();
    assert_eq!((counts.asked, counts.new, counts.captured, counts.graphs, counts.launches), (25, 5, 1, 4, 9));
    for _ in 0..3 {
        add(&*driver, stream, [x, y], 3);
        times += 3.0;
        assert_eq!(read(&*driver, stream, x)[0], times);
    }
    assert_eq!(driver.launches(&[stream]).unwrap().short, 9);
    for _ in 0..3 {
        add(&*driver, stream, [x, y], 70);
        times += 70.0;
        assert_eq!(read(&*driver, stream, x)[0], times);
    }
    assert_eq!((driver.launches(&[stream]).unwrap() - counts).graphs, 4);
    driver.write(stream, y, bytemuck::cast_slice(&[10.0_f32; 3])).unwrap();
    add(&*driver, stream, [x, y], 5);
    assert_eq!(read(&*driver, stream, x)[0], times + 50.0, "the graph reads what was written since");
    let none = driver.replay(stream, meshwork_cuda::driver::Graph(77), &[]).unwrap_err();
    assert_eq!(none.to_string(), "replay: Graph(77) is not one of this device");
    driver.free(x).unwrap();
    driver.free(y).unwrap();
}

/// What a rank waits for in another rank's stream was queued before the event, and so is not held back.
#[test]
fn events_come_after_what_was_held_back() {
    for seed in 0..10 {
        let Some(driver) = replaying(Order::Seeded(seed)) else { return };
        let (one, other) = (driver.stream().unwrap(), driver.stream().unwrap());
        let (x, y) = (write(&*driver, one, &[0.0; 3]), write(&*driver, one, &[1.0; 3]));
        for turn in 1..4 {
            add(&*driver, one, [x, y], 6);
            let event = driver.record(one).unwrap();
            driver.wait(other, event).unwrap();
            add(&*driver, other, [x, y], 6);
            let event = driver.record(other).unwrap();
            driver.finish(event).unwrap();
            assert_eq!(read(&*driver, other, x)[0], 12.0 * turn as f32);
            driver.wait(one, event).unwrap();
        }
        [x, y].into_iter().for_each(|at| driver.free(at).unwrap());
    }
}

/// Numbers of a kernel may differ from time to time: the graph has those of each time, also where an earlier launch
/// with others has not run yet.
#[test]
fn graphs_get_the_numbers_of_each_time() {
    for seed in 0..10 {
        let Some(driver) = replaying(Order::Seeded(seed)) else { return };
        let stream = driver.stream().unwrap();
        let (x, y) = (write(&*driver, stream, &[1.0; 3]), write(&*driver, stream, &[0.0; 3]));
        let scale = kernel("scale_forward").unwrap();
        let mut want = 0.0;
        for turn in 1..8 {
            let factor = 0.5_f32 * turn as f32;
            for _ in 0..4 {
                let args = [y.into(), y.into(), 3_usize.into(), factor.into()];
                driver.launch(stream, scale, scale.geometry.launch(3, 0).unwrap(), &args).unwrap();
                want *= factor;
            }
            add(&*driver, stream, [y, x], 1);
            want += 1.0;
            driver.record(stream).unwrap(); // a cut, for which the host does not wait
        }
        assert_eq!(read(&*driver, stream, y), [want; 3], "seed {seed}");
        let counts = driver.launches(&[stream]).unwrap();
        assert_eq!((counts.new, counts.captured, counts.graphs, counts.changed), (5, 1, 6, 20));
        [x, y].into_iter().for_each(|at| driver.free(at).unwrap());
    }
}
