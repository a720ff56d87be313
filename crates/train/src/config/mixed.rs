//! Mixed precision: `training.dtype` and the keys that depend on it.

use meshwork_compress::Feedback;
use meshwork_engine::{LossScale, MixedPrecision};
use meshwork_pipeline::by_name;
use meshwork_tensor::tape::HalfType;

use super::Config;
use super::fault::Fault;
use super::sections::Training;
use super::settings::Settings;
use super::words::{Dtype, LossScaleWord, LossScaling, MatmulDtype};

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
    let mut faults = Vec::new();
    let mut fail = |fault| faults.push(fault);
    let training = &config.training;
    let (dtype, name) = (training.dtype, training.dtype.name());
    let (key, reduced) = ("training.reduce_dtype", training.reduce_dtype);
    if settings.sound(&[key, "training.dtype"]) && reduced != Dtype::F32 && reduced != dtype {
        let valid = match dtype {
            Dtype::F32 => "use f32".to_owned(),
            _ => format!("use f32 or {name}"),
        };
        fail(Fault::new(key, reduced.name(), format!("gradients come in training.dtype = {name:?}"), valid));
    }
    let (key, products) = ("training.matmul_dtype", training.matmul_dtype);
    let rounds_twice = dtype == Dtype::F16 && products == MatmulDtype::Bf16;
    if settings.sound(&[key, "training.dtype"]) && rounds_twice {
        fail(Fault::new(
            key,
            products.name(),
            "would round values of f16 once more",
            "use f32, or training.dtype = \"bf16\"",
        ));
    }
    if settings.sound(&["training.reduce_dtype", "training.dtype", "training.numerics"])
        && dtype != Dtype::F32
        && reduced == dtype
        && config.reduction_blocks().is_some()
    {
        let problem = "rounds each rank's share of a gradient before the shares are added up, and training.numerics = \"canonical\" needs exact sums";
        fail(Fault::new("training.reduce_dtype", name, problem, "use f32, or training.numerics = \"fast\""));
    }
    let (key, feedback) = ("compress.feedback", &config.compress.feedback);
    if settings.sound(&[key, "training.dtype", "training.loss_scale"])
        && dtype != Dtype::F32
        && training.loss_scale == DYNAMIC
        && config.compress.plan().is_ok_and(|plan| plan.is_some() && plan.feedback != Feedback::None)
    {
        let problem = "adds what a step lost, in that step's loss scale, to the gradients of another";
        let valid = "use \"none\", a fixed training.loss_scale such as 1024, or training.dtype = \"bf16\"";
        fail(Fault::new(key, format!("{feedback:?}"), problem, valid));
    }
    let key = "training.loss_scale";
    if settings.sound(&[key, "training.dtype", "pipeline.schedule"]) {
        let asynchronous = by_name(&config.pipeline.schedule).is_ok_and(|schedule| !schedule.is_synchronous());
        match training.loss_scale {
            DYNAMIC if dtype == Dtype::F32 => {
                fail(Fault::new(
                    key,
                    DYNAMIC,
                    "there is nothing to scale in f32",
                    "use 1, or training.dtype = \"f16\"",
                ));
            }
            DYNAMIC if asynchronous => {
                let problem = format!(
                    "has no meaning with pipeline.schedule = {:?}, whose ranks update before a step's norm is known",
                    config.pipeline.schedule
                );
                fail(Fault::new(key, DYNAMIC, problem, "use a number such as 1024, or training.dtype = \"bf16\""));
            }
            LossScaling::Number(1) if dtype == Dtype::F16 => {
                let problem = "without a scale, gradients below 6e-8 become zeros in f16";
                fail(Fault::new(key, 1, problem, "use \"dynamic\", or a number such as 1024"));
            }
            _ => {}
        }
    }
    let (key, initial) = ("training.loss_scale_initial", training.loss_scale_initial);
    if settings.sound(&[key]) && (!initial.is_power_of_two() || initial as f64 > LossScale::LARGEST) {
        fail(Fault::new(
            key,
            initial,
            "is no power of two up to 2^32",
            format!("use {}", initial.clamp(1, 1 << 32).next_power_of_two()),
        ));
    }
    settings.faults.extend(faults);
}
