//! Llama's parameters under any cut, and the sizes of the published presets. (`crates/engine/tests/suite/llama.rs`
//! compares it with PyTorch.)

use meshwork_core::{Axis, Mesh};
use meshwork_models::llama::{Llama, LlamaConfig, PRESETS};
use meshwork_nn::{Model, StageSpec};
use meshwork_tensor::{Declarations, Role};

fn preset(name: &str) -> LlamaConfig {
    PRESETS.into_iter().find(|(preset, _)| *preset == name).unwrap().1
}

fn declared(config: LlamaConfig, tp: usize, parts: &[StageSpec]) -> Declarations {
    let (mut all, mesh) = (Declarations::new(), Mesh::new([(Axis::Tp, tp)]).unwrap());
    for part in parts {
        Llama::new(config).stage(&mut all, &mesh, part).unwrap();
    }
    all
}

/// The presets have the numbers of parameters of the published models.
#[test]
fn published_shapes_have_their_published_sizes() {
    let sizes = [
        ("llama-tiny", 1_049_728),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ];
    for (name, size) in sizes {
        let config = preset(name);
        let all = declared(config, 4, &StageSpec::cut(&[config.num_layers]));
        assert_eq!(all.specs().iter().map(|spec| spec.global_elements()).sum::<usize>(), size, "{name}");
    }
}

/// Any cut into stages, and any degree, declares the same parameters; norms are not decayed.
#[test]
fn any_cut_and_degree_declares_the_same_parameters() {
    let config = preset("llama-tiny");
    let names = |all: &Declarations| {
        all.specs().iter().map(|spec| (spec.name.clone(), spec.dims, spec.role, spec.init)).collect::<Vec<_>>()
    };
    let whole = names(&declared(config, 1, &StageSpec::cut(&[4])));
    for (tp, cut) in [(1, &[2, 2][..]), (2, &[0, 1, 3]), (4, &[4, 0])] {
        assert_eq!(names(&declared(config, tp, &StageSpec::cut(cut))), whole, "tp={tp}, {cut:?}");
    }
    assert!(whole.iter().all(|(name, _, role, _)| name.contains("norm") == (*role == Role::Norm)));
    let tied = declared(LlamaConfig { tie_embeddings: true, ..config }, 1, &StageSpec::cut(&[4]));
    assert_eq!(tied.specs().len(), whole.len() - 1);
}
