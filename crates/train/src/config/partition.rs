//! How layers are dealt to stages: `pipeline.partition`. All other code works with the list; `uniform` is short for one.

use super::Config;
use super::fault::Fault;
use super::settings::Settings;
use super::size::MAX_LAYERS;

const KEY: &str = "pipeline.partition";
const LAYERS: &str = "model.num_layers";
const STAGES: &str = "parallelism.pp";

/// As even as can be, earlier stages first where it does not divide: the last one also has the head.
fn uniform(layers: usize, stages: usize) -> Vec<usize> {
    (0..stages).map(|stage| layers / stages + usize::from(stage < layers % stages)).collect()
}

/// Notes what is wrong with the partition, and gives the configuration its list: the uniform one where the given one is at
/// fault, and none where there cannot be one, since a number of stages that is at fault may be absurd.
pub(crate) fn deal(config: &mut Config, settings: &mut Settings) {
    if !settings.sound(&[STAGES]) {
        return;
    }
    let layers = config.model.num_layers;
    let stages = config.parallelism.pp.saturating_mul(config.pipeline.virtual_stages);
    let list = settings.given::<Vec<usize>>(KEY);
    let mut faults = match &list {
        Some(list) => misdealt(list, stages, settings.sound(&[LAYERS]).then_some(layers)),
        None if layers < stages && settings.sound(&[LAYERS, KEY]) => {
            let problem = format!("fewer layers than stages: {STAGES} = {stages} needs a layer for each");
            let valid = format!("use {stages} layers or more, or pp of at most {layers}");
            vec![Fault::new(LAYERS, layers, problem, valid)]
        }
        None => vec![],
    };
    config.pipeline.partition = match list {
        Some(list) if faults.is_empty() => list,
        _ if stages <= layers.min(MAX_LAYERS) => uniform(layers, stages),
        _ => vec![],
    };
    settings.faults.append(&mut faults);
}

/// What is wrong with a list for so many stages, and for so many layers if that is known.
fn misdealt(list: &[usize], stages: usize, layers: Option<usize>) -> Vec<Fault> {
    let of_layers = layers.map_or(String::new(), |layers| format!(" that add up to {layers}"));
    let valid = format!("use \"uniform\", or a list of {stages}{of_layers}");
    let dealt = list.iter().fold(0usize, |sum, &layers| sum.saturating_add(layers));
    let sum =
        layers.filter(|&layers| layers != dealt).map(|layers| format!("deals {dealt} layers, not {LAYERS} = {layers}"));
    let length = (list.len() != stages).then(|| format!("is for {} stages, not {STAGES} = {stages}", list.len()));
    [sum, length].into_iter().flatten().map(|problem| Fault::new(KEY, format!("{list:?}"), problem, &valid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_is_as_even_as_can_be() {
        for (layers, stages, expected) in
            [(4, 1, vec![4]), (4, 2, vec![2, 2]), (7, 3, vec![3, 2, 2]), (5, 4, vec![2, 1, 1, 1])]
        {
            assert_eq!(uniform(layers, stages), expected);
        }
    }
}
