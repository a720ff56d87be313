//! The transport of channels: whole networks over it, no more messages in flight than the schedule needs, and peers
//! that have ended.

use crate::network::ranks::pipeline_over;
use crate::network::{Fault, serial};
use meshwork_pipeline::{
    Action, ChannelError, Generator, Shape, Tag, Transport, breadth_first, channels, forward_only, gpipe, lower,
};

#[test]
fn every_schedule_runs_over_channels_and_gives_the_serial_gradients() {
    for generator in Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()) {
        for (pp, virtual_stages) in [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (2, 3)] {
            for micros in [1, 2, 4, 6, 12] {
                let Ok(schedule) = generator.build(Shape { pp, virtual_stages, micros }) else { continue };
                let lowered = lower(&schedule).unwrap();
                let outcome = pipeline_over(&lowered, channels(&lowered), Fault::None).unwrap();
                assert_eq!(outcome, serial(micros), "{} pp={pp} v={virtual_stages} m={micros}", generator.name());
            }
        }
    }
}

/// A rank that fails drops its transport, and the others end with an error that names it.
#[test]
fn peers_of_a_rank_that_fails_end() {
    let lowered = lower(&gpipe(3, 4)).unwrap();
    let errors = pipeline_over(&lowered, channels(&lowered), Fault::Backward { stage: 1, micro: 2 }).unwrap_err();
    let (gone, own): (Vec<_>, Vec<_>) = errors.into_iter().partition(|error| error.contains("is gone, at the "));
    assert_eq!(own, ["stage 1, backward of micro-batch 2 on pp rank 1: loss is not finite"], "{gone:?}");
    assert!(gone.iter().any(|error| error.contains("pp rank 1 is gone, at the gradient of stage 1")), "{gone:?}");
}

fn tag(action: &str) -> Tag {
    action.parse::<Action>().unwrap().tag().unwrap()
}

#[test]
fn a_channel_has_room_for_what_the_schedule_needs_in_flight() {
    let lowered = lower(&breadth_first(4, 2, 16)).unwrap();
    assert_eq!(lowered.report().in_flight, 4);
    let mut ranks = channels(&lowered);
    let (last, first) = (ranks.pop().unwrap(), ranks.remove(0));
    let sender = std::thread::spawn(move || {
        let mut last = last;
        (0..16).try_for_each(|micro| last.send(0, tag(&format!("3SF{micro}")), micro))
    });
    // Four are sent, and the fifth waits: once the receiver is gone, it fails.
    let mut first = first;
    for micro in 0..3 {
        assert_eq!(first.recv(3, tag(&format!("4RF{micro}"))), Ok(micro));
    }
    drop(first);
    let error = sender.join().unwrap().unwrap_err();
    let ChannelError::PeerGone { rank: 0, tag } = error else { panic!("{error}") };
    assert!((3..=7).contains(&tag.micro), "{tag}");
}

#[test]
fn what_is_sent_before_a_rank_ends_is_received() {
    let lowered = lower(&forward_only(&[0, 1], 1)).unwrap();
    let [mut from, mut to] = <[_; 2]>::try_from(channels(&lowered)).unwrap();
    from.send(1, tag("0SF0"), "hello").unwrap();
    from.finish().unwrap();
    drop(from);
    assert_eq!(to.recv(0, tag("1RF0")), Ok("hello"));
    let gone = to.recv(0, tag("1RF0")).unwrap_err();
    assert_eq!(gone.to_string(), "pp rank 0 is gone, at the activation of stage 0, micro-batch 0");
}

#[test]
fn another_schedule_than_that_of_the_channels_is_told() {
    let lowered = lower(&forward_only(&[0, 1], 2)).unwrap();
    let [mut from, mut to] = <[_; 2]>::try_from(channels(&lowered)).unwrap();
    from.send(1, tag("0SF1"), ()).unwrap();
    assert_eq!(
        to.recv(0, tag("1RF0")).unwrap_err().to_string(),
        "pp rank 0 sent the activation of stage 0, micro-batch 1 where the activation of stage 0, micro-batch 0 was \
         expected: all ranks must run the same schedule"
    );
    assert_eq!(to.send(0, tag("1SB0"), ()), Err(ChannelError::NoChannel { from: 1, to: 0 }));
    assert_eq!(
        to.recv(7, tag("1RF0")).unwrap_err().to_string(),
        "no channel from pp rank 7 to pp rank 1: make the channels of the schedule that is run"
    );
}
