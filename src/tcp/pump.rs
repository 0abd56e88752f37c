//! The splice engine of one direction: bytes go from socket to pipe to socket without being copied
//! to this process.
//!
//! "Would block" has two causes on the way in, an empty source and a full pipe, so while the pipe
//! holds bytes it says nothing of the source. A pipe counts in places, a page or a whole fragment of
//! a segment in each, so what it takes can be more or less than its size. It goes back to the pool
//! when it is empty and the source has run dry, and the half copies again.

use std::io;

use super::Stream;
use super::half::{BULK, Half, Held, Side, ready};
use crate::pool::{PIPE_SIZE, Pool, READ_SIZE};

/// Splices until source or sink has no more or `budget` bytes have moved; returns how many came out
/// of the pipe. The half no longer holds a pipe when splicing is over for now.
pub(super) fn advance<A: Stream, B: Stream>(
    half: &mut Half,
    source: &mut Side<A>,
    sink: &mut Side<B>,
    pool: &mut Pool,
    budget: usize,
) -> io::Result<usize> {
    let mut moved = 0;
    while moved < budget {
        let Held::Pipe(piped) = &mut half.held else { break };
        // The kernel's splice never gets past out-of-band data; a read does.
        let mut dry = !source.readable || source.urgent;
        let room = PIPE_SIZE - piped.held as usize;
        if !dry && room > 0 {
            match ready(source.stream.splice_in(&piped.pipe, room)) {
                // Either the end, or out-of-band data before it, which splice never gets past: a
                // read will tell.
                Ok(Some(0)) => {
                    dry = true;
                    piped.passed = 0;
                }
                Ok(Some(count)) => {
                    piped.held += count as u32;
                    piped.passed = piped.passed.saturating_add(count as u32);
                    half.bytes += count as u64;
                }
                Ok(None) if piped.held == 0 => {
                    source.readable = false;
                    dry = true;
                }
                Ok(None) => {}
                Err(error) if cannot_splice(&error) && piped.held == 0 => {
                    pool.splice_failed(&error);
                    dry = true;
                }
                Err(error) => return Err(error),
            }
        }
        if piped.held == 0 {
            debug_assert!(dry, "a pipe that bytes may still come to is not empty here");
            stop(half, pool);
            break;
        }
        if !sink.writable {
            break;
        }
        match ready(sink.stream.splice_out(&piped.pipe, piped.held as usize))? {
            Some(count) => {
                piped.held -= count as u32;
                moved += count;
            }
            None => sink.writable = false,
        }
    }
    Ok(moved)
}

/// Gives the empty pipe back. A direction that has passed little meanwhile is no bulk traffic any
/// more.
fn stop(half: &mut Half, pool: &mut Pool) {
    if let Held::Pipe(piped) = std::mem::take(&mut half.held) {
        half.full_reads = if piped.passed as usize >= READ_SIZE { BULK } else { 0 };
        pool.end_pipe(piped.pipe, true);
    }
}

/// What a kernel says that has no splice for these sockets.
fn cannot_splice(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL))
}
