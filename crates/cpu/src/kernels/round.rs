//! Elements in 16 bits: operands are widened and results rounded, a piece at a time.
//!
//! Kernels compute in f32. A tensor that is stored in 16 bits is read and written in pieces whose f32 copies stay in
//! the caches of the computing core ([`Loaded`], [`Stored`]), so that memory traffic is only 16 bits an element. The
//! bits are the same as with a copy of the whole tensor. Products in [`Precision::Bf16`](meshwork_tensor::Precision)
//! round their operands anyway, and rounding twice changes nothing: an operand rounded when stored gives the same bits
//! as one rounded when read.

use super::gemm;
use super::prelude::*;
use super::traits::Narrow;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use meshwork_core::Block;
use std::borrow::Cow;

/// Number of elements computed at a time before they are rounded; they stay in the L1 cache.
const PIECE: usize = 256;

/// Elements to be rounded, with each vector in one cache line.
#[repr(align(64))]
struct Piece<T>([T; PIECE]);

/// Elements of f32 in a cache line: every copy is aligned to one.
const LINE: usize = 16;

thread_local! {
    /// Memory of this thread for copies in f32, which grows to the largest of them.
    static SPARE: RefCell<Vec<Block>> = const { RefCell::new(Vec::new()) };
}

/// Memory of this thread for copies in f32, given back when dropped.
struct Room(Block);

impl Room {
    /// Memory for as many bytes, with unspecified contents.
    fn of(bytes: usize) -> Room {
        let block = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        Room(if block.bytes() < bytes { Block::zeroed(bytes) } else { block })
    }

    /// Its first elements.
    fn elements<T: bytemuck::Pod>(&mut self, len: usize) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(self.0.as_mut_slice())[..len]
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let block = std::mem::take(&mut self.0);
        // A thread that ends has no memory any more.
        let _ = SPARE.try_with(|spare| spare.borrow_mut().push(block));
    }
}

/// Calls `f` with memory for `len` elements, with unspecified contents. Calls may be nested.
#[inline]
pub(crate) fn with_room<T: bytemuck::Pod, R>(len: usize, f: impl FnOnce(&mut [T]) -> R) -> R {
    f(Room::of(len * size_of::<T>()).elements(len))
}

impl Narrow for f32 {
    fn round(from: &[f32], to: &mut [bf16]) {
        round(from, to);
    }

    fn to_f16(from: &[f32], to: &mut [f16]) {
        to_f16(from, to);
    }

    fn from_bf16(from: &[bf16], to: &mut [f32]) {
        from_bf16(from, to);
    }

    fn from_f16(from: &[f16], to: &mut [f32]) {
        from_f16(from, to);
    }
}

impl Narrow for f64 {}

/// Rounds each to the nearest `bf16`, ties to even, as products in [`Precision::Bf16`](meshwork_tensor::Precision)
/// round their operands: subnormals become zeros of their sign, and NaN stays NaN. The same bits on every CPU.
/// Overwrites `to`.
///
/// Panics if the lengths differ.
///
/// ```
/// use half::bf16;
/// let mut stored = [bf16::ZERO; 3];
/// meshwork_cpu::kernels::round::round(&[1.0, 1.0 + 2_f32.powi(-8), 1e-40], &mut stored);
/// assert_eq!(stored, [bf16::ONE, bf16::ONE, bf16::ZERO]);
/// ```
pub fn round(from: &[f32], to: &mut [bf16]) {
    gemm::round(from, to);
}

/// Converts these values to f32, exactly. Panics if the lengths differ.
pub fn from_bf16(from: &[bf16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    wide(|| to.iter_mut().zip(from).for_each(|(to, from)| *to = f32::from_bits(u32::from(from.to_bits()) << 16)));
}

/// Rounds each to the nearest `f16`, ties to even; values beyond its range become infinity. Panics if the lengths
/// differ.
pub fn to_f16(from: &[f32], to: &mut [f16]) {
    to.convert_from_f32_slice(from);
}

/// Converts these values to f32, exactly. Panics if the lengths differ.
pub fn from_f16(from: &[f16], to: &mut [f32]) {
    from.convert_to_f32_slice(to);
}

/// Contiguous operands, in their stored type.
#[derive(Clone, Copy, Debug)]
pub enum Loaded<'a, T> {
    /// In the compute type.
    Full(&'a [T]),
    /// In 16 bits; only for `f32`.
    Bf16(&'a [bf16]),
    /// In 16 bits; only for `f32`.
    F16(&'a [f16]),
}

/// Runs `$body` with `$x` standing for the slice of a [`Loaded`] or [`Stored`], and wraps the result in the same
/// variant.
macro_rules! within {
    ($of:ident, $self:expr, $x:ident => $body:expr) => {
        match $self {
            $of::Full($x) => $of::Full($body),
            $of::Bf16($x) => $of::Bf16($body),
            $of::F16($x) => $of::F16($body),
        }
    };
}

impl<'a, T: Copy> Loaded<'a, T> {
    /// The number of elements.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        match self {
            Loaded::Full(x) => x.len(),
            Loaded::Bf16(x) => x.len(),
            Loaded::F16(x) => x.len(),
        }
    }

    /// Some of the elements. Panics if the range is out of bounds.
    pub fn part(self, range: Range<usize>) -> Loaded<'a, T> {
        within!(Loaded, self, x => &x[range])
    }

    /// Consecutive parts of `len` elements; the last part has the remainder. Panics if `len` is zero.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Loaded<'a, T>> {
        let whole = self.len();
        (0..whole).step_by(len).map(move |at| self.part(at..whole.min(at + len)))
    }
}

impl<'a, T: Float> Loaded<'a, T> {
    /// All elements, widened: for small operands that many pieces read.
    pub fn whole(self) -> Cow<'a, [T]> {
        if let Loaded::Full(x) = self {
            return Cow::Borrowed(x);
        }
        let mut all = vec![T::ZERO; self.len()];
        self.widen(&mut all);
        Cow::Owned(all)
    }

    /// Writes all elements, widened.
    pub(crate) fn widen(self, to: &mut [T]) {
        match self {
            Loaded::Full(x) => to.copy_from_slice(x),
            Loaded::Bf16(x) => T::from_bf16(x, to),
            Loaded::F16(x) => T::from_f16(x, to),
        }
    }
}

/// Calls `f` with all elements of each operand, widened. Panics for 16 bits if `T` is not `f32`.
#[inline]
pub fn read<'a, T: Float, const N: usize, R>(operands: [Loaded<'a, T>; N], f: impl FnOnce([&[T]; N]) -> R) -> R {
    with_room(room_of(&operands), |room| {
        let mut all = [&[][..]; N];
        widen_into(&operands, room, &mut all);
        f(all)
    })
}

/// Elements of the copies that [`widen_into`] makes.
fn room_of<T: Float>(operands: &[Loaded<'_, T>]) -> usize {
    let copied = |x: &Loaded<'_, T>| if let Loaded::Full(_) = x { 0 } else { x.len().next_multiple_of(LINE) };
    operands.iter().map(copied).sum()
}

/// All elements of each operand: itself, or a copy in `room`.
fn widen_into<'a, T: Float>(operands: &[Loaded<'a, T>], mut room: &'a mut [T], all: &mut [&'a [T]]) {
    for (operand, all) in operands.iter().zip(all) {
        *all = match *operand {
            Loaded::Full(x) => x,
            half => {
                let (copy, rest) = room.split_at_mut(half.len().next_multiple_of(LINE));
                room = rest;
                let copy = &mut copy[..half.len()];
                half.widen(copy);
                copy
            }
        }
    }
}

/// The destination of results, as contiguous elements.
#[derive(Debug)]
pub enum Stored<'a, T> {
    /// In the compute type.
    Full(&'a mut [T]),
    /// Rounded by [`round`]; only for `f32`.
    Bf16(&'a mut [bf16]),
    /// Rounded by [`to_f16`]; only for `f32`.
    F16(&'a mut [f16]),
}

impl<'a, T> Stored<'a, T> {
    /// The number of elements.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        match self {
            Stored::Full(to) => to.len(),
            Stored::Bf16(to) => to.len(),
            Stored::F16(to) => to.len(),
        }
    }

    /// The same destination, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> Stored<'_, T> {
        within!(Stored, self, to => to)
    }

    /// Some of the elements. Panics if the range is out of bounds.
    pub fn part(self, range: Range<usize>) -> Stored<'a, T> {
        within!(Stored, self, to => &mut to[range])
    }

    /// The current contents.
    pub(crate) fn loaded(&self) -> Loaded<'_, T> {
        match self {
            Stored::Full(to) => Loaded::Full(to),
            Stored::Bf16(to) => Loaded::Bf16(to),
            Stored::F16(to) => Loaded::F16(to),
        }
    }

    /// The first `len` elements, and the elements after them. Panics if there are fewer.
    pub fn split_at(self, len: usize) -> (Stored<'a, T>, Stored<'a, T>) {
        match self {
            Stored::Full(to) => {
                let (first, rest) = to.split_at_mut(len);
                (Stored::Full(first), Stored::Full(rest))
            }
            Stored::Bf16(to) => {
                let (first, rest) = to.split_at_mut(len);
                (Stored::Bf16(first), Stored::Bf16(rest))
            }
            Stored::F16(to) => {
                let (first, rest) = to.split_at_mut(len);
                (Stored::F16(first), Stored::F16(rest))
            }
        }
    }

    /// Consecutive parts of `len` elements; the last part has the remainder. Panics if `len` is zero.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Stored<'a, T>> {
        assert!(len > 0, "parts of no elements");
        let mut rest = Some(self);
        std::iter::from_fn(move || {
            let whole = rest.take().filter(|rest| rest.len() > 0)?;
            let len = len.min(whole.len());
            let (part, after) = whole.split_at(len);
            rest = Some(after);
            Some(part)
        })
    }
}

impl<T: Float> Stored<'_, T> {
    /// Calls `f` with memory for the elements, all of which it must write, and rounds them. Panics for 16 bits if `T`
    /// is not `f32`.
    #[inline]
    pub fn write<R>(self, f: impl FnOnce(&mut [T]) -> R) -> R {
        if let Stored::Full(to) = self {
            return f(to);
        }
        with_room(self.len(), |room| {
            let result = f(room);
            self.round(room);
            result
        })
    }

    /// The same, with the current contents.
    #[inline]
    pub fn update<R>(self, f: impl FnOnce(&mut [T]) -> R) -> R {
        if let Stored::Full(to) = self {
            return f(to);
        }
        with_room(self.len(), |room| {
            self.loaded().widen(room);
            let result = f(room);
            self.round(room);
            result
        })
    }

    /// Rounds these elements into the destination.
    pub(crate) fn round(self, from: &[T]) {
        match self {
            Stored::Full(to) => to.copy_from_slice(from),
            Stored::Bf16(to) => T::round(from, to),
            Stored::F16(to) => T::to_f16(from, to),
        }
    }

    /// Fills it by `compute`, which gets the index of the first element and memory for some elements.
    ///
    /// Panics for 16 bits if `T` is not `f32`.
    #[inline(always)]
    pub fn fill(self, compute: impl FnMut(usize, &mut [T])) {
        match self {
            Stored::Full(to) => {
                let mut compute = compute;
                compute(0, to);
            }
            Stored::Bf16(to) => in_pieces(to, compute, T::round),
            Stored::F16(to) => in_pieces(to, compute, T::to_f16),
        }
    }
}

/// Fills `to` in pieces that are rounded while they are in the L1 cache.
#[inline(always)]
fn in_pieces<T: Float, H>(to: &mut [H], mut compute: impl FnMut(usize, &mut [T]), round: impl Fn(&[T], &mut [H])) {
    let Piece(piece) = &mut Piece([T::ZERO; PIECE]);
    let (whole, rest) = to.as_chunks_mut::<PIECE>();
    let last = whole.len() * PIECE;
    // A separate loop, in which the compiler knows the length.
    for (i, to) in whole.iter_mut().enumerate() {
        compute(i * PIECE, piece);
        round(piece, to);
    }
    if !rest.is_empty() {
        let piece = &mut piece[..rest.len()];
        compute(last, piece);
        round(piece, rest);
    }
}

/// Contiguous elements that can be split.
pub(crate) trait Cut: Sized {
    /// The first `len` elements, and the remaining ones. Panics if there are fewer.
    fn cut_at(self, len: usize) -> (Self, Self);
}

impl<T> Cut for &[T] {
    fn cut_at(self, len: usize) -> (Self, Self) {
        self.split_at(len)
    }
}

impl<T> Cut for &mut [T] {
    fn cut_at(self, len: usize) -> (Self, Self) {
        self.split_at_mut(len)
    }
}

impl<T: Copy> Cut for Loaded<'_, T> {
    fn cut_at(self, len: usize) -> (Self, Self) {
        (self.part(0..len), self.part(len..self.len()))
    }
}

impl<T> Cut for Stored<'_, T> {
    fn cut_at(self, len: usize) -> (Self, Self) {
        self.split_at(len)
    }
}
