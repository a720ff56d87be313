//! The mesh string: `dp=2,tp=4,pp=2`.

use super::fault::{Fault, choose_from};

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
    let mut faults = Vec::new();
    let mut degrees = [None; 5];
    for part in text.split(',').map(str::trim) {
        let mut fault = |problem: &str, valid: String| {
            let value = if part.is_empty() { "\"\"" } else { part };
            faults.push(Fault::new("--mesh", value, problem, valid));
        };
        let Some((name, degree)) = part.split_once('=') else {
            fault("not an axis with its degree", "use axis=degree, such as dp=2".to_string());
            continue;
        };
        let (name, degree) = (name.trim(), degree.trim());
        let Some(axis) = AXES.iter().position(|axis| *axis == name) else {
            match name {
                "sp" => fault(
                    "sequence parallel is no axis: it shards over tp",
                    "use parallelism.sequence_parallel = true; to split long sequences, use the axis cp".to_string(),
                ),
                _ => fault("unknown axis", choose_from(name, &AXES)),
            }
            continue;
        };
        if degrees[axis].is_some() {
            fault("the axis is named twice", format!("name {name} once"));
            continue;
        }
        degrees[axis] = Some(1);
        match degree.parse::<usize>() {
            Ok(0) => fault("a degree is at least 1", format!("use {name}=1 or more")),
            Ok(degree) => degrees[axis] = Some(degree),
            Err(_) if !degree.is_empty() && degree.bytes().all(|b| b.is_ascii_digit()) => {
                fault("the degree is too large", format!("use {name}=1 or more, as many as you have ranks"));
            }
            Err(_) => fault("the degree is not a whole number", format!("use {name}=1 or more")),
        }
    }
    if faults.is_empty() { Ok(degrees.map(|degree| degree.unwrap_or(1))) } else { Err(faults) }
}
