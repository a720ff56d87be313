//! Verification: a program claims much about its values that no rank can check alone. That a value typed `Invariant` or
//! `Replicate` is the same on every rank of an axis, that replicas of a weight have not drifted apart, that every
//! data-parallel rank trains on samples of its own. [`Claims`] hashes the bits of every such value; ranks then exchange
//! their hashes, and all of them are told the first claim that does not hold. Any loop can do so, whenever it chooses;
//! a trainer does in the steps that its plan names.
//!
//! | claim | checked |
//! |---|---|
//! | an output is `Invariant` or `Replicate` | the same bits on all ranks of the axis |
//! | a gradient is `Invariant` or `Replicate` (the operand is `Invariant` or `Partial`) | the same |
//! | a constant or input is `Invariant` or `Replicate` | the same |
//! | a constant or input is `Partial` | not the same on all ranks: its sum would count it once per rank |
//! | weights, optimizer states and reduced gradients of a parameter that an axis does not cut | the same bits |
//! | the samples of data-parallel ranks | no two ranks have the same |
//!
//! ```
//! # use meshwork_core::{Axis, Mesh, Rank, Ty, Types, hash, World};
//! # use meshwork_tensor::tape::{Mode, Normaliser, Position, Weights};
//! # use meshwork_cpu::Cpu;
//! # use meshwork_tensor::{Declarations, Error, Init, Params, Placement, Role, Tape, Tensor, param::Gradients};
//! # use std::sync::Arc;
//! use meshwork_tensor::verify::Claims;
//!
//! # let train = |rank: Arc<Rank>, drifts: bool| {
//! # let (mut all, device) = (Declarations::new(), Cpu::device());
//! # let w = all.declare("w", &[1, 2], Placement::replicated(), Role::Weight, Init::Ones)?;
//! # let mut params = Arc::new(Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &[vec![w]], 0)?);
//! # let types = Types::all(rank.mesh(), Ty::Invariant).with(Axis::Dp, Ty::Shard(0));
//! for step in 0..2 {
//! #   let samples = [1.0, 2.0 + rank.world_rank() as f32];
//!     let claims = Claims::new(rank.clone(), step);
//!     claims.weights(&params)?;
//!     claims.samples(hash::hash(bytemuck::bytes_of(&samples)));
//!     let tape = Tape::new(rank.clone(), params.clone(), device.clone(), Mode::Train, Position::default());
//!     claims.observe(&tape);
//! #   let data = |values: &[f32], shape| Ok::<_, Error>(tape.constant(Tensor::from_slice(&device, values, [1, shape])?, types));
//! #   let loss = data(&samples, 2)?.linear(&tape.param(w)?, 1)?.mean_squared_error(&data(&[1.0], 1)?)?;
//!     // .. forward
//!     let mut gradients = Gradients::default();
//!     tape.backward_from_loss(&loss, Normaliser::LocalTerms(1), Weights::Now, &mut gradients)?;
//!     gradients.all_reduce(&tape)?;
//!     claims.gradients(&params, &gradients)?;
//!     claims.compare()?; // before the update
//! #   drop((tape, loss));
//!     gradients.descend(&mut params, 0.125)?;
//! #   if drifts && rank.world_rank() == 1 {
//! #       Arc::get_mut(&mut params).unwrap().write(w, &[0.5, 0.5])?; // rank 1 alone
//! #   }
//! }
//! # Ok::<_, Error>(())
//! # };
//! # let mesh: Mesh = "dp=2".parse()?;
//! # let run = |drifts| World::threads(&mesh).run_mesh(&mesh, |rank| train(rank, drifts));
//! # run(false)?;
//! # let told = run(true).unwrap_err().to_string();
//! # assert!(told.contains("step 1: the weights of w should be the same over dp, and ranks 0, 1 have different bits"), "{told}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! If rank 1 wrote to its weights after the first step, every rank would have the error
//! `step 1: the weights of w should be the same over dp, and ranks 0, 1 have different bits; ..`.

use crate::error::{Error, Result};
use crate::param::{Gradients, ParamSpec, Params};
use crate::tape::{Observer, Position, Seen, Tape};
use crate::tensor::Tensor;
use meshwork_core::agreement::{self, Agreement, Fact, Must};
use meshwork_core::hash::hash;
use meshwork_core::{Axis, Group, Rank, Ty, Types};
use std::fmt::{self, Display};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The claims of one rank about a step. Clones share them.
#[derive(Clone, Debug)]
pub struct Claims(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    rank: Arc<Rank>,
    step: u64,
    noted: Mutex<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    facts: Vec<(Over, Fact)>,
    /// Tapes that are observed.
    tapes: usize,
}

/// The ranks about which something is claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Over {
    /// All.
    World,
    /// Those that have other samples.
    Data,
    /// The ranks of an axis.
    Axis(Axis),
    /// The ranks of a group that [`Claims::compare_with`] is given under this name.
    Group(String),
}

/// A part of the training state of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// Its elements.
    Weights,
    /// The states of the update rule.
    States,
    /// Its gradient, summed over ranks.
    Gradient,
    /// The sums from which a buffer is updated.
    Statistics,
}

impl Claims {
    /// No claims yet, about `step`: the number that errors name.
    pub fn new(rank: Arc<Rank>, step: u64) -> Self {
        Self(Arc::new(Inner { rank, step, noted: Mutex::default() }))
    }

    /// Notes every value of `tape` from now on, and that its ranks have one seed, step and number of samples, and other
    /// samples on other data-parallel ranks. Errors name tapes by their numbers in the order of these calls.
    pub fn observe(&self, tape: &Tape) {
        let mut noted = self.noted();
        let place = format!("tape {}", noted.tapes);
        noted.tapes += 1;
        drop(noted);
        let mesh = self.0.rank.mesh();
        let Position { seed, step, rank_samples, first_sample } = tape.position();
        for axis in mesh.value_axes().filter(|&axis| mesh.degree(axis) > 1) {
            let own = "give every rank the same: what is random follows from it and from the place of a sample in the whole batch";
            let position = [("seed", seed), ("step", step), ("number of samples of a rank", rank_samples)];
            for (name, value) in position {
                let name = format!("the {name} of {place}, in its Position,");
                self.fact(Over::Axis(axis), Fact::value(name, &value, own));
            }
        }
        // A position without a number of samples was never set.
        if rank_samples > 0 {
            let claim = format!("the first sample of {place}, in its Position,");
            let valid = "count it over the whole batch: what is random in a sample, and an auxiliary loss, follow from its place there";
            self.fact(Over::Data, Fact::hash(format!("{claim} should differ"), Must::Differ, first_sample + 1, valid));
        }
        tape.observe(Rc::new(Observing { claims: self.clone(), place }));
    }

    /// Notes a value that an operation gave, for an observer that sees it for more than this. `place` names the tape.
    ///
    /// # Errors
    /// A value that cannot be downloaded.
    pub fn see(&self, place: &dyn Display, seen: &Seen<'_>, tensor: &Tensor) -> Result<()> {
        let valid = match seen.operand {
            None => "correct the types that the operation infers, or give it inputs that are what their types say",
            Some(_) => {
                "correct the operation's backward: each rank must give the same gradient, summed over the axis if ranks hold parts"
            }
        };
        self.value(seen.types, tensor, false, |ty| {
            let what = match seen.operand {
                None => format!("the output of {}", seen.op),
                Some(operand) => format!("the gradient that {} gives of {operand}", seen.op),
            };
            let layer = seen.params.first().map_or(String::new(), |layer| format!("reads {layer}, "));
            (format!("{what} ({layer}operation {} of {place}) is {ty}", seen.number), valid)
        })
    }

    /// Notes a value from outside of a tape: [`Observer::source`].
    ///
    /// # Errors
    /// A value that cannot be downloaded.
    pub fn source(&self, place: &dyn Display, kind: &str, types: Types, tensor: &Tensor) -> Result<()> {
        self.value(types, tensor, true, |ty| {
            let valid = match ty {
                Ty::Partial => {
                    "its sum would count it once for each rank: type it Invariant, or give each rank its own part of the sum"
                }
                _ => "give every rank of the axis the same values, or type it Shard or Varying",
            };
            (format!("{kind} of {:?} ({place}) is {ty}", tensor.shape()), valid)
        })
    }

    /// Notes what the types of a value claim about it. What is `Partial` varies, if it comes from outside: an operation
    /// may give anything.
    fn value(
        &self,
        types: Types,
        tensor: &Tensor,
        outside: bool,
        claim: impl Fn(Ty) -> (String, &'static str),
    ) -> Result<()> {
        let mesh = self.0.rank.mesh();
        let mut bits = None;
        for (axis, ty) in types.iter().filter(|&(axis, _)| mesh.degree(axis) > 1 && tensor.device().has_values()) {
            let must = match ty {
                Ty::Invariant | Ty::Replicate => Must::Agree,
                Ty::Partial if outside => Must::Vary,
                _ => continue,
            };
            let hash = if let Some(hash) = bits { hash } else { *bits.insert(of_tensor(tensor)?) };
            let (text, valid) = claim(ty);
            self.fact(Over::Axis(axis), Fact::hash(text, must, hash, valid));
        }
        Ok(())
    }

    /// Claims that replicas of weights have not drifted apart: each parameter is the same on the ranks of every axis
    /// that does not cut it.
    ///
    /// # Errors
    /// Weights that cannot be downloaded.
    pub fn weights(&self, params: &Params) -> Result<()> {
        let declarations = params.declarations();
        // Where ranks share the weights out, there are no replicas.
        for id in declarations.ids().filter(|&id| params.is_whole(id)) {
            let spec = declarations.spec(id);
            self.replicas(&self.uncut(spec), StatePart::Weights, &spec.name, &params.value(id)?)?;
        }
        Ok(())
    }

    /// Claims that gradients which are summed over ranks are the same on all of them.
    ///
    /// # Errors
    /// Gradients that cannot be downloaded.
    pub fn gradients(&self, params: &Params, gradients: &Gradients) -> Result<()> {
        for (id, gradient, types) in gradients.typed() {
            let spec = params.declarations().spec(id);
            let mut over = self.uncut(spec);
            over.retain(|over| !types.partial_axes().any(|axis| *over == Over::Axis(axis)));
            self.replicas(&over, StatePart::Gradient, &spec.name, gradient)?;
        }
        Ok(())
    }

    fn replicas(&self, over: &[Over], part: StatePart, name: &str, value: &Tensor) -> Result<()> {
        if !over.is_empty() && value.device().has_values() {
            self.parameter(over, part, name, of_tensor(value)?);
        }
        Ok(())
    }

    /// The axes whose ranks hold the same elements of a parameter.
    pub fn uncut(&self, spec: &ParamSpec) -> Vec<Over> {
        let mesh = self.0.rank.mesh();
        let uncut = |&axis: &Axis| mesh.degree(axis) > 1 && spec.placement.shards().iter().all(|(cut, _)| *cut != axis);
        mesh.value_axes().filter(uncut).map(Over::Axis).collect()
    }

    /// Claims that a part of a parameter, of which this rank's has the `hash`, is the same on all of these ranks.
    pub fn parameter(&self, over: &[Over], part: StatePart, name: &str, hash: u64) {
        for over in over {
            let claim = format!("the {part} of {name} should be the same");
            self.fact(over.clone(), Fact::hash(claim, Must::Agree, hash, part.advice()));
        }
    }

    /// Claims that no two data-parallel ranks have the same samples, of which this rank's have the `hash`; 0 where a
    /// rank has none. A loop whose data repeats on purpose does not claim it.
    pub fn samples(&self, hash: u64) {
        let valid =
            "give each data-parallel rank its own part of the global batch, by rank.mesh().data_rank(rank.coords())";
        self.fact(Over::Data, Fact::hash("the samples of a step should differ", Must::Differ, hash, valid));
    }

    /// Notes any other fact.
    pub fn fact(&self, over: Over, fact: Fact) {
        self.noted().facts.push((over, fact));
    }

    /// Compares everything that was noted since the last comparison with the claims of the other ranks. Collective over
    /// the world, whatever each rank has noted. A rank takes memory for its own claims, however many ranks there are.
    ///
    /// # Errors
    /// [`Error::Claim`] on every rank of the world: the claim noted first of those that do not hold. A failed
    /// communication.
    pub fn compare(&self) -> Result<()> {
        self.compare_with(&[])
    }

    /// The same with claims about ranks of further groups, in an order that all ranks agree on.
    pub fn compare_with(&self, groups: &[(String, &Group)]) -> Result<()> {
        let Inner { rank, step, .. } = &*self.0;
        let _entered = rank.enter("Claims::compare");
        let noted = std::mem::take(&mut self.noted().facts);
        let axes = rank.mesh().value_axes().map(|axis| (Over::Axis(axis), rank.group(axis)));
        let further = groups.iter().map(|(name, group)| (Over::Group(name.clone()), *group));
        let mut first = None;
        for (over, group) in
            [(Over::World, rank.world()), (Over::Data, rank.data_group())].into_iter().chain(axes).chain(further)
        {
            let of_these = || noted.iter().enumerate().filter(|(_, (of, _))| *of == over);
            let mut claims = Agreement::default();
            of_these().for_each(|(_, (_, fact))| claims.push(fact.clone()));
            let Some((at, mut found)) = claims.find(group)? else { continue };
            if let Over::Group(name) = &over {
                found.over = format!("over {name}");
            }
            let place = of_these().nth(at).map_or(noted.len(), |(place, _)| place);
            if first.as_ref().is_none_or(|(earlier, _)| place < *earlier) {
                first = Some((place, found));
            }
        }
        match agreement::first(rank.world(), first)? {
            None => Ok(()),
            Some(claim) => Err(Error::Claim { step: *step, claim: Box::new(claim) }),
        }
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.0.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The observer of one tape.
#[derive(Debug)]
struct Observing {
    claims: Claims,
    place: String,
}

impl Observer for Observing {
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>> {
        self.claims.see(&self.place, seen, seen.tensor)?;
        Ok(None)
    }

    fn source(&self, kind: &'static str, types: Types, tensor: &Tensor) {
        // A rank that could not read the value has a claim less, and the comparison says so.
        _ = self.claims.source(&self.place, kind, types, tensor);
    }
}

/// The hash of the bits of a value, padding included. 0 for zeros: they are no part of a sum.
fn of_tensor(tensor: &Tensor) -> Result<u64> {
    let host = tensor.device().download(tensor.buffer())?;
    let bytes = host.as_bytes()?;
    Ok(if bytes.iter().all(|&byte| byte == 0) { 0 } else { hash(bytes) })
}

impl StatePart {
    /// A valid alternative.
    fn advice(self) -> &'static str {
        match self {
            Self::Weights | Self::States => {
                "load the same weights and states on every rank, and let nothing but the update of all ranks change them"
            }
            Self::Gradient => {
                "correct the backward of the operations that read the parameter: one of them gives ranks different gradients"
            }
            Self::Statistics => {
                "note the same values on all ranks that hold the same samples: gather what the axis cuts before Tape::note"
            }
        }
    }
}

impl Display for StatePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::States => "optimizer states",
            Self::Gradient => "gradient",
            Self::Statistics => "statistics",
        })
    }
}
