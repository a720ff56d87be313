//! What `mesh_diff` does with random configurations: it compares any two meshes that the trainer accepts, value by
//! value.

use crate::configurations::draw::Case;
use crate::configurations::steps::{self, Same};
use crate::configurations::{number, rules};
use meshwork_diff::{Comparison, Report};
use meshwork_train::config::{Args, Config};
use meshwork_train::{Data, load};

/// Configurations in an ordinary run of the tests.
const COUNT: u64 = 40;

/// The same configuration with another degree of tp, if it is accepted.
fn on_another_mesh(case: &Case) -> Option<(Config, Data)> {
    let tp = match case.read::<usize>("parallelism.tp") {
        None | Some(1) => "4",
        Some(2) => "1",
        Some(_) => "2",
    };
    let sequence = if case.get("parallelism.sequence_parallel") == Some("true") { "false" } else { "true" };
    let other = [
        ("parallelism.tp", Some(tp)),
        ("parallelism.sequence_parallel", Some(sequence)),
        ("parallelism.expert_tensor_parallel", None),
        ("checkpoint.dir", None),
        ("checkpoint.export", None),
    ];
    load(&Args::parse(case.with(&other).flags())).ok()
}

fn compare(case: &Case, sides: [(Config, Data); 2]) -> Result<Report, String> {
    let sides = sides.map(|(config, data)| {
        let data = steps::masked(case, data, config.model.seq_len);
        (config, data)
    });
    let comparison = Comparison::new(sides, 1, None).map_err(|fault| fault.to_string())?;
    comparison.run().map_err(|error| error.to_string())
}

/// What the numerics of a configuration promise of a report.
fn check(config: &Config, report: &Report) -> Result<(), String> {
    let holds = report.holds() && report.replicas.is_none() && report.tensors() > 0;
    let holds = holds
        && match steps::same(config) {
            Same::Bits => report.identical(),
            Same::Numbers | Same::FirstStep => report.unexplained.is_none() || steps::rounds(config),
            Same::Nothing => true,
        };
    if holds { Ok(()) } else { Err(report.to_string()) }
}

/// A configuration of a mesh is compared with one rank, and with another mesh.
fn run(case: &Case) -> Result<u64, String> {
    let accepted = rules::broken(case).is_empty().then(|| load(&Args::parse(case.flags())).ok());
    let Some((config, data)) = accepted.flatten().filter(|(config, _)| config.training.steps > 0) else {
        return Ok(0);
    };
    let alone = steps::alone_with(case, &config, true)?;
    // Tokens that lie in another order, or at more places, are other values.
    let mesh = &config.parallelism;
    let parts = mesh.cp * if mesh.sequence_parallel { mesh.tp } else { 1 };
    let in_order = case.with(&[("parallelism.context_parallel_order", (mesh.cp > 1).then_some("contiguous"))]);
    let in_order = || load(&Args::parse(in_order.flags())).map_err(|error| error.to_string());
    let other = on_another_mesh(case);
    let again = || load(&Args::parse(case.flags())).map_err(|error| error.to_string());
    let mut compared = 0;
    if config.model.seq_len.is_multiple_of(parts) {
        let report = compare(case, [alone, if mesh.cp > 1 { in_order()? } else { (config.clone(), data) }])?;
        check(&config, &report).map_err(|why| format!("with one rank: {why}"))?;
        compared += 1;
    }
    if let Some(other) = other {
        let mesh = other.0.mesh().map_or(String::new(), |mesh| mesh.to_string());
        let report = compare(case, [other, again()?]).map_err(|why| format!("with {mesh}: {why}"))?;
        check(&config, &report).map_err(|why| format!("with {mesh}: {why}"))?;
        compared += 1;
    }
    Ok(compared)
}

#[test]
fn any_two_meshes_of_a_configuration_are_compared() {
    let (first, count) = (number("MESHWORK_FIRST", 1), number("MESHWORK_CONFIGURATIONS", COUNT));
    let (mut compared, mut failures) = (0, Vec::new());
    for seed in first..first + count {
        let case = Case::draw(seed);
        match run(&case) {
            Ok(times) => compared += times,
            Err(why) => failures.push(format!("seed {seed}: {why}\n  {case}")),
        }
        if failures.len() >= 5 {
            break;
        }
    }
    println!("{compared} pairs of meshes compared, from seed {first} on");
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(count < COUNT || compared > count / 4, "{compared} compared");
}
