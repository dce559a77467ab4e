//! What ties a tree to processes beside it, so that CRIU does not take it as it stands: TCP connections, a session whose leader is elsewhere.
//!
//! In: the tree, `[host]`. Out: nothing, or the first tie that is found ([`Tied`]), before anything is locked. What cannot be looked at is left to CRIU, which says so when the tree is dumped.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::ProcessTree;
use crate::config::{HostConfig, TcpPolicy};
use crate::target::Target;

/// States of a socket that is no connection: closed, and listening (`include/net/tcp_states.h`).
const NO_CONNECTION: [&str; 2] = ["07", "0A"];

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum Tied {
    /// A connection that is not to be saved.
    #[error(
        "process {pid} ({name}) of the tree has a TCP connection to {peer}, which is not saved: have it closed first, or say what becomes of it with host.tcp = \"close\" or \"established\""
    )]
    Tcp {
        /// Whose it is.
        pid: u32,
        /// Its command name.
        name: String,
        /// The other end.
        peer: SocketAddr,
    },
    /// Somebody else's session.
    #[error(
        "process {pid}, the tree's root, belongs to the session of process {leader}, which is not of the tree: start it with setsid, or set host.shell_job = true"
    )]
    Session {
        /// The root.
        pid: u32,
        /// The session's leader.
        leader: u32,
    },
}

/// Nothing ties the tree that `[host]` does not speak of.
///
/// # Errors
/// [`Tied`].
pub fn must_stand_alone(tree: &ProcessTree, host: &HostConfig) -> Result<(), Tied> {
    let root = tree.root();
    // In a namespace above ours it has no number that we know.
    let leader = root.session().filter(|leader| *leader != 0);
    if let Some(leader) = leader.filter(|leader| *leader != root.pid && !host.shell_job) {
        let pid = root.pid;
        return Err(Tied::Session { pid, leader });
    }
    if host.tcp != TcpPolicy::Refuse {
        return Ok(());
    }
    let mut processes = tree.processes().iter();
    match processes.find_map(connection) {
        Some(tied) => Err(tied),
        None => Ok(()),
    }
}

/// A TCP connection that the process has open.
fn connection(process: &Target) -> Option<Tied> {
    let peers = peers(process.pid);
    let open = fs::read_dir(format!("/proc/{}/fd", process.pid)).ok()?;
    let mut open = open.flatten().filter_map(|entry| {
        let link = fs::read_link(entry.path()).ok()?;
        let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        peers.get(inode).copied()
    });
    open.next().map(|peer| Tied::Tcp {
        pid: process.pid,
        name: process.name.clone(),
        peer,
    })
}

/// The other ends of the connections in a process's network namespace, by their sockets' inodes.
fn peers(pid: u32) -> BTreeMap<String, SocketAddr> {
    let mut peers = BTreeMap::new();
    for table in ["tcp", "tcp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        peers.extend(text.lines().skip(1).filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (peer, state, inode) = (fields.get(2)?, fields.get(3)?, fields.get(9)?);
            let is_one = !NO_CONNECTION.contains(state);
            let peer = address(peer).filter(|_| is_one)?;
            Some(((*inode).to_owned(), peer))
        }));
    }
    peers
}

/// An address as the kernel prints it: words in the byte order of this machine, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words: Option<Vec<[u8; 4]>> = ip
        .as_bytes()
        .chunks(8)
        .map(|word| {
            let word = std::str::from_utf8(word).ok()?;
            Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
        })
        .collect();
    let bytes = words?.concat();
    let ip = match bytes.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        _ => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)).to_canonical(),
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, Signal, kill_process};
    use std::io::{BufRead, BufReader};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::process::{Child, Command, Stdio};

    struct Sleeping(Child);

    impl Sleeping {
        fn with(socket: impl Into<OwnedFd>) -> Self {
            let mut command = Command::new("sleep");
            command.arg("60").stdin(Stdio::from(socket.into()));
            Self(command.spawn().unwrap())
        }

        fn tied(&self, host: &HostConfig) -> Option<String> {
            let tree = ProcessTree::look(self.0.id()).unwrap();
            let tied = must_stand_alone(&tree, host).err();
            tied.map(|tied| tied.to_string())
        }
    }

    impl Drop for Sleeping {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn a_connection_is_named_unless_it_is_spoken_of_and_a_listener_is_none() {
        let in_session = HostConfig {
            shell_job: true,
            ..HostConfig::default()
        };
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(at) else {
                // Not every machine has IPv6.
                assert_eq!(at, "[::1]:0");
                continue;
            };
            let peer = listener.local_addr().unwrap();
            let connected = TcpStream::connect(peer).unwrap();
            let tied = Sleeping::with(connected).tied(&in_session).unwrap();
            assert!(
                tied.contains(&format!("connection to {peer}")) && tied.contains("host.tcp"),
                "{tied}"
            );
            assert_eq!(Sleeping::with(listener).tied(&in_session), None);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let closes = HostConfig {
            tcp: TcpPolicy::Close,
            ..in_session
        };
        assert_eq!(Sleeping::with(connected).tied(&closes), None);
    }

    #[test]
    fn a_session_of_elsewhere_is_named() {
        // Our own session's leader may be out of sight, so there is one of our making.
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", "sleep 60 & echo $!; read forever"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut leader = Sleeping(command.spawn().unwrap());
        let mut told = String::new();
        let mut out = BufReader::new(leader.0.stdout.take().unwrap());
        out.read_line(&mut told).unwrap();
        let pid: u32 = told.trim().parse().unwrap();
        let tree = ProcessTree::look(pid).unwrap();
        let tied = must_stand_alone(&tree, &HostConfig::default());
        let in_session = HostConfig {
            shell_job: true,
            ..HostConfig::default()
        };
        let spoken_of = must_stand_alone(&tree, &in_session);
        let target = i32::try_from(pid).ok().and_then(Pid::from_raw).unwrap();
        kill_process(target, Signal::KILL).unwrap();
        let tied = tied.unwrap_err().to_string();
        let named = format!("session of process {}", leader.0.id());
        assert!(
            tied.contains(&named) && tied.contains("setsid") && tied.contains("host.shell_job"),
            "{tied}"
        );
        assert!(spoken_of.is_ok(), "{spoken_of:?}");
    }
}
