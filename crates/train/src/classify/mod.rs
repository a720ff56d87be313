//! Training classifiers of images through the pipeline: any [`Network`], an ordered list of layers, cut into stages wherever one
//! likes.
//!
//! ```text
//! mini-batch ─ micro-batches ─ schedule: forward, backward ... ─ sum over dp ─ moving averages (dp) ─ update ─ loss (world)
//!                                └ outputs of layers (pp), of a shape for each boundary ┘
//! ```
//!
//! The numbers of a step are those of one rank: gradients are sums over micro-batches in order, on whichever stage. With
//! batch norm they depend on the cut into micro-batches (see [`Norm::Batch`](meshwork_models::layers::Norm)), and on nothing else.
//! [`Settings::recompute`] is GPipe's re-materialisation.

mod data;
mod options;
mod rank;
mod stage;
mod transport;

pub use data::Images;
pub use options::{Options, usage};
pub use rank::{Classifier, Score};

use crate::engine::TrainError;
use meshwork_core::comm::thread::{self, WorldError};
use meshwork_core::{Axis, Mesh, Rank};
use meshwork_models::network::Network;
use meshwork_optim::{Decay, LrSchedule, Rule, Sgd};
use meshwork_pipeline::{Generator, Schedule, Shape, by_name};
use meshwork_tensor::cpu::Cpu;
use std::ops::Range;
use std::sync::Arc;

/// How a classifier is trained.
pub struct Settings {
    /// Degree of the pipeline.
    pub pp: usize,
    /// Degree of data parallelism.
    pub dp: usize,
    /// Name of the schedule, a synchronous one.
    pub schedule: String,
    /// Chunks that each pp rank holds, where the schedule leaves a choice; its default where there is none.
    pub virtual_stages: Option<usize>,
    /// Images of a mini-batch, over all dp ranks.
    pub batch: usize,
    /// Micro-batches in which a dp rank takes its images.
    pub micros: usize,
    /// Layers of each stage; as even as can be where there are none.
    pub partition: Option<Vec<usize>>,
    /// Re-materialisation (GPipe, section 2): a stage keeps the input of a micro-batch alone, and runs its forward again before
    /// its backward. Less memory for a second forward; the same bits.
    pub recompute: bool,
    /// The update rule.
    pub optimizer: Rule,
    /// Learning rate of each step.
    pub lr: LrSchedule,
    /// Times that all images are seen.
    pub epochs: usize,
    /// Of initial weights and of the order of images.
    pub seed: u64,
}

impl Default for Settings {
    /// GPipe on one rank with 4 micro-batches of 16 images, and SGD with momentum 0.9 at a rate of 0.05, for 8 epochs.
    fn default() -> Self {
        Self {
            pp: 1,
            dp: 1,
            schedule: "gpipe".to_owned(),
            virtual_stages: None,
            batch: 64,
            micros: 4,
            partition: None,
            recompute: false,
            optimizer: Sgd { momentum: 0.9, weight_decay: 5e-4 }.into(),
            lr: LrSchedule { base: 0.05, warmup_steps: 0, decay: Decay::None, decay_steps: 0, min_lr_factor: 0.01 },
            epochs: 8,
            seed: 0,
        }
    }
}

/// Names of the schedules that a classifier can be trained with: the synchronous ones.
pub fn schedules() -> Vec<&'static str> {
    Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()).map(Generator::name).collect()
}

/// What cannot be trained, and what could be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClassifyError {
    /// Images that cannot be dealt out evenly.
    #[error("a mini-batch of {batch} images cannot be cut into dp={dp} times {micros} micro-batches: take a multiple of {}", (dp * micros).max(1))]
    Batch {
        /// Images of a mini-batch.
        batch: usize,
        /// Data-parallel ranks.
        dp: usize,
        /// Micro-batches of each.
        micros: usize,
    },
    /// A schedule under which stages hold different versions of the weights.
    #[error("schedule {schedule} updates weights within a step, which classifiers do not: use one of {known}")]
    Asynchronous {
        /// The schedule.
        schedule: &'static str,
        /// Those that would do.
        known: String,
    },
    /// Fewer images than one step takes.
    #[error("{images} images are fewer than a mini-batch of {batch}")]
    Images {
        /// Images to train on.
        images: usize,
        /// Images of a mini-batch.
        batch: usize,
    },
    /// A mini-batch that is not what the run was made for.
    #[error(
        "{images} images of {sample:?} for a network of {wanted_sample:?} that trains on {wanted_images} at a time"
    )]
    Samples {
        /// Images given.
        images: usize,
        /// Extents of each.
        sample: Vec<usize>,
        /// Images of a mini-batch.
        wanted_images: usize,
        /// Extents that the network takes.
        wanted_sample: Vec<usize>,
    },
    /// A cut that does not give every stage layers, or every layer a stage.
    #[error(
        "{layers} layers cannot be cut into stages of {partition:?}: {stages} numbers of at least 1 must add up to them"
    )]
    Partition {
        /// Layers of the network.
        layers: usize,
        /// Layers of each stage.
        partition: Vec<usize>,
        /// Stages of the schedule.
        stages: usize,
    },
    /// More stages than layers.
    #[error("{layers} layers cannot fill {stages} stages: take a lower pp, or a deeper network")]
    Stages {
        /// Layers of the network.
        layers: usize,
        /// Stages of the schedule.
        stages: usize,
    },
    /// Everything that training can fail of.
    #[error(transparent)]
    Train(#[from] TrainError),
}

/// One pass over all images.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epoch {
    /// Its number, from 1.
    pub epoch: usize,
    /// Mean loss over the images trained on.
    pub loss: f64,
    /// On the images held out.
    pub held_out: Score,
    /// Most bytes ever alive on any rank.
    pub peak_bytes: u64,
}

impl Settings {
    /// The schedule, if it takes these micro-batches and the images can be dealt out.
    pub fn schedule(&self) -> Result<Schedule, ClassifyError> {
        let Self { batch, dp, micros, .. } = *self;
        let generator = by_name(&self.schedule).map_err(TrainError::from)?;
        if !generator.is_synchronous() {
            return Err(ClassifyError::Asynchronous { schedule: generator.name(), known: schedules().join(", ") });
        }
        let shape = generator.shape(self.pp, micros);
        let shape = Shape { virtual_stages: self.virtual_stages.unwrap_or(shape.virtual_stages), ..shape };
        let schedule = generator.build(shape).map_err(TrainError::from)?;
        match dp * micros {
            0 => Err(ClassifyError::Batch { batch, dp, micros }),
            parts if batch == 0 || !batch.is_multiple_of(parts) => Err(ClassifyError::Batch { batch, dp, micros }),
            _ => Ok(schedule),
        }
    }

    /// The layers of each stage of a network.
    pub fn stages(&self, network: &Network, stages: usize) -> Result<Vec<Range<usize>>, ClassifyError> {
        let layers = network.layers();
        let counts = match &self.partition {
            Some(partition) => partition.clone(),
            None if layers < stages => return Err(ClassifyError::Stages { layers, stages }),
            // The first stages take what is left over: the last one has the loss.
            None => (0..stages).map(|stage| layers / stages + usize::from(stage < layers % stages)).collect(),
        };
        if counts.len() != stages || counts.contains(&0) || counts.iter().sum::<usize>() != layers {
            return Err(ClassifyError::Partition { layers, partition: counts, stages });
        }
        let mut end = 0;
        Ok(counts
            .into_iter()
            .map(|count| {
                end += count;
                end - count..end
            })
            .collect())
    }

    /// The mesh.
    pub fn mesh(&self) -> Result<Mesh, ClassifyError> {
        Ok(Mesh::new([(Axis::Dp, self.dp), (Axis::Pp, self.pp)]).map_err(TrainError::from)?)
    }
}

/// Trains on `train`, every rank a thread of this process, and scores `held_out` after each epoch, as `tell` hears. The last
/// images of an epoch that fill no mini-batch are left out; each epoch has another order.
pub fn train(
    network: &Network,
    settings: &Settings,
    train: &Images,
    held_out: &Images,
    tell: impl Fn(&Epoch) + Sync,
) -> Result<Vec<Epoch>, WorldError<ClassifyError>> {
    let mesh = settings.mesh().unwrap_or_default(); // one rank tells what is wrong with it
    let epochs = thread::run(mesh.world_size(), thread::Options::default(), |world| {
        let rank = Arc::new(Rank::new(&settings.mesh()?, Arc::clone(world.communicator())).map_err(TrainError::from)?);
        let mut classifier = Classifier::new(network, settings, rank, Cpu::device())?;
        if train.len() < settings.batch {
            return Err(ClassifyError::Images { images: train.len(), batch: settings.batch });
        }
        let mut epochs = Vec::new();
        for epoch in 1..=settings.epochs {
            let order = train.order(settings.seed, epoch);
            let mut loss = 0.0;
            for indices in order.chunks_exact(settings.batch) {
                loss += classifier.step(&train.gather(indices))?.loss / (order.len() / settings.batch) as f64;
            }
            let held_out = classifier.evaluate(held_out)?;
            let epoch = Epoch { epoch, loss, held_out, peak_bytes: classifier.peak_bytes()? };
            if classifier.rank().world_rank() == 0 {
                tell(&epoch);
            }
            epochs.push(epoch);
        }
        Ok(epochs)
    })?;
    // Every rank has the same.
    Ok(epochs.into_iter().next().unwrap_or_default())
}
