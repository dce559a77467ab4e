//! A pid namespace of its own for a tree, so that it can have the same pids on any node.
//!
//! In: a program that is to run in it. Out: the command that makes the namespace, with our own program as its process 1; and what that process is told and tells, over its standard input and a file. What can fail: the system gives no namespace (root, or
//! CAP_SYS_ADMIN, is needed). `unshare` and `nsenter` of util-linux do the work.
//!
//! | process 1 | then |
//! |---|---|
//! | its standard input ends before [`KEEP`] came | ends, and with it everything in the namespace |
//! | the tree's root ends | ends with the same status |

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// What process 1 is told once the tree may stay.
pub const KEEP: &[u8] = b"keep\n";

/// The command that runs `args` of `program` as process 1 of a fresh pid namespace, with a `/proc` of its own.
pub fn process_one(program: &Path, args: &[OsString]) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--"]);
    command.arg(program).args(args);
    command
}
