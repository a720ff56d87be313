//! The statistics of a step, from the notes of its micro-batches to their sums: see
//! [`meshwork_tensor::param::Statistic`].
//!
//! Notes are kept by first sample. So a forward that runs again only replaces its notes by the same values, and the
//! order of the sums does not depend on the schedule. Notes stay on the device until the end of the step, when one
//! download brings all of them.

use crate::model_plan::Tied;
use crate::prelude::*;
use meshwork_tensor::Declarations;
use meshwork_tensor::param::{Statistic, StatisticId};
use meshwork_tensor::tape::StatisticNote;

/// Notes of one stage, or of all stages of a rank.
#[derive(Clone, Debug, Default)]
pub struct Noted(BTreeMap<(StatisticId, u64, usize), StatisticNote>);

/// Per statistic: the sums of its terms over the step's samples, on every rank that holds its buffers.
pub type StatisticSums = Vec<(StatisticId, Vec<f64>)>;

/// A statistic in the report of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedStatistic {
    /// The name that its rule [reports](meshwork_tensor::param::StatisticRule::reported).
    pub name: &'static str,
    /// The first buffer that it updates, whose name says which layer has it.
    pub buffer: String,
    /// The sums over all samples of the step.
    pub sums: Vec<f64>,
}

/// The statistics in the report of a step, and their places in the vector that ranks sum to share them.
#[derive(Debug)]
pub struct Reported {
    /// Every statistic of the model: its name, its first buffer, and how many numbers it has.
    all: Vec<(&'static str, String, usize)>,
    /// The statistics that this rank puts into the vector, and their places there. Of the ranks that hold a statistic,
    /// one puts it in.
    own: Vec<(StatisticId, usize)>,
}

impl Reported {
    /// The statistics of a `whole` model, of which this rank has the `local` ones, and puts in those whose first buffer
    /// it `owns`.
    pub fn new(whole: &Declarations, local: &Declarations, owns: impl Fn(&ParamSpec) -> bool) -> Self {
        let (mut all, mut own, mut at) = (Vec::new(), Vec::new(), 0);
        for (name, spec) in whole.statistics().iter().filter_map(|statistic| reported(whole, statistic)) {
            let here = |id: &StatisticId| {
                let local = reported(local, &local.statistics()[id.index()]);
                local.is_some_and(|(_, held)| held.name == spec.name && owns(held))
            };
            own.extend(local.statistic_ids().find(here).map(|id| (id, at)));
            all.push((name, spec.name.clone(), spec.global_elements()));
            at += spec.global_elements();
        }
        Self { all, own }
    }

    /// This rank's part of the vector.
    pub fn part(&self, sums: &StatisticSums) -> Vec<f64> {
        let mut part = vec![0.0; self.all.iter().map(|(.., count)| count).sum()];
        for (id, sum) in sums {
            if let Some((_, at)) = self.own.iter().find(|(own, _)| own == id) {
                part[*at..at + sum.len()].copy_from_slice(sum);
            }
        }
        part
    }

    /// The statistics of the whole model, from the sum of all parts.
    pub fn read(&self, mut sum: &[f64]) -> Vec<ReportedStatistic> {
        let of = |(name, buffer, count): &(&'static str, String, usize)| ReportedStatistic {
            name,
            buffer: buffer.clone(),
            sums: sum.split_off(..*count).unwrap_or_default().to_vec(),
        };
        self.all.iter().map(of).collect()
    }
}

/// The name of a statistic that is reported, and its first buffer.
fn reported<'a>(declarations: &'a Declarations, statistic: &Statistic) -> Option<(&'static str, &'a ParamSpec)> {
    Some((statistic.rule.reported()?, declarations.spec(*statistic.buffers.first()?)))
}

impl Noted {
    /// Adds the notes of one micro-batch. Notes that are added again replace themselves. A layer that is applied
    /// several times leaves one note each time, and each counts.
    pub fn add(&mut self, first_sample: u64, notes: &[StatisticNote]) {
        let mut uses: BTreeMap<StatisticId, usize> = BTreeMap::new();
        for note in notes {
            let uses = uses.entry(note.id).or_default();
            self.0.insert((note.id, first_sample, *uses), note.clone());
            *uses += 1;
        }
    }

    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Sums the terms in the order of the samples, then over the ranks that have other samples: the ranks of dp, and
    /// the replicas of the stage.
    pub fn sum(
        self,
        declarations: &Declarations,
        device: &dyn Device,
        rank: &Rank,
        tied: &Tied,
    ) -> Result<StatisticSums> {
        if self.0.is_empty() {
            return Ok(StatisticSums::new());
        }
        let mut sums: BTreeMap<StatisticId, Vec<f64>> = BTreeMap::new();
        let values = self.download(device)?;
        for (((id, ..), note), values) in self.0.iter().zip(values) {
            let terms = declarations.statistics()[id.index()].rule.terms(note.weight, &values);
            match sums.get_mut(id) {
                None => drop(sums.insert(*id, terms)),
                Some(sum) => sum.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term),
            }
        }
        for (id, sum) in &mut sums {
            rank.data_group().all_reduce_slice(sum, ReduceOp::Sum)?;
            let first = declarations.statistics()[id.index()].buffers.first();
            let replicas = first.and_then(|&id| tied.find(&declarations.spec(id).name));
            if let Some(group) = replicas.and_then(|replicas| tied.groups.get(&replicas.pp_ranks)) {
                group.all_reduce_slice(sum, ReduceOp::Sum)?;
            }
        }
        Ok(sums.into_iter().collect())
    }

    /// The values of each note, in order.
    fn download(&self, device: &dyn Device) -> Result<Vec<Vec<f32>>> {
        let count = |note: &StatisticNote| note.values.iter().map(|values| values.count()).sum::<usize>();
        let mut all = device.zeros(DType::F32, self.0.values().map(count).sum())?;
        let mut at = 0;
        for values in self.0.values().flat_map(|note| &note.values) {
            match values.dtype() {
                DType::F32 => device.layout()?.copy_into(values.buffer(), 0..values.count(), &mut all, at)?,
                _ => device.pointwise()?.cast_into(values.buffer(), &mut all, at)?,
            }
            at += values.count();
        }
        let host = device.download(&all)?;
        let mut rest = host.as_slice::<f32>()?;
        let take = |note: &StatisticNote| rest.split_off(..count(note)).unwrap_or_default().to_vec();
        Ok(self.0.values().map(take).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_cpu::Cpu;
    use meshwork_tensor::param::StatisticRule;
    use meshwork_tensor::{Tensor, Widened};

    #[derive(Debug)]
    struct Sum;

    impl StatisticRule for Sum {
        fn terms(&self, weight: f64, values: &[f32]) -> Vec<f64> {
            vec![weight, f64::from(values[0])]
        }

        fn update(&self, _sums: &[f64], _buffers: &mut [Vec<f32>]) {}
    }

    /// Notes of activations that are stored in 16 bits used to end the step: "the buffer holds f32, asked for as bf16".
    #[test]
    fn values_in_16_bits_are_read_in_f32() {
        let (mut declared, device) = (Declarations::new(), Widened::device(Cpu::device()));
        let id = declared.declare_statistic(Vec::new(), Sum);
        let mut noted = Noted::default();
        for (first_sample, dtype) in [DType::Bf16, DType::F16, DType::F32].into_iter().enumerate() {
            let values = Tensor::from_slice(&device, &[0.5f32], [1]).unwrap().cast(dtype).unwrap();
            noted.add(first_sample as u64, &[StatisticNote { id, weight: 1.0, values: vec![values] }]);
        }
        let sums = noted.sum(&declared, &*device, &Rank::alone().unwrap(), &Tied::default()).unwrap();
        assert_eq!(sums, [(id, vec![3.0, 1.5])]);
    }

    /// The first note of a layer that was applied twice used to be lost.
    #[test]
    fn a_layer_that_is_applied_twice_counts_twice_and_a_forward_that_runs_again_once() {
        let (mut declared, device) = (Declarations::new(), Cpu::device());
        let id = declared.declare_statistic(Vec::new(), Sum);
        let note = |value: f32| {
            let values = vec![Tensor::from_slice(&device, &[value], [1]).unwrap()];
            StatisticNote { id, weight: 1.0, values }
        };
        let mut noted = Noted::default();
        for first_sample in [0, 4, 0] {
            noted.add(first_sample, &[note(1.0), note(2.0)]);
        }
        let sums = noted.sum(&declared, &*device, &Rank::alone().unwrap(), &Tied::default()).unwrap();
        assert_eq!(sums, [(id, vec![4.0, 6.0])]);
    }
}
