// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guests of the process: who they are, who comes and who goes.
//!
//! A guest has an index while it is there, by which the threads name it. A guest without a VMM may leave, and another
//! one gets its index then.

use std::collections::HashMap;
use std::io::Error;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use engine::{DeviceConfig, Fabric, FabricConfig};
use memory::Policy;
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;

use crate::events::Events;
use crate::guest::{Guest, Link};
use crate::options::GuestSpec;
use crate::socket::Socket;
use crate::worker_handle::WorkerHandle;

/// Most guests of a process.
pub const MAX_GUESTS: usize = 1024;

/// Why a guest cannot come.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum AddError {
    /// Another guest has its name.
    #[error("two guests have the name \"{0}\"")]
    Name(String),
    /// Another guest of its network has its MAC address.
    #[error("two guests of network \"{0}\" have the same MAC address")]
    Mac(String),
    /// There are as many guests as there can be.
    #[error("there are {MAX_GUESTS} guests, which is the most")]
    TooMany,
}

/// The guests.
pub struct Guests {
    slots: RwLock<Vec<Option<Arc<Guest>>>>,
    /// The networks that have guests, or had some, by name.
    fabrics: Mutex<HashMap<String, Arc<Fabric>>>,
    workers: Arc<[WorkerHandle]>,
    events: Arc<Events>,
    /// An eventfd, written to when a guest has come or gone, or is served no longer.
    changes: OwnedFd,
}

impl Guests {
    /// Makes a process without guests, whose workers serve those that come. These networks are there already.
    pub fn new(
        fabrics: HashMap<String, Arc<Fabric>>,
        workers: Arc<[WorkerHandle]>,
        events: Arc<Events>,
    ) -> Result<Self, Errno> {
        let changes = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (slots, fabrics) = (RwLock::default(), Mutex::new(fabrics));
        Ok(Self { slots, fabrics, workers, events, changes })
    }

    /// Returns an eventfd that is readable when a guest has come or gone, or is served no longer. The main thread
    /// waits for it.
    pub fn changes(&self) -> &OwnedFd {
        &self.changes
    }

    /// Returns the guests that are there, in the order of their indices.
    pub fn all(&self) -> Vec<Arc<Guest>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().flatten().cloned().collect()
    }

    /// Returns the guest with this index.
    pub fn get(&self, index: u32) -> Option<Arc<Guest>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.get(index as usize)?.clone()
    }

    /// Adds a guest, whose VMM connects to this socket, and which may have this memory.
    pub fn add(
        &self,
        spec: GuestSpec,
        socket: Socket,
        memory: Policy,
    ) -> Result<Arc<Guest>, AddError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        check(&spec, slots.iter().flatten())?;
        let at = slots.iter().position(Option::is_none).unwrap_or(slots.len());
        if at >= MAX_GUESTS {
            return Err(AddError::TooMany);
        }
        let index = u32::try_from(at).map_err(|_| AddError::TooMany)?;
        let guest = Arc::new(self.make(spec, index, socket, memory));
        if at == slots.len() {
            slots.push(None);
        }
        slots[at] = Some(guest.clone());
        drop(slots);
        self.note_change();
        Ok(guest)
    }

    fn make(&self, spec: GuestSpec, index: u32, socket: Socket, memory: Policy) -> Guest {
        let (name, workers) = (spec.name.clone(), self.workers.clone());
        self.workers.iter().for_each(|worker| worker.cover(index));
        let link = Arc::new(Link::new(workers, index, name.clone(), self.events.clone()));
        let device = self.fabric(&spec.network).add_device(DeviceConfig {
            name,
            mac: spec.mac,
            addresses: spec.addresses.clone(),
            limits: spec.limits.clone(),
            rings: spec.rings,
            wake: link.clone(),
        });
        let memory = Policy { any_file: spec.any_file, ..memory };
        Guest { spec, index, device, link, rings: AtomicBool::new(false), memory, socket }
    }

    /// Returns the fabric of a network, which may be a new one.
    fn fabric(&self, network: &str) -> Arc<Fabric> {
        let mut fabrics = self.fabrics.lock().unwrap_or_else(PoisonError::into_inner);
        let make =
            || Fabric::new(FabricConfig { name: network.to_owned(), ..FabricConfig::default() });
        fabrics.entry(network.to_owned()).or_insert_with(make).clone()
    }

    /// Accepts the VMM of the guest with this index, if one waits and the guest has none, and gives the guest to the
    /// worker that has the fewest guests.
    pub fn accept(&self, index: u32) -> Result<(), Error> {
        // A guest does not leave meanwhile.
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let Some(Some(guest)) = slots.get(index as usize) else { return Ok(()) };
        if guest.link.worker().is_some() {
            return Ok(());
        }
        let Some(stream) = guest.socket.accept()? else { return Ok(()) };
        let least = self.workers.iter().enumerate().min_by_key(|(_, worker)| worker.guests());
        if let Some((worker, handle)) = least {
            guest.link.set_worker(Some(worker));
            handle.serve(guest.index, stream);
        }
        Ok(())
    }

    /// Has the main thread look at the guests. Any thread may call this.
    pub fn note_change(&self) {
        // If the counter is full, the main thread has not seen an earlier event yet, and will look.
        let _ = rustix::io::write(&self.changes, &1_u64.to_ne_bytes());
    }
}

/// Checks that a guest has neither the name nor the MAC address of another one.
fn check<'a>(
    spec: &GuestSpec,
    others: impl Iterator<Item = &'a Arc<Guest>>,
) -> Result<(), AddError> {
    for other in others.map(|guest| &guest.spec) {
        if other.name == spec.name {
            return Err(AddError::Name(spec.name.clone()));
        }
        if other.network == spec.network && other.mac.is_some() && other.mac == spec.mac {
            return Err(AddError::Mac(spec.network.clone()));
        }
    }
    Ok(())
}
