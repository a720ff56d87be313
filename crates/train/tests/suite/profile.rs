//! The profile of a step: it adds up, it counts what the device counts, and it changes nothing.

use meshwork_core::World;
use meshwork_core::profile::{Class, Detail, Span};
use meshwork_core::{CommError, Rank, Record, ReduceOp};
use meshwork_cpu::Cpu;
use meshwork_pipeline::partition::{Level, Options as PlanOptions, Profile as LayerProfile, States, plan};
use meshwork_pipeline::{ActionKind, Timeline};
use meshwork_train::config::{Args, Config};
use meshwork_train::profile::{
    Ceilings, Profile, Profiler, Rows, SliceKind, layers, schedule_timelines, slices, write_trace,
};
use meshwork_train::{Data, Outcome, TrainError, Trainer, load, train};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const MESHES: [&str; 3] = ["dp=1", "dp=2,tp=2,pp=2", "tp=2,pp=2"];

fn loaded(mesh: &str, more: &[&str]) -> (Config, Data) {
    let small = ["model.hidden_size=32", "model.seq_len=32", "training.global_batch_size=8", "training.steps=4"];
    let small = small.iter().chain(["metrics.sample_tokens=8"].iter());
    let settings = small.chain(more).flat_map(|setting| ["--set", *setting]);
    load(&Args::parse(["--mesh", mesh].into_iter().chain(settings))).unwrap()
}

fn run(mesh: &str, more: &[&str]) -> Outcome {
    let (config, data) = loaded(mesh, more);
    train(&config, &data, None, &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{mesh}: {error}"))
}

fn profile(mesh: &str, more: &[&str]) -> Profile {
    run(mesh, &[&["metrics.profile=true"], more].concat()).profile.unwrap()
}

/// Spans, each inside or beside every other one, except for flights.
fn assert_nested(what: &str, spans: &[Span]) {
    let mut spans: Vec<&Span> = spans.iter().filter(|span| span.class != Class::Flight).collect();
    spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end), !span.class.is_frame()));
    let mut open: Vec<&Span> = Vec::new();
    for span in spans {
        assert!(span.start <= span.end, "{what}: {span:?}");
        while open.last().is_some_and(|outer| outer.end <= span.start && outer.class != Class::Step) {
            open.pop();
        }
        if span.class == Class::Step {
            assert!(open.iter().all(|outer| outer.end <= span.start), "{what}: {span:?} inside {open:?}");
            open.clear();
        } else {
            let outer = open.last().unwrap_or_else(|| panic!("{what}: {span:?} outside of any step"));
            assert!(span.end <= outer.end, "{what}: {span:?} reaches out of {outer:?}");
            assert!(outer.class.is_frame(), "{what}: {span:?} lies in {outer:?}");
        }
        open.push(span);
    }
}

/// The actions of a step, by rank, are those of the schedule; and the prediction has the same actions.
#[test]
fn the_pipeline_of_a_step_as_predicted_and_as_it_ran() {
    let flush = "model.tie_embeddings=false";
    for (schedule, more) in
        [("1f1b", flush), ("zb_h2", flush), ("zb_v", flush), ("pipedream_2bw", "training.max_norm=0")]
    {
        let set = [format!("pipeline.schedule={schedule}"), more.to_owned(), flush.to_owned()];
        let set: Vec<&str> = set.iter().map(String::as_str).chain(["metrics.profile=true"]).collect();
        let (config, _) = loaded("dp=1,pp=2", &set);
        let profile = run("dp=1,pp=2", &set).profile.unwrap();
        let [predicted, measured] = schedule_timelines(&profile, &config.plan().unwrap()).unwrap().unwrap();
        let kinds = |timeline: &Timeline, rank: usize| {
            let mut kinds: Vec<ActionKind> = timeline.ranks[rank].iter().map(|interval| interval.action.kind).collect();
            kinds.sort_unstable();
            kinds
        };
        for rank in 0..2 {
            assert_eq!(kinds(&measured, rank), kinds(&predicted, rank), "{schedule}, pp rank {rank}");
            let row = &measured.ranks[rank];
            assert!(row.windows(2).all(|pair| pair[0].end <= pair[1].start), "{schedule}: {row:?}");
        }
        assert!(measured.makespan() > 0.0 && predicted.ideal() > 0.0, "{schedule}");
    }
}

#[test]
fn spans_nest_and_slices_add_up_to_the_steps() {
    for mesh in MESHES {
        let profile = profile(mesh, &["parallelism.sequence_parallel=true"]);
        let rows = Rows::new(&profile);
        assert_eq!(rows.steps.iter().copied().collect::<Vec<_>>(), [2, 3, 4], "{mesh}");

        let steps = |spans: &[Span]| -> Vec<(u64, u64)> {
            let steps = spans.iter().filter(|span| span.class == Class::Step);
            steps.map(|span| (span.start, span.end)).collect()
        };
        let spans: Vec<&[Span]> = profile.tracks.iter().map(|track| &track.spans[..]).collect();
        for (rank, slices) in slices(&spans).iter().enumerate() {
            assert_nested(&format!("{mesh}: rank {rank}"), spans[rank]);
            // Without gap or overlap from the start of each step to its end.
            let mut own = slices.iter().filter(|slice| slice.kind != SliceKind::Hidden);
            for (start, end) in steps(spans[rank]) {
                let mut at = start;
                while at < end {
                    let slice = own.next().unwrap();
                    assert_eq!(slice.start, at, "{mesh}: rank {rank}: {slice:?}");
                    at = slice.end;
                }
                assert_eq!(at, end, "{mesh}: rank {rank}");
            }
            assert_eq!(own.next(), None, "{mesh}: rank {rank}");
            let of_rank: u64 = rows.classes.iter().map(|(sum, _)| sum.ranks[rank]).sum();
            let wanted: u64 = steps(spans[rank]).into_iter().map(|(start, end)| end - start).sum();
            assert_eq!(of_rank, wanted, "{mesh}: rank {rank}");
        }

        // The time in which any rank was in a step.
        let mut all: Vec<(u64, u64)> = spans.iter().flat_map(|spans| steps(spans)).collect();
        all.sort_unstable();
        let (mut whole, mut reached) = (0, 0);
        for (start, end) in all {
            whole += end.max(reached) - start.max(reached);
            reached = reached.max(end);
        }
        let machine = rows.machine();
        assert!((machine - whole as f64).abs() < 1e-6 * whole as f64, "{mesh}: {machine} ns of {whole}");
        for (sum, operations) in &rows.classes {
            let parts: f64 = operations.iter().map(|row| row.machine).sum();
            assert!((parts - sum.machine).abs() <= 1e-6 * machine, "{mesh}: {}", sum.label);
        }
        let table = rows.to_string();
        for wanted in ["products", "  gemm nt ", "attention", "optimizer", "of peak: against ", "steps 2 to 4"] {
            assert!(table.contains(wanted), "{mesh}: no {wanted:?} in\n{table}");
        }
    }
}

/// Number of occurrences of each (operation, group).
fn tally<'a>(calls: impl Iterator<Item = (&'a str, &'a str)>) -> BTreeMap<(String, String), usize> {
    let mut tally = BTreeMap::new();
    calls.for_each(|(op, group)| *tally.entry((op.to_owned(), group.to_owned())).or_default() += 1);
    tally
}

#[test]
fn flops_are_those_of_the_meter_and_calls_those_of_the_log() {
    let (config, data) = loaded("dp=2,tp=2,pp=2", &["training.steps=2"]);
    let mesh = config.mesh().unwrap();
    let profiler = Profiler::new(2, 1, &*Cpu::device());
    let ranks = World::Threads(8).run(|world| {
        let probe = profiler.probe(&**world.communicator());
        let rank = Arc::new(Rank::new(&mesh, probe.communicator(world.communicator().clone()))?);
        let device = probe.device(Cpu::device());
        let mut trainer = Trainer::new(config.model(), &config.plan()?, rank.clone(), device.clone())?;
        let batch = data.batch(0, 8, trainer.samples())?;
        let mut step = |number| probe.step(number, || trainer.observed_step(&batch, |event| probe.observe(event)));
        step(1)?;
        let before = device.meter().total_flops();
        let report = step(2)?;
        let counted = device.meter().total_flops() - before;
        Ok::<_, TrainError>((counted, report.records, probe.track(&rank).unwrap()))
    });
    for (counted, records, track) in ranks.unwrap() {
        let flops: u64 = track.spans.iter().map(|span| span.flops).sum();
        assert_eq!(flops, counted, "{}", track.name);
        let mut products = 0;
        for span in &track.spans {
            match span.detail {
                Detail::Product([m, n, k]) => {
                    assert_eq!((span.class, span.flops), (Class::Product, 2 * (m * n * k) as u64), "{span:?}");
                    products += 1;
                }
                _ => assert!(span.class == Class::Attention || span.flops == 0, "{span:?}"),
            }
        }
        assert!(products > 0, "{}", track.name);

        // The report of the step is one more sum over the world, which it does not count itself.
        let report = [("all_reduce", "world")].into_iter();
        let logged = tally(records.iter().map(|Record { op, group, .. }| (op.name(), &group[..])).chain(report));
        let of_class = |class: Class| {
            let spans = track.spans.iter().filter(move |span| span.class == class);
            tally(spans.filter_map(|span| Some((span.name, &span.meeting()?.group.0[..]))))
        };
        for class in [Class::Post, Class::Flight, Class::Wait] {
            assert_eq!(of_class(class), logged, "{}: {class:?}", track.name);
        }
        let actions = |name| track.spans.iter().filter(|span| span.class == Class::Action && span.name == name).count();
        let micros = config.pipeline.num_microbatches;
        assert_eq!((actions("forward"), actions("backward")), (micros, micros), "{}", track.name);
    }
}

#[test]
fn members_of_a_communication_know_it_by_the_same_name() {
    let profiler = Profiler::new(2, 1, &*Cpu::device());
    let tracks = World::Threads(3).run(|world| {
        let probe = profiler.probe(&**world.communicator());
        let world = meshwork_core::Group::from(probe.communicator(world.communicator().clone()));
        world.barrier()?; // not recorded, but numbered
        let (me, mut x) = (world.rank(), [1.0f32]);
        probe.step(2, || {
            world.all_reduce_slice(&mut x, ReduceOp::Sum)?;
            let sent = world.start_send(meshwork_core::Buffer::from_slice(&x), (me + 1) % 3, 0)?;
            world.recv_slice(&mut x, (me + 2) % 3, 0)?;
            sent.wait().map(drop)
        })?;
        assert_eq!(x, [3.0]);
        Ok::<_, CommError>(probe.track(&Rank::alone()?).unwrap())
    });
    let tracks = tracks.unwrap();
    let meetings = |rank: usize, name: &str| -> Vec<_> {
        let posts = tracks[rank].spans.iter().filter(|span| span.class == Class::Post && span.name == name);
        posts.map(|span| span.meeting().unwrap().clone()).collect()
    };
    for rank in 0..3 {
        assert_eq!(meetings(rank, "all_reduce"), meetings(0, "all_reduce"));
        assert_eq!(meetings(rank, "all_reduce")[0].seq, 1);
        assert_eq!(meetings(rank, "send"), meetings((rank + 1) % 3, "recv"));
        assert_eq!(meetings(rank, "send")[0].message, Some((rank, (rank + 1) % 3)));
    }
}

#[test]
fn the_timeline_is_json_with_a_track_per_rank() {
    let profile = profile("dp=2,tp=2,pp=2", &["metrics.profile_steps=1"]);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("timeline.json");
    write_trace(&profile, &path).unwrap();
    let trace: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |ph: &'static str| events.iter().filter(move |event| event["ph"] == ph);

    let names: Vec<(u64, &str)> = of("M")
        .filter(|event| event["name"] == "thread_name")
        .map(|event| (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
        .collect();
    let wanted: Vec<String> =
        (0..8).map(|rank| format!("rank {rank} (dp={},tp={},pp={})", rank / 2 % 2, rank % 2, rank / 4)).collect();
    assert_eq!(names, wanted.iter().enumerate().map(|(rank, name)| (rank as u64, &name[..])).collect::<Vec<_>>());

    for rank in 0..8u64 {
        let own = || of("X").filter(move |event| event["tid"] == rank);
        let flops: u64 = own().filter_map(|event| event["args"]["flops"].as_u64()).sum();
        assert_eq!(flops, profile.tracks[rank as usize].spans.iter().map(|span| span.flops).sum::<u64>());
        assert!(flops > 0);
        let named = |name: &str| own().filter(|event| event["name"] == name).count();
        let stage = rank / 4;
        assert_eq!((named("step 2"), named(&format!("backward micro 1, stage {stage}"))), (1, 1), "rank {rank}");
        let step = own().find(|event| event["name"] == "step 2").unwrap();
        let (start, length) = (step["ts"].as_f64().unwrap(), step["dur"].as_f64().unwrap());
        for event in own() {
            let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            assert!(dur >= 0.0 && ts >= start - 1e-6 && ts + dur <= start + length + 1e-3, "{event}");
        }
    }
    // Both ends of each of those that may overlap others.
    let ids = |ph| of(ph).map(|event| event["id"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(ids("b"), ids("e"));
}

#[test]
fn a_profile_changes_no_number_and_without_one_nothing_is_recorded() {
    for mesh in MESHES {
        let (with, without) = (run(mesh, &["metrics.profile=true"]), run(mesh, &[]));
        assert_eq!(with.loss.map(f64::to_bits), without.loss.map(f64::to_bits), "{mesh}");
        assert_eq!(with.sample, without.sample, "{mesh}");
        assert_eq!(without.profile, None, "{mesh}");
    }
    // Only the requested steps; a run of one step profiles that step.
    for (settings, wanted) in [
        (["training.steps=4", "metrics.profile_steps=1"], vec![2]),
        (["training.steps=1", "metrics.profile_steps=5"], vec![1]),
        (["training.steps=3", "metrics.profile_steps=9223372036854775807"], vec![2, 3]),
    ] {
        let profile = profile("dp=2", &settings);
        profile.tracks.iter().for_each(|track| assert_eq!(track.steps().collect::<Vec<_>>(), wanted));
    }
    let none = Profile { tracks: Vec::new(), ceilings: Ceilings { flops: None, bandwidth: 1.0, threads: Some(1) } };
    assert!(Rows::new(&none).to_string().starts_with("No step was profiled"));
}

/// A profile of the layers: the model cut at every layer, in the format that the planner reads.
#[test]
fn layers_are_profiled_in_the_planners_format() {
    let file = std::env::temp_dir().join(format!("meshwork_layers_{}.txt", std::process::id()));
    let (config, data) =
        loaded("dp=2,pp=2", &["model.dropout=0.1", &format!("metrics.layer_profile={}", file.display())]);
    let outcome = train(&config, &data, None, &AtomicBool::new(false)).unwrap();
    let profile: LayerProfile = fs::read_to_string(&file).unwrap().parse().unwrap();
    fs::remove_file(&file).unwrap();

    let ids: Vec<&str> = profile.layers().iter().map(|layer| layer.id.as_str()).collect();
    assert_eq!(ids, ["input", "layer.0", "layer.1", "layer.2", "layer.3", "output"]);
    let names: Vec<&str> = profile.layers().iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["wte, wpe", "h.0", "h.1", "h.2", "h.3", "ln_f, wte"]);
    assert_eq!(profile.edges(), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]);
    let (vocab, hidden, seq, ffn) = (256.0, 32.0, 32.0, 128.0);
    let block = 4.0 * hidden * hidden + 4.0 * hidden + 2.0 * hidden * ffn + ffn + hidden + 4.0 * hidden;
    let hidden_states = config.training.micro_batch_size as f64 * seq * hidden * 4.0;
    for (at, layer) in profile.layers().iter().enumerate() {
        let parameters = match at {
            0 => (vocab + seq) * hidden,
            5 => vocab * hidden + 2.0 * hidden, // with the table, which it shares
            _ => block,
        };
        assert_eq!(layer.parameter_bytes, parameters * 4.0, "{layer:?}");
        if at < 5 {
            assert_eq!(layer.activation_bytes, hidden_states, "{layer:?}");
        }
        assert!(layer.backward_ms > 0.0 && layer.forward_ms > 0.0, "{layer:?}");
    }
    // A planner can start from it.
    let states = States::new(&profile).unwrap();
    let level = Level { machines: 2, bytes_per_second: 1e9 };
    let plan = plan(&states, &[level], &PlanOptions { straight: true, ..PlanOptions::default() }).unwrap();
    assert_eq!(plan.levels[0].len(), 2);

    // The run has the same results without it.
    let plain = run("dp=2,pp=2", &["model.dropout=0.1"]);
    assert_eq!((outcome.loss, outcome.sample), (plain.loss, plain.sample));
}

/// The profile is of the model on one rank, so the settings of the training pipeline do not matter.
#[test]
fn layers_of_any_pipeline_are_profiled() {
    let pipedream = ["model.tie_embeddings=false", "training.max_norm=0", "pipeline.schedule=pipedream"];
    for (mesh, more) in [
        ("pp=4", vec!["pipeline.replication=[3,1]"]),
        ("pp=2", [&pipedream[..], &["pipeline.vertical_sync=true"]].concat()),
    ] {
        let (config, data) = loaded(mesh, &more);
        let profile = layers(&config.model(), &config.plan().unwrap(), &data, Cpu::device(), &AtomicBool::new(false));
        let profile = profile.unwrap_or_else(|error| panic!("{more:?}: {error}"));
        assert_eq!(profile.layers().len(), config.model.num_layers + 2, "{more:?}");
    }
}

#[test]
fn a_layer_profile_that_cannot_be_written_or_is_another_file_is_refused() {
    let refusal = |line: &str| load(&Args::parse(line.split_whitespace())).unwrap_err().to_string();
    let folder = refusal("--set metrics.layer_profile=no/such/folder/layers.txt");
    assert_eq!(
        folder,
        "metrics.layer_profile = no/such/folder/layers.txt: its folder does not exist; use a file that can be written"
    );
    let same = refusal("--set metrics.layer_profile=a.txt --set metrics.profile=true --set metrics.trace=a.txt");
    assert_eq!(same, "metrics.layer_profile = a.txt: is the file of metrics.trace too; use another file");
}
