// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The stream of frames between the switch and a guest's network interface, whose guest chooses what it
//! sends, in which parts, and how slowly it reads.
//!
//! What must hold:
//! - The frames are found wherever the parts end, and the first length that is that of no frame ends the
//!   stream: a reader that has the whole stream finds the same.
//! - Nothing but a packet of RoCE v2 goes to a device.
//! - The guest gets the frames that found room, whole and in order, however it reads.

#![no_main]

use std::collections::VecDeque;
use std::sync::Arc;

use engine::{Fabric, FabricConfig};
use fuzz::{Guest, Program};
use libfuzzer_sys::fuzz_target;
use network::forwarding::stream::{self, BadLength, Reader, Rest};

/// Most bytes that wait for the guest.
const MOST_PENDING: usize = 600;
/// Bits of an operation: plain bytes; a frame that can be long; a packet of RoCE v2 to the guest.
const PLAIN: u8 = 1 << 7;
const LONG: u8 = 1 << 6;
const ROCE: u8 = 1 << 5;

/// Returns a frame that is right but for what the program changes.
fn frame(operation: u8, program: &mut Program<'_>) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 0x52, 0x54, 0, 0, 0, program.u8()];
    if operation & ROCE == 0 {
        frame.extend([0x88, 0xb5]);
    } else {
        frame.extend([0x08, 0x00, 0x45, 0, 0, 48, 0, 0, 0x40, 0, 64, 17, 0, 0]);
        frame.extend([10, 0, 0, 9, 10, 0, 0, 1, 0xc0, 0, 0x12, 0xb7, 0, 28, 0, 0]);
    }
    frame.extend(program.bytes(20));
    if operation & LONG != 0 {
        frame.resize(frame.len() + usize::from(program.u16()), 7);
    }
    program.patch(&mut frame);
    frame
}

/// Returns the stream that the guest sends.
fn stream_of(program: &mut Program<'_>) -> Vec<u8> {
    let mut stream = Vec::new();
    for _ in 0..program.below(8) {
        let operation = program.u8();
        if operation & PLAIN != 0 {
            stream.extend(program.bytes(usize::from(operation & !PLAIN)));
            continue;
        }
        let frame = frame(operation, program);
        let mut length = stream::length(&frame).expect("a short frame");
        program.patch(&mut length);
        stream.extend(length);
        stream.extend(frame);
    }
    stream
}

/// Finds the frames in a whole stream, and the length that ends it.
fn frames_of(mut stream: &[u8]) -> (VecDeque<&[u8]>, Option<BadLength>) {
    let mut frames = VecDeque::new();
    while let Some((length, rest)) = stream.split_first_chunk() {
        let length = u32::from_be_bytes(*length) as usize;
        if !(14..=0xffff).contains(&length) {
            return (frames, Some(BadLength(length)));
        }
        let Some((frame, rest)) = rest.split_at_checked(length) else { break };
        frames.push_back(frame);
        stream = rest;
    }
    (frames, None)
}

/// Reads a stream that comes in the parts that the program chooses.
fn read(mut stream: &[u8], fabric: &Arc<Fabric>, program: &mut Program<'_>) {
    let (mut frames, bad) = frames_of(stream);
    let mut reader = Reader::default();
    while !stream.is_empty() {
        let room = reader.room();
        assert!(!room.is_empty());
        let wanted = program.operation().map_or(usize::MAX, |part| usize::from(part) << (part & 7));
        let (part, rest) = stream.split_at(wanted.max(1).min(stream.len()).min(room.len()));
        room[..part.len()].copy_from_slice(part);
        reader.add(part.len());
        stream = rest;
        loop {
            match reader.take() {
                Ok(None) => break,
                Ok(Some(range)) => {
                    let frame = reader.frame(range);
                    assert_eq!(Some(&*frame), frames.pop_front());
                    forward(frame, fabric);
                }
                Err(error) => {
                    assert!(frames.is_empty());
                    return assert_eq!(Some(error), bad);
                }
            }
        }
    }
    assert!(frames.is_empty() && bad.is_none());
}

/// Asks what the switch asks of a frame.
fn forward(frame: &[u8], fabric: &Arc<Fabric>) {
    let (destination, _) = network::forwarding::addresses(frame).expect("a whole Ethernet header");
    let is_taken = fabric.receive(frame, 0);
    let is_for_device = is_taken || fabric.has_destination(frame);
    if is_for_device && !network::forwarding::is_group(destination) {
        assert!(roce::destination(frame).is_some());
    }
}

/// Sends frames to a guest that reads as the program says, and then everything.
fn write(program: &mut Program<'_>) {
    let (mut rest, mut sent, mut came) = (Rest::default(), Vec::new(), Vec::<u8>::new());
    while let Some(operation) = program.operation() {
        let mut takes = program.u8();
        if operation & PLAIN != 0 {
            rest.flush(|bytes| {
                let count = bytes.len().min(takes.into());
                takes /= 2;
                came.extend(&bytes[..count]);
                (count > 0).then_some(count)
            });
            continue;
        }
        let frame = frame(operation & !LONG, program);
        if !rest.has_room(frame.len(), MOST_PENDING) {
            continue;
        }
        let length = stream::length(&frame).expect("a short frame");
        let framed = [&length[..], &frame].concat();
        let taken = if rest.is_empty() { framed.len().min(takes.into()) } else { 0 };
        came.extend(&framed[..taken]);
        rest.add(length, &frame, taken);
        sent.extend(framed);
    }
    rest.flush(|bytes| {
        came.extend(bytes);
        Some(bytes.len())
    });
    assert!(rest.is_empty() && came == sent);
}

fuzz_target!(|bytes: &[u8]| {
    let mut program = Program::new(bytes);
    if program.flag() {
        return write(&mut program);
    }
    let stream = stream_of(&mut program);
    let fabric = Fabric::new(FabricConfig::default());
    let _guest = Guest::new(&fabric, 1, false);
    read(&stream, &fabric, &mut program);
});
