//! The operations of a step as one list, nearly the same for any mesh, and [which of two lists correspond](Pairs). A
//! pass on the meta device finds them, without computing anything.

mod align;

pub use align::Pairs;

use crate::prelude::*;
use crate::{At, Watch};
use meshwork_tensor::Shape;
use meshwork_tensor::tape::{Observer, Padding, Seen};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The operations of a step in the order of forward. Stage boundaries add none, so that an operation has the same place
/// on any mesh.
#[derive(Clone, Debug)]
pub struct Program {
    /// The mesh that it runs on.
    pub mesh: Mesh,
    /// The operations.
    pub ops: Vec<Op>,
    /// The constants.
    pub constants: Vec<Constant>,
}

/// A value that a stage makes of values of the host.
#[derive(Clone, Debug)]
pub struct Constant {
    /// The stage.
    pub stage: usize,
    /// The operations of the stage before it.
    pub before: usize,
    /// Its types.
    pub types: Types,
    /// Its extents on one rank.
    pub shape: Shape,
    /// Its elements, as far as the device has them.
    pub values: Option<Buffer>,
}

/// An operation of a program.
#[derive(Clone, Debug)]
pub struct Op {
    /// Its name.
    pub name: &'static str,
    /// The layer whose parameters it reads, else `after` the last such layer.
    pub layer: String,
    /// Its stage.
    pub stage: usize,
    /// Its number in the stage.
    pub number: usize,
    /// The parameters that it reads.
    pub params: Vec<String>,
    /// Per input: the place in the program of the operation that made it; `None` for an input from outside.
    pub makers: Vec<Option<usize>>,
    /// [Numbers](meshwork_tensor::tape::Op::scalars) that it computes with.
    pub scalars: Vec<(&'static str, f64)>,
    /// Its output, then the gradients that it returns for its inputs.
    pub values: Vec<Value>,
}

/// A value that an operation produces, with its layout on each rank.
#[derive(Clone, Debug)]
pub struct Value {
    /// `None` for the output, else the operand whose gradient this is.
    pub operand: Option<&'static str>,
    /// The number of the part of the samples, if the operation is applied to several parts one by one; else 0.
    pub part: usize,
    /// Of a gradient: the operation that made the operand.
    pub maker: Option<usize>,
    /// Its types.
    pub types: Types,
    /// True extents of the dims that are padded.
    pub padding: Padding,
    /// Its extents on one rank.
    pub shape: Shape,
    /// The type of its elements.
    pub dtype: DType,
}

impl Value {
    /// Whether another value is the output too, or the gradient of the same operand, of the same part of the samples.
    pub fn is_like(&self, other: &Value) -> bool {
        (self.operand, self.part) == (other.operand, other.part)
    }

    /// Whether each rank of some axis has a value of its own.
    pub fn is_varying(&self) -> bool {
        self.types.iter().any(|(_, ty)| ty == Ty::Varying)
    }

    /// Per dim: the true extent over all ranks, where these store padding at its end.
    pub fn real(&self) -> Vec<Option<usize>> {
        let Value { types, padding, shape, .. } = self;
        let extent = |dim| padding.iter().find(|&(axis, _)| types.get(axis) == Some(Ty::Shard(dim)));
        (0..shape.len()).map(|dim| extent(dim).map(|(_, extent)| extent)).collect()
    }

    /// Its extents over all ranks of `mesh`. A value that is `Varying` has none; these are then its extents on one
    /// rank.
    pub fn extents(&self, mesh: &Mesh) -> Vec<usize> {
        let whole = whole_extents(mesh, self.types, &self.shape);
        whole.into_iter().zip(self.real()).map(|(stored, real)| real.unwrap_or(stored)).collect()
    }
}

impl Program {
    /// Whether the tokens of a value lie in the order in which ranks of context parallelism cut them: it is cut so, or
    /// laid out anew of a value that is.
    pub fn lies_in_order(&self, (op, value): (usize, usize)) -> bool {
        let value = &self.ops[op].values[value];
        match (value.operand, value.maker) {
            (None, _) => self.output_lies_in_order(op),
            (Some(_), Some(maker)) => self.output_lies_in_order(maker),
            (Some(_), None) => is_cut(value.types),
        }
    }

    fn output_lies_in_order(&self, op: usize) -> bool {
        let Op { name, makers, values, .. } = &self.ops[op];
        let cut = values.iter().any(|value| value.operand.is_none() && is_cut(value.types));
        let laid = || makers.first().copied().flatten().is_some_and(|maker| self.output_lies_in_order(maker));
        match *name {
            _ if cut => true,
            "order" => !laid(),
            _ => self.ops[op].is_layout() && laid(),
        }
    }
}

fn is_cut(types: Types) -> bool {
    Axis::CONTEXT.into_iter().any(|axis| types.get(axis) == Some(Ty::Shard(1)))
}

/// The extents over all ranks of `mesh` of a value that is not padded.
pub(crate) fn whole_extents(mesh: &Mesh, types: Types, local: &[usize]) -> Vec<usize> {
    let degree = |dim| {
        types.iter().filter(|&(_, ty)| ty == Ty::Shard(dim)).map(|(axis, _)| mesh.degree(axis)).product::<usize>()
    };
    local.iter().enumerate().map(|(dim, extent)| extent * degree(dim)).collect()
}

impl Op {
    /// Its name and layer.
    pub fn describe(&self) -> String {
        format!("{} ({})", self.name, self.layer)
    }
}

/// Lists the operations of a rank's first micro-batch.
#[derive(Debug, Default)]
pub struct Listing(Mutex<Listed>);

#[derive(Debug, Default)]
struct Listed {
    ops: Vec<Op>,
    constants: Vec<Constant>,
    /// The place in the list, by stage and number in the stage.
    places: HashMap<(usize, usize), usize>,
}

impl Listing {
    /// The operations in the order of forward, with their layers.
    pub fn take(&self, mesh: &Mesh) -> Program {
        let listed = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let Listed { mut ops, constants, .. } = listed;
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
        Program { mesh: mesh.clone(), ops, constants }
    }

    fn note(&self, stage: usize, seen: &Seen<'_>) {
        let &Seen { op: name, number, part, operand, makers, params, types, padding, tensor, scalars, .. } = seen;
        let mut listed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Listed { ops, places, .. } = &mut *listed;
        let maker = operand.and(makers.first().copied().flatten());
        let (padding, shape, dtype) = (padding.clone(), tensor.shape(), tensor.dtype());
        let value = Value { operand, part, maker, types, padding, shape, dtype };
        match places.get(&(stage, number)) {
            Some(&place) => ops[place].values.push(value),
            None => {
                places.insert((stage, number), ops.len());
                let params = params.iter().map(|&name| name.to_owned()).collect();
                let (makers, scalars) = (makers.to_vec(), scalars.to_vec());
                ops.push(Op {
                    name,
                    layer: String::new(),
                    stage,
                    number,
                    params,
                    makers,
                    scalars,
                    values: vec![value],
                });
            }
        }
    }
}

impl Watch for Listing {
    fn see(&self, at: At, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        if at.micro == 0 && !(at.recomputed && seen.operand.is_none()) {
            self.note(at.stage, seen);
        }
        Ok(None)
    }
}

/// Lists what one tape of a stage computes.
#[derive(Debug)]
pub(crate) struct ListingOf {
    pub(crate) listing: Arc<Listing>,
    pub(crate) stage: usize,
}

impl Observer for ListingOf {
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        self.listing.note(self.stage, seen);
        Ok(None)
    }

    fn source(&self, _: &'static str, types: Types, tensor: &Tensor) {
        let mut listed = self.listing.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = listed.ops.iter().rev().take_while(|op| op.stage == self.stage).count();
        let values = tensor.buffer().as_bytes().is_ok().then(|| tensor.buffer().clone());
        let shape = tensor.shape();
        listed.constants.push(Constant { stage: self.stage, before, types, shape, values });
    }
}

/// Turns numbers within a stage into places in the program. The first operation of a later stage reads the output of
/// the stage before from outside.
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
