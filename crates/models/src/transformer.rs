//! Layers of encoders and decoders, for models of one's own: attention, attention to another sequence, and an MLP.

use meshwork_core::Mesh;
use meshwork_nn::LayerNorm;
use meshwork_tensor::op::{Mask, MlpKind};
use meshwork_tensor::{Declarations, Error, Init, Result, Tape, Var};
use meshwork_tensor_parallel::{ParallelAttention, ParallelCrossAttention, ParallelMlp, Region};

/// `x + Attention(LN(x))`, then `x + Cross(LN(x), memory)` where the layer [has one](Self::with_cross), then `x +
/// MLP(LN(x))` with a GELU of four times as many features: an encoder's layer or a decoder's, by its mask (Vaswani et
/// al., arXiv:1706.03762, with the norms in front). Heads and inner features are cut over tp.
#[derive(Clone, Debug)]
pub struct TransformerLayer {
    name: String,
    norm: LayerNorm,
    attention: ParallelAttention,
    cross: Option<(LayerNorm, ParallelCrossAttention)>,
    mlp_norm: LayerNorm,
    mlp: ParallelMlp,
}

/// The states of another sequence, `[b, keys, hidden]`, and the number of them in each sample, i32 `[b]`, where others
/// fill it up.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// The states.
    pub states: &'a Var,
    /// Those that count.
    pub lengths: Option<&'a Var>,
}

impl TransformerLayer {
    /// Declares `{name}.norm`, `{name}.attention`, `{name}.mlp_norm` and `{name}.mlp`, with biases.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        [hidden, heads]: [usize; 2],
        init: Init,
    ) -> Result<Self> {
        let part = |part: &str| format!("{name}.{part}");
        let (sizes, init) = ([hidden, 4 * hidden], [init; 2]);
        Ok(Self {
            name: name.to_owned(),
            norm: LayerNorm::new(params, &part("norm"), hidden, true)?,
            attention: ParallelAttention::new(params, mesh, &part("attention"), hidden, heads, true, init)?,
            cross: None,
            mlp_norm: LayerNorm::new(params, &part("mlp_norm"), hidden, true)?,
            mlp: ParallelMlp::new(params, mesh, &part("mlp"), MlpKind::Gelu, sizes, true, init)?,
        })
    }

    /// The same with attention to the states of another sequence: `{name}.cross_norm` and `{name}.cross`.
    pub fn with_cross(
        self,
        params: &mut Declarations,
        mesh: &Mesh,
        [hidden, heads]: [usize; 2],
        init: Init,
    ) -> Result<Self> {
        let [norm, cross] = ["cross_norm", "cross"].map(|part| format!("{}.{part}", self.name));
        let norm = LayerNorm::new(params, &norm, hidden, true)?;
        let cross = ParallelCrossAttention::new(params, mesh, &cross, hidden, heads, true, [init; 2])?;
        Ok(Self { cross: Some((norm, cross)), ..self })
    }

    /// `x [b, s, hidden]` in the region → the same. `mask` says which tokens of it see each other; a layer with
    /// attention to another sequence takes a `memory`.
    ///
    /// # Errors
    /// A memory for a layer that reads none, or none for one that does.
    pub fn forward<'a>(
        &self,
        tape: &Tape,
        x: &Var,
        region: Region,
        mask: impl Into<Mask<'a>>,
        memory: Option<Memory<'_>>,
        dropout: f32,
    ) -> Result<Var> {
        let mut x = self.attention.forward(tape, &self.norm.forward(tape, x)?, region, Some(x), mask, dropout)?;
        match (&self.cross, memory) {
            (Some((norm, cross)), Some(Memory { states, lengths })) => {
                let normed = norm.forward(tape, &x)?;
                x = cross.forward(tape, &normed, states, region, Some(&x), lengths, dropout)?;
            }
            (None, None) => {}
            (cross, _) => {
                let given = if cross.is_some() { "takes a memory, and none was given" } else { "reads no memory" };
                let (name, shapes) = (&self.name, vec![x.shape().to_vec()]);
                return Err(Error::Shape { op: "transformer layer", problem: format!("{name} {given}"), shapes });
            }
        }
        self.mlp.forward(tape, &self.mlp_norm.forward(tape, &x)?, region, Some(&x), dropout)
    }
}
