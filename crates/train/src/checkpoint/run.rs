//! Checkpoints of a configured run: section `[checkpoint]`.

use super::export::ends_of_text;
use super::{CheckpointError, Resumed, resume_into, save, save_plan_of};
use crate::config::Config;
use crate::data::Data;
use crate::progress::Note;
use meshwork_checkpoint::{Exchange, Lock, SaveError, SavePlan, Saved, Writer, json_differences};
use meshwork_engine::{StateSlice, Trainer, state_layout};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What a resumed run may change if `checkpoint.permit` has the word, with the values that it is about.
pub(crate) const PERMITS: [(&str, &[&str]); 5] = [
    ("model", &["config.model"]),
    ("optimizer", &["config.optimizer"]),
    (
        "data",
        &[
            "data_hash",
            "config.data.documents",
            "config.data.end_of_text",
            "config.data.shuffle",
            "config.validation.every",
            "config.validation.fraction",
        ],
    ),
    ("batch", &["config.training.global_batch_size"]),
    ("seed", &["config.training.seed"]),
];

/// What every rank holds of the state of a run, and who writes what of it. Made once for the ranks of a process, because it grows with their
/// number.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    layout: Arc<[StateSlice]>,
    plan: Arc<SavePlan>,
}

impl Files {
    /// Those of a run that saves; `None` for another.
    pub fn of(config: &Config) -> Result<Option<Self>, CheckpointError> {
        if config.checkpoint.dir.is_none() {
            return Ok(None);
        }
        let plan = config.plan()?;
        let layout: Arc<[StateSlice]> = state_layout(&config.model(), &plan)?.into();
        let plan = Arc::new(save_plan_of(&layout, plan.mesh.world_size())?);
        Ok(Some(Self { layout, plan }))
    }
}

/// Saves a run, and says what became of it.
pub(crate) struct Saver {
    writer: Writer,
    every: u64,
    run: Value,
    /// Whether the newest state that was to be saved was not.
    failed: Option<SaveError>,
}

impl Saver {
    /// The saver of this rank. Rank 0 takes the lock of the folder.
    pub fn new(
        config: &Config,
        files: &Files,
        dir: &Path,
        rank: usize,
        run: Value,
        exchange: Box<dyn Exchange>,
    ) -> Result<Self, CheckpointError> {
        let files = files.plan.clone();
        let keep = usize::try_from(config.checkpoint.keep).unwrap_or(usize::MAX);
        let writer = match rank {
            0 => Writer::lead(Lock::take(dir)?, keep, files, exchange),
            _ => Writer::follow(dir, rank, files, exchange),
        };
        Ok(Self { writer, every: config.checkpoint.every, run, failed: None })
    }

    /// Says from which checkpoint the run goes on.
    pub fn goes_on_from(&mut self, step: u64) {
        self.writer.goes_on_from(step);
    }

    /// Whether there is a checkpoint after `step` steps of `steps`.
    pub fn is_due(&self, step: u64, steps: u64) -> bool {
        step == steps || self.every > 0 && step.is_multiple_of(self.every)
    }

    /// Starts to save a trainer whose steps are complete. What there is to say of the save before. Weights that are not finite are refused,
    /// on all ranks.
    pub fn save(&mut self, trainer: &Trainer) -> Result<Vec<Note>, CheckpointError> {
        trainer.require_finite()?;
        let before = save(&mut self.writer, trainer, self.run.clone())?;
        Ok(self.told(before))
    }

    /// What there is to say of the save under way, if it is over.
    pub fn poll(&mut self) -> Vec<Note> {
        let outcome = self.writer.poll();
        self.told(outcome)
    }

    /// Waits for the save under way: what there is to say of it. An error if the newest state was not saved.
    pub fn finish(mut self) -> (Vec<Note>, Result<(), SaveError>) {
        let outcome = self.writer.wait();
        let told = self.told(outcome);
        (told, self.failed.map_or(Ok(()), Err))
    }

    fn told(&mut self, outcome: Option<Result<Saved, SaveError>>) -> Vec<Note> {
        let mut told = Vec::new();
        match outcome {
            None => {}
            Some(Ok(saved)) => {
                self.failed = None;
                let text = format!("step {}  saved in {} ({:.2} s)", saved.step, saved.path.display(), saved.seconds);
                told.push(Note::Saved { step: saved.step, text });
                told.extend((!saved.made_room.is_empty()).then(|| {
                    let names: Vec<_> = saved.made_room.iter().map(|path| path.display().to_string()).collect();
                    let names = names.join(", ");
                    format!(
                        "warning: step {} had no room on the disk beside {names}: removed before it was written",
                        saved.step
                    )
                    .into()
                }));
                let old = |problem| format!("warning: an old checkpoint could not be removed: {problem}").into();
                told.extend(saved.not_removed.map(old));
            }
            Some(Err(error)) => {
                told.push(format!("warning: {error}").into());
                self.failed = Some(error);
            }
        }
        told
    }
}

/// The tokens at which texts of the model end, among what a run keeps.
pub(crate) const ENDS_OF_TEXT: &str = "ends_of_text";

/// What a run keeps beside its state, to compare with when it is resumed.
pub(crate) fn described(config: &Config, data: &Data) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "data_hash": data.hash(),
        ENDS_OF_TEXT: ends_of_text(config, data),
        "config": config,
    })
}

/// Resumes from the newest checkpoint in `dir`. Rank 0 compares what was saved with `run`.
pub(crate) fn resume_run(
    trainer: &mut Trainer,
    config: &Config,
    files: &Files,
    dir: &Path,
    run: &Value,
    stop: &AtomicBool,
) -> Result<Option<Resumed>, CheckpointError> {
    let compares = trainer.rank().world_rank() == 0;
    resume_into(trainer, &files.layout, dir, stop, |saved| match differences(saved, run, &config.checkpoint.permit) {
        differences if compares && !differences.is_empty() => {
            Err(CheckpointError::Different { dir: dir.to_path_buf(), differences })
        }
        _ => Ok(()),
    })
}

/// In what a saved run differs from this one, but for what is permitted.
fn differences(saved: &Value, run: &Value, permit: &str) -> Vec<String> {
    let permitted: Vec<&str> = words(permit).collect();
    let of = |key: &str| PERMITS.iter().find(|(_, prefixes)| prefixes.iter().any(|prefix| is_within(key, prefix)));
    json_differences(saved, run)
        .into_iter()
        .filter_map(|difference| {
            let (word, _) = of(&difference.key)?;
            let shown = |value: Option<Value>| value.map_or_else(|| "nothing".to_owned(), |value| value.to_string());
            let key = difference.key.strip_prefix("config.").unwrap_or(&difference.key);
            let (first, second) = (shown(difference.first), shown(difference.second));
            let text = format!("{key}: the checkpoint has {first}, this run {second} (checkpoint.permit = {word:?})");
            (!permitted.contains(word)).then_some(text)
        })
        .collect()
}

fn is_within(key: &str, prefix: &str) -> bool {
    key.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The words of `checkpoint.permit`.
pub(crate) fn words(permit: &str) -> impl Iterator<Item = &str> {
    permit.split(',').map(str::trim).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_told_with_the_word_that_permits_them() {
        let config = |text: &str| serde_json::to_value(Config::from_toml(text).unwrap()).unwrap();
        let run = |text, hash| json!({"version": "0", "data_hash": hash, "config": config(text)});
        let saved = run("", "a");
        assert!(differences(&saved, &run("[parallelism]\ndp = 2\n[training]\nsteps = 7", "a"), "").is_empty());
        let other = run("[model]\nnorm_eps = 0.1\n[optimizer]\nlr = 1.0\n[training]\nseed = 1", "b");
        let found = differences(&saved, &other, "seed, optimizer");
        assert_eq!(
            found,
            [
                "data_hash: the checkpoint has \"a\", this run \"b\" (checkpoint.permit = \"data\")",
                "model.norm_eps: the checkpoint has 0.00001, this run 0.1 (checkpoint.permit = \"model\")",
            ]
        );
        assert!(differences(&saved, &other, "seed,optimizer,data,model").is_empty());
        // Other boundaries change the loss of the same tokens; where the tokens come from does not.
        let moved = run("[data]\npath = 'elsewhere'\ncache_dir = 'there'\ndocuments = 'loss'", "a");
        let found = differences(&saved, &moved, "");
        let told = "data.documents: the checkpoint has \"stream\", this run \"loss\" (checkpoint.permit = \"data\")";
        assert_eq!(found, [told]);
    }
}
