//! Routers: logits, scores, the experts of each token, and their weights.
//!
//! | router | scores s | experts | weights |
//! |---|---|---|---|
//! | `topk` | softmax | the k largest | s, or s divided by the sum of the chosen s |
//! | `switch` (equations 1 and 2) | softmax | the largest | s |
//! | `gshard` | softmax | the two largest, the second with probability 2 g₂ | s divided by the sum of both |
//! | `expert_choice` | softmax | each expert takes the tokens with the largest s | s |
//! | `bias` (DeepSeek-V3, equations 12 to 16) | sigmoid | the k largest s + b | s divided by the sum of the chosen s, scaled |
//!
//! Ties go to the lower expert, so that the choice is a function of the scores. A choice that is dropped for lack of
//! capacity does not change the other weights; a rerouted choice has the score of the expert that takes it. The load,
//! from which losses and biases are computed, counts choices before dropping and rerouting. The decision is made once,
//! in the first forward: the tape stores it as integers, and a recomputed forward
//! [repeats](meshwork_tensor::tape::Decisions) it.

use crate::balance::{self, BiasUpdate, Load, whole_sequences};
use crate::dispatch::Chosen;
use crate::{AuxLossScope, MoeConfig, MoeError, RouterKind, capacity};
use meshwork_core::rules::Operand;
use meshwork_core::{Buffer, DType, SpmdError, Types};
use meshwork_tensor::kernel::{Draw, Overflow, Pick, Selected, Selection};
use meshwork_tensor::param::StatisticId;
use meshwork_tensor::tape::{Backward, Forward, Mode, Op};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Shape, Tape, Tensor, Var};

/// The names of the metrics that routers report, and that a model declares: the sums over layers of both losses,
/// without coefficients, and the means over layers of the entropy and of the fraction of dropped choices.
pub const METRICS: [&str; 4] = ["moe_aux_loss", "moe_z_loss", "moe_router_entropy", "moe_dropped"];

/// Chooses experts for tokens.
#[derive(Clone, Debug)]
pub struct Router {
    name: String,
    config: MoeConfig,
    weight: ParamId,
    bias: Option<ParamId>,
    tokens: ParamId,
    load: StatisticId,
}

/// The decision of a router.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The choices that are used.
    pub chosen: Chosen,
    /// Their weights, `[samples, seq, places]`.
    pub weights: Var,
}

impl Router {
    /// Declares `{name}.weight` `[experts, hidden]`, the buffer `{name}.tokens` `[experts]`, where each step stores the
    /// number of choices of its whole batch, and for `bias` the buffer `{name}.bias` `[experts]`. All are replicated.
    ///
    /// # Errors
    /// An invalid configuration.
    pub fn new(params: &mut Declarations, name: &str, hidden: usize, config: MoeConfig, init: Init) -> Result<Self> {
        config.check(1).map_err(|mut wrong| wrong.remove(0))?;
        if params.reduction_blocks().is_some() && config.aux_loss_scope == AuxLossScope::GlobalBatch {
            return Err(MoeError::NotCanonical("aux_loss_scope global_batch").into());
        }
        let experts = config.num_experts;
        let whole = Placement::replicated;
        let weight = params.declare(format!("{name}.weight"), &[experts, hidden], whole(), Role::Weight, init)?;
        let mut buffer =
            |part: &str| params.declare(format!("{name}.{part}"), &[experts], whole(), Role::Buffer, Init::Zeros);
        let tokens = buffer("tokens")?;
        let bias = if config.router == RouterKind::Bias { Some(buffer("bias")?) } else { None };
        // The bias of a frozen router never changes.
        let rate = if params.is_freezing() { 0.0 } else { config.bias_update_rate as f32 };
        let rule = BiasUpdate { rate };
        let load = params.declare_statistic(std::iter::once(tokens).chain(bias).collect(), rule);
        Ok(Self { name: name.to_owned(), config, weight, bias, tokens, load })
    }

    /// The buffer of the tokens of each expert in the last step.
    pub fn tokens(&self) -> ParamId {
        self.tokens
    }

    /// The buffer of the bias, with router `bias`.
    pub fn bias(&self) -> Option<ParamId> {
        self.bias
    }

    /// Its configuration.
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// Routes the tokens `x [samples, seq, hidden]`. `whole` brings together their logits `[samples, seq, experts]`,
    /// whose sequences must then be whole on this rank; [`Ok`] where those of x are. Adds the losses, reports the
    /// metrics of [`METRICS`], and notes the load.
    pub fn route(&self, tape: &Tape, x: &Var, whole: impl FnOnce(Var) -> Result<Var>) -> Result<Routed> {
        let config = &self.config;
        let noisy = x.jitter(config.jitter as f32, &format!("{}.jitter", self.name))?;
        let logits = whole(noisy.cast(DType::F32)?.exact_linear(&tape.param(self.weight)?, 1)?)?; // [b, s, experts]
        let scores = if matches!(config.router, RouterKind::Bias) { logits.sigmoid()? } else { logits.softmax()? };
        whole_sequences("route", Operand::value("x", scores.types(), 3))?;
        let pick = self.pick();
        let mut made = None;
        let [chosen, routed, kept] = tape.decide(|| {
            let (choices, weights) = self.choose(tape, &scores, pick)?;
            made = weights;
            Ok(choices)
        })?;
        let weights = Weights { choices: Some(routed), pick, shape: scores.shape(), made };
        let weights = scores.tape().apply(weights, &[&scores])?;
        self.balance(tape, &logits, &scores, &chosen)?;
        let of_layer = 1.0 / config.layers as f64;
        tape.report(METRICS[2], &balance::entropy(&scores)?.scale(of_layer)?)?;
        if config.router != RouterKind::ExpertChoice {
            tape.report(METRICS[3], &balance::unused(&kept, &scores)?.scale(of_layer)?)?;
        }
        let device = tape.device();
        let loads = device.routing()?.loads(chosen.buffer(), config.num_experts)?;
        tape.note(self.load, 1.0, &[&Tensor::from_buffer(device, loads, [config.num_experts])?]);
        let seq = scores.shape()[1];
        let chosen = Chosen {
            experts: kept,
            num_experts: config.num_experts,
            types: scores.types(),
            capacity: self.capacity(tape, seq),
            top_k: config.top_k,
        };
        Ok(Routed { chosen, weights })
    }

    /// The tokens of a sequence that an expert takes. In decoding there is no limit: the number of tokens in a pass is
    /// not a property of the sequence, and dropping must not differ between passes.
    fn capacity(&self, tape: &Tape, seq: usize) -> Option<usize> {
        if tape.decodes() { None } else { capacity(&self.config, seq) }
    }

    /// The chosen experts, the experts after rerouting, and the used choices; and the weights if the device computes
    /// them with the choice. All are `[samples, seq, places]`.
    fn choose(&self, tape: &Tape, scores: &Var, pick: Pick) -> Result<([Tensor; 3], Option<Tensor>)> {
        let (config, device) = (&self.config, tape.device());
        let &[samples, seq, experts] = &scores.shape()[..] else {
            return Err(meshwork_tensor::Error::Shape {
                op: "route",
                problem: "tokens are [samples, seq, hidden]".to_owned(),
                shapes: vec![scores.shape().to_vec()],
            });
        };
        if config.router == RouterKind::ExpertChoice && tape.decodes() {
            return Err(MoeError::LooksAhead.into());
        }
        let capacity = self.capacity(tape, seq);
        let shape = [samples, seq, config.places()];
        if let (RouterKind::ExpertChoice, Some(capacity)) = (config.router, capacity) {
            let kept = device.routing()?.select_tokens(scores.tensor().buffer(), samples, experts, capacity)?;
            let kept = Tensor::from_buffer(device, kept, shape)?;
            return Ok(([kept.clone(), kept.clone(), kept], None));
        }
        let second = match (config.router, tape.mode()) {
            (RouterKind::Gshard, Mode::Train) => {
                let key = tape.random_key(&format!("{}.second", self.name))?;
                Some(Draw { key, first: scores.first_sample() * seq as u64 })
            }
            _ => None,
        };
        let groups = config.groups;
        let selection = Selection {
            samples,
            experts,
            k: config.top_k,
            groups: groups.groups,
            top_groups: groups.top_groups,
            group_best: groups.best,
            capacity,
            overflow: config.overflow,
            second,
        };
        let bias = self.bias.map(|bias| tape.param(bias)).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.tensor().buffer());
        let selected = device.routing()?.select(scores.tensor().buffer(), bias, &selection, pick)?;
        let tensor = |buffer| Tensor::from_buffer(device, buffer, shape);
        let Selected { chosen, routed, kept, weights } = selected;
        Ok(([tensor(chosen)?, tensor(routed)?, tensor(kept)?], Some(tensor(weights)?)))
    }

    /// How weights are computed from scores.
    fn pick(&self) -> Pick {
        let config = &self.config;
        let normalise = match config.router {
            RouterKind::TopK => config.normalise,
            RouterKind::Gshard | RouterKind::Bias => true,
            RouterKind::Switch | RouterKind::ExpertChoice => false,
        };
        Pick { experts: config.num_experts, k: config.places(), normalise, scale: config.routed_scaling }
    }

    fn balance(&self, tape: &Tape, logits: &Var, scores: &Var, chosen: &Tensor) -> Result<()> {
        let (config, experts) = (&self.config, self.config.num_experts);
        let add = |name, coefficient: f64, value: Var| match coefficient > 0.0 {
            true => tape.add_loss(name, coefficient, &value),
            false => tape.report(name, &value),
        };
        if config.router != RouterKind::ExpertChoice {
            let counted = match config.router {
                RouterKind::Gshard => {
                    let [first] = tape.decide(|| Ok([first_choices(scores)?]))?;
                    first
                }
                _ => chosen.clone(),
            };
            let load = match config.aux_loss_scope {
                AuxLossScope::Sequence => Load::of_sequences(&counted, experts)?,
                AuxLossScope::GlobalBatch => Load::of_all(&counted, experts, scores)?,
            };
            let value = match config.router {
                RouterKind::Gshard => balance::gshard_loss(scores, &load)?,
                RouterKind::Bias => balance::switch_loss(&normalised(scores)?, &load)?,
                _ => balance::switch_loss(scores, &load)?,
            };
            add(METRICS[0], config.aux_loss_coeff, value)?;
        }
        add(METRICS[1], config.z_loss_coeff, balance::z_loss(logits)?)
    }
}

/// The expert with the largest score, for each token.
fn first_choices(scores: &Var) -> Result<Tensor> {
    let (shape, device) = (scores.shape(), scores.tape().device());
    let [samples, seq, experts] = [shape[0], shape[1], shape[2]];
    let one = Selection {
        samples,
        experts,
        k: 1,
        groups: 1,
        top_groups: 1,
        group_best: 1,
        capacity: None,
        overflow: Overflow::Drop,
        second: None,
    };
    let pick = Pick { experts, k: 1, normalise: false, scale: 1.0 };
    let first = device.routing()?.select(scores.tensor().buffer(), None, &one, pick)?;
    Tensor::from_buffer(device, first.chosen, [samples, seq, 1])
}

/// Scores divided by their sum.
fn normalised(scores: &Var) -> Result<Var> {
    let (shape, experts) = (scores.shape(), scores.shape()[2]);
    let pick = Pick { experts, k: experts, normalise: true, scale: 1.0 };
    scores.tape().apply(Weights { choices: None, pick, shape, made: None }, &[scores])
}

/// The weights of choices, or of all experts, as a function of the scores.
#[derive(Debug)]
struct Weights {
    choices: Option<Tensor>,
    pick: Pick,
    shape: Shape,
    /// The weights, if the device computed them with the choice. A recomputed forward reuses the choice and computes
    /// them again.
    made: Option<Tensor>,
}

impl Weights {
    fn choices(&self) -> Option<&Buffer> {
        self.choices.as_ref().map(Tensor::buffer)
    }
}

impl Op for Weights {
    fn name(&self) -> &'static str {
        "routing_weights"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["scores"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        whole_sequences(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let scores = inputs[0];
        cx.save_input(0)?;
        if let Some(made) = &self.made {
            return Ok(made.clone());
        }
        let weights = scores.device().routing()?.pick(scores.buffer(), self.choices(), self.pick)?;
        Tensor::from_buffer(scores.device(), weights, self.shape.with(2, self.pick.k))
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        let scores = cx.saved(0)?;
        let routing = grad.device().routing()?;
        let dscores = routing.pick_grad(scores.buffer(), self.choices(), grad.buffer(), self.pick)?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dscores, self.shape)?)])
    }
}
