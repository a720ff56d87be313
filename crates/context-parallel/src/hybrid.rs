//! Heads against tokens between neighbours, and a ring over the neighbourhoods (USP, Fang and Zhao, arXiv:2405.07719).
//!
//! With a ring of R places, cp = R · n: the n ranks of a place exchange heads for tokens, as in
//! [`AllToAll`](crate::AllToAll); then each has all their tokens of some heads, and goes round with the ranks of the
//! other places that have the same heads, as in [`Ring`](crate::Ring).

use crate::heads::{Heads, named};
use crate::pass::Pass;
use meshwork_core::{Axes, DType};
use meshwork_tensor::op::{Exchange, Exchanged, Order};
use meshwork_tensor::{Error, Result, Tensor};

/// A ring of all-to-alls over some axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hybrid {
    axes: Axes,
    ring_degree: usize,
}

impl Hybrid {
    /// Over the ranks of `axes`, with `ring_degree` places in the ring.
    pub fn over(axes: impl Into<Axes>, ring_degree: usize) -> Self {
        Self { axes: axes.into(), ring_degree }
    }

    fn heads<'a>(&self, call: &Exchanged<'a>, stored: DType) -> Result<Heads<'a>> {
        let (size, ring) = (call.tape.rank().group_over(&self.axes).size(), self.ring_degree);
        if ring == 0 || !size.is_multiple_of(ring) {
            let nearest = (1..=size).filter(|&of| size.is_multiple_of(of)).min_by_key(|of| of.abs_diff(ring));
            let (what, extent) = (self.name().to_owned(), call.shape.sequence);
            let nearest = nearest.unwrap_or(1);
            let problem = format!("a ring of {ring} places does not divide the ranks: use a ring degree of {nearest}");
            return Err(Error::Placement { what, dim: 1, extent, axis: named(self.axes), degree: size, problem });
        }
        let advice = |most: usize| {
            let fits = (1..=most).rev().find(|&of| size.is_multiple_of(of) && most.is_multiple_of(of)).unwrap_or(1);
            format!("use a ring degree of {}", size / fits)
        };
        Heads::new(call, (self.name(), self.axes), (size / ring, Order::default()), stored, advice)
    }
}

impl Exchange for Hybrid {
    fn name(&self) -> &'static str {
        "hybrid_attention"
    }

    fn axes(&self) -> Axes {
        self.axes
    }

    fn attend(&self, call: &Exchanged<'_>, q: &Tensor, kv: &Tensor) -> Result<(Tensor, [Tensor; 4])> {
        let (heads, mut dropout) = (self.heads(call, kv.dtype())?, None);
        let masks = heads.masks(call, &mut dropout);
        let pass = Pass::new(call, heads.group(), self.ring_degree, heads.share.shape, masks)?;
        let (of_q, of_kv) = (heads.queries(q)?, heads.keys(kv)?);
        let (out, lse) = pass.attend(&of_q, &of_kv)?;
        Ok((heads.queries_back(&out)?, [of_q, of_kv, out, lse]))
    }

    fn gradients(&self, call: &Exchanged<'_>, dout: &Tensor, saved: [Tensor; 4]) -> Result<(Tensor, Tensor)> {
        let (heads, mut dropout) = (self.heads(call, saved[1].dtype())?, None);
        let masks = heads.masks(call, &mut dropout);
        let pass = Pass::new(call, heads.group(), self.ring_degree, heads.share.shape, masks)?;
        let (dq, dkv) = pass.gradients(&heads.queries(dout)?, &saved)?;
        Ok((heads.queries_back(&dq)?, heads.keys_back(&dkv)?.cast(saved[1].dtype())?))
    }
}
