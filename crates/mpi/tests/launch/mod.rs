//! Starts a test again as the processes of every installed MPI.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::AtomicBool;

use meshwork_core::launcher::detect;
use meshwork_mpi::{Library, Meeting, MpiError, Options, Runtime};
use meshwork_testkit::comm::processes::free_port;

/// Tells a process that it is one of those that a launcher started: the file of its library.
const LIBRARY: &str = "MESHWORK_TEST_MPI";

/// The libraries: the folder of each, the file, and what it says that it is. `scripts/install_mpi.sh` installs them.
const LIBRARIES: [(&str, &str, &str); 6] = [
    ("mpich", STANDARD, "MPICH 5.0.2"),
    ("mpich", "libmpi.so.12", "MPICH 5.0.2"),
    ("openmpi", OPEN, "Open MPI 5.0.11"),
    ("impi", STANDARD, "Intel(R) MPI Library 2021.19.0 for Linux* OS"),
    ("impi", "libmpi.so.12", "Intel(R) MPI Library 2021.19.0 for Linux* OS"),
    ("openmpi4", OPEN, "Open MPI 4.1.4"),
];

/// The file of the standard ABI.
pub const STANDARD: &str = "libmpi_abi.so.1";
/// The file of Open MPI.
pub const OPEN: &str = "libmpi.so.40";

/// An installed library.
#[derive(Clone, Debug)]
pub struct Mpi {
    pub folder: PathBuf,
    pub file: PathBuf,
    /// Its name and version.
    pub version: &'static str,
    /// Whether its launcher is Open MPI's.
    pub is_open: bool,
}

impl Mpi {
    /// Those that are installed.
    pub fn installed() -> Vec<Mpi> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/mpi");
        let installed = LIBRARIES.iter().filter_map(|(folder, file, version)| {
            let folder = root.join(folder).canonicalize().ok()?;
            let is_open = *file == OPEN;
            let file = folder.join("lib").join(file);
            file.exists().then_some(Mpi { folder, file, version, is_open })
        });
        installed.collect()
    }

    /// Starts MPI in this process.
    pub fn start(&self, options: Options) -> Runtime {
        let library = Library::open(&self.file).unwrap_or_else(|error| panic!("{error}"));
        Runtime::start(library, options).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The command that starts `test` of this program as that many processes; `flags` are the launcher's.
    pub fn command(&self, test: &str, processes: usize, flags: &[&str]) -> Command {
        let mut command = Command::new(self.folder.join("bin/mpirun"));
        if self.is_open {
            command.args(["--oversubscribe", "--bind-to", "none"]);
            command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
            command.env("OPAL_PREFIX", &self.folder).env("PRTE_MCA_prte_tmpdir_base", std::env::temp_dir());
        }
        command.args(flags).args(["-n", &processes.to_string()]);
        command.arg(std::env::current_exe().expect("this program")).args([test, "--exact", "--nocapture"]);
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.folder.join("bin").display()));
        command.env("LD_LIBRARY_PATH", self.folder.join("lib")).env(LIBRARY, &self.file);
        command.stdin(Stdio::null());
        command
    }
}

/// In a process that a launcher started: its library.
pub fn here() -> Option<Mpi> {
    let file = PathBuf::from(std::env::var_os(LIBRARY)?);
    Mpi::installed().into_iter().find(|mpi| mpi.file == file)
}

/// Tells a process that it is one of those that meet over TCP.
const TCP: &str = "MESHWORK_TEST_TCP";

/// In a process that [`over_tcp`] or torchrun started: joins the others.
#[allow(dead_code, reason = "not every test program meets over TCP")]
pub fn met(options: Options) -> Option<Result<Runtime, MpiError>> {
    std::env::var_os(TCP)?;
    let environment: BTreeMap<String, String> = std::env::vars().collect();
    let launch = detect(&environment).unwrap_or_else(|error| panic!("{error}"))?;
    let meeting = Meeting::of(&launch, &environment);
    Some(meeting.and_then(|meeting| Runtime::meet(meeting, options, &AtomicBool::new(false))))
}

/// Starts `test` of this program as these ranks of so many, which meet over TCP by plain variables.
#[allow(dead_code, reason = "not every test program meets over TCP")]
pub fn over_tcp(test: &str, ranks: &[usize], size: usize) -> Vec<Child> {
    let port = free_port().to_string();
    let start = |rank: &usize| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args([test, "--exact", "--nocapture"]).env(TCP, "1");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("this program starts")
    };
    ranks.iter().map(start).collect()
}

/// All that processes wrote.
pub fn text(output: &Output) -> String {
    let mut text = String::new();
    for part in [&output.stdout, &output.stderr] {
        let part = String::from_utf8_lossy(part);
        let lines: Vec<_> = part.lines().collect();
        // The end says what went wrong.
        lines.iter().skip(lines.len().saturating_sub(80)).for_each(|line| _ = writeln!(text, "{line}"));
    }
    text
}
