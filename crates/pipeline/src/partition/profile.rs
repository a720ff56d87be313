//! Profiles: the time and memory of each layer of a model, and which layer reads from which.
//!
//! The format is the one that PipeDream published: a line per layer, then a line per edge, which begins with a tab.
//!
//! ```text
//! ID -- NAME -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES, parameter_size=BYTES[ -- stage_id=N]
//! <TAB>FROM -- TO
//! ```
//!
//! Times are in milliseconds and sizes in bytes, all for one mini-batch on one machine. A layer with several outputs
//! may list their sizes, as `[8; 16]`. Lines may stand in any order; empty ones are skipped.

use super::error::{ProfileError, ProfileFault};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// One measured layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The name of the layer in edges.
    pub id: String,
    /// The kind of the layer. The cost of an `Input...` is not counted, because it is data and not work.
    pub name: String,
    /// Time of its forward, in milliseconds.
    pub forward_ms: f64,
    /// Time of its backward, in milliseconds.
    pub backward_ms: f64,
    /// Bytes of its output, or of all its outputs.
    pub activation_bytes: f64,
    /// Bytes of its weights.
    pub parameter_bytes: f64,
    /// The stage to which another planner has assigned it. This planner does not read it.
    pub stage: Option<usize>,
}

/// The layers of a model and the edges between them: an acyclic graph.
///
/// ```
/// use meshwork_pipeline::partition::Profile;
///
/// let text = "\
/// node1 -- Embedding -- forward_compute_time=1, backward_compute_time=2.5, activation_size=[8; 16], parameter_size=64
/// node2 -- Linear -- forward_compute_time=3, backward_compute_time=6, activation_size=8, parameter_size=32 -- stage_id=1
/// \tnode1 -- node2
/// ";
/// let profile: Profile = text.parse()?;
/// assert_eq!(profile.layers()[0].activation_bytes, 24.0);
/// assert_eq!(profile.edges(), [(0, 1)]);
/// assert_eq!(profile.to_string(), text.replace("[8; 16]", "24"));
///
/// let error = text.replace("backward_compute_time=6", "backward_compute_time=6ms").parse::<Profile>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "line 2: backward_compute_time = \"6ms\" is no number of milliseconds; use a finite number of at least 0"
/// );
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    layers: Vec<Layer>,
    edges: Vec<(usize, usize)>,
}

impl Profile {
    /// A chain of layers: each one reads from the previous one.
    ///
    /// # Errors
    /// The first layer that the format cannot represent.
    pub fn chain(layers: Vec<Layer>) -> Result<Self, ProfileError> {
        let ids: Vec<String> = layers.iter().map(|layer| layer.id.clone()).collect();
        let edges = ids.windows(2).map(|pair| [pair[0].clone(), pair[1].clone()]);
        let first_edge = layers.len() + 1;
        let edges = edges.enumerate().map(|(at, edge)| (first_edge + at, edge)).collect();
        assemble(layers.into_iter().enumerate().map(|(at, layer)| (at + 1, layer)).collect(), edges)
    }

    /// The layers, in the order of the file.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The edges, in the order of the file, as indices of layers: the second reads from the first.
    #[must_use]
    pub fn edges(&self) -> &[(usize, usize)] {
        &self.edges
    }
}

impl FromStr for Profile {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let (mut layers, mut edges) = (Vec::new(), Vec::new());
        for (at, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
            let line = at + 1;
            let parsed = match text.starts_with([' ', '\t']) {
                true => edge(text.trim()).map(|edge| edges.push((line, edge))),
                false => layer(text.trim()).map(|layer| layers.push((line, layer))),
            };
            parsed.map_err(|fault| ProfileError { line, fault })?;
        }
        assemble(layers, edges)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Layer { id, name, forward_ms, backward_ms, activation_bytes, parameter_bytes, stage } in &self.layers {
            write!(
                f,
                "{id} -- {name} -- {FORWARD}={forward_ms}, {BACKWARD}={backward_ms}, {ACTIVATION}={activation_bytes}, \
                 {PARAMETER}={parameter_bytes}"
            )?;
            if let Some(stage) = stage { writeln!(f, " -- {STAGE}={stage}")? } else { writeln!(f)? }
        }
        for &(from, to) in &self.edges {
            writeln!(f, "\t{} -- {}", self.layers[from].id, self.layers[to].id)?;
        }
        Ok(())
    }
}

const FORWARD: &str = "forward_compute_time";
const BACKWARD: &str = "backward_compute_time";
const ACTIVATION: &str = "activation_size";
const PARAMETER: &str = "parameter_size";
const STAGE: &str = "stage_id";

const SEPARATOR: &str = " -- ";

/// `A -- B`
fn edge(text: &str) -> Result<[String; 2], ProfileFault> {
    match text.split_once(SEPARATOR) {
        Some((from, to)) if !to.contains(SEPARATOR) => Ok([from.trim().to_owned(), to.trim().to_owned()]),
        _ => Err(ProfileFault::NotALine { text: text.to_owned() }),
    }
}

/// `ID -- NAME -- fields[ -- stage_id=N]`
fn layer(text: &str) -> Result<Layer, ProfileFault> {
    let parts: Vec<&str> = text.split(SEPARATOR).collect();
    let (id, name, costs, stage) = match parts[..] {
        [id, name, costs] => (id, name, costs, None),
        [id, name, costs, stage] => (id, name, costs, Some(stage)),
        _ => return Err(ProfileFault::NotALine { text: text.to_owned() }),
    };
    let mut costs = costs.split(", ");
    let mut next = |field| value_of(field, costs.next().unwrap_or(""));
    let layer = Layer {
        id: id.to_owned(),
        name: name.to_owned(),
        forward_ms: number(FORWARD, next(FORWARD)?)?,
        backward_ms: number(BACKWARD, next(BACKWARD)?)?,
        activation_bytes: sizes(next(ACTIVATION)?)?,
        parameter_bytes: number(PARAMETER, next(PARAMETER)?)?,
        stage: match stage.map(|stage| value_of(STAGE, stage)).transpose()? {
            Some(value) => {
                let fault = |_| ProfileFault::Number { field: STAGE, value: value.to_owned() };
                Some(value.parse().map_err(fault)?)
            }
            None => None,
        },
    };
    match costs.next() {
        Some(found) => Err(ProfileFault::Field { expected: "the end", found: found.to_owned() }),
        None => Ok(layer),
    }
}

/// The text after `field=`.
fn value_of<'a>(field: &'static str, text: &'a str) -> Result<&'a str, ProfileFault> {
    match text.trim().split_once('=') {
        Some((name, value)) if name == field => Ok(value),
        _ => Err(ProfileFault::Field { expected: field, found: text.trim().to_owned() }),
    }
}

fn number(field: &'static str, text: &str) -> Result<f64, ProfileFault> {
    match text.trim().parse() {
        Ok(number) if is_amount(number) => Ok(number),
        _ => Err(ProfileFault::Number { field, value: text.to_owned() }),
    }
}

fn is_amount(number: f64) -> bool {
    number.is_finite() && number >= 0.0
}

/// One size, or the sum of a list.
fn sizes(text: &str) -> Result<f64, ProfileFault> {
    match text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        Some(list) => list.split(';').map(|size| number(ACTIVATION, size)).sum(),
        None => number(ACTIVATION, text),
    }
}

/// Checks the consistency of all lines. Each layer and edge comes with its line.
fn assemble(lines: Vec<(usize, Layer)>, edges: Vec<(usize, [String; 2])>) -> Result<Profile, ProfileError> {
    let refuse = |line, fault| Err(ProfileError { line, fault });
    if lines.is_empty() {
        return refuse(1, ProfileFault::Empty);
    }
    let mut known: HashMap<&str, usize> = HashMap::new();
    for (at, (line, layer)) in lines.iter().enumerate() {
        for text in [&layer.id, &layer.name] {
            if text.trim() != text || text.is_empty() || text.contains(['\n', '\r']) || text.contains(SEPARATOR) {
                return refuse(*line, ProfileFault::Text { text: text.clone() });
            }
        }
        let costs = [
            (FORWARD, layer.forward_ms),
            (BACKWARD, layer.backward_ms),
            (ACTIVATION, layer.activation_bytes),
            (PARAMETER, layer.parameter_bytes),
        ];
        if let Some((field, value)) = costs.into_iter().find(|(_, cost)| !is_amount(*cost)) {
            return refuse(*line, ProfileFault::Number { field, value: value.to_string() });
        }
        if let Some(first) = known.insert(&layer.id, at) {
            return refuse(*line, ProfileFault::Twice { id: layer.id.clone(), first: lines[first].0 });
        }
    }
    let mut joined: HashMap<(usize, usize), usize> = HashMap::new();
    let mut pairs: Vec<(usize, usize)> = Vec::with_capacity(edges.len());
    for (line, [from, to]) in edges {
        let find = |id: &str| {
            known
                .get(id)
                .copied()
                .ok_or_else(|| ProfileError { line, fault: ProfileFault::Unknown { id: id.to_owned() } })
        };
        let edge = (find(&from)?, find(&to)?);
        if let Some(first) = joined.insert(edge, line) {
            return refuse(line, ProfileFault::EdgeTwice { first });
        }
        pairs.push(edge);
    }
    if let Some(cycle) = cycle(lines.len(), &pairs) {
        let ids = cycle.iter().map(|&at| lines[at].1.id.clone()).collect();
        let ends = cycle.iter().zip(cycle.iter().cycle().skip(1));
        let last = ends.filter_map(|(&from, &to)| joined.get(&(from, to))).max();
        return refuse(last.copied().unwrap_or(1), ProfileFault::Cycle { ids });
    }
    Ok(Profile { layers: lines.into_iter().map(|(_, layer)| layer).collect(), edges: pairs })
}

/// The layers of some cycle, in the order of its edges.
fn cycle(layers: usize, edges: &[(usize, usize)]) -> Option<Vec<usize>> {
    let mut readers = vec![Vec::new(); layers];
    let mut sources = vec![Vec::new(); layers];
    for &(from, to) in edges {
        readers[from].push(to);
        sources[to].push(from);
    }
    // Take away layers that read from nothing that is left; what stays has a source that stays.
    let mut waits: Vec<usize> = sources.iter().map(Vec::len).collect();
    let mut ready: Vec<usize> = (0..layers).filter(|&layer| waits[layer] == 0).collect();
    while let Some(layer) = ready.pop() {
        for &reader in &readers[layer] {
            waits[reader] -= 1;
            if waits[reader] == 0 {
                ready.push(reader);
            }
        }
    }
    let mut back = vec![(0..layers).find(|&layer| waits[layer] > 0)?];
    loop {
        let source = sources[back[back.len() - 1]].iter().copied().find(|&source| waits[source] > 0)?;
        if let Some(begin) = back.iter().position(|&layer| layer == source) {
            return Some(back.drain(begin..).rev().collect());
        }
        back.push(source);
    }
}
