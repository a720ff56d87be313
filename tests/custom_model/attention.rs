//! The models of `examples/encoder_decoder` and `examples/vision_transformer`: any mesh gives the numbers of one rank,
//! and in canonical numerics its bits, wherever a pipeline cuts them; and they learn.

use super::{Trained, trained_on};
use encoder_decoder::EncoderDecoder;
use encoder_decoder::reversals::{self, Reversals};
use meshwork::models::language;
use meshwork::optim::{Decay, LrSchedule, Sgd};
use meshwork::prelude::*;
use meshwork::tensor::op::Mask;
use meshwork::tensor_parallel::{ColumnLinear, RowLinear, VocabParallelEmbedding as Table};
use std::ops::Range;
use std::sync::Arc;

#[path = "../../examples/encoder_decoder/main.rs"]
#[allow(dead_code)] // Its `main` runs in the example.
mod encoder_decoder;

#[cfg(feature = "digits")]
#[path = "../../examples/vision_transformer/main.rs"]
#[allow(dead_code)]
mod vision_transformer;

type Source = Box<dyn BatchSource>;

/// One layer whose scores have a learnt bias for each pair of tokens and slopes by their distance.
#[derive(Debug)]
struct Biased;

#[derive(Debug)]
struct BiasedPart {
    table: Table,
    q: ColumnLinear,
    kv: ColumnLinear,
    bias: ParamId,
    out: RowLinear,
}

const HIDDEN: usize = 16;
const NORMAL: Init = Init::Normal { std: 0.3 };

impl Model for Biased {
    fn num_layers(&self) -> usize {
        1
    }

    fn fields(&self) -> Vec<Field> {
        reversals::fields()
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, _: &StageSpec) -> Result<Box<dyn Stage>> {
        let heads = Placement::replicated().shard(Axis::Tp, 0);
        Ok(Box::new(BiasedPart {
            table: Table::new(params, "table", reversals::VOCAB, HIDDEN, NORMAL)?,
            q: ColumnLinear::new(params, mesh, "q", HIDDEN, (&[4, 4], 0), true, NORMAL)?,
            kv: ColumnLinear::new(params, mesh, "kv", HIDDEN, (&[2, 16], 1), true, NORMAL)?,
            bias: params.declare("bias", &[4, reversals::SEQ, reversals::SEQ], heads, Role::Weight, NORMAL)?,
            out: RowLinear::new(params, mesh, "out", (&[4, 4], 0), HIDDEN, true, NORMAL)?,
        }))
    }

    fn activation(&self, mesh: &Mesh, _: usize, batch: &Batch) -> Result<Activation> {
        language::hidden(mesh, Region::INVARIANT, HIDDEN, batch)
    }

    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        language::unmasked(batch, samples)
    }
}

impl Stage for BiasedPart {
    fn forward(&self, tape: &Tape, batch: &Batch, _: Option<&Var>) -> Result<Var> {
        let x = self.table.embed(tape, &batch.var(tape, language::TOKENS)?, Region::INVARIANT)?;
        let enter = || Region::INVARIANT.enter(&x);
        let (lengths, bias) = (batch.var(tape, reversals::LENGTH)?, tape.param(self.bias)?);
        let slopes = Some(&[0.5, 0.25, 0.125, 0.0625][..]);
        let mask = Mask { lengths: Some(&lengths), bias: Some(&bias), slopes, cap: Some(4.0), ..Mask::BIDIRECTIONAL };
        let (q, kv) = (self.q.forward(tape, &enter()?)?, self.kv.forward(tape, &enter()?)?);
        let mixed = q.grouped_attention(&kv, None, mask, Some((0.1, "attention")))?;
        let y = self.out.forward(tape, &mixed, Region::INVARIANT, Some(&x), 0.0)?;
        self.table.logits(tape, &y, Region::INVARIANT)
    }

    fn loss(&self, _: &Tape, batch: &Batch, logits: &Var) -> Result<Var> {
        self.table.loss(logits, &batch.var(logits.tape(), language::TARGETS)?)
    }
}

/// Small ones of four layers: cuts of four stages lie in the encoder, between both and in the decoder.
fn models(hidden: usize) -> Vec<(&'static str, Arc<dyn Model>, Source)> {
    let reversing: Arc<dyn Model> = Arc::new(EncoderDecoder { layers: 2, hidden });
    let mut all: Vec<(_, _, Source)> = vec![("encoder_decoder", reversing, Box::new(Reversals))];
    all.push(("a bias of pairs", Arc::new(Biased), Box::new(Reversals)));
    #[cfg(feature = "digits")]
    {
        let seeing: Arc<dyn Model> = Arc::new(vision_transformer::VisionTransformer { layers: 4, hidden });
        all.push(("vision_transformer", seeing, Box::new(vision_transformer::digits())));
    }
    all
}

#[test]
fn any_mesh_gives_their_loss_norm_and_weights_of_one_rank() {
    let lr = LrSchedule { base: 1.0, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 };
    let plan = Plan { optimizer: Sgd::default().into(), lr, max_norm: 0.0, ..Plan::default() };
    for (name, model, source) in models(16) {
        let (wanted, weights): Trained = trained_on(&model, &*source, "dp=1", &plan, 1);
        let stages = if model.num_layers() > 1 { ["dp=2,tp=2,pp=2", "pp=4"] } else { ["dp=2,tp=2", "dp=4"] };
        for mesh in stages.into_iter().chain(["tp=4"]) {
            let (got, got_weights) = trained_on(&model, &*source, mesh, &plan, 1);
            for (got, wanted) in got.as_flattened().iter().zip(wanted.as_flattened()) {
                assert!((got - wanted).abs() <= 1e-6 * wanted, "{name}, {mesh}: {got}, on one rank {wanted}");
            }
            for (key, wanted) in &weights {
                let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
                let off = norm(&mut got_weights[key].iter().zip(wanted).map(|(got, wanted)| f64::from(got - wanted)));
                let size = norm(&mut wanted.iter().map(|&wanted| f64::from(wanted)));
                assert!(off <= 1e-5 * size.max(1e-2), "{name}, {mesh}: {key} is off by {off} of {size}");
            }
        }
    }
}

#[test]
fn canonical_numerics_give_their_bits_of_one_rank() {
    let plan = Plan { numerics: Numerics::Canonical { blocks: 4 }, ..Plan::default() };
    for (name, model, source) in models(16) {
        let wanted = trained_on(&model, &*source, "dp=1", &plan, 3);
        let stages = if model.num_layers() > 1 { ["dp=2,tp=2,pp=2", "pp=4"] } else { ["dp=2,tp=2", "dp=4,tp=2"] };
        for mesh in stages.into_iter().chain(["tp=4", "dp=4"]) {
            assert!(trained_on(&model, &*source, mesh, &plan, 3) == wanted, "{name}, {mesh}");
        }
    }
}

/// Reversals need the encoder's states: without them a decoder cannot know the next token.
#[test]
fn they_learn() {
    let mut plan = Plan { global_batch_size: 32, ..Plan::default() };
    plan.lr.base = 4e-3;
    for (name, model, source) in models(32).into_iter().filter(|(_, model, _)| model.num_layers() > 1) {
        let (steps, _) = trained_on(&model, &*source, "dp=1", &plan, 150);
        let mean = |steps: &[[f64; 2]]| steps.iter().map(|[loss, _]| loss).sum::<f64>() / steps.len() as f64;
        let (first, last) = (mean(&steps[..10]), mean(&steps[140..]));
        assert!(last < 0.6 * first, "{name}: a loss of {first}, then of {last}");
    }
}
