//! ZB-H1 and ZB-H2 (Qi et al., 2024, arXiv 2401.10241, section 2): 1F1B whose weight gradients fill the bubble.

use super::ActionKind::{Forward, InputGradient, WeightGradient};
use super::placement::{one_per_rank, one_step};
use super::{Action, Schedule};

/// 1F1B with split backwards, in 1F1B's memory: min(pp, micros) micro-batches on every rank.
///
/// Gradients of inputs go back through the ranks alone, and the later ranks defer weight gradients until the end, when
/// they would be idle: the bubble is (pp - 1)(F + I - W), a third of 1F1B's where all three take the same time. It
/// takes any number of micro-batches from 1. With fewer than `pp` there are fewer weight gradients to defer: the
/// bubble is (pp - 1)(F + I) - (micros - 1) W.
///
/// ```
/// let schedule = meshwork_pipeline::zb_h1(2, 3);
/// assert_eq!(
///     meshwork_pipeline::render(&schedule)?,
///     "rank 0 | F0 F1    I0 W0 F2 I1 W1 I2 W2\n\
///      rank 1 |    F0 I0 F1 I1 W0 F2 I2 W1 W2\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn zb_h1(pp: usize, micros: usize) -> Schedule {
    handcrafted("zb_h1", pp, micros, |rank| pp - rank, |rank| rank)
}

/// ZB-H1 that fills the pipeline deeper, for up to 2 pp - 1 micro-batches on every rank.
///
/// The bubble is (pp - 1)(F + I - 2W) from 2 pp - 1 micro-batches on: there is none if all three take the same time.
/// Ranks then start and end a step at different times, so it gains only without a barrier between steps.
///
/// ```
/// let schedule = meshwork_pipeline::zb_h2(2, 3);
/// assert_eq!(
///     meshwork_pipeline::render(&schedule)?,
///     "rank 0 | F0 F1 F2 I0 W0 I1 W1 I2 W2\n\
///      rank 1 |    F0 I0 F1 I1 F2 I2 W0 W1 W2\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn zb_h2(pp: usize, micros: usize) -> Schedule {
    handcrafted("zb_h2", pp, micros, |rank| 2 * (pp - rank) - 1, |rank| 2 * rank)
}

/// Forwards, input gradients and weight gradients alternate. Rank r starts `in_flight(r)` forwards before the first
/// input gradient, and makes weight gradients `delay(r)` micro-batches after their input gradients.
fn handcrafted(
    name: &str,
    pp: usize,
    micros: usize,
    in_flight: impl Fn(usize) -> usize,
    delay: impl Fn(usize) -> usize,
) -> Schedule {
    let row = |rank: usize| {
        let on = |kind, micro: Option<usize>| micro.filter(|&micro| micro < micros).map(|m| Action::new(kind, rank, m));
        let (ahead, delay) = (in_flight(rank) - 1, delay(rank));
        let fill = (0..ahead).map(|micro| on(Forward, Some(micro)));
        let turns = (0..micros + delay).flat_map(|turn| {
            let weight = turn.checked_sub(delay);
            [on(Forward, Some(turn + ahead)), on(InputGradient, Some(turn)), on(WeightGradient, weight)]
        });
        fill.chain(turns).flatten().collect()
    };
    one_step(name, one_per_rank(pp), micros, (0..pp).map(row).collect())
}
