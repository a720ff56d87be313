//! Gemma 2 (Gemma Team, 2024): a Gemma with norms behind attention and feed-forward network too, its own factor of
//! scores, soft caps of scores and logits, and a window in every other layer.

use super::prelude::*;
use super::{gemma, gemma3};

pub(crate) const FAMILY: Family = Family {
    class: "Gemma2ForCausalLM",
    model_type: "gemma2",
    read: |settings| {
        settings.default("final_logit_softcapping", json!(30.0));
        settings.default("attn_logit_softcapping", json!(50.0));
        let score_cap = settings.optional_number("attn_logit_softcapping");
        let of = gemma3::surrounded(settings, Layers::AllBut(2));
        (DecoderConfig { score_cap, ..gemma::read(settings, of) }, None)
    },
    write: |of, _| {
        let mut own = gemma3::write(of);
        own["attn_logit_softcapping"] = json!(of.score_cap);
        own
    },
    ..gemma::FAMILY
};
