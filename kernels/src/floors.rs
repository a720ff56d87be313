//! Lower bounds for a launch of each kernel: bytes to move, operations to compute, and the time of both on a card.
//! [`report`] generates the table `kernels/floors.md` from these and from the types of the arguments.
//!
//! Every kernel is in [`FLOORS`], at the sizes of a model of 1.3 billion parameters, at which
//! `crates/cuda/benches/ops.rs` times operations, or of a network for images, or in [`WITHOUT`], with the reason.

use crate::kernel::Arg;
use std::fmt::Write;

/// The least work of a launch, of one kernel or of several whose arguments differ in their types alone.
#[derive(Debug)]
pub struct Floor {
    /// The kernels.
    pub kernels: &'static [&'static str],
    /// The sizes of the launch.
    pub sizes: &'static str,
    /// Elements that must be moved for each pointer argument; elements that are read and written count twice.
    pub moved: &'static [(&'static str, u64)],
    /// Operations of tensor cores on bf16.
    pub operations: u64,
    /// Powers of two.
    pub powers: u64,
}

/// The most that a card can do in a second.
struct Card {
    bytes: f64,
    operations: f64,
    /// 16 a clock on each of 132 SMs, at 1.755 GHz.
    powers: f64,
}

/// An H100 and an H200, with the numbers of `crates/train/src/config/cards.rs`.
const CARDS: [Card; 2] = [
    Card { bytes: 3.35e12, operations: 989.4e12, powers: 16.0 * 132.0 * 1.755e9 },
    Card { bytes: 4.8e12, operations: 989.4e12, powers: 16.0 * 132.0 * 1.755e9 },
];

macro_rules! floors {
    ($($($kernel:ident)+, $sizes:literal; $($arg:ident $count:expr),+; $operations:expr, $powers:expr;)*) => {
        /// Lower bounds for kernels limited by bytes or operations.
        pub static FLOORS: &[Floor] = &[$(Floor {
            kernels: &[$(stringify!($kernel)),+],
            sizes: $sizes,
            moved: &[$((stringify!($arg), $count)),+],
            operations: $operations,
            powers: $powers,
        }),*];
    };
}

/// Tokens, features, elements of tokens × features, and parts of 64 tokens.
const T: u64 = 32_768;
const H: u64 = 2048;
const X: u64 = T * H;
const PARTS: u64 = T / 64;
/// Ids, and rows of logits.
const V: u64 = 50_304;
const ROWS: u64 = 8192;
/// Choices of experts, 8 a token, and experts.
const CHOICES: u64 = 8 * T;
const EXPERTS: u64 = 64;
/// Elements of images of 56 × 56 with 64 channels, 256 of them.
const IMAGES: u64 = 256 * 56 * 56 * 64;
/// Elements of a flat vector.
const FLAT: u64 = 1 << 28;
/// Elements of an operand of attention, number of its rows, and number of (query, visible key) pairs: 32 × 1024 tokens
/// of 12 heads of 64, 4 × 4096 of 16 of 128 and of 8 of 256.
const A64: u64 = 32 * 1024 * 12 * 64;
const R64: u64 = 32 * 1024 * 12;
const P64: u64 = 32 * 12 * 1024 * 1025 / 2;
const A128: u64 = 4 * 4096 * 16 * 128;
const R128: u64 = 4 * 4096 * 16;
const P128: u64 = 4 * 16 * 4096 * 4097 / 2;
const R256: u64 = 4 * 4096 * 8;
const P256: u64 = 4 * 8 * 4096 * 4097 / 2;

#[rustfmt::skip] // A table: one launch, one line. `maps` stands for the data copied by them, in words of 8 bytes. Scattered elements count as the 32 bytes around them.
floors! {
    layer_norm_forward_f32 layer_norm_forward_bf16 layer_norm_forward_16, "32768 × 2048"; x X, gamma H, beta H, y X, mean T, rstd T; 0, 0;
    layer_norm_backward layer_norm_backward_16, "32768 × 2048"; dy X, x X, gamma H, mean T, rstd T, starts PARTS, dx X, dgamma PARTS * H, dbeta PARTS * H; 0, 0;
    layer_norm_backward_wide layer_norm_backward_wide_16, "4096 × 16384"; dy X, x X, gamma 8 * H, mean T / 8, rstd T / 8, dx X; 0, 0;
    layer_norm_backward_parts layer_norm_backward_parts_16, "4096 × 16384"; dy X, x X, mean T / 8, rstd T / 8, starts PARTS / 8, dgamma PARTS * H, dbeta PARTS * H; 0, 0;
    rms_norm_forward_f32 rms_norm_forward_bf16 rms_norm_forward_16, "32768 × 2048"; x X, weight H, y X, rstd T; 0, 0;
    rms_norm_backward rms_norm_backward_16, "32768 × 2048"; dy X, x X, weight H, rstd T, starts PARTS, dx X, dweight PARTS * H; 0, 0;
    rms_norm_backward_wide rms_norm_backward_wide_16, "4096 × 16384"; dy X, x X, weight 8 * H, rstd T / 8, dx X; 0, 0;
    rms_norm_backward_parts rms_norm_backward_parts_16, "4096 × 16384"; dy X, x X, rstd T / 8, starts PARTS / 8, dweight PARTS * H; 0, 0;
    add add_16, "32768 × 2048"; a X, b X, out X; 0, 0;
    add_assign add_assign_16, "32768 × 2048"; a 2 * X, b X; 0, 0;
    bias bias_16, "32768 × 2048"; x X, bias H, out X; 0, 0;
    bias_residual bias_residual_16, "32768 × 2048"; x X, bias H, residual X, out X; 0, 0;
    sum_parts sum_parts_16, "32768 × 2048 by 64"; x X, starts PARTS, sums PARTS * H; 0, 0;
    sum_blocks, "two of 512 × 2048"; parts 2 * PARTS * H, starts 2, sums H, second H; 0, 0;
    exp_forward tanh_forward sigmoid_forward silu_forward exact_gelu_forward soft_cap_forward log_forward sqrt_forward, "32768 × 2048"; x X, out X; 0, 0;
    exp_backward tanh_backward sigmoid_backward silu_backward exact_gelu_backward soft_cap_backward log_backward sqrt_backward, "32768 × 2048"; dy X, x X, dx X; 0, 0;
    zip_add zip_sub zip_mul zip_div zip_keep zip_drop zip_second zip_greater, "32768 × 2048"; x X, y X, out X; 0, 0;
    relu_forward, "32768 × 2048"; x X, out X, above X / 8; 0, 0;
    relu_backward, "32768 × 2048"; dy X, above X / 8, dx X; 0, 0;
    sum_dim, "1024 × 32 × 2048"; x X, out X / 32; 0, 0;
    spread_dim, "1024 × 32 × 2048"; dy X / 32, dx X; 0, 0;
    argmax_dim, "1024 × 32 × 2048"; x X, out X / 32; 0, 0;
    pick_forward, "32768 × 2048"; x X, index T, out X; 0, 0;
    pick_backward, "32768 × 2048"; dy X, index T, dx X; 0, 0;
    softmax_forward, "32768 × 2048"; x X, y X; 0, 0;
    softmax_backward, "32768 × 2048"; dy X, y X, dx X; 0, 0;
    patches_forward, "256 × 56 × 56 × 64 by 3 × 3"; x IMAGES, out 9 * IMAGES; 0, 0;
    patches_backward, "256 × 56 × 56 × 64 by 3 × 3"; dpatches 9 * IMAGES, dx IMAGES; 0, 0;
    max_pool_forward_u8 max_pool_forward_i32, "256 × 56 × 56 × 64 by 2 × 2"; x IMAGES, out IMAGES / 4, places IMAGES / 4; 0, 0;
    max_pool_backward_u8 max_pool_backward_i32, "256 × 56 × 56 × 64 by 2 × 2"; dy IMAGES / 4, places IMAGES / 4, dx IMAGES; 0, 0;
    average_pool_forward, "256 × 56 × 56 × 64 by 2 × 2"; x IMAGES, out IMAGES / 4; 0, 0;
    average_pool_backward, "256 × 56 × 56 × 64 by 2 × 2"; dy IMAGES / 4, dx IMAGES; 0, 0;
    gelu_forward_f32 gelu_forward_bf16 gelu_forward_16, "32768 × 8192"; x 4 * X, bias 4 * H, out 4 * X; 0, 0;
    gelu_backward gelu_backward_16, "32768 × 8192"; x 4 * X, bias 4 * H, dy 8 * X; 0, 0;
    gelu_backward_parts_16, "32768 × 8192"; x 4 * X, bias 4 * H, dy 8 * X, starts PARTS, sums 4 * PARTS * H; 0, 0;
    swiglu_forward_f32 swiglu_forward_bf16 swiglu_forward_16, "32768 × 8192"; x 8 * X, out 4 * X; 0, 0;
    swiglu_backward swiglu_backward_16, "32768 × 8192"; dy 4 * X, x 16 * X; 0, 0;
    dropout dropout_16 jitter, "32768 × 2048"; x X, sizes 12, y X; 0, 0;
    f32_to_bf16 f32_to_operand f32_to_tf32 bf16_to_f32 f32_to_f16 f16_to_f32, "32768 × 2048"; from X, to X; 0, 0;
    copy_rows_8 copy_rows_16 copy_rows_32, "32768 × 2048"; from X, to X; 0, 0;
    bucket_gather, "2²⁸"; tensors FLAT, starts 256, bucket FLAT; 0, 0;
    bucket_scatter, "2²⁸"; bucket FLAT, starts 256, tensors FLAT; 0, 0;
    reduce_sum_f32 reduce_sum_f64 reduce_sum_bf16 reduce_sum_f16 reduce_sum_i32 reduce_sum_i64 reduce_sum_u8, "8 × 2²⁵"; inputs FLAT, out FLAT / 8; 0, 0;
    reduce_max_f32 reduce_max_f64 reduce_max_bf16 reduce_max_f16 reduce_max_i32 reduce_max_i64 reduce_max_u8, "8 × 2²⁵"; inputs FLAT, out FLAT / 8; 0, 0;
    reduce_min_f32 reduce_min_f64 reduce_min_bf16 reduce_min_f16 reduce_min_i32 reduce_min_i64 reduce_min_u8, "8 × 2²⁵"; inputs FLAT, out FLAT / 8; 0, 0;
    tree_sum, "8 × 2²⁵"; x FLAT, out FLAT / 8; 0, 0;
    rotary_forward rotary_forward_16, "32768 × 16 × 128"; from X, angles 1024 * 128, positions T, to X; 0, 0;
    rotary_backward rotary_backward_16, "32768 × 16 × 128"; x 2 * X, angles 1024 * 128, positions T; 0, 0;
    embedding_forward embedding_forward_16, "32768 × 2048"; ids T, table X, out X; 0, 0;
    embedding_backward embedding_backward_16 embedding_backward_tree embedding_backward_tree_16, "32768 × 2048 of 50304"; ids T, order T, ends V / 64, dout X, dtable V * H; 0, 0;
    positions_forward positions_forward_16, "32 × 1024 × 2048"; x X, table 1024 * H, out X; 0, 0;
    positions_backward positions_backward_16, "32 × 1024 × 2048"; dout X, dtable 1024 * H; 0, 0;
    cross_entropy_stats cross_entropy_stats_16, "8192 × 50304"; logits ROWS * V, targets ROWS, max ROWS, sum ROWS, target ROWS; 0, ROWS * V;
    cross_entropy_backward cross_entropy_backward_16, "8192 × 50304"; logits 2 * ROWS * V, targets ROWS, lse ROWS, scale 8; 0, ROWS * V;
    attention_join, "32 × 1024 × 12 × 64"; part A64, lse R64, part_lse R64, out 2 * A64; 0, 0;
    attention_join_lse, "32 × 1024 × 12"; part_lse R64, lse 2 * R64; 0, 0;
    attention_dots, "32 × 1024 × 12 × 64"; dout A64, out A64, dots R64; 0, 0;
    attention_group_sum, "4 × 4096 × 16 × 128 by 4"; from A128, to A128 / 4; 0, 0;
    flash_forward_64 flash_dropout_forward_64, "32 × 1024 × 12 × 64"; q A64, k A64, v A64, out A64, lse R64; 4 * 64 * P64, P64;
    flash_forward_128 flash_dropout_forward_128, "4 × 4096 × 16 × 128"; q A128, k A128, v A128, out A128, lse R128; 4 * 128 * P128, P128;
    flash_forward_256 flash_dropout_forward_256, "4 × 4096 × 8 × 256"; q A128, k A128, v A128, out A128, lse R256; 4 * 256 * P256, P256;
    flash_forward_sm90_64, "32 × 1024 × 12 × 64"; maps 3 * A64 / 4, out A64, lse R64; 4 * 64 * P64, P64;
    flash_forward_sm90_128, "4 × 4096 × 16 × 128"; maps 3 * A128 / 4, out A128, lse R128; 4 * 128 * P128, P128;
    flash_dots, "32 × 1024 × 12 × 64"; dout A64, out A64, dots R64; 0, 0;
    flash_backward_q_64 flash_dropout_backward_q_64, "32 × 1024 × 12 × 64"; q A64, k A64, v A64, dout A64, lse R64, dots R64, dq A64; 6 * 64 * P64, P64;
    flash_backward_q_128 flash_dropout_backward_q_128, "4 × 4096 × 16 × 128"; q A128, k A128, v A128, dout A128, lse R128, dots R128, dq A128; 6 * 128 * P128, P128;
    flash_backward_q_256 flash_dropout_backward_q_256, "4 × 4096 × 8 × 256"; q A128, k A128, v A128, dout A128, lse R256, dots R256, dq A128; 6 * 256 * P256, P256;
    flash_backward_kv_64 flash_dropout_backward_kv_64, "32 × 1024 × 12 × 64"; q A64, k A64, v A64, dout A64, lse R64, dots R64, dk A64, dv A64; 8 * 64 * P64, P64;
    flash_backward_kv_128 flash_dropout_backward_kv_128, "4 × 4096 × 16 × 128"; q A128, k A128, v A128, dout A128, lse R128, dots R128, dk A128, dv A128; 8 * 128 * P128, P128;
    flash_backward_kv_256 flash_dropout_backward_kv_256, "4 × 4096 × 8 × 256"; q A128, k A128, v A128, dout A128, lse R256, dots R256, dk A128, dv A128; 8 * 256 * P256, P256;
    flash_backward_sm90_q_64, "32 × 1024 × 12 × 64"; maps A64, lse R64, dots R64, dq A64; 6 * 64 * P64, P64;
    flash_backward_sm90_q_128, "4 × 4096 × 16 × 128"; maps A128, lse R128, dots R128, dq A128; 6 * 128 * P128, P128;
    flash_backward_sm90_kv_64, "32 × 1024 × 12 × 64"; maps A64, lse R64, dots R64, dk A64, dv A64; 8 * 64 * P64, P64;
    flash_backward_sm90_kv_128, "4 × 4096 × 16 × 128"; maps A128, lse R128, dots R128, dk A128, dv A128; 8 * 128 * P128, P128;
    adamw, "2²⁸"; weights 2 * FLAT, grads FLAT, mean 2 * FLAT, square 2 * FLAT, starts 2, counts 1; 0, 0;
    sgd, "2²⁸"; weights 2 * FLAT, grads FLAT, starts 2, counts 1; 0, 0;
    sgd_momentum, "2²⁸"; weights 2 * FLAT, grads FLAT, buffer 2 * FLAT, starts 2, counts 1; 0, 0;
    sum_of_squares, "2²⁸"; x FLAT, starts 2, counts 1, parts FLAT / crate::SQUARES_PIECE; 0, 0;
    scale_forward, "2²⁸"; x FLAT, out FLAT; 0, 0;
    gather_8 gather_16 gather_32, "32768 × 2048 by 8"; x X, index CHOICES, out 8 * X; 0, 0;
    combine_forward, "32768 × 2048 by 8"; rows 8 * X, ids CHOICES, slots CHOICES, weights CHOICES, out X; 0, 0;
    combine_backward_rows, "32768 × 2048 by 8"; dout X, order CHOICES, weights CHOICES, drows 8 * X; 0, 0;
    combine_backward_weights, "32768 × 2048 by 8"; dout X, rows 8 * X, slots CHOICES, dweights CHOICES; 0, 0;
    grouped_tensor_forward grouped_tensor_forward_bf16, "262144 × 2048 × 2048 in 64"; x 8 * X, w EXPERTS * H * H, starts EXPERTS + 1, y 8 * X; 2 * CHOICES * H * H, 0;
    grouped_tensor_backward_x grouped_tensor_backward_x_bf16, "262144 × 2048 × 2048 in 64"; dy 8 * X, w EXPERTS * H * H, starts EXPERTS + 1, dx 8 * X; 2 * CHOICES * H * H, 0;
    grouped_tensor_backward_w, "262144 × 2048 × 2048 in 64"; dy 8 * X, x 8 * X, first EXPERTS + 1, bounds 2 * EXPERTS, dw EXPERTS * H * H; 2 * CHOICES * H * H, 0;
    grouped_bias, "262144 × 2048 in 64"; x 8 * X, bias EXPERTS * H, starts EXPERTS + 1, y 8 * X; 0, 0;
    grouped_bias_backward, "262144 × 2048 in 64"; dy 8 * X, first EXPERTS + 1, bounds EXPERTS + 1, db EXPERTS * H; 0, 0;
    channel_squares_parts, "256 × 56 × 56 × 64"; x IMAGES, mean 64, starts IMAGES / 4096, sums IMAGES / 64; 0, 0;
    channel_norm_forward, "256 × 56 × 56 × 64"; x IMAGES, mean 64, variance 64, gamma 64, beta 64, y IMAGES; 0, 0;
    channel_norm_backward_parts, "256 × 56 × 56 × 64"; dy IMAGES, x IMAGES, mean 64, variance 64, starts IMAGES / 4096, dgamma IMAGES / 64, dbeta IMAGES / 64; 0, 0;
    channel_norm_backward, "256 × 56 × 56 × 64"; dy IMAGES, x IMAGES, mean 64, variance 64, gamma 64, g 64, gx 64, dx IMAGES; 0, 0;
    squared_error_backward, "32768 × 2048"; x X, targets X, dloss T, dx X; 0, 0;
    correct_rows, "8192 × 50304"; logits ROWS * V, targets ROWS, right ROWS; 0, 0;
    unscale, "2²⁸"; x 2 * FLAT, overflow 1; 0, 0;
    set_squares set_largest, "2²⁸ by 2048"; x FLAT, runs 3, sums FLAT / 2048; 0, 0;
    divide_by_root, "2²⁸"; x 2 * FLAT, square 1; 0, 0;
    lamb_measure, "2²⁸"; runs 3, weights FLAT, grads FLAT, mean 2 * FLAT, square 2 * FLAT, of_weights FLAT, of_steps FLAT; 0, 0;
    lamb_update, "2²⁸"; runs 3, weights 2 * FLAT, mean FLAT, square FLAT, ratio 1; 0, 0;
    adafactor_scaled, "32768 × 8192"; runs 3, grads FLAT, numbers FLAT; 0, 0;
    adafactor_measure, "32768 × 8192"; runs 3, weights FLAT, grads FLAT, row_factors T, column_factors 4 * H, of_steps FLAT, of_weights FLAT; 0, 0;
    adafactor_update, "32768 × 8192"; runs 3, weights 2 * FLAT, grads FLAT, row_factors T, column_factors 4 * H, size 1; 0, 0;
    muon_measure, "2²⁸"; runs 3, grads FLAT, mean 2 * FLAT, values FLAT; 0, 0;
    muon_update, "2²⁸"; runs 3, weights 2 * FLAT, matrices FLAT; 0, 0;
    adam8bit_measure, "2²⁸ by 2048"; runs 3, grads FLAT, means FLAT, squares FLAT, mean_largest FLAT / 2048, square_largest FLAT / 2048, code 1022, of_means FLAT, of_squares FLAT; 0, 0;
    adam8bit_update, "2²⁸ by 2048"; runs 3, weights 2 * FLAT, grads FLAT, means 2 * FLAT, squares 2 * FLAT, mean_largest FLAT / 2048, square_largest FLAT / 2048, mean_before FLAT / 2048, square_before FLAT / 2048, code 1022; 0, 0;
    f32_pack, "2²⁶"; x X, to 4 * X; 0, 0;
    f32_unpack, "2²⁶"; from 4 * X, out X; 0, 0;
    bf16_pack, "2²⁶"; x X, to 2 * X; 0, 0;
    bf16_unpack, "2²⁶"; from 2 * X, out X; 0, 0;
    fp8_scales sign_scales, "2²⁶ by 1024"; x X, scales X / 256; 0, 0;
    fp8_pack, "2²⁶ by 1024"; x X, scales X / 256, codes X; 0, 0;
    fp8_unpack, "2²⁶ by 1024"; codes X, scales X / 256, out X; 0, 0;
    quant_pairs, "2²⁶ by 1024"; x X, pairs X / 128; 0, 0;
    quant_codes, "2²⁶ by 1024"; x X, pairs X / 128, codes X; 0, 0;
    absmax_scales, "2²⁶ by 64"; x X, scales X / 16; 0, 0;
    int8_pack nf4_codes, "2²⁶ by 64"; x X, scales X / 16, codes X; 0, 0;
    int8_unpack, "2²⁶ by 64"; codes X, scales X / 16, out X; 0, 0;
    e5m3_pack, "2²⁰"; scales X / 8, codes X / 64; 0, 0;
    e5m3_unpack, "2²⁰"; codes X / 64, scales X / 16; 0, 0;
    nf4_unpack, "2²⁶ by 64"; planes X / 2, scales X / 16, out X; 0, 0;
    sign_codes, "2²⁶"; x X, codes X; 0, 0;
    planes_pack, "2²⁶ of 4 bits"; codes X, planes X / 2; 0, 0;
    quant_unpack, "2²⁶ of 4 bits by 1024"; planes X / 2, pairs X / 128, out X; 0, 0;
    sign_unpack, "2²⁶ by 1024"; planes X / 8, scales X / 256, out X; 0, 0;
    take_values, "2²⁰ of 2²⁶"; x X / 8, indices X / 64, out X / 64; 0, 0;
    put_values, "2²⁰ of 2²⁶"; values X / 64, indices X / 64, out X / 8; 0, 0;
    feedback_residual, "2²⁶"; x X, residual X, out X; 0, 0;
    feedback_difference, "2²⁶"; x X, estimate X, out X; 0, 0;
    feedback_momentum, "2²⁶"; x X, estimate X, momentum 2 * X, out X; 0, 0;
    feedback_kept, "2²⁶"; target X, sent X, residual X; 0, 0;
    low_rank_times, "8192 × 8192 by 4"; m X, q 16 * H, p 16 * H; 0, 0;
    low_rank_transposed, "8192 × 8192 by 4"; m X, p 16 * H, q 16 * H; 0, 0;
    low_rank_join, "8192 × 8192 by 4"; p 16 * H, q 16 * H, out X; 0, 0;
    nonzeros_mark_32 nonzeros_mark_16, "2²⁶"; x X, bits X / 8; 0, 0;
    nonzeros_count, "2²⁶"; bits X / 8, counts X / 16384; 0, 0;
    nonzeros_gather_32 nonzeros_gather_16, "2²⁵ of 2²⁶"; x X, bits X / 8, starts X / 16384, values X / 2; 0, 0;
    nonzeros_scatter_32 nonzeros_scatter_16, "2²⁵ of 2²⁶"; bits X / 8, starts X / 16384, values X / 2, x X; 0, 0;
}

/// Kernels whose time is not bounded by bytes or by operations of tensor cores, with the reason.
#[rustfmt::skip] // A table: one reason, one line.
pub const WITHOUT: &[(&[&str], &str)] = &[
    (&["product_f32", "product_bf16", "product_sum_f32", "product_sum_bf16", "grouped_product_f32", "grouped_product_bf16", "grouped_product_backward_f32", "grouped_product_backward_bf16"], "canonical numerics: an element is chains of 256 multiply-adds that wait for each other"),
    (&["attention_forward_64", "attention_forward_128", "attention_forward_256", "attention_backward_q_64", "attention_backward_q_128", "attention_backward_q_256", "attention_backward_kv_64", "attention_backward_kv_128", "attention_backward_kv_256", "attention_bias_backward"], "f32 in the CPU's order: multiply-adds outside the tensor cores, each behind the one before"),
    (&["choice_parts", "choice_places"], "a warp counts its part of the choices, 32 at a time: ballots"),
    (&["choice_counts", "choice_loads"], "sums over parts, a few numbers for each id"),
    (&["exact_squares", "exact_squares_sum", "set_squares_exact", "exact_values"], "additions of integers of 64 bits to digits, several an element"),
    (&["cross_entropy_loss", "group_sums_forward", "squared_error", "correct_counts", "sum_of_parts", "sample_means", "balance_sums", "adafactor_row_means"], "few sums, each in order: additions that wait for each other"),
    (&["check_ids", "check_positions", "nonzeros_starts", "indices_read", "draw_indices", "low_rank_orthonormal"], "one block, warp or thread: what it reads comes in turn"),
    (&["topk_choose"], "a block of threads passes over its part once for each bit of a key, from the caches"),
    (&["route_rank", "route_parts", "route_limit", "route_reroute", "route_first", "route_sort", "route_tokens", "route_pick", "route_pick_backward", "route_unused", "balance_forward", "balance_backward", "z_terms", "z_backward", "entropy_terms"], "some 256 bytes of scores a token, worked on in steps that wait for each other"),
    (&["add_f64", "add_assign_f64", "scale_forward_f64", "preference_forward", "preference_backward", "group_sums_backward", "cross_entropy_larger", "cross_entropy_rescale", "cross_entropy_lse", "channel_means", "channel_gradient_means", "invert_fill", "invert", "group_ids", "document_starts", "indices_bits", "indices_low", "low_rank_start"], "a few numbers a sample, row, channel or choice: less than a launch takes"),
    (&["adafactor_vector_measure", "adafactor_vector_update", "adafactor_means", "adafactor_row_factors", "adafactor_column_factors", "adafactor_settle", "lamb_settle", "adam8bit_settle", "message_words", "message_check", "flash_maps"], "vectors of biases, factors of rows, or single numbers: less than a launch takes"),
];

impl Floor {
    /// Bytes that one of the kernels must move, given the types of its arguments.
    pub fn bytes(&self, kernel: &str) -> u64 {
        let args = crate::kernel(kernel).map_or(&[][..], |kernel| kernel.args);
        let of = |name: &str| args.iter().find(|arg| arg.name == name).map_or(0, |arg: &Arg| arg.of.size());
        self.moved.iter().map(|(name, count)| of(name) * count).sum()
    }

    /// The least seconds on a card, and the resource that takes them.
    fn on(&self, kernel: &str, card: &Card) -> (f64, &'static str) {
        let times = [
            (self.bytes(kernel) as f64 / card.bytes, "bytes"),
            (self.operations as f64 / card.operations, "operations"),
            (self.powers as f64 / card.powers, "powers of two"),
        ];
        times.into_iter().fold((0.0, ""), |most, time| if time.0 > most.0 { time } else { most })
    }
}

/// The table of `kernels/floors.md`.
///
/// ```
/// let line = meshwork_kernels::floors::report().lines().find(|line| line.contains("`adamw`")).unwrap().to_owned();
/// assert_eq!(line, "| `adamw` | 2²⁸ | 7516.2 MB | 0 | 0 | 2243.6 µs | 1565.9 µs | bytes |");
/// ```
pub fn report() -> String {
    let mut text = "# The least that kernels can take\n\n\
        Written by `kernels/src/floors.rs`, from what each argument must have moved and its type; a test holds this page against it, and says how to renew it. Bytes are those that must\n\
        be read and written once, operations those of tensor cores on bf16, powers of two those of the special function units. A floor is the longest of the three at the card's peaks: \
        3.35 TB/s (H100)\nand 4.8 TB/s (H200), 989 TFLOP/s, 3.7·10¹² powers a second. Nothing here is measured: `cargo bench -p meshwork-cuda --features cuda --bench ops` times operations at these sizes on a GPU, \
        and `scripts/gpu-check.sh speed`\nholds them against the card's own rates. Kernels that wait for something else are below.\n\n\
        | kernel | sizes | bytes | operations | powers | H100 | H200 | waits for |\n|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for (floor, kernel) in FLOORS.iter().flat_map(|floor| floor.kernels.iter().map(move |kernel| (floor, kernel))) {
        let [h100, h200] = CARDS.each_ref().map(|card| floor.on(kernel, card));
        let waits = if h100.1 == h200.1 { h100.1.to_owned() } else { format!("{}; {}", h100.1, h200.1) };
        let giga = |count: u64| if count == 0 { "0".to_owned() } else { format!("{:.2}·10⁹", count as f64 / 1e9) };
        let Floor { sizes, operations, powers, .. } = floor;
        let megabytes = floor.bytes(kernel) as f64 / 1e6;
        let [h100, h200] = [h100.0, h200.0].map(|seconds| seconds * 1e6);
        let (operations, powers) = (giga(*operations), giga(*powers));
        _ = writeln!(
            text,
            "| `{kernel}` | {sizes} | {megabytes:.1} MB | {operations} | {powers} | {h100:.1} µs | {h200:.1} µs | {waits} |"
        );
    }
    text += "\n## Kernels without a floor\n\n| kernels | why |\n|---|---|\n";
    for (kernels, why) in WITHOUT {
        _ = writeln!(text, "| `{}` | {why} |", kernels.join("`, `"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pointer argument is named once, except `firsts`, which a launch may leave out.
    #[test]
    fn every_address_is_counted() {
        for (floor, name) in FLOORS.iter().flat_map(|floor| floor.kernels.iter().map(move |name| (floor, name))) {
            let kernel = crate::kernel(name).unwrap_or_else(|| panic!("no kernel {name}"));
            let addresses = kernel.args.iter().filter(|arg| !arg.pass.is_number() && arg.name != "firsts");
            let names: Vec<&str> = addresses.map(|arg| arg.name).collect();
            let counted: Vec<&str> = floor.moved.iter().map(|(name, _)| *name).collect();
            assert_eq!(counted, names, "{name}");
        }
    }

    /// Every kernel has a floor or a reason for having none, and not both.
    #[test]
    fn every_kernel_is_here() {
        let floors = FLOORS.iter().flat_map(|floor| floor.kernels);
        let mut here: Vec<&str> = floors.chain(WITHOUT.iter().flat_map(|(kernels, _)| *kernels)).copied().collect();
        let mut all: Vec<&str> = crate::KERNELS.iter().map(|kernel| kernel.name).collect();
        here.sort_unstable();
        all.sort_unstable();
        let missing: Vec<&&str> = all.iter().filter(|kernel| !here.contains(kernel)).collect();
        assert!(missing.is_empty(), "without a floor or a reason: {missing:?}");
        assert_eq!(here, all);
    }

    #[test]
    fn the_page_is_what_this_says() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/floors.md");
        let kept = std::fs::read_to_string(page).unwrap_or_default();
        if kept != report() {
            let fresh = std::env::temp_dir().join("floors.md");
            std::fs::write(&fresh, report()).unwrap();
            panic!(
                "kernels/floors.md is not what src/floors.rs says. To renew it:\n    cp {} kernels/floors.md",
                fresh.display()
            );
        }
    }
}
