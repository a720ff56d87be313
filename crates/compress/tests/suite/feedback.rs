//! States: declared, saved, loaded and resharded.

use crate::common::{bits, scheme, values};
use meshwork_compress::{CompressError, Partial, Reduction, Shape, StateKind, reshard};
use meshwork_testkit::run_world;
use std::collections::BTreeMap;

fn reduction(text: &str, feedback: &str, shape: Shape, place: [usize; 2]) -> Reduction {
    Reduction::new("h.0.w", Box::new(scheme(text)), feedback.parse().unwrap(), shape, place, 7).unwrap()
}

#[test]
fn states_are_declared_by_name_dims_and_slice() {
    let shape = Shape::matrix(6, 10).unwrap();
    let declared = |text: &str, feedback: &str| -> Vec<String> {
        let reduction = reduction(text, feedback, shape, [1, 4]);
        let states = reduction.states();
        assert_eq!(reduction.state_bytes(), states.iter().map(|(_, values)| 4 * values.len()).sum::<usize>());
        for (spec, values) in &states {
            assert_eq!(spec.slice.iter().map(|range| range.len()).product::<usize>(), values.len(), "{spec:?}");
            assert!(spec.slice.iter().zip(&spec.dims).all(|(range, dim)| range.end <= *dim), "{spec:?}");
            let own = spec.kind == StateKind::PerReplica;
            assert_eq!(own, spec.dims[0] == 4 && spec.slice[0] == (1..2), "{spec:?}");
        }
        states.into_iter().map(|(spec, values)| format!("{} {:?} {}", spec.name, spec.kind, values.len())).collect()
    };
    assert!(declared("topk:0.1", "none").is_empty());
    assert_eq!(declared("topk:0.1", "ef"), ["h.0.w.residual PerReplica 60"]);
    assert_eq!(declared("topk:0.1", "ef21"), ["h.0.w.estimate PerReplica 60", "h.0.w.sum_estimate Replicated 60"]);
    assert_eq!(
        declared("topk:0.1", "ef21m:0.1"),
        ["h.0.w.estimate PerReplica 60", "h.0.w.momentum PerReplica 60", "h.0.w.sum_estimate Replicated 60"]
    );
    assert_eq!(declared("powersgd:2", "ef"), ["h.0.w.residual PerReplica 60", "h.0.w.warm Replicated 20"]);
    assert_eq!(declared("quant:4", "ef"), ["h.0.w.residual PerReplica 60", "h.0.w.shard_residual Slice 15"]);
}

/// Stopped after two steps and resumed from the declared states, a run has the bits of one that was not.
#[test]
fn a_resumed_reduction_goes_on_with_the_same_bits() {
    let shape = Shape::matrix(6, 10).unwrap();
    for (text, feedback) in [
        ("topk:0.1", "ef"),
        ("topk:0.1", "ef21m:0.1"),
        ("powersgd:2", "ef"),
        ("powersgd:2", "ef21"),
        ("quant:4", "ef"),
        ("sign", "ef21"),
    ] {
        run_world(3, |group| {
            let place = [group.rank(), 3];
            let x = |step| values(&format!("{} {step}", group.rank()), shape.len());
            let mut whole = reduction(text, feedback, shape, place);
            for step in 0..2 {
                whole.all_reduce(&group, step, Partial(&x(step))).unwrap();
            }
            let saved: BTreeMap<String, Vec<f32>> =
                whole.states().into_iter().map(|(spec, values)| (spec.name, values.to_vec())).collect();
            let mut resumed = reduction(text, feedback, shape, place);
            resumed.load::<CompressError>(whole.last_step(), |spec| Ok(saved[&spec.name].clone())).unwrap();
            for step in 2..4 {
                let wanted = whole.all_reduce(&group, step, Partial(&x(step))).unwrap().to_vec();
                let got = resumed.all_reduce(&group, step, Partial(&x(step))).unwrap();
                assert_eq!(bits(&got), bits(&wanted), "{text} with {feedback}, step {step}");
            }
            let error = resumed.load::<CompressError>(None, |_| Ok(vec![0.0])).unwrap_err().to_string();
            assert!(error.starts_with("the state has 1 elements, it must have"), "{error}");
        });
    }
}

/// From any number of replicas to any other, the sum stays: exactly, of whole numbers.
#[test]
fn resharding_keeps_the_sum() {
    for old in 1..7 {
        let replicas: Vec<Vec<f32>> =
            (0..old).map(|replica| (0..5).map(|i| (replica * 31 + i * 7) as f32 - 40.0).collect()).collect();
        let sum =
            |replicas: &[Vec<f32>]| (0..5).map(|i| replicas.iter().map(|r| r[i]).sum::<f32>()).collect::<Vec<_>>();
        for new in 1..7 {
            let got = reshard(&replicas, new).unwrap();
            assert_eq!((got.len(), sum(&got)), (new, sum(&replicas)), "{old} to {new}");
            if new == old {
                assert_eq!(got, replicas);
            }
        }
    }
    assert_eq!(reshard(&[vec![1.0], vec![2.0], vec![4.0], vec![8.0]], 2).unwrap(), [[3.0], [12.0]]);
    assert_eq!(reshard(&[vec![1.0], vec![2.0]], 3).unwrap(), [[1.0], [2.0], [0.0]]);
    assert!(reshard(&[vec![1.0], vec![]], 3).is_err() && reshard(&[], 3).is_err() && reshard(&[vec![1.0]], 0).is_err());
}
