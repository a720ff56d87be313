//! Where compression pays: the reports of `--steps 0` and of a profile for the rate `comm.bandwidth`.
//!
//! - Bytes come from dry runs, times are measured on this machine: for matrix products, and for each scheme on values
//!   as large as in the run.
//! - The schedule is simulated with these times and messages (`computation.rs`). Sums of gradients come after it,
//!   except for the part of their first communication that the last backward hides.
//! - Other communication is left out: it is the same with and without compression.

mod computation;
mod measured;
mod payload;
mod weighing;

use computation::Traffic;
use meshwork::core::profile::Class;
use meshwork::engine::TrainError;
use meshwork::tensor::memory::Bytes;
use meshwork::train::Devices;
use meshwork::train::config::Config;
use meshwork::train::plan::predict_all;
use meshwork::train::profile::{Profile, Track};
use payload::{NOTHING, Payload, exact, only};
use std::collections::BTreeSet;
use std::fmt::Write;
use weighing::{Weighing, computation};

/// The report of `--steps 0` on each payload and scheme. Empty without a bandwidth, or if ranks send no payload.
///
/// # Errors
/// As [`dry_run::predict`](meshwork::engine::dry_run::predict).
pub fn report(config: &Config) -> Result<String, TrainError> {
    let bandwidth = config.comm.bandwidth;
    if bandwidth == 0.0 || config.mesh()?.world_size() == 1 {
        return Ok(String::new());
    }
    let device = Devices::open(config)?.alone()?;
    let exact = exact(config);
    let weighing = Weighing { config, device, exact: predict_all(&exact)? };
    let computation = computation(&exact, &*weighing.device)?;
    let mut plain = Traffic::default();
    for payload in Payload::ALL {
        // A payload that must not be compressed counts as zero; its rows say so.
        weighing.weigh(payload, &only(config, payload, "bf16"), &mut plain, &mut Traffic::default()).ok();
    }
    let before = computation.step(&plain, bandwidth)?;
    let mut text = format!(
        "\ncompression, where a rank sends {} (comm.bandwidth): a step of {} without\n",
        rate(bandwidth),
        time(before)
    );
    for payload in Payload::ALL.into_iter().filter(|payload| weighing.sends(*payload)) {
        let _ = writeln!(text, "  {}, {}", payload.key(), payload.unit());
        let own = payload.scheme(config);
        let tried =
            payload.tried().into_iter().filter(|scheme| *scheme != own).chain(Some(own).filter(|own| *own != NOTHING));
        for scheme in tried {
            let (mut plain, mut compressed) = (plain.clone(), plain.clone());
            match weighing.weigh(payload, &only(config, payload, scheme), &mut plain, &mut compressed) {
                Ok(()) => {}
                Err(TrainError::Plan(error)) => {
                    let _ = writeln!(text, "    {scheme:<20} is refused: {error}");
                    continue;
                }
                Err(error) => return Err(error),
            }
            let (sent, codec) = payload.cost(&compressed);
            let pays = match computation.pays_below(&plain, &compressed)? {
                None => "never pays".to_owned(),
                Some(f64::INFINITY) => "always pays".to_owned(),
                Some(limit) => format!("pays below {}", rate(limit)),
            };
            let _ = writeln!(
                text,
                "    {scheme:<20} {} for {}, {} to compress and restore: {pays}; a step of {}",
                bytes_text(sent),
                bytes_text(payload.cost(&plain).0),
                time(codec),
                time(computation.step(&compressed, bandwidth)?)
            );
        }
    }
    text += "  Each place by itself, without feedback. Computation is that of ranks which have a machine like this one each; what is sent for \
             other reasons takes no time here.\n";
    Ok(text)
}

/// The report of a profile: the time of compression, and the time of the bytes that it saved. Empty without a bandwidth
/// or compression.
///
/// # Errors
/// As [`dry_run::predict`](meshwork::engine::dry_run::predict).
pub fn saved(profile: &Profile, config: &Config) -> Result<String, TrainError> {
    let (bandwidth, plan) = (config.comm.bandwidth, config.plan()?);
    let steps: BTreeSet<u64> = profile.tracks.iter().flat_map(Track::steps).collect();
    if bandwidth == 0.0 || !plan.compress.is_some() || steps.is_empty() {
        return Ok(String::new());
    }
    let bytes = |config: &Config| -> Result<Vec<f64>, TrainError> {
        let mut of_rank = vec![0.0; plan.mesh.world_size()];
        for ranks in predict_all(config)? {
            let bytes = weighing::bytes(&ranks.each.records);
            for rank in ranks.ranks {
                of_rank[rank] = bytes;
            }
        }
        Ok(of_rank)
    };
    let (before, after) = (bytes(&exact(config))?, bytes(config)?);
    let less = before.iter().zip(&after).map(|(before, after)| before - after).fold(f64::NEG_INFINITY, f64::max);
    let spent = |track: &Track| -> f64 {
        let spans = track.spans.iter().filter(|span| span.class == Class::Compression);
        spans.map(|span| span.duration() as f64 / 1e9).sum::<f64>() / steps.len() as f64
    };
    let most = profile.tracks.iter().map(spent).fold(0.0, f64::max);
    Ok(format!(
        "Compression takes {} of a step on the rank where it takes longest, and at most {} less are sent by a rank: {} at {} \
         (comm.bandwidth), if nothing hides them.\n",
        time(most),
        bytes_text(less.max(0.0)),
        time(less.max(0.0) / bandwidth),
        rate(bandwidth)
    ))
}

fn bytes_text(bytes: f64) -> Bytes {
    Bytes(bytes.round() as u64)
}

/// Formats bytes per second.
fn rate(bytes: f64) -> String {
    let (unit, name) =
        [(1e9, "GB/s"), (1e6, "MB/s")].into_iter().find(|(unit, _)| bytes >= *unit).unwrap_or((1e3, "kB/s"));
    format!("{} {name}", three(bytes / unit))
}

fn time(seconds: f64) -> String {
    let (unit, name) =
        [(1.0, "s"), (1e-3, "ms")].into_iter().find(|(unit, _)| seconds >= *unit).unwrap_or((1e-6, "µs"));
    format!("{} {name}", three(seconds / unit))
}

/// Formats a number with about three digits.
fn three(number: f64) -> String {
    let digits = if number >= 100.0 {
        0
    } else if number >= 10.0 {
        1
    } else {
        2
    };
    format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork::core::Record;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3 * b.abs().max(1e-9), "{a} {b}");
    }

    fn config(toml: &str) -> Config {
        Config::from_toml(&format!("[model]\nseq_len = 16\n{toml}\n[comm]\nbandwidth = 1e9")).unwrap()
    }

    #[test]
    fn the_report_has_a_line_for_each_place_that_sends() {
        let both = report(&config("[parallelism]\ndp = 2\npp = 2\n[compress]\ngradients = 'sign'")).unwrap();
        for words in [
            "sends 1.00 GB/s",
            "  activations, each",
            "  activation_gradients, each",
            "  gradients, all",
            "    sign ",
            "  powersgd:4 ",
        ] {
            assert_eq!(both.matches(words).count(), 1, "{words}: {both}");
        }
        assert!(!both.contains("refused"), "{both}");
        let pipeline = report(&config("[parallelism]\npp = 2")).unwrap();
        assert!(pipeline.contains("  activations,") && !pipeline.contains("  gradients,"), "{pipeline}");
        assert_eq!(report(&config("")).unwrap(), "");
        let canonical = report(&config("[parallelism]\ndp = 2\n[training]\nnumerics = 'canonical'")).unwrap();
        assert!(canonical.contains("bf16                 is refused: ") && !canonical.contains("pays"), "{canonical}");
    }

    fn weighing<'a>(config: &'a Config, exact: &Config) -> Weighing<'a> {
        Weighing { config, device: Devices::open(config).unwrap().alone().unwrap(), exact: predict_all(exact).unwrap() }
    }

    /// The bytes that a run sends.
    fn sent(config: &Config) -> f64 {
        let ranks = predict_all(config).unwrap();
        ranks.iter().flat_map(|ranks| &ranks.each.records).map(Record::bytes).sum()
    }

    #[test]
    fn bytes_are_those_of_the_run() {
        let config =
            config("[parallelism]\ndp = 2\npp = 2\n[compress]\nactivations = 'quant:4/row'\ngradients = 'quant:8'");
        let exact = exact(&config);
        let weighing = weighing(&config, &exact);
        let mut plain = weighing.cuts(&exact).unwrap();
        let mut compressed = weighing.cuts(&config).unwrap();
        let micros = config.pipeline.num_microbatches as f64;
        let saved = micros * (plain.messages[0] - compressed.messages[0]);
        let gradients = only(&config, Payload::Gradients, "quant:8");
        assert_eq!(sent(&exact) - sent(&config), saved + sent(&exact) - sent(&gradients));
        weighing.sums(&config, &mut plain, &mut compressed).unwrap();
        let total = |sums: [f64; 2]| sums.iter().sum::<f64>();
        // The first stage has more parameters; its ranks send about a quarter of 2n·4/2.
        let share = total(compressed.sums) / total(plain.sums);
        assert!(plain.sums[0] > 1e6 && share > 0.25 && share < 0.26, "{plain:?} {compressed:?}");
    }

    /// PowerSGD sums factors twice: the bytes of its two communications in a run, and their time.
    #[test]
    fn the_sums_of_factors_are_those_of_the_run() {
        let config = config("[parallelism]\ndp = 2\n[compress]\ngradients = 'powersgd:4'");
        let exact = exact(&config);
        let weighing = weighing(&config, &exact);
        let (mut plain, mut compressed) = Default::default();
        weighing.sums(&config, &mut plain, &mut compressed).unwrap();
        let total = |sums: [f64; 2]| sums.iter().sum::<f64>();
        close(total(plain.sums) - total(compressed.sums), sent(&exact) - sent(&config));
        // First P with r columns together with the vectors, then Q with r rows: for weights wider than high, both have
        // the same order of magnitude.
        let [first, then] = compressed.sums;
        assert!(then > 0.0 && first > 0.3 * then && first < 3.0 * then, "{compressed:?}");
        assert!(compressed.sum_codec > 0.0 && total(compressed.sums) < 0.2 * total(plain.sums), "{compressed:?}");
    }

    /// Gathers of weights, and tokens that go to experts, take the bytes of the run.
    #[test]
    fn gathers_and_exchanges_are_those_of_the_run() {
        let of = |toml: &str, payload, scheme: &str| {
            let config = config(toml);
            let (exact, alone) = (exact(&config), only(&config, payload, scheme));
            let (mut plain, mut compressed) = Default::default();
            weighing(&config, &exact).weigh(payload, &alone, &mut plain, &mut compressed).unwrap();
            let [(whole, none), (sent_then, seconds)] = [&plain, &compressed].map(|traffic| payload.cost(traffic));
            let micros = config.pipeline.num_microbatches as f64;
            let passes = if payload == Payload::Weights { 2.0 * micros } else { micros };
            close(passes * (whole - sent_then), sent(&exact) - sent(&alone));
            assert!(none == 0.0 && seconds > 0.0 && sent_then > 0.0, "{plain:?} {compressed:?}");
            sent_then / whole
        };
        let sliced = "[parallelism]\ndp = 2\nzero_stage = 3";
        let eighths = of(sliced, Payload::Weights, "quant:8/block256");
        assert!(eighths > 0.25 && eighths < 0.27, "{eighths}");
        let experts = "[parallelism]\ndp = 2\nep = 2\n[moe]\nnum_experts = 4";
        for payload in [Payload::Dispatch, Payload::DispatchGradients] {
            let rows = of(experts, payload, "quant:8");
            assert!(rows > 0.25 && rows < 0.32, "{rows}");
        }
        let text = [sliced, experts].map(|toml| report(&config(toml)).unwrap());
        assert!(text[0].contains("  weights, the gathers") && !text[0].contains("  dispatch"), "{}", text[0]);
        assert!(text[1].contains("  dispatch, the") && text[1].contains("  dispatch_gradients, those"), "{}", text[1]);
        assert!(!text[1].contains("  weights,") && !text.concat().contains("refused"), "{}", text.concat());
    }

    /// The reference run sends everything uncompressed.
    #[test]
    fn nothing_is_compressed_in_the_run_to_compare_with() {
        let config = config("[parallelism]\ndp = 2\nzero_stage = 3\n[compress]\nweights = 'quant:8'");
        assert!(config.plan().unwrap().compress.is_some() && !exact(&config).plan().unwrap().compress.is_some());
    }
}
