//! The search of plans.

use meshwork_plan::search::{Found, Keys, Plan, fastest, search};
use meshwork_plan::table::configured;
use meshwork_plan::{Cluster, Counter, Job, Memory, System};
use meshwork_train::config::{Args, Config};
use meshwork_train::plan::memory;

/// A GPT of four layers, small enough that every plan of it can be compared.
fn small(more: &[(&str, toml::Value)]) -> Keys {
    let mut keys: Keys = [("model.num_layers", 4), ("model.hidden_size", 64), ("model.seq_len", 64)]
        .map(|(key, value)| (key.to_owned(), toml::Value::Integer(value)))
        .into();
    keys.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    keys
}

/// The same where nothing but mesh, schedule and ZeRO is open.
fn narrow() -> Keys {
    small(&[("training.micro_batch_size", 2.into()), ("memory.recompute", "none".into())])
}

fn cluster() -> Cluster {
    Cluster { hosts: 2, cards_per_host: 4, ..Cluster::known("dgx-h100").unwrap() }
}

/// Without the dry runs of whole steps, which would take most of the time.
fn quick() -> System {
    System { memory: Memory::Held, ..System::known("meshwork").unwrap() }
}

fn found(keys: &Keys, system: &System, cluster: &Cluster, count: usize, counter: &mut Counter) -> Found {
    search(keys, 16, system, cluster, count, counter, &mut |_, _, _| {}).unwrap()
}

#[test]
fn the_same_search_finds_the_same_plans_in_order() {
    let mut heard = Vec::new();
    let mut once = |keep: bool| {
        let mut progress = |what: &str, done: usize, of: usize| {
            if keep {
                heard.push((what.to_owned(), done, of));
            }
        };
        search(&narrow(), 16, &quick(), &cluster(), 5, &mut Counter::default(), &mut progress).unwrap()
    };
    let (one, other) = (once(true), once(false));
    let shown = |found: &Found| found.best.iter().map(|plan| plan.command("x")).collect::<Vec<_>>();
    assert_eq!(shown(&one), shown(&other));
    assert_eq!(one.best.len(), 5);
    for pair in one.best.windows(2) {
        assert!(pair[0].step.seconds <= pair[1].step.seconds && pair[0].mesh != pair[1].mesh);
        assert!(!pair[1].losses(&one.best[0]).is_empty(), "{}", pair[1].command("x"));
    }
    for pair in one.front.windows(2) {
        assert!(pair[0].step.seconds <= pair[1].step.seconds && pair[0].step.memory > pair[1].step.memory);
    }
    for what in ["counting layers", "simulating layouts", "dry runs of the best"] {
        assert!(heard.iter().any(|(name, done, of)| name == what && done == of), "{what}: {heard:?}");
    }
}

/// What is left out by its bound would not be among the best, and not on the front.
#[test]
fn plans_that_are_not_simulated_are_behind() {
    let mut counter = Counter::default();
    let keys = narrow();
    let some = found(&keys, &quick(), &cluster(), 2, &mut counter);
    let all = found(&keys, &quick(), &cluster(), usize::MAX, &mut counter);
    assert!(some.points.len() < all.points.len(), "{} {}", some.points.len(), all.points.len());
    for (own, other) in some.best.iter().zip(&all.best) {
        assert_eq!(own.step.seconds, other.step.seconds);
    }
    let front =
        |found: &Found| found.front.iter().map(|plan| (plan.step.seconds, plan.step.memory)).collect::<Vec<_>>();
    assert_eq!(front(&some), front(&all));
}

/// A better cluster never has a slower best plan.
#[test]
fn more_bandwidth_memory_or_operations_never_have_a_slower_best_plan() {
    never_slower(&narrow());
}

/// The same of a model with experts, whose meshes have ep.
#[test]
fn more_of_anything_never_has_a_slower_best_plan_of_experts() {
    let mut keys = narrow();
    keys.extend([("moe.num_experts".to_owned(), 4.into()), ("parallelism.pp".to_owned(), 1.into())]);
    never_slower(&keys);
}

/// The same of a model with logits and inner features wide enough to be computed a few tokens at a time.
#[test]
fn more_of_anything_never_has_a_slower_best_plan_with_some_tokens_at_a_time() {
    let mut keys = wide();
    keys.extend([("parallelism.tp".to_owned(), 1.into()), ("memory.recompute".to_owned(), "full".into())]);
    never_slower(&keys);
}

fn never_slower(keys: &Keys) {
    let mut counter = Counter::default();
    type Change = fn(&mut Cluster, f64);
    let changes: [(&str, Change); 6] = [
        ("bf16", |more, by| more.card.bf16 *= by),
        ("bandwidth", |more, by| more.card.bandwidth *= by),
        ("memory", |more, by| more.card.memory *= by),
        ("inside", |more, by| more.inside *= by),
        ("between", |more, by| more.between *= by),
        ("host", |more, by| more.host *= by),
    ];
    // The model takes about 4 MB: these cards have less, about as much, and more than enough.
    for memory in [2e6, 4e6, 80e9] {
        for slow in [1.0, 1e-3] {
            let mut plain = cluster();
            plain.card.memory = memory;
            plain.between *= slow;
            let before = found(keys, &quick(), &plain, 1, &mut counter);
            for (what, change) in changes {
                for by in [1.1, 4.0] {
                    let mut more = plain.clone();
                    change(&mut more, by);
                    let after = found(keys, &quick(), &more, 1, &mut counter);
                    match (before.best.first(), after.best.first()) {
                        (Some(before), Some(after)) => {
                            let (own, other) = (after.step.seconds, before.step.seconds);
                            assert!(own <= other * (1.0 + 1e-9), "{what} times {by}: {own} s, before {other} s");
                        }
                        (Some(_), None) => panic!("{what} times {by}: nothing fits any more"),
                        (None, _) => {}
                    }
                }
            }
        }
    }
}

/// The loader of `gpt_train` takes the commands, and reads the plan in them.
#[test]
fn commands_are_read_by_the_loader() {
    let mut counter = Counter::default();
    for keys in [narrow(), small(&[("training.micro_batch_size", 1.into()), ("moe.num_experts", 4.into())])] {
        let found = found(&keys, &quick(), &cluster(), 4, &mut counter);
        assert!(!found.best.is_empty());
        for plan in &found.best {
            let command = plan.command("gpt_train");
            let words = command.split(' ').skip(1).filter(|word| !["--device", "cuda"].contains(word));
            let config = Config::from_args(&Args::parse(words.chain(["--steps", "0"]))).unwrap();
            let parallel = &config.parallelism;
            assert_eq!([parallel.dp, parallel.tp, parallel.pp, parallel.cp, parallel.ep], plan.mesh, "{command}");
            assert_eq!(config.training.global_batch_size, 16, "{command}");
        }
    }
}

/// The bytes of the best plans are those that their commands print with `--steps 0`: with sequences cut over cp, with
/// each stage of ZeRO and with everything recomputed.
#[test]
fn commands_of_the_best_hold_the_predicted_bytes() {
    let system = System::known("meshwork").unwrap();
    let cases: [&[(&str, toml::Value)]; 4] = [
        &[("parallelism.cp", 2.into()), ("memory.recompute", "full".into())],
        &[("parallelism.zero_stage", 3.into()), ("memory.recompute", "selective".into())],
        &[("parallelism.pp", 2.into()), ("parallelism.zero_stage", 2.into()), ("memory.recompute", "none".into())],
        &[("parallelism.ep", 2.into()), ("moe.num_experts", 4.into()), ("memory.recompute", "none".into())],
    ];
    for more in cases {
        let keys = small(&[&[("training.micro_batch_size", 1.into())], more].concat());
        let found = found(&keys, &system, &cluster(), 4, &mut Counter::default());
        assert!(found.best.len() > 1, "{more:?}");
        for plan in &found.best {
            let command = plan.command("gpt_train");
            assert_eq!(plan.step.memory, bytes_of(&command), "{command}");
        }
    }
}

/// What ranks of ep send each other has a name, and links that are slow make it longer.
#[test]
fn the_traffic_of_experts_is_named() {
    let mut counter = Counter::default();
    let mut step = |ep: i64, inside: f64| {
        let keys = small(&[
            ("training.micro_batch_size", 1.into()),
            ("training.global_batch_size", 16.into()),
            ("moe.num_experts", 4.into()),
            ("parallelism.dp", 4.into()),
            ("parallelism.ep", ep.into()),
        ]);
        let cluster = Cluster { inside, ..cluster() };
        Job::new(configured(&keys).unwrap(), &mut counter).unwrap().predict(&quick(), &cluster).unwrap()
    };
    let of = |exposed: &std::collections::BTreeMap<String, f64>| -> f64 {
        exposed.iter().filter(|(name, _)| name.ends_with("(ep)")).map(|(_, seconds)| seconds).sum()
    };
    let (alone, fast, slow) = (step(1, 1e11), step(4, 1e11), step(4, 1e7));
    assert_eq!(of(&alone.exposed), 0.0, "{:?}", alone.exposed);
    assert!(fast.exposed.contains_key("all_to_all (ep)"), "{:?}", fast.exposed);
    assert!(of(&slow.exposed) > of(&fast.exposed) && slow.seconds > fast.seconds);
}

/// A vocabulary of 16 times the features, and sequences of four times as many tokens.
fn wide() -> Keys {
    small(&[
        ("training.micro_batch_size", 1.into()),
        ("model.vocab_size", 1024.into()),
        ("model.seq_len", 256.into()),
        ("parallelism.pp", 1.into()),
    ])
}

const AT_A_TIME: [&str; 2] = ["memory.loss_chunk", "memory.sequence_block"];

/// Where a model fits only with the logits and the inner features of a few tokens at a time, the best plans have them,
/// and their commands the predicted bytes. Where memory is no concern the best plan has all at once: nothing is
/// computed twice.
#[test]
fn some_tokens_at_a_time_are_found_where_they_decide() {
    let system = System::known("meshwork").unwrap();
    let mut counter = Counter::default();
    let mut keys = wide();
    keys.extend([
        ("memory.recompute".to_owned(), "full".into()),
        ("memory.offload".to_owned(), "none".into()),
        ("parallelism.tp".to_owned(), 1.into()),
    ]);
    let all = found(&keys, &system, &cluster(), usize::MAX, &mut counter);
    assert!(AT_A_TIME.iter().all(|key| !all.best[0].keys.contains_key(*key)), "{}", all.best[0].command("x"));
    let without: Keys = keys.clone().into_iter().chain(AT_A_TIME.map(|key| (key.to_owned(), 0.into()))).collect();
    let plain = found(&without, &system, &cluster(), usize::MAX, &mut counter);
    assert!(plain.points.len() < all.points.len(), "a key that is given as 0 is kept");
    // Where nothing fits, the smallest plans are dry-run.
    let smallest = |keys: &Keys, counter: &mut Counter| {
        let mut tiny = cluster();
        tiny.card.memory = 1e4;
        let plan = found(keys, &system, &tiny, 4, counter).smallest.unwrap();
        assert_eq!(plan.step.memory, bytes_of(&plan.command("gpt_train")));
        plan
    };
    let (least, less) = (smallest(&without, &mut counter), smallest(&keys, &mut counter));
    let command = less.command("gpt_train");
    assert!(command.contains("memory.loss_chunk=64") && command.contains("memory.sequence_block=64"), "{command}");
    assert!(less.step.memory < least.step.memory, "{} {}", less.step.memory, least.step.memory);
    let mut tight = cluster();
    tight.card.memory = least.step.memory - 1.0;
    let found = found(&keys, &system, &tight, 4, &mut counter);
    assert!(!found.best.is_empty());
    for plan in &found.best {
        let command = plan.command("gpt_train");
        assert!(AT_A_TIME.iter().any(|key| plan.keys.contains_key(*key)), "{command}");
        assert_eq!(plan.step.memory, bytes_of(&command), "{command}");
    }
}

/// What is computed twice because logits and inner features exist a few tokens at a time is no operation of the model.
#[test]
fn operations_of_the_model_are_the_same_however_many_tokens_at_a_time() {
    let mut counter = Counter::default();
    let mut operations = |more: &[(&str, i64)]| {
        let mut keys = wide();
        keys.extend(more.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())));
        keys.insert("training.global_batch_size".into(), 16.into());
        let job = Job::new(configured(&keys).unwrap(), &mut counter).unwrap();
        let step = job.predict(&quick(), &cluster()).unwrap();
        (step.mfu * step.seconds, step.seconds)
    };
    let (whole, chunks, blocks) =
        (operations(&[]), operations(&[(AT_A_TIME[0], 64)]), operations(&[(AT_A_TIME[1], 64)]));
    for some in [chunks, blocks] {
        assert!(some.1 > whole.1, "{some:?} {whole:?}");
        assert!((some.0 / whole.0 - 1.0).abs() < 1e-12, "{some:?} {whole:?}");
    }
}

/// A system that shares out states has plans of one replica too, which shares nothing out; a stage that is given is
/// kept, and needs several.
#[test]
fn one_replica_has_plans_of_every_system() {
    let mut keys = narrow();
    keys.extend([("parallelism.tp".to_owned(), 4.into()), ("parallelism.pp".to_owned(), 2.into())]);
    let mut counter = Counter::default();
    for name in System::names() {
        let system = System::known(name).unwrap();
        assert!(!found(&keys, &system, &cluster(), 1, &mut counter).best.is_empty(), "{name}");
    }
    keys.insert("parallelism.zero_stage".into(), 1.into());
    let megatron = System::known("megatron-h100").unwrap();
    let error = search(&keys, 16, &megatron, &cluster(), 1, &mut counter, &mut |_, _, _| {}).unwrap_err().to_string();
    assert!(error.starts_with("parallelism.zero_stage = 1: no ranks to share out with"), "{error}");
}

/// Bytes of the fullest rank, as this command prints them with `--steps 0`.
fn bytes_of(command: &str) -> f64 {
    let words = command.split(' ').skip(1).chain(["--steps", "0"]);
    let config = Config::from_args(&Args::parse(words)).unwrap();
    memory(&config).unwrap().iter().map(|of_rank| of_rank.total()).max().unwrap() as f64
}

/// Where nothing fits, the smallest plan says by how much.
#[test]
fn a_model_that_fits_nowhere_has_a_smallest_plan() {
    let mut tiny = cluster();
    tiny.card.memory = 1e4;
    let found = found(&narrow(), &quick(), &tiny, 10, &mut Counter::default());
    assert!(found.best.is_empty());
    let smallest = found.smallest.unwrap().step;
    assert!(!smallest.fits && found.points.iter().all(|[_, bytes]| *bytes >= smallest.memory));
}

/// The fastest plan by itself is the best one of a search, and there is none where nothing fits.
#[test]
fn the_fastest_plan_is_the_best_of_a_search() {
    let system = System::known("meshwork").unwrap();
    let mut counter = Counter::default();
    let mut none = 0;
    for memory in [1e4, 2e6, 3e6, 4e6, 80e9] {
        let mut cluster = cluster();
        cluster.card.memory = memory;
        let best = found(&narrow(), &system, &cluster, 1, &mut counter).best.pop();
        let alone = fastest(&narrow(), 16, &system, &cluster, &mut counter, &mut |_, _, _| {}).unwrap();
        let told = |plan: Option<Plan>| plan.map(|plan| (plan.command("x"), plan.step));
        none += usize::from(best.is_none());
        assert_eq!(told(alone), told(best), "{memory}");
    }
    assert!((1..5).contains(&none), "{none}");
}

/// A key that no configuration has is named, with the nearest one.
#[test]
fn a_search_names_a_key_that_no_configuration_has() {
    let keys = small(&[("parallelism.tpp", 2.into())]);
    let error = search(&keys, 16, &quick(), &cluster(), 1, &mut Counter::default(), &mut |_, _, _| {}).unwrap_err();
    assert!(error.to_string().contains("parallelism.tpp") && error.to_string().contains("parallelism.tp"), "{error}");
}

/// Where only offloaded states fit, they are found, and their bytes are those of a dry run.
#[test]
fn offloaded_states_are_found_where_nothing_else_fits() {
    let keys = small(&[
        ("training.micro_batch_size", 1.into()),
        ("memory.recompute", "full".into()),
        ("parallelism.tp", 4.into()),
        ("parallelism.pp", 1.into()),
    ]);
    let system = System::known("meshwork").unwrap();
    let mut counter = Counter::default();
    let all = found(&keys, &quick(), &cluster(), usize::MAX, &mut counter);
    let bytes = |offloaded: bool| {
        let of = all.front.iter().filter(|plan| plan.keys.contains_key("memory.offload") == offloaded);
        of.map(|plan| plan.step.memory).fold(f64::INFINITY, f64::min)
    };
    assert!(bytes(true) < bytes(false), "{} {}", bytes(true), bytes(false));
    let plan = &found(&small(&[("memory.offload", "optimizer".into())]), &system, &cluster(), 1, &mut counter).best[0];
    assert!(plan.step.fits && plan.command("x").contains("memory.offload=optimizer"), "{}", plan.command("x"));
}

/// Keys that are given stay: one mesh, one schedule.
#[test]
fn given_keys_are_kept() {
    let keys = small(&[
        ("parallelism.tp", 2.into()),
        ("parallelism.pp", 2.into()),
        ("pipeline.schedule", "zb_h1".into()),
        ("training.micro_batch_size", 1.into()),
        ("memory.recompute", "full".into()),
        ("parallelism.zero_stage", 1.into()),
        ("memory.offload", "none".into()),
    ]);
    let found = found(&keys, &quick(), &cluster(), 10, &mut Counter::default());
    assert_eq!(found.points.len(), 1);
    let command = found.best[0].command("x");
    assert!(
        command.starts_with("x --mesh dp=2,tp=2,pp=2 ") && command.contains("pipeline.schedule=zb_h1"),
        "{command}"
    );
}

#[test]
fn cards_come_in_hosts() {
    let cluster = Cluster::known("dgx-h100").unwrap();
    assert_eq!(cluster.of_cards(16384).unwrap().hosts, 2048);
    assert_eq!(cluster.of_cards(2).unwrap().cards(), 2);
    assert_eq!(
        cluster.of_cards(12).unwrap_err().to_string(),
        "NVIDIA DGX H100: 12 cards are no whole hosts; use a multiple of 8, or 1 to 8"
    );
}
