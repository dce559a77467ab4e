//! What a whole tree's GPUs held, sealed in the store, back into that very tree: its save broke off before the host memory was there.
//!
//! In: the pid of the tree's root, or of one of its processes that use GPUs; the journals that the saver has left. Out: the tree runs. What exists if we fail:
//!
//! | step | the tree | the attempt | exit |
//! |---|---|---|---|
//! | find, check, verify | as found, but that it is not stopped any more | sealed | 20; 4 when the job lives elsewhere |
//! | restore and stream | RESTORING: to be ended | sealed | 21 |
//! | give the attempt up in the job's log | LOCKED, with its memory; `recover` unlocks it | sealed, or given up | 21 |
//! | unlock | runs, or LOCKED | given up | 0, or 21 |

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use super::read::{Which, load_nowhere, load_plan, outcome_of};
use super::{Ways, bring_back, not_ours, refused, take_custody};
use crate::checkpoint::look;
use crate::custody::Custody;
use crate::driver::{CheckpointedProcess, Driver};
use crate::error::{ExitCode, Failure, Phase, one_line};
use crate::host::ProcessTree;
use crate::image::Image;
use crate::job_log::{Entry, JobLog, append_dropped};
use crate::journal::{self, Found, Step};
use crate::outcome::Outcome;
use crate::ownership::OwnershipError;
use crate::phases::PhaseClock;
use crate::sealed::Sealed;
use crate::session::Session;
use crate::target::Target;
use crate::writer::random_hex;

/// The log has to hear that the attempt is given up before the tree runs; the tree stands still meanwhile.
const LOGGED_WITHIN: Duration = Duration::from_secs(30);

/// A tree whose save broke off behind the seal, by what its saver wrote down.
#[derive(Debug)]
pub(super) struct SealedTree {
    attempt: String,
    next_slot: u64,
    root: (u32, u64),
}

/// The tree that this process is of, if its save is sealed and was not committed.
pub(super) fn find(session: &Session, pid: u32) -> Option<SealedTree> {
    let there = Target::look(pid).ok()?;
    let found = journal::all(&session.config.state_dir()).ok()?;
    found.into_iter().find_map(|found| {
        let Found::Dead(left) = found else {
            return None;
        };
        let mut tree = None;
        let mut attempt = None;
        let (mut is_sealed, mut is_committed) = (false, false);
        for step in &left.steps {
            match step {
                Step::Attempt {
                    attempt: of,
                    next_slot,
                } => attempt = Some((of.clone(), *next_slot)),
                Step::Tree { root, root_start } => tree = Some((*root, *root_start)),
                Step::Sealed => is_sealed = true,
                Step::Committed { .. } => is_committed = true,
                _ => {}
            }
        }
        let ((attempt, next_slot), root) = attempt.zip(tree)?;
        let is_asked_for = left.head.target.is(&there) || root == (there.pid, there.start_time);
        let is_ours = left.head.job == session.config.job.as_str();
        (is_asked_for && is_ours && is_sealed && !is_committed).then_some(SealedTree {
            attempt,
            next_slot,
            root,
        })
    })
}

/// Why the tree does not get its memory back.
#[derive(Debug, thiserror::Error)]
enum SealedTreeError {
    #[error(
        "the journal says that attempt {attempt} is sealed, and the store has no sealed.json of it"
    )]
    NotThere { attempt: String },
    #[error(
        "attempt {attempt} was given up in the job's log, and the tree is not what it was then"
    )]
    GivenUp { attempt: String },
    #[error("attempt {attempt} became an image, which is restored without --pid; end this tree")]
    Committed { attempt: String },
    #[error("the tree of process {pid} is not there any more")]
    NoTree { pid: u32 },
    #[error("process {pid} of the tree is not there any more")]
    Gone { pid: u32 },
}

/// Gives the tree its GPU memory back, and lets it run.
pub(super) fn give_back(
    session: &Session,
    clock: &mut PhaseClock,
    tree: &SealedTree,
) -> Result<Outcome, Failure> {
    let refused = |cause: Box<dyn Error + Send + Sync>| refused(Phase::Read, cause);
    let image = open(session, tree)?;
    let custodies = take_all(session, tree, &image)?;
    let done = (|| {
        let driver = Driver::open().map_err(|error| refused(error.into()))?;
        let suspended = suspended(tree, &driver, &custodies).map_err(refused)?;
        load_nowhere(session, &image).map_err(|error| refused(error.into()))?;
        let processes = custodies.iter().zip(suspended).collect();
        let mut give_up = || gives_up(session, tree);
        let loaded = bring_back(
            session,
            clock,
            &driver,
            processes,
            &image,
            Ways::STAY,
            Some(&mut give_up),
        )?;
        let targets = custodies.iter();
        let targets = targets.map(|custody| look(&driver, &custody.target));
        Ok(Outcome {
            // There is none, and there will be none.
            image: String::new(),
            stages: loaded.stages,
            slowest_stage: loaded.slowest_stage,
            memory_planned: load_plan(session, &image, Which::Gpus)
                .map_or(0, |plan| plan.total_bytes),
            ..outcome_of(session, &image, targets.collect(), Vec::new())
        })
    })();
    let code = ExitCode::of(&done);
    for custody in custodies {
        // What was not asked of the driver can be tried again.
        custody.end(match code {
            ExitCode::RestoreRefused => ExitCode::HostMemoryNotSaved,
            code => code,
        });
    }
    done
}

/// What is sealed, if the job is still where it was.
fn open(session: &Session, tree: &SealedTree) -> Result<Image, Failure> {
    let (store, job, attempt) = (&*session.store, &session.config.job, &tree.attempt);
    let refused = |cause: Box<dyn Error + Send + Sync>| refused(Phase::Read, cause);
    let read = session.wait(async {
        futures::join!(Sealed::read(store, job, attempt), JobLog::read(store, job))
    });
    let sealed = read.0.map_err(|error| refused(error.into()))?;
    let log = read.1.map_err(|error| refused(error.into()))?;
    let attempt = attempt.clone();
    let sealed = match sealed {
        Some(sealed) => sealed,
        None => return Err(refused(SealedTreeError::NotThere { attempt }.into())),
    };
    if log.is_dropped(&attempt) {
        return Err(refused(SealedTreeError::GivenUp { attempt }.into()));
    }
    let is_image = |entry: &Entry| matches!(entry, Entry::Image(image) if image.attempt == attempt);
    if log.entries().any(|(_, entry)| is_image(entry)) {
        return Err(refused(SealedTreeError::Committed { attempt }.into()));
    }
    if let Some((slot, there)) = log.opened_by_another(tree.next_slot, &attempt) {
        return Err(not_ours(OwnershipError::Fenced {
            job: job.to_string(),
            slot,
            what: there.describe(),
        }));
    }
    let image = session.wait(Image::open_sealed(store, job, &sealed.entry));
    image.map_err(|error| refused(error.into()))
}

/// Every process of the image, taken in hand, with what `recover` has to know of it.
fn take_all(session: &Session, tree: &SealedTree, image: &Image) -> Result<Vec<Custody>, Failure> {
    let mut custodies: Vec<Custody> = Vec::new();
    let steps = [
        Step::Attempt {
            attempt: tree.attempt.clone(),
            next_slot: tree.next_slot,
        },
        Step::Tree {
            root: tree.root.0,
            root_start: tree.root.1,
        },
        Step::Sealed,
        Step::GiveBack,
    ];
    for saved in &image.manifest.processes {
        let taken = take_custody(session, saved.pid).and_then(|custody| {
            let is_it = custody.target.start_time == saved.start_time
                && custody.target.boot_id == image.manifest.host.boot_id;
            let noted = match is_it {
                true => steps
                    .iter()
                    .try_for_each(|step| custody.step(step))
                    .map_err(Into::into),
                false => Err(SealedTreeError::Gone { pid: saved.pid }.into()),
            };
            match noted {
                Ok(()) => Ok(custody),
                Err(cause) => {
                    custody.end(ExitCode::HostMemoryNotSaved);
                    Err(refused(Phase::Read, cause))
                }
            }
        });
        match taken {
            Ok(custody) => custodies.push(custody),
            Err(failure) => {
                for custody in custodies {
                    custody.end(ExitCode::HostMemoryNotSaved);
                }
                return Err(failure);
            }
        }
    }
    Ok(custodies)
}

/// The tree goes on, so that the driver's own threads in it do; then all must be suspended.
fn suspended(
    tree: &SealedTree,
    driver: &Arc<Driver>,
    custodies: &[Custody],
) -> Result<Vec<CheckpointedProcess>, Box<dyn Error + Send + Sync>> {
    let (pid, start_time) = tree.root;
    let there = ProcessTree::look(pid)?;
    if there.root().start_time != start_time {
        return Err(SealedTreeError::NoTree { pid }.into());
    }
    driver.require_custom_storage()?;
    there.go_on()?;
    let mut suspended = Vec::with_capacity(custodies.len());
    for custody in custodies {
        suspended.push(CheckpointedProcess::attach(driver, custody.target.pid)?);
    }
    driver.retain_contexts()?;
    Ok(suspended)
}

/// Nobody is to take for the job's state what it is about to compute on from. Whether the log says so.
fn gives_up(session: &Session, tree: &SealedTree) -> bool {
    let (store, job) = (&*session.store_after_begin, &session.config.job);
    let nonce = random_hex::<16>();
    let giving_up = append_dropped(store, job, tree.next_slot, &nonce, &tree.attempt);
    let given_up = session.wait(async { tokio::time::timeout(LOGGED_WITHIN, giving_up).await });
    match given_up {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => {
            tracing::error!(
                "the attempt is not given up in the job's log: {}",
                one_line(&error)
            );
            false
        }
        Err(_elapsed) => false,
    }
}
