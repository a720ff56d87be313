//! Writes checkpoints in the background, and commits them atomically.
//!
//! ```text
//! training thread   snapshot ─┐ step, step, step ...            ┌─ outcome
//! writer's thread             └ write, sync ─ all done? ─ commit ┘
//! ```
//! Each rank writes one file. When all files are on disk, the leader adds the index and renames the folder. Older
//! checkpoints are not touched before that, unless the disk is full: then older ones are removed first, but never the
//! newest intact one.
//!
//! More than 400 lines: one protocol between two threads of each rank, with all its outcomes.

use crate::checksum::Summing;
use crate::exchange::{Exchange, ExchangeError};
use crate::index::{self, File as IndexFile, Index, Written};
use crate::piece_file::{file_name, header};
use crate::room::{self, free_bytes, is_full};
use crate::{Checksum, Lock, SavePlan, Snapshot, SnapshotError, folder};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// Bytes per write, added to the checksum just before.
const BLOCK: usize = 256 << 10;

/// Writes one rank's part of each checkpoint, on a separate thread. At most one checkpoint is in progress.
#[derive(Debug)]
pub struct Writer {
    plan: Arc<SavePlan>,
    rank: usize,
    /// The memory of the last snapshot, to be reused.
    memory: Vec<u8>,
    /// Whether a save is in progress, or its outcome was not returned yet.
    saving: bool,
    /// The newest checkpoint that is known to be intact.
    whole: Option<u64>,
    /// The checkpoint that stays.
    stays: Option<u64>,
    jobs: Option<SyncSender<Job>>,
    results: Receiver<(Vec<u8>, Result<Saved, SaveError>)>,
    thread: Option<JoinHandle<()>>,
}

/// A complete checkpoint. The same on every rank, except `bytes` and `seconds`: the leader tells the others of the
/// rest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes that this rank wrote.
    pub bytes: u64,
    /// Seconds from the snapshot until it was complete.
    pub seconds: f64,
    /// Older checkpoints that were removed.
    pub removed: Vec<PathBuf>,
    /// Older checkpoints that were removed before this one was written, because the disk was full.
    pub made_room: Vec<PathBuf>,
    /// The reason why older checkpoints could not be removed.
    pub not_removed: Option<String>,
}

/// A failed save. Earlier checkpoints are unchanged, and the next save may succeed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum SaveError {
    /// A rank could not write. Every rank is told.
    #[error("no checkpoint of step {step}: rank {rank} failed: {problem}")]
    Write { step: u64, rank: usize, problem: String },
    /// A rank had no disk space, and no older checkpoint but the newest intact one was left to remove.
    #[error(
        "no checkpoint of step {step}: rank {rank} failed: {problem}; it takes {bytes} bytes, and the newest whole checkpoint stays: make \
         room, or use a larger disk"
    )]
    Full { step: u64, rank: usize, problem: String, bytes: u64 },
    /// The exchange between the ranks failed.
    #[error("no checkpoint of step {step}: {source}")]
    Exchange { step: u64, source: ExchangeError },
    /// The writer's thread ended, or could not be started.
    #[error("the thread that writes checkpoints has ended, or could not be started")]
    Ended,
}

debug_as_display!(SaveError);

struct Job {
    step: u64,
    metadata: Value,
    snapshot: Result<Vec<u8>, SnapshotError>,
    whole: Option<u64>,
    stays: Option<u64>,
    began: Instant,
}

/// The duties of the leader alone.
struct Leader {
    /// Held as long as the run may write.
    _lock: Lock,
    keep: usize,
}

/// The failure of a rank.
#[derive(Serialize, Deserialize)]
struct Failure {
    /// Whether the disk was full.
    full: bool,
    problem: String,
}

impl From<String> for Failure {
    fn from(problem: String) -> Self {
        Self { full: false, problem }
    }
}

impl Writer {
    /// The writer of rank 0, which commits checkpoints and keeps the newest `keep`, at least one.
    pub fn lead(lock: Lock, keep: usize, plan: Arc<SavePlan>, exchange: impl Exchange) -> Self {
        let dir = lock.dir().to_path_buf();
        Self::start(dir, 0, Some(Leader { _lock: lock, keep }), plan, exchange)
    }

    /// The writer of another rank. Rank 0 holds the lock of the folder.
    pub fn follow(dir: &Path, rank: usize, plan: Arc<SavePlan>, exchange: impl Exchange) -> Self {
        Self::start(dir.to_path_buf(), rank, None, plan, exchange)
    }

    fn start(
        dir: PathBuf,
        rank: usize,
        leader: Option<Leader>,
        plan: Arc<SavePlan>,
        mut exchange: impl Exchange,
    ) -> Self {
        let (jobs, todo) = sync_channel::<Job>(1);
        let (done, results) = sync_channel(1);
        let task = Task { dir, rank, leader, plan: plan.clone() };
        // Without the thread, each save ends with an error, on this rank and on the ranks that wait for it.
        let work = move || {
            for job in todo {
                let result = task.save(&job, &mut exchange);
                if done.send((job.snapshot.unwrap_or_default(), result)).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name(format!("checkpoint {rank}")).spawn(work).ok();
        let (memory, saving, jobs) = (Vec::new(), false, Some(jobs));
        Self { plan, rank, memory, saving, whole: None, stays: None, jobs, results, thread }
    }

    /// Declares the checkpoint of a step intact, because the run resumes from it: if disk space is short, all others
    /// may be removed before the first checkpoint of this writer is complete.
    pub fn goes_on_from(&mut self, step: u64) {
        self.whole = Some(step);
    }

    /// Declares one checkpoint one that stays, however many newer ones there are: the best of a run. The one before it
    /// may go. All ranks do this before the same save.
    pub fn keeps(&mut self, step: Option<u64>) {
        self.stays = step;
    }

    /// The plan of the save.
    pub fn plan(&self) -> &Arc<SavePlan> {
        &self.plan
    }

    /// An empty snapshot to fill. Waits for the save in progress, if any, and returns its outcome. A run that saves
    /// faster than its disk can write is slowed down here, and never holds more than one snapshot.
    pub fn snapshot(&mut self) -> (Snapshot, Option<Result<Saved, SaveError>>) {
        let before = self.wait();
        (Snapshot::new(self.plan.clone(), self.rank, std::mem::take(&mut self.memory)), before)
    }

    /// Starts to save a snapshot, and returns. All ranks must save the same steps; the `metadata` of rank 0 is stored.
    /// If a snapshot lacks elements that its rank writes, the save of that step fails on all ranks.
    pub fn save(&mut self, step: u64, metadata: Value, snapshot: Snapshot) {
        let job = Job {
            step,
            metadata,
            snapshot: snapshot.into_data(),
            whole: self.whole,
            stays: self.stays,
            began: Instant::now(),
        };
        if let Some(jobs) = &self.jobs {
            // If the thread has ended, there is no result, and the caller gets that error.
            _ = jobs.send(job);
        }
        self.saving = true;
    }

    /// The outcome of the save in progress, if it is known. Does not wait.
    pub fn poll(&mut self) -> Option<Result<Saved, SaveError>> {
        match self.results.try_recv() {
            Err(TryRecvError::Empty) => None,
            received => self.saving.then(|| self.receive(received.ok())),
        }
    }

    /// Waits for the save in progress, if any, and returns its outcome.
    pub fn wait(&mut self) -> Option<Result<Saved, SaveError>> {
        self.saving.then(|| {
            let received = self.results.recv().ok();
            self.receive(received)
        })
    }

    fn receive(&mut self, received: Option<(Vec<u8>, Result<Saved, SaveError>)>) -> Result<Saved, SaveError> {
        self.saving = false;
        let (memory, result) = received.unwrap_or_else(|| (Vec::new(), Err(SaveError::Ended)));
        self.memory = memory;
        self.whole = result.as_ref().map(|saved| saved.step).ok().or(self.whole);
        result
    }
}

/// Waits for the save in progress.
impl Drop for Writer {
    fn drop(&mut self) {
        self.wait();
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

/// A rank's part, on the writer's thread.
struct Task {
    dir: PathBuf,
    rank: usize,
    leader: Option<Leader>,
    plan: Arc<SavePlan>,
}

impl Task {
    /// Saves. While the disk is full, removes an older checkpoint and tries again.
    fn save(&self, job: &Job, exchange: &mut impl Exchange) -> Result<Saved, SaveError> {
        let (step, mut made_room) = (job.step, Vec::new());
        if self.leader.is_some() {
            self.make_room(job, &mut made_room);
        }
        loop {
            // Until all ranks arrive, rank 0 may still be removing leftovers of a killed run, or older checkpoints.
            exchange.all_gather(Vec::new()).map_err(|source| SaveError::Exchange { step, source })?;
            let result = self.write_and_commit(job, &made_room, exchange);
            if self.leader.is_some() && matches!(result, Err(SaveError::Write { .. } | SaveError::Full { .. })) {
                // All ranks have reported, so none is still writing. Files that cannot be removed now are removed at
                // the next start.
                _ = fs::remove_dir_all(folder::partial(&self.dir, step));
            }
            if !matches!(result, Err(SaveError::Full { .. })) {
                return result;
            }
            let freed = self.leader.as_ref().and_then(|_| self.remove_one(job));
            let told = exchange.all_gather(vec![1; usize::from(freed.is_some())]);
            if told.map_err(|source| SaveError::Exchange { step, source })?.iter().all(Vec::is_empty) {
                return result;
            }
            made_room.extend(freed);
        }
    }

    /// Removes removable checkpoints until the new one fits, if the system reports free space.
    fn make_room(&self, job: &Job, removed: &mut Vec<PathBuf>) {
        let needed = self.plan.file_bytes(&job.metadata);
        while free_bytes(&self.dir).is_some_and(|free| free < needed) {
            if let Some(path) = self.remove_one(job) { removed.push(path) } else { return }
        }
    }

    /// Removes the next removable checkpoint, if there is one.
    fn remove_one(&self, job: &Job) -> Option<PathBuf> {
        let step = *room::spare(&self.dir, job.whole, job.stays).ok()?.first()?;
        folder::remove(&self.dir, step).ok()
    }

    fn write_and_commit(
        &self,
        job: &Job,
        made_room: &[PathBuf],
        exchange: &mut impl Exchange,
    ) -> Result<Saved, SaveError> {
        let step = job.step;
        let bytes = || self.plan.file_bytes(&job.metadata);
        let written = agree(step, bytes, &self.write(job), exchange)?;
        let committed = match &self.leader {
            None => Ok(None),
            Some(leader) => self.commit(job, leader, written, made_room).map(Some),
        };
        let committed = agree(step, bytes, &committed, exchange)?.into_iter().flatten().next();
        let Some(committed) = committed else {
            let problem = "no rank leads the others: the writer of rank 0 is made with Writer::lead".to_owned();
            return Err(SaveError::Write { step, rank: 0, problem });
        };
        let (bytes, seconds) = (self.plan.bytes(self.rank), job.began.elapsed().as_secs_f64());
        Ok(Saved { bytes, seconds, ..committed })
    }

    /// Writes this rank's file and syncs it to disk.
    fn write(&self, job: &Job) -> Result<Written, Failure> {
        let data = job.snapshot.as_ref().map_err(SnapshotError::to_string)?;
        let header = header(&self.plan, self.rank, job.step);
        let mut checksums = Vec::new();
        let partial = folder::partial(&self.dir, job.step);
        match fs::create_dir(&partial) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(told(&partial)(error)),
            _ => {}
        }
        let path = partial.join(file_name(self.rank));
        let mut write = || -> io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(&header)?;
            for piece in self.plan.pieces(self.rank) {
                let mut checksum = Summing::default();
                // In blocks that are still in the cache when they are written.
                for block in data[piece.bytes.start as usize..piece.bytes.end as usize].chunks(BLOCK) {
                    checksum.add(block);
                    file.write_all(block)?;
                }
                checksums.push(checksum.checksum());
            }
            file.sync_all()?;
            folder::sync(&partial)
        };
        write().map_err(told(&path))?;
        Ok(Written { header_bytes: header.len() as u64, header_checksum: Checksum::hash(&header), checksums })
    }

    /// Writes the index and renames the folder, which completes the checkpoint.
    fn commit(
        &self,
        job: &Job,
        leader: &Leader,
        written: Vec<Written>,
        made_room: &[PathBuf],
    ) -> Result<Saved, Failure> {
        let partial = folder::partial(&self.dir, job.step);
        let path = partial.join(index::FILE);
        let index = Index::new(&self.plan, job.step, job.metadata.clone(), written);
        for IndexFile { name, bytes, .. } in &index.files {
            let path = partial.join(name);
            let found = fs::metadata(&path).map_err(told(&path))?.len();
            if found != *bytes {
                return Err(format!("{}: has {found} bytes, and {bytes} were written", path.display()).into());
            }
        }
        let index = index.encode().map_err(|error| format!("{}: {error}", path.display()))?;
        let write = || -> io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(&index)?;
            file.sync_all()
        };
        write().map_err(told(&path))?;
        let path = folder::commit(&self.dir, job.step).map_err(told(&partial))?;
        let (removed, not_removed) = match folder::prune(&self.dir, job.step, leader.keep, job.stays) {
            Ok(removed) => (removed, None),
            Err(error) => (Vec::new(), Some(told(&self.dir)(error).problem)),
        };
        let made_room = made_room.to_vec();
        Ok(Saved { step: job.step, path, bytes: 0, seconds: 0.0, removed, made_room, not_removed })
    }
}

/// Converts a system error, adding the file.
fn told(path: &Path) -> impl Fn(io::Error) -> Failure + '_ {
    move |error| Failure { full: is_full(&error), problem: format!("{}: {error}", path.display()) }
}

/// The results of all ranks if all succeeded; else the first failure.
fn agree<T: Serialize + for<'de> Deserialize<'de>>(
    step: u64,
    bytes: impl Fn() -> u64,
    mine: &Result<T, Failure>,
    exchange: &mut impl Exchange,
) -> Result<Vec<T>, SaveError> {
    let message = serde_json::to_vec(mine).unwrap_or_default();
    let all = exchange.all_gather(message).map_err(|source| SaveError::Exchange { step, source })?;
    let read = |(rank, message): (usize, &Vec<u8>)| match serde_json::from_slice::<Result<T, Failure>>(message) {
        Ok(Err(Failure { full: true, problem })) => Err(SaveError::Full { step, rank, problem, bytes: bytes() }),
        Ok(result) => result.map_err(|Failure { problem, .. }| SaveError::Write { step, rank, problem }),
        Err(error) => Err(SaveError::Write { step, rank, problem: format!("its message is not one: {error}") }),
    };
    all.iter().enumerate().map(read).collect()
}
