//! Kernels of bf16 that are there for f16 too: their files, compiled once more with another type.

use crate::families::KERNELS;
use crate::kernel::{Kernel, Source};
use std::sync::LazyLock;

/// `kernels/check.py` reads the names of files.
macro_rules! in_f16 {
    ($file:literal) => {
        (
            concat!($file, ".cu"),
            Source {
                name: concat!($file, ".f16.cu"),
                text: concat!("#define HALF_TYPE F16Type\n", include_str!(concat!("../cuda/", $file, ".cu"))),
            },
        )
    };
}

/// The files, and what they are in f16.
static FILES: [(&str, Source); 2] = [in_f16!("flash_forward"), in_f16!("flash_backward")];

/// The kernels for f16, with the names, arguments and geometries of those for bf16.
pub static F16: LazyLock<Vec<Kernel>> = LazyLock::new(|| {
    let of_file = |kernel: &Kernel| FILES.iter().find(|(file, _)| *file == kernel.source.name);
    KERNELS.iter().filter_map(|kernel| Some(Kernel { source: &of_file(kernel)?.1, ..*kernel })).collect()
});

/// The form for f16 of the kernel with this name, where it has one.
///
/// ```
/// assert_eq!(meshwork_kernels::f16("flash_forward_64").unwrap().source.name, "flash_forward.f16.cu");
/// assert_eq!(meshwork_kernels::f16("adamw"), None);
/// ```
pub fn f16(kernel: &str) -> Option<&'static Kernel> {
    F16.iter().find(|form| form.name == kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each file of the list has kernels, and reads the type that is defined for it.
    #[test]
    fn files_of_f16_have_kernels_and_a_type() {
        for (file, source) in &FILES {
            assert!(F16.iter().any(|kernel| kernel.source == source), "{file}");
            assert!(source.text.contains("#ifndef HALF_TYPE\n"), "{file}");
        }
    }
}
