//! Steps of `small` (GPT-2 of 6 layers and 384 features) on two data-parallel ranks over a slow link, by what
//! compresses the gradients, or with ZeRO-3 the weights.
//!
//! `cargo bench -p meshwork-engine --bench throttled -- [--json] [--bits 1e9] [--batch 12] [SCHEME...] [weights=SCHEME...]`:
//! the link sends `--bits` bits a second, and a step has `--batch` samples of 256 tokens. With 12 of them backward
//! hides most of what gradients send at 1 Gb/s; with 2 the link is what a step waits for. A time is the median of five
//! steps behind one. Without `--bench` (as under `cargo test`) two steps of a tiny model are run.

use meshwork_compress::Scheme;
use meshwork_core::Rank;
use meshwork_core::World;
use meshwork_core::comm::thread::Options;
use meshwork_cpu::Cpu;
use meshwork_engine::{Compress, Plan, TrainError, Trainer, Zero, ZeroStage};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_nn::Model;
use meshwork_tensor::random;
use meshwork_testkit::throttled;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Seconds of steps, and the bytes of the gradients.
fn steps(model: &Arc<dyn Model>, plan: &Plan, bits: f64, count: usize, seq: usize) -> (Vec<f64>, usize) {
    let options = Options { timeout: Duration::from_secs(600) };
    let ranks = World::threads(&plan.mesh).run_with(options, |world| {
        let world = throttled::communicator(world.communicator().clone(), bits / 8.0);
        let mut trainer = Trainer::new(model.clone(), plan, Arc::new(Rank::new(&plan.mesh, world)?), Cpu::device())?;
        let mut times = Vec::new();
        for step in 0..count {
            let samples = trainer.samples();
            let token = |at: usize| (random::uniform(random::key(step as u64, "tokens"), at as u64) * 256.0) as i32;
            let row = |by: usize| -> Vec<i32> {
                samples
                    .clone()
                    .flat_map(|sample| (0..seq).map(move |at| sample * (seq + 1) + at + by))
                    .map(token)
                    .collect()
            };
            let batch = language::batch(row(0), row(1), seq)?;
            let begun = Instant::now();
            trainer.step(&batch)?;
            times.push(begun.elapsed().as_secs_f64());
        }
        Ok::<_, TrainError>((times, 4 * trainer.local_elements()))
    });
    ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (full, json) = (args.iter().any(|arg| arg == "--bench"), args.iter().any(|arg| arg == "--json"));
    let number = |name: &str, default: f64| {
        let given = args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)?.parse().ok());
        given.unwrap_or(default)
    };
    let (bits, batch) = (number("--bits", 1e9), number("--batch", 12.0) as usize);
    let named = |at: usize| at > 0 && ["--bits", "--batch"].contains(&&*args[at - 1]);
    let words = args.iter().enumerate().filter(|(at, arg)| !arg.starts_with("--") && !named(*at));
    let mut schemes: Vec<&str> = words.map(|(_, arg)| &**arg).collect();
    if schemes.is_empty() {
        schemes = vec!["none", "bf16", "quant:8", "quant:8/block256", "topk:0.1", "powersgd:4"];
        schemes.extend(["weights=none", "weights=quant:8/block256"]);
    }
    let small = Gpt2Config {
        vocab_size: 256,
        num_layers: 6,
        hidden_size: 384,
        ffn_hidden_size: 4 * 384,
        num_heads: 6,
        seq_len: 256,
        ..Gpt2Config::default()
    };
    let tiny = Gpt2Config { num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_heads: 2, seq_len: 16, ..small };
    let config = if full { small } else { tiny };
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(config));
    for scheme in schemes {
        let parsed = |text: &str| text.parse::<Scheme>().unwrap_or_else(|error| panic!("{error}"));
        let (stage, compress) = match scheme.strip_prefix("weights=") {
            Some(weights) => (ZeroStage::Weights, Compress { weights: parsed(weights), ..Compress::default() }),
            None => (ZeroStage::Off, Compress { gradients: parsed(scheme), ..Compress::default() }),
        };
        let plan = Plan {
            mesh: "dp=2".parse().unwrap_or_else(|error| panic!("{error}")),
            global_batch_size: if full { batch } else { 2 },
            zero: Zero { stage, group: None },
            compress,
            ..Plan::default()
        };
        let (mut times, bytes) = steps(&model, &plan, bits, if full { 6 } else { 2 }, config.seq_len);
        times.remove(0);
        times.sort_by(f64::total_cmp);
        let seconds = times[times.len() / 2];
        match json {
            true => println!(
                "{{\"op\": \"step\", \"scheme\": \"{scheme}\", \"bytes\": {bytes}, \"us\": {:.0}}}",
                seconds * 1e6
            ),
            false => println!("{scheme:>24} {:>8.1} ms a step over {} Gb/s", seconds * 1e3, bits / 1e9),
        }
    }
}
