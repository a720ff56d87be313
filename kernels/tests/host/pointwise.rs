//! Sums, biases and activations, bit by bit against the CPU; casts against `half`.

use crate::launch::{At, AtMut, Element, Given, Null, try_launch};
use crate::{assert_bits, build, launch, values};
use half::{bf16, f16};
use meshwork_cpu::kernels::round::{Stored, round};
use meshwork_cpu::kernels::{gelu, pointwise, swiglu};
use meshwork_kernels::{Arg, Geometry, HEADERS, Kernel, Pass, Source, THREADS, Type};
use meshwork_tensor::kernel::tf32;

/// Ordinary values and the ends of the range, NaN last.
fn awkward(name: &str, count: usize) -> Vec<f32> {
    let mut x: Vec<f32> = values(name, count).iter().map(|x| 4.0 * x).collect();
    let ends = [0.0, -0.0, 29.9, -31.0, 1e-40, -1e-30, 1e20, -1e20, 3e38, f32::INFINITY, f32::NEG_INFINITY];
    x.iter_mut().zip(ends).for_each(|(x, end)| *x = end);
    x
}

#[test]
fn sums_and_biases_are_those_of_the_cpu() {
    for [rows, n] in [[1, 1], [7, 33], [3, 1001]] {
        let count = rows * n;
        let (x, y, bias) = (values("x", count), values("y", count), values("bias", n));
        let (mut got, mut want) = (vec![f32::NAN; count], vec![0.0; count]);
        if !launch!("add", [count, 0], &x, &y, &mut got, count) {
            return;
        }
        pointwise::add(&x, &y, &mut want);
        assert_bits("add", &got, &want);
        launch!("add_assign", [count, 0], &mut got, &x, count);
        pointwise::add_assign(&mut want, &x);
        assert_bits("add_assign", &got, &want);
        let [mut a, b] = [&x, &y].map(|x| x.iter().map(|&x| f64::from(x) / 3.0).collect::<Vec<f64>>());
        let sums: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        launch!("add_assign_f64", [count, 0], &mut a, &b, count);
        assert_eq!(a, sums, "sums in f64");
        launch!("bias", [count, 0], &x, &bias, &mut got, count, n);
        pointwise::bias(&x, &bias, &mut want);
        assert_bits("bias", &got, &want);
        launch!("bias_residual", [count, 0], &x, &bias, &y, &mut got, count, n);
        pointwise::bias_residual(&x, &bias, &y, &mut want);
        assert_bits("bias_residual", &got, &want);
    }
}

#[test]
fn activations_are_those_of_the_cpu() {
    for [rows, n] in [[1, 14], [7, 33], [3, 1001]] {
        let count = rows * n;
        let (x, dy, bias) = (awkward("x", count), values("dy", count), values("bias", n));
        let (mut got, mut want) = (vec![f32::NAN; count], vec![0.0; count]);
        if !launch!("gelu_forward_f32", [count, 0], &x, &bias, &mut got, count, n) {
            return;
        }
        gelu::bias_gelu(&x, &bias, Stored::Full(&mut want));
        assert_bits("bias and gelu", &got, &want);
        let (mut rounded, mut want_rounded) = (vec![bf16::ONE; count], vec![bf16::ZERO; count]);
        launch!("gelu_forward_bf16", [count, 0], &x, &bias, &mut rounded, count, n);
        round(&want, &mut want_rounded);
        assert!(rounded.iter().zip(&want_rounded).all(|(a, b)| a.to_bits() == b.to_bits()), "rounded bias and gelu");
        launch!("gelu_forward_f32", [count, 0], &x, Null, &mut got, count, n);
        gelu::gelu(&x, &mut want);
        assert_bits("gelu", &got, &want);
        let (mut dx, mut want_dx) = (dy.clone(), dy.clone());
        launch!("gelu_backward", [count, 0], &x, &bias, &mut dx, count, n);
        gelu::bias_gelu_backward(&x, &bias, &mut want_dx, &mut vec![0.0; n]);
        assert_bits("gradient of bias and gelu", &dx, &want_dx);

        let (pairs, dy) = (awkward("pairs", 2 * count), values("dy", count));
        launch!("swiglu_forward_f32", [count, 0], &pairs, &mut got, count);
        swiglu::swiglu(&pairs, Stored::Full(&mut want));
        assert_bits("swiglu", &got, &want);
        launch!("swiglu_forward_bf16", [count, 0], &pairs, &mut rounded, count);
        round(&want, &mut want_rounded);
        assert!(rounded.iter().zip(&want_rounded).all(|(a, b)| a.to_bits() == b.to_bits()), "rounded swiglu");
        let (mut dx, mut want_dx) = (pairs.clone(), pairs);
        launch!("swiglu_backward", [count, 0], &dy, &mut dx, count);
        swiglu::swiglu_backward(&dy, &mut want_dx);
        assert_bits("gradient of swiglu", &dx, &want_dx);
    }
}

/// Vectors that begin at no multiple of 16 bytes, and lengths that are none of a thread's.
#[test]
fn slices_may_begin_anywhere() {
    let (x, y) = (values("x", 40), values("y", 40));
    let wholes: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    for (at, to) in [(0, 1), (1, 0), (2, 3), (3, 3), (4, 8), (5, 5)] {
        for count in [1, 3, 4, 8, 11, 29] {
            let mut sums = vec![9.0_f32; 40];
            if !launch!("add", [count, 0], At(&x, at), At(&y, to), AtMut(&mut sums, to), count) {
                return;
            }
            let want: Vec<f32> = (0..count).map(|i| x[at + i] + y[to + i]).collect();
            assert_bits("add", &sums[to..to + count], &want);
            assert!(sums[..to].iter().chain(&sums[to + count..]).all(|&around| around == 9.0), "{at} {to} {count}");
            let mut halves = vec![bf16::NAN; 40];
            launch!("f32_to_bf16", [count, 0], At(&x, at), AtMut(&mut halves, to), count);
            assert_eq!(halves[to..to + count], wholes[at..at + count], "{at} {to} {count}");
            assert!(
                halves[..to].iter().chain(&halves[to + count..]).all(|around| around.is_nan()),
                "{at} {to} {count}"
            );
            let mut back = vec![9.0_f32; 40];
            launch!("bf16_to_f32", [count, 0], At(&wholes, at), AtMut(&mut back, to), count);
            assert!((0..count).all(|i| back[to + i] == wholes[at + i].to_f32()), "{at} {to} {count}");
        }
    }
}

/// Every f16 and bf16 and, around each, the f32s where rounding decides.
#[test]
fn casts_are_those_of_half() {
    let near = |x: f32| [x.to_bits().wrapping_sub(1), x.to_bits(), x.to_bits().wrapping_add(1)].map(f32::from_bits);
    let all =
        (0..=u16::MAX).step_by(7).chain([0x7c00, 0x7c01, 0x7bff, 0x7f80, 0x7f81, 0x7f7f, 1, 0x3ff, 0x400, 0x8001]);
    let mut from: Vec<f32> = Vec::new();
    for bits in all.clone() {
        let [f, g] = [f16::from_bits(bits), f16::from_bits(bits ^ 1)].map(f16::to_f32);
        from.extend(near(f).into_iter().chain(near((f + g) / 2.0)));
        let b = bf16::from_bits(bits).to_f32();
        from.extend(near(b).into_iter().chain(near(f32::from_bits(b.to_bits() | 0x8000))));
    }
    from.extend([65_519.996, 65_520.0, 2_f32.powi(-25), 2_f32.powi(-25) * 1.000_001, 1e-40, -1e-40]);
    let count = from.len();
    let (mut b, mut f, mut operand) = (vec![bf16::ONE; count], vec![f16::ONE; count], vec![bf16::ONE; count]);
    if !launch!("f32_to_bf16", [count, 0], &from, &mut b, count) {
        return;
    }
    launch!("f32_to_f16", [count, 0], &from, &mut f, count);
    launch!("f32_to_operand", [count, 0], &from, &mut operand, count);
    from.extend(from.clone().iter().flat_map(|x: &f32| near(f32::from_bits(x.to_bits() | 0x1000))));
    let mut of_tf32 = vec![0.0_f32; from.len()];
    launch!("f32_to_tf32", [from.len(), 0], &from, &mut of_tf32, from.len());
    for (x, got) in from.iter().zip(&of_tf32) {
        assert_eq!(got.to_bits(), tf32(*x).to_bits(), "TF32 of {x:e}");
    }
    from.truncate(count);
    let mut want_operand = vec![bf16::ZERO; count];
    round(&from, &mut want_operand);
    for (i, &x) in from.iter().enumerate() {
        assert_eq!(b[i].to_bits(), bf16::from_f32(x).to_bits(), "bf16 of {x:e}");
        assert_eq!(f[i].to_bits(), f16::from_f32(x).to_bits(), "f16 of {x:e}");
        assert_eq!(operand[i].to_bits(), want_operand[i].to_bits(), "operand of {x:e}");
    }
    let (halves, wholes): (Vec<f16>, Vec<bf16>) = all.map(|bits| (f16::from_bits(bits), bf16::from_bits(bits))).unzip();
    let count = halves.len();
    let (mut from_half, mut from_whole) = (vec![0.0_f32; count], vec![0.0_f32; count]);
    launch!("f16_to_f32", [count, 0], &halves, &mut from_half, count);
    launch!("bf16_to_f32", [count, 0], &wholes, &mut from_whole, count);
    assert_bits("f16", &from_half, &halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
    assert_bits("bf16", &from_whole, &wholes.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
}

/// Rows at any distance and place, of elements of each size: where 16 bytes at a time fit, and where they do not; what
/// lies between rows stays.
#[test]
fn rows_are_copied_whatever_their_distance() {
    fn rows<T: Element + PartialEq + std::fmt::Debug>(kernel: &str, element: impl Fn(usize) -> T) -> bool {
        let from: Vec<T> = (0..700).map(element).collect();
        for [first, from_row, to_row, rows, n] in [
            [0, 64, 32, 5, 32],
            [1, 33, 40, 7, 17],
            [16, 48, 17, 9, 16],
            [3, 0, 20, 4, 19],
            [0, 5, 7, 90, 5],
            [0, 400, 400, 1, 300],
        ] {
            let mut to = vec![from[0]; rows * to_row + 1];
            let mut want = to.clone();
            (0..rows * n).for_each(|at| want[1 + at / n * to_row + at % n] = from[first + at / n * from_row + at % n]);
            if !launch!(kernel, [rows, n], At(&from, first), from_row, AtMut(&mut to, 1), to_row, rows, n) {
                return false;
            }
            assert_eq!(to, want, "{kernel}: {rows} rows of {n} from {first}, {from_row} and {to_row} apart");
        }
        true
    }
    _ = rows("copy_rows_8", |at| at as u8)
        && rows("copy_rows_16", |at| bf16::from_bits(at as u16))
        && rows("copy_rows_32", |at| at as u32);
}

/// Reciprocals of all numbers from 1 to 2, and of some beyond, from starts that are a unit in the last place off.
#[test]
fn reciprocals_are_rounded_to_nearest() {
    static SOURCE: Source = Source {
        name: "reciprocals.cu",
        text: r#"
#include "math.cuh"

KERNEL wrong_reciprocals(float* wrong, i64 count) {
    float found = 0.0f;
    for (i64 i = global_thread(); i < count; i += THREADS) {
        float x = __uint_as_float(0x3f800000u + static_cast<u32>(i)), y = 1.0f / x;
        for (int off = -1; off <= 1; off++) {
            float near = __uint_as_float(__float_as_uint(y) + static_cast<u32>(off));
            if (reciprocal_from(near, x) != y) found += 1.0f;
        }
    }
    wrong[threadIdx.x] = found;
}
"#,
    };
    static KERNEL: Kernel = Kernel {
        name: "wrong_reciprocals",
        source: &SOURCE,
        geometry: Geometry::Tiles { rows: 1 },
        args: &[
            Arg { name: "wrong", pass: Pass::Out, of: Type::F32 },
            Arg { name: "count", pass: Pass::Value, of: Type::I64 },
        ],
    };
    let files: Vec<_> = HEADERS.iter().copied().chain([&SOURCE]).map(|file| (file.name, file.text)).collect();
    let Some(library) = build::compile(&files, std::slice::from_ref(&KERNEL)) else { return };
    let mut wrong = vec![f32::NAN; THREADS as usize];
    let given = vec![Given::from(&mut wrong), Given::from((1_usize << 23) + 4)];
    try_launch(&library, &KERNEL, [1, 1], given).unwrap();
    assert!(wrong.iter().all(|&count| count == 0.0), "{} reciprocals", wrong.iter().sum::<f32>());
}
