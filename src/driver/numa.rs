//! Which processors are near a GPU.
//!
//! In: a GPU's PCI bus id, and sysfs. Out: a [`Node`], whose processors a thread can be bound to: memory that such a thread touches first lies beside the GPU, and a copy thread
//! there does not cross the link between the sockets. Nothing fails: where nothing is known, where there is only one node, or where we may not use its processors, there
//! is no node and everything goes on as it is. Neither libnuma nor `mbind` is used: containers often forbid the latter, first touch needs no right.

use std::fmt;
use std::path::Path;
use std::sync::Once;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors of one NUMA node that this process may use; at least one.
#[derive(Clone, Copy)]
pub(super) struct Node {
    number: u32,
    processors: CpuSet,
}

impl Node {
    /// The node of the GPU with this PCI bus id, as `cuDeviceGetPCIBusId` prints it.
    pub(super) fn of_gpu(pci: &str) -> Option<Self> {
        // Without the mask nothing is known about what we may use.
        let allowed = sched_getaffinity(None).ok()?;
        Self::find(Path::new("/sys"), pci, &allowed)
    }

    /// As [`Node::of_gpu`], with sysfs at `sys` and the processors that we may use.
    fn find(sys: &Path, pci: &str, allowed: &CpuSet) -> Option<Self> {
        let nodes = sys.join("devices/system/node");
        // On a machine of one node everything is near.
        let online = processor_list(&read(&nodes.join("online"))?)?;
        if online.count() < 2 {
            return None;
        }
        // The driver prints capital hex digits, sysfs has small ones.
        let device = sys
            .join("bus/pci/devices")
            .join(pci.to_ascii_lowercase())
            .join("numa_node");
        // -1: the firmware does not say.
        let number: u32 = read(&device)?.trim().parse().ok()?;
        let there = processor_list(&read(&nodes.join(format!("node{number}/cpulist")))?)?;
        let mut processors = CpuSet::new();
        for processor in (0..CpuSet::MAX_CPU).filter(|&it| there.is_set(it) && allowed.is_set(it)) {
            processors.set(processor);
        }
        (processors.count() > 0).then_some(Self { number, processors })
    }

    /// Binds the calling thread to the node, if the system lets us; if not, that is told once.
    pub(super) fn settle(&self) {
        static TOLD: Once = Once::new();
        if let Err(error) = sched_setaffinity(None, &self.processors) {
            TOLD.call_once(|| {
                tracing::warn!(node = self.number, %error, "threads cannot be kept on the NUMA node of their GPU; copies may be slower");
            });
        }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("number", &self.number)
            .field("processors", &self.processors.count())
            .finish()
    }
}

/// A list as sysfs writes it, `0-3,8,10-11`; `None` when it is none or names what no set can hold.
fn processor_list(text: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= CpuSet::MAX_CPU {
            return None;
        }
        (first..=last).for_each(|it| set.set(it));
    }
    Some(set)
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "bus/pci/devices/0000:17:00.0/numa_node";
    const NODES: [(&str, &str); 3] = [
        ("devices/system/node/online", "0-1\n"),
        ("devices/system/node/node0/cpulist", "0-3,8-11\n"),
        ("devices/system/node/node1/cpulist", "4-7,12\n"),
    ];

    fn sysfs(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn set(processors: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        processors.iter().for_each(|&it| set.set(it));
        set
    }

    fn find(files: &[(&str, &str)], allowed: &[usize]) -> Option<Node> {
        Node::find(sysfs(files).path(), "0000:17:00.0", &set(allowed))
    }

    #[test]
    fn a_gpu_has_the_processors_of_its_node_that_we_may_use() {
        let root = sysfs(&[NODES[0], NODES[1], NODES[2], (GPU, "1\n")]);
        let allowed = set(&[3, 4, 5, 12]);
        let node = Node::find(root.path(), "0000:17:00.0", &allowed).unwrap();
        assert_eq!(node.number, 1);
        assert!(node.processors == set(&[4, 5, 12]), "{node:?}");
        let capital = sysfs(&[
            NODES[0],
            NODES[1],
            ("bus/pci/devices/0000:ab:00.0/numa_node", "0"),
        ]);
        assert!(Node::find(capital.path(), "0000:AB:00.0", &set(&[0])).is_some());
    }

    #[test]
    fn what_is_not_known_or_not_ours_is_no_node() {
        let [online, first, second] = NODES;
        for (why, files) in [
            ("no file of the GPU", vec![online, first, second]),
            (
                "the firmware does not say",
                vec![online, first, second, (GPU, "-1\n")],
            ),
            ("no such node", vec![online, first, second, (GPU, "7\n")]),
            ("no nodes", vec![(GPU, "1\n")]),
            (
                "one node",
                vec![("devices/system/node/online", "0\n"), first, (GPU, "0\n")],
            ),
            (
                "a list that is none",
                vec![
                    online,
                    ("devices/system/node/node1/cpulist", "four"),
                    (GPU, "1\n"),
                ],
            ),
        ] {
            assert!(find(&files, &[0, 4]).is_none(), "{why}");
        }
        let whole = [online, first, second, (GPU, "1\n")];
        assert!(find(&whole, &[0, 1]).is_none(), "all of it forbidden");
        assert!(find(&whole, &[4]).is_some());
    }

    #[test]
    fn a_thread_settles_and_others_stay() {
        let before = sched_getaffinity(None).unwrap();
        let one = (0..CpuSet::MAX_CPU).find(|&it| before.is_set(it)).unwrap();
        let node = Node {
            number: 0,
            processors: set(&[one]),
        };
        let settled = std::thread::spawn(move || {
            node.settle();
            sched_getaffinity(None).unwrap()
        });
        assert!(settled.join().unwrap() == set(&[one]));
        assert!(sched_getaffinity(None).unwrap() == before);
    }

    #[test]
    fn processor_lists_have_ranges_and_single_numbers() {
        assert!(processor_list("0-2,5\n").unwrap() == set(&[0, 1, 2, 5]));
        assert!(processor_list("").unwrap() == set(&[]));
        for bad in ["a", "1-", "-1", "99999", "0-99999"] {
            assert!(processor_list(bad).is_none(), "{bad:?}");
        }
    }
}
