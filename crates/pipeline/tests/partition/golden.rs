//! The results of PipeDream's published optimizer for its published profiles.
//!
//! Source: github.com/msr-fiddle/pipedream, `profiler/image_classification/profiles/{alexnet,vgg16}/graph.txt` and
//! `optimizer/optimizer_graph_hierarchical.py` (the command lines are its own).

use meshwork_pipeline::partition::{Level, Options, Plan, Profile, State, States, plan};

pub const ALEXNET: &str = include_str!("profiles/alexnet.txt");
pub const VGG16: &str = include_str!("profiles/vgg16.txt");

/// One run of the published optimizer. A number that was not recorded is `NONE`.
struct Golden {
    arguments: &'static str,
    profile: &'static str,
    states: usize,
    /// Start, end, machines, seconds on one machine.
    stages: &'static [(usize, usize, usize, f64)],
    /// Ids of the layers in each state that a later stage begins with.
    split_before: &'static [&'static str],
    single_machine_s: f64,
    time_per_stage_s: f64,
    speedup_vs_single: f64,
    data_parallel_speedup: f64,
    speedup_vs_data_parallel: f64,
}

const NONE: f64 = f64::NAN;

#[rustfmt::skip] // A table.
const GOLDENS: &[Golden] = &[
    Golden {
        arguments: "-n 4 -b 1e9 --activation_compression_ratio 1", // the README's own
        profile: VGG16, states: 40, stages: &[(0, 17, 3, 0.514238), (17, 40, 1, 0.158297)], split_before: &["node19"],
        single_machine_s: 0.672535, time_per_stage_s: 0.205520896,
        speedup_vs_single: 3.27234, data_parallel_speedup: 1.15317, speedup_vs_data_parallel: 2.83770,
    },
    Golden {
        arguments: "-n 4 -b 1e9",
        profile: VGG16, states: 40, stages: &[(0, 15, 3, 0.508686), (15, 40, 1, 0.163849)], split_before: &["node17"],
        single_machine_s: 0.672535, time_per_stage_s: 0.175732624,
        speedup_vs_single: 3.82704, data_parallel_speedup: NONE, speedup_vs_data_parallel: 3.31872,
    },
    Golden {
        // Its slowest part is a transfer, not a stage.
        arguments: "-n 4 -b 1e9 --activation_compression_ratio 1 --straight_pipeline",
        profile: VGG16, states: 40,
        stages: &[(0, 10, 1, 0.381063), (10, 23, 1, 0.239474), (23, 25, 1, 0.014572), (25, 40, 1, 0.037426)],
        split_before: &["node12", "node25", "node27"],
        single_machine_s: 0.672535, time_per_stage_s: 0.411041792,
        speedup_vs_single: NONE, data_parallel_speedup: NONE, speedup_vs_data_parallel: NONE,
    },
    Golden {
        arguments: "-n 8 -b 3.125e9 --activation_compression_ratio 1",
        profile: VGG16, states: 40, stages: &[(0, 24, 7, 0.62212), (24, 40, 1, 0.050415)], split_before: &["node26"],
        single_machine_s: 0.672535, time_per_stage_s: 0.09366112877714287,
        speedup_vs_single: NONE, data_parallel_speedup: NONE, speedup_vs_data_parallel: 1.72480,
    },
    Golden {
        // 25 Gbit/s: the paper's 15-1.
        arguments: "-n 16 -b 3.125e9 --activation_compression_ratio 1",
        profile: VGG16, states: 40, stages: &[(0, 25, 15, 0.635109), (25, 40, 1, 0.037426)], split_before: &["node27"],
        single_machine_s: 0.672535, time_per_stage_s: 0.045524807826488885,
        speedup_vs_single: 14.77293, data_parallel_speedup: 8.05039, speedup_vs_data_parallel: 1.83506,
    },
    Golden {
        arguments: "-n 16 -b 5e9 --activation_compression_ratio 1",
        profile: VGG16, states: 40, stages: &[(0, 25, 15, NONE), (25, 40, 1, NONE)], split_before: &["node27"],
        single_machine_s: 0.672535, time_per_stage_s: 0.04433072989155556,
        speedup_vs_single: NONE, data_parallel_speedup: NONE, speedup_vs_data_parallel: 1.53337,
    },
    Golden {
        // 10 Gbit/s: not the paper's 15-1.
        arguments: "-n 16 -b 1.25e9 --activation_compression_ratio 1",
        profile: VGG16, states: 40,
        stages: &[(0, 24, 13, 0.62212), (24, 31, 2, 0.040265), (31, 40, 1, 0.01015)],
        split_before: &["node26", "node32+node33"],
        single_machine_s: 0.672535, time_per_stage_s: 0.05479489083076922,
        speedup_vs_single: NONE, data_parallel_speedup: NONE, speedup_vs_data_parallel: 2.66086,
    },
    Golden {
        // The paper's 15-1.
        arguments: "-n 16 -b 1.25e9 --activation_compression_ratio 1",
        profile: ALEXNET, states: 22, stages: &[(0, 16, 15, 0.076308), (16, 22, 1, 0.009013)], split_before: &["node18"],
        single_machine_s: 0.085321, time_per_stage_s: 0.0150994944,
        speedup_vs_single: 5.65059, data_parallel_speedup: NONE, speedup_vs_data_parallel: 3.38807,
    },
    Golden {
        arguments: "-n 4 -b 1e9 --activation_compression_ratio 1",
        profile: ALEXNET, states: 22, stages: &[(0, 16, 3, NONE), (16, 22, 1, NONE)], split_before: &["node18"],
        single_machine_s: 0.085321, time_per_stage_s: 0.03421714133333334,
        speedup_vs_single: NONE, data_parallel_speedup: NONE, speedup_vs_data_parallel: 5.98042,
    },
];

/// The options of a command line of the published optimizer.
fn parse(arguments: &str) -> (Level, Options) {
    let words: Vec<&str> = arguments.split(' ').collect();
    let value = |flag| words.iter().position(|word| *word == flag).map(|at| words[at + 1].parse::<f64>().unwrap());
    let level = Level { machines: value("-n").unwrap() as usize, bytes_per_second: value("-b").unwrap() };
    let straight = words.contains(&"--straight_pipeline");
    let ratio = value("--activation_compression_ratio");
    (level, Options { straight, activation_compression_ratio: ratio, ..Options::default() })
}

#[test]
fn every_published_partition_is_found() {
    for golden in GOLDENS {
        let profile: Profile = golden.profile.parse().unwrap();
        let states = States::new(&profile).unwrap();
        let (level, options) = parse(golden.arguments);
        let found = plan(&states, &[level], &options).unwrap();
        let what = format!("{}: {found:?}", golden.arguments);

        assert_eq!(states.count(), golden.states, "{what}");
        let [stages] = &found.levels[..] else { panic!("one level, one list: {what}") };
        let places: Vec<_> = stages.iter().map(|stage| (stage.start, stage.end, stage.replication)).collect();
        let expected: Vec<_> = golden.stages.iter().map(|&(start, end, machines, _)| (start, end, machines)).collect();
        assert_eq!(places, expected, "{what}");
        let before: Vec<String> = stages[1..].iter().map(|stage| ids(&profile, &states.all()[stage.start])).collect();
        assert_eq!(before, golden.split_before, "{what}");

        for (stage, golden) in stages.iter().zip(golden.stages) {
            close(stage.compute_s, golden.3, 1e-6, &what);
        }
        close(found.single_machine_s, golden.single_machine_s, 1e-6, &what);
        close(found.time_per_stage_s, golden.time_per_stage_s, 1e-9, &what);
        let Plan { single_machine_s, time_per_stage_s, data_parallel_s, .. } = found;
        // Speed-ups were recorded to five decimals.
        close(single_machine_s / time_per_stage_s, golden.speedup_vs_single, 6e-6, &what);
        close(single_machine_s / data_parallel_s, golden.data_parallel_speedup, 6e-6, &what);
        close(data_parallel_s / time_per_stage_s, golden.speedup_vs_data_parallel, 6e-6, &what);
    }
}

fn close(found: f64, expected: f64, bound: f64, what: &str) {
    assert!(expected.is_nan() || (found - expected).abs() <= bound, "{found} is not {expected}; {what}");
}

fn ids(profile: &Profile, state: &State) -> String {
    state.boundary.iter().map(|&layer| profile.layers()[layer].id.as_str()).collect::<Vec<_>>().join("+")
}
