//! Which values of two programs are the same.
//!
//! A model computes the same values in the same order on every mesh. Only operations that lay a value out anew come and go: ranks of tp
//! that share heads of keys and values gather them, experts under sequence parallelism gather whole sequences, experts that are cut over tp sum
//! over it. All other operations are paired in their order, and so are such *layouts* between them, as far as both sides have them.
//!
//! A layout of one side alone has the value of its input. Its output is compared with that of the operation on the other side which made this
//! value, and the gradient that it returns with the one that the other side's operation returned for the same value:
//!
//! ```text
//! A   linear ───────────────▶ attention        output of linear     = output of all_gather
//! B   linear ──▶ all_gather ──▶ attention      gradient of kv on A  = gradient that all_gather returns
//! ```

use super::program::{Op, Program, Value};
use super::{Error, Place};
use meshwork_core::{Axis, Ty};

/// A value of an operation, by the place of both in a program.
pub(super) type At = (usize, usize);

/// Two values to compare.
#[derive(Debug)]
pub(super) struct Like {
    pub(super) place: Place,
    /// The values of A and B that have this place; `None` on a side that lacks the operation or the gradient.
    pub(super) of: [Option<At>; 2],
    /// What is compared there, or why nothing is.
    pub(super) with: Result<[At; 2], &'static str>,
}

/// Operations whose result is their input, laid out over the ranks in another way or stored in another type.
const LAYOUTS: [&str; 8] =
    ["copy", "all_gather", "all_reduce", "reduce_scatter", "split", "slice", "all_to_all", "cast"];

fn is_layout(op: &Op) -> bool {
    LAYOUTS.contains(&op.name)
}

/// Operations of one kind produce the same value, cut over the ranks differently: region boundaries with and without
/// sequence parallelism.
fn kind(op: &'static str) -> &'static str {
    match op {
        "all_gather" => "copy",
        "reduce_scatter" => "all_reduce",
        other => other,
    }
}

impl Like {
    pub(super) fn is_gradient(&self) -> bool {
        matches!(self.place, Place::Op { operand: Some(_), .. })
    }
}

/// The values of each operation of two programs, in the order of forward, with what they are compared with.
///
/// # Errors
/// The first operation that no operation of the other side corresponds to.
pub(super) fn align(programs: [&Program; 2]) -> Result<Vec<Vec<Like>>, Error> {
    let pairs = Pairs::of(programs)?;
    let likes = pairs.order.iter().enumerate().map(|(number, &ops)| match ops {
        [Some(a), Some(b)] => pairs.of_both(number, [a, b]),
        [Some(op), None] => pairs.of_one(number, 0, op),
        [None, Some(op)] => pairs.of_one(number, 1, op),
        [None, None] => Vec::new(),
    });
    Ok(likes.collect())
}

/// The operations that correspond.
struct Pairs<'a> {
    programs: [&'a Program; 2],
    /// Of each operation of A and of B: its like.
    like: [Vec<Option<usize>>; 2],
    /// The operations of both, in the order of forward.
    order: Vec<[Option<usize>; 2]>,
}

impl<'a> Pairs<'a> {
    fn of(programs: [&'a Program; 2]) -> Result<Self, Error> {
        let like = programs.map(|program| vec![None; program.ops.len()]);
        let mut pairs = Self { programs, like, order: Vec::new() };
        let mut at = [0, 0];
        loop {
            let layouts = [0, 1].map(|side| {
                let from = at[side]..programs[side].ops.len();
                from.take_while(|&op| is_layout(&programs[side].ops[op])).collect::<Vec<_>>()
            });
            pairs.pair_layouts(&layouts);
            at = [0, 1].map(|side| at[side] + layouts[side].len());
            match [0, 1].map(|side| programs[side].ops.get(at[side])) {
                [None, None] => return Ok(pairs),
                [Some(a), Some(b)] if kind(a.name) == kind(b.name) && a.layer == b.layer => pairs.pair(at),
                ops => {
                    let [a, b] = ops.map(|op| op.map_or("missing".to_owned(), Op::describe));
                    return Err(Error::Structure(format!("operation #{} is {a} on A and {b} on B", at[0])));
                }
            }
            at = at.map(|at| at + 1);
        }
    }

    fn pair(&mut self, ops: [usize; 2]) {
        for side in [0, 1] {
            self.like[side][ops[side]] = Some(ops[1 - side]);
        }
        self.order.push(ops.map(Some));
    }

    /// Pairs layouts between two other operations, in their order, where they are of one kind and of the same value.
    fn pair_layouts(&mut self, layouts: &[Vec<usize>; 2]) {
        let mut rest = &layouts[1][..];
        for &a in &layouts[0] {
            let of_a = self.origin(0, a);
            let same = |&b: &usize| {
                let [x, y] = [&self.programs[0].ops[a], &self.programs[1].ops[b]];
                let values = (of_a.map(|of_a| self.like[0][of_a]), self.origin(1, b));
                kind(x.name) == kind(y.name) && (values.0.is_none() || values.1.is_none() || values.0 == Some(values.1))
            };
            match rest.iter().position(same) {
                None => self.order.push([Some(a), None]),
                Some(place) => {
                    self.order.extend(rest[..place].iter().map(|&b| [None, Some(b)]));
                    self.pair([a, rest[place]]);
                    rest = &rest[place + 1..];
                }
            }
        }
        self.order.extend(rest.iter().map(|&b| [None, Some(b)]));
    }

    /// The operation with a like that made the value which a layout lays out anew.
    fn origin(&self, side: usize, layout: usize) -> Option<usize> {
        let mut op = self.programs[side].ops[layout].makers.first().copied().flatten()?;
        while self.like[side][op].is_none() {
            op = self.programs[side].ops[op].makers.first().copied().flatten()?;
        }
        Some(op)
    }

    fn place(&self, number: usize, op: &Op, name: String, value: &Value) -> Place {
        Place::Op { number, name, layer: op.layer.clone(), operand: value.operand }
    }

    /// The values of two operations that correspond.
    fn of_both(&self, number: usize, ops: [usize; 2]) -> Vec<Like> {
        let [a, b] = [0, 1].map(|side| &self.programs[side].ops[ops[side]]);
        let name = if a.name == b.name { a.name.to_owned() } else { format!("{} | {}", a.name, b.name) };
        let find = |op: &Op, like: &Value| op.values.iter().position(|value| value.is_like(like));
        let mut likes = Vec::new();
        for (at, value) in a.values.iter().enumerate() {
            let other = find(b, value);
            let with = match other {
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
        let op = &self.programs[side].ops[layout];
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

    /// The output, on the other side, of what made the value that a layout lays out anew.
    fn output_of(&self, side: usize, layout: usize, value: &Value) -> Option<At> {
        let other = self.like[side][self.origin(side, layout)?]?;
        let values = &self.programs[1 - side].ops[other].values;
        Some((other, values.iter().position(|like| like.is_like(value))?))
    }

    /// The gradient that the other side's operation returned for the value that a layout lays out anew, where one operation alone reads it.
    fn gradient_of(&self, side: usize, layout: usize, value: &Value) -> Option<At> {
        let mut readers = Vec::new();
        self.readers(side, (layout, value.part), &mut readers);
        let &[(reader, at)] = &readers[..] else { return None };
        let (other, operand) = (self.like[side][reader]?, &self.programs[side].ops[reader].values[at]);
        let values = &self.programs[1 - side].ops[other].values;
        let at = values.iter().position(|like| like.is_like(operand))?;
        // Behind layouts of its own.
        let mut maker = values[at].maker?;
        while self.like[1 - side][maker].is_none() {
            maker = self.programs[1 - side].ops[maker].makers.first().copied().flatten()?;
        }
        (self.like[1 - side][maker] == self.origin(side, layout)).then_some((other, at))
    }

    /// The gradients of a layout's output, of operations with a like.
    fn readers(&self, side: usize, (layout, part): (usize, usize), found: &mut Vec<At>) {
        for (number, op) in self.programs[side].ops.iter().enumerate() {
            for (at, value) in op.values.iter().enumerate() {
                if value.operand.is_none() || value.maker != Some(layout) || value.part != part {
                    continue;
                }
                match self.like[side][number] {
                    Some(_) => found.push((number, at)),
                    None => self.readers(side, (number, part), found),
                }
            }
        }
    }

    /// Two values, if they can be assembled to the same global value.
    fn comparable(&self, with: [At; 2]) -> Result<[At; 2], &'static str> {
        let [a, b] = [0, 1].map(|side| (self.programs[side], with[side]));
        let types = [a, b].map(|(program, (op, value))| program.ops[op].values[value].types);
        let comparable = Axis::ALL.into_iter().all(|axis| {
            let varies = types.map(|types| types.get(axis) == Some(Ty::Varying));
            let degrees = self.programs.map(|program| program.mesh.degree(axis));
            varies == [false; 2] || degrees[0] == degrees[1] && varies[0] == varies[1]
        });
        if comparable { Ok(with) } else { Err(VARYING) }
    }
}

const VARYING: &str = "values of each rank's own, on meshes of other degrees";
const ALONE: &str = "gradients that one side alone computes, and parts of samples that one side alone has";
const ELSEWHERE: &str = "layouts of one side alone, of a value that comes from outside or that several operations read";
