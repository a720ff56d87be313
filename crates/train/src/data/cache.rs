//! Text is tokenised once: the tokens of a long text are kept as an indexed dataset, Megatron's format, beside the
//! text.
//!
//! ```text
//! web.jsonl
//! web.jsonl.tokens/
//!     4c2b…91.bin   the tokens            of the text and the tokenizer whose hash is the name
//!     4c2b…91.idx   where documents begin
//!     4c2b…91.json  their source, and the hash of the tokens; renamed into place last
//!     4c2b…91.lock  held by the process that writes them
//! ```
//! Reading needs no right to write: a whole dataset is taken wherever it lies, beside the text or in the user's own
//! folder of caches. Only a process that writes one takes the lock. Where the folder beside the text cannot be written,
//! that is the user's own.
//!
//! A dataset counts only if its `.json` is there, names this hash, and the tokens have the hash that it says. Otherwise
//! it is written anew. Files are written under another name and renamed, so that a process that dies leaves nothing
//! that counts.

use super::indexed;
use super::piece::PieceTokens;
use super::prelude::*;
use super::text::Texts;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::io::{IsTerminal, Write};
use std::thread;
use std::time::{Duration, Instant};

/// Changes whenever the same text would give other tokens.
const FORMAT: u64 = 2;
/// A text of at most this many bytes is tokenised by each run and kept in memory, if its tokens are its bytes, which
/// takes no time.
const BYTES_IN_MEMORY: u64 = 64 << 20;
/// The same of other tokenizers.
const TOKENS_IN_MEMORY: u64 = 1 << 20;
/// Bytes of text that are encoded together, by all threads.
const TOGETHER: usize = 8 << 20;
/// Time between lines of progress where there is no terminal.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a text becomes tokens, and where they are kept.
pub(super) struct Tokenisation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub reading: Reading<'a>,
    /// The id before each document.
    pub beginning_of_text: Option<u32>,
    /// The id behind each document.
    pub end_of_text: Option<u32>,
    /// The folder for caches; none: beside the text.
    pub folder: Option<&'a Path>,
    /// The user's own folder for caches, for where the one beside the text cannot be written.
    pub own_folder: Option<PathBuf>,
}

/// The folder of this user for caches of meshwork.
pub(super) fn own_folder() -> Option<PathBuf> {
    let of = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = if cfg!(windows) { of("LOCALAPPDATA") } else { of("XDG_CACHE_HOME") };
    let caches = caches.or_else(|| Some(std::env::home_dir().filter(|home| home.is_absolute())?.join(".cache")));
    Some(caches?.join("meshwork"))
}

struct CacheFiles {
    folder: PathBuf,
    hash: String,
}

impl CacheFiles {
    fn at(&self, extension: &str) -> PathBuf {
        self.folder.join(format!("{}.{extension}", self.hash))
    }

    /// The right to write here, until it is dropped or the process ends. Waits for another process that writes.
    fn lock(&self) -> io::Result<File> {
        fs::create_dir_all(&self.folder)?;
        let file = File::options().write(true).create(true).truncate(false).open(self.at("lock"))?;
        match file.lock() {
            // Two processes may then do the same work, and rename the same files into place.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(file),
            locked => locked.map(|()| file),
        }
    }

    /// The stream that lies here. The inner `None` if there is none, else its damage.
    fn read(&self) -> Result<(Stream, About), Option<String>> {
        let told = match fs::read(self.at("json")) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(None);
            }
            told => told.map_err(|error| Some(error.to_string()))?,
        };
        let about: About =
            serde_json::from_slice(&told).map_err(|error| Some(format!("its .json is damaged: {error}")))?;
        if (about.format, &about.hash) != (FORMAT, &self.hash) {
            return Err(Some(format!("its .json is of format {} and hash {}", about.format, about.hash)));
        }
        let open = || {
            let (tokens, index) = indexed::open(&self.at("idx"), &self.at("bin"))?;
            Stream::new(tokens, Documents::Indexed(index))
        };
        let stream = open().map_err(|error| Some(error.to_string()))?;
        let found = format!("{:016x}", stream.hash);
        match found == about.token_hash {
            true => Ok((stream, about)),
            false => Err(Some(format!("its tokens have the hash {found}, not {}", about.token_hash))),
        }
    }
}

/// The content of the `.json` of a cache.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct About {
    format: u64,
    hash: String,
    source: PathBuf,
    tokenizer: String,
    tokens: u64,
    token_hash: String,
    notices: Vec<String>,
}

/// Receives the tokens of a part of a document, and whether the document ends with it.
type Sink<'a> = dyn FnMut(&PieceTokens, bool) -> io::Result<()> + 'a;

impl Tokenisation<'_> {
    /// The stream of some texts, from the cache if they are long, and notices about how it was made.
    pub fn stream(&self, path: &Path, texts: &Texts) -> Result<(Stream, Vec<String>), DataError> {
        let most = if self.tokenizer.is_bytes() { BYTES_IN_MEMORY } else { TOKENS_IN_MEMORY };
        // Which tokens of examples are learnt has no place in an indexed dataset.
        let caches = texts.bytes() > most && self.reading.examples.is_none();
        if caches { self.cached(path, texts) } else { self.in_memory(path, texts) }
    }

    fn in_memory(&self, path: &Path, texts: &Texts) -> Result<(Stream, Vec<String>), DataError> {
        let (mut tokens, mut masked, mut starts): (Vec<i32>, Vec<bool>, _) = (Vec::new(), Vec::new(), vec![0]);
        let notices = self.run(path, texts, &mut |piece, ends| {
            tokens.extend(piece.ids.iter().map(|&id| id as i32));
            masked.extend_from_slice(&piece.masked);
            starts.extend(ends.then_some(tokens.len() as u64));
            Ok(())
        })?;
        starts.pop();
        starts.dedup();
        let stream = Stream::new(Tokens::Memory(tokens.into()), Documents::Starts(starts.into()))?;
        Ok((if masked.is_empty() { stream } else { stream.masked(masked) }, notices))
    }

    fn cached(&self, path: &Path, texts: &Texts) -> Result<(Stream, Vec<String>), DataError> {
        let id = |id: Option<u32>| id.map_or(u64::MAX, u64::from);
        let how = [id(self.beginning_of_text), self.tokenizer.fingerprint(), self.reading.fingerprint()];
        let parts = [FORMAT, id(self.end_of_text)].into_iter().chain(how);
        let hash = format!("{:016x}", parts.fold(texts.fingerprint()?, hash::combine));
        let source = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let name = format!("{}.tokens", PathBuf::from(source.file_name().unwrap_or_default()).display());
        let folders: Vec<PathBuf> = match self.folder {
            Some(folder) => vec![folder.join(&name)],
            None => [source.with_file_name(&name)]
                .into_iter()
                .chain(self.own_folder.as_ref().map(|own| own.join(&name)))
                .collect(),
        };
        let places: Vec<CacheFiles> =
            folders.into_iter().map(|folder| CacheFiles { folder, hash: hash.clone() }).collect();
        if let Some((stream, about)) = places.iter().find_map(|place| place.read().ok()) {
            return Ok((stream, about.notices));
        }
        let mut refused = Vec::new();
        for place in &places {
            match place.lock() {
                Ok(lock) => {
                    let mut notices: Vec<String> = refused.iter().map(|(folder, error): &(&Path, io::Error)| {
                        format!(
                            "tokens of {} are kept in {}, because {} cannot be written ({error}); data.cache_dir sets the folder",
                            path.display(),
                            place.folder.display(),
                            folder.display()
                        )
                    }).collect();
                    let (stream, told) = self.write(path, texts, place, lock, source)?;
                    notices.extend(told);
                    return Ok((stream, notices));
                }
                Err(error) => refused.push((&place.folder, error)),
            }
        }
        let (folder, error) = refused.swap_remove(0);
        let others = refused.iter().map(|(folder, error)| format!("; nor can {} ({error})", folder.display()));
        let error = io::Error::new(error.kind(), format!("{error}{}", others.collect::<String>()));
        Err(Problem::Cache(error).in_file(folder))
    }

    /// Writes the cache at a place whose lock this process has, unless another process has written it meanwhile.
    fn write(
        &self,
        path: &Path,
        texts: &Texts,
        place: &CacheFiles,
        lock: File,
        source: PathBuf,
    ) -> Result<(Stream, Vec<String>), DataError> {
        let mut notices = Vec::new();
        match place.read() {
            Ok((stream, about)) => return Ok((stream, about.notices)),
            Err(None) => {}
            Err(Some(problem)) => {
                notices.push(format!("the token cache {} was written anew: {problem}", place.at("bin").display()));
            }
        }
        let failed = |error| Problem::Cache(error).in_file(&place.folder);
        let part = |extension: &str| place.at(&format!("part.{extension}"));
        let began = Instant::now();
        let mut writer = indexed::Writer::create(&part("idx"), &part("bin"), self.vocab()).map_err(failed)?;
        let told = self.run(path, texts, &mut |piece, ends| {
            writer.add(&piece.ids)?;
            if ends { writer.end_document() } else { Ok(()) }
        })?;
        writer.finish().map_err(failed)?;
        let (tokens, _) = indexed::open(&part("idx"), &part("bin"))?;
        let about = About {
            format: FORMAT,
            hash: place.hash.clone(),
            source,
            tokenizer: format!("{:016x}", self.tokenizer.fingerprint()),
            tokens: tokens.len(),
            token_hash: format!("{:016x}", tokens.hash()?),
            notices: told,
        };
        let commit = || {
            _ = fs::remove_file(place.at("json"));
            fs::write(part("json"), serde_json::to_vec_pretty(&about)?)?;
            ["bin", "idx", "json"]
                .into_iter()
                .try_for_each(|extension| fs::rename(part(extension), place.at(extension)))
        };
        commit().map_err(failed)?;
        drop(lock);
        let (tokens, index) = indexed::open(&place.at("idx"), &place.at("bin"))?;
        let stream = Stream::new(tokens, Documents::Indexed(index))?;
        notices.push(format!(
            "tokenised {} ({}) into {} tokens in {:.1} s, kept in {}",
            path.display(),
            HumanBytes(texts.bytes()),
            about.tokens,
            began.elapsed().as_secs_f64(),
            place.at("bin").display()
        ));
        notices.extend(about.notices);
        Ok((stream, notices))
    }

    fn vocab(&self) -> usize {
        let marks = [self.beginning_of_text, self.end_of_text].into_iter().flatten();
        marks.map(|id| id as usize + 1).fold(self.tokenizer.vocab_size(), usize::max)
    }

    /// Gives the tokens of all documents in their order. Returns notices about documents that are left out.
    fn run(&self, path: &Path, texts: &Texts, sink: &mut Sink<'_>) -> Result<Vec<String>, DataError> {
        let mut progress = Progress::new(path, texts.bytes());
        let (mut waiting, mut held, mut begins) = (Vec::new(), 0, true);
        let mut encode = |waiting: &mut Vec<DocumentPiece>, held: &mut usize| {
            let encoded = self.encode(waiting).map_err(|error| Problem::Encode(error).in_file(path))?;
            for (piece, tokens) in waiting.drain(..).zip(encoded) {
                let written = piece.answers.as_ref().is_some_and(|answers| answers.templated);
                let beginning = self.beginning_of_text.filter(|_| begins && !written);
                let end = self.end_of_text.filter(|_| piece.last && !written);
                begins = piece.last;
                sink(&tokens.between(beginning, end), piece.last)
                    .map_err(|error| Problem::Cache(error).in_file(path))?;
            }
            progress.add(std::mem::take(held));
            Ok(())
        };
        let notices = texts.read(&self.reading, self.tokenizer, |piece| {
            held += piece.text.len();
            waiting.push(piece);
            if held >= TOGETHER { encode(&mut waiting, &mut held) } else { Ok(()) }
        })?;
        encode(&mut waiting, &mut held)?;
        Ok(notices)
    }

    /// The ids of each piece, by all cores.
    fn encode(&self, pieces: &[DocumentPiece]) -> Result<Vec<PieceTokens>, String> {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let each = pieces.len().div_ceil(threads).max(1);
        let encode = |pieces: &[DocumentPiece]| {
            pieces.iter().map(|piece| self.tokenizer.encode_piece(piece)).collect::<Vec<_>>()
        };
        if pieces.len() <= each {
            return encode(pieces).into_iter().collect();
        }
        thread::scope(|scope| {
            let parts: Vec<_> = pieces.chunks(each).map(|part| scope.spawn(move || encode(part))).collect();
            let joined = parts.into_iter().map(|part| part.join().map_err(|_| "the tokenizer panicked".to_owned()));
            joined.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect()
        })
    }
}

/// Progress on standard error: a bar on a terminal, elsewhere a line every few seconds.
struct Progress {
    name: String,
    bytes: u64,
    done: u64,
    bar: Option<ProgressBar>,
    told: Instant,
}

impl Progress {
    fn new(path: &Path, bytes: u64) -> Self {
        let bar = (bytes > TOKENS_IN_MEMORY && io::stderr().is_terminal()).then(|| {
            let style = "tokenising {msg} {wide_bar} {bytes}/{total_bytes} ({bytes_per_sec}, {eta} left)";
            let style = ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(bytes).with_style(style).with_message(path.display().to_string())
        });
        Self { name: path.display().to_string(), bytes, done: 0, bar, told: Instant::now() }
    }

    fn add(&mut self, bytes: usize) {
        self.done += bytes as u64;
        match &self.bar {
            Some(bar) => bar.set_position(self.done),
            None if self.told.elapsed() >= PATIENCE => {
                self.told = Instant::now();
                let [done, all] = [self.done, self.bytes].map(HumanBytes);
                _ = writeln!(io::stderr(), "tokenising {}: {done} of {all}", self.name);
            }
            None => {}
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}

#[cfg(test)]
mod tests;
