//! Reads the addresses of listeners and targets, as the command line and files write them.
//!
//! One word in, one [`Listen`] or [`Target`] out, or the reason why not, with what to write instead.
//! Splitting a list at its commas is the caller's, and so is the place of the word. Names are
//! checked for their form only; looking them up is left to [`crate::resolve`].
//!
//! What is accepted means one thing: a word that could be read in two ways is refused.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::rule::{Host, Listen, ListenHost, Ports, Protocols, Target};

/// Reads where to listen: `[HOST]:PORT[-PORT][/tcp|/udp]`.
pub fn listen(word: &str) -> Result<Listen, String> {
    refuse_unix(word)?;
    let (address, protocols) = match word.rsplit_once('/') {
        None => (word, Protocols::Both),
        Some((address, "tcp")) => (address, Protocols::Tcp),
        Some((address, "udp")) => (address, Protocols::Udp),
        Some((_, other)) => {
            return Err(format!(
                "'/{other}' is no protocol; end with /tcp or /udp, or with neither for both"
            ));
        }
    };
    let (host, port) = match split(address)? {
        Split { host: Some(host), port: Some(port) } => (host, port),
        Split { host: None, port: Some(port) } => (Written::Every, port),
        Split { host: Some(Written::Plain(text)), port: None } if starts_like_port(text) => {
            return Err(format!("the host is missing; write :{text} to listen on every address"));
        }
        Split { host: Some(_), port: None } => {
            return Err(format!("the port is missing; write {address}:PORT"));
        }
        Split { host: None, port: None } => {
            return Err("a listener is HOST:PORT, or :PORT for every address".to_owned());
        }
    };
    let host = match host {
        Written::Every => ListenHost::Any,
        Written::Bracketed(text) => ListenHost::Host(bracketed(text)?),
        Written::Plain(text) => ListenHost::Host(plain(text)?),
    };
    Ok(Listen { host, ports: ports(port)?, protocols })
}

/// Reads where to send: `HOST[:PORT[-PORT]]`; without a port, the listener's own.
pub fn target(word: &str) -> Result<Target, String> {
    refuse_unix(word)?;
    if word.contains("://") {
        return Err("a target is HOST:PORT, not a URL".to_owned());
    }
    if word.ends_with("/tcp") || word.ends_with("/udp") {
        return Err(
            "the protocol belongs to the listener (-l :80/udp), a target has none".to_owned()
        );
    }
    if let Some(bare) = bare_ipv6(word)? {
        return Ok(Target { host: bare, ports: None });
    }
    let (host, port) = match split(word)? {
        Split { host: Some(Written::Every), .. } => {
            return Err("a target is one host; '*' is for listeners".to_owned());
        }
        Split { host: Some(Written::Plain(text)), port: None } if starts_like_port(text) => {
            return Err(format!("the host is missing; for this machine write 127.0.0.1:{text}"));
        }
        Split { host: None, port: Some(port) } => {
            return Err(format!("the host is missing; for this machine write 127.0.0.1:{port}"));
        }
        Split { host: None, port: None } => {
            return Err("a target is HOST:PORT, or HOST for the listener's port".to_owned());
        }
        Split { host: Some(host), port } => (host, port),
    };
    let host = match host {
        Written::Bracketed(text) => bracketed(text)?,
        Written::Plain(text) => plain(text)?,
        Written::Every => unreachable!("'*' was refused above"),
    };
    let ports = match port {
        None => None,
        Some(text) => Some(ports(text)?),
    };
    if ports.is_some_and(|ports| ports.first() == 0) {
        return Err("nothing can be reached on port 0; give the target's real port".to_owned());
    }
    Ok(Target { host, ports })
}

/// An address cut in two, neither half looked at yet.
struct Split<'a> {
    host: Option<Written<'a>>,
    port: Option<&'a str>,
}

/// How a host was written.
enum Written<'a> {
    /// `*`
    Every,
    /// Between brackets.
    Bracketed(&'a str),
    /// Anything else.
    Plain(&'a str),
}

/// Cuts an address at the colon before its port.
fn split(address: &str) -> Result<Split<'_>, String> {
    if let Some(rest) = address.strip_prefix('[') {
        let Some((inside, after)) = rest.split_once(']') else {
            return Err("the closing ']' is missing; write [IPV6]:PORT".to_owned());
        };
        let host = Some(Written::Bracketed(inside));
        if after.is_empty() {
            return Ok(Split { host, port: None });
        }
        return match after.strip_prefix(':') {
            Some(port) => Ok(Split { host, port: Some(port) }),
            None => Err(format!("'{after}' after the ']' is no port; write [IPV6]:PORT")),
        };
    }
    let (host, port) = match address.split_once(':') {
        None => (address, None),
        Some((host, port)) if !port.contains(':') => (host, Some(port)),
        Some(_) => {
            return Err("more than one ':'; an IPv6 address is written in brackets, [::1]:80, \
                        and anything else HOST:PORT"
                .to_owned());
        }
    };
    let host = match host {
        "" => None,
        "*" => Some(Written::Every),
        text => Some(Written::Plain(text)),
    };
    Ok(Split { host, port })
}

/// An IPv6 address without brackets and without a port, `None` if `word` is something else. What
/// could as well be an address and a port is refused.
fn bare_ipv6(word: &str) -> Result<Option<Host>, String> {
    if let Some((address, port)) = word.rsplit_once(':')
        && starts_like_port(port)
        && is_ipv6(address)
    {
        return Err(match is_ipv6(word) {
            true => {
                format!("write [{address}]:{port} for port {port}, or [{word}] for the address")
            }
            false => format!("an IPv6 address before a port needs brackets: [{address}]:{port}"),
        });
    }
    if is_ipv6(word) { bracketed(word).map(Some) } else { Ok(None) }
}

/// Whether `text` is an IPv6 address, with or without an interface.
fn is_ipv6(text: &str) -> bool {
    let address = match text.split_once('%') {
        Some((address, _)) => address,
        None => text,
    };
    address.parse::<Ipv6Addr>().is_ok()
}

/// What stands between brackets: an IPv6 address, with its interface if it is link-local.
fn bracketed(text: &str) -> Result<Host, String> {
    let (address, interface) = match text.split_once('%') {
        Some((address, interface)) => (address, Some(interface)),
        None => (text, None),
    };
    let Ok(ip) = address.parse::<Ipv6Addr>() else {
        return Err(format!("'{address}' is not an IPv6 address; brackets are for those alone"));
    };
    let link_local = ip.is_unicast_link_local() || ip.is_multicast();
    match interface {
        // The kernel takes an IPv4 address in IPv6 dress only on a socket for both families.
        None if !link_local => Ok(Host::Ip(ip.to_canonical())),
        None if ip.is_multicast() => Ok(Host::Ip(IpAddr::V6(ip))),
        // The kernel answers EINVAL: the same address exists on every link.
        None => Err(format!("a link-local address needs its interface, as in [{ip}%eth0]")),
        Some(_) if !link_local => {
            Err("only a link-local address (fe80::) has an interface; leave out the '%'".to_owned())
        }
        Some(name) if is_interface(name) => Ok(Host::Scoped(ip, name.into())),
        Some(name) => Err(format!("'{name}' is not the name or number of an interface")),
    }
}

/// Whether the kernel could have an interface of this name, or number.
fn is_interface(name: &str) -> bool {
    // IFNAMSIZ counts the closing zero byte.
    (1..16).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:%[],".contains(&byte))
}

/// A host outside brackets: an IPv4 address or a name.
fn plain(text: &str) -> Result<Host, String> {
    if let Ok(ip) = text.parse::<Ipv4Addr>() {
        return Ok(Host::Ip(IpAddr::V4(ip)));
    }
    let name = text.strip_suffix('.').unwrap_or(text);
    if let Some(odd) = text.chars().find(|&letter| !is_host_letter(letter) && letter != '.') {
        return Err(match odd.is_ascii() {
            true => format!("'{odd}' cannot be in a host name"),
            false => format!("'{odd}' cannot be in a host name; write its xn-- form"),
        });
    }
    if name.starts_with('-') {
        return Err("a host name does not begin with '-'".to_owned());
    }
    // RFC 1035, 2.3.4: 63 octets a label, 255 a name with its length octets.
    if name.len() > 253 || name.split('.').any(|label| label.is_empty() || label.len() > 63) {
        return Err("a host name has parts of 1 to 63 letters with a '.' between them, \
                    253 letters in all"
            .to_owned());
    }
    // No top-level domain is a number, but the system's resolver reads `1.2.3` and `0x7f.1` as
    // IPv4 addresses, and not as those that were meant.
    if name.rsplit('.').next().is_some_and(is_number) {
        return Err(format!(
            "'{text}' is neither an IPv4 address (four numbers from 0 to 255 without leading \
             zeros) nor a host name"
        ));
    }
    Ok(Host::Name(text.into()))
}

/// Whether a host name may have it beside its dots.
fn is_host_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '-' || letter == '_'
}

/// Whether a label is a number to `inet_aton`, decimal or hexadecimal.
fn is_number(label: &str) -> bool {
    match label.strip_prefix("0x").or_else(|| label.strip_prefix("0X")) {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => label.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

/// Whether the word is a port or a range where a host was due: digits, perhaps with a '-'.
fn starts_like_port(word: &str) -> bool {
    let (first, last) = word.split_once('-').unwrap_or((word, "0"));
    [first, last].iter().all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

/// A port or a range of them.
fn ports(text: &str) -> Result<Ports, String> {
    let Some((first, last)) = text.split_once('-') else {
        return port(text).map(Ports::one);
    };
    let (first, last) = (port(first)?, port(last)?);
    if first == 0 {
        return Err("a range of ports cannot begin at 0".to_owned());
    }
    if first == last {
        return Ok(Ports::one(first));
    }
    Ports::range(first, last)
        .ok_or_else(|| format!("the range {first}-{last} runs downwards; write {last}-{first}"))
}

/// One port in decimal digits.
fn port(text: &str) -> Result<u16, String> {
    let decimal = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if decimal => Ok(port),
        _ if text.is_empty() => Err("the port is missing: a number from 0 to 65535".to_owned()),
        _ => Err(format!("'{text}' is not a port: a number from 0 to 65535")),
    }
}

fn refuse_unix(word: &str) -> Result<(), String> {
    match word.starts_with("unix:") {
        true => Err("unix sockets are not supported; give an IP address or a name".to_owned()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};

    use super::*;

    #[track_caller]
    fn listens(word: &str, shown: &str, protocols: Protocols) -> Listen {
        let listen = listen(word).unwrap();
        assert_eq!(listen.to_string(), shown);
        assert_eq!(listen.protocols, protocols);
        listen
    }

    #[track_caller]
    fn leads_to(word: &str, host: Host, ports: Option<Ports>) {
        assert_eq!(target(word), Ok(Target { host, ports }));
    }

    #[track_caller]
    fn refused<T: std::fmt::Debug>(outcome: Result<T, String>, part: &str) {
        let reason = outcome.unwrap_err();
        assert!(reason.contains(part), "{reason:?} lacks {part:?}");
    }

    fn v4(text: &str) -> Host {
        Host::Ip(IpAddr::V4(text.parse().unwrap()))
    }

    fn v6(text: &str) -> Host {
        Host::Ip(IpAddr::V6(text.parse().unwrap()))
    }

    fn name(text: &str) -> Host {
        Host::Name(text.into())
    }

    #[test]
    fn a_port_alone_or_with_a_star_is_every_address() {
        assert_eq!(listens(":80", ":80", Protocols::Both).host, ListenHost::Any);
        assert_eq!(listens("*:80", ":80", Protocols::Both).host, ListenHost::Any);
        assert_eq!(listens(":0", ":0", Protocols::Both).ports, Ports::one(0));
    }

    #[test]
    fn a_wildcard_address_is_one_family() {
        assert_eq!(
            listens("0.0.0.0:80", "0.0.0.0:80", Protocols::Both).host,
            ListenHost::Host(v4("0.0.0.0"))
        );
        assert_eq!(listens("[::]:80", "[::]:80", Protocols::Both).host, ListenHost::Host(v6("::")));
    }

    #[test]
    fn a_listener_takes_addresses_and_names() {
        listens("1.2.3.4:80", "1.2.3.4:80", Protocols::Both);
        listens("[2001:DB8::1]:80", "[2001:db8::1]:80", Protocols::Both);
        listens("[fe80::1%eth0]:80", "[fe80::1%eth0]:80", Protocols::Both);
        listens("[fe80::1%2]:80", "[fe80::1%2]:80", Protocols::Both);
        listens("localhost:80", "localhost:80", Protocols::Both);
        listens("329.host.com:80", "329.host.com:80", Protocols::Both);
    }

    #[test]
    fn a_suffix_picks_the_protocol() {
        listens(":80/tcp", ":80", Protocols::Tcp);
        listens("[::1]:53/udp", "[::1]:53", Protocols::Udp);
        refused(listen(":80/mythweb"), "'/mythweb' is no protocol; end with /tcp or /udp");
        refused(listen("80/mythweb"), "/tcp or /udp");
        refused(listen(":80/"), "/tcp or /udp");
        refused(listen(":80/tcp/udp"), "is not a port");
    }

    #[test]
    fn a_listener_takes_a_range() {
        let listen = listens(":8000-8010/tcp", ":8000-8010", Protocols::Tcp);
        assert_eq!(listen.ports.len(), 11);
        assert_eq!(listens(":80-80", ":80", Protocols::Both).ports, Ports::one(80));
        refused(super::listen(":8010-8000"), "write 8000-8010");
        refused(super::listen(":0-10"), "begin at 0");
        refused(super::listen(":1-2-3"), "'2-3' is not a port");
        refused(super::listen(":8000-"), "the port is missing");
    }

    #[test]
    fn a_listener_without_its_colon_is_told_where_it_goes() {
        refused(listen("80"), "write :80 to listen on every address");
        refused(listen("8000-8010"), "write :8000-8010 ");
        refused(listen("80/tcp"), "write :80 ");
        refused(listen("localhost"), "write localhost:PORT");
        refused(listen("[::1]"), "write [::1]:PORT");
        refused(listen("*"), "write *:PORT");
        refused(listen(""), "a listener is HOST:PORT");
        refused(listen("host:"), "the port is missing");
        refused(listen(":"), "the port is missing");
    }

    #[test]
    fn a_port_is_a_decimal_number() {
        refused(listen(":70000"), "'70000' is not a port: a number from 0 to 65535");
        refused(listen(":http"), "a number from 0 to 65535");
        refused(listen(":+80"), "'+80' is not a port");
        refused(listen(":-1"), "the port is missing");
        refused(listen(": 80"), "' 80' is not a port");
        refused(listen(":99999999999999999999"), "is not a port");
    }

    #[test]
    fn ipv6_belongs_in_brackets() {
        refused(listen("::1:80"), "in brackets");
        refused(listen("::80"), "in brackets");
        refused(listen("[::1:80"), "closing ']'");
        refused(listen("[::1]80"), "'80' after the ']'");
        refused(listen("[1.2.3.4]:80"), "'1.2.3.4' is not an IPv6 address");
        refused(listen("[host]:80"), "not an IPv6 address");
        refused(listen("[]:80"), "not an IPv6 address");
        refused(listen("a:b:80"), "more than one ':'");
    }

    #[test]
    fn an_interface_goes_with_a_link_local_address() {
        refused(listen("[fe80::1]:80"), "[fe80::1%eth0]");
        refused(listen("[::1%lo]:80"), "only a link-local address");
        refused(listen("[fe80::1%]:80"), "interface");
        refused(listen("[fe80::1%a b]:80"), "interface");
        refused(listen("[fe80::1%0123456789abcdef]:80"), "interface");
    }

    #[test]
    fn ipv4_in_ipv6_dress_is_ipv4() {
        listens("[::ffff:127.0.0.1]:80", "127.0.0.1:80", Protocols::Both);
        leads_to("[::ffff:127.0.0.1]:80", v4("127.0.0.1"), Some(Ports::one(80)));
    }

    #[test]
    fn unix_sockets_are_refused() {
        refused(listen("unix:/run/x"), "unix sockets are not supported");
        refused(target("unix:@x"), "unix sockets are not supported");
    }

    #[test]
    fn a_target_is_a_host_and_a_port() {
        leads_to("host:80", name("host"), Some(Ports::one(80)));
        leads_to("1.2.3.4:80", v4("1.2.3.4"), Some(Ports::one(80)));
        leads_to("[::1]:80", v6("::1"), Some(Ports::one(80)));
        leads_to("[fe80::1%eth0]:80", Host::Scoped("fe80::1".parse().unwrap(), "eth0".into()), {
            Some(Ports::one(80))
        });
        leads_to("host:9000-9010", name("host"), Ports::range(9000, 9010));
        leads_to("a_b.example.com.:80", name("a_b.example.com."), Some(Ports::one(80)));
    }

    #[test]
    fn a_target_without_a_port_takes_the_listeners() {
        leads_to("host", name("host"), None);
        leads_to("1.2.3.4", v4("1.2.3.4"), None);
        leads_to("[::1]", v6("::1"), None);
        leads_to("::1", v6("::1"), None);
        leads_to("2001:db8::1", v6("2001:db8::1"), None);
        leads_to("1:2:3:4:5:6:7:8", v6("1:2:3:4:5:6:7:8"), None);
        leads_to("fe80::1%eth0", Host::Scoped("fe80::1".parse().unwrap(), "eth0".into()), None);
    }

    #[test]
    fn a_bare_ipv6_target_that_may_have_a_port_is_refused() {
        refused(target("::1:80"), "write [::1]:80 for port 80, or [::1:80] for the address");
        refused(target("2001:db8::1:443"), "[2001:db8::1]:443");
        refused(target("fe80::1%eth0:80"), "[fe80::1%eth0]:80");
        refused(target("1:2:3:4:5:6:7:8:80"), "needs brackets: [1:2:3:4:5:6:7:8]:80");
        refused(target(":::80"), "[::]:80");
    }

    #[test]
    fn a_target_without_a_host_is_told_so() {
        refused(target("80"), "the host is missing; for this machine write 127.0.0.1:80");
        refused(target(":80"), "write 127.0.0.1:80");
        refused(target("8000-8010"), "write 127.0.0.1:8000-8010");
        refused(target("*:80"), "'*' is for listeners");
        refused(target(""), "a target is HOST:PORT");
    }

    #[test]
    fn a_target_has_a_real_port_and_no_protocol() {
        refused(target("host:0"), "port 0");
        refused(target("host:70000"), "from 0 to 65535");
        refused(target("host:"), "the port is missing");
        refused(target("host:80/udp"), "belongs to the listener");
        refused(target("host/tcp"), "belongs to the listener");
        refused(target("http://host"), "not a URL");
        refused(target("host/path"), "'/' cannot be in a host name");
    }

    #[test]
    fn numbers_that_are_no_ipv4_address_are_no_name() {
        refused(target("1.2.3.4.5:80"), "neither an IPv4 address");
        refused(target("256.1.1.1:80"), "neither an IPv4 address");
        refused(target("1.2.3:80"), "neither an IPv4 address");
        refused(target("127.0.0.01:80"), "leading zeros");
        refused(target("1.2.3.4.:80"), "neither an IPv4 address");
        refused(target("0x7f000001:80"), "neither an IPv4 address");
        refused(target("host.5:80"), "neither an IPv4 address");
        refused(listen("256.1.1.1:80"), "neither an IPv4 address");
        leads_to("329.host.com:80", name("329.host.com"), Some(Ports::one(80)));
        leads_to("1password:80", name("1password"), Some(Ports::one(80)));
    }

    #[test]
    fn a_name_has_the_letters_and_lengths_of_dns() {
        leads_to(&"a".repeat(63), name(&"a".repeat(63)), None);
        leads_to(&"a.".repeat(127), name(&"a.".repeat(127)), None);
        refused(target(&"a".repeat(64)), "1 to 63");
        refused(target(&"a.".repeat(128)), "253");
        refused(target("a..b"), "1 to 63");
        refused(target(".b"), "1 to 63");
        refused(target("."), "1 to 63");
        refused(target("-t"), "does not begin with '-'");
        refused(target("a b"), "' ' cannot be");
        refused(target("bücher.de"), "xn--");
    }

    fn any_listen() -> impl Strategy<Value = Listen> {
        let host = prop_oneof![
            Just(ListenHost::Any),
            any::<Ipv4Addr>().prop_map(|ip| ListenHost::Host(Host::Ip(IpAddr::V4(ip)))),
            any::<Ipv6Addr>()
                .prop_filter("stays IPv6, without interface", |ip| {
                    !ip.is_unicast_link_local() && ip.to_ipv4_mapped().is_none()
                })
                .prop_map(|ip| ListenHost::Host(Host::Ip(IpAddr::V6(ip)))),
            (any::<u64>(), "[a-z][a-z0-9.-]{0,14}").prop_map(|(low, interface)| {
                let ip = Ipv6Addr::from((0xfe80_u128 << 112) | u128::from(low));
                ListenHost::Host(Host::Scoped(ip, interface.into()))
            }),
            "([a-z0-9_][a-z0-9_-]{0,20}\\.){0,3}[a-z][a-z0-9-]{0,10}"
                .prop_map(|name| ListenHost::Host(Host::Name(name.into()))),
        ];
        let ports = prop_oneof![
            any::<u16>().prop_map(Ports::one),
            (1_u16..65535).prop_flat_map(|first| {
                (first + 1..=65535).prop_map(move |last| Ports::range(first, last).unwrap())
            }),
        ];
        let protocols =
            prop_oneof![Just(Protocols::Tcp), Just(Protocols::Udp), Just(Protocols::Both)];
        (host, ports, protocols).prop_map(|(host, ports, protocols)| Listen {
            host,
            ports,
            protocols,
        })
    }

    proptest! {
        #[test]
        fn no_word_panics(word in ".{0,40}") {
            let _ = listen(&word);
            let _ = target(&word);
        }

        #[test]
        fn no_near_address_panics(word in "[\\[]?[0-9a-f:.*%/-]{0,20}[\\]]?[:0-9-]{0,8}(/tcp|/udp)?") {
            let _ = listen(&word);
            let _ = target(&word);
        }

        #[test]
        fn a_listener_reads_back_as_it_is_shown(expected in any_listen()) {
            let suffix = match expected.protocols {
                Protocols::Tcp => "/tcp",
                Protocols::Udp => "/udp",
                Protocols::Both => "",
            };
            assert_eq!(listen(&format!("{expected}{suffix}")), Ok(expected));
        }
    }
}
