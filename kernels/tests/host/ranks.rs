//! Reductions over ranks in the tree, and copies between tensors and buckets.

use crate::{assert_bits, launch, values};
use half::{bf16, f16};
use meshwork_core::tree;

#[test]
fn ranks_are_summed_in_the_tree() {
    let count = 300;
    for ranks in [1_usize, 2, 3, 5, 7, 16, 33] {
        let inputs: Vec<Vec<f32>> = (0..ranks).map(|rank| values(&format!("rank {rank}"), count)).collect();
        let column = |i: usize| inputs.iter().map(|x| x[i]).collect::<Vec<_>>();
        let sum = |terms: &[f32]| tree::sum(terms, |a, b| a + b).unwrap();
        let mut out = vec![f32::NAN; count];
        if !launch!("reduce_sum_f32", [count, 0], inputs.as_slice(), ranks, &mut out, count) {
            return;
        }
        assert_bits("sum", &out, &(0..count).map(|i| sum(&column(i))).collect::<Vec<_>>());
        launch!("reduce_max_f32", [count, 0], inputs.as_slice(), ranks, &mut out, count);
        assert_bits(
            "max",
            &out,
            &(0..count).map(|i| column(i).into_iter().fold(f32::MIN, f32::max)).collect::<Vec<_>>(),
        );

        let halves: Vec<Vec<f16>> = inputs.iter().map(|x| x.iter().map(|&x| f16::from_f32(x)).collect()).collect();
        let mut out = vec![f16::NAN; count];
        launch!("reduce_sum_f16", [count, 0], halves.as_slice(), ranks, &mut out, count);
        let terms = |i: usize| halves.iter().map(|x| x[i].to_f32()).collect::<Vec<_>>();
        assert!((0..count).all(|i| out[i] == f16::from_f32(sum(&terms(i)))), "{ranks} ranks of f16");

        let wholes: Vec<Vec<bf16>> = inputs.iter().map(|x| x.iter().map(|&x| bf16::from_f32(x)).collect()).collect();
        let mut out = vec![bf16::NAN; count];
        launch!("reduce_sum_bf16", [count, 0], wholes.as_slice(), ranks, &mut out, count);
        let terms = |i: usize| wholes.iter().map(|x| x[i].to_f32()).collect::<Vec<_>>();
        assert!((0..count).all(|i| out[i] == bf16::from_f32(sum(&terms(i)))), "{ranks} ranks of bf16");

        let bytes: Vec<Vec<u8>> = inputs.iter().map(|x| x.iter().map(|&x| (9.0 * x) as u8).collect()).collect();
        let mut out = vec![9_u8; count];
        launch!("reduce_sum_u8", [count, 0], bytes.as_slice(), ranks, &mut out, count);
        let total = |i: usize| bytes.iter().fold(0_u8, |sum, x| sum.wrapping_add(x[i]));
        assert!((0..count).all(|i| out[i] == total(i)), "{ranks} ranks of bytes");

        let (flat, mut out) = (inputs.concat(), vec![f32::NAN; count]);
        launch!("tree_sum", [count, 0], &flat, ranks, &mut out, count);
        assert_bits("vectors", &out, &(0..count).map(|i| sum(&column(i))).collect::<Vec<_>>());
    }
}

#[test]
fn a_maximum_is_nan_if_any_is() {
    for rank in 0..3 {
        let mut inputs = vec![vec![1.0_f32], vec![3.0], vec![2.0]];
        inputs[rank][0] = f32::NAN;
        let mut out = vec![0.0_f32];
        if launch!("reduce_max_f32", [1, 0], inputs.as_slice(), 3_usize, &mut out, 1_usize) {
            assert!(out[0].is_nan(), "rank {rank}");
        }
    }
}

#[test]
fn a_minimum_is_nan_if_any_is_and_integers_wrap_around() {
    for rank in 0..3 {
        let mut inputs = vec![vec![1.0_f64], vec![-3.0], vec![2.0]];
        let mut out = vec![0.0_f64];
        if !launch!("reduce_min_f64", [1, 0], inputs.as_slice(), 3_usize, &mut out, 1_usize) {
            return;
        }
        assert_eq!(out, [-3.0]);
        inputs[rank][0] = f64::NAN;
        launch!("reduce_min_f64", [1, 0], inputs.as_slice(), 3_usize, &mut out, 1_usize);
        assert!(out[0].is_nan(), "rank {rank}");
    }
    let (inputs, mut out) = (vec![vec![i64::MAX, 5], vec![2, -9]], vec![0_i64; 2]);
    launch!("reduce_sum_i64", [2, 0], inputs.as_slice(), 2_usize, &mut out, 2_usize);
    assert_eq!(out, [i64::MIN + 1, -4]);
    launch!("reduce_max_i64", [2, 0], inputs.as_slice(), 2_usize, &mut out, 2_usize);
    assert_eq!(out, [i64::MAX, 5]);
    let (inputs, mut out) = (vec![vec![i32::MIN, 5], vec![-2, -9]], vec![0_i32; 2]);
    launch!("reduce_sum_i32", [2, 0], inputs.as_slice(), 2_usize, &mut out, 2_usize);
    assert_eq!(out, [i32::MAX - 1, -4]);
}

#[test]
fn buckets_hold_their_tensors() {
    let tensors: Vec<Vec<f32>> = [5, 1, 300, 0, 17].map(|len| values(&len.to_string(), len)).to_vec();
    let mut starts = vec![0_i64];
    tensors.iter().for_each(|x| starts.push(starts[starts.len() - 1] + x.len() as i64));
    let (count, mut bucket) = (323_usize, vec![f32::NAN; 323]);
    if !launch!("bucket_gather", [count, 0], tensors.as_slice(), &starts, tensors.len(), &mut bucket, count) {
        return;
    }
    assert_eq!(bucket, tensors.concat());
    let mut back: Vec<Vec<f32>> = tensors.iter().map(|x| vec![f32::NAN; x.len()]).collect();
    launch!("bucket_scatter", [count, 0], &bucket, &starts, tensors.len(), back.as_mut_slice(), count);
    assert_eq!(back, tensors);
}
