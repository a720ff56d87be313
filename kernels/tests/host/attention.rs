//! Attention, bit by bit against the CPU's in f32, on a CPU with fused multiply-adds; norm-wise on another.
//!
//! More than 400 lines: forward and backward with each mask have one oracle and one table of shapes.

use crate::launch::{At, AtMut, Element, Given, Null};
use crate::{assert_bits, build, launch, values};
use half::{bf16, f16};
use meshwork_core::simd::{Level, level};
use meshwork_cpu::kernels::attention::{
    Angles, Dims, Dropout, Groups, Keys, Masks, Packing, Saved, Tiled, grouped_backward, grouped_forward, join,
    pair_bias_grad,
};
use meshwork_cpu::kernels::dropout::Mask;
use meshwork_kernels::{F16, TF32, VARIANTS, Variant};
use meshwork_tensor::Precision;
use meshwork_tensor::random::key;
use meshwork_testkit::Sampled;
use std::ops::AddAssign;

#[derive(Clone, Copy)]
struct Case {
    dims: Dims,
    groups: Groups,
    rotated: bool,
    dropped: bool,
    /// Documents in each sample, and whether tokens see only their own.
    documents: Option<bool>,
    window: Option<usize>,
    shown: Shown,
}

/// What else masks and scores have.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    /// Tokens behind its own that a query sees.
    ahead: usize,
    /// Whether the last keys of each sample are hidden, all of one sample.
    lengths: bool,
    cap: Option<f64>,
    slopes: bool,
    bias: bool,
}

fn case(
    [batch, seq, heads, head_dim]: [usize; 4],
    [size, kv_heads, first]: [usize; 3],
    rotated: bool,
    dropped: bool,
) -> Case {
    let dims = Dims::new([batch, seq, heads, head_dim]);
    Case {
        dims,
        groups: Groups { size, kv_heads, first },
        rotated,
        dropped,
        documents: None,
        window: None,
        shown: Shown::default(),
    }
}

/// Features of the form of the kernels for heads of this length.
fn room(head_dim: usize) -> usize {
    head_dim.next_power_of_two().max(64)
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

/// Positions in documents of very different lengths; a sample begins in the middle of one.
fn positions(batch: usize, seq: usize) -> Vec<i32> {
    let of = |sample: usize| {
        let starts = [0, 3 + sample, seq / 30 + 4, 5 + 5 * seq / 7];
        let from = move |place: usize| starts.iter().rev().find(|start| **start <= place).copied().unwrap_or(0);
        (0..seq).map(move |place| place - from(place) + if place < 3 + sample { 2 } else { 0 })
    };
    (0..batch).flat_map(of).map(|position| position.min(seq - 1) as i32).collect()
}

#[test]
pub fn attention_is_that_of_the_cpu() {
    is_that_of_the_cpu(Precision::F32, 2);
}

#[test]
fn attention_of_rounded_operands_is_that_of_the_cpu() {
    is_that_of_the_cpu(Precision::Bf16, 3);
}

#[test]
fn attention_of_operands_of_tf32_is_that_of_the_cpu() {
    is_that_of_the_cpu(Precision::Tf32, 4);
}

/// In a sweep all cases, else every `nth`.
#[track_caller]
fn is_that_of_the_cpu(precision: Precision, nth: usize) {
    let of_documents = |apart, case| Case { documents: Some(apart), ..case };
    let among = |count, first_query, case: Case| Case {
        dims: Dims { keys: Keys::new(count, first_query), ..case.dims },
        ..case
    };
    // Of longer sequences, `first` the token of the first key.
    let within = |first: usize, count: usize, first_query: usize, case: Case| {
        let sequence = (first_query + case.dims.seq).max(first + count) + 3;
        Case { dims: Dims { keys: Keys { count, first_query, first, sequence }, ..case.dims }, ..case }
    };
    let windowed = |window, case: Case| Case { window: Some(window), ..case };
    let full = Shown { ahead: 1000, ..Shown::default() };
    let shows = |shown, case: Case| Case { shown, ..case };
    // Keys of another sequence.
    let over = |count: usize, case: Case| {
        let sequence = count.max(case.dims.seq);
        Case { dims: Dims { keys: Keys { count, first_query: 0, first: 0, sequence }, ..case.dims }, ..case }
    };
    let cases = [
        within(20, 70, 33, case([2, 37, 4, 20], [2, 2, 0], true, true)),
        of_documents(true, within(60, 90, 150, case([1, 200, 1, 8], [1, 1, 0], true, true))),
        of_documents(true, within(40, 30, 70, case([2, 60, 2, 72], [2, 1, 0], true, false))),
        of_documents(false, within(40, 30, 50, case([2, 60, 2, 8], [1, 2, 0], true, true))),
        windowed(45, of_documents(true, within(40, 60, 80, case([1, 80, 2, 8], [1, 2, 0], true, true)))),
        among(70, 33, case([2, 37, 4, 20], [2, 2, 0], true, true)),
        among(300, 129, case([1, 150, 1, 8], [1, 1, 0], false, true)),
        among(40, 40, case([1, 20, 2, 8], [1, 2, 0], false, false)),
        of_documents(true, among(430, 150, case([1, 200, 1, 8], [1, 1, 0], true, true))),
        of_documents(false, among(70, 21, case([2, 30, 4, 6], [2, 2, 0], true, false))),
        of_documents(true, case([2, 39, 2, 20], [1, 2, 0], false, false)),
        of_documents(true, case([1, 430, 1, 8], [1, 1, 0], false, true)),
        of_documents(true, case([2, 70, 4, 72], [2, 2, 0], true, false)),
        of_documents(false, case([2, 40, 4, 6], [2, 2, 0], true, false)),
        case([1, 1, 1, 1], [1, 1, 0], false, false),
        case([2, 37, 2, 20], [1, 2, 0], false, false),
        case([1, 70, 6, 16], [3, 3, 1], true, true),
        case([1, 300, 1, 8], [1, 1, 0], false, true),
        case([1, 45, 4, 72], [2, 2, 0], true, false),
        windowed(1, case([1, 40, 2, 8], [1, 2, 0], false, false)),
        windowed(20, case([2, 70, 4, 16], [2, 2, 0], true, true)),
        windowed(150, case([1, 600, 1, 8], [1, 1, 0], false, false)),
        windowed(300, case([1, 600, 1, 8], [1, 1, 0], false, false)),
        windowed(33, of_documents(true, case([1, 430, 1, 8], [1, 1, 0], false, true))),
        windowed(25, among(300, 129, case([1, 150, 1, 8], [1, 1, 0], false, true))),
        windowed(30, among(40, 50, case([1, 40, 2, 8], [1, 2, 0], true, false))),
        shows(full, case([2, 40, 4, 16], [2, 2, 0], true, true)),
        shows(full, over(300, case([1, 37, 2, 20], [1, 3, 1], false, true))),
        shows(full, over(7, case([1, 140, 2, 8], [2, 1, 0], false, false))),
        shows(Shown { lengths: true, ..full }, over(90, case([3, 20, 1, 72], [1, 1, 0], false, true))),
        shows(Shown { lengths: true, ..Shown::default() }, case([3, 60, 2, 8], [1, 2, 0], true, false)),
        shows(full, of_documents(true, case([2, 140, 1, 8], [1, 1, 0], true, true))),
        shows(full, of_documents(false, case([2, 40, 4, 6], [2, 2, 0], true, false))),
        shows(Shown { ahead: 24, ..full }, windowed(49, case([1, 150, 2, 8], [1, 2, 0], false, true))),
        shows(
            Shown { ahead: 24, ..full },
            windowed(49, of_documents(true, case([2, 70, 1, 8], [1, 1, 0], false, false))),
        ),
        shows(Shown { cap: Some(1.5), ..Shown::default() }, case([2, 70, 4, 16], [2, 2, 0], true, true)),
        shows(
            Shown { cap: Some(2.0), slopes: true, ..Shown::default() },
            windowed(40, case([1, 70, 2, 8], [1, 2, 0], false, true)),
        ),
        shows(Shown { slopes: true, ..full }, case([1, 40, 2, 72], [1, 2, 0], false, false)),
        shows(
            Shown { cap: Some(2.0), lengths: true, bias: true, ..full },
            over(40, case([3, 37, 4, 8], [2, 2, 0], false, true)),
        ),
        shows(Shown { bias: true, ..Shown::default() }, case([2, 37, 2, 20], [1, 2, 0], false, false)),
        case([1, 19, 2, 256], [2, 1, 0], true, true),
        shows(Shown { cap: Some(1.5), ..Shown::default() }, windowed(9, case([1, 21, 1, 130], [1, 1, 0], true, false))),
    ];
    for Case { dims, groups, rotated, dropped, documents, window, shown } in cases.into_iter().sampled(nth) {
        let Dims { batch, seq, heads, head_dim, .. } = dims;
        let Groups { size, kv_heads, first } = groups;
        let what = |name: &str| {
            format!(
                "{name} of {dims:?}, {groups:?}, documents {documents:?}, window {window:?}, {shown:?} in {precision:?}"
            )
        };
        let Keys { count: keys, first_query, first: first_key, sequence } = dims.keys;
        let (rows, kv_rows, width, kv_width) = (batch * seq, batch * keys, heads * head_dim, kv_heads * head_dim);
        let (q, kv, dout) =
            (values("q", rows * width), values("kv", kv_rows * 2 * kv_width), values("dout", rows * width));
        let angles = values("angles", sequence.max(dims.queries().end) * head_dim);
        let mask = Mask { key: key(5, "attention"), p: if dropped { 0.25 } else { 0.0 } };
        let drop = Dropout { mask, first_sample: 3, first_head: 2, global_heads: 11 };
        let (places, count) = (positions(batch, sequence), batch * sequence);
        let packing = documents.map(|apart| Packing::new(&places, [batch, sequence], apart).expect("documents"));
        let lengths: Vec<usize> = (0..batch).map(|sample| keys * (2 - sample.min(2)) / 3).collect();
        let slopes: Vec<f32> = (1..=heads).map(|head| 0.3 / head as f32).collect();
        let bias = values("bias", heads * seq * keys);
        let masks = Masks {
            dropout: dropped.then_some(drop),
            packing: packing.as_ref(),
            window,
            ahead: shown.ahead,
            lengths: shown.lengths.then_some(&lengths),
            runs: None,
            cap: shown.cap,
            slopes: shown.slopes.then_some(&slopes),
        };
        let given = shown.bias.then_some(&bias[..]);
        let window = window.unwrap_or(first_query + seq + shown.ahead);
        let turn = rotated.then_some(Angles(&angles[..]));
        let (mut want_out, mut want_lse) = (vec![0.0; rows * width], vec![0.0; rows * heads]);
        grouped_forward(
            f32::tiles(precision),
            dims,
            groups,
            turn,
            [&q, &kv],
            &mut want_out,
            &mut want_lse,
            masks,
            given,
        );
        let (mut want_dq, mut want_dkv) = (vec![0.0; rows * width], vec![0.0; kv_rows * 2 * kv_width]);
        let saved = Saved { q: &q, kv: &kv, out: &want_out, lse: &want_lse };
        grouped_backward(
            f32::tiles(precision),
            dims,
            groups,
            turn,
            saved,
            &dout,
            [&mut want_dq, &mut want_dkv],
            masks,
            given,
        );

        let [mut checked, mut firsts] = [(); 2].map(|()| vec![-9_i32; count]);
        let mut misplaced = vec![0_i64; 4];
        if !launch!("document_starts", [count, 0], &places, &mut checked, &mut firsts, count, sequence) {
            return;
        }
        launch!("check_positions", [1, 1], &places, &mut misplaced, count, sequence);
        assert_eq!((misplaced[0], &checked), (0, &places));
        let firsts = || if documents == Some(true) { Given::from(&firsts) } else { Null.into() };
        let among = |first, count| -> Vec<i32> {
            checked.chunks(sequence).flat_map(|of| of.iter().skip(first).take(count)).copied().collect()
        };
        let (of_keys, of_queries) = (among(first_key, keys), among(first_query, seq));
        let positions = || if documents.is_some() { Given::from(&of_keys) } else { Null.into() };
        let q_positions = || if documents.is_some() { Given::from(&of_queries) } else { Null.into() };
        let kv_angles = || At(&angles, if documents.is_some() { 0 } else { first_key * head_dim });
        let q_angles = || At(&angles, if documents.is_some() { 0 } else { first_query * head_dim });

        let from_first_key = first_query - first_key;
        // As a device does it: rotated copies of queries and keys, then the products.
        let (mut q_turned, mut kv_turned, kv_row) = (q.clone(), kv.clone(), 2 * kv_width);
        if rotated {
            launch!(
                "rotary_forward",
                [rows * heads, head_dim / 2],
                &q,
                width,
                q_angles(),
                q_positions(),
                &mut q_turned,
                width,
                rows,
                seq,
                heads,
                head_dim
            );
            let to = &mut kv_turned;
            #[rustfmt::skip]
            launch!(
                "rotary_forward", [kv_rows * kv_heads, head_dim / 2], &kv, kv_row, kv_angles(), positions(), to, kv_row, kv_rows, keys,
                kv_heads, head_dim
            );
        }
        let (q, kv) = (&q_turned, &kv_turned);
        let (scale, [key0, key1]) = ((1.0 / (head_dim as f64).sqrt()) as f32, mask.key.words());
        let rounded = match precision {
            Precision::F32 => 0,
            Precision::Bf16 => 1,
            Precision::Tf32 => 2,
        };
        let [cap_by, cap_back] = shown.cap.map_or([0.0; 2], |cap| [scale / cap as f32, cap as f32 / scale]);
        let (ahead, of_lengths): (_, Vec<i32>) = (shown.ahead, lengths.iter().map(|&length| length as i32).collect());
        let saved = Saved { q: &q_turned, kv: &kv_turned, out: &want_out, lse: &want_lse };
        let mut want_dbias = vec![0.5; bias.len()];
        if shown.bias {
            pair_bias_grad(precision, dims, groups, saved, &dout, masks, &bias, (batch, true, &mut want_dbias));
        }
        let slopes = || if shown.slopes { Given::from(&slopes) } else { Null.into() };
        let bias = || if shown.bias { Given::from(&bias) } else { Null.into() };
        let lengths = || if shown.lengths { Given::from(&of_lengths) } else { Null.into() };
        let (p, kept) = (mask.p, (1.0 / (1.0 - f64::from(mask.p))) as f32);
        let (s0, h0, hn) = (drop.first_sample as i64, drop.first_head as i64, drop.global_heads as i64);
        let (room, dim, sizes) = (room(head_dim), head_dim as i32, [batch * heads, seq]);
        let (mut out, mut lse) = (vec![f32::NAN; rows * width], vec![f32::NAN; rows * heads]);
        let (k, v) = (At(kv, 0), At(kv, kv_width));
        #[rustfmt::skip]
        let there = launch!(
            &format!("attention_forward_{room}"), sizes, q, width, k, v, kv_row, &mut out, &mut lse, seq, heads, size, first,
            dim, scale, key0, key1, p, kept, s0, h0, hn, firsts(), rounded, keys, from_first_key, seq, window, first_key, sequence,
            cap_by, cap_back, slopes(), bias(), ahead, lengths()
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
            size, first, dim, scale, key0, key1, p, kept, s0, h0, hn, firsts(), rounded, keys, from_first_key, seq, window, first_key, sequence,
            cap_by, cap_back, slopes(), bias(), ahead, lengths()
        );
        let mut dbias = vec![0.5; want_dbias.len()];
        if shown.bias {
            #[rustfmt::skip]
            launch!(
                "attention_bias_backward", [heads * seq * keys, 0], q, width, k, v, kv_row, &dout, &lse, &dots, &mut dbias, batch, batch, 1_i32,
                seq, heads, size, first, dim, scale, key0, key1, p, kept, s0, h0, hn, firsts(), rounded, keys, from_first_key, seq, window,
                first_key, sequence, cap_by, cap_back, slopes(), bias(), ahead, lengths()
            );
            assert_same(&what("dbias"), &dbias, &want_dbias);
        }
        let [mut dk, mut dv] = [(); 2].map(|()| vec![f32::NAN; kv_rows * width]);
        #[rustfmt::skip]
        launch!(
            &format!("attention_backward_kv_{room}"), [batch * heads, keys], q, width, k, v, kv_row, &dout, &lse, &dots, &mut dk,
            &mut dv, width, seq, heads, size, first, dim, scale, key0, key1, p, kept, s0, h0, hn, firsts(), rounded, keys,
            from_first_key, seq, window, first_key, sequence,
            cap_by, cap_back, slopes(), bias(), ahead, lengths()
        );
        if rotated {
            let [pairs, kv_pairs] = [rows, kv_rows].map(|rows| [rows * heads, head_dim / 2]);
            launch!("rotary_backward", pairs, &mut dq, width, q_angles(), q_positions(), rows, seq, heads, head_dim);
            launch!(
                "rotary_backward",
                kv_pairs,
                &mut dk,
                width,
                kv_angles(),
                positions(),
                kv_rows,
                keys,
                heads,
                head_dim
            );
        }
        let mut dkv = vec![0.0; kv_rows * 2 * kv_width];
        let items = [kv_rows * heads / size * head_dim, 0];
        for (from, at) in [(&dk, 0), (&dv, kv_width)] {
            let to = AtMut(&mut dkv, at);
            launch!("attention_group_sum", items, from, to, kv_row, kv_rows, heads, size, first, head_dim);
        }
        // The zeros of queries that see no key, and of keys that no query sees, have either sign.
        let [dq, want_dq, dkv, want_dkv] =
            [dq, want_dq, dkv, want_dkv].map(|x| x.iter().map(|x| x + 0.0).collect::<Vec<_>>());
        // Two results of the same queries join, and a block of keys that they do not see changes nothing.
        let (mut parts, [mut want, mut want_sums]) = (vec![(&dq, &dots)], [want_out.clone(), want_lse.clone()]);
        let unseen = vec![f32::NEG_INFINITY; rows * heads];
        parts.push((&want_out, &unseen));
        for (part, part_lse) in parts {
            join(dims, [&mut want, &mut want_sums], [part, part_lse]);
            launch!(
                "attention_join",
                [out.len(), 0],
                part,
                &lse,
                part_lse,
                &mut out,
                rows * width,
                seq,
                heads,
                head_dim
            );
            launch!("attention_join_lse", [lse.len(), 0], part_lse, &mut lse, rows * heads);
            assert_same(&what("joined out"), &out, &want);
            assert_same(&what("joined lse"), &lse, &want_sums);
        }
        assert_same(&what("dq"), &dq, &want_dq);
        assert_same(&what("dkv"), &dkv, &want_dkv);
    }
}

#[test]
fn positions_that_do_not_follow_are_seen() {
    for (places, seen) in [
        ([0, 1, 2, 0, 1, 2], [0; 4]),
        ([1, 2, 0, 0, 0, 1], [0; 4]),
        ([0, 2, 0, 0, 1, 2], [1, 1, 2, 3]),
        ([0, 1, 2, 3, 0, 1], [1, 3, 3, 3]),
    ] {
        let (places, [mut checked, mut firsts]) = (places.to_vec(), [(); 2].map(|()| vec![-9_i32; 6]));
        let mut misplaced = vec![0_i64; 4];
        let (count, seq) = (6_usize, 3_usize);
        if !launch!("document_starts", [6, 0], &places, &mut checked, &mut firsts, count, seq) {
            return;
        }
        launch!("check_positions", [1, 1], &places, &mut misplaced, count, seq);
        assert_eq!(misplaced, seen, "{places:?}");
        assert!(checked.iter().all(|position| (0..3).contains(position)));
    }
}

/// The variants for heads of up to 128, one of their warps with 16 rows: in a sweep each in all cases, else some in
/// some.
#[test]
fn variants_of_attention_on_tensor_cores_are_near_the_cpu() {
    let some: fn() = some_attention_on_tensor_cores_is_near_that_of_the_cpu;
    let run = if meshwork_testkit::sweeps() { attention_on_tensor_cores_is_near_that_of_the_cpu } else { some };
    let of = |variant: &&Variant| variant.kernel.name.starts_with("flash") && !variant.kernel.name.ends_with("_256");
    for variant in VARIANTS.iter().filter(of).sampled(3) {
        build::with_variant(variant, None, run);
    }
}

/// The usual forms for heads of up to 256, and those for little shared memory.
#[test]
fn long_heads_on_tensor_cores_are_near_those_of_the_cpu() {
    let cases = [
        case([1, 90, 2, 256], [2, 1, 0], false, false),
        case([1, 75, 1, 256], [1, 1, 0], false, true),
        Case { documents: Some(true), window: Some(60), ..case([1, 90, 1, 136], [1, 1, 0], false, false) },
    ];
    let run = || is_near_that_of_the_cpu(&cases);
    run();
    for variant in VARIANTS
        .iter()
        .filter(|variant| variant.kernel.name.starts_with("flash") && variant.kernel.name.ends_with("_256"))
    {
        build::with_variant(variant, None, run);
    }
}

/// Some of the cases below, which fail without any one of the kernels' barriers, for tests that repeat them.
pub fn some_attention_on_tensor_cores_is_near_that_of_the_cpu() {
    is_near_that_of_the_cpu(&some_cases());
}

fn some_cases() -> [Case; 3] {
    [
        case([1, 300, 1, 64], [1, 1, 0], false, false),
        // Four tiles of keys, so that forms with three pairs of them write over the first.
        Case { documents: Some(true), ..case([1, 200, 1, 128], [1, 1, 0], false, false) },
        case([1, 75, 1, 256], [1, 1, 0], false, true),
    ]
}

/// A type of tensors for tensor cores.
trait Operand: Element + AddAssign {
    const NAN: Self;
    const ZERO: Self;
    /// The distance from 1 to the next number that products read.
    const EPSILON: f32;
    /// How the CPU multiplies the same operands.
    const ON_CPU: Precision;
    fn of(x: f32) -> Self;
    fn wide(self) -> f32;
}

macro_rules! halves {
    ($($t:ident),*) => { $(impl Operand for $t {
        const NAN: Self = $t::NAN;
        const ZERO: Self = $t::ZERO;
        const EPSILON: f32 = $t::EPSILON.to_f32_const();
        const ON_CPU: Precision = Precision::F32;
        fn of(x: f32) -> Self {
            $t::from_f32(x)
        }
        fn wide(self) -> f32 {
            self.to_f32()
        }
    })* };
}
halves!(bf16, f16);

/// Products round f32 to TF32, which has 11 bits.
impl Operand for f32 {
    const NAN: Self = Self::NAN;
    const ZERO: Self = 0.0;
    const EPSILON: f32 = 1.0 / 1024.0;
    const ON_CPU: Precision = Precision::Tf32;
    fn of(x: f32) -> Self {
        x
    }
    fn wide(self) -> f32 {
        self
    }
}

/// The forms for f16 on operands of f16, eight times as near: they round eight times as finely.
#[test]
fn attention_of_f16_on_tensor_cores_is_near_that_of_the_cpu() {
    build::with_forms(&F16, None, || {
        let mut cases = some_cases().to_vec();
        cases.extend([
            case([1, 149, 1, 64], [1, 1, 0], false, true),
            case([1, 70, 2, 128], [2, 1, 0], false, true),
            case([1, 90, 2, 256], [2, 1, 0], false, false),
        ]);
        are_near_those_of_the_cpu::<f16>(&cases);
    });
}

/// The forms for TF32 on operands of f32, against the CPU's attention in TF32: eight times as near as those of bf16.
#[test]
fn attention_of_tf32_on_tensor_cores_is_near_that_of_the_cpu() {
    build::with_forms(&TF32, None, || {
        let mut cases: Vec<Case> = cases_on_tensor_cores().into_iter().sampled_in_turn(4, 3).collect();
        cases.extend(some_cases());
        cases.extend([
            Case { window: Some(70), ..case([2, 150, 4, 64], [2, 3, 1], false, false) },
            case([1, 149, 1, 64], [1, 1, 0], false, true),
            case([1, 70, 2, 128], [2, 1, 0], false, true),
            case([1, 90, 2, 256], [2, 1, 0], false, false),
        ]);
        are_near_those_of_the_cpu::<f32>(&cases);
    });
}

/// Attention of bf16 on tensor cores against that of the CPU in f32 on the same operands, norm-wise.
#[test]
fn attention_on_tensor_cores_is_near_that_of_the_cpu() {
    is_near_that_of_the_cpu(&cases_on_tensor_cores().into_iter().sampled_in_turn(4, 1).collect::<Vec<_>>());
}

fn cases_on_tensor_cores() -> [Case; 19] {
    let of_documents = |case| Case { documents: Some(true), ..case };
    let among = |count, first_query, case: Case| Case {
        dims: Dims { keys: Keys::new(count, first_query), ..case.dims },
        ..case
    };
    let windowed = |window, case: Case| Case { window: Some(window), ..case };
    [
        case([1, 1, 1, 8], [1, 1, 0], false, false),
        case([2, 150, 2, 64], [1, 2, 0], false, false),
        case([1, 300, 4, 16], [2, 3, 1], false, false),
        case([1, 200, 2, 128], [2, 1, 0], false, false),
        case([2, 128, 1, 72], [1, 1, 0], false, false),
        of_documents(case([2, 150, 2, 64], [2, 1, 0], false, false)),
        of_documents(case([1, 300, 1, 128], [1, 1, 0], false, false)),
        among(300, 129, case([2, 150, 2, 64], [1, 2, 0], false, false)),
        among(200, 200, case([1, 70, 2, 128], [2, 1, 0], false, false)),
        of_documents(among(290, 77, case([1, 140, 2, 64], [2, 1, 0], false, false))),
        windowed(1, case([1, 40, 1, 8], [1, 1, 0], false, false)),
        windowed(70, case([2, 200, 1, 64], [1, 1, 0], false, false)),
        windowed(130, case([1, 280, 1, 128], [1, 1, 0], false, false)),
        windowed(50, of_documents(case([1, 290, 1, 64], [1, 1, 0], false, false))),
        windowed(60, among(150, 140, case([1, 150, 2, 64], [2, 1, 0], false, false))),
        windowed(60, among(150, 180, case([1, 200, 2, 64], [2, 1, 0], false, false))),
        // Lanes share draws where sequences are a multiple of 4.
        case([2, 140, 2, 64], [2, 1, 0], false, true),
        case([1, 149, 1, 64], [1, 1, 0], false, true),
        windowed(60, of_documents(among(160, 13, case([1, 140, 2, 80], [2, 1, 0], false, true)))),
    ]
}

fn is_near_that_of_the_cpu(cases: &[Case]) {
    are_near_those_of_the_cpu::<bf16>(cases);
}

fn are_near_those_of_the_cpu<H: Operand>(cases: &[Case]) {
    // The bounds below are those of bf16.
    let finer = f64::from(H::EPSILON / bf16::EPSILON.to_f32());
    for &Case { dims, groups, dropped, documents, window, .. } in cases {
        let Dims { batch, seq, heads, head_dim, .. } = dims;
        let Groups { size, kv_heads, first } = groups;
        let what = |name: &str| {
            format!("{name} of {dims:?}, {groups:?}, documents {documents:?}, window {window:?}, dropout {dropped}")
        };
        let Keys { count: keys, first_query, first: first_key, sequence } = dims.keys;
        let (rows, kv_rows, width, kv_width) = (batch * seq, batch * keys, heads * head_dim, kv_heads * head_dim);
        let rounded = |name: &str, count: usize| -> (Vec<H>, Vec<f32>) {
            let halves: Vec<H> = values(name, count).into_iter().map(H::of).collect();
            let floats = halves.iter().map(|half| half.wide()).collect();
            (halves, floats)
        };
        let ((q, q_f32), (kv, kv_f32)) = (rounded("q", rows * width), rounded("kv", kv_rows * 2 * kv_width));
        let (dout, dout_f32) = rounded("dout", rows * width);
        let (places, count) = (positions(batch, keys), batch * keys);
        let packing = documents.map(|apart| Packing::new(&places, [batch, keys], apart).expect("documents"));
        let mask = Mask { key: key(5, "attention"), p: 0.25 };
        let drop = Dropout { mask, first_sample: 3, first_head: 2, global_heads: 11 };
        let masks = Masks { dropout: dropped.then_some(drop), packing: packing.as_ref(), window, ..Masks::default() };
        let (mut want_out, mut want_lse) = (vec![0.0; rows * width], vec![0.0; rows * heads]);
        grouped_forward(
            f32::tiles(H::ON_CPU),
            dims,
            groups,
            None,
            [&q_f32, &kv_f32],
            &mut want_out,
            &mut want_lse,
            masks,
            None,
        );
        let (mut want_dq, mut want_dkv) = (vec![0.0; rows * width], vec![0.0; kv_rows * 2 * kv_width]);
        let saved = Saved { q: &q_f32, kv: &kv_f32, out: &want_out, lse: &want_lse };
        grouped_backward(
            f32::tiles(H::ON_CPU),
            dims,
            groups,
            None,
            saved,
            &dout_f32,
            [&mut want_dq, &mut want_dkv],
            masks,
            None,
        );

        let [mut checked, mut firsts] = [(); 2].map(|()| vec![-9_i32; count]);
        if !launch!("document_starts", [count, 0], &places, &mut checked, &mut firsts, count, keys) {
            return;
        }
        let window = window.unwrap_or(first_query + seq);
        let firsts = || if documents.is_some() { Given::from(&firsts) } else { Null.into() };
        let (scale, dim, room) = ((1.0 / (head_dim as f64).sqrt()) as f32, head_dim as i32, room(head_dim));
        let (k, v, kv_row) = (At(&kv, 0), At(&kv, kv_width), 2 * kv_width);
        let (mut out, mut lse) = (vec![H::NAN; rows * width], vec![f32::NAN; rows * heads]);
        // The arguments of a kernel, with those of dropout behind where it has it.
        let [key0, key1] = mask.key.words();
        let (p, kept) = (mask.p, (1.0 / (1.0 - f64::from(mask.p))) as f32);
        let [s0, h0, hn] = [drop.first_sample, drop.first_head, drop.global_heads].map(|place| place as i64);
        macro_rules! run {
            ($name:literal, $sizes:expr, $($of:expr),+) => {
                match dropped {
                    false => launch!(&format!("flash_{}_{room}", $name), $sizes, $($of),+),
                    true => launch!(
                        &format!("flash_dropout_{}_{room}", $name), $sizes, $($of),+, key0, key1, p, kept, s0, h0, hn, first_key, sequence
                    ),
                }
            };
        }
        #[rustfmt::skip]
        run!(
            "forward", [batch * heads, seq], &q, width, k, v, kv_row, &mut out, &mut lse, seq, heads, size, first, dim,
            scale, firsts(), keys, first_query, seq, window
        );
        let near = |name: &str, got: &[f32], want: &[f32], bound: f64| {
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            // Of queries that see no key the log-sum-exp is -∞ in both.
            let (pairs, finite) = (got.iter().zip(want).filter(|(a, b)| a != b), |x: &&f32| x.is_finite());
            let error = norm(&mut pairs.map(|(a, b)| a - b)) / norm(&mut want.iter().filter(finite).copied());
            assert!(error <= finer * bound, "{}: {error:e}", what(name));
        };
        let floats = |halves: &[H]| halves.iter().map(|half| half.wide()).collect::<Vec<f32>>();
        near("out", &floats(&out), &want_out, 5e-3);
        near("lse", &lse, &want_lse, 1e-5 / finer);

        let (mut dots, lanes) = (vec![f32::NAN; rows * heads], (head_dim / 8).next_power_of_two());
        launch!("flash_dots", [lanes * rows * heads, 0], &dout, &out, &mut dots, batch, seq, heads, head_dim);
        let mut dq = vec![H::NAN; rows * width];
        #[rustfmt::skip]
        run!(
            "backward_q", [batch * heads, seq], &q, width, k, v, kv_row, &dout, &lse, &dots, &mut dq, width, seq, heads,
            size, first, dim, scale, firsts(), keys, first_query, seq, window
        );
        // What is of other heads stays.
        let (mut dkv, mut spare) = (vec![H::ZERO; kv_rows * 2 * kv_width], vec![H::ZERO; kv_rows * 2 * kv_width]);
        let sizes = [batch * heads / size, keys];
        #[rustfmt::skip]
        run!(
            "backward_kv", sizes, &q, width, k, v, kv_row, &dout, &lse, &dots, AtMut(&mut dkv, 0), AtMut(&mut spare, kv_width), kv_row, seq, heads,
            size, first, dim, scale, firsts(), keys, first_query, seq, window
        );
        dkv.iter_mut().zip(&spare).for_each(|(to, from)| *to += *from);
        // Of one key dQ is zero in theory, and the difference of two roundings in both.
        if seq.min(window) > 1 {
            near("dq", &floats(&dq), &want_dq, 1e-2);
        }
        near("dkv", &floats(&dkv), &want_dkv, 1e-2);
        if room > 128 || dropped || H::EPSILON < bf16::EPSILON.to_f32() {
            continue;
        }
        // The forms for sm_90a, which has none for longer heads, for dropout and for other types.
        let mut words = vec![0_u64; 4 * 16 + 8];
        let (at, kv_room) = (words.as_ptr().align_offset(64), first + heads / size);
        #[rustfmt::skip]
        launch!(
            "flash_maps", [1, 0], &q, width, k, v, kv_row, &dout, AtMut(&mut words, at), batch, seq, heads, kv_room, dim, keys, seq
        );
        let maps = At(&words, at);
        let (mut out_sm90, mut lse_sm90) = (vec![H::NAN; rows * width], vec![f32::NAN; rows * heads]);
        #[rustfmt::skip]
        launch!(
            &format!("flash_forward_sm90_{room}"), [batch * heads, seq], maps, &mut out_sm90, &mut lse_sm90, seq, heads, size, first, dim, scale,
            firsts(), keys, first_query, seq, window
        );
        let mut dq_sm90 = vec![H::NAN; rows * width];
        #[rustfmt::skip]
        launch!(
            &format!("flash_backward_sm90_q_{room}"), [batch * heads, seq], maps, &lse, &dots, &mut dq_sm90, width, seq, heads, size, first, dim,
            scale, firsts(), keys, first_query, seq, window
        );
        let (mut dkv_sm90, mut spare) = (vec![H::ZERO; kv_rows * 2 * kv_width], vec![H::ZERO; kv_rows * 2 * kv_width]);
        #[rustfmt::skip]
        launch!(
            &format!("flash_backward_sm90_kv_{room}"), sizes, maps, &lse, &dots, AtMut(&mut dkv_sm90, 0), AtMut(&mut spare, kv_width), kv_row, seq,
            heads, size, first, dim, scale, firsts(), keys, first_query, seq, window
        );
        dkv_sm90.iter_mut().zip(&spare).for_each(|(to, from)| *to += *from);

        near("out of sm_90a", &floats(&out_sm90), &want_out, 5e-3);
        near("lse of sm_90a", &lse_sm90, &want_lse, 1e-5);
        if seq.min(window) > 1 {
            near("dq of sm_90a", &floats(&dq_sm90), &want_dq, 1e-2);
        }
        near("dkv of sm_90a", &floats(&dkv_sm90), &want_dkv, 1e-2);
    }
}
