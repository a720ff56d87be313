//! What is added to the scores of pairs: the slope of the head times the distance of query and key, and a bias of
//! pairs.

use super::super::Float;
use super::layout::{Call, Group, QueryBlock};

/// The shifts of the scores of a head, for the queries of a block and its keys.
#[derive(Clone, Copy)]
pub(super) struct Shift<'a, T> {
    /// What a score falls by from one token to the next.
    slope: T,
    /// The tokens of the first query and of the first key.
    first: [usize; 2],
    /// The bias of the first query and key, and how far a query's lies from the one before.
    bias: Option<(&'a [T], usize)>,
}

impl<'a, T: Float> Call<'a, T> {
    /// The shifts of a head of a group, if scores are shifted: then they are no longer products times the scale.
    pub(super) fn shift(&self, (group, part): (Group, QueryBlock), head: usize) -> Option<Shift<'a, T>> {
        let (head, [queries, keys]) = (group.first_head(self.groups) + head, self.tokens(part));
        if self.masks.slopes.is_none() && self.bias.is_none() {
            return None;
        }
        let row = self.dims.keys.count;
        let at = (head * self.dims.seq + part.queries.first) * row + part.keys.first;
        Some(Shift {
            slope: self.masks.slopes.map_or(T::ZERO, |slopes| slopes[head].into()),
            first: [queries.first, keys.first],
            bias: self.bias.map(|bias| (&bias[at..], row)),
        })
    }
}

impl<T: Float> Shift<'_, T> {
    /// Of a query and a key, counted from the first ones.
    #[inline(always)]
    pub(super) fn of(&self, query: usize, key: usize) -> T {
        let distance = (self.first[0] + query).abs_diff(self.first[1] + key);
        let by_distance = -self.slope * T::from(distance as f32);
        self.bias.map_or(by_distance, |(bias, row)| by_distance + bias[query * row + key])
    }

    /// Products of queries and keys become scores. `scores` has those of a query and the keys from `keys` on, `step`
    /// apart.
    pub(super) fn add(&self, scale: T, scores: &mut [T], step: usize, query: usize, keys: usize) {
        for (key, score) in scores.iter_mut().step_by(step).enumerate() {
            *score = *score * scale + self.of(query, keys + key);
        }
    }
}
