//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) with the heads cut over tp.

use crate::attention::query_factor;
use crate::linear::{ReplicatedLinear, require_even};
use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::{Axis, Mesh};
use meshwork_tensor::op::Rotary;
use meshwork_tensor::{Declarations, Error, Init, ParamId, Placement, Result, Role, Tape, Var};

/// The heads of a latent attention, over all ranks, and the latent vectors that they read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentHeads {
    /// Heads.
    pub heads: usize,
    /// Features of the latent vector of queries. `None`: queries are a product of x̂ itself.
    pub query_rank: Option<usize>,
    /// Features of the latent vector of keys and values.
    pub kv_rank: usize,
    /// Features of a head's queries and keys that do not turn, an even number.
    pub plain: usize,
    /// Features of a head's queries and keys that turn, an even number. All heads share those of keys.
    pub turning: usize,
    /// Features of a head's values.
    pub values: usize,
    /// Added to the mean square in the norms of latent vectors.
    pub norm_eps: f64,
}

impl LatentHeads {
    /// Features of a head's queries and keys.
    pub fn query_features(&self) -> usize {
        self.plain + self.turning
    }

    /// Features of a head in memory, those of values being as many as those of queries and keys: zeros fill up the
    /// fewer ones.
    fn width(&self) -> usize {
        self.query_features().max(self.values.next_multiple_of(2))
    }
}

/// Queries, keys and values from latent vectors, which are all that a token has of its own:
///
/// ```text
/// c_q = norm(x̂ · Wdqᵀ)           Q = c_q · Wqᵀ (or x̂ · Wqᵀ)
/// [c_kv, k] = x̂ · Wdkvᵀ          [K, V] = norm(c_kv) · Wkvᵀ
/// y = x + dropout(concat_heads(softmax(s · turn(Q) turn([k, K])ᵀ) V) · Woᵀ)
/// ```
///
/// Latent vectors are computed where x̂ lies, with weights that are whole on every rank of tp; with sequence
/// parallelism each rank has those of its tokens, or of all in canonical numerics. They enter the block in place of x̂.
/// Each rank of tp has heads/tp of the heads, and the key k that all heads share.
#[derive(Clone, Debug)]
pub struct ParallelLatentAttention {
    name: String,
    of: LatentHeads,
    rotary: Option<Rotary>,
    of_queries: Option<Latent>,
    q: ColumnLinear,
    of_keys: Latent,
    kv: ColumnLinear,
    scale: Option<f64>,
    out: RowLinear,
}

/// A projection to a latent vector, of which the first features are normed.
#[derive(Clone, Debug)]
struct Latent {
    down: ReplicatedLinear,
    norm: ParamId,
    features: usize,
    eps: f64,
}

impl Latent {
    fn new(
        params: &mut Declarations,
        name: &str,
        [input, features, beside]: [usize; 3],
        eps: f64,
        init: Init,
    ) -> Result<Self> {
        let down = ReplicatedLinear::new(params, &format!("{name}_down"), input, features + beside, init)?;
        let norm = format!("{name}_norm.weight");
        let norm = params.declare(norm, &[features], Placement::replicated(), Role::Norm, Init::Ones)?;
        Ok(Self { down, norm, features, eps })
    }

    /// `x̂ [b, s, hidden]` → the product `[b, s, features + beside]`, and the normed vector `[b, s, features]`.
    fn forward(&self, tape: &Tape, x: &Var) -> Result<(Var, Var)> {
        let down = self.down.forward(tape, x)?;
        let alone = down.shape()[2] == self.features;
        let vector = if alone { down.clone() } else { down.narrow(2, 0..self.features)? };
        Ok((down, vector.rms_norm_operand(&tape.param(self.norm)?, self.eps)?))
    }
}

impl ParallelLatentAttention {
    /// Declares, whole on every rank, `{name}.q_down` [query_rank, hidden] and `{name}.q_norm`, if queries have a
    /// latent vector, `{name}.kv_down` [kv_rank + turning, hidden] and `{name}.kv_norm`; and cut along heads `{name}.q`
    /// [heads, query features, query_rank or hidden], `{name}.kv` [heads, plain + values, kv_rank] and `{name}.out`
    /// [hidden, heads, values]. A head of `q` has half of the turning features, half of the others, and the second
    /// halves of both. Scores are multiplied by `scale`, or else by 1/√query features. `init` has the initial values of
    /// the projections in front of attention and of the one behind it.
    ///
    /// # Errors
    /// Heads that tp does not divide; odd numbers of features.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        of: LatentHeads,
        (rotary, scale): (Option<Rotary>, Option<f64>),
        [init, out]: [Init; 2],
    ) -> Result<Self> {
        let LatentHeads { heads, query_rank, kv_rank, plain, turning, values, norm_eps: eps } = of;
        if !plain.is_multiple_of(2) || !turning.is_multiple_of(2) {
            let problem = format!("{plain} features of a head and {turning} that turn lie in two halves");
            return Err(Error::Declaration { name: name.to_owned(), problem, valid: "use even numbers".to_owned() });
        }
        let part = |part: &str| format!("{name}.{part}");
        require_even(mesh, &part("q"), &[heads], 0)?;
        let of_queries = query_rank.map(|rank| Latent::new(params, &part("q"), [hidden, rank, 0], eps, init));
        let (of_queries, of_q) = (of_queries.transpose()?, query_rank.unwrap_or(hidden));
        let q = (&[heads, of.query_features()][..], 0);
        let q = ColumnLinear::new(params, mesh, &part("q"), of_q, q, false, init)?;
        let of_keys = Latent::new(params, &part("kv"), [hidden, kv_rank, turning], eps, init)?;
        let kv = (&[heads, plain + values][..], 0);
        let kv = ColumnLinear::new(params, mesh, &part("kv"), kv_rank, kv, false, init)?;
        let out = RowLinear::new(params, mesh, &part("out"), (&[heads, values], 0), hidden, false, out)?;
        let rotary = rotary.map(|rotary| Rotary { features: Some(turning), ..rotary });
        let filled = of.width() != of.query_features();
        let scale = scale.or(filled.then(|| (of.query_features() as f64).powf(-0.5)));
        let scale = scale.and_then(|scale| query_factor(scale, of.width()));
        Ok(Self { name: name.to_owned(), of, rotary, of_queries, q, of_keys, kv, scale, out })
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same. `attend` takes queries `[b, s, heads/tp, d]`,
    /// keys and values `[b, s, 2, heads/tp · d]`, the rotary embedding, and (p, layer name) of the dropout.
    pub fn forward_by(
        &self,
        tape: &Tape,
        normed: &Var,
        region: Region,
        residual: Option<&Var>,
        attend: impl FnOnce(&Var, &Var, Option<Rotary>, Option<(f32, &str)>) -> Result<Var>,
        dropout: f32,
    ) -> Result<Var> {
        let LatentHeads { kv_rank, turning, values, .. } = self.of;
        let inner = region.for_whole_weights(tape);
        let x = region.moved(inner, normed)?; // [b, s, hidden]
        let of_q = match &self.of_queries {
            Some(latent) => latent.forward(tape, &x)?.1,
            None => x.clone(),
        };
        // [b, s, heads/tp, query features], Shard(heads)
        let q = self.q.forward_adapted(tape, &inner.enter(&of_q)?, &of_q, inner)?;
        let (down, latent) = self.of_keys.forward(tape, &x)?;
        // [b, s, heads/tp, plain + values], Shard(heads)
        let kv = self.kv.forward_adapted(tape, &inner.enter(&latent)?, &latent, inner)?;
        let shared = inner.enter(&down.narrow(2, kv_rank..kv_rank + turning)?)?; // [b, s, turning], Replicate
        let kv = self.keys_and_values(&shared.repeat(2, kv.shape()[2], Axis::Tp)?, &kv)?;
        let q = self.filled(&q.unflatten(3, &[2, self.of.query_features() / 2])?)?;
        let q = self.scale.map_or(Ok(q.clone()), |scale| q.scale(scale))?;
        let mixed = attend(&q, &kv, self.rotary, Some((dropout, &self.name)))?; // [b, s, heads/tp, d], Shard(heads)
        let mixed = if values < self.of.width() { mixed.narrow(3, 0..values)? } else { mixed };
        self.out.forward(tape, &mixed, region, residual, dropout) // Σ_tp, + residual
    }

    /// `shared [b, s, heads/tp, turning]` and `kv [b, s, heads/tp, plain + values]` → `[b, s, 2, heads/tp · d]`.
    fn keys_and_values(&self, shared: &Var, kv: &Var) -> Result<Var> {
        let LatentHeads { plain, turning, values, .. } = self.of;
        let halves = |x: &Var, features: usize| x.unflatten(3, &[2, features / 2]);
        let k = halves(shared, turning)?.concat(&halves(&kv.narrow(3, 0..plain)?, plain)?, 4)?;
        let v = kv.narrow(3, plain..plain + values)?.widen(3, self.of.width())?;
        let [k, v] = [self.filled(&k)?, v].map(|x| x.flatten(2..4)?.unsqueeze(2)); // [b, s, 1, heads/tp · d]
        k?.concat(&v?, 2)
    }

    /// Halves of heads `[b, s, heads/tp, 2, query features / 2]` → heads of the width in memory `[b, s, heads/tp, d]`.
    fn filled(&self, halves: &Var) -> Result<Var> {
        halves.widen(4, self.of.width() / 2)?.flatten(3..5)
    }
}
