//! Inference rules of local operations: the type of the result, per axis, or a refusal that says what is missing.
//!
//! Dims count in the operand concerned; a contraction counts its dims from the last one. The rules do not depend on
//! tensors: an operation calls the rule that states its algebra.

mod dims;
mod elements;

pub use dims::{moves_dims, part_of, regroup, reshape, sum_over, transpose};
pub use elements::{elementwise, product, sample_loss};

use super::{SpmdError, Ty, Types};
use crate::axes::Axis;

/// One operand of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Its role in the operation, for errors.
    pub name: &'a str,
    /// Its type on each axis.
    pub types: Types,
    /// Its number of dims.
    pub ndim: usize,
    /// What it was read from, so that [`resolve_reads`] and [`resolve_constants`] may change its types.
    pub origin: Origin,
    /// Dims of the first operand over which this one, of extent 1 there, is repeated: a bit each. Over the leading dims
    /// that it lacks it is repeated without saying so.
    pub repeats: u32,
}

/// What an operand was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Computed, or given with a gradient.
    Value,
    /// Read straight from a parameter.
    Parameter,
    /// Given, or computed from what is given, without a gradient.
    Constant,
}

impl<'a> Operand<'a> {
    /// An operand that is not a parameter.
    pub fn value(name: &'a str, types: Types, ndim: usize) -> Self {
        Self { name, types, ndim, origin: Origin::Value, repeats: 0 }
    }

    /// A parameter: `Shard` where its placement says so, `Replicate` elsewhere.
    pub fn parameter(name: &'a str, types: Types, ndim: usize) -> Self {
        Self { origin: Origin::Parameter, ..Self::value(name, types, ndim) }
    }

    /// The same operand, repeated over these dims of the first operand too, where its extent is 1.
    #[must_use]
    pub fn repeated(self, dims: impl IntoIterator<Item = usize>) -> Self {
        Self { repeats: dims.into_iter().fold(self.repeats, |repeats, dim| repeats | 1 << dim), ..self }
    }

    /// Whether it is repeated over dim `dim` of an operand of `ndim` dims.
    fn is_repeated(&self, dim: usize, ndim: usize) -> bool {
        dim < ndim.saturating_sub(self.ndim) || self.repeats >> dim & 1 == 1
    }
}

/// The result of a rule on one axis: a type, or (problem, fix).
pub type Verdict = Result<Ty, (String, String)>;

/// Reading a replicated parameter yields, per axis, `Invariant` if every other operand is `Invariant` there, else
/// `Replicate`. No collective is involved: the gradient of a `Replicate` read stays `Partial` for the reducer.
pub fn resolve_reads(operands: &mut [Operand<'_>]) {
    for axis in Axis::ALL {
        let mut others = operands.iter().filter(|operand| operand.origin != Origin::Parameter).peekable();
        if others.peek().is_none() || !others.all(|operand| operand.types.get(axis) == Some(Ty::Invariant)) {
            continue;
        }
        for operand in operands.iter_mut().filter(|operand| operand.origin == Origin::Parameter) {
            if operand.types.get(axis) == Some(Ty::Replicate) {
                operand.types = operand.types.with(axis, Ty::Invariant);
            }
        }
    }
}

/// A constant has no gradient, so that one that is the same on every rank is `Invariant` and `Replicate` at once. Where
/// its declared type is refused, an operation reads it as parameters are read: per axis `Invariant` if every value is,
/// else `Replicate`. Returns whether a type changed.
pub fn resolve_constants(operands: &mut [Operand<'_>]) -> bool {
    let mut changed = false;
    for axis in Axis::ALL {
        let values = operands.iter().filter(|operand| operand.origin == Origin::Value);
        let types: Vec<_> = values.map(|operand| operand.types.get(axis)).collect();
        let read = if !types.is_empty() && types.iter().all(|&ty| ty == Some(Ty::Invariant)) {
            Ty::Invariant
        } else {
            Ty::Replicate
        };
        for operand in operands.iter_mut().filter(|operand| operand.origin == Origin::Constant) {
            if matches!(operand.types.get(axis), Some(Ty::Replicate | Ty::Invariant)) {
                changed |= operand.types.get(axis) != Some(read);
                operand.types = operand.types.with(axis, read);
            }
        }
    }
    changed
}

/// Applies `rule` on every axis of the first operand.
pub fn per_axis(op: &str, operands: &[Operand<'_>], rule: impl Fn(Axis, &[Ty]) -> Verdict) -> Result<Types, SpmdError> {
    let mut result = Types::NONE;
    for axis in Axis::ALL {
        let types: Vec<Option<Ty>> = operands.iter().map(|operand| operand.types.get(axis)).collect();
        if types.iter().all(Option::is_none) {
            continue;
        }
        let refuse = |(problem, fix)| SpmdError { op: op.to_owned(), axis, problem, fix };
        let Some(types) = types.iter().copied().collect::<Option<Vec<Ty>>>() else {
            let stray = operands.iter().find(|operand| operand.types.get(axis).is_none());
            let name = stray.map_or("", |operand| operand.name);
            return Err(refuse((
                format!("{name} does not lie on this axis and another operand does"),
                "put every operand on the same mesh".to_owned(),
            )));
        };
        result = result.with(axis, rule(axis, &types).map_err(refuse)?);
    }
    Ok(result)
}

fn mixed(a: &str, ta: Ty, b: &str, tb: Ty) -> (String, String) {
    let (name, other) = if ta == Ty::Invariant { (a, tb) } else { (b, ta) };
    (
        format!("{a} is {ta} and {b} is {tb}: the gradient of {name} would miss the other ranks' share"),
        match other {
            Ty::Shard(dim) => format!("split(I→S) {name} along dim {dim} first"),
            _ => format!("copy(I→R) {name} first"),
        },
    )
}

/// A linear map of one value (scale, cast, dropout with a mask by global position): every type is kept.
pub fn linear_map(op: &str, x: Operand<'_>) -> Result<Types, SpmdError> {
    per_axis(op, &[x], |_, types| Ok(types[0]))
}

/// A non-linear function applied to each element: refuses `Partial`.
pub fn pointwise(op: &str, x: Operand<'_>) -> Result<Types, SpmdError> {
    per_axis(op, &[x], |axis, types| not_partial(op, axis, x.name, types[0]))
}

fn not_partial(op: &str, axis: Axis, name: &str, ty: Ty) -> Verdict {
    match ty {
        Ty::Partial => Err((
            format!("{name} is Partial, and {op} of a sum is not the sum of {op}"),
            format!("all_reduce or reduce_scatter {name} over {axis} first"),
        )),
        ty => Ok(ty),
    }
}

/// The sum `x + y`, where `y` may have fewer dims, or dims of extent 1, and is then [repeated](Operand::repeated) over
/// those of `x`.
pub fn add(op: &str, x: Operand<'_>, y: Operand<'_>) -> Result<Types, SpmdError> {
    let lead = x.ndim.saturating_sub(y.ndim);
    per_axis(op, &[x, y], |axis, types| match (types[0], types[1]) {
        (Ty::Shard(d), Ty::Shard(e)) if d == e + lead => Ok(Ty::Shard(d)),
        // y is repeated over the dim that is sharded.
        (Ty::Shard(d), Ty::Replicate) if y.is_repeated(d, x.ndim) => Ok(Ty::Shard(d)),
        (Ty::Varying, Ty::Replicate) | (Ty::Replicate, Ty::Varying) => Ok(Ty::Varying),
        (tx, ty) if tx == ty && !matches!(tx, Ty::Shard(_)) => Ok(tx),
        (Ty::Partial, other) | (other, Ty::Partial) => {
            let (partial, whole) = if types[0] == Ty::Partial { (x.name, y.name) } else { (y.name, x.name) };
            Err((
                format!("{partial} is Partial and {whole} is {other}: {whole} would be counted once per rank"),
                format!("all_reduce or reduce_scatter {partial} over {axis} first"),
            ))
        }
        (tx, ty) if tx == Ty::Invariant || ty == Ty::Invariant => Err(mixed(x.name, tx, y.name, ty)),
        (tx, ty) => Err((
            format!("{} is {tx} and {} is {ty}: they do not hold the same elements", x.name, y.name),
            "bring both to the same type first".to_owned(),
        )),
    })
}

/// The product `x · wᵀ` over the last `contract` dims of both: `[lead.., K..] · [N.., K..]ᵀ = [lead.., N..]`.
/// Contracting a dim that both shard gives `Partial`. The caller checks that both have at least `contract` dims.
pub fn contract(op: &str, x: Operand<'_>, w: Operand<'_>, contract: usize) -> Result<Types, SpmdError> {
    let (lead, out) = (x.ndim.saturating_sub(contract), w.ndim.saturating_sub(contract));
    let (xn, wn) = (x.name, w.name);
    per_axis(op, &[x, w], |_, types| match (types[0], types[1]) {
        (Ty::Invariant, Ty::Invariant) => Ok(Ty::Invariant),
        (Ty::Replicate, Ty::Replicate) => Ok(Ty::Replicate),
        (Ty::Varying, Ty::Replicate) => Ok(Ty::Varying),
        (Ty::Partial, Ty::Replicate) | (Ty::Replicate, Ty::Partial) => Ok(Ty::Partial),
        (Ty::Shard(d), Ty::Replicate) if d < lead => Ok(Ty::Shard(d)),
        (Ty::Replicate, Ty::Shard(e)) if e < out => Ok(Ty::Shard(lead + e)),
        (Ty::Shard(d), Ty::Shard(e)) if d >= lead && e >= out && d - lead == e - out => Ok(Ty::Partial),
        (Ty::Invariant, Ty::Shard(e)) if e < out => Err((
            format!(
                "{xn} is Invariant and {wn} is Shard({e}): each rank's gradient of {xn} would hold only its own shard's share"
            ),
            format!("copy(I→R) {xn} before this column-parallel product"),
        )),
        (Ty::Replicate | Ty::Invariant, Ty::Shard(e)) => Err((
            format!(
                "the contracted dim {e} of {wn} is sharded and {xn} is {}: a sharded weight used as if whole",
                types[0]
            ),
            format!("give {xn} sharded along the same dim (row-parallel)"),
        )),
        (Ty::Shard(d), Ty::Replicate | Ty::Invariant) if d >= lead => Err((
            format!("the contracted dim {d} of {xn} is sharded and {wn} is whole"),
            format!("all_gather {xn}, or shard {wn} along the same dim"),
        )),
        (Ty::Partial, Ty::Partial) => Err((
            format!("{xn} and {wn} are both Partial, and a product of sums is not the sum of products"),
            "all_reduce one of them first".to_owned(),
        )),
        (Ty::Partial, other) | (other, Ty::Partial) => Err((
            format!("one of {xn} and {wn} is Partial and the other {other}: a value used before its reduction"),
            "all_reduce or reduce_scatter the Partial one first".to_owned(),
        )),
        (tx, tw) if tx == Ty::Invariant || tw == Ty::Invariant => Err(mixed(xn, tx, wn, tw)),
        (tx, tw) => Err((
            format!("{xn} is {tx} and {wn} is {tw}: their product would need communication"),
            format!("all_gather {xn}, or shard along the contracted dim of both"),
        )),
    })
}

/// The product of matrices `x [lead.., m, k] · y [lead.., k, n] = [lead.., m, n]`, one for each index of the leading
/// dims, which both have. `[m, kx]` and `[ky, n]` are the dims of x and of y, for operands that are stored transposed.
///
/// | x | y | x · y | gradient of x | gradient of y |
/// |---|---|---|---|---|
/// | `Invariant` | `Invariant` | `Invariant` | `Invariant` | `Invariant` |
/// | `Replicate` | `Replicate` | `Replicate` | `Partial` | `Partial` |
/// | `Shard(d)`, a leading dim | `Shard(d)` | `Shard(d)` | `Shard(d)` | `Shard(d)` |
/// | `Shard(m)` | `Replicate` | `Shard(m)` | `Shard(m)` | `Partial` |
/// | `Replicate` | `Shard(n)` | `Shard(n)` | `Partial` | `Shard(n)` |
/// | `Shard(k)` | `Shard(k)` | `Partial` | `Shard(k)` | `Shard(k)` |
/// | `Partial` | `Replicate` | `Partial` | `Replicate` | `Partial` |
/// | `Varying` | `Varying` | `Varying` | `Varying` | `Varying` |
/// | `Varying` | `Replicate` | `Varying` | `Varying` | `Partial` |
///
/// The rows with `Partial` and with `Varying` beside `Replicate` hold with the operands swapped. Everything else is
/// refused.
pub fn matrices(
    op: &str,
    x: Operand<'_>,
    y: Operand<'_>,
    [m, kx]: [usize; 2],
    [ky, n]: [usize; 2],
) -> Result<Types, SpmdError> {
    let (lead, xn, yn) = (x.ndim.saturating_sub(2), x.name, y.name);
    per_axis(op, &[x, y], |axis, types| match (types[0], types[1]) {
        (Ty::Invariant, Ty::Invariant) => Ok(Ty::Invariant),
        (Ty::Replicate, Ty::Replicate) => Ok(Ty::Replicate),
        (Ty::Varying, Ty::Varying | Ty::Replicate) | (Ty::Replicate, Ty::Varying) => Ok(Ty::Varying),
        (Ty::Partial, Ty::Replicate) | (Ty::Replicate, Ty::Partial) => Ok(Ty::Partial),
        (Ty::Shard(d), Ty::Shard(e)) if d == e && d < lead => Ok(Ty::Shard(d)),
        (Ty::Shard(d), Ty::Shard(e)) if d == kx && e == ky => Ok(Ty::Partial),
        (Ty::Shard(d), Ty::Replicate) if d == m => Ok(Ty::Shard(lead)),
        (Ty::Replicate, Ty::Shard(e)) if e == n => Ok(Ty::Shard(lead + 1)),
        (Ty::Partial, Ty::Partial) => Err((
            format!("{xn} and {yn} are both Partial, and a product of sums is not the sum of products"),
            format!("all_reduce_replicate one of them over {axis} first"),
        )),
        (Ty::Partial, other) | (other, Ty::Partial) => Err((
            format!("one of {xn} and {yn} is Partial and the other {other}: a value used before its reduction"),
            format!("all_reduce or reduce_scatter the Partial one over {axis} first"),
        )),
        (tx, ty) if tx == Ty::Invariant || ty == Ty::Invariant => {
            let (name, other) = if tx == Ty::Invariant { (xn, ty) } else { (yn, tx) };
            let fix = match other {
                Ty::Shard(dim) if dim < lead => format!("split(I→S) {name} along dim {dim} first"),
                _ => format!("copy(I→R) {name} first"),
            };
            Err((
                format!("{xn} is {tx} and {yn} is {ty}: the gradient of {name} would miss the other ranks' share"),
                fix,
            ))
        }
        (tx, ty) => Err((
            format!("{xn} is {tx} and {yn} is {ty}: a rank's matrices need elements of other ranks"),
            format!(
                "cut the same leading dim of both, dim {m} of {xn} or dim {n} of {yn}, or the dims that are summed over first"
            ),
        )),
    })
}

/// A function along `dim` of `x` (softmax, norm) that keeps the other dims: refuses `Partial`, and `Shard(dim)`.
/// `weights` are vectors over that dim, which must be whole.
pub fn along_dim(op: &str, x: Operand<'_>, dim: usize, weights: &[Operand<'_>]) -> Result<Types, SpmdError> {
    let operands: Vec<Operand<'_>> = std::iter::once(x).chain(weights.iter().copied()).collect();
    per_axis(op, &operands, |axis, types| {
        let tx = not_partial(op, axis, x.name, types[0])?;
        if tx == Ty::Shard(dim) {
            return Err((
                format!("dim {dim} of {} is sharded, and {op} needs the whole of it on one rank", x.name),
                format!("all_gather {} along dim {dim} first", x.name),
            ));
        }
        for (weight, &tw) in weights.iter().zip(&types[1..]) {
            match (tx, tw) {
                (Ty::Invariant, Ty::Invariant) => {}
                (Ty::Replicate | Ty::Varying | Ty::Shard(_), Ty::Replicate) => {}
                (_, Ty::Shard(_)) => {
                    return Err((
                        format!("{} is {tw}: a sharded weight used as if whole", weight.name),
                        format!("declare {} replicated on {axis}", weight.name),
                    ));
                }
                (_, Ty::Partial) => return Err(not_partial(op, axis, weight.name, tw).unwrap_err()),
                _ => return Err(mixed(x.name, tx, weight.name, tw)),
            }
        }
        Ok(tx)
    })
}

/// Rows of a table: `ids [..] , table [rows, h] → [.., h]`. The table must be whole.
pub fn lookup(op: &str, ids: Operand<'_>, table: Operand<'_>) -> Result<Types, SpmdError> {
    per_axis(op, &[ids, table], |axis, types| match (types[0], types[1]) {
        (Ty::Invariant, Ty::Invariant) => Ok(Ty::Invariant),
        (Ty::Replicate | Ty::Varying | Ty::Shard(_), Ty::Replicate) => Ok(types[0]),
        (_, Ty::Shard(0)) => Err((
            format!("the rows of {} are sharded: a sharded weight used as if whole", table.name),
            "use the vocab-parallel lookup, whose result is Partial".to_owned(),
        )),
        (_, tw) if tw == Ty::Invariant || types[0] == Ty::Invariant => Err(mixed(ids.name, types[0], table.name, tw)),
        (ti, tw) => Err((
            format!("{} is {ti} and {} is {tw}", ids.name, table.name),
            format!("{} must be whole on {axis}", table.name),
        )),
    })
}

/// The loss of each sample: its sum over all elements of `x` with one index of dim 0, where dim `dim` is normalised
/// over. `targets` lie like `x` without that dim. Sharded samples stay sharded; another sharded dim gives a `Partial`
/// loss.
pub fn summed_loss(op: &str, x: Operand<'_>, dim: usize, targets: Operand<'_>) -> Result<Types, SpmdError> {
    per_axis(op, &[x, targets], |axis, types| match (types[0], types[1]) {
        (Ty::Shard(d), _) if d == dim => Err((
            format!("dim {dim} of {} is sharded: a shard of the {} given to the plain loss", x.name, x.name),
            "use the vocab-parallel loss, or all_gather first".to_owned(),
        )),
        (Ty::Partial, _) => Err(not_partial(op, axis, x.name, Ty::Partial).unwrap_err()),
        (Ty::Shard(0), Ty::Shard(0)) => Ok(Ty::Shard(0)),
        (Ty::Shard(d), Ty::Shard(e)) if d == e => Ok(Ty::Partial),
        (Ty::Invariant, Ty::Invariant | Ty::Replicate) => Ok(Ty::Invariant),
        (Ty::Replicate, Ty::Invariant | Ty::Replicate) => Ok(Ty::Replicate),
        (Ty::Varying, Ty::Varying) => Ok(Ty::Varying),
        (tx, tt) => Err((
            format!("{} is {tx} and {} is {tt}: they do not hold the same rows", x.name, targets.name),
            format!("lay {} out like {}", targets.name, x.name),
        )),
    })
}
