//! Wrongly distributed programs, each beside its corrected form. Every wrong one must be refused before it computes
//! anything, with a message that says what is wrong and what would be right, on two ranks per axis and on one: what a
//! laptop accepts must be right on a cluster.
//!
//! More than 400 lines: one short case for each misuse.

use Ty::{Invariant as I, Partial as P, Replicate as R, Shard as S};
use meshwork_core::{Axis, DType, Mesh, Rank, Ty, Types};
use meshwork_nn::Embedding;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::op::Documents;
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Normaliser, Position, Weights};
use meshwork_tensor::{Declarations, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use meshwork_tensor_parallel::{Region, VocabParallelEmbedding};
use std::sync::Arc;

const TP: Axis = Axis::Tp;
const DP: Axis = Axis::Dp;
const BATCH: usize = 2;
const SEQ: usize = 4;
const HIDDEN: usize = 8;
const VOCAB: usize = 12;

/// The environment of a program: a tape on a mesh of tp and dp, shapes only, and some parameters.
struct Bench {
    tape: Tape,
    declared: Arc<Declarations>,
    degree: usize,
}

impl Bench {
    fn new(degree: usize) -> Self {
        let mut all = Declarations::new();
        let mut declare = |name: &str, dims: &[usize], placement: Placement| {
            all.declare(name, dims, placement, Role::Weight, Init::Zeros).unwrap();
        };
        let cut = |dim| Placement::replicated().shard(TP, dim);
        declare("column", &[HIDDEN, HIDDEN], cut(0));
        declare("row", &[HIDDEN, HIDDEN], cut(1));
        declare("square", &[HIDDEN, HIDDEN], Placement::replicated());
        declare("bias", &[HIDDEN], Placement::replicated());
        declare("gamma", &[HIDDEN], Placement::replicated());
        declare("cut_gamma", &[HIDDEN], cut(0));
        declare("table", &[VOCAB, HIDDEN], cut(0));
        declare("gated", &[HIDDEN, 2, HIDDEN], cut(0));
        declare("gated_row", &[HIDDEN, 2, HIDDEN], cut(2));
        declare("gated_pairs", &[HIDDEN, 2, HIDDEN], cut(1));
        let rank = Arc::new(Rank::recording(&Mesh::new([(TP, degree), (DP, degree)]).unwrap(), 0).unwrap());
        let (device, layout, declared) = (Meta::device(), [all.ids().collect()], Arc::new(all));
        let params = Params::new(Arc::clone(&declared), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
        Self { tape, declared, degree }
    }

    fn param(&self, name: &str) -> Var {
        self.tape.param(self.declared.find(name).unwrap()).unwrap()
    }

    /// A value of the given extents on this rank of dp, with a type on tp. The batch is cut over dp.
    fn value(&self, extents: &[usize], ty: Ty) -> Var {
        let mut local = extents.to_vec();
        if let S(dim) = ty {
            local[dim] /= self.degree;
        }
        self.tape.input(Tensor::zeros(self.tape.device(), DType::F32, &local[..]).unwrap(), types(ty))
    }

    /// The hidden state `[batch, seq, hidden]`.
    fn x(&self, ty: Ty) -> Var {
        self.value(&[BATCH, SEQ, HIDDEN], ty)
    }

    /// Token ids or targets `[batch, seq]`, the same on every rank of tp.
    fn tokens(&self) -> Var {
        self.tape.constant(Tensor::zeros(self.tape.device(), DType::I32, [BATCH, SEQ]).unwrap(), types(I))
    }
}

fn types(tp: Ty) -> Types {
    Types::new(&[(TP, tp), (DP, S(0))])
}

/// Runs a program on one rank and as one of two ranks per axis: refused both times, in these words.
#[track_caller]
fn refused<T>(wrong: impl Fn(&Bench) -> Result<T>, message: &str) {
    for degree in [1, 2] {
        let error = wrong(&Bench::new(degree)).err().unwrap_or_else(|| panic!("accepted at degree {degree}"));
        assert_eq!(error.to_string(), message, "at degree {degree}");
    }
}

#[track_caller]
fn accepted<T>(right: impl Fn(&Bench) -> Result<T>) {
    for degree in [1, 2] {
        if let Err(error) = right(&Bench::new(degree)) {
            panic!("refused at degree {degree}: {error}");
        }
    }
}

#[test]
fn forgetting_copy_before_a_column_parallel_layer() {
    refused(
        |b| b.x(I).linear(&b.param("column"), 1),
        "linear: on axis tp, x is Invariant and weight is Shard(0): each rank's gradient of x would hold only its own \
         shard's share; copy(I→R) x before this column-parallel product",
    );
    accepted(|b| b.x(I).copy(TP)?.linear(&b.param("column"), 1));
    accepted(|b| b.x(S(1)).all_gather(TP, 1)?.linear(&b.param("column"), 1));
}

#[test]
fn using_a_row_parallel_output_before_its_all_reduce() {
    let partial = |b: &Bench| b.x(S(2)).linear(&b.param("row"), 1);
    refused(
        |b| partial(b)?.copy(TP)?.linear(&b.param("column"), 1),
        "copy: on axis tp, x is Partial and copy takes Invariant; all_reduce or reduce_scatter it first",
    );
    refused(
        |b| partial(b)?.linear(&b.param("column"), 1),
        "linear: on axis tp, one of x and weight is Partial and the other Shard(0): a value used before its reduction; \
         all_reduce or reduce_scatter the Partial one first",
    );
    accepted(|b| partial(b)?.all_reduce(TP)?.copy(TP)?.linear(&b.param("column"), 1));
    accepted(|b| partial(b)?.reduce_scatter(TP, 1)?.all_gather(TP, 1)?.linear(&b.param("column"), 1));
}

#[test]
fn a_bias_added_to_a_partial_value_on_every_rank() {
    refused(
        |b| b.x(P).bias(&b.param("bias")),
        "bias: on axis tp, x is Partial and bias is Replicate: bias would be counted once per rank; \
         all_reduce or reduce_scatter x over tp first",
    );
    accepted(|b| b.x(P).all_reduce(TP)?.bias(&b.param("bias")));
    accepted(|b| b.x(P).reduce_scatter(TP, 1)?.bias(&b.param("bias")));
}

#[test]
fn what_is_in_one_pass_with_a_product_that_is_not_its_own() {
    refused(
        |b| b.x(S(2)).linear_bias(&b.param("row"), &b.param("bias"), 1),
        "linear_bias: on axis tp, x · weightᵀ is Partial and bias is Replicate: bias would be counted once per rank; \
         all_reduce or reduce_scatter x · weightᵀ over tp first",
    );
    accepted(|b| b.x(S(2)).linear(&b.param("row"), 1)?.all_reduce(TP)?.bias(&b.param("bias")));
    refused(
        |b| b.x(R).linear_gelu(&b.param("column"), &b.param("bias"), 1),
        "linear_bias_gelu: on axis tp, x · weightᵀ is Shard(2) and bias is Replicate: they do not hold the same elements; \
         bring both to the same type first",
    );
    refused(
        |b| b.x(I).linear_gelu(&b.param("column"), &b.param("cut_gamma"), 1),
        "linear_bias_gelu: on axis tp, x is Invariant and weight is Shard(0): each rank's gradient of x would hold only \
         its own shard's share; copy(I→R) x before this column-parallel product",
    );
    accepted(|b| b.x(I).copy(TP)?.linear_gelu(&b.param("column"), &b.param("cut_gamma"), 1));
    refused(
        |b| b.x(S(2)).linear_gelu(&b.param("row"), None, 1),
        "linear_gelu: on axis tp, x · weightᵀ is Partial, and linear_gelu of a sum is not the sum of linear_gelu; \
         all_reduce or reduce_scatter x · weightᵀ over tp first",
    );
    accepted(|b| b.x(I).copy(TP)?.linear_gelu(&b.param("column"), None, 1));
}

#[test]
fn gelu_of_a_partial_value() {
    refused(
        |b| b.x(P).gelu(),
        "gelu: on axis tp, x is Partial, and gelu of a sum is not the sum of gelu; \
         all_reduce or reduce_scatter x over tp first",
    );
    accepted(|b| b.x(P).all_reduce(TP)?.gelu());
}

#[test]
fn adding_partial_to_replicate() {
    refused(
        |b| b.x(P).add(&b.x(R)),
        "add: on axis tp, x is Partial and y is Replicate: y would be counted once per rank; \
         all_reduce or reduce_scatter x over tp first",
    );
    refused(
        |b| b.x(P).bias_residual(&b.param("bias"), &b.x(R)),
        "bias_residual: on axis tp, x is Partial and bias is Replicate: bias would be counted once per rank; \
         all_reduce or reduce_scatter x over tp first",
    );
    accepted(|b| b.x(P).all_reduce_replicate(TP)?.add(&b.x(R)));
    accepted(|b| b.x(P).add(&b.x(P)));
}

#[test]
fn attention_over_a_sharded_dim() {
    let qkv = |b: &Bench, ty: Ty| b.value(&[BATCH, SEQ, 3, 2, 4], ty);
    refused(
        |b| qkv(b, S(1)).causal_attention(None, None),
        "causal_attention: on axis tp, dim 1 of qkv is sharded, and causal_attention needs the whole of it on one rank; \
         all_gather qkv along dim 1 first",
    );
    refused(
        |b| qkv(b, S(4)).causal_attention(None, None),
        "causal_attention: on axis tp, dim 4 of qkv is sharded, and causal_attention needs the whole of it on one rank; \
         all_gather qkv along dim 4 first",
    );
    accepted(|b| qkv(b, S(1)).all_gather(TP, 1)?.causal_attention(None, None));
    accepted(|b| qkv(b, S(3)).causal_attention(None, None)); // heads are independent of each other
}

#[test]
fn attention_to_documents_of_other_samples() {
    let documents = |b: &Bench, ty: Ty| {
        let positions = Tensor::zeros(b.tape.device(), DType::I32, [BATCH, SEQ]).unwrap();
        Documents { positions: b.tape.constant(positions, types(ty)), apart: true }
    };
    let qkv = |b: &Bench, ty: Ty| b.value(&[BATCH, SEQ, 3, 2, 4], ty);
    refused(
        |b| qkv(b, S(0)).causal_attention(Some(&documents(b, I)), None),
        "causal_attention: on axis tp, qkv is Shard(0) and positions are Invariant: they do not hold the same tokens; give \
         positions the samples of qkv",
    );
    accepted(|b| qkv(b, S(3)).causal_attention(Some(&documents(b, I)), None));
}

#[test]
fn grouped_attention_of_heads_that_lie_differently() {
    let q = |b: &Bench, ty: Ty| b.value(&[BATCH, SEQ, 4, 4], ty);
    let kv = |b: &Bench, ty: Ty| b.value(&[BATCH, SEQ, 2, 8], ty);
    refused(
        |b| q(b, R).grouped_attention(&kv(b, S(3)), None, None, None),
        "grouped_attention: on axis tp, q is Replicate and kv is Shard(3): they do not hold the same groups; \
         cut the heads of both over tp, or all_gather kv along dim 3",
    );
    refused(
        |b| q(b, S(2)).grouped_attention(&kv(b, I), None, None, None),
        "grouped_attention: on axis tp, q is Shard(2) and kv is Invariant: the gradient of kv would miss the other ranks' \
         share; copy(I→R) kv first",
    );
    refused(
        |b| q(b, S(1)).grouped_attention(&kv(b, S(1)), None, None, None),
        "grouped_attention: on axis tp, dim 1 of q is sharded, and grouped_attention needs the whole of it on one rank; \
         all_gather q along dim 1 first",
    );
    refused(
        |b| q(b, S(2)).grouped_attention(&kv(b, P), None, None, None),
        "grouped_attention: on axis tp, kv is Partial, and grouped_attention of a sum is not the sum of grouped_attention; \
         all_reduce or reduce_scatter kv over tp first",
    );
    accepted(|b| q(b, S(2)).grouped_attention(&kv(b, S(3)), None, None, None)); // whole groups on each rank
    accepted(|b| q(b, S(2)).grouped_attention(&kv(b, S(3)).all_gather(TP, 3)?, None, None, None));
    accepted(|b| q(b, S(2)).grouped_attention(&kv(b, I).copy(TP)?, None, None, None));
    accepted(|b| q(b, R).grouped_attention(&kv(b, S(3)).all_gather(TP, 3)?, None, None, None));
}

#[test]
fn swiglu_of_a_partial_value_and_of_pairs_that_are_cut() {
    refused(
        |b| b.x(S(2)).linear_swiglu(&b.param("gated_row"), 1),
        "linear_swiglu: on axis tp, x · weightᵀ is Partial, and linear_swiglu of a sum is not the sum of linear_swiglu; \
         all_reduce or reduce_scatter x · weightᵀ over tp first",
    );
    refused(
        |b| b.x(R).linear(&b.param("gated_pairs"), 1)?.swiglu(),
        "swiglu: on axis tp, dim 3 of x is sharded, and swiglu needs the whole of it on one rank; \
         all_gather x along dim 3 first",
    );
    accepted(|b| b.x(S(2)).linear(&b.param("gated_row"), 1)?.all_reduce(TP)?.swiglu());
    accepted(|b| b.x(R).linear_swiglu(&b.param("gated"), 1));
}

#[test]
fn rms_norm_over_a_sharded_dim() {
    let norm = |b: &Bench, x: Var| x.rms_norm(&b.param("gamma"), 1e-5);
    refused(
        |b| norm(b, b.x(S(2))),
        "rms_norm: on axis tp, dim 2 of x is sharded, and rms_norm needs the whole of it on one rank; \
         all_gather x along dim 2 first",
    );
    refused(
        |b| b.x(S(1)).rms_norm(&b.param("cut_gamma"), 1e-5),
        "rms_norm: on axis tp, weight is Shard(0): a sharded weight used as if whole; declare weight replicated on tp",
    );
    accepted(|b| norm(b, b.x(S(2)).all_gather(TP, 2)?));
    accepted(|b| norm(b, b.x(S(1)))); // sequence parallel
}

#[test]
fn layer_norm_over_a_sharded_dim() {
    let norm = |b: &Bench, x: Var| x.layer_norm(&b.param("gamma"), &b.param("bias"), 1e-5);
    refused(
        |b| norm(b, b.x(S(2))),
        "layer_norm: on axis tp, dim 2 of x is sharded, and layer_norm needs the whole of it on one rank; \
         all_gather x along dim 2 first",
    );
    refused(
        |b| norm(b, b.x(P)),
        "layer_norm: on axis tp, x is Partial, and layer_norm of a sum is not the sum of layer_norm; \
         all_reduce or reduce_scatter x over tp first",
    );
    accepted(|b| norm(b, b.x(S(2)).all_gather(TP, 2)?));
    accepted(|b| norm(b, b.x(S(1)))); // sequence parallel
}

#[test]
fn whole_positions_added_to_a_sharded_hidden_dim() {
    refused(
        |b| b.x(S(2)).positions(&b.param("square")),
        "positions: on axis tp, dim 2 of x is sharded, and table is Replicate: they do not hold the same features; \
         all_gather x along dim 2 first",
    );
    accepted(|b| b.x(S(1)).positions(&b.param("square")));
    accepted(|b| b.x(I).positions(&b.param("square")));
}

#[test]
fn full_logits_given_to_the_vocab_parallel_loss() {
    let logits = |b: &Bench, ty: Ty| b.value(&[BATCH, SEQ, VOCAB], ty);
    refused(
        |b| logits(b, S(2)).all_gather(TP, 2)?.vocab_parallel_cross_entropy(&b.tokens(), TP, VOCAB),
        "vocab_parallel_cross_entropy: on axis tp, logits are Replicate: full logits given to the vocab-parallel loss; \
         use cross_entropy, or leave the logits sharded over the vocabulary",
    );
    accepted(|b| logits(b, S(2)).vocab_parallel_cross_entropy(&b.tokens(), TP, VOCAB));
    accepted(|b| logits(b, S(2)).all_gather_invariant(TP, 2)?.cross_entropy(&b.tokens()));
}

#[test]
fn sharded_logits_given_to_the_plain_loss() {
    refused(
        |b| b.x(I).copy(TP)?.linear(&b.param("table"), 1)?.cross_entropy(&b.tokens()),
        "cross_entropy: on axis tp, dim 2 of logits is sharded: a shard of the logits given to the plain loss; \
         use the vocab-parallel loss, or all_gather first",
    );
    accepted(|b| {
        let logits = b.x(I).copy(TP)?.linear(&b.param("table"), 1)?;
        logits.vocab_parallel_cross_entropy(&b.tokens(), TP, VOCAB)
    });
}

#[test]
fn gathering_a_replicate_value() {
    refused(
        |b| b.x(R).all_gather(TP, 1),
        "all_gather: on axis tp, x is Replicate and all_gather takes Shard(1); \
         every rank holds the whole already: drop this all_gather",
    );
    accepted(|b| b.x(R).slice(TP, 1)?.all_gather(TP, 1));
}

#[test]
fn reducing_twice() {
    refused(
        |b| b.x(P).all_reduce(TP)?.all_reduce(TP),
        "all_reduce: on axis tp, x is Invariant and all_reduce takes Partial; it holds the sum already, and reducing \
         twice would multiply it by the degree: drop this all_reduce",
    );
    refused(
        |b| b.x(P).all_reduce(TP)?.reduce_scatter(TP, 1),
        "reduce_scatter: on axis tp, x is Invariant and reduce_scatter takes Partial; it holds the sum already, and \
         reducing twice would multiply it by the degree: drop this reduce_scatter",
    );
    accepted(|b| b.x(P).all_reduce(TP));
    accepted(|b| b.x(P).all_reduce(TP)?.split(TP, 1));
}

#[test]
fn a_sharded_weight_used_as_if_whole() {
    refused(
        |b| b.x(R).linear(&b.param("row"), 1),
        "linear: on axis tp, the contracted dim 1 of weight is sharded and x is Replicate: a sharded weight used as if \
         whole; give x sharded along the same dim (row-parallel)",
    );
    refused(
        |b| b.tokens().embedding(&b.param("table")),
        "embedding: on axis tp, the rows of table are sharded: a sharded weight used as if whole; \
         use the vocab-parallel lookup, whose result is Partial",
    );
    let norm = |b: &Bench, gamma: &str| b.x(S(1)).layer_norm(&b.param(gamma), &b.param("bias"), 1e-5);
    refused(
        |b| norm(b, "cut_gamma"),
        "layer_norm: on axis tp, gamma is Shard(0): a sharded weight used as if whole; declare gamma replicated on tp",
    );
    accepted(|b| norm(b, "gamma"));
    accepted(|b| b.x(R).slice(TP, 2)?.linear(&b.param("row"), 1));
    accepted(|b| b.tokens().vocab_parallel_embedding(&b.param("table"), TP, VOCAB)?.all_reduce(TP));
}

#[test]
fn mixing_invariant_with_shard_without_split() {
    refused(
        |b| b.x(I).add(&b.x(S(1))),
        "add: on axis tp, x is Invariant and y is Shard(1): the gradient of x would miss the other ranks' share; \
         split(I→S) x along dim 1 first",
    );
    accepted(|b| b.x(I).split(TP, 1)?.add(&b.x(S(1))));
}

#[test]
fn a_loss_of_this_ranks_samples_reported_as_final() {
    let loss = |b: &Bench| b.x(I).cross_entropy(&b.tokens());
    refused(
        |b| loss(b)?.item(),
        "item: on axis dp, the value is Shard(0): no rank holds the true one; all_gather it over dp first",
    );
    accepted(|b| loss(b)?.all_gather(DP, 0)?.item());
}

/// The value is right on every rank and the gradient would be too large by the degree: each rank backs up its own copy.
#[test]
fn backward_from_a_loss_that_every_rank_holds_a_copy_of() {
    struct Nowhere;
    impl GradSink for Nowhere {
        fn accumulate(&mut self, _: &GradShard, _: Tensor) -> Result<()> {
            Ok(())
        }
        fn ready(&mut self, _: ParamId) -> Result<()> {
            Ok(())
        }
    }
    let backward = |b: &Bench, logits: Var| {
        let loss = logits.cross_entropy(&b.tokens())?;
        b.tape.backward_from_loss(&loss, Normaliser::Scale(1.0), Weights::Now, &mut Nowhere)
    };
    refused(
        |b| backward(b, b.x(S(2)).all_gather(TP, 2)?),
        "backward_from_loss: on axis tp, the loss is Replicate: each rank would add a gradient of its own; \
         end in a loss that is Invariant or Partial: gather with all_gather_invariant, sum with all_reduce",
    );
    accepted(|b| backward(b, b.x(S(2)).all_gather_invariant(TP, 2)?));
}

#[test]
fn two_parameters_tied_with_different_placements() {
    let init = Init::Normal { std: 0.02 };
    refused(
        |_| {
            let mut params = Declarations::new();
            VocabParallelEmbedding::new(&mut params, "wte", VOCAB, HIDDEN, init)?;
            Embedding::tied(&mut params, "wte", VOCAB, HIDDEN, 0.02)
        },
        "parameter wte.weight is tied to itself as [12, 8] Shard(0) on tp (stored in multiples of 64, of 8 on each rank) and as \
         [12, 8] replicated: tied parameters agree in everything",
    );
    accepted(|_| {
        let mut params = Declarations::new();
        VocabParallelEmbedding::new(&mut params, "wte", VOCAB, HIDDEN, init)?;
        VocabParallelEmbedding::tied(&mut params, "wte", VOCAB, HIDDEN, init)
    });
}

#[test]
fn a_parameter_read_as_invariant_in_one_place_and_as_replicate_in_another() {
    refused(
        |b| {
            b.x(I).bias(&b.param("bias"))?;
            b.x(S(1)).bias(&b.param("bias"))
        },
        "parameter bias is read as [tp: Invariant, dp: Replicate] in one place and as [tp: Replicate, dp: Replicate] in \
         another: its gradient would be neither summed nor whole",
    );
    accepted(|b| {
        b.x(S(1)).bias(&b.param("bias"))?;
        b.x(I).split(TP, 1)?.bias(&b.param("bias"))
    });
}

/// A type error is not the only way to get the regions between blocks wrong: the regions themselves must agree.
#[test]
fn entering_a_block_in_the_wrong_region() {
    refused(
        |b| Region::SEQUENCE_PARALLEL.enter(&b.x(I)),
        "all_gather: on axis tp, x is Invariant and all_gather takes Shard(1); \
         every rank holds the whole already: drop this all_gather",
    );
    refused(
        |b| Region::INVARIANT.enter(&b.x(S(1))),
        "copy: on axis tp, x is Shard(1) and copy takes Invariant; bring x to Invariant first",
    );
    for region in [Region::INVARIANT, Region::SEQUENCE_PARALLEL] {
        accepted(|b| region.leave(&region.enter(&b.x(region.ty(Axis::Tp)))?.slice(TP, 2)?.linear(&b.param("row"), 1)?));
    }
}
