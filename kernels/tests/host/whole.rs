//! Update rules that read whole matrices, bit by bit against the CPU: their elements in runs, as of a parameter that is
//! cut, and what is measured.
//!
//! More than 400 lines: a rule of each kind, beside the CPU's.

use crate::{assert_bits, launch, values};
use meshwork_core::exact::{self, LIMBS};
use meshwork_optim::{Adafactor, Adam8bit, Lamb, Muon, ParamShape, PassTotals, Run, Update, WholeOptimizer};

/// Columns 2..7 of a matrix [6, 9], stored with a gap of 3 before it: its runs, and (element, place) of each number.
fn runs() -> (Vec<i64>, Vec<(usize, usize)>) {
    let (rows, width, pitch) = (6, 5, 9);
    let starts = (0..=rows).map(|row| row * width);
    let firsts = (0..rows).map(|row| row * pitch + 2);
    let places = (0..rows).map(|row| 3 + row * width);
    let numbers = (0..rows * width).map(|at| ((at / width * pitch + 2 + at % width) as usize, (3 + at) as usize));
    (starts.chain(firsts).chain(places).collect(), numbers.collect())
}

const SHAPE: ParamShape = ParamShape::matrix(6, 9);
const RUNS: usize = 6;
const COUNT: usize = 30;
const HELD: usize = COUNT + 3;

fn update() -> Update {
    Update { step: 3, lr: 1e-2, grad_scale: 0.7, decay_factor: 1.0 }
}

fn finish_pass<'a>(rule: &dyn WholeOptimizer, pass: usize, totals: &mut [&'a mut [f64]], sets: &mut [&'a mut [f32]]) {
    rule.finish_pass(PassTotals { pass, update: &update(), shape: &SHAPE, totals, sets }).unwrap();
}

/// What a rule measures of the numbers, each its own run, and what becomes of its states.
fn measured(
    rule: &dyn WholeOptimizer,
    pass: usize,
    (weights, grads): (&[f32], &[f32]),
    states: &mut [Vec<f32>],
    codes: &mut [Vec<u8>],
    (sets, totals): (&[&[f32]], &[&[f64]]),
) -> [Vec<f32>; 2] {
    let measures = rule.passes(&SHAPE).get(pass).map_or(1, |pass| pass.over().len());
    let mut all = [vec![], vec![]];
    for (first, at) in runs().1 {
        let mut states: Vec<&mut [f32]> = states.iter_mut().map(|state| &mut state[at..=at]).collect();
        let mut codes: Vec<&mut [u8]> = codes.iter_mut().map(|codes| &mut codes[at..=at]).collect();
        let (states, codes) = (&mut states[..], &mut codes[..]);
        let mut run = Run {
            update: update(),
            shape: SHAPE,
            first,
            grads: &grads[at..=at],
            states,
            codes,
            sets,
            totals,
            gathered: &[],
        };
        let (mut one, mut other) = ([0.0], [0.0]);
        let mut out: Vec<&mut [f32]> = vec![&mut one, &mut other];
        rule.measure(pass, &weights[at..=at], &mut run, &mut out[..measures]).unwrap();
        all[0].push(one[0]);
        all[1].push(other[0]);
    }
    all
}

#[test]
pub fn what_is_measured_is_summed_over_each_set() {
    let ((table, numbers), x) = (runs(), values("x", COUNT));
    // Of one matrix [6, 9], and of two [3, 9], whose sets do not go on from one into the other.
    for (length, rows, each, sets) in [
        (9_usize, 0_usize, 54_usize, 6_usize),
        (9, 6, 54, 9),
        (4, 0, 54, 14),
        (100, 0, 54, 1),
        (9, 0, 27, 6),
        (9, 3, 27, 18),
        (4, 0, 27, 14),
        (27, 0, 27, 2),
    ] {
        let set = |element: usize| {
            let (matrix, element) = (element / each, element % each);
            if rows > 0 {
                matrix * length + element % length
            } else {
                matrix * each.div_ceil(length) + element / length
            }
        };
        let of = |wanted: usize| {
            numbers.iter().zip(&x).filter(move |((element, _), _)| set(*element) == wanted).map(|(_, x)| *x)
        };
        let (mut sums, mut most, mut digits) = (vec![0.5; sets], vec![0.0; sets], vec![0.0; LIMBS * sets]);
        if !launch!("set_squares", [sets, 0], &x, &table, RUNS, length, rows, each, &mut sums, sets) {
            return;
        }
        launch!("set_largest", [sets, 0], &x, &table, RUNS, length, rows, each, &mut most, sets);
        launch!("set_squares_exact", [sets, 0], &x, &table, RUNS, length, rows, each, &mut digits, sets);
        let mut exact_sums = vec![f64::NAN; sets];
        launch!("exact_values", [sets, 0], &digits, &mut exact_sums, sets);
        for at in 0..sets {
            let mut whole = [0; LIMBS];
            of(at).for_each(|x| exact::add_square(&mut whole, x));
            let want = exact::value(&exact::carry(&mut whole));
            assert_eq!(
                (exact_sums[at].to_bits(), exact::value(&digits[at * LIMBS..][..LIMBS])),
                (want.to_bits(), want)
            );
            assert!((sums[at] - 0.5 - want).abs() <= 1e-14 * sums[at], "{} {want}", sums[at]);
            assert_eq!(most[at], of(at).fold(0.0, |most, x| f64::from(x.abs()).max(most)));
        }
    }
}

/// From the smallest to the largest digit, with bits that round the last one, and what is not finite.
#[test]
fn exact_sums_are_rounded_as_on_the_cpu() {
    let ends =
        [f32::from_bits(1), f32::from_bits(0x7f_ffff), 1e-20, 3e-10, 1.0, 1.0 + f32::EPSILON, 7e9, 3e19, f32::MAX];
    let mut digits: Vec<f64> = Vec::new();
    let mut add = |x: &[f32]| {
        let mut sum = [0; LIMBS];
        x.iter().for_each(|&x| exact::add_square(&mut sum, x));
        digits.extend(exact::carry(&mut sum));
    };
    add(&[]);
    add(&[1.0, f32::NEG_INFINITY]);
    for (at, end) in ends.into_iter().enumerate() {
        add(&[end]);
        add(&ends[..=at]);
        add(&[&vec![end; 1000 + at][..], &[end * 1e-8, end / 3e7]].concat());
    }
    let count = digits.len() / LIMBS;
    let mut sums = vec![-1.0_f64; count];
    if !launch!("exact_values", [count, 0], &digits, &mut sums, count) {
        return;
    }
    for (got, digits) in sums.iter().zip(digits.chunks(LIMBS)) {
        let want = exact::value(digits);
        assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{got:e} and {want:e}");
    }
    let (mut x, norm) = (values("x", 300), (5.0_f64.sqrt()) as f32);
    let want: Vec<f32> = x.iter().map(|x| x / norm).collect();
    launch!("divide_by_root", [300, 0], &mut x, &vec![5.0_f64], 1e-7, 300_usize);
    assert_bits("x by the root", &x, &want);
}

#[test]
fn lamb_is_that_of_the_cpu() {
    let (rule, table, factors) = (Lamb::default(), runs().0, Lamb::default().factors(&update()));
    let (w, g, scale) = (values("w", HELD), values("g", HELD), update().grad_scale);
    let mut states = [values("m", HELD), values("v", HELD).iter().map(|v| v.abs()).collect()];
    let ([mut m, mut v], mut steps) = (states.clone(), [vec![f32::NAN; COUNT], vec![f32::NAN; COUNT]]);
    let [of_w, of_u] = &mut steps;
    let meshwork_optim::LambFactors { mean_new, square_old, square_new, mean_hat, root_hat, eps, decay } = factors;
    #[rustfmt::skip]
    let there = launch!(
        "lamb_measure", [COUNT, 0], &table, RUNS, &w, &g, &mut m, &mut v, scale, mean_new, square_old, square_new, mean_hat, root_hat, eps,
        decay, of_w, of_u, COUNT
    );
    if !there {
        return;
    }
    let want = measured(&rule, 0, (&w, &g), &mut states, &mut [], (&[], &[]));
    assert_bits("weights", &steps[0], &want[0]);
    assert_bits("steps", &steps[1], &want[1]);
    assert_bits("means", &m, &states[0]);
    assert_bits("squares", &v, &states[1]);

    let mut totals = vec![3.0, 7.0];
    launch!("lamb_settle", [1, 0], &mut totals, 1_usize);
    let ratio = 3_f64.sqrt() / 7_f64.sqrt();
    assert_eq!(totals[0], ratio);
    let mut none = vec![3.0, 0.0];
    launch!("lamb_settle", [1, 0], &mut none, 1_usize);
    assert_eq!(none[0], 1.0);
    let mut two = vec![3.0, 5.0, 7.0, 0.0];
    launch!("lamb_settle", [2, 0], &mut two, 2_usize);
    assert_eq!(two[..2], [ratio, 1.0]);
    let (mut got, lr) = (w.clone(), update().lr);
    launch!(
        "lamb_update",
        [COUNT, 0],
        &table,
        RUNS,
        &mut got,
        &m,
        &v,
        &totals,
        SHAPE.each(),
        lr,
        mean_hat,
        root_hat,
        eps,
        decay,
        COUNT
    );
    let size = (lr * ratio) as f32;
    let mut expected = w.clone();
    runs().1.iter().zip(&want[1]).for_each(|((_, at), u)| expected[*at] -= size * u);
    assert_bits("updated weights", &got, &expected);
}

#[test]
fn adafactor_is_that_of_the_cpu() {
    for relative_step in [true, false] {
        let rule = Adafactor { relative_step, weight_decay: 0.1, ..Adafactor::default() };
        let ((table, numbers), scale) = (runs(), update().grad_scale);
        let (w, g) = (values("w", HELD), values("g", HELD));
        let mut scaled = vec![f32::NAN; COUNT];
        if !launch!("adafactor_scaled", [COUNT, 0], &table, RUNS, &g, scale, &mut scaled, COUNT) {
            return;
        }
        let want = measured(&rule, 0, (&w, &g), &mut [], &mut [], (&[], &[]));
        assert_bits("scaled gradients", &scaled, &want[0]);

        // Sums of squares become factors, and sets their running means.
        let positive = |name, count| values(name, count).iter().map(|x| f64::from(x.abs()) + 0.1).collect::<Vec<f64>>();
        let mut sums = [positive("rows", 6), positive("columns", 9)];
        let mut sets = sums.clone().map(|sums| sums.iter().map(|sum| *sum as f32 / 9.0).collect::<Vec<f32>>());
        let (mut got, mut got_sets) = (sums.clone(), sets.clone());
        {
            let [first, second] = &mut sums;
            let [rows, columns] = &mut sets;
            finish_pass(&rule, 0, &mut [&mut first[..], second], &mut [&mut rows[..], columns]);
        }
        let share = rule.new_share(&update());
        for (at, terms) in [(0, 9.0), (1, 6.0)] {
            let (count, totals) = (got[at].len(), &mut got[at]);
            launch!("adafactor_means", [count, 0], &mut got_sets[at], totals, terms, share, rule.eps, count);
        }
        let mut means = vec![0.0];
        launch!("adafactor_row_means", [1, 0], &got[0], 6_usize, &mut means, 1_usize);
        launch!("adafactor_row_factors", [6, 0], &mut got[0], &means, 6_usize, 6_usize);
        launch!("adafactor_column_factors", [9, 0], &mut got[1], 9_usize);
        assert_eq!((&got, &got_sets), (&sums, &sets));

        let (mut of_u, mut of_w) = (vec![f32::NAN; COUNT], vec![f32::NAN; COUNT]);
        let (rows, columns) = (SHAPE.rows, SHAPE.columns);
        let [by_row, by_column] = &sums;
        #[rustfmt::skip]
        launch!(
            "adafactor_measure", [COUNT, 0], &table, RUNS, &w, &g, scale, by_row, by_column, rows, columns, &mut of_u, &mut of_w, COUNT
        );
        let totals: [&[f64]; 2] = [by_row, by_column];
        let want = measured(&rule, 1, (&w, &g), &mut [], &mut [], (&[], &totals));
        assert_bits("steps", &of_u, &want[0]);
        assert_bits("weights", &of_w, &want[1]);

        let (mut first, mut second) = (vec![41.0], vec![2.0]);
        let mut settled = vec![41.0, 2.0];
        finish_pass(&rule, 1, &mut [&mut first[..], &mut second], &mut []);
        let (elements, lr) = (SHAPE.elements() as f64, rule.largest_step(&update()));
        let relative = i32::from(relative_step);
        launch!(
            "adafactor_settle",
            [1, 0],
            &mut settled,
            elements,
            relative,
            lr,
            rule.eps_scale,
            rule.clip_threshold,
            1_usize
        );
        assert_eq!(settled[0], first[0]);
        let (keep, size) = ((1.0 - update().lr * 0.1) as f32, first[0] as f32);
        let mut updated = w.clone();
        #[rustfmt::skip]
        launch!(
            "adafactor_update", [COUNT, 0], &table, RUNS, &mut updated, &g, scale, by_row, by_column, rows, columns, &first, keep, COUNT
        );
        let mut expected = w.clone();
        numbers.iter().zip(&want[0]).for_each(|((_, at), u)| expected[*at] = w[*at] * keep - size * u);
        assert_bits("updated weights", &updated, &expected);
    }
}

/// Of what is no matrix.
#[test]
fn adafactor_of_vectors_is_that_of_the_cpu() {
    let (rule, count) = (Adafactor::default(), 70);
    let shape = ParamShape::vector(count);
    let (w, g, scale) = (values("w", count), values("g", count), update().grad_scale);
    let mut variance: Vec<f32> = values("v", count).iter().map(|v| v.abs()).collect();
    let (mut got, table) = (variance.clone(), vec![0_i64, count as i64, 0, 0]);
    let (mut of_u, mut of_w) = (vec![f32::NAN; count], vec![f32::NAN; count]);
    let (share, eps) = (rule.new_share(&update()) as f32, rule.eps as f32);
    #[rustfmt::skip]
    let there = launch!(
        "adafactor_vector_measure", [count, 0], &table, 1_usize, &w, &g, &mut got, scale, share, eps, &mut of_u, &mut of_w, count
    );
    if !there {
        return;
    }
    let (mut want_u, mut want_w) = (vec![0.0; count], vec![0.0; count]);
    let states: &mut [&mut [f32]] = &mut [&mut variance[..]];
    let mut run = Run {
        update: update(),
        shape,
        first: 0,
        grads: &g,
        states,
        codes: &mut [],
        sets: &[],
        totals: &[],
        gathered: &[],
    };
    rule.measure(0, &w, &mut run, &mut [&mut want_u[..], &mut want_w]).unwrap();
    assert_bits("steps", &of_u, &want_u);
    assert_bits("weights", &of_w, &want_w);
    let (mut updated, size) = (w.clone(), vec![0.03_f64, 0.05]); // of two vectors
    launch!(
        "adafactor_vector_update",
        [count, 0],
        &table,
        1_usize,
        &mut updated,
        &g,
        &got,
        scale,
        &size,
        count / 2,
        0.9_f32,
        count
    );
    let of = |at: usize| size[2 * at / count] as f32;
    let expected: Vec<f32> = (0..count).map(|at| w[at] * 0.9 - of(at) * want_u[at]).collect();
    assert_bits("updated weights", &updated, &expected);
    assert_bits("variances", &got, &variance);
}

#[test]
fn muon_is_that_of_the_cpu() {
    let (rule, (table, numbers), scale) = (Muon::default(), runs(), update().grad_scale);
    let (w, g) = (values("w", HELD), values("g", HELD));
    let mut states = [values("m", HELD)];
    let (mut m, mut whole) = (states[0].clone(), vec![0.0; SHAPE.elements()]);
    let (old, now) = (rule.momentum as f32, (1.0 - rule.momentum) as f32);
    if !launch!("muon_measure", [COUNT, 0], &table, RUNS, &g, &mut m, scale, old, now, &mut whole, COUNT) {
        return;
    }
    let [want, _] = measured(&rule, 0, (&w, &g), &mut states, &mut [], (&[], &[]));
    let mut expected = vec![0.0; SHAPE.elements()];
    numbers.iter().zip(&want).for_each(|((element, _), u)| expected[*element] = *u);
    assert_bits("whole matrices", &whole, &expected);
    assert_bits("momentum", &m, &states[0]);
    let (keep, size, mut updated) = (0.99_f32, rule.size(&update(), &SHAPE), w.clone());
    launch!("muon_update", [COUNT, 0], &table, RUNS, &mut updated, &whole, keep, size, COUNT);
    let mut expected = w.clone();
    numbers.iter().for_each(|(element, at)| expected[*at] = w[*at] * keep - size * whole[*element]);
    assert_bits("updated weights", &updated, &expected);
}

#[test]
fn adam_of_8_bits_is_that_of_the_cpu() {
    let (rule, (table, numbers)) = (Adam8bit { block: 7, ..Adam8bit::default() }, runs());
    let (w, g, scale, blocks) = (values("w", HELD), values("g", HELD), update().grad_scale, 8);
    let of_codes = |salt: usize| (0..HELD).map(|at| (at * salt * 31 % 256) as u8).collect::<Vec<u8>>();
    let mut codes = [of_codes(3), of_codes(5)];
    // A block of zeros among them.
    let largest = |name| (0..blocks).zip(values(name, blocks)).map(|(at, x)| if at == 2 { 0.0 } else { x.abs() });
    let sets: [Vec<f32>; 2] = [largest("m").collect(), largest("v").collect()];
    let [means, squares] = Adam8bit::codes_of_moments();
    let code = [&means.values[..], &means.middles, &squares.values, &squares.middles].concat();
    let of = rule.adamw.factors(update());
    let (mut of_m, mut of_v) = (vec![f32::NAN; COUNT], vec![f32::NAN; COUNT]);
    #[rustfmt::skip]
    let there = launch!(
        "adam8bit_measure", [COUNT, 0], &table, RUNS, &g, &codes[0], &codes[1], &sets[0], &sets[1], &code, rule.block, SHAPE.each(), scale, of.mean_new,
        of.square_old, of.square_new, &mut of_m, &mut of_v, COUNT
    );
    if !there {
        return;
    }
    let want = measured(&rule, 0, (&w, &g), &mut [], &mut codes, (&[&sets[0], &sets[1]], &[]));
    assert_bits("means", &of_m, &want[0]);
    assert_bits("squares", &of_v, &want[1]);

    // New largest values, with a block of zeros; the old ones in the places of the totals.
    let mut totals = sets.clone().map(|set| set.iter().map(|x| f64::from(2.0 * x)).collect::<Vec<f64>>());
    let mut now = sets.clone();
    for (largest, totals) in now.iter_mut().zip(&mut totals) {
        launch!("adam8bit_settle", [blocks, 0], &mut *largest, &mut *totals, blocks);
        assert!(largest.iter().zip(totals.iter()).all(|(now, before)| f64::from(*now) == 2.0 * before));
    }
    let (mut updated, mut got) = (w.clone(), codes.clone());
    let [got_m, got_v] = &mut got;
    let zeros = [means.zero, squares.zero].map(i32::from);
    #[rustfmt::skip]
    launch!(
        "adam8bit_update", [COUNT, 0], &table, RUNS, &mut updated, &g, got_m, got_v, &now[0], &now[1], &totals[0], &totals[1], &code, zeros[0],
        zeros[1], rule.block, SHAPE.each(), scale, of.mean_new, of.square_old, of.square_new, of.keep, of.lr_hat, of.root_hat, of.eps, COUNT
    );
    let mut expected = w.clone();
    for (first, at) in numbers {
        let [m, v] = &mut codes;
        let codes: &mut [&mut [u8]] = &mut [&mut m[at..=at], &mut v[at..=at]];
        let (sets, totals): ([&[f32]; 2], [&[f64]; 2]) = ([&now[0], &now[1]], [&totals[0], &totals[1]]);
        let (grads, states) = (&g[at..=at], &mut [][..]);
        let mut run = Run {
            update: update(),
            shape: SHAPE,
            first,
            grads,
            states,
            codes,
            sets: &sets,
            totals: &totals,
            gathered: &[],
        };
        rule.update(&mut expected[at..=at], &mut run).unwrap();
    }
    assert_bits("updated weights", &updated, &expected);
    assert_eq!(got, codes);
}
