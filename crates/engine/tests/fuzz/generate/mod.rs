//! Random programs that are right: the generator knows the type of each value, and inserts the collectives that the
//! next operation needs.

mod pieces;

use crate::case::Way;
use crate::program::{Block, Cut, Data, Group, Instr, Op, Param, Program, Terms};
use meshwork_core::{Axis, Mesh, Ty};
use meshwork_tensor::{Init, Role};
use meshwork_testkit::Rng;

/// The dim of a sequence and that of the features of `[samples, seq, width]`.
const SEQ: Ty = Ty::Shard(1);
const FEATURES: Ty = Ty::Shard(2);

/// What programs are generated for.
pub struct Target<'a> {
    pub mesh: &'a Mesh,
    /// Reduction blocks, in canonical numerics, which refuse part of what is right in fast ones.
    pub blocks: Option<usize>,
    /// The fewest layers.
    pub layers: usize,
    pub way: Way,
    /// Whether it may read the samples of all ranks.
    pub gathers: bool,
}

/// A random program.
pub fn program(rng: &mut Rng, target: &Target<'_>) -> Program {
    // Every extent that an axis may cut is a multiple of its degree, and else odd as often as not.
    let unit = unit(target.mesh, target.blocks);
    // Now and then they are as small as they can be: on one rank, or on each, 1.
    let extent = |rng: &mut Rng, usual: usize| match rng.below(8) {
        0 => unit,
        _ => unit * (usual.div_ceil(unit) + rng.below(3)),
    };
    let (width, seq) = (extent(rng, 4), extent(rng, 2));
    let layers = target.layers + rng.below(3);
    let data = match rng.below(2) {
        0 => Data::Tokens { vocab: 5 + rng.below(12) },
        _ => Data::Floats { width: unit * (1 + rng.below(3)) },
    };
    let own = Rng::new(rng.clone().below(1 << 30) as u64);
    let mut generator = Generator {
        rng,
        own,
        unit,
        seq,
        width,
        careful: target.blocks.is_some(),
        way: target.way,
        gathers: target.gathers,
        axes: [Axis::Tp, Axis::Cp].into_iter().filter(|&axis| target.mesh.degree(axis) > 1).collect(),
        names: 0,
        shared: Vec::new(),
        table: None,
        code: Block::default(),
    };
    let mut blocks = vec![];
    let mut cuts = vec![];
    let x = generator.front(data);
    let mut cut = generator.end(x, &mut blocks, &mut cuts);
    for _ in 0..layers {
        let x = generator.layer(cut);
        cut = generator.end(x, &mut blocks, &mut cuts);
    }
    let output = generator.back(data, cut);
    blocks.push(std::mem::take(&mut generator.code));
    generator.loss(data, output);
    blocks.push(generator.code);
    Program { data, seq, blocks, cuts, terms: Terms::Right }
}

/// What every extent is a multiple of that an axis may cut.
pub fn unit(mesh: &Mesh, blocks: Option<usize>) -> usize {
    lcm(lcm(mesh.degree(Axis::Tp), mesh.degree(Axis::Cp)), blocks.unwrap_or(1))
}

fn lcm(a: usize, b: usize) -> usize {
    (1..=b).map(|times| a * times).find(|multiple| multiple.is_multiple_of(b)).unwrap_or(a * b)
}

/// A value `[samples, seq, width]` of the block under construction; `Invariant` on every axis but `axis` and dp.
#[derive(Clone, Copy)]
struct Value {
    at: usize,
    axis: Axis,
    ty: Ty,
    width: usize,
}

struct Generator<'a> {
    rng: &'a mut Rng,
    /// Numbers of its own for what was added later, so that seeds keep what they drew.
    own: Rng,
    unit: usize,
    seq: usize,
    width: usize,
    /// Whether to leave out what canonical numerics refuse.
    careful: bool,
    way: Way,
    gathers: bool,
    /// The axes of a degree above 1 that may cut a value.
    axes: Vec<Axis>,
    names: usize,
    /// Weights that a later linear may tie: parameter, and the axis and type of what it was applied to.
    shared: Vec<(Param, Axis, Ty)>,
    /// The table of tokens, and the axis that cuts it.
    table: Option<(Param, Option<Axis>)>,
    code: Block,
}

impl Generator<'_> {
    fn chance(&mut self, of: usize) -> bool {
        self.rng.below(of) == 0
    }

    fn name(&mut self, what: &str) -> String {
        self.names += 1;
        format!("{what}{}", self.names)
    }

    fn axis(&mut self) -> Axis {
        match self.axes.len() {
            0 => Axis::Tp,
            count => self.axes[self.rng.below(count)],
        }
    }

    fn push(&mut self, op: Op, args: &[usize]) -> usize {
        self.code.code.push(Instr { op, args: args.to_vec() });
        self.code.code.len()
    }

    fn on(&mut self, x: Value, op: Op) -> Value {
        Value { at: self.push(op, &[x.at]), ..x }
    }

    fn declare(&mut self, what: &str, dims: &[usize], cut: Option<(Axis, usize)>, role: Role, init: Init) -> usize {
        let name = self.name(what);
        let group = match (role, self.rng.below(12)) {
            (Role::Buffer, _) => Group::Usual,
            (_, 0) => Group::Frozen,
            (_, 1) => Group::Slow,
            _ => Group::Usual,
        };
        let param =
            Param { name, dims: dims.to_vec(), wider: None, cut, padded: false, role, init, group, tied: false };
        self.code.params.push(param);
        self.code.params.len() - 1
    }

    /// A weight that is applied to `x`, new or tied.
    fn weight(&mut self, x: Value, dims: &[usize], cut: Option<(Axis, usize)>) -> usize {
        let fan_in = dims.iter().skip(1).product::<usize>().max(1);
        let init = Init::Normal { std: 1.0 / (fan_in as f32).sqrt() };
        let alike = |(param, axis, ty): &&(Param, Axis, Ty)| {
            param.dims == dims && param.cut == cut && *ty == x.ty && (*axis == x.axis || x.ty == Ty::Invariant)
        };
        if let Some((param, ..)) = self.shared.iter().find(alike).cloned()
            && self.chance(3)
        {
            let known = self.code.params.iter().position(|known| known.name == param.name);
            return known.unwrap_or_else(|| {
                self.code.params.push(Param { tied: true, ..param });
                self.code.params.len() - 1
            });
        }
        let number = self.declare("w", dims, cut, Role::Weight, init);
        self.shared.push((self.code.params[number].clone(), x.axis, x.ty));
        number
    }

    fn bias_of(&mut self, dims: &[usize], cut: Option<(Axis, usize)>) -> usize {
        let init = if self.chance(2) { Init::Zeros } else { Init::Normal { std: 0.5 } };
        self.declare("b", dims, cut, Role::Bias, init)
    }

    /// Ends the block with an activation, of the hidden width, that may cross stages.
    fn end(&mut self, x: Value, blocks: &mut Vec<Block>, cuts: &mut Vec<Cut>) -> Cut {
        let rough = !self.careful && self.chance(8);
        let to = match self.rng.below(4) {
            _ if rough && x.width == self.width => x.ty,
            0 => self.seq_or(Ty::Invariant),
            1 => FEATURES,
            _ => Ty::Invariant,
        };
        let mut x = x;
        if x.width != self.width {
            x = self.bring(x, Ty::Invariant);
            let weight = self.weight(x, &[self.width, x.width], None);
            x = Value { width: self.width, ..self.on(x, Op::Linear { weight, contract: 1 }) };
        }
        let x = self.bring(x, to);
        // The result of a block is its last value.
        if x.at != self.code.code.len() || x.at == 0 {
            self.on(x, Op::Same);
        }
        blocks.push(std::mem::take(&mut self.code));
        let cut = Cut { axis: x.axis, ty: x.ty, width: x.width };
        cuts.push(cut);
        cut
    }

    /// The sequence cut, or another type where it must be whole: a decoder has one token at a time.
    fn seq_or(&self, whole: Ty) -> Ty {
        if self.way == Way::Decoder { whole } else { SEQ }
    }

    /// Collectives that bring `x` to a type. `Partial` and, in canonical numerics, `Replicate` are no type to bring it
    /// to.
    fn bring(&mut self, x: Value, to: Ty) -> Value {
        let axis = x.axis;
        let op = match (x.ty, to) {
            (from, to) if from == to => return x,
            (Ty::Invariant, Ty::Replicate) => Op::Copy(axis),
            (Ty::Invariant, Ty::Shard(dim)) => Op::Split(axis, dim),
            (Ty::Shard(dim), Ty::Invariant) => Op::AllGatherInvariant(axis, dim),
            (Ty::Shard(dim), Ty::Replicate) => Op::AllGather(axis, dim),
            (Ty::Shard(from), Ty::Shard(to)) => Op::AllToAll(axis, from, to),
            (Ty::Partial, Ty::Invariant) => Op::AllReduce(axis),
            (Ty::Partial, Ty::Replicate) => Op::AllReduceReplicate(axis),
            (Ty::Partial, Ty::Shard(dim)) => Op::ReduceScatter(axis, dim),
            (Ty::Replicate, Ty::Shard(dim)) => Op::Slice(axis, dim),
            (Ty::Replicate, Ty::Invariant) => {
                let cut = self.bring(x, self.seq_or(FEATURES));
                return self.bring(cut, to);
            }
            (from, to) => unreachable!("a program never needs {from} as {to}"),
        };
        Value { ty: to, ..self.on(x, op) }
    }

    fn front(&mut self, data: Data) -> Value {
        let axis = self.axis();
        let x = Value { at: 0, axis, ty: Ty::Invariant, width: self.width };
        let width = self.width;
        let x = match data {
            Data::Tokens { vocab } => {
                let cut = (!self.chance(3)).then_some(axis);
                let init = Init::Normal { std: 0.5 };
                let table = self.declare("table", &[vocab, width], cut.map(|axis| (axis, 0)), Role::Weight, init);
                let param = &mut self.code.params[table];
                param.padded = cut.is_some();
                self.table = Some((param.clone(), cut));
                match cut {
                    Some(axis) => Value { ty: Ty::Partial, ..self.on(x, Op::VocabEmbedding { table, axis, vocab }) },
                    None => self.on(x, Op::Embedding { table }),
                }
            }
            Data::Floats { width: given } => {
                let x = Value { width: given, ..x };
                match self.rng.below(2) {
                    0 => {
                        let weight = self.weight(x, &[width, given], None);
                        Value { width, ..self.on(x, Op::Linear { weight, contract: 1 }) }
                    }
                    _ => self.column(x),
                }
            }
        };
        if self.chance(2) {
            return x;
        }
        let to = if self.chance(2) { self.seq_or(Ty::Invariant) } else { Ty::Invariant };
        let x = self.bring(x, to);
        let table = self.declare("at", &[self.seq, x.width], None, Role::Weight, Init::Normal { std: 0.5 });
        self.on(x, Op::Positions { table })
    }

    fn layer(&mut self, cut: Cut) -> Value {
        let first = Value { at: 0, axis: cut.axis, ty: cut.ty, width: cut.width };
        let mut x = first;
        for _ in 0..1 + self.rng.below(4) {
            if x.ty == Ty::Invariant {
                x.axis = self.axis();
            }
            x = self.piece(x);
        }
        if self.way == Way::Decoder && self.chance(2) {
            x = self.attention(x);
        }
        // A residual, of values that both may be read twice.
        let sums = !self.careful || !matches!(first.ty, Ty::Partial | Ty::Replicate);
        let comes_back = first.ty != Ty::Partial && (x.axis == first.axis || first.ty == Ty::Invariant);
        if sums && comes_back && x.width == first.width && self.chance(2) {
            x = self.bring(x, first.ty);
            let at = match self.rng.below(4) {
                0 if matches!(x.ty, Ty::Invariant | SEQ) => {
                    let bias = self.bias_of(&[x.width], None);
                    self.push(Op::BiasResidual { bias }, &[x.at, 0])
                }
                _ => self.push(Op::Add, &[x.at, 0]),
            };
            x = Value { at, ..x };
        }
        x
    }

    /// The output of the model: logits, whole or cut over the vocabulary, or predictions.
    fn back(&mut self, data: Data, cut: Cut) -> Value {
        let mut x = Value { at: 0, axis: cut.axis, ty: cut.ty, width: cut.width };
        if matches!(x.ty, Ty::Invariant | SEQ) {
            x = self.norm(x);
        }
        match data {
            Data::Tokens { vocab } => self.head(x, vocab),
            Data::Floats { width } => {
                let to = match self.rng.below(3) {
                    0 if !self.careful => self.seq_or(Ty::Invariant),
                    1 => Ty::Invariant,
                    _ => FEATURES,
                };
                let (from, cut) = match to {
                    FEATURES => (Ty::Replicate, Some((x.axis, 0))),
                    to => (to, None),
                };
                let x = self.bring(x, from);
                let weight = self.weight(x, &[width, x.width], cut);
                Value { ty: to, width, ..self.on(x, Op::Linear { weight, contract: 1 }) }
            }
        }
    }

    fn head(&mut self, x: Value, vocab: usize) -> Value {
        let over_vocab = !self.chance(3);
        let from = match self.rng.below(2) {
            _ if over_vocab => Ty::Replicate,
            0 if !self.careful => self.seq_or(Ty::Invariant),
            _ => Ty::Invariant,
        };
        let x = self.bring(x, from);
        let tied = self.table.clone().filter(|(_, cut)| match (cut, over_vocab) {
            (Some(axis), true) => *axis == x.axis,
            (None, false) => from == Ty::Invariant,
            _ => false,
        });
        let weight = match tied {
            Some((table, _)) if self.chance(2) => {
                self.code.params.push(Param { tied: true, ..table });
                self.code.params.len() - 1
            }
            _ => {
                let cut = over_vocab.then_some((x.axis, 0));
                let init = Init::Normal { std: 0.5 };
                let head = self.declare("head", &[vocab, x.width], cut, Role::Weight, init);
                self.code.params[head].padded = over_vocab;
                head
            }
        };
        let ty = if over_vocab { FEATURES } else { from };
        Value { ty, width: vocab, ..self.on(x, Op::Linear { weight, contract: 1 }) }
    }

    fn loss(&mut self, data: Data, output: Value) {
        let mut targets = self.push(Op::Targets, &[0]);
        if let (Data::Tokens { vocab }, FEATURES) = (data, output.ty) {
            self.push(Op::VocabCrossEntropy { axis: output.axis, vocab }, &[0, targets]);
            return;
        }
        if let Ty::Shard(dim) = output.ty {
            targets = self.push(Op::Split(output.axis, dim), &[targets]);
        }
        let op = if let Data::Tokens { .. } = data { Op::CrossEntropy } else { Op::SquaredError };
        self.push(op, &[0, targets]);
    }
}
