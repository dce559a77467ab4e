//! Which present GPU takes up which stored one: pure arithmetic over two lists.
//!
//! In: the image's GPUs (those with data, and those that the saved process could only see), this node's GPUs, the user's wishes. Out: pairs (stored, present) with every GPU that
//! holds data among them. What can fail: a wish that names nothing, two stored GPUs for one place, another chip, too few GPUs.

use std::fmt;

use crate::driver::{Device, GpuUuid};
use crate::manifest::{DeviceRecord, ProcessRecord};

/// Stored GPU, present GPU.
pub(super) type GpuPairs = Vec<(GpuUuid, GpuUuid)>;

/// A GPU of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stored {
    uuid: GpuUuid,
    chip: Chip,
    /// Bytes that it held; 0 for one that the process could see and had no data on.
    raw_len: u64,
}

/// A GPU of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Present {
    uuid: GpuUuid,
    chip: Chip,
    memory_len: u64,
    pci: String,
}

/// The driver restores onto the same chip type only. Product name and compute capability together tell it, and keep an emulated image off hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Chip {
    name: String,
    capability: String,
}

/// Why the image's GPUs cannot be mapped to this node's, and both lists.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{problem}; the image has {}; this node has {}",
    List(stored),
    List(present)
)]
pub(super) struct NoMap {
    problem: Problem,
    stored: Vec<Stored>,
    present: Vec<Present>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Problem {
    #[error("--gpu-map (driver.gpu_map) names {0}, which is no GPU of the image")]
    NotStored(GpuUuid),
    #[error("--gpu-map (driver.gpu_map) names {0}, which is no GPU of this node")]
    NotPresent(GpuUuid),
    #[error("two GPUs of the image map to {0}")]
    Twice(GpuUuid),
    #[error("{new} is another chip than {old} was")]
    OtherChip { old: GpuUuid, new: GpuUuid },
    #[error("no GPU of this node is left for {0}: it needs the same chip and enough memory")]
    NoneLeft(GpuUuid),
}

/// Maps the GPUs of a saved process: as the user says, else each to itself, else to the lowest PCI id that is left, of the same chip and large enough. A GPU without data is
/// mapped if one is left for it.
///
/// # Errors
/// [`NoMap`], with both lists.
pub(super) fn map_gpus(
    saved: &ProcessRecord,
    devices: &[Device],
    wanted: &[(GpuUuid, GpuUuid)],
) -> Result<GpuPairs, NoMap> {
    // A UUID that is none was refused with the manifest.
    let stored: Vec<Stored> = saved
        .devices
        .iter()
        .filter_map(|record| Stored::of(record, saved))
        .collect();
    let present: Vec<Present> = devices.iter().map(Present::of).collect();
    map(&stored, &present, wanted).map_err(|problem| NoMap {
        problem,
        stored,
        present,
    })
}

/// Whether every GPU goes to itself: the driver then needs no list.
pub(super) fn is_identity(pairs: &[(GpuUuid, GpuUuid)]) -> bool {
    pairs.iter().all(|(old, new)| old == new)
}

fn map(
    stored: &[Stored],
    present: &[Present],
    wanted: &[(GpuUuid, GpuUuid)],
) -> Result<GpuPairs, Problem> {
    let find = |uuid: GpuUuid| present.iter().find(|gpu| gpu.uuid == uuid);
    for &(old, new) in wanted {
        if !stored.iter().any(|gpu| gpu.uuid == old) {
            return Err(Problem::NotStored(old));
        }
        find(new).ok_or(Problem::NotPresent(new))?;
    }
    let mut pairs = GpuPairs::with_capacity(stored.len());
    let is_taken = |pairs: &GpuPairs, uuid: GpuUuid| pairs.iter().any(|&(_, new)| new == uuid);
    // Wishes first, identities next: what is left over must not take their places.
    for gpu in stored {
        let wish = wanted.iter().find(|(old, _)| *old == gpu.uuid);
        let Some(&(old, new)) = wish else { continue };
        if is_taken(&pairs, new) {
            return Err(Problem::Twice(new));
        }
        if find(new).is_some_and(|found| found.chip != gpu.chip) {
            return Err(Problem::OtherChip { old, new });
        }
        pairs.push((old, new));
    }
    let mut homeless = Vec::new();
    for gpu in stored {
        if pairs.iter().any(|&(old, _)| old == gpu.uuid) {
            continue;
        }
        match find(gpu.uuid) {
            Some(same) if same.chip == gpu.chip && !is_taken(&pairs, gpu.uuid) => {
                pairs.push((gpu.uuid, gpu.uuid));
            }
            _ => homeless.push(gpu),
        }
    }
    let mut by_pci: Vec<&Present> = present.iter().collect();
    by_pci.sort_by(|a, b| a.pci.cmp(&b.pci));
    // Those with data choose first.
    homeless.sort_by_key(|gpu| gpu.raw_len == 0);
    for gpu in homeless {
        let free = by_pci.iter().find(|candidate| {
            candidate.chip == gpu.chip
                && candidate.memory_len >= gpu.raw_len
                && !is_taken(&pairs, candidate.uuid)
        });
        match free {
            Some(found) => pairs.push((gpu.uuid, found.uuid)),
            None if gpu.raw_len == 0 => {}
            None => return Err(Problem::NoneLeft(gpu.uuid)),
        }
    }
    Ok(pairs)
}

impl Stored {
    fn of(record: &DeviceRecord, saved: &ProcessRecord) -> Option<Self> {
        let extent = saved
            .extents
            .iter()
            .find(|extent| extent.device == record.uuid);
        Some(Self {
            uuid: record.uuid.parse().ok()?,
            chip: Chip {
                name: record.name.clone(),
                capability: record.chip.clone(),
            },
            raw_len: extent.map_or(0, |extent| extent.raw_len),
        })
    }
}

impl Present {
    fn of(device: &Device) -> Self {
        Self {
            uuid: device.uuid,
            chip: Chip {
                name: device.name.clone(),
                capability: device.chip.clone(),
            },
            memory_len: device.memory_len,
            pci: device.pci.clone(),
        }
    }
}

impl fmt::Display for Chip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.name, self.capability)
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {} bytes)", self.uuid, self.chip, self.raw_len)
    }
}

impl fmt::Display for Present {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.uuid, self.chip, self.pci)
    }
}

struct List<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no GPU");
        }
        for (index, item) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{item}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(number: u8) -> GpuUuid {
        GpuUuid([number; 16])
    }

    fn chip(name: &str) -> Chip {
        Chip {
            name: name.to_owned(),
            capability: "9.0".to_owned(),
        }
    }

    fn stored(number: u8, raw_len: u64) -> Stored {
        Stored {
            uuid: uuid(number),
            chip: chip("A"),
            raw_len,
        }
    }

    fn present(number: u8, name: &str, memory_len: u64) -> Present {
        Present {
            uuid: uuid(number),
            chip: chip(name),
            memory_len,
            // The higher the number, the lower the PCI id.
            pci: format!("0000:{:02x}:00.0", 0xff - number),
        }
    }

    fn pairs(list: &[(u8, u8)]) -> GpuPairs {
        list.iter()
            .map(|&(old, new)| (uuid(old), uuid(new)))
            .collect()
    }

    #[test]
    fn every_gpu_that_is_there_stays_itself() {
        let old = [stored(1, 5), stored(2, 0), stored(3, 7)];
        let new = [present(3, "A", 9), present(1, "A", 9), present(2, "A", 9)];
        let map = map(&old, &new, &[]).unwrap();
        assert_eq!(map, pairs(&[(1, 1), (2, 2), (3, 3)]));
        assert!(is_identity(&map));
    }

    #[test]
    fn the_lowest_pci_id_that_is_large_enough_takes_the_rest() {
        let old = [stored(1, 5), stored(2, 8)];
        let new = [present(7, "A", 9), present(8, "A", 6), present(9, "B", 9)];
        // 9 is another chip; 8 comes first by PCI id, but is too small for the second.
        assert_eq!(map(&old, &new, &[]), Ok(pairs(&[(1, 8), (2, 7)])));
    }

    #[test]
    fn a_wish_goes_before_an_identity() {
        let old = [stored(1, 5), stored(2, 5)];
        let new = [present(1, "A", 9), present(2, "A", 9)];
        let crossed = map(&old, &new, &pairs(&[(1, 2)]));
        assert_eq!(crossed, Ok(pairs(&[(1, 2), (2, 1)])));
    }

    #[test]
    fn gpus_without_data_take_what_is_left_or_nothing() {
        let old = [stored(1, 0), stored(2, 5)];
        assert_eq!(map(&old, &[present(7, "A", 9)], &[]), Ok(pairs(&[(2, 7)])));
        let two = [present(7, "A", 9), present(6, "A", 9)];
        assert_eq!(map(&old, &two, &[]), Ok(pairs(&[(2, 7), (1, 6)])));
    }

    #[test]
    fn what_cannot_be_is_named() {
        let old = [stored(1, 5), stored(2, 5)];
        let new = [present(7, "A", 9), present(8, "B", 9)];
        assert_eq!(map(&old, &new, &[]), Err(Problem::NoneLeft(uuid(2))));
        let wish = |list: &[(u8, u8)]| map(&old, &new, &pairs(list));
        assert_eq!(wish(&[(3, 7)]), Err(Problem::NotStored(uuid(3))));
        assert_eq!(wish(&[(1, 6)]), Err(Problem::NotPresent(uuid(6))));
        assert_eq!(wish(&[(1, 7), (2, 7)]), Err(Problem::Twice(uuid(7))));
        let (old, new) = (uuid(1), uuid(8));
        assert_eq!(wish(&[(1, 8)]), Err(Problem::OtherChip { old, new }));
    }
}
