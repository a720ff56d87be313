//! Token ids and targets outside the vocabulary are errors, on every shard: they must not silently become zeros.

use crate::common::{alone, on_mesh, on_tp, tape_of};
use meshwork_core::{Axis, Ty, Types};
use meshwork_tensor::{Tape, Tensor, Var};

const VOCAB: usize = 5;

fn ids(tape: &Tape, ids: &[i32], types: Types) -> Var {
    let tensor = Tensor::from_slice(tape.device(), ids, [ids.len()]).expect("host memory");
    tape.constant(tensor, types)
}

fn floats(tape: &Tape, shape: [usize; 2], types: Types) -> Var {
    let zeros = vec![0f32; shape[0] * shape[1]];
    tape.input(Tensor::from_slice(tape.device(), &zeros, shape).expect("host memory"), types)
}

#[test]
fn an_id_outside_the_vocabulary_is_refused() {
    let tape = tape_of(&alone());
    let table = floats(&tape, [VOCAB, 2], Types::NONE);
    for bad in [-1, 5] {
        let error = ids(&tape, &[4, 0, bad], Types::NONE).embedding(&table).unwrap_err().to_string();
        assert_eq!(error, format!("embedding: id {bad} at place 2 is not in a vocabulary of 5"));
    }
    ids(&tape, &[4, 0], Types::NONE).embedding(&table).expect("ids of the vocabulary");
}

#[test]
fn a_target_outside_the_vocabulary_is_refused_and_a_negative_one_is_masked() {
    let tape = tape_of(&alone());
    let logits = || floats(&tape, [2, VOCAB], Types::NONE);
    let error = logits().cross_entropy(&ids(&tape, &[0, 5], Types::NONE)).unwrap_err().to_string();
    assert_eq!(error, "cross_entropy: id 5 at place 1 is not in a vocabulary of 5");
    logits().cross_entropy(&ids(&tape, &[0, -1], Types::NONE)).expect("a masked target");
}

#[test]
fn every_shard_refuses_an_id_that_none_of_them_holds() {
    let errors = on_mesh("tp=2", |rank| {
        let tape = tape_of(&rank);
        let types = on_tp(Ty::Invariant);
        let table = floats(&tape, [3, 2], on_tp(Ty::Shard(0)));
        let lookup =
            ids(&tape, &[5], types).vocab_parallel_embedding(&table.padded(Axis::Tp, VOCAB).unwrap(), Axis::Tp, VOCAB);
        // The padding row of the last shard is not a word.
        lookup.unwrap_err().to_string()
    });
    for error in errors {
        assert_eq!(error, "embedding: id 5 at place 0 is not in a vocabulary of 5");
    }
}
