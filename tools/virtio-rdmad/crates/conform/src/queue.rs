// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver's side of a virtqueue that believes nothing that the device says.

use std::collections::BTreeMap;

use memory::GuestMemory;
use ring::Layout;
use testkit::{Buffer, Descriptor, Virtqueue};

use crate::journal::Journal;
use crate::outcome::Outcome;

/// A chain that the device has returned.
#[derive(Debug)]
pub struct Returned {
    /// The buffers of the chain.
    pub buffers: Vec<Buffer>,
    /// The number of bytes that the device says it has written.
    pub written: u32,
}

/// A chain that the device has.
struct Chain {
    buffers: Vec<Buffer>,
    descriptors: Vec<u16>,
}

/// A virtqueue.
pub struct Queue {
    /// The place of the virtqueue.
    pub layout: Layout,
    index: u16,
    virtqueue: Virtqueue,
    free: Vec<u16>,
    chains: BTreeMap<u16, Chain>,
}

impl Queue {
    /// Returns virtqueue `index`, which is empty.
    pub fn new(index: u16, layout: Layout) -> Self {
        let free = (0..layout.size).rev().collect();
        Self { layout, index, virtqueue: Virtqueue::new(layout), free, chains: BTreeMap::new() }
    }

    /// Returns how many chains the device has.
    pub fn outstanding(&self) -> usize {
        self.chains.len()
    }

    /// Returns whether a chain of so many descriptors has room.
    pub fn has_room(&self, descriptors: usize) -> bool {
        self.free.len() >= descriptors
    }

    /// Makes a chain available. There must be room for it.
    pub fn add(&mut self, memory: &GuestMemory, buffers: &[Buffer]) {
        let at = self.free.len().saturating_sub(buffers.len());
        let descriptors = self.free.split_off(at);
        let next = descriptors.iter().skip(1).map(|index| Some(*index)).chain([None]);
        for ((index, buffer), next) in descriptors.iter().zip(buffers).zip(next) {
            Descriptor::new(*buffer, next).write(memory, self.layout.desc, *index);
        }
        let Some(head) = descriptors.first().copied() else { return };
        self.chains.insert(head, Chain { buffers: buffers.to_vec(), descriptors });
        self.virtqueue.offer(memory, head);
    }

    /// Makes a chain available whose descriptors the test has written. The device may return it or not.
    pub fn add_raw(&mut self, memory: &GuestMemory, descriptors: &[Descriptor]) {
        let at = self.free.len().saturating_sub(descriptors.len());
        let indices = self.free.split_off(at);
        for (place, descriptor) in descriptors.iter().enumerate() {
            let mut descriptor = *descriptor;
            if descriptor.flags & testkit::F_NEXT != 0 && descriptor.next == 0 {
                descriptor.next = indices.get(place + 1).copied().unwrap_or(0);
            }
            descriptor.write(memory, self.layout.desc, indices[place]);
        }
        let Some(head) = indices.first().copied() else { return };
        let of = |d: &Descriptor| (d.addr, d.len, d.flags & testkit::F_WRITE != 0);
        let buffers = descriptors.iter().map(of).collect();
        self.chains.insert(head, Chain { buffers, descriptors: indices });
        self.virtqueue.offer(memory, head);
    }

    /// Takes the next chain that the device has returned. It must be one that the device had, and its length one that
    /// the device can have written.
    pub fn take(
        &mut self,
        memory: &GuestMemory,
        journal: &Journal,
        clause: &'static str,
    ) -> Outcome<Option<Returned>> {
        let Some((head, written)) = self.virtqueue.take(memory) else { return Ok(None) };
        let chain = u16::try_from(head).ok().and_then(|head| self.chains.remove(&head));
        let Some(Chain { buffers, descriptors }) = chain else {
            let what = format!("used entry of virtqueue {}", self.index);
            let got = format!("head {head}");
            return Err(journal.failure(clause, &what, "a chain that the device has".into(), got));
        };
        let room: u64 =
            buffers.iter().filter(|buffer| buffer.2).map(|buffer| u64::from(buffer.1)).sum();
        if u64::from(written) > room {
            let what = format!("used length in virtqueue {}", self.index);
            return Err(journal.failure(
                clause,
                &what,
                format!("at most {room}"),
                written.to_string(),
            ));
        }
        self.free.extend(descriptors);
        Ok(Some(Returned { buffers, written }))
    }
}
