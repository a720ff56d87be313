#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "host"), forbid(unsafe_code))]
#![warn(missing_docs)]

mod families;
pub mod floors;
mod geometry;
#[cfg(feature = "host")]
pub mod host;
mod kernel;
mod operands;
mod variants;

pub use families::{
    EXACT_PIECE, GROUPED_ROWS, HEADERS, KERNELS, NONZERO_CHUNK, NORM_WIDTH, SOURCES, SQUARES_PIECE, TABLE_ROWS,
    UPDATE_PIECE,
};
pub use geometry::{Geometry, Launch, RowParts, THREADS};
pub use kernel::{Arg, Kernel, Pass, Source, Type};
pub use operands::{F16, TF32, f16, tf32};
pub use variants::{SM_90A, VARIANTS, Variant, for_sm_90a, tuned, variants};

/// Options of the compiler, NVRTC as well as nvcc, for the bits of the CPU: the language, and that no product
/// and sum are fused but where the source says so. Division, square roots and subnormal numbers stay as the standard
/// has them, which is the default.
pub const OPTIONS: [&str; 5] = ["-std=c++17", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"];

/// Options of NVRTC beside them: lambdas, which have no mark, are functions of the device. Version 13.0 and older take
/// those with parameters of any type for functions of the host, and refuse them.
pub const NVRTC_OPTIONS: [&str; 1] = ["-default-device"];

/// The kernel with this name.
pub fn kernel(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kernel in a source is declared, and every declared kernel is in its source; every name is declared once.
    #[test]
    fn the_table_has_the_kernels_of_the_sources() {
        let mut declared: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
        let mut written: Vec<&str> = Vec::new();
        for source in SOURCES {
            let names = source.text.lines().filter_map(|line| line.strip_prefix("KERNEL ")?.split('(').next());
            for name in names {
                assert_eq!(kernel(name).map(|kernel| kernel.source), Some(*source), "{name}");
                written.push(name);
            }
        }
        declared.sort_unstable();
        written.sort_unstable();
        assert_eq!(declared, written);
        assert!(declared.windows(2).all(|two| two[0] != two[1]));
    }

    /// The table declares each number by which a kernel divides as a divisor.
    #[test]
    fn divisors_are_declared() {
        let mut seen = 0;
        for kernel in KERNELS {
            let start = kernel.source.text.find(&format!("KERNEL {}(", kernel.name)).unwrap_or_default();
            let body = &kernel.source.text[start..];
            let body = &body[..body.find("\n}\n").map_or(body.len(), |end| end + 2)];
            let code: Vec<&str> = body.lines().filter_map(|line| line.split("//").next()).collect();
            let words: Vec<&str> = code.iter().flat_map(|line| line.split_whitespace()).collect();
            for pair in words.windows(2).filter(|pair| ["/", "%", "/=", "%="].contains(&pair[0])) {
                let name = pair[1].trim_start_matches('(');
                let name = name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
                let of =
                    |arg: &&Arg| arg.name == name && matches!(arg.of, Type::I32 | Type::I64) && arg.pass.is_number();
                if let Some(arg) = kernel.args.iter().find(of) {
                    assert_eq!(arg.pass, Pass::Divisor, "{name} of {}", kernel.name);
                    seen += 1;
                }
            }
        }
        assert!(seen > 50, "{seen} divisions");
    }

    /// For tensor-core kernels, the table requires operands accessed in whole chunks to be aligned to 16 bytes, with
    /// row strides in eights, and results written two at a time to be aligned to two elements. Other kernels check each
    /// address (`neighbours.cuh`).
    #[test]
    fn addresses_that_no_kernel_looks_at_are_declared() {
        let mut seen = 0;
        for kernel in KERNELS
            .iter()
            .filter(|kernel| kernel.source.text.contains("tensor_core.cuh") || kernel.name.starts_with("flash"))
        {
            for arg in kernel.args.iter().filter(|arg| arg.of == Type::Bits16) {
                assert!(arg.multiple() == 16 || arg.pass == Pass::OutPairs, "{} of {}", arg.name, kernel.name);
                seen += 1;
            }
            let rows = |arg: &&Arg| arg.name.ends_with("_row") || arg.name == "head_dim";
            assert!(kernel.args.iter().filter(rows).all(|arg| arg.multiple() == 8), "{}", kernel.name);
        }
        assert!(seen > 30, "{seen} addresses");
        for source in SOURCES.iter().chain(HEADERS) {
            // Casts of an address to a wider type: after an alignment check, for chunks, and for pairs.
            let casts = source.text.matches("reinterpret_cast<").count();
            let known = match source.name {
                "neighbours.cuh" => 5,
                "tensor_core.cuh" => 6,
                "grouped_tensor.cu" => 1,
                _ => 0,
            };
            assert_eq!(casts, known, "{}: say in the table what its address must be a multiple of", source.name);
        }
    }

    /// A GPU limits the sum of dynamic and static shared memory: where the dynamic memory fits, the sum must fit too.
    /// The limits per block are 99 KiB for compute capability 8.6, 8.9 and 12, 163 KiB for an A100, and 227 KiB for an
    /// H100.
    #[test]
    fn shared_memory_of_launch_and_source_fits_together() {
        let report = include_str!("../report.md");
        let mut seen = 0;
        for line in report.lines().filter(|line| line.contains(".cu | `")) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let kernel = kernel(cells[2].trim_matches('`')).unwrap_or_else(|| panic!("{line}"));
            let of_source = cells[3].split(", ").filter_map(|bytes| bytes.parse::<u32>().ok()).max().unwrap();
            for most in [99 << 10, 163 << 10, 227 << 10] {
                let of_launch = kernel.geometry.shared();
                assert!(
                    of_launch > most || of_launch + of_source <= most,
                    "{}: {of_launch} and {of_source}",
                    kernel.name
                );
            }
            seen += 1;
        }
        assert!(seen > 200, "{seen} kernels");
    }

    /// Each file describes its computation before its first line of code, and includes only the project's headers.
    #[test]
    fn sources_open_with_what_they_are() {
        for source in SOURCES {
            let head: Vec<&str> = source.text.lines().take_while(|line| line.starts_with("//")).collect();
            for part in ["// Shapes ", "// Geometry ", "// Bytes ", "// Bits "] {
                assert!(head.iter().any(|line| line.starts_with(part)), "{}: {part}", source.name);
            }
        }
        for source in SOURCES.iter().chain(HEADERS) {
            let code = source.text.lines().filter_map(|line| line.split("//").next());
            assert!(code.clone().all(|line| !line.contains("atomic")), "{}", source.name);
            for included in source.text.lines().filter_map(|line| line.strip_prefix("#include ")) {
                let known = HEADERS.iter().any(|header| included == format!("\"{}\"", header.name));
                assert!(known, "{} includes {included}", source.name);
            }
        }
    }
}
