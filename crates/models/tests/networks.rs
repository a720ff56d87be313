//! ResNet and VGG as ordered layers: their extents, their parameters, and that any cut declares each parameter once.

use meshwork_core::{DType, Rank, Types};
use meshwork_cpu::Cpu;
use meshwork_models::layers::Norm;
use meshwork_models::network::Network;
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{Encoded, Encoding, HalfType, Keep, Mode, Position, Saved, SavedPolicy};
use meshwork_tensor::{Declarations, Device, Params, Tape, Tensor};
use std::cell::RefCell;
use std::rc::Rc;
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

/// Bytes that a forward of `batch` images keeps for backward by `policy`, the images too, beside its result.
fn kept(network: &Network, batch: usize, policy: Rc<dyn SavedPolicy>) -> u64 {
    kept_on(&(Arc::new(Meta::default()) as Arc<dyn Device>), network, batch, policy)
}

/// The same on a device, of images without zeros.
fn kept_on(device: &Arc<dyn Device>, network: &Network, batch: usize, policy: Rc<dyn SavedPolicy>) -> u64 {
    let mut declared = Declarations::new();
    let modules = network.declare(&mut declared, 0..network.layers()).unwrap();
    let (rank, layout) = (Arc::new(Rank::alone().unwrap()), [declared.ids().collect()]);
    let params = Params::new(Arc::new(declared), rank.mesh(), rank.coords(), device, &layout, 0).unwrap();
    let position = Position::default();
    let tape = Tape::with_policy(rank, Arc::new(params), device.clone(), Mode::Train, position, policy);
    let before = device.meter().live_bytes();
    let images = [&[batch], &network.boundary(0)[..]].concat();
    let count = images.iter().product();
    let pixels: Vec<f32> = (0..count).map(|at| ((at * 7919 % 251) as f32 - 125.0) / 64.0).collect();
    let images = match device.has_values() {
        true => Tensor::from_slice(device, &pixels, &images[..]).unwrap(),
        false => Tensor::zeros(device, DType::F32, &images[..]).unwrap(),
    };
    let mut x = tape.input(images, Types::NONE);
    for module in &modules {
        x = module.forward(&tape, &x).unwrap();
    }
    device.meter().live_bytes() - before - x.tensor().buffer().bytes() as u64
}

/// Of 32×32 pixels.
fn wide_vgg() -> VggConfig {
    let groups = vec![vec![64, 64], vec![128, 128], vec![256, 256, 256]];
    VggConfig { image: [32, 32, 3], groups, hidden: vec![96], ..VggConfig::digits() }
}

/// Of each image a convolution keeps its input, the norm behind it the convolution's result, ReLU a bit of each
/// element, and max pooling a byte of each maximum (Gist, section 4.1). A batch norm keeps the two moments of each
/// channel too. In 16 bits all floats but the moments take half.
#[test]
fn networks_keep_bits_of_relu_and_places_of_max_pooling() {
    let (batch, vgg) = (4, wide_vgg());
    let groups = vgg.groups.clone();
    let (mut floats, mut bytes, mut whole, mut moments) = (0, 0, 0, 0);
    let (mut side, mut channels) = (32, 3);
    for group in &groups {
        for &features in group {
            let (input, result) = (batch * side * side * channels, batch * side * side * features);
            floats += input + result;
            bytes += result / 8;
            whole += 4 * (input + result + result);
            moments += 2 * 4 * features;
            channels = features;
        }
        side /= 2;
        bytes += batch * side * side * channels;
        whole += 4 * batch * 4 * side * side * channels;
    }
    let flat = batch * side * side * channels;
    floats += flat + batch * 96;
    bytes += batch * 96 / 8;
    whole += 4 * flat + 4 * batch * 96 + 4 * batch * 96;
    let exact = kept(&vgg.network(), batch, Rc::new(Keep));
    let reduced = kept(&vgg.network(), batch, Rc::new(Encoded::new(Rc::new(Keep), Encoding::Half(HalfType::Bf16))));
    println!("{exact} bytes, {reduced} in 16 bits, {whole} with the inputs of ReLU and max pooling whole");
    assert_eq!(exact, (4 * floats + bytes + moments) as u64);
    assert_eq!(reduced, (2 * floats + bytes + moments) as u64);
}

/// Keeps everything, and says what is there.
#[derive(Debug, Default)]
struct Listing(RefCell<Vec<Tensor>>);

impl SavedPolicy for Listing {
    fn save(&self, op: &'static str, tensor: Tensor) -> meshwork_tensor::Result<Saved> {
        let mut kept = self.0.borrow_mut();
        if tensor.dtype() == DType::F32
            && kept.iter().all(|other| {
                !std::ptr::addr_eq(Arc::as_ptr(other.buffer().memory()), Arc::as_ptr(tensor.buffer().memory()))
            })
        {
            kept.push(tensor.clone());
        }
        Keep.save(op, tensor)
    }

    fn save_exact(&self, op: &'static str, tensor: Tensor) -> meshwork_tensor::Result<Saved> {
        Keep.save(op, tensor)
    }
}

/// Of what ReLU and max pooling give, and the next convolution keeps, about half are zeros (Gist, section 4.2).
#[test]
fn networks_keep_no_zeros_of_relu() {
    let vgg = wide_vgg();
    let (device, batch) = (Cpu::device(), 4);
    let (listing, sparse) = (Rc::new(Listing::default()), |policy| Rc::new(Encoded::new(policy, Encoding::Sparse)));
    let dense = kept_on(&device, &vgg.network(), batch, listing.clone());
    let saved = |tensor: &Tensor| {
        let (bytes, values) = (4 * tensor.count() as u64, tensor.to_vec::<f32>().unwrap());
        let packed = tensor.count().div_ceil(8) + 4 * values.iter().filter(|value| value.to_bits() != 0).count();
        bytes - bytes.min(packed as u64)
    };
    let wanted = dense - listing.0.take().iter().map(saved).sum::<u64>();
    let packed = kept_on(&device, &vgg.network(), batch, sparse(Rc::new(Keep)));
    let half = kept_on(
        &device,
        &vgg.network(),
        batch,
        Rc::new(Encoded::new(sparse(Rc::new(Keep)), Encoding::Half(HalfType::Bf16))),
    );
    println!("{dense} bytes, {packed} without zeros, {half} without zeros and in 16 bits");
    assert_eq!(packed, wanted);
    assert!(10 * packed < 9 * dense && 10 * half < 6 * packed, "{dense}, {packed}, {half}");
    assert!(packed <= kept(&vgg.network(), batch, sparse(Rc::new(Keep))), "a prediction counts no zeros");
}
