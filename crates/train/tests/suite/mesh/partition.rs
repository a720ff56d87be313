//! Layers assigned by cost: a model whose head is worth more than a layer, over several pipelines, against the run of
//! one rank.

use crate::mesh::cases::{HEADS, HIDDEN, LARGE_HEAD, SEQ, SGD};
use crate::mesh::world::{assemble, on_mesh, pieces, train};
use meshwork_testkit::parity::{assert_close, norm_of_all};
use meshwork_train::config::Config;
use std::collections::BTreeMap;

fn config(pp: usize, schedule: &str) -> Config {
    let (vocab, layers) = (LARGE_HEAD.vocab, LARGE_HEAD.layers);
    let text = format!(
        "[model]\nvocab_size = {vocab}\nnum_layers = {layers}\nhidden_size = {HIDDEN}\nnum_heads = {HEADS}\nseq_len = {SEQ}\n\
         [parallelism]\npp = {pp}\n[pipeline]\nschedule = '{schedule}'\nnum_microbatches = 4\npartition = 'cost'\n{SGD}"
    );
    Config::from_toml(&text).unwrap_or_else(|error| panic!("pp={pp} {schedule}: {error}"))
}

/// Loss, and every gradient of the first step, whole.
fn step(what: &str, config: &Config) -> (f64, BTreeMap<String, Vec<f32>>) {
    let data = LARGE_HEAD.data();
    let ranks = on_mesh(config, |mut trainer| Ok((train(&mut trainer, &data, config)?.loss, pieces(&trainer)?)));
    let (losses, held): (Vec<f64>, Vec<_>) = ranks.into_iter().unzip();
    (losses[0], assemble(what, &held, |piece| &piece.gradient))
}

#[test]
fn layers_dealt_by_cost_train_as_on_one_rank() {
    let (loss, wanted) = step("one rank", &config(1, "gpipe"));
    let all = norm_of_all(wanted.values().map(Vec::as_slice));
    for (pp, schedule, dealt) in [
        (2, "1f1b", &[4, 2][..]),
        (4, "gpipe", &[2, 2, 2, 0]),
        (2, "interleaved_1f1b", &[2, 2, 2, 0]),
        (2, "zb_v", &[2, 2, 2, 0]),
    ] {
        let (what, config) = (format!("pp={pp} {schedule}"), config(pp, schedule));
        assert_eq!(config.pipeline.partition, dealt, "{what}");
        let (got_loss, got) = step(&what, &config);
        assert!((got_loss - loss).abs() <= 1e-6 * loss, "{what}: loss {got_loss}, on one rank {loss}");
        assert!(got.keys().eq(wanted.keys()), "{what}");
        for (name, wanted) in &wanted {
            assert_close(&format!("{what}: gradient of {name}"), &got[name], wanted, all);
        }
    }
}
