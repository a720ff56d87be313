//! The words that keys and flags take, and what they stand for in the other crates.

use std::fmt;

use meshwork_engine::{Recompute, Verify};
use meshwork_models::experts::{AuxLossScope, Overflow, RouterKind};
use meshwork_tensor::Precision;
use meshwork_tensor::tape::{Encoding, HalfType};
use serde::Serialize;
use toml::Value;

use super::setting::{Setting, words};

words! {
    /// `model.kind`.
    ModelKind {
        /// GPT-2: LayerNorm, learned positions, GELU, biases.
        Gpt2 = "gpt2",
        /// Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.
        Llama = "llama",
    }

    /// `moe.router`.
    MoeRouter {
        /// The largest of a softmax.
        Topk = "topk",
        /// The largest one of a softmax: Switch.
        Switch = "switch",
        /// The two largest of a softmax, the second in proportion to its weight: GShard.
        Gshard = "gshard",
        /// Each expert takes its best tokens.
        ExpertChoice = "expert_choice",
        /// The largest of sigmoids plus a bias that balances the load: DeepSeek-V3.
        Bias = "bias",
    }

    /// `moe.aux_loss_scope`.
    AuxScope {
        /// Each sequence by itself.
        Sequence = "sequence",
        /// The sequences that all ranks compute at once.
        GlobalBatch = "global_batch",
    }

    /// `moe.overflow`.
    MoeOverflow {
        /// The token passes the expert by.
        Drop = "drop",
        /// It goes to its next best expert with room.
        Reroute = "reroute",
    }

    /// `training.dtype` and `training.reduce_dtype`.
    Dtype {
        /// Single precision.
        F32 = "f32",
        /// bfloat16.
        Bf16 = "bf16",
        /// Half precision.
        F16 = "f16",
    }

    /// `training.matmul_dtype`.
    MatmulDtype {
        /// Products of operands as they are.
        F32 = "f32",
        /// Products of bf16, added up in f32.
        Bf16 = "bf16",
    }

    /// `optimizer.name`.
    OptimizerName {
        /// [`AdamW`](meshwork_optim::AdamW).
        Adamw = "adamw",
        /// [`Sgd`](meshwork_optim::Sgd).
        Sgd = "sgd",
        /// [`Lamb`](meshwork_optim::Lamb).
        Lamb = "lamb",
        /// [`Adafactor`](meshwork_optim::Adafactor).
        Adafactor = "adafactor",
        /// [`Muon`](meshwork_optim::Muon) for hidden matrices, AdamW for everything else.
        Muon = "muon",
        /// [`Adam8bit`](meshwork_optim::Adam8bit) for hidden matrices, AdamW for everything else.
        Adam8bit = "adam8bit",
    }

    /// `lr_scheduler.decay`.
    DecayName {
        /// [`Decay::None`](meshwork_optim::Decay::None).
        None = "none",
        /// [`Decay::Linear`](meshwork_optim::Decay::Linear).
        Linear = "linear",
        /// [`Decay::Cosine`](meshwork_optim::Decay::Cosine).
        Cosine = "cosine",
    }

    /// `training.verify`, unless it is a number.
    VerifyWord {
        /// In no step.
        Off = "off",
        /// In the first step.
        FirstStep = "first_step",
    }

    /// `memory.recompute`, unless it is a number.
    RecomputeWord {
        /// Nothing.
        None = "none",
        /// Norms and activation functions.
        Selective = "selective",
        /// Each layer from its input.
        Full = "full",
        /// Groups of layers, √n of them in a stage of n.
        Sqrt = "sqrt",
        /// Each stage from its input.
        Stage = "stage",
    }

    /// `memory.saved_dtype`.
    SavedDtype {
        /// As they are.
        F32 = "f32",
        /// bfloat16.
        Bf16 = "bf16",
        /// IEEE floats of 16 bits.
        F16 = "f16",
    }

    /// `memory.saved_encoding`.
    SavedEncoding {
        /// Vectors.
        Dense = "dense",
        /// Without zeros.
        Sparse = "sparse",
    }

    /// `memory.offload`.
    OffloadWord {
        /// Nothing.
        None = "none",
        /// States of the optimizer.
        Optimizer = "optimizer",
        /// What forward keeps for backward.
        Activations = "activations",
        /// What AQ-SGD keeps of samples.
        Samples = "samples",
        /// All of it, and gradients.
        All = "all",
    }

    /// `data.end_of_text` and `data.beginning_of_text`, unless it is an id.
    EndOfTextWord {
        /// That of the tokenizer.
        Auto = "auto",
        /// None.
        None = "none",
    }

    /// `data.format`.
    TextFormat {
        /// What each file is by its content.
        Auto = "auto",
        /// One document each.
        Text = "text",
        /// A document a line.
        JsonLines = "json_lines",
    }

    /// `data.token_type`.
    TokenType {
        /// u16, unless the ids look wider.
        Auto = "auto",
        /// 8 bits.
        U8 = "u8",
        /// 16 bits.
        U16 = "u16",
        /// 32 bits.
        U32 = "u32",
        /// 32 bits with a sign.
        I32 = "i32",
        /// 64 bits.
        U64 = "u64",
        /// 64 bits with a sign.
        I64 = "i64",
    }

    /// `validation.compression`.
    ValidationCompression {
        /// Validation compresses what training does.
        AsTrained = "as_trained",
        /// It compresses nothing.
        Off = "off",
        /// One pass of each.
        Both = "both",
    }

    /// `compress.rounding`.
    RoundingName {
        /// To the nearest code.
        Nearest = "nearest",
        /// Up or down at random.
        Stochastic = "stochastic",
    }
}

/// `training.verify`: a word, or a number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum VerifySteps {
    /// `"off"` or `"first_step"`.
    Word(VerifyWord),
    /// In every N-th step.
    Every(u64),
}

impl Setting for VerifySteps {
    fn read(value: Option<&Value>) -> Option<Self> {
        match value? {
            Value::String(_) => VerifyWord::read(value).map(Self::Word),
            _ => u64::read(value).map(Self::Every),
        }
    }
}

/// `training.loss_scale`: a word, or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum LossScaling {
    /// `"dynamic"`.
    #[serde(serialize_with = "dynamic")]
    Dynamic,
    /// The same in all steps.
    Fixed(u64),
}

impl LossScaling {
    /// The word.
    pub const DYNAMIC: &str = "dynamic";
}

fn dynamic<S: serde::Serializer>(serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(LossScaling::DYNAMIC)
}

impl Setting for LossScaling {
    fn read(value: Option<&Value>) -> Option<Self> {
        match value? {
            Value::String(word) => (word == Self::DYNAMIC).then_some(Self::Dynamic),
            _ => u64::read(value).map(Self::Fixed),
        }
    }
}

/// `memory.recompute`: a word, or a number of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Recomputed {
    /// What it names.
    Word(RecomputeWord),
    /// The first layers of each stage.
    Layers(usize),
}

impl Setting for Recomputed {
    fn read(value: Option<&Value>) -> Option<Self> {
        match value? {
            Value::String(_) => RecomputeWord::read(value).map(Self::Word),
            _ => usize::read(value).map(Self::Layers),
        }
    }
}

impl fmt::Display for Recomputed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => f.write_str(word.name()),
            Self::Layers(layers) => write!(f, "{layers}"),
        }
    }
}

impl From<Recomputed> for Recompute {
    fn from(recomputed: Recomputed) -> Self {
        match recomputed {
            Recomputed::Word(RecomputeWord::None) => Self::None,
            Recomputed::Word(RecomputeWord::Selective) => Self::Selective,
            Recomputed::Word(RecomputeWord::Full) => Self::Full,
            Recomputed::Word(RecomputeWord::Sqrt) => Self::Sqrt,
            Recomputed::Word(RecomputeWord::Stage) => Self::Stage,
            Recomputed::Layers(layers) => Self::Layers(layers),
        }
    }
}

/// `data.end_of_text` and `data.beginning_of_text`: a word, or an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum EndOfText {
    /// `"auto"` or `"none"`.
    Word(EndOfTextWord),
    /// This id.
    Id(u32),
}

impl Setting for EndOfText {
    fn read(value: Option<&Value>) -> Option<Self> {
        match value? {
            Value::String(_) => EndOfTextWord::read(value).map(Self::Word),
            id => id.as_integer()?.try_into().ok().map(Self::Id),
        }
    }
}

impl From<VerifySteps> for Verify {
    fn from(steps: VerifySteps) -> Self {
        match steps {
            VerifySteps::Word(VerifyWord::Off) => Self::Off,
            VerifySteps::Word(VerifyWord::FirstStep) => Self::FirstStep,
            VerifySteps::Every(steps) => Self::Every(steps),
        }
    }
}

impl From<MoeRouter> for RouterKind {
    fn from(router: MoeRouter) -> Self {
        match router {
            MoeRouter::Topk => Self::TopK,
            MoeRouter::Switch => Self::Switch,
            MoeRouter::Gshard => Self::Gshard,
            MoeRouter::ExpertChoice => Self::ExpertChoice,
            MoeRouter::Bias => Self::Bias,
        }
    }
}

impl From<MoeOverflow> for Overflow {
    fn from(overflow: MoeOverflow) -> Self {
        match overflow {
            MoeOverflow::Drop => Self::Drop,
            MoeOverflow::Reroute => Self::Reroute,
        }
    }
}

impl From<AuxScope> for AuxLossScope {
    fn from(scope: AuxScope) -> Self {
        match scope {
            AuxScope::Sequence => Self::Sequence,
            AuxScope::GlobalBatch => Self::GlobalBatch,
        }
    }
}

impl From<SavedDtype> for Option<Encoding> {
    fn from(dtype: SavedDtype) -> Self {
        match dtype {
            SavedDtype::F32 => None,
            SavedDtype::Bf16 => Some(Encoding::Half(HalfType::Bf16)),
            SavedDtype::F16 => Some(Encoding::Half(HalfType::F16)),
        }
    }
}

impl From<SavedEncoding> for Option<Encoding> {
    fn from(encoding: SavedEncoding) -> Self {
        match encoding {
            SavedEncoding::Dense => None,
            SavedEncoding::Sparse => Some(Encoding::Sparse),
        }
    }
}

impl MatmulDtype {
    /// The corresponding precision of a device.
    #[must_use]
    pub const fn precision(self) -> Precision {
        match self {
            Self::F32 => Precision::F32,
            Self::Bf16 => Precision::Bf16,
        }
    }
}
