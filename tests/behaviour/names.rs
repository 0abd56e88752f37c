//! Targets by name: lookups that fail, hang or change never hold up what does not need them.

use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    Answers, BlackHole, Echo, Forwarder, Pattern, Refusing, Resolver, UdpEcho, WAIT, accept, bind,
    both_ways, client_of, connect, end, eventually, expect_datagram, expect_end, expect_refusal,
    in_own_network, listen_on, local, own_loopback, receive, receive_to_end, send, try_connect,
};

#[test]
fn a_name_is_looked_up_and_its_target_reached() {
    let Some(resolver) = Resolver::start(1) else { return };
    let target = listen_on(any_port(own_loopback()));
    let address = target.local_addr().unwrap();
    resolver.set("target.test", &[address.ip()]);
    let forwarder = resolver.forwarder(&rule("tcp", address.port(), ""));
    for _ in 0..3 {
        let client = connect(forwarder.address());
        both_ways(&client, &accept(&target), 1000);
    }
}

#[test]
fn rules_start_at_once_when_the_resolver_does_not_answer() {
    let Some(resolver) = Resolver::start(1) else { return };
    resolver.answer(Answers::None);
    let echo = Echo::start();
    let mut arguments = Vec::new();
    for n in 0..200 {
        let target = format!("name-{n}.test:80");
        arguments.extend(["-l", "127.0.0.1:0/tcp", "-t", &target].map(str::to_owned));
    }
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", echo.address(), ""));
    let start = Instant::now();
    let forwarder = resolver.forwarder(&arguments);
    assert!(start.elapsed() < Duration::from_secs(2), "ready after {:?}", start.elapsed());

    let ports = forwarder.ports();
    assert_eq!(ports.len(), 201);
    // Somebody waits for each of some names; the numeric rule never notices.
    let waiting: Vec<_> = ports[..50].iter().map(|port| connect(local(*port))).collect();
    let start = Instant::now();
    for n in 0..50 {
        let client = connect(local(ports[200]));
        send(&client, Pattern(n), 0..1000);
        receive(&client, Pattern(n), 0..1000);
    }
    // Fifty exchanges take milliseconds; one lookup that is waited for takes a second.
    assert!(start.elapsed() < Duration::from_secs(5), "exchanges took {:?}", start.elapsed());
    drop(waiting);
}

#[test]
fn a_connection_waits_for_a_resolver_that_comes_up_later() {
    let Some(resolver) = Resolver::start(1) else { return };
    let target = listen_on(any_port(own_loopback()));
    let address = target.local_addr().unwrap();
    resolver.set("target.test", &[address.ip()]);
    resolver.answer(Answers::None);
    let forwarder = resolver.forwarder(&rule("tcp", address.port(), "connect=15s"));
    let client = connect(forwarder.address());
    send(&client, Pattern(1), 0..100_000);
    end(&client);
    eventually("the name is asked for", WAIT, || resolver.questions() > 0);
    thread::sleep(Duration::from_millis(1500));
    resolver.answer(Answers::Given);
    let server = accept(&target);
    assert_eq!(receive_to_end(&server, Pattern(1), 0), 100_000);
    send(&server, Pattern(2), 0..1000);
    drop(server);
    assert_eq!(receive_to_end(&client, Pattern(2), 0), 1000);
}

#[test]
fn a_name_that_cannot_be_resolved_is_a_reset_within_the_connect_timeout() {
    let Some(resolver) = Resolver::start(1) else { return };
    for answers in [Answers::Given, Answers::None] {
        resolver.answer(answers);
        let forwarder = resolver.forwarder(&rule("tcp", 80, "connect=2s"));
        let before = forwarder.descriptors();
        expect_refusal(forwarder.address());
        forwarder.wait_for_descriptors(before, WAIT);
    }
}

#[test]
fn the_last_good_address_stays_in_use_when_the_resolver_dies() {
    // Its lookups wait long, so that a connection that waits for one shows.
    let Some(resolver) = Resolver::start(10) else { return };
    let echo = Echo::on(listen_on(any_port(own_loopback())));
    resolver.set("target.test", &[echo.address().ip()]);
    for dead in [Answers::None, Answers::Failure] {
        resolver.answer(Answers::Given);
        let forwarder = resolver.forwarder(&rule("tcp", echo.address().port(), "refresh=1s"));
        let exchange = || {
            let start = Instant::now();
            let client = connect(forwarder.address());
            send(&client, Pattern(1), 0..1000);
            receive(&client, Pattern(1), 0..1000);
            start.elapsed()
        };
        exchange();
        resolver.answer(dead);
        let asked = resolver.questions();
        eventually("the name is asked for again", WAIT, || {
            let took = exchange();
            assert!(took < Duration::from_secs(5), "a connection waited {took:?} for a lookup");
            resolver.questions() > asked
        });
        for _ in 0..10 {
            let took = exchange();
            assert!(took < Duration::from_secs(5), "a connection waited {took:?} for a lookup");
        }
    }
}

#[test]
fn lookups_of_a_dead_resolver_back_off_and_recover() {
    let Some(resolver) = Resolver::start(1) else { return };
    let port = listen_on(any_port(own_loopback())).local_addr().unwrap().port();
    let (first, second) = (own_loopback(), own_loopback());
    let old = Echo::on(listen_on(SocketAddr::from((first, port))));
    let new = listen_on(SocketAddr::from((second, port)));
    resolver.set("target.test", &[first]);
    let forwarder = resolver.forwarder(&rule("tcp", port, "refresh=1s"));
    let client = connect(forwarder.address());
    send(&client, Pattern(1), 0..100);
    receive(&client, Pattern(1), 0..100);
    resolver.answer(Answers::Failure);
    let (asked, start) = (resolver.questions(), Instant::now());
    while start.elapsed() < Duration::from_secs(4) {
        let client = connect(forwarder.address());
        send(&client, Pattern(1), 0..100);
        receive(&client, Pattern(1), 0..100);
        thread::sleep(Duration::from_millis(20));
    }
    // One lookup may ask several times (families, search list); 200 connections ask no more.
    let asked = resolver.questions() - asked;
    assert!(asked < 60, "{asked} questions to a failing resolver in four seconds");
    drop(old);

    resolver.set("target.test", &[second]);
    resolver.answer(Answers::Given);
    new.set_nonblocking(true).unwrap();
    eventually("the new address is used", WAIT, || {
        // Until then the old one refuses.
        let _client = try_connect(forwarder.address());
        thread::sleep(Duration::from_millis(50));
        new.accept().is_ok()
    });
}

#[test]
fn new_connections_follow_a_changed_address() {
    let Some(resolver) = Resolver::start(1) else { return };
    let (old, new) = two_places();
    let port = old.local_addr().unwrap().port();
    resolver.set("target.test", &[place(&old)]);
    let forwarder = resolver.forwarder(&rule("tcp", port, "refresh=1s"));
    let client = connect(forwarder.address());
    let server = accept(&old);
    resolver.set("target.test", &[place(&new)]);
    expect_move(&forwarder, &new);
    // What began at the old address stays there.
    both_ways(&client, &server, 1000);
}

#[test]
fn asked_to_reload_it_looks_names_up_at_once() {
    let Some(resolver) = Resolver::start(1) else { return };
    let (old, new) = two_places();
    let port = old.local_addr().unwrap().port();
    resolver.set("target.test", &[place(&old)]);
    let forwarder = resolver.forwarder(&rule("tcp", port, "refresh=1h"));
    let client = connect(forwarder.address());
    let server = accept(&old);
    resolver.set("target.test", &[place(&new)]);
    for _ in 0..3 {
        let client = connect(forwarder.address());
        both_ways(&client, &accept(&old), 1000);
    }

    let asked = resolver.questions();
    forwarder.signal(Signal::SIGHUP);
    // Before a client comes and makes it.
    eventually("the name is asked for again", WAIT, || resolver.questions() > asked);
    expect_move(&forwarder, &new);
    both_ways(&client, &server, 1000);
}

#[test]
fn udp_flows_move_to_a_changed_address() {
    let Some(resolver) = Resolver::start(1) else { return };
    let (first, second) = (own_loopback(), own_loopback());
    let old = bind(any_port(first));
    let port = old.local_addr().unwrap().port();
    let _old = UdpEcho::on(old, b"old ");
    let _new = UdpEcho::on(bind(SocketAddr::from((second, port))), b"new ");
    resolver.set("target.test", &[first]);
    let forwarder = resolver.forwarder(&rule("udp", port, "refresh=1s"));
    let client = client_of(&forwarder);
    client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut answers = Vec::new();
    let ask = |answers: &mut Vec<String>| {
        client.send(b"who").unwrap();
        let mut buffer = [0; 20];
        if let Ok(n) = client.recv(&mut buffer) {
            answers.push(String::from_utf8_lossy(&buffer[..n]).into_owned());
        }
    };
    eventually("the first address answers", WAIT, || {
        ask(&mut answers);
        !answers.is_empty()
    });
    assert_eq!(answers, ["old who"]);
    resolver.set("target.test", &[second]);
    // The flow is never silent, so it does not move by expiring.
    eventually("the second address answers", WAIT, || {
        ask(&mut answers);
        answers.last().is_some_and(|answer| answer == "new who")
    });
}

#[test]
fn a_udp_flow_stays_with_the_next_target_while_the_first_ones_name_has_no_address() {
    let Some(resolver) = Resolver::start(1) else { return };
    resolver.set("next.test", &[local(0).ip()]);
    for next in ["127.0.0.1", "next.test"] {
        let target = bind(local(0));
        let port = target.local_addr().unwrap().port();
        let targets = format!("late.test:{port},{next}:{port}");
        let forwarder =
            resolver.forwarder(&["-l", "127.0.0.1:0/udp", "-t", &targets].map(str::to_owned));
        let (client, mut n) = (client_of(&forwarder), 0_u32);
        // What comes while no address is known yet is dropped.
        target.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut first = None;
        eventually("the next target has an address", WAIT, || {
            client.send(&n.to_be_bytes()).unwrap();
            first = target.recv_from(&mut [0; 4]).ok();
            first.is_some()
        });
        let (_, flow) = first.expect("the loop above ends with a datagram");
        target.set_read_timeout(Some(WAIT)).unwrap();
        let mut exchange = |client: &UdpSocket| {
            n += 1;
            client.send(&n.to_be_bytes()).unwrap();
            let mut buffer = [0; 4];
            loop {
                let (_, from) = target.recv_from(&mut buffer).expect("the datagram arrives");
                // One from above may have been late.
                if buffer != [0; 4] {
                    assert_eq!(u32::from_be_bytes(buffer), n);
                    target.send_to(&buffer, from).unwrap();
                    expect_datagram(client, &buffer);
                    return from;
                }
            }
        };
        // The first target is looked up again for other clients, in vain; for both families each
        // time.
        let asked = resolver.questions();
        eventually("the name is asked for twice more", WAIT, || {
            assert_eq!(exchange(&client), flow, "{targets}: another flow");
            exchange(&client_of(&forwarder));
            resolver.questions() >= asked + 4
        });
        assert_eq!(exchange(&client), flow, "{targets}: another flow");
    }
}

#[test]
fn an_address_that_fails_at_once_does_not_hide_that_another_never_answers() {
    in_own_network(|| {
        let Some(resolver) = Resolver::start(1) else { return };
        let host = own_loopback();
        let hole = BlackHole::on(any_port(host));
        let echo = Echo::start();
        // Nothing leads to either of them, which a lookup knows: it puts them behind.
        for unreachable in ["2001:db8::9", "240.0.0.1"] {
            resolver.set("target.test", &[host, unreachable.parse().unwrap()]);
            let targets = format!("target.test:{},{}", hole.address().port(), echo.address());
            let arguments = ["-l", "127.0.0.1:0/tcp", "-t", &targets, "-o", "connect=1s"];
            let forwarder = resolver.forwarder(&arguments.map(str::to_owned));
            for n in 0..3 {
                let start = Instant::now();
                let client = connect(forwarder.address());
                send(&client, Pattern(n), 0..1000);
                receive(&client, Pattern(n), 0..1000);
                let took = start.elapsed();
                assert!(took < Duration::from_secs(8), "{unreachable}: after {took:?}");
            }
        }
    });
}

#[test]
fn of_twenty_addresses_the_one_that_answers_is_reached() {
    let Some(resolver) = Resolver::start(1) else { return };
    let hosts: Vec<_> = (0..20).map(|_| own_loopback()).collect();
    let echo = Echo::on(listen_on(any_port(hosts[15])));
    let port = echo.address().port();
    resolver.set("target.test", &hosts);
    // With refusals the next one is tried at once, with silence after a while and beside them.
    for silent in [false, true] {
        let _others = Others::on(hosts.iter().filter(|host| **host != hosts[15]), port, silent);
        let forwarder = resolver.forwarder(&rule("tcp", port, "connect=60s"));
        let before = forwarder.descriptors();
        let clients: Vec<_> = (0..3).map(|_| connect(forwarder.address())).collect();
        for (n, client) in (0..).zip(&clients) {
            send(client, Pattern(n), 0..100_000);
            receive(client, Pattern(n), 0..100_000);
            end(client);
            expect_end(client);
        }
        forwarder.wait_for_descriptors(before, WAIT);
    }
}

#[test]
fn of_twenty_silent_addresses_the_one_that_answers_late_is_reached() {
    let Some(resolver) = Resolver::start(1) else { return };
    let hosts: Vec<_> = (0..20).map(|_| own_loopback()).collect();
    let hole = BlackHole::on(any_port(hosts[0]));
    let port = hole.address().port();
    let _others = Others::on(hosts[1..].iter(), port, true);
    resolver.set("target.test", &hosts);
    let forwarder = resolver.forwarder(&rule("tcp", port, "connect=60s"));
    let before = forwarder.descriptors();
    let client = connect(forwarder.address());
    send(&client, Pattern(1), 0..1000);
    // All that the forwarder takes of one name, but for one: its lookup may have had a descriptor.
    eventually("they are tried", WAIT, || forwarder.descriptors() >= before + 16);
    let target = hole.open();
    let server = accept(&target);
    receive(&server, Pattern(1), 0..1000);
    both_ways(&client, &server, 1000);
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn twenty_addresses_that_cannot_be_reached_are_a_reset() {
    let Some(resolver) = Resolver::start(1) else { return };
    let hosts: Vec<_> = (0..20).map(|_| own_loopback()).collect();
    let port = listen_on(any_port(own_loopback())).local_addr().unwrap().port();
    let echo = Echo::start();
    resolver.set("target.test", &hosts);
    for silent in [false, true] {
        let _all = Others::on(hosts.iter(), port, silent);
        let mut arguments = rule("tcp", port, "connect=500ms");
        arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", echo.address(), ""));
        let forwarder = resolver.forwarder(&arguments);
        let before = forwarder.descriptors();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| expect_refusal(forwarder.address()));
            }
        });
        forwarder.wait_for_descriptors(before, WAIT);
        let client = connect(local(forwarder.ports()[1]));
        send(&client, Pattern(1), 0..1000);
        receive(&client, Pattern(1), 0..1000);
    }
}

#[test]
fn a_name_with_an_address_that_refuses_is_reached_at_the_other() {
    let Some(resolver) = Resolver::start(1) else { return };
    let (good, bad) = (own_loopback(), own_loopback());
    let echo = Echo::on(listen_on(any_port(good)));
    let _refusing = Refusing::on(SocketAddr::from((bad, echo.address().port())));
    // The order of the answer is not always the order that the lookup gives.
    for addresses in [[bad, good], [good, bad]] {
        resolver.set("target.test", &addresses);
        let forwarder = resolver.forwarder(&rule("tcp", echo.address().port(), ""));
        for n in 0..5 {
            let client = connect(forwarder.address());
            send(&client, Pattern(n), 0..1000);
            receive(&client, Pattern(n), 0..1000);
            end(&client);
            expect_end(&client);
        }
    }
}

#[test]
fn a_name_with_an_address_that_never_answers_is_reached_at_the_other_soon() {
    let Some(resolver) = Resolver::start(1) else { return };
    let (good, bad) = (own_loopback(), own_loopback());
    let echo = Echo::on(listen_on(any_port(good)));
    let _hole = BlackHole::on(SocketAddr::from((bad, echo.address().port())));
    for addresses in [[bad, good], [good, bad]] {
        resolver.set("target.test", &addresses);
        let forwarder = resolver.forwarder(&rule("tcp", echo.address().port(), "connect=60s"));
        let before = forwarder.descriptors();
        // Reading gives up long before the connect timeout.
        let client = connect(forwarder.address());
        send(&client, Pattern(1), 0..1000);
        receive(&client, Pattern(1), 0..1000);
        // The attempt that lost is not kept for its timeout.
        forwarder.wait_for_descriptors(before + 2, WAIT);
    }
}

/// Addresses that cannot be reached.
struct Others {
    _refusing: Vec<Refusing>,
    _silent: Vec<BlackHole>,
}

impl Others {
    /// Port `port` of these hosts, which either refuses or is silent.
    #[track_caller]
    fn on<'a>(hosts: impl Iterator<Item = &'a IpAddr>, port: u16, silent: bool) -> Others {
        let addresses = hosts.map(|host| SocketAddr::from((*host, port)));
        if !silent {
            return Others {
                _refusing: addresses.map(Refusing::on).collect(),
                _silent: Vec::new(),
            };
        }
        // Each takes a while to fall silent.
        let silent = thread::scope(|scope| {
            let threads: Vec<_> =
                addresses.map(|address| scope.spawn(move || BlackHole::on(address))).collect();
            threads.into_iter().map(|thread| thread.join().expect("it falls silent")).collect()
        });
        Others { _refusing: Vec::new(), _silent: silent }
    }
}

/// One rule to `target.test`.
fn rule(protocol: &str, port: u16, options: &str) -> Vec<String> {
    let mut arguments = vec![
        "-l".to_owned(),
        format!("127.0.0.1:0/{protocol}"),
        "-t".to_owned(),
        format!("target.test:{port}"),
    ];
    if !options.is_empty() {
        arguments.extend(["-o".to_owned(), options.to_owned()]);
    }
    arguments
}

fn any_port(host: IpAddr) -> SocketAddr {
    SocketAddr::from((host, 0))
}

/// Listeners on one port of two addresses, for a name to lead to one after the other.
fn two_places() -> (TcpListener, TcpListener) {
    let first = listen_on(any_port(own_loopback()));
    let port = first.local_addr().unwrap().port();
    (first, listen_on(SocketAddr::from((own_loopback(), port))))
}

fn place(listener: &TcpListener) -> IpAddr {
    listener.local_addr().unwrap().ip()
}

/// Connects until a connection arrives at `new`.
#[track_caller]
fn expect_move(forwarder: &Forwarder, new: &TcpListener) {
    new.set_nonblocking(true).unwrap();
    eventually("the new address is used", WAIT, || {
        let _client = connect(forwarder.address());
        thread::sleep(Duration::from_millis(50));
        new.accept().is_ok()
    });
}
