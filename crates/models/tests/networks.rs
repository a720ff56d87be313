//! ResNet and VGG as ordered layers: their extents, their parameters, and that any cut declares each parameter once.

use meshwork_core::{DType, Rank, Types};
use meshwork_models::layers::Norm;
use meshwork_models::network::Network;
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Device, Params, Tape, Tensor};
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

/// Bytes that a forward of `batch` images keeps for backward, beside its input and result.
fn kept(network: &Network, batch: usize) -> u64 {
    let mut declared = Declarations::new();
    let modules = network.declare(&mut declared, 0..network.layers()).unwrap();
    let (rank, layout) = (Arc::new(Rank::alone().unwrap()), [declared.ids().collect()]);
    let device: Arc<dyn Device> = Arc::new(Meta::default());
    let params = Params::new(Arc::new(declared), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
    let tape = Tape::new(rank, Arc::new(params), device.clone(), Mode::Train, Position::default());
    let images = [&[batch], &network.boundary(0)[..]].concat();
    let mut x = tape.input(Tensor::zeros(&device, DType::F32, &images[..]).unwrap(), Types::NONE);
    let before = device.meter().live_bytes();
    for module in &modules {
        x = module.forward(&tape, &x).unwrap();
    }
    device.meter().live_bytes() - before - x.tensor().buffer().bytes() as u64
}

/// Of each image a convolution keeps its input, the norm behind it the convolution's result, ReLU a bit of each element, and max pooling a byte
/// of each maximum (Gist, section 4.1). A batch norm keeps the two moments of each channel too.
#[test]
fn networks_keep_bits_of_relu_and_places_of_max_pooling() {
    let (batch, groups) = (4, vec![vec![64, 64], vec![128, 128], vec![256, 256, 256]]);
    let vgg = VggConfig { image: [32, 32, 3], groups: groups.clone(), hidden: vec![96], ..VggConfig::digits() };
    let (mut bytes, mut whole, mut moments) = (0, 0, 0);
    let (mut side, mut channels) = (32, 3);
    for (g, group) in groups.iter().enumerate() {
        for (c, &features) in group.iter().enumerate() {
            let (input, result) = (batch * side * side * channels, batch * side * side * features);
            // The images themselves are the caller's.
            let input = if (g, c) == (0, 0) { 0 } else { 4 * input };
            bytes += input + 4 * result + result / 8;
            whole += input + 4 * result + 4 * result;
            moments += 2 * 4 * features;
            channels = features;
        }
        side /= 2;
        bytes += batch * side * side * channels;
        whole += 4 * batch * 4 * side * side * channels;
    }
    let flat = batch * side * side * channels;
    bytes += 4 * flat + batch * 96 / 8 + 4 * batch * 96;
    whole += 4 * flat + 4 * batch * 96 + 4 * batch * 96;
    let kept = kept(&vgg.network(), batch);
    println!("{kept} bytes, {whole} with the inputs of ReLU and max pooling whole");
    assert_eq!(kept, (bytes + moments) as u64);
}
