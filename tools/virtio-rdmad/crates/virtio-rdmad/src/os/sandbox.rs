// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Gives up what the process does not need once its sockets are open.
//!
//! Landlock takes away the whole file system. Another process removes the sockets when this one ends
//! ([`crate::os::remover`]); it may remove files next to them and do nothing else. Seccomp leaves each thread
//! the system calls of its job: workers get messages, map guest memory and wait; the main thread and
//! that of the control socket accept connections as well; those of switches do
//! that too, make an epoll instance, and look after the uplink: they bind its sockets or its tap once more, and look up
//! its routes.
//! No thread can open a file, make a socket,
//! start a program or make memory executable. A system call that is not allowed fails with EPERM and
//! does not end the process, because the devices of all guests would end with it.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use landlock::{
    Access, AccessFs, AccessNet, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, ABI,
};
use seccompiler::{
    apply_filter, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// The reason why the process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Landlock failed. A kernel without Landlock is no error.
    #[error("sandbox: landlock: {0} (--sandbox=off goes without)")]
    Landlock(#[from] RulesetError),
    /// The directory of a socket cannot be opened.
    #[error("sandbox: landlock: {0} (--sandbox=off goes without)")]
    Directory(#[from] landlock::PathFdError),
    /// Seccomp failed.
    #[error("sandbox: seccomp: {0} (--sandbox=off goes without)")]
    Seccomp(#[from] seccompiler::Error),
}

impl From<seccompiler::BackendError> for SandboxError {
    fn from(error: seccompiler::BackendError) -> Self {
        Self::Seccomp(error.into())
    }
}

/// System calls of every thread: for messages, waiting, memory, and the end of a thread and the process.
const COMMON: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_submit,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_ppoll,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_tgkill,
    libc::SYS_write,
    libc::SYS_writev,
];

/// System calls of the threads that accept connections.
const ACCEPT: &[i64] = &[
    libc::SYS_accept4,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_recvfrom,
    libc::SYS_setsockopt,
];

/// System calls of the threads that add guests, with those of threads that accept connections.
const ADD: &[i64] = &[libc::SYS_ftruncate, libc::SYS_memfd_create, libc::SYS_socketpair];

/// System calls of the threads of workers, which leave images of devices to another process, and look on which NUMA
/// nodes memory lies.
const WORK: &[i64] = &[libc::SYS_memfd_create, libc::SYS_move_pages];

/// System calls of the threads of switches, with those of threads that accept connections. They go on with an
/// interface that was made again, and look whether one has a carrier, which take these requests of ioctl, and connect a
/// socket of UDP to look up a route.
const SWITCH: &[i64] =
    &[libc::SYS_bind, libc::SYS_connect, libc::SYS_epoll_create1, libc::SYS_getsockname];
const SWITCH_REQUESTS: &[u64] = &[
    libc::SIOCGIFFLAGS,
    libc::SIOCGIFINDEX,
    libc::SIOCGIFNAME,
    libc::TUNGETIFF,
    libc::TUNSETIFF,
    libc::TUNSETOFFLOAD,
    libc::TUNSETVNETHDRSZ,
    libc::TUNSETVNETLE,
];

/// System calls of the process that removes the sockets.
const REMOVE: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

/// Index of the protection among the arguments of mmap and mprotect.
const PROTECTION: u8 = 2;
/// Indices of the process and of the nodes among the arguments of move_pages.
const PROCESS: u8 = 0;
const TARGETS: u8 = 3;
/// Index of the request among the arguments of ioctl.
const REQUEST: u8 = 1;

/// The filters of the threads.
#[derive(Clone, Debug)]
pub struct Filters {
    worker: BpfProgram,
    other: BpfProgram,
    switch: BpfProgram,
    remover: BpfProgram,
}

impl Filters {
    /// Compiles the filters for this machine.
    pub fn new() -> Result<Self, SandboxError> {
        Ok(Self {
            worker: compile(&[COMMON, WORK], &[])?,
            other: compile(&[COMMON, ACCEPT, ADD], &[])?,
            switch: compile(&[COMMON, ACCEPT, SWITCH], SWITCH_REQUESTS)?,
            remover: compile(&[COMMON, REMOVE], &[])?,
        })
    }

    /// Confines the calling thread to what a worker needs.
    pub fn confine_worker(&self) -> Result<(), SandboxError> {
        Ok(apply_filter(&self.worker)?)
    }

    /// Confines the calling thread to what the main thread and that of the control socket need.
    pub fn confine(&self) -> Result<(), SandboxError> {
        Ok(apply_filter(&self.other)?)
    }

    /// Confines the calling thread to what a switch needs.
    pub fn confine_switch(&self) -> Result<(), SandboxError> {
        Ok(apply_filter(&self.switch)?)
    }

    /// Confines the calling thread to what removing the sockets needs.
    pub fn confine_remover(&self) -> Result<(), SandboxError> {
        Ok(apply_filter(&self.remover)?)
    }
}

/// Returns a filter that allows these system calls, and these requests of ioctl.
fn compile(lists: &[&[i64]], requests: &[u64]) -> Result<BpfProgram, SandboxError> {
    let calls = lists.iter().copied().flatten();
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.map(|call| (*call, Vec::new())).collect();
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let executable = u64::from(libc::PROT_EXEC.unsigned_abs());
        let condition = SeccompCondition::new(
            PROTECTION,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::MaskedEq(executable),
            0,
        )?;
        rules.insert(call, vec![SeccompRule::new(vec![condition])?]);
    }
    // Without nodes, the call tells where pages are and moves none. Process 0 is this one.
    let is_zero = |argument, len| SeccompCondition::new(argument, len, SeccompCmpOp::Eq, 0);
    let of_this_process = is_zero(PROCESS, SeccompCmpArgLen::Dword)?;
    let no_targets = is_zero(TARGETS, SeccompCmpArgLen::Qword)?;
    if let Some(rule) = rules.get_mut(&libc::SYS_move_pages) {
        rule.push(SeccompRule::new(vec![of_this_process, no_targets])?);
    }
    let mut of_ioctl = Vec::new();
    for request in requests {
        // The kernel looks at 32 bits of it.
        let (len, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
        let condition = SeccompCondition::new(REQUEST, len, equal, *request)?;
        of_ioctl.push(SeccompRule::new(vec![condition])?);
    }
    if !of_ioctl.is_empty() {
        // Without a rule, all requests would be allowed.
        rules.insert(libc::SYS_ioctl, of_ioctl);
    }
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    Ok(SeccompFilter::new(rules, refused, SeccompAction::Allow, arch)?.try_into()?)
}

/// Takes the file system and TCP away from the calling thread and from threads that it starts. They may
/// still remove files in the directories of `removable`, and below these. Logs what the kernel cannot
/// enforce.
pub fn leave_file_system<'a>(
    removable: impl Iterator<Item = &'a Path>,
) -> Result<(), SandboxError> {
    let abi = ABI::V6;
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    let directory = |path: &'a Path| match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    for directory in removable.map(directory).collect::<HashSet<_>>() {
        let rule = PathBeneath::new(PathFd::new(directory)?, AccessFs::RemoveFile);
        ruleset = ruleset.add_rule(rule)?;
    }
    match ruleset.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => {}
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("sandbox: this kernel's landlock is old, and does a part only");
        }
        RulesetStatus::NotEnforced => {
            tracing::warn!("sandbox: this kernel has no landlock: seccomp alone confines it");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    /// Runs `f` in a thread of its own, because there is no way back.
    fn alone<R: Send>(f: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| scope.spawn(f).join().unwrap())
    }

    #[test]
    fn a_worker_opens_nothing() {
        let (one, other) = UnixStream::pair().unwrap();
        let memory = memory::GuestMemory::anonymous(&[(0, 1 << 16)]).unwrap();
        memory.write(0, &[1]).unwrap();
        let knows_nodes = memory.slice(0, 1).unwrap().node().is_some();
        alone(move || {
            Filters::new().unwrap().confine_worker().unwrap();
            let denied = |error: std::io::Error| error.kind() == ErrorKind::PermissionDenied;
            assert!(std::fs::File::open("/").is_err_and(denied));
            assert!(UnixStream::pair().is_err_and(denied));
            assert!(std::process::Command::new("true").status().is_err());
            // It still talks, and has memory.
            assert_eq!(rustix::io::write(&one, b"x"), Ok(1));
            assert_eq!(rustix::io::read(&other, &mut [0; 2]), Ok(1));
            drop(vec![1_u8; 64 << 20]);
            // It is told where memory lies, if this is told at all.
            memory.write(0, &[1]).unwrap();
            assert_eq!(memory.slice(0, 1).unwrap().node().is_some(), knows_nodes);
        });
    }

    #[test]
    fn a_switch_looks_up_routes_and_makes_no_socket() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        alone(move || {
            Filters::new().unwrap().confine_switch().unwrap();
            for port in [1, 2] {
                socket.connect(("127.0.0.1", port)).unwrap();
                assert!(rustix::net::sockopt::ip_mtu(&socket).unwrap() >= 1500);
            }
            let denied = |error: std::io::Error| error.kind() == ErrorKind::PermissionDenied;
            assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_err_and(denied));
            assert!(std::fs::File::open("/").is_err_and(denied));
        });
    }

    #[test]
    fn the_main_thread_accepts_and_the_remover_removes() {
        let directory = std::env::temp_dir().join(format!("rdmad-sandbox-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("a");
        let listener = UnixListener::bind(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        alone(|| {
            leave_file_system(std::iter::empty()).unwrap();
            Filters::new().unwrap().confine().unwrap();
            listener.accept().unwrap();
            assert!(std::fs::File::open(&path).is_err());
            assert!(std::fs::remove_file(&path).is_err());
        });
        alone(|| {
            leave_file_system(std::iter::once(path.as_path())).unwrap();
            Filters::new().unwrap().confine_remover().unwrap();
            assert!(listener.accept().is_err());
            assert!(std::fs::File::open(&path).is_err());
            std::fs::remove_file(&path).unwrap();
        });
        std::fs::remove_dir(directory).unwrap();
    }
}
