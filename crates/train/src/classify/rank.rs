//! One rank of a classifier's training: its stages, its weights, and the step.

use super::stage::{Chunk, Gradients, Pass, Running, Verdict, sample_types};
use super::transport::Boundaries;
use super::{ClassifyError, Images, Settings};
use crate::engine::TrainError;
use meshwork_core::{Axis, Rank, ReduceOp};
use meshwork_models::Boundary;
use meshwork_models::network::{Averages, Network};
use meshwork_optim::Update;
use meshwork_pipeline::{Event, Lowered, forward_only, lower, run};
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Device, Error, Params, Role, Shape};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// What a pass over some images came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Mean loss.
    pub loss: f64,
    /// Share of the images whose class got the largest logit, in [0, 1].
    pub accuracy: f64,
}

/// One rank of a training run.
pub struct Classifier<'a> {
    settings: &'a Settings,
    rank: Arc<Rank>,
    device: Arc<dyn Device>,
    /// Extents of an image.
    sample: Shape,
    chunks: Vec<Chunk>,
    boundaries: Vec<Boundary>,
    params: Arc<Params>,
    gradients: RefCell<Gradients>,
    averages: RefCell<Averages>,
    /// State vectors of the optimizer, as long as the weights.
    states: Vec<Vec<f32>>,
    schedule: Lowered,
    evaluation: Lowered,
    steps_done: u64,
}

/// Share of a new mini-batch in the moving averages of batch norms.
const MOMENTUM: f64 = 0.1;

impl<'a> Classifier<'a> {
    /// This rank's part of a run. Collective: every rank of the mesh makes one with the same network and settings.
    pub fn new(
        network: &Network,
        settings: &'a Settings,
        rank: Arc<Rank>,
        device: Arc<dyn Device>,
    ) -> Result<Self, ClassifyError> {
        let training = settings.schedule()?;
        let stages = training.placement.len();
        let layers = settings.stages(network, stages)?;
        let mut declarations = Declarations::new();
        let own = training.stages_of(rank.coords().get(Axis::Pp));
        let chunks = own
            .map(|stage| {
                let modules = network.stage(&mut declarations, layers[stage].clone()).map_err(TrainError::from)?;
                Ok(Chunk::new(stage, stages, modules))
            })
            .collect::<Result<Vec<_>, TrainError>>()?;
        let micro_batch = settings.batch / (settings.dp * settings.micros);
        let boundary = |behind: &Range<usize>| Boundary {
            shape: Shape::new(&[&[micro_batch], &network.boundary(behind.end)[..]].concat()),
            types: sample_types(&rank),
        };
        let boundaries = layers[..stages - 1].iter().map(boundary).collect();
        let layout = [declarations.ids().collect()];
        let (mesh, coords) = (rank.mesh(), rank.coords());
        let params = Params::new(Arc::new(declarations), mesh, coords, &device, &layout, settings.seed);
        let params = params.map_err(TrainError::from)?;
        let weights = params.flats()[0].count();
        Ok(Self {
            sample: network.boundary(0),
            chunks,
            boundaries,
            gradients: RefCell::new(Gradients::new(&params, &device).map_err(TrainError::from)?),
            averages: RefCell::new(Averages::new(MOMENTUM)),
            states: vec![vec![0.0; weights]; settings.optimizer.state_names().len()],
            evaluation: lower(&forward_only(&training.placement, settings.micros)).map_err(TrainError::from)?,
            schedule: lower(&training).map_err(TrainError::from)?,
            params: Arc::new(params),
            steps_done: 0,
            settings,
            rank,
            device,
        })
    }

    /// This rank.
    pub fn rank(&self) -> &Rank {
        &self.rank
    }

    /// This rank's weights.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Moving averages of this rank's batch norms: (name of the layer's weight, mean, variance).
    pub fn averages(&self) -> Vec<(String, Vec<f64>, Vec<f64>)> {
        let declarations = self.params.declarations();
        let averages = self.averages.borrow();
        let layers = averages.layers();
        layers.map(|(id, mean, var)| (declarations.spec(id).name.clone(), mean.to_vec(), var.to_vec())).collect()
    }

    /// Gradients of the last step by name, summed over the mini-batch.
    pub fn gradients(&self) -> Result<Vec<(String, Vec<f32>)>, TrainError> {
        let gradients = self.gradients.borrow();
        let all = self.device.download(&gradients.all)?;
        let (all, declarations) = (all.as_slice::<f32>().map_err(Error::from)?, self.params.declarations());
        let named = |id| (declarations.spec(id).name.clone(), all[self.params.place(id).1].to_vec());
        Ok(declarations.ids().map(named).collect())
    }

    /// Trains on one mini-batch, the same on every rank.
    pub fn step(&mut self, batch: &Images) -> Result<Score, ClassifyError> {
        self.observed_step(batch, |_| {})
    }

    /// The same, with an observer of the pipeline's actions.
    pub fn observed_step(&mut self, batch: &Images, observe: impl FnMut(Event)) -> Result<Score, ClassifyError> {
        self.require(batch.len(), batch.sample())?;
        Ok(self.train(batch, observe)?)
    }

    fn train(&mut self, batch: &Images, observe: impl FnMut(Event)) -> Result<Score, TrainError> {
        let step = self.steps_done + 1;
        self.gradients.get_mut().begin();
        self.walk(batch, Mode::Train, observe)?;
        let score = self.score(batch)?;
        if !score.loss.is_finite() {
            return Err(TrainError::NotFinite { step, what: "loss", value: score.loss });
        }
        let (dp, gradients) = (self.rank.group(Axis::Dp), self.gradients.get_mut());
        gradients.finish()?;
        if dp.size() > 1 {
            let all = std::mem::replace(&mut gradients.all, self.device.alloc(meshwork_core::DType::F32, 0)?);
            gradients.all = dp.all_reduce(all, ReduceOp::Sum)?;
        }
        self.averages.get_mut().update(|sums| Ok(dp.all_reduce_slice(sums, ReduceOp::Sum)?))?;
        self.update(step)?;
        self.steps_done = step;
        Ok(score)
    }

    /// Scores images without training.
    pub fn evaluate(&mut self, images: &Images) -> Result<Score, ClassifyError> {
        // Any number of them but none: parts are filled up.
        self.require(if images.is_empty() { 0 } else { self.settings.batch }, images.sample())?;
        let (mut loss, mut right) = (0.0, 0.0);
        for part in images.parts(self.settings.batch) {
            self.walk(&part, Mode::Evaluate, |_| {})?;
            let counted = part.labels().iter().filter(|&&label| label != Images::PADDING).count() as f64;
            let score = self.score(&part)?;
            loss += score.loss * counted;
            right += score.accuracy * counted;
        }
        let count = images.len() as f64;
        Ok(Score { loss: loss / count, accuracy: right / count })
    }

    /// Refuses images that are not what the stages were made for.
    fn require(&self, images: usize, sample: Shape) -> Result<(), ClassifyError> {
        if (images, sample) == (self.settings.batch, self.sample) {
            return Ok(());
        }
        let (wanted_images, wanted_sample) = (self.settings.batch, self.sample.to_vec());
        Err(ClassifyError::Samples { images, sample: sample.to_vec(), wanted_images, wanted_sample })
    }

    /// Most bytes that were ever alive on a rank. Collective.
    pub fn peak_bytes(&self) -> Result<u64, TrainError> {
        let mut peak = [self.device.meter().peak_bytes() as f64];
        self.rank.world().all_reduce_slice(&mut peak, ReduceOp::Max)?;
        Ok(peak[0] as u64)
    }

    /// Walks a schedule over this rank's images of a batch.
    fn walk(&mut self, batch: &Images, mode: Mode, mut observe: impl FnMut(Event)) -> Result<(), TrainError> {
        let schedule = if mode == Mode::Train { &self.schedule } else { &self.evaluation };
        let own = self.settings.batch / self.settings.dp;
        let first = self.rank.coords().get(Axis::Dp) * own;
        let pass = Pass {
            rank: &self.rank,
            device: &self.device,
            params: self.params.clone(),
            mode,
            position: Position { seed: self.settings.seed, step: self.steps_done, first_sample: first as u64 },
            images: batch.gather(&(first..first + own).collect::<Vec<_>>()),
            micro_batch: own / self.settings.micros,
            seed: 1.0 / batch.len() as f64,
            recompute: self.settings.recompute,
            averages: &self.averages,
            gradients: &self.gradients,
        };
        let mut transport = Boundaries::new(&self.rank, &self.device, &self.boundaries, schedule.report().in_flight);
        let mut stages: Vec<_> = self.chunks.iter_mut().map(|chunk| Running { chunk, pass: &pass }).collect();
        let walked = run(schedule, self.rank.coords().get(Axis::Pp), &mut stages, &mut transport, &mut observe);
        if walked.is_err() {
            self.chunks.iter_mut().for_each(Chunk::clear);
        }
        Ok(walked?)
    }

    /// Mean loss and accuracy of the last walk: what the last stages found, one number for each image, summed over the world so that
    /// every rank adds up the same in one order.
    fn score(&mut self, batch: &Images) -> Result<Score, TrainError> {
        let (mut found, count) = (vec![0.0; 2 * batch.len()], batch.len());
        for (sample, Verdict { loss, right }) in
            self.chunks.iter_mut().flat_map(|chunk| std::mem::take(&mut chunk.verdicts))
        {
            (found[sample], found[count + sample]) = (loss, f64::from(right));
        }
        self.rank.world().all_reduce_slice(&mut found, ReduceOp::Sum)?;
        let counted = batch.labels().iter().filter(|&&label| label != Images::PADDING).count() as f64;
        let mean = |values: &[f64]| values.iter().sum::<f64>() / counted;
        Ok(Score { loss: mean(&found[..count]), accuracy: mean(&found[count..]) })
    }

    /// Updates every weight. Weight decay goes by role: weights only.
    fn update(&mut self, step: u64) -> Result<(), TrainError> {
        let declarations = self.params.declarations().clone();
        let places: Vec<_> =
            declarations.ids().map(|id| (declarations.spec(id).role, self.params.place(id).1)).collect();
        let params = Arc::get_mut(&mut self.params).ok_or(TrainError::Stage {
            stage: 0,
            micro: 0,
            problem: "weights are still being read at the end of the step",
        })?;
        let weights = params.flats_mut()[0].as_mut_slice::<f32>().map_err(Error::from)?;
        let gradients = self.gradients.get_mut();
        let grads = gradients.all.as_slice::<f32>().map_err(Error::from)?;
        for (role, place) in places {
            let decay_factor = if role == Role::Weight { 1.0 } else { 0.0 };
            let update = Update { step, lr: self.settings.lr.lr(step), grad_scale: 1.0, decay_factor };
            let mut states: Vec<&mut [f32]> = self.states.iter_mut().map(|state| &mut state[place.clone()]).collect();
            let updated =
                self.settings.optimizer.update(update, &mut weights[place.clone()], &grads[place], &mut states);
            updated.map_err(Error::from)?;
        }
        Ok(())
    }
}
