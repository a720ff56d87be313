//! Loops compiled for the widest vectors of the CPU that runs them.
//!
//! The compiler vectorises plain loops, but only with the instructions that every CPU of the target has. [`wide`]
//! compiles a loop again for AVX2 and AVX-512 and picks at run time. The arithmetic is the same, operation by operation
//! (Rust never fuses a multiplication with an addition by itself, and `mul_add` rounds once everywhere), so the bits are too.

/// Runs `f` with the widest vectors this CPU has.
///
/// Only code that is inlined into `f` uses them: mark the functions that it calls `#[inline(always)]`, and call none
/// through `dyn` or a stored closure.
///
/// ```
/// let mut x = [1.0_f32; 1000];
/// meshwork_core::simd::wide(|| x.iter_mut().for_each(|x| *x = *x * 2.0 + 1.0));
/// assert_eq!(x, [3.0; 1000]);
/// ```
#[inline(always)]
pub fn wide<R>(f: impl FnOnce() -> R) -> R {
    struct Closure<F>(F);

    impl<R, F: FnOnce() -> R> Wide for Closure<F> {
        type Output = R;

        #[inline(always)]
        fn run(self) -> R {
            (self.0)()
        }
    }

    Closure(f).wide()
}

/// A loop that is too long for [`wide`]: the compiler does not inline a long closure. It does inline `run`, marked
/// `#[inline(always)]`.
pub trait Wide: Sized {
    /// The result of the loop.
    type Output;

    /// The loop. Mark it `#[inline(always)]`.
    fn run(self) -> Self::Output;

    /// Runs it with the widest vectors this CPU has.
    #[inline(always)]
    fn wide(self) -> Self::Output {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                // SAFETY: the CPU has all four.
                return unsafe { avx512(self) };
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the CPU has both.
                return unsafe { avx2(self) };
            }
        }
        self.run()
    }
}

/// # Safety
/// The CPU has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn avx512<W: Wide>(work: W) -> W::Output {
    work.run()
}

/// # Safety
/// The CPU has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<W: Wide>(work: W) -> W::Output {
    work.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Poly<'a> {
        x: &'a [f32],
        y: &'a mut [f32],
    }

    impl Wide for Poly<'_> {
        type Output = ();

        #[inline(always)]
        fn run(self) {
            self.y.iter_mut().zip(self.x).for_each(|(y, x)| *y = (*y * *x + 0.1) / (x * x * *y + 2.5));
        }
    }

    /// A loop whose bits a fused multiply-add would change: they are the same on each path that this CPU runs.
    #[test]
    fn every_path_gives_the_same_bits() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let run = |how: &dyn Fn(&mut dyn FnMut())| {
            let mut y = x.clone();
            let mut body = || y.iter_mut().zip(&x).for_each(|(y, x)| *y = (*y * *x + 0.1) / (x * x * *y + 2.5));
            how(&mut body);
            y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
        };
        let plain = run(&|f| f());
        let mut wide_y = x.clone();
        wide(|| wide_y.iter_mut().zip(&x).for_each(|(y, x)| *y = (*y * *x + 0.1) / (x * x * *y + 2.5)));
        assert_eq!(plain, wide_y.iter().map(|y| y.to_bits()).collect::<Vec<_>>());
        let mut wide_y = x.clone();
        Poly { x: &x, y: &mut wide_y }.wide();
        assert_eq!(plain, wide_y.iter().map(|y| y.to_bits()).collect::<Vec<_>>());
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let mut y = x.clone();
            // SAFETY: the CPU has both.
            unsafe { avx2(Poly { x: &x, y: &mut y }) };
            assert_eq!(plain, y.iter().map(|y| y.to_bits()).collect::<Vec<_>>());
        }
    }
}
