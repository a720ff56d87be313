//! Tests through the public interface. `fuzz` counts the memory of its process, and is a program of its own. One
//! program, because each costs a link.

mod crash;
mod damage;
mod exchange;
mod faults;
mod lock;
mod plan;
mod save_and_read;
mod slices;
#[path = "../world/mod.rs"]
mod world;
