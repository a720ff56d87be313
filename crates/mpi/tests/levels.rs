//! Libraries that do not let several threads call them: a stand-in, which a C compiler makes here, grants less than is
//! asked for. Without a compiler these tests pass with a message.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use meshwork_core::{CommError, ReduceOp};
use meshwork_mpi::{Library, MpiError, Options, Reduction, Runtime};

/// A library of the standard interface for one process, which nobody ever sends a message. Its level is `LEVEL`.
const STAND_IN: &str = r#"
#include <string.h>
typedef void *H;
int MPI_Get_library_version(char *text, int *n) { strcpy(text, "Stand-in 1.0"); *n = 12; return 0; }
int MPI_Initialized(int *flag) { *flag = 0; return 0; }
int MPI_Init_thread(int *c, char ***v, int wanted, int *granted) { *granted = LEVEL; return 0; }
int MPI_Comm_rank(H comm, int *rank) { *rank = 0; return 0; }
int MPI_Comm_size(H comm, int *size) { *size = 1; return 0; }
int MPI_Comm_dup(H comm, H *new) { *new = comm; return 0; }
int MPI_Comm_get_attr(H comm, int key, void *value, int *flag) { *flag = 0; return 0; }
int MPI_Type_size(H of, int *size) { *size = of == (H)0x247 ? 1 : of == (H)0x210 ? 4 : 8; return 0; }
int MPI_Irecv(void *into, int n, H of, int from, int tag, H comm, H *request) { *request = into; return 0; }
int MPI_Test(H *request, int *flag, void *status) { *flag = 0; return 0; }
#define DOES_NOTHING(name) int name(void) { return 0; }
DOES_NOTHING(MPI_Finalize) DOES_NOTHING(MPI_Comm_free) DOES_NOTHING(MPI_Comm_set_errhandler)
DOES_NOTHING(MPI_Error_class) DOES_NOTHING(MPI_Error_string) DOES_NOTHING(MPI_Isend) DOES_NOTHING(MPI_Wait)
DOES_NOTHING(MPI_Cancel) DOES_NOTHING(MPI_Comm_group) DOES_NOTHING(MPI_Group_incl) DOES_NOTHING(MPI_Group_free)
DOES_NOTHING(MPI_Comm_create_group) DOES_NOTHING(MPI_Iallreduce) DOES_NOTHING(MPI_Ireduce_scatter_block)
"#;

/// The stand-in that grants the level of this number; `None` without a compiler.
fn stand_in(level: usize) -> Option<Library> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("level-{level}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (source, file): (PathBuf, PathBuf) = (folder.join("mpi.c"), folder.join("libmpi_abi.so.1"));
    fs::write(&source, STAND_IN).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&file).arg(format!("-DLEVEL={level}")).arg(&source);
    let Ok(ended) = compiler.output() else {
        eprintln!("no cc on the path: nothing was tested here");
        return None;
    };
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let library = Library::open(&file).unwrap_or_else(|error| panic!("{error}"));
    fs::remove_dir_all(&folder).unwrap(); // it is loaded
    Some(library)
}

#[test]
fn an_mpi_without_threads_is_refused() {
    for (level, name) in [(0, "THREAD_SINGLE"), (1024, "THREAD_FUNNELED")] {
        let Some(library) = stand_in(level) else { return };
        let error = Runtime::start(library, Options::default()).unwrap_err();
        assert!(matches!(error, MpiError::Threads { .. }));
        let expected = format!(
            "Stand-in 1.0 (libmpi_abi.so.1) grants only {name}; meshwork needs THREAD_SERIALIZED: use a build with threads"
        );
        assert_eq!(error.to_string(), expected);
    }
}

/// One thread at a time calls it. Sums of its own would need more.
#[test]
fn an_mpi_whose_calls_take_turns_is_served() {
    let Some(library) = stand_in(2048) else { return };
    let native = Options { reduction: Reduction::Native, ..Options::default() };
    let error = Runtime::start(library.clone(), native).unwrap_err();
    let expected = "Stand-in 1.0 (libmpi_abi.so.1) grants only THREAD_SERIALIZED; sums by the library need \
                    THREAD_MULTIPLE: use a build with it, or sums by the tree";
    assert_eq!(error.to_string(), expected);

    let runtime = Runtime::start(library, Options { ranks_per_process: 2, ..Options::default() }).unwrap();
    assert_eq!(runtime.describe(), "MPI: Stand-in 1.0 (libmpi_abi.so.1), THREAD_SERIALIZED");
    let sums = runtime.world().run(|world| {
        let mut sum = [world.rank() as f32 + 1.0];
        world.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
        Ok::<_, CommError>(sum[0])
    });
    assert_eq!(sums.unwrap(), [3.0, 3.0]);
}
