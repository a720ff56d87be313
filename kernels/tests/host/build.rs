//! The kernels compiled for the host, once for all tests.

use meshwork_kernels::host::{Host, HostError};
use meshwork_kernels::{HEADERS, KERNELS, Kernel, SOURCES, Variant};
use std::cell::Cell;
use std::collections::BTreeMap;
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
pub fn library() -> Option<&'static Host> {
    static LIBRARY: OnceLock<Option<Host>> = OnceLock::new();
    let files = || HEADERS.iter().chain(SOURCES).map(|source| (source.name, source.text)).collect::<Vec<_>>();
    INSTEAD.get().or_else(|| LIBRARY.get_or_init(|| compile(&files(), KERNELS)).as_ref())
}

thread_local! {
    static INSTEAD: Cell<Option<&'static Host>> = const { Cell::new(None) };
}

/// Runs something on this thread with another library than [`library`].
pub fn with<R>(library: &'static Host, run: impl FnOnce() -> R) -> R {
    INSTEAD.set(Some(library));
    let result = run();
    INSTEAD.set(None);
    result
}

thread_local! {
    static FORMS: Cell<Option<(&'static Host, &'static [Kernel])>> = const { Cell::new(None) };
}

/// Runs something on this thread with other forms in the place of their kernels; nothing without g++. `skipped` is a
/// line of the file of the first kernel whose barrier is left out.
pub fn with_forms<R>(forms: &'static [Kernel], skipped: Option<usize>, run: impl FnOnce() -> R) -> Option<R> {
    let sources: BTreeMap<&str, &str> = forms.iter().map(|form| (form.source.name, form.source.text)).collect();
    let headers = HEADERS.iter().map(|header| (header.name, header.text));
    let library: &Host = Box::leak(Box::new(compile(&headers.chain(sources).collect::<Vec<_>>(), forms)?));
    if let Some(line) = skipped {
        let source = forms[0].source;
        let defined = source.text.lines().take_while(|line| line.starts_with("#define ")).count();
        library.skip_barrier(source.name, defined + line).expect("a line of the variant");
    }
    FORMS.set(Some((library, forms)));
    let result = run();
    FORMS.set(None);
    Some(result)
}

/// The same with a variant in the place of its kernel.
pub fn with_variant<R>(variant: &'static Variant, skipped: Option<usize>, run: impl FnOnce() -> R) -> Option<R> {
    with_forms(std::slice::from_ref(&variant.kernel), skipped, run)
}

/// The form that runs in the place of a kernel, and its library.
pub fn form_of(name: &str) -> Option<(&'static Host, &'static Kernel)> {
    let (library, forms) = FORMS.get()?;
    Some((library, forms.iter().find(|form| form.name == name)?))
}

/// The library once more, with a state of its own.
pub fn copy() -> Option<&'static Host> {
    Some(Box::leak(Box::new(library()?.copy().expect("the library copied"))))
}

/// A library of these files. `None` as for [`library`].
pub fn compile(files: &[(&str, &str)], kernels: &[Kernel]) -> Option<Host> {
    // That of the workspace's other tests, so that the library is compiled once for all.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches/meshwork/kernels");
    match Host::compile(&folder, files, kernels, sanitized()) {
        Err(error @ (HostError::NoCompiler | HostError::Processor(_))) => {
            eprintln!("left out: {error}");
            None
        }
        host => Some(host.unwrap_or_else(|error| panic!("{error}"))),
    }
}

/// The address sanitizer of g++, to be loaded before all else.
pub fn sanitizer() -> Option<PathBuf> {
    let run = Command::new("g++").arg("-print-file-name=libasan.so").output();
    let path =
        PathBuf::from(run.map_or_else(|_| String::new(), |run| String::from_utf8_lossy(&run.stdout).trim().to_owned()));
    if !path.is_absolute() {
        eprintln!("left out: there is no g++, or it has no address sanitizer");
        return None;
    }
    Some(path)
}
