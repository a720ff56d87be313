//! The planner against a search through all partitions, written down from the formulae, on small graphs of layers.
//!
//! Sets of layers are bit masks here, and every partition is tried: nothing is shared with the planner.

use meshwork_pipeline::partition::{Level, Method, Options, Plan, PlanError, PlannedStage, Profile, States, plan};
use proptest::prelude::*;

/// A graph of layers, where only the first reads from nothing.
#[derive(Clone, Debug)]
struct Graph {
    /// Per layer: seconds, bytes of weights, bytes of output.
    costs: Vec<[f64; 3]>,
    /// Per layer: the layers that it reads.
    sources: Vec<Vec<usize>>,
}

impl Graph {
    fn text(&self) -> String {
        let mut text = String::new();
        for (at, [seconds, weights, output]) in self.costs.iter().enumerate() {
            let (forward, backward) = (seconds * 1e3 / 3.0, seconds * 2e3 / 3.0);
            text += &format!(
                "n{at} -- Layer -- forward_compute_time={forward}, backward_compute_time={backward}, \
                 activation_size={output}, parameter_size={weights}\n"
            );
        }
        for (to, sources) in self.sources.iter().enumerate() {
            sources.iter().for_each(|from| text += &format!("\tn{from} -- n{to}\n"));
        }
        text
    }

    fn all(&self) -> u32 {
        (1 << self.costs.len()) - 1
    }

    /// All layers that a layer depends on.
    fn needs(&self, layer: usize) -> u32 {
        self.sources[layer].iter().fold(0, |mask, &source| mask | 1 << source | self.needs(source))
    }

    fn is_read_by(&self, layer: usize, reader: usize) -> bool {
        self.sources[reader].contains(&layer)
    }

    /// Every set that contains, with a layer, all layers that it depends on.
    fn states(&self) -> Vec<u32> {
        let has_all = |set: u32| members(set).all(|layer| self.needs(layer) & !set == 0);
        (1..=self.all()).filter(|&set| has_all(set)).collect()
    }

    fn sum(&self, set: u32, cost: usize) -> f64 {
        members(set).map(|layer| self.costs[layer][cost]).sum()
    }

    /// Bytes sent over the cut after a state.
    fn output(&self, set: u32) -> f64 {
        let ends: Vec<usize> =
            members(set).filter(|&layer| !members(set).any(|reader| self.is_read_by(layer, reader))).collect();
        let counts = |layer: usize| {
            ends.iter().any(|&end| {
                let on_the_way = |reader: usize| reader == end || self.needs(end) >> reader & 1 == 1;
                let all = 0..self.costs.len();
                let strays = all.clone().any(|reader| self.is_read_by(layer, reader) && !on_the_way(reader));
                layer == end || (self.needs(end) >> layer & 1 == 1 && strays)
            })
        };
        members(set).filter(|&layer| counts(layer)).map(|layer| self.costs[layer][2]).sum()
    }
}

fn members(set: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |layer| set >> layer & 1 == 1)
}

/// The input of the planner: a graph and a topology.
struct Task<'a> {
    graph: &'a Graph,
    states: Vec<u32>,
    levels: &'a [Level],
    options: &'a Options,
}

impl Task<'_> {
    /// Seconds of one stage, or of the whole, on some machines of a level.
    fn stage(&self, level: usize, time: f64, set: u32, machines: usize, is_first: bool) -> f64 {
        let (w, b, m) = (self.graph.sum(set, 1), self.levels[level].bytes_per_second, machines as f64);
        let shared = if is_first && level > 0 { self.levels[level - 1].machines as f64 } else { 1.0 };
        match self.options.method {
            Method::Code => (time + 4.0 * (m - 1.0) * w / (b * m) / shared) / m,
            Method::Paper => (1.0 / m) * f64::max(time, 2.0 * (m - 1.0) * w / b),
        }
    }

    /// Seconds to send the input of a later stage, and its output.
    fn transfer(&self, level: usize, before: u32, after: u32, machines: usize) -> f64 {
        let Some(ratio) = self.options.activation_compression_ratio else { return 0.0 };
        let (b, m) = (self.levels[level].bytes_per_second, machines as f64);
        let (input, output) = (2.0 * self.graph.output(before) / b, 2.0 * self.graph.output(after) / b);
        let time = match (self.options.method, after == self.graph.all()) {
            (Method::Code, true) => input / m,
            (Method::Code, false) => f64::max(input, output) / m,
            (Method::Paper, _) => input,
        };
        time / ratio
    }

    /// Seconds of the layers between two states on one machine of a level.
    fn one_machine(&self, level: usize, before: u32, after: u32) -> Option<f64> {
        match level.checked_sub(1) {
            Some(inner) => self.best(inner, before, after),
            None => Some(self.graph.sum(after & !before, 0)),
        }
    }

    /// The time of the best of all partitions of the layers between two states, on all machines of a level.
    fn best(&self, level: usize, before: u32, after: u32) -> Option<f64> {
        let mut best = None;
        self.try_all(level, before, before, after, self.levels[level].machines, 0.0, &mut best);
        best
    }

    /// Tries every next stage, on every number of machines; `slowest` is the time of those before.
    #[expect(clippy::too_many_arguments, reason = "a search by recursion")]
    fn try_all(&self, level: usize, start: u32, at: u32, end: u32, left: usize, slowest: f64, best: &mut Option<f64>) {
        if at == end {
            if left == 0 {
                *best = Some(best.map_or(slowest, |best| best.min(slowest)));
            }
            return;
        }
        for &next in self.states.iter().filter(|&&next| at & !next == 0 && next & !end == 0 && next != at) {
            let Some(time) = self.one_machine(level, at, next) else { continue };
            for machines in 1..=if self.options.straight { left.min(1) } else { left } {
                let is_first = at == start;
                let stage = self.stage(level, time, next & !at, machines, is_first);
                let transfer = if is_first { 0.0 } else { self.transfer(level, at, next, machines) };
                let slowest = slowest.max(stage).max(transfer);
                self.try_all(level, start, next, end, left - machines, slowest, best);
            }
        }
    }

    /// The time of given stages, by the same formulae.
    fn time_of(&self, level: usize, stages: &[PlannedStage], sets: &[u32]) -> f64 {
        let set = |cut: usize| if cut == 0 { 0 } else { sets[cut - 1] };
        let mut slowest = 0f64;
        for stage in stages {
            let (before, after) = (set(stage.start), set(stage.end));
            let time = self.one_machine(level, before, after).expect("a stage of a plan");
            let is_first = stage.start == stages[0].start;
            slowest = slowest.max(self.stage(level, time, after & !before, stage.replication, is_first));
            if !is_first {
                slowest = slowest.max(self.transfer(level, before, after, stage.replication));
            }
        }
        slowest
    }
}

/// Small whole numbers, so that ties are frequent and sums exact enough.
fn graph(layers: usize) -> impl Strategy<Value = Graph> {
    let costs = prop::collection::vec(prop::array::uniform3(0u32..6), layers);
    let sources = (0..layers).map(|at| prop::collection::vec(0..at.max(1), 1..3)).collect::<Vec<_>>();
    (costs, sources).prop_map(|(costs, mut sources)| {
        sources[0].clear();
        sources.iter_mut().for_each(|sources| {
            sources.sort_unstable();
            sources.dedup();
        });
        Graph { costs: costs.iter().map(|costs| costs.map(f64::from)).collect(), sources }
    })
}

fn chain(layers: usize) -> impl Strategy<Value = Graph> {
    graph(layers).prop_map(|graph| Graph {
        sources: (0..graph.costs.len()).map(|at: usize| at.checked_sub(1).into_iter().collect()).collect(),
        ..graph
    })
}

fn options() -> impl Strategy<Value = Options> {
    let ratio = prop_oneof![Just(None), Just(Some(1.0)), Just(Some(2.0))];
    (prop_oneof![Just(Method::Code), Just(Method::Paper)], any::<bool>(), ratio).prop_map(
        |(method, straight, activation_compression_ratio)| Options { method, straight, activation_compression_ratio },
    )
}

fn level(machines: usize) -> impl Strategy<Value = Level> {
    let bandwidth = prop_oneof![Just(0.5), Just(1.0), Just(2.0), Just(100.0)];
    (1..=machines, bandwidth).prop_map(|(machines, bytes_per_second)| Level { machines, bytes_per_second })
}

fn compare(graph: &Graph, levels: &[Level], options: &Options) -> Result<(), TestCaseError> {
    let states = States::new(&graph.text().parse::<Profile>().unwrap()).unwrap();
    let task = Task { graph, states: graph.states(), levels, options };
    let mut expected = task.states.clone();
    let found: Vec<u32> =
        (1..=states.count()).map(|cut| states.layers(0, cut).iter().fold(0, |set, layer| set | 1 << layer)).collect();
    for (state, &set) in states.all().iter().zip(&found) {
        prop_assert!((state.output_bytes - graph.output(set)).abs() < 1e-9, "{set:b}: {state:?}");
    }
    expected.sort_by_key(|set| set.count_ones());
    let by_size = |sets: &[u32]| {
        let mut sorted = sets.to_vec();
        sorted.sort_unstable();
        sorted
    };
    prop_assert_eq!(by_size(&found), by_size(&expected));
    prop_assert!(found.is_sorted_by_key(|set| set.count_ones()));

    let outermost = levels.len() - 1;
    match (plan(&states, levels, options), task.best(outermost, 0, graph.all())) {
        (Ok(Plan { levels: stages, time_per_stage_s, .. }), Some(best)) => {
            prop_assert!((time_per_stage_s - best).abs() < 1e-9, "{time_per_stage_s} is not {best}: {stages:?}");
            prop_assert_eq!(stages.len(), levels.len());
            let mut outer = vec![PlannedStage { start: 0, end: states.count(), replication: 1, compute_s: 0.0 }];
            for (level, stages) in (0..levels.len()).rev().zip(&stages) {
                let mut rest = &stages[..];
                for of in &outer {
                    // The stages that this one is cut into: they cover it, on all machines, in the time of the best.
                    let count = rest.iter().take_while(|stage| stage.end <= of.end).count();
                    let (inner, after) = rest.split_at(count);
                    rest = after;
                    prop_assert_eq!((inner[0].start, inner[count - 1].end), (of.start, of.end));
                    prop_assert!(inner.windows(2).all(|pair| pair[0].end == pair[1].start));
                    let machines: usize = inner.iter().map(|stage| stage.replication).sum();
                    prop_assert_eq!(machines, levels[level].machines);
                    let set = |cut: usize| if cut == 0 { 0 } else { found[cut - 1] };
                    let best = task.best(level, set(of.start), set(of.end)).unwrap();
                    let time = task.time_of(level, inner, &found);
                    prop_assert!((time - best).abs() < 1e-9, "level {level}: {inner:?} take {time}, not {best}");
                }
                prop_assert!(rest.is_empty());
                outer.clone_from(stages);
            }
        }
        (Err(PlanError::TooManyMachines { machines, stages }), None) => {
            prop_assert_eq!(machines, levels.iter().map(|level| level.machines).product::<usize>());
            prop_assert!(options.straight && machines > stages);
        }
        (found, best) => prop_assert!(false, "{found:?}, and by trying all {best:?}"),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chains_on_a_flat_topology(graph in chain(6), level in level(5), options in options()) {
        compare(&graph, &[level], &options)?;
    }

    #[test]
    fn branches_on_a_flat_topology(graph in graph(6), level in level(4), options in options()) {
        compare(&graph, &[level], &options)?;
    }

    #[test]
    fn two_levels(graph in graph(5), inner in level(3), outer in level(3), options in options()) {
        compare(&graph, &[inner, outer], &options)?;
    }

    #[test]
    fn three_levels(graph in chain(4), levels in prop::array::uniform3(level(2)), options in options()) {
        compare(&graph, &levels, &options)?;
    }
}

/// Data parallelism by hand: two machines that share 1 GB/s inside, three of those pairs that share 2 GB/s.
#[test]
fn data_parallelism_over_two_levels() {
    let graph = Graph { costs: vec![[6.0, 9e9, 1.0]], sources: vec![vec![]] };
    let states = States::new(&graph.text().parse::<Profile>().unwrap()).unwrap();
    let level = |machines, bytes_per_second| Level { machines, bytes_per_second };
    let time = |method| {
        let options = Options { method, ..Options::default() };
        plan(&states, &[level(2, 1e9), level(3, 2e9)], &options).unwrap().data_parallel_s
    };
    // (6 + 4·1·9/(1·2)) / 2 = 12; (12 + 4·2·9/(2·3)/2) / 3 = 6
    assert!((time(Method::Code) - 6.0).abs() < 1e-9);
    // max(6, 2·1·9/1) / 2 = 9; max(9, 2·2·9/2) / 3 = 6
    assert!((time(Method::Paper) - 6.0).abs() < 1e-9);
}

#[test]
fn senseless_tasks_are_refused() {
    let graph = Graph { costs: vec![[1.0, 1.0, 1.0]], sources: vec![vec![]] };
    let states = States::new(&graph.text().parse::<Profile>().unwrap()).unwrap();
    let level = |machines, bytes_per_second| Level { machines, bytes_per_second };
    let told = |levels: &[Level], options: Options| plan(&states, levels, &options).unwrap_err().to_string();
    let straight = Options { straight: true, ..Options::default() };
    let ratio = |ratio| Options { activation_compression_ratio: Some(ratio), ..Options::default() };
    for (levels, options, expected) in [
        (vec![], Options::default(), "no machines; give each level of the topology some"),
        (vec![level(0, 1.0)], Options::default(), "0 machines on level 1; use 1 to 4096"),
        (vec![level(2, 1.0), level(5000, 1.0)], Options::default(), "5000 machines on level 2"),
        (
            vec![level(2, 0.0)],
            Options::default(),
            "a bandwidth of 0 bytes per second on level 1; use a finite number above 0",
        ),
        (vec![level(2, f64::NAN)], Options::default(), "a bandwidth of NaN"),
        (vec![level(2, 1.0)], ratio(0.0), "an activation compression ratio of 0; use a finite number above 0"),
        (vec![level(2, 1.0)], straight, "over 2 machines needs as many stages, and there can be only 1; use at most 1"),
    ] {
        let found = told(&levels, options);
        assert!(found.contains(expected), "{found}\n{expected}");
    }
}
