//! How TCP connections end: each direction by itself, resets as resets, and nothing cut short.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::{
    Forwarder, Pattern, WAIT, accept, both_ways, connect, end, expect_broken, expect_end,
    expect_reset, listen, pair, push_until_stopped, receive, receive_to_end, reset, send,
};

#[test]
fn an_answer_that_comes_long_after_the_clients_end_arrives_whole() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    send(&client, UP, 0..10);
    end(&client);
    assert_eq!(receive_to_end(&server, UP, 0), 10);

    thread::sleep(Duration::from_secs(2));
    send(&server, DOWN, 0..256 * 1024);
    drop(server);
    assert_eq!(receive_to_end(&client, DOWN, 0), 256 * 1024);
}

#[test]
fn a_client_sees_the_targets_end_and_can_still_send() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    send(&server, DOWN, 0..10);
    end(&server);
    assert_eq!(receive_to_end(&client, DOWN, 0), 10);

    send(&client, UP, 0..MIB);
    end(&client);
    assert_eq!(receive_to_end(&server, UP, 0), MIB);
}

#[test]
fn every_order_of_the_two_ends_passes_all_bytes() {
    let (forwarder, target) = start("");
    for client_ends_first in [true, false] {
        for other_sends_meanwhile in [true, false] {
            let (client, server) = pair(&forwarder, &target);
            let (first, second) =
                if client_ends_first { (&client, &server) } else { (&server, &client) };
            thread::scope(|scope| {
                scope.spawn(|| {
                    send(first, UP, 0..MIB);
                    end(first);
                });
                scope.spawn(|| assert_eq!(receive_to_end(first, DOWN, 0), MIB));
                if other_sends_meanwhile {
                    let sender = scope.spawn(|| send(second, DOWN, 0..MIB));
                    assert_eq!(receive_to_end(second, UP, 0), MIB);
                    sender.join().unwrap();
                } else {
                    assert_eq!(receive_to_end(second, UP, 0), MIB);
                    send(second, DOWN, 0..MIB);
                }
                end(second);
            });
        }
    }
}

#[test]
fn both_sides_may_end_at_the_same_time() {
    let (forwarder, target) = start("");
    for len in [0, 1, 1000, MIB] {
        let (client, server) = pair(&forwarder, &target);
        both_ways(&client, &server, len);
    }
}

#[test]
fn an_end_without_any_byte_is_passed_on() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    end(&client);
    expect_end(&server);
    send(&server, DOWN, 0..5);
    receive(&client, DOWN, 0..5);
    drop(server);
    expect_end(&client);
}

#[test]
fn a_finished_connection_gives_its_descriptors_back() {
    let (forwarder, target) = start("");
    let before = forwarder.descriptors();
    for client_ends_first in [true, false] {
        let (client, server) = pair(&forwarder, &target);
        let (first, second) = if client_ends_first { (client, server) } else { (server, client) };
        end(&first);
        expect_end(&second);
        end(&second);
        expect_end(&first);
        // Both are still open here: two ends are the end of a connection.
        forwarder.wait_for_descriptors(before, WAIT);
    }
}

#[test]
fn a_half_closed_transfer_is_not_cut_while_bytes_come() {
    let (forwarder, target) = start("half-close=1s");
    let (downloading, server) = pair(&forwarder, &target);
    end(&downloading);
    expect_end(&server);
    let (client, uploaded_to) = pair(&forwarder, &target);
    end(&uploaded_to);
    expect_end(&client);

    // Three times the timeout, and each pause a tenth of it.
    for i in 0..30 {
        send(&server, DOWN, i..i + 1);
        receive(&downloading, DOWN, i..i + 1);
        send(&client, UP, i..i + 1);
        receive(&uploaded_to, UP, i..i + 1);
        thread::sleep(Duration::from_millis(100));
    }
    end(&server);
    expect_end(&downloading);
    end(&client);
    expect_end(&uploaded_to);
}

#[test]
fn a_peer_that_never_ends_is_let_go_after_the_half_close_timeout() {
    let (forwarder, target) = start("half-close=500ms");
    let before = forwarder.descriptors();
    let (client, server) = pair(&forwarder, &target);
    let ended = Instant::now();
    end(&client);
    expect_end(&server);
    forwarder.wait_for_descriptors(before, WAIT);
    assert!(ended.elapsed() >= Duration::from_millis(450), "cut after {:?}", ended.elapsed());

    let (client, server) = pair(&forwarder, &target);
    end(&server);
    expect_end(&client);
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn the_half_close_timeout_leaves_open_connections_alone() {
    let (forwarder, target) = start("half-close=200ms");
    let (client, server) = pair(&forwarder, &target);
    thread::sleep(Duration::from_secs(1));
    both_ways(&client, &server, 1000);
}

#[test]
fn a_target_that_resets_in_mid_answer_is_not_a_clean_end() {
    let (forwarder, target) = start("");
    for len in [0, 1, 100_000, 4 * MIB] {
        let (client, server) = pair(&forwarder, &target);
        thread::scope(|scope| {
            let sender = scope.spawn(|| send(&server, DOWN, 0..len));
            // All but the last bytes have arrived when the reset comes.
            receive(&client, DOWN, 0..len - len / 10);
            sender.join().unwrap();
        });
        reset(server);
        expect_reset(&client, DOWN, len - len / 10);
    }
}

#[test]
fn an_answer_that_comes_before_the_reset_of_an_upload_is_read_first() {
    let (forwarder, target) = start("");
    let before = forwarder.descriptors();
    let answered = |address| {
        (0..50).filter(|n| early_answer(address, &target, [2000, 100_000, 4 * MIB][n % 3])).count()
    };
    let direct = answered(target.local_addr().unwrap());
    let forwarded = answered(forwarder.address());
    assert!(forwarded >= direct, "{forwarded} answers of 50, and {direct} without a forwarder");
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn a_client_that_resets_is_a_reset_to_the_target() {
    let (forwarder, target) = start("");
    let before = forwarder.descriptors();
    for len in [0, 1, 100_000] {
        let (client, server) = pair(&forwarder, &target);
        send(&client, UP, 0..len);
        receive(&server, UP, 0..len);
        reset(client);
        expect_reset(&server, UP, len);
        forwarder.wait_for_descriptors(before, WAIT);
    }
}

#[test]
fn a_client_that_resets_as_soon_as_it_is_connected_is_a_reset_to_the_target() {
    let (forwarder, target) = start("");
    let before = forwarder.descriptors();
    for _ in 0..200 {
        // The target's kernel may be ahead of the forwarder, which still waits for its connect.
        let (client, server) = pair(&forwarder, &target);
        reset(client);
        expect_reset(&server, UP, 0);
    }
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn a_reset_passes_when_one_direction_has_already_ended() {
    let (forwarder, target) = start("");
    let before = forwarder.descriptors();
    for client_ends in [true, false] {
        for client_resets in [true, false] {
            let (client, server) = pair(&forwarder, &target);
            if client_ends {
                end(&client);
                expect_end(&server);
            } else {
                end(&server);
                expect_end(&client);
            }
            let (resetting, other) =
                if client_resets { (client, server) } else { (server, client) };
            reset(resetting);
            if client_ends == client_resets {
                expect_broken(&other);
            } else {
                expect_reset(&other, UP, 0);
            }
            forwarder.wait_for_descriptors(before, WAIT);
        }
    }
}

#[test]
fn a_reset_overtakes_bytes_that_nobody_reads() {
    let (forwarder, target) = start("sockbuf=64k");
    let before = forwarder.descriptors();
    for reader_resets in [true, false] {
        for client_reads in [true, false] {
            let (client, server) = pair(&forwarder, &target);
            let (reader, writer) = if client_reads { (client, server) } else { (server, client) };
            let pushed = push_until_stopped(&writer, DOWN);
            if reader_resets {
                reset(reader);
                expect_broken(&writer);
            } else {
                reset(writer);
                // Before anything is read: what is queued must not hold the connection.
                forwarder.wait_for_descriptors(before, WAIT);
                let read = expect_reset(&reader, DOWN, 0);
                assert!(read <= pushed, "{read} bytes came of {pushed}");
            }
            forwarder.wait_for_descriptors(before, WAIT);
        }
    }
}

#[test]
fn a_target_that_ends_with_megabytes_queued_to_a_slow_reader_loses_none() {
    for options in ["", "sockbuf=64k"] {
        let (forwarder, target) = start(options);
        let (client, server) = pair(&forwarder, &target);
        thread::scope(|scope| {
            // By value: the target is gone as soon as it has written.
            scope.spawn(move || send(&server, DOWN, 0..4 * MIB));
            for part in 0..64 {
                receive(&client, DOWN, part * 65_536..(part + 1) * 65_536);
                thread::sleep(Duration::from_millis(5));
            }
            expect_end(&client);
        });
    }
}

#[test]
fn a_connection_without_traffic_is_closed_after_the_idle_timeout() {
    let (forwarder, target) = start("idle=500ms");
    let before = forwarder.descriptors();
    let start = Instant::now();
    let (client, server) = pair(&forwarder, &target);
    forwarder.wait_for_descriptors(before, WAIT);
    assert!(start.elapsed() >= Duration::from_millis(450), "cut after {:?}", start.elapsed());
    for mut stream in [&client, &server] {
        // An end or a reset, but not a time-out.
        match stream.read(&mut [0; 1]) {
            Ok(n) => assert_eq!(n, 0),
            Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{e}"),
        }
    }
}

#[test]
fn traffic_in_either_direction_keeps_a_connection_from_being_idle() {
    let (forwarder, target) = start("idle=1s");
    let before = forwarder.descriptors();
    let (uploading, server) = pair(&forwarder, &target);
    let (client, downloaded_from) = pair(&forwarder, &target);
    for i in 0..25 {
        send(&uploading, UP, i..i + 1);
        receive(&server, UP, i..i + 1);
        send(&downloaded_from, DOWN, i..i + 1);
        receive(&client, DOWN, i..i + 1);
        thread::sleep(Duration::from_millis(100));
    }
    forwarder.wait_for_descriptors(before, WAIT);
}

#[test]
fn by_default_an_idle_connection_stays_open() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    thread::sleep(Duration::from_secs(3));
    both_ways(&client, &server, 1000);
}

#[test]
fn a_connection_with_nobody_left_is_gone() {
    // Both peers close without reading what the other has sent: a reset from both sides.
    let (forwarder, target) = start("");
    let before = forwarder.descriptors();
    for _ in 0..20 {
        let (client, server) = pair(&forwarder, &target);
        send(&client, UP, 0..100_000);
        send(&server, DOWN, 0..100_000);
        drop(client);
        drop(server);
    }
    forwarder.wait_for_descriptors(before, WAIT);
    let (client, server) = pair(&forwarder, &target);
    both_ways(&client, &server, 1000);
}

const UP: Pattern = Pattern(1);
const DOWN: Pattern = Pattern(2);
const MIB: u64 = 1 << 20;

/// A client uploads `len` bytes to a target that reads a thousand of them, answers and leaves;
/// whether the client has read the whole answer when its connection is over.
#[track_caller]
fn early_answer(address: SocketAddr, target: &TcpListener, len: u64) -> bool {
    let client = connect(address);
    thread::scope(|scope| {
        scope.spawn(|| {
            // The reset may come while it still sends.
            for offset in (0..len).step_by(50_000) {
                let part = UP.bytes(offset, (len - offset).min(50_000) as usize);
                if (&client).write_all(part).is_err() {
                    return;
                }
            }
        });
        scope.spawn(|| {
            let server = accept(target);
            receive(&server, UP, 0..1000);
            send(&server, DOWN, 0..100);
        });
        let (mut read, mut buffer) = (0, [0; 1000]);
        loop {
            match (&client).read(&mut buffer) {
                // Instead of the reset when the sending side was told of it.
                Ok(0) => break,
                Ok(n) => {
                    DOWN.check(read, &buffer[..n]);
                    read += n as u64;
                }
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{e}");
                    break;
                }
            }
        }
        read == 100
    })
}

#[track_caller]
fn start(options: &str) -> (Forwarder, TcpListener) {
    let target = listen();
    (Forwarder::tcp(target.local_addr().unwrap(), options), target)
}
