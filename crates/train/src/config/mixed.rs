//! Mixed precision: `training.dtype` and the keys that depend on it.

use super::Config;
use super::fault::Fault;
use super::sections::Training;
use super::settings::Settings;
use super::words::{Dtype, LossScaleWord, LossScaling, MatmulDtype};
use meshwork_compress::Feedback;
use meshwork_engine::{LossScale, MixedPrecision};
use meshwork_tensor::tape::HalfType;

const DYNAMIC: LossScaling = LossScaling::Word(LossScaleWord::Dynamic);

/// Computes the defaults that depend on the type of storage.
pub(super) fn derive(settings: &mut Settings) {
    const DTYPE: &[&str] = &["training.dtype"];
    let dtype: Dtype = settings.get("training.dtype");
    let products = if dtype == Dtype::Bf16 { MatmulDtype::Bf16 } else { MatmulDtype::F32 };
    settings.derive("training.matmul_dtype", DTYPE, products.name());
    match dtype {
        Dtype::F16 => settings.derive("training.loss_scale", DTYPE, LossScaleWord::Dynamic.name()),
        _ => settings.derive("training.loss_scale", DTYPE, 1),
    }
}

impl Training {
    /// The plan of storage in 16 bits; `None` in f32.
    pub(super) fn mixed(&self) -> Option<MixedPrecision> {
        let loss_scale = match self.loss_scale {
            LossScaling::Number(scale) => LossScale::Fixed(scale as f64),
            LossScaling::Word(LossScaleWord::Dynamic) => LossScale::Dynamic {
                initial: self.loss_scale_initial as f64,
                growth_interval: self.loss_scale_growth_interval,
            },
        };
        let dtype = Option::<HalfType>::from(self.dtype)?;
        Some(MixedPrecision { dtype, reduce_in_half: self.reduce_dtype == self.dtype, loss_scale })
    }
}

/// Adds the faults of mixed precision to `settings`.
pub(super) fn check(config: &Config, settings: &mut Settings) {
    let training = &config.training;
    let (dtype, name) = (training.dtype, training.dtype.name());
    let (in_halves, canonical) = (dtype != Dtype::F32, config.reduction_blocks().is_some());
    let (key, reduced) = ("training.reduce_dtype", training.reduce_dtype);
    settings.require(&[key, "training.dtype"], [Dtype::F32, dtype].contains(&reduced), || {
        let valid = if in_halves { format!("use f32 or {name}") } else { "use f32".to_owned() };
        Fault::new(key, reduced.name(), format!("gradients come in training.dtype = {name:?}"), valid)
    });
    let products = training.matmul_dtype;
    let rounds_twice = dtype == Dtype::F16 && products == MatmulDtype::Bf16;
    settings.require(&["training.matmul_dtype", "training.dtype"], !rounds_twice, || {
        let problem = "would round values of f16 once more";
        Fault::new("training.matmul_dtype", products.name(), problem, "use f32, or training.dtype = \"bf16\"")
    });
    // They have no more bits than it keeps.
    let keeps_all = in_halves && products == MatmulDtype::Tf32;
    settings.require(&["training.matmul_dtype", "training.dtype"], !keeps_all, || {
        let problem = format!("rounds operands of f32, and training.dtype = {name:?} stores them in 16 bits");
        let valid = if dtype == Dtype::Bf16 { "use bf16 or f32" } else { "use f32" };
        Fault::new("training.matmul_dtype", products.name(), problem, format!("{valid}, or training.dtype = \"f32\""))
    });
    let rounds_shares = in_halves && reduced == dtype && canonical;
    settings.require(&[key, "training.dtype", "training.numerics"], !rounds_shares, || {
        let problem = "rounds each rank's share of a gradient before the shares are added up, and training.numerics = \"canonical\" needs exact sums";
        Fault::new(key, name, problem, "use f32, or training.numerics = \"fast\"")
    });
    let (key, scale, feedback) = ("training.loss_scale", training.loss_scale, &config.compress.feedback);
    let feeds_back = || config.compress.plan().is_ok_and(|plan| plan.is_some() && plan.feedback != Feedback::None);
    let other_scale = in_halves && scale == DYNAMIC && feeds_back();
    settings.require(&["compress.feedback", "training.dtype", key], !other_scale, || {
        let problem = "adds what a step lost, in that step's loss scale, to the gradients of another";
        let valid = "use \"none\", a fixed training.loss_scale such as 1024, or training.dtype = \"bf16\"";
        Fault::new("compress.feedback", format!("{feedback:?}"), problem, valid)
    });
    let wrong = match scale {
        DYNAMIC if dtype == Dtype::F32 => {
            Some(("there is nothing to scale in f32".to_owned(), "use 1, or training.dtype = \"f16\""))
        }
        DYNAMIC if config.names_asynchronous() => {
            let problem = format!(
                "has no meaning with pipeline.schedule = {:?}, whose ranks update before a step's norm is known",
                config.pipeline.schedule
            );
            Some((problem, "use a number such as 1024, or training.dtype = \"bf16\""))
        }
        LossScaling::Number(1) if dtype == Dtype::F16 => {
            let problem = "without a scale, gradients below 6e-8 become zeros in f16".to_owned();
            Some((problem, "use \"dynamic\", or a number such as 1024"))
        }
        _ => None,
    };
    if let Some((problem, valid)) = wrong {
        let keys = [key, "training.dtype", "pipeline.schedule"];
        settings.require(&keys, false, || Fault::new(key, scale, problem, valid));
    }
    let (key, initial) = ("training.loss_scale_initial", training.loss_scale_initial);
    settings.require(&[key], initial.is_power_of_two() && initial as f64 <= LossScale::LARGEST, || {
        let valid = format!("use {}", initial.clamp(1, 1 << 32).next_power_of_two());
        Fault::new(key, initial, "is no power of two up to 2^32", valid)
    });
}
