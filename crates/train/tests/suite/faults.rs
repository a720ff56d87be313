//! Faults of the configuration and their messages.
//!
//! More than 400 lines: one short case per kind of fault, to be read beside each other.

use meshwork_train::config::keys::{self, ValueKind};
use meshwork_train::config::{Args, Config};
use meshwork_train::load;
use meshwork_train::plan::report;
use std::fs;
use std::path::PathBuf;

fn args(line: &str) -> Args {
    Args::parse(line.split_whitespace())
}

fn config(line: &str) -> Config {
    Config::from_args(&args(line)).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// All faults of a command line, one per line.
fn refusal(line: &str) -> String {
    load(&args(line)).expect_err(line).to_string()
}

/// Checks (command line, whole refusal) pairs.
fn refused(cases: &[(&str, &str)]) {
    for (line, expected) in cases {
        assert_eq!(refusal(line), *expected, "\nfor {line}");
    }
}

fn file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_command_line_is_held_to_its_flags() {
    const FLAGS: &str = "--config, --mesh, --data, --steps, --device, --metrics, --plan-memory, --set, --help";
    refused(&[
        ("--mseh dp=2", &format!("--mseh: unknown flag; the nearest is --mesh; use one of {FLAGS}")),
        ("train", &format!("train: not a flag; use one of {FLAGS}")),
        ("--steps", "--steps: no value; use --steps VALUE or --steps=VALUE"),
        ("--steps --mesh dp=1", "--steps: no value; use --steps VALUE or --steps=VALUE"),
        (
            "--steps many",
            "training.steps = \"many\" (from --steps): is a string, not a whole number; use a whole number of at least 0",
        ),
        ("--steps -1", "training.steps = -1 (from --steps): is below 0; use a whole number of at least 0"),
        ("--set training.steps", "--set training.steps: no value; use --set section.key=value"),
        ("--device cpuu", "--device cpuu: unknown device; the nearest is cpu; use one of cpu, cuda, cuda-emulated"),
        (
            "--config no/such.toml",
            "--config no/such.toml: cannot be read: No such file or directory (os error 2); use a file in TOML",
        ),
    ]);
}

#[test]
fn bad_toml_is_located() {
    let path = file("broken.toml", "[model]\nnum_heads = 4\nnum_heads = \n");
    let refusal = refusal(&format!("--config {}", path.display()));
    assert!(refusal.contains("broken.toml: line 3: "), "{refusal}");
    assert_eq!(refusal.lines().count(), 1);
}

#[test]
fn mesh_strings() {
    refused(&[
        ("--mesh xp=2", "--mesh xp=2: unknown axis; the nearest is dp; use one of dp, tp, pp, cp, ep"),
        ("--mesh tpp=2", "--mesh tpp=2: unknown axis; the nearest is tp; use one of dp, tp, pp, cp, ep"),
        (
            "--mesh sp=2",
            "--mesh sp=2: sequence parallel is no axis: it shards over tp; use parallelism.sequence_parallel = true; to \
             split long sequences, use the axis cp",
        ),
        ("--mesh dp=0", "--mesh dp=0: a degree is at least 1; use dp=1 or more"),
        ("--mesh dp=2,dp=2", "--mesh dp=2: the axis is named twice; name dp once"),
        ("--mesh dp=two", "--mesh dp=two: the degree is not a whole number; use dp=1 or more"),
        ("--mesh dp=-2", "--mesh dp=-2: the degree is not a whole number; use dp=1 or more"),
        ("--mesh dp", "--mesh dp: not an axis with its degree; use axis=degree, such as dp=2"),
        ("--mesh=", "--mesh \"\": not an axis with its degree; use axis=degree, such as dp=2"),
        (
            "--mesh dp=99999999999999999999",
            "--mesh dp=99999999999999999999: the degree is too large; use dp=1 or more, as many as you have ranks",
        ),
    ]);
    assert_eq!(refusal("--mesh dp=0,tp=x,sp=2,qp=1").lines().count(), 4, "all at once");
}

#[test]
fn a_world_that_overflows() {
    // 2^40 ranks per axis: each fits, the product does not.
    let refusal = refusal("--mesh dp=1099511627776,tp=1099511627776 --set training.global_batch_size=1099511627776");
    let expected = "parallelism = dp=1099511627776,tp=1099511627776,pp=1: the number of ranks, dp · tp · pp · cp, \
                    overflows; use as many ranks as you have";
    assert!(refusal.lines().any(|line| line == expected), "{refusal}");
}

#[test]
fn the_mesh_string_and_the_section_must_agree() {
    let path = file("mesh.toml", "[parallelism]\ndp = 2\ntp = 2\n");
    let path = path.display();
    assert_eq!(config(&format!("--config {path} --mesh tp=2,dp=2")).parallelism.world_size(), Some(4));
    refused(&[
        (
            &format!("--config {path} --mesh dp=4,tp=2"),
            "parallelism.dp = 2: conflicts with --mesh dp=4,tp=2, where dp is 4; use one of the two, or dp = 4",
        ),
        (
            &format!("--config {path} --mesh dp=2"),
            "parallelism.tp = 2: conflicts with --mesh dp=2, where tp is 1 (axes not named are 1); use one of the two, or \
             tp = 1",
        ),
    ]);
}

#[test]
fn unknown_keys_hear_of_the_nearest() {
    for (key, near) in [
        ("training.stepz", "training.steps"),
        ("traning.steps", "training.steps"),
        ("model.heads", "model.num_heads"),
        ("model.n_layers", "model.num_layers"),
        ("model.lr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("steps", "training.steps"),
        ("parallelism.sp", "parallelism.dp"),
        ("validation.evry", "validation.every"),
        ("training.learning_rat", "optimizer.lr"),
        ("tensor-model-parallel-size", "parallelism.tp"),
        ("model.num_attention_heads", "model.num_heads"),
    ] {
        let line = format!("--set {key}=1");
        assert_eq!(refusal(&line), format!("{key} = 1 (from --set): unknown key; the nearest is {near}"));
    }
    assert_eq!(
        refusal("--set model.flux_capacity=1"),
        "model.flux_capacity = 1 (from --set): unknown key; none is near; use --help to see all"
    );
    let text = "steps = 3\n[training]\nstepz = 5\n[modle]\nnum_heads = 4\n[empty]\n";
    assert_eq!(
        Config::from_toml(text).unwrap_err().to_string(),
        "steps = 3: unknown key; the nearest is training.steps\n\
         training.stepz = 5: unknown key; the nearest is training.steps\n\
         modle.num_heads = 4: unknown key; the nearest is model.num_heads\n\
         [empty]: unknown section; the nearest is memory; use one of model, lora, parallelism, moe, pipeline, training, \
         dpo, optimizer, lr_scheduler, data, validation, memory, checkpoint, metrics, comm, cuda, compress, numerics"
    );
}

#[test]
fn wrong_toml_types() {
    let text = r#"
        training = 5
        [model]
        num_heads = "4"
        num_layers = 4.0
        tie_embeddings = 1
        preset = 3
        dropout = "none"
        [data]
        path = ["a", "b"]
        [optimizer]
        lr = true
        name = 2024-01-01
        eps = { value = 1 }
    "#;
    assert_eq!(
        Config::from_toml(text).unwrap_err().to_string(),
        "training = 5: is a whole number, not a section; use a table: [training]\n\
         model.num_heads = \"4\": is a string, not a whole number; use a whole number of at least 1\n\
         model.num_layers = 4.0: is a number with a fraction, not a whole number; use a whole number of at least 1\n\
         model.tie_embeddings = 1: is a whole number, not a boolean; use true or false\n\
         model.preset = 3: is a whole number, not a string; use tiny or small or medium or gpt2 or \
          llama-tiny or llama3-8b or llama3-70b or llama3-405b or switch-tiny or mixtral-tiny or deepseek-tiny or mixtral-8x7b or deepseek-v3\n\
         model.dropout = \"none\": is a string, not a number; use a number of at least 0 and below 1\n\
         data.path = [\"a\", \"b\"]: is an array, not a string; use a string\n\
         optimizer.lr = true: is a boolean, not a number; use a number of at least 0\n\
         optimizer.name = 2024-01-01: is a date, not a string; use adamw or sgd or lamb or adafactor or muon or adam8bit\n\
         optimizer.eps = { value = 1 }: is a table, not a number; use a number above 0"
    );
}

#[test]
fn values_out_of_range() {
    for (key, value, valid) in [
        ("optimizer.lr", "-0.1", "at least 0"),
        ("optimizer.lr", "nan", "at least 0"),
        ("optimizer.lr", "inf", "at least 0"),
        ("optimizer.beta1", "1.0", "at least 0 and below 1"),
        ("optimizer.beta2", "-0.1", "at least 0 and below 1"),
        ("optimizer.eps", "0.0", "above 0"),
        ("optimizer.weight_decay", "-1.0", "at least 0"),
        ("optimizer.momentum", "1.0", "at least 0 and below 1"),
        ("model.dropout", "1.0", "at least 0 and below 1"),
        ("training.max_norm", "-1.0", "at least 0"),
        ("validation.fraction", "-0.1", "at least 0 and below 1"),
        ("validation.fraction", "1.0", "at least 0 and below 1"),
        ("lr_scheduler.min_lr_factor", "1.5", "0 to 1"),
        ("comm.timeout_seconds", "0.0", "above 0"),
    ] {
        let refusal = refusal(&format!("--set {key}={value}"));
        assert_eq!(refusal.lines().count(), 1);
        assert!(
            refusal.starts_with(&format!("{key} = {value} (from --set): is out of range; use a number ")),
            "{refusal}"
        );
        assert!(refusal.ends_with(valid), "{refusal}");
    }
    refused(&[
        (
            "--set training.global_batch_size=0",
            "training.global_batch_size = 0 (from --set): is below 1; use a whole number of at least 1",
        ),
        ("--set parallelism.dp=0", "parallelism.dp = 0 (from --set): is below 1; use a whole number of at least 1"),
    ]);
}

#[test]
fn unknown_words_hear_of_the_nearest() {
    refused(&[
        (
            "--set model.preset=smal",
            "model.preset = \"smal\" (from --set): unknown; the nearest is small; use one of tiny, small, medium, gpt2, \
             llama-tiny, llama3-8b, llama3-70b, llama3-405b, switch-tiny, mixtral-tiny, deepseek-tiny, mixtral-8x7b, deepseek-v3",
        ),
        (
            "--set pipeline.schedule=1f1",
            "pipeline.schedule = \"1f1\" (from --set): unknown; the nearest is 1f1b; use one of gpipe, 1f1b, \
             interleaved_1f1b, breadth_first, zb_h1, zb_h2, zb_v, dualpipe_v, pipedream, pipedream_2bw",
        ),
        (
            "--set model.kind=lama",
            "model.kind = \"lama\" (from --set): unknown; the nearest is llama; use one of gpt2, llama",
        ),
        (
            "--set model.kind=resnet",
            "model.kind = \"resnet\" (from --set): unknown; the nearest is gpt2; use one of gpt2, llama",
        ),
        (
            "--set memory.recompute=ful",
            "memory.recompute = \"ful\" (from --set): unknown; use \"none\", \"selective\", \"full\", \"sqrt\", \"stage\", or a whole \
             number of at least 1",
        ),
        (
            "--mesh pp=2 --set memory.recompute=3",
            "memory.recompute = 3: no stage has as many layers: the largest has 2; use at most 2 layers, or \"full\" for all",
        ),
        (
            "--set training.dtype=fp16",
            "training.dtype = \"fp16\" (from --set): unknown; the nearest is f16; use one of f32, bf16, f16",
        ),
        (
            "--set optimizer.name=adam",
            "optimizer.name = \"adam\" (from --set): unknown; the nearest is adamw; use one of adamw, sgd, lamb, adafactor, muon, adam8bit",
        ),
    ]);
}

#[test]
fn what_ranks_cannot_share_out_is_refused() {
    refused(&[
        (
            "--mesh dp=2 --set parallelism.zero_stage=4",
            "parallelism.zero_stage = 4: there is no such stage; use one of 0 to 3",
        ),
        (
            "--set parallelism.zero_stage=1",
            "parallelism.zero_stage = 1: no ranks to share out with: parallelism.dp = 1; use parallelism.dp or parallelism.cp of at least 2, or 0",
        ),
        (
            "--mesh dp=4 --set parallelism.zero_stage=2 --set parallelism.zero_group=3",
            "parallelism.zero_group = 3: does not divide parallelism.dp = 4; use a divisor, or 0 for all of dp",
        ),
        (
            "--mesh dp=4 --set parallelism.zero_group=2",
            "parallelism.zero_group = 2: shares out nothing with parallelism.zero_stage = 0; use parallelism.zero_stage of 1 to 3, or 0",
        ),
    ]);
}

#[test]
fn methods_of_context_parallelism_that_do_not_exist() {
    let told = refusal("--mesh cp=2 --set parallelism.context_parallel_method=ulysses");
    assert!(told.starts_with("parallelism.context_parallel_method = \"ulysses\" (from --set): unknown; "), "{told}");
}

#[test]
fn a_ring_that_cp_or_the_heads_do_not_fit() {
    let hybrid = "--set parallelism.context_parallel_method=hybrid --set parallelism.ring_degree";
    refused(&[
        (
            &format!("--mesh cp=4 {hybrid}=3"),
            "parallelism.ring_degree = 3: does not divide parallelism.cp = 4; use 2 or 4",
        ),
        (
            &format!("--mesh tp=2,cp=4 {hybrid}=1"),
            "parallelism.ring_degree = 1: leaves 4 ranks to share out the 2 heads of queries on each rank of tp, which are no \
             equal parts of groups; use 2 or 4",
        ),
        (
            &format!("--mesh cp=6 --set model.preset=llama-tiny {hybrid}=2"),
            "parallelism.ring_degree = 2: leaves 3 ranks to share out the 4 heads of queries on each rank of tp, which are no \
             equal parts of groups; use 3 or 6",
        ),
    ]);
}

#[test]
fn a_sequence_that_cp_does_not_fit() {
    refused(&[
        (
            "--mesh cp=1000000000000 --set parallelism.context_parallel_method=auto --set model.sliding_window=9",
            "parallelism.cp = 1000000000000: cuts model.seq_len = 128 into 1000000000000 parts; use at most 128, or \
             model.seq_len of 1000000000000 or more\nparallelism = dp=1,tp=1,pp=1,cp=1000000000000: 1000000000000 ranks, each a \
             thread of this process; use 4096 ranks or fewer; --steps 0 reports on any mesh",
        ),
        (
            "--mesh cp=3 --set model.seq_len=2",
            "parallelism.cp = 3: cuts model.seq_len = 2 into 3 parts; use at most 2, or model.seq_len of 3 or more",
        ),
        (
            "--mesh tp=2,cp=4 --set parallelism.sequence_parallel=true --set model.seq_len=6",
            "parallelism.cp = 4: cuts model.seq_len = 6 into 8 parts; use at most 3, or model.seq_len of 8 or more",
        ),
        (
            "--mesh cp=2 --set parallelism.context_parallel_method=none",
            "parallelism.cp = 2: cuts sequences, and parallelism.context_parallel_method is none; use 1, or all_gather, \
             all_to_all, ring, hybrid or auto",
        ),
        (
            "--mesh dp=2,cp=4,ep=6 --set moe.num_experts=12 --set model.preset=tiny",
            "parallelism.ep = 6: does not divide parallelism.dp · parallelism.cp = 8: ranks of dp and cp share out the \
             experts; use 4 or 8",
        ),
        (
            "--mesh cp=3 --set model.seq_len=16 --set model.dropout=0.1",
            "parallelism.cp = 3: does not divide model.seq_len = 16 into 3 equal parts, and model.dropout draws for \
             each place; use model.seq_len = 18, or model.dropout = 0",
        ),
        (
            "--mesh tp=2,cp=4 --set parallelism.context_parallel_method=all_to_all",
            "parallelism.cp = 4: does not share out the 2 heads of queries on each rank of tp in equal parts of \
             groups; use 2, or parallelism.context_parallel_method = \"all_gather\"",
        ),
        (
            "--mesh cp=3 --set training.numerics=canonical --set model.tie_embeddings=false --set model.seq_len=15",
            "parallelism.cp = 3: does not fit canonical numerics with numerics.reduction_blocks = 8: each of 3 parts of \
             a sequence must be a power of two; use 1, 2, 4, 8, or another numerics.reduction_blocks",
        ),
        (
            "--mesh cp=2 --set training.numerics=canonical --set model.tie_embeddings=false --set model.seq_len=15",
            "parallelism.cp = 2: does not divide model.seq_len = 15 into 2 equal parts (training.numerics is canonical); \
             use model.seq_len = 16, or training.numerics = \"fast\"",
        ),
    ]);
}

#[test]
fn schedules_say_which_sizes_they_take() {
    let pipeline = "--mesh pp=4 --set model.num_layers=8 --set pipeline.schedule=";
    let with = |rest: &str| refusal(&format!("{pipeline}{rest}"));
    assert_eq!(
        with("zb_h1 --set pipeline.virtual_stages=2"),
        "pipeline.virtual_stages = 2: schedule zb_h1 does not run with 2 virtual stages (chunks per rank): it has 1; \
         interleaved_1f1b and breadth_first take any number; use 1, or another schedule"
    );
    assert_eq!(
        with("interleaved_1f1b --set pipeline.virtual_stages=2 --set model.num_layers=12"),
        "pipeline.virtual_stages = 2: gives pp · virtual_stages = 8 stages, which do not divide model.num_layers = 12; use \
         layers that are a multiple of 8, such as 8 or 16, or partition them by cost or with a list in pipeline.partition"
    );
    assert_eq!(
        with("interleaved_1f1b --set pipeline.num_microbatches=2"),
        "pipeline.num_microbatches = 2: schedule interleaved_1f1b over pp=4 needs a multiple of 4 micro-batches, got 2; \
         gpipe and 1f1b take any number; use a multiple of 4 micro-batches, or a smaller pp"
    );
    assert_eq!(
        with("dualpipe_v --set pipeline.num_microbatches=4"),
        "pipeline.num_microbatches = 4: schedule dualpipe_v over pp=4 needs at least 8 micro-batches, got 4; gpipe and \
         1f1b take any number; use 8 or more, or a smaller pp"
    );
}

#[test]
fn replicas_must_add_up_and_schedules_of_ones_own_must_fit() {
    let mesh = "--mesh pp=4 --set pipeline.replication=";
    assert_eq!(
        refusal(&format!("{mesh}[2,1]")),
        "pipeline.replication = [2, 1]: puts stages on 3 ranks, not parallelism.pp = 4; use numbers of at least 1 that add \
         up to 4"
    );
    assert_eq!(
        refusal(&format!("{mesh}[3,1] --set pipeline.schedule=zb_h1")),
        "pipeline.replication = [3, 1]: does not go with pipeline.schedule = \"zb_h1\"; use pipeline.schedule = \"1f1b\""
    );
    assert_eq!(
        refusal(&format!("{mesh}[3,1] --set pipeline.num_microbatches=2")),
        "pipeline.replication = [3, 1]: leaves ranks without work: 3 ranks of a stage take pipeline.num_microbatches = 2 in \
         turn; use at most 2 ranks for a stage, or more micro-batches"
    );
    assert!(
        refusal(&format!("{mesh}[3,1] --set training.numerics=canonical"))
            .starts_with("pipeline.replication = [3, 1]: replicas take micro-batches in turn")
    );
    let good = "name: mine\nranks: 2\nplacement: 0 1\nmicros: 2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n";
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("schedule.txt");
    let with = |text: &str, set: &str| {
        fs::write(&path, text).unwrap();
        let told = refusal(&format!("--set pipeline.schedule_file={} {set}", path.display()));
        let key = format!("pipeline.schedule_file = {}: ", path.display());
        told.strip_prefix(&key).unwrap_or_else(|| panic!("{told}")).to_owned()
    };
    assert_eq!(with(good, "--mesh pp=3"), "is for 2 ranks, not parallelism.pp = 3; use pp = 2");
    assert_eq!(
        with(good, "--mesh pp=2 --set pipeline.num_microbatches=4"),
        "has 2 micro-batches, not pipeline.num_microbatches = 4; use pipeline.num_microbatches = 2, or leave it out"
    );
    assert_eq!(
        with(good, "--mesh pp=2 --set pipeline.schedule=gpipe"),
        "is one schedule, and pipeline.schedule = \"gpipe\" another; use one of the two"
    );
    for (text, problem) in [
        (good.replace(" 1B1", ""), "schedule mine: rank 1 runs no backward of micro-batch 1 through stage 1 (1B1); "),
        (
            good.replace("0B0 0B1", "0B0 0B0 0B1"),
            "schedule mine: rank 0 runs 0B0 twice, at steps 2 and 3; it must run once; ",
        ),
        (
            good.replace("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1").replace("1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1"),
            "schedule mine: ranks wait for each other in a circle; ",
        ),
        (good.replace("0F0", "0X0"), "line 5: "),
        (good.replace("0B0 0B1", "").replace("1B0", "").replace("1B1", ""), "has no backward: "),
    ] {
        let told = with(&text, "--mesh pp=2");
        assert!(told.starts_with(problem), "{told}");
    }
}

#[test]
fn asynchronous_schedules_refuse_what_has_no_meaning_with_them() {
    for schedule in ["pipedream", "pipedream_2bw"] {
        let set = format!("--mesh pp=2 --set pipeline.schedule={schedule}");
        assert_eq!(
            refusal(&format!("{set} --set training.numerics=canonical")),
            format!(
                "model.tie_embeddings = true: has no meaning with pipeline.schedule = {schedule:?}, whose stages hold \
                 different versions of the weights: two uses of one table would not be one table; use model.tie_embeddings = \
                 false, or a synchronous schedule\n\
                 training.max_norm = 1: has no meaning with pipeline.schedule = {schedule:?}, whose stages update at different \
                 times, each before the others' gradients are there: no norm is that of one whole gradient; use \
                 training.max_norm = 0, or a synchronous schedule\n\
                 training.numerics = canonical: has no meaning with pipeline.schedule = {schedule:?}, whose result depends on \
                 the schedule by design: it is not the run of one rank; use training.numerics = \"fast\", or a synchronous \
                 schedule"
            )
        );
        config(&format!("{set} --set model.tie_embeddings=false --set training.max_norm=0"));
    }
}

#[test]
fn degrees_must_fit_the_tree_of_canonical_numerics() {
    let canonical = "--set training.numerics=canonical";
    let six = "--set model.num_heads=6 --set model.hidden_size=96";
    let share = "each rank must have an equal share that is a power of two";
    refused(&[
        (
            &format!("{canonical} {six} --mesh tp=3"),
            &format!(
                "parallelism.tp = 3: does not fit canonical numerics with numerics.reduction_blocks = 8: {share}; use 1, 2, 4, 8, or \
                 another numerics.reduction_blocks"
            ),
        ),
        (
            &format!(
                "{canonical} {six} --mesh dp=2,tp=2 --set numerics.reduction_blocks=6 --set training.global_batch_size=24"
            ),
            &format!(
                "parallelism.tp = 2: does not fit canonical numerics with numerics.reduction_blocks = 6: {share}; use 1, 3, 6, or another \
                 numerics.reduction_blocks\n\
                 parallelism.dp = 2: does not fit canonical numerics with training.global_batch_size = 24: {share}; use 1, 3, 6, \
                 12, 24, or another training.global_batch_size"
            ),
        ),
    ]);
    refused(&[(
        &format!("{canonical} --set numerics.reduction_blocks=1099511627776"),
        "numerics.reduction_blocks = 1099511627776: more blocks than any tp has use for: each costs time and memory; use 4096 or fewer",
    )]);
    config(&format!(
        "{canonical} {six} --mesh dp=3,tp=3 --set numerics.reduction_blocks=6 --set training.global_batch_size=24"
    ));
    assert_eq!(
        config("--set numerics.leaves=6").notices, // its former name
        ["numerics.reduction_blocks = 6 has no effect without training.numerics = canonical"]
    );
}

#[test]
fn the_model_must_fit_the_mesh() {
    refused(&[
        (
            "--mesh tp=3 --set model.hidden_size=120 --set model.ffn_hidden_size=480",
            "model.num_heads = 4: is not divisible by parallelism.tp = 3; use a multiple of 3, such as 3 or 6",
        ),
        (
            "--mesh tp=4 --set model.hidden_size=130 --set model.ffn_hidden_size=512",
            "model.hidden_size = 130: is not divisible by model.num_heads = 4; use a multiple of 4, such as 128 or 132\n\
             model.hidden_size = 130: is not divisible by parallelism.tp = 4; use a multiple of 4, such as 128 or 132",
        ),
        (
            "--mesh tp=2 --set model.ffn_hidden_size=511 --set training.numerics=canonical",
            "model.ffn_hidden_size = 511: is not divisible by parallelism.tp = 2 (training.numerics is canonical); use a multiple of 2, \
             such as 510 or 512",
        ),
        (
            "--mesh tp=4 --set parallelism.sequence_parallel=true --set model.seq_len=126",
            "model.seq_len = 126: is not divisible by parallelism.tp = 4 (sequence_parallel is on); use a multiple of 4, \
             such as 124 or 128",
        ),
        (
            "--mesh pp=5 --set training.global_batch_size=20",
            "model.num_layers = 4: fewer layers than stages: parallelism.pp = 5 needs a layer for each; use 5 layers or \
             more, or pp of at most 4",
        ),
    ]);
    // A list may give a stage no layers.
    config("--mesh pp=5 --set pipeline.partition=[1,1,1,1,0] --set training.global_batch_size=20");
    config("--mesh tp=4 --set model.seq_len=126");
    config("--set parallelism.sequence_parallel=true --set model.seq_len=127");
}

#[test]
fn the_partition_must_fit_model_and_mesh() {
    const VALID: &str = "use \"uniform\", \"cost\", or a list of 2 that add up to 4";
    const LIST: &str = "use \"uniform\", \"cost\", or a list of whole numbers, such as [3, 1]";
    refused(&[
        (
            "--mesh pp=2 --set pipeline.partition=[3,2]",
            &format!("pipeline.partition = [3, 2]: has 5 layers, not model.num_layers = 4; {VALID}"),
        ),
        (
            "--mesh pp=2 --set pipeline.partition=[2,1,1]",
            &format!("pipeline.partition = [2, 1, 1]: is for 3 stages, not parallelism.pp = 2; {VALID}"),
        ),
        (
            "--mesh pp=2 --set pipeline.partition=[]",
            &format!(
                "pipeline.partition = []: has 0 layers, not model.num_layers = 4; {VALID}\n\
                 pipeline.partition = []: is for 0 stages, not parallelism.pp = 2; {VALID}"
            ),
        ),
        // If the number of layers is not known, the sum is not checked.
        (
            "--mesh pp=2 --set pipeline.partition=[9,9] --set model.num_layers=0",
            "model.num_layers = 0 (from --set): is below 1; use a whole number of at least 1",
        ),
        (
            "--mesh pp=2 --set pipeline.partition=balanced",
            &format!("pipeline.partition = \"balanced\" (from --set): unknown; {LIST}"),
        ),
        (
            "--mesh pp=2 --set pipeline.partition=4",
            &format!("pipeline.partition = 4 (from --set): is a whole number, not a list; {LIST}"),
        ),
        (
            "--mesh pp=2 --set pipeline.partition=[5,-1]",
            &format!("pipeline.partition = [5, -1] (from --set): holds what is no whole number of at least 0; {LIST}"),
        ),
    ]);
    let huge = i64::MAX;
    let sum = refusal(&format!("--mesh pp=3 --set pipeline.partition=[{huge},{huge},{huge}]"));
    assert!(sum.contains(&format!(": has {} layers, not", usize::MAX)), "{sum}");
    assert_eq!(sum.lines().count(), 1, "{sum}");
    // The batch is still checked against the mesh.
    let both = refusal("--mesh dp=3,pp=2 --set pipeline.partition=[9,9]");
    assert_eq!(both.lines().count(), 2, "{both}");
}

#[test]
fn the_batch_must_fit_the_mesh() {
    refused(&[
        (
            "--mesh dp=3",
            "training.global_batch_size = 16: is not divisible by dp = 3; use a multiple of 3, such as 15 or 18",
        ),
        (
            "--mesh pp=4 --set pipeline.schedule=zb_h2 --set pipeline.num_microbatches=2",
            "pipeline.num_microbatches = 2: schedule zb_h2 over pp=4 needs at least 4 micro-batches, got 2; gpipe and 1f1b \
             take any number; use 4 or more, or a smaller pp",
        ),
    ]);
    let c = config("--mesh dp=2,pp=2 --set training.global_batch_size=32 --set training.micro_batch_size=2");
    assert_eq!((c.pipeline.num_microbatches, c.training.micro_batch_size), (8, 2));
    for schedule in ["gpipe", "1f1b", "zb_h1"] {
        let c = config(&format!("--mesh pp=4 --set pipeline.schedule={schedule} --set training.global_batch_size=2"));
        assert_eq!((c.pipeline.num_microbatches, c.notices.len()), (2, 1), "{schedule}");
    }
}

#[test]
fn the_decay_must_outlast_the_warm_up() {
    let set = "--set lr_scheduler.warmup_steps=10 --set lr_scheduler.decay=cosine";
    refused(&[(
        &format!("{set} --set lr_scheduler.decay_steps=10"),
        "lr_scheduler.decay_steps = 10: ends the decay within the warm-up: lr_scheduler.warmup_steps = 10; use more than 10",
    )]);
    // If it follows training.steps, a short trial of a long recipe is not a fault.
    assert_eq!(config(&format!("{set} --steps 0")).lr_scheduler.decay_steps, 0);
}

#[test]
fn all_faults_come_at_once() {
    let path = file("many.toml", "[model]\nnum_heads = 3\nwidth = 1\n[optimizer]\nlr = -1\n[compression]\n");
    let line = format!(
        "--config {} --mseh dp=2 --mesh dp=3 --set training.dtype=fp16 --data no/such/text --metrics no/such/dir/m.jsonl \
         --device gpu",
        path.display()
    );
    let faults = load(&args(&line)).unwrap_err().faults;
    let keys: Vec<&str> = faults.iter().map(|fault| fault.key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "--mseh",
            "model.width",
            "optimizer.lr",
            "[compression]",
            "training.dtype",
            "--device",
            "model.hidden_size",
            "training.global_batch_size",
            "--metrics",
            "data.path",
        ]
    );
}

#[test]
fn a_fault_does_not_breed_others() {
    // If the default of 4 heads were used instead, its division by tp would be reported too.
    assert_eq!(refusal("--mesh tp=64 --set model.num_heads=x --set model.hidden_size=128").lines().count(), 1);
    assert_eq!(refusal("--mesh dp=3,pp=x").lines().count(), 1);
    // The default vocabulary of 256 would be too small for this tokenizer.
    #[cfg(feature = "tokenizers")]
    assert_eq!(refusal("--set model.vocab_size=x --set data.tokenizer=gpt2").lines().count(), 1);
    // With an unknown preset nothing is known about the model, but a missing file is still reported.
    assert_eq!(refusal("--mesh tp=3 --set model.preset=huge --data no/such/file").lines().count(), 2);
}

#[test]
fn experts_that_do_not_fit() {
    let moe = "--set moe.num_experts=8";
    refused(&[
        (
            "--mesh ep=2 --set moe.num_experts=8",
            "parallelism.ep = 2: does not divide parallelism.dp = 1: ranks of dp share out the experts; use a \
             multiple of 2, such as 2 for parallelism.dp, or another parallelism.ep",
        ),
        ("--mesh dp=2,ep=2", "parallelism.ep = 2: there are no experts to share out; set moe.num_experts, or use 1"),
    ]);
    for (more, expected) in [
        (
            "--mesh dp=3,ep=3 --set training.global_batch_size=15",
            "moe.num_experts = 8: 8 experts cannot be spread over ep=3: each rank holds the same number",
        ),
        (
            "--set moe.top_k=9",
            "moe.top_k = 9: top_k is 9: with router topk and 8 experts it is from 1 to 8; use from 1 to 8",
        ),
        (
            "--set moe.router=switch --set moe.top_k=2",
            "moe.top_k = 2: top_k is 2: with router switch and 8 experts it is 1; use 1",
        ),
        (
            "--set moe.num_groups=3",
            "moe.num_groups = 3: expert groups: 8 experts are no 3 groups of one size; use 1, 2, 4, 8 groups",
        ),
        (
            "--set moe.every_n_layers=5",
            "moe.every_n_layers = 5: leaves no layer of model.num_layers = 4 with experts; use 4 or fewer",
        ),
        (
            "--mesh tp=4 --set parallelism.expert_tensor_parallel=2",
            "parallelism.expert_tensor_parallel = 2: is neither 1 nor parallelism.tp = 4; use 1 or 4",
        ),
        (
            "--set training.numerics=canonical --set moe.aux_loss_scope=global_batch",
            "moe.aux_loss_scope = \"global_batch\"",
        ),
        (
            "--set pipeline.schedule=pipedream --mesh pp=2 --set model.tie_embeddings=false --set training.max_norm=0",
            "moe.num_experts = 8: has no meaning with pipeline.schedule = \"pipedream\"",
        ),
        ("--set checkpoint.dir=d --set checkpoint.export=e", "checkpoint.export = "),
        ("--set moe.capacity_factor=-1", "moe.capacity_factor = -1"),
    ] {
        let refusal = refusal(&format!("{moe} {more}"));
        assert!(refusal.starts_with(expected), "{more}:\n{refusal}\nexpected {expected}");
        assert_eq!(refusal.lines().count(), 1, "{refusal}");
    }
}

/// Ranks compute in f32: a number that it does not have, and that is another one there, is refused, whichever key it
/// is.
#[test]
fn numbers_that_f32_does_not_have_are_refused() {
    let mut keys_of_numbers = 0;
    for (section, key) in keys::all() {
        let ValueKind::Number(interval) = key.kind else { continue };
        keys_of_numbers += 1;
        let name = format!("{section}.{}", key.name);
        for (value, rounded) in [(1e39, "inf"), (1e-50, "0e0"), (1e-40, "1e-40"), (0.999_999_99, "1e0")] {
            if !interval.holds(value) || rounded == "1e0" && interval.holds(1.0) {
                continue;
            }
            let refusal = refusal(&format!("--set {name}={value:e}"));
            let told = format!("(from --set): is rounded to {rounded} in f32, in which ranks compute; use a number ");
            let line = refusal.lines().find(|line| line.starts_with(&name)).unwrap_or_default();
            assert!(line.contains(&told) && line.contains(" that f32 has: from "), "{refusal}");
        }
        for value in [0.0, 1e-37, 0.5, 0.999_999_9, 1.0, 1e38].into_iter().filter(|&value| interval.holds(value)) {
            assert_eq!(interval.lost(value), None, "{name} = {value}");
        }
    }
    assert!(keys_of_numbers > 15, "{keys_of_numbers}");
    refused(&[(
        "--set optimizer.beta2=0.99999999",
        "optimizer.beta2 = 0.99999999 (from --set): is rounded to 1e0 in f32, in which ranks compute; use a number of at least 0 and below 1 \
         that f32 has: from 1.1754944e-38 to 9.9999994e-1",
    )]);
}

#[test]
fn parts_that_are_not_there_cannot_be_frozen() {
    let parts = "use embedding, layers.N, layers.A-B, norm or head, with commas";
    refused(&[
        ("--set model.freeze=encoder", &format!("model.freeze = encoder: \"encoder\" is no part of a model; {parts}")),
        (
            "--set model.freeze=layers.2-1",
            &format!("model.freeze = layers.2-1: \"layers.2-1\" is no part of a model; {parts}"),
        ),
        (
            "--set model.freeze=layers.2-4",
            "model.freeze = layers.2-4: there is no layer 4: model.num_layers is 4; use 0 to 3",
        ),
        (
            "--set model.freeze=head",
            "model.freeze = head: the head is the token table, because model.tie_embeddings is true, and the embedding would train it; \
             freeze embedding, which includes the head, or use model.tie_embeddings = false",
        ),
        (
            "--set model.freeze=embedding,layers.0-3,norm",
            "model.freeze = embedding,layers.0-3,norm: nothing is left to train; leave a part out",
        ),
    ]);
    let frozen =
        config("--set model.preset=llama-tiny --set model.freeze=embedding,layers.0-1,layers.3,head").model.frozen();
    assert!(frozen.embedding && frozen.head && !frozen.norm);
    assert_eq!([0, 1, 2, 3].map(|layer| frozen.has_layer(layer)), [true, true, false, true]);
    let text = report(&config("--set model.freeze=embedding")).unwrap();
    assert!(text.contains("\n842,496 parameters, of which 49,152 are frozen\n"), "{text}");
}
