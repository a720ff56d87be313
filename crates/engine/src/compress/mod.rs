//! Everything that compresses the messages of ranks.
//!
//! | value | compressed by | how its loss is brought back |
//! |---|---|---|
//! | activations and their gradients, over cuts between stages | [`codec`]: a message for each micro-batch | feedback of each message ([`crossing`]); AQ-SGD of each sample ([`history`]) |
//! | gradients of weights, summed over data-parallel ranks | [`lossy_sum`], and [`factor_sum`] for PowerSGD: a sum for each bucket | feedback of each bucket ([`sum_plan`]) |
//! | weights, gathered with ZeRO-3 | [`weight_messages`]: a message for each slice | nothing: the owner keeps its slice exactly |
//! | tokens to and from experts | the layers, by the schemes of [`Compress::dispatch`](crate::Compress::dispatch) | nothing: no token comes again |
//!
//! [`settings`] are the schemes as plain data and [`fit`] refuses those that do not go together. [`packing`] says how a
//! value at a cut becomes a message, [`matrices`] how PowerSGD divides a parameter, and [`bucket_sum`] has the part
//! that both sums share. The methods themselves are in `meshwork-compress`, and a device's kernels run them.

pub mod bucket_sum;
pub mod codec;
pub mod crossing;
pub mod factor_sum;
pub mod fit;
pub mod history;
pub mod lossy_sum;
pub mod matrices;
pub mod packing;
pub mod settings;
pub mod sum_plan;
pub mod weight_messages;
