#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

pub mod cache;
pub mod device;
pub mod driver;
#[cfg(feature = "emulator")]
pub mod emulator;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod idle;
pub mod replay;
pub mod tuning;

pub use device::CudaDevice;
pub use driver::{Driver, DriverError};
#[cfg(feature = "emulator")]
pub use emulator::{Emulator, Order};
#[cfg(feature = "cuda")]
pub use gpu::{Gpu, GpuError};
pub use replay::Replaying;
pub use tuning::{Tuning, TuningError};
