//! A model on one rank that loses at its cuts what a compressed pipeline loses, as its equations have it: the oracle.

use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, Message, Scheme, Shape as Matrix};
use meshwork_core::Mesh;
use meshwork_core::rules;
use meshwork_engine::Compress;
use meshwork_nn::model::Metric;
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec};
use meshwork_tensor::{Declarations, Result, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The indices of activations, by the first sample of each micro-batch.
type Indices = Arc<Mutex<BTreeMap<u64, Vec<u32>>>>;

/// Steps so far, the sender's state and the receiver's estimate.
type Both = (u64, Sender, Vec<f32>);

/// What crosses a cut in one direction, value by value.
#[derive(Debug)]
struct Crossing {
    name: String,
    scheme: Scheme,
    feedback: Feedback,
    seed: u64,
    /// Where gradients have the indices of activations: those, and whether this one makes them.
    shared: Option<(Indices, bool)>,
    /// AQ-SGD: m of micro-batches, by the number of their first sample, of samples that come again every other step.
    again: Option<Mutex<BTreeMap<u64, Vec<f32>>>>,
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
        let through = |scheme: &Scheme, target: &[f32], shape, received: &mut [f32]| {
            let message = Message::compress(scheme, target, shape, draws, &mut []).unwrap();
            message.restore(scheme, shape, Fold::Replace, received).unwrap();
        };
        if let Some(again) = &self.again {
            let mut again = again.lock().unwrap();
            match again.get_mut(&(*step % 2 * 1000 + first_sample)) {
                None => {
                    received.copy_from_slice(&values);
                    again.insert(*step % 2 * 1000 + first_sample, values);
                }
                Some(m) => {
                    let change: Vec<f32> = values.iter().zip(&*m).map(|(a, m)| a - m).collect();
                    through(&self.scheme, &change, matrix, &mut received);
                    m.iter_mut().zip(&received).for_each(|(m, c)| *m += c);
                    received.copy_from_slice(m);
                }
            }
            *step += 1;
            return Tensor::from_slice(x.device(), &received, shape);
        }
        match (&self.shared, self.scheme) {
            (Some((indices, false)), Scheme::Sparse(sparse)) => {
                let indices = indices.lock().unwrap().remove(&first_sample).unwrap();
                let chosen: Vec<f32> = indices.iter().map(|&index| target[index as usize]).collect();
                let (mut restored, shape) = (vec![0.0; chosen.len()], Matrix::vector(chosen.len()).unwrap());
                through(&Scheme::Values(sparse.values), &chosen, shape, &mut restored);
                indices.iter().zip(restored).for_each(|(&index, x)| received[index as usize] = x);
            }
            (shared, scheme) => {
                through(&scheme, &target, matrix, &mut received);
                if let (Some((indices, _)), Scheme::Sparse(sparse)) = (shared, scheme) {
                    indices.lock().unwrap().insert(first_sample, sparse.indices(&target, matrix, draws));
                }
            }
        }
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
    /// Wraps `inner`, cut into stages of `layers` layers, with compression at the cuts.
    pub fn model(inner: Arc<dyn Model>, layers: &[usize], compress: Compress, seed: u64) -> Arc<dyn Model> {
        let cross = |name: String, scheme, shared| {
            let (feedback, states) = (compress.feedback, Mutex::default());
            let again = compress.aqsgd.filter(|_| name.ends_with("activation")).map(|_| Mutex::default());
            Arc::new(Crossing { name, scheme, feedback, seed, shared, again, states })
        };
        let crossings = (1..layers.len()).map(|next| {
            let behind: usize = layers[..next].iter().sum();
            let [forward, backward] = ["activation", "gradient"].map(|value| format!("cut.{behind}.{value}"));
            let indices = compress.share_indices.then(Indices::default);
            let shared = |makes: bool| indices.clone().map(|indices| (indices, makes));
            [
                cross(forward, compress.activations, shared(true)),
                cross(backward, compress.activation_gradients, shared(false)),
            ]
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
