//! A trained model that continues sequences, on any mesh: each token goes through the model once, and the keys and
//! values of the earlier ones are cached.

mod split;

use crate::agreement::{require_same_model, require_same_plan};
use crate::clock::Clock;
use crate::compress::codec::Codec;
use crate::fit::require_fit;
use crate::message::{Message, Site, outgoing};
use crate::pass::Purpose;
use crate::prelude::*;
use crate::transport::PipeTransport;
use crate::{Compress, LocalModel, Recompute, Segment, Verify, one_rank};
use meshwork_core::CommError;
use meshwork_core::agreement::Fact;
use meshwork_nn::Stage;
use meshwork_pipeline::{Tag, Transport};
use meshwork_tensor::Tape;
use meshwork_tensor::param::{LocalSlice, host_floats};
use meshwork_tensor::tape::{KeyValueCache, Mode};
use meshwork_tensor::verify::{Claims, Over};

/// One rank of a model that continues sequences. It holds weights and cached keys and values; nothing that only
/// training needs.
#[derive(Debug)]
pub struct Decoder {
    rank: Arc<Rank>,
    /// The beginning of the names of its calls.
    name: String,
    device: Arc<dyn Device>,
    plan: ModelPlan,
    schedule: Schedule,
    scatter: bool,
    compress: Compress,
    seed: u64,
    params: Arc<Params>,
    segments: Vec<Segment>,
    /// The cache of each segment.
    caches: Vec<KeyValueCache>,
    capacity: usize,
    past: usize,
    /// [`Plan::rounding`].
    rounding: f64,
    /// Whether the first tokens have still to show that the model [can be split](split) into passes.
    unproven: bool,
}

impl Decoder {
    /// This rank's part of a model, with the weights that `read` gives: the elements of the slice that lies here, as
    /// they are stored, padding zero. Sequences may have `capacity` tokens. The decoder reads the mesh, the placement
    /// of the stages and the numerics of `plan`, and nothing else of it.
    ///
    /// Collective: every rank of the mesh creates one with the same model and plan.
    ///
    /// # Errors
    /// Ranks whose plans, models or capacities differ, or that were given other weights where they hold the same; a
    /// rank of a different mesh than the plan's; a plan that does not fit the model or the device; weights that cannot
    /// be read, or of another number; a model that is [another one on one rank](TrainError::OneRank).
    pub fn new<E: std::fmt::Display>(
        model: Arc<dyn Model>,
        plan: &Plan,
        rank: Arc<Rank>,
        device: Arc<dyn Device>,
        capacity: usize,
        mut read: impl FnMut(&ParamSpec, &LocalSlice) -> Result<Vec<f32>, E>,
    ) -> Result<Self> {
        let name = rank.log().name_next("Decoder");
        let _entered = rank.enter(&*format!("{name}::new"));
        require_same_plan(plan, &rank)?;
        require_fit(plan, &rank, &*device)?;
        let plan_of =
            |model| ModelPlan::new(model, &Plan { recompute: Recompute::None, offload: None, ..plan.clone() });
        let decoding = model.decoding();
        let (schedule, trained) = (plan.build_schedule()?, plan_of(model)?);
        require_same_model(&trained, &trained.parameters()?, &rank)?;
        let sample = Batch::blank(&trained.model().fields(), 1);
        // The tokens that are decoded may not need the other things that a whole sequence lacks.
        let compared = one_rank::compare(&trained, rank.world_rank(), &sample, Mode::Evaluate, plan.verify);
        let refuses = |error: &TrainError| match error {
            TrainError::OneRank { .. } => true,
            TrainError::Plan(error) => matches!(**error, PlanError::UnusedAxis { .. }),
            _ => false,
        };
        if let Some(error) = compared.err().filter(refuses) {
            return Err(error);
        }
        let model_plan = decoding.map_or(Ok(trained), plan_of)?;
        let device = model_plan.device(device);
        let LocalModel { declarations, stages } = model_plan.local_model(&schedule, rank.coords().get(Axis::Pp))?;
        let layout = declarations.flats();
        let (mesh, coords) = (rank.mesh(), rank.coords());
        let mut params = Params::new(declarations.clone(), mesh, coords, &device, &layout, plan.seed)?;
        for id in declarations.ids() {
            let spec = declarations.spec(id);
            let values = read(spec, &spec.local(mesh, coords))
                .map_err(|error| TrainError::Parameter { name: spec.name.clone(), problem: error.to_string() })?;
            params.write(id, &values)?;
        }
        let claims = Claims::new(rank.clone(), 0);
        let valid = "create every rank's Decoder with the same capacity";
        claims.fact(Over::World, Fact::value("the number of tokens that a sequence may have", &capacity, valid));
        if plan.verify != Verify::Off {
            claims.weights(&params)?;
        }
        claims.compare().map_err(|error| match error {
            Error::Claim { claim, .. } => TrainError::from(CommError::Disagreement(claim)),
            other => other.into(),
        })?;
        // Nothing goes backward: each stage is one segment, or one between two cuts.
        let segments: Vec<Segment> = stages.into_iter().flat_map(|(_, segments)| segments).collect();
        Ok(Self {
            rank,
            name,
            device,
            plan: model_plan,
            schedule,
            scatter: plan.scatter_gather,
            compress: plan.compress,
            seed: plan.seed,
            params: Arc::new(params),
            caches: segments.iter().map(|_| KeyValueCache::new(capacity)).collect(),
            segments,
            capacity,
            past: 0,
            rounding: plan.rounding(),
            unproven: plan.verify != Verify::Off,
        })
    }

    /// This rank.
    pub fn rank(&self) -> &Arc<Rank> {
        &self.rank
    }

    /// Tokens of each sequence so far.
    pub fn past(&self) -> usize {
        self.past
    }

    /// Tokens that a sequence may have.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of cached keys and values on this rank.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(KeyValueCache::bytes).sum()
    }

    /// Begins new sequences.
    pub fn clear(&mut self) {
        self.past = 0;
        self.caches.iter().for_each(KeyValueCache::clear);
    }

    /// Continues the sequences by the tokens of `batch`, `tokens` of each, and returns the first `columns` numbers of
    /// the model's output for the last of them, `[samples, columns]`: the logits of the next token. `batch` has the
    /// samples of this dp rank.
    ///
    /// The first call also holds a whole pass against a split one, on at most 16 tokens: three more passes. A plan with
    /// [`Verify::Off`] does not.
    ///
    /// Collective: every rank calls it with as many tokens. The ranks of one dp rank give the same tokens and get the
    /// same result.
    ///
    /// # Errors
    /// More tokens than a sequence may have; more columns than the output has; a model that mixes the tokens of a
    /// sequence without the cache, the same error on every rank.
    pub fn next(&mut self, batch: &Batch, tokens: usize, columns: usize) -> Result<Vec<f32>> {
        let _entered = self.rank.enter(&*format!("{}::next", self.name));
        if self.past + tokens > self.capacity {
            let problem = format!("{} and {tokens} tokens, of at most {}", self.past, self.capacity);
            return Err(Error::Shape { op: "decode", problem, shapes: Vec::new() }.into());
        }
        if self.unproven {
            self.require_split(batch, tokens, columns)?;
            self.unproven = false;
        }
        let values = self.pass(&self.caches, &self.compress, batch, tokens, columns)?;
        self.past += tokens;
        Ok(values)
    }

    /// One pass over tokens that follow those in `caches`.
    fn pass(
        &self,
        caches: &[KeyValueCache],
        compress: &Compress,
        batch: &Batch,
        tokens: usize,
        columns: usize,
    ) -> Result<Vec<f32>> {
        let me = self.rank.coords().get(Axis::Pp);
        let activations = self.plan.activations(batch)?;
        let clock = Clock::beside(Purpose::Predict, u64::MAX - 1, 1);
        let (boundaries, sent) = (self.plan.boundaries(), activations.clone().into());
        let codec = Codec::plain(compress, self.seed, boundaries.into(), &self.rank, &self.device, clock)?;
        let codec = Rc::new(RefCell::new(codec));
        let mut transport = PipeTransport::new(&self.rank, self.device.clone(), sent, codec.clone(), self.scatter, 1);
        let holder = |stage: usize| self.schedule.rank_of(stage, 0);
        let (mut here, mut values) = (None, vec![0f32; batch.samples() * columns]);
        for (Segment { of_stage: number, spec, stage, .. }, cache) in self.segments.iter().zip(caches) {
            let (direction, micro) = (Direction::Activation, 0);
            let tag = |stage| Tag { direction, stage, micro };
            let input: Option<Message> = match number.checked_sub(1) {
                _ if here.is_some() => here.take(),
                None => None,
                Some(before) => Some(transport.recv(holder(before), tag(before))?),
            };
            let tape = Tape::decoding(self.rank.clone(), self.params.clone(), self.device.clone(), cache.clone());
            tape.compress_rows(compress.row_schemes());
            let input = input.map(|message| tape.input(message.tensor, message.types));
            let output = stage.forward(&tape, batch, input.as_ref())?;
            cache.advance(tokens);
            let Some(cut) = spec.cut else {
                self.read_logits(&**stage, &output, columns, &mut values)?;
                continue;
            };
            let boundary = &self.plan.boundaries()[cut];
            let message = outgoing(*number, &output, &self.plan.activation_at(boundary, batch)?)?;
            match holder(boundary.stages[1]) {
                next if next != me => transport.send(next, tag(*number), message)?,
                _ if boundary.is_virtual => {
                    here = Some(codec.borrow_mut().cross(Site { cut, direction, micro }, message)?);
                }
                _ => here = Some(message),
            }
        }
        transport.finish()?;
        let last = self.schedule.stages() - 1;
        self.rank.group(Axis::Pp).broadcast_slice(&mut values, holder(last))?;
        self.rank.log().drain();
        Ok(values)
    }

    /// The first `columns` of the last row of each sample.
    fn read_logits(&self, stage: &dyn Stage, output: &Var, columns: usize, values: &mut [f32]) -> Result<()> {
        let prediction = stage.predict(output)?;
        prediction.require_unpadded("decode", "the prediction")?;
        let (samples, shape) = (values.len() / columns.max(1), prediction.shape());
        let (width, all) = (shape.last().copied().unwrap_or(1), shape.count());
        if columns > width || samples == 0 || !all.is_multiple_of(samples * width.max(1)) {
            let problem = format!("{columns} numbers of the last row of each of {samples} samples");
            return Err(Error::Shape { op: "decode", problem, shapes: vec![shape.to_vec()] }.into());
        }
        let each = all / samples;
        for (sample, values) in values.chunks_exact_mut(columns).enumerate() {
            let first = (sample + 1) * each - width;
            let part = prediction.tensor().buffer().slice(first..first + columns)?;
            values.copy_from_slice(&host_floats(&self.device.download(&part)?)?);
        }
        Ok(())
    }
}
