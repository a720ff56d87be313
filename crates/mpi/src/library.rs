//! MPI libraries: where they are, and how each kind of them is called.
//!
//! A library is loaded when it is needed, by its own names, without headers. Three binary interfaces cover those in
//! use. They differ in their constants ([`Abi`]) and not in the functions used here, which are declared once: a handle
//! is a word of a register, of which a library whose handles are C `int`s reads the lower half, and writes no more
//! through a pointer. So every handle is kept in a `usize` that is zero before it is written. That holds on 64-bit
//! little-endian machines; others are refused when they compile this.
//!
//! A status is memory of 64 bytes that is never read: a message says by itself where it comes from and how long it is.
//!
//! More than 400 lines: everything that is unsafe about the library's functions is here, with the three interfaces.

use std::env;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::MpiError;

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("meshwork-mpi calls MPI libraries of 64-bit little-endian machines");

/// A handle of the library: a communicator, a type, a request.
pub(crate) type Handle = usize;

/// The binary interface of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The standard one of MPI 5.0: `libmpi_abi.so.1` of MPICH 5, Intel MPI 2021.19 and Open MPI 6.
    Standard,
    /// MPICH and its relatives: `libmpi.so.12`.
    Mpich,
    /// Open MPI 4 and 5: `libmpi.so.40`.
    OpenMpi,
}

/// What differs between the interfaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Abi {
    pub(crate) world: Handle,
    pub(crate) byte: Handle,
    /// Types whose sizes are known.
    float: Handle,
    double: Handle,
    sum: Handle,
    /// An address that stands for a reduction in place.
    in_place: usize,
    errors_return: Handle,
    pub(crate) any_source: c_int,
    tag_ub: c_int,
    /// SINGLE, FUNNELED, SERIALIZED, MULTIPLE.
    threads: [c_int; 4],
    /// Of Open MPI: the class of the error that a process has failed, and the attribute that says whether the others
    /// then live.
    tolerance: Option<(c_int, c_int)>,
}

/// The level with which several threads call the library at once.
pub(crate) const MULTIPLE: &str = "THREAD_MULTIPLE";

const LEVELS: [&str; 4] = ["THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", MULTIPLE];

/// The longest text that a library writes: the standard interface allows 8192 bytes for a version.
const TEXT: usize = 8192;

/// What a library adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Summed {
    /// f64, and not f32.
    pub(crate) is_double: bool,
    /// Each process gets a part of the sum of its own, and not all of it.
    pub(crate) scatters: bool,
}

/// The memory of a status.
type Status = [u64; 8];

macro_rules! functions {
    ($($field:ident $name:literal ($($argument:ident: $type:ty),*);)*) => {
        /// The functions of the library.
        #[derive(Clone, Copy)]
        struct Functions { $($field: unsafe extern "C" fn($($type),*) -> c_int,)* }

        impl Functions {
            /// The functions of a library, or the name of one that it lacks.
            fn load(library: &libloading::Library) -> Result<Functions, &'static str> {
                // SAFETY: the names are those of MPI, whose standard gives these functions these arguments; for
                // handles see the module. They are called only while the library is loaded: it is never unloaded.
                Ok(unsafe { Functions { $($field: *library.get($name).map_err(|_| $name)?,)* } })
            }
        }
    };
}

functions! {
    get_library_version "MPI_Get_library_version" (text: *mut c_char, length: *mut c_int);
    initialized "MPI_Initialized" (flag: *mut c_int);
    init_thread "MPI_Init_thread" (argc: *mut c_int, argv: *mut *mut *mut c_char, wanted: c_int, granted: *mut c_int);
    finalize "MPI_Finalize" ();
    comm_rank "MPI_Comm_rank" (comm: Handle, rank: *mut c_int);
    comm_size "MPI_Comm_size" (comm: Handle, size: *mut c_int);
    comm_dup "MPI_Comm_dup" (comm: Handle, new: *mut Handle);
    comm_free "MPI_Comm_free" (comm: *mut Handle);
    comm_set_errhandler "MPI_Comm_set_errhandler" (comm: Handle, handler: Handle);
    comm_get_attr "MPI_Comm_get_attr" (comm: Handle, key: c_int, value: *mut *mut c_int, flag: *mut c_int);
    type_size "MPI_Type_size" (of: Handle, size: *mut c_int);
    error_class "MPI_Error_class" (code: c_int, class: *mut c_int);
    error_string "MPI_Error_string" (code: c_int, text: *mut c_char, length: *mut c_int);
    isend "MPI_Isend" (from: *const c_void, count: c_int, of: Handle, to: c_int, tag: c_int, comm: Handle, request: *mut Handle);
    irecv "MPI_Irecv" (into: *mut c_void, count: c_int, of: Handle, from: c_int, tag: c_int, comm: Handle, request: *mut Handle);
    test "MPI_Test" (request: *mut Handle, flag: *mut c_int, status: *mut Status);
    wait "MPI_Wait" (request: *mut Handle, status: *mut Status);
    cancel "MPI_Cancel" (request: *mut Handle);
    comm_group "MPI_Comm_group" (comm: Handle, group: *mut Handle);
    group_incl "MPI_Group_incl" (group: Handle, count: c_int, ranks: *const c_int, new: *mut Handle);
    group_free "MPI_Group_free" (group: *mut Handle);
    comm_create_group "MPI_Comm_create_group" (comm: Handle, group: Handle, tag: c_int, new: *mut Handle);
    iallreduce "MPI_Iallreduce" (from: *const c_void, to: *mut c_void, count: c_int, of: Handle, op: Handle, on: Handle, request: *mut Handle);
    ireduce_scatter "MPI_Ireduce_scatter_block" (from: *const c_void, to: *mut c_void, count: c_int, of: Handle, op: Handle, on: Handle, request: *mut Handle);
}

/// A loaded MPI library. Its `Display` says which: `Open MPI 5.0.11 (libmpi.so.40)`.
#[derive(Clone)]
pub struct Library(Arc<Loaded>);

struct Loaded {
    name: String,
    version: String,
    kind: Kind,
    abi: Abi,
    functions: Functions,
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0.version, self.0.name)
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Settings of Open MPI 5 and 4: the bytes that it sends through shared memory without asking the receiver first. By
/// default a message of 4 KiB with its head is too long, and takes four times as long.
const EAGER_OF_OPEN_MPI: [(&str, &str); 2] =
    [("OMPI_MCA_btl_sm_eager_limit", "8192"), ("OMPI_MCA_btl_vader_eager_limit", "8192")];

/// The names of libraries.
const NAMES: [(Kind, &str); 3] =
    [(Kind::Standard, "libmpi_abi.so.1"), (Kind::Mpich, "libmpi.so.12"), (Kind::OpenMpi, "libmpi.so.40")];

impl Library {
    /// Looks for the library that fits the program which started this process, else for any: by the names of libraries,
    /// where the system looks for them, and beside the `mpirun` in the search path.
    ///
    /// # Errors
    /// If there is none, what was tried.
    pub fn find() -> Result<Library, MpiError> {
        let mut tried = Vec::new();
        for path in candidates() {
            match Library::open(&path) {
                Ok(library) => return Ok(library),
                Err(MpiError::Library { path, problem }) => tried.push((path, problem)),
                Err(other) => return Err(other),
            }
        }
        Err(MpiError::NotFound { tried })
    }

    /// Loads the library of this file or name.
    ///
    /// # Errors
    /// If it cannot be loaded, or is no MPI library of a known kind.
    pub fn open(path: &Path) -> Result<Library, MpiError> {
        let fail = |problem: String| MpiError::Library { path: path.to_owned(), problem };
        // SAFETY: what the library does when it is loaded is what it does in every program that links it.
        let library = unsafe { open_global(path) }.map_err(|error| fail(why(&error, path)))?;
        let functions = Functions::load(&library).map_err(|name| fail(format!("it has no function {name}")))?;
        let mut text = [0u8; TEXT];
        let mut length = 0;
        // SAFETY: this function may be called before MPI is initialised, and writes less than `TEXT` bytes.
        let code = unsafe { (functions.get_library_version)(text.as_mut_ptr().cast(), &mut length) };
        if code != 0 {
            return Err(fail(format!("MPI_Get_library_version returned {code}")));
        }
        let text = text_of(&text, length);
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let kind = kind_of(&file, &text);
        let abi = kind.abi(&library).map_err(|symbol| fail(format!("it has no symbol {symbol}")))?;
        std::mem::forget(library); // its threads and handlers may outlive every use of it
        let loaded = Loaded { name: file, version: short_version(&text), kind, abi, functions };
        Ok(Library(Arc::new(loaded)))
    }

    /// The binary interface by which it is called.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    pub(crate) fn abi(&self) -> &Abi {
        &self.0.abi
    }

    /// A code that a function returned, as an error.
    fn check(&self, function: &'static str, code: c_int) -> Result<(), MpiError> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut length) = ([0u8; TEXT], 0);
        // SAFETY: it writes less than `TEXT` bytes.
        let known = unsafe { (self.0.functions.error_string)(code, text.as_mut_ptr().cast(), &mut length) } == 0;
        let message = if known { text_of(&text, length) } else { "an unknown error".to_owned() };
        Err(MpiError::Call { library: self.to_string(), function, code, message })
    }

    /// Has this process killed when its launcher dies, also while it is stopped: nothing of a job stays behind.
    pub(crate) fn die_with_launcher(&self) {
        #[cfg(target_os = "linux")]
        // SAFETY: it sets a signal of this process. A kernel that refuses leaves it as it was.
        unsafe {
            _ = libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong);
        }
    }

    /// Initialises MPI on this thread: the level of threads that it grants.
    pub(crate) fn init(&self) -> Result<&'static str, MpiError> {
        let (mut done, mut granted) = (0, 0);
        // SAFETY: may be called at any time.
        self.check("MPI_Initialized", unsafe { (self.0.functions.initialized)(&mut done) })?;
        if done != 0 {
            return Err(MpiError::Used { library: self.to_string(), problem: "is initialised already" });
        }
        if self.0.kind == Kind::OpenMpi {
            for (name, value) in EAGER_OF_OPEN_MPI {
                if env::var_os(name).is_none() {
                    // SAFETY: MPI_Init of Open MPI, the next call, changes the environment as well: a program that
                    // reads it on other threads meanwhile could not start MPI.
                    unsafe { env::set_var(name, value) };
                }
            }
        }
        let null = std::ptr::null_mut();
        let wanted = self.0.abi.threads[3];
        // SAFETY: it was not initialised before; no arguments are allowed since MPI 2.
        let code = unsafe { (self.0.functions.init_thread)(std::ptr::null_mut(), null, wanted, &mut granted) };
        self.check("MPI_Init_thread", code)?;
        let level = self.0.abi.threads.iter().rposition(|&level| granted >= level).unwrap_or_default();
        match level {
            0 | 1 => {
                self.finalize();
                Err(MpiError::Threads { library: self.to_string(), granted: LEVELS[level] })
            }
            _ => Ok(LEVELS[level]),
        }
    }

    /// Ends MPI: the last call of all.
    pub(crate) fn finalize(&self) {
        // SAFETY: `Wire` calls it once, on the thread that initialised MPI. A failure at the end changes nothing.
        _ = unsafe { (self.0.functions.finalize)() };
    }

    /// A number that a function writes.
    fn number(
        &self,
        function: &'static str,
        call: impl FnOnce(&Functions, *mut c_int) -> c_int,
    ) -> Result<usize, MpiError> {
        let mut number = 0;
        self.check(function, call(&self.0.functions, &mut number))?;
        Ok(number.max(0) as usize)
    }

    /// The number of this process among those of a communicator, and how many there are.
    pub(crate) fn place(&self, comm: Handle) -> Result<(usize, usize), MpiError> {
        // SAFETY: both write an `int`.
        let rank = self.number("MPI_Comm_rank", |f, number| unsafe { (f.comm_rank)(comm, number) })?;
        // SAFETY: as above.
        let size = self.number("MPI_Comm_size", |f, number| unsafe { (f.comm_size)(comm, number) })?;
        Ok((rank, size))
    }

    /// Compares constants of the interface with what the library says of them.
    pub(crate) fn compare(&self) -> Result<(), MpiError> {
        let Abi { byte, float, double, .. } = self.0.abi;
        for (of, bytes) in [(byte, 1), (float, 4), (double, 8)] {
            // SAFETY: it writes an `int`.
            let size = self.number("MPI_Type_size", |f, number| unsafe { (f.type_size)(of, number) })?;
            if size != bytes {
                let problem = format!("a type of {bytes} bytes has {size}: it is not a library of its name");
                return Err(MpiError::Library { path: self.0.name.clone().into(), problem });
            }
        }
        Ok(())
    }

    /// A copy of a communicator, whose errors are returned.
    pub(crate) fn duplicate(&self, comm: Handle) -> Result<Handle, MpiError> {
        let mut new = 0;
        // SAFETY: the handle is of this library, and the new one is written to a word.
        self.check("MPI_Comm_dup", unsafe { (self.0.functions.comm_dup)(comm, &mut new) })?;
        self.return_errors(new)?;
        Ok(new)
    }

    /// Has the errors of a communicator returned, instead of ending the program.
    pub(crate) fn return_errors(&self, comm: Handle) -> Result<(), MpiError> {
        let handler = self.0.abi.errors_return;
        // SAFETY: both handles are of this library.
        self.check("MPI_Comm_set_errhandler", unsafe { (self.0.functions.comm_set_errhandler)(comm, handler) })
    }

    /// Gives a communicator back.
    pub(crate) fn free(&self, mut comm: Handle) {
        // SAFETY: the handle is of this library, and used no more. A failure at the end changes nothing.
        _ = unsafe { (self.0.functions.comm_free)(&mut comm) };
    }

    /// An attribute of a communicator that is an `int`.
    fn attribute(&self, comm: Handle, key: c_int) -> Option<c_int> {
        let (mut value, mut flag) = (std::ptr::null_mut(), 0);
        // SAFETY: for the keys here it writes the address of an `int`.
        let code = unsafe { (self.0.functions.comm_get_attr)(comm, key, &mut value, &mut flag) };
        // SAFETY: as the flag says, it is that address.
        (code == 0 && flag != 0 && !value.is_null()).then(|| unsafe { *value })
    }

    /// The largest tag of a message.
    pub(crate) fn largest_tag(&self, comm: Handle) -> usize {
        // The standard promises this much where the attribute is missing.
        self.attribute(comm, self.0.abi.tag_ub).unwrap_or_default().max(32767) as usize
    }

    /// Whether the others live, and go on, where a process is lost: Open MPI 5 under `mpirun --with-ft ulfm`.
    pub(crate) fn goes_on_after_losses(&self, comm: Handle) -> bool {
        let ulfm = self.0.version.starts_with("Open MPI 5");
        let key = self.0.abi.tolerance.filter(|_| ulfm).map(|(_, key)| key);
        key.and_then(|key| self.attribute(comm, key)).is_some_and(|on| on != 0)
    }

    /// Starts to send bytes. A message that it cannot send is an error.
    ///
    /// # Safety
    /// The bytes stay where and as they are until [`test`](Self::test) or [`wait`](Self::wait) says that the request is
    /// over.
    pub(crate) unsafe fn send(&self, bytes: &[u8], to: usize, tag: usize, comm: Handle) -> Result<Handle, c_int> {
        let (from, mut request) = (bytes.as_ptr().cast(), 0);
        let (count, to, tag) = (bytes.len() as c_int, to as c_int, tag as c_int);
        let byte = self.0.abi.byte;
        // SAFETY: `bytes` can be read, and the caller keeps them; `Wire` cuts them to less than 2 GiB.
        match unsafe { (self.0.functions.isend)(from, count, byte, to, tag, comm, &mut request) } {
            0 => Ok(request),
            code => Err(code),
        }
    }

    /// Starts to receive bytes, from any process if `from` is `None`.
    ///
    /// # Safety
    /// The bytes stay where they are, and nothing else reads or writes them, until [`test`](Self::test) or
    /// [`wait`](Self::wait) says that the request is over.
    pub(crate) unsafe fn receive(
        &self,
        into: &mut [u8],
        from: Option<usize>,
        tag: usize,
        comm: Handle,
    ) -> Result<Handle, c_int> {
        let (count, mut request) = (into.len() as c_int, 0);
        let from = from.map_or(self.0.abi.any_source, |from| from as c_int);
        let (into, byte) = (into.as_mut_ptr().cast(), self.0.abi.byte);
        // SAFETY: as for `send`.
        match unsafe { (self.0.functions.irecv)(into, count, byte, from, tag as c_int, comm, &mut request) } {
            0 => Ok(request),
            code => Err(code),
        }
    }

    /// A communicator of some processes of the world, whose errors are returned: all of them call this, with the same
    /// list and tag, and wait for each other.
    pub(crate) fn communicator_of(&self, processes: &[usize], tag: usize) -> Result<Handle, c_int> {
        let done = |code: c_int| if code == 0 { Ok(()) } else { Err(code) };
        let ranks: Vec<c_int> = processes.iter().map(|&process| process as c_int).collect();
        let (f, Abi { world, errors_return, .. }) = (&self.0.functions, self.0.abi);
        let (mut all, mut group, mut comm) = (0, 0, 0);
        // SAFETY: the handles are of this library, each is written to a word, and there are as many ranks as it says.
        unsafe {
            done((f.comm_group)(world, &mut all))?;
            done((f.group_incl)(all, ranks.len() as c_int, ranks.as_ptr(), &mut group))?;
            done((f.comm_create_group)(world, group, tag as c_int, &mut comm))?;
            done((f.comm_set_errhandler)(comm, errors_return))?;
            [all, group].iter_mut().try_for_each(|group| done((f.group_free)(group)))?;
        }
        Ok(comm)
    }

    /// Starts a sum over the processes of a communicator: in place if it does not scatter, else of an input.
    ///
    /// # Safety
    /// Until [`test`](Self::test) says that the request is over, input and output stay where they are, nothing writes
    /// the input, and nothing else reads or writes the output.
    pub(crate) unsafe fn sum(
        &self,
        summed: Summed,
        input: Option<&[u8]>,
        into: &mut [u8],
        comm: Handle,
    ) -> Result<Handle, c_int> {
        let (f, abi) = (&self.0.functions, self.0.abi);
        let reduce = if summed.scatters { f.ireduce_scatter } else { f.iallreduce };
        let (of, bytes) = if summed.is_double { (abi.double, 8) } else { (abi.float, 4) };
        let from = input.map_or(std::ptr::without_provenance(abi.in_place), |input| input.as_ptr().cast());
        let (count, mut request) = ((into.len() / bytes) as c_int, 0);
        // SAFETY: the caller keeps both; the plan of an operation gives it as many elements as it counts, less than
        // 2^31.
        match unsafe { reduce(from, into.as_mut_ptr().cast(), count, of, abi.sum, comm, &mut request) } {
            0 => Ok(request),
            code => Err(code),
        }
    }

    /// Whether a request is over, which then must not be used any more; or the code with which it failed.
    pub(crate) fn test(&self, request: &mut Handle) -> Result<bool, c_int> {
        let (mut flag, mut status): (c_int, Status) = (0, [0; 8]);
        // SAFETY: `Wire` passes a request of this library that is not over, and a status has at most 64 bytes.
        match unsafe { (self.0.functions.test)(request, &mut flag, &mut status) } {
            0 => Ok(flag != 0),
            code => Err(code),
        }
    }

    /// Cancels a receive, and waits until it is over.
    pub(crate) fn cancel(&self, request: &mut Handle) {
        let mut status: Status = [0; 8];
        // SAFETY: as for `test`. A failure at the end changes nothing.
        unsafe {
            if (self.0.functions.cancel)(request) == 0 {
                _ = (self.0.functions.wait)(request, &mut status);
            }
        }
    }

    /// The words of a code with which a message failed; `None` if it says that the process of the other end has ended.
    pub(crate) fn failure(&self, code: c_int) -> Option<String> {
        let mut class = code;
        // SAFETY: it writes an `int`. If it fails, the code is its own class.
        _ = unsafe { (self.0.functions.error_class)(code, &mut class) };
        let ended = self.0.abi.tolerance.is_some_and(|(failed, _)| failed == class);
        (!ended).then(|| match self.check("MPI", code) {
            Err(MpiError::Call { message, .. }) => message,
            other => other.err().map_or_else(String::new, |error| error.to_string()),
        })
    }
}

/// Loads a library whose symbols others may use: plug-ins of Open MPI need those of the library.
///
/// # Safety
/// As for [`libloading::Library::new`].
unsafe fn open_global(path: &Path) -> Result<libloading::Library, libloading::Error> {
    #[cfg(unix)]
    {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
        // SAFETY: the caller's promise is the same.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map(Into::into)
    }
    #[cfg(not(unix))]
    // SAFETY: the caller's promise is the same.
    unsafe {
        libloading::Library::new(path)
    }
}

/// Why a library was not loaded, in the system's words, which begin with its path.
fn why(error: &libloading::Error, path: &Path) -> String {
    let words = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    words.strip_prefix(&format!("{}: ", path.display())).map_or(words.clone(), str::to_owned)
}

fn text_of(text: &[u8], length: c_int) -> String {
    let text = &text[..text.len().min(length.max(0) as usize)];
    String::from_utf8_lossy(text).trim_end_matches('\0').trim().to_owned()
}

/// The interface of a library, by its name; of a name that says nothing, by its version.
fn kind_of(file: &str, version: &str) -> Kind {
    let named = NAMES.iter().find(|(_, name)| file.starts_with(name.trim_end_matches(char::is_numeric)));
    match named {
        Some((Kind::Standard, _)) => Kind::Standard,
        _ if version.starts_with("Open MPI") => Kind::OpenMpi,
        _ => Kind::Mpich,
    }
}

/// `Open MPI 5.0.11` of `Open MPI v5.0.11, package: ...`; `MPICH 5.0.2` of `MPICH Version: 5.0.2 ...`.
fn short_version(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let line = line.split(',').next().unwrap_or_default().replace("Version:", "");
    let words = line.split_whitespace().map(|word| match word.strip_prefix('v') {
        Some(number) if number.starts_with(|c: char| c.is_ascii_digit()) => number,
        _ => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Files and names to try: of the library that the launcher's variables speak of first.
fn candidates() -> Vec<PathBuf> {
    let open_mpi = env::var_os("OMPI_COMM_WORLD_SIZE").is_some();
    let mut names = NAMES;
    names.sort_by_key(|(kind, _)| (*kind == Kind::OpenMpi) != open_mpi);
    let mut paths: Vec<PathBuf> = Vec::new();
    let folders = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let beside = folders.iter().find(|folder| folder.join("mpirun").exists());
    // The library of the `mpirun` that is found first is more likely the one that started this process.
    for folder in beside.iter().flat_map(|bin| [bin.join("../lib"), bin.join("../lib64")]) {
        paths.extend(names.iter().map(|(_, name)| folder.join(name)).filter(|path| path.exists()));
    }
    paths.extend(names.iter().map(|(_, name)| PathBuf::from(name)));
    paths
}

impl Kind {
    /// The constants of the interface. Handles of Open MPI are addresses of symbols: the name of one that is missing.
    fn abi(self, library: &libloading::Library) -> Result<Abi, &'static str> {
        let symbol = |name: &'static str| {
            // SAFETY: only the address is taken.
            let found = unsafe { library.get::<*const c_void>(name).map(|symbol| symbol.try_as_raw_ptr()) };
            found.ok().flatten().map(|at| at as Handle).ok_or(name)
        };
        Ok(match self {
            Kind::Standard => Abi {
                world: 0x101,
                byte: 0x247,
                float: 0x210,
                double: 0x214,
                sum: 0x21,
                in_place: 1,
                errors_return: 0x143,
                any_source: -1,
                tag_ub: 501,
                threads: [0, 1024, 2048, 4096],
                tolerance: None,
            },
            Kind::Mpich => Abi {
                world: 0x4400_0000,
                byte: 0x4c00_010d,
                float: 0x4c00_040a,
                double: 0x4c00_080b,
                sum: 0x5800_0003,
                in_place: usize::MAX,
                errors_return: 0x5400_0001,
                any_source: -2,
                tag_ub: 0x6440_0001,
                threads: [0, 1, 2, 3],
                tolerance: None,
            },
            Kind::OpenMpi => Abi {
                world: symbol("ompi_mpi_comm_world")?,
                byte: symbol("ompi_mpi_byte")?,
                float: symbol("ompi_mpi_float")?,
                double: symbol("ompi_mpi_double")?,
                sum: symbol("ompi_mpi_op_sum")?,
                in_place: 1,
                errors_return: symbol("ompi_mpi_errors_return")?,
                any_source: -1,
                tag_ub: 0,
                threads: [0, 1, 2, 3],
                tolerance: Some((75, 12)),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_short() {
        assert_eq!(short_version("Open MPI v5.0.11, package: Open MPI root@b, ident: 5.0.11"), "Open MPI 5.0.11");
        assert_eq!(short_version("MPICH Version:      5.0.2\nMPICH Release date: unreleased"), "MPICH 5.0.2");
        assert_eq!(
            short_version("Intel(R) MPI Library 2021.19 for Linux* OS"),
            "Intel(R) MPI Library 2021.19 for Linux* OS"
        );
    }

    #[test]
    fn names_tell_interfaces() {
        assert_eq!(kind_of("libmpi_abi.so.1", "Open MPI v6.0"), Kind::Standard);
        assert_eq!(kind_of("libmpi.so.12", "MPICH Version: 4.3"), Kind::Mpich);
        assert_eq!(kind_of("libmpi.so.40", "Open MPI v4.1.4"), Kind::OpenMpi);
        assert_eq!(kind_of("libmpi.so", "Open MPI v4.1.4"), Kind::OpenMpi);
    }

    #[test]
    fn what_is_no_library_is_named() {
        let error = Library::open(Path::new("/no/such/libmpi.so.40")).unwrap_err().to_string();
        assert!(error.starts_with("/no/such/libmpi.so.40: "), "{error}");
        let error = Library::open(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("MPI_Get_library_version"), "{error}");
    }
}
