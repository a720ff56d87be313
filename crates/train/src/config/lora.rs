//! `[lora]`: adapters beside the frozen weights of the model, as PEFT describes them. `lora.init_from` is a folder of
//! PEFT, whose settings become the defaults of the section.

use super::Config;
use super::fault::Fault;
use super::pretrained::same;
use super::sections::Lora as Section;
use super::settings::Settings;
use super::words::{LoraExport, ModelKind, Quantization};
use meshwork_compress::{Per, Scales, Values};
use meshwork_models::huggingface::{Error, Lora, Pretrained};
use meshwork_tensor::param::Adapters;
use std::path::Path;
use std::sync::Arc;
use toml::Value;

const INIT_FROM: &str = "lora.init_from";
const TARGETS: &str = "lora.targets";
const RANK: &str = "lora.rank";
const DROPOUT: &str = "lora.dropout";
const EXPORT: &str = "lora.export";
const BLOCK: &str = "lora.block_size";

/// Takes the settings of the adapter in the folder, if one is given. One that the user gave too must be the same, but
/// for the dropout, which the weights do not fix.
pub(crate) fn derive(settings: &mut Settings) {
    let Some(folder) = settings.given::<String>(INIT_FROM) else { return };
    let lora = match Lora::open(Path::new(&folder)) {
        Ok((lora, _)) => lora,
        Err(error) => {
            let valid = "use a folder of PEFT with adapter_config.json and adapter_model.safetensors";
            return settings.fault(INIT_FROM, folder, error.to_string(), valid);
        }
    };
    let values: [(&str, Value); 5] = [
        (RANK, i64::try_from(lora.rank).unwrap_or(i64::MAX).into()),
        ("lora.alpha", lora.alpha.into()),
        ("lora.rslora", lora.rslora.into()),
        (TARGETS, lora.targets.join(",").into()),
        ("lora.dropout", f64::from(lora.dropout).into()),
    ];
    for (key, value) in values {
        match settings.given::<Value>(key).filter(|given| !same(given, &value) && key != "lora.dropout") {
            Some(given) => {
                let problem = format!("the adapter in {folder} has {value}");
                settings.fault(key, given, problem, format!("use {value}, or leave the key out"));
            }
            None => settings.derive(key, &[INIT_FROM], value),
        }
    }
}

/// Adds the faults of adapters that the model cannot have, or that have nothing to belong to.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let (lora, base) = (&config.lora, &config.model.init_from);
    if let (Some(folder), None) = (&lora.init_from, base) {
        let problem = "there is no model that the adapter belongs to";
        settings.faults.push(Fault::new(INIT_FROM, folder, problem, "set model.init_from to the folder of its model"));
    }
    if lora.rank == 0 {
        return;
    }
    let is_adapter = lora.export == LoraExport::Adapter;
    settings.require(&[EXPORT, RANK], !is_adapter || base.is_some() || config.checkpoint.export.is_none(), || {
        let problem = "an adapter belongs to the weights of a model, and there is no model.init_from";
        Fault::new(EXPORT, "adapter", problem, "use merged, or set model.init_from")
    });
    settings.require(&[RANK, "model.freeze"], config.model.freeze.is_empty(), || {
        let problem = "all of the model is frozen beside its adapters (lora.rank)";
        Fault::new("model.freeze", &config.model.freeze, problem, "leave it out")
    });
    let of_gpt2 = config.model.kind == ModelKind::Gpt2 && config.moe.num_experts > 0;
    settings.require(&[RANK, "model.kind", "moe.num_experts"], !of_gpt2, || {
        let problem = "a GPT-2 with experts has no form in PEFT, by whose names targets are known";
        Fault::new(RANK, lora.rank, problem, "use 0, or model.kind = \"llama\"")
    });
    // A folder that cannot be read says nothing of the layers: the names of another family would be told.
    let model = "model.init_from";
    let sizes =
        ["model.hidden_size", "model.num_heads", "model.num_kv_heads", "model.ffn_hidden_size", "model.kind", model];
    if of_gpt2 || !settings.sound(&sizes) || !settings.sound(&[RANK, TARGETS]) {
        return;
    }
    match config.try_adapters() {
        Err(Error::Lora { problem, valid }) => settings.fault(TARGETS, &lora.targets, problem, valid),
        Err(Error::Model(meshwork_tensor::Error::Declaration { name, problem, valid })) => {
            settings.fault(RANK, lora.rank, format!("{name}: {problem}"), valid);
        }
        Ok(Some(adapters)) => {
            check_blocks(config, &adapters, settings);
            check_sequence_block(config, &adapters, settings);
        }
        _ => {} // sizes that no model has are faults of their own
    }
}

/// Adds the fault of blocks that the mesh cuts.
fn check_blocks(config: &Config, adapters: &Adapters, settings: &mut Settings) {
    let keys = [BLOCK, "parallelism.tp", "parallelism.ep", "parallelism.dp", "parallelism.cp", "parallelism.pp"];
    let Ok(mesh) = config.mesh() else { return };
    let Ok(mut specs) = config.architecture().parameters_on(&mesh) else { return };
    if !settings.sound(&keys) {
        return;
    }
    let size = config.lora.block_size;
    let mut cut_by = |size| {
        let base = config.lora.stored_in(size);
        specs.iter_mut().find_map(|spec| {
            spec.packed = adapters.packing(spec).and(base);
            spec.require_whole_blocks(&mesh).err()
        })
    };
    if let Some(meshwork_tensor::Error::Declaration { name, problem, .. }) = cut_by(size) {
        let fits = (1..=size).rev().find(|&size| cut_by(size).is_none()).unwrap_or(1);
        settings.fault(BLOCK, size, format!("{name}: {problem}"), format!("use {fits}, or other degrees"));
    }
}

/// Adds the fault of networks by blocks of a cut sequence, where an adapter has only the tokens of such blocks: in
/// canonical numerics it needs all of them, and its dropout their positions.
fn check_sequence_block(config: &Config, adapters: &Adapters, settings: &mut Settings) {
    const KEY: &str = "memory.sequence_block";
    let by_blocks = (1..config.model.seq_len).contains(&config.memory.sequence_block);
    // Experts take the tokens of whole sequences, or rows.
    let is_network = |weight: &String| weight.contains(".mlp.") && !weight.contains(".mlp.experts.");
    let of_networks = adapters.of.keys().any(is_network);
    if !(by_blocks && config.parallelism.sequence_parallel && of_networks) {
        return;
    }
    // One rank of canonical numerics computes as several do.
    let canonical = config.reduction_blocks().is_some();
    let drops = config.parallelism.tp > 1 && config.lora.dropout > 0.0;
    let refuses = [
        (canonical, RANK, "in canonical numerics an adapter computes on whole sequences"),
        (drops, DROPOUT, "dropout of an adapter's features needs their positions in the sequence"),
    ];
    for (refused, key, why) in refuses {
        settings.require(&[KEY, key], !refused, || {
            let problem = format!("{why}, which sequence parallelism cuts");
            let valid = "use 0, parallelism.sequence_parallel = false, or lora.targets without the networks of layers";
            Fault::new(KEY, config.memory.sequence_block, problem, valid)
        });
    }
}

/// The fault of an adapter that was trained on other weights than those of `model.init_from`. Reads all of them.
pub(crate) fn fault_of_base(config: &Config) -> Option<Fault> {
    let (folder, base) = (config.lora.init_from.as_deref()?, config.model.init_from.as_deref()?);
    let (_, trained_on) = Lora::open(Path::new(folder)).ok()?;
    let (trained_on, is) = (trained_on?, Pretrained::open(Path::new(base)).and_then(|base| base.hash()));
    let problem = match is {
        Ok(is) if is == trained_on => return None,
        Ok(is) => format!("was trained on weights of the hash {trained_on}, and those of {base} have {is}"),
        Err(error) => error.to_string(),
    };
    Some(Fault::new(INIT_FROM, folder, problem, "use the model that the adapter was trained on in model.init_from"))
}

impl Section {
    /// The form in which the frozen matrices are stored, in blocks of so many elements.
    fn stored_in(&self, block: usize) -> Option<Values> {
        let per = Per::Block(block);
        match self.quantization {
            Quantization::None => None,
            Quantization::Bf16 => Some(Values::Bf16),
            Quantization::Int8 => Some(Values::Int8 { per }),
            Quantization::Nf4 => {
                let scales = if self.double_quantization { Scales::E5M3 } else { Scales::F32 };
                Some(Values::Nf4 { per, scales })
            }
        }
    }

    /// The adapters as PEFT describes them; `None` without a rank.
    pub(crate) fn described(&self) -> Option<Lora> {
        let targets = self.targets.split(',').map(str::trim).filter(|target| !target.is_empty()).map(str::to_owned);
        (self.rank > 0).then(|| Lora {
            rank: self.rank,
            alpha: self.alpha,
            rslora: self.rslora,
            dropout: self.dropout as f32,
            targets: targets.collect(),
        })
    }
}

impl Config {
    /// The adapters of the model, if it has some.
    #[must_use]
    pub fn adapters(&self) -> Option<Arc<Adapters>> {
        self.try_adapters().ok().flatten().map(Arc::new) // checked
    }

    fn try_adapters(&self) -> Result<Option<Adapters>, Error> {
        let Some(described) = self.lora.described() else { return Ok(None) };
        let base = self.lora.stored_in(self.lora.block_size);
        Ok(Some(Adapters { base, ..self.architecture().adapters(&described)? }))
    }
}
