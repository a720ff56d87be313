//! Pictures and traces: well-formed and complete, for predicted and measured timelines.

use meshwork_pipeline::{
    Action, ActionKind, Costs, Generator, Interval, Schedule, Timeline, chrome_trace, simulate, svg, text_grid, zb_v,
};

fn on_paper(schedule: &Schedule) -> Timeline {
    simulate(schedule, &Costs::per_rank(schedule, 1.0, 1.0, 1.0)).unwrap()
}

/// A timeline as from a run: in seconds, with an offset, a little uneven, with updates that take time.
fn measured(schedule: &Schedule) -> Timeline {
    let mut timeline = simulate(schedule, &Costs::per_rank(schedule, 0.011, 0.013, 0.009)).unwrap();
    timeline.name = "measured <\"1\" & only>".to_string();
    for interval in timeline.ranks.iter_mut().flatten() {
        interval.start += 100.0;
        interval.end += if interval.action.kind == ActionKind::Update { 100.002 } else { 100.0 };
    }
    timeline
}

/// Matches the tags of an XML text, and returns its number of elements.
fn elements(xml: &str) -> usize {
    let (mut open, mut count) = (Vec::new(), 0);
    for tag in xml.split('<').skip(1) {
        let (tag, text) = tag.split_once('>').expect("a tag ends");
        assert!(
            !text.contains('>') && !text.replace("&amp;", "").replace("&lt;", "").replace("&gt;", "").contains('&')
        );
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "{tag}");
        } else {
            count += 1;
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
    }
    assert_eq!(open, [] as [&str; 0]);
    count
}

#[test]
fn every_action_is_in_the_picture() {
    for generator in Generator::ALL {
        let schedule = generator.build_steps(generator.shape(4, 8), 2).unwrap();
        let actions = schedule.actions.iter().map(Vec::len).sum::<usize>();
        let (predicted, measured) = (on_paper(&schedule), measured(&schedule));
        for picture in [svg(&[&predicted]), svg(&[&measured]), svg(&[&predicted, &predicted])] {
            assert!(elements(&picture) > actions, "{}", generator.name());
        }
        assert_eq!(svg(&[&predicted]).matches("<title>").count(), actions);
        assert_eq!(svg(&[&predicted, &predicted]).matches("<title>").count(), 2 * actions);
        let legend = |text: &str| svg(&[&predicted]).contains(&format!(">{text}"));
        assert_eq!(legend("update"), !generator.is_synchronous());
        assert_eq!(legend("weight gradient"), generator.name().starts_with("zb") || generator == Generator::DualPipeV);
    }
    assert!(svg(&[&measured(&zb_v(2, 4))]).contains("measured &lt;\"1\" &amp; only&gt;"));
}

/// A prediction and a run of it that takes twice as long: twice as wide, on one scale.
#[test]
fn predicted_and_measured_share_a_scale() {
    let schedule = zb_v(2, 4);
    let predicted = on_paper(&schedule);
    let mut slow = predicted.clone();
    for interval in slow.ranks.iter_mut().flatten() {
        *interval = Interval { start: 2.0 * interval.start, end: 2.0 * interval.end, ..*interval };
    }
    let picture = svg(&[&predicted, &slow]);
    let frames: Vec<f64> = picture
        .lines()
        .filter(|line| line.contains("fill=\"none\""))
        .map(|line| line.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(frames.len(), 2);
    assert!((frames[1] - 2.0 * frames[0]).abs() < 0.02, "{frames:?}");
}

#[test]
fn long_runs_stay_within_bounds_and_narrow_boxes_go_without_numbers() {
    let schedule = Generator::OneFOneB.build(Generator::OneFOneB.shape(4, 500)).unwrap();
    let picture = svg(&[&on_paper(&schedule)]);
    assert!(picture.contains("width=\"2400\""), "{}", &picture[..200]);
    assert!(!picture.contains("y=\"17\""));
    assert_eq!(picture.matches("<title>").count(), 2 * 4 * 500);
    assert_eq!(svg(&[&on_paper(&zb_v(2, 4))]).matches("y=\"17\"").count(), 2 * 2 * 3 * 4);
}

#[test]
fn a_timeline_of_nothing_is_drawn_as_nothing() {
    let empty = Timeline { name: String::new(), placement: vec![0], micros_per_step: 1, ranks: vec![vec![]] };
    elements(&svg(&[&empty]));
    elements(&svg(&[]));
    assert_eq!(text_grid(&empty), "rank 0 |\n");
    assert_eq!((empty.makespan(), empty.span(), empty.bubble_of_total(), empty.speedup()), (0.0, 0.0, 0.0, 0.0));
    assert_eq!(empty.peak_activations(), [0.0]);
}

#[test]
fn text_grids_of_measured_runs() {
    let action = |kind, micro| Action { kind, stage: 0, micro };
    let at = |kind, micro, start, end| Interval { action: action(kind, micro), start, end };
    let timeline = Timeline {
        name: "measured".to_string(),
        placement: vec![0],
        micros_per_step: 2,
        ranks: vec![vec![
            at(ActionKind::Forward, 0, 7.0, 8.0),
            at(ActionKind::RecvGradient, 0, 8.0, 8.4),
            at(ActionKind::Forward, 1, 8.5, 9.7),
            at(ActionKind::Backward, 0, 12.0, 14.1),
            at(ActionKind::Update, 0, 14.1, 14.1),
        ]],
    };
    assert_eq!(text_grid(&timeline), "rank 0 | F0 F1          B0---\n");
    assert_eq!(timeline.peak_activations(), [2.0]);

    // 0.3 / 0.1 is a little less than 3.
    let rounded = vec![at(ActionKind::Forward, 0, 0.0, 0.1), at(ActionKind::Backward, 0, 0.3, 0.5)];
    assert_eq!(text_grid(&Timeline { ranks: vec![rounded], ..timeline }), "rank 0 | F0       B0---\n");
}

#[test]
fn a_trace_has_an_event_per_action_in_microseconds() {
    let schedule = zb_v(2, 4);
    let actions = schedule.actions.iter().map(Vec::len).sum::<usize>();
    let trace = chrome_trace(&[&on_paper(&schedule), &measured(&schedule)], 1e6);
    assert_eq!(trace.matches("\"ph\":\"X\"").count(), 2 * actions);
    assert_eq!(trace.matches("\"ph\":\"M\"").count(), 2 * (1 + 2));
    assert!(trace.contains(r#""args":{"name":"measured <\"1\" & only>"}"#));
    let first =
        r#"{"ph":"X","name":"0F0","cat":"forward","pid":0,"tid":0,"ts":0,"dur":500000,"args":{"stage":0,"micro":0}}"#;
    assert!(trace.contains(first), "{trace}");
}
