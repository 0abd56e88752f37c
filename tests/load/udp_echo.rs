//! A UDP echo server: every datagram goes back to where it came from, empty ones too
//! unless told otherwise.

use std::io::{self, IoSlice};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::socket::MultiHeaders;

use crate::args::Options;
use crate::report::Report;
use crate::stop::Stop;
use crate::tcp_echo::wait;
use crate::udp_batch::{self, Arena};

pub fn run(options: &Options) -> io::Result<Report> {
    let mut poll = Poll::new()?;
    let mut stop = Stop::watch(poll.registry(), options.seconds)?;
    let socket = udp_batch::bind(options.listen)?;
    poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), SOCKET, Interest::READABLE)?;
    println!("{}", socket.local_addr()?);

    let mut events = Events::with_capacity(8);
    let mut arena = Arena::new(BATCH, 1 << 16);
    let mut headers = MultiHeaders::preallocate(BATCH, None);
    let mut received = Vec::with_capacity(BATCH);
    let (mut datagrams, mut bytes, mut dropped, mut refused) = (0, 0, 0, 0);
    let mut full = false;
    loop {
        let now = Instant::now();
        if stop.is_over(now) {
            break;
        }
        let timeout = if full { Some(Duration::ZERO) } else { stop.timeout(now) };
        wait(&mut poll, &mut events, timeout)?;
        let mut readable = full;
        for event in &events {
            readable |= !stop.takes(event);
        }
        if !readable {
            continue;
        }
        if arena.receive(&socket, &mut received).is_err() {
            // The error of an earlier send; what is queued is still there.
            refused += 1;
            full = true;
            continue;
        }
        full = received.len() == BATCH;
        let batch = received.len();
        if options.skip_empty {
            received.retain(|one| one.length > 0);
        }
        let replies: Vec<_> = received.iter().map(|one| [IoSlice::new(arena.bytes(one))]).collect();
        let to: Vec<_> = received.iter().map(|one| one.from).collect();
        let sent = udp_batch::send(&socket, &mut headers, &replies, &to)?;
        datagrams += batch as u64;
        bytes += received.iter().map(|one| one.length as u64).sum::<u64>();
        dropped += (received.len() - sent) as u64;
    }
    Ok(Report::new()
        .count("datagrams", datagrams)
        .count("bytes", bytes)
        .count("dropped", dropped)
        .count("refused", refused))
}

const SOCKET: Token = Token(0);
const BATCH: usize = 64;
