//! One rank of a mesh: its position and its groups. It is passed in; there is no global state.

use crate::agreement::{Agreement, Fact};
use crate::axes::Axis;
use crate::comm::{Caller, CommError, CommLog, Communicator, Entered, Group, record};
use crate::mesh::{Coords, Mesh};
use std::sync::Arc;

/// The coordinates of a rank, and its groups: the world, one per axis, and one per product of axes. Groups of one rank
/// are the identity.
#[derive(Debug)]
pub struct Rank {
    mesh: Mesh,
    coords: Coords,
    world: Group,
    /// Groups by the set of their axes, with a bit for each axis.
    groups: Vec<Group>,
    log: CommLog,
}

impl Rank {
    /// Joins the mesh as the rank of `world`. Collective: every rank of the world calls it with the same mesh.
    ///
    /// Every group that [`group_over`](Self::group_over) can return is made here, in the same order on all ranks.
    /// Groups made on first use would deadlock if two ranks first use them in different orders. A mesh of three axes
    /// above degree 1 has three products besides its axes and the world; a mesh of four axes has ten, and one of five
    /// 25. If a group is expensive (NCCL), a backend splits it off its parent's resources and connects it on first use.
    ///
    /// # Errors
    /// [`CommError::WorldSize`] if the world has another number of ranks than the mesh; [`CommError::Disagreement`] if
    /// ranks have other meshes.
    pub fn new(mesh: &Mesh, world: Arc<dyn Communicator>) -> Result<Self, CommError> {
        let (me, size) = (world.rank(), world.size());
        if size != mesh.world_size() {
            return Err(CommError::WorldSize { world_rank: me, mesh: mesh.clone(), size });
        }
        let log = CommLog::default();
        let world = Group::new(world, log.clone());
        let _entered = log.enter("Rank::new");
        let mut facts = Agreement::default();
        facts.push(Fact::value("the mesh", &format_args!("{mesh}"), "let every rank of the world join one mesh"));
        facts.compare(&world)?;
        // Where experts are shared out, the rest of data parallelism counts with any degree: the groups over both have
        // a name of their own.
        let wide = |axis: Axis| mesh.degree(axis) > 1 || axis == Axis::Dp && mesh.degree(Axis::Ep) > 1;
        let wide = set_of(Axis::ALL.into_iter().filter(|&axis| wide(axis)));
        // Without a wait for each: all ranks have compared their meshes, and make the same groups.
        let part = |name: &str, members: &[usize]| -> Result<Group, CommError> {
            let part = world.communicator().split(name, members)?;
            part.connect()?;
            Ok(Group::new(part, log.clone()))
        };
        let mut groups: Vec<Group> = Vec::with_capacity(1 << Axis::COUNT);
        for set in 0..1 << Axis::COUNT {
            let axes: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| set >> axis.index() & 1 == 1).collect();
            let without = set & !set_of([Axis::Cep]);
            groups.push(match axes[..] {
                // Few meshes have this axis: others make no group for it.
                _ if without != set && !mesh.has(Axis::Cep) => groups[without].clone(),
                [] if size == 1 => world.clone(),
                [] => part("self", &[me])?,
                // Named after its axis, with any degree.
                [_] => part(&mesh.group_name(&axes), &mesh.group(me, &axes))?,
                // Data parallelism is named as an axis is. Without experts it is the group of its axis.
                _ if axes == Axis::DATA && set & wide != set => groups[set_of([Axis::Dp])].clone(),
                _ if axes == Axis::DATA => part(&mesh.group_name(&axes), &mesh.group(me, &axes))?,
                // The group over the axes above degree 1 exists already.
                _ if set & wide != set => groups[set & wide].clone(),
                _ if set == wide => world.clone(),
                _ => part(&mesh.group_name(&axes), &mesh.group(me, &axes))?,
            });
        }
        Ok(Self { mesh: mesh.clone(), coords: mesh.coords(me), world, groups, log })
    }

    /// Rank `world_rank` of a mesh whose other ranks do not exist: collectives are only recorded.
    pub fn recording(mesh: &Mesh, world_rank: usize) -> Result<Self, CommError> {
        let world = record::communicator("world", world_rank, (0..mesh.world_size()).collect())?;
        Self::new(mesh, world)
    }

    /// The only rank of a mesh without axes, for un-sharded layers.
    pub fn alone() -> Result<Self, CommError> {
        Self::recording(&Mesh::default(), 0)
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The position of this rank on it.
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
        self.group_over(&[axis])
    }

    /// The data-parallel group: the ranks that have the other parts of the batch.
    pub fn data_group(&self) -> &Group {
        self.group_over(&Axis::DATA)
    }

    /// The ranks that differ from this one only along `axes`, in rank order: a reduction over dp×cp is one operation on
    /// `group_over(&[Axis::Dp, Axis::Cp])`. The order of `axes` does not matter.
    ///
    /// Axes of degree 1 add nothing: what remains may be the group of one axis, the world itself, or this rank alone. A
    /// product of several axes is named after them: see [`Mesh::group_name`].
    pub fn group_over(&self, axes: &[Axis]) -> &Group {
        &self.groups[set_of(axes.iter().copied())]
    }

    /// An additional group of world ranks, which contains this one. Collective over the world: every rank calls it, and
    /// waits for the others; ranks outside the group name only themselves.
    pub fn subgroup(&self, name: &str, members: &[usize]) -> Result<Group, CommError> {
        self.world.split_as("Rank::subgroup", name, members)
    }

    /// Begins a call that every rank makes, by its name: see [`CommLog::enter`].
    pub fn enter(&self, caller: impl Into<Caller>) -> Entered {
        self.log.enter(caller)
    }

    /// The communications of this rank, over all its groups.
    pub fn log(&self) -> &CommLog {
        &self.log
    }

    /// Tells the world that this rank makes progress: see
    /// [`Membership::heartbeat`](crate::comm::Membership::heartbeat).
    pub fn heartbeat(&self) {
        self.world.heartbeat();
    }
}

/// A set of axes as bits.
fn set_of(axes: impl IntoIterator<Item = Axis>) -> usize {
    axes.into_iter().fold(0, |set, axis| set | 1 << axis.index())
}
