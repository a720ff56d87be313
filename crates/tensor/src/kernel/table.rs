//! The table of kernels: [`kernels!`] states each method once, and generates the trait and its implementations for the
//! device without values and for three devices that wrap another one.
//!
//! ```text
//! fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer>
//!     | profile(Pointwise: x, bias), halves(alike x, bias -> x), meta(like x);
//! ```
//!
//! | clause | for | says |
//! |---|---|---|
//! | `profile(Class: x, bias)` | [`Profiled`] | the class of the span, and the memory that the call reads; the returned memory is written. Memory that is read and written is named twice |
//! | `profile(= Traffic::..)` | | the span, if it has another name or moves other bytes |
//! | `halves(as_is)` | [`Widened`] | every device takes operands in 16 bits, and rounds its results itself |
//! | `halves(wide x -> x)` | | these operands are copied to f32; the (first) result is rounded to the type of `x` |
//! | `halves(alike x, bias -> x)` | | the same, but only where these operands differ in type. `=> stored`: the result gets the type of that argument. `; sum`: an operand to which the result is added |
//! | `halves(factor x, w -> w)` | | `wide` for operands of a product, which an inner device may take in 16 bits |
//! | `halves(alike x, y else {..})` | | the operands that differ in type are treated by this code |
//! | `halves({..})` | | this code, for every call |
//! | `meta(x => n, F32 => m)` | [`Meta`] | the results: n elements of the type of `x`, m in f32. `like x`: the type and number of x. `nothing`: no result |
//! | `meta(flops Matmul: n; ..)` | | the floating point operations. `scratch x => n; ..`: memory that the call itself needs |
//! | `meta(= ..)` | | the result, or an error |
//! | `proxy(default)` | [`Proxy`](crate::Proxy) | the trait's default method is used, not the inner device's |
//! | `default {..}` | the trait | the body of a provided method |

pub(super) use super::operand::Operand;
pub(super) use super::traffic::Traffic;
pub(super) use crate::device::{Device, Work};
pub(super) use crate::error::Result;
pub(super) use crate::meta::{Meta, Typed};
pub(super) use crate::profiled::Profiled;
pub(super) use crate::proxy::{Proxy, hidden};
pub(super) use crate::widened::{Widened, are_alike};
pub(super) use meshwork_core::DType::{F32, F64, I32, U8};
pub(super) use meshwork_core::profile::Class;
pub(super) use std::fmt::Debug;

/// See the [module](self).
macro_rules! kernels {
    (
        $(#[$on_trait:meta])*
        pub trait $Trait:ident at $family:ident {$(
            $(#[$on:meta])*
            fn $name:ident(&$this:ident $(, $arg:ident: $type:ty)* $(,)?) -> Result<$result:ty>
                | profile($($profile:tt)*), halves($($halves:tt)*), meta($($meta:tt)*) $(, proxy($proxy:ident))?
                $(| default $default:block)?;
        )*}
    ) => {
        $(#[$on_trait])*
        pub trait $Trait: Debug {$(
            kernels! { @declare [$(#[$on])* fn $name(&$this $(, $arg: $type)*) -> Result<$result>] $($default)? }
        )*}

        #[expect(clippy::allow_attributes, reason = "not every method leaves an operand unused")]
        impl $Trait for Meta {$(
            #[allow(unused_variables)]
            fn $name(&$this $(, $arg: $type)*) -> Result<$result> {
                kernels!(@meta $this $($meta)*)
            }
        )*}

        impl $Trait for Profiled {$(
            fn $name(&$this $(, $arg: $type)*) -> Result<$result> {
                let traffic = kernels!(@traffic $name $($profile)*);
                $this.record(traffic, |device| device.$family()?.$name($($arg),*))
            }
        )*}

        impl $Trait for Widened {$(
            fn $name(&$this $(, $arg: $type)*) -> Result<$result> {
                kernels!(@halves $this $name [$($arg)*] { $this.inner.$family()?.$name($($arg),*) } $($halves)*)
            }
        )*}

        impl<P: Proxy> $Trait for P {$(
            kernels! { @proxy $($proxy)? [fn $name(&$this $(, $arg: $type)*) -> Result<$result>] {
                $this.begin(stringify!($name));
                hidden($this, kernels!(@lend $this [$($arg)*] { $this.inner().$family()?.$name($($arg),*) }))
            } }
        )*}
    };

    (@declare [$($method:tt)*]) => { $($method)*; };
    (@declare [$($method:tt)*] $default:block) => { $($method)* $default };

    (@traffic $name:ident = $what:expr) => { $what };
    (@traffic $name:ident Compression: $($read:expr),*) => { Traffic::compression(stringify!($name), &[$(&*$read),*]) };
    (@traffic $name:ident $Class:ident: $($read:expr),* $(; $sum:ident)?) => {
        Traffic::call(Class::$Class, stringify!($name), &[$(&*$read),*]) $(.reading($sum.as_ref()))?
    };

    (@meta $this:ident = $result:expr) => { $result };
    (@meta $this:ident nothing) => { Ok(()) };
    (@meta $this:ident like $x:ident) => { $this.alloc($x.dtype(), $x.count()) };
    (@meta $this:ident flops $Work:ident: $flops:expr; $($rest:tt)*) => {{
        $this.meter().add_flops(Work::$Work, $flops);
        kernels!(@meta $this $($rest)*)
    }};
    (@meta $this:ident scratch $of:expr => $count:expr; $($rest:tt)*) => {{
        let _scratch = $this.alloc($of.typed(), $count)?;
        kernels!(@meta $this $($rest)*)
    }};
    (@meta $this:ident $of:expr => $count:expr) => { $this.alloc($of.typed(), $count) };
    (@meta $this:ident $($of:expr => $count:expr),*) => { Ok([$($this.alloc($of.typed(), $count)?),*].into()) };

    (@halves $this:ident $name:ident $args:tt $call:block as_is) => { $call };
    (@halves $this:ident $name:ident $args:tt $call:block $own:block) => { $own };
    (@halves $this:ident $name:ident $args:tt $call:block alike $($x:ident),* else $own:block) => {
        if are_alike(&[$(&*$x),*]) { $call } else { $own }
    };
    (@halves $this:ident $name:ident $args:tt $call:block factor $($x:ident),* -> $to:ident) => {{
        let to = $to.dtype();
        $(let $x = &$this.factor($x)?;)*
        $this.rounded($call?, to)
    }};
    (@halves $this:ident $name:ident $args:tt $call:block wide $($x:ident),*) => {{
        $(let $x = &$this.wide($x)?;)*
        $call
    }};
    (@halves $this:ident $name:ident $args:tt $call:block wide $($x:ident),* -> $to:ident) => {{
        let to = $to.dtype();
        $(let $x = &$this.wide($x)?;)*
        $this.rounded($call?, to)
    }};
    (@halves $this:ident $name:ident $args:tt $call:block alike $($x:ident),* -> $to:ident) => {{
        let to = $to.dtype();
        let [$($x),*] = &$this.alike([$($x),*])?;
        $this.rounded($call?, to)
    }};
    (@halves $this:ident $name:ident $args:tt $call:block alike $($x:ident),*; $sum:ident -> $to:ident) => {{
        let to = $to.dtype();
        let (operands, $sum) = $this.alike_with([$($x),*], $sum)?;
        let [$($x),*] = &operands;
        $this.rounded($call?, to)
    }};
    (@halves $this:ident $name:ident $args:tt $call:block alike $first:ident $(, $x:ident)* => $stored:ident) => {{
        let [$first $(, $x)*] = &$this.alike([$first $(, $x)*])?;
        let (to, $stored) = ($stored, $this.stored($first.dtype(), $stored));
        $this.rounded($call?, to)
    }};

    (@proxy [$($method:tt)*] $body:block) => { $($method)* $body };
    (@proxy default [$($method:tt)*] $body:block) => {};

    (@lend $this:ident [] $call:block) => { $call };
    (@lend $this:ident [$arg:ident $($rest:ident)*] $call:block) => {
        Operand::lend($arg, $this, |$arg| kernels!(@lend $this [$($rest)*] $call))
    };
}
