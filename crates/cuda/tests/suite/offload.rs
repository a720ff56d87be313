//! Pinned memory of the host: copies beside computation, for which the host does not wait, and waits that are left out.

use crate::collectives::device;
use crate::emulator;
use crate::train::{STEPS, offloading, small, train_plan};
use meshwork_core::{Buffer, DType};
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Emulator, Order};
use meshwork_engine::Plan;
use meshwork_tensor::{Device, Error};
use std::sync::Arc;

/// The numbers of all waits of the host in steps of a plan, and what ran.
fn watched(plan: &Plan, seed: u64) -> Option<(Vec<u64>, Vec<&'static str>)> {
    let driver = emulator(Order::Seeded(seed))?;
    driver.note_launches();
    let device = Arc::new(CudaDevice::new(driver.clone(), Products::OfTheCpu).unwrap());
    let mut waits = Vec::new();
    train_plan(small(), plan, STEPS, device, || waits.push(driver.host_waits())).unwrap();
    Some((waits, driver.launches().into_iter().map(|(_, name)| name).collect()))
}

#[test]
fn a_step_that_offloads_waits_no_more_often_than_one_that_does_not() {
    let (offloading, plain) = (offloading(), Plan { offload: None, ..offloading() });
    let Some((with, _)) = watched(&offloading, 3) else { return };
    let (without, _) = watched(&plain, 3).unwrap();
    let in_steps = |waits: &[u64]| waits.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>();
    assert_eq!(in_steps(&with), in_steps(&without));
}

/// The log of a run: of the update of each page, what the next one needs comes, and what the one before had leaves,
/// before it in some orders and after it in others.
#[test]
fn copies_go_beside_the_update() {
    let orders: Option<Vec<_>> = (0..12).map(|seed| watched(&offloading(), seed)).collect();
    let Some(orders) = orders else { return };
    let places = |log: &[&str], what: &str| -> Vec<usize> {
        log.iter().enumerate().filter(|(_, name)| name.starts_with(what)).map(|(at, _)| at).collect()
    };
    // The update of the first step ends with the last of its kernels; page by page, one launch for those of its
    // parameters that have the same factors.
    let updates = |log: &[&str]| places(log, "adamw");
    let middle = updates(&orders[0].1).len() / 4;
    let [mut loads, mut saves] = [Vec::new(), Vec::new()];
    for (_, log) in &orders {
        let at = updates(log)[middle];
        loads.push(places(log, "load").iter().filter(|&&load| load < at).count());
        saves.push(places(log, "save").iter().filter(|&&save| save < at).count());
    }
    let varies = |counts: &[usize]| counts.iter().max() > counts.iter().min();
    assert!(varies(&loads) && varies(&saves), "before one update: loads {loads:?}, saves {saves:?}");
}

const COUNT: usize = 300;

/// Numbers are computed, leave, and come back into memory that something else had meanwhile.
fn there_and_back(driver: Arc<Emulator>, mut mark: impl FnMut()) -> Result<Vec<f32>, Error> {
    let device = device(driver);
    let pinned = device.pinned().unwrap();
    pinned.reserve(4 * COUNT as u64 + 100)?;
    let computed = |value: f32| {
        let x = device.upload(&Buffer::from_vec(vec![value; COUNT]))?;
        let mut sum = device.zeros(DType::F32, COUNT)?;
        device.pointwise()?.add_assign(&mut sum, 0, &x)?;
        Ok::<_, Error>(sum)
    };
    drop(computed(7.0)?); // so that the memory of all that follows was used before
    let one = computed(1.0)?;
    mark();
    pinned.wait(pinned.save(&one, 100)?)?;
    mark();
    drop(one);
    drop(computed(9.0)?);
    let mut back = device.alloc(DType::F32, COUNT)?;
    mark();
    pinned.wait(pinned.load(100, &mut back)?)?;
    mark();
    let mut sum = computed(2.0)?;
    device.pointwise()?.add_assign(&mut sum, 0, &back)?;
    Ok(device.download(&sum)?.as_slice::<f32>()?.to_vec())
}

#[test]
fn each_wait_for_pinned_memory_that_is_left_out_is_found() {
    let Some(counted) = emulator(Order::Seeded(0)) else { return };
    let mut waits = Vec::new();
    let sums = there_and_back(counted.clone(), || waits.push(counted.waits())).unwrap();
    assert_eq!(sums, [3.0; COUNT]);
    let found = |nth: u64| {
        (0..60).any(|seed| {
            let driver = emulator(Order::Seeded(seed)).unwrap();
            driver.skip_wait(nth);
            there_and_back(driver, || ()).map_or(true, |sums| sums != [3.0; COUNT])
        })
    };
    assert!(!found(u64::MAX), "without a fault");
    let [save, load] = [waits[0]..waits[1], waits[2]..waits[3]];
    let all: Vec<u64> = save.chain(load).collect();
    let missed: Vec<u64> = all.iter().copied().filter(|&nth| !found(nth)).collect();
    assert!(all.len() == 4 && missed.is_empty(), "of the waits {all:?} {missed:?} are missed");
}

/// Room grows by a block of its own; what was never written is zero; the host reads and writes it; what lies beyond it
/// is refused.
#[test]
fn room_grows_and_keeps_what_it_has() {
    let Some(driver) = emulator(Order::Seeded(5)) else { return };
    let device = device(driver);
    let pinned = device.pinned().unwrap();
    pinned.reserve(64).unwrap();
    let numbers = |range: std::ops::Range<i32>| Buffer::from_vec(range.collect::<Vec<i32>>());
    pinned.write(&numbers(1..17), 0).unwrap();
    pinned.reserve(200).unwrap();
    pinned.reserve(100).unwrap();
    let written = device.upload(&numbers(50..60)).unwrap();
    pinned.wait(pinned.save(&written, 48).unwrap()).unwrap(); // over the seam between two blocks
    let mut all = Buffer::zeros(DType::I32, 50);
    pinned.read(0, &mut all).unwrap();
    let want: Vec<i32> = (1..13).chain(50..60).chain([0; 28]).collect();
    assert_eq!(all.as_slice::<i32>().unwrap(), want);
    let beyond = pinned.save(&written, 164).unwrap_err().to_string();
    assert_eq!(beyond, "offload: device cuda-emulated: offload: 40 bytes at 164 lie beyond the room that was reserved");
}
