# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Writes values and structures of the ABIs as a Python module, with the structures as classes of ctypes."""

import ctypes
import re
import sys
import textwrap

import header
from header import BLOCK, DEFINE, ENUMERATOR, number

HEAD = '''# SPDX-License-Identifier: GPL-2.0
"""Made by tools/abi/layout from the headers. Do not edit, but run: tools/vm/enter tools/abi/layout --python > FILE

The device ABI and the user ABI of virtio-rdma, and what the tests use of the kernel's verbs ABI.

Names are those of the headers without VIRTIO_RDMA_; a structure is a class: struct virtio_rdma_cq_ring is CqRing, and
struct ib_uverbs_create_cq is IbUverbsCreateCq. bytes() of an object is what is exchanged; CqRing.consumer.offset is
where a field is. The fields of a union are also fields of the structure that has the union.
"""

import ctypes
from ctypes import c_int32 as s32, c_int64 as s64, c_uint8 as u8, c_uint16 as u16, c_uint32 as u32, c_uint64 as u64

be32, be64 = u32.__ctype_be__, u64.__ctype_be__


def union(**fields):
    """Returns a class for a union with these fields."""
    return type("union", (ctypes.LittleEndianUnion,), {"_fields_": list(fields.items())})


def struct(**fields):
    """Returns a class for a structure with these fields."""
    unions = [name for name, kind in fields.items() if issubclass(kind, ctypes.Union)]
    return type("struct", (ctypes.LittleEndianStructure,), {"_anonymous_": unions, "_fields_": list(fields.items())})

'''
PATH = "selftests/virtio_rdma/verbs/abi.py"
WIDTH = 120

# What the module has of the kernel's headers, which have more and grow.
KERNEL = ("<sys/ioctl.h>", "<rdma/ib_user_verbs.h>", "<rdma/ib_user_ioctl_verbs.h>", "<rdma/rdma_user_ioctl_cmds.h>",
          "<rdma/ib_user_ioctl_cmds.h>")
# Structures without ib_uverbs_, each behind those that it contains.
KERNEL_STRUCTURES = """
    cmd_hdr ex_cmd_hdr get_context get_context_resp create_comp_channel create_comp_channel_resp alloc_pd
    alloc_pd_resp global_route ah_attr create_ah create_ah_resp reg_mr reg_mr_resp rereg_mr rereg_mr_resp alloc_mw
    alloc_mw_resp dealloc_mw create_cq create_cq_resp ex_create_cq ex_create_cq_resp resize_cq resize_cq_resp
    poll_cq poll_cq_resp wc destroy_cq destroy_cq_resp create_qp create_qp_resp ex_create_qp ex_create_qp_resp
    qp_dest modify_qp ex_modify_qp ex_modify_qp_resp destroy_qp destroy_qp_resp sge send_wr recv_wr post_send
    post_send_resp create_srq create_xsrq create_srq_resp modify_srq destroy_srq destroy_srq_resp open_xrcd
    open_xrcd_resp close_xrcd query_device_resp odp_caps rss_caps tm_caps cq_moderation_caps ex_query_device
    ex_query_device_resp ioctl_hdr attr qp_cap buffer_desc"""
# Values, by how their names begin.
KERNEL_VALUES = {
    "IB_USER_VERBS_CMD_": """
        GET_CONTEXT CREATE_COMP_CHANNEL QUERY_DEVICE ALLOC_PD CREATE_AH REG_MR REREG_MR ALLOC_MW DEALLOC_MW CREATE_CQ
        RESIZE_CQ DESTROY_CQ POLL_CQ CREATE_QP MODIFY_QP DESTROY_QP POST_SEND POST_RECV CREATE_SRQ MODIFY_SRQ
        DESTROY_SRQ POST_SRQ_RECV OPEN_XRCD CLOSE_XRCD CREATE_XSRQ FLAG_EXTENDED""",
    "IB_UVERBS_": "SRQT_BASIC SRQT_XRC WR_RDMA_WRITE WR_SEND BUFFER_TYPE_DMABUF BUFFER_TYPE_VA",
    "UVERBS_OBJECT_": "DEVICE CQ QP SRQ MR",
    "UVERBS_METHOD_": "INVOKE_WRITE GET_CONTEXT CQ_CREATE QP_CREATE SRQ_CREATE REG_MR",
    "UVERBS_ATTR_": """
        F_MANDATORY UHW_IN UHW_OUT CORE_IN CORE_OUT WRITE_CMD
        GET_CONTEXT_NUM_COMP_VECTORS GET_CONTEXT_CORE_SUPPORT
        CREATE_CQ_HANDLE CREATE_CQ_CQE CREATE_CQ_USER_HANDLE CREATE_CQ_COMP_VECTOR CREATE_CQ_RESP_CQE
        CREATE_CQ_COMP_CHANNEL CREATE_CQ_BUFFER_VA CREATE_CQ_BUFFER_LENGTH CREATE_CQ_BUFFER_FD CREATE_CQ_BUFFER_OFFSET
        CREATE_CQ_BUF_UMEM CREATE_QP_BUF_UMEM CREATE_QP_RQ_BUF_UMEM CREATE_QP_SQ_BUF_UMEM
        CREATE_QP_HANDLE CREATE_QP_PD_HANDLE CREATE_QP_SEND_CQ_HANDLE CREATE_QP_RECV_CQ_HANDLE CREATE_QP_USER_HANDLE
        CREATE_QP_CAP CREATE_QP_TYPE CREATE_QP_RESP_CAP CREATE_QP_RESP_QP_NUM
        CREATE_SRQ_HANDLE CREATE_SRQ_PD_HANDLE CREATE_SRQ_USER_HANDLE CREATE_SRQ_MAX_WR CREATE_SRQ_MAX_SGE
        CREATE_SRQ_LIMIT CREATE_SRQ_TYPE CREATE_SRQ_RESP_MAX_WR CREATE_SRQ_RESP_MAX_SGE
        REG_MR_HANDLE REG_MR_PD_HANDLE REG_MR_IOVA REG_MR_ADDR REG_MR_LENGTH REG_MR_ACCESS_FLAGS REG_MR_RESP_LKEY
        REG_MR_RESP_RKEY""",
    "RDMA_": "VERBS_IOCTL",
}
KERNEL_HEXADECIMAL = ("IB_USER_VERBS_CMD_FLAG_EXTENDED", "RDMA_VERBS_IOCTL")


def class_name(structure):
    """Returns the class of a structure: RingCqe for virtio_rdma_ring_cqe."""
    return "".join(word.capitalize() for word in structure.removeprefix("virtio_rdma_").split("_"))


def type_of(field):
    """Returns the name and the type of a field."""
    name, _, count = field.name.rstrip("]").partition("[")
    kind = field.type.removeprefix("const ")
    if kind.startswith("struct "):
        kind = class_name(kind.removeprefix("struct "))
    else:
        kind = re.sub(r"^_*(?:le|u)(?=\d)", "u", kind).removeprefix("__")
    return name, f"{kind} * {count}" if count else kind


def members(fields):
    """Returns the arguments of struct() or union(), without flexible arrays."""
    found = []
    for place, field in enumerate(field for field in fields if field.size):
        name, kind = type_of(field)
        if field.fields:
            kind = f"{field.type}({', '.join(members(field.fields))})"
        found.append(f"{name or f'unnamed_{place}'}={kind}")
    return found


def structure(found):
    """Returns the lines that make the class of a structure."""
    start = f"{class_name(found.name)} = struct("
    # The type of an array stays in one line.
    text = ", ".join(members(found.fields)).replace(" * ", "\0*\0")
    lines = textwrap.wrap(f"{start}{text})", WIDTH, subsequent_indent=" " * len(start), break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def own_values(path):
    """Returns lines with the values of a header of this project: macros, then each enumeration."""
    text = header.text_of(path)
    lines = ["", *(f"{m['name']} = {number(m['value'])}" for m in DEFINE.finditer(text))]
    for block in BLOCK.finditer(text):
        if block["kind"] == "enum":
            lines += ["", f"# enum {block['name']}"]
            lines += [f"{m['name']} = {m['value']}" for m in ENUMERATOR.finditer(block["body"])]
    return [line.replace("VIRTIO_RDMA_", "") for line in lines]


def own_structures(path):
    """Returns the structures of a header of this project."""
    names = header.structures_of(path)
    found = header.layouts(f'"{path}"', names)
    return [found[name] for name in names]


def kernel_structures():
    """Returns the structures of the kernel's headers that the tests use."""
    names = [f"ib_uverbs_{name}" for name in KERNEL_STRUCTURES.split()]
    return list(header.layouts("\n#include ".join(KERNEL), names).values())


def kernel_values():
    """Returns lines with the values of the kernel's headers that the tests use."""
    found = header.values(KERNEL, [start + name for start, names in KERNEL_VALUES.items() for name in names.split()])
    return [f"{name} = {value:#x}" if name in KERNEL_HEXADECIMAL else f"{name} = {value}"
            for name, value in found.items()]


def placed(cls, path):
    """Returns the offset and the size of a field of a class, which is found by its full name."""
    offset = size = 0
    for name in path:
        descriptor = getattr(cls, name)
        offset, size = offset + descriptor.offset, descriptor.size
        cls = dict(cls._fields_).get(name)
    return offset, size


def check(text, structures):
    """Ends the program if a class of the module is not laid out as the compiler says."""
    classes = {}
    exec(compile(text, PATH, "exec"), classes)  # pylint: disable=exec-used
    for found in structures:
        cls = classes[class_name(found.name)]
        leaves = [leaf for leaf in found.leaves() if leaf.size]
        said = [(leaf.offset, leaf.size) for leaf in leaves]
        made = [placed(cls, leaf.name.partition("[")[0].split(".")) for leaf in leaves]
        if ctypes.sizeof(cls) != found.size or made != said:
            sys.exit(f"the class is not struct {found.name}: {made} is not {said}")


def render():
    """Returns the text of the module."""
    ours, users, kernels = own_structures(header.DEVICE), own_structures(header.USER), kernel_structures()
    lines = [HEAD, "# ---- <linux/virtio_rdma.h>", *own_values(header.DEVICE), ""]
    for found in ours:
        lines += structure(found)
    lines += ["", "# ---- <rdma/virtio_rdma-abi.h>", *own_values(header.USER), ""]
    for found in users:
        lines += structure(found)
    lines += ["", "# ---- the kernel's <rdma/ib_user_verbs.h> and <rdma/rdma_user_ioctl_cmds.h>", ""]
    lines += [*kernel_values(), ""]
    for found in kernels:
        lines += structure(found)
    text = "\n".join(lines) + "\n"
    check(text, ours + users + kernels)
    return text
