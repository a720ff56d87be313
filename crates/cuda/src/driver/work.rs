//! The work of a stream, as data: kernels with their arguments, matrix products, and copies within a device.

use super::address::Address;
use super::error::{DriverError, Result};
use super::nccl::{Exchange, NcclComm};
use meshwork_core::DType;
use meshwork_kernels::{Kernel, Launch, Pass, Type};
use meshwork_tensor::Precision;
use std::fmt;
use std::hash::{Hash, Hasher};

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Argument {
    /// A number: its type, and its bits in the lowest bytes.
    Number(Type, u64),
    /// The address of elements, or of addresses.
    Place(Address),
}

macro_rules! numbers {
    ($($t:ty => $of:ident),*) => { $(impl From<$t> for Argument {
        fn from(value: $t) -> Self {
            let mut bytes = [0; 8];
            bytes[..size_of::<$t>()].copy_from_slice(&value.to_le_bytes());
            Self::Number(Type::$of, u64::from_le_bytes(bytes))
        }
    })* };
}
numbers!(f32 => F32, f64 => F64, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

impl From<usize> for Argument {
    /// A size or an index, passed as `long long`.
    fn from(value: usize) -> Self {
        Self::from(value as i64)
    }
}

impl From<Address> for Argument {
    fn from(at: Address) -> Self {
        Self::Place(at)
    }
}

/// A matrix product `C[m, n] = op(A) · op(B)`, or `C += ..`, or `C = op(A) · op(B) + bias`, all row-major and
/// contiguous. Sums and additions to them are in f32, in an order of the library's own: a C of bf16 is rounded
/// once, to the nearest, subnormal numbers kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of C, columns of C, and the length of the sums.
    pub mnk: [usize; 3],
    /// A and B.
    pub operands: [Operand; 2],
    /// What A and B are: of f32; of f32, and rounded by the library to TF32; of bf16.
    pub precision: Precision,
    /// C.
    pub c: Address,
    /// C and the bias are of bf16 instead of f32; allowed if A and B are of bf16.
    pub rounded: bool,
    /// Add to C instead of overwriting it.
    pub accumulate: bool,
    /// `[n]`, of C's type, which is added to each row of C. Not allowed with `accumulate` or with empty sums. Aligned
    /// to [`BIAS_ALIGNED`] bytes.
    pub bias: Option<Address>,
}

/// Alignment of a bias in bytes. The epilogue of cuBLASLt reads the bias in chunks of 16 bytes, and no preference of
/// the library lowers this alignment.
pub const BIAS_ALIGNED: u64 = 16;

impl Product {
    /// The type of A and B.
    pub fn dtype(&self) -> DType {
        self.precision.operand_dtype(DType::F32)
    }

    /// The type of C and the bias.
    pub fn result(&self) -> DType {
        if self.rounded { DType::Bf16 } else { DType::F32 }
    }

    /// Checks that a library accepts the product: the alignment of matrices to their elements and of the bias to
    /// [`BIAS_ALIGNED`], and the conditions on types and bias stated at the fields.
    ///
    /// # Errors
    /// The first violated condition.
    pub fn check(&self) -> Result<()> {
        const CALL: &str = "product";
        let Product { mnk: [.., k], operands: [a, b], c, rounded, accumulate, bias, .. } = *self;
        let refused = |why: &str| Err(DriverError::Call { call: CALL, why: why.to_owned() });
        if rounded && self.precision != Precision::Bf16 {
            return refused("a result of bf16 from operands of f32");
        }
        if bias.is_some() && (accumulate || k == 0) {
            return refused("a bias on what is added to C, or on sums of nothing");
        }
        let [size, of_c] = [self.dtype(), self.result()].map(|dtype| dtype.size() as u64);
        let places = [("a", Some(a.at), size), ("b", Some(b.at), size), ("c", Some(c), of_c)];
        for (name, at, multiple) in places.into_iter().chain([("bias", bias, BIAS_ALIGNED)]) {
            if let Some(at) = at.filter(|at| !at.0.is_multiple_of(multiple)) {
                return Err(DriverError::Misaligned { call: CALL, name, at: at.0, multiple });
            }
        }
        Ok(())
    }
}

/// An operand of a [`Product`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its address.
    pub at: Address,
    /// Stored as [k, m] instead of [m, k], or as [n, k] instead of [k, n].
    pub transposed: bool,
}

/// A piece of work of a stream, as data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A kernel.
    Launch {
        /// The kernel.
        kernel: Known,
        /// Its grid.
        launch: Launch,
        /// Its arguments.
        args: Vec<Argument>,
    },
    /// A matrix product.
    Product(Product),
    /// A copy within the device, between ranges that do not overlap. Strided rows are copied by a kernel: the driver
    /// guarantees its strided copies only for strides that it chose itself.
    Copy {
        /// Source.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// A copy from the device to pinned memory.
    Save {
        /// Source.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// A copy from pinned memory to the device.
    Load {
        /// Source.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// A fill with zeros.
    Zero {
        /// The first byte.
        at: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// This rank's part in a collective of NCCL.
    Exchange {
        /// The communicator.
        on: NcclComm,
        /// The part.
        exchange: Exchange,
    },
    /// Bytes that nobody needs any more. A GPU does nothing; the emulator fills them with NaN.
    Discard {
        /// The first byte.
        at: Address,
        /// Number of bytes.
        bytes: usize,
    },
}

/// A kernel of the table or a variant, known by its name and file.
#[derive(Clone, Copy, Debug)]
pub struct Known(pub &'static Kernel);

impl PartialEq for Known {
    fn eq(&self, other: &Self) -> bool {
        (self.0.name, self.0.source.name) == (other.0.name, other.0.source.name)
    }
}

impl Eq for Known {}

impl Hash for Known {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

impl Work {
    /// Whether it causes work on a GPU.
    pub fn is_launch(&self) -> bool {
        !matches!(self, Self::Discard { .. })
    }

    /// The name of a kernel or of another piece of work.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Launch { kernel, .. } => kernel.0.name,
            Self::Product(_) => "product",
            Self::Copy { .. } => "copy",
            Self::Save { .. } => "save",
            Self::Load { .. } => "load",
            Self::Zero { .. } => "zero",
            Self::Exchange { exchange, .. } => exchange.name(),
            Self::Discard { .. } => "discard",
        }
    }

    /// Checks the arguments of a kernel or product.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Launch { kernel, args, .. } => check_arguments(kernel.0, args),
            Self::Product(product) => product.check(),
            _ => Ok(()),
        }
    }
}

/// Checks arguments against the table of a kernel.
///
/// # Errors
/// The first argument that does not fit.
pub fn check_arguments(kernel: &'static Kernel, args: &[Argument]) -> Result<()> {
    if args.len() != kernel.args.len() {
        return Err(DriverError::Arguments { kernel: kernel.name, given: args.len(), expected: kernel.args.len() });
    }
    for (at, (given, expected)) in args.iter().zip(kernel.args).enumerate() {
        let fits = match given {
            Argument::Number(of, _) => expected.pass.is_number() && expected.of == *of,
            Argument::Place(_) => !expected.pass.is_number(),
        };
        if fits && expected.pass == Pass::Divisor && given.bits() == 0 {
            return Err(DriverError::Zero { kernel: kernel.name, at, name: expected.name });
        }
        if !fits {
            let (given, name) = (given.to_string(), expected.name);
            return Err(DriverError::Argument { kernel: kernel.name, at, name, given, expected: expected.c_type() });
        }
        let (name, multiple) = (expected.name, expected.multiple());
        if given.bits().is_multiple_of(multiple) {
            continue;
        }
        if given.place().is_some() {
            return Err(DriverError::Misaligned { call: kernel.name, name, at: given.bits(), multiple });
        }
        let (given, expected) = (given.bits().to_string(), format!("a multiple of {multiple}"));
        return Err(DriverError::Argument { kernel: kernel.name, at, name, given, expected });
    }
    Ok(())
}

impl Argument {
    /// The address, unless this is a number or null.
    pub fn place(&self) -> Option<Address> {
        match self {
            Self::Place(at) if *at != Address::NULL => Some(*at),
            _ => None,
        }
    }

    /// The bits of the number or of the address, as passed to a kernel.
    pub fn bits(&self) -> u64 {
        match self {
            Self::Number(_, bits) => *bits,
            Self::Place(at) => at.0,
        }
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(of, _) => write!(f, "a number of type {}", of.c_name()),
            Self::Place(at) => write!(f, "the address {:#x}", at.0),
        }
    }
}
