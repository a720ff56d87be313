//! The distance of two numbers in ulps, and the distribution of such distances.

use meshwork_core::{DType, bf16, f16};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::ops::Add;

/// Values on the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Values {
    /// Keeps the first `count`.
    pub(super) fn truncate(&mut self, count: usize) {
        match self {
            Self::F32(values) => values.truncate(count),
            Self::F64(values) => values.truncate(count),
        }
    }

    /// Rounds each to a type of 16 bits.
    pub(super) fn round_to(&mut self, half: DType) {
        let Self::F32(values) = self else { return };
        match half {
            DType::Bf16 => values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).into()),
            DType::F16 => values.iter_mut().for_each(|value| *value = f16::from_f32(*value).into()),
            _ => {}
        }
    }
}

pub(super) trait Float: Copy + Debug + Add<Output = Self> + Into<f64> {
    /// The values, if they are of this type.
    fn slice(values: &Values) -> Option<&[Self]>;

    fn wrap(values: Vec<Self>) -> Values;

    /// The distance in steps from one number to the next; 0 between the two zeros and between two NaNs; `u64::MAX`
    /// between a number and a NaN.
    fn ulps(self, other: Self) -> u64;
}

/// A type that values are stored in.
pub(super) trait Stored: Copy {
    /// Distance from one number to the next, in ulps of the type in which values are compared.
    const STEP: u32 = 1;

    /// The next number, upwards.
    fn next(self) -> Self;

    /// The number `steps` steps further up.
    fn up(self, steps: u32) -> Self {
        (0..steps).fold(self, |value, _| value.next())
    }
}

macro_rules! stored {
    ($t:ident, $step:expr) => {
        impl Stored for $t {
            const STEP: u32 = $step;

            fn next(self) -> Self {
                let bits = self.to_bits();
                $t::from_bits(match bits {
                    _ if self.is_nan() || self == $t::INFINITY => bits,
                    0x8000 => 1, // from the negative zero
                    0x8001.. => bits - 1,
                    _ => bits + 1,
                })
            }
        }
    };
}
stored!(bf16, 1 << 16);
stored!(f16, 1 << 13); // of normal numbers

macro_rules! float {
    ($t:ty, $int:ty, $variant:ident) => {
        impl Float for $t {
            fn slice(values: &Values) -> Option<&[Self]> {
                if let Values::$variant(values) = values { Some(values) } else { None }
            }

            fn wrap(values: Vec<Self>) -> Values {
                Values::$variant(values)
            }

            fn ulps(self, other: Self) -> u64 {
                // Bits as integers that grow as the numbers do, both zeros 0.
                let place = |value: $t| {
                    let bits = value.to_bits() as $int;
                    i128::from(if bits < 0 { <$int>::MIN.wrapping_sub(bits) } else { bits })
                };
                match (self.is_nan(), other.is_nan()) {
                    (false, false) => place(self).abs_diff(place(other)) as u64,
                    (true, true) => 0,
                    _ => u64::MAX,
                }
            }
        }

        impl Stored for $t {
            fn next(self) -> Self {
                self.next_up()
            }
        }
    };
}
float!(f32, i32, F32);
float!(f64, i64, F64);

/// Counts of distances: exact up to 16, then in eight steps per doubling.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spread {
    counts: Vec<u64>,
    total: u64,
    max: u64,
}

impl Spread {
    /// Counts a distance `times` times.
    pub fn add(&mut self, ulps: u64, times: u64) {
        let bin = bin(ulps);
        if bin >= self.counts.len() {
            self.counts.resize(bin + 1, 0);
        }
        self.counts[bin] += times;
        self.total += times;
        self.max = self.max.max(ulps);
    }

    /// Adds the counts of another spread.
    pub fn merge(&mut self, other: &Spread) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// Number of distances counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Number of distances that are 0.
    pub fn identical(&self) -> u64 {
        self.counts.first().copied().unwrap_or(0)
    }

    /// The largest distance.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The distance that `percent` of all do not exceed: exact up to 16, beyond that rounded down by at most an eighth.
    pub fn percentile(&self, percent: u64) -> u64 {
        let wanted = (u128::from(self.total) * u128::from(percent)).div_ceil(100) as u64;
        let mut seen = 0;
        let reached = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        reached.map_or(0, start)
    }
}

/// Distances below this have a bin each.
const EXACT: u64 = 16;

fn bin(ulps: u64) -> usize {
    if ulps < EXACT {
        return ulps as usize;
    }
    let exponent = ulps.ilog2(); // 4 or more
    (EXACT + u64::from(exponent - 4) * 8 + (ulps >> (exponent - 3) & 7)) as usize
}

/// The least distance of a bin.
fn start(bin: usize) -> u64 {
    let bin = bin as u64;
    if bin < EXACT {
        return bin;
    }
    let (exponent, eighth) = ((bin - EXACT) / 8 + 4, (bin - EXACT) % 8);
    (8 + eighth) << (exponent - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_apart_on_both_sides_of_zero() {
        for x in [1.0f32, -1.0, 0.0, -0.0, f32::MAX, f32::from_bits(1), -f32::from_bits(1), 1.5e-40] {
            assert_eq!(x.ulps(x.next_up()), 1, "{x}");
            assert_eq!(x.next_down().ulps(x), 1, "{x}");
        }
        for x in [1.0f32, -1.0, 0.0, -0.0, 1e-40, -1e-40, 3e38].map(bf16::from_f32) {
            assert_eq!(f32::from(x).ulps(x.next().into()), u64::from(bf16::STEP), "{x}");
        }
        for x in [1.0f32, -1.0, 0.25, -3.0, 60000.0].map(f16::from_f32) {
            assert_eq!(f32::from(x).ulps(x.next().into()), u64::from(f16::STEP), "{x}");
        }
        assert_eq!(bf16::MAX.up(2), bf16::INFINITY);
        assert_eq!(f32::from_bits(1).up(3), f32::from_bits(4));
        assert_eq!((-1f64).up(3).ulps(-1.0), 3);
        assert_eq!((-f32::from_bits(2)).ulps(f32::from_bits(3)), 5);
        assert_eq!(0f64.ulps(-0.0), 0);
        assert_eq!(1f64.ulps(1.0 + 2.0 * f64::EPSILON), 2);
        assert_eq!((-f64::MAX).ulps(f64::MAX), 2 * f64::MAX.to_bits());
    }

    #[test]
    fn a_number_that_is_none_is_as_far_as_can_be_but_from_another() {
        assert_eq!(f32::NAN.ulps(1.0), u64::MAX);
        assert_eq!(f64::NAN.ulps(-f64::NAN), 0);
        assert!(f32::INFINITY.ulps(f32::MAX) == 1);
    }

    #[test]
    fn bins_follow_on_each_other_and_lose_at_most_an_eighth() {
        for ulps in (0..5000).chain([u64::MAX, u64::MAX / 3, 1 << 40]) {
            let floor = start(bin(ulps));
            assert!(floor <= ulps && ulps - floor <= ulps / 8, "{ulps} in a bin from {floor}");
            assert!(ulps == 0 || bin(ulps) == bin(ulps - 1) || start(bin(ulps)) == ulps, "{ulps}");
        }
    }

    #[test]
    fn percentiles_of_a_known_spread() {
        let mut spread = Spread::default();
        assert_eq!((spread.percentile(50), spread.max(), spread.identical()), (0, 0, 0));
        spread.add(0, 90);
        spread.add(3, 9);
        spread.add(1000, 1);
        assert_eq!([50, 90, 91, 99, 100].map(|percent| spread.percentile(percent)), [0, 0, 3, 3, 960]);
        assert_eq!((spread.total(), spread.identical(), spread.max()), (100, 90, 1000));
    }
}
