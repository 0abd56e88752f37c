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
    ///
    /// `last` says that the other direction has ended: then both sockets are closed when this one
    /// ends, and closing passes the end on by itself.
    pub fn advance<A: Stream, B: Stream>(
        &mut self,
        source: &mut Side<A>,
        sink: &mut Side<B>,
        pool: &mut Pool,
        last: bool,
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
                        pool.end_spill(*spill);
                    }
                }
                Held::Nothing => match self.state {
                    State::Ended => break,
                    State::Ending => {
                        if !last {
                            sink.stream.end()?;
                        }
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
            Held::Spill(spill) => pool.end_spill(*spill),
            Held::Pipe(piped) => pool.end_pipe(piped.pipe, piped.held == 0),
        }
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
            self.state = State::Ending;
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
            Held::Pipe(piped) if piped.held == 0 => source.readable,
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
const BUDGET: usize = 512 << 10;

/// Reads in a row that must fill the buffer before a direction counts as bulk traffic.
pub(super) const BULK: u8 = 3;

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// What a scripted source does at one read.
    #[derive(Clone, Copy, Debug)]
    enum Give {
        Bytes(usize),
        Nothing,
        Reset,
    }

    /// Counts upwards, so that every byte tells its place.
    struct Source {
        script: RefCell<VecDeque<Give>>,
        given: Cell<usize>,
    }

    /// What a scripted sink does at one write.
    #[derive(Clone, Copy, Debug)]
    enum Take {
        AtMost(usize),
        Nothing,
        Reset,
    }

    struct Sink {
        script: RefCell<VecDeque<Take>>,
        taken: Cell<usize>,
        ended: Cell<bool>,
    }

    fn byte(at: usize) -> u8 {
        (at % 251) as u8
    }

    impl Source {
        /// Fills `into` with the next bytes; the rest of a chunk stays for the next read.
        fn give(
            &self,
            room: usize,
            mut put: impl FnMut(usize, usize) -> io::Result<usize>,
        ) -> io::Result<usize> {
            let mut script = self.script.borrow_mut();
            match script.pop_front() {
                None => Ok(0),
                Some(Give::Nothing) => Err(ErrorKind::WouldBlock.into()),
                Some(Give::Reset) => Err(ErrorKind::ConnectionReset.into()),
                Some(Give::Bytes(count)) => {
                    let put = put(self.given.get(), count.min(room));
                    let done = *put.as_ref().unwrap_or(&0);
                    if done < count {
                        script.push_front(Give::Bytes(count - done));
                    }
                    self.given.set(self.given.get() + done);
                    put
                }
            }
        }
    }

    impl Stream for Source {
        fn read(&self, into: &mut [u8]) -> io::Result<usize> {
            self.give(into.len(), |from, count| {
                for (at, slot) in into[..count].iter_mut().enumerate() {
                    *slot = byte(from + at);
                }
                Ok(count)
            })
        }

        fn splice_in(&self, pipe: &Pipe, most: usize) -> io::Result<usize> {
            self.give(most, |from, count| {
                let bytes: Vec<u8> = (from..from + count).map(byte).collect();
                Ok(nix::unistd::write(pipe.in_end(), &bytes)?)
            })
        }

        fn write(&self, _: &[u8]) -> io::Result<usize> {
            panic!("a half never writes to its source")
        }

        fn end(&self) -> io::Result<()> {
            panic!("a half never ends its source")
        }

        fn splice_out(&self, _: &Pipe, _: usize) -> io::Result<usize> {
            panic!("a half never writes to its source")
        }
    }

    impl Sink {
        fn take(&self, offered: usize) -> io::Result<usize> {
            assert!(!self.ended.get(), "bytes after the end");
            match self.script.borrow_mut().pop_front() {
                None => Ok(offered),
                Some(Take::AtMost(count)) => Ok(offered.min(count)),
                Some(Take::Nothing) => Err(ErrorKind::WouldBlock.into()),
                Some(Take::Reset) => Err(ErrorKind::ConnectionReset.into()),
            }
        }

        #[track_caller]
        fn check(&self, bytes: &[u8]) {
            for (at, got) in (self.taken.get()..).zip(bytes) {
                assert_eq!(*got, byte(at), "byte {at}");
            }
            self.taken.set(self.taken.get() + bytes.len());
        }
    }

    impl Stream for Sink {
        fn read(&self, _: &mut [u8]) -> io::Result<usize> {
            panic!("a half never reads its sink")
        }

        fn splice_in(&self, _: &Pipe, _: usize) -> io::Result<usize> {
            panic!("a half never reads its sink")
        }

        fn write(&self, from: &[u8]) -> io::Result<usize> {
            assert!(!from.is_empty(), "an empty write");
            let count = self.take(from.len())?;
            self.check(&from[..count]);
            Ok(count)
        }

        fn end(&self) -> io::Result<()> {
            assert!(!self.ended.replace(true), "two ends");
            Ok(())
        }

        fn splice_out(&self, pipe: &Pipe, most: usize) -> io::Result<usize> {
            assert!(most > 0, "an empty splice");
            let mut bytes = vec![0; self.take(most)?];
            let count = nix::unistd::read(pipe.out_end(), &mut bytes)?;
            self.check(&bytes[..count]);
            Ok(count)
        }
    }

    fn gives() -> impl Strategy<Value = Vec<Give>> {
        let give = prop_oneof![
            4 => (1usize..300).prop_map(Give::Bytes),
            3 => (READ_SIZE - 1..=3 * READ_SIZE + 1).prop_map(Give::Bytes),
            3 => (6 * READ_SIZE..8 * READ_SIZE).prop_map(Give::Bytes),
            3 => Just(Give::Nothing),
        ];
        let end = prop_oneof![3 => Just(None), 1 => Just(Some(Give::Reset))];
        (prop::collection::vec(give, 0..20), end).prop_map(|(mut gives, end)| {
            gives.extend(end);
            gives
        })
    }

    fn takes() -> impl Strategy<Value = Vec<Take>> {
        prop::collection::vec(
            prop_oneof![
                20 => (1usize..2 * READ_SIZE).prop_map(Take::AtMost),
                10 => Just(Take::Nothing),
                1 => Just(Take::Reset),
            ],
            0..40,
        )
    }

    /// Plays a script to its end, as a poll would: after each call that waits, the side that it
    /// waits for becomes ready.
    fn play(gives: Vec<Give>, takes: Vec<Take>, urgent: bool) -> Result<(), TestCaseError> {
        let total: usize =
            gives.iter().map(|give| if let Give::Bytes(count) = give { *count } else { 0 }).sum();
        let resets = gives.iter().any(|give| matches!(give, Give::Reset))
            || takes.iter().any(|take| matches!(take, Take::Reset));
        let mut source =
            Side::new(Source { script: RefCell::new(gives.into()), given: Cell::new(0) });
        let mut sink = Side::new(Sink {
            script: RefCell::new(takes.into()),
            taken: Cell::new(0),
            ended: Cell::new(false),
        });
        source.urgent = urgent;
        let (mut half, mut pool) = (Half::default(), Pool::default());
        let mut failed = false;
        for _ in 0..10_000 {
            match half.advance(&mut source, &mut sink, &mut pool, false) {
                Ok(moved) if moved.more => continue,
                Ok(_) if half.is_ended() => break,
                Ok(_) => {
                    prop_assert!(!(source.readable && sink.writable), "it stops with work to do");
                    source.readable = true;
                    sink.writable = true;
                }
                Err(_) => {
                    failed = true;
                    break;
                }
            }
        }
        let (given, taken) = (source.stream.given.get(), sink.stream.taken.get());
        prop_assert_eq!(half.bytes(), given as u64);
        if failed {
            prop_assert!(resets && !sink.stream.ended.get());
            prop_assert!(taken <= given && given <= total);
        } else {
            prop_assert!(half.is_ended() && sink.stream.ended.get(), "it never ends");
            prop_assert_eq!(taken, total);
        }
        half.release(&mut pool);
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn every_byte_arrives_in_order_and_the_end_last(
            gives in gives(),
            takes in takes(),
            urgent in prop::bool::weighted(0.2),
        ) {
            play(gives, takes, urgent)?;
        }
    }

    fn side<S>(stream: S) -> Side<S> {
        Side { readable: true, ..Side::new(stream) }
    }

    fn source(gives: &[Give]) -> Side<Source> {
        side(Source { script: RefCell::new(gives.iter().copied().collect()), given: Cell::new(0) })
    }

    fn sink(takes: &[Take]) -> Side<Sink> {
        side(Sink {
            script: RefCell::new(takes.iter().copied().collect()),
            taken: Cell::new(0),
            ended: Cell::new(false),
        })
    }

    #[test]
    fn a_short_read_is_not_followed_by_another() {
        let (mut half, mut pool) = (Half::default(), Pool::default());
        let (mut source, mut sink) = (source(&[Give::Bytes(100), Give::Bytes(5)]), sink(&[]));
        half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        assert!(!source.readable);
        assert_eq!(sink.stream.taken.get(), 100);
    }

    #[test]
    fn an_end_that_was_announced_is_read_up_to() {
        let (mut half, mut pool) = (Half::default(), Pool::default());
        let (mut source, mut sink) = (source(&[Give::Bytes(100)]), sink(&[]));
        source.read_closed = true;
        half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        assert!(half.is_ended() && sink.stream.ended.get());
    }

    #[test]
    fn the_end_of_the_last_direction_is_left_to_the_close() {
        let (mut half, mut pool) = (Half::default(), Pool::default());
        let (mut source, mut sink) = (source(&[]), sink(&[]));
        half.advance(&mut source, &mut sink, &mut pool, true).unwrap();
        assert!(half.is_ended() && !sink.stream.ended.get());
    }

    #[test]
    fn nothing_is_read_while_the_sink_has_not_taken_what_is_held() {
        let (mut half, mut pool) = (Half::default(), Pool::default());
        let takes = [Take::AtMost(10), Take::Nothing];
        let (mut source, mut sink) = (source(&[Give::Bytes(100), Give::Bytes(7)]), sink(&takes));
        source.urgent = true;
        half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        sink.writable = true;
        half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        assert_eq!((source.stream.given.get(), sink.stream.taken.get()), (100, 10));
        sink.writable = true;
        half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        assert_eq!((source.stream.given.get(), sink.stream.taken.get()), (107, 107));
    }

    #[test]
    fn a_direction_that_fills_its_reads_goes_over_to_splicing_and_back() {
        let (mut half, mut pool) = (Half::default(), Pool::default());
        let (mut source, mut sink) =
            (source(&[Give::Bytes(3 * READ_SIZE + 1), Give::Nothing, Give::Bytes(9)]), sink(&[]));
        half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        assert_eq!(sink.stream.taken.get(), 3 * READ_SIZE + 1);
        assert!(matches!(half.held, Held::Nothing), "the pipe goes back when the source is dry");
        assert_eq!(half.full_reads, 0, "one byte through a pipe is no bulk traffic");
        source.readable = true;
        half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        assert_eq!(sink.stream.taken.get(), 3 * READ_SIZE + 10);
    }

    #[test]
    fn a_turn_is_bounded() {
        let (mut half, mut pool) = (Half::default(), Pool::default());
        let (mut source, mut sink) = (source(&[Give::Bytes(100 * READ_SIZE)]), sink(&[]));
        let moved = half.advance(&mut source, &mut sink, &mut pool, false).unwrap();
        assert!(moved.more && moved.any);
        assert!(sink.stream.taken.get() <= BUDGET + crate::pool::PIPE_SIZE);
        half.release(&mut pool);
    }
}
