//! Communicators of NCCL, call by call.

use meshwork_cuda::driver::{Address, Driver, DriverError, Exchange, Message, NcclComm, Stream, UniqueId, Watch, Work};
use meshwork_cuda::{Gpu, Order};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The first GPU, where NCCL is there. `None`, and a line that says why, if one of them is missing.
fn gpu() -> Option<Gpu> {
    let gpu = crate::gpu()?.patience(Duration::from_millis(200));
    match gpu.nccl().map(drop) {
        Ok(()) => Some(gpu),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

fn bytes(driver: &dyn Driver, stream: Stream, values: &[u8]) -> Address {
    let at = driver.alloc(values.len()).unwrap();
    driver.write(stream, at, values).unwrap();
    at
}

fn read(driver: &dyn Driver, stream: Stream, at: Address, count: usize) -> Vec<u8> {
    let mut values = vec![0; count];
    driver.read(stream, at, &mut values).unwrap();
    values
}

/// A communicator of one rank: a part of it, a collective, and both ends of a message to oneself.
#[test]
fn one_rank_joins_itself_and_leaves_once() {
    let Some(gpu) = gpu() else { return };
    let nccl = gpu.nccl().unwrap();
    let world = nccl.join(&nccl.unique_id().unwrap(), 0, 1).unwrap();
    let part = nccl.split(world, Some(3), 0).unwrap().unwrap();
    assert_eq!(nccl.split(world, None, 0).unwrap(), None);
    let stream = gpu.stream().unwrap();
    let (from, to) = (bytes(&gpu, stream, &[1, 2, 3, 4]), bytes(&gpu, stream, &[0; 4]));
    let message = |sends, at| Message { peer: 0, sends, at, bytes: 2 };
    let work = [
        (world, Exchange::AllGather { from, to: to.offset(2), bytes: 2 }),
        (part, Exchange::Messages(vec![message(true, from.offset(2)), message(false, to)])),
        (part, Exchange::Messages(Vec::new())),
    ];
    for (on, exchange) in work {
        gpu.queue(stream, Work::Exchange { on, exchange }).unwrap();
    }
    assert_eq!(read(&gpu, stream, to, 4), [3, 4, 1, 2]);
    nccl.leave(part).unwrap();
    let unknown = |error: DriverError| assert!(matches!(error, DriverError::Unknown { .. }), "{error}");
    unknown(nccl.leave(part).unwrap_err());
    unknown(nccl.split(part, None, 0).unwrap_err());
    nccl.abort(world).unwrap();
    nccl.abort(world).unwrap(); // threads that find a fault at once all end it
    let late = Exchange::Broadcast { at: from, bytes: 1, root: 0 };
    unknown(gpu.queue(stream, Work::Exchange { on: world, exchange: late }).unwrap_err());
    unknown(nccl.leave(NcclComm(77)).unwrap_err());
    [from, to].into_iter().for_each(|at| gpu.free(at).unwrap());
}

/// The others would be waited for without end.
#[test]
fn ranks_that_do_not_come_are_an_error() {
    let Some(gpu) = gpu() else { return };
    let nccl = gpu.nccl().unwrap();
    let begun = Instant::now();
    let alone = nccl.join(&nccl.unique_id().unwrap(), 1, 2).unwrap_err().to_string();
    let text = "ncclCommInitRankConfig: it has waited 0.2 s for other ranks, which did not come to the same call";
    assert_eq!(alone, text);
    assert!(begun.elapsed() < Duration::from_secs(20));
    nccl.join(&UniqueId([7; UniqueId::BYTES]), 3, 2).unwrap_err();
}

/// Work of an aborted communicator would keep the stream for ever.
#[test]
fn an_abort_ends_work_that_waits_for_another_rank() {
    let Some(drivers) = crate::apart(Order::Seeded(0), 2) else { return };
    let id = match drivers[0].nccl().and_then(|nccl| nccl.unique_id()) {
        Ok(id) => id,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let join = |rank: usize, driver: Arc<dyn Driver>| {
        let comm = driver.nccl().unwrap().join(&id, rank, 2).unwrap();
        let (stream, after) = (driver.stream().unwrap(), driver.stream().unwrap());
        let at = bytes(&*driver, stream, &[rank as u8; 4]);
        let all =
            |dtype| Exchange::AllReduce { from: at, to: at, count: 4, dtype, reduce: meshwork_core::ReduceOp::Sum };
        driver.queue(stream, Work::Exchange { on: comm, exchange: all(meshwork_core::DType::U8) }).unwrap();
        // Another stream that waits for the event has the sum.
        driver.wait(after, driver.record(stream).unwrap()).unwrap();
        assert_eq!(read(&*driver, after, at, 4), [1; 4]);
        if rank == 0 {
            driver.queue(stream, Work::Exchange { on: comm, exchange: all(meshwork_core::DType::U8) }).unwrap();
            driver.nccl().unwrap().abort(comm).unwrap();
            driver.finish(driver.record(stream).unwrap()).unwrap();
        } else {
            driver.nccl().unwrap().abort(comm).unwrap();
        }
        driver.free(at).unwrap();
    };
    thread::scope(|scope| {
        for (rank, driver) in drivers.iter().cloned().enumerate() {
            scope.spawn(move || join(rank, driver));
        }
    });
}

/// Waits for a moment, and then ends a communicator.
#[derive(Debug)]
struct Hasty {
    driver: Arc<dyn Driver>,
    comm: NcclComm,
}

impl Watch for Hasty {
    fn attend(&self, done: &mut dyn FnMut() -> Result<bool, DriverError>) -> Result<(), DriverError> {
        for _ in 0..100 {
            if done()? {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(1));
        }
        self.driver.nccl()?.abort(self.comm)?;
        Err(DriverError::Comm { call: "attend", why: "nobody comes".to_owned() })
    }

    fn reason(&self, error: DriverError) -> DriverError {
        error
    }
}

/// All waits of a host go by its watch, also those of NCCL's own calls.
#[test]
fn a_watch_ends_a_wait_for_a_rank_that_does_not_come() {
    let Some(drivers) = crate::apart(Order::Seeded(0), 2) else { return };
    let id = match drivers[0].nccl().and_then(|nccl| nccl.unique_id()) {
        Ok(id) => id,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let comms: Vec<NcclComm> = thread::scope(|scope| {
        let join = |(rank, driver): (usize, &Arc<dyn Driver>)| {
            let (driver, id) = (driver.clone(), id);
            scope.spawn(move || driver.nccl().unwrap().join(&id, rank, 2).unwrap())
        };
        drivers.iter().enumerate().map(join).collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let (driver, comm) = (drivers[0].clone(), comms[0]);
    let nccl = driver.nccl().unwrap();
    nccl.health(comm).unwrap();
    let watch: Arc<dyn Watch> = Arc::new(Hasty { driver: driver.clone(), comm });
    driver.watch(Arc::downgrade(&watch));
    let stream = driver.stream().unwrap();
    let at = bytes(&*driver, stream, &[7; 4]);
    assert_eq!(read(&*driver, stream, at, 4), [7; 4], "what waits for nobody is done as before");
    let told = |error: DriverError| assert_eq!(error.to_string(), "attend: nobody comes");
    let alone = Exchange::Broadcast { at, bytes: 4, root: 0 };
    driver.queue(stream, Work::Exchange { on: comm, exchange: alone }).unwrap();
    told(driver.finish(driver.record(stream).unwrap()).unwrap_err());
    let gone = nccl.health(comm).unwrap_err();
    assert!(matches!(gone, DriverError::Unknown { .. }), "{gone}");
    assert_eq!(read(&*driver, stream, at, 4), [7; 4]);
    driver.free(at).unwrap();
    // A communicator of which the other rank is never made.
    told(nccl.join(&nccl.unique_id().unwrap(), 0, 2).unwrap_err());
    drivers[1].nccl().unwrap().abort(comms[1]).unwrap();
}
