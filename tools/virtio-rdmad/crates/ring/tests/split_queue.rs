// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests the device's side of a queue with a driver that is right, and with every error of a driver.

mod driver;

use driver::{Driver, AVAIL, DATA, DESC, END, TABLES, USED};
use memory::GuestMemory;
use ring::{Layout, RingError, SplitQueue, MAX_DESCRIPTORS};
use testkit::{Memory, F_INDIRECT, F_NEXT, F_WRITE};

fn queue(driver: &Driver) -> SplitQueue {
    SplitQueue::new(&driver.memory, driver.queue.layout, 0).unwrap()
}

#[test]
fn a_request_and_its_reply() {
    for indirect in [false, true] {
        let mut driver = Driver::new(8, false);
        let mut queue = queue(&driver);
        assert!(queue.pop().unwrap().is_none());
        driver.memory.write(DATA, b"request").unwrap();
        let buffers =
            [(DATA, 3, false), (DATA + 3, 4, false), (DATA + 64, 2, true), (DATA + 80, 9, true)];
        let head = driver.add(&buffers, indirect).unwrap();

        assert_eq!(queue.pending(), Ok(1));
        let chain = queue.pop().unwrap().unwrap();
        assert_eq!((chain.readable_len(), chain.writable_len()), (7, 11));
        let mut request = [0; 16];
        assert_eq!(chain.read(&mut request), Ok(7));
        assert_eq!(&request[..7], b"request");
        assert_eq!(chain.write(b"reply"), Ok(5));
        assert_eq!(chain.write(&[0; 20]), Ok(11));
        assert_eq!(chain.write(b"reply"), Ok(5));

        queue.push(chain.head, 5).unwrap();
        assert_eq!(driver.take(), None);
        assert_eq!(queue.publish(), Ok(true));
        assert_eq!(queue.publish(), Ok(false));
        assert_eq!(driver.take(), Some((head, 5)));
        let mut reply = [0; 3];
        driver.memory.read(DATA + 80, &mut reply).unwrap();
        assert_eq!(&reply, b"ply");
    }
}

#[test]
fn signals_follow_the_flag() {
    let mut driver = Driver::new(4, false);
    let mut queue = queue(&driver);
    for (flag, wanted) in [(0_u16, true), (1, false), (0, true)] {
        driver.memory.put(AVAIL, &flag);
        let head = driver.add(&[(DATA, 8, true)], false).unwrap();
        queue.pop().unwrap().unwrap();
        assert_eq!(queue.signal_needed(), Ok(false));
        queue.push(head, 8).unwrap();
        assert_eq!(queue.signal_needed(), Ok(false));
        queue.publish().unwrap();
        assert_eq!(queue.signal_needed(), Ok(wanted));
        assert_eq!(queue.signal_needed(), Ok(false));
        driver.take().unwrap();
    }
}

#[test]
fn signals_follow_the_event_index() {
    let mut driver = Driver::new(4, true);
    let mut queue = queue(&driver);
    let used_event = AVAIL + 4 + 2 * 4;
    let mut complete = |driver: &mut Driver, count: u16| {
        for _ in 0..count {
            let head = driver.add(&[(DATA, 8, true)], false).unwrap();
            queue.pop().unwrap().unwrap();
            queue.push(head, 8).unwrap();
        }
        queue.publish().unwrap();
        while driver.take().is_some() {}
        queue.signal_needed().unwrap()
    };
    assert!(complete(&mut driver, 1));
    driver.memory.put(used_event, &3_u16);
    assert!(!complete(&mut driver, 2));
    assert!(complete(&mut driver, 1));
    assert!(!complete(&mut driver, 3));
}

#[test]
fn a_queue_goes_on_at_its_position() {
    for event_idx in [false, true] {
        let mut driver = Driver::new(4, event_idx);
        let mut before = queue(&driver);
        let heads = [0; 3].map(|_| driver.add(&[(DATA, 8, true)], false).unwrap());
        before.pop().unwrap().unwrap();
        before.pop().unwrap().unwrap();
        before.push(heads[0], 8).unwrap();
        before.publish().unwrap();
        let position = before.position();
        drop(before);

        // The driver's view of the index is no part of it: the memory of the ring may hold anything.
        driver.memory.put(USED + 2, &77_u16);
        let mut queue = SplitQueue::at(&driver.memory, driver.queue.layout, position).unwrap();
        assert_eq!(queue.position(), position);
        assert_eq!(queue.signal_needed(), Ok(true), "nobody has decided on the first buffer");
        queue.push(heads[1], 4).unwrap();
        queue.publish().unwrap();
        assert_eq!([driver.take(), driver.take()], [Some((heads[0], 8)), Some((heads[1], 4))]);
        assert_eq!(queue.pop().unwrap().unwrap().head, heads[2]);
        assert!(queue.pop().unwrap().is_none());
    }
}

#[test]
fn notifications_are_asked_for() {
    let mut driver = Driver::new(4, false);
    let mut queue = queue(&driver);
    queue.disable_notify().unwrap();
    assert_eq!(driver.memory.get::<u16>(USED), 1);
    assert_eq!(queue.enable_notify(), Ok(false));
    assert_eq!(driver.memory.get::<u16>(USED), 0);
    driver.add(&[(DATA, 8, true)], false).unwrap();
    assert_eq!(queue.enable_notify(), Ok(true));

    let mut driver = Driver::new(4, true);
    let mut queue = SplitQueue::new(&driver.memory, driver.queue.layout, 0).unwrap();
    let avail_event = USED + 4 + 8 * 4;
    queue.disable_notify().unwrap();
    assert_eq!(driver.memory.get::<u16>(avail_event), u16::MAX);
    driver.add(&[(DATA, 8, true)], false).unwrap();
    queue.pop().unwrap().unwrap();
    assert_eq!(queue.enable_notify(), Ok(false));
    assert_eq!(driver.memory.get::<u16>(avail_event), 1);
}

#[test]
fn memory_that_moves_is_followed() {
    let mut driver = Driver::new(4, false);
    let mut queue = queue(&driver);
    let empty = GuestMemory::default();
    assert!(matches!(queue.set_memory(&empty), Err(RingError::Part { .. })));
    driver.memory.write(DATA, b"old").unwrap();
    driver.add(&[(DATA, 3, false)], false).unwrap();
    assert!(queue.pop().unwrap().is_some());

    let mut moved = Driver::new(4, false);
    moved.queue.next = driver.queue.next;
    moved.memory.write(DATA, b"new").unwrap();
    moved.add(&[(DATA, 3, false)], false).unwrap();
    queue.set_memory(&moved.memory).unwrap();
    let mut found = [0; 3];
    queue.pop().unwrap().unwrap().read(&mut found).unwrap();
    assert_eq!(&found, b"new");
}

#[test]
fn bad_layouts_are_refused() {
    let driver = Driver::new(4, false);
    let new = |change: fn(&mut Layout)| {
        let mut layout = driver.queue.layout;
        change(&mut layout);
        SplitQueue::new(&driver.memory, layout, 0).map(|_| ()).unwrap_err()
    };
    assert_eq!(new(|l| l.size = 0), RingError::Size { size: 0 });
    assert_eq!(new(|l| l.size = 3), RingError::Size { size: 3 });
    assert!(matches!(new(|l| l.desc = 8), RingError::Alignment { .. }));
    assert!(matches!(new(|l| l.desc = 0), RingError::Part { .. }));
    assert!(matches!(new(|l| l.avail += 1), RingError::Alignment { .. }));
    assert!(matches!(new(|l| l.used += 2), RingError::Alignment { .. }));
    assert!(matches!(new(|l| l.used = END - 4), RingError::Part { .. }));
    assert!(matches!(new(|l| l.used = u64::MAX - 3), RingError::Part { .. }));
}

/// Returns the error of `pop` for chain 0, which `write` lays out, of a queue of 4 entries.
fn pop(write: impl Fn(&Driver)) -> RingError {
    let mut driver = Driver::new(4, false);
    let mut queue = queue(&driver);
    write(&driver);
    driver.offer(0);
    let error = queue.pop().unwrap_err();
    assert_eq!(queue.pop().unwrap_err(), error, "nothing was taken");
    error
}

#[test]
fn bad_chains_are_refused() {
    let next = |d: &Driver, i, n| d.write_desc(DESC, i, DATA, 8, F_NEXT, n);
    assert_eq!(pop(|d| next(d, 0, 4)), RingError::DescriptorIndex { index: 4, size: 4 });
    assert_eq!(pop(|d| next(d, 0, 0)), RingError::TooLong);
    assert_eq!(
        pop(|d| {
            next(d, 0, 1);
            next(d, 1, 2);
            next(d, 2, 1);
        }),
        RingError::TooLong
    );
    assert_eq!(
        pop(|d| {
            d.write_desc(DESC, 0, DATA, 8, F_NEXT | F_WRITE, 1);
            d.write_desc(DESC, 1, DATA, 8, 0, 0);
        }),
        RingError::Order
    );
    assert_eq!(
        pop(|d| d.write_desc(DESC, 0, END - 4, 8, 0, 0)),
        RingError::Buffer { addr: END - 4, len: 8 }
    );
    assert_eq!(
        pop(|d| d.write_desc(DESC, 0, u64::MAX, 8, 0, 0)),
        RingError::Buffer { addr: u64::MAX, len: 8 }
    );
}

#[test]
fn bad_indirect_tables_are_refused() {
    let table = |d: &Driver, addr, len| d.write_desc(DESC, 0, addr, len, F_INDIRECT, 0);
    for len in [0, 8, 17] {
        assert_eq!(pop(|d| table(d, TABLES, len)), RingError::IndirectLength { len });
    }
    let (addr, len) = (END - 16, 32);
    assert_eq!(
        pop(|d| {
            table(d, addr, len);
            d.write_desc(addr, 0, DATA, 1, F_NEXT, 1);
        }),
        RingError::IndirectTable { addr, len }
    );
    assert_eq!(
        pop(|d| d.write_desc(DESC, 0, TABLES, 16, F_INDIRECT | F_NEXT, 1)),
        RingError::IndirectNext
    );
    assert_eq!(
        pop(|d| {
            table(d, TABLES, 16);
            d.write_desc(TABLES, 0, TABLES, 16, F_INDIRECT, 0);
        }),
        RingError::IndirectNested
    );
    assert_eq!(
        pop(|d| {
            table(d, TABLES, 32);
            d.write_desc(TABLES, 0, DATA, 8, F_NEXT, 2);
        }),
        RingError::DescriptorIndex { index: 2, size: 2 }
    );
    assert_eq!(
        pop(|d| {
            table(d, TABLES, 32);
            d.write_desc(TABLES, 0, DATA, 8, F_NEXT, 0);
        }),
        RingError::TooLong
    );
    assert_eq!(
        pop(|d| {
            table(d, TABLES, 16 * 100);
            let last = u16::try_from(MAX_DESCRIPTORS).unwrap();
            for i in 0..last {
                d.write_desc(TABLES, i, DATA, 8, F_NEXT, i + 1);
            }
            d.write_desc(TABLES, last, DATA, 8, 0, 0);
        }),
        RingError::TooLong
    );
}

/// A table of its own lets a chain have more descriptors than a queue of four.
#[test]
fn the_longest_chain_is_taken() {
    let mut driver = Driver::new(4, false);
    let mut queue = queue(&driver);
    for at in 0..MAX_DESCRIPTORS {
        let (at, last) = (u16::try_from(at).unwrap(), at + 1 == MAX_DESCRIPTORS);
        let addr = DATA + 8 * u64::from(at);
        driver.write_desc(TABLES, at, addr, 8, if last { 0 } else { F_NEXT }, at + 1);
    }
    driver.write_desc(DESC, 0, TABLES, 16 * 100, F_INDIRECT, 0);
    driver.offer(0);
    let chain = queue.pop().unwrap().unwrap();
    assert_eq!(chain.readable().len(), MAX_DESCRIPTORS);
    assert_eq!(chain.readable_len(), 8 * MAX_DESCRIPTORS);
}

#[test]
fn four_gigabytes_are_too_many() {
    let driver = Driver::new(4, false);
    let mut layout = driver.queue.layout;
    layout.size = 4;
    // The device adds up the lengths before it looks at the memory.
    driver.write_desc(DESC, 0, DATA, 0, F_NEXT, 1);
    driver.write_desc(DESC, 1, DATA, u32::MAX, 0, 0);
    let mut queue = SplitQueue::new(&driver.memory, layout, 0).unwrap();
    driver.memory.put(AVAIL + 2, &1_u16);
    assert_eq!(queue.pop().unwrap_err(), RingError::Buffer { addr: DATA, len: u32::MAX });
    driver.write_desc(DESC, 0, DATA, 1, F_NEXT, 1);
    assert_eq!(queue.pop().unwrap_err(), RingError::TooManyBytes);
}

#[test]
fn a_runaway_index_is_refused() {
    let driver = Driver::new(4, false);
    let mut queue = queue(&driver);
    driver.memory.put(AVAIL + 2, &5_u16);
    let error = RingError::AvailIndex { idx: 5, next: 0, size: 4 };
    assert_eq!(queue.pop().unwrap_err(), error);
    assert_eq!(queue.enable_notify(), Err(error));
    driver.memory.put(AVAIL + 2, &u16::MAX);
    assert!(matches!(queue.pending(), Err(RingError::AvailIndex { .. })));
}
