//! The same network as a pipeline: its stages, channels between them, a thread per rank.

use super::{Grad, LAYERS, Layer, Outcome, data, layer, loss, target, weights};
use meshwork_pipeline::{Event, Lowered, Phase, StageRunner, Tag, Transport, run};
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// An intended fault.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    None,
    Forward {
        stage: usize,
        micro: usize,
    },
    Backward {
        stage: usize,
        micro: usize,
    },
    /// Returns no activation where its neighbour waits.
    Silent {
        stage: usize,
    },
    /// Returns no gradient where its neighbour waits.
    SilentBack {
        stage: usize,
    },
    /// Returns a message where no neighbour waits.
    Talkative {
        stage: usize,
    },
}

#[derive(Debug)]
struct Failed(String);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Some layers of the network.
struct Chunk {
    stage: usize,
    stages: usize,
    /// The weights after each number of updates.
    versions: Vec<Vec<Layer>>,
    grads: Vec<Grad>,
    /// The version that the forward of each micro-batch reads.
    reads: Vec<usize>,
    kept: HashMap<usize, Kept>,
    losses: Vec<(usize, f32)>,
    fault: Fault,
    live: Live,
}

/// What the backward of a micro-batch needs: the input of each layer and the output of the last, then the gradient of
/// each layer's output.
struct Kept {
    xs: Vec<Vec<f32>>,
    dys: Vec<Vec<f32>>,
}

/// The number of activations that all chunks of a rank keep, which the checker predicts.
#[derive(Clone, Default)]
struct Live {
    keeps: bool,
    now: Rc<Cell<usize>>,
    peak: Rc<Cell<usize>>,
}

impl Chunk {
    fn new(stage: usize, schedule: &Lowered, fault: Fault, live: Live) -> Self {
        let (stages, micros) = (schedule.schedule().stages(), schedule.schedule().micros);
        let each = LAYERS / stages;
        let layers: Vec<Layer> = (stage * each..(stage + 1) * each).map(layer).collect();
        Self {
            stage,
            stages,
            grads: vec![Grad::default(); each],
            versions: vec![layers],
            reads: (0..micros).map(|micro| schedule.version(stage, micro)).collect(),
            kept: HashMap::new(),
            losses: Vec::new(),
            fault,
            live,
        }
    }
}

impl StageRunner for Chunk {
    type Message = Vec<f32>;
    type Error = Failed;

    fn forward(&mut self, micro: usize, input: Option<Vec<f32>>) -> Result<Option<Vec<f32>>, Failed> {
        let stage = self.stage;
        assert_eq!(input.is_none(), stage == 0, "only the first stage reads the data");
        if self.fault == (Fault::Forward { stage, micro }) {
            return Err(Failed("loss is not finite".to_string()));
        }
        let mut xs = vec![input.unwrap_or_else(|| data(micro))];
        for layer in &self.versions[self.reads[micro]] {
            xs.push(layer.forward(xs.last().unwrap()));
        }
        let y = xs.last().unwrap().clone();
        if self.live.keeps {
            assert!(self.kept.insert(micro, Kept { xs, dys: Vec::new() }).is_none(), "each micro-batch comes once");
            self.live.now.update(|now| now + 1);
            self.live.peak.update(|peak| peak.max(self.live.now.get()));
        }
        let last = stage + 1 == self.stages;
        if last {
            self.losses.push((micro, loss(&y, micro)));
        }
        let speaks = match self.fault {
            Fault::Silent { stage } if stage == self.stage => false,
            Fault::Talkative { stage } if stage == self.stage => true,
            _ => !last,
        };
        Ok(speaks.then_some(y))
    }

    fn backward_input(&mut self, micro: usize, grad: Option<Vec<f32>>) -> Result<Option<Vec<f32>>, Failed> {
        let stage = self.stage;
        assert_eq!(grad.is_none(), stage + 1 == self.stages, "only the last stage starts from its loss");
        if self.fault == (Fault::Backward { stage, micro }) {
            return Err(Failed("loss is not finite".to_string()));
        }
        let Kept { xs, dys } = self.kept.get_mut(&micro).expect("backward before forward");
        let y = xs.pop().unwrap();
        let mut d = grad.unwrap_or_else(|| y.iter().zip(target(micro)).map(|(y, t)| y - t).collect());
        for (layer, x) in self.versions[self.reads[micro]].iter().zip(xs.iter()).rev() {
            dys.push(d.clone());
            d = layer.backward_input(x, &d);
        }
        dys.reverse();
        let speaks = stage > 0 && self.fault != (Fault::SilentBack { stage });
        Ok(speaks.then_some(d))
    }

    fn backward_weights(&mut self, micro: usize) -> Result<(), Failed> {
        let Kept { xs, dys } = self.kept.remove(&micro).expect("gradients of weights before that of the input");
        self.live.now.update(|now| now - 1);
        let layers = self.versions[self.reads[micro]].iter().zip(&mut self.grads);
        for ((layer, grad), (x, dy)) in layers.zip(xs.iter().zip(&dys)) {
            layer.backward_weight(x, dy, grad);
        }
        Ok(())
    }

    fn update(&mut self, _micro: usize) -> Result<(), Failed> {
        let mut next = self.versions.last().unwrap().clone();
        next.iter_mut().zip(&self.grads).for_each(|(layer, grad)| layer.update(grad));
        self.versions.push(next);
        self.grads.fill(Grad::default());
        Ok(())
    }
}

type Packet = (Tag, Vec<f32>);

/// One channel per ordered pair of ranks. Dropping it closes them, so that peers notice a failure.
#[derive(Default)]
struct Channels {
    to: Vec<Sender<Packet>>,
    from: Vec<Receiver<Packet>>,
}

fn channels(ranks: usize) -> Vec<Channels> {
    let mut all: Vec<Channels> = (0..ranks).map(|_| Channels::default()).collect();
    for from in 0..ranks {
        for to in 0..ranks {
            let (sender, receiver) = channel();
            all[from].to.push(sender);
            all[to].from.push(receiver);
        }
    }
    all
}

impl Transport for Channels {
    type Message = Vec<f32>;
    type Error = Failed;

    fn send(&mut self, to_rank: usize, tag: Tag, message: Vec<f32>) -> Result<(), Failed> {
        self.to[to_rank].send((tag, message)).map_err(|_| Failed(format!("rank {to_rank} is gone")))
    }

    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<Vec<f32>, Failed> {
        let (sent, message) = self.from[from_rank].recv().map_err(|_| Failed(format!("rank {from_rank} is gone")))?;
        assert_eq!(sent, tag, "messages come in the order in which they are asked for");
        Ok(message)
    }

    fn finish(&mut self) -> Result<(), Failed> {
        Ok(())
    }
}

/// Runs a schedule with one thread per rank. On failure, what each rank that failed said.
pub fn pipeline(lowered: &Lowered, fault: Fault) -> Result<Outcome, Vec<String>> {
    pipeline_over(lowered, channels(lowered.schedule().ranks), fault)
}

/// The same over transports of any kind, one for each rank.
pub fn pipeline_over<T>(lowered: &Lowered, ranks: Vec<T>, fault: Fault) -> Result<Outcome, Vec<String>>
where
    T: Transport<Message = Vec<f32>, Error: fmt::Display> + Send,
{
    let results: Vec<Result<Vec<Part>, String>> = thread::scope(|scope| {
        let start = |(rank, transport)| scope.spawn(move || run_rank(lowered, rank, FinishCount(transport, 0), fault));
        let threads: Vec<_> = ranks.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (parts, errors): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    if !errors.is_empty() {
        return Err(errors.into_iter().filter_map(Result::err).collect());
    }
    let mut parts: Vec<Part> = parts.into_iter().flatten().flatten().collect();
    parts.sort_by_key(|part| part.stage);
    let mut losses: Vec<(usize, f32)> = parts.iter().flat_map(|part| part.losses.clone()).collect();
    losses.sort_by_key(|&(micro, _)| micro);
    Ok(Outcome {
        losses: losses.into_iter().map(|(_, loss)| loss).collect(),
        grads: parts.iter().flat_map(|part| part.grads.clone()).collect(),
        weights: parts.into_iter().flat_map(|part| part.weights).collect(),
    })
}

/// The results of one stage.
struct Part {
    stage: usize,
    losses: Vec<(usize, f32)>,
    grads: Vec<f32>,
    weights: Vec<f32>,
}

/// A transport, and how often it was finished.
struct FinishCount<T>(T, usize);

impl<T: Transport> Transport for FinishCount<T> {
    type Message = T::Message;
    type Error = T::Error;

    fn send(&mut self, to_rank: usize, tag: Tag, message: T::Message) -> Result<(), T::Error> {
        self.0.send(to_rank, tag, message)
    }

    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<T::Message, T::Error> {
        self.0.recv(from_rank, tag)
    }

    fn finish(&mut self) -> Result<(), T::Error> {
        self.1 += 1;
        self.0.finish()
    }
}

fn run_rank<T>(lowered: &Lowered, rank: usize, mut transport: FinishCount<T>, fault: Fault) -> Result<Vec<Part>, String>
where
    T: Transport<Message = Vec<f32>, Error: fmt::Display>,
{
    let schedule = lowered.schedule();
    let live = Live { keeps: !schedule.is_forward_only(), ..Live::default() };
    let chunk = |stage| Chunk::new(stage, lowered, fault, live.clone());
    let mut chunks: Vec<Chunk> = schedule.stages_of(rank).map(chunk).collect();
    let mut events = Vec::new();
    run(lowered, rank, &mut chunks, &mut transport, &mut |event: Event| events.push(event))
        .map_err(|error| error.to_string())?;

    // The interpreter ran the actions in order, and kept the predicted number of activations.
    let told = lowered
        .actions(rank)
        .iter()
        .flat_map(|&action| [Phase::Started, Phase::Finished].map(|phase| Event { action, phase }));
    assert!(events.into_iter().eq(told));
    assert_eq!(live.peak.get(), lowered.peaks()[rank]);
    assert_eq!((live.now.get(), transport.1), (0, 1));

    let part = |chunk: Chunk| Part {
        stage: chunk.stage,
        grads: chunk.grads.as_flattened().as_flattened().to_vec(),
        weights: weights(chunk.versions.last().unwrap()),
        losses: chunk.losses,
    };
    Ok(chunks.into_iter().map(part).collect())
}

/// The error of a rank without peers at the other end of its transport.
pub fn run_alone(lowered: &Lowered, rank: usize, stages: &[usize]) -> String {
    struct Nobody;

    impl Transport for Nobody {
        type Message = Vec<f32>;
        type Error = Failed;

        fn send(&mut self, to_rank: usize, _: Tag, _: Vec<f32>) -> Result<(), Failed> {
            Err(Failed(format!("rank {to_rank} is gone")))
        }

        fn recv(&mut self, from_rank: usize, _: Tag) -> Result<Vec<f32>, Failed> {
            Err(Failed(format!("rank {from_rank} is gone")))
        }

        fn finish(&mut self) -> Result<(), Failed> {
            Err(Failed("nobody is there".to_string()))
        }
    }

    let chunk = |&stage: &usize| Chunk::new(stage, lowered, Fault::None, Live::default());
    let mut chunks: Vec<Chunk> = stages.iter().map(chunk).collect();
    run(lowered, rank, &mut chunks, &mut Nobody, &mut |_| {}).unwrap_err().to_string()
}
