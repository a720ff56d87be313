//! The settings of a `config.json`, read key by key: what those of all families have in common.

use crate::decoder_config::Layers;
use crate::experts::{ExpertsConfig, MoeConfig};
use meshwork_tensor::op::MlpKind;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// Reads settings, and collects what is wrong with them.
#[derive(Debug)]
pub(crate) struct Settings<'a> {
    pub(crate) values: &'a Map<String, Value>,
    /// The values of keys that are not there.
    defaults: BTreeMap<&'static str, Value>,
    /// The keys that were read, which are no longer held to one value.
    pub(crate) taken: BTreeSet<String>,
    /// The keys whose values were asked for.
    pub(crate) asked: RefCell<BTreeSet<String>>,
    pub(crate) problems: Vec<String>,
}

impl<'a> Settings<'a> {
    pub(crate) fn new(values: &'a Map<String, Value>) -> Self {
        Self {
            values,
            defaults: BTreeMap::new(),
            taken: BTreeSet::new(),
            asked: RefCell::default(),
            problems: Vec::new(),
        }
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.values.get(key).or_else(|| self.defaults.get(key)).filter(|value| !value.is_null())
    }

    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.taken.insert(key.to_owned());
        self.value(key).cloned()
    }

    /// The value of a key, if it is not there.
    pub(crate) fn default(&mut self, key: &'static str, value: Value) {
        self.defaults.insert(key, value);
    }

    /// The value of a key that older files have under another name.
    pub(crate) fn also(&mut self, name: &str, key: &'static str) {
        if let Some(value) = self.take(name) {
            self.default(key, value);
        }
    }

    /// Whether a key is there.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// Counts a key as read.
    pub(crate) fn mark(&mut self, key: &str) {
        self.taken.insert(key.to_owned());
    }

    /// A whole number that may be zero, with a default.
    pub(crate) fn any_size_or(&mut self, key: &str, default: usize) -> usize {
        if self.value(key).and_then(Value::as_u64) == Some(0) {
            self.mark(key);
            return 0;
        }
        self.size_or(key, default)
    }

    /// A GELU in one of its forms.
    pub(crate) fn gelu(&mut self, key: &str, default: &str) -> MlpKind {
        let form = self.take(key).unwrap_or_else(|| default.into());
        match form.as_str() {
            Some("gelu") => MlpKind::ExactGelu,
            Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => MlpKind::Gelu,
            _ => {
                self.refuse(key, "\"gelu\", \"gelu_new\", \"gelu_pytorch_tanh\" or \"gelu_fast\"");
                MlpKind::Gelu
            }
        }
    }

    /// A number above zero that must be there.
    pub(crate) fn size(&mut self, key: &str) -> usize {
        self.taken.insert(key.to_owned());
        match self.value(key).map(Value::as_u64) {
            Some(Some(size)) if size > 0 => usize::try_from(size).unwrap_or(usize::MAX),
            Some(_) => self.refuse(key, "a whole number above 0"),
            None => {
                self.problems.push(format!("{key} is missing"));
                1
            }
        }
    }

    /// The same, if it is there.
    pub(crate) fn optional_size(&mut self, key: &str) -> Option<usize> {
        self.take(key).map(|_| self.size(key))
    }

    /// The same, with a default.
    pub(crate) fn size_or(&mut self, key: &str, default: usize) -> usize {
        self.optional_size(key).unwrap_or(default)
    }

    /// A number, if it is there.
    pub(crate) fn optional_number(&mut self, key: &str) -> Option<f64> {
        let value = self.take(key)?;
        value.as_f64().or_else(|| {
            self.refuse(key, "a number");
            None
        })
    }

    pub(crate) fn number_or(&mut self, key: &str, default: f64) -> f64 {
        self.optional_number(key).unwrap_or(default)
    }

    /// A number that must be there.
    pub(crate) fn number(&mut self, key: &str) -> f64 {
        if self.value(key).is_none() {
            self.problems.push(format!("{key} is missing"));
        }
        self.number_or(key, 1.0)
    }

    pub(crate) fn flag_or(&mut self, key: &str, default: bool) -> bool {
        match self.take(key).map(|value| value.as_bool()) {
            None => default,
            Some(Some(flag)) => flag,
            Some(None) => {
                self.refuse(key, "true or false");
                default
            }
        }
    }

    pub(super) fn refuse(&mut self, key: &str, wanted: &str) -> usize {
        let value = self.values.get(key).cloned().unwrap_or_default();
        self.problems.push(format!("{key} is {value}: it must be {wanted}"));
        1
    }

    /// A setting that this family has in one form only. A missing one has that form, and so has one that was read.
    pub(crate) fn only(&mut self, key: &str, valid: &[Value]) {
        if self.taken.contains(key) {
            return;
        }
        if let Some(value) = self.value(key).filter(|value| !valid.iter().any(|valid| same(valid, value))) {
            let valid: Vec<String> = valid.iter().map(Value::to_string).collect();
            let valid = if valid.is_empty() { "none".to_owned() } else { valid.join(" or ") };
            self.problems.push(format!("{key} is {value}: supported is {valid}"));
        }
    }

    /// One probability of dropout, which all of these keys have.
    pub(crate) fn one_dropout(&mut self, [key, others @ ..]: [&str; 3], default: f64) -> f32 {
        let dropout = self.number_or(key, default);
        for other in others {
            let probability = self.number_or(other, default);
            if probability != dropout {
                self.problems.push(format!(
                    "{other} is {probability} and {key} {dropout}: supported is one probability for all"
                ));
            }
        }
        dropout as f32
    }

    /// The first layers, of which none has experts.
    pub(crate) fn dense_layers(&mut self, key: &str, default: usize) -> usize {
        let (dense, layers) = (self.any_size_or(key, default), self.size("num_hidden_layers"));
        if dense >= layers && self.problems.is_empty() {
            self.problems.push(format!("{key} is {dense}: no layer of {layers} has experts"));
        }
        dense
    }

    /// The number of the word that a key has, the first without the key.
    pub(crate) fn one_of<const N: usize>(&mut self, key: &str, words: [&str; N]) -> usize {
        let Some(given) = self.take(key) else { return 0 };
        words.iter().position(|word| given == *word).unwrap_or_else(|| {
            self.refuse(key, &words.map(|word| format!("{word:?}")).join(" or "));
            0
        })
    }

    /// The layers of a list, none of which has experts, of a model in which every so many layers have some: the first
    /// ones.
    pub(crate) fn dense_list(&mut self, key: &str, every: usize) -> usize {
        let (listed, layers) = (self.take(key).unwrap_or(json!([])), self.size("num_hidden_layers"));
        let of = |dense: usize| ExpertsConfig { every_n_layers: every, first_dense_layers: dense, ..experts(0, 1, 1) };
        let is_listed = |layer: usize| listed.as_array().is_some_and(|all| all.iter().any(|of| of == layer));
        let fits =
            |dense: &usize| (0..layers).all(|layer| of(*dense).has(layer) == (of(0).has(layer) && !is_listed(layer)));
        (0..layers).find(fits).unwrap_or_else(|| {
            self.refuse(key, "the first layers, and not all that have experts");
            0
        })
    }

    /// A size that must divide another one.
    pub(crate) fn divides(&mut self, (key, divisor): (&str, usize), (of_key, size): (&str, usize)) {
        if self.problems.is_empty() && !size.is_multiple_of(divisor) {
            self.problems.push(format!("{key} {divisor} does not divide {of_key} {size}"));
        }
    }

    /// `sliding_window`. `default` is that of `transformers`, for a file without the key; null is none.
    pub(crate) fn window(&mut self, default: Option<usize>) -> Option<usize> {
        const KEY: &str = "sliding_window";
        self.taken.insert(KEY.to_owned());
        match self.values.get(KEY) {
            None => default,
            Some(Value::Null) => None,
            Some(_) => Some(self.size(KEY)),
        }
    }

    /// A window and the layers that have it: `layer_types`, or else `default`.
    pub(crate) fn windows(&mut self, window: Option<usize>, default: Layers) -> (Option<usize>, Layers) {
        match (window, self.window_layers(default)) {
            (Some(window), Some(layers)) => (Some(window), layers),
            _ => (None, Layers::All),
        }
    }

    /// The layers with a window; none if `layer_types` says so.
    fn window_layers(&mut self, default: Layers) -> Option<Layers> {
        const KEY: &str = "layer_types";
        let (Some(types), layers) = (self.take(KEY), self.size("num_hidden_layers")) else {
            return Some(default);
        };
        let kinds: Option<Vec<bool>> = types.as_array().and_then(|types| {
            let kind = |kind: &Value| match kind.as_str() {
                Some("sliding_attention") => Some(true),
                Some("full_attention") => Some(false),
                _ => None,
            };
            types.iter().map(kind).collect()
        });
        let kinds = kinds.filter(|kinds| kinds.len() == layers);
        let first = kinds.iter().flatten().position(|&window| window);
        if kinds.is_some() && first.is_none() {
            return None;
        }
        let candidates = (2..=layers).map(Layers::AllBut);
        let found = [Layers::All, Layers::From(first.unwrap_or(0))].into_iter().chain(candidates).find(|of| {
            kinds.as_ref().is_some_and(|kinds| kinds.iter().enumerate().all(|(layer, &kind)| of.has(layer) == kind))
        });
        if found.is_none() {
            self.problems.push(format!(
                "layer_types is {types}: supported are \"full_attention\" and \"sliding_attention\" for each of \
                 {layers} layers, the latter in all, from one on, or in all but every so many"
            ));
        }
        found.or(Some(default))
    }

    /// Experts: the best of a softmax, with weights that add up to 1, in every layer and without a capacity. Whether
    /// the settings ask for the losses of routers (`output_router_logits`) does not matter: a run sets their factors.
    pub(crate) fn experts(&mut self, count_key: &str, count: usize) -> ExpertsConfig {
        let (num_experts, top_k) = (self.size_or(count_key, count), self.size_or("num_experts_per_tok", 2));
        if top_k > num_experts {
            let problem = format!("num_experts_per_tok is {top_k}: it must be at most {count_key}, {num_experts}");
            self.problems.push(problem);
        }
        experts(0, num_experts, top_k)
    }
}

/// Whether two values are equal: 1 is 1.0.
pub(super) fn same(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

/// The experts of a Mixtral: the best of a softmax, with weights that add up to 1, in every layer and without a
/// capacity.
pub(crate) fn experts(width: usize, num_experts: usize, top_k: usize) -> ExpertsConfig {
    ExpertsConfig {
        moe: MoeConfig { num_experts, top_k, ..MoeConfig::default() },
        every_n_layers: 1,
        first_dense_layers: 0,
        num_shared_experts: 0,
        expert_hidden_size: width,
        over_tp: false,
    }
}
