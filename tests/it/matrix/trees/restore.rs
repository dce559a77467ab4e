//! What fails in the restore of a tree: none of it is left, and the image is none the worse.

use super::Call::{Answers, Death, Denies, Pretends};
use super::RequestFault::{AnswerLost, Refused};
use super::{BOTH, Call, RequestFault, STREAMED};
use super::{
    Command, Criu, CriuDenies, CriuFails, CriuPretends, Driver, Request, Row, Site, Verdict, done,
    ends, of_phases, row, site, untold,
};

const ODD: u32 = 4242;
const GONE: [&str; 2] = ["gone"; 2];
const BACK: Verdict = done(["running"; 2]);

/// The driver was not asked for anything but states.
const fn before(phase: &'static str) -> Verdict {
    untold(20, phase, GONE)
}

const fn after(phase: &'static str) -> Verdict {
    ends(21, phase, GONE)
}

pub(super) fn rows() -> Vec<Row> {
    let mut all = of_phases([
        ("read", read()),
        ("rebuild", rebuild()),
        ("restore", restore()),
        ("unlock", unlock()),
    ]);
    all.extend(requests());
    let command = Command::Restore;
    all.into_iter().map(|row| Row { command, ..row }).collect()
}

/// Nothing is made yet.
fn read() -> Vec<Row> {
    let refused = before("read");
    vec![
        row(BOTH, Driver("cuInit#1", Answers(ODD)), refused),
        row(
            STREAMED,
            Driver("cuDevicePrimaryCtxRetain#2", Answers(ODD)),
            refused,
        ),
        row(STREAMED, Driver("cuMemGetInfo#1", Answers(ODD)), refused),
    ]
}

/// CRIU makes it.
fn rebuild() -> Vec<Row> {
    let refused = before("restore");
    let criu = |how| Criu("restore", how);
    vec![
        row(BOTH, criu(CriuFails), refused),
        row(BOTH, criu(CriuDenies), refused),
        row(BOTH, criu(CriuPretends), refused),
        row(
            STREAMED,
            Driver("cuMemHostRegister#2", Answers(ODD)),
            refused,
        ),
        row(
            BOTH,
            Driver("cuCheckpointProcessGetState#1", Answers(ODD)),
            refused,
        ),
        row(
            BOTH,
            Driver("cuCheckpointProcessGetState#2", Answers(ODD)),
            refused,
        ),
        row(
            BOTH,
            Driver("cuCheckpointProcessGetState#2", Death),
            refused,
        ),
    ]
}

/// A call for the first process, and the same for the second.
fn each_way(first: &'static str, second: &'static str) -> [(&'static str, Call); 6] {
    [
        (first, Answers(ODD)),
        (first, Denies(ODD)),
        (second, Answers(ODD)),
        (second, Denies(ODD)),
        (second, Pretends),
        (second, Death),
    ]
}

/// The driver is asked once, and from then on the tree is to be ended.
fn restore() -> Vec<Row> {
    let failed = after("restore");
    let mut rows = Vec::new();
    for (call, how) in each_way(
        "cuCheckpointProcessRestore#1",
        "cuCheckpointProcessRestore#2",
    ) {
        rows.push(row(BOTH, Driver(call, how), failed));
    }
    for (call, how) in [
        ("cuMemcpyHtoDAsync#1", Answers(ODD)),
        ("cuMemcpyHtoDAsync#3", Denies(ODD)),
        ("cuEventRecord#1", Answers(ODD)),
        ("cuStreamSynchronize#1", Answers(ODD)),
        ("cuStreamSynchronize#3", Denies(ODD)),
    ] {
        rows.push(row(STREAMED, Driver(call, how), failed));
    }
    // The copies fail, or Complete does.
    rows.push(row(STREAMED, Driver("cuMemcpyHtoDAsync#1", Death), failed).or(after("complete")));
    for (call, how) in each_way(
        "cuCheckpointOperationComplete#1",
        "cuCheckpointOperationComplete#2",
    ) {
        rows.push(row(STREAMED, Driver(call, how), after("complete")));
    }
    rows
}

/// One that was let go may come to its end before anybody looks.
fn unlock() -> Vec<Row> {
    let failed = after("unlock");
    let mut rows = Vec::new();
    for (call, how) in each_way("cuCheckpointProcessUnlock#1", "cuCheckpointProcessUnlock#2") {
        rows.push(row(BOTH, Driver(call, how), failed));
    }
    rows.extend([
        row(
            BOTH,
            Driver("cuCheckpointProcessGetState#5", Answers(ODD)),
            failed,
        ),
        row(
            BOTH,
            Driver("cuCheckpointProcessGetState#5", Death),
            done(["gone", "running"]),
        ),
        // For the report.
        row(
            BOTH,
            Driver("cuCheckpointProcessGetState#7", Answers(ODD)),
            BACK,
        ),
    ]);
    rows
}

const READ: [Site; 7] = [
    site("GetObject", "/log/", 1, "log"),
    site("PutObject", "/log/", 1, "log entry that opens the job"),
    site("PutObject", "/pins/", 1, "pin"),
    site("GetObject", "/manifest.json", 1, "manifest"),
    site(
        "GetObject",
        "/host-files.json",
        1,
        "list of the tree's files",
    ),
    site("HeadObject", "/host-", 1, "data of the tree"),
    site("GetObject", "/host-", 1, "frame table of the tree"),
];
const READ_GPUS: [Site; 2] = [
    site("HeadObject", "/gpu-", 2, "data of a GPU"),
    site("GetObject", "/gpu-", 2, "frame table of a GPU"),
];
/// Behind its table, and its seek table, which is read in two.
const REBUILD: [Site; 1] = [site("GetObject", "/host-", 4, "data of the tree")];
/// Behind three of either.
const REBUILD_GPUS: [Site; 1] = [site("GetObject", "/gpu-", 7, "data of a GPU")];

/// What cannot be read keeps the tree from being made, or ends it.
fn requests() -> Vec<Row> {
    let (unread, unmade) = (before("read"), before("restore"));
    let mut rows = Vec::new();
    for (modes, made_in, verdict, sites) in [
        (BOTH, "read", unread, &READ[..]),
        (STREAMED, "read", unread, &READ_GPUS),
        (BOTH, "rebuild", unmade, &REBUILD),
        (STREAMED, "rebuild", unmade, &REBUILD_GPUS),
    ] {
        let made = |modes, fault: RequestFault, verdict| {
            let requests = sites.iter().map(move |site| Request(*site, fault));
            let rows = requests.map(move |fault| row(modes, fault, verdict));
            rows.map(move |row| Row { made_in, ..row })
        };
        rows.extend(made(modes, Refused, verdict));
        // As in a save.
        rows.extend(made(STREAMED, AnswerLost, BACK));
    }
    // What cannot be deleted ages.
    rows.push(Row {
        made_in: "unlock",
        ..row(
            BOTH,
            Request(site("DeleteObject", "/pins/", 1, "pin"), Refused),
            BACK,
        )
    });
    rows
}
