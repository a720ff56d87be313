//! The pipeline by itself, over stages of your own: a network of two layers on `Vec<f32>`, a thread per rank, channels between
//! them, and no other part of meshwork. `cargo run --release --example pipeline_only`

use meshwork::pipeline::{Stage, Tag, Transport, lower, render, run, zb_h1};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::mpsc::{Receiver, RecvError, SendError, Sender, channel};
use std::{error::Error, mem::take, slice, thread};

const MICROS: usize = 8;
const STEPS: usize = 400;
type Sent = Result<Option<Vec<f32>>, Infallible>;

/// A layer, output = tanh(weights · input), as a stage. The last one ends in the loss, half the squared error.
struct Layer {
    weights: Vec<f32>, // [outputs, inputs]
    gradient: Vec<f32>,
    inputs: usize,
    is_last: bool,
    in_flight: HashMap<usize, [Vec<f32>; 2]>, // per micro-batch: input; output, then the gradient before tanh
    losses: Vec<f32>,
}

impl Layer {
    fn new(outputs: usize, inputs: usize, is_last: bool) -> Self {
        let weights: Vec<f32> = (0..outputs * inputs).map(|at| (at * 37 % 11) as f32 / 10.0 - 0.5).collect();
        Self { gradient: vec![0.0; weights.len()], weights, inputs, is_last, in_flight: HashMap::new(), losses: vec![] }
    }
}

/// Two numbers and a constant, and what is to be learnt of them: their product.
fn sample(micro: usize) -> (Vec<f32>, f32) {
    let (a, b) = ((micro as f32 * 0.7).sin(), (micro as f32 * 1.3).cos());
    (vec![a, b, 1.0], a * b)
}

impl Stage for Layer {
    type Message = Vec<f32>;
    type Error = Infallible;
    fn forward(&mut self, micro: usize, input: Option<Vec<f32>>) -> Sent {
        let input = input.unwrap_or_else(|| sample(micro).0);
        let dot = |row: &[f32]| row.iter().zip(&input).map(|(w, x)| w * x).sum::<f32>().tanh();
        let output: Vec<f32> = self.weights.chunks(self.inputs).map(dot).collect();
        self.losses.push((output[0] - sample(micro).1).powi(2) / 2.0);
        self.in_flight.insert(micro, [input, output.clone()]);
        Ok((!self.is_last).then_some(output))
    }
    fn backward_input(&mut self, micro: usize, grad: Option<Vec<f32>>) -> Sent {
        let [_, output] = self.in_flight.get_mut(&micro).expect("its forward came before");
        let grad = grad.unwrap_or_else(|| vec![output[0] - sample(micro).1]);
        output.iter_mut().zip(grad).for_each(|(y, grad)| *y = grad * (1.0 - *y * *y));
        let column = |at| self.weights[at..].iter().step_by(self.inputs).zip(&*output).map(|(w, d)| w * d).sum();
        Ok(self.is_last.then(|| (0..self.inputs).map(column).collect()))
    }
    fn backward_weights(&mut self, micro: usize) -> Result<(), Infallible> {
        let [input, grad] = self.in_flight.remove(&micro).expect("the gradient of its input came before");
        let products = grad.iter().flat_map(|d| input.iter().map(move |x| d * x));
        Ok(self.gradient.iter_mut().zip(products).for_each(|(sum, product)| *sum += product))
    }
    fn update(&mut self, _micro: usize) -> Result<(), Infallible> {
        Ok(self.weights.iter_mut().zip(&mut self.gradient).for_each(|(w, sum)| *w -= 0.1 * take(sum)))
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

fn main() -> Result<(), Box<dyn Error>> {
    let network = || [Layer::new(8, 3, false), Layer::new(1, 8, true)];
    let schedule = zb_h1(2, MICROS);
    println!("{}", render(&schedule)?);
    let lowered = lower(&schedule)?;
    let train = |rank, layer: &mut Layer, channels: &mut Channels| {
        for _ in 0..STEPS {
            run(&lowered, rank, slice::from_mut(layer), channels, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
            let Ok(()) = layer.update(MICROS);
        }
    };
    let ((to_last, from_first), (to_first, from_last)) = (channel(), channel());
    let mut pipeline = network();
    let [first, last] = &mut pipeline;
    thread::scope(|scope| {
        scope.spawn(|| train(0, first, &mut Channels(to_last, from_last)));
        train(1, last, &mut Channels(to_first, from_first));
    });

    let mut serial = network();
    let [first, last] = &mut serial;
    for _ in 0..STEPS {
        for micro in 0..MICROS {
            let hidden = first.forward(micro, None)?;
            last.forward(micro, hidden)?;
            let grad = last.backward(micro, None)?;
            first.backward(micro, grad)?;
        }
        first.update(MICROS)?;
        last.update(MICROS)?;
    }
    for step in [1, 10, 100, STEPS] {
        let loss = |[_, last]: &[Layer; 2]| last.losses[(step - 1) * MICROS..][..MICROS].iter().sum::<f32>();
        println!("step {step:>3}: loss {:.6} in the pipeline, {:.6} serially", loss(&pipeline), loss(&serial));
    }
    assert!(pipeline.iter().zip(&serial).all(|(a, b)| a.weights == b.weights), "the weights differ");
    Ok(println!("The weights are the same, bit for bit."))
}
