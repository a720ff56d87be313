//! Runs one program un-sharded or on every rank of a mesh, and puts the ranks' results together. Each runs a second
//! time on a device whose memory the host cannot read, which must give the same bits.

use meshwork_core::comm::record;
use meshwork_core::{Axis, Communicator, Mesh, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::random::{key, normal};
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Position, Weights};
use meshwork_tensor::{Declarations, Device, ParamId, Params, Result, Tape, Tensor, Var};
use meshwork_testkit::opaque::{self, Opaque};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One input: whole values, and its type on the axis of the program. Integers become i32 and get no gradient.
pub struct Input {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
    pub ty: Ty,
    pub ids: bool,
}

impl Input {
    pub fn new(name: &str, shape: &[usize], ty: Ty, number: Number) -> Self {
        let values = (0..shape.iter().product()).map(|i| number(name, i as u64)).collect();
        Self { shape: shape.to_vec(), values, ty, ids: false }
    }

    pub fn ids(ids: &[i32], shape: &[usize]) -> Self {
        let values = ids.iter().map(|&id| id as f32).collect();
        Self { shape: shape.to_vec(), values, ty: Ty::Invariant, ids: true }
    }
}

/// Element `i` of everything called `name`: inputs, parameters, seeds.
pub type Number = fn(name: &str, i: u64) -> f32;

/// Normal values, for biases too, so that a bias that is added once per rank is noticed.
pub fn real(name: &str, i: u64) -> f32 {
    0.5 * normal(key(11, name), i)
}

/// Small integers, whose sums and products are exact.
pub fn integer(name: &str, i: u64) -> f32 {
    (2.0 * normal(key(11, name), i)).round()
}

/// Whole results.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub output: Vec<f32>,
    pub inputs: Vec<Vec<f32>>,
    pub params: BTreeMap<String, Vec<f32>>,
}

/// A model part: how it is declared, and how it is applied.
pub struct Program<L, D, F> {
    pub declare: D,
    pub forward: F,
    pub number: Number,
    /// The value of the stored padding rows of a parameter.
    pub padding: f32,
    /// Reduction blocks of canonical numerics.
    pub blocks: Option<usize>,
    /// The axis over which it is run.
    pub axis: Axis,
    pub layer: std::marker::PhantomData<L>,
}

/// A slice of a whole array on one rank.
#[derive(Debug, PartialEq)]
struct Piece {
    values: Vec<f32>,
    shape: Vec<usize>,
    ty: Ty,
}

/// A rank's part of a parameter's gradient: (global start, values) of each contiguous run.
type Runs = Vec<(usize, Vec<f32>)>;

#[derive(Debug, PartialEq)]
struct RankResult {
    output: Piece,
    inputs: Vec<Piece>,
    /// With the type of the gradient on the axis.
    params: BTreeMap<String, (Ty, Runs)>,
}

impl<L, D, F> Program<L, D, F>
where
    D: Fn(&mut Declarations, &Mesh) -> Result<L> + Sync,
    F: Fn(&L, &Tape, &[Var]) -> Result<Var> + Sync,
{
    pub fn new(number: Number, declare: D, forward: F) -> Self {
        Self { declare, forward, number, padding: 0.0, blocks: None, axis: Axis::Tp, layer: std::marker::PhantomData }
    }

    /// On the only rank of a mesh with no axes.
    pub fn alone(&self, inputs: &[Input]) -> Outcome {
        let mesh = Mesh::default();
        let world = record::communicator("world", 0, vec![0]).unwrap();
        self.assemble(vec![self.run_on_both(&mesh, &world, inputs)])
    }

    /// On `degree` ranks of its axis.
    pub fn over_axis(&self, degree: usize, inputs: &[Input]) -> Outcome
    where
        L: Sync,
    {
        let mesh =
            Mesh::new([(Axis::Tp, 1), (self.axis, degree)]).or_else(|_| Mesh::new([(self.axis, degree)])).unwrap();
        let ranks = meshwork_testkit::run_world(degree, |world| self.run_on_both(&mesh, world.communicator(), inputs));
        self.assemble(ranks)
    }

    fn run_on_both(&self, mesh: &Mesh, world: &Arc<dyn Communicator>, inputs: &[Input]) -> RankResult {
        let rank = |world| Arc::new(Rank::new(mesh, world).unwrap());
        let result = self.run(&rank(Arc::clone(world)), Cpu::device(), inputs);
        let device = Opaque::device(Cpu::device());
        let opaque = self.run(&rank(opaque::communicator(Arc::clone(world))), device, inputs);
        assert!(opaque == result, "another device, other bits: {opaque:?} instead of {result:?}");
        result
    }

    fn run(&self, rank: &Arc<Rank>, device: Arc<dyn Device>, inputs: &[Input]) -> RankResult {
        let mut declarations = self.blocks.map_or_else(Declarations::new, Declarations::canonical);
        let layer = (self.declare)(&mut declarations, rank.mesh()).unwrap();
        let declarations = Arc::new(declarations);
        let layout = [declarations.ids().collect()];
        let mut params =
            Params::new(Arc::clone(&declarations), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        self.fill(&mut params, rank);
        // The samples of the tests, two at most, are a whole subtree.
        let position = Position { seed: 1, step: 4, first_sample: 6, rank_samples: 0 };
        let tape = Tape::new(Arc::clone(rank), Arc::new(params), Arc::clone(&device), Mode::Train, position);

        let vars: Vec<Var> = inputs.iter().map(|input| place(&tape, self.axis, input)).collect();
        let output = (self.forward)(&layer, &tape, &vars).unwrap();
        let mut sink = Sums::default();
        tape.backward(&output, self.seed(&output, rank), Weights::Now, &mut sink).unwrap();

        let reads = tape.reads();
        let trained = declarations.ids().filter(|&id| !declarations.spec(id).group.frozen);
        let param = |id: ParamId| {
            let spec = declarations.spec(id);
            let gradient = sink.0.get(&id).unwrap_or_else(|| panic!("{} has no gradient", spec.name));
            let local = spec.local(rank.mesh(), rank.coords());
            let mut runs = Vec::new();
            local.for_each_run(spec.dims, |start, range| runs.push((start as usize, gradient[range].to_vec())));
            let nonzero = |values: &[f32]| values.iter().filter(|&&value| value != 0.0).count();
            let held: usize = runs.iter().map(|(_, run)| nonzero(run)).sum();
            assert_eq!(nonzero(gradient), held, "{}: padding has a gradient", spec.name);
            (spec.name.clone(), (on(self.axis, reads[&id]).dual(), runs))
        };
        let gradient = |var: &Var| {
            let gradient = tape.take_grad(var)?;
            Some(piece(&gradient, on(self.axis, var.types().dual())))
        };
        RankResult {
            output: piece(output.tensor(), on(self.axis, output.types())),
            inputs: vars.iter().filter_map(gradient).collect(),
            params: trained.map(param).collect(),
        }
    }

    /// Every element by its parameter's name and global index, padding apart.
    fn fill(&self, params: &mut Params, rank: &Rank) {
        let declarations = Arc::clone(params.declarations());
        for id in declarations.ids() {
            let spec = declarations.spec(id);
            let mut values = vec![self.padding; params.place(id).1.len()];
            spec.local(rank.mesh(), rank.coords()).for_each_run(spec.dims, |start, range| {
                for (i, value) in values[range].iter_mut().enumerate() {
                    *value = (self.number)(&spec.name, start + i as u64);
                }
            });
            params.write(id, &values).unwrap();
        }
    }

    /// The gradient of the output: this rank's part of one whole array, or ones for losses.
    fn seed(&self, output: &Var, rank: &Rank) -> Tensor {
        if output.tensor().dtype() == meshwork_core::DType::F64 {
            return Tensor::from_slice(output.tensor().device(), &vec![1.0f64; output.shape().count()], output.shape())
                .unwrap();
        }
        let (ty, mut shape) = (on(self.axis, output.types()), output.shape().to_vec());
        if let Ty::Shard(dim) = ty {
            shape[dim] *= rank.mesh().degree(self.axis);
        }
        let whole = Input::new("seed", &shape, ty, self.number);
        place(output.tape(), self.axis, &whole).into_tensor()
    }

    fn assemble(&self, ranks: Vec<RankResult>) -> Outcome {
        let inputs = (0..ranks[0].inputs.len()).map(|i| join(ranks.iter().map(|rank| &rank.inputs[i]))).collect();
        let output = join(ranks.iter().map(|rank| &rank.output));
        let mut params = BTreeMap::new();
        for name in ranks[0].params.keys() {
            params.insert(name.clone(), join_runs(name, ranks.iter().map(|rank| &rank.params[name])));
        }
        Outcome { output, inputs, params }
    }
}

fn on(axis: Axis, types: Types) -> Ty {
    types.get(axis).unwrap_or(Ty::Invariant)
}

fn piece(tensor: &Tensor, ty: Ty) -> Piece {
    let values = match tensor.dtype() {
        meshwork_core::DType::F64 => tensor.to_vec::<f64>().unwrap().iter().map(|&value| value as f32).collect(),
        _ => tensor.to_vec::<f32>().unwrap(),
    };
    Piece { values, shape: tensor.shape().to_vec(), ty }
}

/// This rank's part of an input, on the tape.
fn place(tape: &Tape, axis: Axis, input: &Input) -> Var {
    let (degree, at) = (tape.rank().mesh().degree(axis), tape.rank().coords().get(axis));
    let mut shape = input.shape.clone();
    let mut values = input.values.clone();
    if let Ty::Shard(dim) = input.ty {
        shape[dim] /= degree;
        let block = shape[dim] * input.shape[dim + 1..].iter().product::<usize>();
        values = values.chunks(block * degree).flat_map(|row| row[at * block..][..block].to_vec()).collect();
    }
    let mesh = tape.rank().mesh();
    let types = match mesh.has(axis) {
        true => Types::all(mesh, Ty::Invariant).with(axis, input.ty),
        false => Types::NONE,
    };
    if input.ids {
        let ids: Vec<i32> = values.iter().map(|&id| id as i32).collect();
        return tape.constant(Tensor::from_slice(tape.device(), &ids, &shape[..]).unwrap(), types);
    }
    tape.input(Tensor::from_slice(tape.device(), &values, &shape[..]).unwrap(), types)
}

/// Joins the pieces of all ranks to the whole.
fn join<'a>(pieces: impl Iterator<Item = &'a Piece>) -> Vec<f32> {
    let pieces: Vec<&Piece> = pieces.collect();
    match pieces[0].ty {
        Ty::Invariant | Ty::Replicate => {
            assert!(pieces.iter().all(|piece| piece.values == pieces[0].values), "the same bits on every rank");
            pieces[0].values.clone()
        }
        Ty::Partial => sum(pieces.iter().map(|piece| &piece.values[..])),
        Ty::Shard(dim) => {
            let block: usize = pieces[0].shape[dim..].iter().product();
            let rows = pieces[0].values.len() / block;
            (0..rows)
                .flat_map(|row| pieces.iter().flat_map(move |piece| &piece.values[row * block..][..block]))
                .copied()
                .collect()
        }
        Ty::Varying => panic!("no whole of a Varying value"),
    }
}

fn sum<'a>(parts: impl Iterator<Item = &'a [f32]>) -> Vec<f32> {
    let mut total = Vec::new();
    for part in parts {
        total.resize(part.len(), 0.0);
        total.iter_mut().zip(part).for_each(|(total, value)| *total += value);
    }
    total
}

/// The reducer's rule: a Partial gradient is summed, an Invariant one is the same everywhere, slices lie side by side.
fn join_runs<'a>(name: &str, ranks: impl Iterator<Item = &'a (Ty, Runs)>) -> Vec<f32> {
    let flat = |runs: &[(usize, Vec<f32>)]| runs.iter().flat_map(|(_, run)| run.clone()).collect::<Vec<f32>>();
    let ranks: Vec<_> = ranks.collect();
    match ranks[0].0 {
        Ty::Shard(_) => {
            let mut runs: Vec<_> = ranks.iter().flat_map(|(_, runs)| runs).collect();
            runs.sort_by_key(|(start, _)| *start);
            runs.iter().flat_map(|(_, run)| run.clone()).collect()
        }
        Ty::Partial => {
            let whole: Vec<Vec<f32>> = ranks.iter().map(|(_, runs)| flat(runs)).collect();
            sum(whole.iter().map(|part| &part[..]))
        }
        Ty::Invariant => {
            let first = flat(&ranks[0].1);
            assert!(ranks.iter().all(|(_, runs)| flat(runs) == first), "{name}: the same bits on every rank");
            first
        }
        other => panic!("{name}: no parameter has a gradient of type {other}"),
    }
}

/// Sums each parameter's gradient.
#[derive(Default)]
struct Sums(BTreeMap<ParamId, Vec<f32>>);

impl GradSink for Sums {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        let sum = self.0.entry(share.id).or_insert_with(|| vec![0.0; grad.count()]);
        sum.iter_mut().zip(grad.to_vec::<f32>()?).for_each(|(sum, share)| *sum += share);
        Ok(())
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}
