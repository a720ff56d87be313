//! Functions of some tokens at a time.

use crate::common::{NoParams, alone, input, on_tp, tape_of, to_f64, values};
use meshwork_core::{Ty, Types};
use meshwork_tensor::tape::{Seed, Weights};
use meshwork_tensor::{Result, Tensor, Var};

/// A function of two values with dropout gives what it gives on all tokens, and so do the gradients of both.
#[test]
fn blocks_give_the_values_and_gradients_of_all_tokens() {
    let of = |block| {
        let tape = tape_of(&alone());
        let value = |name, features| input(&tape, &values(name, 14 * features), &[2, 7, features], Types::NONE);
        let (x, y) = (value("x", 3), value("y", 3));
        let function = |parts: &[Var]| parts[0].mul(&parts[1])?.dropout(0.4, "some");
        let z = match block {
            0 => function(&[x.clone(), y.clone()]),
            block => tape.in_blocks(&[&x, &y], block, move |_, parts, _| function(parts)),
        };
        let z = z.unwrap();
        let seed = Tensor::from_slice(tape.device(), &values("seed", 42), [2, 7, 3]).unwrap();
        tape.backward(&z, Seed::from(seed), Weights::Now, &mut NoParams).unwrap();
        let gradients = [&x, &y].map(|x| to_f64(&tape.take_grad(x).unwrap()));
        assert_eq!(tape.random_names(), ["some"]);
        (to_f64(z.tensor()), gradients)
    };
    let all = of(0);
    assert!(all.0.contains(&0.0) && all.0.iter().any(|z| *z != 0.0));
    for block in [1, 3, 6, 7, 100] {
        assert_eq!(of(block), all, "blocks of {block}");
    }
}

type Function<'a> = &'a dyn Fn(&Var) -> Result<Var>;

#[test]
fn what_is_no_function_of_single_tokens_is_refused() {
    let told = |of: Function<'_>| {
        let tape = tape_of(&alone());
        of(&input(&tape, &values("x", 24), &[2, 4, 3], Types::NONE)).unwrap_err().to_string()
    };
    let refused: [(Function<'_>, &str); 6] = [
        (&|x| x.in_blocks(0, |_, x| Ok(x.clone())), "a block has a token"),
        (&|x| x.in_blocks(2, |_, x| x.narrow(1, 0..1)), "the extents of its tokens"),
        (&|x| x.in_blocks(2, |_, x| x.narrow(1, 0..1)?.dropout(0.5, "a")), "is for blocks of 2 tokens"),
        (&|x| x.dropout(0.5, "a")?.in_blocks(2, |_, x| x.dropout(0.5, "a")), "\"a\""),
        (
            &|x| x.tape().in_blocks(&[x, &x.narrow(1, 0..3)?], 2, |_, x, _| Ok(x[0].clone())),
            "the same samples and tokens",
        ),
        (&|x| x.tape().in_blocks(&[], 2, |_, x, _| Ok(x[0].clone())).map(|_| x.clone()), "it takes 1 to 4 values"),
    ];
    for (of, problem) in refused {
        let told = told(of);
        assert!(told.contains(problem), "{problem} in {told}");
    }
    let tape = tape_of(&alone());
    let x = input(&tape, &values("x", 24), &[2, 4, 3], Types::NONE);
    let y = input(&tape, &values("x", 24), &[2, 4, 3], on_tp(Ty::Shard(1)));
    let told = tape.in_blocks(&[&x, &y], 2, |_, x, _| Ok(x[0].clone())).unwrap_err().to_string();
    assert!(told.contains("the same samples and tokens"), "{told}");
}

/// The values of a block are no constants, of which an operation may read either type.
#[test]
fn what_all_tokens_refuse_a_block_refuses() {
    let tape = tape_of(&alone());
    let value = |ty| input(&tape, &values("x", 24), &[2, 4, 3], on_tp(ty));
    let (x, y) = (value(Ty::Invariant), value(Ty::Replicate));
    let whole = x.mul(&y).unwrap_err().to_string();
    let told = tape.in_blocks(&[&x, &y], 2, |_, parts, _| parts[0].mul(&parts[1])).unwrap_err().to_string();
    assert!(told.contains("copy(I→R)") && told == whole, "{told} and {whole}");
}
