//! The words that keys and flags take, and their counterparts in the other crates.

use super::setting::{Setting, stands_for, words};
use meshwork_compress::Rounding;
use meshwork_engine::{Recompute, Verify};
use meshwork_models::experts::{AuxLossScope, Overflow, RouterKind};
use meshwork_models::huggingface;
use meshwork_mpi::Reduction;
use meshwork_optim::Decay;
use meshwork_tensor::Precision;
use meshwork_tensor::tape::{Encoding, HalfType};
use serde::Serialize;
use std::fmt;
use toml::Value;

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
    MoeOverflow { Drop = "drop", Reroute = "reroute" }
    /// `comm.kind`.
    CommKind { Auto = "auto", Threads = "threads", Mpi = "mpi", Tcp = "tcp" }
    /// `comm.reduction`.
    ReductionName { Tree = "tree", Native = "native" }
    /// `parallelism.elastic`.
    Elastic { Off = "off", Dp = "dp" }
    /// `parallelism.context_parallel_method`.
    ContextMethod {
        None = "none",
        AllGather = "all_gather",
        AllToAll = "all_to_all",
        Ring = "ring",
        Hybrid = "hybrid",
        /// The method that [`Sizes`](meshwork_context_parallel::Sizes) finds best.
        Auto = "auto",
    }
    /// `parallelism.context_parallel_order`.
    ContextOrder { Zigzag = "zigzag", Contiguous = "contiguous", ByDocument = "by_document" }
    /// `training.dtype` and `training.reduce_dtype`.
    Dtype { F32 = "f32", Bf16 = "bf16", F16 = "f16" }
    /// `training.matmul_dtype`.
    MatmulDtype { F32 = "f32", Tf32 = "tf32", Bf16 = "bf16" }
    /// `training.loss_scale`, unless it is a number.
    LossScaleWord { Dynamic = "dynamic" }
    /// `training.objective`.
    Objective { Pretrain = "pretrain", Sft = "sft", Dpo = "dpo" }
    /// `optimizer.name`.
    OptimizerName { Adamw = "adamw", Sgd = "sgd", Lamb = "lamb", Adafactor = "adafactor", Muon = "muon", Adam8bit = "adam8bit" }
    /// `lr_scheduler.decay`.
    DecayName { None = "none", Linear = "linear", Cosine = "cosine" }
    /// `training.verify`, unless it is a number.
    VerifyWord { Off = "off", FirstStep = "first_step" }
    /// `memory.recompute`, unless it is a number.
    RecomputeWord { None = "none", Selective = "selective", Full = "full", Sqrt = "sqrt", Stage = "stage" }
    /// `memory.saved_dtype`.
    SavedDtype { F32 = "f32", Bf16 = "bf16", F16 = "f16" }
    /// `memory.saved_encoding`.
    SavedEncoding { Dense = "dense", Sparse = "sparse" }
    /// `memory.offload`.
    OffloadWord { None = "none", Optimizer = "optimizer", Activations = "activations", Samples = "samples", All = "all" }
    /// `data.end_of_text` and `data.beginning_of_text`, unless it is an id.
    EndOfTextWord { Auto = "auto", None = "none" }
    /// `data.format`.
    TextFormat { Auto = "auto", Text = "text", JsonLines = "json_lines" }
    /// `data.overlong`.
    Overlong { Truncate = "truncate", Skip = "skip" }
    /// `data.token_type`.
    TokenType { Auto = "auto", U8 = "u8", U16 = "u16", U32 = "u32", I32 = "i32", U64 = "u64", I64 = "i64" }
    /// `lora.quantization`.
    Quantization { None = "none", Bf16 = "bf16", Int8 = "int8", Nf4 = "nf4" }
    /// `lora.export`.
    LoraExport { Merged = "merged", Adapter = "adapter" }
    /// `validation.compression`.
    ValidationCompression { AsTrained = "as_trained", Off = "off", Both = "both" }
    /// `compress.rounding`.
    RoundingName { Nearest = "nearest", Stochastic = "stochastic" }
}

impl Objective {
    /// Documents of an example: of a pair of answers, both.
    pub fn documents(self) -> usize {
        if self == Self::Dpo { 2 } else { 1 }
    }
}

/// A word, or a number in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum WordOr<W, N> {
    /// The word.
    Word(W),
    /// The number.
    Number(N),
}

/// `training.verify`: a word, or N to verify every N-th step.
pub type VerifySteps = WordOr<VerifyWord, u64>;
/// `training.loss_scale`: `"dynamic"`, or the scale of all steps.
pub type LossScaling = WordOr<LossScaleWord, u64>;
/// `memory.recompute`: a word, or the number of layers, the first of each stage.
pub type Recomputed = WordOr<RecomputeWord, usize>;
/// `data.end_of_text` and `data.beginning_of_text`: a word, or an id.
pub type EndOfText = WordOr<EndOfTextWord, u32>;

impl<W: Setting, N: Setting> Setting for WordOr<W, N> {
    fn read(value: Option<&Value>) -> Option<Self> {
        match value? {
            Value::String(_) => W::read(value).map(Self::Word),
            _ => N::read(value).map(Self::Number),
        }
    }
}

impl<W: fmt::Display, N: fmt::Display> fmt::Display for WordOr<W, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => word.fmt(f),
            Self::Number(number) => number.fmt(f),
        }
    }
}

stands_for! {
    MoeRouter for RouterKind { Topk => Self::TopK, Switch => Self::Switch, Gshard => Self::Gshard,
                               ExpertChoice => Self::ExpertChoice, Bias => Self::Bias }
    MoeOverflow for Overflow { Drop => Self::Drop, Reroute => Self::Reroute }
    AuxScope for AuxLossScope { Sequence => Self::Sequence, GlobalBatch => Self::GlobalBatch }
    DecayName for Decay { None => Self::None, Linear => Self::Linear, Cosine => Self::Cosine }
    ReductionName for Reduction { Tree => Self::Tree, Native => Self::Native }
    RoundingName for Rounding { Nearest => Self::Nearest, Stochastic => Self::Stochastic }
    Dtype for Option<HalfType> { F32 => None, Bf16 => Some(HalfType::Bf16), F16 => Some(HalfType::F16) }
    Dtype for huggingface::Dtype { F32 => Self::F32, Bf16 => Self::Bf16, F16 => Self::F16 }
    SavedDtype for Option<Encoding> { F32 => None, Bf16 => Some(Encoding::Half(HalfType::Bf16)),
                                      F16 => Some(Encoding::Half(HalfType::F16)) }
    SavedEncoding for Option<Encoding> { Dense => None, Sparse => Some(Encoding::Sparse) }
    VerifyWord for Verify { Off => Self::Off, FirstStep => Self::FirstStep }
    RecomputeWord for Recompute { None => Self::None, Selective => Self::Selective, Full => Self::Full,
                                  Sqrt => Self::Sqrt, Stage => Self::Stage }
}

impl From<VerifySteps> for Verify {
    fn from(steps: VerifySteps) -> Self {
        match steps {
            WordOr::Word(word) => word.into(),
            WordOr::Number(steps) => Self::Every(steps),
        }
    }
}

impl From<Recomputed> for Recompute {
    fn from(recomputed: Recomputed) -> Self {
        match recomputed {
            WordOr::Word(word) => word.into(),
            WordOr::Number(layers) => Self::Layers(layers),
        }
    }
}

impl MatmulDtype {
    /// The corresponding precision of a device.
    pub const fn precision(self) -> Precision {
        match self {
            Self::F32 => Precision::F32,
            Self::Tf32 => Precision::Tf32,
            Self::Bf16 => Precision::Bf16,
        }
    }
}
