//! The actions that a rank can do in one step of a schedule, and how they are written.

use std::error::Error;
use std::fmt;
use std::str::FromStr;

/// The kind of an action. A generated schedule has only the first five; [`lower`](crate::lower) adds the messages.
///
/// The backward of a (stage, micro) is either whole, one `B`, or split as in the zero-bubble paper (Qi et al., 2024,
/// section 2): an `I`, which the previous stage waits for, and later a `W`, which no stage waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ActionKind {
    /// `F`: the forward of one micro-batch through one stage.
    Forward,
    /// `B`: the whole backward, for the input and for the weights.
    Backward,
    /// `I`: the first part of a split backward, the gradient of the stage's input alone.
    InputGradient,
    /// `W`: the second part of a split backward, the gradients of the weights alone.
    WeightGradient,
    /// `U`: applies to the weights of the stage the gradients up to and with this micro-batch that no `U` before it
    /// has applied. Only in asynchronous schedules ([`Weights`](crate::Weights)); elsewhere weights change between
    /// the steps, outside of the schedule.
    Update,
    /// `SF`: posts the activation to the next stage.
    SendActivation,
    /// `RF`: waits for the activation of the previous stage.
    RecvActivation,
    /// `SB`: posts the gradient of the stage's input to the previous stage.
    SendGradient,
    /// `RB`: waits for the gradient from the next stage.
    RecvGradient,
}

use ActionKind::{
    Backward, Forward, InputGradient, RecvActivation, RecvGradient, SendActivation, SendGradient, Update,
    WeightGradient,
};

impl ActionKind {
    /// Every kind, in the order of their discriminants, which index tables: its letters, its name in legends, and in
    /// errors, before "of micro-batch".
    const TABLE: [(Self, &'static str, &'static str, &'static str); 9] = [
        (Forward, "F", "forward", "forward"),
        (Backward, "B", "backward", "backward"),
        (InputGradient, "I", "input gradient", "backward to the input"),
        (WeightGradient, "W", "weight gradient", "gradient of the weights"),
        (Update, "U", "update", "update"),
        (SendActivation, "SF", "message", "send of the activation"),
        (RecvActivation, "RF", "message", "receive of the activation"),
        (SendGradient, "SB", "message", "send of the gradient"),
        (RecvGradient, "RB", "message", "receive of the gradient"),
    ];
    pub(super) const ALL: [Self; 9] = {
        let (mut all, mut at) = ([Forward; 9], 0);
        while at < all.len() {
            all[at] = Self::TABLE[at].0;
            assert!(all[at] as usize == at);
            at += 1;
        }
        all
    };

    /// Its name in legends.
    pub(super) fn in_words(self) -> &'static str {
        Self::TABLE[self as usize].2
    }

    /// Its name in errors, before "of micro-batch".
    pub(crate) fn in_errors(self) -> &'static str {
        Self::TABLE[self as usize].3
    }

    /// Whether it moves data between ranks instead of computing.
    pub fn is_message(self) -> bool {
        matches!(self, SendActivation | RecvActivation | SendGradient | RecvGradient)
    }

    /// Whether it makes the gradient that the previous stage waits for: `B` or `I`.
    pub fn makes_input_gradient(self) -> bool {
        matches!(self, Backward | InputGradient)
    }

    /// Whether it adds to the gradients of the weights, and then frees the activation: `B` or `W`.
    pub fn makes_weight_gradient(self) -> bool {
        matches!(self, Backward | WeightGradient)
    }

    /// Whether it is the sending end of a message.
    pub fn is_send(self) -> bool {
        matches!(self, SendActivation | SendGradient)
    }

    fn letters(self) -> &'static str {
        Self::TABLE[self as usize].1
    }
}

/// One step of one rank: a kind, a stage and a micro-batch.
///
/// It prints and parses as stage, kind, micro-batch; `stage` is always the one on whose rank the action runs.
///
/// ```
/// use meshwork_pipeline::{Action, ActionKind};
///
/// let action: Action = "2SF0".parse()?;
/// assert_eq!(action, Action { kind: ActionKind::SendActivation, stage: 2, micro: 0 });
/// assert_eq!(action.counterpart().unwrap().to_string(), "3RF0");
/// # Ok::<(), meshwork_pipeline::ParseActionError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The kind of the action.
    pub kind: ActionKind,
    /// The stage that runs it.
    pub stage: usize,
    /// The micro-batch that it processes.
    pub micro: usize,
}

impl Action {
    pub(crate) fn new(kind: ActionKind, stage: usize, micro: usize) -> Self {
        Self { kind, stage, micro }
    }

    /// The stage at the other end of a message; `None` for a computation, and before the first stage.
    pub(crate) fn peer_stage(self) -> Option<usize> {
        match self.kind {
            SendActivation | RecvGradient => Some(self.stage + 1),
            RecvActivation | SendGradient => self.stage.checked_sub(1),
            Forward | Backward | InputGradient | WeightGradient | Update => None,
        }
    }

    /// The other end of a message: the receive of a send and the send of a receive.
    pub fn counterpart(self) -> Option<Self> {
        let kind = match self.kind {
            SendActivation => RecvActivation,
            RecvActivation => SendActivation,
            SendGradient => RecvGradient,
            RecvGradient => SendGradient,
            Forward | Backward | InputGradient | WeightGradient | Update => return None,
        };
        Some(Self { kind, stage: self.peer_stage()?, ..self })
    }

    /// The name of the message that this send or receive moves, the same at both ends.
    pub fn tag(self) -> Option<Tag> {
        let (direction, stage) = match self.kind {
            SendActivation => (Direction::Activation, self.stage),
            RecvActivation => (Direction::Activation, self.peer_stage()?),
            SendGradient => (Direction::Gradient, self.stage),
            RecvGradient => (Direction::Gradient, self.peer_stage()?),
            Forward | Backward | InputGradient | WeightGradient | Update => return None,
        };
        Some(Tag { direction, stage, micro: self.micro })
    }
}

/// The direction of a message through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Forward: from a stage to the next one.
    Activation,
    /// Backward: from a stage to the previous one.
    Gradient,
}

/// The name of a message: its kind and the stage that made it. It is the same for sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// Its direction.
    pub direction: Direction,
    /// The stage that produced it.
    pub stage: usize,
    /// The micro-batch it belongs to.
    pub micro: usize,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.direction {
            Direction::Activation => "activation",
            Direction::Gradient => "gradient",
        };
        write!(f, "{what} of stage {}, micro-batch {}", self.stage, self.micro)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Through `pad`, so that a width in the format string lines up columns.
        f.pad(&format!("{}{}{}", self.stage, self.kind.letters(), self.micro))
    }
}

/// A text that is not an action.
#[derive(Clone, PartialEq, Eq)]
pub struct ParseActionError {
    /// The text.
    pub text: String,
}

debug_as_display!(ParseActionError);

impl fmt::Display for ParseActionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no action: expected stage, kind (", self.text)?;
        for (i, kind) in ActionKind::ALL.into_iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { ", " }, kind.letters())?;
        }
        write!(f, ") and micro-batch, as in 2F0 or 2SF0")
    }
}

impl Error for ParseActionError {}

impl FromStr for Action {
    type Err = ParseActionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (stage, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
            let (letters, micro) = rest.split_at(rest.find(|c: char| c.is_ascii_digit())?);
            let kind = ActionKind::ALL.into_iter().find(|kind| kind.letters() == letters)?;
            Some(Action::new(kind, stage.parse().ok()?, micro.parse().ok()?))
        };
        parse().ok_or_else(|| ParseActionError { text: text.to_string() })
    }
}

/// Parses the actions of one rank, separated by white space.
///
/// ```
/// use meshwork_pipeline::parse_actions;
///
/// assert_eq!(parse_actions("0F0 0SF0 0F1")?[1].to_string(), "0SF0");
/// assert_eq!(
///     parse_actions("0F0 0X1").unwrap_err().to_string(),
///     "\"0X1\" is no action: expected stage, kind (F, B, I, W, U, SF, RF, SB, RB) and micro-batch, as in 2F0 or 2SF0"
/// );
/// # Ok::<(), meshwork_pipeline::ParseActionError>(())
/// ```
pub fn parse_actions(text: &str) -> Result<Vec<Action>, ParseActionError> {
    text.split_whitespace().map(str::parse).collect()
}
