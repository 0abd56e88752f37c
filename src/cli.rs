//! The command line: arguments in, what the user said out, and the help that says what can be said.
//!
//! Addresses and options are read by [`config`]; this file knows the flags, which rule a flag
//! belongs to, and the number of each argument. There is no I/O here: printing, and running what
//! was asked for, are left to `main`.
//!
//! Every error of a command line is reported, not only the first, and nothing runs if there is one.

use std::ffi::OsString;
use std::fmt::Write;
use std::time::Duration;

use crate::config::{self, Error, Place, address, options};
use crate::rule::{Limits, Listen, Rule, Target};

/// What the user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Print [`help`].
    Help,
    /// Print the version.
    Version,
    /// Try what works on this machine.
    SelfTest,
    /// Forward.
    Run(Settings),
}

/// How to forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// In the order of the command line; never empty.
    pub rules: Vec<Rule>,
    /// How long connections may go on after the signal to stop.
    pub drain: Duration,
    /// TCP connections of all rules at once; at least 1, `None` leaves it to the descriptors.
    pub max_connections: Option<u32>,
    /// How much to log: 0 as usual, one more for each `-v` and one less for each `-q`.
    pub verbosity: i8,
}

/// Reads the arguments behind the program's name. On errors all of them, in their order.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, Vec<Error>> {
    Reader::new(args.into_iter().collect()).read()
}

/// The whole help, ending with a newline.
pub fn help() -> String {
    let mut text = String::with_capacity(4096);
    text.push_str(HEAD);
    for Flag { short, long, value, help, .. } in &FLAGS {
        let comma = if short.is_empty() || long.is_empty() { "" } else { ", " };
        let space = if value.is_empty() { "" } else { " " };
        let left = format!("{short}{comma}{long}{space}{value}");
        row(&mut text, &left, FLAG_WIDTH, help);
    }
    text.push_str(ADDRESSES);
    let defaults = Limits::default();
    for option in &options::TABLE {
        let left = format!("{}={}", option.name, option.value());
        let default = option.show(&defaults);
        let default = default.as_deref().unwrap_or("kernel");
        row(&mut text, &left, OPTION_WIDTH, &format!("{default:<7} {}", option.help));
    }
    text.push_str(TAIL);
    text
}

/// One row of the help in two columns.
fn row(text: &mut String, left: &str, width: usize, right: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "  {left:<width$} {right}");
}

/// A flag of the command line.
struct Flag {
    /// With its dash, or empty.
    short: &'static str,
    /// With its dashes, or empty.
    long: &'static str,
    /// What its value is called; empty if it takes none.
    value: &'static str,
    help: &'static str,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Listen,
    Target,
    Options,
    MaxConnections,
    Drain,
    Louder,
    Quieter,
    Foreground,
    SelfTest,
    Help,
    Version,
}

static FLAGS: [Flag; 11] = [
    flag("-l", "--listen", "ADDR", "listen here; begins a rule", Role::Listen),
    flag(
        "-t",
        "--target",
        "ADDR[,ADDR...]",
        "where the last -l leads, in this order",
        Role::Target,
    ),
    flag(
        "-o",
        "--option",
        "K=V[,K=V...]",
        "for the last -l; before the first, for all",
        Role::Options,
    ),
    flag(
        "",
        "--max-connections",
        "N",
        "TCP connections at once, of all rules",
        Role::MaxConnections,
    ),
    flag("", "--drain", "TIME", "how long connections go on after SIGTERM [10s]", Role::Drain),
    flag("-v", "", "", "log more; may repeat", Role::Louder),
    flag("-q", "", "", "log less; may repeat", Role::Quieter),
    flag("-f", "", "", "accepted and ignored: it always stays in front", Role::Foreground),
    flag("", "--selftest", "", "try what works here, how fast, in what memory", Role::SelfTest),
    flag("-h", "--help", "", "print this", Role::Help),
    flag("-V", "--version", "", "print the version", Role::Version),
];

const fn flag(
    short: &'static str,
    long: &'static str,
    value: &'static str,
    help: &'static str,
    role: Role,
) -> Flag {
    Flag { short, long, value, help, role }
}

/// A rule whose flags are still being read.
struct Draft {
    number: usize,
    token: String,
    /// `None` after an error in it.
    listen: Option<Listen>,
    targets: Vec<Target>,
    /// A target had an error: its absence is no second one.
    bad_target: bool,
    limits: Limits,
}

struct Reader {
    args: Vec<OsString>,
    parser: lexopt::Parser,
    /// The index of the argument that is being read.
    at: usize,
    errors: Vec<Error>,
    rules: Vec<Rule>,
    draft: Option<Draft>,
    defaults: Limits,
    drain: Duration,
    max_connections: Option<u32>,
    verbosity: i8,
    self_test: bool,
}

impl Reader {
    fn new(args: Vec<OsString>) -> Reader {
        Reader {
            parser: lexopt::Parser::from_args(args.clone()),
            args,
            at: 0,
            errors: Vec::new(),
            rules: Vec::new(),
            draft: None,
            defaults: Limits::default(),
            drain: Duration::from_secs(10),
            max_connections: None,
            verbosity: 0,
            self_test: false,
        }
    }

    fn read(mut self) -> Result<Command, Vec<Error>> {
        // What is behind an unknown flag is most likely its value: no error of its own.
        let mut after_unknown = false;
        loop {
            self.at = self.next_index();
            let name = match self.parser.next() {
                Ok(None) => break,
                Ok(Some(lexopt::Arg::Short(letter))) => format!("-{letter}"),
                Ok(Some(lexopt::Arg::Long(name))) => format!("--{name}"),
                Ok(Some(lexopt::Arg::Value(_))) => {
                    if !after_unknown {
                        self.error(
                            "unexpected: listeners follow -l, targets -t, and several targets \
                             have a ',' between",
                        );
                    }
                    after_unknown = false;
                    continue;
                }
                Err(lexopt::Error::UnexpectedValue { option, .. }) => {
                    if !after_unknown {
                        self.error(&format!("{option} takes no value"));
                    }
                    after_unknown = false;
                    continue;
                }
                Err(error) => {
                    self.error(&error.to_string());
                    continue;
                }
            };
            let flag = FLAGS.iter().find(|flag| flag.short == name || flag.long == name);
            after_unknown = flag.is_none();
            match flag {
                Some(Flag { role: Role::Help, .. }) => return Ok(Command::Help),
                Some(Flag { role: Role::Version, .. }) => return Ok(Command::Version),
                Some(flag) if flag.value.is_empty() => self.switch(flag.role),
                Some(flag) => self.valued(flag, &name),
                None => self.unknown(&name),
            }
        }
        self.finish_rule();
        self.finish()
    }

    fn switch(&mut self, role: Role) {
        match role {
            Role::Louder => self.verbosity = self.verbosity.saturating_add(1),
            Role::Quieter => self.verbosity = self.verbosity.saturating_sub(1),
            Role::SelfTest => self.self_test = true,
            _ => {}
        }
    }

    fn valued(&mut self, flag: &Flag, name: &str) {
        // A bad listener still begins a rule: what follows is not for the one before.
        if flag.role == Role::Listen {
            self.finish_rule();
        }
        let value = self.value(flag, name);
        match (flag.role, value.as_deref()) {
            (Role::Listen, value) => self.listen(value),
            (Role::Target, value) => self.target(value),
            (Role::Options, Some(value)) => self.options(value),
            (Role::MaxConnections, Some(value)) => {
                let count = options::count_within(value, 1, MOST_CONNECTIONS);
                self.max_connections = self.kept(count);
            }
            (Role::Drain, Some(value)) => {
                let time = options::time_within(value, 0, 24 * options::HOUR);
                self.drain = self.kept(time).unwrap_or_default();
            }
            _ => {}
        }
    }

    /// The value of a flag, or its error noted.
    fn value(&mut self, flag: &Flag, name: &str) -> Option<String> {
        // No value of any flag begins with a dash: one that does is the next flag.
        let mut flag_follows = false;
        if let Some(rest) = self.parser.try_raw_args() {
            flag_follows =
                rest.peek().is_some_and(|next| next.as_encoded_bytes().starts_with(b"-"));
        }
        let value = if flag_follows { None } else { self.parser.value().ok() };
        let text = match value {
            Some(value) => value.into_string(),
            None => {
                self.error(&format!("{name} needs a value: {name} {}", flag.value));
                return None;
            }
        };
        self.kept(text.map_err(|_| "not UTF-8; addresses and options are ASCII".to_owned()))
    }

    fn listen(&mut self, value: Option<&str>) {
        let listen = value.and_then(|value| self.kept(address::listen(value)));
        self.draft = Some(Draft {
            number: self.at + 1,
            token: self.token(),
            listen,
            targets: Vec::new(),
            bad_target: false,
            limits: self.defaults.clone(),
        });
    }

    fn target(&mut self, value: Option<&str>) {
        let mut targets = Vec::new();
        let mut bad = value.is_none();
        for word in value.into_iter().flat_map(|value| value.split(',')) {
            match self.kept(address::target(word)) {
                Some(target) => targets.push(target),
                None => bad = true,
            }
        }
        match &mut self.draft {
            Some(draft) => {
                draft.targets.append(&mut targets);
                draft.bad_target |= bad;
            }
            None => self.error("no -l before this target; write -l ADDR -t ADDR"),
        }
    }

    fn options(&mut self, value: &str) {
        let at = self.place();
        let token = self.token();
        let limits = match &mut self.draft {
            Some(draft) => &mut draft.limits,
            None => &mut self.defaults,
        };
        for word in value.split(',') {
            if let Err(reason) = options::set(limits, word) {
                self.errors.push(Error::new(at, &token, &reason));
            }
        }
    }

    fn unknown(&mut self, word: &str) {
        let longs = FLAGS.iter().map(|flag| flag.long).filter(|long| !long.is_empty());
        let meant = if word.starts_with("--") { config::near(word, longs) } else { None };
        self.error(&match meant {
            Some(meant) => format!("unknown flag {word}; did you mean {meant}?"),
            None => format!("unknown flag {word}; --help lists the flags"),
        });
    }

    /// Closes the rule that the last `-l` began.
    fn finish_rule(&mut self) {
        let Some(draft) = self.draft.take() else { return };
        // Its error is already there.
        let Some(listen) = draft.listen else { return };
        if draft.bad_target {
            return;
        }
        match Rule::new(listen, draft.targets, draft.limits) {
            Ok(rule) => self.rules.push(rule),
            Err(error) => {
                let place = Place::Argument(draft.number);
                self.errors.push(Error::new(place, &draft.token, &error.to_string()));
            }
        }
    }

    fn finish(mut self) -> Result<Command, Vec<Error>> {
        if self.errors.is_empty() {
            match (self.self_test, self.rules.is_empty()) {
                (true, true) => return Ok(Command::SelfTest),
                (true, false) => {
                    self.error_of_all("--selftest takes no rules; leave out -l and -t")
                }
                (false, true) => self.error_of_all(
                    "nothing to forward; give a listener and a target, as in \
                     'tinyfwd -l :8080 -t host:80', or see --help",
                ),
                (false, false) => {
                    return Ok(Command::Run(Settings {
                        rules: self.rules,
                        drain: self.drain,
                        max_connections: self.max_connections,
                        verbosity: self.verbosity,
                    }));
                }
            }
        }
        // A rule is checked when the next begins, after the errors of its parts were noted.
        self.errors.sort_by_key(|error| match error.place() {
            Place::CommandLine => 0,
            Place::Argument(number) => number,
        });
        Err(self.errors)
    }

    /// The value, or its error noted.
    fn kept<T>(&mut self, outcome: Result<T, String>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(reason) => {
                self.error(&reason);
                None
            }
        }
    }

    fn error(&mut self, reason: &str) {
        let error = Error::new(self.place(), &self.token(), reason);
        self.errors.push(error);
    }

    fn error_of_all(&mut self, reason: &str) {
        self.errors.push(Error::new(Place::CommandLine, "", reason));
    }

    fn place(&self) -> Place {
        Place::Argument(self.at + 1)
    }

    /// What was read since the argument began: a flag and its value, in the user's own spelling.
    fn token(&mut self) -> String {
        let end = self.end_index();
        let mut token = String::new();
        for arg in self.args.get(self.at..end).unwrap_or_default() {
            token.push_str(if token.is_empty() { "" } else { " " });
            token.push_str(&arg.to_string_lossy());
        }
        token
    }

    /// Where the next argument begins; unchanged in the middle of one (`-vq`, `--drain=1`).
    fn next_index(&mut self) -> usize {
        let total = self.args.len();
        self.parser.try_raw_args().map_or(self.at, |rest| total - rest.as_slice().len())
    }

    /// Where what was read ends.
    fn end_index(&mut self) -> usize {
        self.next_index().max(self.at + 1)
    }
}

/// More than any machine has descriptors for.
const MOST_CONNECTIONS: u32 = 100_000_000;

/// Columns of the help.
const FLAG_WIDTH: usize = 28;
const OPTION_WIDTH: usize = 19;

const HEAD: &str = "\
Forwards TCP and UDP ports.

Usage: tinyfwd [-o K=V] -l ADDR -t ADDR [-o K=V] [-l ADDR -t ADDR]...

Flags:
";

const ADDRESSES: &str = "
Listeners (-l):
  :80 or *:80        every address, IPv4 and IPv6, with TCP and UDP
  :80/tcp  :53/udp   one protocol
  0.0.0.0:80         every IPv4 address; [::]:80 every IPv6 address
  1.2.3.4:80  [::1]:80  [fe80::1%eth0]:80  name:80
  :8000-8010         a range; :0 any free port, the same for TCP and UDP
Targets (-t):
  host:80  1.2.3.4:80  [::1]:80
  host               the listener's port
  host:9000-9010     for a range: one as long, or one port for all

Options (-o), each with its default:
";

const TAIL: &str = "  TIME is 20, 20s, 500ms, 5m, 2h; SIZE is 4096, 64k, 10M. The last of two wins.

Examples:
  tinyfwd -l :8080 -t host:80
  tinyfwd -l :8080/tcp -t a:80,b:80 -o idle=1h -l :53/udp -t 9.9.9.9:53
  tinyfwd -l :8000-8010 -t host
  tinyfwd -o keepalive=off -l '[::]:2222/tcp' -t 127.0.0.1:22 --drain 1m

Once all is bound, standard error says 'listening on ADDR/PROTOCOL -> TARGET'
for each listener, then 'ready'. RUST_LOG=debug and the like set what is logged.

Signals:
  SIGTERM, SIGINT    stop listening, let connections end; a second: exit at once
  SIGUSR1            log a status line for each rule
  SIGHUP             look all names up anew
Exit codes:
  0 stopped as asked, 1 failed to start or run, 2 wrong arguments
";

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use proptest::prelude::{Strategy, any, prop_oneof, proptest};

    use super::*;
    use crate::rule::{Host, Ports, Protocols};

    fn said(line: &str) -> Result<Command, Vec<Error>> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[track_caller]
    fn settings(line: &str) -> Settings {
        match said(line) {
            Ok(Command::Run(settings)) => settings,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[track_caller]
    fn refused(line: &str, expected: &[&str]) {
        let errors = said(line).unwrap_err();
        let lines: Vec<String> = errors.iter().map(Error::to_string).collect();
        assert_eq!(lines.len(), expected.len(), "{lines:#?}");
        for (line, part) in lines.iter().zip(expected) {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
    }

    fn host(name: &str, port: u16) -> Target {
        Target { host: Host::Name(name.into()), ports: Some(Ports::one(port)) }
    }

    #[test]
    fn a_listener_and_a_target_are_a_rule() {
        let settings = settings("-l :32771 -t host:80");
        assert_eq!(settings.rules.len(), 1);
        assert_eq!(settings.rules[0].listen().to_string(), ":32771");
        assert_eq!(settings.rules[0].listen().protocols, Protocols::Both);
        assert_eq!(settings.rules[0].targets(), [host("host", 80)]);
        assert_eq!(settings.rules[0].limits(), &Limits::default());
        assert_eq!(settings.drain, Duration::from_secs(10));
        assert_eq!(settings.max_connections, None);
        assert_eq!(settings.verbosity, 0);
    }

    #[test]
    fn every_way_to_write_a_flag_means_the_same() {
        let expected = settings("-l :80 -t a:1 -o idle=3");
        assert_eq!(settings("-l:80 -ta:1 -oidle=3"), expected);
        assert_eq!(settings("--listen :80 --target a:1 --option idle=3"), expected);
        assert_eq!(settings("--listen=:80 --target=a:1 --option=idle=3"), expected);
        assert_eq!(settings("-l=:80 -t=a:1 -o=idle=3"), expected);
        assert_eq!(settings("-fl :80 -ft a:1 -f -o idle=3"), expected);
    }

    #[test]
    fn targets_belong_to_the_listener_before_them() {
        let settings = settings("-l :1 -t a:80,b:80 -t c:80 -l :2/udp -t d:53");
        assert_eq!(settings.rules.len(), 2);
        assert_eq!(settings.rules[0].targets(), [host("a", 80), host("b", 80), host("c", 80)]);
        assert_eq!(settings.rules[1].targets(), [host("d", 53)]);
    }

    #[test]
    fn options_belong_to_the_listener_before_them_or_to_all() {
        let settings = settings(
            "-o idle=1,sessions=7 -o idle=2 -l :1 -o sessions=8 -t a:1 -l :2 -t a:2 -o idle=off,idle=3",
        );
        let [first, second] = &settings.rules[..] else { panic!() };
        assert_eq!(first.limits().idle, Some(Duration::from_secs(2)));
        assert_eq!(first.limits().sessions, 8);
        assert_eq!(second.limits().idle, Some(Duration::from_secs(3)));
        assert_eq!(second.limits().sessions, 7);
    }

    #[test]
    fn the_other_flags_are_for_the_whole() {
        let whole = settings("-vvq --max-connections 100 -l :1 --drain 500ms -t a:1 -q -q");
        assert_eq!(whole.verbosity, -1);
        assert_eq!(whole.max_connections, Some(100));
        assert_eq!(whole.drain, Duration::from_millis(500));
        let many = format!("-l :1 -t a:1 -{}", "v".repeat(300));
        assert_eq!(settings(&many).verbosity, i8::MAX);
        assert_eq!(settings("-l :1 -t a:1 --drain 0").drain, Duration::ZERO);
    }

    #[test]
    fn help_and_version_win_over_errors() {
        assert_eq!(said("-h"), Ok(Command::Help));
        assert_eq!(said("-l 80 --nonsense --help"), Ok(Command::Help));
        assert_eq!(said("-vV"), Ok(Command::Version));
        assert_eq!(said("--version"), Ok(Command::Version));
    }

    #[test]
    fn the_self_test_goes_without_rules() {
        assert_eq!(said("--selftest"), Ok(Command::SelfTest));
        assert_eq!(said("-v --selftest"), Ok(Command::SelfTest));
        refused("--selftest -l :1 -t a:1", &["tinyfwd: --selftest takes no rules"]);
    }

    #[test]
    fn no_arguments_say_what_to_give() {
        refused("", &["tinyfwd: nothing to forward; give a listener and a target"]);
        refused("-v", &["--help"]);
        refused("-o idle=1", &["nothing to forward"]);
    }

    #[test]
    fn a_rule_has_both_ends() {
        refused("-l :80", &["tinyfwd: argument 1, '-l :80': the listener has no target"]);
        refused("-t host:80", &["argument 1, '-t host:80': no -l before this target"]);
        refused("-l :1 -l :2 -t a:1", &["argument 1, '-l :1': the listener has no target"]);
        refused("-l :0 -t a", &["'-l :0': the target has no port"]);
        refused("-l :10-20 -t a:1-5", &["5 ports"]);
    }

    #[test]
    fn all_errors_are_told_in_order_each_with_its_place() {
        refused(
            "-l :80 -o idel=3,bad=1 -l 80 -t :80 --listem x -l :1 -t a:1,b:70000 stray",
            &[
                "tinyfwd: argument 1, '-l :80': the listener has no target",
                "tinyfwd: argument 3, '-o idel=3,bad=1': unknown option 'idel'; did you mean 'idle'?",
                "tinyfwd: argument 3, '-o idel=3,bad=1': unknown option 'bad'",
                "tinyfwd: argument 5, '-l 80': the host is missing",
                "tinyfwd: argument 7, '-t :80': the host is missing",
                "tinyfwd: argument 9, '--listem': unknown flag --listem; did you mean --listen?",
                "tinyfwd: argument 13, '-t a:1,b:70000': '70000' is not a port",
                "tinyfwd: argument 15, 'stray': unexpected",
            ],
        );
    }

    #[test]
    fn an_error_in_one_end_is_not_reported_as_its_absence() {
        refused("-l 80 -t host:80", &["'-l 80'"]);
        refused("-l :80 -t host:http", &["'-t host:http'"]);
        refused("-l :80 -t a:1,,b:1", &["a target is HOST:PORT"]);
    }

    #[test]
    fn a_flag_without_its_value_is_told_which() {
        refused("-l :80 -t", &["argument 3, '-t': -t needs a value: -t ADDR[,ADDR...]"]);
        refused("-l -t host:80", &["argument 1, '-l': -l needs a value: -l ADDR"]);
        refused("-l :80 -t a:1 --drain", &["--drain needs a value: --drain TIME"]);
    }

    #[test]
    fn a_flag_that_takes_no_value_refuses_one() {
        refused("--selftest=1", &["argument 1, '--selftest=1': --selftest takes no value"]);
        refused("-v=3 -l :1 -t a:1", &["-v takes no value"]);
    }

    #[test]
    fn an_unknown_flag_takes_its_value_along() {
        refused("-c /etc/tinyfwd.conf", &["argument 1, '-c': unknown flag -c; --help lists"]);
        refused("--config /etc/x", &["'--config': unknown flag --config; --help"]);
        refused("--config=/etc/x", &["unknown flag --config"]);
        refused("--max-connection 3", &["did you mean --max-connections?"]);
        refused("-vx", &["argument 1, '-vx': unknown flag -x"]);
    }

    #[test]
    fn a_stray_word_is_told_where_it_belongs() {
        refused("-l :1 -t a:1 b:1", &["argument 5, 'b:1': unexpected: listeners follow -l"]);
        refused("-l :1 -t a:1 -", &["argument 5, '-': unexpected"]);
        refused("-l :1 -t a:1 -- -v", &["argument 5, '-- -v': unexpected"]);
    }

    #[test]
    fn the_numbers_of_the_whole_have_ranges() {
        refused("-l :1 -t a:1 --max-connections 0", &["'0' is not a number from 1 to 100000000"]);
        refused("-l :1 -t a:1 --drain 25h", &["from 0 to 24h"]);
    }

    #[test]
    fn what_is_not_utf8_is_refused() {
        let bad = || OsString::from_vec(b":8\xff0".to_vec());
        let errors = parse(["-l".into(), bad()]).unwrap_err();
        assert!(errors[0].reason().contains("not UTF-8"), "{errors:?}");
        assert!(parse([bad()]).is_err());
        assert!(parse([OsString::from_vec(b"-\xff".to_vec())]).is_err());
        assert!(parse([OsString::from_vec(b"--\xff=3".to_vec())]).is_err());
    }

    #[test]
    fn the_help_fits_a_terminal_and_names_everything() {
        let help = help();
        for line in help.lines() {
            assert!(line.len() <= 80, "{} columns: {line}", line.len());
            assert_eq!(line.trim_end(), line);
        }
        for flag in &FLAGS {
            assert!(help.contains(flag.short) && help.contains(flag.long));
        }
        for option in &options::TABLE {
            assert!(help.contains(&format!("  {}={} ", option.name, option.value())));
        }
        assert!(help.ends_with('\n'));
    }

    #[test]
    fn the_manual_page_names_everything() {
        let page = include_str!("../scripts/tinyfwd.1").replace("\\-", "-");
        for flag in &FLAGS {
            assert!(page.contains(flag.short), "{}", flag.short);
            assert!(page.contains(flag.long), "{}", flag.long);
        }
        for option in &options::TABLE {
            assert!(page.contains(&format!(".BI {}= ", option.name)), "{}", option.name);
        }
    }

    #[test]
    fn the_examples_of_the_help_are_accepted() {
        let help = help();
        let examples: Vec<&str> =
            help.lines().filter_map(|line| line.strip_prefix("  tinyfwd ")).collect();
        assert!(examples.len() >= 3);
        for example in examples {
            settings(&example.replace('\'', ""));
        }
    }

    proptest! {
        #[test]
        fn no_arguments_panic(args in proptest::collection::vec(
            prop_oneof![
                "-{0,2}[a-z]{0,3}=?.{0,5}",
                ":?[0-9]{0,6}(/tcp)?",
                "(-[ltovqf]|--(listen|target|option|drain|max-connections)=?)",
                "(idle|timeout)=[0-9]{0,3}(ms|s)?",
            ].prop_map(OsString::from).boxed(), 0..8))
        {
            let _ = parse(args);
        }

        #[test]
        fn no_bytes_panic(args in proptest::collection::vec(
            proptest::collection::vec(any::<u8>(), 0..8).prop_map(OsString::from_vec), 0..5))
        {
            let _ = parse(args);
        }
    }
}
