//! Meshes as strings and grids.

use meshwork_core::{Axis, Mesh};

#[test]
fn every_group_of_a_16_rank_mesh() {
    let mesh: Mesh = "pp=2, dp=2,tp=4".parse().unwrap();
    assert_eq!(mesh.to_string(), "tp=4,dp=2,pp=2");
    let groups = |axes: &[Axis]| {
        let mut all: Vec<Vec<usize>> = (0..16).map(|rank| mesh.group(rank, axes)).collect();
        all.dedup();
        all.sort();
        all.dedup();
        all
    };
    assert_eq!(groups(&[Axis::Tp]), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]);
    assert_eq!(groups(&[Axis::Dp]), [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]);
    assert_eq!(groups(&[Axis::Pp]), [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]);
    assert_eq!(groups(&[Axis::Dp, Axis::Tp]), [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]);
    assert_eq!(groups(&[]).len(), 16);
}

#[test]
fn coords_and_ranks_are_inverse_on_random_meshes() {
    for (tp, cp, ep, dp, pp) in [(1, 1, 1, 1, 1), (3, 1, 2, 2, 5), (4, 2, 1, 3, 2), (1, 7, 4, 1, 2)] {
        let axes = [(Axis::Pp, pp), (Axis::Tp, tp), (Axis::Ep, ep), (Axis::Cp, cp), (Axis::Dp, dp)];
        let mesh = Mesh::new(axes).unwrap();
        for rank in 0..mesh.world_size() {
            let coords = mesh.coords(rank);
            assert_eq!(mesh.rank_at(coords), rank);
            let data_rank = mesh.data_rank(coords);
            assert_eq!([data_rank / ep, data_rank % ep], [coords.get(Axis::Dp), coords.get(Axis::Ep)]);
            assert!(mesh.group(rank, &[Axis::Tp]).contains(&rank));
            assert_eq!(mesh.group(rank, &[Axis::Tp, Axis::Pp]).len(), tp * pp);
        }
    }
}

/// By definition, a group has every rank of the world that agrees on the other axes.
#[test]
fn a_group_is_what_its_definition_says() {
    let mesh: Mesh = "pp=2,tp=3,cp=4,dp=3,ep=6".parse().unwrap();
    assert!(mesh.axes().eq(Axis::ALL));
    for (rank, mask) in (0..mesh.world_size()).flat_map(|rank| (0..1 << Axis::COUNT).map(move |mask| (rank, mask))) {
        let axes: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| mask >> *axis as usize & 1 == 1).collect();
        let (here, others) = (mesh.coords(rank), Axis::ALL.into_iter().filter(|axis| !axes.contains(axis)));
        let others: Vec<Axis> = others.collect();
        let naive: Vec<usize> = (0..mesh.world_size())
            .filter(|&other| others.iter().all(|&axis| mesh.coords(other).get(axis) == here.get(axis)))
            .collect();
        assert_eq!(mesh.group(rank, &axes), naive, "rank {rank} along {axes:?}");
    }
}

#[test]
fn a_mesh_string_gives_every_axis_a_degree() {
    let mesh: Mesh = "tp=4".parse().unwrap();
    assert!(mesh.axes().eq(Axis::NAMED));
    assert_eq!(Axis::NAMED.map(|axis| mesh.degree(axis)), [4, 1, 1, 1, 1]);
    assert_eq!(mesh, "pp=1,dp=1,tp=4,cp=1".parse().unwrap());
    assert_eq!(mesh, mesh.to_string().parse().unwrap());
    assert_ne!(mesh, Mesh::new([(Axis::Tp, 4)]).unwrap(), "`new` adds no axes");
    assert_eq!(mesh.to_string(), "tp=4,dp=1,pp=1");
    assert_eq!("cp=2".parse::<Mesh>().unwrap().to_string(), "tp=1,cp=2,dp=1,pp=1");
    assert_eq!(Mesh::default().to_string(), "without axes");
}

#[test]
fn experts_borrow_ranks_of_data_parallelism() {
    let mesh: Mesh = "tp=2,dp=4,ep=2,pp=2".parse().unwrap();
    assert_eq!((mesh.world_size(), mesh.data_degree()), (16, 4));
    assert_eq!(mesh.to_string(), "tp=2,ep=2,dp=4,pp=2");
    assert_eq!(mesh, mesh.to_string().parse().unwrap());
    assert_eq!(mesh, Mesh::new([(Axis::Tp, 2), (Axis::Cp, 1), (Axis::Ep, 2), (Axis::Dp, 2), (Axis::Pp, 2)]).unwrap());
    // The ranks that share out the experts are neighbours, and have consecutive parts of the batch.
    assert_eq!(mesh.group(0, &[Axis::Ep]), [0, 2]);
    assert_eq!(mesh.group(0, &[Axis::Dp]), [0, 4]);
    assert_eq!(mesh.group(0, &Axis::DATA), [0, 2, 4, 6]);
    assert_eq!([0, 2, 4, 6].map(|rank| mesh.data_rank(mesh.coords(rank))), [0, 1, 2, 3]);
    let names = [&[Axis::Ep][..], &[Axis::Dp], &Axis::DATA, &[Axis::Dp, Axis::Ep, Axis::Cp], &[Axis::Dp, Axis::Tp]];
    assert_eq!(names.map(|axes| mesh.group_name(axes)), ["ep", "edp", "dp", "dp+cp", "edp+tp"]);
    let plain: Mesh = "dp=4".parse().unwrap();
    assert_eq!([&[Axis::Dp][..], &Axis::DATA].map(|axes| plain.group_name(axes)), ["dp", "dp"]);
}

#[test]
fn every_wrong_part_of_a_mesh_string_is_reported() {
    let wrong = Mesh::parse_degrees("dp=0,tp=x,dp=2,sp=2,pp=2, ").unwrap_err();
    let wrong: Vec<String> = wrong.into_iter().map(|(part, error)| format!("{part}: {error}")).collect();
    assert_eq!(
        wrong,
        [
            "dp=0: axis dp has degree 0: a degree is 1 or more",
            "tp=x: `tp=x` is not of the form axis=degree: the degree is not a whole number",
            "dp=2: axis dp is given twice",
            "sp=2: unknown mesh axis `sp`: the axes are tp, cp, ep, dp, pp; sequence parallelism is a boolean on tp, and the \
             axis that splits long sequences is cp",
            ": `` is not of the form axis=degree, as in dp=2,tp=4,pp=2",
        ]
    );
}

#[test]
fn bad_meshes_say_what_is_wrong() {
    let message = |text: &str| text.parse::<Mesh>().unwrap_err().to_string();
    assert_eq!(message("dp=2,xp=3"), "unknown mesh axis `xp`: the axes are tp, cp, ep, dp, pp");
    assert!(message("sp=2").contains("boolean on tp"));
    assert_eq!(message("ep=2"), "ep=2 does not divide dp=1: the experts are shared out among ranks of dp");
    assert_eq!(message("ep=4,dp=6"), "ep=4 does not divide dp=6: the experts are shared out among ranks of dp");
    assert_eq!("dp=2,ep=1".parse::<Mesh>(), "dp=2".parse());
    assert_eq!(message("tp=0"), "axis tp has degree 0: a degree is 1 or more");
    assert_eq!(message("tp=2,tp=2"), "axis tp is given twice");
    assert_eq!(message("tp"), "`tp` is not of the form axis=degree, as in dp=2,tp=4,pp=2");
    assert!(message("tp=-1").contains("not of the form"));
    assert!(message("").contains("`` is not of the form"), "no mesh at all is no mesh of one rank");
    assert!(message("dp=2,").contains("`` is not of the form"));
    assert!(message("tp=4294967296,dp=4294967296,pp=2").contains("overflows"));
    assert!(message("tp=99999999999999999999999").contains("overflows"));
}
