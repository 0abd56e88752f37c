//! What all tests share: the forwarder as a child process, both kinds of peers around it, and
//! bytes whose place in the stream can be told from their value.
//!
//! Nothing here waits without a deadline, and nothing that it starts outlives its owner, also when
//! a test panics.

mod forwarder;
mod names;
mod network;
mod pattern;
mod tcp;
mod udp;

pub use forwarder::{Forwarder, binary, run};
pub use names::{Answers, Resolver};
pub use network::{in_own_network, ip};
pub use pattern::{Pattern, Random};
pub use tcp::{
    BlackHole, Echo, Refusing, accept, both_ways, connect, end, expect_broken, expect_end,
    expect_refusal, expect_reset, listen, listen_on, pair, push_until_stopped, receive,
    receive_to_end, reset, send, try_connect,
};
pub use udp::{UdpEcho, bind, client_of, expect_datagram, expect_silence};

use std::env;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for what must happen. Reached only when it does not happen.
pub const WAIT: Duration = Duration::from_secs(20);

/// Polls until `condition` holds, and fails when it does not hold `within` that time.
#[track_caller]
pub fn eventually(what: &str, within: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < within, "not within {within:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Whether the machine can do what a test needs. If not, says what is skipped; in CI that fails.
#[track_caller]
pub fn available(present: bool, what: &str) -> bool {
    if !present {
        assert!(env::var("CI").as_deref() != Ok("true"), "cannot be skipped in CI: needs {what}");
        eprintln!("skipped: needs {what}");
    }
    present
}

/// Whether IPv6 works on the loopback interface.
#[track_caller]
pub fn ipv6_available() -> bool {
    available(std::net::UdpSocket::bind("[::1]:0").is_ok(), "IPv6 on the loopback interface")
}

/// A loopback address that no other test uses, so that any of its ports is free.
pub fn own_loopback() -> IpAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // 127.64.0.0/10, away from the addresses that system services like to sit on. The process id
    // keeps two runs on one machine apart.
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    // Neither .0 nor .255 at the end, which some tools take for a network or a broadcast address.
    let network = (process::id().wrapping_mul(2) + n / 254) % (64 * 256);
    let (b, c, d) = (64 + network / 256, network % 256, 1 + n % 254);
    IpAddr::V4(Ipv4Addr::from(u32::from_be_bytes([127, b as u8, c as u8, d as u8])))
}

/// The loopback address of IPv4 with a port.
pub fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}
