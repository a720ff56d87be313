//! Forms of kernels with other sizes of tiles or stages, or more elements per thread: the same results within rounding,
//! at another speed. The fastest form depends on the GPU and on the sizes of a call; a device chooses by a table.
//!
//! A variant is the kernel's file with macros defined before its text, and thus a separate file for the compiler.

use crate::families::{KERNELS, flash, grouped, same};
use crate::geometry::Geometry;
use crate::kernel::{Arg, Kernel, Source};

/// Another form of a kernel.
#[derive(Debug, PartialEq, Eq)]
pub struct Variant {
    /// The difference, as `keys=64`.
    pub name: &'static str,
    /// The kernel: the name and arguments of the usual form, with its own source and geometry.
    pub kernel: Kernel,
}

/// `kernel in file, "name", Geometry; MACRO = value, ..` for each variant. `kernels/check.py` reads these lines.
macro_rules! variants {
    ($($kernel:ident in $file:ident, $name:literal, $geometry:expr; $($macro:ident = $value:literal),+;)*) => {
        /// All variants, without the usual forms.
        pub static VARIANTS: &[Variant] = &[$(Variant {
            name: $name,
            kernel: Kernel {
                name: stringify!($kernel),
                source: &Source {
                    name: concat!(stringify!($file), ".", stringify!($kernel), ".", $name, ".cu"),
                    text: concat!(
                        $("#define ", stringify!($macro), " ", $value, "\n",)+
                        include_str!(concat!("../cuda/", stringify!($file), ".cu"))
                    ),
                },
                geometry: $geometry,
                args: args(stringify!($kernel)),
            },
        }),*];
    };
}

#[rustfmt::skip] // A table: one variant, one line.
variants! {
    flash_forward_64 in flash_forward, "rows=16", flash(8, 128, 64, 128 + 4 * 32); FORWARD_64_T = 1, FORWARD_64_HELD = 0;
    flash_forward_128 in flash_forward, "rows=16", flash(8, 128, 128, 128 + 4 * 64); FORWARD_128_T = 1, FORWARD_128_KEYS = 64;
    flash_backward_q_256 in flash_backward, "queries=64", flash(8, 64, 256, 2 * 64 + 4 * 16); BACKWARD_Q_256_SHARE = 2;
    flash_backward_kv_64 in flash_backward, "rows=16", flash(8, 128, 64, 2 * 128 + 4 * 32); BACKWARD_KV_64_T = 1;
    grouped_tensor_forward_bf16 in grouped_tensor, "stages=4", grouped(256, 4); GROUPED_STAGES = 4;
    grouped_tensor_forward in grouped_tensor, "stages=2", grouped(256, 2); GROUPED_STAGES = 2;
    grouped_tensor_forward_bf16 in grouped_tensor, "stages=2", grouped(256, 2); GROUPED_STAGES = 2;
    grouped_tensor_forward_bf16 in grouped_tensor, "columns=128", grouped(128, 3); GROUPED_COLUMNS = 128, GROUPED_RESIDENT = 2;
    grouped_tensor_backward_x_bf16 in grouped_tensor, "stages=4", grouped(256, 4); GROUPED_STAGES = 4;
    grouped_tensor_backward_x in grouped_tensor, "stages=2", grouped(256, 2); GROUPED_STAGES = 2;
    grouped_tensor_backward_x_bf16 in grouped_tensor, "stages=2", grouped(256, 2); GROUPED_STAGES = 2;
    grouped_tensor_backward_x_bf16 in grouped_tensor, "columns=128", grouped(128, 3); GROUPED_COLUMNS = 128, GROUPED_RESIDENT = 2;
    grouped_tensor_backward_w in grouped_tensor, "stages=4", grouped(256, 4); GROUPED_STAGES = 4;
    grouped_tensor_backward_w in grouped_tensor, "stages=2", grouped(256, 2); GROUPED_STAGES = 2;
    grouped_tensor_backward_w in grouped_tensor, "columns=128", grouped(128, 3); GROUPED_COLUMNS = 128, GROUPED_RESIDENT = 2;
    dropout in dropout, "each=8", Geometry::Elements { each: 8 }; EACH = 8;
    dropout in dropout, "each=16", Geometry::Elements { each: 16 }; EACH = 16;
}

/// What a table of forms calls the kernels that only sm_90a has the instructions for.
pub const SM_90A: &str = "sm_90a";

/// Those kernels, each behind the one that it can replace. They read operands by maps that `flash_maps` writes, so they
/// have other names and arguments than variants.
static FOR_SM_90A: [(&str, &str); 6] = [
    ("flash_forward_64", "flash_forward_sm90_64"),
    ("flash_forward_128", "flash_forward_sm90_128"),
    ("flash_backward_q_64", "flash_backward_sm90_q_64"),
    ("flash_backward_q_128", "flash_backward_sm90_q_128"),
    ("flash_backward_kv_64", "flash_backward_sm90_kv_64"),
    ("flash_backward_kv_128", "flash_backward_sm90_kv_128"),
];

/// The kernel that sm_90a can run in place of this one.
///
/// ```
/// let forward = meshwork_kernels::for_sm_90a("flash_forward_64").unwrap();
/// assert_eq!((forward.name, forward.args[0].name), ("flash_forward_sm90_64", "maps"));
/// ```
pub fn for_sm_90a(kernel: &str) -> Option<&'static Kernel> {
    let (_, name) = FOR_SM_90A.iter().find(|(replaced, _)| *replaced == kernel)?;
    KERNELS.iter().find(|kernel| kernel.name == *name)
}

/// The arguments of the usual form.
const fn args(kernel: &str) -> &'static [Arg] {
    let mut at = 0;
    while at < KERNELS.len() {
        if same(KERNELS[at].name, kernel) {
            return KERNELS[at].args;
        }
        at += 1;
    }
    panic!("a variant of no kernel")
}

/// The variants of a kernel.
///
/// ```
/// let names: Vec<&str> = meshwork_kernels::variants("dropout").map(|variant| variant.name).collect();
/// assert_eq!(names, ["each=8", "each=16"]);
/// ```
pub fn variants(kernel: &str) -> impl Iterator<Item = &'static Variant> {
    VARIANTS.iter().filter(move |variant| variant.kernel.name == kernel)
}

/// The kernels that have another form, a variant or one for sm_90a.
pub fn tuned() -> impl Iterator<Item = &'static str> {
    let names = KERNELS.iter().map(|kernel| kernel.name);
    names.filter(|name| variants(name).next().is_some() || for_sm_90a(name).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kernel whose name says sm_90a can replace the kernel of the same name without it.
    #[test]
    fn kernels_for_sm_90a_are_those_that_say_so() {
        let named = KERNELS.iter().filter(|kernel| kernel.name.contains("_sm90_"));
        let found = named.map(|kernel| (kernel.name.replace("_sm90_", "_"), kernel.name)).collect::<Vec<_>>();
        assert_eq!(found, FOR_SM_90A.map(|(of, name)| (of.to_owned(), name)));
        assert!(found.iter().all(|(of, name)| for_sm_90a(of).is_some_and(|kernel| kernel.name == *name)));
    }

    /// The name of a variant is unique for its kernel, its file is unique, and every macro that it defines is used in
    /// that file or in a header.
    #[test]
    fn variants_differ_in_what_they_say() {
        for (at, variant) in VARIANTS.iter().enumerate() {
            let Kernel { name, source, .. } = variant.kernel;
            assert!(VARIANTS[..at].iter().all(|other| other.kernel.source.name != source.name), "{}", source.name);
            assert!(
                KERNELS.iter().any(|kernel| kernel.name == name && source.text.ends_with(kernel.source.text)),
                "{name}"
            );
            for line in source.text.lines().take_while(|line| line.starts_with("#define ")) {
                let defined = line.split(' ').nth(1).unwrap();
                let guard = format!("#ifndef {defined}\n");
                let texts = crate::HEADERS.iter().map(|header| header.text).chain([source.text]);
                assert_eq!(texts.filter(|text| text.contains(&guard)).count(), 1, "{name}: {defined}");
            }
        }
    }
}
