//! What fails in the save of a tree. 10 says that what there is of the tree runs, which was looked up; a process that died by itself took with it what was its own.

use super::Call::{Answers, Death, Denies, Pretends};
use super::RequestFault::{AnswerLost, AnswersLost, Refused, Unreachable};
use super::{BOTH, RequestFault, STAGED, STREAMED};
use super::{
    Command, Criu, CriuDenies, CriuFails, CriuFault, CriuPretends, Driver, Request, Row, Site,
    Verdict, done, ends, of_phases, row, site, untold,
};

/// No code of the header: nothing is decided by it.
const ODD: u32 = 4242;
/// To the lock: somebody else was first.
const ILLEGAL_STATE: u32 = 401;

const RUNNING: [&str; 2] = ["running"; 2];
const SUSPENDED: [&str; 2] = ["checkpointed"; 2];
const MAPPED: [&str; 2] = ["checkpointing"; 2];

const LOCK_1: &str = "cuCheckpointProcessLock#1";
const LOCK_2: &str = "cuCheckpointProcessLock#2";
const CHECKPOINT_1: &str = "cuCheckpointProcessCheckpoint#1";
const CHECKPOINT_2: &str = "cuCheckpointProcessCheckpoint#2";
const COMPLETE_1: &str = "cuCheckpointOperationComplete#1";
const COMPLETE_2: &str = "cuCheckpointOperationComplete#2";
/// Of a tree that is given back what is sealed.
const COMPLETE_3: &str = "cuCheckpointOperationComplete#3";
const COMPLETE_4: &str = "cuCheckpointOperationComplete#4";
const RESTORE_1: &str = "cuCheckpointProcessRestore#1";
const RESTORE_2: &str = "cuCheckpointProcessRestore#2";
const UNLOCK_1: &str = "cuCheckpointProcessUnlock#1";
const UNLOCK_2: &str = "cuCheckpointProcessUnlock#2";
/// The looks at the states: each of four processes is asked whether it uses GPUs, then the two that do (5, 6), then the four again, locked (10).
const LOOKS: &str = "cuCheckpointProcessGetState#*";
const LOOK_5: &str = "cuCheckpointProcessGetState#5";
const LOOK_6: &str = "cuCheckpointProcessGetState#6";
/// Staged: behind the copy of each to its host memory. Streamed: before the seal, and behind each Complete.
const LOOK_11: &str = "cuCheckpointProcessGetState#11";
const LOOK_12: &str = "cuCheckpointProcessGetState#12";
const LOOK_13: &str = "cuCheckpointProcessGetState#13";

/// The tree was ended, as asked.
const ENDED: Verdict = untold(0, "", ["gone"; 2]);

pub(super) fn rows() -> Vec<Row> {
    let mut all = of_phases([
        ("prepare", prepare()),
        ("lock", lock()),
        ("begin", begin()),
        ("stream, seal", stream_and_seal()),
        ("complete, before the dump", complete()),
        ("dump", dump()),
        ("give back", give_back()),
        ("resume", resume()),
    ]);
    all.extend(requests());
    all
}

/// The tree is untouched.
fn prepare() -> Vec<Row> {
    let refused = untold(3, "prepare", RUNNING);
    vec![
        row(BOTH, Driver("cuInit#1", Answers(ODD)), refused),
        row(BOTH, Driver(LOOKS, Answers(ODD)), refused),
        row(BOTH, Driver(LOOK_5, Answers(ODD)), refused),
        row(BOTH, Driver(LOOK_6, Answers(ODD)), refused),
        row(
            BOTH,
            Driver(LOOK_5, Death),
            untold(10, "prepare", ["gone", "running"]),
        ),
        row(
            BOTH,
            Driver("cuDevicePrimaryCtxRetain#2", Answers(ODD)),
            refused,
        ),
        row(
            STREAMED,
            Driver("cuMemHostRegister#2", Answers(ODD)),
            refused,
        ),
    ]
}

/// Only locks that we got are undone, and all of them.
fn lock() -> Vec<Row> {
    let ends = |code, found| ends(code, "lock", found);
    let late = |found| super::ends(10, "begin", found);
    let not_locked = Driver(LOCK_2, Answers(ODD));
    let mut rows = vec![
        row(BOTH, Driver(LOCK_1, Answers(ODD)), ends(10, RUNNING)),
        row(BOTH, Driver(LOCK_2, Answers(ODD)), ends(10, RUNNING)),
    ];
    for (call, locked, gone) in [
        (LOCK_1, ["locked", "running"], ["gone", "running"]),
        (LOCK_2, ["running", "locked"], ["running", "gone"]),
    ] {
        rows.extend([
            row(BOTH, Driver(call, Denies(ODD)), ends(12, locked)),
            row(BOTH, Driver(call, Denies(ILLEGAL_STATE)), ends(4, locked)),
            row(BOTH, Driver(call, Death), ends(10, gone)),
            // Found out at BEGIN.
            row(BOTH, Driver(call, Pretends), late(RUNNING)),
        ]);
    }
    let locked = ends(12, ["locked", "running"]);
    rows.extend([
        row(BOTH, Driver(UNLOCK_1, Answers(ODD)), locked).behind(not_locked),
        row(BOTH, Driver(UNLOCK_1, Denies(ODD)), ends(10, RUNNING)).behind(not_locked),
        row(BOTH, Driver(UNLOCK_1, Pretends), locked).behind(not_locked),
        row(BOTH, Driver(UNLOCK_1, Death), ends(10, ["gone", "running"])).behind(not_locked),
    ]);
    rows
}

/// Staged, everything has a way back. Streamed, what was begun is sealed and given back; CHECKPOINTING without a handle has no way back. One that is locked is innocent.
fn begin() -> Vec<Row> {
    let ends = |code, found| ends(code, "begin", found);
    let back = ends(10, RUNNING);
    let refused = Driver(CHECKPOINT_2, Answers(ODD));
    vec![
        row(BOTH, Driver(CHECKPOINT_1, Answers(ODD)), back),
        row(BOTH, Driver(CHECKPOINT_2, Answers(ODD)), back),
        row(STAGED, Driver(CHECKPOINT_1, Denies(ODD)), back),
        row(STAGED, Driver(CHECKPOINT_2, Denies(ODD)), back),
        row(
            STREAMED,
            Driver(CHECKPOINT_1, Denies(ODD)),
            ends(12, ["checkpointing", "running"]),
        ),
        row(
            STREAMED,
            Driver(CHECKPOINT_2, Denies(ODD)),
            ends(12, ["running", "checkpointing"]),
        ),
        row(BOTH, Driver(CHECKPOINT_1, Pretends), back),
        row(BOTH, Driver(CHECKPOINT_2, Pretends), back),
        row(
            BOTH,
            Driver(CHECKPOINT_1, Death),
            ends(10, ["gone", "running"]),
        ),
        row(
            BOTH,
            Driver(CHECKPOINT_2, Death),
            ends(10, ["running", "gone"]),
        ),
        row(STAGED, Driver(LOOK_11, Answers(ODD)), back),
        row(STAGED, Driver(LOOK_12, Answers(ODD)), back),
        // Its handle is lost.
        row(
            STREAMED,
            Driver("cuStreamGetCtx#1", Answers(ODD)),
            ends(12, ["checkpointing", "running"]),
        ),
        row(
            STAGED,
            Driver(RESTORE_1, Answers(ODD)),
            ends(12, ["checkpointed", "running"]),
        )
        .behind(refused),
        row(
            STREAMED,
            Driver(RESTORE_1, Answers(ODD)),
            ends(12, ["checkpointed", "running"]),
        )
        .behind(refused),
        row(
            STREAMED,
            Driver(RESTORE_1, Denies(ODD)),
            ends(12, ["restoring", "running"]),
        )
        .behind(refused),
        row(
            STREAMED,
            Driver(COMPLETE_1, Answers(ODD)),
            ends(12, ["checkpointing", "running"]),
        )
        .behind(refused),
    ]
}

/// Nothing is kept, and nothing is given up for it. What was copied counts only if all lived and stood still.
fn stream_and_seal() -> Vec<Row> {
    let lost = ends(12, "stream", MAPPED);
    let void = |found| ends(12, "seal", found);
    let copies = ["cuMemcpyDtoHAsync#1", "cuMemcpyDtoHAsync#4"];
    let mut rows: Vec<Row> = copies
        .into_iter()
        .chain([
            "cuEventRecord#1",
            "cuStreamSynchronize#1",
            "cuStreamSynchronize#3",
        ])
        .map(|call| row(STREAMED, Driver(call, Answers(ODD)), lost))
        .collect();
    rows.push(row(STREAMED, Driver(copies[1], Denies(ODD)), lost));
    // Which of the two dies is not said.
    let (first, second) = (["gone", "checkpointing"], ["checkpointing", "gone"]);
    rows.push(
        row(
            STREAMED,
            Driver(copies[0], Death),
            ends(12, "stream", first),
        )
        .or(ends(12, "stream", second))
        .or(void(first))
        .or(void(second)),
    );
    rows.extend([
        // It is looked at again.
        row(STREAMED, Driver(LOOK_11, Answers(ODD)), ENDED),
        row(STREAMED, Driver(LOOK_11, Pretends), void(MAPPED)),
        row(STREAMED, Driver(LOOK_12, Pretends), void(MAPPED)),
        row(STREAMED, Driver(LOOK_11, Death), void(first)),
        row(STREAMED, Driver(LOOK_12, Death), void(second)),
    ]);
    rows
}

/// It is tried on every one. Where all are suspended, what is sealed can be put back; where one is not, or has died, not.
fn complete() -> Vec<Row> {
    let ends = |code, found| ends(code, "seal", found);
    let mut rows = Vec::new();
    for (call, astray, gone) in [
        (
            COMPLETE_1,
            ["checkpointing", "checkpointed"],
            ["gone", "checkpointed"],
        ),
        (
            COMPLETE_2,
            ["checkpointed", "checkpointing"],
            ["checkpointed", "gone"],
        ),
    ] {
        rows.extend([
            row(STREAMED, Driver(call, Answers(ODD)), ends(12, astray)),
            row(STREAMED, Driver(call, Denies(ODD)), ends(16, SUSPENDED)),
            row(STREAMED, Driver(call, Pretends), ends(12, astray)),
            row(STREAMED, Driver(call, Death), ends(12, gone)),
        ]);
    }
    rows.push(row(
        STREAMED,
        Driver(LOOK_13, Answers(ODD)),
        ends(16, SUSPENDED),
    ));
    rows
}

/// CRIU may have done what it says that it has not, or the other way round.
fn dump() -> Vec<Row> {
    let ends = |code, found| ends(code, "dump", found);
    let dump = |how| Criu("dump", how);
    vec![
        row(BOTH, dump(CriuFails), ends(10, RUNNING)),
        row(BOTH, dump(CriuFault::FailsOnce), ENDED),
        row(BOTH, dump(CriuDenies), ends(10, RUNNING)),
        row(BOTH, dump(CriuPretends), ends(10, RUNNING)),
        row(
            STAGED,
            dump(CriuFault::Death),
            ends(10, ["gone", "running"]),
        ),
        // What is sealed is of both.
        row(
            STREAMED,
            dump(CriuFault::Death),
            ends(12, ["gone", "checkpointed"]),
        ),
    ]
}

/// Each is asked once. Nobody runs before all have their memory.
fn give_back() -> Vec<Row> {
    let ends = |code, found| ends(code, "dump", found);
    let calls = vec![
        row(
            STAGED,
            Driver(RESTORE_1, Answers(ODD)),
            ends(12, ["checkpointed", "locked"]),
        ),
        row(
            STAGED,
            Driver(RESTORE_2, Answers(ODD)),
            ends(12, ["locked", "checkpointed"]),
        ),
        row(
            STAGED,
            Driver(RESTORE_1, Denies(ODD)),
            ends(12, ["locked", "locked"]),
        ),
        row(
            STAGED,
            Driver(RESTORE_1, Death),
            ends(10, ["gone", "running"]),
        ),
        row(
            STAGED,
            Driver(RESTORE_2, Death),
            ends(10, ["running", "gone"]),
        ),
        row(
            STREAMED,
            Driver(RESTORE_1, Answers(ODD)),
            ends(16, SUSPENDED),
        ),
        row(
            STREAMED,
            Driver(RESTORE_2, Answers(ODD)),
            ends(12, ["restoring", "checkpointed"]),
        ),
        row(
            STREAMED,
            Driver(RESTORE_1, Denies(ODD)),
            ends(12, ["restoring", "checkpointed"]),
        ),
        row(
            STREAMED,
            Driver(RESTORE_1, Death),
            ends(12, ["gone", "checkpointed"]),
        ),
        row(
            STREAMED,
            Driver(RESTORE_2, Death),
            ends(12, ["restoring", "gone"]),
        ),
        row(
            STREAMED,
            Driver("cuMemcpyHtoDAsync#1", Answers(ODD)),
            ends(12, ["restoring"; 2]),
        ),
        row(
            STREAMED,
            Driver(COMPLETE_3, Answers(ODD)),
            ends(12, ["restoring"; 2]),
        ),
        row(
            STREAMED,
            Driver(COMPLETE_4, Answers(ODD)),
            ends(12, ["locked", "restoring"]),
        ),
        row(
            STREAMED,
            Driver(COMPLETE_4, Death),
            ends(12, ["locked", "gone"]),
        ),
        row(
            BOTH,
            Driver(UNLOCK_1, Answers(ODD)),
            ends(12, ["locked", "running"]),
        ),
        row(
            BOTH,
            Driver(UNLOCK_2, Answers(ODD)),
            ends(12, ["running", "locked"]),
        ),
        row(BOTH, Driver(UNLOCK_1, Denies(ODD)), ends(10, RUNNING)),
        row(
            BOTH,
            Driver(UNLOCK_1, Pretends),
            ends(12, ["locked", "running"]),
        ),
        row(BOTH, Driver(UNLOCK_1, Death), ends(10, ["gone", "running"])),
        // Nothing was asked of the driver: another time it may be read.
        row(
            STREAMED,
            Request(
                site("GetObject", "/gpu-", 1, "data that is sealed"),
                Refused,
            ),
            ends(16, SUSPENDED),
        ),
    ];
    let fails = Criu("dump", CriuFails);
    calls.into_iter().map(|row| row.behind(fails)).collect()
}

/// The image stands, whatever becomes of the tree.
fn resume() -> Vec<Row> {
    let restore = |found| ends(14, "restore", found);
    let calls = vec![
        row(
            STAGED,
            Driver(RESTORE_1, Answers(ODD)),
            restore(["checkpointed", "locked"]),
        ),
        row(
            STAGED,
            Driver(RESTORE_2, Denies(ODD)),
            restore(["locked", "locked"]),
        ),
        row(
            STAGED,
            Driver(UNLOCK_1, Answers(ODD)),
            restore(["locked", "running"]),
        ),
        row(
            STREAMED,
            Driver(RESTORE_1, Answers(ODD)),
            restore(SUSPENDED),
        ),
        row(
            STREAMED,
            Driver(RESTORE_2, Denies(ODD)),
            restore(["restoring"; 2]),
        ),
        row(
            STREAMED,
            Driver(COMPLETE_3, Answers(ODD)),
            ends(14, "complete", ["restoring"; 2]),
        ),
        row(
            STREAMED,
            Driver(UNLOCK_1, Answers(ODD)),
            ends(14, "unlock", ["locked", "running"]),
        ),
        row(BOTH, Criu("dump", CriuFault::FailsOnce), done(RUNNING)),
    ];
    let command = Command::SaveInPassing;
    calls
        .into_iter()
        .map(|row| Row { command, ..row })
        .collect()
}

const PREPARE: [Site; 6] = [
    site("PutObject", "/attempt.json", 1, "claim"),
    site("PutObject", "/contest", 1, "creates at once"),
    site("GetObject", "/log/", 1, "log"),
    site("PutObject", "/log/", 1, "log entry that opens the job"),
    site("PutObject", "/log/", 2, "log entry that announces the save"),
    site("CreateMultipartUpload", "/host-", 1, "upload of the tree"),
];
const PREPARE_GPUS: [Site; 1] = [site("CreateMultipartUpload", "/gpu-", 2, "upload of a GPU")];
const STREAM: [Site; 1] = [site("UploadPart", "/gpu-", 2, "data of a GPU")];
const LAND_GPUS: [Site; 2] = [
    site("CompleteMultipartUpload", "/gpu-", 3, "data of a GPU"),
    site("HeadObject", "/gpu-", 1, "data of a GPU"),
];
const GPU_TABLE: Site = site("PutObject", "/gpu-", 2, "frame table of a GPU");
const SEALED_MANIFEST: Site = site(
    "PutObject",
    "/manifest.sealed.json",
    1,
    "manifest of what is sealed",
);
const SEAL: Site = site("PutObject", "/sealed.json", 1, "seal");
const SEAL_LOOK: Site = site("GetObject", "/sealed.json", 1, "seal");
const DUMP: [Site; 1] = [site("UploadPart", "/host-", 1, "data of the tree")];
const LAND_TREE: [Site; 2] = [
    site("CompleteMultipartUpload", "/host-", 1, "data of the tree"),
    site("HeadObject", "/host-", 1, "data of the tree"),
];
const TREE_TABLE: Site = site("PutObject", "/host-", 1, "frame table of the tree");
const FILES: Site = site(
    "PutObject",
    "/host-files.json",
    1,
    "list of the tree's files",
);
const MANIFEST: Site = site("PutObject", "/manifest.json", 1, "manifest");
/// Behind the one that opens the job, and the one that announces the save.
const COMMIT: Site = site("PutObject", "/log/", 3, "log entry: the commit");

/// Before the lock, a refusal says what to mend; then, until the seal, nothing is kept; from there on (and staged, all the while) the tree is given back.
fn requests() -> Vec<Row> {
    let refused = untold(3, "prepare", RUNNING);
    let lost = |phase| ends(12, phase, MAPPED);
    let back = |phase| ends(10, phase, RUNNING);
    let unknown = ends(13, "commit", SUSPENDED);
    let mut rows = Vec::new();
    for (modes, made_in, verdict, sites) in [
        (BOTH, "prepare", refused, &PREPARE[..]),
        (STREAMED, "prepare", refused, &PREPARE_GPUS),
        (STREAMED, "stream", lost("stream"), &STREAM),
        (STREAMED, "land", lost("land"), &LAND_GPUS),
        (
            STREAMED,
            "seal",
            lost("seal"),
            &[GPU_TABLE, SEALED_MANIFEST, SEAL],
        ),
        (BOTH, "dump", back("dump"), &DUMP),
        (BOTH, "land", back("land"), &LAND_TREE),
        (
            BOTH,
            "commit",
            back("commit"),
            &[TREE_TABLE, FILES, MANIFEST, COMMIT],
        ),
    ] {
        let made = |modes, fault: RequestFault, verdict| {
            let requests = sites.iter().map(move |site| Request(*site, fault));
            let rows = requests.map(move |fault| row(modes, fault, verdict));
            rows.map(move |row| Row { made_in, ..row })
        };
        rows.extend(made(modes, Refused, verdict));
        // The requests are made and settled alike in both ways, so one of them stands for both.
        rows.extend(made(STREAMED, AnswerLost, ENDED));
    }
    let sealing = [
        // Whether it is sealed is not known, so that it must not be completed.
        row(STREAMED, Request(SEAL, Unreachable), lost("seal")),
        row(STREAMED, Request(SEAL_LOOK, Refused), lost("seal")).behind(Request(SEAL, AnswersLost)),
        // A look shows that it is.
        row(STREAMED, Request(SEAL, AnswersLost), ENDED),
    ];
    let committing = [
        row(STAGED, Request(COMMIT, AnswerLost), ENDED),
        row(BOTH, Request(MANIFEST, AnswersLost), back("commit")),
        row(BOTH, Request(COMMIT, Unreachable), unknown),
        row(BOTH, Request(COMMIT, AnswersLost), unknown),
    ];
    rows.extend(sealing.map(|row| Row {
        made_in: "seal",
        ..row
    }));
    let made_in = "commit";
    rows.extend(committing.map(|row| Row { made_in, ..row }));
    rows
}
