//! Checkpoints of a configured run: section `[checkpoint]`.

use super::export::ends_of_text;
use super::{
    BEST, CheckpointError, Leeway, POSITION, Resumed, States, exchange, resume_from, resume_into, save, save_plan_of,
};
use crate::best::Best;
use crate::config::{Change, Config, changes, of_checkpoint, permits};
use crate::data::{Data, Position};
use crate::peers::Restored;
use crate::progress::Note;
use meshwork_checkpoint::{Lock, SaveError, SavePlan, Saved, Writer};
use meshwork_core::Rank;
use meshwork_engine::{StateSlice, Trainer, state_layout};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The slices of the state of a run that every rank holds, and their writers. Made once for the ranks of a process,
/// because it grows with their number.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    layout: Arc<[StateSlice]>,
    plan: Arc<SavePlan>,
}

impl Files {
    /// The files of a run that saves; `None` for another.
    pub fn from_config(config: &Config) -> Result<Option<Self>, CheckpointError> {
        if config.checkpoint.dir.is_none() {
            return Ok(None);
        }
        let plan = config.plan()?;
        let layout: Arc<[StateSlice]> = state_layout(&config.model(), &plan)?.into();
        let plan = Arc::new(save_plan_of(&layout, plan.mesh.world_size())?);
        Ok(Some(Self { layout, plan }))
    }
}

/// Saves a run, and reports each save.
pub(crate) struct Saver {
    writer: Writer,
    every: u64,
    keeps_best: bool,
    run: Value,
    /// Whether the newest state that was to be saved was not.
    failed: Option<SaveError>,
}

impl Saver {
    /// The saver of this rank. Rank 0 takes the lock of the folder. Collective.
    pub fn new(config: &Config, files: &Files, dir: &Path, rank: &Rank, run: Value) -> Result<Self, CheckpointError> {
        let (files, exchange) = (files.plan.clone(), exchange(rank)?);
        let keep = usize::try_from(config.checkpoint.keep).unwrap_or(usize::MAX);
        let writer = match rank.world_rank() {
            0 => Writer::lead(Lock::take(dir)?, keep, files, exchange),
            number => Writer::follow(dir, number, files, exchange),
        };
        let (every, keeps_best) = (config.checkpoint.every, config.keeps_best());
        Ok(Self { writer, every, keeps_best, run, failed: None })
    }

    /// Says from which checkpoint the run goes on.
    pub fn goes_on_from(&mut self, step: u64) {
        self.writer.goes_on_from(step);
    }

    /// Whether there is a checkpoint after `step` steps of `steps`.
    pub fn is_due(&self, step: u64, steps: u64) -> bool {
        step == steps || self.every > 0 && step.is_multiple_of(self.every)
    }

    /// Starts to save a trainer whose steps are complete, where it is in its data, and its best validation, whose
    /// checkpoint stays if the run keeps it. Returns the notes about the save before. Weights that are not finite are
    /// refused, on all ranks.
    pub fn save(
        &mut self,
        trainer: &Trainer,
        position: &Position,
        best: Option<Best>,
    ) -> Result<Vec<Note>, CheckpointError> {
        trainer.require_finite()?;
        self.writer.keeps(best.filter(|_| self.keeps_best).map(|best| best.step));
        let mut run = self.run.clone();
        run[POSITION] = json!(position);
        run[BEST] = json!(best);
        let before = save(&mut self.writer, trainer, run)?;
        Ok(self.told(before))
    }

    /// The notes about the save under way, if it is over.
    pub fn poll(&mut self) -> Vec<Note> {
        let outcome = self.writer.poll();
        self.told(outcome)
    }

    /// Waits for the save under way and returns the notes about it. An error if the newest state was not saved.
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

/// Where a run says the hash of its tokenizer.
pub(crate) const TOKENIZER_HASH: &str = "tokenizer_hash";

/// The key of the tokens at which texts of the model end.
pub(crate) const ENDS_OF_TEXT: &str = "ends_of_text";

/// The description of a run beside its state, to compare with when it is resumed.
pub(crate) fn described(config: &Config, data: &Data) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "data_hash": data.hash(),
        TOKENIZER_HASH: data.tokenizer().hash(),
        ENDS_OF_TEXT: ends_of_text(config, data),
        "config": config,
    })
}

/// A run that goes on.
pub(crate) struct Continued {
    pub resumed: Resumed,
    /// The data, from where the run was.
    pub data: Data,
    /// Notes beside [`Resumed`]: permitted differences.
    pub notes: Vec<String>,
}

impl Continued {
    /// The best validation before.
    pub fn best(&self) -> Option<Best> {
        serde_json::from_value(self.resumed.run.get(BEST)?.clone()).ok().flatten()
    }

    /// After a loss: of the run itself, in the same data.
    pub fn from_snapshot(Restored { step, run, .. }: Restored, data: &Data) -> Self {
        let position = serde_json::from_value(run[POSITION].clone()).ok();
        let (data, notes) = gone_on(position, data);
        let (bytes_read, passed_over, anew, dropped) = (0, Vec::new(), Vec::new(), 0);
        Self { resumed: Resumed { step, run, bytes_read, passed_over, anew, dropped }, data, notes }
    }
}

/// The data from where a run was in them, and what is to be told of that.
fn gone_on(position: Option<Position>, data: &Data) -> (Data, Vec<String>) {
    let gone_on = position.map(|position| data.clone().going_on(&position, true));
    let unknown = || vec!["the checkpoint does not say where it was in these data: they begin anew".to_owned()];
    let (data, told) = gone_on.and_then(Result::ok).unwrap_or_else(|| (data.clone(), unknown()));
    (data, told.into_iter().map(|told| format!("warning: {told}")).collect())
}

/// Resumes from the newest checkpoint in `dir`. Rank 0 compares what was saved with this run, of `config` on `data`.
pub(crate) fn resume_run(
    trainer: &mut Trainer,
    config: &Config,
    data: &Data,
    files: &Files,
    dir: &Path,
    stop: &AtomicBool,
) -> Result<Option<Continued>, CheckpointError> {
    let compares = trainer.rank().world_rank() == 0;
    let resumed = resume_into(trainer, &files.layout, dir, stop, |step, saved| {
        let compared = Compared::new(saved, step, config, data);
        match compared.refused(&config.checkpoint.permit) {
            Some((differences, permit)) if compares => {
                Err(CheckpointError::Different { dir: dir.to_path_buf(), differences, permit })
            }
            _ => Ok(compared.leeway(&config.checkpoint.permit)),
        }
    })?;
    let Some(resumed) = resumed else { return Ok(None) };
    let compared = Compared::new(&resumed.run, resumed.step, config, data);
    let mut notes: Vec<String> = compared.differences().map(|(told, _)| format!("permitted: {told}")).collect();
    if compared.other_data {
        // The samples have other numbers.
        trainer.forget_samples();
    }
    let (data, told) = gone_on(compared.position, data);
    notes.extend(told);
    Ok(Some(Continued { resumed, data, notes }))
}

/// Loads the checkpoint of a step of this run. Collective.
pub(crate) fn go_back(
    trainer: &mut Trainer,
    files: &Files,
    (dir, step): (&Path, u64),
    stop: &AtomicBool,
) -> Result<(), CheckpointError> {
    let accept = |_, _: &Value| Ok::<_, CheckpointError>(Leeway::default());
    resume_from(trainer, &files.layout, (dir, &[step]), stop, accept).map(|_| ())
}

/// A saved run, and the run that is to go on from it.
struct Compared<'a> {
    hash: Option<&'a Value>,
    data: &'a Data,
    changes: Vec<Change>,
    /// Whether the data are others.
    other_data: bool,
    /// Where the saved run was in its data, if it says that.
    position: Option<Position>,
    /// Why streams cannot go on where the saved run was in them.
    stuck: Vec<String>,
}

impl<'a> Compared<'a> {
    fn new(saved: &'a Value, step: u64, config: &Config, data: &'a Data) -> Self {
        // A program that keeps no configuration has nothing to compare.
        let changes = saved.get(CONFIG).map(|saved| changes(saved, config)).unwrap_or_default();
        let hash = saved.get(HASH);
        let other_data = hash.is_some_and(|hash| *hash != data.hash());
        let position = position(saved, step, data, other_data);
        let stuck = position.as_ref().and_then(|position| data.clone().going_on(position, false).err());
        Self { hash, data, changes, other_data, position, stuck: stuck.unwrap_or_default() }
    }

    /// The differences, each with the word that permits it.
    fn differences(&self) -> impl Iterator<Item = (String, String)> {
        let hash = |hash: &Value| {
            let told = format!("data: the checkpoint has those of hash {hash}, this run {:?}", self.data.hash());
            (told, "data".to_owned())
        };
        let data = self.hash.filter(|_| self.other_data).map(hash);
        data.into_iter().chain(self.changes.iter().map(|change| (change.to_string(), change.key.clone())))
    }

    /// The differences that are not permitted, and the words that would permit them all.
    fn refused(&self, permit: &str) -> Option<(Vec<String>, Vec<String>)> {
        let stuck = self.stuck.iter().map(|why| {
            let told = format!("{why}; data.shuffle = false in both goes on, and so does the next epoch, with checkpoint.permit = \"data\"");
            (told, "data".to_owned())
        });
        let refused = self.differences().chain(stuck).filter(|(_, word)| !permits(permit, word));
        let (differences, mut words): (Vec<String>, Vec<String>) = refused.unzip();
        // Words that are given already stay.
        words.splice(0..0, permit.split(',').map(|word| word.trim().to_owned()).filter(|word| !word.is_empty()));
        let mut seen = BTreeSet::new();
        words.retain(|word| seen.insert(word.clone()));
        (!differences.is_empty()).then_some((differences, words))
    }

    /// The parts of the checkpoint that may be left behind.
    fn leeway(&self, permit: &str) -> Leeway {
        let changed = |key: &str| self.changes.iter().find(|change| change.key == key);
        let states = match permits(permit, RULE) {
            true if changed(RULE).is_some() => States::Drop,
            true => States::KeepIfFit,
            false => States::Keep,
        };
        let length = changed(LENGTH).filter(|_| permits(permit, LENGTH));
        let rows = length.and_then(|change| change.saved.as_u64().zip(change.now.as_u64()));
        Leeway { states, first_rows: rows.filter(|(saved, now)| now < saved) }
    }
}

/// Where a saved run was in its data after `step` steps: as it says, or by its batch. `None` if it does not say which
/// data it had.
fn position(saved: &Value, step: u64, data: &Data, other_data: bool) -> Option<Position> {
    if let Some(position) = saved.get(POSITION) {
        return serde_json::from_value(position.clone()).ok().filter(Position::is_sound);
    }
    let config = of_checkpoint(saved.get(CONFIG).filter(|_| !other_data)?);
    let (training, seed) = (&config.training, config.data.shuffle.then_some(config.training.seed));
    let samples = step.saturating_mul(training.global_batch_size as u64);
    Some(data.position_of(samples, config.model.seq_len, config.validation.held_out(), seed))
}

const CONFIG: &str = "config";
const HASH: &str = "data_hash";
const RULE: &str = "optimizer.name";
const LENGTH: &str = "model.seq_len";

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::from_toml(text).unwrap()
    }

    fn data(first: i32, seq_len: usize) -> Data {
        Data::from_tokens((first..first + 201).collect(), seq_len)
    }

    #[test]
    fn what_is_refused_comes_with_the_words_that_permit_it() {
        let saved = described(&config("[model]\nseq_len = 4"), &data(0, 4));
        let now = config("[model]\nseq_len = 4\n[optimizer]\nlr = 1.0\n[training]\nmax_norm = 2.0");
        let data = data(9, 4);
        let compared = Compared::new(&saved, 4, &now, &data);
        let (told, words) = compared.refused("model, optimizer.lr").unwrap();
        let hash = format!("data: the checkpoint has those of hash {}, this run {:?}", saved["data_hash"], data.hash());
        assert_eq!(told, [&*hash, "training.max_norm: the checkpoint has 1.0, this run 2.0"]);
        assert_eq!(words, ["model", "optimizer.lr", "data", "training.max_norm"]);
        assert_eq!(compared.refused(&words.join(",")), None);
    }

    #[test]
    fn states_are_dropped_by_permission_alone_and_rows_where_samples_become_shorter() {
        let saved = described(&config(""), &data(0, 64));
        let leeway = |now: &str, permit: &str| {
            let (config, data) = (config(now), data(0, 64));
            Compared::new(&saved, 4, &config, &data).leeway(permit)
        };
        let sgd = "[optimizer]\nname = 'sgd'";
        assert_eq!(leeway(sgd, "").states, States::Keep);
        assert_eq!(leeway(sgd, "optimizer.name").states, States::Drop);
        assert_eq!(leeway("[optimizer]\nlr = 0.1", "optimizer").states, States::KeepIfFit);
        assert_eq!(leeway("[optimizer]\nlr = 0.1", "optimizer.lr").states, States::Keep);
        assert_eq!(leeway("[model]\nseq_len = 64", "model").first_rows, Some((128, 64)));
        assert_eq!(leeway("[model]\nseq_len = 256", "model").first_rows, None);
        assert_eq!(leeway("[model]\nseq_len = 64", "").first_rows, None);
    }

    /// Checkpoints of before positions were kept: 4 steps of 8 samples, then batches of 16.
    #[test]
    fn a_checkpoint_without_a_position_is_where_its_batch_says() {
        let text = "[model]\nseq_len = 4\n[data]\nshuffle = false\n[training]\nglobal_batch_size = ";
        let (saved, data) = (described(&config(&format!("{text}8")), &data(0, 4)), data(0, 4));
        let now = config(&format!("{text}16"));
        let position = Compared::new(&saved, 4, &now, &data).position.unwrap();
        assert_eq!(position.samples, 32);
        let (data, _) = data.going_on(&position, false).unwrap();
        let batch = data.batch_at(0, 0..16).unwrap();
        assert_eq!(batch.values::<i32>("tokens").unwrap()[0], 32 * 4);
    }
}
