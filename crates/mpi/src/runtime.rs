//! MPI in this process: started once, with a thread that moves messages while ranks compute, and ended when nothing
//! needs it any more.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use meshwork_core::comm::shared_moment;
use meshwork_core::hash::combine;
use meshwork_core::launcher::Placement;
use meshwork_core::pool::share_cores;
use meshwork_core::{Communicator, Group, World};

use crate::carrier::Carrier as _;
use crate::communicator::MpiComm;
use crate::cores::{self, Offer};
use crate::endpoint::{Endpoint, Patience};
use crate::error::MpiError;
use crate::library::{Library, MULTIPLE};
use crate::life::Life;
use crate::meeting::Meeting;
use crate::native::Reduction;
use crate::port::{Hosts, LAST, Landing, Layout, Port};
use crate::sockets::Sockets;
use crate::wire::Wire;

/// How ranks join.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a rank that others wait for may show no progress, as for
    /// [threads](meshwork_core::comm::thread::Options::timeout). At the start processes wait for each other up to five
    /// times as long.
    pub timeout: Duration,
    /// How many ranks are threads of each process: the same in all of them. The ranks of a process are neighbours.
    pub ranks_per_process: usize,
    /// How sums are taken: alike in all processes.
    pub reduction: Reduction,
    /// A number that the processes of a host share: the hash of its name. See [`Runtime::arrange`].
    pub host: u64,
}

impl Default for Options {
    /// One minute, one rank in each process, sums by the tree, and all processes on one host.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60), ranks_per_process: 1, reduction: Reduction::Tree, host: 0 }
    }
}

/// Joins the processes that a launcher such as `mpirun` started, by the library that is [found](Library::find): the
/// world of all of their ranks.
///
/// ```no_run
/// use meshwork_core::{CommError, ReduceOp};
///
/// let sums = meshwork_mpi::join(meshwork_mpi::Options::default())?.run(|world| {
///     let mut x = [world.rank() as f32];
///     world.all_reduce_slice(&mut x, ReduceOp::Sum)?;
///     Ok::<_, CommError>(x[0])
/// })?;
/// println!("{sums:?}"); // of four processes, each prints [6.0]
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As of [`Runtime::start`]. A process joins once: its programs share a [`Runtime`].
pub fn join(options: Options) -> Result<World, MpiError> {
    Ok(Runtime::start(Library::find()?, options)?.world())
}

/// MPI in this process. It ends when this and all worlds made of it have been dropped, which waits until these worlds
/// are over; a process that ends otherwise is a failure to its launcher.
#[derive(Clone, Debug)]
pub struct Runtime(Arc<Running>);

#[derive(Debug)]
struct Running {
    port: Arc<Port>,
    options: Options,
    description: String,
    origin: Instant,
    /// Worlds made so far, of each size, over each set of processes.
    worlds: Mutex<HashMap<(usize, u64), u64>>,
    /// The processes that are there.
    there: Mutex<Hosts>,
    /// The host of each process.
    hosts: Vec<u64>,
    life: Arc<Life>,
}

/// What the thread of MPI found when it started.
struct Started {
    port: Arc<Port>,
    description: String,
}

/// How many timeouts the start of all processes may take: a large program comes late to some hosts.
const STARTS: u32 = 5;

/// How often a process that waits for others sees whether it shall stop.
const LOOK: Duration = Duration::from_millis(50);

impl Runtime {
    /// Initialises MPI in this process.
    ///
    /// # Errors
    /// A library that fails, or is in use already, or does not let several threads call it; processes that do not come.
    pub fn start(library: Library, options: Options) -> Result<Runtime, MpiError> {
        Runtime::start_unless(library, options, &AtomicBool::new(false))
    }

    /// The same, and waits for other processes only until `stop` is set: a program that handles signals sets it when
    /// its launcher asks it to end.
    ///
    /// # Errors
    /// As of [`start`](Runtime::start), and [`MpiError::Stopped`].
    pub fn start_unless(library: Library, options: Options, stop: &AtomicBool) -> Result<Runtime, MpiError> {
        let Options { ranks_per_process, reduction, .. } = options;
        if ranks_per_process == 0 {
            return Err(MpiError::RanksPerProcess(0));
        }
        let name = library.to_string();
        Runtime::begin((name, stop), options, move || {
            let wire = Wire::<Landing>::new(library)?;
            if reduction == Reduction::Native && wire.level() != MULTIPLE {
                let error = MpiError::Native { library: wire.library().to_string(), granted: wire.level() };
                Box::new(wire).close(false);
                return Err(error);
            }
            let by = if reduction == Reduction::Native { ", which adds up f32 and f64" } else { "" };
            let description = format!("MPI: {}, {}{by}", wire.library(), wire.level());
            let layout = Layout { process: wire.process(), processes: wire.processes(), ranks_per_process };
            Ok(Started { port: Arc::new(Port::new(layout, reduction, Some(Box::new(wire)))), description })
        })
    }

    /// Joins the processes of a launch over TCP, without MPI. Waits for them until `stop` is set.
    ///
    /// # Errors
    /// Processes that do not come, or say that they are another rank; sums by a library.
    pub fn meet(meeting: Meeting, options: Options, stop: &AtomicBool) -> Result<Runtime, MpiError> {
        let Options { ranks_per_process, reduction, timeout, .. } = options;
        if ranks_per_process == 0 {
            return Err(MpiError::RanksPerProcess(0));
        }
        let description = format!("TCP: {} processes; rank 0 is on {}", meeting.size, meeting.host);
        if reduction == Reduction::Native {
            return Err(MpiError::NoSums { library: description });
        }
        let longest = timeout.saturating_mul(STARTS - 1);
        Runtime::begin((description.clone(), stop), options, move || {
            let failed =
                |error: std::io::Error| MpiError::Meeting { place: meeting.to_string(), problem: error.to_string() };
            let wire = Sockets::<Landing>::new(meeting.meet(longest)?).map_err(failed)?;
            let layout = Layout { process: meeting.rank, processes: meeting.size, ranks_per_process };
            Ok(Started { port: Arc::new(Port::new(layout, reduction, Some(Box::new(wire)))), description })
        })
    }

    /// The same for ranks of one process, without MPI: for tests of all that does not depend on it.
    pub fn of_one_process(options: Options) -> Result<Runtime, MpiError> {
        let Options { ranks_per_process, reduction, .. } = options;
        Runtime::begin(("one process".to_owned(), &AtomicBool::new(false)), options, move || {
            let layout = Layout { process: 0, processes: 1, ranks_per_process };
            Ok(Started { port: Arc::new(Port::new(layout, reduction, None)), description: "one process".to_owned() })
        })
    }

    fn begin(
        (library, stop): (String, &AtomicBool),
        options: Options,
        start: impl FnOnce() -> Result<Started, MpiError> + Send + 'static,
    ) -> Result<Runtime, MpiError> {
        let (tell, told) = mpsc::channel();
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let run = move || match start() {
            Ok(started) => {
                let port = started.port.clone();
                if tell.send(Ok(started)).is_ok() {
                    work(&port, &ends);
                }
            }
            Err(error) => _ = tell.send(Err(error)), // its receiver waits for it
        };
        let started = thread::Builder::new().name("mpi".to_owned()).spawn(run);
        let thread = started.map_err(|error| MpiError::Thread(error.to_string()))?;
        let (longest, begun) = (options.timeout.saturating_mul(STARTS), Instant::now());
        let Started { port, description } = loop {
            match told.recv_timeout(LOOK.min(longest)) {
                Ok(started) => break started?,
                // The library may never return.
                Err(mpsc::RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                    return Err(MpiError::Stopped { library });
                }
                Err(mpsc::RecvTimeoutError::Timeout) if begun.elapsed() < longest => {}
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    return Err(MpiError::Alone { library, seconds: longest.as_secs() });
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(MpiError::Thread("it panicked".to_owned())),
            }
        };
        let life = Arc::new(Life::new(over, thread));
        let Layout { processes, ranks_per_process, .. } = port.layout;
        let ranks = processes * ranks_per_process;
        let there = Mutex::new(Hosts { ranks, processes: (0..processes).collect(), ranks_per_process });
        let (origin, worlds) = (Instant::now(), Mutex::default());
        let hosts = vec![options.host; processes];
        let mut running = Running { port, options, description, origin, worlds, there, hosts, life };
        (running.origin, running.hosts) = running.meet()?;
        let here = running.hosts.iter().filter(|&&host| host == options.host).count();
        running.port.lookout.share_host(here * ranks_per_process);
        Ok(Runtime(Arc::new(running)))
    }

    /// What was found, and what it grants: `MPI: Open MPI 5.0.11 (libmpi.so.40), THREAD_MULTIPLE`.
    pub fn describe(&self) -> &str {
        &self.0.description
    }

    /// The number of this process.
    pub fn process(&self) -> usize {
        self.0.port.layout.process
    }

    /// The number of processes.
    pub fn processes(&self) -> usize {
        self.0.port.layout.processes
    }

    /// The number of ranks of all processes that are there.
    pub fn ranks(&self) -> usize {
        self.0.there().processes.len() * self.0.options.ranks_per_process
    }

    /// The processes that are there, in the order of their ranks: all, but for those that the others went on
    /// [without](Self::without).
    pub fn there(&self) -> Arc<[usize]> {
        self.0.there().processes
    }

    /// Goes on without processes that are lost: worlds that are made from now on have the ranks of the others,
    /// numbered anew. Every process that is there calls it with the same processes, when all worlds made before are
    /// over. It takes a library and a launcher that let the others live: Open MPI 5 under `mpirun --with-ft ulfm`.
    pub fn without(&self, lost: &[usize]) {
        self.0.port.go_on_without(lost);
        let mut there = self.0.there.lock().unwrap_or_else(PoisonError::into_inner);
        there.processes = there.processes.iter().copied().filter(|process| !lost.contains(process)).collect();
    }

    /// Numbers the ranks of worlds that are made from now on so that runs of `together` of them lie inside a process,
    /// then inside a host, wherever there is [room](Placement::order). Before, processes have ranks in the order in
    /// which the launcher numbers them. Every process calls it with the same number, at the same place between worlds.
    pub fn arrange(&self, together: usize) {
        let mut there = self.0.there.lock().unwrap_or_else(PoisonError::into_inner);
        let mut processes = there.processes.to_vec();
        processes.sort_unstable();
        let hosts: Vec<u64> = processes.iter().map(|&process| self.0.hosts[process]).collect();
        let order = Placement::order(&hosts, self.0.options.ranks_per_process, together);
        there.processes = order.into_iter().map(|at| processes[at]).collect();
    }

    /// A new world of all ranks. Every process makes the same worlds, in the same order.
    pub fn world(&self) -> World {
        let all = self.world_of(self.ranks(), self.0.options.timeout);
        // Every process has a rank of the world of all.
        all.unwrap_or_else(|| unreachable!("process {} has no rank", self.process()))
    }

    /// A new world of the first `ranks` ranks, with a timeout of its own; `None` in a process that has none of them.
    /// All processes that have ranks of worlds of this size make as many of them.
    ///
    /// # Panics
    /// If there are fewer than `ranks`.
    pub fn world_of(&self, ranks: usize, timeout: Duration) -> Option<World> {
        assert!(
            ranks <= self.ranks(),
            "a world of {ranks} ranks: {} processes have {}",
            self.processes(),
            self.ranks()
        );
        let hosts = self.0.there();
        let set = hosts.processes.iter().fold(0, |set, process| combine(set, *process as u64));
        let number = {
            let mut worlds = self.0.worlds.lock().unwrap_or_else(PoisonError::into_inner);
            let number = worlds.entry((ranks, set)).or_default();
            *number += 1;
            *number
        };
        let here = self.0.join(combine(combine(ranks as u64, number), set), "world", ranks, Some(timeout));
        (!here.is_empty()).then(|| World::Joined(here))
    }
}

impl Running {
    fn there(&self) -> Hosts {
        self.there.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The ranks of this process in a world of the first `ranks` ranks.
    fn join(&self, world: u64, name: &str, ranks: usize, timeout: Option<Duration>) -> Vec<Arc<dyn Communicator>> {
        let Layout { process, ranks_per_process, .. } = self.port.layout;
        let hosts = Hosts { ranks, ..self.there() };
        let patience = Patience { progress: timeout, answer: timeout };
        let Some(place) = hosts.processes.iter().position(|there| *there == process) else { return Vec::new() };
        let first = place * ranks_per_process;
        let enter = |rank| {
            let endpoint = Endpoint::enter(&self.port, &hosts, world, name, rank, patience, self.origin);
            let comm: Arc<dyn Communicator> = Arc::new(MpiComm::of_world(endpoint, self.life.clone()));
            comm
        };
        (first..ranks.min(first + ranks_per_process)).map(enter).collect()
    }

    /// The same moment in every process, and the hosts of all.
    fn meet(&self) -> Result<(Instant, Vec<u64>), MpiError> {
        let Layout { process, processes, ranks_per_process } = self.port.layout;
        if processes == 1 {
            return Ok((self.origin, self.hosts.clone()));
        }
        // Of each process its first rank measures; the others come to the barrier at the end of the world alone.
        let clock = self.join(combine(0, 1), "clock", processes * ranks_per_process, None);
        let Some(first) = clock.first() else { unreachable!("process {process} has no rank") };
        let leaders: Vec<usize> = (0..processes).map(|process| process * ranks_per_process).collect();
        let rest: Vec<_> = clock.iter().skip(1).map(|rank| rank.split("rest", &[rank.rank()])).collect();
        rest.into_iter().try_for_each(|part| part.map(drop))?;
        let leaders = first.split("leaders", &leaders)?;
        let moment = shared_moment(leaders.clone())?;
        let (own, mut all) = (cores::offer(self.options.host), vec![0; processes * size_of::<Offer>() / 8]);
        let leaders = Group::from(leaders);
        leaders.all_gather_slice(&own, &mut all)?;
        let (all, _) = all.as_chunks();
        cores::shared(&own, all).into_iter().for_each(share_cores);
        leaders.barrier()?; // all that use the memory have it
        Ok((moment, all.iter().map(|[host, ..]: &Offer| *host as u64).collect()))
    }
}

/// Moves messages and operations, as far as no rank does because it waits, until nothing needs them.
fn work(port: &Port, over: &AtomicBool) {
    let (mut pause, mut begun) = (port.lookout.pause_spare(), 0);
    let mut unneeded = None;
    loop {
        let any = (!port.lookout.is_any() && port.poll()) | port.attend();
        if any {
            pause.reset();
        }
        if over.load(Ordering::Acquire) {
            // The process that says when an earlier world is over may stand still, and never say it.
            let since = *unneeded.get_or_insert_with(Instant::now);
            let is_left = port.is_abandoned() && since.elapsed() >= LAST;
            if is_left || port.endpoints().iter().all(|endpoint| endpoint.is_over()) {
                break;
            }
        }
        if !any {
            port.lookout.sleep_spare(&mut begun, &mut pause);
        }
    }
    port.close();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 0, which says that a world is over, stands still before it does: the process of rank 1 ends nevertheless.
    #[test]
    fn a_world_that_its_judge_left_open_does_not_keep_a_process() {
        let runtime = Runtime::of_one_process(Options { ranks_per_process: 2, ..Options::default() }).unwrap();
        let (port, patience) = (&runtime.0.port, Patience { progress: None, answer: None });
        let hosts = Hosts { ranks: 2, ..runtime.0.there() };
        Endpoint::enter(port, &hosts, 77, "clock", 1, patience, runtime.0.origin);
        port.abandon();
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            drop(runtime);
            tell.send(())
        });
        assert!(told.recv_timeout(3 * LAST).is_ok(), "it waits for ever");
    }
}
