//! Local operations: each states its algebra, its gradient and, through a rule of `meshwork_core::rules`, its SPMD
//! types. None of them communicates but the vocab-parallel [loss](VocabLoss) and an [exchanged](Exchange) attention.

/// The methods of an [`Op`](crate::tape::Op) that are constants: its name, unless it has several; its operands; and
/// which of its properties hold.
macro_rules! stated {
    ($name:literal: $($rest:tt)*) => {
        fn name(&self) -> &'static str {
            $name
        }

        stated! { $($rest)* }
    };
    ($($operand:ident),+ $(; $($property:ident $($value:ident)?),+)?) => {
        fn operands(&self) -> &'static [&'static str] {
            &[$(stringify!($operand)),+]
        }

        $($(stated! { @ $property $($value)? })+)?
    };
    (@ padded $padded:ident) => {
        fn padded(&self) -> crate::tape::Padded {
            crate::tape::Padded::$padded
        }
    };
    (@ $holds:ident) => {
        fn $holds(&self) -> bool {
            true
        }
    };
}

/// Items that most operations use.
mod prelude {
    pub(super) use crate::error::{Error, Result};
    pub(super) use crate::shape::Shape;
    pub(super) use crate::tape::{Backward, Forward, Op, Padded, Tokens, Var};
    pub(super) use crate::tensor::Tensor;
    pub(super) use meshwork_core::rules::{self, Operand};
    pub(super) use meshwork_core::{SpmdError, Ty, Types};
}

mod attention;
mod attention_mask;
mod bias;
mod cast;
mod channel_norm;
mod concat;
mod conv;
mod custom;
mod dropout;
mod elementwise;
mod embedding;
mod exchange;
mod gelu;
mod grouped_attention;
mod grouped_linear;
mod images;
mod indexing;
mod linear;
mod linear_cross_entropy;
mod loss;
mod low_rank;
mod map;
mod matmul;
mod norm;
mod order;
mod pool;
mod preference;
mod relu;
mod repeat;
mod reshape;
mod residual;
mod softmax;
mod squared_error;
mod sum;
mod swiglu;
mod whole;

pub use crate::kernel::{Divisors, LongRope, PairNumber, Pattern, Preference, Rotary, RotaryScaling, Yarn};
pub use attention_mask::{Documents, Mask};
pub use channel_norm::Moments;
pub use exchange::{Exchange, Exchanged};
pub use grouped_attention::GroupedHeads;
pub use grouped_linear::RowGroups;
pub use loss::{Targets, TokenGroups, VocabLoss};
pub use low_rank::LowRank;
pub use order::Order;
pub use swiglu::MlpKind;
