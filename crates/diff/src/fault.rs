//! A fault of one ulp, injected to show that a comparison finds it.

use super::compare::Pair;
use super::divergence::{Broken, Location};
use super::program::Program;
use super::run::Change;
use super::side::{Hook, Key, Site};
use super::ulps::Stored;
use meshwork_core::{Axis, DType, Element, Ty, Types, bf16, f16};
use meshwork_engine::program::{Op, Value};
use meshwork_tensor::tape::Seen;
use meshwork_tensor::{Error, Tensor, unravel};
use meshwork_train::config::{Fault, choose_from};
use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

/// One element of one value of the first step's first micro-batch, to be changed: see [`Break::find`].
#[derive(Clone, Debug)]
pub(super) struct Break {
    key: Key,
    /// Size of the change in ulps.
    ulps: u32,
    place: Location,
    /// The change, once a rank of this process has made it.
    done: Arc<Mutex<Option<Change>>>,
}

impl Break {
    /// The fault for `OP` or `OP:backward`: in the first operation of that name, its output, or the first gradient that
    /// it returns for an input.
    ///
    /// # Errors
    /// An unknown name, with the known ones.
    pub(super) fn find(pair: &Pair<'_>, asked: &str) -> Result<Self, Fault> {
        let (name, backward) = match asked.split_once(':') {
            None => (asked, false),
            Some((name, "backward")) => (name, true),
            Some((name, "forward")) => (name, false),
            Some((_, way)) => {
                let problem = format!("an operation is broken forward or backward, not {way:?}");
                return Err(Fault::new("--break", asked, problem, "use OP or OP:backward"));
            }
        };
        let mut known: Vec<&str> = Vec::new();
        for (program, (op, at), place) in pair.of_b() {
            let (Op { name: op_name, values, .. }, key) = (&program.run.ops[op], program.key((op, at)));
            if values[at].operand.is_some() != backward {
                continue;
            }
            if *op_name == name {
                return Ok(Self::new(program, key, &values[at], place.clone()));
            }
            if !known.contains(op_name) {
                known.push(op_name);
            }
        }
        let problem = match backward {
            true => "no operation of that name gives a gradient of a value",
            false => "no operation of that name",
        };
        Err(Fault::new("--break", asked, problem, choose_from(name, &known)))
    }

    fn new(program: &Program, key: Key, value: &Value, place: Location) -> Self {
        // A value that is a sum over ranks is changed in every share. The largest of n shares is at least 1/n of the
        // sum, so n of its ulps make one ulp of the sum. Twice as many survive the roundings in between.
        let shares =
            value.types.partial_axes().filter(|&axis| !axis.is_data()).map(|axis| program.run.mesh.degree(axis));
        let ulps = match shares.product::<usize>() {
            1 => 1,
            shares => 2 * shares as u32,
        };
        Self { key, ulps, place, done: Arc::default() }
    }

    /// The change that ranks of this process have made.
    pub(super) fn change(&self) -> Option<Change> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The fault of the report.
    pub(super) fn broken(&self, (index, ulps): Change) -> Broken {
        Broken { place: self.place.clone(), index, ulps }
    }

    /// The hook that injects the fault.
    pub(super) fn hook(&self) -> Arc<Hook> {
        let fault = self.clone();
        Arc::new(move |site: Site, seen: &Seen<'_>| {
            let key = (site.stage, seen.number, seen.part, seen.operand.map(Cow::Borrowed));
            if (&key, site.micro, seen.position.step) != (&fault.key, 0, 0) || !changed_at(&seen.types, site) {
                return Ok(None);
            }
            let changed = match seen.tensor.dtype() {
                DType::F64 => fault.changed::<f64>(seen.tensor.to_vec()?, seen.tensor)?,
                DType::Bf16 => fault.changed::<bf16>(seen.tensor.to_vec()?, seen.tensor)?,
                DType::F16 => fault.changed::<f16>(seen.tensor.to_vec()?, seen.tensor)?,
                _ => fault.changed::<f32>(seen.tensor.to_vec()?, seen.tensor)?,
            };
            Ok(Some(changed))
        })
    }

    /// The value with its middle element increased.
    fn changed<T: Stored + Element>(&self, mut values: Vec<T>, tensor: &Tensor) -> Result<Tensor, Error> {
        let at = values.len() / 2;
        if let Some(value) = values.get_mut(at) {
            *value = value.up(self.ulps);
            let index = unravel(at, &tensor.shape());
            let change = (index, self.ulps * T::STEP);
            *self.done.lock().unwrap_or_else(PoisonError::into_inner) = Some(change);
        }
        Tensor::from_slice(tensor.device(), &values, tensor.shape())
    }
}

/// Whether the rank changes its value. All replicas do, and all shares of a sum. Of slices only the first does, because
/// its local indices are global. Other dp ranks have other samples and change nothing.
fn changed_at(types: &Types, site: Site) -> bool {
    let everywhere = |axis: Axis, ty| match ty {
        Ty::Invariant | Ty::Replicate => true,
        Ty::Partial => !axis.is_data(),
        Ty::Shard(_) | Ty::Varying => false,
    };
    types.iter().all(|(axis, ty)| everywhere(axis, ty) || site.coords.get(axis) == 0)
}
