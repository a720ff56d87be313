//! `docs/configuration.md` ends with the reference that the key table gives.

use meshwork_train::config::reference;
use std::fs;

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
/// The line above the reference, written by hand like all before it.
const MARK: &str = "<!-- From here on written from the key table";

#[test]
fn docs_configuration_holds_the_reference() {
    let docs = fs::read_to_string(DOCS).unwrap_or_else(|error| panic!("{DOCS}: {error}"));
    let mark = docs.find(MARK).unwrap_or_else(|| panic!("{DOCS} lacks the line {MARK}"));
    let end = docs[mark..].find('\n').map_or(docs.len(), |line| mark + line + 1);
    let wanted = format!("{}\n{}\n", &docs[..end], reference().trim_end());
    if docs != wanted {
        let fresh = concat!(env!("CARGO_TARGET_TMPDIR"), "/configuration.md");
        fs::write(fresh, wanted).unwrap_or_else(|error| panic!("{fresh}: {error}"));
        panic!(
            "docs/configuration.md is not what the key table says. To renew it:\n    cp {fresh} docs/configuration.md"
        );
    }
}
