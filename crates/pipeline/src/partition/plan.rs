//! PipeDream's dynamic programme: the partition whose slowest stage is fastest (section 3.1 of the paper).
//!
//! With A(i→j, m) the best time for the layers between cuts i and j on m machines, T(i→j, m) the time of one stage that m
//! machines replicate, and a the bytes sent over a cut:
//!
//! ```text
//! A(i→j, m) = min( T(i→j, m),  min over cuts s and m' < m of max( A(i→s, m-m'), transfers, T(s→j, m') ) )
//! ```
//!
//! A hierarchical topology is planned from its innermost level outwards: the time of layers on one machine of a level is A of the
//! level inside it, on all its machines. What the paper says and what its published code does differ; [`Method`] has both.

use super::error::PlanError;
use super::states::States;
use std::ops::Range;

/// Some machines, and what joins them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Machines of this level inside one of the level above.
    pub machines: usize,
    /// Bandwidth between two of them, in bytes per second.
    pub bytes_per_second: f64,
}

/// The two readings of the cost of a stage. B is the bandwidth, w the bytes of weights of the stage, t its time on one machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// The published code, where communication is added to computation: T(m) = (t + 4(m-1)w/(B·m)) / m, the second summand divided
    /// by the machines of the level inside where the stage is the first one. A stage sends and receives its activations while
    /// others compute, 2a/(B·m') for its input and, unless it is the last of the model, for its output.
    #[default]
    Code,
    /// The paper, where they overlap: T(m) = max(t, 2(m-1)w/B) / m, and 2a/B for the input of a stage.
    Paper,
}

/// How to plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// What a stage costs.
    pub method: Method,
    /// Whether each stage is on one machine only.
    pub straight: bool,
    /// By how much activations shrink when they are sent: 1 for not at all. Without it, sending them costs nothing, as in the
    /// published code; the paper's own formula is [`Method::Paper`] with a ratio of 1.
    pub activation_compression_ratio: Option<f64>,
}

/// A stage of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedStage {
    /// The cut before it: the stage has what [state](States::all) `end - 1` has more than state `start - 1`.
    pub start: usize,
    /// The cut after it.
    pub end: usize,
    /// Machines of its level that it is replicated on.
    pub replication: usize,
    /// Time of forward and backward of its layers for a mini-batch on one machine, not replicated, in seconds.
    pub compute_s: f64,
}

/// The best partition.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The stages of each level, the outermost level first. Every stage of a level is cut anew on the level inside it.
    pub levels: Vec<Vec<PlannedStage>>,
    /// Time between two mini-batches that leave the pipeline, in seconds: that of the slowest stage.
    pub time_per_stage_s: f64,
    /// Time of a mini-batch on one machine, in seconds.
    pub single_machine_s: f64,
    /// Time of a mini-batch with the whole model replicated on all machines, by the same method, in seconds.
    pub data_parallel_s: f64,
}

impl Plan {
    /// How many times faster than one machine.
    #[must_use]
    pub fn speedup_vs_single_machine(&self) -> f64 {
        self.single_machine_s / self.time_per_stage_s
    }

    /// How many times faster than data parallelism on the same machines.
    #[must_use]
    pub fn speedup_vs_data_parallel(&self) -> f64 {
        self.data_parallel_s / self.time_per_stage_s
    }

    /// How many times faster data parallelism on all machines is than one of them.
    #[must_use]
    pub fn data_parallel_speedup(&self) -> f64 {
        self.single_machine_s / self.data_parallel_s
    }
}

/// The best partition over a topology, given from its innermost level outwards. The same profile gives the same one of equally
/// good ones, always.
///
/// Takes time of the order of states² · machines² for a flat topology, of states³ · machines² for each level inside another.
///
/// # Errors
/// A topology or an option that makes no sense, or a straight pipeline longer than the model.
pub fn plan(states: &States, levels: &[Level], options: &Options) -> Result<Plan, PlanError> {
    check(levels, options)?;
    let cuts = states.count();
    let mut tables: Vec<Table> = Vec::new();
    let mut data_parallel_s = states.all()[cuts - 1].compute_s;
    for (number, &level) in levels.iter().enumerate() {
        let inner = number.checked_sub(1).map(|inner| (&tables[inner], levels[inner].machines));
        let search = Search { states, level, inner, options };
        let is_outermost = number + 1 == levels.len();
        let weights = states.all()[cuts - 1].parameter_bytes;
        data_parallel_s = search.stage(data_parallel_s, weights, level.machines, search.inner_machines());
        let table = search.run(if is_outermost { 0..1 } else { 0..cuts });
        tables.push(table);
    }
    let most = || PlanError::TooManyMachines {
        machines: levels.iter().fold(1, |all, level| all.saturating_mul(level.machines)),
        stages: states.most_stages(),
    };
    let best = tables[levels.len() - 1].whole(0, cuts).ok_or_else(most)?;
    let mut plan = Plan {
        levels: Vec::new(),
        time_per_stage_s: best.time,
        single_machine_s: states.all()[cuts - 1].compute_s,
        data_parallel_s,
    };
    let mut spans = vec![(0, cuts)];
    for table in tables.iter().rev() {
        let stages = spans.iter().flat_map(|&(start, end)| table.stages(start, end));
        let compute = |cut: usize| if cut == 0 { 0.0 } else { states.all()[cut - 1].compute_s };
        let stages: Vec<PlannedStage> = stages
            .map(|(start, end, replication)| PlannedStage {
                start,
                end,
                replication,
                compute_s: compute(end) - compute(start),
            })
            .collect();
        spans = stages.iter().map(|stage| (stage.start, stage.end)).collect();
        plan.levels.push(stages);
    }
    Ok(plan)
}

/// More machines on a level than this are a mistake.
const MOST_MACHINES: usize = 4096;

fn check(levels: &[Level], options: &Options) -> Result<(), PlanError> {
    if levels.is_empty() {
        return Err(PlanError::NoLevels);
    }
    for (number, &Level { machines, bytes_per_second }) in levels.iter().enumerate() {
        let level = number + 1;
        if !(1..=MOST_MACHINES).contains(&machines) {
            return Err(PlanError::Machines { level, machines, most: MOST_MACHINES });
        }
        if !(bytes_per_second.is_finite() && bytes_per_second > 0.0) {
            return Err(PlanError::Bandwidth { level, bytes_per_second });
        }
    }
    match options.activation_compression_ratio {
        Some(ratio) if !(ratio.is_finite() && ratio > 0.0) => Err(PlanError::Ratio { ratio }),
        _ => Ok(()),
    }
}

/// The search over one level of the topology.
struct Search<'a> {
    states: &'a States,
    level: Level,
    /// The level inside: what it found, and its machines.
    inner: Option<(&'a Table, usize)>,
    options: &'a Options,
}

impl Search<'_> {
    fn inner_machines(&self) -> usize {
        self.inner.map_or(1, |(_, machines)| machines)
    }

    /// The best partition between all pairs of cuts of which the first is one of `starts`.
    fn run(&self, starts: Range<usize>) -> Table {
        let machines = self.level.machines;
        let rows = starts.map(|start| self.row(start)).collect();
        Table { machines, rows }
    }

    fn row(&self, start: usize) -> Row {
        let (cuts, machines) = (self.states.count(), self.level.machines);
        let mut row = Row { start, machines, best: Vec::with_capacity((cuts - start) * machines) };
        for end in start + 1..=cuts {
            let lasts = self.lasts(start, end);
            let whole = self.one_machine(start, end);
            for used in 1..=machines {
                let replicable = used == 1 || !self.options.straight;
                let mut best = whole.filter(|_| replicable).map(|time| Best {
                    time: self.stage(time, self.weights(start, end), used, self.inner_machines()),
                    last: Last { cut: start, machines: used },
                });
                for last in &lasts {
                    for (on_last, &time) in (1..used).zip(&last.times) {
                        let Some(before) = row.get(last.cut, used - on_last) else { continue };
                        let time = time.max(before.time);
                        if best.is_none_or(|best| time < best.time) {
                            best = Some(Best { time, last: Last { cut: last.cut, machines: on_last } });
                        }
                    }
                }
                row.best.push(best);
            }
        }
        row
    }

    /// What can be the last of several stages between two cuts.
    fn lasts(&self, start: usize, end: usize) -> Vec<LastStage> {
        let mut between: Vec<usize> = (start + 1..end).filter(|&cut| self.states.precedes(start, cut)).collect();
        between.sort_by_key(|&cut| turn(cut));
        let most = if self.options.straight { 1 } else { self.level.machines };
        let timed = |cut| {
            let time = self.one_machine(cut, end)?;
            let times = (1..=most).map(|machines| {
                let stage = self.stage(time, self.weights(cut, end), machines, 1);
                stage.max(self.transfer(cut, end, machines))
            });
            Some(LastStage { cut, times: times.collect() })
        };
        between.into_iter().filter_map(timed).collect()
    }

    /// Time of a stage on one machine of this level.
    fn one_machine(&self, start: usize, end: usize) -> Option<f64> {
        match self.inner {
            Some((table, _)) => table.whole(start, end).map(|best| best.time),
            None => self.states.precedes(start, end).then(|| self.between(start, end, |state| state.compute_s)),
        }
    }

    /// Bytes of the weights of a stage.
    fn weights(&self, start: usize, end: usize) -> f64 {
        self.between(start, end, |state| state.parameter_bytes)
    }

    fn between(&self, start: usize, end: usize, of: impl Fn(&super::State) -> f64) -> f64 {
        let before = |cut: usize| if cut == 0 { 0.0 } else { of(&self.states.all()[cut - 1]) };
        before(end) - before(start)
    }

    /// Time of a stage of some weights and some time on one machine, replicated on several: T(m).
    fn stage(&self, time: f64, weights: f64, machines: usize, shared_by: usize) -> f64 {
        let (m, bandwidth) = (machines as f64, self.level.bytes_per_second);
        match self.options.method {
            Method::Code => (time + 4.0 * (m - 1.0) * weights / (bandwidth * m) / shared_by as f64) / m,
            Method::Paper => time.max(2.0 * (m - 1.0) * weights / bandwidth) / m,
        }
    }

    /// Time to send the activations of a stage that is not the first one.
    fn transfer(&self, start: usize, end: usize, machines: usize) -> f64 {
        let Some(ratio) = self.options.activation_compression_ratio else { return 0.0 };
        let is_last = end == self.states.count();
        let time = |cut: usize| 2.0 * self.states.all()[cut - 1].output_bytes / self.level.bytes_per_second;
        let time = match self.options.method {
            Method::Code if is_last => time(start) / machines as f64,
            Method::Code => time(start).max(time(end)) / machines as f64,
            Method::Paper => time(start),
        };
        time / ratio
    }
}

/// When a cut is looked at: of equally good ones, the first is taken. There are many where layers cost nothing or a transfer
/// decides: a straight VGG-16 on four machines has 253 best partitions. The published code looks at cuts in the order of a Python
/// set of objects, which their addresses scatter. Any order is right; this one is as scattered, and was chosen because it takes
/// what the recorded runs of that code took.
fn turn(cut: usize) -> usize {
    cut * (cut + 17) % 131
}

/// A last stage, with its times on 1, 2, .. machines.
struct LastStage {
    cut: usize,
    times: Vec<f64>,
}

/// What a level's search found.
struct Table {
    machines: usize,
    /// By the first cut.
    rows: Vec<Row>,
}

/// The best between one cut and each later one, with each number of machines.
struct Row {
    start: usize,
    machines: usize,
    best: Vec<Option<Best>>,
}

/// The best for some layers and machines.
#[derive(Clone, Copy)]
struct Best {
    time: f64,
    last: Last,
}

/// The last stage of a partition.
#[derive(Clone, Copy)]
struct Last {
    /// The cut before it.
    cut: usize,
    machines: usize,
}

impl Row {
    fn get(&self, end: usize, machines: usize) -> Option<Best> {
        self.best[(end - self.start - 1) * self.machines + machines - 1]
    }
}

impl Table {
    /// The best on all machines of the level.
    fn whole(&self, start: usize, end: usize) -> Option<Best> {
        self.rows[start].get(end, self.machines)
    }

    /// The stages of it: the cuts around each, and its machines.
    fn stages(&self, start: usize, end: usize) -> Vec<(usize, usize, usize)> {
        let (mut stages, mut end, mut machines) = (Vec::new(), end, self.machines);
        while end > start {
            let Some(Best { last, .. }) = self.rows[start].get(end, machines) else { break };
            stages.push((last.cut, end, last.machines));
            (end, machines) = (last.cut, machines - last.machines);
        }
        stages.reverse();
        stages
    }
}
