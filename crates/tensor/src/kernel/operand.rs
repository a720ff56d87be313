//! Converts kernel arguments for a [`Proxy`]: buffers become buffers of the inner device while a kernel runs; plain
//! values pass unchanged.

use super::*;
use crate::error::Result;
use crate::proxy::Proxy;
use crate::tape::{RowBlocks, Terms};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse};
use meshwork_core::{Buffer, DType};
use meshwork_optim::{Rule, Update};
use std::ops::Range;

/// An argument of a kernel.
pub(super) trait Operand: Sized {
    /// Its counterpart on the inner device.
    type Inner<'a>;

    /// Runs `work` on its inner buffer.
    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Self::Inner<'a>) -> Result<T>) -> Result<T>;
}

/// Arguments without device memory.
macro_rules! plain {
    ($($type:ty),* $(,)?) => {$(
        impl Operand for $type {
            type Inner<'a> = Self;

            fn lend<T>(self, _proxy: &impl Proxy, work: impl for<'a> FnOnce(Self) -> Result<T>) -> Result<T> {
                work(self)
            }
        }
    )*};
}

plain!(
    usize,
    f64,
    bool,
    DType,
    [usize; 3],
    &[usize],
    Range<usize>,
    RowBlocks,
    Terms,
    Gemm,
    [Gemm; 2],
    GroupedGemm<'_>,
    &GroupBlocks,
    Map,
    Zip,
    &DropoutMask,
    Groups,
    Statistics,
    Windows,
    AttentionShape,
    GroupedShape,
    VocabShard,
    &Selection,
    Pick,
    &Scheme,
    &Sparse,
    Shape,
    Draws,
    Fold,
    Feedback,
    PowerSgd,
    Update,
);

impl Operand for &Rule {
    type Inner<'a> = Self;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Self) -> Result<T>) -> Result<T> {
        proxy.accepts(self)?;
        work(self)
    }
}

impl Operand for &WholePart<'_> {
    type Inner<'a> = Self;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Self) -> Result<T>) -> Result<T> {
        proxy.accepts(self.rule)?;
        work(self)
    }
}

impl Operand for &Buffer {
    type Inner<'a> = &'a Buffer;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(&'a Buffer) -> Result<T>) -> Result<T> {
        work(&proxy.read(self))
    }
}

impl Operand for &mut Buffer {
    type Inner<'a> = &'a mut Buffer;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(&'a mut Buffer) -> Result<T>) -> Result<T> {
        let mut inner = proxy.take(self);
        let result = work(&mut inner);
        proxy.give_back(self, inner);
        result
    }
}

impl Operand for &[Buffer] {
    type Inner<'a> = &'a [Buffer];

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(&'a [Buffer]) -> Result<T>) -> Result<T> {
        work(&self.iter().map(|x| proxy.read(x)).collect::<Vec<_>>())
    }
}

impl Operand for &mut [Buffer] {
    type Inner<'a> = &'a mut [Buffer];

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(&'a mut [Buffer]) -> Result<T>) -> Result<T> {
        let mut inner: Vec<Buffer> = self.iter_mut().map(|x| proxy.take(x)).collect();
        let result = work(&mut inner);
        self.iter_mut().zip(inner).for_each(|(x, inner)| proxy.give_back(x, inner));
        result
    }
}

impl Operand for [&Buffer; 2] {
    type Inner<'a> = [&'a Buffer; 2];

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce([&'a Buffer; 2]) -> Result<T>) -> Result<T> {
        work(self.map(|x| proxy.read(x)).each_ref())
    }
}

impl Operand for &[Buffer; 2] {
    type Inner<'a> = &'a [Buffer; 2];

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(&'a [Buffer; 2]) -> Result<T>) -> Result<T> {
        work(&self.each_ref().map(|x| proxy.read(x)))
    }
}

impl Operand for Option<&Buffer> {
    type Inner<'a> = Option<&'a Buffer>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Option<&'a Buffer>) -> Result<T>) -> Result<T> {
        work(self.map(|x| proxy.read(x)).as_ref())
    }
}

/// An operand whose ownership the kernel takes.
impl Operand for Option<Buffer> {
    type Inner<'a> = Self;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Self) -> Result<T>) -> Result<T> {
        work(self.map(|x| proxy.keep(x)))
    }
}

impl Operand for MeanVariance<'_> {
    type Inner<'a> = MeanVariance<'a>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(MeanVariance<'a>) -> Result<T>) -> Result<T> {
        let (mean, variance) = (proxy.read(self.mean), proxy.read(self.variance));
        work(MeanVariance { mean: &mean, variance: &variance, eps: self.eps })
    }
}

impl Operand for Choices<'_> {
    type Inner<'a> = Choices<'a>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Choices<'a>) -> Result<T>) -> Result<T> {
        let (ids, slots) = (proxy.read(self.ids), proxy.read(self.slots));
        work(Choices { ids: &ids, slots: &slots, k: self.k })
    }
}

impl Operand for AttentionMasks<'_> {
    type Inner<'a> = AttentionMasks<'a>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(AttentionMasks<'a>) -> Result<T>) -> Result<T> {
        let positions = self.documents.map(|documents| proxy.read(documents.positions));
        let documents = self.documents.zip(positions.as_ref());
        let documents = documents.map(|(documents, positions)| DocumentPositions { positions, ..documents });
        work(AttentionMasks { documents, ..self })
    }
}

impl Operand for TableGrad<'_> {
    type Inner<'a> = TableGrad<'a>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(TableGrad<'a>) -> Result<T>) -> Result<T> {
        let Self { buffer, start, rows, accumulate, blocks } = self;
        buffer.lend(proxy, |buffer| work(TableGrad { buffer, start, rows, accumulate, blocks }))
    }
}

impl Operand for GroupedGrad<'_> {
    type Inner<'a> = GroupedGrad<'a>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(GroupedGrad<'a>) -> Result<T>) -> Result<T> {
        let Self { buffer, start, accumulate } = self;
        buffer.lend(proxy, |buffer| work(GroupedGrad { buffer, start, accumulate }))
    }
}

impl Operand for Option<Measured<'_>> {
    type Inner<'a> = Option<Measured<'a>>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Option<Measured<'a>>) -> Result<T>) -> Result<T> {
        match self {
            None => work(None),
            Some(Measured::Sums(into, at)) => into.lend(proxy, |into| work(Some(Measured::Sums(into, at)))),
            Some(Measured::Digits(into, at)) => into.lend(proxy, |into| work(Some(Measured::Digits(into, at)))),
            Some(Measured::Values(into)) => into.lend(proxy, |into| work(Some(Measured::Values(into)))),
        }
    }
}

impl Operand for WholeVectors<'_> {
    type Inner<'a> = WholeVectors<'a>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(WholeVectors<'a>) -> Result<T>) -> Result<T> {
        let Self { grads, states, sets, totals, gathered } = self;
        let read = |vectors: &[Buffer]| vectors.iter().map(|x| proxy.read(x)).collect::<Vec<_>>();
        let (sets, totals) = (read(sets), read(totals));
        let (grads, gathered) = (proxy.read(grads), gathered.map(|x| proxy.read(x)));
        states.lend(proxy, |states| {
            work(WholeVectors { grads: &grads, states, sets: &sets, totals: &totals, gathered: gathered.as_ref() })
        })
    }
}

impl Operand for &mut [FlatParts<'_>] {
    type Inner<'a> = &'a mut [FlatParts<'a>];

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(&'a mut [FlatParts<'a>]) -> Result<T>) -> Result<T> {
        let read_or_taken = |flat: &mut FlatParts<'_>| {
            let states = flat.states.iter_mut().map(|x| proxy.take(x)).collect::<Vec<_>>();
            (proxy.take(flat.weights), proxy.read(flat.grads), states)
        };
        let mut inner: Vec<_> = self.iter_mut().map(read_or_taken).collect();
        let flats = inner.iter_mut().zip(&*self).map(|((weights, grads, states), flat)| {
            let ranges = flat.ranges;
            FlatParts { weights, grads, states, ranges }
        });
        let result = work(&mut flats.collect::<Vec<_>>());
        for (flat, (weights, _, states)) in self.iter_mut().zip(inner) {
            proxy.give_back(flat.weights, weights);
            flat.states.iter_mut().zip(states).for_each(|(x, inner)| proxy.give_back(x, inner));
        }
        result
    }
}

impl Operand for &mut Sender<Buffer> {
    type Inner<'a> = &'a mut Sender<Buffer>;

    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(&'a mut Sender<Buffer>) -> Result<T>) -> Result<T> {
        let [residual, estimate, momentum] = self.all_mut().map(|x| proxy.take(x));
        let mut inner = Sender { residual, estimate, momentum };
        let result = work(&mut inner);
        let Sender { residual, estimate, momentum } = inner;
        self.all_mut().into_iter().zip([residual, estimate, momentum]).for_each(|(x, inner)| proxy.give_back(x, inner));
        result
    }
}
