//! Kernels of bf16 that are there for other operands too: their files, compiled once more with another type.

use crate::families::{ELEMENTS, KERNELS, flash};
use crate::geometry::Geometry;
use crate::kernel::{Arg, Kernel, Source, Type};
use std::sync::LazyLock;

/// `kernels/check.py` reads a file, the name of its form and the macros that it defines, one form to a line.
macro_rules! compiled {
    ($file:literal, $name:literal, $($macro:literal),+) => {
        (
            concat!($file, ".cu"),
            Source {
                name: concat!($file, ".", $name, ".cu"),
                text: concat!($("#define ", $macro, "\n",)+ include_str!(concat!("../cuda/", $file, ".cu"))),
            },
        )
    };
}

/// A file of kernels of bf16, and its form.
type Form = (&'static str, Source);

#[rustfmt::skip] // One form, one line.
static OF_F16: [Form; 2] = [
    compiled!("flash_forward", "f16", "OPERAND_TYPE F16Type"),
    compiled!("flash_backward", "f16", "OPERAND_TYPE F16Type"),
];

/// An f32 takes twice the shared memory, so tiles have half the keys or queries.
#[rustfmt::skip]
static OF_TF32: [Form; 2] = [
    compiled!("flash_forward", "tf32", "OPERAND_TYPE Tf32Type", "FORWARD_128_KEYS 16", "DROPOUT_FORWARD_128_KEYS 16"),
    compiled!("flash_backward", "tf32", "OPERAND_TYPE Tf32Type", "BACKWARD_STEP 16", "BACKWARD_Q_256_SHARE 2"),
];

/// The kernels for f16, with the names, arguments and geometries of those for bf16.
pub static F16: LazyLock<Vec<Kernel>> = LazyLock::new(|| forms(&OF_F16).collect());

/// The kernels for TF32, which read and write f32, with the names of those for bf16.
pub static TF32: LazyLock<Vec<Kernel>> = LazyLock::new(|| {
    let wide = |arg: &Arg| Arg { of: if arg.of == Type::Bits16 { Type::F32 } else { arg.of }, ..*arg };
    let form = |kernel: Kernel| Kernel {
        geometry: of_tf32(kernel.name),
        args: kernel.args.iter().map(wide).collect::<Vec<_>>().leak(),
        ..kernel
    };
    forms(&OF_TF32).map(form).collect()
});

/// The geometries for TF32: a row of a tile takes as much shared memory as one of twice the features of 16 bits.
fn of_tf32(kernel: &str) -> Geometry {
    let tiles = |warps, rows, head_dim: u32, tiles| flash(warps, rows, 2 * head_dim, tiles);
    match kernel {
        "flash_forward_64" | "flash_dropout_forward_64" => tiles(4, 128, 64, 128 + 4 * 32),
        "flash_forward_128" => tiles(4, 128, 128, 128 + 4 * 16),
        "flash_dropout_forward_128" => tiles(8, 128, 128, 128 + 4 * 16),
        "flash_forward_256" | "flash_dropout_forward_256" => tiles(8, 128, 256, 128 + 4 * 16),
        "flash_backward_q_64" | "flash_dropout_backward_q_64" | "flash_backward_kv_64" => {
            tiles(4, 128, 64, 2 * 128 + 4 * 16)
        }
        "flash_dropout_backward_kv_64" => tiles(8, 128, 64, 2 * 128 + 4 * 16),
        "flash_backward_q_128" => tiles(4, 128, 128, 2 * 128 + 4 * 16),
        "flash_dropout_backward_q_128" | "flash_backward_kv_128" | "flash_dropout_backward_kv_128" => {
            tiles(8, 128, 128, 2 * 128 + 4 * 16)
        }
        "flash_backward_q_256"
        | "flash_dropout_backward_q_256"
        | "flash_backward_kv_256"
        | "flash_dropout_backward_kv_256" => tiles(8, 64, 256, 2 * 64 + 4 * 16),
        _ => ELEMENTS,
    }
}

/// The kernels of these files, with their other sources.
fn forms(files: &'static [Form]) -> impl Iterator<Item = Kernel> {
    let of_file = |kernel: &Kernel| files.iter().find(|(file, _)| *file == kernel.source.name);
    KERNELS.iter().filter_map(move |kernel| Some(Kernel { source: &of_file(kernel)?.1, ..*kernel }))
}

/// The form for f16 of the kernel with this name, where it has one.
///
/// ```
/// assert_eq!(meshwork_kernels::f16("flash_forward_64").unwrap().source.name, "flash_forward.f16.cu");
/// assert_eq!(meshwork_kernels::f16("adamw"), None);
/// ```
pub fn f16(kernel: &str) -> Option<&'static Kernel> {
    F16.iter().find(|form| form.name == kernel)
}

/// The form for TF32 of the kernel with this name, where it has one.
///
/// ```
/// let form = meshwork_kernels::tf32("flash_forward_64").unwrap();
/// assert_eq!((form.source.name, form.args[0].c_type().as_str()), ("flash_forward.tf32.cu", "const float*"));
/// assert_eq!(meshwork_kernels::tf32("grouped_tensor_forward"), None);
/// ```
pub fn tf32(kernel: &str) -> Option<&'static Kernel> {
    TF32.iter().find(|form| form.name == kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each file of the lists has kernels, and reads the macros that are defined for it.
    #[test]
    fn forms_have_kernels_and_what_they_define() {
        for (file, source) in OF_F16.iter().chain(&OF_TF32) {
            assert!(F16.iter().chain(&*TF32).any(|kernel| kernel.source == source), "{file}");
            for line in source.text.lines().take_while(|line| line.starts_with("#define ")) {
                let defined = line.split(' ').nth(1).unwrap();
                assert!(source.text.contains(&format!("#ifndef {defined}\n")), "{file}: {defined}");
            }
        }
    }

    /// Only kernels without tiles have the geometry of a thread for an element.
    #[test]
    fn kernels_for_tf32_have_their_tiles() {
        for form in &*TF32 {
            assert_eq!(of_tf32(form.name) == ELEMENTS, form.name == "flash_dots", "{}", form.name);
        }
    }
}
