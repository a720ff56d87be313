//! A program that counts on one rank what is meant over all of them is refused when its trainer or decoder is made; the
//! right one beside it trains.
//!
//! More than 400 lines: each wrong program stands beside the right one.

use meshwork_core::{Axis, DType, Mesh, Rank, Ty, Types, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{Decoder, Plan, ScheduleSpec, Trainer, Verify, one_rank};
use meshwork_nn::model::{Metric, Per};
use meshwork_nn::{Batch, Field, Model, Stage, StageSpec, sample_types};
use meshwork_optim::Sgd;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Declarations, Init, ParamId, ParamSpec, Placement, Result, Role, Shape, Tape, Tensor, Var};
use std::cell::Cell;
use std::sync::Arc;

const SEQ: usize = 6;
const WIDTH: usize = 4;
const BATCH: usize = 4;
const LAYERS: usize = 2;

/// What a layer counts, on one rank or over all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    /// Everything as it is meant.
    Right,
    /// The heads of this rank's features.
    Heads,
    /// The same on tp rank 1 alone.
    HeadsOfRank1,
    /// The features of a head, in the factor of its scores.
    Factor,
    /// The features that ranks store, padding with them, in that factor.
    Stored,
    /// The same in a function of the host.
    Function,
    /// A mean over features that are cut over ranks.
    Mean,
    /// The samples of its micro-batch.
    Samples,
    /// A parameter with as many rows as ranks, or more.
    Rows,
    /// A table whose rows are rounded up to a multiple of the degree.
    Table,
    /// The inputs of a feature, in the scale of the initial weights.
    Initial,
    /// The experts of this rank.
    Experts,
    /// A parameter for each rank.
    Names,
    /// The weight of an auxiliary loss.
    Auxiliary,
    /// The epsilon of a norm.
    Epsilon,
    /// The name of a dropout.
    Dropout,
    /// The extent of what a stage sends, and receives.
    Activation,
    /// The numbers of the heads of this rank, in a constant.
    Places,
    // Right, though they do not look so.
    /// Those numbers over all ranks.
    PlacesOfAll,
    /// A constant that is drawn anew each time.
    Drawn,
    /// Features that the degree does not divide.
    Padded,
    /// A mean over the ranks of values of their own.
    OfRanks,
    /// A short cut that one rank takes.
    ShortCut,
    /// A loop over the heads of this rank.
    Loop,
    /// A model that does not run on one rank.
    NeverAlone,
}

use Counts::*;

/// Layers `x + W₂ tanh(heads(W₁ x))`, over tp as in Megatron, with the inner features in heads.
#[derive(Clone, Copy, Debug)]
struct Layers {
    counts: Counts,
    /// The layer in which that is counted.
    at: usize,
    inner: usize,
    heads: usize,
}

impl Layers {
    fn new(counts: Counts) -> Self {
        let inner = if matches!(counts, Padded | Stored) { 10 } else { 144 };
        Self { counts, at: 0, inner, heads: 12 }
    }
}

#[derive(Debug)]
struct Part {
    of: Layers,
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    number: usize,
    counts: Counts,
    up: ParamId,
    down: ParamId,
    gamma: ParamId,
    extra: Option<ParamId>,
}

impl Model for Layers {
    fn num_layers(&self) -> usize {
        LAYERS
    }

    fn fields(&self) -> Vec<Field> {
        ["x", "y"].map(|name| Field::new(name, DType::F32, [SEQ, WIDTH])).to_vec()
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let tp = mesh.degree(Axis::Tp);
        let whole = Placement::replicated;
        let layer = |number: usize| {
            let counts = if number == self.at { self.counts } else { Right };
            let name = |part: &str| format!("layer.{number}.{part}");
            let fan_in = if counts == Initial { self.inner / tp } else { self.inner };
            let init = Init::Normal { std: 1.0 / (fan_in as f32).sqrt() };
            let (up, down) = (whole().shard(Axis::Tp, 0), whole().shard(Axis::Tp, 1));
            let extra = match counts {
                Rows => Some(("scales".to_owned(), vec![tp, WIDTH], whole())),
                Table => Some(("table".to_owned(), vec![7usize.next_multiple_of(tp), WIDTH], whole())),
                Names if tp > 1 => Some((format!("of_{tp}_ranks"), vec![1, WIDTH], whole())),
                Experts => Some(("experts".to_owned(), vec![4 / mesh.degree(Axis::Ep), WIDTH], whole())),
                Right => Some(("table".to_owned(), vec![7, WIDTH], whole())),
                _ => None,
            };
            let mut declare = |part: &str, dims: &[usize], placement, role, init| {
                params.declare(name(part), dims, placement, role, init)
            };
            Ok(Layer {
                number,
                counts,
                up: declare("up", &[self.inner, WIDTH], up, Role::Weight, init)?,
                down: declare("down", &[WIDTH, self.inner], down, Role::Weight, init)?,
                gamma: declare("gamma", &[WIDTH], whole(), Role::Norm, Init::Ones)?,
                extra: extra
                    .map(|(part, dims, placement)| declare(&part, &dims, placement, Role::Weight, init))
                    .transpose()?,
            })
        };
        if self.counts == NeverAlone && tp == 1 {
            return Err(meshwork_tensor::Error::Declaration {
                name: "layer".to_owned(),
                problem: "it has two halves".to_owned(),
                valid: "tp=2".to_owned(),
            });
        }
        let layers = part.layers.clone().map(layer).collect::<Result<_>>()?;
        Ok(Box::new(Part { of: *self, layers }))
    }

    fn activation(&self, mesh: &Mesh, _: usize, batch: &Batch) -> Result<meshwork_nn::model::Activation> {
        let shape = match self.counts {
            Activation => [batch.samples(), SEQ * mesh.degree(Axis::Tp), WIDTH],
            _ => [batch.samples(), SEQ, WIDTH],
        };
        Ok(meshwork_nn::model::Activation { dtype: DType::F32, shape: Shape::new(&shape), types: sample_types(mesh) })
    }

    fn metrics(&self) -> Vec<Metric> {
        vec![Metric { name: "size", per: Per::Sample }]
    }
}

/// The types of what every sample meets alike.
fn of_all_samples(mesh: &Mesh) -> Types {
    let alike = |types: Types, axis| types.with(axis, Ty::Replicate);
    Axis::DATA.into_iter().filter(|&axis| mesh.has(axis)).fold(sample_types(mesh), alike)
}

thread_local! {
    /// Draws of a rank.
    static DRAWN: Cell<usize> = const { Cell::new(0) };
}

impl Part {
    fn layer(&self, tape: &Tape, layer: &Layer, x: &Var) -> Result<Var> {
        let (mesh, counts, heads) = (tape.rank().mesh(), layer.counts, self.of.heads);
        let tp = mesh.degree(Axis::Tp);
        let n = x.shape()[0];
        let flat = !self.of.inner.is_multiple_of(heads); // no heads
        let eps = if counts == Epsilon { 1e-5 / tp as f64 } else { 1e-5 };
        let mut read = x.layer_norm(&tape.param(layer.gamma)?, None, eps)?; // [n, s, h]
        if counts == ShortCut && tp == 1 {
            read = read.reshape(&[n, SEQ * WIDTH])?.tanh()?.reshape(&[n, SEQ, WIDTH])?;
        }
        if let Some(extra) = layer.extra {
            let scores = read.linear(&tape.param(extra)?, 1)?; // [n, s, rows]
            tape.add_loss("size", 0.25, &size(tape, &scores.mean(2)?)?)?;
        }
        let inner = read.copy(Axis::Tp)?.linear(&tape.param(layer.up)?, 1)?; // [n, s, f/tp]
        let features = inner.shape()[2];
        let held = match counts {
            Heads => heads,
            HeadsOfRank1 if tape.rank().coords().get(Axis::Tp) == 1 => heads,
            _ if flat => 1,
            _ => heads / tp,
        };
        let width = features / held; // of a head
        let scored = if flat { inner } else { inner.reshape(&[n, SEQ, held, width])? };
        let mut scored = match counts {
            Factor => scored.scale(1.0 / (features as f64).sqrt())?,
            Function => {
                let by = features as f64;
                scored.map("scores", move |x| x / by, move |_, _| 1.0 / by)?
            }
            Samples => scored.scale(1.0 / n as f64)?,
            Stored => scored.scale(1.0 / (features * tp) as f64)?,
            _ => scored.scale(1.0 / self.of.inner as f64)?,
        };
        if let Places | PlacesOfAll | Drawn = counts {
            let first = match counts {
                PlacesOfAll => tape.rank().coords().get(Axis::Tp) * held,
                Drawn => DRAWN.replace(DRAWN.get() + 1),
                _ => 0,
            };
            let slopes: Vec<f32> = (0..held * width).map(|at| 1.0 / (1 + first + at / width) as f32).collect();
            let types = of_all_samples(mesh).with(Axis::Tp, Ty::Shard(0));
            let slopes = tape.constant(Tensor::from_slice(tape.device(), &slopes, [held, width])?, types);
            scored = scored.mul(&slopes)?;
        }
        scored = match counts {
            _ if flat => scored,
            Dropout => scored.dropout(0.25, &format!("mask of {tp}"))?,
            _ => scored.dropout(0.25, &format!("mask {}", layer.number))?,
        };
        let mixed = match counts {
            // As many operations as heads, of which all but the first change nothing.
            Loop => (0..held).try_fold(scored, |x, _| x.relu())?.softmax()?,
            _ if flat => scored.tanh()?,
            _ => scored.softmax()?,
        };
        let mixed = if flat { mixed } else { mixed.reshape(&[n, SEQ, features])? };
        if counts == Mean {
            let mean = mixed.sum(2)?.scale(1.0 / features as f64)?.all_reduce(Axis::Tp)?; // [n, s]
            tape.report("size", &size(tape, &mean)?)?;
        }
        if counts == OfRanks {
            let own = of_all_samples(mesh).with(Axis::Tp, Ty::Varying);
            let number =
                Tensor::from_slice(tape.device(), &[tape.rank().coords().get(Axis::Tp) as f32; WIDTH], [WIDTH])?;
            let mean = tape.constant(number, own).as_partial(Axis::Tp)?.scale(1.0 / tp as f64)?.all_reduce(Axis::Tp)?;
            read = read.mul(&mean)?;
        }
        let out = mixed.linear(&tape.param(layer.down)?, 1)?.all_reduce(Axis::Tp)?; // [n, s, h]
        if counts == Auxiliary {
            tape.add_loss("size", 0.5 / features as f64, &size(tape, &out)?)?;
        } else {
            tape.add_loss("size", 0.5 / self.of.inner as f64, &size(tape, &out)?)?;
        }
        read.add(&out)
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let mut x = match input {
            Some(input) => input.clone(),
            None => batch.var(tape, "x")?,
        };
        for layer in &self.layers {
            x = self.layer(tape, layer, &x)?;
        }
        Ok(x)
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        output.mean_squared_error(&batch.var(tape, "y")?)
    }
}

fn size(tape: &Tape, x: &Var) -> Result<Var> {
    x.mean_squared_error(&tape.constant(Tensor::zeros(tape.device(), DType::F32, x.shape())?, x.types()))
}

fn batch(samples: std::ops::Range<usize>) -> Batch {
    let field = |salt: usize| -> Vec<f32> {
        let elements = samples.start * SEQ * WIDTH..samples.end * SEQ * WIDTH;
        elements.map(|at| ((at * salt) % 17) as f32 / 8.0 - 1.0).collect()
    };
    let batch = Batch::new(samples.len()).with("x", [SEQ, WIDTH], field(5)).unwrap();
    batch.with("y", [SEQ, WIDTH], field(3)).unwrap()
}

fn plan(mesh: &str) -> Plan {
    let schedule = ScheduleSpec::named("gpipe").unwrap();
    let micros = Some(1);
    let optimizer = Sgd::default().into();
    Plan {
        mesh: mesh.parse().unwrap(),
        schedule,
        global_batch_size: BATCH,
        num_microbatches: micros,
        optimizer,
        max_norm: 0.0,
        ..Plan::default()
    }
}

/// The loss of two steps, or each rank's error.
fn trained(model: Layers, plan: &Plan) -> std::result::Result<Vec<f64>, String> {
    let model: Arc<dyn Model> = Arc::new(model);
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
        let mut step = || trainer.step(&batch(trainer.samples())).map(|report| report.loss);
        Ok::<_, meshwork_engine::TrainError>(vec![step()?, step()?])
    });
    ranks.map(|mut losses| losses.swap_remove(0)).map_err(|error| error.to_string())
}

fn refused(model: Layers, mesh: &str) -> String {
    trained(model, &plan(mesh)).expect_err(&format!("{model:?} on {mesh}"))
}

const MESHES: [&str; 6] = ["tp=2", "tp=4", "tp=3", "tp=2,pp=2", "dp=2,tp=2", "dp=2,ep=2,tp=2"];

/// Each program that counts wrongly, and what its error says on tp=2.
#[test]
fn what_is_counted_on_one_rank_is_refused() {
    let cut = [
        (Heads, "the result of reshape (after layer.0; operation"),
        (Factor, "factor of scale (after layer.0; operation"),
        (Function, "f(1) of scores (after layer.0; operation"),
        (Mean, "factor of scale (after layer.0; operation"),
        (
            Rows,
            "parameter layer.0.scales has extents [2, 4] on tp=2,dp=1,pp=1 and [1, 4] on one rank: declare the whole parameter",
        ),
        (Table, "parameter layer.0.table has extents [8, 4] on tp=2,dp=1,pp=1 and [7, 4] on one rank"),
        (Initial, "parameter layer.0.up is Weight, Normal { std: "),
        (Names, "parameter layer.0.of_2_ranks is declared on tp=2,dp=1,pp=1 and is not on one rank"),
        (Auxiliary, "the coefficient of the auxiliary loss size is "),
        (
            Epsilon,
            "eps of layer_norm (layer.0; operation 0 of stage 0) is 0.000005 on tp=2,dp=1,pp=1 and 0.00001 on one rank",
        ),
        (Places, "a constant of [6, 12] before mul (after layer.0)"),
        (Dropout, "key word 0 of dropout (after layer.0; operation"),
    ];
    for (counts, says) in cut {
        let error = refused(Layers::new(counts), "tp=2");
        assert!(error.contains(says), "{counts:?}: {error}");
        for mesh in MESHES {
            let error = refused(Layers::new(counts), mesh);
            assert!(error.contains(" on one rank: "), "{counts:?} on {mesh}: {error}");
        }
    }
}

/// The degree need not divide the features: what ranks store is not what there is.
#[test]
fn what_ranks_store_is_no_extent() {
    for mesh in ["tp=4", "tp=3", "tp=4,pp=2"] {
        let error = refused(Layers::new(Stored), mesh);
        assert!(error.contains("factor of scale (after layer.0; operation"), "{error}");
        assert!(error.contains("and 0.1 on one rank: compute it from extents over all ranks"), "{error}");
    }
    let one = trained(Layers::new(Padded), &plan("dp=1")).unwrap();
    for mesh in ["tp=4", "tp=3", "tp=2,dp=2", "tp=4,pp=2"] {
        assert_alike(&format!("padded on {mesh}"), &trained(Layers::new(Padded), &plan(mesh)).unwrap(), &one);
    }
}

fn assert_alike(what: &str, found: &[f64], wanted: &[f64]) {
    let close = found.iter().zip(wanted).all(|(found, wanted)| (found / wanted - 1.0).abs() < 1e-5);
    assert!(close, "{what}: {found:?} against {wanted:?}");
}

/// A fault of one stage ends every rank with its name.
#[test]
fn every_rank_names_a_fault_of_a_later_stage() {
    let model: Arc<dyn Model> = Arc::new(Layers { at: 1, ..Layers::new(Heads) });
    let plan = plan("tp=2,pp=2");
    for rank in 0..plan.mesh.world_size() {
        let alone = Arc::new(Rank::recording(&plan.mesh, rank).unwrap());
        let error = Trainer::new(model.clone(), &plan, alone, Cpu::device()).err().unwrap().to_string();
        assert_eq!(
            error,
            "the result of reshape (after layer.1; operation 3 of stage 1) has extents [4, 6, 24, 6] over all ranks ([4, 6, 12, 6] on \
             this one, Shard(2) on tp) on tp=2,dp=1,pp=2 and [4, 6, 12, 12] on one rank: an extent that this rank has stands for one over all \
             ranks, or one over all ranks for this rank's; count what is cut from the shape of the value, or divide the extent over all \
             ranks by the degree of the axis (a model that is meant to depend on its mesh is run with Verify::Off)"
        );
    }
}

#[test]
fn an_activation_counts_what_all_ranks_have() {
    for mesh in ["tp=2,pp=2", "dp=2,tp=2,pp=2"] {
        let error = refused(Layers::new(Activation), mesh);
        assert!(
            error.contains("the activation is f32 [") || error.contains("the activation that stage 0 sends"),
            "{error}"
        );
    }
}

#[test]
fn samples_and_experts_are_counted_over_the_ranks_that_share_them() {
    for mesh in ["dp=2", "dp=4", "dp=2,tp=2", "dp=2,pp=2", "dp=2,ep=2"] {
        let error = refused(Layers::new(Samples), mesh);
        assert!(error.contains("factor of scale (after layer.0; operation"), "{mesh}: {error}");
    }
    for mesh in ["dp=2,ep=2", "dp=4,ep=4", "dp=2,ep=2,tp=2"] {
        let error = refused(Layers::new(Experts), mesh);
        assert!(error.contains("parameter layer.0.experts has extents ["), "{mesh}: {error}");
    }
}

/// A stage whose code depends on its rank: the rank whose program is wrong names it, and the others hear of it.
#[test]
fn a_rank_names_what_it_alone_counts_wrongly() {
    let error = refused(Layers::new(HeadsOfRank1), "tp=2");
    assert!(error.contains("rank 1") && error.contains("the result of reshape (after layer.0; operation 3"), "{error}");
}

/// Programs that run other operations on other meshes, or have values of each rank's own, are no other programs.
#[test]
fn right_programs_are_trained() {
    for counts in [Right, Loop, PlacesOfAll, ShortCut, OfRanks] {
        let one = trained(Layers::new(counts), &plan("dp=1")).unwrap();
        for mesh in MESHES {
            let found = trained(Layers::new(counts), &plan(mesh)).unwrap_or_else(|error| panic!("{counts:?}: {error}"));
            // The others mean something else on each mesh.
            if matches!(counts, Right | Loop | PlacesOfAll) {
                assert_alike(&format!("{counts:?} on {mesh}"), &found, &one);
            }
        }
    }
    trained(Layers::new(NeverAlone), &plan("tp=2")).expect("nothing to compare with");
    // Each rank has all samples; and what is drawn anew each time has no place.
    for counts in [Samples, Drawn] {
        let (model, plan): (Arc<dyn Model>, _) = (Arc::new(Layers::new(counts)), plan("tp=2,pp=2"));
        for rank in 0..plan.mesh.world_size() {
            let alone = Arc::new(Rank::recording(&plan.mesh, rank).unwrap());
            one_rank::require_same(&model, &plan, rank).unwrap_or_else(|error| panic!("{counts:?}: {error}"));
            assert!(Trainer::new(model.clone(), &plan, alone, Cpu::device()).is_ok(), "{counts:?} on rank {rank}");
        }
    }
}

/// Without the comparison the loss is another one, and nobody says so.
#[test]
fn it_is_turned_off_with_verification() {
    let one = trained(Layers::new(Heads), &plan("dp=1")).unwrap();
    let off = Plan { verify: Verify::Off, ..plan("tp=2") };
    let found = trained(Layers::new(Heads), &off).unwrap();
    assert!((found[1] / one[1] - 1.0).abs() > 1e-3, "{found:?} against {one:?}");
}

#[test]
fn a_decoder_refuses_it_too() {
    let made = |counts, verify| {
        let (model, plan): (Arc<dyn Model>, _) = (Arc::new(Layers::new(counts)), Plan { verify, ..plan("tp=2") });
        let rank = Arc::new(Rank::recording(&plan.mesh, 1).unwrap());
        let zeros = |_: &ParamSpec, slice: &LocalSlice| Ok::<_, String>(vec![0.0; slice.stored.count()]);
        Decoder::new(model, &plan, rank, Cpu::device(), SEQ, zeros).map(drop).map_err(|error| error.to_string())
    };
    for counts in [Heads, Factor, Function, Rows, Table, Initial] {
        let error = made(counts, Verify::FirstStep).unwrap_err();
        assert!(error.contains(" on one rank: "), "{counts:?}: {error}");
        made(counts, Verify::Off).unwrap();
    }
    for counts in [Right, Loop, ShortCut, OfRanks, NeverAlone] {
        made(counts, Verify::FirstStep).unwrap_or_else(|error| panic!("{counts:?}: {error}"));
    }
}
