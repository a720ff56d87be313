//! The memory that each kernel moves.

use super::*;
use meshwork_core::profile::{Class, Detail};
use meshwork_core::{Buffer, DType};
use std::ops::Range;

/// The memory traffic of a kernel call, for its span in a profile. All but the results is known before the call.
pub(crate) struct Traffic {
    pub(crate) class: Class,
    pub(crate) name: &'static str,
    pub(crate) detail: Detail,
    pub(crate) dtype: Option<DType>,
    pub(crate) bytes: u64,
}

impl Traffic {
    /// A call that reads these buffers, and computes in the type of the first float buffer.
    pub(crate) fn call(class: Class, name: &'static str, reads: &[&Buffer]) -> Self {
        let dtype = reads.iter().map(|buffer| buffer.dtype()).find(|dtype| dtype.is_float());
        Self { class, name, detail: Detail::None, dtype, bytes: bytes(reads) }
    }

    /// A call that moves `count` elements of the type of `x`.
    pub(crate) fn moved(class: Class, name: &'static str, x: &Buffer, count: usize) -> Self {
        Self { bytes: (count * x.dtype().size()) as u64, ..Self::call(class, name, &[x]) }
    }

    /// The same, with one more buffer read.
    pub(crate) fn reading(self, x: Option<&Buffer>) -> Self {
        self.and(x.map_or(0, Buffer::bytes))
    }

    fn and(self, bytes: usize) -> Self {
        Self { bytes: self.bytes + bytes as u64, ..self }
    }

    /// A product in the type of its result, whatever the types of its operands.
    pub(crate) fn product(name: &'static str, mnk: [usize; 3], dtype: DType, reads: &[&Buffer]) -> Self {
        Self { detail: Detail::Product(mnk), dtype: Some(dtype), ..Self::call(Class::Product, name, reads) }
    }

    /// A call of compression that reads and writes these buffers.
    pub(crate) fn compression(name: &'static str, touches: &[&Buffer]) -> Self {
        Self { dtype: Some(DType::F32), ..Self::call(Class::Compression, name, touches) }
    }

    /// An optimizer pass over these vectors.
    pub(crate) fn vectors(name: &'static str, vectors: &[Buffer]) -> Self {
        Self::call(Class::Optimizer, name, &vectors.iter().collect::<Vec<_>>())
    }

    pub(crate) fn gemm(spec: Gemm, operands: [&Buffer; 2], c: &Buffer) -> Self {
        let Gemm { m, n, k, a_transposed, b_transposed, accumulate, .. } = spec;
        let name = match (a_transposed, b_transposed, accumulate) {
            (false, false, false) => "gemm nn",
            (false, true, false) => "gemm nt",
            (true, false, false) => "gemm tn",
            (true, true, false) => "gemm tt",
            (false, false, true) => "gemm nn +=",
            (false, true, true) => "gemm nt +=",
            (true, false, true) => "gemm tn +=",
            (true, true, true) => "gemm tt +=",
        };
        let result = m * n * c.dtype().size() * if accumulate { 2 } else { 1 };
        Self::product(name, [m, n, k], c.dtype(), &operands).and(result)
    }

    /// Counted as one product with longer sums.
    pub(crate) fn gemm_sum([first, second]: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &Buffer) -> Self {
        let mnk = [first.m, first.n, first.k + second.k];
        Self::product("gemm nn, two", mnk, c.dtype(), &[a[0], a[1], b[0], b[1]])
            .and(first.m * first.n * c.dtype().size())
    }

    /// Counted as one product of all groups.
    pub(crate) fn grouped(name: &'static str, spec: GroupedGemm<'_>, dtype: DType, reads: &[&Buffer]) -> Self {
        Self::product(name, [spec.rows.iter().sum(), spec.n, spec.k], dtype, reads)
    }

    pub(crate) fn grouped_weight_grad(spec: GroupedGemm<'_>, reads: [&Buffer; 2], dw: &GroupedGrad<'_>) -> Self {
        let result = spec.rows.len() * spec.n * spec.k * dw.buffer.dtype().size();
        Self::grouped("grouped gemm tn", spec, dw.buffer.dtype(), &reads)
            .and(result * if dw.accumulate { 2 } else { 1 })
    }

    pub(crate) fn cast_into(x: &Buffer, out: &Buffer) -> Self {
        Self::call(Class::Pointwise, "cast", &[x]).and(x.count() * out.dtype().size())
    }

    /// Only the requested rows of the table are read, as many as are written.
    pub(crate) fn lookup(ids: &Buffer, table: &Buffer, width: usize) -> Self {
        Self::moved(Class::Embedding, "lookup", table, ids.count() * width).and(ids.bytes())
    }

    /// Each row of `dout` is added to a row that is read and written; all other rows are written if the gradient is
    /// overwritten.
    pub(crate) fn lookup_grad(ids: &Buffer, dout: &Buffer, dtable: &TableGrad<'_>) -> Self {
        let whole = if dtable.accumulate { 0 } else { dtable.rows * dtable.width };
        Self::moved(Class::Embedding, "lookup_grad", dout, 3 * dout.count() + whole).and(ids.bytes())
    }

    pub(crate) fn positions_grad(dout: &Buffer, dtable: &TableGrad<'_>) -> Self {
        let table = dtable.rows * dtable.width * if dtable.accumulate { 2 } else { 1 };
        Self::moved(Class::Embedding, "positions_grad", dout, dout.count() + table)
    }

    /// Only the requested columns of the logits are read.
    pub(crate) fn row_stats(logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Self {
        Self::moved(Class::Loss, "row_stats", logits, targets.count() * shard.width).and(targets.bytes())
    }

    /// As much is read as is written.
    pub(crate) fn gather(x: &Buffer, index: &Buffer, width: usize) -> Self {
        Self::moved(Class::Memory, "gather", x, index.count() * width).and(index.bytes())
    }

    /// Weights and states are read and written, gradients read.
    pub(crate) fn update(flats: &[FlatParts<'_>]) -> Self {
        let moved = |flat: &FlatParts<'_>| {
            flat.ranges.iter().map(Range::len).sum::<usize>() * per_element(flat.weights, flat.grads, flat.states)
        };
        let weights: Vec<&Buffer> = flats.iter().take(1).map(|flat| &*flat.weights).collect();
        let bytes = flats.iter().map(moved).sum::<usize>() as u64;
        Self { bytes, ..Self::call(Class::Optimizer, "update", &weights) }
    }

    /// The same for elements of one parameter.
    pub(crate) fn whole(
        name: &'static str,
        part: &WholePart<'_>,
        weights: &Buffer,
        vectors: &WholeVectors<'_>,
    ) -> Self {
        let bytes = (part.part.len() * per_element(weights, vectors.grads, vectors.states)) as u64;
        Self { bytes, ..Self::call(Class::Optimizer, name, &[weights]) }
    }

    pub(crate) fn finish_pass(totals: &Buffer, sets: &[Buffer]) -> Self {
        let bytes = sets.iter().map(|set| 2 * set.bytes() as u64).sum();
        Self { bytes, ..Self::call(Class::Optimizer, "settle", &[totals]) }
    }
}

/// Bytes that an update moves for each element.
fn per_element(weights: &Buffer, grads: &Buffer, states: &[Buffer]) -> usize {
    let states: usize = states.iter().map(|state| 2 * state.dtype().size()).sum();
    2 * weights.dtype().size() + grads.dtype().size() + states
}

fn bytes(buffers: &[&Buffer]) -> u64 {
    buffers.iter().map(|buffer| buffer.bytes() as u64).sum()
}
