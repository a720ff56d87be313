//! Attention with a cache of keys and values.

use super::rotary::TurnedRows;
use super::{CudaDevice, launch::launch};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{Attention, AttentionMasks, AttentionShape, GroupedShape};
use meshwork_tensor::{Device, Error, Result, Work};

const OP: &str = "attention";

impl CudaDevice {
    /// Appends the new tokens to the cache, and attends to all in it.
    pub(super) fn decoded(&self, shape: GroupedShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer> {
        self.f32s(OP, &[q, kv, cache])?;
        let GroupedShape { queries, keys: capacity, first_query: past, group, kv_heads, first_kv_head, rotary, .. } =
            shape;
        let AttentionShape { batch, seq, heads, head_dim } = queries;
        if cache.count() != shape.kv_elements() || past + seq > capacity {
            let problem = format!("{} tokens, and a cache of {} elements", past + seq, cache.count());
            return Err(Error::Shape { op: OP, problem, shapes: vec![vec![batch, capacity, 2, kv_heads, head_dim]] });
        }
        // The angles of all tokens that may come, so that the table is written once.
        let angles = rotary.map(|rotary| self.angles(rotary, capacity, head_dim)).transpose()?;
        launch!(self, OP, "decode_append", [kv.count(), 0];
            kv, angles.as_ref(), &mut *cache, kv.count(), seq, past, capacity, kv_heads, head_dim
        )?;
        if past == 0 && seq > 1 {
            return Ok(self.grouped(GroupedShape { keys: seq, ..shape }, q, kv, AttentionMasks::default())?.0);
        }
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        let out = self.alloc(DType::F32, q.count())?;
        let row = TurnedRows { row: heads * head_dim, heads, tokens: shape.tokens(), positions: None };
        let turned = rotary.map(|rotary| self.rotated(rotary, &shape, q, &row)).transpose()?;
        let (rows, keys) = (batch * seq * heads, past + seq);
        let scores = self.scratch(DType::F32, rows * keys)?;
        let (scale, sizes) = ((1.0 / (head_dim as f64).sqrt()) as f32, [seq, past, capacity, heads, group]);
        launch!(self, OP, "decode_scores", [16 * rows * keys, 0];
            turned.as_ref().unwrap_or(q), &*cache, &scores, rows, sizes, first_kv_head, kv_heads, head_dim, scale
        )?;
        launch!(self, OP, "decode_weights", [rows, 0]; &scores, rows, seq, past, heads)?;
        launch!(self, OP, "decode_values", [q.count(), 0];
            &scores, &*cache, &out, q.count(), sizes, first_kv_head, kv_heads, head_dim
        )?;
        Ok(out)
    }
}
