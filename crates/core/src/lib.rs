#![doc = include_str!("../README.md")]

/// `Debug` of errors is their text, for `unwrap` and for a `main` that returns a `Box<dyn Error>`: the rule of every
/// error of meshwork.
#[macro_export]
macro_rules! debug_as_display {
    ($($error:ty),+ $(,)?) => {
        $(impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        })+
    };
}

/// `From` for an enum, of the values that its variants hold, in a box or not: `?` converts errors, `into` other values.
#[macro_export]
macro_rules! from {
    ($error:ty: $($variant:ident($from:ty)),+ $(,)?) => {
        $(impl ::std::convert::From<$from> for $error {
            fn from(error: $from) -> Self {
                Self::$variant(error.into())
            }
        })+
    };
}

/// Methods of a wrapper that call the same method of the wrapped value:
/// `pass_on! { self.inner => fn name(&self) -> &str; }`.
#[macro_export]
macro_rules! pass_on {
    ($inner:expr => $(fn $name:ident(&$this:ident $(, $arg:ident: $type:ty)*) $(-> $result:ty)?;)+) => {$(
        fn $name(&$this $(, $arg: $type)*) $(-> $result)? {
            $inner.$name($($arg),*)
        }
    )+};
}

/// An enum with the name of each variant beside it, which `name` returns; and `ALL` of them, if that has docs.
#[macro_export]
macro_rules! named {
    ($(#[$attr:meta])* $vis:vis enum $enum:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }
     name: $of_name:literal $(, ALL: $of_all:literal)?) => {
        $(#[$attr])*
        $vis enum $enum {
            $($(#[$doc])* $variant,)+
        }

        impl $enum {
            #[doc = $of_name]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        $crate::named! { @ $enum [$($variant)+] $($of_all)? }
    };
    (@ $enum:ident [$($variant:ident)+]) => {};
    (@ $enum:ident [$($variant:ident)+] $of_all:literal) => {
        impl $enum {
            #[doc = $of_all]
            pub const ALL: [Self; [$(stringify!($variant)),+].len()] = [$(Self::$variant),+];
        }
    };
}

pub mod agreement;
mod axes;
mod buffer;
pub mod comm;
mod dtype;
pub mod exact;
mod flat;
pub mod hash;
pub mod launcher;
mod memory;
mod mesh;
pub mod pool;
pub mod profile;
pub mod random;
mod rank;
mod run_error;
pub mod simd;
mod slow_build;
mod spmd;
#[cfg(not(shuttle))]
mod sync;
#[cfg(shuttle)]
pub mod sync;
pub mod tree;
mod world;

pub use axes::{Axes, Axis};
pub use buffer::{Buffer, BufferError, Window};
pub use comm::{
    Call, Caller, CommError, CommLog, Communicator, Group, Op, OpKind, Pending, Record, ReduceOp, ReductionOrder,
};
pub use dtype::{DType, Element, bf16, f16};
pub use flat::FlatSlice;
pub use memory::{Block, HostMemory, Memory, Recycle};
pub use mesh::{Coords, EXPERT_CONTEXT, EXPERT_DATA, Mesh, MeshError};
pub use rank::Rank;
pub use run_error::{Cause, RankEnd, RunError};
pub use slow_build::slow_build;
pub use spmd::{SpmdError, Ty, Types, rules};
pub use world::World;
