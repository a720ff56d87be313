//! A device without values: under the stated assumption of an even choice it counts what a real run of even choices
//! takes.

use crate::world::{ALONE, Case, EP, How, declarations, layer, params};
use meshwork_core::{Axis, DType, OpKind, Rank, Record, Ty, Types, World};
use meshwork_cpu::Cpu;
use meshwork_moe::dispatch::{Chosen, Dispatch};
use meshwork_moe::{MoeConfig, RouterKind};
use meshwork_tensor::device::Work;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Mode, Position, Weights};
use meshwork_tensor::{Device, Result, Tape, Tensor};
use meshwork_testkit::opaque::Opaque;
use std::sync::Arc;

/// (FLOPs of products, peak of bytes, what was communicated) of a forward and backward pass.
type Counts = (u64, u64, Vec<Record>);

fn counts(case: &Case, rank: Arc<Rank>, device: Arc<dyn Device>, even: bool) -> Result<Counts> {
    let mut declared = declarations(case);
    let layer = layer(case, &mut declared, rank.mesh())?;
    let params = Arc::new(params(declared, &rank, &device));
    let [batch, seq, hidden, _] = case.dims;
    let samples = batch / rank.mesh().degree(EP);
    let first_sample = (rank.coords().get(EP) * samples) as u64;
    let tape =
        Tape::new(rank.clone(), params, device.clone(), Mode::Train, Position { first_sample, ..Position::default() });
    let types = Types::new(&[(Axis::Tp, Ty::Invariant), (EP, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0))]);
    let x = tape.input(Tensor::zeros(&device, DType::F32, [samples, seq, hidden])?, types);
    let y = match even {
        false => layer.forward(&tape, &x)?,
        // The layer's experts on tokens that choose evenly: token t the experts t, t + 1, ..
        true => {
            let (experts, k) = (case.config.num_experts, case.config.top_k);
            let of = |token: usize| {
                let mut of: Vec<i32> = (0..k).map(|j| ((token + j) % experts) as i32).collect();
                of.sort_unstable();
                of
            };
            let choices: Vec<i32> = (0..samples * seq).flat_map(|token| of(token % seq)).collect();
            let chosen = Chosen {
                experts: Tensor::from_slice(&device, &choices, [samples, seq, k])?,
                num_experts: experts,
                types,
                capacity: None,
                top_k: k,
            };
            let dispatch = Dispatch::new(&tape, &chosen, EP)?;
            let results = dispatch.through(&x, |rows, groups| layer.experts().forward(&tape, rows, groups))?;
            let weights = tape.input(Tensor::zeros(&device, DType::F32, [samples, seq, k])?, types);
            dispatch.combine(&results, &weights)?
        }
    };
    let seed = Tensor::zeros(&device, DType::F32, y.shape())?;
    tape.take_notes(); // only the output counts here
    tape.backward(&y, seed, Weights::Now, &mut Gradients::default())?;
    let meter = device.meter();
    Ok((meter.flops(Work::Matmul), meter.peak_bytes(), rank.log().drain()))
}

/// What a rank sends in all, by operation.
fn sent(records: &[Record]) -> Vec<(OpKind, DType, usize)> {
    records.iter().map(|record| (record.op, record.dtype, record.elements)).collect()
}

#[test]
fn a_dry_run_counts_an_even_choice() {
    // With one expert on each rank, a token of k experts goes to k ranks in the assumption and here.
    for (ep, tp, top_k) in [(1, 1, 2), (4, 1, 2), (4, 1, 1), (2, 2, 1)] {
        let config = MoeConfig { num_experts: 4, top_k, ..MoeConfig::default() };
        let case = Case { config, dims: [8, 8, 12, 16], ..Case::default() };
        let how = How { ep, tp, ..ALONE };
        let real = World::Threads(tp * ep).run(|world| {
            let rank = Rank::new(&how.mesh(), Arc::clone(world.communicator()))?;
            counts(&case, Arc::new(rank), Cpu::device(), true)
        });
        for (world_rank, (flops, _, records)) in real.unwrap_or_else(|error| panic!("{error}")).into_iter().enumerate()
        {
            let rank = Arc::new(Rank::recording(&how.mesh(), world_rank).unwrap());
            let (predicted, peak, recorded) = counts(&case, rank, Meta::device(), false).unwrap();
            let router = 3 * 2 * (8 / ep * 8 * 12 * 4) as u64;
            assert_eq!(predicted, flops + router, "{how:?}, rank {world_rank}: FLOPs");
            assert!(peak > 0);
            assert_eq!(sent(&recorded), sent(&records), "{how:?}, rank {world_rank}");
        }
    }
}

/// Memory is that of the rows: the same for any capacity that drops nothing, less below.
#[test]
fn a_dry_run_knows_the_capacity() {
    let peak = |capacity_factor| {
        let config =
            MoeConfig { num_experts: 8, top_k: 1, router: RouterKind::Switch, capacity_factor, ..MoeConfig::default() };
        let case = Case { config, dims: [8, 16, 64, 256], ..Case::default() };
        let rank = Arc::new(Rank::recording(&ALONE.mesh(), 0).unwrap());
        counts(&case, rank, Meta::device(), false).unwrap().1
    };
    assert_eq!(peak(0.0), peak(1.0));
    assert_eq!(peak(1.0), peak(2.0));
    assert!(peak(0.5) < peak(1.0));
}

/// Of the tokens, their experts and their weights the host sees nothing: in one download a number for each sample and
/// expert, and for each rank.
#[test]
fn the_host_reads_counts_alone() {
    let case = Case { dims: [8, 64, 12, 16], ..Case::default() };
    let device = Opaque::device(Cpu::device());
    let rank = Arc::new(Rank::recording(&ALONE.mesh(), 0).unwrap());
    counts(&case, rank, device.clone(), false).unwrap();
    let read = device.meter().downloads();
    assert_eq!((read.calls, read.bytes), (1, 4 * 8 * (4 + 1)), "of 8 samples, 4 experts and one rank");
}
