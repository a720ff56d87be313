//! Moving averages of the statistics of batch norms.
//!
//! GPipe (section 2): "the sufficient statistics of inputs during training are computed over each micro-batch [...]. We also
//! track the moving average of the sufficient statistics over the entire mini-batch to be used during evaluation." So a
//! micro-batch leaves its mean and variance here, and once a step those of all its micro-batches, on all dp ranks, are put
//! together and join the average. What is left is kept by layer and first sample: a forward pass that runs again, for
//! re-materialisation, leaves the same once more and nothing changes; and no schedule changes the order of the sums.
//!
//! Statistics stay on their device until the step ends, and come to the host in one download.

use meshwork_core::DType;
use meshwork_tensor::op::Moments;
use meshwork_tensor::{ParamId, Result, Tensor};
use std::collections::BTreeMap;

/// The moving averages of the batch norms of one rank, by their weight.
///
/// ```
/// use meshwork_nn::Averages;
///
/// // A tenth of each new mean and variance, as usual.
/// let averages = Averages::new(0.1);
/// assert!(averages.layers().next().is_none(), "none before the first step");
/// ```
#[derive(Clone, Debug)]
pub struct Averages {
    momentum: f64,
    layers: BTreeMap<ParamId, Average>,
}

#[derive(Clone, Debug, Default)]
struct Average {
    mean: Vec<f64>,
    variance: Vec<f64>,
    /// By first sample.
    noted: BTreeMap<u64, Noted>,
}

/// The statistics of one micro-batch, on their device.
#[derive(Clone, Debug)]
struct Noted {
    /// Elements that each mean is of.
    members: usize,
    moments: Moments,
}

impl Averages {
    /// Averages that move by this share of the way to each mini-batch, in (0, 1]. Before the first one, means are 0 and variances 1.
    pub fn new(momentum: f64) -> Self {
        Self { momentum, layers: BTreeMap::new() }
    }

    /// Notes the statistics of one micro-batch, over `members` elements each. Noted again, they take their own place.
    pub fn note(&mut self, layer: ParamId, first_sample: u64, members: usize, moments: Moments) {
        self.layers.entry(layer).or_default().noted.insert(first_sample, Noted { members, moments });
    }

    /// Ends a step: what was noted joins the averages. `sum` adds up a vector over the ranks that train on other samples; those
    /// of one stage all call this with vectors of one length.
    pub fn update(&mut self, sum: impl FnOnce(&mut [f64]) -> Result<()>) -> Result<()> {
        let take = |average: &mut Average| std::mem::take(&mut average.noted).into_values().collect();
        let layers: Vec<Vec<Noted>> = self.layers.values_mut().map(take).collect();
        let values = download(layers.iter().flatten())?;
        let (mut rest, mut all) = (&values[..], Vec::new());
        for noted in &layers {
            let sums = noted.iter().map(|noted| noted.sums(&mut rest));
            all.push(sums.reduce(|sum, more| sum.iter().zip(more).map(|(a, b)| a + b).collect()).unwrap_or_default());
        }
        let lengths: Vec<usize> = all.iter().map(Vec::len).collect();
        let mut flat = all.concat();
        sum(&mut flat)?;
        let mut rest = &flat[..];
        for (average, length) in self.layers.values_mut().zip(lengths) {
            let Some((&[n], sums)) = rest.split_off(..length).and_then(|sums| sums.split_first_chunk::<1>()) else {
                continue;
            };
            let (sums, squares) = sums.split_at(sums.len() / 2);
            average.join(self.momentum, n, sums, squares);
        }
        Ok(())
    }

    /// Mean and variance of a layer for evaluation, laid out as its weight.
    pub fn moments(&self, layer: ParamId, like: &Tensor) -> Result<Moments> {
        let vector = |values: Option<&Vec<f64>>, before: f32| {
            let values = match values {
                Some(values) if !values.is_empty() => values.iter().map(|&value| value as f32).collect(),
                _ => vec![before; like.count()],
            };
            Tensor::from_slice(like.device(), &values, like.shape())
        };
        let average = self.layers.get(&layer);
        Ok(Moments {
            mean: vector(average.map(|average| &average.mean), 0.0)?,
            variance: vector(average.map(|average| &average.variance), 1.0)?,
        })
    }

    /// Of each layer that has trained: (its weight, mean, variance).
    pub fn layers(&self) -> impl Iterator<Item = (ParamId, &[f64], &[f64])> {
        self.layers.iter().map(|(id, average)| (*id, &average.mean[..], &average.variance[..]))
    }
}

impl Average {
    /// Joins a mini-batch of n elements per mean, with their sums and the sums of their squares. Its variance is the unbiased
    /// one, as an estimate of that of all data.
    fn join(&mut self, momentum: f64, n: f64, sums: &[f64], squares: &[f64]) {
        self.mean.resize(sums.len(), 0.0);
        self.variance.resize(sums.len(), 1.0);
        let old = self.mean.iter_mut().zip(&mut self.variance);
        for ((mean, variance), (sum, square)) in old.zip(sums.iter().zip(squares)) {
            let new = sum / n;
            let spread = (square / n - new * new).max(0.0) * (n / (n - 1.0).max(1.0));
            *mean += momentum * (new - *mean);
            *variance += momentum * (spread - *variance);
        }
    }
}

impl Noted {
    /// The number of elements of a mean, the sums of the elements, and those of their squares: from the means and variances
    /// that `rest` begins with, which are taken off it.
    fn sums(&self, rest: &mut &[f32]) -> Vec<f64> {
        let mut wide = |tensor: &Tensor| -> Vec<f64> {
            let values = rest.split_off(..tensor.count()).unwrap_or_default();
            values.iter().map(|&value| f64::from(value)).collect()
        };
        let [mean, variance] = [wide(&self.moments.mean), wide(&self.moments.variance)];
        let n = self.members as f64;
        let squares = mean.iter().zip(&variance).map(|(mean, variance)| n * (variance + mean * mean));
        std::iter::once(n).chain(mean.iter().map(|mean| n * mean)).chain(squares).collect()
    }
}

/// The means and variances of all, one after the other: put together on their device, then brought to the host at once.
fn download<'a>(noted: impl Iterator<Item = &'a Noted>) -> Result<Vec<f32>> {
    let parts: Vec<&Tensor> = noted.flat_map(|noted| [&noted.moments.mean, &noted.moments.variance]).collect();
    let Some(device) = parts.first().map(|part| part.device()) else { return Ok(Vec::new()) };
    let mut all = device.alloc(DType::F32, parts.iter().map(|part| part.count()).sum())?;
    let mut at = 0;
    for part in parts {
        device.layout()?.copy_into(part.buffer(), 0..part.count(), &mut all, at)?;
        at += part.count();
    }
    Ok(device.download(&all)?.as_slice::<f32>()?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_tensor::cpu::Cpu;
    use meshwork_tensor::{Declarations, Init, Placement, Role};

    fn layer() -> ParamId {
        Declarations::new().declare("w", &[1], Placement::replicated(), Role::Norm, Init::Ones).unwrap()
    }

    fn moments(values: &[f32]) -> Moments {
        let n = values.len() as f32;
        let mean = values.iter().sum::<f32>() / n;
        let variance = values.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / n;
        let vector = |value| Tensor::from_slice(&Cpu::device(), &[value], [1]).unwrap();
        Moments { mean: vector(mean), variance: vector(variance) }
    }

    /// Micro-batches of different sizes, one of them noted twice, and a sum over two ranks, against the whole mini-batch.
    #[test]
    fn micro_batches_come_together_as_the_mini_batch() {
        let (id, x) = (layer(), [1.0, 4.0, -2.0, 8.0, 0.5, 3.0, 7.0]);
        let mut averages = Averages::new(0.25);
        averages.note(id, 3, 4, moments(&x[3..]));
        averages.note(id, 0, 3, moments(&x[..3]));
        averages.note(id, 3, 4, moments(&x[3..]));
        let twice = |sums: &mut [f64]| {
            sums.iter_mut().for_each(|sum| *sum *= 2.0);
            Ok(())
        };
        averages.update(twice).unwrap();
        let n = 2.0 * x.len() as f64;
        let mean = 2.0 * x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = 2.0 * x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let [(_, got_mean, got_variance)] = averages.layers().collect::<Vec<_>>()[..] else { panic!("one layer") };
        assert!((got_mean[0] - 0.25 * mean).abs() < 1e-6, "{got_mean:?}");
        assert!((got_variance[0] - (0.75 + 0.25 * variance)).abs() < 1e-6, "{got_variance:?}");
        // What was noted has been used up.
        averages
            .update(|sums| {
                assert!(sums.is_empty(), "{sums:?}");
                Ok(())
            })
            .unwrap();
    }
}
