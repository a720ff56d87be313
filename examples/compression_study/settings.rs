//! The sweep of the study: the compression of each run.

use meshwork::compress::{Feedback, Scheme};
use meshwork::engine::Compress;

/// Bits of quantisation, forward and backward.
pub const BITS: [u8; 4] = [2, 4, 6, 8];
/// Percent of each sample's elements that TopK keeps.
pub const PERCENT: [u32; 6] = [50, 30, 20, 10, 5, 2];

/// The compression of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Its name in results and tables.
    pub name: String,
    /// The compression at the three cuts.
    pub compress: Compress,
}

/// The name of a quantised run.
pub fn quantised(forward: u8, backward: u8) -> String {
    format!("fw{forward}-bw{backward}")
}

/// The name of a run with TopK.
pub fn top(percent: u32) -> String {
    format!("top{percent}")
}

/// Every setting, for runs with this many steps and samples. `topk` works per sample, and `quant` between the
/// extremes of the batch, as in the study of Rudakov et al.
pub fn all(steps: u64, samples: usize) -> Vec<Setting> {
    let setting = |name: String, compress| Setting { name, compress };
    let both = |forward: Scheme, backward: Scheme| Compress {
        activations: forward,
        activation_gradients: backward,
        ..Compress::default()
    };
    let none = Compress::default();
    let quant = |bits: u8| scheme(&format!("quant:{bits}"));
    let topk = |percent: u32| scheme(&format!("topk:{}/row", f64::from(percent) / 100.0));
    let alike = |percent| both(topk(percent), topk(percent));
    let mut all = vec![setting("none".to_owned(), none)];
    for (forward, backward) in BITS.into_iter().flat_map(|forward| BITS.map(|backward| (forward, backward))) {
        all.push(setting(quantised(forward, backward), both(quant(forward), quant(backward))));
    }
    all.extend(PERCENT.map(|percent| setting(top(percent), alike(percent))));
    let shared = |percent| Compress { share_indices: true, ..alike(percent) };
    all.extend(PERCENT.map(|percent| setting(format!("{} shared", top(percent)), shared(percent))));
    for percent in [10, 5] {
        for (feedback, name) in [(Feedback::Ef, "ef"), (Feedback::Ef21, "ef21")] {
            all.push(setting(format!("{} {name}", top(percent)), Compress { feedback, ..alike(percent) }));
        }
    }
    for (side, forward, backward) in [("fw", topk(10), none.activations), ("bw", none.activations, topk(10))] {
        for (feedback, name) in [(Feedback::None, ""), (Feedback::Ef, " ef")] {
            all.push(setting(format!("top10 {side} only{name}"), Compress { feedback, ..both(forward, backward) }));
        }
    }
    for (feedback, name) in [(Feedback::None, ""), (Feedback::Ef, " ef")] {
        let late = Compress { feedback, start_step: 1 + steps / 4, ..alike(10) };
        all.push(setting(format!("top10{name} warm-up"), late));
    }
    for percent in [50, 30, 20, 10] {
        let aqsgd = Compress { aqsgd: Some(samples), ..alike(percent) };
        all.push(setting(format!("{} aq-sgd", top(percent)), aqsgd));
    }
    all
}

fn scheme(text: &str) -> Scheme {
    text.parse().expect("a scheme of this table")
}
