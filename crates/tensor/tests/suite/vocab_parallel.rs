//! The vocabulary cut over ranks: lookup and loss equal those of the whole vocabulary, and their gradients the finite
//! differences, also where the degree does not divide it and where the last rank holds nothing at all.

use crate::common::{NoParams, alone, dot, ids, input, integers, on_mesh, on_tp, tape_of, to_f64, values};
use meshwork_core::{Axis, Rank, Ty, Types};
use meshwork_tensor::Tensor;
use meshwork_tensor::tape::{Normaliser, Weights};
use meshwork_testkit::gradcheck::assert_gradient;
use std::sync::Arc;

/// (mesh, vocabulary): divisible, not divisible, and 4 ranks of ⌈5/4⌉ = 2 words, where the last rank has none.
const CUTS: [(&str, usize); 6] = [("tp=1", 5), ("tp=2", 6), ("tp=2", 7), ("tp=3", 7), ("tp=4", 10), ("tp=4", 5)];
const ROWS: usize = 5;

/// The last target is the last word; one row is masked.
fn targets(vocab: usize) -> Vec<i32> {
    vec![0, 2, -1, 3, vocab as i32 - 1]
}

/// (first word, words, stored words) of this rank.
fn held(rank: &Rank, vocab: usize) -> (usize, usize, usize) {
    let stored = vocab.div_ceil(rank.group(Axis::Tp).size());
    let first = (rank.coords().get(Axis::Tp) * stored).min(vocab);
    (first, stored.min(vocab - first), stored)
}

/// This rank's columns of `[ROWS, vocab]`, with `padding` in the columns that no word has.
fn columns(rank: &Rank, whole: &[f64], vocab: usize, padding: f64) -> Vec<f64> {
    let (first, words, stored) = held(rank, vocab);
    let row = |row: &[f64]| [&row[first..first + words], &vec![padding; stored - words]].concat();
    whole.chunks(vocab).flat_map(row).collect()
}

/// (loss, local gradient of the logits) for logits whole on the host.
fn sharded_loss(rank: &Arc<Rank>, logits: &[f64], vocab: usize, padding: f64) -> (f64, Vec<f64>) {
    let tape = tape_of(rank);
    let stored = held(rank, vocab).2;
    let shard = input(&tape, &columns(rank, logits, vocab, padding), &[ROWS, stored], on_tp(Ty::Shard(1)));
    let targets = ids(&tape, &targets(vocab), &[ROWS], on_tp(Ty::Invariant));
    let shard = shard.padded(Axis::Tp, vocab).unwrap();
    let loss = shard.vocab_parallel_cross_entropy(&targets, Axis::Tp, vocab).unwrap();
    assert_eq!(loss.types(), on_tp(Ty::Invariant));
    tape.backward_from_loss(&loss, Normaliser::Scale(0.25), Weights::Now, &mut NoParams).unwrap();
    (to_f64(loss.tensor()).iter().sum(), to_f64(&tape.take_grad(&shard).unwrap()))
}

fn whole_loss(logits: &[f64], vocab: usize) -> f64 {
    let tape = tape_of(&alone());
    let targets = ids(&tape, &targets(vocab), &[ROWS], Types::NONE);
    let losses = input(&tape, logits, &[ROWS, vocab], Types::NONE).cross_entropy(&targets).unwrap();
    to_f64(losses.tensor()).iter().sum()
}

#[test]
fn the_loss_is_that_of_the_whole_vocabulary_and_its_gradient_checks_numerically() {
    for (mesh, vocab) in CUTS {
        let logits = values("logits", ROWS * vocab);
        let shards = on_mesh(mesh, |rank| {
            let (loss, gradient) = sharded_loss(&rank, &logits, vocab, 0.0);
            // All ranks change the same element of the whole logits at the same time; each compares its own part.
            let (first, words, stored) = held(&rank, vocab);
            let mut whole_gradient = vec![0.0; ROWS * vocab];
            for (row, local) in whole_gradient.chunks_mut(vocab).zip(gradient.chunks(stored)) {
                row[first..first + words].copy_from_slice(&local[..words]);
                assert!(local[words..].iter().all(|&gradient| gradient == 0.0), "padding has no gradient");
            }
            (loss, whole_gradient, rank.world_rank())
        });
        let gradient = (0..ROWS * vocab).map(|i| shards.iter().map(|shard| shard.1[i]).sum()).collect::<Vec<f64>>();
        let name = format!("{vocab} words over {mesh}");
        assert_gradient(&name, &logits, &gradient, |logits| 0.25 * whole_loss(logits, vocab));
        for (loss, _, rank) in &shards {
            assert!((loss - whole_loss(&logits, vocab)).abs() < 1e-13, "{name}: loss on rank {rank}");
        }
        on_mesh(mesh, |rank| {
            let moved = |logits: &[f64]| 0.25 * sharded_loss(&rank, logits, vocab, 0.0).0;
            assert_gradient(&name, &logits, &gradient, moved);
        });
    }
}

#[test]
fn padding_never_enters_the_loss() {
    for (mesh, vocab) in CUTS {
        let logits = values("logits", ROWS * vocab);
        on_mesh(mesh, |rank| {
            let zero = sharded_loss(&rank, &logits, vocab, 0.0);
            assert_eq!(sharded_loss(&rank, &logits, vocab, 1e300), zero);
            assert_eq!(sharded_loss(&rank, &logits, vocab, f64::NAN), zero);
        });
    }
}

#[test]
fn large_logits_do_not_overflow() {
    let logits: Vec<f64> = values("logits", ROWS * 7).iter().map(|logit| logit * 1e4).collect();
    on_mesh("tp=3", |rank| {
        let (loss, gradient) = sharded_loss(&rank, &logits, 7, 0.0);
        let reference = whole_loss(&logits, 7);
        assert!((loss - reference).abs() <= 1e-12 * reference && gradient.iter().all(|g| g.is_finite()));
    });
}

const WIDTH: usize = 3;

#[test]
fn the_lookup_is_that_of_the_whole_table_and_so_is_its_gradient() {
    for (mesh, vocab) in CUTS {
        let words: Vec<i32> = vec![1, 0, vocab as i32 - 1, 1, 4];
        let table = integers("table", vocab * WIDTH);
        let seed = integers("seed", words.len() * WIDTH);
        let (expected, expected_gradient) = {
            let tape = tape_of(&alone());
            let whole = input(&tape, &table, &[vocab, WIDTH], Types::NONE);
            let out = ids(&tape, &words, &[words.len()], Types::NONE).embedding(&whole).unwrap();
            let seed = Tensor::from_slice(tape.device(), &seed, out.shape()).unwrap();
            tape.backward(&out, seed, Weights::Now, &mut NoParams).unwrap();
            (to_f64(out.tensor()), to_f64(&tape.take_grad(&whole).unwrap()))
        };
        assert_eq!(dot(&expected, &seed), dot(&table, &expected_gradient), "a lookup is linear in its table");
        on_mesh(mesh, |rank| {
            let (first, words_held, stored) = held(&rank, vocab);
            let range = first * WIDTH..(first + words_held) * WIDTH;
            let padding = vec![1e300; (stored - words_held) * WIDTH];
            let shard = [&table[range.clone()], &padding].concat();
            let tape = tape_of(&rank);
            let shard = input(&tape, &shard, &[stored, WIDTH], on_tp(Ty::Shard(0)));
            let ids = ids(&tape, &words, &[words.len()], on_tp(Ty::Invariant));
            let shard = shard.padded(Axis::Tp, vocab).unwrap();
            let share = ids.vocab_parallel_embedding(&shard, Axis::Tp, vocab).unwrap();
            assert_eq!(share.types(), on_tp(Ty::Partial));
            let out = share.all_reduce(Axis::Tp).unwrap();
            assert_eq!(to_f64(out.tensor()), expected, "{vocab} words over {mesh}");
            let seed = Tensor::from_slice(tape.device(), &seed, out.shape()).unwrap();
            tape.backward(&out, seed, Weights::Now, &mut NoParams).unwrap();
            let gradient = to_f64(&tape.take_grad(&shard).unwrap());
            assert_eq!(gradient[..range.len()], expected_gradient[range.clone()], "{vocab} words over {mesh}");
            assert!(gradient[range.len()..].iter().all(|&gradient| gradient == 0.0), "padding has no gradient");
        });
    }
}
