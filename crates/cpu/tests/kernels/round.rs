//! Operands and results in 16 bits, in parts and in pieces.

use half::bf16;
use meshwork_cpu::kernels::round::*;

#[test]
fn parts_follow_each_other_and_cover_all() {
    let (mut full, mut rounded) = ([0.0_f32; 10], [bf16::ZERO; 10]);
    for (len, want) in [(1, 10), (3, 4), (5, 2), (10, 1), (11, 1)] {
        let mut at = 0;
        for stored in [Stored::Full(&mut full), Stored::Bf16(&mut rounded)] {
            assert_eq!(stored.chunks(len).count(), want);
        }
        for part in Stored::Bf16(&mut rounded).chunks(len) {
            at += part.len();
            part.fill(|_, part| part.fill(at as f32));
        }
        assert_eq!(at, 10);
        let ends: Vec<f32> = (0..10).map(|i| (i / len * len + len).min(10) as f32).collect();
        assert_eq!(rounded.map(|x| x.to_f32()).to_vec(), ends);
    }
}

#[test]
fn pieces_are_computed_where_they_lie() {
    let mut to = vec![bf16::ZERO; 2 * 256 + 3];
    let index = |at: usize| (at % 251) as f32;
    Stored::Bf16(&mut to).fill(|at, piece| {
        piece.iter_mut().enumerate().for_each(|(i, x): (usize, &mut f32)| *x = index(at + i));
    });
    assert!(to.iter().enumerate().all(|(at, x)| x.to_f32() == index(at)));
}

#[test]
#[should_panic(expected = "elements to round against their places")]
fn lengths_must_agree() {
    round(&[1.0; 3], &mut [bf16::ZERO; 2]);
}
