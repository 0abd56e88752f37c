//! One TCP connection through the forwarder: [`Pair`] holds its two sockets and two [`Half`]s, one
//! for each direction; [`Dial`] is its life before the target has answered.
//!
//! All of it is passive: the server says what the poll reported and is told what came of it; the
//! clock and all waits are the server's. Nothing here registers a socket or knows a rule.

mod dial;
mod half;
mod pair;
mod pump;

use std::io::{self, Read, Write};
use std::net::Shutdown;

use mio::net::TcpStream;

pub use dial::{Dial, Failure, HEAD_START, Step};
pub use half::{Half, Moved, Side};
pub use pair::{Advance, End, Pair};

use crate::sys::{self, Pipe};

/// What one direction needs of a socket. Tests put a script in its place.
pub trait Stream {
    /// Reads what is there; 0 is the end.
    fn read(&self, into: &mut [u8]) -> io::Result<usize>;
    /// Writes what there is room for.
    fn write(&self, from: &[u8]) -> io::Result<usize>;
    /// Passes on the end: nothing will be written any more.
    fn end(&self) -> io::Result<()>;
    /// Moves what is there, at most `most` bytes, into the pipe; 0 is the end.
    fn splice_in(&self, pipe: &Pipe, most: usize) -> io::Result<usize>;
    /// Moves at most `most` bytes out of the pipe.
    fn splice_out(&self, pipe: &Pipe, most: usize) -> io::Result<usize>;
}

impl Stream for TcpStream {
    fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        Read::read(&mut &*self, into)
    }

    fn write(&self, from: &[u8]) -> io::Result<usize> {
        Write::write(&mut &*self, from)
    }

    fn end(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }

    fn splice_in(&self, pipe: &Pipe, most: usize) -> io::Result<usize> {
        sys::splice_in(self, pipe, most)
    }

    fn splice_out(&self, pipe: &Pipe, most: usize) -> io::Result<usize> {
        sys::splice_out(pipe, self, most)
    }
}
