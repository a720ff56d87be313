//! The sources, and the kernels that they define. The host library that the tests compile asserts each list of
//! arguments.
//!
//! More than 400 lines: every kernel with all its arguments.

use crate::geometry::{Geometry, THREADS};
use crate::kernel::{Arg, Kernel, Pass, Source, Type};

macro_rules! sources {
    ($($name:ident = $file:literal;)*) => { $(
        static $name: Source = Source { name: $file, text: include_str!(concat!("../cuda/", $file)) };
    )* };
}

sources! {
    MESHWORK = "meshwork.cuh";
    MATH = "math.cuh";
    FLOAT16 = "float16.cuh";
    HALVES = "halves.cuh";
    ROWS = "rows.cuh";
    TREE = "tree.cuh";
    RANDOM = "random.cuh";
    NEIGHBOURS = "neighbours.cuh";
    NORM = "norm.cuh";
    VECTORS = "vectors.cuh";
    WARP = "warp.cuh";
    PRODUCTS = "products.cuh";
    CHECKED = "checked.cuh";
    EXACT = "exact.cuh";
    RUNS = "runs.cuh";
    MESSAGE = "message.cuh";
    ATTENTION = "attention.cuh";
    TENSOR_CORE = "tensor_core.cuh";
    FLASH = "flash.cuh";
    WARP_GROUP = "warp_group.cuh";
    BULK_COPY = "bulk_copy.cuh";
    FLASH_SM90 = "flash_sm90.cuh";
    LAYER_NORM = "layer_norm.cu";
    RMS_NORM = "rms_norm.cu";
    BIAS = "bias.cu";
    ELEMENTWISE = "elementwise.cu";
    REDUCTION = "reduction.cu";
    WINDOWS = "windows.cu";
    GELU = "gelu.cu";
    SWIGLU = "swiglu.cu";
    OPTIMIZER = "optimizer.cu";
    GRAD_NORM = "grad_norm.cu";
    EXACT_SQUARES = "exact_squares.cu";
    PRODUCT = "product.cu";
    CASTS = "casts.cu";
    COPIES = "copies.cu";
    REDUCE_RANKS = "reduce_ranks.cu";
    DROPOUT = "dropout.cu";
    ROTARY = "rotary.cu";
    EMBEDDING = "embedding.cu";
    CROSS_ENTROPY = "cross_entropy.cu";
    ATTENTION_FORWARD = "attention_forward.cu";
    ATTENTION_BACKWARD = "attention_backward.cu";
    FLASH_FORWARD = "flash_forward.cu";
    FLASH_BACKWARD = "flash_backward.cu";
    FLASH_MAPS = "flash_maps.cu";
    FLASH_FORWARD_SM90 = "flash_forward_sm90.cu";
    FLASH_BACKWARD_SM90 = "flash_backward_sm90.cu";
    ROUTING = "routing.cu";
    PERMUTATION = "permutation.cu";
    GROUPED = "grouped.cu";
    GROUPED_TENSOR = "grouped_tensor.cu";
    DOCUMENTS = "documents.cu";
    ATTENTION_DECODE = "attention_decode.cu";
    SQUARED_ERROR = "squared_error.cu";
    CHANNEL_NORM = "channel_norm.cu";
    MEASURES = "measures.cu";
    LAMB = "lamb.cu";
    ADAFACTOR = "adafactor.cu";
    MUON = "muon.cu";
    ADAM8BIT = "adam8bit.cu";
    CODECS = "codecs.cu";
    SPARSE = "sparse.cu";
    FEEDBACK = "feedback.cu";
    LOW_RANK = "low_rank.cu";
    NONZEROS = "nonzeros.cu";
}

/// The headers that sources include, by name: NVRTC takes them with the source.
pub static HEADERS: &[&Source] = &[
    &MESHWORK,
    &MATH,
    &FLOAT16,
    &HALVES,
    &ROWS,
    &TREE,
    &RANDOM,
    &NEIGHBOURS,
    &NORM,
    &VECTORS,
    &WARP,
    &PRODUCTS,
    &CHECKED,
    &EXACT,
    &RUNS,
    &MESSAGE,
    &ATTENTION,
    &TENSOR_CORE,
    &FLASH,
    &WARP_GROUP,
    &BULK_COPY,
    &FLASH_SM90,
];

/// The files of kernels, one family each.
pub static SOURCES: &[&Source] = &[
    &LAYER_NORM,
    &RMS_NORM,
    &BIAS,
    &ELEMENTWISE,
    &REDUCTION,
    &WINDOWS,
    &GELU,
    &SWIGLU,
    &OPTIMIZER,
    &GRAD_NORM,
    &EXACT_SQUARES,
    &PRODUCT,
    &CASTS,
    &COPIES,
    &REDUCE_RANKS,
    &DROPOUT,
    &ROTARY,
    &EMBEDDING,
    &CROSS_ENTROPY,
    &ATTENTION_FORWARD,
    &ATTENTION_BACKWARD,
    &FLASH_FORWARD,
    &FLASH_BACKWARD,
    &FLASH_MAPS,
    &FLASH_FORWARD_SM90,
    &FLASH_BACKWARD_SM90,
    &ROUTING,
    &PERMUTATION,
    &GROUPED,
    &GROUPED_TENSOR,
    &DOCUMENTS,
    &ATTENTION_DECODE,
    &SQUARED_ERROR,
    &CHANNEL_NORM,
    &MEASURES,
    &LAMB,
    &ADAFACTOR,
    &MUON,
    &ADAM8BIT,
    &CODECS,
    &SPARSE,
    &FEEDBACK,
    &LOW_RANK,
    &NONZEROS,
];

/// `name in FILE, Geometry: pass Type name, ..` for each kernel.
macro_rules! kernels {
    ($($name:ident in $source:ident, $geometry:expr; $($pass:ident $of:ident $arg:ident),+;)*) => {
        /// All kernels.
        pub static KERNELS: &[Kernel] = &[$(Kernel {
            name: stringify!($name),
            source: &$source,
            geometry: $geometry,
            args: &[$(Arg { name: stringify!($arg), pass: Pass::$pass, of: Type::$of }),+],
        }),*];
    };
}

/// Ids of a bucket, by which `embedding_backward` has its ids sorted. `items` of its geometry are rows of the table,
/// `width` is the vectors of a row: of four elements, eight for `embedding_backward_16`.
pub const TABLE_ROWS: u64 = 64;

/// Elements that a block of an update rule has: `items` of its geometry are those of each vector, rounded up to a
/// multiple of this.
pub const UPDATE_PIECE: u64 = 4 * THREADS as u64;

/// Elements that a warp of `exact_squares` sums: `items` of its geometry are those of each vector divided by this,
/// rounded up.
pub const EXACT_PIECE: u64 = 16_384;

/// Elements that a warp of `sum_of_squares` sums: `items` of its geometry are those of each vector divided by this,
/// rounded up.
pub const SQUARES_PIECE: u64 = 32_768;

/// Rows of a result's tile in `grouped_tensor_*`: `items` of their geometry are the tiles of rows of all groups.
pub const GROUPED_ROWS: u64 = 128;

/// The longest rows of norms that are read once; backward, `Geometry::Parts`, longer ones have the kernels
/// `*_backward_wide` and `*_backward_parts`.
pub const NORM_WIDTH: u64 = 8192;

/// Bytes of bits that a block of `nonzeros_*` has: `items` of their geometry are the bytes divided by this, rounded up.
pub const NONZERO_CHUNK: u64 = 2048;

const ELEMENTS: Geometry = Geometry::Elements { each: 1 };

/// A thread for 16 bytes of neighbours, of f64, f32, 16 bits or bytes: `cuda/neighbours.cuh`.
const TWOS: Geometry = Geometry::Elements { each: 2 };
const FOURS_OF_F32: Geometry = Geometry::Elements { each: 4 };
const EIGHT: Geometry = Geometry::Elements { each: 8 };
const SIXTEEN: Geometry = Geometry::Elements { each: 16 };

/// A thread for four, eight or sixteen neighbours in a row; no thread takes elements of two rows.
const ROWS_BY_FOUR: Geometry = Geometry::RowVectors { each: 4 };
const ROWS_BY_EIGHT: Geometry = Geometry::RowVectors { each: 8 };
const ROWS_BY_SIXTEEN: Geometry = Geometry::RowVectors { each: 16 };

/// Queries or keys of a block of flash attention, and its tiles in shared memory, of 16 bits: `cuda/flash_forward.cu`,
/// `cuda/flash_backward.cu`.
const fn flash(head_dim: u32, tiles: u32) -> Geometry {
    Geometry::TensorTiles { rows: 128, shared: 2 * head_dim * tiles }
}

/// The same for the forms for sm_90a: beside tiles, barriers for their copies, and numbers of the columns:
/// `cuda/flash_sm90.cuh`.
const fn flash_sm90(head_dim: u32, tiles: u32, stages: u32, numbers: u32) -> Geometry {
    Geometry::TensorTiles { rows: 128, shared: 2 * head_dim * tiles + 4 * numbers + 8 * (stages + 1) }
}

/// Columns of a tile of products of groups, and the tiles of both operands in shared memory, of 16 bits:
/// `cuda/grouped_tensor.cu`.
pub(crate) const fn grouped(columns: u32, stages: u32) -> Geometry {
    Geometry::TensorTiles { rows: columns, shared: 2 * 64 * (GROUPED_ROWS as u32 + columns) * stages }
}

/// A thread for the elements whose bits are one byte.
const BYTES: Geometry = Geometry::Elements { each: 8 };

kernels! {
    layer_norm_forward_f32 in LAYER_NORM, Geometry::Rounds;
        In F32 x, In F32 gamma, In F32 beta, Value F32 eps, Out F32 y, Out F32 mean, Out F32 rstd, Value I64 rows, Divisor I64 n;
    layer_norm_forward_bf16 in LAYER_NORM, Geometry::Rounds;
        In F32 x, In F32 gamma, In F32 beta, Value F32 eps, Out Bits16 y, Out F32 mean, Out F32 rstd, Value I64 rows, Divisor I64 n;
    layer_norm_forward_16 in LAYER_NORM, Geometry::Rounds;
        In Bits16 x, In Bits16 gamma, In Bits16 beta, Value F32 eps, Out Bits16 y, Out F32 mean, Out F32 rstd, Value I64 rows, Divisor I64 n, Value I32 f16;
    layer_norm_backward in LAYER_NORM, Geometry::Parts;
        In F32 dy, In F32 x, In F32 gamma, In F32 mean, In F32 rstd, In I64 starts, Out F32 dx, Value I32 accumulate, Out F32 dgamma, Out F32 dbeta,
        Divisor I64 n;
    layer_norm_backward_16 in LAYER_NORM, Geometry::Parts;
        In Bits16 dy, In Bits16 x, In Bits16 gamma, In F32 mean, In F32 rstd, In I64 starts, Out Bits16 dx, Value I32 accumulate, Out F32 dgamma,
        Out F32 dbeta, Divisor I64 n, Value I32 f16;
    layer_norm_backward_wide in LAYER_NORM, Geometry::Rows;
        In F32 dy, In F32 x, In F32 gamma, In F32 mean, In F32 rstd, Out F32 dx, Value I32 accumulate, Value I64 rows, Value I64 n;
    layer_norm_backward_wide_16 in LAYER_NORM, Geometry::Rows;
        In Bits16 dy, In Bits16 x, In Bits16 gamma, In F32 mean, In F32 rstd, Out Bits16 dx, Value I32 accumulate, Value I64 rows, Value I64 n, Value I32 f16;
    layer_norm_backward_parts in LAYER_NORM, ROWS_BY_FOUR;
        In F32 dy, In F32 x, In F32 mean, In F32 rstd, In I64 starts, Out F32 dgamma, Out F32 dbeta, Value I64 parts, Divisor I64 n;
    layer_norm_backward_parts_16 in LAYER_NORM, ROWS_BY_EIGHT;
        In Bits16 dy, In Bits16 x, In F32 mean, In F32 rstd, In I64 starts, Out F32 dgamma, Out F32 dbeta, Value I64 parts, Divisor I64 n, Value I32 f16;
    rms_norm_forward_f32 in RMS_NORM, Geometry::Rounds;
        In F32 x, In F32 weight, Value F32 eps, Out F32 y, Out F32 rstd, Value I64 rows, Divisor I64 n;
    rms_norm_forward_bf16 in RMS_NORM, Geometry::Rounds;
        In F32 x, In F32 weight, Value F32 eps, Out Bits16 y, Out F32 rstd, Value I64 rows, Divisor I64 n;
    rms_norm_forward_16 in RMS_NORM, Geometry::Rounds;
        In Bits16 x, In Bits16 weight, Value F32 eps, Out Bits16 y, Out F32 rstd, Value I64 rows, Divisor I64 n, Value I32 f16;
    rms_norm_backward in RMS_NORM, Geometry::Parts;
        In F32 dy, In F32 x, In F32 weight, In F32 rstd, In I64 starts, Out F32 dx, Value I32 accumulate, Out F32 dweight, Divisor I64 n;
    rms_norm_backward_16 in RMS_NORM, Geometry::Parts;
        In Bits16 dy, In Bits16 x, In Bits16 weight, In F32 rstd, In I64 starts, Out Bits16 dx, Value I32 accumulate, Out F32 dweight, Divisor I64 n,
        Value I32 f16;
    rms_norm_backward_wide in RMS_NORM, Geometry::Rows;
        In F32 dy, In F32 x, In F32 weight, In F32 rstd, Out F32 dx, Value I32 accumulate, Value I64 rows, Value I64 n;
    rms_norm_backward_wide_16 in RMS_NORM, Geometry::Rows;
        In Bits16 dy, In Bits16 x, In Bits16 weight, In F32 rstd, Out Bits16 dx, Value I32 accumulate, Value I64 rows, Value I64 n, Value I32 f16;
    rms_norm_backward_parts in RMS_NORM, ROWS_BY_FOUR;
        In F32 dy, In F32 x, In F32 rstd, In I64 starts, Out F32 dweight, Value I64 parts, Divisor I64 n;
    rms_norm_backward_parts_16 in RMS_NORM, ROWS_BY_EIGHT;
        In Bits16 dy, In Bits16 x, In F32 rstd, In I64 starts, Out F32 dweight, Value I64 parts, Divisor I64 n, Value I32 f16;
    add in BIAS, FOURS_OF_F32; In F32 a, In F32 b, Out F32 out, Value I64 count;
    add_f64 in BIAS, TWOS; In F64 a, In F64 b, Out F64 out, Value I64 count;
    add_assign in BIAS, FOURS_OF_F32; Out F32 a, In F32 b, Value I64 count;
    add_assign_f64 in BIAS, TWOS; Out F64 a, In F64 b, Value I64 count;
    bias in BIAS, FOURS_OF_F32; In F32 x, In F32 bias, Out F32 out, Value I64 count, Divisor I64 n;
    bias_residual in BIAS, FOURS_OF_F32; In F32 x, In F32 bias, In F32 residual, Out F32 out, Value I64 count, Divisor I64 n;
    sum_parts in BIAS, ROWS_BY_FOUR; In F32 x, In I64 starts, Out F32 sums, Value I64 parts, Divisor I64 n;
    add_16 in BIAS, EIGHT; In Bits16 a, In Bits16 b, Out Bits16 out, Value I64 count, Value I32 f16;
    add_assign_16 in BIAS, EIGHT; Out Bits16 a, In Bits16 b, Value I64 count, Value I32 f16;
    bias_16 in BIAS, EIGHT; In Bits16 x, In Bits16 bias, Out Bits16 out, Value I64 count, Divisor I64 n, Value I32 f16;
    bias_residual_16 in BIAS, EIGHT;
        In Bits16 x, In Bits16 bias, In Bits16 residual, Out Bits16 out, Value I64 count, Divisor I64 n, Value I32 f16;
    sum_parts_16 in BIAS, ROWS_BY_EIGHT; In Bits16 x, In I64 starts, Out F32 sums, Value I64 parts, Divisor I64 n, Value I32 f16;
    scale_forward in ELEMENTWISE, FOURS_OF_F32; In F32 x, Out F32 out, Value I64 count, Value F32 factor;
    scale_forward_f64 in ELEMENTWISE, TWOS; In F64 x, Out F64 out, Value I64 count, Value F64 factor;
    exp_forward in ELEMENTWISE, FOURS_OF_F32; In F32 x, Out F32 out, Value I64 count;
    exp_backward in ELEMENTWISE, FOURS_OF_F32; In F32 dy, In F32 x, Out F32 dx, Value I64 count;
    tanh_forward in ELEMENTWISE, FOURS_OF_F32; In F32 x, Out F32 out, Value I64 count;
    tanh_backward in ELEMENTWISE, FOURS_OF_F32; In F32 dy, In F32 x, Out F32 dx, Value I64 count;
    sigmoid_forward in ELEMENTWISE, FOURS_OF_F32; In F32 x, Out F32 out, Value I64 count;
    sigmoid_backward in ELEMENTWISE, FOURS_OF_F32; In F32 dy, In F32 x, Out F32 dx, Value I64 count;
    silu_forward in ELEMENTWISE, FOURS_OF_F32; In F32 x, Out F32 out, Value I64 count;
    silu_backward in ELEMENTWISE, FOURS_OF_F32; In F32 dy, In F32 x, Out F32 dx, Value I64 count;
    soft_cap_forward in ELEMENTWISE, FOURS_OF_F32; In F32 x, Out F32 out, Value I64 count, Value F32 cap;
    soft_cap_backward in ELEMENTWISE, FOURS_OF_F32; In F32 dy, In F32 x, Out F32 dx, Value I64 count, Value F32 cap;
    zip_sub in ELEMENTWISE, FOURS_OF_F32; In F32 x, In F32 y, Out F32 out, Value I64 count, Divisor I64 n;
    zip_mul in ELEMENTWISE, FOURS_OF_F32; In F32 x, In F32 y, Out F32 out, Value I64 count, Divisor I64 n;
    zip_div in ELEMENTWISE, FOURS_OF_F32; In F32 x, In F32 y, Out F32 out, Value I64 count, Divisor I64 n;
    relu_forward in ELEMENTWISE, BYTES; In F32 x, Out F32 out, Out U8 above, Value I64 count;
    relu_backward in ELEMENTWISE, BYTES; In F32 dy, In U8 above, Out F32 dx, Value I64 count;
    sum_dim in REDUCTION, ELEMENTS;
        In F32 x, Out F32 out, Value I64 count, Divisor I64 outer, Value I64 extent, Divisor I64 inner, Divisor I64 blocks, Value F64 scale;
    spread_dim in REDUCTION, FOURS_OF_F32;
        In F32 dy, Out F32 dx, Value I64 count, Divisor I64 extent, Divisor I64 inner, Value F32 scale;
    softmax_forward in REDUCTION, Geometry::Rows; In F32 x, Out F32 y, Value I64 rows, Value I64 n;
    softmax_backward in REDUCTION, Geometry::Rows; In F32 dy, In F32 y, Out F32 dx, Value I64 rows, Value I64 n;
    patches_forward in WINDOWS, ELEMENTS;
        In F32 x, Out F32 out, Value I64 count, Value I64 height, Value I64 width, Divisor I64 channels,
        Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across, Value I64 stride, Value I64 padding;
    patches_backward in WINDOWS, ELEMENTS;
        In F32 dpatches, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width, Divisor I64 channels,
        Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride, Value I64 padding;
    max_pool_forward_u8 in WINDOWS, ELEMENTS;
        In F32 x, Out F32 out, Out U8 places, Value I64 count, Value I64 height, Value I64 width, Divisor I64 channels,
        Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across, Value I64 stride, Value I64 padding;
    max_pool_backward_u8 in WINDOWS, ELEMENTS;
        In F32 dy, In U8 places, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width, Divisor I64 channels,
        Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride, Value I64 padding;
    max_pool_forward_i32 in WINDOWS, ELEMENTS;
        In F32 x, Out F32 out, Out I32 places, Value I64 count, Value I64 height, Value I64 width, Divisor I64 channels,
        Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across, Value I64 stride, Value I64 padding;
    max_pool_backward_i32 in WINDOWS, ELEMENTS;
        In F32 dy, In I32 places, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width, Divisor I64 channels,
        Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride, Value I64 padding;
    average_pool_forward in WINDOWS, ELEMENTS;
        In F32 x, Out F32 out, Value I64 count, Value I64 height, Value I64 width, Divisor I64 channels,
        Divisor I64 rows, Divisor I64 columns, Divisor I64 down, Divisor I64 across, Value I64 stride, Value I64 padding;
    average_pool_backward in WINDOWS, ELEMENTS;
        In F32 dy, Out F32 dx, Value I64 count, Divisor I64 height, Divisor I64 width, Divisor I64 channels,
        Value I64 rows, Value I64 columns, Value I64 down, Value I64 across, Divisor I64 stride, Value I64 padding;
    gelu_forward_f32 in GELU, FOURS_OF_F32; In F32 x, In F32 bias, Out F32 out, Value I64 count, Divisor I64 n;
    gelu_forward_bf16 in GELU, EIGHT; In F32 x, In F32 bias, Out Bits16 out, Value I64 count, Divisor I64 n;
    gelu_backward in GELU, FOURS_OF_F32; In F32 x, In F32 bias, Out F32 dy, Value I64 count, Divisor I64 n;
    gelu_forward_16 in GELU, EIGHT; In Bits16 x, In Bits16 bias, Out Bits16 out, Value I64 count, Divisor I64 n, Value I32 f16;
    gelu_backward_16 in GELU, EIGHT; In Bits16 x, In Bits16 bias, Out Bits16 dy, Value I64 count, Divisor I64 n, Value I32 f16;
    gelu_backward_parts_16 in GELU, ROWS_BY_EIGHT;
        In Bits16 x, In Bits16 bias, Out Bits16 dy, In I64 starts, Out F32 sums, Value I64 parts, Divisor I64 n, Value I32 f16;
    swiglu_forward_f32 in SWIGLU, FOURS_OF_F32; In F32 x, Out F32 out, Value I64 count;
    swiglu_forward_bf16 in SWIGLU, EIGHT; In F32 x, Out Bits16 out, Value I64 count;
    swiglu_backward in SWIGLU, FOURS_OF_F32; In F32 dy, Out F32 x, Value I64 count;
    swiglu_forward_16 in SWIGLU, EIGHT; In Bits16 x, Out Bits16 out, Value I64 count, Value I32 f16;
    swiglu_backward_16 in SWIGLU, EIGHT; In Bits16 dy, Out Bits16 x, Value I64 count, Value I32 f16;
    adamw in OPTIMIZER, FOURS_OF_F32;
        Outs F32 weights, Ins F32 grads, Outs F32 mean, Outs F32 square, In I64 starts, In I64 counts, Value I64 vectors, Value F32 grad_scale,
        Value F32 keep, Value F32 lr_hat, Value F32 root_hat, Value F32 mean_new, Value F32 square_old, Value F32 square_new, Value F32 eps;
    sgd in OPTIMIZER, FOURS_OF_F32;
        Outs F32 weights, Ins F32 grads, In I64 starts, In I64 counts, Value I64 vectors, Value F32 grad_scale, Value F32 decay, Value F32 lr;
    sgd_momentum in OPTIMIZER, FOURS_OF_F32;
        Outs F32 weights, Ins F32 grads, Outs F32 buffer, In I64 starts, In I64 counts, Value I64 vectors, Value F32 grad_scale, Value F32 decay,
        Value F32 lr, Value F32 momentum;
    sum_of_squares in GRAD_NORM, Geometry::Warps; Ins F32 x, In I64 starts, In I64 counts, Value I64 vectors, Out F64 parts;
    sum_of_parts in GRAD_NORM, Geometry::Columns; In F64 parts, In I64 starts, Value I64 vectors, Out F64 totals, Out F64 sum;
    unscale in GRAD_NORM, FOURS_OF_F32; Out F32 x, Value F32 inverse, Out I32 overflow, Value I64 count;
    exact_squares in EXACT_SQUARES, Geometry::Warps; Ins F32 x, In I64 starts, In I64 counts, Value I64 vectors, Out U64 parts;
    exact_squares_sum in EXACT_SQUARES, Geometry::OneWarp; In U64 parts, Value I64 pieces, Out F64 digits;
    product_f32 in PRODUCT, ELEMENTS;
        In F32 a, Value I64 a_row, Value I64 a_term, In F32 b, Value I64 b_term, Value I64 b_column, Out F32 c, Value I32 accumulate,
        Value I64 k, Divisor I64 segments, Divisor I64 blocks, Value I64 count, Divisor I64 n;
    product_bf16 in PRODUCT, ELEMENTS;
        In Bits16 a, Value I64 a_row, Value I64 a_term, In Bits16 b, Value I64 b_term, Value I64 b_column, Out F32 c, Value I32 accumulate,
        Value I64 k, Divisor I64 segments, Divisor I64 blocks, Value I64 count, Divisor I64 n;
    product_sum_f32 in PRODUCT, ELEMENTS;
        In F32 a, Value I64 a_row, Value I64 a_term, In F32 b, Value I64 b_term, Value I64 b_column, Value I64 k, Divisor I64 segments,
        In F32 a2, Value I64 a2_row, Value I64 a2_term, In F32 b2, Value I64 b2_term, Value I64 b2_column, Value I64 k2, Divisor I64 segments2,
        Divisor I64 blocks, Out F32 c, Value I64 count, Divisor I64 n;
    product_sum_bf16 in PRODUCT, ELEMENTS;
        In Bits16 a, Value I64 a_row, Value I64 a_term, In Bits16 b, Value I64 b_term, Value I64 b_column, Value I64 k, Divisor I64 segments,
        In Bits16 a2, Value I64 a2_row, Value I64 a2_term, In Bits16 b2, Value I64 b2_term, Value I64 b2_column, Value I64 k2, Divisor I64 segments2,
        Divisor I64 blocks, Out F32 c, Value I64 count, Divisor I64 n;
    f32_to_bf16 in CASTS, EIGHT; In F32 from, Out Bits16 to, Value I64 count;
    f32_to_operand in CASTS, EIGHT; In F32 from, Out Bits16 to, Value I64 count;
    bf16_to_f32 in CASTS, EIGHT; In Bits16 from, Out F32 to, Value I64 count;
    f32_to_f16 in CASTS, EIGHT; In F32 from, Out Bits16 to, Value I64 count;
    f16_to_f32 in CASTS, EIGHT; In Bits16 from, Out F32 to, Value I64 count;
    bucket_gather in CASTS, FOURS_OF_F32; Ins F32 tensors, In I64 starts, Value I64 count_tensors, Out F32 bucket, Value I64 count;
    bucket_scatter in CASTS, FOURS_OF_F32; In F32 bucket, In I64 starts, Value I64 count_tensors, Outs F32 tensors, Value I64 count;
    copy_rows_8 in COPIES, ROWS_BY_SIXTEEN; In U8 from, Value I64 from_row, Out U8 to, Value I64 to_row, Value I64 rows, Divisor I64 n;
    copy_rows_16 in COPIES, ROWS_BY_EIGHT; In Bits16 from, Value I64 from_row, Out Bits16 to, Value I64 to_row, Value I64 rows, Divisor I64 n;
    copy_rows_32 in COPIES, ROWS_BY_FOUR; In U32 from, Value I64 from_row, Out U32 to, Value I64 to_row, Value I64 rows, Divisor I64 n;
    reduce_sum_f32 in REDUCE_RANKS, FOURS_OF_F32; Ins F32 inputs, Value I64 ranks, Out F32 out, Value I64 count;
    reduce_sum_f64 in REDUCE_RANKS, TWOS; Ins F64 inputs, Value I64 ranks, Out F64 out, Value I64 count;
    reduce_sum_bf16 in REDUCE_RANKS, EIGHT; Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count;
    reduce_sum_f16 in REDUCE_RANKS, EIGHT; Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count;
    reduce_sum_i32 in REDUCE_RANKS, FOURS_OF_F32; Ins I32 inputs, Value I64 ranks, Out I32 out, Value I64 count;
    reduce_sum_i64 in REDUCE_RANKS, TWOS; Ins I64 inputs, Value I64 ranks, Out I64 out, Value I64 count;
    reduce_sum_u8 in REDUCE_RANKS, SIXTEEN; Ins U8 inputs, Value I64 ranks, Out U8 out, Value I64 count;
    reduce_max_f32 in REDUCE_RANKS, FOURS_OF_F32; Ins F32 inputs, Value I64 ranks, Out F32 out, Value I64 count;
    reduce_max_f64 in REDUCE_RANKS, TWOS; Ins F64 inputs, Value I64 ranks, Out F64 out, Value I64 count;
    reduce_max_bf16 in REDUCE_RANKS, EIGHT; Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count;
    reduce_max_f16 in REDUCE_RANKS, EIGHT; Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count;
    reduce_max_i32 in REDUCE_RANKS, FOURS_OF_F32; Ins I32 inputs, Value I64 ranks, Out I32 out, Value I64 count;
    reduce_max_i64 in REDUCE_RANKS, TWOS; Ins I64 inputs, Value I64 ranks, Out I64 out, Value I64 count;
    reduce_max_u8 in REDUCE_RANKS, SIXTEEN; Ins U8 inputs, Value I64 ranks, Out U8 out, Value I64 count;
    reduce_min_f32 in REDUCE_RANKS, FOURS_OF_F32; Ins F32 inputs, Value I64 ranks, Out F32 out, Value I64 count;
    reduce_min_f64 in REDUCE_RANKS, TWOS; Ins F64 inputs, Value I64 ranks, Out F64 out, Value I64 count;
    reduce_min_bf16 in REDUCE_RANKS, EIGHT; Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count;
    reduce_min_f16 in REDUCE_RANKS, EIGHT; Ins Bits16 inputs, Value I64 ranks, Out Bits16 out, Value I64 count;
    reduce_min_i32 in REDUCE_RANKS, FOURS_OF_F32; Ins I32 inputs, Value I64 ranks, Out I32 out, Value I64 count;
    reduce_min_i64 in REDUCE_RANKS, TWOS; Ins I64 inputs, Value I64 ranks, Out I64 out, Value I64 count;
    reduce_min_u8 in REDUCE_RANKS, SIXTEEN; Ins U8 inputs, Value I64 ranks, Out U8 out, Value I64 count;
    tree_sum in REDUCE_RANKS, FOURS_OF_F32; In F32 x, Value I64 vectors, Out F32 out, Value I64 n;
    dropout in DROPOUT, FOURS_OF_F32;
        In F32 x, In I64 sizes, Value I32 dims, Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Out F32 y, Value I64 count;
    dropout_16 in DROPOUT, EIGHT;
        In Bits16 x, In I64 sizes, Value I32 dims, Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Out Bits16 y, Value I64 count, Value I32 f16;
    jitter in DROPOUT, FOURS_OF_F32;
        In F32 x, In I64 sizes, Value I32 dims, Value U32 key0, Value U32 key1, Value F32 low, Value F32 step, Out F32 y, Value I64 count;
    rotary_forward in ROTARY, ROWS_BY_FOUR;
        In F32 from, Value I64 from_row, In F32 angles, In I32 positions, Out F32 to, Value I64 to_row, Value I64 rows, Divisor I64 seq,
        Divisor I64 heads, Divisor I64 head_dim;
    rotary_backward in ROTARY, ROWS_BY_FOUR;
        Out F32 x, Value I64 row, In F32 angles, In I32 positions, Value I64 rows, Divisor I64 seq, Divisor I64 heads, Divisor I64 head_dim;
    rotary_forward_16 in ROTARY, ROWS_BY_EIGHT;
        In Bits16 from, Value I64 from_row, In F32 angles, In I32 positions, Out Bits16 to, Value I64 to_row, Value I64 rows, Divisor I64 seq,
        Divisor I64 heads, Divisor I64 head_dim, Value I32 f16;
    rotary_backward_16 in ROTARY, ROWS_BY_EIGHT;
        Out Bits16 x, Value I64 row, In F32 angles, In I32 positions, Value I64 rows, Divisor I64 seq, Divisor I64 heads, Divisor I64 head_dim, Value I32 f16;
    embedding_forward in EMBEDDING, FOURS_OF_F32;
        In I32 ids, In F32 table, Value I64 first_row, Value I64 rows, Out F32 out, Value I64 count, Divisor I64 h;
    embedding_forward_16 in EMBEDDING, EIGHT;
        In I32 ids, In Bits16 table, Value I64 first_row, Value I64 rows, Out Bits16 out, Value I64 count, Divisor I64 h, Value I32 f16;
    check_ids in EMBEDDING, Geometry::Columns; In I32 ids, Value I64 vocab, Value I32 masked, Out I64 found, Value I64 count;
    embedding_backward in EMBEDDING, Geometry::Columns;
        In I32 ids, In I32 order, In I32 ends, In F32 dout, Value I64 first_row, Out F32 dtable, Value I32 accumulate, Value I64 h;
    embedding_backward_16 in EMBEDDING, Geometry::Columns;
        In I32 ids, In I32 order, In I32 ends, In Bits16 dout, Value I64 first_row, Out F32 dtable, Value I32 accumulate, Value I64 h, Value I32 f16;
    embedding_backward_tree in EMBEDDING, Geometry::Columns;
        In I32 ids, In I32 order, In I32 ends, In F32 dout, Value I64 first_row, Out F32 dtable, Value I32 accumulate, Value I64 runs, Divisor I64 run,
        Value I64 h;
    embedding_backward_tree_16 in EMBEDDING, Geometry::Columns;
        In I32 ids, In I32 order, In I32 ends, In Bits16 dout, Value I64 first_row, Out F32 dtable, Value I32 accumulate, Value I64 runs, Divisor I64 run,
        Value I64 h, Value I32 f16;
    positions_forward in EMBEDDING, FOURS_OF_F32;
        In F32 x, In F32 table, Value I64 first, Divisor I64 seq, Out F32 out, Value I64 count, Divisor I64 h;
    positions_forward_16 in EMBEDDING, EIGHT;
        In Bits16 x, In Bits16 table, Value I64 first, Divisor I64 seq, Out Bits16 out, Value I64 count, Divisor I64 h, Value I32 f16;
    positions_backward in EMBEDDING, FOURS_OF_F32;
        In F32 dout, Value I64 first, Value I64 seq, Out F32 dtable, Value I32 accumulate, Value I64 batch, Value I64 run, Value I64 h;
    positions_backward_16 in EMBEDDING, FOURS_OF_F32;
        In Bits16 dout, Value I64 first, Value I64 seq, Out F32 dtable, Value I32 accumulate, Value I64 batch, Value I64 run, Value I64 h, Value I32 f16;
    cross_entropy_stats in CROSS_ENTROPY, Geometry::HeldRows { bytes: 4 };
        In F32 logits, In I32 targets, Value I64 pitch, Value I64 skipped, Value I64 valid, Value I64 first, Out F32 max, Out F32 sum,
        Out F32 target, Value I64 rows;
    cross_entropy_stats_16 in CROSS_ENTROPY, Geometry::HeldRows { bytes: 2 };
        In Bits16 logits, In I32 targets, Value I64 pitch, Value I64 skipped, Value I64 valid, Value I64 first, Out F32 max, Out F32 sum,
        Out F32 target, Value I64 rows, Value I32 f16;
    cross_entropy_larger in CROSS_ENTROPY, ELEMENTS; Out F32 max, In F32 other, Value I64 rows;
    cross_entropy_rescale in CROSS_ENTROPY, ELEMENTS; In F32 local, In F32 global, Out F32 sum, Value I64 rows;
    cross_entropy_lse in CROSS_ENTROPY, ELEMENTS; In F32 max, In F32 sum, Out F32 lse, Value I64 rows;
    cross_entropy_loss in CROSS_ENTROPY, Geometry::Warps;
        In I32 targets, In F32 max, In F32 sum, In F32 target, Out F64 loss, Divisor I64 samples, Value I64 rows;
    cross_entropy_backward in CROSS_ENTROPY, Geometry::Rows;
        Out F32 logits, In I32 targets, In F32 lse, In F64 scale, Value I64 pitch, Value I64 skipped, Value I64 width, Value I64 valid,
        Value I64 first, Divisor I64 samples, Value I64 rows;
    cross_entropy_backward_16 in CROSS_ENTROPY, Geometry::Rows;
        Out Bits16 logits, In I32 targets, In F32 lse, In F64 scale, Value I64 pitch, Value I64 skipped, Value I64 width, Value I64 valid,
        Value I64 first, Divisor I64 samples, Value I64 rows, Value I32 f16;
    attention_forward_64 in ATTENTION_FORWARD, Geometry::Tiles { rows: 32 };
        In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, Out F32 out, Out F32 lse, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample,
        Value I64 first_head, Value I64 global_heads, In I32 firsts, Value I32 rounded;
    attention_forward_128 in ATTENTION_FORWARD, Geometry::Tiles { rows: 32 };
        In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, Out F32 out, Out F32 lse, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0, Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample,
        Value I64 first_head, Value I64 global_heads, In I32 firsts, Value I32 rounded;
    attention_dots in ATTENTION_BACKWARD, ELEMENTS;
        In F32 dout, In F32 out, Out F32 dots, Value I64 batch, Divisor I64 seq, Divisor I64 heads, Value I64 head_dim;
    attention_backward_q_64 in ATTENTION_BACKWARD, Geometry::Tiles { rows: 16 };
        In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, In F32 dout, In F32 lse, In F32 dots, Out F32 dq, Value I64 dq_row,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0, Value U32 key1,
        Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head, Value I64 global_heads, In I32 firsts, Value I32 rounded;
    attention_backward_q_128 in ATTENTION_BACKWARD, Geometry::Tiles { rows: 16 };
        In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, In F32 dout, In F32 lse, In F32 dots, Out F32 dq, Value I64 dq_row,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0, Value U32 key1,
        Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head, Value I64 global_heads, In I32 firsts, Value I32 rounded;
    attention_backward_kv_64 in ATTENTION_BACKWARD, Geometry::Tiles { rows: 16 };
        In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, In F32 dout, In F32 lse, In F32 dots, Out F32 dk, Out F32 dv,
        Value I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0,
        Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head, Value I64 global_heads, In I32 firsts, Value I32 rounded;
    attention_backward_kv_128 in ATTENTION_BACKWARD, Geometry::Tiles { rows: 16 };
        In F32 q, Value I64 q_row, In F32 k, In F32 v, Value I64 kv_row, In F32 dout, In F32 lse, In F32 dots, Out F32 dk, Out F32 dv,
        Value I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Divisor I32 head_dim, Value F32 scale, Value U32 key0,
        Value U32 key1, Value F32 p, Value F32 kept, Value I64 first_sample, Value I64 first_head, Value I64 global_heads, In I32 firsts, Value I32 rounded;
    attention_group_sum in ATTENTION_BACKWARD, ELEMENTS;
        In F32 from, Out F32 to, Value I64 to_row, Value I64 rows, Value I64 heads, Divisor I64 group, Value I64 first, Divisor I64 head_dim;
    flash_forward_64 in FLASH_FORWARD, flash(64, 128 + 4 * 32);
        InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row, OutChunks Bits16 out, Out F32 lse, Value I64 seq, Divisor I64 heads,
        Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_forward_128 in FLASH_FORWARD, flash(128, 128 + 4 * 64);
        InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row, OutChunks Bits16 out, Out F32 lse, Value I64 seq, Divisor I64 heads,
        Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_dots in FLASH_BACKWARD, ELEMENTS;
        InChunks Bits16 dout, InChunks Bits16 out, Out F32 dots, Value I64 batch, Divisor I64 seq, Divisor I64 heads, Eights I64 head_dim;
    flash_backward_q_64 in FLASH_BACKWARD, flash(64, 2 * 128 + 4 * 64);
        InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row, InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dq, Eights I64 dq_row,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_backward_q_128 in FLASH_BACKWARD, flash(128, 2 * 128 + 4 * 64);
        InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row, InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dq, Eights I64 dq_row,
        Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_backward_kv_64 in FLASH_BACKWARD, flash(64, 2 * 128 + 4 * 32);
        InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row, InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dk, OutChunks Bits16 dv,
        Eights I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_backward_kv_128 in FLASH_BACKWARD, flash(128, 2 * 128 + 4 * 16);
        InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row, InChunks Bits16 dout, In F32 lse, In F32 dots, OutChunks Bits16 dk, OutChunks Bits16 dv,
        Eights I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_maps in FLASH_MAPS, Geometry::OneWarp;
        InChunks Bits16 q, Eights I64 q_row, InChunks Bits16 k, InChunks Bits16 v, Eights I64 kv_row, InChunks Bits16 dout, Out U64 maps, Value I64 batch, Value I64 seq,
        Value I64 heads, Value I64 kv_heads, Eights I32 head_dim;
    flash_forward_sm90_64 in FLASH_FORWARD_SM90, flash_sm90(64, 128 + 4 * 128, 2, 0);
        In U64 maps, OutChunks Bits16 out, Out F32 lse, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim,
        Value F32 scale, In I32 firsts;
    flash_forward_sm90_128 in FLASH_FORWARD_SM90, flash_sm90(128, 128 + 4 * 128, 2, 0);
        In U64 maps, OutChunks Bits16 out, Out F32 lse, Value I64 seq, Divisor I64 heads, Divisor I64 group, Value I64 first_kv, Eights I32 head_dim,
        Value F32 scale, In I32 firsts;
    flash_backward_sm90_q_64 in FLASH_BACKWARD_SM90, flash_sm90(64, 2 * 128 + 4 * 128, 2, 0);
        In U64 maps, In F32 lse, In F32 dots, OutChunks Bits16 dq, Eights I64 dq_row, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_backward_sm90_q_128 in FLASH_BACKWARD_SM90, flash_sm90(128, 2 * 128 + 4 * 64, 2, 0);
        In U64 maps, In F32 lse, In F32 dots, OutChunks Bits16 dq, Eights I64 dq_row, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_backward_sm90_kv_64 in FLASH_BACKWARD_SM90, flash_sm90(64, 2 * 128 + 4 * 64, 2, 4 * 64);
        In U64 maps, In F32 lse, In F32 dots, OutChunks Bits16 dk, OutChunks Bits16 dv, Eights I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    flash_backward_sm90_kv_128 in FLASH_BACKWARD_SM90, flash_sm90(128, 2 * 128 + 4 * 64, 2, 4 * 64);
        In U64 maps, In F32 lse, In F32 dots, OutChunks Bits16 dk, OutChunks Bits16 dv, Eights I64 dkv_row, Value I64 seq, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Eights I32 head_dim, Value F32 scale, In I32 firsts;
    route_rank in ROUTING, Geometry::Warps;
        In F32 scores, In F32 bias, Value I64 experts, Divisor I64 groups, Value I64 top_groups, Value I64 group_best, Value I64 width,
        Out F32 group_scores, Out I32 ranked, Out I32 kept, Value I32 normalise, Value F32 scale, Out F32 weights, Value I64 tokens;
    route_parts in ROUTING, Geometry::Warps;
        In F32 scores, In I32 ranked, Value I64 experts, Divisor I64 k, Value I32 draws, Value U32 key0, Value U32 key1, Value I64 first_token,
        Value I64 part, Divisor I64 parts, Out I32 counts, Value I64 samples, Value I64 each;
    route_limit in ROUTING, Geometry::Warps;
        In F32 scores, Out I32 ranked, Value I64 experts, Value I64 k, Value I64 capacity, Value I32 draws, Value U32 key0, Value U32 key1,
        Value I64 first_token, Value I64 part, Divisor I64 parts, In I32 counts, Out I32 taken, Out I32 kept, Value I32 normalise, Value F32 scale,
        Out F32 weights, Value I64 samples, Value I64 each;
    route_reroute in ROUTING, ELEMENTS;
        In F32 scores, In I32 ranked, Value I64 experts, Value I64 k, Value I64 width, Value I64 capacity, Value I32 draws, Value U32 key0,
        Value U32 key1, Value I64 first_token, Out I32 taken, Out I32 kept, Value I64 samples, Value I64 each;
    route_first in ROUTING, ELEMENTS; In I32 ranked, In I32 kept, Value I64 width, Value I64 k, Out I32 chosen, Out I32 routed, Value I64 tokens;
    route_sort in ROUTING, ELEMENTS;
        In F32 scores, Value I64 experts, Out I32 routed, Out I32 kept, Value I64 k, Value I32 normalise, Value F32 scale, Out F32 weights,
        Value I64 tokens;
    route_tokens in ROUTING, ELEMENTS; In F32 scores, Divisor I64 experts, Value I64 capacity, Out I32 kept, Value I64 count, Divisor I64 each;
    route_pick in ROUTING, ELEMENTS;
        In F32 scores, In I32 choices, Value I64 experts, Value I64 k, Value I32 normalise, Value F32 scale, Out F32 out, Value I64 tokens;
    route_pick_backward in ROUTING, ELEMENTS;
        In F32 scores, In I32 choices, In F32 dout, Value I64 experts, Value I64 k, Value I32 normalise, Value F32 scale, Out F32 dscores,
        Value I64 tokens;
    balance_sums in ROUTING, ELEMENTS; In F32 scores, Out F64 sums, Value I64 samples, Value I64 each, Divisor I64 experts;
    balance_forward in ROUTING, ELEMENTS;
        In F64 sums, In I32 counts, Value I64 pitch, Value F64 scale, Out F64 out, Value I64 samples, Value I64 experts;
    balance_backward in ROUTING, ELEMENTS;
        In F64 dout, In I32 counts, Value I64 pitch, Value F64 scale, Out F32 dscores, Value I64 count, Divisor I64 each, Divisor I64 experts;
    z_terms in ROUTING, ELEMENTS; In F32 logits, Out F64 terms, Value I64 tokens, Value I64 experts;
    z_backward in ROUTING, ELEMENTS; In F32 logits, In F64 dout, Out F32 dlogits, Value I64 tokens, Divisor I64 each, Value I64 experts;
    entropy_terms in ROUTING, ELEMENTS; In F32 scores, Out F64 terms, Value I64 tokens, Value I64 experts;
    sample_means in ROUTING, ELEMENTS; In F64 terms, Out F64 out, Value I64 samples, Value I64 each;
    route_unused in ROUTING, Geometry::Warps; In I32 kept, Out F64 out, Value I64 samples, Value I64 each;
    choice_parts in PERMUTATION, Geometry::Warps;
        In I32 choices, Value I64 each, Value I64 part, Divisor I64 parts, Value I64 first, Value I64 ids, Out I32 counts, Value I64 samples;
    choice_counts in PERMUTATION, ELEMENTS; In I32 parts_counts, Value I64 parts, Divisor I64 ids, Out I32 counts, Value I64 count;
    choice_loads in PERMUTATION, ELEMENTS; In I32 parts_counts, Value I64 parts, Out F32 loads, Value I64 ids;
    choice_places in PERMUTATION, Geometry::Warps;
        In I32 choices, Value I64 count, Value I64 part, Value I64 parts, Value I64 first, Value I64 ids, In I32 counts, Out I32 next, Out I32 order,
        Value I64 total, Out I32 slots, Out I64 found;
    invert_fill in PERMUTATION, ELEMENTS; Out I32 slots, Value I64 n;
    invert in PERMUTATION, ELEMENTS; In I32 order, Out I32 slots, Value I64 count;
    group_ids in PERMUTATION, ELEMENTS; In I32 choices, Value I64 k, Divisor I64 size, Value I32 once, Out I32 groups, Value I64 tokens;
    gather_8 in PERMUTATION, SIXTEEN; In U8 x, In I32 index, Value I64 rows, Divisor I64 per, Divisor I64 width, Out U8 out, Value I64 count;
    gather_16 in PERMUTATION, EIGHT; In Bits16 x, In I32 index, Value I64 rows, Divisor I64 per, Divisor I64 width, Out Bits16 out, Value I64 count;
    gather_32 in PERMUTATION, FOURS_OF_F32; In U32 x, In I32 index, Value I64 rows, Divisor I64 per, Divisor I64 width, Out U32 out, Value I64 count;
    combine_forward in PERMUTATION, FOURS_OF_F32;
        In F32 rows, In I32 ids, In I32 slots, In F32 weights, Value I64 k, Divisor I64 width, Out F32 out, Value I64 count;
    combine_backward_rows in PERMUTATION, FOURS_OF_F32;
        In F32 dout, In I32 order, In F32 weights, Divisor I64 k, Divisor I64 width, Out F32 drows, Value I64 count;
    combine_backward_weights in PERMUTATION, Geometry::Rows;
        In F32 dout, In F32 rows, In I32 slots, Divisor I64 k, Out F32 dweights, Value I64 choices, Value I64 width;
    grouped_product_f32 in GROUPED, ELEMENTS;
        In F32 x, In F32 w, Value I64 w_term, Value I64 w_column, In I64 starts, Value I64 groups, Out F32 y, Value I64 k, Divisor I64 segments,
        Divisor I64 blocks, Value I64 count, Divisor I64 n;
    grouped_product_bf16 in GROUPED, ELEMENTS;
        In Bits16 x, In Bits16 w, Value I64 w_term, Value I64 w_column, In I64 starts, Value I64 groups, Out F32 y, Value I64 k, Divisor I64 segments,
        Divisor I64 blocks, Value I64 count, Divisor I64 n;
    grouped_product_backward_f32 in GROUPED, ELEMENTS;
        In F32 dy, In F32 x, In I64 first, In I64 bounds, Out F32 dw, Value I32 accumulate, Divisor I64 n, Divisor I64 k, Value I64 count;
    grouped_product_backward_bf16 in GROUPED, ELEMENTS;
        In Bits16 dy, In Bits16 x, In I64 first, In I64 bounds, Out F32 dw, Value I32 accumulate, Divisor I64 n, Divisor I64 k, Value I64 count;
    grouped_tensor_forward in GROUPED_TENSOR, grouped(256, 3);
        InChunks Bits16 x, InChunks Bits16 w, In I64 starts, Value I64 groups, OutPairs F32 y, Eights I64 n, Eights I64 k;
    grouped_tensor_forward_bf16 in GROUPED_TENSOR, grouped(256, 3);
        InChunks Bits16 x, InChunks Bits16 w, In I64 starts, Value I64 groups, OutPairs Bits16 y, Eights I64 n, Eights I64 k;
    grouped_tensor_backward_x in GROUPED_TENSOR, grouped(256, 3);
        InChunks Bits16 dy, InChunks Bits16 w, In I64 starts, Value I64 groups, OutPairs F32 dx, Eights I64 n, Eights I64 k;
    grouped_tensor_backward_x_bf16 in GROUPED_TENSOR, grouped(256, 3);
        InChunks Bits16 dy, InChunks Bits16 w, In I64 starts, Value I64 groups, OutPairs Bits16 dx, Eights I64 n, Eights I64 k;
    grouped_tensor_backward_w in GROUPED_TENSOR, grouped(256, 3);
        InChunks Bits16 dy, InChunks Bits16 x, In I64 first, In I64 bounds, OutPairs F32 dw, Value I32 accumulate, Eights I64 n, Eights I64 k;
    grouped_bias in GROUPED, ELEMENTS; In F32 x, In F32 bias, In I64 starts, Value I64 groups, Out F32 y, Value I64 count, Divisor I64 n;
    grouped_bias_backward in GROUPED, Geometry::Columns; In F32 dy, In I64 first, In I64 bounds, Out F32 db, Value I32 accumulate, Value I64 n;
    channel_squares_parts in CHANNEL_NORM, ROWS_BY_FOUR;
        In F32 x, In F32 mean, In I64 starts, Out F32 sums, Value I64 parts, Divisor I64 rows, Divisor I64 groups, Divisor I64 n;
    channel_means in CHANNEL_NORM, ELEMENTS; In F32 sums, Value F32 members, Out F32 means, Value I64 count, Divisor I64 groups, Divisor I64 n;
    channel_norm_forward in CHANNEL_NORM, ROWS_BY_FOUR;
        In F32 x, In F32 mean, In F32 variance, Value F32 eps, In F32 gamma, In F32 beta, Out F32 y, Value I64 count, Divisor I64 rows,
        Divisor I64 groups, Divisor I64 n;
    channel_norm_backward_parts in CHANNEL_NORM, ROWS_BY_FOUR;
        In F32 dy, In F32 x, In F32 mean, In F32 variance, Value F32 eps, In I64 starts, Out F32 dgamma, Out F32 dbeta, Value I64 parts, Divisor I64 rows,
        Divisor I64 groups, Divisor I64 n;
    channel_gradient_means in CHANNEL_NORM, ELEMENTS;
        In F32 sums, In F32 gamma, Value F32 scale, Out F32 means, Value I64 count, Divisor I64 groups, Divisor I64 n;
    channel_norm_backward in CHANNEL_NORM, ROWS_BY_FOUR;
        In F32 dy, In F32 x, In F32 mean, In F32 variance, Value F32 eps, In F32 gamma, In F32 g, In F32 gx, Out F32 dx, Value I64 count,
        Divisor I64 rows, Divisor I64 groups, Divisor I64 n;
    squared_error in SQUARED_ERROR, ELEMENTS;
        In F32 x, In F32 targets, Out F64 loss, Value F64 scale, Divisor I64 samples, Value I64 elements, Divisor I64 segments, Divisor I64 blocks;
    squared_error_backward in SQUARED_ERROR, ELEMENTS;
        In F32 x, In F32 targets, In F64 dloss, Value F64 scale, Out F32 dx, Value I64 count, Divisor I64 elements;
    correct_rows in SQUARED_ERROR, Geometry::Warps; In F32 logits, In I32 targets, Value I64 width, Out I32 right, Value I64 rows;
    correct_counts in SQUARED_ERROR, Geometry::Warps; In I32 right, Out F64 out, Value I64 samples, Value I64 each;
    decode_append in ATTENTION_DECODE, ELEMENTS;
        In F32 kv, In F32 angles, Out F32 cache, Value I64 count, Divisor I64 seq, Value I64 past, Value I64 capacity, Divisor I64 kv_heads,
        Divisor I64 head_dim;
    decode_scores in ATTENTION_DECODE, ELEMENTS;
        In F32 q, In F32 cache, Out F32 scores, Value I64 rows, Divisor I64 seq, Value I64 past, Value I64 capacity, Divisor I64 heads, Divisor I64 group,
        Value I64 first_kv, Value I64 kv_heads, Value I64 head_dim, Value F32 scale;
    decode_weights in ATTENTION_DECODE, Geometry::Warps; Out F32 scores, Value I64 rows, Divisor I64 seq, Value I64 past, Divisor I64 heads;
    decode_values in ATTENTION_DECODE, ELEMENTS;
        In F32 weights, In F32 cache, Out F32 out, Value I64 count, Divisor I64 seq, Value I64 past, Value I64 capacity, Divisor I64 heads,
        Divisor I64 group, Value I64 first_kv, Value I64 kv_heads, Divisor I64 head_dim;
    check_positions in DOCUMENTS, Geometry::Columns; In I32 positions, Out I64 found, Value I64 count, Divisor I64 seq;
    document_starts in DOCUMENTS, ELEMENTS; In I32 positions, Out I32 checked, Out I32 first, Value I64 count, Divisor I64 seq;
    set_squares in MEASURES, Geometry::Warps;
        In F32 x, In I64 runs, Value I64 run_count, Divisor I64 length, Value I64 rows, Divisor I64 each, Out F64 sums, Value I64 sets;
    set_squares_exact in MEASURES, Geometry::Warps;
        In F32 x, In I64 runs, Value I64 run_count, Divisor I64 length, Value I64 rows, Divisor I64 each, Out F64 digits, Value I64 sets;
    set_largest in MEASURES, Geometry::Warps;
        In F32 x, In I64 runs, Value I64 run_count, Divisor I64 length, Value I64 rows, Divisor I64 each, Out F64 sums, Value I64 sets;
    exact_values in MEASURES, ELEMENTS; In F64 digits, Out F64 sums, Value I64 count;
    divide_by_root in MEASURES, ELEMENTS; Out F32 x, In F64 square, Value F64 least, Value I64 count;
    lamb_measure in LAMB, ELEMENTS;
        In I64 runs, Value I64 run_count, In F32 weights, In F32 grads, Out F32 mean, Out F32 square, Value F32 grad_scale, Value F32 mean_new,
        Value F32 square_old, Value F32 square_new, Value F32 mean_hat, Value F32 root_hat, Value F32 eps, Value F32 decay, Out F32 of_weights,
        Out F32 of_steps, Value I64 count;
    lamb_settle in LAMB, ELEMENTS; Out F64 totals, Value I64 matrices;
    lamb_update in LAMB, ELEMENTS;
        In I64 runs, Value I64 run_count, Out F32 weights, In F32 mean, In F32 square, In F64 ratio, Divisor I64 each, Value F64 lr, Value F32 mean_hat,
        Value F32 root_hat, Value F32 eps, Value F32 decay, Value I64 count;
    adafactor_scaled in ADAFACTOR, ELEMENTS;
        In I64 runs, Value I64 run_count, In F32 grads, Value F32 grad_scale, Out F32 numbers, Value I64 count;
    adafactor_measure in ADAFACTOR, ELEMENTS;
        In I64 runs, Value I64 run_count, In F32 weights, In F32 grads, Value F32 grad_scale, In F64 row_factors, In F64 column_factors,
        Divisor I64 rows, Divisor I64 columns, Out F32 of_steps, Out F32 of_weights, Value I64 count;
    adafactor_update in ADAFACTOR, ELEMENTS;
        In I64 runs, Value I64 run_count, Out F32 weights, In F32 grads, Value F32 grad_scale, In F64 row_factors, In F64 column_factors,
        Divisor I64 rows, Divisor I64 columns, In F64 size, Value F32 keep, Value I64 count;
    adafactor_vector_measure in ADAFACTOR, ELEMENTS;
        In I64 runs, Value I64 run_count, In F32 weights, In F32 grads, Out F32 variance, Value F32 grad_scale, Value F32 share, Value F32 eps,
        Out F32 of_steps, Out F32 of_weights, Value I64 count;
    adafactor_vector_update in ADAFACTOR, ELEMENTS;
        In I64 runs, Value I64 run_count, Out F32 weights, In F32 grads, In F32 variance, Value F32 grad_scale, In F64 size, Divisor I64 each,
        Value F32 keep, Value I64 count;
    adafactor_means in ADAFACTOR, ELEMENTS;
        Out F32 variance, Out F64 totals, Value F64 terms, Value F64 share, Value F64 eps, Value I64 count;
    adafactor_row_means in ADAFACTOR, ELEMENTS; In F64 totals, Value I64 rows, Out F64 means, Value I64 matrices;
    adafactor_row_factors in ADAFACTOR, ELEMENTS; Out F64 totals, In F64 means, Divisor I64 rows, Value I64 count;
    adafactor_column_factors in ADAFACTOR, ELEMENTS; Out F64 totals, Value I64 count;
    adafactor_settle in ADAFACTOR, ELEMENTS;
        Out F64 totals, Value F64 elements, Value I32 relative, Value F64 lr, Value F64 eps_scale, Value F64 clip, Value I64 matrices;
    muon_measure in MUON, ELEMENTS;
        In I64 runs, Value I64 run_count, In F32 grads, Out F32 mean, Value F32 grad_scale, Value F32 old, Value F32 now, Out F32 values,
        Value I64 count;
    muon_update in MUON, ELEMENTS;
        In I64 runs, Value I64 run_count, Out F32 weights, In F32 matrices, Value F32 keep, Value F32 size, Value I64 count;
    adam8bit_measure in ADAM8BIT, ELEMENTS;
        In I64 runs, Value I64 run_count, In F32 grads, In U8 means, In U8 squares, In F32 mean_largest, In F32 square_largest, In F32 code,
        Divisor I64 block, Divisor I64 each, Value F32 grad_scale, Value F32 mean_new, Value F32 square_old, Value F32 square_new, Out F32 of_means,
        Out F32 of_squares, Value I64 count;
    adam8bit_settle in ADAM8BIT, ELEMENTS; Out F32 largest, Out F64 totals, Value I64 count;
    adam8bit_update in ADAM8BIT, ELEMENTS;
        In I64 runs, Value I64 run_count, Out F32 weights, In F32 grads, Out U8 means, Out U8 squares, In F32 mean_largest, In F32 square_largest,
        In F64 mean_before, In F64 square_before, In F32 code, Value I32 mean_zero, Value I32 square_zero, Divisor I64 block, Divisor I64 each, Value F32 grad_scale,
        Value F32 mean_new, Value F32 square_old, Value F32 square_new, Value F32 keep, Value F32 lr_hat, Value F32 root_hat, Value F32 eps,
        Value I64 count;
    message_words in CODECS, ELEMENTS; Out U8 to, Value U64 first, Value U64 second;
    message_check in CODECS, ELEMENTS; In U8 header, Value U64 first, Value U64 second, Out I64 found;
    f32_pack in CODECS, FOURS_OF_F32; In F32 x, Out U8 to, Value I64 count;
    f32_unpack in CODECS, FOURS_OF_F32; In U8 from, Out F32 out, Value I32 add, Value I64 count;
    bf16_pack in CODECS, EIGHT; In F32 x, Out U8 to, Value I64 count;
    bf16_unpack in CODECS, EIGHT; In U8 from, Out F32 out, Value I32 add, Value I64 count;
    fp8_scales in CODECS, Geometry::Columns; In F32 x, Value I64 count, Value I64 unit, Value I32 e5m2, Out U8 scales;
    fp8_pack in CODECS, FOURS_OF_F32; In F32 x, In U8 scales, Divisor I64 unit, Value I32 e5m2, Out U8 codes, Value I64 count;
    fp8_unpack in CODECS, FOURS_OF_F32;
        In U8 codes, In U8 scales, Divisor I64 unit, Value I32 e5m2, Out F32 out, Value I32 add, Value I64 count;
    quant_pairs in CODECS, Geometry::Columns; In F32 x, Value I64 count, Value I64 unit, Value F32 levels, Out U8 pairs;
    quant_codes in CODECS, FOURS_OF_F32;
        In F32 x, In U8 pairs, Divisor I64 unit, Value F32 levels, Value I32 draws, Value U32 key0, Value U32 key1, Value U64 start, Out U8 codes,
        Value I64 count;
    sign_scales in CODECS, ELEMENTS; In F32 x, Value I64 count, Value I64 unit, Out U8 scales, Value I64 parts;
    sign_codes in CODECS, FOURS_OF_F32; In F32 x, Out U8 codes, Value I64 count;
    planes_pack in CODECS, ELEMENTS; In U8 codes, Divisor I64 bits, Out U8 planes, Value I64 bytes, Value I64 count;
    quant_unpack in CODECS, FOURS_OF_F32;
        In U8 planes, In U8 pairs, Divisor I64 bits, Divisor I64 unit, Out F32 out, Value I32 add, Value I64 count;
    sign_unpack in CODECS, FOURS_OF_F32; In U8 planes, In U8 scales, Divisor I64 unit, Out F32 out, Value I32 add, Value I64 count;
    topk_choose in SPARSE, Geometry::Columns; In F32 x, Value I64 len, Value I64 unit, Value I64 keep, Value I64 last_keep, Out U32 indices;
    draw_indices in SPARSE, ELEMENTS; In U8 draws, Value I64 count, Value I64 below, Out U64 taken;
    indices_bits in SPARSE, ELEMENTS; In U32 indices, Value I64 count, Value I32 width, Value I32 spread, Out U8 to, Value I64 bytes;
    indices_low in SPARSE, ELEMENTS; In U32 indices, Value I64 count, Divisor I64 width, Out U8 to, Value I64 bytes;
    indices_read in SPARSE, Geometry::Columns;
        In U8 low, In U8 high, Value I64 high_bytes, Value I64 count, Value I64 below, Value I32 width, Value I32 spread, Out U32 indices,
        Out I64 found;
    take_values in SPARSE, ELEMENTS; In F32 x, In U32 indices, Value F32 factor, Out F32 out, Value I64 count;
    put_values in SPARSE, ELEMENTS; In F32 values, In U32 indices, Out F32 out, Value I32 add, Value I64 count;
    feedback_residual in FEEDBACK, FOURS_OF_F32; In F32 x, In F32 residual, Out F32 out, Value I64 count;
    feedback_difference in FEEDBACK, FOURS_OF_F32; In F32 x, In F32 estimate, Out F32 out, Value I64 count;
    feedback_momentum in FEEDBACK, FOURS_OF_F32;
        In F32 x, In F32 estimate, Out F32 momentum, Value I32 first, Value F32 eta, Value F32 kept, Out F32 out, Value I64 count;
    feedback_kept in FEEDBACK, FOURS_OF_F32; In F32 target, In F32 sent, Out F32 residual, Value I64 count;
    low_rank_start in LOW_RANK, Geometry::Columns; Out F32 q, Value I64 cols, Value U32 key0, Value U32 key1, Value U64 start;
    low_rank_times in LOW_RANK, ELEMENTS; In F32 m, In F32 q, Out F32 p, Value I64 cols, Divisor I64 rank, Value I64 count;
    low_rank_orthonormal in LOW_RANK, Geometry::OneWarp; Out F32 p, Value I64 rows, Value I64 rank, Out F64 lengths;
    low_rank_transposed in LOW_RANK, ELEMENTS; In F32 m, In F32 p, Out F32 q, Value I64 rows, Divisor I64 cols, Value I64 rank;
    low_rank_join in LOW_RANK, ELEMENTS;
        In F32 p, In F32 q, Out F32 out, Divisor I64 cols, Value I64 rank, Value F32 among, Value I64 count;
    nonzeros_mark_32 in NONZEROS, BYTES; In U32 x, Out U8 bits, Value I64 count;
    nonzeros_mark_16 in NONZEROS, BYTES; In Bits16 x, Out U8 bits, Value I64 count;
    nonzeros_count in NONZEROS, Geometry::Columns; In U8 bits, Value I64 bytes, Out I64 counts;
    nonzeros_starts in NONZEROS, Geometry::Columns; In I64 counts, Value I64 chunks, Out I64 starts;
    nonzeros_gather_32 in NONZEROS, Geometry::Columns; In U32 x, In U8 bits, Value I64 bytes, In I64 starts, Out U32 values, Value I64 count;
    nonzeros_gather_16 in NONZEROS, Geometry::Columns;
        In Bits16 x, In U8 bits, Value I64 bytes, In I64 starts, Out Bits16 values, Value I64 count;
    nonzeros_scatter_32 in NONZEROS, Geometry::Columns;
        In U8 bits, Value I64 bytes, In I64 starts, In U32 values, Value I64 held, Out U32 x, Value I64 count;
    nonzeros_scatter_16 in NONZEROS, Geometry::Columns;
        In U8 bits, Value I64 bytes, In I64 starts, In Bits16 values, Value I64 held, Out Bits16 x, Value I64 count;
}
