//! Loops compiled for the widest vectors of the CPU that runs them.
//!
//! The compiler vectorises plain loops, but only with the instructions that every CPU of the target has. [`wide()`]
//! compiles a loop again for AVX2 and AVX-512 and picks at run time. The arithmetic is the same, operation by operation
//! (Rust never fuses a multiplication with an addition by itself, and `mul_add` rounds once everywhere), so the bits
//! are too.
//!
//! [`level`] says which instructions that is, for this and for all kernels written in instructions.

use std::ffi::OsString;
use std::sync::OnceLock;
use thiserror::Error;

/// The environment variable for the widest instructions that may be used: `portable`, `avx2` or `avx512`. It is for
/// tests of the paths that this CPU would not take.
pub const SIMD_VARIABLE: &str = "MESHWORK_SIMD";

/// Vector instructions, each level with those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The instructions that every CPU of the target has.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512: F, BW, DQ and VL.
    Avx512,
}

/// A value of [`SIMD_VARIABLE`] that names no level.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{SIMD_VARIABLE} = {}: no vector instructions of that name; use portable, avx2 or avx512", value.display())]
pub struct UnknownLevel {
    /// The value.
    pub value: OsString,
}

crate::debug_as_display!(UnknownLevel);

impl Level {
    /// The widest of this CPU.
    fn of_cpu() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                true if avx512 => return Level::Avx512,
                true => return Level::Avx2,
                false => {}
            }
        }
        Level::Portable
    }

    /// The level that a value of [`SIMD_VARIABLE`] names; without one, the widest.
    ///
    /// # Errors
    /// A value that names none.
    pub fn named(value: Option<OsString>) -> Result<Level, UnknownLevel> {
        let Some(value) = value else { return Ok(Level::Avx512) };
        match value.to_str() {
            Some("portable") => Ok(Level::Portable),
            Some("avx2") => Ok(Level::Avx2),
            Some("avx512") => Ok(Level::Avx512),
            _ => Err(UnknownLevel { value }),
        }
    }
}

/// The instructions in use: the widest that this CPU has and that [`SIMD_VARIABLE`] allows. A value that names no level
/// allows all. Read once.
#[inline]
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let allowed = Level::named(std::env::var_os(SIMD_VARIABLE)).unwrap_or(Level::Avx512);
        allowed.min(Level::of_cpu())
    })
}

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

/// Runs an expression with the widest vectors this CPU has: [`wide()`] of a closure that is always inlined.
///
/// ```
/// use meshwork_core::simd::wide;
///
/// let mut x = [1.0_f32; 1000];
/// wide!(for x in &mut x {
///     *x = *x * 2.0 + 1.0;
/// });
/// assert_eq!(x, [3.0; 1000]);
/// ```
#[macro_export]
macro_rules! wide {
    ($body:expr) => {
        $crate::simd::wide(
            #[inline(always)]
            || $body,
        )
    };
}

#[doc(inline)]
pub use crate::wide;

/// A loop that is too long for [`wide()`]: the compiler does not inline a long closure. It does inline `run`, marked
/// `#[inline(always)]`.
pub trait Wide: Sized {
    /// The result of the loop.
    type Output;

    /// The loop. Mark it `#[inline(always)]`.
    fn run(self) -> Self::Output;

    /// Runs it with the widest vectors this CPU has.
    #[inline(always)]
    fn wide(self) -> Self::Output {
        match level() {
            // SAFETY: the CPU has the instructions of its level.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unsafe { avx512(self) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { avx2(self) },
            _ => self.run(),
        }
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

    /// Also when the whole suite runs at one level: a misspelt variable would test another one.
    #[test]
    fn the_level_is_the_one_asked_for() {
        let asked = Level::named(std::env::var_os(SIMD_VARIABLE)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(level(), asked.min(Level::of_cpu()));
        let named = |name: &str| Level::named(Some(name.into()));
        assert_eq!(["portable", "avx2", "avx512"].map(named), [Level::Portable, Level::Avx2, Level::Avx512].map(Ok));
        assert_eq!(Level::named(None), Ok(Level::Avx512));
        let wrong = named("AVX2").unwrap_err().to_string();
        assert_eq!(wrong, "MESHWORK_SIMD = AVX2: no vector instructions of that name; use portable, avx2 or avx512");
    }

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
