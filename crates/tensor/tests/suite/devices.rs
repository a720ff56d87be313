//! The meta device counts what the cpu does, operation by operation; and unsupported operations of a device are errors
//! that say so.
//!
//! More than 400 lines: one line for each operation, counted and run on every device.

use crate::common::{NoParams, POSITION, ids, on_mesh, tape_in, tape_on, tape_with};
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, Buffer, DType, Mesh, Rank, Record, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::Precision;
use meshwork_tensor::device::{Kernels, Meter, Work};
use meshwork_tensor::kernel::{Elementwise, Map, Zip};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::op::{Documents, Mask, Order, Pattern, Preference, Rotary, RowGroups, Targets, TokenGroups};
use meshwork_tensor::tape::{HalfType, Mode, Seed, Selective, Weights};
use meshwork_tensor::{Declarations, Device, Error, Init, Params, Placement, Result, Role, Tape, Tensor, Var, Widened};
use meshwork_testkit::opaque::{self, Opaque};
use std::rc::Rc;
use std::sync::Arc;

pub const MESH: &str = "tp=2,dp=2";

/// (live bytes, peak bytes, matmul flops, attention flops).
type Counts = (u64, u64, u64, u64);

fn counts(device: &Arc<dyn Device>) -> Counts {
    let meter = device.meter();
    (meter.live_bytes(), meter.peak_bytes(), meter.flops(Work::Matmul), meter.flops(Work::Attention))
}

/// An operation on inputs of these local shapes and types on tp.
pub struct Case {
    pub name: &'static str,
    pub inputs: Vec<(Vec<usize>, Ty)>,
    pub run: fn(&Tape, &[Var]) -> Result<Var>,
}

fn case(name: &'static str, inputs: &[(&[usize], Ty)], run: fn(&Tape, &[Var]) -> Result<Var>) -> Case {
    Case { name, inputs: inputs.iter().map(|(shape, ty)| (shape.to_vec(), *ty)).collect(), run }
}

fn tokens(tape: &Tape) -> Var {
    ids(tape, &[0, 3, 3, 1, 2, 2], &[2, 3], types(Ty::Invariant))
}

/// Sequences of one document each: what meta counts, which does not know the positions.
const WINDOW: Mask<'static> = Mask { window: Some(3), ..CAUSAL };

const CAUSAL: Mask<'static> = Mask { pattern: Pattern::Causal, ..Mask::CROSS };

fn documents(tape: &Tape, apart: bool) -> Documents {
    Documents { positions: ids(tape, &[0, 1, 2, 0, 1, 2], &[2, 3], types(Ty::Invariant)), apart }
}

pub fn types(tp: Ty) -> Types {
    Types::new(&[(Axis::Tp, tp), (Axis::Dp, Ty::Invariant)])
}

/// Every operation.
pub fn cases() -> Vec<Case> {
    use Ty::{Invariant as I, Partial as P, Replicate as R, Shard as S, Varying as V};
    let x: &[usize] = &[2, 4, 6];
    vec![
        case("linear", &[(&[2, 3, 5], R), (&[7, 5], S(0))], |_, v| v[0].linear(&v[1], 1)),
        case("linear over two dims", &[(&[2, 3, 2, 4], S(2)), (&[5, 2, 4], S(1))], |_, v| v[0].linear(&v[1], 2)),
        case("bias", &[(x, R), (&[6], R)], |_, v| v[0].bias(&v[1])),
        case("linear_bias", &[(&[2, 3, 5], R), (&[7, 5], S(0)), (&[7], S(0))], |_, v| {
            v[0].linear_bias(&v[1], &v[2], 1)
        }),
        case("linear_plus", &[(&[2, 3, 5], R), (&[7, 5], S(0)), (&[2, 3, 2], R), (&[7, 2], S(0))], |_, v| {
            v[0].linear_plus(&v[1], None, 1, [&v[2], &v[3]])
        }),
        case(
            "linear_bias_plus",
            &[(&[2, 3, 5], S(0)), (&[7, 5], R), (&[7], R), (&[2, 3, 2], S(0)), (&[7, 2], R)],
            |_, v| v[0].linear_plus(&v[1], Some(&v[2]), 1, [&v[3], &v[4]]),
        ),
        case("linear_bias_gelu", &[(&[2, 3, 5], R), (&[7, 5], S(0)), (&[7], S(0))], |_, v| {
            v[0].linear_gelu(&v[1], &v[2], 1)
        }),
        case("linear_gelu", &[(&[2, 3, 5], R), (&[7, 5], S(0))], |_, v| v[0].linear_gelu(&v[1], None, 1)),
        case("linear_pair", &[(x, R), (&[7, 6], R), (&[2, 7, 6], R)], |_, v| {
            let [y, z] = v[0].linear_pair([(&v[1], None), (&v[2], None)], 1)?;
            y.add(&z.linear(
                &v[0].tape().constant(Tensor::zeros(y.tape().device(), y.tensor().dtype(), [7, 2, 7])?, types(R)),
                2,
            )?)
        }),
        case("exact_linear", &[(&[2, 3, 5], R), (&[7, 5], S(0))], |_, v| v[0].exact_linear(&v[1], 1)),
        case("grouped_linear and bias", &[(&[9, 5], R), (&[3, 7, 5], S(1)), (&[3, 7], S(1))], |_, v| {
            let sample = 0..1;
            // The rows of one group are none, and no axis of this mesh cuts the groups.
            let groups = Rc::new(RowGroups::new(Axis::Cp, vec![sample], vec![vec![2], vec![0], vec![7]]));
            v[0].grouped_linear(&v[1], 1, &groups)?.grouped_bias(&v[2], &groups)
        }),
        case("jitter", &[(x, I)], |_, v| v[0].jitter(0.25, "layer")),
        case("gelu", &[(x, V)], |_, v| v[0].gelu()),
        case("add", &[(x, P), (x, P)], |_, v| v[0].add(&v[1])),
        case("bias_residual", &[(x, I), (&[6], I), (x, I)], |_, v| v[0].bias_residual(&v[1], &v[2])),
        case("layer_norm", &[(x, I), (&[6], I), (&[6], I)], |_, v| v[0].layer_norm(&v[1], &v[2], 1e-5)),
        case("layer_norm without beta", &[(x, I), (&[6], I)], |_, v| v[0].layer_norm(&v[1], None, 1e-5)),
        case("rms_norm", &[(x, I), (&[6], I)], |_, v| v[0].rms_norm(&v[1], 1e-5)),
        case("rms_norm_operand", &[(x, I), (&[6], I), (&[2, 6], S(0))], |_, v| {
            v[0].rms_norm_operand(&v[1], 1e-5)?.copy(Axis::Tp)?.linear(&v[2], 1)
        }),
        case("swiglu", &[(&[2, 3, 5, 2], V)], |_, v| v[0].swiglu()),
        case("swiglu in place", &[(x, R), (&[5, 2, 6], S(0))], |_, v| v[0].linear(&v[1], 1)?.swiglu()),
        case("linear_swiglu", &[(x, R), (&[5, 2, 6], S(0)), (&[3, 5], S(1))], |_, v| {
            v[0].linear_swiglu(&v[1], 1)?.linear(&v[2], 1)
        }),
        case("relu", &[(x, V)], |_, v| v[0].relu()),
        case("conv2d", &[(&[3, 5, 4, 2], I), (&[6, 3, 3, 2], I)], |_, v| v[0].conv2d(&v[1], None, 2, 1)),
        case("conv2d with bias", &[(&[3, 5, 4, 2], R), (&[6, 3, 3, 2], R), (&[6], R)], |_, v| {
            v[0].conv2d(&v[1], Some(&v[2]), 1, 1)
        }),
        case("conv2d of pixels", &[(&[3, 5, 4, 2], S(0)), (&[6, 1, 1, 2], R)], |_, v| v[0].conv2d(&v[1], None, 1, 0)),
        case("max_pool", &[(&[3, 5, 4, 2], I)], |_, v| v[0].max_pool([2, 2], 2, 0)),
        case("average_pool", &[(&[3, 5, 4, 2], I)], |_, v| v[0].average_pool([3, 3], 2, 1)),
        case("global_average_pool", &[(&[3, 5, 4, 2], V)], |_, v| v[0].global_average_pool()),
        case("batch_norm", &[(&[3, 9, 8, 4], S(0)), (&[4], R), (&[4], R)], |_, v| {
            Ok(v[0].batch_norm(&v[1], &v[2], 1e-5)?.0)
        }),
        case("group_norm", &[(&[3, 9, 8, 4], I), (&[4], I), (&[4], I)], |_, v| v[0].group_norm(2, &v[1], &v[2], 1e-5)),
        case("batch_norm without beta", &[(&[3, 9, 8, 4], S(0)), (&[4], R)], |_, v| {
            Ok(v[0].batch_norm(&v[1], None, 1e-5)?.0)
        }),
        case("group_norm without beta", &[(&[3, 9, 8, 4], I), (&[4], I)], |_, v| v[0].group_norm(2, &v[1], None, 1e-5)),
        // Recipes that make the missing vectors again.
        case("products of what has no bias", &[(&[3, 5, 4, 2], I), (&[2], I), (&[6, 2], I), (&[3, 6], I)], |_, v| {
            v[0].group_norm(1, &v[1], None, 1e-5)?.relu()?.linear_gelu(&v[2], None, 1)?.linear(&v[3], 1)
        }),
        case("soft_cap", &[(x, V)], |_, v| v[0].soft_cap(1.5)),
        // A recipe upon a recipe.
        case("conv2d of a rectified norm", &[(&[3, 5, 4, 2], I), (&[2], I), (&[2], I), (&[6, 3, 3, 2], I)], |_, v| {
            v[0].group_norm(1, &v[1], &v[2], 1e-5)?.relu()?.conv2d(&v[3], None, 1, 1)
        }),
        case("attention", &[(&[2, 5, 3, 2, 4], S(3))], |_, v| v[0].causal_attention(None, None)),
        case("attention with dropout", &[(&[2, 70, 3, 1, 2], S(3))], |_, v| {
            v[0].causal_attention(None, Some((0.5, "attn")))
        }),
        case("grouped attention", &[(&[2, 5, 4, 6], S(2)), (&[2, 5, 2, 12], S(3))], |_, v| {
            v[0].grouped_attention(&v[1], Some(Rotary::new(1e4)), None, None)
        }),
        case("grouped attention of replicated keys", &[(&[2, 70, 2, 4], S(2)), (&[2, 70, 2, 4], R)], |_, v| {
            v[0].grouped_attention(&v[1], None, None, Some((0.5, "attn")))
        }),
        case("attention to documents", &[(&[2, 3, 3, 2, 4], S(3))], |tape, v| {
            v[0].causal_attention(Some(&documents(tape, true)), None)
        }),
        case("grouped attention with positions", &[(&[2, 3, 4, 6], S(2)), (&[2, 3, 2, 12], S(3))], |tape, v| {
            v[0].grouped_attention(&v[1], Some(Rotary::new(1e4)), Some(&documents(tape, false)), None)
        }),
        case("attention with a window", &[(&[2, 5, 3, 2, 4], S(3))], |_, v| v[0].causal_attention(WINDOW, None)),
        case("grouped attention of runs with a window", &[(&[2, 8, 4, 6], S(2)), (&[2, 8, 2, 12], S(3))], |_, v| {
            v[0].grouped_attention_in(&Order::zigzag(2), &v[1], Some(Rotary::new(1e4)), WINDOW, None)
        }),
        case("attention in both directions", &[(&[2, 70, 3, 2, 4], S(3))], |_, v| {
            v[0].self_attention(Mask { slopes: Some(&[0.5, 0.25, 0.125, 0.0625]), ..Mask::BIDIRECTIONAL }, None)
        }),
        case("attention in both directions with a window", &[(&[2, 9, 3, 2, 4], S(3))], |_, v| {
            v[0].self_attention(Mask { window: Some(3), ..Mask::BIDIRECTIONAL }, Some((0.5, "attn")))
        }),
        case("attention to documents in both directions", &[(&[2, 3, 3, 2, 4], S(3))], |tape, v| {
            v[0].self_attention(Mask { documents: Some(&documents(tape, true)), ..Mask::BIDIRECTIONAL }, None)
        }),
        case("cross attention", &[(&[2, 5, 4, 6], S(2)), (&[2, 7, 2, 12], S(3))], |tape, v| {
            let lengths = ids(tape, &[7, 7], &[2], types(Ty::Invariant));
            v[0].grouped_attention(&v[1], None, Mask { lengths: Some(&lengths), ..Mask::CROSS }, Some((0.5, "attn")))
        }),
        case("attention with a bias", &[(&[2, 5, 4, 6], S(2)), (&[2, 5, 2, 12], S(3)), (&[4, 5, 5], S(0))], |_, v| {
            v[0].grouped_attention(&v[1], None, Mask { bias: Some(&v[2]), cap: Some(3.0), ..Mask::BIDIRECTIONAL }, None)
        }),
        case("dropout", &[(x, S(1))], |_, v| v[0].dropout(0.5, "mlp")),
        case("positions", &[(x, S(1)), (&[9, 6], R)], |_, v| v[0].positions(&v[1])),
        case("embedding", &[(&[4, 6], I)], |tape, v| tokens(tape).embedding(&v[0])),
        case("vocab_parallel_embedding", &[(&[2, 6], S(0))], |tape, v| {
            tokens(tape).vocab_parallel_embedding(&v[0], Axis::Tp, 4)
        }),
        case("cross_entropy", &[(&[2, 3, 4], I)], |tape, v| v[0].cross_entropy(&tokens(tape))),
        // Nothing else holds the logits, so the loss writes its gradient over them.
        case("cross_entropy in place", &[(&[2, 3, 4], I)], |tape, v| v[0].gelu()?.cross_entropy(&tokens(tape))),
        case("vocab_parallel_cross_entropy", &[(&[2, 3, 2], S(2))], |tape, v| {
            v[0].vocab_parallel_cross_entropy(&tokens(tape), Axis::Tp, 4)
        }),
        case("linear_cross_entropy", &[(&[2, 3, 5], I), (&[4, 5], I)], |tape, v| {
            v[0].linear_cross_entropy(&v[1], &tokens(tape), 2)
        }),
        case("vocab_parallel_linear_cross_entropy", &[(&[2, 3, 5], R), (&[2, 5], S(0))], |tape, v| {
            v[0].vocab_parallel_linear_cross_entropy(&v[1], &tokens(tape), Axis::Tp, 4, 2)
        }),
        case("scale", &[(x, P)], |_, v| v[0].scale(0.3)),
        case("exp", &[(x, V)], |_, v| v[0].exp()),
        // A recipe upon a recipe.
        case("silu of tanh of sigmoid", &[(x, V)], |_, v| v[0].sigmoid()?.tanh()?.silu()),
        case("map", &[(x, V)], |_, v| v[0].map("square", |x| x * x, |x, _| 2.0 * x)),
        case("custom", &[(x, P)], |tape, v| {
            let rule = |op: &str, x: &[Operand<'_>]| rules::linear_map(op, x[0]);
            tape.custom("through", &["x"], &[&v[0]], rule, |x| Ok(x[0].clone()), |_, _, grad| Ok(vec![grad.clone()]))
        }),
        case("log and sqrt", &[(x, V)], |_, v| v[0].sigmoid()?.log()?.exp()?.sqrt()),
        case("mul", &[(x, P), (x, R)], |_, v| v[0].mul(&v[1])),
        case("mul by a number of each token", &[(x, S(1)), (&[2, 4, 1], S(1))], |_, v| v[0].mul(&v[1])),
        case("add of a row of each sample", &[(x, S(1)), (&[2, 1, 6], R)], |_, v| v[0].add(&v[1])),
        case("sub of a dim with ones around it", &[(&[2, 3, 4, 5], I), (&[2, 1, 4, 1], I)], |_, v| v[0].sub(&v[1])),
        case("div by a row of ones and features", &[(x, R), (&[1, 1, 6], R)], |_, v| v[0].div(&v[1].exp()?)),
        case("select", &[(x, V), (&[4, 6], R)], |_, v| v[0].greater(&v[1])?.select(&v[0], &v[1])),
        case("expand_as", &[(&[2, 1, 6], R), (x, S(1))], |_, v| v[0].expand_as(&v[1])?.mul(&v[1])),
        case("max", &[(x, S(1))], |_, v| v[0].max(2)),
        case("index_select", &[(x, I)], |tape, v| v[0].index_select(1, &ids(tape, &[3, 0, 3], &[3], types(I)))),
        case("take_along_dim", &[(x, I)], |_, v| v[0].take_along_dim(2, &v[0].argmax(2)?.unsqueeze(2)?)),
        case("matmul", &[(&[2, 3, 4, 5], S(1)), (&[2, 3, 5, 6], S(1))], |_, v| v[0].matmul(&v[1])),
        case("matmul_nt", &[(x, S(2)), (&[2, 3, 6], S(2))], |_, v| v[0].matmul_nt(&v[1])),
        case("matmul_tn", &[(x, S(2)), (&[2, 4, 3], R)], |_, v| v[0].matmul_tn(&v[1])),
        case("mul by a row", &[(x, S(1)), (&[6], R)], |_, v| v[0].mul(&v[1])),
        case("sub", &[(x, P), (x, P)], |_, v| v[0].sub(&v[1])),
        case("sub of a row", &[(x, I), (&[6], I)], |_, v| v[0].sub(&v[1])),
        case("div", &[(x, I), (x, I)], |_, v| v[0].div(&v[1])),
        case("sum", &[(x, S(1))], |_, v| v[0].sum(1)),
        case("mean of each sample", &[(x, I)], |_, v| v[0].mean_per_sample()),
        case("softmax", &[(x, I)], |_, v| v[0].softmax()),
        case("mean_squared_error", &[(x, S(2)), (x, S(2))], |_, v| v[0].mean_squared_error(&v[1])),
        case("preference_loss", &[(x, I)], |tape, v| {
            let constant = |tensor| Ok::<_, Error>(tape.constant(tensor?, types(I)));
            let reference = constant(Tensor::from_slice(tape.device(), &[1.0_f64, 2.0, 0.5, 0.5], [2, 2]))?;
            let pairs = constant(Tensor::from_slice(tape.device(), &[1, 0], [2]))?;
            let answers = ids(tape, &[0, 1, 1, 0, -1, 1], &[2, 3], types(I));
            let groups = Some(TokenGroups { of: &answers, count: 2 });
            let losses = v[0].narrow(1, 0..3)?.cross_entropy(Targets { ids: &tokens(tape), groups })?;
            losses.preference_loss(&reference, &pairs, Preference { beta: 0.5, label_smoothing: 0.1 })
        }),
        case("reshape", &[(x, S(1))], |_, v| v[0].reshape(&[2, 2, 2, 6])),
        case("transpose", &[(&[2, 3, 4, 5], S(1))], |_, v| v[0].transpose(1, 3)),
        case("concat", &[(x, S(1)), (&[2, 4, 3], S(1))], |_, v| v[0].concat(&v[1], 2)),
        case("narrow", &[(x, S(2))], |_, v| v[0].narrow(1, 1..3)),
        case("widen", &[(x, S(2))], |_, v| v[0].widen(1, 7)),
        case("repeat", &[(x, R)], |_, v| v[0].repeat(2, 3, Axis::Tp)),
        case("copy", &[(x, I)], |_, v| v[0].copy(Axis::Tp)),
        case("all_reduce", &[(x, P)], |_, v| v[0].all_reduce(Axis::Tp)),
        case("all_reduce of what nobody else holds", &[(x, P)], |_, v| v[0].add(&v[0])?.all_reduce(Axis::Tp)),
        case("all_reduce_replicate", &[(x, P)], |_, v| v[0].all_reduce_replicate(Axis::Tp)),
        case("all_gather", &[(x, S(1))], |_, v| v[0].all_gather(Axis::Tp, 1)),
        case("all_gather of dim 0", &[(x, S(0))], |_, v| v[0].all_gather(Axis::Tp, 0)),
        case("all_gather_invariant", &[(x, S(2))], |_, v| v[0].all_gather_invariant(Axis::Tp, 2)),
        case("reduce_scatter", &[(x, P)], |_, v| v[0].reduce_scatter(Axis::Tp, 1)),
        case("layer_norm_operand", &[(x, I), (&[6], I), (&[6], I), (&[2, 6], S(0))], |_, v| {
            v[0].layer_norm_operand(&v[1], &v[2], 1e-5)?.copy(Axis::Tp)?.linear(&v[3], 1)
        }),
        case("split", &[(x, I)], |_, v| v[0].split(Axis::Tp, 2)),
        case("slice", &[(x, R)], |_, v| v[0].slice(Axis::Tp, 1)),
        case("all_to_all", &[(x, S(1))], |_, v| v[0].all_to_all(Axis::Tp, 1, 2)),
        case("as_partial", &[(x, V)], |_, v| v[0].as_partial(Axis::Tp)),
        case("max_reduce", &[(x, V)], |_, v| v[0].max_reduce(Axis::Tp)?.add(&v[0].max_reduce(Axis::Tp)?)),
    ]
}

/// The counts of a device, and the communications of a rank, after forward and after backward.
fn run(
    case: &Case,
    rank: &Arc<Rank>,
    device: Arc<dyn Device>,
    half: Option<HalfType>,
) -> (Counts, Counts, Vec<Record>) {
    let tape = tape_in(rank, Arc::clone(&device), Rc::new(Selective), half);
    let dtype = half.map_or(DType::F32, HalfType::dtype);
    let zeros =
        |(shape, ty): &(Vec<usize>, Ty)| tape.input(Tensor::zeros(&device, dtype, &shape[..]).unwrap(), types(*ty));
    let inputs: Vec<Var> = case.inputs.iter().map(zeros).collect();
    let output = (case.run)(&tape, &inputs).unwrap();
    let forward = counts(&device);
    if case.name != "max_reduce" {
        // The gradient of a matmul operand is not stored as an operand.
        let operand = half.is_none() && output.tensor().dtype() == DType::Bf16;
        let dtype = if operand { DType::F32 } else { output.tensor().dtype() };
        let seed = Tensor::zeros(&device, dtype, output.shape()).unwrap();
        tape.backward(&output, Seed::typed(seed, output.types().dual()), Weights::Now, &mut NoParams).unwrap();
        assert!(inputs.iter().all(|input| tape.take_grad(input).is_some()), "{}", case.name);
    }
    (forward, counts(&device), rank.log().drain())
}

#[test]
fn meta_and_record_count_what_cpu_and_threads_do() {
    for (precision, case) in
        [Precision::F32, Precision::Bf16].into_iter().flat_map(|p| cases().into_iter().map(move |case| (p, case)))
    {
        for half in [None, Some(HalfType::Bf16), Some(HalfType::F16)] {
            let of = |device: Arc<dyn Device>| if half.is_some() { Widened::device(device) } else { device };
            let real = on_mesh(MESH, |rank| run(&case, &rank, of(Arc::new(Cpu::new(precision))), half));
            for (world_rank, real) in real.iter().enumerate() {
                let rank = Arc::new(Rank::recording(&MESH.parse::<Mesh>().unwrap(), world_rank).unwrap());
                let meta = run(&case, &rank, of(Arc::new(Meta::new(precision))), half);
                assert_eq!(meta, *real, "{} in {precision:?}, stored in {half:?}, on rank {world_rank}", case.name);
            }
        }
    }
}

/// Values of an operation in bits: its output, then the gradients of its inputs.
fn bits(case: &Case, rank: &Arc<Rank>, device: Arc<dyn Device>) -> Vec<Vec<u64>> {
    let tape = tape_with(rank, Arc::clone(&device), Rc::new(Selective));
    let host = |name: &str, shape: &[usize]| -> Vec<f32> {
        crate::common::values(name, shape.iter().product()).iter().map(|&value| value as f32).collect()
    };
    let input = |(i, (shape, ty)): (usize, &(Vec<usize>, Ty))| {
        let values = host(&format!("input {i}"), shape);
        tape.input(Tensor::from_slice(&device, &values, &shape[..]).unwrap(), types(*ty))
    };
    let inputs: Vec<Var> = case.inputs.iter().enumerate().map(input).collect();
    let output = (case.run)(&tape, &inputs).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let bits = |tensor: &Tensor| crate::common::to_f64(tensor).into_iter().map(f64::to_bits).collect::<Vec<_>>();
    let mut all = vec![bits(output.tensor())];
    if case.name != "max_reduce" {
        let shape = output.shape();
        let seed = match output.tensor().dtype() {
            DType::F64 => Tensor::from_slice(&device, &vec![0.5_f64; shape.count()], shape),
            _ => Tensor::from_slice(&device, &host("seed", &shape), shape),
        };
        let done =
            tape.backward(&output, Seed::typed(seed.unwrap(), output.types().dual()), Weights::Now, &mut NoParams);
        done.unwrap_or_else(|error| panic!("{}: {error}", case.name));
        all.extend(inputs.iter().map(|input| bits(&tape.take_grad(input).unwrap())));
    }
    all
}

/// No operation, forward or backward, reads or writes device memory from the host. `map` runs a function of the host: a
/// device without host memory refuses it, which another test checks.
#[test]
fn every_operation_has_the_cpus_bits_where_the_host_reads_no_memory() {
    for (precision, case) in
        [Precision::F32, Precision::Bf16].into_iter().flat_map(|p| cases().into_iter().map(move |case| (p, case)))
    {
        if case.name == "map" {
            continue;
        }
        on_mesh(MESH, |rank| {
            let reference = bits(&case, &rank, Arc::new(Cpu::new(precision)));
            let world = opaque::communicator(Arc::clone(rank.world().communicator()));
            let rank = Arc::new(Rank::new(rank.mesh(), world).unwrap());
            let device = Opaque::device(Arc::new(Cpu::new(precision)));
            assert_eq!(bits(&case, &rank, Arc::clone(&device)), reference, "{} in {precision:?}", case.name);
        });
    }
}

#[test]
fn the_counts_are_those_of_the_mathematics() {
    let device = Meta::device();
    let rank = crate::common::alone();
    let tape = tape_on(&rank, Arc::clone(&device));
    let input = |shape: &[usize]| tape.input(Tensor::zeros(&device, DType::F32, shape).unwrap(), Types::NONE);
    let (x, w) = (input(&[2, 3, 5]), input(&[7, 5]));
    let bytes = |elements: usize| 4 * elements as u64;
    assert_eq!(counts(&device), (bytes(30 + 35), bytes(30 + 35), 0, 0));
    let y = x.linear(&w, 1).unwrap();
    assert_eq!(counts(&device), (bytes(30 + 35 + 42), bytes(30 + 35 + 42), 2 * 6 * 7 * 5, 0));
    let seed = Tensor::zeros(&device, DType::F32, y.shape()).unwrap();
    tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
    assert_eq!(device.meter().flops(Work::Matmul), 3 * 2 * 6 * 7 * 5, "backward is two products of that size");
    drop((x, w, y, tape));
    assert_eq!(device.meter().live_bytes(), 0);
}

/// A device with memory and no kernels, such as the beginning of a downstream crate.
#[derive(Debug, Default)]
struct Bare(Meter);

impl Device for Bare {
    fn name(&self) -> &str {
        "bare"
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> {
        Ok(Buffer::zeros(dtype, count))
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.alloc(dtype, count)
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        Ok(host.clone())
    }

    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        Ok(buffer.clone())
    }

    fn meter(&self) -> &Meter {
        &self.0
    }
}

#[test]
fn a_missing_kernel_names_the_operation_and_the_device() {
    let device: Arc<dyn Device> = Arc::new(Bare::default());
    let tape = tape_on(&crate::common::alone(), Arc::clone(&device));
    let input = |shape: &[usize]| tape.input(Tensor::zeros(&device, DType::F32, shape).unwrap(), Types::NONE);
    let x = input(&[2, 3, 3]);
    let tokens = ids(&tape, &[0; 6], &[2, 3], Types::NONE);
    for (operation, result, family) in [
        ("linear", x.linear(&x, 1), "matmul"),
        ("linear_bias", x.linear_bias(&x, &input(&[2, 3]), 1), "matmul"),
        ("gelu", x.gelu(), "pointwise"),
        ("dropout", x.dropout(0.5, "x"), "pointwise"),
        ("layer_norm", x.layer_norm(&input(&[3]), &input(&[3]), 1e-5), "norm"),
        ("relu", x.relu(), "pointwise"),
        ("tanh", x.tanh(), "elementwise"),
        ("mul", x.mul(&x), "elementwise"),
        ("square", x.map("square", |x| x * x, |x, _| 2.0 * x), "elementwise"),
        ("mean", x.mean(1), "reduction"),
        ("max", x.max(1), "indexing"),
        ("matmul", x.matmul(&x), "grouped"),
        ("softmax", x.softmax(), "reduction"),
        ("mean_squared_error", x.mean_squared_error(&x), "reduction"),
        ("conv2d", input(&[1, 3, 3, 2]).conv2d(&input(&[4, 3, 3, 2]), None, 1, 1), "window"),
        ("max_pool", input(&[1, 3, 3, 2]).max_pool([2, 2], 1, 0), "window"),
        ("group_norm", input(&[1, 3, 3, 2]).group_norm(1, &input(&[2]), &input(&[2]), 1e-5), "channel norm"),
        ("causal_attention", input(&[1, 2, 3, 1, 1]).causal_attention(None, None), "attention"),
        ("embedding", tokens.embedding(&input(&[4, 3])), "embedding"),
        ("cross_entropy", x.cross_entropy(&tokens), "loss"),
    ] {
        let error = result.unwrap_err().to_string();
        assert_eq!(error, format!("{operation}: device bare has no {family} operations"));
    }
}

/// A device with its own kernels that cannot run functions of the host.
#[derive(Debug, Default)]
struct Closed(Bare);

impl Elementwise for Closed {
    fn map(&self, _f: Map, x: &Buffer) -> Result<Buffer> {
        Ok(x.clone())
    }

    fn map_grad(&self, _f: Map, dy: &Buffer, _x: &Buffer) -> Result<Buffer> {
        Ok(dy.clone())
    }

    fn zip(&self, _f: Zip, x: &Buffer, _y: &Buffer, _shape: [usize; 3]) -> Result<Buffer> {
        Ok(x.clone())
    }
}

impl Device for Closed {
    fn name(&self) -> &str {
        "closed"
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.0.alloc(dtype, count)
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.0.zeros(dtype, count)
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        self.0.upload(host)
    }

    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        self.0.download(buffer)
    }

    fn meter(&self) -> &Meter {
        self.0.meter()
    }

    fn kernels(&self) -> Kernels<'_> {
        Kernels { elementwise: Some(self), ..Kernels::default() }
    }
}

#[test]
fn a_device_that_runs_no_functions_of_the_host_says_so() {
    let recorder = meshwork_core::profile::Recorder::new(std::time::Instant::now());
    let closed: Arc<dyn Device> = Arc::new(Closed::default());
    for device in [closed.clone(), meshwork_tensor::profiled::Profiled::device(closed, recorder)] {
        let tape = tape_on(&crate::common::alone(), Arc::clone(&device));
        let x = tape.input(Tensor::zeros(&device, DType::F32, [2, 3]).unwrap(), Types::NONE);
        x.tanh().unwrap();
        assert_eq!(
            x.map("square", |x| x * x, |x, _| 2.0 * x).unwrap_err().to_string(),
            "square: device closed runs no functions of the host: build it of operations that the device has, or give the device \
             a kernel"
        );
    }
}

#[test]
fn an_unsupported_dtype_names_the_operation_the_device_and_what_would_do() {
    let device = Cpu::device();
    let tape = tape_on(&crate::common::alone(), Arc::clone(&device));
    let x = tape.input(Tensor::zeros(&device, DType::Bf16, [2, 2]).unwrap(), Types::NONE);
    let error = x.relu().unwrap_err();
    assert!(matches!(error, Error::DType { dtype: DType::Bf16, .. }));
    assert_eq!(error.to_string(), "relu: dtype bf16 on device cpu is not supported: use f32 or f64");
    let mixed = tape.input(Tensor::zeros(&device, DType::F64, [2, 2]).unwrap(), Types::NONE);
    let single = tape.input(Tensor::zeros(&device, DType::F32, [2, 2]).unwrap(), Types::NONE);
    let error = single.add(&mixed).unwrap_err().to_string();
    assert_eq!(error, "the buffer holds f64, it was asked for as f32");
}

/// Evaluating keeps nothing for backward, and dropout is the identity.
#[test]
fn evaluation_saves_nothing() {
    let device = Cpu::device();
    let rank = crate::common::alone();
    let mut all = Declarations::new();
    let w = all.declare("w", &[8, 8], Placement::replicated(), Role::Weight, Init::Normal { std: 1.0 }).unwrap();
    let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &[vec![w]], 0).unwrap();
    let tape = Tape::new(rank, Arc::new(params), Arc::clone(&device), Mode::Evaluate, POSITION);
    let x = tape.input(Tensor::zeros(&device, DType::F32, [4, 8]).unwrap(), Types::NONE);
    let before = device.meter().live_bytes();
    let y = x.linear(&tape.param(w).unwrap(), 1).unwrap().gelu().unwrap().dropout(0.5, "x").unwrap();
    assert_eq!(device.meter().live_bytes() - before, y.tensor().buffer().bytes() as u64, "only the output lives on");
    let seed = y.tensor().clone();
    let error = tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap_err().to_string();
    assert_eq!(error, "backward: the output depends on nothing that needs a gradient");
}
