//! Matrix products: our own for `f32` where the CPU has AVX-512 or AVX2, `matrixmultiply` elsewhere.
//!
//! `C[m, n] = A[m, k] · B[k, n]`, each operand a slice with a row and a column stride, so that transposes and slices of
//! larger matrices need no copy. Both implementations cut `k` into blocks of 256, sum each block in order and add the
//! blocks to `C` in order, whatever `m`, `n` and the strides: an element of `C` has the same bits in every product that
//! contains it, alone or [shared](gemm_shared) by any number of threads. The two implementations may differ from each
//! other. `matrixmultiply` allocates its packing buffer per call, ours once per thread.
//!
//! More than 400 lines: the assertions of the entry points are the requirements of the unsafe calls below, and both are
//! read together.

mod few_rows;
mod reduction_blocks;
mod transposed;

pub use super::gemm::FEW_ROWS;
pub use super::update::{Strides, Update};
pub use reduction_blocks::{Summand, gemm_blocks, gemm_runs, gemm_sum};

use super::gemm::{self, Elements, Finish as _, PackedPart, Path, Right};
use super::prelude::*;
use super::traits::{Product, Routine, Sums};
use super::{gelu, pointwise, swiglu};
use half::{bf16, f16};
use meshwork_core::Block;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::tf32;
use std::borrow::Cow;
use std::thread::LocalKey;

/// An operand of a product: a matrix with these (row, column) strides.
#[derive(Clone, Copy, Debug)]
pub enum MatmulOperand<'a, T> {
    /// Stored in the type of the product.
    Full(&'a [T], Strides),
    /// Stored in `bf16`; only for products of `f32`, which give the same bits with the operand in full. Packing widens
    /// it, so that no copy of the whole exists.
    Rounded(&'a [bf16], Strides),
}

/// The factors of a product `A · B` for `[m, n, k]`, `A` being m by k and `B` k by n.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a, T> {
    /// How the product rounds them.
    pub precision: Precision,
    /// `[m, n, k]`.
    pub dims: [usize; 3],
    /// The left one.
    pub a: MatmulOperand<'a, T>,
    /// The right one.
    pub b: MatmulOperand<'a, T>,
}

/// An operation on the elements of a C with contiguous rows, executed as soon as they are complete, while they are in
/// the cache.
#[derive(Debug)]
pub enum Epilogue<'a, T> {
    /// No operation.
    Nothing,
    /// `C[i, j] += bias[j]`: bitwise identical to [`pointwise::bias`] after the product.
    Bias(&'a [T]),
    /// `out[i, j] = gelu(C[i, j] + bias[j])`, where `out` has the layout of C: bitwise identical to [`gelu::bias_gelu`]
    /// after the product. C keeps the product.
    BiasGelu(&'a [T], Stored<'a, T>),
    /// `out[i, j] = silu(C[i, 2j]) · C[i, 2j + 1]`, where the rows of `out` are half as long as those of C, which are
    /// even: bitwise identical to [`swiglu::swiglu`] after the product. C keeps the product.
    Swiglu(Stored<'a, T>),
}

/// `C = A · B` or `C += A · B`, on this thread.
///
/// Panics if an operand is shorter than its dims and strides require, if an operand is stored rounded but the product
/// is not one of `f32`, or if elements of `C` overlap or have gaps along both rows and columns. With `k = 0` the
/// product is zero.
pub fn gemm<T: Float>(factors: Factors<'_, T>, c: (&mut [T], Strides), update: Update) {
    serial(factors, None, c, update, Epilogue::Nothing);
}

/// [`gemm`] over `matrixmultiply`, with the bits that it has where the CPU has neither AVX-512 nor AVX2. Panics as
/// [`gemm`] does.
pub fn gemm_portable<T: Float>(factors: Factors<'_, T>, (c, strides): (&mut [T], Strides), update: Update) {
    factors.check();
    check_c(factors.dims, strides, c.len());
    // SAFETY: A, B and C lie inside their slices, strides fit isize, elements of C do not overlap, and C is borrowed
    // mutably, so it overlaps neither A nor B.
    unsafe { portable(factors, (c.as_mut_ptr(), strides), update) }
}

/// Products with fewer multiplications are not shared: at 50 per ns they take 80 µs, of which waking a thread and
/// separate packing would be a large part.
const SHARED: usize = 1 << 22;

/// Up to this many words of B are packed at once for all threads: 8 MiB, which stays in the last-level cache.
const PACKED: usize = 1 << 21;

/// Columns of B packed at once for all threads; beyond that, terms are cut.
const COLUMNS: usize = 4 * gemm::N_BLOCK;

/// Largest number of multiplications of a block of C: about a millisecond, so that threads can join and leave soon.
const BLOCK: usize = 50 << 20;

/// Least number of blocks of C per thread, so that a late or slow thread delays the others little.
const BLOCKS: usize = 4;

/// With fewer rows of C, reading a packed B per block does not pay.
const ROWS: usize = 28;

/// [`gemm`] for a row-major C, then `epilogue`, shared with the free threads. The bits are the same.
///
/// B is packed first, in pieces that the threads share, then every thread multiplies blocks of rows of A with all of
/// it. If B is too large for the cache, its columns and terms are processed in parts.
pub fn gemm_shared<T: Float>(factors: Factors<'_, T>, c: &mut [T], update: Update, epilogue: Epilogue<'_, T>) {
    let [m, n, k] = factors.dims;
    if few_rows::few(m) {
        return few_rows::product(factors, c, update, epilogue);
    }
    if few_rows::are_columns(factors) && matches!(epilogue, Epilogue::Nothing) {
        return few_rows::transposed(factors, c, update);
    }
    if transposed::pays(factors, update, &epilogue) {
        return transposed::product(factors, c);
    }
    let threads = pool::threads();
    if threads == 1 || m.saturating_mul(n).saturating_mul(k) < SHARED {
        serial(factors, None, (c, (n, 1)), update, epilogue);
    } else {
        gemm_cut(threads, factors, c, update, epilogue);
    }
}

/// [`gemm_shared`] as it is cut for `threads` threads, for a product of at least one element and term of any size. The
/// bits are the same.
pub fn gemm_cut<T: Float>(
    threads: usize,
    factors: Factors<'_, T>,
    c: &mut [T],
    update: Update,
    mut epilogue: Epilogue<'_, T>,
) {
    factors.check();
    let Factors { precision, dims: [m, n, k], a, b } = factors;
    assert_inside("C", m, n, (n, 1), c.len());
    epilogue.check(m, n, n);
    let path = T::path(precision);
    let (terms, columns) = if path.is_some() { at_once(n, k) } else { (k, n) };
    let rows = rows(threads, [m, columns, terms]);
    // Taken out of the cell, because other work may run on this thread meanwhile.
    let mut packed = Packed { dims: [0, 0], memory: MEMORY.take() };
    for (j, columns) in parts(n, columns) {
        for (l, terms) in parts(k, terms) {
            let update = if l > 0 { Update::Accumulate } else { update };
            let b = b.from(l, j);
            let packed = path.map(|path| {
                packed.dims = [terms, columns];
                pool::for_each(packed.parts(path), |part| pack(path, b, part));
                &packed
            });
            let blocks = c[..m * n].chunks_mut(rows * n).zip(epilogue.parts(rows * n, j, l + terms == k));
            pool::for_each(blocks.enumerate(), |(block, (c, epilogue))| {
                let dims = [c.len() / n, columns, terms];
                let factors = Factors { precision, dims, a: a.from(block * rows, l), b };
                serial(factors, packed, (&mut c[j..], (n, 1)), update, epilogue);
            });
        }
    }
    MEMORY.set(packed.memory);
}

/// Rows of a block of C: as even as possible, so that every thread has the same number of blocks and none waits for the
/// last block of another.
fn rows(threads: usize, [m, n, k]: [usize; 3]) -> usize {
    let blocks = m.saturating_mul(n).saturating_mul(k).div_ceil(threads * BLOCK).max(BLOCKS);
    m.div_ceil(threads * blocks.min(m / (threads * ROWS)).max(1))
}

/// Terms and columns of B to pack at once.
fn at_once(n: usize, k: usize) -> (usize, usize) {
    let terms = (PACKED / n.min(COLUMNS)).next_multiple_of(gemm::K_BLOCK).min(k);
    (terms, (PACKED / terms).next_multiple_of(gemm::N_BLOCK).min(n))
}

/// Cuts `0..len` into parts of length `part` and a remainder: (start, length).
fn parts(len: usize, part: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(part).map(move |at| (at, part.min(len - at)))
}

impl<'a, T: Float> MatmulOperand<'a, T> {
    fn strides(self) -> Strides {
        match self {
            MatmulOperand::Full(_, strides) | MatmulOperand::Rounded(_, strides) => strides,
        }
    }

    fn transposed(self) -> Self {
        match self {
            MatmulOperand::Full(x, (row, column)) => MatmulOperand::Full(x, (column, row)),
            MatmulOperand::Rounded(x, (row, column)) => MatmulOperand::Rounded(x, (column, row)),
        }
    }

    /// The part from this row and column on; empty if there are no elements.
    pub(crate) fn from(self, row: usize, column: usize) -> Self {
        let (row_stride, column_stride) = self.strides();
        self.part(row * row_stride + column * column_stride)
    }

    /// The matrix with the same strides that begins at this element; empty if there are no elements.
    pub fn part(self, at: usize) -> Self {
        match self {
            MatmulOperand::Full(x, strides) => MatmulOperand::Full(x.get(at..).unwrap_or_default(), strides),
            MatmulOperand::Rounded(x, strides) => MatmulOperand::Rounded(x.get(at..).unwrap_or_default(), strides),
        }
    }

    /// Panics unless this is a matrix with these numbers of rows and columns, stored for a product of `T`.
    fn check(self, name: &str, [rows, columns]: [usize; 2]) {
        let len = match self {
            MatmulOperand::Full(x, _) => x.len(),
            MatmulOperand::Rounded(x, _) => {
                let product = std::any::type_name::<T>();
                assert!(T::WIDENS, "{name}: stored in bf16, but a product of {product} reads {product} alone");
                x.len()
            }
        };
        assert_inside(name, rows, columns, self.strides(), len);
    }

    /// The start of the elements of an `f32` operand.
    fn elements(self) -> (Elements, Strides) {
        match self {
            MatmulOperand::Full(x, strides) => (Elements::Full(x.as_ptr().cast()), strides),
            MatmulOperand::Rounded(x, strides) => (Elements::Rounded(x.as_ptr()), strides),
        }
    }

    /// The elements, rounded as in the product.
    fn in_precision(self, precision: Precision) -> Cow<'a, [T]> {
        match self {
            MatmulOperand::Full(x, _) if !T::rounds(precision) => Cow::Borrowed(x),
            MatmulOperand::Full(x, _) => x.iter().map(|x| x.in_precision(precision)).collect(),
            MatmulOperand::Rounded(x, _) => x.iter().map(|x| T::from(x.to_f32()).in_precision(precision)).collect(),
        }
    }
}

impl<T: Float> Factors<'_, T> {
    /// Panics unless both fit the dims and the type.
    fn check(self) {
        let Factors { dims: [m, n, k], a, b, .. } = self;
        a.check("A", [m, k]);
        b.check("B", [k, n]);
    }
}

impl<T: Float> Epilogue<'_, T> {
    /// Panics if it does not fit a C of m rows and n columns with rows `c_row` apart.
    fn check(&self, m: usize, n: usize, c_row: usize) {
        if let Epilogue::Bias(bias) | Epilogue::BiasGelu(bias, _) = self {
            assert_inside("bias", 1, n, (0, 1), bias.len());
        }
        if let Epilogue::BiasGelu(_, out) = self {
            assert_inside("out", m, n, (c_row, 1), out.len());
        }
        if let Epilogue::Swiglu(out) = self {
            assert!(n.is_multiple_of(2) && c_row.is_multiple_of(2), "C: {n} columns, rows {c_row} apart, are no pairs");
            assert_inside("out", m, n / 2, (c_row / 2, 1), out.len());
        }
    }

    /// The epilogues of the consecutive parts of a C that are `len` elements long, from column j on: `Nothing` unless
    /// `last`.
    fn parts(&mut self, len: usize, j: usize, last: bool) -> impl Iterator<Item = Epilogue<'_, T>> + Send {
        let (bias, out, halves) = match self {
            Epilogue::Bias(bias) if last => (Some(&bias[j..]), None, 2),
            Epilogue::BiasGelu(bias, out) if last => (Some(&bias[j..]), Some(out.reborrow()), 2),
            Epilogue::Swiglu(out) if last => (None, Some(out.reborrow()), 1),
            _ => (None, None, 2),
        };
        let mut outs = out.map(|out| out.chunks(len * halves / 2));
        std::iter::from_fn(move || {
            let out = if let Some(outs) = &mut outs { Some(outs.next()?.split_at(j * halves / 2).1) } else { None };
            Some(match (bias, out) {
                (Some(bias), Some(out)) => Epilogue::BiasGelu(bias, out),
                (Some(bias), None) => Epilogue::Bias(bias),
                (None, Some(out)) => Epilogue::Swiglu(out),
                (None, None) => Epilogue::Nothing,
            })
        })
    }

    fn raw(&mut self) -> Finish<T> {
        match self {
            Epilogue::Nothing => Finish::Nothing,
            Epilogue::Bias(bias) => Finish::Bias(bias.as_ptr()),
            Epilogue::BiasGelu(bias, out) => Finish::BiasGelu(bias.as_ptr(), OutSlot::new(out)),
            Epilogue::Swiglu(out) => Finish::Swiglu(OutSlot::new(out)),
        }
    }
}

thread_local! {
    /// Memory for the packed operand of shared products that this thread started, as large as the largest so far.
    static MEMORY: RefCell<Block> = RefCell::default();
}

/// A right operand, packed for one of our paths.
struct Packed {
    dims: [usize; 2],
    memory: Block,
}

impl Packed {
    /// The parts of B for its dims, each with its memory.
    fn parts(&mut self, path: Path) -> impl Iterator<Item = (PackedPart, &mut [f32])> + Send {
        let bytes = path.words(self.dims) * size_of::<f32>();
        if self.memory.bytes() < bytes {
            self.memory = Block::zeroed(bytes);
        }
        let mut rest: &mut [f32] = bytemuck::cast_slice_mut(self.memory.as_mut_slice());
        gemm::pieces(path, self.dims).map(move |(piece, words)| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(words);
            rest = after;
            (piece, part)
        })
    }
}

/// Packs a part of `b`. Only `f32` has a path.
fn pack<T: Float>(path: Path, b: MatmulOperand<'_, T>, (piece, to): (PackedPart, &mut [f32])) {
    b.check("B", [piece.l + piece.k, piece.j + piece.columns]);
    assert_eq!(path.words([piece.k, piece.columns]), to.len(), "words of a part of a packed B");
    // SAFETY: the part lies inside B and its packed form in `to`; T is `f32` and this CPU runs the path, because it
    // came from `T::path`.
    unsafe { gemm::pack(path, b.elements(), piece, to.as_mut_ptr()) }
}

/// The product on this thread, checked; B may also be packed, if there is a path.
fn serial<T: Float>(
    factors: Factors<'_, T>,
    packed: Option<&Packed>,
    c: (&mut [T], Strides),
    update: Update,
    mut epilogue: Epilogue<'_, T>,
) {
    let Factors { precision, dims: [m, n, k], a, b } = factors;
    factors.check();
    check_c(factors.dims, c.1, c.0.len());
    assert!(packed.is_none_or(|packed| packed.dims == [k, n]), "B: dims of the packed one");
    epilogue.check(m, n, c.1.0);
    let by_rows_only = packed.is_some() || !matches!(epilogue, Epilogue::Nothing);
    assert!(c.1.1 == 1 || !by_rows_only, "C: its rows are not contiguous beside a packed B or an epilogue");
    let (c, finish) = ((c.0.as_mut_ptr(), c.1), epilogue.raw());
    // SAFETY: `assert_inside` compared each operand's farthest element with its slice, so every access is in bounds,
    // and strides fit isize; `check` did so for the epilogue. `assert_apart`: elements of C do not overlap, and are
    // contiguous along a dim. C and `out` are borrowed mutably, so they overlap nothing else. Only `f32` has a path,
    // and the CPU runs it; a packed B was filled for that path, or is dense.
    unsafe {
        if let Some(path) = T::path(precision) {
            let (start, strides) = b.elements();
            let b = packed
                .map_or(Right::Strided(start, strides), |b| Right::Packed(b.memory.as_slice().as_ptr().cast(), b.dims));
            let c = (c.0.cast(), c.1);
            return by_path(path, [m, n, k], a.elements(), b, c, update, finish.cast());
        }
        portable(factors, c, update);
        finish.rows((c.0, c.1.0), (0, m), (0, n));
    }
}

/// [`gemm::product`] with an epilogue. It is not generic, so that the tiles of all paths are compiled in this crate
/// alone, and not in each that multiplies.
///
/// # Safety
/// As for [`gemm::product`].
#[inline(never)]
unsafe fn by_path(
    path: Path,
    dims: [usize; 3],
    a: (Elements, Strides),
    b: Right,
    c: (*mut f32, Strides),
    update: Update,
    finish: Finish<f32>,
) {
    // SAFETY: the caller's promise.
    unsafe { gemm::product(path, dims, a, b, c, update, finish) }
}

/// The product over `matrixmultiply`, whose operands are rounded in copies.
///
/// # Safety
/// A and B lie inside their slices. C with its (row, column) strides must be valid for writing the whole matrix, and
/// all strides fit isize; no two elements of C may share memory, nor C with A or B.
unsafe fn portable<T: Float>(factors: Factors<'_, T>, (c, c_strides): (*mut T, Strides), update: Update) {
    let Factors { precision, dims: [m, n, k], a, b } = factors;
    let (a_slice, b_slice) = (a.in_precision(precision), b.in_precision(precision));
    let beta = if update == Update::Accumulate { T::ONE } else { T::ZERO };
    let [[a_row, a_column], [b_row, b_column], [c_row, c_column]] =
        [a.strides(), b.strides(), c_strides].map(|(row, column)| [row as isize, column as isize]);
    let (a, b) = (a_slice.as_ptr(), b_slice.as_ptr());
    // SAFETY: the caller's promise is the routine's precondition; with a beta of zero it does not read C.
    unsafe { (T::ROUTINE)(m, k, n, T::ONE, a, a_row, a_column, b, b_row, b_column, beta, c, c_row, c_column) }
}

/// The unchecked form of an epilogue. Everything has the layout of C, whose rows are contiguous; in SwiGLU, pairs of
/// its elements.
#[derive(Clone, Copy)]
enum Finish<T> {
    Nothing,
    /// As [`Epilogue::Bias`].
    Bias(*const T),
    /// As [`Epilogue::BiasGelu`].
    BiasGelu(*const T, OutSlot<T>),
    /// As [`Epilogue::Swiglu`].
    Swiglu(OutSlot<T>),
}

/// A [`Stored`], unchecked.
#[derive(Clone, Copy)]
enum OutSlot<T> {
    Full(*mut T),
    Bf16(*mut bf16),
    F16(*mut f16),
}

impl<T> OutSlot<T> {
    fn new(stored: &mut Stored<'_, T>) -> OutSlot<T> {
        match stored {
            Stored::Full(to) => OutSlot::Full(to.as_mut_ptr()),
            Stored::Bf16(to) => OutSlot::Bf16(to.as_mut_ptr()),
            Stored::F16(to) => OutSlot::F16(to.as_mut_ptr()),
        }
    }

    fn cast<U>(self) -> OutSlot<U> {
        match self {
            OutSlot::Full(to) => OutSlot::Full(to.cast()),
            OutSlot::Bf16(to) => OutSlot::Bf16(to),
            OutSlot::F16(to) => OutSlot::F16(to),
        }
    }

    /// `len` elements from `at` on.
    ///
    /// # Safety
    /// They exist as long as the result, and nobody else uses them.
    unsafe fn part<'a>(self, at: usize, len: usize) -> Stored<'a, T> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                OutSlot::Full(to) => Stored::Full(std::slice::from_raw_parts_mut(to.add(at), len)),
                OutSlot::Bf16(to) => Stored::Bf16(std::slice::from_raw_parts_mut(to.add(at), len)),
                OutSlot::F16(to) => Stored::F16(std::slice::from_raw_parts_mut(to.add(at), len)),
            }
        }
    }
}

impl<T: Float> Finish<T> {
    fn cast<U>(self) -> Finish<U> {
        match self {
            Finish::Nothing => Finish::Nothing,
            Finish::Bias(bias) => Finish::Bias(bias.cast()),
            Finish::BiasGelu(bias, out) => Finish::BiasGelu(bias.cast(), out.cast()),
            Finish::Swiglu(out) => Finish::Swiglu(out.cast()),
        }
    }
}

impl<T: Float> gemm::Finish<T> for Finish<T> {
    unsafe fn rows(self, (c, c_row): (*mut T, usize), (i, rows): (usize, usize), (j, columns): (usize, usize)) {
        if let Finish::Nothing = self {
            return;
        }
        for at in (i..i + rows).map(|i| i * c_row + j) {
            // SAFETY: a part of the bias, of a row of C and of that row of `out`, which do not overlap. The rectangle
            // consists of whole pairs: tiles, blocks and C have even numbers of columns.
            unsafe {
                let c = std::slice::from_raw_parts_mut(c.add(at), columns);
                let bias = |bias: *const T| std::slice::from_raw_parts(bias.add(j), columns);
                match self {
                    Finish::Nothing => {}
                    Finish::Bias(b) => pointwise::add_assign(c, bias(b)),
                    Finish::BiasGelu(b, out) => gelu::bias_gelu(c, bias(b), out.part(at, columns)),
                    Finish::Swiglu(out) => swiglu::swiglu(c, out.part(at / 2, columns / 2)),
                }
            }
        }
    }
}

/// Asserts that C lies inside a slice of `len` elements, and that its elements are apart.
fn check_c([m, n, _]: [usize; 3], strides: Strides, len: usize) {
    assert_inside("C", m, n, strides, len);
    assert_apart(m, n, strides);
}

/// Asserts that a `rows` by `columns` matrix lies inside a slice of `len` elements, and that its strides fit `isize`.
fn assert_inside(name: &str, rows: usize, columns: usize, strides: Strides, len: usize) {
    assert!(
        isize::try_from(strides.0).is_ok() && isize::try_from(strides.1).is_ok(),
        "{name}: strides {strides:?} are too large"
    );
    if rows == 0 || columns == 0 {
        return;
    }
    let last_row = (rows - 1).checked_mul(strides.0);
    let last_column = (columns - 1).checked_mul(strides.1);
    let last = last_row.zip(last_column).and_then(|(row, column)| row.checked_add(column));
    assert!(
        last.is_some_and(|last| last < len),
        "{name}: {rows} by {columns} with strides {strides:?} does not fit in {len} elements"
    );
}

/// Asserts that the elements of a matrix do not overlap (the larger stride exceeds the extent of the smaller), and are
/// contiguous along its rows or its columns.
fn assert_apart(rows: usize, columns: usize, strides: Strides) {
    if rows == 0 || columns == 0 {
        return;
    }
    let (row, column) = ((strides.0, rows), (strides.1, columns));
    let (near, far) = if strides.0 < strides.1 { (row, column) } else { (column, row) };
    let covered = near.1.saturating_sub(1).saturating_mul(near.0);
    assert!(
        (near.1 <= 1 || near.0 > 0) && (far.1 <= 1 || far.0 > covered),
        "C: the elements of {rows} by {columns} overlap with strides {strides:?}"
    );
    assert!(
        near.0 == 1 || rows == 1 || columns == 1,
        "C: {rows} by {columns} with strides {strides:?} is contiguous along no dim"
    );
}

impl Product for f32 {
    const ROUTINE: Routine<f32> = matrixmultiply::sgemm;

    const WIDENS: bool = true;

    fn sums() -> &'static LocalKey<Sums<f32>> {
        thread_local!(static SUMS: Sums<f32> = const { RefCell::new(Vec::new()) });
        &SUMS
    }

    fn path(precision: Precision) -> Option<Path> {
        Path::best(precision)
    }

    fn rounds(precision: Precision) -> bool {
        precision != Precision::F32
    }

    fn narrows(precision: Precision) -> bool {
        precision == Precision::Bf16
    }

    fn in_precision(self, precision: Precision) -> f32 {
        match precision {
            Precision::F32 => self,
            Precision::Tf32 => tf32(self),
            Precision::Bf16 => gemm::rounded(self),
        }
    }
}

impl Product for f64 {
    const ROUTINE: Routine<f64> = matrixmultiply::dgemm;

    fn sums() -> &'static LocalKey<Sums<f64>> {
        thread_local!(static SUMS: Sums<f64> = const { RefCell::new(Vec::new()) });
        &SUMS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products that are cut along every dim.
    #[test]
    fn large_operands_are_packed_in_parts() {
        assert_eq!(at_once(1152, 384), (384, 1152));
        assert_eq!(at_once(50_304, 768), (768, 3072));
        assert_eq!(at_once(768, 50_304), (2816, 768));
        let (terms, columns) = at_once(3100, 1300);
        assert!(terms < 1300 && columns < 3100);
    }

    /// Every thread has the same number of blocks, whichever limit (number, size or rows) applies.
    #[test]
    fn every_thread_has_as_many_blocks() {
        for dims in
            [[3072, 384, 384], [3072, 384, 1536], [2048, 768, 768], [384, 1536, 3072], [128, 512, 2048], [60, 9, 9]]
        {
            for threads in [1, 2] {
                let (m, rows) = (dims[0], rows(threads, dims));
                assert_eq!(m.div_ceil(rows) % threads, 0, "{dims:?}: blocks of {rows} rows for {threads} threads");
                assert!(rows >= ROWS && m / rows < m.div_ceil(ROWS), "{dims:?}: {rows} rows");
            }
        }
    }
}
