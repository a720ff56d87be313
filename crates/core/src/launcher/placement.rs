//! Where the ranks of a mesh are: their processes and hosts.
//!
//! Ranks are numbered with tp fastest, and a process has consecutive ranks. So the axes that communicate most lie
//! inside a process, then inside a host, wherever their degrees allow it. [`Placement::order`] numbers processes so
//! that this holds however the launcher has dealt them out to hosts.

use crate::axes::Axis;
use crate::comm::{CommError, Group};
use crate::mesh::Mesh;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// The process and the host of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Number of the process of each rank.
    process: Vec<usize>,
    /// Number of the host of each process.
    host: Vec<usize>,
    /// The names of the hosts.
    hosts: Vec<String>,
}

/// What holds all ranks of each group of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Within {
    /// A process.
    Process,
    /// A host.
    Host,
    /// Several hosts.
    Hosts,
}

impl Placement {
    /// Processes of `ranks_per_process` consecutive ranks each, on the hosts with these names.
    pub fn new<S: AsRef<str>>(hosts_of_processes: &[S], ranks_per_process: usize) -> Self {
        let mut numbers = HashMap::new();
        let host = hosts_of_processes.iter().map(|name| {
            let next = numbers.len();
            *numbers.entry(name.as_ref()).or_insert(next)
        });
        let host: Vec<usize> = host.collect();
        let mut hosts = vec![String::new(); numbers.len()];
        numbers.into_iter().for_each(|(name, number)| name.clone_into(&mut hosts[number]));
        let process = (0..host.len()).flat_map(|process| std::iter::repeat_n(process, ranks_per_process)).collect();
        Self { process, host, hosts }
    }

    /// The order in which processes on these hosts get ranks, `ranks_per_process` consecutive ones each, so that runs
    /// of `together` ranks (the groups of tp) lie inside a process, then inside a host, wherever there is room. A
    /// launcher that deals processes out to hosts in turn does not place them so. Process 0 stays the first.
    ///
    /// ```
    /// use meshwork_core::launcher::Placement;
    ///
    /// // tp=2, a process a rank: the processes of each host are neighbours.
    /// assert_eq!(Placement::order(&["a", "b", "a", "b"], 1, 2), [0, 2, 1, 3]);
    /// // Hosts of three and five: one group must reach over both, whatever the order.
    /// assert_eq!(Placement::order(&["a", "a", "a", "b", "b", "b", "b", "b"], 1, 2), [0, 1, 2, 3, 4, 5, 6, 7]);
    /// ```
    pub fn order<H: Eq + Hash>(hosts_of_processes: &[H], ranks_per_process: usize, together: usize) -> Vec<usize> {
        let (each, together, hosts) = (ranks_per_process.max(1), together.max(1), hosts_of_processes);
        let natural: Vec<usize> = (0..hosts.len()).collect();
        // Groups that reach over hosts.
        let reach_over = |order: &[usize]| {
            let host = |rank: usize| &hosts[order[rank / each]];
            let groups = (0..order.len() * each / together).map(|group| group * together);
            groups.filter(|&first| (first..first + together).any(|rank| host(rank) != host(first))).count()
        };
        // The fewest processes whose ranks are whole groups.
        let block = (1..=together).find(|processes| (processes * each).is_multiple_of(together)).unwrap_or(1);
        let (mut numbers, mut by_host) = (HashMap::new(), Vec::<Vec<usize>>::new());
        for (process, host) in hosts.iter().enumerate() {
            let number = *numbers.entry(host).or_insert(by_host.len());
            by_host.resize_with(by_host.len().max(number + 1), Vec::new);
            by_host[number].push(process);
        }
        let (mut whole, mut rest) = (Vec::new(), Vec::new());
        for of_host in by_host {
            let (blocks, left) = of_host.split_at(of_host.len() / block * block);
            whole.extend_from_slice(blocks);
            rest.extend_from_slice(left);
        }
        let order = if whole.first() == Some(&0) { [whole, rest] } else { [rest, whole] }.concat();
        if reach_over(&order) < reach_over(&natural) { order } else { natural }
    }

    /// The placement of a world, on its rank 0; `None` on the others. `host` is the name of this rank's host, and every
    /// process has `ranks_per_process` ranks. Collective.
    ///
    /// # Errors
    /// A failed communication.
    pub fn gather(world: &Group, host: &str, ranks_per_process: usize) -> Result<Option<Self>, CommError> {
        let names = world.gather_bytes(host.as_bytes().to_vec())?;
        let names: Vec<_> = names.iter().map(|name| String::from_utf8_lossy(name)).collect();
        let of_processes: Vec<_> = names.iter().step_by(ranks_per_process.max(1)).collect();
        Ok((world.rank() == 0).then(|| Self::new(&of_processes, ranks_per_process)))
    }

    /// Number of processes.
    pub fn processes(&self) -> usize {
        self.host.len()
    }

    /// Number of hosts.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// What holds all ranks of each group of `axis`.
    pub fn within(&self, mesh: &Mesh, axis: Axis) -> Within {
        let of_rank = |rank: usize| {
            let group = mesh.group(rank, &[axis]);
            let processes: BTreeSet<usize> = group.iter().map(|&rank| self.process[rank]).collect();
            let hosts: BTreeSet<usize> = processes.iter().map(|&process| self.host[process]).collect();
            match (processes.len(), hosts.len()) {
                (1, _) => Within::Process,
                (_, 1) => Within::Host,
                _ => Within::Hosts,
            }
        };
        // The first rank of each group stands for it.
        let firsts = (0..self.process.len().min(mesh.world_size())).filter(|&rank| mesh.coords(rank).get(axis) == 0);
        firsts.map(of_rank).max().unwrap_or(Within::Process)
    }

    /// The placement in words: `16 ranks: 4 processes on 2 hosts by Slurm, mesh tp=4 inside a host, dp=2 across hosts`.
    pub fn describe(&self, mesh: &Mesh, by: &str) -> String {
        let counted = |count: usize, one: &str, several: &str| match count {
            1 => format!("1 {one}"),
            _ => format!("{count} {several}"),
        };
        let ranks = counted(self.process.len(), "rank", "ranks");
        let processes = counted(self.processes(), "process", "processes");
        let hosts = counted(self.hosts(), "host", "hosts");
        let axes = mesh.axes().filter(|&axis| mesh.degree(axis) > 1).map(|axis| {
            let place = match self.within(mesh, axis) {
                Within::Process => "inside a process",
                Within::Host => "inside a host",
                Within::Hosts => "across hosts",
            };
            format!("{}={} {place}", mesh.group_name(&[axis]), mesh.degree(axis))
        });
        let axes: Vec<String> = axes.collect();
        let axes = if axes.is_empty() { String::new() } else { format!(", mesh {}", axes.join(", ")) };
        format!("{ranks}: {processes} on {hosts} by {by}{axes}")
    }

    /// A warning if the groups of tp, which communicate most, reach over hosts, and what would be better.
    pub fn warning(&self, mesh: &Mesh) -> Option<String> {
        let tp = mesh.degree(Axis::Tp);
        if self.within(mesh, Axis::Tp) != Within::Hosts {
            return None;
        }
        let of_host = |host| self.process.iter().filter(|&&process| self.host[process] == host).count();
        let least = (0..self.hosts()).map(of_host).min().unwrap_or_default();
        let in_turn = self.host.windows(2).filter(|pair| pair[0] != pair[1]).count() + 1 > self.hosts();
        let advice = if in_turn && least % tp == 0 {
            "let the launcher fill a host before the next: --map-by slot of Open MPI, -ppn of MPICH, --distribution=block of Slurm"
                .to_owned()
        } else {
            let fits =
                (1..=tp).rev().find(|&degree| tp.is_multiple_of(degree) && least.is_multiple_of(degree)).unwrap_or(1);
            format!("use tp={fits}, or hosts with a multiple of {tp} ranks each")
        };
        Some(format!("warning: tp={tp} reaches over hosts, and communicates in every layer; {advice}"))
    }
}
