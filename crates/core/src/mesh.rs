//! The device mesh: named axes over a grid of ranks, and slices of that grid. Pure arithmetic, no I/O.
//!
//! Ranks are numbered with the fastest axis first in the order tp, cp, ep, dp, pp (Megatron's `tp-cp-ep-dp-pp`), so
//! that the axes that communicate most are neighbours.
//!
//! Expert parallelism borrows its ranks from data parallelism. `dp=4,ep=2` has four data-parallel ranks; two of them
//! share out the experts, and two hold the same ones. On the grid this is two axes: [`Axis::Ep`] of degree 2, and
//! [`Axis::Dp`], the rest of data parallelism, of degree 2. [`Axis::DATA`] is both: the batch is split over their
//! product, and so is everything else that has to do with data parallelism.
//!
//! A mesh string such as `dp=2,tp=4` gives every axis a degree: 1 for an axis that it does not name. The order of its
//! parts does not matter. [`Mesh::new`] makes a mesh of exactly the axes that it is given.
//!
//! Where ep does not divide dp, experts are shared out over ranks of cp too. `dp=2,cp=4,ep=8` takes all of cp, and
//! ranks of dp for the rest: on the grid the degree of [`Axis::Ep`] is this rest, 2, and [`Mesh::expert_axes`] are cp
//! and ep. `cp=4,ep=2` takes a part of cp: on the grid cp is two axes then, [`Axis::Cep`] of degree 2, whose ranks
//! share out the experts, and [`Axis::Cp`], the rest, of degree 2. [`Axis::CONTEXT`] is both: sequences are cut over
//! their product.
//!
//! ```
//! use meshwork_core::{Axis, Mesh};
//! let mesh: Mesh = "dp=2,tp=4,pp=2".parse()?;
//! assert_eq!(mesh.world_size(), 16);
//! assert_eq!(mesh.group(5, &[Axis::Tp]), [4, 5, 6, 7]);
//! assert_eq!(mesh.group(5, &[Axis::Pp]), [5, 13]);
//! assert_eq!(mesh.coords(13).get(Axis::Pp), 1);
//! assert!("tp=4".parse::<Mesh>()?.has(Axis::Dp)); // of degree 1
//! let experts: Mesh = "dp=4,ep=2".parse()?;
//! assert_eq!((experts.world_size(), experts.data_degree(), experts.degree(Axis::Dp)), (4, 4, 2));
//! # Ok::<(), meshwork_core::MeshError>(())
//! ```

use crate::axes::{Axes, Axis};
use std::fmt;
use std::num::IntErrorKind;
use std::str::FromStr;

impl FromStr for Axis {
    type Err = MeshError;

    fn from_str(name: &str) -> Result<Self, MeshError> {
        Self::NAMED.into_iter().find(|axis| axis.name() == name).ok_or_else(|| MeshError::UnknownAxis {
            name: name.to_owned(),
            hint: match name {
                "sp" => "; sequence parallelism is a boolean on tp, and the axis that splits long sequences is cp",
                _ => "",
            },
        })
    }
}

/// Name of the groups of ranks that hold the same experts, where these are shared out (Megatron's expert data
/// parallelism).
pub const EXPERT_DATA: &str = "edp";
/// The same of context parallelism, where a part of it shares out the experts.
pub const EXPERT_CONTEXT: &str = "ecp";

/// Why a mesh is invalid.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum MeshError {
    /// The axis does not exist.
    #[error("unknown mesh axis `{name}`: the axes are tp, cp, ep, dp, pp{hint}")]
    UnknownAxis { name: String, hint: &'static str },
    /// A part of the mesh string is not `axis=degree`.
    #[error("`{part}` is not of the form axis=degree, as in dp=2,tp=4,pp=2")]
    Syntax { part: String },
    /// The degree of an axis is not a whole number.
    #[error("`{axis}={degree}` is not of the form axis=degree: the degree is not a whole number")]
    Degree { axis: Axis, degree: String },
    /// The degree of an axis does not fit into a `usize`.
    #[error("the degree {degree} of axis {axis} overflows")]
    TooLarge { axis: Axis, degree: String },
    /// The degree of an axis is zero.
    #[error("axis {axis} has degree 0: a degree is 1 or more")]
    ZeroDegree { axis: Axis },
    /// Expert parallelism cannot borrow its ranks from data and context parallelism.
    #[error("ep={ep} does not divide {}", lenders(*.dp, *.cp))]
    Borrowed { ep: usize, dp: usize, cp: usize },
    /// An axis is given twice.
    #[error("axis {axis} is given twice")]
    Duplicate { axis: Axis },
    /// The product of the degrees does not fit.
    #[error("the product of the degrees of {mesh} overflows")]
    Overflow { mesh: String },
}

crate::debug_as_display!(MeshError);

fn lenders(dp: usize, cp: usize) -> String {
    match cp {
        0 | 1 => format!("dp={dp}: the experts are shared out among ranks of dp"),
        cp => format!("dp={dp} times cp={cp}: the experts are shared out among ranks of dp and cp"),
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// A grid of ranks with named axes. See the module documentation for the rank order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Mesh {
    /// Indexed by axis; `None` where the mesh does not have the axis at all.
    degrees: [Option<usize>; Axis::COUNT],
    /// Whether all ranks of cp hold different experts.
    experts_over_cp: bool,
}

impl Mesh {
    /// A mesh of the given axes and no others, with the degrees of the grid: `dp=4,ep=2` is
    /// `(Axis::Ep, 2), (Axis::Dp, 2)`. An axis of degree 1 is a real axis: values carry a type on it, and its
    /// collectives are the identity.
    pub fn new(axes: impl IntoIterator<Item = (Axis, usize)>) -> Result<Self, MeshError> {
        let mut mesh = Self::default();
        for (axis, degree) in axes {
            if degree == 0 {
                return Err(MeshError::ZeroDegree { axis });
            }
            if mesh.degrees[axis.index()].replace(degree).is_some() {
                return Err(MeshError::Duplicate { axis });
            }
        }
        let product = mesh.axes().try_fold(1usize, |size, axis| size.checked_mul(mesh.degree(axis)));
        if product.is_some() { Ok(mesh) } else { Err(MeshError::Overflow { mesh: mesh.to_string() }) }
    }

    /// A mesh of the degrees that a mesh string gives, in the order of [`Axis::NAMED`]: the degree of dp includes ep,
    /// but for ranks of cp that share out experts. It has all of these axes, and [`Axis::Cep`] where experts are shared
    /// out over a part of cp.
    ///
    /// # Errors
    /// As [`new`](Self::new); a degree of ep that does not divide dp · cp.
    pub fn of_degrees([tp, cp, ep, dp, pp]: [usize; 5]) -> Result<Self, MeshError> {
        let divides = |part: usize| part == 0 || dp.is_multiple_of(part);
        // Of the experts' ranks those of cp: none, all of cp, or a part.
        let of_cp = match ep.checked_div(cp) {
            _ if divides(ep) => 1,
            Some(rest) if rest * cp == ep && divides(rest) => cp,
            _ => ep / common_divisor(ep, dp),
        };
        if of_cp > 1 && !cp.is_multiple_of(of_cp) {
            return Err(MeshError::Borrowed { ep, dp, cp });
        }
        let (ep, experts_over_cp) = (ep / of_cp, of_cp > 1 && of_cp == cp);
        let part = Some(of_cp).filter(|&part| part > 1 && part < cp);
        let degrees = [tp, cp / part.unwrap_or(1), ep, dp.checked_div(ep).unwrap_or(0), pp];
        let part = part.map(|part| (Axis::Cep, part));
        let mesh = Self::new(Axis::NAMED.into_iter().zip(degrees).chain(part))?;
        Ok(Self { experts_over_cp, ..mesh })
    }

    /// The axes whose ranks hold different experts: ep, and cp, or its part, where ep borrows from it.
    pub fn expert_axes(&self) -> Axes {
        let of_cp = if self.experts_over_cp { Axis::Cp } else { Axis::Cep };
        [of_cp, Axis::Ep].into_iter().filter(|&axis| axis == Axis::Ep || self.degree(of_cp) > 1).collect()
    }

    /// The number of ranks that share out the experts: ep in a mesh string.
    pub fn expert_degree(&self) -> usize {
        self.expert_axes().iter().map(|&axis| self.degree(axis)).product()
    }

    /// The axes of this mesh, fastest first.
    pub fn axes(&self) -> impl Iterator<Item = Axis> + use<> {
        let degrees = self.degrees;
        Axis::ALL.into_iter().filter(move |axis| degrees[axis.index()].is_some())
    }

    /// The axes on which values carry an SPMD type: all but pp, along which values travel as messages.
    pub fn value_axes(&self) -> impl Iterator<Item = Axis> + use<> {
        self.axes().filter(|&axis| axis != Axis::Pp)
    }

    /// Whether the mesh has this axis, with any degree.
    pub fn has(&self, axis: Axis) -> bool {
        self.degrees[axis.index()].is_some()
    }

    /// The degree of an axis; 1 where the mesh does not have it.
    pub fn degree(&self, axis: Axis) -> usize {
        self.degrees[axis.index()].unwrap_or(1)
    }

    /// The data-parallel degree, which includes the expert-parallel one: the parts into which a batch is split.
    pub fn data_degree(&self) -> usize {
        Axis::DATA.into_iter().map(|axis| self.degree(axis)).product()
    }

    /// The parts into which a sequence is split, attention included: cp in a mesh string.
    pub fn context_degree(&self) -> usize {
        Axis::CONTEXT.into_iter().map(|axis| self.degree(axis)).product()
    }

    /// The data-parallel rank at `coords`: which part of the batch it has.
    pub fn data_rank(&self, coords: Coords) -> usize {
        coords.get(Axis::Dp) * self.degree(Axis::Ep) + coords.get(Axis::Ep)
    }

    /// The name of a group over `axes`, slowest first: `dp+cp`. Data parallelism is `dp`. Of its two axes on a mesh
    /// with experts, `ep` has the ranks that share out the experts, and `edp` those that hold the same ones. Context
    /// parallelism is `cp`; of its two axes, where it has two, `cep` has the ranks that share out the experts, and
    /// `ecp` those that hold the same ones.
    pub fn group_name(&self, axes: &[Axis]) -> String {
        let has = |axis: Axis| axes.contains(&axis);
        let name = |axis: Axis| match axis {
            Axis::Ep if has(Axis::Dp) => None,
            Axis::Dp if !has(Axis::Ep) && self.degree(Axis::Ep) > 1 => Some(EXPERT_DATA),
            Axis::Cep if has(Axis::Cp) => None,
            Axis::Cp if !has(Axis::Cep) && self.degree(Axis::Cep) > 1 => Some(EXPERT_CONTEXT),
            axis => Some(axis.name()),
        };
        let names: Vec<&str> = Axis::ALL.into_iter().rev().filter(|&axis| has(axis)).filter_map(name).collect();
        names.join("+")
    }

    /// The names of the groups over several axes above degree 1 that are neither those of one axis nor the world.
    pub fn product_names(&self) -> Vec<String> {
        let wide: Vec<Axis> = self.axes().filter(|&axis| self.degree(axis) > 1).collect();
        let sets = (1..(1usize << wide.len()).saturating_sub(1)).map(|set| {
            wide.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).map(|(_, &axis)| axis).collect::<Vec<_>>()
        });
        sets.map(|axes| self.group_name(&axes)).filter(|name| name.contains('+')).collect()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.axes().map(|axis| self.degree(axis)).product()
    }

    /// The position of a rank on the grid.
    ///
    /// # Panics
    /// If `rank` is not below [`world_size`](Self::world_size).
    pub fn coords(&self, rank: usize) -> Coords {
        assert!(rank < self.world_size(), "rank {rank} is not in a world of {}", self.world_size());
        let mut coords = Coords::default();
        let mut rest = rank;
        for axis in self.axes() {
            coords.0[axis.index()] = rest % self.degree(axis);
            rest /= self.degree(axis);
        }
        coords
    }

    /// The rank at `coords`.
    pub fn rank_at(&self, coords: Coords) -> usize {
        let mut stride = 1;
        let mut rank = 0;
        for axis in self.axes() {
            rank += coords.get(axis) * stride;
            stride *= self.degree(axis);
        }
        rank
    }

    /// The ranks that differ from `rank` only along `axes` (any product of axes), itself included, in rank order.
    ///
    /// # Panics
    /// If `rank` is not below [`world_size`](Self::world_size).
    pub fn group(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let along = |axis: &Axis| axes.contains(axis);
        let first = self.axes().filter(along).fold(self.coords(rank), |coords, axis| coords.with(axis, 0));
        // Begins with the slowest axis; each further axis multiplies the ranks found so far, which stay in order.
        let mut ranks = vec![self.rank_at(first)];
        let mut stride = self.world_size();
        for axis in self.axes().collect::<Vec<_>>().into_iter().rev() {
            stride /= self.degree(axis);
            if along(&axis) {
                let line = |start: usize| (0..self.degree(axis)).map(move |position| start + position * stride);
                ranks = ranks.into_iter().flat_map(line).collect();
            }
        }
        ranks
    }

    /// The degrees that a mesh string gives, in the order of [`Axis::NAMED`]: 1 for an axis that it does not name. The
    /// degree of dp includes ep: [`of_degrees`](Self::of_degrees) makes a mesh of them.
    ///
    /// # Errors
    /// Every invalid part, as written, and its error. Parsing the string as a `Mesh` reports the first.
    ///
    /// ```
    /// use meshwork_core::{Mesh, MeshError};
    /// assert_eq!(Mesh::parse_degrees("tp=4, dp=2"), Ok([4, 1, 1, 2, 1]));
    /// let wrong = Mesh::parse_degrees("tp=0,dp=2,tp").unwrap_err();
    /// assert_eq!(wrong.iter().map(|(part, _)| *part).collect::<Vec<_>>(), ["tp=0", "tp"]);
    /// ```
    pub fn parse_degrees(text: &str) -> Result<[usize; 5], Vec<(&str, MeshError)>> {
        let mut degrees = [None; Axis::COUNT];
        let mut wrong = Vec::new();
        for part in text.split(',').map(str::trim) {
            let given = parse_part(part).and_then(|(axis, degree)| {
                // A part with a wrong degree still names its axis.
                match degrees[axis.index()].replace(*degree.as_ref().unwrap_or(&1)) {
                    Some(_) => Err(MeshError::Duplicate { axis }),
                    None => degree.map(drop),
                }
            });
            wrong.extend(given.err().map(|error| (part, error)));
        }
        let degree = |axis: Axis| degrees[axis.index()].unwrap_or(1);
        if wrong.is_empty() { Ok(Axis::NAMED.map(degree)) } else { Err(wrong) }
    }
}

/// One `axis=degree`: the axis, and the degree if there is one.
fn parse_part(part: &str) -> Result<(Axis, Result<usize, MeshError>), MeshError> {
    let (name, degree) = part.split_once('=').ok_or_else(|| MeshError::Syntax { part: part.to_owned() })?;
    let (axis, degree) = (name.trim().parse::<Axis>()?, degree.trim());
    let written = || degree.to_owned();
    let parsed = match degree.parse::<usize>() {
        Ok(0) => Err(MeshError::ZeroDegree { axis }),
        Ok(degree) => Ok(degree),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => {
            Err(MeshError::TooLarge { axis, degree: written() })
        }
        Err(_) => Err(MeshError::Degree { axis, degree: written() }),
    };
    Ok((axis, parsed))
}

impl FromStr for Mesh {
    type Err = MeshError;

    /// A mesh with every named axis: see [`Mesh::parse_degrees`].
    fn from_str(text: &str) -> Result<Self, MeshError> {
        match Self::parse_degrees(text) {
            Ok(degrees) => Self::of_degrees(degrees),
            Err(wrong) => Err(wrong
                .into_iter()
                .map(|(_, error)| error)
                .next()
                .unwrap_or(MeshError::Syntax { part: text.to_owned() })),
        }
    }
}

impl fmt::Display for Mesh {
    /// The mesh as a string that parses, fastest axis first. cp and ep are left out at degree 1: few meshes use them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let degree = |axis| match axis {
            Axis::Cp => self.context_degree(),
            Axis::Dp => self.data_degree(),
            Axis::Ep => self.expert_degree(),
            axis => self.degree(axis),
        };
        let shown = |&axis: &Axis| !matches!(axis, Axis::Cp | Axis::Ep) || degree(axis) > 1;
        let named = self.axes().filter(|&axis| axis != Axis::Cep);
        let parts: Vec<String> = named.filter(shown).map(|axis| format!("{axis}={}", degree(axis))).collect();
        if parts.is_empty() { f.write_str("without axes") } else { f.write_str(&parts.join(",")) }
    }
}

/// The position of a rank along every axis of its mesh; 0 on axes the mesh does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Coords([usize; Axis::COUNT]);

impl Coords {
    /// The position along `axis`: the `tp_rank`, `dp_rank`, ... of the rank.
    pub fn get(&self, axis: Axis) -> usize {
        self.0[axis.index()]
    }

    /// The same position with another place along `axis`.
    pub fn with(mut self, axis: Axis, position: usize) -> Self {
        self.0[axis.index()] = position;
        self
    }
}
