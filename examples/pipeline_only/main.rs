//! Only the pipeline, over custom stages: a network of four layers on `Vec<f32>`, a thread per rank, channels between
//! them, without any other part of meshwork. `cargo run --release --example pipeline_only`

use meshwork::pipeline::{Lowered, StageRunner, channels, interleaved_1f1b, lower, run, zb_h1};
use std::{collections::HashMap, convert::Infallible, mem::take, thread};

/// A layer as a stage: output = tanh(weights · input). The last layer ends with the loss, half the squared error.
struct Layer {
    weights: Vec<f32>, // [outputs, inputs]
    gradient: Vec<f32>,
    inputs: usize,
    is_first: bool,
    is_last: bool,
    in_flight: HashMap<usize, [Vec<f32>; 2]>, // per micro-batch: input; output, then the gradient before tanh
    loss: f32,
}

/// Two numbers and a constant as input, and the target: the product of the two numbers.
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
        Ok((!self.is_first).then(|| (0..self.inputs).map(column).collect()))
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

const MICROS: usize = 8;
const SIZES: [usize; 5] = [3, 8, 8, 8, 1];

/// Runs one step of a schedule over the layers: one thread per rank, with the stages of the rank.
fn step(schedule: &Lowered, layers: &mut [Layer]) {
    let mut held: Vec<Vec<&mut Layer>> = (0..schedule.schedule().ranks).map(|_| Vec::new()).collect();
    for (layer, &rank) in layers.iter_mut().zip(&schedule.schedule().placement) {
        held[rank].push(layer);
    }
    thread::scope(|scope| {
        for (rank, (mut stages, mut transport)) in held.into_iter().zip(channels(schedule)).enumerate() {
            scope.spawn(move || run(schedule, rank, &mut stages, &mut transport, &mut |_| {}).expect("sound"));
        }
    });
}

fn main() -> Result<(), Infallible> {
    let layer = |at: usize| {
        let (inputs, outputs) = (SIZES[at], SIZES[at + 1]);
        let weights: Vec<f32> = (0..outputs * inputs).map(|i| (i * 37 % 11) as f32 / 10.0 - 0.5).collect();
        let (gradient, is_first, is_last) = (vec![0.0; weights.len()], at == 0, at == 3);
        Layer { weights, gradient, inputs, is_first, is_last, in_flight: HashMap::new(), loss: 0.0 }
    };
    let [mut pipeline, mut serial] = [(); 2].map(|()| [0, 1, 2, 3].map(layer));
    // The same four stages, on four ranks with one each, then on two ranks with two each.
    let schedules = [zb_h1(4, MICROS), interleaved_1f1b(2, 2, MICROS)].map(|schedule| lower(&schedule).expect("valid"));
    for number in 1..=20 {
        let schedule = &schedules[usize::from(number > 10)];
        step(schedule, &mut pipeline);
        for micro in 0..MICROS {
            let output = serial.iter_mut().try_fold(None, |input, layer| layer.forward(micro, input))?;
            serial.iter_mut().rev().try_fold(output, |grad, layer| layer.backward(micro, grad))?;
        }
        pipeline.iter_mut().chain(&mut serial).try_for_each(|layer| layer.update(MICROS))?;
        let (name, [ours, alone]) =
            (&schedule.schedule().name, [&mut pipeline, &mut serial].map(|it| take(&mut it[3].loss)));
        println!("step {number:>2}, {name}: loss {ours:.6}, serially {alone:.6}");
    }
    assert!(pipeline.iter().zip(&serial).all(|(a, b)| a.weights == b.weights), "the weights differ");
    println!("The weights are the same, bit for bit.");
    Ok(())
}
