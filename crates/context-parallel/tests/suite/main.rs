//! Attention over cp by each method: against whole sequences, its work and bytes, and what is refused.
//!
//! More than 400 lines: what is sent, computed and refused, each by every method.

mod balance;

use meshwork_context_parallel::{ContextParallel, Method, Sizes};
use meshwork_core::profile::{self, Class, Recorder, Span};
use meshwork_core::{Axis, DType, Mesh, OpKind, Rank, Record, Ty, Types, World};
use meshwork_cpu::Cpu;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::op::{Documents, Mask, Order, Pattern, Rotary};
use meshwork_tensor::param::Gradients;
use meshwork_tensor::profiled::Profiled;
use meshwork_tensor::random::{fill_normal, key};
use meshwork_tensor::tape::{HalfType, Mode, Normaliser, Position, Seed, Weights};
use meshwork_tensor::{Declarations, Init, Params, Placement, Result, Role, Tape, Tensor, Var};
use meshwork_testkit::check::{LayerInput, check_layer};
use std::sync::Arc;
use std::time::Instant;

const METHODS: [Method; 4] = [Method::AllGather, Method::AllToAll, Method::Ring, Method::Hybrid { ring_degree: 1 }];

/// A tape of one rank of cp, on a device without values.
fn tape(cp: usize, rank: usize) -> Tape {
    tape_in(DType::F32, cp, rank)
}

/// What a model stores in `dtype` declares.
fn declared(dtype: DType) -> Arc<Declarations> {
    Arc::new(Declarations::new().stored_in((dtype == DType::Bf16).then_some(HalfType::Bf16)))
}

fn tape_in(dtype: DType, cp: usize, rank: usize) -> Tape {
    let mesh: Mesh = format!("cp={cp}").parse().unwrap();
    let (rank, device) = (Rank::recording(&mesh, rank).unwrap(), Meta::device());
    let params = Params::new(declared(dtype), &mesh, rank.coords(), &device, &[], 1234).unwrap();
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

/// The method for a number of ranks: a ring of two places where they are even.
fn on(method: Method, ranks: usize) -> Method {
    match method {
        Method::Hybrid { .. } => Method::Hybrid { ring_degree: if ranks.is_multiple_of(2) { 2 } else { 1 } },
        other => other,
    }
}

/// In every order, on 1 to 4 ranks: the result and all gradients are those of one rank.
#[test]
fn attention_over_cp_is_that_of_whole_sequences() -> Result<(), Box<dyn std::error::Error>> {
    let orders = [Order::default(), Order::zigzag(4), Order::new(vec![5, 0, 3, 7, 1, 2, 6, 4])?];
    for (method, order) in METHODS.into_iter().flat_map(|method| orders.iter().map(move |order| (method, order))) {
        for (kv_heads, rotary) in [(12, None), (1, Some(Rotary::new(30.0)))] {
            let inputs = [
                LayerInput::value("q", &[2, 24, 12, 6], Ty::Invariant),
                LayerInput::value("kv", &[2, 24, 2, kv_heads * 6], Ty::Invariant),
            ];
            let name = format!("{method} in {order:?}, {kv_heads} kv heads");
            check_layer(
                &name,
                &inputs,
                |_, _| Ok(()),
                |(), tape, v| {
                    let cut = |x: &Var| x.to_order(1, order)?.split(Axis::Tp, 1);
                    let ranks = tape.rank().mesh().degree(Axis::Tp);
                    if ranks == 1 {
                        return v[0].grouped_attention(&v[1], rotary, None, None);
                    }
                    let context = ContextParallel::new(on(method, ranks), order.clone(), 1).over(Axis::Tp);
                    context.whole(&context.attend(&cut(&v[0])?, &cut(&v[1])?, rotary, None, None)?)
                },
            )?;
        }
    }
    Ok(())
}

/// In both directions and with slopes, by the methods that bring all keys to the queries; a ring refuses.
#[test]
fn attention_in_both_directions_over_cp_is_that_of_whole_sequences() -> Result<(), Box<dyn std::error::Error>> {
    let slopes: Vec<f32> = (1..=12).map(|head| 0.5 / head as f32).collect();
    let masks = [
        (Pattern::Bidirectional, None, None),
        (Pattern::Bidirectional, Some(5), None),
        (Pattern::Causal, Some(9), Some(&slopes[..])),
    ];
    let order = Order::zigzag(4);
    for (method, (pattern, window, slopes)) in METHODS[..2].iter().flat_map(|method| masks.map(|mask| (method, mask))) {
        let inputs = [
            LayerInput::value("q", &[2, 24, 12, 6], Ty::Invariant),
            LayerInput::value("kv", &[2, 24, 2, 12 * 6], Ty::Invariant),
        ];
        check_layer(
            &format!("{method} of {pattern:?}, {window:?}"),
            &inputs,
            |_, _| Ok(()),
            |(), tape, v| {
                let mask = Mask { pattern, window, slopes, ..Mask::default() };
                let cut = |x: &Var| x.to_order(1, &order)?.split(Axis::Tp, 1);
                if tape.rank().mesh().degree(Axis::Tp) == 1 {
                    return v[0].grouped_attention(&v[1], None, mask, None);
                }
                let context = ContextParallel::new(*method, order.clone(), 1).over(Axis::Tp);
                context.whole(&context.attend(&cut(&v[0])?, &cut(&v[1])?, None, mask, None)?)
            },
        )?;
    }
    let tape = tape(2, 0);
    let (q, kv) = (value(&tape, &[2, 8, 4, 8], Ty::Shard(1)), value(&tape, &[2, 8, 2, 16], Ty::Shard(1)));
    let bias = value(&tape, &[4, 8, 8], Ty::Replicate);
    let biased = Mask { bias: Some(&bias), ..Mask::default() };
    for (method, mask, says) in [
        (Method::Ring, Mask::BIDIRECTIONAL, "keys go around a ring to the queries behind them: causal attention alone"),
        (Method::Hybrid { ring_degree: 2 }, Mask::BIDIRECTIONAL, "use all_gather or all_to_all"),
        (Method::AllToAll, Mask::CROSS, "keys of another sequence: all_gather keys and values"),
        (Method::AllToAll, biased, "a bias of pairs and keys of another sequence"),
        (Method::AllGather, biased, "dim 1 of q is sharded"),
    ] {
        let context = ContextParallel::new(method, Order::default(), 2);
        let refused = context.attend(&q, &kv, None, mask, None).unwrap_err().to_string();
        assert!(refused.contains(says), "{method}: {refused}");
    }
    Ok(())
}

/// Pairs of a query and an earlier key; contiguous parts have very different numbers. What the mask hides whole is not
/// computed.
#[test]
fn zigzag_gives_each_rank_equal_work() {
    let whole = work(Method::AllGather, &Order::default(), [1, 0, 64]).0;
    let hybrid = Method::Hybrid { ring_degree: 4 };
    for (method, cp) in [Method::AllGather, Method::Ring]
        .into_iter()
        .flat_map(|method| [2, 3, 4, 8].map(|cp| (method, cp)))
        .chain([(hybrid, 8)])
    {
        let seq = 48 * cp;
        let of = |order: &Order| -> Vec<u64> { (0..cp).map(|rank| work(method, order, [cp, rank, seq]).0).collect() };
        let (zigzag, contiguous) = (of(&Order::zigzag(cp)), of(&Order::default()));
        assert!(zigzag.iter().all(|&flops| flops == zigzag[0]), "{zigzag:?}");
        assert_eq!(zigzag.iter().sum::<u64>(), contiguous.iter().sum::<u64>());
        assert_eq!(zigzag.iter().sum::<u64>(), 4 * 8 * 2 * 4 * (seq * (seq + 1) / 2) as u64);
        assert!(contiguous[cp - 1] > 2 * contiguous[0]);
        // A degree that divides the pairs has equal work in the same order.
        let coarser = of(&Order::zigzag(2 * cp));
        assert!(coarser.iter().all(|&flops| flops == coarser[0]), "{coarser:?}");
    }
    // 4 d flops for each pair: 2 samples, 4 heads of 8 features.
    assert_eq!(whole, 4 * 8 * 2 * 4 * (64 * 65 / 2));
}

/// The communication of one rank, forward and backward, with values of `dtype`.
fn calls(method: Method, of: [usize; 3], dtype: DType) -> [Vec<Record>; 2] {
    calls_in(method, &Order::zigzag(of[0]), of, dtype, Mask::default())
}

fn calls_in(
    method: Method,
    order: &Order,
    [cp, rank, seq]: [usize; 3],
    dtype: DType,
    mask: Mask<'_>,
) -> [Vec<Record>; 2] {
    let tape = tape_in(dtype, cp, rank);
    let types = Types::all(tape.rank().mesh(), Ty::Invariant).with(Axis::Cp, Ty::Shard(1));
    let value = |dims: &[usize]| tape.input(Tensor::zeros(tape.device(), dtype, dims).unwrap(), types);
    let (q, kv) = (value(&[2, seq / cp, 4, 8]), value(&[2, seq / cp, 2, 16]));
    tape.rank().log().drain();
    let y = ContextParallel::new(method, order.clone(), cp).attend(&q, &kv, None, mask, None).unwrap();
    let forward = tape.rank().log().drain();
    let seed = Tensor::zeros(tape.device(), dtype, y.shape()).unwrap();
    let seed = Seed::typed(seed, y.types().dual());
    tape.backward(&y, seed, Weights::Now, &mut Gradients::default()).unwrap();
    [forward, tape.rank().log().drain()]
}

/// The published formulae, operation by operation, in elements: 2 samples, queries 32 wide, keys and values 16 each.
#[test]
fn what_ranks_exchange_is_what_is_published() {
    let (samples, h, k, seq) = (2.0, 32.0, 32.0, 64);
    for (cp, dtype) in [(2, DType::F32), (4, DType::F32), (4, DType::Bf16)] {
        let (s, n, bytes) = (seq as f64, cp as f64, dtype.size() as f64);
        let here = samples * s / n;
        let sent = |calls: &[Record]| calls.iter().map(Record::bytes).sum::<f64>();
        let ops = |calls: &[Record]| calls.iter().map(|call| call.op).collect::<Vec<_>>();

        let [there, back] = calls(Method::AllGather, [cp, 1, seq], dtype);
        assert_eq!((ops(&there), ops(&back)), (vec![OpKind::AllGather], vec![OpKind::ReduceScatter]));
        assert_eq!([&there, &back].map(|calls| sent(calls)), [bytes * (n - 1.0) * here * k; 2]);

        // Of two heads of keys and values each of four ranks gets one.
        let [there, back] = calls(Method::AllToAll, [cp, 1, seq], dtype);
        assert_eq!((ops(&there), ops(&back)), (vec![OpKind::AllToAll; 3], vec![OpKind::AllToAll; 3]));
        let to_each = 2.0 * h / n + (k / n).max(k / 2.0);
        assert_eq!([&there, &back].map(|calls| sent(calls)), [bytes * (n - 1.0) * here * to_each; 2]);

        // n - 1 blocks; backward as many, and as many sums of their gradients, in f32.
        let [there, back] = calls(Method::Ring, [cp, 1, seq], dtype);
        assert_eq!(ops(&there), [OpKind::Recv, OpKind::Send].repeat(cp - 1));
        assert_eq!(ops(&back), [OpKind::Recv, OpKind::Send].repeat(2 * (cp - 1)));
        assert_eq!([sent(&there), sent(&back)], [bytes, bytes + 4.0].map(|bytes| bytes * (n - 1.0) * here * k));
        let gradients = back.iter().filter(|call| call.op == OpKind::Send && call.dtype == DType::F32).count();
        assert_eq!(gradients, if dtype == DType::F32 { 2 * (cp - 1) } else { cp - 1 });

        if cp == 4 {
            let [there, back] = calls(Method::Hybrid { ring_degree: 2 }, [cp, 1, seq], dtype);
            let (heads, ring) = (0.5 * here * (2.0 * h + k), here * k);
            let [one, three] = [vec![OpKind::AllToAll], vec![OpKind::AllToAll; 2]];
            let pass = vec![OpKind::Recv, OpKind::Send];
            assert_eq!(ops(&there), [&three[..], &pass, &one].concat());
            assert_eq!(ops(&back), [&one[..], &pass, &pass, &three].concat());
            // The gradients of keys and values are still in f32 on their way back from heads to tokens.
            let wide = 0.5 * here * k * (4.0 - bytes);
            assert_eq!(
                [sent(&there), sent(&back)],
                [bytes * (heads + ring), bytes * (heads + ring) + 4.0 * ring + wide]
            );
        }
    }
}

/// A block goes as far as queries read it: with a window of 10 tokens, of parts of 16, to the next rank, and the sum of
/// its gradients comes back from there.
#[test]
fn blocks_outside_the_window_do_not_travel() {
    let window = |window| Mask { window: Some(window), ..Mask::default() };
    let sends = |calls: &[Record]| calls.iter().filter(|call| call.op == OpKind::Send).count();
    for (tokens, steps) in [(1, 0), (2, 1), (10, 1), (17, 1), (18, 2), (34, 3), (64, 3)] {
        for method in [Method::Ring, Method::AllGather] {
            let [there, back] = calls_in(method, &Order::default(), [4, 2, 64], DType::F32, window(tokens));
            assert_eq!([sends(&there), sends(&back)], [steps, 2 * steps], "a window of {tokens} by {method}");
            let gathered = there.iter().chain(&back).filter(|call| call.op == OpKind::AllGather).count();
            assert_eq!(gathered, 0, "a window of {tokens} by {method}");
        }
        // Two places of 32 tokens.
        let [there, _] =
            calls_in(Method::Hybrid { ring_degree: 2 }, &Order::default(), [4, 2, 64], DType::F32, window(tokens));
        assert_eq!(sends(&there), steps.min(1), "a window of {tokens} by hybrid");
    }
}

/// The rule of `auto` counts what ranks send: blocks outside of a window do not travel.
#[test]
fn the_rule_counts_what_is_sent() {
    let all = [Method::AllGather, Method::AllToAll, Method::Ring];
    let hybrids = [2, 4].map(|ring_degree| Method::Hybrid { ring_degree });
    for cp in [2, 4, 8] {
        let fits = |method: &Method| match method {
            Method::AllToAll => cp < 8,
            Method::Hybrid { ring_degree } => *ring_degree < cp && cp / ring_degree <= 4,
            _ => true,
        };
        for method in all.into_iter().chain(hybrids).filter(fits) {
            for (dtype, window, zigzag) in [
                (DType::F32, None, true),
                (DType::Bf16, None, false),
                (DType::F32, Some(10), false),
                (DType::Bf16, Some(17), false),
                (DType::F32, Some(30), true),
            ] {
                let ring = if let Method::Hybrid { ring_degree } = method { ring_degree } else { cp };
                let order = if zigzag { Order::zigzag(ring) } else { Order::default() };
                let sizes = Sizes { cp, bytes: dtype.size(), window, zigzag, ..SIZES };
                let mask = Mask { window, ..Mask::default() };
                let sent: f64 =
                    calls_in(method, &order, [cp, 1, 64], dtype, mask).iter().flatten().map(Record::bytes).sum();
                // Of two samples.
                assert_eq!(sizes.sent(method).all, sent / 2.0, "{method} on cp={cp}, {dtype:?}, {window:?}, {zigzag}");
            }
        }
    }
}

const SIZES: Sizes = Sizes {
    tokens: 64,
    cp: 8,
    heads: 4,
    kv_heads: 2,
    group: 2,
    head_dim: 8,
    bytes: 4,
    window: None,
    zigzag: true,
    documents: false,
};

/// The rule weighs bytes against the work that hides them, and ranks that wait for a fuller one.
#[test]
fn the_rule_weighs_bytes_against_work() {
    let sizes = |tokens, heads, kv_heads| Sizes {
        tokens,
        heads,
        kv_heads,
        group: heads / kv_heads,
        head_dim: 128,
        bytes: 2,
        ..SIZES
    };
    // Short blocks: fewest bytes. Long blocks: attention hides the ring.
    assert_eq!(sizes(512, 32, 32).best(), Method::AllToAll);
    let long = sizes(1 << 20, 32, 8);
    assert_eq!(long.best(), Method::Ring);
    // Within documents of unknown length, nothing is hidden. In the order of the sequence, ranks wait for the last.
    assert_eq!(Sizes { documents: true, ..long }.best(), Method::AllToAll);
    assert_eq!(Sizes { zigzag: false, ..long }.best(), Method::AllToAll);
    // A short window leaves little work, but one block to pass on.
    let windowed = Sizes { window: Some(1024), zigzag: false, ..long };
    assert_eq!(windowed.best(), Method::AllGather); // passes them on as a ring does
    assert!(windowed.sent(Method::Ring).all < long.sent(Method::Ring).all / 6.0);
    // Ranks of tp that hold both heads of keys and values, and read one: a ring passes on that one, twice as keys and
    // values of 2 bytes and once as gradients of 4.
    let shared = Sizes { heads: 4, kv_heads: 2, group: 16, ..long };
    let [gathered, passed] = [Method::AllGather, Method::Ring].map(|method| shared.sent(method).all);
    assert_eq!(gathered / (2.0 * 2.0 * 2.0), passed / (2.0 * 2.0 + 4.0));
    // Fewer heads than ranks.
    assert_eq!(
        sizes(1_024, 4, 4).methods(),
        [Method::AllGather, Method::Ring, Method::Hybrid { ring_degree: 2 }, Method::Hybrid { ring_degree: 4 }]
    );
    assert!(!sizes(1_024, 4, 1).methods().contains(&Method::AllToAll));
}

/// Tokens of a sequence.
const SEQ: usize = 64;

/// One document.
fn whole() -> Vec<i32> {
    (0..SEQ as i32).collect()
}

/// Heads of queries, and of keys and values, over all ranks of tp.
const HEADS: [usize; 2] = [4, 2];

/// The results of all ranks, `[output, dq, dkv]`, put together, and the spans of each. Values are drawn, rounded to
/// `rounded`, and computed with in `dtype`; tokens see their own document alone, in which they have `positions`. Above
/// two ranks of tp, each has all heads of keys and values.
fn run(
    context: &ContextParallel,
    mesh: &str,
    [heads, kv_heads]: [usize; 2],
    [rounded, dtype]: [DType; 2],
    positions: &[i32],
) -> (Vec<[Vec<f32>; 3]>, Vec<Vec<Span>>) {
    let mesh: Mesh = mesh.parse().unwrap();
    let ranks = World::threads(&mesh).run(|world| {
        let recorder = Recorder::new(Instant::now());
        recorder.resume();
        let world = profile::communicator(Arc::clone(world.communicator()), recorder.clone());
        let device = Profiled::device(Cpu::device(), recorder.clone());
        let rank = Rank::new(&mesh, world)?;
        let [cp, tp] = [Axis::Cp, Axis::Tp].map(|axis| (mesh.degree(axis), rank.coords().get(axis)));
        let params = Params::new(declared(dtype), &mesh, rank.coords(), &device, &[], 1234)?;
        let tape = Tape::new(Arc::new(rank), Arc::new(params), device.clone(), Mode::Train, Position::default());
        let cut = Types::all(&mesh, Ty::Invariant).with(Axis::Cp, Ty::Shard(1));
        let of_heads = |dim| if tp.0 > 1 { cut.with(Axis::Tp, dim) } else { cut };
        let (samples, seq) = (2, positions.len());
        let here = seq / cp.0;
        // Of `of` heads in each of `parts`, those of this rank of tp, or all.
        let drawn = |name: &str, parts: usize, of: usize, shared: bool| {
            let row = parts * of * 8;
            let mut all = vec![0.0_f32; samples * seq * row];
            fill_normal(key(1, name), 0, &mut all);
            let held = if shared { 0..of } else { tp.1 * of / tp.0..(tp.1 + 1) * of / tp.0 };
            let of_rows = |sample: &[f32]| sample[cp.1 * here * row..][..here * row].to_vec();
            let rows: Vec<f32> = all.chunks(seq * row).flat_map(of_rows).collect();
            let values: Vec<f32> =
                rows.chunks(of * 8).flat_map(|row| row[held.start * 8..held.end * 8].to_vec()).collect();
            let shape = if parts == 1 { [samples, here, held.len(), 8] } else { [samples, here, 2, held.len() * 8] };
            Tensor::from_slice(&device, &values, shape)?.cast(rounded)?.cast(dtype)
        };
        let shared = tp.0 > 2;
        let q = tape.input(drawn("q", 1, heads, false)?, of_heads(Ty::Shard(2)));
        let kv = drawn("kv", 2, kv_heads, shared)?;
        let kv = tape.input(kv, of_heads(if shared { Ty::Replicate } else { Ty::Shard(3) }));
        let twice = Tensor::from_slice(&device, &[positions, positions].concat(), [samples, seq])?;
        let positions = tape.constant(twice, Types::all(&mesh, Ty::Invariant));
        recorder.drain();
        let y = context.attend(&q, &kv, None, Some(&Documents { positions, apart: true }), None)?;
        let seed = drawn("dy", 1, heads, false)?;
        let value = y.tensor().clone().cast(DType::F32)?.to_vec::<f32>()?;
        tape.backward(&y, Seed::typed(seed, y.types().dual()), Weights::Now, &mut Gradients::default())?;
        let spans = recorder.drain();
        let of = |x: &Var| tape.take_grad(x).unwrap().cast(DType::F32)?.to_vec::<f32>();
        Ok::<_, meshwork_tensor::Error>(([value, of(&q)?, of(&kv)?], spans))
    });
    ranks.unwrap().into_iter().unzip()
}

fn zigzag(method: Method, cp: usize) -> ContextParallel {
    ContextParallel::new(method, Order::zigzag(cp), cp)
}

/// A rank gets copies of the heads of keys and values that its queries read, and no others, where there are fewer of
/// them than ranks, and where every rank of tp has all. The gradients of the copies are summed.
#[test]
fn ranks_get_the_heads_that_their_queries_read() {
    for (mesh, heads @ [of_queries, of_keys]) in [
        ("cp=2", [8, 1]),
        ("cp=3", [6, 1]),
        ("cp=4", [8, 2]),
        ("cp=8", [8, 4]),
        ("tp=2,cp=4", [16, 2]),
        ("tp=4,cp=2", [16, 2]), // a rank of tp has both, and reads one
        ("tp=4,cp=2", [16, 8]), // ... has eight, and reads two: each rank of cp gets one
    ] {
        let (cp, tp) = (mesh.parse::<Mesh>().unwrap().degree(Axis::Cp), mesh.parse::<Mesh>().unwrap().degree(Axis::Tp));
        let seq = SEQ.next_multiple_of(cp);
        let positions: Vec<i32> = (0..seq as i32).collect();
        for method in [Method::AllToAll, Method::Ring] {
            let context = ContextParallel::new(method, Order::default(), 1);
            let whole = run(&context, "cp=1", heads, [DType::F32; 2], &positions).0.remove(0);
            let mut found = whole.each_ref().map(|x| vec![0.0; x.len()]);
            for (rank, results) in run(&context, mesh, heads, [DType::F32; 2], &positions).0.into_iter().enumerate() {
                for (at, part) in results.into_iter().enumerate() {
                    let [parts, all] = if at == 2 { [2, of_keys] } else { [1, of_queries] };
                    let held = part.len() / (2 * seq / cp * parts * 8);
                    let (first, begin) = (if held == all { 0 } else { rank % tp * held }, rank / tp * seq / cp);
                    for (i, x) in part.into_iter().enumerate() {
                        let (e, row) = (i % (held * 8), i / (held * 8));
                        let (part, token, sample) = (row % parts, row / parts % (seq / cp), row / parts / (seq / cp));
                        found[at][(((sample * seq + begin + token) * parts + part) * all + first) * 8 + e] += x;
                    }
                }
            }
            for (what, (found, whole)) in ["out", "dq", "dkv"].into_iter().zip(found.iter().zip(&whole)) {
                let furthest = found.iter().zip(whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(furthest < 1e-5, "{what} of {heads:?} heads on {mesh} by {method}: {furthest}");
            }
        }
    }
}

/// A ring calls the kernel for pairs of runs that share a document: here a rank's own, and in the second case those of
/// the rank before it.
#[test]
fn rings_skip_runs_that_share_no_document() {
    let context = ContextParallel::new(Method::Ring, Order::default(), 1);
    for (length, calls) in [(SEQ / 4, [1, 1, 1, 1]), (SEQ / 2, [1, 2, 1, 2])] {
        let positions: Vec<i32> = (0..SEQ).map(|token| (token % length) as i32).collect();
        let one = run(&context, "cp=1", HEADS, [DType::F32; 2], &positions).0.remove(0);
        let (results, spans) = run(&context, "cp=4", HEADS, [DType::F32; 2], &positions);
        for (rank, (results, spans)) in results.iter().zip(spans).enumerate() {
            let kernels =
                spans.iter().filter(|span| span.class == Class::Attention && span.name.starts_with("grouped"));
            assert_eq!(kernels.count(), 2 * calls[rank], "rank {rank}, documents of {length}");
            for (part, whole) in results.iter().zip(&one) {
                let (each, of_sample) = (part.len() / 2, whole.len() / 2);
                let of = |sample: usize| &whole[sample * of_sample + rank * each..][..each];
                let whole = [of(0), of(1)].concat();
                assert!(
                    part.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-5),
                    "rank {rank}, documents of {length}"
                );
            }
        }
    }
}

/// Sums of 16-bit values are in f32, over ranks too: the results are those of f32, rounded once.
#[test]
fn partial_results_are_not_rounded() {
    for method in [Method::Ring, Method::Hybrid { ring_degree: 2 }] {
        let halves = run(&zigzag(method, 4), "cp=4", HEADS, [DType::Bf16, DType::Bf16], &whole()).0;
        let wide = run(&zigzag(method, 4), "cp=4", HEADS, [DType::Bf16, DType::F32], &whole()).0;
        for (halves, wide) in halves.iter().zip(&wide) {
            let (halves, wide, outputs) = (halves.concat(), wide.concat(), wide[0].len());
            let rounded = |x: &f32| meshwork_core::bf16::from_f32(*x).to_f32();
            assert!(
                halves[..outputs].iter().zip(&wide[..outputs]).all(|(half, wide)| *half == rounded(wide)),
                "{method}"
            );
            // Gradients begin with the rounded output.
            let (error, norm) =
                halves[outputs..].iter().zip(&wide[outputs..]).fold((0.0, 0.0), |(error, norm), (a, b)| {
                    (error + f64::from(a - b).powi(2), norm + f64::from(*b).powi(2))
                });
            assert!(error < 2e-5 * norm, "{method}: {}", (error / norm).sqrt());
        }
    }
}

/// On the event log: in each step but the last, the block for the next one is under way while attention computes.
#[test]
fn blocks_travel_while_attention_computes() {
    for (method, steps) in [(Method::Ring, 4), (Method::Hybrid { ring_degree: 2 }, 2)] {
        for (rank, spans) in run(&zigzag(method, 4), "cp=4", HEADS, [DType::F32; 2], &whole()).1.into_iter().enumerate()
        {
            let kernel = |span: &&Span| span.class == Class::Attention && span.name.starts_with("grouped");
            let kernels: Vec<&Span> = spans.iter().filter(kernel).collect();
            let under =
                |flight: &Span| kernels.iter().any(|kernel| flight.start <= kernel.start && kernel.end <= flight.end);
            // Blocks, forward and backward, and the sums of their gradients: only the last has no kernel left.
            for (name, hidden) in [("recv", 3 * (steps - 1) - 1), ("send", 3 * (steps - 1) - 1)] {
                let flights = spans.iter().filter(|span| span.class == Class::Flight && span.name == name);
                assert_eq!(flights.clone().count(), 3 * (steps - 1), "rank {rank} by {method}");
                assert_eq!(
                    flights.filter(|flight| under(flight)).count(),
                    hidden,
                    "rank {rank} by {method}: {spans:?}"
                );
            }
        }
    }
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

/// Keys and values are one value: those of a part of a sequence are not joined with those of a whole one.
#[test]
fn keys_and_values_of_different_parts_are_not_joined() {
    for cp in [1, 2] {
        let tape = tape(cp, 0);
        let half = |ty| value(&tape, &[2, 8, 1, 16], ty);
        let told = half(Ty::Shard(1)).concat(&half(Ty::Invariant), 2).unwrap_err().to_string();
        assert!(told.contains("on axis cp"), "{told}");
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
    assert!("rings".parse::<Method>().unwrap_err().to_string().contains("use all_gather, all_to_all, ring or"));
    assert_eq!("hybrid=4".parse(), Ok(Method::Hybrid { ring_degree: 4 }));
    assert!("hybrid=0".parse::<Method>().is_err());
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
