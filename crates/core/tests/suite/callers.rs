//! The calls that a rank is in, and errors as text.

use meshwork_core::comm::Caller;
use meshwork_core::{CommError, CommLog, Mesh, World};

#[test]
fn the_innermost_call_counts_and_is_left_when_its_guard_drops() {
    let log = CommLog::default();
    let name = || log.caller().map(|caller| caller.to_string());
    let step = log.enter("Trainer::step");
    let about = Caller { about: Some("half".into()), ..Caller::from("Rank::subgroup") };
    let inner = log.enter(about);
    assert_eq!(name().as_deref(), Some("Rank::subgroup(\"half\")"));
    drop(inner);
    assert_eq!(name().as_deref(), Some("Trainer::step"));
    drop(step);
    assert_eq!(name(), None);
    assert_eq!(
        [log.name_next("Trainer"), log.name_next("Ddp"), log.name_next("Trainer")],
        ["Trainer", "Ddp", "Trainer 2"]
    );
}

/// `fn main() -> Result<(), Box<dyn Error>>` prints `Debug`.
#[test]
fn debug_of_an_error_is_its_text() {
    let error = World::Threads(2).run(|world| if world.rank() == 0 { world.barrier() } else { Ok(()) }).unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
    assert!(format!("{:?}", Box::<dyn std::error::Error>::from(error)).starts_with("a world of 2 ranks failed: "));
    let error = "dp=0".parse::<Mesh>().unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}

#[test]
fn a_world_without_ranks_is_an_error() {
    let error = World::Threads(0).run(|_| Ok::<_, CommError>(())).unwrap_err();
    assert_eq!(error.to_string(), "a world of 0 ranks failed: a world has at least one rank");
}
