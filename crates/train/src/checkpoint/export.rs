//! The model of a run as a Hugging Face folder: `checkpoint.export`.
//!
//! The weights come from the trainer, parameter by parameter: each rank sends rank 0 the slices that it is the first to
//! hold, and rank 0 has one whole parameter in memory at a time. So the folder has the same bytes on every mesh, and
//! needs no checkpoint.
//!
//! A model with [adapters](crate::config) is written with them added to its weights, or they are written alone, as a
//! folder of PEFT.

use super::{CheckpointError, dims_of, slice_of};
use crate::config::{Config, EndOfText, EndOfTextWord, Fault, LoraExport};
use crate::data::{Data, END, byte_level};
use crate::generate::Compressed;
use meshwork_checkpoint::{Block, Slice, copy};
use meshwork_core::{CommError, Group};
use meshwork_engine::{Plan, StateKind, StateView, TrainError, Trainer, state_layout};
use meshwork_models::huggingface::{self, AdapterExport, Export, Pretrained, tokenizer_files};
use meshwork_tensor::ParamSpec;
use meshwork_tensor::param::Adapters;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

const KEY: &str = "checkpoint.export";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The export of a run without its weights: its other files and its folder, known before training begins.
pub(crate) struct Planned {
    export: What,
    out: PathBuf,
}

/// What is written.
enum What {
    Model(Box<Export>),
    Adapter(Box<AdapterExport>),
}

impl Planned {
    /// The export of a run, if it has one.
    ///
    /// # Errors
    /// A folder to start from, or files of a tokenizer, that cannot be read.
    pub(crate) fn new(config: &Config, data: &Data) -> Result<Option<Self>, huggingface::Error> {
        let Some(out) = &config.checkpoint.export else { return Ok(None) };
        let from = config.model.init_from.as_deref().map(Path::new);
        let pretrained = from.map(Pretrained::open).transpose()?;
        let export = match (bare_adapter(config), &pretrained) {
            (Some(adapter), Some(base)) => {
                What::Adapter(Box::new(AdapterExport { base_hash: base.hash()?, ..adapter }))
            }
            _ => What::Model(Box::new(Export {
                from: pretrained.map(|pretrained| pretrained.settings().clone()).or_else(|| described(config)),
                ends_of_text: end_of_text(config, data).into_iter().collect(),
                files: tokenizer(config, data, from)?,
                ..bare(config)
            })),
        };
        Ok(Some(Self { export, out: out.into() }))
    }
}

/// The settings of a model that is described by its `config.json`.
fn described(config: &Config) -> Option<huggingface::Settings> {
    let of = serde_json::from_str(config.model.config.as_deref()?).ok()?;
    Some(huggingface::Settings { config: of, generation: None })
}

/// The export by the configuration alone.
fn bare(config: &Config) -> Export {
    Export {
        overwrite: config.checkpoint.export_overwrite,
        ..Export::new(config.architecture(), config.checkpoint.export_dtype.into())
    }
}

/// The export of the adapters alone by the configuration, if that is what is asked for; without the hash of the base.
fn bare_adapter(config: &Config) -> Option<AdapterExport> {
    let lora = config.lora.described().filter(|_| config.lora.export == LoraExport::Adapter)?;
    Some(AdapterExport {
        architecture: config.architecture(),
        lora,
        dtype: config.checkpoint.export_dtype.into(),
        base: config.model.init_from.as_deref()?.into(),
        base_hash: String::new(),
        overwrite: config.checkpoint.export_overwrite,
    })
}

/// The fault of a folder that could not be written at the end of the run, or that the run reads or writes to otherwise.
pub(crate) fn fault(config: &Config) -> Option<Fault> {
    let out = config.checkpoint.export.as_deref()?;
    let full = resolved(Path::new(out));
    let valid = "use a folder of its own";
    if let Some(from) = &config.model.init_from
        && resolved(Path::new(from)) == full
    {
        let problem = "is the folder of model.init_from, which a run that goes on reads again";
        return Some(Fault::new(KEY, out, problem, valid));
    }
    let folders = [
        ("checkpoint.dir", &config.checkpoint.dir),
        ("metrics.tensorboard", &config.metrics.tensorboard),
        ("memory.offload_dir", &config.memory.offload_dir),
        ("data.cache_dir", &config.data.cache_dir),
    ];
    let inside = |path: &Option<String>| path.as_ref().is_some_and(|path| resolved(Path::new(path)).starts_with(&full));
    if let Some((key, _)) = folders.into_iter().find(|(_, path)| inside(path)) {
        let problem = format!("has the folder of {key} in it, or is it, and the whole folder is replaced");
        return Some(Fault::new(KEY, out, problem, valid));
    }
    let checked = match bare_adapter(config) {
        Some(adapter) => adapter.check(Path::new(out)),
        None => bare(config).check(Path::new(out)),
    };
    match checked {
        // Sizes that no model has are faults of their own.
        Ok(()) | Err(huggingface::Error::Model(_) | huggingface::Error::Lora { .. }) => None,
        Err(error @ huggingface::Error::Occupied { .. }) => {
            let valid = "set checkpoint.export_overwrite = true to replace that model, or use another folder";
            Some(Fault::new(KEY, out, error.to_string(), valid))
        }
        Err(error) => Some(Fault::new(KEY, out, error.to_string(), valid)),
    }
}

/// The fault of files that belong beside the model and cannot be read.
pub(crate) fn fault_of_files(config: &Config, data: &Data) -> Option<Fault> {
    let error = Planned::new(config, data).err()?;
    let out = config.checkpoint.export.as_deref().unwrap_or_default();
    Some(Fault::new(KEY, out, error.to_string(), "use files that can be read, or leave it out"))
}

/// A path with its links resolved, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let full = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = full.ancestors().find_map(|part| Some((fs::canonicalize(part).ok()?, full.strip_prefix(part).ok()?)));
    let Some((mut there, rest)) = there else { return full };
    for part in rest.components() {
        match part {
            Component::ParentDir => _ = there.pop(),
            part => there.push(part),
        }
    }
    there
}

/// The token that ended documents in training.
pub(crate) fn end_of_text(config: &Config, data: &Data) -> Option<u32> {
    match config.data.end_of_text {
        EndOfText::Word(EndOfTextWord::Auto) => data.tokenizer().end_of_text(),
        EndOfText::Word(EndOfTextWord::None) => None,
        EndOfText::Number(id) => Some(id),
    }
}

/// The tokens that end a text of the model of this run: by the folder that it starts from, by its tokenizer, and the
/// token that ended documents.
pub(crate) fn ends_of_text(config: &Config, data: &Data) -> Vec<u32> {
    let from = config.model.init_from.as_deref().and_then(|folder| Pretrained::open(Path::new(folder)).ok());
    let mut ends = from.map(|from| from.ends_of_text().to_vec()).unwrap_or_default();
    for end in data.tokenizer().special().stops.iter().copied().chain(end_of_text(config, data)) {
        if !ends.contains(&end) {
            ends.push(end);
        }
    }
    ends
}

/// The files of the tokenizer of the run, by name.
fn tokenizer(
    config: &Config,
    data: &Data,
    from: Option<&Path>,
) -> Result<BTreeMap<String, Vec<u8>>, huggingface::Error> {
    let name = &*config.data.tokenizer;
    let path = Path::new(name);
    let beside = path.parent().filter(|beside| !beside.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let of_folder = from.map(tokenizer_files).transpose()?.unwrap_or_default();
    let mut files = match name {
        // The form of a folder without a tokenizer.json is not read here: its tokens come in files of tokens.
        "bytes" if !of_folder.is_empty() && !of_folder.contains_key(TOKENIZER) => return Ok(of_folder),
        "bytes" if !data.is_from_text() => return Ok(of_folder),
        "bytes" | "gpt2" => {
            let json = data.tokenizer().byte_level().map(|tokens| byte_level(&tokens, end_of_text(config, data)));
            json.map(|json| (TOKENIZER.to_owned(), json.into_bytes())).into_iter().collect()
        }
        _ if from.is_some_and(|from| resolved(from) == resolved(beside)) => return Ok(of_folder),
        _ if path.is_dir() => tokenizer_files(path)?,
        _ if path.file_name().is_some_and(|file| file == TOKENIZER) => tokenizer_files(beside)?,
        _ => {
            let read = fs::read(path).map_err(|source| huggingface::Error::File { path: path.to_owned(), source })?;
            BTreeMap::from([(TOKENIZER.to_owned(), read)])
        }
    };
    if files.contains_key(TOKENIZER) && !files.contains_key(TOKENIZER_CONFIG) {
        // Without it transformers takes the class of the architecture, which adds tokens of its own.
        let special = data.tokenizer().special();
        let end = match (name, end_of_text(config, data)) {
            ("bytes", Some(end)) => (end >= 256).then(|| END.to_owned()),
            ("gpt2", Some(_)) => Some(END.to_owned()),
            // Another token has no text of its own there.
            (_, end) => special.end.as_ref().filter(|of| Some(of.id) == end).and_then(|of| of.text.clone()),
        };
        let said = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
            "bos_token": special.beginning.as_ref().and_then(|of| of.text.clone()),
            "eos_token": end,
            "model_max_length": config.model.seq_len,
        });
        files.insert(TOKENIZER_CONFIG.to_owned(), format!("{said:#}\n").into_bytes());
    }
    Ok(files)
}

/// Writes the model after the last step. Collective: every rank calls it; rank 0 has the [`Planned`] and writes.
pub(crate) fn export(
    config: &Config,
    plan: &Plan,
    trainer: &Trainer,
    planned: Option<Planned>,
) -> Result<(), CheckpointError> {
    let failed = |error| CheckpointError::Export(Box::new(error));
    let weights = Weights::new(trainer, plan)?;
    let adapters = config.adapters().unwrap_or_default();
    let Some(Planned { export, out }) = planned else {
        let order = match bare_adapter(config) {
            Some(adapter) => adapter.order(),
            None => bare(config).order(),
        };
        return order.map_err(failed)?.iter().try_for_each(|spec| weights.send_merged(spec, &adapters));
    };
    match export {
        What::Adapter(adapter) => adapter.write(&out, |spec| Ok(weights.receive(spec)?)).map_err(failed),
        What::Model(mut export) => {
            let cuts: Vec<usize> = trainer.plan().boundaries().iter().map(|cut| cut.layer).collect();
            let compressed = Compressed::of_run(config, &cuts, trainer.steps_done());
            export.metadata = compressed.map_or_else(BTreeMap::new, |run| run.metadata());
            export.write(&out, |spec| Ok(weights.receive_merged(spec, &adapters)?)).map_err(failed)
        }
    }
}

/// Slices of a parameter with their elements, without padding.
type Held = Vec<(Slice, Vec<f32>)>;

/// The weights of a trainer, with copies of the slices that this rank is the first to hold.
struct Weights<'a> {
    world: &'a Group,
    /// The slices of each parameter, and the first rank that holds each.
    slices: BTreeMap<String, Vec<(Slice, usize)>>,
    mine: BTreeMap<String, Held>,
}

impl<'a> Weights<'a> {
    fn new(trainer: &'a Trainer, plan: &Plan) -> Result<Self, CheckpointError> {
        let world = trainer.rank().world();
        let mut slices: BTreeMap<String, Vec<(Slice, usize)>> = BTreeMap::new();
        let layout = state_layout(trainer.plan().model(), plan)?;
        let is_parameter = |kind| matches!(kind, StateKind::Parameter(_));
        for of in layout.into_iter().filter(|of| of.key.state.is_none() && is_parameter(of.kind)) {
            let held = slices.entry(of.key.parameter).or_default();
            let slice = slice_of(&of.slice);
            match held.iter_mut().find(|(held, _)| *held == slice) {
                Some((_, first)) => *first = of.rank.min(*first),
                None if slice.elements() > 0 => held.push((slice, of.rank)),
                None => {}
            }
        }
        let mut mine: BTreeMap<String, Held> = BTreeMap::new();
        trainer.visit_state(
            |key| key.state.is_none() && slices.contains_key(&key.parameter),
            |StateView { key, slice, values, .. }| {
                let (stored, slice) = (dims_of(slice.stored), slice_of(&slice));
                if slices[&key.parameter].iter().any(|(of, first)| *of == slice && *first == world.rank()) {
                    let mut dense = vec![0.0; slice.elements() as usize];
                    let from = Block::padded(&slice, stored);
                    copy(&slice, (&from, values), (&Block::from_slice(&slice), &mut dense));
                    mine.entry(key.parameter).or_default().push((slice, dense));
                }
                Ok::<_, TrainError>(())
            },
        )?;
        Ok(Self { world, slices, mine })
    }

    /// Sends rank 0 what this rank has of a weight and of its adapters.
    fn send_merged(&self, spec: &ParamSpec, adapters: &Adapters) -> Result<(), CheckpointError> {
        self.send(spec)?;
        for adapter in adapters.of(&spec.name) {
            adapter
                .specs(spec, adapters.rank)
                .map_err(TrainError::from)?
                .iter()
                .try_for_each(|spec| self.send(spec))?;
        }
        Ok(())
    }

    /// The whole weight with the products of its adapters added, on rank 0.
    fn receive_merged(&self, spec: &ParamSpec, adapters: &Adapters) -> Result<Vec<f32>, CheckpointError> {
        let mut whole = self.receive(spec)?;
        for adapter in adapters.of(&spec.name) {
            let [a, b] = adapter.specs(spec, adapters.rank).map_err(TrainError::from)?;
            let [a, b] = [self.receive(&a)?, self.receive(&b)?];
            adapter.merge(spec, adapters, [&a, &b], &mut whole).map_err(TrainError::from)?;
        }
        Ok(whole)
    }

    /// Sends rank 0 the slices of a parameter that this rank is the first to hold.
    fn send(&self, spec: &ParamSpec) -> Result<(), CheckpointError> {
        for (slice, _) in self.of_spec(spec).iter().filter(|(_, first)| *first == self.world.rank()) {
            let values = self.own(spec, slice);
            self.world.send_slice(values, 0, values.len() as u64)?;
        }
        Ok(())
    }

    /// The whole parameter, on rank 0.
    fn receive(&self, spec: &ParamSpec) -> Result<Vec<f32>, CommError> {
        self.world.heartbeat();
        let mut whole = vec![0.0; spec.dims.count()];
        let mut received = Vec::new();
        let into = Block::from_slice(&Slice::whole(&dims_of(spec.dims)));
        for (slice, first) in self.of_spec(spec) {
            let values = if *first == self.world.rank() {
                self.own(spec, slice)
            } else {
                received.resize(slice.elements() as usize, 0.0);
                self.world.recv_slice(&mut received, *first, slice.elements())?;
                &received
            };
            copy(slice, (&Block::from_slice(slice), values), (&into, &mut whole));
        }
        Ok(whole)
    }

    fn of_spec(&self, spec: &ParamSpec) -> &[(Slice, usize)] {
        self.slices.get(&spec.name).map_or(&[], Vec::as_slice)
    }

    fn own(&self, spec: &ParamSpec, slice: &Slice) -> &[f32] {
        let own = self.mine.get(&spec.name).into_iter().flatten();
        own.into_iter().find(|(of, _)| of == slice).map_or(&[], |(_, values)| values)
    }
}
