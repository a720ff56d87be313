//! Kernels as data: the source, geometry and arguments of each.

use crate::geometry::Geometry;

/// A file of CUDA C++.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// Its name in `#include` lines.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// The type of an element, or of a number passed by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// `float`.
    F32,
    /// `double`.
    F64,
    /// `unsigned char`: places in windows, bits of eight elements.
    U8,
    /// 16-bit numbers, `unsigned short`: bf16 or f16, according to the kernel's name.
    Bits16,
    /// `int`.
    I32,
    /// `unsigned int`.
    U32,
    /// `long long`: sizes and indices.
    I64,
    /// `unsigned long long`.
    U64,
}

/// How an argument is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// By value.
    Value,
    /// By value; never zero, because the kernel divides by it.
    Divisor,
    /// By value: a stride or extent in 16-bit elements that the kernel reads 16 bytes at a time, so a multiple of
    /// eight.
    Eights,
    /// The address of elements that are read.
    In,
    /// The address of elements that are written, or read and written.
    Out,
    /// As `In`, read 16 bytes at a time without an alignment check; the address must be a multiple of 16.
    InChunks,
    /// As `Out`, written 16 bytes at a time without an alignment check; the address must be a multiple of 16.
    OutChunks,
    /// As `Out`, written two neighbours at a time without an alignment check; the address must be a multiple of the
    /// size of two elements.
    OutPairs,
    /// The address of addresses of elements that are read.
    Ins,
    /// The address of addresses of elements that are written.
    Outs,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arg {
    /// Its name in the source.
    pub name: &'static str,
    /// How it is passed.
    pub pass: Pass,
    /// The type of the number or of the elements.
    pub of: Type,
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its unmangled name.
    pub name: &'static str,
    /// Its source file.
    pub source: &'static Source,
    /// Its launch geometry.
    pub geometry: Geometry,
    /// Its arguments, in order.
    pub args: &'static [Arg],
}

impl Type {
    /// Its name in C++.
    pub fn c_name(self) -> &'static str {
        match self {
            Type::F32 => "float",
            Type::F64 => "double",
            Type::U8 => "unsigned char",
            Type::Bits16 => "unsigned short",
            Type::I32 => "int",
            Type::U32 => "unsigned int",
            Type::I64 => "long long",
            Type::U64 => "unsigned long long",
        }
    }

    /// Its size in bytes.
    pub fn size(self) -> u64 {
        match self {
            Type::U8 => 1,
            Type::Bits16 => 2,
            Type::F32 | Type::I32 | Type::U32 => 4,
            Type::F64 | Type::I64 | Type::U64 => 8,
        }
    }
}

impl Pass {
    /// Whether it is passed as a number, not an address.
    pub fn is_number(self) -> bool {
        matches!(self, Pass::Value | Pass::Divisor | Pass::Eights)
    }

    /// The same without conditions on the number or the address.
    #[must_use]
    pub fn plain(self) -> Self {
        match self {
            Pass::Value | Pass::Divisor | Pass::Eights => Pass::Value,
            Pass::In | Pass::InChunks => Pass::In,
            Pass::Out | Pass::OutChunks | Pass::OutPairs => Pass::Out,
            Pass::Ins | Pass::Outs => self,
        }
    }
}

impl Arg {
    /// Its type in C++.
    pub fn c_type(&self) -> String {
        let of = self.of.c_name();
        match self.pass.plain() {
            Pass::In => format!("const {of}*"),
            Pass::Out => format!("{of}*"),
            Pass::Ins => format!("const {of}* const*"),
            Pass::Outs => format!("{of}* const*"),
            _ => of.to_owned(),
        }
    }

    /// The number, or the address in bytes, is a multiple of this. A GPU faults at an element, or at 16 bytes, that lie
    /// across such a multiple.
    pub fn multiple(&self) -> u64 {
        match self.pass {
            Pass::Value | Pass::Divisor => 1,
            Pass::Eights | Pass::Ins | Pass::Outs => 8,
            Pass::In | Pass::Out => self.of.size(),
            Pass::InChunks | Pass::OutChunks => 16,
            Pass::OutPairs => 2 * self.of.size(),
        }
    }
}

impl Kernel {
    /// The types of its arguments in C++, `const float*, long long`.
    ///
    /// ```
    /// assert_eq!(meshwork_kernels::kernel("add_assign").unwrap().c_types(), "float*, const float*, long long");
    /// ```
    pub fn c_types(&self) -> String {
        self.args.iter().map(Arg::c_type).collect::<Vec<_>>().join(", ")
    }
}
