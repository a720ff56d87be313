//! Embeddings, rotation and dropout, bit by bit against the CPU.

use crate::launch::Null;
use crate::{assert_bits, launch, values};
use meshwork_core::Buffer;
use meshwork_cpu::Cpu;
use meshwork_cpu::kernels::dropout::{Mask, Region, dropout};
use meshwork_cpu::kernels::embedding;
use meshwork_cpu::kernels::round::{Loaded, Stored};
use meshwork_kernels::TABLE_ROWS;
use meshwork_tensor::kernel::{Embedding, TableGrad};
use meshwork_tensor::random::key;

fn ids(count: usize, vocab: usize) -> Vec<i32> {
    (0..count).map(|i| ((i * i * 7 + i / 3) % vocab) as i32).collect()
}

/// The places of ids in `first .. first + rows`, sorted by buckets, and the end of each bucket: what permutation.cu
/// makes of them.
pub fn bucketed(ids: &[i32], first: usize, rows: usize) -> (Vec<i32>, Vec<i32>) {
    let size = TABLE_ROWS as usize;
    let (mut order, mut ends) = (Vec::new(), Vec::new());
    for bucket in first / size..(first + rows).div_ceil(size) {
        order.extend((0..ids.len()).filter(|&i| ids[i] as usize / size == bucket).map(|i| i as i32));
        ends.push(order.len() as i32);
    }
    (order, ends)
}

#[test]
pub fn embeddings_are_those_of_the_cpu() {
    // Ids beyond the shard on both sides; more ids of a bucket than go through shared memory at once; more columns than
    // a block has.
    for (vocab, first, rows, count, h) in
        [(9, 0, 9, 5, 3), (300, 70, 150, 560, 5), (20, 3, 9, 600, 4), (20, 3, 9, 28, 1100)]
    {
        let (ids, table, dout) = (ids(count, vocab), values("table", rows * h), values("dout", count * h));
        let (mut out, mut want) = (vec![f32::NAN; count * h], vec![0.0; count * h]);
        if !launch!("embedding_forward", [count * h, 0], &ids, &table, first, rows, &mut out, count, h) {
            return;
        }
        embedding::lookup(&ids, Loaded::Full(&table), first, h, Stored::Full(&mut want));
        assert_bits("lookup", &out, &want);
        let (order, ends) = bucketed(&ids, first, rows);
        for (blocks, accumulate) in [(1, false), (1, true), (4, false), (4, true), (7, true)] {
            if count % blocks > 0 {
                continue;
            }
            let mut buffer = Buffer::from_slice(&table);
            let grad = TableGrad { buffer: &mut buffer, start: 0, rows, width: h, accumulate, blocks };
            let (ids_, dout_) = (Buffer::from_slice(&ids), Buffer::from_slice(&dout));
            Cpu::default().lookup_grad(&ids_, &dout_, first..first + rows, grad).unwrap();
            let (mut dtable, add) = (table.clone(), i32::from(accumulate));
            if blocks == 1 {
                let sizes = [rows, h.div_ceil(4)];
                launch!("embedding_backward", sizes, &ids, &order, &ends, &dout, first, &mut dtable, add, h);
            } else {
                let (sizes, run, name) = ([rows, h.div_ceil(4)], count / blocks, "embedding_backward_tree");
                launch!(name, sizes, &ids, &order, &ends, &dout, first, &mut dtable, add, blocks, run, h);
            }
            assert_bits(&format!("gradient of a table in {blocks} blocks"), &dtable, buffer.as_slice().unwrap());
        }
    }
}

#[test]
fn ids_outside_the_vocabulary_are_seen() {
    for (id, masked, seen) in [(8, 0, 0), (9, 0, 1), (-1, 0, 1), (-1, 1, 0), (9, 1, 1), (i32::MIN, 0, 1)] {
        for at in [0, 31, 255, 256, 299] {
            let (mut ids, mut found) = (vec![3; 300], vec![0_i64; 4]);
            (ids[at], ids[299]) = (id, id);
            if !launch!("check_ids", [1, 1], &ids, 9_usize, masked, &mut found, 300_usize) {
                return;
            }
            let first = [1, at as i64, i64::from(id), 9];
            assert_eq!(found, first.map(|number| number * seen), "{id}");
            // What was found first stays.
            ids[0] = -7;
            launch!("check_ids", [1, 1], &ids, 5_usize, masked, &mut found, 300_usize);
            assert!(seen == 0 || found == first, "{found:?}");
        }
    }
}

#[test]
fn positions_are_those_of_the_cpu() {
    for (batch, seq, first, h) in [(1, 1, 0, 1), (5, 7, 2, 33), (8, 3, 0, 100)] {
        let (count, rows) = (batch * seq * h, first + seq + 1);
        let (x, table) = (values("x", count), values("table", rows * h));
        let (mut out, mut want) = (vec![f32::NAN; count], vec![0.0; count]);
        if !launch!("positions_forward", [count, 0], &x, &table, first, seq, &mut out, count, h) {
            return;
        }
        for (out, x) in want.chunks_mut(seq * h).zip(x.chunks(seq * h)) {
            embedding::add_positions(x, &table, first, seq, h, out);
        }
        assert_bits("positions", &out, &want);
        for (blocks, accumulate) in [(1, false), (1, true), (3, true), (8, false)] {
            let mut buffer = Buffer::from_slice(&table);
            let grad = TableGrad { buffer: &mut buffer, start: 0, rows, width: h, accumulate, blocks };
            Cpu::default().positions_grad(&Buffer::from_slice(&x), first, seq, grad).unwrap();
            let (mut dtable, run) = (table.clone(), batch.div_ceil(blocks));
            if !accumulate {
                // What lies around the rows in use is zeroed by a fill, which is no kernel of ours.
                dtable[..first * h].fill(0.0);
                dtable[(first + seq) * h..].fill(0.0);
            }
            let (sizes, add) = ([seq * h, 0], i32::from(accumulate));
            launch!("positions_backward", sizes, &x, first, seq, &mut dtable, add, batch, run, h);
            assert_bits(&format!("gradient of positions in {blocks} blocks"), &dtable, buffer.as_slice().unwrap());
        }
    }
}

#[test]
fn dropout_is_that_of_the_cpu() {
    let cases: [(&[usize], &[u64], &[u64]); 4] = [
        (&[1001], &[3], &[5000]),
        (&[3, 5, 7], &[2, 0, 0], &[9, 5, 7]),
        (&[3, 4, 7], &[2, 1, 13], &[9, 5, 40]),
        (&[2, 3, 4], &[1 << 40, 0, 4], &[1 << 41, 3, 8]),
    ];
    for (shape, offset, global) in cases {
        let count: usize = shape.iter().product();
        let mask = Mask { key: key(3, "mask"), p: 0.3 };
        let (x, mut got, mut want) = (values("x", count), vec![f32::NAN; count], vec![0.0; count]);
        dropout(mask, Region { shape, offset, global }, 0, &x, &mut want);
        let sizes: Vec<i64> =
            shape.iter().map(|&size| size as i64).chain(offset.iter().chain(global).map(|&at| at as i64)).collect();
        let ([key0, key1], kept) = (mask.key.words(), (1.0 / (1.0 - f64::from(mask.p))) as f32);
        let dims = shape.len() as i32;
        if !launch!("dropout", [count, 0], &x, &sizes, dims, key0, key1, mask.p, kept, &mut got, count) {
            return;
        }
        assert_bits(&format!("dropout of {shape:?}"), &got, &want);
        assert!(got.contains(&0.0));
    }
}

/// The CPU rotates where attention copies rows; the definition is the same, each operation rounded.
#[test]
fn rotation_is_its_definition_and_turns_back() {
    let (batch, seq, heads, head_dim, gap) = (2, 5, 3, 6, 4);
    let (rows, from_row, to_row) = (batch * seq, heads * head_dim + gap, heads * head_dim);
    let angles: Vec<f32> = (0..seq * head_dim)
        .map(|at| (at / head_dim, at % head_dim))
        .map(|(i, e)| (e, i as f32 * 0.7_f32.powi((e % 3) as i32)))
        .map(|(e, angle)| if e < 3 { angle.cos() } else { angle.sin() })
        .collect();
    let (x, mut turned) = (values("x", rows * from_row), vec![f32::NAN; rows * to_row]);
    let pairs = [rows * heads, head_dim / 2];
    if !launch!("rotary_forward", pairs, &x, from_row, &angles, Null, &mut turned, to_row, rows, seq, heads, head_dim) {
        return;
    }
    let mut back = turned.clone();
    launch!("rotary_backward", pairs, &mut back, to_row, &angles, Null, rows, seq, heads, head_dim);
    for at in 0..rows * to_row {
        let (row, head, e) = (at / to_row, at % to_row / head_dim, at % head_dim);
        let (low, base) = (e % 3, row * from_row + head * head_dim);
        let (a, b) = (x[base + low], x[base + low + 3]);
        let (cos, sin) = (angles[row % seq * head_dim + low], angles[row % seq * head_dim + low + 3]);
        let want = if e < 3 { a * cos - b * sin } else { b * cos + a * sin };
        assert_eq!(turned[at].to_bits(), want.to_bits(), "{at}");
        let start = at - e;
        let (a, b) = (turned[start + low], turned[start + low + 3]);
        let want = if e < 3 { a * cos + b * sin } else { b * cos - a * sin };
        assert_eq!(back[at].to_bits(), want.to_bits(), "{at}");
        assert!((back[at] - x[base + e]).abs() < 1e-5, "{at}");
    }
}
