//! Rows of a table by id, and positions added to a sequence.

use super::prelude::*;
use crate::kernel::TableGrad;
use crate::shape::MAX_DIMS;
use meshwork_core::Axis;
use std::ops::Range;

#[derive(Debug)]
struct Lookup {
    /// The ids whose rows the table holds here.
    rows: Range<usize>,
    /// Ids over all ranks.
    vocab: usize,
    table_shape: Shape,
    /// The axis over which the table's rows are cut.
    cut_over: Option<Axis>,
    tokens: Tokens,
}

impl Var {
    /// `table[ids]`, for ids `[..]` (i32) and a whole table `[rows, h]`.
    pub fn embedding(&self, table: &Var) -> Result<Var> {
        let vocab = table.shape().first().copied().unwrap_or(0);
        let op =
            Lookup { rows: 0..vocab, vocab, table_shape: table.shape(), cut_over: None, tokens: Tokens::new(self, 0) };
        self.tape().apply(op, &[self, table])
    }

    /// The same for a table whose rows, `vocab` over all ranks, are cut over `axis`: each rank looks up the rows that
    /// it holds and returns zeros for the others, so the result is `Partial` on `axis`.
    pub fn vocab_parallel_embedding(&self, table: &Var, axis: Axis, vocab: usize) -> Result<Var> {
        let held = table.shape().first().copied().unwrap_or(0);
        let first = (self.tape().rank().coords().get(axis) * held).min(vocab);
        let rows = first..(first + held).min(vocab);
        let tokens = Tokens::new(self, 0);
        let op = Lookup { rows, vocab, table_shape: table.shape(), cut_over: Some(axis), tokens };
        self.tape().apply(op, &[self, table])
    }
}

impl Op for Lookup {
    fn name(&self) -> &'static str {
        if self.cut_over.is_some() { "vocab_parallel_embedding" } else { "embedding" }
    }

    stated! { ids, table; reads_values }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (ids, table) = (operands[0], operands[1]);
        let Some(cut) = self.cut_over else {
            return rules::lookup(self.name(), ids, table);
        };
        // On the other axes it is a plain lookup; on the cut axis, the table is treated as read whole.
        let whole = Operand { types: table.types.with(cut, ids.types.get(cut).unwrap_or(Ty::Replicate)), ..table };
        let plain = rules::lookup(self.name(), ids, whole)?;
        match (ids.types.get(cut), table.types.get(cut)) {
            (Some(Ty::Invariant | Ty::Replicate), Some(Ty::Shard(0))) => Ok(plain.with(cut, Ty::Partial)),
            (ti, tt) => Err(SpmdError {
                op: self.name().to_owned(),
                axis: cut,
                problem: format!("ids are {} and table is {}", show(ti), show(tt)),
                fix: format!("give every rank of {cut} the same ids, and a table Shard(0) on {cut}"),
            }),
        }
    }

    fn padded(&self) -> Padded {
        if let Some(axis) = self.cut_over { Padded::Knows { axis, extent: self.vocab } } else { Padded::Refused }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (ids, table) = (inputs[0], inputs[1]);
        cx.require(table.shape().len() == 2, "table is [rows, width]")?;
        cx.require(ids.shape().len() < MAX_DIMS, format_args!("the result has at most {MAX_DIMS} dims"))?;
        cx.save(ids)?;
        let width = table.shape()[1];
        let out =
            table.device().embedding()?.lookup(ids.buffer(), table.buffer(), self.rows.clone(), self.vocab, width)?;
        cx.share(&Tensor::from_buffer(table.device(), out, Shape::new(&[&ids.shape()[..], &[width]].concat()))?)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let ids = cx.saved(0)?;
        let (rows, width) = (self.table_shape[0], self.table_shape[1]);
        let samples = ids.shape().first().copied().unwrap_or(1);
        let dtable = cx.write_grad(1, grad.dtype(), self.table_shape, self.tokens, |room| {
            let (ids, dout) = (room.rows(&ids, samples)?, room.rows(&grad, samples)?);
            let dtable = TableGrad::new(room, [rows, width]);
            grad.device().embedding()?.lookup_grad(&ids, &dout, self.rows.clone(), dtable)
        })?;
        Ok(vec![None, dtable])
    }
}

fn show(ty: Option<Ty>) -> String {
    ty.map_or("off this axis".to_owned(), |ty| ty.to_string())
}

#[derive(Debug)]
struct Positions {
    /// Global position of the first token here.
    first: usize,
    table_shape: Shape,
    x_shape: Shape,
}

impl Var {
    /// `x[b, s, h] + table[first + s, h]`, where `first` is the global position of this rank's first token: 0, the
    /// start of its slice where dim 1 is sharded, or the tokens before on a tape that [decodes](crate::Tape::decoding).
    /// The table is whole on every rank.
    pub fn positions(&self, table: &Var) -> Result<Var> {
        if self.tape().reduction_blocks().is_some() && self.types().cuts(0).any(|axis| !axis.is_data()) {
            return Err(Error::NotCanonical {
                op: "positions",
                problem: "ranks that share the samples of a micro-batch would each sum the table's gradient over their own",
                valid: "it on a value whose samples are cut over dp alone",
            });
        }
        let first = self.global_position().0[1] as usize + self.tape().past();
        let op = Positions { first, table_shape: table.shape(), x_shape: self.shape() };
        self.tape().apply(op, &[self, table])
    }
}

impl Op for Positions {
    stated! { "positions": x, table; reads_values }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (x, table) = (operands[0], operands[1]);
        let types = rules::pointwise(self.name(), x)?;
        let width = x.ndim.saturating_sub(1);
        if let Some((axis, _)) = types.iter().find(|&(_, ty)| ty == Ty::Shard(width)) {
            return Err(SpmdError {
                op: self.name().to_owned(),
                axis,
                problem: format!(
                    "dim {width} of x is sharded, and table is {}: they do not hold the same features",
                    show(table.types.get(axis))
                ),
                fix: format!("all_gather x along dim {width} first"),
            });
        }
        // Each rank of a sharded sequence reads its own rows of the whole table: a lookup by position.
        rules::lookup(self.name(), Operand::value(x.name, types, x.ndim), table)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, table) = (inputs[0], inputs[1]);
        cx.require(
            x.shape().len() == 3
                && table.shape().len() == 2
                && table.shape()[1] == x.shape()[2]
                && self.first + x.shape()[1] <= table.shape()[0],
            format_args!("x is [batch, seq, width] and table holds positions {}.. of that width", self.first),
        )?;
        let (seq, width) = (x.shape()[1], x.shape()[2]);
        let out = x.device().embedding()?.positions(x.buffer(), table.buffer(), self.first, seq, width)?;
        Tensor::from_buffer(x.device(), out, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (samples, seq, width) = (self.x_shape[0], self.x_shape[1], self.x_shape[2]);
        let dtable = cx.write_own_rows(1, grad.dtype(), self.table_shape, samples, |room| {
            let sample = seq * width;
            let dout = grad.buffer().slice(room.samples.start * sample..room.samples.end * sample)?;
            let dtable = TableGrad::new(room, [self.table_shape[0], width]);
            grad.device().embedding()?.positions_grad(&dout, self.first, seq, dtable)
        })?;
        Ok(vec![cx.needs(0).then_some(grad), dtable])
    }
}
