//! The client connections of tcp-pingpong and tcp-hold.
//!
//! A lane is one connection with at most one message under way. Every message is different (its
//! first bytes carry lane and number) and its reply is compared byte for byte, yet no lane owns a
//! buffer: what is expected can be worked out again at any offset.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use crate::limits;
use crate::stop::Stop;
use crate::tcp_echo::wait;

/// All connections of one run.
pub struct Lanes {
    poll: Poll,
    events: Events,
    stop: Stop,
    lanes: Vec<Option<Lane>>,
    message: Message,
    scratch: Vec<u8>,
    pub errors: u64,
    pub first_error: Option<String>,
}

/// What a lane does after a whole reply.
pub enum Next {
    Again,
    Rest,
}

/// What one turn of the loop brought.
#[derive(Default)]
pub struct Turn {
    /// Messages that came back whole and right.
    pub served: usize,
    /// Lanes that were lost with a message under way.
    pub lost_busy: usize,
    /// Lanes that were lost while resting.
    pub lost_resting: usize,
}

impl Lanes {
    pub fn new(count: usize, size: usize, limit: Duration) -> io::Result<Self> {
        limits::raise_descriptors(count + 16)?;
        let poll = Poll::new()?;
        let stop = Stop::watch(poll.registry(), Some(limit))?;
        let mut lanes = Vec::new();
        lanes.resize_with(count, || None);
        Ok(Self {
            poll,
            events: Events::with_capacity(1024),
            stop,
            lanes,
            message: Message::new(size),
            scratch: vec![0; size.max(1 << 16) + 1],
            errors: 0,
            first_error: None,
        })
    }

    /// Opens every connection and does one round trip on each; how many were served.
    ///
    /// At most `pace` are open and not yet served, so that no accept queue overflows, however
    /// short: an overflow would show as seconds of SYN retries and not as what the target costs.
    pub fn open(&mut self, to: SocketAddr, pace: usize) -> io::Result<usize> {
        let (mut next, mut under_way, mut served) = (0, 0, 0);
        while (next < self.lanes.len() || under_way > 0) && !self.is_late() {
            while next < self.lanes.len() && under_way < pace {
                match self.connect(next, to) {
                    Ok(()) => under_way += 1,
                    Err(error) => self.fault(next, &error),
                }
                next += 1;
            }
            let turn = self.turn(|_| Next::Rest)?;
            served += turn.served;
            under_way -= (turn.served + turn.lost_busy).min(under_way);
        }
        Ok(served)
    }

    /// Sends a message on every lane that is still there; how many.
    pub fn start_all(&mut self) -> usize {
        self.start(self.lanes.len())
    }

    /// Sends a message on the first `most` lanes that are still there; how many.
    pub fn start(&mut self, most: usize) -> usize {
        let mut started = 0;
        for index in 0..self.lanes.len() {
            if started == most {
                break;
            }
            let Some(lane) = &mut self.lanes[index] else { continue };
            lane.begin(Instant::now());
            match lane.send(&mut self.message) {
                Ok(()) => started += 1,
                Err(error) => self.fault(index, &error),
            }
        }
        started
    }

    /// Waits once and moves every lane that something happened to. `whole` gets the latency of
    /// each reply and says how its lane goes on.
    pub fn turn(&mut self, mut whole: impl FnMut(Duration) -> Next) -> io::Result<Turn> {
        let timeout = self.stop.timeout(Instant::now());
        wait(&mut self.poll, &mut self.events, timeout)?;
        let mut turn = Turn::default();
        let mut lost = Vec::new();
        for event in &self.events {
            if self.stop.takes(event) {
                continue;
            }
            let index = event.token().0;
            let Some(lane) = self.lanes.get_mut(index).and_then(Option::as_mut) else { continue };
            let was_busy = lane.busy;
            let mut served = 0;
            match lane.advance(event.is_read_closed(), &mut self.message, &mut self.scratch, |l| {
                served += 1;
                whole(l)
            }) {
                Ok(()) => {}
                // A lane that rests again after its reply was lost only afterwards.
                Err(error) if was_busy && (served == 0 || lane.busy) => {
                    turn.lost_busy += 1;
                    lost.push((index, error));
                }
                Err(error) => {
                    turn.lost_resting += 1;
                    lost.push((index, error));
                }
            }
            turn.served += served;
        }
        for (index, error) in lost {
            self.fault(index, &error);
        }
        Ok(turn)
    }

    /// Sets another time limit, counted from now.
    pub fn extend(&mut self, limit: Duration) {
        self.stop.extend(limit);
    }

    /// As `is_late`, or standard input has ended.
    pub fn is_over(&self) -> bool {
        self.stop.is_over(Instant::now())
    }

    /// The time is over, or a signal came.
    pub fn is_late(&self) -> bool {
        self.stop.is_late(Instant::now())
    }

    /// Lanes that are still connected.
    pub fn alive(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    /// Counts a lane as lost, and closes it.
    fn fault(&mut self, index: usize, error: &io::Error) {
        self.lanes[index] = None;
        self.errors += 1;
        self.first_error.get_or_insert_with(|| format!("connection {index}: {error}"));
    }

    fn connect(&mut self, index: usize, to: SocketAddr) -> io::Result<()> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_nodelay(true)?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut stream, Token(index), interest)?;
        let mut lane = Lane::new(stream, index);
        // Sent when the connection stands: that is its first event.
        lane.begin(Instant::now());
        self.lanes[index] = Some(lane);
        Ok(())
    }
}

struct Lane {
    stream: TcpStream,
    index: usize,
    /// Number of the message that is under way, or was last.
    number: u64,
    sent: usize,
    received: usize,
    began: Instant,
    busy: bool,
}

impl Lane {
    fn new(stream: TcpStream, index: usize) -> Self {
        let began = Instant::now();
        Self { stream, index, number: 0, sent: 0, received: 0, began, busy: false }
    }

    fn begin(&mut self, now: Instant) {
        self.number += 1;
        (self.sent, self.received) = (0, 0);
        self.began = now;
        self.busy = true;
    }

    /// Writes what is left of the message, as far as the socket takes it.
    fn send(&mut self, message: &mut Message) -> io::Result<()> {
        let bytes = message.numbered(self.index, self.number);
        while self.sent < bytes.len() {
            match self.stream.write(&bytes[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn advance(
        &mut self,
        ending: bool,
        message: &mut Message,
        scratch: &mut [u8],
        mut whole: impl FnMut(Duration) -> Next,
    ) -> io::Result<()> {
        if self.busy {
            self.send(message)?;
        }
        loop {
            let read = match self.stream.read(scratch) {
                Ok(0) => return Err(io::Error::other("ended by the other side")),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            let expected = message.numbered(self.index, self.number);
            let end = self.received + read;
            if !self.busy || end > self.sent {
                return Err(io::Error::other("more bytes than were sent"));
            }
            if expected[self.received..end] != scratch[..read] {
                return Err(io::Error::other(format!("wrong bytes in message {}", self.number)));
            }
            self.received = end;
            if end == expected.len() {
                let now = Instant::now();
                self.busy = false;
                if let Next::Again = whole(now - self.began) {
                    self.begin(now);
                    self.send(message)?;
                }
            }
            // Short reads have drained the socket; after an announced end no event comes for it.
            if read < scratch.len() && !ending {
                return Ok(());
            }
        }
    }
}

/// The bytes of a message: a fixed pseudo-random body under a head of lane and number.
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    fn new(size: usize) -> Self {
        let mut state = 0x9e37_79b9_u32;
        let bytes = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        });
        Self { bytes: bytes.take(size).collect() }
    }

    fn numbered(&mut self, lane: usize, number: u64) -> &[u8] {
        let mut head = [0; 12];
        // The number comes first and low byte first, so that tiny messages differ too.
        head[..8].copy_from_slice(&number.to_le_bytes());
        head[8..].copy_from_slice(&(lane as u32).to_le_bytes());
        let length = head.len().min(self.bytes.len());
        self.bytes[..length].copy_from_slice(&head[..length]);
        &self.bytes
    }
}

/// How many connections are open and not yet served at one time: fewer than rinetd's backlog of 5.
pub const PACE: usize = 4;
