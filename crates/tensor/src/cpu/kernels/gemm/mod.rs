//! f32 products
#![allow(missing_docs)]
mod avx512;
use super::matmul::{Strides, Update};
use std::cell::RefCell;

pub const KC: usize = 256;
pub static NC: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(512);
pub static READ_A: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
pub static READ_B: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(14);
pub static CH: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(16);
pub static AP: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(16);

#[derive(Clone, Copy, Debug)]
pub enum Path { Avx512 }

pub(super) struct Tile {
    rows: usize,
    columns: usize,
    k: usize,
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    b_step: usize,
    c: *mut f32,
    c_row: usize,
    add: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Strip { from: *const f32, lanes: usize, k: usize, lane: usize, step: usize }
impl Strip {
    unsafe fn copy<const LANES: usize>(self, to: *mut f32, step: usize) {
        for l in 0..self.k {
            for lane in 0..LANES {
                unsafe {
                    let x = if lane < self.lanes { *self.from.add(lane * self.lane + l * self.step) } else { 0.0 };
                    *to.add(l * step + lane) = x;
                }
            }
        }
    }
}

pub(super) trait Micro {
    const LANES: usize;
    const ROWS: usize;
    unsafe fn tile(tile: &Tile);
    unsafe fn pack(source: Strip, to: *mut f32, step: usize);
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; 16]);

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

pub unsafe fn product(path: Path, dims: [usize; 3], a: (*const f32, Strides), b: (*const f32, Strides), c: (*mut f32, usize), update: Update) {
    match path { Path::Avx512 => unsafe { drive::<avx512::Avx512>(dims, a, b, c, update) } }
}

unsafe fn drive<M: Micro>([m, n, k]: [usize; 3], (a, (a_row, a_col)): (*const f32, Strides), (b, (b_row, b_col)): (*const f32, Strides), (c, c_row): (*mut f32, usize), update: Update) {
    use std::sync::atomic::Ordering::Relaxed;
    let ncmax = NC.load(Relaxed);
    let far = if a_row == 1 { a_col } else if a_col == 1 { a_row } else { 0 };
    let read_a = n <= READ_A.load(Relaxed) && far % 1024 != 0;
    let read_b = b_col == 1 && m <= READ_B.load(Relaxed);
    let width = 2 * M::LANES;
    let panels = m.div_ceil(M::ROWS);
    let ap = AP.load(Relaxed);
    SCRATCH.with_borrow_mut(|scratch| {
        let a_len = KC * M::LANES / 16 + 4;
        let b_len = KC * (ncmax + width) / 16;
        if scratch.len() < a_len + b_len { scratch.resize(a_len + b_len, Line([0.0; 16])); }
        let (pa, pb) = scratch.split_at_mut(a_len);
        let (pa, pb): (*mut f32, *mut f32) = (pa.as_mut_ptr().cast(), pb.as_mut_ptr().cast());
        for j0 in (0..n).step_by(ncmax) {
            let nc = (n - j0).min(ncmax);
            for k0 in (0..k).step_by(KC) {
                let kc = (k - k0).min(KC);
                let add = k0 > 0 || update == Update::Accumulate;
                unsafe {
                    let b = b.add(k0 * b_row + j0 * b_col);
                    if !read_b {
                        let chunk = if b_col == 1 { CH.load(Relaxed) } else { KC };
                        for l in (0..kc).step_by(chunk) {
                        for j in (0..nc).step_by(M::LANES) {
                            let lanes = (nc - j).min(M::LANES);
                            let to = pb.add(j / width * width * KC + j % width + l * width);
                            M::pack(Strip { from: b.add(j * b_col + l * b_row), lanes, k: (kc - l).min(chunk), lane: b_col, step: b_row }, to, width);
                        }
                        }
                    }
                    for p in 0..panels {
                        let i0 = p * m / panels;
                        let rows = (p + 1) * m / panels - i0;
                        let a = a.add(i0 * a_row + k0 * a_col);
                        let (a, a_row, a_step) = if read_a { (a, a_row, a_col) } else {
                            M::pack(Strip { from: a, lanes: rows, k: kc, lane: a_row, step: a_col }, pa, ap);
                            (pa.cast_const(), 1, ap)
                        };
                        for j in (0..nc).step_by(width) {
                            let (b, b_step) = if read_b { (b.add(j), b_row) } else { (pb.add(j * KC).cast_const(), width) };
                            M::tile(&Tile { rows, columns: (nc - j).min(width), k: kc, a, a_row, a_step, b, b_step, c: c.add(i0 * c_row + j0 + j), c_row, add });
                        }
                    }
                }
            }
        }
    });
}
