//! A training loop's own gradients over ranks, against sums taken by hand.

use meshwork_core::comm::thread::{self, Options};
use meshwork_core::{CommLog, Group, OpKind};
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
    thread::run(ranks, Options::default(), body).unwrap()
}

/// Three micro-batches of different weight a rank, gradients in another order on each rank, buckets of one to all parameters.
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

/// The buckets go out in one order, each as soon as it and those before it are full, although the ranks' gradients come in opposite orders.
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

/// Each update of w by lr · g has the gradient of the weights of `staleness` updates before: a serial simulation gives the same bits.
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
