//! Limits of sizes. Within these limits no count overflows, and `--steps 0` can report.

use super::Config;
use super::fault::Fault;
use super::settings::Settings;
use super::words::ModelKind;

/// Every rank lists the parameters of every layer.
pub(crate) const MAX_LAYERS: usize = 1 << 14;
/// Also counts their bytes, optimizer states included.
const MAX_PARAMETERS: u128 = 1 << 53;
/// A rank holds the token ids of its part of the batch.
const MAX_TOKENS: u128 = 1 << 28;
/// Floating point operations of a step on one rank, counted in 64 bits. The estimate takes all pairs of tokens and no
/// recomputation; a step computes half of the pairs, at most one and a half times.
const MAX_OPERATIONS: u128 = 1 << 63;
/// Micro-batches times stages: a schedule is a list.
const MAX_SCHEDULE: u128 = 1 << 22;
/// Ranks that train are threads of one process.
const MAX_THREADS: usize = 1 << 12;

const MODEL: [&str; 5] =
    ["model.vocab_size", "model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "model.seq_len"];
const BATCH: &str = "training.global_batch_size";

/// Appends the faults of absurd sizes.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let (model, mesh) = (&config.model, &config.parallelism);
    // Factors of up to 2^63 each overflow, so the product saturates.
    let product = |factors: &[usize]| factors.iter().fold(1u128, |product, &x| product.saturating_mul(x as u128));
    let sizes = [model.vocab_size, model.num_layers, model.hidden_size, model.ffn_hidden_size, model.seq_len];
    let [vocab, layers, hidden, ffn, seq_len] = sizes;

    settings.require(&[], layers <= MAX_LAYERS, || {
        Fault::new(MODEL[1], layers, "too many layers", format!("use {MAX_LAYERS} or fewer"))
    });

    let heads = if model.tie_embeddings { 1 } else { 2 };
    let of_ffn = if model.kind == ModelKind::Llama { 3 } else { 2 };
    let weights = [
        product(&[heads, vocab, hidden]),
        product(&[seq_len, hidden]),
        product(&[4, layers, hidden, hidden]),
        product(&[of_ffn, layers, hidden, ffn]),
    ];
    let parameters = weights.into_iter().fold(0, u128::saturating_add);
    let countable = settings.sound(&MODEL) && parameters <= MAX_PARAMETERS;
    settings.require(&MODEL, countable || layers > MAX_LAYERS, || {
        let names = MODEL.map(|key| key.trim_start_matches("model."));
        let sizes: Vec<String> = names.iter().zip(sizes).map(|(name, value)| format!("{name}={value}")).collect();
        let problem = format!("about {:.0e} parameters, too many to count", parameters as f64);
        Fault::new("model", sizes.join(","), problem, "use smaller sizes")
    });

    let batch = config.training.global_batch_size;
    let tokens = product(&[batch.div_ceil(mesh.dp), seq_len]);
    let keys = [BATCH, MODEL[4], "parallelism.dp"];
    settings.require(&keys, tokens <= MAX_TOKENS, || {
        let problem = format!("gives each of dp = {} ranks {tokens} tokens a step", mesh.dp);
        let valid = format!("use a smaller batch or model.seq_len, for {MAX_TOKENS} tokens or fewer");
        Fault::new(BATCH, batch, problem, valid)
    });
    if settings.sound(&keys) && tokens <= MAX_TOKENS && countable {
        let attention = product(&[2, layers, hidden, seq_len]);
        // The stage with the most layers.
        let most = config.pipeline.partition.iter().max().copied().unwrap_or(layers.div_ceil(mesh.pp));
        let all = (parameters + attention).saturating_mul(6 * tokens);
        let operations = all.saturating_mul(most as u128) / product(&[layers, mesh.tp, mesh.cp]);
        settings.require(&["parallelism.tp", "parallelism.pp", "parallelism.cp"], operations <= MAX_OPERATIONS, || {
            let problem =
                format!("a step is about {:.0e} operations on each rank, too many to count", operations as f64);
            Fault::new(BATCH, batch, problem, "use a smaller batch or model, or more ranks")
        });
    }

    let micros = config.pipeline.num_microbatches;
    settings.require(&[], tokens > MAX_TOKENS || product(&[micros, mesh.pp]) <= MAX_SCHEDULE, || {
        let valid = format!("use {} or fewer", MAX_SCHEDULE / mesh.pp as u128);
        Fault::new("pipeline.num_microbatches", micros, format!("too many over pp = {}", mesh.pp), valid)
    });

    let axes = ["parallelism.dp", "parallelism.tp", "parallelism.pp", "training.steps"];
    if let Some(ranks) = mesh.world_size().filter(|_| config.training.steps > 0) {
        settings.require(&axes, ranks <= MAX_THREADS, || {
            let mesh = mesh.degrees();
            let problem = format!("{ranks} ranks, each a thread of this process");
            let valid = format!("use {MAX_THREADS} ranks or fewer; --steps 0 reports on any mesh");
            Fault::new("parallelism", mesh, problem, valid)
        });
    }
}
