//! Tests through the public interface: schedules as data. One program, because each costs a link.

mod actions;
mod faults;
mod few_micros;
mod golden;
mod in_flight;
mod micros;
mod pictures;
mod simulate;
mod sweep;
mod text;
mod weights;
