//! A model on one rank that loses at its cuts what a compressed pipeline loses, as its equations have it: the oracle.

use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, Message, Scheme, Shape as Matrix};
use meshwork_core::Mesh;
use meshwork_core::rules;
use meshwork_nn::model::Metric;
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec};
use meshwork_tensor::{Declarations, Result, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Steps so far, the sender's state and the receiver's estimate.
type Both = (u64, Sender, Vec<f32>);

/// What crosses a cut in one direction, value by value.
#[derive(Debug)]
struct Crossing {
    name: String,
    scheme: Scheme,
    feedback: Feedback,
    seed: u64,
    /// Of each micro-batch, by its first sample.
    states: Mutex<BTreeMap<u64, Both>>,
}

impl Crossing {
    /// What the other side receives of a value.
    fn cross(&self, first_sample: u64, x: &Tensor) -> Result<Tensor> {
        if !x.device().has_values() {
            return Ok(x.clone());
        }
        let (values, shape) = (x.to_vec::<f32>()?, x.shape());
        let matrix = Matrix::matrix(shape[0], values.len() / shape[0]).unwrap();
        let mut states = self.states.lock().unwrap();
        let estimate = if self.feedback.keeps_estimate() { vec![0.0; values.len()] } else { Vec::new() };
        let new = || (0, self.feedback.sender(values.len()), estimate);
        let (step, sender, estimate) = states.entry(first_sample).or_insert_with(new);
        let (mut target, mut received) = (vec![0.0; values.len()], vec![0.0; values.len()]);
        self.feedback.outgoing(&values, *step == 0, sender, &mut target);
        let draws = Draws::new(self.seed, &self.name, *step).skip(first_sample as usize * matrix.cols());
        let message = Message::compress(&self.scheme, &target, matrix, draws, &mut []).unwrap();
        message.restore(&self.scheme, matrix, Fold::Replace, &mut received).unwrap();
        self.feedback.sent(&target, &received, sender);
        self.feedback.received(estimate, &mut received);
        *step += 1;
        Tensor::from_slice(x.device(), &received, shape)
    }
}

/// A model that is cut in its one stage.
#[derive(Debug)]
pub struct Lossy {
    inner: Arc<dyn Model>,
    parts: Vec<StageSpec>,
    /// Forward and backward of each cut.
    crossings: Vec<[Arc<Crossing>; 2]>,
}

impl Lossy {
    /// Wraps `inner`, cut into stages of `layers` layers. Each cut applies the first scheme to activations and the second to their gradients.
    pub fn model(
        inner: Arc<dyn Model>,
        layers: &[usize],
        schemes: [Scheme; 2],
        feedback: Feedback,
        seed: u64,
    ) -> Arc<dyn Model> {
        let cross =
            |name: String, scheme| Arc::new(Crossing { name, scheme, feedback, seed, states: Mutex::default() });
        let crossings = (1..layers.len()).map(|next| {
            let names = [format!("activation of stage {}", next - 1), format!("activation gradient of stage {next}")];
            let [forward, backward] = names;
            [cross(forward, schemes[0]), cross(backward, schemes[1])]
        });
        Arc::new(Lossy { inner, parts: StageSpec::cut(layers), crossings: crossings.collect() })
    }
}

impl Model for Lossy {
    fn num_layers(&self) -> usize {
        self.inner.num_layers()
    }

    fn fields(&self) -> Vec<Field> {
        self.inner.fields()
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, _: &StageSpec) -> Result<Box<dyn Stage>> {
        let stages = self.parts.iter().map(|part| self.inner.stage(params, mesh, part)).collect::<Result<_>>()?;
        Ok(Box::new(Stages(stages, self.crossings.clone())))
    }

    fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation> {
        self.inner.activation(mesh, at, batch)
    }

    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        self.inner.loss_terms(batch, samples)
    }

    fn metrics(&self) -> Vec<Metric> {
        self.inner.metrics()
    }
}

#[derive(Debug)]
struct Stages(Vec<Box<dyn Stage>>, Vec<[Arc<Crossing>; 2]>);

impl Stage for Stages {
    fn forward(&self, tape: &Tape, batch: &Batch, _: Option<&Var>) -> Result<Var> {
        let mut x = self.0[0].forward(tape, batch, None)?;
        for (stage, crossing) in self.0[1..].iter().zip(&self.1) {
            let ([forward, backward], first) = (crossing.clone(), tape.first_sample());
            x = tape.custom(
                "cross",
                &["x"],
                &[&x],
                |op, operands| rules::pointwise(op, operands[0]),
                move |inputs| forward.cross(first, inputs[0]),
                move |_, _, grad| Ok(vec![backward.cross(first, grad)?]),
            )?;
            x = stage.forward(tape, batch, Some(&x))?;
        }
        Ok(x)
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        self.0[self.0.len() - 1].loss(tape, batch, output)
    }
}
