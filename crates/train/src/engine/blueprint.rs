//! What the whole model declares, stage by stage: pure data that any rank draws up without allocating anything.

use crate::config::Config;
use meshwork_core::{Axis, Mesh, MeshError};
use meshwork_models::gpt2::{Gpt2Config, Gpt2Stage};
use meshwork_models::{Part, Stage};
use meshwork_pipeline::Schedule;
use meshwork_tensor::{Declarations, Error, ParamId, ParamSpec, Result};
use meshwork_tensor_parallel::Region;
use std::collections::BTreeMap;

/// A model on a mesh, cut into stages.
#[derive(Clone, Debug)]
pub struct Blueprint {
    mesh: Mesh,
    model: Gpt2Config,
    region: Region,
    parts: Vec<Part>,
    /// Of canonical numerics.
    leaves: Option<usize>,
}

/// The stages that one pp rank holds, with the parameters they declare together.
#[derive(Debug)]
pub struct RankModel {
    /// What they declare.
    pub declarations: Declarations,
    /// The stages, by their number.
    pub stages: Vec<(usize, Box<dyn Stage>)>,
}

/// A parameter that several pp ranks hold: two stages that tie it, or the replicas of one. Its gradient is Partial over them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Its name.
    pub name: String,
    /// The pp ranks that hold it, in order.
    pub holders: Vec<usize>,
}

impl Blueprint {
    /// The model and mesh of a configuration.
    pub fn new(config: &Config) -> std::result::Result<Self, MeshError> {
        let parallelism = &config.parallelism;
        let model = &config.model;
        let model = Gpt2Config {
            vocab_size: model.vocab_size,
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_heads: model.num_heads,
            ffn_hidden_size: model.ffn_hidden_size,
            seq_len: model.seq_len,
            tie_embeddings: model.tie_embeddings,
            dropout: model.dropout as f32,
        };
        Ok(Self {
            mesh: parallelism.mesh()?,
            parts: Part::cut(&config.pipeline.partition),
            region: Region::new(parallelism.sequence_parallel),
            leaves: config.leaves(),
            model,
        })
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The model's sizes.
    pub fn model(&self) -> &Gpt2Config {
        &self.model
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.parts.len()
    }

    /// The stages that lie on `pp_rank`, by a schedule's placement.
    pub fn rank_model(&self, schedule: &Schedule, pp_rank: usize) -> Result<RankModel> {
        let mut declarations = self.declarations();
        let mut stages: Vec<(usize, Box<dyn Stage>)> = Vec::new();
        for (number, part) in
            self.parts.iter().enumerate().filter(|(number, _)| schedule.ranks_of(*number).contains(&pp_rank))
        {
            let stage = Gpt2Stage::new(&mut declarations, &self.mesh, self.model, self.region, part)?;
            stages.push((number, Box::new(stage)));
        }
        Ok(RankModel { declarations, stages })
    }

    fn declarations(&self) -> Declarations {
        self.leaves.map_or_else(Declarations::new, Declarations::canonical)
    }

    /// Every parameter of the model once, by name; refuses two declarations that do not agree.
    pub fn parameters(&self) -> Result<Vec<ParamSpec>> {
        let mut all = self.declarations();
        for part in &self.parts {
            Gpt2Stage::new(&mut all, &self.mesh, self.model, self.region, part)?;
        }
        Ok(all.specs().to_vec())
    }

    /// The parameters that several pp ranks hold, in an order that every rank agrees on.
    pub fn ties(&self, schedule: &Schedule) -> Result<Vec<Tie>> {
        let models = (0..self.mesh.degree(Axis::Pp))
            .map(|pp_rank| self.rank_model(schedule, pp_rank).map(|model| model.declarations))
            .collect::<Result<Vec<_>>>()?;
        ties_of(&models)
    }
}

/// The parameters that several pp ranks declare, given what each declares.
fn ties_of(models: &[Declarations]) -> std::result::Result<Vec<Tie>, Error> {
    let mut holders: BTreeMap<&str, Vec<(usize, ParamId)>> = BTreeMap::new();
    for (pp_rank, declarations) in models.iter().enumerate() {
        for id in declarations.ids() {
            holders.entry(&declarations.spec(id).name).or_default().push((pp_rank, id));
        }
    }
    holders.retain(|_, held| held.len() > 1);
    holders
        .into_iter()
        .map(|(name, held)| {
            let spec = |&(pp_rank, id): &(usize, ParamId)| models[pp_rank].spec(id);
            for other in &held[1..] {
                spec(&held[0]).require_tied(spec(other))?;
            }
            Ok(Tie { name: name.to_owned(), holders: held.iter().map(|(pp_rank, _)| *pp_rank).collect() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_pipeline::forward_only;
    use meshwork_tensor::{Init, Placement, Role};

    #[test]
    fn both_ends_of_a_tied_model_hold_the_token_table() {
        let config = Config::from_toml("[parallelism]\npp = 4").unwrap();
        let blueprint = Blueprint::new(&config).unwrap();
        let tie = Tie { name: "wte.weight".to_owned(), holders: vec![0, 3] };
        assert_eq!(blueprint.ties(&forward_only(&[0, 1, 2, 3], 1)).unwrap(), [tie]);
        assert_eq!(blueprint.ties(&forward_only(&[0, 0, 0, 0], 1)).unwrap(), []);
    }

    #[test]
    fn stages_that_tie_a_parameter_with_different_placements_are_refused() {
        let declare = |dim: usize| {
            let mut all = Declarations::new();
            let placement = Placement::replicated().shard(Axis::Tp, dim);
            all.declare("wte.weight", &[8, 4], placement, Role::Weight, Init::Zeros).unwrap();
            all
        };
        let error = ties_of(&[declare(0), declare(1)]).unwrap_err().to_string();
        assert!(error.contains("Shard(0) on tp and as [8, 4] Shard(1) on tp"), "{error}");
    }
}
