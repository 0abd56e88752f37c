//! Opening the listeners of a rule, with errors that say what failed where and what to try.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::route::{largest_segment, udp_options};
use super::{Listener, Socket};
use crate::resolve;
use crate::rule::{Host, ListenHost, Rule};
use crate::sys::socket::{self, TcpOptions};

/// Opens every listener of `rule`, whose index is `route`. Looks a listener's name up, so this may
/// take a while.
pub(super) fn open(rule: &Rule, route: u32) -> io::Result<Vec<Listener>> {
    let places = places(&rule.listen().host)?;
    let mut listeners = Vec::new();
    for (port, offset) in rule.listen().ports.iter().zip(0..) {
        let mut tries = if port == 0 { FREE_PORT_TRIES } else { 1 };
        loop {
            tries -= 1;
            match open_port(rule, &places, port) {
                Ok(opened) => {
                    let listener = |(socket, name, port)| Listener {
                        socket,
                        name,
                        route,
                        offset,
                        port,
                        queued: false,
                    };
                    listeners.extend(opened.into_iter().map(listener));
                    break;
                }
                // The port that was free for one protocol is taken for the other.
                Err(error) if error.kind() == ErrorKind::AddrInUse && tries > 0 => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(listeners)
}

/// A listening address and whether it is to take both families.
#[derive(Clone, Copy)]
struct Place {
    addr: SocketAddr,
    dual_stack: bool,
}

fn places(host: &ListenHost) -> io::Result<Vec<Place>> {
    let single = |addr| Place { addr, dual_stack: false };
    Ok(match host {
        ListenHost::Any => {
            vec![Place { addr: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), dual_stack: true }]
        }
        ListenHost::Host(Host::Ip(ip)) => vec![single(SocketAddr::new(*ip, 0))],
        ListenHost::Host(Host::Scoped(ip, scope)) => {
            let index = socket::interface_index(scope).ok_or_else(|| {
                let text = format!("listen on [{ip}%{scope}]: there is no interface '{scope}'");
                io::Error::new(ErrorKind::NotFound, text)
            })?;
            vec![single(socket::scoped(*ip, index))]
        }
        ListenHost::Host(Host::Name(name)) => {
            let addrs = resolve::look_up(name).map_err(|error| {
                let text = format!("look up '{name}' to listen on it: {error}");
                io::Error::new(error.kind(), text)
            })?;
            addrs.into_iter().map(single).collect()
        }
    })
}

/// A listener's socket, its name and its port.
type Opened = (Socket, Box<str>, u16);

/// Opens one port on every place for every protocol of the rule; port 0 becomes the same free port
/// for all of them. Of several addresses of one name, those that the machine does not have are
/// passed over.
fn open_port(rule: &Rule, places: &[Place], mut port: u16) -> io::Result<Vec<Opened>> {
    let mut opened = Vec::new();
    let mut missing = None;
    for place in places {
        match open_place(rule, *place, port) {
            Ok(sockets) => {
                opened.extend(sockets);
                port = opened.last().map_or(port, |(.., port)| *port);
            }
            Err(error) if places.len() > 1 && is_absent(&error) => missing = Some(error),
            Err(error) => return Err(error),
        }
    }
    match missing {
        Some(error) if opened.is_empty() => Err(error),
        _ => Ok(opened),
    }
}

fn open_place(rule: &Rule, place: Place, mut port: u16) -> io::Result<Vec<Opened>> {
    let limits = rule.limits();
    let mut opened = Vec::new();
    if rule.listen().protocols.tcp() {
        let options = TcpOptions { keepalive: limits.keepalive, sockbuf: limits.sockbuf };
        let socket = bind(place, port, "tcp", |addr, dual| {
            socket::tcp_listener(addr, dual, limits.backlog, &options)
        })?;
        port = socket.local_addr()?.port();
        opened.push((Socket::Tcp(socket), name(rule, place, port, "tcp"), port));
    }
    if rule.listen().protocols.udp() {
        let options = udp_options(limits);
        let socket =
            bind(place, port, "udp", |addr, dual| socket::udp_listener(addr, dual, options))?;
        port = socket.local_addr()?.port();
        let largest_segment = largest_segment(limits, &socket);
        let socket = Socket::Udp { socket, largest_segment, overflows: 0 };
        opened.push((socket, name(rule, place, port, "udp"), port));
    }
    Ok(opened)
}

/// Whether the machine does not have the address, or not its family.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::AddrNotAvailable | ErrorKind::Unsupported)
}

fn bind<S>(
    place: Place,
    port: u16,
    protocol: &str,
    open: impl Fn(SocketAddr, bool) -> io::Result<S>,
) -> io::Result<S> {
    let mut addr = place.addr;
    addr.set_port(port);
    let opened = match open(addr, place.dual_stack) {
        Err(error) if place.dual_stack && no_ipv6(&error) => {
            addr = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            open(addr, false)
        }
        opened => opened,
    };
    opened.map_err(|error| {
        let shown = if place.dual_stack { format!(":{port}") } else { addr.to_string() };
        let text = format!("bind {shown}/{protocol}: {error}{}", advice(&error, addr.ip()));
        let no_family = error.raw_os_error() == Some(libc::EAFNOSUPPORT);
        io::Error::new(if no_family { ErrorKind::Unsupported } else { error.kind() }, text)
    })
}

fn no_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

/// What to try, as the end of a message.
fn advice(error: &io::Error, ip: IpAddr) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EADDRINUSE) => {
            "; another program or rule has it (ss -lntup shows which): choose another port"
        }
        Some(libc::EACCES) => {
            "; ports below 1024 need root or CAP_NET_BIND_SERVICE: choose a higher one or grant it"
        }
        Some(libc::EADDRNOTAVAIL) if ip.is_ipv6() => {
            "; this machine does not have the address (ip -6 addr shows those that it has)"
        }
        Some(libc::EADDRNOTAVAIL) => {
            "; this machine does not have the address (ip addr shows those that it has)"
        }
        Some(libc::EAFNOSUPPORT) => "; this machine has no IPv6",
        Some(libc::EMFILE) => {
            "; raise the limit on open files (ulimit -Hn) or listen on fewer ports"
        }
        _ => "",
    }
}

/// `127.0.0.1:32771/tcp -> host:80`, with the port that it really has.
fn name(rule: &Rule, place: Place, port: u16, protocol: &str) -> Box<str> {
    let mut addr = place.addr;
    addr.set_port(port);
    let listen = if place.dual_stack { format!(":{port}") } else { addr.to_string() };
    let offset = port.wrapping_sub(rule.listen().ports.first());
    let targets = rule
        .targets()
        .iter()
        .map(|target| format!("{}:{}", target.host, target.port(offset, port)))
        .collect::<Vec<_>>()
        .join(",");
    format!("{listen}/{protocol} -> {targets}").into()
}

/// How often a port is picked that turns out to be taken for the other protocol.
const FREE_PORT_TRIES: u32 = 32;
