//! From a client's arrival to its connection: which target it gets, and what happens when there is
//! none.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    BlackHole, Echo, Forwarder, Pattern, Refusing, WAIT, accept, both_ways, connect, end,
    eventually, expect_end, expect_refusal, in_own_network, ipv6_available, listen, listen_on,
    local, own_loopback, pair, receive, receive_to_end, reset, send,
};

#[test]
fn a_target_that_nobody_listens_on_never_turns_out_to_be_the_forwarder_itself() {
    in_own_network(|| {
        // So few ports to choose from that the kernel now and then picks the target's own for the
        // way to it, which on one machine makes a connection.
        fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40099").unwrap();
        let target = local(40050);
        let forwarder = Forwarder::start(["-l", "127.0.0.1:1080/tcp", "-t", &target.to_string()]);
        for _ in 0..500 {
            expect_refusal(forwarder.address());
        }
    });
}

#[test]
fn a_refused_target_is_a_reset_to_the_client() {
    let refusing = Refusing::start();
    let forwarder = Forwarder::tcp(refusing.address(), "");
    let before = forwarder.descriptors();
    for _ in 0..20 {
        expect_refusal(forwarder.address());
    }
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn an_unreachable_target_is_a_reset_after_the_connect_timeout() {
    let hole = BlackHole::start();
    let forwarder = Forwarder::tcp(hole.address(), "connect=500ms");
    let before = forwarder.descriptors();
    let start = Instant::now();
    expect_refusal(forwarder.address());
    assert!(start.elapsed() >= Duration::from_millis(450), "gave up after {:?}", start.elapsed());
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn clients_that_come_and_leave_before_an_unreachable_target_cost_nothing_afterwards() {
    let hole = BlackHole::start();
    let forwarder = Forwarder::tcp(hole.address(), "connect=2s");
    let before = forwarder.descriptors();
    let clients: Vec<_> = (0..500).map(|_| connect(forwarder.address())).collect();
    drop(clients);
    // The connect timeout and one second, counted from the last one's leaving.
    forwarder.wait_for_descriptors(before, Duration::from_secs(3));
}

#[test]
fn a_client_that_resets_while_the_connect_is_pending_is_let_go_at_once() {
    let hole = BlackHole::start();
    let forwarder = Forwarder::tcp(hole.address(), "connect=10m");
    let before = forwarder.descriptors();
    let clients: Vec<_> = (0..20).map(|_| connect(forwarder.address())).collect();
    for client in &clients {
        send(client, UP, 0..10);
    }
    eventually("all connects are pending", WAIT, || forwarder.descriptors() >= before + 40);
    clients.into_iter().for_each(reset);
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn bytes_and_ends_that_come_while_the_connect_is_pending_are_kept() {
    let hole = BlackHole::start();
    let forwarder = Forwarder::tcp(hole.address(), "connect=15s");
    let clients: Vec<_> = (0..4).map(|_| connect(forwarder.address())).collect();
    // Sent and ended, sent only, sent and ended with more than a buffer, nothing yet.
    send(&clients[0], Pattern(0), 0..1000);
    end(&clients[0]);
    send(&clients[1], Pattern(1), 0..1000);
    send(&clients[2], Pattern(2), 0..100_000);
    end(&clients[2]);
    // Long enough for a forwarder that takes an end for a farewell to act on it.
    thread::sleep(Duration::from_millis(300));

    let target = hole.open();
    thread::scope(|scope| {
        send(&clients[1], Pattern(1), 1000..2000);
        end(&clients[1]);
        send(&clients[3], Pattern(3), 0..3000);
        end(&clients[3]);
        for _ in &clients {
            let server = accept(&target);
            scope.spawn(move || {
                // Which client this is shows in its first bytes; each gets back how much it sent.
                let mut peeked = [0; 16];
                while server.peek(&mut peeked).unwrap() < peeked.len() {}
                let seed =
                    (0..4).find(|seed| Pattern(*seed).bytes(0, 16) == peeked).expect("a client");
                let len = receive_to_end(&server, Pattern(seed), 0);
                assert_eq!(len, [1000, 2000, 100_000, 3000][seed as usize]);
                send(&server, Pattern(10 + seed), 0..5000);
            });
        }
    });
    for (n, client) in (0..).zip(&clients) {
        assert_eq!(receive_to_end(client, Pattern(10 + n), 0), 5000);
    }
}

#[test]
fn the_next_target_is_used_when_the_first_refuses() {
    let refusing = [Refusing::start(), Refusing::start()];
    let target = listen();
    let forwarder = Forwarder::start([
        "-l".to_owned(),
        "127.0.0.1:0/tcp".to_owned(),
        "-t".to_owned(),
        format!(
            "{},{},{}",
            refusing[0].address(),
            refusing[1].address(),
            target.local_addr().unwrap()
        ),
    ]);
    for _ in 0..5 {
        let client = connect(forwarder.address());
        send(&client, UP, 0..100_000);
        let server = accept(&target);
        receive(&server, UP, 0..100_000);
        end(&client);
        expect_end(&server);
    }
}

#[test]
fn the_next_target_is_used_when_the_first_is_unreachable() {
    let hole = BlackHole::start();
    let echo = Echo::start();
    let forwarder = Forwarder::start([
        "-l".to_owned(),
        "127.0.0.1:0/tcp".to_owned(),
        "-t".to_owned(),
        format!("{},{}", hole.address(), echo.address()),
        "-o".to_owned(),
        "connect=500ms".to_owned(),
    ]);
    let client = connect(forwarder.address());
    send(&client, UP, 0..1000);
    receive(&client, UP, 0..1000);
}

#[test]
fn a_client_that_ends_at_once_hears_a_target_that_speaks_first() {
    let (hole, refusing) = (BlackHole::start(), Refusing::start());
    let target = listen();
    let good = target.local_addr().unwrap();
    for targets in [
        good.to_string(),
        format!("{},{good}", hole.address()),
        format!("{},{good}", refusing.address()),
        format!("{},{},{good}", hole.address(), refusing.address()),
    ] {
        let arguments = ["-l", "127.0.0.1:0/tcp", "-t", &targets, "-o", "connect=1s"];
        let forwarder = Forwarder::start(arguments);
        for _ in 0..3 {
            let client = connect(forwarder.address());
            end(&client);
            let server = accept(&target);
            expect_end(&server);
            send(&server, DOWN, 0..100_000);
            drop(server);
            assert_eq!(receive_to_end(&client, DOWN, 0), 100_000, "{targets}");
        }
    }
}

#[test]
fn when_every_target_refuses_the_client_is_reset() {
    let refusing = [Refusing::start(), Refusing::start()];
    let forwarder = Forwarder::start([
        "-l".to_owned(),
        "127.0.0.1:0/tcp".to_owned(),
        "-t".to_owned(),
        format!("{},{}", refusing[0].address(), refusing[1].address()),
    ]);
    expect_refusal(forwarder.address());
}

#[test]
fn a_target_that_comes_back_is_used_again() {
    let address = SocketAddr::from((own_loopback(), 0));
    let refusing = Refusing::on(address);
    let address = refusing.address();
    let forwarder = Forwarder::tcp(address, "");
    expect_refusal(forwarder.address());
    drop(refusing);
    let target = listen_on(address);
    let (client, server) = pair(&forwarder, &target);
    both_ways(&client, &server, 1000);
}

#[test]
fn a_thousand_clients_fit_into_the_backlog() {
    let echo = Echo::start();
    let forwarder = Forwarder::tcp(echo.address(), "");
    // A stopped forwarder accepts nobody: the kernel has to keep every one of them.
    forwarder.signal(Signal::SIGSTOP);
    let clients: Vec<_> = (0..1000).map(|_| connect(forwarder.address())).collect();
    forwarder.signal(Signal::SIGCONT);
    for (n, client) in (0..).zip(&clients) {
        send(client, Pattern(n), 0..100);
    }
    for (n, client) in (0..).zip(&clients) {
        receive(client, Pattern(n), 0..100);
        end(client);
        expect_end(client);
    }
}

#[test]
fn the_backlog_is_an_option() {
    let echo = Echo::start();
    let forwarder = Forwarder::tcp(echo.address(), "backlog=2");
    forwarder.signal(Signal::SIGSTOP);
    let connected: Vec<_> = (0..10)
        .filter_map(|_| {
            TcpStream::connect_timeout(&forwarder.address(), Duration::from_millis(100)).ok()
        })
        .collect();
    forwarder.signal(Signal::SIGCONT);
    assert!((2..=4).contains(&connected.len()), "{} fit into a backlog of 2", connected.len());
}

#[test]
fn thousands_of_connections_in_turn_cost_the_same_to_the_last() {
    let echo = Echo::start();
    let forwarder = Forwarder::tcp(echo.address(), "");
    let before = forwarder.descriptors();
    let mut costs = Vec::new();
    for _ in 0..5 {
        let start = forwarder.processor_time();
        for n in 0..1000 {
            let client = connect(forwarder.address());
            send(&client, Pattern(n), 0..50);
            receive(&client, Pattern(n), 0..50);
            // A reset leaves nothing behind in the kernel that would run out of ports.
            reset(client);
        }
        costs.push(forwarder.processor_time() - start);
    }
    // Processor time, so that a noisy machine does not matter; and its clock ticks are coarse.
    assert!(costs[4] < costs[0] * 3 + Duration::from_millis(100), "costs by thousand: {costs:?}");
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn ipv6_clients_reach_an_ipv4_target_and_the_other_way_round() {
    if !ipv6_available() {
        return;
    }
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    for (listen, target) in [("[::1]:0/tcp", listen()), ("127.0.0.1:0/tcp", listen_on(v6))] {
        let address = target.local_addr().unwrap();
        let forwarder = Forwarder::start(Forwarder::rule(listen, address, ""));
        let host: IpAddr = if listen.starts_with('[') {
            Ipv6Addr::LOCALHOST.into()
        } else {
            Ipv4Addr::LOCALHOST.into()
        };
        let client = connect(SocketAddr::from((host, forwarder.port())));
        both_ways(&client, &accept(&target), 100_000);
    }
}

#[test]
fn a_listener_without_an_address_takes_both_families() {
    let target = listen();
    for listen in [":0/tcp", "*:0/tcp"] {
        let forwarder = Forwarder::start(Forwarder::rule(listen, target.local_addr().unwrap(), ""));
        let port = forwarder.port();
        let client = connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        both_ways(&client, &accept(&target), 1000);
        if ipv6_available() {
            let client = connect(SocketAddr::from((Ipv6Addr::LOCALHOST, port)));
            both_ways(&client, &accept(&target), 1000);
        }
    }
}

#[test]
fn a_wildcard_of_one_family_takes_only_that_family() {
    if !ipv6_available() {
        return;
    }
    let echo = Echo::start();
    // Not 127.0.0.1: another test may listen there on the same port.
    let v4 = own_loopback();
    let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
    let takes = |host: IpAddr, port| {
        TcpStream::connect_timeout(&SocketAddr::from((host, port)), WAIT).is_ok()
    };
    let forwarder = Forwarder::start(Forwarder::rule("0.0.0.0:0/tcp", echo.address(), ""));
    assert!(takes(v4, forwarder.port()));
    assert!(!takes(v6, forwarder.port()));
    let forwarder = Forwarder::start(Forwarder::rule("[::]:0/tcp", echo.address(), ""));
    assert!(takes(v6, forwarder.port()));
    assert!(!takes(v4, forwarder.port()));
}

#[test]
fn a_range_of_ports_maps_port_by_port() {
    let (host, ports, targets) = range_with_targets();
    let (first, last) = (ports[0], ports[ports.len() - 1]);
    let target_host = targets[0].local_addr().unwrap().ip();
    let to_the_second = targets[1].local_addr().unwrap().to_string();
    // The listener's port when the target has none; a range of the same length; one port for all.
    for (target, all_to_the_second) in [
        (target_host.to_string(), false),
        (format!("{target_host}:{first}-{last}"), false),
        (to_the_second, true),
    ] {
        let listen = format!("{host}:{first}-{last}/tcp");
        let _forwarder = Forwarder::start(["-l", &listen, "-t", &target]);
        for (port, own) in ports.iter().zip(&targets) {
            let client = connect(SocketAddr::from((host, *port)));
            let target = if all_to_the_second { &targets[1] } else { own };
            both_ways(&client, &accept(target), 1000);
        }
    }
}

#[test]
fn rules_do_not_mix() {
    let targets: Vec<_> = (0..5).map(|_| listen()).collect();
    let mut arguments = Vec::new();
    for target in &targets {
        arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", target.local_addr().unwrap(), ""));
    }
    let forwarder = Forwarder::start(arguments);
    let ports = forwarder.ports();
    assert_eq!(ports.len(), targets.len());
    for (port, target) in ports.into_iter().zip(&targets) {
        let client = connect(local(port));
        both_ways(&client, &accept(target), 1000);
    }
}

const UP: Pattern = Pattern(1);
const DOWN: Pattern = Pattern(2);

/// A loopback address with a row of free ports, and targets on the same ports of another one.
#[track_caller]
fn range_with_targets() -> (IpAddr, Vec<u16>, Vec<TcpListener>) {
    for _ in 0..50 {
        let (host, target_host) = (own_loopback(), own_loopback());
        let first = TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port();
        let ports: Vec<u16> = (first..=first.saturating_add(3)).collect();
        let free = |host| ports.iter().all(|port| TcpListener::bind((host, *port)).is_ok());
        if ports.len() == 4 && free(host) && free(target_host) {
            let targets =
                ports.iter().map(|port| listen_on(SocketAddr::from((target_host, *port))));
            return (host, ports.clone(), targets.collect());
        }
    }
    panic!("no four free ports in a row");
}
