//! Faults on purpose: each must be found.
