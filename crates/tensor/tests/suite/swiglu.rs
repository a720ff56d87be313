//! The product followed by SwiGLU: its bits, its gradient in place of the saved product, and deferred gradients of
//! weights.

use crate::common::{NoParams, POSITION, alone, tape_of, to_f64, values};
use meshwork_core::Types;
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{GradShard, GradSink, Keep, Mode, SavedPolicy, Selective, Weights};
use meshwork_tensor::{Declarations, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

fn single(tape: &Tape, name: &str, shape: &[usize]) -> Tensor {
    let values: Vec<f32> = values(name, shape.iter().product()).iter().map(|&x| x as f32).collect();
    Tensor::from_slice(tape.device(), &values, shape).unwrap()
}

/// Forward and both gradients, of a shape that is shared by threads and of one that is not.
#[test]
fn one_pass_has_the_bits_of_the_operations_apart() {
    type Program = fn(&[Var]) -> Result<Var>;
    let programs: [Program; 2] = [|v| v[0].linear_swiglu(&v[1], 2), |v| v[0].linear(&v[1], 2)?.swiglu()];
    for shapes in [[&[3, 5, 2, 4][..], &[3, 7, 2, 2, 4]], [&[2, 129, 3, 100], &[65, 2, 3, 100]]] {
        let [fused, apart] = programs.map(|program| {
            let tape = tape_of(&alone());
            let vars = ["x", "w"].into_iter().zip(shapes).map(|(name, shape)| single(&tape, name, shape));
            let vars: Vec<Var> = vars.map(|tensor| tape.input(tensor, Types::NONE)).collect();
            let y = program(&vars).unwrap();
            tape.backward(&y, single(&tape, "seed", &y.shape()), Weights::Now, &mut NoParams).unwrap();
            let grads = vars.iter().map(|var| to_f64(&tape.take_grad(var).unwrap()));
            (y.shape(), to_f64(y.tensor()), grads.collect::<Vec<_>>())
        });
        assert!(fused == apart, "{shapes:?}");
    }
}

/// Gradients by parameter.
#[derive(Default)]
struct Sums(BTreeMap<usize, Vec<f64>>);

impl GradSink for Sums {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        let sum = self.0.entry(share.id.index()).or_insert_with(|| vec![0.0; grad.count()]);
        sum.iter_mut().zip(to_f64(&grad)).for_each(|(sum, share)| *sum += share);
        Ok(())
    }

    fn ready(&mut self, _: ParamId) -> Result<()> {
        Ok(())
    }
}

/// The first call replaces the saved product by its gradient, for the second call, which computes the weight's
/// gradient. With a recipe that still needs the product, both calls compute the gradient.
#[test]
fn deferred_gradients_of_weights_equal_immediate_ones() {
    let run = |policy: Rc<dyn SavedPolicy>, weights: Weights, constant: bool| {
        let mut all = Declarations::new();
        let mut declare = |name: &str, dims: &[usize]| {
            let init = Init::Normal { std: 0.5 };
            all.declare(name, dims, Placement::replicated(), Role::Weight, init).unwrap()
        };
        let (up, down) = (declare("up", &[9, 2, 6]), declare("down", &[6, 9]));
        let (rank, device) = (alone(), Cpu::device());
        let layout = [all.ids().collect()];
        let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 3).unwrap();
        let tape = Tape::with_policy(rank, Arc::new(params), device, Mode::Train, POSITION, policy);
        let x = single(&tape, "x", &[2, 5, 6]);
        let x = if constant { tape.constant(x, Types::NONE) } else { tape.input(x, Types::NONE) };
        let inner = x.linear_swiglu(&tape.param(up).unwrap(), 1).unwrap();
        let y = inner.linear(&tape.param(down).unwrap(), 1).unwrap();
        drop(inner);
        let mut sums = Sums::default();
        tape.backward(&y, single(&tape, "seed", &[2, 5, 6]), weights, &mut sums).unwrap();
        if weights == Weights::Deferred {
            assert!(sums.0.is_empty());
            tape.weight_gradients(&mut sums).unwrap();
        }
        (tape.take_grad(&x).map(|grad| to_f64(&grad)), sums.0)
    };
    for constant in [false, true] {
        let want = run(Rc::new(Keep), Weights::Now, constant);
        assert_eq!((want.0.is_some(), want.1.len()), (!constant, 2));
        for policy in [Rc::new(Keep) as Rc<dyn SavedPolicy>, Rc::new(Selective)] {
            assert_eq!(run(Rc::clone(&policy), Weights::Now, constant), want, "{policy:?}");
            assert_eq!(run(Rc::clone(&policy), Weights::Deferred, constant), want, "{policy:?}, deferred");
        }
    }
}

/// The gradient of the product takes no memory of its own.
#[test]
fn the_gradient_of_the_product_lies_where_the_product_was() {
    let tape = tape_of(&alone());
    let [x, w] = [("x", &[64, 8][..]), ("w", &[512, 2, 8])].map(|(name, shape)| {
        let tensor = single(&tape, name, shape);
        tape.input(tensor, Types::NONE)
    });
    let y = x.linear_swiglu(&w, 1).unwrap();
    let seed = single(&tape, "seed", &[64, 512]);
    let live = tape.device().meter().live_bytes();
    tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
    let gradients = (4 * (64 * 8 + 512 * 2 * 8)) as u64;
    assert!(tape.device().meter().peak_bytes() <= live + gradients);
}
