//! The fastest plans on a cluster: `--cluster`.

use crate::options::Options;
use crate::output::tell;
use crate::picture;
use meshwork::plan::search::{Found, Keys, Loss, Plan, fastest, model, search};
use meshwork::plan::table::{self, configured};
use meshwork::plan::{Cluster, Cores, Counter, Job, PlanError, System};
use serde_json::json;
use std::io::{IsTerminal, Write, stderr};
use std::{fs, path::Path};

/// Plans that are shown.
const SHOWN: usize = 10;

/// How often the cluster is doubled to find one in which a model fits.
const DOUBLINGS: u32 = 6;

/// The command that trains a plan.
const TRAIN: &str = "cargo run --release --features cuda --example gpt_train -- --device cuda";

/// The same where ranks are threads.
const TRAIN_HERE: &str = "cargo run --release --example gpt_train --";

fn train(cluster: &Cluster) -> String {
    match cluster.cores {
        None => TRAIN.to_owned(),
        Some(Cores { processes: 1, .. }) => TRAIN_HERE.to_owned(),
        Some(Cores { processes, .. }) => {
            let each = cluster.cards_per_host / processes;
            format!("mpirun -n {processes} target/release/examples/gpt_train --set comm.ranks_per_process={each}")
        }
    }
}

/// The ten best plans, each with what it loses, and the command of the best.
pub fn best(options: &Options, cluster: &str) -> Result<String, PlanError> {
    let cluster = read(cluster)?;
    let cluster = options.cards.map_or(Ok(cluster.clone()), |cards| cluster.of_cards(cards))?;
    let cluster = options.processes.map_or(Ok(cluster.clone()), |processes| cluster.over(processes))?;
    let system = System::known(options.system.as_deref().unwrap_or_else(|| cluster.system()))?.on(&cluster);
    let given = options.keys()?;
    if options.one {
        return one(&given, &system, &cluster);
    }
    let tokens = tokens(&options.tokens_per_batch)?;
    let model = model(&given)?.model;
    let samples = (tokens / model.seq_len).max(1);
    let mut counter = Counter::default();
    let found = search(&given, samples, &system, &cluster, SHOWN, &mut counter, &mut progress)?;
    if let Some(path) = &options.picture {
        picture::write(path, &found, &cluster, &options.preset.clone().unwrap_or_default())?;
    }
    let Some(first) = found.best.first() else {
        return Err(nothing_fits(&found, &given, samples, &system, &cluster, &mut counter)?);
    };
    if options.json {
        return Ok(found.best.iter().map(|plan| line(plan, &cluster)).collect());
    }
    let mut text = format!(
        "{}: {} {} cards; {samples} sequences of {} tokens a step\n{} plans compared, {} layers counted\n\n",
        cluster.name,
        cluster.cards(),
        cluster.card.name,
        model.seq_len,
        found.plans,
        found.layers,
    );
    text += &ten(&found, first, &cluster);
    Ok(text)
}

fn ten(found: &Found, first: &Plan, cluster: &Cluster) -> String {
    let mut text = format!("    {:>9} {:>6} {:>9}  plan\n", "step", "mfu", "memory");
    for (at, plan) in found.best.iter().enumerate() {
        let why = if at == 0 { "the best".to_owned() } else { why(plan, first) };
        text += &format!(
            "{:>3} {:>7.3} s {:>5.1}% {:>6.1} GB  {}\n{:32}{why}\n",
            at + 1,
            plan.step.seconds,
            100.0 * plan.step.mfu,
            plan.step.memory / 1e9,
            describe(plan),
            "",
        );
    }
    if let Some(plan) = &found.too_large {
        text += &format!(
            "\nfaster, but {:.1} GB too large for a card: {:.3} s with {}\n",
            (plan.step.memory - cluster.card.memory) / 1e9,
            plan.step.seconds,
            describe(plan)
        );
    }
    text += &format!("\nthe best waits: bubble {:.3} s", first.step.bubble);
    text.extend(first.step.exposed.iter().map(|(name, seconds)| format!(", {name} {seconds:.3} s")));
    text += "\n";
    text.extend(first.step.cost.map(|dollars| format!("it costs ${dollars:.3} for a million tokens\n")));
    text + &format!("\n{}\n", first.command(&train(cluster)))
}

/// The step of one configuration, as a line of JSON.
fn one(given: &Keys, system: &System, cluster: &Cluster) -> Result<String, PlanError> {
    let degree = |axis: &str| given.get(&format!("parallelism.{axis}")).and_then(|degree| degree.as_integer());
    let replicas: i64 = ["dp", "cp"].into_iter().filter_map(degree).product();
    let keys: Keys = system.keys_of(replicas as usize).into_iter().chain(given.clone()).collect();
    let config = configured(&keys)?;
    let (ranks, cards) = (config.parallelism.world_size().unwrap_or(1), cluster.cards());
    if ranks > cards && cluster.cores.is_none() {
        return Err(PlanError::File {
            file: format!("{cards} cards of {}", cluster.name),
            problem: format!("the configuration has {ranks} ranks"),
            valid: format!("use --cards {ranks}, or smaller degrees"),
        });
    }
    let step = Job::new(config, &mut Counter::default()).and_then(|job| job.predict(system, cluster));
    Ok(format!("{}\n", table::line(0, &step)))
}

/// Why a plan loses: the two largest parts.
fn why(plan: &Plan, best: &Plan) -> String {
    let losses = plan.losses(best);
    let words = losses.iter().take(2).map(|(loss, more)| match loss {
        Loss::Bubble => format!("bubble +{more:.3} s"),
        Loss::Traffic => format!("traffic +{more:.3} s"),
        Loss::Recomputation => format!("recomputation +{more:.3} s"),
        Loss::Computation => format!("computation +{more:.3} s"),
        Loss::Memory => format!("memory +{:.1} GB", more / 1e9),
    });
    words.collect::<Vec<_>>().join(", ")
}

/// The mesh and the chosen keys in few words.
fn describe(plan: &Plan) -> String {
    let word = |key: &str| plan.keys.get(key).map(|value| value.as_str().map_or(value.to_string(), str::to_owned));
    let mut words = vec![plan.mesh_flag().trim_start_matches("--mesh ").to_owned()];
    let mut add = |name: &str, value: Option<String>| words.extend(value.map(|value| format!("{name}{value}")));
    add("", word("pipeline.schedule"));
    add("chunks ", word("pipeline.virtual_stages"));
    add("micro-batch ", word("training.micro_batch_size"));
    add("zero ", word("parallelism.zero_stage").filter(|stage| stage != "0"));
    add("recompute ", word("memory.recompute").filter(|word| word != "none"));
    add("loss chunk ", word("memory.loss_chunk"));
    add("sequence block ", word("memory.sequence_block"));
    add("offload ", word("memory.offload"));
    words.join(", ")
}

/// By how much the smallest plan does not fit, and the smallest cluster of doubled hosts where one does.
fn nothing_fits(
    found: &Found,
    given: &Keys,
    samples: usize,
    system: &System,
    cluster: &Cluster,
    counter: &mut Counter,
) -> Result<PlanError, PlanError> {
    let refuse = |problem: String, valid: String| PlanError::File {
        file: format!("{} cards of {}", cluster.cards(), cluster.name),
        problem,
        valid,
    };
    let Some(least) = &found.smallest else {
        let valid = "use another number of cards, or another batch".to_owned();
        return Ok(refuse("no mesh of all cards takes this model and batch".to_owned(), valid));
    };
    let problem = format!(
        "nothing fits: the smallest plan takes {:.1} GB of a card, {:.1} GB too much: {}",
        least.step.memory / 1e9,
        (least.step.memory - cluster.card.memory) / 1e9,
        describe(least)
    );
    // Without links between hosts there are no more of them.
    let doublings = if cluster.between > 0.0 { DOUBLINGS } else { 0 };
    for doubled in 1..=doublings {
        let larger = Cluster { hosts: cluster.hosts << doubled, ..cluster.clone() };
        if let Some(plan) = fastest(given, samples, system, &larger, counter, &mut progress)? {
            let valid = format!(
                "the nearest that fits are {} cards, with {:.1} GB of each and {:.3} s a step: {}",
                larger.cards(),
                plan.step.memory / 1e9,
                plan.step.seconds,
                plan.command(&train(cluster))
            );
            return Ok(refuse(problem, valid));
        }
    }
    let most = cluster.cards() << doublings;
    Ok(refuse(problem, format!("{most} cards do not hold it either: use a smaller model or micro-batch")))
}

/// A plan as a line of JSON.
fn line(plan: &Plan, cluster: &Cluster) -> String {
    let step = &plan.step;
    let line = json!({
        "predicted_s": step.seconds, "mfu": step.mfu, "memory_bytes": step.memory.round() as u64, "fits": step.fits,
        "bubble_s": step.bubble, "recomputed_s": step.recomputed, "exposed_s": step.exposed,
        "mesh": plan.mesh_flag().trim_start_matches("--mesh "), "keys": plan.keys, "command": plan.command(&train(cluster)),
    });
    format!("{line}\n")
}

/// A cluster by its file or its name.
pub fn read(name: &str) -> Result<Cluster, PlanError> {
    match Path::new(name).extension() {
        None => Cluster::known(name),
        Some(_) => {
            let text = fs::read_to_string(name).map_err(|error| PlanError::File {
                file: name.to_owned(),
                problem: error.to_string(),
                valid: format!("use a TOML file, or one of {}", Cluster::names().collect::<Vec<_>>().join(", ")),
            })?;
            Cluster::from_toml(name, &text)
        }
    }
}

/// 4M is 4 · 1024², as models of powers of two are trained.
fn tokens(text: &str) -> Result<usize, PlanError> {
    let (digits, unit) = match text.to_ascii_uppercase().chars().last() {
        Some('K') => (&text[..text.len() - 1], 1 << 10),
        Some('M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let number = digits.parse::<f64>().ok().map(|number| number * f64::from(unit));
    let number = number.filter(|tokens| *tokens >= 1.0 && *tokens < 1e15);
    number.map(|tokens| tokens as usize).ok_or_else(|| flag("--tokens-per-batch", text, "use a number such as 4M"))
}

fn flag(flag: &str, value: &str, valid: &str) -> PlanError {
    PlanError::File { file: format!("{flag} {value}"), problem: "cannot be read".into(), valid: valid.into() }
}

/// Shows how far a search is: on a terminal in one line, else a line for each part.
pub fn progress(what: &str, done: usize, of: usize) {
    if stderr().is_terminal() {
        _ = write!(stderr(), "\r\x1b[K{what}: {done} of {of}");
        if done == of {
            _ = write!(stderr(), "\r\x1b[K");
        }
    } else if done == of {
        tell(&format_args!("{what}: {of}"));
    }
}
