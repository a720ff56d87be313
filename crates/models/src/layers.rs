//! The layers of [`resnet`](crate::resnet) and [`vgg`](crate::vgg).

use crate::network::{Layer, Module};
use meshwork_nn::{BatchNorm2d, Conv2d, GroupNorm, Linear};
use meshwork_tensor::param::{Matrices, ParamGroup};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Shape, Tape, Var};

/// How a convolution's result is normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Batch norm: statistics of each micro-batch.
    Batch,
    /// Group norm with this number of groups, which must divide the channels. Its results do not depend on the
    /// micro-batch.
    Group(usize),
}

/// `norm(conv(x))`, without a bias: the norm has one.
#[derive(Clone, Copy, Debug)]
pub struct ConvNorm {
    conv: Conv2d,
    norm: NormLayer,
}

#[derive(Clone, Copy, Debug)]
enum NormLayer {
    Batch(BatchNorm2d),
    Group(GroupNorm),
}

impl ConvNorm {
    /// Declares `{name}.conv` and `{name}.norm`.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        [channels, features]: [usize; 2],
        [kernel, stride]: [usize; 2],
        norm: Norm,
    ) -> Result<Self> {
        let init = Init::kaiming_normal(kernel * kernel * channels);
        let conv = Conv2d::new(params, &format!("{name}.conv"), [channels, features], [kernel, stride], false, init)?;
        let name = format!("{name}.norm");
        let norm = match norm {
            Norm::Batch => NormLayer::Batch(BatchNorm2d::new(params, &name, features, true)?),
            Norm::Group(groups) => NormLayer::Group(GroupNorm::new(params, &name, features, groups, true)?),
        };
        Ok(Self { conv, norm })
    }

    /// `x [n, h, w, channels] → [n, h', w', features]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let y = self.conv.forward(tape, x)?;
        match &self.norm {
            NormLayer::Batch(norm) => norm.forward(tape, &y),
            NormLayer::Group(norm) => norm.forward(tape, &y),
        }
    }
}

/// `relu(norm(conv3×3(x)))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Channels of the result.
    pub features: usize,
    /// The norm.
    pub norm: Norm,
}

#[derive(Debug)]
struct ConvModule(ConvNorm);

impl Layer for Conv {
    fn output(&self, input: Shape) -> Shape {
        input.with(2, self.features)
    }

    fn declare(&self, params: &mut Declarations, name: &str, input: Shape) -> Result<Box<dyn Module>> {
        Ok(Box::new(ConvModule(ConvNorm::new(params, name, [input[2], self.features], [3, 1], self.norm)?)))
    }
}

impl Module for ConvModule {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        self.0.forward(tape, x)?.relu()
    }
}

/// The maximum of each 2×2 pixels, which halves height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPool;

impl Layer for MaxPool {
    fn output(&self, input: Shape) -> Shape {
        Shape::new(&[input[0] / 2, input[1] / 2, input[2]])
    }

    fn declare(&self, _params: &mut Declarations, _name: &str, _input: Shape) -> Result<Box<dyn Module>> {
        Ok(Box::new(*self))
    }
}

impl Module for MaxPool {
    fn forward(&self, _tape: &Tape, x: &Var) -> Result<Var> {
        x.max_pool([2, 2], 2, 0)
    }
}

/// `relu(x · Wᵀ + b)` over all of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Width of the result.
    pub features: usize,
}

/// `x · Wᵀ + b` over all of a sample: a logit for each class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    /// Classes to tell apart.
    pub classes: usize,
}

/// A linear layer over all dims of a sample, with or without a ReLU.
#[derive(Debug)]
struct Dense {
    weight: ParamId,
    bias: ParamId,
    dims: usize,
    rectified: bool,
}

impl Dense {
    fn declare(
        params: &mut Declarations,
        name: &str,
        input: Shape,
        features: usize,
        rectified: bool,
    ) -> Result<Box<dyn Module>> {
        let gain: f32 = if rectified { 2.0 } else { 1.0 };
        let init = Init::Normal { std: (gain / input.count() as f32).sqrt() };
        let whole = Placement::replicated;
        let dims = [&[features], &input[..]].concat();
        // The last layer is a head.
        let group = if rectified {
            ParamGroup::hidden(Matrices::new(0, input.len()))
        } else {
            ParamGroup::for_role(Role::Weight)
        };
        let weight = params.declare_in(format!("{name}.weight"), &dims, whole(), Role::Weight, init, group)?;
        let bias = params.declare(format!("{name}.bias"), &[features], whole(), Role::Bias, Init::Zeros)?;
        Ok(Box::new(Self { weight, bias, dims: input.len(), rectified }))
    }
}

impl Module for Dense {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let y = x.linear_bias(&tape.param(self.weight)?, &tape.param(self.bias)?, self.dims)?;
        if self.rectified { y.relu() } else { Ok(y) }
    }
}

impl Layer for Hidden {
    fn output(&self, _input: Shape) -> Shape {
        Shape::new(&[self.features])
    }

    fn declare(&self, params: &mut Declarations, name: &str, input: Shape) -> Result<Box<dyn Module>> {
        Dense::declare(params, name, input, self.features, true)
    }
}

impl Layer for Classes {
    fn output(&self, _input: Shape) -> Shape {
        Shape::new(&[self.classes])
    }

    fn declare(&self, params: &mut Declarations, name: &str, input: Shape) -> Result<Box<dyn Module>> {
        Dense::declare(params, name, input, self.classes, false)
    }
}

/// `mean over pixels(x) · Wᵀ + b`: a logit for each class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PooledClasses {
    /// Classes to tell apart.
    pub classes: usize,
}

#[derive(Debug)]
struct PooledModule(Linear);

impl Layer for PooledClasses {
    fn output(&self, _input: Shape) -> Shape {
        Shape::new(&[self.classes])
    }

    fn declare(&self, params: &mut Declarations, name: &str, input: Shape) -> Result<Box<dyn Module>> {
        let std = (1.0 / input[2] as f32).sqrt();
        Ok(Box::new(PooledModule(Linear::head(params, name, input[2], self.classes, true, std)?)))
    }
}

impl Module for PooledModule {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        self.0.forward(tape, &x.global_average_pool()?)
    }
}
