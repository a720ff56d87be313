//! Fewer ranks than the mesh has (`parallelism.elastic`): the mesh shrinks along dp, and the batch stays.

use crate::config::{Config, Elastic, Fault};
use meshwork_core::tree;
use meshwork_engine::Plan;

const KEY: &str = "parallelism.elastic";

/// The configuration for `ranks` ranks: the largest dp, up to the one of the configuration, that they have room for and
/// that fits. Ranks beyond its mesh are spare. `None` if all ranks of the mesh are there, and where nothing shrinks.
///
/// # Errors
/// No dp fits, or another dp has other numbers.
pub(crate) fn fit(config: &Config, ranks: usize) -> Result<Option<Config>, Fault> {
    let mesh = &config.parallelism;
    let all = mesh.world_size().unwrap_or(usize::MAX);
    if mesh.elastic == Elastic::Off || ranks == all {
        return Ok(None);
    }
    let fault = |problem: String, valid: String| Fault::new(KEY, mesh.elastic.name(), problem, valid);
    let other = |dp: usize| with_dp(config, dp);
    let of_each = all / mesh.dp;
    let most = mesh.dp.min(ranks / of_each);
    let mut fitted = (1..=most).rev().find_map(|dp| if dp == mesh.dp { Some(config.clone()) } else { other(dp) });
    if let Some(why) =
        fitted.as_ref().filter(|fitted| fitted.parallelism.dp < mesh.dp).and_then(|to| config.differs_by_dp(to))
    {
        return Err(fault(
            format!("{ranks} of {all} ranks are there, and with another dp the numbers are others: {why}"),
            format!("start {all} ranks"),
        ));
    }
    if let Some(fitted) = &mut fitted {
        let left = ranks - fitted.parallelism.world_size().unwrap_or(ranks);
        let spare = match left {
            0 => String::new(),
            1 => ", and 1 rank is spare".to_owned(),
            left => format!(", and {left} ranks are spare"),
        };
        let (dp, before) = (fitted.parallelism.dp, mesh.dp);
        fitted
            .notices
            .push(format!("{ranks} ranks for a mesh of {all}: {KEY} trains on dp={dp} instead of {before}{spare}"));
        if config.training.replay_every > 0 && fitted.training.replay_every == 0 {
            fitted.notices.push("one rank is left: no step is run again on another".to_owned());
        }
        return Ok(Some(fitted.clone()));
    }
    let valid: Vec<String> =
        (1..mesh.dp).filter(|&dp| other(dp).is_some()).map(|dp| (dp * of_each).to_string()).collect();
    let problem = format!(
        "{ranks} of {all} ranks are there, and no smaller dp fits: the rest of the mesh takes {of_each} ranks for each dp rank"
    );
    Err(fault(problem, format!("start {}", [valid, vec![all.to_string()]].concat().join(" or "))))
}

/// The configuration with another dp, if that fits the batch, the experts and canonical sums. Micro-batches keep their
/// size, as far as it divides, so that they take no more memory; there are more of them.
fn with_dp(config: &Config, dp: usize) -> Option<Config> {
    let (batch, micro) = (config.training.global_batch_size, config.training.micro_batch_size);
    let canonical = config.reduction_blocks().is_some();
    let group = config.parallelism.zero_group;
    let mut other = config.clone();
    other.parallelism.dp = dp;
    let fits = batch.is_multiple_of(dp) && other.mesh().is_ok() && (!canonical || tree::fits(batch, dp));
    if !fits || group > 0 && dp > 1 && !dp.is_multiple_of(group) {
        return None;
    }
    if dp == 1 {
        other.parallelism.zero_group = 0;
        if other.parallelism.cp == 1 {
            other.parallelism.zero_stage = 0;
        }
    }
    if other.training.replay_every > 0 {
        other.training.replay_mesh = None;
        if other.parallelism.world_size() == Some(1) {
            other.training.replay_every = 0;
        }
    }
    let samples = batch / dp;
    // Of the sizes that divide, the largest that the schedule takes.
    let sizes = (1..=micro.min(samples)).rev().filter(|&size| samples.is_multiple_of(size));
    sizes.chain([samples]).find_map(|size| {
        other.pipeline.num_microbatches = samples / size;
        other.training.micro_batch_size = size;
        let plan: Plan = other.plan().ok()?;
        plan.build_schedule().ok()?;
        Some(other.clone())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Args;

    fn fitted(settings: &str, ranks: usize) -> Result<Option<(usize, usize, usize)>, String> {
        let line = format!("--set parallelism.elastic=dp --set training.global_batch_size=8 {settings}");
        let config = Config::from_args(&Args::parse(line.split_whitespace())).unwrap();
        let fitted = fit(&config, ranks).map_err(|fault| fault.to_string())?;
        Ok(fitted.map(|of| {
            let samples = of.parallelism.dp * of.pipeline.num_microbatches * of.training.micro_batch_size;
            assert_eq!(samples, 8, "the batch stays");
            let stage = if of.parallelism.dp * of.parallelism.cp > 1 { config.parallelism.zero_stage } else { 0 };
            assert_eq!(of.parallelism.zero_stage, stage);
            (of.parallelism.dp, of.pipeline.num_microbatches, of.training.micro_batch_size)
        }))
    }

    #[test]
    fn the_mesh_shrinks_along_dp_and_micro_batches_keep_their_size() {
        let four = "--mesh dp=4,tp=2 --set training.micro_batch_size=2";
        assert_eq!(fitted(four, 8), Ok(None));
        assert_eq!(fitted(four, 7), Ok(Some((2, 2, 2))), "3 does not divide the batch, and 3 ranks are spare");
        assert_eq!(fitted(four, 4), Ok(Some((2, 2, 2))));
        assert_eq!(fitted(four, 3), Ok(Some((1, 4, 2))));
        assert_eq!(fitted(four, 9), Ok(Some((4, 1, 2))), "more ranks than the mesh has are spare");
        assert_eq!(fitted("--mesh dp=4,pp=2 --set pipeline.schedule=zb_h2", 2), Ok(Some((1, 8, 1))));
        // Experts lie over cp, with or without dp.
        let experts = "--set moe.num_experts=4";
        assert_eq!(fitted(&format!("--mesh dp=2,cp=4,ep=4 {experts}"), 7), Ok(Some((1, 2, 4))));
        assert_eq!(fitted(&format!("--mesh dp=4,cp=2,ep=2 {experts}"), 3), Ok(Some((1, 4, 2))));
        // A stage of ZeRO has no meaning on one rank; ranks of cp share out.
        assert_eq!(fitted("--mesh dp=2,cp=2 --set parallelism.zero_stage=3", 2), Ok(Some((1, 2, 4))));
        assert_eq!(fitted("--mesh dp=2 --set parallelism.zero_stage=3", 1), Ok(Some((1, 2, 4))));
    }

    #[test]
    fn a_mesh_that_cannot_shrink_is_refused_with_the_numbers_of_ranks_that_fit() {
        let told = |settings: &str, ranks| fitted(settings, ranks).unwrap_err();
        let rest = told("--mesh dp=2,tp=4", 3);
        assert!(rest.starts_with("parallelism.elastic = dp: 3 of 8 ranks are there, and no smaller dp fits"), "{rest}");
        assert!(rest.ends_with("start 4 or 8"), "{rest}");
        let experts = told("--mesh dp=4,ep=4 --set moe.num_experts=4", 3);
        assert!(experts.ends_with("start 4"), "{experts}");
        let stale = "--mesh dp=2,pp=2 --set pipeline.schedule=pipedream --set model.tie_embeddings=false --set training.max_norm=0";
        let stale = told(stale, 2);
        assert!(stale.contains("an asynchronous schedule trains each stage"), "{stale}");
        let compressed = told("--mesh dp=2 --set compress.gradients=bf16", 1);
        assert!(compressed.contains("what ranks send each other is compressed"), "{compressed}");
    }
}
