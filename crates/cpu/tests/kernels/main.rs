//! Each kernel, and each operation of the device over it, against an obvious way to compute the same.

mod attention;
mod device;
mod dropout;
mod elementwise;
mod embedding;
mod float;
mod gelu;
mod grouped;
mod indexing;
mod layout;
mod loss;
mod matmul;
mod norm;
mod optim;
mod oracle;
mod permutation;
mod pointwise;
mod reduce;
mod reduction;
mod relu;
mod round;
mod routing;
mod swiglu;
mod windows;
mod zeros;
