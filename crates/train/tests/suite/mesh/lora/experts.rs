//! Adapters of the matrices of experts train on any mesh as on one rank.

use super::{LORA, begin, quantised, with_parallelism};
use crate::mesh::canonical::{self, CANONICAL, run_config};
use crate::mesh::cases::{ADAMW, Case, LLAMA, SGD};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::parity::assert_parity;
use crate::mesh::split_work;
use crate::mesh::world::step_from;
use meshwork_engine::dry_run;
use meshwork_tensor::{Init, ParamSpec};
use meshwork_testkit::Sampled;
use meshwork_train::Trainer;
use meshwork_train::config::Config;

const MOE: &str = "[moe]\nnum_experts = 4\ntop_k = 2\nexpert_hidden_size = 32\naux_loss_coeff = 0.01\n";

/// Experts that are whole, that are cut, on the ranks of dp and of cp, with ranks that hold the same ones.
fn meshes(more: &str) -> Vec<(String, Config)> {
    let on = |mesh, micros| Case::of_1f1b(&LLAMA, mesh, false, micros);
    let sequence_parallel = |case| Case { sequence_parallel: true, ..case };
    let cases = [
        (on((2, 1, 1), 2), "ep = 2\n"),
        (sequence_parallel(on((4, 2, 1), 1)), "ep = 2\n"),
        (on((2, 2, 1), 2), "ep = 2\nexpert_tensor_parallel = 2\nzero_stage = 2\n"),
        (Case { schedule: "zb_h1", ..on((2, 1, 2), 4) }, "ep = 2\nzero_stage = 3\n"),
        (sequence_parallel(on((1, 2, 2), 4)), "expert_tensor_parallel = 2\n"),
        (on((1, 1, 1), 4), "cp = 2\nep = 2\n"),
        (on((4, 1, 1), 1), "ep = 4\n"),
    ];
    let config = |(case, keys): (Case, &str)| (format!("{case}, {keys}"), with_parallelism(&case, keys, more));
    cases.into_iter().map(config).collect()
}

fn alone(more: &str) -> Config {
    with_parallelism(&Case::alone(&LLAMA), "", more)
}

#[test]
fn any_mesh_has_the_gradients_of_one_rank() {
    for (turn, targets) in ["all-linear", "w3", "w2,w1,q_proj"].into_iter().enumerate() {
        let more = format!("{SGD}{MOE}{LORA}targets = '{targets}'\n");
        let reference = step_from("alone", &alone(&more), &LLAMA.data(), begin);
        assert!(reference.gradients.keys().all(|name| name.contains(".lora_")));
        assert!(reference.gradients.values().all(|gradient| gradient.iter().any(|&value| value != 0.0)));
        for (name, config) in meshes(&more).into_iter().sampled_in_turn(2, turn) {
            assert_parity(&format!("{name} {targets}"), &step_from(&name, &config, &LLAMA.data(), begin), &reference);
        }
    }
}

#[test]
fn canonical_numerics_have_the_bits_of_one_rank() {
    let bases = [LORA.to_owned(), format!("{LORA}targets = 'w1,w2'\n"), quantised("nf4")];
    for (turn, base) in bases.into_iter().enumerate() {
        let more = format!("{ADAMW}{CANONICAL}{MOE}{base}");
        let wanted = run_config("alone", &alone(&more), &LLAMA.data());
        for (name, config) in meshes(&more).into_iter().sampled_in_turn(3, turn) {
            canonical::assert_same(&name, &run_config(&name, &config, &LLAMA.data()), &wanted);
        }
    }
}

/// Blocks of tokens, and what is computed again in backward.
#[test]
fn memory_features_keep_the_gradients() {
    let more = format!("{SGD}{MOE}{LORA}");
    let reference = step_from("alone", &alone(&more), &LLAMA.data(), begin);
    let memories = ["sequence_block = 4\n", "recompute = 'selective'\n", "recompute = 'full'\nsequence_block = 8\n"];
    for (turn, memory) in memories.into_iter().enumerate() {
        let meshes = meshes(&format!("{more}[memory]\n{memory}")).into_iter().take(3);
        for (name, config) in meshes.sampled_in_turn(2, turn) {
            assert_parity(&format!("{name} {memory}"), &step_from(&name, &config, &LLAMA.data(), begin), &reference);
        }
    }
}

#[test]
fn a_device_whose_memory_the_host_cannot_read_has_the_cpus_bits() {
    let bases = [LORA.to_owned(), format!("{LORA}targets = 'w3'\n"), quantised("int8")];
    for (turn, base) in bases.into_iter().enumerate() {
        let meshes = meshes(&format!("{ADAMW}{MOE}{base}")).into_iter().skip(1).take(3);
        for (name, config) in meshes.sampled_in_turn(3, turn) {
            assert_opaque_as_cpu(&format!("{name} {base}"), &config, &LLAMA.data());
        }
    }
}

/// A rank that has all experts computes the same number of rows, whatever tokens choose.
#[test]
fn memory_and_communication_are_predicted() {
    let on = |mesh| Case::of_1f1b(&LLAMA, mesh, false, 2);
    for (case, keys) in [
        (on((2, 1, 1)), ""),
        (on((2, 2, 1)), "expert_tensor_parallel = 2\nzero_stage = 3\n"),
        (Case { sequence_parallel: true, ..on((1, 2, 2)) }, ""),
    ] {
        for base in [LORA.to_owned(), format!("{LORA}targets = 'w1'\n"), quantised("nf4")] {
            let config = with_parallelism(&case, keys, &format!("{ADAMW}{MOE}{base}"));
            let got = step_from(&case.to_string(), &config, &LLAMA.data(), begin);
            split_work::assert_run_as_predicted(&case, &config, &got);
        }
    }
}

/// Tokens that go to all experts are the even load that is predicted, whatever rank has which of them.
#[test]
fn memory_and_communication_are_predicted_where_experts_are_shared_out() {
    let all = MOE.replace("top_k = 2", "top_k = 4");
    for base in [LORA.to_owned(), format!("{LORA}targets = 'w2,w3'\n"), quantised("nf4 twice")] {
        for (name, config) in meshes(&format!("{ADAMW}{all}{base}")) {
            let got = step_from(&name, &config, &LLAMA.data(), begin);
            assert!(got.usage.iter().all(|usage| usage.peak_bytes > 0), "{name}");
            split_work::assert_run_as_predicted(&name, &config, &got);
        }
    }
}

/// Routers of zeros: every token has the same scores, and goes to the first two experts. Of ep=4 the first rank has one
/// of them, and sends each of its tokens to one other rank.
#[test]
fn memory_of_the_rank_that_all_tokens_choose_is_predicted() {
    let begin = |trainer: &mut Trainer| {
        trainer.load_weights(|spec, slice| {
            let init = match &*spec.name {
                name if name.contains("router") => Init::Zeros,
                name if name.contains("lora_B") => Init::Normal { std: 0.2 },
                _ => spec.init,
            };
            Ok::<_, String>(ParamSpec { init, ..spec.clone() }.initial(slice, 9))
        })
    };
    for base in [LORA.to_owned(), format!("{LORA}targets = 'w1'\n"), quantised("nf4")] {
        for (name, config) in meshes(&format!("{ADAMW}{MOE}{base}")) {
            let (model, plan) = (config.model(), config.plan().unwrap());
            let most = dry_run::crowded(&model, &plan, 0).unwrap().total();
            let got = step_from(&name, &config, &LLAMA.data(), begin);
            assert_eq!(got.usage[0].peak_bytes, most, "{name} {base}");
        }
    }
}
