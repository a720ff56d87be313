//! Mixtures of experts: routers, permutations and products of groups, bit by bit against the CPU.
//!
//! More than 400 lines: each kernel with all its arguments.

use crate::launch::{Given, Null};
use crate::{assert_bits, launch, values};
use meshwork_core::simd::{Level, level};
use meshwork_core::{Buffer, DType, Element};
use meshwork_cpu::Cpu;
use meshwork_cpu::kernels::round::round;
use meshwork_kernels::GROUPED_ROWS;
use meshwork_tensor::MAX_DIMS;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{
    Choices, Draw, DropoutMask, Grouped, GroupedGemm, GroupedGrad, Overflow, Permutation, Pick, Routing, Selection,
};
use meshwork_tensor::random::key;
use meshwork_tensor::tape::Terms;
use std::ops::Range;

fn buffer<T: Element>(x: &[T]) -> Buffer {
    Buffer::from_slice(x)
}

fn vec<T: Element>(x: &Buffer) -> Vec<T> {
    x.as_slice::<T>().unwrap().to_vec()
}

/// Positive scores, with ties.
fn scores(name: &str, count: usize) -> Vec<f32> {
    values(name, count).iter().map(|x| (x.abs() * 20.0).round() / 40.0 + 0.05).collect()
}

const ALL: Selection = Selection {
    samples: 3,
    experts: 8,
    k: 2,
    groups: 1,
    top_groups: 1,
    group_best: 1,
    capacity: None,
    overflow: Overflow::Drop,
    second: None,
};

/// What `CudaDevice` queues for a selection, with parts of 16 tokens: (chosen, routed, kept) and weights. `None`
/// without a library.
fn select(scores: &[f32], bias: Option<&Vec<f32>>, of: Selection, pick: Pick) -> Option<([Vec<i32>; 3], Vec<f32>)> {
    let Selection { samples, experts, k, groups, top_groups, group_best, capacity, second, .. } = of;
    let (scores, tokens, width) = (scores.to_vec(), scores.len() / experts, of.ranked());
    let (each, mut of_groups) = (tokens / samples, vec![f32::NAN; tokens * groups]);
    let (mut ranked, mut weights) = (vec![-9_i32; tokens * width], vec![f32::NAN; tokens * k]);
    let sizes = [tokens, 0];
    let (mut kept, all_used) = (vec![-9_i32; tokens * k], capacity.is_none() && second.is_none());
    let at_once = if all_used { Given::from(&mut kept) } else { Given::from(Null) };
    let (by, scale) = (i32::from(pick.normalise), pick.scale as f32);
    let bias = bias.map_or(Given::from(Null), Given::from);
    #[rustfmt::skip]
    let there = launch!(
        "route_rank", sizes, &scores, bias, experts, groups, top_groups, group_best, width, &mut of_groups, &mut ranked, at_once, by, scale,
        &mut weights, tokens
    );
    if !there {
        return None;
    }
    if all_used {
        return Some(([ranked.clone(), ranked, kept], weights));
    }
    let capacity = capacity.map_or(i64::MAX, |capacity| capacity as i64);
    let ([key0, key1], first) = second.map_or(([0; 2], 0), |Draw { key, first }| (key.words(), first as i64));
    let draws = i32::from(second.is_some());
    if width == k {
        let (part, parts) = (16_usize, each.div_ceil(16));
        let mut counts = vec![-9_i32; samples * k * parts * experts];
        let mut taken = vec![-9_i32; samples * parts * experts];
        #[rustfmt::skip]
        launch!(
            "route_parts", [samples * k * parts, 0], &scores, &ranked, experts, k, draws, key0, key1, first, part, parts, &mut counts, samples, each
        );
        #[rustfmt::skip]
        launch!(
            "route_limit", [samples * parts, 0], &scores, &mut ranked, experts, k, capacity, draws, key0, key1, first, part, parts, &counts,
            &mut taken, &mut kept, by, scale, &mut weights, samples, each
        );
        return Some(([ranked.clone(), ranked, kept], weights));
    }
    let mut taken = vec![0_i32; samples * experts];
    #[rustfmt::skip]
    launch!(
        "route_reroute", [samples, 0], &scores, &ranked, experts, k, width, capacity, draws, key0, key1, first, &mut taken, &mut kept,
        samples, each
    );
    let [mut chosen, mut routed] = [(); 2].map(|()| vec![-9_i32; tokens * k]);
    launch!("route_first", sizes, &ranked, &kept, width, k, &mut chosen, &mut routed, tokens);
    launch!("route_sort", sizes, &scores, experts, &mut routed, &mut kept, k, by, scale, &mut weights, tokens);
    Some(([chosen, routed, kept], weights))
}

#[test]
fn choices_are_those_of_the_cpu() {
    let draw = Some(Draw { key: key(3, "second"), first: 1001 });
    let limited = Selection { groups: 4, top_groups: 2, group_best: 2, k: 3, ..ALL };
    for (of, each) in [
        (ALL, 1),
        (Selection { capacity: Some(11), ..ALL }, 37),
        (Selection { capacity: Some(9), second: draw, ..ALL }, 40),
        (Selection { capacity: Some(0), ..ALL }, 3),
        (limited, 33),
        (Selection { experts: 70, groups: 35, top_groups: 34, k: 9, ..limited }, 9),
        (Selection { capacity: Some(13), overflow: Overflow::Reroute, ..limited }, 35),
        (Selection { capacity: Some(8), overflow: Overflow::Reroute, second: draw, ..ALL }, 33),
        (Selection { k: 8, ..ALL }, 5),
    ] {
        let count = of.samples * each * of.experts;
        let (mut scores, bias) = (scores("scores", count), scores("bias", of.experts));
        scores[0] = f32::NAN;
        scores[1] = f32::NAN;
        scores[of.experts - 1] = f32::INFINITY;
        for (bias, normalise) in [(None, true), (Some(&bias), false)] {
            let pick = Pick { experts: of.experts, k: of.k, normalise, scale: 2.7 };
            let Some((got, weights)) = select(&scores, bias, of, pick) else { return };
            let (scores, bias) = (buffer(&scores), bias.map(|bias| buffer(bias)));
            let want = Cpu::default().select(&scores, bias.as_ref(), &of, pick).unwrap();
            assert_bits(&format!("weights of {of:?}"), &weights, want.weights.as_slice().unwrap());
            for (what, got, want) in [("chosen", 0, want.chosen), ("routed", 1, want.routed), ("kept", 2, want.kept)]
                .map(|(what, i, want)| (what, &got[i], want))
            {
                assert_eq!(got, &vec::<i32>(&want), "{what} of {of:?}");
            }
        }
    }
}

#[test]
fn experts_choose_the_tokens_of_the_cpu() {
    let (samples, each, experts) = (3, 37, 5);
    let x = scores("scores", samples * each * experts);
    for capacity in [0, 1, 9, 50] {
        let mut kept = vec![-9_i32; x.len()];
        if !launch!("route_tokens", [x.len(), 0], &x, experts, capacity, &mut kept, x.len(), each) {
            return;
        }
        let want = Cpu::default().select_tokens(&buffer(&x), samples, experts, capacity).unwrap();
        assert_eq!(kept, vec::<i32>(&want));
    }
}

#[test]
fn weights_and_their_gradients_are_those_of_the_cpu() {
    let (tokens, experts) = (300, 7);
    let x = scores("scores", tokens * experts);
    for (k, normalise) in [(3, true), (3, false), (7, true)] {
        let of = Pick { experts, k, normalise, scale: 2.7 };
        let choices: Vec<i32> =
            (0..tokens * k).map(|i| if i % 5 == 0 { -1 } else { (i / k % 4 + i % k) as i32 }).collect();
        let (dout, add, scale) = (values("dout", tokens * k), i32::from(normalise), of.scale as f32);
        let (mut out, mut dx) = (vec![f32::NAN; tokens * k], vec![f32::NAN; x.len()]);
        let sizes = [tokens, 0];
        let chosen = (k < experts).then(|| buffer(&choices));
        if k < experts {
            if !launch!("route_pick", sizes, &x, &choices, experts, k, add, scale, &mut out, tokens) {
                return;
            }
            launch!("route_pick_backward", sizes, &x, &choices, &dout, experts, k, add, scale, &mut dx, tokens);
        } else {
            launch!("route_pick", sizes, &x, Null, experts, k, add, scale, &mut out, tokens);
            launch!("route_pick_backward", sizes, &x, Null, &dout, experts, k, add, scale, &mut dx, tokens);
        }
        let want = Cpu::default().pick(&buffer(&x), chosen.as_ref(), of).unwrap();
        assert_bits("weights", &out, want.as_slice().unwrap());
        let want = Cpu::default().pick_grad(&buffer(&x), chosen.as_ref(), &buffer(&dout), of).unwrap();
        assert_bits("gradients of weights", &dx, want.as_slice().unwrap());
    }
}

#[test]
fn losses_and_measures_of_balance_are_those_of_the_cpu() {
    let (samples, each, experts) = (3_usize, 41_usize, 6_usize);
    let (tokens, count, cpu) = (samples * each, samples * each * experts, Cpu::default());
    let (mut x, dout) = (scores("scores", count), vec![0.3_f64, -1.7, 2.5]);
    x[3] = 0.0;
    x[experts..2 * experts].fill(0.0);
    x[experts] = 1.0;
    for (counts, pitch) in [((0..18).collect::<Vec<i32>>(), experts), ((0..6).collect(), 0)] {
        let (mut sums, mut out, mut dx) =
            (vec![f64::NAN; samples * experts], vec![f64::NAN; samples], vec![f32::NAN; count]);
        if !launch!("balance_sums", [samples * experts, 0], &x, &mut sums, samples, each, experts) {
            return;
        }
        launch!("balance_forward", [samples, 0], &sums, &counts, pitch, 0.7_f64, &mut out, samples, experts);
        assert_eq!(out, vec::<f64>(&cpu.balance(&buffer(&x), &buffer(&counts), samples, experts, 0.7).unwrap()));
        launch!("balance_backward", [count, 0], &dout, &counts, pitch, 0.7_f64, &mut dx, count, each, experts);
        let want = cpu.balance_grad(&buffer(&dout), &buffer(&counts), [tokens, experts], 0.7, DType::F32).unwrap();
        assert_bits("gradient of balance", &dx, want.as_slice().unwrap());
    }
    let (mut terms, mut out, mut dx) = (vec![f64::NAN; tokens], vec![f64::NAN; samples], vec![f32::NAN; count]);
    launch!("z_terms", [tokens, 0], &x, &mut terms, tokens, experts);
    launch!("sample_means", [samples, 0], &terms, &mut out, samples, each);
    assert_eq!(out, vec::<f64>(&cpu.z_loss(&buffer(&x), samples, experts).unwrap()));
    launch!("z_backward", [tokens, 0], &x, &dout, &mut dx, tokens, each, experts);
    let want = cpu.z_loss_grad(&buffer(&x), &buffer(&dout), experts).unwrap();
    assert_bits("gradient of z", &dx, want.as_slice().unwrap());
    launch!("entropy_terms", [tokens, 0], &x, &mut terms, tokens, experts);
    launch!("sample_means", [samples, 0], &terms, &mut out, samples, each);
    assert_eq!(out, vec::<f64>(&cpu.entropy(&buffer(&x), samples, experts).unwrap()));

    let kept: Vec<i32> = (0..tokens * 2).map(|i| if i % 7 == 3 || i < 20 { -1 } else { (i % 5) as i32 }).collect();
    launch!("route_unused", [samples, 0], &kept, &mut out, samples, 2 * each);
    assert_eq!(out, vec::<f64>(&cpu.unused(&buffer(&kept), samples).unwrap()));
    let mut loads = vec![f32::NAN; experts];
    let mut parts = vec![-9_i32; experts];
    launch!("choice_parts", [1, 0], &kept, kept.len(), kept.len(), 1_usize, 0_usize, experts, &mut parts, 1_usize);
    launch!("choice_loads", [experts, 0], &parts, 1_usize, &mut loads, experts);
    assert_bits("loads", &loads, cpu.loads(&buffer(&kept), experts).unwrap().as_slice().unwrap());
}

#[test]
fn jitter_is_that_of_the_cpu() {
    let (x, mut got) = (values("x", 5 * 7), vec![f32::NAN; 5 * 7]);
    let mut mask = DropoutMask {
        p: 0.01,
        key: key(3, "router"),
        ndim: 2,
        local: [0; MAX_DIMS],
        offset: [0; MAX_DIMS],
        global: [0; MAX_DIMS],
    };
    mask.local[..2].copy_from_slice(&[5, 7]);
    mask.offset[..2].copy_from_slice(&[3, 0]);
    mask.global[..2].copy_from_slice(&[9, 7]);
    let sizes = vec![5_i64, 7, 3, 0, 9, 7];
    let [key0, key1] = mask.key.words();
    let (low, step) = (1.0 - mask.p, 2.0 * mask.p);
    if launch!("jitter", [35, 0], &x, &sizes, 2_i32, key0, key1, low, step, &mut got, 35_usize) {
        assert_bits("jitter", &got, Cpu::default().jitter(&buffer(&x), &mask).unwrap().as_slice().unwrap());
    }
}

/// Choices of `k` of `ids` ids by each token, ascending, some places not in use.
fn choices(tokens: usize, k: usize, ids: usize) -> Vec<i32> {
    let of = |token: usize| {
        let mut chosen: Vec<i32> = (0..k).map(|j| ((token * 7 + token / 5 + j * (ids / k)) % ids) as i32).collect();
        chosen.sort_unstable();
        if token.is_multiple_of(3) {
            chosen[token % k] = -1;
        }
        chosen
    };
    (0..tokens).flat_map(of).collect()
}

/// The choices are counted in one part, or in several parts of which the last is shorter.
#[test]
fn permutations_are_those_of_the_cpu() {
    let cpu = Cpu::default();
    for (samples, each, k, ids, part) in
        [(1, 1, 1, 1, 2048), (3, 37, 3, 12, 50), (2, 50, 2, 40, 32), (1, 70, 2, 5, 1000)]
    {
        let (tokens, all) = (samples * each, choices(samples * each, k, ids));
        let shared = buffer(&all);
        for range in [0..ids, ids / 3..ids / 3 + (ids / 2).max(1), 0..0] {
            let Range { start: first, end } = range;
            let (held, mut counts) = (end - first, vec![-9_i32; samples * (end - first)]);
            let parts = (each * k).div_ceil(part);
            let mut of_parts = vec![-9_i32; samples * parts * held];
            #[rustfmt::skip]
            let there = launch!(
                "choice_parts", [samples * parts, 0], &all, each * k, part, parts, first, held, &mut of_parts, samples
            );
            if !there {
                return;
            }
            launch!("choice_counts", [counts.len(), 0], &of_parts, parts, held, &mut counts, samples * held);
            assert_eq!(counts, vec::<i32>(&cpu.counts(&shared, samples, first..end).unwrap()));

            let (parts, total) = (all.len().div_ceil(part), counts.iter().sum::<i32>() as usize);
            let mut of_parts = vec![-9_i32; parts * held];
            launch!("choice_parts", [parts, 0], &all, all.len(), part, parts, first, held, &mut of_parts, 1_usize);
            let mut loads = vec![-9.0_f32; held];
            launch!("choice_loads", [held, 0], &of_parts, parts, &mut loads, held);
            let summed = |id: usize| counts.iter().skip(id).step_by(held).sum::<i32>() as f32;
            assert_eq!(loads, (0..held).map(summed).collect::<Vec<f32>>());
            let sort = |total: usize| {
                let (mut order, mut slots, mut wrong) = (vec![-9_i32; total], vec![-9_i32; all.len()], vec![0_i64; 4]);
                let mut next = vec![-9_i32; parts * held];
                #[rustfmt::skip]
                launch!(
                    "choice_places", [parts, 0], &all, all.len(), part, parts, first, held, &of_parts, &mut next, &mut order, total, &mut slots,
                    &mut wrong
                );
                (order, slots, wrong[0])
            };
            let (order, slots, wrong) = sort(total);
            let (want, want_slots) = cpu.sort(&shared, first..end, total).unwrap();
            assert_eq!((&order, &slots, wrong), (&vec::<i32>(&want), &vec::<i32>(&want_slots), 0));
            let mut inverse = vec![-9_i32; all.len()];
            launch!("invert_fill", [all.len(), 0], &mut inverse, all.len());
            launch!("invert", [total, 0], &order, &mut inverse, total);
            assert_eq!(slots, inverse);
            // One more or fewer than there are.
            let (longer, _, wrong) = sort(total + 1);
            assert_eq!((longer[total], wrong), (0, 1));
            if let Some(fewer) = total.checked_sub(1) {
                assert_eq!(sort(fewer).2, 1);
            }

            let width = if k == 2 { 24 } else { 5 };
            let rows = values("rows", total * width);
            moved(&order, &slots, &all, &rows, [tokens, k, width]);
        }
        for once in [false, true] {
            let mut groups = vec![-9_i32; all.len()];
            launch!("group_ids", [tokens, 0], &all, k, 3_usize, i32::from(once), &mut groups, tokens);
            assert_eq!(groups, vec::<i32>(&cpu.group_ids(&shared, k, 3, once).unwrap()));
        }
    }
}

/// Rows gathered and combined, and the gradients.
fn moved(order: &Vec<i32>, slots: &Vec<i32>, ids: &Vec<i32>, rows: &Vec<f32>, [tokens, k, width]: [usize; 3]) {
    let cpu = Cpu::default();
    let (x, weights, dout) =
        (values("x", tokens * width), values("weights", ids.len()), values("dout", tokens * width));
    let bits: Vec<u32> = x.iter().map(|x| x.to_bits()).collect();
    let (mut words, total) = (vec![9_u32; order.len() * width], order.len());
    launch!("gather_32", [words.len(), 0], &bits, order, tokens, k, width, &mut words, total * width);
    let want = cpu.gather(&buffer(&x), &buffer(order), k, width).unwrap();
    assert_eq!(words, want.as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<u32>>());
    let bytes: Vec<u8> = bits.iter().map(|bits| *bits as u8).collect();
    let mut got = vec![9_u8; total * width];
    launch!("gather_8", [got.len(), 0], &bytes, order, tokens, k, width, &mut got, total * width);
    assert_eq!(got, vec::<u8>(&cpu.gather(&buffer(&bytes), &buffer(order), k, width).unwrap()));
    let halves: Vec<half::bf16> = x.iter().map(|x| half::bf16::from_f32(*x)).collect();
    let mut got = vec![half::bf16::ZERO; total * width];
    launch!("gather_16", [got.len(), 0], &halves, order, tokens, k, width, &mut got, total * width);
    assert_eq!(got, vec::<half::bf16>(&cpu.gather(&buffer(&halves), &buffer(order), k, width).unwrap()));

    let [ids_, slots_, rows_, weights_] = [buffer(ids), buffer(slots), buffer(rows), buffer(&weights)];
    let of = Choices { ids: &ids_, slots: &slots_, k };
    let (mut y, count) = (vec![f32::NAN; tokens * width], tokens * width);
    launch!("combine_forward", [count, 0], rows, ids, slots, &weights, k, width, &mut y, count);
    assert_bits("combine", &y, cpu.combine(&rows_, of, Some(&weights_), width).unwrap().as_slice().unwrap());
    launch!("combine_forward", [count, 0], rows, ids, slots, Null, k, width, &mut y, count);
    assert_bits("combine without weights", &y, cpu.combine(&rows_, of, None, width).unwrap().as_slice().unwrap());
    let (mut drows, mut dweights) = (vec![f32::NAN; total * width], vec![f32::NAN; ids.len()]);
    launch!("combine_backward_rows", [total * width, 0], &dout, order, &weights, k, width, &mut drows, total * width);
    launch!("combine_backward_weights", [ids.len(), width], &dout, rows, slots, k, &mut dweights, ids.len(), width);
    let (want_rows, want) = cpu.combine_grad(&buffer(&dout), &rows_, of, &buffer(order), &weights_, width).unwrap();
    assert_bits("gradient of rows", &drows, want_rows.as_slice().unwrap());
    assert_bits("gradient of weights", &dweights, want.as_slice().unwrap());
}

/// All experts at once, so that the tree over the ids has every shape; and rows longer than a block of a sum.
#[test]
fn combinations_of_many_experts_are_those_of_the_cpu() {
    for (k, width, step) in [(1, 1, 1), (7, 2, 1), (16, 3, 1), (19, 2, 3), (5, 3000, 13)] {
        let (ids, slots): (Vec<i32>, Vec<i32>) = (0..k as i32).map(|i| (i * step, (i * 5 + 2) % k as i32)).unzip();
        let (rows, weights) = (values("rows", k * width), values("weights", k));
        let mut y = vec![f32::NAN; width];
        if !launch!("combine_forward", [width, 0], &rows, &ids, &slots, &weights, k, width, &mut y, width) {
            return;
        }
        let (ids_, slots_) = (buffer(&ids), buffer(&slots));
        let of = Choices { ids: &ids_, slots: &slots_, k };
        let want = Cpu::default().combine(&buffer(&rows), of, Some(&buffer(&weights)), width).unwrap();
        assert_bits("combine", &y, want.as_slice().unwrap());
        let (dout, mut dweights) = (values("dout", width), vec![f32::NAN; k]);
        launch!("combine_backward_weights", [k, width], &dout, &rows, &slots, k, &mut dweights, k, width);
        let order = buffer(&vec![0_i32; k]);
        let (_, want) =
            Cpu::default().combine_grad(&buffer(&dout), &buffer(&rows), of, &order, &buffer(&weights), width).unwrap();
        assert_bits("gradient of weights", &dweights, want.as_slice().unwrap());
    }
}

#[test]
fn products_of_groups_are_those_of_the_cpu() {
    if level() < Level::Avx2 {
        eprintln!("left out: this CPU has no fused multiply-add, and other bits");
        return;
    }
    let cases = [
        (vec![3, 0, 17, 1], 5, 3, Terms::WHOLE),
        (vec![0, 20, 0], 33, 300, Terms::WHOLE),
        (vec![2, 9], 7, 24, Terms { segments: 2, blocks: 4 }),
    ];
    let precisions = [Precision::F32, Precision::Bf16];
    for ((rows, n, k, terms), precision) in cases.iter().flat_map(|case| precisions.map(|precision| (case, precision)))
    {
        let (rows, n, k, terms, cpu) = (rows.clone(), *n, *k, *terms, Cpu::new(precision));
        let (total, groups) = (rows.iter().sum::<usize>(), rows.len());
        let mut starts = vec![0_i64];
        rows.iter().for_each(|rows| starts.push(starts[starts.len() - 1] + *rows as i64));
        let (x, w, dy) = (values("x", total * k), values("w", groups * n * k), values("dy", total * n));
        let (spec, Terms { segments, blocks }) = (GroupedGemm { rows: &rows, n, k, terms }, terms);
        let (mut y, mut dx) = (vec![f32::NAN; total * n], vec![f32::NAN; total * k]);
        let (one, sizes) = (1_usize, [total * n, 0]);
        let (name, [x16, w16, dy16]) = (kernel("grouped_product", precision), [&x, &w, &dy].map(|x| rounded(x)));
        let of = |x, rounded| read(x, rounded, precision);
        #[rustfmt::skip]
        let there = launch!(
            &name, sizes, of(&x, &x16), of(&w, &w16), one, k, &starts, groups, &mut y, k, segments, blocks, total * n, n
        );
        if !there {
            return;
        }
        assert_bits("y", &y, cpu.grouped_linear(spec, &buffer(&x), &buffer(&w)).unwrap().as_slice().unwrap());
        #[rustfmt::skip]
        launch!(
            &name, [total * k, 0], of(&dy, &dy16), of(&w, &w16), k, one, &starts, groups, &mut dx, n, segments, blocks, total * k, k
        );
        let want = cpu.grouped_input_grad(spec, &buffer(&dy), &buffer(&w)).unwrap();
        assert_bits("dx", &dx, want.as_slice().unwrap());

        let bias = values("bias", groups * n);
        launch!("grouped_bias", sizes, &dy, &bias, &starts, groups, &mut y, total * n, n);
        let want = cpu.grouped_bias(&rows, &buffer(&dy), &buffer(&bias)).unwrap();
        assert_bits("bias", &y, want.as_slice().unwrap());
        gradients(&rows, [n, k], &x, &dy, precision);
    }
}

/// The kernel for operands of a precision.
fn kernel(name: &str, precision: Precision) -> String {
    format!("{name}_{}", if precision == Precision::F32 { "f32" } else { "bf16" })
}

/// Operands as products in bf16 read them.
fn rounded(x: &[f32]) -> Vec<half::bf16> {
    let mut rounded = vec![half::bf16::ZERO; x.len()];
    round(x, &mut rounded);
    rounded
}

/// Operands as those of a precision.
fn read<'a>(x: &'a Vec<f32>, rounded: &'a Vec<half::bf16>, precision: Precision) -> Given<'a> {
    if precision == Precision::F32 { Given::from(x) } else { Given::from(rounded) }
}

/// Gradients of the matrices and biases of groups, each of one block, and of blocks of any length, some of them empty.
fn gradients(rows: &[usize], [n, k]: [usize; 2], x: &Vec<f32>, dy: &Vec<f32>, precision: Precision) {
    let (cpu, groups, [x16, dy16]) = (Cpu::new(precision), rows.len(), [x, dy].map(|x| rounded(x)));
    let name = kernel("grouped_product_backward", precision);
    for (cuts, accumulate) in [(1, false), (1, true), (3, false)] {
        let mut first = 0;
        let blocks: Vec<Vec<Range<usize>>> = rows
            .iter()
            .map(|rows| {
                let bound = |cut: usize| first + rows * cut * cut / (cuts * cuts);
                let blocks = (0..cuts).map(|cut| bound(cut)..bound(cut + 1)).collect();
                first += rows;
                blocks
            })
            .collect();
        let (mut begins, mut bounds) = (vec![0_i64], vec![]);
        for blocks in &blocks {
            bounds.extend(blocks.iter().map(|block| block.start as i64).chain([blocks[cuts - 1].end as i64]));
            begins.push(bounds.len() as i64);
        }
        let (old, old_bias, add) = (values("dw", groups * n * k), values("db", groups * n), i32::from(accumulate));
        let (mut dw, mut db) = (old.clone(), old_bias.clone());
        let sizes = [dw.len(), 0];
        let count = dw.len();
        let of = |x, rounded| read(x, rounded, precision);
        launch!(&name, sizes, of(dy, &dy16), of(x, &x16), &begins, &bounds, &mut dw, add, n, k, count);
        launch!("grouped_bias_backward", [groups, n], dy, &begins, &bounds, &mut db, add, n);
        let (mut want, mut want_bias) = (buffer(&old), buffer(&old_bias));
        let spec = GroupedGemm { rows, n, k, terms: Terms::WHOLE };
        let grad = GroupedGrad { buffer: &mut want, start: 0, accumulate };
        cpu.grouped_weight_grad(spec, &blocks, &buffer(dy), &buffer(x), grad).unwrap();
        assert_bits("dw", &dw, want.as_slice().unwrap());
        let grad = GroupedGrad { buffer: &mut want_bias, start: 0, accumulate };
        cpu.grouped_bias_grad(&blocks, n, &buffer(dy), grad).unwrap();
        assert_bits("db", &db, want_bias.as_slice().unwrap());
    }
}

/// Rows of groups in tensor cores' products, and features: groups without rows, of one row, of a row more than a tile;
/// more tiles than a band has; more groups than a warp has lanes.
#[test]
pub fn products_of_groups_on_tensor_cores_are_near_those_of_the_cpu() {
    let many = (0..35).map(|group| usize::from(group % 11 == 0)).collect::<Vec<usize>>();
    let cases: [(&[usize], usize, usize); 6] = [
        (&[3, 0, 130, 1], 40, 72),
        (&[0, 129, 0], 264, 8),
        (&many, 8, 24),
        (&[67], 8, 264),
        (&[2], 1032, 264),
        (&[0, 0], 16, 24),
    ];
    for (rows, n, k) in cases {
        let (total, groups, what) = (rows.iter().sum::<usize>(), rows.len(), format!("{rows:?}, {n} of {k}"));
        let [x, w, dy] = [("x", total * k), ("w", groups * n * k), ("dy", total * n)]
            .map(|(name, count)| values(name, count).iter().map(|x| half::bf16::from_f32(*x)).collect::<Vec<_>>());
        let wide = |x: &[half::bf16]| buffer(&x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
        let mut starts = vec![0_i64];
        rows.iter().for_each(|rows| starts.push(starts[starts.len() - 1] + *rows as i64));
        let near = |name: &str, got: &[f32], want: &Buffer| {
            let want: &[f32] = want.as_slice().unwrap();
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let error = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
            assert!(error <= 1e-5 * norm(&mut want.iter().copied()), "{name} of {what}: {error:e}");
        };
        let (cpu, spec) = (Cpu::default(), GroupedGemm { rows, n, k, terms: Terms::WHOLE });
        let tiles = rows.iter().map(|rows| rows.div_ceil(GROUPED_ROWS as usize)).sum::<usize>();
        let (mut y, mut dx) = (vec![f32::NAN; total * n], vec![f32::NAN; total * k]);
        // More blocks than there are tiles: those behind the last have nothing to do.
        if !launch!("grouped_tensor_forward", [tiles + 1, n], &x, &w, &starts, groups, &mut y, n, k) {
            return;
        }
        near("y", &y, &cpu.grouped_linear(spec, &wide(&x), &wide(&w)).unwrap());
        launch!("grouped_tensor_backward_x", [tiles, k], &dy, &w, &starts, groups, &mut dx, n, k);
        near("dx", &dx, &cpu.grouped_input_grad(spec, &wide(&dy), &wide(&w)).unwrap());
        // In bf16 the same, rounded once.
        let rounded = |want: &[f32]| {
            let mut halves = vec![half::bf16::ZERO; want.len()];
            round(want, &mut halves);
            halves
        };
        let [mut y16, mut dx16] = [&y, &dx].map(|x| vec![half::bf16::NAN; x.len()]);
        launch!("grouped_tensor_forward_bf16", [tiles, n], &x, &w, &starts, groups, &mut y16, n, k);
        assert!(y16 == rounded(&y), "y of {what}");
        launch!("grouped_tensor_backward_x_bf16", [tiles, k], &dy, &w, &starts, groups, &mut dx16, n, k);
        assert!(dx16 == rounded(&dx), "dx of {what}");

        let blocks: Vec<_> =
            starts.windows(2).map(|ends| ends[0] as usize..ends[1] as usize).map(|block| vec![block]).collect();
        let bounds: Vec<i64> = starts.windows(2).flat_map(|ends| [ends[0], ends[1]]).collect();
        let first: Vec<i64> = (0..=groups).map(|group| 2 * group as i64).collect();
        for accumulate in [false, true] {
            let (mut dw, sizes) = (values("dw", groups * n * k), [groups * n.div_ceil(GROUPED_ROWS as usize), k]);
            let mut want = buffer(&dw);
            let add = i32::from(accumulate);
            launch!("grouped_tensor_backward_w", sizes, &dy, &x, &first, &bounds, &mut dw, add, n, k);
            let grad = GroupedGrad { buffer: &mut want, start: 0, accumulate };
            cpu.grouped_weight_grad(spec, &blocks, &wide(&dy), &wide(&x), grad).unwrap();
            near("dw", &dw, &want);
        }
    }
}
