//! The world of a program's ranks.
//!
//! A program is written for one rank, and [`World::run`] runs it as every rank that this process has: all of them, as
//! threads, or one of a world that other processes share.

use crate::comm::thread::{self as threads, Options};
use crate::comm::{Activity, CommError, Communicator, Ended, Group};
use crate::mesh::Mesh;
use crate::rank::Rank;
use crate::run_error::{Cause, RankEnd, RunError, contained};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// Where the ranks of a program are.
#[derive(Clone, Debug)]
pub enum World {
    /// This many threads of this process.
    Threads(usize),
    /// One or more ranks of a world that has others, in other processes or on other threads of the caller: each by its
    /// communicator of that world.
    Joined(Vec<Arc<dyn Communicator>>),
}

impl World {
    /// Threads, one for each rank of `mesh`.
    pub fn threads(mesh: &Mesh) -> World {
        World::Threads(mesh.world_size())
    }

    /// Runs `body` as every rank that this process has, and returns their results, by rank.
    ///
    /// If a rank fails or panics, those that need it get an error instead of waiting, and the error of the whole says
    /// which rank failed first and why: the same in every process. A process whose own rank ended well waits for the
    /// others, and fails with them. A world without ranks is an error too.
    ///
    /// ```
    /// use meshwork_core::{CommError, ReduceOp, World};
    ///
    /// let sums = World::Threads(4).run(|world| {
    ///     let mut x = [world.rank() as f32, 1.0];
    ///     world.all_reduce_slice(&mut x, ReduceOp::Sum)?;
    ///     Ok::<_, CommError>(x)
    /// })?;
    /// assert_eq!(sums, [[6.0, 4.0]; 4]);
    ///
    /// let failed = World::Threads(2).run(|world| match world.rank() {
    ///     0 => Err("the disk is full".to_string()),
    ///     _ => world.barrier().map_err(|error| error.to_string()),
    /// });
    /// assert_eq!(failed.unwrap_err().rank, 0); // and not rank 1, which only stopped because of it
    /// # Ok::<(), meshwork_core::RunError>(())
    /// ```
    pub fn run<T, E, F>(&self, body: F) -> Result<Vec<T>, RunError>
    where
        T: Send,
        E: Into<Cause>,
        F: Fn(Group) -> Result<T, E> + Sync,
    {
        self.run_with(Options::default(), body)
    }

    /// [`run`](Self::run) with options for threads. The communicator of a joined world has its own.
    pub fn run_with<T, E, F>(&self, options: Options, body: F) -> Result<Vec<T>, RunError>
    where
        T: Send,
        E: Into<Cause>,
        F: Fn(Group) -> Result<T, E> + Sync,
    {
        match self {
            World::Threads(n) => threads::run(*n, options, body),
            World::Joined(ranks) => {
                let run = &|world: &Arc<dyn Communicator>| {
                    let (result, how) = contained(|| body(Group::from(world.clone())));
                    ended(world, result, how)
                };
                let ends = match &ranks[..] {
                    [alone] => vec![run(alone)],
                    several => thread::scope(|scope| {
                        let mut started = Vec::with_capacity(several.len());
                        for world in several {
                            let name = format!("rank {}", world.rank());
                            let thread = thread::Builder::new().name(name).spawn_scoped(scope, move || run(world));
                            started.push(thread.map_err(|error| {
                                let how = format!("its thread did not start: {error}");
                                ended(world, Err(RankEnd::Panic(how.clone())), Activity::Failed(how))
                            }));
                        }
                        let end = |rank: Result<thread::ScopedJoinHandle<'_, _>, _>| match rank {
                            // `run` contains the panics of its body.
                            Ok(rank) => rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                            Err(failed) => failed,
                        };
                        started.into_iter().map(end).collect()
                    }),
                };
                together(ranks, ends)
            }
        }
    }

    /// [`run`](Self::run), with a [`Rank`] that has joined `mesh` instead of the group of the world.
    ///
    /// ```
    /// use meshwork_core::{Axis, CommError, Mesh, ReduceOp, World};
    ///
    /// let mesh: Mesh = "dp=2,tp=2".parse()?;
    /// let sums = World::threads(&mesh).run_mesh(&mesh, |rank| {
    ///     let mut x = [rank.world_rank() as f32];
    ///     rank.group(Axis::Dp).all_reduce_slice(&mut x, ReduceOp::Sum)?;
    ///     Ok::<_, CommError>(x[0])
    /// })?;
    /// assert_eq!(sums, [2.0, 4.0, 2.0, 4.0]); // ranks 0 and 2 are a dp group, and 1 and 3 are
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A world of another size than the mesh; the errors of [`run`](Self::run).
    pub fn run_mesh<T, E, F>(&self, mesh: &Mesh, body: F) -> Result<Vec<T>, RunError>
    where
        T: Send,
        E: Into<Cause> + From<CommError>,
        F: Fn(Arc<Rank>) -> Result<T, E> + Sync,
    {
        self.run(|world| body(Arc::new(Rank::new(mesh, world.communicator().clone())?)))
    }

    /// Whether rank 0 is here.
    pub fn leads(&self) -> bool {
        match self {
            World::Threads(_) => true,
            World::Joined(ranks) => ranks.iter().any(|world| world.rank() == 0),
        }
    }

    /// A thing that this process makes once for all its ranks before they run, such as the devices. A failure, or a
    /// panic, ends the world as a rank's does; a joined rank counts as making progress meanwhile.
    ///
    /// # Errors
    /// The error of `make`, as the error of the rank that is here; of threads, of a world of one rank.
    pub fn prepare<T: Send, E: Into<Cause>>(&self, make: impl FnOnce() -> Result<T, E> + Send) -> Result<T, RunError> {
        let World::Joined(ranks) = self else {
            let (made, how) = contained(make);
            return made.map_err(|end| RunError { rank: 0, cause: how.failure(0), fault: None, ends: vec![Some(end)] });
        };
        let (over, beats) = mpsc::channel::<()>();
        let (made, how) = thread::scope(|scope| {
            scope.spawn(move || {
                while beats.recv_timeout(BEAT) == Err(mpsc::RecvTimeoutError::Timeout) {
                    ranks.iter().for_each(|world| world.membership().heartbeat());
                }
            });
            let made = contained(make);
            drop(over);
            made
        });
        made.or_else(|end| {
            // All at once, because each waits for the ends of all. The failure is the first rank's.
            let others = ranks.get(1..).unwrap_or_default();
            thread::scope(|scope| {
                for world in others {
                    scope.spawn(|| world.membership().end(Activity::Left));
                }
                let Some(first) = ranks.first() else { unreachable!("a process has a rank") };
                ended(first, Err(end), how.clone())
            })
        })
    }
}

/// How often a rank that prepares its run shows that it makes progress.
const BEAT: Duration = Duration::from_millis(50);

/// The first rank that did not end well, where the world does not say which it was.
fn first_of(ends: &[Option<RankEnd>]) -> Option<(usize, String)> {
    ends.iter().enumerate().find_map(|(rank, end)| Some((rank, format!("rank {rank} {}", end.as_ref()?))))
}

/// The results of the ranks of a process; or the error of their world, with each rank's own end from that rank.
fn together<T>(ranks: &[Arc<dyn Communicator>], ended: Vec<Result<T, RunError>>) -> Result<Vec<T>, RunError> {
    let (mut values, mut failed) = (Vec::with_capacity(ended.len()), None::<RunError>);
    for (world, ended) in ranks.iter().zip(ended) {
        match (ended, &mut failed) {
            (Ok(value), _) => values.push(value),
            (Err(error), None) => failed = Some(error),
            (Err(mut error), Some(failed)) => failed.ends[world.rank()] = error.ends[world.rank()].take(),
        }
    }
    failed.map_or(Ok(values), Err)
}

/// Ends the rank of a joined world, and waits for the others.
fn ended<T>(world: &Arc<dyn Communicator>, result: Result<T, RankEnd>, how: Activity) -> Result<T, RunError> {
    let Ended { first, fault, ranks } = world.membership().end(how);
    let mut ends: Vec<_> = ranks.iter().map(RankEnd::elsewhere).collect();
    // A backend that lost the others does not know all ends.
    let all_well = ends.len() == world.size() && ends.iter().all(Option::is_none);
    match result {
        Ok(value) if all_well => Ok(value),
        result => {
            ends.resize_with(world.size(), || None);
            ends[world.rank()] = result.err();
            let (rank, cause) = first.or_else(|| first_of(&ends)).unwrap_or_default();
            Err(RunError { rank, cause, fault, ends })
        }
    }
}
