//! A client and its target: two sockets, two halves, and the state of the whole connection.
//!
//! It ends in one place, [`Pair::advance`] or [`Pair::end`], and how it ends decides what both peers
//! see: after two ends the sockets are closed, after anything else both are reset, because a
//! connection that was cut short must not look like one that was finished.

use std::net::SocketAddr;

use mio::event::Event;
use mio::net::TcpStream;

use super::{Dial, Half, Side};
use crate::pool::Pool;
use crate::sys::socket::{self, TcpOptions};

/// One connection through the forwarder.
pub struct Pair {
    phase: Phase,
    up: Half,
    down: Half,
    /// The poll has reported an error on one of the sockets.
    failed: bool,
    /// The attempt that has reached the target.
    attempt: u8,
    /// The target's socket has all its options.
    settled: bool,
    /// Where the client came from.
    pub client_addr: SocketAddr,
    /// The listener that took it, by its index.
    pub listener: u32,
    /// Tells this pair from others that have had its slab key.
    pub generation: u32,
    /// It is in the run queue.
    pub queued: bool,
}

// An idle connection may cost 256 bytes of user memory with its share of the tables around it.
const _: () = assert!(size_of::<Pair>() <= 192);

enum Phase {
    /// The client waits while the target is being reached.
    Dialing(Side<TcpStream>, Box<Dial>),
    /// Bytes go both ways between client and target.
    Open(Side<TcpStream>, Side<TcpStream>),
    /// The sockets are gone; the slot is freed after the current batch of events.
    Over,
}

/// What became of a pair when it was advanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// It waits for an event; `moved` when it has done something before.
    Waits {
        /// Bytes or an end were passed on.
        moved: bool,
    },
    /// It can go on at once and has used up its turn.
    Again,
    /// It is over.
    Over(End),
}

/// How a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Both sides have ended their direction.
    Finished,
    /// A peer has reset it or is gone.
    Reset,
    /// No address of any target could be reached.
    Unreachable,
    /// The client has left before the target was reached.
    ClientLeft,
    /// Nothing was heard for the idle or half-close time.
    TimedOut,
    /// The forwarder stops.
    Stopped,
}

impl End {
    /// One word for the log.
    pub fn name(self) -> &'static str {
        match self {
            End::Finished => "finished",
            End::Reset => "reset",
            End::Unreachable => "unreachable",
            End::ClientLeft => "client-left",
            End::TimedOut => "timed-out",
            End::Stopped => "stopped",
        }
    }
}

impl Pair {
    /// A client that was accepted and whose target is yet to be reached.
    pub fn new(client: TcpStream, client_addr: SocketAddr, listener: u32, generation: u32) -> Pair {
        Pair {
            phase: Phase::Dialing(Side::new(client), Box::default()),
            up: Half::default(),
            down: Half::default(),
            failed: false,
            attempt: 0,
            settled: false,
            client_addr,
            listener,
            generation,
            queued: false,
        }
    }

    /// The attempts to reach the target, while they last.
    pub fn dial(&mut self) -> Option<&mut Dial> {
        match &mut self.phase {
            Phase::Dialing(_, dial) => Some(dial),
            _ => None,
        }
    }

    /// Whether it is relaying.
    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open(..))
    }

    /// Whether the sockets are closed.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Whether one side has ended and the other has not.
    pub fn is_half_closed(&self) -> bool {
        self.up.is_ended() != self.down.is_ended()
    }

    /// Bytes from the client and from the target.
    pub fn bytes(&self) -> (u64, u64) {
        (self.up.bytes(), self.down.bytes())
    }

    /// The attempt with this number has reached the target: the others are given up and relaying
    /// begins. False when there is no such attempt.
    pub fn connected(&mut self, attempt: u8) -> bool {
        let taken = self.dial().and_then(|dial| dial.take(attempt));
        let Some((_, target)) = taken else { return false };
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Dialing(client, _) => {
                self.phase = Phase::Open(client, Side::new(target));
                self.attempt = attempt;
                true
            }
            _ => unreachable!("only a pair that dials has attempts"),
        }
    }

    /// Whether the target's socket lacks options that it is now going to need: the client has
    /// something to say for a second time, and it is not the end.
    pub fn needs_to_settle(&self) -> bool {
        match &self.phase {
            Phase::Open(client, _) => {
                let speaks = client.readable && !client.read_closed;
                !self.settled && speaks && self.up.bytes() > 0
            }
            _ => false,
        }
    }

    /// Gives the target's socket the options of a connection that lasts.
    pub fn settle(&mut self, options: &TcpOptions) {
        if let Phase::Open(_, target) = &self.phase
            && !self.settled
        {
            self.settled = true;
            socket::settle(&target.stream, options);
        }
    }

    /// Takes in what the poll says of the client's socket.
    pub fn client_event(&mut self, event: &Event) {
        self.failed |= event.is_error();
        if let Phase::Dialing(client, _) | Phase::Open(client, _) = &mut self.phase {
            note(client, event);
        }
    }

    /// Takes in what the poll says of the target's socket. `attempt` is the one that the socket was opened for: late events of others are not its.
    pub fn target_event(&mut self, attempt: u8, event: &Event) {
        if let Phase::Open(_, target) = &mut self.phase
            && attempt == self.attempt
        {
            self.failed |= event.is_error();
            note(target, event);
        }
    }

    /// Whether the client's socket has failed while the target is being reached.
    pub fn client_failed(&self) -> bool {
        self.failed
    }

    /// Whether the client has ended its side without a byte while the target is being reached: it
    /// may have left, or it waits for a target that speaks first.
    pub fn client_ended_empty(&self) -> bool {
        match &self.phase {
            Phase::Dialing(client, _) => {
                client.read_closed && !socket::has_bytes_waiting(&client.stream)
            }
            _ => false,
        }
    }

    /// Moves what can be moved in both directions.
    ///
    /// After an error that the poll has reported, what is there is still passed on, and then the
    /// pair is over, even when nothing is left to be read or written that would show the error.
    pub fn advance(&mut self, pool: &mut Pool) -> Advance {
        let Phase::Open(client, target) = &mut self.phase else {
            return Advance::Waits { moved: false };
        };
        let mut up = self.up.advance(client, target, pool, self.down.is_ended());
        // A write that fails may be the first to hear of a reset, whose event is still to come. What
        // the peer had sent before it (a target its answer to an upload that it refuses) still
        // counts; the end of it, behind a reset, does not.
        target.readable |= up.is_err();
        let last = self.up.is_ended() || up.is_err();
        let down = self.down.advance(target, client, pool, last);
        if down.is_err() && up.is_ok() {
            client.readable = true;
            up = self.up.advance(client, target, pool, true);
        }
        let (Ok(up), Ok(down)) = (up, down) else {
            return self.end(End::Reset, pool);
        };
        if self.up.is_ended() && self.down.is_ended() {
            self.end(End::Finished, pool)
        } else if up.more || down.more {
            Advance::Again
        } else if self.failed {
            self.end(End::Reset, pool)
        } else {
            Advance::Waits { moved: up.any || down.any }
        }
    }

    /// Closes the sockets: after [`End::Finished`] as an end, otherwise as a reset.
    pub fn end(&mut self, end: End, pool: &mut Pool) -> Advance {
        let phase = std::mem::replace(&mut self.phase, Phase::Over);
        if end != End::Finished {
            match &phase {
                Phase::Dialing(client, dial) => {
                    socket::reset_on_close(&client.stream);
                    dial.reset_on_close();
                }
                Phase::Open(client, target) => {
                    socket::reset_on_close(&client.stream);
                    socket::reset_on_close(&target.stream);
                }
                Phase::Over => {}
            }
        }
        self.up.release(pool);
        self.down.release(pool);
        Advance::Over(end)
    }
}

fn note(side: &mut Side<TcpStream>, event: &Event) {
    side.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
    side.writable |= event.is_writable();
    side.read_closed |= event.is_read_closed() || event.is_error();
    side.urgent |= event.is_priority();
}
