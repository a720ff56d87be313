//! Low-rank adapters beside the weights of linear layers (LoRA; Hu et al., 2021, section 4.1): a frozen weight W
//! computes `W x + s · B A x`, and training changes A and B alone.
//!
//! A and B follow from the declaration of W, whose dims are outputs and inputs:
//!
//! | | dims | cut as | starts as |
//! |---|---|---|---|
//! | W | `[out.., in..]` | | |
//! | A | `[rank, in..]` | the inputs of W | uniform in ±1/√(number of inputs) |
//! | B | `[out.., rank]` | the outputs of W | zero |
//!
//! A weight may hold several matrices, as keys and values. Each of them may have an adapter of its own, or all of them
//! one that takes them for one matrix.
//!
//! Matrices that the mesh shares out, as those of experts, have an A and a B each, which are shared out with them: both
//! then have the dim that numbers experts in front, cut as that of W.

use super::{Declarations, Init, Matrices, ParamGroup, ParamId, ParamSpec, Placement, Role};
use crate::error::{Error, Result};
use meshwork_compress::Values;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The adapters of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adapters {
    /// Columns of each B, and rows of each A.
    pub rank: usize,
    /// The factor s of the product of both: alpha / rank, or alpha / √rank (rsLoRA; Kalajdzievski, 2023).
    pub scale: f64,
    /// Probability of dropping an element of the input of A.
    pub dropout: f32,
    /// The adapters of each weight, by the name of the weight.
    pub of: BTreeMap<String, Vec<AdapterSpec>>,
    /// How the frozen matrices of the model are stored, if in fewer bits (QLoRA).
    pub base: Option<Values>,
}

/// An adapter of a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSpec {
    /// The name of A. Adapters of one name share it, as those of queries and of keys do that are one product elsewhere.
    pub a: String,
    /// The name of B.
    pub b: String,
    /// The number of the matrix that it adapts, among those that the weight, or each expert of it, holds; `None`: all
    /// of them as one.
    pub matrix: Option<usize>,
}

/// An adapter as a layer reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// The parameter A, `[rank, in..]`, of experts `[experts, rank, in..]`.
    pub a: ParamId,
    /// The parameter B, `[out.., rank]`, of experts `[experts, out.., rank]`, where the outputs are those of its
    /// matrix.
    pub b: ParamId,
    /// The name under which its dropout draws: that of B.
    pub name: String,
    /// The matrix that it adapts, if it is one of several.
    pub matrix: Option<MatrixOf>,
}

/// A matrix among those that a weight holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixOf {
    /// The dim of the weight that numbers its matrices.
    pub dim: usize,
    /// The number of this one.
    pub index: usize,
    /// Their number.
    pub count: usize,
}

impl Adapters {
    /// The adapters of the weight of this name; none if it has none.
    pub fn of(&self, weight: &str) -> &[AdapterSpec] {
        self.of.get(weight).map_or(&[], Vec::as_slice)
    }

    /// The form in which a frozen parameter is [stored](ParamSpec::packed): a matrix of a linear layer as
    /// [`base`](Self::base) says, whether it has an adapter or not.
    pub fn packing(&self, spec: &ParamSpec) -> Option<Values> {
        self.base.filter(|_| spec.role == Role::Weight && spec.group.matrices.is_some())
    }

    /// Whether a parameter of this name is A or B of an adapter.
    pub fn has(&self, parameter: &str) -> bool {
        self.of.values().flatten().any(|adapter| adapter.a == parameter || adapter.b == parameter)
    }
}

impl AdapterSpec {
    /// The declarations of A and B beside a weight.
    ///
    /// # Errors
    /// A weight that is no matrix, or holds no matrix of this number; a rank of more than its rows or columns.
    pub fn specs(&self, weight: &ParamSpec, rank: usize) -> Result<[ParamSpec; 2]> {
        let refuse = |problem: String, valid: &str| {
            Err(Error::Declaration { name: weight.name.clone(), problem, valid: valid.to_owned() })
        };
        let Some(matrices) = weight.group.matrices.filter(|_| weight.role == Role::Weight) else {
            return refuse("it is no matrix, and takes no adapter".to_owned(), "name weights of linear layers");
        };
        let (dims, outputs, experts) = (&weight.dims[..], weight.dims.len() - matrices.columns, weight.expert_dims());
        let fixed = match self.matrix {
            None => None,
            Some(_) => Some(self.numbered(weight)?),
        };
        let rows: Vec<usize> = (experts..outputs).filter(|&dim| fixed.is_none_or(|of| of.dim != dim)).collect();
        let extents = |dims_of: &[usize]| dims_of.iter().map(|&dim| dims[dim]).collect::<Vec<_>>();
        let (of_each, out, input) = (&dims[..experts], extents(&rows), &dims[outputs..]);
        let least = out.iter().product::<usize>().min(input.iter().product());
        if rank == 0 || rank > least {
            return refuse(
                format!("no adapter of a matrix of {out:?} outputs and {input:?} inputs has rank {rank}"),
                &format!("use a rank of 1 to {least}"),
            );
        }
        // Each axis that cuts a dim of the weight cuts the same dim of A or B, and what is summed in blocks there is
        // here.
        let cut = |place: &dyn Fn(usize) -> Option<usize>| {
            let shards = weight.placement.shards().iter();
            let placement = shards.fold(Placement::replicated(), |placement, &(axis, dim)| match place(dim) {
                Some(dim) => placement.shard(axis, dim),
                None => placement,
            });
            let in_blocks = weight.placement.in_blocks().and_then(place);
            in_blocks.into_iter().fold(placement, Placement::summed_in_blocks)
        };
        let within = |dims_of: &[usize], dim| match dim < experts {
            true => Some(dim),
            false => dims_of.iter().position(|&of| of == dim).map(|at| experts + at),
        };
        let inputs: Vec<usize> = (outputs..dims.len()).collect();
        let of_a = cut(&|dim| within(&inputs, dim).map(|at| if dim < experts { at } else { at + 1 }));
        let of_b = cut(&|dim| within(&rows, dim));
        let bound = 1.0 / (input.iter().product::<usize>() as f32).sqrt();
        let spec = |name: &str, dims: Vec<usize>, columns, placement, init| ParamSpec {
            name: name.to_owned(),
            dims: crate::Shape::new(&dims),
            placement,
            role: Role::Weight,
            init,
            group: ParamGroup::hidden(Matrices::new(experts, columns)),
            packed: None,
        };
        let a = spec(&self.a, [of_each, &[rank], input].concat(), input.len(), of_a, Init::Uniform { bound });
        let b = spec(&self.b, [of_each, &out, &[rank]].concat(), 1, of_b, Init::Zeros);
        Ok([a, b])
    }

    /// Adds `s · B · A` to the values of the whole weight, all row-major: the model without adapters that computes the
    /// same.
    ///
    /// # Errors
    /// As [`specs`](Self::specs).
    pub fn merge(&self, weight: &ParamSpec, of: &Adapters, [a, b]: [&[f32]; 2], values: &mut [f32]) -> Result<()> {
        let [_, spec] = self.specs(weight, of.rank)?;
        let experts: usize = weight.dims[..weight.expert_dims()].iter().product();
        let inputs = a.len() / (experts * of.rank);
        let rows_of_each = b.len() / (experts * of.rank);
        let mut sums = vec![0.0; inputs];
        // A row of B is an output of its matrix. Between the outputs in front of the dim that numbers matrices and
        // those behind it lie those of the other matrices.
        let (behind, count, index) = match self.matrix.map(|_| self.numbered(weight)).transpose()? {
            None => (1, 1, 0),
            Some(MatrixOf { dim, index, count }) => {
                (spec.dims[dim..spec.dims.len() - 1].iter().product(), count, index)
            }
        };
        for (row, b) in b.chunks_exact(of.rank).enumerate() {
            let a = &a[row / rows_of_each * of.rank * inputs..];
            let row = (row / behind * count + index) * behind + row % behind;
            let values = &mut values[row * inputs..(row + 1) * inputs];
            sums.fill(0.0);
            for (b, a) in b.iter().zip(a.chunks_exact(inputs)) {
                sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += f64::from(*b) * f64::from(*a));
            }
            values.iter_mut().zip(&sums).for_each(|(value, sum)| *value += (of.scale * sum) as f32);
        }
        Ok(())
    }

    /// The place of its matrix among those of the weight.
    fn numbered(&self, weight: &ParamSpec) -> Result<MatrixOf> {
        let (index, dims) = (self.matrix.unwrap_or(0), &weight.dims);
        let mut numbering = weight.numbering();
        match (numbering.next(), numbering.next()) {
            (Some(dim), None) if index < dims[dim] => Ok(MatrixOf { dim, index, count: dims[dim] }),
            _ => Err(Error::Declaration {
                name: weight.name.clone(),
                problem: format!("it holds no matrix {index}"),
                valid: "number the matrices from 0, along the one dim that numbers them".to_owned(),
            }),
        }
    }
}

impl ParamSpec {
    /// The number of leading dims that number experts: matrices that the mesh shares out.
    pub fn expert_dims(&self) -> usize {
        let stacked = self.group.matrices.map_or(0, |matrices| matrices.stacked);
        let is_cut = |dim: &usize| self.placement.shards().iter().any(|(_, cut)| cut == dim);
        (0..stacked).take_while(is_cut).count()
    }

    /// The dims that number the matrices of the weight, or of each expert.
    pub fn numbering(&self) -> impl Iterator<Item = usize> {
        let (dims, experts) = (self.dims.len(), self.expert_dims());
        let all = self.group.matrices.into_iter().flat_map(move |of| of.numbering(dims));
        all.filter(move |&dim| dim >= experts)
    }
}

impl Declarations {
    /// Parameters that `declare` declares or ties are [frozen](Self::freezing), and linear layers declare these
    /// adapters beside their weights, which are trained. Layers ask for them by [`adapters_of`](Self::adapters_of).
    pub fn adapting<T>(&mut self, adapters: &Arc<Adapters>, declare: impl FnOnce(&mut Self) -> T) -> T {
        let around = self.adapters.replace(Arc::clone(adapters));
        let declared = self.freezing(true, declare);
        self.adapters = around;
        declared
    }

    /// The factor and the dropout of all adapters, and those of a weight, declared beside it; none outside of
    /// [`adapting`](Self::adapting), or of a weight that has none.
    ///
    /// # Errors
    /// As [`AdapterSpec::specs`]; a name that is taken; dropout of the rows of experts.
    pub fn adapters_of(&mut self, weight: ParamId) -> Result<(f64, f32, Vec<Adapter>)> {
        let Some(adapters) = self.adapters.clone() else { return Ok((1.0, 0.0, Vec::new())) };
        let weight = self.spec(weight).clone();
        if adapters.dropout > 0.0 && weight.expert_dims() > 0 && !adapters.of(&weight.name).is_empty() {
            return Err(Error::Declaration {
                name: weight.name,
                problem: "dropout of adapters draws by the places of tokens, and the rows of experts have none"
                    .to_owned(),
                valid: "use a dropout of 0, or leave it out of the targets".to_owned(),
            });
        }
        let around = std::mem::replace(&mut self.freezing, false);
        let declared = adapters.of(&weight.name).iter().map(|of| {
            let [a, b] = of.specs(&weight, adapters.rank)?;
            let matrix = of.matrix.map(|_| of.numbered(&weight)).transpose()?;
            let a = if self.find(&a.name).is_some() { self.enter(a)? } else { self.declare_spec(a)? };
            Ok(Adapter { a, b: self.declare_spec(b)?, name: of.b.clone(), matrix })
        });
        let declared: Result<_> = declared.collect();
        self.freezing = around;
        Ok((adapters.scale, adapters.dropout, declared?))
    }
}
