//! A plan: a mesh and the other keys of a configuration, and the step that they lead to.

use crate::predict::Prediction;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Keys of a configuration, such as `model.preset`, with their values.
pub type Keys = BTreeMap<String, toml::Value>;

/// A plan: the keys that were chosen, and what they lead to.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Degrees of dp, tp, pp, cp and ep.
    pub mesh: [usize; 5],
    /// All keys of its configuration, given ones and chosen ones.
    pub keys: Keys,
    /// Its step.
    pub step: Prediction,
}

/// A mesh of these degrees of dp, tp, pp, cp and ep as `--mesh` reads it. Axes of degree 1 are left out, and one rank
/// is `dp=1`.
pub fn mesh_text(degrees: [usize; 5]) -> String {
    let axes = ["dp", "tp", "pp", "cp", "ep"].into_iter().zip(degrees).filter(|(_, degree)| *degree > 1);
    let cut = axes.map(|(axis, degree)| format!("{axis}={degree}")).collect::<Vec<_>>().join(",");
    if cut.is_empty() { "dp=1".to_owned() } else { cut }
}

/// Where a plan loses against a better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Seconds in which stages wait for each other.
    Bubble,
    /// Seconds in which cards wait for collectives.
    Traffic,
    /// Seconds that recompute activations.
    Recomputation,
    /// Seconds of all other operations: smaller products reach less of the card's peak, and the optimizer has more.
    Computation,
    /// Bytes.
    Memory,
}

impl Plan {
    /// The faster one first, of equally fast ones the smaller.
    pub(crate) fn order(&self, other: &Self) -> Ordering {
        let (own, other) = (&self.step, &other.step);
        own.seconds.total_cmp(&other.seconds).then(own.memory.total_cmp(&other.memory))
    }

    /// The command that trains it, with these words before its flags.
    pub fn command(&self, program: &str) -> String {
        let mut text = format!("{program} {}", self.mesh_flag());
        for (key, value) in self.keys.iter().filter(|(key, _)| !is_degree(key)) {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            text += &format!(" --set {key}={value}");
        }
        text
    }

    /// The flag that says its mesh.
    pub fn mesh_flag(&self) -> String {
        format!("--mesh {}", mesh_text(self.mesh))
    }

    /// The parts in which it loses against a better plan, the largest first.
    pub fn losses(&self, best: &Self) -> Vec<(Loss, f64)> {
        let parts = |step: &Prediction| {
            let traffic = step.exposed.values().sum::<f64>();
            let known = traffic + step.bubble + step.recomputed;
            [
                (Loss::Bubble, step.bubble),
                (Loss::Traffic, traffic),
                (Loss::Recomputation, step.recomputed),
                (Loss::Computation, step.seconds - known),
                (Loss::Memory, step.memory),
            ]
        };
        let mut all: Vec<(Loss, f64)> = parts(&self.step)
            .into_iter()
            .zip(parts(&best.step))
            .map(|((loss, own), (_, other))| (loss, own - other))
            .collect();
        all.retain(|(_, more)| *more > 0.0);
        let rank = |(loss, more): &(Loss, f64)| if *loss == Loss::Memory { 0.0 } else { *more };
        all.sort_by(|a, b| rank(b).total_cmp(&rank(a)));
        all
    }
}

fn is_degree(key: &str) -> bool {
    ["dp", "tp", "pp", "cp", "ep"].iter().any(|axis| key.strip_prefix("parallelism.") == Some(axis))
}
