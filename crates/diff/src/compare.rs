//! Compares a step of one run with the same step of the other, in the order of computation.
//!
//! More than 400 lines: values, gradients, weights and states are compared in one order, and what cannot be compared is
//! counted in each.

use super::align::{At, Like, align};
use super::divergence::{Between, Divergence, Location, Vector};
use super::global::{GlobalPiece, RankValue, Replicas, SEQ, Unit, assemble, replicas, whole};
use super::program::Program;
use super::report::Report;
use super::run::{Held, Stepped};
use super::side::Error;
use super::ulps::{Float, Spread, Values};
use meshwork_core::{Axis, Ty};
use meshwork_engine::program::{self, Value};
use meshwork_tensor::{param, unravel};
use std::collections::BTreeMap;

/// A gradient smaller than this share of the largest gradient is nearly nothing: it counts as this share.
const NOTHING: f64 = 1e-4;

/// The difference of two values.
#[derive(Debug, Default)]
struct Delta {
    elements: u64,
    differing: u64,
    max_ulps: u64,
    /// Largest difference, and largest magnitude on side A.
    apart: f64,
    scale: f64,
    /// Of a gradient: [`NOTHING`] of the largest one. A gradient may be zero but for rounding.
    floor: f64,
    spread: Spread,
}

impl Delta {
    /// Compares further elements and returns the first of them that differs.
    fn add<T: Float>(&mut self, a: &[T], b: &[T]) -> Option<(usize, [f64; 2], u64)> {
        let (mut first, mut same) = (None, 0);
        for (at, (&x, &y)) in a.iter().zip(b).enumerate() {
            let ulps = x.ulps(y);
            let (x, y): (f64, f64) = (x.into(), y.into());
            self.scale = self.scale.max(x.abs());
            if ulps == 0 {
                same += 1;
                continue;
            }
            let apart = (x - y).abs();
            self.apart = self.apart.max(if apart.is_nan() { f64::INFINITY } else { apart });
            self.max_ulps = self.max_ulps.max(ulps);
            self.spread.add(ulps, 1);
            first = first.or(Some((at, [x, y], ulps)));
        }
        let elements = a.len() as u64;
        if same > 0 {
            self.spread.add(0, same);
        }
        self.elements += elements;
        self.differing += elements - same;
        first
    }

    /// The largest difference, as a share of the largest value.
    fn error(&self) -> f64 {
        if self.apart == 0.0 { 0.0 } else { self.apart / self.scale.max(self.floor) }
    }

    /// Reports the value at `place`, whose first difference is `found`, if there is one.
    fn report(&self, step: u64, place: &Location, dims: Vec<usize>, found: Option<Found>, report: &mut Report) {
        let divergence = found.map(|Found { index, values, ulps, micros, samples, ranks }| Divergence {
            step,
            place: place.clone(),
            between: Between::Sides,
            dims,
            index,
            values,
            ulps,
            micros,
            samples,
            ranks,
            elements: self.elements,
            differing: self.differing,
            max_ulps: self.max_ulps,
            error: self.error(),
        });
        report.compared(place, step, &self.spread, self.error(), divergence);
    }
}

/// The first difference of a value.
#[derive(Default)]
struct Found {
    index: Vec<usize>,
    values: [f64; 2],
    ulps: u64,
    micros: [Option<usize>; 2],
    samples: Option<(u64, usize)>,
    ranks: [Vec<usize>; 2],
}

/// Cuts off the padding of a sequence that the ranks do not divide: the places behind its last token.
fn cut_alike([a, b]: &mut [BTreeMap<Unit, GlobalPiece>; 2], cut: [bool; 2]) {
    for ((unit, piece), other) in a.iter_mut().zip(b.values_mut()) {
        let shorter = piece.dims.first() < other.dims.first();
        let [long, short] = if shorter { [other, piece] } else { [piece, other] };
        if let ([tokens, rest @ ..], [fewer, others @ ..]) = (&long.dims[..], &short.dims[..])
            && tokens > fewer
            && rest == others
            && matches!(unit, Unit::Sample(_))
            && cut[usize::from(shorter)]
        {
            long.values.truncate(fewer * rest.iter().product::<usize>());
            long.dims[0] = *fewer;
        }
    }
}

/// Two programs whose operations correspond.
pub(super) struct Pair<'a> {
    programs: [&'a Program; 2],
    /// Of each operation, in the order of forward: its output, then the gradients that it returns.
    ops: Vec<Vec<Like>>,
}

impl<'a> Pair<'a> {
    pub(super) fn new(programs: [&'a Program; 2]) -> Result<Self, Error> {
        programs[0].require_same(programs[1])?;
        Ok(Self { programs, ops: align(programs.map(|program| &program.run))? })
    }

    /// The values of side B, each with its place, in the order of forward.
    pub(super) fn of_b(&self) -> impl Iterator<Item = (&Program, At, &Location)> {
        self.ops.iter().flatten().filter_map(|like| Some((self.programs[1], like.of[1]?, &like.place)))
    }

    /// Compares all of a step: forward, loss, backward, gradients and their norm, weights, optimizer states.
    /// `alive` is called between values: other ranks wait meanwhile.
    pub(super) fn step(
        &self,
        step: u64,
        sides: [Stepped; 2],
        report: &mut Report,
        alive: &dyn Fn(),
    ) -> Result<(), Error> {
        for like in self.ops.iter().flatten().filter(|like| !like.is_gradient()) {
            alive();
            self.value(step, like, &sides, 0.0, report)?;
        }
        let numbers = sides[0].numbers.zip(sides[1].numbers);
        if let Some((a, b)) = numbers {
            scalar(step, Location::Loss, [a.loss, b.loss], report);
        }
        let mut largest: f64 = 0.0;
        for like in self.ops.iter().rev().flatten().filter(|like| like.is_gradient()) {
            alive();
            largest = largest.max(self.value(step, like, &sides, NOTHING * largest, report)?);
        }
        let Some((a, b)) = numbers else { return Ok(()) };
        self.vectors(step, 0, &sides, NOTHING * a.grad_norm, report, alive)?;
        scalar(step, Location::GradNorm, [a.grad_norm, b.grad_norm], report);
        let vectors = sides[0].held.values().flatten().map(|held| held.vectors.len()).max().unwrap_or(0);
        (1..vectors).try_for_each(|vector| self.vectors(step, vector, &sides, 0.0, report, alive))?;
        self.sets(step, &sides, report);
        Ok(())
    }

    /// The pieces of a value of a side. Replicas that differ are reported at `place`.
    fn pieces(
        &self,
        step: u64,
        (side, at): (usize, At),
        stepped: &Stepped,
        place: Option<&Location>,
        report: &mut Report,
    ) -> BTreeMap<Unit, GlobalPiece> {
        let records = stepped.records.get(&self.programs[side].key(at)).map_or(&[][..], |records| records);
        let (pieces, differ) = assemble(self.programs[side], at, records, &stepped.tokens);
        if let (Some(differ), Some(place)) = (differ, place) {
            report.diverged(self.of_replicas(step, place.clone(), side, differ));
        }
        pieces
    }

    /// Compares a value of an operation, and returns the largest magnitude on A.
    fn value(
        &self,
        step: u64,
        like: &Like,
        sides: &[Stepped; 2],
        floor: f64,
        report: &mut Report,
    ) -> Result<f64, Error> {
        let place = &like.place;
        let with = match like.with {
            Ok(with) => with,
            Err(why) => {
                // Without a like, but perhaps not the same on ranks that should hold the same.
                for (side, at) in like.of.into_iter().enumerate() {
                    at.map(|at| self.pieces(step, (side, at), &sides[side], Some(place), report));
                }
                report.skip(why);
                return Ok(0.0);
            }
        };
        let own = [0, 1].map(|side| like.of[side] == Some(with[side]));
        let mut pieces = [0, 1].map(|side| {
            let place = own[side].then_some(place);
            self.pieces(step, (side, with[side]), &sides[side], place, report)
        });
        let [a, b] = [0, 1].map(|side| self.value_of(side, with[side]));
        // Shares of a sum are kept in f32, and a whole value in the type of the model: one mesh sums a value that
        // another has whole.
        if a.dtype != b.dtype && self.programs[0].stored == self.programs[1].stored {
            let half = if a.dtype.is_half() { a.dtype } else { b.dtype };
            pieces.iter_mut().flat_map(BTreeMap::values_mut).for_each(|piece| piece.values.round_to(half));
        }
        cut_alike(&mut pieces, [0, 1].map(|side| !sides[side].tokens.is_empty()));
        let units = |side: usize| pieces[side].keys().copied().collect::<Vec<_>>();
        let by_sample = |units: &[Unit]| units.iter().all(|unit| matches!(unit, Unit::Sample(_)));
        if units(0) != units(1) {
            if by_sample(&units(0)) && by_sample(&units(1)) || pieces.iter().any(BTreeMap::is_empty) {
                return Err(Error::Structure(format!("{place}: A and B saw it for other samples")));
            }
            report.skip("sums over a micro-batch, where the micro-batches differ");
            return Ok(0.0);
        }

        let (mut delta, mut found, mut dims) = (Delta { floor, ..Delta::default() }, None, Vec::new());
        for ((unit, a), b) in pieces[0].iter().zip(pieces[1].values()) {
            if a.dims != b.dims {
                if [0, 1].iter().any(|&side| self.value_of(side, with[side]).is_varying()) {
                    report.skip("rows of each rank's own, of which it has other numbers");
                    return Ok(0.0);
                }
                let problem = format!("{place}: {:?} of {unit:?} on A and {:?} on B", a.dims, b.dims);
                return Err(Error::Structure(problem));
            }
            let first = match (&a.values, &b.values) {
                (Values::F32(a), Values::F32(b)) => delta.add(a, b),
                (Values::F64(a), Values::F64(b)) => delta.add(a, b),
                _ => return Err(Error::Structure(format!("{place}: other types of numbers on A and B"))),
            };
            dims = match unit {
                Unit::Sample(_) => [&[self.programs[0].batch], &a.dims[..]].concat(),
                Unit::Micro(..) => a.dims.clone(),
            };
            let Some((at, values, ulps)) = first.filter(|_| found.is_none()) else { continue };
            let mut index = unravel(at, &a.dims);
            let samples = match *unit {
                Unit::Sample(sample) => {
                    index.insert(0, sample as usize);
                    (sample, 1)
                }
                Unit::Micro(first, samples) => (first, samples),
            };
            let ranks = [(0, a), (1, b)].map(|(side, piece)| self.ranks_holding(side, with[side], &index, piece));
            let micros = [Some(a.micro), Some(b.micro)];
            found = Some(Found { index, values, ulps, micros, samples: Some(samples), ranks });
        }
        delta.report(step, place, dims, found, report);
        Ok(delta.scale)
    }

    fn value_of(&self, side: usize, (op, value): At) -> &Value {
        &self.programs[side].run.ops[op].values[value]
    }

    /// The ranks of a side that hold an element of an operation's value, or a share of it.
    fn ranks_holding(&self, side: usize, (op, value): At, index: &[usize], piece: &GlobalPiece) -> Vec<usize> {
        let program::Program { mesh, ops, .. } = &self.programs[side].run;
        let value = &ops[op].values[value];
        let holds = |&rank: &usize| {
            let coords = mesh.coords(rank);
            let in_slice = value.shape.iter().enumerate().all(|(dim, &extent)| {
                let (mut place, mut cuts) = (0, 0);
                for axis in value.types.cuts(dim).rev().filter(|axis| !axis.is_data()) {
                    (place, cuts) = (place * mesh.degree(axis) + coords.get(axis), cuts + 1);
                }
                let at = |at: &usize| piece.places.get(*at).filter(|_| dim == SEQ).copied().unwrap_or(*at);
                cuts == 0 || index.get(dim).is_some_and(|index| at(index) / extent.max(1) == place)
            });
            let replicated = |axis| matches!(value.types.get(axis), None | Some(Ty::Invariant | Ty::Replicate));
            let on_dp = Axis::DATA.into_iter().all(replicated) || mesh.data_rank(coords) == piece.dp;
            in_slice && on_dp && coords.get(Axis::Pp) == ops[op].stage
        };
        (0..mesh.world_size()).filter(holds).collect()
    }

    /// Compares a vector of every parameter: gradients, weights, or optimizer states.
    fn vectors(
        &self,
        step: u64,
        vector: usize,
        sides: &[Stepped; 2],
        floor: f64,
        report: &mut Report,
        alive: &dyn Fn(),
    ) -> Result<(), Error> {
        for spec in &self.programs[0].parameters {
            alive();
            let held = [0, 1].map(|side| sides[side].held.get(&spec.name).map_or(&[][..], |held| &held[..]));
            let place = Location::Parameter { name: spec.name.clone(), vector: Vector::at(vector) };
            let mut wholes: Vec<Vec<f32>> = Vec::new();
            for (side, held) in held.into_iter().enumerate() {
                let Some((whole, differ)) = whole(held, vector, spec.dims) else { continue };
                if let Some(differ) = differ {
                    report.diverged(self.of_replicas(step, place.clone(), side, differ));
                }
                let elements = whole.len();
                let whole: Vec<f32> = whole.into_iter().flatten().collect();
                if whole.len() != elements {
                    let missing = elements - whole.len();
                    return Err(Error::Structure(format!(
                        "{place}: no rank of {} holds {missing} of its elements",
                        SIDES[side]
                    )));
                }
                wholes.push(whole);
            }
            let (a, b) = match &wholes[..] {
                [] => continue, // frozen
                [a, b] => (a, b),
                _ => {
                    // Such as gradients, whose memory some schedules give back with the update.
                    report.skip("gradients and optimizer states that one side alone keeps");
                    continue;
                }
            };
            let mut delta = Delta { floor, ..Delta::default() };
            let found = delta.add(a, b).map(|(at, values, ulps)| {
                let ranks = held.map(|held| holders_of(held, vector, at));
                Found { index: unravel(at, &spec.dims), values, ulps, ranks, ..Found::default() }
            });
            delta.report(step, &place, spec.dims.to_vec(), found, report);
        }
        Ok(())
    }

    /// Compares the optimizer's states of sets of a parameter's elements, which every rank that holds some of it keeps
    /// whole.
    fn sets(&self, step: u64, sides: &[Stepped; 2], report: &mut Report) {
        for spec in &self.programs[0].parameters {
            let held = [0, 1].map(|side| sides[side].held.get(&spec.name).map_or(&[][..], |held| &held[..]));
            let before = held[0].first().map_or(0, |held| held.vectors.len());
            let sets = held.map(|held| held.iter().map(|held| held.sets.len()).max().unwrap_or(0));
            for set in 0..sets[0].max(sets[1]) {
                let place = Location::Parameter { name: spec.name.clone(), vector: Vector::at(before + set) };
                let parts = held.map(|held| {
                    let mut parts: Vec<_> = held.iter().filter_map(|held| RankValue::of_set(held, set)).collect();
                    parts.sort_by_key(|part| part.rank);
                    parts
                });
                for (side, parts) in parts.iter().enumerate() {
                    if let Some(differ) = replicas(parts) {
                        report.diverged(self.of_replicas(step, place.clone(), side, differ));
                    }
                }
                let [Some(a), Some(b)] = parts.each_ref().map(|parts| parts.first()) else {
                    report.skip("gradients and optimizer states that one side alone keeps");
                    continue;
                };
                if a.values.len() != b.values.len() {
                    report.skip("optimizer states of sets that each mesh has of its own");
                    continue;
                }
                let mut delta = Delta::default();
                let found = delta.add(&a.values, &b.values).map(|(at, values, ulps)| {
                    let ranks = parts.each_ref().map(|parts| parts.iter().map(|part| part.rank).collect());
                    Found { index: vec![at], values, ulps, ranks, ..Found::default() }
                });
                delta.report(step, &place, a.dims.clone(), found, report);
            }
        }
    }

    /// The divergence of two replicas on one side.
    fn of_replicas(&self, step: u64, place: Location, side: usize, differ: Replicas) -> Divergence {
        let Replicas { ranks, unit, micro, mut dims, index, values, ulps, differing } = differ;
        let samples = unit.map(|unit| match unit {
            Unit::Sample(sample) => (sample, 1),
            Unit::Micro(first, samples) => (first, samples),
        });
        let elements = dims.iter().product::<usize>() as u64;
        if let (Some(Unit::Sample(_)), Some(extent)) = (unit, dims.first_mut()) {
            *extent = self.programs[side].batch;
        }
        Divergence {
            step,
            place,
            between: Between::Ranks { side: SIDES[side] },
            dims,
            index,
            values,
            ulps,
            micros: [micro, micro],
            samples,
            ranks: ranks.map(|rank| vec![rank]),
            elements,
            differing,
            max_ulps: ulps,
            error: (values[0] - values[1]).abs() / values[0].abs(),
        }
    }
}

/// The names of the two sides.
pub const SIDES: [char; 2] = ['A', 'B'];

/// The ranks that hold an element of a vector of a parameter.
fn holders_of(held: &[Held], vector: usize, at: usize) -> Vec<usize> {
    let holds =
        |piece: &&param::Piece| piece.runs().iter().any(|(start, run)| (*start..start + run.len()).contains(&at));
    let pieces = held.iter().filter_map(|held| held.vectors.get(vector)).flatten();
    let mut ranks: Vec<usize> = pieces.filter(holds).map(|piece| piece.rank).collect();
    ranks.sort_unstable();
    ranks
}

/// Compares a number that every rank knows.
fn scalar(step: u64, place: Location, values: [f64; 2], report: &mut Report) {
    let mut delta = Delta::default();
    let first = delta.add(&values[..1], &values[1..]);
    let found = first.map(|(_, values, ulps)| Found { values, ulps, ..Found::default() });
    delta.report(step, &place, Vec::new(), found, report);
}

#[cfg(test)]
mod tests {
    use super::super::global::tests::{program, records};
    use super::*;

    /// The report of comparing the one value of two programs, each with its number of micro-batches of 2 samples.
    fn compared(sides: [(&Program, usize); 2]) -> Report {
        let mut report = Report::new(Default::default(), true, 1e-3);
        let stepped = sides.map(|(program, micros)| {
            let records = records(program, micros, |_, first, _| first as f32);
            Stepped { records: [(program.key((0, 0)), records)].into(), ..Stepped::default() }
        });
        let pair = Pair::new(sides.map(|(program, _)| program)).unwrap();
        pair.step(1, stepped, &mut report, &|| ()).unwrap();
        report
    }

    #[test]
    fn what_has_no_like_is_skipped_with_the_reason() {
        let sum = |mesh| program(mesh, &[(Axis::Dp, Ty::Partial)], &[1], None);
        let (one, two) = (sum("dp=1"), sum("dp=2"));
        // The same micro-batches, on different ranks.
        let report = compared([(&one, 4), (&two, 2)]);
        assert_eq!((report.tensors(), report.skipped.len(), report.first), (1, 0, None));
        let report = compared([(&one, 4), (&two, 1)]);
        assert_eq!((report.tensors(), report.skipped.into_values().sum::<u64>()), (0, 1));

        let varying = |mesh| program(mesh, &[(Axis::Tp, Ty::Varying), (Axis::Dp, Ty::Shard(0))], &[2, 3], None);
        let (one, two) = (varying("tp=1,dp=1"), varying("tp=2,dp=1"));
        let report = compared([(&two, 1), (&two, 1)]);
        assert_eq!((report.tensors(), report.skipped.len(), report.first), (1, 0, None));
        let report = compared([(&one, 1), (&two, 1)]);
        assert_eq!((report.tensors(), report.skipped.into_values().sum::<u64>()), (0, 1));
    }

    #[test]
    fn how_far_apart_is_a_share_of_the_largest() {
        let mut delta = Delta::default();
        assert_eq!(delta.add(&[1.0f32, -8.0], &[1.0, -8.0]), None);
        assert_eq!(delta.add(&[2.0f32, 0.5], &[2.0, 0.25]), Some((1, [0.5, 0.25], 1 << 23)));
        assert_eq!((delta.elements, delta.differing, delta.error()), (4, 1, 0.25 / 8.0));
        delta.add(&[1.0f32], &[f32::NAN]);
        assert_eq!((delta.max_ulps, delta.error()), (u64::MAX, f64::INFINITY));
        assert_eq!(Delta::default().error(), 0.0);
        // A gradient that is zero but for rounding.
        let mut nothing = Delta { floor: 1e-4, ..Delta::default() };
        nothing.add(&[1e-11f32], &[0.0]);
        assert!(nothing.error() < 2e-7, "{}", nothing.error());
    }
}
