//! The compression between the stages of a trained model, which it may need where it is used: models that were trained
//! with TopK do well only with it (docs/compression.md).

use crate::config::Config;
use meshwork_checkpoint::Index;
use meshwork_compress::{Scheme, Shape};
use meshwork_models::huggingface::Pretrained;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The key of meshwork's own entry in the metadata of exported weights.
const MESHWORK: &str = "meshwork";

/// `[compress]` of a run, and the layers before its cuts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Compressed {
    compress: Value,
    cuts: Vec<usize>,
}

impl Compressed {
    /// The compression of the run of a checkpoint, if it had any.
    pub fn of_checkpoint(index: &Index) -> Option<Self> {
        let of = |name: &str| index.metadata.get(name);
        let compress = of("run")?.get("config")?.get("compress")?;
        Self::after(index.step, compress, of(crate::checkpoint::CUTS)?)
    }

    /// The compression of a run with these layers before its cuts, after `step` steps.
    pub fn of_run(config: &Config, cuts: &[usize], step: u64) -> Option<Self> {
        Self::after(step, &json!(config.compress), &json!(cuts))
    }

    /// None of a run that ended before it compressed.
    fn after(step: u64, compress: &Value, cuts: &Value) -> Option<Self> {
        let begins = compress.get("start_step").and_then(Value::as_u64).unwrap_or(1);
        Self::new(compress, cuts).filter(|_| begins <= step)
    }

    /// The compression of the run that an export is of.
    pub fn of_export(pretrained: &Pretrained) -> Option<Self> {
        let said: Value = serde_json::from_str(pretrained.metadata().get(MESHWORK)?).ok()?;
        Self::new(said.get("compress")?, said.get("cuts")?)
    }

    fn new(compress: &Value, cuts: &Value) -> Option<Self> {
        let scheme = |value: &Value| value.as_str().and_then(|text| text.parse::<Scheme>().ok());
        let some = |value: &Value| value.as_str() != Some("none") && scheme(value).is_some();
        // Names of feedback and of rounding are no schemes.
        if !compress.as_object()?.values().any(some) {
            return None;
        }
        let cuts = cuts.as_array()?.iter().filter_map(|cut| cut.as_u64().map(|cut| cut as usize));
        Some(Self { compress: compress.clone(), cuts: cuts.collect() })
    }

    /// Its form in the metadata of an export.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let said = json!({"compress": self.compress, "cuts": self.cuts});
        [(MESHWORK.to_owned(), said.to_string())].into()
    }

    /// The scheme of activations, if they were compressed somewhere.
    fn activations(&self) -> Option<&str> {
        self.compress.get("activations")?.as_str().filter(|text| *text != "none" && !self.cuts.is_empty())
    }

    /// The settings with which a model on any mesh compresses at these cuts.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let Some(activations) = self.activations() else { return Vec::new() };
        let rounding = self.compress.get("rounding").and_then(Value::as_str).unwrap_or("nearest");
        vec![
            ("compress.activations", activations.to_owned()),
            ("compress.rounding", rounding.to_owned()),
            ("compress.virtual_cuts", format!("{:?}", self.cuts)),
        ]
    }

    /// Whether every mesh loses the same: canonical numerics then take it.
    pub fn is_canonical(&self, features: usize) -> bool {
        let scheme = self.activations().map(str::parse::<Scheme>);
        match (scheme, Shape::matrix(1, features)) {
            (None, _) => true,
            (Some(Ok(scheme)), Ok(shape)) => scheme.takes_rows_apart(shape),
            _ => false,
        }
    }
}
