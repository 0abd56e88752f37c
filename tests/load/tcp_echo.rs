//! A TCP echo server for thousands of connections.
//!
//! A connection owns no buffer until its client stops reading; then what was read waits in a
//! backlog and reading stops. The end of the client is passed on after the last byte.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use slab::Slab;

use crate::args::Options;
use crate::limits;
use crate::report::Report;
use crate::stop::Stop;

pub fn run(options: &Options) -> io::Result<Report> {
    limits::raise_descriptors(0)?;
    let mut poll = Poll::new()?;
    let mut stop = Stop::watch(poll.registry(), options.seconds)?;
    let mut listener = listen(options.listen)?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    println!("{}", listener.local_addr()?);

    let mut events = Events::with_capacity(1024);
    let mut clients: Slab<Client> = Slab::new();
    let mut busy: Vec<usize> = Vec::new();
    let mut scratch = vec![0; 1 << 16];
    let (mut accepted, mut bytes, mut failed, mut most) = (0, 0, 0, 0);
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
                    let slot = clients.vacant_entry();
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    poll.registry().register(&mut stream, Token(slot.key()), interest)?;
                    slot.insert(Client { stream, backlog: Vec::new(), ending: false });
                    Ok(())
                })?;
                most = most.max(clients.len());
            } else if let Some(client) = clients.get_mut(event.token().0) {
                client.ending |= event.is_read_closed();
                busy.push(event.token().0);
            }
        }
        busy.sort_unstable();
        busy.dedup();
        for key in std::mem::take(&mut busy) {
            let Some(client) = clients.get_mut(key) else { continue };
            match client.advance(&mut scratch, &mut bytes) {
                Ok(Progress::Waits) => {}
                Ok(Progress::Spent) => busy.push(key),
                Ok(Progress::Over) => drop(clients.remove(key)),
                Err(_) => {
                    failed += 1;
                    drop(clients.remove(key));
                }
            }
        }
    }
    Ok(Report::new()
        .count("accepted", accepted)
        .count("most_at_once", most as u64)
        .count("bytes", bytes)
        // Clients that reset are the tests' business, not this server's fault.
        .count("reset", failed))
}

/// Binds with the longest backlog that the kernel gives.
pub fn listen(address: std::net::SocketAddr) -> io::Result<TcpListener> {
    use socket2::{Domain, Protocol, Socket, Type};
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    let named = |error| io::Error::other(format!("bind {address}: {error}"));
    socket.bind(&address.into()).map_err(named)?;
    socket.listen(65_535)?;
    Ok(TcpListener::from_std(socket.into()))
}

/// Accepts until nothing is left; the count of new connections.
pub fn accept(
    listener: &TcpListener,
    mut add: impl FnMut(TcpStream) -> io::Result<()>,
) -> io::Result<u64> {
    let mut accepted = 0;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nodelay(true)?;
                add(stream)?;
                accepted += 1;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(accepted),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                ) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Polls, and takes an interruption for an empty turn.
pub fn wait(poll: &mut Poll, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
    match poll.poll(events, timeout) {
        Err(error) if error.kind() == ErrorKind::Interrupted => {
            events.clear();
            Ok(())
        }
        other => other,
    }
}

struct Client {
    stream: TcpStream,
    /// Bytes read and not yet taken back by the client.
    backlog: Vec<u8>,
    /// The end was announced: read on to it, no further event will tell.
    ending: bool,
}

enum Progress {
    Waits,
    /// More may be there, but others have their turn first.
    Spent,
    Over,
}

impl Client {
    fn advance(&mut self, scratch: &mut [u8], bytes: &mut u64) -> io::Result<Progress> {
        for _ in 0..READS_PER_TURN {
            if !self.backlog.is_empty() {
                let written = write_some(&mut self.stream, &self.backlog)?;
                self.backlog.drain(..written);
                if !self.backlog.is_empty() {
                    return Ok(Progress::Waits);
                }
                self.backlog = Vec::new();
            }
            let read = match self.stream.read(scratch) {
                Ok(0) => return Ok(Progress::Over),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Progress::Waits),
                Err(error) => return Err(error),
            };
            *bytes += read as u64;
            let written = write_some(&mut self.stream, &scratch[..read])?;
            if written < read {
                self.backlog.extend_from_slice(&scratch[written..read]);
                return Ok(Progress::Waits);
            }
            // A short read has drained the socket; the next byte brings its own event.
            if read < scratch.len() && !self.ending {
                return Ok(Progress::Waits);
            }
        }
        Ok(Progress::Spent)
    }
}

/// Writes until done or full; how much was taken.
fn write_some(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let mut written = 0;
    while written < bytes.len() {
        match stream.write(&bytes[written..]) {
            Ok(count) => written += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(written)
}

/// The token of a server's listener.
pub const LISTENER: Token = Token(usize::MAX - 3);
const READS_PER_TURN: usize = 16;
