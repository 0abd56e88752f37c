//! UDP peers: sockets with time limits, and a target that answers.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::SockRef;

use super::{Forwarder, WAIT, local};

/// A socket on this address that waits for a datagram no longer than [`WAIT`].
///
/// Its buffer is as large as the kernel allows, up to 1 MiB: a test that reads late is not to take
/// its own loss for the forwarder's.
#[track_caller]
pub fn bind(address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap_or_else(|e| panic!("bind {address}: {e}"));
    socket.set_read_timeout(Some(WAIT)).unwrap();
    SockRef::from(&socket).set_recv_buffer_size(1 << 20).unwrap();
    socket
}

/// A client that takes datagrams only from the address that it writes to.
#[track_caller]
pub fn client_of(forwarder: &Forwarder) -> UdpSocket {
    let client = bind(local(0));
    client.connect(forwarder.address()).unwrap();
    client
}

/// The next datagram is this one, whole; gives who sent it.
#[track_caller]
pub fn expect_datagram(socket: &UdpSocket, expected: &[u8]) -> SocketAddr {
    let mut buffer = vec![0; 65_536];
    match socket.recv_from(&mut buffer) {
        Ok((n, from)) => {
            let found = &buffer[..n];
            assert!(
                found == expected,
                "got {n} bytes {:02x?}..., expected {} bytes {:02x?}...",
                &found[..n.min(16)],
                expected.len(),
                &expected[..expected.len().min(16)]
            );
            from
        }
        Err(e) => panic!("no datagram where {} bytes were expected: {e}", expected.len()),
    }
}

/// No datagram comes for that long.
#[track_caller]
pub fn expect_silence(socket: &UdpSocket, length: Duration) {
    let limit = socket.read_timeout().unwrap();
    socket.set_read_timeout(Some(length)).unwrap();
    if let Ok((n, from)) = socket.recv_from(&mut [0; 65_536]) {
        panic!("{n} bytes from {from} where silence was expected");
    }
    socket.set_read_timeout(limit).unwrap();
}

/// A target that sends back every datagram.
pub struct UdpEcho {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl UdpEcho {
    /// On 127.0.0.1.
    #[track_caller]
    pub fn start() -> UdpEcho {
        UdpEcho::on(bind(local(0)), b"")
    }

    /// On a socket that exists; `mark` goes before what is sent back.
    #[track_caller]
    pub fn on(socket: UdpSocket, mark: &'static [u8]) -> UdpEcho {
        let address = socket.local_addr().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut buffer = vec![0; mark.len() + 65_536];
                buffer[..mark.len()].copy_from_slice(mark);
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((n, from)) = socket.recv_from(&mut buffer[mark.len()..]) {
                        let _ = socket.send_to(&buffer[..mark.len() + n], from);
                    }
                }
            }
        });
        UdpEcho { address, stop, thread: Some(thread) }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for UdpEcho {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
