// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The image of a device: all of its state, to be taken up by another process, or on another host.
//!
//! The device finds the following again by itself, and neither the guest nor a peer notices. So it is not in the image:
//!
//! * the guest's memory, the places of its virtqueues and its interrupts, which the transport brings, and what of
//!   memory regions and rings was found in that memory
//! * the queues that have work: each queue is visited after loading
//! * where a peer in the same network is, who waits for a receive, and how long a requester pauses that waits for one
//!   ([`crate::qp::image`], [`crate::queue::srq`])
//! * a control command that is under way: it begins once more ([`crate::control::queue`])
//! * the rate of a flow, and its turn at the guest's limit ([`reliability::Flow`]); how long answers take
//!   ([`reliability::SendWindow`])
//! * what is in the configuration: the features that are offered, and what the guest may do

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use abi::{
    VIRTIO_RDMA_F_ATOMICS, VIRTIO_RDMA_F_ATOMICS_GLOBAL, VIRTIO_RDMA_F_CQ_RESIZE,
    VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_SRQ_RESIZE, VIRTIO_RDMA_F_UC,
    VIRTIO_RDMA_F_VIRTQUEUES,
};
use memory::GuestMemory;
use ring::{Layout, Signal, SplitQueue};
use serde::{Deserialize, Serialize};

use crate::base::address::{is_multicast, Address};
use crate::base::identity::DeviceId;
use crate::base::image::{LoadError, Moment};
use crate::base::limits::Limits;
use crate::base::queues::Queue;
use crate::base::slot::Slot;
use crate::base::sync::{lock, read, write};
use crate::control::objects::{InUse, Objects, ObjectsImage};
use crate::memory::page_list::pages_of;
use crate::qp::image::{Loader, QpImage};
use crate::queue::cq::CqImage;
use crate::queue::event::Event;
use crate::queue::inbox::FrameImage;
use crate::queue::srq::{Srq, SrqImage};
use crate::queue::users::User;
use crate::queue::virtqueue::VirtqueueImage;
use crate::schedule::guest::Guest;
use crate::transport::hca::Hca;

/// Events that may wait for each object: more than there are kinds.
const MOST_EVENTS: usize = 32;

/// The first version whose images name the features of [`features_of_the_base`].
const FEATURES_OF_THE_BASE: u32 = 4;

/// Returns the features that a driver had without a bit before there were bits for them, if it agreed on these others.
fn features_of_the_base(agreed: u64) -> u64 {
    let has = |feature: u32| agreed & 1 << feature != 0;
    let rings = has(VIRTIO_RDMA_F_RINGS);
    1 << VIRTIO_RDMA_F_UC
        | 1 << VIRTIO_RDMA_F_ATOMICS
        | 1 << VIRTIO_RDMA_F_ATOMICS_GLOBAL
        | u64::from(!rings) << VIRTIO_RDMA_F_VIRTQUEUES
        | u64::from(rings) << VIRTIO_RDMA_F_CQ_RESIZE
        | u64::from(rings && has(VIRTIO_RDMA_F_SRQ)) << VIRTIO_RDMA_F_SRQ_RESIZE
}

/// A virtqueue that the guest has set up, as the transport knows it: its index, the place of its ring, and its
/// interrupt.
pub type VirtqueueSetup = (u16, Layout, Arc<dyn Signal>);

/// The state of a device.
#[derive(Serialize, Deserialize)]
pub(crate) struct Image {
    id: DeviceId,
    /// The MAC address of the paired network interface.
    mac: Option<[u8; 6]>,
    /// The MAC address that the GUID of the device is made from.
    node: [u8; 6],
    limits: Limits,
    /// Whether the driver has started the device.
    pub is_started: bool,
    agreed: u64,
    needs_reset: bool,
    counters: Vec<(String, u64)>,
    gids: Vec<(u16, Address)>,
    withdrawn_gids: Vec<(u16, Address)>,
    virtqueues: Vec<(u16, VirtqueueImage)>,
    events: Vec<Event>,
    completion_events: Vec<Vec<Event>>,
    cqs: Vec<(u16, CqImage)>,
    srqs: Vec<(Slot, SrqImage)>,
    qps: Vec<(Slot, QpImage)>,
    objects: ObjectsImage,
    timers: Vec<(u16, Moment)>,
    inbox: Vec<FrameImage>,
}

impl Image {
    /// Returns the state of a guest's device, which no thread runs meanwhile.
    pub fn of(guest: &Guest, mac: Option<[u8; 6]>, is_started: bool) -> Self {
        let hca = &guest.hca;
        let now = hca.clock().now();
        let srq = |place: &Mutex<Option<Srq>>| lock(place).as_ref().map(Srq::save);
        let control = lock(&guest.control);
        let objects = control.objects.save(&read(&hca.keys));
        drop(control);
        Self {
            id: hca.identity.id(),
            mac,
            node: hca.identity.mac(),
            limits: hca.limits.clone(),
            is_started,
            agreed: hca.features.agreed(),
            needs_reset: hca.needs_reset(),
            counters: hca.stats.save(),
            gids: hca.gids(),
            withdrawn_gids: hca.withdrawn_gids(),
            virtqueues: save_virtqueues(guest),
            events: lock(&hca.events).save(),
            completion_events: hca.completion_events.iter().map(|all| lock(all).save()).collect(),
            cqs: hca
                .cqs
                .iter()
                .filter_map(|(cq, place)| Some((cq, lock(place).save(now)?)))
                .collect(),
            srqs: hca.srqs.iter().filter_map(|(slot, place)| Some((slot, srq(place)?))).collect(),
            qps: hca.qps.iter().filter_map(|(slot, qp)| Some((slot, qp.save(now)?))).collect(),
            objects,
            timers: lock(&hca.timers).save(now),
            inbox: lock(&hca.inbox).save(),
        }
    }

    /// Adds the features that an image of an earlier version does not name, because each device had them.
    pub fn renew(&mut self, version: u32) {
        if version < FEATURES_OF_THE_BASE {
            self.agreed |= features_of_the_base(self.agreed);
        }
    }

    /// Checks that it is the state of a device with this MAC address and these features, which is made with the same
    /// limits, and that no other device has it.
    pub fn check(
        &self,
        hca: &Arc<Hca>,
        mac: Option<[u8; 6]>,
        features: u64,
    ) -> Result<(), LoadError> {
        if self.mac != mac || mac.is_some_and(|mac| mac != self.node) {
            return Err(LoadError::Mac);
        }
        let missing = self.agreed & !features;
        if missing != 0 {
            return Err(LoadError::Features { missing });
        }
        hca.limits.check(&self.limits)?;
        let own = Arc::as_ptr(hca);
        let has_id = |other: &Hca| !std::ptr::eq(other, own) && other.identity.id() == self.id;
        if hca.fabric.any(has_id) {
            return Err(LoadError::Twin);
        }
        let may_keep = |address: &Address| is_host(address) && hca.fabric.may_keep(address, hca);
        match self.gids.iter().find(|(_, address)| !may_keep(address)) {
            Some((_, address)) => Err(LoadError::Address(*address)),
            None => Ok(()),
        }
    }

    /// Gives a device the state, of which it has nothing yet. If that fails, a part is left.
    pub fn load(
        self,
        guest: &Guest,
        memory: &GuestMemory,
        queues: impl IntoIterator<Item = VirtqueueSetup>,
    ) -> Result<(), LoadError> {
        let hca = &guest.hca;
        hca.features.agree(self.agreed);
        guest.give_memory(&mut lock(&guest.control), memory);
        load_virtqueues(guest, &self.virtqueues, memory, queues)?;
        load_events(hca, self.events, self.completion_events)?;
        let used = InUse {
            cqs: self.cqs.iter().map(|(cq, _)| *cq).collect(),
            qps: self.qps.iter().map(|(slot, _)| *slot).collect(),
            srqs: self.srqs.iter().map(|(slot, _)| *slot).collect(),
        };
        let used = if hca.features.has_rings() { used } else { InUse::default() };
        let objects = &mut lock(&guest.control).objects;
        objects.load(self.objects, &mut write(&hca.keys), &hca.limits, used)?;
        for (cq, image) in self.cqs {
            load_cq(hca, objects, memory, cq, image)?;
        }
        for (slot, image) in self.srqs {
            load_srq(hca, objects, memory, slot, image)?;
        }
        for (slot, image) in self.qps {
            load_qp(hca, objects, memory, slot, image)?;
        }
        let now = hca.clock().now();
        for (job, time) in self.timers {
            hca.jobs.queue(job).ok_or_else(|| LoadError::of("queue", job)("it does not exist"))?;
            lock(&hca.timers).set(job, Some(time.time(now)));
        }
        lock(&hca.inbox).load(&self.inbox).map_err(LoadError::of("inbox", 0_u16))?;
        for (index, address) in self.gids {
            if hca.gid(index.into()).is_some() || hca.restore_gid(index.into(), address).is_err() {
                return Err(LoadError::Address(address));
            }
        }
        for (index, address) in self.withdrawn_gids {
            let is_free = hca.gid(index.into()).is_none() && is_host(&address);
            if !is_free || hca.withdraw_gid(index.into(), address).is_err() {
                return Err(LoadError::Address(address));
            }
        }
        join_groups(hca);
        hca.identity.set(self.id, self.node);
        hca.stats.load(&self.counters);
        if self.needs_reset {
            hca.set_needs_reset();
        }
        Ok(())
    }
}

/// Returns whether an address is that of a host.
fn is_host(address: &Address) -> bool {
    address.gid != [0; 16]
        && !is_multicast(&address.gid)
        && address.vlan.is_none_or(|vlan| vlan < 1 << 12)
}

/// Makes all queues of a guest ready, so that no work is missed that has come meanwhile.
pub(crate) fn visit_all(guest: &Guest) {
    let hca = &guest.hca;
    let numbering = guest.numbering();
    let virtqueues = (0..numbering.count()).filter_map(|index| numbering.queue(index));
    let cqs = hca.cqs.iter().map(|(cq, _)| Queue::Completion(cq));
    let qps = hca.qps.iter().flat_map(|(slot, _)| [Queue::Send(slot), Queue::Receive(slot)]);
    let srqs = hca.srqs.iter().map(|(slot, _)| Queue::Srq(slot));
    for queue in virtqueues.chain(cqs).chain(qps).chain(srqs).chain([Queue::Wire]) {
        hca.make_ready(hca.jobs.number(queue));
    }
}

/// Joins the multicast groups of a guest's QPs.
fn join_groups(hca: &Arc<Hca>) {
    for (slot, qp) in hca.qps.iter() {
        for gid in &lock(&qp.responder).groups {
            hca.fabric.join(*gid, hca, slot);
        }
    }
}

fn save_virtqueues(guest: &Guest) -> Vec<(u16, VirtqueueImage)> {
    let numbering = guest.numbering();
    let save = |index| {
        let image = match numbering.queue(index)? {
            Queue::Control => lock(&guest.control).save_queue(),
            queue => guest.with_virtqueue(queue, |place| place.save())?,
        };
        Some((index, image?))
    };
    (0..numbering.count()).filter_map(save).collect()
}

/// Loads the images of virtqueues. Other virtqueues that the transport brings were not in use.
fn load_virtqueues(
    guest: &Guest,
    images: &[(u16, VirtqueueImage)],
    memory: &GuestMemory,
    queues: impl IntoIterator<Item = VirtqueueSetup>,
) -> Result<(), LoadError> {
    let queues = queues.into_iter().map(|(index, layout, signal)| (index, (layout, signal)));
    let mut queues: HashMap<_, _> = queues.collect();
    for (index, image) in images {
        let index = *index;
        let (layout, signal) = queues.remove(&index).ok_or(LoadError::NoQueue { index })?;
        let ring = SplitQueue::at(memory, layout, image.position())
            .map_err(|error| LoadError::Queue { index, error })?;
        let place = guest.numbering().queue(index);
        place
            .and_then(|queue| guest.with_virtqueue(queue, |place| place.load(image, ring, signal)))
            .ok_or_else(|| LoadError::of("virtqueue", index)("it does not exist"))?;
    }
    Ok(())
}

fn load_events(
    hca: &Hca,
    events: Vec<Event>,
    completion_events: Vec<Vec<Event>>,
) -> Result<(), LoadError> {
    let objects = 1 + usize::from(hca.cqs.len()) + usize::from(hca.qps.len());
    let most = MOST_EVENTS * (objects + usize::from(hca.srqs.len()));
    lock(&hca.events).load(events, most).map_err(LoadError::of("event queue", 0_u16))?;
    for (vector, events) in (0_u16..).zip(completion_events) {
        let wrong = LoadError::of("completion event queue", vector);
        let queue = hca.completion_events.get(usize::from(vector));
        let queue = queue.ok_or_else(|| wrong("it does not exist"))?;
        lock(queue).load(events, most).map_err(wrong)?;
    }
    Ok(())
}

fn load_cq(
    hca: &Hca,
    objects: &mut Objects,
    memory: &GuestMemory,
    cq: u16,
    image: CqImage,
) -> Result<(), LoadError> {
    let wrong = LoadError::of("CQ", cq);
    let (room, now) = (objects.room(&hca.limits), hca.clock().now());
    if cq >= hca.cqs.len() || image.is_ring() != hca.features.has_rings() {
        return Err(wrong("it does not exist"));
    }
    let mut place = lock(hca.cqs.take(cq));
    place.load(image, memory, &hca.limits, room, now).map_err(wrong)?;
    objects.cqs += u32::from(place.is_live());
    objects.extents += place.ring().map_or(0, |ring| ring.pages_len());
    Ok(())
}

fn load_srq(
    hca: &Hca,
    objects: &mut Objects,
    memory: &GuestMemory,
    slot: Slot,
    image: SrqImage,
) -> Result<(), LoadError> {
    let wrong = LoadError::of("SRQ", slot.number());
    if u16::from(slot) >= hca.srqs.len() || !hca.features.has_srqs() {
        return Err(wrong("it does not exist"));
    }
    let room = objects.room(&hca.limits);
    let srq = image.load(memory, &hca.limits, room, hca.qps.len()).map_err(&wrong)?;
    objects.srqs += 1;
    objects.extents += pages_of(srq.region());
    objects.enter_pd(srq.config().pdn).map_err(&wrong)?;
    if let Some(xrc) = srq.config().xrc {
        objects.enter_xrcd(xrc.xrcdn).map_err(&wrong)?;
        use_cq(hca, xrc.cq, User::Srq(slot)).map_err(&wrong)?;
    }
    match lock(hca.srqs.take(slot)).replace(srq) {
        None => Ok(()),
        Some(_) => Err(wrong("there are two of them")),
    }
}

fn load_qp(
    hca: &Hca,
    objects: &mut Objects,
    memory: &GuestMemory,
    slot: Slot,
    image: QpImage,
) -> Result<(), LoadError> {
    let wrong = LoadError::of("QP", slot.number());
    if u16::from(slot) >= hca.qps.len() {
        return Err(wrong("it does not exist"));
    }
    let with = Loader {
        memory,
        limits: &hca.limits,
        room: objects.room(&hca.limits),
        has_rings: hca.features.has_rings(),
        quota: &hca.hold_quota,
        now: hca.clock().now(),
    };
    let qp = hca.qps.take(slot);
    qp.load(image, &with).map_err(&wrong)?;
    let requester = lock(&qp.requester);
    let responder = lock(&qp.responder);
    objects.extents += pages_of(&requester.region);
    let (Some(config), Some(current)) = (requester.config, responder.config) else {
        return Err(wrong("it has no configuration"));
    };
    for cq in config.own_cqs() {
        use_cq(hca, cq, User::Qp(slot)).map_err(&wrong)?;
    }
    objects.qps += 1;
    match config.own_pdn() {
        Some(pdn) => objects.enter_pd(pdn).map_err(&wrong)?,
        None => objects.enter_xrcd(config.xrcdn).map_err(&wrong)?,
    }
    for srq in config.srq.into_iter().chain(current.srq) {
        let is_user = config.srq == Some(srq);
        let found = hca.with_srq(srq, |srq| {
            if is_user {
                srq.users.insert(User::Qp(slot));
            }
        });
        found.ok_or_else(|| wrong("its SRQ does not exist"))?;
    }
    for (at, gid) in responder.groups.iter().enumerate() {
        let is_new = is_multicast(gid) && !responder.groups[..at].contains(gid);
        if !is_new || !objects.attachments.has_room(gid, &hca.limits) {
            return Err(wrong("it may not be in one of its groups"));
        }
        objects.attachments.add(*gid);
    }
    Ok(())
}

/// Notes that a QP or an SRQ completes to a CQ.
fn use_cq(hca: &Hca, cq: u16, user: User) -> Result<(), &'static str> {
    let mut cq = lock(hca.cqs.get(cq).ok_or("its CQ does not exist")?);
    if !cq.is_live() {
        return Err("its CQ does not exist");
    }
    cq.users.insert(user);
    Ok(())
}
