//! A page about one run or several, made of their metrics files: curves, speed, memory, communication, mesh and
//! configuration. It is one HTML file that needs nothing else.

mod chart;
mod page;
mod run;

pub use page::page;
pub use run::{Run, RunFileError, Step};
