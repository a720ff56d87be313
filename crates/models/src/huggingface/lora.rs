//! LoRA as PEFT describes it: rank, alpha and the names of the linear layers that have an adapter, and where A and B
//! of each lie in `adapter_model.safetensors`.
//!
//! PEFT names the linear layers of `transformers`. A weight here may hold several of them, as keys and values: then
//! each has its own adapter. Or one of them may be several weights here, as the fused queries, keys and values of a
//! Phi-3: then these have one A, and a part of B each. The matrices of experts are linear layers there and one weight
//! here, beside which A and B of all experts are one parameter each.

use super::{Architecture, Error, layout};
use crate::families::TensorPart;
use meshwork_tensor::param::{AdapterSpec, Adapters, Matrices};
use meshwork_tensor::{ParamSpec, Role};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The word for all linear layers of the blocks.
pub const ALL_LINEAR: &str = "all-linear";

/// The adapters of a model, as PEFT describes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rows of each A, and columns of each B.
    pub rank: usize,
    /// The result of an adapter is scaled by alpha / rank.
    pub alpha: f64,
    /// Whether by alpha / √rank instead (Kalajdzievski, 2023).
    pub rslora: bool,
    /// Probability of dropping an element of the input of an adapter.
    pub dropout: f32,
    /// The linear layers that have an adapter: the ends of their names, or [`ALL_LINEAR`].
    pub targets: Vec<String>,
}

/// A linear layer of `transformers`: a matrix `[outputs, inputs]`; or that of each expert of a layer.
struct Module {
    /// Its name, without the prefix of all names; the names of those of all experts, in their order.
    names: Vec<String>,
    /// The weights here that it holds.
    weights: Vec<Held>,
}

/// A weight, and the matrix of it, or of each of its experts, that a module holds; `None`: all of it.
struct Held {
    weight: ParamSpec,
    matrix: Option<usize>,
}

/// A parameter of an adapter, with its parts in the files of PEFT.
pub(super) struct AdapterParameter {
    pub spec: ParamSpec,
    pub parts: Vec<TensorPart>,
}

impl Lora {
    /// The factor of the result of an adapter.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Whether a linear layer of this whole name has an adapter.
    fn has(&self, module: &str) -> bool {
        self.targets.iter().any(|target| target == ALL_LINEAR || is_end(module, target))
    }
}

/// Whether a name is `end`, or ends with it behind a point.
pub(super) fn is_end(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

impl Module {
    /// Its adapter's part beside one of its weights.
    fn adapter(&self, held: &Held) -> AdapterSpec {
        let mut here = held.weight.name.rsplit('.').skip(1);
        let part = if self.weights.len() > 1 { format!(".{}", here.next().unwrap_or_default()) } else { String::new() };
        let name = match &self.names[..] {
            [name] => name.clone(),
            _ => format!("{}.{}", held.weight.name.rsplitn(3, '.').last().unwrap_or_default(), self.last_word()),
        };
        let [a, b] = [format!("{name}.lora_A.weight"), format!("{name}.lora_B{part}.weight")];
        AdapterSpec { a, b, matrix: held.matrix }
    }

    /// Whether it is a matrix of each expert.
    fn is_of_experts(&self) -> bool {
        self.weights.iter().any(|held| held.weight.expert_dims() > 0)
    }

    /// The last word of its name, by which targets name it.
    fn last_word(&self) -> String {
        self.names.first().and_then(|name| name.rsplit('.').next()).unwrap_or_default().to_owned()
    }
}

impl Architecture {
    /// The adapters that `lora` describes, for [`Adapted`](meshwork_nn::Adapted).
    ///
    /// # Errors
    /// Targets that name no linear layer of the blocks; a rank of more than the rows or columns of a matrix.
    pub fn adapters(&self, lora: &Lora) -> Result<Adapters, Error> {
        let mut of: BTreeMap<String, Vec<AdapterSpec>> = BTreeMap::new();
        for module in self.targeted(lora)? {
            for held in &module.weights {
                let adapter = module.adapter(held);
                adapter.specs(&held.weight, lora.rank)?;
                of.entry(held.weight.name.clone()).or_default().push(adapter);
            }
        }
        Ok(Adapters { rank: lora.rank, scale: lora.scale(), dropout: lora.dropout, of, base: None })
    }

    /// The parameters of these adapters, with their parts in the files of PEFT, in the order of the layers.
    pub(super) fn adapter_parameters(&self, lora: &Lora) -> Result<Vec<AdapterParameter>, Error> {
        let (mut all, mut seen) = (Vec::new(), BTreeSet::new());
        for module in self.targeted(lora)? {
            for held in &module.weights {
                let [a, b] = module.adapter(held).specs(&held.weight, lora.rank)?;
                let tensor =
                    |name: &str, matrix: &str| format!("base_model.model.{}{name}.{matrix}.weight", self.family.prefix);
                if seen.insert(a.name.clone()) {
                    let experts = held.weight.expert_dims();
                    let shape = [lora.rank, a.dims[experts + 1..].iter().product()];
                    let named = module.names.iter().map(|name| tensor(name, "lora_A"));
                    let parts = match experts {
                        0 => named.flat_map(|name| TensorPart::same(name, &a.dims, &shape)).collect(),
                        _ => named
                            .zip(0..)
                            .map(|(name, at)| TensorPart::at(name, &a.dims, vec![(0, at)], &shape))
                            .collect(),
                    };
                    all.push(AdapterParameter { spec: a, parts });
                }
                let weight = layout::parts(self, &held.weight.name, held.weight.dims);
                let of_module = |part: &TensorPart| {
                    let name = module_of(part).filter(|name| module.names.iter().any(|of| of == name))?;
                    Some(of_b(part, held, lora.rank, tensor(name, "lora_B")))
                };
                all.push(AdapterParameter { spec: b, parts: weight.iter().filter_map(of_module).collect() });
            }
        }
        Ok(all)
    }

    /// Whether files have the matrices of the blocks as `[in, out]`.
    pub(super) fn has_transposed_matrices(&self) -> bool {
        let weights = self.modules().unwrap_or_default();
        weights.iter().flat_map(|module| &module.weights).any(|held| {
            let parts = layout::parts(self, &held.weight.name, held.weight.dims);
            parts.iter().any(|part| !is_straight(part))
        })
    }

    /// The names of layers and of weights by which `peft` finds these adapters in a model with experts
    /// (`target_modules`, `target_parameters`). To it `all-linear` has routers too, and names that end as those of
    /// experts' matrices are theirs alone: other layers of such names are named by their weights.
    pub(super) fn peft_targets(&self, lora: &Lora) -> Result<[Vec<String>; 2], Error> {
        let of_experts: Vec<String> =
            self.modules()?.iter().filter(|module| module.is_of_experts()).map(Module::last_word).collect();
        let targeted = self.targeted(lora)?;
        let has_experts = targeted.iter().any(Module::is_of_experts);
        let is_theirs = |name: &str| name.rsplit('.').next().is_some_and(|word| of_experts.iter().any(|of| of == word));
        let all = lora.targets.iter().any(|target| target == ALL_LINEAR);
        let names = if all { self.last_words()? } else { lora.targets.clone() };
        let dense = targeted.iter().filter(|module| !module.is_of_experts() && is_theirs(&module.last_word()));
        let weight = |name: &String| format!("{}{name}.weight", self.family.prefix);
        let weights = dense.flat_map(|module| &module.names).map(weight).collect();
        Ok([names.into_iter().filter(|name| has_experts || !is_theirs(name)).collect(), weights])
    }

    /// What names all linear layers of the blocks: the last words of their names.
    fn last_words(&self) -> Result<Vec<String>, Error> {
        let mut words: Vec<String> = Vec::new();
        for word in self.modules()?.iter().map(Module::last_word) {
            if !words.contains(&word) {
                words.push(word);
            }
        }
        Ok(words)
    }

    /// The modules that have an adapter.
    fn targeted(&self, lora: &Lora) -> Result<Vec<Module>, Error> {
        let modules = self.modules()?;
        let whole = |name: &String| format!("{}{name}", self.family.prefix);
        let refuse = |problem: String| {
            let words = self.last_words()?.join(", ");
            Err(Error::Lora { problem, valid: format!("use some of {words}, with commas, or {ALL_LINEAR}") })
        };
        for target in lora.targets.iter().filter(|target| *target != ALL_LINEAR) {
            if !modules.iter().flat_map(|module| &module.names).any(|name| is_end(&whole(name), target)) {
                return refuse(format!("{target} names no linear layer of the blocks"));
            }
        }
        if lora.targets.is_empty() {
            return refuse("there are no targets".to_owned());
        }
        let mut targeted = Vec::new();
        for module in modules {
            let (has, lacks): (Vec<&String>, Vec<&String>) =
                module.names.iter().partition(|name| lora.has(&whole(name)));
            match (has.first(), lacks.first()) {
                (None, _) => {}
                (Some(has), Some(lacks)) => {
                    return refuse(format!(
                        "{has} is named and {lacks} is not, and all experts of a layer have an adapter or none"
                    ));
                }
                (Some(has), None) if module.is_of_experts() && lora.dropout > 0.0 => {
                    return Err(Error::Lora {
                        problem: format!(
                            "{has} is of an expert, to which tokens come in no order that dropout could draw by"
                        ),
                        valid: "use lora.dropout = 0, or targets that name no experts".to_owned(),
                    });
                }
                (Some(_), None) => targeted.push(module),
            }
        }
        Ok(targeted)
    }

    /// The linear layers of the blocks, as `transformers` has them.
    fn modules(&self) -> Result<Vec<Module>, Error> {
        let mut modules: Vec<Module> = Vec::new();
        let of_layers = |spec: &ParamSpec| spec.role == Role::Weight && spec.group.matrices.is_some();
        for weight in self.parameters()?.into_iter().filter(of_layers) {
            let parts = layout::parts(self, &weight.name, weight.dims);
            // The first part of each module.
            let mut firsts: Vec<(&str, &TensorPart)> = Vec::new();
            for part in &parts {
                let Some(name) = module_of(part) else { continue };
                if firsts.iter().all(|(first, _)| *first != name) {
                    firsts.push((name, part));
                }
            }
            // The matrices of the weight, or of each expert, with the names of their modules.
            let mut matrices: Vec<(usize, Vec<String>)> = Vec::new();
            for (name, part) in firsts {
                let matrix = number(&weight, part);
                match matrices.iter_mut().find(|(of, _)| weight.expert_dims() > 0 && *of == matrix) {
                    Some((_, names)) => names.push(name.to_owned()),
                    None => matrices.push((matrix, vec![name.to_owned()])),
                }
            }
            let is_one = matrices.len() == 1;
            for (matrix, names) in matrices {
                let held = Held { weight: weight.clone(), matrix: (!is_one).then_some(matrix) };
                match modules.iter_mut().find(|module| module.names == names) {
                    Some(module) => module.weights.push(held),
                    None => modules.push(Module { names, weights: vec![held] }),
                }
            }
        }
        Ok(modules)
    }
}

/// The module whose weight a part lies in; `None` of a bias.
fn module_of(part: &TensorPart) -> Option<&str> {
    part.tensor.strip_suffix(".weight")
}

/// Whether the inputs of an output are neighbours in its tensor.
fn is_straight(part: &TensorPart) -> bool {
    part.strides.last() == Some(&1)
}

/// The number of the matrix of a weight, or of an expert, that a part is.
fn number(weight: &ParamSpec, part: &TensorPart) -> usize {
    weight.numbering().map(|dim| part.ranges[dim].start).last().unwrap_or(0)
}

/// The part of `B [out.., rank]` that lies where a part of the weight `[out.., in..]` lies in its matrix.
fn of_b(part: &TensorPart, held: &Held, rank: usize, tensor: String) -> TensorPart {
    let (dims, matrices) = (&held.weight.dims, held.weight.group.matrices.unwrap_or(Matrices::new(0, 1)));
    let outputs = dims.len() - matrices.columns;
    let inputs: usize = dims[outputs..].iter().product();
    // The rows of the tensor are outputs, but in files that have their matrices as `[in, out]`.
    let row = |element: usize| if is_straight(part) { element / inputs } else { element };
    let rows: usize = part.shape.iter().product::<usize>() / inputs;
    let fixed = held.matrix.and_then(|_| held.weight.numbering().next());
    let kept: Vec<usize> = (0..outputs).filter(|dim| Some(*dim) != fixed).collect();
    let ranges: Vec<Range<usize>> =
        kept.iter().map(|&dim| part.ranges[dim].clone()).chain(std::iter::once(0..rank)).collect();
    let strides = kept.iter().map(|&dim| row(part.strides[dim]) * rank).chain([1]).collect();
    TensorPart::of(tensor, &[rows, rank], ranges, row(part.start) * rank, strides)
}
