//! The methods of compression as plain data, and as text.

use crate::Per;
use std::fmt;

/// A format of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// Four bits of exponent, three of mantissa; up to 448.
    E4M3,
    /// Five bits of exponent, two of mantissa; up to 57344.
    E5M2,
}

/// How a value between two codes becomes one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// The nearer one, of two equally near ones the even one.
    Nearest,
    /// The upper one with the probability of the distance to the lower one, drawn by counters.
    Stochastic,
}

/// Values that are all sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Values {
    /// As they are.
    F32,
    /// Rounded to the nearest bfloat16, ties to even. Larger values than its largest number become infinity.
    Bf16,
    /// `s · fp8(x / s)`, rounded to nearest, ties to even; s is the smallest power of two, at least 2^-126, with which
    /// the largest |x| of the part is in range.
    Fp8 {
        /// The format.
        format: Fp8Format,
        /// The elements that share a scale.
        per: Per,
    },
    /// `min + round((x - min) / step) · step` with `step = (max - min) / (2^bits - 1)`, of the part's smallest and
    /// largest value (Rudakov et al. 2024).
    Quantize {
        /// 1 to 8.
        bits: u8,
        /// The elements that share a minimum and a step.
        per: Per,
        /// How values are rounded.
        rounding: Rounding,
    },
    /// `sign(x) · mean |x|` of the part (1-bit Adam, Tang et al. 2021); the sign is the float's, also of a zero.
    /// The mean is added up in f64, element i in lane i % 16, then the lanes in order.
    Sign {
        /// The elements that share a scale.
        per: Per,
    },
    /// `round(127 · x / s) / 127 · s` with the largest |x| of the part as s, ties to even (block-wise: Dettmers et al.
    /// 2022, arXiv:2110.02861).
    Int8 {
        /// The elements that share a scale.
        per: Per,
    },
    /// `s · q(x / s)` with the largest |x| of the part as s; q gives the nearest of 16 numbers in [-1, 1], quantiles of
    /// a normal distribution (4-bit NormalFloat: Dettmers et al. 2023, arXiv:2305.14314).
    Nf4 {
        /// The elements that share a scale.
        per: Per,
        /// How the scales are sent.
        scales: Scales,
    },
}

/// How the scales of parts are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scales {
    /// In f32.
    #[default]
    F32,
    /// Rounded to 8 bits, which the codes then are relative to (double quantisation): zero, 2^-20 (1 + 1/8) to
    /// [`LARGEST`](Self::LARGEST) with five bits of exponent and three of mantissa, or NaN. Larger ones are the
    /// largest.
    E5M3,
}

impl Scales {
    /// The largest scale of 8 bits.
    pub const LARGEST: f32 = 3584.0;
}

impl fmt::Display for Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scales::F32 => "",
            Scales::E5M3 => "/e5m3",
        })
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Values::F32 => f.write_str("none"),
            Values::Bf16 => f.write_str("bf16"),
            Values::Fp8 { format: Fp8Format::E4M3, per } => write!(f, "fp8:e4m3{per}"),
            Values::Fp8 { format: Fp8Format::E5M2, per } => write!(f, "fp8:e5m2{per}"),
            Values::Quantize { bits, per, rounding: Rounding::Nearest } => write!(f, "quant:{bits}{per}"),
            Values::Quantize { bits, per, rounding: Rounding::Stochastic } => write!(f, "quant:{bits}{per}/stochastic"),
            Values::Sign { per } => write!(f, "sign{per}"),
            Values::Int8 { per } => write!(f, "int8{per}"),
            Values::Nf4 { per, scales } => write!(f, "nf4{per}{scales}"),
        }
    }
}

impl Values {
    /// Elements that share a scale.
    pub fn per(self) -> Per {
        match self {
            Values::F32 | Values::Bf16 => Per::Block(1),
            Values::Fp8 { per, .. }
            | Values::Quantize { per, .. }
            | Values::Sign { per }
            | Values::Int8 { per }
            | Values::Nf4 { per, .. } => per,
        }
    }

    /// Gives a method of the whole value parts.
    pub(crate) fn narrow(&mut self, to: Per) {
        if let Values::Fp8 { per, .. }
        | Values::Quantize { per, .. }
        | Values::Sign { per }
        | Values::Int8 { per }
        | Values::Nf4 { per, .. } = self
            && *per == Per::Tensor
        {
            *per = to;
        }
    }

    /// Whether it draws random numbers.
    pub(crate) fn draws(self) -> bool {
        matches!(self, Values::Quantize { rounding: Rounding::Stochastic, .. })
    }
}

/// How many elements are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keep {
    /// This fraction of each part, rounded to the nearest number, at least one. Above 0, at most 1.
    Fraction(f64),
    /// This number of elements of each part: at least one, and at most all of them.
    Count(usize),
}

impl Keep {
    /// Elements kept of `len`.
    pub fn count(self, len: usize) -> usize {
        match self {
            Keep::Fraction(fraction) => ((fraction * len as f64).round() as usize).max(1).min(len),
            Keep::Count(count) => count.max(1).min(len),
        }
    }
}

/// Which elements are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The largest |x| of each part; of equal ones the first. A value that is not finite is larger than all
    /// numbers, and a NaN larger than infinity.
    Largest(Per),
    /// Drawn uniformly without replacement (R. Floyd's algorithm). Values that are not drawn are lost, also those that
    /// are not finite.
    Random {
        /// Whether values are multiplied by n/k, so that the mean over all draws is x.
        unbiased: bool,
    },
}

/// Few elements are sent, all others are restored as zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sparse {
    /// Which.
    pub choice: Choice,
    /// How many.
    pub keep: Keep,
    /// How their values are sent. These form a vector in the order of the indices.
    pub values: Values,
}

impl fmt::Display for Sparse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self.choice, Choice::Largest(_)) { "topk:" } else { "randk:" })?;
        match self.keep {
            // With a point, also where it is a whole number: it tells a fraction from a count.
            Keep::Fraction(fraction) => write!(f, "{fraction:?}")?,
            Keep::Count(count) => write!(f, "{count}")?,
        }
        match self.choice {
            Choice::Largest(per) => write!(f, "{per}")?,
            Choice::Random { unbiased: true } => f.write_str("/unbiased")?,
            Choice::Random { unbiased: false } => {}
        }
        match self.values {
            Values::F32 => Ok(()),
            values => write!(f, "+{values}"),
        }
    }
}

/// Rank-r factors of a matrix M, by one step of subspace iteration: `P = M Q`, `P̂ = orthogonalise(P)`, `Q = Mᵀ P̂`;
/// restored is `P̂ Qᵀ`.
///
/// Q is kept from one use to the next (warm start). A column of Q that is zero, as all are at first, is drawn: uniform
/// in [-1, 1). A value that is not finite makes all restored values NaN.
///
/// The methods are its steps, on slices: M is row-major, P has a row of `rank` elements for each row of M, Q a run of
/// columns for each rank. Slices of other lengths leave elements out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PowerSgd {
    /// Columns of the factors.
    pub rank: usize,
}

impl fmt::Display for PowerSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "powersgd:{}", self.rank)
    }
}
