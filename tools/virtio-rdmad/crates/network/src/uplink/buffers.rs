// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Room for packets that wait in the kernel, at a socket of an uplink.

use std::os::fd::AsFd;

use rustix::io::Result;
use rustix::net::sockopt;

/// The bytes that an uplink asks for, with what the kernel keeps beside each packet.
const WANTED: usize = 4 << 20;

/// The direction of packets that wait.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// They have come.
    In,
    /// They are to be sent.
    Out,
}

/// Asks for room for packets that wait at each of some sockets of an uplink. A process with CAP_NET_ADMIN gets it.
/// Another one gets what the system's limits allow; if that is less, packets are lost sooner, and a line in the log
/// says so.
pub fn enlarge<S: AsFd>(sockets: impl IntoIterator<Item = S>, direction: Direction, uplink: &str) {
    let granted = sockets.into_iter().map(|socket| ask(socket, direction, WANTED));
    let granted = match granted.collect::<Result<Vec<_>>>() {
        Ok(granted) => granted.into_iter().min().unwrap_or(WANTED),
        Err(error) => return tracing::warn!(uplink, %error, "no room for packets that wait"),
    };
    if let Some((packets, limit)) = shortage(direction, granted) {
        let asked = WANTED;
        tracing::warn!(
            uplink,
            asked,
            granted,
            "packets {packets} are lost sooner than they need be, because the kernel gives less room for them than was \
             asked for: raise {limit} (sysctl), or start virtio-rdmad with CAP_NET_ADMIN"
        );
    }
}

/// Returns which packets have less room than was asked for, and the limit that was in the way.
fn shortage(direction: Direction, granted: usize) -> Option<(&'static str, &'static str)> {
    let of_direction = match direction {
        Direction::In => ("that come", "net.core.rmem_max"),
        Direction::Out => ("that are sent", "net.core.wmem_max"),
    };
    (granted < WANTED).then_some(of_direction)
}

/// Asks for so many bytes, and returns how many there are then.
fn ask(socket: impl AsFd, direction: Direction, wanted: usize) -> Result<usize> {
    let doubled = match direction {
        Direction::In => {
            if sockopt::set_socket_recv_buffer_size_force(&socket, wanted).is_err() {
                sockopt::set_socket_recv_buffer_size(&socket, wanted)?;
            }
            sockopt::socket_recv_buffer_size(&socket)?
        }
        Direction::Out => {
            if sockopt::set_socket_send_buffer_size_force(&socket, wanted).is_err() {
                sockopt::set_socket_send_buffer_size(&socket, wanted)?;
            }
            sockopt::socket_send_buffer_size(&socket)?
        }
    };
    // The kernel has twice as much as it was asked for, and says so (socket(7)).
    Ok(doubled / 2)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    /// Returns the limit of this system, if it says one.
    fn limit(name: &str) -> Option<usize> {
        std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok()
    }

    #[test]
    fn what_was_granted_is_known() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        for (direction, name) in [(Direction::In, "rmem_max"), (Direction::Out, "wmem_max")] {
            let Some(limit) = limit(name) else { return eprintln!("skipped: no {name}") };
            assert_eq!(ask(&socket, direction, limit / 2), Ok(limit / 2));
            let granted = ask(&socket, direction, limit + 4096).unwrap();
            // Only a process without CAP_NET_ADMIN is bound by the limit.
            assert!([limit, limit + 4096].contains(&granted), "{granted} of {limit}");
        }
    }

    #[test]
    fn a_shortage_is_told_with_its_limit() {
        for direction in [Direction::In, Direction::Out] {
            assert_eq!(shortage(direction, WANTED), None);
            assert_eq!(shortage(direction, WANTED + 1), None);
        }
        // The limit of Linux before 6.18.
        let limit = |direction| shortage(direction, 212_992).unwrap().1;
        assert_eq!(limit(Direction::In), "net.core.rmem_max");
        assert_eq!(limit(Direction::Out), "net.core.wmem_max");
    }
}
