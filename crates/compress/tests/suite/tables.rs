//! Tables that can be checked by hand, and oracles.

use crate::common::{bits, compress, draws, lossy, scheme, values};
use meshwork_compress::{
    Choice, Compressor, Fold, Keep, Message, Per, Scales, Scheme, Shape, Sparse, TILE, Values, restore_tiles,
    wire_bytes,
};

fn vector(len: usize) -> Shape {
    Shape::vector(len).unwrap()
}

fn body(text: &str, x: &[f32]) -> Vec<u8> {
    compress(&scheme(text), x, vector(x.len()), draws(0)).as_bytes()[16..].to_vec()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn the_bytes_of_a_message() {
    let message = compress(&scheme("bf16"), &[1.0, -2.0], vector(2), draws(0)).into_bytes();
    assert_eq!(message[..4], [1, 1, 0, 0]); // version, method, zeros
    assert_eq!(message[8..], [2, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x3f, 0x00, 0xc0]);

    // Codes 0 1 2 3 3 2 1 0 1: planes of two bytes, element j·2 + i at bit j of byte i.
    // Low bits 0 1 0 1 1 0 1 0 1: byte 0 has elements 0 2 4 6 8, byte 1 has 1 3 5 7.
    let x = [0.0, 1.0, 2.0, 3.0, 3.0, 2.0, 1.0, 0.0, 1.0];
    assert_eq!(body("quant:2", &x), [floats(&[0.0, 1.0]), vec![0b11100, 0b0011, 0b00110, 0b0110]].concat());

    assert_eq!(body("sign", &[3.0, -1.0, 0.0, -4.0]), [floats(&[2.0]), vec![0b1010]].concat());

    // Three of 16: a bitmap of two bytes; packed they would take 1 + ⌈7/8⌉, which is no fewer.
    let mut x = [0.0; 16];
    (x[1], x[9], x[15]) = (5.0, -6.0, 7.0);
    assert_eq!(body("topk:3", &x), [vec![0b10, 0b1000_0010], floats(&[5.0, -6.0, 7.0])].concat());

    // Two of 64: w = 5. Low bits 3 and 1 (of 33), then rests 0 and 1: ones at 0 + 0 and 1 + 1.
    let mut x = [0.0; 64];
    (x[3], x[33]) = (1.0, -1.0);
    assert_eq!(body("topk:2", &x), [vec![0b0010_0011, 0, 0b101], floats(&[1.0, -1.0])].concat());
}

#[test]
fn sizes_in_bytes() {
    let bytes = |text: &str, rows, cols| wire_bytes(&scheme(text), Shape::matrix(rows, cols).unwrap()).unwrap() - 16;
    assert_eq!(bytes("none", 10, 100), 4000);
    assert_eq!(bytes("bf16", 10, 100), 2000);
    assert_eq!(bytes("fp8:e4m3", 10, 100), 1004);
    assert_eq!(bytes("fp8:e4m3/row", 10, 100), 1040);
    assert_eq!(bytes("quant:4", 10, 100), 8 + 500);
    assert_eq!(bytes("quant:4/block64", 10, 100), 8 * 16 + 500);
    assert_eq!(bytes("sign", 10, 100), 4 + 125);
    assert_eq!(bytes("int8/block64", 10, 100), 4 * 16 + 1000);
    assert_eq!(bytes("nf4/block64", 10, 100), 4 * 16 + 500);
    assert_eq!(bytes("nf4/block64/e5m3", 10, 100), 16 + 500);
    // 100 of 1000, w = 3: 38 bytes of low bits, ⌈(100 + 125) / 8⌉ = 29 of rests, below the bitmap's 125.
    assert_eq!(bytes("topk:0.1", 10, 100), 67 + 400);
    assert_eq!(bytes("topk:0.1+quant:8", 10, 100), 67 + 8 + 8 * 13);
    assert_eq!(bytes("topk:0.5", 10, 100), 125 + 2000);
    assert_eq!(bytes("randk:0.1", 10, 100), 16 + 400);
    assert_eq!(bytes("powersgd:4", 10, 100), 4 * 4 * 110);
    assert!(
        crate::common::SCHEMES.iter().all(|text| bytes(text, 1, 0) <= 16),
        "of nothing, at most what draws indices is sent"
    );
}

/// DALL-E (Ramesh et al. 2021), table 1 and its formula: factors of a block's matrices of 4 d x d, d x 4 d, 3 d x d and
/// d x d.
#[test]
fn powersgd_has_the_published_compression_rates() {
    for (d, rank, percent) in [(1920, 512, 83.33), (2688, 640, 85.12), (3968, 896, 85.89)] {
        // 1 - 5r/(8 d): of one matrix of 4 d x d, 1 - r (4 d + d) / 4 d², that is 1 - 5r/(4 d), in 16 instead of 32
        // bits.
        let shape = Shape::matrix(4 * d, d).unwrap();
        let factors = scheme(&format!("powersgd:{rank}")).body_bytes(shape) / 2;
        let rate = 100.0 * (1.0 - factors as f64 / (4 * shape.len()) as f64);
        assert!((rate - percent).abs() < 0.01, "{d}: {rate}");
    }
}

#[test]
fn quantisation_by_hand() {
    let x = [-1.0, -0.4, 0.1, 0.49, 0.5, 2.0];
    // Two bits: -1, 0, 1, 2. What lies in the middle goes to the even code: 0.5 is at 1.5, so code 2.
    assert_eq!(lossy(&scheme("quant:2"), &x, vector(6), draws(0)), [-1.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
    assert_eq!(lossy(&scheme("quant:1"), &x, vector(6), draws(0)), [-1.0, -1.0, -1.0, -1.0, -1.0, 2.0]);
    assert_eq!(lossy(&scheme("quant:3"), &[0.3; 5], vector(5), draws(0)), [0.3; 5]);
    assert_eq!(
        lossy(&scheme("quant:2/block2"), &[0.0, 3.0, 5.0, 5.0, 7.0], vector(5), draws(0)),
        [0.0, 3.0, 5.0, 5.0, 7.0]
    );
    assert_eq!(
        lossy(&scheme("quant:1/row"), &[1.0, 2.0, 3.0, 4.0], Shape::matrix(2, 2).unwrap(), draws(0)),
        [1.0, 2.0, 3.0, 4.0]
    );
    // A range that no f32 holds.
    assert!(lossy(&scheme("quant:4"), &[f32::MAX, -f32::MAX], vector(2), draws(0))[0].is_nan());
}

#[test]
fn of_equal_elements_the_first_are_kept() {
    let x = [1.0, -2.0, 2.0, 0.5, -2.0, 2.0];
    assert_eq!(lossy(&scheme("topk:2"), &x, vector(6), draws(0)), [0.0, -2.0, 2.0, 0.0, 0.0, 0.0]);
    assert_eq!(lossy(&scheme("topk:1/block3"), &x, vector(6), draws(0)), [0.0, -2.0, 0.0, 0.0, -2.0, 0.0]);
    assert_eq!(lossy(&scheme("topk:9"), &x, vector(6), draws(0)), x);
    // Infinity is larger than all numbers, a NaN larger than infinity.
    let y = lossy(&scheme("topk:2"), &[f32::MAX, f32::INFINITY, 1.0, f32::NAN], vector(4), draws(0));
    assert!(y[0] == 0.0 && y[1] == f32::INFINITY && y[3].is_nan());
}

/// Selection against sorting, with many ties, on both sides of the length from which on there is a histogram.
#[test]
fn the_largest_are_those_of_a_sort() {
    for len in [1, 2, 63, 64, 65, 1000, 4095, 4096, 20_000] {
        for (name, coarse) in [("fine", 1e9), ("coarse", 8.0)] {
            let x: Vec<f32> = values(name, len).iter().map(|x| (x * coarse).round() / coarse).collect();
            for keep in [1, 2, len / 10, len / 2, len - 1, len] {
                let sparse =
                    Sparse { choice: Choice::Largest(Per::Tensor), keep: Keep::Count(keep), values: Values::F32 };
                let mut sorted: Vec<u32> = (0..len as u32).collect();
                sorted.sort_by(|&a, &b| x[b as usize].abs().total_cmp(&x[a as usize].abs()).then(a.cmp(&b)));
                sorted.truncate(keep.max(1));
                sorted.sort_unstable();
                assert_eq!(sparse.indices(&x, vector(len), draws(0)), sorted, "{keep} of {len}, {name}");
            }
        }
    }
}

/// The value of a code, as the specification has it.
fn oracle(code: u8, mantissa: u32, bias: i32) -> f64 {
    let exponent = i32::from(code & 0x7f) >> mantissa;
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let size =
        if exponent == 0 { fraction * 2_f64.powi(1 - bias) } else { (1.0 + fraction) * 2_f64.powi(exponent - bias) };
    if code & 0x80 == 0 { size } else { -size }
}

#[test]
fn floats_of_eight_bits_are_those_of_the_specification() {
    for (text, mantissa, bias, last, largest) in [("fp8:e4m3", 3, 7, 0x7e, 448.0), ("fp8:e5m2", 2, 15, 0x7b, 57344.0)] {
        let scheme = scheme(text);
        let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f <= last).collect();
        let all: Vec<f32> = codes.iter().map(|&code| oracle(code, mantissa, bias) as f32).collect();
        assert_eq!(all.iter().copied().fold(0.0, f32::max), largest);
        // With the largest number among them the scale is 1, and every number is its own code.
        let bytes = compress(&scheme, &all, vector(all.len()), draws(0)).into_bytes();
        assert_eq!(bytes[16..20], 1_f32.to_le_bytes());
        assert_eq!(bytes[20..], codes, "{text}");
        assert_eq!(bits(&lossy(&scheme, &all, vector(all.len()), draws(0))), bits(&all), "{text}");

        // Between two codes: the nearest, of two the even one.
        let mut x = vec![largest];
        for pair in all[..=usize::from(last)].windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            x.extend([middle, -middle, f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1)]);
        }
        let restored = lossy(&scheme, &x, vector(x.len()), draws(0));
        for (x, y) in x.iter().zip(&restored) {
            let nearest = (0..=last).min_by(|a, b| {
                let [da, db] = [a, b].map(|code| (oracle(*code, mantissa, bias) - f64::from(x.abs())).abs());
                da.total_cmp(&db).then((a & 1).cmp(&(b & 1)))
            });
            let nearest = nearest.map(|code| if *x < 0.0 { code | 0x80 } else { code }).unwrap();
            assert_eq!(f64::from(*y), oracle(nearest, mantissa, bias), "{text} of {x}");
        }
    }
    // Scales are powers of two: 449 needs one more than 448.
    assert_eq!(lossy(&scheme("fp8:e4m3"), &[449.0, 2.0], vector(2), draws(0)), [448.0, 2.0]);
}

#[test]
fn bf16_is_that_of_half() {
    let x: Vec<f32> = (0..100_000_u32).map(|i| f32::from_bits(i.wrapping_mul(42_949))).collect();
    for (x, y) in x.iter().zip(lossy(&scheme("bf16"), &x, vector(x.len()), draws(0))) {
        assert_eq!(y.to_bits(), meshwork_core::bf16::from_f32(*x).to_f32().to_bits(), "{x}");
    }
}

/// Every index is drawn as often as any other, and every pair: 10,000 draws of 3 of 7.
#[test]
fn drawn_indices_are_drawn_alike() {
    let sparse = Sparse { choice: Choice::Random { unbiased: false }, keep: Keep::Count(3), values: Values::F32 };
    let (mut singles, mut pairs) = ([0.0; 7], [[0.0; 7]; 7]);
    for step in 0..10_000 {
        let drawn = sparse.indices(&[], vector(7), draws(step));
        assert!(drawn.len() == 3 && drawn.is_sorted());
        for &a in &drawn {
            singles[a as usize] += 1.0;
            drawn.iter().for_each(|&b| pairs[a as usize][b as usize] += 1.0);
        }
    }
    let near = |count: f64, p: f64| (count - 10_000.0 * p).abs() < 5.0 * (10_000.0 * p * (1.0 - p)).sqrt();
    assert!(singles.iter().all(|&count| near(count, 3.0 / 7.0)), "{singles:?}");
    assert!((0..7).all(|a| (0..7).all(|b| a == b || near(pairs[a][b], 1.0 / 7.0))), "{pairs:?}");
}

/// Even steps of the largest magnitude; the nearest of NF4's numbers: a code is the number of middles below.
#[test]
fn codes_in_units_of_the_largest_magnitude() {
    // 127 · 0.3 / 2 = 19.05, and 127 · 0.51 / 2 = 32.4.
    assert_eq!(body("int8", &[0.3, -2.0, 0.51, 0.0]), [floats(&[2.0]), vec![19, 129, 32, 0]].concat());
    assert_eq!(
        bits(&lossy(&scheme("int8"), &[0.3, -2.0, 0.51], vector(3), draws(0))),
        bits(&[19.0 / 127.0 * 2.0, -2.0, 32.0 / 127.0 * 2.0])
    );
    // Codes 15, 0, 7 and 8: planes of one byte.
    assert_eq!(body("nf4", &[4.0, -4.0, 0.1, 0.3]), [floats(&[4.0]), vec![0b0101, 0b0101, 0b0101, 0b1001]].concat());
    // Parts of nothing but zeros.
    for text in ["int8/block2", "nf4/block2"] {
        assert_eq!(bits(&lossy(&scheme(text), &[0.0, -0.0, 1.0], vector(3), draws(0))), bits(&[0.0, 0.0, 1.0]));
    }
}

/// Every scale of 8 bits is restored, and is the nearest of the numbers between its neighbours.
#[test]
fn scales_of_8_bits_are_the_nearest() {
    let of = |scale: f32| body("nf4/e5m3", &[scale])[0];
    let value = |code: u8| f64::from(8 + code % 8) / 8.0 * 2_f64.powi(i32::from(code / 8) - 20);
    for code in 1..254_u8 {
        let (here, next) = (value(code), value(code + 1));
        let middle = 0.5 * (here + next); // exact in f32, of two that are equally near the even code
        let even = code + code % 2;
        let near = [(middle as f32).next_down(), (middle as f32).next_up()];
        assert_eq!([here, middle, next].map(|scale| of(scale as f32)), [code, even, code + 1], "{here}");
        assert_eq!(near.map(of), [code, code + 1], "{here}");
        assert_eq!(lossy(&scheme("nf4/e5m3"), &[-here as f32], vector(1), draws(0)), [-here as f32]);
    }
    assert_eq!(value(254), f64::from(Scales::LARGEST));
    let ends = [0.0, 1e-40, 4e-7, 1.1e-6, 4e3, 3e38, f32::NAN];
    assert_eq!(ends.map(of), [0, 0, 0, 1, 254, 254, 255]);
    assert_eq!(lossy(&scheme("nf4/e5m3"), &[4e-7, -1e-9], vector(2), draws(0)), [0.0, 0.0]);
}

/// Codes are the nearest in units of the scale that is written, and not of the largest magnitude.
#[test]
fn codes_are_the_nearest_of_a_rounded_scale() {
    let restored = |x: [f32; 2]| lossy(&scheme("nf4/e5m3"), &x, vector(2), draws(0));
    // The middle of the two largest numbers is 0.8615. 0.88 is beyond it, and 0.88 / 1.05 = 0.838 is not.
    assert_eq!(restored([1.05, 0.88]), [1.0, 1.0]);
    // 0.96 / 1.125 = 0.853 is below it, and 0.96 / 1.1 = 0.873 is not.
    assert_eq!(bits(&restored([1.1, 0.96])), bits(&[1.125, 0.722_956_84 * 1.125]));
}

/// The numbers of NF4, by restoring all codes, against the quantiles that the paper defines (Dettmers et al., 2023,
/// section 3 and appendix E): of N(0, 1) at 8 even places from 1 - δ down to 1/2 and at 7 from δ up,
/// δ = (1/32 + 1/30) / 2, and zero; divided by the largest.
#[test]
fn the_numbers_of_nf4_are_quantiles() {
    let message = [&compress(&scheme("nf4"), &[1.0; 16], vector(16), draws(0)).as_bytes()[..20], &planes()].concat();
    let mut numbers = [0.0_f32; 16];
    let received = Message::received(message);
    received.restore(&scheme("nf4"), vector(16), Fold::Replace, &mut numbers).unwrap();
    let offset = 1.0 - (1.0 / 32.0 + 1.0 / 30.0) / 2.0;
    let place = |at: usize, count: usize| offset + (0.5 - offset) * at as f64 / count as f64;
    let largest = quantile(offset);
    let mut wanted: Vec<f64> = (0..8).map(|at| quantile(place(at, 8)) / largest).collect();
    wanted.push(0.0);
    wanted.extend((0..7).map(|at| -quantile(place(at, 7)) / largest));
    wanted.sort_by(f64::total_cmp);
    for (number, wanted) in numbers.iter().zip(&wanted) {
        assert!((f64::from(*number) - wanted).abs() < 1e-6, "{numbers:?} and {wanted:?}");
    }
    // The table in the paper: -1, 0 and 1 are exact, the others have these digits.
    assert_eq!([numbers[0], numbers[7], numbers[15]], [-1.0, 0.0, 1.0]);
    assert_eq!([numbers[1], numbers[8], numbers[14]], [-0.696_192_8, 0.079_580_3, 0.722_956_84]);
}

/// The planes of the codes 0 to 15: bit j of byte i of a plane belongs to element 2·j + i.
fn planes() -> Vec<u8> {
    let bit = |plane: usize, byte: usize| (0..8).map(|j| ((2 * j + byte) >> plane & 1) << j).sum::<usize>() as u8;
    (0..4).flat_map(|plane| [bit(plane, 0), bit(plane, 1)]).collect()
}

/// The place below which a normal distribution has this share, by bisection of its integral (Simpson's rule).
fn quantile(share: f64) -> f64 {
    let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let below = |x: f64| {
        let (parts, step) = (200, x / 200.0);
        let weight = |at: usize| {
            if at == 0 || at == parts {
                1.0
            } else if at % 2 == 1 {
                4.0
            } else {
                2.0
            }
        };
        0.5 + (0..=parts).map(|at| weight(at) * density(at as f64 * step)).sum::<f64>() * step / 3.0
    };
    let (mut low, mut high) = (0.0, 4.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if below(middle) < share { low = middle } else { high = middle }
    }
    low
}

/// Tiles of a message, as threads share them, are those of the whole.
#[test]
fn a_message_is_restored_in_tiles() {
    let (shape, x) = (vector(3 * TILE + 77), values("tiles", 3 * TILE + 77));
    for text in crate::common::SCHEMES {
        let Scheme::Values(of) = scheme(text) else { continue };
        let message = compress(&Scheme::Values(of), &x, shape, draws(1));
        let mut whole = vec![0.0; x.len()];
        message.restore(&of, shape, Fold::Replace, &mut whole).unwrap();
        for (first, len) in [(0, TILE), (1, 2 * TILE), (2, TILE + 77), (3, 77), (0, x.len()), (4, 0)] {
            let mut out = vec![9.0; len];
            restore_tiles(message.as_bytes(), of, shape, Fold::Replace, first, &mut out).unwrap();
            assert_eq!(bits(&out), bits(&whole[(first * TILE).min(x.len())..][..len]), "{text} from {first}");
        }
        for (first, len) in [(0, TILE - 1), (3, 78), (4, 1)] {
            let wrong = restore_tiles(message.as_bytes(), of, shape, Fold::Replace, first, &mut vec![0.0; len]);
            assert!(wrong.unwrap_err().to_string().contains("the restored tiles"), "{text} from {first}");
        }
    }
}
