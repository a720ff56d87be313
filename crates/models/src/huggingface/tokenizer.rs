//! The files of a tokenizer beside a model, which are carried over as they are.

use super::{Error, content};
use std::collections::BTreeMap;
use std::path::Path;

/// The folder of chat templates beside the first.
pub(super) const TEMPLATES: &str = "additional_chat_templates";

/// Whether a file of this name is of a tokenizer.
pub(super) fn is_file(name: &str) -> bool {
    let names =
        ["special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json"];
    names.contains(&name)
        || name.ends_with(".model")
        || ["tokenizer.", "tokenizer_config.", "chat_template."].iter().any(|begin| name.starts_with(begin))
}

/// The files of a folder that are of its tokenizer, by name: `tokenizer.json`, `tokenizer_config.json`,
/// `special_tokens_map.json`, `vocab.json`, `merges.txt`, `tokenizer.model`, chat templates and the like.
///
/// # Errors
/// A file that cannot be read, or that is a Git LFS pointer.
pub fn tokenizer_files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>, Error> {
    let templates = content::names(&folder.join(TEMPLATES)).into_iter().map(|name| format!("{TEMPLATES}/{name}"));
    let names = content::names(folder).into_iter().filter(|name| is_file(name)).chain(templates);
    let read = |name: String| {
        let path = folder.join(&name);
        let bytes = std::fs::read(&path).map_err(|source| Error::File { path: path.clone(), source })?;
        match content::foreign(&bytes).filter(|_| bytes.starts_with(content::LFS)) {
            Some(what) => Err(Error::Format { path, problem: format!("is {what}") }),
            None => Ok((name, bytes)),
        }
    };
    names.map(read).collect()
}
