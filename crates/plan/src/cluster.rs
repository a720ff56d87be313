//! A cluster as data: its cards, and the links between them.

pub use crate::cores::Cores;
use crate::error::{PlanError, named};
use crate::system::Constants;
use meshwork_train::config::{CARDS, choose_from};
use serde::Deserialize;
use std::collections::BTreeMap;

/// A cluster of equal hosts. The numbers of links are for each card, in bytes a second and one direction.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// What it is called.
    pub name: String,
    /// Its hosts.
    pub hosts: usize,
    /// Cards of a host.
    pub cards_per_host: usize,
    /// Its cards.
    pub card: Card,
    /// Links between the cards of a host; 0 where a host has one card and no number is given.
    pub inside: f64,
    /// Links between hosts, or the processes of a host; 0 where there is one host and no number is given.
    pub between: f64,
    /// The link of a card to its host's memory.
    pub host: f64,
    /// Dollars for a card and hour, where they are known.
    pub price: Option<f64>,
    /// Where the numbers are from; empty if the file does not say.
    pub source: String,
    /// The cores of a host, where its cards are threads that share them.
    pub cores: Option<Cores>,
    /// Constants of a system as measured here, by name. They replace the system's own:
    /// [`System::on`](crate::System::on).
    pub constants: BTreeMap<String, f64>,
}

/// A card.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes a second that it reads and writes in its memory.
    pub bandwidth: f64,
    /// Operations a second on 16 bits.
    pub bf16: f64,
    /// Operations a second on f32 rounded to TF32.
    pub tf32: f64,
    /// Operations a second on f32.
    pub f32: f64,
    /// Multiprocessors, on which the tiles of a product are computed side by side.
    pub units: f64,
}

/// The clusters that come with the planner, by name.
const KNOWN: [(&str, &str); 7] = [
    ("dgx-a100", include_str!("../clusters/dgx-a100.toml")),
    ("dgx-h100", include_str!("../clusters/dgx-h100.toml")),
    ("dgx-h200", include_str!("../clusters/dgx-h200.toml")),
    ("a100-40gb", include_str!("../clusters/a100-40gb.toml")),
    ("aws-p4d", include_str!("../clusters/aws-p4d.toml")),
    ("gcp-a3", include_str!("../clusters/gcp-a3.toml")),
    ("cores", include_str!("../clusters/cores.toml")),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    cluster: ClusterPart,
    card: CardPart,
    #[serde(default)]
    links: LinksPart,
    #[serde(default)]
    source: String,
    cores: Option<Cores>,
    #[serde(default)]
    constants: BTreeMap<String, f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterPart {
    name: String,
    hosts: usize,
    cards_per_host: usize,
    price: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CardPart {
    name: String,
    memory: Option<f64>,
    bandwidth: Option<f64>,
    bf16: Option<f64>,
    tf32: Option<f64>,
    f32: Option<f64>,
    units: Option<f64>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksPart {
    inside: Option<f64>,
    between: Option<f64>,
    host: Option<f64>,
}

/// Whether a constant can have this value. Those that are divisors are above 0.
fn possible(name: &str, value: f64) -> bool {
    let divides = ["products", "unaligned", "memory", "join", "inside", "between", "gradients"].contains(&name);
    value.is_finite() && if divides { value > 0.0 } else { value >= 0.0 }
}

impl Cluster {
    /// The names of the clusters that come with the planner.
    pub fn names() -> impl Iterator<Item = &'static str> {
        KNOWN.iter().map(|&(name, _)| name)
    }

    /// A cluster that comes with the planner.
    ///
    /// # Errors
    /// A name that none has.
    pub fn known(name: &str) -> Result<Self, PlanError> {
        Self::from_toml(name, named("cluster", &KNOWN, name)?)
    }

    /// Reads the text of a cluster's file. A card that is known by name needs no numbers; a number that is given counts
    /// more.
    ///
    /// ```
    /// use meshwork_plan::Cluster;
    ///
    /// let cluster = Cluster::from_toml("mine.toml", r#"
    ///     [cluster]
    ///     name = "eight cards"
    ///     hosts = 1
    ///     cards_per_host = 8
    ///     [card]
    ///     name = "h100"
    /// "#)?;
    /// assert_eq!((cluster.cards(), cluster.card.memory), (8, 80e9));
    ///
    /// let text = "[cluster]\nname = 'x'\nhosts = 1\ncards_per_host = 8\n[card]\nname = 'b100'";
    /// assert_eq!(
    ///     Cluster::from_toml("mine.toml", text).unwrap_err().to_string(),
    ///     "mine.toml: card \"b100\" is not known, and its memory is not given; \
    ///      the nearest is a100; use one of a100, h100, h100-96, h200; \
    ///      for another card give memory, bandwidth, bf16, f32 and units in [card], and inside, \
    ///      between and host in [links]: `scripts/gpu-check.sh speed` measures a card, and writes \
    ///      such a file"
    /// );
    /// # Ok::<(), meshwork_plan::PlanError>(())
    /// ```
    ///
    /// # Errors
    /// A text that is no such file, a card that is not known and has no numbers, numbers that contradict each other.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, PlanError> {
        let refuse =
            |problem: String, valid: &str| PlanError::File { file: file.to_owned(), problem, valid: valid.into() };
        let parsed: File = toml::from_str(text)
            .map_err(|error| refuse(error.message().to_owned(), "a cluster has [cluster], [card] and [links]"))?;
        let File { cluster, card, links, source, cores, constants } = parsed;
        let known = CARDS.iter().find(|known| known.name == card.name);
        let number = |what: &str, given: Option<f64>, known: Option<f64>| {
            let value = given.or(known).ok_or_else(|| {
                let names: Vec<&str> = CARDS.iter().map(|card| card.name).collect();
                refuse(
                    format!("card {:?} is not known, and its {what} is not given", card.name),
                    &format!(
                        "{}; for another card give memory, bandwidth, bf16, f32 and units in [card], and inside, \
                         between and host in [links]: `scripts/gpu-check.sh speed` measures a card, and writes \
                         such a file",
                        choose_from(&card.name, &names)
                    ),
                )
            })?;
            match value > 0.0 && value.is_finite() {
                true => Ok(value),
                false => Err(refuse(format!("{what} = {value}"), "use a number above 0")),
            }
        };
        let of = |get: fn(&meshwork_train::config::Card) -> f64| known.map(get);
        let link = |what: &str, given: Option<f64>, known: Option<f64>, of: usize| match given.or(known) {
            None if of < 2 => Ok(0.0),
            _ => number(what, given, known),
        };
        let read = Self {
            card: Card {
                name: card.name.clone(),
                memory: number("memory", card.memory, of(|card| card.memory))?,
                bandwidth: number("bandwidth", card.bandwidth, of(|card| card.bandwidth))?,
                bf16: number("bf16", card.bf16, of(|card| card.bf16))?,
                // A file without a number for TF32 gets that of f32.
                tf32: number("tf32", card.tf32, of(|card| card.tf32).or(card.f32))?,
                f32: number("f32", card.f32, of(|card| card.f32))?,
                units: number("units", card.units, of(|card| card.units))?,
            },
            inside: link("inside", links.inside, of(|card| card.link), cluster.cards_per_host)?,
            between: link("between", links.between, of(|card| card.network), cluster.hosts)?,
            host: number("host", links.host, of(|card| card.host))?,
            name: cluster.name,
            hosts: cluster.hosts,
            cards_per_host: cluster.cards_per_host,
            price: cluster.price,
            source,
            cores,
            constants,
        };
        let unshared = read.cores.and_then(|cores| cores.fault(read.cards_per_host));
        match () {
            () if read.cards() == 0 => {
                Err(refuse(format!("{} hosts of {} cards", read.hosts, read.cards_per_host), "use at least 1 of each"))
            }
            () if let Some((problem, valid)) = unshared => Err(refuse(problem, valid)),
            () if read.together() > 1 && read.between > read.inside => Err(refuse(
                format!(
                    "cards of different hosts reach {:.3e} B/s, those of one host {:.3e}",
                    read.between, read.inside
                ),
                "links.between is for each card, in bytes a second, and no faster than links.inside",
            )),
            () if read.constants.keys().any(|name| !Constants::NAMES.contains(&name.as_str())) => Err(refuse(
                format!("[constants] has {}", read.constants.keys().cloned().collect::<Vec<_>>().join(", ")),
                &format!("known are {}", Constants::NAMES.join(", ")),
            )),
            () if let Some((name, value)) = read.constants.iter().find(|(name, value)| !possible(name, **value)) => {
                Err(refuse(
                    format!("constants.{name} = {value}"),
                    "use a number above 0; times and bytes, and attention that is not fused, may be 0",
                ))
            }
            () if read.card.f32 > read.card.bf16 => Err(refuse(
                format!(
                    "the card computes {:.3e} operations a second on f32, and {:.3e} on bf16",
                    read.card.f32, read.card.bf16
                ),
                "bf16 is no slower than f32",
            )),
            () => Ok(read),
        }
    }

    /// The text of its file.
    pub fn to_toml(&self) -> String {
        let Self { name, hosts, cards_per_host, card, inside, between, host, source, .. } = self;
        let mut text = format!(
            "source = {source:?}\n\n[cluster]\nname = {name:?}\nhosts = {hosts}\ncards_per_host = {cards_per_host}\n"
        );
        text.extend(self.price.map(|price| format!("price = {price}\n")));
        text += &format!(
            "\n[card]\nname = {:?}\nmemory = {:.4e}\nbandwidth = {:.3e}\nbf16 = {:.3e}\ntf32 = {:.3e}\nf32 = {:.3e}\nunits = {}\n",
            card.name, card.memory, card.bandwidth, card.bf16, card.tf32, card.f32, card.units
        );
        text += "\n[links]\n";
        let links =
            [("inside", inside), ("between", between), ("host", host)].into_iter().filter(|(_, rate)| **rate > 0.0);
        text.extend(links.map(|(name, rate)| format!("{name} = {rate:.3e}\n")));
        text.extend(self.cores.map(|cores| cores.to_toml()));
        if !self.constants.is_empty() {
            text += "\n[constants]\n";
            text.extend(self.constants.iter().map(|(name, value)| format!("{name} = {value:.3e}\n")));
        }
        text
    }

    /// The same with so many cards.
    ///
    /// # Errors
    /// A number that is no multiple of the cards of a host (fewer than a host has are one host); several hosts, where
    /// the links between them have no number.
    pub fn of_cards(&self, cards: usize) -> Result<Self, PlanError> {
        let each = self.cards_per_host;
        if let Some(cores) = self.cores.filter(|_| cards > 0 && self.hosts == 1) {
            if let Some((problem, valid)) = cores.fault(cards) {
                return Err(PlanError::File { file: self.name.clone(), problem, valid: valid.into() });
            }
            // As many threads as one likes share the cores and the memory.
            let memory = self.card.memory * self.cards_per_host as f64 / cards as f64;
            return Ok(Self { cards_per_host: cards, card: Card { memory, ..self.card.clone() }, ..self.clone() });
        }
        match cards {
            1.. if cards <= each => Ok(Self { hosts: 1, cards_per_host: cards, ..self.clone() }),
            1.. if cards.is_multiple_of(each) && self.between == 0.0 => Err(PlanError::File {
                file: self.name.clone(),
                problem: format!("{} hosts, and their links have no number", cards / each),
                valid: "give links.between, in bytes a second of a card, or more cards_per_host and links.inside"
                    .into(),
            }),
            1.. if cards.is_multiple_of(each) => Ok(Self { hosts: cards / each, ..self.clone() }),
            _ => Err(PlanError::File {
                file: self.name.clone(),
                problem: format!("{cards} cards are no whole hosts"),
                valid: format!("use a multiple of {each}, or 1 to {each}"),
            }),
        }
    }

    /// This cluster with the ranks of each host divided evenly over `processes` processes.
    ///
    /// # Errors
    /// Cards, which have a process each; a number that does not divide the ranks of a host; processes whose links have
    /// no number.
    pub fn over(&self, processes: usize) -> Result<Self, PlanError> {
        let refuse = |problem: String, valid: &str| PlanError::File {
            file: self.name.clone(),
            problem,
            valid: valid.to_owned(),
        };
        let Some(cores) = self.cores else {
            return Err(refuse("its ranks are cards".to_owned(), "only threads that share cores have processes"));
        };
        let cores = Cores { processes, ..cores };
        if let Some((problem, valid)) = cores.fault(self.cards_per_host) {
            return Err(refuse(problem, valid));
        }
        if processes > 1 && self.between == 0.0 {
            let valid = "measure them by `mpirun -n 2 plan --measure FILE`, or give links.between";
            return Err(refuse("the links between processes have no number".to_owned(), valid));
        }
        Ok(Self { cores: Some(cores), ..self.clone() })
    }

    /// Ranks that reach each other inside: those of a host, or of one of its processes.
    pub(crate) fn together(&self) -> usize {
        self.cards_per_host / self.cores.map_or(1, |cores| cores.processes).max(1)
    }

    /// All of its cards.
    pub fn cards(&self) -> usize {
        self.hosts * self.cards_per_host
    }

    /// The system that trains here unless another is named.
    pub fn system(&self) -> &'static str {
        if self.cores.is_some() { "meshwork-cpu" } else { "meshwork" }
    }

    /// Bytes a second that each rank of a group sends to others of it at the same time, and whether the group is on
    /// several hosts, or in several processes of one. `members` are world ranks in order: neighbours are on one host. A
    /// ring leaves a host once, and has the links of all its members there.
    pub fn rate(&self, members: &[usize]) -> (f64, bool) {
        let host = |rank: usize| rank / self.together();
        let of_hosts = members.chunk_by(|&one, &next| host(one) == host(next));
        match of_hosts.clone().count() {
            0 | 1 => (self.inside, false),
            _ => {
                let fewest = of_hosts.map(<[usize]>::len).min().unwrap_or(1);
                ((self.between * fewest as f64).min(self.inside), true)
            }
        }
    }
}
