//! A small transformer, in plain candle.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::softmax;
use candle_nn::{
    Embedding, LayerNorm, Linear, Module, VarBuilder, VarMap, embedding, layer_norm, linear, linear_no_bias,
};

const VOCAB: usize = 256;
const HIDDEN: usize = 32;
const HEADS: usize = 2;
const LAYERS: usize = 2;
const LONGEST: usize = 64;

struct Block {
    norms: [LayerNorm; 2],
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

/// A byte-level language model.
pub struct Model {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Model {
    /// The model, and its parameters in the order in which forward uses them.
    pub fn new() -> Result<(Self, Vec<Var>)> {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let block = |vb: VarBuilder| {
            Ok(Block {
                norms: [layer_norm(HIDDEN, 1e-5, vb.pp("a_norm"))?, layer_norm(HIDDEN, 1e-5, vb.pp("d_norm"))?],
                qkv: linear(HIDDEN, 3 * HIDDEN, vb.pp("b_qkv"))?,
                out: linear(HIDDEN, HIDDEN, vb.pp("c_out"))?,
                up: linear(HIDDEN, 4 * HIDDEN, vb.pp("e_up"))?,
                down: linear(4 * HIDDEN, HIDDEN, vb.pp("f_down"))?,
            })
        };
        let model = Self {
            tokens: embedding(VOCAB, HIDDEN, vb.pp("a_tokens"))?,
            positions: embedding(LONGEST, HIDDEN, vb.pp("b_positions"))?,
            blocks: (0..LAYERS).map(|at| block(vb.pp(format!("c_block{at}")))).collect::<Result<_>>()?,
            norm: layer_norm(HIDDEN, 1e-5, vb.pp("d_norm"))?,
            head: linear_no_bias(HIDDEN, VOCAB, vb.pp("e_head"))?,
        };
        // A map has no order, but sorted names are in the order of forward.
        let mut named: Vec<(String, Var)> =
            variables.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        Ok((model, named.into_iter().map(|(_, var)| var).collect()))
    }

    /// Logits `[batch, length, vocabulary]` of tokens `[batch, length]`.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let length = tokens.dim(1)?;
        let positions = self.positions.forward(&Tensor::arange(0, length as u32, tokens.device())?)?;
        let mut x = self.tokens.forward(tokens)?.broadcast_add(&positions)?;
        for block in &self.blocks {
            x = (&x + block.attention(&block.norms[0].forward(&x)?)?)?;
            let inner = block.up.forward(&block.norms[1].forward(&x)?)?.gelu()?;
            x = (x + block.down.forward(&inner)?)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}

impl Block {
    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        let heads = |x: Tensor| x.reshape((batch, length, HEADS, HIDDEN / HEADS))?.transpose(1, 2)?.contiguous();
        let qkv = self.qkv.forward(x)?.chunk(3, D::Minus1)?;
        let [q, k, v] = [0, 1, 2].map(|at| heads(qkv[at].clone()));
        let (k, v) = (k?, v?);
        let scores = (q?.matmul(&k.t()?)? / ((HIDDEN / HEADS) as f64).sqrt())?;
        let hidden = |row, column| if column > row { f32::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f32> = (0..length * length).map(|at| hidden(at / length, at % length)).collect();
        let scores = scores.broadcast_add(&Tensor::from_vec(mask, (length, length), x.device())?)?;
        let mixed = softmax(&scores, D::Minus1)?.matmul(&v)?;
        self.out.forward(&mixed.transpose(1, 2)?.reshape((batch, length, HIDDEN))?)
    }
}
