//! Checks of streams against the model and the configuration.

use super::Data;
use super::prelude::*;
use super::source::Source;
use crate::config::{Config, EndOfText, EndOfTextWord, Objective};

/// Ids beyond the vocabulary: of the tokenizer, or in token files.
pub(super) fn vocabulary(sources: &[Source], tokenizer: &Tokenizer, config: &Config) -> Vec<Fault> {
    let (mut faults, vocab_size) = (Vec::new(), config.model.vocab_size);
    let from_text = sources.iter().any(|source| source.from_text);
    let shown = format!("{:?}", config.data.tokenizer);
    // Text never becomes a special token, so that only the others must fit.
    let wide = from_text && tokenizer.vocab_size_of_text() > vocab_size;
    let without = config.model.init_from.as_deref().filter(|_| from_text && !config.data.tokenizer_given);
    if let Some(folder) = without.filter(|_| config.data.tokenizer == "bytes" && vocab_size != 256) {
        faults.push(no_tokenizer(Path::new(folder), vocab_size));
    } else if wide {
        let ids = tokenizer.vocab_size_of_text();
        let problem = format!("has {ids} ids, more than model.vocab_size = {vocab_size}");
        let valid = match &config.model.init_from {
            Some(folder) => format!("use the tokenizer of the model in {folder}"),
            None => format!("use model.vocab_size = {ids} or more, or another tokenizer"),
        };
        faults.push(Fault::new("data.tokenizer", &shown, problem, valid));
    }
    let marks = [
        ("data.beginning_of_text", config.data.beginning_of_text, tokenizer.beginning_of_text()),
        ("data.end_of_text", config.data.end_of_text, tokenizer.end_of_text()),
    ];
    let before = faults.len();
    for (key, setting, auto) in marks {
        let (id, shown) = match setting {
            EndOfText::Number(id) => (Some(id), id.to_string()),
            EndOfText::Word(EndOfTextWord::Auto) if from_text && !wide => (auto, "\"auto\"".to_owned()),
            EndOfText::Word(_) => (None, String::new()),
        };
        if let Some(id) = id.filter(|id| *id as usize >= vocab_size) {
            let of_tokenizer = if setting == EndOfText::Number(id) { String::new() } else { format!("{id} ") };
            let problem = format!("{of_tokenizer}is beyond model.vocab_size = {vocab_size}");
            faults.push(Fault::new(key, shown, problem, format!("use an id below {vocab_size}")));
        }
    }
    if faults.len() > before {
        return faults;
    }
    for source in sources.iter().filter(|source| !(wide && source.from_text)) {
        let (mut first, mut largest) = (None, 0);
        let seen = source.stream.tokens.sample(|start, ids| {
            let beyond = ids.iter().position(|&id| id as usize >= vocab_size);
            first = first.or(beyond.map(|at| (start + at as u64, ids[at])));
            largest = ids.iter().copied().fold(largest, i32::max);
        });
        if let Err(error) = seen {
            let problem = format!("{} {}", error.path.display(), error.problem);
            faults.push(Fault::new(source.key, &source.shown, problem, error.problem.valid()));
        } else if let Some((at, id)) = first {
            let problem = format!("token {at} is {id}, beyond model.vocab_size = {vocab_size}");
            let valid = format!("use model.vocab_size = {} or more", i64::from(largest) + 1);
            faults.push(Fault::new(source.key, &source.shown, problem, valid));
        }
    }
    faults
}

/// The notice of special tokens that the model does not have.
pub(super) fn beyond(sources: &[Source], tokenizer: &Tokenizer, config: &Config) -> Option<String> {
    let (all, of_text, vocab_size) = (tokenizer.vocab_size(), tokenizer.vocab_size_of_text(), config.model.vocab_size);
    let from_text = sources.iter().any(|source| source.from_text);
    (from_text && of_text <= vocab_size && vocab_size < all).then(|| {
        format!(
            "the tokenizer has special tokens up to id {}, and the model {vocab_size} tokens: text never becomes them",
            all - 1
        )
    })
}

/// The fault of text for a model whose folder has no tokenizer that is read.
fn no_tokenizer(folder: &Path, vocab_size: usize) -> Fault {
    let others = ["tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"];
    let found = others.into_iter().find(|name| folder.join(name).is_file());
    let (also, valid) = match found {
        Some(found) => {
            let how = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes it from";
            (format!(", only {found}"), format!("{how} {found}; or set data.tokenizer"))
        }
        None => (String::new(), "set data.tokenizer to bytes, gpt2 or the path of a tokenizer.json".to_owned()),
    };
    let problem = format!(
        "the model in {} has {vocab_size} tokens, and its folder has no tokenizer.json{also}",
        folder.display()
    );
    Fault::new("data.tokenizer", "(unset)", problem, valid)
}

/// Streams in which nothing marks the documents, where boundaries are asked for.
pub(super) fn documents<'a>(sources: &'a [Source], config: &'a Config) -> impl Iterator<Item = Fault> + 'a {
    let unmarked = |source: &&Source| matches!(source.stream.documents, Documents::Unmarked);
    sources.iter().filter(move |source| config.data.documents != "stream" && unmarked(source)).map(|source| {
        let problem = format!("nothing marks the documents of {} = {}", source.key, source.shown);
        let valid =
            "set data.end_of_text to the id that ends a document, or data.tokenizer to one that has it, or use stream";
        Fault::new("data.documents", format!("{:?}", config.data.documents), problem, valid)
    })
}

/// A run that takes examples, and is given none.
pub(super) fn examples(config: &Config) -> Option<Fault> {
    let given = config.data.path.is_some() || !config.data.sources.is_empty();
    let objective = config.training.objective;
    (objective != Objective::Pretrain && !given && config.training.steps > 0).then(|| {
        let valid = "set data.path to JSON lines of them (docs/finetune.md)";
        Fault::new("training.objective", objective, "there are no examples", valid)
    })
}

/// Parts without a whole sample.
pub(super) fn lengths(data: &Data, names: &[(&'static str, String)], config: &Config) -> Vec<Fault> {
    let need = format!("fewer than one sample of model.seq_len + 1 = {} tokens", data.seq_len as u128 + 1);
    let mut faults = Vec::new();
    for (source, (key, shown)) in names.iter().enumerate() {
        let part = &data.parts[source];
        let all = part.stream.tokens.len();
        let held_out = all - part.training;
        if data.samples_of(source, false) == 0 {
            let rest =
                if held_out > 0 { format!(" after {held_out} are held out for validation") } else { String::new() };
            let problem = format!("leaves {} of {all} tokens for training{rest}, {need}", part.training);
            let valid = match part.training {
                0 | 1 => "use more data".to_owned(),
                tokens => format!("use more data, or model.seq_len of at most {}", tokens - 1),
            };
            faults.push(Fault::new(*key, shown, problem, valid));
        }
        if config.validation.held_out() > 0.0 && held_out <= data.seq_len as u64 {
            let problem = format!("holds out {held_out} of {all} tokens of {key} = {shown}, {need}");
            let valid = "use a larger fraction, more data or a smaller model.seq_len";
            faults.push(Fault::new("validation.fraction", config.validation.fraction, problem, valid));
        }
    }
    faults
}
