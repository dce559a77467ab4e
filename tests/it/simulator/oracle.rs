//! What must hold, whatever happens: seen from above, with everything that the store did and everything that anybody said.
//!
//! In: what was put and deleted, in order; what processes say when they end or act on it. Out: the first [`Violation`]. It looks at consequences only, never at how a process came by them.

use std::collections::{HashMap, HashSet};
use std::fmt;

use bytes::Bytes;
use ckptstream::job_log::{Entry, ImageEntry};
use ckptstream::sealed::Sealed;
use ckptstream::store::memory::MemoryStore;
use ckptstream::store::{Key, Store};

use super::sample::{self, Sample};
use super::world::now;

/// Images that prune must leave.
pub(super) const KEEP: usize = 2;

/// What must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Wrong {
    /// A slot of the log changed, was emptied, or one before it is free.
    LogChanged,
    /// Two entries make an image of one attempt.
    Twice,
    /// An image of an attempt that was given up before.
    ImageOfGivenUp,
    /// An image of a writer after somebody else opened the job.
    ImageOfFenced,
    /// An image of an attempt whose saver said that there is none, and that there will be none.
    ImageAgainstWord,
    /// An image of a job that ran on.
    ImageOfRunning,
    /// An older save became an image after a newer one.
    SetBack,
    /// An image that nobody gave up lacks bytes.
    DataGone,
    /// Bytes are gone from under a restore that had made sure of them.
    ReadGone,
    /// A saver said that there is an image, and there is none.
    NoImage,
    /// The driver was told that it may let its memory go, and no image is committed and no save sealed.
    CompletedForNothing,
    /// Somebody restored an image although there was a newer one when they opened the job.
    OlderRestored,
    /// Somebody restored for good without having opened the job, or an image that was made after that.
    RestoredUnopened,
    /// An image was given up that is one of the newest.
    NewestDropped,
    /// Somebody who looked for the newest image found an older one, or none.
    WentBack,
    /// A sealed save that nothing speaks against is no image after a resume.
    Stranded,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) wrong: Wrong,
    pub(super) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.wrong, self.what)
    }
}

/// What was said of an attempt that is to be no image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    NoImage,
    RunsOn,
}

/// See the module.
#[derive(Default)]
pub(super) struct Oracle {
    /// Slot 1 first.
    log: Vec<Entry>,
    words: HashMap<String, Word>,
    /// Attempts that were sealed at any time.
    sealed: HashSet<String>,
    /// Writers that went on with the job from an image.
    restored: HashSet<String>,
    violation: Option<Violation>,
    /// How often what happened: a run in which nothing happens proves nothing.
    seen: HashMap<&'static str, u64>,
}

impl Oracle {
    pub(super) fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    pub(super) fn seen(&self) -> &HashMap<&'static str, u64> {
        &self.seen
    }

    pub(super) fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// Only the first counts: what follows from it is no news.
    pub(super) fn must(&mut self, holds: bool, wrong: Wrong, what: impl FnOnce() -> String) {
        if !holds && self.violation.is_none() {
            let what = what();
            self.violation = Some(Violation { wrong, what });
        }
    }

    /// The store has a new object, or one that was another before.
    pub(super) fn was_put(&mut self, store: &MemoryStore, key: &Key, body: &Bytes) {
        let Some(slot) = slot_of(key) else { return };
        let entry: Entry = serde_json::from_slice(body).expect("an entry");
        let free = self.log.len() + 1;
        self.must(slot == free, Wrong::LogChanged, || {
            format!("slot {slot} was written; {free} is the first free one")
        });
        match &entry {
            Entry::Image(image) => self.became_image(store, image),
            Entry::Dropped { attempt, .. } => self.was_dropped(attempt),
            Entry::Open { .. } => self.count("opened"),
            Entry::Saving(_) => self.count("announced"),
            Entry::Bad { .. } => self.count("called bad"),
            _ => {}
        }
        self.log.push(entry);
    }

    /// The store lost an object.
    pub(super) fn was_deleted(&mut self, key: &Key) {
        self.must(slot_of(key).is_none(), Wrong::LogChanged, || {
            format!("{key} was deleted")
        });
        let Some(attempt) = attempt_of(key) else {
            return;
        };
        self.count("data removed");
        let lives = self.image_slot(attempt).is_some() && !self.is_dropped(attempt);
        self.must(!lives, Wrong::DataGone, || {
            format!("{key} was deleted, and the image of that attempt was not given up")
        });
    }

    fn became_image(&mut self, store: &MemoryStore, image: &ImageEntry) {
        self.count("committed");
        let attempt = image.attempt.as_str();
        self.must(self.image_slot(attempt).is_none(), Wrong::Twice, || {
            format!("a second image of attempt {attempt}")
        });
        self.must(!self.is_dropped(attempt), Wrong::ImageOfGivenUp, || {
            format!("an image of attempt {attempt}, which was given up")
        });
        // What was sealed together becomes images together, in its order; and who gave the job up again has not gone on with it.
        let is_sealed = |writer: &str| self.sealed.contains(writer);
        let is_harmless = |writer: &str| is_sealed(writer) || self.gave_up(writer);
        let ours = self.position(|entry| is_open(entry, &image.writer));
        let since = self.log.iter().skip(ours.unwrap_or(0));
        let other = since
            .filter_map(|entry| match entry {
                Entry::Open { writer } if *writer != image.writer => Some(writer),
                _ => None,
            })
            .find(|writer| !(is_sealed(attempt) && is_harmless(writer)))
            .cloned();
        self.must(other.is_none(), Wrong::ImageOfFenced, || {
            let other = other.unwrap_or_default();
            format!("an image of attempt {attempt}, after {other} opened the job")
        });
        let began = self.saving_position(attempt);
        let newer = self.log.iter().find_map(|entry| match entry {
            Entry::Image(other) if self.saving_position(&other.attempt) > began => {
                Some(other.attempt.clone())
            }
            _ => None,
        });
        self.must(newer.is_none(), Wrong::SetBack, || {
            let newer = newer.unwrap_or_default();
            format!("an image of attempt {attempt}, which is older than that of {newer}")
        });
        let word = self.words.get(attempt).copied();
        self.must(word != Some(Word::RunsOn), Wrong::ImageOfRunning, || {
            format!("an image of attempt {attempt}, whose job was given its memory back")
        });
        self.must(word != Some(Word::NoImage), Wrong::ImageAgainstWord, || {
            format!("an image of attempt {attempt}, which was said to come to nothing")
        });
        let missing = missing(store, image);
        self.must(missing.is_none(), Wrong::DataGone, || {
            let missing = missing.unwrap_or_default();
            format!("an image of attempt {attempt} without {missing}")
        });
    }

    fn was_dropped(&mut self, attempt: &str) {
        self.count("dropped");
        let Some(slot) = self.image_slot(attempt) else {
            return;
        };
        self.count("image dropped");
        // One that turned out bad when others had already been dropped for it counts: nobody could know.
        let is_kept = |(generation, other): &(usize, &ImageEntry)| {
            *generation > slot && (!self.is_dropped(&other.attempt) || self.is_bad(*generation))
        };
        let newer = self.images().filter(is_kept).count();
        self.must(
            newer >= KEEP || self.is_bad(slot),
            Wrong::NewestDropped,
            || format!("image {slot} of attempt {attempt} was given up, and {newer} are newer"),
        );
    }

    /// A saver's exit status says that its image is there.
    pub(super) fn says_committed(&mut self, attempt: &str) {
        self.count("said committed");
        self.must(self.image_slot(attempt).is_some(), Wrong::NoImage, || {
            format!("attempt {attempt} was said to be an image")
        });
    }

    /// A saver's exit status says that the newest image is what it was before.
    pub(super) fn says_no_image(&mut self, attempt: &str) {
        self.count("said no image");
        // A job that runs on does so whatever its saver says last.
        let said = self.words.entry(attempt.to_owned());
        said.or_insert(Word::NoImage);
        let image = self.image_slot(attempt);
        self.must(image.is_none(), Wrong::ImageAgainstWord, || {
            format!("attempt {attempt} is said to come to nothing, and is image {image:?}")
        });
    }

    /// The target goes on from where it was saved. An image that is there already is as good as one of a job that is to run on.
    pub(super) fn runs_on(&mut self, attempt: &str) {
        self.count("given back");
        self.words.insert(attempt.to_owned(), Word::RunsOn);
    }

    /// The spill has a whole save.
    pub(super) fn was_sealed(&mut self, attempt: &str) {
        self.count("sealed");
        self.sealed.insert(attempt.to_owned());
    }

    /// The driver lets the GPUs' memory go.
    pub(super) fn completed(&mut self, spill: &MemoryStore, attempt: &str) {
        self.count("completed");
        let key = Sealed::key(sample::job(), attempt).expect("a legal key");
        let is_sealed = now(spill.head(&key)).is_ok_and(|info| info.is_some());
        let is_kept = is_sealed || self.image_slot(attempt).is_some();
        self.must(is_kept, Wrong::CompletedForNothing, || {
            format!("attempt {attempt} is neither committed nor sealed")
        });
    }

    /// Somebody goes on with the job from this image.
    pub(super) fn restored(&mut self, writer: &str, generation: u64, is_named: bool) {
        self.count("restored");
        let restored = usize::try_from(generation).expect("a short log");
        let opened = self.position(|entry| is_open(entry, writer));
        let Some(opened) = opened.map(|index| index + 1) else {
            return self.must(false, Wrong::RestoredUnopened, || {
                format!("{writer} restored image {generation} without opening the job")
            });
        };
        self.restored.insert(writer.to_owned());
        self.must(restored < opened, Wrong::RestoredUnopened, || {
            format!("{writer} opened the job in slot {opened} and restored image {generation}")
        });
        self.must(!self.is_dropped(writer), Wrong::RestoredUnopened, || {
            format!("{writer} gave the job up and restored image {generation}")
        });
        let newest = self.live_images().filter(|slot| *slot < opened).max();
        self.must(
            is_named || newest.is_none_or(|newest| restored >= newest),
            Wrong::OlderRestored,
            || format!("{writer} restored image {generation}, and {newest:?} was there"),
        );
    }

    /// An object was not there for a restore that had made sure of its image.
    pub(super) fn read_nothing(&mut self, who: &str, key: &str) {
        self.must(false, Wrong::ReadGone, || {
            format!("{key} is gone under {who}, which had pinned it and looked again")
        });
    }

    /// Somebody looked for the newest image, which had to be as new as those that were there all the while.
    pub(super) fn looked(&mut self, before: &[usize], found: Option<u64>) {
        self.count("looked");
        let live: HashSet<usize> = self.live_images().collect();
        let Some(least) = before.iter().filter(|slot| live.contains(slot)).max() else {
            return;
        };
        let found = found.and_then(|found| usize::try_from(found).ok());
        let is_as_new = found.is_some_and(|found| found >= *least);
        self.must(is_as_new, Wrong::WentBack, || {
            format!("the newest image was said to be {found:?}, and {least} was there")
        });
    }

    /// Slots of the images that may be restored.
    pub(super) fn live_images(&self) -> impl Iterator<Item = usize> {
        let images = self.images();
        let live = |(slot, image): &(usize, &ImageEntry)| {
            !self.is_dropped(&image.attempt) && !self.is_bad(*slot)
        };
        images.filter(live).map(|(slot, _)| slot)
    }

    /// After the last resume: whatever is still sealed has a reason to be.
    pub(super) fn must_not_be_stranded(&mut self, left: &[Sealed]) {
        let here: HashSet<&str> = left
            .iter()
            .map(|sealed| sealed.entry.writer.as_str())
            .collect();
        for sealed in left {
            let attempt = sealed.entry.attempt.as_str();
            let began = self.saving_position(attempt);
            let may_have_gone_on = |entry: &Entry| match entry {
                Entry::Image(image) => self.saving_position(&image.attempt) >= began,
                Entry::Open { writer } => !here.contains(writer.as_str()) && !self.gave_up(writer),
                Entry::Saving(saving) => !here.contains(saving.writer.as_str()),
                _ => false,
            };
            let mut since = self.log.iter().skip(began.map_or(0, |at| at + 1));
            let is_overtaken = self.is_dropped(attempt) || since.any(may_have_gone_on);
            self.must(is_overtaken, Wrong::Stranded, || {
                format!("attempt {attempt} stays sealed, and nobody has gone on without it")
            });
        }
    }

    /// At the end: what is not given up is whole.
    pub(super) fn must_be_whole(&mut self, store: &MemoryStore) {
        let mut lacking = self.images().filter_map(|(slot, image)| {
            let missing = missing(store, image)?;
            (!self.is_dropped(&image.attempt)).then(|| format!("image {slot} lacks {missing}"))
        });
        if let Some(what) = lacking.next() {
            drop(lacking);
            self.must(false, Wrong::DataGone, || what);
        }
    }

    fn images(&self) -> impl Iterator<Item = (usize, &ImageEntry)> {
        let slots = self.log.iter().enumerate();
        slots.filter_map(|(index, entry)| match entry {
            Entry::Image(image) => Some((index + 1, image)),
            _ => None,
        })
    }

    fn position(&self, is_it: impl Fn(&Entry) -> bool) -> Option<usize> {
        self.log.iter().position(is_it)
    }

    fn image_slot(&self, attempt: &str) -> Option<usize> {
        let mut images = self.images();
        images
            .find(|(_, image)| image.attempt == attempt)
            .map(|(slot, _)| slot)
    }

    fn saving_position(&self, attempt: &str) -> Option<usize> {
        self.position(|entry| matches!(entry, Entry::Saving(saving) if saving.attempt == attempt))
    }

    fn is_dropped(&self, attempt: &str) -> bool {
        let is_it = |entry: &Entry| matches!(entry, Entry::Dropped { attempt: other, .. } if other == attempt);
        self.log.iter().any(is_it)
    }

    /// Whether a writer that opened the job says that nothing came of that. A saver's target runs all the same.
    fn gave_up(&self, writer: &str) -> bool {
        // Of one that others gave up nobody knows what it had done.
        let says_so = |entry: &Entry| matches!(entry, Entry::Dropped { writer: by, attempt } if by == writer && attempt == writer);
        let has_saved = self.saving_position(writer).is_some();
        self.log.iter().any(says_so) && !has_saved && !self.restored.contains(writer)
    }

    fn is_bad(&self, slot: usize) -> bool {
        let is_it = |entry: &Entry| matches!(entry, Entry::Bad { generation, .. } if *generation == slot as u64);
        self.log.iter().any(is_it)
    }
}

fn is_open(entry: &Entry, by: &str) -> bool {
    matches!(entry, Entry::Open { writer } if writer == by)
}

/// The slot of the log that a key belongs to.
fn slot_of(key: &Key) -> Option<usize> {
    let (_, name) = key.as_str().split_once("/log/")?;
    name.strip_suffix(".json")?.parse().ok()
}

/// The attempt whose data an object is.
fn attempt_of(key: &Key) -> Option<&str> {
    let (_, rest) = key.as_str().split_once("/data/")?;
    Some(rest.split_once('/')?.0)
}

/// An object that an image needs and the store does not have.
fn missing(store: &MemoryStore, image: &ImageEntry) -> Option<String> {
    let is_spilled = image.manifest_key.ends_with("spilled.json");
    let sample: &Sample = sample::sample(&image.attempt, is_spilled);
    let absent = |key: &Key| now(store.head(key)).is_ok_and(|info| info.is_none());
    let mut pieces = sample.pieces().into_iter();
    let piece = pieces.find(|piece| absent(&piece.key))?;
    Some(piece.key.to_string())
}
