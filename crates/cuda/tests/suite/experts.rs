//! Operations of mixtures of experts against the CPU's. On the emulator here, and on a GPU or its stand-in in
//! `tests/gpu`.

use crate::ops::{devices, devices_of, numbers, same, values};
use meshwork_core::{Buffer, DType};
use meshwork_cuda::device::Products;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::*;
use meshwork_tensor::random::key;
use meshwork_tensor::tape::Terms;
use meshwork_tensor::{Device, MAX_DIMS};
use std::ops::Range;

fn scores(count: usize) -> Buffer {
    let mut scores = values("scores", count);
    scores.as_mut_slice::<f32>().unwrap().iter_mut().for_each(|x| *x = x.abs() + 0.01);
    scores
}

#[test]
fn routers_have_the_cpus_bits() {
    let (samples, each, experts, k) = (3, 37, 12, 2);
    let all = Selection {
        samples,
        experts,
        k,
        groups: 1,
        top_groups: 1,
        group_best: 1,
        capacity: None,
        overflow: Overflow::Drop,
        second: None,
    };
    let (second, tokens) = (Some(Draw { key: key(5, "second"), first: 77 }), samples * each);
    let (x, bias, dw) = (scores(tokens * experts), values("bias", experts), values("dw", tokens * k));
    for of in [
        all,
        Selection { capacity: Some(5), second, ..all },
        Selection { groups: 4, top_groups: 2, group_best: 2, ..all },
        Selection { groups: 3, top_groups: 2, capacity: Some(6), overflow: Overflow::Reroute, ..all },
    ] {
        same("select", |device, up| {
            let (routing, x, bias) = (device.routing()?, up(&x), up(&bias));
            let pick = Pick { experts, k, normalise: true, scale: 2.5 };
            let Selected { chosen, routed, kept, weights } = routing.select(&x, Some(&bias), &of, pick)?;
            let weights_of_kept = routing.pick(&x, Some(&kept), pick)?;
            let dx = routing.pick_grad(&x, Some(&kept), &up(&dw), pick)?;
            let [unused, loads] = [routing.unused(&kept, samples)?, routing.loads(&routed, experts)?];
            let alone = routing.select(&x, None, &of, Pick { normalise: false, ..pick })?;
            Ok(vec![chosen, routed, kept, weights, weights_of_kept, dx, unused, loads, alone.chosen, alone.weights])
        });
    }
    let mut mask = DropoutMask {
        p: 0.01,
        key: key(3, "jitter"),
        ndim: 1,
        local: [0; MAX_DIMS],
        offset: [0; MAX_DIMS],
        global: [0; MAX_DIMS],
    };
    (mask.local[0], mask.offset[0], mask.global[0]) = (tokens * experts, 5, 1 << 20);
    let dout = Buffer::from_vec(vec![0.3_f64, -1.1, 2.0]);
    same("losses of routers", |device, up| {
        let (routing, x, dout) = (device.routing()?, up(&x), up(&dout));
        let kept = routing.select_tokens(&x, samples, experts, 9)?;
        let counts = device.permutation()?.counts(&kept, samples, 0..experts)?;
        let shared = device.permutation()?.counts(&kept, 1, 0..experts)?;
        Ok(vec![
            routing.pick(&x, None, Pick { experts, k: experts, normalise: false, scale: 0.5 })?,
            routing.balance(&x, &counts, samples, experts, 0.3)?,
            routing.balance(&x, &shared, samples, experts, 0.3)?,
            routing.balance_grad(&dout, &counts, [tokens, experts], 0.3, DType::F32)?,
            routing.balance_grad(&dout, &shared, [tokens, experts], 0.3, DType::F32)?,
            routing.z_loss(&x, samples, experts)?,
            routing.z_loss_grad(&x, &dout, experts)?,
            routing.entropy(&x, samples, experts)?,
            routing.jitter(&x, &mask)?,
            kept,
            counts,
        ])
    });
}

#[test]
fn permutations_have_the_cpus_bits() {
    let (samples, each, k, experts, width) = (2, 41, 3, 9, 7);
    let tokens = samples * each;
    let choice = |i: usize| if i % 7 == 2 { -1 } else { (i % k * 3 + i / k % 3) as i32 };
    let ids = Buffer::from_vec((0..tokens * k).map(choice).collect::<Vec<i32>>());
    let total = numbers::<i32>(&ids).iter().filter(|id| **id >= 0).count();
    let (x, weights, dout) = (values("x", tokens * width), values("w", tokens * k), values("dout", tokens * width));
    same("permutations", |device, up| {
        let (of, ids, x, weights) = (device.permutation()?, up(&ids), up(&x), up(&weights));
        let (order, slots) = of.sort(&ids, 0..experts, total)?;
        let inverse = of.invert(&order, tokens * k)?;
        let rows = of.gather(&x, &order, k, width)?;
        let choices = Choices { ids: &ids, slots: &slots, k };
        let (drows, dweights) = of.combine_grad(&up(&dout), &rows, choices, &order, &weights, width)?;
        let rounded = device.pointwise()?.cast(&x, DType::Bf16)?;
        Ok(vec![
            of.combine(&rows, choices, Some(&weights), width)?,
            of.combine(&rows, choices, None, width)?,
            of.gather(&order, &order.slice(3..4)?, k, 1)?,
            of.gather(&rounded, &order, k, width)?,
            of.group_ids(&ids, k, 3, true)?,
            of.group_ids(&ids, k, 3, false)?,
            of.sort(&ids, 4..4, 0)?.1,
            drows,
            dweights,
            order,
            slots,
            inverse,
        ])
    });
}

/// More choices than one part has: of samples that are a part each, of samples of several, and of all together.
#[test]
fn many_choices_have_the_cpus_bits() {
    let (samples, each, experts) = (3, 5000, 70);
    let ids: Vec<i32> = (0..samples * each).map(|i| ((i * i / 7 + i * 13) % (experts + 1)) as i32 - 1).collect();
    let held: usize = ids.iter().filter(|id| (10..experts as i32).contains(*id)).count();
    let ids = Buffer::from_vec(ids);
    same("many choices", |device, up| {
        let (of, ids) = (device.permutation()?, up(&ids));
        let (order, slots) = of.sort(&ids, 10..experts, held)?;
        let counts = [1, samples, 30 * samples].map(|samples| of.counts(&ids, samples, 3..experts));
        let [all, some, many] = counts;
        Ok(vec![order, slots, all?, some?, many?, device.routing()?.loads(&ids, experts)?])
    });
}

/// A kernel finds it; the host hears of it when it next waits.
#[test]
fn choices_that_are_not_as_many_as_was_counted_are_an_error() {
    let Some([device, _]) = devices(Products::OfTheCpu) else { return };
    let ids = device.upload(&Buffer::from_vec(vec![0_i32, 1, 1, -1])).unwrap();
    let (order, _) = device.permutation().unwrap().sort(&ids, 0..2, 4).unwrap();
    let error = device.download(&order).unwrap_err().to_string();
    assert_eq!(error, "sort: the choices of some ids are not as many as was counted");
}

/// Blocks of the rows of groups, some of them empty.
fn blocks(rows: &[usize], cuts: usize) -> Vec<Vec<Range<usize>>> {
    let mut first = 0;
    let of = |rows: &usize| {
        let bound = |cut: usize| first + rows * cut / cuts;
        let blocks = (0..cuts).map(|cut| bound(cut)..bound(cut + 1)).collect();
        first += rows;
        blocks
    };
    rows.iter().map(of).collect()
}

/// Products of groups, forward and backward: (y, activated, dx, dw, dw added to what was there).
fn products(
    device: &dyn Device,
    up: &dyn Fn(&Buffer) -> Buffer,
    terms: Terms,
    (n, start): (usize, usize),
) -> meshwork_tensor::Result<Vec<Buffer>> {
    let (rows, k) = ([3, 0, 17, 1], 40);
    let total: usize = rows.iter().sum();
    let (of, spec) = (device.grouped_matmul()?, GroupedGemm { rows: &rows, n, k, terms });
    let [x, w, dy] =
        [("x", total * k), ("w", 4 * n * k), ("dy", total * n)].map(|(name, count)| up(&values(name, count)));
    let [mut dw, mut added] = [(); 2].map(|()| up(&values("dw", start + 4 * n * k)));
    let cut = if terms == Terms::WHOLE { 1 } else { 3 };
    let grad = GroupedGrad { buffer: &mut dw, start, accumulate: false };
    of.grouped_weight_grad(spec, &blocks(&rows, cut), &dy, &x, grad)?;
    let grad = GroupedGrad { buffer: &mut added, start, accumulate: true };
    of.grouped_weight_grad(spec, &blocks(&rows, 1), &dy, &x, grad)?;
    let (y, activated) = of.grouped_linear_swiglu(GroupedGemm { terms: Terms::WHOLE, ..spec }, &x, &w, DType::F32)?;
    Ok(vec![of.grouped_linear(spec, &x, &w)?, y, activated, of.grouped_input_grad(spec, &dy, &w)?, dw, added])
}

#[test]
fn products_of_groups_have_the_cpus_bits() {
    use meshwork_core::simd::{Level, level};
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    for terms in [Terms::WHOLE, Terms { segments: 1, blocks: 2 }] {
        same("products of groups", |device, up| products(device, up, terms, (6, 1)));
    }
    let rows = [3, 0, 17, 1];
    same("biases of groups", |device, up| {
        let (of, dy) = (device.grouped_matmul()?, up(&values("dy", 21 * 5)));
        let [mut db, mut added] = [(); 2].map(|()| up(&values("db", 2 + 4 * 5)));
        of.grouped_bias_grad(&blocks(&rows, 3), 5, &dy, GroupedGrad { buffer: &mut db, start: 2, accumulate: false })?;
        of.grouped_bias_grad(
            &blocks(&rows, 1),
            5,
            &dy,
            GroupedGrad { buffer: &mut added, start: 2, accumulate: true },
        )?;
        Ok(vec![of.grouped_bias(&rows, &dy, &up(&values("bias", 20)))?, db, added])
    });
}

/// In f32 and TF32; and in bf16 on the operands rounded, by the kernels for tensor cores, and where these do not take
/// the features or the place of a result.
#[test]
fn products_of_groups_of_the_library_are_near_the_cpus() {
    let of_bf16 = [(8, 2), (6, 2), (8, 1)].map(|sizes| (Precision::Bf16, sizes));
    for (precision, sizes) in [(Precision::F32, (6, 1)), (Precision::Tf32, (6, 1))].into_iter().chain(of_bf16) {
        let Some(devices) = devices_of(Products::OfTheLibrary, precision) else { return };
        let [got, want] = devices.map(|device| {
            let up = |host: &Buffer| device.upload(host).unwrap();
            let results = products(&*device, &up, Terms::WHOLE, sizes).unwrap();
            results.iter().map(|result| numbers::<f32>(&device.download(result).unwrap())).collect::<Vec<_>>()
        });
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let error = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
            assert!(error <= 1e-5 * norm(&mut want.iter().copied()), "result {i} of {sizes:?}: {error:e}");
            // Short sums of products of few bits may have the same bits.
            let another = precision != Precision::F32 || error > 0.0;
            assert!(another, "result {i} of {sizes:?} has another order of sums");
        }
    }
}
