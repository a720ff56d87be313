//! The models and meshes of these tests, as plain data.

use meshwork_pipeline::Generator;
use meshwork_train::Data;
use meshwork_train::config::Config;
use std::fmt;

/// Tokens per sample.
pub const SEQ: usize = 16;
/// Samples per step.
pub const BATCH: usize = 16;
/// Width of the residual stream.
pub const HIDDEN: usize = 32;
/// Attention heads.
pub const HEADS: usize = 4;

/// Plain gradient descent with rate 1 and no clipping: the step is the gradient, so that nothing hides a wrong scale.
pub const SGD: &str = "[optimizer]\nname = 'sgd'\nlr = 1.0\nmomentum = 0.0\nweight_decay = 0.0\n\
                       [training]\nmax_norm = 0.0\nglobal_batch_size = 16\n";
/// The same, clipped to far below the norms of these models.
pub const CLIPPED_SGD: &str = "[optimizer]\nname = 'sgd'\nlr = 1.0\nmomentum = 0.0\nweight_decay = 0.0\n\
                               [training]\nmax_norm = 0.125\nglobal_batch_size = 16\n";
/// AdamW with its defaults, clipping to norm 1 included.
pub const ADAMW: &str = "[optimizer]\nname = 'adamw'\nlr = 3e-3\n[training]\nglobal_batch_size = 16\n";

/// A small language model and its data.
#[derive(Debug)]
pub struct Model {
    /// Its name, which says what is special about it.
    pub name: &'static str,
    /// Number of token ids.
    pub vocab: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Whether the head is the token table.
    pub tied: bool,
    /// Dropout probability.
    pub dropout: f64,
    /// Whether samples differ in their number of unmasked tokens.
    pub masked: bool,
    /// More keys of the section `[model]`.
    pub more: &'static str,
}

#[rustfmt::skip] // A table: one model, one line. 61 ids and 5 layers are divided by no degree but 1 and 5.
mod models {
    use super::Model;
    pub static PLAIN: Model = Model { name: "plain", vocab: 64, layers: 4, tied: true, dropout: 0.0, masked: false, more: "" };
    pub static UNEVEN: Model = Model { name: "uneven", vocab: 61, layers: 5, tied: true, dropout: 0.0, masked: true, more: "" };
    pub static UNTIED: Model = Model { name: "untied", vocab: 61, layers: 4, tied: false, dropout: 0.0, masked: true, more: "" };
    pub static DROPOUT: Model = Model { name: "dropout", vocab: 61, layers: 5, tied: true, dropout: 0.2, masked: true, more: "" };
    // Fewer heads of keys and values than there are ranks in tp=4.
    pub static LLAMA: Model = Model { name: "llama", vocab: 61, layers: 4, tied: false, dropout: 0.0, masked: true,
                                      more: "kind = 'llama'\nnum_kv_heads = 2\nffn_hidden_size = 64\n" };
    // Inner features that leave the last of four ranks with padding, and the last of two of Llama's.
    pub static PADDED: Model = Model { name: "padded", vocab: 61, layers: 4, tied: false, dropout: 0.2, masked: true, more: "ffn_hidden_size = 126\n" };
    pub static PADDED_LLAMA: Model = Model { name: "padded llama", more: "kind = 'llama'\nnum_kv_heads = 2\nffn_hidden_size = 61\n", ..LLAMA };
    pub static LARGE_HEAD: Model = Model { name: "large head", vocab: 509, layers: 6, tied: true, dropout: 0.0, masked: true, more: "" };
}
pub use models::*;

impl Model {
    /// Random tokens, the last eighth held out. Where masked, the first of row i's 16 targets are: 3·i modulo 17 of
    /// them, so that rows, micro-batches and ranks differ, and row 11 has no unmasked target.
    pub fn data(&self) -> Data {
        let mut rng = meshwork_testkit::Rng::new(7);
        let tokens: Vec<i32> = (0..8 * BATCH * SEQ + 1).map(|_| rng.below(self.vocab) as i32).collect();
        let masked = self.masked;
        Data::from_tokens(tokens, SEQ).hold_out(0.125).masked(move |at| {
            // The targets of a row start one token after its inputs.
            let (row, place) = (at.saturating_sub(1) / SEQ % BATCH, at.saturating_sub(1) % SEQ);
            masked && place < row * 3 % 17
        })
    }
}

/// A model on a mesh.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The model.
    pub model: &'static Model,
    /// Data parallel degree.
    pub dp: usize,
    /// Tensor parallel degree.
    pub tp: usize,
    /// Pipeline parallel degree.
    pub pp: usize,
    /// Whether the regions between tensor-parallel blocks are cut along the sequence.
    pub sequence_parallel: bool,
    /// A synchronous schedule.
    pub schedule: &'static str,
    /// Stages per pp rank, if not the schedule's default.
    pub chunks: Option<usize>,
    /// Micro-batches per dp rank.
    pub micros: usize,
    /// Layers of each stage; empty: as even as possible.
    pub partition: &'static [usize],
}

impl Case {
    /// The model on one rank, the whole batch at once: the reference.
    pub fn alone(model: &'static Model) -> Self {
        Self {
            model,
            dp: 1,
            tp: 1,
            pp: 1,
            sequence_parallel: false,
            schedule: "gpipe",
            chunks: None,
            micros: 1,
            partition: &[],
        }
    }

    /// The model on a mesh of (dp, tp, pp), with schedule `1f1b`.
    pub const fn of_1f1b(
        model: &'static Model,
        (dp, tp, pp): (usize, usize, usize),
        sequence_parallel: bool,
        micros: usize,
    ) -> Self {
        Self { model, dp, tp, pp, sequence_parallel, schedule: "1f1b", chunks: None, micros, partition: &[] }
    }

    /// The same with `chunks` stages per pp rank.
    pub const fn in_chunks(self, chunks: usize) -> Self {
        Self { chunks: Some(chunks), ..self }
    }

    /// The same with its layers assigned as listed.
    pub const fn dealt(self, partition: &'static [usize]) -> Self {
        Self { partition, ..self }
    }

    /// The configuration, with `more` sections: `[training]` and `[optimizer]`.
    pub fn config(&self, more: &str) -> Config {
        Config::from_toml(&self.text(more)).unwrap_or_else(|error| panic!("{self}: {error}"))
    }

    /// The same as a TOML document.
    pub fn text(&self, more: &str) -> String {
        let &Self { model, dp, tp, pp, sequence_parallel, schedule, chunks, micros, partition } = self;
        let chunks = chunks.map_or(String::new(), |chunks| format!("virtual_stages = {chunks}\n"));
        let partition = if partition.is_empty() { "'uniform'".to_owned() } else { format!("{partition:?}") };
        let &Model { vocab, layers, tied, dropout, more: keys, .. } = model;
        format!(
            "[model]\nvocab_size = {vocab}\nnum_layers = {layers}\nhidden_size = {HIDDEN}\nnum_heads = {HEADS}\n\
             seq_len = {SEQ}\ntie_embeddings = {tied}\ndropout = {dropout}\n{keys}\
             [parallelism]\ndp = {dp}\ntp = {tp}\npp = {pp}\nsequence_parallel = {sequence_parallel}\n\
             [pipeline]\nschedule = '{schedule}'\nnum_microbatches = {micros}\n{chunks}\
             partition = {partition}\n{more}"
        )
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sp = if self.sequence_parallel { ",sequence_parallel" } else { "" };
        let Self { model, dp, tp, pp, schedule, micros, partition, .. } = self;
        write!(f, "{} on dp={dp},tp={tp},pp={pp}{sp} {schedule} x{micros}", model.name)?;
        if partition.is_empty() { Ok(()) } else { write!(f, " dealt {partition:?}") }
    }
}

/// Sequence parallel or not.
const SP: bool = true;
const NO: bool = false;

const fn case(
    model: &'static Model,
    (dp, tp, pp): (usize, usize, usize),
    sequence_parallel: bool,
    schedule: &'static str,
    micros: usize,
) -> Case {
    Case { model, dp, tp, pp, sequence_parallel, schedule, chunks: None, micros, partition: &[] }
}

/// Every mesh of up to 16 ranks whose degrees are 1, 2 and 4, most of them in several ways. Also uneven layers: all at
/// one end, all in the middle, or on both sides of a stage that only passes activations on.
#[rustfmt::skip] // A table: one case, one line.
pub static CASES: &[Case] = &[
    //   model     dp tp pp   sp  schedule micro-batches per dp rank
    case(&PLAIN,   (1, 1, 1), NO, "1f1b",  4),
    case(&PLAIN,   (2, 1, 1), NO, "gpipe", 1),
    case(&PLAIN,   (4, 1, 1), NO, "1f1b",  2),
    case(&PLAIN,   (1, 2, 1), NO, "gpipe", 1),
    case(&PLAIN,   (1, 2, 1), SP, "gpipe", 1),
    case(&PLAIN,   (1, 4, 1), NO, "1f1b",  2),
    case(&PLAIN,   (1, 1, 2), NO, "1f1b",  4),
    case(&PLAIN,   (1, 1, 4), NO, "gpipe", 4),
    case(&PLAIN,   (2, 2, 2), SP, "1f1b",  2),
    case(&PLAIN,   (2, 4, 2), NO, "1f1b",  4),
    case(&PLAIN,   (4, 4, 1), SP, "1f1b",  1),

    case(&UNEVEN,  (1, 1, 1), NO, "gpipe", 16),
    case(&UNEVEN,  (2, 1, 1), NO, "1f1b",  8),
    case(&UNEVEN,  (4, 1, 1), NO, "gpipe", 4),
    case(&UNEVEN,  (1, 4, 1), SP, "gpipe", 4),
    case(&UNEVEN,  (1, 1, 2), NO, "gpipe", 2),
    case(&UNEVEN,  (1, 1, 4), NO, "1f1b",  8),
    case(&UNEVEN,  (2, 2, 1), NO, "1f1b",  2),
    case(&UNEVEN,  (2, 4, 1), SP, "gpipe", 2),
    case(&UNEVEN,  (4, 2, 1), SP, "1f1b",  4),
    case(&UNEVEN,  (4, 4, 1), NO, "gpipe", 1),
    case(&UNEVEN,  (2, 1, 2), NO, "1f1b",  4),
    case(&UNEVEN,  (2, 1, 4), NO, "1f1b",  4),
    case(&UNEVEN,  (4, 1, 2), NO, "gpipe", 2),
    case(&UNEVEN,  (1, 2, 2), NO, "gpipe", 4),
    case(&UNEVEN,  (1, 2, 4), SP, "1f1b",  4),
    case(&UNEVEN,  (1, 4, 2), SP, "1f1b",  2),
    case(&UNEVEN,  (2, 2, 2), NO, "1f1b",  4),
    case(&UNEVEN,  (2, 4, 2), SP, "1f1b",  8),
    case(&UNEVEN,  (4, 2, 2), SP, "gpipe", 4),
    case(&UNEVEN,  (2, 2, 4), SP, "1f1b",  4),

    case(&UNTIED,  (2, 2, 1), SP, "gpipe", 4),
    case(&UNTIED,  (1, 4, 2), NO, "gpipe", 8),
    case(&UNTIED,  (1, 2, 4), NO, "gpipe", 16),
    case(&UNTIED,  (4, 1, 4), NO, "1f1b",  4),
    case(&UNTIED,  (1, 4, 4), SP, "gpipe", 4),
    case(&UNTIED,  (2, 2, 4), NO, "1f1b",  8),
    case(&UNTIED,  (4, 2, 2), NO, "1f1b",  2),
    case(&UNTIED,  (2, 4, 1), NO, "1f1b",  2),
    case(&UNTIED,  (4, 2, 1), NO, "gpipe", 4),

    case(&DROPOUT, (2, 2, 2), NO, "gpipe", 2),
    case(&DROPOUT, (4, 4, 1), SP, "1f1b",  4),
    case(&DROPOUT, (2, 4, 2), SP, "1f1b",  4),
    case(&DROPOUT, (1, 4, 4), NO, "1f1b",  8),
    case(&DROPOUT, (1, 2, 2), SP, "1f1b",  4),

    case(&PLAIN,   (1, 1, 2), NO, "1f1b",  4).dealt(&[3, 1]),
    case(&PLAIN,   (1, 1, 2), NO, "gpipe", 2).dealt(&[0, 4]),
    case(&PLAIN,   (2, 1, 2), NO, "1f1b",  4).dealt(&[4, 0]),
    case(&UNEVEN,  (2, 2, 2), SP, "1f1b",  4).dealt(&[5, 0]),
    case(&UNEVEN,  (1, 1, 4), NO, "1f1b",  8).dealt(&[0, 5, 0, 0]),
    case(&UNTIED,  (1, 2, 2), SP, "gpipe", 4).dealt(&[4, 0]),
    case(&UNTIED,  (2, 2, 2), NO, "1f1b",  4).dealt(&[0, 4]),
    case(&DROPOUT, (1, 2, 4), SP, "1f1b",  4).dealt(&[2, 0, 3, 0]),
    case(&DROPOUT, (2, 1, 2), NO, "gpipe", 2).dealt(&[1, 4]),

    case(&LLAMA,   (2, 1, 1), NO, "gpipe", 4),
    case(&LLAMA,   (1, 2, 1), SP, "gpipe", 2),
    case(&LLAMA,   (1, 4, 1), NO, "1f1b",  2),
    case(&LLAMA,   (1, 4, 2), SP, "1f1b",  4),
    case(&LLAMA,   (2, 2, 2), NO, "1f1b",  4),
    case(&LLAMA,   (2, 2, 2), NO, "1f1b",  4).dealt(&[4, 0]),
    case(&LLAMA,   (1, 2, 2), NO, "interleaved_1f1b", 4),
    case(&LLAMA,   (2, 4, 2), NO, "breadth_first", 4),
    case(&LLAMA,   (2, 2, 2), SP, "zb_h1", 4),
    case(&LLAMA,   (1, 2, 4), NO, "zb_h2", 8),
    case(&LLAMA,   (1, 4, 2), NO, "zb_v",  4),
    case(&LLAMA,   (2, 2, 2), SP, "dualpipe_v", 8),

    // Fewer micro-batches than stages.
    case(&UNEVEN,  (1, 1, 4), NO, "1f1b",  2),
    case(&UNTIED,  (2, 2, 4), SP, "1f1b",  1),
    case(&DROPOUT, (2, 1, 4), NO, "zb_h1", 2),

    // Several stages per pp rank, in a loop.
    case(&PLAIN,   (1, 1, 2), NO, "interleaved_1f1b", 4),
    case(&UNEVEN,  (2, 2, 2), SP, "interleaved_1f1b", 4).dealt(&[2, 1, 1, 1]),
    case(&UNTIED,  (1, 2, 4), NO, "interleaved_1f1b", 8).dealt(&[1, 0, 1, 0, 1, 0, 0, 1]),
    case(&DROPOUT, (1, 2, 2), NO, "interleaved_1f1b", 8).in_chunks(3).dealt(&[1, 1, 1, 0, 1, 1]),
    case(&PLAIN,   (2, 2, 2), NO, "breadth_first", 4),
    case(&UNEVEN,  (1, 1, 4), NO, "breadth_first", 8).dealt(&[0, 1, 1, 0, 1, 1, 1, 0]),
    case(&UNTIED,  (2, 1, 2), NO, "breadth_first", 2).in_chunks(4).dealt(&[1, 0, 1, 0, 1, 0, 1, 0]),
    // Backward split into that of the input and that of the weights.
    case(&PLAIN,   (1, 1, 4), NO, "zb_h1", 8),
    case(&UNEVEN,  (2, 2, 2), SP, "zb_h1", 4),
    case(&UNTIED,  (1, 2, 4), NO, "zb_h1", 4),
    case(&DROPOUT, (2, 1, 2), NO, "zb_h1", 4),
    case(&PLAIN,   (2, 2, 2), NO, "zb_h2", 4),
    case(&UNEVEN,  (1, 1, 4), NO, "zb_h2", 8),
    case(&UNTIED,  (2, 2, 2), SP, "zb_h2", 8),
    // Both, in a V: the first and the last stage are on one rank.
    case(&PLAIN,   (1, 1, 2), NO, "zb_v", 4),
    case(&UNEVEN,  (2, 2, 2), NO, "zb_v", 4).dealt(&[1, 2, 1, 1]),
    case(&UNTIED,  (1, 2, 4), SP, "zb_v", 8).dealt(&[1, 0, 1, 0, 1, 0, 0, 1]),
    case(&DROPOUT, (1, 1, 4), NO, "zb_v", 16).dealt(&[1, 1, 0, 0, 1, 0, 1, 1]),
    case(&PLAIN,   (2, 1, 2), NO, "dualpipe_v", 8),
    case(&UNEVEN,  (1, 2, 2), SP, "dualpipe_v", 8).dealt(&[1, 1, 2, 1]),
    case(&UNTIED,  (2, 2, 2), NO, "dualpipe_v", 8),
    case(&DROPOUT, (1, 1, 4), NO, "dualpipe_v", 16).dealt(&[1, 1, 0, 0, 1, 0, 1, 1]),
];

#[test]
fn the_table_has_every_synchronous_schedule_on_every_axis() {
    for generator in Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()) {
        let with = |axis: fn(&Case) -> usize| {
            CASES.iter().any(|case| case.schedule == generator.name() && case.pp > 1 && axis(case) > 1)
        };
        assert!(with(|case| case.dp) && with(|case| case.tp), "{}", generator.name());
    }
}

#[test]
fn the_table_has_every_mesh_and_both_kinds_of_tensor_parallelism() {
    for index in 0..27 {
        let [dp, tp, pp] = [index / 9, index / 3 % 3, index % 3].map(|power| 1 << power);
        for sequence_parallel in [false, true] {
            let wanted = dp * tp * pp <= 16 && (tp > 1 || !sequence_parallel);
            let here =
                |case: &&Case| (case.dp, case.tp, case.pp, case.sequence_parallel) == (dp, tp, pp, sequence_parallel);
            let found = CASES.iter().any(|case| here(&case));
            assert_eq!(found, wanted, "dp={dp},tp={tp},pp={pp} with sequence_parallel = {sequence_parallel}");
        }
    }
}
