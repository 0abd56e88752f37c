//! Batches of datagrams: many per system call, through nix's safe calls.
//!
//! Headers are made anew for each batch where control data is wanted: reused ones keep the lengths
//! of what came before.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg,
    sendmmsg, sendmsg, setsockopt, sockopt,
};

/// Slots to receive into; only the pages that datagrams touch become resident.
pub struct Arena {
    slots: Vec<Vec<u8>>,
}

/// What one slot got.
pub struct Received {
    pub slot: usize,
    pub length: usize,
    pub from: Option<SockaddrStorage>,
    /// With GRO, the size of the datagrams that were joined here.
    pub segment: Option<usize>,
}

impl Arena {
    pub fn new(slots: usize, slot_size: usize) -> Self {
        Self { slots: vec![vec![0; slot_size]; slots] }
    }

    pub fn bytes(&self, received: &Received) -> &[u8] {
        &self.slots[received.slot][..received.length]
    }

    /// Receives what is there without waiting, as many as there are slots. Fewer than that
    /// means that the socket is drained.
    pub fn receive(&mut self, socket: &UdpSocket, into: &mut Vec<Received>) -> io::Result<()> {
        into.clear();
        let count = self.slots.len();
        let mut slices: Vec<_> =
            self.slots.iter_mut().map(|slot| [IoSliceMut::new(slot)]).collect();
        let mut headers =
            MultiHeaders::<SockaddrStorage>::preallocate(count, Some(cmsg_space!(i32)));
        let flags = MsgFlags::MSG_DONTWAIT;
        let results =
            match recvmmsg(socket.as_raw_fd(), &mut headers, slices.iter_mut(), flags, None) {
                Ok(results) => results,
                Err(Errno::EAGAIN | Errno::EINTR) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
        for (slot, message) in results.enumerate() {
            let segment = message.cmsgs().ok().and_then(|mut control| {
                control.find_map(|one| match one {
                    ControlMessageOwned::UdpGroSegments(size) => usize::try_from(size).ok(),
                    _ => None,
                })
            });
            into.push(Received { slot, length: message.bytes, from: message.address, segment });
        }
        Ok(())
    }
}

/// Sends datagrams in order, to `to` or (`None`) to the peer of a connected socket. Waits while
/// the socket is full. How many the kernel took: all but those that it refused.
pub fn send(
    socket: &UdpSocket,
    headers: &mut MultiHeaders<SockaddrStorage>,
    datagrams: &[[IoSlice<'_>; 1]],
    to: &[Option<SockaddrStorage>],
) -> io::Result<usize> {
    let (mut at, mut taken) = (0, 0);
    while at < datagrams.len() {
        let left = datagrams[at..].iter();
        let flags = MsgFlags::MSG_DONTWAIT;
        match sendmmsg(socket.as_raw_fd(), headers, left, &to[at..], [], flags) {
            Ok(results) => {
                let count = results.count();
                at += count;
                taken += count;
            }
            Err(Errno::EAGAIN) => wait_writable(socket)?,
            Err(Errno::EINTR) => {}
            // The datagram at the head is refused, or an earlier one was (ICMP); go on after it.
            Err(Errno::ECONNREFUSED | Errno::EMSGSIZE | Errno::EPERM) => at += 1,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(taken)
}

/// Sends `bytes` to the connected peer as datagrams of `segment` bytes by one call.
pub fn send_run(socket: &UdpSocket, bytes: &[u8], segment: u16) -> io::Result<()> {
    let control = [ControlMessage::UdpGsoSegments(&segment)];
    let slices = [IoSlice::new(bytes)];
    loop {
        let flags = MsgFlags::MSG_DONTWAIT;
        match sendmsg::<()>(socket.as_raw_fd(), &slices, &control, flags, None) {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN) => wait_writable(socket)?,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A bound server socket with room for bursts.
pub fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)
        .map_err(|error| io::Error::other(format!("bind {address}/udp: {error}")))?;
    with_room(socket)
}

/// A client socket with room for bursts, connected to `to`.
pub fn connect(to: SocketAddr) -> io::Result<UdpSocket> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    with_room(socket)
}

fn with_room(socket: UdpSocket) -> io::Result<UdpSocket> {
    socket.set_nonblocking(true)?;
    // Past net.core.rmem_max only for root; otherwise as much as that allows.
    if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER)?;
    }
    Ok(socket)
}

fn wait_writable(socket: &UdpSocket) -> io::Result<()> {
    let mut wanted = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
    match poll(&mut wanted, PollTimeout::from(100u16)) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The largest payload of a datagram over IPv4 (RFC 768: 65,535 less 20 and 8 bytes of headers).
pub const LARGEST: usize = 65_507;
const RECEIVE_BUFFER: usize = 8 << 20;
