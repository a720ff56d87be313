//! Messages between the writers of a world of threads.

use meshwork_checkpoint::{Exchange, threads};
use std::thread;

#[test]
fn every_rank_gets_the_messages_of_every_round() {
    let ends: Vec<_> = threads(5).into_iter().enumerate().collect();
    let ranks: Vec<_> = ends
        .into_iter()
        .map(|(rank, mut end)| {
            thread::spawn(move || {
                for round in 0..100u8 {
                    let all = end.all_gather(vec![round, rank as u8]).unwrap();
                    assert_eq!(*all, [0, 1, 2, 3, 4].map(|other| vec![round, other]));
                }
            })
        })
        .collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

#[test]
fn a_rank_that_left_is_named() {
    let mut ends = threads(3);
    let (last, mut middle) = (ends.pop(), ends.pop().unwrap());
    let waiting = thread::spawn(move || middle.all_gather(Vec::new()));
    drop(last);
    assert_eq!(waiting.join().unwrap().unwrap_err().problem, "rank 2 ended");
    assert_eq!(ends[0].all_gather(Vec::new()).unwrap_err().problem, "rank 2 ended");
}
