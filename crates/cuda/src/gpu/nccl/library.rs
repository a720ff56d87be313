//! NCCL's library: where it is found, and its functions by their C types.
//!
//! It is loaded by `libloading`, and not by `sys` of cudarc, which does not look for `libnccl.so.2`, the only name in
//! wheels, containers and packages without headers; which panics where a function is missing; and which has the
//! configuration of one version of NCCL.

use crate::driver::{DriverError, UniqueId};
use crate::gpu::GpuError;
use libloading::Library as Loaded;
use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Where the loader of the system looks: the folders of `LD_LIBRARY_PATH`, then the system's.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The folder of NVIDIA's wheels among Python's packages.
const WHEEL: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The oldest supported version, which can split communicators: 10000 times the major version, 100 times the minor
/// version, and the patch.
const OLDEST: c_int = 21_800;

/// A communicator of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Handle(pub(super) *mut c_void);

// SAFETY: a communicator is not bound to a thread; calls of one are made by one thread at a time, under a lock.
unsafe impl Send for Handle {}

/// A stream of the driver, which is also one of the runtime that NCCL calls.
pub(super) type Stream = *mut c_void;

/// A unique id, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Id(pub(super) [u8; UniqueId::BYTES]);

/// The configuration of a communicator in NCCL 2.18. Later versions have more fields: they read as many bytes as `size`
/// says, and those fields that `version` had.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return before they are done; the rest as the library has it.
    pub(super) fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// The code of success, and of a call that goes on in the background.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// Codes of a call that cannot be, whatever other processes do.
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

/// Codes by their numbers.
const CODES: [&str; 9] = [
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
];

macro_rules! functions {
    ($($field:ident $name:literal ($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        /// The functions of the library.
        pub(super) struct Functions { $(pub(super) $field: unsafe extern "C" fn($($type),*) -> $result,)* }

        impl Functions {
            /// The functions of a library, or the name of one that it lacks.
            fn load(library: &Loaded) -> Result<Self, &'static str> {
                // SAFETY: the names and types are those of `nccl.h` since 2.18. The library is never unloaded.
                Ok(unsafe { Self { $($field: *library.get($name).map_err(|_| $name)?,)* } })
            }
        }
    };
}

functions! {
    version "ncclGetVersion" (version: *mut c_int) -> c_int;
    unique_id "ncclGetUniqueId" (id: *mut Id) -> c_int;
    init "ncclCommInitRankConfig" (made: *mut Handle, ranks: c_int, id: Id, rank: c_int, config: *mut Config) -> c_int;
    split "ncclCommSplit" (of: Handle, color: c_int, key: c_int, made: *mut Handle, config: *mut Config) -> c_int;
    count "ncclCommCount" (of: Handle, count: *mut c_int) -> c_int;
    user_rank "ncclCommUserRank" (of: Handle, rank: *mut c_int) -> c_int;
    finalize "ncclCommFinalize" (of: Handle) -> c_int;
    destroy "ncclCommDestroy" (of: Handle) -> c_int;
    abort "ncclCommAbort" (of: Handle) -> c_int;
    async_error "ncclCommGetAsyncError" (of: Handle, error: *mut c_int) -> c_int;
    error_string "ncclGetErrorString" (code: c_int) -> *const c_char;
    last_error "ncclGetLastError" (of: Handle) -> *const c_char;
    all_reduce "ncclAllReduce" (from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, op: c_int, of: Handle, stream: Stream) -> c_int;
    reduce_scatter "ncclReduceScatter" (from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, op: c_int, of: Handle, stream: Stream) -> c_int;
    all_gather "ncclAllGather" (from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, of: Handle, stream: Stream) -> c_int;
    broadcast "ncclBroadcast" (from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, root: c_int, of: Handle, stream: Stream) -> c_int;
    send "ncclSend" (from: *const c_void, count: usize, dtype: c_int, peer: c_int, of: Handle, stream: Stream) -> c_int;
    receive "ncclRecv" (to: *mut c_void, count: usize, dtype: c_int, peer: c_int, of: Handle, stream: Stream) -> c_int;
    group_start "ncclGroupStart" () -> c_int;
    group_end "ncclGroupEnd" () -> c_int;
}

/// A loaded library of a version that is new enough.
pub(super) struct Library {
    pub(super) functions: Functions,
    name: String,
    version: c_int,
}

impl fmt::Debug for Library {
    /// `NCCL 2.28.9 (libnccl.so.2)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} ({})", shown(self.version), self.name)
    }
}

impl Library {
    /// Looks for the library: where the system looks for libraries, then among the packages of Python and of conda.
    ///
    /// # Errors
    /// All places where it was looked for, or a version that is too old.
    pub(super) fn find() -> Result<Self, GpuError> {
        // A file that is there and does not load is an error: another one is not what the system would take.
        for place in NAMES.iter().map(PathBuf::from).chain(packages()) {
            // SAFETY: what the library does when it is loaded is what it does in every program that links it.
            match unsafe { Loaded::new(&place) } {
                Ok(library) => return Self::of(&place, library),
                Err(error) if place.is_file() => {
                    return Err(GpuError::Unusable { library: place.display().to_string(), why: error.to_string() });
                }
                Err(_) => {}
            }
        }
        let path = env::var("LD_LIBRARY_PATH").ok().filter(|path| !path.is_empty());
        let path = path.map_or("which is not set".to_owned(), |path| format!("which is {path}"));
        let packages = packages().map(|path| path.display().to_string()).collect::<Vec<_>>();
        let looked = format!(
            "{} in LD_LIBRARY_PATH, {path}, and in the system's folders; then {}",
            NAMES.join(", "),
            if packages.is_empty() { "no packages of Python".to_owned() } else { packages.join(", ") }
        );
        Err(GpuError::NoNccl { looked })
    }

    fn of(place: &Path, library: Loaded) -> Result<Self, GpuError> {
        let unusable = |why| GpuError::Unusable { library: place.display().to_string(), why };
        let functions = Functions::load(&library).map_err(|name| unusable(format!("it has no function {name}")))?;
        let mut version = 0;
        // SAFETY: writes one number.
        let code = unsafe { (functions.version)(&raw mut version) };
        if code != SUCCESS {
            return Err(unusable(format!("ncclGetVersion returned {}", name_of(code))));
        }
        if version < OLDEST {
            let ([found, needed], library) = ([version, OLDEST].map(shown), place.display().to_string());
            return Err(GpuError::NcclTooOld { library, found, needed });
        }
        std::mem::forget(library); // its threads may outlive every use of it
        let name = place.file_name().unwrap_or(place.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { functions, name, version })
    }

    /// The error of a call.
    pub(super) fn fault(&self, call: &'static str, code: c_int) -> DriverError {
        let why = self.meaning(code);
        match code {
            INVALID_ARGUMENT | INVALID_USAGE => DriverError::Call { call, why },
            _ => DriverError::Comm { call, why },
        }
    }

    /// What a code means, and what the library says of its last error.
    fn meaning(&self, code: c_int) -> String {
        // SAFETY: the library returns a text of its own, which stays, for every number.
        let text = unsafe { text_of((self.functions.error_string)(code)) };
        // SAFETY: as above; it takes no communicator, and returns the last error of this thread.
        let last = unsafe { text_of((self.functions.last_error)(Handle(std::ptr::null_mut()))) };
        let last = if last.is_empty() { String::new() } else { format!(": {last}") };
        format!("{} ({text}){last}", name_of(code))
    }
}

/// # Safety
/// A text that ends with 0, or null.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller says.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

fn name_of(code: c_int) -> String {
    let name = usize::try_from(code).ok().and_then(|at| CODES.get(at));
    name.map_or(format!("code {code}"), |name| (*name).to_owned())
}

/// `22809` as `2.28.9`.
fn shown(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Where packages of Python and conda have the library: of the active environment, then of the system.
fn packages() -> impl Iterator<Item = PathBuf> {
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os);
    let environments = environments.filter(|path| !path.is_empty()).map(PathBuf::from);
    let roots = environments.chain(["/usr/local", "/usr"].map(PathBuf::from));
    roots.flat_map(|root| {
        let conda = root.join("lib/libnccl.so.2");
        let lib = fs::read_dir(root.join("lib")).into_iter().flatten().flatten().map(|entry| entry.path());
        let python = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"));
        let mut found: Vec<PathBuf> = lib
            .filter(python)
            .flat_map(|lib| ["site-packages", "dist-packages"].map(|packages| lib.join(packages).join(WHEEL)))
            .chain([conda])
            .filter(|path| path.is_file())
            .collect();
        found.sort();
        found
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;
    use std::mem::offset_of;
    use std::process::Command;

    /// The folder of packages of `target/peer-venv`, where PyTorch brings NVIDIA's NCCL. `None`, and a line that says
    /// so, if it is not there.
    fn packages_of_pytorch() -> Option<PathBuf> {
        let folders = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/peer-venv/lib"));
        let mut packages = folders.into_iter().flatten().flatten().map(|python| python.path().join("site-packages"));
        let found = packages.find(|packages| packages.join(WHEEL).exists());
        if found.is_none() {
            eprintln!("left out: no target/peer-venv with {WHEEL}, which benches/peers installs");
        }
        found
    }

    /// It is NVIDIA's own, on a machine without a GPU.
    #[test]
    fn the_library_of_the_wheel_loads_and_names_communicators_without_a_gpu() {
        let Some(packages) = packages_of_pytorch() else { return };
        let place = packages.join(WHEEL);
        // SAFETY: as in `find`.
        let library = Library::of(&place, unsafe { Loaded::new(&place) }.unwrap()).unwrap();
        assert!(library.version >= OLDEST, "{library:?}");
        assert_eq!(format!("{library:?}"), format!("NCCL {} (libnccl.so.2)", shown(library.version)));
        let mut ids = [Id([0; UniqueId::BYTES]); 2];
        for id in &mut ids {
            // SAFETY: writes an id.
            assert_eq!(unsafe { (library.functions.unique_id)(id) }, SUCCESS);
        }
        assert_ne!(ids[0].0, ids[1].0);
        let lost = library.fault("ncclSend", 6);
        assert!(lost.to_string().starts_with("ncclSend: ncclRemoteError (remote process exited"), "{lost}");
        assert!(matches!(lost, DriverError::Comm { .. }));
        assert!(matches!(library.fault("ncclSend", INVALID_USAGE), DriverError::Call { .. }));
    }

    /// Functions, codes and the beginning of the configuration, as g++ reads them in `nccl.h` of the wheel.
    #[test]
    fn our_types_are_those_of_the_header() {
        let Some(packages) = packages_of_pytorch() else { return };
        let mut source = "#include <cstddef>\n#include <type_traits>\n#include <nccl.h>\n".to_owned();
        for (field, offset) in offsets() {
            writeln!(source, "static_assert(offsetof(ncclConfig_t, {field}) == {offset});").unwrap();
        }
        for (name, value) in [
            ("ncclInvalidArgument", INVALID_ARGUMENT),
            ("ncclInvalidUsage", INVALID_USAGE),
            ("ncclInProgress", IN_PROGRESS),
        ] {
            writeln!(source, "static_assert({name} == {value});").unwrap();
        }
        writeln!(source, "static_assert(NCCL_API_MAGIC == {}u);", Config::non_blocking().magic).unwrap();
        writeln!(source, "static_assert(NCCL_UNIQUE_ID_BYTES == {});", UniqueId::BYTES).unwrap();
        for (name, of) in [
            ("ncclGetVersion", "int *"),
            ("ncclGetUniqueId", "ncclUniqueId *"),
            ("ncclCommInitRankConfig", "ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *"),
            ("ncclCommSplit", "ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *"),
            ("ncclCommGetAsyncError", "ncclComm_t, ncclResult_t *"),
            ("ncclCommAbort", "ncclComm_t"),
            ("ncclAllReduce", "const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t"),
            (
                "ncclReduceScatter",
                "const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t",
            ),
            ("ncclAllGather", "const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t"),
            ("ncclBroadcast", "const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t"),
            ("ncclSend", "const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t"),
            ("ncclRecv", "void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t"),
        ] {
            writeln!(source, "static_assert(std::is_same_v<decltype({name}), ncclResult_t({of})>);").unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("types.cpp");
        fs::write(&file, source).unwrap();
        // All that it takes of CUDA's headers.
        fs::write(folder.path().join("cuda_runtime.h"), "typedef struct CUstream_st *cudaStream_t;").unwrap();
        fs::write(folder.path().join("cuda_fp16.h"), "").unwrap();
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-fsyntax-only", "-I"]).arg(packages.join("nvidia/nccl/include"));
        match compiler.arg("-I").arg(folder.path()).arg(&file).output() {
            Ok(told) => assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr)),
            Err(error) => eprintln!("left out: no g++: {error}"),
        }
    }

    /// The fields of the configuration by NVIDIA's names.
    fn offsets() -> [(&'static str, usize); 9] {
        [
            ("size", offset_of!(Config, size)),
            ("magic", offset_of!(Config, magic)),
            ("version", offset_of!(Config, version)),
            ("blocking", offset_of!(Config, blocking)),
            ("cgaClusterSize", offset_of!(Config, cga_cluster_size)),
            ("minCTAs", offset_of!(Config, min_ctas)),
            ("maxCTAs", offset_of!(Config, max_ctas)),
            ("netName", offset_of!(Config, net_name)),
            ("splitShare", offset_of!(Config, split_share)),
        ]
    }
}
