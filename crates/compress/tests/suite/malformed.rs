//! Bytes that are no message are a typed error: no panic, no large allocation.

use crate::common::{SCHEMES, compress, draws, scheme, values};
use meshwork_compress::{CompressError, Fold, Message, MessageError, Shape};
use proptest::prelude::*;

fn restore(text: &str, bytes: Vec<u8>, shape: Shape) -> Result<Vec<f32>, CompressError> {
    let mut out = vec![0.0; shape.len()];
    Message::received(bytes).restore(&scheme(text), shape, Fold::Replace, &mut out).map(|()| out)
}

fn problem(result: Result<Vec<f32>, CompressError>) -> MessageError {
    match result {
        Err(CompressError::Message(problem)) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_part_of_a_message_is_checked() {
    let shape = Shape::vector(64).unwrap();
    let good = compress(&scheme("topk:2"), &values("x", 64), shape, draws(0)).into_bytes();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        problem(restore("topk:2", bytes, shape))
    };
    assert!(restore("topk:2", good.clone(), shape).is_ok());
    assert_eq!(with(0, 2), MessageError::Version(2));
    assert!(matches!(with(1, 3), MessageError::Method { found: 3, .. }));
    assert_eq!(with(2, 1), MessageError::Padding);
    assert!(matches!(with(4, good[4] ^ 1), MessageError::Fingerprint { .. }));
    assert!(matches!(with(8, 65), MessageError::Fingerprint { .. }));
    let indices = MessageError::Indices { count: 2, below: 64 };
    assert_eq!(with(18, 0b111), indices, "three of two");
    assert_eq!(with(18, 0b1), indices, "one of two");
    assert_eq!(with(18, 0b1010_0000), indices, "numbers above the last");
    // Low bits 0 of both, in one rest: twice the same.
    let mut twice = good.clone();
    twice[16..19].copy_from_slice(&[0, 0, 0b11]);
    assert_eq!(problem(restore("topk:2", twice, shape)), indices);
    // Ten low bits are used, of sixteen.
    let mut padded = good.clone();
    padded[16..19].copy_from_slice(&[0, 0b100, 0b101]);
    assert_eq!(problem(restore("topk:2", padded, shape)), MessageError::Padding);
    let short = problem(restore("topk:2", good[..20].to_vec(), shape));
    assert_eq!(short.to_string(), "it has 20 bytes, 27 were expected");
    assert_eq!(problem(restore("topk:2", good[..9].to_vec(), shape)), MessageError::Bytes { bytes: 9, wanted: 27 });
    assert!(matches!(problem(restore("topk:3", good.clone(), shape)), MessageError::Fingerprint { .. }));
    assert!(matches!(
        problem(restore("topk:2", good, Shape::matrix(2, 32).unwrap())),
        MessageError::Fingerprint { .. }
    ));

    let shape = Shape::vector(9).unwrap();
    let mut codes = compress(&scheme("sign"), &[1.0; 9], shape, draws(0)).into_bytes();
    *codes.last_mut().unwrap() = 0x80;
    assert_eq!(problem(restore("sign", codes, shape)), MessageError::Padding);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any change of any message, and any bytes behind a right header.
    #[test]
    fn any_bytes_are_restored_or_refused(
        at in 0..SCHEMES.len(),
        rows in 2..5_usize,
        cols in 2..300_usize,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        body in proptest::option::of(any::<u64>()),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let (text, shape) = (SCHEMES[at], Shape::matrix(rows, cols).unwrap());
        let mut bytes = compress(&scheme(text), &values("x", shape.len()), shape, draws(0)).into_bytes();
        if let Some(seed) = body {
            let mut rng = meshwork_testkit::Rng::new(seed);
            bytes[16..].iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        }
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        match restore(text, bytes, shape) {
            Ok(_) | Err(CompressError::Message(_)) => {}
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
