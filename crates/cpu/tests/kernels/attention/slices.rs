//! Queries that are some of the tokens, against those of the whole sequence.

use super::grouped::Case;
use super::*;

/// The rows of some tokens of each sample, of a tensor `[batch, seq, ..]`.
fn rows<T: Copy>(x: &[T], [batch, seq]: [usize; 2], tokens: &Range<usize>) -> Vec<T> {
    let width = x.len() / (batch * seq);
    let of = |sample: &[T]| sample[tokens.start * width..tokens.end * width].to_vec();
    x.chunks(seq * width).flat_map(of).collect()
}

proptest! {
    /// Each query has the bits that it has in the whole sequence, forward and backward, whatever others are computed
    /// with it: alone, rotated, in documents, with dropout. The gradients of keys and values are shares of a sum.
    #[test]
    fn slices_of_the_queries_have_the_bits_of_the_whole(
        (batch, used, size) in (1..3usize, 1..3usize, 1..4usize),
        lens in prop::collection::vec(prop_oneof![1..20usize, 100..200usize], 1..4),
        head_dim in prop::sample::select(vec![2usize, 8, 20]),
        beside in (0..2usize, 0..2usize),
        turned: bool,
        drops: bool,
        packed in prop::option::of(any::<bool>()),
        precision in prop::sample::select(Precision::ALL.to_vec()),
    ) {
        let seq: usize = lens.iter().sum();
        let case = Case::new([batch, seq, used, size], head_dim, beside.into(), turned);
        let tiles = f32::tiles(precision);
        let [q, kv, dout] = case.operands::<f32>();
        let positions: Vec<i32> = (0..batch * seq).map(|at| (at % seq % (seq / 2 + 1)) as i32).collect();
        let packing = packed.map(|apart| Packing::new(&positions, [batch, seq], apart).unwrap());
        let masks = Masks { dropout: drops.then(|| dropout(0.3)), packing: packing.as_ref(), ..Masks::default() };
        let [out, lse] = case.run_with(tiles, &q, &kv, masks);
        let [dq, dkv] = case.backward_with(tiles, &q, &kv, &dout, masks);

        let (mut first_query, mut sum) = (0, vec![0.0; dkv.len()]);
        for len in lens {
            let tokens = first_query..first_query + len;
            let of = |x: &[f32]| rows(x, [batch, seq], &tokens);
            let slice = case.slice(len, Keys::new(seq, first_query));
            let [slice_out, slice_lse] = slice.run_with(tiles, &of(&q), &kv, masks);
            prop_assert_eq!(&slice_out, &of(&out));
            prop_assert_eq!(&slice_lse, &rows(&lse, [batch * case.dims.heads, seq], &tokens));
            let [slice_dq, slice_dkv] = slice.backward_with(tiles, &of(&q), &kv, &of(&dout), masks);
            prop_assert_eq!(&slice_dq, &of(&dq));
            sum.iter_mut().zip(slice_dkv).for_each(|(sum, share)| *sum += share);
            first_query += len;
        }
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let error = norm(&mut sum.iter().zip(&dkv).map(|(a, b)| a - b));
        prop_assert!(error <= 1e-5 * norm(&mut dkv.iter().copied()).max(1.0), "{} off", error);
    }

    /// Queries of several runs of tokens, in any order, have the bits of a call for each run; the gradients of keys and
    /// values are the sum of those of the calls, one after the other.
    #[test]
    fn runs_of_queries_in_one_call_have_the_bits_of_a_call_each(
        (batch, used, size) in (1..3usize, 1..3usize, 1..4usize),
        lens in prop::collection::vec(prop_oneof![1..4usize, 100..200usize], 2..5),
        seed: u64,
        head_dim in prop::sample::select(vec![2usize, 8, 20]),
        beside in (0..2usize, 0..2usize),
        turned: bool,
        drops: bool,
        packed in prop::option::of(any::<bool>()),
        window in prop::option::of(1..150usize),
        precision in prop::sample::select(Precision::ALL.to_vec()),
    ) {
        let keys: usize = lens.iter().sum();
        let mut runs: Vec<Range<usize>> =
            lens.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len)..*at)).collect();
        runs.sort_by_key(|run| (run.start as u64).wrapping_mul(seed | 1).rotate_left(17));
        runs.truncate(1.max(runs.len() - 1));
        let seq = runs.iter().map(|run| run.len()).sum();
        let whole = Case::new([batch, keys, used, size], head_dim, beside.into(), turned);
        let case = whole.slice(seq, Keys::new(keys, 0));
        let [_, kv, _] = whole.operands::<f32>();
        let [q, dout] = ["q", "dout"].map(|name| values::<f32>(name, elements(case.dims)));
        let tiles = f32::tiles(precision);
        let positions: Vec<i32> = (0..batch * keys).map(|at| (at % keys % (keys / 2 + 1)) as i32).collect();
        let packing = packed.map(|apart| Packing::new(&positions, [batch, keys], apart).unwrap());
        let masks = Masks { dropout: drops.then(|| dropout(0.3)), packing: packing.as_ref(), window, ..Masks::default() };
        let together = Masks { runs: Some(&runs), ..masks };
        let [out, lse] = case.run_with(tiles, &q, &kv, together);
        let [dq, dkv] = case.backward_with(tiles, &q, &kv, &dout, together);
        let (mut row, mut sum) = (0, None::<Vec<f32>>);
        for run in &runs {
            let of = |x: &[f32]| rows(x, [batch, seq], &(row..row + run.len()));
            let alone = case.slice(run.len(), Keys::new(keys, run.start));
            let [want, want_lse] = alone.run_with(tiles, &of(&q), &kv, masks);
            prop_assert_eq!(&of(&out), &want);
            prop_assert_eq!(&rows(&lse, [batch * case.dims.heads, seq], &(row..row + run.len())), &want_lse);
            let [want_dq, share] = alone.backward_with(tiles, &of(&q), &kv, &of(&dout), masks);
            prop_assert_eq!(&of(&dq), &want_dq);
            sum = Some(sum.map_or(share.clone(), |sum| sum.iter().zip(&share).map(|(a, b)| a + b).collect()));
            row += run.len();
        }
        prop_assert_eq!(Some(dkv), sum);
    }

    /// Blocks of queries with blocks of keys, as ranks meet them around a ring: outputs join by their log-sum-exps, and
    /// gradients, computed from the joined results, are summed. Rotated, in documents that begin within and behind a
    /// block, with dropout.
    #[test]
    fn blocks_of_keys_join_by_their_log_sum_exps(
        (batch, used, size) in (1..3usize, 1..3usize, 1..3usize),
        lens in prop::collection::vec(1..140usize, 1..4),
        beside in (0..2usize, 0..2usize),
        turned: bool,
        drops: bool,
        packed in prop::option::of((any::<bool>(), 1..200usize)),
        window in prop::option::of(1..150usize),
    ) {
        let seq: usize = lens.iter().sum();
        let case = Case::new([batch, seq, used, size], 8, beside.into(), turned);
        let tiles = f64::tiles(Precision::F32);
        let [q, kv, dout] = case.operands::<f64>();
        let packing = packed.map(|(apart, every)| {
            let positions: Vec<i32> = (0..batch * seq).map(|at| (at % seq % every) as i32).collect();
            Packing::new(&positions, [batch, seq], apart).unwrap()
        });
        let masks = Masks { dropout: drops.then(|| dropout(0.3)), packing: packing.as_ref(), window, ..Masks::default() };
        let [want, want_lse] = case.run_with(tiles, &q, &kv, masks);
        let [want_dq, want_dkv] = case.backward_with(tiles, &q, &kv, &dout, masks);
        let of = |x: &[f64], tokens: &Range<usize>| rows(x, [batch, seq], tokens);
        let blocks: Vec<Range<usize>> =
            lens.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len)..*end)).collect();
        let block = |queries: &Range<usize>, keys: &Range<usize>| {
            let keys = Keys { count: keys.len(), first_query: queries.start, first: keys.start, sequence: seq };
            case.slice(queries.len(), keys)
        };

        let mut dkvs = blocks.iter().map(|block| vec![0.0; kv.len() / seq * block.len()]).collect::<Vec<_>>();
        for (at, queries) in blocks.iter().enumerate() {
            let dims = block(queries, queries).dims;
            let own = of(&q, queries);
            let [mut out, mut lse] = [vec![0.0; own.len()], vec![f64::NEG_INFINITY; batch * used * size * queries.len()]];
            for keys in &blocks[..=at] {
                let [part, part_lse] = block(queries, keys).run_with(tiles, &own, &of(&kv, keys), masks);
                join(dims, [&mut out, &mut lse], [&part, &part_lse]);
            }
            assert_close(&out, &of(&want, queries), 1e-12);
            assert_close(&lse, &rows(&want_lse, [batch * used * size, seq], queries), 1e-12);
            let mut dq = vec![0.0; own.len()];
            for (keys, dkv) in blocks[..=at].iter().zip(&mut dkvs) {
                let saved = Saved { q: &own, kv: &of(&kv, keys), out: &out, lse: &lse };
                let [part, share] = block(queries, keys).backward_from(tiles, saved, &of(&dout, queries), masks);
                dq.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                dkv.iter_mut().zip(share).for_each(|(sum, share)| *sum += share);
            }
            assert_close(&dq, &of(&want_dq, queries), 1e-11);
        }
        for (keys, dkv) in blocks.iter().zip(dkvs) {
            assert_close(&dkv, &of(&want_dkv, keys), 1e-11);
        }
    }
}

#[test]
#[should_panic(expected = "queries without a document")]
fn queries_behind_the_documents_of_the_keys_are_refused() {
    let packing = Packing::new(&[0, 1], [1, 2], true).unwrap();
    let masks = Masks { packing: Some(&packing), ..Masks::default() };
    let dims = Dims { keys: Keys::new(2, 1), ..Dims::new([1, 2, 1, 2]) };
    let (mut out, mut lse) = ([0f32; 4], [0f32; 2]);
    let groups = Groups::alone(dims);
    grouped_forward(
        f32::tiles(Precision::F32),
        dims,
        groups,
        None,
        [&[0f32; 4], &[0f32; 8]],
        &mut out,
        &mut lse,
        masks,
        None,
    );
}
