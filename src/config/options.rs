//! The options of a rule: one table from which the parser, the help and every listing are made.
//!
//! [`set`] takes one `NAME=VALUE`; splitting a list at its commas and knowing its place is the
//! caller's. Ranges are part of the table, so no value that was accepted is out of one.
//!
//! A row names a field of [`Limits`] once; kind, default and current value are read from there.

use std::time::Duration;

use crate::config::near;
use crate::rule::Limits;

/// One row of the table.
pub struct RuleOption {
    /// What stands before the `=`.
    pub name: &'static str,
    /// What it limits, for the help.
    pub help: &'static str,
    /// The least and the greatest value: milliseconds, a count or bytes; of no meaning for words.
    range: (u64, u64),
    field: fn(&mut Limits) -> Field<'_>,
}

/// Every option, in the order of the help.
pub static TABLE: [RuleOption; 12] = [
    RuleOption {
        name: "connect",
        help: "to reach one target address, then the next",
        range: (10, 10 * MINUTE),
        field: |limits| Field::Time(&mut limits.connect),
    },
    RuleOption {
        name: "idle",
        help: "TCP: no byte either way",
        range: (10, 30 * DAY),
        field: |limits| Field::TimeOrOff(&mut limits.idle),
    },
    RuleOption {
        name: "timeout",
        help: "UDP: no datagram either way (30s until a reply)",
        range: (10, 30 * DAY),
        field: |limits| Field::Time(&mut limits.timeout),
    },
    RuleOption {
        name: "half-close",
        help: "TCP: one side has ended, the other sends nothing",
        range: (10, 30 * DAY),
        field: |limits| Field::Time(&mut limits.half_close),
    },
    RuleOption {
        name: "keepalive",
        help: "TCP: silence before the kernel probes a peer",
        // The kernel takes at most 32767 seconds.
        range: (1000, 9 * HOUR),
        field: |limits| Field::TimeOrOff(&mut limits.keepalive),
    },
    RuleOption {
        name: "sessions",
        help: "UDP flows of the rule at once",
        range: (1, 1_000_000),
        field: |limits| Field::Count(&mut limits.sessions),
    },
    RuleOption {
        name: "backlog",
        help: "TCP connections that wait to be accepted",
        range: (1, 65_535),
        field: |limits| Field::Count(&mut limits.backlog),
    },
    RuleOption {
        name: "sockbuf",
        help: "kernel buffer of each socket and direction",
        range: (4 << 10, 1 << 30),
        field: |limits| Field::Size(&mut limits.sockbuf),
    },
    RuleOption {
        name: "refresh",
        help: "age at which a target's name is looked up again",
        range: (1000, 30 * DAY),
        field: |limits| Field::Time(&mut limits.refresh),
    },
    RuleOption {
        name: "gro",
        help: "UDP: receive runs of datagrams as one",
        range: (0, 0),
        field: |limits| Field::Either(&mut limits.gro, ["on", "off"]),
    },
    RuleOption {
        name: "gso",
        help: "UDP: send runs of datagrams as one",
        range: (0, 0),
        field: |limits| Field::Either(&mut limits.gso, ["on", "off"]),
    },
    RuleOption {
        name: "tos",
        help: "UDP: pass DSCP on, or only the ECN bits",
        range: (0, 0),
        field: |limits| Field::Either(&mut limits.pass_tos, ["pass", "off"]),
    },
];

impl RuleOption {
    /// The kind of its value, as the help shows it.
    pub fn value(&self) -> &'static str {
        match (self.field)(&mut Limits::default()) {
            Field::Time(_) => "TIME",
            Field::TimeOrOff(_) => "TIME|off",
            Field::Count(_) => "N",
            Field::Size(_) => "SIZE",
            Field::Either(_, ["pass", _]) => "pass|off",
            Field::Either(..) => "on|off",
        }
    }

    /// What it is in `limits`, in the form that [`set`] takes; `None` if it is left to the kernel.
    pub fn show(&self, limits: &Limits) -> Option<String> {
        match (self.field)(&mut limits.clone()) {
            Field::Time(time) | Field::TimeOrOff(Some(time)) => Some(show_time(millis(*time))),
            Field::TimeOrOff(None) => Some("off".to_owned()),
            Field::Count(count) => Some(count.to_string()),
            Field::Size(size) => size.map(|size| show_size(size.into())),
            Field::Either(first, words) => Some(words[usize::from(!*first)].to_owned()),
        }
    }

    fn set(&self, limits: &mut Limits, text: &str) -> Result<(), String> {
        let (least, most) = self.range;
        match (self.field)(limits) {
            Field::TimeOrOff(time) if text == "off" => *time = None,
            Field::TimeOrOff(time) => *time = Some(time_within(text, least, most)?),
            Field::Time(time) => *time = time_within(text, least, most)?,
            Field::Count(count) => *count = count_within(text, least as u32, most as u32)?,
            Field::Size(size) => *size = Some(size_within(text, least as u32, most as u32)?),
            Field::Either(first, words) => match words.iter().position(|word| *word == text) {
                Some(at) => *first = at == 0,
                None => return Err(format!("'{text}' is neither {} nor {}", words[0], words[1])),
            },
        }
        Ok(())
    }
}

/// Sets one option, written `NAME=VALUE`; on an error says why and changes nothing.
pub fn set(limits: &mut Limits, word: &str) -> Result<(), String> {
    let (name, text) = match word.split_once('=') {
        Some((name, text)) => (name, Some(text)),
        None => (word, None),
    };
    let Some(option) = TABLE.iter().find(|option| option.name == name) else {
        return Err(match near(name, TABLE.iter().map(|option| option.name)) {
            _ if name.is_empty() => {
                "an option is NAME=VALUE, several have a ',' between".to_owned()
            }
            Some(meant) => format!("unknown option '{name}'; did you mean '{meant}'?"),
            None => format!("unknown option '{name}'; --help lists the options"),
        });
    };
    match text {
        Some(text) => option.set(limits, text).map_err(|reason| match option.value() {
            "TIME|off" => format!("{name}: {reason}, or off"),
            _ => format!("{name}: {reason}"),
        }),
        None => Err(format!("{name} needs a value: {name}={}", option.value())),
    }
}

/// Reads a time: a number of seconds, or with `ms`, `s`, `m` or `h` of those. Both ends of the
/// range, in milliseconds, are allowed.
pub fn time_within(text: &str, least: u64, most: u64) -> Result<Duration, String> {
    match scaled(text, &[("ms", 1), ("s", SECOND), ("m", MINUTE), ("h", HOUR), ("", SECOND)]) {
        Some(time) if (least..=most).contains(&time) => Ok(Duration::from_millis(time)),
        outcome => Err(format!(
            "'{text}' is {} {} to {} (as 20, 20s, 500ms, 5m, 2h)",
            if outcome.is_some() { "out of range, a time is from" } else { "not a time from" },
            show_time(least),
            show_time(most),
        )),
    }
}

/// Reads a number; both ends of the range are allowed.
pub fn count_within(text: &str, least: u32, most: u32) -> Result<u32, String> {
    match scaled(text, &[("", 1)]) {
        Some(count) if (least.into()..=most.into()).contains(&count) => Ok(count as u32),
        _ => Err(format!("'{text}' is not a number from {least} to {most}")),
    }
}

/// Reads a size in bytes, or with `k`, `M` or `G` in those powers of 1024. Both ends of the range
/// are allowed.
pub fn size_within(text: &str, least: u32, most: u32) -> Result<u32, String> {
    let units =
        [("k", 1 << 10), ("K", 1 << 10), ("M", 1 << 20), ("m", 1 << 20), ("G", 1 << 30), ("", 1)];
    match scaled(text, &units) {
        Some(size) if (least.into()..=most.into()).contains(&size) => Ok(size as u32),
        _ => Err(format!(
            "'{text}' is not a size from {} to {} (as 4096, 64k, 10M)",
            show_size(least.into()),
            show_size(most.into()),
        )),
    }
}

/// A field of [`Limits`] and the kind of value it has.
enum Field<'a> {
    Time(&'a mut Duration),
    TimeOrOff(&'a mut Option<Duration>),
    Count(&'a mut u32),
    Size(&'a mut Option<u32>),
    /// The first of two words, or not.
    Either(&'a mut bool, [&'static str; 2]),
}

/// The product of the digits and the unit behind them; `None` if malformed or beyond 64 bits.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, written) = text.split_at_checked(end)?;
    let (_, unit) = units.iter().find(|(unit, _)| *unit == written)?;
    digits.parse::<u64>().ok()?.checked_mul(*unit)
}

fn show_time(millis: u64) -> String {
    in_units(millis, &[(HOUR, "h"), (MINUTE, "m"), (SECOND, "s"), (1, "ms")])
}

fn show_size(bytes: u64) -> String {
    in_units(bytes, &[(1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k"), (1, "")])
}

/// `value` in the first unit that divides it.
fn in_units(value: u64, units: &[(u64, &str)]) -> String {
    match units.iter().find(|(unit, _)| value.is_multiple_of(*unit)) {
        Some((unit, name)) if value > 0 => format!("{}{name}", value / unit),
        _ => value.to_string(),
    }
}

/// As 64 bits: every accepted time fits, and 128-bit division would cost code.
fn millis(time: Duration) -> u64 {
    time.as_secs().saturating_mul(SECOND).saturating_add(time.subsec_millis().into())
}

/// Milliseconds.
const SECOND: u64 = 1000;
/// Milliseconds.
const MINUTE: u64 = 60 * SECOND;
/// Milliseconds.
pub const HOUR: u64 = 60 * MINUTE;
/// Milliseconds.
const DAY: u64 = 24 * HOUR;

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, proptest};

    use super::*;

    #[track_caller]
    fn limits(words: &[&str]) -> Limits {
        let mut limits = Limits::default();
        for word in words {
            set(&mut limits, word).unwrap();
        }
        limits
    }

    #[track_caller]
    fn refused(word: &str, part: &str) {
        let mut limits = Limits::default();
        let reason = set(&mut limits, word).unwrap_err();
        assert!(reason.contains(part), "{reason:?} lacks {part:?}");
        assert_eq!(limits, Limits::default(), "an error changes nothing");
    }

    #[test]
    fn each_option_sets_its_own_field() {
        let expected = Limits {
            connect: Duration::from_secs(1),
            idle: Some(Duration::from_secs(2)),
            timeout: Duration::from_secs(3),
            half_close: Duration::from_secs(4),
            keepalive: Some(Duration::from_secs(5)),
            sessions: 6,
            backlog: 7,
            sockbuf: Some(8192),
            refresh: Duration::from_secs(9),
            gro: false,
            gso: false,
            pass_tos: true,
        };
        let set = limits(&[
            "connect=1",
            "idle=2",
            "timeout=3",
            "half-close=4",
            "keepalive=5",
            "sessions=6",
            "backlog=7",
            "sockbuf=8192",
            "refresh=9",
            "gro=off",
            "gso=off",
            "tos=pass",
        ]);
        assert_eq!(set, expected);
    }

    #[test]
    fn a_time_has_units_and_seconds_without() {
        let timeout = |word| limits(&[word]).timeout;
        assert_eq!(timeout("timeout=20"), Duration::from_secs(20));
        assert_eq!(timeout("timeout=20s"), Duration::from_secs(20));
        assert_eq!(timeout("timeout=500ms"), Duration::from_millis(500));
        assert_eq!(timeout("timeout=5m"), Duration::from_secs(300));
        assert_eq!(timeout("timeout=2h"), Duration::from_secs(7200));
    }

    #[test]
    fn a_malformed_time_is_told_the_form_and_the_range() {
        refused("connect=5x", "connect: '5x' is not a time from 10ms to 10m (as 20, 20s");
        for text in ["", "s", "-1", "+1", "1.5s", "1 s", "1h30m", "1S", "0x10", "½"] {
            refused(&format!("connect={text}"), "is not a time from 10ms to 10m");
        }
        refused("connect=99999999999999999999", "is not a time");
        refused("connect=9999999999999999999h", "is not a time");
        refused("connect=off", "is not a time");
    }

    #[test]
    fn a_time_out_of_range_is_told_the_range() {
        refused("connect=9ms", "out of range, a time is from 10ms to 10m");
        refused("connect=0", "out of range");
        refused("connect=601", "out of range");
        refused("idle=721h", "from 10ms to 720h");
        refused("keepalive=10h", "from 1s to 9h");
        refused("keepalive=999ms", "from 1s to 9h");
        refused("refresh=0", "from 1s to 720h");
        limits(&["connect=10ms", "connect=10m", "idle=720h", "keepalive=9h", "keepalive=1s"]);
    }

    #[test]
    fn idle_and_keepalive_can_be_off() {
        let off = limits(&["idle=5", "idle=off", "keepalive=off"]);
        assert_eq!((off.idle, off.keepalive), (None, None));
        refused("idle=of", ", or off");
        refused("timeout=off", "not a time");
    }

    #[test]
    fn a_count_is_a_plain_number_in_range() {
        assert_eq!(limits(&["sessions=1000000"]).sessions, 1_000_000);
        assert_eq!(limits(&["backlog=65535"]).backlog, 65_535);
        refused("sessions=0", "sessions: '0' is not a number from 1 to 1000000");
        refused("sessions=1000001", "from 1 to 1000000");
        refused("sessions=4294967297", "from 1 to 1000000");
        refused("sessions=1k", "is not a number");
        refused("backlog=65536", "from 1 to 65535");
    }

    #[test]
    fn a_choice_takes_one_of_its_two_words() {
        assert!(!limits(&["gro=off"]).gro && limits(&["gro=off", "gro=on"]).gro);
        refused("gso=yes", "gso: 'yes' is neither on nor off");
        refused("tos=on", "tos: 'on' is neither pass nor off");
    }

    #[test]
    fn a_size_has_units_and_bytes_without() {
        let sockbuf = |word| limits(&[word]).sockbuf;
        assert_eq!(sockbuf("sockbuf=5000"), Some(5000));
        assert_eq!(sockbuf("sockbuf=64k"), Some(65_536));
        assert_eq!(sockbuf("sockbuf=10M"), Some(10 << 20));
        assert_eq!(sockbuf("sockbuf=1G"), Some(1 << 30));
        refused("sockbuf=4095", "sockbuf: '4095' is not a size from 4k to 1G (as 4096, 64k, 10M)");
        refused("sockbuf=2G", "from 4k to 1G");
        refused("sockbuf=64kB", "not a size");
        refused("sockbuf=", "not a size");
    }

    #[test]
    fn the_last_of_two_wins() {
        assert_eq!(limits(&["sessions=5", "sessions=6"]).sessions, 6);
    }

    #[test]
    fn an_unknown_option_offers_the_one_that_was_meant() {
        refused("idel=3", "unknown option 'idel'; did you mean 'idle'?");
        refused("keep-alive=3", "did you mean 'keepalive'?");
        refused("Timeout=3", "did you mean 'timeout'?");
        refused("max=3", "unknown option 'max'; --help lists the options");
        refused("transparent", "unknown option 'transparent'");
        refused("", "an option is NAME=VALUE");
        refused("=3", "an option is NAME=VALUE");
        refused(" idle=3", "did you mean 'idle'?");
    }

    #[test]
    fn an_option_without_its_value_is_told_the_kind() {
        refused("idle", "idle needs a value: idle=TIME|off");
        refused("sockbuf", "sockbuf=SIZE");
    }

    #[test]
    fn every_default_is_one_that_could_be_set() {
        let defaults = Limits::default();
        for option in &TABLE {
            if let Some(shown) = option.show(&defaults) {
                let mut again = defaults.clone();
                set(&mut again, &format!("{}={shown}", option.name)).unwrap();
                assert_eq!(again, defaults, "{}", option.name);
            }
            assert!(option.range.1 <= 30 * DAY && option.range.0 <= option.range.1);
        }
    }

    proptest! {
        #[test]
        fn no_word_panics(word in ".{0,30}") {
            let _ = set(&mut Limits::default(), &word);
        }

        #[test]
        fn no_value_panics(option in 0..TABLE.len(), text in "[0-9]{0,22}(ms|[smhkKMG]|off)?") {
            let _ = set(&mut Limits::default(), &format!("{}={text}", TABLE[option].name));
        }

        #[test]
        fn a_time_reads_back_as_it_is_shown(millis in 0..=30 * DAY) {
            assert_eq!(
                time_within(&show_time(millis), 0, 30 * DAY),
                Ok(Duration::from_millis(millis))
            );
        }

        #[test]
        fn a_size_reads_back_as_it_is_shown(bytes in any::<u32>()) {
            assert_eq!(size_within(&show_size(bytes.into()), 0, u32::MAX), Ok(bytes));
        }
    }
}
