//! The operations of a step as one list, the same for any mesh. A pass on the meta device finds them, without computing
//! anything.

use super::{Error, Key, Side};
use meshwork_core::{Axis, Mesh, Ty, Types};
use meshwork_engine::{At, ModelPlan, TrainError, Watch, dry_run};
use meshwork_tensor::tape::{Padding, Seen};
use meshwork_tensor::{ParamSpec, Shape, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// The operations of a step in the order of forward. Stage boundaries add none, so that an operation has the same place on any mesh.
#[derive(Clone, Debug)]
pub struct Program {
    pub(super) mesh: Mesh,
    pub(super) ops: Vec<Op>,
    /// Every parameter of the model.
    pub(super) parameters: Vec<ParamSpec>,
    /// Samples of a micro-batch.
    pub(super) samples: usize,
    /// Samples of a step.
    pub(super) batch: usize,
}

/// One of them.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) name: &'static str,
    /// The layer whose parameters it reads, else `after` the last such layer.
    pub(super) layer: String,
    /// Its stage, and its number there.
    pub(super) stage: usize,
    pub(super) number: usize,
    pub(super) params: Vec<String>,
    /// Its output, then the gradients that it returns for its inputs.
    pub(super) values: Vec<Value>,
}

/// A value that an operation produces, with its layout on each rank.
#[derive(Clone, Debug)]
pub(super) struct Value {
    /// `None` for the output, else the operand whose gradient this is.
    pub(super) operand: Option<&'static str>,
    pub(super) types: Types,
    pub(super) padding: Padding,
    pub(super) shape: Shape,
}

impl Program {
    /// The operations of one micro-batch of a side.
    ///
    /// # Errors
    /// A plan that does not fit its model.
    pub fn new(side: &Side<'_>) -> Result<Self, Error> {
        let (model, plan) = (&side.model, &side.plan);
        let stages = ModelPlan::new(model.clone(), plan)?;
        let mesh = &plan.mesh;
        let list = Arc::new(List::default());
        for stage in 0..mesh.degree(Axis::Pp) {
            dry_run::watch(model, plan, mesh.rank_at(mesh.coords(0).with(Axis::Pp, stage)), list.clone())?;
        }
        let mut ops = std::mem::take(&mut *list.0.lock().unwrap_or_else(PoisonError::into_inner));
        ops.sort_by_key(|op| (op.stage, op.number));
        let mut layer: Option<String> = None;
        for op in &mut ops {
            if let Some(name) = op.params.first() {
                layer = Some(name.rsplit_once('.').map_or(&**name, |(layer, _)| layer).to_owned());
            }
            op.layer = match &layer {
                Some(layer) if op.params.is_empty() => format!("after {layer}"),
                Some(layer) => layer.clone(),
                None => "at the start".to_owned(),
            };
        }
        Ok(Self {
            mesh: mesh.clone(),
            ops,
            parameters: stages.parameters().map_err(TrainError::from)?,
            samples: plan.micro_batch_size().map_err(TrainError::from)?,
            batch: plan.global_batch_size,
        })
    }

    /// The key of the records of a value.
    pub(super) fn key(&self, op: usize, value: usize) -> Key {
        let op = &self.ops[op];
        (op.stage, op.number, op.values[value].operand)
    }

    /// Per dim of an assembled value: its true extent, where ranks store padding at its end.
    pub(super) fn real(&self, op: usize, value: usize) -> Vec<Option<usize>> {
        let Value { types, padding, shape, .. } = &self.ops[op].values[value];
        let extent = |dim| padding.iter().find(|&(axis, _)| types.get(axis) == Some(Ty::Shard(dim)));
        (0..shape.len()).map(|dim| extent(dim).map(|(_, extent)| extent)).collect()
    }

    /// Refuses two programs whose operations do not correspond.
    ///
    /// # Errors
    /// The first operation or parameter that differs.
    pub fn require_same(&self, other: &Program) -> Result<(), Error> {
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
        for (at, (a, b)) in self.ops.iter().zip(&other.ops).enumerate() {
            let operands = |op: &Op| op.values.iter().map(|value| value.operand).collect::<Vec<_>>();
            if kind(a.name) != kind(b.name) || a.layer != b.layer || operands(a) != operands(b) {
                return refuse(format!("operation #{at} is {} on A and {} on B", a.describe(), b.describe()));
            }
        }
        match (self.ops.len(), other.ops.len()) {
            (a, b) if a == b => Ok(()),
            (a, b) => refuse(format!("A has {a} operations, B {b}")),
        }
    }
}

/// Operations of one kind produce the same value, cut over the ranks differently: region boundaries with and without
/// sequence parallelism.
fn kind(op: &'static str) -> &'static str {
    match op {
        "all_gather" => "copy",
        "reduce_scatter" => "all_reduce",
        other => other,
    }
}

impl Op {
    fn describe(&self) -> String {
        let gradients: Vec<&str> = self.values.iter().filter_map(|value| value.operand).collect();
        format!("{} ({}, gradients of {gradients:?})", self.name, self.layer)
    }
}

/// Lists the operations of a rank's first micro-batch.
#[derive(Debug, Default)]
struct List(Mutex<Vec<Op>>);

impl Watch for List {
    fn see(&self, at: At, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        let At { stage, micro, recomputed } = at;
        let &Seen { op: name, number, part, operand, params, types, padding, tensor, .. } = seen;
        if micro > 0 || part > 0 || recomputed && operand.is_none() {
            return Ok(None);
        }
        let mut ops = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let value = Value { operand, types, padding: padding.clone(), shape: tensor.shape() };
        match ops.iter_mut().find(|op| (op.stage, op.number) == (stage, number)) {
            Some(op) => op.values.push(value),
            None => {
                let params = params.iter().map(|&name| name.to_owned()).collect();
                ops.push(Op { name, layer: String::new(), stage, number, params, values: vec![value] });
            }
        }
        Ok(None)
    }
}
