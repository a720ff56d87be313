//! AQ-SGD at the cuts (Wang et al. 2022, arXiv:2206.01299): sender and receiver keep the last activation m of every
//! sample. Samples cross uncompressed the first time. After that the message is of a - m, and the receiver adds it to
//! m.
//!
//! All samples of a step cross a cut in one way: uncompressed if any sample of the global batch is new there. m changes
//! at the end of the step, by all of its messages; if a sample comes twice in a step, its last message counts. So a
//! step that is repeated begins with the same m.
//!
//! Data-parallel ranks and replicas of a stage take samples in turn. At the end of a step the ranks on one side of a
//! cut gather each other's messages, so that all have the same m
//! ([why](../../../../docs/decisions/0040-ranks-hear-of-the-samples-of-others.md)).

use super::crossing::{Crossing, Staged};
use super::packing::Packed;
use crate::offload::disk::Disk;
use crate::offload::rows::Rows;
use crate::prelude::*;
use meshwork_compress::Fold;
use meshwork_nn::SAMPLE;
use meshwork_tensor::param::LocalSlice;
use std::collections::BTreeSet;
use std::mem::take;

/// Name of the groups whose ranks gather each other's messages of a step.
pub const SAMPLES: &str = "samples";

/// The most elements of a slice of the activations of samples, when they are saved.
const SAVED: usize = 1 << 22;

/// The last activations of samples at the cuts of a rank.
#[derive(Debug, Default)]
pub struct Histories {
    of_cut: BTreeMap<usize, History>,
    /// The numbers of the samples of the step, on all data-parallel ranks.
    numbers: Vec<usize>,
    /// Where this rank's samples begin in `numbers`.
    first: usize,
}

/// The last activations of samples at one cut.
#[derive(Debug)]
pub struct History {
    /// Samples of a micro-batch.
    micro_batch: usize,
    /// m of each sample.
    pub kept: Rows,
    /// 1 for each sample that has crossed, else 0.
    pub seen: Vec<f32>,
    /// Whether the step under way has a sample that is new here.
    pub fresh: bool,
    /// The micro-batches of a data-parallel rank that cross.
    micros: Vec<usize>,
    /// The sides of the cut that this rank is on, from which it gets the messages of other ranks: sender, receiver, or
    /// both.
    sides: Vec<Side>,
    /// The messages of this step that this rank sent or received, by micro-batch, and how they are compressed.
    crossed: BTreeMap<usize, Buffer>,
    packed: Option<Packed>,
}

/// The ranks on one side of a cut, of all data-parallel ranks.
#[derive(Clone, Debug)]
struct Side {
    group: Group,
    /// The crossing micro-batches that each of its pp ranks takes.
    holders: Vec<Vec<usize>>,
}

impl Side {
    /// The messages of all its ranks, by data-parallel rank and micro-batch.
    fn gather(
        &self,
        crossed: &BTreeMap<usize, Buffer>,
        bytes: usize,
        device: &dyn Device,
    ) -> Result<BTreeMap<(usize, usize), Buffer>> {
        let (ranks, slots) = (self.group.size(), self.holders.iter().map(Vec::len).max().unwrap_or(0));
        // Ranks are numbered with pp slowest.
        let data_ranks = ranks / self.holders.len();
        let mut own = device.zeros(DType::U8, slots * bytes)?;
        for (slot, micro) in self.holders[self.group.rank() / data_ranks].iter().enumerate() {
            device.layout()?.copy_into(&crossed[micro], 0..bytes, &mut own, slot * bytes)?;
        }
        let all = self.group.all_gather(own, device.alloc(DType::U8, ranks * slots * bytes)?)?;
        let mut messages = BTreeMap::new();
        for rank in 0..ranks {
            for (slot, &micro) in self.holders[rank / data_ranks].iter().enumerate() {
                let start = (rank * slots + slot) * bytes;
                let message = all.slice(start..start + bytes).map_err(meshwork_tensor::Error::from)?;
                messages.insert((rank % data_ranks, micro), message);
            }
        }
        Ok(messages)
    }
}

/// The slices in which a rank saves the activations of `samples` samples. `slice` is its slice of a micro-batch.
pub fn saved_slices(slice: &LocalSlice, samples: usize) -> impl Iterator<Item = LocalSlice> {
    let each = slice.stored.count() / slice.stored[0].max(1);
    let together = (SAVED / each.max(1)).max(1);
    (0..samples).step_by(together).map(move |first| {
        let mut slice = slice.clone();
        slice.ranges[0] = first..(first + together).min(samples);
        slice.stored = slice.stored.with(0, slice.ranges[0].len());
        slice
    })
}

impl Histories {
    /// Reserves m of every sample at every cut of this rank, in memory or on disk. No sample has crossed yet.
    /// Collective over the world.
    pub fn new(
        Staged { plan, model, schedule }: Staged<'_>,
        crossings: &[Crossing],
        rank: &Rank,
        disk: Option<&Rc<Disk>>,
        device: &Arc<dyn Device>,
    ) -> Result<Self> {
        let mut histories = Self::default();
        let Some(samples) = plan.compress.aqsgd else { return Ok(histories) };
        let (micros, mut groups) = (plan.num_microbatches()?, BTreeMap::new());
        histories.first = rank.mesh().data_rank(rank.coords()) * micros * plan.micro_batch_size()?;
        for (cut, boundary) in model.boundaries().iter().enumerate() {
            let [before, behind] = boundary.stages;
            let crosses = |&micro: &usize| {
                boundary.is_virtual || schedule.rank_of(before, micro) != schedule.rank_of(behind, micro)
            };
            let crossing: Vec<usize> = (0..micros).filter(crosses).collect();
            let holders = |stage: usize| {
                let mut holders: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
                crossing
                    .iter()
                    .for_each(|&micro| holders.entry(schedule.rank_of(stage, micro)).or_default().push(micro));
                holders
            };
            let mut sides = Vec::new();
            for holders in BTreeSet::from(boundary.stages.map(holders)) {
                let group = join(rank, holders.keys().copied().collect(), &mut groups)?;
                if holders.contains_key(&rank.coords().get(Axis::Pp)) {
                    sides.push(Side { group, holders: holders.into_values().collect() });
                }
            }
            let of_cut = |at: &&Crossing| at.site.cut == cut && at.site.direction == Direction::Activation;
            if let Some(at) = crossings.iter().find(of_cut) {
                let _states = device.meter().enter(Category::Optimizer);
                let history = History {
                    micro_batch: at.packed.shape.rows(),
                    kept: Rows::new(samples, at.packed.shape.cols(), disk, device)?,
                    seen: vec![0.0; samples],
                    fresh: false,
                    micros: crossing,
                    sides,
                    crossed: BTreeMap::new(),
                    packed: None,
                };
                histories.of_cut.insert(cut, history);
            }
        }
        Ok(histories)
    }

    /// Begins a step of the samples of one of the ranks of `data`.
    ///
    /// # Errors
    /// Samples without numbers, or with unknown ones.
    pub fn begin(&mut self, batch: &Batch, data: &Group, device: &dyn Device) -> Result<()> {
        if self.of_cut.is_empty() {
            return Ok(());
        }
        let mut numbers = vec![0; data.size() * batch.samples()];
        let own = match device.has_values() {
            true => batch.values::<i32>(SAMPLE).map_err(|_| TrainError::Unnumbered { field: SAMPLE })?.to_vec(),
            false => vec![0; batch.samples()],
        };
        data.all_gather_slice(&own, &mut numbers)?;
        self.numbers = numbers.into_iter().map(|number| number as u32 as usize).collect();
        if !device.has_values() {
            // The same samples in each step, as different as there are.
            let samples = self.of_cut.values().next().map_or(1, |history| history.seen.len());
            self.numbers = (0..self.numbers.len()).map(|at| at % samples).collect();
        }
        let per_rank = batch.samples();
        self.of_cut.values_mut().try_for_each(|history| history.begin(&self.numbers, per_rank))
    }

    /// The activations of a cut, if any are kept.
    pub fn at(&self, cut: usize) -> Option<&History> {
        self.of_cut.get(&cut)
    }

    /// m of the samples of a micro-batch that crosses a cut; zeros in a step that crosses uncompressed, whose
    /// difference is the activation.
    ///
    /// # Errors
    /// No memory; a disk that fails.
    pub fn read(&mut self, cut: usize, micro: usize, device: &dyn Device) -> Result<Buffer> {
        let _buffers = device.meter().enter(Category::Buffers);
        let (numbers, first) = (&self.numbers, self.first);
        let history = self.of_cut.get_mut(&cut).unwrap_or_else(|| unreachable!("asked for cuts with a history"));
        let rows = history.micro_batch;
        let of = |micro: usize| &numbers[first + micro * rows..first + (micro + 1) * rows];
        history.read(of(micro), history.next(micro).map(of), device)
    }

    /// Keeps the message of a micro-batch that crossed a cut until the end of the step.
    pub fn keep(&mut self, cut: usize, micro: usize, packed: &Packed, message: Buffer) {
        if let Some(history) = self.of_cut.get_mut(&cut) {
            history.packed = Some(*packed);
            history.crossed.insert(micro, message);
        }
    }

    /// Ends a step, and updates all m. Collective over the ranks on each side of each cut.
    ///
    /// # Errors
    /// A failed rank or disk.
    pub fn end(&mut self, device: &dyn Device) -> Result<()> {
        let numbers = take(&mut self.numbers);
        self.of_cut.values_mut().try_for_each(|history| history.end(&numbers, device))
    }

    /// Forgets the messages of a step that failed, or is run again.
    pub fn clear(&mut self) {
        self.of_cut.values_mut().for_each(|history| (history.crossed, history.packed) = (BTreeMap::new(), None));
    }

    /// Forgets all samples.
    pub fn forget(&mut self) {
        self.of_cut.values_mut().for_each(|history| history.seen.fill(0.0));
    }

    /// The same, for writing.
    pub fn at_mut(&mut self, cut: usize) -> Option<&mut History> {
        self.of_cut.get_mut(&cut)
    }
}

/// The group of this rank, its data-parallel ranks and those on these pp ranks, unless it was made before. Collective
/// over the world.
fn join(rank: &Rank, pp_ranks: Vec<usize>, groups: &mut BTreeMap<Vec<usize>, Group>) -> Result<Group> {
    if let Some(group) = groups.get(&pp_ranks) {
        return Ok(group.clone());
    }
    let (mesh, here) = (rank.mesh(), rank.coords());
    let beside = |other: &usize| {
        let coords = mesh.coords(*other);
        let same = |axis: &Axis| axis.is_data() || *axis == Axis::Pp || coords.get(*axis) == here.get(*axis);
        pp_ranks.contains(&coords.get(Axis::Pp)) && Axis::ALL.iter().all(same)
    };
    let members: Vec<usize> = match pp_ranks.contains(&here.get(Axis::Pp)) {
        true => (0..mesh.world_size()).filter(beside).collect(),
        false => vec![rank.world_rank()],
    };
    let group = rank.subgroup(SAMPLES, &members)?;
    groups.insert(pp_ranks, group.clone());
    Ok(group)
}

impl History {
    /// The name of the state of activations.
    pub const SAMPLES: &str = "samples";
    /// The name of the state of samples that have crossed.
    pub const SEEN: &str = "seen";

    /// Begins a step of these samples, `per_rank` of each data-parallel rank.
    fn begin(&mut self, numbers: &[usize], per_rank: usize) -> Result<()> {
        if let Some(&number) = numbers.iter().find(|&&number| number >= self.seen.len()) {
            return Err(TrainError::Sample { number, samples: self.seen.len() });
        }
        let crosses = |at: usize| self.micros.contains(&(at % per_rank / self.micro_batch));
        self.fresh = numbers.iter().enumerate().any(|(at, &number)| crosses(at) && self.seen[number] == 0.0);
        Ok(())
    }

    /// The micro-batch of this rank that crosses after `micro`.
    fn next(&self, micro: usize) -> Option<usize> {
        let own = |next: &usize| {
            self.sides.iter().any(|Side { group, holders }| {
                let data_ranks = group.size() / holders.len();
                holders[group.rank() / data_ranks].contains(next)
            })
        };
        self.micros.iter().copied().filter(|&next| next > micro).find(own)
    }

    fn read(&mut self, numbers: &[usize], next: Option<&[usize]>, device: &dyn Device) -> Result<Buffer> {
        if self.fresh {
            return Ok(device.zeros(DType::F32, numbers.len() * self.kept.row())?);
        }
        let rows = self.kept.read(numbers)?;
        next.map(|next| self.kept.expect(next.to_vec())).transpose()?;
        Ok(rows)
    }

    fn end(&mut self, numbers: &[usize], device: &dyn Device) -> Result<()> {
        let (crossed, Some(packed)) = (take(&mut self.crossed), self.packed.take()) else { return Ok(()) };
        let _buffers = device.meter().enter(Category::Buffers);
        let mut messages = BTreeMap::new();
        for side in &self.sides {
            messages.extend(side.gather(&crossed, packed.bytes, device)?);
        }
        drop(crossed);
        let per_rank = numbers.len() / messages.keys().map(|(data_rank, _)| data_rank + 1).max().unwrap_or(1);
        // The last message of a sample counts, so they are taken from the end.
        let mut written = BTreeSet::new();
        for ((data_rank, micro), message) in messages.into_iter().rev() {
            let first = data_rank * per_rank + micro * self.micro_batch;
            let of = &numbers[first..first + self.micro_batch];
            let mut rows = self.read(of, None, device)?;
            device.compression()?.unpack(&packed.scheme, packed.shape, &message, Fold::Add, &mut rows)?;
            let places = of.iter().copied().zip(0..).collect::<Vec<_>>().into_iter().rev();
            let places: Vec<_> = places.filter(|(number, _)| written.insert(*number)).collect();
            self.kept.write(&rows, &places)?;
        }
        written.into_iter().for_each(|number| self.seen[number] = 1.0);
        self.kept.flush()
    }
}
