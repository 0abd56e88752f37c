//! Tries on this machine what the forwarder promises, without a target: echoes bytes and datagrams
//! through itself on the loopback address and prints what came back, how fast and in what memory.
//!
//! The forwarder is a child process with the plain command line, so that what is measured is the
//! program as it runs; echo servers and clients are blocking threads of this one. Printing is to
//! standard output only; the exit code is all that is left to `main`.
//!
//! Every wait has a limit, and the child is ended on every way out.

use std::io::{self, BufRead, BufReader, PipeReader, Read, Write};
use std::net::{
    Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket,
};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{SpliceFFlags, splice};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Pid;
use socket2::{Domain, Socket, Type};

/// Runs every check and prints a line for each. Success means that all bytes came back right; what
/// this machine cannot do, or does slowly, is told but is no failure.
pub fn run() -> ExitCode {
    let mut report = Report { failed: false };
    if let Err(cause) = checks(&mut report) {
        report.failure("self-test", &cause);
    }
    if report.failed {
        report.line("result", "FAILED");
        return ExitCode::FAILURE;
    }
    report.line("result", "ok, every byte came back right");
    ExitCode::SUCCESS
}

/// Everything in order; the error is one that leaves nothing to check.
fn checks(report: &mut Report) -> Result<(), String> {
    report.text(concat!("tinyfwd ", env!("CARGO_PKG_VERSION"), ", self-test on loopback"));
    let echo = echo().map_err(|error| {
        format!("an echo server on {}: {error}; is the loopback interface up?", Ipv4Addr::LOCALHOST)
    })?;
    let direct = carry(echo)
        .map_err(|cause| format!("without the forwarder: {cause}; does loopback work here?"))?;

    let mut forwarder = Forwarder::start(echo)?;
    let through = forwarder.address;
    let idle = memory(forwarder.child.id());

    report.check("TCP bytes", carry(through).map(|carried| describe_bytes(&carried, &direct)));
    report.check("UDP datagrams", datagrams(through).map(|()| describe_sizes()));
    report.check("TCP latency", tcp_latency(echo, through).map(|times| times.describe()));
    report.check("UDP latency", udp_latency(echo, through).map(|times| times.describe()));
    let used = memory(forwarder.child.id());
    report.line("memory idle", &idle.map_or_else(unknown, |memory| memory.describe()));
    report.line("memory after", &used.map_or_else(unknown, |memory| memory.describe()));
    report.check("stop", forwarder.stop());
    if report.failed {
        for line in forwarder.said.try_iter().take(8) {
            report.line("it said", &line);
        }
    }

    for (name, outcome) in [
        ("splice", splices(echo)),
        ("UDP GSO", segments_leave_together()),
        ("UDP GRO", segments_arrive_together()),
        ("IPv6", ipv6()),
        ("IPv6 dual stack", dual_stack()),
    ] {
        match outcome {
            Ok(()) => report.line(name, "yes"),
            Err(cause) => report.line(name, &format!("no ({cause})")),
        }
    }
    Ok(())
}

/// Prints the lines and remembers whether one was a failure.
struct Report {
    failed: bool,
}

impl Report {
    fn check(&mut self, name: &str, outcome: Result<String, String>) {
        match outcome {
            Ok(text) => self.line(name, &text),
            Err(cause) => self.failure(name, &cause),
        }
    }

    fn failure(&mut self, name: &str, cause: &str) {
        self.failed = true;
        self.line(name, &format!("FAILED: {cause}"));
    }

    fn line(&mut self, name: &str, text: &str) {
        self.text(&format!("  {name:<15}  {text}"));
    }

    fn text(&mut self, text: &str) {
        // A reader that went away must not end the run before the child is ended.
        let _ = writeln!(io::stdout(), "{text}");
    }
}

/// The program itself as a child, forwarding from `address` to the echo servers.
struct Forwarder {
    child: Child,
    address: SocketAddr,
    /// Its log after `ready`.
    said: Receiver<String>,
}

impl Forwarder {
    fn start(target: SocketAddr) -> Result<Forwarder, String> {
        let program = std::env::current_exe()
            .map_err(|error| format!("the path of this program: {error}"))?;
        let mut child = Command::new(&program)
            .args(["-l", "127.0.0.1:0", "--drain", "1s", "-t"])
            .arg(target.to_string())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("start {}: {error}", program.display()))?;
        let log = child.stderr.take();
        // From here on dropping it ends the child.
        let mut forwarder = Forwarder { child, address: target, said: mpsc::channel().1 };
        if let Some(log) = log {
            forwarder.said = lines(log).map_err(|error| failed("start a thread", &error))?;
        }
        forwarder.address = listening(&forwarder.said)?;
        Ok(forwarder)
    }

    /// Ends the child as a supervisor would; an error if it does not end well.
    fn stop(&mut self) -> Result<String, String> {
        let pid = i32::try_from(self.child.id()).map_err(|error| error.to_string())?;
        let started = Instant::now();
        // Once waited for, the number may belong to another process.
        if let Ok(Some(status)) = self.child.try_wait() {
            return Err(format!("it had ended by itself, {status}"));
        }
        kill(Pid::from_raw(pid), Signal::SIGTERM).map_err(|error| format!("SIGTERM: {error}"))?;
        while started.elapsed() < PATIENCE {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(2)),
                Ok(Some(status)) if status.success() => {
                    let took = started.elapsed().as_millis() as u64;
                    return Ok(format!("{took} ms after SIGTERM, exit code 0"));
                }
                Ok(Some(status)) => return Err(format!("after SIGTERM {status}")),
                Err(error) => return Err(format!("wait: {error}")),
            }
        }
        Err(format!("still there {} s after SIGTERM", PATIENCE.as_secs()))
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) && self.stop().is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The lines of a log, read by a thread so that waiting for one can have a limit. The channel
/// closes with the log.
fn lines(log: impl Read + Send + 'static) -> io::Result<Receiver<String>> {
    let (sender, receiver) = mpsc::channel();
    spawn(move || {
        for line in BufReader::new(log).lines().map_while(Result::ok) {
            // A log nobody waits for is still read: a full pipe is not what is tested here.
            let _ = sender.send(line);
        }
    })?;
    Ok(receiver)
}

/// Starts a thread that ends with the process. One that cannot be had is an error and not a panic,
/// which would leave the child behind.
fn spawn(body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().spawn(body).map(|_| ())
}

/// Waits for `ready` and answers with the address from the lines before it.
fn listening(said: &Receiver<String>) -> Result<SocketAddr, String> {
    let started = Instant::now();
    let mut address = None;
    let mut last = String::new();
    loop {
        match said.recv_timeout(PATIENCE.saturating_sub(started.elapsed())) {
            Ok(line) if line == "ready" => {
                return address.ok_or("the forwarder did not say where it listens".to_owned());
            }
            Ok(line) => {
                address = address.or_else(|| listening_on(&line));
                last = line;
            }
            Err(RecvTimeoutError::Timeout) => {
                let limit = PATIENCE.as_secs();
                return Err(format!("the forwarder is not ready after {limit} s: {last}"));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(format!("the forwarder ended before it was ready: {last}"));
            }
        }
    }
}

/// The address in `listening on ADDRESS/PROTOCOL -> TARGET`.
fn listening_on(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once("listening on ")?;
    rest.split('/').next()?.parse().ok()
}

/// A TCP and a UDP echo server on one free port; they end with the process.
fn echo() -> io::Result<SocketAddr> {
    let mut attempts = 0;
    let (listener, socket) = loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        match UdpSocket::bind(listener.local_addr()?) {
            Ok(socket) => break (listener, socket),
            // The port is free for TCP and taken for UDP: another one will do.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempts < 32 => {
                attempts += 1;
            }
            Err(error) => return Err(error),
        }
    };
    let address = listener.local_addr()?;
    spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            // An error ends the connection, and that is what its client sees.
            let _ = spawn(move || {
                let _ = echo_stream(&stream);
            });
        }
    })?;
    spawn(move || {
        let mut datagram = vec![0; BLOCK];
        while let Ok((size, sender)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&datagram[..size], sender);
        }
    })?;
    Ok(address)
}

/// Sends back what comes; passes an end on only as an end.
fn echo_stream(mut stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut block = vec![0; BLOCK];
    loop {
        match stream.read(&mut block)? {
            0 => return stream.shutdown(Shutdown::Write),
            size => stream.write_all(&block[..size])?,
        }
    }
}

/// How many bytes went there and back, and how long that took.
struct Carried {
    bytes: u64,
    took: Duration,
}

impl Carried {
    /// In millions of bytes a second.
    fn speed(&self) -> u64 {
        // A byte a microsecond is a million a second.
        self.bytes / (self.took.as_micros() as u64).max(1)
    }
}

/// Sends pseudo-random bytes and an end, and wants the same bytes and an end back.
fn carry(address: SocketAddr) -> Result<Carried, String> {
    let stream = dial(address)?;
    let started = Instant::now();
    let (received, sent) = thread::scope(|scope| {
        let sender = thread::Builder::new()
            .spawn_scoped(scope, || send_bytes(&stream, started))
            .map_err(|error| failed("start a thread", &error))?;
        let received = receive_bytes(&stream);
        if received.is_err() {
            // The sender need not wait for a reader that is gone.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let sent = sender.join().unwrap_or_else(|_| Err("the sender failed".to_owned()));
        Ok::<_, String>((received?, sent?))
    })?;
    if received != sent {
        return Err(format!("the end came after {received} of {sent} bytes"));
    }
    Ok(Carried { bytes: sent, took: started.elapsed() })
}

/// Sends for at most [`BYTES`] and [`SENDING`], then the end; answers how much it was.
fn send_bytes(mut stream: &TcpStream, started: Instant) -> Result<u64, String> {
    let mut pattern = Pattern::new();
    let mut block = vec![0; BLOCK];
    let mut sent = 0;
    while sent < BYTES && started.elapsed() < SENDING {
        pattern.fill(&mut block);
        stream.write_all(&block).map_err(|error| failed("send", &error))?;
        sent += block.len() as u64;
    }
    stream.shutdown(Shutdown::Write).map_err(|error| failed("end sending", &error))?;
    Ok(sent)
}

/// Reads to the end and compares every byte; answers how many there were.
fn receive_bytes(mut stream: &TcpStream) -> Result<u64, String> {
    let mut pattern = Pattern::new();
    let mut expected = vec![0; BLOCK];
    let mut block = vec![0; BLOCK];
    let mut before = 0;
    loop {
        let mut filled = 0;
        while filled < BLOCK {
            match stream.read(&mut block[filled..]) {
                Ok(0) => break,
                Ok(size) => filled += size,
                Err(error) => {
                    let at = before + filled as u64;
                    return Err(failed(&format!("receive after {at} bytes"), &error));
                }
            }
        }
        pattern.fill(&mut expected);
        if block[..filled] != expected[..filled] {
            let pairs = block.iter().zip(&expected);
            let at = pairs.take_while(|(got, due)| got == due).count();
            return Err(format!("byte {} is not the one that was sent", before + at as u64));
        }
        before += filled as u64;
        if filled < BLOCK {
            return Ok(before);
        }
    }
}

/// Sends one datagram of every size and wants each back whole, once and in order.
fn datagrams(address: SocketAddr) -> Result<(), String> {
    let socket = datagram_socket(address)?;
    let mut pattern = Pattern::new();
    let mut sent = vec![0; BLOCK];
    let mut received = vec![0; BLOCK];
    for size in SIZES {
        pattern.fill(&mut sent);
        let name = format!("a datagram of {size} bytes");
        match socket.send(&sent[..size]) {
            Ok(taken) if taken == size => {}
            Ok(taken) => return Err(format!("{name}: only {taken} were sent")),
            Err(error) => return Err(failed(&format!("{name}: send"), &error)),
        }
        match socket.recv(&mut received) {
            Ok(back) if received[..back] == sent[..size] => {}
            Ok(back) if back != size => return Err(format!("{name}: {back} came back")),
            Ok(_) => return Err(format!("{name} came back changed")),
            Err(error) => return Err(failed(&name, &error)),
        }
    }
    // What arrives twice arrives at once: the second is right behind the first.
    socket.set_read_timeout(Some(Duration::from_millis(20))).map_err(|error| error.to_string())?;
    match socket.recv(&mut received) {
        Ok(back) => Err(format!("one more datagram than was sent, of {back} bytes")),
        Err(_) => Ok(()),
    }
}

/// Sends a message and replaces it by what came back.
type RoundTrip<'a> = &'a mut dyn FnMut(&mut [u8; MESSAGE]) -> io::Result<()>;

/// Medians of round trips, taken in turns so that both saw the same machine.
struct Latency {
    direct: Duration,
    through: Duration,
    rounds: usize,
}

impl Latency {
    fn measure(direct: RoundTrip<'_>, through: RoundTrip<'_>) -> Result<Latency, String> {
        let started = Instant::now();
        let mut pattern = Pattern::new();
        let mut times = [Vec::with_capacity(ROUNDS), Vec::with_capacity(ROUNDS)];
        // However slow the machine, a median needs a few.
        while times[0].len() < ROUNDS && (times[0].len() < 8 || started.elapsed() < MEASURING) {
            let ways: [RoundTrip<'_>; 2] = [&mut *direct, &mut *through];
            for (way, times) in ways.into_iter().zip(&mut times) {
                let mut sent = [0; MESSAGE];
                pattern.fill(&mut sent);
                let mut message = sent;
                let before = Instant::now();
                way(&mut message).map_err(|error| failed("a message", &error))?;
                times.push(before.elapsed());
                if message != sent {
                    return Err("a message came back changed".to_owned());
                }
            }
        }
        let rounds = times[0].len();
        let [direct, through] = times.map(|mut times| {
            times.sort_unstable();
            times[rounds / 2]
        });
        Ok(Latency { direct, through, rounds })
    }

    fn describe(&self) -> String {
        format!(
            "{} added (direct {}; medians of {} round trips of {MESSAGE} bytes)",
            micros(self.through.saturating_sub(self.direct)),
            micros(self.direct),
            self.rounds,
        )
    }
}

fn tcp_latency(direct: SocketAddr, through: SocketAddr) -> Result<Latency, String> {
    let (direct, through) = (dial(direct)?, dial(through)?);
    let round_trip = |mut stream: &TcpStream, message: &mut [u8; MESSAGE]| {
        stream.write_all(message)?;
        message.fill(0);
        stream.read_exact(message)
    };
    Latency::measure(&mut |message| round_trip(&direct, message), &mut |message| {
        round_trip(&through, message)
    })
}

fn udp_latency(direct: SocketAddr, through: SocketAddr) -> Result<Latency, String> {
    let (direct, through) = (datagram_socket(direct)?, datagram_socket(through)?);
    let round_trip = |socket: &UdpSocket, message: &mut [u8; MESSAGE]| {
        socket.send(message)?;
        message.fill(0);
        socket.recv(message).map(|_| ())
    };
    Latency::measure(&mut |message| round_trip(&direct, message), &mut |message| {
        round_trip(&through, message)
    })
}

/// Physical memory of a process in kB, as the kernel tells it.
struct Memory {
    resident: u64,
    /// Not backed by a file: heap, stack and written data.
    anonymous: Option<u64>,
}

impl Memory {
    fn describe(&self) -> String {
        match self.anonymous {
            Some(anonymous) => format!("{} kB resident, {anonymous} kB anonymous", self.resident),
            None => format!("{} kB resident", self.resident),
        }
    }
}

/// `None` where `/proc` does not say.
fn memory(process: u32) -> Option<Memory> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let kilobytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse().ok()
    };
    Some(Memory { resident: kilobytes("VmRSS:")?, anonymous: kilobytes("RssAnon:") })
}

fn unknown() -> String {
    "unknown (/proc does not say)".to_owned()
}

/// Whether bytes go from a TCP socket into a pipe without a copy.
fn splices(echo: SocketAddr) -> Result<(), String> {
    let mut stream = dial(echo)?;
    let message = [7; MESSAGE];
    stream.write_all(&message).map_err(|error| failed("send", &error))?;
    let (mut pipe, end): (PipeReader, _) = io::pipe().map_err(|error| failed("pipe", &error))?;
    let moved = splice(&stream, None, &end, None, MESSAGE, SpliceFFlags::empty())
        .map_err(|error| failed("splice", &error.into()))?;
    let mut received = [0; MESSAGE];
    pipe.read_exact(&mut received[..moved]).map_err(|error| failed("pipe", &error))?;
    match received[..moved] == message[..moved] {
        true => Ok(()),
        false => Err("bytes were changed".to_owned()),
    }
}

/// Whether the kernel cuts one buffer into several datagrams.
fn segments_leave_together() -> Result<(), String> {
    let receiver = loopback_datagrams()?;
    let sender = datagram_socket(receiver.local_addr().map_err(|error| error.to_string())?)?;
    setsockopt(&sender, sockopt::UdpGsoSegment, &1000).map_err(|error| error.to_string())?;
    sender.send(&[7; 2500]).map_err(|error| failed("send", &error))?;
    let mut datagram = [0; 3000];
    for size in [1000, 1000, 500] {
        match receiver.recv(&mut datagram) {
            Ok(received) if received == size => {}
            Ok(received) => return Err(format!("a segment of {size} bytes has {received}")),
            Err(error) => return Err(failed("a segment", &error)),
        }
    }
    Ok(())
}

/// Whether the kernel hands over several datagrams as one buffer.
fn segments_arrive_together() -> Result<(), String> {
    setsockopt(&loopback_datagrams()?, sockopt::UdpGroSegment, &true)
        .map_err(|error| error.to_string())
}

fn ipv6() -> Result<(), String> {
    match TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) {
        Ok(_) => Ok(()),
        Err(error) => Err(failed("bind [::1]:0", &error)),
    }
}

/// Whether one IPv6 socket takes IPv4 as well.
fn dual_stack() -> Result<(), String> {
    let accept_ipv4 = || {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
        socket.set_only_v6(false)?;
        socket.bind(&SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0).into())?;
        socket.listen(1)?;
        let port = TcpListener::from(socket.try_clone()?).local_addr()?.port();
        TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), PATIENCE)
    };
    accept_ipv4().map(|_| ()).map_err(|error| error.to_string())
}

fn dial(address: SocketAddr) -> Result<TcpStream, String> {
    let limited = || {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    };
    limited().map_err(|error| failed(&format!("connect {address}/tcp"), &error))
}

fn loopback_datagrams() -> Result<UdpSocket, String> {
    let limited = || {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(socket)
    };
    limited().map_err(|error| failed("bind 127.0.0.1:0/udp", &error))
}

fn datagram_socket(peer: SocketAddr) -> Result<UdpSocket, String> {
    let socket = loopback_datagrams()?;
    match socket.connect(peer) {
        Ok(()) => Ok(socket),
        Err(error) => Err(failed(&format!("connect {peer}/udp"), &error)),
    }
}

/// The action and why it failed; running out of time has its own words.
fn failed(action: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("{action}: nothing within {} s", PATIENCE.as_secs())
        }
        _ => format!("{action}: {error}"),
    }
}

fn describe_bytes(through: &Carried, direct: &Carried) -> String {
    format!(
        "{} MiB and the end came back, {} MB/s (direct {} MB/s)",
        through.bytes >> 20,
        through.speed(),
        direct.speed(),
    )
}

fn describe_sizes() -> String {
    let sizes: Vec<String> = SIZES.iter().map(usize::to_string).collect();
    format!("of {} bytes came back whole", sizes.join(", "))
}

/// In microseconds with one decimal.
fn micros(time: Duration) -> String {
    let tenths = time.as_nanos() as u64 / 100;
    format!("{}.{} µs", tenths / 10, tenths % 10)
}

/// Bytes that repeat after 2^64 blocks: a block that is lost, doubled or out of place is seen.
struct Pattern(u64);

impl Pattern {
    fn new() -> Pattern {
        Pattern(0x9e37_79b9_7f4a_7c15)
    }

    /// The next bytes, a multiple of eight; both ends ask for the same sizes in the same order.
    fn fill(&mut self, bytes: &mut [u8]) {
        debug_assert!(bytes.len().is_multiple_of(8));
        for chunk in bytes.chunks_exact_mut(8) {
            // Marsaglia's xorshift64.
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            chunk.copy_from_slice(&self.0.to_le_bytes());
        }
    }
}

/// For one connection, answer, or end; all of them together stay within about ten seconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// A slow machine sends less, but not longer.
const SENDING: Duration = Duration::from_secs(2);
/// The same for each kind of round trip.
const MEASURING: Duration = Duration::from_secs(1);
/// What the TCP check sends.
const BYTES: u64 = 64 << 20;
/// One more than the longest datagram, so that a longer one would be seen.
const BLOCK: usize = 1 << 16;
/// None, one, the least that DNS allows, either side of Ethernet's limit, jumbo frames, and the
/// most that UDP over IPv4 can carry.
const SIZES: [usize; 7] = [0, 1, 512, 1472, 1500, 9000, 65_507];
/// Bytes of a round trip.
const MESSAGE: usize = 64;
const ROUNDS: usize = 3000;

#[cfg(test)]
mod tests {
    use super::*;

    /// A TCP server that treats its first connection in its own way.
    fn serve(treat: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || treat(listener.accept().unwrap().0));
        address
    }

    #[track_caller]
    fn refused<T>(outcome: Result<T, String>, part: &str) {
        let Err(cause) = outcome else { panic!("no error") };
        assert!(cause.contains(part), "{cause:?} lacks {part:?}");
    }

    #[test]
    fn an_echo_server_passes_every_check() {
        let echo = echo().unwrap();
        let carried = carry(echo).unwrap();
        assert!(carried.bytes > 0 && carried.bytes <= BYTES);
        datagrams(echo).unwrap();
        assert!(tcp_latency(echo, echo).unwrap().rounds >= 8);
        assert!(udp_latency(echo, echo).unwrap().rounds >= 8);
    }

    #[test]
    fn a_changed_byte_is_found() {
        let address = serve(|mut stream| {
            let mut block = vec![0; 1000];
            stream.read_exact(&mut block).unwrap();
            block[777] ^= 1;
            stream.write_all(&block).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            while stream.read(&mut block).is_ok_and(|size| size > 0) {}
        });
        refused(carry(address), "byte 777 is not the one");
    }

    #[test]
    fn an_early_end_is_found() {
        let address = serve(|mut stream| {
            let mut block = vec![0; BLOCK];
            let mut rest = 100_000;
            while rest > 0 {
                let size = stream.read(&mut block).unwrap().min(rest);
                stream.write_all(&block[..size]).unwrap();
                rest -= size;
            }
            stream.shutdown(Shutdown::Write).unwrap();
            while stream.read(&mut block).is_ok_and(|size| size > 0) {}
        });
        refused(carry(address), "the end came after 100000 of ");
    }

    #[test]
    fn a_changed_datagram_is_found() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        thread::spawn(move || {
            let mut block = vec![0; BLOCK];
            loop {
                let (size, sender) = socket.recv_from(&mut block).unwrap();
                if size == 9000 {
                    block[8999] ^= 1;
                }
                socket.send_to(&block[..size], sender).unwrap();
            }
        });
        refused(datagrams(address), "a datagram of 9000 bytes came back changed");
    }

    #[test]
    fn a_cut_or_doubled_datagram_is_found() {
        for (size, times, part) in
            [(65_000, 1, "of 65507 bytes: 65000 came back"), (BLOCK, 2, "of 1 bytes: 0 came back")]
        {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let address = socket.local_addr().unwrap();
            thread::spawn(move || {
                let mut block = vec![0; BLOCK];
                loop {
                    let (received, sender) = socket.recv_from(&mut block).unwrap();
                    for _ in 0..times {
                        let _ = socket.send_to(&block[..received.min(size)], sender);
                    }
                }
            });
            refused(datagrams(address), part);
        }
    }

    #[test]
    fn the_address_comes_from_the_lines_before_ready() {
        let log = "listening on 127.0.0.1:4/tcp -> 127.0.0.1:5\n\
                   listening on 127.0.0.1:4/udp -> 127.0.0.1:5\nready\n";
        assert_eq!(listening(&lines(log.as_bytes()).unwrap()), Ok(([127, 0, 0, 1], 4).into()));
        refused(listening(&lines(&b"ready\n"[..]).unwrap()), "did not say where");
        refused(
            listening(&lines(&b"bind: no\n"[..]).unwrap()),
            "ended before it was ready: bind: no",
        );
    }

    #[test]
    fn the_memory_of_a_process_is_read() {
        let memory = memory(std::process::id()).unwrap();
        assert!(memory.resident > 0);
        assert!(memory.anonymous.is_none_or(|anonymous| anonymous <= memory.resident));
    }

    #[test]
    fn numbers_are_shown_in_their_units() {
        assert_eq!(micros(Duration::from_nanos(14_890)), "14.8 µs");
        let carried = Carried { bytes: 64 << 20, took: Duration::from_millis(100) };
        assert_eq!(carried.speed(), 671);
    }
}
