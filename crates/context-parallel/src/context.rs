//! How the ranks of cp lay out a sequence, and attend over it.

use crate::{AllToAll, Balance, Hybrid, Method, Ring};
use meshwork_core::{Axes, Axis};
use meshwork_tensor::op::{Exchange, Mask, Order, Rotary};
use meshwork_tensor::{Error, Result, Var};
use std::sync::Arc;

/// The dim of tokens.
const SEQ: usize = 1;

/// The layout of a sequence over cp, and the exchange of its attention. Everything here is decided before a sequence is
/// cut: no rank counts from its own part.
///
/// ```
/// use meshwork_context_parallel::{ContextParallel, Method};
/// use meshwork_tensor::op::Order;
///
/// // Two ranks, each with the early chunk and the late chunk of a pair.
/// let context = ContextParallel::new(Method::AllGather, Order::zigzag(2), 1);
/// assert_eq!(context.lay_out(&[1, 2, 3, 4], 4, 0)?, [1, 4, 2, 3]);
/// // A token more needs four places more, filled here with zeros.
/// assert_eq!(context.lay_out(&[1, 2, 3, 4, 5], 5, 0)?, [1, 2, 0, 0, 3, 4, 5, 0]);
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ContextParallel {
    method: Method,
    order: Order,
    multiple: usize,
    axes: Axes,
    /// How the order of a batch follows from its documents, and the ranks that it is for.
    balance: Option<(Arc<dyn Balance>, usize)>,
}

impl ContextParallel {
    /// Sequences whose tokens lie in `order` before ranks cut them into equal parts. Where their number of tokens is no
    /// multiple of the chunks of the order and of `multiple`, such as the number of ranks, others follow the last,
    /// which no token sees and which have no loss.
    pub fn new(method: Method, order: Order, multiple: usize) -> Self {
        Self { method, order, multiple: multiple.max(1), axes: Axis::CONTEXT.into(), balance: None }
    }

    /// The same over other axes than those of context parallelism.
    #[must_use]
    pub fn over(self, axes: impl Into<Axes>) -> Self {
        Self { axes: axes.into(), ..self }
    }

    /// The same with an order of its own for each micro-batch in training, which `balance` chooses for `ranks` ranks.
    /// Where there are no documents, and in evaluation, tokens lie in [`order`](Self::order).
    #[must_use]
    pub fn balanced(self, balance: Arc<dyn Balance>, ranks: usize) -> Self {
        Self { balance: Some((balance, ranks.max(1))), ..self }
    }

    /// The layout of a micro-batch whose tokens have these positions in their documents, `[samples, places]`.
    ///
    /// # Errors
    /// Positions of no whole sequences; a [`Balance`] that gives no order of the places.
    pub fn of_documents(&self, positions: &[i32], samples: usize) -> Result<Self> {
        // Documents of one token each, as those of a dry run, have equal work in any order.
        let Some((balance, ranks)) = self.balance.as_ref().filter(|_| positions.iter().any(|&position| position > 0))
        else {
            return Ok(self.clone());
        };
        let mut reads = vec![0; positions.len() / samples.max(1)];
        for sample in positions.chunks_exact(reads.len().max(1)) {
            reads
                .iter_mut()
                .zip(sample)
                .for_each(|(reads, &position)| *reads += u64::from(position.unsigned_abs()) + 1);
        }
        let order = balance.order(&reads, *ranks)?;
        order.tokens(reads.len(), 0..reads.len())?;
        Ok(Self { order, ..self.clone() })
    }

    /// The method.
    pub fn method(&self) -> Method {
        self.method
    }

    /// The order of the tokens.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// The places of a sequence of `seq` tokens.
    pub fn places(&self, seq: usize) -> usize {
        let balanced = self.balance.as_ref().map_or(1, |(balance, ranks)| balance.chunks(*ranks).max(1));
        let (mut step, chunks) = (self.multiple, self.order.chunks());
        while !step.is_multiple_of(chunks) || !step.is_multiple_of(balanced) {
            step += self.multiple;
        }
        seq.next_multiple_of(step)
    }

    /// Whether tokens lie at the places of the sequence, with nothing behind them.
    pub fn is_plain(&self, seq: usize) -> bool {
        self.order.is_natural() && self.places(seq) == seq
    }

    /// The numbers of tokens of sequences `[samples, seq]`, as they lie before ranks cut them: `[samples, places]`,
    /// with `fill` for what follows the last token.
    ///
    /// # Errors
    /// Numbers of no whole sequences.
    pub fn lay_out(&self, values: &[i32], seq: usize, fill: i32) -> Result<Vec<i32>> {
        if seq == 0 || !values.len().is_multiple_of(seq) {
            let problem = format!("{} numbers of sequences of {seq} tokens", values.len());
            return Err(Error::Shape { op: "lay_out", problem, shapes: Vec::new() });
        }
        let places = self.places(seq);
        let runs = self.order.tokens(places, 0..places)?;
        let mut laid = Vec::with_capacity(values.len() / seq * places);
        for tokens in values.chunks_exact(seq) {
            for run in &runs {
                laid.extend_from_slice(&tokens[run.start.min(seq)..run.end.min(seq)]);
                laid.extend(std::iter::repeat_n(fill, run.end.saturating_sub(run.start.max(seq))));
            }
        }
        Ok(laid)
    }

    /// The attention of queries `[b, s/cp, heads, d]` over keys and values `[b, s/cp, 2, kv_heads · d]`, both cut over
    /// cp, as [`grouped_attention`](Var::grouped_attention) of whole sequences gives it. The positions of documents are
    /// those of all places, in the order of the sequence.
    ///
    /// In canonical numerics the result and all gradients have the bits of one rank. All methods but all-to-all then
    /// bring queries, keys and values together, because the gradients of keys and values are sums over queries: every
    /// rank computes all of the attention. With a sliding window, all-gather brings the blocks that queries read from
    /// rank to rank, as a ring does.
    ///
    /// # Errors
    /// Heads that the ranks cannot share out; a sequence that does not fit the order. A ring takes causal attention
    /// alone, and no method a bias of pairs or keys of another sequence: those need not be cut.
    pub fn attend<'a>(
        &self,
        q: &Var,
        kv: &Var,
        rotary: Option<Rotary>,
        mask: impl Into<Mask<'a>>,
        dropout: Option<(f32, &str)>,
    ) -> Result<Var> {
        let mask = mask.into();
        let exchange: Arc<dyn Exchange> = match self.method {
            Method::AllToAll => Arc::new(AllToAll::over(self.axes)),
            _ if q.tape().reduction_blocks().is_some() => {
                let mixed = self.whole(q)?.grouped_attention(&self.whole(kv)?, rotary, mask, dropout)?;
                return mixed.to_order(SEQ, &self.order)?.split(self.axes, SEQ);
            }
            // Of the blocks those that queries read.
            Method::AllGather if mask.window.is_some() && mask.is_plain() => Arc::new(Ring::over(self.axes)),
            Method::AllGather => {
                let kv = kv.all_gather(self.axes, SEQ)?.from_order(SEQ, &self.order)?; // [b, s, 2, kv_heads · d]
                return q.grouped_attention_in(&self.order, &kv, rotary, mask, dropout);
            }
            Method::Ring => Arc::new(Ring::over(self.axes)),
            Method::Hybrid { ring_degree } => Arc::new(Hybrid::over(self.axes, ring_degree)),
        };
        q.exchanged_attention(exchange, &self.order, kv, rotary, mask, dropout)
    }

    /// Values of the tokens of each rank, `[b, s/cp, ..]`, as those of all places in the order of the sequence, whole
    /// on every rank.
    ///
    /// # Errors
    /// A sequence that does not fit the order.
    pub fn whole(&self, x: &Var) -> Result<Var> {
        x.all_gather_invariant(self.axes, SEQ)?.from_order(SEQ, &self.order)
    }
}
