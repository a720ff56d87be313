//! Marks of what is not zero.

use meshwork_cpu::kernels::relu::PER_BYTE;
use meshwork_cpu::kernels::zeros::*;

#[test]
fn any_length_comes_back_bit_by_bit() {
    let patterns = [0.0_f32, -0.0, 1.5, f32::NAN, 0.0, f32::INFINITY, 0.0, 1e-45, 0.0].map(f32::to_bits);
    for length in 0..40_usize {
        let x: Vec<u32> = (0..length).map(|at| patterns[at * 5 % patterns.len()]).collect();
        let mut bits = vec![0xff; length.div_ceil(PER_BYTE)];
        let count = mark(&x, &mut bits);
        assert_eq!(count, x.iter().filter(|&&x| x != 0).count());
        assert_eq!(set(&bits), count);
        let (mut values, mut back) = (vec![7; count], vec![7; length]);
        gather(&x, &mut values);
        scatter(&bits, &values, &mut back);
        assert_eq!(back, x, "{length} elements");
    }
}
