//! The cache folder of compiled kernels.

use std::env;
use std::path::PathBuf;

/// The user's folder for files that can be made again: `meshwork/kernels` in `XDG_CACHE_HOME`, or in `.cache` of the
/// home folder, or, without a home, in the folder for temporary files.
#[must_use]
pub fn folder() -> PathBuf {
    let set = |name| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    caches.unwrap_or_else(env::temp_dir).join("meshwork").join("kernels")
}
