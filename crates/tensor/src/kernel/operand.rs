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
    /// Its counterpart on the inner device, with the memory of that.
    type Inner<'a>;

    /// Runs `work` on its inner buffer.
    fn lend<T>(self, proxy: &impl Proxy, work: impl for<'a> FnOnce(Self::Inner<'a>) -> Result<T>) -> Result<T>;
}

/// `Type => its counterpart, |x, proxy, work| what lend does;`
macro_rules! operands {
    ($($(#[$on:meta])* $type:ty => $inner:ty, |$x:ident, $proxy:ident, $work:ident| $lend:expr;)*) => {$(
        $(#[$on])*
        impl Operand for $type {
            type Inner<'a> = $inner;

            fn lend<T>(self, $proxy: &impl Proxy, $work: impl for<'a> FnOnce($inner) -> Result<T>) -> Result<T> {
                let $x = self;
                $lend
            }
        }
    )*};
}

/// Arguments without device memory.
macro_rules! plain {
    ($($type:ty),* $(,)?) => {
        operands! { $($type => Self, |x, _proxy, work| work(x);)* }
    };
}

plain!(
    usize,
    f64,
    bool,
    DType,
    [usize; 3],
    [usize; 2],
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
    Picks,
    &DropoutMask,
    Groups,
    Statistics,
    Windows,
    AttentionShape,
    GroupedShape,
    TurnedHeads,
    VocabShard,
    Preference,
    PairNumber,
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

operands! {
    &Rule => Self, |rule, proxy, work| {
        proxy.accepts(rule)?;
        work(rule)
    };
    &WholePart<'_> => Self, |part, proxy, work| {
        proxy.accepts(part.rule)?;
        work(part)
    };
    &Buffer => &'a Buffer, |x, proxy, work| work(&proxy.read(x));
    &mut Buffer => &'a mut Buffer, |x, proxy, work| {
        let mut inner = proxy.take(x);
        let result = work(&mut inner);
        proxy.give_back(x, inner);
        result
    };
    &[Buffer] => &'a [Buffer], |all, proxy, work| work(&all.iter().map(|x| proxy.read(x)).collect::<Vec<_>>());
    [&mut Buffer; 2] => [&'a mut Buffer; 2], |both, proxy, work| {
        let [first, second] = both;
        first.lend(proxy, |first| second.lend(proxy, |second| work([first, second])))
    };
    &mut [Buffer] => &'a mut [Buffer], |all, proxy, work| {
        let mut inner: Vec<Buffer> = all.iter_mut().map(|x| proxy.take(x)).collect();
        let result = work(&mut inner);
        all.iter_mut().zip(inner).for_each(|(x, inner)| proxy.give_back(x, inner));
        result
    };
    [&Buffer; 2] => [&'a Buffer; 2], |both, proxy, work| work(both.map(|x| proxy.read(x)).each_ref());
    &[Buffer; 2] => &'a [Buffer; 2], |both, proxy, work| work(&both.each_ref().map(|x| proxy.read(x)));
    Option<&Buffer> => Option<&'a Buffer>, |x, proxy, work| work(x.map(|x| proxy.read(x)).as_ref());
    /// An operand whose ownership the kernel takes.
    Option<Buffer> => Self, |x, proxy, work| work(x.map(|x| proxy.keep(x)));
    MeanVariance<'_> => MeanVariance<'a>, |by, proxy, work| {
        work(MeanVariance { mean: &proxy.read(by.mean), variance: &proxy.read(by.variance), ..by })
    };
    PairLosses<'_> => PairLosses<'a>, |of, proxy, work| {
        let [losses, reference, pairs] = &[of.losses, of.reference, of.pairs].map(|x| proxy.read(x));
        work(PairLosses { losses, reference, pairs })
    };
    Choices<'_> => Choices<'a>, |choices, proxy, work| {
        work(Choices { ids: &proxy.read(choices.ids), slots: &proxy.read(choices.slots), ..choices })
    };
    AttentionMasks<'_> => AttentionMasks<'a>, |masks, proxy, work| {
        let positions = masks.documents.map(|documents| proxy.read(documents.positions));
        let documents = masks.documents.zip(positions.as_ref());
        let documents = documents.map(|(documents, positions)| DocumentPositions { positions, ..documents });
        let [lengths, bias] = [masks.lengths, masks.bias].map(|x| x.map(|x| proxy.read(x)));
        work(AttentionMasks { documents, lengths: lengths.as_ref(), bias: bias.as_ref(), ..masks })
    };
    TableGrad<'_> => TableGrad<'a>, |grad, proxy, work| {
        let TableGrad { buffer, start, rows, width, accumulate, blocks } = grad;
        buffer.lend(proxy, |buffer| work(TableGrad { buffer, start, rows, width, accumulate, blocks }))
    };
    GroupedGrad<'_> => GroupedGrad<'a>, |grad, proxy, work| {
        let GroupedGrad { buffer, start, accumulate } = grad;
        buffer.lend(proxy, |buffer| work(GroupedGrad { buffer, start, accumulate }))
    };
    Option<Measured<'_>> => Option<Measured<'a>>, |measured, proxy, work| match measured {
        None => work(None),
        Some(Measured::Sums(into, at)) => into.lend(proxy, |into| work(Some(Measured::Sums(into, at)))),
        Some(Measured::Digits(into, at)) => into.lend(proxy, |into| work(Some(Measured::Digits(into, at)))),
        Some(Measured::Values(into)) => into.lend(proxy, |into| work(Some(Measured::Values(into)))),
    };
    WholeVectors<'_> => WholeVectors<'a>, |vectors, proxy, work| {
        let WholeVectors { grads, states, sets, totals, gathered } = vectors;
        let read = |vectors: &[Buffer]| vectors.iter().map(|x| proxy.read(x)).collect::<Vec<_>>();
        let (sets, totals) = (read(sets), read(totals));
        let (grads, gathered) = (proxy.read(grads), gathered.map(|x| proxy.read(x)));
        states.lend(proxy, |states| {
            work(WholeVectors { grads: &grads, states, sets: &sets, totals: &totals, gathered: gathered.as_ref() })
        })
    };
    &mut [FlatParts<'_>] => &'a mut [FlatParts<'a>], |flats, proxy, work| {
        let read_or_taken = |flat: &mut FlatParts<'_>| {
            let states = flat.states.iter_mut().map(|x| proxy.take(x)).collect::<Vec<_>>();
            (proxy.take(flat.weights), proxy.read(flat.grads), states)
        };
        let mut inner: Vec<_> = flats.iter_mut().map(read_or_taken).collect();
        let lent = inner.iter_mut().zip(&*flats).map(|((weights, grads, states), flat)| {
            let ranges = flat.ranges;
            FlatParts { weights, grads, states, ranges }
        });
        let result = work(&mut lent.collect::<Vec<_>>());
        for (flat, (weights, _, states)) in flats.iter_mut().zip(inner) {
            proxy.give_back(flat.weights, weights);
            flat.states.iter_mut().zip(states).for_each(|(x, inner)| proxy.give_back(x, inner));
        }
        result
    };
    &mut Sender<Buffer> => &'a mut Sender<Buffer>, |sender, proxy, work| {
        let [residual, estimate, momentum] = sender.all_mut().map(|x| proxy.take(x));
        let mut inner = Sender { residual, estimate, momentum };
        let result = work(&mut inner);
        let Sender { residual, estimate, momentum } = inner;
        let inner = [residual, estimate, momentum];
        sender.all_mut().into_iter().zip(inner).for_each(|(x, inner)| proxy.give_back(x, inner));
        result
    };
}
