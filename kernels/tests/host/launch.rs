//! Launches of kernels by name, with arguments held against the table.

use bytemuck::Pod;
use half::{bf16, f16};
use meshwork_kernels::host::Host;
use meshwork_kernels::{Kernel, Launch, Pass, Type};
use std::ffi::c_void;

/// Orders of threads that every launch runs in: as numbered, reversed, and one at random.
const ORDERS: [u64; 3] = [0, 1, 7];

/// An element or number that kernels take.
pub trait Element: Pod {
    const TYPE: Type;
}

/// An argument.
pub enum Given<'a> {
    Number(Type, u64),
    In(Type, *const c_void),
    Out(Type, &'a mut [u8]),
    Ins(Type, Vec<*const c_void>),
    Outs(Type, Vec<&'a mut [u8]>),
}

macro_rules! elements {
    ($($t:ty => $of:ident),*) => { $(impl Element for $t { const TYPE: Type = Type::$of; })* };
}
elements!(u8 => U8, f32 => F32, f64 => F64, bf16 => Bits16, f16 => Bits16, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

macro_rules! numbers {
    ($($t:ty),*) => { $(impl From<$t> for Given<'_> {
        fn from(value: $t) -> Self {
            let mut bytes = [0; 8];
            bytes[..size_of::<$t>()].copy_from_slice(bytemuck::bytes_of(&value));
            Given::Number(<$t>::TYPE, u64::from_ne_bytes(bytes))
        }
    })* };
}
numbers!(f32, f64, i32, u32, i64, u64);

impl From<usize> for Given<'_> {
    fn from(value: usize) -> Self {
        (value as i64).into()
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for Given<'a> {
    fn from(x: &'a Vec<T>) -> Self {
        Given::In(T::TYPE, x.as_ptr().cast())
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for Given<'a> {
    fn from(x: &'a mut Vec<T>) -> Self {
        Given::Out(T::TYPE, bytemuck::cast_slice_mut(x))
    }
}

impl<'a, T: Element> From<&'a [Vec<T>]> for Given<'a> {
    fn from(x: &'a [Vec<T>]) -> Self {
        Given::Ins(T::TYPE, x.iter().map(|x| x.as_ptr().cast()).collect())
    }
}

impl<'a, T: Element> From<&'a mut [Vec<T>]> for Given<'a> {
    fn from(x: &'a mut [Vec<T>]) -> Self {
        Given::Outs(T::TYPE, x.iter_mut().map(|x| bytemuck::cast_slice_mut(x.as_mut_slice())).collect())
    }
}

/// Elements from a place on, as a kernel gets keys and values of one tensor.
#[derive(Clone, Copy)]
pub struct At<'a, T>(pub &'a Vec<T>, pub usize);

impl<'a, T: Element> From<At<'a, T>> for Given<'a> {
    fn from(At(x, at): At<'a, T>) -> Self {
        Given::In(T::TYPE, x[at..].as_ptr().cast())
    }
}

/// The same, written.
pub struct AtMut<'a, T>(pub &'a mut Vec<T>, pub usize);

impl<'a, T: Element> From<AtMut<'a, T>> for Given<'a> {
    fn from(AtMut(x, at): AtMut<'a, T>) -> Self {
        Given::Out(T::TYPE, bytemuck::cast_slice_mut(&mut x[at..]))
    }
}

/// No address, where a kernel takes that for "none".
pub struct Null;

impl From<Null> for Given<'_> {
    fn from(_: Null) -> Self {
        Given::In(Type::F32, std::ptr::null())
    }
}

impl<'a> Given<'a> {
    fn what(&self) -> (Pass, Type) {
        match self {
            Given::Number(of, _) => (Pass::Value, *of),
            Given::In(of, _) => (Pass::In, *of),
            Given::Out(of, _) => (Pass::Out, *of),
            Given::Ins(of, _) => (Pass::Ins, *of),
            Given::Outs(of, _) => (Pass::Outs, *of),
        }
    }

    /// What the kernel may write.
    fn written(&mut self) -> &mut [&'a mut [u8]] {
        match self {
            Given::Out(_, bytes) => std::slice::from_mut(bytes),
            Given::Outs(_, all) => all,
            _ => &mut [],
        }
    }
}

/// `launch!(kernel, [items, width], argument, ..)`: false if there is no library.
#[macro_export]
macro_rules! launch {
    ($name:expr, $sizes:expr, $($given:expr),+ $(,)?) => {
        $crate::launch::launch($name, $sizes, vec![$($crate::launch::Given::from($given)),+])
    };
}

/// Launches a kernel for `[items, width]` of its geometry. False if there is no library; panics if the launch fails.
#[track_caller]
pub fn launch(name: &str, sizes: [usize; 2], given: Vec<Given<'_>>) -> bool {
    let usual = || {
        let kernel = meshwork_kernels::kernel(name).unwrap_or_else(|| panic!("no kernel {name}"));
        Some((crate::build::library()?, kernel))
    };
    let Some((library, kernel)) = crate::build::form_of(name).or_else(usual) else { return false };
    try_launch(library, kernel, sizes, given).unwrap_or_else(|why| panic!("{name}: {why}"));
    true
}

/// Launches a kernel of a library in every order of threads.
///
/// # Errors
/// Why the launch failed, or that two orders gave different results.
pub fn try_launch(
    library: &Host,
    kernel: &Kernel,
    [items, width]: [usize; 2],
    mut given: Vec<Given<'_>>,
) -> Result<(), String> {
    assert_eq!(given.len(), kernel.args.len(), "arguments of {}", kernel.name);
    for (given, arg) in given.iter().zip(kernel.args) {
        let pass = arg.pass.plain();
        let none = matches!(given, Given::In(_, at) if at.is_null()) && matches!(pass, Pass::In | Pass::Out);
        assert!(none || given.what() == (pass, arg.of), "{} of {}: {:?}", arg.name, kernel.name, given.what());
    }
    let Some(grid) = kernel.geometry.launch(items as u64, width as u64) else { return Ok(()) };
    let contents = |given: &mut [Given<'_>]| -> Vec<Vec<u8>> {
        given.iter_mut().flat_map(|given| given.written().iter().map(|bytes| bytes.to_vec())).collect()
    };
    let before = contents(&mut given);
    let mut first: Option<Vec<Vec<u8>>> = None;
    // Sanitizers watch one order: what they look for does not depend on it, and takes five times as long.
    let orders = if crate::build::sanitized() { &ORDERS[2..] } else { &ORDERS[..] };
    for &order in orders {
        let places = given.iter_mut().flat_map(|given| given.written().iter_mut());
        places.zip(&before).for_each(|(bytes, before)| bytes.copy_from_slice(before));
        call(library, kernel, grid, order, &mut given)?;
        let after = contents(&mut given);
        if first.get_or_insert_with(|| after.clone()) != &after {
            return Err(format!("results depend on the order of threads: that of seed {order} has others"));
        }
    }
    Ok(())
}

fn call(library: &Host, kernel: &Kernel, launch: Launch, order: u64, given: &mut [Given<'_>]) -> Result<(), String> {
    // As cuLaunchKernel has them: the address of each argument, which is a number, an address, or that of addresses.
    let mut lists: Vec<Vec<*const c_void>> = Vec::new();
    let mut values: Vec<u64> = Vec::new();
    for given in given {
        values.push(match given {
            Given::Number(_, bits) => *bits,
            Given::In(_, at) => *at as u64,
            Given::Out(_, bytes) => bytes.as_mut_ptr() as u64,
            Given::Ins(_, all) => {
                lists.push(all.clone());
                lists[lists.len() - 1].as_ptr() as u64
            }
            Given::Outs(_, all) => {
                lists.push(all.iter_mut().map(|bytes| bytes.as_mut_ptr().cast_const().cast()).collect());
                lists[lists.len() - 1].as_ptr() as u64
            }
        });
    }
    // SAFETY: every argument has the type of the table, and buffers are as large as the kernel's head says, or the
    // sanitizer reports it.
    unsafe { library.launch(kernel, launch, &mut values, order) }
}
