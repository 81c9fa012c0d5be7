// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Network interfaces of the kernel over which a process sends and receives frames: a tap, whose frames
//! are those of the process (the kernel's Documentation/networking/tuntap.rst), and a packet socket on any
//! other interface ([`PacketSocket`]). A tunnel between processes sends its datagrams by a [`UdpSender`].
//! A [`Carrier`] tells whether an interface is of use.
//!
//! On interfaces, each frame has a header of VIRTIO in front (`struct virtio_net_hdr`, VIRTIO 1.3, 5.1.6), by which one
//! call moves a train: a frame with several UDP datagrams of one flow. Where the kernel must, it takes
//! the train apart (segmentation offload). Linux 6.2 and later do this (for taps TUN_F_USO4 and
//! TUN_F_USO6).

mod carrier;
mod filter;
mod header;
mod packet_socket;
mod packet_tap;
mod share;
mod udp_sender;

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{socket_with, AddressFamily, SocketFlags, SocketType};

pub use carrier::Carrier;
pub use header::TrainShape;
pub use packet_socket::PacketSocket;
pub use packet_tap::PacketTap;
pub use share::Share;
pub use udp_sender::UdpSender;

/// A tap that was opened, or one of its queues. A tap that was made with `multi_queue` may have several, each with
/// frames of its own to take.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
    /// Whether trains are wanted.
    trains: bool,
    takes_trains: AtomicBool,
    /// Whether the tap may have been made without `multi_queue`.
    may_be_single: bool,
}

impl Tap {
    /// Opens the tap of this name. The administrator has made it, for the user of this process:
    /// `ip tuntap add NAME mode tap user USER`; then this needs no privilege.
    ///
    /// With `trains` the kernel gives and takes trains, and gives frames whose checksums it has not
    /// completed, if it can.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for a name that no interface can have, `PermissionDenied` if the tap is another
    /// user's or does not exist, `ResourceBusy` if another process has it open. Before Linux 6.9 the kernel does not
    /// tell whether another process has queues of a tap that was made with `multi_queue`.
    pub fn open(name: &str, trains: bool) -> Result<Self, Error> {
        // To become an end of a tap that others have would change the header of their frames.
        if queues(name)?.is_some_and(|queues| queues > 0) {
            return Err(ErrorKind::ResourceBusy.into());
        }
        Self::open_queue(name, trains, true)
    }

    /// Opens another queue of the tap. The kernel chooses the queue of a frame by a hash of the flow, or takes the
    /// queue over which this process has sent the last frame of the flow, in either direction, if that was within the
    /// last 3 seconds (`tun_automq_select_queue()`).
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the tap was made without `multi_queue`, and the errors of [`Self::open`].
    pub fn open_another(&self) -> Result<Self, Error> {
        Self::open_queue(&self.name, self.trains, false)
    }

    fn open_queue(name: &str, trains: bool, may_be_single: bool) -> Result<Self, Error> {
        let (file, takes_trains) = (open(name)?, false.into());
        let tap = Self { file, name: name.to_owned(), trains, takes_trains, may_be_single };
        tap.attach()?;
        Ok(tap)
    }

    /// Becomes the end of the interface of this name.
    fn attach(&self) -> Result<(), Error> {
        let attach = |flags| attach(&self.file, &self.name, libc::IFF_VNET_HDR | flags);
        // The kernel refuses what the interface was not made for.
        let single =
            if self.may_be_single { attach(0) } else { Err(ErrorKind::InvalidInput.into()) };
        match single {
            Err(error) if error.kind() == ErrorKind::InvalidInput => attach(libc::IFF_MULTI_QUEUE)?,
            single => single?,
        }
        choose_header(&self.file)?;
        self.takes_trains.store(offload(&self.file, self.trains), Ordering::Relaxed);
        Ok(())
    }

    /// Becomes the end of the interface once more, if the administrator has removed it and made it again. Returns
    /// whether that was so. Any thread may call this at any time.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::open`]: above all, that the interface is gone.
    pub fn follow(&self) -> Result<bool, Error> {
        if is_attached(&self.file) {
            return Ok(false);
        }
        self.attach().map(|()| true)
    }

    /// Returns the number of queues that processes have of the interface; `None` if the kernel does not tell.
    ///
    /// # Errors
    ///
    /// The error of ioctl(2).
    pub fn queues(&self) -> Result<Option<usize>, Error> {
        queues(&self.name)
    }

    /// Returns whether the kernel takes trains apart.
    pub fn takes_trains(&self) -> bool {
        self.takes_trains.load(Ordering::Relaxed)
    }

    /// Takes a frame that the kernel sends over the interface. Returns its bytes, and the bytes of a segment if it is a
    /// train, else 0. A frame that does not fit into `room` with a header of 10 bytes is cut off. No system call takes
    /// several frames from a tap: it is a file, not a socket, and a read of it, also by readv(2), is of one frame (the
    /// kernel's `tun_do_read()`).
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is no frame; what read(2) says if the interface is down or gone.
    pub fn receive<'a>(&self, room: &'a mut [u8]) -> Result<(&'a [u8], u16), Error> {
        let len = (&self.file).read(room)?;
        let Some((header, frame)) = room.get(..len).and_then(|room| room.split_first_chunk())
        else {
            return Ok((&[], 0));
        };
        Ok((frame, header::segment(*header)))
    }

    /// Gives the kernel a frame that comes over the interface, which is a train if the tap
    /// [takes trains](Tap::takes_trains).
    ///
    /// # Errors
    ///
    /// The error of write(2): `EIO` while the interface is down.
    pub fn send(&self, frame: &[u8], train: Option<TrainShape>) -> Result<(), Error> {
        let header = header::encode(train);
        let parts = [IoSlice::new(&header), IoSlice::new(frame)];
        (&self.file).write_vectored(&parts).map(|_| ())
    }
}

/// The numbers of queues (`struct ethtool_channels` of the kernel's linux/ethtool.h).
#[derive(Default)]
#[repr(C)]
struct Channels {
    command: u32,
    /// The most queues of each kind, and the numbers of those that are of one kind.
    others: [u32; 7],
    /// The number of queues that both receive and send.
    combined: u32,
}

/// The command that reads the numbers of queues.
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// Returns a socket by which the kernel is asked about interfaces. It takes one of any kind, and a service of systemd
/// may be allowed no other one.
fn any_socket() -> Result<OwnedFd, Error> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Returns the number of queues that processes have of a tap (`tun_get_channels()` of the kernel); `None` if there is no
/// such interface, or if the kernel does not tell, as before Linux 6.9.
fn queues(name: &str) -> Result<Option<usize>, Error> {
    let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
    let mut request = request_for(name).ok_or(ErrorKind::InvalidInput)?;
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    let socket = any_socket()?;
    // SAFETY: The request is a whole `ifreq`, which names a whole `ethtool_channels`, as ETHTOOL_GCHANNELS writes.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) } == 0 {
        return Ok(Some(channels.combined as usize));
    }
    let error = Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENODEV) => Ok(None),
        _ => Err(error),
    }
}

/// Opens what becomes the end of the tap of this name.
fn open(name: &str) -> Result<File, Error> {
    request_for(name).ok_or(ErrorKind::InvalidInput)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")
}

/// Returns a request that names nothing.
fn request() -> libc::ifreq {
    // SAFETY: Zeros are valid for all members of the structure: integers, addresses made of integers, and a
    // raw pointer, which may be null.
    unsafe { std::mem::zeroed() }
}

/// Returns a request that names an interface; `None` if no interface can have the name.
fn request_for(name: &str) -> Option<libc::ifreq> {
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['\0', '/']) {
        return None;
    }
    let mut request = request();
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Some(request)
}

/// Returns whether a file is the end of an interface that is there.
fn is_attached(file: &File) -> bool {
    let mut request = request();
    // SAFETY: The request is a whole `ifreq`, which TUNGETIFF writes.
    unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF, &raw mut request) == 0 }
}

/// Makes a file that [`open`] has opened the end of the tap of this name, with these flags besides those that every tap
/// has here (`IFF_…`).
fn attach(file: &File, name: &str, flags: libc::c_int) -> Result<(), Error> {
    let mut request = request_for(name).ok_or(ErrorKind::InvalidInput)?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | flags;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
    // SAFETY: The request is a whole `ifreq`, which TUNSETIFF reads and writes.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if status < 0 {
        return Err(Error::last_os_error());
    }
    Ok(())
}

/// Chooses the header in front of frames: without what later versions have added, and little-endian. A
/// tap keeps what another process has chosen.
fn choose_header(tap: &File) -> Result<(), Error> {
    for (request, value) in [(libc::TUNSETVNETHDRSZ, header::LEN), (libc::TUNSETVNETLE, 1)] {
        let value = libc::c_int::try_from(value).unwrap_or(0);
        // SAFETY: Both requests read an integer, which `value` is.
        if unsafe { libc::ioctl(tap.as_raw_fd(), request, &raw const value) } < 0 {
            return Err(Error::last_os_error());
        }
    }
    Ok(())
}

/// Makes the kernel leave trains whole in both directions, if they are wanted. Returns whether it does.
fn offload(tap: &File, trains: bool) -> bool {
    let flags = libc::TUN_F_CSUM | libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let takes_trains = trains && set_offload(tap, flags).is_ok();
    if !takes_trains {
        // A tap keeps what another process has set. Every kernel knows how to do nothing.
        let _ = set_offload(tap, 0);
    }
    takes_trains
}

/// Chooses what the kernel leaves undone in the frames that it sends over the interface (`TUN_F_…`).
fn set_offload(tap: &File, flags: libc::c_uint) -> Result<(), Error> {
    let flags = libc::c_ulong::from(flags);
    // SAFETY: TUNSETOFFLOAD takes a number, and touches no memory.
    if unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, flags) } < 0 {
        return Err(Error::last_os_error());
    }
    Ok(())
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_names_are_refused() {
        for name in ["", "a name that is too long", "a/b", "a\0b"] {
            assert_eq!(
                Tap::open(name, true).unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "{name:?}"
            );
        }
    }

    /// A tap of a kernel that does not tell its queues (before Linux 6.9) is like another kind of interface, and one
    /// that is not there is like one that nobody has.
    #[test]
    fn a_kernel_need_not_tell_queues() {
        assert_eq!(queues("lo").unwrap(), None);
        assert_eq!(queues("not there").unwrap(), None);
    }
}
