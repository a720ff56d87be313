//! Whether this build is optimised.

/// The advice if this crate was compiled without optimisation, in which a training step takes some hundred times as
/// long; `None` if it was optimised. A build with `debug_assertions` may be optimised: meshwork's own tests are.
pub fn slow_build() -> Option<&'static str> {
    advice(env!("MESHWORK_OPT_LEVEL"))
}

fn advice(opt_level: &str) -> Option<&'static str> {
    (opt_level == "0").then_some(
        "meshwork was compiled without optimisation, and computes some hundred times slower than it could: build with --release, or \
         add to Cargo.toml [profile.dev.package.\"*\"] opt-level = 3, which optimises all dependencies of a debug build",
    )
}
