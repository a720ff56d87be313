//! Patches and pools against loops over windows.

use super::oracle::{assert_close, values, widen};
use meshwork_cpu::kernels::windows::*;
use meshwork_tensor::kernel::Windows;
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
    for (x, largest) in [([1.0, 3.0, 3.0, 2.0], 1), ([1.0, f32::NAN, 3.0, f32::NAN], 1), ([f32::NEG_INFINITY; 4], 0)] {
        let (mut y, mut dx, mut places) = ([9.0], [9.0; 4], [9_u8]);
        max_pool(&row, &x, &mut y, &mut places);
        assert_eq!(usize::from(places[0]), largest);
        max_pool_backward(&row, &[5.0], &places, &mut dx);
        assert_eq!(y[0].to_bits(), x[largest].to_bits());
        assert_eq!(dx, std::array::from_fn(|at| if at == largest { 5.0 } else { 0.0 }));
    }
}
