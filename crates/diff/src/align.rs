//! Which values of two programs are the same.
//!
//! [Pairs](meshwork_engine::program::Pairs) says which operations correspond. A layout of one side alone has the value
//! of its input. Its output is compared with that of the operation on the other side which made this value, and the
//! gradient that it returns with the one that the other side's operation returned for the same value:
//!
//! ```text
//! A   linear ───────────────▶ attention        output of linear     = output of all_gather
//! B   linear ──▶ all_gather ──▶ attention      gradient of kv on A  = gradient that all_gather returns
//! ```

use super::divergence::Location;
use super::side::Error;
use meshwork_core::{Axis, Ty};
use meshwork_engine::program::{Op, Pairs, Program, Value};

/// A value of an operation, by the place of both in a program.
pub(super) type At = (usize, usize);

/// Two values to compare.
#[derive(Debug)]
pub(super) struct Like {
    pub(super) place: Location,
    /// The values of A and B that have this place; `None` on a side that lacks the operation or the gradient.
    pub(super) of: [Option<At>; 2],
    /// The values that are compared there, or why none are.
    pub(super) with: Result<[At; 2], &'static str>,
}

impl Like {
    pub(super) fn is_gradient(&self) -> bool {
        matches!(self.place, Location::Op { operand: Some(_), .. })
    }
}

/// The values of each operation of two programs, in the order of forward, each with its counterpart.
///
/// # Errors
/// The first operation that no operation of the other side corresponds to.
pub(super) fn align(programs: [&Program; 2]) -> Result<Vec<Vec<Like>>, Error> {
    let pairs = Pairs::new(programs);
    if let Some(at) = pairs.parted {
        let [a, b] = [0, 1].map(|side| at[side].map_or("missing".to_owned(), |op| programs[side].ops[op].describe()));
        let number = at[0].unwrap_or(programs[0].ops.len());
        return Err(Error::Structure(format!("operation #{number} is {a} on A and {b} on B")));
    }
    let pairs = Likes(pairs);
    let likes = pairs.0.order.iter().enumerate().map(|(number, &ops)| match ops {
        [Some(a), Some(b)] => pairs.of_both(number, [a, b]),
        [Some(op), None] => pairs.of_one(number, 0, op),
        [None, Some(op)] => pairs.of_one(number, 1, op),
        [None, None] => Vec::new(),
    });
    Ok(likes.collect())
}

/// The values of operations that correspond.
struct Likes<'a>(Pairs<'a>);

impl Likes<'_> {
    fn place(&self, number: usize, op: &Op, name: String, value: &Value) -> Location {
        Location::Op { number, name, layer: op.layer.clone(), operand: value.operand }
    }

    /// The values of two operations that correspond.
    fn of_both(&self, number: usize, ops: [usize; 2]) -> Vec<Like> {
        let [a, b] = [0, 1].map(|side| &self.0.programs[side].ops[ops[side]]);
        let name = if a.name == b.name { a.name.to_owned() } else { format!("{} | {}", a.name, b.name) };
        let find = |op: &Op, like: &Value| op.values.iter().position(|value| value.is_like(like));
        let mut likes = Vec::new();
        for (at, value) in a.values.iter().enumerate() {
            let other = find(b, value);
            let with = match other {
                Some(_) if value.operand.is_some() && a.is_layout() && !self.read_alike(ops, value.part) => {
                    Err(ELSEWHERE)
                }
                Some(other) => self.comparable([(ops[0], at), (ops[1], other)]),
                None => Err(ALONE),
            };
            let of = [Some((ops[0], at)), other.map(|other| (ops[1], other))];
            likes.push(Like { place: self.place(number, a, name.clone(), value), of, with });
        }
        for (at, value) in b.values.iter().enumerate().filter(|(_, value)| find(a, value).is_none()) {
            let of = [None, Some((ops[1], at))];
            likes.push(Like { place: self.place(number, b, name.clone(), value), of, with: Err(ALONE) });
        }
        likes
    }

    /// The values of a layout that one side alone has.
    fn of_one(&self, number: usize, side: usize, layout: usize) -> Vec<Like> {
        let op = &self.0.programs[side].ops[layout];
        let name = if side == 0 { format!("{} | -", op.name) } else { format!("- | {}", op.name) };
        let both = |own: At, other: At| if side == 0 { [own, other] } else { [other, own] };
        let like = |(at, value): (usize, &Value)| {
            let found = match value.operand {
                None => self.output_of(side, layout, value),
                Some(_) => self.gradient_of(side, layout, value),
            };
            let with = found.ok_or(ELSEWHERE).and_then(|other| self.comparable(both((layout, at), other)));
            let mut of = [None, None];
            of[side] = Some((layout, at));
            Like { place: self.place(number, op, name.clone(), value), of, with }
        };
        op.values.iter().enumerate().map(like).collect()
    }

    /// The output, on the other side, of the operation whose value a layout lays out anew.
    fn output_of(&self, side: usize, layout: usize, value: &Value) -> Option<At> {
        let other = self.0.like[side][self.0.origin(side, layout)?]?;
        let values = &self.0.programs[1 - side].ops[other].values;
        Some((other, values.iter().position(|like| like.is_like(value))?))
    }

    /// The gradient that the other side's operation returned for the value that a layout lays out anew, where one
    /// operation alone reads it.
    fn gradient_of(&self, side: usize, layout: usize, value: &Value) -> Option<At> {
        let mut readers = Vec::new();
        self.readers(side, (layout, value.part), &mut readers);
        let &[(reader, at)] = &readers[..] else { return None };
        let (other, operand) = (self.0.like[side][reader]?, &self.0.programs[side].ops[reader].values[at]);
        let values = &self.0.programs[1 - side].ops[other].values;
        let at = values.iter().position(|like| like.is_like(operand))?;
        // Behind layouts of its own.
        let mut maker = values[at].maker?;
        while self.0.like[1 - side][maker].is_none() {
            maker = self.0.programs[1 - side].ops[maker].makers.first().copied().flatten()?;
        }
        (self.0.like[1 - side][maker] == self.0.origin(side, layout)).then_some((other, at))
    }

    /// Whether the same operations read what two layouts return: else the gradient of one has terms that the other's
    /// lacks.
    fn read_alike(&self, layouts: [usize; 2], part: usize) -> bool {
        let of = |side: usize| {
            let mut readers = Vec::new();
            self.readers(side, (layouts[side], part), &mut readers);
            let mut readers: Vec<usize> = readers.into_iter().map(|(op, _)| op).collect();
            readers.sort_unstable();
            readers
        };
        let like = of(1).into_iter().filter_map(|op| self.0.like[1][op]);
        let mut like: Vec<usize> = like.collect();
        like.sort_unstable();
        of(0) == like
    }

    /// The gradients of a layout's output, of operations with a like.
    fn readers(&self, side: usize, (layout, part): (usize, usize), found: &mut Vec<At>) {
        for (number, op) in self.0.programs[side].ops.iter().enumerate() {
            for (at, value) in op.values.iter().enumerate() {
                if value.operand.is_none() || value.maker != Some(layout) || value.part != part {
                    continue;
                }
                match self.0.like[side][number] {
                    Some(_) => found.push((number, at)),
                    None => self.readers(side, (number, part), found),
                }
            }
        }
    }

    /// Two values, if they can be assembled to the same global value.
    fn comparable(&self, with: [At; 2]) -> Result<[At; 2], &'static str> {
        let [a, b] = [0, 1].map(|side| (self.0.programs[side], with[side]));
        let types = [a, b].map(|(program, (op, value))| program.ops[op].values[value].types);
        let comparable = Axis::ALL.into_iter().all(|axis| {
            let varies = types.map(|types| types.get(axis) == Some(Ty::Varying));
            let degrees = self.0.programs.map(|program| program.mesh.degree(axis));
            varies == [false; 2] || degrees[0] == degrees[1] && varies[0] == varies[1]
        });
        if comparable { Ok(with) } else { Err(VARYING) }
    }
}

const VARYING: &str = "values of each rank's own, on meshes of other degrees";
const ALONE: &str = "gradients that one side alone computes, and parts of samples that one side alone has";
const ELSEWHERE: &str = "layouts of one side alone, of a value that comes from outside or that several operations read";
