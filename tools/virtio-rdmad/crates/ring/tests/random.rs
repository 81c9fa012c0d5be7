// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Compares random operations of driver and device with a model.

mod driver;

use std::collections::VecDeque;

use driver::{Driver, DATA};
use proptest::prelude::*;
use ring::SplitQueue;

#[derive(Clone, Debug)]
enum Op {
    /// The driver adds a chain with readable and writable buffers of these lengths. The last field
    /// says whether the chain is indirect.
    Add(Vec<u32>, Vec<u32>, bool),
    Pop,
    /// The device completes the n-th of the chains that it holds, modulo their number.
    Push(usize),
    Publish,
    /// The driver takes all used entries.
    Take,
}

fn op() -> impl Strategy<Value = Op> {
    let lens = || prop::collection::vec(0..2000_u32, 0..4);
    prop_oneof![
        4 => (lens(), lens(), any::<bool>()).prop_map(|(r, w, i)| Op::Add(r, w, i)),
        3 => Just(Op::Pop),
        3 => any::<usize>().prop_map(Op::Push),
        2 => Just(Op::Publish),
        2 => Just(Op::Take),
    ]
}

/// The head of a chain, its lengths, and the bytes that the device reads.
struct Added {
    head: u16,
    readable: usize,
    writable: usize,
    payload: Vec<u8>,
}

/// Adds the chain of the n-th operation, which has memory of its own: no other chain writes there.
fn add(driver: &mut Driver, ops: (&[u32], &[u32], bool), n: usize) -> Option<Added> {
    let (readable, writable, indirect) = ops;
    let mut at = DATA + n as u64 * 0x4000;
    let seed = u8::try_from(n % 250).unwrap();
    let mut buffers = Vec::new();
    let mut payload = Vec::new();
    for (&len, write) in
        readable.iter().map(|l| (l, false)).chain(writable.iter().map(|l| (l, true)))
    {
        let bytes = vec![seed.wrapping_add(u8::try_from(buffers.len()).unwrap()); len as usize];
        if !write {
            driver.memory.write(at, &bytes).unwrap();
            payload.extend(bytes);
        }
        buffers.push((at, len, write));
        at += u64::from(len);
    }
    if buffers.is_empty() {
        return None;
    }
    let head = driver.add(&buffers, indirect)?;
    let sum = |lens: &[u32]| lens.iter().sum::<u32>() as usize;
    Some(Added { head, readable: sum(readable), writable: sum(writable), payload })
}

proptest! {
    #[test]
    fn driver_and_device_agree(
        ops in prop::collection::vec(op(), 1..400),
        event_idx: bool,
        size in prop::sample::select(vec![8_u16, 16, 64]),
    ) {
        let mut driver = Driver::new(size, event_idx);
        let mut queue = SplitQueue::new(&driver.memory, driver.queue.layout, 0).unwrap();
        let mut available = VecDeque::new();
        let mut held = Vec::new();
        let mut pushed = VecDeque::new();
        let mut published = 0;
        for (n, op) in ops.into_iter().enumerate() {
            match op {
                Op::Add(r, w, indirect) => {
                    if let Some(added) = add(&mut driver, (&r, &w, indirect), n) {
                        available.push_back(added);
                    }
                }
                Op::Pop => match (queue.pop().unwrap(), available.pop_front()) {
                    (None, None) => {}
                    (Some(chain), Some(added)) => {
                        prop_assert_eq!(chain.head, added.head);
                        prop_assert_eq!(chain.readable_len(), added.readable);
                        prop_assert_eq!(chain.writable_len(), added.writable);
                        let mut bytes = vec![0; added.readable];
                        chain.read(&mut bytes).unwrap();
                        prop_assert_eq!(bytes, added.payload);
                        held.push(chain);
                    }
                    (found, _) => prop_assert!(false, "device saw {found:?}"),
                },
                Op::Push(which) if !held.is_empty() => {
                    let chain = held.swap_remove(which % held.len());
                    let written = chain.write(&vec![7; chain.writable_len()]).unwrap();
                    queue.push(chain.head, written).unwrap();
                    pushed.push_back((chain.head, written));
                }
                Op::Push(_) => {}
                Op::Publish => {
                    prop_assert_eq!(queue.publish().unwrap(), published < pushed.len());
                    published = pushed.len();
                }
                Op::Take => {
                    while let Some(entry) = driver.take() {
                        prop_assert!(published > 0);
                        prop_assert_eq!(Some(entry), pushed.pop_front());
                        published -= 1;
                    }
                    prop_assert_eq!(published, 0);
                }
            }
            prop_assert_eq!(usize::from(queue.pending().unwrap()), available.len());
        }
    }
}
