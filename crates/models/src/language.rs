//! Common parts of language models. A sample is a sequence of token ids; the target of each is the id that follows it.
//! [`LanguageStage`] is one stage of such a model:
//!
//! ```text
//! x = embed(ids)    x ← block(x)   (once a layer)    logits = norm(x) · W_headᵀ    loss = Σ cross entropy(logits, targets)
//! ```
//!
//! More than 400 lines: a stage, and everything that its blocks read of a batch, follow one layout of tokens.

use meshwork_context_parallel::ContextParallel;
use meshwork_core::{Axis, DType, Mesh};
use meshwork_nn::{Activation, Batch, Field, LayerNorm, RmsNorm, Stage, StageSpec};
use meshwork_tensor::op::{Documents, Mask, Targets, TokenGroups};
use meshwork_tensor::tape::Mode;
use meshwork_tensor::{Declarations, Error, Result, Shape, Tape, Var};
use meshwork_tensor_parallel::{Region, VocabParallelEmbedding};
use std::fmt::Debug;
use std::ops::{Range, RangeInclusive};
use std::str::FromStr;

/// The field of token ids, `[seq]` for each sample.
pub const TOKENS: &str = "tokens";

/// The field of targets, `[seq]` for each sample; negative ones are masked.
pub const TARGETS: &str = "targets";

/// The field of positions, `[seq]` for each sample: the place of each token in its document. 0 begins a document, and
/// each other position is one more than the one before.
pub const POSITIONS: &str = "positions";

/// The field of answers that are compared in pairs, `[seq]` for each sample: of which answer each target is. 0 and 1
/// are those of the first pair; negative ones are none.
pub const ANSWERS: &str = "answers";

/// What a boundary between two documents in a sequence means to a model. Each rule includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Boundary {
    /// Nothing: the model takes no [`POSITIONS`].
    #[default]
    Ignored,
    /// Positions start anew: learned positions, or the rotations of queries and keys.
    Positions,
    /// Tokens see only those of their own document.
    Attention,
}

/// The fields of sequences of `seq_len` tokens of a vocabulary.
pub fn fields(seq_len: usize, vocab: usize, boundary: Boundary) -> Vec<Field> {
    let [seq, vocab] = [seq_len, vocab].map(|ids| i32::try_from(ids).unwrap_or(i32::MAX));
    let positions = (boundary > Boundary::Ignored).then(|| Field::ids(POSITIONS, [seq_len], 0..seq));
    let fields = [Field::ids(TOKENS, [seq_len], 0..vocab), Field::ids(TARGETS, [seq_len], i32::MIN..vocab)];
    fields.into_iter().chain(positions).collect()
}

/// The field of the answers of sequences of `seq_len` tokens. Each answer is the end of a document, behind at least one
/// token that is no target, so that a pair has at least four tokens, and a sequence room for a fourth of them.
pub fn answers(seq_len: usize) -> Field {
    let pairs = i32::try_from(seq_len / 4).unwrap_or(i32::MAX / 2).max(1);
    Field::ids(ANSWERS, [seq_len], -1..2 * pairs)
}

/// A batch of sequences of `seq_len` token ids, one after another, with the target of each.
///
/// # Errors
/// Different numbers of tokens and targets, or incomplete sequences.
pub fn batch(tokens: Vec<i32>, targets: Vec<i32>, seq_len: usize) -> Result<Batch> {
    Batch::new(tokens.len() / seq_len.max(1)).with(TOKENS, [seq_len], tokens)?.with(TARGETS, [seq_len], targets)
}

/// The terms of the loss: unmasked targets.
pub fn unmasked(batch: &Batch, samples: Range<usize>) -> Result<u64> {
    let part = batch.part(samples)?;
    Ok(part.values::<i32>(TARGETS)?.iter().filter(|&&target| target >= 0).count() as u64)
}

/// The hidden state that travels between stages.
pub fn hidden(mesh: &Mesh, region: Region, hidden_size: usize, batch: &Batch) -> Result<Activation> {
    activation(mesh, region, [batch.samples(), batch.dims(TOKENS)?[0], hidden_size])
}

fn activation(mesh: &Mesh, region: Region, [samples, seq, hidden_size]: [usize; 3]) -> Result<Activation> {
    let shape = Shape::new(&[samples, region.local_seq(seq, mesh)?, hidden_size]);
    Ok(Activation { dtype: DType::F32, shape, types: region.types(mesh) })
}

/// The error of a later stage that runs without the hidden state of the previous one.
pub fn no_input(model: &'static str) -> Error {
    Error::Shape {
        op: model,
        problem: "a stage behind the first takes the hidden state of the one before, and none was given".to_owned(),
        shapes: Vec::new(),
    }
}

/// A part of a language model, with its parameters, whose result is a hidden state `[samples, seq, hidden]` in the
/// region.
pub trait HiddenModule: Debug {
    /// An embedding takes ids `[samples, seq]`; a block, and the norm in front of the head, take a hidden state in the
    /// region.
    fn forward(&self, tape: &Tape, x: &Var, sequences: Sequences<'_>) -> Result<Var>;

    /// Whether it is an embedding that reads the [positions](Sequences::positions) of tokens.
    fn reads_positions(&self) -> bool {
        false
    }
}

/// How the sequences of a pass lie.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// The axes that cut them.
    pub region: Region,
    /// The tokens of each.
    pub tokens: usize,
    /// Tokens that a dense feed-forward network computes at a time; 0: all.
    pub block: usize,
    /// The documents of whole sequences; without them each sequence is one.
    pub documents: Option<&'a Documents>,
    /// The position of each token that this rank has, `[samples, seq]`, where these are not the tokens of one document
    /// in its order: for learned positions.
    pub positions: Option<&'a Var>,
    /// The exchange of attention, where cp cuts them.
    pub context: Option<&'a ContextParallel>,
}

impl<'a> Sequences<'a> {
    /// What hides tokens from each other, with a sliding window or none.
    pub fn mask(&self, window: Option<usize>) -> Mask<'a> {
        Mask { documents: self.documents, window, ..Mask::default() }
    }
}

impl HiddenModule for VocabParallelEmbedding {
    fn forward(&self, tape: &Tape, ids: &Var, sequences: Sequences<'_>) -> Result<Var> {
        self.embed(tape, ids, sequences.region)
    }
}

/// In front of the head, whose product alone reads it.
impl HiddenModule for LayerNorm {
    fn forward(&self, tape: &Tape, x: &Var, _sequences: Sequences<'_>) -> Result<Var> {
        self.operand(tape, x)
    }
}

/// In front of the head, whose product alone reads it.
impl HiddenModule for RmsNorm {
    fn forward(&self, tape: &Tape, x: &Var, _sequences: Sequences<'_>) -> Result<Var> {
        self.operand(tape, x)
    }
}

/// What the stages of a language model have in common, whatever their blocks are.
#[derive(Clone, Debug)]
pub struct LanguageSpec {
    /// The layout between blocks.
    pub region: Region,
    /// What a boundary between documents means.
    pub boundary: Boundary,
    /// Tokens of a sequence whose logits exist at a time in training; 0: all tokens.
    pub loss_chunk: usize,
    /// Tokens of a sequence whose inner features of a dense feed-forward network exist at a time; 0: those of all.
    pub sequence_block: usize,
    /// The exchange of attention, where cp cuts the sequence.
    pub context: Option<ContextParallel>,
    /// The soft cap of logits, if there is one.
    pub logit_cap: Option<f64>,
}

impl LanguageSpec {
    fn logits(&self, head: &VocabParallelEmbedding, tape: &Tape, x: &Var) -> Result<Var> {
        let logits = head.logits(tape, x, self.region)?;
        self.logit_cap.map_or(Ok(logits.clone()), |cap| logits.soft_cap(cap))
    }

    /// The same with the sequence cut over tp between blocks, or not.
    #[must_use]
    pub fn sequence_parallel(self, on: bool) -> Self {
        Self { region: self.region.with(Axis::Tp, on), ..self }
    }

    /// The same with the sequence cut over cp, or not.
    #[must_use]
    pub fn context_parallel(self, context: Option<ContextParallel>) -> Self {
        Self { region: self.region.with(Axis::CONTEXT, context.is_some()), context, ..self }
    }

    /// The hidden state that travels between stages.
    pub fn hidden(&self, mesh: &Mesh, hidden_size: usize, batch: &Batch) -> Result<Activation> {
        let seq = batch.dims(TOKENS)?[0];
        let places = self.context.as_ref().map_or(seq, |context| context.places(seq));
        activation(mesh, self.region, [batch.samples(), places, hidden_size])
    }

    /// The same for a micro-batch, whose documents may decide how its tokens lie.
    fn of_batch(&self, tape: &Tape, batch: &Batch) -> Result<Self> {
        let context = match &self.context {
            Some(context) if self.boundary == Boundary::Attention && tape.mode() == Mode::Train => {
                Some(context.of_documents(&self.places_of(batch)?, batch.samples())?)
            }
            other => other.clone(),
        };
        Ok(Self { context, ..self.clone() })
    }

    /// A number for each token that this rank has, and `fill` for padding behind the last token of a sequence.
    fn of_tokens(&self, tape: &Tape, batch: &Batch, name: &'static str, fill: i32) -> Result<Var> {
        let (seq, over) = (batch.dims(name)?[0], self.region.of_tokens());
        let field = |seq| Field::new(name, DType::I32, [seq]).sequence(0, over);
        match self.context.as_ref().filter(|context| !context.is_plain(seq)) {
            None => batch.var(tape, &field(seq)),
            Some(context) => {
                let laid = context.lay_out(batch.values(name)?, seq, fill)?;
                let places = context.places(seq);
                Batch::new(batch.samples()).with(name, [places], laid)?.var(tape, &field(places))
            }
        }
    }

    /// The positions of all tokens in their documents, whole sequences in their order. Padding behind the last token is
    /// a document of its own.
    fn places_of(&self, batch: &Batch) -> Result<Vec<i32>> {
        let seq = batch.dims(POSITIONS)?[0];
        let behind = self.context.as_ref().map_or(seq, |context| context.places(seq)) - seq;
        let samples = batch.values::<i32>(POSITIONS)?.chunks_exact(seq);
        Ok(samples.flat_map(|sample| sample.iter().copied().chain(0..behind as i32)).collect())
    }

    fn whole_positions(&self, tape: &Tape, batch: &Batch) -> Result<Var> {
        let seq = batch.dims(POSITIONS)?[0];
        let places = self.context.as_ref().map_or(seq, |context| context.places(seq));
        if places == seq {
            return batch.var(tape, POSITIONS);
        }
        Batch::new(batch.samples()).with::<i32>(POSITIONS, [places], self.places_of(batch)?)?.var(tape, POSITIONS)
    }

    /// The position of each token that this rank has, if it differs from the place of the token.
    fn positions(&self, tape: &Tape, batch: &Batch, documents: Option<&Documents>) -> Result<Option<Var>> {
        let seq = batch.dims(TOKENS)?[0];
        match (&self.context, documents) {
            (None, documents) => Ok(documents.map(|documents| documents.positions.clone())),
            (Some(_), Some(_)) => self.of_tokens(tape, batch, POSITIONS, 0).map(Some),
            (Some(context), None) if context.is_plain(seq) => Ok(None),
            (Some(_), None) => {
                let places = (0..batch.samples()).flat_map(|_| 0..seq as i32).collect();
                let places = Batch::new(batch.samples()).with::<i32>(POSITIONS, [seq], places)?;
                self.of_tokens(tape, &places, POSITIONS, 0).map(Some)
            }
        }
    }
}

impl Default for LanguageSpec {
    /// Hidden states that are the same on all ranks of tp, no boundaries, all logits at once.
    fn default() -> Self {
        Self {
            region: Region::INVARIANT,
            boundary: Boundary::Ignored,
            loss_chunk: 0,
            sequence_block: 0,
            context: None,
            logit_cap: None,
        }
    }
}

/// The parts of a language model that training does not change. They have no gradients and no optimizer states, and
/// backward ends at the first part that is trained.
///
/// ```
/// use meshwork_models::language::Frozen;
///
/// let frozen: Frozen = "embedding, layers.0-3".parse()?;
/// assert!(frozen.embedding && frozen.has_layer(3) && !frozen.has_layer(4) && !frozen.head);
/// let error = "layer.0".parse::<Frozen>().unwrap_err().to_string();
/// assert_eq!(error, "layer.0 is no part of a model: use embedding, layers.N, layers.A-B, norm or head, with commas");
/// # Ok::<(), meshwork_models::language::FrozenError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frozen {
    /// The token table, and learned positions. With tied embeddings the head too.
    pub embedding: bool,
    /// Blocks, in ranges that may overlap.
    pub layers: Vec<RangeInclusive<usize>>,
    /// The norm in front of the head.
    pub norm: bool,
    /// The output head.
    pub head: bool,
}

/// A word that names no part of a model.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no part of a model: use embedding, layers.N, layers.A-B, norm or head, with commas")]
pub struct FrozenError(pub String);

meshwork_core::debug_as_display!(FrozenError);

impl Frozen {
    /// Whether a block is frozen.
    pub fn has_layer(&self, layer: usize) -> bool {
        self.layers.iter().any(|layers| layers.contains(&layer))
    }

    /// Whether anything is frozen.
    pub fn is_some(&self) -> bool {
        *self != Self::default()
    }

    /// Whether nothing is left to train in a model of so many layers.
    pub fn is_all(&self, num_layers: usize) -> bool {
        self.embedding && self.norm && self.head && (0..num_layers).all(|layer| self.has_layer(layer))
    }
}

impl FromStr for Frozen {
    type Err = FrozenError;

    fn from_str(text: &str) -> std::result::Result<Self, FrozenError> {
        let mut frozen = Self::default();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let unknown = || FrozenError(word.to_owned());
            match word {
                "embedding" => frozen.embedding = true,
                "norm" => frozen.norm = true,
                "head" => frozen.head = true,
                _ => {
                    let layers = word.strip_prefix("layers.").ok_or_else(unknown)?;
                    let (first, last) = layers.split_once('-').unwrap_or((layers, layers));
                    let [first, last] = [first, last].map(str::parse::<usize>);
                    let (Ok(first), Ok(last)) = (first, last) else {
                        return Err(unknown());
                    };
                    if first > last {
                        return Err(unknown());
                    }
                    frozen.layers.push(first..=last);
                }
            }
        }
        Ok(frozen)
    }
}

/// One stage of a language model: some of the blocks, with the embedding in front on the first stage, and a norm and
/// the output head behind on the last. The loss of a sample is the summed cross entropy of its unmasked targets;
/// predictions are the whole logits `[samples, seq, vocab]`.
#[derive(Clone, Debug)]
pub struct LanguageStage<E, B, N> {
    spec: LanguageSpec,
    embedding: Option<E>,
    blocks: Vec<B>,
    head: Option<(N, VocabParallelEmbedding)>,
}

impl<E, B, N> LanguageStage<E, B, N> {
    /// Declares the parts of the model that `part` names, in this order: the embedding, a block for each layer, norm
    /// and head.
    pub fn declare(
        params: &mut Declarations,
        part: &StageSpec,
        (spec, frozen): (LanguageSpec, &Frozen),
        embedding: impl FnOnce(&mut Declarations) -> Result<E>,
        mut block: impl FnMut(&mut Declarations, usize) -> Result<B>,
        norm: impl FnOnce(&mut Declarations) -> Result<N>,
        head: impl FnOnce(&mut Declarations) -> Result<VocabParallelEmbedding>,
    ) -> Result<Self> {
        let embedding = part.first.then(|| params.freezing(frozen.embedding, embedding)).transpose()?;
        let mut declare = |layer| params.freezing(frozen.has_layer(layer), |params| block(params, layer));
        let blocks = part.layers.clone().map(&mut declare).collect::<Result<_>>()?;
        let head = match part.last {
            true => Some((params.freezing(frozen.norm, norm)?, params.freezing(frozen.head, head)?)),
            false => None,
        };
        Ok(Self { spec, embedding, blocks, head })
    }
}

impl<E, B, N> LanguageStage<E, B, N> {
    /// The loss of each sample, or of each of its groups of targets.
    fn losses(&self, tape: &Tape, batch: &Batch, x: &Var, groups: Option<&Field>) -> Result<Var> {
        let (_, head) = self.head.as_ref().ok_or_else(no_head)?;
        let spec = self.spec.of_batch(tape, batch)?;
        let ids = spec.of_tokens(tape, batch, TARGETS, -1)?;
        let of_groups = groups.map(|groups| spec.of_tokens(tape, batch, groups.name, -1)).transpose()?;
        let groups = of_groups.as_ref().zip(groups).map(|(of, field)| TokenGroups { of, count: field.id_count() });
        let targets = Targets { ids: &ids, groups };
        match spec.loss_chunk {
            0 => head.loss(&spec.logits(head, tape, x)?, targets),
            _ if spec.logit_cap.is_some() => Err(Error::Shape {
                op: "language model",
                problem: "its logits are capped, and a loss of some tokens at a time takes them as they are: use \
                          loss_chunk 0"
                    .to_owned(),
                shapes: Vec::new(),
            }),
            chunk => head.chunked_loss(tape, x, targets, spec.region, chunk),
        }
    }
}

impl<E: HiddenModule, B: HiddenModule, N: HiddenModule> Stage for LanguageStage<E, B, N> {
    /// Every stage reads the documents from the batch; they do not travel. The output of the last stage is the input of
    /// its head.
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let spec = self.spec.of_batch(tape, batch)?;
        let context = spec.context.as_ref();
        if context.is_some() && tape.decodes() {
            return Err(Error::Shape {
                op: "language model",
                problem: "decoding does not cut sequences over cp: use cp=1, on any other mesh".to_owned(),
                shapes: Vec::new(),
            });
        }
        let documents = match spec.boundary {
            Boundary::Positions | Boundary::Attention if !tape.decodes() => Some(Documents {
                positions: spec.whole_positions(tape, batch)?,
                apart: spec.boundary == Boundary::Attention,
            }),
            _ => None, // what is decoded is one document
        };
        let (region, tokens) = (spec.region, batch.dims(TOKENS)?[0]);
        let block = spec.sequence_block;
        let sequences = Sequences { region, tokens, block, documents: documents.as_ref(), positions: None, context };
        let x = match &self.embedding {
            Some(embedding) => {
                let positions = match embedding.reads_positions() {
                    true => spec.positions(tape, batch, sequences.documents)?,
                    false => None,
                };
                let ids = spec.of_tokens(tape, batch, TOKENS, 0)?;
                embedding.forward(tape, &ids, Sequences { positions: positions.as_ref(), ..sequences })?
            }
            None => input.cloned().ok_or_else(|| no_input("language model"))?,
        };
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(tape, &x, sequences))?;
        let Some((norm, _)) = &self.head else {
            return Ok(x);
        };
        // Decoding needs the logits of the last token alone.
        let x = if let (true, seq @ 2..) = (tape.decodes(), x.shape()[1]) { x.narrow(1, seq - 1..seq)? } else { x };
        norm.forward(tape, &x, sequences)
    }

    fn loss(&self, tape: &Tape, batch: &Batch, x: &Var) -> Result<Var> {
        self.losses(tape, batch, x, None)
    }

    fn grouped_loss(&self, tape: &Tape, batch: &Batch, x: &Var, groups: &Field) -> Result<Var> {
        self.losses(tape, batch, x, Some(groups))
    }

    fn predict(&self, x: &Var) -> Result<Var> {
        let (_, head) = self.head.as_ref().ok_or_else(no_head)?;
        let logits = self.spec.logits(head, x.tape(), x)?.all_gather(Axis::Tp, 2)?;
        self.spec.context.as_ref().map_or(Ok(logits.clone()), |context| context.whole(&logits))
    }
}

/// The error of a stage that is asked for a loss and is not the last.
fn no_head() -> Error {
    Error::Shape {
        op: "language model",
        problem: "only the last stage has the head, and so the loss".to_owned(),
        shapes: Vec::new(),
    }
}
