//! Two slots of a job's log that nobody vouches for, before the objects of the golden image.
//!
//! The input is slot 1 up to the first zero byte, and slot 2 behind it, if there is one. Must hold: no panic; the log is as long as slots are taken; an image
//! that is listed as usable is one of the log; an image's entry that is written again reads the same.

#![no_main]

use bytes::Bytes;
use ckptstream::config::JobName;
use ckptstream::image::{Image, ImageRef, Standing, list_images};
use ckptstream::job_log::{CommitError, Entry, JobLog, append_image};
use ckptstream::store::memory::MemoryStore;
use ckptstream::store::{Key, Store};
use ckptstream_fuzz::{GOLDEN, JOB};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().build().expect("a runtime");
}

fuzz_target!(|data: &[u8]| {
    RUNTIME.with(|runtime| runtime.block_on(read(data)));
});

async fn read(data: &[u8]) {
    let job = JobName::new(JOB).expect("a name");
    let mut slots = data.splitn(2, |byte| *byte == 0);
    let store = MemoryStore::new();
    for (key, bytes) in GOLDEN {
        put(&store, &job, key, bytes).await;
    }
    let mut count = 0;
    for slot in slots.by_ref() {
        count += 1;
        put(&store, &job, &format!("log/{count:08}.json"), slot).await;
    }

    let log = JobLog::read(&store, &job)
        .await
        .expect("slots that are taken");
    assert_eq!(log.next_slot(), count + 1);
    for (_, entry) in log.entries() {
        let _ = entry.describe();
        if let Entry::Image(image) = entry {
            let elsewhere = MemoryStore::new();
            match append_image(&elsewhere, &job, 1, image).await {
                Ok(generation) => {
                    let log = JobLog::read(&elsewhere, &job).await.expect("one entry");
                    assert_eq!(log.get(generation), Some(entry));
                }
                Err(error) => assert!(matches!(error, CommitError::Unfit { .. }), "{error}"),
            }
        }
    }

    let list = list_images(&store, &job).await.expect("a log that reads");
    let usable: Vec<u64> = list
        .images
        .iter()
        .filter(|image| image.standing == Standing::Usable)
        .map(|image| image.generation)
        .collect();
    match Image::open(&store, &job, ImageRef::Latest).await {
        Ok((image, _)) => {
            assert!(usable.contains(&image.generation) && !list.is_finished);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    for generation in 1..=count {
        let _ = Image::open(&store, &job, ImageRef::Generation(generation)).await;
    }
}

async fn put(store: &MemoryStore, job: &JobName, relative: &str, bytes: &[u8]) {
    let key = Key::of_job(job, relative).expect("a key");
    store
        .put_if_absent(&key, Bytes::copy_from_slice(bytes))
        .await
        .expect("an empty place");
}
