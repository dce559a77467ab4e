//! What this machine has left for us: memory and processors.
//!
//! In: `/proc/meminfo`, `/proc/self/cgroup` and the cgroup files. Out: an [`Environment`], so that nothing else in the configuration looks
//! at the machine. Nothing fails: what cannot be read is unknown.

use std::path::Path;

/// What the defaults are derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Environment {
    /// Bytes of memory that `MemAvailable` and every cgroup limit above us leave; `None` when neither can be read.
    pub memory_available: Option<u64>,
    /// Processors that this process may use, at least 1.
    pub threads: u32,
}

impl Environment {
    /// Looks at this machine.
    pub fn read() -> Self {
        let threads = std::thread::available_parallelism()
            .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
        Self {
            memory_available: memory_available(Path::new("/")),
            threads,
        }
    }
}

/// The least of what the system and each cgroup limit leave. `root` is where `proc` and `sys` are found.
fn memory_available(root: &Path) -> Option<u64> {
    let system = read(&root.join("proc/meminfo")).and_then(|text| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()?
            .checked_mul(1024)
    });
    let membership = read(&root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = membership.lines().flat_map(|line| cgroup_room(root, line));
    system.into_iter().chain(limits).min()
}

/// Room under the memory limits of one line of `/proc/self/cgroup` (`hierarchy:controllers:path`): of the group and of every group above it.
fn cgroup_room(root: &Path, line: &str) -> Vec<u64> {
    let mut fields = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
    else {
        return Vec::new();
    };
    // Version 2 has one hierarchy without named controllers; version 1 has one of its own for memory.
    let (mount, limit_file, usage_file, cache_field) = if controllers.is_empty() {
        (
            "sys/fs/cgroup",
            "memory.max",
            "memory.current",
            "inactive_file",
        )
    } else if controllers
        .split(',')
        .any(|controller| controller == "memory")
    {
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    } else {
        return Vec::new();
    };
    // In a container the path may be the host's and absent here; the walk upwards then still reads the mount's own root.
    Path::new(path.trim_start_matches('/'))
        .ancestors()
        .filter_map(|group| {
            let group = root.join(mount).join(group);
            // `max` (version 2) is no number: no limit. Version 1 writes a huge number instead, which never is the least.
            let limit: u64 = read(&group.join(limit_file))?.trim().parse().ok()?;
            let usage: u64 = read(&group.join(usage_file))?.trim().parse().ok()?;
            // Cold page cache counts as used but is given up under pressure.
            let cache = read(&group.join("memory.stat"))
                .and_then(|text| stat(&text, cache_field))
                .unwrap_or(0);
            Some(limit.saturating_sub(usage.saturating_sub(cache)))
        })
        .collect()
}

fn stat(text: &str, field: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.trim().parse().ok())
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temporary directory");
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("directories");
            std::fs::write(path, text).expect("file");
        }
        root
    }

    #[test]
    fn without_a_cgroup_limit_the_system_decides() {
        let root = machine(&[
            (
                "proc/meminfo",
                "MemTotal: 99 kB\nMemAvailable:    4194304 kB\n",
            ),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "1\n"),
        ]);
        assert_eq!(memory_available(root.path()), Some(4 * GIB));
        assert_eq!(memory_available(machine(&[]).path()), None);
    }

    #[test]
    fn the_tightest_group_above_us_decides() {
        let root = machine(&[
            ("proc/meminfo", "MemAvailable: 67108864 kB\n"),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/a/memory.current", "3221225472\n"),
            (
                "sys/fs/cgroup/a/memory.stat",
                "anon 5\ninactive_file 1073741824\n",
            ),
            ("sys/fs/cgroup/a/b/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/a/b/memory.current", "0\n"),
        ]);
        assert_eq!(memory_available(root.path()), Some(2 * GIB));
    }

    #[test]
    fn version_1_and_a_path_that_is_not_here() {
        let root = machine(&[
            ("proc/meminfo", "MemAvailable: 67108864 kB\n"),
            (
                "proc/self/cgroup",
                "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n"),
        ]);
        assert_eq!(memory_available(root.path()), Some(GIB));
    }
}
