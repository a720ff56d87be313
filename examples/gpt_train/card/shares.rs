//! The share of its peaks that a card reaches.

use meshwork::tensor::Precision;
use meshwork::train::config::{Architecture, Card};

/// The operations a second of attention, by a card's peak.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attention {
    /// The peak.
    Peak,
    /// A share of what the instructions of the kernels allow on tensor cores, and a share of the peak in f32.
    Kernels {
        /// Of the bound in [`OF_HALVES`] or [`OF_TF32`].
        tensor_cores: f64,
        /// Of the peak.
        f32: f64,
    },
}

/// Upper bounds of the speed of the attention kernels by their instruction counts, for head dimensions up to the first
/// number. Backward counts five products as work; products that its kernels recompute are not counted.
/// `kernels/report.md` has the counts of each kernel, and docs/gpu_performance.md derives these bounds from them.
const OF_HALVES: [(usize, Allowed); 3] = [
    (64, Allowed { ampere: Some([1.0, 0.71]), hopper: [0.68, 0.5] }),
    (128, Allowed { ampere: Some([1.0, 0.62]), hopper: [0.67, 0.38] }),
    (256, Allowed { ampere: Some([0.67, 0.4]), hopper: [0.33, 0.2] }),
];

/// The same of the kernels for TF32, by the peak of TF32.
const OF_TF32: [(usize, Allowed); 3] = [
    (64, Allowed { ampere: Some([1.0, 0.71]), hopper: [0.59, 0.38] }),
    (128, Allowed { ampere: Some([1.0, 0.56]), hopper: [0.5, 0.28] }),
    (256, Allowed { ampere: None, hopper: [0.33, 0.15] }),
];

/// Shares of a card's peak, forward and backward; none where the tiles of the kernels do not fit on the card.
#[derive(Clone, Copy)]
struct Allowed {
    ampere: Option<[f64; 2]>,
    hopper: [f64; 2],
}

impl Attention {
    /// The operations a second that attention in a precision reaches on a card with this head dimension, forward or
    /// backward.
    pub fn rate(self, card: &Card, precision: Precision, head: usize, backward: bool) -> f64 {
        let Self::Kernels { tensor_cores, f32 } = self else { return card.peak(precision) };
        let bounds = match precision {
            Precision::F32 => None,
            Precision::Tf32 => Some(OF_TF32),
            Precision::Bf16 => Some(OF_HALVES),
        };
        let of_head =
            |bounds: [(usize, Allowed); 3]| bounds[bounds.iter().filter(|(most, _)| head > *most).count().min(2)].1;
        let allowed = bounds.map(of_head).and_then(|of| match card.architecture {
            Architecture::Ampere => of.ampere,
            Architecture::Hopper => Some(of.hopper),
        });
        match allowed {
            Some(allowed) => card.peak(precision) * tensor_cores * allowed[usize::from(backward)],
            None => card.peak(Precision::F32) * f32,
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
