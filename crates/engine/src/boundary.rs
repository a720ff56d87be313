//! The cuts of a model at which values may be compressed: cuts between stages, and virtual cuts, which a rank simulates
//! within a stage.

use crate::prelude::*;
use meshwork_nn::StageSpec;

/// A cut of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Layers before it.
    pub layer: usize,
    /// Its name, by the layers before it: the same on every mesh.
    pub name: String,
    /// The stages before and behind it: the same stage twice if it lies within one.
    pub stages: [usize; 2],
    /// Whether it is a virtual cut: values are compressed there also where they stay on a rank.
    pub is_virtual: bool,
}

impl Boundary {
    /// The name of the value that crosses it.
    pub fn value(&self, direction: Direction) -> String {
        match direction {
            Direction::Activation => format!("{}.activation", self.name),
            Direction::Gradient => format!("{}.gradient", self.name),
        }
    }
}

/// The cuts of a model with these stages, in the order of the layers, and the parts of each stage between them, with
/// the cut behind each.
///
/// # Errors
/// Virtual cuts that do not increase, or behind layers that the model does not have.
#[allow(clippy::type_complexity, reason = "two lists, taken apart at once")]
pub fn boundaries(
    stages: &[StageSpec],
    virtual_cuts: &[usize],
) -> Result<(Vec<Boundary>, Vec<Vec<(StageSpec, Option<usize>)>>), PlanError> {
    let layers = stages.last().map_or(0, |stage| stage.layers.end);
    if !virtual_cuts.is_sorted_by(|a, b| a < b) || virtual_cuts.iter().any(|&cut| cut > layers) {
        return Err(PlanError::VirtualCuts { cuts: virtual_cuts.to_vec(), layers });
    }
    let ends: Vec<usize> = stages.iter().filter(|stage| !stage.last).map(|stage| stage.layers.end).collect();
    let (mut all, mut parts) = (Vec::<Boundary>::new(), Vec::with_capacity(stages.len()));
    for (number, stage) in stages.iter().enumerate() {
        let inside = |&&cut: &&usize| match (cut == stage.layers.start, cut == stage.layers.end) {
            _ if ends.contains(&cut) => false,
            (false, false) => stage.layers.contains(&cut),
            (at_start, at_end) => at_start && stage.first || at_end && stage.last,
        };
        let within = virtual_cuts.iter().filter(inside).map(|&cut| (cut, number));
        let behind = (!stage.last).then_some((stage.layers.end, number + 1));
        let (mut of_stage, mut start, mut first) = (Vec::new(), stage.layers.start, stage.first);
        for (layer, next) in within.chain(behind) {
            // Stages without layers have several cuts behind one layer, of which the first one may be virtual.
            let before = all.iter().filter(|boundary| boundary.layer == layer).count();
            let name = if before == 0 { format!("cut.{layer}") } else { format!("cut.{layer}.{before}") };
            let is_virtual = before == 0 && virtual_cuts.contains(&layer);
            of_stage.push((StageSpec { layers: start..layer, first, last: false }, Some(all.len())));
            all.push(Boundary { layer, name, stages: [number, next], is_virtual });
            (start, first) = (layer, false);
        }
        if stage.last {
            of_stage.push((StageSpec { layers: start..stage.layers.end, first, last: true }, None));
        }
        parts.push(of_stage);
    }
    Ok((all, parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of cuts, `*` for virtual ones, and the parts of each stage: `e` for an embedding, `h` for a head,
    /// numbers of layers.
    fn drawn(layers: &[usize], virtual_cuts: &[usize]) -> (String, String) {
        let (all, parts) = boundaries(&StageSpec::cut(layers), virtual_cuts).unwrap();
        let name = |cut: &Boundary| format!("{}{}", cut.name, if cut.is_virtual { "*" } else { "" });
        let part = |(part, behind): &(StageSpec, Option<usize>)| {
            let ends = [part.first, part.last].map(|is| is as usize);
            let behind = behind.map_or(String::new(), |cut| format!("|{cut}"));
            format!("{}{}{}{behind}", &"e"[..ends[0]], part.layers.len(), &"h"[..ends[1]])
        };
        let stage = |parts: &Vec<_>| parts.iter().map(part).collect::<Vec<_>>().join(" ");
        let (names, stages): (Vec<_>, Vec<_>) = (all.iter().map(name).collect(), parts.iter().map(stage).collect());
        (names.join(" "), stages.join(", "))
    }

    #[test]
    fn a_cut_has_its_name_wherever_stages_end() {
        let of = |layers: &[usize], cuts: &[usize]| drawn(layers, cuts);
        let text = |names: &str, stages: &str| (names.to_owned(), stages.to_owned());
        assert_eq!(of(&[2, 2], &[]), text("cut.2", "e2|0, 2h"));
        assert_eq!(of(&[4], &[1, 2, 3]), text("cut.1* cut.2* cut.3*", "e1|0 1|1 1|2 1h"));
        assert_eq!(of(&[2, 2], &[1, 2, 3]), text("cut.1* cut.2* cut.3*", "e1|0 1|1, 1|2 1h"));
        assert_eq!(of(&[1, 3], &[2]), text("cut.1 cut.2*", "e1|0, 1|1 2h"));
        assert_eq!(of(&[4], &[0, 4]), text("cut.0* cut.4*", "e0|0 4|1 0h"));
        assert_eq!(of(&[0, 0, 2, 0], &[0, 2]), text("cut.0* cut.0.1 cut.2*", "e0|0, 0|1, 2|2, 0h"));
    }

    #[test]
    fn virtual_cuts_increase_and_have_layers_before_them() {
        for cuts in [&[2, 1][..], &[1, 1], &[5]] {
            let error = boundaries(&StageSpec::cut(&[4]), cuts).unwrap_err().to_string();
            assert!(error.contains("increasing numbers of layers from 0 to 4"), "{error}");
        }
    }
}
