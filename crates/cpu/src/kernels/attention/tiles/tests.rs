//! Packed operands of products.

use super::*;
use crate::kernels::gemm::rounded;
use crate::kernels::values;

/// Rows of a left operand stay rows when they are rounded: one or two terms per word, the first in the upper half.
#[test]
fn rows_of_words_hold_the_rounded_terms() {
    let rows = 19;
    for tiles in Tiles::all(Precision::Bf16) {
        let terms_of_word = 2 * tiles.lanes / tiles.left_len([tiles.lanes, 2]);
        for len in [1, 2, 15, 16, 17, 31, 32, 33, 64, 127] {
            let terms: Vec<f32> = values("terms", rows * (len + 1));
            let mut words = vec![f32::NAN; tiles.left_len([rows, len])];
            tiles.left([rows, len], (&terms, (len + 1, 1)), &mut words);
            let upper = |x: f32| rounded(x).to_bits() >> 16;
            for (terms, words) in terms.chunks(len + 1).zip(words.chunks(len.div_ceil(terms_of_word))) {
                for (pair, word) in terms[..len].chunks(terms_of_word).zip(words) {
                    assert_eq!(word.to_bits(), upper(pair[0]) << 16 | pair.get(1).map_or(0, |&x| upper(x)), "{len}");
                }
            }
        }
    }
}
