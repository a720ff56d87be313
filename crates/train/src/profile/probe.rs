//! The recorder of one rank.

use super::{Ceilings, Profile, Track};
use meshwork_core::profile::{self, Class, Detail, Recorder, Span};
use meshwork_core::{Axis, CommError, Communicator, Rank};
use meshwork_pipeline::{ActionKind, Event, Phase};
use meshwork_tensor::Device;
use meshwork_tensor::profiled::Profiled;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

/// The names of actions in a profile.
pub(super) const NAMES: [(ActionKind, &str); 5] = [
    (ActionKind::Forward, "forward"),
    (ActionKind::Backward, "backward"),
    (ActionKind::InputGradient, "backward to the input"),
    (ActionKind::WeightGradient, "gradient of the weights"),
    (ActionKind::Update, "update"),
];

/// The common part of the ranks of a profile: the steps to record, and the speed that the machine can reach. Each
/// rank puts a [`probe`](Self::probe) around its communicator, its device and its steps; the tracks of all ranks are
/// the [`profile`](Self::profile). `docs/profile.md` of the repository has a whole program.
#[derive(Clone, Debug)]
pub struct Profiler {
    /// Numbers of the steps to record.
    steps: Range<u64>,
    ceilings: Ceilings,
}

impl Profiler {
    /// A profile of `count` steps of a run that has `steps`: those after the first, which is slower than all others, or
    /// the first if there is no other. It measures the machine by a device like that of the ranks, which takes less
    /// than half a second and needs a machine that does nothing else.
    pub fn new(steps: u64, count: u64, device: &dyn Device) -> Self {
        Self { ceilings: Ceilings::measure(device), ..Self::follow(steps, count) }
    }

    /// The same for a process without rank 0, which measures nothing and gets no profile.
    pub fn follow(steps: u64, count: u64) -> Self {
        let first = steps.min(2);
        Self { steps: first..first.saturating_add(count), ceilings: Ceilings::default() }
    }

    /// The probe of the rank that has this communicator of its world, whose clock it takes.
    pub fn probe(&self, world: &dyn Communicator) -> Probe {
        let recorder = Recorder::new(world.membership().origin());
        Probe { recorder: Some(recorder), steps: self.steps.clone(), action: Cell::new(0) }
    }

    /// The profile, of [the tracks](Probe::tracks) of all ranks by world rank.
    pub fn profile(self, tracks: impl IntoIterator<Item = Track>) -> Profile {
        Profile { tracks: tracks.into_iter().collect(), ceilings: self.ceilings }
    }
}

/// Decorates the communicator and device of its rank, and records its steps. Without a profile it is
/// [`off`](Self::off), and passes both on undecorated.
#[derive(Debug)]
pub struct Probe {
    recorder: Option<Recorder>,
    /// Numbers of the steps to record.
    steps: Range<u64>,
    /// The start of the current action.
    action: Cell<u64>,
}

impl Probe {
    /// A probe that records nothing.
    pub fn off() -> Self {
        Self { recorder: None, steps: 0..0, action: Cell::new(0) }
    }

    /// The communicator that the rank must use.
    pub fn communicator(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        if let Some(recorder) = &self.recorder { profile::communicator(inner, recorder.clone()) } else { inner }
    }

    /// The device that the rank must use.
    pub fn device(&self, inner: Arc<dyn Device>) -> Arc<dyn Device> {
        if let Some(recorder) = &self.recorder { Profiled::device(inner, recorder.clone()) } else { inner }
    }

    /// Runs a training step.
    pub fn step<T>(&self, number: u64, work: impl FnOnce() -> T) -> T {
        let Some(recorder) = self.recorder.as_ref().filter(|_| self.steps.contains(&number)) else { return work() };
        recorder.resume();
        let result = recorder.time(Class::Step, "step", Detail::Step(number), work);
        recorder.pause();
        result
    }

    /// Runs a part of a step.
    pub fn time<T>(&self, class: Class, name: &'static str, work: impl FnOnce() -> T) -> T {
        if let Some(recorder) = &self.recorder { recorder.time(class, name, Detail::None, work) } else { work() }
    }

    /// Records the start or end of an action of the schedule. The communicator records the messages.
    pub fn observe(&self, event: Event) {
        let Some(recorder) = &self.recorder else { return };
        let Some((_, name)) = NAMES.iter().find(|(kind, _)| *kind == event.action.kind) else { return };
        let now = recorder.now();
        if event.phase == Phase::Started {
            return self.action.set(now);
        }
        let detail = Detail::Part { stage: event.action.stage, micro: event.action.micro };
        let (start, end) = (self.action.get(), now);
        recorder.record(Span { class: Class::Action, name, detail, dtype: None, start, end, flops: 0, bytes: 0 });
    }

    /// The recorded spans of all ranks, on rank 0; none on the others, and without a profile. Collective.
    pub fn tracks(&self, rank: &Rank) -> Result<Vec<Track>, CommError> {
        let Some(own) = self.track(rank) else { return Ok(Vec::new()) };
        let all = rank.world().gather_bytes(own.encode())?;
        let mut names = own.spans.iter().map(|span| span.name).collect();
        Ok(all.iter().map(|track| Track::decode(track, &mut names)).collect())
    }

    /// The recorded spans of this rank, if there is a profile.
    pub fn track(&self, rank: &Rank) -> Option<Track> {
        let place = |axis: Axis| format!("{axis}={}", rank.coords().get(axis));
        let data_rank = rank.mesh().data_rank(rank.coords());
        let place = format!("dp={data_rank},{},{}", place(Axis::Tp), place(Axis::Pp));
        let spans = self.recorder.as_ref()?.drain();
        Some(Track { name: format!("rank {} ({place})", rank.world_rank()), spans })
    }
}
