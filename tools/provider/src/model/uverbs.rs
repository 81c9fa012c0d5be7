// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A kernel for tests. It answers the commands of libibverbs, and shows which ones they were
//! (rdma-core kernel-headers/rdma/rdma_user_ioctl_cmds.h).
//!
//! The commands of a thread that has a [`Kernel`] reach that; those of other threads
//! reach ioctl(2).

use crate::bindings::*;
use core::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::{cell::RefCell, collections::BTreeMap, marker::PhantomData, mem, ptr, slice};

/// The name of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// A method of an object.
    Method(u32, u32),
    /// A command that write(2) carried in older kernels.
    Write(u32),
}

/// A command that the kernel received.
#[derive(Clone, Debug)]
pub struct Command {
    /// The name.
    pub name: Name,
    /// The bytes of the attributes that the program sent, by number.
    pub input: BTreeMap<u32, Vec<u8>>,
    /// The room of the attributes that the kernel answers, in bytes, by number.
    pub room: BTreeMap<u32, usize>,
    /// The attributes that a kernel must know; otherwise it refuses the command.
    pub mandatory: Vec<u32>,
}

impl Command {
    /// Returns the value of an attribute that the program sent.
    pub fn input<T>(&self, attr: u32) -> T {
        let bytes = &self.input[&attr];
        assert_eq!(bytes.len(), size_of::<T>(), "attribute {attr} of {:?}", self.name);
        // SAFETY: the attribute has as many bytes; the tests name types of integers.
        unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
    }

    /// Returns the handle of an object, or a number that is sent like a handle.
    pub fn handle(&self, attr: u32) -> u64 {
        self.input(attr)
    }

    /// Returns the part of a command that is the same for all drivers.
    pub fn core<T>(&self) -> T {
        self.input(UVERBS_ATTR_CORE_IN)
    }

    /// Returns whether neither the command nor its answer has a part of the driver.
    pub fn is_without_driver(&self) -> bool {
        !self.input.contains_key(&UVERBS_ATTR_UHW_IN)
            && !self.room.contains_key(&UVERBS_ATTR_UHW_OUT)
    }
}

/// The state of a thread's kernel.
#[derive(Default)]
struct State {
    commands: Vec<Command>,
    /// The answers to attributes of the next commands.
    answers: Vec<(u32, Vec<u8>)>,
    /// The number of commands that succeed before one fails, and the error of the command that
    /// fails.
    failure: Option<(u32, u32)>,
    handles: u32,
}

thread_local! {
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
}

/// The kernel of this thread.
pub struct Kernel(PhantomData<*mut ()>);

impl Kernel {
    /// Returns a kernel without objects.
    pub fn new() -> Self {
        STATE.set(Some(State { handles: FIRST_HANDLE, ..State::default() }));
        Self(PhantomData)
    }

    /// Makes the next command that has room for an attribute answer it.
    pub fn answer<T>(&self, attr: u32, value: T) {
        // SAFETY: the tests name types of integers without padding.
        let bytes = unsafe { slice::from_raw_parts((&raw const value).cast(), size_of::<T>()) };
        with(|state| state.answers.push((attr, bytes.to_vec())));
    }

    /// Makes the next command fail.
    pub fn fail(&self, errno: u32) {
        self.fail_after(0, errno);
    }

    /// Makes a command fail after as many that succeed.
    pub fn fail_after(&self, commands: u32, errno: u32) {
        with(|state| state.failure = Some((commands, errno)));
    }

    /// Returns the commands since the last call.
    pub fn take(&self) -> Vec<Command> {
        with(|state| mem::take(&mut state.commands))
    }

    /// Returns the names of the commands since the last call.
    pub fn names(&self) -> Vec<Name> {
        self.take().iter().map(|command| command.name).collect()
    }

    /// Returns the one command since the last call.
    pub fn one(&self) -> Command {
        let mut commands = self.take();
        assert_eq!(commands.len(), 1, "{commands:?}");
        commands.remove(0)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let state = STATE.take();
        assert!(
            state.is_some_and(|state| state.answers.is_empty()),
            "no command asked for an answer of the test"
        );
    }
}

/// The first handle that a kernel gives to an object; the next handles follow it.
pub const FIRST_HANDLE: u32 = 100;

/// Returns whether this thread has a kernel.
pub fn is_there() -> bool {
    STATE.with_borrow(Option::is_some)
}

fn with<T>(act: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(|state| act(state.as_mut().expect("the thread has a kernel")))
}

/// Returns the attributes of a method that the kernel answers, without those of a driver.
fn outputs(name: Name) -> &'static [u32] {
    const WRITE: &[u32] = &[UVERBS_ATTR_CORE_OUT];
    match name {
        Name::Write(_) => WRITE,
        Name::Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT) => {
            &[UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT]
        }
        Name::Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT) => &[
            UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
            UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT,
            VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP,
        ],
        Name::Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT) => {
            &[UVERBS_ATTR_QUERY_PORT_RESP]
        }
        Name::Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE) => {
            &[UVERBS_ATTR_CREATE_CQ_RESP_CQE]
        }
        Name::Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY) => &[UVERBS_ATTR_DESTROY_CQ_RESP],
        Name::Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE) => {
            &[UVERBS_ATTR_CREATE_QP_RESP_CAP, UVERBS_ATTR_CREATE_QP_RESP_QP_NUM]
        }
        Name::Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY) => &[UVERBS_ATTR_DESTROY_QP_RESP],
        Name::Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE) => &[
            UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR,
            UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE,
            UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM,
        ],
        Name::Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY) => {
            &[UVERBS_ATTR_DESTROY_SRQ_RESP]
        }
        Name::Method(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR) => &[
            UVERBS_ATTR_QUERY_MR_RESP_LKEY,
            UVERBS_ATTR_QUERY_MR_RESP_RKEY,
            UVERBS_ATTR_QUERY_MR_RESP_LENGTH,
            UVERBS_ATTR_QUERY_MR_RESP_IOVA,
        ],
        Name::Method(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR) => {
            &[UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY]
        }
        Name::Method(..) => &[],
    }
}

/// Returns whether the answer to a command begins with the handle of a new object.
fn makes_handle(name: Name) -> bool {
    matches!(
        name,
        Name::Write(
            IB_USER_VERBS_CMD_ALLOC_PD
                | IB_USER_VERBS_CMD_REG_MR
                | IB_USER_VERBS_CMD_ALLOC_MW
                | IB_USER_VERBS_CMD_CREATE_AH
                | IB_USER_VERBS_CMD_OPEN_XRCD
                | IB_USER_VERBS_CMD_OPEN_QP
        )
    )
}

/// Returns whether attribute 0 of a method is the handle of a new object.
fn makes_object(name: Name) -> bool {
    matches!(
        name,
        Name::Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE)
            | Name::Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE)
            | Name::Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE)
            | Name::Method(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR)
    )
}

/// Returns the attribute that asked for a value, which the kernel answers unless the test says
/// otherwise.
fn echo(name: Name, attr: u32) -> Option<u32> {
    match (name, attr) {
        (Name::Method(UVERBS_OBJECT_CQ, _), UVERBS_ATTR_CREATE_CQ_RESP_CQE) => {
            Some(UVERBS_ATTR_CREATE_CQ_CQE)
        }
        (Name::Method(UVERBS_OBJECT_QP, _), UVERBS_ATTR_CREATE_QP_RESP_CAP) => {
            Some(UVERBS_ATTR_CREATE_QP_CAP)
        }
        (Name::Method(UVERBS_OBJECT_SRQ, _), UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR) => {
            Some(UVERBS_ATTR_CREATE_SRQ_MAX_WR)
        }
        (Name::Method(UVERBS_OBJECT_SRQ, _), UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE) => {
            Some(UVERBS_ATTR_CREATE_SRQ_MAX_SGE)
        }
        _ => None,
    }
}

impl ib_uverbs_attr {
    fn data(&self) -> u64 {
        // SAFETY: both variants are integers.
        unsafe { self.__bindgen_anon_1.data }
    }

    fn pointer(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.data() as usize)
    }

    /// Returns the bytes of an attribute that the program sent.
    fn bytes(&self) -> Vec<u8> {
        let len = usize::from(self.len);
        if len > size_of::<u64>() {
            // SAFETY: libibverbs lends as many bytes.
            return unsafe { slice::from_raw_parts(self.pointer(), len) }.to_vec();
        }
        // A handle or a descriptor has no length.
        self.data().to_ne_bytes()[..if len == 0 { 8 } else { len }].to_vec()
    }
}

/// Returns the command that libibverbs sent.
fn command(header: &ib_uverbs_ioctl_hdr, attrs: &[ib_uverbs_attr]) -> Command {
    let mut name = Name::Method(header.object_id.into(), header.method_id.into());
    if name == Name::Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE) {
        let number = attrs.iter().find(|attr| u32::from(attr.attr_id) == UVERBS_ATTR_WRITE_CMD);
        name = Name::Write(number.expect("a command").data() as u32);
    }
    let mut command =
        Command { name, input: BTreeMap::new(), room: BTreeMap::new(), mandatory: vec![] };
    for attr in attrs {
        let id = attr.attr_id.into();
        if u32::from(attr.flags) & UVERBS_ATTR_F_MANDATORY != 0 {
            command.mandatory.push(id);
        }
        let repeated = if is_output(name, id) {
            command.room.insert(id, attr.len.into()).is_some()
        } else {
            command.input.insert(id, attr.bytes()).is_some()
        };
        assert!(!repeated, "attribute {id} twice");
    }
    command
}

fn is_output(name: Name, attr: u32) -> bool {
    attr == UVERBS_ATTR_UHW_OUT || outputs(name).contains(&attr)
}

/// Answers a command, or returns an error number.
fn execute(header: &ib_uverbs_ioctl_hdr, attrs: &mut [ib_uverbs_attr]) -> Result<(), u32> {
    let command = command(header, attrs);
    // libibverbs sends a command that is too short to find out whether the kernel knows write
    // commands.
    if command.input.len() == 1
        && matches!(command.name, Name::Write(IB_USER_VERBS_CMD_QUERY_DEVICE))
    {
        return Err(ENOSPC);
    }
    with(|state| {
        state.commands.push(command.clone());
        match &mut state.failure {
            Some((0, errno)) => {
                let errno = *errno;
                state.failure = None;
                return Err(errno);
            }
            Some((commands, _)) => *commands -= 1,
            None => {}
        }
        attrs.iter_mut().for_each(|attr| state.fill(&command, attr));
        Ok(())
    })
}

impl State {
    /// Answers an attribute, if it is one that the kernel answers.
    fn fill(&mut self, command: &Command, attr: &mut ib_uverbs_attr) {
        let id = u32::from(attr.attr_id);
        if id == 0 && makes_object(command.name) {
            attr.__bindgen_anon_1.data = self.handle().into();
            return;
        }
        if !is_output(command.name, id) {
            return;
        }
        let answer = match self.answers.iter().position(|(of, _)| *of == id) {
            Some(at) => self.answers.remove(at).1,
            None if id == UVERBS_ATTR_CORE_OUT && makes_handle(command.name) => {
                self.handle().to_ne_bytes().to_vec()
            }
            None => echo(command.name, id).map_or(vec![], |of| command.input[&of].clone()),
        };
        let room = usize::from(attr.len);
        assert!(answer.len() <= room, "{} bytes for {room}", answer.len());
        // SAFETY: libibverbs lends as much room.
        unsafe {
            attr.pointer().write_bytes(0, room);
            ptr::copy_nonoverlapping(answer.as_ptr(), attr.pointer(), answer.len());
        }
    }

    fn handle(&mut self) -> u32 {
        self.handles += 1;
        self.handles - 1
    }
}

/// RDMA_VERBS_IOCTL.
const VERBS_IOCTL: c_ulong = 3 << 30 | (size_of::<ib_uverbs_ioctl_hdr>() as c_ulong) << 16 | 0x1b01;

/// Stands for the function of the C library, which libibverbs calls.
///
/// # Safety
///
/// As ioctl(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if request != VERBS_IOCTL || !is_there() {
        // SAFETY: the caller passes what ioctl(2) demands.
        return unsafe { real_ioctl()(fd, request, argument) };
    }
    let header = argument.cast::<ib_uverbs_ioctl_hdr>();
    // SAFETY: libibverbs passes a header and, after it, as many attributes.
    let (header, attrs) = unsafe {
        let first = header.byte_add(size_of::<ib_uverbs_ioctl_hdr>()).cast::<ib_uverbs_attr>();
        (&*header, slice::from_raw_parts_mut(first, (*header).num_attrs.into()))
    };
    let expected = size_of_val(header) + size_of_val(attrs);
    assert_eq!(usize::from(header.length), expected);
    match execute(header, attrs) {
        Ok(()) => 0,
        Err(errno) => {
            // SAFETY: the function has no preconditions.
            unsafe { *__errno_location() = errno as c_int };
            -1
        }
    }
}

type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;

/// Returns the function of the C library.
fn real_ioctl() -> Ioctl {
    unsafe extern "C" {
        fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    const NAME: &CStr = c"ioctl";
    // RTLD_NEXT is all ones.
    let next = ptr::without_provenance_mut(usize::MAX);
    // SAFETY: the C library has the function; its variable arguments are passed as this type says.
    unsafe { mem::transmute::<*mut c_void, Ioctl>(dlsym(next, NAME.as_ptr())) }
}
