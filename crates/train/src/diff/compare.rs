//! Compares a step of one run with the same step of the other, in the order of computation.

use super::Error;
use super::divergence::{Between, Divergence, Place, Vector};
use super::global::{Piece, Replicas, Unit, assemble, unravel, whole};
use super::program::Program;
use super::report::Report;
use super::ulps::{Float, Spread, Values};
use super::world::{Held, Record, Stepped};
use meshwork_core::{Axis, Ty, Types};
use meshwork_tensor::param;
use std::collections::BTreeMap;

/// The difference of two values.
#[derive(Debug, Default)]
struct Delta {
    elements: u64,
    differing: u64,
    max_ulps: u64,
    /// Largest difference, and largest magnitude on side A.
    apart: f64,
    scale: f64,
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
        if self.apart == 0.0 { 0.0 } else { self.apart / self.scale }
    }

    /// The divergence whose first difference is `found`.
    fn divergence(&self, step: u64, place: Place, dims: Vec<usize>, found: Found) -> Divergence {
        let Found { index, values, ulps, micros, samples, ranks } = found;
        Divergence {
            step,
            place,
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
        }
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

/// Two programs whose operations correspond.
pub(super) struct Pair<'a> {
    programs: [&'a Program; 2],
}

impl<'a> Pair<'a> {
    pub(super) fn new(programs: [&'a Program; 2]) -> Result<Self, Error> {
        programs[0].require_same(programs[1])?;
        Ok(Self { programs })
    }

    /// Compares all of a step: forward, loss, backward, gradients and their norm, weights, optimizer states.
    pub(super) fn step(&self, step: u64, mut sides: [Stepped; 2], report: &mut Report) -> Result<(), Error> {
        let ops = self.programs[0].ops.len();
        for op in 0..ops {
            self.value(step, (op, 0), &mut sides, report)?;
        }
        let reports = [&sides[0].report, &sides[1].report];
        let scalars = match reports {
            [Some(a), Some(b)] => Some(([a.loss, b.loss], [a.grad_norm, b.grad_norm])),
            _ => None,
        };
        if let Some((loss, _)) = scalars {
            scalar(step, Place::Loss, loss, report);
        }
        for op in (0..ops).rev() {
            for value in 1..self.programs[0].ops[op].values.len() {
                self.value(step, (op, value), &mut sides, report)?;
            }
        }
        let Some((_, norm)) = scalars else { return Ok(()) };
        self.vectors(step, 0, &sides, report)?;
        scalar(step, Place::GradNorm, norm, report);
        let vectors = sides[0].held.values().flatten().map(Vec::len).max().unwrap_or(0);
        (1..vectors).try_for_each(|vector| self.vectors(step, vector, &sides, report))
    }

    /// Compares a value of an operation.
    fn value(
        &self,
        step: u64,
        (op, value): (usize, usize),
        sides: &mut [Stepped; 2],
        report: &mut Report,
    ) -> Result<(), Error> {
        let [a, b] = self.programs;
        let (this, other) = (&a.ops[op], &b.ops[op]);
        let name =
            if this.name == other.name { this.name.to_owned() } else { format!("{} | {}", this.name, other.name) };
        let operand = this.values[value].operand;
        let place = Place::Op { number: op, name, layer: this.layer.clone(), operand };

        if !comparable([&this.values[value].types, &other.values[value].types], self.programs) {
            report.skip("values of each rank's own, on meshes of other degrees");
            return Ok(());
        }
        let mut records: Vec<Vec<Record>> = Vec::new();
        for (program, side) in self.programs.iter().zip(sides) {
            records.push(side.records.remove(&program.key(op, value)).unwrap_or_default());
        }
        let mut pieces: Vec<BTreeMap<Unit, Piece>> = Vec::new();
        for (side, records) in records.iter().enumerate() {
            let (assembled, differ) = assemble(self.programs[side], (op, value), records);
            if let Some(differ) = differ {
                report.diverged(self.of_replicas(step, place.clone(), side, differ));
            }
            pieces.push(assembled);
        }
        let units = |side: usize| pieces[side].keys().copied().collect::<Vec<_>>();
        let by_sample = |units: &[Unit]| units.iter().all(|unit| matches!(unit, Unit::Sample(_)));
        if units(0) != units(1) {
            if by_sample(&units(0)) && by_sample(&units(1)) || pieces.iter().any(BTreeMap::is_empty) {
                return Err(Error::Structure(format!("{place}: A and B saw it for other samples")));
            }
            report.skip("sums over a micro-batch, where the micro-batches differ");
            return Ok(());
        }

        let (mut delta, mut found, mut dims) = (Delta::default(), None, Vec::new());
        for ((unit, a), b) in pieces[0].iter().zip(pieces[1].values()) {
            if a.dims != b.dims {
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
            let ranks = [(0, a), (1, b)].map(|(side, piece)| self.ranks_holding(side, (op, value), &index, piece));
            let micros = [Some(a.micro), Some(b.micro)];
            found = Some(Found { index, values, ulps, micros, samples: Some(samples), ranks });
        }
        let divergence = found.map(|found| delta.divergence(step, place.clone(), dims, found));
        report.compared(&place, step, &delta.spread, delta.error(), divergence);
        Ok(())
    }

    /// The ranks of a side that hold an element of an operation's value, or a share of it.
    fn ranks_holding(&self, side: usize, (op, value): (usize, usize), index: &[usize], piece: &Piece) -> Vec<usize> {
        let Program { mesh, ops, .. } = self.programs[side];
        let value = &ops[op].values[value];
        let holds = |&rank: &usize| {
            let coords = mesh.coords(rank);
            let in_slice = value.shape.iter().enumerate().all(|(dim, &extent)| {
                let cut = value.types.iter().filter(|&(axis, ty)| !axis.is_data() && ty == Ty::Shard(dim));
                let (mut place, mut cuts) = (0, 0);
                for (axis, _) in cut {
                    (place, cuts) = (place * mesh.degree(axis) + coords.get(axis), cuts + 1);
                }
                cuts == 0 || index.get(dim).is_some_and(|at| at / extent.max(1) == place)
            });
            let replicated = |axis| matches!(value.types.get(axis), None | Some(Ty::Invariant | Ty::Replicate));
            let on_dp = Axis::DATA.into_iter().all(replicated) || mesh.data_rank(coords) == piece.dp;
            in_slice && on_dp && coords.get(Axis::Pp) == ops[op].stage
        };
        (0..mesh.world_size()).filter(holds).collect()
    }

    /// Compares a vector of every parameter: gradients, weights, or optimizer states.
    fn vectors(&self, step: u64, vector: usize, sides: &[Stepped; 2], report: &mut Report) -> Result<(), Error> {
        for spec in &self.programs[0].parameters {
            let held = [0, 1].map(|side| sides[side].held.get(&spec.name).map_or(&[][..], |held| &held[..]));
            let place = Place::Parameter { name: spec.name.clone(), vector: Vector::at(vector) };
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
                _ => return Err(Error::Structure(format!("{place}: only one side has it"))),
            };
            let mut delta = Delta::default();
            let first = delta.add(a, b);
            let divergence = first.map(|(at, values, ulps)| {
                let ranks = held.map(|held| holders_of(held, vector, at));
                let found = Found { index: unravel(at, &spec.dims), values, ulps, ranks, ..Found::default() };
                delta.divergence(step, place.clone(), spec.dims.to_vec(), found)
            });
            report.compared(&place, step, &delta.spread, delta.error(), divergence);
        }
        Ok(())
    }

    /// The divergence of two replicas on one side.
    fn of_replicas(&self, step: u64, place: Place, side: usize, differ: Replicas) -> Divergence {
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

/// Whether values of these types can be assembled to the same global value.
fn comparable(types: [&Types; 2], programs: [&Program; 2]) -> bool {
    Axis::ALL.into_iter().all(|axis| {
        let varies = types.map(|types| types.get(axis) == Some(Ty::Varying));
        let degrees = programs.map(|program| program.mesh.degree(axis));
        varies == [false; 2] || degrees[0] == degrees[1] && varies[0] == varies[1]
    })
}

/// The ranks that hold an element of a vector of a parameter.
fn holders_of(held: &[Held], vector: usize, at: usize) -> Vec<usize> {
    let holds =
        |piece: &&param::Piece| piece.runs().iter().any(|(start, run)| (*start..start + run.len()).contains(&at));
    let pieces = held.iter().filter_map(|held| held.get(vector)).flatten();
    let mut ranks: Vec<usize> = pieces.filter(holds).map(|piece| piece.rank).collect();
    ranks.sort_unstable();
    ranks
}

/// Compares a number that every rank knows.
fn scalar(step: u64, place: Place, values: [f64; 2], report: &mut Report) {
    let mut delta = Delta::default();
    let first = delta.add(&values[..1], &values[1..]);
    let divergence = first.map(|(_, values, ulps)| {
        let found = Found { values, ulps, ..Found::default() };
        delta.divergence(step, place.clone(), Vec::new(), found)
    });
    report.compared(&place, step, &delta.spread, delta.error(), divergence);
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
            Stepped { records: [(program.key(0, 0), records)].into(), ..Stepped::default() }
        });
        let pair = Pair { programs: sides.map(|(program, _)| program) };
        pair.step(1, stepped, &mut report).unwrap();
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
    }
}
