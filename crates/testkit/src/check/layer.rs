//! A layer on several ranks against itself on one.

use super::array::{Array, number};
use super::report::{CheckError, Problem, Report, WrongCase, difference};
use super::run::{Local, Program, RankResult, without_peers};
use super::{DEGREES, TOLERANCE_F32};
use meshwork_core::{DType, Mesh, Ty};
use meshwork_tensor::{Declarations, Result, Tape, Var};

/// An input of a layer: its extents over all ranks, and its type on `tp`.
#[derive(Clone, Debug)]
pub struct LayerInput {
    name: &'static str,
    shape: Vec<usize>,
    ty: Ty,
    below: Option<usize>,
}

impl LayerInput {
    /// Real numbers.
    pub fn value(name: &'static str, shape: &[usize], ty: Ty) -> Self {
        Self { name, shape: shape.to_vec(), ty, below: None }
    }

    /// Ids smaller than `below`.
    pub fn ids(name: &'static str, shape: &[usize], ty: Ty, below: usize) -> Self {
        Self { below: Some(below), ..Self::value(name, shape, ty) }
    }
}

/// Runs a layer on `tp` = 1, 2, 3 and 4 and compares its output, the gradient of every input and the gradient of every
/// parameter, put together over the ranks, with the values of one rank. `declare` says how the parameters are placed;
/// it is given the mesh.
///
/// The extents of all dims that are cut, also of parameters, should be multiples of 12: 1 to 4 ranks share these.
///
/// ```
/// use meshwork_core::{Axis, Ty};
/// use meshwork_tensor::{Init, Placement, Role};
/// use meshwork_testkit::check::{LayerInput, check_layer};
///
/// // A column-parallel product and the sum of its parts: copy(I→R), x · wᵀ, all_gather.
/// check_layer(
///     "column",
///     &[LayerInput::value("x", &[3, 5], Ty::Invariant)],
///     |params, _mesh| {
///         params.declare("w", &[12, 5], Placement::replicated().shard(Axis::Tp, 0), Role::Weight, Init::Zeros)
///     },
///     |&w, tape, v| v[0].copy(Axis::Tp)?.linear(&tape.param(w)?, 1)?.all_gather_invariant(Axis::Tp, 1),
/// )?;
/// # Ok::<(), meshwork_testkit::check::CheckError>(())
/// ```
///
/// # Errors
/// [`CheckError::Wrong`] with each wrong value on each number of ranks.
pub fn check_layer<L>(
    name: &str,
    inputs: &[LayerInput],
    declare: impl Fn(&mut Declarations, &Mesh) -> Result<L> + Sync,
    forward: impl Fn(&L, &Tape, &[Var]) -> Result<Var> + Sync,
) -> std::result::Result<Report, CheckError> {
    let types: Vec<Ty> = inputs.iter().map(|input| input.ty).collect();
    for input in inputs {
        if let Some((dim, &extent)) = input.ty.dim().and_then(|dim| Some((dim, input.shape.get(dim)?)))
            && DEGREES.iter().any(|degree| extent % degree != 0)
        {
            let (name, input) = (name.to_owned(), input.name.to_owned());
            return Err(CheckError::Indivisible { name, input, dim, extent });
        }
    }
    let program = Program { declare, forward, dtype: DType::F32 };
    let locals = |rank: usize, degree: usize| -> Vec<Local> {
        let local = |input: &LayerInput| {
            let mut whole = Array::named(input.name, &input.shape);
            if let Some(below) = input.below {
                whole = ids(input.name, &input.shape, below);
            }
            Local { part: whole.part(input.name, input.ty, rank, degree), ty: input.ty, ids: input.below.is_some() }
        };
        inputs.iter().map(local).collect()
    };
    let mut cases = Vec::new();
    let mut push = |degree: usize, problem: Problem| {
        let types = inputs.iter().map(|input| (input.name.to_owned(), input.ty)).collect();
        cases.push(WrongCase { degree, types, problem });
    };
    match program.run(&without_peers(1), &locals(0, 1), None) {
        Err(error) => push(1, Problem::Fails(error.to_string())),
        Ok(reference) => {
            for degree in DEGREES.into_iter().skip(1) {
                match program.run_ranks(degree, |rank| locals(rank, degree)) {
                    Err(error) => push(degree, Problem::Fails(error)),
                    Ok(ranks) => compare(inputs, &ranks, &reference, |problem| push(degree, problem)),
                }
            }
        }
    }
    match cases.is_empty() {
        true => Ok(Report { name: name.to_owned(), accepted: vec![types], refused: 0 }),
        false => Err(CheckError::Wrong { name: name.to_owned(), cases }),
    }
}

/// Ids smaller than `below`.
pub(super) fn ids(name: &str, shape: &[usize], below: usize) -> Array {
    let count: usize = shape.iter().product();
    let id = |i| (number(name, i).abs() - 0.5) * below as f64;
    Array { shape: shape.to_vec(), values: (0..count as u64).map(|i| id(i).floor()).collect() }
}

fn compare(inputs: &[LayerInput], ranks: &[RankResult], reference: &RankResult, mut wrong: impl FnMut(Problem)) {
    // `joined` is the type by which the parts make the whole.
    let mut check = |what: String, parts: Vec<Array>, [ty, joined]: [Ty; 2], want: &Array| {
        if let Some(difference) = difference(&parts, joined, want, TOLERANCE_F32) {
            wrong(Problem::Differs { what, ty, difference });
        }
    };
    let all = |part: &dyn Fn(&RankResult) -> Option<Array>| ranks.iter().filter_map(part).collect::<Vec<_>>();
    check("the output".to_owned(), all(&|rank| Some(rank.output.clone())), [ranks[0].ty; 2], &reference.output);
    for (i, (input, want)) in inputs.iter().zip(&reference.inputs).enumerate() {
        let Some(want) = want else { continue };
        let parts = all(&|rank| rank.inputs[i].clone());
        check(format!("the gradient of {}", input.name), parts, [input.ty.dual(); 2], want);
    }
    for (name, (_, want)) in &reference.params {
        let ty = ranks[0].params.get(name).map_or(Ty::Partial, |(ty, _)| *ty);
        // Slices lie in whole arrays of zeros.
        let joined = if let Ty::Shard(_) = ty { Ty::Partial } else { ty };
        check(
            format!("the gradient of {name}"),
            all(&|rank| Some(rank.params.get(name)?.1.clone())),
            [ty, joined],
            want,
        );
    }
}
