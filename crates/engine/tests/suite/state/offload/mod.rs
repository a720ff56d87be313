//! Offload: a run goes on with and without it, whatever the speed of the disk, and a disk that fails ends every rank
//! with the reason.

use super::{SEQ, VOCAB, batch, go_on, model, on};
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::offload::{Backing, Folder, Offload, OffloadError, Store};
use meshwork_engine::{
    Compress, LossScale, MixedPrecision, Numerics, Plan, Recompute, ScheduleSpec, TrainError, Trainer, WholeState,
    Zero, ZeroStage, dry_run,
};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_nn::{Model, SAMPLE};
use meshwork_optim::{AdamW, Lamb, Rule};
use meshwork_tensor::Category;
use meshwork_tensor::tape::HalfType;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;
use tempfile::TempDir;

/// What goes wrong with a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    /// It is slow, now and then.
    Slow,
    /// It has no room for what this rank offloads.
    Full { rank: usize },
    /// From its so many-th read on this rank cannot read.
    Reads { rank: usize, from: u64 },
    /// From its so many-th write on this rank cannot write.
    Writes { rank: usize, from: u64 },
}

/// A folder on a disk with trouble.
#[derive(Debug)]
struct Troubled {
    folder: Folder,
    trouble: Trouble,
}

#[derive(Debug)]
struct TroubledStore {
    below: Box<dyn Store>,
    rank: usize,
    trouble: Trouble,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Backing for Troubled {
    fn open(&self, rank: usize) -> Result<Box<dyn Store>, OffloadError> {
        let (reads, writes) = Default::default();
        Ok(Box::new(TroubledStore { below: self.folder.open(rank)?, rank, trouble: self.trouble, reads, writes }))
    }
}

impl TroubledStore {
    /// A delay by the number of the call.
    fn delay(&self, call: u64) {
        if self.trouble == Trouble::Slow {
            sleep(Duration::from_micros(call * 7919 % 1000));
        }
    }
}

impl Store for TroubledStore {
    fn name(&self) -> String {
        "a bad disk".to_owned()
    }

    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        match self.trouble {
            Trouble::Full { rank } if rank == self.rank => Err(ErrorKind::StorageFull.into()),
            _ => self.below.reserve(bytes),
        }
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let call = self.reads.fetch_add(1, Ordering::Relaxed);
        self.delay(call);
        match self.trouble {
            Trouble::Reads { rank, from } if rank == self.rank && call >= from => Err(io::Error::other("bad sector")),
            _ => self.below.read(at, into),
        }
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let call = self.writes.fetch_add(1, Ordering::Relaxed);
        self.delay(call + 1);
        match self.trouble {
            Trouble::Writes { rank, from } if rank == self.rank && call >= from => Err(io::Error::other("bad sector")),
            _ => self.below.write(at, bytes),
        }
    }
}

/// A plan that offloads to a disk with trouble, or without.
fn offloading(plan: Plan, trouble: Option<Trouble>) -> (TempDir, Plan) {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder(dir.path().to_owned());
    let to: Arc<dyn Backing> = match trouble {
        None => Arc::new(folder),
        Some(trouble) => Arc::new(Troubled { folder, trouble }),
    };
    let offload = Offload { optimizer: true, gradients: true, activations: true, samples: true, to: Some(to) };
    (dir, Plan { offload: Some(offload), ..plan })
}

fn adamw(mesh: &str) -> Plan {
    Plan { optimizer: Rule::from(AdamW::default()), max_norm: 1e3, ..on(mesh, Numerics::Fast) }
}

#[test]
fn a_run_goes_on_with_and_without_offload_bit_by_bit() {
    let cut = |stage| Zero { stage, group: None };
    let mixed =
        Some(MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: false, loss_scale: LossScale::Fixed(1.0) });
    for held in [
        Plan { zero: cut(ZeroStage::States), ..adamw("dp=2,pp=2") },
        Plan { zero: cut(ZeroStage::Weights), mixed, ..adamw("dp=2,pp=2") },
        Plan { schedule: ScheduleSpec::named("zb_h2").unwrap(), mixed, ..adamw("dp=2,pp=2") },
        Plan { zero: cut(ZeroStage::Gradients), optimizer: Lamb::default().into(), mixed, ..adamw("dp=2,pp=2") },
        Plan { numerics: Numerics::Canonical { blocks: 8 }, mixed, ..adamw("dp=2,pp=2") },
    ] {
        let held = Plan { num_microbatches: Some(4), ..held };
        let (_dir, offloads) = offloading(held.clone(), None);
        let (wanted, end) = go_on(&held, None, 0..4);
        for (first, second) in [(&held, &offloads), (&offloads, &held), (&offloads, &offloads)] {
            let (_, middle) = go_on(first, None, 0..2);
            let (reports, state) = go_on(second, Some(&middle), 2..4);
            assert_eq!(state, end, "{held:?}");
            for (report, wanted) in reports.iter().zip(&wanted[2..]) {
                assert_eq!(
                    (report.loss.to_bits(), report.grad_norm.to_bits()),
                    (wanted.loss.to_bits(), wanted.grad_norm.to_bits())
                );
            }
        }
    }
}

/// A model whose weights, gradients and states of the optimizer take four times the limit of a rank, activations not
/// counted, trains on one rank with offload, and on eight that share it out without.
#[test]
fn a_model_of_four_times_the_limit_trains_with_offload_or_on_more_ranks() {
    let sizes = Gpt2Config {
        vocab_size: VOCAB,
        hidden_size: 64,
        ffn_hidden_size: 128,
        num_layers: 12,
        seq_len: SEQ,
        ..Gpt2Config::default()
    };
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(sizes));
    let mixed = Some(MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: true, loss_scale: LossScale::Fixed(1.0) });
    // Buckets of gradients are as small as a layer.
    let zero = Zero { stage: ZeroStage::Gradients, group: None };
    let one = Plan { num_microbatches: Some(8), recompute: Recompute::Full, mixed, zero, ..adamw("dp=1") };
    let held = Plan { recompute: Recompute::None, num_microbatches: Some(1), mixed, ..adamw("dp=1") };
    let (_dir, offloads) = offloading(one, None);
    let shared =
        Plan { mesh: "dp=8".parse().unwrap(), zero: Zero { stage: ZeroStage::Weights, group: None }, ..held.clone() };
    let predicted = dry_run::predict(&model, &held, 0).unwrap();
    let state: u64 = [Category::Parameters, Category::Gradients, Category::Optimizer]
        .into_iter()
        .map(|of| predicted.memory.bytes_of(of))
        .sum();
    assert!(state >= 16 * predicted.parameters as u64, "2 + 2 + 12 bytes of a parameter");
    let limit = state / 4;
    let losses = |plan: &Plan, limit: Option<u64>| {
        let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let device = Cpu::device();
            device.meter().set_limit(limit);
            let mut trainer = Trainer::new(model.clone(), plan, rank, device)?;
            (0..3)
                .map(|step| Ok(trainer.step(&batch(step, trainer.samples()))?.loss))
                .collect::<Result<Vec<_>, TrainError>>()
        });
        ranks.map(|mut ranks| ranks.swap_remove(0))
    };
    assert!(losses(&held, Some(limit)).unwrap_err().to_string().contains("would exceed the limit"));
    let wanted = losses(&held, None).unwrap();
    for plan in [&offloads, &shared] {
        let found = losses(plan, Some(limit)).unwrap_or_else(|error| panic!("{error}"));
        for (found, wanted) in found.iter().zip(&wanted) {
            // Gradients of 16 bits are added up in other orders.
            assert!((found - wanted).abs() / wanted < 1e-3, "{}: {found} {wanted}", plan.mesh);
        }
    }
}

/// What is in memory does not depend on how fast a disk is.
#[test]
fn a_slow_disk_takes_the_memory_that_was_predicted() {
    for schedule in ["1f1b", "zb_h2"] {
        let plan =
            Plan { schedule: ScheduleSpec::named(schedule).unwrap(), num_microbatches: Some(4), ..adamw("dp=2,pp=2") };
        let (_dir, plan) = offloading(plan, Some(Trouble::Slow));
        let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model(), &plan, rank, Cpu::device())?;
            for step in 0..3 {
                trainer.start_step(&batch(step, trainer.samples()), || false, |_| {})?;
            }
            trainer.flush(|_| {})?;
            Ok::<_, TrainError>(trainer.device().meter().peak())
        });
        for (rank, peak) in ranks.unwrap().into_iter().enumerate() {
            assert_eq!(peak, dry_run::predict(&model(), &plan, rank).unwrap().memory, "{schedule}, rank {rank}");
        }
    }
}

#[test]
fn a_disk_that_fails_ends_every_rank_and_a_state_from_before_goes_on() {
    let held = adamw("dp=2,pp=2");
    let (_, middle) = go_on(&held, None, 0..1);
    let (_, end) = go_on(&held, Some(&middle), 1..2);
    let cases = [
        (Trouble::Full { rank: 2 }, ["rank 2", "a bad disk: no room for ", "free as much, or name another folder"]),
        (
            Trouble::Reads { rank: 1, from: 40 },
            ["rank 1", "a bad disk: reading ", "bad sector; start again from the last checkpoint"],
        ),
        (
            Trouble::Writes { rank: 3, from: 3 },
            ["rank 3", "a bad disk: writing ", "bad sector; start again from the last checkpoint"],
        ),
    ];
    for (trouble, words) in cases {
        let (dir, plan) = offloading(held.clone(), Some(trouble));
        let ended = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model(), &plan, rank, Cpu::device())?;
            trainer.load_state(&middle)?;
            for step in 1..4 {
                trainer.step(&batch(step, trainer.samples()))?;
            }
            Ok::<_, TrainError>(())
        });
        let error = ended.unwrap_err().to_string();
        words.into_iter().for_each(|word| assert!(error.contains(word), "{trouble:?}: {word} in {error}"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{trouble:?}: nothing stays in the folder");
        let (_dir, plan) = offloading(held.clone(), None);
        let state: WholeState = go_on(&plan, Some(&middle), 1..2).1;
        assert_eq!(state, end, "{trouble:?}");
    }
    let missing = Offload {
        optimizer: true,
        gradients: true,
        activations: true,
        samples: true,
        to: Some(Arc::new(Folder("/no/such/folder".into()))),
    };
    let plan = Plan { offload: Some(missing), ..held };
    let ended = World::threads(&plan.mesh)
        .run_mesh(&plan.mesh, |rank| Trainer::new(model(), &plan, rank, Cpu::device()).map(drop));
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("offload to /no/such/folder: ") && error.contains("name a folder that exists"), "{error}");
}

/// So it is where the activations of samples are on the disk: of those, a step that is new writes, and a later one
/// reads.
#[test]
fn a_disk_that_fails_ends_every_rank_that_keeps_activations_of_samples_on_it() {
    let compress = Compress { activations: "topk:0.3".parse().unwrap(), aqsgd: Some(32), ..Compress::default() };
    let held = Plan { compress, num_microbatches: Some(2), ..adamw("dp=2,pp=2") };
    let numbered = |step: u64, samples: Range<usize>| {
        let numbers = samples.clone().map(|sample| (step % 2 * 16) as i32 + sample as i32).collect();
        batch(step % 2, samples).with(SAMPLE, [], numbers).unwrap()
    };
    let run = |plan: &Plan| {
        World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model(), plan, rank, Cpu::device())?;
            let losses = (0..4).map(|step| Ok(trainer.step(&numbered(step, trainer.samples()))?.loss));
            losses.collect::<Result<Vec<f64>, TrainError>>()
        })
    };
    let on = |trouble| {
        let (dir, plan) = offloading(held.clone(), trouble);
        let offload = plan.offload.map(|all| Offload { optimizer: false, gradients: false, activations: false, ..all });
        (dir, Plan { offload, ..plan })
    };
    let wanted: Vec<Vec<f64>> = run(&held).unwrap();
    let (_dir, sound) = on(None);
    assert_eq!(run(&sound).unwrap(), wanted);
    for (trouble, words) in [
        (Trouble::Full { rank: 2 }, ["rank 2", "a bad disk: no room for "]),
        (Trouble::Reads { rank: 1, from: 20 }, ["rank 1", "a bad disk: reading "]),
        (Trouble::Writes { rank: 3, from: 20 }, ["rank 3", "a bad disk: writing "]),
    ] {
        let (dir, plan) = on(Some(trouble));
        let error = run(&plan).unwrap_err().to_string();
        words.into_iter().for_each(|word| assert!(error.contains(word), "{trouble:?}: {word} in {error}"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{trouble:?}: nothing stays in the folder");
    }
}
