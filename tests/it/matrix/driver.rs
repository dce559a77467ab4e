//! Driver calls that fail: a row for every call that a save or a restore makes, in each phase that makes it. (But `cuEventQuery`, which only a copy that is alone under way is asked of, and that is
//! seldom.)

use super::{Cell, Command, Failing, InForce, PATIENT, Verdict, done, ends, untouched};

/// Codes that the header has, and one that no header has.
pub(super) const ALL: [u32; 11] = [1, 2, 3, 201, 304, 401, 600, 719, 800, 999, 4242];
/// One of either kind, for calls of which nothing is decided by the code.
pub(super) const TWO: [u32; 2] = [719, 4242];
/// To the lock: somebody else was first.
const ILLEGAL_STATE: u32 = 401;
/// How late a late call is.
pub(super) const LATE_MS: u32 = 300;

/// How a call fails.
#[derive(Clone, Copy, Debug)]
pub(super) enum Failure {
    /// It answers one of these codes, and has done nothing.
    Answers(&'static [u32]),
    /// It answers one of these codes, and has done its work.
    Denies(&'static [u32]),
    /// It answers success, and has done nothing.
    Pretends,
    Late,
    /// The target dies just before.
    Death,
}

use Failure::{Answers, Death, Denies, Late, Pretends};

/// A call, how it fails, and what must follow.
pub(super) struct Row {
    /// What ckptstream is about when it makes the call.
    pub(super) made_in: &'static str,
    /// `FUNCTION#K`: the K-th in the life of the process, or every one (`*`).
    pub(super) call: &'static str,
    /// The fault `FUNCTION#K=ACTION` without which the call is not made.
    pub(super) behind: Option<&'static str>,
    pub(super) failure: Failure,
    /// Several where time decides.
    pub(super) expected: Vec<Verdict>,
}

fn row(call: &'static str, failure: Failure, expected: Verdict) -> Row {
    Row {
        made_in: "",
        call,
        behind: None,
        failure,
        expected: vec![expected],
    }
}

/// The same of several calls.
fn rows_of<const N: usize>(
    calls: [&'static str; N],
    failure: Failure,
    expected: Verdict,
) -> Vec<Row> {
    let rows = calls.iter().map(|call| row(call, failure, expected));
    rows.collect()
}

impl Row {
    fn behind(mut self, fault: &'static str) -> Self {
        self.behind = Some(fault);
        self
    }

    fn or(mut self, verdict: Verdict) -> Self {
        self.expected.push(verdict);
        self
    }

    fn function(&self) -> &'static str {
        self.call.split('#').next().expect("a name")
    }

    fn cells(&self, command: Command) -> Vec<Cell> {
        let coded = |action: &str, codes: &[u32]| -> Vec<Cell> {
            let cells = codes.iter().map(|code| {
                let action = format!("{action}:{code}");
                self.cell(command, &action, Some(*code))
            });
            cells.collect()
        };
        match self.failure {
            Answers(codes) => coded("code", codes),
            Denies(codes) => coded("after-code", codes),
            Pretends => coded("code", &[0]),
            Late => vec![self.cell(command, &format!("stall:{LATE_MS}"), None)],
            Death => vec![self.cell(command, "kill-target", None)],
        }
    }

    fn cell(&self, command: Command, action: &str, answer: Option<u32>) -> Cell {
        let fault = format!("{}={action}", self.call);
        let faults = self.behind.into_iter().chain([fault.as_str()]);
        let faults: Vec<String> = faults.map(|fault| format!("fault={fault}")).collect();
        let driver = faults.join(";");
        Cell {
            name: format!("{command:?}, {driver}"),
            command,
            driver,
            config: PATIENT.to_owned(),
            rules: Vec::new(),
            in_force: InForce::FromTheStart,
            failing: Failing::Call {
                function: self.function(),
                answer,
            },
            expected: self.expected.clone(),
            leaves_uploads: false,
        }
    }
}

/// All rows of a command.
pub(super) fn rows(command: Command) -> Vec<Row> {
    let phases = match command {
        Command::Save => vec![
            ("prepare", prepare()),
            ("lock", lock()),
            ("begin", begin()),
            ("stream", stream()),
            ("commit", commit()),
            ("complete", complete()),
        ],
        Command::Restore => vec![
            ("read", read()),
            ("restore", restore()),
            ("copy", copy()),
            ("complete", complete_restore()),
            ("unlock", unlock()),
        ],
    };
    let mut all = Vec::new();
    for (made_in, rows) in phases {
        all.extend(rows.into_iter().map(|row| Row { made_in, ..row }));
    }
    all
}

pub(super) fn cells() -> Vec<Cell> {
    let of = |command: Command| {
        let rows = rows(command);
        let cells = rows.iter().flat_map(|row| row.cells(command));
        cells.collect::<Vec<_>>()
    };
    let mut cells = of(Command::Save);
    cells.extend(of(Command::Restore));
    cells
}

/// Whether a command has a row for this function.
pub(super) fn knows(command: Command, function: &str) -> bool {
    rows(command).iter().any(|row| row.function() == function)
}

const LOCK: &str = "cuCheckpointProcessLock#1";
const CHECKPOINT: &str = "cuCheckpointProcessCheckpoint#1";
const COMPLETE: &str = "cuCheckpointOperationComplete#1";
const RESTORE: &str = "cuCheckpointProcessRestore#1";
const UNLOCK: &str = "cuCheckpointProcessUnlock#1";
/// The looks at the target's state, in order.
const LOOK_1: &str = "cuCheckpointProcessGetState#1";
const LOOK_2: &str = "cuCheckpointProcessGetState#2";
const LOOK_3: &str = "cuCheckpointProcessGetState#3";
const LOOK_4: &str = "cuCheckpointProcessGetState#4";
/// The code's name, for people.
const NAME: &str = "cuGetErrorName#1";

/// The driver is loaded, and its GPUs are looked at.
const OPENING: [&str; 10] = [
    "cuGetProcAddress#*",
    "cuInit#1",
    "cuDriverGetVersion#1",
    "cuDeviceGetCount#1",
    "cuDeviceGet#1",
    "cuDeviceGetName#2",
    "cuDeviceGetPCIBusId#1",
    "cuDeviceGetUuid#2",
    "cuDeviceTotalMem#1",
    "cuDeviceGetAttribute#3",
];

/// The target runs: what is missing can be had first.
fn prepare() -> Vec<Row> {
    let as_found = untouched(3, "prepare", "running");
    let mut rows = rows_of(OPENING, Answers(&TWO), as_found);
    rows.extend([
        row(LOOK_1, Answers(&ALL), as_found),
        row(LOOK_1, Death, untouched(7, "prepare", "gone")),
    ]);
    let refused = ends(3, "prepare", "running");
    rows.extend(rows_of(
        [
            "cuDevicePrimaryCtxRetain#1",
            "cuDevicePrimaryCtxRetain#2",
            // For a look at the memory in use.
            "cuCtxSetCurrent#1",
            "cuMemGetInfo#1",
            // For the rings.
            "cuCtxSetCurrent#3",
            "cuMemHostRegister#1",
            "cuMemHostRegister#2",
            // For the copies.
            "cuCtxSetCurrent#5",
            "cuEventCreate#1",
        ],
        Answers(&TWO),
        refused,
    ));
    rows.extend(rows_of(
        [
            "cuInit#1",
            "cuDevicePrimaryCtxRetain#1",
            "cuMemHostRegister#2",
        ],
        Late,
        done("checkpointed"),
    ));
    rows
}

/// 10 says that the target runs, so it must have been seen to. Only a lock that we got is ours to undo.
fn lock() -> Vec<Row> {
    const NOT_LOCKED: &str = "cuCheckpointProcessLock#1=code:999";
    let ends = |code, found| ends(code, "lock", found);
    vec![
        row(LOCK, Answers(&ALL), ends(10, "running")),
        row(LOCK, Denies(&TWO), ends(12, "locked")),
        row(LOCK, Denies(&[ILLEGAL_STATE]), ends(4, "locked")),
        row(LOCK, Death, ends(7, "gone")),
        row(LOCK, Late, done("checkpointed")),
        // BEGIN finds out.
        row(LOCK, Pretends, super::ends(10, "begin", "running")),
        row(LOOK_2, Answers(&TWO), ends(10, "running")).behind(NOT_LOCKED),
        row(LOOK_2, Death, ends(7, "gone")).behind(NOT_LOCKED),
        row(NAME, Answers(&TWO), ends(10, "running")).behind(NOT_LOCKED),
    ]
}

/// Where the driver refuses, the target's state decides: LOCKED is unlocked; from CHECKPOINTING without a handle there is no way back.
fn begin() -> Vec<Row> {
    const REFUSED: &str = "cuCheckpointProcessCheckpoint#1=code:2";
    let ends = |code, found| ends(code, "begin", found);
    vec![
        row(CHECKPOINT, Answers(&ALL), ends(10, "running")),
        row(CHECKPOINT, Denies(&TWO), ends(12, "checkpointing")),
        row(CHECKPOINT, Pretends, ends(10, "running")),
        row(CHECKPOINT, Death, ends(12, "gone")),
        row(CHECKPOINT, Late, done("checkpointed")),
        row(LOOK_2, Answers(&TWO), ends(10, "running")).behind(REFUSED),
        row(UNLOCK, Answers(&ALL), ends(12, "locked")).behind(REFUSED),
        row(UNLOCK, Denies(&TWO), ends(10, "running")).behind(REFUSED),
        row(UNLOCK, Pretends, ends(12, "locked")).behind(REFUSED),
        row(UNLOCK, Death, ends(7, "gone")).behind(REFUSED),
        row("cuStreamGetCtx#1", Answers(&TWO), ends(12, "checkpointing")),
        row("cuStreamGetCtx#2", Answers(&TWO), ends(12, "checkpointing")),
    ]
}

/// Nothing is kept, and nothing is given up for it.
fn stream() -> Vec<Row> {
    let lost = ends(12, "stream", "checkpointing");
    let mut rows = rows_of(
        [
            // Behind those of the preparations; it binds a thread to its GPU.
            "cuCtxSetCurrent#7",
            "cuMemcpyDtoHAsync#1",
            "cuMemcpyDtoHAsync#4",
            "cuEventRecord#1",
            "cuEventSynchronize#1",
            "cuEventSynchronize#4",
            "cuStreamSynchronize#1",
            "cuStreamSynchronize#2",
        ],
        Answers(&TWO),
        lost,
    );
    for call in ["cuMemcpyDtoHAsync#1", "cuStreamSynchronize#2"] {
        rows.push(row(call, Denies(&TWO), lost));
        rows.push(row(call, Late, done("checkpointed")));
    }
    rows.extend(
        [
            "cuStreamGetCtx#1",
            "cuMemcpyDtoHAsync#1",
            "cuMemcpyDtoHAsync#4",
            "cuEventSynchronize#1",
            "cuStreamSynchronize#2",
        ]
        // The copies fail, or what they brought is void.
        .map(|call| row(call, Death, ends(12, "stream", "gone")).or(ends(12, "commit", "gone"))),
    );
    rows.extend([
        // One look is made again; three that fail leave it unknown.
        row(LOOK_2, Answers(&TWO), lost).behind("cuMemcpyDtoHAsync#1=code:999"),
        row(LOOK_2, Answers(&TWO), lost.unseen()).behind(
            "cuMemcpyDtoHAsync#1=code:999;fault=cuCheckpointProcessGetState#3=code:999;fault=cuCheckpointProcessGetState#4=code:999",
        ),
        // Clean-up that fails takes nothing from the save.
        row("cuEventDestroy#1", Answers(&TWO), done("checkpointed")),
    ]);
    rows
}

/// What was copied counts only if the target lived and stood still all the while.
fn commit() -> Vec<Row> {
    let ends = |code, found| ends(code, "commit", found);
    vec![
        // It is made again.
        row(LOOK_2, Answers(&TWO), done("checkpointed")),
        row(LOOK_2, Answers(&TWO), ends(12, "checkpointing")).behind(
            "cuCheckpointProcessGetState#3=code:999;fault=cuCheckpointProcessGetState#4=code:999",
        ),
        row(LOOK_2, Pretends, ends(12, "checkpointing")),
        row(LOOK_2, Death, ends(12, "gone")),
        row(LOOK_2, Late, done("checkpointed")),
    ]
}

/// The image stands, whatever becomes of the target.
fn complete() -> Vec<Row> {
    const FAILED: &str = "cuCheckpointOperationComplete#1=code:999";
    let ends = |code, found| ends(code, "complete", found);
    vec![
        row(COMPLETE, Answers(&ALL), ends(14, "checkpointing")),
        row(COMPLETE, Denies(&TWO), ends(14, "checkpointed")),
        row(COMPLETE, Pretends, ends(14, "checkpointing")),
        row(COMPLETE, Death, ends(14, "gone")),
        row(COMPLETE, Late, done("checkpointed")),
        row(LOOK_3, Answers(&TWO), ends(14, "checkpointing")).behind(FAILED),
        row(LOOK_3, Answers(&TWO), ends(14, "checkpointed")),
        row(LOOK_3, Death, ends(14, "gone")),
        // Clean-up that fails takes nothing from the save.
        row("cuMemHostUnregister#1", Answers(&TWO), done("checkpointed")),
        row("cuCtxSetCurrent#12", Answers(&TWO), done("checkpointed")),
        // For the report: it was seen CHECKPOINTED before.
        row(LOOK_4, Answers(&TWO), done("checkpointed")),
        row(LOOK_4, Death, ends(14, "gone")),
    ]
}

/// The target is looked at, no more.
fn read() -> Vec<Row> {
    let as_found = untouched(20, "read", "checkpointed");
    let mut rows = rows_of(OPENING, Answers(&TWO), as_found);
    rows.extend([
        row(LOOK_1, Answers(&ALL), as_found),
        row(LOOK_1, Death, untouched(20, "read", "gone")),
    ]);
    rows.extend(rows_of(
        [
            "cuDevicePrimaryCtxRetain#1",
            "cuDevicePrimaryCtxRetain#2",
            // For a look at the free memory.
            "cuCtxSetCurrent#1",
            "cuMemGetInfo#1",
        ],
        Answers(&TWO),
        as_found,
    ));
    rows.extend(rows_of(
        ["cuInit#1", "cuDevicePrimaryCtxRetain#1"],
        Late,
        done("running"),
    ));
    rows
}

/// Until the driver is asked to restore nothing has changed. It is asked once, and from then on the target is to be ended.
fn restore() -> Vec<Row> {
    const REFUSED: &str = "cuCheckpointProcessRestore#1=code:2";
    let mut rows = rows_of(
        [
            // For the rings.
            "cuCtxSetCurrent#3",
            "cuMemHostRegister#1",
            // For the copies.
            "cuCtxSetCurrent#5",
            "cuEventCreate#1",
            "cuStreamCreate#1",
            // For what is fetched.
            "cuCtxSetCurrent#7",
            "cuMemHostRegister#3",
            // For another look at the free memory.
            "cuCtxSetCurrent#8",
            "cuMemGetInfo#3",
        ],
        Answers(&TWO),
        untouched(20, "restore", "checkpointed"),
    );
    let ends = |code, found| ends(code, "restore", found);
    rows.extend([
        row("cuMemHostRegister#3", Late, done("running")),
        row(RESTORE, Answers(&ALL), ends(21, "checkpointed")),
        row(RESTORE, Denies(&TWO), ends(21, "restoring")),
        row(RESTORE, Pretends, ends(21, "checkpointed")),
        row(RESTORE, Death, ends(21, "gone")),
        row(RESTORE, Late, done("running")),
        row(LOOK_2, Answers(&TWO), ends(21, "checkpointed")).behind(REFUSED),
        row(NAME, Answers(&TWO), ends(21, "checkpointed")).behind(REFUSED),
        row("cuStreamGetCtx#1", Answers(&TWO), ends(21, "restoring")),
        row("cuStreamGetCtx#2", Answers(&TWO), ends(21, "restoring")),
    ]);
    rows
}

/// What is not whole is not completed.
fn copy() -> Vec<Row> {
    let half = ends(21, "restore", "restoring");
    let mut rows = rows_of(
        [
            // Behind those of the preparations; it binds a thread to its GPU.
            "cuCtxSetCurrent#10",
            "cuEventRecord#1",
            "cuStreamWaitEvent#1",
            "cuMemcpyHtoDAsync#1",
            "cuMemcpyHtoDAsync#4",
            "cuEventRecord#6",
            "cuEventSynchronize#1",
            "cuEventSynchronize#4",
            "cuStreamSynchronize#1",
            "cuStreamSynchronize#4",
        ],
        Answers(&TWO),
        half,
    );
    for call in ["cuMemcpyHtoDAsync#1", "cuStreamSynchronize#4"] {
        rows.push(row(call, Denies(&TWO), half));
        rows.push(row(call, Late, done("running")));
    }
    rows.extend(
        [
            "cuStreamGetCtx#2",
            "cuMemcpyHtoDAsync#1",
            "cuStreamSynchronize#4",
        ]
        // The copies fail, or Complete does.
        .map(|call| row(call, Death, ends(21, "restore", "gone")).or(ends(21, "complete", "gone"))),
    );
    rows.push(row(LOOK_2, Answers(&TWO), half).behind("cuMemcpyHtoDAsync#1=code:999"));
    // Clean-up that fails takes nothing from the restore.
    rows.extend(rows_of(
        [
            "cuStreamDestroy#1",
            "cuEventDestroy#1",
            "cuMemHostUnregister#1",
            "cuCtxSetCurrent#16",
        ],
        Answers(&TWO),
        done("running"),
    ));
    rows
}

/// A target that has its memory is locked still.
fn complete_restore() -> Vec<Row> {
    const FAILED: &str = "cuCheckpointOperationComplete#1=code:999";
    let ends = |code, found| ends(code, "complete", found);
    vec![
        row(COMPLETE, Answers(&ALL), ends(21, "restoring")),
        row(COMPLETE, Denies(&TWO), ends(21, "locked")),
        row(COMPLETE, Pretends, ends(21, "restoring")),
        row(COMPLETE, Death, ends(21, "gone")),
        row(COMPLETE, Late, done("running")),
        row(LOOK_2, Answers(&TWO), ends(21, "restoring")).behind(FAILED),
        row(LOOK_2, Answers(&TWO), ends(21, "locked")),
        row(LOOK_2, Death, ends(21, "gone")),
    ]
}

/// A target that was let go may come to its end before anybody looks.
fn unlock() -> Vec<Row> {
    const FAILED: &str = "cuCheckpointProcessUnlock#1=code:999";
    let ends = |code, found| ends(code, "unlock", found);
    vec![
        row(UNLOCK, Answers(&ALL), ends(21, "locked")),
        row(UNLOCK, Denies(&TWO), ends(21, "running")),
        row(UNLOCK, Pretends, ends(21, "locked")),
        row(UNLOCK, Death, ends(21, "gone")),
        row(UNLOCK, Late, done("running")),
        row(LOOK_3, Answers(&TWO), ends(21, "locked")).behind(FAILED),
        row(LOOK_3, Answers(&TWO), ends(21, "running")),
        row(LOOK_3, Death, done("gone")),
        // For the report: it was seen RUNNING before.
        row(LOOK_4, Answers(&TWO), done("running")),
        row(LOOK_4, Death, done("gone")),
    ]
}
