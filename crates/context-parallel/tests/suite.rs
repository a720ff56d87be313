//! Attention over cp by each method: against whole sequences, its work and bytes, and what is refused.

use meshwork_context_parallel::{ContextParallel, Method};
use meshwork_core::{Axis, DType, Mesh, OpKind, Rank, Record, Ty, Types};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::op::{Documents, Order, Rotary};
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Mode, Normaliser, Position, Weights};
use meshwork_tensor::{Declarations, Init, Params, Placement, Result, Role, Tape, Tensor, Var};
use meshwork_testkit::check::{LayerInput, check_layer};
use std::sync::Arc;

const METHODS: [Method; 2] = [Method::AllGather, Method::AllToAll];

/// A tape of one rank of cp, on a device without values.
fn tape(cp: usize, rank: usize) -> Tape {
    let mesh: Mesh = format!("cp={cp}").parse().unwrap();
    let (rank, device) = (Rank::recording(&mesh, rank).unwrap(), Meta::device());
    let params = Params::new(Arc::new(Declarations::new()), &mesh, rank.coords(), &device, &[], 1234).unwrap();
    Tape::new(Arc::new(rank), Arc::new(params), device, Mode::Train, Position::default())
}

fn value(tape: &Tape, dims: &[usize], ty: Ty) -> Var {
    let types = Types::all(tape.rank().mesh(), Ty::Invariant).with(Axis::Cp, ty);
    tape.input(Tensor::zeros(tape.device(), DType::F32, dims).unwrap(), types)
}

/// FLOPs and communication of one rank's forward: `seq` tokens, 4 heads of 8 features, 2 heads of keys and values.
fn work(method: Method, order: &Order, [cp, rank, seq]: [usize; 3]) -> (u64, Vec<Record>) {
    let tape = tape(cp, rank);
    let q = value(&tape, &[2, seq / cp, 4, 8], Ty::Shard(1));
    let kv = value(&tape, &[2, seq / cp, 2, 16], Ty::Shard(1));
    tape.rank().log().drain();
    ContextParallel::new(method, order.clone(), cp).attend(&q, &kv, None, None, None).unwrap();
    (tape.device().meter().total_flops(), tape.rank().log().drain())
}

/// In every order, on 1, 2 and 4 ranks: the result and all gradients are those of one rank.
#[test]
fn attention_over_cp_is_that_of_whole_sequences() -> Result<(), Box<dyn std::error::Error>> {
    let orders = [Order::default(), Order::zigzag(4), Order::new(vec![5, 0, 3, 7, 1, 2, 6, 4])?];
    for (method, order) in METHODS.into_iter().flat_map(|method| orders.iter().map(move |order| (method, order))) {
        for (kv_heads, rotary) in [(12, None), (1, Some(Rotary::new(30.0)))] {
            let inputs = [
                LayerInput::value("q", &[2, 24, 12, 6], Ty::Invariant),
                LayerInput::value("kv", &[2, 24, 2, kv_heads * 6], Ty::Invariant),
            ];
            let context = ContextParallel::new(method, order.clone(), 1).over(Axis::Tp);
            let name = format!("{method} in {order:?}, {kv_heads} kv heads");
            check_layer(
                &name,
                &inputs,
                |_, _| Ok(()),
                |(), tape, v| {
                    let cut = |x: &Var| x.to_order(1, order)?.split(Axis::Tp, 1);
                    if tape.rank().mesh().degree(Axis::Tp) == 1 {
                        return v[0].grouped_attention(&v[1], rotary, None, None);
                    }
                    context.whole(&context.attend(&cut(&v[0])?, &cut(&v[1])?, rotary, None, None)?)
                },
            )?;
        }
    }
    Ok(())
}

/// Pairs of a query and an earlier key; contiguous parts have very different numbers.
#[test]
fn zigzag_gives_each_rank_equal_work() {
    let whole = work(Method::AllGather, &Order::default(), [1, 0, 64]).0;
    for cp in [2, 3, 4, 8] {
        let seq = 48 * cp;
        let of = |order: &Order| -> Vec<u64> {
            (0..cp).map(|rank| work(Method::AllGather, order, [cp, rank, seq]).0).collect()
        };
        let (zigzag, contiguous) = (of(&Order::zigzag(cp)), of(&Order::default()));
        assert!(zigzag.iter().all(|&flops| flops == zigzag[0]), "{zigzag:?}");
        assert_eq!(zigzag.iter().sum::<u64>(), contiguous.iter().sum::<u64>());
        assert!(contiguous[cp - 1] > 2 * contiguous[0]);
        // A degree that divides the pairs has equal work in the same order.
        let coarser = of(&Order::zigzag(2 * cp));
        assert!(coarser.iter().all(|&flops| flops == coarser[0]), "{coarser:?}");
    }
    // 4 d flops for each pair: 2 samples, 4 heads of 8 features.
    assert_eq!(whole, 4 * 8 * 2 * 4 * (64 * 65 / 2));
}

/// The published formulae, in bytes of f32: 2 samples, queries 32 wide, keys and values 16 each.
#[test]
fn what_ranks_exchange_is_what_is_published() {
    let (seq, cp) = (64, 2);
    let (s, n) = (seq as f64, cp as f64);
    let (_, calls) = work(Method::AllGather, &Order::zigzag(2), [cp, 1, seq]);
    assert_eq!(calls.iter().map(|call| call.op).collect::<Vec<_>>(), [OpKind::AllGather]);
    assert_eq!(calls[0].bytes(), 4.0 * 2.0 * (n - 1.0) * s / n * 32.0);
    let (_, calls) = work(Method::AllToAll, &Order::default(), [cp, 1, seq]);
    assert_eq!(calls.iter().map(|call| call.op).collect::<Vec<_>>(), [OpKind::AllToAll; 3]);
    let sent: f64 = calls.iter().map(Record::bytes).sum();
    assert_eq!(sent, 4.0 * 2.0 * (n - 1.0) / n * s / n * (2.0 * 32.0 + 32.0));
}

/// Attention over keys of this rank alone, or of other tokens than its queries, is refused on one rank too.
#[test]
fn keys_that_are_cut_need_an_exchange() {
    for cp in [1, 2] {
        let tape = tape(cp, 0);
        let q = value(&tape, &[2, 8, 4, 8], Ty::Shard(1));
        let kv = |ty| value(&tape, &[2, 8, 2, 16], ty);
        let error = q.grouped_attention(&kv(Ty::Shard(1)), None, None, None).unwrap_err().to_string();
        assert!(error.contains("on axis cp, dim 1 of q is sharded"), "{error}");
        let context = ContextParallel::new(Method::AllToAll, Order::default(), 1);
        let error = context.attend(&q, &kv(Ty::Invariant), None, None, None).unwrap_err().to_string();
        let told = "q is Shard(1) and kv is Invariant: ranks exchange the tokens that each holds; cut both along the sequence over cp";
        assert!(error.contains(told), "{error}");
        // A mask of positions counted from the part of each rank.
        let positions = value(&tape, &[2, 8], Ty::Shard(1));
        let local = Documents { positions, apart: true };
        for method in METHODS {
            let context = ContextParallel::new(method, Order::default(), 1);
            let error = context.attend(&q, &kv(Ty::Shard(1)), None, Some(&local), None).unwrap_err().to_string();
            assert!(error.contains("positions"), "{method}: {error}");
        }
    }
}

/// Each rank has the loss and the gradients of its own tokens: neither is final, and an update by such gradients is
/// refused.
#[test]
fn numbers_of_this_ranks_tokens_are_not_those_of_the_sequence() -> Result<()> {
    let mut all = Declarations::new();
    let head = all.declare("head", &[10, 16], Placement::replicated(), Role::Weight, Init::Ones)?;
    let mesh: Mesh = "dp=2,cp=2".parse().unwrap();
    let (rank, device) = (Rank::recording(&mesh, 0).unwrap(), Meta::device());
    let params = Arc::new(Params::new(Arc::new(all), &mesh, rank.coords(), &device, &[vec![head]], 1234)?);
    let tape = Tape::new(Arc::new(rank), params.clone(), device.clone(), Mode::Train, Position::default());
    let cut = Types::all(&mesh, Ty::Invariant).with(Axis::Dp, Ty::Shard(0)).with(Axis::Ep, Ty::Shard(0));
    let cut = cut.with(Axis::Cp, Ty::Shard(1));
    let x = tape.constant(Tensor::zeros(&device, DType::F32, [1, 8, 16])?, cut);
    let targets = tape.constant(Tensor::zeros(&device, DType::I32, [1, 8])?, cut);
    let loss = x.linear(&tape.param(head)?, 1)?.cross_entropy(&targets)?;
    assert_eq!((loss.ty(Axis::Cp), loss.ty(Axis::Dp)), (Ty::Partial, Ty::Shard(0)));
    let told = loss.item().unwrap_err().to_string();
    assert!(told.contains("on axis cp, the value is Partial: no rank holds the true one"), "{told}");
    let mut gradients = Gradients::default();
    tape.backward_from_loss(&loss, Normaliser::LocalTerms(8), Weights::Now, &mut gradients)?;
    let mut params = params;
    let told = gradients.descend(&mut params, 1.0).unwrap_err().to_string();
    assert!(told.contains("drop the tape"), "{told}");
    drop((tape, x, targets, loss));
    let told = gradients.descend(&mut params, 1.0).unwrap_err().to_string();
    assert!(told.contains("the gradient of head is still Partial over cp"), "{told}");
    Ok(())
}

#[test]
fn heads_that_ranks_cannot_share_out_are_refused() {
    let tape = tape(8, 3);
    let (q, kv) = (value(&tape, &[2, 8, 4, 8], Ty::Shard(1)), value(&tape, &[2, 8, 2, 16], Ty::Shard(1)));
    let error = ContextParallel::new(Method::AllToAll, Order::default(), 1).attend(&q, &kv, None, None, None);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("each rank takes equally many of the 4 heads of queries: use cp=4, or all_gather"),
        "{error}"
    );
    let error = ContextParallel::new(Method::AllGather, Order::new(vec![1, 0, 2]).unwrap(), 1);
    let error = error.attend(&q, &kv, None, None, None).unwrap_err().to_string();
    assert!(error.contains("64 tokens in 3 equal chunks"), "{error}");
    assert!(Order::new(vec![0, 2, 2]).unwrap_err().to_string().contains("each of them comes once"));
    assert!("rings".parse::<Method>().unwrap_err().to_string().contains("use all_gather or all_to_all"));
}

/// What a rank gets is decided before the cut: tokens, and what follows the last of them.
#[test]
fn sequences_are_laid_out_whole() -> Result<()> {
    let context = ContextParallel::new(Method::AllGather, Order::zigzag(2), 3);
    assert_eq!(context.places(13), 24);
    let laid = context.lay_out(&(0..26).collect::<Vec<_>>(), 13, -1)?;
    assert_eq!(laid[..24], [0, 1, 2, 3, 4, 5, -1, -1, -1, -1, -1, -1, 6, 7, 8, 9, 10, 11, 12, -1, -1, -1, -1, -1]);
    assert_eq!(laid[24..30], [13, 14, 15, 16, 17, 18]);
    assert!(context.lay_out(&[1, 2, 3], 2, 0).unwrap_err().to_string().contains("3 numbers of sequences of 2 tokens"));
    Ok(())
}
