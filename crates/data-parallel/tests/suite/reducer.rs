//! Buckets reduced on threads, against sums taken by hand.

use meshwork_core::{Axis, Buffer, CommError, FlatSlice, Mesh, OpKind, Rank, World};
use meshwork_data_parallel::{Bucket, BucketEvent, HostVectors, Parking, ReduceError, Reducer, VectorError, rounds};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

fn bucket(elements: usize, rounds: Vec<meshwork_core::Group>) -> Bucket {
    let members = vec![0..elements / 2, elements / 2..elements];
    Bucket { members, elements, rounds, sum: None, last: None, scatter: false, shares: 1, fills: 1 }
}

/// Adds `value` to all elements of both members, the second one first.
fn fill(reducer: &mut Reducer, bucket: usize, value: f32) -> Vec<BucketEvent> {
    let mut events = Vec::new();
    for member in [1, 0] {
        let (buffer, range, _) = reducer.gradient(bucket, member).unwrap();
        buffer.as_mut_slice::<f32>().unwrap()[range].iter_mut().for_each(|x| *x += value);
        events.extend(reducer.ready(bucket, member).unwrap());
    }
    events
}

fn gradients(reducer: &Reducer, bucket: usize) -> Vec<f32> {
    reducer.gradients(bucket).expect("the memory is there").as_slice().unwrap().to_vec()
}

/// A bucket without rounds used to lose its memory with its last gradient, and this step and every later one failed.
#[test]
fn a_bucket_without_rounds_keeps_its_memory() {
    let mut reducer = Reducer::new(vec![bucket(4, Vec::new())], HostVectors).unwrap();
    for step in 1..=3 {
        assert!(!reducer.is_reduced(0));
        assert_eq!(fill(&mut reducer, 0, 1.0), [BucketEvent::Started(0)]);
        assert!(reducer.is_reduced(0), "nothing to wait for");
        assert!(matches!(reducer.gradient(0, 0), Err(ReduceError::TooLate { .. })), "a final gradient stays as it is");
        let mut events = Vec::new();
        reducer.finish(|event| events.push(event)).unwrap();
        assert_eq!(events, [BucketEvent::Done(0)]);
        assert_eq!(gradients(&reducer, 0), [step as f32; 4]);
    }
}

/// dp×cp is one reduction over four ranks, and tp a second; on axes that are not Partial nothing is summed.
#[test]
fn rounds_over_products_of_axes_sum_each_gradient_once() {
    let mesh: Mesh = "tp=2,cp=2,dp=2".parse().unwrap();
    let sets: [&[Axis]; 5] =
        [&[Axis::Dp, Axis::Cp], &[Axis::Tp, Axis::Cp, Axis::Dp], &[Axis::Tp], &[Axis::Pp], &[Axis::Dp]];
    let logs = World::threads(&mesh).run_mesh(&mesh, |rank| {
        let buckets = sets.map(|axes| bucket(6, rounds(&rank, axes.iter().copied())));
        let mut reducer = Reducer::new(buckets.into(), HostVectors).unwrap();
        let value = |rank: usize| (1 << rank) as f32; // every sum tells its ranks
        (0..sets.len()).for_each(|bucket| drop(fill(&mut reducer, bucket, value(rank.world_rank()))));
        reducer.finish(|_| {}).unwrap();
        for (bucket, axes) in sets.iter().enumerate() {
            let members = mesh.group(rank.world_rank(), axes);
            let sum: f32 = members.into_iter().map(value).sum();
            assert_eq!(gradients(&reducer, bucket), [sum; 6], "{axes:?}");
        }
        Ok::<_, CommError>(rank.log().drain().into_iter().map(|record| record.group).collect::<Vec<_>>())
    });
    for log in logs.unwrap() {
        // The first rounds when their buckets are full, then the second one of the second bucket.
        assert_eq!(log, ["dp+cp", "dp+cp", "tp", "dp", "tp"]);
    }
}

#[test]
fn a_bucket_of_a_world_that_stopped_is_lost_and_says_so() {
    let mesh: Mesh = "dp=2".parse().unwrap();
    World::Threads(2)
        .run(|world| {
            let rank = Rank::new(&mesh, world.communicator().clone())?;
            if rank.world_rank() == 1 {
                return Ok(());
            }
            let mut reducer = Reducer::new(vec![bucket(2, rounds(&rank, [Axis::Dp]))], HostVectors).unwrap();
            let unfinished = reducer.finish(|_| {}).unwrap_err();
            assert!(matches!(unfinished, ReduceError::Missing { bucket: 0, member: 0 }));
            reducer.ready(0, 0).unwrap();
            // Rank 1 has ended. The start notices it if it had ended by then, else the wait does.
            let failed = reducer.ready(0, 1).and_then(|_| reducer.finish(|_| {})).unwrap_err();
            assert!(matches!(failed, ReduceError::Comm { bucket: 0, .. }), "{failed}");
            let later = reducer.finish(|_| {}).unwrap_err();
            assert_eq!(later.to_string(), "the gradients of bucket 0 are lost: an earlier reduction of it failed");
            Ok::<_, CommError>(())
        })
        .unwrap();
}

/// Three ranks share out ten elements, four each. Every fill is reduced by itself, and the slices add up; what nobody
/// wrote in a fill is zero, whatever the memory held.
#[test]
fn slices_of_several_fills_add_up() {
    let mesh: Mesh = "dp=3".parse().unwrap();
    let ranks = World::threads(&mesh).run_mesh(&mesh, |rank| {
        let scattered = |fills| Bucket { scatter: true, fills, ..bucket(10, rounds(&rank, [Axis::Dp])) };
        let mut reducer = Reducer::new(vec![scattered(3), scattered(1)], HostVectors).unwrap();
        for step in 1..=2 {
            reducer.begin(0);
            assert!(reducer.gradients(0).is_none(), "the last step's slices are freed");
            fill(&mut reducer, 1, step as f32);
            for value in [1.0, 10.0, 100.0] {
                assert_eq!(reducer.awaits(0, 0), 1);
                let (buffer, range, first) = reducer.gradient(0, 1).unwrap();
                assert!(first);
                buffer.as_mut_slice::<f32>().unwrap()[range].fill(value * (1 + rank.world_rank()) as f32);
                assert!(!reducer.gradient(0, 1).unwrap().2, "a second share is added");
                assert_eq!(reducer.ready(0, 0).unwrap(), None);
                assert_eq!(reducer.ready(0, 1).unwrap(), Some(BucketEvent::Started(0)));
            }
            assert!(matches!(reducer.gradient(0, 0), Err(ReduceError::TooLate { .. })));
            reducer.finish(|_| {}).unwrap();
            let wanted = [0.0, 0.0, 0.0, 0.0, 0.0, 666.0, 666.0, 666.0, 666.0, 666.0, 0.0, 0.0];
            let slice = FlatSlice::new(10, 3, rank.world_rank());
            assert_eq!(gradients(&reducer, 0), wanted[slice.range()], "step {step}");
            let ones = [1.0; 10].map(|one: f32| one * 3.0 * step as f32);
            assert_eq!(gradients(&reducer, 1)[..slice.part_of(0..10).len()], ones[slice.part_of(0..10)]);
        }
        Ok::<_, CommError>(rank.log().drain())
    });
    for log in ranks.unwrap() {
        assert!(log.iter().all(|record| record.op == OpKind::ReduceScatter && record.elements == 12), "{log:?}");
        assert_eq!(log.len(), 2 * (3 + 1));
    }
}

/// Copies of vectors by number, and how often each was taken in.
#[derive(Clone, Debug, Default)]
struct Elsewhere(Arc<Mutex<BTreeMap<usize, Copied>>>);

/// A vector, and how often it was taken in.
type Copied = (Vec<f32>, usize);

impl Parking for Elsewhere {
    fn put(&mut self, place: usize, vector: Buffer) -> Result<(), VectorError> {
        let mut parked = self.0.lock().unwrap();
        let times = parked.get(&place).map_or(0, |(_, times)| *times);
        parked.insert(place, (vector.as_slice()?.to_vec(), times + 1));
        Ok(())
    }

    fn get(&mut self, place: usize) -> Result<Buffer, VectorError> {
        Ok(Buffer::from_slice(&self.0.lock().unwrap().get(&place).ok_or("nothing was put there")?.0))
    }

    fn peek(&self, place: usize) -> Result<Buffer, VectorError> {
        self.clone().get(place)
    }

    fn begin(&mut self) {
        self.0.lock().unwrap().values_mut().for_each(|(_, times)| *times = 0);
    }
}

/// The gradients of five buckets over two steps of two tapes, as they are after each step.
fn steps(rank: &Rank, scatter: bool, axes: &[Axis], parking: Option<Elsewhere>) -> Vec<Vec<f32>> {
    let fills = if scatter { 2 } else { 1 };
    let bucket = |_| Bucket { scatter, fills, shares: 2 / fills, ..bucket(10, rounds(rank, axes.iter().copied())) };
    let parking = parking.map(|parking| Box::new(parking) as Box<dyn Parking>);
    let mut reducer = Reducer::parked((0..5).map(bucket).collect(), HostVectors, parking).unwrap();
    let mut found = Vec::new();
    for step in 0..2 {
        reducer.begin(step);
        for (tape, at) in (0..2).flat_map(|tape| (0..5).map(move |at| (tape, at))) {
            for member in [1, 0] {
                let (buffer, range, first) = reducer.gradient(at, member).unwrap();
                let values = &mut buffer.as_mut_slice::<f32>().unwrap()[range];
                for (i, x) in values.iter_mut().enumerate() {
                    let share = (1 + rank.world_rank()) as f32 * (at * 100 + tape * 10 + i + step as usize) as f32;
                    *x = if first { share } else { *x + share };
                }
                reducer.ready(at, member).unwrap();
            }
        }
        reducer.finish(|_| {}).unwrap();
        for at in [4, 0, 1, 2, 3, 4] {
            let seen = reducer.peek(at).unwrap();
            reducer.fetch(at).unwrap();
            assert!(seen.is_none_or(|seen| seen.as_slice::<f32>().unwrap() == gradients(&reducer, at)));
            found.push(gradients(&reducer, at));
        }
    }
    found
}

/// Whatever is summed how, and though no more than two buckets are in memory.
#[test]
fn parked_gradients_are_those_that_stay() {
    World::threads(&"dp=2,tp=2".parse().unwrap())
        .run_mesh(&"dp=2,tp=2".parse().unwrap(), |rank| {
            for axes in [&[][..], &[Axis::Dp], &[Axis::Dp, Axis::Tp]] {
                for scatter in [false, true].into_iter().filter(|scatter| !scatter || !axes.is_empty()) {
                    let elsewhere = Elsewhere::default();
                    let parked = steps(&rank, scatter, axes, Some(elsewhere.clone()));
                    assert_eq!(parked, steps(&rank, scatter, axes, None), "{axes:?}, slices: {scatter}");
                    assert!(parked[0].iter().any(|&x| x != 0.0));
                    let times: Vec<usize> = elsewhere.0.lock().unwrap().values().map(|(_, times)| *times).collect();
                    // Each tape's share is parked once, and a sum once more if a second round changed it; what was only
                    // read is not put again.
                    let most = 2 + usize::from(axes.len() > 1);
                    assert!(times.len() == 5 && times.iter().all(|times| (1..=most).contains(times)), "{times:?}");
                }
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
}
