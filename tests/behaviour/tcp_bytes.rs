//! The bytes of TCP connections: all of them, in order, within bounded memory.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use proptest::collection::vec;
use proptest::test_runner::{Config, TestRunner};
use socket2::SockRef;

use crate::harness::{
    Echo, Forwarder, Pattern, Random, WAIT, accept, both_ways, connect, end, expect_end, listen,
    pair, push_until_stopped, receive, receive_to_end, reset, send,
};

#[test]
fn a_large_transfer_each_way_at_once_arrives_whole() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    both_ways(&client, &server, 64 * MIB);
}

#[test]
fn a_large_transfer_through_small_buffers_arrives_whole() {
    let (forwarder, target) = start("sockbuf=16k");
    let (client, server) = pair(&forwarder, &target);
    both_ways(&client, &server, 2 * MIB);
}

#[test]
fn transfers_around_the_sizes_of_buffers_arrive_whole() {
    let (forwarder, target) = start("");
    let mut random = Random::new(11);
    for len in
        [4095, 4096, 4097, 65_535, 65_536, 65_537, 131_071, 131_073, 262_144, MIB - 1, MIB + 1]
    {
        for down in [false, true] {
            let (client, server) = pair(&forwarder, &target);
            let (from, to) = if down { (&server, &client) } else { (&client, &server) };
            let mut chunks = Vec::new();
            let mut sent = 0;
            while sent < len {
                let chunk = (1 + random.below(100_000) as u64).min(len - sent);
                chunks.push(sent..sent + chunk);
                sent += chunk;
            }
            thread::scope(|scope| {
                scope.spawn(|| {
                    for chunk in chunks {
                        send(from, UP, chunk);
                    }
                    end(from);
                });
                assert_eq!(receive_to_end(to, UP, 0), len);
            });
        }
    }
}

#[test]
fn any_alternation_of_chunks_arrives_whole_both_ways() {
    let (forwarder, target) = start("");
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    // Small messages and bulk by turns: whatever engine a direction uses, it changes in between.
    let chunk = proptest::prop_oneof![1..200_u64, 60_000..70_000_u64, 1..600_000_u64];
    TestRunner::new(config)
        .run(&vec((chunk, proptest::bool::ANY), 1..12), |chunks| {
            let (client, server) = pair(&forwarder, &target);
            let mut offsets = [0, 0];
            for (len, down) in chunks {
                let (from, to) = if down { (&server, &client) } else { (&client, &server) };
                let offset = &mut offsets[usize::from(down)];
                let range = *offset..*offset + len;
                thread::scope(|scope| {
                    scope.spawn(|| send(from, Pattern(u64::from(down)), range.clone()));
                    receive(to, Pattern(u64::from(down)), range.clone());
                });
                *offset += len;
            }
            end(&client);
            expect_end(&server);
            end(&server);
            expect_end(&client);
            Ok(())
        })
        .unwrap();
}

#[test]
fn single_bytes_pass_one_by_one() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    for i in 0..2000 {
        send(&client, UP, i..i + 1);
        receive(&server, UP, i..i + 1);
        send(&server, DOWN, i..i + 1);
        receive(&client, DOWN, i..i + 1);
    }
    // And without waiting for each other.
    for i in 2000..6000 {
        send(&client, UP, i..i + 1);
    }
    end(&client);
    assert_eq!(receive_to_end(&server, UP, 2000), 6000);
}

#[test]
fn the_target_may_speak_first() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    send(&server, DOWN, 0..100);
    receive(&client, DOWN, 0..100);
}

#[test]
fn a_slow_reader_stops_the_writer_and_gets_every_byte() {
    for client_reads in [true, false] {
        let (forwarder, target) = start("sockbuf=64k");
        let before = forwarder.anonymous_kib();
        // The test's own sockets would otherwise grow and hide the forwarder's bound.
        SockRef::from(&target).set_recv_buffer_size(64 * 1024).unwrap();
        let (client, server) = pair(&forwarder, &target);
        let (reader, writer) = if client_reads { (&client, &server) } else { (&server, &client) };
        SockRef::from(reader).set_recv_buffer_size(64 * 1024).unwrap();
        SockRef::from(writer).set_send_buffer_size(64 * 1024).unwrap();

        let pushed = push_until_stopped(writer, UP);
        assert!(pushed < 8 * MIB, "{pushed} bytes were taken that nobody has read");
        let grown = forwarder.anonymous_kib().saturating_sub(before);
        assert!(grown < 1024, "{grown} KiB for one connection that is not read");

        end(writer);
        let mut read = 0;
        while read < pushed {
            let part = (pushed - read).min(20_000);
            receive(reader, UP, read..read + part);
            read += part;
        }
        expect_end(reader);
    }
}

#[test]
fn both_directions_may_be_stopped_at_once_and_go_on() {
    let (forwarder, target) = start("sockbuf=64k");
    let (client, server) = pair(&forwarder, &target);
    let up = push_until_stopped(&client, UP);
    let down = push_until_stopped(&server, DOWN);
    end(&client);
    end(&server);
    assert_eq!(receive_to_end(&server, UP, 0), up);
    assert_eq!(receive_to_end(&client, DOWN, 0), down);
}

#[test]
fn many_stopped_connections_stay_within_bounded_memory() {
    let (forwarder, target) = start("sockbuf=16k");
    let before = forwarder.anonymous_kib();
    let pairs: Vec<_> = (0..40).map(|_| pair(&forwarder, &target)).collect();
    thread::scope(|scope| {
        for (client, server) in &pairs {
            scope.spawn(move || push_until_stopped(client, UP));
            scope.spawn(move || push_until_stopped(server, DOWN));
        }
    });
    let grown = forwarder.anonymous_kib().saturating_sub(before);
    assert!(grown < 80 * 256, "{grown} KiB for 80 directions that are not read");

    for (client, server) in pairs {
        reset(client);
        reset(server);
    }
    forwarder.wait_for_memory(before + 1024, WAIT);
}

#[test]
fn neither_a_stopped_nor_a_busy_connection_holds_up_others() {
    let echo = Echo::start();
    let forwarder = Forwarder::tcp(echo.address(), "");
    // An echo that is never read stops both of its directions.
    let stopped = connect(forwarder.address());
    push_until_stopped(&stopped, UP);

    let busy = connect(forwarder.address());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = (&busy).write_all(Pattern(5).bytes(0, 256 * 1024));
            }
            busy.shutdown(Shutdown::Both).unwrap();
        });
        scope.spawn(|| {
            let mut buffer = vec![0; 256 * 1024];
            while matches!((&busy).read(&mut buffer), Ok(1..)) {}
        });
        let small = connect(forwarder.address());
        for i in 0..500 {
            send(&small, DOWN, i * 10..i * 10 + 10);
            receive(&small, DOWN, i * 10..i * 10 + 10);
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn an_urgent_byte_arrives_in_its_place_and_stalls_nothing() {
    let (forwarder, target) = start("");
    for down in [false, true] {
        // Small and bulk on either side of it: the urgent mark stops a read and a splice.
        for part in [1000, 2 * MIB] {
            let (client, server) = pair(&forwarder, &target);
            let (from, to) = if down { (&server, &client) } else { (&client, &server) };
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut offset = 0;
                    for _ in 0..3 {
                        send(from, UP, offset..offset + part);
                        offset += part;
                        SockRef::from(from).send_out_of_band(UP.bytes(offset, 1)).unwrap();
                        offset += 1;
                    }
                    send(from, UP, offset..offset + part);
                    end(from);
                });
                assert_eq!(receive_to_end(to, UP, 0), 4 * part + 3);
            });
        }
    }
}

#[test]
fn an_urgent_byte_in_a_bulk_transfer_that_ends_soon_after_it_loses_nothing() {
    let (forwarder, target) = start("");
    for round in 0..50 {
        let (client, server) = pair(&forwarder, &target);
        let (from, to) = if round % 2 == 0 { (&client, &server) } else { (&server, &client) };
        // Behind the urgent byte is less or more than what a splice takes.
        let (before, behind) = (2 * MIB + round * 7919, [0, 1, 1000, 500_000][round as usize % 4]);
        thread::scope(|scope| {
            scope.spawn(|| {
                send(from, UP, 0..before);
                SockRef::from(from).send_out_of_band(UP.bytes(before, 1)).unwrap();
                send(from, UP, before + 1..before + 1 + behind);
                end(from);
            });
            assert_eq!(receive_to_end(to, UP, 0), before + 1 + behind, "round {round}");
        });
    }
}

#[test]
fn urgent_bytes_that_come_at_any_moment_arrive_in_their_place() {
    // However reads and arrivals fall together, the first bytes of a connection included.
    let (forwarder, target) = start("");
    for round in 0..200 {
        let (client, server) = pair(&forwarder, &target);
        let (from, to) = if round % 2 == 0 { (&server, &client) } else { (&client, &server) };
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut offset = 0;
                for part in [round % 3, 1, 300, 0, 700] {
                    send(from, UP, offset..offset + part);
                    offset += part;
                    SockRef::from(from).send_out_of_band(UP.bytes(offset, 1)).unwrap();
                    offset += 1;
                }
                send(from, UP, offset..offset + 100);
                end(from);
            });
            assert_eq!(receive_to_end(to, UP, 0), round % 3 + 1 + 300 + 700 + 5 + 100);
        });
    }
}

#[test]
fn an_urgent_byte_with_nothing_after_it_arrives_at_once() {
    let (forwarder, target) = start("");
    let (client, server) = pair(&forwarder, &target);
    for i in 0..20 {
        SockRef::from(&client).send_out_of_band(UP.bytes(i, 1)).unwrap();
        receive(&server, UP, i..i + 1);
    }
    send(&client, UP, 20..30);
    receive(&server, UP, 20..30);
}

#[test]
fn many_connections_transfer_at_once_without_mixing() {
    let (forwarder, target) = start("");
    let pairs: Vec<_> = (0..16).map(|_| pair(&forwarder, &target)).collect();
    thread::scope(|scope| {
        for (n, (client, server)) in (0..).zip(&pairs) {
            for (from, to, seed) in [(client, server, 10 + n), (server, client, 100 + n)] {
                scope.spawn(move || {
                    send(from, Pattern(seed), 0..2 * MIB);
                    end(from);
                });
                scope.spawn(move || {
                    assert_eq!(receive_to_end(to, Pattern(seed), 0), 2 * MIB);
                });
            }
        }
    });
}

#[test]
fn a_reader_that_pauses_again_and_again_gets_every_byte() {
    let (forwarder, target) = start("sockbuf=32k");
    let client = connect(forwarder.address());
    let server = accept(&target);
    thread::scope(|scope| {
        scope.spawn(|| {
            send(&server, DOWN, 0..2 * MIB);
            end(&server);
        });
        let (mut read, mut random) = (0, Random::new(5));
        while read < 2 * MIB {
            let part = (1 + random.below(150_000) as u64).min(2 * MIB - read);
            receive(&client, DOWN, read..read + part);
            read += part;
            thread::sleep(Duration::from_millis(random.below(20) as u64));
        }
        expect_end(&client);
    });
}

const UP: Pattern = Pattern(1);
const DOWN: Pattern = Pattern(2);
const MIB: u64 = 1 << 20;

#[track_caller]
fn start(options: &str) -> (Forwarder, TcpListener) {
    let target = listen();
    (Forwarder::tcp(target.local_addr().unwrap(), options), target)
}
