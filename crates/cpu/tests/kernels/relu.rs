//! The ReLU, its marks and its gradient.

use meshwork_cpu::kernels::relu::*;

#[test]
fn below_zero_there_is_nothing_and_nan_is_not_hidden() {
    let x = [-2.0, -0.0, 0.0, 3.0, f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
    let (mut y, mut dx, mut above) = ([9.0; 7], [9.0; 7], [0xff]);
    relu(&x, &mut y, &mut above);
    assert_eq!(y.map(f32::to_bits), [0.0, 0.0, 0.0, 3.0, f32::NAN, 0.0, f32::INFINITY].map(f32::to_bits));
    assert_eq!(above, [0b100_1000]);
    relu_backward(&above, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &mut dx);
    assert_eq!(dx, [0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 7.0]);
}

#[test]
fn each_element_has_its_bit_at_any_length() {
    for length in 0..40_usize {
        let x: Vec<f32> = (0..length).map(|at| (at * 7 % 5) as f32 - 2.0).collect();
        let dy: Vec<f32> = (0..length).map(|at| at as f32 + 1.0).collect();
        let (mut y, mut dx, mut above) = (dy.clone(), dy.clone(), vec![9; length.div_ceil(PER_BYTE)]);
        relu(&x, &mut y, &mut above);
        relu_backward(&above, &dy, &mut dx);
        for at in 0..length {
            assert_eq!((y[at], dx[at]), (x[at].max(0.0), if x[at] > 0.0 { dy[at] } else { 0.0 }), "{at} of {length}");
        }
    }
}
