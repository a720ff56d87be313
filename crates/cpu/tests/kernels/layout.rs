//! Parts of a dim: taken out, and put among zeros.

use meshwork_core::{Buffer, DType};
use meshwork_cpu::Cpu;

#[test]
fn parts_of_a_dim_are_taken_out_and_put_among_zeros() {
    let cpu = Cpu::device();
    let layout = cpu.layout().unwrap();
    // Runs of one and two elements of each size, of none, and of more than a thread takes at once.
    for (outer, extent, inner) in [(70_000, 2, 1), (7, 5, 3), (2, 3, 40_000), (5, 4, 0), (0, 4, 2)] {
        for range in [0..1, 1..2, 0..2, 1..1, 0..extent] {
            let whole: Vec<f32> = (0..outer * extent * inner).map(|at| at as f32 + 1.0).collect();
            let is_in = |at: usize| range.contains(&(at / inner.max(1) % extent));
            let part: Vec<f32> = (0..whole.len()).filter(|&at| is_in(at)).map(|at| whole[at]).collect();
            let zeros: Vec<f32> = (0..whole.len()).map(|at| if is_in(at) { whole[at] } else { 0.0 }).collect();
            for dtype in [None, Some(DType::Bf16)] {
                let [x, wanted, widened] = [&whole, &part, &zeros].map(|values| {
                    let values = Buffer::from_slice(values);
                    dtype.map_or(values.clone(), |dtype| cpu.pointwise().unwrap().cast(&values, dtype).unwrap())
                });
                let narrow = layout.narrow(&x, outer, extent, inner, range.clone()).unwrap();
                let same = |got: &Buffer, wanted: &Buffer| got.as_bytes().unwrap() == wanted.as_bytes().unwrap();
                assert!(same(&narrow, &wanted), "{outer} {extent} {inner} {range:?}");
                let wide = layout.widen(&narrow, outer, extent, inner, range.clone()).unwrap();
                assert!(same(&wide, &widened), "{outer} {extent} {inner} {range:?}");
            }
        }
    }
}
