//! What can run beside what: a log of streams and events, whose order is worked out. Communication and copies are
//! queued so that computation goes on beside them; the emulator runs the same steps in random orders, so that nothing
//! that needs an order lacks it.

use crate::driver;
use crate::train::{batch, small};
use meshwork_core::{Buffer, DType, Mesh, Rank, World};
use meshwork_cuda::device::Products;
use meshwork_cuda::driver::{
    Address, Argument, DriverError, Event, Graph, Priority, Properties, Reach, Remote, Result, Stream, Work,
};
use meshwork_cuda::{CudaDevice, Driver, Order};
use meshwork_engine::offload::{Folder, Offload};
use meshwork_engine::{Plan, TrainError, Trainer, Zero, ZeroStage};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_nn::Model;
use meshwork_tensor::Device;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId, current};

/// For each stream, how many of its pieces of work are over.
type Clock = Vec<usize>;

/// A piece of work, with its number in its stream and what is over before it begins.
#[derive(Clone, Debug)]
struct Noted {
    what: &'static str,
    stream: Stream,
    number: usize,
    after: Clock,
}

/// Keeps, of each piece of work, what must be over before it: what its stream had before, what that waited for, and
/// what the thread that queued it had waited for.
#[derive(Debug, Default)]
struct Log {
    work: Vec<Noted>,
    /// Of each stream, and who made it.
    streams: Vec<(Clock, ThreadId)>,
    events: HashMap<Event, Clock>,
    /// What each thread of the host has waited for.
    host: HashMap<ThreadId, Clock>,
}

fn later(clock: &mut Clock, other: &[usize]) {
    clock.resize(clock.len().max(other.len()), 0);
    clock.iter_mut().zip(other).for_each(|(own, &other)| *own = (*own).max(other));
}

impl Log {
    fn queue(&mut self, stream: Stream, what: &'static str) {
        let Self { work, streams, host, .. } = self;
        let clock = &mut streams[stream.0].0;
        host.get(&current().id()).into_iter().for_each(|host| later(clock, host));
        let number = clock[stream.0] + 1;
        work.push(Noted { what, stream, number, after: clock.clone() });
        clock[stream.0] = number;
    }

    fn host_waits(&mut self, clock: &[usize]) {
        later(self.host.entry(current().id()).or_default(), clock);
    }
}

impl Noted {
    /// Whether no wait orders the two.
    fn beside(&self, other: &Self) -> bool {
        let before = |a: &Self, b: &Self| b.after.get(a.stream.0).is_some_and(|&over| over >= a.number);
        !before(self, other) && !before(other, self)
    }
}

#[derive(Debug)]
struct Logging {
    inner: Arc<dyn Driver>,
    log: Mutex<Log>,
}

impl Logging {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Driver for Logging {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn properties(&self) -> &Properties {
        self.inner.properties()
    }

    fn stream_with(&self, priority: Priority) -> Result<Stream> {
        let mut log = self.log();
        let stream = self.inner.stream_with(priority)?;
        assert_eq!(stream.0, log.streams.len());
        log.streams.push((vec![0; stream.0 + 1], current().id()));
        Ok(stream)
    }

    fn alloc(&self, bytes: usize) -> Result<Address> {
        self.inner.alloc(bytes)
    }

    fn free_all(&self, all: &[Address]) -> Result<()> {
        let mut log = self.log();
        let clocks: Vec<Clock> = log.streams.iter().map(|(clock, _)| clock.clone()).collect();
        clocks.iter().for_each(|clock| log.host_waits(clock));
        self.inner.free_all(all)
    }

    fn alloc_host(&self, bytes: usize) -> Result<Address> {
        self.inner.alloc_host(bytes)
    }

    fn free_host(&self, at: Address) -> Result<()> {
        self.inner.free_host(at)
    }

    fn queue(&self, stream: Stream, work: Work) -> Result<()> {
        if work.is_launch() {
            self.log().queue(stream, work.name());
        }
        self.inner.queue(stream, work)
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let mut log = self.log();
        let event = self.inner.record(stream)?;
        let clock = log.streams[stream.0].0.clone();
        log.events.insert(event, clock);
        Ok(event)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let mut log = self.log();
        let of = log.events[&event].clone();
        later(&mut log.streams[stream.0].0, &of);
        self.inner.wait(stream, event)
    }

    // All ranks share this one device.
    fn reach(&self, _: &dyn Driver) -> Result<Reach> {
        Ok(Reach::Direct)
    }

    fn wait_for(&self, stream: Stream, _: &dyn Driver, event: Event) -> Result<()> {
        self.wait(stream, event)
    }

    fn copy_between(&self, stream: Stream, from: Remote<'_>, to: Remote<'_>, bytes: usize) -> Result<()> {
        self.copy(stream, from.at, to.at, bytes)
    }

    fn finish(&self, event: Event) -> Result<()> {
        let mut log = self.log();
        let of = log.events[&event].clone();
        log.host_waits(&of);
        self.inner.finish(event)
    }

    fn write(&self, stream: Stream, to: Address, bytes: &[u8]) -> Result<()> {
        self.log().queue(stream, "write");
        self.inner.write(stream, to, bytes)
    }

    fn read_all(&self, stream: Stream, places: &mut [(Address, &mut [u8])]) -> Result<()> {
        {
            let mut log = self.log();
            log.queue(stream, "read");
            let of = log.streams[stream.0].0.clone();
            log.host_waits(&of);
        }
        self.inner.read_all(stream, places)
    }

    fn capture(&self, _: Stream, _: &[Work]) -> Result<Option<Graph>> {
        Ok(None)
    }

    fn replay(&self, _: Stream, graph: Graph, _: &[(usize, &[Argument])]) -> Result<()> {
        Err(DriverError::Unknown { call: "replay", what: format!("{graph:?}") })
    }
}

/// The streams of a device, in the order in which it makes them.
const COMPUTE: usize = 0;
const COPIES: usize = 1;
const COLLECTIVES: usize = 2;

/// The work of the second step of a plan, and for each rank its streams for computation, copies, collectives and
/// offload.
struct Step {
    work: Vec<Noted>,
    streams: Vec<[Stream; 4]>,
}

/// None without g++.
fn second_step(config: Gpt2Config, plan: &Plan) -> Option<Step> {
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(config));
    let driver = Arc::new(Logging { inner: driver(Order::Seeded(5))?, log: Mutex::default() });
    let told = World::threads(&plan.mesh).run(|world| {
        let device = Arc::new(CudaDevice::new(driver.clone(), Products::OfTheCpu)?);
        let mut trainer =
            Trainer::new(model.clone(), plan, Arc::new(Rank::new(&plan.mesh, world.communicator().clone())?), device)?;
        let mut begun = 0;
        for step in 0..2 {
            begun = driver.log().work.len();
            trainer.step(&batch(&config, plan.global_batch_size, step).part(trainer.samples())?)?;
        }
        Ok::<_, TrainError>((begun, current().id()))
    });
    let ranks = told.unwrap_or_else(|error| panic!("{}: {error}", plan.mesh));
    let log = driver.log();
    let made_by = |rank: ThreadId| {
        let own: Vec<Stream> = (0..log.streams.len()).filter(|&at| log.streams[at].1 == rank).map(Stream).collect();
        own.try_into().unwrap_or_else(|own| panic!("the streams of a device are four, and not {own:?}"))
    };
    let begun = ranks.iter().map(|(begun, _)| *begun).min().unwrap_or(0);
    Some(Step { work: log.work[begun..].to_vec(), streams: ranks.iter().map(|(_, rank)| made_by(*rank)).collect() })
}

impl Step {
    /// Whether this is work of that name in a rank's stream.
    fn is(&self, noted: &Noted, (rank, stream, what): (usize, usize, &str)) -> bool {
        noted.stream == self.streams[rank][stream] && noted.what.contains(what)
    }

    fn of<'a>(&'a self, rank: usize, stream: usize, what: &'a str) -> impl Iterator<Item = &'a Noted> {
        self.work.iter().filter(move |noted| self.is(noted, (rank, stream, what)))
    }

    /// For each piece of such work in a stream, how many kernels of such a name can run beside it in the stream for
    /// computation of `beside`.
    fn beside(&self, (rank, stream, what): (usize, usize, &str), beside: usize, kernels: &str) -> Vec<usize> {
        let of = |noted: &Noted| self.of(beside, COMPUTE, kernels).filter(|kernel| kernel.beside(noted)).count();
        self.of(rank, stream, what).map(of).collect()
    }

    /// How many pieces of such work are queued before the last piece of other work.
    fn queued_before_the_last(&self, work: (usize, usize, &str), last: (usize, usize, &str)) -> usize {
        let end = self.work.iter().rposition(|noted| self.is(noted, last)).unwrap_or(0);
        self.work[..end].iter().filter(|noted| self.is(noted, work)).count()
    }
}

fn plan(mesh: &str, micros: usize) -> Plan {
    let mesh: Mesh = mesh.parse().unwrap();
    Plan { mesh, global_batch_size: 4, num_microbatches: Some(micros), ..Plan::default() }
}

fn config() -> Gpt2Config {
    Gpt2Config {
        vocab_size: 62,
        num_heads: 4,
        ffn_hidden_size: 48,
        seq_len: 12,
        num_layers: 4,
        dropout: 0.0,
        ..small()
    }
}

/// Each bucket but the last ones is reduced beside the rest of backward, on both ranks. Without ZeRO a bucket has up to
/// 2^18 elements, and the head's table is one alone, whose gradient is final first; with ZeRO there are many.
#[test]
fn buckets_are_reduced_beside_backward() {
    for (stage, vocab_size, [buckets, most]) in [(ZeroStage::Off, 11_000, [1, 20]), (ZeroStage::Gradients, 62, [30, 4])]
    {
        let config = Gpt2Config { vocab_size, tie_embeddings: false, ..config() };
        let plan = Plan { zero: Zero { stage, group: None }, ..plan("dp=2", 2) };
        let Some(step) = second_step(config, &plan) else { return };
        for rank in 0..2 {
            let found = step.beside((rank, COLLECTIVES, "reduce_sum_f32"), rank, "backward");
            eprintln!("dp=2, {stage:?}, rank {rank}: kernels of backward beside each reduction: {found:?}");
            let beside = found.iter().filter(|&&kernels| kernels > 0).count();
            assert!(
                beside >= buckets && found.iter().any(|&kernels| kernels >= most),
                "{stage:?}, rank {rank}: {found:?}"
            );
        }
    }
}

/// A stage sends its activations while it computes the next micro-batch.
#[test]
fn messages_travel_beside_computation() {
    let Some(step) = second_step(config(), &plan("pp=2", 4)) else { return };
    for (to, what) in [(1, "forward"), (0, "backward")] {
        // The stream for collectives of the receiver copies; the sender goes on.
        let found = step.beside((to, COLLECTIVES, "copy"), 1 - to, what);
        eprintln!("pp=2: kernels of {what} of rank {} beside each message to rank {to}: {found:?}", 1 - to);
        assert!(found.iter().filter(|&&kernels| kernels > 0).count() >= 3, "{what}: {found:?}");
    }
}

/// A copy that somebody else waits for has what was there when it was asked for, and one that comes later is there for
/// what is queued behind it; kernels that are queued meanwhile can run beside both.
#[test]
fn copies_that_are_waited_for_later_run_beside_computation() {
    for seed in 0..10 {
        let Some(inner) = driver(Order::Seeded(seed)) else { return };
        let driver = Arc::new(Logging { inner, log: Mutex::default() });
        let device = CudaDevice::new(driver.clone(), Products::OfTheCpu).unwrap();
        let host = |values: [f32; 3]| Buffer::from_slice(&values);
        let (x, y) = (device.upload(&host([1.0, 2.0, 3.0])).unwrap(), device.upload(&host([1.0; 3])).unwrap());
        let down = device.download_later(&x).unwrap();
        let up = device.upload_later(device.alloc(DType::F32, 3).unwrap()).unwrap();
        let begun = driver.log().work.len();
        let doubled = (0..5).fold(y, |y, _| device.pointwise().unwrap().add(&y, &y).unwrap());
        let copy = thread::scope(|scope| scope.spawn(|| down.wait()).join()).unwrap().unwrap();
        let z = up.copy(&device, &host([7.0, 8.0, 9.0])).unwrap();
        let sum = device.pointwise().unwrap().add(&z, &doubled).unwrap();
        assert_eq!(copy.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(device.download(&sum).unwrap().as_slice::<f32>().unwrap(), [39.0, 40.0, 41.0]);
        let log = driver.log();
        let work = &log.work[begun..];
        let names: Vec<&str> = work.iter().map(|noted| noted.what).collect();
        assert_eq!(names[..8], ["add", "add", "add", "add", "add", "read", "write", "add"]);
        for copy in &work[5..7] {
            assert!(work[..5].iter().all(|kernel| kernel.beside(copy)), "{copy:?}");
        }
        assert!(!work[6].beside(&work[7]), "what is queued behind a copy has it");
    }
}

/// What is offloaded comes back beside computation. When a rank waits for what leaves is not in the log; that it may
/// leave beside computation, the test above shows.
#[test]
fn what_is_offloaded_comes_back_beside_computation() {
    for mesh in ["dp=2", "pp=2"] {
        let config = Gpt2Config { hidden_size: 32, ..config() };
        let folder = tempfile::tempdir().unwrap();
        let to = Arc::new(Folder(folder.path().to_owned()));
        let offload = Offload { optimizer: true, gradients: true, activations: true, samples: false, to: Some(to) };
        let plan = Plan { offload: Some(offload), ..plan(mesh, 2) };
        let Some(step) = second_step(config, &plan) else { return };
        for rank in 0..2 {
            let found = step.beside((rank, COPIES, "write"), rank, "");
            // Activations are queued before the last kernel of backward. Gradients and states come behind it, page by
            // page: beside a page is the update of the one before, which is few launches and may be done by then.
            let activations = step.queued_before_the_last((rank, COPIES, "write"), (rank, COMPUTE, "backward"));
            let beside = found[..activations].iter().filter(|&&kernels| kernels > 0).count();
            eprintln!(
                "{mesh}, rank {rank}: of {activations} uploads of activations {beside} have kernels beside them: {found:?}"
            );
            assert!(activations >= 10 && 10 * beside >= 9 * activations, "{mesh}, rank {rank}: {found:?}");
        }
    }
}
