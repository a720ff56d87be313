//! A network small enough to differentiate by hand, and its serial run.

mod ranks;

pub use ranks::{Fault, pipeline, run_alone};

/// Divisible by every number of stages under test, so that all of them cut the same network.
const LAYERS: usize = 12;
const WIDTH: usize = 3;

/// y = x + tanh(W x), one layer after the other; the loss is ½‖y - target‖².
#[derive(Clone)]
struct Layer {
    weight: [[f32; WIDTH]; WIDTH],
    grad: [[f32; WIDTH]; WIDTH],
}

/// Some number in (-1, 1) that differs for each argument: a stand-in for random initial values.
fn some(seed: usize) -> f32 {
    ((seed * 7919 + 13) % 199) as f32 / 100.0 - 0.99
}

fn layer(index: usize) -> Layer {
    let at = |row, col| some(1000 + (index * WIDTH + row) * WIDTH + col) / 2.0;
    let weight = std::array::from_fn(|row| std::array::from_fn(|col| at(row, col)));
    Layer { weight, grad: Default::default() }
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

    /// Adds to the gradient of the weight, returns that of x.
    fn backward(&mut self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let h = self.inner(x);
        let mut dx = dy.to_vec();
        for row in 0..WIDTH {
            let d = dy[row] * (1.0 - h[row] * h[row]);
            for col in 0..WIDTH {
                self.grad[row][col] += d * x[col];
                dx[col] += d * self.weight[row][col];
            }
        }
        dx
    }
}

/// What a run leaves: the loss of each micro-batch and the gradients of all layers in order.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<f32>,
    pub grads: Vec<f32>,
}

fn grads<'a>(layers: impl Iterator<Item = &'a Layer>) -> Vec<f32> {
    layers.flat_map(|layer| layer.grad.as_flattened().to_vec()).collect()
}

/// The oracle: the whole network, one micro-batch after the other, with no stage and no schedule.
pub fn serial(micros: usize) -> Outcome {
    let mut layers: Vec<Layer> = (0..LAYERS).map(layer).collect();
    let mut losses = Vec::new();
    for micro in 0..micros {
        let mut xs = vec![data(micro)];
        for layer in &layers {
            xs.push(layer.forward(xs.last().unwrap()));
        }
        let y = xs.pop().unwrap();
        losses.push(loss(&y, micro));
        let mut d: Vec<f32> = y.iter().zip(target(micro)).map(|(y, t)| y - t).collect();
        for (layer, x) in layers.iter_mut().zip(&xs).rev() {
            d = layer.backward(x, &d);
        }
    }
    let grads = grads(layers.iter());
    assert!(grads.iter().any(|g| g.abs() > 0.1), "an oracle of zeros would prove nothing");
    Outcome { losses, grads }
}
