//! udp-count: the receiver of udp-oneway.
//!
//! With GRO one receive may hold many datagrams; the kernel says how long each is, all but the
//! last are equally long, and they are counted one by one.

use std::io;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::socket::{setsockopt, sockopt};

use crate::args::Options;
use crate::report::Report;
use crate::stop::Stop;
use crate::tcp_echo::wait;
use crate::udp_batch::{self, Arena};
use crate::udp_tag::Tag;

pub fn run(options: &Options) -> io::Result<Report> {
    let mut poll = Poll::new()?;
    let mut stop = Stop::watch(poll.registry(), options.seconds)?;
    let socket = udp_batch::bind(options.listen)?;
    if options.gro {
        setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
    }
    poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), SOCKET, Interest::READABLE)?;
    println!("{}", socket.local_addr()?);

    let mut events = Events::with_capacity(8);
    let mut arena = Arena::new(BATCH, 1 << 16);
    let mut received = Vec::with_capacity(BATCH);
    let mut tally = Tally::default();
    let mut span: Option<(Instant, Instant)> = None;
    let mut full = false;
    let mut over_since: Option<Instant> = None;
    loop {
        let now = Instant::now();
        if stop.is_over(now) {
            // What is queued still counts, but a sender that goes on doesn't keep this one.
            let since = *over_since.get_or_insert(now);
            if !full || now >= since + GRACE {
                break;
            }
        }
        let timeout = if full { Some(Duration::ZERO) } else { stop.timeout(now) };
        wait(&mut poll, &mut events, timeout)?;
        for event in &events {
            stop.takes(event);
        }
        arena.receive(&socket, &mut received)?;
        full = received.len() == BATCH;
        for one in &received {
            let run = arena.bytes(one);
            tally.receives += 1;
            tally.largest_run = tally.largest_run.max(run.len() as u64);
            match one.segment {
                Some(segment) if segment > 0 => run.chunks(segment).for_each(|d| tally.add(d)),
                _ => tally.add(run),
            }
        }
        if !received.is_empty() {
            let now = Instant::now();
            span = Some((span.map_or(now, |(first, _)| first), now));
        }
    }
    let seconds = span.map_or(0.0, |(first, last)| (last - first).as_secs_f64());
    Ok(Report::new()
        .count("datagrams", tally.datagrams)
        .count("bytes", tally.bytes)
        .count("receives", tally.receives)
        .count("largest_run", tally.largest_run)
        .number("seconds", seconds)
        .number("per_second", tally.datagrams as f64 / seconds)
        .count("smallest", tally.smallest.unwrap_or(0))
        .count("largest", tally.largest)
        .count("clients", tally.next.len() as u64)
        .count("missing", tally.next.iter().sum::<u64>().saturating_sub(tally.tagged))
        .count("reordered", tally.reordered)
        .count("untagged", tally.datagrams - tally.tagged))
}

#[derive(Default)]
struct Tally {
    receives: u64,
    largest_run: u64,
    datagrams: u64,
    bytes: u64,
    tagged: u64,
    reordered: u64,
    smallest: Option<u64>,
    largest: u64,
    /// By client: one more than the highest number that came.
    next: Vec<u64>,
}

impl Tally {
    fn add(&mut self, datagram: &[u8]) {
        let length = datagram.len() as u64;
        self.datagrams += 1;
        self.bytes += length;
        self.smallest = Some(self.smallest.map_or(length, |smallest| smallest.min(length)));
        self.largest = self.largest.max(length);
        let Some(tag) = Tag::read(datagram).filter(|tag| tag.client < MOST_CLIENTS) else { return };
        self.tagged += 1;
        let client = tag.client as usize;
        if self.next.len() <= client {
            self.next.resize(client + 1, 0);
        }
        if tag.number < self.next[client] {
            self.reordered += 1;
        } else {
            self.next[client] = tag.number + 1;
        }
    }
}

const GRACE: Duration = Duration::from_millis(500);
const SOCKET: Token = Token(0);
const BATCH: usize = 64;
const MOST_CLIENTS: u32 = 1 << 16;
