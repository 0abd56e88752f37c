//! What the command line takes, what it refuses, and how that is said.

use std::fs::File;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::harness::{
    Echo, Forwarder, Pattern, Resolver, UdpEcho, WAIT, accept, binary, bind, both_ways, client_of,
    connect, eventually, expect_datagram, in_own_network, listen, local, own_loopback, receive,
    run, send,
};

#[test]
fn help_and_version_go_to_standard_output() {
    for arguments in [["--help"], ["-h"]] {
        let output = run(arguments, WAIT);
        assert_eq!(output.status.code(), Some(0));
        let text = stdout(&output);
        for word in ["--listen", "--target", "--option", "--drain", "--max-connections", "idle="] {
            assert!(text.contains(word), "{word} is not in the help:\n{text}");
        }
        assert_eq!(stderr(&output), "");
    }
    for arguments in [["--version"], ["-V"]] {
        let output = run(arguments, WAIT);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains(env!("CARGO_PKG_VERSION")), "{}", stdout(&output));
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn the_help_names_every_rule_option() {
    let text = stdout(&run(["--help"], WAIT));
    for option in [
        "connect",
        "idle",
        "timeout",
        "half-close",
        "keepalive",
        "sessions",
        "backlog",
        "sockbuf",
        "refresh",
    ] {
        assert!(text.contains(option), "{option} is not in the help:\n{text}");
    }
}

#[test]
fn wrong_arguments_are_refused_before_anything_starts() {
    // Each with a word that the message has to have.
    let cases: &[(&[&str], &str)] = &[
        (&[], "-l"),
        (&["-l"], "-l"),
        (&["-l", "127.0.0.1:0"], "127.0.0.1:0"),
        (&["-t", "127.0.0.1:80"], "-t"),
        (&["--no-such-option"], "--no-such-option"),
        (&["-x"], "-x"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "stray"], "stray"),
        (&["-l", "127.0.0.1:70000", "-t", "127.0.0.1:80"], "70000"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:70000"], "70000"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:0"], "port"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1"], "port"),
        (&["-l", "127.0.0.1:0", "-t", ""], "-t"),
        (&["-l", "127.0.0.1", "-t", "127.0.0.1:80"], "port"),
        (&["-l", "127.0.0.1:0/sctp", "-t", "127.0.0.1:80"], "sctp"),
        (&["-l", "[::1:0", "-t", "127.0.0.1:80"], "[::1:0"),
        (&["-l", "127.0.0.1:9000-8000", "-t", "127.0.0.1"], "9000-8000"),
        (&["-l", "127.0.0.1:8000-8010", "-t", "127.0.0.1:9000-9002"], "9000-9002"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "idel=5s"], "idel"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "idle=soon"], "soon"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "idle=5x"], "5x"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "idle=-1"], "-1"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "idle"], "idle"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "sessions=0"], "sessions"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "backlog=0"], "backlog"),
        (&["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "sockbuf=99T"], "99T"),
        (&["--drain", "never", "-l", "127.0.0.1:0", "-t", "127.0.0.1:80"], "never"),
        (&["--max-connections", "0", "-l", "127.0.0.1:0", "-t", "127.0.0.1:80"], "0"),
        (&["--max-connections", "many", "-l", "127.0.0.1:0", "-t", "127.0.0.1:80"], "many"),
    ];
    for (arguments, word) in cases {
        let output = run(*arguments, WAIT);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{arguments:?}");
        let message = stderr(&output);
        assert!(message.contains(word), "{arguments:?}: {word} is not in: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
    }
}

#[test]
fn wrong_arguments_are_told_by_the_exit_code_when_nobody_can_read_why() {
    let (reader, no_reader) = std::io::pipe().unwrap();
    drop(reader);
    let full = File::options().write(true).open("/dev/full").unwrap();
    // The last one has no standard error at all.
    for (redirection, stderr) in
        [("", Stdio::from(no_reader)), ("", Stdio::from(full)), ("2>&-", Stdio::null())]
    {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("exec \"$@\" {redirection}")).arg("sh").arg(binary());
        command.args(["--no-such-option", "-l", "127.0.0.1:70000", "-t"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let mut child = command.spawn().expect("sh runs");
        let mut status = None;
        eventually("it ends", WAIT, || {
            status = child.try_wait().expect("the child can be waited for");
            status.is_some()
        });
        assert_eq!(status.and_then(|status| status.code()), Some(2));
    }
}

#[test]
fn a_mistyped_option_is_answered_with_the_one_that_was_meant() {
    let output = run(["-l", "127.0.0.1:0", "-t", "127.0.0.1:80", "-o", "half-clsoe=5s"], WAIT);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("half-close"), "{}", stderr(&output));
}

#[test]
fn a_port_in_use_is_named_with_protocol_and_cause() {
    let tcp = TcpListener::bind((own_loopback(), 0)).unwrap().local_addr().unwrap();
    let _taken = TcpListener::bind(tcp).unwrap();
    let udp = bind(SocketAddr::from((own_loopback(), 0)));
    for (address, protocol) in [(tcp, "tcp"), (udp.local_addr().unwrap(), "udp")] {
        for suffix in ["", protocol] {
            let mut listen = address.to_string();
            if !suffix.is_empty() {
                listen = format!("{listen}/{suffix}");
            }
            let output = run(["-l", &listen, "-t", "127.0.0.1:80"], WAIT);
            assert_eq!(output.status.code(), Some(1), "{listen}");
            let message = stderr(&output);
            for word in [&address.to_string(), protocol, "in use"] {
                assert!(message.contains(word), "{listen}: {word} is not in: {message}");
            }
            assert!(!message.lines().any(|line| line == "ready"), "{message}");
            assert_eq!(stdout(&output), "");
        }
    }
}

#[test]
fn an_address_that_is_not_ours_is_named_with_the_cause() {
    // From the range reserved for documentation (RFC 5737).
    let output = run(["-l", "192.0.2.1:0/tcp", "-t", "127.0.0.1:80"], WAIT);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    for word in ["192.0.2.1", "tcp", "this machine does not have the address"] {
        assert!(message.contains(word), "{word} is not in: {message}");
    }
}

#[test]
fn a_name_with_addresses_of_both_families_listens_on_those_that_there_are() {
    in_own_network(|| {
        std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").expect("IPv6 switched off");
        let Some(resolver) = Resolver::start(1) else { return };
        resolver.set("here.test", &[Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()]);
        let (echo, udp_echo) = (Echo::start(), UdpEcho::start());
        for (protocols, lines) in [("", 2), ("/tcp", 1), ("/udp", 1)] {
            let target = if protocols == "/udp" { udp_echo.address() } else { echo.address() };
            let listen = format!("here.test:0{protocols}");
            let forwarder = resolver.forwarder(&Forwarder::rule(&listen, target, ""));
            let log = forwarder.log().lines();
            let listening = log.iter().filter(|line| line.starts_with("listening on "));
            assert_eq!(listening.count(), lines, "{log:?}");
            assert_eq!(forwarder.ports().len(), 1, "{log:?}");
            if protocols == "/udp" {
                let client = client_of(&forwarder);
                client.send(b"datagram").unwrap();
                expect_datagram(&client, b"datagram");
            } else {
                let client = connect(forwarder.address());
                send(&client, Pattern(1), 0..1000);
                receive(&client, Pattern(1), 0..1000);
            }
        }
    });
}

#[test]
fn one_bind_that_fails_starts_nothing() {
    let taken = TcpListener::bind((own_loopback(), 0)).unwrap().local_addr().unwrap();
    let _taken = TcpListener::bind(taken).unwrap();
    let good = SocketAddr::from((own_loopback(), 0)).to_string();
    let output =
        run(["-l", &good, "-t", "127.0.0.1:80", "-l", &taken.to_string(), "-t", "a:80"], WAIT);
    assert_eq!(output.status.code(), Some(1));
    assert!(!stderr(&output).lines().any(|line| line == "ready"), "{}", stderr(&output));
}

#[test]
fn a_restart_binds_the_same_port_at_once() {
    let echo = Echo::start();
    let first = Forwarder::tcp(echo.address(), "");
    let port = first.port();
    // The forwarder closes first here, so that its side is what stays in TIME_WAIT.
    let client = connect(first.address());
    drop(first);
    drop(client);
    let listen = format!("127.0.0.1:{port}/tcp");
    let second = Forwarder::start(Forwarder::rule(&listen, echo.address(), ""));
    assert_eq!(second.port(), port);
}

#[test]
fn one_line_per_listener_comes_before_ready() {
    let echo = Echo::start();
    let mut arguments = Forwarder::rule("127.0.0.1:0", echo.address(), "");
    arguments.extend(Forwarder::rule("127.0.0.1:0/udp", echo.address(), ""));
    let forwarder = Forwarder::start(arguments);
    let lines = forwarder.log().lines();
    let ready = lines.iter().position(|line| line == "ready").expect("a line that says ready");
    let listeners: Vec<_> =
        lines[..ready].iter().filter(|line| line.starts_with("listening on ")).collect();
    let ports = forwarder.ports();
    let expected = [(ports[0], "tcp"), (ports[0], "udp"), (ports[1], "udp")]
        .map(|(port, name)| format!("listening on 127.0.0.1:{port}/{name} -> {}", echo.address()));
    assert_eq!(listeners, expected.iter().collect::<Vec<_>>());
}

#[test]
fn options_before_the_first_listener_are_defaults_for_all() {
    let target = listen();
    let address = target.local_addr().unwrap();
    let mut arguments = vec!["-o".to_owned(), "idle=300ms".to_owned()];
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", address, ""));
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", address, "idle=10m"));
    let forwarder = Forwarder::start(arguments);
    let before = forwarder.descriptors();
    let [by_default, own] = <[u16; 2]>::try_from(forwarder.ports()).unwrap().map(local);
    let kept = (connect(own), accept(&target));
    let _closed = (connect(by_default), accept(&target));
    forwarder.wait_for_descriptors(before + 2, WAIT);
    both_ways(&kept.0, &kept.1, 1000);
}

#[test]
fn the_self_test_passes() {
    let output = run(["--selftest"], Duration::from_secs(90));
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
