//! The part that [`LossySum`](super::lossy_sum::LossySum) and [`FactorSum`](super::factor_sum::FactorSum) share: the
//! plan, the number of the update, the states of the sender, and memory.

use super::sum_plan::SumPlan;
use crate::prelude::*;
use meshwork_compress::Draws;
use meshwork_compress::feedback::Sender;
use meshwork_data_parallel::VectorError;

/// The sums of one bucket.
#[derive(Debug)]
pub struct BucketSum {
    pub plan: SumPlan,
    pub device: Arc<dyn Device>,
    /// The states of this rank's messages.
    pub sender: Sender<Buffer>,
    /// The number of the update, and its sums so far.
    number: u64,
    sums: usize,
}

/// A sum in f32, and where it is rounded to if gradients have 16 bits.
#[derive(Debug)]
pub struct Wide {
    pub sum: Buffer,
    rounded: Option<Buffer>,
}

impl BucketSum {
    /// Sums of no gradients yet, whose states have these numbers of elements: residual, estimate and momentum.
    pub fn new(plan: SumPlan, device: Arc<dyn Device>, states: [usize; 3]) -> Result<Self, Error> {
        let [residual, estimate, momentum] = states.map(|count| zeros(&*device, count));
        let sender = Sender { residual: residual?, estimate: estimate?, momentum: momentum? };
        Ok(Self { plan, device, sender, number: 0, sums: 0 })
    }

    /// Begins the update of this number. Says whether it compresses.
    pub fn begin(&mut self, number: u64) -> bool {
        (self.number, self.sums) = (number, 0);
        number >= self.plan.starts_at
    }

    /// Counts a sum. Says whether it is of the first update that compresses.
    pub fn start(&mut self) -> bool {
        self.sums += 1;
        self.number == self.plan.starts_at
    }

    /// The random numbers of this sum, each of which draws `each`.
    pub fn draws(&self, each: usize) -> Draws {
        Draws::new(self.plan.seed, &self.plan.name, self.number).skip(self.sums.saturating_sub(1) * each)
    }

    pub fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer, Error> {
        let _buffers = self.device.meter().enter(Category::Buffers);
        self.device.alloc(dtype, count)
    }

    /// Memory for the sum, in f32: the gradients' own, unless they have 16 bits.
    pub fn wide(&self, gradients: Buffer) -> Result<Wide, Error> {
        Ok(match gradients.dtype() {
            DType::F32 => Wide { sum: gradients, rounded: None },
            _ => Wide { sum: self.alloc(DType::F32, gradients.count())?, rounded: Some(gradients) },
        })
    }

    /// The sum in the type of the gradients, with zeros where there is padding.
    pub fn narrow(&self, Wide { mut sum, rounded }: Wide) -> Result<Buffer, VectorError> {
        for padding in &self.plan.padding {
            self.device.optim()?.zero(&mut sum, padding.clone())?;
        }
        let Some(mut rounded) = rounded else { return Ok(sum) };
        let narrow = self.device.pointwise()?.cast(&sum, rounded.dtype())?;
        self.device.layout()?.copy_into(&narrow, 0..narrow.count(), &mut rounded, 0)?;
        Ok(rounded)
    }
}

/// A state of `count` elements, all zero.
pub fn zeros(device: &dyn Device, count: usize) -> Result<Buffer, Error> {
    let _states = device.meter().enter(Category::Optimizer);
    device.zeros(DType::F32, count)
}
