//! Wrong uses are refused, with what would be valid. What types refuse is in the docs of `Message` and `Replicated`.

use crate::common::{compress, draws, scheme, values};
use meshwork_compress::{
    AqSgd, CompressError, Compressor, Feedback, FileStore, Fold, MemoryStore, Message, Partial, Per, Reduction,
    Rounding, Shape, Values,
};
use meshwork_testkit::run_world;

fn shape() -> Shape {
    Shape::matrix(6, 10).unwrap()
}

fn planned(text: &str, feedback: &str, shape: Shape, place: [usize; 2]) -> Result<Reduction, CompressError> {
    Reduction::new("w", Box::new(scheme(text)), feedback.parse().unwrap(), shape, place, 7)
}

fn message<T: std::fmt::Debug>(result: Result<T, CompressError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn feedback_is_applied_once_a_step() {
    run_world(2, |group| {
        let mut reduction = planned("topk:0.1", "ef", shape(), [group.rank(), 2]).unwrap();
        let x = values("x", 60);
        reduction.all_reduce(&group, 5, Partial(&x)).unwrap();
        for step in [5, 4] {
            let error = reduction.all_reduce(&group, step, Partial(&x)).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("w: step {step} after step 5: feedback is applied once a step")),
                "{error}"
            );
        }
        reduction.all_reduce(&group, 6, Partial(&x)).unwrap();
    });
}

#[test]
fn a_reduction_belongs_to_its_group() {
    let mut reduction = planned("sign", "ef", shape(), [0, 2]).unwrap();
    run_world(1, |group| {
        let mut reduction = planned("sign", "ef", shape(), [0, 2]).unwrap();
        let error = reduction.all_reduce(&group, 0, Partial(&values("x", 60))).unwrap_err().to_string();
        let told =
            "w was planned for rank 0 of 2, the group has this as rank 0 of 1: reshard its states and plan it again";
        assert_eq!(error, told);
    });
    assert!(planned("sign", "ef", shape(), [2, 2]).is_err());
    let alone = meshwork_core::Rank::alone().unwrap();
    assert!(reduction.all_reduce(alone.world(), 0, Partial(&[])).is_err());
}

#[test]
fn lengths_are_checked() {
    run_world(1, |group| {
        let mut reduction = planned("sign", "ef", shape(), [0, 1]).unwrap();
        let error = reduction.all_reduce(&group, 0, Partial(&[1.0; 59])).unwrap_err().to_string();
        assert_eq!(error, "the part has 59 elements, it must have 60");
        reduction.all_reduce(&group, 0, Partial(&[1.0; 60])).unwrap(); // nothing was done before
    });
    let sign = scheme("sign");
    let error = message(Message::compress(&sign, &[1.0; 3], shape(), draws(0), &mut []));
    assert_eq!(error, "the value has 3 elements, it must have 60");
    let error = message(Message::compress(&scheme("powersgd:2"), &[1.0; 60], shape(), draws(0), &mut []));
    assert_eq!(error, "the warm state has 0 elements, it must have 20");
    let good = compress(&sign, &[1.0; 60], shape(), draws(0));
    assert!(good.restore(&sign, shape(), Fold::Add, &mut [0.0; 61]).is_err());
    let error = message(Shape::matrix(1 << 20, 1 << 12));
    assert!(error.contains("1048576 x 4096 has more than 4294967295 elements"), "{error}");
    assert!(Shape::matrix(usize::MAX, 2).is_err());
}

#[test]
fn a_rank_above_the_matrix_is_refused() {
    let error = message(planned("powersgd:7", "ef", shape(), [0, 1]));
    assert_eq!(error, "powersgd:7 of a 6x10 matrix: the rank must be 1 to 6; use \"none\" for vectors");
    assert!(planned("powersgd:2", "ef", Shape::vector(60).unwrap(), [0, 1]).is_err());
    let nine = Values::Quantize { bits: 9, per: Per::Tensor, rounding: Rounding::Nearest };
    assert!(message(meshwork_compress::wire_bytes(&nine, shape())).contains("the number of bits must be 1 to 8"));
}

#[test]
fn feedback_of_a_scheme_that_it_would_amplify_is_refused() {
    for text in ["randk:0.1/unbiased", "quant:1/stochastic"] {
        let error = message(planned(text, "ef", shape(), [0, 1]));
        assert!(error.contains("feedback would amplify it; use no feedback, a scheme that contracts"), "{error}");
        assert!(planned(text, "none", shape(), [0, 1]).is_ok());
    }
    assert!(Feedback::Ef.check(&scheme("quant:4/block16/stochastic"), shape()).is_ok());
    assert!(scheme("quant:1/stochastic").guarantee(shape()).contraction().is_none());
}

#[test]
fn the_two_sides_of_a_link_must_have_seen_the_same() {
    let shape = Shape::vector(8).unwrap();
    let link = || AqSgd::new(Box::new(scheme("quant:4")), shape, Box::new(MemoryStore::new(2))).unwrap();
    let (mut sender, mut receiver) = (link(), link());
    sender.send(0, &[1.0; 8], draws(0)).unwrap();
    let second = sender.send(0, &[1.5; 8], draws(1)).unwrap();
    let error = receiver.receive(0, &second).unwrap_err().to_string();
    assert!(error.contains("it was made by method number 3, None (number 0) was expected"), "{error}");
    assert_eq!(message(sender.send(2, &[1.0; 8], draws(0))), "sample 2 of a buffer of 2");
    assert_eq!(message(sender.send(0, &[1.0; 9], draws(0))), "the activation has 9 elements, it must have 8");
    let error = message(AqSgd::new(Box::new(scheme("powersgd:1")), shape, Box::new(MemoryStore::new(2))));
    assert!(error.starts_with("AQ-SGD with powersgd:1: it needs a scheme without warm start"), "{error}");
}

#[test]
fn a_file_of_other_samples_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("activations");
    drop(FileStore::open(&path, 3, 4).unwrap());
    let error = message(FileStore::open(&path, 4, 4));
    assert!(error.contains("it holds no activations of 4 samples of 4 elements (73 bytes, they take 89)"), "{error}");
    std::fs::write(&path, b"text").unwrap();
    assert!(FileStore::open(&path, 3, 4).is_err());
    assert!(FileStore::open(folder.path(), 3, 4).is_err());
}
