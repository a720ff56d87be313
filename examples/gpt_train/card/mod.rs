//! The time of a step on a card that is not here: `--steps 0 --device cuda:h100`.
//!
//! ```text
//! dry run of a rank on the meta device ─ calls, bytes, operations ─▶ walk: two queues ─ times of actions ─▶ simulated schedule ─▶ a step
//! ```
//! Every operation takes the longer of its arithmetic and its bytes, at a card's rates, and a launch; collectives their
//! bytes over its links. What a program overlaps by posting early is overlapped here too. Both bounds are told: with
//! all [peaks](Shares::PEAKS), and with the shares of them that good programs [reach](Shares::REACHED). Neither is a
//! measurement; `docs/gpu_performance.md` holds them against published ones.

mod shares;
mod walk;

use meshwork::core::Axis;
use meshwork::core::profile::{Class, Detail, Recorder, Span};
use meshwork::engine::{Plan, Recompute, TrainError, dry_run};
use meshwork::pipeline::{ActionKind, Costs, Phase, simulate};
use meshwork::train::config::{Card, Config, Device, card};
use meshwork::train::numbers::{count, grouped, size, spans};
use meshwork::train::plan::predict_all;
use shares::Shares;
use std::collections::BTreeMap;
use std::time::Instant;
use walk::{Of, Rates, Walk};

/// The name of the span that begins an action; the span that ends it is named after its kind.
const BEGUN: &str = "begun";
const KINDS: [(ActionKind, &str); 5] = [
    (ActionKind::Forward, "forward"),
    (ActionKind::Backward, "backward"),
    (ActionKind::InputGradient, "input gradient"),
    (ActionKind::WeightGradient, "weight gradient"),
    (ActionKind::Update, "update"),
];

fn kind(name: &str) -> Option<ActionKind> {
    KINDS.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
}

/// A step on a card, as predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// Seconds of the step.
    pub seconds: f64,
    /// Of one card, the first of the stage that takes the longest: its operations by class.
    pub classes: BTreeMap<Class, Of>,
    /// Seconds of that card's collectives, and those of them in which it waits.
    pub links: [f64; 2],
    /// Seconds in which that card waits for other stages, or for what is offloaded.
    pub idle: f64,
    /// Seconds that the busiest card's link to its host needs for what is offloaded.
    pub host: f64,
}

/// The calls of a step, of a rank of each stage; a card's rates make times of them.
struct Recorded {
    plan: Plan,
    /// Features of a head of attention.
    head: usize,
    graphs: bool,
    /// The first rank of each pipeline rank, and its calls.
    ranks: Vec<(usize, Vec<Span>)>,
    /// Bytes that each of them reads from what is offloaded in a step, or writes there, if those are more.
    offloaded: Vec<u64>,
}

impl Recorded {
    fn of(config: &Config) -> Result<Self, TrainError> {
        let plan = config.plan()?;
        let mesh = &plan.mesh;
        let first = |rank: &usize| mesh.data_rank(mesh.coords(*rank)) == 0 && mesh.coords(*rank).get(Axis::Tp) == 0;
        let mut ranks = Vec::new();
        for rank in (0..mesh.world_size()).filter(first) {
            ranks.push((rank, calls(config, &plan, rank)?));
        }
        ranks.sort_by_key(|&(rank, _)| mesh.coords(rank).get(Axis::Pp));
        let moved = |&(rank, _): &(usize, Vec<Span>)| match plan.offload {
            None => Ok(0),
            Some(_) => dry_run::predict(&config.model(), &plan, rank)
                .map(|step| step.offloaded.read.max(step.offloaded.written)),
        };
        let offloaded = ranks.iter().map(moved).collect::<Result<_, _>>()?;
        let head = config.decoder().head_features();
        Ok(Self { plan, head, graphs: config.cuda.graphs, ranks, offloaded })
    }

    fn on(&self, card: &Card, shares: Shares) -> Result<StepTime, TrainError> {
        let (precision, half) = (self.plan.precision, self.plan.mixed.map(|mixed| mixed.dtype.dtype()));
        let rates = Rates { card, shares, precision, head: self.head, half, graphs: self.graphs };
        let walks: Vec<Walk> = self.ranks.iter().map(|(_, spans)| rates.walk(spans)).collect();
        let mut ends = match walks.len() {
            1 => vec![walks[0].seconds],
            _ => self.ends(&rates, &walks)?,
        };
        // What is offloaded comes and goes beside everything else, at best.
        let links = self.offloaded.iter().map(|&bytes| bytes as f64 / (card.host * shares.links));
        ends.iter_mut().zip(links.clone()).for_each(|(end, link)| *end = end.max(link));
        let at = (0..ends.len()).max_by(|&a, &b| ends[a].total_cmp(&ends[b])).unwrap_or(0);
        let walk = &walks[at];
        let idle = (ends[at] - walk.seconds).max(0.0);
        let host = links.fold(0.0, f64::max);
        Ok(StepTime { seconds: ends[at], classes: walk.classes.clone(), links: walk.links, idle, host })
    }

    /// When each stage's rank ends its step: its last action in the simulated schedule, and what it does after that.
    fn ends(&self, rates: &Rates<'_>, walks: &[Walk]) -> Result<Vec<f64>, TrainError> {
        let schedule = self.plan.build_schedule()?;
        let of = |kinds: &[(ActionKind, f64)]| {
            let stage = |stage| walks.iter().find_map(|walk| walk.mean(stage, kinds)).unwrap_or(0.0);
            (0..schedule.stages()).map(stage).collect()
        };
        // Messages go from one pipeline rank to the next; the slowest pair counts.
        let pairs = self.ranks.windows(2).map(|pair| [pair[0].0, pair[1].0]);
        let bytes = walks.iter().map(|walk| walk.message).max().unwrap_or(0);
        let transfer = pairs.map(|pair| rates.between(pair, bytes)).fold(0.0, f64::max);
        let costs = Costs {
            forward: of(&[(ActionKind::Forward, 1.0)]),
            input_gradient: of(&[(ActionKind::InputGradient, 1.0), (ActionKind::Backward, 0.5)]),
            weight_gradient: of(&[(ActionKind::WeightGradient, 1.0), (ActionKind::Backward, 0.5)]),
            transfer: [transfer; 2],
            overlap: true,
        };
        let timeline = simulate(&schedule, &costs)?;
        let last = |rank: usize| timeline.ranks.get(rank).and_then(|row| row.last()).map_or(0.0, |last| last.end);
        Ok(walks.iter().enumerate().map(|(rank, walk)| last(rank) + walk.tail).collect())
    }
}

/// What a rank calls in a step, its actions framed.
fn calls(config: &Config, plan: &Plan, rank: usize) -> Result<Vec<Span>, TrainError> {
    let recorder = Recorder::new(Instant::now());
    let frame = recorder.clone();
    dry_run::observe(&config.model(), plan, rank, &recorder, move |event| {
        let Some((_, name)) = KINDS.iter().find(|(kind, _)| *kind == event.action.kind) else { return };
        let name = if event.phase == Phase::Started { BEGUN } else { name };
        let detail = Detail::Part { stage: event.action.stage, micro: event.action.micro };
        frame.record(Span { class: Class::Action, name, detail, dtype: None, start: 0, end: 0, flops: 0, bytes: 0 });
    })?;
    Ok(recorder.drain())
}

/// Operations of a step as published figures count them: six for each weight of a product and token, nothing
/// recomputed, attention with its masked half.
///
/// # Errors
/// As [`predict`].
pub fn model_flops(config: &Config) -> Result<f64, TrainError> {
    let plan = Plan { recompute: Recompute::None, ..config.plan()? };
    let one = dry_run::one_layer_a_stage(&*config.model(), &plan, 1)?;
    let mut flops = 0.0;
    for span in calls(config, &one, 0)? {
        // Backward of attention computes the scores again: 14 operations for each pair of tokens, of which the model
        // needs 12.
        let counted = if span.class == Class::Attention { 2.0 * 12.0 / 14.0 } else { 1.0 };
        flops += counted * span.flops as f64;
    }
    Ok(flops * config.training.global_batch_size as f64)
}

/// The part of `--steps 0` that says what a step takes on the card of `--device cuda:CARD`; empty for another device.
///
/// # Errors
/// As [`predict`].
pub fn report(config: &Config) -> Result<String, TrainError> {
    let Device::Card(name) = config.device else { return Ok(String::new()) };
    let Some(card) = card(name) else { return Ok(String::new()) };
    let recorded = Recorded::of(config)?;
    let (least, reached) = (recorded.on(card, Shares::PEAKS)?, recorded.on(card, Shares::REACHED)?);
    let world = recorded.plan.mesh.world_size();
    let peak = card.peak(recorded.plan.precision);
    let tokens = (config.training.global_batch_size * config.model.seq_len) as f64;
    let used = |step: &StepTime, flops: f64| flops / (step.seconds * peak * world as f64);
    let flops = model_flops(config)?;
    let mut text = format!(
        "\non {} × {}, predicted without one: at most {:.0} TFLOP/s of {} and {:.2} TB/s each\n  a step         {}; at least {}, if all peaks were reached\n  \
         speed          {} tokens/s, {} on each card; at most {}\n  MFU            {:.1}%; at most {:.1}%\n",
        world,
        card.title,
        peak / 1e12,
        config.training.matmul_dtype,
        card.bandwidth / 1e12,
        time(reached.seconds),
        time(least.seconds),
        grouped((tokens / reached.seconds) as u64),
        grouped((tokens / reached.seconds / world as f64) as u64),
        grouped((tokens / least.seconds) as u64),
        100.0 * used(&reached, flops),
        100.0 * used(&least, flops),
    );
    let mut most = (0, Vec::new());
    for equal in predict_all(config)? {
        let bytes = equal.each.peak_bytes();
        if bytes > most.0 {
            most = (bytes, equal.ranks);
        }
    }
    let fits = if most.0 as f64 <= card.memory { "" } else { ": more than it has" };
    text += &format!(
        "  memory         {} at the peak of {} {}, of {}{fits}\n",
        size(most.0 as f64),
        if most.1.len() > 1 { "ranks" } else { "rank" },
        spans(&most.1),
        size(card.memory)
    );
    let share = |seconds: f64| format!("{:>10} {:>6.1}%", time(seconds), 100.0 * seconds / reached.seconds);
    text +=
        &format!("\n  {:<22}{:>8} {:>10} {:>7}  {:>10}\n", "time of the last card", "calls", "", "share", "at least");
    let mut rest = reached.seconds;
    for (class, of) in &reached.classes {
        rest -= of.seconds;
        let floor = least.classes.get(class).map_or(0.0, |of| of.seconds);
        text += &format!(
            "  {:<22}{:>8} {}  {:>10}\n",
            words(*class),
            grouped(of.calls as u64),
            share(of.seconds),
            time(floor)
        );
    }
    if world > 1 {
        let [links, waits] = reached.links;
        let floor = time(least.links[1]);
        rest -= waits;
        text += &format!("  {:<22}{:>8} {}  {:>10}\n", "waits for collectives", "", share(waits), floor);
        text += &format!(
            "  {:<22}{:>8} {}  {:>10}\n",
            "waits for stages, tail",
            "",
            share(rest.max(0.0)),
            time(least.idle)
        );
        text +=
            &format!("  of {} of collectives, {} run behind other work\n", time(links), time((links - waits).max(0.0)));
    }
    if reached.host > 0.0 {
        text += &format!(
            "  {:<22}{:>8} {:>10} {:>7}  {:>10}: beside all else, at best\n",
            "link to the host",
            "",
            time(reached.host),
            "",
            time(least.host)
        );
    }
    text += &format!(
        "  {} of the card{}; docs/gpu_performance.md says how far such predictions are off\n",
        count(reached.calls(), "launch"),
        if recorded.graphs { ", in graphs" } else { "" }
    );
    Ok(text)
}

impl StepTime {
    /// Operations of the card in a step.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.classes.values().map(|of| of.calls).sum()
    }
}

fn words(class: Class) -> &'static str {
    match class {
        Class::Product => "products",
        Class::Attention => "attention",
        Class::Norm => "norms",
        Class::Pointwise => "pointwise",
        Class::Embedding => "embedding",
        Class::Loss => "loss",
        Class::Optimizer => "optimizer",
        Class::Memory => "copies",
        Class::Compression => "compression",
        _ => "other",
    }
}

/// Seconds, in a unit that suits them.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

#[cfg(test)]
mod tests;
