//! On a device whose memory the host cannot read: host access is an error, parameters have the CPU's values, update
//! rules run as data, and collectives work on its memory. `devices.rs` checks that every operation has the CPU's bits.

use meshwork_core::comm::{ReduceOp, record};
use meshwork_core::{Axis, Buffer, BufferError, DType, Group, Mesh};
use meshwork_cpu::Cpu;
use meshwork_optim::{AdamW, OptimError, Optimizer, Rule, Sgd, Update};
use meshwork_tensor::kernel::FlatParts;
use meshwork_tensor::{Declarations, Device, Error, Init, Params, Placement, Role};
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_testkit::run_world;
use std::sync::Arc;

fn device() -> Arc<dyn Device> {
    Opaque::device(Cpu::device())
}

fn upload(device: &Arc<dyn Device>, values: &[f32]) -> Buffer {
    device.upload(&Buffer::from_slice(values)).unwrap()
}

fn read(device: &Arc<dyn Device>, buffer: &Buffer) -> Vec<f32> {
    device.download(buffer).unwrap().as_slice().unwrap().to_vec()
}

#[test]
fn the_host_reads_and_writes_by_upload_and_download_alone() {
    let device = device();
    let mut x = upload(&device, &[1.0, 2.0, 3.0]);
    assert!(!x.is_host());
    assert!(matches!(x.as_slice::<f32>(), Err(BufferError::NotHost { dtype: DType::F32, count: 3 })));
    assert!(matches!(x.as_mut_slice::<f32>(), Err(BufferError::NotHost { .. })));
    assert_eq!(read(&device, &x.slice(1..3).unwrap()), [2.0, 3.0]);

    let host = device.download(&x).unwrap();
    device.upload_into(&Buffer::from_slice(&[9.0f32]), &mut x, 1).unwrap();
    assert_eq!(read(&device, &x), [1.0, 9.0, 3.0]);
    assert_eq!(host.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0], "a download is a copy");
    assert_eq!(device.meter().downloads().calls, 3);
}

#[test]
fn what_is_shared_is_not_written() {
    let device = device();
    let mut x = upload(&device, &[1.0, 2.0]);
    let half = x.slice(0..1).unwrap();
    let refused = device.pointwise().unwrap().add_assign(&mut x, 0, &upload(&device, &[1.0, 1.0]));
    assert!(matches!(refused, Err(Error::Buffer(BufferError::Shared { .. }))));
    drop(half);
    device.pointwise().unwrap().add_assign(&mut x, 0, &upload(&device, &[1.0, 1.0])).unwrap();
    assert_eq!(read(&device, &x), [2.0, 3.0]);
}

#[test]
#[should_panic(expected = "a kernel of the opaque device was given memory of another one")]
fn memory_of_the_host_is_refused_by_its_kernels() {
    let _ = device().pointwise().unwrap().gelu(&Buffer::zeros(DType::F32, 2));
}

/// Other devices would train from zeros if `Params` wrote initial values only to host slices.
#[test]
fn parameters_begin_with_the_same_values_on_every_device() {
    let mut all = Declarations::new();
    let placement = Placement::replicated().shard(Axis::Tp, 1);
    let w = all.declare("w", &[3, 7], placement, Role::Weight, Init::Normal { std: 0.5 }).unwrap();
    let gain = all.declare("gain", &[4], Placement::replicated(), Role::Norm, Init::Ones).unwrap();
    let bias = all.declare("bias", &[2], Placement::replicated(), Role::Bias, Init::Zeros).unwrap();
    let (all, mesh) = (Arc::new(all), Mesh::new([(Axis::Tp, 2)]).unwrap());
    for rank in 0..2 {
        let build = |device| {
            let layout = [vec![bias, w], vec![gain]];
            Params::new(all.clone(), &mesh, mesh.coords(rank), &device, &layout, 3).unwrap()
        };
        let (cpu, mut params) = (build(Cpu::device()), build(device()));
        for id in [w, gain, bias] {
            assert_eq!(params.read(id).unwrap(), cpu.read(id).unwrap());
            assert_eq!(params.read(id).unwrap(), params.value(id).unwrap().to_vec::<f32>().unwrap());
        }
        assert!(params.read(w).unwrap().iter().any(|&value| value != 0.0));

        // Only the named parameter is written; a copy keeps the old values.
        let (before, old) = (params.copy().unwrap(), params.read(w).unwrap());
        let new: Vec<f32> = (0..old.len()).map(|i| i as f32).collect();
        params.write(w, &new).unwrap();
        assert_eq!([params.read(w).unwrap(), before.read(w).unwrap()], [new, old]);
        assert_eq!(params.read(bias).unwrap(), [0.0; 2]);
        assert_eq!(
            params.write(w, &[1.0]).unwrap_err().to_string(),
            "write a parameter: 1 elements for the 12 that this rank holds (shapes [[3, 4]])"
        );
        let value = params.value(w).unwrap();
        assert!(params.write(w, &[0.0; 12]).unwrap_err().to_string().contains("is shared"), "somebody reads it");
        drop(value);

        // A vector laid out as the flat buffer: gradients, states.
        let device = params.value(w).unwrap().device().clone();
        let mut state = device.zeros(DType::F32, params.flats()[0].count()).unwrap();
        params.write_into(w, &mut state, &(0..14), &[2.0; 12]).unwrap();
        assert_eq!(params.read_from(w, &state).unwrap(), [2.0; 12]);
        assert_eq!(params.read_from(bias, &state).unwrap(), [0.0; 2]);
    }
}

/// Meta draws no initial values, however large a parameter is, and copies nothing to or from the host.
#[test]
fn a_device_without_values_initialises_nothing() {
    let mut all = Declarations::new();
    let dims = [1 << 20, 1 << 20];
    let id = all.declare("w", &dims, Placement::replicated(), Role::Weight, Init::Normal { std: 1.0 }).unwrap();
    let (device, mesh) = (meshwork_tensor::meta::Meta::device(), Mesh::default());
    let params = Params::new(Arc::new(all), &mesh, mesh.coords(0), &device, &[vec![id]], 0).unwrap();
    assert_eq!(params.flats()[0].bytes(), 4 << 40);
    assert_eq!((device.meter().uploads().calls, device.meter().downloads().calls), (0, 0));
}

#[derive(Debug)]
struct Mine;

impl Optimizer for Mine {
    fn name(&self) -> &str {
        "mine"
    }

    fn state_names(&self) -> &[&'static str] {
        &[]
    }

    fn update(&self, _: Update, weights: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) -> Result<(), OptimError> {
        weights.fill(7.0);
        Ok(())
    }
}

#[test]
fn update_rules_run_as_data_and_a_users_own_is_refused_by_name() {
    let update = Update { step: 2, lr: 0.1, grad_scale: 0.5, decay_factor: 1.0 };
    let run = |device: &Arc<dyn Device>, rule: &Rule| -> meshwork_tensor::Result<Vec<Vec<f32>>> {
        let mut weights = upload(device, &[1.0, 2.0, 3.0, 4.0]);
        let grads = upload(device, &[0.5, -0.5, 0.25, 1.0]);
        let mut states: Vec<Buffer> =
            rule.state_names().iter().map(|_| upload(device, &[0.1, 0.2, 0.3, 0.4])).collect();
        let ranges = [1..2, 2..3];
        let flat = FlatParts { weights: &mut weights, grads: &grads, states: &mut states, ranges: &ranges };
        device.optim()?.update(rule, update, &mut [flat])?;
        Ok([weights].iter().chain(&states).map(|buffer| read(device, buffer)).collect())
    };
    for rule in [AdamW::default().into(), Sgd { momentum: 0.9, weight_decay: 0.1 }.into(), Sgd::default().into()] {
        assert_eq!(run(&device(), &rule).unwrap(), run(&Cpu::device(), &rule).unwrap(), "{}", rule.name());
    }
    let mine = Rule::custom(Mine);
    assert_eq!(run(&Cpu::device(), &mine).unwrap(), [[1.0, 7.0, 7.0, 4.0]]);
    assert_eq!(
        run(&device(), &mine).unwrap_err().to_string(),
        "device opaque has no kernel for the update rule mine, and the host cannot read its memory: use a rule of meshwork-optim, or a \
         device in host memory"
    );
}

#[test]
fn collectives_work_on_its_memory_and_on_the_hosts() {
    run_world(2, |world| {
        let world = Group::from(opaque::communicator(Arc::clone(world.communicator())));
        let (device, me) = (device(), world.rank() as f32);
        let sum = world.all_reduce(upload(&device, &[me, 1.0]), ReduceOp::Sum).unwrap();
        assert!(!sum.is_host());
        assert_eq!(read(&device, &sum), [1.0, 2.0]);

        // An input that others refer to does not change, and is shared until the operation is over.
        let (input, room) = (upload(&device, &[me]), device.alloc(DType::F32, 2).unwrap());
        let gathered = world.all_gather(input.clone(), room).unwrap();
        assert_eq!((read(&device, &gathered), read(&device, &input)), (vec![0.0, 1.0], vec![me]));

        // Part of a vector, to the other rank and back.
        let (mine, room) = (upload(&device, &[9.0, me, 9.0]), device.alloc(DType::F32, 1).unwrap());
        let (other, part) = (1 - world.rank(), mine.slice(1..2).unwrap());
        let sent = world.start_send(part, other, 7).unwrap();
        let got = world.recv(room, other, 7).unwrap();
        assert!(!sent.wait().unwrap().is_host());
        assert_eq!((read(&device, &got), read(&device, &mine)), (vec![1.0 - me], vec![9.0, me, 9.0]));

        let mut host = [me];
        world.all_reduce_slice(&mut host, ReduceOp::Max).unwrap();
        assert_eq!(host, [1.0]);
    });
}

/// A communicator that records copies nothing; yet in a group of one rank every collective is the identity.
#[test]
fn in_a_group_of_one_rank_a_collective_is_the_identity() {
    let device = device();
    let alone = Group::from(opaque::communicator(record::communicator("world", 0, vec![0]).unwrap()));
    let gathered = alone.all_gather(upload(&device, &[3.0]), device.zeros(DType::F32, 1).unwrap()).unwrap();
    assert_eq!(read(&device, &gathered), [3.0]);
}
