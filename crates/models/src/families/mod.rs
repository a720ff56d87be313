//! The families of decoders: each is a row of [`DecoderConfig`](crate::decoder::DecoderConfig), with the settings and
//! tensors of its Hugging Face folders. A further family is a file here and a line of [`FAMILIES`].

mod deepseek_v2;
mod deepseek_v3;
mod family;
mod gemma;
mod gemma2;
mod gemma3;
pub mod gpt2;
mod gpt_neox;
mod latent;
pub mod llama;
pub(crate) mod mistral;
pub(crate) mod mixtral;
mod olmo2;
mod part;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
pub(crate) mod rotary;
mod settings;

pub use gpt2::GPT2;
pub use llama::LLAMA;

pub(crate) use family::Block;
pub use family::Family;
pub(crate) use part::TensorPart;
pub(crate) use settings::Settings;
#[cfg(test)]
pub(crate) use settings::experts;

/// Items that most families use.
mod prelude {
    pub(super) use super::family::{Block, Family, layer_types, turning_share};
    pub(super) use super::llama::{self, LLAMA};
    pub(super) use super::part::TensorPart;
    pub(super) use super::rotary;
    pub(super) use super::settings::Settings;
    pub(super) use crate::decoder_config::{DecoderConfig, Layers, Names, NormKind};
    pub(super) use crate::experts::ExpertsConfig;
    pub(super) use meshwork_tensor::op::{MlpKind, Rotary};
    pub(super) use meshwork_tensor_parallel::AttentionBias;
    pub(super) use serde_json::{Value, json};
}

/// All families.
pub const FAMILIES: &[&Family] = &[
    &gpt2::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &gemma::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &olmo2::FAMILY,
    &phi3::FAMILY,
    &gpt_neox::FAMILY,
    &deepseek_v2::FAMILY,
    &deepseek_v3::FAMILY,
];

impl Family {
    /// The family of a class of `transformers`.
    pub fn of_class(class: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().find(|family| family.class == class)
    }
}
