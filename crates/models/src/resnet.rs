//! ResNet (He, Zhang, Ren and Sun, 2015, arXiv:1512.03385), in the small form of its section 4.2 for small images: a
//! 3×3 convolution, groups of residual blocks, the first block of each but the first group halving height and width,
//! the mean over pixels, a linear layer.

use crate::layers::{Conv, ConvNorm, Norm, PooledClasses};
use crate::network::{Layer, Module, Network};
use meshwork_tensor::{Declarations, Result, Shape, Tape, Var};

/// A ResNet as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResNetConfig {
    /// Height, width and channels of an image.
    pub image: [usize; 3],
    /// Classes to tell apart.
    pub classes: usize,
    /// Per group: (channels, blocks).
    pub groups: Vec<(usize, usize)>,
    /// The norm after every convolution.
    pub norm: Norm,
}

impl ResNetConfig {
    /// A ResNet for 8×8 grey images of the ten digits. It has 6 layers: a stem, two groups of 2 layers, and a head.
    pub fn digits() -> Self {
        Self { image: [8, 8, 1], classes: 10, groups: vec![(16, 2), (32, 2)], norm: Norm::Batch }
    }

    /// Its layers: `stem`, `group.{g}.block.{b}`, `head`.
    pub fn network(&self) -> Network {
        let stem = self.groups.first().map_or(self.image[2], |&(features, _)| features);
        let mut network = Network::new(self.image).then("stem", Conv { features: stem, norm: self.norm });
        for (g, &(features, blocks)) in self.groups.iter().enumerate() {
            for b in 0..blocks {
                let stride = if g > 0 && b == 0 { 2 } else { 1 };
                network = network.then(format!("group.{g}.block.{b}"), Residual { features, stride, norm: self.norm });
            }
        }
        network.then("head", PooledClasses { classes: self.classes })
    }
}

/// `y = relu(F(x) + S(x))` with `F(x) = norm(conv3×3(relu(norm(conv3×3(x)))))`, and S the identity, or
/// `norm(conv1×1(x))` where extents change (the paper's option B).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residual {
    /// Channels of the result.
    pub features: usize,
    /// Stride of the first convolution and of S.
    pub stride: usize,
    /// The norm.
    pub norm: Norm,
}

#[derive(Debug)]
struct ResidualModule {
    first: ConvNorm,
    second: ConvNorm,
    shortcut: Option<ConvNorm>,
}

impl Layer for Residual {
    fn output(&self, input: Shape) -> Shape {
        Shape::new(&[input[0].div_ceil(self.stride), input[1].div_ceil(self.stride), self.features])
    }

    fn declare(&self, params: &mut Declarations, name: &str, input: Shape) -> Result<Box<dyn Module>> {
        let Self { features, stride, norm } = *self;
        let mut part = |part: &str, channels, kernel| {
            ConvNorm::new(params, &format!("{name}.{part}"), [channels, features], kernel, norm)
        };
        Ok(Box::new(ResidualModule {
            first: part("first", input[2], [3, stride])?,
            second: part("second", features, [3, 1])?,
            shortcut: if self.output(input) == input { None } else { Some(part("shortcut", input[2], [1, stride])?) },
        }))
    }
}

impl Module for ResidualModule {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let inner = self.first.forward(tape, x)?.relu()?;
        let y = self.second.forward(tape, &inner)?;
        let shortcut = if let Some(shortcut) = &self.shortcut { shortcut.forward(tape, x)? } else { x.clone() };
        y.add(&shortcut)?.relu()
    }
}
