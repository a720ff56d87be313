//! The dense oracle: each token through its experts, one by one, in f64 and with nothing of the crate. Gradients by
//! finite differences.
//!
//! More than 400 lines: the oracle of all routers and experts, and what is held to it.

use crate::world::{ALONE, Case, Outcome, adapters, number, run};
use meshwork_moe::router::METRICS;
use meshwork_moe::{ExpertGroups, MoeConfig, Overflow, RouterKind};
use meshwork_tensor::param::Adapters;
use meshwork_tensor::tape::Mode;
use std::collections::BTreeMap;

type Named = BTreeMap<String, Vec<f64>>;

struct Oracle<'a> {
    case: &'a Case,
    params: Named,
    /// (token, expert) of every choice that is used, and per token those that were chosen. Fixed at the point of the
    /// gradient.
    used: Vec<Vec<usize>>,
    chosen: Vec<Vec<usize>>,
    /// Those whose scores are the weights: the chosen ones, with other experts where these are full and the case
    /// re-routes.
    routed: Vec<Vec<usize>>,
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::MIN, f64::max);
    let e: Vec<f64> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// `w [out, in] · x`
fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

impl<'a> Oracle<'a> {
    fn new(case: &'a Case) -> Self {
        let (config, [batch, seq, hidden, ffn]) = (case.config, case.dims);
        let experts = config.num_experts;
        let shapes: Vec<(&str, usize)> = match case.swiglu {
            true => vec![("gate_up.weight", ffn * 2 * hidden), ("down.weight", hidden * ffn)],
            false => vec![
                ("up.weight", ffn * hidden),
                ("down.weight", hidden * ffn),
                ("up.bias", ffn),
                ("down.bias", hidden),
            ],
        };
        let rank = adapters(case).rank;
        let adapters: &[(&str, usize)] = match (case.adapted, case.swiglu) {
            (false, _) => &[],
            (true, true) => &[
                ("gate_up.a", rank * hidden),
                ("gate_up.b", ffn * rank),
                ("down.a", rank * ffn),
                ("down.b", hidden * rank),
            ],
            (true, false) => {
                &[("up.a", rank * hidden), ("up.b", ffn * rank), ("down.a", rank * ffn), ("down.b", hidden * rank)]
            }
        };
        let shapes = shapes.into_iter().chain(adapters.iter().copied());
        let draw = |name: &str, count: usize| (0..count as u64).map(|i| f64::from(number(name, i))).collect::<Vec<_>>();
        let mut params: Named = shapes
            .map(|(part, count)| (format!("experts.{part}"), draw(&format!("experts.{part}"), experts * count)))
            .collect();
        params.insert("router.weight".to_owned(), draw("router.weight", experts * hidden));
        if config.router == RouterKind::Bias {
            params.insert("router.bias".to_owned(), draw("router.bias", experts));
        }
        params.insert("x".to_owned(), draw("x", batch * seq * hidden));
        let mut oracle = Self { case, params, used: Vec::new(), chosen: Vec::new(), routed: Vec::new() };
        oracle.choose();
        oracle
    }

    fn logits(&self, params: &Named, token: usize) -> Vec<f64> {
        let hidden = self.case.dims[2];
        product(&params["router.weight"], &params["x"][token * hidden..][..hidden])
    }

    fn scores(&self, params: &Named, token: usize) -> Vec<f64> {
        let logits = self.logits(params, token);
        match self.case.config.router {
            RouterKind::Bias => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            _ => softmax(&logits),
        }
    }

    fn choose(&mut self) {
        let (config, [batch, seq, ..]) = (self.case.config, self.case.dims);
        let experts = config.num_experts;
        let capacity = match (config.capacity_factor, config.router) {
            (0.0, RouterKind::ExpertChoice) => config.top_k * seq / experts,
            (0.0, _) => usize::MAX,
            (factor, _) => (factor * (config.top_k * seq) as f64 / experts as f64).ceil() as usize,
        };
        for sample in 0..batch {
            let scores: Vec<Vec<f64>> = (0..seq).map(|t| self.scores(&self.params, sample * seq + t)).collect();
            let mut used = vec![Vec::new(); seq];
            if config.router == RouterKind::ExpertChoice {
                let take = |e: usize| {
                    let mut tokens: Vec<usize> = (0..seq).collect();
                    tokens.sort_by(|&a, &b| scores[b][e].total_cmp(&scores[a][e]));
                    tokens[..capacity].iter().for_each(|&t| used[t].push(e));
                };
                (0..experts).for_each(take);
                self.used.extend(used.clone());
                self.chosen.extend(used.clone());
                self.routed.extend(used);
                continue;
            }
            let ranked: Vec<Vec<usize>> = scores
                .iter()
                .map(|scores| {
                    let bias = self.params.get("router.bias");
                    let value = |e: usize| scores[e] + bias.map_or(0.0, |bias| bias[e]);
                    let size = experts / config.groups.groups;
                    let of_group = |g: usize| {
                        let mut values: Vec<f64> = (g * size..(g + 1) * size).map(value).collect();
                        values.sort_by(|a, b| b.total_cmp(a));
                        values[..config.groups.best].iter().sum::<f64>()
                    };
                    let mut groups: Vec<usize> = (0..config.groups.groups).collect();
                    groups.sort_by(|&a, &b| of_group(b).total_cmp(&of_group(a)));
                    let open = &groups[..config.groups.top_groups];
                    let mut all: Vec<usize> = (0..experts).filter(|e| open.contains(&(e / size))).collect();
                    all.sort_by(|&a, &b| value(b).total_cmp(&value(a)));
                    all
                })
                .collect();
            let chosen: Vec<Vec<usize>> = ranked.iter().map(|ranked| ranked[..config.top_k].to_vec()).collect();
            let mut routed = chosen.clone();
            let mut taken = vec![0; experts];
            for choice in 0..config.top_k {
                for ((ranked, routed), used) in ranked.iter().zip(&mut routed).zip(&mut used) {
                    let mut open = vec![ranked[choice]];
                    if config.overflow == Overflow::Reroute {
                        open.extend(ranked[config.top_k..].iter().filter(|e| !used.contains(e)));
                    }
                    if let Some(e) = open.into_iter().find(|&e| taken[e] < capacity) {
                        taken[e] += 1;
                        used.push(e);
                        routed[choice] = e;
                    }
                }
            }
            self.routed.extend(routed);
            self.used.extend(used);
            self.chosen.extend(chosen);
        }
    }

    fn expert(&self, params: &Named, e: usize, x: &[f64]) -> Vec<f64> {
        let [_, _, hidden, ffn] = self.case.dims;
        let part = |name: &str, size: usize| &params[&format!("experts.{name}")][e * size..][..size];
        // y + s · B (A x), of every row of y or of every second one.
        let adapted = |layer: &str, mut y: Vec<f64>, x: &[f64], each: usize| {
            let Adapters { rank, scale, .. } = adapters(self.case);
            if self.case.adapted {
                let inner = product(part(&format!("{layer}.a"), rank * x.len()), x);
                let beside = product(part(&format!("{layer}.b"), y.len() / each * rank), &inner);
                y.iter_mut().skip(each - 1).step_by(each).zip(beside).for_each(|(y, beside)| *y += scale * beside);
            }
            y
        };
        if self.case.swiglu {
            let pairs = adapted("gate_up", product(part("gate_up.weight", ffn * 2 * hidden), x), x, 2);
            let inner: Vec<f64> = pairs.chunks(2).map(|pair| pair[0] / (1.0 + (-pair[0]).exp()) * pair[1]).collect();
            return adapted("down", product(part("down.weight", hidden * ffn), &inner), &inner, 1);
        }
        let add = |y: Vec<f64>, bias: &[f64]| y.iter().zip(bias).map(|(y, b)| y + b).collect::<Vec<_>>();
        let inner = adapted("up", product(part("up.weight", ffn * hidden), x), x, 1);
        let inner = add(inner, part("up.bias", ffn));
        let inner: Vec<f64> = inner.into_iter().map(gelu).collect();
        let y = adapted("down", product(part("down.weight", hidden * ffn), &inner), &inner, 1);
        add(y, part("down.bias", hidden))
    }

    fn output(&self, params: &Named) -> Vec<f64> {
        let (config, hidden) = (self.case.config, self.case.dims[2]);
        let mut out = Vec::new();
        for (token, used) in self.used.iter().enumerate() {
            let scores = self.scores(params, token);
            let normalise = match config.router {
                RouterKind::TopK => config.normalise,
                RouterKind::Gshard | RouterKind::Bias => true,
                _ => false,
            };
            let sum = if normalise { self.routed[token].iter().map(|&e| scores[e]).sum() } else { 1.0 };
            let mut y = vec![0.0; hidden];
            for &e in used {
                let result = self.expert(params, e, &params["x"][token * hidden..][..hidden]);
                y.iter_mut().zip(result).for_each(|(y, r)| *y += config.routed_scaling * scores[e] / sum * r);
            }
            out.extend(y);
        }
        out
    }

    /// Per sample: (auxiliary loss, z-loss).
    fn losses(&self, params: &Named) -> Vec<(f64, f64)> {
        let (config, [batch, seq, ..]) = (self.case.config, self.case.dims);
        let experts = config.num_experts;
        let of_sample = |sample: usize| {
            let tokens = sample * seq..(sample + 1) * seq;
            let mut counts = vec![0.0; experts];
            let mut means = vec![0.0; experts];
            let mut z = 0.0;
            for token in tokens {
                let first = if config.router == RouterKind::Gshard { 1 } else { config.top_k };
                if config.router != RouterKind::ExpertChoice {
                    self.chosen[token][..first].iter().for_each(|&e| counts[e] += 1.0);
                }
                let scores = self.scores(params, token);
                let sum: f64 = scores.iter().sum();
                means.iter_mut().zip(&scores).for_each(|(mean, s)| *mean += s / sum / seq as f64);
                z += self.logits(params, token).iter().map(|x| x.exp()).sum::<f64>().ln().powi(2) / seq as f64;
            }
            let dot: f64 = counts.iter().zip(&means).map(|(c, p)| c / seq as f64 * p).sum();
            let aux = match config.router {
                RouterKind::Gshard => dot / experts as f64,
                RouterKind::ExpertChoice => 0.0,
                _ => dot * experts as f64 / config.top_k as f64,
            };
            (aux, z)
        };
        (0..batch).map(of_sample).collect()
    }

    fn objective(&self, params: &Named) -> f64 {
        let config = self.case.config;
        let output = self.output(params);
        let main: f64 = output.iter().enumerate().map(|(i, y)| y * f64::from(number("seed", i as u64))).sum();
        let losses = self.losses(params);
        let of = |(aux, z): &(f64, f64)| config.aux_loss_coeff * aux + config.z_loss_coeff * z;
        main + losses.iter().map(of).sum::<f64>() / losses.len() as f64
    }
}

/// `‖got - want‖ ≤ 1e-5 ‖want‖`, up to the rounding of what is far larger.
#[track_caller]
fn assert_near(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut got.iter().zip(want).map(|(&got, want)| f64::from(got) - want));
    let bound = 2e-5 * norm(&mut want.iter().copied()).max(1e-3);
    assert!(apart <= bound, "{what}: {apart:e} apart, and {bound:e} is allowed");
}

fn check(case: Case) -> Outcome {
    let oracle = Oracle::new(&case);
    let got = run(&case, ALONE);
    assert_near("output", &got.output, &oracle.output(&oracle.params));
    let counts = oracle.chosen.iter().flatten().fold(vec![0.0; case.config.num_experts], |mut counts, &e| {
        counts[e] += 1.0;
        counts
    });
    match case.mode {
        Mode::Train => assert_eq!(got.load, counts),
        Mode::Evaluate => assert!(got.load.iter().all(|&count| count == 0.0), "evaluation moves no bias"),
    }
    let losses = oracle.losses(&oracle.params);
    for (sample, (aux, z)) in losses.iter().enumerate() {
        if case.config.router != RouterKind::ExpertChoice {
            assert!((got.reports[METRICS[0]][sample] - aux).abs() < 1e-5 * aux.max(1.0), "auxiliary loss");
            let seq = case.dims[1];
            let all = case.config.top_k * seq;
            let unused = oracle.used[sample * seq..(sample + 1) * seq].iter().map(Vec::len).sum::<usize>();
            assert_eq!(got.reports[METRICS[3]][sample], (all - unused) as f64 / all as f64);
        }
        assert!((got.reports[METRICS[1]][sample] - z).abs() < 1e-5 * z.max(1.0), "z-loss");
    }
    if case.mode == Mode::Evaluate {
        return got;
    }
    let mut moved = oracle.params.clone();
    for (name, values) in &oracle.params {
        if name == "router.bias" {
            assert!(!got.params.contains_key(name), "the bias chooses, and is not trained");
            continue;
        }
        let is_frozen = |end: &&str| case.adapted && name.starts_with("experts.") && name.ends_with(*end);
        if [".weight", ".bias"].iter().any(is_frozen) {
            assert!(!got.params.contains_key(name), "{name} is frozen");
            continue;
        }
        const STEP: f64 = 1e-5;
        let gradient: Vec<f64> = (0..values.len())
            .map(|i| {
                let mut at = |value: f64| {
                    moved.get_mut(name).unwrap()[i] = value;
                    oracle.objective(&moved)
                };
                let (above, below) = (at(values[i] + STEP), at(values[i] - STEP));
                at(values[i]);
                (above - below) / (2.0 * STEP)
            })
            .collect();
        let found = if name == "x" { &got.dx } else { &got.params[name] };
        assert_near(&format!("gradient of {name}"), found, &gradient);
    }
    got
}

fn small(config: MoeConfig) -> Case {
    Case { config, dims: [2, 5, 4, 6], ..Case::default() }
}

fn config(router: RouterKind, top_k: usize) -> MoeConfig {
    MoeConfig { num_experts: 4, top_k, router, aux_loss_coeff: 0.3, z_loss_coeff: 0.2, ..MoeConfig::default() }
}

#[test]
fn top_k_experts() {
    for top_k in [1, 2, 3, 4] {
        for normalise in [true, false] {
            check(small(MoeConfig { normalise, ..config(RouterKind::TopK, top_k) }));
        }
    }
    check(Case { swiglu: true, ..small(config(RouterKind::TopK, 2)) });
    for swiglu in [false, true] {
        check(Case { swiglu, adapted: true, ..small(config(RouterKind::TopK, 2)) });
    }
    let limited = ExpertGroups { groups: 2, top_groups: 1, best: 1 };
    check(small(MoeConfig { groups: limited, capacity_factor: 0.75, ..config(RouterKind::TopK, 2) }));
}

#[test]
fn switch_with_a_capacity() {
    let dropped = |capacity_factor| {
        let got = check(small(MoeConfig { capacity_factor, ..config(RouterKind::Switch, 1) }));
        got.reports[METRICS[3]].iter().sum::<f64>()
    };
    assert!(dropped(0.5) > 0.0);
    assert_eq!(dropped(0.0), 0.0);
}

/// The weights are the scores of the experts that take the tokens.
#[test]
fn what_overflows_is_routed_again() {
    let dropped = |config: MoeConfig, overflow| {
        let got = check(Case { dims: [2, 8, 4, 6], ..small(MoeConfig { overflow, ..config }) });
        got.reports[METRICS[3]].iter().sum::<f64>()
    };
    let groups = ExpertGroups { groups: 2, top_groups: 1, best: 1 };
    for (of, left) in [
        (MoeConfig { capacity_factor: 1.0, ..config(RouterKind::Switch, 1) }, 0.0),
        (MoeConfig { capacity_factor: 1.0, ..config(RouterKind::TopK, 2) }, 0.0),
        // A token does not leave the groups that it chose.
        (MoeConfig { capacity_factor: 0.75, groups, ..config(RouterKind::Bias, 1) }, 1.0),
    ] {
        let (before, after) = (dropped(of, Overflow::Drop), dropped(of, Overflow::Reroute));
        assert!(after < before, "{of:?}: {after} of {before}");
        assert_eq!(after, left, "{of:?}");
    }
    check(Case {
        mode: Mode::Evaluate,
        ..small(MoeConfig { capacity_factor: 0.5, overflow: Overflow::Reroute, ..config(RouterKind::Gshard, 2) })
    });
}

#[test]
fn gshard_uses_both_experts_in_evaluation() {
    check(Case { mode: Mode::Evaluate, ..small(config(RouterKind::Gshard, 2)) });
    // In training some second experts are passed over, the same ones whatever the weights of others.
    let got = run(&small(config(RouterKind::Gshard, 2)), ALONE);
    let unused: f64 = got.reports[METRICS[3]].iter().sum();
    assert!(unused > 0.0 && unused < 1.0, "{unused} of two samples");
}

#[test]
fn experts_choose_tokens() {
    check(Case {
        dims: [2, 6, 4, 6],
        ..small(MoeConfig { aux_loss_coeff: 0.0, ..config(RouterKind::ExpertChoice, 2) })
    });
}

#[test]
fn a_bias_chooses_and_does_not_weigh() {
    let groups = ExpertGroups { groups: 2, top_groups: 1, best: 2 };
    let of = MoeConfig { bias_update_rate: 0.1, routed_scaling: 2.5, ..config(RouterKind::Bias, 2) };
    check(small(of));
    check(small(MoeConfig { groups, ..of }));
}

/// One expert of all tokens, experts without any, and sequences of one token.
#[test]
fn every_load_is_computed() {
    let of = MoeConfig { num_experts: 1, ..config(RouterKind::TopK, 1) };
    check(small(of));
    let many = MoeConfig { num_experts: 16, ..config(RouterKind::Switch, 1) };
    let got = check(small(many));
    assert!(got.load.contains(&0.0), "16 experts of 10 tokens");
    assert!(got.params["experts.up.weight"].iter().all(|gradient| gradient.is_finite()));
    for capacity_factor in [0.0, 1.0] {
        check(Case { dims: [3, 1, 4, 6], ..small(MoeConfig { capacity_factor, ..config(RouterKind::TopK, 2) }) });
    }
}
