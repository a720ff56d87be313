//! The true extents of the results of operations on [padded](Padding) shards.

use super::prelude::*;
use super::{Op, Padded};
use crate::error::divisors;

/// One operand that is cut over an axis.
struct Cut<'a> {
    name: &'static str,
    value: &'a Var,
    axis: Axis,
    dim: usize,
}

impl Cut<'_> {
    fn degree(&self) -> usize {
        self.value.tape.rank().mesh().degree(self.axis)
    }

    /// The elements that all ranks store, over every axis that cuts the dim.
    fn stored(&self) -> usize {
        let mesh = self.value.tape.rank().mesh();
        self.value.types.cuts(self.dim).fold(self.value.shape()[self.dim], |stored, axis| stored * mesh.degree(axis))
    }

    /// The elements that there are.
    fn extent(&self) -> usize {
        let padded = self.value.types.cuts(self.dim).find_map(|axis| self.value.padding.extent(axis));
        padded.unwrap_or_else(|| self.stored())
    }

    fn refuse_zeros(&self, op: &'static str) -> Error {
        let extent = self.extent();
        let problem = "the zeros would count as elements".to_owned();
        let gather = format!("all_gather {} over {} first, which gives the {extent}", self.name, self.axis);
        self.refuse(op, problem, format!("{gather}, or use a degree that divides them: {}", divisors(extent)))
    }

    fn refuse(&self, op: &'static str, problem: String, valid: String) -> Error {
        let (dim, axis, degree) = (self.dim, self.axis, self.degree());
        let extent = self.extent();
        Error::Extent { op, operand: self.name, extent, dim, axis, degree, stored: self.stored(), problem, valid }
    }
}

/// The operands that are cut over `axis`.
fn cuts<'a>(op: &dyn Op, inputs: &'a [&Var], axis: Axis) -> impl Iterator<Item = Cut<'a>> {
    op.operands().iter().zip(inputs).filter_map(move |(name, value)| match value.types.get(axis) {
        Some(Ty::Shard(dim)) if dim < value.shape().len() => Some(Cut { name, value, axis, dim }),
        _ => None,
    })
}

/// The padding of the result of an operation.
///
/// # Errors
/// Operands whose extents the operation does not take.
pub(super) fn of_result(op: &dyn Op, inputs: &[&Var], types: Types) -> Result<Padding> {
    let padded = op.padded();
    if let Padded::Knows { axis, extent } = padded {
        for cut in cuts(op, inputs, axis) {
            if cut.extent() != extent {
                let problem = format!("{} was told {extent}", op.name());
                return Err(cut.refuse(op.name(), problem, "name the extent that was declared".to_owned()));
            }
        }
    }
    let mut kept = Padding::default();
    for (axis, mut extent) in inputs.iter().flat_map(|input| input.padding.iter()) {
        let Some(cut) = cuts(op, inputs, axis).find(|cut| cut.value.padding.extent(axis).is_some()) else { continue };
        match padded {
            Padded::Knows { axis: known, .. } if known == axis => continue,
            Padded::Knows { .. } if op.only_moves() => {}
            Padded::Refused | Padded::Knows { .. } => {
                return Err(cut.refuse_zeros(op.name()));
            }
            Padded::Zeros => {
                if let Some(other) = cuts(op, inputs, axis).find(|other| other.extent() != extent) {
                    let problem = format!("{} has {}", other.name, other.extent());
                    return Err(cut.refuse(op.name(), problem, "operands of one extent".to_owned()));
                }
            }
            Padded::Moved { from, to } => {
                if let Some(dim) = types.get(axis).and_then(Ty::dim) {
                    let (old, new) = (from[cut.dim].max(1), to[dim]);
                    if !(extent * new).is_multiple_of(old) {
                        let valid = format!(
                            "extents of which {extent} elements fill a whole number, or all_gather x over {axis} first"
                        );
                        let problem = format!("{} would end inside of an index of dim {dim}", op.name());
                        return Err(cut.refuse(op.name(), problem, valid));
                    }
                    extent = extent * new / old;
                }
            }
        }
        if matches!(types.get(axis), Some(Ty::Shard(_))) && kept.extent(axis).is_none() {
            kept = Padding::new(kept.iter().chain([(axis, extent)]));
        }
    }
    Ok(kept)
}

impl Var {
    /// Says that a value from outside has only `extent` elements along the dim that `axis` cuts, and that what the
    /// shards store beyond is zero. Parameters, and values computed from them, need no such call.
    ///
    /// # Errors
    /// A value that `axis` does not cut, or whose ranks store fewer elements.
    pub fn padded(&self, axis: Axis, extent: usize) -> Result<Var> {
        let cut = |dim| Cut { name: "x", value: self, axis, dim };
        let Some(cut) = self.ty(axis).dim().filter(|&dim| dim < self.shape().len()).map(cut) else {
            return Err(Error::Shape {
                op: "padded",
                problem: format!("x is {} on {axis}: only a Shard can be padded", self.ty(axis)),
                shapes: vec![self.shape().to_vec()],
            });
        };
        let stored = cut.stored();
        if extent > stored {
            return Err(cut.refuse(
                "padded",
                format!("cannot have {extent}"),
                "name the elements that there are".to_owned(),
            ));
        }
        let others = self.padding.iter().filter(|&(padded, _)| padded != axis);
        let padding = Padding::new(others.chain((extent < stored).then_some((axis, extent))));
        Ok(Var { padding, ..self.clone() })
    }

    /// Refuses a value whose shards are padded, where something beyond the tape would take the zeros for elements.
    ///
    /// # Errors
    /// [`Error::Extent`] with the axis and the true extent.
    pub fn require_unpadded(&self, op: &'static str, name: &'static str) -> Result<()> {
        let cut = |(axis, ty): (Axis, Ty)| ty.dim().map(|dim| Cut { name, value: self, axis, dim });
        let padded = |cut: &Cut<'_>| self.padding.extent(cut.axis).is_some();
        self.types.iter().filter_map(cut).find(padded).map_or(Ok(()), |cut| Err(cut.refuse_zeros(op)))
    }
}

impl Tape {
    /// The padding of a parameter as this rank holds it.
    pub(super) fn padding_of(&self, id: crate::param::ParamId) -> Result<Padding> {
        let (spec, mesh) = (self.inner.params.declarations().spec(id), self.rank().mesh());
        let (stored, shards) = (self.inner.params.shape(id), spec.placement.shards());
        let padded = shards.iter().filter(|&&(_, dim)| {
            let ranks: usize =
                shards.iter().filter(|(_, cut)| *cut == dim).map(|&(axis, _)| mesh.degree(axis)).product();
            stored[dim] * ranks != spec.dims[dim]
        });
        let padding = Padding::new(padded.map(|&(axis, dim)| (axis, spec.dims[dim])));
        let unknown = padding.iter().find(|&(axis, _)| !mesh.has(axis));
        match unknown {
            None => Ok(padding),
            Some((axis, extent)) => Err(Error::Declaration {
                name: spec.name.clone(),
                problem: format!(
                    "its {extent} elements over {axis} are padded, and a mesh without {axis} does not know of it"
                ),
                valid: format!("use a mesh that has this axis: {axis}=1"),
            }),
        }
    }
}
