//! LoRA as PEFT describes it: rank, alpha and the names of the linear layers that have an adapter, and where A and B
//! of each lie in `adapter_model.safetensors`.
//!
//! PEFT names the linear layers of `transformers`. A weight here may hold several of them, as keys and values: then
//! each has its own adapter. Or one of them may be several weights here, as the fused queries, keys and values of a
//! Phi-3: then these have one A, and a part of B each.

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

/// A linear layer of `transformers`: a matrix `[outputs, inputs]`.
struct Module {
    /// Its name, without the prefix of all names.
    name: String,
    /// The weights here that it holds.
    weights: Vec<Held>,
}

/// A weight, and the matrix of it that a module holds; `None`: all of it.
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
fn is_end(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

impl Module {
    /// Its adapter's part beside one of its weights.
    fn adapter(&self, held: &Held) -> AdapterSpec {
        let layer = held.weight.name.rsplit('.').nth(1).unwrap_or_default();
        let part = if self.weights.len() > 1 { format!(".{layer}") } else { String::new() };
        let [a, b] = [format!("{}.lora_A.weight", self.name), format!("{}.lora_B{part}.weight", self.name)];
        AdapterSpec { a, b, matrix: held.matrix }
    }

    /// Whether adapters fit beside all of its weights.
    fn is_adaptable(&self) -> bool {
        self.weights.iter().all(|held| self.adapter(held).specs(&held.weight, 1).is_ok())
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
                let name =
                    |matrix: &str| format!("base_model.model.{}{}.{matrix}.weight", self.family.prefix, module.name);
                if seen.insert(a.name.clone()) {
                    let shape = [lora.rank, a.dims[1..].iter().product()];
                    let parts = TensorPart::same(name("lora_A"), &a.dims, &shape);
                    all.push(AdapterParameter { spec: a, parts });
                }
                let weight = layout::parts(self, &held.weight.name, held.weight.dims);
                let of_module = weight.iter().filter(|part| module_of(part) == Some(&*module.name));
                let parts = of_module.map(|part| of_b(part, held, lora.rank, name("lora_B"))).collect();
                all.push(AdapterParameter { spec: b, parts });
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

    /// The modules that have an adapter.
    fn targeted(&self, lora: &Lora) -> Result<Vec<Module>, Error> {
        let (can, cannot): (Vec<Module>, Vec<Module>) = self.modules()?.into_iter().partition(Module::is_adaptable);
        let whole = |module: &Module| format!("{}{}", self.family.prefix, module.name);
        let last = |module: &Module| module.name.rsplit('.').next().unwrap_or_default().to_owned();
        let mut known = Vec::new();
        for name in can.iter().map(last) {
            if !known.contains(&name) {
                known.push(name);
            }
        }
        let valid = format!("use some of {}, with commas, or {ALL_LINEAR}", known.join(", "));
        let refuse = |problem: String| Err(Error::Lora { problem, valid: valid.clone() });
        for target in lora.targets.iter().filter(|target| *target != ALL_LINEAR) {
            let is_named = |modules: &[Module]| modules.iter().any(|module| is_end(&whole(module), target));
            if is_named(&cannot) {
                return refuse(format!("{target} names matrices of experts, which take no adapter"));
            }
            if !is_named(&can) {
                return refuse(format!("{target} names no linear layer of the blocks"));
            }
        }
        if lora.targets.is_empty() {
            return refuse("there are no targets".to_owned());
        }
        Ok(can.into_iter().filter(|module| lora.has(&whole(module))).collect())
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
            let is_one = firsts.len() == 1;
            for (name, part) in firsts {
                let matrix = (!is_one).then(|| number(&weight, part));
                let held = Held { weight: weight.clone(), matrix };
                match modules.iter_mut().find(|module| module.name == name) {
                    Some(module) => module.weights.push(held),
                    None => modules.push(Module { name: name.to_owned(), weights: vec![held] }),
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

/// The number of the matrix of a weight that a part is.
fn number(weight: &ParamSpec, part: &TensorPart) -> usize {
    let numbering = weight.group.matrices.into_iter().flat_map(|of| of.numbering(weight.dims.len()));
    numbering.map(|dim| part.ranges[dim].start).last().unwrap_or(0)
}

/// The part of `B [out.., rank]` that lies where a part of the weight `[out.., in..]` lies in its matrix.
fn of_b(part: &TensorPart, held: &Held, rank: usize, tensor: String) -> TensorPart {
    let (dims, matrices) = (&held.weight.dims, held.weight.group.matrices.unwrap_or(Matrices::new(0, 1)));
    let outputs = dims.len() - matrices.columns;
    let inputs: usize = dims[outputs..].iter().product();
    // The rows of the tensor are outputs, but in files that have their matrices as `[in, out]`.
    let row = |element: usize| if is_straight(part) { element / inputs } else { element };
    let rows: usize = part.shape.iter().product::<usize>() / inputs;
    let fixed = held.matrix.and_then(|_| matrices.numbering(dims.len()).next());
    let kept: Vec<usize> = (0..outputs).filter(|dim| Some(*dim) != fixed).collect();
    let ranges: Vec<Range<usize>> =
        kept.iter().map(|&dim| part.ranges[dim].clone()).chain(std::iter::once(0..rank)).collect();
    let strides = kept.iter().map(|&dim| row(part.strides[dim]) * rank).chain([1]).collect();
    TensorPart::of(tensor, &[rows, rank], ranges, row(part.start) * rank, strides)
}
