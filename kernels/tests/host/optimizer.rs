//! Update rules and sums of squares, bit by bit against the CPU.

use crate::launch::Given;
use crate::{assert_bits, launch, values};
use meshwork_core::Buffer;
use meshwork_core::exact::LIMBS;
use meshwork_cpu::Cpu;
use meshwork_kernels::{EXACT_PIECE, SQUARES_PIECE, Type, UPDATE_PIECE};
use meshwork_optim::{AdamW, Optimizer, Sgd, Update};
use meshwork_tensor::kernel::Optim;

/// Vectors of odd lengths, of a block and of more, and empty ones at each end and between.
const COUNTS: [usize; 9] = [0, 1003, 1, 0, 0, 1024, 2050, 7, 0];

/// The first pieces and the counts of vectors, as kernels take them, and the number of pieces.
fn table(counts: &[usize], piece: u64) -> (Vec<i64>, Vec<i64>, usize) {
    let mut starts = vec![0];
    counts.iter().for_each(|count| starts.push(starts[starts.len() - 1] + count.div_ceil(piece as usize) as i64));
    let pieces = starts[counts.len()] as usize;
    (starts, counts.iter().map(|&count| count as i64).collect(), pieces)
}

fn vectors(name: &str) -> Vec<Vec<f32>> {
    COUNTS.iter().enumerate().map(|(at, &count)| values(&format!("{name} {at}"), count)).collect()
}

fn assert_all_bits(what: &str, got: &[Vec<f32>], want: &[Vec<f32>]) {
    got.iter().zip(want).enumerate().for_each(|(at, (got, want))| assert_bits(&format!("{what} {at}"), got, want));
}

#[test]
fn updates_of_many_vectors_are_those_of_the_cpu() {
    let (rule, lr, scale) = (AdamW::default(), 3e-3, 0.7_f32);
    let zeros = || COUNTS.map(|count| vec![0.0; count]).to_vec();
    let (mut w, mut m, mut v) = (vectors("w"), zeros(), zeros());
    let (mut want_w, mut want_m, mut want_v) = (w.clone(), m.clone(), v.clone());
    let (starts, counts, pieces) = table(&COUNTS, UPDATE_PIECE);
    for step in 1..4_i32 {
        let grads = vectors(&format!("grads {step}"));
        let update = Update { step: step as u64, lr, grad_scale: scale, decay_factor: 1.0 };
        for at in 0..COUNTS.len() {
            rule.update(update, &mut want_w[at], &grads[at], &mut [&mut want_m[at], &mut want_v[at]]).unwrap();
        }
        // As crates/optim/src/adamw.rs rounds them; powers of so few steps by repeated products.
        let power = |base: f64| [0.0, base, base * base, base * (base * base)][step as usize];
        let keep = (1.0 - lr * rule.weight_decay) as f32;
        let lr_hat = (lr / (1.0 - power(rule.beta1))) as f32;
        let root_hat = (1.0 - power(rule.beta2)).sqrt() as f32;
        let betas = [1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2].map(|x| x as f32);
        let [mean_new, old, new] = betas;
        let eps = rule.eps as f32;
        #[rustfmt::skip]
        let there = launch!(
            "adamw", [pieces * UPDATE_PIECE as usize, 0], &mut w[..], &grads[..], &mut m[..], &mut v[..], &starts, &counts, COUNTS.len(), scale, keep,
            lr_hat, root_hat, mean_new, old, new, eps
        );
        if there {
            assert_all_bits("weights", &w, &want_w);
            assert_all_bits("means", &m, &want_m);
            assert_all_bits("squares", &v, &want_v);
        }
    }
}

#[test]
fn sgd_of_many_vectors_is_that_of_the_cpu() {
    let (starts, counts, pieces) = table(&COUNTS, UPDATE_PIECE);
    let (sizes, many) = ([pieces * UPDATE_PIECE as usize, 0], COUNTS.len());
    for momentum in [0.0, 0.9] {
        let rule = Sgd { momentum, weight_decay: 0.1 };
        let (mut w, mut b) = (vectors("w"), vectors("b"));
        let (mut want_w, mut want_b, grads) = (w.clone(), b.clone(), vectors("grads"));
        let update = Update { step: 1, lr: 0.3, grad_scale: 0.5, decay_factor: 0.5 };
        let (decay, lr) = ((0.1 * 0.5) as f32, 0.3_f64 as f32);
        for at in 0..many {
            let mut states: Vec<&mut [f32]> = if momentum == 0.0 { vec![] } else { vec![&mut want_b[at]] };
            rule.update(update, &mut want_w[at], &grads[at], &mut states).unwrap();
        }
        #[rustfmt::skip]
        let there = match momentum == 0.0 {
            true => launch!("sgd", sizes, &mut w[..], &grads[..], &starts, &counts, many, 0.5_f32, decay, lr),
            false => launch!(
                "sgd_momentum", sizes, &mut w[..], &grads[..], &mut b[..], &starts, &counts, many, 0.5_f32, decay, lr, momentum as f32
            ),
        };
        if there {
            assert_all_bits("weights", &w, &want_w);
            assert_all_bits("momentum", &b, &want_b);
        }
    }
}

/// Vectors of less than a piece, of some and of many, and more of them than a block of the last kernel has warps: one
/// after the other is added to what is there.
#[test]
pub fn squares_are_summed_in_the_order_of_the_cpu() {
    let sizes: [&[usize]; 5] = [
        &[1],
        &[0, 31, 0],
        &[66_000],
        &[33_000, 1, 32_768, 0, 32_769],
        &[1000, 1003, 7, 33_000, 5, 1, 2, 800, 9, 31, 64, 3],
    ];
    for counts in sizes {
        let x: Vec<Vec<f32>> = counts.iter().enumerate().map(|(at, &n)| values(&format!("x {at}"), n)).collect();
        let (starts, of_table, pieces) = table(counts, SQUARES_PIECE);
        let (mut parts, mut totals, mut sum) = (vec![f64::NAN; pieces], vec![f64::NAN; counts.len()], vec![0.25]);
        if !launch!("sum_of_squares", [pieces, 0], &x[..], &starts, &of_table, counts.len(), &mut parts) {
            return;
        }
        launch!("sum_of_parts", [1, 1], &parts, &starts, counts.len(), &mut totals, &mut sum);
        let vectors: Vec<Buffer> = x.into_iter().map(Buffer::from_vec).collect();
        let mut want = Buffer::from_vec(vec![0.25]);
        Cpu::default().sum_of_squares(&vectors, &mut want, 0).unwrap();
        assert_eq!(sum, want.as_slice::<f64>().unwrap(), "{counts:?}");
    }
}

/// Of one vector and of many, with the ends of what f32 has, and with what is not finite.
#[test]
fn exact_sums_of_squares_are_those_of_the_cpu() {
    let ends = [0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), -f32::from_bits(0x7f_ffff), 1.5e-19];
    let lasts: [(&[usize], f32); 5] = [
        (&[1], 1.0),
        (&[0, 7, 0, 4097], 2.0),
        (&[4099], -3e-30),
        (&[33_001, 1], f32::INFINITY),
        (&[31, 600], f32::NAN),
    ];
    for (counts, last) in lasts {
        let mut x: Vec<Vec<f32>> = counts.iter().enumerate().map(|(at, &n)| values(&format!("x {at}"), n)).collect();
        x.iter_mut().flatten().zip(ends).for_each(|(x, end)| *x = end);
        *x.iter_mut().flatten().next_back().unwrap() = last;
        let (starts, of_table, pieces) = table(counts, EXACT_PIECE);
        let (mut parts, mut digits) = (vec![u64::MAX; pieces * LIMBS], vec![0.25; LIMBS]);
        if !launch!("exact_squares", [pieces, 0], &x[..], &starts, &of_table, counts.len(), &mut parts) {
            return;
        }
        launch!("exact_squares_sum", [1, 0], &parts, pieces, &mut digits);
        let vectors: Vec<Buffer> = x.into_iter().map(Buffer::from_vec).collect();
        let mut want = Buffer::from_vec(vec![0.25; LIMBS]);
        Cpu::default().exact_sum_of_squares(&vectors, &mut want, 0).unwrap();
        assert_eq!(digits, want.as_slice::<f64>().unwrap(), "{counts:?}");
    }
}

/// What does not lie at a multiple of 16 bytes is taken one by one, with the same bits: here only one of the two
/// vectors does.
#[test]
fn an_update_of_a_part_has_the_bits_of_the_whole() {
    let (count, from) = (37, 3);
    let (w, grads) = (values("w", count), values("grads", count));
    let mut whole = [w.clone()];
    let (starts, counts, _) = table(&[count], UPDATE_PIECE);
    if !launch!(
        "sgd",
        [1024, 0],
        &mut whole[..],
        &[grads.clone()][..],
        &starts,
        &counts,
        1_usize,
        0.5_f32,
        0.1_f32,
        0.3_f32
    ) {
        return;
    }
    let (mut part, grads) = (w.clone(), [grads[from..].to_vec()]);
    let counts = vec![(count - from) as i64];
    let there = Given::Outs(Type::F32, vec![bytemuck::cast_slice_mut(&mut part[from..])]);
    launch!("sgd", [1024, 0], there, &grads[..], &starts, &counts, 1_usize, 0.5_f32, 0.1_f32, 0.3_f32);
    assert_bits("the part", &part[from..], &whole[0][from..]);
    assert_bits("what lies before it", &part[..from], &w[..from]);
}

#[test]
fn overflow_is_seen_and_only_then() {
    for (bad, seen) in [(1.0, 0), (f32::NAN, 1), (f32::INFINITY, 1), (f32::MAX, 1), (-f32::MAX / 8.0, 0)] {
        let mut x = values("x", 600);
        x[599] = bad;
        let want: Vec<f32> = x.iter().map(|x| x * 4.0).collect();
        let mut overflow = vec![0];
        if !launch!("unscale", [600, 0], &mut x, 4.0_f32, &mut overflow, 600_usize) {
            return;
        }
        assert_eq!(overflow, [seen], "{bad}");
        assert_bits("unscaled", &x[..599], &want[..599]);
    }
}
