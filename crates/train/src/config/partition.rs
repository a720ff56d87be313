//! How layers are assigned to stages: `pipeline.partition`. All other code works with a list; `uniform` and `cost` are
//! short forms of one.

use super::Config;
use super::fault::{Fault, quoted};
use super::settings::Settings;
use super::size::MAX_LAYERS;
use super::words::{ContextMethod, Recomputed};
use meshwork_core::Axis;
use meshwork_engine::{TrainError, dry_run};
use meshwork_pipeline::Schedule;
use toml::Value;

const KEY: &str = "pipeline.partition";
const LAYERS: &str = "model.num_layers";
const STAGES: &str = "parallelism.pp";

/// As even as possible. Earlier stages take the remaining layers, because the last stage also has the head.
fn uniform(layers: usize, stages: usize) -> Vec<usize> {
    (0..stages).map(|stage| layers / stages + usize::from(stage < layers % stages)).collect()
}

/// The words that stand for a list.
pub(super) const WORDS: &[&str] = &["uniform", "cost"];

/// The cost of each part of a model whose layers are all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Costs {
    /// The beginning of the model: the embedding.
    pub(crate) embedding: u64,
    pub(crate) layer: u64,
    pub(crate) head: u64,
}

/// Counts the cost of each part of the model from its sizes alone, so that every rank of every mesh gets the same
/// numbers. All layers are the same, so a model of one layer on one rank is enough. Parts that are frozen count as if
/// they were trained.
pub(crate) fn costs(config: &Config) -> Result<Costs, TrainError> {
    let mut one = config.clone();
    (one.model.num_layers, one.parallelism.sequence_parallel) = (1, false);
    one.parallelism.ep = config.mesh().map_or(1, |mesh| mesh.degree(Axis::Ep)); // without the ranks of cp
    (one.parallelism.cp, one.parallelism.context_parallel_method) = (1, ContextMethod::None);
    (one.parallelism.zero_stage, one.parallelism.zero_group) = (0, 0);
    one.model.freeze.clear(); // layers 4 to 6 are not in a model of one layer, and an update rule may need a layer that it trains
    match dry_run::costs(&one.model(), &one.plan()?)?[..] {
        [embedding, layer, head] => Ok(Costs { embedding, layer, head }),
        _ => unreachable!("one layer and two ends"),
    }
}

/// Assigns the layers to stages so that the largest cost of any rank is minimal, given the placement of a schedule. A
/// rank computes its layers, the embedding with the first stage, and head and loss with the last; the replicas of a
/// stage share its work. Among equally good partitions, the stages of a rank are as even as possible, and earlier
/// stages get more.
///
/// Each layer in turn goes to the stage whose rank then has the smallest cost. This greedy choice is optimal because
/// all layers cost the same.
fn by_cost(layers: usize, costs: Costs, schedule: &Schedule) -> Vec<usize> {
    let stages = schedule.stages();
    // In units in which the share of every replica is a whole number.
    let all: u128 = schedule.replicas.iter().map(|&replicas| replicas as u128).product();
    let share = |stage: usize, cost: u64| u128::from(cost) * all / schedule.replicas[stage] as u128;
    let (mut assigned, mut of_stage, mut of_rank) = (vec![0; stages], vec![0u128; stages], vec![0u128; schedule.ranks]);
    let add = |stage: usize, cost: u64, of_stage: &mut [u128], of_rank: &mut [u128]| {
        of_stage[stage] += share(stage, cost);
        schedule.ranks_of(stage).for_each(|rank| of_rank[rank] += share(stage, cost));
    };
    for (stage, cost) in [(0, costs.embedding), (stages - 1, costs.head)] {
        add(stage, cost, &mut of_stage, &mut of_rank);
    }
    for _ in 0..layers {
        let then = |&stage: &usize| {
            let rank = of_rank[schedule.placement[stage]] + share(stage, costs.layer);
            (rank, of_stage[stage], assigned[stage])
        };
        let least = (0..stages).min_by_key(then).unwrap_or(0); // the first of equals
        assigned[least] += 1;
        add(least, costs.layer, &mut of_stage, &mut of_rank);
    }
    assigned
}

/// Whether the layers are divided evenly, and neither by a list nor by cost.
pub(super) fn is_uniform(settings: &Settings) -> bool {
    listed(settings).is_none() && !is_by_cost(settings)
}

/// The list, where one is given.
fn listed(settings: &Settings) -> Option<Vec<usize>> {
    let value: Value = settings.given(KEY)?;
    value.is_array().then(|| settings.get(KEY))
}

fn is_by_cost(settings: &Settings) -> bool {
    settings.given::<String>(KEY).as_deref() == Some("cost")
}

/// Replaces the uniform list by the list of `cost`, if `cost` is set and there is no fault.
pub(crate) fn resolve_by_cost(config: &mut Config, settings: &mut Settings) {
    if !is_by_cost(settings) || !settings.faults.is_empty() {
        return;
    }
    let assigned = || -> Result<Vec<usize>, TrainError> {
        Ok(by_cost(config.model.num_layers, costs(config)?, &config.pipeline.build(config.parallelism.pp)?))
    };
    match assigned() {
        Ok(list) => config.pipeline.partition = list,
        Err(error) => settings.fault(KEY, "\"cost\"", format!("no such step: {error}"), "use \"uniform\""),
    }
}

/// Records the faults of the partition, and gives the configuration its list: the uniform one if the given one is at
/// fault or still waits for costs, and an empty one if the number of stages is at fault, because that number may be
/// absurd.
pub(crate) fn resolve(config: &mut Config, settings: &mut Settings) {
    if !settings.sound(&[STAGES]) {
        return;
    }
    let layers = config.model.num_layers;
    let stages = config.pipeline.stages(config.parallelism.pp);
    let whose = if stages == config.parallelism.pp { STAGES } else { "the schedule's" };
    let list = listed(settings);
    // By cost, a stage may have no layer.
    let enough = layers >= stages || is_by_cost(settings) && stages <= MAX_LAYERS;
    let mut faults = match &list {
        Some(list) => list_faults(list, (whose, stages), settings.sound(&[LAYERS]).then_some(layers)),
        None if !enough && settings.sound(&[LAYERS, KEY]) => {
            let (problem, valid) = match config.parallelism.pp == stages {
                true => (
                    format!("fewer layers than stages: {STAGES} = {stages} needs a layer for each"),
                    format!("use {stages} layers or more, or pp of at most {layers}"),
                ),
                false => (
                    format!("fewer layers than stages: the schedule has {stages}, and each needs a layer"),
                    format!("use {stages} layers or more, fewer stages, or a list in {KEY} that leaves some empty"),
                ),
            };
            vec![Fault::new(LAYERS, layers, problem, valid)]
        }
        None => vec![],
    };
    config.pipeline.partition = match list {
        Some(list) if faults.is_empty() => list,
        _ if enough && stages <= MAX_LAYERS => uniform(layers, stages),
        _ => vec![],
    };
    settings.faults.append(&mut faults);
}

/// Refuses to recompute more layers of a stage than any has.
pub(crate) fn check_recompute(config: &Config, settings: &mut Settings) {
    let key = "memory.recompute";
    let largest = config.pipeline.partition.iter().copied().max().unwrap_or(0);
    if let Recomputed::Number(layers) = config.memory.recompute
        && layers > largest
        && largest > 0
        && settings.sound(&[key, KEY, LAYERS, STAGES])
    {
        let of = if largest == 1 { "layer" } else { "layers" };
        let problem = format!("no stage has as many layers: the largest has {largest}");
        settings.fault(key, layers, problem, format!("use at most {largest} {of}, or \"full\" for all"));
    }
}

/// The faults of a list for this number of stages, and of layers if their number is known.
fn list_faults(list: &[usize], (whose, stages): (&str, usize), layers: Option<usize>) -> Vec<Fault> {
    let of_layers = layers.map_or(String::new(), |layers| format!(" that add up to {layers}"));
    let valid = format!("use {}, or a list of {stages}{of_layers}", quoted(WORDS));
    let assigned = list.iter().fold(0usize, |sum, &layers| sum.saturating_add(layers));
    let sum = layers
        .filter(|&layers| layers != assigned)
        .map(|layers| format!("has {assigned} layers, not {LAYERS} = {layers}"));
    let length = (list.len() != stages).then(|| format!("is for {} stages, not {whose} = {stages}", list.len()));
    [sum, length].into_iter().flatten().map(|problem| Fault::new(KEY, format!("{list:?}"), problem, &valid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_pipeline::{forward_only, one_f_one_b_replicated};

    #[test]
    fn costs_are_those_of_the_formulae() {
        let config = Config::from_toml("[model]\npreset = 'small'\n[parallelism]\ntp = 2\npp = 2").unwrap();
        let (v, h, s) = (256u64, 384, 256);
        // Backward costs twice as much as forward, except in attention, which recomputes its probabilities: 4 and 10
        // for each pair and width.
        let products = 3 * 2 * s * (4 * h * h + 8 * h * h);
        let attention = 14 * h * (s * (s + 1) / 2);
        let wanted = Costs { embedding: 0, layer: products + attention, head: 3 * 2 * s * v * h };
        assert_eq!(super::costs(&config).unwrap(), wanted);
    }

    /// The model of one layer that is measured had no trained layer where layer 0 was frozen, and Muon refused it.
    #[test]
    fn frozen_layers_count_as_trained_ones() {
        let text =
            "[model]\nnum_layers = 4\nfreeze = 'layers.0, norm'\n[parallelism]\npp = 2\n[optimizer]\nname = 'muon'\n";
        let [frozen, trained] = [text.to_owned(), text.replace("freeze", "# freeze")]
            .map(|text| Config::from_toml(&format!("{text}[pipeline]\npartition = 'cost'")).unwrap());
        assert_eq!((frozen.model.freeze.as_str(), trained.model.freeze.as_str()), ("layers.0, norm", ""));
        assert_eq!(frozen.pipeline.partition, trained.pipeline.partition);
        assert_eq!(super::costs(&frozen).unwrap(), super::costs(&trained).unwrap());
    }

    #[test]
    fn uniform_is_as_even_as_can_be() {
        for (layers, stages, expected) in
            [(4, 1, vec![4]), (4, 2, vec![2, 2]), (7, 3, vec![3, 2, 2]), (5, 4, vec![2, 1, 1, 1])]
        {
            assert_eq!(uniform(layers, stages), expected);
        }
    }

    /// The largest cost of any rank, times the factor that makes the shares of replicas whole numbers.
    fn most(assigned: &[usize], costs: Costs, schedule: &Schedule) -> u64 {
        let last = assigned.len() - 1;
        let all = schedule.replicas.iter().product::<usize>() as u64;
        let cost = |stage: usize| {
            let ends = [(0, costs.embedding), (last, costs.head)];
            let ends: u64 = ends.iter().filter(|(end, _)| *end == stage).map(|(_, cost)| cost).sum();
            (assigned[stage] as u64 * costs.layer + ends) * all / schedule.replicas[stage] as u64
        };
        let rank = |rank| schedule.stages_of(rank).map(cost).sum();
        (0..schedule.ranks).map(rank).max().unwrap()
    }

    /// Every partition of the layers into stages.
    fn all_ways(layers: usize, stages: usize) -> Vec<Vec<usize>> {
        if stages == 1 {
            return vec![vec![layers]];
        }
        let with =
            |first| all_ways(layers - first, stages - 1).into_iter().map(move |rest| [vec![first], rest].concat());
        (0..=layers).flat_map(with).collect()
    }

    #[test]
    fn by_cost_is_the_best_of_all_ways_and_never_worse_than_uniform() {
        let placements: &[&[usize]] =
            &[&[0], &[0, 1], &[0, 1, 2], &[0, 1, 2, 3], &[0, 1, 0, 1], &[0, 1, 1, 0], &[0, 1, 0, 1, 0, 1]];
        let plain = placements.iter().map(|placement| forward_only(placement, 1));
        let replicated = [&[3, 1][..], &[1, 3], &[2, 3, 1]].map(|replicas| one_f_one_b_replicated(replicas, 1));
        for schedule in plain.chain(replicated) {
            let placement = &schedule;
            let stages = schedule.stages();
            for layers in stages..=8 {
                for (embedding, layer, head) in
                    [(0, 1, 0), (0, 2, 1), (0, 2, 3), (0, 2, 9), (3, 2, 7), (40, 3, 41), (5, 1, 0), (1, 0, 1)]
                {
                    let costs = Costs { embedding, layer, head };
                    let assigned = by_cost(layers, costs, placement);
                    assert_eq!(assigned.iter().sum::<usize>(), layers);
                    let least = all_ways(layers, stages).iter().map(|way| most(way, costs, placement)).min();
                    let what =
                        format!("{assigned:?} on {:?} x {:?} for {costs:?}", schedule.placement, schedule.replicas);
                    assert_eq!(Some(most(&assigned, costs, placement)), least, "{what}");
                    assert!(least <= Some(most(&uniform(layers, stages), costs, placement)), "{what}");
                }
            }
        }
    }

    #[test]
    fn by_cost_reads_as_one_would_deal_by_hand() {
        let partition = |layers, embedding, layer, head, placement: &[usize]| {
            by_cost(layers, Costs { embedding, layer, head }, &forward_only(placement, 1))
        };
        // With free ends, the result is uniform.
        assert_eq!(partition(7, 0, 1, 0, &[0, 1, 2]), uniform(7, 3));
        // A head worth two layers.
        assert_eq!(partition(6, 0, 1, 2, &[0, 1, 2, 3]), [2, 2, 2, 0]);
        assert_eq!(partition(10, 0, 1, 2, &[0, 1, 2, 3]), [3, 3, 3, 1]);
        // Both ends are on rank 0 of a V, and on ranks 0 and 1 of a loop.
        assert_eq!(partition(8, 1, 1, 1, &[0, 1, 1, 0]), [2, 3, 2, 1]);
        assert_eq!(partition(8, 1, 1, 1, &[0, 1, 0, 1]), [2, 2, 2, 2]);
    }
}
