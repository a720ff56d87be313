//! Reading and writing profiles, and the errors of invalid text.

use crate::golden::{ALEXNET, VGG16};
use meshwork_pipeline::partition::{Layer, PlanError, Profile, ProfileError, States};

/// The published profiles in numbers. Totals leave out the input.
#[test]
fn the_published_profiles_are_read_whole() {
    for (text, layers, edges, forward_ms, backward_ms, megabytes) in
        [(ALEXNET, 23, 23, 44.801, 40.520, 244.40), (VGG16, 41, 41, 233.902, 438.633, 553.43)]
    {
        let profile: Profile = text.parse().unwrap();
        assert_eq!((profile.layers().len(), profile.edges().len()), (layers, edges));
        let sum = |of: fn(&Layer) -> f64| -> f64 {
            profile.layers().iter().filter(|layer| !layer.name.starts_with("Input")).map(of).sum()
        };
        assert!((sum(|layer| layer.forward_ms) - forward_ms).abs() < 5e-4);
        assert!((sum(|layer| layer.backward_ms) - backward_ms).abs() < 5e-4);
        assert!((sum(|layer| layer.parameter_bytes) / 1e6 - megabytes).abs() < 5e-3);
        assert_eq!(profile.to_string().parse::<Profile>().unwrap(), profile);
    }
}

const A: &str =
    "a -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=[3; 4.5], parameter_size=5";
const B: &str =
    "b -- Linear -- forward_compute_time=0, backward_compute_time=0, activation_size=0, parameter_size=0 -- stage_id=2";

#[test]
fn lines_may_stand_in_any_order() {
    let profile: Profile = format!("\n\ta -- b\n{B}\n\n{A}\r\n").parse().unwrap();
    assert_eq!(profile.edges(), [(1, 0)]);
    assert_eq!((profile.layers()[1].activation_bytes, profile.layers()[0].stage), (7.5, Some(2)));
    assert_eq!(profile.to_string().parse::<Profile>().unwrap(), profile);
}

/// Each fault names its line, the text there and what would be valid.
#[test]
fn a_faulty_profile_is_refused_by_line() {
    let field = |from: &str, to: &str| format!("{B}\n{}", A.replace(from, to));
    let more = |lines: &str| format!("{A}\n{B}\n{lines}");
    let cases: [(String, &str); 19] = [
        (String::new(), "line 1: no layer; a profile has a line for each"),
        ("\n\n".to_owned(), "line 1: no layer; a profile has a line for each"),
        ("graph".to_owned(), "line 1: \"graph\" is neither a layer nor an edge, such as \"a -- Linear"),
        (more("\ta > b"), "line 3: \"a > b\" is neither a layer nor an edge"),
        (more("\ta -- b -- c"), "line 3: \"a -- b -- c\" is neither a layer nor an edge"),
        (
            field(", parameter_size=5", ""),
            "line 2: no parameter_size; a layer is \"ID -- NAME -- forward_compute_time=MS",
        ),
        (
            field("backward_compute_time", "backward_time"),
            "line 2: \"backward_time=2\" where backward_compute_time should be",
        ),
        (field("size=5", "size=5, x=1"), "line 2: \"x=1\" where the end should be"),
        (
            field("time=1", "time=fast"),
            "line 2: forward_compute_time = \"fast\" is no number of milliseconds; use a finite",
        ),
        (field("time=2", "time=-2"), "line 2: backward_compute_time = \"-2\" is no number of milliseconds"),
        (field("size=5", "size=inf"), "line 2: parameter_size = \"inf\" is no number of bytes"),
        (
            field("4.5", ""),
            "line 2: activation_size = \" \" is no number of bytes; use a finite number of at least 0, or some in",
        ),
        (field("size=5", "size=5 -- stage_id=x"), "line 2: stage_id = \"x\" is no number of a stage"),
        (field("a -- ", "b -- "), "line 2: line 1 has a layer \"b\" already"),
        (field("Linear", ""), "line 2: \"\" cannot stand for a layer"),
        (more("\ta -- c"), "line 3: no layer \"c\"; an edge joins two layers of the profile"),
        (more("\ta -- b\n\ta -- b"), "line 4: line 3 has the same edge"),
        (more("\ta -- a"), "line 3: closes a cycle, a -- a; a layer may read only from layers before it"),
        (more("\tb -- a\n\n\ta -- b"), "line 5: closes a cycle, b -- a -- b;"),
    ];
    for (text, told) in cases {
        let error = text.parse::<Profile>().expect_err(&text).to_string();
        assert!(error.contains(told), "{text}\n{error}\n{told}");
    }
}

/// A cycle is reported without the layers that only lead to it or from it.
#[test]
fn a_cycle_is_told_alone() {
    let line = |id: &str| B.replacen("b -- ", &format!("{id} -- "), 1) + "\n";
    let layers: String = ["in", "x", "y", "z", "out"].map(line).concat();
    let text = layers + "\tx -- y\n\tz -- x\n\ty -- z\n\tin -- x\n\tz -- out\n";
    let error = text.parse::<Profile>().unwrap_err().to_string();
    assert!(error.starts_with("line 8: closes a cycle, "), "{error}");
    assert!(
        ["x -- y -- z -- x", "y -- z -- x -- y", "z -- x -- y -- z"].iter().any(|told| error.contains(told)),
        "{error}"
    );
    assert!(!error.contains("in --") && !error.contains("out"), "{error}");
}

fn layer(id: &str, name: &str) -> Layer {
    Layer {
        id: id.to_owned(),
        name: name.to_owned(),
        forward_ms: 1.5,
        backward_ms: 3.0,
        activation_bytes: 8.0,
        parameter_bytes: 0.1,
        stage: None,
    }
}

#[test]
fn a_chain_is_written_and_read_again() {
    let chain =
        Profile::chain(vec![layer("a", "Embedding"), layer("b", "Block(768, heads=12)"), layer("c", "Head")]).unwrap();
    assert_eq!(chain.edges(), [(0, 1), (1, 2)]);
    assert_eq!(chain.to_string().parse::<Profile>().unwrap(), chain);
    for (layers, told) in [
        (vec![], "line 1: no layer"),
        (vec![layer("a", "x"), layer("a", "y")], "line 2: line 1 has a layer \"a\" already"),
        (vec![layer("a -- b", "x")], "line 1: \"a -- b\" cannot stand for a layer"),
        (vec![layer("a", "two\nlines")], "cannot stand for a layer"),
        (vec![Layer { forward_ms: f64::NAN, ..layer("a", "x") }], "forward_compute_time = \"NaN\" is no number"),
    ] {
        let error: ProfileError = Profile::chain(layers).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
    }
}

#[test]
fn what_cannot_be_cut_is_refused() {
    let read = |text: String| States::new(&text.parse::<Profile>().unwrap());
    let input = B.replace("Linear", "Input0");
    assert_eq!(read(input.clone()), Err(PlanError::NoLayers));
    // An unconnected input is not part of the model; an unconnected layer is.
    assert_eq!(read(format!("{A}\n{input}")).unwrap().count(), 1);
    assert_eq!(read(format!("{A}\n{B}")), Err(PlanError::Unconnected { from: "a".into(), to: "b".into() }));
    // Fifteen branches of one layer side by side: 2^15 sets of them.
    let line = |id: &str| B.replacen("b -- ", &format!("{id} -- "), 1) + "\n";
    let branches: Vec<String> = (0..15).map(|at| format!("x{at}")).collect();
    let layers: String = branches.iter().map(|id| line(id)).collect();
    let edges: String = branches.iter().map(|id| format!("\ta -- {id}\n")).collect();
    let error = read(format!("{A}\n{layers}{edges}")).unwrap_err().to_string();
    assert!(error.starts_with("more than 16384 places for a cut"), "{error}");
    // An index sink that no layer reads is not a layer either.
    let sink = line("i").replace("Linear", "__getitem__(0)");
    assert_eq!(read(format!("{A}\n{sink}\ta -- i\n")).unwrap().count(), 1);
}
