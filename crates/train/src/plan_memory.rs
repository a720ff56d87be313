//! Settings that take less memory, each tried by a dry run: for `--plan-memory`, and the error of a limit that is too
//! small.
//!
//! For the error the time of a step is estimated as its FLOPs, ten for each byte that a rank sends and receives, and a
//! hundred for each that its offload moves: it only orders the settings. `--plan-memory` has the planner's times.

use crate::config::{Config, Device, Fault, OffloadWord, RecomputeWord, Recomputed};
use crate::numbers::size;
use crate::predict::predict_all;
use meshwork_engine::{TrainError, ZeroStage};
use meshwork_tensor::MemoryUse;

/// FLOPs in the time of a byte: a machine of 100 GFLOP/s whose ranks exchange 10 GB/s.
const FLOPS_PER_BYTE: f64 = 10.0;

/// FLOPs in the time of a byte that goes to a disk or comes from it: 1 GB/s on the same machine.
const FLOPS_PER_DISK_BYTE: f64 = 100.0;

/// Where files go that nobody has named a folder for.
const HERE: &str = ".";

/// Tokens whose logits are tried together where all are: a quarter of a sequence, and no more than keep the head's
/// products large.
const LOSS_CHUNK: usize = 256;

/// Features of the widest activation of a layer, the inner one of an MLP, for each feature of the model.
const WIDEST: usize = 4;

/// The settings of recomputation, the cheapest first.
const RECOMPUTE: [RecomputeWord; 5] =
    [RecomputeWord::None, RecomputeWord::Selective, RecomputeWord::Sqrt, RecomputeWord::Full, RecomputeWord::Stage];

/// Settings with their predicted memory and time.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The configuration with these settings.
    pub config: Config,
    /// The memory of the rank with the highest peak.
    pub most: MemoryUse,
    /// Most bytes that the offload of a rank reads and writes in a step.
    pub moved: u64,
    /// Time of a step, in any unit: of an estimate, in FLOPs of the slowest rank.
    pub time: f64,
}

impl Candidate {
    fn predict(config: Config) -> Result<Self, TrainError> {
        let all = predict_all(&config)?;
        let most = all.iter().map(|equal| equal.each.memory).max_by_key(MemoryUse::total).unwrap_or_default();
        let times = all.iter().map(|equal| {
            let sent: f64 = equal.each.records.iter().map(|record| record.bytes()).sum();
            let moved = equal.each.offloaded.read + equal.each.offloaded.written;
            equal.each.flops as f64 + FLOPS_PER_BYTE * sent + FLOPS_PER_DISK_BYTE * moved as f64
        });
        let moved = all.iter().map(|equal| equal.each.offloaded.read + equal.each.offloaded.written).max();
        Ok(Self { most, moved: moved.unwrap_or_default(), time: times.fold(0.0, f64::max), config })
    }

    /// The settings in which it differs from `base`, as one writes them.
    pub fn settings(&self, base: &Config) -> String {
        let words: Vec<String> =
            changes(&self.config, base).map(|(key, value)| format!("--set {key}={value}")).collect();
        if words.is_empty() { "the settings as they are".to_owned() } else { words.join(" ") }
    }
}

/// The key of the folder that comes with `memory.offload`, and is no choice of its own.
const FOLDER: &str = "memory.offload_dir";

/// The settings that are tried in which `config` differs from `base`.
fn changes(config: &Config, base: &Config) -> impl Iterator<Item = (&'static str, String)> {
    let of = |config: &Config| {
        [
            ("parallelism.zero_stage", config.parallelism.zero_stage.to_string()),
            ("memory.recompute", config.memory.recompute.to_string()),
            ("memory.loss_chunk", config.memory.loss_chunk.to_string()),
            ("memory.sequence_block", config.memory.sequence_block.to_string()),
            ("memory.offload", config.memory.offload.name().to_owned()),
            (FOLDER, config.memory.offload_dir.clone().unwrap_or_default()),
            ("pipeline.num_microbatches", config.pipeline.num_microbatches.to_string()),
        ]
    };
    of(config).into_iter().zip(of(base)).filter(|(own, other)| own != other).map(|(own, _)| own)
}

/// Every combination of settings that this run takes, its own first; then from what changes least.
pub fn candidates(config: &Config) -> Vec<Candidate> {
    combinations(config).into_iter().filter_map(|tried| Candidate::predict(tried).ok()).collect()
}

/// The memory that each setting by itself would free on the fullest rank, as predicted, the largest first.
pub(crate) fn savings(config: &Config) -> Vec<(String, u64)> {
    let Ok(own) = Candidate::predict(config.clone()) else { return Vec::new() };
    let single = combinations(config)
        .into_iter()
        .filter(|tried| changes(tried, config).filter(|&(key, _)| key != FOLDER).count() == 1);
    let mut savings: Vec<(String, u64)> = single
        .filter_map(|tried| {
            let tried = Candidate::predict(tried).ok()?;
            let less = own.most.total().checked_sub(tried.most.total()).filter(|&less| less > 0)?;
            Some((tried.settings(config), less))
        })
        .collect();
    savings.sort_by_key(|&(_, less)| std::cmp::Reverse(less));
    savings
}

fn combinations(config: &Config) -> Vec<Config> {
    let (dp, cp) = (config.parallelism.dp, config.parallelism.cp);
    let (own_stage, own_micros) = (config.parallelism.zero_stage, config.pipeline.num_microbatches);
    let samples = config.training.global_batch_size / dp.max(1);
    let stages = if dp * cp > 1 { own_stage..ZeroStage::ALL.len() } else { own_stage..own_stage + 1 };
    let doubled = std::iter::successors(Some(own_micros), |micros| Some(micros * 2));
    let micros: Vec<usize> =
        doubled.take_while(|micros| *micros <= samples && samples.is_multiple_of(*micros)).collect();
    let own = config.memory.recompute;
    let recompute = RECOMPUTE.map(Recomputed::Word).into_iter().skip_while(|word| *word != own);
    let recompute: Vec<Recomputed> = recompute.collect();
    let recompute = if recompute.is_empty() { vec![own] } else { recompute };
    let tokens = tokens_at_a_time(config);
    let mut found = Vec::new();
    for &num_microbatches in &micros {
        for &recompute in &recompute {
            for offload in offloads(config.memory.offload, config.compress.aqsgd) {
                for &[loss_chunk, sequence_block] in &tokens {
                    for zero_stage in stages.clone() {
                        let mut tried = config.clone();
                        tried.parallelism.zero_stage = zero_stage;
                        tried.memory.recompute = recompute;
                        tried.memory.loss_chunk = loss_chunk;
                        tried.memory.sequence_block = sequence_block;
                        tried.memory.offload = offload;
                        if offload != OffloadWord::None && config.device == Device::Cpu {
                            tried.memory.offload_dir.get_or_insert_with(|| HERE.to_owned());
                        }
                        tried.pipeline.num_microbatches = num_microbatches;
                        tried.training.micro_batch_size = samples / num_microbatches;
                        found.push(tried);
                    }
                }
            }
        }
    }
    found
}

/// How many tokens' logits, and how many tokens' inner features, may exist at a time: as many as now; logits of a chunk
/// where all of them are wider than any other activation; inner features of as many tokens as a token has features
/// where a rank has more, as ALST cuts its networks (arXiv:2506.13996).
pub fn tokens_at_a_time(config: &Config) -> Vec<[usize; 2]> {
    let (memory, model) = (&config.memory, &config.model);
    let wide = memory.loss_chunk == 0 && model.vocab_size > WIDEST * model.hidden_size;
    let long = memory.sequence_block == 0 && model.seq_len / config.parallelism.cp.max(1) > model.hidden_size;
    let chunks = [Some(memory.loss_chunk), wide.then(|| model.seq_len.div_ceil(4).min(LOSS_CHUNK))];
    let blocks = [Some(memory.sequence_block), long.then_some(model.hidden_size)];
    let with = |block: usize| chunks.into_iter().flatten().map(move |chunk| [chunk, block]);
    blocks.into_iter().flatten().flat_map(with).collect()
}

/// The offloads that include `own`. Histories of samples exist with `aqsgd` alone.
fn offloads(own: OffloadWord, aqsgd: bool) -> impl Iterator<Item = OffloadWord> {
    use OffloadWord::{Activations, All, None, Optimizer, Samples};
    let tried = [None, Optimizer, Activations, Samples, All].into_iter();
    let tried = tried.filter(move |&of| own == None || of == own || of == All);
    tried.filter(move |&of| of != Samples || of == own || aqsgd)
}

/// The settings that fit the limit and take the least time, of equal ones those that change least; and those that hold
/// least.
pub fn choose(candidates: &[Candidate], limit: u64) -> (Option<&Candidate>, Option<&Candidate>) {
    let fitting = candidates.iter().filter(|candidate| candidate.most.total() <= limit);
    let cheapest = fitting.min_by(|a, b| a.time.total_cmp(&b.time));
    (cheapest, candidates.iter().min_by_key(|candidate| candidate.most.total()))
}

/// The fault of a limit below the predicted memory.
pub(crate) fn too_large(config: &Config) -> Option<Fault> {
    let limit = config.memory.limit()?;
    let own = Candidate::predict(config.clone()).ok()?;
    if own.most.total() <= limit {
        return None;
    }
    let problem = format!("a rank will hold {} ({})", size(own.most.total() as f64), own.most);
    let candidates = candidates(config);
    let holds = |candidate: &Candidate| size(candidate.most.total() as f64);
    let valid = match choose(&candidates, limit) {
        (Some(fits), _) => format!(
            "use {}, which takes {}: of what fits it takes the least time by an estimate, and --plan-memory has the \
             planner's times",
            fits.settings(config),
            holds(fits)
        ),
        (None, Some(least)) => format!(
            "the least is {}, or {} bytes, with {}; use a larger limit, more ranks or a smaller model",
            holds(least),
            least.most.total(),
            least.settings(config)
        ),
        (None, None) => "use a larger limit".to_owned(),
    };
    Some(Fault::new("memory.limit_bytes", limit, problem, valid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn config(limit: u64, rest: &str) -> Config {
        let toml = format!("[memory]\nlimit_bytes = {limit}\n[training]\nglobal_batch_size = 8\n{rest}");
        Config::from_toml(&toml).unwrap()
    }

    /// The named settings fit, and the least that is told is the least: nothing fits a limit one byte below it.
    #[test]
    fn the_settings_that_are_named_fit_and_the_least_is_the_least() {
        // Two numbers of micro-batches, this one and its double. A dry run predicts the memory of each.
        for (mesh, micros) in [
            ("[parallelism]\ndp = 4", 1),
            ("[parallelism]\ndp = 2\ntp = 2", 2),
            ("[parallelism]\ndp = 2\npp = 2", 2),
            ("", 4),
        ] {
            let more = format!("{mesh}\n[pipeline]\nnum_microbatches = {micros}\n[model]\nnum_layers = 2");
            let config = |limit| config(limit, &more);
            let all = candidates(&config(0));
            let own = all[0].most.total();
            let least = all.iter().map(|candidate| candidate.most.total()).min().unwrap();
            assert!(least < own, "{mesh}: some settings save memory");
            assert!(too_large(&config(own)).is_none(), "{mesh}: it fits exactly");
            let fault = too_large(&config(own - 1)).unwrap();
            assert!(fault.valid.starts_with("use --set "), "{mesh}: {fault}");
            let fault = too_large(&config(least)).unwrap();
            assert!(fault.valid.starts_with("use --set "), "{mesh}: {fault}");
            let fault = too_large(&config(least - 1)).unwrap();
            assert!(
                fault.valid.starts_with("the least is ") && fault.valid.contains(&least.to_string()),
                "{mesh}: {fault}"
            );
        }
    }

    /// The logits of a large vocabulary are most of what a rank holds: those of a few tokens at a time are proposed,
    /// and train under the limit.
    #[test]
    fn the_logits_of_a_few_tokens_are_proposed_where_the_vocabulary_is_large() {
        let small =
            "steps = 1\n[model]\nvocab_size = 4096\nnum_layers = 1\nhidden_size = 16\nnum_heads = 2\nseq_len = 32";
        let (words, all) = ("--set memory.loss_chunk=8", candidates(&config(0, small)));
        let savings = savings(&config(0, small));
        assert!(savings.iter().any(|(settings, _)| settings == words), "{savings:?}");
        let with_all_logits = all.iter().filter(|candidate| candidate.config.memory.loss_chunk == 0);
        let limit = with_all_logits.map(|candidate| candidate.most.total()).min().unwrap() - 1;
        let fault = too_large(&config(limit, small)).unwrap();
        assert!(fault.valid.starts_with("use --set ") && fault.valid.contains(words), "{fault}");
        let folder = tempfile::tempdir().unwrap();
        let mut named = choose(&all, limit).0.unwrap().config.clone();
        (named.memory.limit_bytes, named.memory.offload_dir) = (limit, Some(folder.path().display().to_string()));
        let data = crate::Data::open(&named).unwrap();
        let outcome = crate::train(&named, &data, None, &AtomicBool::new(false)).unwrap();
        assert_eq!(outcome.steps, 1);
    }

    /// Where a rank has more tokens than features, the inner features of a few tokens at a time are proposed.
    #[test]
    fn the_inner_features_of_a_few_tokens_are_proposed_where_sequences_are_long() {
        let words = "--set memory.sequence_block=16";
        let small = |seq: usize, cp: usize| {
            let model = "[model]\nvocab_size = 64\nnum_layers = 1\nhidden_size = 16\nnum_heads = 2";
            format!("{model}\nseq_len = {seq}\n[parallelism]\ncp = {cp}\n[pipeline]\nnum_microbatches = 8\n")
        };
        let named = |seq, cp| savings(&config(0, &small(seq, cp))).iter().any(|(settings, _)| settings == words);
        assert!(named(128, 1) && named(128, 2) && !named(32, 2));
        let all = candidates(&config(0, &small(128, 2)));
        let without = all.iter().filter(|candidate| candidate.config.memory.sequence_block == 0);
        let limit = without.map(|candidate| candidate.most.total()).min().unwrap() - 1;
        let fault = too_large(&config(limit, &small(128, 2))).unwrap();
        assert!(fault.valid.starts_with("use --set ") && fault.valid.contains(words), "{fault}");
    }

    /// Offload is offered where nothing else fits, with a folder, and what is offered trains under the limit on every
    /// rank.
    #[test]
    fn the_settings_that_are_named_train_under_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let folder = format!("offload_dir = {:?}", dir.path().display().to_string());
        let small = "[model]\nnum_layers = 4\nhidden_size = 64\nnum_heads = 2\nseq_len = 16";
        for mesh in ["", "[parallelism]\ndp = 2\npp = 2"] {
            let toml = |limit: u64, more: &str| {
                let steps = "[training]\nglobal_batch_size = 8\nsteps = 2";
                Config::from_toml(&format!("[memory]\nlimit_bytes = {limit}\n{more}\n{steps}\n{small}\n{mesh}"))
                    .unwrap()
            };
            let all = candidates(&toml(0, &folder));
            let without = all.iter().filter(|candidate| candidate.config.memory.offload == OffloadWord::None);
            let limit = without.map(|candidate| candidate.most.total()).min().unwrap() - 1;
            let fault = too_large(&toml(limit, "")).unwrap();
            assert!(fault.valid.contains("--set memory.offload=") && fault.valid.contains("offload_dir=."), "{fault}");
            let named = choose(&all, limit).0.unwrap().config.clone();
            let mut config = toml(limit, &folder);
            config.parallelism.zero_stage = named.parallelism.zero_stage;
            config.memory = named.memory.clone();
            config.memory.limit_bytes = limit;
            config.pipeline.num_microbatches = named.pipeline.num_microbatches;
            config.training.micro_batch_size = named.training.micro_batch_size;
            let data = crate::Data::open(&config).unwrap();
            let outcome = crate::train(&config, &data, None, &AtomicBool::new(false)).unwrap();
            assert_eq!(outcome.steps, 2, "{mesh}");
        }
    }
}
