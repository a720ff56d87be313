//! Compiles the kernels for the host.

use libloading::Library;
use meshwork_kernels::{HEADERS, KERNELS, Kernel, SOURCES};
use std::cell::Cell;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The environment variable that asks for the library with sanitizers.
pub const SANITIZED: &str = "MESHWORK_KERNELS_SANITIZED";

/// Whether this process runs under them.
pub fn sanitized() -> bool {
    std::env::var_os(SANITIZED).is_some()
}

/// All kernels. `None`, and a line that says so, without g++ or on another CPU than x86-64.
pub fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let texts = || HEADERS.iter().chain(SOURCES).map(|source| (source.name, source.text.to_owned())).collect();
    let name = if sanitized() { "sanitized" } else { "plain" };
    INSTEAD.get().or_else(|| LIBRARY.get_or_init(|| compile(name, texts(), KERNELS)).as_ref())
}

thread_local! {
    static INSTEAD: Cell<Option<&'static Library>> = const { Cell::new(None) };
}

/// Runs something on this thread with another library than [`library`].
pub fn with<R>(library: &'static Library, run: impl FnOnce() -> R) -> R {
    INSTEAD.set(Some(library));
    let result = run();
    INSTEAD.set(None);
    result
}

/// The library once more, with a state of its own.
pub fn copy() -> Option<&'static Library> {
    library()?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels/plain");
    let copy = folder.join("libcopy.so");
    fs::copy(folder.join("libkernels.so"), &copy).expect("the library copied");
    // SAFETY: as in `compile`.
    Some(Box::leak(Box::new(unsafe { Library::new(&copy) }.expect("the copy loaded"))))
}

/// A library of these files, the `.cu` among them included in order. `None` as for [`library`].
pub fn compile(name: &str, files: Vec<(&str, String)>, kernels: &[Kernel]) -> Option<Library> {
    if !cfg!(target_arch = "x86_64") {
        eprintln!("left out: the host runner of kernels needs x86-64");
        return None;
    }
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("host");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels").join(name);
    fs::create_dir_all(&folder).expect("a folder for the library");
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).expect("a source written");
    files.iter().for_each(|(name, text)| write(name, text));
    let includes =
        files.iter().filter(|(name, _)| name.ends_with(".cu")).map(|(name, _)| format!("#include \"{name}\"\n"));
    write("sources.inc", &includes.collect::<String>());
    let entries = kernels.iter().map(|kernel| format!("ENTRY({}, {})\n", kernel.name, kernel.c_types()));
    write("kernels.inc", &entries.collect::<String>());
    let library = folder.join("libkernels.so");
    let mut compiler = Command::new("g++");
    compiler.args([
        "-std=c++17",
        "-O1",
        "-g1",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fno-gnu-unique",
    ]);
    compiler.args(["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]);
    if sanitized() {
        compiler.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("fma") {
        compiler.arg("-mfma"); // otherwise fmaf is a call: the same bits, slowly
    }
    compiler.arg("-I").arg(&folder).arg(host.join("library.cpp")).arg("-o").arg(&library);
    let run = match compiler.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            eprintln!("left out: there is no g++ to compile the kernels with");
            return None;
        }
        run => run.expect("g++ started"),
    };
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    // SAFETY: its initialisers are those of the C++ library and of a few empty containers.
    Some(unsafe { Library::new(&library) }.expect("the library loaded"))
}

/// The address sanitizer of g++, to be loaded before all else.
pub fn sanitizer() -> Option<PathBuf> {
    library()?;
    let run = Command::new("g++").arg("-print-file-name=libasan.so").output().ok()?;
    let path = PathBuf::from(String::from_utf8_lossy(&run.stdout).trim());
    if !path.is_absolute() {
        eprintln!("left out: g++ has no address sanitizer");
        return None;
    }
    Some(path)
}
