//! Grouped heads and angles, against the heads one by one.

use super::*;
use meshwork_core::tree;

/// Shapes, groups, and whether positions rotate the rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) dims: Dims,
    pub(super) groups: Groups,
    turned: bool,
}

impl Case {
    pub(super) fn new(
        [batch, seq, used, size]: [usize; 4],
        head_dim: usize,
        [before, after]: [usize; 2],
        turned: bool,
    ) -> Self {
        let dims = Dims::new([batch, seq, used * size, head_dim]);
        Case { dims, groups: Groups { size, kv_heads: before + used + after, first: before }, turned }
    }

    pub(super) fn kv_elements(&self) -> usize {
        self.dims.batch * self.dims.keys.count * 2 * self.groups.kv_heads * self.dims.head_dim
    }

    /// The same heads with other queries and keys.
    pub(super) fn slice(&self, seq: usize, keys: Keys) -> Self {
        Self { dims: Dims { seq, keys, ..self.dims }, ..*self }
    }

    /// The angle of a pair at a position.
    fn angle(&self, i: usize, pair: usize) -> f64 {
        i as f64 * 50_f64.powf(-2.0 * pair as f64 / self.dims.head_dim as f64)
    }

    pub(super) fn angles<T: Float>(&self) -> Vec<T> {
        let half = self.dims.head_dim / 2;
        let row = |i: usize| {
            let angle = move |pair| self.angle(i, pair);
            (0..half).map(move |pair| angle(pair).cos()).chain((0..half).map(move |pair| angle(pair).sin()))
        };
        (0..self.dims.queries().end.max(self.dims.keys.sequence)).flat_map(row).map(T::from_f64).collect()
    }

    /// `[batch, seq, 3, heads, head_dim]`: queries and keys are rotated, keys and values are repeated for each head of
    /// queries.
    fn spread(&self, q: &[f64], kv: &[f64]) -> Vec<f64> {
        let Case { dims: d, groups, turned } = *self;
        let kv_dims = Dims { heads: groups.kv_heads, ..d };
        let mut qkv = vec![0.0; 3 * elements(d)];
        for (b, h) in super::each_head(d) {
            for i in 0..d.seq {
                let kv_head = groups.first + h / groups.size;
                let from = [
                    &q[part(d, 1, [b, i, 0, h])],
                    &kv[part(kv_dims, 2, [b, i, 0, kv_head])],
                    &kv[part(kv_dims, 2, [b, i, 1, kv_head])],
                ];
                for (p, from) in from.into_iter().enumerate() {
                    let to = &mut qkv[part(d, 3, [b, i, p, h])];
                    to.copy_from_slice(from);
                    if turned && p < 2 {
                        self.turn(i, to, 1.0);
                    }
                }
            }
        }
        qkv
    }

    pub(super) fn turn(&self, i: usize, x: &mut [f64], direction: f64) {
        let half = x.len() / 2;
        for pair in 0..half {
            let (sin, cos) = (direction * self.angle(i, pair)).sin_cos();
            (x[pair], x[pair + half]) = (x[pair] * cos - x[pair + half] * sin, x[pair + half] * cos + x[pair] * sin);
        }
    }

    /// The gradients of `q` and `kv` from the gradient of the result of [`spread`](Self::spread).
    fn gather(&self, dqkv: &[f64]) -> [Vec<f64>; 2] {
        let Case { dims: d, groups, turned } = *self;
        let kv_dims = Dims { heads: groups.kv_heads, ..d };
        let (mut dq, mut dkv) = (vec![0.0; elements(d)], vec![0.0; self.kv_elements()]);
        for (b, h) in super::each_head(d) {
            for i in 0..d.seq {
                for p in 0..3 {
                    let mut from = dqkv[part(d, 3, [b, i, p, h])].to_vec();
                    if turned && p < 2 {
                        self.turn(i, &mut from, -1.0);
                    }
                    let to = match p {
                        0 => &mut dq[part(d, 1, [b, i, 0, h])],
                        _ => &mut dkv[part(kv_dims, 2, [b, i, p - 1, groups.first + h / groups.size])],
                    };
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
        }
        [dq, dkv]
    }

    pub(super) fn operands<T: Float>(&self) -> [Vec<T>; 3] {
        [("q", elements(self.dims)), ("kv", self.kv_elements()), ("dout", elements(self.dims))]
            .map(|(name, len)| values(name, len))
    }

    /// Output and lse. Every buffer starts as NaN, so that elements that are not overwritten are noticed.
    fn run<T: Tiled>(&self, tiles: Tiles<T>, q: &[T], kv: &[T], dropout: Option<Dropout>) -> [Vec<T>; 2] {
        self.run_with(tiles, q, kv, masks(dropout))
    }

    pub(super) fn run_with<T: Tiled>(&self, tiles: Tiles<T>, q: &[T], kv: &[T], masks: Masks<'_>) -> [Vec<T>; 2] {
        let (d, table) = (self.dims, self.angles::<T>());
        let nan = T::from(f32::NAN);
        let (mut out, mut lse) = (vec![nan; elements(d)], vec![nan; d.batch * d.heads * d.seq]);
        let angles = self.turned.then_some(Angles(&table));
        grouped_forward(tiles, d, self.groups, angles, [q, kv], &mut out, &mut lse, masks, None);
        [out, lse]
    }

    fn backward<T: Tiled>(
        &self,
        tiles: Tiles<T>,
        q: &[T],
        kv: &[T],
        dout: &[T],
        dropout: Option<Dropout>,
    ) -> [Vec<T>; 2] {
        self.backward_with(tiles, q, kv, dout, masks(dropout))
    }

    pub(super) fn backward_with<T: Tiled>(
        &self,
        tiles: Tiles<T>,
        q: &[T],
        kv: &[T],
        dout: &[T],
        masks: Masks<'_>,
    ) -> [Vec<T>; 2] {
        let [out, lse] = self.run_with(tiles, q, kv, masks);
        self.backward_from(tiles, Saved { q, kv, out: &out, lse: &lse }, dout, masks)
    }

    pub(super) fn backward_from<T: Tiled>(
        &self,
        tiles: Tiles<T>,
        saved: Saved<'_, T, T>,
        dout: &[T],
        masks: Masks<'_>,
    ) -> [Vec<T>; 2] {
        let (nan, table) = (T::from(f32::NAN), self.angles::<T>());
        let (mut dq, mut dkv) = (vec![nan; saved.q.len()], vec![nan; saved.kv.len()]);
        let angles = self.turned.then_some(Angles(&table));
        grouped_backward(tiles, self.dims, self.groups, angles, saved, dout, [&mut dq, &mut dkv], masks, None);
        [dq, dkv]
    }
}

/// Groups of every kind, heads of keys and values that no local head reads, and extents at the edges of tiles and
/// blocks.
fn cases() -> Vec<Case> {
    let shapes: [([usize; 4], usize, [usize; 2]); 8] = [
        ([1, 1, 1, 1], 2, [0, 0]),
        ([2, 13, 2, 2], 30, [0, 0]),
        ([1, 33, 1, 5], 64, [2, 0]),
        ([2, 127, 2, 1], 18, [1, 1]),
        ([1, 129, 2, 3], 32, [0, 1]),
        ([1, 300, 1, 4], 66, [0, 0]),
        ([1, 70, 1, 8], 16, [0, 0]),
        ([1, 2 * FORWARD_KEYS + 1, 1, 2], 128, [0, 0]),
    ];
    let cases = shapes.into_iter().flat_map(|shape| [false, true].map(|turned| (shape, turned)));
    cases.map(|((shape, head_dim, beside), turned)| Case::new(shape, head_dim, beside, turned)).collect()
}

/// Each kind of tiles against the equations in f64, head by head.
#[test]
fn every_kind_of_tiles_is_right_for_every_group() {
    for case in cases() {
        let [q, kv, dout] = case.operands::<f32>();
        let spread = case.spread(&widen(&q), &widen(&kv));
        for dropout in [None, Some(dropout(0.2))] {
            let [out, lse] = naive(case.dims, &spread, dropout);
            let [dq, dkv] = case.gather(&naive_backward(|x| x, case.dims, &spread, &widen(&dout), dropout));
            for tiles in Tiles::all(Precision::F32) {
                let [got, got_lse] = case.run(tiles, &q, &kv, dropout);
                assert_close(&got, &out, 5e-6);
                assert_close(&got_lse, &lse, 3e-6);
                let [got_dq, got_dkv] = case.backward(tiles, &q, &kv, &dout, dropout);
                assert_close(&got_dq, &dq, 3e-5);
                assert_close(&got_dkv, &dkv, 3e-5);
            }
        }
    }
}

/// Rows are rotated before they are rounded. A rotation in f32 may round the other way: bounds as for heads one by one.
#[test]
fn low_precision_rounds_what_has_been_turned() {
    let precisions = [(Precision::Bf16, 5e-4), (Precision::Tf32, 5e-4 / 8.0)];
    for (case, (precision, bound)) in cases().into_iter().flat_map(|case| precisions.map(|precision| (case, precision)))
    {
        let round = in_f64(precision);
        let [q, kv, dout] = case.operands::<f32>();
        let spread = case.spread(&widen(&q), &widen(&kv));
        let [out, _] = naive_in(round, case.dims, &spread, None);
        let [dq, dkv] = case.gather(&naive_backward(round, case.dims, &spread, &widen(&dout), None));
        for tiles in Tiles::all(precision) {
            let [got_dq, got_dkv] = case.backward(tiles, &q, &kv, &dout, None);
            let pairs = [(&case.run(tiles, &q, &kv, None)[0], &out), (&got_dq, &dq), (&got_dkv, &dkv)];
            let errors = pairs.map(|(got, want)| super::distance(got, want));
            // With one position there is nothing to choose from, so the gradient of its query is zero.
            assert!(
                errors.iter().all(|&error| error.is_nan() || error <= bound),
                "{precision:?}, {case:?}: {errors:?}"
            );
        }
    }
}

/// With one head of keys and values per query head and no rotation: the bits of the fused layout.
#[test]
fn heads_of_their_own_have_the_bits_of_the_fused_layout() {
    for precision in Precision::ALL {
        let case = Case::new([2, 140, 3, 1], 20, [0, 0], false);
        let (d, tiles) = (case.dims, f32::tiles(precision));
        let [q, kv, dout] = case.operands::<f32>();
        let rows = |x: &[f32], parts: usize| -> Vec<Vec<f32>> {
            x.chunks(parts * d.heads * d.head_dim).map(<[f32]>::to_vec).collect()
        };
        let joined = |q: &[f32], kv: &[f32]| -> Vec<f32> {
            rows(q, 1).into_iter().zip(rows(kv, 2)).flat_map(|(q, kv)| [q, kv].concat()).collect()
        };
        for dropout in [None, Some(dropout(0.3))] {
            let qkv = joined(&q, &kv);
            assert_eq!(case.run(tiles, &q, &kv, dropout), super::run_in(tiles, d, &qkv, dropout));
            let [dq, dkv] = case.backward(tiles, &q, &kv, &dout, dropout);
            assert_eq!(joined(&dq, &dkv), super::run_backward_in(tiles, d, &qkv, &dout, dropout));
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    for (shape, head_dim, beside) in
        [([2, 5, 2, 2], 4, [0, 0]), ([1, 4, 1, 3], 2, [1, 0]), ([1, BLOCK + 3, 1, 2], 2, [0, 0])]
    {
        let case = Case::new(shape, head_dim, beside, true);
        let [q, kv, dout] = case.operands::<f64>();
        let tiles = f64::tiles(Precision::F32);
        for dropout in [None, Some(dropout(0.4))] {
            let [dq, dkv] = case.backward(tiles, &q, &kv, &dout, dropout);
            check_gradient(&q, &dq, |q| dot(&case.run(tiles, q, &kv, dropout)[0], &dout));
            check_gradient(&kv, &dkv, |kv| dot(&case.run(tiles, &q, kv, dropout)[0], &dout));
        }
    }
}

/// AVX-512 and AVX2 give the same bits; in bf16 and TF32 all kinds do.
#[test]
fn tiles_agree_bit_for_bit() {
    for precision in Precision::ALL {
        let mut all = Tiles::all(precision);
        if precision == Precision::F32 {
            all.pop();
        }
        for case in cases() {
            let [q, kv, dout] = case.operands::<f32>();
            let drop = Some(dropout(0.2));
            let results = all.iter().map(|t| (case.run(*t, &q, &kv, drop), case.backward(*t, &q, &kv, &dout, drop)));
            let results: Vec<_> = results.collect();
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{precision:?}, {case:?}");
        }
    }
}

/// Some heads of a `[rows, heads, width]` tensor.
fn heads_of(x: &[f32], [heads, width]: [usize; 2], which: Range<usize>) -> Vec<f32> {
    x.chunks(heads * width).flat_map(|row| &row[which.start * width..which.end * width]).copied().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Each query head alone has the same bits as in the group, and the gradients of keys and values are the tree sums
    /// over the heads: for short sequences, whose gradients are summed in place, and for long ones.
    #[test]
    fn a_group_is_the_tree_over_its_heads(
        size in 1..9_usize, seq in prop::sample::select(&[1_usize, 40, 150, 1100][..]), turned: bool,
        precision in prop::sample::select(&Precision::ALL[..]),
    ) {
        let head_dim = if seq > 1000 { 128 } else { 6 };
        let case = Case::new([1, seq, 1, size], head_dim, [1, 0], turned);
        let tiles = f32::tiles(precision);
        let [q, kv, dout] = case.operands::<f32>();
        let [out, _] = case.run(tiles, &q, &kv, None);
        let [dq, dkv] = case.backward(tiles, &q, &kv, &dout, None);
        let alone = Case::new([1, seq, 1, 1], head_dim, [1, 0], turned);
        let of = |x: &[f32], head: usize| heads_of(x, [size, head_dim], head..head + 1);
        let mut shares = Vec::new();
        for head in 0..size {
            let (q, dout) = (of(&q, head), of(&dout, head));
            prop_assert_eq!(&alone.run(tiles, &q, &kv, None)[0], &of(&out, head));
            let [dq_alone, share] = alone.backward(tiles, &q, &kv, &dout, None);
            prop_assert_eq!(dq_alone, of(&dq, head));
            shares.push(share);
        }
        prop_assert_eq!(&fold(shares), &dkv);
        // Whole subtrees, as ranks hold them, add up to the same.
        let half = size.next_power_of_two() / 2;
        if size > 1 {
            let parts = [0..half, half..size].map(|heads| {
                let part = Case::new([1, seq, 1, heads.len()], head_dim, [1, 0], turned);
                let [q, dout] = [&q, &dout].map(|x| heads_of(x, [size, head_dim], heads.clone()));
                let [_, share] = part.backward(tiles, &q, &kv, &dout, None);
                share
            });
            prop_assert_eq!(fold(parts.to_vec()), dkv);
        }
    }
}

/// The tree over vectors.
fn fold(shares: Vec<Vec<f32>>) -> Vec<f32> {
    let join = |left: Vec<f32>, right: Vec<f32>| left.iter().zip(right).map(|(a, b)| a + b).collect();
    let mut sums = tree::Counter::default();
    shares.into_iter().for_each(|share| sums.push(1, share, join));
    sums.finish(join).unwrap()
}
