//! Training on a device whose memory the host cannot read gives the CPU's bits: reports, weights, gradients and
//! optimizer states, on any mesh, with schedules whose steps overlap or whose weights change while they run, in bf16
//! and in canonical numerics.

use crate::mesh::cases::{ADAMW, Case, DROPOUT, LLAMA, PADDED, UNTIED};
use crate::mesh::world::{Piece, assert_same_pieces, assert_same_report, cpu, on_mesh, pieces, train};
use meshwork_core::Rank;
use meshwork_core::World;
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_train::config::{Config, ModelKind};
use meshwork_train::{Data, StepReport, TrainError, Trainer};
use std::sync::Arc;

const STEPS: usize = 2;

type Trained = (Vec<StepReport>, Vec<Piece>);

/// Trains from weights that were loaded from outside in part.
fn trained(mut trainer: Trainer, config: &Config, data: &Data) -> Result<Trained, TrainError> {
    let norm = if config.model.kind == ModelKind::Llama { "norm.weight" } else { "ln_f.bias" };
    trainer.load_parameter(norm, &[0.125; crate::mesh::cases::HIDDEN])?;
    let reports = (0..STEPS).map(|_| train(&mut trainer, data, config)).collect::<Result<_, _>>()?;
    Ok((reports, pieces(&trainer)?))
}

/// On every rank of the mesh, with memory and communicators that do not use host slices.
fn on_opaque_mesh(config: &Config, data: &Data) -> Vec<Trained> {
    let mesh = config.mesh().unwrap();
    let ranks = World::threads(&mesh).run(|world| {
        let rank = Arc::new(Rank::new(&mesh, opaque::communicator(world.communicator().clone()))?);
        let device = Opaque::device(cpu(config));
        trained(Trainer::new(config.model(), &config.plan()?, rank, device)?, config, data)
    });
    ranks.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn training_has_the_cpus_bits_where_the_host_reads_no_memory() {
    let mesh =
        Case { dp: 2, tp: 2, pp: 2, sequence_parallel: true, micros: 4, schedule: "1f1b", ..Case::alone(&DROPOUT) };
    let cases = [
        (Case::alone(&DROPOUT), ""),
        (mesh, ""),
        (mesh, "matmul_dtype = 'bf16'\n"),
        (mesh, "matmul_dtype = 'tf32'\n"),
        (Case { micros: 2, ..mesh }, "numerics = 'canonical'\n"),
        (Case { model: &LLAMA, dp: 1, tp: 4, ..mesh }, ""),
        (Case { model: &PADDED, dp: 1, tp: 4, ..mesh }, ""),
        // An update that may be rolled back, and versions of the weights.
        (Case { pp: 2, micros: 4, schedule: "zb_h2", ..Case::alone(&DROPOUT) }, ""),
        (Case { pp: 2, micros: 4, schedule: "pipedream", ..Case::alone(&UNTIED) }, "max_norm = 0.0\n"),
    ];
    for (case, more) in cases {
        let (config, data) = (case.config(&format!("{ADAMW}{more}")), case.model.data());
        assert_opaque_as_cpu(&format!("{case} {more}"), &config, &data);
    }
    for rule in ["lamb", "adafactor", "muon", "adam8bit"] {
        for (case, more) in [(mesh, ""), (Case { micros: 2, ..mesh }, "numerics = 'canonical'\n")] {
            let text = case.text(&format!("{}{more}", ADAMW.replace("adamw", rule)));
            let text = text.replace("[parallelism]\n", "[parallelism]\nzero_stage = 1\n");
            let (config, data) = (Config::from_toml(&text).unwrap(), case.model.data());
            assert_opaque_as_cpu(&format!("{case} {rule} {more}"), &config, &data);
        }
    }
}

/// Training on both devices gives the same bits.
#[track_caller]
pub fn assert_opaque_as_cpu(name: &str, config: &Config, data: &Data) {
    let reference = on_mesh(config, |trainer| trained(trainer, config, data));
    for (rank, (got, wanted)) in on_opaque_mesh(config, data).iter().zip(&reference).enumerate() {
        let what = format!("{name}: rank {rank}");
        assert_eq!(got.0.len(), STEPS, "{what}");
        for (got, wanted) in got.0.iter().zip(&wanted.0) {
            assert_same_report(&format!("{what}, step {}", wanted.step), got, wanted);
        }
        assert_same_pieces(&what, &got.1, &wanted.1);
    }
}

/// A step downloads only its report: the same number of copies for one micro-batch as for sixteen, and for two layers
/// as for six.
#[test]
fn downloads_of_a_step_depend_on_neither_micro_batches_nor_layers() {
    let downloads = |layers: usize, micros: usize, schedule: &'static str| -> Vec<u64> {
        let case = Case { dp: 2, pp: 2, micros, schedule, ..Case::alone(&UNTIED) };
        let text = case.text(ADAMW).replace("num_layers = 4", &format!("num_layers = {layers}"));
        let (config, data) = (Config::from_toml(&text).unwrap(), case.model.data());
        let mesh = config.mesh().unwrap();
        let ranks = World::threads(&mesh).run(|world| {
            let rank = Arc::new(Rank::new(&mesh, opaque::communicator(world.communicator().clone()))?);
            let device = Opaque::device(cpu(&config));
            let mut trainer = Trainer::new(config.model(), &config.plan()?, rank, device.clone())?;
            train(&mut trainer, &data, &config)?;
            let before = device.meter().downloads().calls;
            train(&mut trainer, &data, &config)?;
            Ok::<_, TrainError>(device.meter().downloads().calls - before)
        });
        ranks.unwrap_or_else(|error| panic!("{error}"))
    };
    assert_eq!(downloads(4, 4, "1f1b"), [1; 4], "the numbers of the step, and nothing else");
    for (layers, micros, schedule) in [(4, 8, "1f1b"), (2, 4, "1f1b"), (6, 2, "gpipe"), (4, 4, "zb_h2")] {
        assert_eq!(downloads(layers, micros, schedule), [1; 4], "{layers} layers, {micros} micro-batches, {schedule}");
    }
}
