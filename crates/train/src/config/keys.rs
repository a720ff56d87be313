//! The keys of the configuration as plain data: name, default, type, range, effect and meaning.
//!
//! Each key is declared once, in `sections.rs`. From that declaration come the fields of [`Config`] and the table
//! [`SECTIONS`], which drives parsing, `--set`, the defaults, the suggestion for an unknown key, the notice of a key
//! that is not read, the keys that a resumed run must keep, `--help` and the [reference](super::reference()).

use super::Config;
pub use super::sections::SECTIONS;
use Fallback::Is;

/// A section of the TOML file.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Name, as in `[model]`.
    pub name: &'static str,
    /// Its keys.
    pub keys: &'static [Key],
}

/// One key of a section.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Name inside the section.
    pub name: &'static str,
    /// Type and range.
    pub kind: ValueKind,
    /// Value where none is given.
    pub default: Fallback,
    /// Its effect on a run.
    pub effect: Effect,
    /// The run reads the key if all of these hold.
    pub conditions: &'static [Condition],
    /// Its meaning.
    pub doc: &'static str,
}

meshwork_core::named! {
    /// The effect of a key, which decides whether it may differ in a resumed run.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Effect {
        /// The model: its weights, or its function of them.
        Model = "model",
        /// The numbers of a step: its loss, gradients and weights.
        Numbers = "numbers",
        /// The data, and with them the numbers. Resumed runs compare a hash of the data and not where they lie.
        Data = "data",
        /// The order of sums: rounding in fast numerics, and no bit in canonical ones.
        Rounding = "rounding",
        /// Time, memory and traffic, and no bit of any number.
        Speed = "speed",
        /// The reports and files of a run, and its end. No bit of a step.
        Output = "output",
    }
    name: "The effect in a word, as the reference has it."
}

/// A condition under which a key is read.
#[derive(Debug, Clone, Copy)]
pub struct Condition {
    /// The condition in words, to follow "no effect without".
    pub with: &'static str,
    /// The keys that decide.
    pub by: &'static [&'static str],
    /// Whether a configuration reads the key.
    pub holds: fn(&Config) -> bool,
}

/// Type and range of a key's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ValueKind {
    /// A whole number of at least this.
    Count(i64),
    /// A finite number in an interval, which it must not leave where it is rounded to f32.
    Number(Interval),
    /// A finite number in an interval, which is used in f64 alone: seconds, bytes, shares of data, a bound of the
    /// gradient norm.
    Double(Interval),
    /// `true` or `false`.
    Switch,
    /// Any text.
    Text,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// One of these words, or a whole number of at least 1.
    WordOrCount(&'static [&'static str]),
    /// One of these words, or the id of a token.
    WordOrId(&'static [&'static str]),
    /// A list of texts.
    Texts,
    /// One of these words, or a list of whole numbers of at least 0.
    WordOrCounts(&'static [&'static str]),
}

/// The intervals that numbers lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// x ≥ 0
    NotNegative,
    /// x > 0
    Positive,
    /// x ≥ 1
    FromOne,
    /// 0 ≤ x ≤ 1
    Unit,
    /// 0 ≤ x < 1
    BelowOne,
}

impl Interval {
    /// Whether the interval holds `x`; never for infinities and NaN.
    pub fn holds(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Self::NotNegative => x >= 0.0,
                Self::Positive => x > 0.0,
                Self::FromOne => x >= 1.0,
                Self::Unit => (0.0..=1.0).contains(&x),
                Self::BelowOne => (0.0..1.0).contains(&x),
            }
    }

    /// The value to which `x` is rounded in f32, in which ranks compute, if that is a number of another kind: out of
    /// the interval, infinite, or 0 and the numbers next to it, which have few digits, though `x` is not 0.
    pub fn lost(self, x: f64) -> Option<f32> {
        let rounded = x as f32;
        let kept = x == 0.0 || rounded.is_normal() && self.holds(f64::from(rounded));
        (!kept).then_some(rounded)
    }

    /// The smallest number above 0 and the largest one of the interval that are kept in f32.
    pub fn of_f32(self) -> [f32; 2] {
        let below_one = 1.0 - f32::EPSILON / 2.0;
        let least = if self.holds(0.5) { f32::MIN_POSITIVE } else { 1.0 };
        let most = [f32::MAX, 1.0].into_iter().find(|&most| self.holds(f64::from(most)));
        [least, most.unwrap_or(below_one)]
    }

    /// The interval in words, to follow "a number".
    pub const fn words(self) -> &'static str {
        match self {
            Self::NotNegative => "of at least 0",
            Self::Positive => "above 0",
            Self::FromOne => "of at least 1",
            Self::Unit => "from 0 to 1",
            Self::BelowOne => "of at least 0 and below 1",
        }
    }
}

/// The value of a key that nothing sets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fallback {
    /// A fixed value.
    Is(Literal),
    /// Computed from other keys; the text says how.
    Derived(&'static str),
    /// Nothing.
    Unset,
}

/// A default value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Literal {
    /// For a [`ValueKind::Count`].
    Int(i64),
    /// For a [`ValueKind::Number`] or [`ValueKind::Double`].
    Float(f64),
    /// For a [`ValueKind::Switch`].
    Bool(bool),
    /// For a [`ValueKind::Text`], [`ValueKind::Choice`], [`ValueKind::WordOrCount`], [`ValueKind::WordOrId`] or
    /// [`ValueKind::WordOrCounts`].
    Str(&'static str),
}

// Short forms, for the declaration to read as a table.
pub(super) const fn int(value: i64) -> Fallback {
    Is(Literal::Int(value))
}
pub(super) const fn float(value: f64) -> Fallback {
    Is(Literal::Float(value))
}
pub(super) const fn is(value: &'static str) -> Fallback {
    Is(Literal::Str(value))
}
pub(super) const OFF: Fallback = Is(Literal::Bool(false));
pub(super) const ON: Fallback = Is(Literal::Bool(true));

/// All keys with the name of their section.
pub fn all() -> impl Iterator<Item = (&'static str, &'static Key)> {
    SECTIONS.iter().flat_map(|section| section.keys.iter().map(|key| (section.name, key)))
}

/// Former names of keys, which configurations may still use: section, former name, name.
const FORMER: [(&str, &str, &str); 1] = [("numerics", "leaves", "reduction_blocks")];

/// The key called `section.name`, now or formerly, if there is one.
pub fn find(section: &str, name: &str) -> Option<(&'static str, &'static Key)> {
    let former = FORMER.iter().find(|(of, former, _)| (*of, *former) == (section, name));
    let name = former.map_or(name, |&(_, _, name)| name);
    let section = SECTIONS.iter().find(|known| known.name == section)?;
    section.keys.iter().find(|key| key.name == name).map(|key| (section.name, key))
}

/// The former name of the key `section.name`, if it had one.
pub(super) fn former(section: &str, name: &str) -> Option<&'static str> {
    FORMER.iter().find(|(of, _, now)| (*of, *now) == (section, name)).map(|(_, former, _)| *former)
}

/// Declares the sections: a struct for each, `Config` of all of them, and their table.
///
/// A key is `name: type = default, kind, effect;` under its meaning. Before the semicolon stands `, if A && B` if the
/// key is read on [conditions](super::conditions) alone. `beside { .. }` adds fields to a section that are not keys;
/// they start with the default of their type.
macro_rules! sections {
    (
        $(#[$config_doc:meta])*
        Config;
        $(
            $(#[$section_doc:meta])*
            [$section:ident] $Section:ident {
                $($(#[doc = $doc:literal])+ $key:ident: $type:ty = $default:expr, $kind:expr, $effect:ident
                    $(, if $($condition:ident)&&+)?;)+
            } $(beside {
                $($(#[doc = $beside_doc:literal])+ $beside:ident: $beside_type:ty,)+
            })?
        )+
    ) => {
        $(#[$config_doc])*
        #[derive(Debug, Clone, PartialEq, Serialize)]
        pub struct Config {
            $($(#[$section_doc])* pub $section: $Section,)+
            /// Where the ranks compute.
            pub device: Device,
            /// Notices for the user that are not faults.
            #[serde(skip)]
            pub notices: Vec<String>,
        }

        impl Config {
            /// Reads every key: the given value, else the derived one, else the default.
            pub(super) fn read(settings: &Settings, device: Device) -> Self {
                Self {
                    $($section: $Section {
                        $($key: settings.get(concat!(stringify!($section), ".", stringify!($key))),)+
                        $($($beside: Default::default(),)+)?
                    },)+
                    device,
                    notices: Vec::new(),
                }
            }
        }

        $(
            #[doc = concat!("Section `[", stringify!($section), "]`.")]
            #[derive(Debug, Clone, PartialEq, Serialize)]
            pub struct $Section {
                $($(#[doc = $doc])+ pub $key: $type,)+
                $($($(#[doc = $beside_doc])+ #[serde(skip)] pub $beside: $beside_type,)+)?
            }
        )+

        /// All sections and keys.
        pub static SECTIONS: &[Section] = &[$(Section {
            name: stringify!($section),
            keys: &[$(
                Key {
                    name: stringify!($key),
                    kind: $kind,
                    default: $default,
                    effect: Effect::$effect,
                    conditions: &[$($(conditions::$condition),+)?],
                    doc: concat!($($doc),+).trim_ascii_start(),
                },
            )+],
        },)+];
    };
}
pub(super) use sections;
