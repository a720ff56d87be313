//! Pipeline messages over the pp group.

use crate::compress::codec::Codec;
use crate::compress::packing::Packed;
use crate::message::Message;
use crate::prelude::*;
use meshwork_core::Pending;
use meshwork_nn::Activation;
use meshwork_pipeline::Tag;
use std::collections::VecDeque;

/// Sends activations and their gradients to other pp ranks. A message carries a fingerprint of shape, dtype and SPMD
/// types; the receiver refuses a fingerprint that it does not expect.
///
/// A value that is `Invariant` on tp is the same on every tp rank, so it is sent once and not once per tp rank: each
/// rank sends its part to its counterpart, and the receivers gather the parts over tp (the scatter/gather of PTD-P,
/// Narayanan et al. 2021, section 4.1). [`Codec`] makes the message that is sent in place of a value.
#[derive(Debug)]
pub struct PipeTransport {
    group: Group,
    tp: Group,
    device: Arc<dyn Device>,
    /// The activation that each stage but the last sends.
    activations: Rc<[Activation]>,
    /// Makes the messages that are sent in place of them.
    codec: Rc<RefCell<Codec>>,
    scatter: bool,
    /// Messages that may be in flight to one receiver.
    in_flight: usize,
    /// Messages in flight, per receiver and oldest first. Each owns its memory until it is waited for.
    sends: BTreeMap<usize, VecDeque<Pending>>,
}

/// How a value travels.
struct Wire {
    packed: Option<Packed>,
    dtype: DType,
    /// Elements that the tp ranks send together.
    count: usize,
    /// Elements of one part, if it is sent in parts.
    part: Option<usize>,
    signature: u64,
}

impl PipeTransport {
    /// A transport of these activations. Up to `in_flight` messages may be in flight to each pp rank; this must be the
    /// number that the schedule [needs](meshwork_pipeline::Report::in_flight). With `scatter`, a value that is the same
    /// on every tp rank is sent in parts.
    pub fn new(
        rank: &Rank,
        device: Arc<dyn Device>,
        activations: Rc<[Activation]>,
        codec: Rc<RefCell<Codec>>,
        scatter: bool,
        in_flight: usize,
    ) -> Self {
        let (group, tp) = (rank.group(Axis::Pp).clone(), rank.group(Axis::Tp).clone());
        Self { group, tp, device, activations, codec, scatter, in_flight, sends: BTreeMap::new() }
    }

    /// How a value travels. Bytes of a message are padded so that the parts of all tp ranks are equal.
    fn wire(&self, tag: Tag, value: &Activation) -> Result<Wire> {
        let Activation { dtype, shape, types } = value;
        let parts = self.tp.size();
        let scatter = self.scatter && types.get(Axis::Tp) == Some(Ty::Invariant) && parts > 1;
        let codec = self.codec.borrow();
        let Some(packed) = codec.packed(codec.site(tag), value)? else {
            let count = shape.count();
            let part = (scatter && count.is_multiple_of(parts)).then_some(count / parts);
            let signature = part.map_or(types.signature(*dtype, shape), |part| types.signature(*dtype, &[part]));
            return Ok(Wire { packed: None, dtype: *dtype, count, part, signature });
        };
        let (dtype, count) = (DType::U8, if scatter { packed.bytes.next_multiple_of(parts) } else { packed.bytes });
        let part = scatter.then_some(count / parts);
        let signature = types.signature(dtype, &[&shape[..], &[part.unwrap_or(count)]].concat());
        Ok(Wire { packed: Some(packed), dtype, count, part, signature })
    }

    /// Waits until every message sent has been received.
    pub fn flush(&mut self) -> Result<()> {
        for pending in self.sends.values_mut().flat_map(|sends| sends.drain(..)) {
            pending.wait()?;
        }
        Ok(())
    }

    /// Receives activations that are no longer needed.
    pub fn discard(&mut self, from_rank: usize, messages: &[Tag]) -> Result<()> {
        messages.iter().try_for_each(|&tag| self.receive(from_rank, tag).map(drop))
    }

    /// The message, or this rank's part of it.
    fn receive(&mut self, from_rank: usize, tag: Tag) -> Result<Buffer> {
        let Wire { dtype, count, part, signature, .. } = self.wire(tag, &expected(&self.activations, tag))?;
        let _buffers = self.device.meter().enter(Category::Buffers);
        let buffer = self.device.alloc(dtype, part.unwrap_or(count))?;
        Ok(self.group.recv(buffer, from_rank, signature)?)
    }
}

impl meshwork_pipeline::Transport for PipeTransport {
    type Message = Message;
    type Error = TrainError;

    /// Does not send the tag: between two ranks, messages are received in the order in which they are sent.
    fn send(&mut self, to_rank: usize, tag: Tag, message: Message) -> Result<()> {
        let Message { tensor, types } = message;
        let value = Activation { dtype: tensor.dtype(), shape: tensor.shape(), types };
        let Wire { packed, count, part, signature, .. } = self.wire(tag, &value)?;
        let whole = match packed {
            None => tensor.into_buffer(),
            Some(packed) => {
                let mut codec = self.codec.borrow_mut();
                let site = codec.site(tag);
                codec.pack(site, &packed, &value, tensor.into_buffer(), count)?
            }
        };
        let buffer = match part {
            None => whole,
            Some(part) => whole.slice(part * self.tp.rank()..part * (self.tp.rank() + 1)).map_err(as_tensor)?,
        };
        let sends = self.sends.entry(to_rank).or_default();
        // Limits how far the sender runs ahead of the receiver. With the number of messages in flight that the schedule
        // needs, no rank waits forever. Waiting for the oldest message, instead of freeing any that is done, keeps the
        // peak of memory independent of timing.
        if sends.len() >= self.in_flight.max(1)
            && let Some(oldest) = sends.pop_front()
        {
            oldest.wait()?;
        }
        sends.push_back(self.group.start_send(buffer, to_rank, signature)?);
        Ok(())
    }

    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<Message> {
        let expected = expected(&self.activations, tag);
        let Wire { packed, dtype, count, part, .. } = self.wire(tag, &expected)?;
        let mut buffer = self.receive(from_rank, tag)?;
        if part.is_some() {
            let _buffers = self.device.meter().enter(Category::Buffers);
            buffer = self.tp.all_gather(buffer, self.device.alloc(dtype, count)?)?;
        }
        if let Some(packed) = packed {
            let _buffers = self.device.meter().enter(Category::Buffers);
            let mut codec = self.codec.borrow_mut();
            let site = codec.site(tag);
            buffer = codec.unpack(site, &packed, &buffer, expected.dtype)?;
        }
        Ok(Message { tensor: Tensor::from_buffer(&self.device, buffer, expected.shape)?, types: expected.types })
    }

    fn finish(&mut self) -> Result<()> {
        self.flush()
    }
}

fn as_tensor(error: meshwork_core::BufferError) -> TrainError {
    meshwork_tensor::Error::from(error).into()
}

/// The activation, or its gradient, that a message with this tag carries: the tag names the stage that made it.
fn expected(activations: &[Activation], tag: Tag) -> Activation {
    match tag.direction {
        Direction::Activation => activations[tag.stage],
        Direction::Gradient => {
            let activation = activations[tag.stage - 1];
            Activation { types: activation.types.dual(), ..activation }
        }
    }
}
