//! A name server of the test's own, and a forwarder that asks it and nobody else.
//!
//! The forwarder gets a private `/etc/resolv.conf` by a mount that only it sees, which needs root.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Forwarder, available, binary, own_loopback};

/// How a [`Resolver`] treats questions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answers {
    /// From its table.
    Given,
    /// Not at all.
    None,
    /// With a failure (SERVFAIL).
    Failure,
}

/// A name server on a loopback address of its own.
pub struct Resolver {
    configuration: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Resolver {
    /// Starts it with an empty table; `None` (and a line about it) where the machine does not
    /// allow a private mount. `patience_seconds` is how long the forwarder's lookups wait for it.
    #[track_caller]
    pub fn start(patience_seconds: u32) -> Option<Resolver> {
        let private_mount = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "true"])
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !available(private_mount, "root, for a private mount") {
            return None;
        }
        let address = own_loopback();
        let socket = UdpSocket::bind((address, 53)).expect("port 53 of an own loopback address");
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let configuration =
            std::env::temp_dir().join(format!("tinyfwd-{}-{address}.conf", process::id()));
        fs::write(
            &configuration,
            format!("nameserver {address}\noptions timeout:{patience_seconds} attempts:1\n"),
        )
        .expect("a file in the temporary directory");
        let shared = Arc::new(Shared {
            table: Mutex::new(HashMap::new()),
            answers: Mutex::new(Answers::Given),
            questions: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let thread = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.serve(&socket)
        });
        Some(Resolver { configuration, shared, thread: Some(thread) })
    }

    /// From now on, `name` has these addresses.
    pub fn set(&self, name: &str, addresses: &[IpAddr]) {
        let mut table = self.shared.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.insert(name.to_owned(), addresses.to_vec());
    }

    /// From now on, questions are treated so.
    pub fn answer(&self, answers: Answers) {
        *self.shared.answers.lock().unwrap_or_else(PoisonError::into_inner) = answers;
    }

    /// How many questions have come so far, answered or not.
    pub fn questions(&self) -> usize {
        self.shared.questions.load(Ordering::Relaxed)
    }

    /// Starts a forwarder that asks this server.
    #[track_caller]
    pub fn forwarder(&self, arguments: &[String]) -> Forwarder {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "sh", "-c"])
            .arg("mount --bind \"$1\" /etc/resolv.conf && shift && exec \"$@\"")
            .arg("sh")
            .arg(&self.configuration)
            .arg(binary())
            .args(arguments);
        Forwarder::run(command)
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.configuration);
    }
}

struct Shared {
    table: Mutex<HashMap<String, Vec<IpAddr>>>,
    answers: Mutex<Answers>,
    questions: AtomicUsize,
    stop: AtomicBool,
}

impl Shared {
    fn serve(&self, socket: &UdpSocket) {
        let mut buffer = [0; 1500];
        while !self.stop.load(Ordering::Relaxed) {
            let Ok((n, from)) = socket.recv_from(&mut buffer) else { continue };
            self.questions.fetch_add(1, Ordering::Relaxed);
            if let Some(answer) = self.reply(&buffer[..n]) {
                let _ = socket.send_to(&answer, from);
            }
        }
    }

    /// The answer to one question, by RFC 1035.
    fn reply(&self, message: &[u8]) -> Option<Vec<u8>> {
        let answers = *self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers == Answers::None {
            return None;
        }
        let mut name = Vec::new();
        let mut at = 12;
        loop {
            let length = usize::from(*message.get(at)?);
            at += 1;
            if length == 0 {
                break;
            }
            name.push(String::from_utf8(message.get(at..at + length)?.to_vec()).ok()?);
            at += length;
        }
        let name = name.join(".").to_lowercase();
        let kind = u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]);
        let question = message.get(12..at + 4)?;
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let (code, records) = match (answers, table.get(&name)) {
            (Answers::Failure, _) => (SERVER_FAILURE, Vec::new()),
            (_, None) => (NO_SUCH_NAME, Vec::new()),
            (_, Some(addresses)) => (NO_ERROR, records(kind, addresses)),
        };
        let count = u8::try_from(records.len()).ok()?;
        let mut answer = message.get(..2)?.to_vec();
        // A response, recursion desired and available; one question, no further sections.
        answer.extend([0x81, 0x80 | code, 0, 1, 0, count, 0, 0, 0, 0]);
        answer.extend(question);
        for record in records {
            // The name is the one in the question, at offset 12.
            answer.extend([0xc0, 12]);
            answer.extend(kind.to_be_bytes());
            answer.extend([0, 1, 0, 0, 0, 1, 0, u8::try_from(record.len()).ok()?]);
            answer.extend(record);
        }
        Some(answer)
    }
}

const NO_ERROR: u8 = 0;
const SERVER_FAILURE: u8 = 2;
const NO_SUCH_NAME: u8 = 3;
const A: u16 = 1;
const AAAA: u16 = 28;

/// The addresses of the family that was asked for.
fn records(kind: u16, addresses: &[IpAddr]) -> Vec<Vec<u8>> {
    addresses
        .iter()
        .filter_map(|address| match address {
            IpAddr::V4(ip) if kind == A => Some(ip.octets().to_vec()),
            IpAddr::V6(ip) if kind == AAAA => Some(ip.octets().to_vec()),
            _ => None,
        })
        .collect()
}
