//! The form of a kernel that a device runs: tables by architecture, written by the benchmark `tune` on a device
//! (`scripts/gpu-check.sh tune`).
//!
//! ```toml
//! [[sm_90a]]
//! kernel = "flash_forward_64"
//! variant = "rows=16"    # of `meshwork_kernels::VARIANTS`, or "usual"
//! up_to = 2048           # the longest rows or sequences of this row, without a width elements; without it: all
//! ```
//! The first row of a kernel that matches a call decides. Kernels without a row use their usual form.
//!
//! Two other words choose what is no variant: of products of groups `"library"`, a product of the library for each
//! group, and of attention on tensor cores `"sm_90a"`, a kernel with instructions that only this architecture has, and
//! the emulator. Another device has no row with it.

use meshwork_kernels::{Kernel, SM_90A, for_sm_90a, kernel, tuned, variants};
use std::path::Path;
use toml::{Table, Value};

/// The built-in table.
const COMPILED_IN: &str = include_str!("tuning.toml");

/// The variant of a row that chooses a kernel's usual form.
pub const USUAL: &str = "usual";

/// The variant of a row that chooses a product of the library for each group, in place of a kernel.
pub const LIBRARY: &str = "library";

/// The architectures that run the kernels for sm_90a: the emulator has twins of their instructions.
const RUN_SM_90A: [&str; 2] = [SM_90A, "emulated"];

/// Whether the library can compute the products of a kernel too.
fn has_library(kernel: &str) -> bool {
    kernel.starts_with("grouped_tensor_")
}

/// A kernel's usual form, or its first variant that fits this many bytes of shared memory; if none fits, the usual
/// form.
pub(crate) fn fitting(name: &str, shared: u32) -> Option<&'static Kernel> {
    let usual = kernel(name)?;
    let forms = [usual].into_iter().chain(variants(name).map(|variant| &variant.kernel));
    forms.into_iter().find(|form| form.geometry.shared() <= shared).or(Some(usual))
}

/// The rows of a table for one architecture.
#[derive(Clone, Debug, Default)]
pub struct Tuning(Vec<Row>);

#[derive(Clone, Debug)]
struct Row {
    kernel: String,
    up_to: u64,
    form: Form,
}

/// What runs in place of a kernel's usual form.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// The usual form itself or a variant: a kernel of the same arguments.
    Same(&'static Kernel),
    /// The kernel for sm_90a, whose arguments are others.
    Sm90a(&'static Kernel),
    /// A product of the library for each group.
    Library,
}

/// A fault of a table.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum TuningError {
    /// A file that cannot be read.
    #[error("cannot be read: {0}")]
    File(#[from] std::io::Error),
    /// Text that is not TOML.
    #[error("is no TOML: {0}")]
    Toml(#[from] toml::de::Error),
    /// A table only for other devices.
    #[error("has rows for {known}, and this device is {architecture}")]
    Foreign { architecture: String, known: String },
    /// A row that is empty or has unknown entries.
    #[error("row {number} of {architecture}: {problem}; {valid}")]
    Row { architecture: String, number: usize, problem: String, valid: String },
}

meshwork_core::debug_as_display!(TuningError);

impl Tuning {
    /// The built-in rows for an architecture; none if it was never tuned.
    pub fn built_in(architecture: &str) -> Self {
        // A test parses the whole table, so this does not fail.
        Self::parse(COMPILED_IN, architecture).unwrap_or_default()
    }

    /// The rows of a file for an architecture.
    ///
    /// # Errors
    /// A file that cannot be read, is not a valid table, or has no row for the architecture.
    pub fn read(path: &Path, architecture: &str) -> Result<Self, TuningError> {
        Self::parse(&std::fs::read_to_string(path)?, architecture)
    }

    /// The rows of a text for an architecture. The rows of other architectures are checked too.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str, architecture: &str) -> Result<Self, TuningError> {
        let table: Table = text.parse()?;
        let mut own = None;
        for (of, rows) in &table {
            let refuse = |number, problem: String, valid: String| TuningError::Row {
                architecture: of.clone(),
                number,
                problem,
                valid,
            };
            let none = || refuse(1, "is none".to_owned(), format!("write [[{of}]] before each row"));
            let rows = rows.as_array().ok_or_else(none)?.iter().enumerate();
            let rows =
                rows.map(|(at, row)| Row::read(row, of).map_err(|(problem, valid)| refuse(at + 1, problem, valid)));
            let rows: Vec<Row> = rows.collect::<Result<_, _>>()?;
            if of == architecture {
                own = Some(Self(rows));
            }
        }
        own.ok_or_else(|| TuningError::Foreign {
            architecture: architecture.to_owned(),
            known: match table.keys().map(String::as_str).collect::<Vec<_>>() {
                known if known.is_empty() => "no device".to_owned(),
                known => known.join(", "),
            },
        })
    }

    /// A table for an architecture with one form of a kernel for all sizes.
    ///
    /// # Errors
    /// A kernel without variants, or a form that it does not have on this architecture.
    pub fn only(architecture: &str, kernel: &str, form: &str) -> Result<Self, TuningError> {
        let row = format!("[[{architecture}]]\nkernel = {kernel:?}\nvariant = {form:?}");
        Self::parse(&row, architecture)
    }

    /// The form of a kernel, of the same arguments, for a call of `[items, width]` of its geometry; `None`: the usual
    /// one.
    pub(crate) fn form(&self, name: &str, sizes: [u64; 2]) -> Option<&'static Kernel> {
        if let Form::Same(kernel) = self.row(name, sizes)?.form { Some(kernel) } else { None }
    }

    /// The kernel for sm_90a that replaces a kernel for such a call, if one does.
    pub(crate) fn for_sm_90a(&self, name: &str, sizes: [u64; 2]) -> Option<&'static Kernel> {
        if let Form::Sm90a(kernel) = self.row(name, sizes)?.form { Some(kernel) } else { None }
    }

    /// Whether library products replace a kernel for such a call.
    pub(crate) fn is_of_library(&self, name: &str, sizes: [u64; 2]) -> bool {
        self.row(name, sizes).is_some_and(|row| matches!(row.form, Form::Library))
    }

    fn row(&self, name: &str, [items, width]: [u64; 2]) -> Option<&Row> {
        let size = if width > 0 { width } else { items };
        self.0.iter().find(|row| row.kernel == name && size <= row.up_to)
    }
}

/// All forms of a kernel by their names, the usual one first.
fn forms(name: &str) -> impl Iterator<Item = (&'static str, Form)> {
    let usual = kernel(name).map(|kernel| (USUAL, Form::Same(kernel)));
    let others = variants(name).map(|variant| (variant.name, Form::Same(&variant.kernel)));
    let for_sm_90a = for_sm_90a(name).map(|kernel| (SM_90A, Form::Sm90a(kernel)));
    let library = has_library(name).then_some((LIBRARY, Form::Library));
    usual.into_iter().chain(others).chain(for_sm_90a).chain(library)
}

/// The names of all forms of a kernel, the usual one first: what `variant` of a row may be.
pub fn names(kernel: &str) -> impl Iterator<Item = &'static str> {
    forms(kernel).map(|(name, _)| name)
}

impl Row {
    /// A row of an architecture, or its fault and a valid one.
    fn read(row: &Value, architecture: &str) -> Result<Self, (String, String)> {
        const KEYS: [&str; 3] = ["kernel", "variant", "up_to"];
        let row =
            row.as_table().ok_or_else(|| ("is no table".to_owned(), format!("its keys are {}", KEYS.join(", "))))?;
        if let Some(key) = row.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err((format!("unknown key {key}"), format!("its keys are {}", KEYS.join(", "))));
        }
        let text = |key: &str| row.get(key).and_then(Value::as_str).unwrap_or_default();
        let (name, wanted) = (text("kernel"), text("variant"));
        if tuned().all(|tuned| tuned != name) {
            let valid = tuned().collect::<Vec<_>>().join(", ");
            return Err((format!("kernel = {name:?} has no variants"), format!("use one of {valid}")));
        }
        let Some((_, form)) = forms(name).find(|(form, _)| *form == wanted) else {
            let valid: Vec<&str> = forms(name).map(|(form, _)| form).collect();
            return Err((format!("variant = {wanted:?} is none of {name}"), format!("use one of {valid:?}")));
        };
        if matches!(form, Form::Sm90a(_)) && !RUN_SM_90A.contains(&architecture) {
            let valid = format!("leave it out, or write it below [[{SM_90A}]]");
            return Err((format!("variant = {wanted:?} runs on no {architecture}"), valid));
        }
        let up_to = match row.get("up_to") {
            None => u64::MAX,
            Some(size) => size.as_integer().and_then(|size| u64::try_from(size).ok()).ok_or_else(|| {
                (format!("up_to = {size} is no size"), "use a whole number of at least 0, or leave it out".to_owned())
            })?,
        };
        Ok(Self { kernel: name.to_owned(), up_to, form })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_kernels::KERNELS;

    #[test]
    fn the_table_that_is_compiled_in_is_one() {
        match Tuning::parse(COMPILED_IN, "none") {
            Err(TuningError::Foreign { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert!(Tuning::built_in("none").form("dropout", [1, 0]).is_none());
    }

    /// An SM of compute capability 8.6, 8.9 and 12 has 99 KiB for a block. The forms that only sm_90a has are left out.
    #[test]
    fn every_kernel_has_a_form_for_little_shared_memory() {
        for usual in KERNELS.iter().filter(|kernel| !kernel.name.contains("_sm90_")) {
            let shared = |most| fitting(usual.name, most).map(|form| form.geometry.shared());
            assert!(shared(99 << 10) <= Some(99 << 10), "{}", usual.name);
            assert_eq!(shared(u32::MAX), Some(usual.geometry.shared()), "{}: the usual form", usual.name);
        }
        // A kernel without room in any form is refused when it is launched.
        assert_eq!(fitting("grouped_tensor_forward", 0), kernel("grouped_tensor_forward"));
        assert_eq!(fitting("no kernel", u32::MAX), None);
    }

    #[test]
    fn the_first_row_that_fits_decides() {
        let text = "[[sm_80]]\nkernel = 'dropout'\nvariant = 'each=8'\n\
                    [[sm_90a]]\nkernel = 'dropout'\nvariant = 'usual'\nup_to = 100\n\
                    [[sm_90a]]\nkernel = 'dropout'\nvariant = 'each=16'\nup_to = 1000\n\
                    [[sm_90a]]\nkernel = 'flash_forward_64'\nvariant = 'rows=16'\nup_to = 2048\n\
                    [[sm_90a]]\nkernel = 'grouped_tensor_forward_bf16'\nvariant = 'library'\nup_to = 512\n\
                    [[sm_90a]]\nkernel = 'grouped_tensor_forward_bf16'\nvariant = 'columns=128'\n\
                    [[sm_90a]]\nkernel = 'flash_backward_q_64'\nvariant = 'sm_90a'\nup_to = 2048\n";
        let tuning = Tuning::parse(text, "sm_90a").unwrap();
        let form = |name, sizes| tuning.form(name, sizes).map(|kernel| kernel.source.name);
        assert_eq!(form("dropout", [100, 0]), Some("dropout.cu"));
        assert_eq!(form("dropout", [101, 0]), Some("dropout.dropout.each=16.cu"));
        assert_eq!(form("dropout", [1001, 0]), None);
        // For sequences, the width counts.
        assert!(form("flash_forward_64", [1 << 20, 2048]).is_some());
        assert_eq!(form("flash_forward_64", [1, 2049]), None);
        assert_eq!(form("adamw", [1, 0]), None);
        // A kernel of other arguments is no form either.
        assert_eq!(form("flash_backward_q_64", [1, 2048]), None);
        let other = |name, width| tuning.for_sm_90a(name, [1, width]).map(|kernel| kernel.name);
        assert_eq!(other("flash_backward_q_64", 2048), Some("flash_backward_sm90_q_64"));
        assert_eq!([other("flash_backward_q_64", 2049), other("flash_forward_64", 1)], [None; 2]);
        // A library product is not a form of a kernel.
        assert_eq!(form("grouped_tensor_forward_bf16", [9, 512]), None);
        assert_eq!([512, 513].map(|n| tuning.is_of_library("grouped_tensor_forward_bf16", [9, n])), [true, false]);
        assert!(form("grouped_tensor_forward_bf16", [9, 513]).is_some_and(|form| form.contains("columns=128")));
    }
}
