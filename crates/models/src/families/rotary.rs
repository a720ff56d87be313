//! Rotary embeddings in `config.json`: a table of their kinds, each with how its settings are read and written.

use super::settings::{Settings, same};
use crate::decoder_config::DecoderConfig;
use meshwork_tensor::op::{Divisors, LongRope, Rotary, RotaryScaling, Yarn};
use serde_json::{Map, Value, json};

/// A kind: its `rope_type`, and the scaling of its settings.
type Kind = (&'static str, fn(&mut Settings<'_>) -> Option<RotaryScaling>);

/// All kinds. The settings of each have those of the model beside them as defaults: [`SIZES`].
const KINDS: [Kind; 6] = [
    ("default", |_| None),
    ("linear", |of| Some(RotaryScaling::Linear { factor: of.number("factor") })),
    ("dynamic", |of| {
        let original_positions = of.size("max_position_embeddings");
        let factor = of.number("factor");
        Some(RotaryScaling::Dynamic { factor, original_positions, length: original_positions })
    }),
    ("llama3", |of| {
        Some(RotaryScaling::Llama3 {
            factor: of.number("factor"),
            low_frequency_factor: of.number("low_freq_factor"),
            high_frequency_factor: of.number("high_freq_factor"),
            original_positions: of.size(ORIGINAL),
        })
    }),
    ("yarn", |of| {
        Some(RotaryScaling::Yarn(Yarn {
            factor: of.number("factor"),
            beta_fast: of.weight("beta_fast").unwrap_or(32.0),
            beta_slow: of.weight("beta_slow").unwrap_or(1.0),
            truncate: of.flag_or("truncate", true),
            original_positions: of.size(ORIGINAL),
            mscale: of.weight("mscale"),
            mscale_all_dim: of.weight("mscale_all_dim"),
            attention_factor: of.optional_number("attention_factor"),
        }))
    }),
    ("longrope", |of| {
        let (length, original_positions) = (of.size("max_position_embeddings"), of.size(ORIGINAL));
        let factor = of.number_or("factor", length as f64 / original_positions as f64);
        let own = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original_positions as f64).ln()).sqrt() };
        Some(RotaryScaling::LongRope(LongRope {
            short: of.divisors("short_factor"),
            long: of.divisors("long_factor"),
            original_positions,
            length,
            attention_factor: of.number_or("attention_factor", own),
        }))
    }),
];

/// The settings of a kind.
pub(crate) fn write(of: RotaryScaling) -> Value {
    match of {
        RotaryScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RotaryScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
        RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_positions } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_frequency_factor,
            "high_freq_factor": high_frequency_factor,
            "original_max_position_embeddings": original_positions,
        }),
        RotaryScaling::Yarn(of) => {
            let mut all = json!({
                "rope_type": "yarn",
                "factor": of.factor,
                "beta_fast": of.beta_fast,
                "beta_slow": of.beta_slow,
                "truncate": of.truncate,
                "original_max_position_embeddings": of.original_positions,
            });
            let given = [
                ("mscale", of.mscale),
                ("mscale_all_dim", of.mscale_all_dim),
                ("attention_factor", of.attention_factor),
            ];
            given.into_iter().for_each(|(key, value)| value.into_iter().for_each(|value| all[key] = json!(value)));
            all
        }
        RotaryScaling::LongRope(of) => json!({
            "rope_type": "longrope",
            "short_factor": of.short.all(),
            "long_factor": of.long.all(),
            "original_max_position_embeddings": of.original_positions,
            "attention_factor": of.attention_factor,
        }),
    }
}

/// The positions that a model is said to have: those with which it was first trained, where frequencies are scaled by
/// how much longer its sequences are.
pub(crate) fn positions(of: &DecoderConfig) -> usize {
    match of.rotary.and_then(|rotary| rotary.scaling) {
        Some(RotaryScaling::Dynamic { original_positions, .. }) => original_positions,
        _ => of.seq_len,
    }
}

/// The problem of divisors that are not one for each pair of features that turns.
pub(crate) fn misfit(of: &DecoderConfig) -> Option<String> {
    let Rotary { features, scaling: Some(RotaryScaling::LongRope(rope)), .. } = of.rotary? else { return None };
    let pairs = features.unwrap_or(of.head_features()) / 2;
    let [short, long] = [rope.short, rope.long].map(|divisors| divisors.all().len());
    let problem = format!("short_factor has {short} numbers and long_factor {long}: {pairs} pairs of features turn");
    ([short, long] != [pairs; 2]).then_some(problem)
}

/// The share of a head's features that turn.
const SHARE: &str = "partial_rotary_factor";
/// Positions with which a model was first trained.
const ORIGINAL: &str = "original_max_position_embeddings";
/// Settings of the model that those of a rotary embedding go by.
const SIZES: [&str; 2] = ["max_position_embeddings", ORIGINAL];

impl Settings<'_> {
    /// The share of a head's features that turn.
    pub(crate) fn turning_share(&mut self) -> f64 {
        let inside = self.value("rope_parameters").and_then(|of| of[SHARE].as_f64());
        let [share, of_older] = [SHARE, "rotary_pct"].map(|key| self.optional_number(key));
        inside.or(share).or(of_older).unwrap_or(1.0)
    }

    /// The model with a rotary embedding of this share of each head's features.
    pub(crate) fn turning(&mut self, of: DecoderConfig, share: f64) -> DecoderConfig {
        let all = of.head_features();
        let features = (all as f64 * share) as usize;
        if !(2..=all).contains(&features) || !features.is_multiple_of(2) || !all.is_multiple_of(2) {
            self.problems.push(format!("{SHARE} is {share}: of heads of {all} features an even number must turn"));
        }
        let features = (features < all).then_some(features);
        DecoderConfig { rotary: of.rotary.map(|rotary| Rotary { features, ..rotary }), ..of }
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
            let values = nested.get(kind).and_then(Value::as_object).unwrap_or(&empty);
            Some(self.rotary_of(&format!("{KEY}.{kind}"), values, theta))
        };
        (of("full_attention", thetas[0]), of("sliding_attention", of_window))
    }

    /// The rotary embedding: `rope_theta` and `rope_scaling`, or both in `rope_parameters` of newer files.
    pub(crate) fn rotary(&mut self) -> Option<Rotary> {
        let theta = self.number_or("rope_theta", 10_000.0);
        let open = |key: &&str| self.value(key).is_some() && !self.taken.contains(*key);
        let given: Vec<&str> = ["rope_parameters", "rope_scaling"].into_iter().filter(open).collect();
        let mut read = Vec::new();
        for key in given {
            let of = match self.value(key).cloned() {
                Some(Value::Object(values)) => self.rotary_of(key, &values, theta),
                _ => {
                    self.refuse(key, "an object");
                    Rotary::new(theta)
                }
            };
            read.push((key, of));
        }
        if let [(key, one), (other_key, other)] = &read[..]
            && one != other
        {
            self.problems.push(format!("{key} and {other_key} say different things: keep one of them"));
        }
        Some(read.first().map_or(Rotary::new(theta), |(_, rotary)| *rotary))
    }

    /// The rotary embedding of the settings in `values`.
    fn rotary_of(&mut self, key: &str, values: &Map<String, Value>, theta: f64) -> Rotary {
        let mut inner = Settings::new(values);
        inner.taken.extend(self.taken.get(SHARE).cloned());
        for size in SIZES {
            let Some(outer) = self.value(size).cloned() else { continue };
            self.mark(size);
            if inner.value(size).is_some_and(|own| !same(own, &outer)) && size == ORIGINAL {
                self.problems.push(format!("{key}.{size} and {size} say different things: keep one of them"));
            }
            inner.default(size, outer);
        }
        if let Some(positions) = inner.value(SIZES[0]).cloned().filter(|_| !inner.has(ORIGINAL)) {
            inner.default(ORIGINAL, positions);
        }
        let rotary = inner.rotary_in(theta);
        self.problems.extend(inner.problems.into_iter().map(|problem| format!("{key}: {problem}")));
        rotary
    }

    /// Of the settings of a rotary embedding itself.
    fn rotary_in(&mut self, theta: f64) -> Rotary {
        let theta = self.number_or("rope_theta", theta);
        let kinds: Vec<Value> = ["rope_type", "type"].into_iter().filter_map(|key| self.take(key)).collect();
        let supported = || KINDS.map(|(name, _)| format!("{name:?}")).join(", ");
        let kind = match &*kinds {
            [one, other] if one != other => {
                self.problems.push(format!("rope_type is {one} and type {other}: keep one of them"));
                "default".to_owned()
            }
            [] if self.value("factor").is_some() => {
                self.problems.push(format!("it has a factor and no rope_type: supported is {}", supported()));
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
        let scaling = match KINDS.iter().find(|(name, _)| *name == kind) {
            Some((_, read)) => read(self),
            None => {
                self.problems.push(format!("rope_type is {kind:?}: supported is {}", supported()));
                None
            }
        };
        Rotary { scaling, ..Rotary::new(theta) }
    }

    /// A number that is given, and not 0.
    fn weight(&mut self, key: &str) -> Option<f64> {
        self.optional_number(key).filter(|&number| number != 0.0)
    }

    /// A number above 0 for each pair of features.
    fn divisors(&mut self, key: &str) -> Divisors {
        let number = |value: &Value| value.as_f64().filter(|&number| number > 0.0).map(|number| number as f32);
        let given = self.take(key).and_then(|value| value.as_array()?.iter().map(number).collect::<Option<Vec<f32>>>());
        given.and_then(|given| Divisors::new(&given)).unwrap_or_else(|| {
            self.refuse(key, &format!("a list of at most {} numbers above 0", Divisors::MAX));
            Divisors::default()
        })
    }
}
