//! The sources, and the kernels that they define. The host library compiled by the tests asserts each list of
//! arguments.
//!
//! More than 400 lines: every kernel with all its arguments.

use crate::geometry::{Geometry, THREADS};
use crate::kernel::{Arg, Kernel, Pass, Source, Type};

macro_rules! sources {
    ($list:ident of $extension:literal, $doc:literal; $($file:ident)*) => {
        #[doc = $doc]
        pub static $list: &[&Source] = &[$(&Source {
            name: concat!(stringify!($file), $extension),
            text: include_str!(concat!("../cuda/", stringify!($file), $extension)),
        }),*];
    };
}

sources! {
    HEADERS of ".cuh", "The headers that sources include, by name: NVRTC takes them with the source.";
    meshwork math float16 halves rows tree random neighbours norm vectors warp products checked exact runs message
    attention tensor_core flash warp_group bulk_copy flash_sm90
}

sources! {
    SOURCES of ".cu", "The files of kernels, one family each.";
    layer_norm rms_norm bias elementwise reduction indexing windows gelu swiglu optimizer grad_norm exact_squares product casts
    copies reduce_ranks dropout rotary embedding cross_entropy attention_forward attention_backward flash_forward
    flash_backward flash_maps flash_forward_sm90 flash_backward_sm90 routing permutation grouped grouped_tensor
    documents squared_error channel_norm measures lamb adafactor muon adam8bit codecs sparse feedback
    low_rank nonzeros preference
}

/// The source file with this name.
const fn source(name: &str) -> &'static Source {
    let mut at = 0;
    while !same(SOURCES[at].name, name) {
        at += 1;
    }
    SOURCES[at]
}

/// Whether two texts are equal, in a const context.
pub(crate) const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// `name(pass Type name, ..) in file, Geometry;` for each kernel. A kernel with a 16-bit form names it last, with its
/// geometry: in that form `T` is 16 bits instead of f32, and an extra last argument says whether the type is f16. After
/// `&` come other kernels with the same arguments, each with its geometry.
macro_rules! kernels {
    ($($name:ident $args:tt in $file:ident, $geometry:expr $(, $half:ident = $half_geometry:expr)?
        $(, & $same:ident = $same_geometry:expr)*;)*) => {
        /// All kernels.
        pub static KERNELS: &[Kernel] = &[$(
            Kernel {
                name: stringify!($name),
                source: source(concat!(stringify!($file), ".cu")),
                geometry: $geometry,
                args: arguments!(F32 $args),
            },
            $(Kernel {
                name: stringify!($half),
                source: source(concat!(stringify!($file), ".cu")),
                geometry: $half_geometry,
                args: arguments!(Bits16 $args Value I32 f16),
            },)?
            $(Kernel {
                name: stringify!($same),
                source: source(concat!(stringify!($file), ".cu")),
                geometry: $same_geometry,
                args: arguments!(F32 $args),
            },)*
        )*];
    };
}

macro_rules! arguments {
    ($t:ident ($($pass:ident $of:ident $arg:ident),+) $($last:ident $last_of:ident $f16:ident)?) => {
        &[
            $(Arg { name: stringify!($arg), pass: Pass::$pass, of: element!($t $of) },)+
            $(Arg { name: stringify!($f16), pass: Pass::$last, of: Type::$last_of })?
        ]
    };
}

macro_rules! element {
    (F32 T) => {
        Type::F32
    };
    (Bits16 T) => {
        Type::Bits16
    };
    ($t:ident $of:ident) => {
        Type::$of
    };
}

/// Ids per bucket; `embedding_backward` expects its ids sorted by bucket. In its geometry `items` are rows of the table
/// and `width` is the number of vectors in a row: of four elements, eight for `embedding_backward_16`.
pub const TABLE_ROWS: u64 = 64;

/// Elements per block of an update rule: `items` of its geometry are the elements of each vector, rounded up to a
/// multiple of this.
pub const UPDATE_PIECE: u64 = 4 * THREADS as u64;

/// Elements that a warp of `exact_squares` sums: `items` of its geometry are the elements of each vector divided by
/// this, rounded up.
pub const EXACT_PIECE: u64 = 16_384;

/// Elements that a warp of `sum_of_squares` sums: `items` of its geometry are the elements of each vector divided by
/// this, rounded up.
pub const SQUARES_PIECE: u64 = 32_768;

/// Rows of a result's tile in `grouped_tensor_*`: `items` of their geometry are the tiles of rows of all groups.
pub const GROUPED_ROWS: u64 = 128;

/// The longest rows that norms read only once. Backward of longer rows uses the kernels `*_backward_wide` and
/// `*_backward_parts` instead of `Geometry::Parts`.
pub const NORM_WIDTH: u64 = 8192;

/// Bytes of bits per block of `nonzeros_*`: `items` of their geometry are the bytes divided by this, rounded up.
pub const NONZERO_CHUNK: u64 = 2048;

pub(crate) const ELEMENTS: Geometry = Geometry::Elements { each: 1 };

/// One thread per 16 bytes of neighbours, of f64, f32, 16 bits or bytes: `cuda/neighbours.cuh`.
const TWOS: Geometry = Geometry::Elements { each: 2 };
const FOURS_OF_F32: Geometry = Geometry::Elements { each: 4 };
const EIGHT: Geometry = Geometry::Elements { each: 8 };
const SIXTEEN: Geometry = Geometry::Elements { each: 16 };

/// One thread per four, eight or sixteen neighbours in a row; no thread takes elements of two rows.
const ROWS_BY_FOUR: Geometry = Geometry::RowVectors { each: 4 };
const ROWS_BY_EIGHT: Geometry = Geometry::RowVectors { each: 8 };
const ROWS_BY_SIXTEEN: Geometry = Geometry::RowVectors { each: 16 };

/// Warps of a block of flash attention, its queries or keys, and rows of its tiles in shared memory, of 16 bits:
/// `cuda/flash_forward.cu`, `cuda/flash_backward.cu`.
pub(crate) const fn flash(warps: u32, rows: u32, head_dim: u32, tiles: u32) -> Geometry {
    Geometry::TensorTiles { threads: 32 * warps, rows, shared: 2 * head_dim * tiles }
}

/// Four tiles of 16 rows of features and two of pairs, of f32: `cuda/attention_backward.cu`.
const fn attention_backward(head_dim: u32) -> Geometry {
    Geometry::TensorTiles { threads: THREADS, rows: 16, shared: 4 * (4 * 16 * (head_dim + 1) + 2 * 16 * 17) }
}

/// The same for the forms for sm_90a; shared memory also holds barriers for the copies, and numbers of the columns:
/// `cuda/flash_sm90.cuh`.
const fn flash_sm90(head_dim: u32, tiles: u32, stages: u32, numbers: u32) -> Geometry {
    Geometry::TensorTiles { threads: THREADS, rows: 128, shared: 2 * head_dim * tiles + 4 * numbers + 8 * (stages + 1) }
}

/// Columns of a tile of products of groups, and the tiles of both operands in shared memory, of 16 bits:
/// `cuda/grouped_tensor.cu`.
pub(crate) const fn grouped(columns: u32, stages: u32) -> Geometry {
    Geometry::TensorTiles { threads: THREADS, rows: columns, shared: 2 * 64 * (GROUPED_ROWS as u32 + columns) * stages }
}

/// One thread per eight elements, whose bits fill one byte.
const BYTES: Geometry = Geometry::Elements { each: 8 };

kernels! {
    layer_norm_forward_f32(In T x, In T gamma, In T beta, Value F32 eps, Out T y, Out F32 mean, Out F32 rstd,
        Value I64 rows, Divisor I64 n) in layer_norm, Geometry::Rounds, layer_norm_forward_16 = Geometry::Rounds;
    layer_norm_forward_bf16(In F32 x, In F32 gamma, In F32 beta, Value F32 eps, Out Bits16 y, Out F32 mean,
        Out F32 rstd, Value I64 rows, Divisor I64 n) in layer_norm, Geometry::Rounds;
    layer_norm_backward(In T dy, In T x, In T gamma, In F32 mean, In F32 rstd, In I64 starts, Out T dx,
        Value I32 accumulate, Out F32 dgamma, Out F32 dbeta,
        Divisor I64 n) in layer_norm, Geometry::Parts, layer_norm_backward_16 = Geometry::Parts;
    layer_norm_backward_wide(In T dy, In T x, In T gamma, In F32 mean, In F32 rstd, Out T dx, Value I32 accumulate,
        Value I64 rows, Value I64 n) in layer_norm, Geometry::Rows, layer_norm_backward_wide_16 = Geometry::Rows;
    layer_norm_backward_parts(In T dy, In T x, In F32 mean, In F32 rstd, In I64 starts, Out F32 dgamma, Out F32 dbeta,
        Value I64 parts, Divisor I64 n) in layer_norm, ROWS_BY_FOUR, layer_norm_backward_parts_16 = ROWS_BY_EIGHT;
    rms_norm_forward_f32(In T x, In T weight, Value F32 eps, Out T y, Out F32 rstd, Value I64 rows,
        Divisor I64 n) in rms_norm, Geometry::Rounds, rms_norm_forward_16 = Geometry::Rounds;
    rms_norm_forward_bf16(In F32 x, In F32 weight, Value F32 eps, Out Bits16 y, Out F32 rstd, Value I64 rows,
        Divisor I64 n) in rms_norm, Geometry::Rounds;
    rms_norm_backward(In T dy, In T x, In T weight, In F32 rstd, In I64 starts, Out T dx, Value I32 accumulate,
        Out F32 dweight, Divisor I64 n) in rms_norm, Geometry::Parts, rms_norm_backward_16 = Geometry::Parts;
    rms_norm_backward_wide(In T dy, In T x, In T weight, In F32 rstd, Out T dx, Value I32 accumulate, Value I64 rows,
        Value I64 n) in rms_norm, Geometry::Rows, rms_norm_backward_wide_16 = Geometry::Rows;
    rms_norm_backward_parts(In T dy, In T x, In F32 rstd, In I64 starts, Out F32 dweight, Value I64 parts,
        Divisor I64 n) in rms_norm, ROWS_BY_FOUR, rms_norm_backward_parts_16 = ROWS_BY_EIGHT;
    add(In T a, In T b, Out T out, Value I64 count) in bias, FOURS_OF_F32, add_16 = EIGHT;
    add_f64(In F64 a, In F64 b, Out F64 out, Value I64 count) in bias, TWOS;
    add_assign(Out T a, In T b, Value I64 count) in bias, FOURS_OF_F32, add_assign_16 = EIGHT;
    add_assign_f64(Out F64 a, In F64 b, Value I64 count) in bias, TWOS;
    bias(In T x, In T bias, Out T out, Value I64 count, Divisor I64 n) in bias, FOURS_OF_F32, bias_16 = EIGHT;
    bias_residual(In T x, In T bias, In T residual, Out T out, Value I64 count,
        Divisor I64 n) in bias, FOURS_OF_F32, bias_residual_16 = EIGHT;
    sum_parts(In T x, In I64 starts, Out F32 sums, Value I64 parts,
        Divisor I64 n) in bias, ROWS_BY_FOUR, sum_parts_16 = ROWS_BY_EIGHT;
    sum_blocks(In F32 parts, In I64 starts, Out F32 sums, Out F32 second, Divisor I64 blocks,
        Value I64 n) in bias, Geometry::Tiles { rows: 32 };
    scale_forward(In F32 x, Out F32 out, Value I64 count, Value F32 factor) in elementwise, FOURS_OF_F32;
    scale_forward_f64(In F64 x, Out F64 out, Value I64 count, Value F64 factor) in elementwise, TWOS;
    exp_forward(In F32 x, Out F32 out, Value I64 count) in elementwise, FOURS_OF_F32;
    exp_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count) in elementwise, FOURS_OF_F32;
    tanh_forward(In F32 x, Out F32 out, Value I64 count) in elementwise, FOURS_OF_F32;
    tanh_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count) in elementwise, FOURS_OF_F32;
    sigmoid_forward(In F32 x, Out F32 out, Value I64 count) in elementwise, FOURS_OF_F32;
    sigmoid_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count) in elementwise, FOURS_OF_F32;
    silu_forward(In F32 x, Out F32 out, Value I64 count) in elementwise, FOURS_OF_F32;
    silu_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count) in elementwise, FOURS_OF_F32;
    exact_gelu_forward(In F32 x, Out F32 out, Value I64 count) in elementwise, FOURS_OF_F32;
    exact_gelu_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count) in elementwise, FOURS_OF_F32;
    soft_cap_forward(In F32 x, Out F32 out, Value I64 count, Value F32 cap) in elementwise, FOURS_OF_F32;
    soft_cap_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count, Value F32 cap) in elementwise, FOURS_OF_F32;
    log_forward(In F32 x, Out F32 out, Value I64 count) in elementwise, FOURS_OF_F32;
    log_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count) in elementwise, FOURS_OF_F32;
    sqrt_forward(In F32 x, Out F32 out, Value I64 count) in elementwise, FOURS_OF_F32;
    sqrt_backward(In F32 dy, In F32 x, Out F32 dx, Value I64 count) in elementwise, FOURS_OF_F32;
    zip_add(In F32 x, In F32 y, Out F32 out, Value I64 count, Divisor I64 extent,
        Divisor I64 inner) in elementwise, FOURS_OF_F32,
        & zip_sub = FOURS_OF_F32, & zip_mul = FOURS_OF_F32, & zip_div = FOURS_OF_F32, & zip_keep = FOURS_OF_F32,
        & zip_drop = FOURS_OF_F32, & zip_second = FOURS_OF_F32, & zip_greater = FOURS_OF_F32;
    relu_forward(In F32 x, Out F32 out, Out U8 above, Value I64 count) in elementwise, BYTES;
    relu_backward(In F32 dy, In U8 above, Out F32 dx, Value I64 count) in elementwise, BYTES;
    sum_dim(In F32 x, Out F32 out, Value I64 count, Divisor I64 outer, Value I64 extent, Divisor I64 inner,
        Divisor I64 blocks, Value F64 scale) in reduction, ELEMENTS;
    spread_dim(In F32 dy, Out F32 dx, Value I64 count, Divisor I64 extent, Divisor I64 inner,
        Value F32 scale) in reduction, FOURS_OF_F32;
    softmax_forward(In F32 x, Out F32 y, Value I64 rows, Value I64 n) in reduction, Geometry::Rows;
    softmax_backward(In F32 dy, In F32 y, Out F32 dx, Value I64 rows, Value I64 n) in reduction, Geometry::Rows;
    argmax_dim(In F32 x, Out I32 out, Value I64 count, Value I64 extent, Divisor I64 inner) in indexing, ELEMENTS;
    pick_forward(In F32 x, In I32 index, Out F32 out, Value I64 count, Value I64 extent, Divisor I64 inner,
        Divisor I64 taken, Value I32 each) in indexing, ELEMENTS;
    pick_backward(In F32 dy, In I32 index, Out F32 dx, Value I64 count, Divisor I64 extent, Divisor I64 inner,
        Value I64 taken, Value I32 each) in indexing, ELEMENTS;
    patches_forward(In F32 x, Out F32 out, Value I64 count, Value I64 height, Value I64 width, Divisor I64 channels,
        Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across, Value I64 stride,
        Value I64 padding) in windows, ELEMENTS;
    patches_backward(In F32 dpatches, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width,
        Divisor I64 channels, Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride,
        Value I64 padding) in windows, ELEMENTS;
    max_pool_forward_u8(In F32 x, Out F32 out, Out U8 places, Value I64 count, Value I64 height, Value I64 width,
        Divisor I64 channels, Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across,
        Value I64 stride, Value I64 padding) in windows, ELEMENTS;
    max_pool_backward_u8(In F32 dy, In U8 places, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width,
        Divisor I64 channels, Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride,
        Value I64 padding) in windows, ELEMENTS;
    max_pool_forward_i32(In F32 x, Out F32 out, Out I32 places, Value I64 count, Value I64 height, Value I64 width,
        Divisor I64 channels, Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across,
        Value I64 stride, Value I64 padding) in windows, ELEMENTS;
    max_pool_backward_i32(In F32 dy, In I32 places, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width,
        Divisor I64 channels, Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride,
        Value I64 padding) in windows, ELEMENTS;
    average_pool_forward(In F32 x, Out F32 out, Value I64 count, Value I64 height, Value I64 width,
        Divisor I64 channels, Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across,
        Value I64 stride, Value I64 padding) in windows, ELEMENTS;
    average_pool_backward(In F32 dy, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width,
        Divisor I64 channels, Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride,
        Value I64 padding) in windows, ELEMENTS;
    gelu_forward_f32(In T x, In T bias, Out T out, Value I64 count,
        Divisor I64 n) in gelu, FOURS_OF_F32, gelu_forward_16 = EIGHT;
    gelu_forward_bf16(In F32 x, In F32 bias, Out Bits16 out, Value I64 count, Divisor I64 n) in gelu, EIGHT;
    gelu_backward(In T x, In T bias, Out T dy, Value I64 count,
        Divisor I64 n) in gelu, FOURS_OF_F32, gelu_backward_16 = EIGHT;
    gelu_backward_parts_16(In Bits16 x, In Bits16 bias, Out Bits16 dy, In I64 starts, Out F32 sums, Value I64 parts,
        Divisor I64 n, Value I32 f16) in gelu, ROWS_BY_EIGHT;
    swiglu_forward_f32(In T x, Out T out, Value I64 count) in swiglu, FOURS_OF_F32, swiglu_forward_16 = EIGHT;
    swiglu_forward_bf16(In F32 x, Out Bits16 out, Value I64 count) in swiglu, EIGHT;
    swiglu_backward(In T dy, Out T x, Value I64 count) in swiglu, FOURS_OF_F32, swiglu_backward_16 = EIGHT;
    adamw(Outs F32 weights, Ins F32 grads, Outs F32 mean, Outs F32 square, In I64 starts, In I64 counts,
        Value I64 vectors, Value F32 grad_scale, Value F32 keep, Value F32 lr_hat, Value F32 root_hat,
        Value F32 mean_new, Value F32 square_old, Value F32 square_new, Value F32 eps) in optimizer, FOURS_OF_F32;
    sgd(Outs F32 weights, Ins F32 grads, In I64 starts, In I64 counts, Value I64 vectors, Value F32 grad_scale,
        Value F32 decay, Value F32 lr) in optimizer, FOURS_OF_F32;
    sgd_momentum(Outs F32 weights, Ins F32 grads, Outs F32 buffer, In I64 starts, In I64 counts, Value I64 vectors,
        Value F32 grad_scale, Value F32 decay, Value F32 lr, Value F32 momentum) in optimizer, FOURS_OF_F32;
    sum_of_squares(Ins F32 x, In I64 starts, In I64 counts, Value I64 vectors,
        Out F64 parts) in grad_norm, Geometry::Warps;
    sum_of_parts(In F64 parts, In I64 starts, Value I64 vectors, Out F64 totals,
        Out F64 sum) in grad_norm, Geometry::Columns;
    unscale(Out F32 x, Value F32 inverse, Out I32 overflow, Value I64 count) in grad_norm, FOURS_OF_F32;
    exact_squares(Ins F32 x, In I64 starts, In I64 counts, Value I64 vectors,
        Out U64 parts) in exact_squares, Geometry::Warps;
    exact_squares_sum(In U64 parts, Value I64 pieces, Out F64 digits) in exact_squares, Geometry::OneWarp;
    product_f32(In F32 a, Value I64 a_row, Value I64 a_term, In F32 b, Value I64 b_term, Value I64 b_column, Out F32 c,
        Value I32 accumulate, Value I64 k, Divisor I64 segments, Divisor I64 blocks, Value I64 count,
        Divisor I64 n) in product, ELEMENTS;
    product_bf16(In Bits16 a, Value I64 a_row, Value I64 a_term, In Bits16 b, Value I64 b_term, Value I64 b_column,
        Out F32 c, Value I32 accumulate, Value I64 k, Divisor I64 segments, Divisor I64 blocks, Value I64 count,
        Divisor I64 n) in product, ELEMENTS;
    product_sum_f32(In F32 a, Value I64 a_row, Value I64 a_term, In F32 b, Value I64 b_term, Value I64 b_column,
        Value I64 k, Divisor I64 segments, In F32 a2, Value I64 a2_row, Value I64 a2_term, In F32 b2, Value I64 b2_term,
        Value I64 b2_column, Value I64 k2, Divisor I64 segments2, Divisor I64 blocks, Out F32 c, Value I64 count,
        Divisor I64 n) in product, ELEMENTS;
    product_sum_bf16(In Bits16 a, Value I64 a_row, Value I64 a_term, In Bits16 b, Value I64 b_term, Value I64 b_column,
        Value I64 k, Divisor I64 segments, In Bits16 a2, Value I64 a2_row, Value I64 a2_term, In Bits16 b2,
        Value I64 b2_term, Value I64 b2_column, Value I64 k2, Divisor I64 segments2, Divisor I64 blocks, Out F32 c,
        Value I64 count, Divisor I64 n) in product, ELEMENTS;
    f32_to_bf16(In F32 from, Out Bits16 to, Value I64 count) in casts, EIGHT;
    f32_to_operand(In F32 from, Out Bits16 to, Value I64 count) in casts, EIGHT;
    f32_to_tf32(In F32 from, Out F32 to, Value I64 count) in casts, FOURS_OF_F32;
    bf16_to_f32(In Bits16 from, Out F32 to, Value I64 count) in casts, EIGHT;
    f32_to_f16(In F32 from, Out Bits16 to, Value I64 count) in casts, EIGHT;
    f16_to_f32(In Bits16 from, Out F32 to, Value I64 count) in casts, EIGHT;
    bucket_gather(Ins F32 tensors, In I64 starts, Value I64 count_tensors, Out F32 bucket,
        Value I64 count) in casts, FOURS_OF_F32;
    bucket_scatter(In F32 bucket, In I64 starts, Value I64 count_tensors, Outs F32 tensors,
        Value I64 count) in casts, FOURS_OF_F32;
    copy_rows_8(In U8 from, Value I64 from_row, Out U8 to, Value I64 to_row, Value I64 rows,
        Divisor I64 n) in copies, ROWS_BY_SIXTEEN;
    copy_rows_16(In Bits16 from, Value I64 from_row, Out Bits16 to, Value I64 to_row, Value I64 rows,
        Divisor I64 n) in copies, ROWS_BY_EIGHT;
    copy_rows_32(In U32 from, Value I64 from_row, Out U32 to, Value I64 to_row, Value I64 rows,
        Divisor I64 n) in copies, ROWS_BY_FOUR;
    reduce_sum_f32(Ins F32 inputs, Value I64 ranks, Out F32 out, Value I64 count) in reduce_ranks, FOURS_OF_F32;
    reduce_sum_f64(Ins F64 inputs, Value I64 ranks, Out F64 out, Value I64 count) in reduce_ranks, TWOS;
    reduce_sum_bf16(Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count) in reduce_ranks, EIGHT;
    reduce_sum_f16(Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count) in reduce_ranks, EIGHT;
    reduce_sum_i32(Ins I32 inputs, Value I64 ranks, Out I32 out, Value I64 count) in reduce_ranks, FOURS_OF_F32;
    reduce_sum_i64(Ins I64 inputs, Value I64 ranks, Out I64 out, Value I64 count) in reduce_ranks, TWOS;
    reduce_sum_u8(Ins U8 inputs, Value I64 ranks, Out U8 out, Value I64 count) in reduce_ranks, SIXTEEN;
    reduce_max_f32(Ins F32 inputs, Value I64 ranks, Out F32 out, Value I64 count) in reduce_ranks, FOURS_OF_F32;
    reduce_max_f64(Ins F64 inputs, Value I64 ranks, Out F64 out, Value I64 count) in reduce_ranks, TWOS;
    reduce_max_bf16(Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count) in reduce_ranks, EIGHT;
    reduce_max_f16(Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count) in reduce_ranks, EIGHT;
    reduce_max_i32(Ins I32 inputs, Value I64 ranks, Out I32 out, Value I64 count) in reduce_ranks, FOURS_OF_F32;
    reduce_max_i64(Ins I64 inputs, Value I64 ranks, Out I64 out, Value I64 count) in reduce_ranks, TWOS;
    reduce_max_u8(Ins U8 inputs, Value I64 ranks, Out U8 out, Value I64 count) in reduce_ranks, SIXTEEN;
    reduce_min_f32(Ins F32 inputs, Value I64 ranks, Out F32 out, Value I64 count) in reduce_ranks, FOURS_OF_F32;
    reduce_min_f64(Ins F64 inputs, Value I64 ranks, Out F64 out, Value I64 count) in reduce_ranks, TWOS;
    reduce_min_bf16(Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count) in reduce_ranks, EIGHT;
    reduce_min_f16(Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count) in reduce_ranks, EIGHT;
    reduce_min_i32(Ins I32 inputs, Value I64 ranks, Out I32 out, Value I64 count) in reduce_ranks, FOURS_OF_F32;
    reduce_min_i64(Ins I64 inputs, Value I64 ranks, Out I64 out, Value I64 count) in reduce_ranks, TWOS;
    reduce_min_u8(Ins U8 inputs, Value I64 ranks, Out U8 out, Value I64 count) in reduce_ranks, SIXTEEN;
    tree_sum(In F32 x, Value I64 vectors, Out F32 out, Value I64 n) in reduce_ranks, FOURS_OF_F32;
    dropout(In T x, In I64 sizes, Value I32 dims, Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Out T y,
        Value I64 count) in dropout, FOURS_OF_F32, dropout_16 = EIGHT;
    jitter(In F32 x, In I64 sizes, Value I32 dims, Value U32 key0, Value U32 key1, Value F32 low, Value F32 step,
        Out F32 y, Value I64 count) in dropout, FOURS_OF_F32;
    rotary_forward(In T from, Value I64 from_row, In F32 angles, In I32 positions, Out T to, Value I64 to_row,
        Value I64 rows, Divisor I64 seq, Divisor I64 heads,
        Divisor I64 head_dim) in rotary, ROWS_BY_FOUR, rotary_forward_16 = ROWS_BY_EIGHT;
    rotary_backward(Out T x, Value I64 row, In F32 angles, In I32 positions, Value I64 rows, Divisor I64 seq,
        Divisor I64 heads, Divisor I64 head_dim) in rotary, ROWS_BY_FOUR, rotary_backward_16 = ROWS_BY_EIGHT;
    embedding_forward(In I32 ids, In T table, Value I64 first_row, Value I64 rows, Out T out, Value I64 count,
        Divisor I64 h) in embedding, FOURS_OF_F32, embedding_forward_16 = EIGHT;
    check_ids(In I32 ids, Value I64 vocab, Value I32 masked, Out I64 found,
        Value I64 count) in embedding, Geometry::Columns;
    embedding_backward(In I32 ids, In I32 order, In I32 ends, In T dout, Value I64 first_row, Out F32 dtable,
        Value I32 accumulate, Value I64 h) in embedding, Geometry::Columns, embedding_backward_16 = Geometry::Columns;
    embedding_backward_tree(In I32 ids, In I32 order, In I32 ends, In T dout, Value I64 first_row, Out F32 dtable,
        Value I32 accumulate, Value I64 runs, Divisor I64 run,
        Value I64 h) in embedding, Geometry::Columns, embedding_backward_tree_16 = Geometry::Columns;
    positions_forward(In T x, In T table, Value I64 first, Divisor I64 seq, Out T out, Value I64 count,
        Divisor I64 h) in embedding, FOURS_OF_F32, positions_forward_16 = EIGHT;
    positions_backward(In T dout, Value I64 first, Value I64 seq, Out F32 dtable, Value I32 accumulate, Value I64 batch,
        Value I64 run, Value I64 h) in embedding, FOURS_OF_F32, positions_backward_16 = FOURS_OF_F32;
    cross_entropy_stats(In T logits, In I32 targets, Value I64 pitch, Value I64 skipped, Value I64 valid,
        Value I64 first, Out F32 max, Out F32 sum, Out F32 target,
        Value I64 rows) in cross_entropy, Geometry::HeldRows { bytes: 4 }, cross_entropy_stats_16 = Geometry::HeldRows { bytes: 2 };
    cross_entropy_larger(Out F32 max, In F32 other, Value I64 rows) in cross_entropy, ELEMENTS;
    cross_entropy_rescale(In F32 local, In F32 global, Out F32 sum, Value I64 rows) in cross_entropy, ELEMENTS;
    cross_entropy_lse(In F32 max, In F32 sum, Out F32 lse, Value I64 rows) in cross_entropy, ELEMENTS;
    group_sums_forward(In F64 values, In I32 ids, Out F64 sums, Value I64 places, Divisor I64 groups,
        Value I64 count) in cross_entropy, ELEMENTS;
    group_sums_backward(In F64 dsums, In I32 ids, Out F64 dvalues, Divisor I64 places, Value I64 groups,
        Value I64 count) in cross_entropy, ELEMENTS;
    cross_entropy_loss(In I32 targets, In F32 max, In F32 sum, In F32 target, Out F64 loss, Divisor I64 samples,
        Value I64 rows) in cross_entropy, Geometry::Warps;
    cross_entropy_backward(Out T logits, In I32 targets, In F32 lse, In F64 scale, Value I64 pitch, Value I64 skipped,
        Value I64 width, Value I64 valid, Value I64 first, Divisor I64 samples,
        Value I64 rows) in cross_entropy, Geometry::Rows, cross_entropy_backward_16 = Geometry::Rows;
    attention_forward_64(In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, Out F32 out, Out F32 lse,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Divisor I32 head_dim, Value F32 scale,
        Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head,
        Value I64 global_heads, In I32 firsts, Value I32 rounded, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window, Value I64 first_key,
        Value I64 sequence, Value F32 cap_by, Value F32 cap_back, In F32 slopes, In F32 bias, Value I64 ahead,
        In I32 lengths) in attention_forward, Geometry::Tiles { rows: 32 },
        & attention_forward_128 = Geometry::Tiles { rows: 32 }, & attention_forward_256 = Geometry::Tiles { rows: 16 };
    attention_join(In F32 part, In F32 lse, In F32 part_lse, Out F32 out, Value I64 count, Divisor I64 seq,
        Divisor I64 heads, Divisor I64 head_dim) in attention_forward, ELEMENTS;
    attention_join_lse(In F32 part_lse, Out F32 lse, Value I64 rows) in attention_forward, ELEMENTS;
    attention_dots(In F32 dout, In F32 out, Out F32 dots, Value I64 batch, Divisor I64 seq, Divisor I64 heads,
        Value I64 head_dim) in attention_backward, ELEMENTS;
    attention_backward_q_64(In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, In F32 dout, In F32 lse,
        In F32 dots, Out F32 dq, Value I64 dq_row, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0, Value U32 key1, Value F32 p,
        Value F32 kept, Value I64 first_sample, Value I64 first_head, Value I64 global_heads, In I32 firsts,
        Value I32 rounded, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window, Value I64 first_key,
        Value I64 sequence, Value F32 cap_by, Value F32 cap_back, In F32 slopes, In F32 bias, Value I64 ahead,
        In I32 lengths) in attention_backward, attention_backward(64),
        & attention_backward_q_128 = attention_backward(128), & attention_backward_q_256 = attention_backward(256);
    attention_backward_kv_64(In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, In F32 dout, In F32 lse,
        In F32 dots, Out F32 dk, Out F32 dv, Value I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0, Value U32 key1, Value F32 p,
        Value F32 kept, Value I64 first_sample, Value I64 first_head, Value I64 global_heads, In I32 firsts,
        Value I32 rounded, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window, Value I64 first_key,
        Value I64 sequence, Value F32 cap_by, Value F32 cap_back, In F32 slopes, In F32 bias, Value I64 ahead,
        In I32 lengths) in attention_backward, attention_backward(64),
        & attention_backward_kv_128 = attention_backward(128), & attention_backward_kv_256 = attention_backward(256);
    attention_bias_backward(In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, In F32 dout, In F32 lse,
        In F32 dots, Out F32 dbias, Value I64 batch, Divisor I64 blocks, Value I32 accumulate, Divisor I64 seq,
        Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Divisor I32 head_dim, Value F32 scale,
        Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head,
        Value I64 global_heads, In I32 firsts, Value I32 rounded, Divisor I64 keys, Value I64 first_query,
        Value I64 rows, Value I64 window, Value I64 first_key, Value I64 sequence, Value F32 cap_by, Value F32 cap_back, In F32 slopes, In F32 bias, Value I64 ahead,
        In I32 lengths) in attention_backward, ELEMENTS;
    attention_group_sum(In F32 from, Out F32 to, Value I64 to_row, Value I64 rows, Value I64 heads, Divisor I64 group,
        Value I64 first, Divisor I64 head_dim) in attention_backward, ELEMENTS;
    flash_forward_64(InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row,
        OutChunks Bits16 out, Out F32 lse, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv,
        Eights I32 head_dim, Value F32 scale, In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window) in flash_forward, flash(4, 128, 64, 128 + 4 * 32),
        & flash_forward_128 = flash(4, 128, 128, 128 + 4 * 32), & flash_forward_256 = flash(8, 128, 256, 128 + 4 * 16);
    flash_dropout_forward_64(InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row,
        OutChunks Bits16 out, Out F32 lse, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv,
        Eights I32 head_dim, Value F32 scale, In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window,
        Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head,
        Value I64 global_heads, Value I64 first_key, Value I64 sequence) in flash_forward, flash(4, 128, 64, 128 + 4 * 32),
        & flash_dropout_forward_128 = flash(8, 128, 128, 128 + 4 * 64),
        & flash_dropout_forward_256 = flash(8, 128, 256, 128 + 4 * 16);
    flash_dots(InChunks Bits16 dout, InChunks Bits16 out, Out F32 dots, Value I64 batch, Divisor I64 seq,
        Divisor I64 heads, Eights I64 head_dim) in flash_backward, ELEMENTS;
    flash_backward_q_64(InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row,
        InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dq, Eights I64 dq_row, Value I64 seq,
        Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale,
        In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window) in flash_backward, flash(4, 128, 64, 2 * 128 + 4 * 32),
        & flash_backward_q_128 = flash(4, 128, 128, 2 * 128 + 4 * 32),
        & flash_backward_q_256 = flash(8, 128, 256, 2 * 128 + 4 * 16);
    flash_dropout_backward_q_64(InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row,
        InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dq, Eights I64 dq_row, Value I64 seq,
        Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale,
        In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window,
        Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head,
        Value I64 global_heads, Value I64 first_key, Value I64 sequence) in flash_backward, flash(4, 128, 64, 2 * 128 + 4 * 32),
        & flash_dropout_backward_q_128 = flash(8, 128, 128, 2 * 128 + 4 * 32),
        & flash_dropout_backward_q_256 = flash(8, 64, 256, 2 * 64 + 4 * 16);
    flash_backward_kv_64(InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row,
        InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dk, OutChunks Bits16 dv, Eights I64 dkv_row,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale,
        In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window) in flash_backward, flash(4, 128, 64, 2 * 128 + 4 * 32),
        & flash_backward_kv_128 = flash(8, 128, 128, 2 * 128 + 4 * 32),
        & flash_backward_kv_256 = flash(8, 64, 256, 2 * 64 + 4 * 16);
    flash_dropout_backward_kv_64(InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row,
        InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dk, OutChunks Bits16 dv, Eights I64 dkv_row,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale,
        In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window,
        Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head,
        Value I64 global_heads, Value I64 first_key, Value I64 sequence) in flash_backward, flash(8, 128, 64, 2 * 128 + 4 * 32),
        & flash_dropout_backward_kv_128 = flash(8, 128, 128, 2 * 128 + 4 * 16),
        & flash_dropout_backward_kv_256 = flash(8, 64, 256, 2 * 64 + 4 * 16);
    flash_maps(InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row,
        InChunks Bits16 dout, Out U64 maps, Value I64 batch, Value I64 seq, Value I64 heads, Value I64 kv_heads,
        Eights I32 head_dim, Value I64 keys, Value I64 rows) in flash_maps, Geometry::OneWarp;
    flash_forward_sm90_64(In U64 maps, OutChunks Bits16 out, Out F32 lse, Value I64 seq, Divisor I64 heads,
        Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale,
        In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window) in flash_forward_sm90, flash_sm90(64, 128 + 6 * 128, 3, 0),
        & flash_forward_sm90_128 = flash_sm90(128, 128 + 6 * 64, 3, 0);
    flash_backward_sm90_q_64(In U64 maps, In F32 lse, In F32 dots, OutChunks Bits16 dq, Eights I64 dq_row,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale,
        In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window) in flash_backward_sm90, flash_sm90(64, 2 * 128 + 4 * 128, 2, 0),
        & flash_backward_sm90_q_128 = flash_sm90(128, 2 * 128 + 4 * 64, 2, 0);
    flash_backward_sm90_kv_64(In U64 maps, In F32 lse, In F32 dots, OutChunks Bits16 dk, OutChunks Bits16 dv,
        Eights I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv,
        Eights I32 head_dim, Value F32 scale,
        In I32 firsts, Value I64 keys,
        Value I64 first_query, Value I64 rows, Value I64 window) in flash_backward_sm90, flash_sm90(64, 2 * 128 + 4 * 64, 2, 4 * 64),
        & flash_backward_sm90_kv_128 = flash_sm90(128, 2 * 128 + 4 * 64, 2, 4 * 64);
    route_rank(In F32 scores, In F32 bias, Value I64 experts, Divisor I64 groups, Value I64 top_groups,
        Value I64 group_best, Value I64 width, Out F32 group_scores, Out I32 ranked, Out I32 kept, Value I32 normalise,
        Value F32 scale, Out F32 weights, Value I64 tokens) in routing, Geometry::Warps;
    route_parts(In F32 scores, In I32 ranked, Value I64 experts, Divisor I64 k, Value I32 draws, Value U32 key0,
        Value U32 key1, Value I64 first_token, Value I64 part, Divisor I64 parts, Out I32 counts, Value I64 samples,
        Value I64 each) in routing, Geometry::Warps;
    route_limit(In F32 scores, Out I32 ranked, Value I64 experts, Value I64 k, Value I64 capacity, Value I32 draws,
        Value U32 key0, Value U32 key1, Value I64 first_token, Value I64 part, Divisor I64 parts, In I32 counts,
        Out I32 taken, Out I32 kept, Value I32 normalise, Value F32 scale, Out F32 weights, Value I64 samples,
        Value I64 each) in routing, Geometry::Warps;
    route_reroute(In F32 scores, In I32 ranked, Value I64 experts, Value I64 k, Value I64 width, Value I64 capacity,
        Value I32 draws, Value U32 key0, Value U32 key1, Value I64 first_token, Out I32 taken, Out I32 kept,
        Value I64 samples, Value I64 each) in routing, ELEMENTS;
    route_first(In I32 ranked, In I32 kept, Value I64 width, Value I64 k, Out I32 chosen, Out I32 routed,
        Value I64 tokens) in routing, ELEMENTS;
    route_sort(In F32 scores, Value I64 experts, Out I32 routed, Out I32 kept, Value I64 k, Value I32 normalise,
        Value F32 scale, Out F32 weights, Value I64 tokens) in routing, ELEMENTS;
    route_tokens(In F32 scores, Divisor I64 experts, Value I64 capacity, Out I32 kept, Value I64 count,
        Divisor I64 each) in routing, ELEMENTS;
    route_pick(In F32 scores, In I32 choices, Value I64 experts, Value I64 k, Value I32 normalise, Value F32 scale,
        Out F32 out, Value I64 tokens) in routing, ELEMENTS;
    route_pick_backward(In F32 scores, In I32 choices, In F32 dout, Value I64 experts, Value I64 k, Value I32 normalise,
        Value F32 scale, Out F32 dscores, Value I64 tokens) in routing, ELEMENTS;
    balance_sums(In F32 scores, Out F64 sums, Value I64 samples, Value I64 each,
        Divisor I64 experts) in routing, ELEMENTS;
    balance_forward(In F64 sums, In I32 counts, Value I64 pitch, Value F64 scale, Out F64 out, Value I64 samples,
        Value I64 experts) in routing, ELEMENTS;
    balance_backward(In F64 dout, In I32 counts, Value I64 pitch, Value F64 scale, Out F32 dscores, Value I64 count,
        Divisor I64 each, Divisor I64 experts) in routing, ELEMENTS;
    z_terms(In F32 logits, Out F64 terms, Value I64 tokens, Value I64 experts) in routing, ELEMENTS;
    z_backward(In F32 logits, In F64 dout, Out F32 dlogits, Value I64 tokens, Divisor I64 each,
        Value I64 experts) in routing, ELEMENTS;
    entropy_terms(In F32 scores, Out F64 terms, Value I64 tokens, Value I64 experts) in routing, ELEMENTS;
    sample_means(In F64 terms, Out F64 out, Value I64 samples, Value I64 each) in routing, ELEMENTS;
    route_unused(In I32 kept, Out F64 out, Value I64 samples, Value I64 each) in routing, Geometry::Warps;
    choice_parts(In I32 choices, Value I64 each, Value I64 part, Divisor I64 parts, Value I64 first, Value I64 ids,
        Out I32 counts, Value I64 samples) in permutation, Geometry::Warps;
    choice_counts(In I32 parts_counts, Value I64 parts, Divisor I64 ids, Out I32 counts,
        Value I64 count) in permutation, ELEMENTS;
    choice_loads(In I32 parts_counts, Value I64 parts, Out F32 loads, Value I64 ids) in permutation, ELEMENTS;
    choice_places(In I32 choices, Value I64 count, Value I64 part, Value I64 parts, Value I64 first, Value I64 ids,
        In I32 counts, Out I32 next, Out I32 order, Value I64 total, Out I32 slots,
        Out I64 found) in permutation, Geometry::Warps;
    invert_fill(Out I32 slots, Value I64 n) in permutation, ELEMENTS;
    invert(In I32 order, Out I32 slots, Value I64 count) in permutation, ELEMENTS;
    group_ids(In I32 choices, Value I64 k, Divisor I64 size, Value I32 once, Out I32 groups,
        Value I64 tokens) in permutation, ELEMENTS;
    gather_8(In U8 x, In I32 index, Value I64 rows, Divisor I64 per, Divisor I64 width, Out U8 out,
        Value I64 count) in permutation, SIXTEEN;
    gather_16(In Bits16 x, In I32 index, Value I64 rows, Divisor I64 per, Divisor I64 width, Out Bits16 out,
        Value I64 count) in permutation, EIGHT;
    gather_32(In U32 x, In I32 index, Value I64 rows, Divisor I64 per, Divisor I64 width, Out U32 out,
        Value I64 count) in permutation, FOURS_OF_F32;
    combine_forward(In F32 rows, In I32 ids, In I32 slots, In F32 weights, Value I64 k, Divisor I64 width, Out F32 out,
        Value I64 count) in permutation, FOURS_OF_F32;
    combine_backward_rows(In F32 dout, In I32 order, In F32 weights, Divisor I64 k, Divisor I64 width, Out F32 drows,
        Value I64 count) in permutation, FOURS_OF_F32;
    combine_backward_weights(In F32 dout, In F32 rows, In I32 slots, Divisor I64 k, Out F32 dweights, Value I64 choices,
        Value I64 width) in permutation, Geometry::Rows;
    grouped_product_f32(In F32 x, In F32 w, Value I64 w_term, Value I64 w_column, In I64 starts, Value I64 groups,
        Out F32 y, Value I64 k, Divisor I64 segments, Divisor I64 blocks, Value I64 count,
        Divisor I64 n) in grouped, ELEMENTS;
    grouped_product_bf16(In Bits16 x, In Bits16 w, Value I64 w_term, Value I64 w_column, In I64 starts,
        Value I64 groups, Out F32 y, Value I64 k, Divisor I64 segments, Divisor I64 blocks, Value I64 count,
        Divisor I64 n) in grouped, ELEMENTS;
    grouped_product_backward_f32(In F32 dy, In F32 x, In I64 first, In I64 bounds, Out F32 dw, Value I32 accumulate,
        Divisor I64 n, Divisor I64 k, Value I64 count) in grouped, ELEMENTS;
    grouped_product_backward_bf16(In Bits16 dy, In Bits16 x, In I64 first, In I64 bounds, Out F32 dw,
        Value I32 accumulate, Divisor I64 n, Divisor I64 k, Value I64 count) in grouped, ELEMENTS;
    grouped_tensor_forward(InChunks Bits16 x, InChunks Bits16 w, In I64 starts, Value I64 groups, OutPairs F32 y,
        Eights I64 n, Eights I64 k) in grouped_tensor, grouped(256, 3);
    grouped_tensor_forward_bf16(InChunks Bits16 x, InChunks Bits16 w, In I64 starts, Value I64 groups,
        OutPairs Bits16 y, Eights I64 n, Eights I64 k) in grouped_tensor, grouped(256, 3);
    grouped_tensor_backward_x(InChunks Bits16 dy, InChunks Bits16 w, In I64 starts, Value I64 groups, OutPairs F32 dx,
        Eights I64 n, Eights I64 k) in grouped_tensor, grouped(256, 3);
    grouped_tensor_backward_x_bf16(InChunks Bits16 dy, InChunks Bits16 w, In I64 starts, Value I64 groups,
        OutPairs Bits16 dx, Eights I64 n, Eights I64 k) in grouped_tensor, grouped(256, 3);
    grouped_tensor_backward_w(InChunks Bits16 dy, InChunks Bits16 x, In I64 first, In I64 bounds, OutPairs F32 dw,
        Value I32 accumulate, Eights I64 n, Eights I64 k) in grouped_tensor, grouped(256, 3);
    grouped_bias(In F32 x, In F32 bias, In I64 starts, Value I64 groups, Out F32 y, Value I64 count,
        Divisor I64 n) in grouped, ELEMENTS;
    grouped_bias_backward(In F32 dy, In I64 first, In I64 bounds, Out F32 db, Value I32 accumulate,
        Value I64 n) in grouped, Geometry::Columns;
    channel_squares_parts(In F32 x, In F32 mean, In I64 starts, Out F32 sums, Value I64 parts, Divisor I64 rows,
        Divisor I64 groups, Divisor I64 n) in channel_norm, ROWS_BY_FOUR;
    channel_means(In F32 sums, Value F32 members, Out F32 means, Value I64 count, Divisor I64 groups,
        Divisor I64 n) in channel_norm, ELEMENTS;
    channel_norm_forward(In F32 x, In F32 mean, In F32 variance, Value F32 eps, In F32 gamma, In F32 beta, Out F32 y,
        Value I64 count, Divisor I64 rows, Divisor I64 groups, Divisor I64 n) in channel_norm, ROWS_BY_FOUR;
    channel_norm_backward_parts(In F32 dy, In F32 x, In F32 mean, In F32 variance, Value F32 eps, In I64 starts,
        Out F32 dgamma, Out F32 dbeta, Value I64 parts, Divisor I64 rows, Divisor I64 groups,
        Divisor I64 n) in channel_norm, ROWS_BY_FOUR;
    channel_gradient_means(In F32 sums, In F32 gamma, Value F32 scale, Out F32 means, Value I64 count,
        Divisor I64 groups, Divisor I64 n) in channel_norm, ELEMENTS;
    channel_norm_backward(In F32 dy, In F32 x, In F32 mean, In F32 variance, Value F32 eps, In F32 gamma, In F32 g,
        In F32 gx, Out F32 dx, Value I64 count, Divisor I64 rows, Divisor I64 groups,
        Divisor I64 n) in channel_norm, ROWS_BY_FOUR;
    squared_error(In F32 x, In F32 targets, Out F64 loss, Value F64 scale, Divisor I64 samples, Value I64 elements,
        Divisor I64 segments, Divisor I64 blocks) in squared_error, ELEMENTS;
    squared_error_backward(In F32 x, In F32 targets, In F64 dloss, Value F64 scale, Out F32 dx, Value I64 count,
        Divisor I64 elements) in squared_error, ELEMENTS;
    correct_rows(In F32 logits, In I32 targets, Value I64 width, Out I32 right,
        Value I64 rows) in squared_error, Geometry::Warps;
    correct_counts(In I32 right, Out F64 out, Value I64 samples, Value I64 each) in squared_error, Geometry::Warps;
    preference_forward(In F64 losses, In F64 reference, In I32 pairs, Out F64 out, Value F64 beta, Value F64 smoothing,
        Value I64 number, Value I64 answers, Value I64 samples) in preference, ELEMENTS;
    preference_backward(In F64 losses, In F64 reference, In I32 pairs, In F64 dloss, Out F64 dlosses, Value F64 beta,
        Value F64 smoothing, Value I64 answers, Value I64 samples) in preference, ELEMENTS;
    check_positions(In I32 positions, Out I64 found, Value I64 count, Divisor I64 seq) in documents, Geometry::Columns;
    document_starts(In I32 positions, Out I32 checked, Out I32 first, Value I64 count,
        Divisor I64 seq) in documents, ELEMENTS;
    set_squares(In F32 x, In I64 runs, Value I64 run_count, Divisor I64 length, Value I64 rows, Divisor I64 each,
        Out F64 sums, Value I64 sets) in measures, Geometry::Warps;
    set_squares_exact(In F32 x, In I64 runs, Value I64 run_count, Divisor I64 length, Value I64 rows, Divisor I64 each,
        Out F64 digits, Value I64 sets) in measures, Geometry::Warps;
    set_largest(In F32 x, In I64 runs, Value I64 run_count, Divisor I64 length, Value I64 rows, Divisor I64 each,
        Out F64 sums, Value I64 sets) in measures, Geometry::Warps;
    exact_values(In F64 digits, Out F64 sums, Value I64 count) in measures, ELEMENTS;
    divide_by_root(Out F32 x, In F64 square, Value F64 least, Value I64 count) in measures, ELEMENTS;
    lamb_measure(In I64 runs, Value I64 run_count, In F32 weights, In F32 grads, Out F32 mean, Out F32 square,
        Value F32 grad_scale, Value F32 mean_new, Value F32 square_old, Value F32 square_new, Value F32 mean_hat,
        Value F32 root_hat, Value F32 eps, Value F32 decay, Out F32 of_weights, Out F32 of_steps,
        Value I64 count) in lamb, ELEMENTS;
    lamb_settle(Out F64 totals, Value I64 matrices) in lamb, ELEMENTS;
    lamb_update(In I64 runs, Value I64 run_count, Out F32 weights, In F32 mean, In F32 square, In F64 ratio,
        Divisor I64 each, Value F64 lr, Value F32 mean_hat, Value F32 root_hat, Value F32 eps, Value F32 decay,
        Value I64 count) in lamb, ELEMENTS;
    adafactor_scaled(In I64 runs, Value I64 run_count, In F32 grads, Value F32 grad_scale, Out F32 numbers,
        Value I64 count) in adafactor, ELEMENTS;
    adafactor_measure(In I64 runs, Value I64 run_count, In F32 weights, In F32 grads, Value F32 grad_scale,
        In F64 row_factors, In F64 column_factors, Divisor I64 rows, Divisor I64 columns, Out F32 of_steps,
        Out F32 of_weights, Value I64 count) in adafactor, ELEMENTS;
    adafactor_update(In I64 runs, Value I64 run_count, Out F32 weights, In F32 grads, Value F32 grad_scale,
        In F64 row_factors, In F64 column_factors, Divisor I64 rows, Divisor I64 columns, In F64 size, Value F32 keep,
        Value I64 count) in adafactor, ELEMENTS;
    adafactor_vector_measure(In I64 runs, Value I64 run_count, In F32 weights, In F32 grads, Out F32 variance,
        Value F32 grad_scale, Value F32 share, Value F32 eps, Out F32 of_steps, Out F32 of_weights,
        Value I64 count) in adafactor, ELEMENTS;
    adafactor_vector_update(In I64 runs, Value I64 run_count, Out F32 weights, In F32 grads, In F32 variance,
        Value F32 grad_scale, In F64 size, Divisor I64 each, Value F32 keep, Value I64 count) in adafactor, ELEMENTS;
    adafactor_means(Out F32 variance, Out F64 totals, Value F64 terms, Value F64 share, Value F64 eps,
        Value I64 count) in adafactor, ELEMENTS;
    adafactor_row_means(In F64 totals, Value I64 rows, Out F64 means, Value I64 matrices) in adafactor, ELEMENTS;
    adafactor_row_factors(Out F64 totals, In F64 means, Divisor I64 rows, Value I64 count) in adafactor, ELEMENTS;
    adafactor_column_factors(Out F64 totals, Value I64 count) in adafactor, ELEMENTS;
    adafactor_settle(Out F64 totals, Value F64 elements, Value I32 relative, Value F64 lr, Value F64 eps_scale,
        Value F64 clip, Value I64 matrices) in adafactor, ELEMENTS;
    muon_measure(In I64 runs, Value I64 run_count, In F32 grads, Out F32 mean, Value F32 grad_scale, Value F32 old,
        Value F32 now, Out F32 values, Value I64 count) in muon, ELEMENTS;
    muon_update(In I64 runs, Value I64 run_count, Out F32 weights, In F32 matrices, Value F32 keep, Value F32 size,
        Value I64 count) in muon, ELEMENTS;
    adam8bit_measure(In I64 runs, Value I64 run_count, In F32 grads, In U8 means, In U8 squares, In F32 mean_largest,
        In F32 square_largest, In F32 code, Divisor I64 block, Divisor I64 each, Value F32 grad_scale,
        Value F32 mean_new, Value F32 square_old, Value F32 square_new, Out F32 of_means, Out F32 of_squares,
        Value I64 count) in adam8bit, ELEMENTS;
    adam8bit_settle(Out F32 largest, Out F64 totals, Value I64 count) in adam8bit, ELEMENTS;
    adam8bit_update(In I64 runs, Value I64 run_count, Out F32 weights, In F32 grads, Out U8 means, Out U8 squares,
        In F32 mean_largest, In F32 square_largest, In F64 mean_before, In F64 square_before, In F32 code,
        Value I32 mean_zero, Value I32 square_zero, Divisor I64 block, Divisor I64 each, Value F32 grad_scale,
        Value F32 mean_new, Value F32 square_old, Value F32 square_new, Value F32 keep, Value F32 lr_hat,
        Value F32 root_hat, Value F32 eps, Value I64 count) in adam8bit, ELEMENTS;
    message_words(Out U8 to, Value U64 first, Value U64 second) in codecs, ELEMENTS;
    message_check(In U8 header, Value U64 first, Value U64 second, Out I64 found) in codecs, ELEMENTS;
    f32_pack(In F32 x, Out U8 to, Value I64 count) in codecs, FOURS_OF_F32;
    f32_unpack(In U8 from, Out F32 out, Value I32 add, Value I64 count) in codecs, FOURS_OF_F32;
    bf16_pack(In F32 x, Out U8 to, Value I64 count) in codecs, EIGHT;
    bf16_unpack(In U8 from, Out F32 out, Value I32 add, Value I64 count) in codecs, EIGHT;
    fp8_scales(In F32 x, Value I64 count, Value I64 unit, Value I32 e5m2, Out U8 scales) in codecs, Geometry::Columns;
    fp8_pack(In F32 x, In U8 scales, Divisor I64 unit, Value I32 e5m2, Out U8 codes,
        Value I64 count) in codecs, FOURS_OF_F32;
    fp8_unpack(In U8 codes, In U8 scales, Divisor I64 unit, Value I32 e5m2, Out F32 out, Value I32 add,
        Value I64 count) in codecs, FOURS_OF_F32;
    quant_pairs(In F32 x, Value I64 count, Value I64 unit, Value F32 levels, Out U8 pairs) in codecs, Geometry::Columns;
    quant_codes(In F32 x, In U8 pairs, Divisor I64 unit, Value F32 levels, Value I32 draws, Value U32 key0,
        Value U32 key1, Value U64 start, Out U8 codes, Value I64 count) in codecs, FOURS_OF_F32;
    absmax_scales(In F32 x, Value I64 count, Value I64 unit, Out U8 scales) in codecs, Geometry::Columns;
    int8_pack(In F32 x, In U8 scales, Divisor I64 unit, Out U8 codes, Value I64 count) in codecs, FOURS_OF_F32;
    int8_unpack(In U8 codes, In U8 scales, Divisor I64 unit, Out F32 out, Value I32 add,
        Value I64 count) in codecs, FOURS_OF_F32;
    nf4_codes(In F32 x, In U8 scales, Divisor I64 unit, Out U8 codes, Value I64 count) in codecs, FOURS_OF_F32;
    nf4_unpack(In U8 planes, In U8 scales, Divisor I64 unit, Out F32 out, Value I32 add,
        Value I64 count) in codecs, FOURS_OF_F32;
    e5m3_pack(Out U8 scales, Out U8 codes, Value I64 parts) in codecs, ELEMENTS;
    e5m3_unpack(In U8 codes, Out U8 scales, Value I64 parts) in codecs, ELEMENTS;
    sign_scales(In F32 x, Value I64 count, Value I64 unit, Out U8 scales, Value I64 parts) in codecs, ELEMENTS;
    sign_codes(In F32 x, Out U8 codes, Value I64 count) in codecs, FOURS_OF_F32;
    planes_pack(In U8 codes, Divisor I64 bits, Out U8 planes, Value I64 bytes, Value I64 count) in codecs, ELEMENTS;
    quant_unpack(In U8 planes, In U8 pairs, Divisor I64 bits, Divisor I64 unit, Out F32 out, Value I32 add,
        Value I64 count) in codecs, FOURS_OF_F32;
    sign_unpack(In U8 planes, In U8 scales, Divisor I64 unit, Out F32 out, Value I32 add,
        Value I64 count) in codecs, FOURS_OF_F32;
    topk_choose(In F32 x, Value I64 len, Value I64 unit, Value I64 keep, Value I64 last_keep,
        Out U32 indices) in sparse, Geometry::Columns;
    draw_indices(In U8 draws, Value I64 count, Value I64 below, Out U64 taken) in sparse, ELEMENTS;
    indices_bits(In U32 indices, Value I64 count, Value I32 width, Value I32 spread, Out U8 to,
        Value I64 bytes) in sparse, ELEMENTS;
    indices_low(In U32 indices, Value I64 count, Divisor I64 width, Out U8 to, Value I64 bytes) in sparse, ELEMENTS;
    indices_read(In U8 low, In U8 high, Value I64 high_bytes, Value I64 count, Value I64 below, Value I32 width,
        Value I32 spread, Out U32 indices, Out I64 found) in sparse, Geometry::Columns;
    take_values(In F32 x, In U32 indices, Value F32 factor, Out F32 out, Value I64 count) in sparse, ELEMENTS;
    put_values(In F32 values, In U32 indices, Out F32 out, Value I32 add, Value I64 count) in sparse, ELEMENTS;
    feedback_residual(In F32 x, In F32 residual, Out F32 out, Value I64 count) in feedback, FOURS_OF_F32;
    feedback_difference(In F32 x, In F32 estimate, Out F32 out, Value I64 count) in feedback, FOURS_OF_F32;
    feedback_momentum(In F32 x, In F32 estimate, Out F32 momentum, Value I32 first, Value F32 eta, Value F32 kept,
        Out F32 out, Value I64 count) in feedback, FOURS_OF_F32;
    feedback_kept(In F32 target, In F32 sent, Out F32 residual, Value I64 count) in feedback, FOURS_OF_F32;
    low_rank_start(Out F32 q, Value I64 cols, Value U32 key0, Value U32 key1,
        Value U64 start) in low_rank, Geometry::Columns;
    low_rank_times(In F32 m, In F32 q, Out F32 p, Value I64 cols, Divisor I64 rank,
        Value I64 count) in low_rank, ELEMENTS;
    low_rank_orthonormal(Out F32 p, Value I64 rows, Value I64 rank, Out F64 lengths) in low_rank, Geometry::OneWarp;
    low_rank_transposed(In F32 m, In F32 p, Out F32 q, Value I64 rows, Divisor I64 cols,
        Value I64 rank) in low_rank, ELEMENTS;
    low_rank_join(In F32 p, In F32 q, Out F32 out, Divisor I64 cols, Value I64 rank, Value F32 among,
        Value I64 count) in low_rank, ELEMENTS;
    nonzeros_mark_32(In U32 x, Out U8 bits, Value I64 count) in nonzeros, BYTES;
    nonzeros_mark_16(In Bits16 x, Out U8 bits, Value I64 count) in nonzeros, BYTES;
    nonzeros_count(In U8 bits, Value I64 bytes, Out I64 counts) in nonzeros, Geometry::Columns;
    nonzeros_starts(In I64 counts, Value I64 chunks, Out I64 starts) in nonzeros, Geometry::Columns;
    nonzeros_gather_32(In U32 x, In U8 bits, Value I64 bytes, In I64 starts, Out U32 values,
        Value I64 count) in nonzeros, Geometry::Columns;
    nonzeros_gather_16(In Bits16 x, In U8 bits, Value I64 bytes, In I64 starts, Out Bits16 values,
        Value I64 count) in nonzeros, Geometry::Columns;
    nonzeros_scatter_32(In U8 bits, Value I64 bytes, In I64 starts, In U32 values, Value I64 held, Out U32 x,
        Value I64 count) in nonzeros, Geometry::Columns;
    nonzeros_scatter_16(In U8 bits, Value I64 bytes, In I64 starts, In Bits16 values, Value I64 held, Out Bits16 x,
        Value I64 count) in nonzeros, Geometry::Columns;
}
