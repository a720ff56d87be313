//! Training loops without a trainer: what they used to get wrong without a word. Auxiliary losses and other notes of
//! layers that nobody took, and ranks that disagree about what each believes to be the same. Beside each the right
//! program.

use meshwork_core::{Axis, Mesh, Rank, Ty, Types, World};
use meshwork_cpu::Cpu;
use meshwork_tensor::param::{Gradients, StatisticRule};
use meshwork_tensor::tape::{Mode, Normaliser, Position, Weights};
use meshwork_tensor::verify::Claims;
use meshwork_tensor::{Declarations, Device, Error, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use meshwork_testkit::opaque::{self, Opaque};
use std::sync::Arc;

const BATCH: usize = 8;
const IN: usize = 4;
const HIDDEN: usize = 6;

/// A network whose hidden units are cut over tp.
#[derive(Clone)]
struct Network {
    rank: Arc<Rank>,
    device: Arc<dyn Device>,
    params: Arc<Params>,
    ids: [ParamId; 2],
}

impl Network {
    fn new(rank: Arc<Rank>, device: Arc<dyn Device>) -> Result<Self> {
        let (mut all, init) = (Declarations::new(), Init::Normal { std: 0.5 });
        let cut = |dim| Placement::replicated().shard(Axis::Tp, dim);
        let ids = [
            all.declare("w1", &[HIDDEN, IN], cut(0), Role::Weight, init)?,
            all.declare("w2", &[1, HIDDEN], cut(1), Role::Weight, init)?,
        ];
        let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &[ids.to_vec()], 7)?;
        Ok(Self { rank, device, params: Arc::new(params), ids })
    }

    /// Samples of each data-parallel rank.
    fn held(&self) -> usize {
        BATCH / self.rank.mesh().data_degree()
    }

    fn tape(&self, rank_samples: usize) -> Tape {
        let position = Position { rank_samples: rank_samples as u64, ..Position::default() };
        Tape::new(self.rank.clone(), self.params.clone(), self.device.clone(), Mode::Train, position)
    }

    /// Values of the samples from `first` on, as many as `samples`.
    fn data(&self, tape: &Tape, (first, samples): (usize, usize), width: usize) -> Result<Var> {
        let values: Vec<f32> =
            (first * width..(first + samples) * width).map(|at| (at * 7 % 23) as f32 / 11.0 - 1.0).collect();
        let types = Types::all(self.rank.mesh(), Ty::Invariant).with(Axis::Dp, Ty::Shard(0));
        Ok(tape.constant(Tensor::from_slice(&self.device, &values, [samples, width])?, types))
    }

    /// The first of this rank's samples.
    fn first(&self) -> usize {
        self.rank.mesh().data_rank(self.rank.coords()) * self.held()
    }

    /// The losses of some samples.
    fn loss(&self, tape: &Tape, of: (usize, usize), penalised: bool) -> Result<Var> {
        let hidden = self.data(tape, of, IN)?.copy(Axis::Tp)?.linear(&tape.param(self.ids[0])?, 1)?.tanh()?;
        let y = hidden.linear(&tape.param(self.ids[1])?, 1)?.all_reduce(Axis::Tp)?;
        if penalised {
            // Partial on tp, and Invariant.
            tape.add_loss("sizes", 0.5, &hidden.mean_squared_error(&hidden.scale(0.0)?)?)?;
            tape.add_loss("outputs", 0.25, &y.mean_squared_error(&y.scale(0.0)?)?)?;
        }
        y.mean_squared_error(&self.data(tape, of, 1)?)
    }

    fn gradients(&self, tape: &Tape, mut gradients: Gradients) -> Result<Vec<f32>> {
        gradients.all_reduce(tape)?;
        let values = self.ids.map(|id| gradients.get(id).unwrap().to_vec::<f32>());
        Ok(values.into_iter().collect::<Result<Vec<_>>>()?.concat())
    }
}

/// The gradients of one rank, from the roots that a trainer takes.
fn oracle() -> Vec<f32> {
    let network =
        Network::new(Arc::new(Rank::recording(&"dp=1,tp=1".parse().unwrap(), 0).unwrap()), Cpu::device()).unwrap();
    let tape = network.tape(0);
    let loss = network.loss(&tape, (0, BATCH), true).unwrap();
    let notes = tape.take_notes();
    let seed = |value: &Var, scale: f64| tape.loss_seed(value, Normaliser::Scale(scale / BATCH as f64)).unwrap();
    let mut roots = vec![(&loss, seed(&loss, 1.0))];
    roots.extend(notes.per_sample.iter().map(|note| (&note.value, seed(&note.value, note.coefficient.unwrap()))));
    let mut gradients = Gradients::default();
    tape.backward_from(roots, Weights::Now, &mut gradients).unwrap();
    network.gradients(&tape, gradients).unwrap()
}

/// This rank's part of gradients that one rank has whole: both parameters are cut into contiguous parts.
fn part(whole: &[f32], rank: &Rank) -> Vec<f32> {
    let (tp, at) = (rank.mesh().degree(Axis::Tp), rank.coords().get(Axis::Tp));
    let (w1, w2) = whole.split_at(HIDDEN * IN);
    [w1, w2].iter().flat_map(|all| all.chunks(all.len() / tp).nth(at).unwrap().to_vec()).collect()
}

/// Each rank's result, on ranks of a device in host memory and of one out of the host's reach.
fn on<T: Send>(
    mesh: &str,
    body: impl Fn(Arc<Rank>, Arc<dyn Device>) -> Result<T> + Sync,
) -> Vec<std::result::Result<T, String>> {
    let mesh: Mesh = mesh.parse().unwrap();
    let of_device = |hidden: bool| {
        World::threads(&mesh)
            .run(|world| {
                let (mut comm, mut device) = (world.communicator().clone(), Cpu::device());
                if hidden {
                    (comm, device) = (opaque::communicator(comm), Opaque::device(device));
                }
                let ran = body(Arc::new(Rank::new(&mesh, comm)?), device);
                Ok::<_, Error>(ran.map_err(|error| error.to_string()))
            })
            .unwrap()
    };
    [false, true].into_iter().flat_map(of_device).collect()
}

/// `backward_from_loss` used to train the loss alone.
#[test]
fn auxiliary_losses_of_a_hand_written_loop_are_trained() {
    let whole = oracle();
    for mesh in ["dp=1", "dp=2", "tp=2", "dp=2,tp=2", "dp=4,tp=3"] {
        for micros in [1, 2] {
            let found = on(mesh, |rank, device| {
                let network = Network::new(rank.clone(), device)?;
                let (held, mut gradients, mut last) = (network.held(), Gradients::default(), None);
                for micro in 0..micros {
                    let tape = network.tape(held);
                    let share = held / micros;
                    let loss = network.loss(&tape, (network.first() + micro * share, share), true)?;
                    let normaliser = Normaliser::LocalTerms(held as u64);
                    tape.backward_from_loss(&loss, normaliser, Weights::Now, &mut gradients)?;
                    let names: Vec<&str> = tape.take_notes().per_sample.iter().map(|note| note.name).collect();
                    assert_eq!(names, ["sizes", "outputs"], "they are still reported");
                    last = Some(tape);
                }
                Ok((network.gradients(&last.unwrap(), gradients)?, part(&whole, &rank)))
            });
            for (rank, result) in found.into_iter().enumerate() {
                let (gradients, expected) = result.unwrap();
                let far = gradients.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(
                    far < 1e-6 && gradients.len() == expected.len(),
                    "{mesh}, {micros} micro-batches, rank {rank}: {far}"
                );
            }
        }
    }
}

#[test]
fn auxiliary_losses_whose_mean_is_not_known_are_refused() {
    let told = |rank_samples: usize, normaliser: Normaliser| {
        on("dp=2", |rank, device| {
            let network = Network::new(rank, device)?;
            let (tape, held) = (network.tape(rank_samples), network.held());
            let loss = network.loss(&tape, (network.first(), held), true)?;
            tape.backward_from_loss(&loss, normaliser, Weights::Now, &mut Gradients::default())
        })
    };
    let refused = "backward: layers left the auxiliary losses [\"sizes\", \"outputs\"] on the tape, and nobody took them; backward_from_loss trains them \
                   on a tape whose Position::rank_samples is set, with Normaliser::LocalTerms; or take them with Tape::take_notes and give \
                   each to backward_from, its seed the coefficient / samples of the batch";
    for result in told(0, Normaliser::LocalTerms(4)).into_iter().chain(told(4, Normaliser::Scale(0.125))) {
        assert_eq!(result.unwrap_err(), refused);
    }
    for result in told(2, Normaliser::LocalTerms(4)) {
        assert!(result.unwrap_err().contains(
            "has a number for each of 4 samples, and the tape's position says that each rank has 2 in a step"
        ));
    }
    assert!(told(4, Normaliser::LocalTerms(4)).iter().all(std::result::Result::is_ok));
    // Whoever takes them has them, and decides.
    let taken = on("dp=2", |rank, device| {
        let network = Network::new(rank, device)?;
        let tape = network.tape(0);
        let loss = network.loss(&tape, (network.first(), network.held()), true)?;
        tape.take_notes();
        tape.backward_from_loss(&loss, Normaliser::Scale(0.125), Weights::Now, &mut Gradients::default())
    });
    assert!(taken.iter().all(std::result::Result::is_ok));
}

/// Running statistics used to keep their first values in a loop that does not know of them.
#[test]
fn statistics_that_nobody_took_are_refused() {
    #[derive(Debug)]
    struct Mean;
    impl StatisticRule for Mean {
        fn terms(&self, weight: f64, values: &[f32]) -> Vec<f64> {
            vec![weight, f64::from(values[0])]
        }
        fn update(&self, sums: &[f64], buffers: &mut [Vec<f32>]) {
            buffers[0][0] = (sums[1] / sums[0]) as f32;
        }
    }
    let backward = |takes: bool| {
        let (mut all, device) = (Declarations::new(), Cpu::device());
        let rank = Arc::new(Rank::recording(&"dp=1".parse::<Mesh>().unwrap(), 0)?);
        let w = all.declare("w", &[1, 1], Placement::replicated(), Role::Weight, Init::Ones)?;
        let mean = all.declare("norm.mean", &[1], Placement::replicated(), Role::Buffer, Init::Zeros)?;
        let statistic = all.declare_statistic(vec![mean], Mean);
        let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &[vec![w], vec![mean]], 0)?;
        let types = Types::all(rank.mesh(), Ty::Invariant).with(Axis::Dp, Ty::Shard(0));
        let tape = Tape::new(rank, Arc::new(params), device.clone(), Mode::Train, Position::default());
        let one = Tensor::from_slice(&device, &[1.0f32], [1, 1])?;
        tape.note(statistic, 1.0, &[&one]);
        let x = tape.constant(one, types);
        let loss = x.linear(&tape.param(w)?, 1)?.mean_squared_error(&x)?;
        if takes {
            assert_eq!(tape.take_notes().statistics.len(), 1);
        }
        tape.backward_from_loss(&loss, Normaliser::LocalTerms(1), Weights::Now, &mut Gradients::default())
    };
    let told = backward(false).unwrap_err().to_string();
    assert!(
        told.starts_with(
            "backward: layers left the statistics of norm.mean on the tape, and nobody took them; take them with"
        ),
        "{told}"
    );
    backward(true).unwrap();
}

/// Gradients of weights that are deferred and never computed used to be missing from the sums.
#[test]
fn deferred_gradients_that_nobody_computes_are_refused() {
    let sums = |completes: bool| {
        on("dp=2", |rank, device| {
            let network = Network::new(rank, device)?;
            let (tape, mut gradients) = (network.tape(0), Gradients::default());
            let loss = network.loss(&tape, (network.first(), network.held()), false)?;
            tape.backward_from_loss(&loss, Normaliser::LocalTerms(4), Weights::Deferred, &mut gradients)?;
            if completes {
                tape.weight_gradients(&mut gradients)?;
            }
            gradients.all_reduce(&tape)
        })
    };
    assert!(sums(true).iter().all(std::result::Result::is_ok));
    for result in sums(false) {
        let told = result.unwrap_err();
        assert!(
            told.contains("deferred, and would be missing from the sums: call Tape::weight_gradients first"),
            "{told}"
        );
    }
}

/// What one rank of a loop, or one data-parallel rank, does otherwise than the others.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    Drift,
    Samples,
    Batch,
    Constant,
    Factor,
    Seed,
    Position,
    Rate,
    Program,
}

/// A loop that verifies each of its steps.
fn verified(wrong: Wrong, rank: Arc<Rank>, device: Arc<dyn Device>) -> Result<()> {
    let mut network = Network::new(rank.clone(), device.clone())?;
    let (me, dp) = (rank.world_rank(), rank.coords().get(Axis::Dp));
    for step in 0..2 {
        let claims = Claims::new(rank.clone(), step);
        claims.weights(&network.params)?;
        let first = match wrong {
            Wrong::Samples => 0,
            Wrong::Batch if me == 3 => network.first() + 1,
            _ => network.first(),
        };
        claims.samples(1 + first as u64); // in place of a hash
        let mut gradients = Gradients::default();
        {
            let seed = if wrong == Wrong::Seed { dp as u64 } else { 7 };
            let first_sample = if wrong == Wrong::Position { 0 } else { first as u64 };
            let position = Position { seed, step, first_sample, rank_samples: network.held() as u64 };
            let tape = Tape::new(rank.clone(), network.params.clone(), device.clone(), Mode::Train, position);
            claims.observe(&tape);
            let mut loss = network.loss(&tape, (first, network.held()), false)?;
            if wrong == Wrong::Constant {
                let own = vec![1.0 + rank.coords().get(Axis::Tp) as f64; network.held()];
                let own = Tensor::from_slice(&device, &own, [network.held()])?;
                loss = loss.mul(&tape.constant(own, loss.types()))?;
            }
            if wrong == Wrong::Program && me == 3 {
                loss.scale(1.0)?;
            }
            let normaliser = match wrong {
                Wrong::Factor => Normaliser::Scale(1.0 / (4 + dp) as f64),
                _ => Normaliser::LocalTerms(network.held() as u64),
            };
            tape.backward_from_loss(&loss, normaliser, Weights::Now, &mut gradients)?;
            gradients.all_reduce(&tape)?;
        }
        claims.gradients(&network.params, &gradients)?;
        claims.compare()?;
        gradients.descend(&mut network.params, if wrong == Wrong::Rate { 0.1 * (1 + dp) as f64 } else { 0.1 })?;
        if wrong == Wrong::Drift && me == 2 {
            let params = Arc::get_mut(&mut network.params).unwrap();
            let mut values = params.read(network.ids[1])?;
            values[0] += 1e-6;
            params.write(network.ids[1], &values)?;
        }
    }
    Ok(())
}

/// Each of these loops used to end well, with wrong weights.
#[test]
fn ranks_of_a_loop_that_disagree_are_named() {
    for (wrong, told) in [
        (
            Wrong::Drift,
            "step 1: the weights of w2 should be the same over dp, and ranks 0, 2 have different bits; load the same weights",
        ),
        (
            Wrong::Samples,
            "step 0: the samples of a step should differ over dp, and those of ranks 0, 2 are the same; give each",
        ),
        (
            Wrong::Batch,
            "step 0: a constant of [4, 4] (tape 0) is Invariant over tp, and ranks 2, 3 have different bits; give every rank",
        ),
        (
            Wrong::Constant,
            "step 0: a constant of [4] (tape 0) is Invariant over tp, and ranks 0, 1 have different bits; give every rank",
        ),
        (
            Wrong::Factor,
            "step 0: the factor of a loss of [1] (tape 0) is Invariant over dp, and ranks 0, 2 have different bits; give every rank",
        ),
        (
            Wrong::Seed,
            "step 0: the seed of tape 0, in its Position, should be the same over dp, and rank 0 has 0, rank 2 has 1; give every rank",
        ),
        (
            Wrong::Position,
            "step 0: the first sample of tape 0, in its Position, should differ over dp, and those of ranks 0, 2 are the same; count it",
        ),
        (
            Wrong::Rate,
            "step 1: the weights of w1 should be the same over dp, and ranks 0, 2 have different bits; load the same weights",
        ),
        (Wrong::Program, "step 0: every rank should claim the same facts in the same order over tp, and as number"),
    ] {
        for (rank, result) in on("dp=2,tp=2", |rank, device| verified(wrong, rank, device)).into_iter().enumerate() {
            let found = result.unwrap_err();
            assert!(found.starts_with(told), "{wrong:?}, rank {rank}: {found}");
        }
    }
    for mesh in ["dp=1", "dp=2", "tp=2", "dp=2,tp=2", "dp=2,tp=2,pp=2"] {
        for result in on(mesh, |rank, device| verified(Wrong::Nothing, rank, device)) {
            result.unwrap();
        }
    }
}
