//! Whether a machine did anything else while it was measured.

use std::fmt::{self, Display};
use std::fs;

/// What disturbed a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disturbance {
    /// The share of the cores' time that other programs and other virtual machines took; `None` where the system does
    /// not say.
    pub others: Option<f64>,
    /// How many times as long the slowest of equal steps took as the fastest.
    pub spread: f64,
}

/// Others may take this share of the cores before measured rates are wrong.
const MOST_OTHERS: f64 = 0.05;

/// Equal steps on a machine that does nothing else may differ by this factor.
const MOST_SPREAD: f64 = 1.25;

impl Disturbance {
    /// What to do about it, where the measured rates are wrong.
    ///
    /// ```
    /// use meshwork_plan::measure::Disturbance;
    ///
    /// let quiet = Disturbance { others: Some(0.01), spread: 1.1 };
    /// assert_eq!(quiet.warning(), None);
    /// let busy = Disturbance { others: Some(0.5), ..quiet };
    /// assert_eq!(
    ///     busy.warning().unwrap(),
    ///     "this machine was busy: other programs took 50% of its cores, and equal steps differed by 10%; \
    ///      measure it again when it does nothing else"
    /// );
    /// assert!(Disturbance { spread: 2.0, ..quiet }.warning().is_some());
    /// ```
    pub fn warning(&self) -> Option<String> {
        let busy = self.others.is_some_and(|others| others > MOST_OTHERS) || self.spread > MOST_SPREAD;
        busy.then(|| format!("this machine was busy: {self}; measure it again when it does nothing else"))
    }
}

impl Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(others) = self.others {
            write!(f, "other programs took {:.0}% of its cores, and ", 100.0 * others)?;
        }
        write!(f, "equal steps differed by {:.0}%", 100.0 * (self.spread - 1.0))
    }
}

/// The time of the cores up to a moment, in ticks of the system: that of all, that in which they worked or other
/// virtual machines had them, and that in which they worked for this process.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ticks {
    all: f64,
    busy: f64,
    own: f64,
}

/// Sees what other programs do during a measurement.
#[derive(Debug)]
pub(crate) struct Watch(Option<Ticks>);

impl Watch {
    pub fn begin() -> Self {
        Self(Ticks::now())
    }

    /// What disturbed it; of equal steps the slowest took `spread` times as long as the fastest.
    pub fn end(self, spread: f64) -> Disturbance {
        let others = self.0.zip(Ticks::now()).map(|(begin, end)| end.others_since(begin));
        Disturbance { others, spread }
    }
}

impl Ticks {
    /// Those of this machine, if it tells.
    fn now() -> Option<Self> {
        let read = |file: &str| fs::read_to_string(file).ok();
        Self::parse(&read("/proc/stat")?, &read("/proc/self/stat")?, &read("/proc/self/status")?)
    }

    /// Those in the texts of `/proc/stat`, `/proc/self/stat` and `/proc/self/status`: of the cores that this process
    /// may use.
    fn parse(machine: &str, process: &str, status: &str) -> Option<Self> {
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        let mut ticks = Self { all: 0.0, busy: 0.0, own: 0.0 };
        for line in machine.lines() {
            let mut words = line.split_whitespace();
            let number = words.next().and_then(|word| word.strip_prefix("cpu")?.parse::<usize>().ok());
            if number.is_some_and(|number| listed(allowed, number)) {
                // user, nice, system, idle, iowait, irq, softirq, steal; time of guests is in that of users.
                let times: Vec<f64> = words.take(8).filter_map(|word| word.parse().ok()).collect();
                let idle: f64 = times.get(3..5)?.iter().sum();
                ticks.all += times.iter().sum::<f64>();
                ticks.busy += times.iter().sum::<f64>() - idle;
            }
        }
        // Behind the name in brackets, which may have blanks: state, then the 14th and 15th are user and system.
        let own = process.rsplit_once(')')?.1.split_whitespace().skip(11).take(2);
        ticks.own = own.filter_map(|word| word.parse::<f64>().ok()).sum();
        (ticks.all > 0.0).then_some(ticks)
    }

    /// The share of the cores' time since `begin` that was busy, and not for this process.
    fn others_since(self, begin: Self) -> f64 {
        let all = (self.all - begin.all).max(1.0);
        ((self.busy - begin.busy - (self.own - begin.own)) / all).clamp(0.0, 1.0)
    }
}

/// Whether a list such as `0-3,8` has a number.
fn listed(list: &str, number: usize) -> bool {
    list.trim().split(',').any(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        matches!((first.parse::<usize>(), last.parse::<usize>()), (Ok(first), Ok(last)) if (first..=last).contains(&number))
    })
}
