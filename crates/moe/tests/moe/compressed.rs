//! Tokens that ranks exchange compressed: what experts get is what the message of a token restores to, and so are
//! results and gradients.

use crate::world::{ALONE, Case, EP, How, Outcome, run};
use meshwork_compress::{Shape, wire_bytes};
use meshwork_moe::{MoeConfig, RouterKind};
use meshwork_tensor::tape::{Mode, RowSchemes};

fn schemes(forward: &str, backward: &str) -> RowSchemes {
    let of = |text: &str| (text != "none").then(|| text.parse().unwrap());
    RowSchemes { forward: of(forward), backward: of(backward) }
}

fn case(config: MoeConfig) -> Case {
    Case { config, canonical: true, ..Case::default() }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Where each rank has one expert, outputs and gradients have the bits of one rank whose experts lose the same of each
/// row. With several a token goes to a rank once, and the sum of its gradients comes back: outputs have these bits.
#[test]
fn tokens_lose_what_their_messages_lose() {
    for (router, swiglu, forward, backward) in [
        (RouterKind::TopK, false, "quant:8", "quant:8"),
        (RouterKind::TopK, true, "fp8:e4m3", "none"),
        (RouterKind::ExpertChoice, false, "none", "topk:0.5"),
        (RouterKind::Gshard, false, "topk:0.5+quant:4", "bf16"),
        (RouterKind::Switch, true, "quant:4/block6", "sign"),
    ] {
        let top_k = if router == RouterKind::Switch { 1 } else { 2 };
        let of = case(MoeConfig { num_experts: 4, router, top_k, capacity_factor: 1.5, ..MoeConfig::default() });
        let of = Case { swiglu, ..of };
        let exact = run(&of, ALONE);
        let wanted = run(&Case { lost: schemes(forward, backward), ..of }, ALONE);
        let lossy = Case { rows: schemes(forward, backward), ..of };
        assert_eq!(bits(&run(&lossy, ALONE).output), bits(&exact.output), "one rank sends nothing");
        for how in [
            How { ep: 4, ..ALONE },
            How { ep: 4, micros: 2, opaque: true, ..ALONE },
            How { ep: 4, tp: 2, sequence_parallel: true, deferred: true, ..ALONE },
            How { ep: 2, dp: 2, ..ALONE },
        ] {
            let (what, got) = (format!("{router} {forward} {backward} {how:?}"), run(&lossy, how));
            assert_eq!(bits(&got.output), bits(&wanted.output), "{what}: output");
            if how.ep == 4 {
                assert_eq!(bits(&got.dx), bits(&wanted.dx), "{what}: gradient of x");
                for (name, wanted) in &wanted.params {
                    assert_eq!(bits(&got.params[name]), bits(wanted), "{what}: {name}");
                }
            }
        }
        let same = |of: fn(&Outcome) -> &Vec<f32>| of(&wanted) == of(&exact);
        assert_eq!(same(|of| &of.output), forward == "none", "{forward} loses something");
        assert!(!same(|of| &of.dx), "{forward} {backward} loses something");
    }
}

/// A rank sends a message for each rank that gets tokens: as many bytes as the wire format says. Choices and counts are
/// as they were.
#[test]
fn an_exchange_takes_the_bytes_of_its_messages() {
    // Each expert chooses as many tokens of each sample, in each of two chunks: all messages of results have as many
    // rows.
    let config = MoeConfig {
        num_experts: 4,
        router: RouterKind::ExpertChoice,
        top_k: 2,
        aux_loss_coeff: 0.0,
        ..MoeConfig::default()
    };
    let of = Case { mode: Mode::Evaluate, ..case(config) };
    let how = How { ep: 4, ..ALONE };
    let bytes = |forward: &str| run(&Case { rows: schemes(forward, "none"), ..of }, how).bytes;
    // Of a rank's two samples one is in each chunk; an expert takes 2 * 6 / 4 of its six tokens.
    let rows = 3;
    let exact = rows * 12 * 4;
    let message = |scheme: &str| {
        let scheme: meshwork_compress::Scheme = scheme.parse().unwrap();
        wire_bytes(&scheme, Shape::matrix(rows, 12).unwrap()).unwrap()
    };
    // A rank is charged for what it sends to three others, twice (tokens and results) in each of two chunks.
    let saved = |scheme: &str| 3.0 * 4.0 * (exact as f64 - message(scheme) as f64);
    for scheme in ["quant:8/row", "topk:0.5/row", "bf16"] {
        assert_eq!(bytes("none") - bytes(scheme), saved(scheme), "{scheme}");
    }
    assert_eq!(EP.name(), "ep");
}
