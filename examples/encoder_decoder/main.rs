//! An encoder and a decoder (Vaswani et al., 2017) that learn to reverse sequences of unlike lengths, over any mesh:
//! `cargo run --release --example encoder_decoder`. `tests/custom_model/attention.rs` tests it.

pub(crate) mod reversals;

use meshwork::core::DType::F32;
use meshwork::models::language::{TARGETS, TOKENS, no_input, unmasked};
use meshwork::models::transformer::{Memory, TransformerLayer};
use meshwork::nn::Joined;
use meshwork::prelude::*;
use meshwork::tensor::op::Mask;
use meshwork::tensor_parallel::VocabParallelEmbedding as Table;
use reversals::{LENGTH, Reversals, SEQ, SOURCE, VOCAB};
use std::ops::Range;
use std::sync::Arc;

const NORMAL: Init = Init::Normal { std: 0.05 };
const REGION: Region = Region::INVARIANT;
type Tables = Option<(Table, Positions)>;

/// So many layers of an encoder, and as many of a decoder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncoderDecoder {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
}

/// Some of the layers, with the tables where the encoder and where the decoder begin, and with the head at the end.
#[derive(Debug)]
struct Part(EncoderDecoder, Range<usize>, [Tables; 2], Vec<TransformerLayer>, Option<(LayerNorm, Table)>);

impl EncoderDecoder {
    /// What crosses a cut: the states of the encoder, and behind the first layer of the decoder its own too.
    fn states(&self, mesh: &Mesh, at: usize, samples: usize) -> Result<Joined> {
        let state = Activation { dtype: F32, shape: [samples, SEQ, self.hidden].into(), types: REGION.types(mesh) };
        Joined::new(vec![state; if at > self.layers { 2 } else { 1 }])
    }
}

impl Model for EncoderDecoder {
    fn num_layers(&self) -> usize {
        2 * self.layers
    }

    fn fields(&self) -> Vec<Field> {
        reversals::fields()
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let (h, layers) = (self.hidden, part.layers.clone());
        let mut tables = |here: bool, name: &str| -> Result<Tables> {
            let table = here.then(|| Table::new(params, name, VOCAB, h, NORMAL)).transpose()?;
            let positions = || Positions::new(params, &format!("{name}.positions"), SEQ, h, 0.05);
            Ok(table.zip(here.then(positions).transpose()?))
        };
        let both = [tables(part.first, SOURCE)?, tables(layers.contains(&self.layers), "target")?];
        let blocks = layers.clone().map(|i| {
            let layer = TransformerLayer::new(params, mesh, &format!("layer.{i}"), [h, 4], NORMAL)?;
            if i < self.layers { Ok(layer) } else { layer.with_cross(params, mesh, [h, 4], NORMAL) }
        });
        let blocks = blocks.collect::<Result<_>>()?;
        let norm = part.last.then(|| LayerNorm::new(params, "norm", h, true)).transpose()?;
        let head = part.last.then(|| Table::new(params, "head", VOCAB, h, NORMAL)).transpose()?;
        Ok(Box::new(Part(*self, layers, both, blocks, norm.zip(head))))
    }

    fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation> {
        Ok(self.states(mesh, at, batch.samples())?.activation())
    }

    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        unmasked(batch, samples)
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let Self(of, layers, tables, blocks, head) = self;
        let joined = |at| of.states(tape.rank().mesh(), at, batch.samples());
        let embed = |at: usize, ids| {
            let (table, positions) = tables[at].as_ref().ok_or_else(|| no_input("encoder-decoder"))?;
            positions.forward(tape, &table.embed(tape, &batch.var(tape, ids)?, REGION)?)
        };
        let lengths = batch.var(tape, LENGTH)?;
        let mut states = input.map_or_else(|| Ok(vec![embed(0, SOURCE)?]), |x| joined(layers.start)?.split(x))?;
        let encoder = Mask { lengths: Some(&lengths), ..Mask::BIDIRECTIONAL };
        for (at, layer) in layers.clone().zip(blocks) {
            if at == of.layers {
                states.push(embed(1, TOKENS)?);
            }
            let memory = Memory { states: &states[0], lengths: Some(&lengths) };
            let (mask, memory) = if at < of.layers { (encoder, None) } else { (Mask::default(), Some(memory)) };
            let own = states.len() - 1;
            states[own] = layer.forward(tape, &states[own], REGION, mask, memory, 0.0)?;
        }
        match (head, &states[..]) {
            (Some((norm, head)), [_, x]) => head.logits(tape, &norm.forward(tape, x)?, REGION),
            _ => joined(layers.end)?.join(&states.iter().collect::<Vec<_>>()),
        }
    }

    fn loss(&self, tape: &Tape, batch: &Batch, logits: &Var) -> Result<Var> {
        let (_, head) = self.4.as_ref().ok_or_else(|| no_input("encoder-decoder"))?;
        head.loss(logits, &batch.var(tape, TARGETS)?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Arc::new(EncoderDecoder { layers: 2, hidden: 32 });
    let mut plan = Plan { mesh: "dp=2,tp=2,pp=2".parse()?, global_batch_size: 64, ..Plan::default() };
    plan.lr.base = 3e-3;
    meshwork::train::processes::world(&plan.mesh)?.run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device())?;
        trainer.train(&Reversals, 400, |at| {
            (rank.world_rank() == 0 && at.step % 40 == 0).then(|| println!("step {:3}  loss {:.4}", at.step, at.loss));
        })
    })?;
    Ok(())
}
