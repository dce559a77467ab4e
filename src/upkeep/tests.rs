use super::*;
use crate::codec::Digest;
use crate::job_log::{ImageEntry, SavingEntry};
use crate::manifest::ImageKind;
use crate::store::memory::MemoryStore;
use crate::writer::ProcessIdentity;
use bytes::Bytes;

fn job() -> JobName {
    JobName::new("train").unwrap()
}

fn work(store: &dyn Store) -> Work<'_> {
    // A job that lives as long as the tests.
    let job: &'static JobName = Box::leak(Box::new(job()));
    Work {
        store,
        job,
        keep: 2,
        grace: Duration::ZERO,
        older_than: Duration::ZERO,
        dry_run: false,
        writer: "gc".to_owned(),
    }
}

fn image(attempt: &str) -> Entry {
    Entry::Image(ImageEntry {
        writer: attempt.to_owned(),
        attempt: attempt.to_owned(),
        manifest_key: format!("data/{attempt}/manifest.json"),
        manifest_len: 10,
        manifest_digest: Digest::of(b"no manifest"),
        kind: ImageKind::Gpu,
        raw_len: 0,
        stored_len: 0,
        created_ms: 0,
        tool: "test".to_owned(),
    })
}

fn saving(attempt: &str, spill: Option<&str>) -> Entry {
    Entry::Saving(SavingEntry {
        writer: attempt.to_owned(),
        attempt: attempt.to_owned(),
        seconds: 0,
        spill: spill.map(str::to_owned),
        // It has ended.
        by: ProcessIdentity {
            start_time: 0,
            ..ProcessIdentity::ours().unwrap()
        },
    })
}

async fn log(store: &MemoryStore, entry: &Entry) {
    append(store, &job(), 1, entry, &|_there| false)
        .await
        .unwrap();
}

/// An attempt with a claim, an object and an open upload.
async fn attempt(store: &MemoryStore) -> String {
    let nonce = random_hex::<16>();
    for name in ["attempt.json", "4711/gpu.zst"] {
        let key = Key::new(&format!("train/data/{nonce}/{name}")).unwrap();
        store
            .put_if_absent(&key, Bytes::from_static(b"data"))
            .await
            .unwrap();
    }
    let key = Key::new(&format!("train/data/{nonce}/4711/other.zst")).unwrap();
    store.begin_upload(&key).await.unwrap();
    nonce
}

async fn objects(store: &MemoryStore, attempt: &str) -> usize {
    let prefix = format!("train/data/{attempt}/");
    store.list(&prefix).await.unwrap().len()
}

async fn fate(store: &MemoryStore, work: &Work<'_>, spilled: bool, of: &str) -> AttemptRow {
    let rows = work.gc(spilled).await.unwrap();
    let row = rows.into_iter().find(|row| row.attempt == of);
    let row = row.unwrap();
    assert_eq!(
        objects(store, of).await == 0,
        row.fate == Fate::Removed && !work.dry_run,
        "{row:?}"
    );
    row
}

#[tokio::test]
async fn an_attempt_that_came_to_nothing_is_given_up_and_removed() {
    let store = MemoryStore::new();
    let dead = attempt(&store).await;
    log(&store, &saving(&dead, None)).await;
    let alive = attempt(&store).await;
    log(&store, &image(&alive)).await;
    let row = fate(&store, &work(&store), false, &dead).await;
    assert_eq!((row.fate, row.objects, row.uploads), (Fate::Removed, 2, 1));
    let after = JobLog::read(&store, &job()).await.unwrap();
    assert!(after.is_dropped(&dead) && !after.is_dropped(&alive));
    assert_eq!(objects(&store, &alive).await, 2);
    assert_eq!(store.open_uploads(), 1, "that of the living");
}

#[tokio::test]
async fn what_may_be_alive_is_left_alone() {
    let store = MemoryStore::new();
    let unknown = attempt(&store).await;
    let row = fate(&store, &work(&store), true, &unknown).await;
    assert_eq!(row.fate, Fate::Kept, "the log does not know it");
    let young = attempt(&store).await;
    log(&store, &saving(&young, None)).await;
    let patient = Work {
        older_than: Duration::from_secs(3600),
        ..work(&store)
    };
    assert_eq!(fate(&store, &patient, false, &young).await.fate, Fate::Kept);

    let spilled = attempt(&store).await;
    log(&store, &saving(&spilled, Some("/mnt/spill"))).await;
    let row = fate(&store, &work(&store), false, &spilled).await;
    assert_eq!(row.fate, Fate::Kept);
    assert!(row.reason.contains("/mnt/spill"), "{row:?}");
    let row = fate(&store, &work(&store), true, &spilled).await;
    assert_eq!(row.fate, Fate::Removed);

    // Of somebody, however much it looks like an attempt.
    let key = Key::new("train/data/README/attempt.json").unwrap();
    store.put_if_absent(&key, Bytes::new()).await.unwrap();
    let row = fate(&store, &work(&store), true, "README").await;
    assert_eq!(row.fate, Fate::Kept);
}

/// It died before it was announced: what it tried the store with is its own, too.
#[tokio::test]
async fn what_died_before_the_announcement_is_given_up() {
    let store = MemoryStore::new();
    let nonce = "0123456789abcdef0123456789abcdef";
    for key in [
        claim_key(nonce),
        contest_key(nonce, 1),
        contest_key(nonce, 2),
    ] {
        let key = Key::of_job(&job(), &key).unwrap();
        store.put_if_absent(&key, Bytes::new()).await.unwrap();
    }
    let row = fate(&store, &work(&store), false, nonce).await;
    assert_eq!((row.fate, row.objects), (Fate::Removed, 3), "{row:?}");
}

#[tokio::test]
async fn what_died_between_the_entry_and_the_data_is_removed_later() {
    let store = MemoryStore::new();
    let nonce = attempt(&store).await;
    log(
        &store,
        &Entry::Dropped {
            writer: "an earlier gc".to_owned(),
            attempt: nonce.clone(),
        },
    )
    .await;
    let patient = Work {
        older_than: Duration::from_secs(3600),
        ..work(&store)
    };
    assert_eq!(
        fate(&store, &patient, false, &nonce).await.fate,
        Fate::Removed
    );
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let store = MemoryStore::new();
    let nonce = attempt(&store).await;
    log(&store, &saving(&nonce, None)).await;
    let dry = Work {
        dry_run: true,
        ..work(&store)
    };
    let row = fate(&store, &dry, false, &nonce).await;
    assert_eq!((row.fate, row.objects), (Fate::Removed, 2));
    let after = JobLog::read(&store, &job()).await.unwrap();
    assert_eq!(after.next_slot(), 2);
    assert_eq!(
        (objects(&store, &nonce).await, store.open_uploads()),
        (2, 1)
    );
}

#[tokio::test]
async fn an_image_that_is_read_outlives_its_entry() {
    let store = MemoryStore::new();
    let nonce = attempt(&store).await;
    log(&store, &image(&nonce)).await;
    let pin = pins::pin(&store, &job(), &nonce).await.unwrap();
    log(
        &store,
        &Entry::Dropped {
            writer: "prune".to_owned(),
            attempt: nonce.clone(),
        },
    )
    .await;
    let row = fate(&store, &work(&store), false, &nonce).await;
    assert_eq!(row.fate, Fate::Dropped);
    store.delete(&pin).await.unwrap();
    let graceful = Work {
        grace: Duration::from_secs(3600),
        ..work(&store)
    };
    assert_eq!(
        fate(&store, &graceful, false, &nonce).await.fate,
        Fate::Dropped
    );
    assert_eq!(
        fate(&store, &work(&store), false, &nonce).await.fate,
        Fate::Removed
    );
}

#[tokio::test]
async fn a_saver_has_the_time_that_it_said_and_as_long_as_it_lives() {
    let store = MemoryStore::new();
    let of = |attempt: &str, seconds: u64, by: ProcessIdentity| {
        Entry::Saving(SavingEntry {
            writer: attempt.to_owned(),
            attempt: attempt.to_owned(),
            seconds,
            spill: None,
            by,
        })
    };
    let ours = ProcessIdentity::ours().unwrap();
    let elsewhere = ProcessIdentity {
        boot_id: "another".to_owned(),
        ..ours.clone()
    };
    for (seconds, by, expected) in [
        (3600, elsewhere.clone(), Fate::Kept),
        (0, elsewhere, Fate::Removed),
        (0, ours, Fate::Kept),
    ] {
        let nonce = attempt(&store).await;
        log(&store, &of(&nonce, seconds, by)).await;
        let row = fate(&store, &work(&store), false, &nonce).await;
        assert_eq!(row.fate, expected, "{row:?}");
    }
}

#[tokio::test]
async fn behind_an_entry_that_cannot_be_read_nothing_is_given_up() {
    let store = MemoryStore::new();
    let nonce = attempt(&store).await;
    log(&store, &saving(&nonce, None)).await;
    let key = slot_key(&job(), 2).unwrap();
    let later = Bytes::from_static(br#"{"format": 2, "entry": "of a later version"}"#);
    store.put_if_absent(&key, later).await.unwrap();
    let row = fate(&store, &work(&store), false, &nonce).await;
    assert_eq!(row.fate, Fate::Kept, "{row:?}");
}

#[tokio::test]
async fn an_attempt_that_became_an_image_meanwhile_lives() {
    let store = MemoryStore::new();
    let nonce = attempt(&store).await;
    let work = work(&store);
    let mut seen = JobLog::read(&store, &job()).await.unwrap();
    log(&store, &image(&nonce)).await;
    assert!(!work.give_up(&mut seen, &nonce, false).await.unwrap());
    assert!(seen.is_image(&nonce) && !seen.is_dropped(&nonce));
}

#[tokio::test]
async fn an_image_that_is_not_valid_takes_the_place_of_none() {
    let store = MemoryStore::new();
    // More than are kept, and none of them can be opened.
    for _ in 0..3 {
        let nonce = attempt(&store).await;
        log(&store, &image(&nonce)).await;
    }
    let rows = work(&store).prune().await.unwrap();
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.fate == Fate::Kept), "{rows:?}");
}
