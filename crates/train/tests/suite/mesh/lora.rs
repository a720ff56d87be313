//! Adapters on any mesh train as on one rank: their gradients, the norm, and the weights after a step; in canonical
//! numerics with its bits. The adapters begin with random B, because zeros would hide the gradients of A.

use crate::mesh::canonical::{self, CANONICAL, run_config};
use crate::mesh::cases::{ADAMW, CASES, Case, DROPOUT, LLAMA, Model, PADDED, PADDED_LLAMA, PLAIN, SGD, UNEVEN, UNTIED};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::parity::assert_parity;
use crate::mesh::split_work;
use crate::mesh::world::{Stepped, on_mesh, step_from, step_of, train};
use meshwork_tensor::{Init, ParamSpec};
use meshwork_testkit::Sampled;
use meshwork_train::config::Config;
use meshwork_train::{TrainError, Trainer};

mod experts;

const LORA: &str = "[lora]\nrank = 4\nalpha = 6.0\n";

/// Gives B other values than zeros.
fn begin(trainer: &mut Trainer) -> Result<(), TrainError> {
    trainer.load_weights(|spec, slice| {
        let init = if spec.name.contains("lora_B") { Init::Normal { std: 0.2 } } else { spec.init };
        Ok::<_, String>(ParamSpec { init, ..spec.clone() }.initial(slice, 9))
    })
}

fn step(case: &Case, more: &str) -> Stepped {
    step_from(&case.to_string(), &case.config(more), &case.model.data(), begin)
}

#[test]
fn any_mesh_has_the_gradients_of_one_rank() {
    let all = format!("{SGD}{LORA}");
    // One matrix of two of a weight; products behind and in front of the sum over tp.
    let some = |targets: &str| format!("{all}targets = '{targets}'\nrslora = true\n");
    for (model, more) in [
        (&UNEVEN, all.clone()),
        (&PLAIN, some("attn.c_proj,c_fc")),
        (&LLAMA, all.clone()),
        (&LLAMA, some("v_proj,gate_proj,down_proj")),
        (&DROPOUT, format!("{all}dropout = 0.3\n")),
    ] {
        let reference = step(&Case::alone(model), &more);
        let adapters = |name: &&String| name.contains(".lora_");
        assert!(reference.gradients.keys().all(|name| adapters(&name)), "{:?}", reference.gradients.keys());
        assert!(reference.gradients.values().all(|gradient| gradient.iter().any(|&value| value != 0.0)));
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(5) {
            assert_parity(&format!("{case} {more}"), &step(case, &more), &reference);
        }
    }
}

/// In fast numerics the last ranks hold zeros beyond them.
#[test]
fn inner_features_that_tp_does_not_divide() {
    for (model, like, targets) in [
        (&PADDED, &UNTIED, "all-linear"),
        (&PADDED_LLAMA, &LLAMA, "all-linear"),
        (&PADDED_LLAMA, &LLAMA, "q_proj,up_proj,down_proj"), // one of the two matrices of a weight
    ] {
        let more = format!("{SGD}{LORA}targets = '{targets}'\n");
        let reference = step(&Case::alone(model), &more);
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, like) && case.tp > 1).sampled(3) {
            let case = Case { model, ..*case };
            assert_parity(&case.to_string(), &step(&case, &more), &reference);
        }
    }
}

/// What the frozen model has none of: gradients, states, and their memory; `--steps 0` knows it.
#[test]
fn memory_and_communication_are_predicted() {
    let more = format!("{ADAMW}{LORA}");
    let halves = format!("{more}quantization = 'bf16'\n");
    let cases = [(&UNEVEN, more.clone()), (&LLAMA, more), (&UNEVEN, halves.clone()), (&LLAMA, halves)];
    for (model, more) in cases {
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(8) {
            let got = step_of(&case.to_string(), &case.config(&more), &model.data());
            split_work::assert_as_predicted(case, &more, &got);
        }
    }
}

#[test]
fn canonical_numerics_have_the_bits_of_one_rank() {
    let dropout = "[lora]\nrank = 3\ndropout = 0.3\n";
    // Of the features that were rounded for a product elements are dropped too.
    let rounded = format!("matmul_dtype = 'bf16'\n{dropout}");
    for (model, lora) in [(&UNEVEN, LORA), (&LLAMA, LORA), (&DROPOUT, dropout), (&DROPOUT, &rounded)] {
        let more = format!("{ADAMW}{CANONICAL}{lora}");
        let run = |case: &Case| run_config(&case.to_string(), &case.config(&more), &case.model.data());
        let alone = run(&Case::alone(model));
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(6) {
            canonical::assert_same(case, &run(case), &alone);
        }
    }
}

/// With other features that change where weights, gradients, states and activations are.
/// Cut in a zigzag, as sequences without dropout are, a sequence drew for other places than on one rank.
#[test]
fn dropout_of_adapters_draws_for_the_same_places_over_cp() {
    let more = format!("{SGD}{LORA}dropout = 0.3\n");
    let alone = step(&Case::alone(&LLAMA), &more);
    for method in ["all_gather", "ring", "hybrid"] {
        let over = format!("[parallelism]\ncp = 2\ncontext_parallel_method = '{method}'\n");
        let config = Config::from_toml(&Case::alone(&LLAMA).text(&more).replace("[parallelism]\n", &over)).unwrap();
        assert_parity(method, &step_from(method, &config, &LLAMA.data(), begin), &alone);
    }
}

#[test]
fn adapters_go_with_the_other_features() {
    let case = Case { micros: 2, ..Case::of_1f1b(&LLAMA, (2, 2, 2), true, 2) };
    let alone = step(&Case::alone(&LLAMA), &format!("{SGD}{LORA}"));
    for (parallelism, memory) in [
        ("zero_stage = 1\n", ""),
        ("zero_stage = 2\n", ""),
        ("zero_stage = 3\n", "recompute = 'full'\n"),
        ("cp = 2\ncontext_parallel_method = 'all_gather'\n", ""),
        ("cp = 2\ncontext_parallel_method = 'ring'\n", "recompute = 'selective'\n"),
        ("", "sequence_block = 5\n"),
        ("zero_stage = 2\n", "loss_chunk = 4\nsequence_block = 8\n"),
    ] {
        let text = case.text(&format!("{SGD}{LORA}[memory]\n{memory}"));
        let text = text.replace("[parallelism]\n", &format!("[parallelism]\n{parallelism}"));
        let name = format!("{parallelism}{memory}");
        let config = Config::from_toml(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_parity(&name, &step_from(&name, &config, &LLAMA.data(), begin), &alone);
    }
}

#[test]
fn a_device_whose_memory_the_host_cannot_read_has_the_cpus_bits() {
    for (case, more) in [
        (Case::of_1f1b(&DROPOUT, (2, 2, 2), true, 4), "dropout = 0.1\n"),
        (Case::of_1f1b(&LLAMA, (1, 4, 2), true, 4), ""),
        (Case::of_1f1b(&LLAMA, (2, 2, 1), false, 2), "targets = 'v_proj'\n"),
    ] {
        let config = case.config(&format!("{ADAMW}{LORA}{more}"));
        assert_opaque_as_cpu(&format!("{case} {more}"), &config, &case.model.data());
    }
}

/// Training starts from the model itself.
#[test]
fn an_adapter_that_is_zero_changes_no_number() {
    let loss = |more: &str| {
        let (config, data) = (Case::alone(&LLAMA).config(&format!("{ADAMW}{more}")), LLAMA.data());
        on_mesh(&config, |mut trainer| Ok(train(&mut trainer, &data, &config)?.loss)).swap_remove(0)
    };
    assert_eq!(loss(LORA), loss(""));
}

/// Frozen matrices in fewer bits, in blocks that no mesh of these tests cuts; "nf4 twice" has scales of 8 bits.
fn quantised(form: &str) -> String {
    let (form, twice) = form.split_once(' ').unwrap_or((form, ""));
    format!("{LORA}quantization = '{form}'\nblock_size = 8\ndouble_quantization = {}\n", twice == "twice")
}

/// Every mesh restores the same numbers: a block is one of the whole parameter.
#[test]
fn a_quantised_base_has_the_bits_of_one_rank() {
    for (model, form) in
        [(&UNEVEN, "nf4"), (&LLAMA, "int8"), (&LLAMA, "nf4"), (&LLAMA, "nf4 twice"), (&DROPOUT, "bf16")]
    {
        let more = format!("{ADAMW}{CANONICAL}{}", quantised(form));
        let run = |case: &Case| run_config(&case.to_string(), &case.config(&more), &case.model.data());
        let alone = run(&Case::alone(model));
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(6) {
            canonical::assert_same(case, &run(case), &alone);
        }
    }
}

/// Scales, codes, and the numbers that a layer restores and drops are in the prediction.
#[test]
fn memory_of_a_quantised_base_is_predicted() {
    for (model, form) in [(&UNEVEN, "int8"), (&LLAMA, "nf4"), (&LLAMA, "nf4 twice"), (&LLAMA, "bf16")] {
        let more = format!("{ADAMW}{}", quantised(form));
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(8) {
            let got = step_of(&case.to_string(), &case.config(&more), &model.data());
            split_work::assert_as_predicted(case, &more, &got);
        }
    }
}

#[test]
fn a_quantised_base_goes_with_the_other_features() {
    let case = Case { micros: 2, ..Case::of_1f1b(&LLAMA, (2, 2, 2), true, 2) };
    let alone = step(&Case::alone(&LLAMA), &format!("{SGD}{}", quantised("nf4")));
    let folder = tempfile::tempdir().unwrap();
    let offload = format!("offload = 'all'\noffload_dir = '{}'\n", folder.path().display());
    for (parallelism, memory) in [
        ("zero_stage = 3\n", "recompute = 'full'\n"),
        ("cp = 2\ncontext_parallel_method = 'ring'\n", "recompute = 'selective'\n"),
        ("", &*offload),
        ("zero_stage = 2\n", "loss_chunk = 4\nsequence_block = 8\n"),
    ] {
        let text = case.text(&format!("{SGD}{}[memory]\n{memory}", quantised("nf4")));
        let text = text.replace("[parallelism]\n", &format!("[parallelism]\n{parallelism}"));
        let name = format!("{parallelism}{memory}");
        let config = Config::from_toml(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_parity(&name, &step_from(&name, &config, &LLAMA.data(), begin), &alone);
    }
}

#[test]
fn a_quantised_base_on_a_device_whose_memory_the_host_cannot_read_has_the_cpus_bits() {
    for (case, form) in [
        (Case::of_1f1b(&DROPOUT, (2, 2, 2), true, 4), "int8"),
        (Case::of_1f1b(&LLAMA, (1, 4, 2), true, 4), "nf4"),
        (Case::of_1f1b(&UNEVEN, (2, 1, 2), false, 4), "nf4 twice"),
        (Case::of_1f1b(&LLAMA, (2, 2, 1), false, 2), "bf16"),
    ] {
        let config = case.config(&format!("{ADAMW}{}", quantised(form)));
        assert_opaque_as_cpu(&format!("{case} {form}"), &config, &case.model.data());
    }
}

/// A configuration in which cp, where it cuts, has the method that canonical numerics have on one rank too.
fn with_parallelism(case: &Case, keys: &str, more: &str) -> Config {
    let keys = format!("[parallelism]\ncontext_parallel_method = 'all_gather'\n{keys}");
    let config = Config::from_toml(&case.text(more).replace("[parallelism]\n", &keys));
    config.unwrap_or_else(|error| panic!("{case}, {keys}: {error}"))
}

/// Frozen weights that ranks share out: all of them, groups of them, those of a stage, those with other parts of a
/// sequence.
fn shared_out(model: &'static Model, more: &str) -> Vec<(Case, Config)> {
    let on = |mesh, micros| Case::of_1f1b(model, mesh, false, micros);
    let cases = [
        (on((4, 1, 1), 1), ""),
        (on((4, 2, 1), 2), "zero_group = 2\n"),
        (Case { sequence_parallel: true, ..on((2, 2, 2), 4) }, ""),
        (Case { schedule: "zb_h1", ..on((2, 1, 2), 4) }, ""),
        (on((2, 1, 1), 2), "cp = 2\n"),
    ];
    let config = |(case, keys)| (case, with_parallelism(&case, &format!("zero_stage = 3\n{keys}"), more));
    cases.into_iter().map(config).collect()
}

#[test]
fn a_base_that_ranks_share_out_has_the_bits_of_one_rank() {
    let forms = [(&LLAMA, LORA.to_owned()), (&LLAMA, quantised("nf4 twice")), (&UNEVEN, quantised("int8"))];
    let others = [(&DROPOUT, quantised("bf16")), (&UNEVEN, LORA.to_owned())];
    for (turn, (model, base)) in forms.into_iter().chain(others).enumerate() {
        let more = format!("{ADAMW}{CANONICAL}{base}");
        let alone = run_config("alone", &with_parallelism(&Case::alone(model), "", &more), &model.data());
        for (case, config) in shared_out(model, &more).into_iter().sampled_in_turn(2, turn) {
            let name = format!("{case}, {:?}", config.parallelism);
            canonical::assert_same(&name, &run_config(&name, &config, &model.data()), &alone);
        }
    }
}

/// Shares of ranks are whole blocks, also where a quarter of a matrix is none.
#[test]
fn ranks_share_out_whole_blocks() {
    for form in ["nf4", "nf4 twice", "int8"] {
        let more = format!("{ADAMW}{CANONICAL}{}", quantised(form).replace("block_size = 8", "block_size = 96"));
        let alone = run_config("alone", &with_parallelism(&Case::alone(&LLAMA), "", &more), &LLAMA.data());
        for mesh in [(2, 1, 1), (4, 1, 1)] {
            let case = Case::of_1f1b(&LLAMA, mesh, false, 1);
            let config = with_parallelism(&case, "zero_stage = 3\n", &more);
            canonical::assert_same(case, &run_config(form, &config, &LLAMA.data()), &alone);
        }
    }
}

#[test]
fn memory_and_communication_of_a_base_that_ranks_share_out_are_predicted() {
    let forms = [(&LLAMA, LORA.to_owned()), (&UNEVEN, quantised("int8")), (&LLAMA, quantised("nf4"))];
    for (turn, (model, base)) in forms.into_iter().enumerate() {
        for (case, config) in shared_out(model, &format!("{ADAMW}{base}")).into_iter().sampled_in_turn(2, turn) {
            let got = step_from(&case.to_string(), &config, &model.data(), begin);
            split_work::assert_run_as_predicted(&case, &config, &got);
        }
    }
}

#[test]
fn a_base_that_ranks_share_out_on_a_device_whose_memory_the_host_cannot_read_has_the_cpus_bits() {
    for (turn, base) in [LORA.to_owned(), quantised("nf4")].into_iter().enumerate() {
        for (case, config) in shared_out(&LLAMA, &format!("{ADAMW}{base}")).into_iter().sampled_in_turn(2, turn) {
            assert_opaque_as_cpu(&format!("{case} {base}"), &config, &LLAMA.data());
        }
    }
}
