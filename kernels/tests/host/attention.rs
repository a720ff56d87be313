//! Attention, bit by bit against the CPU's in f32, on a CPU with fused multiply-adds; norm-wise on another.

use crate::launch::{At, AtMut};
use crate::{assert_bits, launch, values};
use meshwork_core::simd::{Level, level};
use meshwork_tensor::cpu::Precision;
use meshwork_tensor::cpu::kernels::attention::{
    Angles, Dims, Dropout, Groups, Masks, SavedGrouped, grouped_backward, grouped_forward,
};
use meshwork_tensor::cpu::kernels::dropout::Mask;
use meshwork_tensor::random::key;

struct Case {
    dims: Dims,
    groups: Groups,
    rotated: bool,
    dropped: bool,
}

fn case(
    [batch, seq, heads, head_dim]: [usize; 4],
    [size, kv_heads, first]: [usize; 3],
    rotated: bool,
    dropped: bool,
) -> Case {
    let dims = Dims { batch, seq, heads, head_dim };
    Case { dims, groups: Groups { size, kv_heads, first }, rotated, dropped }
}

/// Bits where the CPU fuses, else 1e-5 of the norm.
#[track_caller]
fn assert_same(what: &str, got: &[f32], want: &[f32]) {
    if level() >= Level::Avx2 {
        return assert_bits(what, got, want);
    }
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
    assert!(error <= 1e-5 * norm(&mut want.iter().copied()), "{what}: {error:e}");
}

#[test]
pub fn attention_is_that_of_the_cpu() {
    let cases = [
        case([1, 1, 1, 1], [1, 1, 0], false, false),
        case([2, 37, 2, 20], [1, 2, 0], false, false),
        case([1, 70, 6, 16], [3, 3, 1], true, true),
        case([1, 300, 1, 8], [1, 1, 0], false, true),
        case([1, 45, 4, 72], [2, 2, 0], true, false),
    ];
    for Case { dims, groups, rotated, dropped } in cases {
        let Dims { batch, seq, heads, head_dim } = dims;
        let Groups { size, kv_heads, first } = groups;
        let what = |name: &str| format!("{name} of {dims:?}, {groups:?}");
        let (rows, width, kv_width) = (batch * seq, heads * head_dim, kv_heads * head_dim);
        let (q, kv, dout) =
            (values("q", rows * width), values("kv", rows * 2 * kv_width), values("dout", rows * width));
        let angles = values("angles", seq * head_dim);
        let mask = Mask { key: key(5, "attention"), p: if dropped { 0.25 } else { 0.0 } };
        let drop = Dropout { mask, first_sample: 3, first_head: 2, global_heads: 11 };
        let masks = Masks { dropout: dropped.then_some(drop), packing: None };
        let turn = rotated.then_some(Angles(&angles[..]));
        let (mut want_out, mut want_lse) = (vec![0.0; rows * width], vec![0.0; rows * heads]);
        let f32s = Precision::F32;
        grouped_forward(f32s, dims, groups, turn, [&q, &kv], &mut want_out, &mut want_lse, masks);
        let (mut want_dq, mut want_dkv) = (vec![0.0; rows * width], vec![0.0; rows * 2 * kv_width]);
        let saved = SavedGrouped { q: &q, kv: &kv, out: &want_out, lse: &want_lse };
        grouped_backward(f32s, dims, groups, turn, saved, &dout, [&mut want_dq, &mut want_dkv], masks);

        // As a device does it: rotated copies of queries and keys, then the products.
        let (mut q_turned, mut kv_turned, kv_row) = (q.clone(), kv.clone(), 2 * kv_width);
        if rotated {
            let pairs = |heads: usize| [rows * heads * head_dim / 2, 0];
            launch!(
                "rotary_forward",
                pairs(heads),
                &q,
                width,
                &angles,
                &mut q_turned,
                width,
                rows,
                seq,
                heads,
                head_dim
            );
            let to = &mut kv_turned;
            launch!("rotary_forward", pairs(kv_heads), &kv, kv_row, &angles, to, kv_row, rows, seq, kv_heads, head_dim);
        }
        let (q, kv) = (&q_turned, &kv_turned);
        let (scale, [key0, key1]) = ((1.0 / (head_dim as f64).sqrt()) as f32, mask.key.words());
        let (p, kept) = (mask.p, (1.0 / (1.0 - f64::from(mask.p))) as f32);
        let (s0, h0, hn) = (drop.first_sample as i64, drop.first_head as i64, drop.global_heads as i64);
        let (room, dim, sizes) = (if head_dim > 64 { 128 } else { 64 }, head_dim as i32, [batch * heads, seq]);
        let (mut out, mut lse) = (vec![f32::NAN; rows * width], vec![f32::NAN; rows * heads]);
        let (k, v) = (At(kv, 0), At(kv, kv_width));
        #[rustfmt::skip]
        let there = launch!(
            &format!("attention_forward_{room}"), sizes, q, width, k, v, kv_row, &mut out, &mut lse, seq, heads, size, first,
            dim, scale, key0, key1, p, kept, s0, h0, hn
        );
        if !there {
            return;
        }
        assert_same(&what("out"), &out, &want_out);
        assert_same(&what("lse"), &lse, &want_lse);

        let mut dots = vec![f32::NAN; rows * heads];
        launch!("attention_dots", [16 * rows * heads, 0], &dout, &out, &mut dots, batch, seq, heads, head_dim);
        let mut dq = vec![f32::NAN; rows * width];
        #[rustfmt::skip]
        launch!(
            &format!("attention_backward_q_{room}"), sizes, q, width, k, v, kv_row, &dout, &lse, &dots, &mut dq, width, seq, heads,
            size, first, dim, scale, key0, key1, p, kept, s0, h0, hn
        );
        let [mut dk, mut dv] = [(); 2].map(|()| vec![f32::NAN; rows * width]);
        #[rustfmt::skip]
        launch!(
            &format!("attention_backward_kv_{room}"), sizes, q, width, k, v, kv_row, &dout, &lse, &dots, &mut dk, &mut dv, width,
            seq, heads, size, first, dim, scale, key0, key1, p, kept, s0, h0, hn
        );
        if rotated {
            let pairs = [rows * heads * head_dim / 2, 0];
            launch!("rotary_backward", pairs, &mut dq, width, &angles, rows, seq, heads, head_dim);
            launch!("rotary_backward", pairs, &mut dk, width, &angles, rows, seq, heads, head_dim);
        }
        let mut dkv = vec![0.0; rows * 2 * kv_width];
        let items = [rows * heads / size * head_dim, 0];
        for (from, at) in [(&dk, 0), (&dv, kv_width)] {
            let to = AtMut(&mut dkv, at);
            launch!("attention_group_sum", items, from, to, kv_row, rows, heads, size, first, head_dim);
        }
        assert_same(&what("dq"), &dq, &want_dq);
        assert_same(&what("dkv"), &dkv, &want_dkv);
    }
}
