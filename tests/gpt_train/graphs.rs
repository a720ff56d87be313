//! Runs that queue repeated work as CUDA graphs, on the emulated device.

use crate::devices::{emulates, metrics, numbers_of, run};
use crate::program::{SMALL, events, folder};
use meshwork_pipeline::Generator;
use meshwork_testkit::{Sampled, sweeps};
use serde_json::Value;

const MORE: &str = "--set training.numerics=canonical --set model.dropout=0.1 --set model.num_layers=4 --set lr_scheduler.warmup_steps=4";

/// How rank 0 queued the last of six steps: as graphs that were captured before, but for what is too short, and for
/// collectives: the rank that arrives last queues their work, and a rank may do so for the first time in any step.
#[track_caller]
fn steady(run: &[Value], what: &str) -> [u64; 3] {
    let launches = &events(run, "end")[0]["launches"];
    let [first, last] = ["first_step", "last_step"].map(|step| {
        let of = &launches[step];
        ["asked", "launches", "graphs", "changed", "new", "short", "refused"]
            .map(|name| of[name].as_u64().unwrap_or_else(|| panic!("{what}: {name} of {launches}")))
    });
    let [asked, made, graphs, changed, new, short, refused] = last;
    assert!(first[0] > 0 && first[1] > made, "{what}: {launches}");
    assert!(refused == 0 && 10 * new < asked, "{what}: {launches}");
    assert!(made == graphs + short + new && changed > 0 && 2 * made < asked, "{what}: {launches}");
    [asked, made, changed]
}

/// Every synchronous schedule, meshes, ZeRO, recomputation, storage in 16 bits and offload: the numbers of one rank of
/// the CPU, with the steady step as graphs. Dropout, the update and the learning rate change their numbers in each
/// step. All of them if `MESHWORK_SWEEP` is `all`, as in `.ci/nightly`, else some.
#[test]
fn graphs_change_no_number() {
    if !emulates() {
        return;
    }
    let folder = folder("graphs");
    let disk = format!("--mesh dp=2 --set memory.offload=all --set memory.offload_dir={}", folder.display());
    let mut lines = vec![
        "--mesh pp=2 --set pipeline.schedule=zb_v".to_owned(),
        "--mesh dp=2,tp=2 --set parallelism.sequence_parallel=true".to_owned(),
        "--mesh dp=2 --set parallelism.zero_stage=3 --set memory.recompute=full".to_owned(),
        disk,
    ];
    if sweeps() {
        let schedules = Generator::ALL.into_iter().filter(|schedule| schedule.is_synchronous());
        lines.extend(schedules.map(|schedule| format!("--mesh pp=2 --set pipeline.schedule={}", schedule.name())));
        let others = [
            "--mesh dp=1",
            "--mesh dp=2,tp=2,pp=2",
            "--mesh tp=2 --set parallelism.sequence_parallel=true",
            "--mesh dp=2 --set parallelism.zero_stage=1",
            "--mesh dp=1 --set memory.recompute=selective",
        ];
        lines.extend(others.map(str::to_owned));
    }
    let want = numbers_of(&metrics(&folder, "cpu", &format!("{MORE} --steps 6")));
    for (seed, line) in lines.into_iter().enumerate().sampled(2) {
        let line = format!("{line} {MORE} --steps 6 --set cuda.graphs=true");
        let run = metrics(&folder, &format!("cuda-emulated:{seed}"), &line);
        assert_eq!(numbers_of(&run), want, "{line}");
        let [asked, made, changed] = steady(&run, &line);
        eprintln!("{line}: {made} launches for {asked}, {changed} kernels with new numbers");
    }
}

/// Without canonical numerics: products of the library, weights in bf16, Llama and experts, with and without graphs.
#[test]
fn graphs_change_no_number_of_fast_steps() {
    if !emulates() {
        return;
    }
    let folder = folder("fast_graphs");
    for line in [
        "--mesh tp=2 --set training.dtype=bf16 --set model.kind=llama --set optimizer.name=muon",
        "--set model.preset=switch-tiny --mesh dp=2,ep=2",
    ] {
        let run = |graphs| metrics(&folder, "cuda-emulated", &format!("{line} --steps 5 --set cuda.graphs={graphs}"));
        let (with, without) = (run(true), run(false));
        assert_eq!(numbers_of(&with), numbers_of(&without), "{line}");
        assert_eq!(events(&without, "end")[0].get("launches"), None, "{line}");
        let last = &events(&with, "end")[0]["launches"]["last_step"];
        eprintln!("{line}: {last}");
        // A layer of experts has other sizes in each step.
        let share = if line.contains("switch") { 1.0 } else { 0.4 };
        assert!(last["launches"].as_f64().unwrap() < share * last["asked"].as_f64().unwrap(), "{line}: {last}");
    }
}

/// Results of products in 16 bits are rounded as they are written, and updates are few: a kernel more for each layer
/// would be seen here.
#[test]
fn launches_of_a_fast_step_are_as_documented() {
    if !emulates() {
        return;
    }
    let folder = folder("launches");
    for (kind, documented) in [("gpt2", 256), ("llama", 256)] {
        let line = format!(
            "--set training.dtype=bf16 --set model.kind={kind} --set model.num_layers=4 --steps 3 --set cuda.graphs=true"
        );
        let run = metrics(&folder, "cuda-emulated", &line);
        let launches = &events(&run, "end")[0]["launches"];
        assert_eq!(launches["last_step"]["asked"].as_u64(), Some(documented), "{kind}: {launches}");
    }
}

#[test]
fn graphs_are_of_cuda_devices_alone() {
    let (code, out, err) = run(&format!("{SMALL} --steps 1 --set cuda.graphs=true"));
    let told = "error: cuda.graphs = true: --device cpu has no graphs: its kernels are done when they return; use --device cuda or cuda-emulated, or false\n";
    assert_eq!((code, &*out, &*err), (Some(2), "", told));
}
