//! Where the ranks compute: `--device`.

use serde::{Serialize, Serializer};
use std::fmt;

use super::fault::{Fault, choose_from};
use crate::cost::{CARDS, card};

/// The device of each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The threads of this process.
    Cpu,
    /// This GPU for all ranks, or for each rank that of its number modulo their count.
    Cuda(Option<usize>),
    /// A card of this name that is not here: what [`cost`](crate::cost) predicts for, with `--steps 0`.
    Card(&'static str),
    /// The CUDA device, emulated in host memory; its streams run in an order drawn from this seed.
    CudaEmulated(u64),
}

impl Device {
    /// What the flag takes.
    pub const WORDS: &[&str] = &["cpu", "cuda", "cuda-emulated"];

    /// Its first word, as in messages of the device.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda(_) | Self::Card(_) => "cuda",
            Self::CudaEmulated(_) => "cuda-emulated",
        }
    }

    /// The feature that a build needs for it, if it needs one that this build lacks.
    const fn missing_feature(self) -> Option<&'static str> {
        match self {
            Self::Cuda(_) if !cfg!(feature = "cuda") => Some("cuda"),
            Self::CudaEmulated(_) if !cfg!(feature = "emulator") => Some("emulator"),
            _ => None,
        }
    }

    /// `cpu`, `cuda`, `cuda:1`, `cuda:h100`, `cuda-emulated`, `cuda-emulated:7`.
    ///
    /// # Errors
    /// Another word, number or card, and a device that this build lacks.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let fault = |problem: String, valid: String| Fault::new("--device", text, problem, valid);
        let (word, number) = text.split_once(':').map_or((text, None), |(word, number)| (word, Some(number)));
        let numbered = |what: &str| match number.map(str::parse::<u64>) {
            None => Ok(None),
            Some(Ok(number)) => Ok(Some(number)),
            Some(Err(_)) => Err(fault(format!("no {what}"), format!("use {word} or {word}:0"))),
        };
        let device = match word {
            "cpu" if number.is_none() => Self::Cpu,
            "cuda" if number.is_some_and(|name| name.parse::<u64>().is_err()) => {
                let known = number.and_then(card);
                let names: Vec<String> = CARDS.iter().map(|card| format!("cuda:{}", card.name)).collect();
                let valid = || format!("use cuda, cuda:0, or with --steps 0 one of {}", names.join(", "));
                Self::Card(
                    known
                        .ok_or_else(|| fault("no number of a GPU, and no card that is known".to_owned(), valid()))?
                        .name,
                )
            }
            "cuda" => {
                Self::Cuda(numbered("number of a GPU")?.map(|number| usize::try_from(number).unwrap_or(usize::MAX)))
            }
            "cuda-emulated" => Self::CudaEmulated(numbered("seed of an order")?.unwrap_or(0)),
            _ => return Err(fault("unknown device".to_owned(), choose_from(text, Self::WORDS))),
        };
        match device.missing_feature() {
            None => Ok(device),
            Some(feature) => {
                Err(fault("is not in this build".to_owned(), format!("build with --features {feature}, or use cpu")))
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu | Self::Cuda(None) | Self::CudaEmulated(0) => f.write_str(self.name()),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
            Self::Card(name) => write!(f, "cuda:{name}"),
            Self::CudaEmulated(seed) => write!(f, "cuda-emulated:{seed}"),
        }
    }
}

impl Serialize for Device {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        assert_eq!(Device::parse("cpu"), Ok(Device::Cpu));
        for (text, device) in [
            ("cuda", Device::Cuda(None)),
            ("cuda:3", Device::Cuda(Some(3))),
            ("cuda:h100", Device::Card("h100")),
            ("cuda-emulated", Device::CudaEmulated(0)),
            ("cuda-emulated:7", Device::CudaEmulated(7)),
        ] {
            assert_eq!(device.to_string(), text);
            match device.missing_feature() {
                None => assert_eq!(Device::parse(text), Ok(device)),
                Some(feature) => {
                    let told =
                        format!("--device {text}: is not in this build; build with --features {feature}, or use cpu");
                    assert_eq!(Device::parse(text).unwrap_err().to_string(), told);
                }
            }
        }
        for (text, told) in [
            (
                "cuda:h1000",
                "--device cuda:h1000: no number of a GPU, and no card that is known; use cuda, cuda:0, or with --steps 0 one of cuda:a100, \
                 cuda:h100, cuda:h100-96, cuda:h200",
            ),
            (
                "cuda-emulated:-1",
                "--device cuda-emulated:-1: no seed of an order; use cuda-emulated or cuda-emulated:0",
            ),
            ("cpu:1", "--device cpu:1: unknown device; the nearest is cpu; use one of cpu, cuda, cuda-emulated"),
            ("gpu", "--device gpu: unknown device; the nearest is cpu; use one of cpu, cuda, cuda-emulated"),
        ] {
            assert_eq!(Device::parse(text).unwrap_err().to_string(), told);
        }
    }
}
