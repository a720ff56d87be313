//! Every section and key of the configuration. This is the one place that states them: `Config`, its sections, the
//! [key table](super::keys), `--help` and `docs/configuration.md` all come from it.
//!
//! A key is `name: type = default, kind, effect;`, with its meaning above it. Its [`Effect`] says what it changes: the
//! model, the numbers of a step, only speed, or only output. `if` and conditions (`conditions.rs`) follow where the key
//! is not always read.
//!
//! More than 400 lines: the table of all keys.

use meshwork_core::launcher::Launch;
use meshwork_pipeline::{Generator, Schedule};
use serde::Serialize;

use super::device::Device;
use super::keys::Fallback::{Derived, Unset};
use super::keys::Interval::{BelowOne, FromOne, NotNegative, Positive, Unit};
use super::keys::ValueKind::{Choice, Count, Double, Number, Switch, Text, Texts, WordOrCount, WordOrCounts, WordOrId};
use super::keys::{Effect, Fallback, Key, OFF, ON, Section, float, int, is, sections};
use super::settings::Settings;
use super::words::{
    AuxScope, CommKind, ContextMethod, ContextOrder, DecayName, Dtype, Elastic, EndOfText, EndOfTextWord, LoraExport,
    LossScaleWord, LossScaling, MatmulDtype, ModelKind, MoeOverflow, MoeRouter, Objective, OffloadWord, OptimizerName,
    Overlong, Quantization, RecomputeWord, Recomputed, ReductionName, RoundingName, SavedDtype, SavedEncoding,
    TextFormat, TokenType, ValidationCompression, VerifySteps, VerifyWord,
};
use super::{conditions, partition, preset};

const BY_PRESET: Fallback = Derived("by preset");
const SCHEDULES: [&str; Generator::ALL.len()] = {
    let mut names = [""; Generator::ALL.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = Generator::ALL[at].name();
        at += 1;
    }
    names
};

sections! {
    /// A configuration that can be run: all values known, in range and consistent.
    ///
    /// ```
    /// use meshwork_train::config::{Args, Config};
    ///
    /// let config = Config::from_args(&Args::parse(["--mesh", "dp=2,pp=2", "--set", "model.preset=small"]))?;
    /// assert_eq!(config.parallelism.world_size(), Some(4));
    /// assert_eq!(config.model.hidden_size, 384);
    /// assert_eq!((config.pipeline.num_microbatches, config.training.micro_batch_size), (4, 2));
    ///
    /// let error = Config::from_toml("[model]\nnum_heads = 3\nheads = 4").unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "model.heads = 4: unknown key; the nearest is model.num_heads\n\
    ///      model.hidden_size = 128: is not divisible by model.num_heads = 3; use a multiple of 3, such as 126 or 129"
    /// );
    /// # Ok::<(), meshwork_train::config::ConfigError>(())
    /// ```
    Config;

    /// The model to train.
    [model] Model {
        /// Size of the model; any other key of the section overrides it.
        preset: String = is("tiny"), Choice(&preset::NAMES), Model;
        /// Architecture.
        kind: ModelKind = BY_PRESET, Choice(ModelKind::WORDS), Model;
        /// Number of token ids.
        vocab_size: usize = BY_PRESET, Count(1), Model;
        /// Number of transformer blocks.
        num_layers: usize = BY_PRESET, Count(1), Model;
        /// Width of the residual stream.
        hidden_size: usize = BY_PRESET, Count(1), Model;
        /// Number of attention heads.
        num_heads: usize = BY_PRESET, Count(1), Model;
        /// Number of key and value heads. In llama they may be fewer than the heads, and divide them: grouped-query
        /// attention.
        num_kv_heads: usize = Derived("by preset, else num_heads"), Count(1), Model;
        /// Width inside the feed-forward layer.
        ffn_hidden_size: usize =
            Derived("by preset, else 4 · hidden_size; llama: 8/3 · hidden_size, rounded up to a multiple of 256"), Count(1), Model;
        /// Tokens per sample, and number of positions.
        seq_len: usize = BY_PRESET, Count(1), Model;
        /// Sliding window of attention, as in Mistral: tokens that a query sees at most, its own and the last before
        /// it. 0: all.
        sliding_window: usize = int(0), Count(0), Model;
        /// Whether the output layer shares the token embedding.
        tie_embeddings: bool = Derived("true; llama: false"), Switch, Model;
        /// Probability of dropping an activation, in gpt2.
        dropout: f64 = float(0.0), Number(BelowOne), Numbers, if GPT2;
        /// Added to the variance, in the norms of llama.
        norm_eps: f64 = float(1e-5), Number(Positive), Model, if LLAMA && KEYS;
        /// Base of the rotary embedding's frequencies, in llama.
        rope_theta: f64 = Derived("by preset, else 10000"), Number(Positive), Model, if LLAMA && KEYS;
        /// Llama 3.1's scaling of rotary frequencies for longer sequences: the low ones are divided by this; 1 = off.
        rope_scaling_factor: f64 = float(1.0), Number(FromOne), Model, if LLAMA && KEYS;
        /// Wavelengths above rope_scaling_original_seq_len divided by this are scaled in full.
        rope_scaling_low_freq_factor: f64 = float(1.0), Number(Positive), Model, if LLAMA && KEYS && SCALED;
        /// Wavelengths below rope_scaling_original_seq_len divided by this are not scaled; those in between are scaled
        /// in part.
        rope_scaling_high_freq_factor: f64 = float(4.0), Number(Positive), Model, if LLAMA && KEYS && SCALED;
        /// Sequence length before scaling.
        rope_scaling_original_seq_len: usize = int(8192), Count(1), Model, if LLAMA && KEYS && SCALED;
        /// Parts of the model that are not trained: words with commas, of embedding, layers.N, layers.A-B (blocks from
        /// 0 on), norm (that in front of the head) and head. They have no gradients and no optimizer states. With tied
        /// embeddings, embedding includes the head.
        freeze: String = is(""), Text, Numbers;
        /// A Hugging Face folder (config.json, model.safetensors) of a decoder to start from: sizes and weights.
        init_from: Option<String> = Unset, Text, Model;
        /// A config.json of Hugging Face, its path or its text, of another family than GPT-2 and Llama: sizes and
        /// layers of a model to train from scratch. init_from sets it where its folder has such a model.
        config: Option<String> = Unset, Text, Model;
    }

    /// Low-rank adapters (LoRA): the weights of the model are frozen, and small matrices beside some of them are
    /// trained. docs/finetune.md says more.
    [lora] Lora {
        /// Rank of the adapters; 0: none.
        rank: usize = int(0), Count(0), Model;
        /// The result of an adapter is scaled by alpha / rank.
        alpha: f64 = float(16.0), Number(Positive), Model, if LORA;
        /// Whether it is scaled by alpha / √rank instead.
        rslora: bool = OFF, Switch, Model, if LORA;
        /// The linear layers that have an adapter, by the names of PEFT (target_modules), with commas: q_proj,v_proj of
        /// a Llama, c_attn of a GPT-2. all-linear: all of the blocks.
        targets: String = is("all-linear"), Text, Model, if LORA;
        /// Probability of dropping an element of the input of an adapter.
        dropout: f64 = float(0.0), Number(BelowOne), Numbers, if LORA;
        /// How the frozen matrices of linear layers are stored: none, as other weights; bf16, in two bytes each; int8
        /// or nf4, in 8 or 4 bits and a scale for each block of lora.block_size (QLoRA). Every layer restores its
        /// matrix before it computes with it; one in bf16 is widened as products read it, but for experts.
        quantization: Quantization = is("none"), Choice(Quantization::WORDS), Numbers, if LORA;
        /// Elements of a whole matrix that share a scale.
        block_size: usize = int(64), Count(1), Numbers, if LORA && QUANTIZED;
        /// Whether scales are stored in 8 bits instead of 32: five of exponent and three of mantissa.
        double_quantization: bool = OFF, Switch, Numbers, if LORA && NF4;
        /// A folder of PEFT (adapter_config.json, adapter_model.safetensors) to go on from: settings and weights. An
        /// adapter of another base than model.init_from is refused.
        init_from: Option<String> = Unset, Text, Model;
        /// What checkpoint.export writes: merged, the model with the adapters added to its weights; or adapter, a
        /// folder of PEFT with the adapters alone.
        export: LoraExport = is("merged"), Choice(LoraExport::WORDS), Output, if LORA && EXPORTS;
    }

    /// Degrees of the axes of the mesh, with the mesh string merged in.
    [parallelism] Parallelism {
        /// Data parallel degree.
        dp: usize = int(1), Count(1), Rounding;
        /// Tensor parallel degree.
        tp: usize = int(1), Count(1), Rounding;
        /// Pipeline parallel degree.
        pp: usize = int(1), Count(1), Rounding;
        /// Context parallel degree.
        /// Its ranks cut every sequence, from the embedding to the loss.
        cp: usize = int(1), Count(1), Rounding;
        /// Expert parallel degree: how many ranks of dp share out the experts. It divides dp and moe.num_experts. Where
        /// it does not divide dp, all ranks of cp do, and ranks of dp for the rest.
        ep: usize = int(1), Count(1), Rounding;
        /// Shard the regions between tensor-parallel blocks over tp, along the sequence.
        sequence_parallel: bool = OFF, Switch, Rounding, if TP;
        /// What ranks of dp and cp share out instead of holding it whole (ZeRO): 0 nothing, 1 optimizer states, 2 also
        /// gradients, 3 also weights.
        zero_stage: usize = int(0), Count(0), Rounding;
        /// Ranks of dp that share it out, with their ranks of cp; each such group has all of it. 0: all of dp.
        zero_group: usize = int(0), Count(0), Rounding;
        /// What ranks of cp exchange in attention: all_gather, keys and values of all tokens; all_to_all (Ulysses),
        /// heads for tokens, where each rank has a multiple of cp heads of queries; ring, keys and values from rank to
        /// rank while attention computes; hybrid, a ring of all_to_all; auto, the method that sends the fewest bytes
        /// that computation does not hide. With cp = 1, a method other than none sums gradients in the blocks of a
        /// sequence that is cut: canonical numerics then have the bits of any cp.
        context_parallel_method: ContextMethod = Derived("all_gather with cp above 1, else none"), Choice(ContextMethod::WORDS), Rounding;
        /// Places of the ring of hybrid: it divides cp, and the ranks of a place exchange heads for tokens.
        ring_degree: usize = Derived("hybrid: the least for which heads fit, else 1"), Count(1), Rounding, if HYBRID;
        /// How tokens lie before cp cuts a sequence: zigzag, an early and a late part on each rank, for equal work
        /// under the causal mask; contiguous, by default with a window no longer than the part of a rank; by_document,
        /// chosen for each micro-batch so that ranks have equal work with data.documents = "attention", else zigzag.
        context_parallel_order: ContextOrder = Derived("zigzag; contiguous with a short window"), Choice(ContextOrder::WORDS), Rounding, if CP && ORDERED;
        /// Tensor parallel degree inside an expert: 1, whole experts on every rank of tp, or tp.
        expert_tensor_parallel: usize = int(1), Count(1), Rounding, if EXPERTS;
        /// What becomes smaller where a launcher starts fewer ranks than the mesh has: off, nothing, and the run is
        /// refused; dp, the degree dp, with the batch and the order of samples as they are. A start with all ranks has
        /// the whole mesh again. docs/clusters.md says more.
        elastic: Elastic = is("off"), Choice(Elastic::WORDS), Speed;
    }

    /// Experts in place of feed-forward layers.
    [moe] Moe {
        /// Experts of a layer; 0: none.
        num_experts: usize = Derived("by preset, else 0"), Count(0), Model;
        /// Experts of a token: always 1 with switch, 2 with gshard.
        top_k: usize = Derived("by preset, else 2; switch: 1"), Count(1), Model, if EXPERTS;
        /// How tokens find their experts. expert_choice compares a token with later ones: not for text.
        router: MoeRouter = Derived("by preset, else topk"), Choice(MoeRouter::WORDS), Model, if EXPERTS;
        /// Tokens of a sequence that an expert takes, over their even share. 0: all that come.
        capacity_factor: f64 = Derived("by preset, else 0"), Number(NotNegative), Model, if EXPERTS;
        /// What becomes of tokens over the capacity: they pass the expert by, or each goes to its next best expert with
        /// room.
        overflow: MoeOverflow = is("drop"), Choice(MoeOverflow::WORDS), Model, if EXPERTS && CAPACITY;
        /// Factor of the loss that balances the load.
        aux_loss_coeff: f64 = Derived("by preset, else 0.01; bias and expert_choice: 0"), Number(NotNegative), Numbers, if EXPERTS;
        /// Factor of the loss that keeps the router's logits small.
        z_loss_coeff: f64 = float(0.0), Number(NotNegative), Numbers, if EXPERTS;
        /// Every so many layers have experts, the last of them first.
        every_n_layers: usize = Derived("by preset, else 1"), Count(1), Model, if EXPERTS;
        /// The first layers, of which none has experts, as in DeepSeek-V3.
        first_dense_layers: usize = int(0), Count(0), Model, if EXPERTS;
        /// Experts that every token goes to, beside its own.
        num_shared_experts: usize = Derived("by preset, else 0"), Count(0), Model, if EXPERTS;
        /// Width inside an expert.
        expert_hidden_size: usize = Derived("by preset, else model.ffn_hidden_size"), Count(1), Model, if EXPERTS;
        /// What a step adds to or takes from the bias of an expert, with router bias.
        bias_update_rate: f64 = Derived("0.001 with router bias, else 0"), Number(NotNegative), Numbers, if EXPERTS;
        /// The tokens whose load the balancing loss counts. global_batch depends on how the batch is cut.
        aux_loss_scope: AuxScope = is("sequence"), Choice(AuxScope::WORDS), Numbers, if EXPERTS && BALANCES;
        /// The router's input is multiplied by numbers from 1 - jitter to 1 + jitter, in training.
        jitter: f64 = float(0.0), Number(BelowOne), Numbers, if EXPERTS;
        /// Whether the weights of a token's experts add up to 1, with router topk.
        normalize_top_k: bool = ON, Switch, Model, if EXPERTS;
        /// Groups of consecutive experts, of which a token chooses among the best.
        num_groups: usize = Derived("by preset, else 1"), Count(1), Model, if EXPERTS && GROUPS;
        /// Groups among which a token chooses.
        top_groups: usize = Derived("by preset, else num_groups"), Count(1), Model, if EXPERTS && GROUPS;
        /// Factor of the weights of chosen experts.
        routed_scaling: f64 = Derived("by preset, else 1"), Number(Positive), Model, if EXPERTS;
    }

    /// How the layers are cut into stages, and in which order the stages run.
    [pipeline] Pipeline {
        /// Order of forward and backward passes.
        schedule: String = is("1f1b"), Choice(&SCHEDULES), Rounding;
        /// A synchronous schedule of your own in the text form of docs/schedules.md, used instead of schedule. It fixes
        /// the number of micro-batches.
        schedule_file: Option<String> = Unset, Text, Rounding;
        /// Model chunks per pipeline rank: 2 for interleaved_1f1b and breadth_first if not given, always 2 for zb_v and
        /// dualpipe_v, else 1.
        virtual_stages: usize = Derived("by schedule"), Count(1), Rounding;
        /// Micro-batches of a step, per data-parallel rank.
        num_microbatches: usize = Derived("by batch and schedule"), Count(1), Rounding;
        /// Layers of each stage. uniform: as even as possible. cost: minimises the largest cost of any rank, counting
        /// the embedding, the head and the loss, and frozen parts as trained ones. A list: as given. With cost and in a
        /// list, a stage may have no layer. The embedding is on the first stage, head and loss on the last.
        partition: Vec<usize> = is("uniform"), WordOrCounts(partition::WORDS), Rounding, if CHUNKS;
        /// Number of ranks of each stage, with schedule 1f1b. Replicas take micro-batches in turn. The numbers add up
        /// to pp, as 3 + 1 in [3, 1].
        replication: Vec<usize> = is("none"), WordOrCounts(&["none"]), Rounding;
        /// Whether, in pipedream, all stages use the version of the weights that the first stage had when the
        /// micro-batch entered.
        vertical_sync: bool = OFF, Switch, Numbers;
        /// Whether a hidden state that is the same on every tp rank crosses stages once, in parts that are gathered on
        /// arrival.
        scatter_gather: bool = ON, Switch, Speed, if TP && PP;
    } beside {
        /// The schedule in `schedule_file`.
        own_schedule: Option<Schedule>,
    }

    /// Steps, batch and numerics.
    [training] Training {
        /// Number of steps; 0 validates and reports without training.
        steps: u64 = int(100), Count(0), Output;
        /// What is learnt. pretrain: every token of texts. sft: the answers of examples, which are JSON lines of
        /// messages, or of a prompt and a completion. dpo: to prefer one of two answers, of JSON lines of a prompt, a
        /// chosen and a rejected answer; the model has adapters (lora.rank). docs/finetune.md has them.
        objective: Objective = is("pretrain"), Choice(Objective::WORDS), Numbers;
        /// Samples per step, over all ranks: dp · num_microbatches · micro_batch_size.
        global_batch_size: usize = int(16), Count(1), Numbers;
        /// Samples per micro-batch.
        micro_batch_size: usize = Derived("by batch and micro-batches"), Count(1), Rounding;
        /// Seed of initialisation, sample order and dropout.
        seed: u64 = int(1234), Count(0), Numbers;
        /// Type in which weights, activations and their gradients are stored and sent. bf16 and f16: half of the memory
        /// and traffic; every operation computes in f32, and the optimizer keeps weights in f32 (mixed precision).
        dtype: Dtype = is("f32"), Choice(Dtype::WORDS), Numbers;
        /// Type of the operands of matrix products and attention: tf32 rounds them to 11 bits and bf16 to 8, and both
        /// add up in f32. With dtype f32 and bf16, activations that only products read are stored rounded; everything
        /// else that is kept or sent is f32. tf32 is for the tensor cores of GPUs, and no faster on CPUs.
        matmul_dtype: MatmulDtype = Derived("bf16 with dtype bf16, else f32"), Choice(MatmulDtype::WORDS), Numbers;
        /// Type in which gradients of weights are added up over micro-batches and summed over ranks: f32, or that of
        /// dtype, in half of the memory and traffic.
        reduce_dtype: Dtype = is("f32"), Choice(Dtype::WORDS), Numbers;
        /// What the loss is multiplied by before backward, so that small gradients are no zeros in f16. dynamic: halved
        /// when a gradient overflows, in a step that is then skipped, and doubled after loss_scale_growth_interval
        /// steps without.
        loss_scale: LossScaling = Derived("dynamic with dtype f16, else 1"), WordOrCount(LossScaleWord::WORDS), Numbers, if IN_HALVES;
        /// The dynamic loss scale of the first step, a power of two.
        loss_scale_initial: u64 = int(65536), Count(1), Numbers, if DYNAMIC;
        /// Steps without overflow after which the dynamic loss scale is doubled.
        loss_scale_growth_interval: u64 = int(2000), Count(1), Numbers, if DYNAMIC;
        /// Global gradient norm above which gradients are scaled down; 0 = off.
        max_norm: f64 = float(1.0), Double(NotNegative), Numbers;
        /// Order of sums. fast: one mesh gives the same bits on every run. canonical: every mesh, schedule and number
        /// of micro-batches gives the same bits, at a price in time and memory.
        numerics: String = is("fast"), Choice(&["fast", "canonical"]), Numbers;
        /// After every so many steps ranks compare the replicas of weights and optimizer states, by hash; 0: never. A
        /// difference ends the run, with rank, parameter and step. Cheaper than verify, which compares all values.
        check_replicas_every: u64 = int(0), Count(0), Output;
        /// N: one step in N is repeated on another mesh, by other ranks, and compared bit for bit: loss, gradients,
        /// weights, optimizer states; 0: never. A difference ends the run, with step, parameter, element and
        /// ranks. It costs one more step, and while it runs the memory of a second trainer. It needs canonical
        /// numerics.
        replay_every: u64 = int(0), Count(0), Output;
        /// The mesh on which it is run again, of as many ranks, such as dp=4; unset: the same, with each rank in the
        /// place of the one before it.
        replay_mesh: Option<String> = Unset, Text, Output, if REPLAYS;
        /// Steps in which ranks compare, by hash, every value that is said to be the same on all of them: activations,
        /// gradients, weights, optimizer states. off: none; first_step: the first of the run; N: every N-th. Batches
        /// are compared in every step. Unless it is off, the step after a load is verified too, and before the first
        /// step the model is held against itself on one rank, and a micro-batch against its samples one by one.
        verify: VerifySteps = is("first_step"), WordOrCount(VerifyWord::WORDS), Speed;
        /// Validations in a row without a lower loss than the best one, after which the run ends; 0: it takes all of
        /// its steps.
        patience: u64 = int(0), Count(0), Output, if VALIDATES;
    }

    /// Direct preference optimisation: -ln σ(margin) of each pair of answers. docs/finetune.md says more.
    [dpo] Dpo {
        /// How much a deviation from the frozen model weighs: the margin is beta · ((ln p - ln p_frozen) of the chosen
        /// answer - the same of the rejected one).
        beta: f64 = float(0.1), Number(Positive), Numbers, if DPO;
        /// Share of pairs whose answers are taken to be the wrong way round, below 0.5: the loss is (1 - share) · -ln
        /// σ(margin) + share · -ln σ(-margin).
        label_smoothing: f64 = float(0.0), Number(BelowOne), Numbers, if DPO;
    }

    /// The update rule.
    [optimizer] Optimizer {
        /// Update rule. muon and adam8bit are for the matrices of hidden layers and leave everything else to adamw.
        name: OptimizerName = is("adamw"), Choice(OptimizerName::WORDS), Numbers;
        /// Full learning rate.
        lr: f64 = float(3e-4), Number(NotNegative), Numbers;
        /// Decay of the mean gradient of adamw, adam8bit and lamb.
        beta1: f64 = float(0.9), Number(BelowOne), Numbers, if ADAM;
        /// Decay of the mean squared gradient of adamw, adam8bit and lamb.
        beta2: f64 = float(0.95), Number(BelowOne), Numbers, if ADAM;
        /// Added to the denominator of adamw, adam8bit and lamb.
        eps: f64 = float(1e-8), Number(Positive), Numbers, if ADAM;
        /// Weight decay, on weights only; L2 in sgd, part of the scaled step in lamb, decoupled in the others.
        weight_decay: f64 = float(0.1), Number(NotNegative), Numbers;
        /// Momentum of sgd.
        momentum: f64 = float(0.0), Number(BelowOne), Numbers, if SGD;
        /// Momentum of muon.
        muon_momentum: f64 = float(0.95), Number(BelowOne), Numbers, if MUON;
        /// Whether steps of adafactor are relative to the size of a parameter and fall as 1/√t, with optimizer.lr as
        /// the ceiling.
        relative_step: bool = ON, Switch, Numbers, if ADAFACTOR;
        /// Decay of adafactor's mean squared gradient: 1 - t^-decay_rate.
        decay_rate: f64 = float(0.8), Number(Positive), Numbers, if ADAFACTOR;
        /// Root mean square above which adafactor scales a step down.
        clip_threshold: f64 = float(1.0), Number(Positive), Numbers, if ADAFACTOR;
        /// Consecutive elements of a parameter that share a scale in adam8bit.
        block_size: usize = int(2048), Count(1), Numbers, if ADAM8BIT;
    }

    /// The learning rate over the steps.
    [lr_scheduler] LrScheduler {
        /// Steps of linear warm-up.
        warmup_steps: u64 = int(0), Count(0), Numbers;
        /// Shape of the decay after the warm-up.
        decay: DecayName = is("none"), Choice(DecayName::WORDS), Numbers;
        /// Step after which the rate stays at its floor; counts the warm-up.
        decay_steps: u64 = Derived("training.steps"), Count(1), Numbers, if DECAYS;
        /// The floor, as a share of optimizer.lr.
        min_lr_factor: f64 = float(0.0), Number(Unit), Numbers, if DECAYS;
    }

    /// The training data.
    [data] Data {
        /// A UTF-8 file, JSON lines with a text in each, a JSON array of texts, a folder of texts, a .bin file of
        /// tokens, or a Megatron dataset (.idx beside .bin); unset: the Cicero text of the lipsum crate. In a folder,
        /// the files that end in .txt, .text, .md, .markdown, .rst, .tex, .org, .jsonl or .ndjson are read; the others
        /// are skipped and counted. docs/data.md has the formats.
        path: Option<String> = Unset, Text, Data;
        /// Several paths instead of one, each with its weight behind a colon (without one: 1): ["web.jsonl:0.7",
        /// "books.bin:0.3"]. Samples come from them in this proportion, in every prefix of the run to within one
        /// sample.
        sources: Vec<String> = Unset, Texts, Data;
        /// What texts are. auto: what each is by its content, JSON or one document. text: one document each, also where
        /// it is JSON. json_lines: a document a line.
        format: TextFormat = is("auto"), Choice(TextFormat::WORDS), Data;
        /// The key of the text in an object of JSON.
        text_key: String = is("text"), Text, Data;
        /// Whether documents of JSON that cannot be read are left out, counted and told; else the first of them ends
        /// the run.
        skip_bad_lines: bool = OFF, Switch, Data;
        /// The type of the ids in a .bin file without a header, little-endian. auto: u16; ids that look wider are
        /// refused.
        token_type: TokenType = is("auto"), Choice(TokenType::WORDS), Data;
        /// bytes, gpt2, or the path of a tokenizer.json or of its folder; the last two need a build with the feature
        /// tokenizers.
        tokenizer: String = Derived("the tokenizer.json of model.init_from, else bytes"), Text, Data;
        /// The id that ends a document: put behind each document of a text, and taken for the end of one in a .bin
        /// file. auto: that of the tokenizer, as the files beside it say, if it has one.
        end_of_text: EndOfText = is("auto"), WordOrId(EndOfTextWord::WORDS), Numbers;
        /// The id that begins a document: put before each document of a text. auto: the one that the tokenizer puts
        /// there by itself, as those of Llama do; most put none.
        beginning_of_text: EndOfText = is("auto"), WordOrId(EndOfTextWord::WORDS), Data;
        /// What the boundary between two documents inside a sample means. stream: nothing. loss: the first token of a
        /// document is no target, so that nothing is learnt across the boundary. positions: also, positions start anew
        /// in each document. attention: also, tokens see only those of their own document.
        documents: String = Derived("stream; with training.objective = sft or dpo: attention"), Choice(&["stream", "loss", "positions", "attention"]), Numbers;
        /// Folder for the tokens of long texts, which are tokenised once; unset: beside the text.
        cache_dir: Option<String> = Unset, Text, Speed;
        /// A file with the chat template that makes a text of messages; unset: the one of the tokenizer's folder
        /// (chat_template.jinja, or that of tokenizer_config.json).
        chat_template: Option<String> = Unset, Text, Data, if EXAMPLES;
        /// The day that strftime_now of a chat template tells, as 2026-01-31; unset: the day on which the run starts.
        date: Option<String> = Unset, Text, Data, if EXAMPLES;
        /// What becomes of an example of more than model.seq_len tokens: truncate cuts off its end, of a pair of
        /// answers the end of each, at half of model.seq_len; skip leaves it out. Both are counted and told.
        overlong: Overlong = is("truncate"), Choice(Overlong::WORDS), Data, if EXAMPLES;
        /// Whether each epoch permutes the samples, by seed and epoch.
        shuffle: bool = ON, Switch, Numbers;
    } beside {
        /// Whether `tokenizer` was given, and not derived.
        tokenizer_given: bool,
    }

    /// How much of the data is held out, and when the model is evaluated on it.
    [validation] Validation {
        /// Steps between validations; 0 = never, and nothing is held out.
        every: u64 = int(0), Count(0), Output;
        /// Batches per validation; 0 = all that fit.
        steps: u64 = int(0), Count(0), Output, if VALIDATES;
        /// Share of each token stream, at its end, that is held out; with training.objective = sft or dpo, share of the
        /// examples. 0: nothing, and validation reads the training data, in their own order.
        fraction: f64 = float(0.05), Double(BelowOne), Numbers, if VALIDATES;
        /// Where activations between stages, gathers of weights or tokens of experts are compressed, how validation
        /// treats them. as_trained: it compresses them too. off: they are sent as they are. both: one pass of each; the
        /// second is loss_uncompressed in metrics.
        compression: ValidationCompression = is("as_trained"), Choice(ValidationCompression::WORDS), Output, if FORWARD && VALIDATES;
    }

    /// Ways to save memory.
    [memory] Memory {
        /// What backward recomputes instead of keeping it. none: nothing. selective: norms and activation functions.
        /// The others recompute these too. full: each layer from its input. sqrt: √n groups of the n layers of a stage.
        /// stage: the whole stage. A number: the first layers of each stage, as many as that. Recomputed activations
        /// are bitwise identical.
        recompute: Recomputed = is("none"), WordOrCount(RecomputeWord::WORDS), Speed, if SELECTIVE;
        /// Type in which forward keeps the activations that backward reads: f32 as they are, bf16 and f16 rounded, in
        /// half of the memory. Forward computes with exact values, and so does a recomputed one. Each of them is
        /// rounded by up to 0.4% in bf16, and 0.05% in f16.
        saved_dtype: SavedDtype = is("f32"), Choice(SavedDtype::WORDS), Numbers, if IN_F32;
        /// In what form forward keeps them. dense: as vectors. sparse: a bit for each element and those that are not
        /// zero, where that takes less memory; outputs of ReLU and of dropout have many zeros. Backward reads the same
        /// bits.
        saved_encoding: SavedEncoding = is("dense"), Choice(SavedEncoding::WORDS), Speed, if ZEROS;
        /// Tokens of a sequence whose logits exist at a time in training; 0 = those of all. The loss and its gradient
        /// are computed chunk by chunk from what the head reads, and backward computes the logits once more. The loss
        /// of a step keeps its bits, the gradient of the head is summed in another order.
        loss_chunk: usize = int(0), Count(0), Rounding;
        /// Tokens of a sequence whose inner features of a feed-forward network, or rows of experts, exist at a time; 0
        /// = those of all. A layer computes its result block by block, and every block once more in backward. Gradients
        /// of its weights are summed in another order, in canonical numerics in one that does not depend on the mesh.
        sequence_block: usize = int(0), Count(0), Rounding;
        /// What leaves memory while it is not needed, for files in offload_dir. none: nothing. optimizer: states of the
        /// optimizer, which a step reads and writes page by page. activations: what forward keeps for backward, layer
        /// by layer. samples: the activations that compress.aqsgd keeps, micro-batch by micro-batch. all: these, and
        /// gradients of weights, bucket by bucket. It changes no bit of a run.
        offload: OffloadWord = is("none"), Choice(OffloadWord::WORDS), Speed, if SAMPLES;
        /// Folder for these files, one for each rank. They are gone when the run ends, and runs may share the folder.
        /// Without a folder, a CUDA device takes pinned memory of the host; other devices need one.
        offload_dir: Option<String> = Unset, Text, Speed, if OFFLOADS;
        /// Bytes of weights, gradients, optimizer states, activations and buffers that a rank may have at once; 0 = no
        /// limit. A run that is predicted to take more does not start, and the error says which settings fit.
        /// --plan-memory shows them too.
        limit_bytes: u64 = int(0), Count(0), Speed;
    }

    /// Checkpoints of a run.
    [checkpoint] Checkpoint {
        /// Folder of the checkpoints. One is saved at the end of the run too, also when it is stopped.
        dir: Option<String> = Unset, Text, Output;
        /// Steps between checkpoints; 0 = only at the end.
        every: u64 = int(0), Count(0), Output, if SAVES;
        /// Steps between snapshots in memory; 0 = none. Each process keeps the slices of the state that its ranks hold,
        /// and those that another process holds alone: where processes are lost and the others go on in place, they go
        /// on from the last snapshot, without a disk. A snapshot is taken at the start too. Ranks are in several
        /// processes.
        peer_every: u64 = int(0), Count(0), Output, if ELASTIC;
        /// Checkpoints to keep.
        keep: u64 = int(2), Count(1), Output, if SAVES;
        /// Whether the best one is kept too: each validation whose loss is below all before it is followed by a
        /// checkpoint, which stays until the next such one. At its end, the run goes back to the best weights for the
        /// sample and for export.
        best: bool = OFF, Switch, Output, if SAVES && VALIDATES;
        /// Whether to continue from the newest checkpoint in dir that is whole, on any mesh. If there is none, the run
        /// starts anew.
        resume: bool = OFF, Switch, Output;
        /// What may differ from the run that is resumed: names of keys and sections, with commas, such as "optimizer,
        /// training.max_norm"; batch and seed are short for training.global_batch_size and training.seed. With
        /// optimizer, states that do not fit the update rule are dropped; with data, streams begin their next epoch
        /// where there is no other way on.
        permit: String = is(""), Text, Output, if RESUMES;
        /// Whether SIGTERM ends the run as Ctrl-C does: after the step under way, saved, with exit code 0. Otherwise it
        /// ends the run at once.
        on_sigterm: bool = ON, Switch, Output, if SAVES;
        /// Folder for the model in Hugging Face format, written after the last step; no other key of the section is
        /// needed. It appears whole, or not at all.
        export: Option<String> = Unset, Text, Output;
        /// Type of the weights there.
        export_dtype: Dtype = Derived("that of model.init_from, else f32"), Choice(Dtype::WORDS), Output, if EXPORTS;
        /// Whether a model that lies in that folder is replaced. Otherwise a folder with one is refused.
        export_overwrite: bool = OFF, Switch, Output, if EXPORTS;
    }

    /// What a run measures, and where it writes it.
    [metrics] Metrics {
        /// Whether to time every operation, print a table of where a step's time goes, and write its timeline.
        profile: bool = OFF, Switch, Output;
        /// Number of steps to profile; the first step of the run is not one of them.
        profile_steps: u64 = int(3), Count(1), Output, if PROFILES;
        /// File for the timeline of a profile, to be opened in Perfetto.
        trace: String = is("trace.json"), Text, Output, if PROFILES;
        /// File for a picture of the pipeline of a profile, with more than one stage: predicted and measured timelines.
        schedule: String = is("schedule.svg"), Text, Output, if PROFILES && PP;
        /// File for the time and memory of each layer, measured on one rank before the run, in PipeDream's format:
        /// examples/partition reads it.
        layer_profile: Option<String> = Unset, Text, Output;
        /// Folder for event files that TensorBoard reads: loss, norm, learning rate, speed, memory and communication of
        /// every step.
        tensorboard: Option<String> = Unset, Text, Output;
        /// Tokens that the trained model writes at the end of a run; 0 = none.
        sample_tokens: u64 = int(160), Count(0), Output;
    }

    /// Communication between ranks.
    [comm] Comm {
        /// Seconds without progress after which a collective gives up on a rank.
        timeout_seconds: f64 = float(60.0), Double(Positive), Speed;
        /// Bytes a second that a rank can send: what --steps 0 and a profile weigh compression by; 0 = do not. It
        /// changes no run.
        bandwidth: f64 = float(0.0), Double(NotNegative), Output, if WEIGHS;
        /// Where the ranks are. auto: in the processes that a launcher (mpirun, srun) has started, joined by MPI, and
        /// without one threads of this process; on GPUs by torchrun too, joined over TCP. threads: each process trains
        /// by itself. tcp: processes that torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, number, joined
        /// without MPI. docs/clusters.md says more.
        kind: CommKind = is("auto"), Choice(CommKind::WORDS), Speed;
        /// Ranks of a process that is joined to others: consecutive ranks, as threads.
        ranks_per_process: usize = int(1), Count(1), Speed;
        /// Who adds up f32 and f64 between processes. tree: meshwork, with the bits of threads. native: MPI, or NCCL on
        /// GPUs, in an order of its own, which canonical numerics refuse; docs/clusters.md says where it is faster.
        reduction: ReductionName = is("tree"), Choice(ReductionName::WORDS), Rounding;
        /// The MPI library, by path or name (libmpi.so.40); unset: the one that fits the launcher, else any that is
        /// found.
        library: Option<String> = Unset, Text, Speed;
        /// A folder for a log of each rank: its place, steps, times and error.
        log_dir: Option<String> = Unset, Text, Output;
    } beside {
        /// The launch that this process belongs to, if MPI joins it to others.
        launch: Option<Launch>,
        /// Ranks of the world, where it has more than the mesh.
        ranks: Option<usize>,
    }

    /// How a CUDA device queues its work. Other devices refuse what is not the default.
    [cuda] Cuda {
        /// Whether work that comes again in each step is captured as CUDA graphs, each queued by one launch. It changes
        /// no number.
        graphs: bool = OFF, Switch, Speed;
        /// Whether the host waits after each kernel and copy, so that an error names the one that failed, and not the
        /// call at which it came out. Slow, and without graphs.
        launch_blocking: bool = OFF, Switch, Speed;
        /// A table of the forms of kernels to run, as scripts/gpu-check.sh tune writes it; unset: the one that is
        /// compiled in.
        tuning: Option<String> = Unset, Text, Rounding;
    }

    /// Lossy compression of what ranks send each other. docs/compression.md has the schemes.
    [compress] Compress {
        /// Activations between stages: none, bf16, fp8:e4m3, quant:4, sign, topk:0.1, randk:0.1, topk:0.1+quant:8 and
        /// others. Rows are samples.
        activations: String = is("none"), Text, Numbers, if CUTS;
        /// Gradients of activations between stages, likewise.
        activation_gradients: String = is("none"), Text, Numbers, if CUTS;
        /// Whether topk sends gradients of activations at the indices of the activations, without their own. Both keep
        /// as much.
        share_indices: bool = OFF, Switch, Numbers;
        /// Layers behind which one rank simulates a cut between stages, as [3, 6, 9]: values are compressed there as if
        /// they were sent. Every mesh then has the numbers of those with these cuts, in canonical numerics bit by bit.
        /// none: only what is sent is compressed.
        virtual_cuts: Vec<usize> = is("none"), WordOrCounts(&["none"]), Numbers, if AT_CUTS;
        /// AQ-SGD: both sides of a cut keep the last activation of every sample, and activations are sent as
        /// differences from it. It takes samples that come again, and 4 bytes for each element of each sample's
        /// activation.
        aqsgd: bool = OFF, Switch, Numbers;
        /// Samples whose activations aqsgd keeps.
        aqsgd_samples: usize = Derived("all training samples"), Count(1), Numbers, if AQSGD;
        /// Gradients of weights over dp, likewise, in each bucket of up to 1 MiB: topk and randk gather messages and
        /// add them; the others send each rank its shard, and gather what it makes of their sum. With ZeRO each rank
        /// gets its slice alone.
        gradients: String = is("none"), Text, Numbers, if DP;
        /// Weights that ranks gather with parallelism.zero_stage = 3 (ZeRO++): none, quant:8/block256, bf16, fp8:e4m3
        /// and others without a state. All ranks compute with what messages restore to; the optimizer has exact
        /// weights.
        weights: String = is("none"), Text, Numbers, if DP;
        /// Tokens that go to the experts of other ranks (parallelism.ep) and the results that come back: none,
        /// fp8:e4m3, quant:8 and others without a state, each token by itself.
        dispatch: String = is("none"), Text, Numbers, if EXPERTS && EP;
        /// The gradients of both, likewise.
        dispatch_gradients: String = is("none"), Text, Numbers, if EXPERTS && EP;
        /// How what was lost is brought back, wherever something is compressed: none, ef (error feedback), ef21, or
        /// ef21m:0.1 (ef21 of a moving average with that weight of the new value).
        feedback: String = is("none"), Text, Numbers, if COMPRESSES;
        /// How quantisation rounds. stochastic: up or down at random, so that the mean is right, also where a scheme
        /// does not say so.
        rounding: RoundingName = is("nearest"), Choice(RoundingName::WORDS), Numbers, if COMPRESSES;
        /// The first step that compresses.
        start_step: u64 = int(1), Count(1), Numbers, if COMPRESSES;
    }

    /// Details of canonical numerics.
    [numerics] Numerics {
        /// Blocks of canonical sums along a dim that tp may cut: tp must divide them, leaving each rank a power of two.
        reduction_blocks: usize = int(8), Count(1), Numbers, if CANONICAL;
    }
}
