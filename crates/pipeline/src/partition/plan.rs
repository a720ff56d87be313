//! PipeDream's dynamic programme: the partition whose slowest stage is fastest (section 3.1 of the paper).
//!
//! With A(i→j, m) the best time for the layers between cuts i and j on m machines, T(i→j, m) the time of one stage that
//! m machines replicate, and a the bytes sent over a cut:
//!
//! ```text
//! A(i→j, m) = min( T(i→j, m),  min over cuts s and m' < m of max( A(i→s, m-m'), transfers, T(s→j, m') ) )
//! ```
//!
//! A hierarchical topology is planned from its innermost level outwards: the time of layers on one machine of a level
//! is A of the next inner level, on all its machines. The paper and its published code differ; [`Method`] has both.

use super::error::PlanError;
use super::order::Order;
use super::states::States;
use std::num::NonZeroU16;
use std::ops::Range;

/// Some machines, and the links between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Machines of this level inside one of the level above.
    pub machines: usize,
    /// Bandwidth between two of them, in bytes per second.
    pub bytes_per_second: f64,
}

/// The two readings of the cost of a stage. B is the bandwidth, w the bytes of weights of the stage, t its time on one
/// machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// The published code, where communication is added to computation: T(m) = (t + 4(m-1)w/(B·m)) / m, for the first
    /// stage with the second summand divided by the machines of the next inner level. A stage sends and receives its
    /// activations while others compute, 2a/(B·m') for its input and, unless it is the last of the model, for its
    /// output.
    #[default]
    Code,
    /// The paper, where they overlap: T(m) = max(t, 2(m-1)w/B) / m, and 2a/B for the input of a stage.
    Paper,
}

/// The options of the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// The cost of a stage.
    pub method: Method,
    /// Whether each stage is on one machine only.
    pub straight: bool,
    /// Compression ratio of activations when they are sent; 1 means none. Without it, sending them costs nothing, as in
    /// the published code; the paper's own formula is [`Method::Paper`] with a ratio of 1.
    pub activation_compression_ratio: Option<f64>,
}

/// A stage of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedStage {
    /// The cut before it: the stage has the layers of [state](States::all) `end - 1` that are not in state `start - 1`.
    pub start: usize,
    /// The cut after it.
    pub end: usize,
    /// Number of machines of its level that it is replicated on.
    pub replication: usize,
    /// Time of forward and backward of its layers for a mini-batch on one machine, not replicated, in seconds.
    pub compute_s: f64,
}

/// The best partition.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The stages of each level, the outermost level first. Every stage of a level is cut again on the next inner
    /// level.
    pub levels: Vec<Vec<PlannedStage>>,
    /// Time between two mini-batches that leave the pipeline, in seconds: the time of the slowest stage.
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

/// The best partition over a topology, given from its innermost level outwards. Of equally good partitions, the same
/// profile always gives the same one.
///
/// The search takes time of the order of states² · machines² for a flat topology, and of states³ · machines² for each
/// level inside another.
///
/// On 1,495 states, in two parallel branches, one core takes less than a second for 16 machines, and less than half a
/// minute for two servers of eight, with 145 MB for the table of the inner level. A search that would take more than
/// some minutes, or more than 2 GiB, is refused.
///
/// # Errors
/// An invalid topology or option, a straight pipeline longer than the model, or a search that is too large.
pub fn plan(states: &States, levels: &[Level], options: &Options) -> Result<Plan, PlanError> {
    check(levels, options)?;
    let order = Order::new(states);
    check_size(&order, states, levels, options)?;
    let cuts = states.count();
    let mut tables: Vec<Table> = Vec::new();
    let mut data_parallel_s = states.all()[cuts - 1].compute_s;
    for (number, &level) in levels.iter().enumerate() {
        let inner = number.checked_sub(1).map(|inner| (&tables[inner], levels[inner].machines));
        let search = Search { states, order: &order, level, inner, options };
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

/// A level with more machines than this is refused as a mistake.
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

/// The largest number of comparisons of two partitions, which take some minutes.
const MOST_COMPARISONS: u128 = 100_000_000_000;
/// The largest size of the tables that levels keep for the next outer level, in bytes.
const MOST_BYTES: u128 = 2 << 30;

/// Refuses a search that would take too long, or too much memory.
fn check_size(order: &Order, states: &States, levels: &[Level], options: &Options) -> Result<(), PlanError> {
    let cuts = states.count();
    let (mut comparisons, mut bytes) = (0_u128, 0_u128);
    for (number, level) in levels.iter().enumerate() {
        let starts = if number + 1 == levels.len() { 0..1 } else { 0..cuts };
        let from = (starts.len() == 1).then_some(0);
        let (pairs, triples) = order.chains(from);
        let machines = level.machines as u128;
        let splits = if options.straight { machines } else { machines * (machines + 1) / 2 };
        // Finding the cuts between two others examines 64 of them at a time.
        comparisons += triples * splits + pairs * (machines + cuts as u128 / 64);
        let rows: usize = starts.map(|start| cuts - start).sum();
        bytes += rows as u128 * machines * size_of::<Option<Best>>() as u128;
    }
    if comparisons > MOST_COMPARISONS || bytes > MOST_BYTES {
        let (most_comparisons, most_bytes) = (MOST_COMPARISONS, MOST_BYTES);
        return Err(PlanError::TooLarge { states: cuts, comparisons, most_comparisons, bytes, most_bytes });
    }
    Ok(())
}

/// The search over one level of the topology.
struct Search<'a> {
    states: &'a States,
    order: &'a Order,
    level: Level,
    /// The next inner level: its results, and its number of machines.
    inner: Option<(&'a Table, usize)>,
    options: &'a Options,
}

impl Search<'_> {
    fn inner_machines(&self) -> usize {
        self.inner.map_or(1, |(_, machines)| machines)
    }

    /// The best partition between each pair of cuts whose first cut is in `starts`.
    fn run(&self, starts: Range<usize>) -> Table {
        let machines = self.level.machines;
        let rows = starts.map(|start| self.row(start)).collect();
        Table { machines, rows }
    }

    fn row(&self, start: usize) -> Row {
        let (cuts, machines) = (self.states.count(), self.level.machines);
        let mut row = Row { start, machines, best: Vec::with_capacity((cuts - start) * machines) };
        let mut best = vec![None; machines];
        for end in start + 1..=cuts {
            self.search(&row, end, &mut best);
            row.best.extend_from_slice(&best);
        }
        row
    }

    /// Finds the best partitions between the first cut of `row` and a later one, by number of machines minus 1. `row`
    /// has the results for earlier cuts.
    fn search(&self, row: &Row, end: usize, best: &mut [Option<Best>]) {
        let (start, machines, straight) = (row.start, self.level.machines, self.options.straight);
        best.fill(None);
        let Some(time) = self.one_machine(start, end) else { return };
        let weights = self.weights(start, end);
        for used in 1..=if straight { 1 } else { machines } {
            let time = self.stage(time, weights, used, self.inner_machines());
            best[used - 1] = Some(Best { time, last: Last::new(start, used) });
        }
        for cut in self.order.between(start, end) {
            let Some(time) = self.one_machine(cut, end) else { continue };
            let weights = self.weights(cut, end);
            for on_last in 1..if straight { machines.min(2) } else { machines } {
                let time = self.stage(time, weights, on_last, 1).max(self.transfer(cut, end, on_last));
                let last = Last::new(cut, on_last);
                for used in on_last + 1..=machines {
                    let Some(before) = row.get(cut, used - on_last) else { continue };
                    let (best, time) = (&mut best[used - 1], time.max(before.time));
                    if best.is_none_or(|best| time < best.time) {
                        *best = Some(Best { time, last });
                    }
                }
            }
        }
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

    /// T(m): time of a stage that is replicated on several machines, given its weights and its time on one machine.
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

/// The results of a level's search.
struct Table {
    machines: usize,
    /// Rows by the first cut.
    rows: Vec<Row>,
}

/// The best partitions between one cut and each later one, with each number of machines.
struct Row {
    start: usize,
    machines: usize,
    best: Vec<Option<Best>>,
}

/// The best partition for some layers and machines.
#[derive(Clone, Copy)]
struct Best {
    time: f64,
    last: Last,
}

/// The last stage of a partition. It is small, because a table has one for each pair of cuts and number of machines.
#[derive(Clone, Copy)]
struct Last {
    /// The cut before it.
    cut: u16,
    machines: NonZeroU16,
}

impl Last {
    fn new(cut: usize, machines: usize) -> Self {
        let small = |number| u16::try_from(number).expect("`States` and `check` hold cuts and machines below 2^16");
        Self { cut: small(cut), machines: NonZeroU16::new(small(machines)).expect("a stage is on a machine or more") }
    }
}

impl Row {
    fn get(&self, end: usize, machines: usize) -> Option<Best> {
        self.best[(end - self.start - 1) * self.machines + machines - 1]
    }
}

impl Table {
    /// The best partition on all machines of the level.
    fn whole(&self, start: usize, end: usize) -> Option<Best> {
        self.rows[start].get(end, self.machines)
    }

    /// The stages of the best partition: the cuts around each, and its machines.
    fn stages(&self, start: usize, end: usize) -> Vec<(usize, usize, usize)> {
        let (mut stages, mut end, mut machines) = (Vec::new(), end, self.machines);
        while end > start {
            let Some(Best { last, .. }) = self.rows[start].get(end, machines) else { break };
            let (cut, on_last) = (usize::from(last.cut), usize::from(last.machines.get()));
            stages.push((cut, end, on_last));
            (end, machines) = (cut, machines - on_last);
        }
        stages.reverse();
        stages
    }
}
