//! The suite of communicators over threads: `meshwork_testkit::comm` has the cases.

use meshwork_testkit::comm::{Threads, conformance_of};

#[test]
fn results() {
    conformance_of("results", &Threads);
}

#[test]
fn flight() {
    conformance_of("flight", &Threads);
}

#[test]
fn faults() {
    conformance_of("faults", &Threads);
}

#[test]
fn calls() {
    conformance_of("calls", &Threads);
}

#[test]
fn programs() {
    conformance_of("programs", &Threads);
}
