//! The share of its peaks that a card reaches.

/// The share of a card's peaks that is reached, and what is lost for each operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// Of its operations a second, by products.
    pub products: f64,
    /// The same by attention.
    pub attention: f64,
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
    pub const PEAKS: Self =
        Self { products: 1.0, attention: 1.0, memory: 1.0, links: 1.0, launch: [0.0; 2], latency: [0.0; 2] };

    /// What good programs reach; docs/gpu_performance.md has the sources. Products of large matrices reach 0.79 of an
    /// H100's peak where tiles are tuned to the shape; attention forward and backward together less; copies within its
    /// memory 0.87; an all-reduce within a machine 0.8. Graphs leave 0.55 of a launch.
    pub const REACHED: Self = Self {
        products: 0.7,
        attention: 0.45,
        memory: 0.87,
        links: 0.8,
        launch: [3e-6, 1.7e-6],
        latency: [10e-6, 20e-6],
    };
}
