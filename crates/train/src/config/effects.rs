//! Compares the configuration of a run with the saved one: lists the keys that change the numbers, by the
//! [effect](Effect) of each key.

use super::Config;
use super::device::Device;
use super::keys::{self, Effect, Key};
use super::resolve::derive;
use super::settings::Settings;
use meshwork_pipeline::by_name;
use serde_json::Value;
use std::fmt;

/// A key whose value differs from the saved run and changes the numbers of a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Change {
    /// `section.name`.
    pub key: String,
    /// The value in the checkpoint.
    pub saved: Value,
    /// The value in this run.
    pub now: Value,
    /// Why it changes the numbers here, if the key usually does not.
    pub why: Option<&'static str>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: the checkpoint has {}, this run {}", self.key, self.saved, self.now)?;
        self.why.map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

/// The keys that changed since the checkpoint, in the order of the table. Keys of data are left out: a hash compares
/// the data.
pub(crate) fn changes(saved: &Value, now: &Config) -> Vec<Change> {
    let before = of_checkpoint(saved);
    let [read, given] = [&before, now].map(|config| serde_json::to_value(config).unwrap_or_default());
    let change = |(section, key): (&'static str, &'static Key)| {
        // A key that is newer than the checkpoint: its default, given or derived.
        let was = stored(saved, section, key.name).unwrap_or(&read[section][key.name]);
        let is = &given[section][key.name];
        if was == is || !key.is_read(&before) && !key.is_read(now) {
            return None;
        }
        let key_name = format!("{section}.{}", key.name);
        let why = match key.effect {
            Effect::Model | Effect::Numbers => None,
            Effect::Data => return None,
            Effect::Rounding | Effect::Speed | Effect::Output => Some(raised(&key_name, key, &before, now)?),
        };
        Some(Change { key: key_name, saved: was.clone(), now: is.clone(), why })
    };
    keys::all().filter_map(change).collect()
}

/// The value of a key in a checkpoint, now or formerly of this name.
fn stored<'a>(saved: &'a Value, section: &str, name: &str) -> Option<&'a Value> {
    let keys = saved.get(section)?;
    keys.get(name).or_else(|| keys.get(keys::former(section, name)?))
}

/// The configuration that a checkpoint holds. Keys that it lacks, or has in a form that this version does not know,
/// count as not given.
pub(crate) fn of_checkpoint(saved: &Value) -> Config {
    let mut settings = Settings::default();
    for (section, keys) in saved.as_object().into_iter().flatten() {
        for (name, value) in keys.as_object().into_iter().flatten() {
            let value = toml::Value::try_from(value).ok().filter(|_| keys::find(section, name).is_some());
            value.into_iter().for_each(|value| settings.insert(section, name, value, ""));
        }
    }
    derive(&mut settings);
    Config::read(&settings, Device::Cpu)
}

/// Keys that change the numbers of some runs and not of others.
struct Raised {
    /// Whether these are the keys that change the order of sums, by which a run is cut over ranks, stages and
    /// micro-batches.
    cuts: bool,
    /// Further keys.
    keys: &'static [&'static str],
    /// Whether they do, from one configuration to another.
    when: fn(&Config, &Config) -> bool,
    why: &'static str,
}

const RAISED: [Raised; 6] = [
    Raised {
        cuts: true,
        keys: &[],
        when: |a, b| a.is_asynchronous() || b.is_asynchronous(),
        why: "an asynchronous schedule trains each stage and micro-batch with weights of another age",
    },
    Raised {
        cuts: false,
        keys: &["checkpoint.every", "validation.every", "training.check_replicas_every"],
        when: |a, b| a.is_asynchronous() || b.is_asynchronous(),
        why: "saving, validating and comparing replicas drain the pipeline of an asynchronous schedule",
    },
    Raised {
        cuts: true,
        keys: &["pipeline.scatter_gather"],
        when: |a, b| compresses_between_ranks(a) || compresses_between_ranks(b),
        why: "what ranks send each other is compressed",
    },
    Raised {
        cuts: true,
        keys: &[],
        when: |a, b| balances_by_cut(a) || balances_by_cut(b),
        why: "moe.aux_loss_scope is global_batch",
    },
    Raised {
        cuts: false,
        keys: &["memory.loss_chunk"],
        when: |_, b| b.reduction_blocks().is_some(),
        why: "canonical sums are over whole chunks",
    },
    Raised {
        cuts: false,
        keys: &["validation.every"],
        when: |a, b| a.validation.held_out() != b.validation.held_out(),
        why: "other data are held out",
    },
];

/// Why a key that usually leaves the numbers alone changes them here, if it does.
fn raised(name: &str, key: &Key, before: &Config, now: &Config) -> Option<&'static str> {
    let applies = |rule: &&Raised| rule.cuts && key.effect == Effect::Rounding || rule.keys.contains(&name);
    RAISED.iter().filter(applies).find(|rule| (rule.when)(before, now)).map(|rule| rule.why)
}

/// Whether the numbers follow from messages between ranks. Those at virtual cuts, which every mesh has, do not count.
fn compresses_between_ranks(config: &Config) -> bool {
    let (of, mesh) = (&config.compress, &config.parallelism);
    let given = |schemes: [&String; 2]| schemes.iter().any(|scheme| *scheme != "none");
    given([&of.activations, &of.activation_gradients]) && mesh.pp > 1 && of.virtual_cuts.is_empty()
        || given([&of.gradients, &of.weights]) && mesh.dp > 1
        || given([&of.dispatch, &of.dispatch_gradients]) && mesh.ep > 1
}

fn balances_by_cut(config: &Config) -> bool {
    let moe = &config.moe;
    moe.num_experts > 0 && moe.aux_loss_coeff > 0.0 && moe.aux_loss_scope.name() == "global_batch"
}

impl Config {
    /// Why the numbers of a run on another dp are others, beyond the order of sums.
    pub(crate) fn differs_by_dp(&self, other: &Self) -> Option<&'static str> {
        let (_, key) = keys::find("parallelism", "dp")?;
        raised("parallelism.dp", key, self, other)
    }

    /// Whether weights change while the schedule runs.
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.names_asynchronous() && self.pipeline.schedule_file.is_none()
    }

    /// Whether `pipeline.schedule` is one in which they do, also where a file is used instead.
    pub(super) fn names_asynchronous(&self) -> bool {
        by_name(&self.pipeline.schedule).is_ok_and(|schedule| !schedule.is_synchronous())
    }
}

impl Key {
    /// Whether a configuration reads it.
    pub fn is_read(&self, config: &Config) -> bool {
        self.conditions.iter().all(|condition| (condition.holds)(config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(text: &str) -> Config {
        Config::from_toml(text).unwrap()
    }

    /// The keys that differ between two runs so that they must be permitted.
    fn changed(before: &str, now: &str) -> Vec<String> {
        changes(&serde_json::to_value(config(before)).unwrap(), &config(now)).into_iter().map(|of| of.key).collect()
    }

    #[test]
    fn what_changes_numbers_is_listed_with_both_values() {
        let saved = serde_json::to_value(config("")).unwrap();
        let now = config("[training]\nmax_norm = 0.5\nsteps = 7\n[parallelism]\ndp = 2\n[memory]\nrecompute = 'full'");
        let told: Vec<String> = changes(&saved, &now).iter().map(ToString::to_string).collect();
        assert_eq!(told, ["training.max_norm: the checkpoint has 1.0, this run 0.5"]);
    }

    #[test]
    fn a_key_that_neither_run_reads_may_differ() {
        assert_eq!(changed("", "[lr_scheduler]\nmin_lr_factor = 0.5\n[optimizer]\nmomentum = 0.5"), [""; 0]);
        let decay = "[lr_scheduler]\ndecay = 'linear'\n";
        assert_eq!(changed(decay, &format!("{decay}min_lr_factor = 0.5")), ["lr_scheduler.min_lr_factor"]);
        // The decay would end elsewhere.
        let longer = format!("{decay}[training]\nsteps = 200");
        assert_eq!(changed(decay, &longer), ["lr_scheduler.decay_steps"]);
        assert_eq!(changed(decay, &longer.replace("[training]", "decay_steps = 100\n[training]")), [""; 0]);
    }

    /// The order of sums is free, but not where the numbers follow from how a run is cut.
    #[test]
    fn the_mesh_is_free_unless_the_numbers_follow_from_it() {
        let on = |mesh: &str, more: &str| format!("[parallelism]\n{mesh}\n{more}");
        assert_eq!(changed(&on("pp = 2", ""), &on("dp = 2", "")), [""; 0]);
        let cuts = "[compress]\nactivations = 'bf16'";
        assert_eq!(
            changed(&on("pp = 2", cuts), &on("dp = 2", cuts)),
            [
                "parallelism.dp",
                "parallelism.pp",
                "pipeline.num_microbatches",
                "pipeline.partition",
                "training.micro_batch_size"
            ]
        );
        let everywhere = format!("{cuts}\nvirtual_cuts = [2]");
        assert_eq!(changed(&on("pp = 2", &everywhere), &on("dp = 2", &everywhere)), [""; 0]);
        let chunks =
            |numerics: &str, chunk: u8| format!("[training]\nnumerics = '{numerics}'\n[memory]\nloss_chunk = {chunk}");
        assert_eq!(changed(&chunks("canonical", 0), &chunks("canonical", 4)), ["memory.loss_chunk"]);
        assert_eq!(changed(&chunks("fast", 0), &chunks("fast", 4)), [""; 0]);
        let stale = "[pipeline]\nschedule = 'pipedream'\n[model]\ntie_embeddings = false\n[training]\nmax_norm = 0.0";
        let saving = format!("{stale}\n[checkpoint]\ndir = 'runs'\nevery = 3");
        assert_eq!(changed(&on("pp = 2", stale), &on("pp = 2", &saving)), ["checkpoint.every"]);
    }

    #[test]
    fn validation_is_free_where_it_holds_nothing_else_out() {
        let every = |steps: u64, fraction: f64| format!("[validation]\nevery = {steps}\nfraction = {fraction:?}");
        assert_eq!(changed(&every(5, 0.1), &every(7, 0.1)), [""; 0]);
        assert_eq!(changed(&every(0, 0.1), &every(7, 0.1)), ["validation.every"]);
        assert_eq!(changed(&every(5, 0.1), &every(5, 0.2)), ["validation.fraction"]);
        assert_eq!(changed(&every(0, 0.0), &every(7, 0.0)), [""; 0]);
    }

    /// A checkpoint of a version that lacked a key ran with its default; a checkpoint with other keys is read without
    /// them.
    #[test]
    fn checkpoints_of_other_versions_are_compared_as_far_as_they_go() {
        let mut saved = serde_json::to_value(config("[training]\nnumerics = 'canonical'")).unwrap();
        let keys = saved["training"].as_object_mut().unwrap();
        keys.remove("reduce_dtype");
        keys.remove("matmul_dtype");
        keys.insert("of_another_time".into(), json!(3));
        saved["moe"].take();
        let blocks = saved["numerics"].as_object_mut().unwrap().remove("reduction_blocks").unwrap();
        saved["numerics"]["leaves"] = blocks;
        let canonical = "[training]\nnumerics = 'canonical'\n";
        let changed = |now: &str| changes(&saved, &config(now)).into_iter().map(|of| of.key).collect::<Vec<_>>();
        assert_eq!(changed(canonical), [""; 0]);
        assert_eq!(changed(&format!("{canonical}matmul_dtype = 'bf16'")), ["training.matmul_dtype"]);
        let experts = changed(&format!("{canonical}[moe]\nnum_experts = 4"));
        assert!(experts.contains(&"moe.num_experts".to_owned()), "{experts:?}");
        assert_eq!(changed(&format!("{canonical}[numerics]\nreduction_blocks = 4")), ["numerics.reduction_blocks"]);
    }
}
