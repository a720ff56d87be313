//! The words of `checkpoint.permit`, which allow other values than those of the checkpoint.

use super::fault::nearest;
use super::keys;

/// Words of `checkpoint.permit` beside the names of sections and keys, and the keys for which they stand.
const WORDS: [(&str, &[&str]); 3] = [
    ("batch", &["training.global_batch_size"]),
    ("seed", &["training.seed"]),
    ("data", &["validation.every", "validation.fraction"]),
];

fn words(permit: &str) -> impl Iterator<Item = &str> {
    permit.split(',').map(str::trim).filter(|word| !word.is_empty())
}

/// Whether `checkpoint.permit` allows another value of a key: by its name, its section, or a word for it.
pub(crate) fn permits(permit: &str, key: &str) -> bool {
    let section = key.split_once('.').map_or(key, |(section, _)| section);
    let stands = |word: &str| WORDS.iter().any(|(of, keys)| *of == word && keys.contains(&key));
    words(permit).any(|word| word == key || word == section || stands(word))
}

/// The words of `checkpoint.permit` that name nothing, each with the nearest that does.
pub(super) fn unknown(permit: &str) -> Vec<(&str, String)> {
    let mut known: Vec<String> = keys::SECTIONS.iter().map(|section| section.name.to_owned()).collect();
    known.extend(WORDS.iter().map(|(word, _)| (*word).to_owned()));
    known.extend(keys::all().map(|(section, key)| format!("{section}.{}", key.name)));
    let near = |word: &str| {
        let near = nearest(word, known.iter().map(String::as_str));
        near.map_or_else(String::new, |near| format!("the nearest is {near}; "))
    };
    let unknown = words(permit).filter(|word| !known.iter().any(|known| known == word));
    let how = "use names of sections and keys, such as optimizer or training.max_norm, or batch or seed";
    unknown.map(|word| (word, format!("{}{how}", near(word)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_permits_a_key_a_section_or_what_it_stands_for() {
        for (permit, key) in [
            ("training.max_norm", "training.max_norm"),
            ("model, optimizer", "optimizer.lr"),
            ("seed,batch", "training.global_batch_size"),
            ("data", "data.shuffle"),
            ("data", "validation.fraction"),
        ] {
            assert!(permits(permit, key), "{permit} {key}");
        }
        assert!(
            !permits("seed", "training.max_norm") && !permits("", "training.seed") && !permits("model", "moe.top_k")
        );
        assert_eq!(unknown("optimizer, training.seed, seed"), []);
        let told = unknown("modle");
        assert!(told.len() == 1 && told[0].1.starts_with("the nearest is model; use names of"), "{told:?}");
    }
}
