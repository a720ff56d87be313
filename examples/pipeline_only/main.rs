//! The pipeline by itself, over stages of your own: a network of two layers on `Vec<f32>`, a thread per rank, channels between
//! them, and no other part of meshwork. `cargo run --release --example pipeline_only`

use meshwork::pipeline::{StageRunner, Tag, Transport, lower, run, zb_h1};
use std::sync::mpsc::{Receiver, RecvError, SendError, Sender, channel};
use std::{collections::HashMap, convert::Infallible, mem::take, slice, thread};

/// A layer, output = tanh(weights · input), as a stage. The last one ends in the loss, half the squared error.
struct Layer {
    weights: Vec<f32>, // [outputs, inputs]
    gradient: Vec<f32>,
    inputs: usize,
    is_last: bool,
    in_flight: HashMap<usize, [Vec<f32>; 2]>, // per micro-batch: input; output, then the gradient before tanh
    loss: f32,
}

/// Two numbers and a constant, and what is to be learnt of them: their product.
fn sample(micro: usize) -> (Vec<f32>, f32) {
    let (a, b) = ((micro as f32 * 0.7).sin(), (micro as f32 * 1.3).cos());
    (vec![a, b, 1.0], a * b)
}

impl StageRunner for Layer {
    type Message = Vec<f32>;
    type Error = Infallible;
    fn forward(&mut self, micro: usize, input: Option<Vec<f32>>) -> Result<Option<Vec<f32>>, Infallible> {
        let input = input.unwrap_or_else(|| sample(micro).0);
        let dot = |row: &[f32]| row.iter().zip(&input).map(|(w, x)| w * x).sum::<f32>().tanh();
        let output: Vec<f32> = self.weights.chunks(self.inputs).map(dot).collect();
        self.loss += (output[0] - sample(micro).1).powi(2) / 2.0;
        self.in_flight.insert(micro, [input, output.clone()]);
        Ok((!self.is_last).then_some(output))
    }
    fn backward_input(&mut self, micro: usize, grad: Option<Vec<f32>>) -> Result<Option<Vec<f32>>, Infallible> {
        let [_, output] = self.in_flight.get_mut(&micro).expect("its forward came before");
        let grad = grad.unwrap_or_else(|| vec![output[0] - sample(micro).1]);
        output.iter_mut().zip(grad).for_each(|(y, grad)| *y = grad * (1.0 - *y * *y));
        let column = |at| self.weights[at..].iter().step_by(self.inputs).zip(&*output).map(|(w, d)| w * d).sum();
        Ok(self.is_last.then(|| (0..self.inputs).map(column).collect()))
    }
    fn backward_weights(&mut self, micro: usize) -> Result<(), Infallible> {
        let [input, grad] = self.in_flight.remove(&micro).expect("the gradient of its input came before");
        let products = grad.iter().flat_map(|d| input.iter().map(move |x| d * x));
        self.gradient.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
        Ok(())
    }
    fn update(&mut self, _micro: usize) -> Result<(), Infallible> {
        self.weights.iter_mut().zip(&mut self.gradient).for_each(|(w, sum)| *w -= 0.1 * take(sum));
        Ok(())
    }
}

/// The way to the other rank, and back. Messages come in the order in which they are sent, so that tags are not needed.
struct Channels(Sender<Vec<f32>>, Receiver<Vec<f32>>);

impl Transport for Channels {
    type Message = Vec<f32>;
    type Error = RecvError;
    fn send(&mut self, _to: usize, _: Tag, message: Vec<f32>) -> Result<(), RecvError> {
        self.0.send(message).map_err(|SendError(_)| RecvError)
    }
    fn recv(&mut self, _from: usize, _: Tag) -> Result<Vec<f32>, RecvError> {
        self.1.recv()
    }
    fn finish(&mut self) -> Result<(), RecvError> {
        Ok(())
    }
}

fn main() -> Result<(), Infallible> {
    const MICROS: usize = 8;
    let layer = |outputs, inputs, is_last| {
        let weights: Vec<f32> = (0..outputs * inputs).map(|at| (at * 37 % 11) as f32 / 10.0 - 0.5).collect();
        Layer { gradient: vec![0.0; weights.len()], weights, inputs, is_last, in_flight: HashMap::new(), loss: 0.0 }
    };
    let [mut pipeline, mut serial] = [(); 2].map(|()| [layer(8, 3, false), layer(1, 8, true)]);
    let ((to_last, from_first), (to_first, from_last)) = (channel(), channel());
    let mut channels = [Channels(to_last, from_last), Channels(to_first, from_first)];
    let schedule = &lower(&zb_h1(2, MICROS)).expect("a generator writes valid schedules");
    for step in 1..=10 {
        thread::scope(|scope| {
            for (rank, (layer, channels)) in pipeline.iter_mut().zip(&mut channels).enumerate() {
                scope.spawn(move || run(schedule, rank, slice::from_mut(layer), channels, &mut |_| {}).expect("sound"));
            }
        });
        for micro in 0..MICROS {
            let hidden = serial[0].forward(micro, None)?;
            serial[1].forward(micro, hidden)?;
            let grad = serial[1].backward(micro, None)?;
            serial[0].backward(micro, grad)?;
        }
        pipeline.iter_mut().chain(&mut serial).try_for_each(|layer| layer.update(MICROS))?;
        println!("step {step:>2}: loss {:.6}, serially {:.6}", take(&mut pipeline[1].loss), take(&mut serial[1].loss));
    }
    assert!(pipeline.iter().zip(&serial).all(|(a, b)| a.weights == b.weights), "the weights differ");
    println!("The weights are the same, bit for bit.");
    Ok(())
}
