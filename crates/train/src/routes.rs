//! Vectors that move between ranks, by name and slice: each rank sends the parts that it holds to the ranks that want
//! them, on another mesh or in their memory.

use crate::checkpoint::{dims_of, slice_of};
use meshwork_checkpoint::{Block, Slice, copy};
use meshwork_core::{Axis, Buffer, CommError, DType, Group};
use meshwork_engine::{ModelPlan, StateKey, StateKind, StateSlice, StateSource, TrainError, Trainer};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Shape, unravel};
use std::collections::BTreeMap;

/// A part of a vector that one rank sends to another, or keeps.
#[derive(Debug)]
struct Part {
    /// The number of the vector.
    vector: usize,
    from: usize,
    /// The slice that `from` holds.
    held: LocalSlice,
    to: usize,
    /// The slice that `to` wants.
    wanted: LocalSlice,
    both: Slice,
}

/// Which rank sends which part to which, for all ranks of a world.
#[derive(Debug)]
pub(crate) struct Routes {
    vectors: Vec<(StateKey, Shape)>,
    parts: Vec<Part>,
    /// A slice that a rank wants, and nobody holds all of, of what a run needs to go on.
    missing: Option<String>,
}

impl Routes {
    /// From the slices that ranks hold to those that they want, both by world rank. An element that several ranks hold
    /// comes from the rank that wants it, if it is one of them, else they share out the receivers.
    pub fn new(held: &[StateSlice], wanted: &[StateSlice]) -> Self {
        let mut by_key: BTreeMap<&StateKey, (Shape, BTreeMap<Slice, Vec<&StateSlice>>)> = BTreeMap::new();
        for of in held {
            let (_, slices) = by_key.entry(&of.key).or_insert_with(|| (of.dims, BTreeMap::new()));
            slices.entry(slice_of(&of.slice)).or_default().push(of);
        }
        let numbers: BTreeMap<&StateKey, usize> =
            by_key.keys().enumerate().map(|(number, key)| (*key, number)).collect();
        let (mut parts, mut lacks) = (Vec::new(), None);
        for of in wanted {
            let needed = matches!(of.kind, StateKind::Parameter(_)) && of.slice.elements() > 0;
            let lack = || format!("{} of {:?}", of.key, of.slice.ranges);
            let (Some((_, slices)), Some(&vector)) = (by_key.get(&of.key), numbers.get(&of.key)) else {
                lacks = lacks.or_else(|| needed.then(lack));
                continue;
            };
            let mut missing = vec![slice_of(&of.slice)];
            for (slice, holders) in slices {
                let own = holders.iter().find(|holder| holder.rank == of.rank);
                let holder = own.unwrap_or(&holders[of.rank % holders.len()]);
                missing = missing
                    .into_iter()
                    .flat_map(|rest| {
                        let (held, wanted) = (holder.slice.clone(), of.slice.clone());
                        let part = |both| Part { vector, from: holder.rank, held, to: of.rank, wanted, both };
                        parts.extend(rest.overlap(slice).map(part));
                        rest.minus(slice)
                    })
                    .collect();
            }
            if needed && !missing.is_empty() {
                lacks.get_or_insert_with(lack);
            }
        }
        // The order in which both ends count elements.
        parts.sort_by_key(|part| (part.from, part.to));
        let vectors = by_key.into_iter().map(|(key, (dims, _))| (key.clone(), dims)).collect();
        Self { vectors, parts, missing: lacks }
    }

    /// A slice of what a run needs that some rank wants, and that nobody holds all of.
    pub fn missing(&self) -> Option<&str> {
        self.missing.as_deref()
    }

    /// Bytes that the rank sends to others.
    pub fn bytes(&self, rank: usize) -> u64 {
        let sent = self.parts.iter().filter(|part| part.from == rank && part.to != rank);
        sent.map(|part| part.both.elements() * size_of::<f32>() as u64).sum()
    }

    /// The parts that `rank` sends, to be filled.
    pub fn outgoing(&self, rank: usize) -> Outgoing<'_> {
        let (mut places, mut end) = (BTreeMap::<_, Vec<_>>::new(), 0);
        for part in self.parts.iter().filter(|part| part.from == rank) {
            let start = end;
            end += if part.to == rank { 0 } else { part.both.elements() as usize };
            places.entry(&self.vectors[part.vector].0).or_default().push((part, start..end));
        }
        let arrived = Arrived { dims: self.vectors.iter().cloned().collect(), ..Arrived::default() };
        Outgoing { routes: self, rank, places, elements: vec![0.0; end], arrived }
    }

    /// What ends at `rank`, part by part, with the vector.
    fn ending_at(&self, rank: usize) -> impl Iterator<Item = (&Part, &(StateKey, Shape))> {
        self.parts.iter().filter(move |part| part.to == rank).map(|part| (part, &self.vectors[part.vector]))
    }
}

/// What a rank sends.
pub(crate) struct Outgoing<'a> {
    routes: &'a Routes,
    rank: usize,
    places: BTreeMap<&'a StateKey, Vec<(&'a Part, std::ops::Range<usize>)>>,
    elements: Vec<f32>,
    /// What it keeps.
    arrived: Arrived,
}

impl Outgoing<'_> {
    /// Takes the elements of a slice that this rank holds.
    pub fn put(&mut self, key: &StateKey, slice: &LocalSlice, values: &[f32]) {
        for (part, place) in self.places.get(key).into_iter().flatten().filter(|(part, _)| part.held == *slice) {
            let from = Block::padded(&slice_of(slice), dims_of(slice.stored));
            match part.to == self.rank {
                true => self.arrived.take(part, &self.routes.vectors[part.vector], (&from, values)),
                false => {
                    let into = (&Block::from_slice(&part.both), &mut self.elements[place.clone()]);
                    copy(&part.both, (&from, values), into);
                }
            }
        }
    }

    /// Takes the state that this rank holds. Returns the trainer's complete steps and its updates.
    pub fn put_state(&mut self, trainer: &Trainer) -> Result<(u64, u64), TrainError> {
        trainer.visit_state(
            |_| true,
            |view| {
                self.put(&view.key, &view.slice, view.values);
                Ok(())
            },
        )
    }

    /// Exchanges the parts of all ranks. Collective over the world.
    pub fn exchange(self, world: &Group) -> Result<Arrived, CommError> {
        let Self { routes, rank, elements, mut arrived, .. } = self;
        let counts = |other: fn(&Part) -> usize, own: fn(&Part) -> usize| {
            let mut counts = vec![0; world.size()];
            let mine = routes.parts.iter().filter(|part| own(part) == rank && other(part) != rank);
            mine.for_each(|part| counts[other(part)] += part.both.elements() as usize);
            counts
        };
        let (sends, receives) = (counts(|part| part.to, |part| part.from), counts(|part| part.from, |part| part.to));
        let room = Buffer::zeros(DType::F32, receives.iter().sum());
        let received = world.all_to_all(Buffer::from_vec(elements), room, &sends, &receives)?;
        let (received, mut end): (&[f32], _) = (received.as_slice()?, 0);
        for (part, vector) in routes.ending_at(rank).filter(|(part, _)| part.from != rank) {
            let start = end;
            end += part.both.elements() as usize;
            arrived.take(part, vector, (&Block::from_slice(&part.both), &received[start..end]));
        }
        Ok(arrived)
    }
}

/// A slice of a vector.
#[derive(Debug)]
struct Vector {
    slice: LocalSlice,
    values: Vec<f32>,
    /// The ranks that held its parts.
    from: Vec<(Slice, usize)>,
}

/// The vectors that a rank wanted, as others had them.
#[derive(Debug, Default)]
pub(crate) struct Arrived {
    step: u64,
    updates: u64,
    dims: BTreeMap<StateKey, Shape>,
    vectors: BTreeMap<StateKey, (Shape, Vec<Vector>)>,
}

/// An element that differs.
pub(crate) struct Different {
    pub at: Vec<usize>,
    pub own: f32,
    pub other: f32,
    /// The rank that held the other one.
    pub holder: usize,
}

impl Arrived {
    /// Takes the elements of a part.
    fn take(&mut self, part: &Part, (key, dims): &(StateKey, Shape), from: (&Block, &[f32])) {
        let (_, held) = self.vectors.entry(key.clone()).or_insert_with(|| (*dims, Vec::new()));
        let at = held.iter().position(|of| of.slice == part.wanted).unwrap_or_else(|| {
            let values = vec![0.0; part.wanted.stored.count()];
            held.push(Vector { slice: part.wanted.clone(), values, from: Vec::new() });
            held.len() - 1
        });
        let into = Block::padded(&slice_of(&part.wanted), dims_of(part.wanted.stored));
        copy(&part.both, from, (&into, &mut held[at].values));
        held[at].from.push((part.both.clone(), part.from));
    }

    /// All slices, with their elements.
    pub fn slices<'a>(&'a self) -> impl Iterator<Item = (&'a StateKey, &'a LocalSlice, &'a [f32])> {
        let of_vector = |(key, (_, held)): (_, &'a (Shape, Vec<Vector>))| {
            held.iter().map(move |of| (key, &of.slice, &of.values[..]))
        };
        self.vectors.iter().flat_map(of_vector)
    }

    /// The state after so many steps and updates.
    pub fn after(self, step: u64, updates: u64) -> Self {
        Self { step, updates, ..self }
    }

    /// The first element of this rank's slice that has other bits; zeros of both signs are equal.
    ///
    /// # Errors
    /// A slice that no rank of the other mesh sent: nothing is left out of a comparison.
    pub fn differs(&self, key: &StateKey, slice: &LocalSlice, own: &[f32]) -> Result<Option<Different>, TrainError> {
        let arrived = self.vectors.get(key);
        let of = arrived.and_then(|(dims, held)| Some((dims, held.iter().find(|of| of.slice == *slice)?)));
        let Some((dims, Vector { values, from, .. })) = of else {
            let problem = "no rank of the other mesh sent this slice";
            let error = TrainError::State { name: key.to_string(), problem: problem.to_owned() };
            return if slice.elements() == 0 { Ok(None) } else { Err(error) };
        };
        let mut found = None;
        slice.for_each_run(*dims, |start, run| {
            let other = own[run.clone()].iter().zip(&values[run.clone()]);
            let mut other =
                other.enumerate().filter(|(_, (a, b))| a.to_bits() != b.to_bits() && !(**a == 0.0 && **b == 0.0));
            if let (None, Some((at, (own, other)))) = (&found, other.next()) {
                let at = unravel(start as usize + at, dims);
                let element = Slice::new(at.iter().map(|&at| at as u64..at as u64 + 1));
                let holder = from.iter().find(|(part, _)| part.contains(&element)).map_or(0, |(_, rank)| *rank);
                found = Some(Different { at, own: *own, other: *other, holder });
            }
        });
        Ok(found)
    }
}

impl StateSource for Arrived {
    fn step(&self) -> u64 {
        self.step
    }

    fn updates(&self) -> u64 {
        self.updates
    }

    fn dims(&self, key: &StateKey) -> Option<Vec<usize>> {
        self.dims.get(key).map(|dims| dims.to_vec())
    }

    fn read(&self, key: &StateKey, _: Shape, slice: &LocalSlice) -> Result<Vec<f32>, TrainError> {
        if slice.elements() == 0 {
            return Ok(vec![0.0; slice.stored.count()]);
        }
        let refuse = |problem: &str| TrainError::State { name: key.to_string(), problem: problem.to_owned() };
        let (_, held) = self.vectors.get(key).ok_or_else(|| refuse("no rank of the other mesh has it"))?;
        let (mut values, mut missing) = (vec![0.0; slice.stored.count()], vec![slice_of(slice)]);
        let into = Block::padded(&slice_of(slice), dims_of(slice.stored));
        for Vector { slice: of, values: source, .. } in held {
            let (there, from) = (slice_of(of), Block::padded(&slice_of(of), dims_of(of.stored)));
            missing.iter().filter_map(|rest| rest.overlap(&there)).for_each(|both| {
                copy(&both, (&from, source), (&into, &mut values));
            });
            missing = missing.iter().flat_map(|rest| rest.minus(&there)).collect();
        }
        if missing.is_empty() { Ok(values) } else { Err(refuse("the ranks of the other mesh did not send all of it")) }
    }
}

/// The slices that ranks want of the state, with all of the weights that a rank computes with: in 16 bits they are made
/// of more elements than the rank keeps in f32.
pub(crate) fn with_whole_weights(
    model: &ModelPlan,
    state: &[StateSlice],
    members: &[usize],
) -> Result<Vec<StateSlice>, TrainError> {
    let specs: BTreeMap<String, _> = model.parameters()?.into_iter().map(|spec| (spec.name.clone(), spec)).collect();
    let mesh = model.mesh();
    let places: BTreeMap<usize, usize> = members.iter().enumerate().map(|(place, &rank)| (rank, place)).collect();
    let stage = |place: usize| mesh.coords(place).get(Axis::Pp);
    let (mut wanted, mut weights) = (Vec::new(), BTreeMap::new());
    for of in state {
        match specs.get(&of.key.parameter).filter(|_| of.key.state.is_none()) {
            Some(spec) => _ = weights.insert((stage(places[&of.rank]), &of.key), (spec, of)),
            None => wanted.push(of.clone()),
        }
    }
    for ((pp, _), (spec, of)) in weights {
        let ranks = members.iter().enumerate().filter(|(place, _)| stage(*place) == pp);
        let slice = |place: usize| spec.local(mesh, mesh.coords(place));
        wanted.extend(ranks.map(|(place, &rank)| StateSlice { slice: slice(place), rank, ..of.clone() }));
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_that_nobody_sent_is_an_error_and_not_equal() {
        let key = StateKey { parameter: "w".to_owned(), state: None };
        let dims = Shape::new(&[2]);
        let held = |values| Vector { slice: LocalSlice::whole(dims), values, from: Vec::new() };
        let arrived = |vectors: Vec<Vector>| {
            let vectors = vectors.into_iter().map(|vector| (key.clone(), (dims, vec![vector]))).collect();
            Arrived { step: 0, updates: 0, dims: BTreeMap::new(), vectors }
        };
        let differs = |arrived: Arrived| arrived.differs(&key, &LocalSlice::whole(dims), &[1.0, 2.0]);
        assert!(differs(arrived(vec![held(vec![1.0, 2.0])])).unwrap().is_none());
        assert_eq!(differs(arrived(vec![held(vec![1.0, 3.0])])).unwrap().map(|of| of.at), Some(vec![1]));
        let told = differs(arrived(Vec::new())).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(told.contains("no rank of the other mesh sent this slice"), "{told}");
    }
}
