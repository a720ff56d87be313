//! Stages of language models that are asked for what they do not have.

use meshwork_core::{Mesh, Rank};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::llama::{Llama, PRESETS};
use meshwork_nn::{Batch, Model, StageSpec};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Params, Tape};
use std::sync::Arc;

/// A hidden state has a dim of features, as logits have, so that a loss of it could be computed: it is refused.
#[test]
fn a_stage_in_front_has_no_loss_and_one_behind_needs_a_hidden_state() {
    let models: [&dyn Model; 2] = [&Gpt2::new(Gpt2Config::default()), &Llama::new(PRESETS[0].1)];
    for model in models {
        let rank = Arc::new(Rank::recording(&"dp=1".parse::<Mesh>().unwrap(), 0).unwrap());
        let (device, mut declared) = (Meta::device(), Declarations::new());
        let stages = StageSpec::cut(&[3, 1]);
        let [first, last] = [0, 1].map(|stage| model.stage(&mut declared, rank.mesh(), &stages[stage]).unwrap());
        let layout = [declared.ids().collect()];
        let params = Params::new(Arc::new(declared), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
        let batch = Batch::blank(&model.fields(), 2);

        let error = last.forward(&tape, &batch, None).unwrap_err().to_string();
        assert!(error.starts_with("language model: a stage behind the first takes the hidden state"), "{error}");
        let hidden = first.forward(&tape, &batch, None).unwrap();
        let error = first.loss(&tape, &batch, &hidden).unwrap_err().to_string();
        assert_eq!(error, "language model: only the last stage has the head, and so the loss");
        let logits = last.forward(&tape, &batch, Some(&hidden)).unwrap();
        assert_eq!(last.loss(&tape, &batch, &logits).unwrap().shape()[..], [2]);
    }
}
