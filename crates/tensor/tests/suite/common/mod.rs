//! Shared by the tests of this crate.

pub mod check;
pub mod naive;

use meshwork_core::{Axis, DType, Mesh, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::random;
use meshwork_tensor::tape::{GradShard, GradSink, HalfType, Keep, Mode, Position, SavedPolicy, Tape};
use meshwork_tensor::{Declarations, Device, ParamId, Params, Result, Tensor, Var};
use std::rc::Rc;
use std::sync::Arc;

/// The start of the randomness of the tests' forward passes.
pub const POSITION: Position = Position { seed: 5, step: 2, first_sample: 3, rank_samples: 0 };

/// A training tape without parameters, on a fresh CPU device.
pub fn tape_of(rank: &Arc<Rank>) -> Tape {
    tape_on(rank, Cpu::device())
}

/// A training tape without parameters.
pub fn tape_on(rank: &Arc<Rank>, device: Arc<dyn Device>) -> Tape {
    tape_with(rank, device, Rc::new(Keep))
}

/// The same with another policy for saved tensors.
pub fn tape_with(rank: &Arc<Rank>, device: Arc<dyn Device>, policy: Rc<dyn SavedPolicy>) -> Tape {
    tape_in(rank, device, policy, None)
}

/// The same of a model that is stored in 16 bits.
pub fn tape_in(rank: &Arc<Rank>, device: Arc<dyn Device>, policy: Rc<dyn SavedPolicy>, half: Option<HalfType>) -> Tape {
    let declarations = Arc::new(Declarations::new().stored_in(half));
    let params = Params::new(declarations, rank.mesh(), rank.coords(), &device, &[], 0).expect("no parameters");
    Tape::with_policy(Arc::clone(rank), Arc::new(params), device, Mode::Train, POSITION, policy)
}

/// The only rank of a mesh with no axes.
pub fn alone() -> Arc<Rank> {
    Arc::new(Rank::alone().expect("a world of one"))
}

/// Runs `body` on every rank of a mesh, on threads.
pub fn on_mesh<T: Send>(mesh: &str, body: impl Fn(Arc<Rank>) -> T + Sync) -> Vec<T> {
    let mesh: Mesh = mesh.parse().expect("a mesh");
    meshwork_testkit::run_world(mesh.world_size(), |world| {
        body(Arc::new(Rank::new(&mesh, Arc::clone(world.communicator())).expect("every rank joins")))
    })
}

/// `count` values in about [-2, 2] that depend on `name` alone.
pub fn values(name: &str, count: usize) -> Vec<f64> {
    let mut values = vec![0f64; count];
    random::fill_uniform(random::key(1, name), 0, &mut values);
    values.iter().map(|value| 4.0 * value - 2.0).collect()
}

/// `count` small integers that depend on `name` alone: their sums and products are exact.
pub fn integers(name: &str, count: usize) -> Vec<f64> {
    values(name, count).iter().map(|value| (8.0 * value).round()).collect()
}

/// A type on tp, nothing on other axes.
pub fn on_tp(ty: Ty) -> Types {
    Types::new(&[(Axis::Tp, ty)])
}

/// An f64 input on the tape's device.
pub fn input(tape: &Tape, values: &[f64], shape: &[usize], types: Types) -> Var {
    tape.input(Tensor::from_slice(tape.device(), values, shape).expect("values for the shape"), types)
}

/// Token ids or targets.
pub fn ids(tape: &Tape, ids: &[i32], shape: &[usize], types: Types) -> Var {
    tape.constant(Tensor::from_slice(tape.device(), ids, shape).expect("ids for the shape"), types)
}

/// The local values, converted to f64.
pub fn to_f64(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DType::F64 => tensor.to_vec::<f64>().expect("on the host"),
        DType::F16 => tensor.to_vec::<half::f16>().expect("on the host").into_iter().map(f64::from).collect(),
        DType::Bf16 => tensor.to_vec::<half::bf16>().expect("on the host").into_iter().map(f64::from).collect(),
        _ => tensor.to_vec::<f32>().expect("on the host").into_iter().map(f64::from).collect(),
    }
}

/// The sum of products.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// For programs without parameters.
pub struct NoParams;

impl GradSink for NoParams {
    fn accumulate(&mut self, share: &GradShard, _grad: Tensor) -> Result<()> {
        unreachable!("parameter {} on a tape that has none", share.id.index())
    }

    fn ready(&mut self, id: ParamId) -> Result<()> {
        unreachable!("parameter {} on a tape that has none", id.index())
    }
}
