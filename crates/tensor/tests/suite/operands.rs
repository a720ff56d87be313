//! Values that only products read are stored as matmul operands: half the memory in bf16, and no bit changes.

use crate::common::{NoParams, alone, on_mesh, on_tp, tape_with, to_f64, values};
use meshwork_core::{Axis, DType, Rank, Ty};
use meshwork_cpu::Cpu;
use meshwork_tensor::Precision;
use meshwork_tensor::tape::{Keep, SavedPolicy, Selective, Weights};
use meshwork_tensor::{Result, Tape, Tensor, Var};
use std::rc::Rc;
use std::sync::Arc;

const ROWS: usize = 4;
const WIDTH: usize = 33;
const INNER: usize = 18;

/// Makes y of x `[2, ROWS, WIDTH]` in the region between blocks, gamma and beta `[WIDTH]`, up `[INNER, WIDTH]`, its
/// bias, and down `[WIDTH, INNER]`.
type Program = fn([&Var; 6], enter: Enter) -> Result<Var>;

/// From the region between blocks into one.
type Enter = fn(&Var) -> Result<Var>;

/// A block of a transformer with stored operands.
fn factors([x, gamma, beta, up, bias, down]: [&Var; 6], enter: Enter) -> Result<Var> {
    let normed = x.layer_norm_operand(gamma, beta, 1e-5)?;
    enter(&normed)?.linear_gelu(up, bias, 1)?.linear(down, 1)
}

/// The same operations, each by itself, with values of the type of x.
fn apart([x, gamma, beta, up, bias, down]: [&Var; 6], enter: Enter) -> Result<Var> {
    let normed = x.layer_norm(gamma, beta, 1e-5)?;
    enter(&normed)?.linear(up, 1)?.bias(bias)?.gelu()?.linear(down, 1)
}

fn factors_without_biases([x, gamma, _, up, _, down]: [&Var; 6], enter: Enter) -> Result<Var> {
    let normed = x.layer_norm_operand(gamma, None, 1e-5)?;
    enter(&normed)?.linear_gelu(up, None, 1)?.linear(down, 1)
}

fn apart_without_biases([x, gamma, _, up, _, down]: [&Var; 6], enter: Enter) -> Result<Var> {
    enter(&x.layer_norm(gamma, None, 1e-5)?)?.linear(up, 1)?.gelu()?.linear(down, 1)
}

/// A block with pairs, with stored operands.
fn gated_factors([x, gamma, _, up, _, down]: [&Var; 6], enter: Enter) -> Result<Var> {
    let normed = x.rms_norm_operand(gamma, 1e-5)?;
    enter(&normed)?.linear_swiglu(up, 1)?.linear(down, 1)
}

fn gated_apart([x, gamma, _, up, _, down]: [&Var; 6], enter: Enter) -> Result<Var> {
    enter(&x.rms_norm(gamma, 1e-5)?)?.linear(up, 1)?.swiglu()?.linear(down, 1)
}

fn f32_input(tape: &Tape, name: &str, shape: &[usize], ty: Ty) -> Var {
    let data: Vec<f32> = values(name, shape.iter().product()).iter().map(|&value| value as f32).collect();
    tape.input(Tensor::from_slice(tape.device(), &data, shape).unwrap(), on_tp(ty))
}

/// y and the gradients of the inputs that it depends on. `up` has these dims before its last.
fn run(
    rank: &Arc<Rank>,
    policy: Rc<dyn SavedPolicy>,
    (region, enter): (Ty, Enter),
    up: &[usize],
    program: Program,
) -> Vec<Vec<f64>> {
    let tape = tape_with(rank, Arc::new(Cpu::new(Precision::Bf16)), policy);
    let read = if region == Ty::Invariant { Ty::Invariant } else { Ty::Replicate };
    let inputs = [
        f32_input(&tape, "x", &[2, ROWS, WIDTH], region),
        f32_input(&tape, "gamma", &[WIDTH], read),
        f32_input(&tape, "beta", &[WIDTH], read),
        f32_input(&tape, "up", &[up, &[WIDTH]].concat(), Ty::Shard(0)),
        f32_input(&tape, "bias", &[INNER], Ty::Shard(0)),
        f32_input(&tape, "down", &[WIDTH, INNER], Ty::Shard(1)),
    ];
    let y = program(inputs.each_ref(), enter).unwrap();
    let seed: Vec<f32> = values("seed", y.tensor().count()).iter().map(|&value| value as f32).collect();
    let seed = Tensor::from_slice(tape.device(), &seed, y.shape()).unwrap();
    let results = to_f64(y.tensor());
    tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
    [results].into_iter().chain(inputs.iter().filter_map(|input| Some(to_f64(&tape.take_grad(input)?)))).collect()
}

#[test]
fn a_stored_operand_changes_no_bit() {
    let regions: [(Ty, Enter); 2] =
        [(Ty::Invariant, |x| x.copy(Axis::Tp)), (Ty::Shard(1), |x| x.all_gather(Axis::Tp, 1))];
    on_mesh("tp=2", |rank| {
        let programs: [(&[usize], [Program; 2], usize); 3] = [
            (&[INNER], [factors, apart], 7),
            (&[INNER], [factors_without_biases, apart_without_biases], 5),
            (&[INNER, 2], [gated_factors, gated_apart], 5),
        ];
        for (region, (up, [factors, apart], results)) in regions.into_iter().flat_map(|r| programs.map(|p| (r, p))) {
            let want = run(&rank, Rc::new(Keep), region, up, apart);
            assert_eq!(want.len(), results);
            assert!(want.iter().all(|values| values.iter().any(|&value| value != 0.0)));
            for policy in [Rc::new(Keep) as Rc<dyn SavedPolicy>, Rc::new(Selective)] {
                assert!(run(&rank, policy, region, up, factors) == want, "{:?}", region.0);
            }
        }
    });
}

#[test]
fn an_operand_has_the_type_that_products_round_to() {
    for (precision, dtype, wanted) in [
        (Precision::F32, DType::F32, DType::F32),
        (Precision::Bf16, DType::F32, DType::Bf16),
        (Precision::Bf16, DType::F64, DType::F64),
    ] {
        let tape = tape_with(&alone(), Arc::new(Cpu::new(precision)), Rc::new(Keep));
        let input =
            |shape: &[usize]| tape.input(Tensor::zeros(tape.device(), dtype, shape).unwrap(), on_tp(Ty::Invariant));
        let (x, vector) = (input(&[1, 3, 5]), input(&[5]));
        let normed = x.layer_norm_operand(&vector, &vector, 1e-5).unwrap();
        let inner = normed.linear_gelu(&input(&[5, 5]), &vector, 1).unwrap();
        assert_eq!([normed.tensor().dtype(), inner.tensor().dtype()], [wanted; 2]);
        let y = inner.linear(&input(&[5, 5]), 1).unwrap();
        assert_eq!([x.layer_norm(&vector, &vector, 1e-5).unwrap().tensor().dtype(), y.tensor().dtype()], [dtype; 2]);
    }
}

/// The product of a router: its decisions do not depend on the precision of other products.
#[test]
fn an_exact_product_rounds_no_operand() {
    let products = |precision, exact: bool| {
        let tape = tape_with(&alone(), Arc::new(Cpu::new(precision)), Rc::new(Keep));
        let input = |name, shape: &[usize]| f32_input(&tape, name, shape, Ty::Invariant);
        let (x, w) = (input("x", &[2, ROWS, WIDTH]), input("w", &[INNER, WIDTH]));
        let y = if exact { x.exact_linear(&w, 1) } else { x.linear(&w, 1) }.unwrap();
        let results = to_f64(y.tensor());
        let seed = input("seed", &[2, ROWS, INNER]).into_tensor();
        tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
        [results, to_f64(&tape.take_grad(&x).unwrap()), to_f64(&tape.take_grad(&w).unwrap())]
    };
    let want = products(Precision::F32, false);
    assert_eq!(products(Precision::Bf16, true), want);
    assert!(products(Precision::Bf16, false).iter().zip(&want).all(|(rounded, want)| rounded != want));
    let tape = tape_with(&alone(), Arc::new(Cpu::new(Precision::Bf16)), Rc::new(Keep));
    let (x, v) = (f32_input(&tape, "x", &[2, 5], Ty::Invariant), f32_input(&tape, "v", &[5], Ty::Invariant));
    let stored = x.layer_norm_operand(&v, None, 1e-5).unwrap();
    let error = stored.exact_linear(&f32_input(&tape, "w", &[3, 5], Ty::Invariant), 1).unwrap_err().to_string();
    assert_eq!(error, "matmul: dtype bf16 on device cpu is not supported: use f32 or f64");
}

#[test]
fn what_is_no_product_refuses_a_stored_factor() {
    let tape = tape_with(&alone(), Arc::new(Cpu::new(Precision::Bf16)), Rc::new(Keep));
    let (x, vector) = (f32_input(&tape, "x", &[2, 5], Ty::Invariant), f32_input(&tape, "v", &[5], Ty::Invariant));
    let factor = x.layer_norm_operand(&vector, &vector, 1e-5).unwrap();
    let error = factor.gelu().unwrap_err().to_string();
    assert_eq!(error, "gelu: dtype bf16 on device cpu is not supported: use f32 or f64");
    // A product of f32 on a device that does not round widens what another one stored; one of f64 refuses it.
    let exact = tape_with(&alone(), Cpu::device(), Rc::new(Keep));
    let zeros = |dtype, shape: [usize; 2]| {
        exact.input(Tensor::zeros(exact.device(), dtype, shape).unwrap(), on_tp(Ty::Invariant))
    };
    let stored = zeros(DType::Bf16, [2, 5]);
    let y = stored.linear(&f32_input(&exact, "w", &[3, 5], Ty::Invariant), 1).unwrap();
    assert_eq!((y.tensor().dtype(), to_f64(y.tensor())), (DType::F32, vec![0.0; 6]));
    let error = stored.linear(&zeros(DType::F64, [3, 5]), 1).unwrap_err().to_string();
    assert_eq!(error, "matmul: dtype bf16 on device cpu is not supported: use f32 or f64");
}
