//! Numbers as people read them.

use meshwork_tensor::memory::Bytes;

/// Ascending numbers as `0-3,8-11`.
pub fn spans(numbers: &[usize]) -> String {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match spans.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => spans.push((number, number)),
        }
    }
    let text = |&(start, end): &(usize, usize)| if start == end { start.to_string() } else { format!("{start}-{end}") };
    spans.iter().map(text).collect::<Vec<_>>().join(",")
}

/// `1 rank`, `2,000 ranks`.
pub fn count(number: usize, of: &str) -> String {
    let ending = match number {
        1 => "",
        _ if of.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {of}{ending}", grouped(number as u64))
}

/// 1234567 as `1,234,567`.
pub fn grouped(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}

/// Bytes in binary units.
pub fn size(bytes: f64) -> String {
    Bytes(bytes.round() as u64).to_string()
}
