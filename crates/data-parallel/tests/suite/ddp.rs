//! A training loop's own gradients over ranks, against sums taken by hand.

use meshwork_core::{CommLog, Group, OpKind, World};
use meshwork_data_parallel::{Ddp, DdpError};

const ELEMENTS: [usize; 4] = [3, 5, 2, 7];

/// What a rank adds to an element in a micro-batch.
fn value(rank: usize, micro: usize, parameter: usize, at: usize) -> f32 {
    (1 + rank + 10 * micro + 100 * parameter + at) as f32
}

fn gradient(rank: usize, micro: usize, parameter: usize) -> Vec<f32> {
    (0..ELEMENTS[parameter]).map(|at| value(rank, micro, parameter, at)).collect()
}

fn run<T: Send>(ranks: usize, body: impl Fn(Group) -> Result<T, DdpError> + Sync) -> Vec<T> {
    World::Threads(ranks).run(body).unwrap()
}

/// Three micro-batches of different weight a rank, gradients in another order on each rank, buckets of one to all
/// parameters.
#[test]
fn gradients_of_all_ranks_and_micro_batches_are_divided_by_all_samples() {
    for (ranks, bucket_bytes) in [(1, 1), (1, 1 << 20), (2, 1), (3, 28), (4, 40), (4, 1 << 20)] {
        let samples = |rank: usize| (1 + rank) as f64;
        let count: f64 = (0..ranks).map(samples).sum();
        let reduced = run(ranks, |world| {
            let rank = world.rank();
            let mut ddp = Ddp::new(world, &ELEMENTS, bucket_bytes)?;
            for _ in 0..2 {
                let pass = |ddp: &mut Ddp, micro| {
                    let order = (0..4).map(|at| (at + rank) % 4);
                    order.into_iter().try_for_each(|at| ddp.gradient(at, &gradient(rank, micro, at)))
                };
                ddp.no_sync(|ddp| (0..2).try_for_each(|micro| pass(ddp, micro)))?;
                pass(&mut ddp, 2)?;
                assert!(ddp.finish(samples(rank))?);
            }
            (0..4).map(|parameter| Ok(ddp.reduced(parameter)?.to_vec())).collect::<Result<Vec<_>, DdpError>>()
        });
        for (parameter, elements) in ELEMENTS.into_iter().enumerate() {
            let mean = |at| {
                let each = (0..ranks).flat_map(|rank| (0..3).map(move |micro| value(rank, micro, parameter, at)));
                (f64::from(each.sum::<f32>()) / count) as f32
            };
            let expected: Vec<f32> = (0..elements).map(mean).collect();
            for of_rank in &reduced {
                assert_eq!(of_rank[parameter], expected, "{ranks} ranks, buckets of {bucket_bytes} bytes");
            }
        }
    }
}

/// The buckets go out in one order, each as soon as it and those before it are full, although the ranks' gradients come
/// in opposite orders.
#[test]
fn buckets_are_reduced_before_the_last_gradient_is_there() {
    run(2, |world| {
        let (rank, log): (usize, CommLog) = (world.rank(), world.log().clone());
        let mut ddp = Ddp::new(world, &ELEMENTS, 1)?;
        let all_reduces = || log.drain().iter().filter(|record| record.op == OpKind::AllReduce).count();
        let started: Vec<usize> = match rank {
            0 => [3, 2, 1, 0],
            _ => [0, 1, 2, 3],
        }
        .into_iter()
        .map(|at| ddp.gradient(at, &gradient(rank, 0, at)).map(|()| all_reduces()))
        .collect::<Result<_, _>>()?;
        assert_eq!(started, if rank == 0 { [1, 1, 1, 1] } else { [0, 0, 0, 4] });
        assert!(ddp.finish(1.0)?);
        Ok(())
    });
}

/// Each update of w by lr · g has the gradient of the weights of `staleness` updates before: a serial simulation gives
/// the same bits.
#[test]
fn stale_gradients_are_those_of_as_many_steps_before() {
    let (steps, lr) = (9, 0.25_f32);
    let gradient = |w: f32, step: usize, rank: usize| w - (step % 3) as f32 - rank as f32;
    for staleness in [0, 1, 2, 4, 20] {
        let trained = run(2, |world| {
            let (rank, mut w) = (world.rank(), 1.0);
            let mut ddp = Ddp::with_staleness(world, &[1, 2], 4, staleness)?;
            let apply = |ddp: &Ddp, w: &mut f32| {
                assert_eq!(ddp.reduced(1)?, [1.0, 2.0]);
                *w -= lr * ddp.reduced(0)?[0];
                Ok::<_, DdpError>(())
            };
            for step in 0..steps {
                ddp.gradient(1, &[1.0, 2.0])?;
                assert!(matches!(ddp.reduced(0), Err(DdpError::NotYet)), "step {step}");
                ddp.gradient(0, &[gradient(w, step, rank)])?;
                let there = ddp.finish(1.0)?;
                assert_eq!(there, step >= staleness);
                if there {
                    apply(&ddp, &mut w)?;
                }
            }
            while ddp.flush()? {
                apply(&ddp, &mut w)?;
            }
            Ok(w)
        });
        let (mut w, mut waiting) = (1.0, std::collections::VecDeque::new());
        for step in 0..steps {
            waiting.push_back((gradient(w, step, 0) + gradient(w, step, 1)) / 2.0);
            if waiting.len() > staleness {
                w -= lr * waiting.pop_front().unwrap();
            }
        }
        waiting.into_iter().for_each(|g| w -= lr * g);
        assert_eq!(trained, [w; 2], "staleness {staleness}");
    }
}

#[test]
fn a_parameter_that_the_loss_does_not_depend_on_is_said_to_be_so() {
    let errors = run(1, |world| {
        let mut ddp = Ddp::new(world, &[1, 1], 1 << 20)?;
        ddp.gradient(1, &[2.0])?;
        let missing = ddp.finish(1.0).unwrap_err().to_string();
        ddp.unused(0)?;
        ddp.finish(1.0)?;
        assert_eq!((ddp.reduced(0)?, ddp.reduced(1)?), (&[0.0][..], &[2.0][..]));
        Ok(missing)
    });
    assert!(errors[0].contains("parameter 0 has no gradient") && errors[0].contains("call `unused(0)`"), "{errors:?}");
}

#[test]
fn wrong_gradients_are_refused() {
    run(1, |world| {
        let mut ddp = Ddp::new(world, &[2, 1], 1 << 20)?;
        assert!(matches!(ddp.gradient(2, &[0.0]), Err(DdpError::Parameter { parameter: 2, count: 2 })));
        assert!(matches!(ddp.unused(7), Err(DdpError::Parameter { parameter: 7, count: 2 })));
        assert!(matches!(ddp.gradient(0, &[0.0]), Err(DdpError::Length { parameter: 0, elements: 2, found: 1 })));
        ddp.gradient(0, &[1.0, 1.0])?;
        assert!(matches!(ddp.gradient(0, &[1.0, 1.0]), Err(DdpError::Twice { parameter: 0 })));
        assert!(matches!(ddp.unused(0), Err(DdpError::Twice { parameter: 0 })));
        ddp.gradient(1, &[1.0])?;
        assert!(matches!(ddp.finish(0.0), Err(DdpError::Count { .. })));
        assert!(matches!(ddp.reduced(0), Err(DdpError::NotYet)));
        Ok(())
    });
}

/// What each rank of a world is told.
fn told(ranks: usize, body: impl Fn(Group) -> Result<(), DdpError> + Sync) -> Vec<String> {
    let told = |world: Group| Ok::<_, DdpError>(body(world).err().map(|error| error.to_string()).unwrap_or_default());
    World::Threads(ranks).run(told).unwrap()
}

/// Buckets of two sizes used to stop the world with counts of elements, and parameters that are as large together were
/// added up.
#[test]
fn replicas_of_other_shapes_are_refused_by_name() {
    let made = |of: [(&'static [usize], usize, usize); 3]| {
        told(3, |world| {
            let (elements, bucket_bytes, staleness) = of[world.rank()];
            Ddp::with_staleness(world, elements, bucket_bytes, staleness).map(drop)
        })
    };
    let right: (&[usize], usize, usize) = (&[2, 3], 64, 0);
    let valid = "give Ddp the same parameters in the same order, and the same settings, on every rank";
    for (other, wrong) in [
        (
            (&[3, 2][..], 64, 0),
            "the elements of parameter 0 should be the same on all ranks, and ranks 0, 2 have 2, rank 1 has 3",
        ),
        (
            (&[2, 4][..], 64, 0),
            "the elements of parameter 1 should be the same on all ranks, and ranks 0, 2 have 3, rank 1 has 4",
        ),
        (
            (&[2, 3, 1][..], 64, 0),
            "the number of parameters should be the same on all ranks, and ranks 0, 2 have 2, rank 1 has 3",
        ),
        (
            (&[][..], 64, 0),
            "the number of parameters should be the same on all ranks, and ranks 0, 2 have 2, rank 1 has 0",
        ),
        (
            (&[2, 3][..], 8, 0),
            "the bytes of a bucket should be the same on all ranks, and ranks 0, 2 have 64, rank 1 has 8",
        ),
        ((&[2, 3][..], 64, 1), "the staleness should be the same on all ranks, and ranks 0, 2 have 0, rank 1 has 1"),
    ] {
        assert_eq!(made([right, other, right]), vec![format!("{wrong}; {valid}"); 3]);
    }
    assert_eq!(made([right; 3]), ["", "", ""]);
}

/// A rank that updated otherwise used to train on, with weights of its own.
#[test]
fn replicas_that_drift_apart_are_named() {
    let trained = |rate: fn(usize) -> f32| {
        told(3, |world| {
            let rank = world.rank();
            let mut ddp = Ddp::new(world, &[1, 2], 1 << 20)?;
            let mut weights = [vec![1.0f32], vec![2.0, 3.0]];
            for step in 1..4 {
                ddp.verify(step, weights.iter().map(|values| &values[..]))?;
                ddp.gradient(0, &[rank as f32])?;
                ddp.gradient(1, &[1.0, rank as f32])?;
                ddp.finish(1.0)?;
                weights[0][0] -= 0.5 * ddp.reduced(0)?[0];
                // From the second step on.
                let rate = if step == 1 { 0.5 } else { rate(rank) };
                weights[1].iter_mut().zip(ddp.reduced(1)?).for_each(|(weight, gradient)| *weight -= rate * gradient);
            }
            Ok(())
        })
    };
    let wrong = "step 3: parameter 1 should be the same on all ranks, and the bits of rank 1 differ from those of the others; start from the same \
                 values, and let every rank make the same updates from the reduced gradients alone";
    assert_eq!(trained(|rank| if rank == 1 { 0.25 } else { 0.5 }), vec![wrong; 3]);
    assert_eq!(trained(|_| 0.5), ["", "", ""]);
    // Another number of parameters is told too.
    let counted = told(2, |world| {
        let (rank, values) = (world.rank(), [1.0f32]);
        Ddp::new(world, &[1], 64)?.verify(1, std::iter::repeat_n(&values[..], 1 + rank))
    });
    assert!(
        counted
            .iter()
            .all(|told| told.contains("as number 2 rank 0 claims \"nothing\", rank 1 claims \"parameter 1 should")),
        "{counted:?}"
    );
}
