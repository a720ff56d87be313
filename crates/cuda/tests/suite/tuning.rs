//! Tables of tuning, and their faults.

use meshwork_cuda::tuning::Tuning;

#[test]
fn what_is_wrong_with_a_table_is_said() {
    let row = |rest: &str| format!("[[sm_90a]]\n{rest}");
    for (text, told) in [
        ("what", "is no TOML: "),
        ("", "has rows for no device, and this device is sm_90a"),
        (
            &row("kernel = 'dropout'\nvariant = 'each=8'").replace("90a", "80"),
            "has rows for sm_80, and this device is sm_90a",
        ),
        (
            &row("kernel = 'adamw'\nvariant = 'x'"),
            "row 1 of sm_90a: kernel = \"adamw\" has no variants; use one of dropout, flash_forward_64, ",
        ),
        (
            &row("kernel = 'dropout'"),
            "row 1 of sm_90a: variant = \"\" is none of dropout; use one of [\"usual\", \"each=8\", \"each=16\"]",
        ),
        (
            &row("kernel = 'dropout'\nvariant = 'library'"),
            "row 1 of sm_90a: variant = \"library\" is none of dropout; use one of [\"usual\", ",
        ),
        (
            &row("kernel = 'grouped_tensor_forward'\nvariant = 'x'"),
            "row 1 of sm_90a: variant = \"x\" is none of grouped_tensor_forward; use one of [\"usual\", \"stages=2\", \"library\"]",
        ),
        (
            &row("kernel = 'flash_forward_256'\nvariant = 'sm_90a'"),
            "row 1 of sm_90a: kernel = \"flash_forward_256\" has no variants; use one of ",
        ),
        (
            &row("kernel = 'flash_forward_64'\nvariant = 'sm_90a'").replace("[sm_90a]", "[sm_80]"),
            "row 1 of sm_80: variant = \"sm_90a\" runs on no sm_80; leave it out, or write it below [[sm_90a]]",
        ),
        (
            &row("kernel = 'dropout'\nvariant = 'each=8'\nup_to = -1"),
            "row 1 of sm_90a: up_to = -1 is no size; use a whole number",
        ),
        (
            &row("kernel = 'dropout'\nsize = 1"),
            "row 1 of sm_90a: unknown key size; its keys are kernel, variant, up_to",
        ),
        ("sm_90a = 1", "row 1 of sm_90a: is none; write [[sm_90a]] before each row"),
        ("sm_80 = [1]", "row 1 of sm_80: is no table; its keys are "),
    ] {
        let error = Tuning::parse(text, "sm_90a").unwrap_err().to_string();
        assert!(error.starts_with(told), "{text}: {error}");
    }
}
