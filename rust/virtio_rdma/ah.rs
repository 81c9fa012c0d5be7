// SPDX-License-Identifier: GPL-2.0

//! Address handles. The driver keeps them to itself, because they are created and
//! destroyed in atomic context. Each datagram carries its address to the device.

#![deny(unsafe_code)]

use crate::{
    bindings,
    hca::Hca,
    ib,
    wire, //
};
use kernel::{
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
};

/// An address handle.
pub(crate) struct Ah {
    av: wire::Av,
    /// Whether a MAD was posted to it that a device that has failed never sends.
    has_lost_mad: Atomic<bool>,
}

impl Ah {
    /// Returns the address as a work request carries it.
    pub(crate) fn av(&self) -> wire::Av {
        self.av
    }

    /// Notes that a MAD is lost that was posted to it. Returns whether one was lost before. Any context.
    pub(crate) fn loses_mad(&self) -> bool {
        self.has_lost_mad.xchg(true, Relaxed)
    }
}

/// Packs SL, traffic class and flow label into one word, as `struct virtio_rdma_av` has them.
fn pack_flow(sl: u8, traffic_class: u8, flow_label: u32) -> u32 {
    u32::from(sl & 0xf) << 28 | u32::from(traffic_class) << 20 | flow_label & 0xf_ffff
}

impl ib::AddressHandle<Hca> for Ah {
    fn create(
        pd: &ib::Pd<Hca>,
        attr: &ib::AhAttr<'_>,
        udata: Option<&ib::Udata<'_>>,
    ) -> Result<Self> {
        let raw = attr.raw();
        let grh = &raw.grh;
        let this = Self {
            av: wire::Av {
                port: raw.port_num.to_le(),
                pdn: pd.number().to_le(),
                sl_tclass_flowlabel: pack_flow(raw.sl, grh.traffic_class, grh.flow_label).to_le(),
                dgid: attr.dgid(),
                gid_index: grh.sgid_index,
                static_rate: raw.static_rate,
                hop_limit: grh.hop_limit,
                dmac: attr.dmac(),
                reserved: [0; 7],
            },
            has_lost_mad: Atomic::new(false),
        };
        if let Some(udata) = udata {
            udata.respond(&bindings::virtio_rdma_uresp_create_ah {
                av: wire::av_bytes(&this.av),
                reserved_2c: 0,
            })?;
        }
        Ok(this)
    }

    fn query(&self, attr: &mut bindings::rdma_ah_attr) {
        let flow = u32::from_le(self.av.sl_tclass_flowlabel);

        ib::AhAttr::write(attr, self.av.dgid, self.av.dmac);
        attr.port_num = u32::from_le(self.av.port);
        attr.sl = (flow >> 28) as u8;
        attr.static_rate = self.av.static_rate;
        attr.grh.flow_label = flow & 0xf_ffff;
        attr.grh.traffic_class = (flow >> 20) as u8;
        attr.grh.sgid_index = self.av.gid_index;
        attr.grh.hop_limit = self.av.hop_limit;
    }
}

/// Returns the address of a connection, for MODIFY_QP.
pub(crate) fn to_wire(attr: &ib::AhAttr<'_>) -> wire::AhAttr {
    let raw = attr.raw();

    wire::AhAttr {
        grh: bindings::virtio_rdma_global_route {
            dgid: attr.dgid(),
            flow_label: raw.grh.flow_label.to_le(),
            sgid_index: raw.grh.sgid_index,
            hop_limit: raw.grh.hop_limit,
            traffic_class: raw.grh.traffic_class,
            reserved_17: 0,
        },
        sl: raw.sl,
        static_rate: raw.static_rate,
        port_num: raw.port_num as u8,
        ah_flags: bindings::VIRTIO_RDMA_AH_GRH as u8,
        dmac: attr.dmac(),
        reserved_22: [0; 6],
    }
}

/// Writes the address of a connection, as QUERY_QP returned it, to the attributes of the core.
pub(crate) fn from_wire(wire: &wire::AhAttr, attr: &mut bindings::rdma_ah_attr) {
    ib::AhAttr::write(attr, wire.grh.dgid, wire.dmac);
    attr.port_num = u32::from(wire.port_num);
    attr.sl = wire.sl;
    attr.static_rate = wire.static_rate;
    attr.grh.flow_label = u32::from_le(wire.grh.flow_label);
    attr.grh.sgid_index = wire.grh.sgid_index;
    attr.grh.hop_limit = wire.grh.hop_limit;
    attr.grh.traffic_class = wire.grh.traffic_class;
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_ah)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn flow_is_packed() {
        assert_eq!(pack_flow(0xf, 0, 0), 0xf000_0000);
        assert_eq!(pack_flow(0, 0xff, 0), 0x0ff0_0000);
        assert_eq!(pack_flow(0, 0, 0xf_ffff), 0x000f_ffff);
        // Bits beyond the width of a member do not get into another member.
        assert_eq!(pack_flow(0xf0, 0, 0xfff0_0000), 0);
    }

    #[test]
    fn address_knows_that_it_has_lost_a_mad() {
        let ah = Ah {
            av: wire::Av::zeroed(),
            has_lost_mad: Atomic::new(false),
        };
        assert!(!ah.loses_mad());
        assert!(ah.loses_mad());
    }

    #[test]
    fn address_of_connection_comes_back() {
        let mut attr = bindings::rdma_ah_attr::default();
        ib::AhAttr::write(&mut attr, [7; 16], [1, 2, 3, 4, 5, 6]);
        attr.port_num = 1;
        attr.sl = 3;
        attr.static_rate = 2;
        attr.grh.flow_label = 0x1_2345;
        attr.grh.sgid_index = 4;
        attr.grh.hop_limit = 64;
        attr.grh.traffic_class = 0x20;
        let Some(address) = ib::AhAttr::new(&attr) else {
            assert!(false);
            return;
        };
        let wire = to_wire(&address);
        assert_eq!(u32::from_le(wire.grh.flow_label), 0x1_2345);
        let mut back = bindings::rdma_ah_attr::default();
        from_wire(&wire, &mut back);
        let Some(again) = ib::AhAttr::new(&back) else {
            assert!(false);
            return;
        };
        assert_eq!(again.dgid(), [7; 16]);
        assert_eq!(again.dmac(), [1, 2, 3, 4, 5, 6]);
        assert_eq!((back.sl, back.static_rate, back.port_num), (3, 2, 1));
        assert_eq!((back.grh.sgid_index, back.grh.hop_limit), (4, 64));
        assert_eq!(
            (back.grh.flow_label, back.grh.traffic_class),
            (0x1_2345, 0x20)
        );
    }

    #[test]
    fn address_without_grh_is_refused() {
        let mut attr = bindings::rdma_ah_attr::default();
        assert!(ib::AhAttr::new(&attr).is_none());
        ib::AhAttr::write(&mut attr, [0; 16], [0; 6]);
        attr.ah_flags = 0;
        assert!(ib::AhAttr::new(&attr).is_none());
    }
}
