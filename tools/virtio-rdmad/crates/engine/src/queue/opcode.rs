// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The opcodes of send work requests, in a table: each message asks for several of their properties.

use abi::{
    VIRTIO_RDMA_WC_ATOMIC_WRITE, VIRTIO_RDMA_WC_BIND_MW, VIRTIO_RDMA_WC_COMP_SWAP,
    VIRTIO_RDMA_WC_FETCH_ADD, VIRTIO_RDMA_WC_FLUSH, VIRTIO_RDMA_WC_LOCAL_INV,
    VIRTIO_RDMA_WC_RDMA_READ, VIRTIO_RDMA_WC_RDMA_WRITE, VIRTIO_RDMA_WC_REG_MR,
    VIRTIO_RDMA_WC_SEND, VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD,
    VIRTIO_RDMA_WR_ATOMIC_WRITE, VIRTIO_RDMA_WR_BIND_MW, VIRTIO_RDMA_WR_FLUSH,
    VIRTIO_RDMA_WR_LOCAL_INV, VIRTIO_RDMA_WR_RDMA_READ, VIRTIO_RDMA_WR_RDMA_READ_WITH_INV,
    VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, VIRTIO_RDMA_WR_REG_MR,
    VIRTIO_RDMA_WR_SEND, VIRTIO_RDMA_WR_SEND_WITH_IMM, VIRTIO_RDMA_WR_SEND_WITH_INV,
};

use crate::base::qp_type::QpType;

/// The properties of an `enum virtio_rdma_wr_opcode`.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Opcode {
    /// The `enum virtio_rdma_wc_opcode` of its CQE.
    pub wc: u8,
    /// The types of the QPs that do it: one bit for each type, see [`bit`].
    kinds: u8,
    /// Whether it carries immediate data.
    pub has_immediate: bool,
    /// Whether it names a key to invalidate.
    pub invalidates: bool,
    /// Whether its data may be inline.
    pub may_be_inline: bool,
    /// Whether only an entry of a ring may have it.
    pub is_of_rings: bool,
}

/// The number of entries of the table, with the numbers in between that are no opcode.
const COUNT: usize = VIRTIO_RDMA_WR_REG_MR as usize + 1;

/// The table.
static OPCODES: [Opcode; COUNT] = table();

/// Returns the bit of a type of QPs.
const fn bit(kind: QpType) -> u8 {
    1 << kind as u8
}

/// The types of QPs that do a group of opcodes (IBA 9.4, table 38).
const RC: u8 = bit(QpType::Rc);
const RC_XRC: u8 = RC | bit(QpType::XrcIni);
const CONNECTED: u8 = RC_XRC | bit(QpType::Uc);
const ALL: u8 = CONNECTED | bit(QpType::Ud) | bit(QpType::Gsi);

impl Opcode {
    /// An opcode that no QP does. Its CQE is one of a SEND.
    const FOREIGN: Self = Self::new(VIRTIO_RDMA_WC_SEND, 0);

    const fn new(wc: u32, kinds: u8) -> Self {
        let (has_immediate, invalidates) = (false, false);
        let (may_be_inline, is_of_rings) = (false, false);
        let wc = wc as u8;
        Self { wc, kinds, has_immediate, invalidates, may_be_inline, is_of_rings }
    }

    /// Returns the opcode whose data may be inline.
    const fn inline(self) -> Self {
        Self { may_be_inline: true, ..self }
    }

    /// Returns the opcode with immediate data.
    const fn with_immediate(self) -> Self {
        Self { has_immediate: true, ..self }
    }

    /// Returns the opcode with a key to invalidate.
    const fn with_invalidate(self) -> Self {
        Self { invalidates: true, ..self }
    }

    /// Returns the opcode of rings alone.
    const fn of_rings(self) -> Self {
        Self { is_of_rings: true, ..self }
    }

    /// Returns the properties of an `enum virtio_rdma_wr_opcode`. An unknown number has those of [`Self::FOREIGN`].
    #[inline]
    pub fn find(opcode: u32) -> &'static Self {
        OPCODES.get(opcode as usize).unwrap_or(&Self::FOREIGN)
    }

    /// Returns whether QPs of a type do it.
    #[inline]
    pub fn is_done_by(&self, kind: QpType) -> bool {
        self.kinds & bit(kind) != 0
    }
}

const fn table() -> [Opcode; COUNT] {
    let send = Opcode::new(VIRTIO_RDMA_WC_SEND, ALL).inline();
    let write = Opcode::new(VIRTIO_RDMA_WC_RDMA_WRITE, CONNECTED).inline();
    let read = Opcode::new(VIRTIO_RDMA_WC_RDMA_READ, RC_XRC);
    let to_be_invalidated = Opcode { kinds: RC_XRC, ..send }.with_invalidate();
    let local_inv = Opcode::new(VIRTIO_RDMA_WC_LOCAL_INV, CONNECTED).with_invalidate();
    let bind_mw = Opcode::new(VIRTIO_RDMA_WC_BIND_MW, CONNECTED).of_rings();
    let mut table = [Opcode::FOREIGN; COUNT];
    table[VIRTIO_RDMA_WR_RDMA_WRITE as usize] = write;
    table[VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM as usize] = write.with_immediate();
    table[VIRTIO_RDMA_WR_SEND as usize] = send;
    table[VIRTIO_RDMA_WR_SEND_WITH_IMM as usize] = send.with_immediate();
    table[VIRTIO_RDMA_WR_SEND_WITH_INV as usize] = to_be_invalidated;
    table[VIRTIO_RDMA_WR_RDMA_READ as usize] = read;
    table[VIRTIO_RDMA_WR_RDMA_READ_WITH_INV as usize] = read.with_invalidate();
    table[VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP as usize] =
        Opcode::new(VIRTIO_RDMA_WC_COMP_SWAP, RC_XRC);
    table[VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD as usize] =
        Opcode::new(VIRTIO_RDMA_WC_FETCH_ADD, RC_XRC);
    table[VIRTIO_RDMA_WR_LOCAL_INV as usize] = local_inv;
    table[VIRTIO_RDMA_WR_BIND_MW as usize] = bind_mw;
    table[VIRTIO_RDMA_WR_FLUSH as usize] = Opcode::new(VIRTIO_RDMA_WC_FLUSH, RC).of_rings();
    table[VIRTIO_RDMA_WR_ATOMIC_WRITE as usize] =
        Opcode::new(VIRTIO_RDMA_WC_ATOMIC_WRITE, RC).of_rings();
    table[VIRTIO_RDMA_WR_REG_MR as usize] = Opcode::new(VIRTIO_RDMA_WC_REG_MR, CONNECTED);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of the types of QPs that do an opcode.
    fn done_by(opcode: u32) -> Vec<&'static str> {
        let opcode = Opcode::find(opcode);
        QpType::ALL
            .iter()
            .filter(|kind| opcode.is_done_by(**kind))
            .map(|kind| kind.name())
            .collect()
    }

    #[test]
    fn types_of_qps_do_what_the_specification_says() {
        let all = ["GSI", "RC", "UC", "UD", "XRC_INI"].as_slice();
        let connected = ["RC", "UC", "XRC_INI"].as_slice();
        let (reliable, rc) = (["RC", "XRC_INI"].as_slice(), ["RC"].as_slice());
        let known = [
            (VIRTIO_RDMA_WR_RDMA_WRITE, connected),
            (VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, connected),
            (VIRTIO_RDMA_WR_SEND, all),
            (VIRTIO_RDMA_WR_SEND_WITH_IMM, all),
            (VIRTIO_RDMA_WR_SEND_WITH_INV, reliable),
            (VIRTIO_RDMA_WR_RDMA_READ, reliable),
            (VIRTIO_RDMA_WR_RDMA_READ_WITH_INV, reliable),
            (VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP, reliable),
            (VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, reliable),
            (VIRTIO_RDMA_WR_LOCAL_INV, connected),
            (VIRTIO_RDMA_WR_BIND_MW, connected),
            (VIRTIO_RDMA_WR_FLUSH, rc),
            (VIRTIO_RDMA_WR_ATOMIC_WRITE, rc),
            (VIRTIO_RDMA_WR_REG_MR, connected),
        ];
        for number in (0..=0x40).chain([u32::MAX]) {
            let kinds = known.iter().find(|(opcode, _)| *opcode == number);
            assert_eq!(done_by(number), kinds.map_or(&[] as &[_], |known| known.1), "{number}");
        }
    }

    #[test]
    fn what_is_not_an_opcode_completes_as_a_send() {
        assert_eq!(u32::from(Opcode::find(u32::MAX).wc), VIRTIO_RDMA_WC_SEND);
        assert_eq!(u32::from(Opcode::find(10).wc), VIRTIO_RDMA_WC_SEND);
    }
}
