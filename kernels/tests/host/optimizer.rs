//! Update rules and sums of squares, bit by bit against the CPU.

use crate::launch::AtMut;
use crate::{assert_bits, launch, values};
use meshwork_core::Buffer;
use meshwork_optim::{AdamW, Optimizer, Sgd, Update};
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::kernel::Optim;

#[test]
fn updates_are_those_of_the_cpu() {
    let count = 1003;
    let (rule, lr, scale) = (AdamW::default(), 3e-3, 0.7_f32);
    let (mut w, mut m, mut v) = (values("w", count), vec![0.0; count], vec![0.0; count]);
    let (mut want_w, mut want_m, mut want_v) = (w.clone(), m.clone(), v.clone());
    for step in 1..4_i32 {
        let grads = values(&format!("grads {step}"), count);
        let update = Update { step: step as u64, lr, grad_scale: scale, decay_factor: 1.0 };
        rule.update(update, &mut want_w, &grads, &mut [&mut want_m, &mut want_v]).unwrap();
        // As crates/optim/src/adamw.rs rounds them; powers of so few steps by repeated products.
        let power = |base: f64| [0.0, base, base * base, base * (base * base)][step as usize];
        let keep = (1.0 - lr * rule.weight_decay) as f32;
        let lr_hat = (lr / (1.0 - power(rule.beta1))) as f32;
        let root_hat = (1.0 - power(rule.beta2)).sqrt() as f32;
        let betas = [1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2].map(|x| x as f32);
        let [mean_new, old, new] = betas;
        let eps = rule.eps as f32;
        let (w, m, v) = (&mut w, &mut m, &mut v);
        #[rustfmt::skip]
        let there = launch!(
            "adamw", [count, 0], &mut *w, &grads, &mut *m, &mut *v, scale, keep, lr_hat, root_hat, mean_new, old, new, eps, count
        );
        if there {
            assert_bits("weights", w, &want_w);
            assert_bits("means", m, &want_m);
            assert_bits("squares", v, &want_v);
        }
    }
}

#[test]
fn sgd_is_that_of_the_cpu() {
    let count = 700;
    for momentum in [0.0, 0.9] {
        let rule = Sgd { momentum, weight_decay: 0.1 };
        let (mut w, mut b) = (values("w", count), values("b", count));
        let (mut want_w, mut want_b, grads) = (w.clone(), b.clone(), values("grads", count));
        let update = Update { step: 1, lr: 0.3, grad_scale: 0.5, decay_factor: 0.5 };
        let (decay, lr) = ((0.1 * 0.5) as f32, 0.3_f64 as f32);
        if momentum == 0.0 {
            rule.update(update, &mut want_w, &grads, &mut []).unwrap();
            launch!("sgd", [count, 0], &mut w, &grads, 0.5_f32, decay, lr, count);
        } else {
            rule.update(update, &mut want_w, &grads, &mut [&mut want_b]).unwrap();
            launch!("sgd_momentum", [count, 0], &mut w, &grads, &mut b, 0.5_f32, decay, lr, momentum as f32, count);
        }
        if crate::build::library().is_some() {
            assert_bits("weights", &w, &want_w);
            assert_bits("momentum", &b, &want_b);
        }
    }
}

#[test]
fn squares_are_summed_in_the_order_of_the_cpu() {
    let x = values("x", 70_000);
    for (len, segments, pitch) in
        [(1, 1, 0), (31, 1, 0), (1000, 9, 1003), (32_768, 2, 32_768), (66_000, 1, 0), (33_000, 2, 36_000)]
    {
        let parts_len = segments * usize::div_ceil(len, 32_768);
        let (mut parts, mut sums) = (vec![f64::NAN; parts_len], vec![0.5, 0.25]);
        if !launch!("sum_of_squares", [parts_len, 0], &x, len, segments, pitch, &mut parts) {
            return;
        }
        launch!("sum_of_parts", [1, 0], &parts, parts_len, &mut sums, 1_usize);
        let pieces = (0..segments).flat_map(|i| x[i * pitch..][..len].chunks(32_768));
        let of_cpu = |piece: &[f32]| {
            let mut sum = Buffer::from_vec(vec![0.0]);
            Cpu::default().sum_of_squares(&Buffer::from_slice(piece), 0..piece.len(), &mut sum, 0).unwrap();
            sum.as_slice::<f64>().unwrap()[0]
        };
        let want = 0.25 + pieces.map(of_cpu).sum::<f64>();
        assert_eq!(sums, [0.5, want], "{segments} segments of {len}");
    }
}

/// What does not lie at a multiple of 16 bytes is taken one by one, with the same bits: here only one of the two vectors does.
#[test]
fn an_update_of_a_part_has_the_bits_of_the_whole() {
    let (count, from) = (37, 3);
    let (w, grads) = (values("w", count), values("grads", count));
    let mut whole = w.clone();
    if !launch!("sgd", [count, 0], &mut whole, &grads, 0.5_f32, 0.1_f32, 0.3_f32, count) {
        return;
    }
    let (mut part, grads) = (w.clone(), grads[from..].to_vec());
    launch!("sgd", [count - from, 0], AtMut(&mut part, from), &grads, 0.5_f32, 0.1_f32, 0.3_f32, count - from);
    assert_bits("the part", &part[from..], &whole[from..]);
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
