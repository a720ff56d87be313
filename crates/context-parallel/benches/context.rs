//! Attention of a sequence that two ranks cut, forward and backward, against the same work without an exchange: GFLOP/s
//! of both ranks, and the share of ideal. Ideal is that each rank computes half of the heads of the whole sequence,
//! which are equally many operations, at the same time.
//!
//! `cargo bench -p meshwork-context-parallel --bench context` with the sizes of `small` and 16,384 tokens, in zigzag
//! order as one document, and `by_document` as several. All are timed in turn, and a share is the median of the shares
//! of the turns. Words choose cases that have one of them in their name. `--json` prints lines for
//! `benches/compare.py`. Without `--bench`, as under `cargo test`, everything runs once on short sequences.

use meshwork_context_parallel::{Balance, ByDocument, ContextParallel, Method};
use meshwork_core::profile::{self, Class, Recorder, Span};
use meshwork_core::{Axis, Mesh, Rank, Ty, Types, World};
use meshwork_cpu::Cpu;
use meshwork_tensor::op::{Documents, Order};
use meshwork_tensor::param::Gradients;
use meshwork_tensor::profiled::Profiled;
use meshwork_tensor::random::{fill_normal, key};
use meshwork_tensor::tape::{Mode, Position, Seed, Weights};
use meshwork_tensor::{Declarations, Device, Params, Result, Tape, Tensor};
use std::sync::Arc;
use std::time::Instant;

const RANKS: usize = 2;
const HEADS: usize = 6;
const HEAD_DIM: usize = 64;
const TURNS: usize = 3;

/// Lengths of documents in sixteenths of a percent of the sequence: a few long ones have most of the pairs.
const DOCUMENTS: [usize; 7] = [600, 30, 250, 120, 400, 70, 168];

/// What is timed: ranks cut the sequence, or the heads without an exchange.
#[derive(Clone)]
struct Case {
    name: String,
    context: Option<ContextParallel>,
    packed: bool,
}

/// What a rank measured of a case in a turn.
struct Measured {
    /// Seconds forward and backward.
    seconds: [f64; 2],
    /// Nanoseconds in which it stood still for a communication, and all that it communicated while it computed.
    waited: u64,
    /// Blocks under way, and how many of them under a whole call of the kernel.
    flights: [usize; 2],
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let asked = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let (json, full) = (asked("--json"), asked("--bench"));
    let (seq, turns) = if full { (16_384, TURNS) } else { (128, 1) };
    let positions: Vec<i32> = documents(seq).into_iter().flat_map(|length| 0..length as i32).collect();
    let reads: Vec<u64> = positions.iter().map(|&position| position as u64 + 1).collect();
    let packed_order = ByDocument::default().order(&reads, RANKS)?;
    let methods = [Method::Ring, Method::AllGather, Method::AllToAll]; // a hybrid of two ranks is one of them
    let cases = [false, true].into_iter().flat_map(|packed| {
        let name = if packed { "documents" } else { "zigzag" };
        let order = if packed { packed_order.clone() } else { Order::zigzag(RANKS) };
        let cut = methods.map(|method| Case {
            name: format!("{method} {name}"),
            context: Some(ContextParallel::new(method, order.clone(), RANKS)),
            packed,
        });
        [Case { name: format!("ideal {name}"), context: None, packed }].into_iter().chain(cut)
    });
    let words: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let asked_for = |case: &Case| words.is_empty() || words.iter().any(|word| case.name.contains(&**word));
    let cases: Vec<Case> = cases.filter(|case| case.context.is_none() || asked_for(case)).collect();
    let mesh: Mesh = format!("cp={RANKS}").parse()?;
    let ranks = World::threads(&mesh).run(|world| {
        let recorder = Recorder::new(Instant::now());
        let world = profile::communicator(Arc::clone(world.communicator()), recorder.clone());
        let rank = Arc::new(Rank::new(&mesh, world)?);
        let device = Profiled::device(Cpu::device(), recorder.clone());
        let turn = |_| cases.iter().map(|case| measure(&rank, &device, &recorder, case, &positions)).collect();
        // As in training, memory comes from the system in the first turn alone, which does not count.
        turn(0)?;
        (0..turns).map(turn).collect::<Result<Vec<Vec<Measured>>>>()
    })?;
    // Of each case, the seconds of the slower rank in each turn.
    let slower = |case: usize, turn: usize, way: usize| {
        ranks.iter().map(|rank| rank[turn][case].seconds[way]).fold(0.0, f64::max)
    };
    let ways = |case: usize| (0..turns).map(move |turn| [0, 1].map(|way| slower(case, turn, way)));
    if !json {
        println!("{RANKS} ranks, {seq} tokens, {HEADS} heads of {HEAD_DIM}; medians (least..largest) of {turns} turns");
        println!(
            "{:24} {:>22} {:>22} {:>20} {:>20} {:>8} {:>12}",
            "", "forward, GFLOP/s", "backward, GFLOP/s", "forward of ideal", "backward of ideal", "waits", "under way"
        );
    }
    for (at, case) in cases.iter().enumerate() {
        let ideal = cases.iter().position(|other| other.packed == case.packed).unwrap_or(at);
        let forward = 4.0 * (HEADS * HEAD_DIM) as f64 * pairs(seq, case.packed) as f64;
        let rates = [0, 1].map(|way| spread(ways(at).map(|turn| forward * [1.0, 2.5][way] / turn[way] * 1e-9)));
        let shares = [0, 1].map(|way| spread(ways(at).zip(ways(ideal)).map(|(of, ideal)| ideal[way] / of[way])));
        let both = spread(ways(at).zip(ways(ideal)).map(|(of, ideal)| (ideal[0] + ideal[1]) / (of[0] + of[1])));
        let rank = &ranks[0][turns - 1][at];
        let waits = 1e-9 * rank.waited as f64 / rank.seconds.iter().sum::<f64>();
        if json {
            for (way, words) in ["attention", "attention gradient"].into_iter().enumerate() {
                println!(r#"{{"product": "cp={RANKS} {words} {}", "gflops": {:.1}}}"#, case.name, rates[way][0]);
            }
            println!(r#"{{"share": "{} of ideal", "value": {:.4}}}"#, case.name, both[0]);
            println!(r#"{{"share": "{} without waits", "value": {:.4}}}"#, case.name, 1.0 - waits);
            continue;
        }
        print!("{:24} {:>22} {:>22}", case.name, shown(rates[0], 1), shown(rates[1], 1));
        print!(" {:>20} {:>20}", shown(shares[0], 3), shown(shares[1], 3));
        println!(" {:>7.1}% {:>4} of {:>4}", 100.0 * waits, rank.flights[1], rank.flights[0]);
    }
    Ok(())
}

fn documents(seq: usize) -> Vec<usize> {
    let total: usize = DOCUMENTS.iter().sum();
    let mut lengths = DOCUMENTS.map(|length| length * seq / total).to_vec();
    lengths[0] += seq - lengths.iter().sum::<usize>();
    lengths
}

/// Pairs of a query and a key that it sees.
fn pairs(seq: usize, packed: bool) -> usize {
    let lengths = if packed { documents(seq) } else { vec![seq] };
    lengths.into_iter().map(|length| length * (length + 1) / 2).sum()
}

/// Median, least and largest.
fn spread(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}

fn shown([median, least, largest]: [f64; 3], digits: usize) -> String {
    format!("{median:.digits$} ({least:.digits$}..{largest:.digits$})")
}

/// A case once, on all ranks at the same time.
fn measure(
    rank: &Arc<Rank>,
    device: &Arc<dyn Device>,
    recorder: &Recorder,
    case: &Case,
    positions: &[i32],
) -> Result<Measured> {
    let params = Params::new(Arc::new(Declarations::new()), rank.mesh(), rank.coords(), device, &[], 1234)?;
    let tape = Tape::new(rank.clone(), Arc::new(params), device.clone(), Mode::Train, Position::default());
    let invariant = Types::all(rank.mesh(), Ty::Invariant);
    let (seq, ty) = (positions.len(), if case.context.is_some() { Ty::Shard(1) } else { Ty::Shard(2) });
    let [tokens, heads] = if case.context.is_some() { [seq / RANKS, HEADS] } else { [seq, HEADS / RANKS] };
    let drawn = |name: &str, shape: [usize; 4]| {
        let mut values = vec![0.0_f32; shape.iter().product()];
        fill_normal(key(rank.coords().get(Axis::Cp) as u64, name), 0, &mut values);
        Tensor::from_slice(device, &values, shape)
    };
    let q = tape.input(drawn("q", [1, tokens, heads, HEAD_DIM])?, invariant.with(Axis::Cp, ty));
    // Its last dim has heads, too.
    let of_kv = if ty == Ty::Shard(2) { Ty::Shard(3) } else { ty };
    let kv = tape.input(drawn("kv", [1, tokens, 2, heads * HEAD_DIM])?, invariant.with(Axis::Cp, of_kv));
    let dy = drawn("dy", [1, tokens, heads, HEAD_DIM])?;
    let positions = tape.constant(Tensor::from_slice(device, positions, [1, seq])?, invariant);
    let documents = case.packed.then_some(Documents { positions, apart: true });
    let group = rank.group(Axis::Cp);
    group.barrier()?;
    recorder.drain();
    recorder.resume();
    let begun = Instant::now();
    let y = match &case.context {
        Some(context) => context.attend(&q, &kv, None, documents.as_ref(), None)?,
        None => q.grouped_attention(&kv, None, documents.as_ref(), None)?,
    };
    let forward = begun.elapsed().as_secs_f64();
    group.barrier()?;
    let begun = Instant::now();
    tape.backward(&y, Seed::typed(dy, y.types().dual()), Weights::Now, &mut Gradients::default())?;
    let backward = begun.elapsed().as_secs_f64();
    let spans = recorder.drain();
    let of = |class: Class| spans.iter().filter(move |span| span.class == class);
    let under =
        |flight: &&Span| of(Class::Attention).any(|kernel| flight.start <= kernel.start && kernel.end <= flight.end);
    Ok(Measured {
        seconds: [forward, backward],
        waited: of(Class::Wait).filter(|span| span.name != "barrier").map(|span| span.end - span.start).sum(),
        flights: [of(Class::Flight).count(), of(Class::Flight).filter(under).count()],
    })
}
