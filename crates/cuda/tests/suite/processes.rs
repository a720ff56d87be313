//! NCCL between processes, which the emulator has on one host: the suite of communicators, and processes that end or
//! stand still while others wait for their devices.

use crate::nccl::OnDevice;
use meshwork_core::{Buffer, Communicator, DType, Group, ReduceOp, RunError, World};
use meshwork_cuda::device::{Products, Reduction};
use meshwork_cuda::{CudaDevice, Driver, Emulator, Order};
use meshwork_mpi::{Meeting, Options, Runtime};
use meshwork_tensor::{Device, Error};
use meshwork_testkit::comm::processes::{Place, run};
use meshwork_testkit::comm::{Body, Worlds, conformance_of};
use meshwork_testkit::sweeps;
use std::process::{Command, id};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, sleep};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(2);

/// Joins the processes of a test.
fn joined(Place { rank, ranks, port }: Place, timeout: Duration) -> Runtime {
    let meeting = Meeting { rank, size: ranks, host: "127.0.0.1".to_owned(), port, key: None };
    let (options, stop) = (Options { timeout, ..Options::default() }, AtomicBool::new(false));
    Runtime::meet(meeting, options, &stop).unwrap_or_else(|error| panic!("{error}"))
}

/// The emulated device of a process, which is another card than those of the others.
fn device(number: usize) -> (Arc<CudaDevice>, Arc<Emulator>) {
    let kernels = crate::kernels().expect("g++, which the first process has found");
    let machine = Emulator::machine(kernels, 1 << 30, Order::Seeded(2), number + 1, |_, _| true);
    let emulator = Arc::new(machine[number].clone().among_processes());
    (Arc::new(CudaDevice::new(emulator.clone(), Products::OfTheCpu).unwrap()), emulator)
}

/// Worlds of these processes over NCCL.
struct OverProcesses {
    runtime: Runtime,
    how: Reduction,
}

impl Worlds for OverProcesses {
    fn most(&self) -> usize {
        self.runtime.ranks()
    }

    fn programs(&self) -> u64 {
        if sweeps() { 100 } else { 5 }
    }

    fn short(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// The unique id comes from rank 0.
    fn joined(&self) -> &str {
        "last in world #2 broadcast(u8, 128, root 0)"
    }

    fn run(&self, ranks: usize, timeout: Duration, body: &Body<'_>) -> Option<Result<(), RunError>> {
        let world = self.runtime.world_of(ranks, timeout)?;
        let (device, _) = device(self.runtime.process());
        let ran = world.run(|world| {
            let inner = device.nccl(world.communicator().clone(), self.how)?;
            body(Group::from(Arc::new(OnDevice { inner, device: device.clone() }) as Arc<dyn Communicator>))
        });
        Some(ran.map(drop))
    }

    fn world(&self, _: usize, _: Duration) -> Option<World> {
        None
    }
}

/// Runs a group of the suite in four processes.
fn conforms(test: &str, group: &str, how: Reduction) {
    if crate::kernels().is_none() {
        return;
    }
    let exits = run(4, test, |place| {
        conformance_of(group, &OverProcesses { runtime: joined(place, Duration::from_secs(60)), how });
    });
    for (rank, exit) in exits.iter().flatten().enumerate() {
        assert_eq!(exit.code, Some(0), "rank {rank}: {}", exit.errors);
    }
}

#[test]
fn programs_with_faults_end() {
    conforms("processes::programs_with_faults_end", "programs", Reduction::Tree);
}

#[test]
fn calls_are_named() {
    conforms("processes::calls_are_named", "calls", Reduction::Library);
}

#[test]
fn faults_are_told_to_all() {
    conforms("processes::faults_are_told_to_all", "faults", Reduction::Tree);
}

/// In a sweep alone.
#[test]
fn results_and_operations_in_flight() {
    if sweeps() {
        conforms("processes::results_and_operations_in_flight", "results", Reduction::Library);
    }
}

/// Both connected, and the hub took the end of the connection that nobody used for the end of the process.
#[test]
fn ranks_of_a_process_connect_to_a_hub_once() {
    let Some(kernels) = crate::kernels() else { return };
    let machine = Emulator::machine(kernels, 1 << 30, Order::Seeded(0), 2, |_, _| true);
    let ranks: Vec<Emulator> = machine.into_iter().map(Emulator::among_processes).collect();
    for turn in 0..50 {
        let (id, both) = (ranks[0].nccl().unwrap().unique_id().unwrap(), Barrier::new(2));
        let join = |rank: usize| {
            let nccl = ranks[rank].nccl().unwrap();
            both.wait();
            let comm = nccl.join(&id, rank, 2).unwrap_or_else(|error| panic!("turn {turn}, rank {rank}: {error}"));
            nccl.split(comm, Some(0), rank).and_then(|_| nccl.health(comm))
        };
        thread::scope(|scope| {
            let [one, other] = [0, 1].map(|rank| {
                let join = &join;
                scope.spawn(move || join(rank))
            });
            assert_eq!([one.join().unwrap(), other.join().unwrap()], [Ok(()), Ok(())], "turn {turn}");
        });
    }
}

/// Where a process gets a signal: once all ranks have met in an operation whose part its device has not sent, or
/// while the others make a communicator with it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Operation,
    Making,
}

/// Sends this process a signal, which takes effect when the system comes to it.
fn signal(name: &str) {
    _ = Command::new("kill").args([format!("-{name}"), id().to_string()]).status();
    sleep(Duration::from_secs(600));
}

/// Three processes of which one gets a signal. The others wait for their devices, or for NCCL, and end with `told`.
fn ends(test: &str, name: &str, signalled: usize, at: At, told: &str) {
    if crate::kernels().is_none() {
        return;
    }
    let exits = run(3, test, |place| {
        let (runtime, stopped) = (joined(place, TIMEOUT), AtomicI64::new(0));
        let (device, emulator) = device(runtime.process());
        let ended = runtime.world().run(|world| {
            let mut processes = [0; 3];
            world.all_gather_slice(&[i64::from(id())], &mut processes)?;
            stopped.store(processes[signalled], Ordering::Relaxed);
            let is_it = world.rank() == signalled;
            if is_it && at == At::Making {
                // As a rank that makes one, until the others have the id.
                world.barrier()?;
                world.broadcast_bytes(Vec::new(), 0)?;
                signal(name);
            }
            let group = Group::from(device.nccl(world.communicator().clone(), Reduction::Library)?);
            if is_it {
                emulator.stand_still();
            }
            let sum = group.all_reduce(device.zeros(DType::F32, 12)?, ReduceOp::Sum)?;
            world.barrier()?;
            if is_it {
                signal(name);
            }
            device.download(&sum)?;
            Ok::<_, Error>(())
        });
        if name == "STOP" {
            _ = Command::new("kill").args(["-KILL", &stopped.into_inner().to_string()]).status();
        }
        let error = ended.unwrap_err();
        let own = error.ends[runtime.process()].as_ref().unwrap().to_string();
        assert!(error.rank == signalled && own.contains(told), "{own}\n{error}");
        // It names the place, and what each rank did.
        let place =
            if at == At::Operation { "all_reduce(f32, 12) stopped because" } else { "barrier() stopped because" };
        assert!(own.contains(place), "{own}");
        assert!(error.to_string().contains(&format!("rank {signalled} is lost")), "{error}");
    });
    for (rank, exit) in exits.iter().flatten().enumerate() {
        let code = if rank == signalled { None } else { Some(0) };
        assert_eq!(exit.code, code, "rank {rank}: {}", exit.errors);
    }
}

#[test]
fn a_process_that_dies_ends_the_wait_for_a_device() {
    let test = "processes::a_process_that_dies_ends_the_wait_for_a_device";
    ends(test, "KILL", 1, At::Operation, "rank 1 is lost (its process ended)");
}

#[test]
fn a_process_that_stands_still_ends_the_wait_for_a_device() {
    let test = "processes::a_process_that_stands_still_ends_the_wait_for_a_device";
    ends(test, "STOP", 1, At::Operation, "rank 1 made no progress for 2s: rank ");
}

/// It judges, and made the unique id.
#[test]
fn the_first_process_that_stands_still_ends_the_wait_for_a_device() {
    let test = "processes::the_first_process_that_stands_still_ends_the_wait_for_a_device";
    ends(test, "STOP", 0, At::Operation, "rank 0 is lost (its process does not answer)");
}

#[test]
fn a_process_that_stands_still_ends_the_making_of_a_communicator() {
    let test = "processes::a_process_that_stands_still_ends_the_making_of_a_communicator";
    ends(test, "STOP", 2, At::Making, "rank 2 made no progress for 2s: rank ");
}

/// Rank 0 sends to rank 1, that to rank 2, and both then wait on the host for rank 2, whose device needs their
/// messages: a pipeline that predicts, and broadcasts from its last stage.
#[test]
fn messages_arrive_while_the_hosts_that_sent_them_wait_for_another() {
    if crate::kernels().is_none() {
        return;
    }
    let exits = run(3, "processes::messages_arrive_while_the_hosts_that_sent_them_wait_for_another", |place| {
        let runtime = joined(place, TIMEOUT);
        let (device, _) = device(runtime.process());
        let ended = runtime.world().run(|world| {
            let (rank, mut arrived) = (world.rank(), [0_f32; 3]);
            let group = Group::from(device.nccl(world.communicator().clone(), Reduction::Library)?);
            let mut message = device.upload(&Buffer::from_slice(&[1_f32, 2.0, 3.0]))?;
            if rank > 0 {
                message = group.recv(device.zeros(DType::F32, 3)?, rank - 1, 0)?;
            }
            if rank < 2 {
                group.send(message, rank + 1, 0)?;
            } else {
                arrived.copy_from_slice(device.download(&message)?.as_slice()?);
            }
            world.broadcast_slice(&mut arrived, 2)?;
            assert_eq!(arrived, [1.0, 2.0, 3.0]);
            Ok::<_, Error>(())
        });
        ended.unwrap_or_else(|error| panic!("{error}"));
    });
    for (rank, exit) in exits.iter().flatten().enumerate() {
        assert_eq!(exit.code, Some(0), "rank {rank}: {}", exit.errors);
    }
}
