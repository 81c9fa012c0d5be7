// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The packets that a responder holds because packets in front of them are missing. Held packets are done in the order
//! of their PSNs when the missing ones have arrived, so no effect of a held packet is visible before.
//!
//! A peer decides how many packets are held. So each connection has a bound, the packets that a selective
//! acknowledgement has a bit for, and each guest has a bound in bytes. A peer, which is an address, leaves as many
//! bytes to others as all of its connections take, so that no peer takes all. A peer that never sends a missing packet
//! does not keep its share for ever: after [`MOST_TIME`] the packets that are held for it are dropped.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use roce::{Gid, Headers, Psn, SackEth};

use crate::saved::Wrong;
use crate::sync::lock;

/// The most bytes that all connections of a guest hold.
const MOST_BYTES: u64 = 4 << 20;

/// The longest time for which packets are held while the same packet is missing. A peer sends the missing packet again
/// after a few round trips, or after a time-out, which is mostly shorter.
const MOST_TIME: Duration = Duration::from_secs(1);

/// The bytes that a held packet takes besides its payload, about.
const OVERHEAD: u64 = size_of::<HeldPacket>() as u64 + 64;

/// The most bytes of a frame besides the payload.
const MOST_HEADERS: usize = 256;

/// The bytes that the connections of a guest hold.
#[derive(Clone, Default)]
pub struct HoldQuota(Arc<Mutex<Holdings>>);

#[derive(Default)]
struct Holdings {
    all: u64,
    /// The bytes of each peer that has some.
    by_peer: HashMap<Gid, u64>,
}

impl HoldQuota {
    /// Takes `bytes` bytes for a peer, which are free again when the share is dropped. Returns `None` if fewer are
    /// left, or if the peer `shares` them with others and would have more bytes than it leaves to others.
    fn take(&self, peer: Gid, bytes: u64, shares: bool) -> Option<Share> {
        let mut holdings = lock(&self.0);
        let of_peer = holdings.by_peer.get(&peer).copied().unwrap_or(0) + bytes;
        let (all, left) = (holdings.all + bytes, if shares { of_peer } else { 0 });
        if all + left > MOST_BYTES {
            return None;
        }
        holdings.all = all;
        holdings.by_peer.insert(peer, of_peer);
        Some(Share { quota: self.clone(), peer, bytes })
    }
}

/// Bytes of a quota.
struct Share {
    quota: HoldQuota,
    peer: Gid,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut holdings = lock(&self.quota.0);
        holdings.all -= self.bytes;
        if let Some(of_peer) = holdings.by_peer.get_mut(&self.peer) {
            *of_peer -= self.bytes;
            if *of_peer == 0 {
                holdings.by_peer.remove(&self.peer);
            }
        }
    }
}

/// A packet that is held.
pub struct HeldPacket {
    /// The headers of the packet.
    pub headers: Headers,
    /// The payload of the packet.
    pub payload: Box<[u8]>,
    /// The bytes of the packet, which are free again when the packet is dropped.
    _share: Share,
}

/// The outcome of [`Held::hold`].
#[derive(Debug, PartialEq, Eq)]
pub enum Hold {
    /// The packet is held.
    Held,
    /// The packet was held before.
    Duplicate,
    /// The packet is too far ahead, or the guest holds too many bytes.
    NoRoom,
}

/// The packets that a connection holds.
#[derive(Default)]
pub struct Held {
    packets: BTreeMap<u32, HeldPacket>,
    /// The PSN of the missing packet, and the time since when the packet is missing.
    missing: Option<(Psn, Instant)>,
}

impl Held {
    /// Returns the saved state: the packets from the PSN `expected` on, as frames.
    pub fn save(&self, expected: Psn) -> Vec<Vec<u8>> {
        let frame = |held: &HeldPacket| {
            let mut frame = vec![0; MOST_HEADERS + held.payload.len()];
            let len = roce::encode(&held.headers, &held.payload, &mut frame);
            // Headers that were decoded can be encoded. A frame without bytes would be refused.
            frame.truncate(len.unwrap_or(0));
            frame
        };
        let is_due = |held: &&HeldPacket| !held.headers.bth.psn.is_before(expected);
        self.packets.values().filter(is_due).map(frame).collect()
    }

    /// Returns the packets of a saved state; `expected` and `quota` are as for [`Self::hold`]. The expected packet may
    /// be among them, if it has arrived and was not done.
    ///
    /// # Errors
    /// A frame is no packet, a packet cannot be held, or the quota is too small.
    pub fn load<'a>(
        frames: impl IntoIterator<Item = &'a [u8]>,
        expected: Psn,
        quota: &HoldQuota,
    ) -> Result<Self, Wrong> {
        let mut held = Self::default();
        for frame in frames {
            let packet = roce::decode(frame).map_err(|_| "a packet that is held is none")?;
            let psn = packet.headers.bth.psn;
            let is_due = psn == expected || is_near(expected, psn);
            // All packets had room when they were held, in whatever order they are loaded.
            let peer = packet.headers.ip.source_gid();
            let share = quota.take(peer, packet.payload.len() as u64 + OVERHEAD, false);
            let share = share.filter(|_| is_due && !held.has(psn));
            let share = share.ok_or("a packet is held that is not expected soon")?;
            held.insert(&packet.headers, packet.payload, share);
        }
        Ok(held)
    }

    /// Holds a packet, while the packet with the PSN `expected` is missing.
    pub fn hold(
        &mut self,
        expected: Psn,
        headers: &Headers,
        payload: &[u8],
        quota: &HoldQuota,
    ) -> Hold {
        let (psn, bytes) = (headers.bth.psn, payload.len() as u64 + OVERHEAD);
        if self.has(psn) {
            return Hold::Duplicate;
        }
        let peer = headers.ip.source_gid();
        let share = is_near(expected, psn).then(|| quota.take(peer, bytes, true));
        let Some(share) = share.flatten() else { return Hold::NoRoom };
        self.insert(headers, payload, share);
        Hold::Held
    }

    fn insert(&mut self, headers: &Headers, payload: &[u8], share: Share) {
        let packet = HeldPacket { headers: *headers, payload: payload.into(), _share: share };
        self.packets.insert(headers.bth.psn.get(), packet);
    }

    /// Returns until when packets are held unless the missing packet arrives, whose PSN is `expected`; `None` if no
    /// packet is held.
    pub fn until(&mut self, expected: Psn, now: Instant) -> Option<Instant> {
        let missing = self.missing.filter(|(psn, _)| *psn == expected).unwrap_or((expected, now));
        self.missing = (!self.is_empty()).then_some(missing);
        self.missing.map(|(_, since)| since + MOST_TIME)
    }

    /// Returns the number of packets that are held.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Returns whether no packet is held.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Returns whether the packet with this PSN is held.
    pub fn has(&self, psn: Psn) -> bool {
        self.packets.contains_key(&psn.get())
    }

    /// Takes the packet with this PSN.
    pub fn take(&mut self, psn: Psn) -> Option<HeldPacket> {
        self.packets.remove(&psn.get())
    }

    /// Forgets the packets in front of this PSN.
    pub fn forget_before(&mut self, psn: Psn) {
        self.packets.retain(|held, _| !Psn::new(*held).is_before(psn));
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns which packets from this PSN on are held.
    pub fn sack(&self, from: Psn) -> SackEth {
        let mut sack = SackEth::default();
        for held in self.packets.keys() {
            if let Ok(distance) = u32::try_from(Psn::new(*held).distance_from(from)) {
                sack.set(distance);
            }
        }
        sack
    }
}

/// Returns whether a packet may be held while the packet with the PSN `expected` is missing: a selective
/// acknowledgement has a bit for it.
fn is_near(expected: Psn, psn: Psn) -> bool {
    let ahead = psn.distance_from(expected);
    ahead > 0 && ahead.unsigned_abs() < SackEth::PACKETS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(saved: &[Vec<u8>]) -> impl Iterator<Item = &[u8]> {
        saved.iter().map(Vec::as_slice)
    }

    fn headers(psn: u32) -> Headers {
        headers_of(1, psn)
    }

    fn headers_of(peer: u8, psn: u32) -> Headers {
        let ip = roce::Ipv4 {
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            hop_limit: 64,
            source: [10, 0, 0, peer].into(),
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
            let mut loaded =
                Held::load(frames(&saved), Psn::new(expected), &HoldQuota::default()).unwrap();
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
        assert_eq!(in_use(&quota), (0, 0), "the bytes are free again");
    }

    /// Returns the bytes that are held, and by how many peers.
    fn in_use(quota: &HoldQuota) -> (u64, usize) {
        let holdings = lock(&quota.0);
        assert_eq!(holdings.by_peer.values().sum::<u64>(), holdings.all);
        (holdings.all, holdings.by_peer.len())
    }

    #[test]
    fn each_peer_leaves_as_much_as_it_takes() {
        let quota = HoldQuota::default();
        let fill = |held: &mut Held, peer: u8| {
            let mut hold =
                |ahead| held.hold(Psn::new(0), &headers_of(peer, ahead), &[0; 4096], &quota);
            (1..256).filter(|ahead| hold(*ahead) == Hold::Held).count()
        };
        let peers = [1, 1, 1, 2, 3, 3, 4];
        let mut connections: Vec<Held> = peers.iter().map(|_| Held::default()).collect();
        let counts: Vec<_> =
            connections.iter_mut().zip(peers).map(|(held, peer)| fill(held, peer)).collect();
        let most = (MOST_BYTES / (4096 + OVERHEAD)) as usize;
        // The bound of a connection, and then half of what other peers have left.
        assert_eq!(counts[..3], [255, most / 2 - 255, 0]);
        let mut left = most - most / 2;
        for of_peer in [counts[3], counts[4] + counts[5], counts[6]] {
            assert!((left / 2 - 1..=left.div_ceil(2)).contains(&of_peer), "{counts:?}");
            left -= of_peer;
        }
        // All of it is there again, and is taken over as it was by whom it was.
        let taken = in_use(&quota);
        assert_eq!(taken.1, 4);
        let saved: Vec<_> = connections.iter().map(|held| held.save(Psn::new(0))).collect();
        drop(connections);
        assert_eq!(in_use(&quota), (0, 0));
        let load = |saved| Held::load(frames(saved), Psn::new(0), &quota).unwrap();
        let loaded: Vec<_> = saved.iter().rev().map(|saved| load(saved)).collect();
        assert_eq!(in_use(&quota), taken);
        assert!(loaded.iter().rev().map(Held::len).eq(counts));
    }

    #[test]
    fn what_is_missing_has_a_time() {
        let (mut held, quota) = (Held::default(), HoldQuota::default());
        let (now, expected) = (Instant::now(), Psn::new(5));
        assert_eq!(held.until(expected, now), None);
        held.hold(expected, &headers(7), &[], &quota);
        let later = now + MOST_TIME / 2;
        assert_eq!(held.until(expected, now), Some(now + MOST_TIME));
        assert_eq!(held.until(expected, later), Some(now + MOST_TIME));
        assert_eq!(held.until(expected.plus(1), later), Some(later + MOST_TIME), "it has come");
        held.clear();
        assert_eq!(held.until(expected, later), None);
    }
}
