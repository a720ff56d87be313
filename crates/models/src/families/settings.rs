//! The settings of a `config.json`, read key by key: what those of all families have in common.

use crate::decoder_config::{DecoderConfig, Layers};
use crate::experts::{ExpertsConfig, MoeConfig};
use meshwork_tensor::op::{MlpKind, Rotary, RotaryScaling};
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

    fn take(&mut self, key: &str) -> Option<Value> {
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

    /// The share of a head's features that turn.
    pub(crate) fn turning_share(&mut self) -> f64 {
        let inside = self.value("rope_parameters").and_then(|of| of[SHARE].as_f64());
        let [share, of_older] = [SHARE, "rotary_pct"].map(|key| self.optional_number(key));
        inside.or(share).or(of_older).unwrap_or(1.0)
    }

    /// A model of which this share of a head's features turn.
    pub(crate) fn turning(&mut self, of: DecoderConfig, share: f64) -> DecoderConfig {
        let all = of.head_features();
        let features = (all as f64 * share) as usize;
        if !(2..=all).contains(&features) || !features.is_multiple_of(2) || !all.is_multiple_of(2) {
            self.problems.push(format!("{SHARE} is {share}: of heads of {all} features an even number must turn"));
        }
        let features = (features < all).then_some(features);
        DecoderConfig { rotary: of.rotary.map(|rotary| Rotary { features, ..rotary }), ..of }
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

    fn refuse(&mut self, key: &str, wanted: &str) -> usize {
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

    /// The rotary embeddings of layers without a window and with one, and the bases that each has by default.
    pub(crate) fn rotary_by_layer(&mut self, thetas: [f64; 2]) -> (Option<Rotary>, Option<Rotary>) {
        const KEY: &str = "rope_parameters";
        let of_window = self.number_or("rope_local_base_freq", thetas[1]);
        let nested = self.value(KEY).and_then(Value::as_object).filter(|of| of.values().any(Value::is_object)).cloned();
        let Some(nested) = nested else {
            self.default("rope_theta", json!(thetas[0]));
            let full = self.rotary();
            for key in [KEY, "rope_scaling"] {
                self.mark(key);
            }
            return (full, Some(Rotary::new(of_window)));
        };
        self.mark(KEY);
        let empty = Map::new();
        let mut of = |kind: &str, theta| {
            let mut inner = Settings::new(nested.get(kind).and_then(Value::as_object).unwrap_or(&empty));
            let rotary = inner.rotary_in(theta);
            self.problems.extend(inner.problems.into_iter().map(|problem| format!("{KEY}.{kind}: {problem}")));
            Some(rotary)
        };
        (of("full_attention", thetas[0]), of("sliding_attention", of_window))
    }

    /// The rotary embedding: `rope_theta` and `rope_scaling`, or both in `rope_parameters` of newer files.
    pub(crate) fn rotary(&mut self) -> Option<Rotary> {
        let theta = self.number_or("rope_theta", 10_000.0);
        let open = |key: &&str| self.value(key).is_some() && !self.taken.contains(*key);
        let given = ["rope_parameters", "rope_scaling"].into_iter().filter(open);
        let given: Vec<&str> = given.collect();
        let mut read = given.iter().map(|key| (*key, self.rotary_of(key, theta))).collect::<Vec<_>>().into_iter();
        let (first, second) = (read.next(), read.next());
        if let (Some((key, one)), Some((other_key, other))) = (&first, &second)
            && one != other
        {
            self.problems.push(format!("{key} and {other_key} say different things: keep one of them"));
        }
        Some(first.map_or(Rotary::new(theta), |(_, rotary)| rotary))
    }

    fn rotary_of(&mut self, key: &str, theta: f64) -> Rotary {
        let Some(Value::Object(scaling)) = self.value(key).cloned() else {
            self.refuse(key, "an object");
            return Rotary::new(theta);
        };
        let mut inner = Settings::new(&scaling);
        inner.taken.extend(self.taken.get(SHARE).cloned());
        let rotary = inner.rotary_in(theta);
        self.problems.extend(inner.problems.into_iter().map(|problem| format!("{key}: {problem}")));
        rotary
    }

    /// Of the settings of a rotary embedding itself.
    fn rotary_in(&mut self, theta: f64) -> Rotary {
        let theta = self.number_or("rope_theta", theta);
        let kinds: Vec<Value> = ["rope_type", "type"].into_iter().filter_map(|key| self.take(key)).collect();
        let kind = match &*kinds {
            [one, other] if one != other => {
                self.problems.push(format!("rope_type is {one} and type {other}: keep one of them"));
                "default".to_owned()
            }
            [] if self.value("factor").is_some() => {
                self.problems.push(format!("it has a factor and no rope_type: supported is {ROPES}"));
                "default".to_owned()
            }
            [] if self.values.values().any(Value::is_object) => {
                self.problems.push("it has settings for each kind of layer: supported is one for all".to_owned());
                "default".to_owned()
            }
            [] => "default".to_owned(),
            [kind, ..] => kind.as_str().map_or_else(|| kind.to_string(), str::to_owned),
        };
        self.only(SHARE, &[json!(1)]);
        let scaling = match &*kind {
            "default" => None,
            "linear" => Some(RotaryScaling::linear(self.number("factor"))),
            "llama3" => Some(RotaryScaling {
                factor: self.number("factor"),
                low_frequency_factor: self.number("low_freq_factor"),
                high_frequency_factor: self.number("high_freq_factor"),
                original_positions: self.size("original_max_position_embeddings"),
            }),
            other => {
                self.problems.push(format!("rope_type is {other:?}: supported is {ROPES}"));
                None
            }
        };
        Rotary { scaling, ..Rotary::new(theta) }
    }
}

/// The share of a head's features that turn.
const SHARE: &str = "partial_rotary_factor";

/// The kinds of rotary embeddings.
const ROPES: &str = "\"default\", \"linear\" or \"llama3\"";

/// Whether two values are equal: 1 is 1.0.
fn same(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

/// The experts of a Mixtral: the best of a softmax, with weights that add up to 1, in every layer and without a
/// capacity.
pub(crate) fn experts(width: usize, num_experts: usize, top_k: usize) -> ExpertsConfig {
    ExpertsConfig {
        moe: MoeConfig { num_experts, top_k, ..MoeConfig::default() },
        every_n_layers: 1,
        num_shared_experts: 0,
        expert_hidden_size: width,
        over_tp: false,
    }
}
