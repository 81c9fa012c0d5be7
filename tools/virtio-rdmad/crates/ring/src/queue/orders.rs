// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests what the device and a driver see of each other on any kind of processor: `make loom`.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::Arc;

use litmus::{check, fence, thread, Memory};

use super::*;

const USED_FLAGS: usize = FLAGS;
const AVAIL_FLAGS: usize = FLAGS;
/// The offset of the word that follows the only entry of each ring.
const USED_EVENT: usize = ENTRIES + AVAIL_ENTRY;
const AVAIL_EVENT: usize = ENTRIES + USED_ENTRY;

/// Makes a queue of one entry. Returns it with its available ring and its used ring.
fn queue(event_idx: bool) -> (SplitQueue, Arc<Memory>, Arc<Memory>) {
    let memory = GuestMemory::anonymous(&[(0, 0x1000)]).unwrap();
    let layout = Layout { size: 1, desc: 0, avail: 0x100, used: 0x200, event_idx };
    let avail = Arc::new(Memory::new([AVAIL_FLAGS, IDX, ENTRIES, USED_EVENT], []));
    let used = Arc::new(Memory::new([USED_FLAGS, IDX, ENTRIES, ENTRIES + 4, AVAIL_EVENT], []));
    let mut parts = Parts::resolve(&memory, &layout).unwrap();
    parts.avail = parts.avail.modelled(Arc::clone(&avail));
    parts.used = parts.used.modelled(Arc::clone(&used));
    let (next_avail, next_used, published, signalled) = (0, 0, 0, 0);
    let queue = SplitQueue { memory, layout, parts, next_avail, next_used, published, signalled };
    (queue, avail, used)
}

#[test]
fn an_available_entry_is_read_behind_the_index() {
    check(|| {
        let (mut queue, avail, _used) = queue(false);
        let device = thread::spawn(move || queue.pop_head());
        avail.word(ENTRIES).store(7, Relaxed);
        avail.word(IDX).store(1, Release);
        assert!(matches!(device.join().unwrap(), Ok(None | Some(7))));
    });
}

#[test]
fn a_used_entry_is_read_behind_the_index() {
    check(|| {
        let (mut queue, _avail, used) = queue(false);
        let device = thread::spawn(move || {
            queue.push(7, 9).unwrap();
            queue.publish()
        });
        if used.word(IDX).load(Acquire) == 1 {
            assert_eq!(used.word(ENTRIES).load(Relaxed), 7);
            assert_eq!(used.word(ENTRIES + 4).load(Relaxed), 9);
        }
        assert_eq!(device.join().unwrap(), Ok(true));
    });
}

#[test]
fn a_device_that_sleeps_is_notified() {
    for event_idx in [false, true] {
        check(move || {
            let (mut queue, avail, used) = queue(event_idx);
            queue.disable_notify().unwrap();
            let device = thread::spawn(move || queue.enable_notify());
            avail.word(IDX).store(1, Release);
            fence(SeqCst);
            let notifies = if event_idx {
                used.word(AVAIL_EVENT).load(Relaxed) == 0
            } else {
                used.word(USED_FLAGS).load(Relaxed) & u32::from(USED_F_NO_NOTIFY) == 0
            };
            assert!(device.join().unwrap().unwrap() || notifies);
        });
    }
}

#[test]
fn a_driver_that_sleeps_is_interrupted() {
    for (event_idx, remembers) in [(false, false), (false, true), (true, false), (true, true)] {
        check(move || {
            let (mut queue, avail, used) = queue(event_idx);
            let behind = u16::MAX.into();
            avail.word(USED_EVENT).store(behind, Relaxed);
            avail.word(AVAIL_FLAGS).store(AVAIL_F_NO_INTERRUPT.into(), Relaxed);
            let device = thread::spawn(move || {
                queue.push(0, 0).unwrap();
                queue.publish().unwrap();
                if remembers {
                    queue.signal_needed()
                } else {
                    queue.wants_signal()
                }
            });
            let (wish, value) = if event_idx { (USED_EVENT, 0) } else { (AVAIL_FLAGS, 0) };
            avail.word(wish).store(value, Relaxed);
            fence(SeqCst);
            let found = used.word(IDX).load(Acquire) == 1;
            assert!(device.join().unwrap().unwrap() || found);
        });
    }
}
