// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CPUs, and the NUMA nodes that have them.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use rustix::thread::{sched_getaffinity, CpuSet};

/// The directory in which the kernel describes nodes (Documentation/ABI/stable/sysfs-devices-node).
const NODES: &str = "/sys/devices/system/node";

/// A list of CPUs, each once, in the order in which they were written.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CpuList(pub Vec<u16>);

/// What is wrong with a list of CPUs.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum CpuListError {
    /// An entry is neither a number nor a range.
    #[error("\"{0}\" is neither a CPU nor a range of CPUs such as 4-7")]
    Entry(String),
    /// A CPU is in the list twice.
    #[error("CPU {0} is listed twice")]
    Twice(u16),
}

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(list: &str) -> Result<Self, CpuListError> {
        let mut cpus = Vec::new();
        for entry in list.split(',') {
            let error = || CpuListError::Entry(entry.to_owned());
            let number = |digits: &str| match digits.parse::<u16>() {
                Ok(cpu) if usize::from(cpu) < CpuSet::MAX_CPU => Ok(cpu),
                _ => Err(error()),
            };
            let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(error());
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(CpuListError::Twice(cpu));
                }
                cpus.push(cpu);
            }
        }
        Ok(Self(cpus))
    }
}

/// The nodes that have CPUs which this process may use, with these CPUs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Nodes(BTreeMap<u32, Vec<u16>>);

impl Nodes {
    /// Reads the nodes of this machine. There are none if the kernel does not tell of any.
    pub fn read() -> Self {
        let usable = sched_getaffinity(None).ok();
        let is_usable = |cpu: u16| usable.is_none_or(|cpus| cpus.is_set(cpu.into()));
        Self::read_from(Path::new(NODES), is_usable)
    }

    fn read_from(directory: &Path, is_usable: impl Fn(u16) -> bool) -> Self {
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) => {
                // Kernels without NUMA have no such directory.
                if error.kind() != std::io::ErrorKind::NotFound {
                    tracing::info!(%error, "the NUMA nodes cannot be read");
                }
                return Self::default();
            }
        };
        let nodes = entries.flatten().filter_map(|entry| {
            let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = std::fs::read_to_string(entry.path().join("cpulist")).ok()?;
            // A node without CPUs has an empty list, and CPUs that cannot be in a set are left out.
            let ranges = list.trim().split(',').flat_map(str::parse::<CpuList>);
            let cpus: Vec<_> =
                ranges.flat_map(|CpuList(cpus)| cpus).filter(|cpu| is_usable(*cpu)).collect();
            Some((node, cpus)).filter(|(_, cpus)| !cpus.is_empty())
        });
        Self(nodes.collect())
    }

    /// Returns the nodes of so many workers: those of the CPUs to which they are pinned, if there is a list. Without one,
    /// the workers are dealt to all nodes by their numbers of CPUs, if there are enough for all nodes. A worker without
    /// a node runs anywhere.
    pub fn of_workers(&self, count: usize, pinned: Option<&CpuList>) -> Vec<Option<u32>> {
        // A machine with one node has no choice.
        if self.0.len() < 2 {
            return vec![None; count];
        }
        if let Some(CpuList(cpus)) = pinned {
            let node_of = |cpu: &u16| self.0.iter().find(|(_, cpus)| cpus.contains(cpu));
            return cpus
                .iter()
                .take(count)
                .map(|cpu| node_of(cpu).map(|(node, _)| *node))
                .collect();
        }
        if count < self.0.len() {
            return vec![None; count];
        }
        let mut dealt: BTreeMap<u32, usize> = BTreeMap::new();
        let next = |_| {
            // Each node gets one. Others go by the method of Sainte-Laguë, as seats of a parliament do.
            let share = |(node, cpus): &(&u32, &Vec<u16>)| {
                let workers = dealt.get(node).copied().unwrap_or(0);
                (workers != 0, (2 * workers + 1) * 1000 / cpus.len())
            };
            let (node, _) = self.0.iter().min_by_key(share)?;
            *dealt.entry(*node).or_default() += 1;
            Some(*node)
        };
        (0..count).map(next).collect()
    }

    /// Returns the CPUs of a node.
    pub fn cpus(&self, node: u32) -> &[u16] {
        self.0.get(&node).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_listed() {
        let list = |text: &str| text.parse::<CpuList>().map(|list| list.0);
        assert_eq!(list("3"), Ok(vec![3]));
        assert_eq!(list("3,0-2,1000"), Ok(vec![3, 0, 1, 2, 1000]));
        assert_eq!(list("0-2,1"), Err(CpuListError::Twice(1)));
        for text in ["", "1,", "a", "-1", "1-", "2-1", "1-2-3", "1024", "70000"] {
            assert!(matches!(list(text), Err(CpuListError::Entry(_))), "{text}");
        }
    }

    /// The files of the kernel are understood: nodes with a number, with CPUs, and with CPUs for others only.
    #[test]
    fn nodes_are_read() {
        let directory = std::env::temp_dir().join(format!("rdmad-nodes-{}", std::process::id()));
        let files = [
            ("node0", "0-1,4\n"),
            ("node1", "2-3\n"),
            ("node2", "\n"),
            ("node10", "5,9,5000-5003\n"),
            ("power", "7\n"),
        ];
        for (name, list) in files {
            std::fs::create_dir_all(directory.join(name)).unwrap();
            std::fs::write(directory.join(name).join("cpulist"), list).unwrap();
        }
        let nodes = Nodes::read_from(&directory, |_| true);
        assert_eq!(
            nodes.0,
            BTreeMap::from([(0, vec![0, 1, 4]), (1, vec![2, 3]), (10, vec![5, 9])])
        );
        let pinned = CpuList(vec![9, 4, 3, 8]);
        let of_pinned = nodes.of_workers(4, Some(&pinned));
        assert_eq!(of_pinned, [Some(10), Some(0), Some(1), None]);
        assert_eq!(nodes.of_workers(3, None), [0, 1, 10].map(Some));
        assert_eq!(nodes.of_workers(7, None), [0, 1, 10, 0, 1, 10, 0].map(Some));
        assert_eq!(nodes.of_workers(2, None), [None, None], "a node would have no worker");
        let few = Nodes::read_from(&directory, |cpu| (2..4).contains(&cpu));
        assert_eq!(few.of_workers(2, None), [None, None], "one node is left");
        let uneven = Nodes::read_from(&directory, |cpu| cpu < 3);
        assert_eq!(uneven.of_workers(5, None), [0, 1, 0, 0, 1].map(Some));
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(Nodes::read_from(&directory, |_| true), Nodes::default());
    }
}
