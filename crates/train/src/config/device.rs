//! Where the ranks compute: `--device`.

use super::cards::{CARDS, card};
use super::fault::{Fault, choose_from};
use serde::{Serialize, Serializer};
use std::fmt;

/// The device of each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The threads of this process.
    Cpu,
    /// This GPU for all ranks, or for each rank the GPU of its number modulo their count.
    Cuda(Option<usize>),
    /// A card of this name that is not here: with `--steps 0` the time of a step on it is predicted.
    Card(&'static str),
    /// CUDA devices that are emulated in host memory.
    CudaEmulated {
        /// The seed of the order of their streams.
        seed: u64,
        /// How many they are, all of them peers; rank r has device r modulo their count.
        devices: usize,
    },
}

const MOST_EMULATED: usize = 64;

impl Device {
    /// The values that the flag takes.
    pub const WORDS: &[&str] = &["cpu", "cuda", "cuda-emulated"];

    /// Its first word, as in messages of the device.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda(_) | Self::Card(_) => "cuda",
            Self::CudaEmulated { .. } => "cuda-emulated",
        }
    }

    /// The feature that it needs and that this build lacks.
    const fn missing_feature(self) -> Option<&'static str> {
        match self {
            Self::Cuda(_) if !cfg!(feature = "cuda") => Some("cuda"),
            Self::CudaEmulated { .. } if !cfg!(feature = "emulator") => Some("emulator"),
            _ => None,
        }
    }

    /// `cpu`, `cuda`, `cuda:1`, `cuda:h100`, `cuda-emulated`, `cuda-emulated:7`, `cuda-emulated:7:2`.
    ///
    /// # Errors
    /// Another word, number or card, and a device that this build lacks.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let fault = |problem: String, valid: String| Fault::new("--device", text, problem, valid);
        let (word, number) = text.split_once(':').map_or((text, None), |(word, number)| (word, Some(number)));
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
            "cuda" => Self::Cuda(number.map(|number| number.parse().unwrap_or(usize::MAX))),
            "cuda-emulated" => {
                let (seed, devices) = number.map_or(("0", "1"), |of| of.split_once(':').unwrap_or((of, "1")));
                let devices = devices.parse().ok().filter(|count| (1..=MOST_EMULATED).contains(count));
                match (seed.parse(), devices) {
                    (Ok(seed), Some(devices)) => Self::CudaEmulated { seed, devices },
                    (Err(_), _) => {
                        return Err(fault("no seed of an order".to_owned(), format!("use {word} or {word}:0")));
                    }
                    (_, None) => {
                        let valid = format!("use {word}:{seed}, or {word}:{seed}:1 to {word}:{seed}:{MOST_EMULATED}");
                        return Err(fault("no number of devices".to_owned(), valid));
                    }
                }
            }
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
            Self::Cpu | Self::Cuda(None) | Self::CudaEmulated { seed: 0, devices: 1 } => f.write_str(self.name()),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
            Self::Card(name) => write!(f, "cuda:{name}"),
            Self::CudaEmulated { seed, devices: 1 } => write!(f, "cuda-emulated:{seed}"),
            Self::CudaEmulated { seed, devices } => write!(f, "cuda-emulated:{seed}:{devices}"),
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
            ("cuda-emulated", Device::CudaEmulated { seed: 0, devices: 1 }),
            ("cuda-emulated:7", Device::CudaEmulated { seed: 7, devices: 1 }),
            ("cuda-emulated:0:2", Device::CudaEmulated { seed: 0, devices: 2 }),
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
            (
                "cuda-emulated:7:0",
                "--device cuda-emulated:7:0: no number of devices; use cuda-emulated:7, or cuda-emulated:7:1 to cuda-emulated:7:64",
            ),
            ("cpu:1", "--device cpu:1: unknown device; the nearest is cpu; use one of cpu, cuda, cuda-emulated"),
            ("gpu", "--device gpu: unknown device; the nearest is cpu; use one of cpu, cuda, cuda-emulated"),
        ] {
            assert_eq!(Device::parse(text).unwrap_err().to_string(), told);
        }
    }
}
