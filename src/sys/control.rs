//! Socket addresses and control data as Linux lays them out in memory, read and written as bytes.
//!
//! Plain safe code: what comes from the kernel is never indexed without a check, and what is unknown
//! or cut short is passed over.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The local address of a datagram, with the interface where an IPv6 link-local address needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// The address that the datagram was sent to, or is to be sent from.
    pub ip: IpAddr,
    /// Interface index; 0 leaves the choice to the routing.
    pub interface: u32,
}

/// What the control data of a received datagram says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// The address that it was sent to, where the socket was asked to tell.
    pub local: Option<Local>,
    /// Set when the kernel has put a run of datagrams together: the size of each but the last, which
    /// may be shorter.
    pub segment: Option<u16>,
    /// The IPv4 type of service or IPv6 traffic class: DSCP in the upper six bits, ECN in the lower
    /// two (RFC 2474, RFC 3168).
    pub traffic_class: u8,
    /// How many datagrams this socket has lost so far because its receive buffer was full; told only
    /// once there are some.
    pub overflows: u32,
}

/// What the control data of a datagram that is sent asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// The address that it leaves from; `None` leaves the choice to the kernel.
    pub from: Option<Local>,
    /// Send it as a run of datagrams of this size, the last of which may be shorter.
    pub segment: Option<u16>,
    /// The traffic class to send it with; 0 leaves it to the socket.
    pub traffic_class: u8,
    /// It goes to an IPv4 address, also one that is written as an IPv6 one.
    pub ipv4: bool,
}

impl Ask {
    /// Whether nothing is asked for that needs control data.
    pub fn is_plain(&self) -> bool {
        self.from.is_none() && self.segment.is_none() && self.traffic_class == 0
    }
}

/// Reads the control data of one received datagram.
pub fn decode_control(data: &[u8]) -> Control {
    let mut control = Control::default();
    let mut rest = data;
    while let Some((len, level, kind)) = decode_header(rest) {
        let Some(body) = rest.get(HEADER..len) else { break };
        match (level, kind, body.len()) {
            // struct in_pktinfo: interface, local address, destination as it stands in the packet
            (libc::IPPROTO_IP, libc::IP_PKTINFO, 12..) => {
                let ip = Ipv4Addr::from(array(body, 4));
                control.local = Some(Local { ip: ip.into(), interface: 0 });
            }
            // struct in6_pktinfo: destination, interface
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, 20..) => {
                let ip = Ipv6Addr::from(array(body, 0));
                // Only a link-local address means nothing without its interface; with any other
                // the answer may leave by another way than the question came.
                let scoped = ip.is_unicast_link_local();
                let interface = if scoped { u32::from_ne_bytes(array(body, 16)) } else { 0 };
                control.local = (!is_group(ip)).then_some(Local { ip: ip.into(), interface });
            }
            (libc::SOL_UDP, libc::UDP_GRO, 4..) => {
                let size = i32::from_ne_bytes(array(body, 0));
                control.segment = u16::try_from(size).ok().filter(|size| *size > 0);
            }
            (libc::IPPROTO_IP, libc::IP_TOS, 1..) => control.traffic_class = body[0],
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 4..) => {
                control.traffic_class = i32::from_ne_bytes(array(body, 0)) as u8;
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 4..) => {
                control.overflows = u32::from_ne_bytes(array(body, 0));
            }
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(WORD)..).unwrap_or_default();
    }
    control
}

/// Writes the control data for a datagram that is to be sent; returns its length.
pub fn encode_control(ask: &Ask, into: &mut [u8; CONTROL_LEN]) -> usize {
    let mut len = 0;
    match ask.from.map(|from| (from.ip, from.interface)) {
        Some((IpAddr::V4(ip), _)) => {
            let mut info = [0; 12];
            info[4..8].copy_from_slice(&ip.octets());
            put(into, &mut len, libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
        }
        Some((IpAddr::V6(ip), interface)) => {
            let mut info = [0; 20];
            info[..16].copy_from_slice(&ip.octets());
            info[16..].copy_from_slice(&interface.to_ne_bytes());
            put(into, &mut len, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
        }
        None => {}
    }
    if let Some(size) = ask.segment {
        put(into, &mut len, libc::SOL_UDP, libc::UDP_SEGMENT, &size.to_ne_bytes());
    }
    if ask.traffic_class > 0 {
        let class = i32::from(ask.traffic_class).to_ne_bytes();
        if ask.ipv4 {
            put(into, &mut len, libc::IPPROTO_IP, libc::IP_TOS, &class);
        } else {
            put(into, &mut len, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &class);
        }
    }
    len
}

/// Reads a socket address; `None` when it is not one of IPv4 or IPv6.
pub fn decode_name(name: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(*name.first_chunk()?);
    let port = u16::from_be_bytes(array(name, 2));
    match (i32::from(family), name.len()) {
        (libc::AF_INET, 16..) => Some((Ipv4Addr::from(array(name, 4)), port).into()),
        (libc::AF_INET6, 28..) => {
            let (ip, scope) = (Ipv6Addr::from(array(name, 8)), u32::from_ne_bytes(array(name, 24)));
            Some(SocketAddrV6::new(ip, port, 0, scope).into())
        }
        _ => None,
    }
}

/// Writes a socket address; returns its length, 0 for none.
pub fn encode_name(to: Option<SocketAddr>, into: &mut [u8; NAME_LEN]) -> usize {
    let Some(to) = to else { return 0 };
    into.fill(0);
    into[2..4].copy_from_slice(&to.port().to_be_bytes());
    let (family, len) = match to {
        SocketAddr::V4(to) => {
            into[4..8].copy_from_slice(&to.ip().octets());
            (libc::AF_INET, 16)
        }
        SocketAddr::V6(to) => {
            into[8..24].copy_from_slice(&to.ip().octets());
            into[24..28].copy_from_slice(&to.scope_id().to_ne_bytes());
            (libc::AF_INET6, 28)
        }
    };
    into[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    len
}

/// Writes one control message behind the others.
fn put(into: &mut [u8; CONTROL_LEN], len: &mut usize, level: i32, kind: i32, body: &[u8]) {
    let message = &mut into[*len..];
    let total = HEADER + body.len();
    message[..WORD].copy_from_slice(&total.to_ne_bytes());
    message[HEADER - 8..][..4].copy_from_slice(&level.to_ne_bytes());
    message[HEADER - 4..][..4].copy_from_slice(&kind.to_ne_bytes());
    message[HEADER..total].copy_from_slice(body);
    *len += total.next_multiple_of(WORD);
}

/// Whether an address is that of a group, which no answer can leave from. (IPv4's packet info has
/// the local address beside the group's.)
fn is_group(ip: Ipv6Addr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_multicast(),
    }
}

/// Length, level and type of a `struct cmsghdr` that is there whole.
fn decode_header(data: &[u8]) -> Option<(usize, i32, i32)> {
    let header = data.get(..HEADER)?;
    let len = usize::from_ne_bytes(array(header, 0));
    let level = i32::from_ne_bytes(array(header, HEADER - 8));
    let kind = i32::from_ne_bytes(array(header, HEADER - 4));
    (len >= HEADER).then_some((len, level, kind))
}

/// The `N` bytes at `at`, zeros where there are none.
fn array<const N: usize>(data: &[u8], at: usize) -> [u8; N] {
    data.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// Room for a socket address: `struct sockaddr_in6` has 28 bytes.
pub const NAME_LEN: usize = 32;

/// Room for the control data of a datagram: packet info takes 40 bytes with its header, segment
/// size, traffic class and overflows 24 each.
pub const CONTROL_LEN: usize = 112;

/// `struct cmsghdr`: a length of word size, level and type of four bytes each.
const HEADER: usize = WORD + 8;

/// Control messages start at multiples of this.
const WORD: usize = size_of::<usize>();

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn control_round_trip(ip: &str, interface: u32) {
        let local = Local { ip: ip.parse().unwrap(), interface };
        let mut data = [0xff; CONTROL_LEN];
        let ask = Ask { from: Some(local), ..Ask::default() };
        let len = encode_control(&ask, &mut data);
        assert_eq!(decode_control(&data[..len]).local, Some(local));
        // Every cut of it is passed over.
        for cut in 0..HEADER + 12 {
            assert_eq!(decode_control(&data[..cut]).local, None, "cut at {cut}");
        }
    }

    #[test]
    fn a_local_address_survives_encoding() {
        control_round_trip("127.0.0.2", 0);
        control_round_trip("2001:db8::7", 0);
        control_round_trip("::ffff:127.0.0.2", 0);
        control_round_trip("fe80::1", 3);
    }

    #[test]
    fn only_a_link_local_address_keeps_its_interface() {
        let mut data = [0; CONTROL_LEN];
        let from = Local { ip: "2001:db8::7".parse().unwrap(), interface: 3 };
        let len = encode_control(&Ask { from: Some(from), ..Ask::default() }, &mut data);
        assert_eq!(decode_control(&data[..len]).local, Some(Local { interface: 0, ..from }));
    }

    #[test]
    fn a_traffic_class_goes_out_as_what_the_other_family_reads() {
        for ipv4 in [true, false] {
            let mut data = [0; CONTROL_LEN];
            let local = Local { ip: "2001:db8::7".parse().unwrap(), interface: 0 };
            let ask = Ask { from: Some(local), segment: Some(1200), traffic_class: 0xb9, ipv4 };
            let len = encode_control(&ask, &mut data);
            let control = decode_control(&data[..len]);
            assert_eq!((control.local, control.traffic_class), (Some(local), 0xb9));
        }
    }

    #[test]
    fn the_size_of_a_run_and_the_overflows_are_read() {
        let mut data = [0; CONTROL_LEN];
        let mut len = 0;
        put(&mut data, &mut len, libc::SOL_UDP, libc::UDP_GRO, &1200i32.to_ne_bytes());
        put(&mut data, &mut len, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, &7u32.to_ne_bytes());
        let control = decode_control(&data[..len]);
        assert_eq!((control.segment, control.overflows), (Some(1200), 7));
        for (nonsense, len) in [(0i32, 24), (-1, 24), (70_000, 24)] {
            put(&mut data, &mut 0, libc::SOL_UDP, libc::UDP_GRO, &nonsense.to_ne_bytes());
            assert_eq!(decode_control(&data[..len]).segment, None);
        }
    }

    #[test]
    fn a_socket_address_survives_encoding() {
        for addr in ["1.2.3.4:80", "[2001:db8::7]:65535", "[fe80::1%4]:1"] {
            let addr: SocketAddr = addr.parse().unwrap();
            let mut data = [0xff; NAME_LEN];
            let len = encode_name(Some(addr), &mut data);
            assert_eq!(decode_name(&data[..len]), Some(addr));
            assert_eq!(decode_name(&data[..len - 1]), None);
        }
    }

    #[test]
    fn an_answer_does_not_leave_from_the_address_of_a_group() {
        for ip in ["ff02::1", "::ffff:224.0.0.1", "::ffff:255.255.255.255"] {
            let mut data = [0; CONTROL_LEN];
            let from = Some(Local { ip: ip.parse().unwrap(), interface: 0 });
            let len = encode_control(&Ask { from, ..Ask::default() }, &mut data);
            assert_eq!(decode_control(&data[..len]).local, None, "{ip}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(data in prop::collection::vec(any::<u8>(), 0..120)) {
            decode_control(&data);
            decode_name(&data);
        }
    }
}
