//! Comparisons of two runs: equal runs are identical, different meshes are paired value by value, and a fault is found
//! at its place.
//!
//! More than 400 lines: each test is one pair of runs and the result of their comparison.

use crate::small::{BATCH, SEQ, config, data};
use meshwork_core::comm::{Call, Membership};
use meshwork_core::{Axis, CommError, Communicator, Pending, ReductionOrder};
use meshwork_diff::{Between, Comparison, Divergence, Error, Location, Report, Row, Side, Vector, compare};
use meshwork_engine::Plan;
use meshwork_models::language::{self, TARGETS, TOKENS};
use meshwork_tensor::Tensor;
use meshwork_testkit::Sampled;
use meshwork_train::TrainError;
use meshwork_train::config::{Args, Config};
use meshwork_train::load;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

#[track_caller]
fn held_against([a, b]: [&Config; 2], steps: u64) -> Report {
    let data = data();
    compare([&Side::new(a, &data).unwrap(), &Side::new(b, &data).unwrap()], steps).unwrap()
}

/// The place of an operation: (number, name, layer, operand).
fn place(found: &Divergence) -> (usize, &str, &str, Option<&str>) {
    match &found.place {
        Location::Op { number, name, layer, operand } => (*number, name, layer, *operand),
        other => panic!("not an operation: {other}"),
    }
}

#[test]
fn a_mesh_is_identical_to_itself() {
    for more in [
        "",
        "--set parallelism.sequence_parallel=true",
        "--set pipeline.schedule=gpipe --set pipeline.num_microbatches=2",
        "--set model.dropout=0.2",
    ] {
        let config = config(&format!("dp=2,tp=2,pp=2 {more}"));
        let report = held_against([&config, &config], 2);
        assert!(report.identical() && report.skipped.is_empty(), "{more}: {report}");
        assert!(report.to_string().contains("identical: 2 steps, "), "{report}");
        assert!(report.rows.iter().all(|row| row.spread.identical() == row.spread.total() && row.first.is_none()));
    }
}

/// Its ranks of cp would do the work of one rank each, with its values: nothing would differ.
#[test]
fn a_side_whose_ranks_are_useless_is_refused() {
    let (one, data) = (config("dp=1"), data());
    let plan = Plan { mesh: "cp=2".parse().unwrap(), ..one.plan().unwrap() };
    let sides = [&Side::new(&one, &data).unwrap(), &Side::from_model(one.model(), plan, &data)];
    let refused = compare(sides, 1).err().unwrap().to_string();
    assert!(refused.contains("the mesh has cp=2, and the model cuts nothing over cp"), "{refused}");
}

/// Another order of the same micro-batches gives the same bits.
#[test]
fn schedules_are_identical() {
    let mesh = "pp=2,tp=2 --set pipeline.num_microbatches=4 --set pipeline.schedule=";
    let with = |schedule: &str| config(&format!("{mesh}{schedule}"));
    // If a deferred gradient of weights held the residual's gradient, a norm used to show only its own share.
    for schedule in ["gpipe", "zb_h1", "zb_h2"] {
        let report = held_against([&with("1f1b"), &with(schedule)], 2);
        assert!(report.identical(), "{schedule}: {report}");
    }
}

#[test]
fn every_value_of_one_rank_finds_its_like_on_any_mesh() {
    for mesh in [
        "dp=4",
        "tp=4",
        "pp=2 --set pipeline.partition=[2,0]",
        "dp=2,tp=2,pp=2",
        "tp=2 --set parallelism.sequence_parallel=true",
        "dp=2,tp=4 --set parallelism.sequence_parallel=true --set pipeline.num_microbatches=4",
        "dp=2,tp=2,pp=2 --set model.dropout=0.2",
        "dp=2,tp=4,pp=2 --set model.tie_embeddings=false",
    ] {
        // One rank with the same model.
        let other = config(mesh);
        let one = Config { model: other.model.clone(), ..config("dp=1") };
        let alone = held_against([&one, &one], 2);
        let report = held_against([&one, &other], 2);
        assert!(report.unexplained.is_none() && report.replicas.is_none(), "{mesh}: {report}");
        // All but, in each of two steps, a loss that is one sum over each micro-batch, where those are not the same.
        let skipped: u64 = report.skipped.values().sum();
        assert_eq!(report.tensors() + skipped, alone.tensors(), "{mesh}: {report}");
        assert!(skipped == 0 || skipped == 2 && other.training.micro_batch_size != BATCH, "{mesh}: {report}");
        let elements = |report: &Report| -> BTreeMap<_, _> {
            let rows = report.rows.iter().filter(|row| !row.class.contains("cross_entropy") || row.phase != "forward");
            let class = |class: &str| class.split(" | ").next().map(str::to_owned);
            rows.map(|row| ((row.phase, class(&row.class)), row.spread.total())).collect()
        };
        assert_eq!(elements(&report), elements(&alone), "{mesh}: {report}");
        assert!(!report.identical(), "{mesh}: two meshes that do not round differently show nothing");
        let shown = report.to_string();
        assert!(shown.contains("\nnothing differs by more than rounding"), "{shown}");
    }
}

#[test]
fn in_canonical_numerics_other_meshes_are_identical_too() {
    let canonical = "--set training.numerics=canonical";
    for mesh in [
        "dp=2,tp=2,pp=2",
        "tp=4,pp=2 --set parallelism.sequence_parallel=true --set pipeline.schedule=gpipe",
        "dp=2 --set pipeline.num_microbatches=4 --set model.dropout=0.2",
        "tp=2,pp=1 --set pipeline.schedule=zb_v --set pipeline.num_microbatches=4",
        "dp=2,pp=1 --set pipeline.schedule=interleaved_1f1b",
        "dp=2,tp=2,pp=2 --set parallelism.sequence_parallel=true --set training.matmul_dtype=bf16",
        "dp=2,tp=2,pp=2 --set parallelism.sequence_parallel=true --set training.matmul_dtype=tf32",
    ] {
        let other = config(&format!("{mesh} {canonical}"));
        let dtype = other.training.matmul_dtype.name();
        let one = config(&format!("dp=1 {canonical} --set training.matmul_dtype={dtype}"));
        let one = Config { model: other.model.clone(), ..one };
        let report = held_against([&one, &other], 2);
        assert!(report.holds() && report.identical() && report.skipped.is_empty(), "{mesh}: {report}");
        assert_eq!(report.tensors(), held_against([&one, &one], 2).tensors(), "{mesh}: {report}");
    }
    // A sequence that cp cuts, against one whose gradients are summed in the same blocks.
    let over = "--set parallelism.context_parallel_method";
    for (mesh, method) in [("cp=2", "all_gather"), ("tp=2,cp=2", "all_to_all"), ("dp=2,cp=2,pp=2", "all_gather")] {
        let untied = "--set model.tie_embeddings=false";
        let other = config(&format!("{mesh} {canonical} {over}={method} {untied}"));
        let one = config(&format!("dp=1 {canonical} {over}={method} {untied}"));
        let report = held_against([&one, &other], 2);
        assert!(report.holds() && report.identical(), "{mesh} by {method}: {report}");
    }
    // With fast numerics on one side there is no such guarantee.
    let [a, b] = ["dp=1", "tp=2"].map(config);
    let a = Config { training: config(&format!("dp=1 {canonical}")).training, ..a };
    let report = held_against([&a, &b], 1);
    assert!(!report.identical() && !report.canonical && report.holds(), "{report}");
}

/// Experts compute the samples of a rank in chunks, as many as the mesh asks for: all other values are paired one by
/// one. What lies on the experts' ranks alone has its like only where as many share the experts.
#[test]
fn experts_on_other_meshes_are_identical_in_canonical_numerics() {
    let moe = "--set moe.num_experts=4 --set moe.top_k=2 --set training.numerics=canonical";
    let one = config(&format!("dp=1 {moe}"));
    for mesh in ["dp=2,ep=2", "dp=2,ep=2,tp=2", "dp=4,ep=4,pp=2", "dp=2,ep=2 --set pipeline.num_microbatches=2"] {
        let report = held_against([&one, &config(&format!("{mesh} {moe}"))], 2);
        assert!(report.holds() && report.identical() && report.replicas.is_none(), "{mesh}: {report}");
        let alike = [
            "values of each rank's own, on meshes of other degrees",
            "sums over a micro-batch, where the micro-batches differ",
            "gradients that one side alone computes, and parts of samples that one side alone has",
        ];
        assert!(report.skipped.keys().all(|why| alike.contains(&&**why)), "{mesh}: {report}");
    }
    let [a, b] =
        ["dp=2,ep=2,tp=2", "dp=2,ep=2,tp=2 --set pipeline.schedule=gpipe"].map(|mesh| config(&format!("{mesh} {moe}")));
    let report = held_against([&a, &b], 2);
    assert!(report.holds() && report.identical() && report.skipped.is_empty(), "{report}");
}

/// Ranks of cp that hold tokens in an order of their own, by every method, against one rank that has them in the order
/// of the sequence: each token with itself, and what a mesh adds behind the last token with nothing. A gradient of a
/// gather has its like where the same operations read both.
#[test]
fn sequences_in_other_orders_are_compared_token_by_token() {
    let method = "--set parallelism.context_parallel_method";
    let experts = "--set moe.num_experts=4 --set moe.top_k=2";
    for (mesh, by, more) in [
        ("cp=2", "all_gather", ""),
        ("cp=2", "ring", ""),
        ("cp=2,pp=2", "ring", ""),
        ("tp=2,cp=2", "hybrid", "--set parallelism.sequence_parallel=true"),
        ("cp=2", "all_to_all", ""),
        ("cp=3", "ring", ""),
        ("cp=2,ep=2", "ring", experts),
        ("cp=4,ep=2", "all_gather", experts),
    ] {
        let other = config(&format!("{mesh} {method}={by} {more}"));
        let shared = format!("{method}=all_gather {}", more.replace("--set parallelism.sequence_parallel=true", ""));
        let report = held_against([&config(&format!("dp=1 {shared}")), &other], 2);
        assert!(report.unexplained.is_none() && report.replicas.is_none(), "{mesh} by {by}: {report}");
        assert!(report.holds() && !report.identical(), "{mesh} by {by}: {report}");
        let attention = |row: &&Row| row.class.contains("_attention") && row.phase == "backward";
        assert!(report.rows.iter().any(|row| attention(&row)), "{mesh} by {by}: {report}");
        let known = ["values of each rank's own", "layouts of one side alone", "sums over", "gradients that one side"];
        let known = |why: &str| known.iter().any(|known| why.starts_with(known));
        assert!(report.skipped.keys().all(|why| known(why)), "{mesh} by {by}: {report}");
    }
    // An order for each micro-batch, of 16 chunks of 8 tokens and 8 places behind them.
    let report = run(&format!(
        "--mesh dp=1 --mesh cp=2,pp=2 {method}=ring --set data.documents=attention --set data.end_of_text=32 \
         --set parallelism.context_parallel_order=by_document --set pipeline.num_microbatches=2"
    ));
    assert!(report.unexplained.is_none() && report.replicas.is_none() && !report.identical(), "{report}");
    // Canonical numerics: the same bits.
    for mesh in ["cp=2,ep=2", "cp=4,ep=2", "cp=2,dp=2,ep=2", "cp=4,ep=4"] {
        let shared = format!(
            "{method}=all_gather {experts} --set training.numerics=canonical --set model.tie_embeddings=false \
             --set numerics.reduction_blocks=4"
        );
        let report = held_against([&config(&format!("dp=1 {shared}")), &config(&format!("{mesh} {shared}"))], 2);
        assert!(report.holds() && report.identical() && report.replicas.is_none(), "{mesh}: {report}");
    }
}

/// Of one side that has parts of sequences, the other computes attention by the same operations.
#[test]
fn a_side_without_a_method_gets_one() {
    let report = run("--mesh dp=1 --mesh cp=2 --set model.kind=llama");
    assert!(report.unexplained.is_none() && !report.identical(), "{report}");
    let report = run("--mesh cp=2 --mesh dp=2 --numerics canonical --set model.tie_embeddings=false");
    assert!(report.identical(), "{report}");
}

/// Runs the comparison of a command line.
fn run(line: &str) -> Report {
    let small = "--set model.vocab_size=259 --set model.num_layers=2 --set model.hidden_size=16 --set model.seq_len=8 \
                 --set training.global_batch_size=8 --steps 1";
    comparison(&format!("{line} {small}")).unwrap_or_else(|error| panic!("{line}: {error}")).run().unwrap()
}

/// The comparison of `--mesh A --mesh B`, with more flags of the trainer for both sides, and `--break`.
fn comparison(line: &str) -> Result<Comparison, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (mut meshes, mut both, mut fault) = (Vec::new(), Vec::new(), None);
    for pair in words.chunks(2) {
        match pair[0] {
            "--mesh" => meshes.push(pair[1]),
            "--break" => fault = Some(pair[1]),
            "--numerics" => both.extend(["--set".to_owned(), format!("training.numerics={}", pair[1])]),
            _ => both.extend(pair.iter().map(|&word| word.to_owned())),
        }
    }
    let sides = meshes
        .iter()
        .map(|mesh| load(&Args::parse(["--mesh".to_owned(), mesh.to_string()].iter().chain(&both))).unwrap());
    let sides = <[_; 2]>::try_from(sides.collect::<Vec<_>>()).unwrap();
    Comparison::new(sides, 1, fault).map_err(|fault| fault.to_string())
}

/// The operations that can be broken, as the error of an unknown one lists them.
fn known(line: &str, way: &str) -> Vec<String> {
    let line = format!("{line} --break none{way}");
    let error = comparison(&line).unwrap_err();
    let (_, list) = error.split_once("; use one of ").unwrap_or_else(|| panic!("{error}"));
    list.split(", ").map(str::to_owned).collect()
}

#[test]
fn an_error_of_one_ulp_is_found_in_every_operation() {
    // (A, B, flags): fast numerics of one mesh, canonical ones of two.
    let cases = [
        ("dp=2,tp=2,pp=2", "dp=2,tp=2,pp=2", ""),
        ("tp=4", "tp=4", "--set parallelism.sequence_parallel=true --set pipeline.num_microbatches=2"),
        ("dp=1", "dp=2,tp=2,pp=2", "--numerics canonical"),
        // Values stored in bf16 are changed to the next bf16 number.
        ("dp=1", "tp=2,pp=2", "--numerics canonical --set training.matmul_dtype=bf16"),
    ];
    for (one, other, more) in cases {
        for (way, fewer) in [("", 0), (":backward", 1)] {
            let known = known(&format!("--mesh {one} --mesh {other} {more}"), way);
            assert_eq!(known.len(), 11 - fewer, "{known:?}");
            for op in known.iter().sampled(3) {
                let line = format!("--mesh {one} --mesh {other} {more} --break {op}{way}");
                let report = run(&line);
                let (Some(first), Some(broken)) = (&report.first, &report.broken) else { panic!("{line}: {report}") };
                assert_eq!((&first.place, &first.index), (&broken.place, &broken.index), "{line}: {report}");
                assert_eq!((first.step, first.between, first.differing), (1, Between::Sides, 1), "{line}: {report}");
                assert_eq!(first.micros, [Some(0); 2], "{line}: {report}");
                // In a sum that cancels, a few ulps of a share are more.
                assert!(first.ulps == 1 || broken.ulps > 1 && first.ulps > 0, "{line}: {report}");
                assert_eq!(place(first).1, op, "{line}: {report}");
                assert_eq!(place(first).3.is_some(), way == ":backward", "{line}: {report}");
            }
        }
    }
}

#[test]
fn a_fault_is_told_with_its_layer_and_global_index() {
    let config = config("dp=2,tp=2,pp=2 --set pipeline.num_microbatches=2");
    let data = data();
    // dp rank 1, tp rank 1, the second stage, the second of two micro-batches of 2 samples: qkv [2, 8, 3, 4/2 heads,
    // 4].
    let fault = |site: meshwork_diff::Site, seen: &meshwork_tensor::tape::Seen<'_>| {
        let here = [Axis::Dp, Axis::Tp, Axis::Pp].map(|axis| site.coords.get(axis)) == [1, 1, 1];
        let qkv = seen.op == "linear_bias" && seen.operand.is_none() && seen.params[0].contains("attn.qkv");
        if !here || !qkv || site.micro != 1 || seen.position.step != 1 {
            return Ok(None);
        }
        assert_eq!((site.rank, seen.tensor.shape().to_vec()), (7, vec![2, 8, 3, 2, 4]));
        let mut values = seen.tensor.to_vec::<f32>()?;
        values[(((8 + 5) * 3 + 2) * 2 + 1) * 4 + 3] += 1.0; // [1, 5, 2, 1, 3]
        Tensor::from_slice(seen.tensor.device(), &values, seen.tensor.shape()).map(Some)
    };
    let b = Side::new(&config, &data).unwrap().with_hook(fault);
    let report = compare([&Side::new(&config, &data).unwrap(), &b], 2).unwrap();
    let first = report.first.as_ref().unwrap();
    assert_eq!(place(first), (18, "linear_bias", "h.1.attn.qkv", None), "{report}");
    assert_eq!((first.step, &first.dims[..], &first.index[..]), (2, &[8, 8, 3, 4, 4][..], &[7, 5, 2, 3, 3][..]));
    assert_eq!((first.micros, first.samples), ([Some(1); 2], Some((7, 1))), "{report}");
    assert_eq!((&first.ranks[0][..], &first.ranks[1][..]), (&[7][..], &[7][..]), "{report}");
    let difference = first.values[1] - first.values[0];
    assert!((difference - 1.0).abs() < 1e-6 && first.differing == 1, "{report}");
    assert_eq!(report.unexplained, report.first, "{report}");
    assert!(report.to_string().contains("and that is more than rounding"), "{report}");
}

#[test]
fn ranks_that_should_hold_the_same_and_do_not_are_named() {
    let config = config("dp=2,tp=2");
    let data = data();
    let b = Side::new(&config, &data).unwrap().with_hook(|site, seen| {
        if site.rank != 3 || (seen.op, seen.number, seen.operand) != ("layer_norm", 3, None) {
            return Ok(None);
        }
        let mut values = seen.tensor.to_vec::<f32>()?;
        values[SEQ * 16 + 5] += 0.5;
        Tensor::from_slice(seen.tensor.device(), &values, seen.tensor.shape()).map(Some)
    });
    let report = compare([&Side::new(&config, &data).unwrap(), &b], 1).unwrap();
    let found = report.replicas.as_ref().unwrap();
    assert_eq!((place(found), found.between), ((3, "layer_norm", "h.0.ln_1", None), Between::Ranks { side: 'B' }));
    assert_eq!((&found.ranks[0][..], &found.ranks[1][..]), (&[2][..], &[3][..]));
    assert_eq!((&found.index[..], found.samples), (&[5, 0, 5][..], Some((5, 1))), "{report}");
    assert_eq!(Some(found), report.first.as_ref(), "what one side knows by itself comes first");
}

/// The gradient of a copy is each rank's own share, as if the all-reduce in its backward were forgotten, which other
/// trainers do not notice.
#[test]
fn a_forgotten_reduction_is_found_although_forward_is_right() {
    let config = config("tp=2");
    let data = data();
    let shares: Mutex<BTreeMap<usize, Tensor>> = Mutex::default();
    let b = Side::new(&config, &data).unwrap().with_hook(move |site, seen| {
        let mut shares = shares.lock().unwrap();
        match (seen.op, seen.operand) {
            ("copy", Some(_)) => Ok(shares.remove(&site.rank)),
            (_, Some("x")) => {
                shares.insert(site.rank, seen.tensor.clone());
                Ok(None)
            }
            _ => Ok(None),
        }
    });
    let report = compare([&Side::new(&config, &data).unwrap(), &b], 1).unwrap();
    let rows = |phase: &str| report.rows.iter().filter(|row| row.phase == phase).collect::<Vec<_>>();
    assert!(rows("forward").iter().all(|row| row.first.is_none()), "{report}");
    let found = report.unexplained.as_ref().unwrap();
    assert_eq!((place(found).1, place(found).2, place(found).3), ("copy", "after ln_f", Some("x")), "{report}");
}

#[test]
fn weights_and_batches_can_be_tampered_with_between_steps() {
    let config = config("dp=2");
    let data = data();
    let plain = Side::new(&config, &data).unwrap();
    let stale = plain.clone().with_before_step(|trainer, _| match trainer.steps_done() {
        1 => trainer.load_parameter("h.0.ln_1.bias", &[0.0; 16]),
        _ => Ok(()),
    });
    let report = compare([&plain, &stale], 2).unwrap();
    let first = report.first.as_ref().unwrap();
    assert_eq!((first.step, place(first)), (2, (3, "layer_norm", "h.0.ln_1", None)), "{report}");

    let swapped = plain.clone().with_before_step(|trainer, batch| {
        if trainer.rank().world_rank() == 1 {
            let [mut tokens, targets] = [TOKENS, TARGETS].map(|field| batch.values::<i32>(field).unwrap().to_vec());
            let (one, two) = tokens.split_at_mut(SEQ);
            one.swap_with_slice(&mut two[..SEQ]);
            *batch = language::batch(tokens, targets, SEQ)?;
        }
        Ok::<(), TrainError>(())
    });
    let report = compare([&plain, &swapped], 1).unwrap();
    let first = report.first.as_ref().unwrap();
    assert_eq!(
        (place(first).0, place(first).1, first.samples),
        (0, "vocab_parallel_embedding", Some((4, 1))),
        "{report}"
    );

    // A wrong update shows in the parameters, while everything else is the same.
    let [a, b] = ["0.9", "0.8"].map(|beta1| self::config(&format!("dp=2 --set optimizer.beta1={beta1}")));
    let report = held_against([&a, &b], 1);
    let first = report.first.as_ref().unwrap();
    let Location::Parameter { name, vector } = &first.place else { panic!("{report}") };
    assert_eq!((&**name, *vector), ("wte.weight", Vector::State(0)), "{report}");
}

/// A communicator whose groups of dp ranks have their members in another order, and so sum in another order.
#[derive(Debug)]
struct Shuffled(Arc<dyn Communicator>);

impl Communicator for Shuffled {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn world_ranks(&self) -> &[usize] {
        self.0.world_ranks()
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn start(&self, call: Call) -> Result<Pending, CommError> {
        self.0.start(call)
    }

    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        match (name, members) {
            ("dp", &[a, b, c, d]) => self.0.split(name, &[a, c, b, d]),
            _ => self.0.split(name, members),
        }
    }

    fn membership(&self) -> &dyn Membership {
        self.0.membership()
    }

    fn reduction_order(&self) -> ReductionOrder {
        self.0.reduction_order()
    }
}

#[test]
fn a_reduction_in_another_order_is_one_of_gradients() {
    let config = config("dp=4,tp=2");
    let data = data();
    let plain = Side::new(&config, &data).unwrap();
    let report = compare([&plain, &plain.clone().with_communicator(|inner| Arc::new(Shuffled(inner)))], 1).unwrap();
    let first = report.first.as_ref().unwrap();
    let Location::Parameter { vector: Vector::Gradient, .. } = &first.place else { panic!("{report}") };
    assert!(first.between == Between::Sides && first.error < 1e-6 && report.unexplained.is_none(), "{report}");
    assert_eq!((first.ranks[1].len(), report.replicas.as_ref()), (4, None), "{report}");
}

#[test]
fn a_run_that_ends_in_no_number_is_compared_up_to_there() {
    let config = config("tp=2,pp=2");
    let data = data();
    let b = Side::new(&config, &data).unwrap().with_hook(|_, seen| {
        if (seen.op, seen.operand, seen.position.step) != ("causal_attention", None, 1) {
            return Ok(None);
        }
        let values = vec![f32::NAN; seen.tensor.count()];
        Tensor::from_slice(seen.tensor.device(), &values, seen.tensor.shape()).map(Some)
    });
    let report = compare([&Side::new(&config, &data).unwrap(), &b], 5).unwrap();
    let first = report.first.as_ref().unwrap();
    assert_eq!((first.step, place(first).1, first.ulps), (2, "causal_attention", u64::MAX), "{report}");
    let failed = report.failed.as_ref().unwrap();
    assert!(failed.contains("side B: ") && failed.contains("step 2: the loss is NaN"), "{failed}");
    assert!(!report.holds() && report.steps == 2, "{report}");
}

#[test]
fn a_run_that_fails_is_an_error_and_ends() {
    let config = config("dp=2,tp=2");
    let data = data();
    let b = Side::new(&config, &data).unwrap().with_before_step(|trainer, _| {
        match (trainer.rank().world_rank(), trainer.steps_done()) {
            (2, 1) => Err(TrainError::NoTerms { step: 77 }),
            _ => Ok(()),
        }
    });
    // Uninvolved ranks must not be waited for, or this test would hang.
    let error = compare([&Side::new(&config, &data).unwrap(), &b], 3).unwrap_err().to_string();
    assert!(error.contains(" failed: rank 2 returned an error: side B: step 77"), "{error}");

    let b = Side::new(&config, &data)
        .unwrap()
        .with_hook(|_, seen| Tensor::zeros(seen.tensor.device(), seen.tensor.dtype(), [1, 2, 3]).map(Some));
    let error = compare([&Side::new(&config, &data).unwrap(), &b], 1).unwrap_err().to_string();
    assert!(
        error.contains("vocab_parallel_embedding: an observer gave f32 for f32: dtype and shape must be the same (shapes [[1, 2, 3], "),
        "{error}"
    );
}

/// A mesh whose ranks of cp would each do all of the work.
#[test]
fn a_model_that_cuts_nothing_over_cp_is_refused() {
    let (config, data) = (config("dp=1"), data());
    let plan = |mesh: &str| Plan { mesh: mesh.parse().unwrap(), ..config.plan().unwrap() };
    let sides = ["dp=1", "cp=2"].map(|mesh| Side::from_model(config.model(), plan(mesh), &data));
    let error = compare([&sides[0], &sides[1]], 1).unwrap_err().to_string();
    assert!(error.contains("the mesh has cp=2, and the model cuts nothing over cp"), "{error}");
}

#[test]
fn other_models_are_refused() {
    let [a, b] = [config("dp=1"), config("dp=2")];
    let untied =
        Config { model: meshwork_train::config::sections::Model { tie_embeddings: false, ..b.model.clone() }, ..b };
    let data = data();
    let error = compare([&Side::new(&a, &data).unwrap(), &Side::new(&untied, &data).unwrap()], 1).unwrap_err();
    assert!(matches!(error, Error::Structure(_)), "{error}");
    assert!(error.to_string().contains("A has (parameters, samples a step) (28, 8), B (29, 8)"), "{error}");
}

/// Each (A, B, settings of both) has operations that one side alone has.
const UNLIKE: [(&str, &str, &str); 7] = [
    // Ranks of tp that share heads of keys and values gather them.
    ("dp=1", "tp=4", "model.kind=llama model.num_heads=4 model.num_kv_heads=2"),
    ("tp=2", "tp=4,dp=2", "model.kind=llama model.num_heads=4 model.num_kv_heads=2"),
    ("tp=2", "pp=2", "model.kind=llama model.num_heads=4 model.num_kv_heads=1 training.dtype=bf16"),
    // Experts gather whole sequences where those are cut, and cut them again.
    ("tp=2", "tp=2 --set parallelism.sequence_parallel=true", "moe.num_experts=4"),
    (
        "dp=2,tp=2",
        "tp=2,dp=2,ep=2 --set parallelism.sequence_parallel=true",
        "moe.num_experts=4 moe.num_shared_experts=1",
    ),
    // Experts that are cut over tp sum over it.
    ("dp=1", "tp=2 --set parallelism.expert_tensor_parallel=2", "moe.num_experts=4"),
    ("tp=2", "tp=2 --set parallelism.expert_tensor_parallel=2", "moe.num_experts=4 training.dtype=bf16"),
];

#[test]
fn operations_that_one_mesh_alone_has_are_compared_with_what_they_lay_out() {
    for (a, b, settings) in UNLIKE {
        let settings = settings.split(' ').map(|key| format!("--set {key}")).collect::<Vec<_>>().join(" ");
        for numerics in ["fast", "canonical"] {
            let of = |mesh: &str| config(&format!("{mesh} {settings} --set training.numerics={numerics}"));
            // AdamW turns a gradient of nearly nothing into a whole step: in fast numerics a second step may be another
            // one.
            let report = held_against([&of(a), &of(b)], if numerics == "fast" { 1 } else { 2 });
            assert!(
                report.replicas.is_none() && report.unexplained.is_none(),
                "{a} {b} {settings} {numerics}: {report}"
            );
            assert!(report.holds(), "{a} {b} {settings} {numerics}: {report}");
            assert!(report.rows.iter().any(|row| row.class.contains("- | ") || row.class.contains(" | -")), "{report}");
        }
    }
}

/// Of a gather that B alone has, its output is that of the product, and its gradient what attention returned on A.
#[test]
fn a_fault_in_an_operation_of_one_mesh_alone_is_found_there() {
    let llama = "--set model.kind=llama --set model.num_heads=4 --set model.num_kv_heads=2 --numerics canonical";
    for way in ["", ":backward"] {
        let line = format!("--mesh dp=1 --mesh tp=4 {llama} --break all_gather{way}");
        let report = run(&line);
        let (Some(first), Some(broken)) = (&report.first, &report.broken) else { panic!("{line}: {report}") };
        assert_eq!((&first.place, &first.index), (&broken.place, &broken.index), "{line}: {report}");
        let (_, name, layer, operand) = place(first);
        assert_eq!((name, layer), ("- | all_gather", "after layers.0.self_attn.kv"), "{line}: {report}");
        assert_eq!((operand.is_some(), first.differing), (way == ":backward", 1), "{line}: {report}");
    }
}

/// The weights of a folder are compared, not drawn ones.
#[test]
fn both_sides_start_from_the_weights_of_a_folder() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/huggingface/llama_scaled");
    let of = |mesh: &str, from: &str| {
        let line = format!("--mesh {mesh} --set model.vocab_size=29 --set data.tokenizer=bytes {from}");
        Config::from_args(&Args::parse(line.split_whitespace())).unwrap()
    };
    let from = format!("--set model.init_from={folder} --set training.numerics=canonical");
    let data = meshwork_train::Data::from_tokens((0..400).map(|at| at * 7 % 29).collect(), 12);
    let [one, two] = ["dp=1", "tp=4"].map(|mesh| of(mesh, &from));
    let drawn = Config {
        model: meshwork_train::config::sections::Model { init_from: None, ..one.model.clone() },
        ..one.clone()
    };
    let held =
        |a: &Config, b: &Config| compare([&Side::new(a, &data).unwrap(), &Side::new(b, &data).unwrap()], 1).unwrap();
    let report = held(&one, &two);
    assert!(report.holds() && report.identical(), "{report}");
    let report = held(&one, &drawn);
    assert_eq!(place(report.first.as_ref().unwrap()).0, 0, "{report}");
}
