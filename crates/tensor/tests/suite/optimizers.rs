//! Update rules that read whole matrices: against recorded steps, and cut over ranks in every way.
//!
//! More than 400 lines: every rule against its recording, its cuts and its unfused form.

use meshwork_core::exact::LIMBS;
use meshwork_core::{Buffer, DType};
use meshwork_cpu::Cpu;
use meshwork_optim::{
    Adafactor, Adam8bit, Kept, Lamb, Muon, OptimError, Over, ParamShape, Pass, PassTotals, Rule, Run, SetPart, State,
    Update,
};
use meshwork_optim::{WholeOptimizer, clip_factor};
use meshwork_tensor::kernel::{FlatParts, Measured, WholePart, WholeVectors};
use meshwork_tensor::orthogonal::transform;
use meshwork_tensor::param::{LocalSlice, Piece};
use meshwork_tensor::{Device, Result, Shape};
use meshwork_testkit::opaque::Opaque;
use std::ops::Range;
use std::sync::Arc;

/// One rank's elements of a parameter, with what it keeps.
struct Held {
    slice: LocalSlice,
    part: Range<usize>,
    weights: Buffer,
    states: Vec<Buffer>,
    sets: Vec<Buffer>,
}

/// A parameter that is cut over ranks, which take their steps in turn.
struct Cut {
    device: Arc<dyn Device>,
    rule: Rule,
    shape: ParamShape,
    dims: Shape,
    exact: bool,
    ranks: Vec<Held>,
}

impl Cut {
    /// Cuts `weights`: each slice is held whole, and then in as many flat parts as `parts` says.
    fn new(
        device: &Arc<dyn Device>,
        rule: &Rule,
        shape: ParamShape,
        dims: Shape,
        weights: &[f32],
        cuts: &[Cutting],
    ) -> Self {
        let ranks = cuts
            .iter()
            .map(|(slice, part)| {
                let piece = Piece::cut(0, dims, slice.clone(), weights);
                let (mut states, mut sets) = (Vec::new(), Vec::new());
                for State { kept, .. } in rule.states(&shape) {
                    match kept {
                        Kept::Elements => states.push(device.zeros(DType::F32, part.len()).unwrap()),
                        Kept::Codes => states.push(device.zeros(DType::U8, part.len()).unwrap()),
                        Kept::Sets(over) => sets.push(device.zeros(DType::F32, over.count(&shape)).unwrap()),
                    }
                }
                let weights = device.upload(&Buffer::from_slice(&piece.values[part.clone()])).unwrap();
                Held { slice: slice.clone(), part: part.clone(), weights, states, sets }
            })
            .collect();
        Self { device: device.clone(), rule: rule.clone(), shape, dims, exact: true, ranks }
    }

    fn step(&mut self, update: Update, grads: &[f32]) -> Result<()> {
        let (device, rule, shape, dims) = (&self.device, &self.rule, self.shape, self.dims);
        let (optim, whole_optim) = (device.optim()?, device.whole_optim()?);
        let part = |slice: LocalSlice, part: Range<usize>| (slice, part);
        let places: Vec<_> = self.ranks.iter().map(|rank| part(rank.slice.clone(), rank.part.clone())).collect();
        let whole = |rank: usize| WholePart {
            rule,
            update,
            shape,
            dims,
            slice: &places[rank].0,
            part: places[rank].1.clone(),
            at: 0,
        };
        let grads: Vec<Buffer> = places
            .iter()
            .map(|(slice, part)| {
                let piece = Piece::cut(0, dims, slice.clone(), grads);
                device.upload(&Buffer::from_slice(&piece.values[part.clone()])).unwrap()
            })
            .collect();
        let mut totals: Vec<Vec<Buffer>> = self.ranks.iter().map(|_| Vec::new()).collect();
        for (number, pass) in rule.passes(&shape).iter().enumerate() {
            let count: usize = pass.over().iter().map(|over| over.count(&shape)).sum();
            let exact = self.exact && matches!(pass, Pass::Squares(_));
            let mut sum = vec![0.0; count * if exact { LIMBS } else { 1 }];
            for (at, rank) in self.ranks.iter_mut().enumerate() {
                let mut own = device.zeros(DType::F64, sum.len())?;
                let (sets, states) = (&rank.sets, &mut rank.states);
                let vectors = WholeVectors { grads: &grads[at], states, sets, totals: &totals[at], gathered: None };
                let into = if exact { Measured::Digits(&mut own, 0) } else { Measured::Sums(&mut own, 0) };
                whole_optim.measure(&whole(at), number, &rank.weights, vectors, Some(into))?;
                let own = device.download(&own)?;
                for (sum, &own) in sum.iter_mut().zip(own.as_slice::<f64>()?) {
                    *sum = if matches!(pass, Pass::Squares(_)) { *sum + own } else { own.max(*sum) };
                }
            }
            for (at, rank) in self.ranks.iter_mut().enumerate() {
                let mut all = device.upload(&Buffer::from_slice(&sum))?;
                if exact {
                    all = optim.exact_sums(&all)?;
                }
                whole_optim.finish_pass(&whole(at), number, &mut all, 0, &mut rank.sets)?;
                totals[at].push(all);
            }
        }
        let mut gathered = None;
        if let Some(of_matrices) = rule.gathers(&shape) {
            let mut values = device.zeros(DType::F32, shape.elements())?;
            for (at, rank) in self.ranks.iter_mut().enumerate() {
                let (sets, states) = (&rank.sets, &mut rank.states);
                let vectors = WholeVectors { grads: &grads[at], states, sets, totals: &totals[at], gathered: None };
                let into = Some(Measured::Values(&mut values));
                whole_optim.measure(&whole(at), rule.passes(&shape).len(), &rank.weights, vectors, into)?;
            }
            let sides = [shape.rows, shape.columns];
            for matrix in 0..shape.matrices {
                transform(&**device, of_matrices, sides, &mut values, matrix * shape.rows * shape.columns)?;
            }
            gathered = Some(values);
        }
        for (at, rank) in self.ranks.iter_mut().enumerate() {
            let (sets, states) = (&rank.sets, &mut rank.states);
            let gathered = gathered.as_ref();
            let vectors = WholeVectors { grads: &grads[at], states, sets, totals: &totals[at], gathered };
            whole_optim.update_whole(&whole(at), &mut rank.weights, vectors)?;
        }
        Ok(())
    }

    fn weights(&self) -> Vec<f32> {
        let mut whole = vec![f32::NAN; self.dims.count()];
        for rank in &self.ranks {
            let values = self.device.download(&rank.weights).unwrap();
            for (inner, place) in rank.slice.boxes(rank.part.clone()) {
                let from = place.start - rank.part.start;
                inner.for_each_run(self.dims, |first, range| {
                    let values = &values.as_slice::<f32>().unwrap()[from + range.start..from + range.end];
                    whole[first as usize..][..values.len()].copy_from_slice(values);
                });
            }
        }
        whole
    }
}

type Cutting = (LocalSlice, Range<usize>);

/// Ways to cut a parameter: whole; flat slices, as of ZeRO; a dim, as of tp, padded where it does not divide; both.
fn cuttings(dims: Shape) -> Vec<Vec<Cutting>> {
    let flat = |slice: LocalSlice, parts: usize| -> Vec<Cutting> {
        let (count, all) = (slice.stored.count().div_ceil(parts), slice.stored.count());
        let part = |at: usize| (slice.clone(), (at * count).min(all)..((at + 1) * count).min(all));
        (0..parts).map(part).collect()
    };
    let mut ways =
        vec![flat(LocalSlice::whole(dims), 1), flat(LocalSlice::whole(dims), 2), flat(LocalSlice::whole(dims), 5)];
    for dim in 0..dims.len() {
        let held = dims[dim].div_ceil(2);
        let half = |at: usize| {
            let (mut ranges, stored) = (LocalSlice::whole(dims).ranges, dims.with(dim, held));
            ranges[dim] = at * held..((at + 1) * held).min(dims[dim]);
            LocalSlice { stored, ranges }
        };
        ways.push(vec![half(0), half(1)].into_iter().flat_map(|slice| flat(slice, 1)).collect());
        ways.push(vec![half(0), half(1)].into_iter().flat_map(|slice| flat(slice, 3)).collect());
    }
    ways
}

fn shape_of(dims: Shape) -> ParamShape {
    match dims.len() {
        1 => ParamShape::vector(dims[0]),
        2 => ParamShape::matrix(dims[0], dims[1]),
        3 => ParamShape { matrices: dims[0], ..ParamShape::matrix(dims[1], dims[2]) },
        _ => pairs(dims),
    }
}

/// Experts `[experts, rows, 2, columns]` with gate and up each.
fn pairs(dims: Shape) -> ParamShape {
    ParamShape { matrices: dims[0] * dims[2], interleaved: dims[2], ..ParamShape::matrix(dims[1], dims[3]) }
}

fn devices() -> [Arc<dyn Device>; 2] {
    [Cpu::device(), Opaque::device(Cpu::device())]
}

/// What `make_optimizer_fixtures.py` recorded.
fn fixtures() -> serde_json::Value {
    serde_json::from_str(include_str!("../fixtures/optimizers.json")).unwrap()
}

fn floats(value: &serde_json::Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

#[test]
fn steps_are_those_of_the_published_implementations() {
    let rules = [
        Rule::from(Lamb { weight_decay: 0.1, ..Lamb::default() }),
        Adafactor { weight_decay: 0.1, ..Adafactor::default() }.into(),
        Muon::default().into(),
        Adam8bit { block: 16, ..Adam8bit::default() }.into(),
    ];
    for rule in &rules {
        let lr = if rule.name() == "adafactor" { 0.05 } else { 0.01 };
        let fixtures = fixtures();
        let cases = fixtures[rule.name()].as_array().unwrap();
        assert!(cases.len() > 1);
        for case in cases {
            let dims: Vec<usize> =
                case["shape"].as_array().unwrap().iter().map(|extent| extent.as_u64().unwrap() as usize).collect();
            let (dims, start) = (Shape::new(&dims), floats(&case["start"]));
            for (device, exact) in devices().iter().flat_map(|device| [(device, false), (device, true)]) {
                let mut cut = Cut::new(device, rule, shape_of(dims), dims, &start, &cuttings(dims)[0]);
                cut.exact = exact;
                let steps = case["grads"].as_array().unwrap().iter().zip(case["weights"].as_array().unwrap());
                for (step, (grads, wanted)) in (1..).zip(steps) {
                    // Half the gradients, with a factor of two.
                    let halves: Vec<f32> = floats(grads).iter().map(|grad| grad / 2.0).collect();
                    cut.step(Update { step, lr, grad_scale: 2.0, decay_factor: 1.0 }, &halves).unwrap();
                    for (at, (got, wanted)) in cut.weights().iter().zip(floats(wanted)).enumerate() {
                        // Weights are about 1, steps about 0.01 to 0.05; Newton-Schulz amplifies the rounding of its
                        // products.
                        assert!(
                            (got - wanted).abs() < 2e-6,
                            "{rule:?} of {dims:?}, step {step}, element {at}: {got} {wanted}"
                        );
                    }
                }
            }
        }
    }
}

/// Largest values of blocks and a state in bytes, which none of our rules keeps beside f32 states: w moves by the
/// largest absolute gradient of its block, and a byte counts the steps.
#[derive(Debug)]
struct Blocks;

impl WholeOptimizer for Blocks {
    fn name(&self) -> &str {
        "blocks"
    }

    fn states(&self, _: &ParamShape) -> Vec<State> {
        let over = Over::Blocks(7);
        vec![State { name: "steps", kept: Kept::Codes }, State::of_elements("sum"), State::of_sets("largest", over)]
    }

    fn passes(&self, _: &ParamShape) -> Vec<Pass> {
        vec![Pass::Largest(vec![Over::Blocks(7)])]
    }

    fn measure(
        &self,
        _: usize,
        _: &[f32],
        run: &mut Run<'_, '_>,
        out: &mut [&mut [f32]],
    ) -> std::result::Result<(), OptimError> {
        let update = run.update;
        run.codes[0].iter_mut().for_each(|code| *code += 1);
        out[0].iter_mut().zip(run.grads).for_each(|(out, grad)| *out = update.grad_scale * grad);
        Ok(())
    }

    fn finish_pass(&self, PassTotals { totals, sets, .. }: PassTotals<'_, '_>) -> std::result::Result<(), OptimError> {
        sets[0].iter_mut().zip(&*totals[0]).for_each(|(set, &total)| *set += total as f32);
        Ok(())
    }

    fn update(&self, weights: &mut [f32], run: &mut Run<'_, '_>) -> std::result::Result<(), OptimError> {
        let update = run.update;
        for SetPart { range, set, .. } in Over::Blocks(7).sets(&run.shape, run.first, weights.len()) {
            for at in range {
                run.states[0][at] += run.totals[0][set] as f32;
                assert_eq!((u64::from(run.codes[0][at]), run.states[0][at]), (update.step, run.sets[0][set]));
                weights[at] -= update.lr as f32 * run.states[0][at];
            }
        }
        Ok(())
    }
}

fn whole_rules() -> [Rule; 6] {
    [
        Rule::from(Lamb::default()),
        Adafactor::default().into(),
        Adafactor { relative_step: false, ..Adafactor::default() }.into(),
        Muon::default().into(),
        Adam8bit { block: 9, ..Adam8bit::default() }.into(),
        Rule::whole(Blocks),
    ]
}

fn normal(dims: Shape, step: u64) -> Vec<f32> {
    let mut values = vec![0.0; dims.count()];
    meshwork_tensor::random::fill_normal(meshwork_tensor::random::key(3, "values"), 1000 * step, &mut values);
    values
}

/// A parameter that holds several matrices, or several vectors, is updated as if each were a parameter by itself, bit
/// by bit: stacked as queries, keys and values are, with rows that take turns as those of gate and up do, and both, as
/// in experts.
#[test]
fn matrices_of_one_parameter_are_updated_as_parameters_of_their_own() {
    let vectors = ParamShape { matrices: 2, ..ParamShape::vector(9) };
    let turns = ParamShape { matrices: 2, interleaved: 2, hidden: false, ..ParamShape::matrix(9, 1) };
    for (dims, shape) in [
        (&[3, 5, 7][..], ParamShape { matrices: 3, ..ParamShape::matrix(5, 7) }),
        (&[5, 2, 7], ParamShape { matrices: 2, interleaved: 2, ..ParamShape::matrix(5, 7) }),
        (&[2, 5, 2, 7], pairs(Shape::new(&[2, 5, 2, 7]))),
        (&[2, 9], vectors),
        (&[9, 2], turns),
    ] {
        let dims = Shape::new(dims);
        // What matrix an element belongs to, and where it lies there: by the extents alone.
        let turns = shape.interleaved;
        let place = |stored: usize| {
            let (line, column) = (stored / shape.columns, stored % shape.columns);
            let (row, turn) = (line / turns % shape.rows, line % turns);
            let matrix = line / (shape.rows * turns) * turns + turn;
            (matrix, row * shape.columns + column)
        };
        let apart = |whole: &[f32]| {
            let mut all = vec![vec![f32::NAN; shape.rows * shape.columns]; shape.matrices];
            whole.iter().enumerate().for_each(|(stored, value)| all[place(stored).0][place(stored).1] = *value);
            all
        };
        let one = ParamShape { matrices: 1, interleaved: 1, ..shape };
        let one = if one.is_matrix() { one } else { ParamShape::vector(one.elements()) };
        let own = if one.is_matrix() { Shape::new(&[one.rows, one.columns]) } else { Shape::new(&[one.elements()]) };
        for rule in whole_rules() {
            if !one.is_matrix() && rule.name() == "muon" {
                continue; // it is for matrices
            }
            for device in devices().iter().filter(|device| !rule.is_users() || device.name() != "opaque") {
                let start = normal(dims, 0);
                let mut whole = Cut::new(device, &rule, shape, dims, &start, &cuttings(dims)[1]);
                let of_matrix = |start: &Vec<f32>| Cut::new(device, &rule, one, own, start, &cuttings(own)[0]);
                let mut parts: Vec<Cut> = apart(&start).iter().map(of_matrix).collect();
                for step in 1..4 {
                    // Of one parameter all gradients are of one size; of the matrices each has another.
                    let size = |stored: usize| 10f32.powi(place(stored).0 as i32 - 1);
                    let grads = normal(dims, step).into_iter().enumerate().map(|(stored, grad)| grad * size(stored));
                    let (grads, update) =
                        (grads.collect::<Vec<_>>(), Update { step, lr: 0.1, grad_scale: 0.5, decay_factor: 0.5 });
                    whole.step(update, &grads).unwrap();
                    for (part, grads) in parts.iter_mut().zip(apart(&grads)) {
                        part.step(update, &grads).unwrap();
                    }
                }
                let wanted: Vec<Vec<f32>> = parts.iter().map(Cut::weights).collect();
                assert_eq!(apart(&whole.weights()), wanted, "{rule:?} of {dims:?} on {}", device.name());
            }
        }
    }
}

/// Ranks may cut a parameter in any way: with exact sums the bits are those of one rank, on every device.
#[test]
fn bits_do_not_depend_on_who_holds_which_elements() {
    let rules = whole_rules();
    for (rule, dims) in rules
        .iter()
        .flat_map(|rule| [&[13][..], &[6, 10], &[2, 5, 7], &[2, 3, 2, 7]].map(|dims| (rule, Shape::new(dims))))
    {
        if dims.len() == 1 && rule.name() == "muon" {
            continue; // it is for matrices
        }
        let normal = |step: u64| normal(dims, step);
        let mut bits: Option<Vec<u32>> = None;
        let users = matches!(rule, Rule::Whole(_));
        for (device, way) in
            devices().iter().flat_map(|device| cuttings(dims).into_iter().map(move |way| (device, way)))
        {
            if users && device.name() == "opaque" {
                continue; // cannot call the host
            }
            let mut cut = Cut::new(device, rule, shape_of(dims), dims, &normal(0), &way);
            for step in 1..4 {
                let grad_scale = clip_factor(8.0, 5.0);
                cut.step(Update { step, lr: 0.1, grad_scale, decay_factor: 0.5 }, &normal(step)).unwrap();
            }
            let got: Vec<u32> = cut.weights().iter().map(|weight| weight.to_bits()).collect();
            assert_eq!(&got, bits.get_or_insert_with(|| got.clone()), "{rule:?} of {dims:?} in {way:?}");
        }
    }
}

#[test]
fn rules_of_elements_and_of_whole_parameters_are_not_mistaken_for_each_other() {
    let device = Cpu::device();
    let (mut weights, grads, all) = (Buffer::from_slice(&[1.0f32]), Buffer::from_slice(&[1.0f32]), 0..1);
    let update = Update { step: 1, lr: 1.0, grad_scale: 1.0, decay_factor: 0.0 };
    let ranges = std::slice::from_ref(&all);
    let flat = FlatParts { weights: &mut weights, grads: &grads, states: &mut [], ranges };
    let refused = device.optim().unwrap().update(&Lamb::default().into(), update, &mut [flat]);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "optimizer: lamb reads whole parameters: run its passes (WholeOptimizer), or use adamw or sgd on elements"
    );
    let dims = Shape::new(&[1]);
    let sgd = Rule::from(meshwork_optim::Sgd::default());
    let mut cut = Cut::new(&device, &sgd, shape_of(dims), dims, &[1.0], &cuttings(dims)[0]);
    let refused = cut.step(update, &[1.0]).unwrap_err().to_string();
    assert_eq!(refused, "optimizer: sgd: it updates element by element and measures nothing");
}
