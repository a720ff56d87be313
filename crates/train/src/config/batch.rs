//! How a global batch is split: `global_batch_size = dp · num_microbatches · micro_batch_size`.

use super::fault::Fault;
use meshwork_pipeline::{Generator, MicroCounts, Shape, ShapeError, default_micros};

/// The requested split. Values that are not given are computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchRequest {
    pub(crate) global_batch_size: usize,
    pub(crate) dp: usize,
    pub(crate) pp: usize,
    pub(crate) schedule: Generator,
    pub(crate) virtual_stages: usize,
    pub(crate) num_microbatches: Option<usize>,
    pub(crate) micro_batch_size: Option<usize>,
}

/// A split that adds up and that the schedule takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BatchSplit {
    pub(crate) num_microbatches: usize,
    pub(crate) micro_batch_size: usize,
    pub(crate) notice: Option<String>,
}

/// Micro-batches, samples of each, and a notice.
type Chosen = (usize, usize, Option<String>);

const BATCH: &str = "training.global_batch_size";
const MICROS: &str = "pipeline.num_microbatches";
const CHUNKS: &str = "pipeline.virtual_stages";
const SIZE: &str = "training.micro_batch_size";

/// The default searches no further than this, so that an absurd batch is refused at once.
const MAX_DEFAULT: usize = 4096;

impl BatchRequest {
    fn shape(self, micros: usize) -> Shape {
        Shape { pp: self.pp, virtual_stages: self.virtual_stages, micros }
    }

    /// A fault of the global batch.
    fn fault(self, problem: String, valid: String) -> Fault {
        Fault::new(BATCH, self.global_batch_size, problem, valid)
    }

    pub(crate) fn split(self) -> Result<BatchSplit, Vec<Fault>> {
        let some = self.schedule.micros(self.pp).min;
        if let Err(error @ ShapeError::VirtualStages { only, .. }) = self.schedule.takes(self.shape(some)) {
            let valid = only.map_or("use 1 or more".to_owned(), |only| format!("use {only}, or another schedule"));
            return Err(vec![Fault::new(CHUNKS, self.virtual_stages, error.to_string(), valid)]);
        }
        let chosen = match (self.num_microbatches, self.micro_batch_size) {
            (Some(micros), Some(size)) => self.both(micros, size),
            (Some(micros), None) => self.divided_by(MICROS, micros).map(|size| (micros, size, None)),
            (None, Some(size)) => self.divided_by(SIZE, size).map(|micros| (micros, size, None)),
            (None, None) => self.neither(),
        };
        let micros = chosen.as_ref().ok().map(|split| split.0).or(self.num_microbatches);
        let untaken = micros.and_then(|micros| Some((micros, self.schedule.takes(self.shape(micros)).err()?)));
        let untaken = untaken.map(|(micros, error)| match (self.num_microbatches, self.micro_batch_size) {
            (None, Some(size)) => {
                let problem = format!("leaves too few micro-batches: {error}");
                Fault::new(SIZE, size, problem, format!("use a smaller {SIZE} or a larger {BATCH}"))
            }
            _ => {
                let valid = format!("use {}, or a smaller pp", counts(self.schedule.micros(self.pp)));
                Fault::new(MICROS, micros, error.to_string(), valid)
            }
        });
        match (chosen, untaken) {
            (Ok((num_microbatches, micro_batch_size, notice)), None) => {
                Ok(BatchSplit { num_microbatches, micro_batch_size, notice })
            }
            (chosen, untaken) => Err(chosen.err().into_iter().chain(untaken).collect()),
        }
    }

    fn both(self, micros: usize, size: usize) -> Result<Chosen, Fault> {
        let Self { global_batch_size, dp, .. } = self;
        // Three factors of up to 2^63 each overflow, so the product saturates.
        let product = dp.saturating_mul(micros).saturating_mul(size);
        if product == global_batch_size {
            return Ok((micros, size, None));
        }
        let problem = format!("is not dp · num_microbatches · micro_batch_size = {dp} · {micros} · {size} = {product}");
        Err(self.fault(problem, format!("use {BATCH} = {product}, or leave out {MICROS} or {SIZE}")))
    }

    /// The share of the batch that is left after dividing by dp and by the factor that `key` gives.
    fn divided_by(self, key: &str, factor: usize) -> Result<usize, Fault> {
        let Self { global_batch_size, dp, .. } = self;
        let divisor = dp.saturating_mul(factor);
        if global_batch_size.is_multiple_of(divisor) {
            return Ok(global_batch_size / divisor);
        }
        let (_, name) = key.split_once('.').unwrap_or(("", key));
        let problem = format!("is not divisible by dp · {name} = {dp} · {factor} = {divisor}");
        Err(self.fault(problem, multiple(global_batch_size, divisor)))
    }

    fn neither(self) -> Result<Chosen, Fault> {
        let Self { global_batch_size, dp, pp, schedule, .. } = self;
        if !global_batch_size.is_multiple_of(dp) {
            return Err(self.fault(format!("is not divisible by dp = {dp}"), multiple(global_batch_size, dp)));
        }
        let per_rank = global_batch_size / dp;
        let divides = |micros| per_rank.is_multiple_of(micros);
        let (name, min) = (schedule.name(), schedule.micros(pp).min);
        let Some(choice) = default_micros(schedule, pp, self.virtual_stages, per_rank.min(MAX_DEFAULT), divides) else {
            return Err(if per_rank < min {
                let problem = format!(
                    "gives each of dp = {dp} ranks {per_rank} samples, but schedule {name} over pp = {pp} needs at least {min} micro-batches"
                );
                self.fault(problem, format!("use {BATCH} = {} or more, or a smaller pp", dp.saturating_mul(min)))
            } else {
                let problem = format!(
                    "no number of micro-batches from {min} to {MAX_DEFAULT} divides its {per_rank} samples per rank"
                );
                self.fault(problem, format!("give {MICROS}, or use a rounder batch"))
            });
        };
        let micros = choice.micros;
        let notice = (!choice.under_quarter()).then(|| {
            format!(
                "{MICROS} = {micros}, the largest that {BATCH} = {global_batch_size} allows over dp = {dp}, leaves the pipeline idle for {:.0}% of \
                 the time: a larger batch or fewer stages would help",
                100.0 * choice.bubble
            )
        });
        Ok((micros, per_rank / micros, notice))
    }
}

/// "4 or more", "a multiple of 4".
fn counts(takes: MicroCounts) -> String {
    match takes {
        MicroCounts { min, multiple_of: 1 } => format!("{min} or more"),
        takes => takes.to_string(),
    }
}

/// "use a multiple of 4, such as 8 or 12", for the multiples around `value`.
pub(crate) fn multiple(value: usize, of: usize) -> String {
    let below = value / of * of;
    let above = below.saturating_add(of);
    match below {
        0 => format!("use a multiple of {of}, such as {above}"),
        _ => format!("use a multiple of {of}, such as {below} or {above}"),
    }
}

/// The two of `valid` closest to a value, as in "2 or 4".
pub(crate) fn closest(valid: impl IntoIterator<Item = usize>, to: usize) -> String {
    let mut valid: Vec<usize> = valid.into_iter().collect();
    valid.sort_by_key(|of| of.abs_diff(to));
    valid.truncate(2);
    valid.sort_unstable();
    valid.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(global_batch_size: usize, dp: usize, pp: usize) -> BatchRequest {
        let schedule = Generator::OneFOneB;
        BatchRequest {
            global_batch_size,
            dp,
            pp,
            schedule,
            virtual_stages: 1,
            num_microbatches: None,
            micro_batch_size: None,
        }
    }

    /// A request with a schedule that needs at least one micro-batch per stage.
    fn of_zb_h2(global_batch_size: usize, dp: usize, pp: usize) -> BatchRequest {
        BatchRequest { schedule: Generator::ZbH2, ..request(global_batch_size, dp, pp) }
    }

    fn split(request: BatchRequest) -> (usize, usize, bool) {
        let split = request.split().unwrap();
        (split.num_microbatches, split.micro_batch_size, split.notice.is_some())
    }

    fn refusal(request: BatchRequest) -> String {
        let faults = request.split().unwrap_err();
        faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_default_is_the_smallest_number_with_a_bubble_under_a_quarter() {
        assert_eq!(split(request(16, 1, 1)), (1, 16, false));
        assert_eq!(split(request(16, 2, 2)), (4, 2, false)); // 1/5; 2 would idle for 1/3
        assert_eq!(split(request(16, 1, 4)), (16, 1, false)); // 3/19; 8 would idle for 3/11
        assert_eq!(split(request(48, 1, 4)), (12, 4, false)); // 3/15
    }

    #[test]
    fn else_the_default_is_the_largest_with_a_notice() {
        assert_eq!(split(request(8, 2, 4)), (4, 1, true));
        let notice = request(8, 2, 4).split().unwrap().notice.unwrap();
        assert_eq!(
            notice,
            "pipeline.num_microbatches = 4, the largest that training.global_batch_size = 8 allows over dp = 2, \
             leaves the pipeline idle for 43% of the time: a larger batch or fewer stages would help"
        );
    }

    #[test]
    fn fewer_micro_batches_than_stages_are_a_default_only_where_there_can_be_no_more() {
        assert_eq!(split(request(4, 2, 4)), (2, 1, true));
        assert_eq!(split(BatchRequest { num_microbatches: Some(2), ..request(16, 1, 4) }), (2, 8, false));
        assert_eq!(split(request(1_000_000_007, 1, 2)), (1, 1_000_000_007, true));
    }

    #[test]
    fn one_factor_gives_the_other() {
        assert_eq!(split(BatchRequest { num_microbatches: Some(8), ..request(32, 2, 2) }), (8, 2, false));
        assert_eq!(split(BatchRequest { micro_batch_size: Some(4), ..request(32, 2, 2) }), (4, 4, false));
        let both = BatchRequest { num_microbatches: Some(4), micro_batch_size: Some(4), ..request(32, 2, 2) };
        assert_eq!(split(both), (4, 4, false));
    }

    #[test]
    fn products_that_do_not_add_up_are_spelled_out() {
        let both = BatchRequest { num_microbatches: Some(4), micro_batch_size: Some(3), ..request(16, 2, 2) };
        assert_eq!(
            refusal(both),
            "training.global_batch_size = 16: is not dp · num_microbatches · micro_batch_size = 2 · 4 · 3 = 24; use \
             training.global_batch_size = 24, or leave out pipeline.num_microbatches or training.micro_batch_size"
        );
        assert_eq!(
            refusal(BatchRequest { num_microbatches: Some(3), ..request(16, 2, 2) }),
            "training.global_batch_size = 16: is not divisible by dp · num_microbatches = 2 · 3 = 6; use a multiple of 6, \
             such as 12 or 18"
        );
        assert_eq!(
            refusal(BatchRequest { micro_batch_size: Some(16), ..request(16, 2, 2) }),
            "training.global_batch_size = 16: is not divisible by dp · micro_batch_size = 2 · 16 = 32; use a multiple of \
             32, such as 32"
        );
        assert_eq!(
            refusal(request(16, 3, 1)),
            "training.global_batch_size = 16: is not divisible by dp = 3; use a multiple of 3, such as 15 or 18"
        );
    }

    #[test]
    fn fewer_micro_batches_than_the_schedule_needs() {
        assert_eq!(
            refusal(BatchRequest { num_microbatches: Some(2), ..of_zb_h2(16, 1, 4) }),
            "pipeline.num_microbatches = 2: schedule zb_h2 over pp=4 needs at least 4 micro-batches, got 2; gpipe and 1f1b \
             take any number; use 4 or more, or a smaller pp"
        );
        assert_eq!(
            refusal(of_zb_h2(4, 2, 4)),
            "training.global_batch_size = 4: gives each of dp = 2 ranks 2 samples, but schedule zb_h2 over pp = 4 needs at \
             least 4 micro-batches; use training.global_batch_size = 8 or more, or a smaller pp"
        );
        assert_eq!(
            refusal(BatchRequest { micro_batch_size: Some(8), ..of_zb_h2(16, 1, 4) }),
            "training.micro_batch_size = 8: leaves too few micro-batches: schedule zb_h2 over pp=4 needs at least 4 \
             micro-batches, got 2; gpipe and 1f1b take any number; use a smaller training.micro_batch_size or a larger \
             training.global_batch_size"
        );
        // Both faults of one setting are reported together.
        assert_eq!(refusal(BatchRequest { num_microbatches: Some(3), ..of_zb_h2(16, 1, 4) }).lines().count(), 2);
    }

    #[test]
    fn absurd_sizes_are_answered_at_once() {
        let huge = BatchRequest {
            num_microbatches: Some(usize::MAX / 2),
            micro_batch_size: Some(usize::MAX / 2),
            ..request(usize::MAX / 2, 2, 1)
        };
        assert!(huge.split().is_err());
        assert_eq!(
            refusal(of_zb_h2(1_000_000_007, 1, 2)),
            "training.global_batch_size = 1000000007: no number of micro-batches from 2 to 4096 divides its 1000000007 \
             samples per rank; give pipeline.num_microbatches, or use a rounder batch"
        );
    }
}
