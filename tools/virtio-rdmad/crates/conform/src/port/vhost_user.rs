// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device behind a socket of vhost-user (QEMU docs/interop/vhost-user.rst).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use memory::GuestMemory;
use ring::Layout;
use testkit::socket::longs;
use testkit::vhost_user::{self as vhost, request, HEADER, REPLY, VERSION};

use super::attached::{Attach, Memory, Port, SPARE};
use super::wire::{connect, long, receive, send, word, Signals};
use crate::outcome::{gone, Outcome};

/// The address at which the VMM has the memory, as it says.
const USER: u64 = 0x10_0000;
/// VHOST_USER_F_PROTOCOL_FEATURES, a bit of the features.
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// The feature bits of vhost-user and of VIRTIO that are not the device's and that no driver sees.
const F_LOG_ALL: u64 = 1 << 26;
/// The protocol features that are used: several queues, REPLY_ACK, the configuration space, RESET_DEVICE, and the
/// device status.
const P_MQ: u64 = 1;
const P_REPLY_ACK: u64 = 1 << 3;
const P_CONFIG: u64 = 1 << 9;
const P_RESET_DEVICE: u64 = 1 << 13;
const P_STATUS: u64 = 1 << 16;
/// The protocol features of migration.
const P_LOG_SHMFD: u64 = 1 << 1;
const P_DEVICE_STATE: u64 = 1 << 19;
/// The numbers of SET_OWNER and SET_CONFIG.
const SET_OWNER: u32 = 3;
const SET_CONFIG: u32 = 25;
/// The driver's bits of the device status (VIRTIO 1.3, section 2.1).
const ACKNOWLEDGED: u64 = 3;
const FEATURES_OK: u64 = 8;
const DRIVER_OK: u64 = 4;
const NEEDS_RESET: u64 = 0x40;
/// How long a reset may take.
const RESET: Duration = Duration::from_secs(30);

/// A socket of vhost-user.
pub struct VhostUser(PathBuf);

impl VhostUser {
    /// Returns the device behind this socket.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }
}

impl Attach for VhostUser {
    fn attach(&self, guest: &Memory) -> Outcome<Box<dyn Port>> {
        let socket = connect(&self.0)?;
        let file = guest.file.try_clone().map_err(gone)?;
        let signals = Signals::new(std::iter::empty());
        let mut port = FrontEnd {
            socket,
            file,
            bytes: guest.bytes,
            offered: 0,
            accepted: 0,
            protocol: 0,
            all_protocol: 0,
            signals,
        };
        port.greet()?;
        Ok(Box::new(port))
    }

    fn name(&self) -> String {
        format!("vhost-user {}", self.0.display())
    }
}

/// The front end of a device.
struct FrontEnd {
    socket: UnixStream,
    file: OwnedFd,
    bytes: u64,
    offered: u64,
    accepted: u64,
    protocol: u64,
    /// All protocol features that the device offers.
    all_protocol: u64,
    signals: Signals,
}

impl FrontEnd {
    /// Agrees on the protocol.
    fn greet(&mut self) -> Outcome {
        self.offered = self.ask(request::GET_FEATURES)?;
        if self.offered & F_PROTOCOL_FEATURES != 0 {
            let known = P_MQ | P_REPLY_ACK | P_CONFIG | P_RESET_DEVICE | P_STATUS;
            self.all_protocol = self.ask(request::GET_PROTOCOL_FEATURES)?;
            self.protocol = self.all_protocol & known;
            self.tell(request::SET_PROTOCOL_FEATURES, &longs(&[self.protocol]), &[])?;
        }
        self.tell(SET_OWNER, &[], &[])
    }

    /// Sends a request, and waits for the acknowledgement if the device has them. Returns whether the device does not
    /// refuse it.
    fn try_tell(&self, number: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Outcome<bool> {
        let acknowledges =
            self.protocol & P_REPLY_ACK != 0 && number != request::SET_PROTOCOL_FEATURES;
        let flags = if acknowledges { vhost::NEED_REPLY } else { 0 };
        send(&self.socket, &vhost::message(number, flags, payload), fds)?;
        Ok(!acknowledges || long(&self.answer(number)?, 0) == 0)
    }

    /// Sends a request that the device must not refuse.
    fn tell(&self, number: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Outcome {
        if self.try_tell(number, payload, fds)? {
            return Ok(());
        }
        Err(gone(format!("the device refuses request {number} of vhost-user")))
    }

    /// Gives the device the first bytes of the memory.
    fn set_memory(&self, bytes: u64) -> Outcome {
        let table = vhost::table(&vhost::region(0, bytes, USER, 0));
        self.tell(request::SET_MEM_TABLE, &table, &[self.file.as_fd()])
    }

    /// Sends a request whose answer is a number.
    fn ask(&self, number: u32) -> Outcome<u64> {
        send(&self.socket, &vhost::message(number, 0, &[]), &[])?;
        Ok(long(&self.answer(number)?, 0))
    }

    fn answer(&self, number: u32) -> Outcome<Vec<u8>> {
        let header = receive(&self.socket, HEADER)?;
        if (word(&header, 0), word(&header, 4) & (REPLY | 3)) != (number, REPLY | VERSION) {
            return Err(gone(format!("a wrong answer to request {number} of vhost-user")));
        }
        receive(&self.socket, word(&header, 8) as usize)
    }

    fn has(&self, protocol: u64) -> bool {
        self.protocol & protocol != 0
    }

    fn set_up(&self, index: u16, layout: &Layout) -> Outcome {
        let (number, user) = (u32::from(index), |address: u64| USER + address);
        let addresses =
            [number.into(), user(layout.desc), user(layout.used), user(layout.avail), 0];
        let which = longs(&[number.into()]);
        self.tell(request::SET_VRING_NUM, &vhost::state(number, layout.size.into()), &[])?;
        self.tell(request::SET_VRING_BASE, &vhost::state(number, 0), &[])?;
        self.tell(request::SET_VRING_ADDR, &longs(&addresses), &[])?;
        self.tell(request::SET_VRING_CALL, &which, &[self.signals.calls[&index].as_fd()])?;
        self.tell(request::SET_VRING_KICK, &which, &[self.signals.kicks[&index].as_fd()])?;
        if self.offered & F_PROTOCOL_FEATURES != 0 {
            self.tell(request::SET_VRING_ENABLE, &vhost::state(number, 1), &[])?;
        }
        Ok(())
    }

    fn set_status(&self, status: u64) -> Outcome {
        if self.has(P_STATUS) {
            self.tell(request::SET_STATUS, &longs(&[status]), &[])?;
        }
        Ok(())
    }
}

impl Port for FrontEnd {
    fn offered(&mut self) -> Outcome<u64> {
        Ok(self.offered & !(F_PROTOCOL_FEATURES | F_LOG_ALL))
    }

    fn is_legacy(&mut self) -> Outcome<Option<bool>> {
        Ok(None)
    }

    fn offers_migration(&mut self) -> Outcome<Option<bool>> {
        let logs = self.offered & F_LOG_ALL != 0;
        Ok(Some(logs || self.all_protocol & (P_LOG_SHMFD | P_DEVICE_STATE) != 0))
    }

    fn queue_count(&mut self) -> Outcome<Option<u16>> {
        if !self.has(P_MQ) {
            return Ok(None);
        }
        Ok(u16::try_from(self.ask(request::GET_QUEUE_NUM)?).ok())
    }

    fn queue_max_size(&mut self, _queue: u16) -> Outcome<Option<u16>> {
        Ok(None)
    }

    fn config(&mut self, len: usize) -> Outcome<Vec<u8>> {
        if !self.has(P_CONFIG) {
            return Err(gone("the device has no configuration space"));
        }
        let head = testkit::socket::words(&[0, u32::try_from(len).map_err(gone)?, 0]);
        let payload = [head, vec![0; len]].concat();
        send(&self.socket, &vhost::message(request::GET_CONFIG, 0, &payload), &[])?;
        let answer = self.answer(request::GET_CONFIG)?;
        let config = answer.get(12..12 + len);
        config.map(<[u8]>::to_vec).ok_or_else(|| gone("a short answer to GET_CONFIG"))
    }

    fn write_config(&mut self, at: usize, bytes: &[u8]) -> Outcome<bool> {
        let words = [at, bytes.len(), 0].map(|word| word as u32);
        let payload = [&testkit::socket::words(&words), bytes].concat();
        self.tell(SET_CONFIG, &payload, &[])?;
        Ok(true)
    }

    fn negotiate(&mut self, features: u64) -> Outcome<Option<bool>> {
        self.accepted = features | self.offered & F_PROTOCOL_FEATURES;
        self.set_status(ACKNOWLEDGED)?;
        if !self.try_tell(request::SET_FEATURES, &longs(&[self.accepted]), &[])? {
            return Ok(Some(false));
        }
        self.set_status(ACKNOWLEDGED | FEATURES_OK)?;
        // A device may leave the bit as the driver has set it (D-FEAT-18), so only its absence says something.
        if self.has(P_STATUS) && self.ask(request::GET_STATUS)? & FEATURES_OK == 0 {
            return Ok(Some(false));
        }
        Ok(None)
    }

    fn start(&mut self, _: &GuestMemory, queues: &BTreeMap<u16, Layout>) -> Outcome {
        self.set_memory(self.bytes)?;
        self.signals = Signals::new(queues.keys().copied());
        for (index, layout) in queues {
            self.set_up(*index, layout)?;
        }
        self.set_status(ACKNOWLEDGED | FEATURES_OK | DRIVER_OK)
    }

    fn kick(&mut self, queue: u16) -> Outcome {
        let kick = self.signals.kicks.get(&queue).ok_or_else(|| gone("no such queue"))?;
        rustix::io::write(kick, &1_u64.to_ne_bytes()).map_err(gone)?;
        Ok(())
    }

    fn rest(&mut self, at_most: Duration) -> Outcome {
        self.signals.rest(&self.socket, at_most)
    }

    fn interrupts(&mut self, queue: u16) -> u64 {
        self.signals.count(queue)
    }

    fn reset(&mut self) -> Outcome {
        let deadline = Instant::now() + RESET;
        if self.has(P_RESET_DEVICE) {
            self.tell(request::RESET_DEVICE, &[], &[])?;
        } else if self.has(P_STATUS) {
            self.tell(request::SET_STATUS, &longs(&[0]), &[])?;
        } else {
            return Err(gone("the device knows no reset"));
        }
        while self.has(P_STATUS) && self.ask(request::GET_STATUS)? != 0 {
            if Instant::now() > deadline {
                return Err(gone("the reset does not end"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // The answer says that the device has done what was sent before.
        self.ask(request::GET_FEATURES).map(|_| ())
    }

    fn set_spare(&mut self, guest: &Memory, is_there: bool) -> Outcome<bool> {
        self.set_memory(if is_there { guest.bytes } else { guest.bytes - SPARE })?;
        // The answer says that the device has done what was sent before.
        self.ask(request::GET_FEATURES).map(|_| true)
    }

    fn needs_reset(&mut self) -> Outcome<Option<bool>> {
        if !self.has(P_STATUS) {
            return Ok(None);
        }
        Ok(Some(self.ask(request::GET_STATUS)? & NEEDS_RESET != 0))
    }
}
