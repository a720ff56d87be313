//! Compiles the kernels for the host with g++, and runs them there thread by thread: feature `host`.
//!
//! `host/cuda_host.h` gives blocks, warps, barriers, shuffles and shared memory, and checks how a kernel uses
//! them. A library is compiled at its first use, by one process, in parts, and kept in a folder, by a hash of its
//! sources and options. So is each part, so that a change of one file compiles one part again.

use crate::{HEADERS, KERNELS, Kernel, Launch, SOURCES};
use libloading::Library;
use std::cmp::Reverse;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Error as IoError, ErrorKind};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Failure to compile or load kernels for the host.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The fibers switch stacks by instructions of x86-64.
    #[error("the host runner of kernels needs x86-64, and this is {0}")]
    Processor(&'static str),
    /// g++ is not installed.
    #[error("there is no g++ to compile the kernels with: install it, or put it on the path")]
    NoCompiler,
    /// A message of g++ about a source.
    #[error("g++ does not compile the kernels:\n{0}")]
    Compile(String),
    /// A file that could not be written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: IoError,
    },
    /// A library that could not be loaded.
    #[error("{}: {error}", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// The error.
        error: libloading::Error,
    },
}

impl std::fmt::Debug for HostError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Kernels in a shared library for the host.
#[derive(Debug)]
pub struct Host {
    library: Library,
    path: PathBuf,
}

const HEADER: &str = include_str!("../host/cuda_host.h");
const FLOAT16: &str = include_str!("../host/float16_host.h");
const TENSOR_CORES: &str = include_str!("../host/tensor_core_host.h");
const BULK_COPIES: &str = include_str!("../host/bulk_copy_host.h");
const ENTRY: &str = include_str!("../host/entry_host.h");
const LIBRARY: &str = include_str!("../host/library.cpp");
const PART: &str = include_str!("../host/part.cpp");
const COMPILER: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
];
const SANITIZERS: &[&str] = &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

type Entry = unsafe extern "C" fn(*const c_char, *mut *mut c_void, *const u32, *const u32, u32, u64) -> *const c_char;
type Skip = unsafe extern "C" fn(*const c_char, i32);

impl Host {
    /// All kernels of this crate, loaded from the library in `folder`, or compiled into it first.
    ///
    /// # Errors
    /// If there is no g++, the processor is not x86-64, or the folder cannot be written.
    pub fn new(folder: &Path) -> Result<Self, HostError> {
        let files: Vec<_> = HEADERS.iter().chain(SOURCES).map(|source| (source.name, source.text)).collect();
        Self::compile(folder, &files, KERNELS, false)
    }

    /// Kernels of these files; `sanitized`: with the address and undefined-behaviour sanitizers, which must be in the
    /// process from its start.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if g++ reports an error.
    pub fn compile(
        folder: &Path,
        files: &[(&str, &str)],
        kernels: &[Kernel],
        sanitized: bool,
    ) -> Result<Self, HostError> {
        if !cfg!(target_arch = "x86_64") {
            return Err(HostError::Processor(std::env::consts::ARCH));
        }
        let mut sources = files.to_vec();
        sources.extend([
            ("cuda_host.h", HEADER),
            ("float16_host.h", FLOAT16),
            ("tensor_core_host.h", TENSOR_CORES),
            ("bulk_copy_host.h", BULK_COPIES),
            ("entry_host.h", ENTRY),
            ("library.cpp", LIBRARY),
            ("part.cpp", PART),
        ]);
        let entries: Vec<String> = kernels.iter().map(entry).collect();

        let mut options = COMPILER.to_vec();
        options.extend(SANITIZERS.iter().filter(|_| sanitized));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("fma") {
            options.push("-mfma"); // otherwise fmaf is a function call: the same bits, but slow
        }
        let mut hash = DefaultHasher::new();
        (&sources, &entries, &options).hash(&mut hash);
        let folder = folder.join(format!("{:016x}", hash.finish()));
        let path = folder.join("libkernels.so");
        if !path.exists() {
            build(&folder, &sources, kernels, &options, &path)?;
        }
        Self::load(path)
    }

    fn load(path: PathBuf) -> Result<Self, HostError> {
        // SAFETY: the library only runs initialisers of the C++ library, of a few containers, and of its list of
        // kernels.
        match unsafe { Library::new(&path) } {
            Ok(library) => Ok(Self { library, path }),
            Err(error) => Err(HostError::Load { path, error }),
        }
    }

    /// The file of the library, whose entry `meshwork_launch` serves other programs.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another copy of the library, with its own state.
    ///
    /// # Errors
    /// If the copy cannot be written or loaded.
    pub fn copy(&self) -> Result<Self, HostError> {
        let copy = scratch(&self.path);
        fs::copy(&self.path, &copy).map_err(|error| HostError::File { path: copy.clone(), error })?;
        let loaded = Self::load(copy.clone());
        _ = fs::remove_file(copy); // the file stays mapped
        loaded
    }

    /// Runs a kernel to its end. The seed determines the order of threads and blocks: 0 is ascending, 1 descending,
    /// others random. `args` has each argument's bits: a number, or an address.
    ///
    /// # Errors
    /// The first fault of the checks, in the order of the run: a race, a read of memory that was not written, a barrier
    /// that not all threads reach.
    ///
    /// # Safety
    /// `args` have the types of the kernel's table, and addresses are of host memory as large as its source says.
    pub unsafe fn launch(&self, kernel: &Kernel, launch: Launch, args: &mut [u64], seed: u64) -> Result<(), String> {
        assert_eq!(args.len(), kernel.args.len(), "arguments of {}", kernel.name);
        let name = CString::new(kernel.name).map_err(|error| error.to_string())?;
        let mut addresses: Vec<*mut c_void> = args.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        // SAFETY: the function has this type in the library; the caller guarantees the arguments, whose types the
        // library asserts.
        let failure = unsafe {
            let entry = self.library.get::<Entry>(b"meshwork_launch").map_err(|error| error.to_string())?;
            let failure = entry(
                name.as_ptr(),
                addresses.as_mut_ptr(),
                launch.grid.as_ptr(),
                launch.block.as_ptr(),
                launch.shared,
                seed,
            );
            (!failure.is_null()).then(|| CStr::from_ptr(failure).to_string_lossy().into_owned())
        };
        failure.map_or(Ok(()), Err)
    }

    /// Disables the barrier on this line of a file, for tests of the checks; line 0 enables all barriers.
    ///
    /// # Errors
    /// A name that contains a zero byte, or a library without the entry.
    pub fn skip_barrier(&self, file: &str, line: usize) -> Result<(), String> {
        let file = CString::new(file).map_err(|error| error.to_string())?;
        let line = i32::try_from(line).map_err(|error| error.to_string())?;
        // SAFETY: the function has this type in the library, and it copies the name.
        unsafe {
            let skip = self.library.get::<Skip>(b"meshwork_skip").map_err(|error| error.to_string())?;
            skip(file.as_ptr(), line);
        }
        Ok(())
    }
}

/// A unique file name beside `path`.
fn scratch(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    path.with_extension(format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// The line that adds a kernel to the entries of its part.
fn entry(kernel: &Kernel) -> String {
    format!("ENTRY({}, {})\n", kernel.name, kernel.c_types())
}

/// The files of kernels, in this many parts of about the same length.
fn parts<'a>(sources: &[(&'a str, &str)], count: usize) -> Vec<Vec<&'a str>> {
    let mut files: Vec<_> = sources.iter().filter(|(name, _)| name.ends_with(".cu")).collect();
    files.sort_by_key(|(name, text)| (Reverse(text.len()), *name));
    let mut parts = vec![(0, Vec::new()); count.clamp(1, files.len().max(1))];
    for (name, text) in files {
        if let Some((length, part)) = parts.iter_mut().min_by_key(|(length, _)| *length) {
            *length += text.len();
            part.push(*name);
        }
    }
    parts.into_iter().map(|(_, part)| part).collect()
}

/// The parts that kernels are compiled in: enough for the cores of a laptop, and a change of a file compiles an eighth.
const PARTS: usize = 8;

/// A source to compile, in a folder of its own beside the headers.
struct Part {
    source: &'static str,
    /// Generated files.
    files: Vec<(&'static str, String)>,
    /// Where the object is kept, by a hash of all that it is compiled from.
    object: PathBuf,
}

/// Compiles the library under a temporary name and renames it, so that no other process loads an incomplete file. Of
/// several processes one compiles, and the others wait for it.
fn build(
    folder: &Path,
    sources: &[(&str, &str)],
    kernels: &[Kernel],
    options: &[&str],
    path: &Path,
) -> Result<(), HostError> {
    fs::create_dir_all(folder).map_err(file(folder))?;
    let lock = folder.join("lock");
    let held = File::create(&lock).map_err(file(&lock))?; // released when it is dropped, or the process ends
    held.lock().map_err(file(&lock))?;
    if path.exists() {
        return Ok(());
    }
    let work = scratch(folder);
    fs::create_dir_all(&work).map_err(file(&work))?;
    let run = || {
        sources.iter().try_for_each(|(name, text)| write(&work.join(name), text))?;
        let objects = folder.with_file_name("objects");
        fs::create_dir_all(&objects).map_err(file(&objects))?;
        let parts = all_parts(sources, kernels, options, &objects);
        let queue = Mutex::new(parts.iter().enumerate());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let worker = || {
            std::iter::from_fn(next)
                .try_for_each(|(number, part)| part.compile(options, &work, &work.join(number.to_string())))
        };
        let workers = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let running: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
            let ended = running.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
            ended.collect::<Vec<_>>().into_iter().collect::<Result<(), _>>() // of all, so that none is left running
        })?;
        let library = work.join("libkernels.so");
        let mut linker = compiler(options);
        linker.arg("-shared").args(parts.iter().map(|part| &part.object)).arg("-o").arg(&library);
        finish(linker.output())?;
        fs::rename(&library, path).map_err(file(path))
    };
    let run = run();
    _ = fs::remove_dir_all(&work);
    run
}

/// The part without kernels, and the parts with them.
fn all_parts(sources: &[(&str, &str)], kernels: &[Kernel], options: &[&str], objects: &Path) -> Vec<Part> {
    let parts = parts(sources, PARTS);
    let others: Vec<_> = sources.iter().filter(|(name, _)| !name.ends_with(".cu")).collect();
    let object = |files: &[&str], generated: &[(&str, String)]| {
        let mut hash = DefaultHasher::new();
        let texts = sources.iter().filter(|(name, _)| files.contains(name));
        (options, &others, texts.collect::<Vec<_>>(), generated).hash(&mut hash);
        objects.join(format!("{:016x}.o", hash.finish()))
    };
    let with_kernels = parts.iter().enumerate().map(|(number, files)| {
        // Headers first: files define macros of their own, which no header is to see.
        let headers = sources.iter().map(|(name, _)| *name).filter(|name| name.ends_with(".cuh"));
        let includes = headers.chain(files.iter().copied());
        let includes: String = includes.map(|name| format!("#include \"{name}\"\n")).collect();
        let of_part = kernels.iter().filter(|kernel| match files.contains(&kernel.source.name) {
            true => true,
            // Of a file that is not there: the compiler says so.
            false => number == 0 && !parts.iter().flatten().any(|name| *name == kernel.source.name),
        });
        let generated = vec![("sources.inc", includes), ("kernels.inc", of_part.map(entry).collect::<String>())];
        Part { source: "part.cpp", object: object(files, &generated), files: generated }
    });
    let library = Part { source: "library.cpp", object: object(&[], &[]), files: Vec::new() };
    std::iter::once(library).chain(with_kernels).collect()
}

impl Part {
    /// Compiles the object where it is not kept yet: headers are in `work`, and `folder` is for this part alone.
    fn compile(&self, options: &[&str], work: &Path, folder: &Path) -> Result<(), HostError> {
        if self.object.exists() {
            return Ok(());
        }
        fs::create_dir_all(folder).map_err(file(folder))?;
        self.files.iter().try_for_each(|(name, text)| write(&folder.join(name), text))?;
        let object = folder.join("part.o");
        let mut part = compiler(options);
        part.arg("-I").arg(work).arg("-I").arg(folder).arg("-c").arg(work.join(self.source)).arg("-o").arg(&object);
        finish(part.current_dir(folder).output())?;
        fs::rename(&object, &self.object).map_err(file(&self.object))
    }
}

/// The error about this file.
fn file(path: &Path) -> impl FnOnce(IoError) -> HostError {
    let path = path.to_owned();
    move |error| HostError::File { path, error }
}

fn write(path: &Path, text: &str) -> Result<(), HostError> {
    fs::write(path, text).map_err(file(path))
}

fn compiler(options: &[&str]) -> Command {
    let mut compiler = Command::new("g++");
    compiler.args(options).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    compiler
}

fn finish(run: Result<Output, IoError>) -> Result<(), HostError> {
    match run {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(HostError::NoCompiler),
        Err(error) => Err(HostError::File { path: "g++".into(), error }),
        Ok(run) if !run.status.success() => Err(HostError::Compile(String::from_utf8_lossy(&run.stderr).into_owned())),
        Ok(_) => Ok(()),
    }
}
