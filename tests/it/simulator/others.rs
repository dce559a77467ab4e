//! Who reads images and who removes them: an incarnation that goes on with the job, a look at the newest image, `gc`, `prune`.

use std::time::Duration;

use ckptstream::config::RetentionConfig;
use ckptstream::image::{Image, ImageError, ImageRef, list_images};
use ckptstream::job_log::{Entry, JobLog, append};
use ckptstream::ownership::Ownership;
use ckptstream::sealed::Sealed;
use ckptstream::store::{Key, Store, StoreError};
use ckptstream::upkeep::{self, GcOptions, pins};

use super::Rule;
use super::oracle::KEEP;
use super::process::{Journal, Process};
use super::sample::{job, key};

/// How an incarnation is started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Restore {
    /// It asks for an image by its generation, for a fresh process.
    pub(super) is_named: bool,
    /// It looks into the spill, and takes no image when a newer save lies there.
    pub(super) sees_spill: bool,
    pub(super) ends: RestoreEnd,
}

/// How a restore ends that nothing else keeps from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RestoreEnd {
    /// The process runs.
    Runs,
    /// The image turns out to be of no use for it when it runs.
    Bad,
    /// Its GPUs are of no use for the image: exit 20.
    Refused,
    /// It has its memory, and cannot be unlocked: exit 21. `recover` can.
    Locked,
}

/// `restore`, as `src/restore.rs` tells it: chooses, opens the job, chooses again, pins, looks once more, reads.
pub(super) async fn restore(process: Process, how: Restore) {
    let (store, writer) = (&*process.store, &*process.name);
    let Some((wanted, image)) = first_choice(&process, how).await else {
        return;
    };
    let Ok(log) = process.log().await else { return };
    let Ok(mut ours) = Ownership::open(store, job(), writer, log).await else {
        return;
    };
    let taken = pin_what_is_chosen(&process, how, wanted, &mut ours, image).await;
    let done = match &taken {
        Some((image, pin)) => {
            let done = put_back(&process, how, image).await;
            process.delete(pin).await;
            done
        }
        None => PutBack::Not,
    };
    let gives_up = match done {
        PutBack::Not => true,
        PutBack::MayRun => process.breaks(Rule::KeepWhatMayRun),
        PutBack::Runs => process.breaks(Rule::KeepWhatRuns),
    };
    if gives_up {
        // Where it fails the job stays opened, which is safe.
        let _given_up = ours.give_up(store).await;
    }
    if let (PutBack::Runs, RestoreEnd::Bad, Some((image, _))) = (done, how.ends, &taken) {
        let bad = Entry::Bad {
            writer: writer.to_owned(),
            generation: image.generation,
        };
        // Who cannot say it leaves the image to the next one, which finds out the same.
        let _said = append(store, job(), 1, &bad, &|_there| false).await;
    }
}

async fn first_choice(process: &Process, how: Restore) -> Option<(ImageRef, Image)> {
    let mut wanted = ImageRef::Latest;
    if how.is_named {
        let log = JobLog::read(&*process.store, job()).await.ok()?;
        let images = log.images();
        if !images.is_empty() {
            wanted = ImageRef::Generation(images[process.draw(images.len())].0);
        }
    }
    let image = choose(process, how, wanted).await?;
    Some((wanted, image))
}

async fn choose(process: &Process, how: Restore, wanted: ImageRef) -> Option<Image> {
    let store = &*process.store;
    if how.sees_spill && !how.is_named {
        let sealed = Sealed::all(&process.spill, job()).await.ok()?;
        let log = JobLog::read(store, job()).await.ok()?;
        if sealed.iter().any(|sealed| sealed.is_ahead_of(&log)) {
            return None;
        }
    }
    let (image, _) = Image::open(store, job(), wanted).await.ok()?;
    Some(image)
}

/// What was committed until the job was opened is seen now; nothing is later.
async fn pin_what_is_chosen(
    process: &Process,
    how: Restore,
    wanted: ImageRef,
    ours: &mut Ownership,
    mut image: Image,
) -> Option<(Image, Key)> {
    let store = &*process.store;
    let newest = ours.log().images().first().map(|(newest, _)| *newest);
    let has_grown = newest.is_some_and(|newest| newest != image.generation);
    if wanted == ImageRef::Latest && has_grown && !process.breaks(Rule::ChooseAgain) {
        image = choose(process, how, wanted).await?;
    }
    let pin = pins::pin(store, job(), &image.attempt).await.ok()?;
    if process.breaks(Rule::LookAgain) {
        return Some((image, pin));
    }
    let looked = ours.must_be_ours(store).await;
    if looked.is_err() || looked.is_ok_and(|log| log.is_dropped(&image.attempt)) {
        process.delete(&pin).await;
        return None;
    }
    Some((image, pin))
}

/// What became of a process that was to get its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PutBack {
    /// It never runs with this image.
    Not,
    /// It has all of it, and whoever unlocks it lets it run.
    MayRun,
    Runs,
}

async fn put_back(process: &Process, how: Restore, image: &Image) -> PutBack {
    if how.ends == RestoreEnd::Refused {
        return PutBack::Not;
    }
    // Every chunk is verified before the driver is asked, and read again.
    for moment in ["verifies", "asks the driver"] {
        process.step(moment).await;
        if read_all(process, image).await.is_none() {
            return PutBack::Not;
        }
    }
    let locked = Journal::Restore {
        writer: process.name.to_string(),
        generation: image.generation,
        is_named: how.is_named,
    };
    process.node.journals.borrow_mut().push(locked.clone());
    process.step("unlocks").await;
    if how.ends == RestoreEnd::Locked {
        return PutBack::MayRun;
    }
    process
        .node
        .journals
        .borrow_mut()
        .retain(|left| *left != locked);
    let generation = image.generation;
    process.say(&format!("restored image {generation}"), |oracle| {
        oracle.restored(&process.name, generation, how.is_named);
    });
    PutBack::Runs
}

/// Everything that lies under an image. It was made sure of, so it must be there.
async fn read_all(process: &Process, image: &Image) -> Option<()> {
    for extent in image.manifest.extents() {
        let objects = [
            (&extent.object.key, extent.object.len),
            (&extent.table.key, extent.table.len),
        ];
        for (relative, len) in objects {
            let (place, mut bytes) = (key(relative), vec![0; usize::try_from(len).ok()?]);
            let read = process.store.get_range(&place, 0..len, None, &mut bytes);
            let read = read.await;
            if read.as_ref().is_err_and(StoreError::is_about_the_object) {
                process.say("misses an object", |oracle| {
                    oracle.read_nothing(&process.name, relative);
                });
            }
            read.ok()?;
        }
    }
    Some(())
}

/// Looks for the newest image, and at the list of all.
pub(super) async fn look(process: Process) {
    let store = &*process.store;
    let mut before = Vec::new();
    process.say("looks", |oracle| before.extend(oracle.live_images()));
    let found = Image::open(store, job(), ImageRef::Latest).await;
    let found = match found {
        Ok((image, _)) => Some(image.generation),
        Err(ImageError::Unreachable { .. }) => return,
        Err(_) => None,
    };
    process.say(&format!("finds {found:?}"), |oracle| {
        oracle.looked(&before, found);
    });
    let mut before = Vec::new();
    process.say("lists", |oracle| before.extend(oracle.live_images()));
    let Ok(list) = list_images(store, job()).await else {
        return;
    };
    let usable = |standing| standing == ckptstream::image::Standing::Usable;
    let newest = list.images.iter().find(|image| usable(image.standing));
    let newest = newest.map(|image| image.generation);
    process.say(&format!("lists {newest:?} first"), |oracle| {
        oracle.looked(&before, newest);
    });
}

fn retention() -> RetentionConfig {
    RetentionConfig {
        keep: u32::try_from(KEEP).expect("a small number"),
        grace: Duration::ZERO,
        older_than: Duration::ZERO,
    }
}

/// `gc` of everything, however young: what keeps a save from it is the log alone.
pub(super) async fn gc(process: Process, spilled: bool) {
    let done = if process.breaks(Rule::DroppedBeforeData) {
        remove_at_once(&process).await
    } else if process.breaks(Rule::GcLooks) {
        drop_blindly(&process).await
    } else {
        let options = GcOptions {
            spilled,
            dry_run: false,
        };
        let done = upkeep::gc_job(&*process.store, job(), &retention(), options).await;
        done.ok().map(drop)
    };
    process.say(&format!("ends: {}", told(done)), |_| {});
}

/// `prune`, without a grace.
pub(super) async fn prune(process: Process) {
    let done = if process.breaks(Rule::PruneLooksForPins) {
        prune_unasked(&process).await
    } else if process.breaks(Rule::PruneKnowsItsImages) {
        prune_what_came_later(&process).await
    } else {
        let done = upkeep::prune_job(&*process.store, job(), &retention(), false).await;
        done.ok().map(drop)
    };
    process.say(&format!("ends: {}", told(done)), |_| {});
}

fn told(done: Option<()>) -> &'static str {
    match done {
        Some(()) => "done",
        None => "not done",
    }
}

/// A `gc` that takes what is no image, and says so to nobody.
async fn remove_at_once(process: &Process) -> Option<()> {
    let log = JobLog::read(&*process.store, job()).await.ok()?;
    for attempt in process.attempts().await? {
        if !log.is_image(&attempt) {
            process.empty(&attempt).await?;
        }
    }
    Some(())
}

/// A `gc` that gives up what was no image when it looked, whatever it meets on the way.
async fn drop_blindly(process: &Process) -> Option<()> {
    let store = &*process.store;
    let log = JobLog::read(store, job()).await.ok()?;
    for attempt in process.attempts().await? {
        if !log.is_image(&attempt) {
            drop_it(process, &log, &attempt).await?;
            process.empty(&attempt).await?;
        }
    }
    Some(())
}

/// A `prune` that does not ask who reads.
async fn prune_unasked(process: &Process) -> Option<()> {
    let log = JobLog::read(&*process.store, job()).await.ok()?;
    let kept = Process::newest(&log, KEEP);
    for attempt in process.attempts().await? {
        if log.is_image(&attempt) && !kept.contains(&attempt) {
            drop_it(process, &log, &attempt).await?;
            process.empty(&attempt).await?;
        }
    }
    Some(())
}

/// A `prune` that takes an image that was committed while it worked for an old one.
async fn prune_what_came_later(process: &Process) -> Option<()> {
    let store = &*process.store;
    let mut log = JobLog::read(store, job()).await.ok()?;
    let kept = Process::newest(&log, KEEP);
    for attempt in process.attempts().await? {
        log.read_on(store, job()).await.ok()?;
        if log.is_image(&attempt) && !log.is_dropped(&attempt) && !kept.contains(&attempt) {
            drop_it(process, &log, &attempt).await?;
        }
    }
    Some(())
}

async fn drop_it(process: &Process, log: &JobLog, attempt: &str) -> Option<()> {
    let dropped = Entry::Dropped {
        writer: process.name.to_string(),
        attempt: attempt.to_owned(),
    };
    let appended = append(
        &*process.store,
        job(),
        log.next_slot(),
        &dropped,
        &|_there| false,
    );
    appended.await.ok().map(|_slot| ())
}
