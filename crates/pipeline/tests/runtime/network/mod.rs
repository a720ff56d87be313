//! A network small enough to differentiate by hand, and its serial run.

pub mod ranks;

pub use ranks::{Fault, pipeline, run_alone};

/// Divisible by every number of stages under test, so that all of them cut the same network.
const LAYERS: usize = 12;
const WIDTH: usize = 3;

/// y = x + tanh(W x), one layer after the other; the loss is ½‖y - target‖².
#[derive(Clone)]
struct Layer {
    weight: [[f32; WIDTH]; WIDTH],
}

type Grad = [[f32; WIDTH]; WIDTH];

/// Some number in (-1, 1) that differs for each argument: a stand-in for random initial values.
fn some(seed: usize) -> f32 {
    ((seed * 7919 + 13) % 199) as f32 / 100.0 - 0.99
}

fn layer(index: usize) -> Layer {
    let at = |row, col| some(1000 + (index * WIDTH + row) * WIDTH + col) / 2.0;
    let weight = std::array::from_fn(|row| std::array::from_fn(|col| at(row, col)));
    Layer { weight }
}

fn data(micro: usize) -> Vec<f32> {
    (0..WIDTH).map(|i| some(micro * WIDTH + i)).collect()
}

fn target(micro: usize) -> Vec<f32> {
    (0..WIDTH).map(|i| some(500 + micro * WIDTH + i)).collect()
}

fn loss(y: &[f32], micro: usize) -> f32 {
    y.iter().zip(target(micro)).map(|(y, t)| (y - t) * (y - t) / 2.0).sum()
}

impl Layer {
    fn inner(&self, x: &[f32]) -> Vec<f32> {
        self.weight.iter().map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>().tanh()).collect()
    }

    fn forward(&self, x: &[f32]) -> Vec<f32> {
        x.iter().zip(self.inner(x)).map(|(x, h)| x + h).collect()
    }

    /// The gradient of W x.
    fn backward_inner(&self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        self.inner(x).iter().zip(dy).map(|(h, dy)| dy * (1.0 - h * h)).collect()
    }

    /// The gradient of x.
    fn backward_input(&self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let d = self.backward_inner(x, dy);
        let mut dx = dy.to_vec();
        for (d, row) in d.iter().zip(&self.weight) {
            dx.iter_mut().zip(row).for_each(|(dx, w)| *dx += d * w);
        }
        dx
    }

    /// Adds to the gradient of the weight.
    fn backward_weight(&self, x: &[f32], dy: &[f32], grad: &mut Grad) {
        for (d, row) in self.backward_inner(x, dy).iter().zip(grad) {
            row.iter_mut().zip(x).for_each(|(grad, x)| *grad += d * x);
        }
    }

    fn update(&mut self, grad: &Grad) {
        let pairs = self.weight.as_flattened_mut().iter_mut().zip(grad.as_flattened());
        pairs.for_each(|(weight, grad)| *weight -= RATE * grad);
    }
}

/// Learning rate of asynchronous schedules.
const RATE: f32 = 0.1;

/// The results of a run: the loss of each micro-batch, the gradients of all layers in order since the last update, and
/// their weights.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<f32>,
    pub grads: Vec<f32>,
    pub weights: Vec<f32>,
}

/// One micro-batch through the network, layer i with the weights of `versions(i)`: its loss, and its share of the
/// gradients.
fn pass<'a>(micro: usize, versions: impl Fn(usize) -> &'a Layer, grads: &mut [Grad]) -> f32 {
    let mut xs = vec![data(micro)];
    for index in 0..LAYERS {
        xs.push(versions(index).forward(xs.last().unwrap()));
    }
    let y = xs.pop().unwrap();
    let mut d: Vec<f32> = y.iter().zip(target(micro)).map(|(y, t)| y - t).collect();
    for (index, x) in xs.iter().enumerate().rev() {
        versions(index).backward_weight(x, &d, &mut grads[index]);
        d = versions(index).backward_input(x, &d);
    }
    loss(&y, micro)
}

/// The oracle: the whole network, one micro-batch after the other, with no stage and no schedule.
pub fn serial(micros: usize) -> Outcome {
    let layers: Vec<Layer> = (0..LAYERS).map(layer).collect();
    let mut grads = [Grad::default(); LAYERS];
    let losses = (0..micros).map(|micro| pass(micro, |index| &layers[index], &mut grads)).collect();
    let grads = grads.as_flattened().as_flattened().to_vec();
    assert!(grads.iter().any(|g| g.abs() > 0.1), "an oracle of zeros would prove nothing");
    Outcome { losses, grads, weights: weights(&layers) }
}

/// The oracle of asynchronous training, by the published equations: the k-th update adds up the gradients of
/// `per_update` micro-batches, each at the weights after `version(stage, micro)` updates, for `stages` equal stages.
pub fn serial_updates(
    micros: usize,
    per_update: usize,
    stages: usize,
    version: impl Fn(usize, usize) -> usize,
) -> Outcome {
    let mut versions: Vec<Vec<Layer>> = vec![(0..LAYERS).map(layer).collect()];
    let mut losses = Vec::new();
    for first in (0..micros).step_by(per_update) {
        let mut grads = [Grad::default(); LAYERS];
        for micro in first..first + per_update {
            let of_layer = |index| &versions[version(index / (LAYERS / stages), micro)][index];
            losses.push(pass(micro, of_layer, &mut grads));
        }
        let mut next = versions.last().unwrap().clone();
        next.iter_mut().zip(&grads).for_each(|(layer, grad)| layer.update(grad));
        versions.push(next);
    }
    Outcome { losses, grads: vec![0.0; LAYERS * WIDTH * WIDTH], weights: weights(versions.last().unwrap()) }
}

fn weights(layers: &[Layer]) -> Vec<f32> {
    layers.iter().flat_map(|layer| layer.weight.as_flattened().to_vec()).collect()
}
