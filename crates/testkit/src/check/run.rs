//! One rank's run of a program, on the tape: output and gradients in host memory.

use super::array::{Array, number};
use meshwork_core::{Axis, DType, Group, Mesh, Rank, Ty, Types, World};
use meshwork_cpu::Cpu;
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Mode, Position, Seed, Weights};
use meshwork_tensor::{Declarations, Params, Result, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A rank's part of an input, as it goes on the tape.
#[derive(Clone, Debug)]
pub(super) struct Local {
    pub part: Array,
    pub ty: Ty,
    /// Integers become i32 and get no gradient.
    pub ids: bool,
}

/// The results of a rank.
#[derive(Debug)]
pub(super) struct RankResult {
    pub output: Array,
    pub ty: Ty,
    /// The gradient that backward started from.
    pub seed: Array,
    /// `None` for ids.
    pub inputs: Vec<Option<Array>>,
    /// By name: the type of the gradient, and an array of the whole parameter's extents with zeros where this rank
    /// holds nothing.
    pub params: BTreeMap<String, (Ty, Array)>,
}

/// How a program is declared and applied.
pub(super) struct Program<D, F> {
    pub declare: D,
    pub forward: F,
    pub dtype: DType,
}

impl<L, D, F> Program<D, F>
where
    D: Fn(&mut Declarations, &Mesh) -> Result<L>,
    F: Fn(&L, &Tape, &[Var]) -> Result<Var>,
{
    /// The output, on a tape of `rank`.
    pub fn forward(&self, rank: &Arc<Rank>, inputs: &[Local]) -> Result<Forward> {
        let mut declarations = Declarations::new();
        let layer = (self.declare)(&mut declarations, rank.mesh())?;
        let (declarations, device) = (Arc::new(declarations), Cpu::device());
        let layout = [declarations.ids().collect()];
        let mut params = Params::new(declarations.clone(), rank.mesh(), rank.coords(), &device, &layout, 0)?;
        for id in declarations.ids() {
            let spec = declarations.spec(id);
            let mut values = vec![0.0; params.place(id).1.len()];
            spec.local(rank.mesh(), rank.coords()).for_each_run(spec.dims, |start, range| {
                let held = values[range].iter_mut().enumerate();
                held.for_each(|(i, value)| *value = number(&spec.name, start + i as u64) as f32);
            });
            params.write(id, &values)?;
        }
        let position = Position { seed: 1, step: 4, ..Position::default() };
        let params = Arc::new(params);
        let tape = Tape::new(rank.clone(), params.clone(), device, Mode::Train, position);
        let vars: Vec<Var> = inputs.iter().map(|input| self.place(&tape, input)).collect::<Result<_>>()?;
        let output = (self.forward)(&layer, &tape, &vars)?;
        Ok(Forward { params, tape, vars, output })
    }

    /// Forward, and backward from `seed`, by default from this rank's part of one whole array.
    pub fn run(&self, rank: &Arc<Rank>, inputs: &[Local], seed: Option<Array>) -> Result<RankResult> {
        let Forward { params, tape, vars, output } = self.forward(rank, inputs)?;
        let ty = output.ty(Axis::Tp);
        let seed = seed.unwrap_or_else(|| seed_of(&output, rank));
        let tensor = upload(&tape, &seed, output.tensor().dtype())?;
        let mut sums = Gradients::default();
        tape.take_notes(); // no part of the output
        tape.backward(&output, Seed::typed(tensor, output.types().dual()), Weights::Now, &mut sums)?;
        let reads = tape.reads();
        let declarations = params.declarations();
        let mut gradients = BTreeMap::new();
        for id in declarations.ids() {
            let (spec, Some(gradient)) = (declarations.spec(id), sums.get(id)) else { continue };
            let (local, shape) = (download(gradient)?, spec.dims.to_vec());
            let mut whole = Array { values: vec![0.0; spec.dims.count()], shape };
            spec.local(rank.mesh(), rank.coords()).for_each_run(spec.dims, |start, range| {
                whole.values[start as usize..][..range.len()].copy_from_slice(&local.values[range]);
            });
            let ty = reads.get(&id).and_then(|types| types.get(Axis::Tp)).unwrap_or(Ty::Invariant).dual();
            gradients.insert(spec.name.clone(), (ty, whole));
        }
        let gradient = |(var, input): (&Var, &Local)| match tape.take_grad(var) {
            _ if input.ids => Ok(None),
            Some(gradient) => download(&gradient).map(Some),
            // Nothing flows to it.
            None => Ok(Some(Array { values: vec![0.0; input.part.values.len()], ..input.part.clone() })),
        };
        let inputs = vars.iter().zip(inputs).map(gradient).collect::<Result<_>>()?;
        Ok(RankResult { output: download(output.tensor())?, ty, seed, inputs, params: gradients })
    }

    /// On every rank of `tp=degree`, as threads; `of` gives the inputs of a rank. An error says which rank failed, and
    /// why.
    pub fn run_ranks(
        &self,
        degree: usize,
        of: impl Fn(usize) -> Vec<Local> + Sync,
    ) -> std::result::Result<Vec<RankResult>, String>
    where
        D: Sync,
        F: Sync,
    {
        let body = |world: Group| {
            let rank = Arc::new(Rank::new(&mesh(degree), Arc::clone(world.communicator()))?);
            self.run(&rank, &of(rank.world_rank()), None)
        };
        World::Threads(degree).run(body).map_err(|error| error.to_string())
    }

    fn place(&self, tape: &Tape, input: &Local) -> Result<Var> {
        let types = Types::new(&[(Axis::Tp, input.ty)]);
        if input.ids {
            let ids: Vec<i32> = input.part.values.iter().map(|&id| id as i32).collect();
            return Ok(tape.constant(Tensor::from_slice(tape.device(), &ids, &input.part.shape[..])?, types));
        }
        Ok(tape.input(upload(tape, &input.part, self.dtype)?, types))
    }
}

/// A rank's tape after forward.
pub(super) struct Forward {
    pub params: Arc<Params>,
    pub tape: Tape,
    pub vars: Vec<Var>,
    pub output: Var,
}

pub(super) fn mesh(degree: usize) -> Mesh {
    Mesh::new([(Axis::Tp, degree)]).expect("a mesh of one axis")
}

/// A rank whose peers do not exist: alone, or to see whether a program is accepted.
pub(super) fn without_peers(degree: usize) -> Arc<Rank> {
    Arc::new(Rank::recording(&mesh(degree), 0).expect("a world that is only recorded"))
}

/// This rank's part of the gradient of the output.
fn seed_of(output: &Var, rank: &Rank) -> Array {
    let (ty, mut shape) = (output.ty(Axis::Tp).dual(), output.shape().to_vec());
    let (degree, at) = (rank.mesh().degree(Axis::Tp), rank.world_rank());
    if let Some(extent) = ty.dim().and_then(|dim| shape.get_mut(dim)) {
        *extent *= degree;
    }
    Array::named("seed", &shape).part("seed", ty, at, degree)
}

fn upload(tape: &Tape, array: &Array, dtype: DType) -> Result<Tensor> {
    let (device, shape) = (tape.device(), &array.shape[..]);
    match dtype {
        DType::F64 => Tensor::from_slice(device, &array.values, shape),
        _ => Tensor::from_slice(device, &array.values.iter().map(|&value| value as f32).collect::<Vec<_>>(), shape),
    }
}

pub(super) fn download(tensor: &Tensor) -> Result<Array> {
    let values = match tensor.dtype() {
        DType::F64 => tensor.to_vec::<f64>()?,
        _ => tensor.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
    };
    Ok(Array { shape: tensor.shape().to_vec(), values })
}
