//! Patches and pools, bit by bit against the CPU.

use crate::launch::{Given, launch};
use crate::{assert_bits, values};
use meshwork_cpu::kernels::windows as cpu;
use meshwork_tensor::kernel::Windows;

/// Launches a kernel for `count` elements: its buffers, then the count and the extents.
fn run(kernel: &str, w: Windows, count: usize, buffers: Vec<Given<'_>>) -> bool {
    let ([rows, columns], [height, width], [down, across]) = (w.count(), w.image, w.kernel);
    let sizes = [count, height, width, w.channels, rows, columns, down, across, w.stride, w.padding];
    launch(kernel, [count, 0], buffers.into_iter().chain(sizes.map(Given::from)).collect())
}

#[test]
fn patches_and_pools_are_those_of_the_cpu() {
    let of = |samples, image, channels, kernel, stride, padding| Windows {
        samples,
        image,
        channels,
        kernel,
        stride,
        padding,
    };
    for w in [
        of(2, [7, 5], 3, [3, 3], 1, 1),
        of(3, [9, 8], 5, [3, 2], 2, 1),
        of(2, [5, 4], 2, [1, 2], 3, 0),
        of(1, [4, 4], 1, [4, 4], 1, 3),
    ] {
        let (pixels, pooled, patches) = (w.samples * w.pixels(), w.rows() * w.channels, w.rows() * w.patch());
        let mut x = values("x", pixels);
        x[..4].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, 5.0, 5.0]);
        let (dy, dpatches) = (values("dy", pooled), values("d", patches));
        let (mut got, mut want) = (vec![f32::NAN; patches], vec![0.0; patches]);
        if !run("patches_forward", w, patches, vec![(&x).into(), (&mut got).into()]) {
            return;
        }
        cpu::patches(&w, &x, &mut want);
        assert_bits("patches", &got, &want);
        let (mut dx, mut want_dx) = (vec![f32::NAN; pixels], vec![0.0; pixels]);
        run("patches_backward", w, pixels, vec![(&dpatches).into(), (&mut dx).into()]);
        cpu::patches_backward(&w, &dpatches, &mut want_dx);
        assert_bits("gradient of patches", &dx, &want_dx);

        let (mut got, mut want) = (vec![f32::NAN; pooled], vec![0.0; pooled]);
        run("average_pool_forward", w, pooled, vec![(&x).into(), (&mut got).into()]);
        cpu::average_pool(&w, &x, &mut want);
        assert_bits("average pool", &got, &want);
        run("average_pool_backward", w, pixels, vec![(&dy).into(), (&mut dx).into()]);
        cpu::average_pool_backward(&w, &dy, &mut want_dx);
        assert_bits("gradient of the average pool", &dx, &want_dx);

        let (mut bytes, mut want_bytes) = (vec![99_u8; pooled], vec![98_u8; pooled]);
        let (mut places, mut want_places) = (vec![99_i32; pooled], vec![98_i32; pooled]);
        run("max_pool_forward_u8", w, pooled, vec![(&x).into(), (&mut got).into(), (&mut bytes).into()]);
        cpu::max_pool(&w, &x, &mut want, &mut want_bytes);
        assert_bits("max pool", &got, &want);
        run("max_pool_forward_i32", w, pooled, vec![(&x).into(), (&mut got).into(), (&mut places).into()]);
        cpu::max_pool(&w, &x, &mut want, &mut want_places);
        assert_bits("max pool with wide places", &got, &want);
        assert_eq!((&bytes, &places), (&want_bytes, &want_places), "places of {w:?}");
        cpu::max_pool_backward(&w, &dy, &bytes, &mut want_dx);
        run("max_pool_backward_u8", w, pixels, vec![(&dy).into(), (&bytes).into(), (&mut dx).into()]);
        assert_bits("gradient of the max pool", &dx, &want_dx);
        run("max_pool_backward_i32", w, pixels, vec![(&dy).into(), (&places).into(), (&mut dx).into()]);
        assert_bits("gradient of the max pool with wide places", &dx, &want_dx);
    }
}
