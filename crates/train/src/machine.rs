//! The memory and threads that this process may still take, by the limits of the machine, of its control groups
//! (containers, batch systems) and of the process itself. Of control groups every one on the path counts, and the one
//! that leaves least decides.
//!
//! On systems without `/proc` nothing is known, and nothing is refused.

use std::fs;
use std::path::{Path, PathBuf};

/// The rest that a limit leaves, and the limit in words: `this machine has`, `ulimit -v leaves`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub amount: u128,
    pub whose: String,
}

/// A file system with its root: the machine's, or a test's.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    root: PathBuf,
}

/// The files of a controller in both versions of control groups: its limit, what is used, and its name in version 1.
struct Controller {
    name: &'static str,
    limit: [&'static str; 2],
    used: [&'static str; 2],
}

const MEMORY: Controller = Controller {
    name: "memory",
    limit: ["memory.max", "memory.limit_in_bytes"],
    used: ["memory.current", "memory.usage_in_bytes"],
};
const THREADS: Controller =
    Controller { name: "pids", limit: ["pids.max", "pids.max"], used: ["pids.current", "pids.current"] };

/// Cached files that a control group gives back when memory is short, in `memory.stat`.
const CACHE: [&str; 4] = ["inactive_file", "active_file", "total_inactive_file", "total_active_file"];

/// Version 1 has no word for "no limit", but a number of bytes that no machine has.
const UNLIMITED: u128 = 1 << 60;

impl Machine {
    /// This machine.
    pub fn here() -> Self {
        Self { root: PathBuf::from("/") }
    }

    /// The bytes that this process may still take, swap included, and whose limit that is. Address space is asked for
    /// by itself ([`address_space`](Self::address_space)), because threads take more of it than of memory.
    pub fn memory(&self) -> Option<Left> {
        least(self.machine_memory().into_iter().chain(self.control_groups(&MEMORY)))
    }

    /// The bytes of address space that this process may still reserve.
    pub fn address_space(&self) -> Option<Left> {
        let of = |limit: &str, used: &str, whose: &str| {
            let amount = self.limit(limit)?.saturating_sub(self.status(used)?);
            Some(Left { amount, whose: whose.to_owned() })
        };
        let space = of("Max address space", "VmSize:", "the limit on address space (ulimit -v) leaves");
        least(space.into_iter().chain(of("Max data size", "VmData:", "the limit on data (ulimit -d) leaves")))
    }

    /// The threads that this process may still start. The limit of a user counts all of the user's threads, of which
    /// only those of this process are known.
    pub fn threads(&self) -> Option<Left> {
        let own = self.number(self.status_text("Threads:")).unwrap_or(1);
        // The system does not hold root to it.
        let is_root = self.status_text("Uid:").is_some_and(|ids| ids.split_whitespace().nth(1) == Some("0"));
        let of_user = self.limit("Max processes").filter(|_| !is_root).map(|limit| Left {
            amount: limit.saturating_sub(own),
            whose: "the limit on the user's threads (ulimit -u) leaves".to_owned(),
        });
        let of_machine = |file: &str, each: u128| {
            let amount = self.number(self.read(file).ok())? / each;
            Some(Left { amount: amount.saturating_sub(own), whose: format!("/{file} leaves") })
        };
        let machine = [
            of_machine("proc/sys/kernel/threads-max", 1),
            of_machine("proc/sys/kernel/pid_max", 1),
            // A thread has a stack and a guard before it.
            of_machine("proc/sys/vm/max_map_count", 2),
        ];
        least(of_user.into_iter().chain(machine.into_iter().flatten()).chain(self.control_groups(&THREADS)))
    }

    fn read(&self, file: &str) -> std::io::Result<String> {
        fs::read_to_string(self.root.join(file))
    }

    fn number(&self, text: Option<String>) -> Option<u128> {
        text?.split_whitespace().next()?.parse().ok()
    }

    /// `MemAvailable`, which older kernels lack, and free swap.
    fn machine_memory(&self) -> Option<Left> {
        let text = self.read("proc/meminfo").ok()?;
        let of = |key: &str| kibibytes(&text, key);
        let amount = of("MemAvailable:").or_else(|| of("MemTotal:"))? + of("SwapFree:").unwrap_or(0);
        Some(Left { amount, whose: "this machine has".to_owned() })
    }

    /// A limit of this process; `None` if it has none.
    fn limit(&self, name: &str) -> Option<u128> {
        let text = self.read("proc/self/limits").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    }

    fn status_text(&self, key: &str) -> Option<String> {
        let text = self.read("proc/self/status").ok()?;
        text.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned)
    }

    /// A value of `/proc/self/status` in bytes. The file gives it in kibibytes.
    fn status(&self, key: &str) -> Option<u128> {
        Some(self.number(self.status_text(key))? * 1024)
    }

    /// The rest that each control group of this process leaves, from its own up to the root.
    fn control_groups(&self, of: &Controller) -> Vec<Left> {
        let (groups, mounts) = (self.read("proc/self/cgroup"), self.read("proc/self/mountinfo"));
        let (Ok(groups), Ok(mounts)) = (groups, mounts) else { return Vec::new() };
        let mut left = Vec::new();
        for line in groups.lines() {
            // `0::/path` in version 2, `7:cpu,memory:/path` in version 1.
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(names), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
            let version = usize::from(!names.is_empty());
            if version == 1 && !names.split(',').any(|name| name == of.name) {
                continue;
            }
            for mount in mounts.lines() {
                if let Some(Mount { root, point }) = Mount::parse(mount, version, of.name) {
                    // In a container the mount may begin below the root that the path is told from.
                    let inner = path.strip_prefix(&root).unwrap_or(if path.starts_with("/..") { "" } else { path });
                    let bottom = self.root.join(point.trim_start_matches('/'));
                    let own = bottom.join(inner.trim_start_matches('/'));
                    let above = own.ancestors().take_while(|folder| folder.starts_with(&bottom));
                    left.extend(above.filter_map(|folder| leaves(folder, version, of)));
                }
            }
        }
        left
    }
}

/// A mounted hierarchy of control groups.
struct Mount {
    /// The group that lies at the mount point.
    root: String,
    point: String,
}

impl Mount {
    /// Reads a line of `mountinfo`, if it is of this version and controller:
    /// `30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw`.
    fn parse(line: &str, version: usize, controller: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let fits = match kind.next()? {
            "cgroup2" => version == 0,
            "cgroup" => version == 1 && kind.nth(1)?.split(',').any(|option| option == controller),
            _ => false,
        };
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?.to_owned(), place.next()?.replace("\\040", " "));
        let root = if root == "/" { String::new() } else { root };
        fits.then_some(Self { root, point })
    }
}

/// The rest that a control group leaves, if it has a limit.
fn leaves(folder: &Path, version: usize, of: &Controller) -> Option<Left> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u128>().ok();
    let limit = number(of.limit[version]).filter(|&limit| limit < UNLIMITED)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).ok().filter(|_| of.name == MEMORY.name);
    let of_cache = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        CACHE[2 * version..][..2].contains(&name).then(|| bytes.trim().parse::<u128>().ok())?
    };
    let cache = stat.map_or(0, |stat| stat.lines().filter_map(of_cache).sum());
    let used = number(of.used[version]).unwrap_or(0).saturating_sub(cache);
    let whose = format!("the control group {} leaves", folder.join(of.limit[version]).display());
    Some(Left { amount: limit.saturating_sub(used), whose })
}

/// The bytes of memory that this process may still take, by the limits of the machine and of its control groups; `None`
/// where nothing is known of them.
pub fn memory_left() -> Option<u128> {
    Machine::here().memory().map(|left| left.amount)
}

fn least(left: impl IntoIterator<Item = Left>) -> Option<Left> {
    left.into_iter().min_by_key(|left| left.amount)
}

fn kibibytes(text: &str, key: &str) -> Option<u128> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.split_whitespace().next()?.parse::<u128>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of these files.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = dir.path().to_path_buf();
        (dir, Machine { root })
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\nSwapFree: 100 kB\n");
    const V2: (&str, &str) =
        ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");

    fn memory(files: &[(&str, &str)]) -> (u128, String) {
        let (_dir, machine) = machine(files);
        let Left { amount, whose } = machine.memory().unwrap();
        (amount, whose.replace(&machine.root.display().to_string(), ""))
    }

    #[test]
    fn a_machine_without_limits_has_what_is_available_and_free_swap() {
        assert_eq!(memory(&[MEMINFO]), (8100 * 1024, "this machine has".to_owned()));
        let old = ("proc/meminfo", "MemTotal: 9000 kB\n");
        assert_eq!(memory(&[old]).0, 9000 * 1024);
        assert_eq!(machine(&[]).1.memory(), None);
    }

    #[test]
    fn of_nested_control_groups_the_one_that_leaves_least_decides() {
        let group = ("proc/self/cgroup", "0::/job.slice/step\n");
        let at = |at: &str, name: &str| format!("sys/fs/cgroup/{at}{name}");
        let (outer, inner) = (at("job.slice/", "memory.max"), at("job.slice/step/", "memory.max"));
        let (used, own) = (at("job.slice/", "memory.current"), at("job.slice/step/", "memory.current"));
        let stat = at("job.slice/", "memory.stat");
        let told = |outer_limit, inner_limit| {
            let files = [
                MEMINFO,
                V2,
                group,
                (&*outer, outer_limit),
                (&*inner, inner_limit),
                (&*used, "500000\n"),
                (&*own, "1000\n"),
                (&*stat, "anon 400000\nfile 100000\ninactive_file 60000\nactive_file 40000\n"),
            ];
            memory(&files)
        };
        let whose = |path: &str| format!("the control group /sys/fs/cgroup/{path}/memory.max leaves");
        // The cache of files is given back when memory is short.
        assert_eq!(told("2000000\n", "max\n"), (1_600_000, whose("job.slice")));
        assert_eq!(told("2000000\n", "900000\n"), (899_000, whose("job.slice/step")));
        assert_eq!(told("max\n", "max\n").1, "this machine has");
        assert_eq!(told("300000\n", "max\n").0, 0, "more is used than the limit has");
    }

    #[test]
    fn a_container_sees_its_own_limit_at_the_mount_point() {
        let inside = [MEMINFO, V2, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "5000\n")];
        assert_eq!(memory(&inside).0, 5000);
        // Without a namespace the mount begins at the container's group.
        let mount = "41 40 0:33 /docker/7f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let files = [
            MEMINFO,
            ("proc/self/mountinfo", mount),
            ("proc/self/cgroup", "4:cpu,cpuacct:/docker/7f\n3:memory:/docker/7f\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file 1000\ntotal_active_file 500\n"),
        ];
        assert_eq!(memory(&files).0, 5500);
        let mut unlimited = files;
        unlimited[3].1 = "9223372036854771712\n";
        assert_eq!(memory(&unlimited).1, "this machine has");
    }

    #[test]
    fn limits_of_the_process_count() {
        let limits = "Limit  Soft Limit Hard Limit Units\nMax data size  unlimited unlimited bytes\n\
                      Max processes  300 400 processes\nMax address space  1000000 unlimited bytes\n";
        let files = [
            ("proc/self/limits", limits),
            ("proc/self/status", "VmSize:\t     100 kB\nVmData:\t 50 kB\nThreads:\t4\n"),
            ("proc/sys/kernel/threads-max", "5000\n"),
            ("proc/sys/vm/max_map_count", "65530\n"),
        ];
        let (_dir, machine) = machine(&files);
        assert_eq!(machine.address_space().unwrap().amount, 1_000_000 - 102_400);
        let Left { amount, whose } = machine.threads().unwrap();
        let root = files.map(|(name, text)| {
            (name, if name.ends_with("status") { "Uid:\t0\t0\t0\t0\nThreads:\t4\n" } else { text })
        });
        assert_eq!(self::machine(&root).1.threads().unwrap().amount, 4996, "root is not held to the limit of users");
        assert_eq!((amount, &*whose), (296, "the limit on the user's threads (ulimit -u) leaves"));
    }

    #[test]
    fn a_control_group_limits_threads() {
        let files = [V2, ("proc/self/cgroup", "0::/a\n"), ("sys/fs/cgroup/a/pids.max", "100\n")];
        let (_dir, machine) = machine(&[files[0], files[1], files[2], ("sys/fs/cgroup/a/pids.current", "30\n")]);
        assert_eq!(machine.threads().unwrap().amount, 70);
        assert_eq!(machine.memory(), None);
    }
}
