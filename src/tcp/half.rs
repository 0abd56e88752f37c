//! One direction of a connection: from a source to a sink, every byte in order, the end last.
//!
//! A half starts out copying: read into the shared scratch buffer, write at once, and keep what the
//! sink did not take in a spill buffer that exists only meanwhile. Nothing more is read before that
//! is gone, so a slow sink stops the source by its own TCP window. A half whose reads keep filling
//! the buffer goes over to splicing ([`super::pump`]).

use std::io::{self, ErrorKind};

use super::Stream;
use super::pump;
use crate::pool::{Pool, READ_SIZE, Spill};
use crate::sys::Pipe;

/// A socket and what the poll has said of it.
pub struct Side<S> {
    /// The socket.
    pub stream: S,
    /// There may be something to read: a read has not said otherwise since the last event.
    pub readable: bool,
    /// There may be room to write.
    pub writable: bool,
    /// The end or an error is among what there is to read; no further event will announce it.
    pub read_closed: bool,
    /// Out-of-band data has come: the kernel stops every read at its mark, so that a short read does
    /// not mean that there is nothing more.
    pub urgent: bool,
}

impl<S> Side<S> {
    /// A connected socket that nothing has been heard of. It has room to write until a write says
    /// otherwise.
    pub fn new(stream: S) -> Side<S> {
        Side { stream, readable: false, writable: true, read_closed: false, urgent: false }
    }
}

/// One direction.
#[derive(Debug, Default)]
pub struct Half {
    pub(super) held: Held,
    state: State,
    /// Reads in a row that filled the scratch buffer; from [`BULK`] on the half splices.
    pub(super) full_reads: u8,
    /// Bytes that the source has given.
    pub(super) bytes: u64,
}

/// What a half has taken from the source and the sink has not taken yet.
#[derive(Debug, Default)]
pub(super) enum Held {
    #[default]
    Nothing,
    /// Bytes that were copied.
    Spill(Box<Spill>),
    /// A pipe.
    Pipe(Piped),
}

/// A pipe on loan and the account of it.
#[derive(Debug)]
pub(super) struct Piped {
    pub(super) pipe: Pipe,
    /// Bytes in the pipe.
    pub(super) held: u32,
    /// Bytes that went through since it was taken from the pool; stays at the most it can count.
    pub(super) passed: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// The source may give more.
    #[default]
    Open,
    /// The source has ended; what is held is still to be written.
    Ending,
    /// The end was passed on.
    Ended,
}

/// What a call of [`Half::advance`] has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Bytes read or written, or an end passed on.
    pub any: bool,
    /// The budget is spent and there is more to do at once.
    pub more: bool,
}

impl Half {
    /// Moves bytes until source or sink has no more, or the budget of one turn is spent. An error is
    /// the end of the whole connection, not of this direction.
    pub fn advance<A: Stream, B: Stream>(
        &mut self,
        source: &mut Side<A>,
        sink: &mut Side<B>,
        pool: &mut Pool,
    ) -> io::Result<Moved> {
        let mut budget = BUDGET;
        let before = (self.state, self.bytes);
        let mut wrote = false;
        while budget > 0 {
            match &mut self.held {
                Held::Pipe(_) => {
                    let spent = pump::advance(self, source, sink, pool, budget)?;
                    wrote |= spent > 0;
                    budget = budget.saturating_sub(spent);
                    if matches!(self.held, Held::Pipe(_)) {
                        break;
                    }
                }
                Held::Spill(spill) => {
                    if !sink.writable {
                        break;
                    }
                    let count = ready(sink.stream.write(spill.rest()))?.unwrap_or(0);
                    wrote |= count > 0;
                    if !spill.advance(count) {
                        sink.writable = false;
                    } else if let Held::Spill(spill) = std::mem::take(&mut self.held) {
                        pool.end_spill(spill);
                    }
                }
                Held::Nothing => match self.state {
                    State::Ended => break,
                    State::Ending => {
                        sink.stream.end()?;
                        self.state = State::Ended;
                        break;
                    }
                    State::Open => {
                        if !source.readable || !sink.writable {
                            break;
                        }
                        if self.full_reads >= BULK && self.start_to_splice(source, pool) {
                            continue;
                        }
                        let count = self.copy(source, sink, pool)?;
                        budget = budget.saturating_sub(count);
                    }
                },
            }
        }
        let more = budget == 0 && self.could_go_on(source, sink);
        Ok(Moved { any: wrote || (self.state, self.bytes) != before, more })
    }

    /// Whether the end of the source was passed on.
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// Bytes that the source has given so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives back what is held; the half must not be advanced afterwards.
    pub fn release(&mut self, pool: &mut Pool) {
        match std::mem::take(&mut self.held) {
            Held::Nothing => {}
            Held::Spill(spill) => pool.end_spill(spill),
            Held::Pipe(piped) => pool.end_pipe(piped.pipe, piped.held == 0),
        }
    }

    pub(super) fn source_ended(&mut self) {
        self.state = State::Ending;
    }

    pub(super) fn source_is_open(&self) -> bool {
        self.state == State::Open
    }

    /// One read and one write; returns how many bytes were read.
    fn copy<A: Stream, B: Stream>(
        &mut self,
        source: &mut Side<A>,
        sink: &mut Side<B>,
        pool: &mut Pool,
    ) -> io::Result<usize> {
        let scratch = pool.scratch();
        let Some(count) = ready(source.stream.read(scratch))? else {
            source.readable = false;
            return Ok(0);
        };
        if count == 0 {
            self.source_ended();
            return Ok(0);
        }
        self.bytes += count as u64;
        let full = count == scratch.len();
        // A short read has emptied the socket, and what comes next is announced by an event of its
        // own. An end that was announced already is not announced again.
        if !full && !source.read_closed && !source.urgent {
            source.readable = false;
        }
        let written = ready(sink.stream.write(&scratch[..count]))?.unwrap_or(0);
        if written < count {
            sink.writable = false;
            self.held = Held::Spill(pool.spill(written..count));
        }
        let filled = full && count == READ_SIZE;
        self.full_reads = if filled { (self.full_reads + 1).min(BULK) } else { 0 };
        Ok(count)
    }

    /// Takes a pipe from the pool; false when there is none or the stream can't go through one.
    fn start_to_splice<A>(&mut self, source: &Side<A>, pool: &mut Pool) -> bool {
        if !source.urgent
            && let Some(pipe) = pool.pipe()
        {
            self.held = Held::Pipe(Piped { pipe, held: 0, passed: 0 });
            return true;
        }
        self.full_reads = 0;
        false
    }

    fn could_go_on<A, B>(&self, source: &Side<A>, sink: &Side<B>) -> bool {
        match &self.held {
            Held::Nothing => match self.state {
                State::Open => source.readable && sink.writable,
                State::Ending => true,
                State::Ended => false,
            },
            Held::Spill(_) => sink.writable,
            Held::Pipe(piped) if piped.held == 0 => source.readable || !self.source_is_open(),
            Held::Pipe(_) => sink.writable,
        }
    }
}

/// `None` when the call would have had to wait.
pub(super) fn ready(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Bytes that one direction may move before others get their turn.
const BUDGET: usize = 256 << 10;

/// Reads in a row that must fill the buffer before a direction counts as bulk traffic.
pub(super) const BULK: u8 = 3;
