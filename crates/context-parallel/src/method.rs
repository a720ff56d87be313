//! The methods by which ranks of cp share out attention.

use meshwork_core::debug_as_display;
use std::fmt;
use std::str::FromStr;

/// What ranks of cp exchange around an attention. A rank has `s/cp` tokens of width `h`, with keys and values of width
/// `k` together; in elements for each sequence, rank and layer, forward:
///
/// | method | sends | needs |
/// |---|---|---|
/// | all-gather | `(cp-1) · s/cp · k` | memory for `s · k` |
/// | all-to-all | `(cp-1)/cp · s/cp · (2h + k)` | heads of queries on each rank divisible by cp |
/// | ring | `(cp-1) · s/cp · k`, while attention computes | memory for `2 · s/cp · k` |
/// | hybrid, R places with n = cp/R ranks | `(n-1)/n · s/cp · (2h + k)`, then `(R-1) · s/cp · k` as ring | heads of queries on each rank divisible by n |
///
/// Each rank receives as much. Backward sends as much as forward; a ring also the gradients of keys and values, in f32.
/// Where heads of keys and values are fewer than the ranks that exchange heads, each of these gets a copy of the one
/// that its queries read: instead of `k/n` the width of one head, twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Keys and values of all tokens come to every rank (Llama 3, section 3.3.2).
    AllGather,
    /// Each rank gets all tokens of some of the heads (DeepSpeed-Ulysses, arXiv:2309.14509).
    AllToAll,
    /// Keys and values travel from rank to rank while attention computes (Ring Attention, arXiv:2310.01889).
    Ring,
    /// All-to-all between neighbours, a ring over the neighbourhoods (USP, arXiv:2405.07719).
    Hybrid {
        /// Places of the ring: divides cp.
        ring_degree: usize,
    },
}

/// A word that names no method.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} is no method of context parallelism: use all_gather, all_to_all, ring or, with a ring of R places, hybrid=R"
)]
pub struct MethodError(pub String);

debug_as_display!(MethodError);

impl FromStr for Method {
    type Err = MethodError;

    fn from_str(text: &str) -> Result<Self, MethodError> {
        let ring_degree = || text.strip_prefix("hybrid=")?.parse().ok().filter(|&degree| degree > 0);
        match text {
            "all_gather" => Ok(Self::AllGather),
            "all_to_all" => Ok(Self::AllToAll),
            "ring" => Ok(Self::Ring),
            _ => ring_degree()
                .map(|ring_degree| Self::Hybrid { ring_degree })
                .ok_or_else(|| MethodError(text.to_owned())),
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllGather => f.write_str("all_gather"),
            Self::AllToAll => f.write_str("all_to_all"),
            Self::Ring => f.write_str("ring"),
            Self::Hybrid { ring_degree } => write!(f, "hybrid={ring_degree}"),
        }
    }
}
