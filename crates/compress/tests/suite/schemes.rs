//! Schemes as text.

use crate::common::{SCHEMES, scheme};
use meshwork_compress::{Choice, Feedback, Fp8Format, Keep, Per, PowerSgd, Rounding, Scales, Scheme, Sparse, Values};
use proptest::prelude::*;

#[test]
fn a_scheme_is_written_as_it_is_read() {
    for text in SCHEMES {
        assert_eq!(scheme(text).to_string(), text);
    }
    let sparse = Sparse { choice: Choice::Largest(Per::Tensor), keep: Keep::Fraction(0.1), values: Values::F32 };
    assert_eq!(scheme("topk:0.1"), Scheme::Sparse(sparse));
    assert_eq!(scheme("topk:1"), Scheme::Sparse(Sparse { keep: Keep::Count(1), ..sparse }));
    assert_eq!(scheme("topk:1.0"), Scheme::Sparse(Sparse { keep: Keep::Fraction(1.0), ..sparse }));
}

#[test]
fn errors_say_what_is_valid() {
    let cases = [
        ("quant:0", "the number of bits is \"0\", it must be 1 to 8"),
        ("quant:9", "the number of bits is \"9\", it must be 1 to 8"),
        ("quant", "quant needs a number of bits, as in quant:4"),
        (
            "quant:4/stochastic/row",
            "quant has no option \"stochastic\" here, only one of row and blockN, then stochastic",
        ),
        ("topk:0", "the number of elements kept is \"0\", it must be a whole number from 1 to 4294967295"),
        ("topk:0.0", "the fraction kept is \"0.0\", it must be above 0.0 and at most 1.0"),
        ("topk:1.5", "the fraction kept is \"1.5\""),
        ("topk:.", "the fraction kept is \".\""),
        ("topk:NaN", "the fraction kept is \"NaN\""),
        ("topk:-3", "the fraction kept is \"-3\""),
        ("randk:0.1/row", "randk has no option \"row\" here, only unbiased"),
        ("topk:0.1/block0", "the length of a block is \"0\""),
        ("topk:0.1+topk:3", "there is no method \"topk\""),
        ("topk:0.1+sign/row", "sign/row of the elements of topk:0.1: they have no rows; use blockN"),
        ("quant:4+topk:0.1", "+ follows topk or randk, not \"quant\""),
        ("powersgd:0", "the rank is \"0\""),
        ("powersgd", "powersgd needs a rank, as in powersgd:4"),
        ("fp8:e3m4", "the format is \"e3m4\", it must be e4m3 or e5m2"),
        ("bf16:2", "bf16 takes no parameter \"2\""),
        ("sign/stochastic", "sign has no option \"stochastic\" here, only one of row and blockN"),
        ("zip", "there is no method \"zip\""),
        ("", "there is no method \"\""),
    ];
    for (text, problem) in cases {
        let error = text.parse::<Scheme>().unwrap_err().to_string();
        assert!(error.contains(problem), "{text}: {error}");
        assert!(
            error.contains("; valid are none, bf16, fp8:e4m3, fp8:e5m2, quant:BITS (1 to 8), sign, int8, nf4, topk:"),
            "{error}"
        );
    }
}

#[test]
fn feedback_is_written_as_it_is_read() {
    for text in ["none", "ef", "ef21", "ef21m:0.1"] {
        assert_eq!(text.parse::<Feedback>().unwrap().to_string(), text);
    }
    for text in ["ef22", "ef21m:0", "ef21m:1.5", "ef21m:", "ef21m:NaN"] {
        let error = text.parse::<Feedback>().unwrap_err().to_string();
        assert!(error.contains("valid are none, ef, ef21 and ef21m:ETA with 0 < ETA <= 1"), "{error}");
    }
}

fn any_per(rows: bool) -> impl Strategy<Value = Per> {
    let block = (1..=u32::MAX as usize).prop_map(Per::Block);
    prop_oneof![Just(Per::Tensor), Just(if rows { Per::Row } else { Per::Tensor }), block]
}

fn any_values(rows: bool) -> impl Strategy<Value = Values> {
    let format = prop_oneof![Just(Fp8Format::E4M3), Just(Fp8Format::E5M2)];
    let rounding = prop_oneof![Just(Rounding::Nearest), Just(Rounding::Stochastic)];
    prop_oneof![
        Just(Values::F32),
        Just(Values::Bf16),
        (format, any_per(rows)).prop_map(|(format, per)| Values::Fp8 { format, per }),
        (1..=8_u8, any_per(rows), rounding).prop_map(|(bits, per, rounding)| Values::Quantize { bits, per, rounding }),
        any_per(rows).prop_map(|per| Values::Sign { per }),
        any_per(rows).prop_map(|per| Values::Int8 { per }),
        (any_per(rows), prop_oneof![Just(Scales::F32), Just(Scales::E5M3)])
            .prop_map(|(per, scales)| Values::Nf4 { per, scales }),
    ]
}

fn any_scheme() -> impl Strategy<Value = Scheme> {
    let choice = prop_oneof![
        any_per(true).prop_map(Choice::Largest),
        any::<bool>().prop_map(|unbiased| Choice::Random { unbiased })
    ];
    let keep = prop_oneof![
        (1..=u32::MAX as usize).prop_map(Keep::Count),
        (f64::MIN_POSITIVE..=1.0).prop_map(Keep::Fraction),
        Just(Keep::Fraction(1e-300)),
    ];
    prop_oneof![
        any_values(true).prop_map(Scheme::Values),
        (choice, keep, any_values(false)).prop_map(|(choice, keep, values)| Scheme::Sparse(Sparse {
            choice,
            keep,
            values
        })),
        (1..=u32::MAX as usize).prop_map(|rank| Scheme::PowerSgd(PowerSgd { rank })),
    ]
}

proptest! {
    #[test]
    fn any_scheme_is_written_as_it_is_read(scheme in any_scheme()) {
        prop_assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[a-z0-9:./+]{0,24}") {
        if let Ok(scheme) = text.parse::<Scheme>() {
            prop_assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
        }
    }
}
