//! A contrastive loss (CLIP, Radford et al., arXiv:2103.00020) over the samples of all ranks: each rank has the rows of
//! its own samples against the gathered ones, and the gradients are those of one rank with the whole batch.

use crate::common::{on_mesh, values};
use meshwork_core::comm::record;
use meshwork_core::{Axis, Group, Mesh, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Mode, Normaliser, Position, Weights};
use meshwork_tensor::{Declarations, Device, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_testkit::run_world;
use std::sync::Arc;

const BATCH: usize = 8;
const WIDTHS: [usize; 2] = [5, 3];
const SHARED: usize = 4;

/// Where the samples of other ranks come in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gather {
    /// Each rank computes the rows of its own samples.
    OwnRows,
    /// Every rank computes all rows.
    AllRows,
}

/// The loss of each sample of this rank: the mean of finding its text among all texts, and its image among all images.
/// `images` and `texts` are `[b, shared]`.
fn contrastive_loss(images: &Var, texts: &Var, gather: Gather) -> Result<Var> {
    let tape = images.tape();
    let held = images.shape()[0];
    let all = |x: &Var| match gather {
        Gather::OwnRows => x.all_gather(Axis::DATA, 0), // its conjugate is a reduce-scatter
        Gather::AllRows => x.all_gather_invariant(Axis::DATA, 0),
    };
    let (all_images, all_texts) = (all(images)?, all(texts)?);
    let [images, texts, first] = match gather {
        Gather::OwnRows => [images, texts, images].map(Clone::clone),
        Gather::AllRows => [&all_images, &all_texts, &all_images].map(Clone::clone),
    };
    let before = if gather == Gather::OwnRows { tape.rank().mesh().data_rank(tape.rank().coords()) * held } else { 0 };
    let own: Vec<i32> = (before..before + first.shape()[0]).map(|sample| sample as i32).collect();
    let own = tape.constant(Tensor::from_slice(tape.device(), &own, [own.len()])?, images.types());
    let of_images = images.linear(&all_texts, 1)?.cross_entropy(&own)?; // [b, B], [b]
    let of_texts = texts.linear(&all_images, 1)?.cross_entropy(&own)?;
    let loss = of_images.add(&of_texts)?.scale(0.5)?;
    match gather {
        Gather::OwnRows => Ok(loss),
        Gather::AllRows => loss.split(Axis::DATA, 0),
    }
}

/// Losses of this rank's samples, and the bits or numbers of all gradients.
type Found = (Vec<f64>, Vec<Vec<f32>>);

fn step(rank: Arc<Rank>, device: Arc<dyn Device>, mut all: Declarations, gather: Gather) -> Result<Found> {
    let init = Init::Normal { std: 0.7 };
    let tower = |all: &mut Declarations, name: &str, width| -> Result<ParamId> {
        all.declare(name, &[SHARED, width], Placement::replicated(), Role::Weight, init)
    };
    let towers = [tower(&mut all, "images", WIDTHS[0])?, tower(&mut all, "texts", WIDTHS[1])?];
    let layout = [towers.to_vec()];
    let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 1)?;
    let held = BATCH / rank.mesh().data_degree();
    let first = rank.mesh().data_rank(rank.coords()) * held;
    let position = Position { first_sample: first as u64, rank_samples: held as u64, ..Position::default() };
    let tape = Tape::new(rank.clone(), Arc::new(params), device.clone(), Mode::Train, position);
    let types = Axis::DATA
        .into_iter()
        .fold(Types::all(rank.mesh(), Ty::Invariant), |types, axis| types.with(axis, Ty::Shard(0)));
    let embedded = |name: &str, width: usize, tower: ParamId| -> Result<Var> {
        let x: Vec<f32> =
            values(name, BATCH * width)[first * width..(first + held) * width].iter().map(|&x| x as f32).collect();
        tape.constant(Tensor::from_slice(&device, &x, [held, width])?, types).linear(&tape.param(tower)?, 1)
    };
    let (images, texts) = (embedded("x", WIDTHS[0], towers[0])?, embedded("t", WIDTHS[1], towers[1])?);
    let loss = contrastive_loss(&images, &texts, gather)?;
    assert_eq!((loss.types(), &loss.shape()[..]), (types, &[held][..]));
    let mut gradients = Gradients::default();
    tape.backward_from_loss(&loss, Normaliser::LocalTerms(held as u64), Weights::Now, &mut gradients)?;
    if !device.has_values() {
        return Ok((Vec::new(), Vec::new()));
    }
    gradients.all_reduce(&tape)?;
    let gradient = |id| gradients.get(id).unwrap().to_vec::<f32>();
    Ok((loss.tensor().to_vec::<f64>()?, towers.into_iter().map(gradient).collect::<Result<_>>()?))
}

const MESHES: [&str; 6] = ["dp=2", "dp=2,ep=1", "dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=4", "tp=2,dp=2"];

fn near(got: f64, wanted: f64) -> bool {
    (got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0)
}

#[test]
fn a_contrastive_loss_over_the_samples_of_all_ranks_has_the_loss_and_gradients_of_one() {
    for gather in [Gather::OwnRows, Gather::AllRows] {
        let run = |mesh| on_mesh(mesh, |rank| step(rank, Cpu::device(), Declarations::new(), gather).unwrap());
        let (losses, gradients) = run("dp=1").remove(0);
        assert_eq!((losses.len(), gradients[1].len()), (BATCH, SHARED * WIDTHS[1]));
        assert!(gradients.iter().flatten().all(|&gradient| gradient != 0.0));
        for mesh in MESHES {
            let parsed: Mesh = mesh.parse().unwrap();
            for (rank, found) in run(mesh).into_iter().enumerate() {
                let held = BATCH / parsed.data_degree();
                let of_rank = losses.chunks(held).nth(parsed.data_rank(parsed.coords(rank))).unwrap();
                let pairs = |(got, wanted): (&f64, &f64)| near(*got, *wanted);
                assert!(
                    found.0.len() == held && found.0.iter().zip(of_rank).all(pairs),
                    "{gather:?} on {mesh}: {found:?}"
                );
                for (got, wanted) in found.1.iter().flatten().zip(gradients.iter().flatten()) {
                    assert!(near(f64::from(*got), f64::from(*wanted)), "{gather:?} on {mesh}: {got} and {wanted}");
                }
            }
        }
    }
}

#[test]
fn it_has_the_same_bits_on_a_device_whose_memory_the_host_cannot_read() {
    for (mesh, gather) in [("dp=4,ep=2", Gather::OwnRows), ("tp=2,dp=2", Gather::AllRows)] {
        let mesh: Mesh = mesh.parse().unwrap();
        let run = |world: Group, behind: bool| {
            let (world, cpu) = (Arc::clone(world.communicator()), Cpu::device());
            let (world, device) = match behind {
                true => (opaque::communicator(world), Opaque::device(cpu)),
                false => (world, cpu),
            };
            step(Arc::new(Rank::new(&mesh, world).unwrap()), device, Declarations::new(), gather).unwrap()
        };
        let run = |behind| run_world(mesh.world_size(), |world| run(world, behind));
        assert_eq!(run(true), run(false));
    }
}

/// What a rank says to others in a dry run is what it says.
#[test]
fn a_dry_run_counts_the_gathers_and_their_conjugates() {
    for mesh in MESHES {
        let mesh: Mesh = mesh.parse().unwrap();
        for gather in [Gather::OwnRows, Gather::AllRows] {
            let said = |rank: Arc<Rank>, device: Arc<dyn Device>| {
                step(rank.clone(), device, Declarations::new(), gather).unwrap();
                // Without the count of terms.
                let records = rank.log().drain().into_iter().filter(|record| record.dtype.is_float());
                let mut said: Vec<String> = records.map(|record| format!("{record:?}")).collect();
                said.truncate(4); // without those of Gradients::all_reduce
                said
            };
            let real = run_world(mesh.world_size(), |world| {
                said(Arc::new(Rank::new(&mesh, Arc::clone(world.communicator())).unwrap()), Cpu::device())
            });
            for (rank, real) in real.into_iter().enumerate() {
                let world = record::communicator("world", rank, (0..mesh.world_size()).collect()).unwrap();
                let mut dry = said(Arc::new(Rank::new(&mesh, world).unwrap()), Meta::device());
                assert!(dry.len() >= 2 && dry[0].contains("AllGather") && dry[0].contains("\"dp\""), "{dry:?}");
                dry.truncate(real.len());
                assert_eq!(dry[..], real[..dry.len()], "rank {rank} of {mesh}, {gather:?}");
                let scattered = dry.iter().filter(|said| said.contains("ReduceScatter")).count();
                assert_eq!(scattered, if gather == Gather::OwnRows { 2 } else { 0 }, "{dry:?}");
            }
        }
    }
}

/// In canonical numerics the order of a sum over samples must not depend on the mesh. If every rank does all the work,
/// there is none between ranks.
#[test]
fn canonical_numerics_take_the_gather_after_which_all_ranks_do_the_same() {
    let run = |mesh, gather| on_mesh(mesh, |rank| step(rank, Cpu::device(), Declarations::canonical(4), gather));
    for mesh in ["dp=1", "dp=2", "dp=4,ep=2"] {
        for refused in run(mesh, Gather::OwnRows) {
            let refused = refused.unwrap_err().to_string();
            assert!(
                refused.contains("linear") && refused.contains("all_gather_invariant in place of all_gather"),
                "{refused}"
            );
        }
    }
}
