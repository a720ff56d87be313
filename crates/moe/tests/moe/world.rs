//! Runs a layer on every rank of a mesh, and puts the results together.
//!
//! More than 400 lines: one run, from the declarations to the whole results.

use meshwork_compress::{Draws, Fold, Message, Scheme, Shape};
use meshwork_core::{Axis, Mesh, Rank, Ty, Types, tree};
use meshwork_core::{World, rules};
use meshwork_cpu::Cpu;
use meshwork_moe::{ExpertShape, Experts, GroupedMlp, GroupedSwiGlu, MoeConfig, MoeLayer, Router};
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::param::{AdapterSpec, Adapters};
use meshwork_tensor::random::{key, normal};
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Position, RowSchemes, Seed, Selective, Weights};
use meshwork_tensor::{Declarations, Device, Error, Init, ParamId, Params, Result, Tape, Tensor, Var};
use meshwork_testkit::opaque::{self, Opaque};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The axis of the experts.
pub const EP: Axis = Axis::Ep;

/// What is run.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub config: MoeConfig,
    /// GPT-2's experts with biases, or Llama's.
    pub swiglu: bool,
    pub over_tp: bool,
    /// Whether the experts are frozen, beside [adapters](adapters).
    pub adapted: bool,
    /// Samples of the batch, tokens of each, features of a token, inner features of an expert.
    pub dims: [usize; 4],
    pub canonical: bool,
    pub mode: Mode,
    /// What ranks compress that they exchange.
    pub rows: RowSchemes,
    /// What experts lose of their rows and results, on one rank: the same.
    pub lost: RowSchemes,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            config: MoeConfig { num_experts: 4, ..MoeConfig::default() },
            swiglu: false,
            over_tp: true,
            adapted: false,
            dims: [8, 6, 12, 16],
            canonical: false,
            mode: Mode::Train,
            rows: RowSchemes::default(),
            lost: RowSchemes::default(),
        }
    }
}

/// How it is run.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub tp: usize,
    pub ep: usize,
    /// Ranks that hold the same experts.
    pub dp: usize,
    pub micros: usize,
    pub sequence_parallel: bool,
    pub deferred: bool,
    pub opaque: bool,
}

pub const ALONE: How = How { tp: 1, ep: 1, dp: 1, micros: 1, sequence_parallel: false, deferred: false, opaque: false };

impl How {
    /// Ranks with other samples.
    fn data(self) -> usize {
        self.ep * self.dp
    }

    pub fn mesh(self) -> Mesh {
        Mesh::new([(Axis::Tp, self.tp), (EP, self.ep), (Axis::Dp, self.dp)]).unwrap()
    }
}

/// Element `i` of everything called `name`.
pub fn number(name: &str, i: u64) -> f32 {
    0.5 * normal(key(7, name), i)
}

pub fn numbers(name: &str, range: Range<usize>) -> Vec<f32> {
    range.map(|i| number(name, i as u64)).collect()
}

/// Whole results.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub output: Vec<f32>,
    pub dx: Vec<f32>,
    pub params: BTreeMap<String, Vec<f32>>,
    /// Per name, the number of each sample.
    pub reports: BTreeMap<&'static str, Vec<f64>>,
    /// The choices of each expert in the batch.
    pub load: Vec<f64>,
    /// Bytes over the experts' axis, on average over the ranks.
    pub bytes: f64,
    /// Types of the gradients.
    pub types: BTreeMap<String, Types>,
}

/// What one rank has.
struct OfRank {
    output: Parts,
    dx: Parts,
    /// Per parameter: shares of samples, each with the runs of elements (global start, values).
    params: BTreeMap<String, Vec<Share>>,
    types: BTreeMap<String, Types>,
    reports: BTreeMap<&'static str, Vec<(u64, f64)>>,
    load: Vec<f64>,
    bytes: f64,
    counted: bool,
}

/// (first sample, values) of each micro-batch.
type Parts = Vec<(u64, Vec<f32>)>;

/// Sums over samples of the same elements.
type Sums = Vec<(Range<u64>, Vec<f32>)>;

/// A sum over samples: of these, the runs of elements (global start, values).
type Share = (Range<u64>, Vec<(u64, Vec<f32>)>);

#[derive(Default)]
struct Shares(Vec<(GradShard, Vec<f32>)>, Vec<ParamId>);

impl GradSink for Shares {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        self.0.push((share.clone(), grad.to_vec()?));
        Ok(())
    }

    fn ready(&mut self, id: ParamId) -> Result<()> {
        self.1.push(id);
        Ok(())
    }
}

/// Adapters of both products; of gate and up, those of up alone.
pub fn adapters(case: &Case) -> Adapters {
    let first = if case.swiglu { ("experts.gate_up", Some(1)) } else { ("experts.up", None) };
    let of = |(layer, matrix)| {
        let [a, b] = ["a", "b"].map(|part| format!("{layer}.{part}"));
        (format!("{layer}.weight"), vec![AdapterSpec { a, b, matrix }])
    };
    let of = [first, ("experts.down", None)].map(of).into_iter().collect();
    Adapters { rank: 2, scale: 0.5, of, ..Adapters::default() }
}

pub fn layer(case: &Case, params: &mut Declarations, mesh: &Mesh) -> Result<MoeLayer> {
    let [_, _, hidden, ffn] = case.dims;
    let init = Init::Normal { std: 1.0 };
    let shape = ExpertShape { experts: case.config.num_experts, hidden, ffn, axes: EP.into(), over_tp: case.over_tp };
    let router = Router::new(params, "router", hidden, case.config, init)?;
    let lost = case.lost;
    let experts = |params: &mut Declarations| -> Result<Arc<dyn Experts>> {
        Ok(match case.swiglu {
            true => Arc::new(GroupedSwiGlu::new(params, mesh, "experts", shape, [init; 2])?),
            false => Arc::new(GroupedMlp::new(params, mesh, "experts", shape, true, [init; 2])?),
        })
    };
    let experts = match case.adapted {
        true => params.adapting(&Arc::new(adapters(case)), experts)?,
        false => experts(params)?,
    };
    Ok(MoeLayer::new(router, Lossy(experts, lost), EP))
}

/// Experts of which each row is compressed and restored on its way in and out, and so are the gradients.
#[derive(Debug)]
struct Lossy(Arc<dyn Experts>, RowSchemes);

impl Lossy {
    fn cross(&self, x: &Var) -> Result<Var> {
        let RowSchemes { forward, backward } = self.1;
        let through = |scheme: Option<Scheme>| {
            move |x: &Tensor| -> Result<Tensor> {
                let Some(scheme) = scheme else { return Ok(x.clone()) };
                let (width, mut values) = (x.shape()[1], x.to_vec::<f32>()?);
                let (scheme, shape) = (scheme.of_each_row(width), Shape::matrix(1, width).unwrap());
                for row in values.chunks_exact_mut(width) {
                    let message = Message::compress(&scheme, row, shape, Draws::new(0, "", 0), &mut []).unwrap();
                    message.restore(&scheme, shape, Fold::Replace, row).unwrap();
                }
                Tensor::from_slice(x.device(), &values, x.shape())
            }
        };
        let (there, back) = (through(forward), through(backward));
        x.tape().custom(
            "cross",
            &["x"],
            &[x],
            |op, operands| rules::pointwise(op, operands[0]),
            move |inputs| there(inputs[0]),
            move |_, _, grad| Ok(vec![back(grad)?]),
        )
    }
}

impl Experts for Lossy {
    fn forward(&self, tape: &Tape, rows: &Var, groups: &Rc<RowGroups>) -> Result<Var> {
        if self.1 == RowSchemes::default() {
            return self.0.forward(tape, rows, groups);
        }
        self.cross(&self.0.forward(tape, &self.cross(rows)?, groups)?)
    }
}

pub fn declarations(case: &Case) -> Declarations {
    if case.canonical { Declarations::canonical(8) } else { Declarations::new() }
}

/// This rank's parameters, each element by its name and global index.
pub fn params(declared: Declarations, rank: &Rank, device: &Arc<dyn Device>) -> Params {
    let declared = Arc::new(declared);
    let layout = [declared.ids().collect()];
    let mut params = Params::new(Arc::clone(&declared), rank.mesh(), rank.coords(), device, &layout, 0).unwrap();
    for id in declared.ids() {
        let spec = declared.spec(id);
        let mut values = vec![0.0; params.place(id).1.len()];
        spec.local(rank.mesh(), rank.coords()).for_each_run(spec.dims, |start, range| {
            for (i, value) in values[range].iter_mut().enumerate() {
                *value = number(&spec.name, start + i as u64);
            }
        });
        params.write(id, &values).unwrap();
    }
    params
}

/// Runs the case on every rank of a mesh.
pub fn run(case: &Case, how: How) -> Outcome {
    let ranks = World::Threads(how.tp * how.data()).run(|world| {
        let world = Arc::clone(world.communicator());
        let world = if how.opaque { opaque::communicator(world) } else { world };
        let rank = Arc::new(Rank::new(&how.mesh(), world)?);
        let device = if how.opaque { Opaque::device(Cpu::device()) } else { Cpu::device() };
        on_rank(case, how, rank, device)
    });
    assemble(case, how, ranks.unwrap_or_else(|error| panic!("{how:?}: {error}")))
}

fn on_rank(case: &Case, how: How, rank: Arc<Rank>, device: Arc<dyn Device>) -> Result<OfRank> {
    let mut declared = declarations(case);
    let layer = layer(case, &mut declared, rank.mesh())?;
    let params = Arc::new(params(declared, &rank, &device));
    let declared = Arc::clone(params.declarations());
    let [batch, seq, hidden, _] = case.dims;
    // An ep group has consecutive samples.
    let at = rank.coords().get(Axis::Dp) * how.ep + rank.coords().get(EP);
    let samples = batch / how.data() / how.micros;
    let (mut shares, mut of) = (
        Shares::default(),
        OfRank {
            output: Vec::new(),
            dx: Vec::new(),
            params: BTreeMap::new(),
            types: BTreeMap::new(),
            reports: BTreeMap::new(),
            load: vec![0.0; case.config.num_experts],
            bytes: 0.0,
            counted: rank.coords().get(Axis::Tp) == 0,
        },
    );
    for micro in 0..how.micros {
        let first = at * (batch / how.data()) + micro * samples;
        let position = Position { seed: 3, step: 1, first_sample: first as u64, rank_samples: 0 };
        let tape =
            Tape::with_policy(rank.clone(), params.clone(), device.clone(), case.mode, position, Rc::new(Selective));
        tape.compress_rows(case.rows);
        // With sequence parallelism, this rank's slice of each sequence.
        let (held, start) = match how.sequence_parallel {
            true => (seq / how.tp, rank.coords().get(Axis::Tp) * (seq / how.tp)),
            false => (seq, 0),
        };
        let slice = |name: &str| -> Vec<f32> {
            let of_sample = |sample: usize| ((first + sample) * seq + start) * hidden;
            (0..samples)
                .flat_map(|sample| numbers(name, of_sample(sample)..of_sample(sample) + held * hidden))
                .collect()
        };
        let tp = if how.sequence_parallel { Ty::Shard(1) } else { Ty::Invariant };
        let types = Types::new(&[(Axis::Tp, tp), (EP, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0))]);
        let tensor = |name: &str| Tensor::from_slice(&device, &slice(name), [samples, held, hidden]);
        let x = tape.input(tensor("x")?, types);
        let y = layer.forward(&tape, &x)?;
        assert_eq!(y.types(), types);
        let notes = tape.take_notes();
        for note in &notes.per_sample {
            let values = note.value.tensor().to_vec::<f64>()?;
            let all = of.reports.entry(note.name).or_default();
            all.extend(values.into_iter().enumerate().map(|(i, value)| ((first + i) as u64, value)));
        }
        for note in &notes.statistics {
            let values = note.values[0].to_vec::<f32>()?;
            of.load.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(value));
        }
        of.output.push((first as u64, y.tensor().to_vec()?));
        if case.mode == Mode::Train {
            let mut roots: Vec<(&Var, Seed)> = vec![(&y, tensor("seed")?.into())];
            for note in &notes.per_sample {
                if let Some(coefficient) = note.coefficient {
                    let seed = Tensor::from_slice(&device, &vec![coefficient / batch as f64; samples], [samples])?;
                    roots.push((&note.value, seed.into()));
                }
            }
            let weights = if how.deferred { Weights::Deferred } else { Weights::Now };
            tape.backward_from(roots, weights, &mut shares)?;
            if how.deferred {
                tape.weight_gradients(&mut shares)?;
            }
            let dx = tape.take_grad(&x).ok_or_else(|| Error::Backward("no gradient of x".to_owned()))?;
            of.dx.push((first as u64, dx.to_vec()?));
        }
        for (id, read) in tape.reads() {
            of.types.insert(declared.spec(id).name.clone(), read.dual());
        }
    }
    of.bytes = rank.log().bytes_by_group().get(EP.name()).copied().unwrap_or(0.0);
    for (share, values) in shares.0 {
        let spec = declared.spec(share.id);
        let mut runs = Vec::new();
        spec.local(rank.mesh(), rank.coords())
            .for_each_run(spec.dims, |start, range| runs.push((start, values[range].to_vec())));
        assert_eq!(share.of, 1, "no sum over slices of the sequence");
        of.params.entry(spec.name.clone()).or_default().push((share.samples, runs));
    }
    Ok(of)
}

fn assemble(case: &Case, how: How, ranks: Vec<OfRank>) -> Outcome {
    let [batch, seq, hidden, _] = case.dims;
    let whole = |of: &dyn Fn(&OfRank) -> Parts| {
        let mut values =
            vec![
                f32::NAN;
                if case.mode == Mode::Train || !of(&ranks[0]).is_empty() { batch * seq * hidden } else { 0 }
            ];
        let held = if how.sequence_parallel { seq / how.tp } else { seq };
        for (i, rank) in ranks.iter().enumerate() {
            let start = if how.sequence_parallel { i % how.tp * held } else { 0 };
            for (first, part) in of(rank) {
                for (sample, part) in part.chunks(held * hidden).enumerate() {
                    let at = ((first as usize + sample) * seq + start) * hidden;
                    let room = &mut values[at..at + part.len()];
                    assert!(room[0].is_nan() || room == part, "ranks of tp hold the same");
                    room.copy_from_slice(part);
                }
            }
        }
        values
    };
    let mut params: BTreeMap<String, BTreeMap<u64, Sums>> = BTreeMap::new();
    for rank in &ranks {
        for (name, shares) in &rank.params {
            let tp = rank.types[name].get(Axis::Tp);
            if !rank.counted && tp == Some(Ty::Invariant) {
                continue; // the same on every rank of tp
            }
            assert_ne!(tp, Some(Ty::Partial), "{name}: its tokens are whole on every rank of tp");
            for (samples, runs) in shares {
                for (start, values) in runs {
                    let runs = params.entry(name.clone()).or_default().entry(*start).or_default();
                    runs.push((samples.clone(), values.clone()));
                }
            }
        }
    }
    let sum = |shares: Sums| match case.canonical {
        true => in_tree(shares),
        false => shares.into_iter().map(|(_, values)| values).reduce(|a, b| add(&a, &b)).unwrap_or_default(),
    };
    let params = params.into_iter().map(|(name, runs)| (name, runs.into_values().flat_map(sum).collect())).collect();
    let mut reports: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for name in ranks[0].reports.keys() {
        let mut all: Vec<(u64, f64)> =
            ranks.iter().filter(|rank| rank.counted).flat_map(|rank| rank.reports[name].clone()).collect();
        all.sort_by_key(|(sample, _)| *sample);
        assert_eq!(all.len(), batch, "{name}: a number for each sample");
        reports.insert(name, all.into_iter().map(|(_, value)| value).collect());
    }
    let counted = || ranks.iter().filter(|rank| rank.counted);
    Outcome {
        output: whole(&|rank| rank.output.clone()),
        dx: whole(&|rank| rank.dx.clone()),
        params,
        reports,
        load: (0..case.config.num_experts).map(|e| counted().map(|rank| rank.load[e]).sum()).collect(),
        bytes: ranks.iter().map(|rank| rank.bytes).sum::<f64>() / ranks.len() as f64,
        types: ranks[0].types.clone(),
    }
}

fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// The sum of shares of whole subtrees of the samples, in the tree over all of them.
fn in_tree(mut shares: Sums) -> Vec<f32> {
    shares.sort_by_key(|(samples, _)| samples.start);
    let (mut sums, mut next) = (tree::Counter::default(), 0);
    for (samples, values) in shares {
        assert_eq!(samples.start, next, "each sample once");
        let len = samples.end - samples.start;
        assert!(len.is_power_of_two() && samples.start.is_multiple_of(len), "{samples:?} is a subtree");
        next = samples.end;
        sums.push(len as usize, values, |a, b| add(&a, &b));
    }
    sums.finish(|a, b| add(&a, &b)).unwrap_or_default()
}
