// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two guests in one network, and images of their devices. One guest has a connection to the other and one to a peer
//! over the wire, and something under way on both. The fuzzer changes the image of its device, or makes one up; the
//! checksum is right. Both images are loaded into a new network.
//!
//! Whatever the image is, the following must hold:
//! - It is refused, and the device has nothing then, or the device comes to rest when it gets no more work.
//! - The state of a device that was loaded can be saved, and loaded once more.

#![no_main]

use std::sync::Arc;
use std::time::Duration;

// The header's names are unmistakable, and there are many.
#[allow(clippy::wildcard_imports)]
use abi::*;
use engine::{Device, Fabric, FabricConfig, Gid, Uplink};
use fuzz::{
    config, connect_qp, create_cq, create_pd, create_qp, reg_mr, Clock, Guest, Program, WINDOW,
};
use libfuzzer_sys::fuzz_target;
use roce::Segments;
use testkit::{sge, Send, ALL};

/// The address of the peer over the wire.
const REMOTE: Gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 9];
/// The bytes of the header of an image, and those of them that its checksum is of.
const HEADER: usize = 24;
const CHECKED: usize = 20;
/// The virtqueue of the first send queue; receive queues are behind send queues.
const SEND_QUEUE: u16 = 4;
/// How often time passes for devices that were loaded.
const TIMES: usize = 20;

/// A way out of a host on which everything is lost.
struct Nowhere;

impl Uplink for Nowhere {
    fn send(&self, _: Segments<'_>) -> usize {
        1
    }
}

fn network(clock: &Arc<Clock>) -> Arc<Fabric> {
    let config = FabricConfig {
        clock: Arc::clone(clock) as _,
        uplink: Some(Arc::new(Nowhere)),
        random: || 0,
        ..FabricConfig::default()
    };
    Fabric::new(config)
}

/// Posts a send work request.
fn send(guest: &mut Guest, qpn: u32, key: u32, program: &mut Program<'_>) {
    let opcodes = [
        VIRTIO_RDMA_WR_SEND,
        VIRTIO_RDMA_WR_RDMA_WRITE,
        VIRTIO_RDMA_WR_RDMA_READ,
        VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM,
    ];
    let (opcode, length) = (program.pick(&opcodes), program.pick(&[0, 8, 1000, 0x4000]));
    let send = Send::new(1, opcode, &[sge(WINDOW.start, length, key)]);
    let send = send.rdma(WINDOW.start + 0x4000, key);
    if guest.rings {
        guest.post_entry(qpn, 0, &send.entry());
    } else {
        guest.post(SEND_QUEUE + 2 * (qpn as u16 - 1), &send.bytes());
    }
}

/// Posts a receive work request.
fn receive(guest: &mut Guest, qpn: u32, key: u32) {
    let bytes = testkit::receive(0, &[sge(WINDOW.start, 0x2000, key)]);
    if guest.rings {
        guest.post_entry(qpn, 1, &bytes);
    } else {
        guest.post(SEND_QUEUE + 2 * (qpn as u16 - 1) + 1, &bytes);
    }
}

/// Changes an image, or makes one up, as a program says.
fn change(image: &mut Vec<u8>, program: &mut Program<'_>) {
    if program.u8() == 255 {
        image.truncate(HEADER);
        image.extend_from_slice(program.bytes(usize::MAX));
    }
    while let Some(operation) = program.operation() {
        let len = image.len() - HEADER;
        let at = HEADER + usize::from(program.u16()) % len.max(1);
        let Some(byte) = image.get_mut(at) else { break };
        match operation % 6 {
            0 => *byte = program.u8(),
            1 => *byte ^= 1 << (program.u8() % 8),
            2 => *byte = byte.wrapping_add(1),
            3 => *byte = byte.wrapping_sub(1),
            4 => image.insert(at, program.u8()),
            _ => drop(image.remove(at)),
        }
    }
    let len = (image.len() - HEADER) as u64;
    image[CHECKED - 8..CHECKED].copy_from_slice(&len.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&image[..CHECKED]);
    crc.update(&image[HEADER..]);
    image[CHECKED..HEADER].copy_from_slice(&crc.finalize().to_le_bytes());
}

/// Checks that a device that was refused an image has nothing.
fn check_is_fresh(device: &Device) {
    let status = device.status();
    assert!(!status.started && status.gids.is_empty() && status.qps.is_empty());
    assert_eq!((status.cqs, status.mrs, status.mws, status.pds), (0, 0, 0, 0));
    assert!(status.srqs.is_empty());
}

fuzz_target!(|bytes: &[u8]| {
    let mut program = Program::new(bytes);
    let rings = program.flag();
    let clock = Arc::new(Clock::default());
    let before = network(&clock);
    let mut guests = [Guest::new(&before, 1, rings), Guest::new(&before, 2, rings)];
    let ends = guests.each_mut().map(|guest| {
        let (pdn, cqn) = (create_pd(guest), create_cq(guest, 0));
        let key = reg_mr(guest, pdn, WINDOW, ALL);
        let qps = [1, 2].map(|page| create_qp(guest, pdn, cqn, VIRTIO_RDMA_QPT_RC, page));
        guest.add_event_buffers();
        (qps, key)
    });
    let gids = [guests[1].gid, guests[0].gid];
    for (number, guest) in guests.iter().enumerate() {
        let qps = ends[number].0;
        connect_qp(guest, VIRTIO_RDMA_QPT_RC, qps[0], gids[number], qps[0]);
        connect_qp(guest, VIRTIO_RDMA_QPT_RC, qps[1], REMOTE, 7);
    }
    for _ in 0..program.u8() % 8 {
        let who = program.below(2);
        let (qps, key) = ends[who];
        match program.u8() % 4 {
            0 => receive(&mut guests[who], qps[0], key),
            1 => send(&mut guests[who], qps[0], key, &mut program),
            2 => send(&mut guests[who], qps[1], key, &mut program),
            _ => {
                guests[who].device.run(1 + u32::from(program.u8() % 8));
            }
        }
    }
    let mut images = guests.each_ref().map(|guest| guest.device.save());
    change(&mut images[0], &mut program);

    let after = network(&clock);
    let loaded = [0, 1].map(|number| {
        let device = after.add_device(config(number as u8 + 1));
        let loaded = guests[number].load_image(&device, &images[number]);
        if loaded.is_err() {
            check_is_fresh(&device);
        }
        loaded.ok().map(|()| device)
    });
    for (number, device) in loaded.iter().enumerate() {
        let Some(device) = device else { continue };
        let again = network(&clock).add_device(config(number as u8 + 1));
        let result = guests[number].load_image(&again, &device.save());
        assert!(result.is_ok(), "it cannot be loaded once more: {result:?}");
    }
    for (guest, device) in guests.iter_mut().zip(loaded) {
        match device {
            Some(device) => guest.device = device,
            None => guest.device.reset(),
        }
    }
    for _ in 0..TIMES {
        for guest in &guests {
            guest.settle();
        }
        clock.advance(Duration::from_millis(10));
    }
    for guest in &guests {
        guest.device.reset();
    }
});
