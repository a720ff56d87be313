//! The store of a rank. Reads and writes run in the order of the rank's calls: on a thread, or, if the store is host
//! memory of the device, as copies that the device queues.
//!
//! More than 400 lines: the two ways share the answers that a rank waits for, and their errors.

use super::space::{Region, Space};
use super::{Offload, OffloadError, Store, Traffic};
use crate::prelude::*;
use meshwork_tensor::pinned::Pinned;
use meshwork_tensor::{Download, Upload};
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often a rank that waits for its store tells the others that it is alive.
const ALIVE: Duration = Duration::from_millis(200);

/// How long one answer may take before the store counts as broken.
const PATIENCE: Duration = Duration::from_secs(600);

/// Who reads and writes.
#[derive(Debug)]
enum Worker {
    /// Nobody: without values, bytes are counted alone.
    Nobody,
    /// A thread, which has the store.
    Thread(Sender<Job>, JoinHandle<()>),
    /// The device, in its own host memory.
    Device,
}

/// The store of a rank.
#[derive(Debug)]
pub struct Disk {
    name: String,
    worker: Worker,
    space: Rc<RefCell<Space>>,
    moved: Cell<Traffic>,
    reserved: Cell<u64>,
    /// How long the rank has waited for the store.
    waited: Cell<Duration>,
    patience: Duration,
    /// Whether the rank no longer waits for its thread.
    given_up: Cell<bool>,
    rank: Arc<Rank>,
    device: Arc<dyn Device>,
}

#[derive(Debug)]
struct Job {
    work: Work,
    done: Sender<io::Result<Buffer>>,
}

#[derive(Debug)]
enum Work {
    Reserve(u64),
    Write { at: u64, from: Download },
    Read { at: u64, into: Buffer },
}

/// How a read or write ends.
#[derive(Debug)]
enum Coming {
    Nothing,
    /// With an answer of the thread.
    Answer(Receiver<io::Result<Buffer>>),
    /// A copy of the device, for which the device waits, and not the host.
    Copy(u64),
}

/// A read or write under way. Dropping it waits, because its memory is freed by the rank, at a fixed place of its
/// program.
#[derive(Debug)]
struct Answer {
    from: Coming,
    what: &'static str,
    at: u64,
    bytes: u64,
    disk: Rc<Disk>,
}

impl Answer {
    fn wait(mut self) -> Result<Buffer> {
        let (what, at, bytes) = (self.what, self.at, self.bytes);
        let from = match std::mem::replace(&mut self.from, Coming::Nothing) {
            Coming::Nothing => return Ok(Buffer::empty()),
            Coming::Copy(copy) => return self.disk.pinned()?.wait(copy).map(|()| Buffer::empty()).map_err(Into::into),
            Coming::Answer(from) => from,
        };
        let (disk, since) = (&self.disk, Instant::now());
        let source = loop {
            match from.recv_timeout(ALIVE.min(disk.patience)) {
                Ok(Ok(buffer)) => {
                    disk.waited.set(disk.waited.get() + since.elapsed());
                    return Ok(buffer);
                }
                Ok(Err(source)) => break source,
                Err(RecvTimeoutError::Timeout) if since.elapsed() < disk.patience => disk.rank.heartbeat(),
                Err(RecvTimeoutError::Timeout) => {
                    disk.given_up.set(true);
                    break io::Error::new(io::ErrorKind::TimedOut, format!("no answer for {:?}", disk.patience));
                }
                Err(RecvTimeoutError::Disconnected) => break io::Error::other("its thread has ended"),
            }
        };
        Err(OffloadError::Io { store: disk.name.clone(), what, bytes, at, source }.into())
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.from, Coming::Nothing) {
            Coming::Answer(from) if !self.disk.given_up.get() => _ = from.recv(),
            // A device that failed says so in the rank's next call.
            Coming::Copy(copy) => _ = self.disk.pinned().map(|pinned| pinned.wait(copy)),
            _ => {}
        }
    }
}

/// A write under way. Its memory is alive until it is waited for.
#[derive(Debug)]
pub struct Writing {
    answer: Answer,
    held: Buffer,
}

impl Writing {
    /// Waits until it is done, and gives the memory back.
    pub fn wait(self) -> Result<Buffer> {
        self.answer.wait()?;
        Ok(self.held)
    }
}

/// A read under way, into memory that is alive from its beginning.
#[derive(Debug)]
pub struct Reading {
    answer: Answer,
    /// Where the values go, if the host cannot write there.
    into: Option<Destination>,
}

/// Memory of a device.
#[derive(Debug)]
enum Destination {
    /// Memory to which the rank copies the bytes that the thread has read.
    Upload(Upload),
    /// Memory to which the device copies by itself, or memory without values.
    Memory(Buffer),
}

impl Reading {
    /// Waits for the values.
    pub fn wait(self) -> Result<Buffer> {
        let disk = self.answer.disk.clone();
        let read = self.answer.wait()?;
        match self.into {
            None => Ok(read),
            Some(Destination::Upload(upload)) => Ok(upload.copy(&*disk.device, &read)?),
            Some(Destination::Memory(memory)) => Ok(memory),
        }
    }
}

impl Disk {
    /// Opens the store of a rank.
    pub fn open(offload: &Offload, rank: &Arc<Rank>, device: &Arc<dyn Device>) -> Result<Rc<Self>> {
        Self::with_patience(offload, rank, device, PATIENCE)
    }

    fn with_patience(
        offload: &Offload,
        rank: &Arc<Rank>,
        device: &Arc<dyn Device>,
        patience: Duration,
    ) -> Result<Rc<Self>> {
        let mut disk = Self {
            name: String::new(),
            worker: Worker::Nobody,
            space: Rc::default(),
            moved: Cell::default(),
            reserved: Cell::new(0),
            waited: Cell::default(),
            patience,
            given_up: Cell::new(false),
            rank: rank.clone(),
            device: device.clone(),
        };
        if !device.has_values() {
            return Ok(Rc::new(disk));
        }
        if let Some(to) = &offload.to {
            let store = to.open(rank.world_rank())?;
            disk.name = store.name();
            let (jobs, of_thread) = mpsc::channel();
            let name = format!("offload {}", rank.world_rank());
            let started = thread::Builder::new().name(name).spawn(move || serve(store, of_thread));
            let refuse = |source| OffloadError::Io {
                store: disk.name.clone(),
                what: "starting a thread for",
                bytes: 0,
                at: 0,
                source,
            };
            disk.worker = Worker::Thread(jobs, started.map_err(refuse)?);
        } else {
            disk.name = format!("host memory of {}", device.name());
            disk.worker = Worker::Device;
            disk.pinned()?;
        }
        Ok(Rc::new(disk))
    }

    /// Host memory of the device.
    fn pinned(&self) -> Result<&dyn Pinned> {
        let none = || OffloadError::NoHostMemory { device: self.device.name().to_owned() };
        Ok(self.device.pinned().ok_or_else(none)?)
    }

    /// The device whose memory it takes.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Bytes moved so far, and the most room taken.
    pub fn traffic(&self) -> Traffic {
        Traffic { room: self.space.borrow().most(), ..self.moved.get() }
    }

    /// How long the rank has stood still until its store was done.
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// Makes room for `bytes` bytes in all.
    pub fn reserve(self: &Rc<Self>, bytes: u64) -> Result<()> {
        if bytes <= self.reserved.get() {
            return Ok(());
        }
        self.reserved.set(bytes);
        if let Worker::Device = self.worker {
            let full = |error| OffloadError::Full { store: self.name.clone(), bytes, source: io::Error::other(error) };
            return Ok(self.pinned()?.reserve(bytes).map_err(full)?);
        }
        match self.ask("reserving", 0, bytes, || Ok(Work::Reserve(bytes)))?.wait() {
            Ok(_) => Ok(()),
            Err(TrainError::Offload(error)) => match *error {
                OffloadError::Io { store, source, .. } => Err(OffloadError::Full { store, bytes, source }.into()),
                other => Err(other.into()),
            },
            Err(other) => Err(other),
        }
    }

    /// A region of so many bytes. A region of bytes that were never used is zero; the contents of others are
    /// unspecified.
    pub fn region(self: &Rc<Self>, bytes: usize) -> Rc<Region> {
        Rc::new(Region::new(&self.space, bytes as u64))
    }

    /// Writes memory of the device to a region, `from` bytes behind its beginning.
    pub fn write(self: &Rc<Self>, region: &Region, from: u64, held: Buffer) -> Result<Writing> {
        // More than was predicted, if experts have uneven loads.
        self.reserve(region.end())?;
        let (at, bytes) = (region.at() + from, held.bytes() as u64);
        let moved = self.moved.get();
        self.moved.set(Traffic { written: moved.written + bytes, ..moved });
        let answer = match self.worker {
            Worker::Device => self.copying("writing", at, bytes, self.pinned()?.save(&held, at)?),
            _ => self.ask("writing", at, bytes, || Ok(Work::Write { at, from: self.device.download_later(&held)? }))?,
        };
        Ok(Writing { answer, held })
    }

    /// Reads into new memory of the device.
    pub fn read(self: &Rc<Self>, region: &Region, from: u64, dtype: DType, count: usize) -> Result<Reading> {
        let mut device_memory = self.device.alloc(dtype, count)?;
        let (at, bytes) = (region.at() + from, device_memory.bytes() as u64);
        let moved = self.moved.get();
        self.moved.set(Traffic { read: moved.read + bytes, ..moved });
        if let Worker::Device = self.worker {
            let copy = self.pinned()?.load(at, &mut device_memory)?;
            let into = Some(Destination::Memory(device_memory));
            return Ok(Reading { answer: self.copying("reading", at, bytes, copy), into });
        }
        let (into, given) = match (&self.worker, device_memory.is_host()) {
            (_, true) => (device_memory, None),
            (Worker::Thread(..), false) => {
                (Buffer::zeros(dtype, count), Some(Destination::Upload(self.device.upload_later(device_memory)?)))
            }
            (_, false) => (Buffer::empty(), Some(Destination::Memory(device_memory))),
        };
        Ok(Reading { answer: self.ask("reading", at, bytes, || Ok(Work::Read { at, into }))?, into: given })
    }

    /// Reads into host memory that no device counts.
    pub fn read_now(self: &Rc<Self>, region: &Region, from: u64, dtype: DType, count: usize) -> Result<Buffer> {
        let mut into = Buffer::zeros(dtype, count);
        let (at, bytes) = (region.at() + from, into.bytes() as u64);
        match self.worker {
            Worker::Nobody => Ok(into),
            Worker::Device => {
                self.pinned()?.read(at, &mut into)?;
                Ok(into)
            }
            Worker::Thread(..) => self.ask("reading", at, bytes, || Ok(Work::Read { at, into }))?.wait(),
        }
    }

    /// Writes host memory that no device counts.
    pub fn write_now(self: &Rc<Self>, region: &Region, from: u64, values: Buffer) -> Result<()> {
        self.reserve(region.end())?;
        let (at, bytes) = (region.at() + from, values.bytes() as u64);
        if let Worker::Device = self.worker {
            return Ok(self.pinned()?.write(&values, at)?);
        }
        self.ask("writing", at, bytes, || Ok(Work::Write { at, from: Download::new(|| Ok(values)) }))?.wait().map(drop)
    }

    /// The end of a copy of the device.
    fn copying(self: &Rc<Self>, what: &'static str, at: u64, bytes: u64, copy: u64) -> Answer {
        Answer { from: Coming::Copy(copy), what, at, bytes, disk: self.clone() }
    }

    /// Gives the thread work, if there is one.
    fn ask(
        self: &Rc<Self>,
        what: &'static str,
        at: u64,
        bytes: u64,
        work: impl FnOnce() -> Result<Work, Error>,
    ) -> Result<Answer> {
        let answer = |from| Answer { from, what, at, bytes, disk: self.clone() };
        let Worker::Thread(jobs, _) = &self.worker else { return Ok(answer(Coming::Nothing)) };
        let (done, from) = mpsc::channel();
        // A thread that is gone drops the sender, and waiting says so.
        _ = jobs.send(Job { work: work()?, done });
        Ok(answer(Coming::Answer(from)))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Worker::Thread(jobs, thread) = std::mem::replace(&mut self.worker, Worker::Nobody) {
            drop(jobs);
            if !self.given_up.get() {
                _ = thread.join(); // a rank that waited for the thread has reported its panic
            }
        }
    }
}

fn serve(mut store: Box<dyn Store>, jobs: Receiver<Job>) {
    for Job { work, done } in jobs {
        let result = match work {
            Work::Reserve(bytes) => store.reserve(bytes).map(|()| Buffer::empty()),
            Work::Write { at, from } => from
                .wait()
                .map_err(io::Error::other)
                .and_then(|from| write(&mut *store, at, &from))
                .map(|()| Buffer::empty()),
            Work::Read { at, mut into } => read(&mut *store, at, &mut into).map(|()| into),
        };
        _ = done.send(result); // nobody waits any more: the rank has failed
    }
}

fn write(store: &mut dyn Store, at: u64, from: &Buffer) -> io::Result<()> {
    store.write(at, from.as_bytes().map_err(io::Error::other)?)
}

fn read(store: &mut dyn Store, at: u64, into: &mut Buffer) -> io::Result<()> {
    store.read(at, into.as_bytes_mut().map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests {
    use super::super::Backing;
    use super::*;
    use meshwork_core::Mesh;
    use meshwork_cpu::Cpu;
    use std::sync::Mutex;

    /// A store that answers once the other end is dropped.
    #[derive(Debug)]
    struct Stuck(Arc<Mutex<()>>);

    impl Backing for Stuck {
        fn open(&self, _rank: usize) -> Result<Box<dyn Store>, OffloadError> {
            Ok(Box::new(Self(self.0.clone())))
        }
    }

    impl Store for Stuck {
        fn name(&self) -> String {
            "a disk that hangs".to_owned()
        }

        fn reserve(&mut self, _bytes: u64) -> io::Result<()> {
            Ok(())
        }

        fn read(&mut self, _at: u64, _into: &mut [u8]) -> io::Result<()> {
            drop(self.0.lock());
            Ok(())
        }

        fn write(&mut self, _at: u64, _bytes: &[u8]) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_store_that_never_answers_ends_with_an_error() {
        let lock = Arc::new(Mutex::new(()));
        let hangs = lock.lock().unwrap();
        let offload = Offload {
            optimizer: true,
            gradients: false,
            activations: false,
            samples: false,
            to: Some(Arc::new(Stuck(lock.clone()))),
        };
        let rank = Arc::new(Rank::recording(&Mesh::default(), 0).unwrap());
        let disk = Disk::with_patience(&offload, &rank, &Cpu::device(), Duration::from_millis(5)).unwrap();
        let region = disk.region(64);
        let error = disk.read(&region, 0, DType::F32, 16).unwrap().wait().unwrap_err().to_string();
        assert_eq!(
            error,
            "offload to a disk that hangs: reading 64 bytes at 0: no answer for 5ms; start again from the last checkpoint"
        );
        drop(disk); // does not wait for the thread
        drop(hangs);
    }
}
