// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Network cards that handle RoCE v2 themselves, and so may keep the packets of an uplink.
//!
//! While the RoCE of a card of mlx5 is switched on, the kernel sees no packet of UDP port 4791 that comes to it (the
//! kernel's Documentation/networking/devlink/mlx5.rst, `enable_roce`). What other cards do is not known.
//!
//! sysfs has the RDMA devices of a card in the directory `infiniband` of the card, and the types of their GIDs. Only a
//! device that handles RoCE v2 has GIDs of this type: the cards of mlx5 whose RoCE is switched off have a device for raw
//! packets there, and iWARP has other GIDs. Linux before 5.11 has the devices of rxe there as well; they are the only
//! ones with an attribute `parent`.

use std::collections::BTreeSet;
use std::fs::{canonicalize, read_dir, read_to_string};
use std::path::{Path, PathBuf};

use super::spec::WaySpec;

/// The place of sysfs.
pub const SYSFS: &str = "/sys";

/// The beginning of the name of the driver whose cards are known to keep the packets.
const KEEPS: &str = "mlx5_core";

/// A network card that handles RoCE v2.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Adapter {
    /// The network interface of the card.
    interface: String,
    /// The RDMA device of the card.
    device: String,
    /// The name of the driver.
    driver: String,
    /// The name by which devlink knows the card: its bus and its address.
    handle: String,
}

/// Logs which network cards may keep the packets that come for an uplink. `sysfs` is the root of sysfs.
pub fn warn(sysfs: &Path, network: &str, way: &WaySpec) {
    for Adapter { interface, device, driver, handle } in behind(sysfs, way) {
        let (uplink, rdma_device) = (way.to_string(), device);
        if driver.starts_with(KEEPS) {
            tracing::warn!(
                network,
                uplink,
                interface,
                rdma_device,
                "the network card handles RoCE itself and keeps packets of UDP port 4791 from the uplink: switch that \
                 off by \"devlink dev param set {handle} name enable_roce value false cmode driverinit\" and \"devlink \
                 dev reload {handle}\""
            );
        } else {
            tracing::warn!(
                network,
                uplink,
                interface,
                rdma_device,
                driver,
                "the network card handles RoCE itself and may keep packets of UDP port 4791 from the uplink: if none \
                 comes, switch that off (devlink knows the card as {handle}), or go without the RDMA device"
            );
        }
    }
}

/// Returns the cards that handle RoCE v2 and that the packets of an uplink come through: those of its interface, or of
/// the ports of the bridge that its tap is on. The network cards below a tunnel see other packets.
fn behind(sysfs: &Path, way: &WaySpec) -> Vec<Adapter> {
    let interfaces = sysfs.join("class/net");
    let first = match way {
        WaySpec::Interface(port) => Some(port.name.clone()),
        WaySpec::Tap(port) => name_of(interfaces.join(&port.name).join("master")),
        WaySpec::Tunnel(_) => None,
    };
    let (mut next, mut seen, mut found) = (Vec::from_iter(first), BTreeSet::new(), Vec::new());
    while let Some(name) = next.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let interface = interfaces.join(&name);
        // The ports of a bridge or a bond, and what a VLAN or a macvlan is on.
        let links = entries(&interface).into_iter();
        next.extend(links.filter_map(|link| Some(link.strip_prefix("lower_")?.to_owned())));
        found.extend(adapter(&interface.join("device"), name));
    }
    found
}

/// Returns the card in a directory of sysfs, if it handles RoCE v2.
fn adapter(card: &Path, interface: String) -> Option<Adapter> {
    let devices = card.join("infiniband");
    let device = entries(&devices).into_iter().find(|name| handles_roce(&devices.join(name)))?;
    let driver = name_of(card.join("driver")).unwrap_or_default();
    let bus = name_of(card.join("subsystem")).unwrap_or_default();
    let address = name_of(card.to_owned()).unwrap_or_default();
    Some(Adapter { interface, device, driver, handle: format!("{bus}/{address}") })
}

/// Returns whether the RDMA device in a directory of sysfs is one of a network card and handles RoCE v2.
fn handles_roce(device: &Path) -> bool {
    let ports = device.join("ports");
    let has_gids = |port: String| {
        let types = ports.join(port).join("gid_attrs/types");
        // An entry without a GID cannot be read.
        let mut kinds =
            entries(&types).into_iter().flat_map(|name| read_to_string(types.join(name)));
        kinds.any(|kind| kind.trim_end() == "RoCE v2")
    };
    !device.join("parent").exists() && entries(&ports).into_iter().any(has_gids)
}

/// Returns the names in a directory, in their order; nothing if there is no such directory.
fn entries(directory: &Path) -> Vec<String> {
    let names = read_dir(directory).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the name of what a link leads to.
fn name_of(link: PathBuf) -> Option<String> {
    Some(canonicalize(link).ok()?.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, remove_dir_all, write};
    use std::os::unix::fs::symlink;

    use super::super::spec::PortSpec;
    use super::*;

    /// A directory with the files of a sysfs.
    struct Sysfs(PathBuf);

    impl Sysfs {
        fn new(test: &str) -> Self {
            let name = format!("rdmad-sysfs-{test}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        /// Makes the interface of this name, of a card with this driver at this address.
        fn card(&self, name: &str, driver: &str, address: &str) {
            let card = self.0.join("devices/pci0000:00").join(address);
            create_dir_all(self.0.join("bus/pci/drivers").join(driver)).unwrap();
            create_dir_all(card.join("net").join(name)).unwrap();
            symlink("../..", card.join("net").join(name).join("device")).unwrap();
            symlink("../../../bus/pci", card.join("subsystem")).unwrap();
            symlink(format!("../../../bus/pci/drivers/{driver}"), card.join("driver")).unwrap();
            self.list(name, &format!("pci0000:00/{address}/net/{name}"));
        }

        /// Makes a virtual interface that is on these ones.
        fn upper(&self, name: &str, lower: &[&str]) {
            let interface = self.0.join("devices/virtual/net").join(name);
            create_dir_all(&interface).unwrap();
            self.list(name, &format!("virtual/net/{name}"));
            for lower in lower {
                let class = self.0.join("class/net");
                symlink(class.join(lower), interface.join(format!("lower_{lower}"))).unwrap();
            }
        }

        fn list(&self, name: &str, place: &str) {
            create_dir_all(self.0.join("class/net")).unwrap();
            symlink(format!("../../devices/{place}"), self.0.join("class/net").join(name)).unwrap();
        }

        /// Gives a card an RDMA device, whose second port has GIDs of these types. Returns its directory.
        fn device(&self, interface: &str, device: &str, types: &[&str]) -> PathBuf {
            let device =
                self.0.join("class/net").join(interface).join("device/infiniband").join(device);
            create_dir_all(device.join("ports/1/gid_attrs/types")).unwrap();
            let of_port = device.join("ports/2/gid_attrs/types");
            create_dir_all(&of_port).unwrap();
            // A directory cannot be read as a file, as an entry without a GID cannot.
            create_dir_all(of_port.join("0")).unwrap();
            for (index, kind) in types.iter().enumerate() {
                write(of_port.join((index + 1).to_string()), format!("{kind}\n")).unwrap();
            }
            device
        }

        /// Returns what is found behind an interface: interfaces and RDMA devices.
        fn behind(&self, interface: &str) -> Vec<(String, String)> {
            let found = behind(&self.0, &WaySpec::Interface(port(interface)));
            found.into_iter().map(|adapter| (adapter.interface, adapter.device)).collect()
        }
    }

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = remove_dir_all(&self.0);
        }
    }

    fn port(name: &str) -> PortSpec {
        PortSpec { name: name.to_owned(), trains: true }
    }

    const ROCE: [&str; 2] = ["IB/RoCE v1", "RoCE v2"];

    fn found(interface: &str, device: &str) -> (String, String) {
        (interface.to_owned(), device.to_owned())
    }

    #[test]
    fn a_card_that_handles_roce_is_found() {
        let sysfs = Sysfs::new("card");
        sysfs.card("eth0", "mlx5_core", "0000:3b:00.0");
        assert_eq!(sysfs.behind("eth0"), []);
        sysfs.device("eth0", "mlx5_0", &ROCE);
        let adapter = Adapter {
            interface: "eth0".to_owned(),
            device: "mlx5_0".to_owned(),
            driver: "mlx5_core".to_owned(),
            handle: "pci/0000:3b:00.0".to_owned(),
        };
        assert_eq!(behind(&sysfs.0, &WaySpec::Interface(port("eth0"))), [adapter]);
        assert_eq!(sysfs.behind("eth1"), []);
    }

    /// A card whose RoCE is switched off, iWARP and software devices keep no packets.
    #[test]
    fn other_rdma_devices_are_not_found() {
        let sysfs = Sysfs::new("others");
        sysfs.card("eth0", "mlx5_core", "0000:3b:00.0");
        sysfs.device("eth0", "mlx5_0", &[]);
        sysfs.device("eth0", "iwarp0", &["IB/RoCE v1"]);
        let rxe = sysfs.device("eth0", "rxe0", &ROCE);
        write(rxe.join("parent"), "eth0\n").unwrap();
        assert_eq!(sysfs.behind("eth0"), []);
    }

    #[test]
    fn cards_below_others_are_found() {
        let sysfs = Sysfs::new("below");
        for (index, name) in ["eth0", "eth1", "eth2"].into_iter().enumerate() {
            sysfs.card(name, "mlx5_core", &format!("0000:3b:00.{index}"));
        }
        sysfs.device("eth0", "mlx5_0", &ROCE);
        sysfs.device("eth2", "mlx5_2", &ROCE);
        sysfs.upper("bond0", &["eth0", "eth1"]);
        sysfs.upper("bond0.5", &["bond0"]);
        assert_eq!(sysfs.behind("bond0.5"), [found("eth0", "mlx5_0")]);
        // A tap is on a bridge; what is on the bridge besides counts.
        sysfs.upper("tap0", &[]);
        sysfs.upper("br0", &["tap0", "bond0.5", "eth2"]);
        let tap = WaySpec::Tap(port("tap0"));
        assert_eq!(behind(&sysfs.0, &tap), []);
        symlink("../br0", sysfs.0.join("class/net/tap0/master")).unwrap();
        let mut devices: Vec<_> = behind(&sysfs.0, &tap).into_iter().map(|of| of.device).collect();
        devices.sort();
        assert_eq!(devices, ["mlx5_0", "mlx5_2"]);
    }

    #[test]
    fn interfaces_on_each_other_have_an_end() {
        let sysfs = Sysfs::new("end");
        sysfs.upper("a", &["b"]);
        sysfs.upper("b", &["a"]);
        assert_eq!(sysfs.behind("a"), []);
    }
}
