//! ResNet and VGG as ordered layers: their extents, their parameters, and that any cut declares each parameter once.

use meshwork_core::{Rank, Types};
use meshwork_models::layers::Norm;
use meshwork_models::network::Network;
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Params, Tape, Tensor};
use std::sync::Arc;

fn networks() -> [Network; 4] {
    let (resnet, vgg) = (ResNetConfig::digits(), VggConfig::digits());
    [
        resnet.network(),
        ResNetConfig { image: [9, 7, 3], groups: vec![(4, 1), (6, 2), (8, 1)], norm: Norm::Group(2), ..resnet }
            .network(),
        vgg.network(),
        VggConfig { image: [9, 7, 3], groups: vec![vec![4], vec![6, 6]], hidden: vec![], norm: Norm::Group(2), ..vgg }
            .network(),
    ]
}

/// The announced output extents of every layer are those that it computes.
#[test]
fn layers_give_the_extents_they_announce() {
    for network in networks() {
        let mut declared = Declarations::new();
        let modules = network.declare(&mut declared, 0..network.layers()).unwrap();
        let (rank, device, layout) = (Arc::new(Rank::alone().unwrap()), Cpu::device(), [declared.ids().collect()]);
        let params = Params::new(Arc::new(declared), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        let tape = Tape::new(rank, Arc::new(params), device.clone(), Mode::Train, Position::default());
        let extents = |at: usize| [&[2], &network.boundary(at)[..]].concat();
        let zeros = Tensor::zeros(&device, meshwork_core::DType::F32, &extents(0)[..]).unwrap();
        let mut x = tape.input(zeros, Types::NONE);
        for (at, module) in modules.iter().enumerate() {
            x = module.forward(&tape, &x).unwrap();
            assert_eq!(x.shape()[..], extents(at + 1), "behind layer {at} of {network:?}");
        }
        assert_eq!(x.shape()[..], [2, 10]);
    }
}

#[test]
fn any_cut_declares_each_parameter_once() {
    for network in networks() {
        let of = |layers| {
            let mut declared = Declarations::new();
            network.declare(&mut declared, layers).unwrap();
            declared.specs().to_vec()
        };
        let whole = of(0..network.layers());
        for cut in 0..=network.layers() {
            assert_eq!([of(0..cut), of(cut..network.layers())].concat(), whole, "cut behind {cut}");
        }
    }
}

/// Counted by hand from the equations.
#[test]
fn the_digits_networks_have_the_parameters_of_their_equations() {
    let count = |network: Network| {
        let mut declared = Declarations::new();
        network.declare(&mut declared, 0..network.layers()).unwrap();
        let trained = declared.specs().iter().filter(|spec| !spec.group.frozen);
        trained.map(|spec| spec.global_elements()).sum::<usize>()
    };
    let conv = |channels: usize, features: usize, kernel: usize| features * kernel * kernel * channels + 2 * features;
    let resnet = conv(1, 16, 3) + 4 * conv(16, 16, 3) + conv(16, 32, 3) + 3 * conv(32, 32, 3) + conv(16, 32, 1) + 330;
    assert_eq!(count(ResNetConfig::digits().network()), resnet);
    let convs = conv(1, 16, 3) + conv(16, 16, 3) + conv(16, 32, 3) + conv(32, 32, 3);
    assert_eq!(count(VggConfig::digits().network()), convs + (2 * 2 * 32 * 64 + 64) + 650);
}
