//! The libraries that a GPU needs, looked for before they are called: a call of a library that is not there
//! would panic.

use crate::driver::DriverError;
use cudarc::driver::result::{DriverError as Code, device};
use cudarc::driver::sys::{self as cuda, CUdevice, CUdevice_attribute as Of, CUresult};
use cudarc::{cublaslt, get_lib_name_candidates, nvrtc};
use std::env;

/// The oldest supported GPUs: older ones have no instructions for bf16 or for asynchronous copies.
const OLDEST_CAPABILITY: [i32; 2] = [8, 0];

/// The oldest supported driver, in CUDA's version numbers: 1000 times the major version plus 10 times the minor.
const OLDEST: i32 = 12_000;

/// How a user gets NCCL.
const INSTALL_NCCL: &str = "install libnccl2 of NVIDIA's packages, or nvidia-nccl-cu12 or nvidia-nccl-cu13 by pip into \
                            the active environment, or add the folder of another one to LD_LIBRARY_PATH";

/// A GPU that cannot be used.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum GpuError {
    /// No driver.
    #[error("no CUDA driver found (looked for {looked}): install NVIDIA's driver")]
    NoDriver { looked: String },
    /// A driver that lacks functions.
    #[error("the CUDA driver is too old: it is of CUDA {found}, and CUDA {needed} or newer is needed")]
    DriverTooOld { found: String, needed: String },
    /// A driver that cannot load the compiler's machine code.
    #[error(
        "the CUDA driver is too old: it is of CUDA {driver}, and NVRTC is {nvrtc}; update the driver or use an older NVRTC"
    )]
    DriverOlderThanCompiler { driver: String, nvrtc: String },
    /// A missing library.
    #[error("no {name} found (looked for {looked}): install it, or add its folder to LD_LIBRARY_PATH")]
    NoLibrary { name: &'static str, looked: String },
    /// No NCCL.
    #[error("no NCCL found, which connects GPUs of several processes (looked for {looked}): {INSTALL_NCCL}")]
    NoNccl { looked: String },
    /// An NCCL that lacks functions.
    #[error("{library} is NCCL {found}, and NCCL {needed} or newer is needed: {INSTALL_NCCL}")]
    NcclTooOld { library: String, found: String, needed: String },
    /// A library that is there, and cannot be used.
    #[error("{library} cannot be used: {why}")]
    Unusable { library: String, why: String },
    /// A GPU that does not exist.
    #[error("there is no GPU {ordinal}: this machine has {count}, numbered from 0")]
    NoDevice { ordinal: usize, count: usize },
    /// Fewer GPUs than ranks of one process that NCCL connects.
    #[error(
        "{count} GPU{} for {ranks} ranks of a process, and NCCL, which connects them, refuses two on one",
        if *count == 1 { "" } else { "s" }
    )]
    TooFew { count: usize, ranks: usize },
    /// A GPU that lacks the instructions of the kernels.
    #[error(
        "GPU {ordinal} ({name}) is too old: it has compute capability {found}, and kernels need {needed} or newer; use another one with --device cuda:N, or cpu"
    )]
    TooOld { ordinal: usize, name: String, found: String, needed: String },
    /// A GPU that the compiler does not know.
    #[error(
        "NVRTC {nvrtc} does not compile for GPU {ordinal} ({name}), of {architecture}: it knows sm_{oldest} to sm_{newest}; install another NVRTC"
    )]
    UnknownToCompiler { ordinal: usize, name: String, architecture: String, nvrtc: String, oldest: i32, newest: i32 },
    /// An error of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

meshwork_core::debug_as_display!(GpuError);

/// The name of a driver error code, with its meaning.
pub(super) fn meaning(code: Code) -> String {
    let name = code.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = code.error_string().map(|text| text.to_string_lossy().into_owned());
    if let (Ok(name), Ok(text)) = (name, text) { format!("{name} ({text})") } else { format!("{:?}", code.0) }
}

/// Whether an error code belongs to queued work: any later call may return it, and then every call does.
pub(super) fn is_of_work(code: Code) -> bool {
    use CUresult as C;
    matches!(
        code.0,
        C::CUDA_ERROR_ECC_UNCORRECTABLE
            | C::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | C::CUDA_ERROR_ILLEGAL_ADDRESS
            | C::CUDA_ERROR_LAUNCH_TIMEOUT
            | C::CUDA_ERROR_ASSERT
            | C::CUDA_ERROR_HARDWARE_STACK_ERROR
            | C::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | C::CUDA_ERROR_MISALIGNED_ADDRESS
            | C::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | C::CUDA_ERROR_INVALID_PC
            | C::CUDA_ERROR_LAUNCH_FAILED
            | C::CUDA_ERROR_EXTERNAL_DEVICE
            | C::CUDA_ERROR_UNKNOWN
    )
}

/// The error of a function of the driver.
pub(super) fn failed(call: &'static str) -> impl Fn(Code) -> DriverError {
    move |code| match meaning(code) {
        why if is_of_work(code) => DriverError::Found { at: call.to_owned(), why },
        why => DriverError::Call { call, why },
    }
}

/// The number of GPUs.
///
/// # Errors
/// A driver that is missing, too old, or does not start.
pub fn count() -> Result<usize, GpuError> {
    // SAFETY: loads the library if it exists; its initialisers are the driver's own.
    if !unsafe { cuda::is_culib_present() } {
        return Err(GpuError::NoDriver { looked: looked("cuda") });
    }
    let version = version()?;
    if version < OLDEST {
        let [found, needed] = [version, OLDEST].map(shown);
        return Err(GpuError::DriverTooOld { found, needed });
    }
    match cudarc::driver::result::init() {
        Err(Code(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(0),
        started => started.map_err(failed("cuInit"))?,
    }
    let count = device::get_count().map_err(failed("cuDeviceGetCount"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// A GPU for which kernels can be compiled.
pub(super) struct Found {
    pub(super) device: CUdevice,
    /// Its name, as given by the vendor.
    pub(super) name: String,
    /// The architecture that kernels are compiled for, as `sm_90a`.
    pub(super) architecture: String,
    /// The version of NVRTC.
    pub(super) nvrtc: String,
}

/// Finds the GPU with this number, and checks that kernels can be compiled for it and that the driver can load NVRTC's
/// output.
pub(super) fn find(ordinal: usize) -> Result<Found, GpuError> {
    let count = count()?;
    let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
    let number = number.ok_or(GpuError::NoDevice { ordinal, count })?;
    let (major, minor) = nvrtc()?;
    let nvrtc = format!("{major}.{minor}");
    let driver = version()?;
    if driver / 1000 < major {
        return Err(GpuError::DriverOlderThanCompiler { driver: shown(driver), nvrtc });
    }
    let device = device::get(number).map_err(failed("cuDeviceGet"))?;
    let name = device::get_name(device).map_err(failed("cuDeviceGetName"))?;
    let [major, minor] =
        [Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR];
    let [major, minor] = [attribute(device, major)?, attribute(device, minor)?];
    if [major, minor] < OLDEST_CAPABILITY {
        let [found, needed] = [[major, minor], OLDEST_CAPABILITY].map(|[major, minor]| format!("{major}.{minor}"));
        return Err(GpuError::TooOld { ordinal, name, found, needed });
    }
    // From 9.0 on, `a` enables the features specific to this architecture.
    let architecture = format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" });
    let known = architectures()?;
    if !known.contains(&(10 * major + minor)) {
        let [oldest, newest] = [known.iter().min(), known.iter().max()].map(|of| of.copied().unwrap_or(0));
        return Err(GpuError::UnknownToCompiler { ordinal, name, architecture, nvrtc, oldest, newest });
    }
    Ok(Found { device, name, architecture, nvrtc })
}

/// An attribute of a GPU.
pub(super) fn attribute(device: CUdevice, of: Of) -> Result<i32, DriverError> {
    // SAFETY: the device is one of the driver's.
    unsafe { device::get_attribute(device, of) }.map_err(failed("cuDeviceGetAttribute"))
}

/// The architectures that NVRTC compiles for, as `90`.
pub(super) fn architectures() -> Result<Vec<i32>, DriverError> {
    let mut count = 0;
    let call = "nvrtcGetSupportedArchs";
    let refused = |error: nvrtc::result::NvrtcError| DriverError::Call { call, why: format!("{:?}", error.0) };
    // SAFETY: writes one number.
    unsafe { nvrtc::sys::nvrtcGetNumSupportedArchs(&mut count) }.result().map_err(refused)?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: writes as many numbers as reported above.
    unsafe { nvrtc::sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result().map_err(refused)?;
    Ok(known)
}

/// The major and minor version of NVRTC.
pub(super) fn nvrtc() -> Result<(i32, i32), GpuError> {
    // SAFETY: loads the library if it is there.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(GpuError::NoLibrary { name: "NVRTC, which compiles the kernels,", looked: looked("nvrtc") });
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two numbers.
    let known = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }.result();
    known.map_err(|error| DriverError::Call { call: "nvrtcVersion", why: format!("{:?}", error.0) })?;
    Ok((major, minor))
}

/// The version of the driver, which must exist.
pub(super) fn version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: writes one number, and may be called before `cuInit`.
    unsafe { cuda::cuDriverGetVersion(&mut version) }.result().map_err(failed("cuDriverGetVersion"))?;
    Ok(version)
}

/// Checks that the library of products exists.
pub(super) fn find_products() -> Result<(), GpuError> {
    // SAFETY: loads the library if it is there.
    match unsafe { cublaslt::sys::is_culib_present() } {
        true => Ok(()),
        false => Err(GpuError::NoLibrary { name: "cuBLASLt, which computes products,", looked: looked("cublasLt") }),
    }
}

/// `12040` as `12.4`.
fn shown(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The search paths of a library.
fn looked(name: &str) -> String {
    let plain = format!("lib{name}.so");
    let names: Vec<String> =
        get_lib_name_candidates(name).into_iter().filter(|file| file.starts_with(&plain)).collect();
    let path = env::var("LD_LIBRARY_PATH").ok().filter(|path| !path.is_empty());
    let path = path.map_or("which is not set".to_owned(), |path| format!("which is {path}"));
    format!("{} in LD_LIBRARY_PATH, {path}, and in the system's folders", names.join(", "))
}
