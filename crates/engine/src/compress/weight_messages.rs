//! Compressed gathers of weights, as ZeRO++ has them (Wang et al. 2023, arXiv:2306.10209, section 3.1): ranks with
//! ZeRO-3 send each other compressed slices, and all of them, the owner of a slice too, use the restored slices. The
//! owner updates its exact slice, so that losses of gathers do not add up.
//!
//! A message of a slice has one part for each parameter that the slice has elements of, compressed by itself: the scale
//! of one parameter does not depend on others, and ranks of `tp` that hold the same parameter restore the same.
//!
//! A random number for an element depends on its parameter, its place there and the number of updates of the weights.
//! So every gather of one version of the weights restores to the same values, in each micro-batch, in backward, and
//! where a forward is recomputed.

use crate::layout::Layout;
use crate::prelude::*;
use meshwork_compress::{CompressError, Draws, Fold, Scheme, Shape, wire_bytes};
use meshwork_core::FlatSlice;
use meshwork_data_parallel::{Messages, VectorError};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The part of a message that has the elements of one parameter.
#[derive(Clone, Debug)]
struct ParamSegment {
    /// Random numbers are drawn for this name, from this element on.
    name: String,
    first: usize,
    /// Its elements in the flat buffer.
    range: Range<usize>,
    shape: Shape,
    /// Its bytes in the message.
    at: Range<usize>,
}

/// The messages of one flat buffer.
#[derive(Debug)]
struct FlatMessages {
    /// The slices by rank, with the parts of their messages.
    slices: Vec<(FlatSlice, Vec<ParamSegment>)>,
    /// This rank's number among them.
    place: usize,
    elements: usize,
    /// Elements that no parameter has. They are zero, whatever the message restores to.
    padding: Vec<Range<usize>>,
    /// Bytes of the longest message, which all messages have.
    bytes: usize,
}

/// Messages in place of the slices of weights.
#[derive(Debug)]
pub struct WeightMessages {
    scheme: Scheme,
    seed: u64,
    /// Of the flat buffers that ranks share out.
    flats: Vec<Option<FlatMessages>>,
    device: Arc<dyn Device>,
    /// The type of the weights.
    dtype: DType,
    now: Arc<Now>,
}

/// Whether the gathers of a pass compress, and for which weights.
#[derive(Debug, Default)]
pub struct Now {
    compresses: AtomicBool,
    updates: AtomicU64,
}

impl Now {
    /// Sets whether the next passes compress.
    pub fn set_compresses(&self, compresses: bool) {
        self.compresses.store(compresses, Ordering::Relaxed);
    }

    /// Sets the number of updates behind the weights that are gathered.
    pub fn set_updates(&self, updates: u64) {
        self.updates.store(updates, Ordering::Relaxed);
    }
}

impl WeightMessages {
    /// The messages of a plan, as they are sent when `now` says so.
    ///
    /// # Errors
    /// A scheme that does not compress a slice.
    pub fn new(plan: &Plan, layout: &Layout, device: &Arc<dyn Device>, now: Arc<Now>) -> Result<Self, PlanError> {
        let scheme = plan.compress.weights;
        let packed = |flat: usize| layout.flats[flat].iter().any(|&id| layout.declarations.spec(id).packed.is_some());
        let sends = |flat| layout.is_cut(flat) && !packed(flat); // messages as they are
        let of_flat = |flat| sends(flat).then(|| FlatMessages::new(scheme, layout, flat)).transpose();
        let flats = (0..layout.flats.len()).map(of_flat).collect::<Result<_, _>>();
        let flats = flats.map_err(|error: CompressError| PlanError::Compress {
            place: "weights",
            scheme: scheme.to_string(),
            problem: error.to_string(),
        })?;
        Ok(Self { scheme, seed: plan.seed, flats, device: device.clone(), dtype: layout.declarations.dtype(), now })
    }

    fn draws(&self, part: &ParamSegment) -> Draws {
        Draws::new(self.seed, &part.name, self.now.updates.load(Ordering::Relaxed)).skip(part.first)
    }
}

impl FlatMessages {
    fn new(scheme: Scheme, layout: &Layout, flat: usize) -> Result<Self, CompressError> {
        let slice = layout.slice(flat);
        let ([place, ranks], elements) = (slice.place(), slice.elements());
        let parts_of = |slice: FlatSlice| {
            let mut end = 0;
            let mut part = |&id| {
                let range = &layout.span(id).range;
                let part = slice.part_of(range.clone());
                if part.is_empty() {
                    return Ok(None);
                }
                let shape = Shape::vector(part.len())?;
                let at = end..end + wire_bytes(&scheme, shape)?;
                end = at.end;
                let name = format!("weight {}", layout.declarations.spec(id).name);
                Ok(Some(ParamSegment { name, first: part.start - range.start, range: part, shape, at }))
            };
            layout.flats[flat].iter().filter_map(|id| part(id).transpose()).collect::<Result<Vec<_>, CompressError>>()
        };
        let slices = (0..ranks).map(|rank| FlatSlice::new(elements, ranks, rank));
        let slices: Vec<_> = slices.map(|slice| Ok((slice, parts_of(slice)?))).collect::<Result<_, CompressError>>()?;
        let bytes = |parts: &Vec<ParamSegment>| parts.last().map_or(0, |last| last.at.end);
        let bytes = slices.iter().map(|(_, parts)| bytes(parts)).max().unwrap_or(0);
        let padding = layout.padding(flat);
        Ok(Self { slices, place, elements, padding, bytes })
    }
}

impl Messages for WeightMessages {
    fn pack(&self, vector: usize, slice: &Buffer) -> Result<Option<[Buffer; 2]>, VectorError> {
        let compresses = self.now.compresses.load(Ordering::Relaxed);
        let Some(of) = self.flats[vector].as_ref().filter(|_| compresses) else { return Ok(None) };
        let (origin, kernels) = (&of.slices[of.place].0, self.device.compression()?);
        let _buffers = self.device.meter().enter(Category::Buffers);
        let mut message = self.device.alloc(DType::U8, of.bytes)?;
        for part in &of.slices[of.place].1 {
            let start = origin.range().start;
            let elements = slice.slice(part.range.start - start..part.range.end - start)?;
            let mut message = message.window(part.at.clone())?;
            kernels.pack(&self.scheme, part.shape, self.draws(part), &elements, &mut message)?;
        }
        let room = self.device.alloc(DType::U8, of.bytes * of.slices.len())?;
        Ok(Some([message, room]))
    }

    fn restore(&self, vector: usize, messages: &Buffer) -> Result<Buffer, VectorError> {
        let Some(of) = &self.flats[vector] else { return Err("messages of weights that are whole".into()) };
        let kernels = self.device.compression()?;
        let _buffers = self.device.meter().enter(Category::Buffers);
        let mut whole = self.device.alloc(DType::F32, of.elements)?;
        for (rank, (_, parts)) in of.slices.iter().enumerate() {
            let before = rank * of.bytes;
            for part in parts {
                let message = messages.slice(before + part.at.start..before + part.at.end)?;
                let mut elements = whole.window(part.range.clone())?;
                kernels.unpack(&self.scheme, part.shape, &message, Fold::Replace, &mut elements)?;
            }
        }
        for padding in &of.padding {
            self.device.optim()?.zero(&mut whole, padding.clone())?;
        }
        match self.dtype {
            DType::F32 => Ok(whole),
            dtype => Ok(self.device.pointwise()?.cast(&whole, dtype)?),
        }
    }
}
