//! The forwarder as a child process: starting it, reading its log, and what `/proc` says about it.
//!
//! A [`Forwarder`] is ready when a test gets it, and is killed when the test drops it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{WAIT, eventually, local};

/// A running tinyfwd.
pub struct Forwarder {
    child: Child,
    log: Log,
    reader: Option<JoinHandle<ChildStderr>>,
    /// Of a forwarder whose log nobody reads: the end that would be read from.
    unread: Option<ChildStderr>,
}

impl Forwarder {
    /// Runs the binary with these arguments and waits until it is ready.
    #[track_caller]
    pub fn start<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Forwarder {
        let mut command = Command::new(binary());
        command.args(arguments);
        Forwarder::run(command)
    }

    /// One TCP rule on 127.0.0.1 with any free port; `options` as after `-o`, or empty.
    #[track_caller]
    pub fn tcp(target: SocketAddr, options: &str) -> Forwarder {
        Forwarder::start(rule("127.0.0.1:0/tcp", target, options))
    }

    /// One UDP rule on 127.0.0.1 with any free port; `options` as after `-o`, or empty.
    #[track_caller]
    pub fn udp(target: SocketAddr, options: &str) -> Forwarder {
        Forwarder::start(rule("127.0.0.1:0/udp", target, options))
    }

    /// One rule as arguments; `options` as after `-o`, or empty.
    pub fn rule(listen: &str, target: SocketAddr, options: &str) -> Vec<String> {
        rule(listen, target, options)
    }

    /// Runs a command that becomes the forwarder (it may `exec` it) and waits until it is ready.
    #[track_caller]
    pub fn run(command: Command) -> Forwarder {
        let (mut child, stderr) = spawn(command);
        let log = Log::default();
        let reader = thread::spawn({
            let log = log.clone();
            move || log.read(stderr, Until::Closed)
        });
        let pid = child.id();
        if let Err(why) = log.wait_until_ready() {
            let _ = child.kill();
            let _ = child.wait();
            panic!("tinyfwd (process {pid}) {why}; its log:\n{}", log.lines().join("\n"));
        }
        Forwarder { child, log, reader: Some(reader), unread: None }
    }

    /// Like [`Forwarder::start`], but nobody reads the log once the forwarder is ready, and the
    /// pipe it goes to is as small as a pipe can be.
    #[track_caller]
    pub fn start_unread<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Forwarder {
        let mut command = Command::new(binary());
        command.args(arguments);
        let (child, stderr) = spawn(command);
        fcntl(&stderr, FcntlArg::F_SETPIPE_SZ(4096)).expect("a pipe of one page");
        // Owned from here on, so that a panic below kills it.
        let mut forwarder = Forwarder { child, log: Log::default(), reader: None, unread: None };
        forwarder.unread = Some(forwarder.log.read(stderr, Until::Ready));
        forwarder.log.wait_until_ready().expect("the forwarder is ready");
        forwarder
    }

    /// Closes the reading end of a log that nobody reads.
    pub fn close_unread(&mut self) {
        self.unread = None;
    }

    /// The port of the first listener.
    #[track_caller]
    pub fn port(&self) -> u16 {
        self.ports()[0]
    }

    /// The ports of all listeners, in the order of their lines; a port open for both protocols
    /// stands there once.
    #[track_caller]
    pub fn ports(&self) -> Vec<u16> {
        let mut ports: Vec<u16> = Vec::new();
        for line in self.log.lines().iter().filter(|line| line.contains("listening on ")) {
            let address = line.split("listening on ").nth(1).unwrap_or_default();
            let address = address.split_whitespace().next().unwrap_or_default();
            let (address, _protocol) =
                address.rsplit_once('/').unwrap_or_else(|| panic!("no protocol: {line}"));
            let port = address
                .rsplit_once(':')
                .and_then(|(_, port)| port.parse().ok())
                .unwrap_or_else(|| panic!("no port: {line}"));
            if !ports.contains(&port) {
                ports.push(port);
            }
        }
        assert!(!ports.is_empty(), "no listener in the log:\n{}", self.log.lines().join("\n"));
        ports
    }

    /// The first listener as a client on this machine sees it.
    #[track_caller]
    pub fn address(&self) -> SocketAddr {
        local(self.port())
    }

    /// What the forwarder has logged.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Sends a signal.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap_or_else(|e| panic!("send {signal}: {e}"));
    }

    /// Waits until the process has ended, and fails if it has not `within` that time.
    #[track_caller]
    pub fn wait(&mut self, within: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("the child can be waited for") {
                if let Some(reader) = self.reader.take() {
                    let _ = reader.join();
                }
                return status;
            }
            assert!(start.elapsed() < within, "still running after {within:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// A counter in the status line of the first rule.
    #[track_caller]
    pub fn counter(&self, name: &str) -> u64 {
        let from = self.log.len();
        self.signal(Signal::SIGUSR1);
        let line = self
            .log
            .wait_for("a status line", from, |line| line.contains("status ") && line.contains('='));
        line.split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
            .unwrap_or_else(|| panic!("no {name} in: {line}"))
    }

    /// How many descriptors are open.
    #[track_caller]
    pub fn descriptors(&self) -> usize {
        fs::read_dir(self.proc("fd")).expect("the forwarder runs").count()
    }

    /// Waits until no more than `count` descriptors are open.
    #[track_caller]
    pub fn wait_for_descriptors(&self, count: usize, within: Duration) {
        let start = Instant::now();
        while self.descriptors() > count {
            assert!(
                start.elapsed() < within,
                "after {within:?} still {} descriptors, not {count}",
                self.descriptors()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Resident memory that is not backed by a file (`RssAnon`), in KiB.
    #[track_caller]
    pub fn anonymous_kib(&self) -> u64 {
        field(&fs::read_to_string(self.proc("status")).expect("the forwarder runs"), "RssAnon:")
    }

    /// Waits until no more than `kib` KiB of anonymous memory are resident.
    #[track_caller]
    pub fn wait_for_memory(&self, kib: u64, within: Duration) {
        let start = Instant::now();
        while self.anonymous_kib() > kib {
            assert!(
                start.elapsed() < within,
                "after {within:?} still {} KiB, not {kib}",
                self.anonymous_kib()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Processor time used so far, by all threads.
    #[track_caller]
    pub fn processor_time(&self) -> Duration {
        let stat = fs::read_to_string(self.proc("stat")).expect("the forwarder runs");
        // The name of the process stands in parentheses and may hold spaces.
        let (_, after_name) = stat.rsplit_once(')').expect("a name in /proc/PID/stat");
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        let ticks = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        // USER_HZ is 100 on every Linux that Rust runs on.
        Duration::from_millis(ticks * 10)
    }

    /// How often any thread went to sleep by itself, which is how often it was woken.
    #[track_caller]
    pub fn sleeps(&self) -> u64 {
        fs::read_dir(self.proc("task"))
            .expect("the forwarder runs")
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok())
            .map(|status| field(&status, "voluntary_ctxt_switches:"))
            .sum()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a process id"))
    }

    fn proc(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.child.id())
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let lines = self.log.lines();
            let tail = &lines[lines.len().saturating_sub(30)..];
            eprintln!("the end of the forwarder's log:\n{}", tail.join("\n"));
        }
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The lines of a forwarder's standard error, as they come.
#[derive(Clone, Default)]
pub struct Log(Arc<(Mutex<Lines>, Condvar)>);

impl Log {
    /// All lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.lock().lines.clone()
    }

    /// How many lines there are so far.
    pub fn len(&self) -> usize {
        self.lock().lines.len()
    }

    /// Waits for a line from number `from` on for which `wanted` holds, and gives it.
    #[track_caller]
    pub fn wait_for(&self, what: &str, from: usize, wanted: impl Fn(&str) -> bool) -> String {
        let mut found = None;
        eventually(what, WAIT, || {
            let state = self.lock();
            found = state.lines.iter().skip(from).find(|line| wanted(line)).cloned();
            found.is_some()
        });
        found.expect("the loop above ends with a line")
    }

    fn read(&self, stderr: ChildStderr, until: Until) -> ChildStderr {
        let mut reader = BufReader::new(stderr);
        let mut bytes = Vec::new();
        while matches!(reader.read_until(b'\n', &mut bytes), Ok(1..)) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            let done = until == Until::Ready && is_ready(&line);
            self.lock().lines.push(line);
            self.0.1.notify_all();
            if done {
                return reader.into_inner();
            }
        }
        self.lock().closed = true;
        self.0.1.notify_all();
        reader.into_inner()
    }

    fn wait_until_ready(&self) -> Result<(), String> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            if state.lines.iter().any(|line| is_ready(line)) {
                return Ok(());
            }
            if state.closed {
                return Err("ended before it was ready".to_owned());
            }
            let Some(left) = WAIT.checked_sub(start.elapsed()) else {
                return Err(format!("is not ready after {WAIT:?}"));
            };
            state = self.0.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The binary under test.
pub fn binary() -> OsString {
    env::var_os("TINYFWD_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_tinyfwd").into())
}

/// Runs the binary to its end and gives its exit code and all that it printed.
#[track_caller]
pub fn run<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>, within: Duration) -> Output {
    let mut command = Command::new(binary());
    command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null());
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let stdout = thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).map(|_| bytes)
    });
    let stderr = thread::spawn(move || {
        let mut bytes = Vec::new();
        stderr.read_to_end(&mut bytes).map(|_| bytes)
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("the child can be waited for") {
            break Some(status);
        }
        if start.elapsed() > within {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let (stdout, stderr) = (stdout.join().unwrap().unwrap(), stderr.join().unwrap().unwrap());
    let Some(status) = status else {
        panic!(
            "still running after {within:?}; it printed\n{}{}",
            String::from_utf8_lossy(&stdout),
            String::from_utf8_lossy(&stderr)
        );
    };
    Output { status, stdout, stderr }
}

#[derive(Default)]
struct Lines {
    lines: Vec<String>,
    closed: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Until {
    Ready,
    Closed,
}

#[track_caller]
fn spawn(mut command: Command) -> (Child, ChildStderr) {
    raise_own_descriptor_limit();
    command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the binary runs");
    let stderr = child.stderr.take().expect("its standard error is a pipe");
    (child, stderr)
}

/// Tests hold both ends of many connections in one process.
fn raise_own_descriptor_limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("the descriptor limit");
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("the soft limit can be raised");
    });
}

fn rule(listen: &str, target: SocketAddr, options: &str) -> Vec<String> {
    let mut arguments = Vec::new();
    // Lets the same tests run with what is on by default switched off.
    if let Ok(defaults) = env::var("TINYFWD_OPTIONS") {
        arguments.extend(["-o".to_owned(), defaults]);
    }
    arguments.extend(["-l".to_owned(), listen.to_owned(), "-t".into(), target.to_string()]);
    if !options.is_empty() {
        arguments.extend(["-o".to_owned(), options.to_owned()]);
    }
    arguments
}

fn is_ready(line: &str) -> bool {
    line == "ready" || line.ends_with(" ready")
}

#[track_caller]
fn field(status: &str, name: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in /proc/PID/status"))
}
