//! What a datagram carries besides its bytes, and runs of datagrams where they can't be sent as one.

use std::io::IoSliceMut;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use nix::sys::socket::sockopt::{IpRecvTos, Ipv4Tos, Ipv6RecvTClass, Ipv6TClass};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt};

use crate::harness::{
    Forwarder, Pattern, WAIT, bind, client_of, eventually, expect_datagram, in_own_network, ip,
    ipv6_available, local,
};

/// ECT(1), the mark of low-latency traffic (RFC 9331).
const ECT1: i32 = 0b01;
/// Congestion experienced (RFC 3168).
const CE: i32 = 0b11;
/// Expedited forwarding (RFC 3246) in the upper six bits.
const EF: i32 = 46 << 2;

#[test]
fn ecn_marks_pass_both_ways_and_dscp_stays_behind() {
    let (forwarder, client, target) = marked("");
    for (sent, expected) in [(ECT1, ECT1), (CE, CE), (0, 0), (EF | ECT1, ECT1), (EF, 0)] {
        exchange(&forwarder, &client, &target, sent, expected);
    }
}

#[test]
fn dscp_passes_both_ways_when_asked_for() {
    let (forwarder, client, target) = marked("tos=pass");
    for mark in [EF | CE, EF, 0] {
        exchange(&forwarder, &client, &target, mark, mark);
    }
}

#[test]
fn ecn_marks_pass_from_one_family_to_the_other() {
    if !ipv6_available() {
        return;
    }
    let target = bind("[::1]:0".parse().unwrap());
    let rule = Forwarder::rule("127.0.0.1:0/udp", target.local_addr().unwrap(), "");
    let forwarder = Forwarder::start(&rule);
    setsockopt(&target, Ipv6RecvTClass, &true).unwrap();
    let client = client_of(&forwarder);
    setsockopt(&client, IpRecvTos, &true).unwrap();
    setsockopt(&client, Ipv4Tos, &CE).unwrap();
    client.send(b"up").unwrap();
    let (mark, flow) = receive_mark(&target);
    assert_eq!(mark, CE);
    setsockopt(&target, Ipv6TClass, &ECT1).unwrap();
    target.send_to(b"down", flow).unwrap();
    assert_eq!(receive_mark(&client).0, ECT1);
}

#[test]
fn datagrams_of_one_burst_with_different_marks_keep_each_its_own() {
    let (_forwarder, client, target) = marked("");
    client.send(b"opens the flow").unwrap();
    receive_mark(&target);
    for round in 0..50 {
        let marks: Vec<i32> =
            (0..20).map(|n| if (n + round) % 3 == 0 { CE } else { ECT1 }).collect();
        for mark in &marks {
            setsockopt(&client, Ipv4Tos, mark).unwrap();
            client.send(b"equally long").unwrap();
        }
        let arrived: Vec<i32> = marks.iter().map(|_| receive_mark(&target).0).collect();
        assert_eq!(arrived, marks);
    }
}

#[test]
fn runs_above_the_mtu_of_the_way_arrive_as_single_datagrams() {
    in_own_network(|| {
        ip("link set lo mtu 1300");
        let target = bind(local(0));
        let forwarder = Forwarder::udp(target.local_addr().unwrap(), "");
        let client = client_of(&forwarder);
        client.send(b"opens the flow").unwrap();
        let flow = expect_datagram(&target, b"opens the flow");
        // Above the MTU, of one size, many at a time: what would be sent as a run.
        for first in (0..2000_u64).step_by(20) {
            for n in first..first + 20 {
                client.send(Pattern(3).bytes(n, 1400)).unwrap();
            }
            for n in first..first + 20 {
                expect_datagram(&target, Pattern(3).bytes(n, 1400));
            }
            for n in first..first + 20 {
                target.send_to(Pattern(4).bytes(n, 1400), flow).unwrap();
            }
            for n in first..first + 20 {
                expect_datagram(&client, Pattern(4).bytes(n, 1400));
            }
        }
        // Below it they still may.
        for n in 0..20 {
            client.send(Pattern(5).bytes(n, 1000)).unwrap();
        }
        for n in 0..20 {
            expect_datagram(&target, Pattern(5).bytes(n, 1000));
        }
        let switched =
            || forwarder.log().lines().iter().filter(|line| line.contains("segmentation")).count();
        if std::env::var("TINYFWD_OPTIONS").is_err() {
            eventually("the limit is logged", WAIT, || switched() > 0);
        }
        assert!(switched() <= 1, "one line, not {}", switched());
    });
}

#[test]
fn datagrams_that_the_kernel_drops_are_counted() {
    let target = bind(local(0));
    let forwarder = Forwarder::udp(target.local_addr().unwrap(), "sockbuf=4k");
    let client = client_of(&forwarder);
    let counter = |name: &str| -> u64 {
        let before = forwarder.log().len();
        forwarder.signal(nix::sys::signal::Signal::SIGUSR1);
        let line =
            forwarder.log().wait_for("a status line", before, |line| line.contains("status "));
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(name));
        value.and_then(|value| value.parse().ok()).expect("the counter is in the line")
    };
    // It stands still, so that its buffer of a few kilobytes overflows.
    forwarder.signal(nix::sys::signal::Signal::SIGSTOP);
    for _ in 0..200 {
        client.send(&[7; 500]).unwrap();
    }
    forwarder.signal(nix::sys::signal::Signal::SIGCONT);
    eventually("what was left is relayed", WAIT, || counter("datagrams-up=") > 0);
    client.send(b"tells of the loss").unwrap();
    eventually("every datagram is accounted for", WAIT, || {
        counter("datagrams-up=") + counter("datagrams-overflowed=") == 201
    });
    assert!(counter("datagrams-overflowed=") > 100);
}

/// A forwarder, a client and a target that tell each other's marks.
#[track_caller]
fn marked(options: &str) -> (Forwarder, UdpSocket, UdpSocket) {
    let target = bind(local(0));
    let forwarder = Forwarder::udp(target.local_addr().unwrap(), options);
    let client = client_of(&forwarder);
    for socket in [&client, &target] {
        setsockopt(socket, IpRecvTos, &true).unwrap();
    }
    (forwarder, client, target)
}

#[track_caller]
fn exchange(forwarder: &Forwarder, client: &UdpSocket, target: &UdpSocket, sent: i32, got: i32) {
    setsockopt(client, Ipv4Tos, &sent).unwrap();
    client.send(b"up").unwrap();
    let (mark, flow) = receive_mark(target);
    assert_eq!(mark, got, "up, sent with {sent:#x}; log: {:?}", forwarder.log().lines());
    setsockopt(target, Ipv4Tos, &sent).unwrap();
    target.send_to(b"down", flow).unwrap();
    assert_eq!(receive_mark(client).0, got, "down, sent with {sent:#x}");
}

/// The traffic class of the next datagram, and who sent it.
#[track_caller]
fn receive_mark(socket: &UdpSocket) -> (i32, std::net::SocketAddr) {
    socket.set_read_timeout(Some(WAIT)).unwrap();
    let from = socket.peek_from(&mut [0; 1]).expect("a datagram").1;
    let mut bytes = [0; 64];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let mut space = nix::cmsg_space!(i32, i32);
    let fd = socket.as_raw_fd();
    let message =
        recvmsg::<SockaddrStorage>(fd, &mut parts, Some(&mut space), MsgFlags::empty()).unwrap();
    let mark = message.cmsgs().unwrap().find_map(|part| match part {
        ControlMessageOwned::Ipv4Tos(mark) => Some(i32::from(mark)),
        ControlMessageOwned::Ipv6TClass(mark) => Some(mark),
        _ => None,
    });
    (mark.expect("its traffic class"), from)
}
