//! Mutations: small mistakes in a program, in its plan or in what a rank is given, as data.
//!
//! More than 400 lines: one table of all kinds of mistakes, what each changes, and where a program can have it.

use crate::case::{Case, Way};
use crate::generate;
use crate::program::{Block, Group, Holds, Instr, Lie, Op, Param, Program, Terms};
use meshwork_core::{Axis, Ty};
use meshwork_engine::{Plan, Samples};
use meshwork_testkit::Rng;
use std::collections::BTreeMap;
use std::fmt;

/// A mistake.
#[derive(Clone, Debug)]
pub struct Mutant {
    pub kind: Kind,
    pub change: Change,
    /// The world rank that makes it; `None`: all of them.
    pub on: Option<usize>,
}

/// What is changed.
#[derive(Clone, Debug)]
pub enum Change {
    /// An instruction is another one.
    Instr { block: usize, place: usize, op: Op },
    /// There is one more behind an instruction.
    Behind { block: usize, place: usize, op: Op },
    /// An instruction and the next one are swapped.
    Swapped { block: usize, place: usize },
    /// A parameter is declared in another way.
    Param { block: usize, param: usize, to: Param },
    /// A dim of these parameters is multiplied by the degree of an axis, whatever the mesh.
    Wider { block: usize, dims: Vec<(usize, usize)>, axis: Axis },
    /// Terms of the loss are counted in another way.
    Terms(Terms),
    /// The samples are those of another step.
    Batch,
    /// The samples are those of the first rank.
    FirstSamples,
    /// A setting of the plan.
    Plan(Setting),
    /// A weight, or its momentum, changes between two steps.
    Weight { name: String, state: bool },
    /// What a loop does instead.
    Loop(Careless),
}

/// How a loop is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Careless {
    /// It starts backward from the loss alone: auxiliary losses are left on the tape.
    LeavesNotes,
    /// It updates with gradients that are not summed.
    KeepsGradients,
    /// It divides by the terms of its own rank, by a factor of its own.
    OwnTerms,
    /// It draws the weights of this rank from a seed of its own.
    OwnSeed,
    /// It updates this rank with a rate of its own.
    OwnRate,
    /// It counts the samples of dropout from 0 on every rank.
    NoPosition,
}

/// A setting of a plan.
#[derive(Clone, Copy, Debug)]
pub enum Setting {
    Seed,
    LearningRate,
    MaxNorm,
    Optimizer,
}

macro_rules! kinds {
    ($($kind:ident: $words:literal,)+) => {
        /// The kinds of mistakes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Kind { $($kind,)+ }

        impl Kind {
            /// All, as the table lists them.
            pub const ALL: &[Self] = &[$(Self::$kind,)+];

            /// What it is, in words.
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $words,)+ }
            }
        }
    };
}

kinds! {
    Drop: "a collective is left out",
    Unsent: "a collective of the user's own that claims its types and does not communicate",
    Twice: "a collective runs twice",
    OtherType: "a collective of another type",
    OtherAxis: "a collective over another axis",
    OtherDim: "a collective along another dim",
    Superfluous: "one collective too many",
    Order: "a collective after the next operation",
    Placement: "a parameter is placed in another way",
    Constant: "a constant that is not what its type says",
    Input: "inputs or targets that are not what their type says",
    Extent: "an extent that is not that of the value",
    Shard: "an extent that is counted on a shard where that of the whole is meant",
    Degree: "a parameter whose extents depend on the degree",
    Dropout: "two dropouts of one name",
    UserOp: "a user's operation with a wrong result or gradient",
    Terms: "terms of the loss are miscounted",
    LossScale: "a loss that is divided by the samples of its micro-batch",
    Batch: "another batch on one rank",
    Same: "the same samples on every rank",
    Plan: "another plan on one rank",
    Weight: "other weights or optimizer states, loaded on one rank",
    Loop: "a loop that forgets what a trainer does",
    Mixing: "tokens that a decoder's model mixes without a cache",
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.kind.name(), self.change)?;
        self.on.map_or(Ok(()), |rank| write!(f, " on rank {rank}"))
    }
}

impl Mutant {
    /// The program with the mistake.
    pub fn program(&self, program: &Program) -> Program {
        let mut program = program.clone();
        match &self.change {
            Change::Instr { block, place, op } => program.blocks[*block].code[*place].op = op.clone(),
            Change::Behind { block, place, op } => program.blocks[*block].insert_behind(*place, op.clone()),
            Change::Swapped { block, place } => {
                let code = &mut program.blocks[*block].code;
                let first = code[*place].op.clone();
                code[*place].op = std::mem::replace(&mut code[place + 1].op, first);
            }
            Change::Param { block, param, to } => program.blocks[*block].params[*param] = to.clone(),
            Change::Wider { block, dims, axis } => {
                dims.iter().for_each(|&(param, dim)| program.blocks[*block].params[param].wider = Some((*axis, dim)));
            }
            Change::Terms(terms) => program.terms = *terms,
            Change::Batch | Change::FirstSamples | Change::Plan(_) | Change::Weight { .. } | Change::Loop(_) => {}
        }
        program
    }

    /// The plan with the mistake.
    pub fn plan(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        match self.change {
            Change::Plan(Setting::Seed) => plan.seed += 1,
            Change::Plan(Setting::LearningRate) => plan.lr.base *= 2.0,
            Change::Plan(Setting::MaxNorm) => plan.max_norm += 0.125,
            Change::Plan(Setting::Optimizer) => plan.optimizer = meshwork_optim::AdamW::default().into(),
            _ => {}
        }
        plan
    }
}

/// `count` random mutants of a case: every site as likely as every other, or every kind that it can have.
pub fn mutants(rng: &mut Rng, case: &Case, count: usize, by_kind: bool) -> Vec<Mutant> {
    let mut all = sites(case);
    rng.shuffle(&mut all);
    let mut seen = BTreeMap::new();
    if by_kind {
        all.sort_by_cached_key(|mutant| (turn(&mut seen, mutant.kind), rng.next_u64()));
    }
    all.truncate(count);
    // Mistakes in the program are made on all ranks, or now and then on one.
    let ranks = case.plan.mesh.world_size();
    let some = |mut mutant: Mutant| {
        let of_one = match mutant.change {
            Change::Batch | Change::Plan(_) | Change::Weight { .. } => true,
            Change::Loop(Careless::OwnSeed | Careless::OwnRate) => true,
            Change::FirstSamples | Change::Loop(_) => false,
            _ => rng.below(6) == 0,
        };
        mutant.on = of_one.then(|| rng.below(ranks));
        mutant
    };
    all.into_iter().map(some).collect()
}

/// How many of its kind came before it.
fn turn(seen: &mut BTreeMap<Kind, usize>, kind: Kind) -> usize {
    let count = seen.entry(kind).or_default();
    *count += 1;
    *count - 1
}

/// Every mistake of this list that the case can have.
fn sites(case: &Case) -> Vec<Mutant> {
    let (program, unit) = (&case.program, generate::unit(&case.plan.mesh, case.plan.blocks()));
    let mut all = Vec::new();
    let mut add = |kind, change| all.push(Mutant { kind, change, on: None });
    let dropouts: Vec<&String> = program
        .sites()
        .filter_map(|(block, place)| match &program.blocks[block].code[place].op {
            Op::Dropout { name, .. } => Some(name),
            _ => None,
        })
        .collect();
    for (block, place) in program.sites() {
        let instr = &program.blocks[block].code[place];
        let op = &instr.op;
        let other = |op: Op| Change::Instr { block, place, op };
        let behind = |op: Op| Change::Behind { block, place, op };
        if let Op::Attention { .. } | Op::GroupedAttention { .. } | Op::Softmax | Op::Map(_) | Op::Bias { .. } = op {
            add(Kind::Shard, behind(Op::PerExtent { dim: 2 }));
            if case.way == Way::Decoder {
                add(Kind::Mixing, behind(Op::TokenShift));
            }
        }
        if op.collective().is_some() {
            add(Kind::Drop, other(Op::Same));
            add(Kind::Unsent, other(Op::Unsent(Box::new(op.clone()))));
            add(Kind::Twice, behind(op.clone()));
            other_types(op).into_iter().for_each(|op| add(Kind::OtherType, other(op)));
            other_axes(op).into_iter().for_each(|op| add(Kind::OtherAxis, other(op)));
            other_dims(op).into_iter().for_each(|op| add(Kind::OtherDim, other(op)));
            if follows_alone(&program.blocks[block], place) {
                add(Kind::Order, Change::Swapped { block, place });
            }
        }
        match op {
            Op::Linear { .. } | Op::LinearBias { .. } | Op::Map(_) | Op::LayerNorm { .. } => {
                for op in [Op::AllReduce(Axis::Tp), Op::Copy(Axis::Tp), Op::AllReduce(Axis::Dp)] {
                    add(Kind::Superfluous, behind(op));
                }
            }
            Op::Constant { salt, dims, axis, holds, says } => {
                let constant =
                    |holds, says| other(Op::Constant { salt: *salt, dims: dims.clone(), axis: *axis, holds, says });
                add(Kind::Constant, constant(Holds::Own, *says));
                for lie in [Ty::Invariant, Ty::Replicate, Ty::Partial, Ty::Varying, Ty::Shard(0), Ty::Shard(1)] {
                    if lie != *says {
                        add(Kind::Constant, constant(*holds, lie));
                    }
                }
                add(Kind::Constant, constant(Holds::Part, *says));
                if let Holds::Slice(dim) = *holds {
                    add(Kind::Constant, constant(Holds::First(dim), *says));
                }
            }
            Op::SplitDim { dim: 2, .. } => {
                add(Kind::Shard, other(Op::SplitInto { dim: 2, count: unit }));
            }
            Op::VocabEmbedding { table, axis, vocab } => {
                for vocab in [vocab - 1, vocab + 1, 2 * vocab] {
                    add(Kind::Extent, other(Op::VocabEmbedding { table: *table, axis: *axis, vocab }));
                }
            }
            Op::VocabCrossEntropy { axis, vocab } => {
                for vocab in [vocab - 1, vocab + 1, 2 * vocab] {
                    add(Kind::Extent, other(Op::VocabCrossEntropy { axis: *axis, vocab }));
                }
                add(Kind::LossScale, behind(Op::PerExtent { dim: 0 }));
            }
            Op::CrossEntropy | Op::SquaredError => add(Kind::LossScale, behind(Op::PerExtent { dim: 0 })),
            Op::Targets => {
                for says in [Ty::Invariant, Ty::Replicate] {
                    add(Kind::Input, behind(Op::Retyped { axis: Axis::Dp, says }));
                }
                add(Kind::Input, behind(Op::Retyped { axis: Axis::Tp, says: Ty::Varying }));
            }
            Op::Dropout { p, name } if case.way != Way::Decoder => {
                let others = dropouts.iter().filter(|other| **other != name).take(2);
                others.for_each(|other_name| {
                    add(Kind::Dropout, other(Op::Dropout { p: *p, name: (*other_name).clone() }));
                });
            }
            Op::User(_) => {
                for lie in LIES {
                    add(Kind::UserOp, other(Op::User(lie)));
                }
            }
            _ => {}
        }
    }
    for (block, it) in program.blocks.iter().enumerate() {
        for (param, declared) in it.params.iter().enumerate().filter(|(param, _)| it.reads(*param)) {
            other_placements(declared).into_iter().for_each(|to| {
                add(Kind::Placement, Change::Param { block, param, to });
            });
            if declared.padded {
                let mut to = declared.clone();
                to.dims[0] += 1;
                add(Kind::Extent, Change::Param { block, param, to });
            }
            if has_replicas(declared, case) && matches!(case.way, Way::Trainer { .. }) {
                for state in [false, true] {
                    add(Kind::Weight, Change::Weight { name: declared.name.clone(), state });
                }
            }
        }
        for (dims, axis) in hidden(program, it) {
            add(Kind::Degree, Change::Wider { block, dims, axis });
        }
    }
    let distinct = case.plan.samples == Samples::Distinct;
    if case.plan.mesh.degree(Axis::Dp) > 1 && distinct && case.way != Way::Decoder {
        add(Kind::Same, Change::FirstSamples);
    }
    if case.way == Way::Decoder {
        return all;
    }
    if case.way == Way::Loop {
        let has =
            |wanted: fn(&Op) -> bool| program.blocks.iter().flat_map(|it| &it.code).any(|instr| wanted(&instr.op));
        let careless = [
            (Careless::LeavesNotes, has(|op| *op == Op::Penalty)),
            (Careless::KeepsGradients, true),
            (Careless::OwnSeed, true),
            (Careless::OwnRate, true),
            (Careless::OwnTerms, true),
            (Careless::NoPosition, has(|op| matches!(op, Op::Dropout { .. }))),
        ];
        for (careless, _) in careless.into_iter().filter(|(_, possible)| *possible) {
            add(Kind::Loop, Change::Loop(careless));
        }
    }
    // On a mesh with only dp no rank shares its samples, and nothing says which are right.
    if case.plan.mesh.world_size() > case.plan.mesh.degree(Axis::Dp) {
        add(Kind::Batch, Change::Batch);
    }
    // A loop counts by itself: it says a number, of the rank or of the batch.
    if case.way == Way::Loop {
        return all;
    }
    for terms in [Terms::Twice, Terms::One, Terms::Half] {
        add(Kind::Terms, Change::Terms(terms));
    }
    for setting in [Setting::Seed, Setting::LearningRate, Setting::MaxNorm, Setting::Optimizer] {
        add(Kind::Plan, Change::Plan(setting));
    }
    all
}

/// The lies of an operation of the user's own.
pub const LIES: [Lie; 6] =
    [Lie::ForwardByRank, Lie::GradientByRank, Lie::Gradient, Lie::NoGradient, Lie::Degree, Lie::Mixes];

/// Hidden features that a fused layer makes and only the next layer reads: the parameters and dims that have their
/// extent, and the axis that cuts it.
fn hidden(program: &Program, block: &Block) -> Vec<(Vec<(usize, usize)>, Axis)> {
    let pairs = block.code.iter().zip(block.code.iter().skip(1));
    let of_pair = |(first, second): (&Instr, &Instr)| {
        let (weight, bias) = match first.op {
            Op::LinearGelu { weight, bias } => (weight, bias),
            Op::LinearSwiglu { weight } => (weight, None),
            _ => return None,
        };
        let Op::Linear { weight: down, contract: 1 } = second.op else { return None };
        let params = [Some(weight), bias, Some(down)].into_iter().flatten();
        let once = |&param: &usize| {
            let uses = block.code.iter().filter(|instr| instr.op.params().contains(&param)).count();
            let of_name = |other: &&Param| other.name == block.params[param].name;
            uses == 1 && program.blocks.iter().flat_map(|block| &block.params).filter(of_name).count() == 1
        };
        let dims: Vec<_> = params.filter(once).map(|param| (param, usize::from(param == down))).collect();
        let (axis, _) = block.params[down].cut?;
        (dims.len() == 2 + usize::from(bias.is_some())).then_some((dims, axis))
    };
    pairs.filter_map(of_pair).collect()
}

fn other_types(op: &Op) -> Vec<Op> {
    let all = |axis: Axis, dim: usize| {
        [
            Op::Copy(axis),
            Op::AllReduce(axis),
            Op::AllReduceReplicate(axis),
            Op::AllGather(axis, dim),
            Op::AllGatherInvariant(axis, dim),
            Op::ReduceScatter(axis, dim),
            Op::Split(axis, dim),
            Op::Slice(axis, dim),
        ]
    };
    let dim = match *op {
        Op::AllGather(_, dim)
        | Op::AllGatherInvariant(_, dim)
        | Op::ReduceScatter(_, dim)
        | Op::Split(_, dim)
        | Op::Slice(_, dim)
        | Op::AllToAll(_, dim, _) => dim,
        _ => 1,
    };
    op.collective().map_or(Vec::new(), |axis| all(axis, dim).into_iter().filter(|other| other != op).collect())
}

fn other_axes(op: &Op) -> Vec<Op> {
    let others = [Axis::Tp, Axis::Cp, Axis::Dp].into_iter().filter(|&axis| op.collective() != Some(axis));
    others.map(|axis| op.over(axis)).collect()
}

fn other_dims(op: &Op) -> Vec<Op> {
    let others = |dim: usize, make: &dyn Fn(usize) -> Op| (0..3).filter(|&other| other != dim).map(make).collect();
    match *op {
        Op::AllGather(axis, dim) => others(dim, &|dim| Op::AllGather(axis, dim)),
        Op::AllGatherInvariant(axis, dim) => others(dim, &|dim| Op::AllGatherInvariant(axis, dim)),
        Op::ReduceScatter(axis, dim) => others(dim, &|dim| Op::ReduceScatter(axis, dim)),
        Op::Split(axis, dim) => others(dim, &|dim| Op::Split(axis, dim)),
        Op::Slice(axis, dim) => others(dim, &|dim| Op::Slice(axis, dim)),
        Op::AllToAll(axis, from, to) => vec![Op::AllToAll(axis, to, from)],
        _ => Vec::new(),
    }
}

/// Whether the next instruction reads the result of this one, and nothing else does.
fn follows_alone(block: &Block, place: usize) -> bool {
    let result = place + 1;
    let Some(next) = block.code.get(place + 1) else { return false };
    next.args == [result] && !block.code[place + 2..].iter().any(|later| later.args.contains(&result))
}

fn other_placements(param: &Param) -> Vec<Param> {
    let with = |cut| Param { cut, ..param.clone() };
    match param.cut {
        None if param.group == Group::Usual => (0..param.dims.len()).map(|dim| with(Some((Axis::Tp, dim)))).collect(),
        None => Vec::new(),
        Some((axis, dim)) => {
            let dims = (0..param.dims.len()).filter(|&other| other != dim).map(|dim| with(Some((axis, dim))));
            let axes = [Axis::Tp, Axis::Cp, Axis::Dp].into_iter().filter(|&other| other != axis);
            std::iter::once(with(None)).chain(dims).chain(axes.map(|axis| with(Some((axis, dim))))).collect()
        }
    }
}

/// Whether more than one rank holds each element of a parameter.
fn has_replicas(param: &Param, case: &Case) -> bool {
    let whole = |axis: &Axis| param.cut.is_none_or(|(cut, _)| cut != *axis);
    [Axis::Dp, Axis::Tp, Axis::Cp].iter().any(|axis| whole(axis) && case.plan.mesh.degree(*axis) > 1)
}
