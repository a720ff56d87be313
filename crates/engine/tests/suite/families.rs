//! Families of decoders beside one rank of the same model: sequences that cp cuts by each method, a device whose memory
//! the host cannot read, and what a dry run predicts. The folders of `huggingface` have the models.

use crate::huggingface::{folder, plan, wanted};
use crate::runs::{Vectors, on_ranks, vectors};
use meshwork_context_parallel::{ContextParallel, Method};
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, TrainError, Trainer, Zero, ZeroStage, dry_run};
use meshwork_models::decoder::{DecoderConfig, DecoderModel};
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::huggingface::{Architecture, Pretrained};
use meshwork_models::language;
use meshwork_nn::{Batch, Model};
use meshwork_tensor::op::Order;
use std::sync::Arc;

/// A family and how it is cut: the mesh, the exchange over cp, whether tp cuts sequences between blocks too.
struct Case {
    name: &'static str,
    mesh: &'static str,
    method: Option<Method>,
    cut: bool,
}

/// Losses and norms of two steps of each rank, and the weights after them.
type Trained = (Vec<[f64; 2]>, Vectors);

impl Case {
    fn pretrained(&self) -> Pretrained {
        Pretrained::open(&folder(self.name)).unwrap()
    }

    /// The model, with its sequences cut by the method.
    fn model(&self) -> DecoderModel {
        let Architecture { decoder, experts, .. } = *self.pretrained().architecture();
        let seq_len = wanted(&folder(self.name)).0[0].len();
        let experts = experts.map(|experts| ExpertsConfig { over_tp: true, ..experts });
        let of = DecoderModel::new(DecoderConfig { seq_len, ..decoder }).with_experts(experts);
        let context = self.method.map(|method| ContextParallel::new(method, Order::default(), 1));
        of.sequence_parallel(self.cut).context_parallel(context)
    }

    fn plan(&self, numerics: Numerics) -> Plan {
        let stage = if self.mesh.contains("dp=2") { ZeroStage::Gradients } else { ZeroStage::Off };
        Plan { numerics, zero: Zero { stage, group: None }, ..plan(self.mesh) }
    }

    fn batch(&self) -> Batch {
        let tokens = wanted(&folder(self.name)).0;
        let vocab = self.pretrained().architecture().decoder.vocab_size as i32;
        let targets = tokens.concat().iter().map(|id| (id * 7 + 3) % vocab).collect();
        language::batch(tokens.concat(), targets, tokens[0].len()).unwrap()
    }

    fn train(&self, plan: &Plan, behind: bool) -> Trained {
        let (read, batch) = (self.pretrained(), self.batch());
        let model: Arc<dyn Model> = Arc::new(self.model());
        let (mut reports, state) = on_ranks(&model, plan, behind, |trainer| {
            trainer.load_weights(|spec, slice| read.read(spec, slice))?;
            let batch = batch.part(trainer.samples())?;
            let reports = [trainer.step(&batch)?, trainer.step(&batch)?];
            Ok(reports.map(|report| [report.loss, report.grad_norm]).to_vec())
        });
        (reports.swap_remove(0), vectors(&state))
    }
}

fn over(method: Method, mesh: &'static str, cut: bool) -> impl Fn(&'static str) -> Case {
    move |name| Case { name, mesh, method: Some(method), cut }
}

/// Soft caps and windows, latent attention with groups of experts, and rotary embeddings whose features have a scale.
const OF_EACH: [&str; 3] = ["gemma2", "deepseek_v3", "llama_yarn"];

#[test]
fn sequences_of_families_that_cp_cuts_have_one_ranks_bits() {
    let numerics = Numerics::Canonical { blocks: 4 };
    for name in OF_EACH {
        let one = over(Method::AllGather, "cp=1", false)(name);
        let want = one.train(&one.plan(numerics), false);
        for case in [
            over(Method::AllGather, "cp=2", false)(name),
            over(Method::AllToAll, "dp=2,cp=2", false)(name),
            over(Method::Ring, "tp=2,cp=2", true)(name),
            over(Method::Hybrid { ring_degree: 2 }, "cp=4", false)(name),
            over(Method::AllGather, "pp=2,cp=2", false)(name),
        ] {
            let found = case.train(&case.plan(numerics), case.mesh == "dp=2,cp=2");
            assert!(found == want, "{name} on {} by {:?}: {:?}, {:?}", case.mesh, case.method, found.0, want.0);
        }
    }
}

#[test]
fn sequences_of_families_that_cp_cuts_have_the_numbers_of_one_rank() {
    for name in OF_EACH {
        let one = Case { name, mesh: "dp=1", method: None, cut: false };
        let want = one.train(&one.plan(Numerics::Fast), false);
        for case in [
            over(Method::AllGather, "tp=2,cp=2", true)(name),
            over(Method::AllToAll, "cp=2", false)(name),
            over(Method::Ring, "cp=4", false)(name),
            over(Method::Hybrid { ring_degree: 2 }, "cp=4", false)(name),
        ] {
            let found = case.train(&case.plan(Numerics::Fast), false);
            let apart = |one: &[f32], other: &[f32]| {
                one.iter().zip(other).map(|(a, b)| (a - b).abs() / (1e-2 + b.abs())).fold(0.0, f32::max)
            };
            let what = format!("{name} on {} by {:?}", case.mesh, case.method);
            for ([loss, norm], [loss_of_one, norm_of_one]) in found.0.iter().zip(&want.0) {
                assert!((loss - loss_of_one).abs() < 2e-6 * loss_of_one, "{what}: a loss of {loss}, {loss_of_one}");
                assert!((norm - norm_of_one).abs() < 2e-5 * norm_of_one, "{what}: a norm of {norm}, {norm_of_one}");
            }
            for ((key, found), (_, want)) in found.1.iter().zip(&want.1) {
                assert!(apart(found, want) < 2e-3, "{what}: {key:?} is {} apart", apart(found, want));
            }
        }
    }
}

/// A dry run predicts memory, FLOPs and every communication of each rank. The models have no experts: a dry run does
/// not know how many tokens each expert will get.
#[test]
fn latent_attention_does_what_a_dry_run_predicts() {
    for (mesh, method, cut) in [
        ("tp=2,dp=2", None, true),
        ("tp=4,pp=2", None, false),
        ("tp=2,cp=2", Some(Method::Ring), true),
        ("cp=2", Some(Method::AllToAll), false),
    ] {
        for (name, numerics) in [("deepseek_v3", Numerics::Fast), ("deepseek_v2", Numerics::Canonical { blocks: 4 })] {
            let case = Case { name, mesh, method, cut };
            let model: Arc<dyn Model> = Arc::new(case.model().with_experts(None));
            let (plan, batch) = (case.plan(numerics), case.batch());
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
                let batch = batch.part(trainer.samples())?;
                trainer.step(&batch)?;
                let before = trainer.device().meter().total_flops();
                let report = trainer.step(&batch)?;
                let meter = trainer.device().meter();
                Ok::<_, TrainError>((meter.peak(), meter.total_flops() - before, report.records))
            });
            for (rank, found) in ranks.unwrap().into_iter().enumerate() {
                let predicted = dry_run::predict(&model, &plan, rank).unwrap();
                let what = format!("rank {rank} of {name} on {mesh} by {method:?}");
                assert_eq!((found.0, found.1), (predicted.memory, predicted.flops), "{what}");
                assert_eq!(found.2, predicted.records, "{what}");
            }
        }
    }
}
