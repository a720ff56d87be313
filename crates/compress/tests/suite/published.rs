//! Each method against its published equations, simulated on one thread, bit by bit.

use crate::common::{bits, compress, draws, lossy, restore, scheme, square, values};
use meshwork_compress::{
    AqSgd, Compressor, Draws, FileStore, Fold, MemoryStore, Message, Partial, Reduction, Scheme, Shape, Store,
};
use meshwork_testkit::run_world;

const STEPS: u64 = 4;

/// The gradient of a rank in a step.
fn gradient(rank: usize, step: u64, shape: Shape) -> Vec<f32> {
    values(&format!("gradient {rank} {step}"), shape.len())
}

/// The sums of all steps, the same on every rank of a run.
fn run(text: &str, feedback: &str, ranks: usize, shape: Shape) -> Vec<Vec<f32>> {
    let all = run_world(ranks, |group| {
        let place = [group.rank(), ranks];
        let mut reduction =
            Reduction::new("w", Box::new(scheme(text)), feedback.parse().unwrap(), shape, place, 7).unwrap();
        let sum = |step| {
            let x = gradient(group.rank(), step, shape);
            reduction.all_reduce(&group, step, Partial(&x)).unwrap().to_vec()
        };
        (0..STEPS).map(sum).collect::<Vec<_>>()
    });
    for other in &all {
        for (a, b) in all[0].iter().zip(other) {
            assert_eq!(bits(a), bits(b), "{text} with {feedback}: ranks differ");
        }
    }
    all.into_iter().next().unwrap()
}

fn draws_of(step: u64, rank: usize, shape: Shape) -> Draws {
    Draws::new(7, "w", step).skip(rank * shape.len())
}

fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}

/// Error feedback of gathered messages: p = x + e; sum += C(p); e = p - C(p).
#[test]
fn error_feedback_of_gathered_messages() {
    let shape = Shape::matrix(3, 50).unwrap();
    for text in ["topk:0.1", "topk:3/row", "topk:0.1+quant:8", "randk:0.2+quant:4"] {
        let (scheme, ranks) = (scheme(text), 3);
        let mut residuals = vec![vec![0.0; shape.len()]; ranks];
        let got = run(text, "ef", ranks, shape);
        for step in 0..STEPS {
            let mut sum = vec![0.0; shape.len()];
            for (rank, e) in residuals.iter_mut().enumerate() {
                let p: Vec<f32> = gradient(rank, step, shape).iter().zip(&*e).map(|(x, e)| x + e).collect();
                let c = lossy(&scheme, &p, shape, draws_of(step, rank, shape));
                add(&mut sum, &c);
                *e = p.iter().zip(&c).map(|(p, c)| p - c).collect();
            }
            assert_eq!(bits(&got[step as usize]), bits(&sum), "{text} in step {step}");
        }
    }
}

/// EF21 (algorithm 2): c = C(x - g); g += c; G += sum of c. EF21-M: the same of v = (1 - η) v + η x.
#[test]
fn ef21_and_its_momentum() {
    let (shape, ranks) = (Shape::vector(120).unwrap(), 3);
    for (feedback, eta) in [("ef21", 1.0_f32), ("ef21m:0.25", 0.25)] {
        let scheme = scheme("topk:0.1");
        let got = run("topk:0.1", feedback, ranks, shape);
        let mut g = vec![vec![0.0_f32; shape.len()]; ranks];
        let (mut v, mut total) = (g.clone(), vec![0.0; shape.len()]);
        for step in 0..STEPS {
            let mut sum = vec![0.0; shape.len()];
            for rank in 0..ranks {
                let x = gradient(rank, step, shape);
                for (v, x) in v[rank].iter_mut().zip(&x) {
                    *v = if step == 0 { *x } else { (1.0 - eta) * *v + eta * x };
                }
                let difference: Vec<f32> = v[rank].iter().zip(&g[rank]).map(|(v, g)| v - g).collect();
                let c = lossy(&scheme, &difference, shape, draws_of(step, rank, shape));
                add(&mut g[rank], &c);
                add(&mut sum, &c);
            }
            add(&mut total, &sum);
            assert_eq!(bits(&got[step as usize]), bits(&total), "{feedback} in step {step}");
        }
    }
}

/// EF21's estimates come nearer to a constant gradient with every step, at the rate that the contraction factor gives.
#[test]
fn ef21_converges_to_a_constant() {
    let shape = Shape::vector(100).unwrap();
    let x = values("constant", 100);
    let scheme = scheme("topk:0.2");
    let rate = 1.0 - scheme.guarantee(shape).contraction().unwrap();
    let errors = run_world(1, |group| {
        let mut reduction = Reduction::new("w", Box::new(scheme), "ef21".parse().unwrap(), shape, [0, 1], 7).unwrap();
        let error = |step| {
            let estimate = reduction.all_reduce(&group, step, Partial(&x)).unwrap();
            square(x.iter().zip(&*estimate).map(|(x, g)| x - g))
        };
        (0..6).map(error).collect::<Vec<_>>()
    });
    let mut last = square(x.iter().copied());
    for error in &errors[0] {
        assert!(*error <= rate * last, "{error} after {last}");
        last = *error;
    }
    assert_eq!(last, 0.0, "all was sent after five steps of a fifth");
}

/// 1-bit Adam's compressed all-reduce, with any scheme that sums this way: each rank compresses its shards with its
/// error; the owner of a shard adds them, compresses the sum with the error of the shard, and all restore it.
#[test]
fn one_bit_adams_sum_of_shards() {
    let ranks = 3;
    for (text, shape, cuts) in [
        ("sign", Shape::vector(100).unwrap(), [0, 34, 68, 100]),
        ("quant:4", Shape::vector(100).unwrap(), [0, 34, 68, 100]),
        ("quant:2/block8/stochastic", Shape::vector(100).unwrap(), [0, 40, 80, 100]),
        ("fp8:e4m3/row", Shape::matrix(5, 20).unwrap(), [0, 40, 80, 100]),
        ("sign/row", Shape::matrix(2, 50).unwrap(), [0, 50, 100, 100]),
    ] {
        let scheme = scheme(text);
        let got = run(text, "ef", ranks, shape);
        let of = |range: std::ops::Range<usize>| match text.contains("row") {
            true => Shape::matrix(range.len() / shape.cols(), shape.cols()).unwrap(),
            false => Shape::vector(range.len()).unwrap(),
        };
        let (mut errors, mut lost) = (vec![vec![0.0; 100]; ranks], vec![0.0_f32; 100]);
        for step in 0..STEPS {
            let mut sum = vec![0.0; 100];
            for (rank, error) in errors.iter_mut().enumerate() {
                let p: Vec<f32> = gradient(rank, step, shape).iter().zip(&*error).map(|(x, e)| x + e).collect();
                for cut in cuts.windows(2).filter(|cut| cut[0] < cut[1]) {
                    let range = cut[0]..cut[1];
                    let draws = draws_of(step, rank, shape).skip(cut[0]);
                    let c = lossy(&scheme, &p[range.clone()], of(range.clone()), draws);
                    add(&mut sum[range.clone()], &c);
                    range.clone().for_each(|i| error[i] = p[i] - c[i - cut[0]]);
                }
            }
            add(&mut sum, &lost);
            let mut out = vec![0.0; 100];
            for cut in cuts.windows(2).filter(|cut| cut[0] < cut[1]) {
                let range = cut[0]..cut[1];
                let draws = draws_of(step, ranks, shape).skip(cut[0]);
                out[range.clone()].copy_from_slice(&lossy(&scheme, &sum[range.clone()], of(range), draws));
            }
            lost = sum.iter().zip(&out).map(|(sum, out)| sum - out).collect();
            assert_eq!(bits(&got[step as usize]), bits(&out), "{text} in step {step}");
        }
    }
}

/// Drawn alike on all ranks, elements are added as they are.
#[test]
fn drawn_elements_are_summed_without_messages() {
    let (shape, ranks) = (Shape::vector(60).unwrap(), 2);
    for text in ["randk:0.25", "randk:0.25/unbiased"] {
        let got = run(text, "none", ranks, shape);
        for step in 0..STEPS {
            let mut sum = vec![0.0; 60];
            (0..ranks).for_each(|rank| {
                add(&mut sum, &lossy(&scheme(text), &gradient(rank, step, shape), shape, draws_of(step, 0, shape)));
            });
            assert_eq!(bits(&got[step as usize]), bits(&sum), "{text} in step {step}");
        }
    }
}

/// PowerSGD (algorithm 1 and 2), in f64 without lanes: P = sum of M Q, orthogonalised; Q = sum of Mᵀ P; M' = P Qᵀ; each
/// error M - M'/ranks.
#[test]
fn powersgd_against_an_oracle() {
    let (rows, cols, rank, ranks) = (11, 20, 3, 2);
    let shape = Shape::matrix(rows, cols).unwrap();
    let got = run("powersgd:3", "ef", ranks, shape);
    let first = Draws::new(7, "w", 0);
    let start =
        |l: usize, j: usize| f64::from(meshwork_core::random::uniform(first.key, (l * cols + j) as u64)) * 2.0 - 1.0;
    let mut q: Vec<Vec<f64>> = (0..rank).map(|l| (0..cols).map(|j| start(l, j)).collect()).collect();
    let mut errors = vec![vec![0.0; rows * cols]; ranks];
    for step in 0..STEPS {
        let m: Vec<Vec<f64>> = (0..ranks)
            .map(|r| gradient(r, step, shape).iter().zip(&errors[r]).map(|(x, e)| f64::from(*x) + e).collect())
            .collect();
        let total: Vec<f64> = (0..rows * cols).map(|i| m.iter().map(|m| m[i]).sum()).collect();
        let mut p: Vec<Vec<f64>> = q
            .iter()
            .map(|q| (0..rows).map(|i| (0..cols).map(|j| total[i * cols + j] * q[j]).sum()).collect())
            .collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for l in 0..rank {
            let (before, rest) = p.split_at_mut(l);
            for other in before {
                let along = dot(other, &rest[0]);
                rest[0].iter_mut().zip(&*other).for_each(|(x, o)| *x -= along * o);
            }
            let length = dot(&rest[0], &rest[0]).sqrt();
            rest[0].iter_mut().for_each(|x| *x /= length);
        }
        q = p
            .iter()
            .map(|p| (0..cols).map(|j| (0..rows).map(|i| total[i * cols + j] * p[i]).sum()).collect())
            .collect();
        let sum: Vec<f64> =
            (0..rows * cols).map(|at| (0..rank).map(|l| p[l][at / cols] * q[l][at % cols]).sum()).collect();
        for (m, e) in m.iter().zip(&mut errors) {
            e.iter_mut().zip(m).zip(&sum).for_each(|((e, m), sum)| *e = m - sum / ranks as f64);
        }
        let off =
            got[step as usize].iter().zip(&sum).map(|(got, sum)| (f64::from(*got) - sum).abs()).fold(0.0, f64::max);
        assert!(off < 1e-4, "step {step}: {off}");
    }
}

/// A matrix of rank 2 is restored by factors of rank 2, also where its first columns are alike, and by more factors
/// than it has ranks.
#[test]
fn powersgd_restores_a_matrix_of_its_rank() {
    let (rows, cols) = (9, 14);
    let shape = Shape::matrix(rows, cols).unwrap();
    let (a, b) = (values("a", rows + cols), values("b", rows + cols));
    let m: Vec<f32> =
        (0..rows * cols).map(|i| a[i / cols] * a[rows + i % cols] + b[i / cols] * b[rows + i % cols]).collect();
    for text in ["powersgd:2", "powersgd:5"] {
        let error = square(m.iter().zip(lossy(&scheme(text), &m, shape, draws(0))).map(|(x, y)| x - y));
        assert!(error < 1e-9 * square(m.iter().copied()), "{text}: {error}");
    }
    assert_eq!(lossy(&scheme("powersgd:2"), &vec![0.0; rows * cols], shape, draws(0)), vec![0.0; rows * cols]);
    // Warm: the same matrix again is approximated better, up to the best there is.
    let (noisy, scheme) = (values("noise", rows * cols), scheme("powersgd:2"));
    let mut warm = vec![0.0; scheme.warm_len(shape)];
    let mut error = |step| {
        let message = Message::compress(&scheme, &noisy, shape, draws(step), &mut warm).unwrap();
        square(noisy.iter().zip(restore(&scheme, &message, shape)).map(|(x, y)| x - y))
    };
    let errors: Vec<f64> = (0..8).map(&mut error).collect();
    assert!(
        errors.windows(2).all(|pair| pair[1] <= pair[0] * (1.0 + 1e-6)) && errors[7] < 0.97 * errors[0],
        "{errors:?}"
    );
}

/// AQ-SGD: the first visit as it is; then m += C(a - m) on both sides. The same from a file, also after it was closed.
#[test]
fn aq_sgd_on_both_sides() {
    let (shape, samples) = (Shape::vector(40).unwrap(), 3);
    let (scheme, folder) = (scheme("quant:4"), tempfile::tempdir().unwrap());
    let file = |side: &str| FileStore::open(folder.path().join(side), samples, shape.len()).unwrap();
    let check = |open: &dyn Fn(&str) -> Box<dyn Store>, reopen: bool| {
        let link = |side: &str| AqSgd::new(Box::new(scheme), shape, open(side)).unwrap();
        let (mut sender, mut receiver) = (link("sender"), link("receiver"));
        let mut buffers = vec![None::<Vec<f32>>; samples];
        for epoch in 0..3_u64 {
            for sample in [2, 0, 1] {
                let a = values(&format!("activation {sample} {epoch}"), shape.len());
                let message = sender.send(sample, &a, draws(epoch)).unwrap();
                assert_eq!(message.as_bytes().len(), sender.wire_bytes().unwrap()[usize::from(epoch > 0)]);
                let wanted = match &buffers[sample] {
                    None => a,
                    Some(m) => {
                        let change: Vec<f32> = a.iter().zip(m).map(|(a, m)| a - m).collect();
                        m.iter().zip(lossy(&scheme, &change, shape, draws(epoch))).map(|(m, c)| m + c).collect()
                    }
                };
                let got = receiver.receive(sample, &message).unwrap();
                assert_eq!(bits(got), bits(&wanted), "sample {sample} in epoch {epoch}");
                buffers[sample] = Some(wanted);
            }
            if reopen {
                (sender, receiver) = (link("sender"), link("receiver"));
            }
        }
        // Sent again, an activation comes nearer.
        let a = values("activation 0 2", shape.len());
        let error = |got: &[f32]| square(a.iter().zip(got).map(|(a, m)| a - m));
        let before = error(buffers[0].as_ref().unwrap());
        let message = sender.send(0, &a, draws(9)).unwrap();
        assert!(error(receiver.receive(0, &message).unwrap()) < 0.1 * before);
    };
    check(&|_| Box::new(MemoryStore::new(samples)), false);
    check(&|side| Box::new(file(side)), true);
    assert_eq!(folder.path().join("sender").metadata().unwrap().len(), FileStore::bytes(samples, shape.len()));
}

/// Messages may also be added one by one: the sum is that of the gather.
#[test]
fn a_sum_of_one_rank_is_what_its_message_holds() {
    let shape = Shape::matrix(4, 30).unwrap();
    for text in crate::common::SCHEMES {
        let scheme: Scheme = scheme(text);
        let x = gradient(0, 0, shape);
        let mut wanted = vec![0.0; shape.len()];
        compress(&scheme, &x, shape, draws_of(0, 0, shape)).restore(&scheme, shape, Fold::Add, &mut wanted).unwrap();
        // Compressed twice where shards are: the second time what the first has restored.
        let twice = matches!(scheme.sum(), meshwork_compress::SumMethod::ScatterGather(_));
        if twice {
            wanted = lossy(&scheme, &wanted, shape, draws_of(0, 1, shape));
        }
        assert_eq!(run(text, "none", 1, shape)[0], wanted, "{text}");
    }
}
