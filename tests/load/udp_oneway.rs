//! udp-oneway: as many datagrams as the kernel takes, singly in batches or as GSO runs.
//!
//! Every datagram is tagged, so that udp-count can say what is missing or out of order.

use std::io::{self, IoSlice};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use nix::sys::socket::MultiHeaders;

use crate::args::Options;
use crate::limits;
use crate::report::Report;
use crate::udp_batch::{self, LARGEST};
use crate::udp_tag::Tag;

pub fn run(options: &Options) -> io::Result<Report> {
    let to = options.target()?;
    let size = options.size.unwrap_or(1200);
    if !(Tag::SIZE..=LARGEST).contains(&size) {
        return Err(io::Error::other(format!("--size: {} to {LARGEST}", Tag::SIZE)));
    }
    limits::raise_descriptors(options.clients + 16)?;
    let limit = options.seconds.unwrap_or(Duration::from_secs(5));
    let mut run = if options.gso { (LARGEST / size).min(MOST_SEGMENTS) } else { BATCH };
    if let Some(rate) = options.rate {
        // Short runs at low rates: a whole one would be a burst.
        run = run.min((rate / 1000).max(1) as usize);
    }
    let mut clients: Vec<(UdpSocket, u64)> = (0..options.clients)
        .map(|_| Ok((udp_batch::connect(to)?, 0)))
        .collect::<io::Result<_>>()?;

    let mut bytes = vec![0x5a; run * size];
    let mut headers = MultiHeaders::preallocate(run, None);
    let to_peer = vec![None; run];
    let (mut datagrams, mut refused, mut calls) = (0, 0, 0);
    let start = Instant::now();
    'time: loop {
        for (id, (socket, number)) in clients.iter_mut().enumerate() {
            let elapsed = start.elapsed();
            if elapsed >= limit {
                break 'time;
            }
            if let Some(rate) = options.rate {
                pause_until(start, Duration::from_secs_f64(datagrams as f64 / rate as f64));
            }
            for datagram in bytes.chunks_exact_mut(size) {
                Tag { client: id as u32, number: *number }.mark(datagram);
                *number += 1;
            }
            calls += 1;
            if options.gso {
                match udp_batch::send_run(socket, &bytes, size as u16) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => refused += 1,
                    Err(error) => return Err(error),
                }
            } else {
                let slices: Vec<_> =
                    bytes.chunks_exact(size).map(|datagram| [IoSlice::new(datagram)]).collect();
                let taken = udp_batch::send(socket, &mut headers, &slices, &to_peer)?;
                refused += (run - taken) as u64;
            }
            datagrams += run as u64;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Report::new()
        .count("clients", options.clients as u64)
        .count("size", size as u64)
        .count("datagrams", datagrams)
        .count("bytes", datagrams * size as u64)
        .count("runs", calls)
        .number("seconds", seconds)
        .number("per_second", datagrams as f64 / seconds)
        .fault("refused", refused))
}

fn pause_until(start: Instant, due: Duration) {
    if let Some(wait) = due.checked_sub(start.elapsed()) {
        std::thread::sleep(wait);
    }
}

/// What every kernel with UDP_SEGMENT takes in one call (UDP_MAX_SEGMENTS before Linux 6.9).
const MOST_SEGMENTS: usize = 64;
const BATCH: usize = 64;
