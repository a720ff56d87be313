//! The operations of a step as one list, nearly the same for any mesh ([`align`](super::align)). A pass on the meta device finds them,
//! without computing anything.

use super::{Error, Key, Side};
use meshwork_core::{Axis, DType, Mesh, Ty, Types};
use meshwork_engine::{At, ModelPlan, TrainError, Watch, dry_run};
use meshwork_tensor::tape::{Padding, Seen};
use meshwork_tensor::{ParamSpec, Shape, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The operations of a step in the order of forward. Stage boundaries add none, so that an operation has the same place on any mesh.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) mesh: Mesh,
    pub(super) ops: Vec<Op>,
    /// Every parameter of the model.
    pub(super) parameters: Vec<ParamSpec>,
    /// Samples of a micro-batch.
    pub(super) samples: usize,
    /// Samples of a step.
    pub(super) batch: usize,
    /// The type in which the model stores its values.
    pub(super) stored: DType,
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
    /// Of each input: the operation that made it, by its place in the program; `None` for one from outside.
    pub(super) makers: Vec<Option<usize>>,
    /// Its output, then the gradients that it returns for its inputs.
    pub(super) values: Vec<Value>,
}

/// A value that an operation produces, with its layout on each rank.
#[derive(Clone, Debug)]
pub(super) struct Value {
    /// `None` for the output, else the operand whose gradient this is.
    pub(super) operand: Option<&'static str>,
    /// The part of the samples, of an operation that is applied to each of several; else 0.
    pub(super) part: usize,
    /// Of a gradient: the operation that made the operand.
    pub(super) maker: Option<usize>,
    pub(super) types: Types,
    pub(super) padding: Padding,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
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
        let list = Arc::new(List::default());
        for stage in 0..mesh.degree(Axis::Pp) {
            dry_run::watch(model, plan, mesh.rank_at(mesh.coords(0).with(Axis::Pp, stage)), list.clone())?;
        }
        let mut ops = std::mem::take(&mut *list.0.lock().unwrap_or_else(PoisonError::into_inner));
        ops.sort_by_key(|op| (op.stage, op.number));
        name_makers(&mut ops);
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
            stored: plan.mixed.map_or(DType::F32, |mixed| mixed.dtype.dtype()),
        })
    }

    /// The key of the records of a value.
    pub(super) fn key(&self, (op, value): (usize, usize)) -> Key {
        let op = &self.ops[op];
        (op.stage, op.number, op.values[value].part, op.values[value].operand)
    }

    /// Per dim of an assembled value: its true extent, where ranks store padding at its end.
    pub(super) fn real(&self, op: usize, value: usize) -> Vec<Option<usize>> {
        let Value { types, padding, shape, .. } = &self.ops[op].values[value];
        let extent = |dim| padding.iter().find(|&(axis, _)| types.get(axis) == Some(Ty::Shard(dim)));
        (0..shape.len()).map(|dim| extent(dim).map(|(_, extent)| extent)).collect()
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

impl Value {
    /// Whether another one is the output too, or the gradient of the same operand, of the same part of the samples.
    pub(super) fn is_like(&self, other: &Value) -> bool {
        (self.operand, self.part) == (other.operand, other.part)
    }

    /// Whether each rank of some axis has its own.
    pub(super) fn is_varying(&self) -> bool {
        self.types.iter().any(|(_, ty)| ty == Ty::Varying)
    }
}

impl Op {
    pub(super) fn describe(&self) -> String {
        format!("{} ({})", self.name, self.layer)
    }
}

/// Turns numbers within a stage into places in the program. What the first operation of a later stage reads from outside came from the last one of
/// the stage before.
fn name_makers(ops: &mut [Op]) {
    let places: HashMap<(usize, usize), usize> =
        ops.iter().enumerate().map(|(place, op)| ((op.stage, op.number), place)).collect();
    for place in 0..ops.len() {
        let begins = place > 0 && ops[place - 1].stage != ops[place].stage;
        let op = &mut ops[place];
        let values = op.values.iter_mut().map(|value| &mut value.maker);
        for maker in op.makers.iter_mut().chain(values) {
            *maker = maker.and_then(|number| places.get(&(op.stage, number)).copied());
        }
        if let (true, Some(first)) = (begins, op.makers.first_mut()) {
            *first = first.or(Some(place - 1));
        }
    }
}

/// Lists the operations of a rank's first micro-batch.
#[derive(Debug, Default)]
struct List(Mutex<Vec<Op>>);

impl Watch for List {
    fn see(&self, at: At, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        let At { stage, micro, recomputed } = at;
        let &Seen { op: name, number, part, operand, makers, params, types, padding, tensor, .. } = seen;
        if micro > 0 || recomputed && operand.is_none() {
            return Ok(None);
        }
        let mut ops = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let maker = operand.and(makers.first().copied().flatten());
        let (padding, shape, dtype) = (padding.clone(), tensor.shape(), tensor.dtype());
        let value = Value { operand, part, maker, types, padding, shape, dtype };
        match ops.iter_mut().find(|op| (op.stage, op.number) == (stage, number)) {
            Some(op) => op.values.push(value),
            None => {
                let params = params.iter().map(|&name| name.to_owned()).collect();
                let makers = makers.to_vec();
                ops.push(Op { name, layer: String::new(), stage, number, params, makers, values: vec![value] });
            }
        }
        Ok(None)
    }
}
