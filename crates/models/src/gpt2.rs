//! GPT-2 (Radford et al., 2019): pre-LN blocks, learned positions, GELU (tanh form), biases, an output head tied to the token
//! table or not. Weights start from N(0, 0.02), the projections into the residual stream scaled by 1/√(2·layers).
//!
//! ```text
//! x = W_tok[ids] + W_pos                     x ← x + Attn(LN(x))    x ← x + MLP(LN(x))   (layers times)
//! logits = LN(x) · W_headᵀ
//! ```
//!
//! Types, per axis: between blocks the hidden state is `Shard(0)` on dp (the batch), and on tp `Invariant` or, sequence
//! parallel, `Shard(1)`.

use crate::{Boundary, Part, Stage};
use meshwork_core::{Axis, Mesh, Ty, Types};
use meshwork_nn::{LayerNorm, Positions};
use meshwork_tensor::{Declarations, Init, Result, Shape, Tape, Var};
use meshwork_tensor_parallel::{ParallelAttention, ParallelMlp, Region, VocabParallelEmbedding};

/// Standard deviation of initial weights.
const STD: f32 = 0.02;

/// Sizes of a GPT-2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Attention heads; must divide `hidden_size`.
    pub num_heads: usize,
    /// Inner width of the feed-forward blocks.
    pub ffn_hidden_size: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Whether the output head is the token table.
    pub tie_embeddings: bool,
    /// Dropout probability of embeddings, attention weights and residual branches.
    pub dropout: f32,
}

/// One stage of a GPT-2: some of its blocks, with the embedding in front on the first stage and the head behind on the last.
#[derive(Clone, Debug)]
pub struct Gpt2Stage {
    config: Gpt2Config,
    region: Region,
    types: Types,
    tp: usize,
    embedding: Option<(VocabParallelEmbedding, Positions)>,
    blocks: Vec<Block>,
    head: Option<(LayerNorm, VocabParallelEmbedding)>,
}

#[derive(Clone, Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: ParallelAttention,
    ln_2: LayerNorm,
    mlp: ParallelMlp,
}

impl Gpt2Stage {
    /// Declares the parameters of one part: its blocks, and the embedding or the head where it has that end. Tied: both ends
    /// declare `wte.weight`, one logical parameter on two stages.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        config: Gpt2Config,
        region: Region,
        part: &Part,
    ) -> Result<Self> {
        let normal = Init::Normal { std: STD };
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = match part.first {
            true => Some((
                VocabParallelEmbedding::new(params, "wte", vocab, hidden, normal)?,
                Positions::new(params, "wpe", config.seq_len, hidden, STD)?,
            )),
            false => None,
        };
        let blocks =
            part.layers.clone().map(|layer| Block::new(params, mesh, &config, layer)).collect::<Result<_>>()?;
        let head = match part.last {
            true => {
                let name = if config.tie_embeddings { "wte" } else { "lm_head" };
                let norm = LayerNorm::new(params, "ln_f", hidden, true)?;
                Some((norm, VocabParallelEmbedding::new(params, name, vocab, hidden, normal)?))
            }
            false => None,
        };
        let types = mesh.value_axes().fold(Types::NONE, |types, axis| {
            types.with(axis, if axis == Axis::Tp { region.ty() } else { Ty::Shard(0) })
        });
        Ok(Self { config, region, types, tp: mesh.degree(Axis::Tp), embedding, blocks, head })
    }
}

impl Block {
    fn new(params: &mut Declarations, mesh: &Mesh, config: &Gpt2Config, layer: usize) -> Result<Self> {
        let (hidden, heads, ffn) = (config.hidden_size, config.num_heads, config.ffn_hidden_size);
        let init = [STD, STD / (2.0 * config.num_layers as f32).sqrt()].map(|std| Init::Normal { std });
        let name = |part: &str| format!("h.{layer}.{part}");
        Ok(Self {
            ln_1: LayerNorm::new(params, &name("ln_1"), hidden, true)?,
            attn: ParallelAttention::new(params, mesh, &name("attn"), hidden, heads, true, init)?,
            ln_2: LayerNorm::new(params, &name("ln_2"), hidden, true)?,
            mlp: ParallelMlp::new(params, mesh, &name("mlp"), hidden, ffn, true, init)?,
        })
    }

    fn forward(&self, tape: &Tape, x: &Var, region: Region, dropout: f32) -> Result<Var> {
        let x = self.attn.forward(tape, &self.ln_1.factor(tape, x)?, region, Some(x), dropout)?;
        self.mlp.forward(tape, &self.ln_2.factor(tape, &x)?, region, Some(&x), dropout)
    }
}

impl Stage for Gpt2Stage {
    fn forward(&self, tape: &Tape, input: &Var) -> Result<Var> {
        let mut x = match &self.embedding {
            Some((tokens, positions)) => {
                let x = tokens.embed(tape, input, self.region)?;
                positions.forward(tape, &x)?.dropout(self.config.dropout, "embedding")?
            }
            None => input.clone(),
        };
        for block in &self.blocks {
            x = block.forward(tape, &x, self.region, self.config.dropout)?;
        }
        match &self.head {
            Some((norm, head)) => head.logits(tape, &norm.factor(tape, &x)?, self.region),
            None => Ok(x),
        }
    }

    fn loss(&self, logits: &Var, targets: &Var) -> Result<Var> {
        match &self.head {
            Some((_, head)) => head.loss(logits, targets),
            None => logits.cross_entropy(targets),
        }
    }

    fn gather_logits(&self, logits: &Var) -> Result<Var> {
        logits.all_gather(Axis::Tp, 2)
    }

    fn boundary(&self, batch: usize, seq: usize) -> Boundary {
        let held = self.region.local_seq(seq, self.tp);
        Boundary { shape: Shape::new(&[batch, held, self.config.hidden_size]), types: self.types }
    }
}
