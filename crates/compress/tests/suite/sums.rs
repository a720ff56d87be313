//! Sums over ranks: the same bits on every rank, and the predicted communication.

use crate::common::{SCHEMES, bits, scheme, square, values};
use meshwork_compress::{Compressor, Partial, Reduction, Shape, sum::traffic};
use meshwork_core::comm::record;
use meshwork_core::{Group, Record};
use meshwork_testkit::run_world;

/// Every scheme, on one to four ranks, of lengths that they do not divide, below their number, and none at all.
#[test]
fn ranks_agree_and_communicate_what_was_predicted() {
    let shapes = [(1, 0), (0, 5), (1, 1), (1, 3), (2, 2), (3, 7), (7, 33), (2, 700)];
    for text in SCHEMES {
        let scheme = scheme(text);
        for (rows, cols) in shapes {
            let shape = Shape::matrix(rows, cols).unwrap();
            if scheme.check(shape).is_err() {
                continue;
            }
            for ranks in 1..=4 {
                let sums = run_world(ranks, |group| {
                    let place = [group.rank(), ranks];
                    let feedback = if text.contains("unbiased") { "none" } else { "ef" };
                    let feedback = feedback.parse().unwrap();
                    // Not known to contract in these shapes.
                    let reduction = Reduction::new("w", Box::new(scheme), feedback, shape, place, 7);
                    let mut reduction = reduction
                        .or_else(|_| Reduction::new("w", Box::new(scheme), "none".parse().unwrap(), shape, place, 7))
                        .unwrap();
                    let mut last = Vec::new();
                    for step in 0..2 {
                        let x = values(&format!("{} {step}", group.rank()), shape.len());
                        last = reduction.all_reduce(&group, step, Partial(&x)).unwrap().to_vec();
                        let calls: Vec<Record> = group.log().drain();
                        assert_eq!(calls, reduction.traffic(group.name()).unwrap(), "{text} of {shape} on {place:?}");
                    }
                    last
                });
                sums.iter().for_each(|sum| assert_eq!(bits(sum), bits(&sums[0]), "{text} of {shape} on {ranks} ranks"));
            }
        }
    }
}

/// A rank without peers predicts and records the same.
#[test]
fn a_rank_alone_records_the_same_communication() {
    let shape = Shape::matrix(20, 50).unwrap();
    for text in SCHEMES {
        for rank in 0..3 {
            let group = Group::from(record::communicator("dp", rank, vec![0, 1, 2]).unwrap());
            let scheme = scheme(text);
            let feedback = "none".parse().unwrap();
            let mut reduction = Reduction::new("w", Box::new(scheme), feedback, shape, [rank, 3], 7).unwrap();
            let predicted = traffic(&scheme, shape, "dp", rank, 3).unwrap();
            // What peers did not send are no messages: the calls before that are the same.
            let _ = reduction.all_reduce(&group, 0, Partial(&values("x", 1000)));
            let calls = group.log().drain();
            assert!(!calls.is_empty() && predicted.starts_with(&calls), "{text}: {calls:?} of {predicted:?}");
        }
    }
}

/// Bytes per rank and step against an all-reduce in f32, 2·4·n·(ranks-1)/ranks.
#[test]
fn the_communication_of_each_method() {
    let (shape, ranks) = (Shape::matrix(100, 100).unwrap(), 4);
    let bytes =
        |text: &str| -> f64 { traffic(&scheme(text), shape, "dp", 0, ranks).unwrap().iter().map(Record::bytes).sum() };
    assert_eq!(bytes("none"), 60_000.0);
    assert_eq!(bytes("bf16"), 30_000.0);
    // Three shards of 2500 codes of four bits (313 bytes a plane), minimum, step and header; then three again.
    assert_eq!(bytes("quant:4"), 6.0 * (16.0 + 8.0 + 4.0 * 313.0));
    assert_eq!(bytes("sign"), 6.0 * (16.0 + 4.0 + 313.0));
    // w = 3: 375 bytes of low bits, 282 of rests; 1000 values; from three others.
    assert_eq!(bytes("topk:0.1"), 3.0 * (16.0 + 375.0 + 282.0 + 4000.0));
    assert_eq!(bytes("randk:0.1"), 6000.0);
    assert_eq!(bytes("powersgd:4"), 1.5 * 4.0 * 800.0);
}

/// Feedback loses nothing: what all steps summed and what the residuals still hold is what went in.
#[test]
fn sums_and_residuals_make_up_what_went_in() {
    let (shape, ranks, steps) = (Shape::matrix(6, 40).unwrap(), 3, 5);
    for text in
        ["topk:0.1", "topk:0.2+quant:8", "quant:4/block16", "sign", "bf16", "fp8:e5m2", "randk:0.3", "powersgd:2"]
    {
        let results = run_world(ranks, |group| {
            let place = [group.rank(), ranks];
            let mut reduction =
                Reduction::new("w", Box::new(scheme(text)), "ef".parse().unwrap(), shape, place, 7).unwrap();
            let (mut sums, mut parts) = (vec![0.0_f64; shape.len()], vec![0.0_f64; shape.len()]);
            for step in 0..steps {
                let x = values(&format!("{} {step}", group.rank()), shape.len());
                parts.iter_mut().zip(&x).for_each(|(sum, x)| *sum += f64::from(*x));
                let sum = reduction.all_reduce(&group, step, Partial(&x)).unwrap();
                sums.iter_mut().zip(&*sum).for_each(|(sum, x)| *sum += f64::from(*x));
            }
            for (spec, values) in reduction.states() {
                let range = if spec.name == "w.shard_residual" { spec.slice[0].clone() } else { 0..shape.len() };
                if spec.name != "w.warm" {
                    parts[range].iter_mut().zip(values).for_each(|(sum, e)| *sum -= f64::from(*e));
                }
            }
            (sums, parts)
        });
        let mut missing: Vec<f64> = results[0].0.clone();
        results.iter().for_each(|(_, parts)| missing.iter_mut().zip(parts).for_each(|(m, part)| *m -= part));
        let (missing, whole) =
            (square(missing.iter().map(|x| *x as f32)).sqrt(), square(results[0].0.iter().map(|x| *x as f32)).sqrt());
        // An all-reduce in bf16 rounds the sum, and no residual has that: half a unit of 2^-8.
        let bound = if text == "bf16" { 5e-3 } else { 1e-5 };
        assert!(missing <= bound * whole, "{text}: {missing} of {whole}");
    }
}
