//! The tasks of the study: a GPT-2 that has learned one text and is fine-tuned on another, and a ResNet on handwritten
//! digits. Both are cut into four stages, which one rank simulates.

use meshwork::core::Rank;
use meshwork::cpu::Cpu;
use meshwork::engine::{AtCuts, Compress, Plan, StateKey, TrainError, Trainer, WholeState};
use meshwork::models::gpt2::{Gpt2, Gpt2Config};
use meshwork::models::network::ACCURACY;
use meshwork::models::resnet::ResNetConfig;
use meshwork::nn::{Batch, Model, SAMPLE};
use meshwork::optim::{AdamW, Decay, LrSchedule, Sgd};
use meshwork::tensor::ParamSpec;
use meshwork::tensor::param::{LocalSlice, Piece};
use meshwork::train::Data;
use meshwork::train::data::Images;
use std::error::Error;
use std::sync::Arc;

/// The length of runs. The study uses [`FULL`](Length::FULL).
#[derive(Clone, Copy, Debug)]
pub struct Length {
    /// Steps on the first text.
    pub pretrain: u64,
    /// Steps on the second text.
    pub finetune: u64,
    /// Passes over the images.
    pub epochs: u64,
}

impl Length {
    /// The lengths of the published table.
    pub const FULL: Self = Self { pretrain: 300, finetune: 120, epochs: 5 };
    /// The lengths for tests.
    pub const QUICK: Self = Self { pretrain: 60, finetune: 60, epochs: 2 };
}

/// The scores of a trained model, with and without compression at its cuts; `None` if training diverged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// With compression, as in training.
    pub on: Option<f64>,
    /// Without compression.
    pub off: Option<f64>,
}

/// A training task, scored on held-out data.
pub trait Task {
    /// Its name in results.
    fn name(&self) -> &'static str;

    /// Steps of a run.
    fn steps(&self) -> u64;

    /// Number of training samples.
    fn samples(&self) -> usize;

    /// Trains with `compress` at the cuts.
    ///
    /// # Errors
    /// A failure of training other than a loss that is not finite.
    fn run(&self, compress: Compress, seed: u64) -> Result<Scores, Box<dyn Error>>;
}

/// A model on one rank.
fn trainer(model: &Arc<dyn Model>, plan: &Plan) -> Result<Trainer, Box<dyn Error>> {
    Ok(Trainer::new(model.clone(), plan, Arc::new(Rank::recording(&plan.mesh, 0)?), Cpu::device())?)
}

fn lr(base: f64, warmup_steps: u64, decay: Decay, decay_steps: u64) -> LrSchedule {
    LrSchedule { base, warmup_steps, decay, decay_steps, min_lr_factor: 0.0 }
}

/// Trains for some steps; false if the loss was not finite.
fn train<E: Into<Box<dyn Error>>>(
    trainer: &mut Trainer,
    steps: u64,
    batch: impl Fn(u64) -> Result<Batch, E>,
) -> Result<bool, Box<dyn Error>> {
    for step in 0..steps {
        match trainer.step(&batch(step).map_err(Into::into)?) {
            Ok(_) => {}
            Err(TrainError::NotFinite { .. } | TrainError::Weight { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// Predicts bytes of Cicero, with a GPT-2 that has learned the decision records of this repository.
pub struct Language {
    model: Arc<dyn Model>,
    length: Length,
    pretrained: WholeState,
    text: Data,
}

const SEQ_LEN: usize = 64;
const SENTENCES: usize = 12;
/// Bytes of the second text: few enough that a run reads it four times.
const TEXT: usize = 24_000;

/// The first text: decision records, in English.
const RECORDS: [&str; 10] = [
    include_str!("../../docs/decisions/0001-update-rules-are-data.md"),
    include_str!("../../docs/decisions/0003-the-engine-is-a-crate.md"),
    include_str!("../../docs/decisions/0006-one-lock-for-a-world.md"),
    include_str!("../../docs/decisions/0009-losses-and-norms-are-summed-per-sample.md"),
    include_str!("../../docs/decisions/0010-canonical-sums-travel-as-whole-subtrees.md"),
    include_str!("../../docs/decisions/0012-overlapping-steps-keep-the-old-weights.md"),
    include_str!("../../docs/decisions/0013-gradient-buckets-follow-the-tape.md"),
    include_str!("../../docs/decisions/0014-partitions-come-from-counted-operations.md"),
    include_str!("../../docs/decisions/0016-no-sharded-dim-is-merged.md"),
    include_str!("../../docs/decisions/0020-zero-is-a-window-of-each-flat-buffer.md"),
];

fn bytes(text: &str) -> Vec<i32> {
    text.bytes().map(i32::from).collect()
}

impl Language {
    /// Trains the model on the first text.
    pub fn new(length: Length) -> Result<Self, Box<dyn Error>> {
        let config = Gpt2Config {
            vocab_size: 256,
            num_layers: 4,
            hidden_size: 64,
            num_heads: 4,
            ffn_hidden_size: 256,
            seq_len: SEQ_LEN,
            ..Gpt2Config::default()
        };
        let model: Arc<dyn Model> = Arc::new(Gpt2::new(config));
        let data = Data::from_tokens(bytes(&RECORDS.concat()), SEQ_LEN).shuffled(1);
        let plan = Plan { lr: lr(3e-3, 20, Decay::Cosine, length.pretrain), ..Self::plan() };
        let mut first = trainer(&model, &plan)?;
        if !train(&mut first, length.pretrain, |step| data.batch(step, SENTENCES, 0..SENTENCES))? {
            return Err("the model did not learn the first text".into());
        }
        let pretrained = WholeState::merge(&[first.state()?])?;
        let text = &bytes(lipsum::LIBER_PRIMUS)[..TEXT];
        let text = Data::from_tokens(text.to_vec(), SEQ_LEN).hold_out(0.125).numbered();
        Ok(Self { model, length, pretrained, text })
    }

    fn plan() -> Plan {
        Plan {
            global_batch_size: SENTENCES,
            num_microbatches: Some(1),
            optimizer: AdamW::default().into(),
            virtual_cuts: vec![1, 2, 3],
            ..Plan::default()
        }
    }
}

impl Task for Language {
    fn name(&self) -> &'static str {
        "language"
    }

    fn steps(&self) -> u64 {
        self.length.finetune
    }

    fn samples(&self) -> usize {
        self.text.training_samples()
    }

    fn run(&self, compress: Compress, seed: u64) -> Result<Scores, Box<dyn Error>> {
        let lr = lr(1e-3, 10, Decay::Linear, self.length.finetune);
        let mut trainer = trainer(&self.model, &Plan { compress, seed, lr, ..Self::plan() })?;
        trainer.load_weights(|spec: &ParamSpec, slice: &LocalSlice| {
            let key = StateKey { parameter: spec.name.clone(), state: None };
            let whole = self.pretrained.vector(&key).ok_or("the first model does not have it")?;
            Ok::<_, &str>(Piece::cut(0, spec.dims, slice.clone(), whole).values)
        })?;
        let text = self.text.clone().shuffled(seed);
        if !train(&mut trainer, self.length.finetune, |step| text.batch(step, SENTENCES, 0..SENTENCES))? {
            return Ok(Scores { on: None, off: None });
        }
        let held_out = (0..text.validation_batches(0, SENTENCES))
            .map(|index| text.validation_batch(index, SENTENCES, 0..SENTENCES))
            .collect::<Result<Vec<_>, _>>()?;
        let mut score = |cuts| Ok::<_, TrainError>(finite(trainer.evaluate_at(cuts, held_out.clone())?.loss));
        Ok(Scores { on: score(AtCuts::AsTrained)?, off: score(AtCuts::Exact)? })
    }
}

/// Handwritten digits, by a ResNet.
pub struct Digits {
    model: Arc<dyn Model>,
    length: Length,
    images: [Images; 2],
}

const PICTURES: usize = 64;

impl Digits {
    /// The images of the crate `smartcore`, every fifth one held out.
    pub fn new(length: Length) -> Self {
        let all = smartcore::dataset::digits::load_dataset();
        let pixels = all.data.iter().map(|pixel| pixel / 16.0).collect();
        let images = Images::new([8, 8, 1], pixels, all.target.iter().map(|&class| class as i32).collect());
        Self { model: Arc::new(ResNetConfig::digits().network()), length, images: images.hold_out(5).into() }
    }
}

impl Task for Digits {
    fn name(&self) -> &'static str {
        "digits"
    }

    fn steps(&self) -> u64 {
        self.length.epochs * (self.images[0].len() / PICTURES) as u64
    }

    fn samples(&self) -> usize {
        self.images[0].len()
    }

    fn run(&self, compress: Compress, seed: u64) -> Result<Scores, Box<dyn Error>> {
        let [images, held_out] = &self.images;
        let of_epoch = (images.len() / PICTURES) as u64;
        let plan = Plan {
            global_batch_size: PICTURES,
            num_microbatches: Some(1),
            optimizer: Sgd { momentum: 0.9, weight_decay: 5e-4 }.into(),
            lr: lr(0.05, of_epoch, Decay::Cosine, self.steps()),
            // After the first, the second and the third of four blocks.
            virtual_cuts: vec![2, 3, 4],
            compress,
            seed,
            ..Plan::default()
        };
        let mut trainer = trainer(&self.model, &plan)?;
        let batch = |step: u64| {
            let order = images.order(seed, (step / of_epoch) as usize);
            let indices = &order[(step % of_epoch) as usize * PICTURES..][..PICTURES];
            images.gather(indices).to_batch()?.with(SAMPLE, [], indices.iter().map(|&index| index as i32).collect())
        };
        if !train(&mut trainer, self.steps(), batch)? {
            return Ok(Scores { on: None, off: None });
        }
        let parts = held_out.parts(PICTURES).map(|part| part.to_batch()).collect::<Result<Vec<_>, _>>()?;
        let mut score = |cuts| {
            let found = trainer.evaluate_at(cuts, parts.clone())?;
            let accuracy = found.metrics.iter().find(|(name, _)| *name == ACCURACY);
            Ok::<_, TrainError>(accuracy.and_then(|(_, share)| finite(100.0 * share)))
        };
        Ok(Scores { on: score(AtCuts::AsTrained)?, off: score(AtCuts::Exact)? })
    }
}

fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}
