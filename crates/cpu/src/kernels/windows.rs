//! Patches of images and pooling, image after image, channels last.
//!
//! A window's rows are runs of `kernel width · channels` elements, contiguous in the image and in its patch; elements
//! beyond the edges are cut off a run, and zero in the patch. Sums into a pixel run over the windows that contain it,
//! row by row: the order depends only on the windows' extents.

use super::prelude::*;
use meshwork_tensor::kernel::Windows;

/// One row of a window that overlaps the image.
struct Run {
    /// Elements of the patch.
    patch: Range<usize>,
    /// Elements of the image.
    pixels: Range<usize>,
}

/// The rows of one window: the `wi`-th down and `wj`-th across.
fn runs(windows: &Windows, wi: usize, wj: usize) -> impl Iterator<Item = Run> {
    let Windows { image: [height, width], channels, kernel: [down, across], stride, padding, .. } = *windows;
    // In padded coordinates the image begins at `padding`.
    let inside = move |first: usize, extent: usize, kernel: usize| {
        let (from, to) = (first.max(padding), (first + kernel).min(padding + extent));
        (from, to.max(from))
    };
    let (top, bottom) = inside(wi * stride, height, down);
    let (left, right) = inside(wj * stride, width, across);
    let count = (right - left) * channels;
    (top..bottom).filter(move |_| count > 0).map(move |row| {
        let patch = ((row - wi * stride) * across + left - wj * stride) * channels;
        let pixels = ((row - padding) * width + left - padding) * channels;
        Run { patch: patch..patch + count, pixels: pixels..pixels + count }
    })
}

/// Calls `each(window, wi, wj)` for all windows of an image, row by row.
#[inline(always)]
fn for_windows(windows: &Windows, mut each: impl FnMut(usize, usize, usize)) {
    let [down, across] = windows.count();
    for window in 0..down * across {
        each(window, window / across, window % across);
    }
}

/// Iterates over images: (the elements of its pixels, the elements of its windows, `n` per window).
fn images<'a, X, Y>(w: &Windows, x: &'a [X], y: &'a mut [Y], n: usize) -> impl Iterator<Item = (&'a [X], &'a mut [Y])> {
    let per_image = w.over(1).rows() * n;
    assert_eq!([x.len(), y.len()], [w.samples * w.pixels(), w.samples * per_image], "elements of {w:?}");
    x.chunks_exact(w.pixels().max(1)).zip(y.chunks_exact_mut(per_image.max(1)))
}

/// The same, with mutable pixels.
fn images_mut<'a, X, Y>(
    w: &Windows,
    x: &'a mut [X],
    y: &'a [Y],
    n: usize,
) -> impl Iterator<Item = (&'a mut [X], &'a [Y])> {
    let per_image = w.over(1).rows() * n;
    assert_eq!([x.len(), y.len()], [w.samples * w.pixels(), w.samples * per_image], "elements of {w:?}");
    x.chunks_exact_mut(w.pixels().max(1)).zip(y.chunks_exact(per_image.max(1)))
}

/// `out[rows, patch]` from images `x` (im2col). Overwrites.
pub fn patches<T: Float>(windows: &Windows, x: &[T], out: &mut [T]) {
    let n = windows.patch();
    for (x, out) in images(windows, x, out, n) {
        for_windows(windows, |window, wi, wj| {
            let patch = &mut out[window * n..][..n];
            let mut done = 0;
            for Run { patch: to, pixels } in runs(windows, wi, wj) {
                patch[done..to.start].fill(T::ZERO);
                patch[to.clone()].copy_from_slice(&x[pixels]);
                done = to.end;
            }
            patch[done..].fill(T::ZERO);
        });
    }
}

/// Gradient of the images from `dpatches[rows, patch]` (col2im). Overwrites.
pub fn patches_backward<T: Float>(windows: &Windows, dpatches: &[T], dx: &mut [T]) {
    let n = windows.patch();
    dx.fill(T::ZERO);
    wide!(for (dx, dpatches) in images_mut(windows, dx, dpatches, n) {
        inlined!(for_windows, (windows), |window, wi, wj| {
            let patch = &dpatches[window * n..][..n];
            for Run { patch: from, pixels } in runs(windows, wi, wj) {
                for (dx, &d) in dx[pixels].iter_mut().zip(&patch[from]) {
                    *dx += d;
                }
            }
        });
    });
}

/// A pixel's place in its window.
pub trait WindowPlace: Copy + Send + Sync {
    /// The place as this type, which [`Windows::place_dtype`] has chosen.
    fn new(place: usize) -> Self;
    /// The place.
    fn get(self) -> usize;
}

macro_rules! window_place {
    ($($t:ty),*) => {$(
        impl WindowPlace for $t {
            fn new(place: usize) -> Self {
                place as Self
            }

            fn get(self) -> usize {
                self as usize
            }
        }
    )*};
}
window_place!(u8, i32);

/// `out[rows, channels]`: the largest pixel of each window, and its index in the window, in `places`. Overwrites.
pub fn max_pool<T: Float, P: WindowPlace>(windows: &Windows, x: &[T], out: &mut [T], places: &mut [P]) {
    let n = windows.channels;
    assert_eq!(out.len(), places.len(), "elements of out against places");
    let places_of = places.chunks_exact_mut((windows.over(1).rows() * n).max(1));
    wide!(for ((x, out), places) in images(windows, x, out, n).zip(places_of) {
        inlined!(for_windows, (windows), |window, wi, wj| {
            let best = &mut out[window * n..][..n];
            let places = &mut places[window * n..][..n];
            best.fill(T::NEG_INFINITY);
            // If no pixel beats -∞, the place is the first pixel of the image in the window.
            let first = runs(windows, wi, wj).next().map_or(0, |run| run.patch.start / n);
            places.fill(P::new(first));
            for Run { patch, pixels } in runs(windows, wi, wj) {
                for (at, pixel) in x[pixels].chunks_exact(n).enumerate() {
                    let at = P::new(patch.start / n + at);
                    for ((best, place), &x) in best.iter_mut().zip(&mut *places).zip(pixel) {
                        let beats = beats(x, *best);
                        *best = if beats { x } else { *best };
                        *place = if beats { at } else { *place };
                    }
                }
            }
        });
    });
}

/// Whether x replaces the largest element so far. NaN replaces any number, and is never replaced.
#[inline(always)]
#[expect(clippy::eq_op, reason = "only NaN is not equal to itself")]
fn beats<T: Float>(x: T, best: T) -> bool {
    x > best || x != x && best == best
}

/// Gradient of the images from `dy[rows, channels]`: each element goes to the pixel at its place. Overwrites.
pub fn max_pool_backward<T: Float, P: WindowPlace>(windows: &Windows, dy: &[T], places: &[P], dx: &mut [T]) {
    let Windows { image: [_, width], channels: n, kernel: [_, across], stride, padding, .. } = *windows;
    assert_eq!(dy.len(), places.len(), "elements of dy against places");
    dx.fill(T::ZERO);
    let places_of = places.chunks_exact((windows.over(1).rows() * n).max(1));
    for ((dx, dy), places) in images_mut(windows, dx, dy, n).zip(places_of) {
        for_windows(windows, |window, wi, wj| {
            let row = window * n..(window + 1) * n;
            for (channel, (&dy, place)) in dy[row.clone()].iter().zip(&places[row]).enumerate() {
                // In padded coordinates the image begins at `padding`.
                let (down, right) = (wi * stride + place.get() / across, wj * stride + place.get() % across);
                dx[((down - padding) * width + right - padding) * n + channel] += dy;
            }
        });
    }
}

/// `out[rows, channels]`: the mean of each window, its pixels one after another. Overwrites.
pub fn average_pool<T: Float>(windows: &Windows, x: &[T], out: &mut [T]) {
    let (n, area) = (windows.channels, area(windows));
    wide!(for (x, out) in images(windows, x, out, n) {
        inlined!(for_windows, (windows), |window, wi, wj| {
            let sum = &mut out[window * n..][..n];
            sum.fill(T::ZERO);
            for Run { pixels, .. } in runs(windows, wi, wj) {
                for pixel in x[pixels].chunks_exact(n) {
                    for (sum, &x) in sum.iter_mut().zip(pixel) {
                        *sum += x;
                    }
                }
            }
            sum.iter_mut().for_each(|sum| *sum = *sum / area);
        });
    });
}

/// Gradient of the images from `dy[rows, channels]`. Overwrites.
pub fn average_pool_backward<T: Float>(windows: &Windows, dy: &[T], dx: &mut [T]) {
    let (n, area) = (windows.channels, area(windows));
    dx.fill(T::ZERO);
    wide!(for (dx, dy) in images_mut(windows, dx, dy, n) {
        inlined!(for_windows, (windows), |window, wi, wj| {
            let dy = &dy[window * n..][..n];
            for Run { pixels, .. } in runs(windows, wi, wj) {
                for pixel in dx[pixels].chunks_exact_mut(n) {
                    for (dx, &dy) in pixel.iter_mut().zip(dy) {
                        *dx += dy / area;
                    }
                }
            }
        });
    });
}

/// Pixels of a window, including padding.
fn area<T: Float>(windows: &Windows) -> T {
    T::from_f64(windows.kernel.iter().product::<usize>() as f64)
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{assert_close, values, widen};
    use super::*;
    use proptest::prelude::*;

    fn any_windows() -> impl Strategy<Value = Windows> {
        let kernels = (1..4_usize, 1..4_usize);
        (1..4_usize, (1..7_usize, 1..7_usize), 1..6_usize, kernels, 1..4_usize, 0..3_usize).prop_filter_map(
            "a kernel that fits",
            |(samples, image, channels, kernel, stride, padding)| {
                let (image, kernel) = (image.into(), kernel.into());
                let windows = Windows { samples, image, channels, kernel, stride, padding };
                let reaches = windows.count().iter().all(|&count| count > 0);
                // Windows with only padding have no maximum.
                (reaches && kernel.iter().all(|&kernel| padding < kernel)).then_some(windows)
            },
        )
    }

    /// The pixel under element (i, j) of a window; `None` on padding.
    fn under(w: &Windows, [wi, wj]: [usize; 2], [i, j]: [usize; 2]) -> Option<usize> {
        let row = (wi * w.stride + i).checked_sub(w.padding).filter(|&row| row < w.image[0])?;
        let column = (wj * w.stride + j).checked_sub(w.padding).filter(|&column| column < w.image[1])?;
        Some(row * w.image[1] + column)
    }

    /// Calls `each(row of the result, element of the window, channel, index in x)`, without padding.
    fn naive(w: &Windows, mut each: impl FnMut(usize, usize, usize, usize)) {
        let [down, across] = w.count();
        for (sample, wi, wj) in
            (0..w.samples).flat_map(|s| (0..down).flat_map(move |wi| (0..across).map(move |wj| (s, wi, wj))))
        {
            for (i, j) in (0..w.kernel[0]).flat_map(|i| (0..w.kernel[1]).map(move |j| (i, j))) {
                let Some(pixel) = under(w, [wi, wj], [i, j]) else { continue };
                for c in 0..w.channels {
                    let x = (sample * w.image[0] * w.image[1] + pixel) * w.channels + c;
                    each((sample * down + wi) * across + wj, i * w.kernel[1] + j, c, x);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn patches_are_the_windows_and_their_gradient_the_sum_over_them(w in any_windows()) {
            let x: Vec<f32> = values("x", w.samples * w.pixels());
            let mut want = vec![0.0; w.rows() * w.patch()];
            naive(&w, |row, element, c, at| want[row * w.patch() + element * w.channels + c] = x[at]);
            let mut got = vec![9.0; want.len()];
            patches(&w, &x, &mut got);
            prop_assert_eq!(&got, &want);

            let d: Vec<f32> = values("d", want.len());
            let mut want = vec![0.0; x.len()];
            naive(&w, |row, element, c, at| want[at] += d[row * w.patch() + element * w.channels + c]);
            let mut got = vec![9.0; x.len()];
            patches_backward(&w, &d, &mut got);
            prop_assert_eq!(got, want, "bit for bit, in the stated order");
        }

        #[test]
        fn pools_are_what_they_say(w in any_windows()) {
            let x: Vec<f32> = values("x", w.samples * w.pixels());
            let d: Vec<f32> = values("d", w.rows() * w.channels);
            let mut largest = vec![(f32::NEG_INFINITY, usize::MAX); d.len()];
            let (mut sum, mut dsum) = (vec![0.0; d.len()], vec![0.0; x.len()]);
            let area = (w.kernel[0] * w.kernel[1]) as f64;
            naive(&w, |row, _, c, at| {
                let to = row * w.channels + c;
                if x[at] > largest[to].0 {
                    largest[to] = (x[at], at);
                }
                sum[to] += f64::from(x[at]) / area;
                dsum[at] += f64::from(d[to]) / area;
            });
            let (mut got, mut places) = (vec![9.0; d.len()], vec![9_i32; d.len()]);
            max_pool(&w, &x, &mut got, &mut places);
            prop_assert!(got.iter().eq(largest.iter().map(|(value, _)| value)));
            average_pool(&w, &x, &mut got);
            assert_close(&got, &sum, 1e-5);
            let mut dx = vec![9.0; x.len()];
            average_pool_backward(&w, &d, &mut dx);
            assert_close(&dx, &dsum, 1e-5);
            max_pool_backward(&w, &d, &places, &mut dx);
            let mut dlargest = vec![0.0; x.len()];
            largest.iter().zip(&d).for_each(|((_, at), d)| dlargest[*at] += d);
            assert_close(&dx, &widen(&dlargest), 1e-5);
        }

        /// Each image alone has the same bits as among others.
        #[test]
        fn bits_do_not_depend_on_the_other_images(w in any_windows()) {
            let (n, rows, one) = (w.pixels(), w.over(1).rows(), w.over(1));
            let x: Vec<f32> = values("x", w.samples * n);
            let d: Vec<f32> = values("d", w.rows() * w.patch());
            let (mut y, mut dx) = (vec![9.0; w.rows() * w.channels], vec![9.0; x.len()]);
            average_pool(&w, &x, &mut y);
            patches_backward(&w, &d, &mut dx);
            for sample in 0..w.samples {
                let mut alone = vec![9.0; rows * w.channels];
                average_pool(&one, &x[sample * n..][..n], &mut alone);
                prop_assert_eq!(&alone, &y[sample * alone.len()..][..alone.len()]);
                let mut alone = vec![9.0; n];
                patches_backward(&one, &d[sample * rows * w.patch()..][..rows * w.patch()], &mut alone);
                prop_assert_eq!(&alone, &dx[sample * n..][..n]);
            }
        }
    }

    #[test]
    fn the_first_of_equal_maxima_gets_the_gradient_and_nan_is_the_largest() {
        let row = Windows { samples: 1, image: [1, 4], channels: 1, kernel: [1, 4], stride: 1, padding: 0 };
        for (x, largest) in
            [([1.0, 3.0, 3.0, 2.0], 1), ([1.0, f32::NAN, 3.0, f32::NAN], 1), ([f32::NEG_INFINITY; 4], 0)]
        {
            let (mut y, mut dx, mut places) = ([9.0], [9.0; 4], [9_u8]);
            max_pool(&row, &x, &mut y, &mut places);
            assert_eq!(usize::from(places[0]), largest);
            max_pool_backward(&row, &[5.0], &places, &mut dx);
            assert_eq!(y[0].to_bits(), x[largest].to_bits());
            assert_eq!(dx, std::array::from_fn(|at| if at == largest { 5.0 } else { 0.0 }));
        }
    }
}
