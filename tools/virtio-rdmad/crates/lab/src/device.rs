// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device of the guests: virtio-rdmad, which is also the switch of their network interfaces.

use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::cable::{self, Addresses};
use crate::child::die_with_parent;
use crate::error::Error;
use crate::options::Guests;
use crate::payload::Payload;
use crate::plan::Plan;

/// How long a device may take until it is ready.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often it is asked whether it has ended meanwhile.
const LOOK: Duration = Duration::from_millis(50);
/// The number of the tunnels' network.
const VNI: u32 = 42;

/// A running device.
pub struct Device {
    child: Child,
}

/// Starts the devices of guests: one for all, or one for each guest if packets are to be lost between them. Returns when
/// they are ready.
pub fn start(payload: &Payload, plans: &[Plan], options: &Guests) -> Result<Vec<Device>, Error> {
    let device = |plans: &[Plan], tunnel| Device::start(payload, plans, tunnel, options.is_verbose);
    let Some(loss) = options.loss else { return Ok(vec![device(plans, None)?]) };
    let addresses = cable::lay(options.count, loss)?;
    let of = |plan: &Plan| {
        device(std::slice::from_ref(plan), Some(tunnel(addresses, plan.number, options.count)))
    };
    plans.iter().map(of).collect()
}

/// Returns the option for the tunnel of the host of a guest.
fn tunnel(addresses: Addresses, guest: u8, count: u8) -> String {
    let own = format!("vxlan={VNI},local={}", addresses.host(guest));
    let peers = (1..=count).filter(|peer| *peer != guest);
    let remotes = peers.map(|peer| format!("remote={}", addresses.peer(guest, peer)));
    std::iter::once(own).chain(remotes).collect::<Vec<_>>().join(",")
}

impl Device {
    fn start(
        payload: &Payload,
        plans: &[Plan],
        tunnel: Option<String>,
        is_verbose: bool,
    ) -> Result<Self, Error> {
        let first = plans.first().ok_or("a device without guests")?;
        let ready = first.socket("ready");
        let socket = UnixDatagram::bind(&ready)?;
        socket.set_read_timeout(Some(LOOK))?;
        let mut command = Command::new(payload.device.path());
        for plan in plans {
            let Plan { mac, .. } = plan;
            let (rdma, nic) = (plan.rdma_socket(), plan.nic_socket());
            let (rdma, nic) = (rdma.display(), nic.display());
            command.arg("--guest");
            command.arg(format!("name={},vhost-user={rdma},mac={mac},nic={nic}", plan.name()));
        }
        if let Some(tunnel) = tunnel {
            command.args(["--uplink", &tunnel]);
        }
        command.env("NOTIFY_SOCKET", &ready).stdin(Stdio::null()).stdout(Stdio::null());
        if !is_verbose {
            command.args(["--log", "error"]);
        }
        let child = die_with_parent(&mut command).spawn();
        let child = child.map_err(|error| format!("the device does not start: {error}"))?;
        let mut device = Self { child };
        device.wait_until_ready(&socket)?;
        Ok(device)
    }

    fn wait_until_ready(&mut self, socket: &UnixDatagram) -> Result<(), Error> {
        let mut message = [0; 4096];
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Ok(length) = socket.recv(&mut message) {
                if message[..length].split(|byte| *byte == b'\n').any(|line| line == b"READY=1") {
                    return Ok(());
                }
            }
            if let Some(status) = self.child.try_wait()? {
                return Err(format!("the device has ended with {status}").into());
            }
        }
        Err(format!("the device is not ready after {PATIENCE:?}").into())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // It has no state that outlives it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
