// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queues of a tap that another process has, in a network namespace of the test's own.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::process::Command;

use rustix::thread::{unshare_unsafe, UnshareFlags};
use tap::Tap;

/// Runs ip(8).
fn ip(words: &str) {
    assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success());
}

/// Makes an ioctl with an integer, and returns the integer behind it.
fn ioctl(file: &impl AsRawFd, request: libc::Ioctl, mut value: libc::c_int) -> libc::c_int {
    // SAFETY: The requests of this test read or write an integer.
    assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) }, 0);
    value
}

/// A tap that another process has is left as it is: that process goes on with the header that it has chosen.
#[test]
fn the_tap_of_another_process_is_left_alone() {
    const HEADER: libc::c_int = 12;
    // SAFETY: The thread has another network namespace then. It shares all else with the other threads as before.
    if unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.is_err() {
        return eprintln!("skipped: this process may not make a network namespace");
    }
    for kind in ["", " multi_queue"] {
        ip(&format!("tuntap add name tap0 mode tap{kind}"));
        let other = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
        // SAFETY: Zeros are valid for all members of the structure.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(b"tap0") {
            *to = libc::c_char::from_ne_bytes([*from]);
        }
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let flags = if kind.is_empty() { flags } else { flags | libc::IFF_MULTI_QUEUE };
        request.ifr_ifru.ifru_flags = flags.try_into().unwrap();
        // SAFETY: The request is a whole `ifreq`, which TUNSETIFF reads and writes.
        assert_eq!(unsafe { libc::ioctl(other.as_raw_fd(), libc::TUNSETIFF, &raw mut request) }, 0);
        ioctl(&other, libc::TUNSETVNETHDRSZ, HEADER);
        assert_eq!(Tap::open("tap0", true).unwrap_err().kind(), ErrorKind::ResourceBusy, "{kind}");
        assert_eq!(ioctl(&other, libc::TUNGETVNETHDRSZ, 0), HEADER, "{kind}");
        drop(other);
        assert!(Tap::open("tap0", true).is_ok(), "{kind}");
        ip("link del tap0");
    }
}
