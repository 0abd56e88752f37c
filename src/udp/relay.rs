//! One arena of slots through which all datagrams go: receive into it, say whose each one is, send.
//!
//! Both directions work alike. The slots are filled from one listener or from many flows, each slot
//! gets an owner (the socket that it leaves through), and [`Relay::send`] lets every owner's
//! datagrams leave together, in the order in which they came. Nothing stays in the arena afterwards:
//! what a socket has no room for is dropped and counted.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;

use mio::net::UdpSocket;

use crate::sys::control::{Control, Local};
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
    outgoing: Batch,
}

struct Slot {
    place: u8,
    len: u16,
    owner: u32,
    to: Option<SocketAddr>,
    from: Option<Local>,
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
}

impl Relay {
    /// Receives what there is, at most `most` datagrams and what the arena has room for, behind
    /// what it holds already. Returns the places of the new ones; they have no owner yet and are
    /// forgotten unless they get one.
    pub fn receive(&mut self, socket: &UdpSocket, most: usize) -> io::Result<std::ops::Range<u8>> {
        let first = self.taken();
        let memory = self.memory.get_or_insert_with(|| {
            Box::new(Memory {
                arena: vec![0; SLOTS * SLOT_LEN],
                incoming: Batch::new(SLOTS),
                outgoing: Batch::new(SLOTS),
            })
        });
        self.used = true;
        let end = SLOTS.min(first + most);
        let room = &mut memory.arena[first * SLOT_LEN..end * SLOT_LEN];
        let count = memory.incoming.receive(socket.as_fd(), room, SLOT_LEN)?;
        Ok(first as u8..(first + count) as u8)
    }

    /// Sender and control data of the datagram at `place`, the `index`th of the last receive.
    pub fn origin(&self, index: usize) -> (Option<SocketAddr>, Control) {
        match &self.memory {
            Some(memory) => {
                let (_, sender, control) = memory.incoming.received(index);
                (sender, control)
            }
            None => (None, Control::default()),
        }
    }

    /// Lets the datagram at `place`, the `index`th of the last receive, leave through `owner`:
    /// to `to` and from `from`, or as the socket is connected.
    pub fn assign(
        &mut self,
        place: u8,
        index: usize,
        owner: u32,
        to: Option<SocketAddr>,
        from: Option<Local>,
    ) {
        let Some(memory) = &self.memory else { return };
        let (len, ..) = memory.incoming.received(index);
        self.slots.push(Slot { place, len: len as u16, owner, to, from });
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

    /// Sends everything and empties the arena. `socket` finds an owner's socket; `done` is told what
    /// became of each owner's datagrams.
    pub fn send<'s>(
        &mut self,
        socket: impl Fn(u32) -> Option<&'s UdpSocket>,
        mut done: impl FnMut(u32, Sent),
    ) {
        let Some(memory) = &mut self.memory else { return };
        // Places rise in the order of arrival, so this keeps every owner's order.
        self.slots.sort_unstable_by_key(|slot| (slot.owner, slot.place));
        for run in self.slots.chunk_by(|a, b| a.owner == b.owner) {
            let owner = run[0].owner;
            if let Some(socket) = socket(owner) {
                done(owner, memory.send_run(socket, run));
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
    fn send_run(&mut self, socket: &UdpSocket, run: &[Slot]) -> Sent {
        let mut sent = Sent::default();
        let mut rest = run;
        let mut retried = false;
        while let Some(first) = rest.first() {
            let result = if let ([_], None) = (rest, first.to) {
                socket.send(payload(&self.arena, first)).map(|_| 1)
            } else {
                let outgoing = rest.iter().map(|slot| Outgoing {
                    payload: payload(&self.arena, slot),
                    to: slot.to,
                    from: slot.from,
                });
                self.outgoing.send(socket.as_fd(), outgoing)
            };
            match result {
                Ok(count) => {
                    let (gone, left) = rest.split_at(count.clamp(1, rest.len()));
                    sent.datagrams += gone.len() as u64;
                    sent.bytes += gone.iter().map(|slot| u64::from(slot.len)).sum::<u64>();
                    rest = left;
                    retried = false;
                }
                Err(error) if no_room(&error) => {
                    sent.blocked += rest.len() as u64;
                    break;
                }
                // The error may be that of an earlier datagram, which only now comes back (an ICMP
                // message): this one did not go and must have its own try.
                Err(_) if !retried => retried = true,
                Err(_) => {
                    sent.failed += 1;
                    rest = &rest[1..];
                    retried = false;
                }
            }
        }
        sent
    }
}

fn payload<'a>(arena: &'a [u8], slot: &Slot) -> &'a [u8] {
    &arena[usize::from(slot.place) * SLOT_LEN..][..usize::from(slot.len)]
}

fn no_room(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// Datagrams that the arena holds at a time.
pub const SLOTS: usize = 16;

/// Every datagram fits: the largest over IPv4 has 65,507 bytes, over IPv6 65,527.
const SLOT_LEN: usize = 64 << 10;
