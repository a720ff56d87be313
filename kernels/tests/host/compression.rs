//! Compression, byte by byte against the CPU: the largest elements and their indices, values in fewer bits, factors of
//! matrices.

use crate::launch::{At, AtMut};
use crate::{assert_bits, launch, values};
use meshwork_compress::wire::HEADER;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse, compress_into, restore, wire_bytes};
use meshwork_tensor::random::key;

fn draws() -> Draws {
    Draws { key: key(7, "compression"), start: 1003 }
}

/// The CPU's message, without its header.
fn body(scheme: &Scheme, shape: Shape, x: &[f32]) -> Vec<u8> {
    let mut message = vec![0; wire_bytes(scheme, shape).unwrap()];
    compress_into(scheme, x, shape, draws(), &mut [], &mut message).unwrap();
    message.split_off(HEADER)
}

/// What the CPU restores of it, added to `out`.
fn added(scheme: &Scheme, shape: Shape, x: &[f32], out: &mut [f32]) {
    let mut message = vec![0; wire_bytes(scheme, shape).unwrap()];
    compress_into(scheme, x, shape, draws(), &mut [], &mut message).unwrap();
    restore(&message, scheme, shape, Fold::Add, out).unwrap();
}

fn sparse(text: &str) -> Sparse {
    match text.parse().unwrap() {
        Scheme::Sparse(sparse) => sparse,
        other => panic!("{other}"),
    }
}

#[test]
pub fn the_largest_are_those_of_the_cpu() {
    for (text, unit, rows, cols) in
        [("topk:0.1", 900, 2, 450), ("topk:0.3/row", 61, 7, 61), ("topk:5/block40", 40, 1, 95), ("topk:1", 3, 1, 3)]
    {
        let (of, shape) = (sparse(text), Shape::matrix(rows, cols).unwrap());
        let (len, count) = (shape.len(), of.count(shape));
        let mut x = values(text, len);
        // Ties, among them at the threshold; what is not finite is the largest.
        x.iter_mut().enumerate().filter(|(at, _)| at % 3 == 0).for_each(|(_, x)| *x = (*x * 2.0).round());
        (x[len / 2], x[len - 1]) = (f32::NAN, f32::NEG_INFINITY);
        let (keep, last) = (of.keep.count(unit.min(len)), if len % unit > 0 { of.keep.count(len % unit) } else { 0 });
        let (mut indices, parts) = (vec![u32::MAX; count], len.div_ceil(unit));
        if !launch!("topk_choose", [parts, 1], &x, len, unit, keep, last, &mut indices) {
            return;
        }
        assert_eq!(indices, of.indices(&x, shape, draws()), "{text}");

        // Written and read in their coding.
        let (want, packed) = (body(&Scheme::Sparse(of), shape, &x), of.packed(shape));
        let bytes = of.index_bytes(shape).len();
        let (low, width) = packed.map_or((0, 0), |packed| (packed.low_bytes, packed.width));
        let (mut of_low, mut of_high) = (vec![9_u8; low.max(1)], vec![9_u8; bytes - low]);
        let (spread, high) = (i32::from(packed.is_some()), bytes - low);
        launch!("indices_bits", [high, 0], &indices, count, width as i32, spread, &mut of_high, high);
        if low > 0 {
            launch!("indices_low", [low, 0], &indices, count, width as usize, &mut of_low, low);
            assert_eq!(of_low, want[..low], "{text}");
        }
        assert_eq!(of_high, want[low..bytes], "{text}");
        let (mut read, mut found) = (vec![9_u32; count], vec![0_i64; 4]);
        launch!(
            "indices_read",
            [1, 1],
            &of_low,
            &of_high,
            high,
            count,
            len,
            width as i32,
            spread,
            &mut read,
            &mut found
        );
        assert_eq!((&read, found[0]), (&indices, 0), "{text}");
        // One index more or fewer than there should be.
        for wrong in [count + 1, count - 1] {
            let (mut read, mut found) = (vec![9_u32; wrong.max(1)], vec![0_i64; 4]);
            launch!(
                "indices_read",
                [1, 1],
                &of_low,
                &of_high,
                high,
                wrong,
                len,
                width as i32,
                spread,
                &mut read,
                &mut found
            );
            assert_eq!(found[0], 1, "{text}: {wrong} of {count}");
        }

        let (mut taken, factor) = (vec![f32::NAN; count], of.factor(shape));
        launch!("take_values", [count, 0], &x, &indices, factor, &mut taken, count);
        assert_bits(text, &taken, &of.take(&x, shape, &indices));
        let (mut put, mut wanted) = (values("out", len), values("out", len));
        launch!("put_values", [count, 0], &taken, &indices, &mut put, 1, count);
        indices.iter().zip(&taken).for_each(|(&at, value)| wanted[at as usize] += value);
        assert_bits(text, &put, &wanted);
    }
}

#[test]
fn drawn_indices_are_those_of_the_cpu() {
    for (text, len) in [("randk:0.3", 500), ("randk:1", 65), ("randk:1.0", 70)] {
        let (of, shape) = (sparse(text), Shape::vector(len).unwrap());
        let (bytes, count) = (body(&Scheme::Sparse(of), shape, &values("x", len)), of.count(shape));
        let mut taken = vec![0_u64; len.div_ceil(64)];
        if !launch!("draw_indices", [1, 0], &bytes, count, len, &mut taken) {
            return;
        }
        let drawn = (0..len as u32).filter(|at| taken[*at as usize / 64] >> (at % 64) & 1 == 1).collect::<Vec<u32>>();
        assert_eq!(drawn, of.indices(&values("x", len), shape, draws()), "{text}");
    }
}

#[test]
pub fn values_are_those_of_the_cpu() {
    for (count, unit) in [(1_usize, 1_usize), (7, 7), (1025, 1025), (700, 33)] {
        let shape = Shape::vector(count).unwrap();
        let (parts, per) = (count.div_ceil(unit), if unit < count { "/block33" } else { "" });
        let mut x = values("x", count);
        x.iter_mut().skip(2).step_by(9).zip([0.0, -0.0, 1e-40, 3e30, -2e-30]).for_each(|(x, odd)| *x = odd);
        let scheme = |name: &str| format!("{name}{per}").parse::<Scheme>().unwrap();
        let restored = |scheme: &Scheme| {
            let mut out = values("out", count);
            added(scheme, shape, &x, &mut out);
            out
        };
        for (name, e5m2) in [("fp8:e4m3", 0), ("fp8:e5m2", 1)] {
            let (scheme, mut scales, mut codes) = (scheme(name), vec![9_u8; 4 * parts], vec![9_u8; count]);
            if !launch!("fp8_scales", [parts, 1], &x, count, unit, e5m2, &mut scales) {
                return;
            }
            launch!("fp8_pack", [count, 0], &x, &scales, unit, e5m2, &mut codes, count);
            assert_eq!([&scales[..], &codes].concat(), body(&scheme, shape, &x), "{scheme}");
            let mut out = values("out", count);
            launch!("fp8_unpack", [count, 0], &codes, &scales, unit, e5m2, &mut out, 1, count);
            assert_bits(name, &out, &restored(&scheme));
        }
        for (bits, stochastic) in [(1_usize, 0), (3, 0), (8, 0), (4, 1)] {
            let end = if stochastic == 1 { "/stochastic" } else { "" };
            let scheme: Scheme = format!("quant:{bits}{per}{end}").parse().unwrap();
            let (levels, [key0, key1]) = (((1 << bits) - 1) as f32, draws().key.words());
            let (mut pairs, mut codes) = (vec![9_u8; 8 * parts], vec![9_u8; count]);
            launch!("quant_pairs", [parts, 1], &x, count, unit, levels, &mut pairs);
            let (start, bytes) = (draws().start, bits * count.div_ceil(8));
            #[rustfmt::skip]
            launch!(
                "quant_codes", [count, 0], &x, &pairs, unit, levels, stochastic, key0, key1, start, &mut codes, count
            );
            let mut planes = vec![9_u8; bytes];
            launch!("planes_pack", [bytes, 0], &codes, bits, &mut planes, bytes, count);
            assert_eq!([&pairs[..], &planes].concat(), body(&scheme, shape, &x), "{scheme}");
            let mut out = values("out", count);
            launch!("quant_unpack", [count, 0], &planes, &pairs, bits, unit, &mut out, 1, count);
            assert_bits("quant", &out, &restored(&scheme));
        }
        let (absmax, mut scales, mut codes) = (scheme("int8"), vec![9_u8; 4 * parts], vec![9_u8; count]);
        launch!("absmax_scales", [parts, 1], &x, count, unit, &mut scales);
        launch!("int8_pack", [count, 0], &x, &scales, unit, &mut codes, count);
        assert_eq!([&scales[..], &codes].concat(), body(&absmax, shape, &x), "{absmax}");
        let mut out = values("out", count);
        launch!("int8_unpack", [count, 0], &codes, &scales, unit, &mut out, 1, count);
        assert_bits("int8", &out, &restored(&absmax));
        let (absmax, bytes) = (scheme("nf4"), 4 * count.div_ceil(8));
        let mut planes = vec![9_u8; bytes];
        launch!("nf4_codes", [count, 0], &x, &scales, unit, &mut codes, count);
        launch!("planes_pack", [bytes, 0], &codes, 4_usize, &mut planes, bytes, count);
        assert_eq!([&scales[..], &planes].concat(), body(&absmax, shape, &x), "{absmax}");
        let mut out = values("out", count);
        launch!("nf4_unpack", [count, 0], &planes, &scales, unit, &mut out, 1, count);
        assert_bits("nf4", &out, &restored(&absmax));
        let (absmax, mut bytes_of, mut again) =
            (format!("nf4{per}/e5m3").parse::<Scheme>().unwrap(), vec![9_u8; parts], vec![9_u8; 4 * parts]);
        launch!("e5m3_pack", [parts, 0], &mut scales, &mut bytes_of, parts);
        launch!("nf4_codes", [count, 0], &x, &scales, unit, &mut codes, count);
        launch!("planes_pack", [bytes, 0], &codes, 4_usize, &mut planes, bytes, count);
        assert_eq!([&bytes_of[..], &planes].concat(), body(&absmax, shape, &x), "{absmax}");
        launch!("e5m3_unpack", [parts, 0], &bytes_of, &mut again, parts);
        let mut out = values("out", count);
        launch!("nf4_unpack", [count, 0], &planes, &again, unit, &mut out, 1, count);
        assert_bits("nf4 e5m3", &out, &restored(&absmax));

        let (scheme, bytes) = (scheme("sign"), count.div_ceil(8));
        let (mut scales, mut codes, mut planes) = (vec![9_u8; 4 * parts], vec![9_u8; count], vec![9_u8; bytes]);
        launch!("sign_scales", [16 * parts, 0], &x, count, unit, &mut scales, parts);
        launch!("sign_codes", [count, 0], &x, &mut codes, count);
        launch!("planes_pack", [bytes, 0], &codes, 1_usize, &mut planes, bytes, count);
        assert_eq!([&scales[..], &planes].concat(), body(&scheme, shape, &x), "{scheme}");
        let mut out = values("out", count);
        launch!("sign_unpack", [count, 0], &planes, &scales, unit, &mut out, 1, count);
        assert_bits("sign", &out, &restored(&scheme));

        for (name, size) in [("f32", 4), ("bf16", 2)] {
            let scheme: Scheme = if size == 4 { "none" } else { "bf16" }.parse().unwrap();
            let (mut bytes, mut out) = (vec![9_u8; size * count], values("out", count));
            launch!(&format!("{name}_pack"), [count, 0], &x, &mut bytes, count);
            assert_eq!(bytes, body(&scheme, shape, &x));
            launch!(&format!("{name}_unpack"), [count, 0], &bytes, &mut out, 1, count);
            assert_bits(name, &out, &restored(&scheme));
        }
    }
}

#[test]
fn headers_are_written_and_checked() {
    let mut message = vec![9_u8; 18];
    let [first, second] = [0x0807_0605_0403_0201_u64, 0x100f_0e0d_0c0b_0a09];
    if !launch!("message_words", [16, 0], AtMut(&mut message, 1), first, second) {
        return;
    }
    assert_eq!(message, [&[9][..], &(1..=16).collect::<Vec<u8>>(), &[9]].concat());
    for (other, seen) in [(second, 0), (second ^ 1 << 63, 1)] {
        let mut found = vec![0_i64; 4];
        launch!("message_check", [16, 0], At(&message, 1), first, other, &mut found);
        assert_eq!(found[0], seen);
    }
}

#[test]
fn feedback_is_that_of_the_cpu() {
    let count = 300;
    let (x, g, target) = (values("x", count), values("g", count), values("target", count));
    let (mut out, mut residual) = (vec![f32::NAN; count], vec![f32::NAN; count]);
    if !launch!("feedback_residual", [count, 0], &x, &g, &mut out, count) {
        return;
    }
    assert_bits("ef", &out, &x.iter().zip(&g).map(|(x, g)| x + g).collect::<Vec<f32>>());
    launch!("feedback_difference", [count, 0], &x, &g, &mut out, count);
    assert_bits("ef21", &out, &x.iter().zip(&g).map(|(x, g)| x - g).collect::<Vec<f32>>());
    launch!("feedback_kept", [count, 0], &target, &x, &mut residual, count);
    assert_bits("kept", &residual, &target.iter().zip(&x).map(|(target, x)| target - x).collect::<Vec<f32>>());
    let feedback = Feedback::Ef21Momentum { eta: 0.3 };
    for first in [true, false] {
        let mut sender = feedback.sender(count);
        (sender.estimate, sender.momentum) = (g.clone(), target.clone());
        let (mut momentum, mut want) = (target.clone(), vec![0.0; count]);
        launch!(
            "feedback_momentum",
            [count, 0],
            &x,
            &g,
            &mut momentum,
            i32::from(first),
            0.3_f32,
            0.7_f32,
            &mut out,
            count
        );
        feedback.outgoing(&x, first, &mut sender, &mut want);
        assert_bits("ef21m", &out, &want);
        assert_bits("momentum", &momentum, &sender.momentum);
    }
}

#[test]
pub fn factors_are_those_of_the_cpu() {
    for (rank, rows, cols) in [(1_usize, 1_usize, 1_usize), (3, 70, 41), (2, 5, 300)] {
        let (of, shape) = (PowerSgd { rank }, Shape::matrix(rows, cols).unwrap());
        let (m, [p_len, q_len]) = (values("m", rows * cols), of.factors(shape));
        let mut q = values("q", q_len);
        q[..cols].fill(0.0);
        let (mut p, mut want_q, mut want_p) = (vec![f32::NAN; p_len], q.clone(), vec![0.0; p_len]);
        let ([key0, key1], start) = (draws().key.words(), draws().start);
        if !launch!("low_rank_start", [rank, 1], &mut q, cols, key0, key1, start) {
            return;
        }
        launch!("low_rank_times", [16 * p_len, 0], &m, &q, &mut p, cols, rank, p_len);
        of.start(&mut want_q, shape, draws());
        of.times(&m, &want_q, shape, &mut want_p);
        assert_bits("q", &q, &want_q);
        assert_bits("p", &p, &want_p);
        let mut lengths = vec![0.0_f64; rank];
        launch!("low_rank_orthonormal", [1, 0], &mut p, rows, rank, &mut lengths);
        of.orthogonalise(&mut want_p);
        assert_bits("orthonormal p", &p, &want_p);
        launch!("low_rank_transposed", [q_len, 0], &m, &p, &mut q, rows, cols, rank);
        of.transposed_times(&m, &want_p, shape, &mut want_q);
        assert_bits("new q", &q, &want_q);
        let (mut out, mut want) = (vec![f32::NAN; rows * cols], vec![0.0; rows * cols]);
        launch!("low_rank_join", [rows * cols, 0], &p, &q, &mut out, cols, rank, 3.0_f32, rows * cols);
        of.product(&want_p, &want_q, shape, Fold::Replace, &mut want);
        want.iter_mut().for_each(|x| *x /= 3.0);
        assert_bits("the product", &out, &want);
    }
}

/// Vectors of more than one chunk, in patterns of 32 and of 16 bits.
#[test]
pub fn vectors_without_zeros_come_back() {
    for count in [1_usize, 9, 30_000] {
        let x: Vec<u32> = values("x", count).iter().map(|x| if *x > 0.3 { x.to_bits() } else { 0 }).collect();
        let halves: Vec<half::bf16> = x.iter().map(|x| half::bf16::from_bits((x >> 16) as u16)).collect();
        let (bytes, chunks) = (count.div_ceil(8), count.div_ceil(8).div_ceil(2048));
        let (mut bits, mut of_halves) = (vec![9_u8; bytes], vec![9_u8; bytes]);
        if !launch!("nonzeros_mark_32", [count, 0], &x, &mut bits, count) {
            return;
        }
        launch!("nonzeros_mark_16", [count, 0], &halves, &mut of_halves, count);
        assert_eq!(bits, of_halves);
        assert!((0..count).all(|at| bits[at / 8] >> (at % 8) & 1 == u8::from(x[at] != 0)), "{count}");
        let (mut counts, mut starts) = (vec![-9_i64; chunks], vec![-9_i64; chunks + 1]);
        launch!("nonzeros_count", [chunks, 1], &bits, bytes, &mut counts);
        launch!("nonzeros_starts", [1, 1], &counts, chunks, &mut starts);
        let kept: Vec<u32> = x.iter().copied().filter(|x| *x != 0).collect();
        assert_eq!(starts[chunks], kept.len() as i64);
        let (mut values, mut back) = (vec![9_u32; kept.len() + 1], vec![9_u32; count]);
        launch!("nonzeros_gather_32", [chunks, 1], &x, &bits, bytes, &starts, &mut values, count);
        assert_eq!((&values[..kept.len()], values[kept.len()]), (&kept[..], 9));
        launch!("nonzeros_scatter_32", [chunks, 1], &bits, bytes, &starts, &values, kept.len(), &mut back, count);
        assert_eq!(back, x);
        let (mut of_halves, mut back) = (vec![half::bf16::ONE; kept.len() + 1], vec![half::bf16::ONE; count]);
        launch!("nonzeros_gather_16", [chunks, 1], &halves, &bits, bytes, &starts, &mut of_halves, count);
        launch!("nonzeros_scatter_16", [chunks, 1], &bits, bytes, &starts, &of_halves, kept.len(), &mut back, count);
        assert_eq!(back, halves);
    }
}
