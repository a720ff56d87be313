//! Every path this CPU runs, bit for bit against the order of summation that the module defines, in layouts and sizes
//! that cover every branch, with operands rounded before or not, and B packed whole or not; blocks of C against the
//! whole; and against f64 with a derived bound.
//!
//! More than 400 lines: one oracle, and the cases by which it tests every path, precision and layout.

use super::super::values;
use super::*;

/// The paths this CPU runs.
fn paths(precision: Precision) -> Vec<Path> {
    let paths: Vec<Path> = Path::all(precision).iter().copied().filter(|path| path.runs_here()).collect();
    assert_eq!(paths.first().copied(), Path::best(precision));
    paths
}

/// Leaves C unchanged after the product.
#[derive(Clone, Copy)]
struct Plain;

impl Finish<f32> for Plain {
    unsafe fn rows(self, _c: (*mut f32, usize), _rows: (usize, usize), _columns: (usize, usize)) {}
}

/// A small random generator.
struct Choices(u64);

impl Choices {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn of(&mut self, from: &[usize]) -> usize {
        from[self.below(from.len())]
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// A side of C: mostly around multiples of the tiles' sides.
    fn side(&mut self) -> usize {
        match self.below(3) {
            0 => 1 + self.below(70),
            1 => self.of(&[6, 12, 14, 28, 42, 56]) + self.below(3) - 1,
            _ => self.of(&[8, 16, 32, 48, 64, 96]) + self.below(3) - 1,
        }
    }

    fn terms(&mut self) -> usize {
        if self.coin() { 1 + self.below(700) } else { self.of(&[1, 2, 3, 4, 15, 16, 17, 255, 256, 257, 511, 512, 513]) }
    }

    fn precision(&mut self) -> Precision {
        Precision::ALL[self.below(3)]
    }

    /// Elements in full or, if the product may read bf16, rounded.
    fn kept(&mut self, x: Vec<f32>, precision: Precision) -> Kept {
        if precision == Precision::Bf16 && self.coin() { Kept::rounded(&x) } else { Kept::Full(x) }
    }

    fn update(&mut self) -> Update {
        if self.coin() { Update::Overwrite } else { Update::Accumulate }
    }

    /// Dims of a packed B for a product with these dims.
    fn packed(&mut self, [k, n]: [usize; 2]) -> [usize; 2] {
        let longer = if k.is_multiple_of(2) { self.of(&[0, 0, 1, 2, 300]) } else { 0 };
        [k + longer, n + self.of(&[0, 0, 1, 40, N_BLOCK])]
    }

    /// Strides of a row-major or column-major matrix: dense, padded, so far apart that rows alias, or with gaps.
    fn strides(&mut self, rows: usize, columns: usize) -> Strides {
        let (by_rows, pad) = (self.coin(), self.below(4));
        let near = if by_rows { columns } else { rows };
        let far = if pad == 3 { near.next_multiple_of(ALIASED_ROWS) } else { near + pad };
        match (self.below(8), by_rows) {
            (0, true) => (3 * far, 3),
            (0, false) => (3, 3 * far),
            (_, true) => (far, 1),
            (_, false) => (1, far),
        }
    }

    /// A part of a side: all, one, all but one, a half or anything.
    fn part(&mut self, len: usize) -> (usize, usize) {
        let at = self.below(len);
        match self.below(5) {
            0 => (0, len),
            1 => (at, 1),
            2 if len > 1 => (self.below(2), len - 1),
            3 if len > 1 => (len / 2, len - len / 2),
            _ => (at, 1 + self.below(len - at)),
        }
    }
}

/// The nearest number with 11 bits, ties away from zero, by the arithmetic of f64.
fn nearest_tf32(x: f32) -> f32 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    // Of the upper bits of the fraction, the last: subnormal numbers have the exponent of the smallest normal ones.
    let exponent = ((x.to_bits() >> 23 & 0xff) as i32).max(1) - 127;
    let unit = 2_f64.powi(exponent - 10);
    ((f64::from(x) / unit).round() * unit) as f32
}

/// Elements of an operand.
enum Kept {
    Full(Vec<f32>),
    Rounded(Vec<bf16>),
}

impl Kept {
    fn rounded(x: &[f32]) -> Kept {
        let mut to = vec![bf16::ZERO; x.len()];
        round(x, &mut to);
        Kept::Rounded(to)
    }

    fn elements(&self) -> Elements {
        match self {
            Kept::Full(x) => Elements::Full(x.as_ptr()),
            Kept::Rounded(x) => Elements::Rounded(x.as_ptr()),
        }
    }
}

/// A rectangle of a dense row-major matrix, laid out with these strides among NaNs.
fn laid_out(dense: &[f32], width: usize, [rows, columns]: [(usize, usize); 2], strides: Strides) -> Vec<f32> {
    let len = 1 + (rows.1 - 1) * strides.0 + (columns.1 - 1) * strides.1;
    let mut out = vec![f32::NAN; len];
    for i in 0..rows.1 {
        for j in 0..columns.1 {
            out[i * strides.0 + j * strides.1] = dense[(rows.0 + i) * width + columns.0 + j];
        }
    }
    out
}

/// Packs a matrix that is NaN beyond the given rows and columns.
fn packed(
    (path, precision): (Path, Precision),
    dense: &[f32],
    [k, n]: [usize; 2],
    dims: [usize; 2],
    choices: &mut Choices,
) -> Vec<Line> {
    let element = |at: usize| (at / dims[1] < k && at % dims[1] < n).then(|| dense[at / dims[1] * n + at % dims[1]]);
    let b: Vec<f32> = (0..dims[0] * dims[1]).map(|at| element(at).unwrap_or(f32::NAN)).collect();
    let strides = choices.strides(dims[0], dims[1]);
    let b = choices.kept(laid_out(&b, dims[1], [(0, dims[0]), (0, dims[1])], strides), precision);
    let mut lines = vec![Line([f32::NAN; Line::WORDS]); path.words(dims) / Line::WORDS];
    let mut at = 0;
    for (piece, words) in pieces(path, dims) {
        // SAFETY: the path runs here, B is laid out for its dims, and the pieces together have the words of the whole.
        unsafe { pack(path, (b.elements(), strides), piece, lines[at..].as_mut_ptr().cast()) };
        at += words / Line::WORDS;
    }
    assert_eq!(at, lines.len());
    lines
}

/// Every element in its panel, and zeros behind the last column: whole vectors beside each other and a part of one.
#[test]
fn panels_have_each_element_in_its_place() {
    fn check<M: Micro>() {
        for (k, columns) in [1, 15, 16, 17, 40].into_iter().flat_map(|k| [1, 8, 16, 63, 130, 272].map(|n| (k, n))) {
            let row = columns + 3;
            let b = values("b", k * row);
            for width in [2 * M::LANES, columns.next_multiple_of(M::LANES)] {
                let mut got = vec![f32::NAN; columns.next_multiple_of(width) * k];
                let from = (Elements::Full(b.as_ptr()), (row, 1));
                // SAFETY: this CPU runs M; there are k rows, and words for whole panels.
                unsafe { pack_panels::<M>([k, columns], from, (got.as_mut_ptr(), width)) };
                for (at, got) in got.into_iter().enumerate() {
                    let (l, j) = (at / width % k, at / (width * k) * width + at % width);
                    if j < columns.next_multiple_of(M::LANES) {
                        assert_eq!(got, if j < columns { b[l * row + j] } else { 0.0 }, "[{k}, {columns}]: {l}, {j}");
                    }
                }
            }
        }
    }
    for path in paths(Precision::F32) {
        match path {
            Path::Avx512 => check::<Avx512>(),
            _ => check::<Avx2>(),
        }
    }
}

/// Three dense row-major matrices.
struct Case {
    precision: Precision,
    dims: [usize; 3],
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Case {
    fn new(precision: Precision, dims @ [m, n, k]: [usize; 3]) -> Case {
        Case { precision, dims, a: values("a", m * k), b: values("b", k * n), c: values("c", m * n) }
    }

    /// These rows and columns of C, computed alone by `path` in chosen layouts. Checks that nothing else changes.
    fn part(
        &self,
        path: Path,
        [rows, columns]: [(usize, usize); 2],
        update: Update,
        choices: &mut Choices,
    ) -> Vec<f32> {
        let [_, n, k] = self.dims;
        let (a_strides, b_strides) = (choices.strides(rows.1, k), choices.strides(k, columns.1));
        let mut c_strides = choices.strides(rows.1, columns.1);
        if c_strides.0 != 1 && c_strides.1 != 1 {
            c_strides = (columns.1, 1);
        }
        let a = choices.kept(laid_out(&self.a, k, [rows, (0, k)], a_strides), self.precision);
        let dense = laid_out(&self.b, n, [(0, k), columns], (columns.1, 1));
        let b = choices.kept(laid_out(&dense, columns.1, [(0, k), (0, columns.1)], b_strides), self.precision);
        let mut c = laid_out(&self.c, n, [rows, columns], c_strides);
        c.extend([f32::NAN; 32]);
        if update == Update::Overwrite {
            c.fill(f32::NAN);
        }
        let dims = [rows.1, columns.1, k];
        let in_blocks = choices.packed([k, columns.1]);
        let lines = match c_strides.1 == 1 && choices.coin() {
            true => Some(packed((path, self.precision), &dense, [k, columns.1], in_blocks, choices)),
            false => None,
        };
        let b = match &lines {
            Some(lines) => Right::Packed(lines.as_ptr().cast(), in_blocks),
            None => Right::Strided(b.elements(), b_strides),
        };
        // SAFETY: the path runs here; `laid_out` makes the slices long enough for their matrices, without overlap, and
        // C contiguous along rows or columns; along rows with a packed B.
        unsafe {
            let a = (a.elements(), a_strides);
            product(path, dims, a, b, (c.as_mut_ptr(), c_strides), update, Plain);
        }
        let element = |at: usize| c[at / columns.1 * c_strides.0 + at % columns.1 * c_strides.1];
        let got: Vec<f32> = (0..rows.1 * columns.1).map(element).collect();
        let numbers = |x: &[f32]| x.iter().filter(|x| !x.is_nan()).count();
        assert_eq!(numbers(&c), numbers(&got), "C changed between its elements: {dims:?}, {c_strides:?}");
        got
    }

    fn whole(&self, path: Path, update: Update, choices: &mut Choices) -> Vec<f32> {
        self.part(path, [(0, self.dims[0]), (0, self.dims[1])], update, choices)
    }

    fn operand(&self, x: f32) -> f32 {
        match self.precision {
            Precision::F32 => x,
            Precision::Tf32 => nearest_tf32(x),
            Precision::Bf16 => rounded(x),
        }
    }

    /// The definition of an element.
    fn defined(&self, i: usize, j: usize, update: Update) -> f32 {
        let [_, n, k] = self.dims;
        let terms: Vec<usize> = (0..k).collect();
        let (a, b) = (|l| self.operand(self.a[i * k + l]), |l| self.operand(self.b[l * n + j]));
        let block = |block: &[usize]| block.iter().fold(0.0_f32, |sum, &l| a(l).mul_add(b(l), sum));
        let sums = terms.chunks(K_BLOCK).map(block);
        match update {
            Update::Overwrite => sums.reduce(|c, sum| c + sum).unwrap_or(0.0),
            Update::Accumulate => sums.fold(self.c[i * n + j], |c, sum| c + sum),
        }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Checks the bits of the corners of C and of some elements between against the definition.
#[track_caller]
fn check_definition(case: &Case, got: &[f32], path: Path, update: Update, choices: &mut Choices) {
    let [m, n, _] = case.dims;
    let corners = [(0, 0), (0, n - 1), (m - 1, 0), (m - 1, n - 1)];
    let others: Vec<(usize, usize)> = (0..12).map(|_| (choices.below(m), choices.below(n))).collect();
    for (i, j) in corners.into_iter().chain(others) {
        let (got, want) = (got[i * n + j], case.defined(i, j, update));
        let at = format!("{path:?}, {:?}, {update:?}, element {i}, {j}", case.dims);
        assert_eq!(got.to_bits(), want.to_bits(), "{at}: {got} instead of {want}");
    }
}

#[test]
fn elements_have_the_bits_of_the_definition() {
    let mut choices = Choices(1);
    for _ in 0..1000 {
        let case = Case::new(choices.precision(), [choices.side(), choices.side(), choices.terms()]);
        for path in paths(case.precision) {
            let update = choices.update();
            let got = case.whole(path, update, &mut choices);
            check_definition(&case, &got, path, update, &mut choices);
        }
    }
}

/// Any rectangle of C computed alone has the same bits as in the whole, also in other layouts and on another path.
#[test]
fn parts_of_c_have_the_bits_of_the_whole() {
    let mut choices = Choices(2);
    for _ in 0..500 {
        let case = Case::new(choices.precision(), [choices.side(), choices.side(), choices.terms()]);
        let [m, n, _] = case.dims;
        let update = choices.update();
        // Without vector instructions there is no path, and nothing to compare.
        let Some(&best) = paths(case.precision).first() else { return };
        let whole = case.whole(best, update, &mut choices);
        for path in paths(case.precision).repeat(2) {
            let [rows, columns] = [choices.part(m), choices.part(n)];
            let got = case.part(path, [rows, columns], update, &mut choices);
            let want = laid_out(&whole, n, [rows, columns], (columns.1, 1));
            assert!(bits(&got) == bits(&want), "{path:?}, {:?}, {update:?}, {rows:?}, {columns:?}", case.dims);
        }
    }
}

/// Several blocks of columns, and enough of them that A is packed in every layout, in one group of panels or several.
#[test]
fn wide_products_have_the_bits_of_the_definition() {
    let mut choices = Choices(3);
    for n in [A_IN_PLACE, A_IN_PLACE + 1, N_BLOCK - 1, N_BLOCK + 1, 2 * N_BLOCK + 33] {
        for (m, k) in [(1, 3), (5, 300), (15, 17), (29, 257), (14 * GROUP + 1, 37)] {
            let case = Case::new(choices.precision(), [m, n, k]);
            for path in paths(case.precision).repeat(3) {
                let update = choices.update();
                let got = case.whole(path, update, &mut choices);
                check_definition(&case, &got, path, update, &mut choices);
                let columns = choices.part(n);
                let part = case.part(path, [(0, m), columns], update, &mut choices);
                assert!(bits(&part) == bits(&laid_out(&got, n, [(0, m), columns], (columns.1, 1))), "{columns:?}");
            }
        }
    }
}

/// Tiles of few columns have heights of their own, and up to twice a tile's rows read B in place.
#[test]
fn small_sides_have_the_bits_of_the_definition() {
    let mut choices = Choices(9);
    for m in 1..=44 {
        for n in [1, 5, 8, 9, 16, 17] {
            let case = Case::new(Precision::F32, [m, n, 1 + choices.below(20) + choices.of(&[0, 250])]);
            for path in paths(case.precision).repeat(3) {
                let update = choices.update();
                let got = case.whole(path, update, &mut choices);
                check_definition(&case, &got, path, update, &mut choices);
            }
        }
    }
}

/// CPUs with smaller caches pack fewer columns at a time.
#[test]
fn blocks_for_smaller_caches_have_the_bits_of_the_definition() {
    let mut choices = Choices(8);
    for (block, n) in [(PIECE, PIECE + 1), (PIECE, 3 * PIECE + 33), (2 * PIECE, 2 * PIECE - 1), (2 * PIECE, N_BLOCK)] {
        cache::IN_TEST.set(Some(block));
        for (m, k) in [(5, 300), (29, 257), (40, 17)] {
            let case = Case::new(choices.precision(), [m, n, k]);
            for path in paths(case.precision).repeat(3) {
                let update = choices.update();
                let got = case.whole(path, update, &mut choices);
                check_definition(&case, &got, path, update, &mut choices);
            }
        }
    }
}

/// Sums of at most `K_BLOCK` products, each term rounded at most that often, then the sums of the blocks and the old
/// value: with `t` roundings, the error is at most `t u / (1 - t u)` times the sum of the magnitudes, `u = 2^-24`
/// (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
#[test]
fn products_are_within_the_bound_of_their_roundings() {
    let mut choices = Choices(4);
    for _ in 0..200 {
        let case = Case::new(choices.precision(), [choices.side(), choices.side(), choices.terms()]);
        let [m, n, k] = case.dims;
        let roundings = (k.min(K_BLOCK) + k.div_ceil(K_BLOCK)) as f64 * 2_f64.powi(-24);
        for path in paths(case.precision) {
            let update = choices.update();
            let got = case.whole(path, update, &mut choices);
            for (at, got) in got.iter().enumerate() {
                let (i, j) = (at / n, at % n);
                let old = if update == Update::Accumulate { f64::from(case.c[at]) } else { 0.0 };
                let (a, b) = (|l| case.operand(case.a[i * k + l]), |l| case.operand(case.b[l * n + j]));
                let terms = (0..k).map(|l| f64::from(a(l)) * f64::from(b(l)));
                let (sum, size) = terms.fold((old, old.abs()), |(sum, size), term| (sum + term, size + term.abs()));
                let (error, bound) = ((f64::from(*got) - sum).abs(), roundings / (1.0 - roundings) * size);
                assert!(error <= bound, "{path:?}, [{m}, {n}, {k}], {i}, {j}: off by {error:e}, not {bound:e}");
            }
        }
    }
}

/// Already rounded operands give the same bits as full ones, even for numbers that neither [`rounded`] nor its
/// instruction would produce.
#[test]
fn rounded_operands_have_the_bits_of_full_ones() {
    let mut choices = Choices(7);
    // Zero of either sign, subnormals, the smallest and largest normal numbers, and numbers without a neighbour in
    // bf16.
    let special = [0x8000, 0, 1, 0x807f, 0x80, 0x8080, 0x3f80, 0xbf81, 0x5f00, 0xdf7f];
    for _ in 0..2000 {
        let dims @ [m, n, k] = [choices.side(), choices.side(), choices.terms()];
        let mut operand = |name, len| -> [Kept; 3] {
            let mut x: Vec<f32> = values(name, len);
            let mut rounded: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            for _ in 0..len / 3 {
                let at = choices.below(len);
                rounded[at] = bf16::from_bits(choices.of(&special) as u16);
                x[at] = rounded[at].to_f32();
            }
            let widened = rounded.iter().map(|x| x.to_f32()).collect();
            [Kept::Full(x), Kept::Full(widened), Kept::Rounded(rounded)]
        };
        let (a, b) = (operand("a", m * k), operand("b", k * n));
        let strides = |by_rows, rows, columns| if by_rows { (columns, 1) } else { (1, rows) };
        let (a_strides, b_strides) = (strides(choices.coin(), m, k), strides(choices.coin(), k, n));
        // In f32 the full operands are the widened ones.
        let in_f32 = paths(Precision::F32).into_iter().map(|path| (path, 1));
        for (path, full) in paths(Precision::Bf16).into_iter().map(|path| (path, 0)).chain(in_f32) {
            let product = |a: &Kept, b: &Kept| {
                let mut c = vec![f32::NAN; m * n];
                let (a, b) = ((a.elements(), a_strides), Right::Strided(b.elements(), b_strides));
                // SAFETY: the path runs here; all matrices are dense.
                unsafe { product(path, dims, a, b, (c.as_mut_ptr(), (n, 1)), Update::Overwrite, Plain) };
                bits(&c)
            };
            let want = product(&a[full], &b[full]);
            for (i, j) in [(full, 2), (2, full), (2, 2), (1, 2), (2, 1)] {
                assert!(product(&a[i], &b[j]) == want, "{path:?}, {dims:?}, {a_strides:?}, {b_strides:?}: {i}, {j}");
            }
        }
    }
}

/// NaNs and infinities stay in their row and column, even if tiles and packed strips are not full.
#[test]
fn non_finite_values_stay_in_their_row_and_column() {
    let mut choices = Choices(5);
    for _ in 0..300 {
        let mut case = Case::new(choices.precision(), [choices.side(), choices.side(), choices.terms()]);
        let [m, n, k] = case.dims;
        let (row, column) = (choices.below(m), choices.below(n));
        case.a[row * k + choices.below(k)] = f32::NAN;
        case.b[choices.below(k) * n + column] = f32::INFINITY;
        for path in paths(case.precision) {
            let got = case.part(path, [(0, m), (0, n)], Update::Accumulate, &mut choices);
            for (at, got) in got.iter().enumerate() {
                let (i, j) = (at / n, at % n);
                assert_eq!(got.is_nan(), i == row, "{path:?}, {:?}, {i}, {j}: {got}", case.dims);
                assert_eq!(got.is_infinite(), i != row && j == column, "{path:?}, {:?}, {i}, {j}: {got}", case.dims);
            }
        }
    }
}

#[test]
fn empty_products_and_sums() {
    for path in Precision::ALL.into_iter().flat_map(paths) {
        for (update, want) in [(Update::Overwrite, 0.0), (Update::Accumulate, 7.0)] {
            let mut c = [7.0_f32; 7];
            let nothing = Elements::Full(std::ptr::dangling());
            for dims in [[0, 3, 5], [2, 0, 5]] {
                // SAFETY: no element of any operand exists.
                unsafe {
                    let (a, b) = ((nothing, (1, 1)), Right::Strided(nothing, (1, 1)));
                    product(path, dims, a, b, (c.as_mut_ptr(), (4, 1)), update, Plain);
                }
                assert_eq!(c, [7.0; 7]);
            }
            // SAFETY: A and B have no elements, and C is two rows of three, four apart.
            unsafe {
                let (a, b) = ((nothing, (0, 1)), Right::Strided(nothing, (3, 1)));
                product(path, [2, 3, 0], a, b, (c.as_mut_ptr(), (4, 1)), update, Plain);
            }
            assert_eq!(c, [want, want, want, 7.0, want, want, want]);
        }
    }
}

#[test]
fn repeated_products_reuse_the_packed_buffers() {
    let held = || PACKED.with_borrow(|[a, b]| [(a.as_ptr(), a.capacity()), (b.as_ptr(), b.capacity())]);
    let mut choices = Choices(6);
    for path in Precision::ALL.into_iter().flat_map(paths) {
        // The large case first, so that the following ones need no more memory.
        let large = Case::new(Precision::F32, [20, 2 * N_BLOCK, K_BLOCK + 1]);
        large.part(path, [(0, 20), (0, 2 * N_BLOCK)], Update::Overwrite, &mut choices);
        let before = held();
        for dims in [[14, 100, 600], [64, 128, 32], [1, 1, 1], [20, N_BLOCK, K_BLOCK]] {
            Case::new(Precision::F32, dims).whole(path, Update::Accumulate, &mut choices);
            assert_eq!(held(), before, "{dims:?}");
        }
        let lines = before.map(|(_, lines)| lines * size_of::<Line>());
        assert!(lines[0] <= 128 << 10 && lines[1] <= 768 << 10, "{lines:?} bytes");
    }
}

/// Every path rounds as [`rounded`] does, which is to the nearest, ties to even: bf16 numbers do not change, and a
/// number between two neighbours goes to the nearer one.
#[test]
fn operands_are_rounded_to_the_nearest() {
    let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let x: Vec<f32> = (0..6 << 16).map(|i: u32| f32::from_bits(((i / 6) << 16) | lower[i as usize % 6])).collect();
    for x in &x {
        let got = rounded(*x);
        let down = x.to_bits() & 0xffff_0000;
        let (down, up) = (f32::from_bits(down), f32::from_bits(down.wrapping_add(0x1_0000)));
        if x.is_nan() {
            assert!(got.is_nan() && got.to_bits() & 0xffff == 0, "{x}");
        } else if x.is_subnormal() {
            assert_eq!(got.to_bits(), x.to_bits() & 0x8000_0000);
        } else if up.is_finite() {
            let (below, above) = (x.abs() - down.abs(), up.abs() - x.abs());
            let even = if down.to_bits() & 0x1_0000 == 0 { down } else { up };
            let want = if below == above {
                even
            } else if below < above {
                down
            } else {
                up
            };
            assert_eq!(got.to_bits(), want.to_bits(), "{x:e}");
        }
    }
    assert_eq!((rounded(f32::MAX), rounded(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
    for round in [round, round_plainly] {
        let mut got = vec![bf16::ONE; x.len()];
        round(&x, &mut got);
        assert!(x.iter().zip(&got).all(|(x, got)| got.to_bits() == (rounded(*x).to_bits() >> 16) as u16));
        // For every length of the last vector, memory beyond it is not accessed.
        for len in 0..70 {
            got.fill(bf16::ONE);
            round(&x[..len], &mut got[..len]);
            let ones = got.iter().filter(|x| **x == bf16::ONE).count();
            assert_eq!(ones, got.len() - len, "{len} elements, none of them 1");
        }
    }
    for path in paths(Precision::Bf16) {
        for x in x.chunks(PIECE) {
            let piece = PackedPart { l: 0, k: 1, j: 0, columns: x.len() };
            let mut words = vec![0_u32; path.words([1, x.len()])];
            // SAFETY: the path runs here; one row, and room for its words.
            unsafe { pack(path, (Elements::Full(x.as_ptr()), (x.len(), 1)), piece, words.as_mut_ptr().cast()) };
            let width = path.words([1, 1]);
            for (j, x) in x.iter().enumerate() {
                assert_eq!(words[j / width * width + j % width], rounded(*x).to_bits(), "{path:?}: {x:e}");
            }
        }
    }
}

/// Every path rounds to TF32 as the arithmetic says: numbers around those of TF32 and between two of them, of every
/// exponent and both signs, subnormal ones and those that round to infinity; infinity stays, and so does a NaN.
#[test]
fn operands_are_rounded_to_tf32() {
    let lower = [0, 1, 0x0fff, 0x1000, 0x1001, 0x1fff];
    let upper = (0..1 << 19).step_by(23).chain([0, 0x3f800, 0x3fbff, 0x3fbfe, 0x7fbff, 0x3fc00]);
    let x: Vec<f32> = upper.flat_map(|high: u32| lower.map(|low| f32::from_bits(high << 13 | low))).collect();
    assert!(x.iter().any(|x| x.is_subnormal()) && x.iter().any(|x| x.is_nan()) && x.contains(&f32::INFINITY));
    for x in &x {
        let got = tf32(*x);
        assert_eq!(got.to_bits() & 0x1fff, 0, "{x:e}");
        match x.is_nan() {
            true => assert!(
                got.is_nan() && got.to_bits() & 0x0040_0000 != 0 && got.is_sign_negative() == x.is_sign_negative()
            ),
            false => assert_eq!(got.to_bits(), nearest_tf32(*x).to_bits(), "{x:e}"),
        }
    }
    for path in paths(Precision::Tf32) {
        for (x, by_rows) in x.chunks(PIECE).flat_map(|x| [(x, true), (x, false)]) {
            // One row of all columns, or one column of all terms.
            let (terms, columns) = if by_rows { (1, x.len()) } else { (x.len(), 1) };
            let piece = PackedPart { l: 0, k: terms, j: 0, columns };
            let mut words = vec![0_u32; path.words([terms, columns])];
            // SAFETY: the path runs here; one row or column, and room for its words.
            unsafe { pack(path, (Elements::Full(x.as_ptr()), (columns, 1)), piece, words.as_mut_ptr().cast()) };
            let width = path.words([1, 1]);
            for (at, x) in x.iter().enumerate() {
                let word = if by_rows { words[at / width * width + at % width] } else { words[at * width] };
                assert_eq!(word, tf32(*x).to_bits(), "{path:?}: {x:e}");
            }
        }
    }
}

/// The only difference between the paths of a precision.
#[test]
fn only_pairs_of_bf16_take_a_subnormal_sum_for_zero() {
    let tiny = 2_f32.powi(-70);
    for path in Precision::ALL.into_iter().flat_map(paths) {
        let mut c = [7.0_f32];
        // SAFETY: one element of each matrix.
        unsafe {
            let tiny = Elements::Full(&raw const tiny);
            let (a, b) = ((tiny, (1, 1)), Right::Strided(tiny, (1, 1)));
            product(path, [1, 1, 1], a, b, (c.as_mut_ptr(), (1, 1)), Update::Overwrite, Plain);
        }
        assert_eq!(c[0], if path == Path::Avx512Bf16 { 0.0 } else { tiny * tiny }, "{path:?}");
    }
}
