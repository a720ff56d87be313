//! The share of its peaks that a card reaches.

use meshwork::train::config::{Architecture, Card};

/// The operations a second of attention, by a card's peak.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attention {
    /// The peak.
    Peak,
    /// A share of what the instructions of the kernels allow on tensor cores, and a share of the peak in f32.
    Kernels {
        /// Of the bound in [`ALLOWED`].
        tensor_cores: f64,
        /// Of the peak.
        f32: f64,
    },
}

/// Upper bounds of the speed of the attention kernels by their instruction counts, for head dimensions up to the first
/// number. Backward counts five products as work; products that its kernels recompute are not counted.
/// `kernels/report.md` has the counts of each kernel, and docs/gpu_performance.md derives these bounds from them.
const ALLOWED: [(usize, Allowed); 3] = [
    (64, Allowed { ampere: [1.0, 0.71], hopper: [0.68, 0.5] }),
    (128, Allowed { ampere: [1.0, 0.62], hopper: [0.67, 0.38] }),
    (256, Allowed { ampere: [0.67, 0.4], hopper: [0.33, 0.2] }),
];

/// Shares of a card's peak, forward and backward.
#[derive(Clone, Copy)]
struct Allowed {
    ampere: [f64; 2],
    hopper: [f64; 2],
}

impl Attention {
    /// The share of a card's peak that attention reaches with this head dimension, forward or backward.
    pub fn share(self, card: &Card, tensor_cores: bool, head: usize, backward: bool) -> f64 {
        match self {
            Self::Peak => 1.0,
            Self::Kernels { f32, .. } if !tensor_cores => f32,
            Self::Kernels { tensor_cores, .. } => {
                let (_, of) = ALLOWED.iter().find(|(most, _)| head <= *most).unwrap_or(&ALLOWED[ALLOWED.len() - 1]);
                let allowed = match card.architecture {
                    Architecture::Ampere => of.ampere,
                    Architecture::Hopper => of.hopper,
                };
                tensor_cores * allowed[usize::from(backward)]
            }
        }
    }
}

/// The share of a card's peaks that is reached, and what is lost for each operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// Of its operations a second, by products.
    pub products: f64,
    /// The same by attention: in f32 of the peak, and on tensor cores of what the instructions of its kernels allow.
    pub attention: Attention,
    /// Of its memory's bandwidth.
    pub memory: f64,
    /// Of its links.
    pub links: f64,
    /// Seconds from the end of one kernel to the start of the next: where each is launched by itself, and within a
    /// graph.
    pub launch: [f64; 2],
    /// Seconds of a message or a collective without bytes, within a machine and between machines.
    pub latency: [f64; 2],
}

impl Shares {
    /// The least time: all peaks at once, and nothing lost.
    pub const PEAKS: Self = Self {
        products: 1.0,
        attention: Attention::Peak,
        memory: 1.0,
        links: 1.0,
        launch: [0.0; 2],
        latency: [0.0; 2],
    };

    /// What good programs reach; docs/gpu_performance.md has the sources. Products of large matrices reach 0.79 of an
    /// H100's peak where tiles are tuned to the shape; attention less, by what its kernels allow; copies within its
    /// memory 0.87; an all-reduce within a machine 0.8. Graphs leave 0.55 of a launch.
    pub const REACHED: Self = Self {
        products: 0.7,
        attention: Attention::Kernels { tensor_cores: 0.7, f32: 0.45 },
        memory: 0.87,
        links: 0.8,
        launch: [3e-6, 1.7e-6],
        latency: [10e-6, 20e-6],
    };
}
