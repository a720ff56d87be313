//! Schemes as text: `"quant:4"`, `"topk:0.1+quant:8"`.

use crate::compressor::{Draws, Guarantee, SumMethod};
use crate::error::VALID;
use crate::{
    Choice, CompressError, Compressor, Fold, Fp8Format, Keep, MessageError, Method, Per, PowerSgd, Result, Rounding,
    Scales, Shape, Sparse, Values,
};
use meshwork_core::pass_on;
use std::fmt;
use std::str::FromStr;

/// One of the methods of this crate, with its parameters. Its text form:
///
/// | text | method |
/// |---|---|
/// | `none` | uncompressed values |
/// | `bf16` | bfloat16 |
/// | `fp8:e4m3`, `fp8:e5m2` | 8-bit floats with a scale; `/row` and `/block256` give each row, or each 256 elements, its own |
/// | `quant:4` | 1 to 8 bits between the smallest and the largest value; `/row`, `/block256`; then `/stochastic` for unbiased rounding |
/// | `sign` | signs and their mean absolute value; `/row`, `/block256` |
/// | `int8` | 8 bits between plus and minus the largest absolute value; `/row`, `/block256` |
/// | `nf4` | the nearest of 16 quantiles of a normal distribution, in units of the largest absolute value; `/row`, `/block64`; then `/e5m3` for scales of 8 bits |
/// | `topk:0.1`, `topk:100` | the largest tenth, or hundred (a fraction has a point, a count has none); `/row`, `/block256` |
/// | `randk:0.1`, `randk:100` | as many, chosen at random; `/unbiased` multiplies them by n/k |
/// | `topk:0.1+quant:8` | the values of `topk` or `randk`, by any of the methods above them |
/// | `powersgd:4` | factors of rank 4 |
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// All values, in fewer bits.
    Values(Values),
    /// Few values.
    Sparse(Sparse),
    /// Factors.
    PowerSgd(PowerSgd),
}

impl Scheme {
    fn inner(&self) -> &dyn Compressor {
        match self {
            Scheme::Values(values) => values,
            Scheme::Sparse(sparse) => sparse,
            Scheme::PowerSgd(low_rank) => low_rank,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner().name())
    }
}

impl FromStr for Scheme {
    type Err = CompressError;

    fn from_str(text: &str) -> Result<Scheme> {
        parse(text).map_err(|problem| CompressError::Scheme { text: text.to_owned(), problem })
    }
}

/// A method, its parameter and its options.
struct Words<'a> {
    name: &'a str,
    parameter: Option<&'a str>,
    options: Vec<&'a str>,
}

impl<'a> Words<'a> {
    fn split(text: &'a str) -> Words<'a> {
        let mut options = text.split('/');
        let head = options.next().unwrap_or_default();
        let (name, parameter) = match head.split_once(':') {
            Some((name, parameter)) => (name, Some(parameter)),
            None => (head, None),
        };
        Words { name, parameter, options: options.collect() }
    }

    fn parameter(&self, what: &str) -> Result<&'a str, String> {
        self.parameter.ok_or_else(|| format!("{} needs {what}", self.name))
    }

    fn no_parameter(&self) -> Result<(), String> {
        match self.parameter {
            None => Ok(()),
            Some(parameter) => Err(format!("{} takes no parameter {parameter:?}", self.name)),
        }
    }

    /// Removes `option` if it is the last one.
    fn take(&mut self, option: &str) -> bool {
        self.options.pop_if(|last| *last == option).is_some()
    }

    /// Removes `row` or `block256` if it is the last option.
    fn per(&mut self) -> Result<Per, String> {
        let Some(&option) = self.options.first() else { return Ok(Per::Tensor) };
        let per = match option.strip_prefix("block") {
            None if option == "row" => Per::Row,
            None => return Ok(Per::Tensor),
            Some(len) => Per::Block(positive(len, "the length of a block")?),
        };
        self.options.remove(0);
        Ok(per)
    }

    /// Checks that no options are left.
    fn done(&self, valid: &str) -> Result<(), String> {
        match self.options.first() {
            None => Ok(()),
            Some(option) => Err(format!("{} has no option {option:?} here, only {valid}", self.name)),
        }
    }
}

/// A positive number that fits a 32-bit index.
fn positive(text: &str, what: &str) -> Result<usize, String> {
    match text.parse::<u32>() {
        // Each number has exactly one text form: no sign, no leading zeros.
        Ok(number) if number > 0 && text == number.to_string() => Ok(number as usize),
        _ => Err(format!("{what} is {text:?}, it must be a whole number from 1 to {}", u32::MAX)),
    }
}

fn parse(text: &str) -> Result<Scheme, String> {
    let (head, tail) = if let Some((head, tail)) = text.split_once('+') { (head, Some(tail)) } else { (text, None) };
    let mut words = Words::split(head);
    let choice = match words.name {
        "topk" => Choice::Largest(words.per()?),
        "randk" => Choice::Random { unbiased: words.take("unbiased") },
        name if tail.is_some() => return Err(format!("+ follows topk or randk, not {name:?}")),
        "powersgd" => {
            words.done("none")?;
            let rank = positive(words.parameter("a rank, as in powersgd:4")?, "the rank")?;
            return Ok(Scheme::PowerSgd(PowerSgd { rank }));
        }
        _ => return values(words).map(Scheme::Values),
    };
    words.done(if matches!(choice, Choice::Largest(_)) { "one of row and blockN" } else { "unbiased" })?;
    let keep = keep(words.parameter("a fraction or a count, as in topk:0.1 and topk:100")?)?;
    let values = tail.map_or(Ok(Values::F32), |tail| values(Words::split(tail)))?;
    match values.per() {
        Per::Row => Err(format!("{values} of the elements of {head}: they have no rows; use blockN")),
        _ => Ok(Scheme::Sparse(Sparse { choice, keep, values })),
    }
}

fn keep(text: &str) -> Result<Keep, String> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return positive(text, "the number of elements kept").map(Keep::Count);
    }
    match text.parse::<f64>() {
        Ok(fraction) if fraction > 0.0 && fraction <= 1.0 => Ok(Keep::Fraction(fraction)),
        _ => Err(format!("the fraction kept is {text:?}, it must be above 0.0 and at most 1.0")),
    }
}

fn values(mut words: Words<'_>) -> Result<Values, String> {
    const PARTS: &str = "one of row and blockN";
    let values = match words.name {
        "none" | "bf16" => {
            words.no_parameter()?;
            words.done("none")?;
            if words.name == "none" { Values::F32 } else { Values::Bf16 }
        }
        "fp8" => {
            let format = match words.parameter("a format, as in fp8:e4m3")? {
                "e4m3" => Fp8Format::E4M3,
                "e5m2" => Fp8Format::E5M2,
                other => return Err(format!("the format is {other:?}, it must be e4m3 or e5m2")),
            };
            Values::Fp8 { format, per: words.per()? }
        }
        "quant" => {
            let text = words.parameter("a number of bits, as in quant:4")?;
            let bits = match positive(text, "the number of bits") {
                Ok(bits @ 1..=8) => bits as u8,
                _ => return Err(format!("the number of bits is {text:?}, it must be 1 to 8")),
            };
            let rounding = if words.take("stochastic") { Rounding::Stochastic } else { Rounding::Nearest };
            Values::Quantize { bits, per: words.per()?, rounding }
        }
        "sign" => {
            words.no_parameter()?;
            Values::Sign { per: words.per()? }
        }
        "int8" => {
            words.no_parameter()?;
            Values::Int8 { per: words.per()? }
        }
        "nf4" => {
            words.no_parameter()?;
            let scales = if words.take("e5m3") { Scales::E5M3 } else { Scales::F32 };
            Values::Nf4 { per: words.per()?, scales }
        }
        name => return Err(format!("there is no method {name:?}")),
    };
    words.done(match words.name {
        "quant" => "one of row and blockN, then stochastic",
        "nf4" => "one of row and blockN, then e5m3",
        _ => PARTS,
    })?;
    Ok(values)
}

impl Scheme {
    /// The same scheme, with stochastic rounding if `rounding` is stochastic. A scheme that already rounds
    /// stochastically, or does not quantise, is unchanged.
    pub fn rounding_at_least(mut self, rounding: Rounding) -> Scheme {
        let values = match &mut self {
            Scheme::Values(values) => values,
            Scheme::Sparse(sparse) => &mut sparse.values,
            Scheme::PowerSgd(_) => return self,
        };
        if let (Values::Quantize { rounding: of, .. }, Rounding::Stochastic) = (values, rounding) {
            *of = rounding;
        }
        self
    }

    /// The same scheme applied to each row of `cols` elements separately, if it is a scheme for the whole value.
    ///
    /// ```
    /// use meshwork_compress::Scheme;
    ///
    /// let of_row = |scheme: &str| scheme.parse().map(|scheme: Scheme| scheme.of_each_row(64).to_string());
    /// assert_eq!(of_row("quant:8")?, "quant:8/row");
    /// assert_eq!(of_row("topk:0.5+sign")?, "topk:0.5/row+sign/block32");
    /// assert_eq!(of_row("fp8:e4m3/block16")?, "fp8:e4m3/block16");
    /// # Ok::<(), meshwork_compress::CompressError>(())
    /// ```
    #[must_use]
    pub fn of_each_row(mut self, cols: usize) -> Scheme {
        match &mut self {
            Scheme::Values(values) => values.narrow(Per::Row),
            Scheme::Sparse(Sparse { choice, keep, values }) => {
                if let Choice::Largest(per @ Per::Tensor) = choice {
                    *per = Per::Row;
                }
                // The chosen values of all rows form one vector.
                values.narrow(Per::Block(keep.count(cols)));
            }
            Scheme::PowerSgd(_) => {}
        }
        self
    }

    /// Whether each row of a value of this shape is compressed by itself, so that its loss does not depend on
    /// the others.
    pub fn takes_rows_apart(&self, shape: Shape) -> bool {
        let within = |per: Per, cols: usize| match per {
            Per::Tensor => false,
            Per::Row => true,
            Per::Block(len) => cols.is_multiple_of(len.max(1)),
        };
        match self {
            Scheme::Values(values) => within(values.per(), shape.cols()),
            Scheme::Sparse(Sparse { choice: Choice::Largest(Per::Row), keep, values }) => {
                // Random numbers of values are indexed by value, not by element.
                !values.draws() && within(values.per(), keep.count(shape.cols()))
            }
            Scheme::Sparse(_) | Scheme::PowerSgd(_) => false,
        }
    }

    /// The grammar of schemes in one line.
    pub const VALID: &str = VALID;
}

/// Delegates to its method.
impl Compressor for Scheme {
    pass_on! {
        self.inner() =>
        fn name(&self) -> String;
        fn method(&self) -> Method;
        fn check(&self, shape: Shape) -> Result<()>;
        fn body_bytes(&self, shape: Shape) -> usize;
        fn guarantee(&self, shape: Shape) -> Guarantee;
        fn warm_len(&self, shape: Shape) -> usize;
        fn sum(&self) -> SumMethod;
        fn write(&self, x: &[f32], shape: Shape, draws: Draws, warm: &mut [f32], body: &mut [u8]);
        fn read(&self, body: &[u8], shape: Shape, fold: Fold, out: &mut [f32]) -> Result<(), MessageError>;
    }
}
