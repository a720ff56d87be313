use super::*;

/// Examples whose tokens are their number, from 1 on, and of which the last token is the answer.
fn examples(lengths: &[usize]) -> Stream {
    let (mut tokens, mut masked, mut starts): (Vec<i32>, Vec<bool>, Vec<u64>) = Default::default();
    for (at, &len) in lengths.iter().enumerate() {
        starts.push(tokens.len() as u64);
        tokens.extend(vec![at as i32 + 1; len]);
        masked.extend((0..len).map(|token| token + 1 < len));
    }
    Stream::new(Tokens::Memory(tokens.into()), Documents::Starts(starts.into())).unwrap().masked(masked)
}

/// The tokens and their masks.
fn laid(packed: &Packed) -> (Vec<i32>, Vec<bool>) {
    let stream = &packed.stream;
    (stream.tokens.read(0..stream.tokens.len()).unwrap(), stream.masked.to_vec())
}

#[test]
fn examples_lie_whole_in_rows_and_padding_is_no_target() {
    let packed = pack(&examples(&[3, 5, 4, 2]), 1, 8, 0.0, Overlong::Truncate).unwrap();
    let (tokens, masked) = laid(&packed);
    assert_eq!(tokens, [1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 0, 0, 0]);
    let learnt: Vec<usize> = (0..tokens.len()).filter(|&at| !masked[at]).collect();
    assert_eq!(learnt, [2, 7, 11, 13]);
    let starts = packed.stream.documents.starts(0..17, &tokens).unwrap();
    assert_eq!(starts, [3, 8, 12, 14, 16]);
    assert_eq!(packed.training, 17);
    let told = "4 examples of 14 tokens in 2 rows of 8, 87.5% full (one behind the other: 2 rows)";
    assert_eq!(packed.told, told);
}

#[test]
fn best_fit_takes_the_fullest_row_with_room() {
    let lengths = [6, 5, 3, 2, 4, 4];
    let packed = pack(&examples(&lengths), 1, 8, 0.0, Overlong::Truncate).unwrap();
    assert_eq!(laid(&packed).0, [1, 1, 1, 1, 1, 1, 4, 4, 2, 2, 2, 2, 2, 3, 3, 3, 5, 5, 5, 5, 6, 6, 6, 6, 0]);
    assert!(packed.told.ends_with("100.0% full (one behind the other: 4 rows)"), "{}", packed.told);
}

/// In the order of the file the two short ones would share a row, and the long ones lie alone.
#[test]
fn the_longest_examples_are_placed_first() {
    let packed = pack(&examples(&[3, 3, 5, 5]), 1, 8, 0.0, Overlong::Truncate).unwrap();
    assert!(packed.told.ends_with("in 2 rows of 8, 100.0% full (one behind the other: 3 rows)"), "{}", packed.told);
}

/// Whatever the lengths: each example once, in one row, and no fewer rows than tokens need.
#[test]
fn every_example_is_packed_once() {
    for seed in 0..20u64 {
        let lengths: Vec<usize> = (0..50).map(|at| 2 + (hash::combine(seed, at) % 15) as usize).collect();
        let examples: Vec<Example> = lengths.iter().map(|&len| std::iter::once(0..len).collect()).collect();
        let rows = best_fit(&examples, 16);
        let mut all = rows.concat();
        all.sort_unstable();
        assert_eq!(all, (0..50).collect::<Vec<_>>());
        assert!(rows.iter().all(|row| row.iter().map(|&at| lengths[at]).sum::<usize>() <= 16));
        assert!(rows.len() <= next_fit(&examples, 16));
        assert!(rows.is_sorted_by_key(|row| row[0]), "rows follow the order of the file");
    }
}

#[test]
fn long_examples_are_cut_or_left_out_and_counted() {
    // The second is longer than a row, and its answer is its last token, which is cut off.
    let stream = examples(&[4, 12, 6]);
    let cut = pack(&stream, 1, 8, 0.0, Overlong::Truncate).unwrap();
    assert!(
        cut.told.contains("; 1 of more than 8 tokens truncated; 1 without an answer in what is left of them left out"),
        "{}",
        cut.told
    );
    let skipped = pack(&stream, 1, 8, 0.0, Overlong::Skip).unwrap();
    assert_eq!(laid(&cut).0, laid(&skipped).0);
    assert!(skipped.told.ends_with("; 1 of more than 8 tokens left out"), "{}", skipped.told);
    // An answer that begins in time is learnt as far as it goes.
    let answered = Stream { masked: vec![false; 22].into(), ..stream };
    let cut = pack(&answered, 1, 8, 0.0, Overlong::Truncate).unwrap();
    let (tokens, masked) = laid(&cut);
    assert_eq!(tokens[8..16], [2; 8]);
    assert_eq!(masked[8..16], [true, false, false, false, false, false, false, false]);
}

#[test]
fn what_is_held_out_is_packed_by_itself() {
    let packed = pack(&examples(&[8, 3, 3, 2, 6, 2]), 1, 8, 0.34, Overlong::Truncate).unwrap();
    let (tokens, _) = laid(&packed);
    assert_eq!(packed.training, 17);
    assert_eq!(tokens[17..], [5, 5, 5, 5, 5, 5, 6, 6, 0], "the last two of six, behind the token after training");
    assert!(packed.told.contains("4 examples of 16 tokens in 2 rows"), "{}", packed.told);
    assert!(packed.told.contains("; 2 held out for validation"), "{}", packed.told);
}

#[test]
fn the_hash_tells_which_tokens_are_learnt() {
    let stream = examples(&[4, 4]);
    let other = Stream { masked: vec![false; 8].into(), ..stream.clone() };
    let of = |stream| pack(stream, 1, 8, 0.0, Overlong::Truncate).unwrap().stream.hash;
    assert_ne!(of(&stream), of(&other));
}

/// Pairs of 2 + 3, 4 + 2 and 2 + 2 tokens: the answers of a pair follow each other, whatever the order of packing.
#[test]
fn pairs_lie_whole_in_rows() {
    let packed = pack(&examples(&[2, 3, 4, 2, 2, 2]), 2, 10, 0.0, Overlong::Truncate).unwrap();
    let (tokens, masked) = laid(&packed);
    assert_eq!(tokens, [1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 3, 3, 3, 3, 4, 4, 5, 5, 6, 6, 0]);
    let learnt: Vec<usize> = (0..tokens.len()).filter(|&at| !masked[at]).collect();
    assert_eq!(learnt, [1, 4, 13, 15, 17, 19]);
    let starts = packed.stream.documents.starts(0..21, &tokens).unwrap();
    assert_eq!(starts, [2, 5, 10, 14, 16, 18, 20]);
    assert_eq!(packed.told, "3 pairs of 15 tokens in 2 rows of 10, 75.0% full (one behind the other: 2 rows)");
}

/// Of a pair that is longer than a row each answer has half of it.
#[test]
fn both_answers_of_a_long_pair_are_cut_alike() {
    let stream = Stream { masked: vec![false; 22].into(), ..examples(&[3, 9, 5, 5]) };
    let cut = pack(&stream, 2, 8, 0.0, Overlong::Truncate).unwrap();
    assert_eq!(laid(&cut).0, [1, 1, 1, 2, 2, 2, 2, 0, 3, 3, 3, 3, 4, 4, 4, 4, 0]);
    assert!(cut.told.contains("; 2 of more than 8 tokens truncated"), "{}", cut.told);
    // Answers that are the same as far as they go.
    let tokens = Tokens::Memory([7, 7, 7, 7, 7, 7, 7, 7, 8, 1, 2, 1, 3].into());
    let stream = Stream::new(tokens, Documents::Starts([0, 4, 9, 11].into())).unwrap();
    let cut = pack(&stream, 2, 8, 0.0, Overlong::Truncate).unwrap();
    assert_eq!(laid(&cut).0, [1, 2, 1, 3, 0, 0, 0, 0, 0]);
    assert!(cut.told.contains("; 1 without two different answers"), "{}", cut.told);
    let skipped = pack(&stream, 2, 8, 0.0, Overlong::Skip).unwrap();
    assert!(skipped.told.ends_with("; 1 of more than 8 tokens left out"), "{}", skipped.told);
}
