//! Tables whole and in shards.

use super::oracle::{check_gradient, dot, values};
use meshwork_cpu::kernels::embedding::*;
use meshwork_cpu::kernels::round::{Loaded, Stored};
use proptest::prelude::*;

proptest! {
    /// Two shards give the rows of the whole table and its gradient, bit for bit, wherever it is cut.
    #[test]
    fn shards_add_up_to_the_whole(ids in prop::collection::vec(0..12_i32, 0..30), h in 1..40_usize, cut in 0..=12_usize) {
        let (table, dout): (Vec<f32>, Vec<f32>) = (values("w", 12 * h), values("dout", ids.len() * h));
        let get = |first: usize, rows: usize| {
            let mut out = vec![9.0; ids.len() * h];
            lookup(&ids, Loaded::Full(&table[first * h..][..rows * h]), first, h, Stored::Full(&mut out));
            out
        };
        let whole = get(0, 12);
        for (i, &id) in ids.iter().enumerate() {
            prop_assert_eq!(&whole[i * h..][..h], &table[id as usize * h..][..h]);
        }
        let (low, high) = (get(0, cut), get(cut, 12 - cut));
        let sum: Vec<f32> = low.iter().zip(&high).map(|(a, b)| a + b).collect();
        prop_assert_eq!(sum, whole);

        let mut dtable = table.clone();
        lookup_backward(&ids, Loaded::Full(&dout), 0, h, &mut dtable);
        for j in 0..table.len() {
            let terms = ids.iter().zip(dout.iter().skip(j % h).step_by(h));
            let want = terms.filter(|(id, _)| **id as usize == j / h).fold(table[j], |sum, (_, g)| sum + g);
            prop_assert_eq!(dtable[j], want);
        }
        let mut parts = table.clone();
        let (low, high) = parts.split_at_mut(cut * h);
        lookup_backward(&ids, Loaded::Full(&dout), 0, h, low);
        lookup_backward(&ids, Loaded::Full(&dout), cut, h, high);
        prop_assert_eq!(parts, dtable);
    }

    #[test]
    fn positions_add_rows_and_sum_sequences(b in 0..4_usize, s in 0..6_usize, h in 1..20_usize, first in 0..3_usize) {
        let rows = first + s + 1;
        let (x, table): (Vec<f32>, Vec<f32>) = (values("x", b * s * h), values("wpe", rows * h));
        let mut out = vec![9.0; x.len()];
        add_positions(&x, &table, first, s, h, &mut out);
        let mut dtable = table.clone();
        add_positions_backward(&x, first, s, h, &mut dtable);
        for (i, row) in out.chunks(h).enumerate() {
            let position = first + i % s;
            prop_assert!((0..h).all(|j| row[j] == x[i * h + j] + table[position * h + j]));
        }
        for (row, got) in dtable.chunks(h).enumerate() {
            for j in 0..h {
                let used = (first..first + s).contains(&row);
                let at = |sample: usize| x[(sample * s + row - first) * h + j];
                let old = table[row * h + j];
                let want = if used { (0..b).fold(old, |sum, sample| sum + at(sample)) } else { old };
                prop_assert_eq!(got[j], want);
            }
        }
    }
}

#[test]
fn leaves_add_up_in_the_tree() {
    let (blocks, block_len, words, h) = (7, 9, 5, 3);
    for run in 0..20 {
        let ids: Vec<i32> = (0..blocks * block_len).map(|i| ((i * (run + 3) + i * i / 4) % 11) as i32 - 2).collect();
        let dout: Vec<f32> = values(&format!("dout {run}"), ids.len() * h);
        // Dense blocks, added up by the definition of the tree.
        let dense: Vec<Vec<f32>> = (0..blocks)
            .map(|block| {
                let mut dtable = vec![0.0; words * h];
                let of = block * block_len..(block + 1) * block_len;
                lookup_backward(&ids[of.clone()], Loaded::Full(&dout[of.start * h..of.end * h]), 1, h, &mut dtable);
                dtable
            })
            .collect();
        let mut dtable = vec![0.0; words * h];
        lookup_backward_tree(&ids, Loaded::Full(&dout), 1, h, blocks, &mut dtable);
        let (mut tree_differs, mut order) = (false, vec![0.0; words * h]);
        lookup_backward(&ids, Loaded::Full(&dout), 1, h, &mut order);
        for j in 0..words * h {
            let column: Vec<f32> = dense.iter().map(|block| block[j]).collect();
            let want = meshwork_core::tree::sum(&column, |a, b| a + b).unwrap();
            assert_eq!(dtable[j].to_bits(), want.to_bits(), "run {run}, element {j}");
            tree_differs |= dtable[j] != order[j];
        }
        assert!(tree_differs, "the values must tell orders apart");
    }
}

#[test]
fn negative_and_foreign_ids_give_zeros_and_no_gradient() {
    let (ids, table) = ([-1, 3, 7, i32::MIN, i32::MAX], [1.0_f32; 8]);
    let mut out = [9.0; 10];
    lookup(&ids, Loaded::Full(&table), 4, 2, Stored::Full(&mut out));
    assert_eq!(out, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    let mut dtable = table;
    lookup_backward(&ids, Loaded::Full(&out), 4, 2, &mut dtable);
    assert_eq!(dtable, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
}

#[test]
fn gradients_match_finite_differences() {
    let (ids, h) = ([4, 2, 9, 4, 3, 5], 3);
    let (table, dout): (Vec<f64>, Vec<f64>) = (values("w", 4 * h), values("dout", ids.len() * h));
    let apply = |f: &dyn Fn(&mut [f64])| {
        let mut out = vec![9.0; dout.len()];
        f(&mut out);
        dot(&out, &dout)
    };
    let mut dtable = vec![0.0; table.len()];
    lookup_backward(&ids, Loaded::Full(&dout), 2, h, &mut dtable);
    check_gradient(&table, &dtable, |t| apply(&|out| lookup(&ids, Loaded::Full(t), 2, h, Stored::Full(out))));
    let mut dtable = vec![0.0; table.len()];
    add_positions_backward(&dout, 1, 2, h, &mut dtable);
    check_gradient(&table, &dtable, |t| apply(&|out| add_positions(&dout, t, 1, 2, h, out)));
}

#[test]
#[should_panic(expected = "positions 3 .. 5 in a table of 8 elements, 2 a row")]
fn positions_beyond_the_table_are_refused() {
    add_positions(&[0.0_f32; 4], &[0.0; 8], 3, 2, 2, &mut [0.0; 4]);
}
