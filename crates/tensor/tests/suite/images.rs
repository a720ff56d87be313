//! Operations on images against their equations, written out in f64; and the guarantees about their bits, weight
//! gradients and types.

use crate::common::{NoParams, POSITION, alone, input, on_mesh, on_tp, tape_of, tape_on, to_f64, values};
use meshwork_core::{Axis, Ty, Types, tree};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Position, Weights};
use meshwork_tensor::{Declarations, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use meshwork_testkit::parity::assert_close;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const EPS: f64 = 1e-5;

fn single(tape: &Tape, values: &[f64], shape: &[usize], types: Types) -> Var {
    let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
    tape.input(Tensor::from_slice(tape.device(), &values, shape).unwrap(), types)
}

/// Rounded to f32, so that an f32 run and an f64 oracle start from the same numbers.
fn rounded(name: &str, count: usize) -> Vec<f64> {
    values(name, count).into_iter().map(|value| f64::from(value as f32)).collect()
}

/// The convolution by its equation.
fn naive_conv(x: &[f64], xs: [usize; 4], w: &[f64], ws: [usize; 4], stride: usize, padding: usize) -> Vec<f64> {
    let ([n, h, wd, c], [o, kh, kw, _]) = (xs, ws);
    let (oh, ow) = ((h + 2 * padding - kh) / stride + 1, (wd + 2 * padding - kw) / stride + 1);
    let mut y = Vec::new();
    for (s, i, j, f) in
        (0..n).flat_map(|s| (0..oh).flat_map(move |i| (0..ow).flat_map(move |j| (0..o).map(move |f| (s, i, j, f)))))
    {
        let mut sum = 0.0;
        for (k, l, ch) in (0..kh).flat_map(|k| (0..kw).flat_map(move |l| (0..c).map(move |ch| (k, l, ch)))) {
            let (row, column) = (i * stride + k, j * stride + l);
            if (padding..h + padding).contains(&row) && (padding..wd + padding).contains(&column) {
                let at = ((s * h + row - padding) * wd + column - padding) * c + ch;
                sum += x[at] * w[((f * kh + k) * kw + l) * c + ch];
            }
        }
        y.push(sum);
    }
    y
}

#[test]
fn a_convolution_is_its_equation() {
    let xs = [3, 7, 5, 4];
    for (o, kernel, stride, padding) in
        [(6, [3, 3], 1, 1), (5, [3, 3], 2, 1), (2, [1, 1], 1, 0), (3, [1, 1], 2, 0), (4, [5, 2], 3, 2)]
    {
        let ws = [o, kernel[0], kernel[1], 4];
        let (x, w) = (rounded("x", xs.iter().product()), rounded("w", ws.iter().product()));
        let want = naive_conv(&x, xs, &w, ws, stride, padding);
        let tape = tape_of(&alone());
        let (xv, wv) = (single(&tape, &x, &xs, Types::NONE), single(&tape, &w, &ws, Types::NONE));
        let y = xv.conv2d(&wv, None, stride, padding).unwrap();
        assert_close("conv2d", &to_f64(y.tensor()), &want, 0.0);
        let b = rounded("b", o);
        let y = xv.conv2d(&wv, Some(&single(&tape, &b, &[o], Types::NONE)), stride, padding).unwrap();
        let want: Vec<f64> = want.iter().enumerate().map(|(i, y)| y + b[i % o]).collect();
        assert_close("conv2d_bias", &to_f64(y.tensor()), &want, 0.0);
    }
}

/// (x - mean) / √(variance + eps) · gamma + beta over the elements that `group` gives the same number.
fn naive_norm(x: &[f64], gamma: &[f64], beta: &[f64], group: impl Fn(usize) -> usize) -> Vec<f64> {
    let c = gamma.len();
    let groups: Vec<usize> = (0..x.len()).map(group).collect();
    let moments: BTreeMap<usize, (f64, f64)> = groups
        .iter()
        .map(|&g| {
            let members: Vec<f64> = (0..x.len()).filter(|&at| groups[at] == g).map(|at| x[at]).collect();
            let mean = members.iter().sum::<f64>() / members.len() as f64;
            (g, (mean, members.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / members.len() as f64))
        })
        .collect();
    let y = |at: usize| {
        let (mean, variance) = moments[&groups[at]];
        (x[at] - mean) / (variance + EPS).sqrt() * gamma[at % c] + beta[at % c]
    };
    (0..x.len()).map(y).collect()
}

#[test]
fn norms_over_channels_are_their_equations() {
    // More pixels than are summed in one part.
    let shape = [3, 9, 8, 6];
    let (x, gamma, beta) = (rounded("x", shape.iter().product()), rounded("gamma", 6), rounded("beta", 6));
    let tape = tape_of(&alone());
    let [xv, gv, bv] = [(&x, &shape[..]), (&gamma, &[6]), (&beta, &[6])]
        .map(|(values, shape)| single(&tape, values, shape, Types::NONE));
    let (y, moments) = xv.batch_norm(&gv, &bv, EPS).unwrap();
    assert_close("batch_norm", &to_f64(y.tensor()), &naive_norm(&x, &gamma, &beta, |at| at % 6), 0.0);
    let again = xv.batch_norm_with(&gv, &bv, &moments, EPS).unwrap();
    assert_eq!(to_f64(again.tensor()), to_f64(y.tensor()), "given its own statistics");
    let scaled = xv.batch_norm(&gv, None, EPS).unwrap().0;
    assert_close(
        "batch_norm without beta",
        &to_f64(scaled.tensor()),
        &naive_norm(&x, &gamma, &[0.0; 6], |at| at % 6),
        0.0,
    );
    let again = xv.batch_norm_with(&gv, None, &moments, EPS).unwrap();
    assert_eq!(to_f64(again.tensor()), to_f64(scaled.tensor()), "given its own statistics, without beta");
    for groups in [1, 2, 3, 6] {
        for (beta, bv) in [(&beta[..], Some(&bv)), (&[0.0; 6], None)] {
            let want = naive_norm(&x, &gamma, beta, |at| (at / (9 * 8 * 6)) * 6 + at % 6 / (6 / groups));
            let y = xv.group_norm(groups, &gv, bv, EPS).unwrap();
            assert_close(&format!("group_norm in {groups}, beta {beta:?}"), &to_f64(y.tensor()), &want, 0.0);
        }
    }
}

/// Every sample alone has the same bits as in a batch: in a convolution, a pool and a group norm, forward and input
/// gradient. The batch is large enough for several threads.
#[test]
fn bits_do_not_depend_on_the_other_samples() {
    let (samples, image) = (24, [12, 12, 16]);
    let n: usize = image.iter().product();
    let x = values("x", samples * n);
    let run = |range: Range<usize>| {
        let tape = tape_of(&alone());
        let shape = [range.len(), image[0], image[1], image[2]];
        let x = single(&tape, &x[range.start * n..range.end * n], &shape, Types::NONE);
        let w = single(&tape, &values("w", 32 * 9 * 16), &[32, 3, 3, 16], Types::NONE);
        let [gamma, beta] = ["gamma", "beta"].map(|name| single(&tape, &values(name, 32), &[32], Types::NONE));
        let y = x.conv2d(&w, Some(&beta), 1, 1).unwrap().group_norm(4, &gamma, &beta, EPS).unwrap();
        let y = y.relu().unwrap().max_pool([2, 2], 2, 0).unwrap().average_pool([3, 3], 1, 1).unwrap();
        let seed: Vec<f32> = values("seed", y.shape()[1..].iter().product()).iter().map(|&x| x as f32).collect();
        let seed = Tensor::from_slice(tape.device(), &seed.repeat(range.len()), y.shape()).unwrap();
        tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
        (to_f64(y.tensor()), to_f64(&tape.take_grad(&x).unwrap()))
    };
    let (y, dx) = run(0..samples);
    for sample in [0, 7, samples - 1] {
        let (one, done) = run(sample..sample + 1);
        assert!(one == y[sample * one.len()..][..one.len()], "forward of sample {sample}");
        assert!(done == dx[sample * n..][..n], "input gradient of sample {sample}");
    }
}

/// A small network: convolution with and without bias, group norm, pools, and a head over the whole image.
struct Network {
    params: Arc<Params>,
    ids: BTreeMap<&'static str, ParamId>,
    batch_norm: bool,
}

impl Network {
    fn new(mut declarations: Declarations, batch_norm: bool, beta: bool) -> Self {
        let rank = alone();
        let mut ids = BTreeMap::new();
        let normal = Init::Normal { std: 0.5 };
        for (name, dims, role) in [
            ("conv", &[6, 3, 3, 2][..], Role::Weight),
            ("bias", &[6], Role::Bias),
            ("gamma", &[6], Role::Norm),
            ("beta", &[6], Role::Norm),
            ("pixels", &[6, 1, 1, 6], Role::Weight),
            ("head", &[3, 2, 2, 6], Role::Weight),
        ] {
            if beta || name != "beta" {
                ids.insert(name, declarations.declare(name, dims, Placement::replicated(), role, normal).unwrap());
            }
        }
        let (device, layout) = (Cpu::device(), [declarations.ids().collect()]);
        let params = Params::new(Arc::new(declarations), rank.mesh(), rank.coords(), &device, &layout, 3).unwrap();
        Self { params: Arc::new(params), ids, batch_norm }
    }

    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let param = |name| tape.param(self.ids[name]);
        let y = x.conv2d(&param("conv")?, Some(&param("bias")?), 1, 1)?;
        let beta = self.ids.get("beta").map(|&beta| tape.param(beta)).transpose()?;
        let y = match self.batch_norm {
            true => y.batch_norm(&param("gamma")?, beta.as_ref(), EPS)?.0,
            false => y.group_norm(3, &param("gamma")?, beta.as_ref(), EPS)?,
        };
        let y = y.relu()?.max_pool([2, 2], 2, 0)?.conv2d(&param("pixels")?, None, 1, 0)?;
        y.linear(&param("head")?, 3)
    }

    /// Gradients of the samples in `range`, by [`GradShard`].
    fn gradients(&self, range: Range<usize>, weights: Weights) -> Result<Shares> {
        let position = Position { first_sample: range.start as u64, ..POSITION };
        let device = self.params.value(self.ids["head"])?.device().clone();
        let tape = Tape::new(alone(), self.params.clone(), device, Mode::Train, position);
        let n = 4 * 4 * 2;
        let x = values("x", 8 * n);
        let x = single(&tape, &x[range.start * n..range.end * n], &[range.len(), 4, 4, 2], Types::NONE);
        let y = self.forward(&tape, &x)?;
        let seed: Vec<f32> = values("seed", 8 * 3).iter().map(|&x| x as f32).collect();
        let seed = Tensor::from_slice(tape.device(), &seed[range.start * 3..range.end * 3], y.shape())?;
        let mut shares = Shares::default();
        tape.backward(&y, seed, weights, &mut shares)?;
        if weights == Weights::Deferred {
            assert!(shares.0.is_empty(), "no parameter has a gradient before its turn");
            tape.weight_gradients(&mut shares)?;
        }
        Ok(shares)
    }
}

/// By parameter and first sample: gradient values.
#[derive(Default, PartialEq, Debug)]
struct Shares(BTreeMap<(ParamId, u64), Vec<f32>>);

impl GradSink for Shares {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        assert!(self.0.insert((share.id, share.samples.start), grad.to_vec()?).is_none(), "one share each");
        Ok(())
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}

#[test]
fn deferred_weight_gradients_are_those_of_one_pass() {
    for (batch_norm, beta) in [(false, true), (false, false), (true, true), (true, false)] {
        let network = Network::new(Declarations::new(), batch_norm, beta);
        let whole = network.gradients(0..8, Weights::Now).unwrap();
        assert_eq!(whole.0.len(), network.ids.len());
        assert_eq!(network.gradients(0..8, Weights::Deferred).unwrap(), whole);
    }
}

/// In canonical numerics samples add up in a tree, so that micro-batches of 8, 2 and 1 samples give the same bits.
#[test]
fn canonical_gradients_do_not_depend_on_the_micro_batch() {
    for beta in [true, false] {
        canonical_gradients_of_any_micro_batch(beta);
    }
    let error = Network::new(Declarations::canonical(4), true, true).gradients(0..8, Weights::Now).unwrap_err();
    assert_eq!(
        error.to_string(),
        "batch_norm has no canonical numerics: its statistics are those of one micro-batch on one rank, so they depend on \
         the mesh; use group_norm, which takes each sample by itself, or fast numerics"
    );
}

fn canonical_gradients_of_any_micro_batch(beta: bool) {
    let network = Network::new(Declarations::canonical(4), false, beta);
    let whole = network.gradients(0..8, Weights::Now).unwrap();
    for size in [1, 2] {
        let parts: Vec<Shares> =
            (0..8).step_by(size).map(|at| network.gradients(at..at + size, Weights::Now).unwrap()).collect();
        for ((id, _), whole) in &whole.0 {
            let of: Vec<&Vec<f32>> = parts
                .iter()
                .flat_map(|part| part.0.iter().filter(|((i, _), _)| i == id))
                .map(|(_, values)| values)
                .collect();
            assert_eq!(of.len(), 8 / size);
            // The bias of a convolution has slices of the image above the samples: copies that the reducer adds up.
            let sum = |at: usize| tree::sum(&of.iter().map(|part| part[at]).collect::<Vec<_>>(), |a, b| a + b).unwrap();
            assert!((0..whole.len()).all(|at| sum(at).to_bits() == whole[at].to_bits()), "{id:?} by {size}");
        }
    }
    let fast = Network::new(Declarations::new(), false, beta);
    assert_ne!(fast.gradients(0..8, Weights::Now).unwrap(), whole, "another order");
}

#[test]
fn images_are_cut_along_samples_alone_and_weights_not_at_all() {
    let tape = tape_on(&Arc::new(meshwork_core::Rank::recording(&"tp=2".parse().unwrap(), 0).unwrap()), Cpu::device());
    let var = |shape: &[usize], ty| input(&tape, &values("v", shape.iter().product()), shape, on_tp(ty));
    let image = |ty| var(&[2, 4, 4, 2], ty);
    let weight = |ty| var(&[3, 3, 3, 2], ty);
    let refused = |result: Result<Var>| result.unwrap_err().to_string();
    assert_eq!(
        refused(image(Ty::Shard(1)).max_pool([2, 2], 2, 0)),
        "max_pool: on axis tp, x is Shard(1), and max_pool needs whole images on one rank; all_gather x first, or cut its samples"
    );
    assert_eq!(
        refused(image(Ty::Replicate).conv2d(&weight(Ty::Shard(0)), None, 1, 1)),
        "conv2d: on axis tp, weight is Shard(0): a sharded weight used as if whole; declare weight replicated on tp"
    );
    assert_eq!(
        refused(image(Ty::Partial).relu()),
        "relu: on axis tp, x is Partial, and relu of a sum is not the sum of relu; all_reduce or reduce_scatter x over tp first"
    );
    assert_eq!(
        refused(image(Ty::Invariant).conv2d(&weight(Ty::Replicate), None, 1, 1)),
        "conv2d: on axis tp, x is Invariant and weight is Replicate: the gradient of x would miss the other ranks' share; \
         copy(I→R) x first"
    );
    let y = image(Ty::Shard(0)).conv2d(&weight(Ty::Replicate), None, 1, 1).unwrap();
    assert_eq!(y.types(), on_tp(Ty::Shard(0)));
}

/// Batch norm uses only the samples of its own rank; group norm has the results of one rank.
#[test]
fn batch_norm_over_dp_takes_each_rank_by_itself() {
    let shape = [2, 3, 3, 4];
    let n: usize = shape.iter().product();
    let x = values("x", 2 * n);
    let run = |rank: Arc<meshwork_core::Rank>, x: &[f64], samples: usize| {
        let tape = tape_of(&rank);
        let ty = |ty| if rank.mesh().has(Axis::Dp) { Types::new(&[(Axis::Dp, ty)]) } else { Types::NONE };
        let x = input(&tape, x, &[samples, 3, 3, 4], ty(Ty::Shard(0)));
        let [gamma, beta] = ["gamma", "beta"].map(|name| input(&tape, &values(name, 4), &[4], ty(Ty::Replicate)));
        let batch = x.batch_norm(&gamma, &beta, EPS).unwrap().0;
        assert_eq!(batch.types(), x.types());
        [batch, x.group_norm(2, &gamma, &beta, EPS).unwrap()].map(|y| to_f64(y.tensor()))
    };
    let ranks = on_mesh("dp=2", |rank| {
        let at = rank.coords().get(Axis::Dp) * n;
        run(rank, &x[at..at + n], 2)
    });
    let whole = run(alone(), &x, 4);
    assert_eq!([ranks[0][1].clone(), ranks[1][1].clone()].concat(), whole[1], "group norm");
    for (rank, got) in ranks.iter().enumerate() {
        assert_eq!(got[0], run(alone(), &x[rank * n..][..n], 2)[0], "batch norm of the rank's own samples");
        assert_ne!(got[0], whole[0][rank * n..][..n], "not of all");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let tape = tape_of(&alone());
    let var = |shape: &[usize]| input(&tape, &values("v", shape.iter().product()), shape, Types::NONE);
    let x = var(&[2, 4, 4, 6]);
    for (result, says) in [
        (
            x.conv2d(&var(&[3, 3, 3, 5]), None, 1, 1),
            "conv2d: weight must be [features, kernel height, kernel width, channels of x]",
        ),
        (
            x.conv2d(&var(&[3, 7, 3, 6]), None, 1, 1),
            "conv2d: windows of [7, 3] with stride 1 do not fit 4×4 pixels padded by 1",
        ),
        (x.conv2d(&var(&[3, 3, 3, 6]), None, 0, 1), "conv2d: windows of [3, 3] with stride 0"),
        (x.conv2d(&var(&[3, 3, 3, 6]), Some(&var(&[4])), 1, 1), "conv2d_bias: bias has a number per feature of weight"),
        (var(&[2, 4, 4]).max_pool([2, 2], 2, 0), "max_pool: x must be images [samples, height, width, channels]"),
        (x.max_pool([2, 2], 2, 2), "max_pool: padding 2 leaves windows of [2, 2] on padding alone"),
        (x.group_norm(4, &var(&[6]), &var(&[6]), EPS), "group_norm: 4 groups do not divide 6 channels"),
        (x.group_norm(3, &var(&[5]), &var(&[6]), EPS), "group_norm: gamma and beta are vectors over the channels of x"),
        (var(&[2, 6]).batch_norm(&var(&[6]), &var(&[6]), EPS).map(|y| y.0), "batch_norm: x must be images"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with(says), "{error}");
    }
}
