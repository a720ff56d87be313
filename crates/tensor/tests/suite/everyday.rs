//! A user's network over dp=2,tp=2, with its own operation and its own training loop, in less than 60 lines, compared
//! with one rank.

// The program of a user, from here to the end of `train`.
use meshwork_core::{Axis, Mesh, Rank, Ty, Types, World};
use meshwork_cpu::Cpu;
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Mode, Normaliser, Position, Weights};
use meshwork_tensor::{Declarations, Error, Init, Params, Placement, Role, Tape, Tensor};
use std::sync::Arc;

const IN: usize = 6;
const HIDDEN: usize = 16;
const OUT: usize = 3;
const BATCH: usize = 8;

/// Learns three functions of six numbers; tp cuts the hidden units, dp the samples. The loss of each step.
fn train(rank: Arc<Rank>, steps: u64) -> Result<Vec<f64>, Error> {
    let (mut all, device) = (Declarations::new(), Cpu::device());
    let cut = |dim| Placement::replicated().shard(Axis::Tp, dim);
    let init = Init::Normal { std: 0.4 };
    let w1 = all.declare("w1", &[HIDDEN, IN], cut(0), Role::Weight, init)?;
    let b1 = all.declare("b1", &[HIDDEN], cut(0), Role::Bias, Init::Zeros)?;
    let w2 = all.declare("w2", &[OUT, HIDDEN], cut(1), Role::Weight, init)?;
    let gain = all.declare("gain", &[OUT], Placement::replicated(), Role::Norm, Init::Ones)?;
    let layout = [all.ids().collect()];
    let mut params = Arc::new(Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 7)?);

    let held = BATCH / rank.mesh().degree(Axis::Dp);
    let first = rank.coords().get(Axis::Dp) * held;
    let types = Types::all(rank.mesh(), Ty::Invariant).with(Axis::Dp, Ty::Shard(0));
    let mut losses = Vec::new();
    for step in 0..steps {
        let mut gradients = Gradients::default();
        {
            let tape = Tape::new(rank.clone(), params.clone(), device.clone(), Mode::Train, Position::default());
            let at = |i: usize| (step as usize * BATCH + first) * IN + i;
            let inputs: Vec<f32> = (0..held * IN).map(|i| (at(i) * 7 % 97) as f32 / 48.0 - 1.0).collect();
            let wanted = inputs.chunks(IN).flat_map(|x| (0..OUT).map(|j| (x[j] + x[j + OUT]).sin()));
            let data = |values: &[f32], width| {
                Tensor::from_slice(&device, values, [held, width]).map(|data| tape.constant(data, types))
            };
            let (x, targets) = (data(&inputs, IN)?, data(&wanted.collect::<Vec<_>>(), OUT)?);
            let hidden = x.copy(Axis::Tp)?.linear(&tape.param(w1)?, 1)?.add(&tape.param(b1)?)?;
            let hidden = hidden.map("softsign", |x| x / (1.0 + x.abs()), |x, _| (1.0 + x.abs()).powi(-2))?;
            let y = hidden.linear(&tape.param(w2)?, 1)?.all_reduce(Axis::Tp)?.mul(&tape.param(gain)?)?;
            let loss = y.mean_squared_error(&targets)?;
            losses.push(loss.mean(0)?.all_reduce(Axis::Dp)?.item()?);
            tape.backward_from_loss(&loss, Normaliser::LocalTerms(held as u64), Weights::Now, &mut gradients)?;
            gradients.all_reduce(&tape)?;
        }
        gradients.descend(&mut params, 0.2)?;
    }
    Ok(losses)
}

fn on(mesh: &str, steps: u64) -> Vec<Vec<f64>> {
    let mesh: Mesh = mesh.parse().unwrap();
    let body = |world: meshwork_core::Group| train(Arc::new(Rank::new(&mesh, world.communicator().clone())?), steps);
    World::threads(&mesh).run(body).unwrap()
}

#[test]
fn it_learns_and_no_mesh_changes_what() {
    let one = on("dp=1,tp=1", 60).remove(0);
    assert!(one[50..].iter().sum::<f64>() < 0.7 * one[..10].iter().sum::<f64>(), "it learns: {one:?}");
    for mesh in ["dp=2,tp=2", "dp=1,tp=2", "dp=4,tp=1", "dp=2,tp=4"] {
        for losses in on(mesh, 60) {
            let off = losses.iter().zip(&one).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
            assert!(losses.len() == one.len() && off < 1e-4, "{mesh} is off by {off}");
        }
    }
}

#[test]
fn it_is_short() {
    let program = include_str!("everyday.rs").split("// The program").nth(1).unwrap().split("\nfn on").next().unwrap();
    let lines = program.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(lines < 60, "{lines} lines");
}

/// Only the gradients that are Partial are summed; and a missing sum is noticed.
#[test]
fn gradients_that_nobody_sums_are_those_of_the_rank_alone() {
    let mesh: Mesh = "dp=2,tp=2".parse().unwrap();
    let found = World::Threads(4).run(|world: meshwork_core::Group| {
        let rank = Arc::new(Rank::new(&mesh, world.communicator().clone())?);
        let mut all = Declarations::new();
        let cut = Placement::replicated().shard(Axis::Tp, 0);
        let w = all.declare("w", &[2, 1], cut, Role::Weight, Init::Ones)?;
        let shift = all.declare("shift", &[2], Placement::replicated(), Role::Bias, Init::Zeros)?;
        let unread = all.declare("unread", &[1], Placement::replicated(), Role::Bias, Init::Zeros)?;
        let (all, device) = (Arc::new(all), Cpu::device());
        let layout = [all.ids().collect()];
        let params = Arc::new(Params::new(all.clone(), rank.mesh(), rank.coords(), &device, &layout, 0)?);
        let tape = Tape::new(rank.clone(), params.clone(), device.clone(), Mode::Train, Position::default());
        let types = Types::all(rank.mesh(), Ty::Invariant).with(Axis::Dp, Ty::Shard(0));
        let sample = (rank.coords().get(Axis::Dp) + 1) as f32;
        let x = tape.constant(Tensor::from_slice(&device, &[sample], [1, 1])?, types);
        let t = tape.constant(Tensor::from_slice(&device, &[0f32; 2], [1, 2])?, types);
        let y = x.copy(Axis::Tp)?.linear(&tape.param(w)?, 1)?.all_gather_invariant(Axis::Tp, 1)?;
        let loss = y.add(&tape.param(shift)?)?.mean_squared_error(&t)?;
        let mut gradients = Gradients::default();
        tape.backward_from_loss(&loss, Normaliser::Scale(1.0), Weights::Now, &mut gradients)?;
        let axes = all.reduction_axes(&tape.reads());
        assert_eq!([w, shift, unread].map(|id| axes[id.index()].clone()), [vec![Axis::Dp], vec![Axis::Dp], vec![]]);
        let values = |gradients: &Gradients| [w, shift].map(|id| gradients.get(id).unwrap().to_vec::<f32>().unwrap());
        let alone = values(&gradients);
        gradients.all_reduce(&tape)?;
        assert_eq!(gradients.iter().map(|(id, _)| id).collect::<Vec<_>>(), [w, shift]);
        let mut read = params.clone();
        let error = gradients.descend(&mut read, 0.1).unwrap_err().to_string();
        assert_eq!(error, "backward: weights are still read: drop the tape and its values first");
        Ok::<_, Error>((alone, values(&gradients)))
    });
    for (rank, (alone, summed)) in found.unwrap().into_iter().enumerate() {
        let sample = (rank / 2 + 1) as f32;
        assert_eq!(alone, [vec![sample * sample], vec![sample; 2]], "rank {rank}");
        assert_eq!(summed, [vec![5.0], vec![3.0; 2]], "rank {rank}");
    }
}
