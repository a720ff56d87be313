//! A whole run: every rank of the mesh trains, and rank 0 reports.
//!
//! More than 400 lines: a run from top to bottom, with the text of what goes wrong on the way.

use crate::best::Best;
use crate::checkpoint::export::{Planned, export};
use crate::checkpoint::run::{Continued, Files, Saver, described, go_back, resume_run};
use crate::checkpoint::{BEST, POSITION};
use crate::config::{Config, ValidationCompression};
use crate::data::Data;
use crate::devices::{Devices, RankDevice};
use crate::error::RankError;
use crate::generate::generate;
use crate::metrics::{Event, Experts, Metrics, OffloadTraffic, Rewards, Start, Step, StepLaunches};
use crate::peers::{Peers, Restored, Snapshots};
use crate::processes::{Handshake, Joined, RankLog, Stragglers};
use crate::profile::{Probe, Profile, Profiler, Track, layers, write_layers};
use crate::progress::{Note, Progress};
use crate::replay::{Replay, Replays};
use crate::start_weights::StartWeights;
use crate::stop::{self, agreed, is_asked, require_unasked};
use crate::tensorboard::TensorBoard;
use crate::{plan, plan_memory};
use meshwork_core::launcher::Placement;
use meshwork_core::profile::Class;
use meshwork_core::{Communicator, Group, Mesh, Rank, RunError, World};
use meshwork_engine::{AtCuts, Evaluation, ModelPlan, RankTime, StepReport, TrainError, Trainer};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Device, MemoryUse, ParamSpec};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How a run ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Steps that were trained.
    pub steps: u64,
    /// Loss of the last of them.
    pub loss: Option<f64>,
    /// Text that the trained model wrote after a few tokens of the data; empty if `metrics.sample_tokens` is 0.
    pub sample: String,
    /// The validation with the lowest loss, if there was one.
    pub best: Option<Best>,
    /// Whether the run was asked to stop before its last step.
    pub stopped: bool,
    /// The profile of some steps, if requested.
    pub profile: Option<Profile>,
    /// Whether this process had rank 0 when the run ended: it speaks for all.
    pub leads: bool,
}

/// Trains as the configuration says, in [its world](Config::world). `stop` ends the run after the step under way, and a
/// validation or a sample before its end; before the first step at once. Metrics go to a file if `metrics` is given.
/// Progress goes to standard output; closing it ends the run.
pub fn train(config: &Config, data: &Data, metrics: Option<&Path>, stop: &AtomicBool) -> Result<Outcome, RunError> {
    let peers = Peers::default();
    Joined::from_config(config, stop)?.run(config, &peers, |world, told, config| {
        let devices = world.prepare(|| Devices::open(config))?;
        train_by(world, (told, Some(&peers)), &devices, config, data, metrics, stop)
    })
}

/// [`train`] in any world of as many ranks as the mesh has, on devices that are open. In each process of a
/// [joined](World::Joined) world it is called with the same configuration and data; rank 0 writes the metrics, the
/// progress and the profile.
///
/// # Errors
/// As [`train`], and a world of another size than the mesh.
pub fn train_in(
    world: &World,
    devices: &Devices,
    config: &Config,
    data: &Data,
    metrics: Option<&Path>,
    stop: &AtomicBool,
) -> Result<Outcome, RunError> {
    train_by(world, (Vec::new(), None), devices, config, data, metrics, stop)
}

/// [`train_in`], where rank 0 tells first how the ranks were joined, and `peers` keep snapshots.
fn train_by(
    world: &World,
    (told, peers): (Vec<String>, Option<&Peers>),
    devices: &Devices,
    config: &Config,
    data: &Data,
    metrics: Option<&Path>,
    stop: &AtomicBool,
) -> Result<Outcome, RunError> {
    let stopped = || Outcome { stopped: true, leads: world.leads(), ..Outcome::default() };
    // Both measure while no rank is there to disturb them.
    if let (Some(path), true) = (&config.metrics.layer_profile, world.leads()) {
        let measured = world.prepare(|| {
            let layers = layers(&config.model(), &config.plan()?, data, devices.alone()?, stop)?;
            Ok::<_, RankError>(Some(write_layers(&layers, Path::new(path))?))
        });
        if stop::unless_stopped(measured, || None)?.is_none() {
            return Ok(stopped());
        }
    }
    let (steps, profiled) = (config.training.steps, config.metrics.profile_steps);
    let profiler = match (config.metrics.profile, world.leads()) {
        (false, _) => None,
        (true, true) => Some(world.prepare(|| {
            let device = devices.alone()?;
            Ok::<_, RankError>(Profiler::new(steps, profiled, &*device))
        })?),
        (true, false) => Some(Profiler::follow(steps, profiled)),
    };
    let files = world.prepare(|| Files::from_config(config).map_err(RankError::from))?;
    let replays = world.prepare(|| Replays::from_config(config))?;
    let handshake = matches!(world, World::Joined(_)).then(|| Handshake::new(config, data.hash()));
    let launch =
        Launch { config, data, metrics, stop, devices, files: files.as_ref(), replays, peers, handshake, told };
    let ended = world.run_with(config.comm.options(), |world| {
        let world = world.communicator().clone();
        launch.run(profiler.as_ref().map_or_else(Probe::off, |profiler| profiler.probe(&*world)), world)
    });
    let ends = stop::unless_stopped(ended, || vec![(stopped(), Vec::new())])?;
    // Every rank ends with the same outcome, and rank 0 has the tracks of all of them.
    let (outcome, tracks) = ends.into_iter().next().unwrap_or_default();
    let profile = profiler.filter(|_| world.leads()).map(|profiler| profiler.profile(tracks));
    Ok(Outcome { profile, leads: world.leads(), ..outcome })
}

/// What the ranks of this process have in common.
struct Launch<'a> {
    config: &'a Config,
    data: &'a Data,
    metrics: Option<&'a Path>,
    stop: &'a AtomicBool,
    devices: &'a Devices,
    files: Option<&'a Files>,
    replays: Option<Replays>,
    peers: Option<&'a Peers>,
    /// What processes compare, where there are several.
    handshake: Option<Handshake>,
    /// How they were joined, in words.
    told: Vec<String>,
}

impl Launch<'_> {
    /// Runs one rank: its outcome, and on rank 0 the tracks of all ranks, if there is a profile.
    fn run(&self, probe: Probe, world: Arc<dyn Communicator>) -> Result<(Outcome, Vec<Track>), RankError> {
        let &Self { config, data, metrics, stop, devices, files, .. } = self;
        require_unasked(stop)?;
        let mesh = config.mesh().map_err(TrainError::from)?;
        let group = Group::from(world.clone());
        let dir = config.comm.log_dir.as_deref().map(Path::new);
        let mut log = dir.map(|dir| RankLog::open(dir, &group)).transpose()?;
        let run = || {
            let notes = self.meet(&mesh, &group)?;
            let peers = self.peers.filter(|_| config.keeps_snapshots());
            let snapshots = peers.and_then(|peers| Snapshots::join(peers, world.clone()));
            let restored = peers.and_then(|peers| peers.restored(world.rank() % config.comm.ranks_per_process));
            let replay =
                self.replays.as_ref().map(|replays| Replay::join(replays, devices, world.clone())).transpose()?;
            let RankDevice { device, world } = devices.rank(world)?;
            let rank = Arc::new(Rank::new(&mesh, probe.communicator(world))?);
            if let Some(log) = &mut log {
                let at = mesh.axes().map(|axis| format!("{axis}={}", rank.coords().get(axis)));
                let (at, host, pid) =
                    (at.collect::<Vec<_>>().join(","), gethostname::gethostname(), std::process::id());
                log.line(format_args!("rank {} ({at}) in process {pid} of {}", rank.world_rank(), host.display()))?;
            }
            let told = Told {
                metrics,
                notes,
                log: &mut log,
                replay,
                snapshots,
                restored,
                stragglers: self.handshake.is_some().then(|| Stragglers::new(&mesh)),
            };
            let outcome = run(config, data, told, stop, (rank.clone(), probe.device(device)), files, &probe);
            let outcome = outcome.map_err(|error| error.with_savings(|| plan_memory::savings(config)))?;
            Ok((outcome, probe.tracks(&rank)?))
        };
        let ended = run();
        if let (Some(log), Err(error)) = (&mut log, &ended) {
            log.line(format_args!("failed: {error}"))?;
        }
        ended
    }

    /// The processes of the world compare what they are. Returns where the ranks are, on rank 0. Collective.
    fn meet(&self, mesh: &Mesh, world: &Group) -> Result<Vec<String>, RankError> {
        let Some(handshake) = &self.handshake else { return Ok(Vec::new()) };
        let warnings = handshake.compare(world)?;
        let comm = &self.config.comm;
        let by = comm.launch.as_ref().map_or("their caller".to_owned(), |launch| launch.launcher.to_string());
        let placement = Placement::gather(world, &handshake.host, comm.ranks_per_process)?;
        let of_ranks = placement.iter().flat_map(|at| [Some(at.describe(mesh, &by)), at.warning(mesh)]);
        let told = self.told.iter().filter(|_| world.rank() == 0).cloned();
        Ok(told.chain(of_ranks.flatten()).chain(warnings).collect())
    }
}

/// Where a rank tells of its run.
struct Told<'a> {
    metrics: Option<&'a Path>,
    /// What is told first, by rank 0.
    notes: Vec<String>,
    log: &'a mut Option<RankLog>,
    replay: Option<Replay<'a>>,
    snapshots: Option<Snapshots<'a>>,
    /// The state with which it goes on after a loss.
    restored: Option<Restored>,
    stragglers: Option<Stragglers>,
}

fn run(
    config: &Config,
    data: &Data,
    Told { metrics, notes, log, replay, snapshots, restored, mut stragglers }: Told<'_>,
    stop: &AtomicBool,
    (rank, device): (Arc<Rank>, Arc<dyn Device>),
    files: Option<&Files>,
    probe: &Probe,
) -> Result<Outcome, RankError> {
    let steps = config.training.steps;
    let started = Instant::now();
    // Dropped last, because dropping it waits for the reader of the progress, and the other ranks must not wait too.
    let mut reporter = None;
    let (plan, number) = (config.plan()?, rank.world_rank());
    device.meter().set_limit(config.memory.limit());
    require_unasked(stop)?;
    // What it has beside the weights is read before training, and missed before too.
    let planned = if number == 0 { Planned::new(config, data)? } else { None };
    let mut trainer = Trainer::new(config.model(), &plan, rank, device.clone())?;
    require_unasked(stop)?;
    let (mut saver, mut resumed) = (None, None);
    if let Some(restored) = restored {
        restored.load_into(&mut trainer)?;
        resumed = Some(Continued::from_snapshot(restored, data));
    }
    if let (Some(dir), Some(files)) = (&config.checkpoint.dir, files) {
        let dir = Path::new(dir);
        // What rank 0 says of the run is kept.
        let run = if number == 0 { described(config, data) } else { serde_json::Value::Null };
        saver = Some(Saver::new(config, files, dir, trainer.rank(), run)?);
        if config.checkpoint.resume && resumed.is_none() {
            resumed = resume_run(&mut trainer, config, data, files, dir, stop)?;
        }
        if let (Some(saver), Some(continued)) = (&mut saver, &resumed) {
            saver.goes_on_from(continued.resumed.step);
        }
    }
    let start = if resumed.is_none() { StartWeights::from_config(config)? } else { None };
    if let Some(start) = start {
        let read = |spec: &ParamSpec, slice: &LocalSlice| match is_asked(stop) {
            true => Err("the run was asked to stop".to_owned()),
            false => start.read(spec, slice).map_err(|error| error.to_string()),
        };
        let loaded = trainer.load_weights(read);
        require_unasked(stop)?;
        loaded?;
    }
    if number == 0 {
        reporter = Some(Reporter::new(config, data, metrics, resumed.as_ref(), notes)?);
    }
    require_unasked(stop)?;
    let data = resumed.as_ref().map_or(data, |continued| &continued.data);
    let (mut begun, global) = (trainer.steps_done(), config.training.global_batch_size as u64);
    if begun > steps {
        let text =
            format!("the checkpoint is behind step {begun}, and training.steps = {steps}: nothing is left to train");
        note(&mut reporter, [text]);
    }
    let mut taken = 0; // samples, since the run began or went on
    let mut best = resumed.as_ref().and_then(Continued::best);
    if let Some(snapshots) = &snapshots {
        let told = snapshots.take(&trainer, json!({ POSITION: data.position(taken), BEST: best }))?;
        note(&mut reporter, [told]);
    }
    let mut has_replayed = false;
    let out_of_patience = |best| Best::is_out_of_patience(best, config.training.patience);
    let mut outcome = Outcome { steps: begun, ..Outcome::default() };
    let (mut began, mut launches) = (Instant::now(), None);
    while begun < steps && !outcome.stopped && !out_of_patience(best) {
        let asked = || is_asked(stop);
        let is_due = |every: u64| every > 0 && (begun + 1).is_multiple_of(every);
        let (validates, checks) = (is_due(config.validation.every), is_due(config.training.check_replicas_every));
        let is_replayed = |step: u64| step.is_multiple_of(config.training.replay_every.max(1));
        let replay = replay.as_ref().filter(|_| is_replayed(begun + 1));
        let replayed = replay.map(|replay| replay.run(&trainer, |rows| data.batch_at(taken, rows))).transpose()?;
        if replayed.is_some() {
            began = Instant::now();
        }
        let queued = device.launches();
        let mut reports = probe.step(begun + 1, || {
            let read = || data.batch_at(taken, trainer.samples());
            let batch = probe.time(Class::Data, "batch", read)?;
            trainer.start_step(&batch, asked, |event| probe.observe(event))
        })?;
        begun += 1;
        taken += global;
        let step = device.launches().zip(queued).map(|(now, before)| now - before);
        launches = step.map(|step| StepLaunches::next(launches, step));
        let stopped = begun < steps && reports.iter().any(|report| report.stop);
        let mut saves = stopped || saver.as_ref().is_some_and(|saver| saver.is_due(begun, steps));
        let keeps = begun < steps && begun.is_multiple_of(config.checkpoint.peer_every.max(1));
        let snapshots = snapshots.as_ref();
        let keeps = snapshots.filter(|_| keeps);
        // A replay begins and ends with complete steps.
        let replays = config.training.replay_every > 0 && (is_replayed(begun) || is_replayed(begun + 1));
        if validates || checks || saves || keeps.is_some() || replays || stopped || begun == steps {
            reports.extend(trainer.flush(|event| probe.observe(event))?);
        }
        if checks {
            trainer.check_replicas()?;
        }
        if let (Some(replay), Some(replayed), Some(report)) = (replay, &replayed, reports.last()) {
            let told = replay.compare(&trainer, report, replayed)?;
            note(&mut reporter, (!std::mem::replace(&mut has_replayed, true)).then_some(told));
        }
        let times = if reports.is_empty() { Vec::new() } else { trainer.times() };
        if let (Some(log), Some(own)) = (log.as_mut(), times.get(number)) {
            for StepReport { step, loss, .. } in &reports {
                let RankTime { computed, waited } = own;
                log.line(format_args!("step {step}: loss {loss}, computed {computed:.4} s, waited {waited:.4} s"))?;
            }
        }
        if let (Some(reporter), false) = (&mut reporter, reports.is_empty()) {
            let seconds = std::mem::replace(&mut began, Instant::now()).elapsed().as_secs_f64() / reports.len() as f64;
            for report in &reports {
                reporter.step(config, report, seconds, &times)?;
            }
            reporter.notes(stragglers.as_mut().map_or(Vec::new(), |stragglers| stragglers.step(&times)));
            if reporter.progress.is_unread() {
                stop.store(true, Ordering::Relaxed);
            }
        }
        if let Some(last) = reports.last() {
            let loss = reports.iter().rev().find(|report| report.terms > 0).map(|report| report.loss);
            outcome = Outcome { steps: last.step, loss: loss.or(outcome.loss), stopped, ..outcome };
        }
        if let (Some(snapshots), Some(last)) = (snapshots, reports.last()) {
            snapshots.complete(last.step);
        }
        if validates && stopped {
            note(&mut reporter, [not_validated(begun)]);
        } else if validates {
            let compression = config.validation.compression;
            let cuts = if compression == ValidationCompression::Off { AtCuts::Exact } else { AtCuts::AsTrained };
            let both = compression == ValidationCompression::Both;
            let mut validate = |cuts| validate(config, data, &mut trainer, cuts, stop);
            let losses = match validate(cuts)? {
                Some(found) if both => validate(AtCuts::Exact)?.map(|exact| (found, Some(exact.loss))),
                found => found.map(|found| (found, None)),
            };
            match losses {
                Some((found, exact)) => {
                    reporter.iter_mut().try_for_each(|reporter| reporter.validation(begun, &found, exact))?;
                    let (now, is_best) = Best::after(best, begun, found.loss);
                    best = now;
                    saves |= is_best && config.keeps_best() || out_of_patience(best);
                }
                None => {
                    (outcome.stopped, saves) = (true, true);
                    note(&mut reporter, [not_validated(begun)]);
                }
            }
        }
        if let Some(snapshots) = keeps {
            snapshots.take(&trainer, json!({ POSITION: data.position(taken), BEST: best }))?;
        }
        if let Some(saver) = &mut saver {
            let told = if saves { saver.save(&trainer, &data.position(taken), best)? } else { saver.poll() };
            note(&mut reporter, told);
        }
    }
    trainer.require_finite()?; // the last update too
    let (told, saved) = saver.map_or((Vec::new(), Ok(())), Saver::finish);
    if let Some(reporter) = &mut reporter {
        reporter.notes(told);
        reporter.end(&outcome, started, launches)?;
    }
    let early = best.filter(|_| trainer.steps_done() < steps && out_of_patience(best));
    let ended = early.is_some() || trainer.steps_done() >= steps;
    note(&mut reporter, early.map(|best| stopped_early(trainer.steps_done(), best)));
    outcome.best = best;
    // Where the best weights could not be saved, those of the end are better than none.
    if let (Some(best), Some(dir), Some(files), true, Ok(())) =
        (best.filter(|_| config.keeps_best()), &config.checkpoint.dir, files, ended && !outcome.stopped, &saved)
        && best.step < trainer.steps_done()
    {
        go_back(&mut trainer, files, (Path::new(dir), best.step), stop)?;
        note(&mut reporter, [format!("step {}  is the best one: the run goes back to its weights", best.step)]);
    }
    if outcome.steps > 0 && !outcome.stopped {
        outcome.sample = generate(config, data, &mut trainer, stop)?;
    }
    // Also where the last state could not be saved: the model is then nowhere else.
    if let Some(out) = config.checkpoint.export.as_ref().filter(|_| ended) {
        let (step, later) = (trainer.steps_done(), config.checkpoint.dir.is_some());
        let told = if agreed(trainer.rank().world(), stop)? && later {
            format!("step {step}  not exported: the run was asked to stop. Resume it to export")
        } else {
            export(config, &plan, &trainer, planned)?;
            format!("step {step}  exported to {out}")
        };
        note(&mut reporter, [told]);
    }
    saved.map_err(|error| RankError::Unsaved(Box::new(error)))?;
    Ok(outcome)
}

/// Shows notes, on rank 0.
fn note(reporter: &mut Option<Reporter>, notes: impl IntoIterator<Item = impl Into<Note>>) {
    if let Some(reporter) = reporter {
        reporter.notes(notes);
    }
}

fn stopped_early(step: u64, Best { step: best, loss, since }: Best) -> String {
    format!(
        "step {step}  ends the run early: {since} validations in a row had no lower loss than {loss:.4} of step {best}"
    )
}

fn not_validated(step: u64) -> String {
    format!("step {step}  validation left out: the run was asked to stop")
}

/// The loss and metrics on what is held out; `None` if some rank is asked to stop before the last batch. A loss of some
/// of the batches is none.
fn validate(
    config: &Config,
    data: &Data,
    trainer: &mut Trainer,
    cuts: AtCuts,
    stop: &AtomicBool,
) -> Result<Option<Evaluation>, RankError> {
    let global = config.training.global_batch_size;
    let (rows, world) = (trainer.samples(), trainer.rank().world().clone());
    let batches = 0..data.validation_batches(config.validation.steps, global);
    let (mut stopped, mut unread) = (false, None);
    // Every rank asks for its next batch at the same place.
    let mut read = |index| -> Result<_, RankError> {
        stopped = agreed(&world, stop)?;
        Ok(if stopped { None } else { Some(data.validation_batch(index, global, rows.clone())?) })
    };
    let batches = batches.map_while(|index| {
        read(index).unwrap_or_else(|error| {
            unread = Some(error);
            None
        })
    });
    let report = trainer.evaluate_at(cuts, batches);
    // A rank that cannot read its data says so, and not that its peers went on without it.
    unread.map_or(Ok(()), Err)?;
    match report {
        _ if stopped => Ok(None),
        // The run need not end for it.
        Err(TrainError::NoTerms { .. }) => Ok(Some(Evaluation { loss: f64::NAN, metrics: Vec::new() })),
        report => Ok(Some(report?)),
    }
}

/// The output of rank 0: metrics and progress.
struct Reporter {
    metrics: Option<Metrics>,
    tensorboard: Option<TensorBoard>,
    progress: Progress,
    /// Of the last step.
    memory: Vec<MemoryUse>,
    /// Steps without a target.
    masked_steps: u64,
}

impl Reporter {
    fn new(
        config: &Config,
        data: &Data,
        metrics: Option<&Path>,
        from: Option<&Continued>,
        notes: Vec<String>,
    ) -> Result<Self, RankError> {
        let parameters = ModelPlan::new(config.model(), &config.plan()?)?.parameters()?;
        let parameters = parameters.iter().map(|spec| spec.global_elements() as u64).sum();
        let open = if from.is_some() { Metrics::append } else { Metrics::create };
        let mut metrics = metrics.map(open).transpose()?;
        if let Some(metrics) = &mut metrics {
            let start = Start::new(config, parameters, data.hash(), plan::memory(config)?)
                .resumed(from.map(|from| from.resumed.step));
            metrics.write(&Event::Start(start))?;
        }
        let folder = config.metrics.tensorboard.as_deref().map(Path::new);
        let tensorboard = folder.map(TensorBoard::create).transpose()?;
        let mut reporter = Self {
            metrics,
            tensorboard,
            progress: Progress::new(config.training.steps),
            memory: Vec::new(),
            masked_steps: 0,
        };
        reporter.notes(notes);
        reporter.notes(config.warning().map(str::to_owned));
        match (from, &config.checkpoint.dir) {
            (Some(Continued { resumed, notes, .. }), _) => {
                let damaged = resumed.passed_over.iter();
                let damaged = damaged.map(|damage| format!("warning: a damaged checkpoint is not used: {damage}"));
                let anew = resumed.anew.iter().map(|state| format!("warning: feedback starts from zeros: {state}"));
                let dropped = (resumed.dropped > 0).then_some(resumed.dropped).map(|count| {
                    format!("warning: the optimizer starts anew: its {count} states in the checkpoint are dropped")
                });
                let resumed = format!("resumed after step {}", resumed.step);
                reporter.notes(damaged.chain([resumed]).chain(notes.iter().cloned()).chain(anew).chain(dropped));
            }
            (None, Some(dir)) if config.checkpoint.resume => {
                reporter.notes([format!("no checkpoint in {dir}: the run starts anew")]);
            }
            _ => {}
        }
        Ok(reporter)
    }

    fn notes(&mut self, notes: impl IntoIterator<Item = impl Into<Note>>) {
        notes.into_iter().for_each(|note| self.progress.note(note.into()));
    }

    fn step(
        &mut self,
        config: &Config,
        report: &StepReport,
        seconds: f64,
        times: &[RankTime],
    ) -> Result<(), RankError> {
        let tokens = config.training.global_batch_size * config.model.seq_len;
        let step = Step {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            lr: report.lr,
            step_ms: seconds * 1e3,
            tokens_per_s: tokens as f64 / seconds,
            comm_bytes: report.comm_bytes.iter().map(|(name, bytes)| (name.clone(), bytes.round() as u64)).collect(),
            offload: report.offload.map(OffloadTraffic::from_report),
            peak_bytes: report.peak_bytes(),
            compute_ms: times.iter().map(|time| time.computed * 1e3).collect(),
            wait_ms: times.iter().map(|time| time.waited * 1e3).collect(),
            loss_scale: (report.loss_scale != 1.0).then_some(report.loss_scale),
            skipped: report.skipped,
            masked: report.terms == 0,
            moe: Experts::from_report(&report.metrics, &report.statistics).filter(|_| report.terms > 0),
            dpo: Rewards::from_report(&report.metrics).filter(|_| report.terms > 0),
        };
        self.masked_steps += u64::from(step.masked);
        self.memory.clone_from(&report.memory);
        self.progress.step(&step);
        if let Some(tensorboard) = &mut self.tensorboard {
            let scalars = step.scalars();
            tensorboard.scalars(step.step, scalars.iter().map(|(tag, value)| (&**tag, *value)))?;
        }
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&Event::Step(step))?;
        }
        Ok(())
    }

    fn validation(&mut self, step: u64, found: &Evaluation, loss_uncompressed: Option<f64>) -> Result<(), RankError> {
        let (loss, dpo) = (found.loss, Rewards::from_report(&found.metrics));
        self.progress.validation(step, loss, loss_uncompressed);
        self.notes(loss.is_nan().then_some("warning: every target of the validation data is masked".to_owned()));
        if let Some(tensorboard) = &mut self.tensorboard {
            let exact = loss_uncompressed.map(|loss| ("validation/loss_uncompressed", loss));
            let rewards = dpo.into_iter().flat_map(Rewards::scalars);
            let rewards: Vec<_> = rewards.map(|(name, value)| (format!("validation/rewards_{name}"), value)).collect();
            let rewards = rewards.iter().map(|(tag, value)| (&**tag, *value));
            tensorboard.scalars(step, [("validation/loss", loss)].into_iter().chain(exact).chain(rewards))?;
        }
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&Event::Validation { step, loss, loss_uncompressed, dpo })?;
        }
        Ok(())
    }

    /// The end of training.
    fn end(&mut self, outcome: &Outcome, started: Instant, launches: Option<StepLaunches>) -> Result<(), RankError> {
        self.notes(launches.map(|launches| launches.to_string()));
        let masked_steps = self.masked_steps;
        self.notes((masked_steps > 0).then(|| {
            format!("warning: steps without a target, which were skipped: {masked_steps}; every target of their batches is masked")
        }));
        if let Some(metrics) = &mut self.metrics {
            let seconds = started.elapsed().as_secs_f64();
            let memory_measured = std::mem::take(&mut self.memory);
            let (steps, loss) = (outcome.steps, outcome.loss);
            metrics.write(&Event::End { steps, loss, masked_steps, seconds, memory_measured, launches })?;
        }
        Ok(())
    }
}
