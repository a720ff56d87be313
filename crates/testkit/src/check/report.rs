//! The findings of a check.

use super::array::Array;
use meshwork_core::Ty;
use std::fmt;

/// The cases that were tried, all of them right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The name that was given to the check.
    pub name: String,
    /// The combinations of types that the operation accepts.
    pub accepted: Vec<Vec<Ty>>,
    /// The number of those that it refuses.
    pub refused: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, accepted, refused) = (&self.name, self.accepted.len(), self.refused);
        write!(f, "{name}: right on 1 to 4 ranks; types accepted: {accepted}, refused: {refused}")?;
        self.accepted.iter().try_for_each(|types| {
            let types: Vec<String> = types.iter().map(Ty::to_string).collect();
            write!(f, "\n  {}", types.join(", "))
        })
    }
}

/// Why a check failed.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum CheckError {
    /// Some combinations of types are wrong.
    #[error("{name} is wrong in {} of its cases:{}", cases.len(), lines(cases))]
    Wrong { name: String, cases: Vec<WrongCase> },
    /// Nothing could be tried.
    #[error("{name} refuses every combination of types, so nothing was checked; the last refusal: {refusal}")]
    NothingAccepted { name: String, refusal: String },
    /// An input that has no part on each rank.
    #[error(
        "{name}: dim {dim} of {input} has extent {extent}, which 1 to 4 ranks cannot share evenly; make it a multiple of 12"
    )]
    Indivisible { name: String, input: String, dim: usize, extent: usize },
}

meshwork_core::debug_as_display!(CheckError, WrongCase, Problem, Difference);

/// A line for each problem, with its first case, and one for each other case that has it.
fn lines(cases: &[WrongCase]) -> String {
    let mut groups: Vec<Vec<&WrongCase>> = Vec::new();
    for case in cases {
        match groups.iter_mut().find(|group| (group[0].degree, &group[0].problem) == (case.degree, &case.problem)) {
            Some(group) => group.push(case),
            None => groups.push(vec![case]),
        }
    }
    let line = |group: Vec<&WrongCase>| {
        let same: String = group[1..].iter().map(|case| format!("\n    the same with {}", case.operands())).collect();
        format!("\n  {}{same}", group[0])
    };
    groups.into_iter().map(line).collect()
}

/// One wrong case.
#[derive(Clone, PartialEq, thiserror::Error)]
#[error("tp={degree}, {}: {problem}", self.operands())]
pub struct WrongCase {
    /// The number of ranks.
    pub degree: usize,
    /// The inputs, with their types.
    pub types: Vec<(String, Ty)>,
    /// The mistake.
    pub problem: Problem,
}

impl WrongCase {
    fn operands(&self) -> String {
        let types: Vec<String> = self.types.iter().map(|(name, ty)| format!("{name} {ty}")).collect();
        types.join(", ")
    }
}

/// The mistake in a case.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum Problem {
    /// Types that are accepted on one number of ranks and refused on another.
    #[error(
        "the types are accepted on tp={accepted} and refused here; a rule must not depend on the number of ranks \
         ({refusal})"
    )]
    RuleDependsOnDegree { accepted: usize, refusal: String },
    /// An error.
    #[error("it fails: {0}")]
    Fails(String),
    /// The one-rank gradient is not what finite differences give.
    #[error(
        "element {element} of the gradient of {input} is {got}, and by finite differences {want}; this is wrong on one \
         rank already: mend backward"
    )]
    FiniteDifference { input: String, element: usize, got: f64, want: f64 },
    /// The ranks' values are not what one rank computes.
    #[error("{what} is {ty}, and {difference}")]
    Differs {
        /// `the output`, or `the gradient of` an input.
        what: String,
        ty: Ty,
        difference: Difference,
    },
}

/// How the ranks' values differ from what one rank computes.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum Difference {
    /// The ranks hold different values where all should hold the same.
    #[error("the ranks hold different values, or values of different extents{}", hint(*right_as))]
    RanksDisagree {
        /// A type by which the values would be right.
        right_as: Option<Ty>,
    },
    /// Other extents over all ranks than on one.
    #[error("its extents over all ranks are {got:?} instead of {want:?}{}", hint(*right_as))]
    Extents {
        got: Vec<usize>,
        want: Vec<usize>,
        /// A type by which the values would be right.
        right_as: Option<Ty>,
    },
    /// A multiple of the right values.
    #[error(
        "it is {0} times that of one rank, once per rank: something that is the same on every rank is summed over them, \
         or multiplied by their number"
    )]
    Multiple(usize),
    /// Other values.
    #[error(
        "it differs from that of one rank by {distance:.2e}, where the right one has the norm {norm:.2e}{}",
        hint(*right_as)
    )]
    Values {
        distance: f64,
        norm: f64,
        /// A type by which the values would be right.
        right_as: Option<Ty>,
    },
    /// `Varying`, where no input is: it stands for no value that could be compared.
    #[error("no input is Varying: give it the type that it has, so that others can compute with it")]
    Untyped,
}

/// The end of a message: what `right_as` points to.
fn hint(right_as: Option<Ty>) -> String {
    match right_as {
        Some(Ty::Partial) => "; the ranks' values add up to the right one: a sum over the ranks is missing".to_owned(),
        Some(ty) => format!("; as {ty} it would be right"),
        None => String::new(),
    }
}

/// How these parts differ from `want` by the type `ty`, if they do.
pub(super) fn difference(parts: &[Array], ty: Ty, want: &Array, tolerance: f64) -> Option<Difference> {
    if ty == Ty::Varying {
        return Some(Difference::Untyped);
    }
    let whole = Array::whole(parts, ty, tolerance);
    if whole.as_ref().is_some_and(|whole| whole.is(want, tolerance)) {
        return None;
    }
    let is_right = |ty: &Ty| Array::whole(parts, *ty, tolerance).is_some_and(|whole| whole.is(want, tolerance));
    let right_as = [Ty::Replicate, Ty::Partial].into_iter().chain((0..want.shape.len()).map(Ty::Shard)).find(is_right);
    let Some(got) = whole else { return Some(Difference::RanksDisagree { right_as }) };
    if got.shape != want.shape {
        return Some(Difference::Extents { got: got.shape, want: want.shape.clone(), right_as });
    }
    let scaled = Array { values: want.values.iter().map(|value| value * parts.len() as f64).collect(), ..want.clone() };
    if parts.len() > 1 && got.is(&scaled, tolerance) {
        return Some(Difference::Multiple(parts.len()));
    }
    Some(Difference::Values { distance: got.distance(want), norm: want.norm(), right_as })
}
