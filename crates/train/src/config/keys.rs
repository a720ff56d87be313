//! Every key of the configuration, as plain data: its type, default, range and meaning.
//!
//! This one table drives parsing, `--set`, the defaults, the suggestion for an unknown key, `--help` and the
//! [reference](crate::config::reference). A key whose feature has not landed says so here (`awaits`): it takes its
//! default and refuses anything else.

use Fallback::{Derived, Is, Unset};
use Kind::{Choice, Count, Number, Switch, Text, WordOrCounts};

/// A section of the TOML file.
#[derive(Debug)]
pub struct Section {
    /// Name, as in `[model]`.
    pub name: &'static str,
    /// Its keys.
    pub keys: &'static [Key],
}

/// One key of a section.
#[derive(Debug)]
pub struct Key {
    /// Name inside the section.
    pub name: &'static str,
    /// Type and range.
    pub kind: Kind,
    /// Value where none is given.
    pub default: Fallback,
    /// What it means.
    pub doc: &'static str,
    /// The feature that the key belongs to, where it has not landed.
    pub awaits: Option<&'static str>,
}

/// Type and range of a key's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A whole number of at least this.
    Count(i64),
    /// A finite number in an interval.
    Number(Interval),
    /// `true` or `false`.
    Switch,
    /// Any text.
    Text,
    /// One of some words; `planned` ones have not landed yet.
    Choice {
        /// Words that work.
        landed: &'static [&'static str],
        /// Words that will.
        planned: &'static [&'static str],
    },
    /// One of these words, or a list of whole numbers of at least 0.
    WordOrCounts(&'static [&'static str]),
}

/// The intervals that numbers lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// x ≥ 0
    NotNegative,
    /// x > 0
    Positive,
    /// 0 ≤ x ≤ 1
    Unit,
    /// 0 ≤ x < 1
    BelowOne,
    /// 0 < x < 1
    Inside,
}

impl Interval {
    /// Whether the interval holds `x`; never for infinities and NaN.
    #[must_use]
    pub fn holds(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Self::NotNegative => x >= 0.0,
                Self::Positive => x > 0.0,
                Self::Unit => (0.0..=1.0).contains(&x),
                Self::BelowOne => (0.0..1.0).contains(&x),
                Self::Inside => x > 0.0 && x < 1.0,
            }
    }

    /// The interval in words, to follow "a number".
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::NotNegative => "of at least 0",
            Self::Positive => "above 0",
            Self::Unit => "from 0 to 1",
            Self::BelowOne => "of at least 0 and below 1",
            Self::Inside => "above 0 and below 1",
        }
    }
}

/// What a key is where nothing sets it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fallback {
    /// A fixed value.
    Is(Literal),
    /// Worked out from other keys, in these words.
    Derived(&'static str),
    /// Nothing.
    Unset,
}

/// A default value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Literal {
    /// Of a [`Kind::Count`].
    Int(i64),
    /// Of a [`Kind::Number`].
    Float(f64),
    /// Of a [`Kind::Switch`].
    Bool(bool),
    /// Of a [`Kind::Text`], [`Kind::Choice`] or [`Kind::WordOrCounts`].
    Str(&'static str),
}

const fn key(name: &'static str, kind: Kind, default: Fallback, doc: &'static str) -> Key {
    Key { name, kind, default, doc, awaits: None }
}

impl Key {
    const fn awaits(mut self, feature: &'static str) -> Self {
        self.awaits = Some(feature);
        self
    }
}

const fn int(value: i64) -> Fallback {
    Is(Literal::Int(value))
}
const fn float(value: f64) -> Fallback {
    Is(Literal::Float(value))
}
const fn text(value: &'static str) -> Fallback {
    Is(Literal::Str(value))
}
const OFF: Fallback = Is(Literal::Bool(false));
const ON: Fallback = Is(Literal::Bool(true));
const PRESET: Fallback = Derived("by preset");

const fn words(landed: &'static [&'static str], planned: &'static [&'static str]) -> Kind {
    Choice { landed, planned }
}
const SCHEDULES: Kind = words(
    &[
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "breadth_first",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "dualpipe_v",
        "pipedream",
        "pipedream_2bw",
    ],
    &[],
);

/// All sections and keys.
#[rustfmt::skip] // A table: one key, one line.
pub static SECTIONS: &[Section] = &[
    Section { name: "model", keys: &[
        key("preset", words(&["tiny", "small", "medium", "gpt2"], &[]), text("tiny"), "Size of the model; any other key of the section overrides it."),
        key("kind", words(&["gpt2"], &["llama", "resnet", "vgg"]), text("gpt2"), "Architecture."),
        key("vocab_size", Count(1), PRESET, "Number of token ids."),
        key("num_layers", Count(1), PRESET, "Number of transformer blocks."),
        key("hidden_size", Count(1), PRESET, "Width of the residual stream."),
        key("num_heads", Count(1), PRESET, "Number of attention heads."),
        key("num_kv_heads", Count(1), Derived("num_heads"), "Number of key and value heads; fewer than num_heads (grouped-query attention) has not landed yet."),
        key("ffn_hidden_size", Count(1), Derived("4 · hidden_size"), "Width inside the feed-forward layer."),
        key("seq_len", Count(1), PRESET, "Tokens per sample, and number of positions."),
        key("tie_embeddings", Switch, ON, "Whether the output layer shares the token embedding."),
        key("dropout", Number(Interval::BelowOne), float(0.0), "Probability of dropping an activation."),
        key("init_from", Text, Unset, "Weights to start from.").awaits("starting from given weights"),
    ]},
    Section { name: "parallelism", keys: &[
        key("dp", Count(1), int(1), "Data parallel degree."),
        key("tp", Count(1), int(1), "Tensor parallel degree."),
        key("pp", Count(1), int(1), "Pipeline parallel degree."),
        key("cp", Count(1), int(1), "Context parallel degree.").awaits("context parallelism"),
        key("ep", Count(1), int(1), "Expert parallel degree; divides dp·cp.").awaits("expert parallelism"),
        key("sequence_parallel", Switch, OFF, "Shard the regions between tensor-parallel blocks over tp, along the sequence."),
        key("zero_stage", Count(0), int(0), "What ZeRO shards: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights.").awaits("ZeRO"),
        key("context_parallel_method", Text, text("ring"), "How attention is split over cp.").awaits("context parallelism"),
        key("expert_tensor_parallel", Count(1), int(1), "Tensor parallel degree inside an expert.").awaits("expert parallelism"),
    ]},
    Section { name: "pipeline", keys: &[
        key("schedule", SCHEDULES, text("1f1b"), "Order of forward and backward passes."),
        key("schedule_file", Text, Unset, "A synchronous schedule of your own in the text form of docs/schedules.md, in place of schedule; it has its number of micro-batches."),
        key("virtual_stages", Count(1), Derived("by schedule"), "Model chunks per pipeline rank: 2 for interleaved_1f1b and breadth_first if not given, always 2 for zb_v and dualpipe_v, else 1."),
        key("num_microbatches", Count(1), Derived("by batch and schedule"), "Micro-batches of a step, per data-parallel rank."),
        key("partition", WordOrCounts(super::partition::WORDS), text("uniform"), "Layers of each stage: as even as can be; or by cost, so that the most that a rank computes is least, embedding, head and loss counted; or as listed. With cost and in a list, a stage may have none. The embedding is on the first stage, head and loss on the last."),
        key("replication", WordOrCounts(&["none"]), text("none"), "Ranks of each stage, with schedule 1f1b: replicas take micro-batches in turn; they add up to pp, as 3 + 1 in [3, 1]."),
        key("vertical_sync", Switch, OFF, "Whether, in pipedream, all stages take the weights of the version that the first stage had when a micro-batch entered."),
        key("scatter_gather", Switch, ON, "Whether a hidden state that is the same on every tp rank crosses stages once, in parts that are gathered on arrival."),
    ]},
    Section { name: "training", keys: &[
        key("steps", Count(0), int(100), "Number of steps; 0 validates and reports without training."),
        key("global_batch_size", Count(1), int(16), "Samples per step, over all ranks: dp · num_microbatches · micro_batch_size."),
        key("micro_batch_size", Count(1), Derived("by batch and micro-batches"), "Samples per micro-batch."),
        key("seed", Count(0), int(1234), "Seed of initialisation, sample order and dropout."),
        key("dtype", words(&["f32", "bf16"], &[]), text("f32"), "Type of the factors in matrix products and attention: bf16 rounds them and adds up in f32. Activations that products alone read are stored rounded; all else that is kept or sent is f32: weights, gradients, optimizer states."),
        key("max_norm", Number(Interval::NotNegative), float(1.0), "Global gradient norm above which gradients are scaled down; 0 = off."),
        key("numerics", words(&["fast", "canonical"], &[]), text("fast"), "Order of sums: fast gives one mesh the same bits on every run; canonical gives every mesh, schedule and number of micro-batches the same bits, at a price in time and memory."),
    ]},
    Section { name: "optimizer", keys: &[
        key("name", words(&["adamw", "sgd"], &[]), text("adamw"), "Update rule."),
        key("lr", Number(Interval::NotNegative), float(3e-4), "Full learning rate."),
        key("beta1", Number(Interval::BelowOne), float(0.9), "Decay of AdamW's mean gradient."),
        key("beta2", Number(Interval::BelowOne), float(0.95), "Decay of AdamW's mean squared gradient."),
        key("eps", Number(Interval::Positive), float(1e-8), "Added to AdamW's denominator."),
        key("weight_decay", Number(Interval::NotNegative), float(0.1), "Weight decay, on weights only; decoupled in adamw, L2 in sgd."),
        key("momentum", Number(Interval::BelowOne), float(0.0), "Momentum of sgd."),
    ]},
    Section { name: "lr_scheduler", keys: &[
        key("warmup_steps", Count(0), int(0), "Steps of linear warm-up."),
        key("decay", words(&["none", "linear", "cosine"], &[]), text("none"), "Shape of the decay after the warm-up."),
        key("decay_steps", Count(1), Derived("training.steps"), "Step after which the rate stays at its floor; counts the warm-up."),
        key("min_lr_factor", Number(Interval::Unit), float(0.0), "The floor, as a share of optimizer.lr."),
    ]},
    Section { name: "data", keys: &[
        key("path", Text, Unset, "A UTF-8 file, a folder of them, or a .bin file of u16 tokens; unset: the Cicero text of the lipsum crate."),
        key("tokenizer", Text, text("bytes"), "bytes, gpt2, or the path of a tokenizer.json."),
        key("shuffle", Switch, ON, "Whether each epoch permutes the samples, by seed and epoch."),
    ]},
    Section { name: "validation", keys: &[
        key("every", Count(0), int(0), "Steps between validations; 0 = never, and nothing is held out."),
        key("steps", Count(0), int(0), "Batches per validation; 0 = all that fit."),
        key("fraction", Number(Interval::Inside), float(0.05), "Share of the token stream, at its end, that is held out."),
    ]},
    Section { name: "memory", keys: &[
        key("recompute", words(&["none", "selective"], &["full"]), text("none"), "What is made again in the backward pass rather than kept: nothing, or selective: norms and activation functions, at the price of a few passes over memory. No bit changes."),
        key("offload", Text, text("none"), "What to keep in host memory.").awaits("offloading"),
        key("limit_bytes", Count(0), int(0), "Memory per rank; 0 = no limit.").awaits("a memory limit"),
    ]},
    Section { name: "checkpoint", keys: &[
        key("dir", Text, Unset, "Folder of the checkpoints.").awaits("checkpointing"),
        key("every", Count(0), int(0), "Steps between checkpoints; 0 = never.").awaits("checkpointing"),
        key("keep", Count(1), int(2), "Checkpoints to keep.").awaits("checkpointing"),
        key("resume", Switch, OFF, "Whether to go on from the newest checkpoint.").awaits("checkpointing"),
        key("export", Text, Unset, "Folder of the final model in Hugging Face format.").awaits("exporting the model"),
    ]},
    Section { name: "metrics", keys: &[
        key("profile", Switch, OFF, "Whether to time every operation, print a table of where a step's time goes, and write its timeline."),
        key("profile_steps", Count(1), int(3), "Steps to profile: the first ones but for the very first."),
        key("trace", Text, text("trace.json"), "File for the timeline of a profile, to be opened in Perfetto."),
        key("schedule", Text, text("schedule.svg"), "File for a picture of the pipeline of a profile, with more than one stage: the schedule as predicted from the times of its actions, and as it ran."),
        key("layer_profile", Text, Unset, "File for what each layer takes, measured on one rank before the run, in PipeDream's format: examples/partition reads it."),
    ]},
    Section { name: "comm", keys: &[
        key("timeout_seconds", Number(Interval::Positive), float(60.0), "Time without progress after which a collective gives up on a rank."),
    ]},
    Section { name: "numerics", keys: &[
        key("leaves", Count(1), int(8), "Leaves of canonical sums along a dim that tp may cut: tp must divide them, leaving each rank a power of two."),
    ]},
];

/// Sections whose feature has not landed, with the feature.
pub static PLANNED_SECTIONS: &[(&str, &str)] = &[("moe", "mixture of experts"), ("compress", "compression")];

/// All keys with the name of their section.
pub fn all() -> impl Iterator<Item = (&'static str, &'static Key)> {
    SECTIONS.iter().flat_map(|section| section.keys.iter().map(|key| (section.name, key)))
}

/// The key called `section.name`, if there is one.
#[must_use]
pub fn find(section: &str, name: &str) -> Option<(&'static str, &'static Key)> {
    all().find(|(of, key)| *of == section && key.name == name)
}
