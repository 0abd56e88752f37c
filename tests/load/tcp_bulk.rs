//! tcp-bulk and its other end: bytes in numbers, either way or both.
//!
//! The client opens with a header that says how many bytes go each way; the server answers with
//! its share and, once it has all of the client's, with a trailer: how many came, and whether they
//! were right. Neither side needs a half-close, so forwarders that end a connection at the first
//! FIN can be measured too.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use slab::Slab;

use crate::args::{Direction, Options};
use crate::limits;
use crate::report::Report;
use crate::stop::Stop;
use crate::tcp_echo::{LISTENER, accept, listen, wait};

/// tcp-sink and tcp-source.
pub fn serve(options: &Options) -> io::Result<Report> {
    limits::raise_descriptors(0)?;
    let mut poll = Poll::new()?;
    let mut stop = Stop::watch(poll.registry(), options.seconds)?;
    let mut listener = listen(options.listen)?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    println!("{}", listener.local_addr()?);

    let mut events = Events::with_capacity(256);
    let mut transfers: Slab<Transfer> = Slab::new();
    let mut busy = Vec::new();
    let mut bench = Bench::new();
    let (mut accepted, mut done, mut failed) = (0, 0, 0);
    loop {
        let now = Instant::now();
        if stop.is_over(now) {
            break;
        }
        let timeout = if busy.is_empty() { stop.timeout(now) } else { Some(Duration::ZERO) };
        wait(&mut poll, &mut events, timeout)?;
        for event in &events {
            if stop.takes(event) {
                continue;
            }
            if event.token() == LISTENER {
                accepted += accept(&listener, |mut stream| {
                    let slot = transfers.vacant_entry();
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    poll.registry().register(&mut stream, Token(slot.key()), interest)?;
                    slot.insert(Transfer::serving(stream));
                    Ok(())
                })?;
            } else {
                busy.push(event.token().0);
            }
        }
        busy.sort_unstable();
        busy.dedup();
        for key in std::mem::take(&mut busy) {
            let Some(transfer) = transfers.get_mut(key) else { continue };
            match transfer.advance(&mut bench) {
                Ok(Progress::Waits) => {}
                Ok(Progress::Spent) => busy.push(key),
                Ok(Progress::Over) => {
                    done += 1;
                    drop(transfers.remove(key));
                }
                Err(_) => {
                    failed += 1;
                    drop(transfers.remove(key));
                }
            }
        }
    }
    Ok(Report::new()
        .count("accepted", accepted)
        .count("done", done)
        .count("broken", failed)
        .count("unfinished", transfers.len() as u64))
}

/// tcp-bulk.
pub fn transfer(options: &Options) -> io::Result<Report> {
    let to = options.target()?;
    limits::raise_descriptors(options.connections + 16)?;
    let mut poll = Poll::new()?;
    let deadline = Instant::now() + options.seconds.unwrap_or(LONGEST);
    let (up, down) = match options.direction {
        Direction::Up => (options.bytes, 0),
        Direction::Down => (0, options.bytes),
        Direction::Both => (options.bytes, options.bytes),
    };
    let mut bench = Bench::new();
    let mut errors = 0;
    let mut first_error = None;
    let start = Instant::now();
    let mut transfers: Slab<Transfer> = Slab::with_capacity(options.connections);
    for _ in 0..options.connections {
        let mut stream = TcpStream::connect(to)?;
        let slot = transfers.vacant_entry();
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut stream, Token(slot.key()), interest)?;
        slot.insert(Transfer::asking(stream, up, down, options.verify));
    }
    let mut events = Events::with_capacity(256);
    let mut busy: Vec<usize> = Vec::new();
    let (mut sent, mut received) = (0, 0);
    while !transfers.is_empty() && Instant::now() < deadline {
        let timeout = if busy.is_empty() { deadline - Instant::now() } else { Duration::ZERO };
        wait(&mut poll, &mut events, Some(timeout))?;
        busy.extend(events.iter().map(|event| event.token().0));
        busy.sort_unstable();
        busy.dedup();
        for key in std::mem::take(&mut busy) {
            let Some(transfer) = transfers.get_mut(key) else { continue };
            match transfer.advance(&mut bench) {
                Ok(Progress::Waits) => continue,
                Ok(Progress::Spent) => {
                    busy.push(key);
                    continue;
                }
                Ok(Progress::Over) => {}
                Err(error) => {
                    errors += 1;
                    first_error.get_or_insert_with(|| format!("connection {key}: {error}"));
                }
            }
            let transfer = transfers.remove(key);
            sent += transfer.outgoing.position;
            received += transfer.incoming.position;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Report::new()
        .count("connections", options.connections as u64)
        .count("bytes_up", sent)
        .count("bytes_down", received)
        .number("seconds", seconds)
        .number("gbit_per_second", (sent + received) as f64 * 8e-9 / seconds)
        .fault("unfinished", transfers.len() as u64)
        .fault("errors", errors)
        .text("first_error", first_error.as_deref()))
}

/// What all transfers share: the bytes to send and to compare with, and a place to read into.
struct Bench {
    pattern: Vec<u8>,
    scratch: Vec<u8>,
}

impl Bench {
    fn new() -> Self {
        let byte = |i: usize| ((i % PERIOD) as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0];
        Self { pattern: (0..PERIOD + CHUNK).map(byte).collect(), scratch: vec![0; CHUNK] }
    }

    /// The bytes that belong at `position` of a stream, at most `length` and a chunk.
    fn expected(pattern: &[u8], position: u64, length: u64) -> &[u8] {
        let start = (position % PERIOD as u64) as usize;
        &pattern[start..start + length.min(CHUNK as u64) as usize]
    }
}

/// One direction of one transfer.
struct Way {
    position: u64,
    length: u64,
}

impl Way {
    fn left(&self) -> u64 {
        self.length - self.position
    }
}

struct Transfer {
    stream: TcpStream,
    role: Role,
    verify: bool,
    matched: bool,
    outgoing: Way,
    incoming: Way,
    /// Header or trailer that is being written; empty otherwise.
    outbox: Vec<u8>,
    /// Header or trailer that is being read.
    inbox: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Client,
    /// The header has not come yet.
    NewServer,
    Server,
    /// The trailer is on its way.
    DoneServer,
}

enum Progress {
    Waits,
    Spent,
    Over,
}

impl Transfer {
    fn asking(stream: TcpStream, up: u64, down: u64, verify: bool) -> Self {
        let mut outbox = Vec::with_capacity(HEADER);
        outbox.extend(MAGIC);
        outbox.extend(u32::from(verify).to_be_bytes());
        outbox.extend(up.to_be_bytes());
        outbox.extend(down.to_be_bytes());
        Self {
            outgoing: Way { position: 0, length: up },
            incoming: Way { position: 0, length: down },
            role: Role::Client,
            verify,
            outbox,
            ..Self::serving(stream)
        }
    }

    fn serving(stream: TcpStream) -> Self {
        Self {
            stream,
            role: Role::NewServer,
            verify: false,
            matched: true,
            outgoing: Way { position: 0, length: 0 },
            incoming: Way { position: 0, length: 0 },
            outbox: Vec::new(),
            inbox: Vec::new(),
        }
    }

    fn advance(&mut self, bench: &mut Bench) -> io::Result<Progress> {
        for _ in 0..CHUNKS_PER_TURN {
            let wrote = self.write(bench)?;
            let read = self.read(bench)?;
            if self.role == Role::Server && self.outgoing.left() + self.incoming.left() == 0 {
                self.role = Role::DoneServer;
                self.outbox.extend(self.incoming.position.to_be_bytes());
                self.outbox.extend(u64::from(self.matched).to_be_bytes());
                continue;
            }
            if self.is_over()? {
                return Ok(Progress::Over);
            }
            if !wrote && !read {
                return Ok(Progress::Waits);
            }
        }
        Ok(Progress::Spent)
    }

    fn is_over(&self) -> io::Result<bool> {
        match self.role {
            Role::DoneServer => Ok(self.outbox.is_empty()),
            Role::Client if self.inbox.len() == TRAILER => {
                let number = |at: usize| be(&self.inbox[at..at + 8]);
                if number(0) != self.outgoing.length || self.outgoing.left() > 0 {
                    return Err(io::Error::other("the other side got a different number of bytes"));
                }
                if number(8) != 1 || !self.matched {
                    return Err(io::Error::other("bytes were changed on the way"));
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// One write at most; whether it may be worth another.
    fn write(&mut self, bench: &Bench) -> io::Result<bool> {
        let bytes = match self.outbox.as_slice() {
            [] => Bench::expected(&bench.pattern, self.outgoing.position, self.outgoing.left()),
            outbox => outbox,
        };
        if bytes.is_empty() {
            return Ok(false);
        }
        let Some(written) = unless_blocked(self.stream.write(bytes))? else { return Ok(false) };
        if self.outbox.is_empty() {
            self.outgoing.position += written as u64;
        } else {
            self.outbox.drain(..written);
        }
        Ok(true)
    }

    /// One read at most; whether it may be worth another.
    fn read(&mut self, bench: &mut Bench) -> io::Result<bool> {
        let wanted = match self.role {
            Role::NewServer => HEADER - self.inbox.len(),
            Role::Server | Role::Client if self.incoming.left() > 0 => {
                self.incoming.left().min(CHUNK as u64) as usize
            }
            Role::Client => TRAILER - self.inbox.len(),
            Role::Server | Role::DoneServer => return Ok(false),
        };
        let Some(read) = unless_blocked(self.stream.read(&mut bench.scratch[..wanted]))? else {
            return Ok(false);
        };
        let bytes = &bench.scratch[..read];
        if read == 0 {
            return Err(io::Error::other("ended by the other side"));
        }
        if self.role != Role::NewServer && self.incoming.left() > 0 {
            if self.verify {
                let position = self.incoming.position;
                self.matched &= bytes == Bench::expected(&bench.pattern, position, read as u64);
            }
            self.incoming.position += read as u64;
            return Ok(true);
        }
        self.inbox.extend_from_slice(bytes);
        if self.role == Role::NewServer && self.inbox.len() == HEADER {
            if self.inbox[..4] != MAGIC {
                return Err(io::Error::other("not a tcp-bulk client"));
            }
            self.role = Role::Server;
            self.verify = self.inbox[7] == 1;
            self.incoming.length = be(&self.inbox[8..16]);
            self.outgoing.length = be(&self.inbox[16..24]);
        }
        Ok(true)
    }
}

fn unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

const MAGIC: [u8; 4] = *b"tfwb";
/// Magic, flags (u32, 1 = compare), bytes up (u64), bytes down (u64); big-endian.
const HEADER: usize = 24;
/// Bytes that came (u64), whether they were right (u64); big-endian.
const TRAILER: usize = 16;
const CHUNK: usize = 128 * 1024;
/// A prime, so that a piece lost, doubled or moved by a buffer's size shows.
const PERIOD: usize = 65_521;
const CHUNKS_PER_TURN: usize = 8;
/// Bound of a transfer without `--seconds`.
const LONGEST: Duration = Duration::from_secs(300);
