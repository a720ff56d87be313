//! The faults of a schedule: one variant per kind of fault, each with its own facts and message.
//!
//! More than 400 lines: one message for each way in which a schedule can be wrong.

use std::error::Error;
use std::fmt;

use super::{Action, ActionKind, Weights};

/// A schedule that [`check`](crate::check) refused, and why.
#[derive(Clone, PartialEq, Eq)]
pub struct CheckError {
    /// The name of the schedule.
    pub schedule: String,
    /// The first fault found.
    pub fault: Fault,
}

debug_as_display!(CheckError);

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "schedule {}: {}", self.schedule, self.fault)
    }
}

impl Error for CheckError {}

/// A mistake in a schedule. Ranks are pipeline ranks; steps count a rank's actions from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum Fault {
    /// The schedule has no ranks, no stages or no micro-batches.
    Empty { ranks: usize, stages: usize, micros: usize },
    /// The micro-batches cannot be divided into this number of equal steps.
    Steps { micros: usize, steps: usize },
    /// The number of action lists is not the number of ranks.
    RowCount { ranks: usize, rows: usize },
    /// A stage is placed on a rank that does not exist.
    Placement { stage: usize, rank: usize, ranks: usize },
    /// Not one number of replicas, of at least 1, for each stage.
    Replicas { stages: usize, replicas: Vec<usize> },
    /// A stage that several ranks hold, in an asynchronous schedule: their versions of its weights would diverge.
    ReplicatedVersions { stage: usize, weights: Weights },
    /// A rank holds no stage.
    IdleRank { rank: usize, ranks: usize, stages: usize },
    /// An action names a stage or a micro-batch that does not exist.
    OutOfRange { rank: usize, step: usize, action: Action, stages: usize, micros: usize },
    /// An action stands on a rank that does not hold its stage.
    WrongRank { rank: usize, step: usize, action: Action, home: usize },
    /// A message in a schedule that has not been lowered.
    MessageInPlain { rank: usize, step: usize, action: Action },
    /// A message without a receiver, or between two stages of one rank.
    NeedlessMessage { rank: usize, step: usize, action: Action },
    /// An action that runs twice.
    Duplicate { rank: usize, action: Action, first: usize, second: usize },
    /// A backward that runs both whole and in parts.
    WholeAndSplit { rank: usize, step: usize, action: Action },
    /// An update in a schedule whose weights do not change while it runs.
    UpdateInFlush { rank: usize, step: usize, action: Action },
    /// A stage returns to an earlier step, although its weights have changed since.
    StepsOverlap {
        rank: usize,
        step: usize,
        action: Action,
        /// The previous action of the same stage, which belongs to a newer step.
        before: Action,
    },
    /// An update of micro-batches that are applied already.
    UpdateOutOfOrder { rank: usize, step: usize, action: Action, applied: usize },
    /// An update of double-buffered weights in the middle of a batch.
    UpdateInsideBatch { rank: usize, step: usize, action: Action, per_batch: usize },
    /// A forward that needs a version of the weights that does not exist yet.
    VersionToCome {
        rank: usize,
        step: usize,
        action: Action,
        version: usize,
        /// The newest version that its stage has at that step.
        latest: usize,
    },
    /// A part of a (stage, micro), or an update, that no rank runs.
    Missing { rank: usize, action: Action },
    /// A message that must cross ranks and has neither a send nor a receive.
    MissingMessage { send: Action, from: usize, receive: Action, to: usize },
    /// A receive whose message no rank sends.
    ReceiveWithoutSend { receive: Action, to: usize, send: Action, from: usize },
    /// A send whose message no rank receives.
    SendWithoutReceive { send: Action, from: usize, receive: Action, to: usize },
    /// An action that runs before an action of its own rank whose result it needs.
    BeforeItsInput { rank: usize, step: usize, action: Action, input: Action, input_step: usize },
    /// Between two ranks, messages are received in another order than they are sent.
    OutOfOrder { from: usize, to: usize, index: usize, sent: Action, received: Action },
    /// A cost that is not a valid time, or that is missing.
    Cost {
        what: &'static str,
        /// The stage; `None` for a message.
        stage: Option<usize>,
        value: String,
    },
    /// Costs that add up to more time than can be measured and drawn.
    TimeOverflow { most: u32 },
    /// Ranks that wait for each other in a circle.
    Deadlock {
        /// Ranks by steps, with a mark at each action that can never start, and what the action waits for.
        grid: String,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { ranks, stages, micros } => write!(
                f,
                "nothing to run: {ranks} ranks, {stages} stages, {micros} micro-batches; each must be at least 1"
            ),
            Self::Steps { micros, steps } => {
                write!(f, "{micros} micro-batches in {steps} optimizer steps; each step has the same number of them")
            }
            Self::RowCount { ranks, rows } => {
                write!(f, "{rows} lists of actions for {ranks} ranks; each rank has exactly one")
            }
            Self::Placement { stage, rank, ranks } => {
                write!(f, "stage {stage} is placed on rank {rank}, but there are only ranks 0 to {}", ranks - 1)
            }
            Self::Replicas { stages, replicas } => {
                write!(f, "replicas are {replicas:?}: each of the {stages} stages needs one number of at least 1")
            }
            Self::ReplicatedVersions { stage, weights } => write!(
                f,
                "stage {stage} has replicas, and weights change while the schedule runs ({}): replicas would part; use \
                 flush, or one rank for each stage",
                weights.name()
            ),
            Self::IdleRank { rank, ranks, stages } => {
                write!(f, "rank {rank} of {ranks} holds none of the {stages} stages; each rank needs at least one")
            }
            Self::OutOfRange { rank, step, action, stages, micros } => write!(
                f,
                "rank {rank}, step {step}: {action} is out of range: stages go from 0 to {}, micro-batches from 0 to {}",
                stages - 1,
                micros - 1
            ),
            Self::WrongRank { rank, step, action, home } => write!(
                f,
                "rank {rank}, step {step}: {action} stands on rank {rank}, but stage {} lives on rank {home}",
                action.stage
            ),
            Self::MessageInPlain { rank, step, action } => write!(
                f,
                "rank {rank}, step {step}: {action} is a message; a schedule holds only computations until `lower` adds \
                 the messages"
            ),
            Self::NeedlessMessage { rank, step, action } => {
                write!(f, "rank {rank}, step {step}: {action} is a message to nobody: ")?;
                match action.peer_stage() {
                    Some(peer) => {
                        write!(f, "stage {peer} does not exist or lives on the same rank")
                    }
                    None => write!(f, "there is no stage before the first"),
                }
            }
            Self::Duplicate { rank, action, first, second } => {
                write!(f, "rank {rank} runs {action} twice, at steps {first} and {second}; it must run once")
            }
            Self::Missing { rank, action } => {
                let Action { kind, stage, micro } = action;
                let what = match kind {
                    ActionKind::Backward => "backward",
                    ActionKind::InputGradient => "input gradient",
                    ActionKind::WeightGradient => "weight gradient",
                    ActionKind::Update => {
                        return write!(
                            f,
                            "rank {rank} never updates the weights of stage {stage} with micro-batch {micro} ({action})"
                        );
                    }
                    _ => "forward",
                };
                write!(f, "rank {rank} runs no {what} of micro-batch {micro} through stage {stage} ({action})")
            }
            Self::WholeAndSplit { rank, step, action } => write!(
                f,
                "rank {rank}, step {step}: {action} is a whole backward, but its parts I or W run too; use either"
            ),
            Self::UpdateInFlush { rank, step, action } => write!(
                f,
                "rank {rank}, step {step}: {action} updates weights inside a step; with weights \"{}\" that happens \
                 between steps, outside of the schedule",
                Weights::Flush.name()
            ),
            Self::StepsOverlap { rank, step, action, before } => write!(
                f,
                "rank {rank}, step {step}: {action} belongs to an older optimizer step than {before} before it; a stage \
                 ends a step before it starts the next"
            ),
            Self::UpdateOutOfOrder { rank, step, action, applied } => write!(
                f,
                "rank {rank}, step {step}: {action} applies nothing new: gradients up to micro-batch {applied} are \
                 applied already"
            ),
            Self::UpdateInsideBatch { rank, step, action, per_batch } => write!(
                f,
                "rank {rank}, step {step}: {action} stands inside a batch; with weights \"{}\" updates follow the last \
                 of each {per_batch} micro-batches",
                Weights::DoubleBuffered.name()
            ),
            Self::VersionToCome { rank, step, action, version, latest } => write!(
                f,
                "rank {rank}, step {step}: {action} needs version {version} of the weights of stage {}, which has only \
                 {latest} updates behind it by then",
                action.stage
            ),
            Self::MissingMessage { send, from, receive, to } => write!(
                f,
                "{} crosses from rank {from} to rank {to} with no message: {send} and {receive} are missing",
                Tagged(send)
            ),
            Self::ReceiveWithoutSend { receive, to, send, from } => {
                write!(f, "rank {to} receives {receive}, but rank {from} never sends it ({send} is missing)")
            }
            Self::SendWithoutReceive { send, from, receive, to } => {
                write!(f, "rank {from} sends {send}, but rank {to} never receives it ({receive} is missing)")
            }
            Self::BeforeItsInput { rank, step, action, input, input_step } => write!(
                f,
                "rank {rank}, step {step}: {action} stands before {input} (step {input_step}), whose result it needs"
            ),
            Self::OutOfOrder { from, to, index, sent, received } => write!(
                f,
                "message {index} from rank {from} to rank {to} is sent as {sent} but received as {received}; ranks \
                 must receive in the order in which the other sends"
            ),
            Self::Cost { what, stage, value } => {
                let stage = stage.map_or(String::new(), |stage| format!(" of stage {stage}"));
                write!(f, "the {what}{stage} costs {value}; a cost is a finite time of at least 0, one for each stage")
            }
            Self::TimeOverflow { most } => {
                write!(f, "its costs add up to more than 1e{most} units of time; use a larger unit")
            }
            Self::Deadlock { grid } => write!(f, "ranks wait for each other in a circle:\n{grid}"),
        }
    }
}

/// The name of the message of a send or receive.
struct Tagged<'a>(&'a Action);

impl fmt::Display for Tagged<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.tag() {
            Some(tag) => write!(f, "{tag}"),
            None => write!(f, "{}", self.0),
        }
    }
}
