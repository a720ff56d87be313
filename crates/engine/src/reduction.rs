//! How the gradients of a rank are summed: each bucket over its ranks, in rounds, and compressed if the plan says so.

use crate::compress::factor_sum::FactorSum;
use crate::compress::lossy_sum::LossySum;
use crate::compress::matrices::FactoredParameter;
use crate::compress::settings::NOTHING;
use crate::compress::sum_plan::{Member, Replicas, SumPlan, SumState};
use crate::layout::Layout;
use crate::model_plan::Tied;
use crate::prelude::*;
use crate::zero::{Replica, ZeroGroup, ZeroGroups};
use meshwork_compress::Scheme;
use meshwork_data_parallel::{Bucket, Parking, Reducer, Sum, VectorError, Vectors, cuts_batch, rounds};

impl Layout {
    /// How the gradients of a flat buffer are summed over data-parallel ranks, where they are compressed. `updates` is
    /// their number in a step.
    pub fn sum_plan(&self, plan: &Plan, flat: usize, updates: usize) -> Option<SumPlan> {
        let key = self.keys.get(flat).filter(|_| plan.compress.gradients != NOTHING)?;
        let axes: Vec<Axis> = key.axes.iter().copied().filter(|&axis| cuts_batch(axis)).collect();
        let group = self.mesh.group(self.world_rank, &axes);
        let among = group.iter().position(|&rank| rank == self.world_rank)?;
        let slice = self.slice(flat);
        let scatter = self.cuts.scatter() && slice.place()[1] > 1;
        let [rank, ranks] = if scatter { slice.place() } else { [among, group.len()] };
        let coords = self.mesh.coords(self.world_rank);
        let factored = match plan.compress.gradients {
            Scheme::PowerSgd(of) => {
                let factored = |Member { spec, range }| FactoredParameter::new(of, spec, &self.mesh, coords, range);
                self.members(flat).into_iter().map(factored).collect()
            }
            _ => Vec::new(),
        };
        let name = |&id| format!("gradient of {}", self.declarations.spec(id).name);
        (ranks > 1).then(|| SumPlan {
            scheme: plan.compress.gradients,
            feedback: plan.compress.feedback,
            name: self.flats[flat].first().map_or_else(String::new, name),
            seed: plan.seed,
            starts_at: plan.compress.start_step.saturating_sub(1) * updates as u64,
            elements: self.elements[flat],
            rank,
            ranks,
            scatter,
            padding: self.padding(flat),
            factored,
        })
    }

    fn members(&self, flat: usize) -> Vec<Member<'_>> {
        let member = |&id| Member { spec: self.declarations.spec(id), range: self.span(id).range.clone() };
        self.flats[flat].iter().map(member).collect()
    }

    /// The slices of the states that the sums of a flat buffer keep from step to step.
    pub fn sum_states(&self, flat: usize, plan: &SumPlan) -> Result<Vec<SumState>, PlanError> {
        let coords = self.mesh.coords(self.world_rank);
        let replica = |replicas| self.replica_of_sum(flat, replicas);
        let states = plan.kept(replica, &self.members(flat), &self.mesh, coords);
        states.map_err(|error| refused(plan, &error))
    }

    /// The replica of a state of compressed gradients of a flat buffer that this rank has.
    fn replica_of_sum(&self, flat: usize, replicas: Replicas) -> Replica {
        let coords = self.mesh.coords(self.world_rank);
        let Some(key) = self.keys.get(flat) else { return Replica::ONE };
        let axes = key.axes.iter().filter(|&&axis| replicas == Replicas::Ranks || !cuts_batch(axis));
        let replica = axes.fold(Replica::ONE, |all, &axis| all.within(coords.get(axis), self.mesh.degree(axis)));
        key.tied_ranks.as_ref().map_or(replica, |tied| replica.within_list(tied, coords.get(Axis::Pp)))
    }
}

fn refused(plan: &SumPlan, error: &dyn std::fmt::Display) -> PlanError {
    let problem = format!("{}: {error}", plan.name);
    PlanError::Compress { place: "gradients", scheme: plan.scheme.to_string(), problem }
}

/// The parts of a reducer.
pub struct Reduction<'a> {
    pub rank: &'a Rank,
    pub layout: &'a Layout,
    pub zero: &'a ZeroGroups,
    pub tied: &'a Tied,
    /// The sums of buckets that are compressed.
    pub sums: &'a [Option<SumPlan>],
    /// The tapes of a stage between two updates.
    pub tapes: &'a dyn Fn(usize) -> usize,
    /// The type in which gradients are added up.
    pub dtype: DType,
    pub device: &'a Arc<dyn Device>,
}

impl Reduction<'_> {
    /// The reducer of the buckets, whose gradients are away from memory where there is a place for them.
    ///
    /// # Errors
    /// No memory; a scheme that does not compress a bucket.
    pub fn reducer(&self, parking: Option<Box<dyn Parking>>) -> Result<Reducer> {
        let buckets = (0..self.layout.keys.len()).map(|flat| self.bucket(flat)).collect::<Result<_, _>>()?;
        let vectors = OnDevice { device: self.device.clone(), category: Category::Gradients, dtype: self.dtype };
        Ok(Reducer::parked(buckets, vectors, parking)?)
    }

    fn bucket(&self, flat: usize) -> Result<Bucket, PlanError> {
        let (layout, key) = (self.layout, &self.layout.keys[flat]);
        let sharers = self.zero.get(&key.axes).filter(|zero| layout.cuts.scatter() && zero.sharers.size() > 1);
        let scatter = sharers.is_some();
        let rounds = match sharers {
            None => rounds(self.rank, key.axes.iter().copied()),
            Some(ZeroGroup { sharers, replicas }) => {
                let others = rounds(self.rank, key.axes.iter().copied().filter(|&axis| !cuts_batch(axis)));
                let replicas = Some(replicas.clone()).filter(|group| group.size() > 1);
                std::iter::once(sharers.clone()).chain(replicas).chain(others).collect()
            }
        };
        let shares = key.readers.iter().map(|&stage| (self.tapes)(stage)).sum();
        let (shares, fills) = if scatter && layout.cuts.scatter_each() { (1, shares) } else { (shares, 1) };
        // Each member has its copies one after the other. Their sums have the layout of the weights.
        let with_copies = |range: &Range<usize>| key.copies * range.start..key.copies * range.end;
        let tied = key.tied_ranks.as_ref().and_then(|pp_ranks| self.tied.groups.get(pp_ranks));
        Ok(Bucket {
            members: layout.flats[flat].iter().map(|&id| with_copies(&layout.span(id).range)).collect(),
            elements: key.copies * layout.elements[flat],
            rounds,
            sum: self.sums[flat].clone().map(|plan| self.sum(plan)).transpose()?,
            last: tied.filter(|group| group.size() > 1).cloned(),
            scatter,
            shares,
            fills,
        })
    }

    fn sum(&self, plan: SumPlan) -> Result<Box<dyn Sum>, PlanError> {
        let sum: Result<Box<dyn Sum>, VectorError> = match plan.scheme {
            Scheme::PowerSgd(of) => FactorSum::new(of, plan.clone(), self.device.clone()).map(|sum| Box::new(sum) as _),
            _ => LossySum::new(plan.clone(), self.device.clone()).map(|sum| Box::new(sum) as _),
        };
        sum.map_err(|error| refused(&plan, &error))
    }
}

/// Vectors in the memory of a device, of one category and type.
#[derive(Debug)]
pub struct OnDevice {
    pub device: Arc<dyn Device>,
    pub category: Category,
    pub dtype: DType,
}

impl Vectors for OnDevice {
    fn alloc(&self, count: usize) -> Result<Buffer, VectorError> {
        let _category = self.device.meter().enter(self.category);
        Ok(self.device.alloc(self.dtype, count)?)
    }

    fn like(&self, vector: &Buffer, count: usize) -> Result<Buffer, VectorError> {
        let _category = self.device.meter().enter(self.category);
        Ok(self.device.alloc(vector.dtype(), count)?)
    }

    fn zero(&self, vector: &mut Buffer, range: Range<usize>) -> Result<(), VectorError> {
        Ok(self.device.optim()?.zero(vector, range)?)
    }

    fn add(&self, sum: &mut Buffer, vector: &Buffer) -> Result<(), VectorError> {
        Ok(self.device.pointwise()?.add_assign(sum, 0, vector)?)
    }
}
