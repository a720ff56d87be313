//! Pieces of layers: some operations that are right for the type of a value, with the collectives that they need.

use super::{FEATURES, Generator, SEQ, Value};
use crate::case::Way;
use crate::program::{Holds, Lie, Map, Op};
use meshwork_core::{Axis, Ty};
use meshwork_tensor::{Init, Role};

impl Generator<'_> {
    /// Some operations that are right for the type of `x`.
    pub(super) fn piece(&mut self, x: Value) -> Value {
        match x.ty {
            Ty::Partial if self.careful || self.chance(2) => self.leave(x),
            Ty::Partial => match self.rng.below(3) {
                0 => self.on(x, Op::Scale(0.5)),
                1 => self.linear(x),
                _ => self.dropout(x),
            },
            Ty::Replicate if self.careful || self.chance(2) => self.column(x),
            Ty::Replicate => match self.rng.below(4) {
                0 => self.linear(x),
                1 => self.norm(x),
                2 => self.bring(x, FEATURES),
                _ => self.pointwise(x),
            },
            Ty::Shard(2) => match self.rng.below(8) {
                0 => self.pointwise(x),
                1 => {
                    let bias = self.bias_of(&[x.width], Some((x.axis, 0)));
                    self.on(x, Op::Bias { bias })
                }
                2 => self.bring(x, self.seq_or(Ty::Invariant)),
                3 => self.bring(x, Ty::Invariant),
                4 => self.cut_and_merged(x),
                5 => {
                    let x = self.bring(x, Ty::Replicate);
                    self.column(x)
                }
                _ => self.row(x),
            },
            _ => match self.rng.below(16) {
                0 => self.norm(x),
                1 => self.linear_or_norm(x),
                2 => {
                    let bias = self.bias_of(&[x.width], None);
                    self.on(x, Op::Bias { bias })
                }
                3 => self.gated(x),
                4 => self.widened(x),
                5 | 6 => self.attention(x),
                7 if x.ty == Ty::Invariant && matches!(self.way, Way::Trainer { .. }) => self.centred(x),
                8 => {
                    let to = if x.ty == SEQ { [Ty::Invariant, FEATURES] } else { [self.seq_or(FEATURES), FEATURES] };
                    let to = self.rng.pick(&to);
                    self.bring(x, to)
                }
                9..=11 => self.column(x),
                12 if x.ty == Ty::Invariant && self.way != Way::Decoder => self.on(x, Op::TokenShift),
                13 => self.flattened(x),
                14 => self.cut_and_merged(x),
                _ => self.pointwise(x),
            },
        }
    }

    /// What works element by element on any type but `Partial`.
    fn pointwise(&mut self, x: Value) -> Value {
        match self.rng.below(9) {
            0 => self.on(x, Op::Scale(1.5)),
            7 if self.gathers => self.less_mean(x),
            // An extent that no axis cuts.
            8 if !matches!(x.ty, Ty::Replicate | FEATURES) => {
                let x = self.on(x, Op::PerExtent { dim: 2 });
                self.on(x, Op::Scale(x.width as f64))
            }
            1 => self.dropout(x),
            2 => self.on(x, Op::User(Lie::None)),
            3 if x.ty != Ty::Replicate => {
                let op = if self.chance(2) { Op::Penalty } else { Op::Report };
                self.on(x, op)
            }
            4 => self.times_constant(x),
            _ => self.activation(x),
        }
    }

    fn activation(&mut self, x: Value) -> Value {
        let map = self.rng.pick(&[Map::Relu, Map::Gelu, Map::Silu, Map::Tanh, Map::Sigmoid, Map::SoftCap]);
        self.on(x, Op::Map(map))
    }

    fn dropout(&mut self, x: Value) -> Value {
        let name = self.name("dropout");
        self.on(x, Op::Dropout { p: 0.25, name })
    }

    /// `x · c` or `x + c` of a constant that lies as `x` does: of one sample, or of the features alone.
    fn times_constant(&mut self, x: Value) -> Value {
        let dims = if self.chance(2) || self.way == Way::Decoder { vec![x.width] } else { vec![self.seq, x.width] };
        let lead = 3 - dims.len();
        let (holds, says) = match x.ty {
            Ty::Shard(dim) if dim < lead => (Holds::Whole, Ty::Replicate),
            Ty::Shard(dim) => (Holds::Slice(dim - lead), Ty::Shard(dim - lead)),
            ty => (Holds::Whole, ty),
        };
        let constant = Op::Constant { salt: self.rng.next_u64(), dims, axis: x.axis, holds, says };
        let constant = self.push(constant, &[]);
        let op = if self.chance(2) { Op::Mul } else { Op::Add };
        Value { at: self.push(op, &[x.at, constant]), ..x }
    }

    pub(super) fn norm(&mut self, x: Value) -> Value {
        let dims = [x.width];
        match self.rng.below(3) {
            0 => {
                let weight = self.declare("g", &dims, None, Role::Norm, Init::Ones);
                self.on(x, Op::RmsNorm { weight })
            }
            1 => {
                let x = self.on(x, Op::Softmax);
                self.on(x, Op::Scale(4.0))
            }
            _ => {
                let gamma = self.declare("g", &dims, None, Role::Norm, Init::Ones);
                let beta = self.chance(2).then(|| self.declare("b", &dims, None, Role::Norm, Init::Zeros));
                self.on(x, Op::LayerNorm { gamma, beta })
            }
        }
    }

    /// A linear layer that is not split.
    fn linear(&mut self, x: Value) -> Value {
        let width = self.unit * (1 + self.rng.below(3));
        let weight = self.weight(x, &[width, x.width], None);
        let op = match self.rng.below(3) {
            0 if x.ty != Ty::Partial => Op::LinearBias { weight, bias: self.bias_of(&[width], None) },
            _ => Op::Linear { weight, contract: 1 },
        };
        Value { width, ..self.on(x, op) }
    }

    /// Canonical numerics have no order for the sum over a cut sequence that the gradient of a weight is.
    fn linear_or_norm(&mut self, x: Value) -> Value {
        if self.careful && x.ty == SEQ { self.norm(x) } else { self.linear(x) }
    }

    /// `x · sigmoid(x)`, in two instructions, or minus it.
    fn gated(&mut self, x: Value) -> Value {
        let gate = self.activation(x);
        let op = self.rng.pick(&[0, 1]);
        let op = if op == 0 { Op::Mul } else { Op::Sub };
        Value { at: self.push(op, &[x.at, gate.at]), ..x }
    }

    /// `[x, f(x)]` along the features, and some of them.
    fn widened(&mut self, x: Value) -> Value {
        let other = self.activation(x);
        let wide = Value { at: self.push(Op::Concat { dim: 2 }, &[x.at, other.at]), width: 2 * x.width, ..x };
        let start = self.rng.below(x.width + 1);
        Value { width: x.width, ..self.on(wide, Op::Narrow { dim: 2, range: start..start + x.width }) }
    }

    /// The same elements with the features in two dims, in front of the sequence and back.
    fn cut_and_merged(&mut self, x: Value) -> Value {
        let inner = x.width / self.unit;
        let split = self.on(x, Op::SplitDim { dim: 2, inner });
        let turned = self.on(split, Op::Transpose(1, 2));
        let changed = self.activation(turned);
        let back = self.on(changed, Op::Transpose(1, 2));
        self.on(back, Op::MergeDims { dim: 2 })
    }

    /// The same elements with tokens and features in one dim, and back.
    fn flattened(&mut self, x: Value) -> Value {
        let rows = self.on(x, Op::MergeDims { dim: 1 });
        let changed = self.activation(rows);
        self.on(changed, Op::SplitDim { dim: 1, inner: x.width })
    }

    /// Off each sample the mean over those of all ranks.
    fn less_mean(&mut self, x: Value) -> Value {
        let all = self.push(Op::AllGather(Axis::Dp, 0), &[x.at]);
        let mean = self.push(Op::SampleMean, &[all]);
        Value { at: self.push(Op::Sub, &[x.at, mean]), ..x }
    }

    fn centred(&mut self, x: Value) -> Value {
        let buffer = self.declare("rate", &[x.width], None, Role::Buffer, Init::Zeros);
        self.on(x, Op::Centred { buffer })
    }

    /// A column-parallel layer, and after a fused activation the row-parallel one that alone may read it.
    pub(super) fn column(&mut self, x: Value) -> Value {
        let x = self.bring(x, Ty::Replicate);
        // What is read by a row-parallel layer alone may be padded, in fast numerics.
        let (kind, even) = (self.rng.below(4), self.unit * (1 + self.rng.below(3)));
        let width = if kind < 2 && !self.careful && self.chance(3) { even + self.rng.below(self.unit) } else { even };
        let cut = Some((x.axis, 0));
        let cut_to = |x: Value| Value { ty: FEATURES, width, ..x };
        match kind {
            0 => {
                let weight = self.weight(x, &[width, x.width], cut);
                let bias = self.chance(2).then(|| self.bias_of(&[width], cut));
                let x = cut_to(self.on(x, Op::LinearGelu { weight, bias }));
                self.row(x)
            }
            1 => {
                let weight = self.weight(x, &[width, 2, x.width], cut);
                let x = cut_to(self.on(x, Op::LinearSwiglu { weight }));
                self.row(x)
            }
            2 => {
                let weight = self.weight(x, &[width, x.width], cut);
                let bias = self.bias_of(&[width], cut);
                cut_to(self.on(x, Op::LinearBias { weight, bias }))
            }
            _ => {
                let weight = self.weight(x, &[width, x.width], cut);
                cut_to(self.on(x, Op::Linear { weight, contract: 1 }))
            }
        }
    }

    /// A row-parallel layer, whose result stays `Partial` or not.
    fn row(&mut self, x: Value) -> Value {
        let weight = self.weight(x, &[self.width, x.width], Some((x.axis, 1)));
        let x = Value { ty: Ty::Partial, width: self.width, ..self.on(x, Op::Linear { weight, contract: 1 }) };
        if self.careful || !self.chance(4) { self.leave(x) } else { x }
    }

    fn leave(&mut self, x: Value) -> Value {
        let to = match self.rng.below(8) {
            0 if !self.careful => Ty::Replicate,
            1 | 2 => self.seq_or(Ty::Invariant),
            3 => FEATURES,
            _ => Ty::Invariant,
        };
        self.bring(x, to)
    }

    /// One of three kinds of attention, some with a window: with split heads; with grouped heads, whose keys and values
    /// are gathered; or of a rank's own queries over the gathered keys of all ranks.
    pub(super) fn attention(&mut self, x: Value) -> Value {
        let (heads, features) = (self.unit * (1 + self.rng.below(2)), 1 + self.rng.below(3));
        let axis = x.axis;
        let window = [None, None, Some(1), Some(2), Some(5)][self.own.below(5)];
        if x.ty == SEQ && !self.careful && self.way != Way::Decoder && self.own.below(2) == 0 {
            let q = self.weight(x, &[heads, features, x.width], None);
            let kv = self.weight(x, &[2, heads * features, x.width], None);
            let [q, kv] = [q, kv].map(|weight| self.push(Op::Linear { weight, contract: 1 }, &[x.at]));
            let kv = self.push(Op::AllGather(axis, 1), &[kv]);
            let mixed = Value { at: self.push(Op::GroupedAttention { window }, &[q, kv]), ..x };
            let weight = self.weight(mixed, &[self.width, heads, features], None);
            return Value { width: self.width, ..self.on(mixed, Op::Linear { weight, contract: 2 }) };
        }
        let x = self.bring(x, Ty::Replicate);
        let dropout = self.chance(2).then(|| (0.25, self.name("attention")));
        let mixed = match self.rng.below(3) {
            0 if !self.careful => {
                let q = self.weight(x, &[heads, features, x.width], Some((axis, 0)));
                let kv = self.weight(x, &[2, heads * features, x.width], Some((axis, 1)));
                let q = self.push(Op::Linear { weight: q, contract: 1 }, &[x.at]);
                let mut kv = self.push(Op::Linear { weight: kv, contract: 1 }, &[x.at]);
                if self.chance(2) {
                    kv = self.push(Op::AllGather(axis, 3), &[kv]);
                }
                self.push(Op::GroupedAttention { window }, &[q, kv])
            }
            _ => {
                let weight = self.weight(x, &[3, heads, features, x.width], Some((axis, 1)));
                let qkv = self.push(Op::Linear { weight, contract: 1 }, &[x.at]);
                self.push(Op::Attention { dropout, window }, &[qkv])
            }
        };
        let of_heads = Value { at: mixed, ty: FEATURES, ..x };
        let weight = self.weight(of_heads, &[self.width, heads, features], Some((axis, 1)));
        let sum = self.on(of_heads, Op::Linear { weight, contract: 2 });
        self.leave(Value { ty: Ty::Partial, width: self.width, ..sum })
    }
}
