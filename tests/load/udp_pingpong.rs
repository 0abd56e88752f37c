//! udp-pingpong: replies per second, and whether each is the right one.
//!
//! A reply is *mixed* when another client sent it, *reordered* when a later one came before it,
//! *repeated* when it had come already, *damaged* when its bytes differ. A datagram without a reply
//! for a second is *lost* and makes room for a new one.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::UdpSocket;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::socket::{MultiHeaders, SockaddrStorage};

use crate::args::Options;
use crate::latency::Latencies;
use crate::limits;
use crate::report::Report;
use crate::tcp_echo::wait;
use crate::udp_batch::{self, Arena, LARGEST, Received};
use crate::udp_tag::Tag;

pub fn run(options: &Options) -> io::Result<Report> {
    let to = options.target()?;
    let size = options.size.unwrap_or(100);
    if !(Tag::SIZE..=LARGEST).contains(&size) {
        return Err(io::Error::other(format!("--size: {} to {LARGEST}", Tag::SIZE)));
    }
    let limit = options.seconds.unwrap_or(match options.messages {
        Some(_) => Duration::from_secs(120),
        None => Duration::from_secs(5),
    });
    limits::raise_descriptors(options.clients + 16)?;
    let mut poll = Poll::new()?;
    let mut clients = Vec::with_capacity(options.clients);
    for id in 0..options.clients {
        let socket = udp_batch::connect(to)?;
        let fd = socket.as_raw_fd();
        poll.registry().register(&mut SourceFd(&fd), Token(id), Interest::READABLE)?;
        clients.push(Client {
            socket,
            id: id as u32,
            next: 0,
            newest: None,
            waiting: VecDeque::new(),
            settled: false,
        });
    }

    let mut run = Run {
        size,
        window: options.window,
        left: options.messages.unwrap_or(u64::MAX),
        settled: 0,
        headers: MultiHeaders::preallocate(options.window, None),
        datagrams: vec![vec![0; size]; options.window],
        // One more than can be in flight: a short batch then means a drained socket.
        arena: Arena::new(options.window + 1, size + 1),
        tally: Tally::default(),
        latencies: Latencies::new(),
    };
    let pace = options.pace.unwrap_or(clients.len());
    let mut begun = 0;
    // With a pace the clock starts when every client has had a reply; otherwise at once.
    let mut opening = options.pace.is_some();
    let mut start = Instant::now();
    let mut replies_before = 0;
    let mut events = Events::with_capacity(1024);
    let mut received = Vec::new();
    let mut last_look = start;
    let mut last_reply = start;
    loop {
        while begun < clients.len() && begun - run.settled < pace {
            let first = if options.pace.is_some() { 1 } else { run.window };
            run.fill_window(&mut clients[begun], first)?;
            begun += 1;
        }
        let now = Instant::now();
        if opening && run.settled == clients.len() {
            opening = false;
            start = now;
            replies_before = run.tally.replies;
            run.latencies = Latencies::new();
        }
        if now >= start + if opening { OPENING } else { limit } {
            run.left = 0;
        }
        if run.left == 0 && clients.iter().all(|client| client.waiting.is_empty()) {
            break;
        }
        if now >= last_look + LOOK {
            last_look = now;
            for client in &mut clients[..begun] {
                run.give_up(client, now);
                if client.settled {
                    run.fill_window(client, run.window)?;
                }
            }
        }
        wait(&mut poll, &mut events, Some(LOOK))?;
        for event in &events {
            let Some(client) = clients.get_mut(event.token().0) else { continue };
            let before = run.tally.replies;
            run.take(client, &mut received)?;
            if client.settled {
                run.fill_window(client, run.window)?;
            }
            if run.tally.replies > before {
                last_reply = Instant::now();
            }
        }
    }
    let seconds = (last_reply - start).as_secs_f64();
    let tally = run.tally;
    Ok(Report::new()
        .count("clients", options.clients as u64)
        .count("window", options.window as u64)
        .count("size", size as u64)
        .count("sent", tally.sent)
        .count("datagrams", tally.replies)
        .number("seconds", seconds)
        .number("per_second", (tally.replies - replies_before) as f64 / seconds)
        .latencies(&run.latencies)
        .fault("lost", tally.lost)
        .fault("mixed", tally.mixed)
        .fault("reordered", tally.reordered)
        .fault("repeated", tally.repeated)
        .fault("damaged", tally.damaged)
        .fault("errors", tally.errors))
}

struct Client {
    socket: UdpSocket,
    id: u32,
    /// Number of the next datagram to send.
    next: u64,
    /// The highest number that came back.
    newest: Option<u64>,
    /// Numbers in flight and when they left, oldest first.
    waiting: VecDeque<(u64, Instant)>,
    /// Has had its first reply, or lost it.
    settled: bool,
}

#[derive(Default)]
struct Tally {
    sent: u64,
    replies: u64,
    lost: u64,
    mixed: u64,
    reordered: u64,
    repeated: u64,
    damaged: u64,
    errors: u64,
}

struct Run {
    size: usize,
    window: usize,
    /// Datagrams that may still be sent.
    left: u64,
    /// How many clients have settled.
    settled: usize,
    headers: MultiHeaders<SockaddrStorage>,
    datagrams: Vec<Vec<u8>>,
    arena: Arena,
    tally: Tally,
    latencies: Latencies,
}

impl Run {
    /// Sends as many as a window of this size has room for.
    fn fill_window(&mut self, client: &mut Client, window: usize) -> io::Result<()> {
        let room = window.saturating_sub(client.waiting.len()) as u64;
        let count = room.min(self.left) as usize;
        if count == 0 {
            return Ok(());
        }
        let now = Instant::now();
        for datagram in &mut self.datagrams[..count] {
            let number = client.next;
            Tag { client: client.id, number }.fill(datagram);
            client.waiting.push_back((number, now));
            client.next += 1;
        }
        let slices: Vec<_> = self.datagrams[..count].iter().map(|d| [IoSlice::new(d)]).collect();
        let taken =
            udp_batch::send(&client.socket, &mut self.headers, &slices, &vec![None; count])?;
        self.tally.sent += count as u64;
        self.tally.errors += (count - taken) as u64;
        self.left -= count as u64;
        Ok(())
    }

    /// Receives all that is there and ticks it off.
    fn take(&mut self, client: &mut Client, received: &mut Vec<Received>) -> io::Result<()> {
        loop {
            if self.arena.receive(&client.socket, received).is_err() {
                // The target refused an earlier one; it will show as lost.
                self.tally.errors += 1;
                continue;
            }
            let now = Instant::now();
            for one in received.iter() {
                let datagram = self.arena.bytes(one);
                match Tag::read(datagram) {
                    Some(tag) if tag.client != client.id => self.tally.mixed += 1,
                    Some(tag) if tag.is_whole(datagram, self.size) => {
                        match client.tick_off(tag.number) {
                            Some((sent_at, in_order)) => {
                                self.tally.replies += 1;
                                self.tally.reordered += u64::from(!in_order);
                                self.latencies.record(now - sent_at);
                                self.settle(client);
                            }
                            None => self.tally.repeated += 1,
                        }
                    }
                    _ => self.tally.damaged += 1,
                }
            }
            if received.len() <= self.window {
                return Ok(());
            }
        }
    }

    fn settle(&mut self, client: &mut Client) {
        self.settled += usize::from(!client.settled);
        client.settled = true;
    }

    /// Counts as lost what has waited too long.
    fn give_up(&mut self, client: &mut Client, now: Instant) {
        while client.waiting.front().is_some_and(|(_, sent_at)| now - *sent_at >= PATIENCE) {
            client.waiting.pop_front();
            self.tally.lost += 1;
            self.settle(client);
        }
    }
}

impl Client {
    /// When the datagram was sent, and whether no later one came before it; `None` when nobody
    /// waits for it (any more).
    fn tick_off(&mut self, number: u64) -> Option<(Instant, bool)> {
        let at = self.waiting.iter().position(|(waiting, _)| *waiting == number)?;
        let (_, sent_at) = self.waiting.remove(at)?;
        let in_order = self.newest.is_none_or(|newest| newest < number);
        self.newest = self.newest.max(Some(number));
        Some((sent_at, in_order))
    }
}

/// Bound of the time until every client had a reply.
const OPENING: Duration = Duration::from_secs(120);
const PATIENCE: Duration = Duration::from_secs(1);
/// How often overdue datagrams are looked for.
const LOOK: Duration = Duration::from_millis(100);
