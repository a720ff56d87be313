//! The report of a step: losses, metrics and statistics, its communications, and its use of memory.

use super::cut::Cut;
use super::pending::{Measured, PendingStep};
use super::prelude::*;
use super::stored::Store;
use crate::offload::Traffic;
use crate::statistics::{Reported, ReportedStatistic};
use crate::{OPTIMIZER, SAMPLES, TIED, ZERO, ZERO_REPLICAS};
use meshwork_core::agreement::Disagreement;
use meshwork_core::{EXPERT_CONTEXT, EXPERT_DATA};
use meshwork_nn::Metric;
use meshwork_tensor::MemoryUse;
use std::time::{Duration, Instant};

/// Name of the group of all ranks.
const WORLD: &str = "world";

/// The numbers in which a rank reports its memory.
const CATEGORIES: usize = Category::ALL.len();

/// The numbers in which a rank reports its time.
const TIMES: usize = 2;

/// The numbers in which a rank reports its steps and the hash of its input; the hash in two halves, which f64 holds
/// exactly.
const HASHES: usize = 3;

/// The report of a step, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean over all terms of the loss in the global batch, unmasked tokens or samples. Auxiliary losses are metrics.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping; with several updates in a step, the root of their mean squared
    /// norm.
    pub grad_norm: f64,
    /// The model's metrics, by name.
    pub metrics: Vec<(&'static str, f64)>,
    /// The statistics that are reported, of every layer that has one.
    pub statistics: Vec<ReportedStatistic>,
    /// Learning rate.
    pub lr: f64,
    /// The factor of the loss before backward.
    pub loss_scale: f64,
    /// Terms of the loss. In a step without any, and in an asynchronous one with an update without any, it is 0: the
    /// step is then skipped, its loss is NaN and its norm 0.
    pub terms: u64,
    /// Whether the step changed no weight, because its loss has no terms, or because a gradient overflowed at this
    /// scale. The norm is then infinite or NaN.
    pub skipped: bool,
    /// Logical bytes per group name, averaged over the ranks of the world. Groups over several axes, such as `dp+cp`,
    /// are here if they had any.
    pub comm_bytes: BTreeMap<String, f64>,
    /// The work of the offload, if there is one.
    pub offload: Option<Offloaded>,
    /// The use of the memory of each world rank when most bytes were alive.
    pub memory: Vec<MemoryUse>,
    /// The communications of this rank in the step, call by call (the report itself not counted).
    pub records: Vec<Record>,
    /// Whether some rank had been asked to stop by the end of the step.
    pub stop: bool,
}

/// The work of the offload since the report before, averaged over the ranks of the world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offloaded {
    /// Bytes read.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
    /// Seconds in which a rank stood still until its store was done.
    pub waited: f64,
}

/// How a rank spent its time between two reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankTime {
    /// Seconds in which it did its own work. On a device that queues its work, the wait for it counts.
    pub computed: f64,
    /// Seconds in which it waited for communications.
    pub waited: f64,
}

impl StepReport {
    /// Most bytes ever alive on each world rank.
    pub fn peak_bytes(&self) -> Vec<u64> {
        self.memory.iter().map(MemoryUse::total).collect()
    }
}

/// See the module docs.
pub(super) struct Reporting {
    pub metrics: Rc<[Metric]>,
    pub statistics: Reported,
    /// Groups whose bytes are reported.
    groups: Vec<String>,
    /// The bytes that offload had moved, and the time that this rank had waited for it, at the last report.
    moved: Cell<(Traffic, Duration)>,
    /// When the last report began, and how long this rank had waited by then.
    last: Cell<(Instant, Duration)>,
    /// How each world rank spent its time, by the last report that is complete.
    times: RefCell<Vec<RankTime>>,
}

impl Reporting {
    pub fn new(plan: &Plan, cut: &Cut, store: &Store, mesh: &Mesh) -> Result<Self> {
        let (layout, whole) = (&cut.layout, cut.model.whole_model()?.declarations);
        let first = |spec: &_| layout.replica(spec, &cut.tied.weights, |_| false).index == 0;
        let reads_whole = store.weights.borrow().updater.group.is_some();
        let experts = mesh.degree(Axis::Ep) > 1;
        let part = mesh.has(Axis::Cep);
        let reported = |axis: &Axis| (*axis != Axis::Ep || experts) && (*axis != Axis::Cep || part);
        let axes = Axis::ALL.into_iter().filter(reported).map(Axis::name);
        // Groups of experts where these are shared out, groups of ZeRO where they are not all data-parallel ranks, and
        // groups that bring together what the update rule measures.
        let groups = axes
            .chain(plan.compress.aqsgd.map(|_| SAMPLES))
            .chain(experts.then_some(EXPERT_DATA))
            .chain(part.then_some(EXPERT_CONTEXT))
            .chain(plan.zero.group.into_iter().flat_map(|_| [ZERO, ZERO_REPLICAS]))
            .chain(reads_whole.then_some(OPTIMIZER));
        let traffic = store.disk.as_ref().map_or(Traffic::default(), |disk| disk.traffic());
        Ok(Self {
            metrics: cut.model.model().metrics().into(),
            statistics: Reported::new(&whole, &layout.declarations, first),
            groups: groups.chain([TIED, WORLD]).map(str::to_owned).chain(mesh.product_names()).collect(),
            moved: Cell::new((traffic, Duration::ZERO)),
            last: Cell::new((Instant::now(), Duration::ZERO)),
            times: RefCell::default(),
        })
    }
}

impl Trainer {
    /// Starts the sum that gives every rank the bytes per group, summed over the ranks, every rank's peak, whether some
    /// rank should stop, and the statistics that are reported.
    ///
    /// Also sends the number of this rank's steps, and the hash of its [input](PendingStep::input).
    pub(super) fn start_stats(&self, step: &mut PendingStep, stop: bool) -> Result<()> {
        let world = self.rank.world();
        let bytes = |name: &String| {
            let on_group = step.records.iter().filter(|record| record.group == *name);
            on_group.fold(0.0, |sum, record| sum + record.bytes()) // `sum` of nothing is -0.0
        };
        let mut values: Vec<f64> = self.reporting.groups.iter().map(bytes).collect();
        values.push(f64::from(u8::from(stop)));
        values.extend(self.moved());
        let peaks = values.len();
        values.resize(peaks + world.size() * (CATEGORIES + HASHES + TIMES), 0.0);
        for (at, (_, bytes)) in self.device.meter().peak().iter().enumerate() {
            values[peaks + world.rank() * CATEGORIES + at] = bytes as f64;
        }
        let hashes = peaks + world.size() * CATEGORIES + world.rank() * HASHES;
        let [high, low] = [(step.input >> 32) as f64, f64::from(step.input as u32)];
        values[hashes..hashes + HASHES].copy_from_slice(&[self.steps_begun as f64, high, low]);
        let times = peaks + world.size() * (CATEGORIES + HASHES) + world.rank() * TIMES;
        values[times..times + TIMES].copy_from_slice(&self.spent());
        values.extend(self.reporting.statistics.part(&step.statistics));
        step.stats = Some(world.start_all_reduce(Buffer::from_vec(values), ReduceOp::Sum)?);
        self.rank.log().drain(); // the report itself does not count
        Ok(())
    }

    /// How each world rank spent its time before the last report that is complete, since the report before that one. It
    /// is no part of the report, because it differs from run to run.
    pub fn times(&self) -> Vec<RankTime> {
        self.reporting.times.borrow().clone()
    }

    /// Bytes read and written and seconds waited by the offload since the last call; nothing without offload.
    fn moved(&self) -> Vec<f64> {
        let Some(disk) = &self.store.disk else { return Vec::new() };
        let now = (disk.traffic(), disk.waited());
        let (traffic, waited) = self.reporting.moved.replace(now);
        let moved = now.0.since(traffic);
        vec![moved.read as f64, moved.written as f64, (now.1 - waited).as_secs_f64()]
    }

    /// Seconds in which this rank computed, and in which it waited, since the last call.
    fn spent(&self) -> [f64; TIMES] {
        let now = (Instant::now(), self.rank.log().waited());
        let (begun, before) = self.reporting.last.replace(now);
        let waited = now.1.saturating_sub(before);
        [now.0.duration_since(begun).saturating_sub(waited), waited].map(|time| time.as_secs_f64())
    }

    /// Refuses a step that is not the same step on all ranks, or for which ranks of one dp rank were given other
    /// samples. `hashes` has the hashes of all ranks, so that all find the same.
    fn require_agreement(&self, step: u64, hashes: &[f64]) -> Result<()> {
        if !self.device.has_values() {
            return Ok(()); // a dry run has no other ranks
        }
        let mesh = self.rank.mesh();
        let of_rank = |rank: usize| &hashes[rank * HASHES..(rank + 1) * HASHES];
        let differ = |ranks: &[usize], of: fn(&[f64]) -> String, claim: &str, over: String, valid: &str| {
            let values: Vec<String> = ranks.iter().map(|&rank| of(of_rank(rank))).collect();
            match Disagreement::between(claim, over, &values, ranks, valid) {
                None => Ok(()),
                Some(of) => Err(TrainError::Disagreement { step, of: Box::new(of) }),
            }
        };
        // The ranks of one dp rank differ along the other axes.
        let axes: Vec<Axis> = mesh.axes().filter(|axis| !Axis::DATA.contains(axis)).collect();
        let first = |rank| axes.iter().fold(mesh.coords(rank), |coords, &axis| coords.with(axis, 0));
        let agrees = |rank: usize| {
            let (own, of_first) = (of_rank(rank), of_rank(mesh.rank_at(first(rank))));
            own[0] == hashes[0] && own[1..] == of_first[1..]
        };
        if (0..mesh.world_size()).all(agrees) {
            return Ok(()); // without texts and groups of all ranks, which every rank would make in every step
        }
        let all: Vec<usize> = (0..mesh.world_size()).collect();
        differ(
            &all,
            |sent| sent[0].to_string(),
            "the number of steps should be the same",
            "on all ranks".to_owned(),
            "call step() as often on every rank, and load the same state on each",
        )?;
        for ranks in all.iter().map(|&rank| mesh.group(rank, &axes)).filter(|ranks| ranks.len() > 1) {
            differ(
                &ranks,
                |sent| format!("those of hash {:08x}{:08x}", sent[1] as u32, sent[2] as u32),
                "the samples of a dp rank, and the count of their terms, should be the same",
                "on each of its ranks".to_owned(),
                "give each rank the Trainer::samples() of one global batch",
            )?;
        }
        Ok(())
    }

    /// The report of a step whose loss and norm are known.
    pub(super) fn report(&self, step: PendingStep, measured: Measured) -> Result<StepReport> {
        let PendingStep { number, terms, loss_scale, records, stats, .. } = step;
        let Measured { loss, grad_norm, metrics, skipped, .. } = measured;
        let all = stats.unwrap_or_else(|| unreachable!("its report was started")).wait()?;
        let (world, groups) = (self.rank.world().size(), &self.reporting.groups);
        let mean = |sum: f64| sum / world as f64;
        let (bytes, rest) = all.as_slice::<f64>()?.split_at(groups.len());
        let (stop, rest) = rest.split_at(1);
        let (offload, rest) = match (&self.store.disk, rest) {
            (Some(_), [read, written, waited, rest @ ..]) => {
                let [read, written, waited] = [*read, *written, *waited].map(mean);
                (Some(Offloaded { read, written, waited }), rest)
            }
            (_, rest) => (None, rest),
        };
        let (peaks, rest) = rest.split_at(world * CATEGORIES);
        let (hashes, rest) = rest.split_at(world * HASHES);
        let (times, statistics) = rest.split_at(world * TIMES);
        self.require_agreement(number, hashes)?;
        let times = times.as_chunks().0.iter().map(|&[computed, waited]| RankTime { computed, waited });
        self.reporting.times.replace(times.collect());
        Ok(StepReport {
            step: number,
            loss,
            grad_norm,
            metrics,
            statistics: self.reporting.statistics.read(statistics),
            lr: self.plan.lr.lr(number),
            loss_scale,
            terms,
            skipped,
            comm_bytes: groups
                .iter()
                .cloned()
                .zip(bytes.iter().copied().map(mean))
                .filter(|(name, bytes)| *bytes > 0.0 || !name.contains('+'))
                .collect(),
            offload,
            memory: peaks.as_chunks().0.iter().map(|peak| MemoryUse::new(peak.map(|bytes| bytes as u64))).collect(),
            records,
            stop: stop[0] > 0.0,
        })
    }
}
