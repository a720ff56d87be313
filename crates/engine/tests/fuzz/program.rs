//! A program as plain data: a network of blocks of instructions. It names axes, but no degree: one program runs on
//! every mesh.
//!
//! More than 400 lines: every instruction with its operands, and how each is printed.

use meshwork_core::{Axis, Ty};
use meshwork_tensor::{Init, Role};
use std::fmt;
use std::ops::Range;

/// A network.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// What a sample is.
    pub data: Data,
    /// Tokens of a sample.
    pub seq: usize,
    /// The blocks, in the order in which they run: the front (value 0 is the field of inputs), a block for each layer,
    /// the back, whose result is the output of the model, and the loss of that output.
    pub blocks: Vec<Block>,
    /// The activation before each layer, and after the last one.
    pub cuts: Vec<Cut>,
    /// How it counts the terms of its loss.
    pub terms: Terms,
}

/// How a program counts the terms of its loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Terms {
    /// Unmasked tokens, or samples.
    Right,
    /// Each term twice.
    Twice,
    /// One for all samples together.
    One,
    /// Half of them, rounded up.
    Half,
}

/// What a sample is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Data {
    /// Token ids below `vocab`, and targets of which some are masked.
    Tokens { vocab: usize },
    /// Real numbers `[seq, width]`, and as many targets.
    Floats { width: usize },
}

/// How an activation `[samples, seq, width]` is distributed over `axis`; it is `Invariant` on the other axes but dp.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cut {
    pub axis: Axis,
    pub ty: Ty,
    pub width: usize,
}

/// Straight-line code. Value 0 is its input, value `i + 1` the result of instruction `i`, the last value its result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    pub params: Vec<Param>,
    pub code: Vec<Instr>,
}

/// A parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    pub name: String,
    pub dims: Vec<usize>,
    /// A dim that is multiplied by the degree of an axis, as where an extent was counted on a shard.
    pub wider: Option<(Axis, usize)>,
    pub cut: Option<(Axis, usize)>,
    /// Stored in multiples of the reduction blocks, as a table over the vocabulary is.
    pub padded: bool,
    pub role: Role,
    pub init: Init,
    pub group: Group,
    /// Whether another block declares it.
    pub tied: bool,
}

/// How a parameter is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Group {
    Usual,
    Slow,
    Frozen,
}

/// An operation on values of its block.
#[derive(Clone, Debug, PartialEq)]
pub struct Instr {
    pub op: Op,
    pub args: Vec<usize>,
}

/// An operation. Numbers named `weight`, `bias`, `gamma`, `beta`, `table` and `buffer` are parameters of the block.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// The operand: what is left of an instruction that a mutation or the shrinker took out.
    Same,
    /// The targets of the batch.
    Targets,
    /// Numbers that depend on `salt` alone, of one sample or of its last dims.
    Constant {
        salt: u64,
        dims: Vec<usize>,
        axis: Axis,
        holds: Holds,
        says: Ty,
    },

    /// The operand as a constant of another type.
    Retyped {
        axis: Axis,
        says: Ty,
    },

    Copy(Axis),
    AllReduce(Axis),
    AllReduceReplicate(Axis),
    AllGather(Axis, usize),
    AllGatherInvariant(Axis, usize),
    ReduceScatter(Axis, usize),
    Split(Axis, usize),
    Slice(Axis, usize),
    AllToAll(Axis, usize, usize),
    /// This collective without its communication, of the same types.
    Unsent(Box<Op>),

    Linear {
        weight: usize,
        contract: usize,
    },
    LinearBias {
        weight: usize,
        bias: usize,
    },
    LinearGelu {
        weight: usize,
        bias: Option<usize>,
    },
    LinearSwiglu {
        weight: usize,
    },
    Bias {
        bias: usize,
    },
    BiasResidual {
        bias: usize,
    },
    LayerNorm {
        gamma: usize,
        beta: Option<usize>,
    },
    RmsNorm {
        weight: usize,
    },
    Map(Map),
    Scale(f64),
    Dropout {
        p: f32,
        name: String,
    },
    Softmax,
    Add,
    Sub,
    Mul,
    Concat {
        dim: usize,
    },
    Narrow {
        dim: usize,
        range: Range<usize>,
    },
    Transpose(usize, usize),
    /// Cuts `dim` into `[.., inner]`.
    SplitDim {
        dim: usize,
        inner: usize,
    },
    /// The same where somebody counted the other factor, of whole values: `[count, ..]`.
    SplitInto {
        dim: usize,
        count: usize,
    },
    /// Merges `dim` with the next one.
    MergeDims {
        dim: usize,
    },
    /// The mean over the samples, which is of the rank's own where they are not gathered.
    SampleMean,
    /// `x[t] + x[t - 1] / 2`, in which a user mixes tokens by concatenation.
    TokenShift,
    Attention {
        dropout: Option<(f32, String)>,
        window: Option<usize>,
    },
    GroupedAttention {
        window: Option<usize>,
    },
    Embedding {
        table: usize,
    },
    VocabEmbedding {
        table: usize,
        axis: Axis,
        vocab: usize,
    },
    Positions {
        table: usize,
    },
    /// `sin x`, an operation of the user's own.
    User(Lie),

    /// The operand, whose mean square is an auxiliary loss or a metric.
    Penalty,
    Report,
    /// The operand less how often each feature was positive in the steps before.
    Centred {
        buffer: usize,
    },

    /// The operand divided by the extent of a dim, as this rank's tape has it.
    PerExtent {
        dim: usize,
    },
    CrossEntropy,
    VocabCrossEntropy {
        axis: Axis,
        vocab: usize,
    },
    SquaredError,
}

/// What a rank holds of a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Holds {
    /// All of it, each rank the same.
    Whole,
    /// Its slice of a dim.
    Slice(usize),
    /// The first slice, on every rank: filled without the offset.
    First(usize),
    /// A part of it: the parts of all ranks, which are unequal, add up to it.
    Part,
    /// Numbers of its own.
    Own,
}

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Map {
    Relu,
    Gelu,
    Silu,
    Tanh,
    Sigmoid,
    SoftCap,
}

/// What the user's operation does instead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lie {
    /// What it says.
    None,
    /// Its result depends on the rank.
    ForwardByRank,
    /// Its gradient depends on the rank.
    GradientByRank,
    /// Its gradient is that of another function, the same on every rank.
    Gradient,
    /// Its gradient is lost.
    NoGradient,
    /// Its result is multiplied by the number of ranks.
    Degree,
    /// It takes off the mean over the features of the rank.
    Mixes,
}

impl Program {
    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.blocks.len() - 3
    }

    /// Numbers of a token in the output of the model.
    pub fn outputs(&self) -> usize {
        match self.data {
            Data::Tokens { vocab } => vocab,
            Data::Floats { width } => width,
        }
    }

    /// The block of the back.
    pub fn back(&self) -> usize {
        self.blocks.len() - 2
    }

    /// Every instruction, as (block, place).
    pub fn sites(&self) -> impl Iterator<Item = (usize, usize)> {
        self.blocks.iter().enumerate().flat_map(|(block, it)| (0..it.code.len()).map(move |place| (block, place)))
    }
}

impl Block {
    /// Inserts `op` on the result of instruction `place`; what read that result reads the new one.
    pub fn insert_behind(&mut self, place: usize, op: Op) {
        let result = place + 1;
        let later = self.code[place + 1..].iter_mut().flat_map(|instr| &mut instr.args);
        later.filter(|arg| **arg >= result).for_each(|arg| *arg += 1);
        self.code.insert(place + 1, Instr { op, args: vec![result] });
    }

    /// The parameters that its code reads.
    pub fn reads(&self, param: usize) -> bool {
        self.code.iter().any(|instr| instr.op.params().contains(&param))
    }
}

impl Op {
    /// The parameters that it reads.
    pub fn params(&self) -> Vec<usize> {
        match *self {
            Self::Linear { weight, .. } | Self::LinearSwiglu { weight } | Self::RmsNorm { weight } => vec![weight],
            Self::LinearBias { weight, bias } | Self::LinearGelu { weight, bias: Some(bias) } => vec![weight, bias],
            Self::LinearGelu { weight, bias: None } => vec![weight],
            Self::Bias { bias } | Self::BiasResidual { bias } => vec![bias],
            Self::LayerNorm { gamma, beta } => std::iter::once(gamma).chain(beta).collect(),
            Self::Embedding { table } | Self::VocabEmbedding { table, .. } | Self::Positions { table } => vec![table],
            Self::Centred { buffer } => vec![buffer],
            _ => Vec::new(),
        }
    }

    /// The axis over which it is a collective, and the type that it makes into another.
    pub fn conversion(&self) -> Option<(Axis, Ty, Ty)> {
        Some(match *self {
            Self::Copy(axis) => (axis, Ty::Invariant, Ty::Replicate),
            Self::AllReduce(axis) => (axis, Ty::Partial, Ty::Invariant),
            Self::AllReduceReplicate(axis) => (axis, Ty::Partial, Ty::Replicate),
            Self::AllGather(axis, dim) => (axis, Ty::Shard(dim), Ty::Replicate),
            Self::AllGatherInvariant(axis, dim) => (axis, Ty::Shard(dim), Ty::Invariant),
            Self::ReduceScatter(axis, dim) => (axis, Ty::Partial, Ty::Shard(dim)),
            Self::Split(axis, dim) => (axis, Ty::Invariant, Ty::Shard(dim)),
            Self::Slice(axis, dim) => (axis, Ty::Replicate, Ty::Shard(dim)),
            Self::AllToAll(axis, from, to) => (axis, Ty::Shard(from), Ty::Shard(to)),
            _ => return None,
        })
    }

    /// The same collective over another axis.
    pub fn over(&self, axis: Axis) -> Op {
        match *self {
            Self::Copy(_) => Self::Copy(axis),
            Self::AllReduce(_) => Self::AllReduce(axis),
            Self::AllReduceReplicate(_) => Self::AllReduceReplicate(axis),
            Self::AllGather(_, dim) => Self::AllGather(axis, dim),
            Self::AllGatherInvariant(_, dim) => Self::AllGatherInvariant(axis, dim),
            Self::ReduceScatter(_, dim) => Self::ReduceScatter(axis, dim),
            Self::Split(_, dim) => Self::Split(axis, dim),
            Self::Slice(_, dim) => Self::Slice(axis, dim),
            Self::AllToAll(_, from, to) => Self::AllToAll(axis, from, to),
            ref other => other.clone(),
        }
    }

    /// The axis over which it is a collective.
    pub fn collective(&self) -> Option<Axis> {
        self.conversion().map(|(axis, ..)| axis)
    }
}

impl Program {
    /// Whether a parameter or a value is cut over an axis.
    pub fn cuts_over(&self, axis: Axis) -> bool {
        self.blocks.iter().any(|block| {
            let params = block.params.iter().any(|param| param.cut.is_some_and(|(of, _)| of == axis));
            params || block.code.iter().any(|instr| instr.op.collective() == Some(axis))
        })
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, {} tokens a sample", self.data, self.seq)?;
        for (number, block) in self.blocks.iter().enumerate() {
            match number {
                0 => writeln!(f, "front")?,
                _ if number == self.back() => writeln!(f, "back")?,
                _ if number > self.back() => writeln!(f, "loss")?,
                _ => writeln!(f, "layer {}", number - 1)?,
            }
            for (at, instr) in block.code.iter().enumerate().filter(|(_, instr)| instr.op != Op::Same) {
                let params: Vec<String> =
                    instr.op.params().iter().map(|&param| block.params[param].to_string()).collect();
                let args: Vec<String> = instr.args.iter().map(|&arg| format!("v{}", block.source(arg))).collect();
                writeln!(f, "  v{} = {:?} of {} {}", at + 1, instr.op, args.join(", "), params.join(", "))?;
            }
            if let Some(cut) = self.cuts.get(number).filter(|_| number < self.back()) {
                writeln!(f, "  result [samples, seq, {}], {} on {}", cut.width, cut.ty, cut.axis)?;
            }
        }
        Ok(())
    }
}

impl Block {
    /// The value that a value is, behind instructions that were taken out.
    fn source(&self, mut value: usize) -> usize {
        while value > 0 && self.code[value - 1].op == Op::Same {
            value = self.code[value - 1].args[0];
        }
        value
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, dims, cut, group, tied, .. } = self;
        write!(f, "{name} {dims:?}")?;
        if let Some((axis, dim)) = cut {
            write!(f, " Shard({dim}) on {axis}")?;
        }
        match group {
            Group::Usual => {}
            group => write!(f, " {group:?}")?,
        }
        if *tied { f.write_str(" tied") } else { Ok(()) }
    }
}
