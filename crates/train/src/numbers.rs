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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([grouped(0), grouped(999), grouped(1_234_567)], ["0", "999", "1,234,567"]);
        assert_eq!([size(30.0), size(1536.0), size(7.0 * 1024.0 * 1024.0)], ["30 B", "1.5 KiB", "7.0 MiB"]);
        assert_eq!(spans(&[0, 1, 2, 5, 8, 9]), "0-2,5,8-9");
        assert_eq!([count(1, "micro-batch"), count(2, "micro-batch")], ["1 micro-batch", "2 micro-batches"]);
        assert_eq!([count(0, "call"), count(1000, "call")], ["0 calls", "1,000 calls"]);
    }
}
