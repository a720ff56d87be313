//! The kernels on the host: compiled by g++ through `host/cuda_host.h` and held against the CPU device. What runs here
//! is the source that a GPU gets, thread by thread; what a GPU makes of it, nobody has seen yet.
//!
//! Every launch runs in three orders of its threads, which must give the same bits. Without g++ the tests say so and
//! pass; `.ci/run` asks for it first.

mod attention;
mod build;
mod compression;
mod elementwise;
mod experts;
mod faults;
mod halves;
mod images;
mod launch;
mod loss;
mod optimizer;
mod pointwise;
mod product;
mod ranks;
mod rows;
mod tables;
mod whole;
mod windows;

// `launch!` is a macro of the module above.

/// Values of about 1 that depend on the name.
fn values(name: &str, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    meshwork_tensor::random::fill_normal(meshwork_tensor::random::key(0, name), 0, &mut values);
    values
}

/// Panics unless the bits are equal, saying where they are not. A NaN is a NaN: no two machines agree on its bits.
#[track_caller]
fn assert_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    let bad = (0..got.len()).find(|&i| !same(got[i], want[i]));
    if let Some(i) = bad {
        panic!("{what}: element {i} of {} is {:e}, not {:e}", got.len(), got[i], want[i]);
    }
}

/// Everything but the planted faults once more, under the address and the undefined-behaviour sanitizer, which find
/// what a kernel reads or writes beyond its buffers. They must be in the process from the start, so it is another one.
/// In a sweep alone, as in `.ci/nightly asan`: it takes as long as all others.
#[test]
fn address_and_undefined_behaviour_sanitizers_find_nothing() {
    let Some(sanitizer) = build::sanitizer().filter(|_| meshwork_testkit::sweeps() && !build::sanitized()) else {
        return;
    };
    let test = std::env::current_exe().expect("the path of this test");
    let run = std::process::Command::new(test)
        .args(["--skip", "sanitizers_find_nothing", "--skip", "faults::"])
        .env("LD_PRELOAD", sanitizer)
        .env("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0")
        .env(build::SANITIZED, "1")
        .output()
        .expect("the test started again");
    let [out, err] = [&run.stdout, &run.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(run.status.success(), "{out}\n{err}");
    assert!(out.contains("test result: ok"), "{out}\n{err}");
}
