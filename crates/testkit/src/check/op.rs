//! An operation on several ranks against itself on one, over all types.
//!
//! More than 400 lines: the inputs of a check, its runs on all types, and its comparison with differences of the
//! function, which share one set of cases.

use super::array::Array;
use super::layer::ids;
use super::report::{CheckError, Difference, Problem, Report, WrongCase, difference};
use super::run::{Local, Program, RankResult, download, without_peers};
use super::{DEGREES, TOLERANCE_F32, TOLERANCE_F64};
use crate::gradcheck::{self, central_difference};
use meshwork_core::{Axis, DType, Mesh, Ty};
use meshwork_tensor::{Declarations, Error, Init, ParamId, Placement, Result, Role, Tape, Var};
use std::slice;

/// An operand of an operation.
///
/// The extents are those on one rank. On `n` ranks every dim is `n` times as long, so that each can be sharded, and a
/// rank holds odd extents of sharded dims if these are odd.
#[derive(Clone, Debug)]
pub struct OpInput {
    name: &'static str,
    shape: Vec<usize>,
    fixed: Vec<usize>,
    kind: InputKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InputKind {
    Value,
    Parameter,
    Ids { below: usize },
}

impl OpInput {
    /// Real numbers, computed by other operations: of any type.
    pub fn value(name: &'static str, shape: &[usize]) -> Self {
        Self { name, shape: shape.to_vec(), fixed: Vec::new(), kind: InputKind::Value }
    }

    /// A parameter, replicated or sharded. It is f32, as parameters are.
    pub fn parameter(name: &'static str, shape: &[usize]) -> Self {
        Self { kind: InputKind::Parameter, ..Self::value(name, shape) }
    }

    /// Ids smaller than `below`, of any type but `Partial`. They have no gradient.
    pub fn ids(name: &'static str, shape: &[usize], below: usize) -> Self {
        Self { kind: InputKind::Ids { below }, ..Self::value(name, shape) }
    }

    /// Dims whose extents mean something, such as the 3 of a fused qkv: on `n` ranks they are not longer, unless this
    /// operand itself is sharded along them.
    pub fn fixed(mut self, dims: &[usize]) -> Self {
        self.fixed = dims.to_vec();
        self
    }

    fn types(&self) -> Vec<Ty> {
        let whole: &[Ty] = match self.kind {
            InputKind::Value => &[Ty::Replicate, Ty::Invariant, Ty::Partial, Ty::Varying],
            InputKind::Ids { .. } => &[Ty::Replicate, Ty::Invariant, Ty::Varying],
            InputKind::Parameter => &[Ty::Replicate],
        };
        whole.iter().copied().chain((0..self.shape.len()).map(Ty::Shard)).collect()
    }

    /// Extents over `degree` ranks.
    fn extents(&self, ty: Ty, degree: usize) -> Vec<usize> {
        let longer = |dim: usize| !self.fixed.contains(&dim) || ty == Ty::Shard(dim);
        let extent = |(dim, &extent): (usize, &usize)| if longer(dim) { extent * degree } else { extent };
        self.shape.iter().enumerate().map(extent).collect()
    }

    /// The value that all ranks hold together.
    fn whole(&self, ty: Ty, degree: usize) -> Array {
        let extents = self.extents(ty, degree);
        match self.kind {
            InputKind::Ids { below } => ids(self.name, &extents, below),
            _ => Array::named(self.name, &extents),
        }
    }

    fn part(&self, ty: Ty, rank: usize, degree: usize) -> Array {
        match (self.kind, ty) {
            (InputKind::Ids { below }, Ty::Varying) => {
                ids(&format!("{} of rank {rank}", self.name), &self.extents(ty, degree), below)
            }
            _ => self.whole(ty, degree).part(self.name, ty, rank, degree),
        }
    }
}

/// Tries an operation on `tp` = 1, 2, 3 and 4, with every combination of types of its operands. Whatever its SPMD rule
/// accepts must be right: the operation on one rank, of the values that all ranks hold together, gives the output and
/// the gradients that the ranks' ones give together by their types. The gradients of one rank are held against finite
/// differences. A rule that accepts types on some degrees only is wrong too.
///
/// Values are f64; where the operation does not compute in f64 on one rank, as one that reads its operands as slices of
/// `f32` does not, they are f32, and differences are held against the rounding of f32.
///
/// A `Varying` operand stands for nothing beyond its rank; then each rank must compute what one rank computes of the
/// same values. Samples are dim 0 of the first operand.
///
/// ```
/// use meshwork_testkit::check::{OpInput, check_op};
///
/// let report = check_op("mul", &[OpInput::value("x", &[3, 5]), OpInput::value("y", &[5])], |v| v[0].mul(&v[1]))?;
/// assert_eq!(report.accepted.len(), 9); // the table of `rules::product`
///
/// // Wrong: a factor that is 1 on one rank.
/// use meshwork_core::Axis;
/// let by_degree = |v: &[meshwork_tensor::Var]| v[0].scale(v[0].tape().rank().mesh().degree(Axis::Tp) as f64);
/// let error = check_op("by_degree", &[OpInput::value("x", &[3])], by_degree).unwrap_err().to_string();
/// assert!(error.contains("tp=2, x Invariant: the output is Invariant, and it is 2 times that of one rank"), "{error}");
/// # Ok::<(), meshwork_testkit::check::CheckError>(())
/// ```
///
/// # Errors
/// [`CheckError::Wrong`] with each wrong combination, on the smallest number of ranks; [`CheckError::NothingAccepted`].
pub fn check_op(
    name: &str,
    inputs: &[OpInput],
    op: impl Fn(&[Var]) -> Result<Var> + Sync,
) -> std::result::Result<Report, CheckError> {
    check(name, inputs, &op)
}

/// An operation. Not a type parameter: the checker would be compiled once for each operation that is checked.
type Op<'a> = &'a (dyn Fn(&[Var]) -> Result<Var> + Sync);

fn check(name: &str, inputs: &[OpInput], op: Op<'_>) -> std::result::Result<Report, CheckError> {
    let (mut accepted, mut refused, mut cases, mut last) = (Vec::new(), 0, Vec::new(), String::new());
    let dtype = computes_in(inputs, op);
    for types in combinations(inputs) {
        let case = Case { inputs, types: &types, op, dtype };
        let verdicts = DEGREES.map(|degree| case.verdict(degree));
        let accepted_on = verdicts.iter().position(|verdict| *verdict == Verdict::Accepted);
        let refusal = verdicts.iter().find_map(Verdict::refusal);
        if let (None, Some(refusal)) = (accepted_on, refusal) {
            refused += 1;
            last = refusal.to_owned();
            continue;
        }
        let found = DEGREES.into_iter().zip(verdicts).find_map(|(degree, verdict)| {
            let problems = match (verdict, accepted_on) {
                (Verdict::Refused(refusal), Some(on)) => {
                    vec![Problem::RuleDependsOnDegree { accepted: DEGREES[on], refusal }]
                }
                _ => case.problems(degree).unwrap_or_else(|error| vec![Problem::Fails(error)]),
            };
            (!problems.is_empty()).then_some((degree, problems))
        });
        if let Some((degree, problems)) = found {
            let of_inputs: Vec<_> = inputs.iter().zip(&types).map(|(input, &ty)| (input.name.to_owned(), ty)).collect();
            cases.extend(problems.into_iter().map(|problem| WrongCase { degree, types: of_inputs.clone(), problem }));
        }
        accepted.push(types);
    }
    let name = name.to_owned();
    match (cases.is_empty(), accepted.is_empty()) {
        (false, _) => Err(CheckError::Wrong { name, cases }),
        (_, true) => Err(CheckError::NothingAccepted { name, refusal: last }),
        _ => Ok(Report { name, accepted, refused }),
    }
}

/// The type of values with which the operation runs on one rank: f64, if it does with any types.
fn computes_in(inputs: &[OpInput], op: Op<'_>) -> DType {
    let runs = |dtype: DType| {
        combinations(inputs).iter().any(|types| {
            let case = Case { inputs, types, op, dtype };
            let inputs =
                case.operands().map(|(input, ty)| case.local(input, case.read_as(input, ty), input.part(ty, 0, 1)));
            case.on_one_rank().run(&without_peers(1), &inputs.collect::<Vec<_>>(), None).is_ok()
        })
    };
    if !runs(DType::F64) && runs(DType::F32) { DType::F32 } else { DType::F64 }
}

fn combinations(inputs: &[OpInput]) -> Vec<Vec<Ty>> {
    inputs.iter().fold(vec![Vec::new()], |all, input| {
        let longer = |types: &Vec<Ty>| input.types().into_iter().map(|ty| [&types[..], &[ty]].concat()).collect();
        all.iter().flat_map::<Vec<_>, _>(longer).collect()
    })
}

/// The answer of an operation to the types of its operands.
#[derive(PartialEq)]
enum Verdict {
    Accepted,
    Refused(String),
    /// Something else is wrong, such as the extents of types that do not fit.
    Failed,
}

impl Verdict {
    fn refusal(&self) -> Option<&str> {
        if let Self::Refused(refusal) = self { Some(refusal) } else { None }
    }
}

/// The parameter that an operand is, if it is one.
type Ids = Vec<Option<ParamId>>;
type Declare<'a> = Box<dyn Fn(&mut Declarations, &Mesh) -> Result<Ids> + Sync + 'a>;
type Apply<'a> = Box<dyn Fn(&Ids, &Tape, &[Var]) -> Result<Var> + Sync + 'a>;

/// One combination of types.
struct Case<'a> {
    inputs: &'a [OpInput],
    types: &'a [Ty],
    op: Op<'a>,
    /// Of the values.
    dtype: DType,
}

/// The results of one rank for the values of all ranks, or, with a `Varying` operand, of the values of each rank.
struct Reference {
    own: bool,
    ranks: Vec<RankResult>,
}

impl Case<'_> {
    fn operands(&self) -> impl Iterator<Item = (&OpInput, Ty)> {
        self.inputs.iter().zip(self.types.iter().copied())
    }

    /// With the parameters as parameters.
    fn on_ranks(&self) -> Program<Declare<'_>, Apply<'_>> {
        self.program(if self.has_params() { DType::F32 } else { self.dtype }, |input| {
            input.kind == InputKind::Parameter
        })
    }

    /// With the parameters as values.
    fn on_one_rank(&self) -> Program<Declare<'_>, Apply<'_>> {
        self.program(self.dtype, |_| false)
    }

    fn program(&self, dtype: DType, declares: fn(&OpInput) -> bool) -> Program<Declare<'_>, Apply<'_>> {
        let declare = move |params: &mut Declarations, mesh: &Mesh| {
            let declared = |(input, ty): (&OpInput, Ty)| {
                let whole = Placement::replicated();
                let placement = ty.dim().map_or(whole.clone(), |dim| whole.shard(Axis::Tp, dim));
                let extents = input.extents(ty, mesh.degree(Axis::Tp));
                let declared = || params.declare(input.name, &extents, placement, Role::Weight, Init::Zeros);
                declares(input).then(declared).transpose()
            };
            self.operands().map(declared).collect()
        };
        let apply = |ids: &Ids, tape: &Tape, values: &[Var]| {
            let mut values = values.iter();
            let operand = |id: &Option<ParamId>| match id {
                Some(id) => tape.param(*id),
                None => Ok(values.next().expect("one for each operand that is no parameter").clone()),
            };
            (self.op)(&ids.iter().map(operand).collect::<Result<Vec<Var>>>()?)
        };
        Program { declare: Box::new(declare), forward: Box::new(apply), dtype }
    }

    fn has_params(&self) -> bool {
        self.inputs.iter().any(|input| input.kind == InputKind::Parameter)
    }

    fn local(&self, input: &OpInput, ty: Ty, part: Array) -> Local {
        Local { part, ty, ids: matches!(input.kind, InputKind::Ids { .. }) }
    }

    fn locals(&self, rank: usize, degree: usize) -> Vec<Local> {
        let values = self.operands().filter(|(input, _)| input.kind != InputKind::Parameter);
        values.map(|(input, ty)| self.local(input, ty, input.part(ty, rank, degree))).collect()
    }

    fn verdict(&self, degree: usize) -> Verdict {
        match self.on_ranks().forward(&without_peers(degree), &self.locals(0, degree)) {
            Ok(_) => Verdict::Accepted,
            Err(Error::Spmd(refusal)) => Verdict::Refused(refusal.to_string()),
            Err(_) => Verdict::Failed,
        }
    }

    /// The mistakes on `degree` ranks; an error of the operation as text.
    fn problems(&self, degree: usize) -> std::result::Result<Vec<Problem>, String> {
        let ranks = self.on_ranks().run_ranks(degree, |rank| self.locals(rank, degree))?;
        let reference = self.reference(&ranks).map_err(|error| format!("on one rank, of the whole values: {error}"))?;
        let output: Vec<Array> = ranks.iter().map(|rank| rank.output.clone()).collect();
        let want = reference.each(|rank| Some(rank.output.clone()));
        if let Some(difference) = self.difference(&reference, &output, ranks[0].ty, &want) {
            return Ok(vec![Problem::Differs { what: "the output".to_owned(), ty: ranks[0].ty, difference }]);
        }
        let mut problems = Vec::new();
        let mut position = 0;
        for (i, (input, ty)) in self.operands().enumerate() {
            let at = position;
            position += usize::from(input.kind != InputKind::Parameter);
            let want = reference.each(|rank| rank.inputs[i].clone());
            if want.is_empty() {
                continue;
            }
            let (parts, dual) = match input.kind {
                InputKind::Parameter => self.param_gradient(input, ty, &ranks),
                _ => (ranks.iter().filter_map(|rank| rank.inputs[at].clone()).collect(), ty.dual()),
            };
            if let Some(difference) = self.difference(&reference, &parts, dual, &want) {
                let what = format!("the gradient of {}", input.name);
                problems.push(Problem::Differs { what, ty: dual, difference });
            }
        }
        if degree == 1 && problems.is_empty() {
            problems = self.against_finite_differences(&reference.ranks[0]).map_err(|error| error.to_string())?;
        }
        Ok(problems)
    }

    fn param_gradient(&self, input: &OpInput, ty: Ty, ranks: &[RankResult]) -> (Vec<Array>, Ty) {
        let extents = input.extents(ty, ranks.len());
        let nothing =
            (self.read_as(input, ty).dual(), Array { values: vec![0.0; extents.iter().product()], shape: extents });
        let gradients: Vec<_> = ranks.iter().map(|rank| rank.params.get(input.name).unwrap_or(&nothing)).collect();
        let dual = gradients[0].0;
        let held = |(rank, gradient): (usize, &&(Ty, Array))| match dual {
            Ty::Shard(_) => gradient.1.part(input.name, dual, rank, ranks.len()),
            _ => gradient.1.clone(),
        };
        (gradients.iter().enumerate().map(held).collect(), dual)
    }

    /// The type with which a parameter is read: `Invariant` if all else is.
    fn read_as(&self, input: &OpInput, ty: Ty) -> Ty {
        // Ids that are the same on every rank are read as the values are, if there are any.
        let has_values = self.operands().any(|(input, _)| input.kind == InputKind::Value);
        let is_read = |input: &OpInput, ty| match input.kind {
            InputKind::Parameter => true,
            InputKind::Ids { .. } => has_values && ty == Ty::Replicate,
            InputKind::Value => false,
        };
        let mut others = self.operands().filter(|(input, ty)| !is_read(input, *ty)).peekable();
        let invariant = others.peek().is_some() && others.all(|(_, ty)| ty == Ty::Invariant);
        match (input.kind, ty) {
            (InputKind::Parameter, Ty::Replicate) if invariant => Ty::Invariant,
            _ => ty,
        }
    }

    fn reference(&self, ranks: &[RankResult]) -> Result<Reference> {
        let (degree, own) = (ranks.len(), self.types.contains(&Ty::Varying));
        let run = |rank: usize| {
            let local = |(input, ty): (&OpInput, Ty)| {
                let part = match ty {
                    Ty::Shard(_) | Ty::Varying if own => input.part(ty, rank, degree),
                    _ => input.whole(ty, degree),
                };
                self.local(input, self.read_as(input, ty), part)
            };
            let inputs: Vec<Local> = self.operands().map(local).collect();
            let seed = (own && ranks[rank].ty != Ty::Replicate).then(|| ranks[rank].seed.clone());
            self.on_one_rank().run(&without_peers(1), &inputs, seed)
        };
        let ranks = (0..if own { degree } else { 1 }).map(run).collect::<Result<_>>()?;
        Ok(Reference { own, ranks })
    }

    fn difference(&self, reference: &Reference, parts: &[Array], ty: Ty, want: &[Array]) -> Option<Difference> {
        let is_f32 = self.has_params() || self.dtype == DType::F32;
        let tolerance = if is_f32 { TOLERANCE_F32 } else { TOLERANCE_F64 };
        if reference.own && matches!(ty, Ty::Varying | Ty::Shard(_)) {
            let each = parts.iter().zip(want);
            return each
                .filter_map(|(part, want)| difference(slice::from_ref(part), Ty::Replicate, want, tolerance))
                .next();
        }
        let (first, others) = want.split_first()?;
        let sum = others.iter().fold(first.clone(), |sum, part| sum.plus(part, 1.0));
        difference(parts, ty, &sum, tolerance)
    }

    /// The gradients of a rank that is alone.
    fn against_finite_differences(&self, alone: &RankResult) -> Result<Vec<Problem>> {
        let rank = without_peers(1);
        let of = |(input, ty): (&OpInput, Ty)| self.local(input, self.read_as(input, ty), input.part(ty, 0, 1));
        let inputs: Vec<Local> = self.operands().map(of).collect();
        let value = |inputs: &[Local]| -> Result<f64> {
            Ok(download(self.on_one_rank().forward(&rank, inputs)?.output.tensor())?.dot(&alone.seed))
        };
        let (step, tolerance) = match self.dtype {
            DType::F32 => (gradcheck::STEP_F32, gradcheck::TOLERANCE_F32),
            _ => (gradcheck::STEP, gradcheck::TOLERANCE),
        };
        let bound = tolerance * value(&inputs)?.abs().max(1.0);
        let mut problems = Vec::new();
        for (i, gradient) in alone.inputs.iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            let mut error = None;
            let wanted = central_difference(&inputs[i].part.values, step, &mut |moved| {
                let mut inputs = inputs.clone();
                inputs[i].part.values = moved.to_vec();
                value(&inputs).unwrap_or_else(|failed| {
                    error = Some(failed);
                    f64::NAN
                })
            });
            if let Some(error) = error {
                return Err(error);
            }
            let is_right = |difference: f64| difference.abs() <= bound; // and a number
            let mut pairs = gradient.values.iter().copied().zip(wanted).enumerate();
            if let Some((element, (got, want))) = pairs.find(|(_, (got, want))| !is_right(got - want)) {
                problems.push(Problem::FiniteDifference { input: self.inputs[i].name.to_owned(), element, got, want });
            }
        }
        Ok(problems)
    }
}

impl Reference {
    fn each(&self, of: impl Fn(&RankResult) -> Option<Array>) -> Vec<Array> {
        self.ranks.iter().filter_map(of).collect()
    }
}
