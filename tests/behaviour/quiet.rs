//! A forwarder with nothing to do does nothing, says little, and waits for nobody.

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    Echo, Forwarder, Pattern, Refusing, UdpEcho, WAIT, accept, binary, both_ways, client_of,
    connect, end, eventually, expect_datagram, expect_end, expect_refusal, listen, local, pair,
    receive, reset, send,
};

#[test]
fn a_start_that_nobody_reads_of_is_a_start_all_the_same() {
    let rule = ["-l", "127.0.0.1:0/udp", "-t", "127.0.0.1:9"];
    // Their lines together are more than a pipe holds.
    let mut child = Command::new(binary())
        .args((0..2000).flat_map(|_| rule))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    // It takes signals over when everything is open.
    eventually("SIGTERM is blocked", WAIT, || {
        let text = fs::read_to_string(&status).unwrap();
        let mask = text.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (Signal::SIGTERM as u64 - 1) != 0
    });
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let mut ended = None;
    eventually("it stops when told to", WAIT, || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().code(), Some(0));
}

#[test]
fn with_nothing_to_do_it_never_wakes() {
    let echo = Echo::start();
    let forwarder = Forwarder::start(Forwarder::rule("127.0.0.1:0", echo.address(), ""));
    expect_sleep(&forwarder);
    // Nor for a connection that is open and silent.
    let client = connect(forwarder.address());
    send(&client, UP, 0..10);
    receive(&client, UP, 0..10);
    expect_sleep(&forwarder);
    send(&client, UP, 10..20);
    receive(&client, UP, 10..20);
}

#[test]
fn clients_that_wait_for_room_never_wake_it() {
    let target = listen();
    let mut arguments = vec!["--max-connections".to_owned(), "2".to_owned()];
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", target.local_addr().unwrap(), ""));
    let forwarder = Forwarder::start(arguments);
    let (first, second) = (pair(&forwarder, &target), pair(&forwarder, &target));
    let waiting: Vec<_> = (0..5).map(|_| connect(forwarder.address())).collect();
    for (n, client) in (0..).zip(&waiting) {
        send(client, Pattern(n), 0..1000);
    }
    expect_sleep(&forwarder);
    drop(first);
    for (n, client) in (0..).zip(waiting) {
        let server = accept(&target);
        receive(&server, Pattern(n), 0..1000);
        both_ways(&client, &server, 1000);
    }
    both_ways(&second.0, &second.1, 1000);
}

#[test]
fn after_load_it_is_quiet_again() {
    let (echo, udp_echo, refusing) = (Echo::start(), UdpEcho::start(), Refusing::start());
    let mut arguments = Forwarder::rule("127.0.0.1:0/udp", udp_echo.address(), "timeout=500ms");
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", echo.address(), "idle=30s"));
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", refusing.address(), ""));
    let forwarder = Forwarder::start(arguments);
    let ports = forwarder.ports();
    for n in 0..100 {
        let client = connect(local(ports[1]));
        send(&client, Pattern(n), 0..50_000);
        receive(&client, Pattern(n), 0..50_000);
        end(&client);
        expect_end(&client);
        expect_refusal(local(ports[2]));
        let client = client_of(&forwarder);
        client.send(b"datagram").unwrap();
        expect_datagram(&client, b"datagram");
    }
    expect_sleep(&forwarder);
}

#[test]
fn ten_thousand_refusals_are_a_handful_of_log_lines_with_a_count() {
    let refusing = [Refusing::start(), Refusing::start()];
    let mut arguments = Vec::new();
    for refusing in &refusing {
        arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", refusing.address(), ""));
    }
    let forwarder = Forwarder::start(arguments);
    let ports = forwarder.ports();
    let (from, start) = (forwarder.log().len(), Instant::now());
    thread::scope(|scope| {
        for port in &ports {
            scope.spawn(|| {
                for _ in 0..5000 {
                    expect_refusal(local(*port));
                }
            });
        }
    });
    // The count of those that were kept back comes with the next one that is logged.
    eventually("the log says how many there were", WAIT, || {
        thread::sleep(Duration::from_millis(200));
        ports.iter().for_each(|port| {
            expect_refusal(local(*port));
        });
        let lines = forwarder.log().lines().split_off(from);
        refusing.iter().all(|refusing| {
            let address = refusing.address().to_string();
            lines.iter().any(|line| line.contains(&address) && largest_count(line) >= 100)
        })
    });
    let (lines, elapsed) = (forwarder.log().len() - from, start.elapsed());
    let allowed = 2 * (elapsed.as_secs() as usize + 2);
    assert!(lines <= allowed, "{lines} lines in {elapsed:?}, not {allowed} or fewer");
}

#[test]
fn a_log_that_nobody_reads_never_stops_relaying() {
    let (echo, refusing) = (Echo::start(), Refusing::start());
    let mut arguments = vec!["-v".to_owned(), "-v".to_owned()];
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", echo.address(), ""));
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", refusing.address(), ""));
    let mut forwarder = Forwarder::start_unread(arguments);
    let ports = forwarder.ports();
    let open = connect(local(ports[0]));
    for closed in [false, true] {
        // At first the pipe is full, then it has no reader any more.
        if closed {
            forwarder.close_unread();
        }
        for n in 0..1500 {
            let client = connect(local(ports[0]));
            send(&client, Pattern(n), 0..50);
            receive(&client, Pattern(n), 0..50);
            reset(client);
            expect_refusal(local(ports[1]));
        }
        let offset = u64::from(closed) * 10;
        send(&open, UP, offset..offset + 10);
        receive(&open, UP, offset..offset + 10);
    }
}

#[test]
fn without_being_asked_a_connection_leaves_no_line_in_the_log() {
    let echo = Echo::start();
    let forwarder = Forwarder::tcp(echo.address(), "");
    let from = forwarder.log().len();
    for n in 0..50 {
        let client = connect(forwarder.address());
        send(&client, Pattern(n), 0..50);
        receive(&client, Pattern(n), 0..50);
        if n % 2 == 0 {
            reset(client);
        }
    }
    assert_eq!(forwarder.log().lines().split_off(from), Vec::<String>::new());
}

const UP: Pattern = Pattern(1);

/// Soon, no thread of the forwarder wakes for three seconds in a row.
#[track_caller]
fn expect_sleep(forwarder: &Forwarder) {
    // What was under way may still end first: hence the second and the third try.
    let mut windows = Vec::new();
    while windows.len() < 3 {
        let before = forwarder.sleeps();
        thread::sleep(Duration::from_secs(3));
        let woken = forwarder.sleeps() - before;
        if woken == 0 {
            return;
        }
        windows.push(woken);
    }
    panic!("woken in each three seconds: {windows:?}");
}

/// The largest number in a log line that is not part of an address.
fn largest_count(line: &str) -> u64 {
    line.split_whitespace()
        .filter(|word| !word.contains([':', '.', '/']))
        .flat_map(|word| word.split(|c: char| !c.is_ascii_digit()))
        .filter_map(|digits| digits.parse().ok())
        .max()
        .unwrap_or(0)
}
