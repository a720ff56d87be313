//! ZeRO (Rajbhandari et al. 2020): data-parallel ranks share out what each of them would otherwise hold whole. The
//! stage is data: of each flat buffer a rank has one [slice](FlatSlice), and the stage says which vectors it keeps
//! whole and of which only that slice.
//!
//! | stage | weights | gradients | optimizer states |
//! |---|---|---|---|
//! | 0 | whole | whole | whole |
//! | 1 | whole | whole until they are reduced | slice |
//! | 2 | whole | slice | slice |
//! | 3 | slice | slice | slice |
//!
//! A rank updates its slice. Where it keeps the weights whole, the slices of all ranks are gathered after the update.
//! In canonical numerics gradients are whole in every stage: a rank sums all of its samples before the samples of
//! other ranks, and the norm has blocks that slices would cut.

use crate::prelude::*;
use meshwork_core::{CommError, FlatSlice};
use meshwork_data_parallel::cuts_batch;

/// The vectors that data-parallel ranks share out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Nothing.
    #[default]
    Off,
    /// Optimizer states (ZeRO-1).
    States,
    /// Also gradients (ZeRO-2).
    Gradients,
    /// Also weights (ZeRO-3).
    Weights,
}

impl ZeroStage {
    /// Every stage, by its number.
    pub const ALL: [Self; 4] = [Self::Off, Self::States, Self::Gradients, Self::Weights];
}

/// ZeRO in a [`Plan`](crate::Plan).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zero {
    /// The vectors that are shared out.
    pub stage: ZeroStage,
    /// The number of data-parallel ranks that share it out: each group of so many neighbours has all of it (hybrid
    /// sharding). `None`: all of them.
    pub group: Option<usize>,
}

/// A vector with the layout of the flat buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    /// The weights.
    Weights,
    /// Their gradients, once they are reduced.
    Gradients,
    /// The states of the optimizer.
    States,
}

/// The part of each vector that a rank keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cuts {
    pub stage: ZeroStage,
    /// Whether sums have the order of canonical numerics.
    pub canonical: bool,
}

impl Cuts {
    /// Whether gradients are reduced to slices.
    pub fn scatter(self) -> bool {
        self.stage >= ZeroStage::States && !self.canonical
    }

    /// Whether the gradients of each micro-batch are reduced by themselves, so that a rank never keeps whole ones.
    pub fn scatter_each(self) -> bool {
        self.stage >= ZeroStage::Gradients && self.scatter()
    }

    /// Whether a rank keeps a slice alone of this vector.
    pub fn cuts(self, vector: Vector) -> bool {
        match vector {
            Vector::Weights => self.stage >= ZeroStage::Weights,
            Vector::Gradients => self.scatter(),
            Vector::States => self.stage >= ZeroStage::States,
        }
    }

    /// The elements of a flat buffer that a rank keeps, of which `slice` is its own. Whether a buffer is cut does not
    /// follow from this: the slice of one rank may have all of it.
    pub fn window(self, vector: Vector, slice: FlatSlice) -> Range<usize> {
        match self.cuts(vector) {
            true => slice.range(),
            // Weights are gathered from slices that are all of one length.
            false if vector == Vector::Weights && self.stage >= ZeroStage::States => 0..slice.padded(),
            false => 0..slice.elements(),
        }
    }
}

/// One of several ranks, or groups of ranks, that hold the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    pub index: usize,
    /// The number of replicas.
    pub of: usize,
}

impl Replica {
    /// The only one.
    pub const ONE: Self = Self { index: 0, of: 1 };

    /// Number `index` of `of` within this one.
    #[must_use]
    pub fn within(self, index: usize, of: usize) -> Self {
        Self { index: self.index * of + index, of: self.of * of }
    }

    /// The place of `one` in a list, within this one.
    #[must_use]
    pub fn within_list(self, all: &[usize], one: usize) -> Self {
        self.within(all.iter().position(|&other| other == one).unwrap_or(0), all.len())
    }
}

impl Zero {
    /// The axes among these that cut the batch: their ranks have other samples for the same parameters.
    pub(crate) fn batch_axes(axes: &[Axis]) -> Vec<Axis> {
        Axis::ALL.into_iter().filter(|axis| axes.contains(axis) && cuts_batch(*axis)).collect()
    }

    /// The number of the group of neighbours that share out, among all of them.
    fn number(self, mesh: &Mesh, rank: usize) -> usize {
        mesh.data_rank(mesh.coords(rank)) / self.group.unwrap_or(mesh.data_degree())
    }

    /// The world ranks that share out with this one what is the same along `axes`, itself included; the same number for
    /// all of them.
    fn sharers(self, mesh: &Mesh, world_rank: usize, axes: &[Axis]) -> Vec<usize> {
        if self.group.is_none() {
            return mesh.group(world_rank, axes);
        }
        let own = self.number(mesh, world_rank);
        mesh.group(world_rank, axes).into_iter().filter(|&rank| self.number(mesh, rank) == own).collect()
    }

    /// The slice that a rank has of a flat buffer whose gradients are summed over `axes`.
    pub(crate) fn slice(self, mesh: &Mesh, world_rank: usize, axes: &[Axis], elements: usize) -> FlatSlice {
        let Replica { index, of } = self.sharer(mesh, world_rank, axes);
        FlatSlice::new(elements, of, index)
    }

    /// The place of a rank among its [`sharers`](Self::sharers): by arithmetic, because a dry run asks for every rank
    /// of a large world.
    fn sharer(self, mesh: &Mesh, world_rank: usize, axes: &[Axis]) -> Replica {
        let (coords, ep) = (mesh.coords(world_rank), mesh.degree(Axis::Ep));
        let group = self.group.unwrap_or(mesh.data_degree());
        Self::batch_axes(axes).into_iter().rev().fold(Replica::ONE, |sharer, axis| {
            let count = match axis {
                Axis::Dp => group / ep,
                Axis::Ep => group.min(ep),
                axis => mesh.degree(axis),
            };
            let count = count.max(1);
            sharer.within(coords.get(axis) % count, count)
        })
    }

    /// The place of a rank's group of sharers among the groups that have all slices each.
    pub(crate) fn replica(self, mesh: &Mesh, world_rank: usize, axes: &[Axis]) -> Replica {
        if self.group.is_none() {
            return Replica::ONE; // all share out
        }
        let ranks = mesh.group(world_rank, &Self::batch_axes(axes));
        // Ascending, because data-parallel ranks are numbered as the ranks of the world are.
        let mut numbers: Vec<usize> = ranks.into_iter().map(|rank| self.number(mesh, rank)).collect();
        numbers.dedup();
        Replica::ONE.within_list(&numbers, self.number(mesh, world_rank))
    }

    /// Refuses groups that cannot be formed.
    pub(crate) fn require_groups(self, mesh: &Mesh) -> Result<(), PlanError> {
        let (dp, ep) = (mesh.data_degree(), mesh.degree(Axis::Ep));
        let Some(group) = self.group else { return Ok(()) };
        let refuse = |problem: String| Err(PlanError::ZeroGroup { group, problem });
        if self.stage == ZeroStage::Off {
            return refuse("shares out nothing at stage 0: use a stage of 1 to 3".to_owned());
        }
        if group == 0 || !dp.is_multiple_of(group) {
            return refuse(format!("does not divide dp={dp}: use one of {}", divisors(dp)));
        }
        if !group.is_multiple_of(ep) && !ep.is_multiple_of(group) {
            return refuse(format!(
                "would hold other numbers of each expert with ep={ep}: use a multiple or a divisor of ep"
            ));
        }
        Ok(())
    }
}

fn divisors(number: usize) -> String {
    let divisors: Vec<String> =
        (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).map(|divisor| divisor.to_string()).collect();
    divisors.join(", ")
}

/// Name of the groups that share out, where they are not all data-parallel ranks.
pub const ZERO: &str = "zero";
/// Name of the groups of ranks that have the same slice then.
pub const ZERO_REPLICAS: &str = "zero_replicas";

/// The groups of a rank for what is summed over some axes.
#[derive(Debug)]
pub(crate) struct ZeroGroup {
    /// The ranks that share out.
    pub sharers: Group,
    /// The ranks with the same slice.
    pub replicas: Group,
}

/// The groups of a rank, by the axes of the batch.
#[derive(Debug)]
pub(crate) struct ZeroGroups(BTreeMap<Vec<Axis>, ZeroGroup>);

impl ZeroGroups {
    /// Makes the groups. Collective over the world: every rank makes the same ones in the same order.
    pub fn new(rank: &Rank, zero: Zero) -> Result<Self, CommError> {
        let (mesh, own) = (rank.mesh(), rank.world_rank());
        let mut groups = BTreeMap::new();
        let batch = Zero::batch_axes(&mesh.axes().collect::<Vec<_>>());
        for set in 1..1 << batch.len() {
            let axes: Vec<Axis> = (0..batch.len()).filter(|at| set >> at & 1 == 1).map(|at| batch[at]).collect();
            let all = rank.group_over(&axes);
            let sharers = zero.sharers(mesh, own, &axes);
            let group = match sharers.len() == all.size() && zero.group.is_none() {
                true => ZeroGroup { sharers: all.clone(), replicas: rank.group_over(&[]).clone() },
                false => {
                    // The place of each rank in its group of neighbours, who follow each other.
                    let ranks = mesh.group(own, &axes); // of this mesh, whose world may be a part of another
                    let groups = ranks.chunk_by(|&one, &next| zero.number(mesh, one) == zero.number(mesh, next));
                    let places = groups.flat_map(|group| group.iter().copied().enumerate());
                    let place = sharers.iter().position(|&rank| rank == own);
                    let same = places.filter(|&(at, _)| Some(at) == place).map(|(_, rank)| rank);
                    let replicas: Vec<usize> = same.collect();
                    let sharers = rank.subgroup(ZERO, &sharers)?;
                    ZeroGroup { sharers, replicas: rank.subgroup(ZERO_REPLICAS, &replicas)? }
                }
            };
            groups.insert(axes, group);
        }
        Ok(Self(groups))
    }

    /// The groups for what is summed over `axes`.
    pub fn get(&self, axes: &[Axis]) -> Option<&ZeroGroup> {
        self.0.get(&Zero::batch_axes(axes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_shares_out_with_its_neighbours() {
        let mesh: Mesh = "dp=8,ep=2,tp=2".parse().unwrap();
        let sharers = |group, axes: &[Axis], rank| Zero { stage: ZeroStage::States, group }.sharers(&mesh, rank, axes);
        assert_eq!(sharers(None, &Axis::DATA, 5), [1, 3, 5, 7, 9, 11, 13, 15]);
        assert_eq!(sharers(Some(4), &Axis::DATA, 5), [1, 3, 5, 7]);
        // Of the four, two hold the same experts.
        assert_eq!(sharers(Some(4), &[Axis::Dp], 5), [1, 5]);
        assert_eq!(sharers(Some(2), &[Axis::Dp], 5), [5]);
        assert_eq!(sharers(None, &[Axis::Dp], 5), [1, 5, 9, 13]);
        for (group, rank) in
            [None, Some(4), Some(2), Some(1)].into_iter().flat_map(|group| (0..16).map(move |rank| (group, rank)))
        {
            for axes in [&Axis::DATA[..], &[Axis::Dp], &[Axis::Ep], &[]] {
                let (zero, sharers) = (Zero { stage: ZeroStage::States, group }, sharers(group, axes, rank));
                let index = sharers.iter().position(|&other| other == rank).unwrap();
                let sharer = Replica { index, of: sharers.len() };
                assert_eq!(zero.sharer(&mesh, rank, axes), sharer, "{group:?}, {axes:?}, rank {rank}");
            }
        }
        let replica = |group, axes: &[Axis], rank| {
            let Replica { index, of } = Zero { stage: ZeroStage::States, group }.replica(&mesh, rank, axes);
            (index, of)
        };
        assert_eq!([5, 13].map(|rank| replica(Some(4), &Axis::DATA, rank)), [(0, 2), (1, 2)]);
        assert_eq!([5, 9].map(|rank| replica(Some(2), &[Axis::Dp], rank)), [(1, 4), (2, 4)]);
        assert_eq!(replica(None, &Axis::DATA, 13), (0, 1));
    }

    #[test]
    fn groups_that_cannot_be_formed_are_refused() {
        let refused = |stage, group, mesh: &str| {
            Zero { stage, group: Some(group) }.require_groups(&mesh.parse().unwrap()).unwrap_err().to_string()
        };
        assert_eq!(
            refused(ZeroStage::States, 3, "dp=4"),
            "ZeRO in groups of 3 data-parallel ranks: does not divide dp=4: use one of 1, 2, 4"
        );
        assert!(refused(ZeroStage::Off, 2, "dp=4").ends_with("shares out nothing at stage 0: use a stage of 1 to 3"));
        assert!(refused(ZeroStage::States, 3, "dp=6,ep=2").ends_with("use a multiple or a divisor of ep"));
    }
}
