//! Cross entropy against the CPU: bit by bit, but for the logarithm in f64.

use crate::{assert_bits, launch, values};
use meshwork_core::Buffer;
use meshwork_cpu::Cpu;
use meshwork_tensor::kernel::{Loss, VocabShard};

/// The words are cut over three ranks. A shard has a block of 128 threads, one of 256, or one of 512 that takes two
/// rounds, and more words than shared memory keeps, with padding in it and the columns of other shards around it.
#[test]
pub fn cross_entropy_is_that_of_the_cpu() {
    for (samples, rows, words) in [
        (1, 1, 1),
        (2, 6, 50),
        (3, 99, 7),
        (1, 3, 1500),
        (2, 4, 10_000),
        (1, 1, 50_000),
        (1, 1, 78_000),
        (1, 1, 198_000),
    ] {
        let targets: Vec<i32> = (0..rows).map(|i| if i % 4 == 3 { -100 } else { (i * 7 % words) as i32 }).collect();
        let all: Vec<f32> = values("logits", rows * words).iter().map(|x| 3.0 * x).collect();
        let width = words / 3 + 1;
        let shards = (0..3).map(|rank| {
            let first = (rank * width).min(words);
            VocabShard { first, valid: width.min(words - first), width, skipped: 2, pitch: width + 5, vocab: words }
        });
        let shards: Vec<_> = shards.collect();
        let mut maxima = vec![f32::NEG_INFINITY; rows];
        let mut stats = Vec::new();
        let targets_ = Buffer::from_slice(&targets);
        for shard in &shards {
            let mut logits = vec![f32::NAN; rows * shard.pitch];
            for (i, row) in logits.chunks_mut(shard.pitch).enumerate() {
                row[shard.skipped..][..shard.valid].copy_from_slice(&all[i * words + shard.first..][..shard.valid]);
            }
            let [mut max, mut sum, mut target] = [(); 3].map(|()| vec![f32::NAN; rows]);
            let VocabShard { first, valid, skipped, pitch, .. } = *shard;
            let sizes = [rows, valid];
            let (m, s, t) = (&mut max, &mut sum, &mut target);
            if !launch!("cross_entropy_stats", sizes, &logits, &targets, pitch, skipped, valid, first, m, s, t, rows) {
                return;
            }
            let (want_max, want_sums) =
                Cpu::default().row_stats(&Buffer::from_slice(&logits), &targets_, *shard).unwrap();
            assert_bits("max", &max, want_max.as_slice().unwrap());
            assert_bits("sum and target", &[&sum[..], &target].concat(), want_sums.as_slice().unwrap());
            launch!("cross_entropy_larger", [rows, 0], &mut maxima, &max, rows);
            stats.push((logits, max, sum, target));
        }
        let (mut total, mut target) = (vec![0.0; rows], vec![0.0; rows]);
        for (_, max, sum, logit) in &mut stats {
            let mut want = Buffer::from_slice(&[&sum[..], logit].concat());
            Cpu::default().rescale(&mut want, &Buffer::from_slice(max), &Buffer::from_slice(&maxima)).unwrap();
            launch!("cross_entropy_rescale", [rows, 0], &*max, &maxima, &mut *sum, rows);
            assert_bits("rescaled", sum, &want.as_slice::<f32>().unwrap()[..rows]);
            (0..rows).for_each(|i| (total[i], target[i]) = (total[i] + sum[i], target[i] + logit[i]));
        }
        let (mut lse, mut loss) = (vec![f32::NAN; rows], vec![f64::NAN; samples]);
        launch!("cross_entropy_lse", [rows, 0], &maxima, &total, &mut lse, rows);
        launch!("cross_entropy_loss", [samples, 0], &targets, &maxima, &total, &target, &mut loss, samples, rows);
        let sums = Buffer::from_slice(&[&total[..], &target].concat());
        let want = Cpu::default().total(&Buffer::from_slice(&maxima), &sums, &targets_, samples).unwrap();
        let want_loss = want.0.as_slice::<f64>().unwrap();
        assert!((0..samples).all(|i| (loss[i] - want_loss[i]).abs() <= 1e-13 * want_loss[i].abs()), "{loss:?}");
        let want_lse = want.1.as_slice::<f32>().unwrap();
        assert!((0..rows).all(|i| (lse[i] - want_lse[i]).abs() <= 2e-7 * want_lse[i].abs()), "{lse:?}");
        let scale: Vec<f64> = (0..samples).map(|i| 0.25 + i as f64).collect();
        for ((mut logits, ..), shard) in stats.into_iter().zip(shards) {
            let VocabShard { first, valid, width, skipped, pitch, .. } = shard;
            let mut want = Buffer::from_slice(&logits);
            let lse_ = Buffer::from_slice(&lse);
            Cpu::default().grad(&mut want, &targets_, &lse_, &Buffer::from_slice(&scale), shard).unwrap();
            let (sizes, x) = ([rows, width], &mut logits);
            #[rustfmt::skip]
            launch!(
                "cross_entropy_backward", sizes, x, &targets, &lse, &scale, pitch, skipped, width, valid, first, samples, rows
            );
            assert_bits("gradient", &logits, want.as_slice().unwrap());
        }
    }
}
