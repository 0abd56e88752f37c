//! Targets by name: lookups that fail, hang or change never hold up what does not need them.

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::{
    Answers, BlackHole, Echo, Forwarder, Pattern, Refusing, Resolver, UdpEcho, WAIT, accept, bind,
    both_ways, client_of, connect, end, eventually, expect_end, expect_refusal, listen_on, local,
    own_loopback, receive, receive_to_end, send, try_connect,
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
    let (first, second) = (own_loopback(), own_loopback());
    let old = listen_on(any_port(first));
    let port = old.local_addr().unwrap().port();
    let new = listen_on(SocketAddr::from((second, port)));
    resolver.set("target.test", &[first]);
    let forwarder = resolver.forwarder(&rule("tcp", port, "refresh=1s"));
    let client = connect(forwarder.address());
    let server = accept(&old);
    resolver.set("target.test", &[second]);
    new.set_nonblocking(true).unwrap();
    eventually("the new address is used", WAIT, || {
        let _client = connect(forwarder.address());
        thread::sleep(Duration::from_millis(50));
        new.accept().is_ok()
    });
    // What began at the old address stays there.
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
