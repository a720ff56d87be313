//! The numbers of micro-batches that a schedule takes, and the errors for others.

use meshwork_pipeline::{Generator, by_name, default_micros};

#[test]
fn names_lead_to_generators_and_back() {
    for generator in Generator::ALL {
        assert_eq!(by_name(generator.name()), Ok(generator));
    }
    let unknown = by_name("GPipe").unwrap_err();
    assert_eq!(unknown.known.len(), 10);
    assert!(unknown.to_string().starts_with("there is no schedule \"GPipe\"; known: gpipe, 1f1b, interleaved_1f1b, "));
    assert!(by_name("forward_only").is_err(), "nobody trains with it");
}

#[test]
fn too_few_micros_say_what_would_do() {
    let text = |generator: Generator, pp, micros| generator.build(generator.shape(pp, micros)).unwrap_err().to_string();
    assert_eq!(
        text(Generator::ZbH2, 4, 2),
        "schedule zb_h2 over pp=4 needs at least 4 micro-batches, got 2; gpipe and 1f1b take any number"
    );
    assert_eq!(text(Generator::ZbH2, 4, 0), "schedule zb_h2 over pp=4 needs at least 4 micro-batches, got 0");
    assert_eq!(text(Generator::OneFOneB, 4, 0), "schedule 1f1b over pp=4 needs at least 1 micro-batch, got 0");
    assert_eq!(text(Generator::Gpipe, 4, 0), "schedule gpipe over pp=4 needs at least 1 micro-batch, got 0");
    assert_eq!(text(Generator::Gpipe, 0, 3), "schedule gpipe over pp=0: a pipeline has at least 1 rank");
    assert_eq!(text(Generator::OneFOneB, 0, 3), "schedule 1f1b over pp=0: a pipeline has at least 1 rank");
}

/// The default, for a global batch of samples that must be cut evenly.
fn choose(generator: Generator, pp: usize, samples: usize) -> Option<(usize, bool)> {
    let choice = default_micros(generator, pp, generator.default_virtual_stages(), samples, |micros| {
        samples.is_multiple_of(micros)
    })?;
    Some((choice.micros, choice.under_quarter()))
}

#[test]
fn the_default_is_the_smallest_with_a_bubble_under_a_quarter() {
    for generator in [Generator::Gpipe, Generator::OneFOneB] {
        assert_eq!(choose(generator, 1, 16), Some((1, true)), "no pipeline, no bubble");
        // pp=2: m=3 leaves exactly a quarter, which is not under it.
        assert_eq!(choose(generator, 2, 12), Some((4, true)));
        assert_eq!(choose(generator, 4, 60), Some((10, true)));
        // Nothing reaches the quarter: the largest.
        assert_eq!(choose(generator, 4, 8), Some((8, false)));
        assert_eq!(choose(generator, 4, 5), Some((5, false)));
    }
    assert_eq!(choose(Generator::Gpipe, 4, 2), Some((2, false)));
    assert_eq!(choose(Generator::OneFOneB, 4, 2), Some((2, false)));
    assert_eq!(choose(Generator::ZbH2, 4, 2), None, "zb_h2 takes none of 1 and 2");
    assert_eq!(choose(Generator::OneFOneB, 4, 0), None);
    assert_eq!(choose(Generator::Gpipe, 0, 8), None);
}

/// With fewer micro-batches than ranks more than a quarter idles: a default is that small only if the batch allows no
/// more.
#[test]
fn fewer_micros_than_ranks_are_no_default_of_choice() {
    for generator in [Generator::OneFOneB, Generator::ZbH1] {
        for pp in 2..=6 {
            for samples in 1..=24_usize {
                let (micros, under_quarter) = choose(generator, pp, samples).unwrap();
                assert!(micros >= pp || (micros == samples && !under_quarter), "{} {pp} {samples}", generator.name());
            }
        }
    }
}
