use super::*;
use meshwork::core::DType;
use meshwork::core::profile::Meeting;
use meshwork::tensor::Precision;
use meshwork::train::config::Args;
use std::sync::Arc;

fn span(class: Class, name: &'static str, flops: u64, bytes: u64) -> Span {
    Span { class, name, detail: Detail::None, dtype: Some(DType::F32), start: 0, end: 0, flops, bytes }
}

fn rates(shares: Shares) -> Rates<'static> {
    Rates { card: card("h100").unwrap(), shares, precision: Precision::F32, head: 64, half: None, graphs: false }
}

/// A step of the configuration on a card.
fn predict(config: &Config, card: &Card, shares: Shares) -> Result<StepTime, TrainError> {
    Recorded::of(config)?.on(card, shares)
}

/// Every number by hand: a product of 8192³ in f32 takes 2·8192³ operations, and moves 3·8192²·4 bytes.
#[test]
fn one_product_takes_what_is_calculated_by_hand() {
    let (flops, bytes) = (2 * 8192_u64.pow(3), 3 * 8192_u64.pow(2) * 4);
    let product = span(Class::Product, "gemm nt", flops, bytes);
    let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-3, "{got} {want}");
    near(rates(Shares::PEAKS).operation(&product), 16.435e-3); // 1.0995e12 / 66.9e12
    near(rates(Shares::REACHED).operation(&product), 23.482e-3); // / 0.7, and 3 µs
    let of = |precision| Rates { precision, ..rates(Shares::PEAKS) }.operation(&product);
    near(of(Precision::Bf16), 1.1113e-3); // 1.0995e12 / 989.4e12
    near(of(Precision::Tf32), 2.2226e-3); // half as fast
    // A copy of as many bytes is bound by memory: 805.3e6 / 3.35e12.
    near(rates(Shares::PEAKS).operation(&span(Class::Memory, "copy", 0, bytes)), 240.4e-6);
}

/// Attention takes what its kernels allow, by the features of a head, forward or backward; the calls of a step name
/// both.
#[test]
fn attention_is_bound_by_the_instructions_of_its_kernels() {
    let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-3, "{got} {want}");
    let reached =
        |name, head| Rates { card: card(name).unwrap(), precision: Precision::Bf16, head, ..rates(Shares::REACHED) };
    let takes = |name, head, call| reached(name, head).operation(&span(Class::Attention, call, 1 << 40, 0)) - 3e-6;
    near(takes("h100", 64, "causal"), 2.3347e-3); // 2^40 / (989.4e12 * 0.68 * 0.7)
    near(takes("h100", 128, "causal_grad"), 4.1778e-3); // 0.38
    near(takes("h200", 80, "grouped"), 2.3695e-3); // by the kernel of 128: 0.67
    near(takes("a100", 64, "grouped_grad"), 7.0908e-3); // 2^40 / (312e12 * 0.71 * 0.7)
    let attention = span(Class::Attention, "causal", 1 << 40, 0);
    near(rates(Shares::PEAKS).operation(&attention), 16.435e-3); // 2^40 / 66.9e12
    let of = |half| Rates { half: Some(half), ..rates(Shares::PEAKS) }.operation(&attention);
    near(of(DType::F16), 1.1113e-3); // on tensor cores: 2^40 / 989.4e12
    near(of(DType::Bf16), 16.435e-3);
    near(Rates { precision: Precision::Tf32, ..rates(Shares::PEAKS) }.operation(&attention), 2.2226e-3);
    let in_tf32 = |name, head, call| {
        let span = span(Class::Attention, call, 1 << 40, 0);
        Rates { precision: Precision::Tf32, ..reached(name, head) }.operation(&span) - 3e-6
    };
    near(in_tf32("h100", 64, "causal"), 5.3815e-3); // 2^40 / (494.7e12 * 0.59 * 0.7)
    near(in_tf32("h100", 256, "causal_grad"), 21.1675e-3); // 0.15
    near(in_tf32("a100", 128, "causal_grad"), 17.9801e-3); // 2^40 / (156e12 * 0.56 * 0.7)
    near(in_tf32("a100", 256, "causal"), 125.3016e-3); // by the kernels of f32: 2^40 / (19.5e12 * 0.45)

    let config = config("num_heads = 2");
    let calls = calls(&config, &config.plan().unwrap(), 0).unwrap();
    let names: BTreeMap<&str, u64> =
        calls.iter().filter(|span| span.class == Class::Attention).map(|span| (span.name, span.flops)).collect();
    let [(forward, few), (backward, many)] = names.into_iter().collect::<Vec<_>>()[..] else { panic!("two names") };
    assert!(backward.ends_with("_grad") && !forward.ends_with("_grad") && 2 * many == 5 * few, "{forward} {backward}");
}

#[test]
fn more_work_takes_longer() {
    for shares in [Shares::PEAKS, Shares::REACHED] {
        for class in [Class::Product, Class::Attention, Class::Norm] {
            let time = |flops, bytes| rates(shares).operation(&span(class, "", flops, bytes));
            assert!(time(2e12 as u64, 1e6 as u64) > time(1e12 as u64, 1e6 as u64), "{class:?}");
            assert!(time(0, 2e9 as u64) > time(0, 1e9 as u64), "{class:?}");
        }
        let reduce = |members: &[usize], bytes| rates(shares).collective("all_reduce", members, bytes);
        assert!(reduce(&[0, 1], 2 << 30) > reduce(&[0, 1], 1 << 30));
        assert!(reduce(&[0, 8], 1 << 30) > reduce(&[0, 1], 1 << 30), "another machine is farther");
        assert!(
            reduce(&[0, 1, 8, 9], 1 << 30) < reduce(&[0, 8], 1 << 30) * 1.6,
            "two cards of a machine have two networks"
        );
        assert_eq!(reduce(&[3], 1 << 30), 0.0);
    }
}

/// An all-reduce of b bytes among n ranks sends 2b(n - 1)/n from each, over half of NVLink's 900 GB/s.
#[test]
fn collectives_send_what_is_calculated_by_hand() {
    let b = 1_u64 << 30;
    let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-9, "{got} {want}");
    let of = |name, bytes| rates(Shares::PEAKS).collective(name, &[0, 1, 2, 3], bytes);
    near(of("all_reduce", 2 * b), 2.0 * b as f64 * 0.75 / 450e9);
    near(of("all_gather", b + b / 4), b as f64 * 0.75 / 450e9);
    near(of("reduce_scatter", b + b / 4), b as f64 * 0.75 / 450e9);
    near(of("all_to_all", 2 * b), b as f64 * 0.75 / 450e9);
    assert_eq!(of("barrier", 0), 0.0);
}

/// A collective that is posted before other work is hidden behind it; one that is awaited at once is not.
#[test]
fn what_is_posted_early_is_hidden() {
    let meeting = |seq| Detail::Meeting(Meeting { group: Arc::new(("dp".to_owned(), vec![0, 1])), message: None, seq });
    let post = |seq| Span { detail: meeting(seq), ..span(Class::Post, "all_reduce", 0, 9 << 20) };
    let wait = |seq| Span { detail: meeting(seq), ..span(Class::Wait, "all_reduce", 0, 0) };
    let work = || span(Class::Product, "gemm nt", 1 << 40, 1);
    let [alone, link] =
        [rates(Shares::PEAKS).operation(&work()), rates(Shares::PEAKS).collective("all_reduce", &[0, 1], 9 << 20)];
    assert!(link < alone);
    let walk = |spans: &[Span]| rates(Shares::PEAKS).walk(spans);
    let early = walk(&[post(0), work(), wait(0)]);
    assert_eq!((early.seconds, early.links), (alone, [link, 0.0]));
    let late = walk(&[work(), post(0), wait(0)]);
    assert_eq!(late.seconds, alone + link);
    // Two of them follow each other, whenever they are posted.
    let both = walk(&[post(0), post(1), wait(1), wait(0)]);
    assert_eq!(both.seconds, 2.0 * link);
}

fn config(text: &str) -> Config {
    Config::from_toml(&format!("[model]\nnum_layers = 4\nhidden_size = 256\nseq_len = 256\n{text}")).unwrap()
}

#[test]
fn steps_on_cards_compare_as_their_rates_do() {
    let one = config("");
    let time = |config: &Config, name: &str, shares| predict(config, card(name).unwrap(), shares).unwrap().seconds;
    for shares in [Shares::PEAKS, Shares::REACHED] {
        assert!(time(&one, "a100", shares) > time(&one, "h100", shares));
        assert!(time(&one, "h100", shares) >= time(&one, "h200", shares));
        let deep = config("num_heads = 8\n[training]\nglobal_batch_size = 32");
        assert!(time(&deep, "h100", shares) > time(&one, "h100", shares), "twice the batch");
    }
    // At the peaks two cards need at least half of the time; waits and idle stages only add to that.
    let floor = time(&one, "h100", Shares::PEAKS);
    for axis in ["dp", "tp", "pp"] {
        let two = time(&config(&format!("[parallelism]\n{axis} = 2")), "h100", Shares::PEAKS);
        assert!(two > 0.5 * floor && two < 1.5 * floor, "{axis}: {two} {floor}");
    }
}

/// Tensor cores and half the bytes: less time than f32, in every kind of operation.
#[test]
fn sixteen_bits_are_faster() {
    let [wide, half] = ["f32", "bf16"].map(|dtype| {
        predict(&config(&format!("[training]\ndtype = '{dtype}'")), card("h100").unwrap(), Shares::PEAKS).unwrap()
    });
    for class in [Class::Product, Class::Attention, Class::Norm] {
        let of = |step: &StepTime| step.classes[&class].seconds;
        assert!(of(&half) < of(&wide), "{class:?}");
    }
}

/// The same bytes as f32, and products and attention on tensor cores: only these are faster.
#[test]
fn tf32_makes_products_and_attention_faster() {
    let [wide, tf32, half] = ["f32", "tf32", "bf16"].map(|dtype| {
        // Sequences so long that memory does not bound attention in TF32.
        let text = format!("[model]\nhidden_size = 256\nseq_len = 2048\n[training]\nmatmul_dtype = '{dtype}'");
        predict(&Config::from_toml(&text).unwrap(), card("h100").unwrap(), Shares::PEAKS).unwrap()
    });
    let of = |step: &StepTime, class| step.classes[&class].seconds;
    for class in [Class::Product, Class::Attention] {
        let seconds = [&wide, &tf32, &half].map(|step| of(step, class));
        assert!(seconds[0] > seconds[1] && seconds[1] > seconds[2], "{class:?}: {seconds:?}");
    }
    for class in [Class::Norm, Class::Optimizer] {
        assert_eq!(of(&tf32, class), of(&wide, class), "{class:?}");
    }
    let report = report(
        &Config::from_args(&Args::parse(["--device", "cuda:a100", "--set", "training.matmul_dtype=tf32"])).unwrap(),
    )
    .unwrap();
    assert!(report.contains("at most 156 TFLOP/s of tf32 and 2.04 TB/s each"), "{report}");
}

/// Graphs take from each launch what they save of it, and nothing else.
#[test]
fn graphs_save_launches() {
    let of =
        |text| Config::from_args(&Args::parse(["--device", "cuda:h100", "--set", "model.preset=small", "--set", text]));
    let [with, without] = ["cuda.graphs=true", "cuda.graphs=false"]
        .map(|text| predict(&of(text).unwrap(), card("h100").unwrap(), Shares::REACHED).unwrap());
    let [alone, in_graph] = Shares::REACHED.launch;
    let saved = without.calls() as f64 * (alone - in_graph);
    assert!(((without.seconds - with.seconds) / saved - 1.0).abs() < 1e-6, "{with:?} {without:?}");
}

/// States of 8 bytes a parameter come and go in each step: AdamW's two, over a link of 64 GB/s. No step is shorter than
/// that.
#[test]
fn what_is_offloaded_takes_its_link() {
    let dir = std::env::temp_dir().display().to_string();
    let text = format!("[memory]\noffload = 'optimizer'\noffload_dir = {dir:?}");
    let step = predict(&config(&text), card("h100").unwrap(), Shares::PEAKS).unwrap();
    let plan = config(&text).plan().unwrap();
    let parameters = dry_run::predict(&config(&text).model(), &plan, 0).unwrap().parameters as f64;
    assert!((step.host / (8.0 * parameters / 64e9) - 1.0).abs() < 0.01, "{step:?}");
    assert!(step.seconds >= step.host);
    assert_eq!(predict(&config(""), card("h100").unwrap(), Shares::PEAKS).unwrap().host, 0.0);
}

/// 6 operations a weight and token and 12·layers·hidden·seq², both by hand.
#[test]
fn operations_are_counted_as_published_figures_count_them() {
    let config = config("vocab_size = 512\n[training]\nglobal_batch_size = 4");
    let (layers, hidden, seq, vocab) = (4.0, 256.0, 256.0, 512.0);
    let weights = 12.0 * layers * hidden * hidden + vocab * hidden;
    let want = 4.0 * seq * (6.0 * weights + 12.0 * layers * hidden * (seq + 1.0));
    let got = model_flops(&config).unwrap();
    assert!((got / want - 1.0).abs() < 1e-6, "{got} {want}");
}

#[test]
fn the_report_says_time_mfu_and_memory() {
    let mut config = config("[parallelism]\ndp = 2\npp = 2");
    config.device = Device::Card("h100");
    let text = report(&config).unwrap();
    for part in ["on 4 × NVIDIA H100 SXM5 80 GB", "a step", "MFU", "of 74.5 GiB", "products", "waits for stages"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("more than it has"));
    config.device = Device::Cpu;
    assert_eq!(report(&config).unwrap(), "");
}

#[test]
fn peaks_bound_what_good_programs_reach() {
    let config = Config::from_toml("[model]\npreset = 'small'").unwrap();
    let h100 = card("h100").expect("a known card");
    let on = |shares| predict(&config, h100, shares).unwrap().seconds;
    assert!(on(Shares::PEAKS) < on(Shares::REACHED));
}
