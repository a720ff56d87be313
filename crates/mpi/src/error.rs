//! Why this process cannot join others.

use std::fmt;
use std::path::PathBuf;

use meshwork_core::CommError;

/// Why this process cannot join others by MPI.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// No library was found.
    #[error("no MPI library: {}; install MPICH, Intel MPI or Open MPI, or give the path of the library", Tried(tried))]
    NotFound {
        /// What was tried, and why it did not do.
        tried: Vec<(PathBuf, String)>,
    },
    /// The library lacks a function or symbol, so it is no MPI of a known kind.
    #[error("{}: {problem}", path.display())]
    Library {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Two threads of a process may not call it.
    #[error("{library} grants only {granted}; meshwork needs THREAD_SERIALIZED: use a build with threads")]
    Threads {
        /// The library.
        library: String,
        /// The level that it grants.
        granted: &'static str,
    },
    /// Communicators for its own reductions are made on threads of their own.
    #[error(
        "{library} grants only {granted}; sums by the library need THREAD_MULTIPLE: use a build with it, or sums by the tree"
    )]
    Native {
        /// The library.
        library: String,
        /// The level that it grants.
        granted: &'static str,
    },
    /// The processes did not find each other.
    #[error("{place}: {problem}")]
    Meeting {
        /// This process.
        place: String,
        /// What went wrong.
        problem: String,
    },
    /// There is no library that adds up.
    #[error("sums by a library need MPI, and there is none ({library}): use comm.reduction = \"tree\"")]
    NoSums {
        /// How the processes are connected.
        library: String,
    },
    /// Something else in this process uses the library.
    #[error("{library} {problem}: a process initialises MPI once")]
    Used {
        /// The library.
        library: String,
        /// What was found.
        problem: &'static str,
    },
    /// A function failed.
    #[error("{function} of {library}: {message} (error {code})")]
    Call {
        /// The library.
        library: String,
        /// The function.
        function: &'static str,
        /// The code that it returned.
        code: i32,
        /// The library's words for it.
        message: String,
    },
    /// A process of the launch does not join.
    #[error(
        "{library} has waited for the other processes for {seconds} s: one of them has ended, hangs, or has loaded another library, of another \
         MPI; what they say tells which"
    )]
    Alone {
        /// The library.
        library: String,
        /// How long it waited.
        seconds: u64,
    },
    /// It was asked to stop before all processes had joined.
    #[error("asked to stop while {library} waited for the other processes")]
    Stopped {
        /// The library.
        library: String,
    },
    /// The thread that talks to MPI did not start.
    #[error("the thread for MPI did not start: {0}")]
    Thread(String),
    /// No rank would be in a process.
    #[error("ranks_per_process = {0}: it must be at least 1, and the same in all processes")]
    RanksPerProcess(usize),
    /// The processes could not compare their clocks.
    #[error(transparent)]
    Comm(#[from] CommError),
}

meshwork_core::debug_as_display!(MpiError);

struct Tried<'a>(&'a [(PathBuf, String)]);

impl fmt::Display for Tried<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (path, problem)) in self.0.iter().enumerate() {
            write!(f, "{}{}: {problem}", if i > 0 { "; " } else { "" }, path.display())?;
        }
        Ok(())
    }
}
