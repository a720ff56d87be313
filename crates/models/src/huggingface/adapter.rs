//! Adapters in the folders of PEFT: `adapter_config.json` and `adapter_model.safetensors`, read straight into any mesh,
//! and written so that `peft` loads them.
//!
//! Beside PEFT's own keys `adapter_config.json` has the hash of the weights that the adapter was trained on
//! ([`BASE_HASH`]), by which it is refused on others.

use super::export::{Export, units_of};
use super::slices::{problem_of, read_parts};
use super::staged::{self, Staged};
use super::tensors::Tensors;
use super::{Architecture, Dtype, Error, Lora, Pretrained, content};
use crate::families::TensorPart;
use meshwork_core::hash::{combine, hash};
use meshwork_tensor::ParamSpec;
use meshwork_tensor::param::LocalSlice;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// The key of `adapter_config.json` that has the hash of the base model's weights. `peft` passes over it.
pub const BASE_HASH: &str = "meshwork_base_hash";

/// Settings of PEFT that mean another adapter than A and B beside linear layers, with the values that mean none.
const UNSUPPORTED: [&str; 16] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "lora_bias",
    "modules_to_save",
    "layers_to_transform",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "layer_replication",
    "arrow_config",
];

/// Ways to begin with A and B that leave the weights of the base as they are. After others an adapter is a change of
/// other weights than those of its base.
const BEGINNINGS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

impl Lora {
    /// The adapters of a folder of PEFT, and the hash of the base model that it names, if it names one.
    ///
    /// # Errors
    /// A folder without `adapter_config.json`; another kind of adapter than LoRA; settings that are not supported: all
    /// of them.
    pub fn open(folder: &Path) -> Result<(Self, Option<String>), Error> {
        let config = content::json(&folder.join(CONFIG))?;
        let mut problems = Vec::new();
        if config["peft_type"] != "LORA" {
            problems.push(format!("peft_type is {}, and LORA is supported", config["peft_type"]));
        }
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Object(map) => !map.is_empty(),
            Value::Array(list) => !list.is_empty(),
            _ => true,
        };
        let set = UNSUPPORTED.iter().filter(|key| is_set(&config[**key]));
        problems.extend(set.map(|key| format!("{key} is not supported: {}", config[*key])));
        if !config["bias"].is_null() && config["bias"] != "none" {
            problems.push(format!("bias is {}, and none is supported", config["bias"]));
        }
        if let Some(way) = config["init_lora_weights"].as_str().filter(|way| !BEGINNINGS.contains(way)) {
            problems.push(format!("init_lora_weights is {way}, which changes the weights of the base"));
        }
        let mut number = |key: &str, default: f64| {
            config[key].as_f64().or(config[key].is_null().then_some(default)).unwrap_or_else(|| {
                problems.push(format!("{key} is {}, no number", config[key]));
                default
            })
        };
        let (rank, alpha, dropout) = (number("r", 8.0), number("lora_alpha", 8.0), number("lora_dropout", 0.0));
        if rank < 1.0 || rank.fract() != 0.0 {
            problems.push(format!("r is {rank}, no rank"));
        }
        let mut targets: Vec<String> = match &config["target_modules"] {
            Value::String(word) if word == super::lora::ALL_LINEAR => vec![word.clone()],
            Value::Array(names) => names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect(),
            other => {
                problems.push(format!("target_modules is {other}, and a list of names or all-linear is supported"));
                Vec::new()
            }
        };
        // `target_parameters` names weights. Without `.weight` they are the names of linear layers.
        let layer =
            |weight: &Value| weight.as_str().and_then(|weight| weight.strip_suffix(".weight")).map(str::to_owned);
        let parameters = &config["target_parameters"];
        match parameters.as_array().map(|list| list.iter().map(layer).collect::<Option<Vec<String>>>()) {
            Some(Some(layers)) => {
                let is_named = |layer: &String| targets.iter().any(|target| super::lora::is_end(layer, target));
                let others: Vec<String> = layers.into_iter().filter(|layer| !is_named(layer)).collect();
                targets.extend(others);
            }
            None if !is_set(parameters) => {}
            _ => problems.push(format!(
                "target_parameters that are no weights of linear layers are not supported: {parameters}"
            )),
        }
        if !problems.is_empty() {
            let problem = problems.join("; ");
            return Err(Error::Format { path: folder.join(CONFIG), problem });
        }
        let rslora = config["use_rslora"].as_bool().unwrap_or(false);
        let lora = Self { rank: rank as usize, alpha, rslora, dropout: dropout as f32, targets };
        Ok((lora, config[BASE_HASH].as_str().map(str::to_owned)))
    }
}

impl Pretrained {
    /// A hash of all weights: their names, extents and bytes. It reads all of them.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn hash(&self) -> Result<String, Error> {
        let mut all = 0;
        for name in self.tensors.names().filter(|name| !self.is_beside(name)) {
            let bare = name.strip_prefix(self.prefix).unwrap_or(name);
            all = combine(all, hash(bare.as_bytes()));
            self.tensors.for_each_chunk(name, |chunk| all = combine(all, hash(chunk)))?;
        }
        Ok(format!("{all:016x}"))
    }
}

/// An adapter in a folder, its file open for reading.
#[derive(Debug)]
pub struct PretrainedAdapter {
    tensors: Tensors,
    /// The parts of each parameter.
    parts: BTreeMap<String, Vec<TensorPart>>,
}

impl PretrainedAdapter {
    /// Opens the adapter of a model, and checks that the file has exactly the tensors of `lora`.
    ///
    /// # Errors
    /// Files that are missing or damaged; tensors that are missing, misshapen or of no adapter of `lora`.
    pub fn open(folder: &Path, of: &Architecture, lora: &Lora) -> Result<Self, Error> {
        let tensors = Tensors::open_file(folder.join(WEIGHTS))?;
        let parameters = of.adapter_parameters(lora)?;
        let parts: BTreeMap<_, _> = parameters.into_iter().map(|of| (of.spec.name, of.parts)).collect();
        let problem = |part: &TensorPart| problem_of(&tensors, part, &part.tensor, "that of this model and rank");
        let mut problems: Vec<String> = parts.values().flatten().filter_map(problem).collect();
        let known = |name: &str| parts.values().flatten().any(|part| part.tensor == name);
        problems
            .extend(tensors.names().filter(|name| !known(name)).map(|name| format!("no target has a tensor {name}")));
        problems.dedup();
        match problems.is_empty() {
            true => Ok(Self { tensors, parts }),
            false => {
                let problem = super::tensors::listed(&problems);
                Err(Error::Format { path: folder.join(WEIGHTS), problem })
            }
        }
    }

    /// The elements of a parameter of an adapter that a rank holds, padding zero; `None` of any other parameter.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read(&self, spec: &ParamSpec, slice: &LocalSlice) -> Result<Option<Vec<f32>>, Error> {
        let Some(parts) = self.parts.get(&spec.name) else { return Ok(None) };
        read_parts(&self.tensors, parts, |part| part.tensor.clone(), slice).map(Some)
    }
}

/// An adapter to be written.
#[derive(Clone, Debug)]
pub struct AdapterExport {
    /// The model.
    pub architecture: Architecture,
    /// Its adapters.
    pub lora: Lora,
    /// The type that weights are rounded to.
    pub dtype: Dtype,
    /// The folder or name of the model that the adapter was trained on.
    pub base: PathBuf,
    /// The [hash](Pretrained::hash) of its weights.
    pub base_hash: String,
    /// Whether a model or adapter that lies in the folder is replaced.
    pub overwrite: bool,
}

impl AdapterExport {
    /// Whether the folder could be written now. Nothing stays of the attempt.
    ///
    /// # Errors
    /// As [`Export::check`].
    pub fn check(&self, folder: &Path) -> Result<(), Error> {
        let elements: usize = self.order()?.iter().map(ParamSpec::global_elements).sum();
        staged::check(folder, self.overwrite, (elements * self.dtype.bytes()) as u64)
    }

    /// The parameters in the order in which [`write`](Self::write) asks for them.
    ///
    /// # Errors
    /// Targets that the model does not have.
    pub fn order(&self) -> Result<Vec<ParamSpec>, Error> {
        Ok(self.architecture.adapter_parameters(&self.lora)?.into_iter().map(|of| of.spec).collect())
    }

    /// Writes both files. `weights` gives a whole parameter, row-major; it is asked for each of them once. The folder
    /// appears whole, as that of an [`Export`].
    ///
    /// # Errors
    /// As [`Export::write`].
    pub fn write(&self, folder: &Path, weights: impl FnMut(&ParamSpec) -> super::export::Given) -> Result<(), Error> {
        let staged = Staged::begin(folder, self.overwrite)?;
        let parameters = self.architecture.adapter_parameters(&self.lora)?;
        let named = |part: TensorPart| (part.tensor.clone(), part);
        let named = parameters.into_iter().map(|of| (of.spec, of.parts.into_iter().map(named).collect()));
        let (mut specs, mut tensors) = (Vec::new(), Vec::new());
        for unit in units_of(self.dtype, named) {
            specs.push(unit.specs);
            tensors.extend(unit.tensors);
        }
        let file = Export::new(self.architecture, self.dtype);
        file.write_shard(&staged.dir().join(WEIGHTS), &specs, &tensors, weights)?;
        super::export::write_file(&staged.dir().join(CONFIG), format!("{:#}\n", self.config()?).as_bytes())?;
        staged.commit()
    }

    fn config(&self) -> Result<Value, Error> {
        let Lora { rank, alpha, rslora, dropout, targets } = &self.lora;
        let of_experts = self.architecture.experts.is_some();
        let (modules, parameters) = match &targets[..] {
            _ if of_experts => self.architecture.peft_targets(&self.lora)?.map(|names| json!(names)).into(),
            [all] if all == super::lora::ALL_LINEAR => (json!(all), json!(null)),
            names => (json!(names), json!(null)),
        };
        // `peft` takes gate and up of experts for one matrix of twice the rank and twice alpha, to which rsLoRA gives
        // another factor.
        let (alpha, rslora) = match *rslora && of_experts {
            true => (self.lora.scale() * *rank as f64, false),
            false => (*alpha, *rslora),
        };
        Ok(json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            BASE_HASH: self.base_hash,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": dropout,
            "use_rslora": rslora,
            "target_modules": modules,
            "target_parameters": parameters,
            "bias": "none",
            "fan_in_fan_out": self.architecture.has_transposed_matrices(),
            "inference_mode": true,
        }))
    }
}
