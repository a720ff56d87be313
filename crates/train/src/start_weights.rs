//! The weights that a run starts from where they are not drawn: those of `model.init_from`, with the adapters of
//! `lora.init_from`.

use crate::config::Config;
use meshwork_models::huggingface::{Error, Pretrained, PretrainedAdapter};
use meshwork_tensor::ParamSpec;
use meshwork_tensor::param::{Adapters, LocalSlice};
use std::path::Path;
use std::sync::Arc;

/// The folders of a run, their files open for reading.
#[derive(Debug)]
pub struct StartWeights {
    base: Pretrained,
    adapter: Option<PretrainedAdapter>,
    /// Those of the run: without a folder they are drawn.
    adapters: Option<Arc<Adapters>>,
    seed: u64,
}

impl StartWeights {
    /// The folders of a configuration, if it has some.
    ///
    /// # Errors
    /// Files that are missing, damaged or of another model or adapter.
    pub fn from_config(config: &Config) -> Result<Option<Self>, Error> {
        let Some(folder) = &config.model.init_from else { return Ok(None) };
        let base = Pretrained::open(Path::new(folder))?;
        let adapter = match (&config.lora.init_from, config.lora.described()) {
            (Some(folder), Some(lora)) => Some(PretrainedAdapter::open(Path::new(folder), base.architecture(), &lora)?),
            _ => None,
        };
        Ok(Some(Self { base, adapter, adapters: config.adapters(), seed: config.training.seed }))
    }

    /// The elements of a parameter that a rank holds, as they are stored there.
    ///
    /// # Errors
    /// A file that cannot be read, a parameter that the model does not have.
    pub fn read(&self, spec: &ParamSpec, slice: &LocalSlice) -> Result<Vec<f32>, Error> {
        if let Some(adapter) = &self.adapter
            && let Some(values) = adapter.read(spec, slice)?
        {
            return Ok(values);
        }
        match &self.adapters {
            Some(adapters) if adapters.has(&spec.name) => Ok(spec.initial(slice, self.seed)),
            _ => self.base.read(spec, slice),
        }
    }
}
