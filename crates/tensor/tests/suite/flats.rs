//! Parameters in their flat buffers, and the meshes and layouts that are refused.

use meshwork_compress::Values;
use meshwork_core::{Axis, DType, Mesh};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::param::{Adapters, Matrices, ParamGroup};
use meshwork_tensor::{Declarations, Init, ParamId, Params, Placement, Role};
use std::sync::Arc;

#[test]
fn ranks_that_hold_no_whole_subtrees_of_blocks_are_refused() {
    let mut all = Declarations::canonical(8);
    let placement = Placement::replicated().shard(Axis::Tp, 1);
    let id = all.declare("w", &[2, 6], placement, Role::Weight, Init::Zeros).unwrap();
    let all = Arc::new(all);
    let build = |degree: usize| {
        let mesh = Mesh::new([(Axis::Tp, degree)]).unwrap();
        Params::new(all.clone(), &mesh, mesh.coords(0), &Meta::device(), &[vec![id]], 0)
    };
    build(2).unwrap();
    assert_eq!(
        build(3).unwrap_err().to_string(),
        "w: dim 1 of extent 6 cannot be cut over tp=3: 8 reduction blocks fit degrees [1, 2, 4, 8]"
    );
}

/// Ranks of `ep` have other samples, whose blocks are samples: three of them fit, whatever the blocks of `tp` are.
#[test]
fn experts_are_cut_over_degrees_that_reduction_blocks_do_not_fit() {
    let mut all = Declarations::canonical(8);
    let placement = Placement::replicated().shard(Axis::Ep, 0);
    let id = all.declare("experts", &[6, 2], placement, Role::Weight, Init::Zeros).unwrap();
    let mesh: Mesh = "dp=3,ep=3".parse().unwrap();
    let params = Params::new(Arc::new(all), &mesh, mesh.coords(1), &Meta::device(), &[vec![id]], 0).unwrap();
    assert_eq!(params.shape(id)[..], [2, 2]);
}

/// They lie as bytes, which flat buffers of numbers are not.
#[test]
fn packed_parameters_share_no_flat_buffer_with_others() {
    let adapters = Adapters { base: Some(Values::Bf16), ..Default::default() };
    let mut all = Declarations::new();
    all.adapting(&Arc::new(adapters), |all| {
        let group = ParamGroup::hidden(Matrices::new(0, 1));
        all.declare_in("w", &[4, 8], Placement::replicated(), Role::Weight, Init::Zeros, group).unwrap();
        all.declare("norm", &[8], Placement::replicated(), Role::Norm, Init::Ones).unwrap();
    });
    let (all, device, mesh) = (Arc::new(all), Meta::device(), Mesh::default());
    let build = |layout: &[Vec<ParamId>]| Params::new(all.clone(), &mesh, mesh.coords(0), &device, layout, 0);
    let error = build(&[all.ids().collect()]).unwrap_err().to_string();
    assert!(error.contains("parameter w: it is stored in fewer bits, and shares a flat buffer"), "{error}");
    let params = build(&all.flats()).unwrap();
    let bytes: Vec<_> = params.flats().iter().map(|flat| (flat.dtype(), flat.count())).collect();
    assert_eq!(bytes, [(DType::F32, 8), (DType::U8, 16 + 2 * 32)]);
    let kept: Vec<bool> = all.ids().map(|id| params.is_kept(id)).collect();
    assert_eq!(kept, [false, true]);
}

#[test]
fn a_layout_must_name_every_parameter_once() {
    let mut all = Declarations::new();
    let id = all.declare("w", &[2], Placement::replicated(), Role::Bias, Init::Zeros).unwrap();
    let (all, device, mesh) = (Arc::new(all), Meta::device(), Mesh::default());
    for (layout, times) in [(vec![], 0), (vec![vec![id], vec![id]], 2)] {
        let error = Params::new(all.clone(), &mesh, mesh.coords(0), &device, &layout, 0).unwrap_err();
        let want = format!("parameter w lies in {times} flat buffers of the layout: it must lie in one");
        assert_eq!(error.to_string(), want);
    }
}
