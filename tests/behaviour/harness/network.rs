//! A network of a test's own: only a loopback interface, and no way to anywhere else.

use std::panic;
use std::process::Command;
use std::thread;

use nix::sched::{CloneFlags, unshare};

use super::available;

/// Runs `test`, and what it starts, in a new network whose loopback interface is up; says what is
/// skipped where the machine does not allow that.
#[track_caller]
pub fn in_own_network(test: impl FnOnce() + Send) {
    // On a thread of its own: the one that the test runs on may run others after it.
    let ended = thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let unshared = unshare(CloneFlags::CLONE_NEWNET).is_ok();
            if available(unshared, "a network namespace (root)") {
                ip("link set lo up");
                test();
            }
        });
        thread.join()
    });
    if let Err(cause) = ended {
        panic::resume_unwind(cause);
    }
}

/// Changes the network that this thread is in, with the arguments of ip(8).
#[track_caller]
pub fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().expect("ip runs");
    assert!(status.success(), "ip {arguments}");
}
