//! What makes a configuration wrong, from the meaning of the keys: each rule says when, and why nothing else would do.
//!
//! More than 400 lines: one rule after the other, to be read beside the table of keys.

use meshwork_pipeline::Generator;

use crate::configurations::draw::{Case, EXAMPLES, FEW_IDS, IDS, TOKENS};

/// The rules that a configuration breaks.
pub fn broken(case: &Case) -> Vec<String> {
    let mut broken = Vec::new();
    let mut rule = |wrong: bool, why: &str| {
        if wrong {
            broken.push(why.to_owned());
        }
    };
    model(case, &mut rule);
    experts(case, &mut rule);
    zero(case, &mut rule);
    pipeline(case, &mut rule);
    batch(case, &mut rule);
    canonical(case, &mut rule);
    replays(case, &mut rule);
    compress(case, &mut rule);
    mixed(case, &mut rule);
    data(case, &mut rule);
    files(case, &mut rule);
    let resumes = case.read("checkpoint.resume").unwrap_or(false);
    rule(resumes && case.get("checkpoint.dir").is_none(), "no folder to resume from");
    rule(case.get("checkpoint.permit") == Some("weights"), "no such difference can be permitted");
    rule(case.get("cuda.graphs") == Some("true"), "the CPU has no graphs");
    rule(case.get("cuda.launch_blocking") == Some("true"), "the CPU waits for each kernel anyway");
    rule(case.get("cuda.tuning").is_some(), "the CPU has no kernels of CUDA");
    let warmup: u64 = case.read("lr_scheduler.warmup_steps").unwrap_or(0);
    let decays = case.get("lr_scheduler.decay").is_some_and(|decay| decay != "none");
    let end: Option<u64> = case.read("lr_scheduler.decay_steps");
    rule(decays && end.is_some_and(|end| end <= warmup), "the rate decays before it is warm");
    broken
}

/// A number that is given, or else a default.
fn count(case: &Case, key: &str, default: usize) -> usize {
    case.read(key).unwrap_or(default)
}

fn degrees(case: &Case) -> [usize; 3] {
    ["parallelism.dp", "parallelism.tp", "parallelism.pp"].map(|key| count(case, key, 1))
}

fn is_llama(case: &Case) -> bool {
    let preset = case
        .get("model.preset")
        .is_some_and(|preset| ["llama", "mixtral", "deepseek"].iter().any(|of_llama| preset.starts_with(of_llama)));
    case.get("model.kind").map_or(preset, |kind| kind == "llama")
}

fn tied(case: &Case) -> bool {
    case.read("model.tie_embeddings").unwrap_or(!is_llama(case))
}

fn divides(by: usize, value: usize) -> bool {
    value.is_multiple_of(by)
}

/// Heads, widths and positions are whole on every tp rank.
fn model(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let [_, tp, _] = degrees(case);
    let [hidden, heads, seq_len] =
        ["hidden_size", "num_heads", "seq_len"].map(|key| count(case, &format!("model.{key}"), 0));
    let llama = is_llama(case);
    let of_preset = match case.get("model.preset") {
        Some("llama-tiny" | "mixtral-tiny" | "deepseek-tiny") if llama => 2,
        Some("llama3-8b" | "llama3-70b" | "llama3-405b" | "mixtral-8x7b") if llama => 8,
        Some("deepseek-v3") if llama => 128,
        _ => heads,
    };
    let kv_heads = count(case, "model.num_kv_heads", of_preset);
    // 4 times the width; llama: 8/3 of it, in steps of 256. The widths here are no preset's.
    let ffn = if llama { (hidden * 8 / 3).next_multiple_of(256) } else { 4 * hidden };
    let ffn = count(case, "model.ffn_hidden_size", ffn);
    let no_model = |key| case.get(key).is_some_and(|path| path.ends_with("texts"));
    rule(no_model("model.init_from") || no_model("model.config"), "no model in the folder");
    rule(matches!(case.get("model.freeze"), Some("layer.0" | "layers.99")), "no such part to freeze");
    let smooth = case.get("dpo.label_smoothing") == Some("0.5");
    if case.get("training.objective") == Some("dpo") {
        rule(case.get("lora.rank").is_none(), "no frozen model to compare with");
        rule(smooth, "half of the pairs the wrong way round");
        rule(own(case).is_none() && !generator(case).is_synchronous(), "no empty pipeline for the frozen model");
    }
    if let Some(rank) = case.get("lora.rank") {
        rule(rank == "999", "a rank above all matrices");
        rule(case.get("lora.targets") == Some("nothing"), "no layer of that name");
        rule(case.get("model.freeze").is_some_and(|freeze| !freeze.is_empty()), "all else is frozen");
        rule(!llama && count(case, "moe.num_experts", 0) > 0, "a GPT-2 with experts is unknown to PEFT");
        let (ep, experts) = (count(case, "parallelism.ep", 1), count(case, "moe.num_experts", 0));
        let width = match count(case, "moe.expert_hidden_size", 0) {
            0 => ffn,
            width => width,
        };
        rule(rank == "2" && (if experts > 0 { width } else { ffn }) == 1, "a rank above the inner features");
        let of_matrices = matches!(case.get("optimizer.name"), Some("muon" | "adam8bit"));
        rule(rank == "1" && of_matrices, "adapters of rank 1 are vectors, and the update rule is for matrices");
        rule(case.get("lora.init_from").is_some(), "no folder of PEFT");
        let exported = case.get("lora.export") == Some("adapter") && case.get("checkpoint.export").is_some();
        rule(exported && case.get("model.init_from").is_none(), "an adapter of no model");
        let by_blocks = (1..seq_len).contains(&count(case, "memory.sequence_block", 0));
        let cuts = case.read("parallelism.sequence_parallel").unwrap_or(false);
        let all = case.get("lora.targets").is_none_or(|targets| targets == "all-linear");
        let drops = case.read::<f32>("lora.dropout").is_some_and(|p| p > 0.0);
        rule(all && experts > 0 && drops, "no places of tokens in the rows of experts");
        let needs_all = is_canonical(case) || tp > 1 && drops;
        // Those of experts are for rows.
        let of_networks = all && experts == 0;
        rule(by_blocks && cuts && of_networks && needs_all, "an adapter needs the whole of a sequence that tp cuts");
        let quantised = matches!(case.get("lora.quantization"), Some("int8" | "nf4"));
        let held = experts / ep.max(1) * hidden * width;
        rule(
            quantised && ep > 1 && !divides(count(case, "lora.block_size", 64), held),
            "experts over ep in whole blocks",
        );
    }
    rule(!divides(heads, hidden), "heads have no whole width");
    rule(!divides(tp, hidden), "the width over tp");
    rule(!divides(tp, heads), "heads over tp");
    // Fast numerics pad the last ranks.
    rule(is_canonical(case) && !divides(tp, ffn), "inner features in whole canonical blocks over tp");
    let sequence_parallel = case.read("parallelism.sequence_parallel").unwrap_or(false);
    rule(sequence_parallel && !divides(tp, seq_len), "positions are not whole on every tp rank");
    let (cp, shares) = (count(case, "parallelism.cp", 1), case.get("parallelism.context_parallel_method"));
    if cp > 1 || shares.is_some() {
        let parts = if sequence_parallel { cp * tp } else { cp };
        rule(parts > seq_len, "a part without tokens");
        let drops = |key| case.read::<f64>(key).unwrap_or(0.0) > 0.0;
        let drops = drops("model.dropout") || case.get("lora.rank").is_some() && drops("lora.dropout");
        rule(drops && !divides(parts, seq_len), "other places are drawn for");
        if is_canonical(case) {
            let blocks = count(case, "numerics.reduction_blocks", 8);
            rule(
                parts > 1 && !(divides(parts, blocks) && (blocks / parts).is_power_of_two()),
                "blocks of the sequence over cp",
            );
            rule(!divides(parts, seq_len), "parts of the sequence in whole blocks");
        }
        let (held, group) = (heads / tp.max(1), heads / kv_heads.max(1));
        let fits = |parts: usize| {
            divides(parts, held) && (!llama || divides(group, held / parts) || divides(held / parts, group))
        };
        let half = is_canonical(case) && case.get("training.dtype").is_some_and(|dtype| dtype != "f32");
        let rounds = |parts: usize| half && fits(parts) && held / parts < group.min(held);
        rule(shares == Some("all_to_all") && divides(tp, heads) && !fits(cp), "heads over cp");
        rule(shares == Some("all_to_all") && rounds(cp), "ranks round their shares of a head of keys");
        if let Some(ring) = case.read::<usize>("parallelism.ring_degree").filter(|_| shares == Some("hybrid")) {
            rule(!divides(ring, cp), "places of a ring over cp");
            rule(divides(ring, cp) && divides(tp, heads) && !fits(cp / ring), "heads beside the ring");
            rule(divides(ring, cp) && rounds(cp / ring), "ranks round their shares of a head of keys");
        }
    }
    if llama {
        rule(!divides(kv_heads, heads), "heads share no whole number of key and value heads");
        rule(divides(heads, hidden) && !divides(2, hidden / heads), "rotary embeddings turn pairs");
        rule(!divides(tp, kv_heads) && !divides(kv_heads, tp), "key and value heads over tp");
        let width = if divides(heads, hidden) { hidden / heads } else { tp };
        rule(divides(kv_heads, tp) && !divides(tp, kv_heads * width), "ranks that share a head share its weights");
        let number = |key: &str, default: f64| case.read(&format!("model.rope_scaling_{key}")).unwrap_or(default);
        let [low, high] = [number("low_freq_factor", 1.0), number("high_freq_factor", 4.0)];
        rule(number("factor", 1.0) != 1.0 && high <= low, "no frequencies between low and high");
    } else {
        rule(kv_heads != heads, "gpt2 has a key and value head for each head");
        let exported = case.get("checkpoint.export").is_some();
        rule(exported && count(case, "model.sliding_window", 0) > 0, "no folder for a GPT-2 with a window");
    }
}

/// Ranks share out the experts evenly, and a router gives a token as many as it can.
fn experts(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let ([dp, tp, _], ep, etp) =
        (degrees(case), count(case, "parallelism.ep", 1), count(case, "parallelism.expert_tensor_parallel", 1));
    let cp = count(case, "parallelism.cp", 1);
    rule(!divides(ep, dp * cp), "ranks of ep are no share of the ranks of dp and cp");
    rule(![1, tp].contains(&etp), "experts are cut over all of tp, or whole");
    let experts = count(case, "moe.num_experts", 0);
    if experts == 0 {
        return rule(ep > 1, "no experts to share out");
    }
    let (router, top_k) = (case.get("moe.router").unwrap_or("topk"), count(case, "moe.top_k", 2));
    rule(!divides(ep, experts), "experts over ep");
    rule(top_k == 0 || top_k > experts, "more experts of a token than there are");
    rule(router == "switch" && top_k != 1, "switch takes one");
    rule(router == "gshard" && (top_k != 2 || experts < 2), "gshard takes two");
    let number = |key: &str| case.read::<f64>(key).unwrap_or(0.0);
    rule(router == "expert_choice" && number("moe.aux_loss_coeff") > 0.0, "experts that choose are balanced");
    rule(
        router == "expert_choice" && case.get("moe.overflow") == Some("reroute"),
        "experts that choose leave nothing over",
    );
    rule(router != "bias" && number("moe.bias_update_rate") > 0.0, "no bias to update");
    let groups = count(case, "moe.num_groups", 1);
    rule(!divides(groups, experts), "groups of one size");
    if groups > 1 && divides(groups, experts) {
        rule(top_k > experts / groups, "one group has too few experts");
        rule(router == "expert_choice", "experts choose, not groups");
    }
    rule(etp > 1 && !divides(tp, count(case, "moe.expert_hidden_size", 0)), "the width of experts over tp");
    let (every, dense) = (count(case, "moe.every_n_layers", 1), count(case, "moe.first_dense_layers", 0));
    let of_experts = |layer: usize| layer >= dense && divides(every, layer + 1);
    rule(!(0..count(case, "model.num_layers", 0)).any(of_experts), "no layer has experts");
    rule(own(case).is_none() && !generator(case).is_synchronous(), "no load of a whole step");
    let exported = case.get("checkpoint.export").is_some();
    rule(exported && !is_llama(case), "no folder for a GPT-2 with experts");
    rule(exported && router != "topk", "Mixtral's router is topk");
    rule(exported && (groups > 1 || number("moe.capacity_factor") > 0.0), "Mixtral has neither groups nor a capacity");
    rule(exported && count(case, "moe.num_shared_experts", 0) > 0, "Mixtral has no shared experts");
    rule(exported && (every, dense) != (1, 0), "Mixtral has experts in every layer");
    rule(exported && case.get("moe.normalize_top_k") == Some("false"), "Mixtral's weights add up to 1");
    rule(
        exported && case.read::<f64>("moe.routed_scaling").is_some_and(|scaling| scaling != 1.0),
        "Mixtral's weights add up to 1",
    );
    if is_canonical(case) {
        let shared = count(case, "moe.num_shared_experts", 0) * count(case, "moe.expert_hidden_size", 0);
        rule(!divides(tp, shared), "inner features of shared experts in whole canonical blocks over tp");
        rule(case.get("moe.aux_loss_scope") == Some("global_batch"), "depends on how the batch is cut");
        rule(ep > 1 && divides(ep, experts) && !(experts / ep).is_power_of_two(), "ep ranks without a subtree");
    }
}

/// Ranks that have the same parameters share them out evenly.
fn zero(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let ([dp, ..], ep, cp) = (degrees(case), count(case, "parallelism.ep", 1), count(case, "parallelism.cp", 1));
    let [stage, group] = ["zero_stage", "zero_group"].map(|key| count(case, &format!("parallelism.{key}"), 0));
    rule(stage > 3, "no such stage of ZeRO");
    rule(stage > 0 && dp == 1 && cp == 1, "nobody to share with");
    rule(group > 0 && stage == 0, "groups that share nothing");
    rule(group > 0 && !divides(group, dp), "groups of different sizes");
    let ep = match () {
        () if divides(ep, dp) => ep,
        () if divides(cp, ep) && divides(ep / cp, dp) => ep / cp,
        () => (1..=ep).rev().find(|&of| divides(of, ep) && divides(of, dp)).unwrap_or(1),
    };
    rule(group > 0 && !divides(group, ep) && !divides(ep, group), "experts that some groups have more often");
}

fn generator(case: &Case) -> Generator {
    let name = case.get("pipeline.schedule").unwrap_or("1f1b");
    Generator::ALL.into_iter().find(|generator| generator.name() == name).expect("a schedule")
}

/// Of a schedule in a file: its name, and pp, stages per rank and micro-batches.
fn own(case: &Case) -> Option<(String, [usize; 3])> {
    let file = case.get("pipeline.schedule_file")?.rsplit('/').next()?.strip_suffix(".txt")?;
    let mut parts = file.rsplitn(4, '-');
    let mut number = || parts.next()?.parse().ok();
    let (micros, chunks, pp) = (number()?, number()?, number()?);
    Some((parts.next()?.to_owned(), [pp, chunks, micros]))
}

/// Stages per rank that a schedule has, and whether it takes another number.
fn chunks(generator: Generator) -> (usize, bool) {
    match generator {
        Generator::Interleaved | Generator::BreadthFirst => (2, true),
        Generator::ZbV | Generator::DualPipeV => (2, false),
        _ => (1, false),
    }
}

fn pipeline(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let [_, _, pp] = degrees(case);
    let (generator, own, layers) = (generator(case), own(case), count(case, "model.num_layers", 0));
    let replication = case.list("pipeline.replication");
    let given: Option<usize> = case.read("pipeline.virtual_stages");
    let (of_schedule, choose) = chunks(generator);
    let per_rank = match &own {
        Some((_, [_, chunks, _])) => {
            rule(given.is_some_and(|given| given != *chunks), "virtual_stages are not those of the file");
            rule(case.get("pipeline.schedule").is_some(), "two schedules");
            *chunks
        }
        None => {
            rule(!choose && given.is_some_and(|given| given != of_schedule), "the schedule fixes its virtual_stages");
            given.unwrap_or(of_schedule)
        }
    };
    if let Some(replicas) = &replication {
        rule(replicas.contains(&0) || replicas.iter().sum::<usize>() != pp, "replicas are not the ranks");
        rule(generator != Generator::OneFOneB || own.is_some(), "only 1f1b has replicas");
        let most = replicas.iter().max().copied().unwrap_or(0);
        let samples = count(case, "training.global_batch_size", 16) / degrees(case)[0];
        rule(most > micros(case).unwrap_or(samples), "a replica without a micro-batch");
        rule(is_canonical(case) && replicas.iter().any(|&count| count > 1), "replicas hold no whole subtree");
    }
    let stages = replication.as_ref().map_or(pp * per_rank, Vec::len);
    match (case.list("pipeline.partition"), case.get("pipeline.partition")) {
        (Some(list), _) => {
            rule(list.len() != stages, "a list for other stages");
            rule(list.iter().sum::<usize>() != layers, "a list of other layers");
        }
        // A stage may be left without a layer.
        (None, Some("cost")) => {}
        _ => {
            rule(layers < stages, "a stage without a layer");
            rule(own.is_none() && per_rank > 1 && !divides(stages, layers), "chunks of different sizes by default");
        }
    }
    let recomputed = case.get("memory.recompute").and_then(|layers| layers.parse::<usize>().ok());
    rule(recomputed.is_some_and(|most| most > layers), "no stage has as many layers");
    let offloads = case.get("memory.offload").is_some_and(|what| what != "none");
    rule(offloads && case.get("memory.offload_dir").is_none(), "no folder to offload to");
    rule(case.get("pipeline.vertical_sync") == Some("true") && generator != Generator::PipeDream, "only pipedream");
    if own.is_none() && !generator.is_synchronous() {
        rule(tied(case) && pp > 1, "one table in two versions");
        rule(case.read("training.max_norm").unwrap_or(1.0) > 0.0, "no norm of a whole gradient");
        rule(is_canonical(case), "no run of one rank to be equal to");
    }
}

/// The least number of micro-batches, and what it is a multiple of.
fn takes(generator: Generator, pp: usize) -> (usize, usize) {
    match generator {
        Generator::ZbH2 | Generator::ZbV | Generator::PipeDream2Bw => (pp, 1),
        Generator::DualPipeV => (2 * pp, 1),
        Generator::Interleaved => (pp, pp),
        _ => (1, 1),
    }
}

/// The number of micro-batches, where it is fixed by what is given.
fn micros(case: &Case) -> Option<usize> {
    let [dp, _, _] = degrees(case);
    let (batch, size) =
        (count(case, "training.global_batch_size", 16), case.read::<usize>("training.micro_batch_size"));
    let given = own(case).map(|(_, [_, _, micros])| micros).or(case.read("pipeline.num_microbatches"));
    given.or(size.map(|size| batch / (dp * size)))
}

fn batch(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let [dp, _, pp] = degrees(case);
    let (batch, size) =
        (count(case, "training.global_batch_size", 16), case.read::<usize>("training.micro_batch_size"));
    let given: Option<usize> = case.read("pipeline.num_microbatches");
    let own = own(case);
    if let Some((_, [ranks, _, micros])) = &own {
        rule(*ranks != pp, "a file for other ranks");
        rule(given.is_some_and(|given| given != *micros), "a file with other micro-batches");
    }
    let (least, step) = if own.is_some() { (1, 1) } else { takes(generator(case), pp) };
    match (micros(case), size) {
        (Some(micros), size) => {
            rule(!divides(dp * size.unwrap_or(micros), batch), "the batch is not cut evenly");
            rule(size.is_some_and(|size| dp * micros * size != batch), "the batch is another product");
            rule(!divides(dp * micros.max(1), batch), "the batch is not cut evenly");
            rule(micros < least || !divides(step, micros), "micro-batches that the schedule does not take");
        }
        (None, _) => {
            let some = |micros: usize| divides(dp * micros, batch) && divides(step, micros);
            rule(!(least..=batch).any(some), "no number of micro-batches fits");
        }
    }
}

fn is_canonical(case: &Case) -> bool {
    case.get("training.numerics") == Some("canonical")
}

/// Each rank of canonical sums holds a whole subtree.
fn canonical(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    if !is_canonical(case) {
        return;
    }
    let [dp, tp, _] = degrees(case);
    let blocks = count(case, "numerics.reduction_blocks", 8);
    let whole = |count: usize, ranks: usize| ranks == 1 || divides(ranks, count) && (count / ranks).is_power_of_two();
    rule(!whole(blocks, tp), "tp ranks without a subtree");
    rule(!whole(count(case, "training.global_batch_size", 16), dp), "dp ranks without a subtree");
    rule(case.get("comm.reduction") == Some("native"), "the library adds up in an order of its own");
    rule(blocks > 4096, "more blocks than any tp has use for");
}

/// A step runs again, by other ranks, with the same bits.
fn replays(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let ([dp, tp, pp], cp) = (degrees(case), count(case, "parallelism.cp", 1));
    if count(case, "training.replay_every", 0) > 0 {
        rule(!is_canonical(case), "another mesh has other bits");
        rule(dp * tp * pp * cp == 1, "no other rank");
        rule(case.get("training.replay_mesh").is_some(), "another number of ranks");
    }
}

/// The schemes of `[compress]` that are given and not `none`.
pub fn schemes(case: &Case) -> impl Iterator<Item = &str> {
    let keys = ["activations", "activation_gradients", "gradients", "weights", "dispatch", "dispatch_gradients"];
    keys.into_iter().filter_map(|key| case.get(&format!("compress.{key}"))).filter(|scheme| *scheme != "none")
}

fn compress(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let feedback = case.get("compress.feedback").filter(|feedback| *feedback != "none");
    rule(matches!(feedback, Some("ef22" | "ef21m:2")), "no such feedback");
    let lost_for_good = ["compress.activations", "compress.activation_gradients", "compress.gradients"];
    let lost_for_good = lost_for_good.into_iter().any(|key| case.get(key).is_some_and(|scheme| scheme != "none"));
    rule(feedback.is_some() && !lost_for_good, "nothing is lost, or not for good");
    let given = |key: &str| case.get(key).is_some_and(|scheme| scheme != "none");
    let estimates = feedback.is_some_and(|feedback| feedback.starts_with("ef21"));
    let slices = count(case, "parallelism.zero_stage", 0) > 0;
    rule(estimates && given("compress.gradients") && slices, "no estimate of a slice");
    let of_weights = case.get("compress.weights").unwrap_or("none");
    let leaves_out = ["topk", "randk", "powersgd"].into_iter().any(|method| of_weights.starts_with(method));
    rule(leaves_out, "weights that are not sent");
    for scheme in ["compress.dispatch", "compress.dispatch_gradients"].into_iter().filter_map(|key| case.get(key)) {
        rule(scheme.starts_with("powersgd") || scheme.starts_with("randk"), "nothing of each token");
        rule(scheme == "quant:8/block997" && count(case, "moe.num_experts", 0) > 0, "parts of two tokens");
    }
    let gathers = count(case, "parallelism.zero_stage", 0) == 3;
    rule(given("compress.weights") && !gathers, "weights that nobody gathers");

    for scheme in schemes(case) {
        rule(scheme == "quant:9", "codes of more than eight bits");
    }
    let factors = |key: &str| case.get(key).is_some_and(|scheme| scheme.starts_with("powersgd"));
    rule(
        factors("compress.activations") || factors("compress.activation_gradients"),
        "samples have no factors to start from",
    );
    rule(estimates && factors("compress.gradients"), "no estimate of a part");
    rule(case.get("lora.rank").is_some() && factors("compress.gradients"), "adapters are factors already");
    let layers = count(case, "model.num_layers", 0);
    let virtual_cuts = case.list("compress.virtual_cuts").unwrap_or_default();
    let in_order = virtual_cuts.windows(2).all(|pair| pair[0] < pair[1]);
    rule(!in_order || virtual_cuts.iter().any(|&cut| cut > layers), "no such cut");
    let of_cuts = ["compress.activations", "compress.activation_gradients"].map(|key| case.get(key).unwrap_or("none"));
    let largest = |scheme: &str| Some(scheme.strip_prefix("topk:")?.split('+').next()?.to_owned());
    let shares = case.read("compress.share_indices").unwrap_or(false);
    let alike = largest(of_cuts[0]).is_some() && largest(of_cuts[0]) == largest(of_cuts[1]);
    rule(shares && !alike, "no indices to share");
    let differences = case.get("compress.aqsgd") == Some("true");
    rule(differences && !given("compress.activations"), "no activations to send as differences");
    rule(differences && feedback.is_some(), "differences bring back what was lost, and so does feedback");
    rule(differences && shares, "differences have other indices than gradients");
    if is_canonical(case) {
        rule(given("compress.gradients"), "one rank sums nothing");
        rule(given("compress.weights"), "one rank gathers nothing");
        rule(given("compress.dispatch") || given("compress.dispatch_gradients"), "one rank sends no tokens");
        let cuts = given("compress.activations") || given("compress.activation_gradients");
        rule(cuts && virtual_cuts.is_empty(), "one rank sends nothing");
        let samples_apart = |scheme: &&str| matches!(*scheme, "none" | "bf16" | "sign/row" | "topk:0.5/row");
        rule(!of_cuts.iter().all(samples_apart), "samples lose together");
        let [_, tp, _] = degrees(case);
        let parts = case.read("parallelism.sequence_parallel").unwrap_or(false) && tp > 1;
        let parts = parts || count(case, "parallelism.cp", 1) > 1;
        rule(cuts && parts, "ranks lose of parts");
    }
}

/// What is stored in 16 bits.
fn mixed(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let of = |key: &str| case.get(&format!("training.{key}"));
    let dtype = of("dtype").unwrap_or("f32");
    let reduced = of("reduce_dtype").unwrap_or("f32");
    rule(reduced != "f32" && reduced != dtype, "gradients come in another type");
    rule(dtype == "f16" && of("matmul_dtype") == Some("bf16"), "rounded twice");
    rule(dtype != "f32" && of("matmul_dtype") == Some("tf32"), "rounded to more bits than are stored");
    rule(dtype != "f32" && reduced == dtype && is_canonical(case), "each rank rounds its share of a sum");
    let dynamic = of("loss_scale").map_or(dtype == "f16", |scale| scale == "dynamic");
    let feedback = case.get("compress.feedback").is_some_and(|feedback| feedback != "none");
    rule(dtype != "f32" && dynamic && feedback && schemes(case).next().is_some(), "lost in another scale");
    rule(dynamic && dtype == "f32", "nothing to scale");
    rule(dynamic && own(case).is_none() && !generator(case).is_synchronous(), "no norm before an update");
    rule(dtype == "f16" && of("loss_scale") == Some("1"), "f16 needs a scale");
}

fn data(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let named = |end: &str| case.get("data.path").is_some_and(|path| path.ends_with(end));
    let indexed = ["indexed", "indexed.bin", "indexed.idx"].into_iter().any(named);
    let sources = case.get("data.sources");
    let binary = sources.is_none() && (named(".bin") || indexed);
    let weights =
        |wrong: &[&str]| sources.is_some_and(|of| wrong.iter().any(|wrong| of.contains(&format!(":{wrong}\""))));
    rule(sources.is_some() && case.get("data.path").is_some(), "one source or several");
    rule(weights(&["0", "-1"]), "a weight that is not above 0");
    rule(weights(&["1e-9"]), "weights in no proportion of small whole numbers");
    let documents = case.get("data.documents");
    let id: Option<usize> = case.get("data.end_of_text").and_then(|id| id.parse().ok());
    rule(id.is_some_and(|id| id >= count(case, "model.vocab_size", 0)), "no such id ends a text");
    let begins: Option<usize> = case.get("data.beginning_of_text").and_then(|id| id.parse().ok());
    rule(begins.is_some_and(|id| id >= count(case, "model.vocab_size", 0)), "no such id begins a text");
    let objective = case.get("training.objective").unwrap_or("pretrain");
    if objective != "pretrain" {
        let wanted = if objective == "sft" { "examples.jsonl" } else { "pairs.jsonl" };
        rule(!named(wanted), "no such examples");
        rule(case.get("data.format") == Some("text"), "a text has no examples");
        rule(documents.is_some_and(|rule| rule != "attention"), "examples see each other");
    }
    let tokens = binary && !indexed || sources.is_some();
    let known =
        id.is_some() || case.get("data.tokenizer") == Some("gpt2") && case.get("data.end_of_text") != Some("\"none\"");
    rule(
        documents.is_some_and(|rule| rule != "stream") && tokens && !known,
        "nothing marks the documents of a token file",
    );
    let vocab = count(case, "model.vocab_size", 0);
    let tokenizer = case.get("data.tokenizer").unwrap_or("bytes");
    let few = case.get("data.path").is_some_and(|path| path.ends_with("few.bin"));
    let ids = match (binary, tokenizer) {
        (true, _) => {
            if few {
                FEW_IDS
            } else {
                IDS
            }
        }
        (false, "bytes") => 256,
        (false, _) => 50257,
    };
    rule(vocab < ids, "tokens beyond the vocabulary");
    rule(tokenizer == "gpt2" && !cfg!(feature = "tokenizers"), "a build without tokenizers");
    if case.read("validation.every").unwrap_or(0) > 0 && (case.get("data.path").is_some() || sources.is_some()) {
        let fraction = case.read("validation.fraction").unwrap_or(0.05);
        let held_out = (TOKENS as f64 * fraction) as usize;
        let too_little = match objective {
            "pretrain" => held_out <= count(case, "model.seq_len", 0),
            _ => EXAMPLES as f64 * fraction < 1.0,
        };
        rule(fraction > 0.0 && too_little, "too little is held out");
    }
}

fn files(case: &Case, rule: &mut impl FnMut(bool, &str)) {
    let [_, _, pp] = degrees(case);
    let profile = case.get("metrics.profile") == Some("true");
    let same = case.get("metrics.trace") == case.get("metrics.schedule");
    rule(profile && pp > 1 && same, "one file for two reports");
}
