//! Every operation of `Var` over all types of its operands, on 1 to 4 ranks: testkit's `check_op` accepts what their
//! rules accept.

use meshwork_core::{Axis, Ty};
use meshwork_tensor::op::{Mask, Moments, Preference, Rotary, RowGroups, Targets, TokenGroups};
use meshwork_tensor::{Result, Tensor, Var};
use meshwork_testkit::check::{CheckError, OpInput, Problem, Report, check_op};
use std::rc::Rc;

fn x(shape: &[usize]) -> OpInput {
    OpInput::value("x", shape)
}

fn y(shape: &[usize]) -> OpInput {
    OpInput::value("y", shape)
}

#[track_caller]
fn check(name: &str, inputs: &[OpInput], op: impl Fn(&[Var]) -> Result<Var> + Sync) -> Report {
    check_op(name, inputs, op).unwrap_or_else(|error| panic!("{error}"))
}

/// With each operand but the first a value, then a parameter.
#[track_caller]
fn check_weights(
    name: &str,
    x: OpInput,
    weights: &[(&'static str, &[usize])],
    op: impl Fn(&[Var]) -> Result<Var> + Sync,
) {
    for kind in [OpInput::value, OpInput::parameter] {
        let weights = weights.iter().map(|&(name, shape)| kind(name, shape));
        check(name, &[x.clone()].into_iter().chain(weights).collect::<Vec<_>>(), &op);
    }
}

#[test]
fn functions_of_one_number() {
    type Op = fn(&Var) -> Result<Var>;
    let pointwise: [(&str, Op); 9] = [
        ("log", |x| x.exp()?.log()),
        ("sqrt", |x| x.exp()?.sqrt()),
        ("exp", Var::exp),
        ("tanh", Var::tanh),
        ("sigmoid", Var::sigmoid),
        ("silu", Var::silu),
        ("soft_cap", |x| x.soft_cap(1.5)),
        ("gelu", Var::gelu),
        ("relu", Var::relu),
    ];
    for (name, op) in pointwise {
        // Replicate, Invariant, Varying and two shards; Partial is refused.
        let report = check(name, &[x(&[3, 5])], |v| op(&v[0]));
        assert_eq!((report.accepted.len(), report.refused), (5, 1), "{report}");
    }
    let report = check("scale", &[x(&[3, 5])], |v| v[0].scale(-0.3));
    assert_eq!((report.accepted.len(), report.refused), (6, 0), "{report}");
    check("map", &[x(&[3, 5])], |v| v[0].map("cube", |x| x * x * x, |x, _| 3.0 * x * x));
    check("dropout", &[x(&[3, 5])], |v| v[0].dropout(0.5, "layer"));
    check("jitter", &[x(&[3, 5])], |v| v[0].jitter(0.5, "layer"));
}

#[test]
fn functions_of_two_values() {
    for shape in [&[3, 5][..], &[5]] {
        check("mul", &[x(&[3, 5]), y(shape)], |v| v[0].mul(&v[1]));
        check("div", &[x(&[3, 5]), y(shape)], |v| v[0].div(&v[1]));
        check("sub", &[x(&[3, 5]), y(shape)], |v| v[0].sub(&v[1]));
    }
    check("add", &[x(&[3, 5]), y(&[3, 5])], |v| v[0].add(&v[1]));
    check("greater", &[x(&[3, 5]), y(&[5])], |v| v[0].mul(&v[0].greater(&v[1])?));
    check_weights("bias", x(&[1, 3, 5]), &[("b", &[5])], |v| v[0].bias(&v[1]));
    check_weights("structural bias", x(&[3, 1, 5]), &[("b", &[1, 5])], |v| v[0].bias(&v[1]));
    check("bias_residual", &[x(&[1, 3]), OpInput::value("b", &[3]), y(&[1, 3])], |v| v[0].bias_residual(&v[1], &v[2]));
    check("bias_residual", &[x(&[1, 3]), OpInput::parameter("b", &[3]), y(&[1, 3])], |v| {
        v[0].bias_residual(&v[1], &v[2])
    });
    check("mean_squared_error", &[x(&[3, 5]), y(&[3, 5])], |v| v[0].mean_squared_error(&v[1]));
    let of = Preference { beta: 0.7, label_smoothing: 0.1 };
    let pairs = OpInput::ids("pairs", &[3], 3);
    check("preference_loss", &[x(&[3, 4]).fixed(&[1]), y(&[3, 4]).fixed(&[1]), pairs], |v| {
        v[0].preference_loss(&v[1], &v[2], of)
    });
}

/// Dims of extent 1, of either operand, at the front, inside and at the end. With y as a parameter too, whose gradient
/// goes other ways.
#[test]
fn broadcasting() {
    type Op = fn(&Var, &Var) -> Result<Var>;
    let ops: [(&str, Op); 6] = [
        ("add", Var::add),
        ("sub", Var::sub),
        ("mul", Var::mul),
        ("div", |x, y| x.div(&y.exp()?)),
        ("expand_as", |x, y| y.expand_as(x)),
        ("select", |x, y| x.scale(0.7)?.greater(y)?.select(x, y)),
    ];
    let shapes: [(&[usize], &[usize]); 4] =
        [(&[3, 1, 5], &[1]), (&[3, 3, 1], &[2]), (&[1, 3, 1], &[0, 2]), (&[3, 1], &[1])];
    for (name, op) in ops {
        for (shape, ones) in shapes {
            for kind in [OpInput::value, OpInput::parameter] {
                let y = kind("y", shape).fixed(ones);
                check(&format!("{name} of {shape:?}"), &[x(&[3, 3, 5]), y], |v| op(&v[0], &v[1]));
            }
        }
    }
    for (name, op) in &ops[..4] {
        let y = y(&[3, 1, 5]).fixed(&[1]);
        check(&format!("{name}, the smaller one first"), &[x(&[3, 3, 5]), y], |v| op(&v[1], &v[0]));
    }
}

#[test]
fn elements_chosen_along_a_dim() {
    for dim in 0..3 {
        check("max", &[x(&[3, 2, 5])], |v| v[0].max(dim));
        let index = OpInput::ids("index", &[4], 3).fixed(&[0]);
        check("index_select", &[x(&[3, 3, 3]), index], |v| v[0].index_select(dim, &v[1]));
        let index = OpInput::ids("index", &[3, 3, 3], 3);
        check("take_along_dim", &[x(&[3, 3, 3]), index], |v| v[0].take_along_dim(dim, &v[1]));
    }
}

#[test]
fn functions_along_a_dim() {
    check("softmax", &[x(&[3, 5])], |v| v[0].softmax());
    check("sum", &[x(&[3, 1, 5])], |v| v[0].sum(1));
    check("mean", &[x(&[3, 1, 5])], |v| v[0].mean(0));
    check("sum_per_sample", &[x(&[3, 1, 5])], |v| v[0].sum_per_sample());
    check("mean_per_sample", &[x(&[3, 1, 5])], |v| v[0].mean_per_sample());
    check_weights("layer_norm", x(&[1, 3, 5]), &[("gamma", &[5]), ("beta", &[5])], |v| {
        v[0].layer_norm(&v[1], &v[2], 1e-2)
    });
    check_weights("layer_norm without beta", x(&[1, 3, 5]), &[("gamma", &[5])], |v| v[0].layer_norm(&v[1], None, 1e-2));
    check_weights("rms_norm", x(&[1, 3, 5]), &[("weight", &[5])], |v| v[0].rms_norm(&v[1], 1e-2));
}

#[test]
fn other_dims() {
    let local = |v: &Var| v.shape().to_vec();
    check("reshape to fewer", &[x(&[3, 1, 5]).fixed(&[1])], |v| {
        let [a, b, c] = local(&v[0])[..] else { unreachable!() };
        v[0].reshape(&[a, b * c])
    });
    check("reshape to more", &[x(&[3, 10]).fixed(&[1])], |v| v[0].reshape(&[local(&v[0])[0], local(&v[0])[1] / 5, 5]));
    check("unflatten", &[x(&[3, 10]).fixed(&[1])], |v| v[0].unflatten(1, &[local(&v[0])[1] / 5, 5]));
    check("flatten", &[x(&[3, 5, 2]).fixed(&[1])], |v| v[0].flatten(1..3));
    check("flatten behind an extent of 1", &[x(&[3, 1, 5]).fixed(&[1])], |v| v[0].flatten(1..3));
    check("unsqueeze", &[x(&[3, 1, 5])], |v| v[0].unsqueeze(2));
    check("squeeze", &[x(&[3, 1, 5]).fixed(&[1])], |v| v[0].squeeze(1));
    check("transpose", &[x(&[3, 1, 5])], |v| v[0].transpose(1, 2));
    check("narrow", &[x(&[3, 5, 1])], |v| v[0].narrow(1, 1..4));
    check("widen", &[x(&[3, 5, 1]).fixed(&[1])], |v| v[0].widen(1, 8));
    // Its new dim has 12 elements, whatever the ranks.
    check("repeat", &[x(&[3, 5])], |v| v[0].repeat(1, 12 / v[0].tape().rank().mesh().degree(Axis::Tp), Axis::Tp));
    for dim in 1..3 {
        check("concat", &[x(&[1, 3, 5]), y(&[1, 3, 5])], |v| v[0].concat(&v[1], dim));
    }
}

#[test]
fn products() {
    check_weights("linear", x(&[1, 3, 5]), &[("w", &[3, 5])], |v| v[0].linear(&v[1], 1));
    check_weights("linear over two dims", x(&[3, 1, 5]), &[("w", &[3, 1, 5])], |v| v[0].linear(&v[1], 2));
    let with_bias: [(_, &[usize]); 2] = [("w", &[3, 5]), ("b", &[3])];
    check_weights("linear_bias", x(&[1, 3, 5]), &with_bias, |v| v[0].linear_bias(&v[1], &v[2], 1));
    check_weights("linear_gelu", x(&[1, 3, 5]), &with_bias, |v| v[0].linear_gelu(&v[1], &v[2], 1));
    check_weights("linear_gelu without bias", x(&[1, 5]), &with_bias[..1], |v| v[0].linear_gelu(&v[1], None, 1));
    check_weights("linear_plus", x(&[3, 5]), &[("w", &[3, 5]), ("v", &[3, 5])], |v| {
        v[0].linear_plus(&v[1], None, 1, [&v[0], &v[2]])
    });
    for which in 0..2 {
        check_weights("linear_pair", x(&[3, 5]), &[("v", &[3, 5]), ("w", &[3, 5]), ("b", &[3])], |v| {
            let pair = v[0].linear_pair([(&v[1], None), (&v[2], Some(&v[3]))], 1)?;
            // Both are read: the gradient of x is that of both.
            pair[which].add(&pair[1 - which])
        });
    }
}

#[test]
fn products_of_matrices() {
    type Op = fn(&Var, &Var) -> Result<Var>;
    let forms: [(&str, Op, [&[usize]; 2]); 3] = [
        ("matmul", Var::matmul, [&[2, 3, 5], &[2, 5, 4]]),
        ("matmul_nt", Var::matmul_nt, [&[2, 3, 5], &[2, 4, 5]]),
        ("matmul_tn", Var::matmul_tn, [&[2, 5, 3], &[2, 5, 4]]),
    ];
    for (name, op, [of_x, of_y]) in forms {
        let report = check(name, &[x(of_x), y(of_y)], |v| op(&v[0], &v[1]));
        assert_eq!(report.accepted.len(), 11, "{report}");
        check(name, &[x(&of_x[1..]), y(&of_y[1..])], |v| op(&v[0], &v[1]));
    }
}

/// Two groups of one row and of the others, on an axis beside tp.
#[test]
fn products_of_groups() {
    let groups = |x: &Var| {
        let (rows, sample) = (x.shape()[0], 0..1);
        Rc::new(RowGroups::new(Axis::Dp, vec![sample], vec![vec![1], vec![rows - 1]]))
    };
    for kind in [OpInput::value, OpInput::parameter] {
        check("grouped_linear", &[x(&[3, 5]), kind("w", &[2, 3, 5]).fixed(&[0])], |v| {
            v[0].grouped_linear(&v[1], 1, &groups(&v[0]))
        });
        check("grouped_linear over two dims", &[x(&[3, 1, 5]), kind("w", &[2, 3, 1, 5]).fixed(&[0])], |v| {
            v[0].grouped_linear(&v[1], 2, &groups(&v[0]))
        });
        check("grouped_bias", &[x(&[3, 5]), kind("b", &[2, 5]).fixed(&[0])], |v| {
            v[0].grouped_bias(&v[1], &groups(&v[0]))
        });
    }
}

#[test]
fn swiglu() {
    check("swiglu", &[x(&[3, 5, 2]).fixed(&[2])], |v| v[0].swiglu());
    for kind in [OpInput::value, OpInput::parameter] {
        check("linear_swiglu", &[x(&[1, 3, 5]), kind("w", &[3, 2, 5]).fixed(&[1])], |v| v[0].linear_swiglu(&v[1], 1));
    }
}

#[test]
fn attention() {
    let qkv = || OpInput::value("qkv", &[1, 3, 3, 1, 3]).fixed(&[2]);
    check("causal_attention", &[qkv()], |v| v[0].causal_attention(None, None));
    check("causal_attention with dropout", &[qkv()], |v| v[0].causal_attention(None, Some((0.4, "attn"))));
    let (q, kv) = (OpInput::value("q", &[1, 3, 3, 2]).fixed(&[3]), OpInput::value("kv", &[1, 3, 2, 2]).fixed(&[2]));
    for rotary in [None, Some(Rotary::new(10.0))] {
        check("grouped_attention", &[q.clone(), kv.clone()], |v| v[0].grouped_attention(&v[1], rotary, None, None));
    }
    check("self_attention", &[qkv()], |v| v[0].self_attention(Mask::BIDIRECTIONAL, None));
    let (q, kv) = (x(&[2, 3, 2, 2]).fixed(&[3]), OpInput::value("kv", &[2, 2, 2, 4]).fixed(&[2]));
    let lengths = OpInput::ids("lengths", &[2], 3);
    let report = check("cross attention", &[q.clone(), kv, lengths], |v| {
        v[0].grouped_attention(&v[1], None, Mask { lengths: Some(&v[2]), ..Mask::CROSS }, None)
    });
    // Samples cut alike, and heads or queries cut where the lengths are those of all samples.
    assert!(report.accepted.len() >= 8, "{report}");
    for bias in [OpInput::value, OpInput::parameter].map(|kind| kind("bias", &[2, 3, 3])) {
        let kv = OpInput::value("kv", &[2, 3, 2, 4]).fixed(&[2]);
        let report = check("a bias of pairs", &[q.clone(), kv, bias], |v| {
            v[0].grouped_attention(&v[1], None, Mask { bias: Some(&v[2]), ..Mask::BIDIRECTIONAL }, None)
        });
        assert!(report.accepted.len() >= 2, "{report}");
    }
}

#[test]
fn tables() {
    for kind in [OpInput::value, OpInput::parameter] {
        check("embedding", &[OpInput::ids("ids", &[3, 1], 5), kind("table", &[5, 3])], |v| v[0].embedding(&v[1]));
        check("positions", &[x(&[1, 3, 5]), kind("table", &[7, 5])], |v| v[0].positions(&v[1]));
        check("vocab_parallel_embedding", &[OpInput::ids("ids", &[3, 1], 5), kind("table", &[5, 3])], |v| {
            let tp = v[0].tape().rank().mesh().degree(Axis::Tp);
            v[0].vocab_parallel_embedding(&v[1], Axis::Tp, v[1].shape()[0] * tp)
        });
    }
    let logits = || OpInput::value("logits", &[3, 1, 5]);
    let targets = || OpInput::ids("targets", &[3, 1], 5);
    check("cross_entropy", &[logits(), targets()], |v| v[0].cross_entropy(&v[1]));
    check("vocab_parallel_cross_entropy", &[logits(), targets()], |v| {
        let tp = v[0].tape().rank().mesh().degree(Axis::Tp);
        v[0].vocab_parallel_cross_entropy(&v[1], Axis::Tp, v[0].shape()[2] * tp)
    });
    let (x, w) = (|| OpInput::value("x", &[3, 1, 2]), || OpInput::parameter("weight", &[5, 2]));
    check("linear_cross_entropy", &[x(), w(), targets()], |v| v[0].linear_cross_entropy(&v[1], &v[2], 2));
    check("vocab_parallel_linear_cross_entropy", &[x(), w(), targets()], |v| {
        let tp = v[0].tape().rank().mesh().degree(Axis::Tp);
        v[0].vocab_parallel_linear_cross_entropy(&v[1], &v[2], Axis::Tp, v[1].shape()[0] * tp, 2)
    });
    // The same by groups of tokens, which lie as the targets do.
    fn by<'a>(ids: &'a Var, groups: &'a Var) -> Targets<'a> {
        Targets { ids, groups: Some(TokenGroups { of: groups, count: 2 }) }
    }
    let groups = || OpInput::ids("groups", &[3, 1], 2);
    check("cross_entropy", &[logits(), targets(), groups()], |v| v[0].cross_entropy(by(&v[1], &v[2])));
    check("vocab_parallel_linear_cross_entropy", &[x(), w(), targets(), groups()], |v| {
        let tp = v[0].tape().rank().mesh().degree(Axis::Tp);
        v[0].vocab_parallel_linear_cross_entropy(&v[1], by(&v[2], &v[3]), Axis::Tp, v[1].shape()[0] * tp, 2)
    });
}

#[test]
fn images() {
    let images = || x(&[1, 3, 3, 1]);
    for kind in [OpInput::value, OpInput::parameter] {
        let w = || kind("w", &[3, 3, 1, 1]).fixed(&[1, 2]);
        check("conv2d", &[images(), w()], |v| v[0].conv2d(&v[1], None, 1, 1));
        check("conv2d with bias", &[images(), w(), kind("b", &[3])], |v| v[0].conv2d(&v[1], Some(&v[2]), 2, 1));
    }
    check("max_pool", &[images()], |v| v[0].max_pool([2, 3], 1, 1));
    check("average_pool", &[images()], |v| v[0].average_pool([2, 3], 1, 1));
    check("global_average_pool", &[images()], |v| v[0].global_average_pool());
    let vectors: [(_, &[usize]); 2] = [("gamma", &[3]), ("beta", &[3])];
    check_weights("group_norm", x(&[1, 1, 3, 3]), &vectors, |v| v[0].group_norm(3, &v[1], &v[2], 1e-2));
    check_weights("batch_norm_with", x(&[1, 1, 3, 3]), &vectors, |v| {
        let vector = |value: f64| match v[0].tensor().dtype() {
            meshwork_core::DType::F64 => {
                Tensor::from_slice(v[0].tape().device(), &vec![value; v[0].shape()[3]], [v[0].shape()[3]])
            }
            _ => Tensor::from_slice(v[0].tape().device(), &vec![value as f32; v[0].shape()[3]], [v[0].shape()[3]]),
        };
        v[0].batch_norm_with(&v[1], &v[2], &Moments { mean: vector(0.5)?, variance: vector(2.0)? }, 1e-2)
    });
}

/// Its statistics are those of the samples of a rank: the one operation that depends on the mesh, as its documentation
/// says.
#[test]
fn batch_norm_depends_on_the_mesh_where_samples_are_cut() {
    let inputs = [x(&[3, 1, 3, 3]), OpInput::value("gamma", &[3]), OpInput::value("beta", &[3])];
    let error = check_op("batch_norm", &inputs, |v| Ok(v[0].batch_norm(&v[1], &v[2], 1e-2)?.0)).unwrap_err();
    let CheckError::Wrong { cases, .. } = &error else { panic!("{error}") };
    assert_eq!(cases.len(), 1, "{error}");
    assert!(cases[0].types[0].1 == Ty::Shard(0) && cases[0].degree == 2, "{error}");
    assert!(matches!(&cases[0].problem, Problem::Differs { what, .. } if what == "the output"), "{error}");
}

#[test]
fn collectives() {
    type Op = fn(&Var) -> Result<Var>;
    let collectives: [(&str, Op); 10] = [
        ("copy", |x| x.copy(Axis::Tp)),
        ("all_reduce", |x| x.all_reduce(Axis::Tp)),
        ("all_reduce_replicate", |x| x.all_reduce_replicate(Axis::Tp)),
        ("all_gather", |x| x.all_gather(Axis::Tp, 1)),
        ("all_gather_invariant", |x| x.all_gather_invariant(Axis::Tp, 1)),
        ("reduce_scatter", |x| x.reduce_scatter(Axis::Tp, 1)),
        ("split", |x| x.split(Axis::Tp, 1)),
        ("slice", |x| x.slice(Axis::Tp, 1)),
        ("all_to_all", |x| x.all_to_all(Axis::Tp, 1, 2)),
        ("as_partial", |x| x.as_partial(Axis::Tp)),
    ];
    for (name, op) in collectives {
        let report = check(name, &[x(&[3, 5, 1])], |v| op(&v[0]));
        assert_eq!(report.accepted.len(), 1, "{report}");
    }
}
