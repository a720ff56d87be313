//! Actions as text, and both ends of a message.

use meshwork_pipeline::{Action, ParseActionError, parse_actions};

#[test]
fn every_action_round_trips_through_text() {
    for action in parse_actions("0F0 0B0 0I0 0W0 0U0 0SF0 0RF0 0SB0 0RB0").unwrap() {
        for (stage, micro) in [(0, 0), (2, 0), (0, 7), (10, 2047)] {
            let action = Action { stage, micro, ..action };
            assert_eq!(action.to_string().parse(), Ok(action));
        }
    }
}

#[test]
fn what_is_no_action_is_refused() {
    for text in ["", "F", "2", "2F", "F0", "2F0x", "2 F0", "2f0", "2FS0", "-1F0", "2F+0", "2F0F1", "2S0", "2X0"] {
        assert_eq!(text.parse::<Action>(), Err(ParseActionError { text: text.to_string() }));
    }
    assert!("99999999999999999999999F0".parse::<Action>().is_err());
}

#[test]
fn both_ends_of_a_message_have_one_tag() {
    for (send, receive) in [("2SF5", "3RF5"), ("3SB5", "2RB5")] {
        let (send, receive): (Action, Action) = (send.parse().unwrap(), receive.parse().unwrap());
        assert_eq!(send.counterpart(), Some(receive));
        assert_eq!(receive.counterpart(), Some(send));
        assert_eq!(send.tag(), receive.tag());
        assert_eq!(send.tag().unwrap().stage, send.stage);
    }
    assert_eq!("0RF5".parse::<Action>().unwrap().tag(), None);
    assert_eq!("0F5".parse::<Action>().unwrap().tag(), None);
}
