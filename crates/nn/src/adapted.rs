//! A model with low-rank adapters beside its frozen weights.

use crate::{Activation, Batch, Field, Metric, Model, Stage, StageSpec};
use meshwork_core::{Mesh, pass_on};
use meshwork_tensor::param::Adapters;
use meshwork_tensor::{Declarations, Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A model whose parameters are frozen, with the adapters of some of its weights, which alone are trained (LoRA).
///
/// The layers of the model declare and add them: [`Declarations::adapting`]. The frozen model without them is what
/// [`Tape::without_adapters`](meshwork_tensor::Tape::without_adapters) computes.
#[derive(Clone, Debug)]
pub struct Adapted {
    model: Arc<dyn Model>,
    adapters: Arc<Adapters>,
}

impl Adapted {
    /// The model with these adapters.
    pub fn new(model: Arc<dyn Model>, adapters: Arc<Adapters>) -> Self {
        Self { model, adapters }
    }

    /// Refuses a weight of this stage whose layer takes no adapters.
    fn require_declared(&self, params: &Declarations) -> Result<()> {
        for (weight, adapters) in &self.adapters.of {
            let lacks = adapters.iter().any(|of| params.find(&of.b).is_none());
            if params.find(weight).is_some() && lacks {
                return Err(Error::Declaration {
                    name: weight.clone(),
                    problem: "an adapter is asked for, and the layer of this weight adds none".to_owned(),
                    valid: "leave it out of the targets, or declare it in a layer that does, such as ColumnLinear"
                        .to_owned(),
                });
            }
        }
        Ok(())
    }
}

impl Model for Adapted {
    pass_on! {
        self.model =>
        fn num_layers(&self) -> usize;
        fn fields(&self) -> Vec<Field>;
        fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation>;
        fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64>;
        fn reference(&self) -> Option<Field>;
        fn metrics(&self) -> Vec<Metric>;
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let stage = params.adapting(&self.adapters, |params| self.model.stage(params, mesh, part))?;
        self.require_declared(params)?;
        Ok(stage)
    }

    fn decoding(&self) -> Option<Arc<dyn Model>> {
        let decoding = self.model.decoding()?;
        Some(Arc::new(Self { model: decoding, adapters: Arc::clone(&self.adapters) }))
    }
}
