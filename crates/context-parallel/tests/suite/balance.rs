//! Equal work for packed documents.

use meshwork_context_parallel::{Balance, ByDocument};
use meshwork_tensor::op::Order;

/// The keys that tokens of documents of these lengths read.
fn reads(documents: &[usize]) -> Vec<u64> {
    documents.iter().flat_map(|&length| 1..=length as u64).collect()
}

fn work_of(order: &Order, reads: &[u64], ranks: usize) -> Vec<u64> {
    let held = reads.len() / ranks;
    let of = |rank| order.tokens(reads.len(), rank * held..(rank + 1) * held).unwrap();
    (0..ranks).map(|rank| of(rank).into_iter().flatten().map(|token| reads[token]).sum()).collect()
}

/// 88 keys are read: a zigzag over the sequence does not share them out, and equal work is possible.
#[test]
fn packed_documents_have_equal_work() {
    let reads = reads(&[4, 12]);
    assert_eq!(work_of(&Order::zigzag(2), &reads, 2), [52, 36]);
    assert_eq!(work_of(&ByDocument::default().order(&reads, 2).unwrap(), &reads, 2), [44, 44]);
}

/// A few long documents: half of the default's chunks are enough, and ranks have runs of two of them.
#[test]
fn neighbours_stay_together_where_work_is_equal_nevertheless() {
    let reads = reads(&[600, 30, 250, 120, 400, 70, 130]);
    let order = ByDocument::default().order(&reads, 2).unwrap();
    let of = |order: &Order| (0..2).map(|rank| order.tokens(1600, rank * 800..(rank + 1) * 800).unwrap().len()).max();
    let work = work_of(&order, &reads, 2);
    assert!(work[0].abs_diff(work[1]) * 100 <= work[0] + work[1], "{work:?}");
    assert!(of(&order) <= Some(3), "{order:?}");
}

#[test]
fn every_rank_has_as_many_tokens_and_nearly_the_same_work() {
    let mut state = 7_u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for ranks in [2, 3, 4, 8] {
        for _ in 0..20 {
            let seq = ranks * 8 * 16;
            let mut documents = Vec::new();
            let mut rest = seq;
            while rest > 0 {
                let length = (1 + draw(seq as u64 / 3)).min(rest as u64) as usize;
                documents.push(length);
                rest -= length;
            }
            let reads = reads(&documents);
            let work = work_of(&ByDocument::default().order(&reads, ranks).unwrap(), &reads, ranks);
            let (most, mean) = (*work.iter().max().unwrap() as f64, work.iter().sum::<u64>() as f64 / ranks as f64);
            assert!(most <= 1.02 * mean, "{ranks} ranks, {documents:?}: {work:?}");
        }
    }
    // Without documents it is as good as a zigzag.
    let whole = reads(&[512]);
    let work = work_of(&ByDocument::default().order(&whole, 4).unwrap(), &whole, 4);
    assert!(work.iter().all(|&of| of == work[0]), "{work:?}");
    assert!(ByDocument::default().order(&whole[..100], 4).unwrap_err().to_string().contains("100 tokens in 32"));
}
