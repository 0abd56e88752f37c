//! One arena of slots through which all datagrams go: receive into it, say whose each one is, send.
//!
//! Both directions work alike. The slots are filled from one listener or from many flows, each slot
//! gets an owner (the socket that it leaves through), and [`Relay::send`] lets every owner's
//! datagrams leave together, in the order in which they came. A run that the kernel has put together
//! leaves as a run, and datagrams of one size that came one by one leave as one too. Nothing stays in
//! the arena afterwards: what a socket has no room for is dropped and counted.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::AsFd;

use mio::net::UdpSocket;

use crate::sys::control::{Ask, Control, Local};
use crate::sys::mmsg::{Batch, Outgoing};

/// The arena, and what is in it.
#[derive(Default)]
pub struct Relay {
    memory: Option<Box<Memory>>,
    slots: Vec<Slot>,
    used: bool,
}

struct Memory {
    arena: Vec<u8>,
    incoming: Batch,
    departing: Batch,
    outgoing: Vec<Outgoing>,
    parts: Vec<Range<usize>>,
    /// One for each of `outgoing`.
    runs: Vec<Run>,
}

/// A datagram in the arena, or a run of them.
struct Slot {
    place: u8,
    len: u16,
    /// Size of each datagram of a run but the last; `None` for a single one.
    segment: Option<u16>,
    owner: u32,
    to: Option<SocketAddr>,
    ask: Ask,
}

/// A datagram that was received, or a run of them.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    place: u8,
    len: u16,
    /// Who sent it; `None` when its address is of no known kind.
    pub sender: Option<SocketAddr>,
    /// What came with it.
    pub control: Control,
}

impl Received {
    /// How many datagrams it is.
    pub fn datagrams(&self) -> u64 {
        let size = self.control.segment.unwrap_or(self.len).max(1);
        u64::from(self.len.div_ceil(size)).max(1)
    }
}

/// How a datagram is to leave.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Whose socket it leaves through.
    pub owner: u32,
    /// Where to; `None` on a connected socket.
    pub to: Option<SocketAddr>,
    /// From which local address; `None` leaves the choice to the kernel.
    pub from: Option<Local>,
    /// With which traffic class.
    pub traffic_class: u8,
    /// Whether it goes to an IPv4 address.
    pub ipv4: bool,
}

/// A socket that datagrams leave through.
#[derive(Clone, Copy)]
pub struct Door<'a> {
    /// The socket.
    pub socket: &'a UdpSocket,
    /// The largest datagrams that may leave it as a run; 0 when none may.
    pub largest_segment: u16,
}

/// What became of the datagrams of one owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Datagrams that left.
    pub datagrams: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Datagrams that the socket's send buffer had no room for.
    pub blocked: u64,
    /// Datagrams that the system refused for another reason.
    pub failed: u64,
    /// A run was refused and its datagrams went singly.
    pub refused: Option<Refused>,
}

/// Which runs of datagrams can't leave a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Those of datagrams larger than this, towards the destination of the one that was refused:
    /// they exceed the MTU of the way. (EMSGSIZE; EINVAL in kernels before 6.14.)
    Larger(u16),
    /// All: the device or the way can't take runs apart.
    All,
}

impl Relay {
    /// Receives what there is, at most `most` datagrams and what the arena has room for, behind
    /// what it holds already. Returns the first place and how many came; they are forgotten unless
    /// they are assigned.
    pub fn receive(&mut self, socket: &UdpSocket, most: usize) -> io::Result<(u8, u8)> {
        let first = self.taken();
        let memory = self.memory.get_or_insert_with(|| {
            Box::new(Memory {
                arena: vec![0; SLOTS * SLOT_LEN],
                incoming: Batch::new(SLOTS),
                departing: Batch::new(MOST_PARTS),
                outgoing: Vec::with_capacity(MOST_PARTS),
                parts: Vec::with_capacity(MOST_PARTS),
                runs: Vec::with_capacity(MOST_PARTS),
            })
        });
        self.used = true;
        let end = SLOTS.min(first + most);
        let room = &mut memory.arena[first * SLOT_LEN..end * SLOT_LEN];
        let count = memory.incoming.receive(socket.as_fd(), room, SLOT_LEN)?;
        Ok((first as u8, count as u8))
    }

    /// The `index`th datagram, or run of datagrams, of the last receive, which began at `first`.
    pub fn received(&self, first: u8, index: u8) -> Option<Received> {
        let (len, sender, control) = self.memory.as_ref()?.incoming.received(index.into());
        Some(Received { place: first + index, len: len as u16, sender, control })
    }

    /// Lets what `received` says is in the arena leave as `way` says.
    pub fn assign(&mut self, received: &Received, way: Way) {
        let Received { place, len, control, .. } = *received;
        let Way { owner, to, from, traffic_class, ipv4 } = way;
        let ask = Ask { from, traffic_class, ipv4, segment: None };
        let segment = control.segment.filter(|size| *size < len);
        self.slots.push(Slot { place, len, segment, owner, to, ask });
    }

    /// How many datagrams the arena has room for.
    pub fn room(&self) -> usize {
        SLOTS - self.taken()
    }

    /// Whether the arena has no room for more.
    pub fn is_full(&self) -> bool {
        self.room() == 0
    }

    /// Whether there is something to send.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Sends everything and empties the arena. `door` finds an owner's socket; `done` is told what
    /// became of each owner's datagrams.
    pub fn send<'s>(
        &mut self,
        door: impl Fn(u32) -> Option<Door<'s>>,
        mut done: impl FnMut(u32, Sent),
    ) {
        let Some(memory) = &mut self.memory else { return };
        // Places rise in the order of arrival, so this keeps every owner's order.
        self.slots.sort_unstable_by_key(|slot| (slot.owner, slot.place));
        for run in self.slots.chunk_by(|a, b| a.owner == b.owner) {
            let owner = run[0].owner;
            if let Some(door) = door(owner) {
                done(owner, memory.send_slots(door, run));
            }
        }
        self.slots.clear();
    }

    /// Places up to the last one with an owner.
    fn taken(&self) -> usize {
        self.slots.last().map_or(0, |slot| usize::from(slot.place) + 1)
    }

    /// Whether there is memory that [`trim`](Self::trim) could give back.
    pub fn holds_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Gives the arena back if it was not used since the last call.
    pub fn trim(&mut self) {
        if !std::mem::replace(&mut self.used, false) {
            self.memory = None;
            self.slots = Vec::new();
        }
    }
}

impl Memory {
    /// Sends all slots of one owner, as many at a time as the batch has room for.
    fn send_slots(&mut self, door: Door, slots: &[Slot]) -> Sent {
        let mut sent = Sent::default();
        let largest = door.largest_segment;
        let mut pieces = slots.iter().flat_map(|slot| slot.pieces(largest)).peekable();
        while pieces.peek().is_some() {
            self.outgoing.clear();
            self.parts.clear();
            self.runs.clear();
            while let Some(piece) = pieces.next_if(|_| self.parts.len() < MOST_PARTS) {
                self.add(piece, largest);
            }
            self.send_batch(door, &mut sent);
        }
        sent
    }

    /// Adds a piece to the batch: to the run before it where it fits, or as a message of its own.
    fn add(&mut self, piece: Piece, largest: u16) {
        let Piece { bytes, size, to, ask } = piece;
        if let (Some(last), Some(run)) = (self.outgoing.last_mut(), self.runs.last_mut())
            && (last.to, last.ask.from, last.ask.traffic_class) == (to, ask.from, ask.traffic_class)
            && run.can_take(&bytes, size)
            && run.size <= largest.into()
        {
            run.bytes += bytes.len();
            last.parts += 1;
            last.ask.segment = Some(run.size as u16);
            self.parts.push(bytes);
            return;
        }
        let segment = (size < bytes.len()).then_some(size as u16);
        self.outgoing.push(Outgoing { parts: 1, to, ask: Ask { segment, ..ask } });
        self.runs.push(Run { size, bytes: bytes.len() });
        self.parts.push(bytes);
    }

    fn send_batch(&mut self, door: Door, sent: &mut Sent) {
        let (mut at, mut part) = (0, 0);
        let mut retried = false;
        while at < self.outgoing.len() {
            let rest = &self.outgoing[at..self.outgoing.len().min(at + MOST_PARTS)];
            let count: usize = rest.iter().map(|message| message.parts).sum();
            let parts = &self.parts[part..part + count];
            let result = match rest {
                [one] if one.to.is_none() && one.ask.is_plain() => {
                    door.socket.send(&self.arena[parts[0].clone()]).map(|_| 1)
                }
                rest => self.departing.send(door.socket.as_fd(), &self.arena, rest, parts),
            };
            let (gone, went) = match result {
                Ok(count) => (count.clamp(1, rest.len()), true),
                Err(error) if no_room(&error) => {
                    sent.blocked += self.runs[at..].iter().map(Run::datagrams).sum::<u64>();
                    return;
                }
                Err(error) if rest[0].ask.segment.is_some() && refuses_run(&error) => {
                    self.refuse_run(&error, at, part, sent);
                    continue;
                }
                // The error may be that of an earlier datagram, which only now comes back (an ICMP
                // message): this one did not go and must have its own try.
                Err(_) if !retried => {
                    retried = true;
                    continue;
                }
                Err(_) => (1, false),
            };
            retried = false;
            part += rest[..gone].iter().map(|message| message.parts).sum::<usize>();
            for run in &self.runs[at..at + gone] {
                if went {
                    sent.datagrams += run.datagrams();
                    sent.bytes += run.bytes as u64;
                } else {
                    sent.failed += run.datagrams();
                }
            }
            at += gone;
        }
    }

    /// The message at `at`, whose first part is `part`, can't leave as a run. It and those behind it
    /// leave one by one.
    fn refuse_run(&mut self, error: &io::Error, at: usize, part: usize, sent: &mut Sent) {
        sent.refused = Some(match error.raw_os_error() {
            Some(libc::EMSGSIZE | libc::EINVAL) => Refused::Larger(self.runs[at].size as u16 - 1),
            _ => Refused::All,
        });
        let mut parts = self.parts.split_off(part).into_iter();
        let messages = self.outgoing.split_off(at).into_iter().zip(self.runs.split_off(at));
        for (message, run) in messages {
            for part in parts.by_ref().take(message.parts) {
                let mut start = part.start;
                loop {
                    let end = part.end.min(start + run.size);
                    let ask = Ask { segment: None, ..message.ask };
                    self.outgoing.push(Outgoing { parts: 1, to: message.to, ask });
                    self.runs.push(Run { size: run.size, bytes: end - start });
                    self.parts.push(start..end);
                    start = end;
                    if start == part.end {
                        break;
                    }
                }
            }
        }
    }
}

/// What leaves as one message: datagrams of one size, of which the last may be shorter.
struct Run {
    /// At least 1, also for an empty datagram.
    size: usize,
    bytes: usize,
}

impl Run {
    fn datagrams(&self) -> u64 {
        // An empty datagram is one too.
        self.bytes.div_ceil(self.size).max(1) as u64
    }

    /// Whether these bytes, datagrams of `size`, can follow: a shorter one ends a run, and an empty
    /// one can't be part of any.
    fn can_take(&self, bytes: &Range<usize>, size: usize) -> bool {
        let total = self.bytes + bytes.len();
        let same = size == self.size || (bytes.len() == size && size < self.size);
        same && self.bytes > 0
            && !bytes.is_empty()
            && self.bytes.is_multiple_of(self.size)
            && total <= MOST_RUN
            && total.div_ceil(self.size) <= MOST_SEGMENTS
    }
}

/// One datagram in the arena, or a run of them that the kernel takes as one.
struct Piece {
    bytes: Range<usize>,
    /// Size of each datagram but the last; at least 1.
    size: usize,
    to: Option<SocketAddr>,
    ask: Ask,
}

impl Slot {
    /// What is in the slot, in order and in pieces that may leave as they are: runs of datagrams up
    /// to `largest`, single ones above.
    fn pieces(&self, largest: u16) -> impl Iterator<Item = Piece> {
        let (to, ask) = (self.to, self.ask);
        let len = usize::from(self.len);
        let size = self.segment.map_or(len, usize::from).max(1);
        let together =
            if size <= largest.into() { (MOST_RUN / size).clamp(1, MOST_SEGMENTS) } else { 1 };
        let step = size * together;
        let start = usize::from(self.place) * SLOT_LEN;
        // An empty datagram is one too.
        (0..len.div_ceil(step).max(1)).map(move |number| {
            let bytes = start + number * step..start + len.min((number + 1) * step);
            Piece { bytes, size, to, ask }
        })
    }
}

fn refuses_run(error: &io::Error) -> bool {
    let refusals = [libc::EMSGSIZE, libc::EINVAL, libc::EIO, libc::EOPNOTSUPP];
    error.raw_os_error().is_some_and(|errno| refusals.contains(&errno))
}

fn no_room(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// What Linux takes as one run at most; UDP_MAX_SEGMENTS was 64 before it became 128.
const MOST_SEGMENTS: usize = 64;

/// Bytes of one run: what fits into a UDP datagram over IPv4.
const MOST_RUN: usize = 65_507;

/// Pieces that leave with one call.
const MOST_PARTS: usize = 64;

/// Datagrams that the arena holds at a time.
pub const SLOTS: usize = 16;

/// Every datagram fits: the largest over IPv4 has 65,507 bytes, over IPv6 65,527.
const SLOT_LEN: usize = 64 << 10;
