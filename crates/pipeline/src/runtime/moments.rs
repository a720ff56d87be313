//! The moments of a step: the actions of each rank, each with what the rank holds then. In a long step the rounds of
//! its middle repeat each other, so a step of a few micro-batches has the same moments.

use super::hand_overs;
use crate::{Action, ActionKind, Direction, Generator, Lowered, Shape, lower};
use std::collections::{BTreeMap, HashSet, VecDeque};

/// Rounds of as many micro-batches as there are ranks within which a step that repeats itself has all of its moments.
const ROUNDS: usize = 8;

/// An action of any micro-batch, and what its rank holds before it.
type Moment = (ActionKind, usize, Held);

/// What a rank holds, whatever the micro-batches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Held {
    /// How many things of a kind belong to a stage.
    counts: BTreeMap<(Thing, usize), usize>,
    /// By receiver: the messages that may be in flight, the oldest first.
    sent: BTreeMap<usize, VecDeque<(Direction, usize)>>,
    /// By stage: how many gradients of its weights were added, and how many are still to be; two or more alike.
    gradients: BTreeMap<usize, [usize; 2]>,
    /// The stages of the last two of these: their sums over ranks may be on their way.
    reducing: VecDeque<usize>,
}

/// What a rank holds of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Thing {
    /// What backward needs of a forward.
    Forward,
    /// What the gradient of the weights needs of that of the input.
    InputGradient,
    /// A result for another stage.
    Result(Direction),
}

impl Held {
    fn put(&mut self, thing: Thing, stage: usize) {
        *self.counts.entry((thing, stage)).or_default() += 1;
    }

    fn take(&mut self, thing: Thing, stage: usize) {
        if let Some(count) = self.counts.get_mut(&(thing, stage)) {
            *count -= 1;
        }
        self.counts.retain(|_, count| *count > 0);
    }
}

impl Generator {
    /// The fewest micro-batches of a step that has the moments of a step of this shape: at each action a rank holds as
    /// many activations, results and messages as it does there at some action of that kind. So the most that it ever
    /// holds is the same. All of them, where ranks hold the more the more micro-batches there are.
    ///
    /// ```
    /// use meshwork_pipeline::{Generator, Shape};
    ///
    /// let few = |generator: Generator, micros| generator.few_micros(Shape { micros, ..generator.shape(4, 512) });
    /// assert_eq!(few(Generator::OneFOneB, 512), few(Generator::OneFOneB, 64));
    /// assert!(few(Generator::OneFOneB, 512) < 20);
    /// assert_eq!(few(Generator::Gpipe, 512), 512);
    /// ```
    pub fn few_micros(self, shape: Shape) -> usize {
        let moments = |micros: usize| -> Option<Vec<HashSet<Moment>>> {
            let lowered = lower(&self.build(Shape { micros, ..shape }).ok()?).ok()?;
            Some((0..shape.pp).map(|rank| moments(&lowered, rank)).collect())
        };
        let round = shape.pp.max(1);
        let some = (0..=ROUNDS).map(|rounds| shape.micros % round + rounds * round);
        let some: Vec<usize> = some.filter(|&micros| self.is_synchronous() && micros + round < shape.micros).collect();
        let mut before = None;
        for few in some {
            let own = before.or_else(|| moments(few));
            before = moments(few + round);
            if own.is_some() && own == before {
                return few;
            }
        }
        shape.micros
    }
}

/// The moments of a rank in a synchronous step.
fn moments(lowered: &Lowered, rank: usize) -> HashSet<Moment> {
    let (schedule, room) = (lowered.schedule(), lowered.report().in_flight);
    let few = |added: usize| [added.min(2), (schedule.micros - added).min(2)];
    let mut added = vec![0; schedule.stages()];
    let gradients = schedule.stages_of(rank).map(|stage| (stage, few(0))).collect();
    let (mut held, mut all) = (Held { gradients, ..Held::default() }, HashSet::new());
    for &action in lowered.actions(rank) {
        let Action { kind, stage, micro } = action;
        all.insert((kind, stage, held.clone()));
        match (action.counterpart(), action.tag()) {
            (Some(receive), Some(tag)) if kind.is_send() => {
                held.take(Thing::Result(tag.direction), tag.stage);
                let sent = held.sent.entry(schedule.rank_of(receive.stage, micro)).or_default();
                sent.push_back((tag.direction, tag.stage));
                sent.drain(..sent.len().saturating_sub(room));
            }
            (Some(_), Some(tag)) => held.put(Thing::Result(tag.direction), tag.stage),
            _ => {
                let (takes, makes) = hand_overs(action, schedule.stages());
                takes.into_iter().for_each(|tag| held.take(Thing::Result(tag.direction), tag.stage));
                makes.into_iter().for_each(|tag| held.put(Thing::Result(tag.direction), tag.stage));
            }
        }
        match kind {
            ActionKind::Forward => held.put(Thing::Forward, stage),
            ActionKind::WeightGradient => held.take(Thing::InputGradient, stage),
            kind if kind.makes_input_gradient() => held.take(Thing::Forward, stage),
            _ => {}
        }
        if kind == ActionKind::InputGradient {
            held.put(Thing::InputGradient, stage);
        }
        if kind.makes_weight_gradient() {
            added[stage] += 1;
            held.gradients.insert(stage, few(added[stage]));
            held.reducing.push_back(stage);
            held.reducing.drain(..held.reducing.len().saturating_sub(2));
        }
    }
    all
}
