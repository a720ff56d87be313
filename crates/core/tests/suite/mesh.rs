//! Ranks of a mesh and their groups, over threads and recorded.

use meshwork_core::World;
use meshwork_core::comm::thread::Options;
use meshwork_core::comm::{Membership, record};
use meshwork_core::{
    Axis, Call, CommError, Communicator, Group, Mesh, Pending, Rank, ReduceOp, ReductionOrder, profile,
};
use std::sync::{Arc, Mutex};

fn mesh(text: &str) -> Mesh {
    text.parse().unwrap()
}

/// All sets of axes.
fn products() -> impl Iterator<Item = Vec<Axis>> {
    (0..32).map(|set| Axis::ALL.into_iter().filter(|&axis| set >> axis as usize & 1 == 1).collect())
}

#[test]
fn run_mesh_gives_every_thread_its_rank() {
    let mesh = mesh("tp=2,dp=3");
    let places = World::threads(&mesh).run_mesh(&mesh, |rank| {
        Ok::<_, CommError>((rank.world_rank(), rank.coords().get(Axis::Tp), rank.coords().get(Axis::Dp)))
    });
    assert_eq!(places.unwrap(), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2), (5, 1, 2)]);

    let options = Options { timeout: std::time::Duration::from_millis(100) };
    let error = World::Threads(6).run_with(options, |world| match world.rank() {
        5 => {
            std::thread::sleep(std::time::Duration::from_millis(600));
            Ok(())
        }
        _ => world.barrier(),
    });
    // On a busy machine another rank may get no core for as long.
    assert!(error.unwrap_err().cause.contains(" made no progress for 100ms"), "the options hold");
}

/// What each group of each rank sums to, against the definition: ranks that are equal on all other axes.
#[test]
fn a_reduction_over_a_product_of_axes_is_one_sum_over_its_ranks() {
    for text in ["dp=2,cp=2", "cp=4,ep=2", "tp=2,cp=2,dp=2,pp=2", "tp=3,dp=2,pp=2", "dp=4", "dp=1", "cp=2,pp=3"] {
        let mesh = mesh(text);
        World::threads(&mesh)
            .run_mesh(&mesh, |rank| {
                let here = rank.coords();
                for axes in products() {
                    let others = || Axis::ALL.into_iter().filter(|axis| !axes.contains(axis));
                    let at = |other: usize| mesh.coords(other);
                    let members: Vec<usize> = (0..mesh.world_size())
                        .filter(|&other| others().all(|axis| at(other).get(axis) == here.get(axis)))
                        .collect();
                    let group = rank.group_over(&axes);
                    assert_eq!(group.world_ranks(), members, "{axes:?} of {text}");
                    let mut x = [1 << rank.world_rank()];
                    group.all_reduce_slice(&mut x, ReduceOp::Sum)?;
                    assert_eq!(x[0], members.iter().map(|member| 1i32 << member).sum::<i32>(), "{axes:?} of {text}");
                    let reversed: Vec<Axis> = axes.iter().rev().copied().collect();
                    assert!(same(group, rank.group_over(&reversed)));
                }
                Ok::<_, CommError>(())
            })
            .unwrap();
    }
}

fn same(a: &Group, b: &Group) -> bool {
    Arc::ptr_eq(a.communicator(), b.communicator())
}

#[test]
fn products_are_named_by_their_axes_and_made_once() {
    let rank = Rank::recording(&mesh("tp=2,cp=2,dp=2,pp=2"), 5).unwrap();
    let name = |axes: &[Axis]| rank.group_over(axes).name().to_owned();
    assert_eq!(name(&[Axis::Cp, Axis::Dp]), "dp+cp");
    assert_eq!(name(&[Axis::Dp, Axis::Tp, Axis::Cp]), "dp+cp+tp");
    assert_eq!(name(&[Axis::Dp]), "dp");
    assert!(same(rank.group_over(&[Axis::Dp]), rank.group(Axis::Dp)));
    assert!(same(rank.group_over(&Axis::ALL), rank.world()), "the world is not made twice");

    let rank = Rank::recording(&mesh("tp=2,dp=4"), 5).unwrap();
    assert!(same(rank.group_over(&[Axis::Dp, Axis::Cp]), rank.group(Axis::Dp)), "cp has degree 1");
    assert!(same(rank.group_over(&[Axis::Dp, Axis::Tp]), rank.world()), "pp and cp have degree 1");
    for alone in [&[][..], &[Axis::Cp, Axis::Pp]] {
        assert_eq!(rank.group_over(alone).world_ranks(), [5]);
    }
    assert_eq!(rank.group(Axis::Pp).name(), "pp", "an axis of degree 1 keeps its name");

    let alone = Rank::alone().unwrap();
    assert!(products().all(|axes| alone.group_over(&axes).size() == 1));
}

/// What a rank communicates over a product is logged under the product's name.
#[test]
fn the_log_names_products() {
    let logs = World::threads(&mesh("tp=2,cp=2,dp=2")).run_mesh(&mesh("tp=2,cp=2,dp=2"), |rank| {
        rank.group_over(&[Axis::Dp, Axis::Cp]).all_reduce_slice(&mut [0f32; 8], ReduceOp::Sum)?;
        rank.group_over(&Axis::ALL).all_reduce_slice(&mut [0f32; 8], ReduceOp::Sum)?;
        Ok::<_, CommError>(rank.log().bytes_by_group())
    });
    for log in logs.unwrap() {
        assert_eq!(log.into_iter().collect::<Vec<_>>(), [("dp+cp".to_owned(), 48.0), ("world".to_owned(), 56.0)]);
    }
}

/// Records every split, and otherwise passes calls to the inner communicator.
#[derive(Debug)]
struct Noting(Arc<dyn Communicator>, Arc<Mutex<Vec<String>>>);

impl Communicator for Noting {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn size(&self) -> usize {
        self.0.size()
    }
    fn world_ranks(&self) -> &[usize] {
        self.0.world_ranks()
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn start(&self, call: Call) -> Result<Pending, CommError> {
        self.0.start(call)
    }
    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        self.1.lock().unwrap().push(name.to_owned());
        self.0.split(name, members)
    }
    fn membership(&self) -> &dyn Membership {
        self.0.membership()
    }
}

/// All ranks make the same groups in the same order, whatever they use later: groups made on first use would deadlock
/// if two ranks used them in different orders.
#[test]
fn groups_are_made_at_once_and_in_one_order() {
    let mesh = mesh("tp=2,dp=2,pp=2");
    let splits = World::threads(&mesh).run(|world| {
        let splits = Arc::new(Mutex::default());
        let world = Noting(Arc::clone(world.communicator()), Arc::clone(&splits));
        let rank = Rank::new(&mesh, Arc::new(world))?;
        let made = splits.lock().unwrap().clone();
        products().for_each(|axes| drop(rank.group_over(&axes).name().to_owned()));
        assert_eq!(*splits.lock().unwrap(), made, "nothing is made on use");
        Ok::<_, CommError>(made)
    });
    for made in splits.unwrap() {
        assert_eq!(made, ["self", "tp", "cp", "ep", "dp", "dp+tp", "pp", "pp+tp", "pp+dp"]);
    }
}

#[test]
fn a_world_of_another_size_is_an_error_on_every_rank() {
    let mesh = mesh("tp=2,dp=2");
    let error = World::Threads(3).run(|world| Rank::new(&mesh, Arc::clone(world.communicator())).map(drop));
    let error = error.unwrap_err();
    for rank in 0..3 {
        let end = error.error_of(rank).unwrap();
        assert!(matches!(end, CommError::WorldSize { world_rank, size: 3, .. } if *world_rank == rank), "{end}");
        assert_eq!(
            end.to_string(),
            format!("world rank {rank} cannot join the mesh tp=2,dp=2,pp=1: the mesh has 4 ranks, the world has 3")
        );
    }
    assert!(Rank::recording(&mesh, 4).is_err(), "a rank that the mesh does not have");
}

/// Threads and records reduce in the tree, decorated or split; a backend that does not state an order promises none.
#[test]
fn communicators_say_in_which_order_they_reduce() {
    let orders = World::threads(&mesh("tp=2"))
        .run_mesh(&mesh("tp=2"), |rank| Ok::<_, CommError>(rank.group(Axis::Tp).reduction_order()));
    assert_eq!(orders.unwrap(), [ReductionOrder::BalancedTree; 2]);
    let recorded = record::communicator("world", 0, vec![0, 1]).unwrap();
    let plain = Noting(Arc::clone(&recorded), Arc::default());
    let recorder = profile::Recorder::new(std::time::Instant::now());
    let profiled = |inner: Arc<dyn Communicator>| profile::communicator(inner, recorder.clone()).reduction_order();
    assert_eq!(profiled(recorded), ReductionOrder::BalancedTree);
    assert_eq!(profiled(Arc::new(plain)), ReductionOrder::Unspecified);
    assert!(ReductionOrder::Unspecified < ReductionOrder::Repeatable);
    assert!(ReductionOrder::Repeatable < ReductionOrder::BalancedTree);
    assert_eq!(ReductionOrder::BalancedTree.to_string(), "balanced tree");
}

/// The group that the batch is split over is named dp, whatever part of it shares out the experts.
#[test]
fn groups_of_a_mesh_with_experts_have_their_names() {
    let names = |mesh: &str| {
        let rank = Rank::recording(&mesh.parse().unwrap(), 0).unwrap();
        let groups = [rank.data_group(), rank.group(Axis::Ep), rank.group(Axis::Dp), rank.group(Axis::Tp)];
        groups.map(|group| format!("{} of {}", group.name(), group.size()))
    };
    assert_eq!(names("dp=4,ep=2"), ["dp of 4", "ep of 2", "edp of 2", "tp of 1"]);
    assert_eq!(names("dp=2,ep=2"), ["dp of 2", "ep of 2", "edp of 1", "tp of 1"]);
    assert_eq!(names("dp=2,ep=2,tp=2"), ["dp of 2", "ep of 2", "edp of 1", "tp of 2"]);
    assert_eq!(names("dp=2,tp=2"), ["dp of 2", "ep of 1", "dp of 2", "tp of 2"]);
    let part = Rank::recording(&mesh("cp=6,ep=3,dp=2"), 0).unwrap();
    let groups = [&Axis::CONTEXT[..], &[Axis::Cep], &[Axis::Cp], &[Axis::Cep, Axis::Cp, Axis::Dp]];
    let groups = groups.map(|axes| format!("{} of {}", part.group_over(axes).name(), part.group_over(axes).size()));
    assert_eq!(groups, ["cp of 6", "cep of 3", "ecp of 2", "world of 12"]);
    assert_eq!(part.group(Axis::Cep).world_ranks(), [0, 1, 2], "neighbours share out the experts");
    assert_eq!(names("dp=1"), ["dp of 1", "ep of 1", "dp of 1", "tp of 1"]);
}

/// Where ep does not divide dp it takes all ranks of cp, and ranks of dp for the rest, or a part of cp.
#[test]
fn experts_borrow_ranks_of_cp() {
    for (text, axes, ep) in [
        ("cp=2,ep=2,dp=2", &[Axis::Ep][..], 2), // ranks of dp, which it divides
        ("cp=4,ep=8,dp=2", &[Axis::Cp, Axis::Ep], 2),
        ("tp=2,cp=3,ep=3,dp=2", &[Axis::Cp, Axis::Ep], 1),
        ("cp=8,ep=4,dp=2", &[Axis::Cep, Axis::Ep], 2), // a part of cp and all of dp
        ("cp=6,ep=3,dp=2", &[Axis::Cep, Axis::Ep], 1),
    ] {
        let mesh = mesh(text);
        assert_eq!((&*mesh.expert_axes(), mesh.degree(Axis::Ep)), (axes, ep), "{text}");
        assert_eq!(mesh.to_string().parse(), Ok(mesh.clone()), "{text}: {mesh}");
        assert_eq!(mesh.data_degree(), 2, "{text}");
    }
    for (dp, cp) in (1..7).flat_map(|dp| (1..7).map(move |cp| (dp, cp))) {
        for ep in 1..=dp * cp {
            let made = Mesh::of_degrees([1, cp, ep, dp, 1]);
            assert_eq!(made.is_ok(), (dp * cp).is_multiple_of(ep), "dp={dp},cp={cp},ep={ep}");
            let Ok(mesh) = made else { continue };
            let of = (mesh.world_size(), mesh.context_degree(), mesh.data_degree(), mesh.expert_degree());
            assert_eq!(of, (dp * cp, cp, dp, ep), "dp={dp},cp={cp},ep={ep}");
            let sharers = mesh.group(0, &mesh.expert_axes());
            assert_eq!(sharers.len(), ep, "each rank of {mesh} holds other experts");
        }
    }
    let told = "dp=2,cp=4,ep=6".parse::<Mesh>().unwrap_err().to_string();
    assert_eq!(told, "ep=6 does not divide dp=2 times cp=4: the experts are shared out among ranks of dp and cp");
    assert!("cep=2".parse::<Mesh>().is_err());
    assert_eq!(mesh("dp=2,cp=2,pp=2,tp=1").product_names(), ["dp+cp", "pp+cp", "pp+dp"]);
}
