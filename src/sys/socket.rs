//! Sockets with the options that a forwarder wants, all non-blocking and close-on-exec.
//!
//! Accepted sockets inherit what is set on their listener (TCP_NODELAY, keepalive, buffer sizes), so
//! that a new client costs no system call for them. Out-of-band data is read in its place between the
//! other bytes (SO_OOBINLINE), which must be set before any comes: a read that crosses the mark
//! earlier drops the byte.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// Options of a TCP connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpOptions {
    /// Silence before the first keepalive probe; `None` sends none.
    pub keepalive: Option<Duration>,
    /// Kernel buffer per direction in bytes.
    pub sockbuf: Option<u32>,
}

/// A TCP listener. An IPv6 wildcard takes IPv4 too when `dual_stack` says so.
pub fn tcp_listener(
    addr: SocketAddr,
    dual_stack: bool,
    backlog: u32,
    options: &TcpOptions,
) -> io::Result<mio::net::TcpListener> {
    let socket = bindable(addr, Type::STREAM, Protocol::TCP, dual_stack)?;
    socket.set_reuse_address(true)?;
    set_buffers(&socket, options.sockbuf)?;
    set_tcp_options(&socket, options)?;
    socket.set_out_of_band_inline(true)?;
    socket.bind(&addr.into())?;
    socket.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(mio::net::TcpListener::from_std(socket.into()))
}

/// Starts to connect; the socket becomes writable when that has succeeded, and reports an error
/// when it has not. What matters only later is left to [`settle`].
pub fn tcp_connect(addr: SocketAddr, options: &TcpOptions) -> io::Result<mio::net::TcpStream> {
    let socket = outgoing(addr, Type::STREAM, Protocol::TCP)?;
    // Decides the window scale, so it must be set before.
    set_buffers(&socket, options.sockbuf)?;
    socket.set_out_of_band_inline(true)?;
    match socket.connect(&addr.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(mio::net::TcpStream::from_std(socket.into()))
}

/// Sets what a connection needs that lasts for more than one exchange: TCP_NODELAY, which the first
/// write goes without because there is nothing unacknowledged yet, and keepalive. Five system calls
/// that most short connections never need.
pub fn settle(socket: impl AsFd, options: &TcpOptions) {
    // Fails only for a socket that is gone; using it then says so.
    let _ = set_tcp_options(&SockRef::from(&socket), options);
}

/// Options of UDP sockets.
#[derive(Clone, Copy, Debug)]
pub struct UdpOptions {
    /// Kernel buffer per direction in bytes.
    pub sockbuf: Option<u32>,
    /// Whether the kernel may hand over a run of datagrams as one.
    pub gro: bool,
}

/// A UDP listener that tells which local address each datagram was sent to, if it is bound to a
/// wildcard.
pub fn udp_listener(
    addr: SocketAddr,
    dual_stack: bool,
    options: UdpOptions,
) -> io::Result<mio::net::UdpSocket> {
    let socket = bindable(addr, Type::DGRAM, Protocol::UDP, dual_stack)?;
    set_udp_options(&socket, addr.is_ipv6(), dual_stack, options)?;
    if options.sockbuf.is_none() {
        // A listener takes the bursts of all its clients. The kernel gives what its own limit
        // allows, and uses the memory only while something waits.
        let _ = socket.set_recv_buffer_size(LISTENER_BUFFER);
    }
    match addr.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => {
            setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
        }
        IpAddr::V6(ip) if ip.is_unspecified() => {
            setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
        }
        _ => {}
    }
    socket.bind(&addr.into())?;
    Ok(mio::net::UdpSocket::from_std(socket.into()))
}

/// A UDP socket that sends to `addr` and hears from nobody else.
pub fn udp_connected(addr: SocketAddr, options: UdpOptions) -> io::Result<mio::net::UdpSocket> {
    let socket = outgoing(addr, Type::DGRAM, Protocol::UDP)?;
    set_udp_options(&socket, addr.is_ipv6(), false, options)?;
    socket.connect(&addr.into())?;
    if is_connected_to_itself(&socket, addr) {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(mio::net::UdpSocket::from_std(socket.into()))
}

/// Whether the kernel can send what leaves a UDP socket as runs of datagrams (UDP_SEGMENT, since
/// Linux 4.18). Asking changes nothing: 0 is what the option is anyway.
pub fn can_send_runs(socket: &impl AsFd) -> bool {
    setsockopt(socket, sockopt::UdpGsoSegment, &0).is_ok()
}

/// Whether a socket that was connected to `addr` is its own peer. That happens on one machine when
/// nobody listens on a port that the kernel then picks for the socket: it would echo everything.
pub fn is_connected_to_itself(socket: impl AsFd, addr: SocketAddr) -> bool {
    // The kernel never picks one of the privileged ports.
    addr.port() >= 1024
        && SockRef::from(&socket)
            .local_addr()
            .is_ok_and(|local| local.as_socket().is_some_and(|local| same(local, addr)))
}

/// Makes the coming close of a TCP socket a reset instead of an end.
pub fn reset_on_close(socket: impl AsFd) {
    // Fails only for a socket whose peer is gone already; then there is nobody to tell.
    let _ = SockRef::from(&socket).set_linger(Some(Duration::ZERO));
}

/// Whether a connection's first waiting byte is there to be read, its stream left as it is.
pub fn has_bytes_waiting(socket: impl AsFd) -> bool {
    let mut byte = [std::mem::MaybeUninit::uninit()];
    SockRef::from(&socket).peek(&mut byte).is_ok_and(|count| count > 0)
}

/// An IPv6 address on the interface with this index.
pub fn scoped(ip: Ipv6Addr, interface: u32) -> SocketAddr {
    SocketAddrV6::new(ip, 0, 0, interface).into()
}

/// The index of an interface that is named or numbered; `None` when there is none.
pub fn interface_index(scope: &str) -> Option<u32> {
    nix::net::if_::if_nametoindex(scope).ok().or_else(|| scope.parse().ok())
}

fn same(one: SocketAddr, other: SocketAddr) -> bool {
    (one.ip(), one.port()) == (other.ip(), other.port())
}

fn bindable(
    addr: SocketAddr,
    kind: Type,
    protocol: Protocol,
    dual_stack: bool,
) -> io::Result<Socket> {
    let socket = outgoing(addr, kind, protocol)?;
    if addr.is_ipv6() {
        socket.set_only_v6(!dual_stack)?;
    }
    Ok(socket)
}

fn outgoing(addr: SocketAddr, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    // One call instead of three: the flags are part of the type.
    Socket::new_raw(Domain::for_address(addr), kind.nonblocking().cloexec(), Some(protocol))
}

fn set_tcp_options(socket: &Socket, options: &TcpOptions) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if let Some(idle) = options.keepalive {
        let interval = (idle / KEEPALIVE_PROBES).max(Duration::from_secs(1));
        socket.set_tcp_keepalive(
            &TcpKeepalive::new()
                .with_time(idle)
                .with_interval(interval)
                .with_retries(KEEPALIVE_PROBES),
        )?;
    }
    Ok(())
}

fn set_buffers(socket: &Socket, sockbuf: Option<u32>) -> io::Result<()> {
    let Some(bytes) = sockbuf else { return Ok(()) };
    socket.set_send_buffer_size(bytes as usize)?;
    socket.set_recv_buffer_size(bytes as usize)
}

/// What a datagram tells besides its bytes: its ECN bits, whether it is a run, and how many were
/// lost. Each is left out where the kernel has no such option; relaying does without.
fn set_udp_options(
    socket: &Socket,
    ipv6: bool,
    dual_stack: bool,
    options: UdpOptions,
) -> io::Result<()> {
    set_buffers(socket, options.sockbuf)?;
    if options.gro {
        let _ = setsockopt(socket, sockopt::UdpGroSegment, &true);
    }
    if ipv6 {
        let _ = socket.set_recv_tclass_v6(true);
    }
    if !ipv6 || dual_stack {
        let _ = socket.set_recv_tos_v4(true);
    }
    let _ = setsockopt(socket, sockopt::RxqOvfl, &1);
    Ok(())
}

/// Probes that go unanswered before a peer counts as gone, a quarter of the keepalive time apart:
/// twice the keepalive time after its last sign of life.
const KEEPALIVE_PROBES: u32 = 4;

/// Receive buffer of a UDP listener, where the system's limit allows it.
const LISTENER_BUFFER: usize = 4 << 20;
