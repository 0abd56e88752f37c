//! The command line: which command, and its options.
//!
//! One table describes every option; a command names the ones it takes, and parser and help come
//! from these two. No I/O happens here.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use lexopt::{Arg, Parser, ValueExt};

use crate::Run;

/// One command of the tool.
pub struct Command {
    pub name: &'static str,
    pub about: &'static str,
    /// Long names of the options that it takes.
    pub options: &'static [&'static str],
    pub run: Run,
}

/// What the user asked for.
pub enum Asked {
    Run(&'static Command, Options),
    Help(String),
}

/// Every option of every command, with the defaults that the help states.
#[derive(Clone)]
pub struct Options {
    pub listen: SocketAddr,
    pub to: Option<SocketAddr>,
    pub connections: usize,
    pub clients: usize,
    pub window: usize,
    pub size: Option<usize>,
    pub seconds: Option<Duration>,
    pub messages: Option<u64>,
    pub rounds: u64,
    pub pace: Option<usize>,
    pub skip_empty: bool,
    pub bytes: u64,
    pub direction: Direction,
    pub verify: bool,
    pub gso: bool,
    pub gro: bool,
    /// Datagrams a second, all clients together.
    pub rate: Option<u64>,
}

/// Which way tcp-bulk moves bytes, seen from the client.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Up,
    Down,
    Both,
}

impl Options {
    /// The address to connect to, or the complaint that it is missing.
    pub fn target(&self) -> std::io::Result<SocketAddr> {
        self.to.ok_or_else(|| std::io::Error::other("--to ADDR is missing"))
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            to: None,
            connections: 1,
            clients: 1,
            window: 1,
            size: None,
            seconds: None,
            messages: None,
            rounds: 1,
            pace: None,
            skip_empty: false,
            bytes: 1 << 30,
            direction: Direction::Up,
            verify: true,
            gso: false,
            gro: false,
            rate: None,
        }
    }
}

/// Reads `argv`, program name included.
pub fn parse(
    argv: impl IntoIterator<Item = OsString>,
    commands: &'static [Command],
) -> Result<Asked, lexopt::Error> {
    let mut parser = Parser::from_iter(argv);
    let command = match parser.next()? {
        Some(Arg::Value(name)) => commands
            .iter()
            .find(|command| name == command.name)
            .ok_or_else(|| format!("no command {name:?}; --help lists them"))?,
        Some(Arg::Short('h') | Arg::Long("help")) | None => {
            return Ok(Asked::Help(overview(commands)));
        }
        Some(other) => return Err(other.unexpected()),
    };
    let mut options = Options::default();
    while let Some(arg) = parser.next()? {
        let name = match arg {
            Arg::Short('h') | Arg::Long("help") => return Ok(Asked::Help(usage(command))),
            Arg::Long(name) if command.options.contains(&name) => name.to_owned(),
            other => return Err(other.unexpected()),
        };
        set(&mut options, &name, &mut parser)?;
    }
    Ok(Asked::Run(command, options))
}

fn set(options: &mut Options, name: &str, parser: &mut Parser) -> Result<(), lexopt::Error> {
    match name {
        "listen" => options.listen = parser.value()?.parse()?,
        "to" => options.to = Some(parser.value()?.parse()?),
        "connections" => options.connections = at_least(1, parser.value()?.parse()?)?,
        "clients" => options.clients = at_least(1, parser.value()?.parse()?)?,
        "window" => options.window = at_least(1, parser.value()?.parse()?)?,
        "size" => options.size = Some(at_least(1, parser.value()?.parse()?)?),
        "seconds" => {
            let seconds: f64 = parser.value()?.parse()?;
            options.seconds = Some(
                Duration::try_from_secs_f64(seconds)
                    .map_err(|_| "--seconds: not a length of time")?,
            );
        }
        "messages" => options.messages = Some(parser.value()?.parse()?),
        "rounds" => options.rounds = parser.value()?.parse()?,
        "pace" => options.pace = Some(at_least(1, parser.value()?.parse()?)?),
        "skip-empty" => options.skip_empty = true,
        "bytes" => options.bytes = parser.value()?.parse_with(amount)?,
        "direction" => {
            options.direction = parser.value()?.parse_with(|text| match text {
                "up" => Ok(Direction::Up),
                "down" => Ok(Direction::Down),
                "both" => Ok(Direction::Both),
                _ => Err("up, down or both"),
            })?;
        }
        "no-verify" => options.verify = false,
        "gso" => options.gso = true,
        "gro" => options.gro = true,
        "rate" => options.rate = Some(parser.value()?.parse_with(amount)?),
        _ => return Err(format!("--{name} has no meaning yet").into()),
    }
    Ok(())
}

fn at_least(least: usize, value: usize) -> Result<usize, lexopt::Error> {
    if value < least { Err(format!("{value} is less than {least}").into()) } else { Ok(value) }
}

/// A number with an optional `k`, `M` or `G` (powers of 1,000, as network tools count).
fn amount(text: &str) -> Result<u64, &'static str> {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1_000),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1_000_000),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text, 1),
    };
    let number: u64 = digits.parse().map_err(|_| "not a number")?;
    number.checked_mul(factor).ok_or("too large")
}

fn overview(commands: &[Command]) -> String {
    let mut text = String::from(
        "Load generator and targets for tinyfwd's tests and benchmark.\n\n\
         Usage: load COMMAND [OPTIONS]    (load COMMAND --help for its options)\n\n",
    );
    for command in commands {
        text.push_str(&format!("  {:14} {}\n", command.name, command.about));
    }
    text
}

fn usage(command: &Command) -> String {
    let mut text = format!("{}\n\nUsage: load {} [OPTIONS]\n\n", command.about, command.name);
    for (name, value, about) in HELP.iter().filter(|row| command.options.contains(&row.0)) {
        text.push_str(&format!("  {:22} {about}\n", format!("--{name} {value}")));
    }
    text
}

const HELP: &[(&str, &str, &str)] = &[
    ("listen", "ADDR", "IP:PORT to bind; port 0 picks one [127.0.0.1:0]"),
    ("to", "ADDR", "IP:PORT to connect to"),
    ("connections", "N", "TCP connections [1]"),
    ("clients", "N", "UDP sockets [1]"),
    ("window", "W", "datagrams in flight per client [1]"),
    ("size", "B", "bytes in a message or datagram [100; 1200 one way]"),
    ("seconds", "S", "time limit; servers without it run until standard input ends"),
    ("messages", "M", "count limit, all connections together"),
    ("rounds", "R", "round trips on each connection before and after the hold [1]"),
    ("pace", "N", "connections or clients begun but not yet served at one time [TCP 4; UDP all]"),
    ("skip-empty", "", "don't answer empty datagrams (rinetd opens flows with one)"),
    ("bytes", "B", "bytes per connection and direction; k, M, G [1073741824]"),
    ("direction", "WAY", "up, down or both [up]"),
    ("no-verify", "", "don't compare the bytes"),
    ("gso", "", "runs of datagrams by one call (UDP_SEGMENT)"),
    ("gro", "", "receive runs of datagrams as one (UDP_GRO)"),
    ("rate", "N", "datagrams a second, all clients together; k, M, G [no limit]"),
];
