//! Kernels compiled by NVRTC for one GPU, and cached on disk by a hash of all their inputs. Files are compiled side by
//! side ([`Compiler::prepare`]); each has a lock beside it, so that of the ranks that need it, in this process or
//! another, one compiles and the others find the result.

use crate::driver::{DriverError, Result};
use cudarc::nvrtc::sys::{self as nvrtc, nvrtcProgram, nvrtcResult};
use meshwork_kernels::{HEADERS, NVRTC_OPTIONS, OPTIONS, Source};
use std::ffi::{CString, c_char};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::ptr::null;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// A compiler for one architecture. NVRTC must be available.
#[derive(Debug)]
pub(super) struct Compiler {
    folder: PathBuf,
    options: Vec<String>,
    version: String,
}

impl Compiler {
    /// A compiler for `architecture`, such as `sm_80`, with NVRTC of `version`; compiled code is cached in `folder`.
    pub(super) fn new(folder: &Path, architecture: &str, version: String) -> Self {
        let options = OPTIONS.iter().chain(&NVRTC_OPTIONS).map(|&option| option.to_owned());
        let options = options.chain([format!("--gpu-architecture={architecture}")]).collect();
        Self { folder: folder.to_owned(), options, version }
    }

    /// The machine code of the kernels of a file: from disk, unless `anew`, or compiled and cached. If the folder
    /// cannot be written, each process compiles its own.
    pub(super) fn image(&self, source: &'static Source, anew: bool) -> Result<Vec<u8>> {
        let path = self.path(source);
        let kept = || fs::read(&path).ok().filter(|_| !anew);
        if let Some(image) = kept() {
            return Ok(image);
        }
        // A folder that cannot be written has no lock.
        let _lock = lock(&path.with_extension("lock"));
        if let Some(image) = kept() {
            return Ok(image);
        }
        let image = self.compile(source)?;
        _ = keep(&path, &image);
        Ok(image)
    }

    /// Compiles those of the files that are not on disk yet, as many side by side as the host has threads.
    pub(super) fn prepare(&self, sources: &[&'static Source]) -> Result<()> {
        let missing: Vec<_> = sources.iter().filter(|source| !self.path(source).exists()).collect();
        let threads = thread::available_parallelism().map_or(1, usize::from).min(missing.len());
        let next = AtomicUsize::new(0);
        let compile = || {
            while let Some(source) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.image(source, false)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let compiling: Vec<_> = (0..threads).map(|_| scope.spawn(compile)).collect();
            // A thread that panicked says so itself; its file is compiled when it is used.
            compiling.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
        })
    }

    fn path(&self, source: &Source) -> PathBuf {
        let mut hash = DefaultHasher::new();
        let headers = HEADERS.iter().map(|header| (header.name, header.text));
        (source.text, headers.collect::<Vec<_>>(), &self.options, &self.version).hash(&mut hash);
        self.folder.join(format!("{}-{:016x}.cubin", source.name.trim_end_matches(".cu"), hash.finish()))
    }

    fn compile(&self, source: &'static Source) -> Result<Vec<u8>> {
        let refused = |why: String| DriverError::Compile { source_name: source.name, why };
        let c = |text: &str| CString::new(text).map_err(|error| refused(error.to_string()));
        let (text, name) = (c(source.text)?, c(source.name)?);
        let headers = HEADERS.iter().map(|header| c(header.text)).collect::<Result<Vec<_>>>()?;
        let names = HEADERS.iter().map(|header| c(header.name)).collect::<Result<Vec<_>>>()?;
        let options = self.options.iter().map(|option| c(option)).collect::<Result<Vec<_>>>()?;
        let [headers_at, names_at, options_at] = [&headers, &names, &options].map(|strings| pointers(strings));
        let mut program = Program(std::ptr::null_mut());
        // SAFETY: all strings end with zero and outlive the program, each list has as many strings as stated.
        let made = unsafe {
            let (count, headers, names) = (headers.len() as i32, headers_at.as_ptr(), names_at.as_ptr());
            nvrtc::nvrtcCreateProgram(&mut program.0, text.as_ptr(), name.as_ptr(), count, headers, names)
        };
        made.result().map_err(|error| refused(format!("{:?}", error.0)))?;
        // SAFETY: the program was made above; the number of options is as stated, and each ends with zero.
        let compiled = unsafe { nvrtc::nvrtcCompileProgram(program.0, options.len() as i32, options_at.as_ptr()) };
        if let Err(error) = compiled.result() {
            let log = read(&program, nvrtc::nvrtcGetProgramLogSize, nvrtc::nvrtcGetProgramLog).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            return Err(refused(format!("{:?}\n{log}", error.0)));
        }
        let image = read(&program, nvrtc::nvrtcGetCUBINSize, nvrtc::nvrtcGetCUBIN);
        image.map_err(|error| refused(format!("{error:?}: no machine code")))
    }
}

/// A program of NVRTC, which is destroyed on drop.
struct Program(nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it was made by `nvrtcCreateProgram`, and nothing uses it later.
            _ = unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

type Size = unsafe fn(nvrtcProgram, *mut usize) -> nvrtcResult;
type Get = unsafe fn(nvrtcProgram, *mut c_char) -> nvrtcResult;

/// The bytes that `get` writes, as many as `size` says.
fn read(program: &Program, size: Size, get: Get) -> std::result::Result<Vec<u8>, nvrtcResult> {
    let mut bytes = 0;
    // SAFETY: the program exists; `size` writes one number.
    unsafe { size(program.0, &mut bytes) }.result().map_err(|error| error.0)?;
    let mut read = vec![0_u8; bytes];
    // SAFETY: `get` writes as many bytes as `size` reported.
    unsafe { get(program.0, read.as_mut_ptr().cast()) }.result().map_err(|error| error.0)?;
    Ok(read)
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([null()]).collect()
}

/// The right to compile a file, until it is dropped or the process ends. Waits for the thread or process that compiles.
fn lock(path: &Path) -> std::io::Result<File> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    file.lock().map(|()| file)
}

/// Writes a file under a temporary name and renames it, so that no other process reads an incomplete file.
fn keep(path: &Path, image: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let own = path.with_extension(format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(&own, image).and_then(|()| fs::rename(&own, path)).inspect_err(|_| _ = fs::remove_file(&own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::libraries::{architectures, nvrtc};
    use meshwork_kernels::{F16, SOURCES, TF32};
    use std::time::Instant;

    /// NVRTC needs no GPU: compiles to machine code for the targets that `kernels/check.py` compiles with nvcc, as far
    /// as it knows them.
    #[test]
    fn nvrtc_compiles_every_kernel() {
        let version = match nvrtc() {
            Ok((major, minor)) => format!("{major}.{minor}"),
            Err(error) => return eprintln!("SKIPPED: {error}"),
        };
        let folder = tempfile::tempdir().unwrap();
        let known = architectures().unwrap();
        for (number, architecture) in [(80, "sm_80"), (90, "sm_90a"), (121, "sm_121a")] {
            if number > 100 && !known.contains(&number) {
                println!("NVRTC {version} does not know {architecture}");
                continue;
            }
            let compiler = Compiler::new(folder.path(), architecture, version.clone());
            let start = Instant::now();
            compiler.prepare(SOURCES).unwrap_or_else(|error| panic!("{architecture}: {error}"));
            println!("{architecture}: {} files in {:.1?}", SOURCES.len(), start.elapsed());
            for source in SOURCES.iter().copied().chain(F16.iter().chain(&*TF32).map(|kernel| kernel.source)) {
                let image = compiler.image(source, false).unwrap_or_else(|error| panic!("{architecture}: {error}"));
                assert!(image.starts_with(b"\x7fELF"), "{}", source.name);
                assert_eq!(fs::read(compiler.path(source)).unwrap(), image);
            }
        }
    }
}
