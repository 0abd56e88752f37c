//! Datagrams: each arrives once, whole, in order, and from the address that it should come from.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt::UdpGsoSegment};
use proptest::collection::vec;
use proptest::test_runner::{Config, TestRunner};

use crate::harness::{
    Forwarder, Pattern, Random, UdpEcho, WAIT, available, bind, both_ways, client_of, eventually,
    expect_datagram, expect_silence, ipv6_available, listen_on, local, own_loopback, pair,
};

#[test]
fn a_reply_leaves_from_the_address_that_the_client_wrote_to() {
    let echo = UdpEcho::start();
    for listen in ["0.0.0.0:0/udp", ":0/udp", "*:0/udp"] {
        let forwarder = Forwarder::start(Forwarder::rule(listen, echo.address(), ""));
        for host in [[127, 0, 0, 1], [127, 0, 0, 2], [127, 1, 2, 3]] {
            // A connected socket drops what comes from any other address.
            let client = bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
            client.connect((Ipv4Addr::from(host), forwarder.port())).unwrap();
            for n in 0..5 {
                client.send(Pattern(n).bytes(0, 100)).unwrap();
                expect_datagram(&client, Pattern(n).bytes(0, 100));
            }
        }
    }
}

#[test]
fn one_client_socket_gets_each_reply_from_the_address_that_it_asked() {
    let echo = UdpEcho::start();
    let forwarder = Forwarder::start(Forwarder::rule("0.0.0.0:0/udp", echo.address(), ""));
    let client = bind(local(0));
    for n in 0..30 {
        let asked = SocketAddr::from(([127, 0, 0, 1 + n % 3], forwarder.port()));
        client.send_to(&[n], asked).unwrap();
        assert_eq!(expect_datagram(&client, &[n]), asked);
    }
}

#[test]
fn wildcards_serve_ipv6_clients() {
    if !ipv6_available() {
        return;
    }
    let echo = UdpEcho::start();
    for listen in [":0/udp", "[::]:0/udp", "[::1]:0/udp"] {
        let forwarder = Forwarder::start(Forwarder::rule(listen, echo.address(), ""));
        let client = bind(SocketAddr::from((Ipv6Addr::LOCALHOST, 0)));
        client.connect((Ipv6Addr::LOCALHOST, forwarder.port())).unwrap();
        for n in 0..5 {
            client.send(Pattern(n).bytes(0, 100)).unwrap();
            expect_datagram(&client, Pattern(n).bytes(0, 100));
        }
    }
}

#[test]
fn ipv6_clients_reach_an_ipv4_target_and_the_other_way_round() {
    if !ipv6_available() {
        return;
    }
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    for (listen, host, target) in [
        ("[::1]:0/udp", IpAddr::from(Ipv6Addr::LOCALHOST), local(0)),
        ("127.0.0.1:0/udp", IpAddr::from(Ipv4Addr::LOCALHOST), v6),
    ] {
        let echo = UdpEcho::on(bind(target), b"");
        let forwarder = Forwarder::start(Forwarder::rule(listen, echo.address(), ""));
        let client = bind(SocketAddr::from((host, 0)));
        client.connect((host, forwarder.port())).unwrap();
        for n in 0..10 {
            client.send(Pattern(n).bytes(0, 1200)).unwrap();
            expect_datagram(&client, Pattern(n).bytes(0, 1200));
        }
    }
}

#[test]
fn datagrams_of_all_sizes_come_back_whole_mixed_and_back_to_back() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    let mut random = Random::new(3);
    let mut flow = None;
    for round in 0..300 {
        // No more at once than the smallest default socket buffer surely takes.
        let mut sizes = Vec::new();
        let mut total = 0;
        while sizes.len() < 8 {
            let size = SIZES[random.below(SIZES.len())];
            if total + size > 70_000 {
                break;
            }
            sizes.push(size);
            total += size;
        }
        let datagrams: Vec<_> =
            (0..).zip(&sizes).map(|(n, size)| Pattern(round * 8 + n).bytes(0, *size)).collect();
        for datagram in &datagrams {
            client.send(datagram).unwrap();
        }
        for datagram in &datagrams {
            let from = expect_datagram(&target, datagram);
            assert_eq!(from, *flow.get_or_insert(from), "one client is one flow");
        }
        for datagram in &datagrams {
            target.send_to(datagram, flow.unwrap()).unwrap();
        }
        for datagram in &datagrams {
            expect_datagram(&client, datagram);
        }
    }
}

#[test]
fn the_largest_datagram_passes() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    for n in 0..20 {
        let datagram = Pattern(n).bytes(0, LARGEST);
        client.send(datagram).unwrap();
        let flow = expect_datagram(&target, datagram);
        target.send_to(datagram, flow).unwrap();
        expect_datagram(&client, datagram);
    }
}

#[test]
fn empty_datagrams_pass_both_ways() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    // The first one of a flow, too.
    for _ in 0..20 {
        client.send(b"").unwrap();
        let flow = expect_datagram(&target, b"");
        target.send_to(b"", flow).unwrap();
        expect_datagram(&client, b"");
        client.send(b"x").unwrap();
        client.send(b"").unwrap();
        client.send(b"y").unwrap();
        for datagram in [b"x".as_slice(), b"", b"y"] {
            assert_eq!(expect_datagram(&target, datagram), flow);
        }
    }
    expect_silence(&target, Duration::from_millis(100));
}

#[test]
fn segments_that_the_kernel_keeps_together_come_apart_at_the_same_edges() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    if !segments(&client, 1200) {
        return;
    }
    let mut offset = 0;
    let mut flow = None;
    for (size, total) in [
        (1200, 12_000),
        (1200, 12_100),
        (1, 60),
        (100, 6_350),
        (1472, 60_000),
        (1400, 1400),
        (1400, 900),
        (8000, 64_001),
        (32_000, 64_000),
    ] {
        let edges = (0..total).step_by(size).map(|at| (at, size.min(total - at)));
        let bytes = Pattern(4).bytes(offset, total);
        offset += total as u64;
        assert!(segments(&client, size));
        client.send(bytes).unwrap();
        for (at, len) in edges.clone() {
            flow = Some(expect_datagram(&target, &bytes[at..at + len]));
        }
        assert!(segments(&target, size));
        target.send_to(bytes, flow.unwrap()).unwrap();
        for (at, len) in edges {
            expect_datagram(&client, &bytes[at..at + len]);
        }
    }
}

#[test]
fn any_run_of_segments_and_datagrams_keeps_its_edges() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    if !segments(&client, 0) {
        return;
    }
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    // Trains of equal segments with a shorter last one, by turns with datagrams of any size.
    TestRunner::new(config)
        .run(&vec((1..3000_usize, 0..12_000_usize), 1..4), |trains| {
            let mut datagrams = Vec::new();
            for (n, (size, total)) in (0..).zip(trains) {
                // The kernel takes up to 64 segments at once on every version.
                let total = total.min(size * 60);
                let bytes = Pattern(n).bytes(0, total);
                assert!(segments(&client, if total > size { size } else { 0 }));
                client.send(bytes).unwrap();
                datagrams.extend(bytes.chunks(size));
                if total == 0 {
                    datagrams.push(b"");
                }
            }
            let mut flow = None;
            for datagram in &datagrams {
                flow = Some(expect_datagram(&target, datagram));
            }
            // A few at a time on the way back, so that no buffer overflows.
            for some in datagrams.chunks(20) {
                some.iter().for_each(|bytes| {
                    target.send_to(bytes, flow.unwrap()).unwrap();
                });
                some.iter().for_each(|bytes| {
                    expect_datagram(&client, bytes);
                });
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn runs_of_clients_that_push_each_other_out_are_neither_mixed_nor_lost_uncounted() {
    let (forwarder, target) = start("gso=off,sessions=1");
    let (mut sent, mut arrived) = (0, 0);
    for round in 0..40 {
        let clients: Vec<_> = (0..6).map(|_| client_of(&forwarder)).collect();
        let mut datagrams = HashSet::new();
        // A stopped forwarder finds all of it in one batch.
        forwarder.signal(Signal::SIGSTOP);
        for (n, client) in (0..).zip(&clients) {
            // By turns a run of segments and a single datagram.
            let count = if n % 2 == round % 2 { 30 } else { 1 };
            let bytes = Pattern(round * 6 + n).bytes(0, count * 100);
            if !segments(client, if count > 1 { 100 } else { 0 }) {
                forwarder.signal(Signal::SIGCONT);
                return;
            }
            client.send(bytes).unwrap();
            datagrams.extend(bytes.chunks(100));
        }
        forwarder.signal(Signal::SIGCONT);
        sent += datagrams.len() as u64;
        // Every one that comes is one that was sent, as it was sent, and comes once.
        let mut buffer = [0; 4000];
        let counted =
            |names: &[&str]| names.iter().map(|name| forwarder.counter(name)).sum::<u64>();
        eventually("every datagram is counted", WAIT, || {
            let lost = ["datagrams-blocked", "datagrams-overflowed", "datagrams-dropped"];
            counted(&["datagrams-up"]) + counted(&lost) == sent
        });
        target.set_nonblocking(true).unwrap();
        while let Ok(n) = target.recv(&mut buffer) {
            assert!(datagrams.remove(&buffer[..n]), "{n} bytes that are nobody's, or come twice");
            arrived += 1;
        }
        assert_eq!(forwarder.counter("datagrams-up"), arrived);
    }
    assert!(arrived > sent / 2, "{arrived} of {sent} datagrams");
}

#[test]
fn a_hundred_thousand_datagrams_of_one_flow_keep_their_order() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    let mut flow = None;
    for first in (0..100_000_u32).step_by(32) {
        let batch = first..(first + 32).min(100_000);
        for n in batch.clone() {
            client.send(&numbered(n)).unwrap();
        }
        for n in batch {
            let from = expect_datagram(&target, &numbered(n));
            assert_eq!(from, *flow.get_or_insert(from));
        }
    }
    let flow = flow.unwrap();
    for first in (0..30_000_u32).step_by(32) {
        for n in first..first + 32 {
            target.send_to(&numbered(n), flow).unwrap();
        }
        for n in first..first + 32 {
            expect_datagram(&client, &numbered(n));
        }
    }
}

#[test]
fn one_request_may_have_any_number_of_replies() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    client.send(b"subscribe").unwrap();
    let flow = expect_datagram(&target, b"subscribe");
    for first in (0..500).step_by(20) {
        for n in first..first + 20 {
            target.send_to(&numbered(n), flow).unwrap();
        }
        for n in first..first + 20 {
            expect_datagram(&client, &numbered(n));
        }
    }
}

#[test]
fn no_client_gets_the_answer_to_another() {
    let (forwarder, target) = start("");
    let clients: Vec<_> = (0..64).map(|_| client_of(&forwarder)).collect();
    let mut flows = vec![None; clients.len()];
    for round in 0..30_u8 {
        for (n, client) in (0_u8..).zip(&clients) {
            for k in 0..4 {
                client.send(&[n, round, k]).unwrap();
            }
        }
        let mut received = Vec::new();
        let mut buffer = [0; 100];
        for _ in 0..clients.len() * 4 {
            let (len, from) = target.recv_from(&mut buffer).expect("every datagram arrives");
            assert_eq!(len, 3);
            let [n, in_round, k] = [buffer[0], buffer[1], buffer[2]];
            assert_eq!(in_round, round);
            assert_eq!(from, *flows[usize::from(n)].get_or_insert(from), "client {n} is one flow");
            received.push((from, [n, round, k]));
        }
        // The last client first, and in order within each.
        received.sort_by_key(|(_, [n, _, k])| (u8::MAX - n, *k));
        for (flow, datagram) in received {
            target.send_to(&datagram, flow).unwrap();
        }
        for (n, client) in (0_u8..).zip(&clients) {
            for k in 0..4 {
                expect_datagram(client, &[n, round, k]);
            }
        }
    }
    let mut different = flows.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), clients.len(), "clients share a flow");
}

#[test]
fn only_the_target_can_answer() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    client.send(b"question").unwrap();
    let flow = expect_datagram(&target, b"question");
    let stranger = bind(local(0));
    stranger.send_to(b"forged", flow).unwrap();
    target.send_to(b"true", flow).unwrap();
    expect_datagram(&client, b"true");
}

#[test]
fn both_protocols_share_one_port() {
    let tcp = listen_on(SocketAddr::from((own_loopback(), 0)));
    let address = tcp.local_addr().unwrap();
    let udp = bind(address);
    let forwarder = Forwarder::start(Forwarder::rule("127.0.0.1:0", address, ""));
    assert_eq!(forwarder.ports().len(), 1);
    let (client, server) = pair(&forwarder, &tcp);
    both_ways(&client, &server, 1000);
    let client = client_of(&forwarder);
    client.send(b"datagram").unwrap();
    expect_datagram(&udp, b"datagram");
}

const SIZES: [usize; 7] = [0, 1, 1472, 1500, 1501, 9000, LARGEST];

/// What fits into one IPv4 packet after its header and the datagram's.
const LARGEST: usize = 65_507;

#[track_caller]
fn start(options: &str) -> (Forwarder, UdpSocket) {
    let target = bind(local(0));
    (Forwarder::udp(target.local_addr().unwrap(), options), target)
}

/// From now on the kernel cuts what this socket sends into segments of that size (0: not at all),
/// and carries them as one as far as it can.
#[track_caller]
fn segments(socket: &UdpSocket, size: usize) -> bool {
    let size = i32::try_from(size).unwrap();
    available(setsockopt(socket, UdpGsoSegment, &size).is_ok(), "UDP segmentation offload")
}

fn numbered(n: u32) -> [u8; 104] {
    let mut bytes = [0; 104];
    bytes[..4].copy_from_slice(&n.to_be_bytes());
    bytes[4..].copy_from_slice(Pattern(7).bytes(u64::from(n), 100));
    bytes
}
