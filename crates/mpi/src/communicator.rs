//! The communicator of a rank, and its membership in a world.

use std::sync::Arc;
use std::time::Instant;

use meshwork_core::comm::{Activity, Ended, Fault, Membership, PendingOp, Site, check_members};
use meshwork_core::{Buffer, Call, CommError, Communicator, Pending, ReductionOrder};

use crate::endpoint::{Endpoint, GroupOf};
use crate::life::Life;
use crate::native::Reduction;
use crate::packet::Key;

/// One rank's end of a group.
#[derive(Debug)]
pub(crate) struct MpiComm {
    member: Arc<Member>,
    group: GroupOf,
}

/// Held by all communicators and operations of a rank in a world: when it is dropped, the rank has ended.
#[derive(Debug)]
struct Member {
    endpoint: Arc<Endpoint>,
    /// Dropped last: MPI ends with it.
    life: Arc<Life>,
}

impl MpiComm {
    /// A rank's end of the group of all ranks of a world.
    pub(crate) fn of_world(endpoint: Arc<Endpoint>, life: Arc<Life>) -> MpiComm {
        let group = endpoint.world_group();
        MpiComm { member: Arc::new(Member { endpoint, life }), group }
    }
}

impl Membership for Member {
    fn heartbeat(&self) {
        self.endpoint.beat();
    }

    fn origin(&self) -> Instant {
        self.endpoint.origin
    }

    fn fork(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(Arc::new(MpiComm::of_world(self.endpoint.fork(name), self.life.clone())))
    }

    fn attend(&self, site: &Site, done: &mut dyn FnMut() -> bool) -> Result<(), Arc<Fault>> {
        self.endpoint.attend(site, done)
    }

    fn end(&self, how: Activity) -> Ended {
        self.endpoint.end(how);
        self.endpoint.wait_for_ends()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.endpoint.end(match std::thread::panicking() {
            true => Activity::Panicked("the thread that held its communicators".to_owned()),
            false => Activity::Left,
        });
    }
}

impl Communicator for MpiComm {
    fn rank(&self) -> usize {
        self.group.member
    }

    fn size(&self) -> usize {
        self.group.ranks.len()
    }

    fn world_ranks(&self) -> &[usize] {
        &self.group.ranks
    }

    fn name(&self) -> &str {
        &self.group.name
    }

    fn start(&self, call: Call) -> Result<Pending, CommError> {
        let kind = call.op.kind();
        call.check(self.rank(), self.size()).map_err(|error| error.on(self, kind))?;
        // Before the call counts, so that ranks still agree on the next operation.
        let unreachable = call.input.iter().chain(&call.output).find_map(|buffer| buffer.as_bytes().err());
        if let Some(error) = unreachable {
            let (group, world_rank) = (self.name().to_owned(), self.group.ranks[self.group.member]);
            let message = format!("{error}, and MPI reaches no other: copy it there, or let the ranks be threads");
            return Err(CommError::Backend { op: kind, group, world_rank, message });
        }
        let (key, site) = self.member.endpoint.start(&self.group, call)?;
        Ok(Pending::new(Flying { member: self.member.clone(), key, site, taken: false }))
    }

    fn meet(&self, call: &Call) -> Result<Pending, CommError> {
        call.check(self.rank(), self.size()).map_err(|error| error.on(self, call.op.kind()))?;
        let (key, site) = self.member.endpoint.meet(&self.group, call)?;
        Ok(Pending::new(Flying { member: self.member.clone(), key, site, taken: false }))
    }

    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let ranks = check_members(self, name, members)?;
        let group = self.member.endpoint.split(&self.group, name, ranks)?;
        Ok(Arc::new(MpiComm { member: self.member.clone(), group }))
    }

    fn membership(&self) -> &dyn Membership {
        &*self.member
    }

    fn reduction_order(&self) -> ReductionOrder {
        match self.member.endpoint.port.reduction {
            Reduction::Tree => ReductionOrder::BalancedTree,
            Reduction::Native => ReductionOrder::Unspecified,
        }
    }
}

/// A rank's claim on the result of an operation.
struct Flying {
    member: Arc<Member>,
    key: Key,
    site: Site,
    taken: bool,
}

impl PendingOp for Flying {
    fn wait(mut self: Box<Self>) -> Result<Buffer, CommError> {
        self.taken = true;
        self.member.endpoint.wait(self.key, &self.site)
    }

    fn is_done(&self) -> bool {
        self.member.endpoint.is_finished(self.key)
    }

    fn site(&self) -> Option<&Site> {
        Some(&self.site)
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        if !self.taken {
            self.member.endpoint.detach(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Runtime};
    use meshwork_core::{DType, Memory, ReduceOp};

    #[derive(Debug)]
    struct OfADevice;

    impl Memory for OfADevice {
        fn bytes(&self) -> usize {
            16
        }
    }

    /// It is refused before it counts, with what would be valid.
    #[test]
    fn memory_that_is_not_on_the_host_is_refused_with_the_reason() {
        let runtime = Runtime::of_one_process(Options { ranks_per_process: 2, ..Options::default() }).unwrap();
        let ended = runtime.world().run(|world| {
            let buffer = Buffer::from_memory(Arc::new(OfADevice), DType::F32, 4)?;
            let error = world.all_reduce(buffer, ReduceOp::Sum).unwrap_err();
            let rank = world.rank();
            let expected = format!(
                "all_reduce on the world group of world rank {rank}: the memory of this buffer (4 of f32) is not on \
                 the host, and MPI reaches no other: copy it there, or let the ranks be threads"
            );
            assert_eq!(error.to_string(), expected);
            world.barrier()
        });
        ended.unwrap();
    }
}
