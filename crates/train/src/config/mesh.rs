//! The mesh string: `dp=2,tp=4,pp=2`. [`Mesh`] reads it; here its errors become faults of `--mesh`.

use super::fault::{Fault, choose_from};
use meshwork_core::{Mesh, MeshError};

/// The axes of a mesh, in the order of `[parallelism]`.
pub const AXES: [&str; 5] = ["dp", "tp", "pp", "cp", "ep"];

/// Reads a mesh string into one degree per axis of [`AXES`]: 1 for axes that it does not name.
///
/// # Errors
/// Every fault of the string, all at once.
///
/// ```
/// use meshwork_train::config::parse_mesh;
///
/// assert_eq!(parse_mesh("tp=4,dp=2"), Ok([2, 4, 1, 1, 1]));
/// let faults = parse_mesh("dp=0,sp=2").unwrap_err();
/// assert_eq!(faults[0].to_string(), "--mesh dp=0: a degree is at least 1; use dp=1 or more");
/// assert_eq!(faults.len(), 2);
/// ```
pub fn parse_mesh(text: &str) -> Result<[usize; 5], Vec<Fault>> {
    let fault = |(part, error): (&str, MeshError)| {
        let value = if part.is_empty() { "\"\"" } else { part };
        let fault = |problem: &str, valid: String| Fault::new("--mesh", value, problem, valid);
        match &error {
            MeshError::Syntax { .. } => {
                fault("not an axis with its degree", "use axis=degree, such as dp=2".to_string())
            }
            MeshError::UnknownAxis { name, .. } if name == "sp" => fault(
                "sequence parallel is no axis: it shards over tp",
                "use parallelism.sequence_parallel = true; to split long sequences, use the axis cp".to_string(),
            ),
            MeshError::UnknownAxis { name, .. } => fault("unknown axis", choose_from(name, &AXES)),
            MeshError::Duplicate { axis } => fault("the axis is named twice", format!("name {axis} once")),
            MeshError::ZeroDegree { axis } => fault("a degree is at least 1", format!("use {axis}=1 or more")),
            MeshError::TooLarge { axis, .. } => {
                fault("the degree is too large", format!("use {axis}=1 or more, as many as you have ranks"))
            }
            MeshError::Degree { axis, .. } => {
                fault("the degree is not a whole number", format!("use {axis}=1 or more"))
            }
            other => fault(&other.to_string(), "use axis=degree, such as dp=2".to_string()),
        }
    };
    match Mesh::parse_degrees(text) {
        Ok([tp, cp, ep, dp, pp]) => Ok([dp, tp, pp, cp, ep]),
        Err(wrong) => Err(wrong.into_iter().map(fault).collect()),
    }
}
