//! TCP peers: clients, targets, and the ways in which a connection can begin, stall and end.
//!
//! Every stream has time limits on reading and writing, so that a test that would hang fails.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use socket2::{Domain, SockRef, Socket, Type};

use super::{Forwarder, Pattern, WAIT, local};

/// A target on 127.0.0.1 with room for many clients.
#[track_caller]
pub fn listen() -> TcpListener {
    listen_on(local(0))
}

/// A target on this address.
#[track_caller]
pub fn listen_on(address: SocketAddr) -> TcpListener {
    let socket = stream_socket(address);
    socket.set_reuse_address(true).unwrap();
    socket.bind(&address.into()).unwrap_or_else(|e| panic!("bind {address}: {e}"));
    socket.listen(4096).unwrap();
    // On a listening socket, the limit on reading is one on accepting.
    socket.set_read_timeout(Some(WAIT)).unwrap();
    socket.into()
}

/// The next connection to a target.
#[track_caller]
pub fn accept(listener: &TcpListener) -> TcpStream {
    match listener.accept() {
        Ok((stream, _)) => limited(stream),
        Err(e) => panic!("nobody connected to {}: {e}", listener.local_addr().unwrap()),
    }
}

/// A connection to this address.
#[track_caller]
pub fn connect(address: SocketAddr) -> TcpStream {
    try_connect(address).unwrap_or_else(|e| panic!("connect to {address}: {e}"))
}

/// A connection to this address, or what happens instead. A forwarder that refuses may be so quick
/// that its reset comes before the client knows of the connection.
pub fn try_connect(address: SocketAddr) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&address, WAIT).map(limited)
}

/// A client that connects to this address is accepted and then reset, without a byte.
#[track_caller]
pub fn expect_refusal(address: SocketAddr) {
    match try_connect(address) {
        Ok(client) => assert_eq!(expect_reset(&client, Pattern(0), 0), 0, "bytes before a reset"),
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "connect to {address}"),
    }
}

/// Both ends of a connection through the forwarder: the client's and the target's.
#[track_caller]
pub fn pair(forwarder: &Forwarder, target: &TcpListener) -> (TcpStream, TcpStream) {
    (connect(forwarder.address()), accept(target))
}

/// Writes this part of the pattern.
#[track_caller]
pub fn send(mut stream: &TcpStream, pattern: Pattern, mut range: Range<u64>) {
    while !range.is_empty() {
        let len = (range.end - range.start).min(256 * 1024) as usize;
        if let Err(e) = stream.write_all(pattern.bytes(range.start, len)) {
            panic!("sending byte {} of {}: {e}", range.start, range.end);
        }
        range.start += len as u64;
    }
}

/// Reads this part of the pattern, and no byte more.
#[track_caller]
pub fn receive(mut stream: &TcpStream, pattern: Pattern, mut range: Range<u64>) {
    let mut buffer = vec![0; 64 * 1024];
    while !range.is_empty() {
        let len = (range.end - range.start).min(buffer.len() as u64) as usize;
        match stream.read(&mut buffer[..len]) {
            Ok(0) => panic!("the stream ended at byte {} of {}", range.start, range.end),
            Ok(n) => {
                pattern.check(range.start, &buffer[..n]);
                range.start += n as u64;
            }
            Err(e) => panic!("at byte {} of {}: {e}", range.start, range.end),
        }
    }
}

/// Reads the pattern from `offset` to the end of the stream, and gives the offset of the end.
#[track_caller]
pub fn receive_to_end(stream: &TcpStream, pattern: Pattern, offset: u64) -> u64 {
    match drain(stream, pattern, offset) {
        (end, Ok(())) => end,
        (at, Err(e)) => panic!("no end after byte {at}: {e}"),
    }
}

/// Both ends send that many bytes and end, at the same time, and check what they receive.
#[track_caller]
pub fn both_ways(client: &TcpStream, server: &TcpStream, len: u64) {
    const UP: Pattern = Pattern(1);
    const DOWN: Pattern = Pattern(2);
    thread::scope(|scope| {
        for (from, to, pattern) in [(client, server, UP), (server, client, DOWN)] {
            scope.spawn(move || {
                send(from, pattern, 0..len);
                end(from);
            });
            scope.spawn(move || assert_eq!(receive_to_end(to, pattern, 0), len));
        }
    });
}

/// Ends the sending side.
#[track_caller]
pub fn end(stream: &TcpStream) {
    stream.shutdown(Shutdown::Write).expect("the sending side can be ended");
}

/// Leaves with a reset.
#[track_caller]
pub fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// The next thing to read is the end.
#[track_caller]
pub fn expect_end(mut stream: &TcpStream) {
    match stream.read(&mut [0; 1]) {
        Ok(0) => {}
        Ok(_) => panic!("a byte came where the end was expected"),
        Err(e) => panic!("{e} where the end was expected"),
    }
}

/// Reads what is left of the pattern and then a reset, not an end; gives the offset of the reset.
#[track_caller]
pub fn expect_reset(stream: &TcpStream, pattern: Pattern, offset: u64) -> u64 {
    match drain(stream, pattern, offset) {
        (at, Err(e)) if e.kind() == ErrorKind::ConnectionReset => at,
        (at, Err(e)) => panic!("not a reset after byte {at}: {e}"),
        (at, Ok(())) => panic!("a clean end after byte {at} where a reset was expected"),
    }
}

/// Waits for a reset on a stream whose reading side has already ended or is not read.
///
/// The kernel says EPIPE for a reset that comes after the other side's end.
#[track_caller]
pub fn expect_broken(stream: &TcpStream) {
    let start = Instant::now();
    loop {
        match stream.take_error().unwrap().map(|e| e.kind()) {
            Some(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => return,
            Some(other) => panic!("{other} where a reset was expected"),
            None => assert!(start.elapsed() < WAIT, "no reset within {WAIT:?}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Writes the pattern until the stream has taken nothing for half a second; gives how much it took.
#[track_caller]
pub fn push_until_stopped(mut stream: &TcpStream, pattern: Pattern) -> u64 {
    stream.set_nonblocking(true).unwrap();
    let (mut sent, mut last) = (0, Instant::now());
    let start = Instant::now();
    while last.elapsed() < Duration::from_millis(500) {
        match stream.write(pattern.bytes(sent, 64 * 1024)) {
            Ok(n) => {
                sent += n as u64;
                last = Instant::now();
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(5)),
            Err(e) => panic!("after {sent} bytes: {e}"),
        }
        assert!(start.elapsed() < WAIT, "the writer is not stopped after {sent} bytes");
    }
    stream.set_nonblocking(false).unwrap();
    sent
}

/// A target that sends back what it gets, to any number of clients.
pub struct Echo {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    /// On 127.0.0.1.
    #[track_caller]
    pub fn start() -> Echo {
        Echo::on(listen())
    }

    /// On a target that exists.
    #[track_caller]
    pub fn on(listener: TcpListener) -> Echo {
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((stream, _)) = listener.accept() {
                        thread::spawn(move || echo(&stream));
                    }
                }
            }
        });
        Echo { address, stop, thread: Some(thread) }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes it from waiting for a client.
        let woken = TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_ok();
        if let Some(thread) = self.thread.take()
            && woken
        {
            let _ = thread.join();
        }
    }
}

/// An address that refuses connections, and that nobody else can take meanwhile.
pub struct Refusing(Socket);

impl Refusing {
    /// On 127.0.0.1.
    #[track_caller]
    pub fn start() -> Refusing {
        Refusing::on(local(0))
    }

    /// On this address.
    #[track_caller]
    pub fn on(address: SocketAddr) -> Refusing {
        // Bound but not listening: the port is taken and answers with a reset.
        let socket = stream_socket(address);
        socket.bind(&address.into()).unwrap_or_else(|e| panic!("bind {address}: {e}"));
        Refusing(socket)
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap().as_socket().expect("an internet address")
    }
}

/// An address that never answers: a listening socket whose queue is full, so that the kernel drops
/// every further attempt.
pub struct BlackHole {
    listener: Socket,
    queued: Vec<TcpStream>,
}

impl BlackHole {
    /// On 127.0.0.1.
    #[track_caller]
    pub fn start() -> BlackHole {
        BlackHole::on(local(0))
    }

    /// On this address.
    #[track_caller]
    pub fn on(address: SocketAddr) -> BlackHole {
        let listener = stream_socket(address);
        listener.bind(&address.into()).unwrap_or_else(|e| panic!("bind {address}: {e}"));
        listener.listen(0).unwrap();
        let mut hole = BlackHole { listener, queued: Vec::new() };
        loop {
            match TcpStream::connect_timeout(&hole.address(), Duration::from_millis(250)) {
                Ok(stream) => hole.queued.push(stream),
                Err(e) if e.kind() == ErrorKind::TimedOut => return hole,
                Err(e) => panic!("filling the queue of {}: {e}", hole.address()),
            }
            assert!(hole.queued.len() < 100, "the kernel does not drop attempts on a full queue");
        }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap().as_socket().expect("an internet address")
    }

    /// Becomes a target that accepts; the attempts that are still going on get through.
    #[track_caller]
    pub fn open(self) -> TcpListener {
        self.listener.listen(4096).unwrap();
        self.listener.set_read_timeout(Some(WAIT)).unwrap();
        let listener = TcpListener::from(self.listener);
        for _ in self.queued {
            accept(&listener);
        }
        listener
    }
}

fn stream_socket(address: SocketAddr) -> Socket {
    Socket::new(Domain::for_address(address), Type::STREAM, None).expect("a TCP socket")
}

fn limited(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(WAIT)).unwrap();
    stream.set_write_timeout(Some(WAIT)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Reads and checks up to the end or an error; gives the offset that was reached.
#[track_caller]
fn drain(mut stream: &TcpStream, pattern: Pattern, mut offset: u64) -> (u64, io::Result<()>) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return (offset, Ok(())),
            Ok(n) => {
                pattern.check(offset, &buffer[..n]);
                offset += n as u64;
            }
            Err(e) => return (offset, Err(e)),
        }
    }
}

fn echo(mut stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => {
                let _ = stream.shutdown(Shutdown::Write);
                return;
            }
            Ok(n) if stream.write_all(&buffer[..n]).is_ok() => {}
            _ => return,
        }
    }
}
