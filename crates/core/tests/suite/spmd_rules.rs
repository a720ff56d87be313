//! Rules of products and of maps that move dims, against brute force: two ranks are simulated, with integers, and a
//! rule accepts a pair of types if and only if some type of the result is sound, forward and in both gradients.

use Ty::{Invariant as I, Partial as P, Replicate as R, Shard as S, Varying as V};
use meshwork_core::rules::{self, Operand, Origin};
use meshwork_core::{Axis, SpmdError, Ty, Types};

const X: [usize; 3] = [2, 4, 6];

/// Elements of a row-major array of at most three dims; a missing dim has extent 1, in front.
#[derive(Clone, Debug, PartialEq)]
struct Array {
    shape: [usize; 3],
    data: Vec<i64>,
}

impl Array {
    fn new(shape: &[usize], value: impl Fn([usize; 3]) -> i64) -> Self {
        let mut dims = [1; 3];
        dims[3 - shape.len()..].copy_from_slice(shape);
        let at = |i: usize| [i / (dims[1] * dims[2]), i / dims[2] % dims[1], i % dims[2]];
        Self { shape: dims, data: (0..dims.iter().product()).map(|i| value(at(i))).collect() }
    }

    /// Integers that look like noise.
    fn noise(shape: &[usize], seed: i64) -> Self {
        Self::new(shape, |[i, j, k]| {
            let at = (i * 97 + j * 31 + k * 7) as i64;
            (at * at * 13 + seed * (at + 5) * 29) % 19 - 9
        })
    }

    /// With dims of extent 1 repeated.
    fn get(&self, at: [usize; 3]) -> i64 {
        let [i, j, k] = std::array::from_fn(|dim| at[dim] % self.shape[dim]);
        self.data[(i * self.shape[1] + j) * self.shape[2] + k]
    }

    fn zip(&self, other: &Array, f: impl Fn(i64, i64) -> i64) -> Array {
        let shape: [usize; 3] = std::array::from_fn(|dim| self.shape[dim].max(other.shape[dim]));
        Array::new(&shape, |at| f(self.get(at), other.get(at)))
    }

    /// Sums over the dims that `shape` has not.
    fn sum_to(&self, shape: [usize; 3]) -> Array {
        let mut sum = Array::new(&shape, |_| 0);
        for (i, &value) in self.data.iter().enumerate() {
            let at = [i / (self.shape[1] * self.shape[2]), i / self.shape[2] % self.shape[1], i % self.shape[2]];
            let [i, j, k] = std::array::from_fn(|dim| at[dim] % shape[dim]);
            sum.data[(i * shape[1] + j) * shape[2] + k] += value;
        }
        sum
    }

    fn half(&self, dim: usize, rank: usize) -> Array {
        let mut shape = self.shape;
        shape[dim] /= 2;
        Array::new(&shape, |mut at| {
            at[dim] += rank * shape[dim];
            self.get(at)
        })
    }
}

/// The value of each of two ranks that together stand for `whole` by the type `ty`. `front`: dims that the value lacks.
fn laid_out(whole: &Array, ty: Ty, front: usize, seed: i64) -> Option<[Array; 2]> {
    Some(match ty {
        I | R => [whole.clone(), whole.clone()],
        S(dim) => [whole.half(dim + front, 0), whole.half(dim + front, 1)],
        P => {
            let share = Array::noise(&whole.shape, seed);
            [share.clone(), whole.zip(&share, |a, b| a - b)]
        }
        V => return None, // stands for nothing but itself
    })
}

/// Whether the values of two ranks are `whole` by the type `ty`.
fn stands_for(ranks: &[Array; 2], ty: Ty, front: usize, whole: &Array) -> bool {
    match ty {
        P => ranks[0].shape == ranks[1].shape && ranks[0].zip(&ranks[1], |a, b| a + b) == *whole,
        V => true,
        _ => laid_out(whole, ty, front, 0).is_some_and(|wanted| wanted == *ranks),
    }
}

/// Whether `x ∘ y` is sound with a result of type `tz`: forward, and the gradients that follow from one of it, with `f`
/// and its two partial derivatives.
fn sound(tx: Ty, ty: Ty, tz: Ty, y_shape: &[usize], f: [fn(i64, i64) -> i64; 3]) -> bool {
    let front = 3 - y_shape.len();
    let (x, y) = (Array::noise(&X, 3), Array::noise(y_shape, 4));
    let (z, dz) = (x.zip(&y, f[0]), Array::noise(&X, 5));
    let (Some(xs), Some(ys), Some(dzs)) =
        (laid_out(&x, tx, 0, 6), laid_out(&y, ty, front, 7), laid_out(&dz, tz.dual(), 0, 8))
    else {
        return false;
    };
    // Ranks compute without knowing of each other: shapes must fit.
    let repeated = |dim: usize| dim < front || y_shape[dim - front] == 1;
    let fits = |r: usize| (0..3).all(|dim| ys[r].shape[dim] == xs[r].shape[dim] || repeated(dim));
    if !fits(0) || !fits(1) {
        return false;
    }
    let each = |compute: &dyn Fn(usize) -> Array| [compute(0), compute(1)];
    let gradient = |r: usize, f: fn(i64, i64) -> i64| dzs[r].zip(&xs[r].zip(&ys[r], f), |g, slope| g * slope);
    let zs = each(&|r| xs[r].zip(&ys[r], f[0]));
    if zs[0].shape != dzs[0].shape {
        return false;
    }
    let dxs = each(&|r| gradient(r, f[1]));
    let dys = each(&|r| gradient(r, f[2]).sum_to(ys[r].shape));
    let whole = |f: fn(i64, i64) -> i64| dz.zip(&x.zip(&y, f), |g, slope| g * slope);
    stands_for(&zs, tz, 0, &z)
        && stands_for(&dxs, tx.dual(), 0, &whole(f[1]))
        && stands_for(&dys, ty.dual(), front, &whole(f[2]).sum_to(y.shape))
}

fn operand(name: &str, ty: Ty, ndim: usize) -> Operand<'_> {
    Operand::value(name, Types::new(&[(Axis::Tp, ty)]), ndim)
}

fn tp(types: Types) -> Ty {
    types.get(Axis::Tp).unwrap()
}

type Rule = fn(Operand<'_>, Operand<'_>) -> Result<Types, SpmdError>;

/// Every pair of types: the rule's answer is the sound one, and a refusal says what to do.
fn check(rule: Rule, f: [fn(i64, i64) -> i64; 3]) {
    let whole: [&[usize]; 3] = [&X, &X[1..], &X[2..]];
    let ones: [&[usize]; 4] = [&[2, 1, 6], &[2, 4, 1], &[1, 4, 1], &[4, 1]];
    for y_shape in whole.into_iter().chain(ones) {
        let front = 3 - y_shape.len();
        let is_one = |dim: &usize| y_shape[*dim] == 1;
        for tx in [I, R, P, S(0), S(1), S(2)] {
            for ty in [I, R, P].into_iter().chain((0..y_shape.len()).filter(|dim| !is_one(dim)).map(S)) {
                let what = format!("{tx} and {ty} of {y_shape:?}");
                let candidates = [I, R, P, S(0), S(1), S(2)];
                let right: Vec<Ty> = candidates.into_iter().filter(|&tz| sound(tx, ty, tz, y_shape, f)).collect();
                let y =
                    operand("y", ty, y_shape.len()).repeated((0..y_shape.len()).filter(is_one).map(|dim| front + dim));
                match rule(operand("x", tx, 3), y) {
                    Ok(types) => assert_eq!([tp(types)], right[..], "{what}"),
                    Err(error) => {
                        assert_eq!(right, [], "{what}: {error}");
                        assert!(error.fix.contains("first"), "{what}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_product_accepts_what_is_sound_on_two_ranks_and_nothing_else() {
    check(|x, y| rules::product("mul", x, y), [|x, y| x * y, |_, y| y, |x, _| x]);
}

#[test]
fn a_sum_accepts_what_is_sound_on_two_ranks_and_nothing_else() {
    check(|x, y| rules::add("add", x, y), [|x, y| x + y, |_, _| 1, |_, _| 1]);
}

#[test]
fn a_function_of_two_values_accepts_what_is_sound_on_two_ranks_and_nothing_else() {
    // Linear in neither of them.
    check(
        |x, y| rules::elementwise("f", &[x, y]),
        [|x, y| x * x * y * y + y, |x, y| 2 * x * y * y, |x, y| 2 * x * x * y + 1],
    );
}

/// The product of matrices, whichever operand is stored transposed; testkit's `check_op` holds what it accepts against
/// one rank.
#[test]
fn the_table_of_products_of_matrices() {
    let rule = |tx, ty, x, y| rules::matrices("matmul", operand("x", tx, 3), operand("y", ty, 3), x, y);
    for (x, y) in [([1, 2], [1, 2]), ([1, 2], [2, 1]), ([2, 1], [1, 2])] {
        let ([m, kx], [ky, n]) = (x, y);
        let right = [
            (I, I, I),
            (R, R, R),
            (V, V, V),
            (V, R, V),
            (R, V, V),
            (P, R, P),
            (R, P, P),
            (S(0), S(0), S(0)),
            (S(m), R, S(1)),
            (R, S(n), S(2)),
            (S(kx), S(ky), P),
        ];
        for tx in [I, R, P, V, S(0), S(1), S(2)] {
            for ty in [I, R, P, V, S(0), S(1), S(2)] {
                let want = right.iter().find(|(a, b, _)| (*a, *b) == (tx, ty)).map(|(.., tz)| *tz);
                let got = rule(tx, ty, x, y);
                assert_eq!(got.as_ref().ok().map(|types| tp(*types)), want, "{tx} and {ty} in {x:?} {y:?}");
                assert!(got.is_ok() || got.unwrap_err().fix.contains("first"), "{tx} and {ty}");
            }
        }
    }
    assert_eq!(
        rule(S(2), R, [1, 2], [1, 2]).unwrap_err().to_string(),
        "matmul: on axis tp, x is Shard(2) and y is Replicate: a rank's matrices need elements of other ranks; cut the same leading dim of \
         both, dim 1 of x or dim 2 of y, or the dims that are summed over first"
    );
}

/// A constant that is the same on every rank is read as the values beside it are.
#[test]
fn constants_are_read_as_parameters_are() {
    let constant = |ty| Operand { origin: Origin::Constant, ..operand("c", ty, 1) };
    let read = |tx, tc| {
        let mut operands = [operand("x", tx, 2), constant(tc)];
        let changed = rules::resolve_constants(&mut operands);
        (tp(operands[1].types), changed)
    };
    for tx in [R, S(0), S(1), P, V] {
        assert_eq!([read(tx, I), read(tx, R)], [(R, true), (R, false)], "{tx}");
    }
    assert_eq!([read(I, I), read(I, R)], [(I, false), (I, true)]);
    for kept in [S(0), P, V] {
        assert_eq!([read(I, kept), read(R, kept)], [(kept, false); 2]);
    }
    // Constants alone: one of them has no gradient to miss.
    let mut two = [constant(I), constant(R)];
    assert!(rules::resolve_constants(&mut two));
    assert_eq!(two.map(|of| tp(of.types)), [R, R]);
}

/// A value of each rank's own stands for nothing beyond it, so no whole can be compared: the table says what is meant.
#[test]
fn products_with_values_of_each_ranks_own() {
    let product = |tx, ty| rules::product("mul", operand("x", tx, 3), operand("y", ty, 3));
    for (tx, ty) in [(V, V), (V, R), (R, V)] {
        assert_eq!(tp(product(tx, ty).unwrap()), V);
    }
    for other in [I, P, S(0)] {
        assert!(product(V, other).is_err() && product(other, V).is_err(), "{other}");
    }
}

#[test]
fn what_a_refused_product_says() {
    let say =
        |tx, ty, y_dims| rules::product("mul", operand("x", tx, 3), operand("y", ty, y_dims)).unwrap_err().to_string();
    for (tx, ty, y_dims, message) in [
        (
            P,
            P,
            3,
            "x and y are both Partial, and a product of sums is not the sum of products; all_reduce_replicate one of them first, as y",
        ),
        (
            P,
            I,
            1,
            "x is Partial and y is Invariant: the gradient of y would miss the other ranks' share; copy(I→R) y first, or all_reduce the Partial one",
        ),
        (
            I,
            R,
            3,
            "x is Invariant and y is Replicate: the gradient of x would miss the other ranks' share; copy(I→R) x first",
        ),
        (
            S(1),
            I,
            3,
            "x is Shard(1) and y is Invariant: the gradient of y would miss the other ranks' share; split(I→S) y along dim 1 first",
        ),
        (
            S(1),
            I,
            1,
            "x is Shard(1) and y is Invariant: the gradient of y would miss the other ranks' share; copy(I→R) y first",
        ),
        (
            I,
            S(0),
            1,
            "x is Invariant and y is Shard(0): the gradient of x would miss the other ranks' share; split(I→S) x along dim 2 first",
        ),
        (
            S(2),
            R,
            1,
            "x is Shard(2) and y is Replicate: they do not hold the same elements; slice(R→S) y along dim 0 first",
        ),
        (
            R,
            S(0),
            2,
            "x is Replicate and y is Shard(0): they do not hold the same elements; slice(R→S) x along dim 1 first",
        ),
        (
            S(0),
            S(2),
            3,
            "x is Shard(0) and y is Shard(2): they do not hold the same elements; all_to_all y from dim 2 to dim 0 first",
        ),
        (
            S(0),
            S(0),
            2,
            "x is Shard(0) and y is Shard(0): they do not hold the same elements; all_gather y along dim 0 first",
        ),
        (
            P,
            S(0),
            1,
            "x is Partial and y is Shard(0): a value used before its reduction; reduce_scatter x along dim 2 first",
        ),
        (
            S(1),
            P,
            2,
            "x is Shard(1) and y is Partial: a value used before its reduction; reduce_scatter y along dim 0 first",
        ),
        (S(0), P, 2, "x is Shard(0) and y is Partial: a value used before its reduction; all_reduce_replicate y first"),
    ] {
        assert_eq!(say(tx, ty, y_dims), format!("mul: on axis tp, {message}"));
    }
}

#[test]
fn the_table_of_sample_losses() {
    let loss = |tx, ty| rules::sample_loss("loss", operand("x", tx, 3), operand("targets", ty, 3));
    for (t, want) in [(I, I), (R, R), (S(0), S(0)), (S(1), P), (S(2), P), (V, V)] {
        assert_eq!(tp(loss(t, t).unwrap()), want);
    }
    for (tx, ty, say) in [
        (P, P, "x is Partial, and loss of a sum is not the sum of loss; all_reduce or reduce_scatter x over tp first"),
        (I, R, "copy(I→R) x first"),
        (S(0), I, "split(I→S) targets along dim 0 first"),
        (S(0), S(1), "all_to_all targets from dim 1 to dim 0 first"),
    ] {
        assert!(loss(tx, ty).unwrap_err().to_string().contains(say), "{tx} {ty}");
    }
}

#[test]
fn the_table_of_maps_that_move_dims() {
    let x = |ty| operand("x", ty, 3);
    for ty in [I, R, V, P] {
        assert_eq!(tp(rules::sum_over("sum", x(ty), 1).unwrap()), ty);
        assert_eq!(tp(rules::part_of("narrow", x(ty), 1).unwrap()), ty);
        assert_eq!(tp(rules::transpose("transpose", x(ty), 0, 1).unwrap()), ty);
        assert_eq!(tp(rules::reshape("reshape", x(ty), &[2, 4, 6], &[2, 24]).unwrap()), ty);
    }
    let on_shards =
        |rule: &dyn Fn(Operand<'static>) -> Result<Types, SpmdError>| [0, 1, 2].map(|dim| rule(x(S(dim))).map(tp).ok());
    assert_eq!(on_shards(&|x| rules::sum_over("sum", x, 1)), [Some(S(0)), Some(P), Some(S(1))]);
    assert_eq!(on_shards(&|x| rules::part_of("narrow", x, 1)), [Some(S(0)), None, Some(S(2))]);
    assert_eq!(on_shards(&|x| rules::transpose("transpose", x, 0, 2)), [Some(S(2)), Some(S(1)), Some(S(0))]);
    assert_eq!(on_shards(&|x| rules::reshape("reshape", x, &[2, 4, 6], &[2, 24])), [Some(S(0)), Some(S(1)), None]);
    assert_eq!(on_shards(&|x| rules::reshape("reshape", x, &[2, 4, 6], &[8, 2, 3])), [Some(S(0)), None, Some(S(1))]);
    assert_eq!(
        rules::reshape("reshape", x(S(2)), &[2, 4, 6], &[2, 24]).unwrap_err().to_string(),
        "reshape: on axis tp, dim 2 of x is sharded, and no dim of [2, 24] begins where it does in [2, 4, 6]: a rank's elements would lie \
         scattered over the new dims; transpose dim 2 to the front of those that it is merged with first, or all_gather x along it"
    );
    assert_eq!(
        rules::part_of("narrow", x(S(1)), 1).unwrap_err().to_string(),
        "narrow: on axis tp, dim 1 of x is sharded, and narrow needs the whole of it on one rank; all_gather x along dim 1 first"
    );
}
