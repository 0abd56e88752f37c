//! Stopping and asking: what signals do to a running forwarder.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    Echo, Forwarder, Pattern, UdpEcho, WAIT, both_ways, client_of, connect, eventually,
    expect_datagram, listen, pair, receive, reset, send, try_connect,
};

#[test]
fn with_nothing_to_finish_a_stop_is_at_once_and_clean() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let (mut forwarder, _target) = start("10m");
        forwarder.signal(signal);
        assert_eq!(forwarder.wait(WAIT).code(), Some(0), "after {signal}");
    }
}

#[test]
fn open_connections_are_served_to_their_end_after_a_stop() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let (mut forwarder, target) = start("10m");
        let address = forwarder.address();
        let first = pair(&forwarder, &target);
        let second = pair(&forwarder, &target);
        send(&first.0, Pattern(1), 0..1000);
        forwarder.signal(signal);
        wait_until_refused(address);
        receive(&first.1, Pattern(1), 0..1000);
        both_ways(&second.0, &second.1, 1_000_000);
        // One is still open: the process stays for it.
        send(&first.1, Pattern(2), 0..1000);
        receive(&first.0, Pattern(2), 0..1000);
        drop(first);
        assert_eq!(forwarder.wait(WAIT).code(), Some(0), "after {signal}");
    }
}

#[test]
fn when_the_drain_time_is_over_open_connections_are_cut() {
    let (mut forwarder, target) = start("500ms");
    let (client, server) = pair(&forwarder, &target);
    let start = Instant::now();
    forwarder.signal(Signal::SIGTERM);
    assert_eq!(forwarder.wait(WAIT).code(), Some(0));
    assert!(start.elapsed() >= Duration::from_millis(450), "cut after {:?}", start.elapsed());
    for mut stream in [&client, &server] {
        // An end or a reset, but nothing else.
        match stream.read(&mut [0; 1]) {
            Ok(n) => assert_eq!(n, 0),
            Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn a_second_signal_stops_at_once() {
    for (first, second) in [(Signal::SIGTERM, Signal::SIGTERM), (Signal::SIGINT, Signal::SIGTERM)] {
        let (mut forwarder, target) = start("10m");
        let address = forwarder.address();
        let _pair = pair(&forwarder, &target);
        forwarder.signal(first);
        wait_until_refused(address);
        forwarder.signal(second);
        forwarder.wait(WAIT);
    }
}

#[test]
fn udp_flows_do_not_hold_up_a_stop() {
    let echo = UdpEcho::start();
    let mut arguments = vec!["--drain".to_owned(), "10m".to_owned()];
    arguments.extend(Forwarder::rule("127.0.0.1:0/udp", echo.address(), ""));
    let mut forwarder = Forwarder::start(arguments);
    let client = client_of(&forwarder);
    client.send(b"hello").unwrap();
    expect_datagram(&client, b"hello");
    forwarder.signal(Signal::SIGTERM);
    assert_eq!(forwarder.wait(WAIT).code(), Some(0));
}

#[test]
fn a_status_line_per_rule_is_logged_on_request() {
    let (echo, udp_echo) = (Echo::start(), UdpEcho::start());
    let mut arguments = Forwarder::rule("127.0.0.1:0/tcp", echo.address(), "");
    arguments.extend(Forwarder::rule("127.0.0.1:0/udp", udp_echo.address(), ""));
    let forwarder = Forwarder::start(arguments);
    let ports = forwarder.ports();
    let client = connect(forwarder.address());
    for round in 0..3 {
        send(&client, Pattern(1), round * 10..round * 10 + 10);
        receive(&client, Pattern(1), round * 10..round * 10 + 10);
        let from = forwarder.log().len();
        forwarder.signal(Signal::SIGUSR1);
        for port in &ports {
            let line = forwarder.log().wait_for("a status line per rule", from, |line| {
                is_status(line) && line.contains(&format!("127.0.0.1:{port}"))
            });
            let counters = line.split_whitespace().filter(|word| {
                word.split_once('=').is_some_and(|(key, value)| {
                    !key.is_empty() && value.starts_with(|c: char| c.is_ascii_digit())
                })
            });
            assert!(counters.count() >= 2, "no counters in: {line}");
        }
        let status = forwarder.log().lines().split_off(from);
        let status = status.iter().filter(|line| is_status(line)).count();
        assert_eq!(status, ports.len(), "one line per rule");
    }
}

#[track_caller]
fn start(drain: &str) -> (Forwarder, TcpListener) {
    let target = listen();
    let mut arguments = vec!["--drain".to_owned(), drain.to_owned()];
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", target.local_addr().unwrap(), ""));
    (Forwarder::start(arguments), target)
}

/// Waits until the forwarder takes no new client.
#[track_caller]
fn wait_until_refused(address: SocketAddr) {
    // One that came too early leaves nothing open behind it.
    eventually("no new client is accepted", WAIT, || try_connect(address).map(reset).is_err());
}

/// The word stands at the beginning, after what the log puts before every line.
fn is_status(line: &str) -> bool {
    line.trim_start_matches('[').split_whitespace().take(3).any(|word| word == "status")
}
