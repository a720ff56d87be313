//! VGG (Simonyan and Zisserman, 2014, arXiv:1409.1556): 3×3 convolutions, a 2×2 maximum after every few of them, and
//! linear layers over the remaining image. A norm follows each convolution, which the paper does not have.

use crate::layers::{Classes, Conv, Hidden, MaxPool, Norm};
use crate::network::Network;

/// A VGG as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VggConfig {
    /// Height, width and channels of an image.
    pub image: [usize; 3],
    /// Classes to tell apart.
    pub classes: usize,
    /// Per group of convolutions: the channels of each. A max pooling ends each group.
    pub groups: Vec<Vec<usize>>,
    /// Widths of the hidden linear layers.
    pub hidden: Vec<usize>,
    /// The norm after every convolution.
    pub norm: Norm,
}

impl VggConfig {
    /// A VGG for 8×8 grey images of the ten digits: 8 layers.
    pub fn digits() -> Self {
        let groups = vec![vec![16, 16], vec![32, 32]];
        Self { image: [8, 8, 1], classes: 10, groups, hidden: vec![64], norm: Norm::Batch }
    }

    /// Its layers: `group.{g}.conv.{c}`, `group.{g}.pool`, `hidden.{h}`, `head`.
    pub fn network(&self) -> Network {
        let mut network = Network::new(self.image);
        for (g, group) in self.groups.iter().enumerate() {
            for (c, &features) in group.iter().enumerate() {
                network = network.then(format!("group.{g}.conv.{c}"), Conv { features, norm: self.norm });
            }
            network = network.then(format!("group.{g}.pool"), MaxPool);
        }
        for (h, &features) in self.hidden.iter().enumerate() {
            network = network.then(format!("hidden.{h}"), Hidden { features });
        }
        network.then("head", Classes { classes: self.classes })
    }
}
