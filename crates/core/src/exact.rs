//! Sums of squares that do not depend on their order: fixed-point numbers wide enough for the square of every f32.
//!
//! The square of an f32 is an integer of 48 bits times a power of two between 2^-298 and 2^208. A sum of squares is
//! kept as an integer multiple of 2^-298, in [`LIMBS`] digits of 32 bits; adding integers rounds nothing. So ranks may
//! cut a sum in any way, add up the digits of their parts in any order, and get the same bits from [`value`].
//!
//! ```
//! use meshwork_core::exact::{LIMBS, add_square, carry, value};
//!
//! let sum = |x: &[f32]| {
//!     let mut digits = [0; LIMBS];
//!     x.iter().for_each(|&x| add_square(&mut digits, x));
//!     carry(&mut digits)
//! };
//! let (whole, left, right) = (sum(&[1e-20, 3e15, 0.1]), sum(&[0.1]), sum(&[3e15, 1e-20]));
//! let parts: Vec<f64> = left.iter().zip(right).map(|(left, right)| left + right).collect();
//! assert_eq!(value(&parts), value(&whole)); // though 0.1² is lost beside (3e15)² in f64
//! ```

/// Numbers in a sum: 19 digits of 32 bits, the lowest first, and a number above 0 if a term was not finite.
pub const LIMBS: usize = 20;

const DIGITS: usize = LIMBS - 1;
const MASK: u64 = (1 << 32) - 1;
/// The exponent of the lowest bit, which the square of the smallest f32 has.
const LOWEST: i32 = -298;

/// Numbers of one exponent that are added up before their digits are: 2^16 squares of 48 bits fit into 64.
const RUN: usize = 1 << 16;
/// Fewer numbers than this are added one by one.
const FEW: usize = 512;

/// Adds x². At most 2^31 additions between two calls of [`carry`].
#[inline(always)]
pub fn add_square(digits: &mut [u64; LIMBS], x: f32) {
    let (exponent, square) = square(x);
    add(digits, exponent, square);
}

/// Adds Σ x². Squares of one exponent are added up first, so that many numbers take a fraction of the time of
/// [`add_square`] and count as fewer additions.
pub fn add_squares(digits: &mut [u64; LIMBS], x: &[f32]) {
    for x in x.chunks(RUN) {
        if x.len() < FEW {
            x.iter().for_each(|&x| add_square(digits, x));
            continue;
        }
        // Several sums of each exponent, so that one addition need not wait for the one before.
        let mut sums = [[0; 256]; 4];
        for x in x.chunks(4) {
            for (sums, &x) in sums.iter_mut().zip(x) {
                let (exponent, square) = square(x);
                sums[exponent] += square;
            }
        }
        for exponent in 0..256 {
            match sums.iter().map(|sums| sums[exponent]).sum() {
                0 => {}
                sum => add(digits, exponent, sum),
            }
        }
    }
}

/// The exponent as it is stored, and the square of the mantissa; not zero if x is not finite.
#[inline(always)]
fn square(x: f32) -> (usize, u64) {
    let bits = x.to_bits();
    let exponent = (bits >> 23 & 255) as usize;
    let mantissa = u64::from(bits & 0x7f_ffff | u32::from(exponent > 0) << 23);
    (exponent, mantissa * mantissa)
}

/// Adds squares of mantissas of one exponent.
#[inline(always)]
fn add(digits: &mut [u64; LIMBS], exponent: usize, squares: u64) {
    if exponent == 255 {
        digits[DIGITS] += 1;
        return;
    }
    let bit = 2 * exponent.saturating_sub(1);
    let squares = u128::from(squares) << (bit % 32);
    for (digit, part) in digits[bit / 32..bit / 32 + 3].iter_mut().zip([squares, squares >> 32, squares >> 64]) {
        *digit += part as u64 & MASK;
    }
}

/// The digits below 2^32 each, as numbers that ranks may add up: exact for up to 2^21 of them.
pub fn carry(digits: &mut [u64; LIMBS]) -> [f64; LIMBS] {
    for at in 0..DIGITS - 1 {
        digits[at + 1] += digits[at] >> 32;
        digits[at] &= MASK;
    }
    digits.map(|digit| digit as f64)
}

/// The sum, rounded. `digits` may be the digits of several sums added up. NaN if a term was not finite.
///
/// # Panics
/// On another number of digits than [`LIMBS`].
pub fn value(digits: &[f64]) -> f64 {
    let mut whole = [0; LIMBS];
    assert_eq!(digits.len(), LIMBS, "digits of one sum");
    whole.iter_mut().zip(digits).for_each(|(whole, &digit)| *whole = digit as u64);
    carry(&mut whole);
    if whole[DIGITS] > 0 {
        return f64::NAN;
    }
    // The three highest digits have at least 65 bits: what lies below is less than a thousandth of the last bit of an
    // f64.
    let Some(top) = whole[..DIGITS].iter().rposition(|&digit| digit > 0) else { return 0.0 };
    let first = top.saturating_sub(2);
    let high = whole[first..=top].iter().rev().fold(0u128, |high, &digit| high << 32 | u128::from(digit));
    let exponent = LOWEST + 32 * first as i32;
    high as f64 * f64::from_bits(((1023 + exponent) as u64) << 52)
}
