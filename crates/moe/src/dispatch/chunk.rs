//! A chunk of the samples: its permutations, and its rows in flight.

use super::Plan;
use super::counts::{Announced, Counts};
use meshwork_core::{Axes, Buffer, Group, Pending};
use meshwork_tensor::kernel::Choices;
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::tape::{RowFlow, RowPacking};
use meshwork_tensor::{Device, Error, Result};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// A chunk: some samples of each rank.
#[derive(Debug)]
pub(super) struct Chunk {
    pub samples: Range<usize>,
    /// The rows of this rank's experts.
    pub groups: Rc<RowGroups>,
    /// Experts of the tokens' choices.
    experts: Buffer,
    /// Positions of the rows that return to this rank (`order`), and their slots.
    pub order: Buffer,
    slots: Buffer,
    /// The exchange; `None` if one rank holds all experts.
    pub exchange: Option<Exchange>,
    /// Rows in flight: tokens, and in backward the gradients of their rows; results, and in backward their gradients.
    pub tokens: Flight,
    pub results: Flight,
}

/// The permutations and counts of an exchange between ranks.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Ranks of the tokens' choices, each rank once.
    ranks: Buffer,
    /// Positions of the choices whose tokens are sent, by rank, and their slots.
    pub sent: Buffer,
    sent_slots: Buffer,
    /// Tokens sent to each rank, and received from it.
    pub tokens: [Vec<usize>; 2],
    /// Choices of the tokens received.
    received: Buffer,
    /// Positions of the rows by expert, among the choices received, and their slots.
    pub here: Buffer,
    here_slots: Buffer,
    /// Row of each result that is returned, in the order of the choices received, and the inverse.
    pub results: Buffer,
    pub results_inverse: Buffer,
    /// Results returned to each rank, and received from it.
    pub rows: [Vec<usize>; 2],
}

/// A started exchange that was not yet waited for.
#[derive(Debug, Default)]
pub(super) struct Flight(RefCell<Option<Coming>>);

#[derive(Debug)]
struct Coming {
    pending: Pending,
    /// For incoming messages: the packing of rows, and the number of rows from each rank.
    packed: Option<(RowPacking, Vec<usize>)>,
}

impl Flight {
    /// Sets rows that have already arrived.
    pub fn land(&self, rows: Buffer) {
        self.0.replace(Some(Coming { pending: Pending::done(rows), packed: None }));
    }

    pub fn wait(&self) -> Result<Buffer> {
        let lost = || Error::Backward("rows of experts were waited for before they were sent, or twice".to_owned());
        let Coming { pending, packed } = self.0.take().ok_or_else(lost)?;
        let received = pending.wait()?;
        if let Some((packing, runs)) = packed { packing.unpack(&received, &runs) } else { Ok(received) }
    }
}

impl Plan {
    /// Starts an exchange of rows of `width` elements, with these numbers of rows to and from each rank. `what` names
    /// the rows, so that each kind of rows draws different random numbers.
    pub fn start(
        &self,
        flight: &Flight,
        rows: Buffer,
        counts: &[Vec<usize>; 2],
        width: usize,
        (flow, what): (RowFlow, &str),
    ) -> Result<()> {
        let (device, group, [to, from]) = (&*self.device, &self.group, counts);
        let coming = match self.codec.packing(flow, width, rows.dtype())? {
            None => Coming { pending: start(device, group, rows, counts, width)?, packed: None },
            Some(packing) => {
                let messages = packing.pack(what, &rows, to)?;
                drop(rows);
                let bytes = [packing.bytes(to)?, packing.bytes(from)?];
                let pending = start(device, group, messages, &bytes, 1)?;
                Coming { pending, packed: Some((packing, from.clone())) }
            }
        };
        flight.0.replace(Some(coming));
        Ok(())
    }

    /// The choices of these ids with their slots.
    pub fn choices<'a>(&self, ids: &'a Buffer, slots: &'a Buffer) -> Choices<'a> {
        Choices { ids, slots, k: self.places }
    }

    /// The elements of a chunk's samples in a value with `width` elements for each token.
    pub fn elements(&self, chunk: &Chunk, width: usize) -> Range<usize> {
        let sample = self.tokens[1] * width;
        chunk.samples.start * sample..chunk.samples.end * sample
    }

    /// Joins the parts of all chunks into one value with `width` elements for each token.
    pub fn join(&self, width: usize, mut of: impl FnMut(&Chunk) -> Result<Buffer>) -> Result<Buffer> {
        if let [all] = &self.chunks[..] {
            return of(all);
        }
        let mut joined: Option<Buffer> = None;
        for chunk in &self.chunks {
            let part = of(chunk)?;
            let whole = match &mut joined {
                Some(whole) => whole,
                None => joined.insert(self.device.alloc(part.dtype(), self.tokens[0] * self.tokens[1] * width)?),
            };
            self.device.layout()?.copy_into(&part, 0..part.count(), whole, self.elements(chunk, width).start)?;
        }
        Ok(joined.unwrap_or_else(Buffer::empty))
    }
}

fn start(
    device: &dyn Device,
    group: &Group,
    rows: Buffer,
    [to, from]: &[Vec<usize>; 2],
    width: usize,
) -> Result<Pending> {
    let elements = |rows: &[usize]| -> Vec<usize> { rows.iter().map(|rows| rows * width).collect() };
    let (to, from) = (elements(to), elements(from));
    let room = device.alloc(rows.dtype(), from.iter().sum())?;
    Ok(group.start_all_to_all(rows, room, &to, &from)?)
}

impl Chunk {
    /// The only chunk of a rank that holds all experts.
    pub fn here(device: &dyn Device, experts: &Buffer, samples: Range<usize>, groups: RowGroups) -> Result<Self> {
        let permutation = device.permutation()?;
        let (order, slots) = permutation.sort(experts, 0..groups.rows().len(), groups.total())?;
        let (groups, experts) = (Rc::new(groups), experts.clone());
        let (tokens, results) = Default::default();
        Ok(Self { samples, groups, experts, order, slots, exchange: None, tokens, results })
    }

    /// The name of rows of this chunk, unique among all chunks.
    pub fn named(&self, what: &str) -> String {
        format!("{what} from sample {} on", self.samples.start)
    }

    /// The choices of its tokens, with the rows that returned to this rank as slots.
    pub fn of_tokens(&self, plan: &Plan) -> Choices<'_> {
        plan.choices(&self.experts, &self.slots)
    }
}

impl Exchange {
    /// The choices of the tokens received, with their rows by expert as slots.
    pub fn of_received(&self, plan: &Plan) -> Choices<'_> {
        plan.choices(&self.received, &self.here_slots)
    }

    /// The ranks of the tokens, with the tokens sent as slots.
    pub fn of_sent(&self, plan: &Plan) -> Choices<'_> {
        plan.choices(&self.ranks, &self.sent_slots)
    }
}

/// A chunk whose choices are being sent to the ranks of their experts.
pub(super) struct Leaving {
    samples: Range<usize>,
    places: usize,
    /// Experts of the tokens' choices, and their ranks, each rank once.
    experts: Buffer,
    ranks: Buffer,
    /// The tokens sent, in order, and the slots of their choices.
    sent: (Buffer, Buffer),
    choices: Pending,
    /// Tokens sent to each rank, and rows that each rank returns.
    tokens: Vec<usize>,
    rows: Vec<usize>,
}

impl Leaving {
    /// Sends the choices of `samples`, with their `experts` and `ranks`. `tokens` are the counts of tokens sent to and
    /// received from each rank; `rows` are the counts of rows that each rank returns.
    pub fn new(
        device: &dyn Device,
        group: &Group,
        samples: Range<usize>,
        [experts, ranks]: [Buffer; 2],
        places: usize,
        counts: &Counts,
        here: &Announced,
    ) -> Result<Self> {
        let permutation = device.permutation()?;
        let (tokens, rows) = (counts.tokens_to_ranks(), counts.rows_of_ranks());
        let sent = permutation.sort(&ranks, 0..group.size(), tokens.iter().sum())?;
        let choices = permutation.gather(&experts, &sent.0, places, places)?;
        let choices = start(device, group, choices, &[tokens.clone(), here.tokens_by_rank()], places)?;
        Ok(Self { samples, places, experts, ranks, sent, choices, tokens, rows })
    }

    /// Completes the chunk with the received choices of other ranks' tokens.
    pub fn arrive(self, device: &dyn Device, group: &Group, here: &Announced, axes: Axes) -> Result<Chunk> {
        let Self { samples, places, experts, ranks, sent: (sent, sent_slots), choices, tokens, rows } = self;
        let (permutation, me, groups) = (device.permutation()?, group.rank(), here.groups(axes));
        let (held, total) = (groups.rows().len(), groups.total());
        let by_rank = permutation.group_ids(&experts, places, held, false)?;
        let (order, slots) = permutation.sort(&by_rank, 0..group.size(), rows.iter().sum())?;
        let received = choices.wait()?;
        let (by_expert, here_slots) = permutation.sort(&received, me * held..(me + 1) * held, total)?;
        let (as_received, _) =
            permutation.sort(&permutation.group_ids(&received, places, held, false)?, me..me + 1, total)?;
        let results = permutation.gather(&here_slots, &as_received, 1, 1)?;
        let results_inverse = permutation.invert(&results, total)?;
        let exchange = Exchange {
            ranks,
            sent,
            sent_slots,
            tokens: [tokens, here.tokens_by_rank()],
            received,
            here: by_expert,
            here_slots,
            results,
            results_inverse,
            rows: [here.rows_by_rank(), rows],
        };
        let (tokens, results) = Default::default();
        Ok(Chunk { samples, groups: Rc::new(groups), experts, order, slots, exchange: Some(exchange), tokens, results })
    }
}
