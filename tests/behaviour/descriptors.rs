//! Descriptors and memory: what happens when they run out, what is given back, and the cap on
//! connections.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::{
    BlackHole, Echo, Forwarder, Pattern, Refusing, UdpEcho, WAIT, accept, binary, bind, both_ways,
    client_of, connect, end, eventually, expect_datagram, expect_end, listen, local, own_loopback,
    pair, receive, reset, send, try_connect,
};

#[test]
fn out_of_descriptors_it_neither_spins_nor_floods_the_log_and_recovers() {
    let echo = Echo::start();
    // One connection takes two descriptors: with one limit the last accept fails, with the other
    // one the last outgoing socket.
    for limit in [40, 41] {
        let forwarder = limited(limit, "127.0.0.1:0/tcp", &echo);
        let (served, unserved) = connect_until_unserved(&forwarder);
        assert!(served.len() >= 10, "only {} clients with {limit} descriptors", served.len());

        // More come meanwhile; nobody of them is served, and the served ones go on.
        let mut waiting: Vec<_> =
            (0..20).filter_map(|_| try_connect(forwarder.address()).ok()).collect();
        waiting.extend(unserved);
        thread::sleep(Duration::from_millis(200));
        let (lines, processor_time) = (forwarder.log().len(), forwarder.processor_time());
        let start = Instant::now();
        let mut offset = 4;
        while start.elapsed() < Duration::from_secs(2) {
            for client in &served {
                send(client, UP, offset..offset + 10);
                receive(client, UP, offset..offset + 10);
            }
            offset += 10;
            thread::sleep(Duration::from_millis(100));
        }
        let elapsed = start.elapsed();
        let used = forwarder.processor_time() - processor_time;
        assert!(used < elapsed / 4, "{used:?} of processor time in {elapsed:?}");
        let logged = forwarder.log().len() - lines;
        assert!(logged as u64 <= elapsed.as_secs() + 2, "{logged} lines in {elapsed:?}");

        // Who was not refused meanwhile is served as soon as there is room.
        drop(served);
        for client in waiting {
            match exchange(&client) {
                Ok(()) => {}
                Err(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
                Err(other) => panic!("neither served nor refused: {other}"),
            }
        }
        eventually("a new client is served", WAIT, || {
            try_connect(forwarder.address()).is_ok_and(|client| exchange(&client).is_ok())
        });
    }
}

#[test]
fn a_client_that_finds_no_descriptor_is_reset_at_once_or_served_later_but_never_lost() {
    let echo = Echo::start();
    for limit in [30, 31] {
        let forwarder = limited(limit, "127.0.0.1:0/tcp", &echo);
        let (served, unserved) = connect_until_unserved(&forwarder);
        for client in &served {
            send(client, UP, 4..10);
            receive(client, UP, 4..10);
        }
        drop(served);
        if let Some(client) = unserved {
            // What it sent while it waited is still there.
            receive(&client, UP, 0..4);
            assert_eq!(exchange(&client), Ok(()));
        }
        eventually("a new client is served", WAIT, || {
            try_connect(forwarder.address()).is_ok_and(|client| exchange(&client).is_ok())
        });
    }
}

#[test]
fn out_of_descriptors_udp_flows_go_on_and_new_ones_start_again_later() {
    let echo = UdpEcho::start();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 30; exec \"$@\"", "sh"]).arg(binary());
    command.args(Forwarder::rule("127.0.0.1:0/udp", echo.address(), "timeout=1s"));
    let forwarder = Forwarder::run(command);
    let first = client_of(&forwarder);
    first.send(b"first").unwrap();
    expect_datagram(&first, b"first");
    let others: Vec<_> = (0..60).map(|_| client_of(&forwarder)).collect();
    for other in &others {
        other.send(b"other").unwrap();
    }
    for _ in 0..10 {
        first.send(b"still").unwrap();
        expect_datagram(&first, b"still");
    }
    let last = others.last().unwrap();
    last.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    eventually("the last flow gets its turn", WAIT, || {
        last.send(b"again").unwrap();
        last.recv(&mut [0; 100]).is_ok()
    });
}

#[test]
fn a_flood_of_unanswered_flows_beyond_the_descriptors_keeps_nobody_from_its_answers() {
    let target = bind(local(0));
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 256; exec \"$@\"", "sh"]).arg(binary());
    command.args(Forwarder::rule("127.0.0.1:0/udp", target.local_addr().unwrap(), ""));
    let forwarder = Forwarder::run(command);
    let ask = |client: &UdpSocket, question: &[u8]| {
        client.send(question).unwrap();
        // What strangers have sent, as far as it was passed on, is not answered.
        let mut buffer = [0; 100];
        let flow = loop {
            let (n, flow) = target.recv_from(&mut buffer).expect("the question arrives");
            if &buffer[..n] == question {
                break flow;
            }
            assert_eq!(&buffer[..n], b"scan");
        };
        target.send_to(question, flow).unwrap();
        expect_datagram(client, question);
        flow
    };
    let (silent, busy) = (client_of(&forwarder), client_of(&forwarder));
    let silent_flow = ask(&silent, b"before");
    let busy_flow = ask(&busy, b"before");
    let strangers: Vec<_> = (0..300).map(|_| client_of(&forwarder)).collect();
    for (n, stranger) in (0_u32..).zip(&strangers) {
        stranger.send(b"scan").unwrap();
        if n % 10 == 0 {
            assert_eq!(ask(&busy, &n.to_be_bytes()), busy_flow);
        }
    }
    for n in 0..5 {
        let newcomer = client_of(&forwarder);
        let flow = ask(&newcomer, &[n, 0]);
        assert_eq!(ask(&newcomer, &[n, 1]), flow);
    }
    target.send_to(b"late", silent_flow).unwrap();
    expect_datagram(&silent, b"late");
    assert_eq!(ask(&silent, b"after"), silent_flow);
}

#[test]
fn the_descriptor_limit_is_raised_at_start() {
    let target = listen();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh"]).arg(binary());
    command.args(Forwarder::rule("127.0.0.1:0/tcp", target.local_addr().unwrap(), ""));
    let forwarder = Forwarder::run(command);
    let pairs: Vec<_> = (0..100).map(|_| pair(&forwarder, &target)).collect();
    let (client, server) = &pairs[99];
    both_ways(client, server, 1000);
}

#[test]
fn as_many_connections_as_allowed_are_served_and_the_next_one_waits() {
    let target = listen();
    let mut arguments = vec!["--max-connections".to_owned(), "3".to_owned()];
    arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", target.local_addr().unwrap(), ""));
    let forwarder = Forwarder::start(arguments);
    for _ in 0..3 {
        let mut pairs: Vec<_> = (0..3).map(|_| pair(&forwarder, &target)).collect();
        let waiting = connect(forwarder.address());
        send(&waiting, Pattern(9), 0..10);
        expect_nobody(&target);

        let (client, server) = pairs.remove(1);
        both_ways(&client, &server, 1000);
        let server = accept(&target);
        receive(&server, Pattern(9), 0..10);
        // The others have been there all the time.
        for (client, server) in pairs {
            both_ways(&client, &server, 1000);
        }
        end(&waiting);
        expect_end(&server);
        end(&server);
        expect_end(&waiting);
    }
}

#[test]
fn a_mixture_of_everything_gives_all_descriptors_back() {
    let (target, echo) = (listen(), Echo::start());
    let (refusing, hole) = (Refusing::start(), BlackHole::start());
    let udp = UdpEcho::start();
    let mut arguments = Vec::new();
    let options = "connect=500ms,half-close=500ms,timeout=500ms";
    for address in
        [target.local_addr().unwrap(), echo.address(), refusing.address(), hole.address()]
    {
        arguments.extend(Forwarder::rule("127.0.0.1:0/tcp", address, options));
    }
    arguments.extend(Forwarder::rule("127.0.0.1:0/udp", udp.address(), options));
    let forwarder = Forwarder::start(arguments);
    let ports = forwarder.ports();
    let [to_target, to_echo, to_refusing, to_hole, to_udp] =
        <[u16; 5]>::try_from(ports).unwrap().map(local);
    let before = forwarder.descriptors();
    for n in 0..20 {
        let (client, server) = (connect(to_target), accept(&target));
        match n % 5 {
            0 => both_ways(&client, &server, 300_000),
            1 => reset(client),
            2 => reset(server),
            3 => {
                send(&client, UP, 0..100_000);
                drop(client);
                drop(server);
            }
            _ => {
                // One that leaves the other one waiting for an end that never comes.
                end(&client);
                thread::spawn(move || {
                    thread::sleep(Duration::from_secs(2));
                    drop(server);
                });
            }
        }
        let client = connect(to_echo);
        send(&client, UP, 0..100_000);
        if n % 2 == 0 {
            receive(&client, UP, 0..100_000);
        }
        drop(client);
        drop(try_connect(to_refusing));
        let client = connect(to_hole);
        if n % 2 == 0 {
            reset(client);
        }
        let client = bind(local(0));
        client.connect(to_udp).unwrap();
        client.send(b"datagram").unwrap();
        expect_datagram(&client, b"datagram");
    }
    // A few pipes may be kept for the next bulk transfer; a leak would be at least twenty.
    forwarder.wait_for_descriptors(before + 8, WAIT);
}

#[test]
fn a_thousand_idle_connections_take_little_memory_and_give_it_back() {
    let target = listen();
    let forwarder = Forwarder::tcp(target.local_addr().unwrap(), "");
    // What the first connection brings along stays.
    let (client, server) = pair(&forwarder, &target);
    both_ways(&client, &server, 3_000_000);
    let (memory, descriptors) = (forwarder.anonymous_kib(), forwarder.descriptors());

    let pairs: Vec<_> = (0..1000).map(|_| pair(&forwarder, &target)).collect();
    for (client, server) in &pairs {
        send(client, UP, 0..100);
        receive(server, UP, 0..100);
        send(server, UP, 0..100);
        receive(client, UP, 0..100);
    }
    let grown = forwarder.anonymous_kib().saturating_sub(memory);
    // 256 bytes each; a growing table may for a moment be there twice.
    assert!(grown <= 640, "{grown} KiB for a thousand idle connections");
    drop(pairs);
    forwarder.wait_for_descriptors(descriptors, WAIT);
    forwarder.wait_for_memory(memory + 384, WAIT);
}

#[test]
fn a_range_of_a_thousand_ports_takes_little_memory() {
    let (echo, host) = (Echo::start(), own_loopback());
    let free = |first: u16| {
        (first..first + 1000).all(|port| {
            TcpListener::bind((host, port)).is_ok() && UdpSocket::bind((host, port)).is_ok()
        })
    };
    let first = (10_000..60_000).step_by(1000).find(|first| free(*first)).expect("free ports");
    let listen = format!("{host}:{first}-{}", first + 999);
    let forwarder = Forwarder::start(Forwarder::rule(&listen, echo.address(), ""));
    for port in [first, first + 500, first + 999] {
        let client = connect(SocketAddr::from((host, port)));
        assert_eq!(exchange(&client), Ok(()));
    }
    let memory = forwarder.anonymous_kib();
    assert!(memory < 4096, "{memory} KiB for a thousand ports");
}

const UP: Pattern = Pattern(1);

/// A forwarder with one rule that may have no more than `limit` descriptors.
#[track_caller]
fn limited(limit: u32, listen: &str, echo: &Echo) -> Forwarder {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("ulimit -n {limit}; exec \"$@\"")).arg("sh").arg(binary());
    command.args(Forwarder::rule(listen, echo.address(), ""));
    Forwarder::run(command)
}

/// Connects until a client is reset (then it is gone) or waits for its answer in vain.
#[track_caller]
fn connect_until_unserved(forwarder: &Forwarder) -> (Vec<TcpStream>, Option<TcpStream>) {
    let mut served = Vec::new();
    for _ in 0..100 {
        let Ok(client) = try_connect(forwarder.address()) else { return (served, None) };
        client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let result = exchange(&client);
        client.set_read_timeout(Some(WAIT)).unwrap();
        match result {
            Ok(()) => served.push(client),
            Err(ErrorKind::WouldBlock) => return (served, Some(client)),
            Err(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => return (served, None),
            Err(other) => panic!("after {} clients: {other}", served.len()),
        }
    }
    panic!("{} clients are served with so few descriptors", served.len());
}

/// Sends four bytes and reads what comes back; a clean end counts as [`ErrorKind::UnexpectedEof`].
fn exchange(mut client: &TcpStream) -> Result<(), ErrorKind> {
    client.write_all(UP.bytes(0, 4)).map_err(|e| e.kind())?;
    let mut buffer = [0; 4];
    client.read_exact(&mut buffer).map_err(|e| e.kind())?;
    UP.check(0, &buffer);
    Ok(())
}

/// Nobody connects to the target for a while.
#[track_caller]
fn expect_nobody(target: &TcpListener) {
    target.set_nonblocking(true).unwrap();
    thread::sleep(Duration::from_millis(300));
    assert!(target.accept().is_err(), "one more than allowed is served");
    target.set_nonblocking(false).unwrap();
}
