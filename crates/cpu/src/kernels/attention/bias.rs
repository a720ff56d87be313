//! The gradient of a bias of pairs: `Σ_samples P∘((dO Vᵀ)∘M - D)`, a query at a time, with `P` recomputed from lse.
//! Both products are one chain over the features.

use super::super::pointwise;
use super::layout::{Call, Layout};
use super::rows::{cap_scores, dots};
use super::{Dims, Groups, Masks, Saved, Tiled};
use meshwork_core::pool;
use meshwork_tensor::Precision;

/// Writes or adds the gradient, `[heads, seq, keys]`: the sums over the samples in `blocks` of equally many, which are
/// added in the [tree](meshwork_core::tree). Products round their operands to `precision`.
#[expect(clippy::too_many_arguments, reason = "three operands, a result, and what they are")]
pub fn pair_bias_grad<T: Tiled>(
    precision: Precision,
    dims: Dims,
    groups: Groups,
    saved: Saved<'_, T, T>,
    dout: &[T],
    masks: Masks<'_>,
    bias: &[T],
    (blocks, accumulate, into): (usize, bool, &mut [T]),
) {
    dims.check(&[saved.q.len(), saved.out.len(), dout.len()], saved.lse.len());
    groups.check(dims, &[saved.kv.len()]);
    let layout = Layout::apart(dims, groups);
    let call = Call { tiles: T::tiles(precision), dims, groups, layout, angles: None, masks, bias: Some(bias) };
    call.check();
    let (each, of_block) = (dims.seq * dims.keys.count, dims.batch.div_ceil(blocks.max(1)).max(1));
    assert_eq!(into.len(), dims.heads * each, "elements of the gradient for {dims:?}");
    pool::for_each(into.chunks_mut(each.max(1)).enumerate(), |(head, into)| {
        let mut sums = vec![T::ZERO; blocks.max(1) * each];
        for sample in 0..dims.batch {
            add_sample(&call, saved, dout, [sample, head], &mut sums[sample / of_block * each..][..each], precision);
        }
        pointwise::tree_sum(&mut sums, each, pointwise::add_assign);
        if !accumulate {
            into.fill(T::ZERO);
        }
        pointwise::add_assign(into, &sums[..each]);
    });
}

/// Adds the gradients of the scores of a head of a sample.
fn add_sample<T: Tiled>(
    call: &Call<'_, T>,
    Saved { q, kv, out, lse }: Saved<'_, T, T>,
    dout: &[T],
    [sample, head]: [usize; 2],
    sum: &mut [T],
    precision: Precision,
) {
    let round = |x: T| x.in_precision(precision);
    let chain = |x: &[T], y: &[T]| x.iter().zip(y).fold(T::ZERO, |sum, (&x, &y)| round(x).mul_add(round(y), sum));
    let (Dims { seq, heads, head_dim, keys, .. }, size) = (call.dims, call.groups.size);
    let (group, in_group) = (super::layout::Group { sample, index: head / size }, head % size);
    let (reach, mut scores) = (call.masks.reach(), vec![T::ZERO; keys.count]);
    let mut factors = vec![T::ZERO; keys.count];
    for (part, _) in call.parts(group, false) {
        let ([q_at, k_at, v_at], out_at) = (call.starts(group, part), call.out_start(group, part));
        let (shift, scale) = (call.shift((group, part), in_group), call.scale());
        let dropout = call.head_dropout((group, part), in_group);
        for i in 0..part.queries.len {
            let row =
                |x: &'_ [T], at: usize, step: usize, i: usize, head: usize| at + i * step + head * head_dim..x.len();
            let q = &q[row(q, q_at, call.layout.q.row, i, in_group)][..head_dim];
            let [o, g] = [out, dout].map(|x| &x[row(x, out_at, call.layout.out.row, i, in_group)][..head_dim]);
            let seen = part.hidden_from(i, reach.window)..part.seen_by(i + 1);
            let scores = &mut scores[seen.clone()];
            for (score, j) in scores.iter_mut().zip(seen.clone()) {
                *score = chain(q, &kv[k_at + j * call.layout.k.row..][..head_dim]);
            }
            if let Some(cap) = call.masks.cap {
                cap_scores(scale, T::from_f64(cap), scores);
            }
            shift.iter().for_each(|shift| shift.add(scale, scores, 1, i, seen.start));
            let factors = &mut factors[seen.clone()];
            match dropout {
                None => factors.fill(T::ONE),
                Some((mask, start)) => mask.factors(start + (i * keys.sequence + seen.start) as u64, factors),
            }
            let (lse, mut d) = (lse[(sample * heads + head) * seq + part.queries.first + i], [T::ZERO]);
            dots(g.len(), [(g, 0), (o, 0)], &mut d);
            let [d] = d;
            let to = &mut sum[(part.queries.first + i) * keys.count + part.keys.first + seen.start..];
            for (at, (to, score)) in to.iter_mut().zip(&*scores).enumerate() {
                let dp = chain(g, &kv[v_at + (seen.start + at) * call.layout.v.row..][..head_dim]) * factors[at];
                *to += (*score - lse).exp() * (dp - d);
            }
        }
    }
}
