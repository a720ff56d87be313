//! How a field of the configuration is read from a TOML value.

use toml::Value;

/// The value of a field of a section: the given one, else the derived one, else the default; `None` if the key is
/// unset.
pub(crate) trait Setting: Sized {
    /// The value, or `None` if it has a different type.
    fn read(value: Option<&Value>) -> Option<Self>;
}

/// Implements [`Setting`] by a way to read a TOML value.
macro_rules! settings {
    ($($type:ty: $read:expr;)+) => {$(
        impl Setting for $type {
            fn read(value: Option<&Value>) -> Option<Self> {
                let read: fn(&Value) -> Option<Self> = $read;
                value.and_then(read)
            }
        }
    )+};
}

settings! {
    bool: Value::as_bool;
    u32: |value| value.as_integer()?.try_into().ok();
    u64: |value| value.as_integer()?.try_into().ok();
    usize: |value| value.as_integer()?.try_into().ok();
    f64: Value::as_float;
    String: |value| value.as_str().map(str::to_owned);
    Value: |value| Some(value.clone());
}

/// A key without a default.
impl Setting for Option<String> {
    fn read(value: Option<&Value>) -> Option<Self> {
        Some(value.and_then(|value| String::read(Some(value))))
    }
}

/// A list without a default: empty.
impl Setting for Vec<String> {
    fn read(value: Option<&Value>) -> Option<Self> {
        let list = value.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        list.iter().map(|text| String::read(Some(text))).collect()
    }
}

/// A list for which a word may stand; the word gives an empty list.
impl Setting for Vec<usize> {
    fn read(value: Option<&Value>) -> Option<Self> {
        let list = value.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        list.iter().map(|count| usize::read(Some(count))).collect()
    }
}

/// Declares the words that a key takes, as an enum: each variant with its word.
macro_rules! words {
    ($($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal),+ $(,)? })+) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
        #[allow(missing_docs, reason = "the key of the configuration says what most words mean")]
        pub enum $name {
            $($(#[$variant_meta])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// All words, in the order of the variants.
            pub const WORDS: &[&str] = &[$($word),+];

            /// The word, as in the configuration and in messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl Setting for $name {
            fn read(value: Option<&Value>) -> Option<Self> {
                match value?.as_str()? {
                    $($word => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    )+};
}
pub(super) use words;

/// The values of other crates that words stand for.
macro_rules! stands_for {
    ($($name:ident for $target:ty { $($variant:ident => $value:expr),+ })+) => {$(
        impl From<$name> for $target {
            fn from(word: $name) -> Self {
                match word {
                    $($name::$variant => $value,)+
                }
            }
        }
    )+};
}
pub(super) use stands_for;
