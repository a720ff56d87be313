//! The states of a model, which are the places where it may be cut in two, as in PipeDream's optimizer.
//!
//! A state is a set of layers that contains, with each layer, all layers that it depends on: the layers that the stages
//! before a cut compute. PipeDream names it by its antichain, the layers of the set on which no other layer of the set
//! depends; in a chain of layers that is the last one. A stage is the difference of two states.
//!
//! The first state is the first layer of the file that reads from nothing. Adding to a state a layer that reads from
//! it, together with everything else on which that layer depends, gives a next state. Input layers are removed before
//! (data is available everywhere), and so are `__getitem__` layers that no layer reads.

use super::error::PlanError;
use super::profile::Profile;
use std::collections::BTreeSet;

/// A place for a cut: the layers before it, and their total time and memory.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// The layers whose outputs count as sent over the cut, as indices in the profile. Besides the antichain, these are
    /// the layers on which a layer of the antichain depends and which are also read by a layer that is not on the way
    /// to it. So an output that two branches read counts while both are open, even if both have read it, as in the
    /// published code.
    pub boundary: Vec<usize>,
    /// Time of forward and backward of all layers, in seconds.
    pub compute_s: f64,
    /// Bytes of weights of all layers.
    pub parameter_bytes: f64,
    /// Bytes of the outputs sent over the cut.
    pub output_bytes: f64,
    layers: Layers,
}

/// All states of a model, smaller ones first.
#[derive(Clone, Debug, PartialEq)]
pub struct States {
    states: Vec<State>,
    /// Per layer of the profile: how many others it depends on.
    depths: Vec<usize>,
}

/// Parallel branches multiply the number of states. This limit is more than any published profile has, and listing this
/// many takes a moment. How many of them can be searched depends on the machines; [`plan`](super::plan()) checks that.
const MOST: usize = 1 << 14;

impl States {
    /// The states of a profile.
    ///
    /// # Errors
    /// A profile that has only inputs, layers that are not connected to the others, or too many parallel branches.
    pub fn new(profile: &Profile) -> Result<Self, PlanError> {
        let graph = Graph::new(profile);
        let start = graph.kept().find(|&layer| graph.sources[layer].is_empty()).ok_or(PlanError::NoLayers)?;
        let first = Layers::none(profile.layers().len()).with(start);
        let mut found = BTreeSet::from([first.clone()]);
        let mut new = vec![first];
        while let Some(state) = new.pop() {
            let readers = state.iter().flat_map(|layer| &graph.readers[layer]).filter(|&&reader| !state.has(reader));
            for &reader in readers.collect::<BTreeSet<_>>() {
                let next = state.union(&graph.needs[reader]).with(reader);
                if found.insert(next.clone()) {
                    new.push(next);
                }
                if found.len() > MOST {
                    return Err(PlanError::TooManyStates { most: MOST });
                }
            }
        }
        let mut states: Vec<State> = found.into_iter().map(|layers| graph.state(profile, layers)).collect();
        // A state comes before the states that contain it, because it has fewer layers.
        states.sort_by_cached_key(|state| (state.layers.iter().count(), state.layers.iter().collect::<Vec<_>>()));
        let last = &states[states.len() - 1].layers;
        if let Some(outside) = graph.kept().find(|&layer| !last.has(layer)) {
            let id = |layer: usize| profile.layers()[layer].id.clone();
            return Err(PlanError::Unconnected { from: id(start), to: id(outside) });
        }
        Ok(Self { depths: graph.needs.iter().map(|needs| needs.iter().count()).collect(), states })
    }

    /// All states, smaller ones first.
    #[must_use]
    pub fn all(&self) -> &[State] {
        &self.states
    }

    /// Number of states.
    #[must_use]
    pub fn count(&self) -> usize {
        self.states.len()
    }

    /// The layers of a stage, as indices in the profile: the layers of state `end - 1` that state `start - 1` does not
    /// have. Each layer comes after the layers that it reads from.
    #[must_use]
    pub fn layers(&self, start: usize, end: usize) -> Vec<usize> {
        let has = |cut: usize, layer| cut > 0 && self.states[cut - 1].layers.has(layer);
        let mut layers: Vec<usize> = self.states[end - 1].layers.iter().filter(|&layer| !has(start, layer)).collect();
        layers.sort_by_key(|&layer| self.depths[layer]);
        layers
    }

    /// The largest number of stages that the model can be cut into. Each has at least one layer, and the other layers
    /// on which that one depends.
    #[must_use]
    pub fn most_stages(&self) -> usize {
        let mut most = vec![1; self.states.len()];
        for end in 0..most.len() {
            let before = (0..end).filter(|&start| self.precedes(start + 1, end + 1));
            most[end] = before.map(|start| most[start] + 1).max().unwrap_or(1);
        }
        most[most.len() - 1]
    }

    /// Whether a stage can lie between two cuts. Cut 0 is before all layers, cut n after the layers of state n-1.
    pub(super) fn precedes(&self, start: usize, end: usize) -> bool {
        start < end && (start == 0 || self.states[start - 1].layers.is_within(&self.states[end - 1].layers))
    }
}

/// A profile without the layers that are not placed.
struct Graph {
    /// Per layer: whether it is placed on a stage.
    kept: Vec<bool>,
    /// Per layer: the layers that read its output.
    readers: Vec<Vec<usize>>,
    /// Per layer: the layers whose output it reads.
    sources: Vec<Vec<usize>>,
    /// Per layer: all layers that it depends on.
    needs: Vec<Layers>,
}

impl Graph {
    fn new(profile: &Profile) -> Self {
        let count = profile.layers().len();
        let named = |layer: usize, name| profile.layers()[layer].name.starts_with(name);
        let reads = |layer| profile.edges().iter().any(|&(_, to)| to == layer);
        let is_read = |layer| profile.edges().iter().any(|&(from, _)| from == layer);
        let is_data = |layer| named(layer, "Input") && !reads(layer);
        let is_unused = |layer| named(layer, "__getitem__") && !is_read(layer);
        let kept: Vec<bool> = (0..count).map(|layer| !is_data(layer) && !is_unused(layer)).collect();
        let (mut readers, mut sources) = (vec![Vec::new(); count], vec![Vec::new(); count]);
        for &(from, to) in profile.edges().iter().filter(|&&(from, to)| kept[from] && kept[to]) {
            readers[from].push(to);
            sources[to].push(from);
        }
        let mut graph = Self { kept, readers, sources, needs: vec![Layers::none(count); count] };
        let mut waits: Vec<usize> = graph.sources.iter().map(Vec::len).collect();
        let mut ready: Vec<usize> = graph.kept().filter(|&layer| waits[layer] == 0).collect();
        while let Some(layer) = ready.pop() {
            let with = graph.needs[layer].clone().with(layer);
            for &reader in &graph.readers[layer] {
                graph.needs[reader] = graph.needs[reader].union(&with);
                waits[reader] -= 1;
                if waits[reader] == 0 {
                    ready.push(reader);
                }
            }
        }
        graph
    }

    fn kept(&self) -> impl Iterator<Item = usize> {
        (0..self.kept.len()).filter(|&layer| self.kept[layer])
    }

    fn state(&self, profile: &Profile, layers: Layers) -> State {
        let inside = |layer: usize| self.readers[layer].iter().any(|&reader| layers.has(reader));
        let antichain: Vec<usize> = layers.iter().filter(|&layer| !inside(layer)).collect();
        let off_the_way = |end: usize, layer: usize| {
            let needs = &self.needs[end];
            needs.has(layer) && self.readers[layer].iter().any(|&reader| reader != end && !needs.has(reader))
        };
        let mut boundary: Vec<usize> =
            layers.iter().filter(|&layer| antichain.iter().any(|&end| off_the_way(end, layer))).collect();
        boundary.extend(antichain);
        let sum = |of: &dyn Fn(usize) -> f64| layers.iter().map(of).sum();
        let of = |layer: usize| &profile.layers()[layer];
        State {
            compute_s: sum(&|layer| (of(layer).forward_ms + of(layer).backward_ms) / 1e3),
            parameter_bytes: sum(&|layer| of(layer).parameter_bytes),
            output_bytes: boundary.iter().map(|&layer| of(layer).activation_bytes).sum(),
            boundary,
            layers,
        }
    }
}

/// A set of layers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Layers(Vec<u64>);

impl Layers {
    fn none(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    fn with(mut self, layer: usize) -> Self {
        self.0[layer / 64] |= 1 << (layer % 64);
        self
    }

    fn has(&self, layer: usize) -> bool {
        self.0[layer / 64] >> (layer % 64) & 1 == 1
    }

    fn union(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a | b).collect())
    }

    fn is_within(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a & !b == 0)
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        (0..self.0.len() * 64).filter(|&layer| self.has(layer))
    }
}
