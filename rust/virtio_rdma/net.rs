// SPDX-License-Identifier: GPL-2.0

//! Abstractions for network interfaces: what pairing an RDMA device with one
//! needs to know.
//!
//! C header: [`include/linux/netdevice.h`](srctree/include/linux/netdevice.h)

use crate::{
    bindings,
    dma::device_as_raw, //
};
use core::pin::Pin;
use kernel::{
    container_of,
    device,
    error::to_result,
    prelude::*,
    types::Opaque, //
};

/// A `struct net_device`.
///
/// # Invariants
///
/// A reference to a [`NetDevice`] is one to a valid `struct net_device`.
#[repr(transparent)]
pub(crate) struct NetDevice(Opaque<bindings::net_device>);

impl NetDevice {
    /// Returns the C structure. It also identifies the interface while that is registered.
    pub(crate) fn as_raw(&self) -> *mut bindings::net_device {
        self.0.get()
    }

    /// Returns the interface behind a pointer, unless it is null.
    ///
    /// # Safety
    ///
    /// `raw` must be null or valid for `'a`.
    pub(crate) unsafe fn from_raw<'a>(raw: *mut bindings::net_device) -> Option<&'a Self> {
        // SAFETY: The caller promises that `raw` is null or valid for `'a`; the type is a transparent wrapper.
        unsafe { raw.cast::<Self>().as_ref() }
    }

    /// Returns the MAC address, if this is an Ethernet interface that `ibdev` may be paired with: it stands for itself
    /// (it is not on top of another one, whose address it may have), and is in the network namespace of `ibdev`, or
    /// belongs to a device, in whatever namespace. The RTNL must be held.
    ///
    /// # Safety
    ///
    /// `ibdev` must be valid.
    pub(crate) unsafe fn own_mac(&self, ibdev: *mut bindings::ib_device) -> Option<[u8; 6]> {
        let mut mac = [0; 6];
        // SAFETY: By the type invariants the interface is valid; `mac` has room for an address. The caller promises
        // that `ibdev` is valid.
        unsafe { bindings::virtio_rdma_netdev_own_mac(self.as_raw(), ibdev, mac.as_mut_ptr()) }
            .then_some(mac)
    }

    /// Returns whether an interface that is reported to be unregistered only moves to another network namespace.
    fn is_moving(&self) -> bool {
        // SAFETY: By the type invariants the interface is valid.
        unsafe { bindings::virtio_rdma_netdev_is_moving(self.as_raw()) }
    }

    /// Returns whether the interface is another PCI function of the slot that `dev` is in, or a virtio
    /// device on one.
    pub(crate) fn is_pci_sibling(&self, dev: &device::Device) -> bool {
        // SAFETY: By the type invariants the interface is valid, and so is `dev`.
        unsafe { bindings::virtio_rdma_netdev_is_pci_sibling(self.as_raw(), device_as_raw(dev)) }
    }

    /// Returns the state of an RDMA port over this interface, `enum ib_port_state`.
    pub(crate) fn port_state(&self) -> u32 {
        // SAFETY: By the type invariants the interface is valid.
        unsafe { bindings::virtio_rdma_netdev_port_state(self.as_raw()) }
    }

    /// Returns the MTU of an RDMA port over this interface, `enum ib_mtu`.
    pub(crate) fn port_mtu(&self) -> u32 {
        // SAFETY: By the type invariants the interface is valid.
        unsafe { bindings::virtio_rdma_netdev_port_mtu(self.as_raw()) }
    }
}

/// A change of a network interface.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The interface was registered, came up, or has another address.
    Present,
    /// The interface is about to be removed. One that moves to another network namespace is not.
    Gone,
}

/// Receives the events of all network interfaces, one at a time, with the RTNL held. It may sleep.
pub(crate) trait Listener: Send + Sync + 'static {
    /// Called when something happened to `netdev`.
    fn netdev_event(&self, event: Event, netdev: &NetDevice);
}

/// The registration of a [`Listener`], which first hears of all interfaces that exist.
#[pin_data(PinnedDrop)]
pub(crate) struct Notifier<L: Listener> {
    listener: L,
    #[pin]
    block: Opaque<bindings::notifier_block>,
}

// SAFETY: A `Listener` is `Send`. Only the notifier chain uses the block, and any thread may
// unregister it.
unsafe impl<L: Listener> Send for Notifier<L> {}
// SAFETY: No operation is possible through a shared reference, and a `Listener` is `Sync`.
unsafe impl<L: Listener> Sync for Notifier<L> {}

impl<L: Listener> Notifier<L> {
    /// Registers `listener`. May sleep; takes the RTNL.
    pub(crate) fn new(listener: L) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            listener,
            block <- Opaque::try_ffi_init(|slot: *mut bindings::notifier_block| {
                // SAFETY: `slot` is valid for writes, and stays where it is until `drop`. The chain
                // may call before this returns: `call` looks only at `listener`, which is initialised
                // because it is the field before this one. If this fails, the core has taken the
                // block out.
                unsafe {
                    slot.write(bindings::notifier_block {
                        notifier_call: Some(Self::call),
                        ..Default::default()
                    });
                    to_result(bindings::register_netdevice_notifier(slot))
                }
            }),
        })
    }

    /// Passes an event of the notifier chain on to the listener.
    ///
    /// # Safety
    ///
    /// Only the notifier chain may call it.
    unsafe extern "C" fn call(
        block: *mut bindings::notifier_block,
        event: c_ulong,
        info: *mut c_void,
    ) -> c_int {
        let event = match event as u32 {
            bindings::netdev_cmd_NETDEV_REGISTER
            | bindings::netdev_cmd_NETDEV_UP
            | bindings::netdev_cmd_NETDEV_CHANGEADDR => Event::Present,
            bindings::netdev_cmd_NETDEV_UNREGISTER => Event::Gone,
            _ => return bindings::NOTIFY_DONE as c_int,
        };
        // SAFETY: The chain calls with a registered block, that of a `Notifier` that is there until
        // it is unregistered, and with the information of an interface that is valid meanwhile.
        unsafe {
            let this = container_of!(Opaque::cast_from(block), Self, block);
            let netdev = NetDevice::from_raw(bindings::virtio_rdma_notifier_netdev(info));
            if let Some(netdev) = netdev.filter(|it| event != Event::Gone || !it.is_moving()) {
                (*this).listener.netdev_event(event, netdev);
            }
        }
        bindings::NOTIFY_DONE as c_int
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Notifier<L> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: The block is registered, and the chain does not call it after this. Unregistering
        // fails only for a block that is not registered.
        unsafe { bindings::unregister_netdevice_notifier(self.block.get()) };
    }
}
