// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The outbox of a guest: packets that its thread has made in a round, and that leave together.
//!
//! Packets of one connection, which follow each other and are equally long, leave as a train: by one
//! system call. The packets of a guest leave in the order in which they were made.

use roce::{Headers, Operation, Train};

use crate::base::address::Address;
use crate::base::counters::Counter;
use crate::base::slot::Slot;
use crate::transport::hca::Hca;
use crate::transport::observe;

/// Packets that have not left. The memory is there from the first packet on.
#[derive(Default)]
pub(crate) struct Outbox(Option<Box<Packets>>);

/// The packets of a connection.
#[derive(Default)]
struct Packets {
    train: Train,
    /// The number of packets.
    count: u64,
    /// The address that they come from.
    source: Address,
    /// Whether one of them has time of the guest's rate reserved.
    is_reserved: bool,
}

impl Outbox {
    /// Adds a packet with a payload of `len` bytes, which `fill` writes. Returns the result of `fill`. A packet that
    /// cannot be made, whose payload cannot be read, or whose source is not the guest's any more when it leaves, is not
    /// sent. `observed` is the place of the QP, if the QP is observed.
    pub fn send<E>(
        &mut self,
        hca: &Hca,
        headers: &Headers,
        observed: Option<Slot>,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let packets = self.0.get_or_insert_default();
        if !packets.train.takes(headers, len) {
            packets.flush(hca);
        }
        packets.source = Address { gid: headers.ip.source_gid(), vlan: headers.ethernet.vlan_id() };
        packets.is_reserved |= len != 0 || !is_answer(headers.bth.opcode.operation());
        let mut payload = Vec::new();
        let fill = |place: &mut [u8]| {
            let filled = fill(place);
            if observed.is_some() {
                payload.extend_from_slice(place);
            }
            filled
        };
        match packets.train.push(headers, len, fill) {
            Ok(filled) => {
                packets.count += u64::from(filled.is_ok());
                if let Some(slot) = observed.filter(|_| filled.is_ok()) {
                    observe::packet(hca, slot, true, headers, &payload);
                }
                filled
            }
            Err(error) => {
                debug_assert!(false, "{error}");
                Ok(())
            }
        }
    }

    /// Sends the packets that have not left.
    #[inline]
    pub fn flush(&mut self, hca: &Hca) {
        if let Some(packets) = &mut self.0 {
            packets.flush(hca);
        }
    }
}

impl Packets {
    /// Sends the packets. A connection outlives the entry of the GID table that it was made with: its
    /// packets do not leave then. What leaves several times takes the guest's rate as often, but answers do not: a
    /// peer chooses how many they are.
    fn flush(&mut self, hca: &Hca) {
        let count = std::mem::take(&mut self.count);
        let is_reserved = std::mem::take(&mut self.is_reserved);
        if count == 0 {
            return;
        }
        let uplink = hca.fabric.uplink().filter(|_| hca.fabric.is_owner(&self.source, hca));
        if uplink.is_none() {
            hca.stats.add(Counter::DropNotOwn, count);
        }
        self.train.take(|segments| {
            if let Some(uplink) = uplink {
                let bytes = segments.frame.len() as u64;
                let copies = uplink.send(segments) as u64;
                let more = if is_reserved { copies.saturating_sub(1) } else { 0 };
                hca.rate_limit.spend(bytes * more);
            }
        });
    }
}

/// Returns whether a packet without payload is sent because a packet has come, or may come: no rate is reserved for it.
fn is_answer(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Acknowledge
            | Operation::AtomicAcknowledge
            | Operation::ReadResponse
            | Operation::SelectiveAcknowledge
            | Operation::SelectiveOffer
            | Operation::Cnp
    )
}
