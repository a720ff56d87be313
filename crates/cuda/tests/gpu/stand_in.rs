//! The driver over a stand-in for NVIDIA's libraries (`stand_in.cpp`), which this program finds when it starts itself
//! once more.

use meshwork_core::DType;
use meshwork_cuda::device::Products;
use meshwork_cuda::driver::{Argument, DriverError};
use meshwork_cuda::{CudaDevice, Driver, Gpu};
use meshwork_kernels::host::{Host, HostError};
use meshwork_kernels::{F16, HEADERS, Kernel, SOURCES, TF32, kernel};
use meshwork_tensor::Device;
use meshwork_tensor::kernel::Gemm;
use meshwork_testkit::sweeps;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::thread;
use tempfile::TempDir;

/// The libraries of the stand-in.
struct StandIn {
    folder: TempDir,
    /// The kernels for the host, and the variable that tells the stand-in where they are.
    kernels: [(&'static str, PathBuf); 3],
}

/// The library under all of these names, compiled once for all tests: that takes longer than most of them.
fn compiled() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand_in.so");
        let new = library.with_extension(std::process::id().to_string());
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/stand_in.cpp");
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]);
        let ended = compiler.arg(source).arg("-o").arg(&new).arg("-ldl").output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        fs::rename(new, &library).unwrap();
        library
    })
}

/// The libraries of kernels for the host in a folder, compiled where they are missing: the usual ones, and those for
/// other operands, which have the same names.
fn kernels(folder: &Path) -> Result<[(&'static str, PathBuf); 3], HostError> {
    let of = |forms: &[Kernel]| {
        let sources: BTreeMap<&str, &str> = forms.iter().map(|form| (form.source.name, form.source.text)).collect();
        let files: Vec<_> = HEADERS.iter().map(|header| (header.name, header.text)).chain(sources).collect();
        Host::compile(folder, &files, forms, false)
    };
    let [usual, f16, tf32] = [Host::new(folder)?, of(&F16)?, of(&TF32)?].map(|host| host.path().to_owned());
    Ok([("STAND_IN_KERNELS", usual), ("STAND_IN_KERNELS_F16", f16), ("STAND_IN_KERNELS_TF32", tf32)])
}

/// For a check of a GPU on the emulator: compiles the libraries into the folder that a variable names, and prints the
/// variables that the stand-in reads.
#[test]
fn makes_kernels() {
    let Some(folder) = std::env::var_os("STAND_IN_MAKES") else { return };
    let kernels = kernels(Path::new(&folder)).unwrap_or_else(|error| panic!("{error}"));
    kernels.iter().for_each(|(name, path)| println!("{name}={}", path.display()));
}

impl StandIn {
    /// `None`, and a line that says why, without g++ or on another CPU than x86-64.
    fn new(libraries: &[&str]) -> Option<Self> {
        let caches = Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches/meshwork/kernels");
        let kernels = match kernels(&caches) {
            Err(error @ (HostError::NoCompiler | HostError::Processor(_))) => {
                eprintln!("left out: {error}");
                return None;
            }
            found => found.unwrap_or_else(|error| panic!("{error}")),
        };
        let folder = tempfile::tempdir().unwrap();
        symlink(compiled(), folder.path().join("stand_in.so")).unwrap();
        for library in libraries {
            symlink("stand_in.so", folder.path().join(format!("lib{library}"))).unwrap();
        }
        Some(Self { folder, kernels })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs tests of this program on the stand-in. What they wrote, and whether they passed.
    fn run(&self, tests: &[&str], settings: &[(&str, &str)]) -> (String, bool) {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(tests).args(["--nocapture"]).env("RUST_TEST_THREADS", "2");
        program.env("LD_LIBRARY_PATH", self.folder.path()).envs(self.kernels.iter().map(|(name, path)| (name, path)));
        program.env("STAND_IN_CACHE", self.path("cubins")).env("STAND_IN_REPORT", self.path("report"));
        let ran = program.envs(settings.iter().copied()).output().unwrap();
        (String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned(), ran.status.success())
    }

    /// The lines of the report so far.
    fn report(&self) -> Vec<String> {
        fs::read_to_string(self.path("report")).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// Why no GPU is opened.
    #[track_caller]
    fn refusal(&self, settings: &[(&str, &str)]) -> String {
        self.refusal_of("stand_in::opens_gpu_1", settings)
    }

    /// What a test says is refused.
    #[track_caller]
    fn refusal_of(&self, test: &str, settings: &[(&str, &str)]) -> String {
        let (told, passed) = self.run(&["--exact", test], settings);
        assert!(passed, "{told}");
        let line = told.lines().find_map(|line| line.split_once("refused: "));
        line.unwrap_or_else(|| panic!("nothing was refused: {told}")).1.to_owned()
    }
}

/// For [`StandIn::refusal_of`]: a kernel that fails, because it reads the memory of a GPU that was not opened to it,
/// and a sound one behind it; the first error of the two.
#[test]
fn fails_in_a_kernel() {
    let Some((gpu, other)) = crate::gpu().zip(crate::gpu_in_turn(1)) else { return };
    let (stream, far, near) = (gpu.stream().unwrap(), other.alloc(256).unwrap(), gpu.alloc(256).unwrap());
    let launch = |name, args: &[Argument]| {
        let kernel = kernel(name).unwrap();
        gpu.launch(stream, kernel, kernel.geometry.launch(4, 0).unwrap(), args)
    };
    let failing = launch("add_assign", &[near.into(), far.into(), 4_usize.into()]);
    let sound = || launch("exp_forward", &[near.into(), near.into(), 4_usize.into()]);
    let error = failing.and_then(|()| sound()).unwrap_err();
    eprintln!("refused: {error}");
    let later = [sound().unwrap_err(), gpu.record(stream).unwrap_err(), gpu.alloc(16).unwrap_err()];
    assert!(later.iter().all(|error| matches!(error, DriverError::Found { .. })), "it stays: {later:?}");
}

/// An error that a launch returns may be of an earlier kernel: it names the launch as the place where it was found. A
/// GPU that waits after each call names whose it is.
#[test]
fn the_kernel_that_failed_is_named_and_no_other() {
    let Some(stand_in) = StandIn::new(&ALL) else { return };
    let test = "stand_in::fails_in_a_kernel";
    let why = "CUDA_ERROR_ILLEGAL_ADDRESS (says the stand-in)";
    assert_eq!(
        stand_in.refusal_of(test, &[("STAND_IN_AHEAD", "1")]),
        format!(
            "found at the launch of exp_forward: cuLaunchKernel: {why}; it is of that or of work that was queued \
             before, and cuda.launch_blocking=true names whose"
        )
    );
    let blocking = ("MESHWORK_LAUNCH_BLOCKING", "1");
    assert_eq!(stand_in.refusal_of(test, &[blocking]), format!("kernel add_assign failed: {why}"));
    // It changes no number, and captures nothing.
    let (told, passed) = stand_in.run(&["driver::", "ops::products"], &[blocking]);
    assert!(passed && !told.contains("SKIPPED"), "{told}");
}

const ALL: [&str; 3] = ["cuda.so", "nvrtc.so", "cublasLt.so"];
const WITH_NCCL: [&str; 4] = ["cuda.so", "nvrtc.so", "cublasLt.so", "nccl.so.2"];

/// For [`StandIn::refusal`]: what there is to say of GPU 1.
#[test]
fn opens_gpu_1() {
    match Gpu::open(1, &crate::kernels(), Products::OfTheLibrary).map(|gpu| gpu.compile_all()) {
        Ok(Ok(())) => eprintln!("opened"),
        Ok(Err(error)) => eprintln!("refused: {}", error.to_string().replace('\n', " / ")),
        Err(error) => eprintln!("refused: {error}"),
    }
}

/// For [`StandIn::refusal_of`]: a product of the library, which needs memory of its own.
#[test]
fn multiplies() {
    let Some(gpu) = crate::gpu() else { return };
    let device = CudaDevice::new(Arc::new(gpu), Products::OfTheLibrary).unwrap();
    let (x, mut y) = (device.zeros(DType::F32, 64).unwrap(), device.zeros(DType::F32, 64).unwrap());
    match device.matmul().unwrap().gemm(Gemm::linear(8, 8, 8), &x, &x, &mut y, 0) {
        Ok(()) => eprintln!("multiplied"),
        Err(error) => eprintln!("refused: {error}"),
    }
}

/// Two processes that start together compile each file once: a file has a lock, and the second finds the result.
#[test]
fn processes_compile_each_file_once() {
    let Some(stand_in) = StandIn::new(&ALL) else { return };
    let open = || stand_in.run(&["--exact", "stand_in::opens_gpu_1"], &[]);
    let ran = thread::scope(|scope| [(); 2].map(|()| scope.spawn(open)).map(|process| process.join().unwrap()));
    assert!(ran.iter().all(|(told, passed)| *passed && told.contains("opened")), "{ran:?}");
    let compiled: Vec<_> = stand_in.report().into_iter().filter(|line| line.starts_with("compiles ")).collect();
    assert_eq!(compiled.len(), SOURCES.len(), "{compiled:?}");
}

/// Compute, copies, collectives, offload: other ranks wait for collectives.
#[test]
fn streams_of_collectives_have_the_highest_priority() {
    let Some(stand_in) = StandIn::new(&ALL) else { return };
    let (told, passed) = stand_in.run(&["--exact", "stand_in::multiplies"], &[]);
    assert!(passed && told.contains("multiplied"), "{told}");
    let report = stand_in.report();
    let priorities: Vec<_> = report.iter().filter_map(|line| line.strip_prefix("stream of priority ")).collect();
    assert_eq!(priorities, ["0", "0", "-5", "0"]);
}

/// Operations and whole steps have the CPU's bits, whatever is given out is given back, and each file of kernels is
/// compiled once.
#[test]
fn all_tests_pass_on_the_stand_in() {
    let Some(stand_in) = StandIn::new(&ALL) else { return };
    let elsewhere = ["stand_in::", "tiny", "nccl::", "joins::"];
    // The emulator has run these already; in a sweep they run here too.
    let long = [
        "attention_of_runs",
        "attention_of_some",
        "attention_with",
        "every_update_rule",
        "grouped_attention",
        "on_tensor_cores",
        "windows",
    ];
    let left_out = elsewhere.into_iter().chain(long.into_iter().filter(|_| !sweeps()));
    let (told, passed) = stand_in.run(&left_out.flat_map(|name| ["--skip", name]).collect::<Vec<_>>(), &[]);
    assert!(passed && !told.contains("SKIPPED"), "{told}");
    let report = stand_in.report();
    let left = "left: 0 allocations, 0 pinned, 0 events, 0 streams, 0 modules, 0 graphs, 0 queued, 0 communicators";
    let (mut ends, mut compiled, mut peers) = (0, BTreeSet::new(), BTreeSet::new());
    for line in report.iter().filter(|line| !line.starts_with("stream of priority ")) {
        if line.starts_with("left: ") {
            ends += 1;
            assert_eq!(line, left);
        } else if let Some(pair) = line.strip_prefix("peers: ") {
            peers.insert(pair);
        } else {
            assert!(compiled.insert(line.clone()), "compiled twice: {line}");
        }
    }
    assert!(ends > 0 && compiled.len() > 8, "{report:?}");
    assert_eq!(peers, BTreeSet::from(["0 reads 1", "1 reads 0"]));
    assert!(compiled.iter().all(|line| {
        line.ends_with(
            "-fmad=false -prec-div=true -prec-sqrt=true -ftz=false -default-device --gpu-architecture=sm_90a",
        )
    }));

    // What is on disk is not compiled again, but for another NVRTC; what is damaged there is.
    let compiles = |settings: &[(&str, &str)]| {
        let before = stand_in.report().len();
        let (told, passed) = stand_in.run(&["--exact", "stand_in::opens_gpu_1"], settings);
        assert!(passed && told.contains("opened"), "{told}");
        stand_in.report()[before..].iter().filter(|line| line.starts_with("compiles ")).count()
    };
    compiles(&[]);
    assert_eq!(compiles(&[]), 0);
    assert_eq!(compiles(&[("STAND_IN_NVRTC", "12")]), SOURCES.len());
    // Each has a lock beside it.
    let mut files = fs::read_dir(stand_in.path("cubins")).unwrap().map(|file| file.unwrap().path());
    fs::write(files.find(|file| file.extension().is_some_and(|of| of == "cubin")).unwrap(), "damaged").unwrap();
    assert_eq!(compiles(&[]) + compiles(&[("STAND_IN_NVRTC", "12")]), 1);
}

/// Where two GPUs cannot be peers, copies of the driver go between them.
#[test]
fn ranks_are_on_gpus_that_are_no_peers() {
    let Some(stand_in) = StandIn::new(&ALL) else { return };
    let tests = ["collectives::", "train::meshes"];
    let (told, passed) = stand_in.run(&tests, &[("STAND_IN_PEERS", "0")]);
    assert!(passed && told.contains("3 passed") && !told.contains("SKIPPED"), "{told}");
    let report = stand_in.report();
    assert!(report.iter().all(|line| !line.starts_with("peers: ")), "{report:?}");
}

/// What the driver does not make a graph of is queued call by call.
#[test]
fn work_is_done_where_there_are_no_graphs() {
    let Some(stand_in) = StandIn::new(&ALL) else { return };
    for graphs in ["0", "1"] {
        let tests = ["--exact", "replay::events_come_after_what_was_held_back"];
        let (told, passed) = stand_in.run(&tests, &[("STAND_IN_GRAPHS", graphs)]);
        assert!(passed && told.contains("1 passed") && !told.contains("SKIPPED"), "{told}");
    }
}

#[test]
fn what_is_missing_or_too_old_is_named() {
    let Some(all) = StandIn::new(&ALL) else { return };
    assert_eq!(
        all.refusal(&[("STAND_IN_VERSION", "11080")]),
        "the CUDA driver is too old: it is of CUDA 11.8, and CUDA 12.0 or newer is needed"
    );
    assert_eq!(
        all.refusal(&[("STAND_IN_VERSION", "12040")]),
        "the CUDA driver is too old: it is of CUDA 12.4, and NVRTC is 13.0; update the driver or use an older NVRTC"
    );
    assert_eq!(all.refusal(&[("STAND_IN_DEVICES", "1")]), "there is no GPU 1: this machine has 1, numbered from 0");
    assert_eq!(all.refusal(&[("STAND_IN_DEVICES", "0")]), "there is no GPU 1: this machine has 0, numbered from 0");
    let old = "GPU 1 (stand-in) is too old: it has compute capability 7.5, and kernels need 8.0 or newer; use another one with --device cuda:N, or cpu";
    assert_eq!(all.refusal(&[("STAND_IN_CAPABILITY", "75")]), old);
    assert_eq!(
        all.refusal(&[("STAND_IN_CAPABILITY", "121"), ("STAND_IN_NEWEST", "100")]),
        "NVRTC 13.0 does not compile for GPU 1 (stand-in), of sm_121a: it knows sm_75 to sm_100; install another NVRTC"
    );
    assert_eq!(
        all.refusal(&[("STAND_IN_REFUSES", "gelu.cu")]),
        "gelu.cu does not compile: NVRTC_ERROR_COMPILATION / gelu.cu(1): error: the stand-in refuses it"
    );
    for capability in ["80", "89", "90", "121"] {
        let (told, passed) = all.run(&["--exact", "stand_in::opens_gpu_1"], &[("STAND_IN_CAPABILITY", capability)]);
        assert!(passed && told.contains("opened"), "{told}");
    }
    let full = all.refusal_of("stand_in::multiplies", &[("STAND_IN_MEMORY", "1000000")]);
    assert!(
        full.starts_with("32.0 MiB of other more: device cuda: the device has no memory for 33554432 bytes more: "),
        "{full}"
    );
    assert!(full.ends_with("are in use by all ranks; this rank's buffers hold other 512 B"), "{full}");
    for (there, missing) in [
        (&[][..], "CUDA driver found (looked for libcuda.so, libcuda.so.13, "),
        (&["cuda.so"], "NVRTC, which compiles the kernels, found (looked for libnvrtc.so, libnvrtc.so.13, "),
        (
            &["cuda.so", "nvrtc.so"],
            "cuBLASLt, which computes products, found (looked for libcublasLt.so, libcublasLt.so.13, ",
        ),
    ] {
        let Some(some) = StandIn::new(there) else { return };
        let (told, passed) = some.run(&["--exact", "stand_in::opens_gpu_1"], &[]);
        assert!(passed, "{told}");
        let Some((_, refusal)) = told.lines().find_map(|line| line.split_once("refused: no ")) else {
            eprintln!("left out: this machine has the library itself");
            continue;
        };
        let place =
            format!(" in LD_LIBRARY_PATH, which is {}, and in the system's folders)", some.folder.path().display());
        assert!(refusal.starts_with(missing) && refusal.contains(&place), "{refusal}");
    }
}

/// Communicators are used as NCCL wants: the suite of communicators and faults, on as many GPUs as ranks. Nothing is
/// left, also after faults. One test at a time: GPUs of one process share the contexts of their cards, so that the end
/// of one waits for work of the other, which may wait for a rank.
#[test]
fn ranks_join_by_nccl() {
    let Some(stand_in) = StandIn::new(&WITH_NCCL) else { return };
    let (told, passed) = stand_in.run(&["nccl::", "joins::"], &[("STAND_IN_DEVICES", "5"), ("RUST_TEST_THREADS", "1")]);
    assert!(passed && !told.contains("SKIPPED") && told.contains("6 passed"), "{told}\n{:?}", stand_in.report());
    let report = stand_in.report();
    let misuse: Vec<_> = report.iter().filter(|line| line.starts_with("NCCL: ")).collect();
    assert_eq!(misuse, ["NCCL: an unknown id, rank or configuration"]);
    let left = report.iter().filter(|line| line.starts_with("left: "));
    assert!(left.clone().all(|line| line.ends_with(" 0 queued, 0 communicators")), "{:?}", left.collect::<Vec<_>>());
}

/// For [`StandIn::refusal_of`]: which NCCL there is.
#[test]
fn finds_nccl() {
    match meshwork_cuda::gpu::nccl() {
        Ok(found) => eprintln!("refused: no, {found}"),
        Err(error) => eprintln!("refused: {error}"),
    }
}

/// Where the loader looks, where a variable says, and among the packages of Python; a version that is too old, and a
/// file that is no NCCL.
#[test]
fn nccl_is_found_where_wheels_and_distributions_have_it() {
    let Some(stand_in) = StandIn::new(&WITH_NCCL) else { return };
    let found = |settings: &[(&str, &str)]| stand_in.refusal_of("stand_in::finds_nccl", settings);
    assert_eq!(found(&[]), "no, NCCL 2.28.9 (libnccl.so.2)");
    let old = found(&[("STAND_IN_NCCL", "21705")]);
    let needed =
        "libnccl.so.2 is NCCL 2.17.5, and NCCL 2.18.0 or newer is needed: install libnccl2 of NVIDIA's packages";
    assert!(old.starts_with(needed), "{old}");

    // Without it in the loader's folders.
    let Some(bare) = StandIn::new(&ALL) else { return };
    let wheel = bare.path("environment/lib/python3.12/site-packages/nvidia/nccl/lib");
    fs::create_dir_all(&wheel).unwrap();
    let environment = bare.path("environment").display().to_string();
    let found = |settings: &[(&str, &str)]| bare.refusal_of("stand_in::finds_nccl", settings);
    let missing = found(&[("VIRTUAL_ENV", ""), ("CONDA_PREFIX", "")]);
    if missing.starts_with("no, NCCL") {
        return eprintln!("left out: this machine has the library itself");
    }
    let place = format!("libnccl.so.2, libnccl.so in LD_LIBRARY_PATH, which is {}, ", bare.folder.path().display());
    assert!(missing.starts_with("no NCCL found, which connects GPUs of several processes (looked for "), "{missing}");
    assert!(missing.contains(&place) && missing.ends_with("the folder of another one to LD_LIBRARY_PATH"), "{missing}");
    let of_wheel = wheel.join("libnccl.so.2");
    fs::write(&of_wheel, "no library").unwrap();
    let refused = found(&[("VIRTUAL_ENV", &environment)]);
    assert!(refused.starts_with(&format!("{} cannot be used: ", of_wheel.display())), "{refused}");
    fs::remove_file(&of_wheel).unwrap();
    symlink(bare.path("stand_in.so"), &of_wheel).unwrap();
    assert_eq!(found(&[("VIRTUAL_ENV", &environment)]), "no, NCCL 2.28.9 (libnccl.so.2)");
}
