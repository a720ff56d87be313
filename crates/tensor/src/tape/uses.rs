//! How often each parameter is read on a tape.

use super::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;

/// Per parameter, how many operations of a tape read it and how many of them have added their gradient. The gradient is
/// complete after the last one: a tied weight is read twice.
#[derive(Debug)]
pub(super) struct Uses(BTreeMap<ParamId, Use>);

#[derive(Debug, Default)]
struct Use {
    done: usize,
    all: usize,
    /// Slices of the sequence in which the first of them sums its gradient.
    slices: Cell<Option<usize>>,
}

impl Uses {
    /// The uses by operations with these sources.
    pub(super) fn new<'a>(sources: impl Iterator<Item = &'a Source>) -> Self {
        let mut uses = BTreeMap::<ParamId, Use>::new();
        for source in sources {
            if let Source::Param(id) = source {
                uses.entry(*id).or_default().all += 1;
            }
        }
        Self(uses)
    }

    /// The uses of a parameter.
    pub(super) fn count(&self, id: ParamId) -> usize {
        self.0.get(&id).map_or(1, |of| of.all)
    }

    /// The number of the use whose turn it is, in the order of backward.
    pub(super) fn index(&self, id: ParamId) -> usize {
        self.0.get(&id).map_or(0, |of| of.done)
    }

    /// Refuses a weight of which one operation sums the gradient over slices of the sequence and another over whole
    /// sequences: their copies do not match.
    pub(super) fn require_alike(&self, op: &'static str, id: ParamId, slices: usize) -> Result<()> {
        let first = |of: &Use| of.slices.replace(Some(of.slices.get().unwrap_or(slices)));
        match self.0.get(&id).is_none_or(|of| first(of).is_none_or(|first| first == slices)) {
            true => Ok(()),
            false => Err(Error::NotCanonical {
                op,
                problem: "the gradient of a parameter would be a sum over slices of the sequence in one use, and over whole sequences in another",
                valid: "it on values whose tokens are cut alike, or declare a parameter for each use",
            }),
        }
    }

    /// Counts a use by an operation with these sources, and tells the sink which gradients are complete.
    pub(super) fn mark_done(&mut self, sources: &[Source], sink: &mut dyn GradSink) -> Result<()> {
        for source in sources {
            if let Source::Param(id) = source
                && let Some(of) = self.0.get_mut(id)
            {
                of.done += 1;
                if of.done == of.all {
                    sink.ready(*id)?;
                }
            }
        }
        Ok(())
    }
}
