//! The program of a side: the operations of a step ([`engine::program`](meshwork_engine::program)), with its parameters
//! and batch.

use super::side::{Error, Key, Side};
use meshwork_core::{Axis, DType};
use meshwork_engine::program::{self, Listing};
use meshwork_engine::{ModelPlan, TrainError, dry_run};
use meshwork_tensor::ParamSpec;
use std::borrow::Cow;
use std::sync::Arc;

/// The operations of a side in a step.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) run: program::Program,
    /// Every parameter of the model.
    pub(super) parameters: Vec<ParamSpec>,
    /// Samples of a micro-batch.
    pub(super) samples: usize,
    pub(super) batch: usize,
    /// The type in which the model stores its values.
    pub(super) stored: DType,
}

impl Program {
    /// The operations of one micro-batch of a side.
    ///
    /// # Errors
    /// A plan that does not fit its model.
    pub(super) fn new(side: &Side<'_>) -> Result<Self, Error> {
        let (model, plan) = (&side.model, &side.plan);
        let stages = ModelPlan::new(model.clone(), plan)?;
        let mesh = &plan.mesh;
        let list = Arc::new(Listing::default());
        for stage in 0..mesh.degree(Axis::Pp) {
            dry_run::watch(model, plan, mesh.rank_at(mesh.coords(0).with(Axis::Pp, stage)), list.clone())?;
        }
        Ok(Self {
            run: list.take(mesh),
            parameters: stages.parameters().map_err(TrainError::from)?,
            samples: plan.micro_batch_size().map_err(TrainError::from)?,
            batch: plan.global_batch_size,
            stored: plan.mixed.map_or(DType::F32, |mixed| mixed.dtype.dtype()),
        })
    }

    /// The key of the records of a value.
    pub(super) fn key(&self, (op, value): (usize, usize)) -> Key {
        let op = &self.run.ops[op];
        (op.stage, op.number, op.values[value].part, op.values[value].operand.map(Cow::Borrowed))
    }

    /// Refuses two programs of other parameters or batches.
    ///
    /// # Errors
    /// The first parameter that differs.
    pub(super) fn require_same(&self, other: &Program) -> Result<(), Error> {
        let refuse = |problem: String| Err(Error::Structure(problem));
        let names = |program: &Program| -> Vec<String> {
            program.parameters.iter().map(|spec| format!("{} {:?}", spec.name, spec.dims)).collect()
        };
        let (a, b) = (names(self), names(other));
        if let Some((a, b)) = a.iter().zip(&b).find(|(a, b)| a != b) {
            return refuse(format!("A has a parameter {a} where B has {b}"));
        }
        if self.batch != other.batch || a.len() != b.len() {
            let sizes = |program: &Program| (program.parameters.len(), program.batch);
            return refuse(format!("A has (parameters, samples a step) {:?}, B {:?}", sizes(self), sizes(other)));
        }
        Ok(())
    }
}
