//! A program held against itself on one rank. A number that a model takes from the shape of a value on its rank may be
//! only a part of the number that it means: `[b, features]` that tp cuts, viewed as 2 heads, has 2 heads on each rank.
//! Types cannot show it, and all ranks agree. On one rank the same code has 2 heads in all.
//!
//! Two passes on the meta device, over this mesh and over the same axes with degree 1, list all operations; operations
//! that [correspond](crate::program::Pairs) must agree:
//!
//! | of | compared |
//! |---|---|
//! | a parameter | name, extents, role, initial values, group |
//! | the activation at a cut | extents over all ranks |
//! | an operation | extents of its result over all ranks; [numbers](meshwork_tensor::tape::Op::scalars) that it computes with |
//! | a constant that is cut over ranks | elements: the slice of the elements on one rank |
//! | an auxiliary loss | its coefficient |
//!
//! One rank has the samples that the micro-batches of all data-parallel ranks have together. Values that vary over an
//! axis, and their sums, are each rank's own, and are not compared; nor are constants of samples, or drawn anew each
//! time, and layers that run other operations on one rank, or a model that refuses to run there.

use crate::Verify;
use crate::prelude::*;
use crate::program::{Constant, Op, Pairs, Value, whole_extents};
use crate::trace::Whole;
use meshwork_core::Coords;
use meshwork_tensor::tape::Mode;
use meshwork_tensor::unravel;

/// Refuses a model that is another one on one rank, as a [`Trainer`](crate::Trainer) does: for a loop of your own over
/// the stages of a model. Nothing is communicated; each rank of the plan's mesh finds the differences of its own
/// program.
///
/// # Errors
/// [`TrainError::OneRank`]; a plan that does not fit the model; a program that is wrongly distributed.
pub fn require_same(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize) -> Result<()> {
    let stages = ModelPlan::new(model.clone(), plan)?;
    let micro = Batch::blank(&model.fields(), plan.micro_batch_size()?);
    compare(&stages, world_rank, &micro, Mode::Train, plan.verify)
}

/// The same with stages that are cut, on micro-batches like `micro`.
pub(crate) fn compare(plan: &ModelPlan, world_rank: usize, micro: &Batch, mode: Mode, verify: Verify) -> Result<()> {
    let here = Whole::new(plan, plan.whole_model()?, world_rank, micro, mode)?;
    require_used(&here, plan.mesh())?;
    if plan.mesh().world_size() == 1 || verify == Verify::Off {
        return Ok(());
    }
    let alone = plan.on_one_rank()?;
    let Ok(model) = alone.whole_model() else { return Ok(()) };
    let refuse = |differs: Option<Differs>| match differs {
        None => Ok(()),
        Some(Differs { what, here, alone, valid }) => {
            Err(TrainError::OneRank { what, mesh: plan.mesh().to_string(), here, alone, valid })
        }
    };
    refuse(of_parameters(here.declarations.specs(), model.declarations.specs()))?;
    let batch = Batch::blank(&plan.model().fields(), micro.samples() * plan.mesh().data_degree());
    let Ok(alone) = Whole::new(&alone, model, 0, &batch, mode) else { return Ok(()) };
    let pairs = Pairs::new([&here.program, &alone.program]);
    refuse(of_activations(&here, &alone).or_else(|| of_operations(&pairs)).or_else(|| of_notes(&here, &alone)))?;
    // On all ranks or on none: a pass may draw numbers that ranks must have alike.
    if !here.program.constants.iter().any(|constant| is_cut(plan.mesh(), constant)) {
        return Ok(());
    }
    let again = Whole::new(plan, plan.whole_model()?, world_rank, micro, mode)?;
    let same = |(a, b): (&Constant, &Constant)| bytes(a) == bytes(b);
    match here.program.constants.iter().zip(&again.program.constants).all(same) {
        true => refuse(of_constants(&pairs, plan.mesh().coords(world_rank))),
        // Drawn anew each time.
        false => Ok(()),
    }
}

/// Refuses ranks of context parallelism over which nothing is cut: no parameter, no value, and no gradient.
fn require_used(here: &Whole, mesh: &Mesh) -> Result<(), PlanError> {
    let used = |axis: Axis| {
        let cuts = |types: Types| !matches!(types.get(axis), None | Some(Ty::Invariant | Ty::Replicate));
        let specs = here.declarations.specs();
        let params = specs.iter().any(|spec| spec.placement.shards().iter().any(|cut| cut.0 == axis));
        params || here.program.ops.iter().flat_map(|op| &op.values).any(|value| cuts(value.types))
    };
    match Axis::CONTEXT.into_iter().all(|axis| mesh.degree(axis) == 1 || used(axis)) {
        true => Ok(()),
        false => Err(PlanError::UnusedAxis { axis: Axis::Cp, degree: mesh.context_degree() }),
    }
}

/// A difference: its subject, with its extents or numbers on the mesh and on one rank.
struct Differs {
    what: String,
    here: String,
    alone: String,
    valid: &'static str,
}

const EXTENTS: &str = "an extent that this rank has stands for one over all ranks, or one over all ranks for this rank's; count what is cut \
                       from the shape of the value, or divide the extent over all ranks by the degree of the axis";

fn of_parameters(here: &[ParamSpec], alone: &[ParamSpec]) -> Option<Differs> {
    let find = |specs: &[ParamSpec], name: &str| specs.iter().position(|spec| spec.name == name);
    let differs = |name: &str, here: String, alone: String| Differs {
        what: format!("parameter {name}"),
        here,
        alone,
        valid: "declare the whole parameter, the same on every mesh: its placement cuts it",
    };
    for spec in here {
        let Some(other) = find(alone, &spec.name).map(|at| &alone[at]) else {
            return Some(differs(&spec.name, "is declared".to_owned(), "is not".to_owned()));
        };
        if spec.dims != other.dims {
            return Some(differs(&spec.name, format!("has extents {:?}", spec.dims), format!("{:?}", other.dims)));
        }
        let rest = |spec: &ParamSpec| format!("{:?}, {:?}, {:?}", spec.role, spec.init, spec.group);
        if rest(spec) != rest(other) {
            return Some(differs(&spec.name, format!("is {}", rest(spec)), rest(other)));
        }
    }
    let missing = alone.iter().find(|spec| find(here, &spec.name).is_none())?;
    Some(differs(&missing.name, "is not declared".to_owned(), "is".to_owned()))
}

fn of_activations(here: &Whole, alone: &Whole) -> Option<Differs> {
    let pairs = here.activations.iter().zip(&alone.activations).enumerate();
    let extents = |of: &Whole, activation: &meshwork_nn::Activation| {
        whole_extents(&of.program.mesh, activation.types, &activation.shape)
    };
    pairs.map(|(stage, (a, b))| (stage, extents(here, a), extents(alone, b))).find(|(_, a, b)| a != b).map(
        |(stage, a, b)| Differs {
            what: format!("the activation that stage {stage} sends"),
            here: format!("has extents {a:?} over all ranks"),
            alone: format!("{b:?}"),
            valid: EXTENTS,
        },
    )
}

fn of_operations(pairs: &Pairs<'_>) -> Option<Differs> {
    let [here, alone] = pairs.programs;
    let (mesh, one) = (&here.mesh, &alone.mesh);
    let cuts = |axis: &Axis| mesh.degree(*axis) > 1;
    let varies = |value: &Value| value.types.iter().any(|(axis, ty)| cuts(&axis) && ty == Ty::Varying);
    // Of each operation on the mesh: whether its result is each rank's own, or a sum of such.
    let mut own: Vec<bool> = Vec::new();
    for op in &here.ops {
        let partial = |value: &Value| value.types.partial_axes().any(|axis| cuts(&axis));
        let of_own = op.makers.iter().flatten().any(|&maker| own.get(maker).copied().unwrap_or(false));
        let shares = of_own || op.name == "as_partial";
        own.push(op.values.iter().any(|value| varies(value) || shares && partial(value)));
    }
    for &pair in &pairs.order {
        let [Some(a), Some(b)] = pair else { continue };
        let ops = [&here.ops[a], &alone.ops[b]];
        let [[value], [other]] = ops.map(|op| &op.values[..]) else { continue };
        if own[a] || varies(other) {
            continue;
        }
        let what = |what: &str| {
            let Op { name, layer, stage, number, .. } = ops[0];
            format!("{what} {name} ({layer}; operation {number} of stage {stage})")
        };
        let extents = [value.extents(mesh), other.extents(one)];
        if extents[0] != extents[1] {
            return Some(Differs {
                what: what("the result of"),
                here: format!("has extents {:?} over all ranks{}", extents[0], on_this_rank(mesh, value)),
                alone: format!("{:?}", extents[1]),
                valid: EXTENTS,
            });
        }
        let mut numbers = ops[0].scalars.iter().zip(&ops[1].scalars);
        if let Some((a, b)) = numbers.find(|(a, b)| a.0 == b.0 && a.1.to_bits() != b.1.to_bits()) {
            return Some(Differs {
                what: what(&format!("{} of", a.0)),
                here: format!("is {}", a.1),
                alone: b.1.to_string(),
                valid: "compute it from extents over all ranks, not from this rank's, and not from the mesh or the rank",
            });
        }
    }
    None
}

fn on_this_rank(mesh: &Mesh, value: &Value) -> String {
    let cut = value.types.iter().filter(|&(axis, ty)| mesh.degree(axis) > 1 && matches!(ty, Ty::Shard(_)));
    let cut: Vec<String> = cut.map(|(axis, ty)| format!("{ty} on {axis}")).collect();
    if cut.is_empty() { String::new() } else { format!(" ({:?} on this one, {})", value.shape, cut.join(", ")) }
}

fn bytes(constant: &Constant) -> Option<&[u8]> {
    constant.values.as_ref()?.as_bytes().ok()
}

/// Whether ranks hold slices of a constant that has a place on all ranks, and no samples.
fn is_cut(mesh: &Mesh, constant: &Constant) -> bool {
    let own = |(axis, ty): (Axis, Ty)| match ty {
        Ty::Shard(_) => axis.is_data(),
        Ty::Varying | Ty::Partial => true,
        Ty::Replicate | Ty::Invariant => false,
    };
    let cut = || constant.types.iter().filter(|&(axis, _)| mesh.degree(axis) > 1);
    bytes(constant).is_some() && !cut().any(own) && cut().any(|(_, ty)| matches!(ty, Ty::Shard(_)))
}

fn of_constants(pairs: &Pairs<'_>, coords: Coords) -> Option<Differs> {
    let programs = pairs.programs;
    let before = |side: usize, op: usize| {
        let (program, op) = (programs[side], &programs[side].ops[op]);
        let of_op = |constant: &&Constant| (constant.stage, constant.before) == (op.stage, op.number);
        program.constants.iter().filter(of_op).collect::<Vec<_>>()
    };
    for &pair in &pairs.order {
        let [Some(a), Some(b)] = pair else { continue };
        let constants = [before(0, a), before(1, b)];
        if constants[0].len() != constants[1].len() {
            continue;
        }
        for (constant, whole) in constants[0].iter().zip(&constants[1]) {
            let Some((at, [held, meant])) = first_other(constant, whole, &programs[0].mesh, coords) else { continue };
            return Some(Differs {
                what: format!("a constant of {:?} before {}", constant.shape, programs[0].ops[a].describe()),
                here: format!("has {held} at {at:?} of this rank's elements"),
                alone: meant,
                valid: "make it of places over all ranks: those of this rank begin behind those of the ranks before it",
            });
        }
    }
    None
}

/// The first element of a constant that differs from its slice of the constant on one rank.
fn first_other(
    constant: &Constant,
    whole: &Constant,
    mesh: &Mesh,
    coords: Coords,
) -> Option<(Vec<usize>, [String; 2])> {
    let cut: Vec<_> = constant.types.iter().filter(|&(axis, _)| mesh.degree(axis) > 1).collect();
    let (values, held, meant) = (constant.values.as_ref()?, bytes(constant)?, bytes(whole)?);
    let shape = whole_extents(mesh, constant.types, &constant.shape);
    if !is_cut(mesh, constant) || *shape != *whole.shape || constant.shape.count() == 0 {
        return None;
    }
    // Where this rank's slice begins: of the cuts of a dim, the slowest axis is outermost.
    let (mut start, mut extents) = (vec![0; shape.len()], shape.clone());
    for (dim, axis) in cut.iter().rev().filter_map(|(axis, ty)| ty.dim().map(|dim| (dim, *axis))) {
        extents[dim] /= mesh.degree(axis);
        start[dim] += coords.get(axis) * extents[dim];
    }
    let (size, run) = (values.dtype().size(), constant.shape.last().copied().unwrap_or(1));
    (0..values.count()).step_by(run).find_map(|first| {
        let index = unravel(first, &constant.shape);
        let there = (0..shape.len()).fold(0, |there, dim| there * shape[dim] + start[dim] + index[dim]);
        let runs = [(held, first), (meant, there)].map(|(bytes, at)| &bytes[at * size..(at + run) * size]);
        let at =
            (runs[0] != runs[1]).then(|| (0..run * size).position(|at| runs[0][at] != runs[1][at])).flatten()? / size;
        let elements = runs.map(|run| number(values.dtype(), &run[at * size..(at + 1) * size]));
        Some((unravel(first + at, &constant.shape), elements))
    })
}

fn number(dtype: DType, element: &[u8]) -> String {
    match (dtype, element.try_into()) {
        (DType::F32, Ok(bytes)) => f32::from_ne_bytes(bytes).to_string(),
        (DType::I32, Ok(bytes)) => i32::from_ne_bytes(bytes).to_string(),
        _ => format!("the {dtype} {element:x?}"),
    }
}

fn of_notes(here: &Whole, alone: &Whole) -> Option<Differs> {
    let names = |of: &Whole| of.noted.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    if names(here) != names(alone) {
        return None;
    }
    let mut pairs = here.noted.iter().zip(&alone.noted);
    let ((name, a), (_, b)) = pairs.find(|((_, a), (_, b))| a.map(f64::to_bits) != b.map(f64::to_bits))?;
    let text = |coefficient: &Option<f64>| coefficient.map_or("none".to_owned(), |number| number.to_string());
    Some(Differs {
        what: format!("the coefficient of the auxiliary loss {name}"),
        here: format!("is {}", text(a)),
        alone: text(b),
        valid: "compute it from extents over all ranks, not from this rank's, and not from the mesh or the rank",
    })
}
