//! From the command line to all that a run needs, with every fault of it in one report.

use crate::config::{Args, Config, ConfigError, Settings, resolve};
use crate::data::{self, Data};
use crate::metrics;

/// The configuration and the data of a command line, and a check that the metrics can be written.
///
/// # Errors
/// Every fault of the flags, the file, the data and the metrics path, all at once.
///
/// ```
/// use meshwork_train::{config::Args, load};
///
/// let (config, data) = load(&Args::parse(["--mesh", "dp=2", "--steps", "3"]))?;
/// let batch = data.batch(0, config.training.global_batch_size, 0..8); // the rows of dp rank 0
/// assert_eq!(batch.inputs.len(), 8 * 128);
///
/// let error = load(&Args::parse(["--mesh", "dp=0", "--data", "no/such/file"])).unwrap_err();
/// assert_eq!(error.faults.len(), 2);
/// # Ok::<(), meshwork_train::config::ConfigError>(())
/// ```
pub fn load(args: &Args) -> Result<(Config, Data), ConfigError> {
    let (mut config, mut settings) = resolve(args, Settings::default());
    if let Some(path) = &args.metrics {
        settings.faults.extend(metrics::check(path).err());
    }
    let data = if settings.sound(&["data.path", "data.tokenizer"]) { open(&config, &mut settings) } else { None };
    match data {
        Some(data) if settings.faults.is_empty() => {
            config.notices.extend_from_slice(data.notices());
            Ok((config, data))
        }
        _ => Err(ConfigError { faults: settings.faults }),
    }
}

/// Opens the data; holds it against the model only where the keys that this reads are sound.
fn open(config: &Config, settings: &mut Settings) -> Option<Data> {
    let keys = ["model.vocab_size", "model.seq_len", "validation.every", "validation.fraction"];
    let data = data::read(&config.data)
        .and_then(|stream| if settings.sound(&keys) { Data::new(stream, config).map(Some) } else { Ok(None) });
    data.unwrap_or_else(|mut faults| {
        settings.faults.append(&mut faults);
        None
    })
}
