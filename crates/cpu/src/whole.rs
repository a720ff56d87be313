//! Update rules that read whole matrices, on local elements. A rule gets elements in runs that are consecutive in their
//! matrix too; runs are grouped into jobs that threads share. Jobs depend only on extents, so that results do not
//! depend on threads; the measures of jobs are added up in job order.

use super::kernels::reduce::sum_of_squares;
use super::prelude::*;
use meshwork_core::exact::{LIMBS, add_square, add_squares, carry};
use meshwork_optim::{OnHost, OptimError, Over, ParamShape, Pass, PassTotals, Run, SetPart, WholeOptimizer};
use meshwork_tensor::kernel::{Measured, WholeOptim, WholePart, WholeVectors};
use std::sync::{Mutex, PoisonError};

/// The longest run.
const RUN: usize = 4096;
/// Most jobs, because the measures of all jobs are kept until they are added up.
const JOBS: usize = 16;

/// Some runs, and their range in the flat vectors.
struct Job {
    range: Range<usize>,
    /// The first element of each run, numbered matrix by matrix, and its range in the flat vectors.
    runs: Vec<(usize, Range<usize>)>,
}

/// Cuts the elements of a part into jobs of about `elements`. Padding is in no run.
fn jobs(part: &WholePart<'_>, elements: usize) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    part.for_each_run(|first, range| {
        for start in range.clone().step_by(RUN) {
            let end = range.end.min(start + RUN);
            let first = first + start - range.start;
            match jobs.last_mut() {
                Some(job) if end - job.range.start <= elements => {
                    job.range.end = end;
                    job.runs.push((first, start..end));
                }
                _ => jobs.push(Job { range: start..end, runs: vec![(first, start..end)] }),
            }
        }
    });
    jobs
}

/// The ranges of jobs, cut out of a vector.
fn cut<'a, T>(mut rest: &'a mut [T], jobs: &[Job]) -> std::vec::IntoIter<&'a mut [T]> {
    let (mut at, mut pieces) = (0, Vec::with_capacity(jobs.len()));
    for Job { range, .. } in jobs {
        _ = rest.split_off_mut(..range.start - at);
        pieces.extend(rest.split_off_mut(..range.len()));
        at = range.end;
    }
    pieces.into_iter()
}

/// The states of elements, in f32 and in bytes: for each job a vector of slices.
type States<'a> = (Vec<std::vec::IntoIter<&'a mut [f32]>>, Vec<std::vec::IntoIter<&'a mut [u8]>>);

fn states<'a>(states: &'a mut [Buffer], jobs: &[Job]) -> Result<States<'a>> {
    let (mut floats, mut codes) = (Vec::new(), Vec::new());
    for state in states {
        match state.dtype() {
            DType::U8 => codes.push(cut(state.as_mut_slice::<u8>()?, jobs)),
            _ => floats.push(cut(state.as_mut_slice::<f32>()?, jobs)),
        }
    }
    Ok((floats, codes))
}

fn rule<'a>(part: &WholePart<'a>) -> Result<&'a dyn WholeOptimizer> {
    match part.rule.on_host() {
        OnHost::Whole(rule) => Ok(rule),
        OnHost::Elements(rule) => {
            let (rule, problem) = (rule.name().to_owned(), "it updates element by element and measures nothing");
            Err(OptimError::Custom { rule, problem: problem.to_owned() }.into())
        }
    }
}

fn slices<T: meshwork_core::Element>(buffers: &[Buffer]) -> Result<Vec<&[T]>> {
    buffers.iter().map(|buffer| Ok(buffer.as_slice::<T>()?)).collect()
}

/// The totals of the passes so far, measure by measure.
fn totals<'a>(passes: &[Pass], shape: &ParamShape, buffers: &'a [Buffer]) -> Result<Vec<&'a [f64]>> {
    let mut totals = Vec::new();
    for (pass, buffer) in passes.iter().zip(buffers) {
        let mut rest = buffer.as_slice::<f64>()?;
        for over in pass.over() {
            totals.push(rest.split_off(..over.count(shape)).unwrap_or_default());
        }
    }
    Ok(totals)
}

/// The measures of a job.
enum Measures {
    Nothing,
    /// Sums of squares.
    Sums(Vec<f64>),
    /// Digits of exact sums of squares.
    Digits(Vec<[u64; LIMBS]>),
    /// Largest values.
    Largest(Vec<f64>),
}

impl Measures {
    /// Adds the measures of a run, one for each set of `over`; their indices begin at `base`.
    fn add(&mut self, over: Over, shape: &ParamShape, base: usize, first: usize, x: &[f32]) {
        for SetPart { range, set, each } in over.sets(shape, first, x.len()) {
            let (x, at) = (&x[range], base + set);
            match (&mut *self, each) {
                (Self::Nothing, _) => {}
                (Self::Sums(sums), false) => sums[at] += sum_of_squares(x),
                (Self::Sums(sums), true) => {
                    sums[at..].iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
                }
                (Self::Digits(sums), false) => add_squares(&mut sums[at], x),
                (Self::Digits(sums), true) => sums[at..].iter_mut().zip(x).for_each(|(sum, &x)| add_square(sum, x)),
                (Self::Largest(most), false) => most[at] = x.iter().fold(most[at], |most, &x| larger(most, x)),
                (Self::Largest(most), true) => {
                    most[at..].iter_mut().zip(x).for_each(|(most, &x)| *most = larger(*most, x));
                }
            }
        }
    }
}

impl Measures {
    /// Adds these to the measures of other jobs.
    fn add_to(self, all: &mut [f64]) {
        match self {
            Self::Nothing => {}
            Self::Sums(own) => all.iter_mut().zip(own).for_each(|(all, own)| *all += own),
            Self::Largest(own) => {
                let larger = |(all, own): &(&mut f64, f64)| **all < *own || own.is_nan();
                all.iter_mut().zip(own).filter(larger).for_each(|(all, own)| *all = own);
            }
            Self::Digits(own) => {
                let digits = own.into_iter().flat_map(|mut sum| carry(&mut sum));
                all.iter_mut().zip(digits).for_each(|(all, digit)| *all += digit);
            }
        }
    }
}

/// The larger absolute value; NaN if either is NaN.
fn larger(most: f64, x: f32) -> f64 {
    let x = f64::from(x.abs());
    if x > most || x.is_nan() { x } else { most }
}

/// Runs `work` on each job, with its item of `extra` and its states in f32 and in bytes.
fn for_runs<'j, E: Send>(
    jobs: &'j [Job],
    (mut floats, mut codes): States<'_>,
    extra: impl IntoIterator<Item = E, IntoIter: Send>,
    work: impl Fn(&'j Job, E, &mut [&mut [f32]], &mut [&mut [u8]]) -> std::result::Result<(), OptimError> + Sync,
) -> Result<()> {
    let states = std::iter::from_fn(move || {
        let floats: Vec<_> = floats.iter_mut().filter_map(Iterator::next).collect();
        Some((floats, codes.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()))
    });
    let failed = Mutex::new(None);
    for_each(jobs.iter().zip(extra).zip(states), |((job, extra), (mut floats, mut codes))| {
        if let Err(error) = work(job, extra, &mut floats, &mut codes) {
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), |error| Err(error.into()))
}

/// The elements `range` of each vector.
fn within<'s, T>(vectors: &'s mut [&mut [T]], range: &Range<usize>) -> Vec<&'s mut [T]> {
    vectors.iter_mut().map(|vector| &mut vector[range.clone()]).collect()
}

impl WholeOptim for Cpu {
    fn measure(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        weights: &Buffer,
        vectors: WholeVectors<'_>,
        into: Option<Measured<'_>>,
    ) -> Result<()> {
        let (rule, shape, passes) = (rule(part)?, part.shape, part.rule.passes(&part.shape));
        let over = passes.get(pass).map_or(&[][..], Pass::over);
        let sets: usize = over.iter().map(|over| over.count(&shape)).sum();
        let measures = over.len().max(1); // one if matrices are gathered
        let fewest = part.part.len().div_ceil(JOBS);
        let jobs = jobs(part, fewest.max(PIECE));
        let (weights, grads) = (weights.as_slice::<f32>()?, vectors.grads.as_slice::<f32>()?);
        let (sets_kept, totals) = (slices::<f32>(vectors.sets)?, totals(&passes, &shape, vectors.totals)?);
        let digits = matches!(into, Some(Measured::Digits(..)));
        let (sums, values) = match into {
            Some(Measured::Values(values)) => (None, Some(values)),
            Some(Measured::Sums(sums, at) | Measured::Digits(sums, at)) => {
                (Some(Mutex::new(&mut sums.as_mut_slice::<f64>()?[at..])), None)
            }
            None => (None, None),
        };
        let room = || match passes.get(pass).filter(|_| sums.is_some()) {
            None => Measures::Nothing,
            Some(Pass::Largest(_)) => Measures::Largest(vec![0.0; sets]),
            Some(Pass::Squares(_)) if digits => Measures::Digits(vec![[0; LIMBS]; sets]),
            Some(Pass::Squares(_)) => Measures::Sums(vec![0.0; sets]),
        };
        // Sums of jobs, which are added up in job order; if the order does not matter, each job adds its own at once.
        let ordered: Vec<Mutex<Vec<f64>>> = jobs.iter().map(|_| Mutex::default()).collect();
        // The numbers of each job, which are written to their places in the matrices when all are complete.
        let written: Vec<Mutex<Vec<f32>>> = jobs.iter().map(|_| Mutex::default()).collect();
        let writes = values.is_some();
        let extra = ordered.iter().zip(&written);
        for_runs(&jobs, states(vectors.states, &jobs)?, extra, |job, (ordered, written), floats, codes| {
            let (mut measured, mut room, mut numbers) = (room(), vec![0.0; measures * RUN], Vec::new());
            for (first, range) in &job.runs {
                let mut out: Vec<&mut [f32]> = room.chunks_mut(RUN).map(|room| &mut room[..range.len()]).collect();
                let inner = range.start - job.range.start..range.end - job.range.start;
                let mut run = Run {
                    update: part.update,
                    shape,
                    first: *first,
                    grads: &grads[range.clone()],
                    states: &mut within(floats, &inner),
                    codes: &mut within(codes, &inner),
                    sets: &sets_kept,
                    totals: &totals,
                    gathered: &[],
                };
                rule.measure(pass, &weights[range.clone()], &mut run, &mut out)?;
                let mut base = 0;
                for (over, x) in over.iter().zip(&out) {
                    measured.add(*over, &shape, base, *first, x);
                    base += over.count(&shape);
                }
                if writes {
                    numbers.extend_from_slice(out[0]);
                }
            }
            *written.lock().unwrap_or_else(PoisonError::into_inner) = numbers;
            if let Some(sums) = &sums {
                match measured {
                    Measures::Sums(own) => *ordered.lock().unwrap_or_else(PoisonError::into_inner) = own,
                    measured => measured.add_to(&mut sums.lock().unwrap_or_else(PoisonError::into_inner)),
                }
            }
            Ok(())
        })?;
        if let Some(sums) = sums {
            let sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
            for own in ordered {
                Measures::Sums(own.into_inner().unwrap_or_else(PoisonError::into_inner)).add_to(sums);
            }
        }
        if let Some(values) = values {
            let values = values.as_mut_slice::<f32>()?;
            for (job, numbers) in jobs.iter().zip(written) {
                let numbers = numbers.into_inner().unwrap_or_else(PoisonError::into_inner);
                let mut rest = &numbers[..];
                for (first, range) in &job.runs {
                    let (run, behind) = rest.split_at(range.len());
                    values[*first..first + run.len()].copy_from_slice(run);
                    rest = behind;
                }
            }
        }
        Ok(())
    }

    fn finish_pass(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        totals: &mut Buffer,
        at: usize,
        sets: &mut [Buffer],
    ) -> Result<()> {
        let (rule, passes) = (rule(part)?, part.rule.passes(&part.shape));
        let mut rest = &mut totals.as_mut_slice::<f64>()?[at..];
        let counts = passes.get(pass).map_or(&[][..], Pass::over).iter().map(|over| over.count(&part.shape));
        let mut totals: Vec<&mut [f64]> = counts.filter_map(|count| rest.split_off_mut(..count)).collect();
        let mut sets = sets
            .iter_mut()
            .map(|set| set.as_mut_slice::<f32>().map_err(Error::from))
            .collect::<Result<Vec<&mut [f32]>>>()?;
        let WholePart { update, shape, .. } = part;
        Ok(rule.finish_pass(PassTotals { pass, update, shape, totals: &mut totals, sets: &mut sets })?)
    }

    fn update_whole(&self, part: &WholePart<'_>, weights: &mut Buffer, vectors: WholeVectors<'_>) -> Result<()> {
        let (rule, shape, passes) = (rule(part)?, part.shape, part.rule.passes(&part.shape));
        let jobs = jobs(part, PIECE);
        let grads = vectors.grads.as_slice::<f32>()?;
        let (sets, totals) = (slices::<f32>(vectors.sets)?, totals(&passes, &shape, vectors.totals)?);
        let gathered = vectors.gathered.map(|gathered| gathered.as_slice::<f32>()).transpose()?;
        let weights = cut(weights.as_mut_slice::<f32>()?, &jobs);
        for_runs(&jobs, states(vectors.states, &jobs)?, weights, |job, weights, floats, codes| {
            for (first, range) in &job.runs {
                let inner = range.start - job.range.start..range.end - job.range.start;
                let mut run = Run {
                    update: part.update,
                    shape,
                    first: *first,
                    grads: &grads[range.clone()],
                    states: &mut within(floats, &inner),
                    codes: &mut within(codes, &inner),
                    sets: &sets,
                    totals: &totals,
                    gathered: gathered.map_or(&[], |gathered| &gathered[*first..first + range.len()]),
                };
                rule.update(&mut weights[inner.clone()], &mut run)?;
            }
            Ok(())
        })
    }
}
