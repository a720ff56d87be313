//! The configuration of a mixture of experts: plain data, checked before anything is declared.

use meshwork_tensor::Error;
pub use meshwork_tensor::kernel::Overflow;
use std::fmt;

meshwork_core::named! {
    /// The router: how tokens and experts are matched.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RouterKind {
        /// The `top_k` largest of a softmax (Shazeer et al., 2017; Mixtral).
        TopK = "topk",
        /// The largest of a softmax (Fedus et al., 2021).
        Switch = "switch",
        /// The two largest of a softmax, the second used in proportion to its weight (Lepikhin et al., 2020).
        Gshard = "gshard",
        /// Each expert takes the tokens with the largest scores (Zhou et al., 2022). It compares tokens with later
        /// tokens of the sequence: a causal model trained with it looks ahead, and cannot generate the same way.
        ExpertChoice = "expert_choice",
        /// The `top_k` largest of sigmoids plus a bias that balances the load (DeepSeek-V3).
        Bias = "bias",
    }
    name: "Its name in a configuration.", ALL: "All, in the order of their names in the configuration."
}

impl fmt::Display for RouterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The tokens whose experts are counted for the auxiliary loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AuxLossScope {
    /// The tokens of each sequence: the same on any mesh.
    #[default]
    Sequence,
    /// The tokens of the micro-batches that all ranks compute at the same time. The result depends on how the batch is
    /// cut, so canonical numerics reject it.
    GlobalBatch,
}

/// Groups of consecutive experts that limit the choice: a token chooses among the experts of its best groups. With one
/// group per rank, this limits the ranks to which a token is sent (device-limited routing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups.
    pub groups: usize,
    /// Groups among which a token chooses its experts.
    pub top_groups: usize,
    /// The score of a group is the sum of this many of its largest scores: 2 in DeepSeek-V3, 1 in DeepSeek-V2.
    pub best: usize,
}

impl ExpertGroups {
    /// One group: no limit.
    pub const NONE: Self = Self { groups: 1, top_groups: 1, best: 1 };
}

/// A mixture of experts in place of the MLPs of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts per token: 1 with `switch`, 2 with `gshard`.
    pub top_k: usize,
    /// The router.
    pub router: RouterKind,
    /// Capacity of an expert per sequence, relative to an even share of the tokens. 0: no limit (dropless).
    pub capacity_factor: f64,
    /// The fate of a token whose expert is full.
    pub overflow: Overflow,
    /// Coefficient of the auxiliary loss.
    pub aux_loss_coeff: f64,
    /// Coefficient of the z-loss.
    pub z_loss_coeff: f64,
    /// The tokens over which the auxiliary loss counts.
    pub aux_loss_scope: AuxLossScope,
    /// The amount by which a step changes the bias of an expert.
    pub bias_update_rate: f64,
    /// The input of the router is multiplied by numbers from `[1 - jitter, 1 + jitter)`.
    pub jitter: f64,
    /// Whether the weights of a token's experts add up to 1. `gshard` and `bias` always normalise, `switch` and
    /// `expert_choice` never.
    pub normalise: bool,
    /// Factor of the weights of routed experts.
    pub routed_scaling: f64,
    /// Groups that limit the choice.
    pub groups: ExpertGroups,
    /// Layers with experts in the model: metrics of the model are means over these layers.
    pub layers: usize,
}

impl Default for MoeConfig {
    /// Eight experts, two for each token, dropless, without losses.
    fn default() -> Self {
        Self {
            num_experts: 8,
            top_k: 2,
            router: RouterKind::TopK,
            capacity_factor: 0.0,
            overflow: Overflow::Drop,
            aux_loss_coeff: 0.0,
            z_loss_coeff: 0.0,
            aux_loss_scope: AuxLossScope::Sequence,
            bias_update_rate: 0.0,
            jitter: 0.0,
            normalise: true,
            routed_scaling: 1.0,
            groups: ExpertGroups::NONE,
            layers: 1,
        }
    }
}

/// An invalid configuration of a mixture of experts.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum MoeError {
    /// No experts at all.
    #[error("num_experts is 0: a layer has at least one expert")]
    NoExperts,
    /// Experts that cannot be distributed evenly over ranks.
    #[error("{num_experts} experts cannot be spread over ep={ep}: each rank holds the same number; degrees that divide them are {}", divisors(*num_experts))]
    Indivisible { num_experts: usize, ep: usize },
    /// An invalid number of experts per token.
    #[error("top_k is {top_k}: with router {router} and {num_experts} experts it is {valid}")]
    TopK { top_k: usize, router: RouterKind, num_experts: usize, valid: String },
    /// Invalid groups of experts.
    #[error("expert groups: {problem}; {valid}")]
    Groups { problem: String, valid: String },
    /// A number out of its range.
    #[error("{key} is {value}: {valid}")]
    Range { key: &'static str, value: f64, valid: &'static str },
    /// A setting that the router does not use.
    #[error("{key} is {value}, and router {router} has none: {valid}")]
    Unread { key: &'static str, value: f64, router: RouterKind, valid: &'static str },
    /// Overflow with expert choice, where no expert exceeds its capacity.
    #[error(
        "overflow is reroute, and router expert_choice leaves nothing over: each expert takes as many tokens as it has room for"
    )]
    NothingOver,
    /// Features that are not divisible by tp.
    #[error(
        "{features} inner features of an expert cannot be cut over tp={tp}: each rank holds the same number; or leave experts whole"
    )]
    Features { features: usize, tp: usize },
    /// Decoding with a router that needs later tokens, which do not exist yet.
    #[error(
        "router expert_choice cannot continue a text: an expert chooses among all tokens of a sequence, and the later ones are not there \
         yet; use a model with another router"
    )]
    LooksAhead,
    /// A setting without canonical numerics, because its sums depend on how the batch is cut.
    #[error("{0} has no canonical numerics: its numbers depend on how the batch is cut; use aux_loss_scope sequence")]
    NotCanonical(&'static str),
}

meshwork_core::debug_as_display!(MoeError);

fn divisors(of: usize) -> String {
    let all: Vec<String> = (1..=of).filter(|n| of.is_multiple_of(*n)).map(|n| n.to_string()).collect();
    all.join(", ")
}

impl From<MoeError> for Error {
    fn from(error: MoeError) -> Self {
        Error::Declaration {
            name: "moe".to_owned(),
            problem: error.to_string(),
            valid: "see meshwork_moe::MoeConfig".to_owned(),
        }
    }
}

impl MoeConfig {
    /// Checks the configuration for `ep` ranks that share the experts, and returns all errors.
    pub fn check(&self, ep: usize) -> Result<(), Vec<MoeError>> {
        let mut wrong = Vec::new();
        let Self { num_experts, top_k, router, groups, .. } = *self;
        if num_experts == 0 {
            return Err(vec![MoeError::NoExperts]);
        }
        if ep == 0 || num_experts % ep != 0 {
            wrong.push(MoeError::Indivisible { num_experts, ep });
        }
        let k = |valid: String| MoeError::TopK { top_k, router, num_experts, valid };
        match router {
            RouterKind::Switch if top_k != 1 => wrong.push(k("1".to_owned())),
            RouterKind::Gshard if top_k != 2 || num_experts < 2 => {
                wrong.push(k("2, of two experts or more".to_owned()))
            }
            _ if top_k == 0 || top_k > num_experts => wrong.push(k(format!("from 1 to {num_experts}"))),
            _ => {}
        }
        wrong.extend(self.check_groups(groups));
        let mut range = |key, value: f64, fits: bool, valid| {
            if !fits {
                wrong.push(MoeError::Range { key, value, valid });
            }
        };
        let factors = [
            ("capacity_factor", self.capacity_factor),
            ("aux_loss_coeff", self.aux_loss_coeff),
            ("z_loss_coeff", self.z_loss_coeff),
            ("bias_update_rate", self.bias_update_rate),
        ];
        for (key, value) in factors {
            range(key, value, value.is_finite() && value >= 0.0, "a number of at least 0");
        }
        range("jitter", self.jitter, (0.0..1.0).contains(&self.jitter), "a number from 0 to below 1");
        let scaling = self.routed_scaling;
        range("routed_scaling", scaling, scaling.is_finite() && scaling > 0.0, "a number above 0");
        let mut unread = |key, value: f64, valid| {
            if value > 0.0 {
                wrong.push(MoeError::Unread { key, value, router, valid });
            }
        };
        if router != RouterKind::Bias {
            unread("bias_update_rate", self.bias_update_rate, "leave it at 0, or use router bias");
        }
        if router == RouterKind::ExpertChoice {
            unread("aux_loss_coeff", self.aux_loss_coeff, "leave it at 0: its experts take equal numbers of tokens");
        }
        if router == RouterKind::ExpertChoice && self.overflow == Overflow::Reroute {
            wrong.push(MoeError::NothingOver);
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    fn check_groups(&self, of: ExpertGroups) -> Option<MoeError> {
        let ExpertGroups { groups, top_groups, best } = of;
        let (experts, k) = (self.num_experts, self.top_k);
        let refuse = |problem: String, valid: String| Some(MoeError::Groups { problem, valid });
        if groups == 0 || !experts.is_multiple_of(groups) {
            return refuse(
                format!("{experts} experts are no {groups} groups of one size"),
                format!("use {} groups", divisors(experts)),
            );
        }
        if top_groups == 0 || top_groups > groups {
            return refuse(format!("top_groups is {top_groups} of {groups}"), format!("choose from 1 to {groups}"));
        }
        if best == 0 || best > experts / groups {
            return refuse(
                format!("the score of a group sums its {best} best of {} experts", experts / groups),
                "sum from 1 to all of them".to_owned(),
            );
        }
        let open = top_groups * (experts / groups);
        if groups > 1 && k > open {
            return refuse(
                format!("{top_groups} of {groups} groups have {open} experts, and top_k is {k}"),
                "choose among more groups, or fewer experts".to_owned(),
            );
        }
        if groups > 1 && self.router == RouterKind::ExpertChoice {
            return refuse("experts choose tokens".to_owned(), "leave groups at 1, or use another router".to_owned());
        }
        None
    }

    /// Places for the choices of a token: `top_k`, or all experts with expert choice.
    pub fn places(&self) -> usize {
        if self.router == RouterKind::ExpertChoice { self.num_experts } else { self.top_k }
    }
}
