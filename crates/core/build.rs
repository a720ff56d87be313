//! Tells the crate with which optimisation it is compiled: see `slow_build`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=MESHWORK_OPT_LEVEL={}", std::env::var("OPT_LEVEL").unwrap_or_default());
}
