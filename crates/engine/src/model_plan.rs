//! The declarations of the whole model, stage by stage: plain data that any rank builds without allocating parameters.

use crate::MixedPrecision;
use crate::boundary::{Boundary, boundaries};
use crate::prelude::*;
use crate::segment::{Segment, SegmentSpec};
use meshwork_core::CommError;
use meshwork_nn::{Activation, StageSpec};
use meshwork_tensor::{Declarations, Result};

/// A model on a mesh, cut into stages.
#[derive(Clone, Debug)]
pub struct ModelPlan {
    model: Arc<dyn Model>,
    mesh: Mesh,
    parts: Vec<StageSpec>,
    boundaries: Vec<Boundary>,
    /// The segments of each stage.
    segments: Vec<Vec<SegmentSpec>>,
    /// Reduction blocks of canonical numerics.
    blocks: Option<usize>,
    mixed: Option<MixedPrecision>,
}

/// The stages that one pp rank holds, with the parameters they declare together.
#[derive(Debug)]
pub struct LocalModel {
    /// Their declarations.
    pub declarations: Arc<Declarations>,
    /// The segments of each stage, by the number of the stage.
    pub stages: Vec<(usize, Vec<Segment>)>,
}

/// A parameter that several pp ranks hold: two stages that tie it (Megatron's embedding group), or the replicas of one
/// stage. Its gradient is Partial over them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiedWeight {
    /// Its name.
    pub name: String,
    /// The pp ranks that hold it, in order.
    pub pp_ranks: Vec<usize>,
}

/// Name of the groups that sum the gradients of tied weights across stages (Megatron's embedding group).
pub const TIED: &str = "tied";

/// The tied weights of a model, with this rank's groups.
#[derive(Debug, Default)]
pub(crate) struct Tied {
    /// In an order that every rank agrees on.
    pub weights: Vec<TiedWeight>,
    /// The group of this rank by the pp ranks that hold a weight.
    pub groups: BTreeMap<Vec<usize>, Group>,
}

impl Tied {
    /// Joins the groups. Collective over the world: every rank makes them once, in the same order.
    pub fn join(rank: &Rank, weights: Vec<TiedWeight>) -> std::result::Result<Self, CommError> {
        let mut groups = BTreeMap::new();
        for TiedWeight { pp_ranks, .. } in &weights {
            if groups.contains_key(pp_ranks) {
                continue;
            }
            let holder = |&stage: &usize| rank.mesh().rank_at(rank.coords().with(Axis::Pp, stage));
            let members: Vec<usize> = match pp_ranks.contains(&rank.coords().get(Axis::Pp)) {
                true => pp_ranks.iter().map(holder).collect(),
                false => vec![rank.world_rank()],
            };
            groups.insert(pp_ranks.clone(), rank.subgroup(TIED, &members)?);
        }
        Ok(Self { weights, groups })
    }

    /// The tied weight of this name.
    pub fn find(&self, name: &str) -> Option<&TiedWeight> {
        self.weights.iter().find(|tied| tied.name == name)
    }
}

impl ModelPlan {
    /// Cuts a model into stages as the plan says.
    ///
    /// # Errors
    /// A partition that does not fit.
    pub fn new(model: Arc<dyn Model>, plan: &Plan) -> std::result::Result<Self, TrainError> {
        let parts = plan.stages(&*model)?;
        let apart = plan.offload.as_ref().is_some_and(|offload| offload.activations);
        let (boundaries, between) = boundaries(&parts, &plan.virtual_cuts)?;
        let segments = |(part, cut): &(StageSpec, Option<usize>)| {
            let mut segments = plan.recompute.segments(part, apart);
            segments.last_mut().into_iter().for_each(|last| last.cut = *cut);
            segments
        };
        let segments = between.iter().map(|parts| parts.iter().flat_map(segments).collect()).collect();
        Ok(Self {
            model,
            mesh: plan.mesh.clone(),
            parts,
            boundaries,
            segments,
            blocks: plan.blocks(),
            mixed: plan.mixed,
        })
    }

    /// These stages, all on one rank: each axis has degree 1.
    pub(crate) fn on_one_rank(&self) -> std::result::Result<Self, TrainError> {
        Ok(Self { mesh: Mesh::new(self.mesh.axes().map(|axis| (axis, 1)))?, ..self.clone() })
    }

    /// A device that computes on the types that the model stores, from a device that computes in f32.
    pub(crate) fn device(&self, device: Arc<dyn Device>) -> Arc<dyn Device> {
        MixedPrecision::device(self.mixed, device)
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The model.
    pub fn model(&self) -> &Arc<dyn Model> {
        &self.model
    }

    /// The part of the model in each stage.
    pub fn stages(&self) -> &[StageSpec] {
        &self.parts
    }

    /// The cuts between stages, and the virtual ones, in the order of the layers.
    pub fn boundaries(&self) -> &[Boundary] {
        &self.boundaries
    }

    /// The value that crosses a cut forward, of micro-batches like `batch`.
    pub fn activation_at(&self, boundary: &Boundary, batch: &Batch) -> Result<Activation> {
        self.activation_behind(boundary.layer, batch)
    }

    /// The activation behind so many layers, as it is stored.
    fn activation_behind(&self, layers: usize, batch: &Batch) -> Result<Activation> {
        let activation = self.model.activation(&self.mesh, layers, batch)?;
        Ok(match (activation.dtype, self.mixed) {
            (DType::F32, Some(mixed)) => Activation { dtype: mixed.dtype.dtype(), ..activation },
            _ => activation,
        })
    }

    /// The stages that lie on `pp_rank`, by a schedule's placement.
    pub fn local_model(&self, schedule: &Schedule, pp_rank: usize) -> Result<LocalModel> {
        self.held(|stage| schedule.ranks_of(stage).contains(&pp_rank))
    }

    /// All stages, as one rank would hold them.
    pub fn whole_model(&self) -> Result<LocalModel> {
        self.held(|_| true)
    }

    /// The stages that are `here`.
    fn held(&self, here: impl Fn(usize) -> bool) -> Result<LocalModel> {
        let mut declarations = self.declarations();
        let (mut stages, mut before) = (Vec::new(), 0);
        for (of_stage, specs) in self.segments.iter().enumerate() {
            if here(of_stage) {
                let segment = |(number, spec): (usize, &SegmentSpec)| {
                    let stage = self.model.stage(&mut declarations, &self.mesh, &spec.part)?;
                    Ok(Segment { number, of_stage, spec: spec.clone(), stage })
                };
                stages.push((of_stage, (before..).zip(specs).map(segment).collect::<Result<_>>()?));
            }
            before += specs.len();
        }
        Ok(LocalModel { declarations: Arc::new(declarations), stages })
    }

    fn declarations(&self) -> Declarations {
        let declarations = self.blocks.map_or_else(Declarations::new, Declarations::canonical);
        declarations.stored_in(self.mixed.map(|mixed| mixed.dtype))
    }

    /// Every parameter of the model once, in the order of declaration.
    ///
    /// # Errors
    /// A name that two layers declare, on whichever stages they lie; a parameter that layers tie and none declares.
    pub fn parameters(&self) -> Result<Vec<ParamSpec>> {
        let all = self.whole_model()?.declarations;
        if let Some(spec) = all.undeclared().next() {
            return Err(Error::Declaration {
                name: spec.name.clone(),
                problem: "a layer ties it, and none declares it".to_owned(),
                valid: "declare it in one layer, with Declarations::declare".to_owned(),
            });
        }
        Ok(all.specs().to_vec())
    }

    /// The activation that each stage but the last sends, for micro-batches like `batch`.
    pub fn activations(&self, batch: &Batch) -> Result<Vec<Activation>> {
        let cuts = self.parts[..self.parts.len().saturating_sub(1)].iter();
        cuts.map(|part| self.activation_behind(part.layers.end, batch)).collect()
    }

    /// The parameters that several pp ranks hold, in an order that every rank agrees on.
    pub fn tied_weights(&self, schedule: &Schedule) -> Result<Vec<TiedWeight>> {
        let models = (0..self.mesh.degree(Axis::Pp))
            .map(|pp_rank| self.local_model(schedule, pp_rank).map(|model| model.declarations))
            .collect::<Result<Vec<_>>>()?;
        tied_weights_of(&models)
    }
}

/// The parameters that several pp ranks declare, given what each declares.
fn tied_weights_of(models: &[Arc<Declarations>]) -> std::result::Result<Vec<TiedWeight>, Error> {
    let mut declared_on: BTreeMap<&str, Vec<(usize, ParamId)>> = BTreeMap::new();
    for (pp_rank, declarations) in models.iter().enumerate() {
        for id in declarations.ids() {
            declared_on.entry(&declarations.spec(id).name).or_default().push((pp_rank, id));
        }
    }
    declared_on.retain(|_, held| held.len() > 1);
    declared_on
        .into_iter()
        .map(|(name, held)| {
            let spec = |&(pp_rank, id): &(usize, ParamId)| models[pp_rank].spec(id);
            for other in &held[1..] {
                spec(&held[0]).require_tied(spec(other))?;
            }
            Ok(TiedWeight { name: name.to_owned(), pp_ranks: held.iter().map(|(pp_rank, _)| *pp_rank).collect() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_models::gpt2::{Gpt2, Gpt2Config};
    use meshwork_pipeline::forward_only;
    use meshwork_tensor::{Init, Placement, Role};

    #[test]
    fn both_ends_of_a_tied_model_hold_the_token_table() {
        let plan = Plan { mesh: "pp=4".parse().unwrap(), ..Plan::default() };
        let model = ModelPlan::new(Arc::new(Gpt2::new(Gpt2Config::default())), &plan).unwrap();
        let tied = TiedWeight { name: "wte.weight".to_owned(), pp_ranks: vec![0, 3] };
        assert_eq!(model.tied_weights(&forward_only(&[0, 1, 2, 3], 1)).unwrap(), [tied]);
        assert_eq!(model.tied_weights(&forward_only(&[0, 0, 0, 0], 1)).unwrap(), []);
    }

    #[test]
    fn stages_that_tie_a_parameter_with_different_placements_are_refused() {
        let declare = |dim: usize| {
            let mut all = Declarations::new();
            let placement = Placement::replicated().shard(Axis::Tp, dim);
            all.declare("wte.weight", &[8, 4], placement, Role::Weight, Init::Zeros).unwrap();
            all
        };
        let error = tied_weights_of(&[declare(0), declare(1)].map(Arc::new)).unwrap_err().to_string();
        assert!(error.contains("Shard(0) on tp and as [8, 4] Shard(1) on tp"), "{error}");
    }
}
