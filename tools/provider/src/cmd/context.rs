// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Commands of contexts, the device and its port.

use super::message::Message;
use crate::{
    bindings::*,
    errno::{Errno, Result},
    libibverbs::*,
    object::Ref,
};
use core::mem;

/// Opens the context in the kernel. Returns the driver's description of it. The driver is told that the provider knows
/// the first version alone, which drivers of all versions take.
pub fn get(context: Ref<'_, ibv_context>) -> Result<virtio_rdma_uresp_alloc_ucontext> {
    let mut cmd = Message::<ibv_get_context, virtio_rdma_ureq_alloc_ucontext>::default();
    let mut resp =
        Message::<ib_uverbs_get_context_resp, virtio_rdma_uresp_alloc_ucontext>::default();
    // SAFETY: the buffers have the sizes given, and begin with the core's structures.
    Errno::check(unsafe {
        ibv_cmd_get_context(
            context.as_ptr(),
            (&raw mut cmd).cast(),
            cmd.len(true),
            (&raw mut resp).cast(),
            resp.len(true),
        )
    })?;
    Ok(resp.driver)
}

/// The driver's attributes of a command: one, which the kernel writes (rdma-core
/// libibverbs/cmd_ioctl.h).
#[repr(C)]
struct DriverAttr {
    buffer: ibv_command_buffer,
    attr: ib_uverbs_attr,
}

/// Asks the kernel for a context that another program opened, through its file. Returns the
/// driver's description of it.
pub fn query(context: Ref<'_, ibv_context>) -> Result<virtio_rdma_uresp_alloc_ucontext> {
    const {
        let attrs = mem::offset_of!(ibv_command_buffer, hdr.attrs);
        assert!(attrs == mem::offset_of!(DriverAttr, attr));
    };
    let mut resp = virtio_rdma_uresp_alloc_ucontext::default();
    let mut driver = DriverAttr {
        // SAFETY: the structure consists of integers and pointers.
        buffer: unsafe { mem::zeroed() },
        attr: ib_uverbs_attr {
            attr_id: VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP as u16,
            len: size_of_val(&resp) as u16,
            flags: UVERBS_ATTR_F_MANDATORY as u16,
            __bindgen_anon_1: ib_uverbs_attr__bindgen_ty_2 {
                data: (&raw mut resp).expose_provenance() as u64,
            },
            ..Default::default()
        },
    };
    driver.buffer.hdr.object_id = UVERBS_OBJECT_DEVICE as u16;
    driver.buffer.hdr.method_id = UVERBS_METHOD_QUERY_CONTEXT as u16;
    driver.buffer.uhw_in_idx = _UHW_NO_INDEX as u8;
    driver.buffer.uhw_out_idx = _UHW_NO_INDEX as u8;
    let all = &raw mut driver;
    // SAFETY: the buffer holds one attribute, and ends after it; the kernel
    // writes to `resp`, which is as long as the attribute says.
    Errno::check(unsafe {
        let attr = &raw mut (*all).attr;
        (*all).buffer.last_attr = attr.add(1);
        (*all).buffer.next_attr = attr.add(1);
        ibv_cmd_query_context(context.as_ptr(), all.cast())
    })?;
    Ok(resp)
}

/// Reads the device's attributes into the `size` bytes at `attr`. Returns the version of its firmware,
/// which the caller writes there as text.
///
/// # Safety
///
/// `input` is null or points to a valid structure; `attr` points to `size`
/// bytes that are the caller's to write.
pub unsafe fn query_device(
    context: Ref<'_, ibv_context>,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> Result<u64> {
    let mut resp = ib_uverbs_ex_query_device_resp::default();
    let mut len = size_of_val(&resp);
    let answer = &raw mut resp;
    // SAFETY: the caller passes `input`, `attr` and `size` as the command demands; the response
    // has the length given.
    Errno::check(unsafe {
        ibv_cmd_query_device_any(context.as_ptr(), input, attr, size, answer, &mut len)
    })?;
    Ok(resp.base.fw_ver)
}

/// Reads the attributes of a port.
///
/// # Safety
///
/// `attr` points to the attributes as the context's libibverbs knows them, which the caller may write. Releases
/// before 49 know fewer.
pub unsafe fn query_port(
    context: Ref<'_, ibv_context>,
    port: u8,
    attr: *mut ibv_port_attr,
) -> Result {
    let mut cmd = ibv_query_port::default();
    // SAFETY: `cmd` has the size given, and libibverbs writes as much to `attr` as it knows.
    Errno::check(unsafe {
        ibv_cmd_query_port(context.as_ptr(), port, attr, &mut cmd, size_of_val(&cmd))
    })
}

/// Reads the speed of a port, in units of 100 Mb/s.
pub fn query_port_speed(context: Ref<'_, ibv_context>, port: u32, speed: &mut u64) -> Result {
    // SAFETY: the context is live.
    Errno::check(unsafe { ibv_cmd_query_port_speed(context.as_ptr(), port, speed) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cmd::testbed::*, model::opened::description};
    use core::ptr;

    /// The driver's description of a context is returned as it is, and the command that opens one says what the
    /// provider knows.
    #[test]
    fn a_context_is_what_the_driver_says() {
        let said = virtio_rdma_uresp_alloc_ucontext {
            max_inline_data: 512,
            features: 0x1234_5678_9abc_def0,
            ..description(VIRTIO_RDMA_UDATA_PATH_RINGS)
        };
        let testbed = Testbed::new();
        testbed.kernel.answer(UVERBS_ATTR_UHW_OUT, said);
        testbed.kernel.answer(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 3u32);
        let got = get(testbed.context()).unwrap();
        assert_eq!(bytes(&got), bytes(&said));
        let command = testbed.kernel.take().remove(0);
        assert_eq!(command.name, Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT));
        assert_eq!(command.room[&UVERBS_ATTR_UHW_OUT], size_of_val(&said));
        let asked = virtio_rdma_ureq_alloc_ucontext { comp_mask: 0 };
        assert_eq!(command.input[&UVERBS_ATTR_UHW_IN], bytes(&asked));
        assert_eq!(command.input.len(), 1);
        // SAFETY: the context is live.
        assert_eq!(unsafe { (*testbed.opened.verbs()).num_comp_vectors }, 3);

        testbed.kernel.answer(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, said);
        testbed.kernel.answer(UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, 4u32);
        let got = query(testbed.context()).unwrap();
        assert_eq!(bytes(&got), bytes(&said));
        let command = testbed.kernel.take().remove(0);
        assert_eq!(command.name, Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT));
        assert_eq!(command.room[&VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP], size_of_val(&said));
        // A kernel that does not know the attribute refuses, and does not leave it zero.
        assert!(command.mandatory.contains(&VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP));
        assert!(command.input.is_empty() && command.is_without_driver());
        // SAFETY: the context is live.
        assert_eq!(unsafe { (*testbed.opened.verbs()).num_comp_vectors }, 4);
    }

    /// An older driver answers with fewer fields; the others are zero.
    #[test]
    fn a_shorter_answer_of_an_older_driver() {
        let testbed = Testbed::new();
        testbed.kernel.answer(UVERBS_ATTR_UHW_OUT, VIRTIO_RDMA_UDATA_PATH_RINGS);
        let got = get(testbed.context()).unwrap();
        assert_eq!(bytes(&got), bytes(&description(VIRTIO_RDMA_UDATA_PATH_RINGS)));
    }

    #[test]
    fn what_is_asked_of_device_and_port() {
        let testbed = Testbed::new();
        let mut port = ibv_port_attr::default();
        testbed.kernel.answer(
            UVERBS_ATTR_QUERY_PORT_RESP,
            ib_uverbs_query_port_resp_ex {
                legacy_resp: ib_uverbs_query_port_resp {
                    state: 4,
                    gid_tbl_len: 9,
                    ..Default::default()
                },
                ..Default::default()
            },
        );
        // SAFETY: the attributes are there.
        assert_eq!(unsafe { query_port(testbed.context(), 3, &mut port) }, Ok(()));
        let command = testbed.command(Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT));
        assert_eq!(command.handle(UVERBS_ATTR_QUERY_PORT_PORT_NUM), 3);
        assert_eq!((port.state, port.gid_tbl_len), (4, 9));

        let mut attr = ibv_device_attr_ex::default();
        let mut answer = ib_uverbs_ex_query_device_resp {
            response_length: size_of::<ib_uverbs_ex_query_device_resp>() as u32,
            ..Default::default()
        };
        answer.base.max_qp = 1234;
        answer.base.fw_ver = 5;
        testbed.kernel.answer(UVERBS_ATTR_CORE_OUT, answer);
        // SAFETY: the attributes are as long.
        let result = unsafe {
            query_device(testbed.context(), ptr::null(), &mut attr, size_of::<ibv_device_attr_ex>())
        };
        assert_eq!((result, attr.orig_attr.max_qp), (Ok(5), 1234));
        let number = IB_USER_VERBS_EX_CMD_QUERY_DEVICE | EXTENDED;
        assert_eq!(testbed.kernel.names(), [Write(number)]);
    }
}
