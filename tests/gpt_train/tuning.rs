//! Tables of the forms of kernels that a device runs.

use crate::devices::{emulates, metrics, numbers_of, run};
use crate::program::{SMALL, folder};
use std::fs;

const MORE: &str = "--steps 2 --set training.numerics=canonical --set model.dropout=0.1";

/// Dropout in another form has the numbers of the CPU; what is wrong with a table is told before the first step.
#[test]
fn a_table_of_forms_is_read_or_refused() {
    if !emulates() {
        return;
    }
    let folder = folder("tuning");
    let table = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let row = |device: &str, kernel: &str, variant: &str| {
        format!("[[{device}]]\nkernel = \"{kernel}\"\nvariant = \"{variant}\"\n")
    };
    let forms = table("forms.toml", &row("emulated", "dropout", "each=8"));
    let found = metrics(&folder, "cuda-emulated", &format!("{MORE} --set cuda.tuning={forms}"));
    assert_eq!(numbers_of(&found), numbers_of(&metrics(&folder, "cpu", MORE)));
    let foreign = table("foreign.toml", &row("sm_90a", "dropout", "each=8"));
    let broken = table("broken.toml", &row("emulated", "dropout", "each=9"));
    let of_device = "use a table that scripts/gpu-check.sh tune wrote on such a device";
    for (device, path, told) in [
        ("cuda-emulated", &foreign, format!("has rows for sm_90a, and this device is emulated; {of_device}")),
        (
            "cuda-emulated",
            &broken,
            format!(
                "row 1 of emulated: variant = \"each=9\" is none of dropout; use one of [\"usual\", \"each=8\", \"each=16\"]; {of_device}"
            ),
        ),
        (
            "cpu",
            &forms,
            "--device cpu runs no kernels of CUDA; use --device cuda or cuda-emulated, or leave it out".to_owned(),
        ),
    ] {
        let (code, out, err) = run(&format!("{SMALL} {MORE} --device {device} --set cuda.tuning={path}"));
        assert_eq!((code, &*out, err), (Some(2), "", format!("error: cuda.tuning = {path}: {told}\n")));
    }
}
