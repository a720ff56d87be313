//! Published runs, as predicted by counts of this library's layers.

#[path = "published/goodput.rs"]
mod goodput;
#[path = "published/machine.rs"]
mod machine;
#[path = "published/memory.rs"]
mod memory;
#[path = "published/race.rs"]
mod race;
#[path = "published/search.rs"]
mod search;

use meshwork_plan::fit::{errors, fit, half, published};
use meshwork_plan::search::Keys;
use meshwork_plan::table::{Table, configured};
use meshwork_plan::{Cluster, Counter, Job, Prediction, System};
use std::collections::BTreeMap;

fn job(keys: &[(&str, toml::Value)]) -> Job {
    let keys: BTreeMap<String, toml::Value> =
        keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    Job::new(configured(&keys).unwrap(), &mut Counter::default()).unwrap()
}

fn predict(job: &Job, system: &str, cluster: &Cluster) -> Prediction {
    job.predict(&System::known(system).unwrap(), cluster).unwrap()
}

fn eight_billion(tp: i64, pp: i64) -> Vec<(&'static str, toml::Value)> {
    vec![
        ("model.preset", "llama3-8b".into()),
        ("parallelism.dp", (16 / (tp * pp)).into()),
        ("parallelism.tp", tp.into()),
        ("parallelism.pp", pp.into()),
        ("training.dtype", "bf16".into()),
        ("training.global_batch_size", 64.into()),
        ("training.micro_batch_size", 1.into()),
        ("memory.recompute", "full".into()),
    ]
}

/// What is stated in docs/planner.md, for the rows that no constant was fitted to.
#[test]
fn rows_that_were_not_fitted_are_predicted() {
    for (name, median, ninth_decile) in [("fsdp-h100", 0.05, 0.12), ("fsdp-a100", 0.05, 0.12)] {
        let system = System::known(name).unwrap();
        let mut off = Vec::new();
        for table in published(&system, &mut Counter::default()).unwrap() {
            for row in half(&table.rows, true) {
                let step = row.job.predict(&system, &row.cluster).unwrap();
                assert!(step.fits, "{name}, {}: it ran, and {} bytes are predicted", table.name, step.memory);
                off.push((step.seconds / row.measured.unwrap() - 1.0).abs());
            }
        }
        off.sort_by(f64::total_cmp);
        assert!(off[off.len() / 2] < median, "{name}: median {}", off[off.len() / 2]);
        assert!(off[off.len() * 9 / 10] < ninth_decile, "{name}: nine of ten {}", off[off.len() * 9 / 10]);
    }
}

/// Rows that were made with other constants are fitted, and no constant leaves what it can be on the way.
#[test]
fn a_fit_finds_the_constants_of_its_rows() {
    let own = System::known("fsdp-h100").unwrap();
    let mut other = own.clone();
    for (name, value) in [("products", 0.5), ("attention", 0.3), ("passes", 1.5), ("interference", 0.1)] {
        other.constants.set(name, value);
    }
    let mut tables = published(&own, &mut Counter::default()).unwrap();
    for row in tables.iter_mut().flat_map(|table| &mut table.rows) {
        row.measured = Some(row.job.predict(&other, &row.cluster).unwrap().seconds);
    }
    let rows: Vec<_> = tables.iter().map(|table| half(&table.rows, false)).collect();
    let mut begin = own.clone();
    begin.constants.set("passes", 0.01);
    let fitted = fit(&begin, &rows).unwrap();
    let passes = fitted.constants.get("passes").unwrap();
    assert!((0.5..=4.0).contains(&passes), "{passes}");
    for table in &tables {
        let found = errors(&fitted, &half(&table.rows, true)).unwrap();
        assert!(found.most < 0.03, "{}: {found:?}", table.name);
    }
}

/// By hand: two rows of which one is 10% too slow, one as measured; and their order is wrong.
#[test]
fn errors_are_counted_by_hand() {
    let system = System::known("fsdp-a100").unwrap();
    let tables = published(&system, &mut Counter::default()).unwrap();
    let first = tables[0].rows[1].clone();
    let seconds = first.job.predict(&system, &first.cluster).unwrap().seconds;
    let row = |measured: f64| meshwork_plan::table::Row { measured: Some(measured), ..first.clone() };
    let [exact, fast] = [row(seconds), row(seconds / 1.1)];
    let found = errors(&system, &[&exact, &fast]).unwrap();
    assert!((found.most - 0.1).abs() < 1e-9 && found.rows == 2, "{found:?}");
    assert_eq!((found.pairs, found.fit), (1, 2));
}

/// A faster card or link, or more memory, never makes a step slower or the run too large.
#[test]
fn more_of_anything_is_never_slower() {
    for (tp, pp) in [(1, 1), (2, 1), (2, 4), (8, 2)] {
        let job = job(&eight_billion(tp, pp));
        for system in System::names() {
            let plain = Cluster { hosts: 2, ..Cluster::known("dgx-a100").unwrap() };
            let before = predict(&job, system, &plain);
            type Change = fn(&mut Cluster);
            let changes: [(&str, Change); 6] = [
                ("bf16", |more| more.card.bf16 *= 2.0),
                ("bandwidth", |more| more.card.bandwidth *= 2.0),
                ("memory", |more| more.card.memory *= 2.0),
                ("inside", |more| more.inside *= 2.0),
                ("between", |more| more.between *= 2.0),
                // The same peak from fewer multiprocessors: a product loses less at the ends of its waves.
                ("units", |more| more.card.units /= 2.0),
            ];
            for (what, change) in changes {
                let mut more = plain.clone();
                change(&mut more);
                let after = predict(&job, system, &more);
                assert!(after.seconds <= before.seconds, "{system}, {what}: {} {}", after.seconds, before.seconds);
                assert!(after.fits || !before.fits, "{system}, {what}");
            }
        }
    }
}

/// Products of f32 take the time of their operands' type: each peak makes steps faster where products have it, and
/// nowhere else.
#[test]
fn each_precision_of_products_has_its_peak() {
    type Peak = fn(&mut Cluster) -> &mut f64;
    let peaks: [(&str, Peak); 3] = [
        ("f32", |cluster| &mut cluster.card.f32),
        ("tf32", |cluster| &mut cluster.card.tf32),
        ("bf16", |cluster| &mut cluster.card.bf16),
    ];
    let plain = Cluster { hosts: 2, ..Cluster::known("dgx-a100").unwrap() };
    assert_eq!(plain.card.tf32, 156e12);
    let mut steps = Vec::new();
    for (dtype, _) in peaks {
        let mut keys = eight_billion(2, 1);
        keys.retain(|(key, _)| *key != "training.dtype");
        keys.push(("training.matmul_dtype", dtype.into()));
        let job = job(&keys);
        let before = predict(&job, "meshwork", &plain).seconds;
        for (name, peak) in peaks {
            let mut more = plain.clone();
            *peak(&mut more) *= 2.0;
            assert_eq!(predict(&job, "meshwork", &more).seconds < before, name == dtype, "{name} for {dtype}");
        }
        steps.push(before);
    }
    assert!(steps[0] > steps[1] && steps[1] > steps[2], "{steps:?}");
}

/// A system that does not pad its vocabulary computes the logits of 50,257 tokens slower than those of 50,304; one that
/// pads it takes the same time for both.
#[test]
fn a_vocabulary_that_is_not_padded_has_a_slow_head() {
    let cluster = Cluster::known("dgx-a100").unwrap();
    let own = System::known("megatron-deepspeed-a100").unwrap();
    let seconds = |system: &System, vocabulary: i64| {
        let mut keys = eight_billion(1, 1);
        keys.extend([("model.vocab_size", vocabulary.into()), ("model.num_layers", 2.into())]);
        job(&keys).predict(system, &cluster).unwrap().seconds
    };
    assert!(seconds(&own, 50257) > 1.1 * seconds(&own, 50304));
    let padded = System { pads: true, ..own };
    assert!((seconds(&padded, 50257) / seconds(&padded, 50304) - 1.0).abs() < 1e-3);
}

/// A collective of eight ranks has three times the latency of one of two: a tree is as deep.
#[test]
fn a_collective_takes_its_latency_for_each_doubling_of_its_group() {
    let mut system = System::known("megatron-deepspeed-a100").unwrap();
    system.constants.latency = 1e3; // seconds, beside which no bytes count
    let cluster = Cluster { hosts: 2, ..Cluster::known("dgx-a100").unwrap() };
    let exposed = |tp| job(&eight_billion(tp, 1)).predict(&system, &cluster).unwrap().exposed["all_reduce (tp)"];
    // Four times as many micro-batches, because dp is a quarter.
    assert!((exposed(8) / exposed(2) - 3.0 * 4.0).abs() < 1e-2, "{} {}", exposed(8), exposed(2));
}

/// Sums and gathers are named, and only axes with several ranks have any.
#[test]
fn exposed_collectives_have_names() {
    let cluster = Cluster { hosts: 2, ..Cluster::known("dgx-a100").unwrap() };
    let exposed = |tp, pp| predict(&job(&eight_billion(tp, pp)), "megatron-deepspeed-a100", &cluster).exposed;
    assert!(exposed(2, 1).keys().any(|name| name.ends_with("(tp)")), "{:?}", exposed(2, 1));
    assert!(exposed(2, 1).contains_key("all_reduce (dp)"));
    assert!(exposed(1, 1).keys().all(|name| !name.ends_with("(tp)")));
    assert!(!exposed(2, 8).contains_key("all_reduce (dp)"), "dp=1 has nothing to sum: {:?}", exposed(2, 8));
}

/// As many cards as no machine has threads for: four times the cards take the same time for four times the batch, but
/// for sums of gradients.
#[test]
fn thousands_of_cards_are_predicted() {
    let system = System::known("megatron-deepspeed-a100").unwrap();
    let columns = "columns = ['gpus', 'global_batch', 'micro_batch', 'hidden', 'heads', 'layers', 'seq', 'tp', 'pp']";
    let rows = "[4096, 1024, 1, 1024, 16, 16, 512, 8, 8], [16384, 4096, 1, 1024, 16, 16, 512, 8, 8]";
    let table = Table::from_toml("x", &format!("[table.a]\n{columns}\nrows = [{rows}]"), "a").unwrap();
    let rows = table.rows("a", &Keys::new(), &system, &mut Counter::default()).unwrap();
    let [some, many] = [0, 1].map(|at| {
        let row = rows[at].as_ref().unwrap();
        row.job.predict(&system, &row.cluster).unwrap()
    });
    assert!(many.seconds >= some.seconds && many.seconds < 1.05 * some.seconds, "{} {}", many.seconds, some.seconds);
    assert_eq!(many.memory, some.memory);
}

/// Tables have other names for a column, and tell a batch by its parts; keys that are given stand for columns that they
/// lack, and for no others. A row that lacks something says all of it, and what may stand there.
#[test]
fn columns_have_synonyms() {
    let rows = |columns: &str, row: &str, given: &[(&str, i64)]| {
        let table =
            Table::from_toml("runs.toml", &format!("[table.a]\ncolumns = {columns}\nrows = [{row}]"), "a").unwrap();
        let given = given.iter().map(|&(key, value)| (key.to_owned(), value.into())).collect();
        table.rows("a", &given, &System::known("meshwork").unwrap(), &mut Counter::default()).unwrap().remove(0)
    };
    let columns = "['gpus', 'global_batch', 'micro_batch', 'hidden', 'heads', 'layers', 'seq', 'pp']";
    let config =
        |row: Result<meshwork_plan::table::Row, meshwork_plan::PlanError>| format!("{:?}", row.unwrap().job.config());
    let plain = config(rows(columns, "[8, 16, 2, 128, 4, 2, 64, 2]", &[]));
    let others = [
        (
            "['num_gpus', 'gbs', 'mbs', 'd_model', 'n_heads', 'num_layers', 'seq_len', 'stages']",
            "[8, 16, 2, 128, 4, 2, 64, 2]",
        ),
        (
            "['gpus', 'batch_per_dp', 'microbatch', 'hidden', 'heads', 'layers', 'seq', 'pp']",
            "[8, 4, 2, 128, 4, 2, 64, 2]",
        ),
        ("['gpus', 'microbatches', 'mbs', 'hidden', 'heads', 'layers', 'seq', 'pp']", "[8, 2, 2, 128, 4, 2, 64, 2]"),
        // A name of its own counts, also where the sizes say what model it is.
        (
            "['model', 'gpus', 'gbs', 'mbs', 'hidden', 'heads', 'layers', 'seq', 'pp', 'global_batch']",
            "['22B', 8, 1, 2, 128, 4, 2, 64, 2, 16]",
        ),
    ];
    for (columns, row) in others {
        assert_eq!(config(rows(columns, row, &[])), plain, "{columns}");
    }
    let given = [("training.micro_batch_size", 2), ("model.seq_len", 64), ("model.num_layers", 7)];
    let short = "['gpus', 'gbs', 'hidden', 'heads', 'layers', 'pp']";
    assert_eq!(config(rows(short, "[8, 16, 128, 4, 2, 2]", &given)), plain);
    assert_eq!(
        rows(short, "[8, 16, 128, 4, 2, 2]", &[]).unwrap_err().to_string(),
        "a, row 0: no column says micro_batch (or mbs, microbatch, micro_batch_size), seq (or seq_len); \
         for all rows: --set training.micro_batch_size=N --set model.seq_len=N"
    );
}

/// A system that shares out states runs on one card too, where there is nobody to share them with.
#[test]
fn one_card_shares_nothing_out() {
    let columns = "['gpus', 'global_batch', 'micro_batch', 'hidden', 'heads', 'layers', 'seq', 'tp', 'sharding']";
    let rows = "[[1, 4, 1, 128, 4, 2, 64, 1, 'FULL_SHARD'], [2, 4, 1, 128, 4, 2, 64, 2, 'FULL_SHARD']]";
    let text = format!("[table.a]\ncolumns = {columns}\nrows = {rows}");
    for text in [text.clone(), text.replace(", 'sharding'", "").replace(", 'FULL_SHARD'", "")] {
        let table = Table::from_toml("runs.toml", &text, "a").unwrap();
        for name in System::names() {
            let system = System::known(name).unwrap();
            for row in table.rows("a", &Keys::new(), &system, &mut Counter::default()).unwrap() {
                assert!(
                    row.unwrap().job.predict(&system, &Cluster::known("dgx-a100").unwrap()).unwrap().fits,
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn a_table_that_is_wrong_is_refused() {
    let read = |text: &str, name: &str| Table::from_toml("runs.toml", text, name).map(|_| ()).unwrap_err().to_string();
    assert_eq!(read("[table.a]\ncolumns = ['gpus']\nrows = []", "b"), "runs.toml: there is no table \"b\"; it has: a");
    assert_eq!(read("[table.a]\ncolumns = ['gpus']\nrows = [[1, 2]]", "a"), "a, row 0: it has 2 values for 1 columns");
    let columns =
        "columns = ['gpus', 'global_batch', 'micro_batch', 'hidden', 'heads', 'layers', 'seq', 'tp', 'dp', 'pp']";
    let fault = |row: &str| {
        let text = format!("[table.a]\n{columns}\nrows = [{row}]");
        let table = Table::from_toml("runs.toml", &text, "a").unwrap();
        let system = System::known("meshwork").unwrap();
        table
            .rows("a", &Keys::new(), &system, &mut Counter::default())
            .unwrap()
            .remove(0)
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(fault("[8, 16, 1, 128, 4, 2, 64, 2, 2, 1]"), "a, row 0: dp=2, tp=2, pp=1 and cp=1 are not 8 cards");
    assert_eq!(
        fault("[8, 15, 1, 128, 4, 2, 64, 2, 4, 1]"),
        "a, row 0: a batch of 15 is no multiple of dp=4 micro-batches of 1"
    );
}

#[test]
fn clusters_that_contradict_themselves_are_refused() {
    let fault = |links: &str| {
        let text = format!("[cluster]\nname = 'x'\nhosts = 2\ncards_per_host = 8\n[card]\nname = 'h100'\n{links}");
        Cluster::from_toml("x.toml", &text).unwrap_err().to_string()
    };
    assert_eq!(
        fault("[links]\nbetween = 9e11"),
        "x.toml: cards of different hosts reach 9.000e11 B/s, those of one host 4.500e11; \
         links.between is for each card, in bytes a second, and no faster than links.inside"
    );
    assert_eq!(
        fault("f32 = 2e15"),
        "x.toml: the card computes 2.000e15 operations a second on f32, and 9.894e14 on bf16; \
         bf16 is no slower than f32"
    );
    assert_eq!(fault("memory = -1.0"), "x.toml: memory = -1; use a number above 0");
    Cluster::names().for_each(|name| _ = Cluster::known(name).unwrap());
}
