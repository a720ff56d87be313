//! Cards as data: what their makers state.

use meshwork_tensor::Precision;

/// A generation of cards: which kernels run on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Compute capability 8.0.
    Ampere,
    /// Compute capability 9.0.
    Hopper,
}

/// A card, and the machine that it is in: numbers for each card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// As `--device cuda:NAME` has it.
    pub name: &'static str,
    /// Its maker's name.
    pub title: &'static str,
    /// Its generation.
    pub architecture: Architecture,
    /// Multiprocessors, on which the tiles of a product are computed side by side.
    pub units: f64,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes a second read and written in its memory.
    pub bandwidth: f64,
    /// Operations a second on f32, without tensor cores.
    pub f32: f64,
    /// Operations a second on f32 whose operands tensor cores round to TF32, nothing left out as sparse.
    pub tf32: f64,
    /// Operations a second on bf16 and f16 by tensor cores, nothing left out as sparse.
    pub bf16: f64,
    /// Bytes a second that it sends to others of its machine while it receives as many.
    pub link: f64,
    /// Cards of a machine.
    pub on_machine: usize,
    /// Bytes a second from its host while as many go there.
    pub host: f64,
    /// Bytes a second that it sends to another machine.
    pub network: f64,
    /// Where the numbers are from.
    pub source: &'static str,
}

impl Card {
    /// Operations a second of products in a precision.
    pub fn peak(&self, precision: Precision) -> f64 {
        match precision {
            Precision::F32 => self.f32,
            Precision::Tf32 => self.tf32,
            Precision::Bf16 => self.bf16,
        }
    }
}

/// The common numbers of the cards of this generation.
const H100: Card = Card {
    name: "h100",
    title: "NVIDIA H100 SXM5 80 GB",
    architecture: Architecture::Hopper,
    units: 132.0,
    memory: 80e9,
    bandwidth: 3.35e12,
    f32: 66.9e12,
    tf32: 494.7e12,
    bf16: 989.4e12,
    link: 450e9,
    on_machine: 8,
    host: 64e9,
    network: 50e9,
    source: "NVIDIA H100 datasheet (SXM) and whitepaper: half of the rates with sparsity; NVLink 900 GB/s both ways \
    together; PCIe 5.0 of 16 lanes; DGX H100: 400 Gb/s of InfiniBand a card",
};

/// The cards that are known.
pub const CARDS: &[Card] = &[
    Card {
        name: "a100",
        title: "NVIDIA A100 SXM4 80 GB",
        architecture: Architecture::Ampere,
        units: 108.0,
        bandwidth: 2.039e12,
        f32: 19.5e12,
        tf32: 156e12,
        bf16: 312e12,
        link: 300e9,
        host: 32e9,
        network: 25e9,
        source: "NVIDIA A100 datasheet (SXM) and whitepaper: NVLink 600 GB/s both ways together; PCIe 4.0 of 16 lanes; DGX A100: 200 Gb/s of InfiniBand a card",
        ..H100
    },
    H100,
    Card {
        name: "h100-96",
        title: "NVIDIA H100 SXM5 96 GB of HBM2e",
        memory: 96e9,
        bandwidth: 2.4e12,
        source: "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, whose cards were limited to 500 W; rates as of the other H100",
        ..H100
    },
    Card {
        name: "h200",
        title: "NVIDIA H200 SXM 141 GB",
        memory: 141e9,
        bandwidth: 4.8e12,
        source: "NVIDIA H200 datasheet (SXM): half of the rates with sparsity; NVLink 900 GB/s both ways together; \
        PCIe 5.0 of 16 lanes; DGX H200: 400 Gb/s of InfiniBand a card",
        ..H100
    },
];

/// The card of this name.
pub fn card(name: &str) -> Option<&'static Card> {
    CARDS.iter().find(|card| card.name == name)
}
