//! Writers of several epochs on a store that overwrites whatever stands there.

use super::*;
use crate::config::JobName;
use crate::job_log::{AppendError, Entry, JobLog, append};
use crate::store::faulty::{Fault, Faulty};
use crate::store::memory::MemoryStore;
use crate::store::retry::{RetryPolicy, Retrying};
use tokio_util::sync::CancellationToken;

fn job() -> JobName {
    JobName::new("train").unwrap()
}

/// A store that ignores conditions.
fn overwriting() -> Faulty {
    Faulty::new().fail("put_if_absent", 1..u32::MAX, Fault::Overwrites)
}

/// A process of some other node: nobody here knows whether it has ended.
fn elsewhere(number: u64) -> ProcessIdentity {
    ProcessIdentity {
        host: format!("node-{number}"),
        boot_id: format!("boot-{number}"),
        ..ProcessIdentity::ours().unwrap()
    }
}

/// Nothing is tried again but by who asks.
fn at(inner: Arc<dyn Store>, epoch: Option<u64>) -> Epochs {
    Epochs::new(inner, epoch, Duration::ZERO, crate::progress::Meter::new())
}

fn writer(store: &Arc<Faulty>, epoch: u64, by: ProcessIdentity) -> Epochs {
    let inner: Arc<dyn Store> = Arc::clone(store) as _;
    Epochs {
        by: Ok(by),
        ..at(inner, Some(epoch))
    }
}

fn reader(store: &Arc<Faulty>) -> Epochs {
    at(Arc::clone(store) as Arc<dyn Store>, None)
}

fn entry(name: &str) -> Entry {
    Entry::Open {
        writer: name.to_owned(),
    }
}

async fn say(store: &dyn Store, from_slot: u64, name: &str) -> Result<u64, AppendError> {
    append(store, &job(), from_slot, &entry(name), &|_there| false).await
}

async fn log(store: &Arc<Faulty>) -> Vec<Entry> {
    let log = JobLog::read(&reader(store), &job()).await.unwrap();
    log.entries().map(|(_, entry)| entry.clone()).collect()
}

fn fenced(appended: Result<u64, AppendError>) -> String {
    match appended {
        Err(error @ AppendError::Fenced { .. }) => error.to_string(),
        other => panic!("not fenced: {other:?}"),
    }
}

#[tokio::test]
async fn entries_are_in_the_order_of_their_epochs() {
    let store = Arc::new(overwriting());
    let first = writer(&store, 3, elsewhere(1));
    assert_eq!(say(&first, 1, "a").await.unwrap(), 1);
    assert_eq!(say(&first, 1, "b").await.unwrap(), 2);
    // Said again, it is found.
    assert_eq!(say(&first, 1, "a").await.unwrap(), 1);
    let second = writer(&store, 7, elsewhere(2));
    assert_eq!(say(&second, 1, "c").await.unwrap(), 3);
    let third = writer(&store, 8, elsewhere(3));
    assert_eq!(say(&third, 4, "d").await.unwrap(), 4);
    let expected: Vec<Entry> = ["a", "b", "c", "d"].map(entry).into();
    assert_eq!(log(&store).await, expected);
    // And everybody else is behind it.
    for earlier in [&first, &second] {
        let why = fenced(say(earlier, 5, "e").await);
        assert!(
            why.contains("epoch 8 was begun by process") && why.contains("node-3"),
            "{why}"
        );
    }
    let unborn = writer(&store, 5, elsewhere(4));
    assert!(fenced(say(&unborn, 5, "e").await).contains("ours is 5"));
    assert_eq!(log(&store).await, expected);
    assert!(
        store
            .inner
            .list("train/log/")
            .await
            .unwrap()
            .iter()
            .all(|listed| !listed.key.as_str().contains("epoch-0000000000000005")),
        "who is refused leaves nothing"
    );
}

#[tokio::test]
async fn two_writers_of_one_epoch_are_refused_and_named_unless_one_has_ended() {
    let store = Arc::new(overwriting());
    let first = writer(&store, 1, elsewhere(1));
    say(&first, 1, "a").await.unwrap();
    let second = writer(&store, 1, elsewhere(2));
    let why = fenced(say(&second, 2, "b").await);
    for word in ["epoch 1", "node-1", "node-2", "job.epoch", "--epoch"] {
        assert!(why.contains(word), "{word}: {why}");
    }
    // Who is refused keeps nobody from it.
    say(&first, 2, "c").await.unwrap();
    assert_eq!(log(&store).await, ["a", "c"].map(entry));

    // One that has ended, here, does not.
    let ended = ProcessIdentity {
        start_time: ProcessIdentity::ours().unwrap().start_time - 1,
        ..ProcessIdentity::ours().unwrap()
    };
    let store = Arc::new(overwriting());
    say(&writer(&store, 1, ended), 1, "a").await.unwrap();
    let next = writer(&store, 1, ProcessIdentity::ours().unwrap());
    assert_eq!(say(&next, 1, "b").await.unwrap(), 2);
    assert_eq!(log(&store).await, ["a", "b"].map(entry));
}

#[tokio::test]
async fn two_entries_in_one_place_are_refused_and_named() {
    let store = Arc::new(overwriting());
    let first = writer(&store, 1, elsewhere(1));
    say(&first, 1, "a").await.unwrap();
    // As a request does that was on its way when its writer ended.
    let late = "train/log/epoch-0000000000000001/00000001-ffffffffffffffff.json";
    let late = Key::new(late).unwrap();
    let put = store.put_if_absent(&late, Bytes::from_static(b"{}"));
    put.await.unwrap();
    let error = JobLog::read(&reader(&store), &job()).await.unwrap_err();
    let text = crate::error::one_line(&error);
    assert!(
        text.contains(&first.nonce) && text.contains("ffffffffffffffff"),
        "{text}"
    );
    assert!(say(&first, 2, "b").await.is_err());
}

#[tokio::test]
async fn logs_of_the_other_kind_are_left_alone() {
    let store = Arc::new(Faulty::new());
    assert_eq!(say(&reader(&store), 1, "a").await.unwrap(), 1);
    let refused = say(&writer(&store, 1, elsewhere(1)), 1, "b").await;
    let text = crate::error::one_line(&refused.unwrap_err());
    assert!(text.contains("job.epoch"), "{text}");
    assert_eq!(log(&store).await, [entry("a")]);

    let store = Arc::new(overwriting());
    say(&writer(&store, 4, elsewhere(1)), 1, "a").await.unwrap();
    let refused = say(&reader(&store), 2, "b").await;
    let text = crate::error::one_line(&refused.unwrap_err());
    assert!(
        text.contains("goes by epochs") && text.contains("--epoch"),
        "{text}"
    );
    assert_eq!(log(&store).await, [entry("a")]);
}

#[tokio::test]
async fn an_epoch_that_was_begun_and_never_based_does_not_count() {
    let store = Arc::new(overwriting());
    let first = writer(&store, 1, elsewhere(1));
    say(&first, 1, "a").await.unwrap();
    let dead = "train/log/epoch-0000000000000002/writer-ffffffffffffffff.json";
    let body = serde_json::to_vec(&Writer {
        format: FORMAT,
        by: elsewhere(2),
    });
    let dead = Key::new(dead).unwrap();
    let put = store.put_if_absent(&dead, body.unwrap().into());
    put.await.unwrap();
    assert_eq!(log(&store).await, [entry("a")]);
    assert!(fenced(say(&first, 2, "b").await).contains("node-2"));
    let third = writer(&store, 3, elsewhere(3));
    assert_eq!(say(&third, 2, "c").await.unwrap(), 2);
    assert_eq!(log(&store).await, ["a", "c"].map(entry));
}

/// What a writer was told of each of its entries.
type Told = Vec<(String, Result<u64, AppendError>)>;

/// Appends one entry after the other, until it is fenced.
async fn writes(store: &dyn Store, name: &str, count: u32) -> Told {
    let mut told = Told::new();
    for number in 0..count {
        let name = format!("{name}{number}");
        let appended = say(store, 1, &name).await;
        let goes_on = appended.is_ok();
        told.push((name, appended));
        if !goes_on {
            break;
        }
    }
    told
}

/// Whoever was told that an entry stands finds it there for ever, and what was fenced is not in the log, in whatever order requests come, and whichever answers are lost.
#[tokio::test]
async fn in_any_order_what_was_said_to_stand_stands() {
    let (mut stood, mut were_fenced, mut unknown) = (0, 0, 0);
    for seed in 0..1500 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut store = Faulty::new().in_any_order(seed);
        for _ in 0..seed % 4 {
            // The first rule that fits decides.
            let lost = random.u32(1..16);
            let fault = match random.bool() {
                true => Fault::OverwritesLost,
                false => Fault::OverwritesLater(random.u32(0..30)),
            };
            store = store.fail("put_if_absent", lost..lost + 1, fault);
        }
        let store = Arc::new(store.fail("put_if_absent", 1..u32::MAX, Fault::Overwrites));
        let writers = (1..=3).map(|epoch| {
            let epochs = writer(&store, epoch, elsewhere(epoch));
            let policy = RetryPolicy {
                pause_first: Duration::from_micros(1),
                ..RetryPolicy::new(Duration::from_secs(5))
            };
            let meter = crate::progress::Meter::new();
            Retrying::new(Arc::new(epochs), policy, CancellationToken::new(), meter)
        });
        let writers: Vec<_> = writers.collect();
        let delays: Vec<u32> = writers.iter().map(|_| random.u32(0..60)).collect();
        let all = writers.iter().zip(["a", "b", "c"]).zip(delays);
        let all = all.map(|((store, name), turns)| async move {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            writes(store, name, 3).await
        });
        let told = futures::future::join_all(all).await;
        store.arrive(u32::MAX).await;
        let log = log(&store).await;
        for (name, appended) in told.into_iter().flatten() {
            let found = log.iter().position(|there| *there == entry(&name));
            match appended {
                Ok(slot) => {
                    stood += 1;
                    let expected = usize::try_from(slot - 1).unwrap();
                    assert_eq!(found, Some(expected), "seed {seed}: {name} of {log:?}");
                }
                Err(AppendError::Fenced { .. }) => {
                    were_fenced += 1;
                    assert_eq!(found, None, "seed {seed}: {name} of {log:?}");
                }
                // Whoever stands in that slot was not looked at in time: it may be ours.
                Err(AppendError::Unreachable { .. }) => unknown += 1,
                Err(error) => panic!("seed {seed}: {error:?}"),
            }
        }
    }
    assert!(
        stood > 1500 && were_fenced > 500 && unknown < were_fenced / 20,
        "{stood}, {were_fenced}, {unknown}"
    );
}

/// Nothing that somebody puts there is counted with, or makes a panic.
#[tokio::test]
async fn what_is_no_entry_is_passed_over_and_what_cannot_be_read_is_told() {
    let store = Arc::new(overwriting());
    let first = writer(&store, 1, elsewhere(1));
    say(&first, 1, "a").await.unwrap();
    let put = async |name: &str, body: &'static str| {
        let key = Key::new(&format!("train/log/{name}")).unwrap();
        let put = store.put_if_absent(&key, Bytes::from_static(body.as_bytes()));
        put.await.unwrap();
        key
    };
    for name in [
        "epoch-18446744073709551615/writer-ff.json",
        "epoch-+000000000000009/writer-ff.json",
        "epoch-2/base-ff.json",
        "epoch-0000000000000001/00000000-ff.json",
        "epoch-0000000000000001/18446744073709551615-ff.json",
        "epoch-0000000000000001/notes.txt",
        "epoch-0000000000000001",
    ] {
        put(name, "{").await;
    }
    say(&first, 2, "b").await.unwrap();
    assert_eq!(log(&store).await, ["a", "b"].map(entry));
    let long = format!(r#"{{"format":1,"after":[]{}}}"#, " ".repeat(LEN_MAX));
    for body in [
        "{",
        r#"{"format":2,"after":[]}"#,
        r#"{"format":1,"after":[[3,1],[2,1]]}"#,
        r#"{"format":1,"after":[[9,1]]}"#,
        r#"{"format":1,"after":[[1,18446744073709551615],[2,18446744073709551615]]}"#,
        &long,
    ] {
        let base = Key::new("train/log/epoch-0000000000000009/base-ff.json").unwrap();
        let put = store.put_if_absent(&base, Bytes::copy_from_slice(body.as_bytes()));
        put.await.unwrap();
        let error = JobLog::read(&reader(&store), &job()).await.unwrap_err();
        let text = crate::error::one_line(&error);
        assert!(text.contains(base.as_str()), "{text}");
    }
}

/// A lifecycle rule, say.
#[tokio::test]
async fn a_log_that_lacks_something_is_told_and_never_read_shorter() {
    for gone in ["base-", "00000001-", "00000002-"] {
        for of in [1, 2] {
            let store = Arc::new(overwriting());
            let first = writer(&store, 1, elsewhere(1));
            for (slot, name) in [(1, "a"), (2, "b"), (3, "c")] {
                assert_eq!(say(&first, 1, name).await.unwrap(), slot);
            }
            let second = writer(&store, 2, elsewhere(2));
            for name in ["d", "e", "f"] {
                say(&second, 4, name).await.unwrap();
            }
            let folder = format!("train/log/epoch-{of:016}/{gone}");
            for listed in store.inner.list(&folder).await.unwrap() {
                store.inner.delete(&listed.key).await.unwrap();
            }
            let read = JobLog::read(&reader(&store), &job()).await;
            // What came before is in the later one's base.
            if (gone, of) == ("base-", 1) {
                assert_eq!(read.unwrap().next_slot(), 7);
                continue;
            }
            let text = crate::error::one_line(&read.unwrap_err());
            let folder = format!("train/log/epoch-{of:016}");
            assert!(text.contains(&folder), "{gone} {of}: {text}");
        }
    }
}

/// An entry of a start that was cut off is not read before the later start has said whether it counts.
#[tokio::test]
async fn what_is_not_decided_is_waited_for() {
    let store = Arc::new(overwriting());
    let first = writer(&store, 1, elsewhere(1));
    say(&first, 1, "a").await.unwrap();
    // The second start has begun, and counts what is there.
    let second = writer(&store, 2, elsewhere(2));
    let body = encode(&Writer {
        format: FORMAT,
        by: elsewhere(2),
    });
    let folder = "train/log/epoch-0000000000000002";
    let word = Key::new(&format!("{folder}/writer-{}.json", second.nonce)).unwrap();
    store.put_if_absent(&word, body).await.unwrap();
    let place = "train/log/epoch-0000000000000001/00000002-0123456789abcdef.json";
    let bytes = serde_json::json!({"format": 1, "entry": "open", "writer": "late"});
    let put = Key::new(place).unwrap();
    let put = store.put_if_absent(&put, bytes.to_string().into()).await;
    put.unwrap();
    let late = async {
        let base = Key::new(&format!("{folder}/base-{}.json", second.nonce)).unwrap();
        tokio::time::sleep(3 * LOOK_PAUSE).await;
        let counted = encode(&Base {
            format: FORMAT,
            after: vec![(1, 1)],
        });
        store.put_if_absent(&base, counted).await.unwrap();
    };
    let reader = reader(&store);
    let job = job();
    let (read, ()) = tokio::join!(JobLog::read(&reader, &job), late);
    assert_eq!(read.unwrap().next_slot(), 2);
}

/// What was sent and cut off comes before what is sent next, with the bytes that it had.
#[tokio::test]
async fn an_entry_that_was_cut_off_is_never_another_one() {
    for later in [0, 1, 5, 100] {
        let store = Arc::new(
            Faulty::new()
                .fail("put_if_absent", 3..4, Fault::OverwritesLater(later))
                .fail("put_if_absent", 1..u32::MAX, Fault::Overwrites),
        );
        let first = writer(&store, 1, elsewhere(1));
        // Writer, base, and the entry.
        let cut = say(&first, 1, "a").await;
        assert!(
            matches!(cut, Err(AppendError::Unreachable { .. })),
            "{cut:?}"
        );
        assert_eq!(say(&first, 1, "b").await.unwrap(), 2);
        store.arrive(u32::MAX).await;
        assert_eq!(log(&store).await, ["a", "b"].map(entry), "{later}");
    }
}

/// Once a later start has begun, whoever has an earlier epoch is told so when it reads, too.
#[tokio::test]
async fn who_is_behind_reads_it() {
    let store = Arc::new(overwriting());
    let first = writer(&store, 1, elsewhere(1));
    say(&first, 1, "a").await.unwrap();
    let mut read = JobLog::read(&first, &job()).await.unwrap();
    say(&writer(&store, 2, elsewhere(2)), 2, "b").await.unwrap();
    let text = crate::error::one_line(&read.read_on(&first, &job()).await.unwrap_err());
    assert!(text.contains("epoch 2 was begun"), "{text}");
}

#[tokio::test]
async fn a_store_of_conditional_creates_is_asked_as_before() {
    let store = MemoryStore::new();
    let key = Key::new("train/log/00000001.json").unwrap();
    let epochs = at(Arc::new(store), None);
    let body = |text: &'static str| Bytes::from_static(text.as_bytes());
    assert_eq!(epochs.get(&key, 10).await.unwrap(), None);
    let put = epochs.put_if_absent(&key, body("one")).await.unwrap();
    assert_eq!(put, PutOutcome::Created);
    let put = epochs.put_if_absent(&key, body("two")).await.unwrap();
    assert_eq!(put, PutOutcome::AlreadyExists);
    assert_eq!(epochs.get(&key, 10).await.unwrap(), Some(body("one")));
    assert_eq!(epochs.head(&key).await.unwrap().unwrap().len, 3);
}
