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
