// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad metrics`: prints what a running process reports as OpenMetrics text, for the textfile collector of
//! Prometheus's node_exporter or whatever else reads that.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Error;
use std::io::Write;

use engine::Counter;
use network::nic::NicCounter;
use network::uplink::UplinkCounter;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue};
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::call::ask_summary;
use super::options::MetricsOptions;
use crate::control::report::{
    GuestReport, HistogramReport, LimitsReport, QpCountReport, Report, WorkerReport,
};

/// The names and values of labels.
type Labels<'a> = Vec<(&'static str, &'a str)>;

/// Asks the process behind the control socket and prints its answer.
pub fn print(options: &MetricsOptions) -> Result<(), Box<dyn std::error::Error>> {
    let report = ask_summary(&options.running.control)?;
    let text = text(report)?;
    // Whoever reads the output may stop before its end.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

fn text(report: Report) -> Result<String, Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics(report)));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// The metrics of a report.
#[derive(Debug)]
struct Metrics(Report);

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        self.process(&mut encoder)?;
        self.workers(&mut encoder)?;
        self.guests(&mut encoder)?;
        self.objects(&mut encoder)?;
        self.counters(&mut encoder)
    }
}

impl Metrics {
    fn process(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let Report { version, memory_losses, log_lines_left_out, .. } = &self.0;
        let help = "The running virtio-rdmad";
        // The textfile collector of node_exporter, which reads an older format, refuses the type "info".
        measure(encoder, "info", help, [(vec![("version", version.as_str())], 1)])?;
        let help = "How many times memory of a guest was lost";
        count(encoder, "memory_losses", help, None, [(Labels::new(), *memory_losses)])?;
        let help = "Lines about guests that the log left out";
        count(encoder, "log_lines_left_out", help, None, [(Labels::new(), *log_lines_left_out)])
    }

    fn workers(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let numbers: Vec<_> = (0..self.0.workers.len()).map(|index| index.to_string()).collect();
        let workers = || numbers.iter().map(String::as_str).zip(&self.0.workers);
        let times = workers().flat_map(|(index, worker)| {
            let times = [
                ("work", worker.work_seconds),
                ("poll", worker.poll_seconds),
                ("wait", worker.wait_seconds),
                ("sleep", worker.sleep_seconds),
            ];
            times.map(|(doing, time)| (vec![("worker", index), ("doing", doing)], time))
        });
        let help = "Time that a worker works, polls without finding work, waits for a processor, or sleeps";
        count(encoder, "worker_time", help, Some(&Unit::Seconds), times)?;
        let rounds = workers().map(|(index, worker)| (vec![("worker", index)], worker.rounds));
        count(encoder, "worker_rounds", "Rounds over all guests of a worker", None, rounds)?;
        let sleeps = workers().map(|(index, worker)| (vec![("worker", index)], worker.sleeps));
        count(
            encoder,
            "worker_sleeps",
            "How many times a worker went to sleep or napped",
            None,
            sleeps,
        )?;
        let guests = workers().map(|(index, worker)| (vec![("worker", index)], worker.guests));
        measure(encoder, "worker_guests", "Guests that a worker serves", guests)?;
        let histograms = |which: fn(&WorkerReport) -> &HistogramReport| {
            workers().map(move |(index, worker)| (vec![("worker", index)], which(worker)))
        };
        let help = "How long rounds with work of a worker took, and waited for a processor";
        time(encoder, "worker_round", help, histograms(|worker| &worker.worked_rounds))?;
        let help = "How long turns with work of guests took, and waited for a processor";
        time(encoder, "worker_turn", help, histograms(|worker| &worker.turns))
    }

    fn guests(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let connected = self.of_guests().map(|(labels, guest)| (labels, guest.connected.into()));
        let help = "Whether the VMM of a guest is connected";
        measure(encoder, "guest_connected", help, connected)?;
        let started = self.of_guests().map(|(labels, guest)| (labels, guest.started.into()));
        measure(encoder, "guest_started", "Whether the driver of a guest has started", started)?;
        let refused = self.of_guests().map(|(labels, guest)| (labels, guest.refused_vmms));
        let help = "VMMs that were refused because the guest had one";
        count(encoder, "guest_refused_vmms", help, None, refused)?;
        let work = self.of_guests().map(|(labels, guest)| (labels, guest.work_seconds));
        let help = "Processor time of a worker that a guest has taken";
        count(encoder, "guest_work", help, Some(&Unit::Seconds), work)
    }

    /// Returns the guests, and the labels that name them.
    fn of_guests(&self) -> impl Iterator<Item = (Labels<'_>, &GuestReport)> {
        self.0.guests.iter().map(|guest| {
            (vec![("guest", guest.name.as_str()), ("network", guest.network.as_str())], guest)
        })
    }

    fn objects(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let objects = self.of_guests().flat_map(|(labels, guest)| {
            let counts = [
                ("pd", guest.pds),
                ("mr", guest.mrs),
                ("mw", guest.mws),
                ("cq", guest.cqs),
                ("srq", guest.srq_count),
                ("mcast_group", guest.groups),
            ];
            counts.map(|(kind, count)| ([&labels[..], &[("kind", kind)]].concat(), count))
        });
        measure(encoder, "guest_objects", "Objects that a guest has, but QPs", objects)?;
        let limits = self.of_guests().flat_map(|(labels, guest)| {
            let LimitsReport { qps, cqs, srqs, mrs, mws, pds, groups, .. } = guest.limits;
            let limits = [
                ("pd", pds),
                ("mr", mrs),
                ("mw", mws),
                ("cq", cqs),
                ("srq", srqs),
                ("qp", qps),
                ("mcast_group", groups),
            ];
            limits.map(|(kind, limit)| {
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                ([&labels[..], &[("kind", kind)]].concat(), limit)
            })
        });
        measure(encoder, "guest_limits", "Objects that a guest may have", limits)?;
        let bytes = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let memory = self.of_guests().map(|(labels, guest)| (labels, bytes(guest.memory)));
        let help = "Bytes of memory that the MRs of a guest cover";
        measure(encoder, "guest_registered_bytes", help, memory)?;
        let limits = self
            .of_guests()
            .filter_map(|(labels, guest)| Some((labels, bytes(guest.limits.memory?))));
        let help = "Bytes of memory that the MRs of a guest may cover, if that has a limit";
        measure(encoder, "guest_registered_bytes_limit", help, limits)?;
        let qps = self.of_guests().flat_map(|(labels, guest)| {
            guest.qp_counts.iter().map(move |QpCountReport { service, state, count }| {
                ([&labels[..], &[("type", service.as_str()), ("state", state)]].concat(), *count)
            })
        });
        measure(encoder, "guest_qps", "QPs that a guest has, of a type and in a state", qps)
    }

    /// Encodes the counters of guests, of their network interfaces, and of uplinks, a family for each.
    fn counters(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let device: Vec<_> =
            self.of_guests().map(|(labels, guest)| (labels, &guest.counters)).collect();
        families(encoder, "guest", help_of_device, &device)?;
        let nic: Vec<_> = self.of_guests().map(|(labels, guest)| (labels, &guest.nic)).collect();
        families(encoder, "nic", help_of_nic, &nic)?;
        let uplinks = self
            .0
            .uplinks
            .iter()
            .map(|uplink| (vec![("network", uplink.network.as_str())], &uplink.counters));
        families(encoder, "uplink", help_of_uplink, &uplinks.collect::<Vec<_>>())
    }
}

fn help_of_device(name: &str) -> Option<&'static str> {
    Counter::ALL.iter().find(|counter| counter.name() == name).map(|counter| counter.help())
}

fn help_of_nic(name: &str) -> Option<&'static str> {
    NicCounter::ALL.iter().find(|counter| counter.name() == name).map(|counter| counter.help())
}

fn help_of_uplink(name: &str) -> Option<&'static str> {
    UplinkCounter::ALL.iter().find(|counter| counter.name() == name).map(|counter| counter.help())
}

/// Encodes a family for each counter that at least one of some objects has.
fn families(
    encoder: &mut DescriptorEncoder<'_>,
    prefix: &str,
    help: fn(&str) -> Option<&'static str>,
    things: &[(Labels<'_>, &BTreeMap<String, u64>)],
) -> Result<(), Error> {
    let names: BTreeSet<_> = things.iter().flat_map(|(_, counters)| counters.keys()).collect();
    for name in names {
        let values = things.iter().filter_map(|(labels, counters)| {
            counters.get(name).map(|value| (labels.clone(), *value))
        });
        // A newer process may have counters that this program does not know.
        let help = help(name).unwrap_or("A counter of a newer version").trim_end_matches('.');
        count(encoder, &format!("{prefix}_{name}"), help, None, values)?;
    }
    Ok(())
}

/// Encodes a family of counters.
fn count<'a, V: EncodeCounterValue>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    values: impl IntoIterator<Item = (Labels<'a>, V)>,
) -> Result<(), Error> {
    let name = format!("virtio_rdma_{name}");
    let mut family = encoder.encode_descriptor(&name, help, unit, MetricType::Counter)?;
    for (labels, value) in values {
        let exemplar: Option<&Exemplar<Labels<'_>, f64>> = None;
        family.encode_family(&labels)?.encode_counter(&value, exemplar)?;
    }
    Ok(())
}

/// Encodes a family of histograms of times.
fn time<'a>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (Labels<'a>, &'a HistogramReport)>,
) -> Result<(), Error> {
    let name = format!("virtio_rdma_{name}");
    let unit = Some(&Unit::Seconds);
    let mut family = encoder.encode_descriptor(&name, help, unit, MetricType::Histogram)?;
    for (labels, HistogramReport { sum_seconds, buckets }) in values {
        if buckets.is_empty() {
            // An older process has no histograms.
            continue;
        }
        let count = buckets.iter().map(|bucket| bucket.count).sum();
        let buckets = buckets
            .iter()
            .map(|bucket| (bucket.up_to_seconds.unwrap_or(f64::INFINITY), bucket.count));
        let buckets: Vec<_> = buckets.collect();
        let exemplars: Option<&HashMap<usize, Exemplar<Labels<'_>, f64>>> = None;
        family.encode_family(&labels)?.encode_histogram(
            *sum_seconds,
            count,
            &buckets,
            exemplars,
        )?;
    }
    Ok(())
}

/// Encodes a family of gauges.
fn measure<'a>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (Labels<'a>, usize)>,
) -> Result<(), Error> {
    let name = format!("virtio_rdma_{name}");
    let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        family.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_part_of_a_report_is_there() {
        let report = json!({
            "version": "1.2", "memory_losses": 3,
            "workers": [{ "guests": 1, "work_seconds": 1.5, "rounds": 7, "sleeps": 2,
                "turns": { "sum_seconds": 0.25, "buckets": [{ "up_to_seconds": 0.125, "count": 3 }, { "count": 1 }] } }],
            "guests": [
                { "name": "g\"1", "network": "n", "connected": true, "refused_vmms": 8, "started": false, "pds": 1, "mrs": 2, "limits": { "qps": 9 },
                  "work_seconds": 2.5,
                  "qp_counts": [{ "type": "GSI", "state": "RTS", "count": 1 },
                                { "type": "RC", "state": "RTS", "count": 2 }],
                  "srq_count": 6,
                  "counters": { "timeouts": 4 }, "nic": { "rx_frames": 5 } },
                { "name": "g2", "network": "n", "counters": { "timeouts": 0 } },
            ],
            "uplinks": [{ "network": "n", "name": "tap t", "counters": { "tx_frames": 6 } }],
        });
        let text = text(serde_json::from_value(report).unwrap()).unwrap();
        for line in [
            "# TYPE virtio_rdma_info gauge",
            "virtio_rdma_info{version=\"1.2\"} 1",
            "virtio_rdma_memory_losses_total 3",
            "# UNIT virtio_rdma_worker_time_seconds seconds",
            "virtio_rdma_worker_time_seconds_total{worker=\"0\",doing=\"work\"} 1.5",
            "virtio_rdma_worker_rounds_total{worker=\"0\"} 7",
            "virtio_rdma_worker_guests{worker=\"0\"} 1",
            "# TYPE virtio_rdma_worker_turn_seconds histogram",
            "virtio_rdma_worker_turn_seconds_sum{worker=\"0\"} 0.25",
            "virtio_rdma_worker_turn_seconds_count{worker=\"0\"} 4",
            "virtio_rdma_worker_turn_seconds_bucket{le=\"0.125\",worker=\"0\"} 3",
            "virtio_rdma_worker_turn_seconds_bucket{le=\"+Inf\",worker=\"0\"} 4",
            "# HELP virtio_rdma_guest_timeouts Times a peer did not answer",
            "# HELP virtio_rdma_nic_rx_frames A frame came from the guest",
            "# HELP virtio_rdma_uplink_tx_frames A frame was sent. A train that the kernel takes apart counts as one",
            "virtio_rdma_guest_connected{guest=\"g\\\"1\",network=\"n\"} 1",
            "virtio_rdma_guest_started{guest=\"g2\",network=\"n\"} 0",
            "virtio_rdma_guest_refused_vmms_total{guest=\"g\\\"1\",network=\"n\"} 8",
            "# UNIT virtio_rdma_guest_work_seconds seconds",
            "virtio_rdma_guest_work_seconds_total{guest=\"g\\\"1\",network=\"n\"} 2.5",
            "virtio_rdma_guest_work_seconds_total{guest=\"g2\",network=\"n\"} 0.0",
            "virtio_rdma_guest_objects{guest=\"g\\\"1\",network=\"n\",kind=\"mr\"} 2",
            "virtio_rdma_guest_objects{guest=\"g\\\"1\",network=\"n\",kind=\"srq\"} 6",
            "virtio_rdma_guest_limits{guest=\"g\\\"1\",network=\"n\",kind=\"qp\"} 9",
            "virtio_rdma_guest_qps{guest=\"g\\\"1\",network=\"n\",type=\"RC\",state=\"RTS\"} 2",
            "virtio_rdma_guest_timeouts_total{guest=\"g\\\"1\",network=\"n\"} 4",
            "virtio_rdma_guest_timeouts_total{guest=\"g2\",network=\"n\"} 0",
            "virtio_rdma_nic_rx_frames_total{guest=\"g\\\"1\",network=\"n\"} 5",
            "virtio_rdma_uplink_tx_frames_total{network=\"n\"} 6",
            "# EOF",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in:\n{text}");
        }
    }
}
