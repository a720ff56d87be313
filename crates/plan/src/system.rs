//! How a system trains, as data: the share of a card that its kernels reach, what it keeps, and what it overlaps.

use crate::cluster::Cluster;
use crate::error::{PlanError, named};
use serde::Deserialize;
use std::collections::BTreeMap;

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// The physical constants of a system. [`NAMES`](Self::NAMES) has them in order.
        #[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
        #[serde(deny_unknown_fields)]
        pub struct Constants {
            $($(#[$doc])* pub $name: f64,)+
        }

        impl Constants {
            /// The name of each.
            pub const NAMES: &[&str] = &[$(stringify!($name)),+];

            /// Each by its name.
            pub fn get(&self, name: &str) -> Option<f64> {
                match name { $(stringify!($name) => Some(self.$name),)+ _ => None }
            }

            /// Sets one by its name; an unknown name changes nothing.
            pub fn set(&mut self, name: &str, value: f64) {
                match name { $(stringify!($name) => self.$name = value,)+ _ => {} }
            }
        }
    };
}

constants! {
    /// Share of a card's operations a second that a product of many tiles reaches.
    products,
    /// Waves of tiles that a product loses at its start and end.
    wave,
    /// The same share for a product with an extent that is no multiple of 8.
    unaligned,
    /// Share of a card's operations a second that fused attention reaches; 0 where attention is not fused.
    attention,
    /// Bytes that unfused attention moves for each score; 0 where attention is fused.
    score_bytes,
    /// Bytes that a product moves for each element of its right operand, which it packs first: a product of few rows
    /// takes longer for that. 0 where no product packs.
    packed_bytes,
    /// Share of a card's bandwidth that all other operations reach.
    memory,
    /// Bytes that they move, over those that this library's operations move.
    passes,
    /// Host seconds from an operation to the next.
    launch,
    /// Host seconds of a collective.
    call,
    /// Host seconds of a layer's pass whose softmax does not take the fused kernel: it takes multiples of 4 heads.
    fallback,
    /// Host seconds of a micro-batch beyond those of its operations: reading its tokens, sending them to the ranks of
    /// tp, masks, the loss.
    batch,
    /// Exponent with which the times of host and card are joined: 1 adds them, a large one takes the longer.
    join,
    /// Share of the links inside a host.
    inside,
    /// Share of the links between hosts, of a collective that the layers wait for.
    between,
    /// The same of the sum of gradients, in which all groups of a host send at once.
    gradients,
    /// Seconds of a collective without bytes, inside a host: of those of a layer for each doubling of the group, with
    /// the wait for the last rank. Sums of gradients and messages have it once.
    latency,
    /// The same between hosts.
    far_latency,
    /// Share of a collective behind other work that the work is slowed down by.
    interference,
    /// Bytes that the optimizer moves for each parameter of its slice.
    optimizer,
    /// Host seconds of a step.
    step,
}

/// What is held of a parameter, in bytes, and kept of an activation.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Held {
    /// The weight that layers read.
    pub weight: f64,
    /// Its gradient.
    pub gradient: f64,
    /// States of the optimizer, with a weight in f32.
    pub states: f64,
    /// Bytes that backward needs of activations, over those that this library keeps.
    pub activations: f64,
    /// Bytes for each score of the layer whose backward runs; 0 where attention is fused.
    pub scores: f64,
    /// Bytes of a card that no tensor has: contexts, buffers of collectives, fragments.
    pub fixed: f64,
}

/// Where the bytes of a rank are from.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// What the system holds of each parameter and activation.
    #[default]
    Held,
    /// A dry run of a whole step: the bytes that `--steps 0` predicts. What is held is an estimate of them, for
    /// searches.
    DryRun,
}

/// A system.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// Its name, as `--system` has it.
    pub name: String,
    /// Where its description is from.
    pub source: String,
    /// The cluster of its published runs, and those with cards of other memory, in the form of cluster files.
    pub clusters: Vec<String>,
    /// Keys of the configuration that all of its runs have.
    #[serde(default)]
    pub keys: BTreeMap<String, toml::Value>,
    /// Tokens of its vocabulary where a table names none, and the number of which, times tp, the vocabulary is made a
    /// multiple where tp is above 1.
    pub vocabulary: [usize; 2],
    /// Whether token tables are stored with a padded number of rows, as this library stores them: products with the
    /// logits then are as fast as others.
    #[serde(default = "padded")]
    pub pads: bool,
    /// Whether weights are gathered and gradients scattered for each layer of each micro-batch, as FSDP does, and not
    /// once a step.
    pub by_layer: bool,
    /// Whether the sum of gradients runs behind the backward of the last micro-batch.
    pub overlaps: bool,
    /// Whether a stage computes while its messages are sent.
    pub sends_behind: bool,
    /// Where the bytes of a rank are from.
    #[serde(default)]
    pub memory: Memory,
    /// What its ranks hold.
    pub held: Held,
    /// The constants that are fitted to published runs; all others are stated.
    pub fitted: Vec<String>,
    /// The tables of published runs: a file in `published/` and the tables in it. Even rows are fitted, odd ones test.
    #[serde(default)]
    pub published: Vec<(String, Vec<String>)>,
    /// Tables of which no row is fitted: all of them test.
    #[serde(default)]
    pub checked: Vec<(String, Vec<String>)>,
    /// The constants.
    pub constants: Constants,
}

fn padded() -> bool {
    true
}

/// The systems that are known.
const KNOWN: [(&str, &str); 6] = [
    ("meshwork", include_str!("../systems/meshwork.toml")),
    ("meshwork-cpu", include_str!("../systems/meshwork-cpu.toml")),
    ("megatron-deepspeed-a100", include_str!("../systems/megatron-deepspeed-a100.toml")),
    ("fsdp-h100", include_str!("../systems/fsdp-h100.toml")),
    ("fsdp-a100", include_str!("../systems/fsdp-a100.toml")),
    ("megatron-h100", include_str!("../systems/megatron-h100.toml")),
];

/// The key of the states, gradients and weights that ranks share out.
pub(crate) const ZERO_STAGE: &str = "parallelism.zero_stage";

impl System {
    /// The names of the known systems.
    pub fn names() -> impl Iterator<Item = &'static str> {
        KNOWN.iter().map(|&(name, _)| name)
    }

    /// A system that comes with the planner.
    ///
    /// ```
    /// use meshwork_plan::System;
    ///
    /// assert_eq!(System::known("fsdp-h100")?.name, "fsdp-h100");
    /// assert_eq!(
    ///     System::known("fsdp").unwrap_err().to_string(),
    ///     "there is no system \"fsdp\"; known: meshwork, meshwork-cpu, megatron-deepspeed-a100, fsdp-h100, fsdp-a100, \
    ///      megatron-h100"
    /// );
    /// # Ok::<(), meshwork_plan::PlanError>(())
    /// ```
    ///
    /// # Errors
    /// A name that none has.
    pub fn known(name: &str) -> Result<Self, PlanError> {
        let text = named("system", &KNOWN, name)?;
        let refuse = |problem: String| PlanError::File {
            file: format!("systems/{name}.toml"),
            problem,
            valid: "a system has a name, what it holds and its constants".into(),
        };
        let system: Self = toml::from_str(text).map_err(|error| refuse(error.message().to_owned()))?;
        match system.fitted.iter().find(|name| system.constants.get(name).is_none()) {
            Some(unknown) => Err(refuse(format!("fitted: there is no constant {unknown:?}"))),
            None => Ok(system),
        }
    }

    /// Its keys where this many ranks have the same parameters: one alone has nobody to share out with.
    pub fn keys_of(&self, replicas: usize) -> BTreeMap<String, toml::Value> {
        let mut keys = self.keys.clone();
        if replicas < 2 {
            keys.remove(ZERO_STAGE);
        }
        keys
    }

    /// The same with the constants that were measured on a cluster.
    #[must_use]
    pub fn on(mut self, cluster: &Cluster) -> Self {
        cluster.constants.iter().for_each(|(name, value)| self.constants.set(name, *value));
        self
    }

    /// The cluster of its published runs. A title that names the memory of a card, as `A100 40GB`, chooses it.
    ///
    /// # Errors
    /// As [`Cluster::known`].
    pub fn cluster(&self, title: &str) -> Result<Cluster, PlanError> {
        let all: Vec<Cluster> = self.clusters.iter().map(|name| Cluster::known(name)).collect::<Result<_, _>>()?;
        let named = |cluster: &&Cluster| title.contains(&format!("{:.0}GB", cluster.card.memory / 1e9));
        match all.iter().find(named).or(all.first()) {
            Some(cluster) => Ok(cluster.clone()),
            None => Cluster::known(""),
        }
    }
}
