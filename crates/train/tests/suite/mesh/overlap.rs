//! Gradients are reduced while backward runs. One rank is slow: it starts its backward passes late, and at the end of
//! each, before the gradient of the token table, it takes a long pause. By then all buckets but the last must be
//! complete, on every rank.

use crate::mesh::world::try_on_mesh;
use meshwork_core::comm::thread::Options;
use meshwork_core::{Axis, Buffer, DType};
use meshwork_cpu::Cpu;
use meshwork_data_parallel::BucketEvent;
use meshwork_pipeline::{ActionKind, Event, Phase};
use meshwork_tensor::{Device, Kernels, Meter, Result, kernel};
use meshwork_train::config::Config;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Long compared with the time in which a thread of a busy machine wakes up and sees that a bucket is complete.
const PAUSE: Duration = Duration::from_millis(150);

/// A CPU that pauses before it touches a table, and records when it continued. The gradient of the token table is the
/// last thing that a first stage computes.
#[derive(Debug)]
struct SlowCpu(Cpu, Arc<Mutex<Instant>>);

impl SlowCpu {
    fn pause(&self) {
        std::thread::sleep(PAUSE);
        *self.1.lock().unwrap() = Instant::now();
    }
}

#[rustfmt::skip] // One line each: all of it is the CPU's.
impl Device for SlowCpu {
    fn name(&self) -> &str { "slow cpu" }
    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> { self.0.alloc(dtype, count) }
    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> { self.0.zeros(dtype, count) }
    fn upload(&self, host: &Buffer) -> Result<Buffer> { self.0.upload(host) }
    fn download(&self, buffer: &Buffer) -> Result<Buffer> { self.0.download(buffer) }
    fn meter(&self) -> &Meter { self.0.meter() }
    fn kernels(&self) -> Kernels<'_> { self.0.kernels() }
    fn embedding(&self) -> Result<&dyn kernel::Embedding> { self.pause(); self.0.embedding() }
}

/// One rank's times of a step.
struct Timeline {
    slow: bool,
    backward_end: Instant,
    buckets: Vec<(Instant, BucketEvent)>,
}

impl Timeline {
    fn of(&self, event: BucketEvent) -> Instant {
        let found = self.buckets.iter().find(|(_, other)| *other == event);
        found.unwrap_or_else(|| panic!("no {event:?} among {:?}", self.buckets)).0
    }
}

#[test]
fn all_buckets_but_the_last_complete_before_the_last_backward_action_ends() {
    // The tiny model on short sequences: several buckets on every rank, little to compute.
    for (mesh, least_buckets) in [("dp = 4", 4), ("dp = 2\ntp = 2", 2), ("dp = 2\npp = 2", 3)] {
        let text = format!(
            "[model]\nseq_len = 16\n[parallelism]\n{mesh}\n[pipeline]\nnum_microbatches = 2\n[training]\nglobal_batch_size = 8"
        );
        let config = Config::from_toml(&text).unwrap();
        let data = meshwork_train::Data::from_tokens((0..1000).map(|at| at * 7 % 256).collect(), 16);
        let went_on = Arc::new(Mutex::new(Instant::now()));
        let timelines = try_on_mesh(
            &config,
            Options::default(),
            |coords| match (coords.get(Axis::Dp), coords.get(Axis::Pp)) {
                (1, 0) => Arc::new(SlowCpu(Cpu::default(), went_on.clone())),
                _ => Cpu::device(),
            },
            |mut trainer| {
                let slow = trainer.device().name() == "slow cpu";
                let batch = data.batch(0, 8, trainer.samples())?;
                let mut backward_end = Instant::now();
                trainer.observed_step(&batch, |Event { action, phase }| match (action.kind, phase) {
                    (ActionKind::Backward, Phase::Started) if slow => std::thread::sleep(PAUSE / 10),
                    (ActionKind::Backward, Phase::Finished) => backward_end = Instant::now(),
                    _ => {}
                })?;
                Ok(Timeline { slow, backward_end, buckets: trainer.bucket_events() })
            },
        );
        let timelines = timelines.unwrap_or_else(|error| panic!("{mesh}: {error}"));
        let went_on = *went_on.lock().unwrap();
        let last_backward = timelines.iter().map(|timeline| timeline.backward_end).max().unwrap();
        assert!(went_on < last_backward, "{mesh}: the last pause is not within the last backward");
        for (rank, timeline) in timelines.iter().enumerate() {
            let buckets = timeline.buckets.len() / 2; // each is started and done once
            assert!(buckets >= least_buckets, "{mesh}: rank {rank} has {buckets} buckets");
            for bucket in 0..buckets {
                let started = timeline.of(BucketEvent::Started(bucket));
                assert!(
                    started <= timeline.backward_end,
                    "{mesh}: rank {rank} starts bucket {bucket} {:?} after its backward",
                    started - timeline.backward_end
                );
            }
            // The others have waited for this one, and see at once that a bucket is complete. The slow rank looks when
            // it starts one, which on a busy machine may be before another thread has done its piece, and after its
            // pause.
            for bucket in (0..buckets - 1).filter(|_| !timeline.slow) {
                let done = timeline.of(BucketEvent::Done(bucket));
                assert!(
                    done < went_on,
                    "{mesh}: bucket {bucket} of {buckets} is complete on rank {rank} {:?} after the last pause",
                    done - went_on
                );
            }
        }
    }
}
