//! The faults of a schedule: one variant per kind of fault, each with its own facts and message.

use super::{Action, ActionKind, Weights};
use std::error::Error;
use std::fmt;

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

messages! {
    /// A mistake in a schedule. Ranks are pipeline ranks; steps count a rank's actions from 0.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum Fault {
        /// The schedule has no ranks, no stages or no micro-batches.
        Empty { ranks: usize, stages: usize, micros: usize }
            => "nothing to run: {ranks} ranks, {stages} stages, {micros} micro-batches; each must be at least 1";
        /// The micro-batches cannot be divided into this number of equal steps.
        Steps { micros: usize, steps: usize }
            => "{micros} micro-batches in {steps} optimizer steps; each step has the same number of them";
        /// The number of action lists is not the number of ranks.
        RowCount { ranks: usize, rows: usize } => "{rows} lists of actions for {ranks} ranks; each rank has exactly one";
        /// A stage is placed on a rank that does not exist.
        Placement { stage: usize, rank: usize, ranks: usize }
            => "stage {stage} is placed on rank {rank}, but there are only ranks 0 to {}", ranks - 1;
        /// Not one number of replicas, of at least 1, for each stage.
        Replicas { stages: usize, replicas: Vec<usize> }
            => "replicas are {replicas:?}: each of the {stages} stages needs one number of at least 1";
        /// A stage that several ranks hold, in an asynchronous schedule: their versions of its weights would diverge.
        ReplicatedVersions { stage: usize, weights: Weights }
            => "stage {stage} has replicas, and weights change while the schedule runs ({}): replicas would part; use \
                flush, or one rank for each stage", weights.name();
        /// A rank holds no stage.
        IdleRank { rank: usize, ranks: usize, stages: usize }
            => "rank {rank} of {ranks} holds none of the {stages} stages; each rank needs at least one";
        /// An action names a stage or a micro-batch that does not exist.
        OutOfRange { rank: usize, step: usize, action: Action, stages: usize, micros: usize }
            => "rank {rank}, step {step}: {action} is out of range: stages go from 0 to {}, micro-batches from 0 to {}",
            stages - 1, micros - 1;
        /// An action stands on a rank that does not hold its stage.
        WrongRank { rank: usize, step: usize, action: Action, home: usize }
            => "rank {rank}, step {step}: {action} stands on rank {rank}, but stage {} lives on rank {home}",
            action.stage;
        /// A message in a schedule that has not been lowered.
        MessageInPlain { rank: usize, step: usize, action: Action }
            => "rank {rank}, step {step}: {action} is a message; a schedule holds only computations until `lower` adds \
                the messages";
        /// A message without a receiver, or between two stages of one rank.
        NeedlessMessage { rank: usize, step: usize, action: Action }
            => "rank {rank}, step {step}: {action} is a message to nobody: {}", match action.peer_stage() {
                Some(peer) => format!("stage {peer} does not exist or lives on the same rank"),
                None => "there is no stage before the first".to_owned(),
            };
        /// An action that runs twice.
        Duplicate { rank: usize, action: Action, first: usize, second: usize }
            => "rank {rank} runs {action} twice, at steps {first} and {second}; it must run once";
        /// A backward that runs both whole and in parts.
        WholeAndSplit { rank: usize, step: usize, action: Action }
            => "rank {rank}, step {step}: {action} is a whole backward, but its parts I or W run too; use either";
        /// An update in a schedule whose weights do not change while it runs.
        UpdateInFlush { rank: usize, step: usize, action: Action }
            => "rank {rank}, step {step}: {action} updates weights inside a step; with weights \"{}\" that happens \
                between steps, outside of the schedule", Weights::Flush.name();
        /// A stage returns to an earlier step, although its weights have changed since. `before` is its previous
        /// action, which belongs to a newer step.
        StepsOverlap { rank: usize, step: usize, action: Action, before: Action }
            => "rank {rank}, step {step}: {action} belongs to an older optimizer step than {before} before it; a stage \
                ends a step before it starts the next";
        /// An update of micro-batches that are applied already.
        UpdateOutOfOrder { rank: usize, step: usize, action: Action, applied: usize }
            => "rank {rank}, step {step}: {action} applies nothing new: gradients up to micro-batch {applied} are \
                applied already";
        /// An update of double-buffered weights in the middle of a batch.
        UpdateInsideBatch { rank: usize, step: usize, action: Action, per_batch: usize }
            => "rank {rank}, step {step}: {action} stands inside a batch; with weights \"{}\" updates follow the last of \
                each {per_batch} micro-batches", Weights::DoubleBuffered.name();
        /// A forward that needs a version of the weights that does not exist yet. `latest` is the newest one of its
        /// stage at that step.
        VersionToCome { rank: usize, step: usize, action: Action, version: usize, latest: usize }
            => "rank {rank}, step {step}: {action} needs version {version} of the weights of stage {}, which has only \
                {latest} updates behind it by then", action.stage;
        /// A part of a (stage, micro), or an update, that no rank runs.
        Missing { rank: usize, action: Action } => "rank {rank} {} ({action})", missing(*action);
        /// A message that must cross ranks and has neither a send nor a receive.
        MissingMessage { send: Action, from: usize, receive: Action, to: usize }
            => "{} crosses from rank {from} to rank {to} with no message: {send} and {receive} are missing",
            send.tag().map_or_else(|| send.to_string(), |tag| tag.to_string());
        /// A receive whose message no rank sends.
        ReceiveWithoutSend { receive: Action, to: usize, send: Action, from: usize }
            => "rank {to} receives {receive}, but rank {from} never sends it ({send} is missing)";
        /// A send whose message no rank receives.
        SendWithoutReceive { send: Action, from: usize, receive: Action, to: usize }
            => "rank {from} sends {send}, but rank {to} never receives it ({receive} is missing)";
        /// An action that runs before an action of its own rank whose result it needs.
        BeforeItsInput { rank: usize, step: usize, action: Action, input: Action, input_step: usize }
            => "rank {rank}, step {step}: {action} stands before {input} (step {input_step}), whose result it needs";
        /// Between two ranks, messages are received in another order than they are sent.
        OutOfOrder { from: usize, to: usize, index: usize, sent: Action, received: Action }
            => "message {index} from rank {from} to rank {to} is sent as {sent} but received as {received}; ranks must \
                receive in the order in which the other sends";
        /// A cost that is not a valid time, or that is missing: of a stage, or of a message.
        Cost { what: &'static str, stage: Option<usize>, value: String }
            => "the {what}{} costs {value}; a cost is a finite time of at least 0, one for each stage",
            stage.map_or(String::new(), |stage| format!(" of stage {stage}"));
        /// Costs that add up to more time than can be measured and drawn.
        TimeOverflow { most: u32 } => "its costs add up to more than 1e{most} units of time; use a larger unit";
        /// Ranks that wait for each other in a circle. The grid shows ranks by steps, with a mark at each action that
        /// can never start, and what it waits for.
        Deadlock { grid: String } => "ranks wait for each other in a circle:\n{grid}";
    }
}

/// What a rank does not do, if an action is missing.
fn missing(Action { kind, stage, micro }: Action) -> String {
    let what = match kind {
        ActionKind::Backward => "backward",
        ActionKind::InputGradient => "input gradient",
        ActionKind::WeightGradient => "weight gradient",
        ActionKind::Update => return format!("never updates the weights of stage {stage} with micro-batch {micro}"),
        _ => "forward",
    };
    format!("runs no {what} of micro-batch {micro} through stage {stage}")
}
