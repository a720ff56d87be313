//! Models in the folders of Hugging Face: `config.json`, and `model.safetensors` or its shards. Read straight into any
//! mesh, and written so that `transformers` loads them. No Python is involved.
//!
//! ```
//! use meshwork_models::huggingface::{Architecture, Dtype, Pretrained, export};
//! use meshwork_models::llama::{LlamaConfig, PRESETS};
//! use meshwork_tensor::param::LocalSlice;
//!
//! # let folder = std::env::temp_dir().join(format!("meshwork-huggingface-{}", std::process::id()));
//! let tiny = LlamaConfig { num_layers: 1, hidden_size: 8, num_heads: 2, num_kv_heads: 1, ffn_hidden_size: 12, ..PRESETS[0].1 };
//! let specs = Architecture::llama(tiny).parameters()?;
//! // Every parameter is 1, 2, 3, ...
//! export(&folder, &Architecture::llama(tiny), Dtype::F32, |spec| Ok((1..=spec.dims.count()).map(|i| i as f32).collect()))?;
//!
//! let read = Pretrained::open(&folder)?;
//! assert_eq!(read.architecture(), &Architecture::llama(tiny));
//! let norm = specs.iter().find(|spec| spec.name == "norm.weight").unwrap();
//! assert_eq!(read.read(norm, &LocalSlice::whole(norm.dims))?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adapter;
mod config;
mod content;
mod export;
mod layout;
mod lora;
mod slices;
mod staged;
mod tensors;
mod tokenizer;
mod written;

pub use adapter::{AdapterExport, BASE_HASH, PretrainedAdapter};
pub use config::not_of_mixtral;
pub use content::foreign;
pub use export::{Export, export};
pub use lora::{ALL_LINEAR, Lora};
pub use tensors::Dtype;
pub use tokenizer::tokenizer_files;
pub use written::Settings;

use crate::decoder::{DecoderConfig, DecoderModel};
use crate::experts::ExpertsConfig;
use crate::families::{Family, TensorPart, gpt2, llama, mistral, mixtral};
use meshwork_core::Mesh;
use meshwork_nn::{Model, StageSpec};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Declarations, ParamSpec, Role};
use serde_json::Value;
use slices::{problem_of, read_parts};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tensors::Tensors;

/// A folder that cannot be read or written.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum Error {
    /// A file or folder that cannot be opened, read or written.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    /// A file that is not what its name says.
    #[error("{}: {problem}", path.display())]
    Format { path: PathBuf, problem: String },
    /// Files that are not what their names say, or that cannot be read: all of them.
    #[error("{}", .0.iter().map(Error::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<Error>),
    /// A folder that has files of another model.
    #[error("{}: has files of a model already: {files}", path.display())]
    Occupied { path: PathBuf, files: String },
    /// A disk with too little room for a folder.
    #[error("{}: needs {needed} bytes, and the disk has {free}", path.display())]
    Room { path: PathBuf, needed: u64, free: u64 },
    /// A folder that was written and could not be put in its place.
    #[error("{source}; the model is whole in {}: rename that folder to {}", written.display(), target.display())]
    Unplaced { written: PathBuf, target: PathBuf, source: Box<Error> },
    /// Weights that the type of an export does not have.
    #[error("the weights of {name}: {value} is no number in {}: nothing is written", dtype.name())]
    NotFinite { name: String, value: f32, dtype: Dtype },
    /// Settings of `config.json` that are missing or not supported: all of them.
    #[error("config.json: {}", .0.join("; "))]
    Config(Vec<String>),
    /// Tensors that are missing, misshapen or not of this model: all of them.
    #[error("model.safetensors: {}", tensors::listed(.0))]
    Tensors(Vec<String>),
    /// Adapters that the model cannot have.
    #[error("{problem}; {valid}")]
    Lora { problem: String, valid: String },
    /// A model that cannot be declared.
    #[error(transparent)]
    Model(#[from] meshwork_tensor::Error),
    /// Weights that the caller could not give.
    #[error("the weights of {name}: {source}")]
    Weights { name: String, source: Box<dyn std::error::Error + Send + Sync> },
}

meshwork_core::debug_as_display!(Error);

impl Error {
    /// One error of several, if there are any.
    fn all(mut errors: Vec<Self>) -> Option<Self> {
        match errors.len() {
            0 | 1 => errors.pop(),
            _ => Some(Self::Several(errors)),
        }
    }
}

/// A model that can be read and written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Architecture {
    /// Its family.
    pub family: &'static Family,
    /// Its sizes.
    pub decoder: DecoderConfig,
    /// Its experts, if it has some: those of the family, such as [a Mixtral's](not_of_mixtral).
    pub experts: Option<ExpertsConfig>,
}

impl Architecture {
    /// The model that a `config.json` describes.
    ///
    /// # Errors
    /// A text that is not JSON; everything that is missing, misshapen or not supported, together.
    pub fn read(text: &str) -> Result<Self, Error> {
        let value = serde_json::from_str(text).map_err(|error| Error::Config(vec![format!("is not JSON: {error}")]))?;
        config::read(&value)
    }

    /// A GPT-2.
    pub fn gpt2(decoder: DecoderConfig) -> Self {
        Self { family: &gpt2::FAMILY, decoder, experts: None }
    }

    /// A Llama; with a sliding window, a Mistral.
    pub fn llama(decoder: DecoderConfig) -> Self {
        let family = if decoder.sliding_window.is_some() { &mistral::FAMILY } else { &llama::FAMILY };
        Self { family, decoder, experts: None }
    }

    /// A Mixtral: a Llama with [experts that it has](not_of_mixtral) in every layer.
    pub fn mixtral(decoder: DecoderConfig, experts: ExpertsConfig) -> Self {
        Self { family: &mixtral::FAMILY, decoder, experts: Some(experts) }
    }

    /// The model.
    pub fn model(&self) -> Arc<dyn Model> {
        Arc::new(DecoderModel::new(self.decoder).with_experts(self.experts))
    }

    /// Every parameter of the folder, in the order of declaration; of the buffers those that files have, as the biases
    /// of a router, and not those that it counts tokens in.
    ///
    /// # Errors
    /// Sizes that no model has.
    pub fn parameters(&self) -> Result<Vec<ParamSpec>, Error> {
        self.parameters_on(&Mesh::default())
    }

    /// The same as they are placed on a mesh.
    ///
    /// # Errors
    /// Sizes that no model has, or that the mesh cannot cut.
    pub fn parameters_on(&self, mesh: &Mesh) -> Result<Vec<ParamSpec>, Error> {
        let model = self.model();
        let mut all = Declarations::new();
        let whole = StageSpec { layers: 0..model.num_layers(), first: true, last: true };
        model.stage(&mut all, mesh, &whole)?;
        let is_there =
            |spec: &&ParamSpec| spec.role != Role::Buffer || !layout::parts(self, &spec.name, spec.dims).is_empty();
        Ok(all.specs().iter().filter(is_there).cloned().collect())
    }
}

/// A model in a folder, its files open for reading.
#[derive(Debug)]
pub struct Pretrained {
    architecture: Architecture,
    tensors: Tensors,
    /// The prefix of the tensors' names in these files.
    prefix: &'static str,
    settings: Settings,
    ends_of_text: Vec<u32>,
}

impl Pretrained {
    /// Opens a folder: reads `config.json` and the headers, and checks that they have exactly the tensors of the model.
    ///
    /// # Errors
    /// Files that are missing or damaged; settings that are not supported; tensors that are missing, misshapen, of
    /// another type than f32, bf16 and f16, or that the model does not have.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        content::require_config(folder)?;
        let path = folder.join("config.json");
        let config = content::json(&path)?;
        // Written beside the sizes by every recent version; a folder without it is whole.
        let generation = content::json_if_there(&folder.join("generation_config.json"))?;
        let (architecture, tensors) = match (config::read(&config), Tensors::open(folder)) {
            (Ok(architecture), Ok(tensors)) => (architecture, tensors),
            (architecture, tensors) => {
                let errors = architecture.err().into_iter().chain(tensors.err()).collect();
                return Err(Error::all(errors).unwrap_or(Error::Config(Vec::new())));
            }
        };
        let prefix = architecture.family.prefix;
        let prefixed = tensors.names().any(|name| name.starts_with(prefix));
        let object = |value: Value| value.as_object().cloned();
        let settings = Settings { config: object(config).unwrap_or_default(), generation: generation.and_then(object) };
        let ends_of_text = written::ends_of_text(&settings);
        let prefix = if prefixed { prefix } else { "" };
        let read = Self { architecture, tensors, prefix, settings, ends_of_text };
        read.require_tensors()?;
        Ok(read)
    }

    /// What `config.json` and `generation_config.json` say, for an [`Export`] to keep.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The type of the weights, if it is that of all of them. Buffers may have another one.
    pub fn dtype(&self) -> Option<Dtype> {
        let specs = self.architecture.parameters().unwrap_or_default();
        let buffers = specs.iter().filter(|spec| spec.role == Role::Buffer);
        let parts = buffers.flat_map(|spec| layout::parts(&self.architecture, &spec.name, spec.dims));
        let buffers: BTreeSet<String> = parts.map(|part| self.name(&part)).collect();
        self.tensors.dtype(|name| !self.is_beside(name) && !buffers.contains(name))
    }

    /// The model.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// The tokens that end a text (`eos_token_id`), as `generation_config.json` says, or else `config.json`.
    pub fn ends_of_text(&self) -> &[u32] {
        &self.ends_of_text
    }

    /// The texts in the metadata of the files of weights, by name.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.tensors.metadata()
    }

    /// Bytes of weights read so far.
    pub fn bytes_read(&self) -> u64 {
        self.tensors.bytes_read()
    }

    /// The elements of a parameter that a rank holds, as they are stored there: padding is zero, and so are buffers
    /// that the folder does not have. Only their bytes are read.
    ///
    /// # Errors
    /// A file that cannot be read, a parameter that the model does not have.
    pub fn read(&self, spec: &ParamSpec, slice: &LocalSlice) -> Result<Vec<f32>, Error> {
        let parts = layout::parts(&self.architecture, &spec.name, spec.dims);
        if parts.is_empty() && spec.role != Role::Buffer {
            return Err(Error::Tensors(vec![format!("the model has no parameter {}", spec.name)]));
        }
        read_parts(&self.tensors, &parts, |part| self.name(part), slice)
    }

    /// The name of a part's tensor in these files.
    fn name(&self, part: &TensorPart) -> String {
        layout::name(&self.architecture, part, self.prefix)
    }

    fn is_beside(&self, name: &str) -> bool {
        layout::is_beside(&self.architecture, name.strip_prefix(self.prefix).unwrap_or(name))
    }

    /// Refuses files that do not have exactly the tensors of the model.
    fn require_tensors(&self) -> Result<(), Error> {
        let (mut problems, mut known) = (Vec::new(), BTreeSet::new());
        for spec in self.architecture.parameters()? {
            for part in &layout::parts(&self.architecture, &spec.name, spec.dims) {
                let name = self.name(part);
                if !known.insert(name.clone()) {
                    continue;
                }
                problems.extend(problem_of(&self.tensors, part, &name, "the model's"));
            }
        }
        let extra = self.tensors.names().filter(|&name| !known.contains(name) && !self.is_beside(name));
        problems.extend(extra.map(|name| format!("the model has no tensor {name}")));
        if problems.is_empty() { Ok(()) } else { Err(Error::Tensors(problems)) }
    }
}
