//! A rank's membership in its world: its life, its clock, and worlds beside this one.

use super::{Activity, CommError, Communicator, Fault, Group, Site};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The membership of one rank in its world, the same behind all of its groups. A backend implements it.
pub trait Membership: Send + Sync + Debug {
    /// Tells the world that this rank makes progress, so that it does not time out where others wait for it. Does
    /// nothing by default: most backends have no such timeout.
    fn heartbeat(&self) {}

    /// One moment, the same on all ranks as far as their clocks can be compared: profiles count from it. A backend
    /// whose ranks have clocks of their own measures it by [`shared_moment`] when they join.
    fn origin(&self) -> Instant;

    /// Another world of the same ranks, for a second thread of each, such as the writer of checkpoints: it neither
    /// waits for this world nor fails with it, and has no timeout. Collective: all ranks call it in the same order. A
    /// rank that ended before it came here is missed in the new world at once.
    fn fork(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError>;

    /// Blocks until `done` says that work outside of this world is over in which all of its ranks take part, such as
    /// collectives of their devices. `site` is the last operation of this rank that began such work.
    ///
    /// # Errors
    /// The fault that stops the world meanwhile: a rank that fails, or whose process ends, or does not answer for the
    /// timeout, will not do its part. By default only `done` counts: ranks that are threads end together.
    fn attend(&self, site: &Site, done: &mut dyn FnMut() -> bool) -> Result<(), Arc<Fault>> {
        _ = site;
        while !done() {
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Tells the world how this rank ended, and returns how all of them did: when the last one has, or when the
    /// timeout has passed since a fault stopped the world. Every rank gets the same first failure.
    fn end(&self, how: Activity) -> Ended;
}

/// How the ranks of a world ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// The rank that failed first, and why.
    pub first: Option<(usize, String)>,
    /// The fault that stopped the other ranks, if any was stopped.
    pub fault: Option<Arc<Fault>>,
    /// The end of each rank, or its activity if it has not ended.
    pub ranks: Vec<Activity>,
}

/// Round trips by which a rank compares its clock with another's. The shortest counts.
const ROUNDS: usize = 8;

/// The moment at which rank 0 came here, by the clock of each rank: for [`Membership::origin`]. Collective over the
/// world. A rank asks the rank whose number lacks its lowest bit, so that no rank answers more than log₂ n others; an
/// error is at most half of the shortest round trips on the way to rank 0.
pub fn shared_moment(world: Arc<dyn Communicator>) -> Result<Instant, CommError> {
    let (world, mut origin) = (Group::from(world), Instant::now());
    let (rank, size) = (world.rank(), world.size());
    if rank > 0 {
        let (asked, mut shortest) = (rank & (rank - 1), Duration::MAX);
        for _ in 0..ROUNDS {
            let (begun, mut told) = (Instant::now(), [0i64]);
            world.send_slice(&[0u8], asked, 0)?;
            world.recv_slice(&mut told, asked, 0)?;
            let took = begun.elapsed();
            if took < shortest {
                let then = begun + took / 2;
                // A clock that began later than the moment cannot show it.
                origin = then.checked_sub(Duration::from_nanos(told[0] as u64)).unwrap_or(then);
                shortest = took;
            }
        }
    }
    let bits = if rank == 0 { usize::BITS } else { rank.trailing_zeros() };
    for asking in (0..bits).map(|bit| rank + (1 << bit)).take_while(|&asking| asking < size) {
        for _ in 0..ROUNDS {
            world.recv_slice(&mut [0u8], asking, 0)?;
            world.send_slice(&[origin.elapsed().as_nanos() as i64], asking, 0)?;
        }
    }
    Ok(origin)
}
