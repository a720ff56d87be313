//! What layers add beside the product with a weight that has [adapters](crate::param::Adapters):
//! `s · B · A · dropout(x)` of each (LoRA; Hu et al., 2021).

use crate::param::{Adapter, MatrixOf};
use crate::{Declarations, ParamId, Result, Tape, Tensor, Var};

/// The adapters of one weight; none if it has none.
///
/// The layer says how x is multiplied by A, and the result by B, and where either is moved between ranks: in the same
/// way as its weight.
#[derive(Clone, Debug)]
pub struct LowRank {
    scale: f64,
    dropout: f32,
    adapters: Vec<Adapter>,
}

impl LowRank {
    /// Declares the adapters of a weight.
    ///
    /// # Errors
    /// As [`Declarations::adapters_of`].
    pub fn new(params: &mut Declarations, weight: ParamId) -> Result<Self> {
        let (scale, dropout, adapters) = params.adapters_of(weight)?;
        Ok(Self { scale, dropout, adapters })
    }

    /// Whether there is something to add.
    pub fn is_on(&self, tape: &Tape) -> bool {
        !self.adapters.is_empty() && tape.has_adapters()
    }

    /// The factor of the product of A and B.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// B of the adapter, if there is one for all matrices of the weight.
    pub fn whole(&self) -> Option<ParamId> {
        self.adapters.first().filter(|adapter| adapter.matrix.is_none()).map(|adapter| adapter.b)
    }

    /// What B of each adapter reads: `of_a` of `dropout(x)` and A. Nothing without adapters.
    ///
    /// Each adapter asks for x by itself, so that the gradient of x gets theirs one by one, whether x is moved for them
    /// or not.
    ///
    /// # Errors
    /// Those of `x` and of `of_a`.
    pub fn inner(
        &self,
        tape: &Tape,
        x: impl Fn() -> Result<Var>,
        of_a: impl Fn(&Var, &Var) -> Result<Var>,
    ) -> Result<Vec<Var>> {
        if !self.is_on(tape) {
            return Ok(Vec::new());
        }
        let inner = |adapter: &Adapter| of_a(&x()?.dropout(self.dropout, &adapter.name)?, &tape.param(adapter.a)?);
        self.adapters.iter().map(inner).collect()
    }

    /// `y`, the product with the weight, and the results of all adapters: `of_b` of what [`inner`](Self::inner) gave
    /// and B. They have the dims of y if there is one for all matrices of the weight. Else each is that of its matrix,
    /// and zeros are those of a matrix that has none.
    ///
    /// # Errors
    /// Those of `of_b`; results of other types than y.
    pub fn add(&self, y: Var, inner: &[Var], of_b: impl Fn(&Var, &Var) -> Result<Var>) -> Result<Var> {
        let (adapters, tape) = (|| self.adapters.iter().zip(inner), y.tape());
        let delta = |adapter: &Adapter, inner| of_b(inner, &tape.param(adapter.b)?);
        let Some((first, of_first)) = adapters().next() else { return Ok(y) };
        let Some(MatrixOf { dim, count, .. }) = first.matrix else { return y.add(&delta(first, of_first)?) };
        // B has as many dims as the outputs: the rank in place of the dim that numbers matrices.
        let dim = y.shape().len() - tape.params().shape(first.b).len() + dim;
        let of = |index: usize| adapters().find(|(of, _)| of.matrix.is_some_and(|matrix| matrix.index == index));
        let part = |index: usize| match of(index) {
            Some((adapter, inner)) => delta(adapter, inner)?.unsqueeze(dim),
            None => {
                let zeros = Tensor::zeros(tape.device(), y.tensor().dtype(), y.shape().with(dim, 1))?;
                let zeros = tape.constant(zeros, y.types());
                y.padding().iter().try_fold(zeros, |zeros, (axis, extent)| zeros.padded(axis, extent))
            }
        };
        let deltas = (1..count).try_fold(part(0)?, |all, index| all.concat(&part(index)?, dim))?;
        y.add(&deltas)
    }
}
