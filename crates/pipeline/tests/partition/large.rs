//! Graphs with as many places for a cut as published profiles have, and more.

use meshwork_pipeline::partition::{Level, Options, PlanError, Profile, States, plan};

/// Two parallel branches with these numbers of layers, between a first layer and a last: (left + 1)(right + 1) + 1
/// states. Each layer takes 1 ms.
fn branches(left: usize, right: usize) -> States {
    let line = |id: &str| {
        format!(
            "{id} -- Layer -- forward_compute_time=0.25, backward_compute_time=0.75, activation_size=8, parameter_size=0\n"
        )
    };
    let mut text = line("first") + &line("last");
    for (name, count) in [("left", left), ("right", right)] {
        let ids: Vec<String> = (0..count).map(|at| format!("{name}{at}")).collect();
        ids.iter().for_each(|id| text += &line(id));
        let path = ["first"].into_iter().chain(ids.iter().map(String::as_str)).chain(["last"]).collect::<Vec<_>>();
        path.windows(2).for_each(|pair| text += &format!("\t{} -- {}\n", pair[0], pair[1]));
    }
    States::new(&text.parse::<Profile>().unwrap()).unwrap()
}

fn levels(machines: &[usize]) -> Vec<Level> {
    machines.iter().map(|&machines| Level { machines, bytes_per_second: 1e9 }).collect()
}

const STRAIGHT: Options =
    Options { straight: true, method: meshwork_pipeline::partition::Method::Code, activation_compression_ratio: None };

/// The number of states of the largest published profile. With 101 layers in k stages, the largest stage has 101/k of
/// them, rounded up, because a stage may have any layers whose dependencies come before them.
#[test]
fn a_graph_of_1495_states_is_planned() {
    let states = branches(17, 82);
    assert_eq!(states.count(), 1495);
    for machines in [1, 2, 4, 7, 16] {
        let found = plan(&states, &levels(&[machines]), &STRAIGHT).unwrap();
        let expected = 101_usize.div_ceil(machines) as f64 * 1e-3;
        assert!((found.time_per_stage_s - expected).abs() < 1e-9, "{machines}: {}", found.time_per_stage_s);
        assert_eq!(found.levels[0].len(), machines);
    }
    // Without weights, replicas cost nothing.
    let found = plan(&states, &levels(&[16]), &Options::default()).unwrap();
    assert!((found.time_per_stage_s - 0.101 / 16.0).abs() < 1e-9, "{}", found.time_per_stage_s);
}

/// Two servers of two machines, straight: 51 and 50 layers, whose larger halves are 26 and 25.
#[test]
fn a_graph_of_hundreds_of_states_is_planned_on_two_levels() {
    let states = branches(17, 21);
    assert_eq!(states.count(), 397);
    let found = plan(&states, &levels(&[2, 2]), &STRAIGHT).unwrap();
    assert!((found.time_per_stage_s - 0.010).abs() < 1e-9, "{}", found.time_per_stage_s);
}

#[test]
fn a_search_that_is_too_large_is_refused_at_once() {
    let states = branches(17, 82);
    let error = plan(&states, &levels(&[4096]), &Options::default()).unwrap_err();
    assert!(matches!(error, PlanError::TooLarge { states: 1495, .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("1495 places for a cut and these machines take "), "{text}");
    assert!(text.contains("1.0e11 and 2.0 GiB: use fewer machines, one level instead of several, or write"), "{text}");
    // The table of an inner level has an entry for each pair of cuts and number of machines.
    let error = plan(&branches(60, 60), &levels(&[64, 1]), &STRAIGHT).unwrap_err();
    assert!(matches!(error, PlanError::TooLarge { .. }), "{error}");
}
