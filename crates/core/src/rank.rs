//! One rank of a mesh: where it lies and whom it talks to. Passed in; nothing is global.

use crate::comm::{CommError, CommLog, Communicator, Group, record};
use crate::mesh::{Axis, Coords, Mesh};
use std::sync::Arc;

/// The coordinates of a rank, and its groups: the world, and one per axis. Every axis has a group; those of degree 1 are
/// the identity.
#[derive(Debug)]
pub struct Rank {
    mesh: Mesh,
    coords: Coords,
    world: Group,
    groups: [Group; Axis::COUNT],
    log: CommLog,
}

impl Rank {
    /// Joins the mesh as the rank that `world` says. Collective: every rank of the world calls it with the same mesh.
    ///
    /// # Panics
    /// If the world has not as many ranks as the mesh: the caller makes both from one mesh.
    pub fn new(mesh: &Mesh, world: Arc<dyn Communicator>) -> Result<Self, CommError> {
        assert_eq!(world.size(), mesh.world_size(), "the world and the mesh {mesh} differ in size");
        let log = CommLog::default();
        let me = world.rank();
        let split = |axis: Axis| -> Result<Group, CommError> {
            let members = mesh.group(me, &[axis]);
            Ok(Group::new(world.split(axis.name(), &members)?, log.clone()))
        };
        // Eager and in the same order everywhere: lazily made groups are how others deadlock.
        let groups = [split(Axis::ALL[0])?, split(Axis::ALL[1])?, split(Axis::ALL[2])?, split(Axis::ALL[3])?];
        Ok(Self { mesh: mesh.clone(), coords: mesh.coords(me), world: Group::new(world, log.clone()), groups, log })
    }

    /// Rank `world_rank` of a mesh whose other ranks do not exist: collectives do nothing but write themselves down.
    pub fn recording(mesh: &Mesh, world_rank: usize) -> Result<Self, CommError> {
        let world = record::communicator("world", world_rank, (0..mesh.world_size()).collect())?;
        Self::new(mesh, world)
    }

    /// The only rank of a mesh with no axes: where un-sharded layers run.
    pub fn alone() -> Result<Self, CommError> {
        Self::recording(&Mesh::default(), 0)
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Where this rank lies on it.
    pub fn coords(&self) -> Coords {
        self.coords
    }

    /// Its number among all ranks.
    pub fn world_rank(&self) -> usize {
        self.world.rank()
    }

    /// All ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// The ranks that differ from this one only along `axis`.
    pub fn group(&self, axis: Axis) -> &Group {
        &self.groups[axis.index()]
    }

    /// A further group of world ranks, this one among them. Collective over the world: ranks without a part in it name
    /// themselves alone.
    pub fn subgroup(&self, name: &str, members: &[usize]) -> Result<Group, CommError> {
        self.world.split(name, members)
    }

    /// What this rank has communicated, over all its groups.
    pub fn log(&self) -> &CommLog {
        &self.log
    }

    /// Says that this rank makes progress.
    pub fn heartbeat(&self) {
        self.world.heartbeat();
    }
}
