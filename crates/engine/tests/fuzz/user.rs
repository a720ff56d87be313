//! What a user of the library writes: constants, an operation of their own and a collective of their own, right or
//! careless.

use crate::interpret::misfit;
use crate::program::{Holds, Lie, Op};
use meshwork_core::{Axis, DType, SpmdError, Ty, rules};
use meshwork_nn::sample_types;
use meshwork_tensor::{Result, Tape, Tensor, Var, random};

/// A constant, of which each rank holds what `holds` says, under a type that may be another.
pub fn constant(tape: &Tape, salt: u64, dims: &[usize], axis: Axis, holds: Holds, says: Ty) -> Result<Var> {
    let (degree, at) = (tape.rank().mesh().degree(axis), tape.rank().coords().get(axis));
    let mut whole = vec![0f32; dims.iter().product()];
    random::fill_uniform(random::key(salt, "constant"), 0, &mut whole);
    let mut dims = dims.to_vec();
    let held = match holds {
        Holds::Whole => whole,
        Holds::Own => whole.into_iter().map(|value| value + at as f32).collect(),
        // Of shares 1, 2 .. n.
        Holds::Part => {
            let share = (at + 1) as f32 / (degree * (degree + 1) / 2) as f32;
            whole.into_iter().map(|value| value * share).collect()
        }
        Holds::Slice(dim) | Holds::First(dim) => {
            let at = if holds == Holds::First(dim) { 0 } else { at };
            let (extent, inner) = (dims[dim], dims[dim + 1..].iter().product::<usize>());
            let held = extent / degree;
            dims[dim] = held;
            let of_rank = |index: usize| (at * held..(at + 1) * held).contains(&(index / inner % extent));
            whole.into_iter().enumerate().filter(|(index, _)| of_rank(*index)).map(|(_, value)| value).collect()
        }
    };
    // Of one sample: the same for every sample, and so on every rank of dp.
    let of_sample = sample_types(tape.rank().mesh());
    let types = Axis::DATA.into_iter().fold(of_sample, |types, data| types.with(data, Ty::Replicate)).with(axis, says);
    Ok(tape.constant(Tensor::from_slice(tape.device(), &held, &dims[..])?, types))
}

/// `sin x`, or what a careless user makes of it.
pub fn sine(tape: &Tape, x: &Var, lie: Lie) -> Result<Var> {
    let own = 1.0 + tape.rank().world_rank() as f64;
    let degree = [Axis::Tp, Axis::Cp].map(|axis| tape.rank().mesh().degree(axis)).iter().product::<usize>() as f64;
    let forward = match lie {
        Lie::ForwardByRank => own,
        Lie::Degree => degree,
        _ => 1.0,
    };
    let backward = match lie {
        Lie::GradientByRank => own,
        Lie::Gradient => 0.5,
        Lie::NoGradient => 0.0,
        Lie::Degree => degree,
        _ => 1.0,
    };
    // Off each value the mean over the features that this rank has.
    let centred = |x: &Tensor| {
        let features = x.shape().last().copied().unwrap_or(1).max(1);
        let values = numbers(x)?;
        let of_token = values.chunks(features).flat_map(|token| {
            let mean = token.iter().sum::<f64>() / features as f64;
            token.iter().map(move |value| value - mean)
        });
        like(x, &of_token.collect::<Vec<f64>>(), &x.shape())
    };
    let each = |x: &Tensor, grad: &Tensor, f: &dyn Fn(f64, f64) -> f64| {
        let values: Vec<f64> = numbers(x)?.into_iter().zip(numbers(grad)?).map(|(x, grad)| f(x, grad)).collect();
        like(x, &values, &x.shape())
    };
    tape.custom(
        "sine",
        &["x"],
        &[x],
        |name, operands| rules::pointwise(name, operands[0]),
        move |inputs| match lie {
            Lie::Mixes => centred(inputs[0]),
            _ => each(inputs[0], inputs[0], &|x, _| forward * x.sin()),
        },
        move |inputs, _, grad| match lie {
            Lie::Mixes => Ok(vec![centred(grad)?]),
            _ => Ok(vec![each(&inputs[0], grad, &|x, grad| grad * backward * x.cos())?]),
        },
    )
}

/// A collective that has the types of `collective`, in forward and in backward, and does not communicate.
pub fn unsent(tape: &Tape, x: &Var, collective: &Op) -> Result<Var> {
    let (axis, from, to) = collective.conversion().ok_or_else(|| misfit("no collective"))?;
    let (degree, at) = (tape.rank().mesh().degree(axis), tape.rank().coords().get(axis));
    let there = Local::of(from, to);
    let back = Local::of(to.dual(), from.dual());
    let types = move |name: &str, operands: &[rules::Operand<'_>]| match operands[0].types.get(axis) {
        Some(ty) if ty == from && axis.is_data() => {
            Ok(Axis::DATA.into_iter().fold(operands[0].types, |types, data| types.with(data, to)))
        }
        Some(ty) if ty == from => Ok(operands[0].types.with(axis, to)),
        _ => Err(SpmdError {
            op: name.to_owned(),
            axis,
            problem: format!("x is not {from}"),
            fix: "bring it there".to_owned(),
        }),
    };
    tape.custom(
        "unsent",
        &["x"],
        &[x],
        types,
        move |inputs| there.run(inputs[0], degree, at),
        move |_, _, grad| Ok(vec![back.run(grad, degree, at)?]),
    )
}

/// What one rank can do for a collective alone.
#[derive(Clone, Copy)]
enum Local {
    Same,
    /// Its slice of a dim.
    Cut(usize),
    /// As many copies of its slice, along a dim, as there are ranks.
    Repeat(usize),
    /// Both.
    Exchange(usize, usize),
}

impl Local {
    fn of(from: Ty, to: Ty) -> Self {
        match (from, to) {
            (Ty::Shard(from), Ty::Shard(to)) => Self::Exchange(from, to),
            (Ty::Shard(dim), _) => Self::Repeat(dim),
            (_, Ty::Shard(dim)) => Self::Cut(dim),
            _ => Self::Same,
        }
    }

    fn run(self, x: &Tensor, degree: usize, at: usize) -> Result<Tensor> {
        match self {
            Self::Same => Ok(x.clone()),
            Self::Cut(dim) => cut(x, dim, degree, at),
            Self::Repeat(dim) => repeat(x, dim, degree),
            Self::Exchange(from, to) => cut(&repeat(x, from, degree)?, to, degree, at),
        }
    }
}

/// The elements of `x` with another extent of `dim`, each taken from the place along it that `from` names.
fn along(x: &Tensor, dim: usize, extent: usize, from: impl Fn(usize) -> usize) -> Result<Tensor> {
    let shape = x.shape().to_vec();
    let inner: usize = shape[dim + 1..].iter().product();
    let outer: usize = shape[..dim].iter().product();
    let old = numbers(x)?;
    let rows = (0..outer).flat_map(|row| (0..extent).map(move |place| (row, place)));
    let values: Vec<f64> = rows
        .flat_map(|(row, place)| {
            let start = (row * shape[dim] + from(place)) * inner;
            old[start..start + inner].iter().copied()
        })
        .collect();
    let mut dims = shape.clone();
    dims[dim] = extent;
    like(x, &values, &dims)
}

/// The elements of a value in f32 or 16 bits, as in a run, or in f64, as where an operation is checked.
fn numbers(x: &Tensor) -> Result<Vec<f64>> {
    match x.dtype() {
        DType::F64 => x.to_vec(),
        _ => Ok(x.clone().cast(DType::F32)?.to_vec::<f32>()?.into_iter().map(f64::from).collect()),
    }
}

fn like(x: &Tensor, values: &[f64], dims: &[usize]) -> Result<Tensor> {
    match x.dtype() {
        DType::F64 => Tensor::from_slice(x.device(), values, dims),
        dtype => {
            let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            Tensor::from_slice(x.device(), &values, dims)?.cast(dtype)
        }
    }
}

fn cut(x: &Tensor, dim: usize, degree: usize, at: usize) -> Result<Tensor> {
    let held = x.shape()[dim] / degree;
    along(x, dim, held, |place| at * held + place)
}

fn repeat(x: &Tensor, dim: usize, degree: usize) -> Result<Tensor> {
    let held = x.shape()[dim];
    along(x, dim, degree * held, |place| place % held)
}
