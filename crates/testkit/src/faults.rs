//! Fault injection: random programs of many ranks, and one thing that goes wrong in them.
//!
//! A [`Program`] cuts the world in several ways and runs a list of operations over the parts, some of them waited for
//! only later. All ranks run the same program; the one named by an [`Injection`] departs from it. The program ends in
//! a barrier of the whole world, so that no rank can finish when one departed.

use crate::Rng;
use meshwork_core::{Buffer, CommError, DType, Group, Pending, ReduceOp};
use std::thread;
use std::time::Duration;

/// The deviation of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// It panics.
    Panic,
    /// It returns, as if done.
    Return,
    /// It returns an error of its own.
    Fail,
    /// It starts another operation.
    WrongOp,
    /// It takes part with another element type.
    WrongDType,
    /// It takes part with another number of elements.
    WrongCount,
    /// It does nothing for so long that another rank has noticed.
    Stall(Duration),
}

impl Departure {
    /// Those that need no clock.
    pub const AT_ONCE: [Departure; 6] = [
        Departure::Panic,
        Departure::Return,
        Departure::Fail,
        Departure::WrongOp,
        Departure::WrongDType,
        Departure::WrongCount,
    ];
}

/// One departure of one rank.
#[derive(Clone, Copy, Debug)]
pub struct Injection {
    /// World rank that departs.
    pub rank: usize,
    /// The step at which it does.
    pub step: usize,
    /// How.
    pub departure: Departure,
}

/// An operation of a [`Step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepKind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    /// Each rank sends to the next and receives from the one before.
    Ring,
    Barrier,
}

const KINDS: [StepKind; 7] = [
    StepKind::AllReduce,
    StepKind::ReduceScatter,
    StepKind::AllGather,
    StepKind::Broadcast,
    StepKind::AllToAll,
    StepKind::Ring,
    StepKind::Barrier,
];

#[derive(Clone, Copy, Debug)]
struct Step {
    /// Index of the split whose parts run the operation.
    cut: usize,
    kind: StepKind,
    dtype: DType,
    count: usize,
    /// Whether the operation is waited for at once, or at the end.
    wait: bool,
}

/// A random program of several ranks.
#[derive(Clone, Debug)]
pub struct Program {
    /// Number of ranks.
    pub ranks: usize,
    /// Ways to cut the world into parts, each of them a list of world ranks.
    cuts: Vec<Vec<Vec<usize>>>,
    steps: Vec<Step>,
}

/// How a rank's run of a program failed.
#[derive(thiserror::Error)]
pub enum ProgramError {
    /// An error of the communicator.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The injected error.
    #[error("injected failure")]
    Injected,
}

meshwork_core::debug_as_display!(ProgramError);

impl Program {
    /// A program of 2 to `most_ranks` ranks.
    pub fn random(rng: &mut Rng, most_ranks: usize) -> Program {
        // Mostly small; sometimes large enough to be shared out between ranks.
        let count = |rng: &mut Rng| if rng.below(16) == 0 { 100_000 } else { 1 + rng.below(50) };
        Program::draw(rng, most_ranks, 12, count)
    }

    /// A program of 2 or 3 ranks, for a checker that runs it over many schedules.
    pub fn small(rng: &mut Rng) -> Program {
        Program::draw(rng, 3, 5, |rng| 1 + rng.below(100))
    }

    /// A program of up to `most_ranks` ranks and `most_steps` steps.
    fn draw(rng: &mut Rng, most_ranks: usize, most_steps: usize, count: impl Fn(&mut Rng) -> usize) -> Program {
        let ranks = 2 + rng.below(most_ranks - 1);
        let mut cuts = vec![vec![(0..ranks).collect()]];
        cuts.extend((0..1 + rng.below(3)).map(|_| random_cut(rng, ranks)));
        let step = |rng: &mut Rng| Step {
            cut: rng.below(cuts.len()),
            kind: rng.pick(&KINDS),
            dtype: rng.pick(&[DType::F32, DType::Bf16, DType::I64]),
            count: count(rng),
            wait: rng.below(3) > 0,
        };
        let steps = (0..3 + rng.below(most_steps - 2)).map(|_| step(rng)).collect();
        Program { ranks, cuts, steps }
    }

    /// A departure that the other ranks cannot miss: where the departing rank is not alone.
    pub fn random_injection(&self, rng: &mut Rng, departure: Departure) -> Injection {
        loop {
            let (rank, step) = (rng.below(self.ranks), rng.below(self.steps.len()));
            if self.part(self.steps[step].cut, rank).len() > 1 {
                return Injection { rank, step, departure };
            }
            // Tries each step at most once. If no step qualifies, the barrier of all ranks at the end of the program
            // notices the departure.
            if self.steps.iter().all(|step| self.part(step.cut, rank).len() == 1) {
                return Injection { rank, step: self.steps.len(), departure };
            }
        }
    }

    fn part(&self, cut: usize, rank: usize) -> &[usize] {
        let part = self.cuts[cut].iter().find(|part| part.contains(&rank));
        part.map_or(&[], Vec::as_slice)
    }

    /// Runs one rank.
    pub fn run(&self, world: &Group, injection: Option<Injection>) -> Result<(), ProgramError> {
        let mut groups = Vec::new();
        for (i, _) in self.cuts.iter().enumerate() {
            groups.push(world.split(&format!("cut{i}"), self.part(i, world.rank()))?);
        }
        let last = Step { cut: 0, kind: StepKind::Barrier, dtype: DType::U8, count: 0, wait: true };
        let mut pending = Vec::new();
        for (i, step) in self.steps.iter().chain([&last]).enumerate() {
            if i == self.steps.len() {
                pending.drain(..).try_for_each(|op: Pending| op.wait().map(drop))?;
            }
            let departure = injection.filter(|it| it.rank == world.rank() && it.step == i).map(|it| it.departure);
            let step = match departure {
                None => *step,
                Some(Departure::Panic) => panic!("injected panic"),
                Some(Departure::Return) => return Ok(()),
                Some(Departure::Fail) => return Err(ProgramError::Injected),
                Some(Departure::Stall(time)) => {
                    thread::sleep(time);
                    *step
                }
                Some(Departure::WrongDType) if step.kind != StepKind::Barrier => Step { dtype: DType::I32, ..*step },
                Some(Departure::WrongCount) if step.kind != StepKind::Barrier => {
                    Step { count: step.count + 1, ..*step }
                }
                Some(_) => Step {
                    kind: if step.kind == StepKind::AllReduce { StepKind::AllGather } else { StepKind::AllReduce },
                    ..*step
                },
            };
            let ops = step.start(&groups[step.cut])?;
            if step.wait { ops.into_iter().try_for_each(|op| op.wait().map(drop))? } else { pending.extend(ops) }
        }
        Ok(())
    }
}

fn random_cut(rng: &mut Rng, ranks: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<_> = (0..ranks).collect();
    rng.shuffle(&mut order);
    let mut parts = Vec::new();
    while !order.is_empty() {
        let len = 1 + rng.below(order.len());
        parts.push(order.drain(..len).collect());
    }
    parts
}

impl Step {
    fn start(&self, group: &Group) -> Result<Vec<Pending>, CommError> {
        let (n, rank, count) = (group.size(), group.rank(), self.count);
        let zeros = |count| Buffer::zeros(self.dtype, count);
        Ok(match self.kind {
            StepKind::AllReduce => vec![group.start_all_reduce(zeros(count), ReduceOp::Sum)?],
            StepKind::ReduceScatter => {
                vec![group.start_reduce_scatter(zeros(n * count), zeros(count), ReduceOp::Max)?]
            }
            StepKind::AllGather => vec![group.start_all_gather(zeros(count), zeros(n * count))?],
            StepKind::Broadcast => vec![group.start_broadcast(zeros(count), count % n)?],
            StepKind::AllToAll => {
                // Symmetric, so that a receiver expects what the sender sends; uneven, and sometimes 0.
                let counts: Vec<_> = (0..n).map(|peer| (peer + rank + count) % 4).collect();
                let buffer = || zeros(counts.iter().sum());
                vec![group.start_all_to_all(buffer(), buffer(), &counts, &counts)?]
            }
            StepKind::Ring if n == 1 => vec![],
            StepKind::Ring => {
                let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
                let send = group.start_send(zeros(count), next, 7)?;
                vec![send, group.start_recv(zeros(count), previous, 7)?]
            }
            StepKind::Barrier => vec![group.start_barrier()?],
        })
    }
}
