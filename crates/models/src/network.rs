//! Networks that are an ordered list of layers, to be cut anywhere into pipeline stages.
//!
//! A [`Network`] is data: layers that know their input and output extents, but have no parameters. A stage declares the
//! parameters of its own layers ([`Network::declare`]) and runs them one after another. Stages send the output of the
//! layer before the cut, whatever its shape ([`Network::boundary`]).

use meshwork_core::{DType, Mesh};
use meshwork_nn::{Activation, Batch, Field, Metric, Model, Per, Stage, StageSpec, sample_types};
use meshwork_tensor::{Declarations, Error, Result, Shape, Tape, Var};
use std::fmt::Debug;
use std::ops::Range;

/// The field of inputs in f32; each sample has the network's input extents.
pub const IMAGES: &str = "images";

/// The field of classes, one number for each sample; negative ones are masked.
pub const LABELS: &str = "labels";

/// The metric: the share of samples whose class has the largest logit.
pub const ACCURACY: &str = "accuracy";

/// A layer as data. Extents are of one sample: dim 0 of every tensor, the samples, is left out.
pub trait Layer: Debug + Send + Sync {
    /// Extents of its result for an input with the extents `input`.
    fn output(&self, input: Shape) -> Shape;

    /// Declares its parameters, whose names begin with `name`, for an input with the extents `input`.
    fn declare(&self, params: &mut Declarations, name: &str, input: Shape) -> Result<Box<dyn Module>>;
}

/// A layer with its parameters.
pub trait Module: Debug {
    /// `x [samples, input..] → [samples, output..]`.
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var>;
}

/// An ordered list of layers, whose last one gives a logit for each class.
///
/// ```
/// use meshwork_models::layers::{Classes, Conv, MaxPool, Norm};
/// use meshwork_models::network::Network;
/// use meshwork_tensor::Declarations;
///
/// let network = Network::new([8, 8, 1])
///     .then("conv", Conv { features: 4, norm: Norm::Group(2) })
///     .then("pool", MaxPool)
///     .then("head", Classes { classes: 10 });
/// assert_eq!(network.boundary(2)[..], [4, 4, 4]); // what comes to layer 2, the head
///
/// let mut params = Declarations::new();
/// let last = network.declare(&mut params, 1..3)?; // pool and head
/// assert_eq!((last.len(), &*params.specs()[0].name, &params.specs()[0].dims[..]), (2, "head.weight", &[10, 4, 4, 4][..]));
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct Network {
    input: Shape,
    layers: Vec<(String, Box<dyn Layer>)>,
}

impl Network {
    /// An empty network whose input samples have the extents `input`.
    pub fn new(input: impl Into<Shape>) -> Self {
        Self { input: input.into(), layers: Vec::new() }
    }

    /// Appends a layer. Its name must be unique, because the names of its parameters begin with it.
    pub fn then(mut self, name: impl Into<String>, layer: impl Layer + 'static) -> Self {
        self.layers.push((name.into(), Box::new(layer)));
        self
    }

    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Extents of a sample at the input of layer `at`; with `at` = [`layers`](Self::layers), of the result.
    pub fn boundary(&self, at: usize) -> Shape {
        self.layers[..at].iter().fold(self.input, |shape, (_, layer)| layer.output(shape))
    }

    /// Declares the parameters of some layers, and returns the layers in order.
    pub fn declare(&self, params: &mut Declarations, layers: Range<usize>) -> Result<Vec<Box<dyn Module>>> {
        layers
            .map(|at| {
                let (name, layer) = &self.layers[at];
                layer.declare(params, name, self.boundary(at))
            })
            .collect()
    }
}

/// Some of the layers; the last stage also has the loss.
#[derive(Debug)]
struct NetworkStage(Vec<Box<dyn Module>>);

impl Model for Network {
    fn num_layers(&self) -> usize {
        self.layers()
    }

    fn fields(&self) -> Vec<Field> {
        let classes = self.boundary(self.layers()).first().map_or(i32::MAX, |&classes| classes as i32);
        vec![Field::new(IMAGES, DType::F32, self.input), Field::ids(LABELS, [], i32::MIN..classes)]
    }

    fn stage(&self, params: &mut Declarations, _mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        Ok(Box::new(NetworkStage(self.declare(params, part.layers.clone())?)))
    }

    fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation> {
        let shape = Shape::new(&[&[batch.samples()], &self.boundary(at)[..]].concat());
        Ok(Activation { dtype: DType::F32, shape, types: sample_types(mesh) })
    }

    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        Ok(batch.part(samples)?.values::<i32>(LABELS)?.iter().filter(|&&label| label >= 0).count() as u64)
    }

    fn metrics(&self) -> Vec<Metric> {
        vec![Metric { name: ACCURACY, per: Per::Term }]
    }
}

impl Stage for NetworkStage {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let input = input.map_or_else(|| batch.var(tape, IMAGES), |input| Ok(input.clone()))?;
        self.0.iter().try_fold(input, |x, module| module.forward(tape, &x))
    }

    fn loss(&self, tape: &Tape, batch: &Batch, logits: &Var) -> Result<Var> {
        if logits.shape().len() != 2 {
            return Err(Error::Shape {
                op: "network",
                problem: "the last layer gives a logit for each class, [samples, classes]".to_owned(),
                shapes: vec![logits.shape().to_vec()],
            });
        }
        let labels = batch.var(tape, LABELS)?;
        tape.report(ACCURACY, &logits.correct(&labels)?)?;
        logits.cross_entropy(&labels)
    }
}
