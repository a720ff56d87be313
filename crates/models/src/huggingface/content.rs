//! The real content of a folder and its files, where the names promise something else.

use super::Error;
use std::path::Path;

/// The stand-in of a large file that was not fetched.
pub(super) const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The first bytes of files that lie under the names of others, and what such a file is.
const KINDS: [(&[u8], &str); 9] = [
    (LFS, "a Git LFS pointer, not the file: fetch the file with `git lfs pull`"),
    (b"PK\x03\x04", "a file of PyTorch, not of safetensors: load it with `transformers` and `save_pretrained` it"),
    (
        b"\x80\x02",
        "a pickle of Python, not a file of safetensors: load it with `transformers` and `save_pretrained` it",
    ),
    (b"GGUF", "a GGUF file of llama.cpp: take the folder that it was made from"),
    (b"\x89HDF", "a file of HDF5: load it with `transformers` and `save_pretrained` it"),
    (b"\x1f\x8b", "compressed by gzip: unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it"),
    (b"<!DOCTYPE", "a web page, not the file: download the file itself"),
    (b"<html", "a web page, not the file: download the file itself"),
];

/// The kind of a file that begins with these bytes, if a folder of Hugging Face has no such file under that name.
#[must_use]
pub fn foreign(first: &[u8]) -> Option<&'static str> {
    let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
    KINDS.iter().find(|(bytes, _)| first.starts_with(bytes)).map(|(_, what)| *what)
}

/// The JSON in a file of a folder.
pub(super) fn json(path: &Path) -> Result<serde_json::Value, Error> {
    let refuse = |problem: String| Err(Error::Format { path: path.to_owned(), problem });
    let bytes = std::fs::read(path).map_err(|source| Error::File { path: path.to_owned(), source })?;
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    match serde_json::from_slice(text) {
        Ok(value) => Ok(value),
        Err(_) if text.is_empty() => refuse("is empty".to_owned()),
        Err(error) => match foreign(text) {
            Some(what) => refuse(format!("is {what}")),
            None => refuse(format!("is not JSON: {error}")),
        },
    }
}

/// The same of a file that a folder may lack.
pub(super) fn json_if_there(path: &Path) -> Result<Option<serde_json::Value>, Error> {
    if is_there(path) { json(path).map(Some) } else { Ok(None) }
}

/// Whether there is a file of this name; a link to nothing counts, so that opening it names it.
pub(super) fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The names in a folder, sorted; none if it cannot be read.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Refuses what is no folder with a `config.json`, and says what it is instead.
pub(super) fn require_config(folder: &Path) -> Result<(), Error> {
    let refuse = |problem: String| Err(Error::Format { path: folder.to_owned(), problem });
    if folder.is_file() {
        let name = folder.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let what = if name == "gguf" { "a GGUF file of llama.cpp" } else { "a file" };
        return refuse(format!("is {what}, not a folder with config.json and model.safetensors"));
    }
    if !folder.is_dir() {
        let hint = "download a model of the hub first: `hf download NAME --local-dir DIR`";
        return refuse(format!("there is no such folder, so no config.json; {hint}"));
    }
    let names = names(folder);
    let with = |test: &dyn Fn(&str) -> bool| names.iter().find(|name| test(name));
    // transformers loads the base model of an adapter, wherever that is, and the adapter onto it.
    if is_there(&folder.join("adapter_config.json")) {
        let adapter = json(&folder.join("adapter_config.json"))?;
        let text = |key: &str| adapter[key].as_str().map(str::to_owned);
        let kind = text("peft_type").unwrap_or_else(|| "PEFT".to_owned());
        let base = text("base_model_name_or_path").unwrap_or_else(|| "its base model".to_owned());
        return refuse(format!(
            "adapter_config.json: a {kind} adapter, whose weights are changes of {base}, and no model: start from {base} and give this \
             folder as lora.init_from, or merge it into {base} with `merge_and_unload` of peft, and `save_pretrained` the result"
        ));
    }
    if is_there(&folder.join("config.json")) {
        return Ok(());
    }
    let problem = if let Some(name) = with(&|name| name.ends_with(".gguf")) {
        format!("has {name}, a GGUF file of llama.cpp, and no config.json: take the folder that it was made from")
    } else if with(&|name| name == "params.json").is_some() || with(&|name| name.ends_with(".pth")).is_some() {
        "has no config.json but params.json or .pth files, the original form of a Llama: take its folder in Hugging Face form, or convert \
         it with `convert_llama_weights_to_hf.py` of transformers"
            .to_owned()
    } else if let Some(name) = with(&|name| name.starts_with("step-")) {
        format!("has {name} and no config.json: a folder of checkpoints is gone on from, not a model to start from")
    } else if with(&|name| name == "model_index.json").is_some() {
        "has model_index.json, a pipeline of diffusers, and no config.json".to_owned()
    } else if let Some(name) = names.iter().find(|name| is_there(&folder.join(name).join("config.json"))) {
        format!("has no config.json; {name} inside it has one")
    } else {
        "has no config.json".to_owned()
    };
    refuse(problem)
}

/// Why a folder with a `config.json` has no weights that can be read.
pub(super) fn no_weights(folder: &Path) -> Error {
    let names = names(folder);
    let with = |ends: &[&str]| names.iter().find(|name| ends.iter().any(|end| name.ends_with(end))).cloned();
    let convert = "load the folder with `transformers` and `save_pretrained` it, which writes model.safetensors";
    let problem = if let Some(name) = with(&[".safetensors"]) {
        format!(
            "has {name} but neither model.safetensors nor model.safetensors.index.json, which names the shards: add the index"
        )
    } else if let Some(name) = with(&[".bin", ".bin.index.json", ".pt", ".pth"]) {
        format!("has its weights in {name}, in the form of PyTorch, and no model.safetensors: {convert}")
    } else if let Some(name) = with(&[".gguf"]) {
        format!(
            "has its weights in {name}, a GGUF file of llama.cpp, and no model.safetensors: take the folder that it was made from"
        )
    } else if let Some(name) = with(&[".h5", ".msgpack", ".onnx"]) {
        format!("has its weights in {name} and no model.safetensors: {convert}")
    } else {
        "has neither model.safetensors nor model.safetensors.index.json with its shards".to_owned()
    };
    Error::Format { path: folder.to_owned(), problem }
}
