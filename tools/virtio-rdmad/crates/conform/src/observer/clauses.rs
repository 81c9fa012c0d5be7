// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The clauses that an observer judges, and the others.

/// The clauses that the observer judges, with what has to happen for that.
pub const JUDGED: &[(&str, &str)] = &[
    ("V-TERM-03", "the driver wrote nothing that has reserved members"),
    ("V-TERM-05", "the driver sent no command"),
    ("V-TERM-07", "the driver agreed on no features"),
    ("V-FEAT-01", "the driver agreed on no features"),
    ("V-FEAT-02", "the device offers more than VIRTIO_RDMA_F_RINGS, or no work request completed"),
    ("V-FEAT-04", "the driver agreed on no features"),
    ("V-FEAT-05", "the driver agreed on no features"),
    ("V-FEAT-06", "the driver did not accept VIRTIO_RDMA_F_RINGS, and was offered VIRTIO_RDMA_F_VIRTQUEUES"),
    ("V-FEAT-09", "VIRTIO_F_ORDER_PLATFORM was not agreed on, or no work request completed"),
    ("V-CFG-01", "the transport does not show what the driver reads, or it read nothing"),
    ("V-CFG-13", "the driver created no QP and no SRQ"),
    ("V-INIT-01", "the transport does not show what the driver does, or it set up no virtqueue"),
    ("V-INIT-02", "the device did not start"),
    (
        "V-RST-01",
        "the transport does not show the status, or the driver did not go on after a reset",
    ),
    ("V-MR-01", "the driver registered no memory"),
    ("V-MR-02", "the driver registered no memory"),
    ("V-MR-03", "the driver registered no memory"),
    ("V-MR-04", "the driver registered no memory"),
    ("V-MR-05", "the driver registered no memory"),
    ("V-MR-08", "the memory of the guest did not change while there were MRs"),
    ("V-PORT-01", "the driver added no GID"),
    ("V-RING-02", "the device did not start with rings"),
    ("V-RING-03", "the driver made no buffer available"),
    ("V-RING-05", "the driver made no buffer available"),
    ("V-RING-06", "the driver set up no control queue"),
    ("V-RING-10", "the driver made no ring"),
    ("V-RING-11", "the driver created no QP and no SRQ"),
    ("V-RING-12", "the driver created no QP and no SRQ"),
    ("V-RING-13", "the driver created no QP and no SRQ"),
    ("V-RING-14", "the driver created no QP and no SRQ"),
    ("V-RING-15", "the driver created no QP with two rings"),
    ("V-RING-16", "the driver made no ring"),
    ("V-RING-17", "the driver made no ring"),
    ("V-RING-18", "the memory of the guest did not change while there were rings"),
    ("V-RING-19", "the driver created no CQ"),
    ("V-RING-40", "nothing was posted"),
    ("V-RING-41", "no QP that had been used was led back to RESET"),
    ("V-RING-42", "no QP that had been used was led back to RESET"),
    ("V-RING-50", "nothing was posted to a ring whose wake word was set"),
    ("V-RING-51", "there was no doorbell"),
    ("V-WQE-01", "nothing was posted"),
    ("V-WQE-05", "nothing was posted"),
    ("V-CQ-02", "no CQE was taken"),
    ("V-CQ-23", "the transport does not show of what the driver notifies, or no completion event came"),
    ("V-CQ-31", "no CQ was resized"),
    ("V-CQ-32", "no CQ was resized"),
    ("V-QP-01", "no send was posted"),
    ("V-QP-02", "no receive was posted"),
    ("V-GSI-01", "the GSI got no Q_Key"),
    ("V-EVT-01", "no buffer came back to the event queue"),
    ("V-SRQ-01", "VIRTIO_RDMA_F_SRQ was agreed on, or the driver created no QP"),
    ("V-SRQ-05", "nothing was posted to an SRQ"),
    ("V-SRQ-10", "no SRQ was resized"),
    ("V-SRQ-11", "nothing was posted to an SRQ that was resized"),
    ("V-FRMR-02", "no REG_MR was posted"),
    (
        "V-VQ-01",
        "VIRTIO_RDMA_F_VIRTQUEUES was not agreed on, or the device does not offer VIRTIO_F_EVENT_IDX",
    ),
    ("V-VQ-05", "the device did not start with VIRTIO_RDMA_F_VIRTQUEUES"),
    ("V-VQ-08", "no object ended with VIRTIO_RDMA_F_VIRTQUEUES"),
    ("V-VQ-09", "there was no CQ with VIRTIO_RDMA_F_VIRTQUEUES"),
];

/// The clauses that are neither judged nor provoked: those that show in the guest alone, and permissions.
pub const ELSEWHERE: &str = "V-TERM-01 V-TERM-02 V-TERM-04 V-TERM-06 V-MEM-01 V-MEM-02 V-FEAT-03 V-FEAT-07 \
    V-FEAT-08 V-FEAT-10 V-CFG-04 V-CFG-14 V-CFG-15 V-INIT-03 V-INIT-04 V-INIT-05 V-INIT-06 V-INIT-07 \
    V-RST-02 V-RST-03 V-FAIL-01 V-FAIL-04 V-FAIL-07 V-FAIL-09 V-CTRL-02 V-CTRL-04 V-MR-06 V-MR-07 \
    V-RING-01 V-RING-07 V-RING-20 V-RING-30 V-RING-31 V-RING-32 V-RING-33 V-RING-34 V-RING-35 V-RING-36 \
    V-RING-37 V-RING-38 V-RING-52 V-RING-53 V-RING-54 V-RING-55 V-RING-60 V-WQE-10 V-WQE-15 V-WQE-16 \
    V-CQ-01 V-CQ-03 V-CQ-04 V-CQ-10 V-CQ-11 V-CQ-20 V-CQ-21 V-CQ-22 V-CQ-30 V-CQ-33 V-QP-03 \
    V-QP-04 V-QP-05 V-RC-01 V-UD-01 V-UD-02 V-SRQ-06 V-XRC-01 V-XRC-02 V-XRC-03 V-FRMR-01 V-VLAN-01 \
    V-VQ-02 V-VQ-03 V-VQ-04 V-VQ-06 V-VQ-07 V-VQ-10 V-VQ-11 V-VQ-12";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::super::provoke;
    use super::*;

    /// Returns the clauses for drivers that the text has.
    fn of_the_text() -> BTreeSet<String> {
        let chapters = "../../../../Documentation/specification";
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(chapters);
        let is_clause = regex::Regex::new(r"(?m)^(?:\*\*|\| )(V-[A-Z]+-\d+)").unwrap();
        let mut found = BTreeSet::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
            found.extend(is_clause.captures_iter(&text).map(|clause| clause[1].to_owned()));
        }
        found
    }

    /// More than one provocation may be about a clause, and one that a device that only watches judges as well.
    #[test]
    fn each_clause_for_drivers_is_judged_or_elsewhere() {
        let judged: BTreeSet<&str> = JUDGED.iter().map(|(clause, _)| *clause).collect();
        assert_eq!(judged.len(), JUDGED.len());
        let provoked = provoke::ALL.iter().flat_map(|what| what.clauses).copied();
        let here: BTreeSet<&str> = judged.into_iter().chain(provoked).collect();
        let all: Vec<&str> = here.into_iter().chain(ELSEWHERE.split(' ')).collect();
        let once: BTreeSet<String> = all.iter().map(|clause| (*clause).to_owned()).collect();
        assert_eq!(all.len(), once.len());
        assert_eq!(once, of_the_text());
    }
}
