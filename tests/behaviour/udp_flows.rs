//! UDP flows: what makes one, how long it lives, and how many there may be.

use std::collections::HashSet;
use std::net::{SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::{
    Echo, Forwarder, Pattern, UdpEcho, WAIT, bind, client_of, connect, expect_datagram, local,
    own_loopback, receive, send,
};

#[test]
fn a_thousand_datagrams_of_one_client_are_one_flow() {
    let (forwarder, target) = start("");
    let client = client_of(&forwarder);
    let before = forwarder.descriptors();
    let mut flows = HashSet::new();
    for n in 0..1000 {
        client.send(Pattern(n).bytes(0, 200)).unwrap();
        flows.insert(expect_datagram(&target, Pattern(n).bytes(0, 200)));
    }
    assert_eq!(flows.len(), 1, "the target sees {flows:?}");
    assert!(forwarder.descriptors() <= before + 1);
}

#[test]
fn a_flow_in_one_direction_only_keeps_its_source_port() {
    let (forwarder, target) = start("timeout=1500ms");
    let client = client_of(&forwarder);
    let mut flows = HashSet::new();
    let start = Instant::now();
    // Three timeouts, and never a reply.
    while start.elapsed() < Duration::from_millis(4600) {
        client.send(b"syslog").unwrap();
        flows.insert(expect_datagram(&target, b"syslog"));
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(flows.len(), 1, "the target sees {flows:?}");
}

#[test]
fn replies_alone_keep_a_flow() {
    let (forwarder, target) = start("timeout=1s");
    let client = client_of(&forwarder);
    client.send(b"subscribe").unwrap();
    let flow = expect_datagram(&target, b"subscribe");
    for n in 0..60 {
        target.send_to(&[n], flow).unwrap();
        expect_datagram(&client, &[n]);
        thread::sleep(Duration::from_millis(50));
    }
    client.send(b"again").unwrap();
    assert_eq!(expect_datagram(&target, b"again"), flow);
}

#[test]
fn an_expired_flow_gives_its_descriptor_back_and_starts_anew() {
    let (forwarder, target) = start("timeout=500ms");
    let before = forwarder.descriptors();
    let clients: Vec<_> = (0..20).map(|_| client_of(&forwarder)).collect();
    for _ in 0..2 {
        let start = Instant::now();
        for (n, client) in (0..).zip(&clients) {
            client.send(&[n]).unwrap();
            let flow = expect_datagram(&target, &[n]);
            // Some are answered and some are not.
            if n % 2 == 0 {
                target.send_to(&[n], flow).unwrap();
                expect_datagram(client, &[n]);
            }
        }
        forwarder.wait_for_descriptors(before, WAIT);
        assert!(start.elapsed() >= Duration::from_millis(450), "after {:?}", start.elapsed());
    }
}

#[test]
fn an_unanswered_flow_does_not_outlive_an_answered_one() {
    let (forwarder, target) = start("timeout=2s");
    let before = forwarder.descriptors();
    let (answered, unanswered) = (client_of(&forwarder), client_of(&forwarder));
    unanswered.send(b"scan").unwrap();
    expect_datagram(&target, b"scan");
    answered.send(b"question").unwrap();
    let flow = expect_datagram(&target, b"question");
    target.send_to(b"answer", flow).unwrap();
    expect_datagram(&answered, b"answer");
    // The answered one is kept by its traffic; what goes is the other one.
    let start = Instant::now();
    while forwarder.descriptors() > before + 1 {
        assert!(start.elapsed() < WAIT, "the unanswered flow stays");
        answered.send(b"more").unwrap();
        assert_eq!(expect_datagram(&target, b"more"), flow);
        thread::sleep(Duration::from_millis(50));
    }
    answered.send(b"last").unwrap();
    assert_eq!(expect_datagram(&target, b"last"), flow);
}

#[test]
fn a_refusal_never_swallows_a_datagram() {
    let address = SocketAddr::from((own_loopback(), 0));
    let reserved = bind(address);
    let address = reserved.local_addr().unwrap();
    drop(reserved);
    let forwarder = Forwarder::udp(address, "");
    let client = client_of(&forwarder);
    for round in 0..10 {
        // Each of these is answered by "port unreachable", which the kernel reports on the next
        // use of the socket instead of doing what was asked.
        for n in 0..3 {
            client.send(&[round, n]).unwrap();
            thread::sleep(Duration::from_millis(20));
        }
        let target = bind(address);
        client.send(&[round, 100]).unwrap();
        client.send(&[round, 101]).unwrap();
        // On a slow machine one of the earlier ones may still have been under way.
        let mut buffer = [0; 10];
        while buffer[..2] != [round, 100] {
            target.recv(&mut buffer).expect("the datagram after the refusals arrives");
            assert_eq!(buffer[0], round);
        }
        let flow = expect_datagram(&target, &[round, 101]);
        target.send_to(b"answer", flow).unwrap();
        expect_datagram(&client, b"answer");
    }
}

#[test]
fn refusals_do_not_spin_or_flood_the_log() {
    let address = SocketAddr::from((own_loopback(), 0));
    let address = bind(address).local_addr().unwrap();
    let forwarder = Forwarder::udp(address, "");
    let client = client_of(&forwarder);
    let (lines, start) = (forwarder.log().len(), Instant::now());
    for _ in 0..500 {
        client.send(b"nobody there").unwrap();
        thread::sleep(Duration::from_millis(2));
    }
    let logged = forwarder.log().len() - lines;
    assert!(logged as u64 <= start.elapsed().as_secs() + 2, "{logged} lines");
    let (used, start) = (forwarder.processor_time(), Instant::now());
    thread::sleep(Duration::from_secs(1));
    let used = forwarder.processor_time() - used;
    assert!(used < start.elapsed() / 4, "{used:?} of processor time with nothing to do");
}

#[test]
fn the_cap_on_flows_holds_and_leaves_tcp_alone() {
    let target = bind(local(0));
    let echo = Echo::start();
    let mut arguments = Forwarder::rule(
        "127.0.0.1:0/udp",
        target.local_addr().unwrap(),
        "sessions=1000,timeout=10m",
    );
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", echo.address(), ""));
    let forwarder = Forwarder::start(arguments);
    let [udp, tcp] = <[u16; 2]>::try_from(forwarder.ports()).unwrap().map(local);
    let before = forwarder.descriptors();
    let mut full = None;
    let from = own_loopback();
    // Other ports than the kernel hands out, each once.
    for (n, port) in (0..20_000_u32).zip(2000..) {
        let Ok(client) = UdpSocket::bind((from, port)) else { continue };
        client.send_to(&n.to_be_bytes(), udp).unwrap();
        expect_datagram(&target, &n.to_be_bytes());
        if n % 1000 == 500 {
            assert!(forwarder.descriptors() <= before + 1000 + 2, "more flows than allowed");
            let client = connect(tcp);
            send(&client, Pattern(1), 0..100);
            receive(&client, Pattern(1), 0..100);
        }
        if n == 2000 {
            full = Some(forwarder.anonymous_kib());
        }
    }
    let grown = forwarder.anonymous_kib().saturating_sub(full.unwrap());
    assert!(grown < 256, "{grown} KiB more, at the same number of flows");
}

#[test]
fn a_flood_of_unanswered_flows_does_not_push_out_an_answered_one() {
    let (forwarder, target) = start("sessions=50,timeout=10m");
    let client = client_of(&forwarder);
    client.send(b"question").unwrap();
    let flow = expect_datagram(&target, b"question");
    target.send_to(b"answer", flow).unwrap();
    expect_datagram(&client, b"answer");
    for n in 0..500_u32 {
        let stranger = client_of(&forwarder);
        stranger.send(&n.to_be_bytes()).unwrap();
        expect_datagram(&target, &n.to_be_bytes());
    }
    client.send(b"next").unwrap();
    assert_eq!(expect_datagram(&target, b"next"), flow);
    target.send_to(b"late", flow).unwrap();
    expect_datagram(&client, b"late");
}

#[test]
fn with_only_answered_flows_the_one_that_was_silent_longest_goes() {
    let (forwarder, target) = start("sessions=4,timeout=10m");
    let ask = |client: &UdpSocket, n: u8| {
        client.send(&[n]).unwrap();
        let flow = expect_datagram(&target, &[n]);
        target.send_to(&[n], flow).unwrap();
        expect_datagram(client, &[n]);
        flow
    };
    let clients: Vec<_> = (0..5).map(|_| client_of(&forwarder)).collect();
    let flows: Vec<_> = (0..4).zip(&clients).map(|(n, client)| ask(client, n)).collect();
    // The first one is used again, so that the second one is now the oldest.
    assert_eq!(ask(&clients[0], 10), flows[0]);
    ask(&clients[4], 4);
    for n in [0, 2, 3] {
        assert_eq!(ask(&clients[n], 20), flows[n], "flow {n} was not the oldest");
    }
}

#[test]
fn memory_is_back_near_the_start_after_thousands_of_flows() {
    let echo = UdpEcho::start();
    let forwarder = Forwarder::udp(echo.address(), "timeout=1s");
    let client = client_of(&forwarder);
    client.send(b"first").unwrap();
    expect_datagram(&client, b"first");
    let memory = forwarder.anonymous_kib();
    let from = own_loopback();
    for port in 2000..22_000 {
        let Ok(client) = UdpSocket::bind((from, port)) else { continue };
        client.set_read_timeout(Some(WAIT)).unwrap();
        client.send_to(b"flow", forwarder.address()).unwrap();
        expect_datagram(&client, b"flow");
    }
    // Far below what the full table takes; an allocator may keep some pages of its heap.
    forwarder.wait_for_memory(memory + 640, WAIT);
}

#[test]
fn a_flow_survives_its_clients_silence_within_the_timeout() {
    let (forwarder, target) = start("timeout=5s");
    let client = client_of(&forwarder);
    client.send(b"question").unwrap();
    let flow = expect_datagram(&target, b"question");
    thread::sleep(Duration::from_secs(1));
    target.send_to(b"late answer", flow).unwrap();
    expect_datagram(&client, b"late answer");
    client.send(b"next").unwrap();
    assert_eq!(expect_datagram(&target, b"next"), flow);
}

#[track_caller]
fn start(options: &str) -> (Forwarder, UdpSocket) {
    let target = bind(local(0));
    (Forwarder::udp(target.local_addr().unwrap(), options), target)
}
