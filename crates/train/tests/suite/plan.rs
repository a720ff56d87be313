//! The report of `--steps 0`, and the predictions that it is made of.

use meshwork_train::config::Config;
use meshwork_train::plan::{predict, predict_all, report, world_bytes};

#[test]
fn the_report_tells_ranks_apart_by_what_they_do() {
    let config = Config::from_toml("[parallelism]\ndp = 2\npp = 2").unwrap();
    let text = report(&config).unwrap();
    assert!(text.starts_with("mesh tp=1,dp=2,pp=2: 4 ranks\n842,496 parameters\n"), "{text}");
    assert!(text.contains("\n4 layers, 2 + 2 on the stages; products in f32\n"), "{text}");
    assert!(text.contains("ranks 0-1 (pp rank 0), each") && text.contains("ranks 2-3 (pp rank 1), each"), "{text}");
}

#[test]
fn a_router_that_looks_ahead_is_told_of() {
    let of = |router: &str| {
        let toml = format!("[model]\nseq_len = 8\n[moe]\nnum_experts = 4\nrouter = '{router}'");
        report(&Config::from_toml(&toml).unwrap()).unwrap()
    };
    assert!(of("expert_choice").contains("\nwarning: moe.router = \"expert_choice\" compares a token with later ones"));
    assert!(!of("topk").contains("warning"));
}

/// With an even load the rank of an expert takes less than if all tokens came to it; one that has all takes the same.
#[test]
fn the_load_of_experts_is_said() {
    let of = |ep| {
        let toml = format!("[moe]\nnum_experts = 4\n[parallelism]\ndp = 2\nep = {ep}\n[memory]\nsequence_block = 16");
        report(&Config::from_toml(&toml).unwrap()).unwrap()
    };
    let text = of(2);
    let (_, told) = text.split_once("\n  experts        an even load is assumed; ").unwrap();
    assert!(told.contains(" at the peak if all tokens choose experts of the rank\n"), "{text}");
    assert!(!of(1).contains("even load"));
}

/// 12 · 128² elements in each of 4 layers, in blocks of 64, and 16 bytes in front of each of 4 matrices of a layer.
#[test]
fn what_frozen_matrices_take_in_fewer_bits_is_said() {
    let of = |form: &str| {
        report(&Config::from_toml(&format!("[lora]\nrank = 4\nquantization = '{form}'")).unwrap()).unwrap()
    };
    for (form, told) in [
        ("bf16", "786,432 of them as bf16: 1.5 MiB, 16.00 bits each, 1.5 MiB less than as numbers\n"),
        ("int8", "786,432 of them as int8/block64: 816.2 KiB, 8.50 bits each, 2.2 MiB less than as numbers\n"),
        ("nf4", "786,432 of them as nf4/block64: 432.2 KiB, 4.50 bits each, 2.6 MiB less than as numbers\n"),
        (
            "nf4'\ndouble_quantization = true\nalpha = 8.0\ntargets = 'all-linear",
            "786,432 of them as nf4/block64/e5m3: 396.2 KiB, 4.13 bits each, 2.6 MiB less than as numbers (scales of 8 bits save \
             36.0 KiB of it)\n",
        ),
    ] {
        let text = of(form);
        assert!(text.contains(told), "{form}: {text}");
    }
}

#[test]
fn the_report_follows_the_partition() {
    let config = Config::from_toml("[parallelism]\npp = 2\n[pipeline]\npartition = [4, 0]").unwrap();
    let text = report(&config).unwrap();
    assert!(text.contains("\n4 layers, 4 + 0 on the stages; products in f32\n"), "{text}");
    // The first has all of the 842,496 parameters but the last norm; the second has that norm and the tied table,
    // 256 · 128.
    assert!(text.contains("rank 0 (pp rank 0)\n  parameters     842,240\n"), "{text}");
    assert!(text.contains("rank 1 (pp rank 1)\n  parameters     33,024\n"), "{text}");
    let one = Config::from_toml("[training]\nmatmul_dtype = 'bf16'").unwrap();
    assert!(report(&one).unwrap().contains("\n4 layers; products in bf16\n"));
    let one = Config::from_toml("[training]\nmatmul_dtype = 'tf32'").unwrap();
    assert!(report(&one).unwrap().contains("\n4 layers; products in tf32\n"));
    let all = Config::from_toml("[training]\ndtype = 'bf16'").unwrap();
    assert!(report(&all).unwrap().contains("\n4 layers; stored in bf16, products in bf16\n"));
}

#[test]
fn ranks_that_differ_only_along_dp_do_the_same() {
    // 250 words over 4 tp ranks: the last one holds padding.
    let toml = "[model]\nvocab_size = 250\n[parallelism]\ndp = 2\ntp = 4\npp = 2\nsequence_parallel = true";
    let config = Config::from_toml(toml).unwrap();
    let mesh = config.mesh().unwrap();
    let all = predict_all(&config).unwrap();
    let equal = |rank: usize| all.iter().find(|equal| equal.ranks.contains(&rank)).unwrap();
    for rank in 0..mesh.world_size() {
        assert_eq!(equal(rank).each, predict(&config, rank).unwrap(), "rank {rank}");
    }
    assert_eq!(all.iter().map(|equal| equal.ranks.len()).sum::<usize>(), 16);
    let bytes = (0..16).map(|rank| u128::from(predict(&config, rank).unwrap().peak_bytes())).sum::<u128>();
    assert_eq!(world_bytes(&config).unwrap(), bytes);
}
