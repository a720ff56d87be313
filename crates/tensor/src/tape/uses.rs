//! How often each parameter is read on a tape.

use super::prelude::*;
use std::collections::BTreeMap;

/// Per parameter, how many operations of a tape read it and how many of them have added their gradient. The gradient is
/// complete after the last one: a tied weight is read twice.
#[derive(Debug)]
pub(super) struct Uses(BTreeMap<ParamId, (usize, usize)>);

impl Uses {
    /// The uses by operations with these sources.
    pub(super) fn new<'a>(sources: impl Iterator<Item = &'a Source>) -> Self {
        let mut uses = BTreeMap::new();
        for source in sources {
            if let Source::Param(id) = source {
                uses.entry(*id).or_insert((0, 0)).1 += 1;
            }
        }
        Self(uses)
    }

    /// The uses of a parameter.
    pub(super) fn count(&self, id: ParamId) -> usize {
        self.0.get(&id).map_or(1, |(_, all)| *all)
    }

    /// The number of the use whose turn it is, in the order of backward.
    pub(super) fn index(&self, id: ParamId) -> usize {
        self.0.get(&id).map_or(0, |(done, _)| *done)
    }

    /// Counts a use by an operation with these sources, and tells the sink which gradients are complete.
    pub(super) fn mark_done(&mut self, sources: &[Source], sink: &mut dyn GradSink) -> Result<()> {
        for source in sources {
            if let Source::Param(id) = source
                && let Some((done, all)) = self.0.get_mut(id)
            {
                *done += 1;
                if done == all {
                    sink.ready(*id)?;
                }
            }
        }
        Ok(())
    }
}
