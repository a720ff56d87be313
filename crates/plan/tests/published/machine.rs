//! This machine as a cluster: cores that ranks share.

use meshwork_plan::measure;
use meshwork_plan::search::{Keys, search};
use meshwork_plan::table::configured;
use meshwork_plan::{Card, Cluster, Cores, Counter, Job, System};

/// Two cores, of which a rank alone is 1.5 times as fast as one beside another.
const MACHINE: &str = "
    [cluster]
    name = 'two cores'
    hosts = 1
    cards_per_host = 2
    [card]
    name = 'core'
    memory = 8e9
    bandwidth = 1e10
    bf16 = 1e11
    f32 = 1e11
    units = 1
    [links]
    inside = 1e10
    between = 1e10
    host = 1e10
    [cores]
    count = 2
    help = 1.5
    [constants]
    launch = 5e-6
";

fn machine() -> Cluster {
    Cluster::from_toml("machine.toml", MACHINE).unwrap()
}

fn keys(degrees: &[(&str, i64)]) -> Keys {
    let own = [
        ("model.num_layers", 4),
        ("model.hidden_size", 64),
        ("model.seq_len", 64),
        ("training.global_batch_size", 16),
        ("training.micro_batch_size", 2),
    ];
    own.iter().chain(degrees).map(|(key, value)| ((*key).to_owned(), toml::Value::Integer(*value))).collect()
}

/// Products pack their right operands once each: the weights take as long for a micro-batch of one sequence as for one
/// of several, so a step of eight micro-batches takes longer than one of a single micro-batch.
#[test]
fn products_of_few_rows_take_longer_where_operands_are_packed() {
    let packs = Cluster { constants: [("packed_bytes".to_owned(), 16.0)].into(), ..machine() };
    let seconds = |cluster: &Cluster, samples: i64| {
        let micro = [("training.micro_batch_size", samples), ("pipeline.num_microbatches", 16 / samples)];
        let keys = keys(&[&micro[..], &[("model.hidden_size", 512), ("model.seq_len", 16)]].concat());
        let job = Job::new(configured(&keys).unwrap(), &mut Counter::default()).unwrap();
        job.predict(&System::known(cluster.system()).unwrap().on(cluster), cluster).unwrap().seconds
    };
    let alone = machine().of_cards(1).unwrap();
    let [few, many] = [2, 16].map(|samples| seconds(&packs, samples) - seconds(&alone, samples));
    assert!(many > 0.0 && few > 3.0 * many, "{few} {many}");
    // Packed in memory of twice the bandwidth.
    let wide = Cluster { card: Card { bandwidth: 2e10, ..packs.card.clone() }, ..packs.clone() };
    assert!(seconds(&wide, 2) < seconds(&packs, 2));
}

/// One rank has both cores, with their help; two have one each; more take turns.
#[test]
fn ranks_share_cores() {
    let machine = machine();
    let even = machine.cores.unwrap();
    for (ranks, stretch) in [(1.0, 1.0 / 1.5), (2.0, 1.0), (3.0, 1.5), (8.0, 4.0)] {
        assert!((even.stretch(ranks) - stretch).abs() < 1e-12, "{ranks}: {}", even.stretch(ranks));
    }
    // Two ranks wait for the slower core; a rank alone does not, and of more ranks than cores some always have work.
    let uneven = Cores { uneven: 0.1, ..even };
    for (ranks, stretch) in [(1.0, 1.0 / 1.5), (2.0, 1.1), (3.0, 1.5)] {
        assert!((uneven.stretch(ranks) - stretch).abs() < 1e-12, "{ranks}: {}", uneven.stretch(ranks));
    }
    let many = machine.of_cards(8).unwrap();
    assert_eq!((many.hosts, many.cards(), many.card.memory), (1, 8, 2e9));
}

/// Eight ranks on two cores take no less than two, and a pipeline of two ranks no less than half of its work; a step
/// on twice as many cores is faster.
#[test]
fn more_ranks_than_cores_gain_nothing() {
    let system = System::known(machine().system()).unwrap().on(&machine());
    assert_eq!((system.name.as_str(), system.constants.launch), ("meshwork-cpu", 5e-6));
    let seconds = |degrees: &[(&str, i64)], cluster: &Cluster| {
        let job = Job::new(configured(&keys(degrees)).unwrap(), &mut Counter::default()).unwrap();
        let step = job.predict(&system, cluster).unwrap();
        assert!(step.seconds > 0.0 && step.mfu < 1.0 && step.bubble >= 0.0, "{step:?}");
        step.seconds
    };
    let on = |ranks: usize| machine().of_cards(ranks).unwrap();
    let (one, two) = (seconds(&[], &on(1)), seconds(&[("parallelism.dp", 2)], &on(2)));
    let (eight, four) =
        (seconds(&[("parallelism.dp", 8)], &on(8)), Cores { count: 4, help: 3.0, uneven: 0.0, processes: 1 });
    assert!(two < one && one < 1.5 * two && eight >= two, "{one} {two} {eight}");
    let pipeline = [("parallelism.pp", 2)];
    let (staged, whole) = (seconds(&pipeline, &on(2)), one);
    assert!(staged > 0.6 * whole && staged < 1.5 * whole, "{staged} {whole}");
    let more = Cluster { cores: Some(four), ..on(8) };
    assert!(seconds(&[("parallelism.dp", 8)], &more) < eight);
}

/// Ranks of a process reach each other through memory, those of two processes over a slower link, which only what they
/// send each other takes.
#[test]
fn ranks_are_shared_out_over_processes() {
    let text = MACHINE.replace("between = 1e10", "between = 1e8").replace("launch = 5e-6", "far_latency = 1e-3");
    let machine = Cluster::from_toml("machine.toml", &text).unwrap();
    let (threads, two) = (machine.of_cards(4).unwrap(), machine.of_cards(4).unwrap().over(2).unwrap());
    assert_eq!([&[0, 1][..], &[2, 3], &[0, 2]].map(|members| two.rate(members).1), [false, false, true]);
    let [of_two, of_threads] = [&two, &threads].map(|cluster| cluster.cores.unwrap().stretch(4.0));
    assert!(!threads.rate(&[0, 2]).1 && of_two == of_threads);
    let system = System::known(machine.system()).unwrap().on(&machine);
    let seconds = |degrees: &[(&str, i64)], cluster: &Cluster| {
        let job = Job::new(configured(&keys(degrees)).unwrap(), &mut Counter::default()).unwrap();
        job.predict(&system, cluster).unwrap().seconds
    };
    // Ranks of tp are neighbours, in one process: the sum of gradients alone goes between the two.
    let (dp, tp) = ([("parallelism.dp", 4)], [("parallelism.tp", 2), ("parallelism.dp", 2)]);
    for degrees in [&dp[..], &tp] {
        assert!(seconds(degrees, &two) > seconds(degrees, &threads), "{degrees:?}");
    }
    let inside = Cluster { inside: 1e8, ..two.clone() };
    assert!(seconds(&tp, &inside) > seconds(&tp, &two));
    let fault = |cluster: &Cluster, processes: usize| cluster.over(processes).unwrap_err().to_string();
    assert_eq!(fault(&threads, 3), "two cores: 3 processes for 4 ranks of a host; use a number that divides them");
    assert_eq!(
        fault(&Cluster { between: 0.0, ..threads.clone() }, 2),
        "two cores: the links between processes have no number; \
         measure them by `mpirun -n 2 plan --measure FILE`, or give links.between"
    );
    let cards = Cluster::known("dgx-h100").unwrap();
    assert_eq!(fault(&cards, 2), "NVIDIA DGX H100: its ranks are cards; only threads that share cores have processes");
    assert_eq!(Cluster::from_toml("again.toml", &two.to_toml()).unwrap(), two);
}

/// What is measured between processes has no part of what is measured inside one. Threads stand for them here.
#[test]
fn links_between_processes_are_added_to_a_machine() {
    let found = measure::between(&meshwork_core::World::Threads(2), &machine()).unwrap();
    let (latency, between) = (found.constants["far_latency"], found.between);
    assert!(latency > 0.0 && latency < 1.0 && between > 1e6 && between <= found.inside, "{latency} {between}");
    let constants = machine().constants;
    assert_eq!(Cluster { between: machine().between, constants, ..found }, machine());
}

/// A search on cores trains in f32, and its command names no card.
#[test]
fn plans_of_a_machine_are_found() {
    let (machine, mut counter) = (machine(), Counter::default());
    let system = System::known(machine.system()).unwrap().on(&machine);
    let mut given = keys(&[]);
    given.remove("training.global_batch_size");
    let found = search(&given, 16, &system, &machine, 3, &mut counter, &mut |_, _, _| {}).unwrap();
    let command = found.best[0].command("x");
    assert!(command.contains("training.dtype=f32") && !command.contains("--device"), "{command}");
}

/// The text of a cluster is read as the cluster.
#[test]
fn a_cluster_is_written_as_it_is_read() {
    let machine = machine();
    assert_eq!(Cluster::from_toml("again.toml", &machine.to_toml()).unwrap(), machine);
}

#[test]
fn machines_that_contradict_themselves_are_refused() {
    let fault =
        |from: &str, to: &str| Cluster::from_toml("x.toml", &MACHINE.replace(from, to)).unwrap_err().to_string();
    assert_eq!(
        fault("help = 1.5", "help = 2.5"),
        "x.toml: cores.count and cores.help contradict each other; \
         count is at least 1; help, how many times as fast a rank is with all cores, is 1 to count"
    );
    assert!(fault("launch = ", "lunch = ").starts_with("x.toml: [constants] has lunch; known are products, wave"));
    // A step was predicted to take less than no time, or none that is a number.
    for (text, told) in
        [("launch = -1", "launch = -1"), ("memory = 0", "memory = 0"), ("attention = nan", "attention = NaN")]
    {
        assert_eq!(
            fault("launch = 5e-6", text),
            format!(
                "x.toml: constants.{told}; \
                 use a number above 0; times and bytes, and attention that is not fused, may be 0"
            )
        );
    }
    let text = MACHINE.replace("launch = 5e-6", "launch = 0\nattention = 0");
    assert!(Cluster::from_toml("x.toml", &text).is_ok());
}

/// What `gpu-check speed` writes of a card (benches/gpu/test_check.py writes the same) is a cluster of one card; more
/// of them need a link.
#[test]
fn a_card_that_gpu_check_measured_is_read() {
    let text = include_str!("../fixtures/card.toml");
    let cluster = Cluster::from_toml("card.toml", text).unwrap();
    assert_eq!((cluster.cards(), cluster.card.bf16, cluster.card.memory, cluster.host), (1, 4e12, 8e9, 1e8));
    let system = System::known(cluster.system()).unwrap().on(&cluster);
    assert_eq!((system.name.as_str(), system.constants.products, system.constants.attention), ("meshwork", 1.0, 0.5));
    let step = Job::new(configured(&keys(&[])).unwrap(), &mut Counter::default()).unwrap();
    assert!(step.predict(&system, &cluster).unwrap().fits);
    let more = |from: &str, to: &str| Cluster::from_toml("card.toml", &text.replace(from, to));
    let fault = more("cards_per_host = 1", "cards_per_host = 2").unwrap_err().to_string();
    assert!(fault.contains("its inside is not given") && fault.contains("scripts/gpu-check.sh speed"), "{fault}");
    let fault = more("hosts = 1", "hosts = 2").unwrap_err().to_string();
    assert!(fault.contains("its between is not given"), "{fault}");
    assert_eq!(Cluster::from_toml("again.toml", &cluster.to_toml()).unwrap(), cluster);
    assert_eq!(
        cluster.of_cards(4).unwrap_err().to_string(),
        "a card: 4 hosts, and their links have no number; \
         give links.between, in bytes a second of a card, or more cards_per_host and links.inside"
    );
    let linked = text.replace("host = 1.000e+08", "host = 1e8\ninside = 2e8").replace("per_host = 1", "per_host = 2");
    assert_eq!(Cluster::from_toml("card.toml", &linked).unwrap().cards(), 2);
}

/// A measured machine has what a search needs, and its file is read.
#[test]
fn this_machine_is_measured() {
    let (found, disturbance) = measure::measure(&measure::TINY, &mut |_, _, _| {}).unwrap();
    let read = Cluster::from_toml("this.toml", &found.to_toml()).unwrap();
    assert!(read.source.ends_with(&disturbance.to_string()) && disturbance.spread >= 1.0, "{}", read.source);
    assert_eq!(disturbance.others.is_some(), cfg!(target_os = "linux"));
    assert_eq!(read.cores.unwrap().count, meshwork_core::pool::threads());
    assert!(read.card.f32 > 1e6 && read.card.bandwidth > 1e6, "{read:?}");
    let names: Vec<&str> = read.constants.keys().map(String::as_str).collect();
    assert_eq!(names, ["attention", "far_latency", "latency", "launch", "optimizer", "packed_bytes"]);
}

/// Programs that take the cores while a machine is measured are noticed.
#[test]
#[cfg(target_os = "linux")]
fn a_machine_that_is_busy_says_so() {
    let spin = || std::process::Command::new("sh").args(["-c", "while kill -0 $PPID; do :; done"]).spawn().unwrap();
    let mut others: Vec<_> = (0..meshwork_core::pool::threads()).map(|_| spin()).collect();
    let measured = measure::measure(&measure::TINY, &mut |_, _, _| {});
    others.iter_mut().for_each(|other| other.kill().and_then(|()| other.wait()).map(drop).unwrap());
    let warning = measured.unwrap().1.warning().unwrap();
    assert!(warning.starts_with("this machine was busy: other programs took "), "{warning}");
}

/// Times that are operations at a rate, and elements of the right operand, give back both numbers. Where products
/// of few rows are faster than others, packing takes no time, and the rate is that of all.
#[test]
fn products_are_a_rate_and_the_packing_of_their_right_operands() {
    let shapes = [[64, 2048, 512], [64, 512, 512], [512, 2048, 512], [2048, 512, 512]];
    let of = |nanos: &dyn Fn([f64; 3]) -> f64| {
        let mut products = measure::Products::default();
        shapes.iter().for_each(|shape| products.add(*shape, nanos(shape.map(|extent| extent as f64)) as u64));
        products.rates()
    };
    let [rate, pack] = of(&|[m, n, k]| 2.0 * m * n * k / 128.0 + 0.5 * n * k);
    assert!((rate / 128e9 - 1.0).abs() < 1e-6 && (pack / 5e-10 - 1.0).abs() < 1e-6, "{rate} {pack}");
    let [rate, pack] = of(&|[m, n, k]| 2.0 * m * n * k / if m > 64.0 { 100.0 } else { 200.0 });
    assert!(pack == 0.0 && (1e11..2e11).contains(&rate), "{rate} {pack}");
}
