//! Local operations: each states its algebra, its gradient and, through a rule of `meshwork_core::rules`, its SPMD types.
//! None of them communicates.

mod attention;
mod bias;
mod dropout;
mod embedding;
mod gelu;
mod linear;
mod loss;
mod norm;
mod residual;

pub use loss::VocabLoss;
