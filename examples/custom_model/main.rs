//! A custom model over any mesh, with only the public API: attention and a squared-ReLU network side by side, as in
//! PaLM and Primer. `tests/custom_model/main.rs` tests it: its operations by `check_op`, its block by `check_layer`,
//! whole meshes by `diff::compare`.

use meshwork::models::language::{self, TARGETS, TOKENS};
use meshwork::prelude::*;
use meshwork::tensor_parallel::VocabParallelEmbedding as Table;
use std::ops::Range;
use std::sync::Arc;

const NORMAL: Init = Init::Normal { std: 0.02 };
const HEAD: usize = 8; // width of an attention head

/// A model of these sizes.
#[derive(Debug)]
pub(crate) struct Parallel {
    pub(crate) vocab: usize,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) seq: usize,
}

/// `x + Attn(LN(x)) + relu(LN(x) · Upᵀ)² · Downᵀ`.
#[derive(Debug)]
pub(crate) struct Block {
    norm: LayerNorm,
    qkv: ParamId,
    out: ParamId,
    up: ParamId,
    down: ParamId,
}

impl Block {
    pub(crate) fn new(params: &mut Declarations, layer: usize, h: usize) -> Result<Self> {
        let mut weight = |name: &str, dims: &[usize], cut: usize| {
            let placement = Placement::replicated().shard(Axis::Tp, cut);
            params.declare(format!("block.{layer}.{name}"), dims, placement, Role::Weight, NORMAL)
        };
        let (qkv, out) = (weight("qkv", &[3, h / HEAD, HEAD, h], 1)?, weight("out", &[h, h / HEAD, HEAD], 1)?);
        let (up, down) = (weight("up", &[4 * h, h], 0)?, weight("down", &[h, 4 * h], 1)?);
        Ok(Self { norm: LayerNorm::new(params, &format!("block.{layer}.norm"), h, true)?, qkv, out, up, down })
    }

    pub(crate) fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let w = |id| tape.param(id);
        let normed = self.norm.forward(tape, x)?; // [b, s, h], Invariant on tp
        let qkv = normed.copy(Axis::Tp)?.linear(&w(self.qkv)?, 1)?; // [b, s, 3, heads/tp, d], Shard(3)
        let mixed = qkv.causal_attention(None, None)?.linear(&w(self.out)?, 2)?.all_reduce(Axis::Tp)?; // Σ_tp
        let inner = normed.copy(Axis::Tp)?.linear(&w(self.up)?, 1)?.relu()?; // [b, s, 4h/tp], Shard(2)
        let squared = inner.mul(&inner)?.linear(&w(self.down)?, 1)?.all_reduce(Axis::Tp)?; // Σ_tp
        x.add(&mixed)?.add(&squared)
    }
}

/// Some of the blocks, preceded by the tables on the first stage, and followed by norm and head on the last.
#[derive(Debug)]
struct Part {
    tables: Option<(Table, Positions)>,
    blocks: Vec<Block>,
    head: Option<(LayerNorm, Table)>,
}

impl Model for Parallel {
    fn num_layers(&self) -> usize {
        self.layers
    }

    fn fields(&self) -> Vec<Field> {
        language::fields(self.seq, self.vocab, language::Boundary::Ignored)
    }

    fn stage(&self, params: &mut Declarations, _mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let &Self { vocab, hidden, seq, .. } = self;
        let tokens = part.first.then(|| Table::new(params, "tokens", vocab, hidden, NORMAL)).transpose()?;
        let positions = part.first.then(|| Positions::new(params, "positions", seq, hidden, 0.02)).transpose()?;
        let blocks = part.layers.clone().map(|i| Block::new(params, i, hidden)).collect::<Result<_>>()?;
        let norm = part.last.then(|| LayerNorm::new(params, "norm", hidden, true)).transpose()?;
        let head = part.last.then(|| Table::new(params, "head", vocab, hidden, NORMAL)).transpose()?;
        Ok(Box::new(Part { tables: tokens.zip(positions), blocks, head: norm.zip(head) }))
    }

    fn activation(&self, mesh: &Mesh, _at: usize, batch: &Batch) -> Result<Activation> {
        language::hidden(mesh, Region::INVARIANT, self.hidden, batch)
    }

    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        language::unmasked(batch, samples)
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let x = match &self.tables {
            Some((table, at)) => at.forward(tape, &table.embed(tape, &batch.var(tape, TOKENS)?, Region::INVARIANT)?)?,
            None => input.cloned().ok_or_else(|| language::no_input("parallel"))?,
        };
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(tape, &x))?;
        let Some((norm, head)) = &self.head else { return Ok(x) };
        head.logits(tape, &norm.forward(tape, &x)?, Region::INVARIANT)
    }

    fn loss(&self, tape: &Tape, batch: &Batch, logits: &Var) -> Result<Var> {
        let (_, head) = self.head.as_ref().ok_or_else(|| language::no_input("parallel"))?;
        head.loss(logits, &batch.var(tape, TARGETS)?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Arc::new(Parallel { vocab: 256, layers: 4, hidden: 64, seq: 64 });
    let plan = Plan { mesh: "dp=2,tp=2,pp=2".parse()?, ..Plan::default() };
    let data = Data::sample_text(64); // Cicero, byte by byte
    meshwork::train::processes::world(&plan.mesh)?.run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device())?;
        trainer.train(&data, 50, |report| {
            (rank.world_rank() == 0).then(|| println!("step {:3}  loss {:.4}", report.step, report.loss));
        })
    })?;
    Ok(())
}
