//! Tests through the public interface. One program, because each costs a link.

mod ddp;
mod plan;
mod reducer;
