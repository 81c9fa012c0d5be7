// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Protection domains (IBA 10.2.3) and parent domains (ibv_alloc_parent_domain(3)).
//!
//! A parent domain is a protection domain under another name, which says how
//! the objects that are created with it are locked and where their memory comes
//! from. The kernel does not know it.
#![forbid(unsafe_code)]

use crate::{
    barriers::Barriers,
    bindings::{ibv_context, ibv_pd},
    causes::{Cause, cause},
    cmd,
    errno::Result,
    lock::Threads,
    log::Refuse,
    object::{Blank, Extended, Object, Owned, Ref},
    ring::Allocator,
    td::Td,
    users::{Hold, Users},
};

/// A PD: `struct ibv_pd` and the provider's private data.
pub type Pd = Object<ibv_pd>;

impl Extended for ibv_pd {
    type Private = PdPrivate;
}

/// The private data of a PD.
pub struct PdPrivate {
    /// Counts the parent domains of a PD, or the objects that have memory of a parent
    /// domain.
    users: Users,
    /// The parent domain, if the PD is one.
    parent: Option<Parent>,
}

/// The state of a parent domain.
struct Parent {
    threads: Threads,
    allocator: Option<Allocator>,
    _pd: Hold,
    _td: Option<Hold>,
}

/// The number of threads that use an object, which decides how it is locked, the source of its
/// memory, and the barriers of its device. Keeps the parent domain whose memory functions the object
/// uses.
pub struct Domain {
    /// The number of threads that use the object at a time.
    pub threads: Threads,
    /// The program's memory functions.
    pub allocator: Option<Allocator>,
    /// The barriers that the device needs.
    pub barriers: Barriers,
    _hold: Option<Hold>,
}

impl Domain {
    /// The domain of objects without a parent domain.
    pub const NONE: Self = Self {
        threads: Threads::MANY,
        allocator: None,
        barriers: Barriers::PROCESSORS,
        _hold: None,
    };

    /// Returns the domain of an object that is created with a PD.
    pub fn of(pd: Ref<'_, Pd>) -> Self {
        let PdPrivate { users, parent } = pd.private();
        parent.as_ref().map_or(Self::NONE, |parent| Self {
            threads: parent.threads,
            allocator: parent.allocator,
            _hold: parent.allocator.map(|_| Hold::new(users)),
            ..Self::NONE
        })
    }

    /// Returns the domain for an object of a device that needs these barriers.
    pub fn with(self, barriers: Barriers) -> Self {
        Self { barriers, ..self }
    }

    /// Returns the domain of an object that has no memory.
    pub fn without_memory(self) -> Self {
        Self { threads: self.threads, ..Self::NONE }
    }

    /// Returns the domain of an object that can only be created with a parent domain.
    ///
    /// # Errors
    ///
    /// EINVAL for a PD that is not a parent domain.
    pub fn of_parent(pd: Ref<'_, Pd>) -> Result<Self> {
        if pd.private().parent.is_none() {
            return Err(pd.verbs().refuse(cause!(EINVAL, "it is not a parent domain")));
        }
        Ok(Self::of(pd))
    }
}

/// Allocates a PD: ibv_alloc_pd(3).
///
/// # Errors
///
/// ENOMEM; the kernel's.
pub fn alloc(context: Ref<'_, ibv_context>) -> Result<Owned<Pd>> {
    let (pd, users) = (Blank::<ibv_pd>::new()?, Users::new()?);
    cmd::pd::alloc(context, pd.verbs())?;
    Ok(pd.finish(PdPrivate { users, parent: None }))
}

/// Imports the PD that has a handle in the kernel: ibv_import_pd(3). If there is no such PD, the
/// verbs that use it fail.
///
/// # Errors
///
/// ENOMEM.
pub fn import(context: Ref<'_, ibv_context>, handle: u32) -> Result<Owned<Pd>> {
    let (pd, users) = (Blank::<ibv_pd>::new()?, Users::new()?);
    pd.verbs().import(context, handle);
    Ok(pd.finish(PdPrivate { users, parent: None }))
}

/// Allocates a parent domain: ibv_alloc_parent_domain(3). As many threads as `td` says use the
/// objects of a thread domain. `allocator` returns the memory functions for the new domain.
///
/// # Errors
///
/// EINVAL for a parent domain as the PD; ENOMEM; those of `allocator`.
pub fn alloc_parent(
    pd: Ref<'_, Pd>,
    td: Option<(Ref<'_, Td>, Threads)>,
    allocator: impl FnOnce(Ref<'_, ibv_pd>) -> Result<Option<Allocator>, Cause>,
) -> Result<Owned<Pd>> {
    let PdPrivate { users, parent: None } = pd.private() else {
        return Err(pd.verbs().refuse(cause!(EINVAL, "it is a parent domain already")));
    };
    let domain = Blank::<ibv_pd>::new()?;
    domain.verbs().alias(pd.verbs());
    let parent = Parent {
        threads: td.map_or(Threads::MANY, |(_, threads)| threads),
        allocator: allocator(domain.verbs()).map_err(|cause| pd.verbs().refuse(cause))?,
        _pd: Hold::new(users),
        _td: td.map(|(td, _)| Hold::new(&td.private().users)),
    };
    Ok(domain.finish(PdPrivate { users: Users::new()?, parent: Some(parent) }))
}

/// Deallocates a PD: ibv_dealloc_pd(3).
///
/// # Errors
///
/// EBUSY if a parent domain uses it, or an object has memory of it; the kernel's.
pub fn dealloc(pd: Ref<'_, Pd>) -> Result {
    let PdPrivate { users, parent } = pd.private();
    if users.any() {
        return Err(pd.verbs().refuse(cause!(EBUSY, "a parent domain or a ring uses it")));
    }
    if parent.is_some() { Ok(()) } else { cmd::pd::dealloc(pd.verbs()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::{
        bindings::{EBUSY, ENOMEM, UVERBS_ATTR_DESTROY_PD_HANDLE},
        model::{
            freed, objects,
            opened::Opened,
            uverbs::{FIRST_HANDLE, Kernel},
        },
        ring::tests::allocator,
    };

    /// ibv_unimport_pd(3) cannot fail, so the PD may be freed before its parent domain.
    #[test]
    fn a_parent_domain_outlives_the_pd_that_was_imported() {
        let context = objects::context();
        let pd = import(context.as_ref().verbs(), 7).unwrap();
        let parent = alloc_parent(pd.as_ref(), None, |_| Ok(None)).unwrap();
        drop(pd);
        assert_eq!(dealloc(parent.as_ref()), Ok(()));
        drop(parent);
        assert!(freed::is_intact());
    }

    /// An object whose memory came from a parent domain keeps that domain, and other objects do not.
    /// A PD that is not a parent domain has no memory functions.
    #[test]
    fn objects_with_memory_keep_the_domain() {
        let context = objects::context();
        let pd = import(context.as_ref().verbs(), 7).unwrap();
        let plain = Domain::of(pd.as_ref());
        assert!(plain.allocator.is_none() && !pd.as_ref().private().users.any());
        assert_eq!(Domain::of_parent(pd.as_ref()).err(), Some(Errno::EINVAL));
        let parent = alloc_parent(pd.as_ref(), None, |_| Ok(Some(allocator()))).unwrap();
        let domains = [Domain::of(parent.as_ref()), Domain::of_parent(parent.as_ref()).unwrap()];
        assert!(domains.iter().all(|domain| domain.allocator.is_some()));
        for domain in domains {
            assert_eq!(dealloc(parent.as_ref()), Err(Errno::EBUSY));
            drop(domain);
        }
        let without = Domain::of(parent.as_ref()).without_memory();
        assert!(without.allocator.is_none());
        assert_eq!(dealloc(parent.as_ref()), Ok(()));
        drop((without, parent));
        assert!(!pd.as_ref().private().users.any());
    }

    /// A domain may be deallocated as soon as the last domain that uses it is, in any order.
    #[test]
    fn several_domains_of_one_pd() {
        let context = objects::context();
        let pd = import(context.as_ref().verbs(), 7).unwrap();
        let td = crate::td::alloc(context.as_ref().verbs()).unwrap();
        let threads = Some((td.as_ref(), Threads::MANY));
        let new = || alloc_parent(pd.as_ref(), threads, |_| Ok(None)).unwrap();
        let mut parents = vec![new(), new(), new()];
        for at in [1, 1, 0] {
            assert_eq!(dealloc(pd.as_ref()), Err(Errno::EBUSY));
            assert_eq!(crate::td::dealloc(td.as_ref()), Err(Errno::EBUSY));
            drop(parents.remove(at));
        }
        assert!(!pd.as_ref().private().users.any());
        assert_eq!(crate::td::dealloc(td.as_ref()), Ok(()));
    }

    /// A PD has the handle that the kernel gave it, and stays if the kernel does not deallocate it.
    #[test]
    fn a_pd_of_the_kernel() {
        let kernel = Kernel::new();
        let opened = Opened::with_rings(&kernel);
        let context = opened.context();
        kernel.fail(ENOMEM);
        assert_eq!(alloc(context).err(), Some(Errno::ENOMEM));
        let pd = alloc(context).unwrap();
        kernel.take();
        kernel.fail(EBUSY);
        assert_eq!(dealloc(pd.as_ref()), Err(Errno::EBUSY));
        assert_eq!(dealloc(pd.as_ref()), Ok(()));
        for command in kernel.take() {
            let handle = command.handle(UVERBS_ATTR_DESTROY_PD_HANDLE);
            assert_eq!(handle, FIRST_HANDLE.into());
        }
        // No command deallocates a parent domain, or a PD that was imported.
        let imported = import(context, 7).unwrap();
        let parent = alloc_parent(imported.as_ref(), None, |_| Ok(None)).unwrap();
        assert_eq!(dealloc(parent.as_ref()), Ok(()));
        drop((parent, imported));
        assert!(kernel.take().is_empty());
    }

    /// IBA 10.2.3: a PD that objects use is not deallocated.
    #[test]
    fn what_is_used_is_busy() {
        let context = objects::context();
        let pd = import(context.as_ref().verbs(), 7).unwrap();
        let td = crate::td::alloc(context.as_ref().verbs()).unwrap();
        let threads = Some((td.as_ref(), Threads::MANY));
        let parent = alloc_parent(pd.as_ref(), threads, |_| Ok(None)).unwrap();
        assert_eq!(dealloc(pd.as_ref()), Err(Errno::EBUSY));
        assert_eq!(crate::td::dealloc(td.as_ref()), Err(Errno::EBUSY));
        assert_eq!(alloc_parent(parent.as_ref(), None, |_| Ok(None)).err(), Some(Errno::EINVAL));
        let refused = alloc_parent(pd.as_ref(), threads, |_| Err(cause!(EINVAL, "a test")));
        assert_eq!(refused.err(), Some(Errno::EINVAL));
        // A domain without memory functions is not kept by its objects.
        let domain = Domain::of(parent.as_ref());
        assert_eq!(dealloc(parent.as_ref()), Ok(()));
        drop((domain, parent));
        assert!(!pd.as_ref().private().users.any());
        assert_eq!(crate::td::dealloc(td.as_ref()), Ok(()));
    }
}
