//! A vision transformer (Dosovitskiy et al., 2021) on the 8×8 handwritten digits of the UCI repository, over any mesh:
//! `cargo run --release --features digits --example vision_transformer`. `tests/custom_model/attention.rs` tests it.

use meshwork::core::DType;
use meshwork::models::language::no_input;
use meshwork::models::network::{ACCURACY, IMAGES, LABELS};
use meshwork::models::transformer::TransformerLayer;
use meshwork::nn::{Conv2d, Linear, Metric, Per};
use meshwork::prelude::*;
use meshwork::tensor::op::Mask;
use meshwork::train::data::Images;
use std::sync::Arc;

const NORMAL: Init = Init::Normal { std: 0.15 };
const PIXELS: usize = 8; // of a side
const PATCH: usize = 2;
const PATCHES: usize = 16; // of an image
const CLASSES: usize = 10;

/// A transformer of so many layers and features.
#[derive(Debug)]
pub(crate) struct VisionTransformer {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
}

/// Some of the layers; in front of the first the patches, behind the last norm and head.
#[derive(Debug)]
struct Part {
    patches: Option<(Conv2d, Positions)>,
    layers: Vec<TransformerLayer>,
    head: Option<(LayerNorm, Linear)>,
}

impl Model for VisionTransformer {
    fn num_layers(&self) -> usize {
        self.layers
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::new(IMAGES, DType::F32, [PIXELS, PIXELS, 1]), Field::ids(LABELS, [], 0..CLASSES as i32)]
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let h = self.hidden;
        let patches =
            part.first.then(|| Conv2d::new(params, "patches", [1, h], [PATCH, PATCH], true, NORMAL)).transpose()?;
        let positions = part.first.then(|| Positions::new(params, "positions", PATCHES, h, 0.15)).transpose()?;
        let mut layer = |i| TransformerLayer::new(params, mesh, &format!("layer.{i}"), [h, 4], NORMAL);
        let layers = part.layers.clone().map(&mut layer).collect::<Result<_>>()?;
        let norm = part.last.then(|| LayerNorm::new(params, "norm", h, true)).transpose()?;
        let head = part.last.then(|| Linear::head(params, "head", h, CLASSES, true, 0.02)).transpose()?;
        Ok(Box::new(Part { patches: patches.zip(positions), layers, head: norm.zip(head) }))
    }

    fn activation(&self, mesh: &Mesh, _at: usize, batch: &Batch) -> Result<Activation> {
        let shape = [batch.samples(), PATCHES, self.hidden].into();
        Ok(Activation { dtype: DType::F32, shape, types: Region::INVARIANT.types(mesh) })
    }

    fn metrics(&self) -> Vec<Metric> {
        vec![Metric { name: ACCURACY, per: Per::Term }]
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let x = match &self.patches {
            None => input.cloned().ok_or_else(|| no_input("vision transformer"))?,
            Some((patches, positions)) => {
                let patches = patches.forward(tape, &batch.var(tape, IMAGES)?)?; // [b, 4, 4, h]
                positions.forward(tape, &patches.flatten(1..3)?)? // [b, 16, h]
            }
        };
        let each = |x: Var, layer: &TransformerLayer| {
            layer.forward(tape, &x, Region::INVARIANT, Mask::BIDIRECTIONAL, None, 0.0) // all patches see each other
        };
        let x = self.layers.iter().try_fold(x, each)?;
        let Some((norm, head)) = &self.head else { return Ok(x) };
        head.forward(tape, &norm.forward(tape, &x)?.mean(1)?) // [b, classes]
    }

    fn loss(&self, tape: &Tape, batch: &Batch, logits: &Var) -> Result<Var> {
        let labels = batch.var(tape, LABELS)?;
        tape.report(ACCURACY, &logits.correct(&labels)?)?;
        logits.cross_entropy(&labels)
    }
}

pub(crate) fn digits() -> Images {
    let all = smartcore::dataset::digits::load_dataset(); // 64 numbers from 0 to 16 each
    let pixels = all.data.iter().map(|pixel| pixel / 16.0).collect();
    Images::new([PIXELS, PIXELS, 1], pixels, all.target.iter().map(|&class| class as i32).collect())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let (model, data) = (Arc::new(VisionTransformer { layers: 4, hidden: 32 }), digits());
    let mut plan = Plan { mesh: "dp=2,tp=2,pp=2".parse()?, global_batch_size: 64, ..Plan::default() };
    plan.lr.base = 3e-3;
    meshwork::train::processes::world(&plan.mesh)?.run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device())?;
        trainer.train(&data, 200, |report| {
            (rank.world_rank() == 0 && report.step % 20 == 0).then(|| {
                println!("step {:3}  loss {:.4}  accuracy {:.3}", report.step, report.loss, report.metrics[0].1)
            });
        })
    })?;
    Ok(())
}
