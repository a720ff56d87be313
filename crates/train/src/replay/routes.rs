//! Vectors that move between two meshes of one world: each rank sends the parts that it holds to the ranks that hold
//! them on the other mesh.

use crate::checkpoint::{dims_of, slice_of};
use meshwork_checkpoint::{Block, Slice, copy};
use meshwork_core::{Buffer, CommError, DType, Group};
use meshwork_engine::{StateKey, StateSlice, StateSource, TrainError};
use meshwork_tensor::Shape;
use meshwork_tensor::param::LocalSlice;
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
        let mut parts = Vec::new();
        for of in wanted {
            let (Some((_, slices)), Some(&vector)) = (by_key.get(&of.key), numbers.get(&of.key)) else { continue };
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
        }
        // The order in which both ends count elements.
        parts.sort_by_key(|part| (part.from, part.to));
        let vectors = by_key.into_iter().map(|(key, (dims, _))| (key.clone(), dims)).collect();
        Self { vectors, parts }
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
            end += part.both.elements() as usize;
            places.entry(&self.vectors[part.vector].0).or_default().push((part, start..end));
        }
        Outgoing { routes: self, rank, places, elements: vec![0.0; end] }
    }
}

/// What a rank sends.
pub(crate) struct Outgoing<'a> {
    routes: &'a Routes,
    rank: usize,
    places: BTreeMap<&'a StateKey, Vec<(&'a Part, std::ops::Range<usize>)>>,
    elements: Vec<f32>,
}

impl Outgoing<'_> {
    /// Takes the elements of a slice that this rank holds.
    pub fn put(&mut self, key: &StateKey, slice: &LocalSlice, values: &[f32]) {
        for (part, place) in self.places.get(key).into_iter().flatten().filter(|(part, _)| part.held == *slice) {
            let from = Block::padded(&slice_of(slice), dims_of(slice.stored));
            copy(&part.both, (&from, values), (&Block::from_slice(&part.both), &mut self.elements[place.clone()]));
        }
    }

    /// Exchanges the parts of all ranks. Collective over the world.
    pub fn exchange(self, world: &Group) -> Result<Arrived, CommError> {
        let Self { routes: Routes { vectors, parts }, rank, elements, .. } = self;
        let counts = |other: fn(&Part) -> usize, own: fn(&Part) -> usize| {
            let mut counts = vec![0; world.size()];
            let mine = parts.iter().filter(|part| own(part) == rank);
            mine.for_each(|part| counts[other(part)] += part.both.elements() as usize);
            counts
        };
        let (sends, receives) = (counts(|part| part.to, |part| part.from), counts(|part| part.from, |part| part.to));
        let room = Buffer::zeros(DType::F32, receives.iter().sum());
        let received = world.all_to_all(Buffer::from_vec(elements), room, &sends, &receives)?;
        let received: &[f32] = received.as_slice()?;
        let (mut arrived, mut end) = (BTreeMap::<_, (Shape, Vec<Vector>)>::new(), 0);
        for part in parts.iter().filter(|part| part.to == rank) {
            let (key, dims) = &vectors[part.vector];
            let start = end;
            end += part.both.elements() as usize;
            let (_, held) = arrived.entry(key.clone()).or_insert_with(|| (*dims, Vec::new()));
            let at = held.iter().position(|of| of.slice == part.wanted).unwrap_or_else(|| {
                let values = vec![0.0; part.wanted.stored.count()];
                held.push(Vector { slice: part.wanted.clone(), values, from: Vec::new() });
                held.len() - 1
            });
            let into = Block::padded(&slice_of(&part.wanted), dims_of(part.wanted.stored));
            copy(&part.both, (&Block::from_slice(&part.both), &received[start..end]), (&into, &mut held[at].values));
            held[at].from.push((part.both.clone(), part.from));
        }
        Ok(Arrived { step: 0, updates: 0, dims: vectors.iter().cloned().collect(), vectors: arrived })
    }
}

/// A slice of a vector.
struct Vector {
    slice: LocalSlice,
    values: Vec<f32>,
    /// The ranks that held its parts.
    from: Vec<(Slice, usize)>,
}

/// The vectors that a rank wanted, as another mesh had them.
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
                let at = place(*dims, start as usize + at);
                let element = Slice::new(at.iter().map(|&at| at as u64..at as u64 + 1));
                let holder = from.iter().find(|(part, _)| part.contains(&element)).map_or(0, |(_, rank)| *rank);
                found = Some(Different { at, own: *own, other: *other, holder });
            }
        });
        Ok(found)
    }
}

/// The index of an element in each dim, from its row-major number.
fn place(dims: Shape, mut element: usize) -> Vec<usize> {
    let mut at = vec![0; dims.len()];
    for dim in (0..dims.len()).rev() {
        at[dim] = element % dims[dim];
        element /= dims[dim];
    }
    at
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
