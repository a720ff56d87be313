//! Exchange and computation overlap: the order in which a rank starts exchanges, computes, and waits.

use crate::world::{ALONE, Case, EP, How, declarations, layer, params};
use meshwork_core::World;
use meshwork_core::comm::{Call, Decorator, OpKind, PendingOp};
use meshwork_core::{Axis, Buffer, CommError, Communicator, DType, Pending, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Mode, Observer, Position, Seen, Weights};
use meshwork_tensor::{Result, Tape, Tensor};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

type Log = Arc<Mutex<Vec<String>>>;

fn note(log: &Log, what: impl Into<String>) {
    let (mut log, what) = (log.lock().unwrap(), what.into());
    if log.last() != Some(&what) {
        log.push(what);
    }
}

/// Notes the starts of exchanges of rows, and the waits for them, each by its number.
#[derive(Debug)]
struct Noted {
    inner: Arc<dyn Communicator>,
    log: Log,
    exchanges: Mutex<usize>,
}

struct Flight(Pending, Log, usize);

impl PendingOp for Flight {
    fn wait(self: Box<Self>) -> std::result::Result<Buffer, CommError> {
        note(&self.1, format!("wait {}", self.2));
        self.0.wait()
    }

    fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

impl Decorator for Noted {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn pass(&self, call: Call) -> std::result::Result<Pending, CommError> {
        let rows = call.input.as_ref().is_some_and(|input| input.dtype() == DType::F32);
        if call.op.kind() != OpKind::AllToAll || !rows {
            return self.inner.start(call);
        }
        let mut exchanges = self.exchanges.lock().unwrap();
        note(&self.log, format!("start {exchanges}"));
        let pending = self.inner.start(call)?;
        *exchanges += 1;
        Ok(Pending::new(Flight(pending, Arc::clone(&self.log), *exchanges - 1)))
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Self { inner, log: Arc::clone(&self.log), exchanges: Mutex::default() })
    }
}

/// Notes the products of experts, each after it is computed.
#[derive(Debug)]
struct Products(Log);

impl Observer for Products {
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>> {
        if seen.op == "grouped_linear" {
            note(&self.0, format!("experts of chunk {}", seen.part));
        }
        Ok(None)
    }
}

#[test]
fn a_chunk_travels_while_the_experts_compute_another() {
    let (case, how) = (Case::default(), How { ep: 2, ..ALONE });
    let logs = World::Threads(2).run(|world| {
        let log = Log::default();
        let inner = Arc::clone(world.communicator());
        let world = Arc::new(Noted { inner, log: Arc::clone(&log), exchanges: Mutex::default() });
        let (rank, device) = (Arc::new(Rank::new(&how.mesh(), world)?), Cpu::device());
        let mut declared = declarations(&case);
        let layer = layer(&case, &mut declared, rank.mesh())?;
        let params = Arc::new(params(declared, &rank, &device));
        let [batch, seq, hidden, _] = case.dims;
        let samples = batch / 2;
        let first_sample = (rank.coords().get(EP) * samples) as u64;
        let position = Position { first_sample, ..Position::default() };
        let tape = Tape::new(rank, params, device.clone(), Mode::Train, position);
        tape.observe(Rc::new(Products(Arc::clone(&log))));
        let types = Types::new(&[(Axis::Tp, Ty::Invariant), (EP, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0))]);
        let x = tape.input(Tensor::zeros(&device, DType::F32, [samples, seq, hidden])?, types);
        let y = layer.forward(&tape, &x)?;
        note(&log, "backward");
        let seed = Tensor::zeros(&device, DType::F32, y.shape())?;
        tape.take_notes(); // only the output counts here
        tape.backward(&y, seed, Weights::Now, &mut Gradients::default())?;
        Ok::<_, meshwork_tensor::Error>(std::mem::take(&mut *log.lock().unwrap()))
    });
    // Exchanges 0 and 1 have the tokens, 2 and 3 the results; 4 and 5 the gradients of results, 6 and 7 those of
    // tokens.
    let want = [
        ["start 0", "start 1", "wait 0", "experts of chunk 0", "start 2", "wait 1", "experts of chunk 1", "start 3"],
        ["wait 2", "wait 3", "backward", "start 4", "start 5", "wait 5", "experts of chunk 1", "start 6"],
        ["wait 4", "experts of chunk 0", "start 7", "wait 7", "wait 6", "", "", ""],
    ];
    for log in logs.unwrap_or_else(|error| panic!("{error}")) {
        assert_eq!(log, want.concat().into_iter().filter(|event| !event.is_empty()).collect::<Vec<_>>());
    }
}
