//! Verify mode. A program claims much about its values that no rank can check alone: that a value typed `Invariant` or
//! `Replicate` is the same on every rank of an axis, that replicas of a weight have not drifted apart. In a verified step
//! each rank hashes the bits of every such value; at the end of the step the ranks of each axis exchange their hashes, and
//! the first claim that does not hold is named.
//!
//! | claim | checked |
//! |---|---|
//! | an output is `Invariant` or `Replicate` | the same bits on all ranks of the axis |
//! | a gradient is `Invariant` or `Replicate` (the operand is `Invariant` or `Partial`) | the same |
//! | a constant or input is `Invariant` or `Replicate` | the same |
//! | a constant or input is `Partial` | not the same on all ranks: its sum would count it once per rank |
//! | weights, optimizer states and (in synchronous schedules) reduced gradients of a parameter that an axis does not cut | the same bits |
//! | the sums of statistics from which a buffer is updated | the same bits on all ranks that hold it |
//! | a tied weight, or that of a replicated stage | the same bits on all pp ranks that hold it |

use crate::{At, TrainError};
use meshwork_core::hash::{combine, hash};
use meshwork_core::{Axis, Buffer, Group, Mesh, ReduceOp, Ty, Types};
use meshwork_tensor::Tensor;
use meshwork_tensor::tape::Seen;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// In which steps every claim about values is [verified](crate::verify).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// In none. Nor is the program [held against that of one rank](TrainError::OneRank) when a trainer or a decoder is made.
    Off,
    /// In the first step that a trainer makes.
    #[default]
    FirstStep,
    /// In every n-th step, beginning with the first.
    Every(u64),
}

impl Verify {
    /// Whether the step with this number, from 0 for the first one of a trainer, is verified.
    pub fn includes(self, step: u64) -> bool {
        match self {
            Self::Off => false,
            Self::FirstStep => step == 0,
            Self::Every(steps) => step.is_multiple_of(steps.max(1)),
        }
    }
}

/// The claims of one rank in a step.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<Vec<Claim>>);

#[derive(Clone, Debug)]
struct Claim {
    over: Over,
    /// Whether the value must be the same on all ranks; else it must not be.
    same: bool,
    /// 0: nothing is claimed on this rank.
    hash: u64,
    what: What,
}

/// The ranks about which something is claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// Those of an axis.
    Axis(Axis),
    /// Those of these pp ranks.
    Tied(Vec<usize>),
}

/// A value, as messages name it.
#[derive(Clone, Debug)]
enum What {
    /// The output of an operation, or the gradient that it gave of an operand.
    Value { op: &'static str, number: usize, operand: Option<&'static str>, layer: Option<String>, at: At, ty: Ty },
    /// A constant or an input.
    Source { kind: &'static str, at: At, shape: Vec<usize>, ty: Ty },
    /// Weights, states or gradients of a parameter.
    Parameter { part: &'static str, name: String },
}

impl Claims {
    /// Notes a value that an operation gave.
    pub fn see(&self, mesh: &Mesh, at: At, seen: &Seen<'_>, tensor: &Tensor) -> Result<(), meshwork_tensor::Error> {
        // What a recomputed forward gives has been seen.
        if at.recomputed && seen.operand.is_none() {
            return Ok(());
        }
        let what = |ty| What::Value {
            op: seen.op,
            number: seen.number,
            operand: seen.operand,
            layer: seen.params.first().map(|&name| name.to_owned()),
            at,
            ty,
        };
        self.note(mesh, seen.types, tensor, false, what)
    }

    /// Notes a value from outside of the tape.
    pub fn source(
        &self,
        mesh: &Mesh,
        at: At,
        (kind, types): (&'static str, Types),
        tensor: &Tensor,
    ) -> Result<(), meshwork_tensor::Error> {
        if at.recomputed {
            return Ok(());
        }
        self.note(mesh, types, tensor, true, |ty| What::Source { kind, at, shape: tensor.shape().to_vec(), ty })
    }

    fn note(
        &self,
        mesh: &Mesh,
        types: Types,
        tensor: &Tensor,
        partial: bool,
        what: impl Fn(Ty) -> What,
    ) -> Result<(), meshwork_tensor::Error> {
        let mut bits = None;
        for (axis, ty) in types.iter().filter(|&(axis, _)| mesh.degree(axis) > 1) {
            let same = match ty {
                Ty::Invariant | Ty::Replicate => true,
                Ty::Partial if partial => false,
                _ => continue,
            };
            let hash = match bits {
                Some(hash) => hash,
                None => *bits.insert(of_tensor(tensor)?),
            };
            self.push(Claim { over: Over::Axis(axis), same, hash, what: what(ty) });
        }
        Ok(())
    }

    /// Notes that a part of a parameter, its weights, say, is the same on all of these ranks.
    pub fn parameter(&self, over: &Over, part: &'static str, name: &str, hash: u64) {
        let what = What::Parameter { part, name: name.to_owned() };
        self.push(Claim { over: over.clone(), same: true, hash, what });
    }

    fn push(&self, claim: Claim) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(claim);
    }

    /// Compares the claims about the ranks of `group` with theirs. Collective over the group. A rank takes memory for its own claims, however
    /// many ranks there are: it gets the least and the largest hash of each, and those of all ranks only of a claim that does not hold.
    ///
    /// # Errors
    /// The first claim that does not hold.
    pub fn compare(&self, group: &Group, over: &Over, step: u64) -> Result<(), TrainError> {
        let claims = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let claims: Vec<&Claim> = claims.iter().filter(|claim| claim.over == *over).collect();
        // Every rank has as many claims: the communicator refuses ranks that ran other programs. The largest `!hash` belongs to the least hash.
        let mut ends: Vec<i64> = claims.iter().flat_map(|claim| [claim.hash as i64, !claim.hash as i64]).collect();
        group.all_reduce_slice(&mut ends, ReduceOp::Max)?;
        for (claim, &[largest, least]) in claims.into_iter().zip(ends.as_chunks().0) {
            // The same question, and answer, on every rank.
            let holds = if claim.same { largest == !least } else { largest != !least || largest == 0 };
            if holds {
                continue;
            }
            let mut hashes = vec![0; group.size()];
            group.all_gather_slice(&[claim.hash as i64], &mut hashes)?;
            if let Some(broken) = claim.broken(&hashes, group.world_ranks()) {
                let (claim, valid) = (format!("{} {over}", claim.what), claim.what.advice());
                return Err(TrainError::Claim { step, claim, broken, valid });
            }
        }
        Ok(())
    }
}

impl Claim {
    /// How the hashes of all ranks contradict the claim, if they do.
    fn broken(&self, hashes: &[i64], ranks: &[usize]) -> Option<String> {
        let mut counts: BTreeMap<i64, usize> = BTreeMap::new();
        hashes.iter().for_each(|&hash| *counts.entry(hash).or_default() += 1);
        let (most, alike) = counts.into_iter().max_by_key(|&(_, count)| count)?;
        let others = hashes.iter().zip(ranks).filter(|(hash, _)| **hash != most).map(|(_, rank)| rank.to_string());
        let others: Vec<String> = others.collect();
        match (self.same, others.is_empty()) {
            // With as many ranks on either side nobody can tell which are right.
            (true, false) if 2 * alike <= hashes.len() => {
                let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                Some(format!("ranks {} have different bits", ranks.join(", ")))
            }
            (true, false) => Some(format!("the bits of rank {} differ from those of the others", others.join(", "))),
            (false, true) if most != 0 => {
                Some("it has the same bits on all of them: its sum would count it once for each rank".to_owned())
            }
            _ => None,
        }
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Axis(axis) => write!(f, "over {axis}"),
            Self::Tied(pp_ranks) => write!(f, "over the pp ranks {pp_ranks:?}, which share it"),
        }
    }
}

fn of_tensor(tensor: &Tensor) -> Result<u64, meshwork_tensor::Error> {
    let host = tensor.device().download(tensor.buffer())?;
    let bytes = host.as_bytes()?;
    // Zeros are no part of a sum: 0 stands for nothing to claim about a Partial value.
    Ok(if bytes.iter().all(|&byte| byte == 0) { 0 } else { hash(bytes) })
}

/// The hash of some elements of a parameter.
pub(crate) fn of_floats(values: Vec<f32>) -> Result<u64, meshwork_tensor::Error> {
    Ok(hash(Buffer::from_vec(values).as_bytes()?))
}

/// The hash of the sums of a statistic.
pub(crate) fn of_doubles(values: &[f64]) -> u64 {
    values.iter().map(|value| value.to_bits()).fold(values.len() as u64, combine)
}

impl What {
    /// What would be valid.
    fn advice(&self) -> &'static str {
        match self {
            Self::Value { operand: None, .. } => {
                "correct the types that the operation infers, or give it inputs that are what their types say"
            }
            Self::Value { operand: Some(_), .. } => {
                "correct the operation's backward: each rank must give the same gradient, summed over the axis if ranks hold parts"
            }
            Self::Source { ty: Ty::Partial, .. } => "type it Invariant, or give each rank its own part of the sum",
            Self::Source { .. } => "give every rank of the axis the same values, or type it Shard or Varying",
            Self::Parameter { part: "gradient", .. } => {
                "correct the backward of the operations that read the parameter: one of them gives ranks different gradients"
            }
            Self::Parameter { part: "statistics", .. } => {
                "note the same values on all ranks that hold the same samples: gather what the axis cuts before Tape::note"
            }
            Self::Parameter { .. } => {
                "load the same weights and states on every rank, and let only the trainer change them"
            }
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value { op, number, operand, layer, at: At { stage, micro, .. }, ty } => {
                match operand {
                    None => write!(f, "the output of {op}")?,
                    Some(operand) => write!(f, "the gradient that {op} gives of {operand}")?,
                }
                let layer = layer.as_ref().map_or(String::new(), |layer| format!("reads {layer}, "));
                write!(f, " ({layer}operation {number} of stage {stage}, micro-batch {micro}) is {ty}")
            }
            Self::Source { kind, at: At { stage, micro, .. }, shape, ty } => {
                write!(f, "{kind} of {shape:?} (stage {stage}, micro-batch {micro}) is {ty}")
            }
            Self::Parameter { part, name } => write!(f, "the {part} of {name} should be the same"),
        }
    }
}
