//! Requests to the store that fail: a site for every kind of request that a save or a restore makes, in each phase that makes it.

use serde_json::{Value, json};

use super::{Cell, Command, Failing, InForce, PATIENT, Verdict, done, ends, untouched};

/// What the store does instead of answering.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    /// 403: for good.
    Refused,
    Internal,
    SlowDown,
    /// 200, and an error document.
    ErrorBody,
    /// 200, and nothing.
    EmptyBody,
    /// The answer's body ends early.
    Cut,
    /// The connection is reset within a body; closed where there is none.
    Reset,
    Stalled,
    /// Done, and not answered.
    AnswerLost,
}

/// In the order of the document's columns, with what stands above them.
pub(super) const FAULTS: [(Fault, &str); 9] = [
    (Fault::Refused, "403"),
    (Fault::Internal, "500"),
    (Fault::SlowDown, "503 SlowDown"),
    (Fault::ErrorBody, "200, error body"),
    (Fault::EmptyBody, "200, empty body"),
    (Fault::Cut, "answer cut"),
    (Fault::Reset, "connection reset"),
    (Fault::Stalled, "no answer"),
    (Fault::AnswerLost, "done, answer lost"),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Times {
    Once,
    Always,
}

/// Bytes of a body that pass before its fault.
const PASSING_LEN: u32 = 20;

impl Fault {
    /// The server's action; none where requests of this kind cannot fail so.
    fn action(self, op: &str) -> Option<Value> {
        let is_sent = ["PutObject", "UploadPart", "CompleteMultipartUpload"].contains(&op);
        let is_answered = [
            "GetObject",
            "CreateMultipartUpload",
            "CompleteMultipartUpload",
        ]
        .contains(&op);
        let wire = |kind: &str, of: &str| json!({"wire": kind, "of": of, "bytes": PASSING_LEN});
        let action = match self {
            Self::Refused => json!({"status": 403, "code": "AccessDenied"}),
            Self::Internal => json!({"status": 500, "code": "InternalError"}),
            Self::SlowDown => json!({"status": 503, "code": "SlowDown"}),
            Self::ErrorBody => json!({"status": 200, "code": "InternalError"}),
            Self::EmptyBody => json!({"status": 200, "empty": true}),
            Self::Cut if is_answered => wire("cut-after", "response"),
            Self::Cut => return None,
            Self::Reset if is_sent => wire("reset-after", "request"),
            Self::Reset if is_answered => wire("reset-after", "response"),
            Self::Reset => json!({"drop": true}),
            Self::Stalled => json!({"stall": true}),
            Self::AnswerLost => json!({"apply": true, "drop": true}),
        };
        Some(action)
    }
}

/// Requests of one kind.
pub(super) struct Site {
    pub(super) command: Command,
    /// What ckptstream is about when it makes them.
    pub(super) made_in: &'static str,
    pub(super) op: &'static str,
    /// A part of their keys.
    key: &'static str,
    /// What they are for.
    pub(super) what: &'static str,
    /// The first one that fails, from 1.
    first: u32,
    in_force: InForce,
    /// Settings of the driver, and further lines of the configuration, that they take.
    driver: &'static str,
    config: &'static str,
    /// They are made because the first answer to the commit was lost.
    is_behind_lost_commit: bool,
    /// What follows when the store refuses, when another fault stays, and when it passes.
    refused: Verdict,
    stays: Verdict,
    passes: Verdict,
}

const fn site(
    command: Command,
    made_in: &'static str,
    op: &'static str,
    key: &'static str,
    what: &'static str,
) -> Site {
    let verdict = match command {
        Command::Save => done("checkpointed"),
        Command::Restore => done("running"),
    };
    Site {
        command,
        made_in,
        op,
        key,
        what,
        first: 1,
        in_force: InForce::FromTheStart,
        driver: "",
        config: "",
        is_behind_lost_commit: false,
        refused: verdict,
        stays: verdict,
        passes: verdict,
    }
}

/// Before the lock: the target runs on. A refusal says what to mend.
const fn before_lock(op: &'static str, key: &'static str, what: &'static str) -> Site {
    Site {
        refused: ends(3, "prepare", "running"),
        stays: ends(10, "prepare", "running"),
        ..site(Command::Save, "prepare", op, key, what)
    }
}

/// After BEGIN and before the commit: nothing is kept, and nothing is given up for it.
const fn after_begin(
    made_in: &'static str,
    op: &'static str,
    key: &'static str,
    what: &'static str,
) -> Site {
    let lost = ends(12, made_in, "checkpointing");
    Site {
        refused: lost,
        stays: lost,
        ..site(Command::Save, made_in, op, key, what)
    }
}

/// The commit, and what is asked about it: rules count requests for the log from the copying on, and so no earlier ones.
const fn at_commit(op: &'static str, what: &'static str) -> Site {
    Site {
        in_force: InForce::FromTheStream,
        // Time to put the rules in force.
        driver: "d2h=3MiB",
        stays: ends(13, "commit", "checkpointing"),
        ..after_begin("commit", op, "/log/", what)
    }
}

/// Before the driver is asked to restore: the target stays as it was found.
const fn before_restore(
    made_in: &'static str,
    op: &'static str,
    key: &'static str,
    what: &'static str,
) -> Site {
    let refused = untouched(20, made_in, "checkpointed");
    Site {
        refused,
        stays: refused,
        ..site(Command::Restore, made_in, op, key, what)
    }
}

/// The objects of the GPUs' memory.
const DATA: &str = ".zst";
/// Reads of an object before those of its chunks: one for each seek table.
const SEEK_TABLES: u32 = 2;

pub(super) const SITES: [Site; 25] = [
    before_lock("PutObject", "/attempt.json", "claim"),
    before_lock("PutObject", "/contest", "creates at once"),
    before_lock("GetObject", "/log/", "log"),
    before_lock("ListObjectsV2", "", "log of a job that has none yet"),
    before_lock("PutObject", "/log/", "log entries before the lock"),
    before_lock("CreateMultipartUpload", DATA, "upload of a GPU"),
    Site {
        // What becomes of clean-up changes no verdict.
        driver: "fault=cuCheckpointProcessLock#1=code:999",
        refused: ends(10, "lock", "running"),
        stays: ends(10, "lock", "running"),
        passes: ends(10, "lock", "running"),
        ..site(
            Command::Save,
            "lock, which failed",
            "AbortMultipartUpload",
            DATA,
            "upload of a GPU",
        )
    },
    after_begin("stream", "UploadPart", DATA, "data"),
    after_begin("land", "CompleteMultipartUpload", DATA, "data"),
    after_begin("land", "HeadObject", DATA, "data"),
    after_begin("commit", "PutObject", ".frames.json", "frame table"),
    after_begin("commit", "PutObject", "/manifest.json", "manifest"),
    at_commit("PutObject", "log entry: the commit"),
    Site {
        is_behind_lost_commit: true,
        // A refusal to show the entry says nothing about it.
        refused: ends(13, "commit", "checkpointing"),
        ..at_commit("GetObject", "log entry whose answer was lost")
    },
    before_restore("read", "GetObject", "/log/", "log"),
    before_restore("read", "PutObject", "/log/", "log entry that opens the job"),
    before_restore("read", "PutObject", "/pins/", "pin"),
    before_restore("read", "GetObject", "/manifest.json", "manifest"),
    before_restore("read", "HeadObject", DATA, "data"),
    before_restore("read", "GetObject", ".frames.json", "frame table"),
    // What cannot be deleted ages.
    site(Command::Restore, "unlock", "DeleteObject", "/pins/", "pin"),
    before_restore("read", "GetObject", DATA, "seek table"),
    Site {
        first: SEEK_TABLES + 1,
        config: "[restore]\nverify = \"all\"\n",
        ..before_restore("read", "GetObject", DATA, "data, restore.verify = all")
    },
    Site {
        first: SEEK_TABLES + 1,
        ..before_restore("restore", "GetObject", DATA, "data")
    },
    Site {
        // The driver is asked once one GPU has its first chunk.
        first: SEEK_TABLES + 2,
        refused: ends(21, "restore", "restoring"),
        stays: ends(21, "restore", "restoring"),
        ..before_restore("copy", "GetObject", DATA, "data of one GPU of two")
    },
];

impl Site {
    /// What must follow.
    pub(super) fn expected(&self, fault: Fault, times: Times) -> Vec<Verdict> {
        let is_answer_lost = matches!(fault, Fault::Cut | Fault::AnswerLost);
        match (fault, times) {
            // The other GPU's first chunk may not be there yet.
            (Fault::Refused, _) if self.made_in == "copy" => {
                vec![untouched(20, "restore", "checkpointed"), self.refused]
            }
            (Fault::Refused, _) => vec![self.refused],
            (_, Times::Once) => vec![self.passes],
            // The object is there, which a look shows.
            _ if is_answer_lost && self.op == "CompleteMultipartUpload" => vec![self.passes],
            (_, Times::Always) => vec![self.stays],
        }
    }

    /// Whether it does otherwise than it should: it takes an answer for the store's that is not, leaves the upload open, and does not tell of it.
    pub(super) fn leaves_uploads(&self, fault: Fault) -> bool {
        self.op == "AbortMultipartUpload" && fault == Fault::EmptyBody
    }

    /// Whether requests of this kind can fail so.
    pub(super) fn has(&self, fault: Fault) -> bool {
        fault.action(self.op).is_some()
    }

    fn cell(&self, (fault, name): (Fault, &str), times: Times) -> Option<Cell> {
        let action = fault.action(self.op)?;
        let mut rules = Vec::new();
        if self.is_behind_lost_commit {
            let action = json!({"apply": true, "drop": true});
            rules.push(
                json!({"op": "PutObject", "key_contains": "/log/", "nth": 1, "action": action}),
            );
        }
        let when = match times {
            Times::Once => "nth",
            Times::Always => "from",
        };
        rules.push(
            json!({"op": self.op, "key_contains": self.key, when: self.first, "action": action}),
        );
        let Self {
            command, op, what, ..
        } = self;
        let patience = match times {
            Times::Once => PATIENT,
            Times::Always => IMPATIENT,
        };
        Some(Cell {
            name: format!("{command:?} {op} {what} {name} {times:?}"),
            command: *command,
            driver: self.driver.to_owned(),
            config: format!("{patience}{}", self.config),
            rules,
            in_force: self.in_force,
            failing: Failing::Request,
            expected: self.expected(fault, times),
            leaves_uploads: self.leaves_uploads(fault),
        })
    }
}

/// For faults that stay.
const IMPATIENT: &str = "retry_timeout = \"1s\"\n";

pub(super) fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    // Those first that take longest.
    for times in [Times::Always, Times::Once] {
        for fault in FAULTS.into_iter().rev() {
            cells.extend(SITES.iter().filter_map(|site| site.cell(fault, times)));
        }
    }
    cells
}

/// Whether a command has a site for such a request.
pub(super) fn knows(command: Command, op: &str, key: &str) -> bool {
    SITES
        .iter()
        .any(|site| site.command == command && site.op == op && key.contains(site.key))
}
