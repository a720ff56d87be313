//! Capacity: the number of tokens of a sequence that an expert takes.
//!
//! Switch (equation 3): "expert capacity = tokens per batch / number of experts × capacity factor". GShard (section
//! 2.2) sets capacities for groups of tokens, 2N/(G·E) for two experts of each of N/G tokens. Here the groups are the
//! sequences. So whether a token overflows its expert depends only on its own sequence, not on the mesh or on other
//! sequences of a micro-batch. First choices go before second choices, and earlier tokens before later ones (GShard,
//! algorithm 1). A choice whose expert is full is dropped, and the token passes through the residual connection; or it
//! is rerouted to the token's next best expert with room ([`Overflow`](crate::Overflow)).

use crate::{MoeConfig, RouterKind};

/// `⌈factor · k · tokens / experts⌉` tokens of a sequence for each expert, at least one; `None` if the factor is 0 and
/// there is no limit. With expert choice, experts take at most all tokens, and an even share if the factor is 0.
pub fn capacity(config: &MoeConfig, tokens: usize) -> Option<usize> {
    let factor = match (config.capacity_factor, config.router) {
        (0.0, RouterKind::ExpertChoice) => 1.0,
        (0.0, _) => return None,
        (factor, _) => factor,
    };
    let share = factor * (config.top_k * tokens) as f64 / config.num_experts as f64;
    Some((share.ceil() as usize).clamp(1, tokens.max(1)))
}
