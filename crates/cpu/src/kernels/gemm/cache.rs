//! How many columns of B are packed at a time: as many as the L2 cache of this CPU holds.

use super::{K_BLOCK, N_BLOCK, PIECE};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// Where Linux describes the caches of the first core.
const CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";

/// Bytes of an L2 cache where the system does not tell: enough for [`N_BLOCK`].
const COMMON: usize = 1 << 20;

/// Columns of B packed at a time on this CPU, at most [`N_BLOCK`]. Read once.
pub(super) fn block_columns() -> usize {
    #[cfg(test)]
    if let Some(columns) = IN_TEST.get() {
        return columns;
    }
    static COLUMNS: OnceLock<usize> = OnceLock::new();
    *COLUMNS.get_or_init(|| columns_in(second_level(Path::new(CACHES)).unwrap_or(COMMON)))
}

#[cfg(test)]
thread_local! {
    /// The [`block_columns`] of a CPU with another cache, for the products of this thread.
    pub(super) static IN_TEST: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// How many columns of B, with [`K_BLOCK`] terms each, fill three quarters of a cache of `bytes` bytes. The rest is for
/// A, C and prefetched lines. It is a multiple of [`PIECE`], because a packed B consists of whole pieces.
fn columns_in(bytes: usize) -> usize {
    let columns = bytes / 4 * 3 / (K_BLOCK * size_of::<f32>());
    (columns / PIECE * PIECE).clamp(PIECE, N_BLOCK)
}

/// Bytes of the L2 cache by a folder that describes caches, each in a folder of its own with a `level` and a `size` in
/// KiB, such as `512K`.
fn second_level(caches: &Path) -> Option<usize> {
    let read = |folder: &Path, name| fs::read_to_string(folder.join(name)).ok();
    let mut folders = fs::read_dir(caches).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let second = folders.find(|folder| read(folder, "level").is_some_and(|level| level.trim() == "2"))?;
    let kib: usize = read(&second, "size")?.trim().strip_suffix('K')?.parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The L2 caches of Skylake, Zen 3, Zen 4 and Sapphire Rapids, and sizes beyond all of them.
    #[test]
    fn a_block_of_columns_fits_in_the_cache() {
        let kib = [256, 512, 1024, 2048].map(|kib| columns_in(kib << 10));
        assert_eq!(kib, [192, 384, 768, 768]);
        assert_eq!([0, usize::MAX].map(columns_in), [PIECE, N_BLOCK]);
    }

    #[test]
    fn the_second_level_is_read_from_the_folders_of_caches() {
        let caches = std::env::temp_dir().join(format!("meshwork-caches-{}", std::process::id()));
        let add = |name: &str, level: &str, size: &str| {
            fs::create_dir_all(caches.join(name)).unwrap();
            fs::write(caches.join(name).join("level"), level).unwrap();
            fs::write(caches.join(name).join("size"), size).unwrap();
        };
        assert_eq!(second_level(&caches), None, "no folder");
        add("index0", "1\n", "32K\n");
        assert_eq!(second_level(&caches), None, "no second level");
        add("index2", "2\n", "512K\n");
        add("index3", "3\n", "32768K\n");
        assert_eq!(second_level(&caches), Some(512 << 10));
        add("index2", "2\n", "much\n");
        assert_eq!(second_level(&caches), None, "a size that is no number");
        fs::remove_dir_all(&caches).unwrap();
    }
}
