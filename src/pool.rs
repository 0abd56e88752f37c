//! What connections share instead of each having its own: one scratch buffer for copying, pipes for
//! splicing, and the account of bytes that wait in spill buffers.
//!
//! Everything here is bounded, is made only when it is needed, and goes back to the system when it
//! has not been used for a while ([`Pool::trim`]). Nobody keeps anything in the scratch buffer
//! beyond a call.

use std::io;

use crate::sys::{self, Pipe};

/// The shared buffers and pipes.
pub struct Pool {
    scratch: Vec<u8>,
    idle_pipes: Vec<Pipe>,
    pipes_in_use: usize,
    splice_works: bool,
    spilled: usize,
    used: bool,
}

/// Bytes that were read and that the sink has not taken yet.
#[derive(Debug)]
pub struct Spill {
    bytes: Box<[u8]>,
    sent: usize,
}

impl Spill {
    /// What is still to be written; never empty.
    pub fn rest(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Marks `count` more bytes as written; true when that was all.
    pub fn advance(&mut self, count: usize) -> bool {
        self.sent += count;
        debug_assert!(self.sent <= self.bytes.len());
        self.sent == self.bytes.len()
    }
}

impl Default for Pool {
    fn default() -> Pool {
        Pool {
            scratch: Vec::new(),
            idle_pipes: Vec::new(),
            pipes_in_use: 0,
            splice_works: true,
            spilled: 0,
            used: false,
        }
    }
}

impl Pool {
    /// The scratch buffer, [`READ_SIZE`] bytes long, or less while many slow readers hold spill
    /// buffers: what one read can leave over then stays small.
    pub fn scratch(&mut self) -> &mut [u8] {
        if self.scratch.is_empty() {
            self.scratch = vec![0; SCRATCH_SIZE];
        }
        self.used = true;
        let size = if self.spilled < SPILL_SOFT_LIMIT { READ_SIZE } else { READ_SIZE_SHORT };
        &mut self.scratch[..size]
    }

    /// A buffer of its own for `rest`, the part of the scratch buffer that the sink did not take.
    pub fn spill(&mut self, rest: std::ops::Range<usize>) -> Box<Spill> {
        self.spilled += rest.len();
        self.used = true;
        Box::new(Spill { bytes: self.scratch[rest].into(), sent: 0 })
    }

    /// Ends a spill buffer, written out or not.
    pub fn end_spill(&mut self, spill: Spill) {
        self.spilled -= spill.bytes.len();
    }

    /// An empty pipe; `None` when there are enough of them or the system gives no more.
    pub fn pipe(&mut self) -> Option<Pipe> {
        if !self.splice_works {
            return None;
        }
        self.used = true;
        let pipe = match self.idle_pipes.pop() {
            Some(pipe) => pipe,
            None if self.pipes_in_use >= MAX_PIPES => return None,
            // Out of descriptors or of pipe pages: copying does the same work.
            None => Pipe::new(PIPE_SIZE).ok()?,
        };
        self.pipes_in_use += 1;
        Some(pipe)
    }

    /// Takes a pipe back; one that still holds bytes is closed.
    pub fn end_pipe(&mut self, pipe: Pipe, empty: bool) {
        self.pipes_in_use -= 1;
        if empty && self.idle_pipes.len() < MAX_IDLE_PIPES {
            self.idle_pipes.push(pipe);
        }
    }

    /// Turns splicing off for good.
    pub fn splice_failed(&mut self, error: &io::Error) {
        if self.splice_works {
            log::info!("splice is off, copying instead: {error}");
            self.splice_works = false;
            self.idle_pipes = Vec::new();
        }
    }

    /// Whether there is anything that [`trim`](Self::trim) could give back.
    pub fn holds_memory(&self) -> bool {
        !self.scratch.is_empty() || !self.idle_pipes.is_empty()
    }

    /// Gives back what was not used since the last call.
    pub fn trim(&mut self) {
        if !std::mem::replace(&mut self.used, false) {
            self.scratch = Vec::new();
            self.idle_pipes = Vec::new();
        }
    }

    /// Closes the idle pipes, so that somebody else can have their descriptors.
    pub fn spare_descriptors(&mut self) {
        self.idle_pipes.clear();
    }
}

/// What is read at a time.
pub const READ_SIZE: usize = 64 << 10;

/// What is read at a time while spill buffers hold [`SPILL_SOFT_LIMIT`] bytes.
const READ_SIZE_SHORT: usize = 4 << 10;

const SPILL_SOFT_LIMIT: usize = 1 << 20;

/// Larger than what is read at a time: from this size on the allocator maps memory of its own for
/// the buffer, of which only the pages count that were touched, and gives it back when it is freed.
const SCRATCH_SIZE: usize = sys::MAPPED_ALLOCATION;

/// What one pipe holds at most: against 64 KiB it saves a third to a half of the CPU time per byte,
/// because the network is given longer runs at a time. Also the most that a user may ask for.
pub const PIPE_SIZE: usize = 1 << 20;

/// Times [`PIPE_SIZE`], what readers that have stopped can hold of the kernel's memory; directions
/// beyond that are copied.
const MAX_PIPES: usize = 64;

const MAX_IDLE_PIPES: usize = 32;
