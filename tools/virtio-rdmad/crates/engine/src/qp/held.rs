// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The packets that a responder holds, as packets in front of them are missing. They are done in their order
//! when those have come, so nothing of them is visible before.
//!
//! A peer decides how much is held. So there is a bound for each connection, which is what a selective
//! acknowledgement can tell of, and one for each guest, in bytes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use roce::{Headers, Psn, SackEth};

use crate::base::image::abi_bytes::Bytes;
use crate::base::image::{require, Wrong};

/// Bytes that all connections of a guest hold.
const MOST_BYTES: u64 = 4 << 20;

/// Bytes that a packet takes besides its payload, about.
const OVERHEAD: u64 = size_of::<HeldPacket>() as u64 + 64;

/// Bytes of a frame besides the payload, at most.
const MOST_HEADERS: usize = 256;

/// The bytes that the connections of a guest hold.
#[derive(Clone, Default)]
pub(crate) struct HoldQuota(Arc<AtomicU64>);

impl HoldQuota {
    /// Takes so many bytes, which are free again when the share is dropped; `None` if there are not so many.
    fn take(&self, bytes: u64) -> Option<Share> {
        let more = |held: u64| held.checked_add(bytes).filter(|held| *held <= MOST_BYTES);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Share { quota: self.clone(), bytes })
    }
}

/// Bytes of a quota.
struct Share {
    quota: HoldQuota,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.quota.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A packet, without what only a datagram has.
pub(crate) struct HeldPacket {
    pub headers: Headers,
    pub payload: Box<[u8]>,
    _share: Share,
}

/// What became of a packet that came too early.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It is held.
    Held,
    /// It was held already.
    Duplicate,
    /// It is too far ahead, or the guest holds too much.
    NoRoom,
}

/// The packets that a connection holds.
#[derive(Default)]
pub(crate) struct Held(BTreeMap<u32, HeldPacket>);

impl Held {
    /// Returns the packets from the PSN `expected` on, as frames.
    pub fn save(&self, expected: Psn) -> Vec<Bytes> {
        let frame = |held: &HeldPacket| {
            let mut frame = vec![0; MOST_HEADERS + held.payload.len()];
            let len = roce::encode(&held.headers, &held.payload, &mut frame);
            // What was decoded can be encoded. A frame without bytes would be refused.
            frame.truncate(len.unwrap_or(0));
            Bytes(frame)
        };
        let is_due = |held: &&HeldPacket| !held.headers.bth.psn.is_before(expected);
        self.0.values().filter(is_due).map(frame).collect()
    }

    /// Takes packets over that were saved; `expected` and `quota` are as for [`Self::hold`]. The one that is expected may
    /// be among them, if it has come and was not done.
    pub fn load(frames: &[Bytes], expected: Psn, quota: &HoldQuota) -> Result<Self, Wrong> {
        let mut held = Self::default();
        for Bytes(frame) in frames {
            let packet = roce::decode(frame).map_err(|_| "a packet that is held is none")?;
            // The expected one may be held, which is next to the one in front of it.
            let is_expected = packet.headers.bth.psn == expected;
            let missing = if is_expected { expected.minus(1) } else { expected };
            let outcome = held.hold(missing, &packet.headers, packet.payload, quota);
            require(outcome == Hold::Held, "a packet is held that is not expected soon")?;
        }
        Ok(held)
    }

    /// Holds a packet, while the one of the PSN `expected` is missing.
    pub fn hold(
        &mut self,
        expected: Psn,
        headers: &Headers,
        payload: &[u8],
        quota: &HoldQuota,
    ) -> Hold {
        let psn = headers.bth.psn;
        if self.0.contains_key(&psn.get()) {
            return Hold::Duplicate;
        }
        let ahead = psn.distance_from(expected);
        let is_near = ahead > 0 && ahead.unsigned_abs() < SackEth::PACKETS;
        let share = quota.take(payload.len() as u64 + OVERHEAD).filter(|_| is_near);
        let Some(share) = share else { return Hold::NoRoom };
        let packet = HeldPacket { headers: *headers, payload: payload.into(), _share: share };
        self.0.insert(psn.get(), packet);
        Hold::Held
    }

    /// Returns whether no packet is held.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the packet of this PSN is held.
    pub fn has(&self, psn: Psn) -> bool {
        self.0.contains_key(&psn.get())
    }

    /// Takes the packet of this PSN.
    pub fn take(&mut self, psn: Psn) -> Option<HeldPacket> {
        self.0.remove(&psn.get())
    }

    /// Forgets the packets in front of this PSN.
    pub fn forget_before(&mut self, psn: Psn) {
        self.0.retain(|held, _| !Psn::new(*held).is_before(psn));
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns which packets from this PSN on are held.
    pub fn sack(&self, from: Psn) -> SackEth {
        let mut sack = SackEth::default();
        for held in self.0.keys() {
            if let Ok(distance) = u32::try_from(Psn::new(*held).distance_from(from)) {
                sack.set(distance);
            }
        }
        sack
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(psn: u32) -> Headers {
        let ip = roce::Ipv4 {
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            hop_limit: 64,
            source: [10, 0, 0, 1].into(),
            destination: [10, 0, 0, 2].into(),
        };
        let opcode = roce::Opcode::from_byte(4).unwrap();
        Headers {
            ethernet: roce::Ethernet { destination: [2; 6], source: [4; 6], vlan: None },
            ip: roce::Ip::V4(ip),
            source_port: 0xc000,
            bth: roce::Bth::new(opcode, roce::Qpn::new(1).unwrap(), Psn::new(psn)),
            extended: roce::ExtendedHeaders::default(),
        }
    }

    /// An image has all that a connection can hold, and the packet that is expected if it has come.
    #[test]
    fn all_that_is_held_is_taken_over() {
        let (mut held, quota) = (Held::default(), HoldQuota::default());
        for psn in 1..256 {
            assert_eq!(held.hold(Psn::new(0), &headers(psn), &[], &quota), Hold::Held);
        }
        for expected in [0, 1] {
            let saved = held.save(Psn::new(expected));
            let mut loaded = Held::load(&saved, Psn::new(expected), &HoldQuota::default()).unwrap();
            assert!((1..256).all(|psn| loaded.take(Psn::new(psn)).is_some()));
        }
    }

    #[test]
    fn packets_within_reach_are_held_once() {
        let (mut held, quota) = (Held::default(), HoldQuota::default());
        let expected = Psn::new(0xff_fff0);
        let mut hold =
            |ahead: u32| held.hold(expected, &headers(expected.plus(ahead).get()), &[7; 9], &quota);
        assert_eq!((hold(1), hold(1), hold(255)), (Hold::Held, Hold::Duplicate, Hold::Held));
        assert_eq!((hold(0), hold(256)), (Hold::NoRoom, Hold::NoRoom));
        let sack = held.sack(expected);
        assert!(sack.has(1) && sack.has(255) && sack.count() == 2);
        held.forget_before(expected.plus(2));
        assert!(held.take(expected.plus(1)).is_none());
        assert_eq!(*held.take(expected.plus(255)).unwrap().payload, [7; 9]);
        assert_eq!(quota.0.load(Ordering::Relaxed), 0, "the bytes are free again");
    }

    #[test]
    fn the_connections_of_a_guest_share_a_quota() {
        let quota = HoldQuota::default();
        let mut connections: Vec<Held> = (0..6).map(|_| Held::default()).collect();
        let mut count = 0;
        for held in &mut connections {
            for ahead in 1..256 {
                let result = held.hold(Psn::new(0), &headers(ahead), &[0; 4096], &quota);
                count += u64::from(result == Hold::Held);
            }
        }
        assert_eq!(count, MOST_BYTES / (4096 + OVERHEAD));
        drop(connections);
        assert_eq!(quota.0.load(Ordering::Relaxed), 0);
    }
}
