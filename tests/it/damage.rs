//! Images that are not what was saved: every kind of damage is named, nothing of it reaches the driver, and an older image that is whole is taken where that is allowed.
//!
//! Each damage is done to the newer one of two images. What the digests cover is also forged: damaged first, then sealed again up to the log, so that the checks behind the
//! digests are what refuses it.

use std::collections::BTreeMap;

use bytes::Bytes;
use ckptstream::codec::{Crc64, Digest};
use ckptstream::store::s3::S3Store;
use ckptstream::store::{Key, PutOutcome, Store};
use serde_json::{Value, json};

use crate::support::s3_server::has_credentials;
use crate::support::scene::{Saver, Scene, assert_failed, cause};
use crate::support::{Run, Target};

/// The newer image and its log entry, file by file; keys are relative to the job.
#[derive(Debug, Clone)]
struct Files {
    attempt: String,
    files: BTreeMap<String, Bytes>,
}

const ENTRY: &str = "log/00000006.json";

impl Files {
    async fn read(store: &S3Store) -> Self {
        let mut files = BTreeMap::new();
        let entry = get(store, ENTRY).await;
        let parsed: Value = serde_json::from_slice(&entry).expect("JSON");
        let attempt = parsed["attempt"].as_str().expect("an attempt").to_owned();
        files.insert(ENTRY.to_owned(), entry);
        let listed = store.list(&format!("job/data/{attempt}/")).await;
        for object in listed.expect("a listing") {
            let key = object.key.as_str().trim_start_matches("job/").to_owned();
            let bytes = get(store, &key).await;
            files.insert(key, bytes);
        }
        Self { attempt, files }
    }

    /// Puts what differs from `before` into the store.
    async fn write_over(&self, store: &S3Store, before: &Self) {
        for (key, bytes) in &before.files {
            if self.files.get(key) != Some(bytes) {
                store.delete(&job_key(key)).await.expect("deleted");
            }
        }
        for (key, bytes) in &self.files {
            if before.files.get(key) != Some(bytes) {
                let put = store.put_if_absent(&job_key(key), bytes.clone()).await;
                assert_eq!(put.expect("the server runs"), PutOutcome::Created);
            }
        }
    }

    /// The key that ends so, in order.
    fn key(&self, end: &str) -> String {
        let mut keys = self.files.keys().filter(|key| key.ends_with(end));
        keys.next().expect("such a file").clone()
    }

    fn change(&mut self, end: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let key = self.key(end);
        let mut bytes = self.files[&key].to_vec();
        change(&mut bytes);
        self.files.insert(key, bytes.into());
    }

    fn change_json(&mut self, end: &str, change: impl FnOnce(&mut Value)) {
        self.change(end, |bytes| {
            let mut value = serde_json::from_slice(bytes).expect("JSON");
            change(&mut value);
            *bytes = serde_json::to_vec_pretty(&value).expect("JSON");
        });
    }

    /// Changes the manifest and seals it again, up to the log.
    fn forge_manifest(&mut self, change: impl FnOnce(&mut Value)) {
        self.change("manifest.json", |bytes| {
            let mut manifest: Value = serde_json::from_slice(bytes).expect("JSON");
            let members = manifest.as_object_mut().expect("an object");
            members.remove("self_xxh3_128");
            change(&mut manifest);
            let mut text = serde_json::to_string_pretty(&manifest).expect("JSON");
            text.truncate(text.len() - "\n}".len());
            text.push_str(",\n  ");
            let digest = Digest::of(text.as_bytes());
            text.push_str(&format!("\"self_xxh3_128\": \"{digest}\"\n}}\n"));
            *bytes = text.into_bytes();
        });
        self.seal_manifest();
    }

    /// The log says what the manifest is now, sums included.
    fn seal_manifest(&mut self) {
        let manifest = self.files[&self.key("manifest.json")].clone();
        let parsed: Value = serde_json::from_slice(&manifest).unwrap_or_default();
        let sum = |member: &str| -> u64 {
            let extents = parsed["processes"][0]["extents"].as_array();
            extents
                .into_iter()
                .flatten()
                .filter_map(|extent| extent.pointer(member)?.as_u64())
                .fold(0, u64::wrapping_add)
        };
        self.change_json(ENTRY, |entry| {
            entry["manifest_len"] = manifest.len().into();
            entry["manifest_digest"] = Digest::of(&manifest).to_string().into();
            entry["raw_len"] = sum("/raw_len").into();
            entry["stored_len"] = sum("/object/len").into();
        });
    }

    /// Changes a frame table and seals it again, up to the log.
    fn forge_table(&mut self, change: impl FnOnce(&mut Value)) {
        self.change_json(".frames.json", change);
        self.seal_table();
    }

    fn seal_table(&mut self) {
        let key = self.key(".frames.json");
        let table = self.files[&key].clone();
        self.forge_manifest(|manifest| {
            let record = &mut extent_with(manifest, "table", &key)["table"];
            record["len"] = table.len().into();
            record["xxh3_128"] = Digest::of(&table).to_string().into();
        });
    }

    /// Changes a data object, and lets the manifest say that this is how it was saved. The frame table still knows better.
    fn forge_object(&mut self, change: impl FnOnce(&mut Vec<u8>)) {
        self.change(".zst", change);
        let key = self.key(".zst");
        let object = self.files[&key].clone();
        self.forge_manifest(|manifest| {
            let record = &mut extent_with(manifest, "object", &key)["object"];
            record["len"] = object.len().into();
            // As the manifest writes them.
            record["crc64nvme"] = serde_json::to_value(Crc64::of(&object)).expect("JSON");
        });
    }

    /// The same for one frame and its stored length in the table, so that only the frame itself is wrong.
    fn forge_frame(&mut self, index: usize, frame: &[u8]) {
        let table: Value =
            serde_json::from_slice(&self.files[&self.key(".frames.json")]).expect("JSON");
        let lens: Vec<usize> = table["stored"]
            .as_array()
            .expect("a column")
            .iter()
            .map(|len| usize::try_from(len.as_u64().expect("a length")).expect("a length"))
            .collect();
        let start: usize = lens[..index].iter().sum();
        let len = lens[index];
        assert!(frame.len() <= len);
        self.forge_object(|object| object[start..start + frame.len()].copy_from_slice(frame));
    }
}

fn extent_with<'a>(manifest: &'a mut Value, member: &str, key: &str) -> &'a mut Value {
    let extents = manifest["processes"][0]["extents"].as_array_mut();
    let found = extents
        .expect("extents")
        .iter_mut()
        .find(|extent| extent[member]["key"] == key);
    found.expect("its extent")
}

fn job_key(relative: &str) -> Key {
    Key::new(&format!("job/{relative}")).expect("a key")
}

async fn get(store: &S3Store, relative: &str) -> Bytes {
    let got = store.get(&job_key(relative), 64 << 20).await;
    got.expect("the server runs").expect("it is there")
}

/// Two images of a job.
struct Two {
    scene: Scene,
    store: S3Store,
    whole: Files,
    fresh: Target,
    /// What the job printed up to the save of the older image.
    seen: Vec<String>,
}

/// A name, what is done, and what the refusal must say.
type Damage = (&'static str, fn(&mut Files), &'static [&'static str]);

impl Two {
    async fn new() -> Self {
        let scene = Scene::new(&[]);
        let seen = scene.save("job");
        scene.save("job");
        let store = scene.store().await;
        let whole = Files::read(&store).await;
        let fresh = scene.fresh();
        Self {
            scene,
            store,
            whole,
            fresh,
            seen,
        }
    }

    fn saver(&self) -> Saver {
        // Every chunk is read before the driver is asked, as for a process that cannot be made again.
        self.scene
            .saver_with("job", "", "[restore]\nverify = \"all\"\n")
    }

    fn restore(&self, saver: &Saver, image: &str) -> Run {
        let pid = self.fresh.pid();
        saver
            .cli
            .run(&format!("restore --pid {pid} --into-fresh --image {image}"))
    }

    /// Does each damage by itself: it must be named and refused, and nothing of it reach the driver. A look at the image shows it, so that `latest` is the older one.
    async fn must_be_seen(&self, damages: &[Damage]) {
        for (name, damage, parts) in damages {
            let damaged = self.damage(*damage).await;
            let saver = self.saver();
            self.must_be_refused(name, &saver, parts);
            // The older one verifies; that is no success.
            let run = saver.cli.run("verify");
            assert_eq!(run.code, 20, "{name}: {run:?}");
            let older = ["image 00000003 verifies", "00000006: "];
            for part in older.iter().chain(*parts) {
                assert!(run.stderr.contains(part), "{name}: no {part:?} in {run:?}");
            }
            self.whole.write_over(&self.store, &damaged).await;
        }
        self.must_be_whole_again();
    }

    /// The same for damages that only reading every byte shows.
    async fn must_be_found(&self, damages: &[Damage]) {
        for (name, damage, parts) in damages {
            let damaged = self.damage(*damage).await;
            self.must_be_refused(name, &self.saver(), parts);
            // Verified on the way into the GPUs, it is found as well; Complete is not reached.
            let saver = self.scene.saver("job", "");
            let fresh = self.scene.fresh();
            let pid = fresh.pid();
            let run = saver
                .cli
                .run(&format!("restore --pid {pid} --into-fresh --image 6"));
            assert!([20, 21].contains(&run.code), "{name}: {run:?}");
            assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0, "{name}");
            self.whole.write_over(&self.store, &damaged).await;
        }
        self.must_be_whole_again();
    }

    async fn damage(&self, damage: fn(&mut Files)) -> Files {
        let mut damaged = self.whole.clone();
        damage(&mut damaged);
        damaged.write_over(&self.store, &self.whole).await;
        damaged
    }

    fn must_be_refused(&self, name: &str, saver: &Saver, parts: &[&str]) {
        let run = self.verify_in_little_memory(saver);
        assert_failed(name, &run, 20, "read", parts);
        let run = self.restore(saver, "6");
        assert_failed(name, &run, 20, "read", parts);
        assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0, "{name}");
        assert_eq!(saver.calls("cuCheckpointOperationComplete"), 0, "{name}");
    }

    /// `verify --image 6` with an address space that a length out of the image cannot be allocated in.
    fn verify_in_little_memory(&self, saver: &Saver) -> Run {
        let command = saver.cli.command("verify --image 6 --json");
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "ulimit -v 1500000 && exec \"$0\" \"$@\""]);
        shell.arg(command.get_program()).args(command.get_args());
        shell.env_clear();
        for (key, value) in command.get_envs() {
            shell.env(key, value.unwrap_or_default());
        }
        let output = shell.output().expect("a shell");
        Run {
            code: output.status.code().unwrap_or(-1),
            report: serde_json::from_slice(&output.stdout).unwrap_or(Value::Null),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    fn must_be_whole_again(&self) {
        let saver = self.saver();
        assert_eq!(self.scene.state_of(&self.fresh), "checkpointed");
        assert_eq!(saver.cli.ok("verify")["image"], "00000006");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_manifest_or_log_entry_is_passed_over() {
    if !has_credentials("damage::a_damaged_manifest_or_log_entry_is_passed_over") {
        return;
    }
    let damages: &[Damage] = &[
        (
            "a bit",
            |f| f.change("manifest.json", |b| b[300] ^= 4),
            &["manifest.json has digest"],
        ),
        (
            "the first bit",
            |f| f.change("manifest.json", |b| b[0] ^= 1),
            &["manifest.json"],
        ),
        (
            "the last bit",
            |f| f.change("manifest.json", |b| *b.last_mut().expect("bytes") ^= 1),
            &["manifest.json"],
        ),
        (
            "missing",
            |f| drop(f.files.remove(&f.key("manifest.json"))),
            &["manifest.json is not there"],
        ),
        (
            "cut",
            |f| f.change("manifest.json", |b| b.truncate(b.len() / 2)),
            &["manifest.json"],
        ),
        (
            "empty",
            |f| f.change("manifest.json", Vec::clear),
            &["manifest.json"],
        ),
        (
            "another file",
            |f| f.change("manifest.json", |b| b.fill(b' ')),
            &["manifest.json has digest"],
        ),
        (
            "sealed, but no manifest",
            |f| {
                f.change("manifest.json", |b| b.fill(b'x'));
                f.seal_manifest();
            },
            &[
                "manifest.json cannot be used",
                "does not end with a digest of itself",
            ],
        ),
        (
            "sealed and oversized",
            |f| {
                f.change("manifest.json", |b| {
                    b.splice(1..1, vec![b' '; 2 << 20]).for_each(drop)
                });
                f.seal_manifest();
            },
            &["manifest_len"],
        ),
        (
            "another format",
            |f| f.forge_manifest(|m| m["format"] = json!(2)),
            &["format 2"],
        ),
        (
            "a feature of the future",
            |f| f.forge_manifest(|m| m["features"] = json!(["x"])),
            &["feature \"x\""],
        ),
        (
            "another job's",
            |f| f.forge_manifest(|m| m["job"] = json!("other")),
            &["job is other"],
        ),
        (
            "another attempt's",
            |f| f.forge_manifest(|m| m["attempt"] = json!("0".repeat(32))),
            &["attempt"],
        ),
        (
            "no process",
            |f| f.forge_manifest(|m| m["processes"] = json!([])),
            &["processes is empty"],
        ),
        (
            "no members",
            |f| f.forge_manifest(|m| *m = json!({"format": 1, "features": []})),
            &["not well formed"],
        ),
        (
            "a log entry of nothing",
            |f| f.change(ENTRY, Vec::clear),
            &["not a log entry"],
        ),
        (
            "a log entry of garbage",
            |f| f.change(ENTRY, |b| b.fill(0xff)),
            &["not a log entry"],
        ),
        (
            "an endless log entry",
            |f| f.change(ENTRY, |b| b.resize(1 << 20, b' ')),
            &["not a log entry", "65536"],
        ),
        (
            "a wrong digest in the log",
            |f| f.change_json(ENTRY, |e| e["manifest_digest"] = json!("0".repeat(32))),
            &["manifest.json has digest"],
        ),
        (
            "a wrong length in the log",
            |f| f.change_json(ENTRY, |e| e["manifest_len"] = json!(7)),
            &["manifest.json"],
        ),
        (
            "a longer length in the log",
            |f| f.change_json(ENTRY, |e| e["manifest_len"] = json!(70_000)),
            &["manifest.json"],
        ),
        (
            "an endless length in the log",
            |f| f.change_json(ENTRY, |e| e["manifest_len"] = json!(u64::MAX)),
            &["manifest_len"],
        ),
        (
            "another kind in the log",
            |f| f.change_json(ENTRY, |e| e["kind"] = json!("whole")),
            &["kind"],
        ),
        (
            "another sum in the log",
            |f| f.change_json(ENTRY, |e| e["raw_len"] = json!(1)),
            &["raw_len"],
        ),
        (
            "a manifest elsewhere",
            |f| {
                f.change_json(ENTRY, |e| {
                    e["manifest_key"] = json!("../other/data/manifest.json")
                })
            },
            &["manifest_key"],
        ),
        (
            "an attempt elsewhere",
            |f| {
                f.change_json(ENTRY, |e| {
                    e["attempt"] = json!("../../../../../../../../etc/../..")
                })
            },
            &["attempt"],
        ),
    ];
    let two = Two::new().await;
    two.must_be_seen(damages).await;

    // Falling back, all the way into a process: it goes on from the older image.
    let damaged = two
        .damage(|f| f.change("manifest.json", |b| b[300] ^= 4))
        .await;
    let run = two.restore(&two.saver(), "latest");
    assert_eq!(
        (run.code, &run.report["image"]),
        (0, &json!("00000003")),
        "{run:?}"
    );
    assert!(run.stderr.contains("skipped image 00000006: "), "{run:?}");
    assert!(run.stderr.contains("manifest.json has digest"), "{run:?}");
    let Two {
        scene,
        mut fresh,
        mut seen,
        ..
    } = two;
    scene.must_compute_on(&mut fresh);
    seen.extend(fresh.kill());
    seen.dedup();
    scene.must_be_the_steps_of_the_job(&seen);
    drop(damaged);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_and_numbers_are_refused() {
    if !has_credentials("damage::hostile_names_and_numbers_are_refused") {
        return;
    }
    /// Puts a value into the first extent.
    fn forge(f: &mut Files, member: &str, value: Value) {
        f.forge_manifest(|m| {
            *m["processes"][0]["extents"][0]
                .pointer_mut(member)
                .expect("a member") = value
        });
    }
    let damages: &[Damage] = &[
        (
            "up",
            |f| forge(f, "/object/key", json!("../other/secret")),
            &["object.key", "it must lie under"],
        ),
        (
            "rooted",
            |f| forge(f, "/object/key", json!("/etc/passwd")),
            &["object.key", "it must lie under"],
        ),
        (
            "empty",
            |f| forge(f, "/table/key", json!("")),
            &["table.key", "it must lie under"],
        ),
        (
            "up from within",
            |f| {
                let key = format!("data/{}/../x.zst", f.attempt);
                forge(f, "/object/key", json!(key));
            },
            &["object.key", "it must lie under"],
        ),
        (
            "another attempt's",
            |f| forge(f, "/table/key", json!(format!("data/{}/x", "0".repeat(32)))),
            &["table.key", "it must lie under"],
        ),
        (
            "control characters",
            |f| {
                let key = format!("data/{}/x\n\u{1b}[2J", f.attempt);
                forge(f, "/object/key", json!(key));
            },
            &["object.key", "it must lie under"],
        ),
        (
            "endless",
            |f| {
                let key = format!("data/{}/{}", f.attempt, "x".repeat(5000));
                forge(f, "/object/key", json!(key));
            },
            &["object.key", "it must lie under"],
        ),
        (
            "the manifest as an object",
            |f| {
                let key = format!("data/{}/manifest.json", f.attempt);
                forge(f, "/object/key", json!(key));
            },
            &["object.key", "once"],
        ),
        (
            "an extent of nothing",
            |f| forge(f, "/raw_len", json!(0)),
            &["raw_len"],
        ),
        (
            "an endless extent",
            |f| forge(f, "/raw_len", json!(u64::MAX)),
            &["raw_len"],
        ),
        (
            "half of that",
            |f| forge(f, "/raw_len", json!(1_u64 << 63)),
            &["raw_len"],
        ),
        (
            "a negative extent",
            |f| forge(f, "/raw_len", json!(-1)),
            &["not well formed"],
        ),
        (
            "a longer extent",
            |f| forge(f, "/raw_len", json!(1_u64 << 40)),
            &["raw_len"],
        ),
        (
            "chunks of nothing",
            |f| forge(f, "/chunk_len", json!(0)),
            &["chunk_len"],
        ),
        (
            "odd chunks",
            |f| forge(f, "/chunk_len", json!(3 << 20)),
            &["chunk_len"],
        ),
        (
            "endless chunks",
            |f| forge(f, "/chunk_len", json!(1_u64 << 63)),
            &["chunk_len"],
        ),
        (
            "longer chunks",
            |f| forge(f, "/chunk_len", json!(2 << 20)),
            &["chunk_len"],
        ),
        (
            "an endless object",
            |f| forge(f, "/object/len", json!(u64::MAX)),
            &["object.len"],
        ),
        (
            "a longer object",
            |f| forge(f, "/object/len", json!(4 << 20)),
            &[".zst has"],
        ),
        (
            "an object of nothing",
            |f| forge(f, "/object/len", json!(0)),
            &[".zst has"],
        ),
        (
            "an endless table",
            |f| forge(f, "/table/len", json!(u64::MAX)),
            &["table.len"],
        ),
        (
            "a table of 16 MiB",
            |f| forge(f, "/table/len", json!(16 << 20)),
            &[".frames.json"],
        ),
        (
            "no such GPU",
            |f| {
                forge(
                    f,
                    "/device",
                    json!("GPU-00000000-0000-0000-0000-000000000000"),
                )
            },
            &["device"],
        ),
        (
            "two extents on one GPU",
            |f| {
                f.forge_manifest(|m| {
                    m["processes"][0]["extents"][1]["device"] =
                        m["processes"][0]["extents"][0]["device"].clone()
                })
            },
            &["extents[1].device"],
        ),
        (
            "one object twice",
            |f| {
                f.forge_manifest(|m| {
                    m["processes"][0]["extents"][1]["object"] =
                        m["processes"][0]["extents"][0]["object"].clone()
                })
            },
            &["extents[1].object.key", "once"],
        ),
        (
            "a table's bit",
            |f| f.change(".frames.json", |b| b[200] ^= 1),
            &[".frames.json", "digest"],
        ),
        (
            "no table",
            |f| drop(f.files.remove(&f.key(".frames.json"))),
            &[".frames.json is not there"],
        ),
        (
            "half a table",
            |f| f.change(".frames.json", |b| b.truncate(b.len() / 2)),
            &[".frames.json"],
        ),
        (
            "a sealed table of nothing",
            |f| {
                f.change(".frames.json", |b| b.fill(b' '));
                f.seal_table();
            },
            &[".frames.json cannot be used"],
        ),
        (
            "frames of nothing",
            |f| f.forge_table(|t| t["stored"] = json!([0, 0, 0, 0])),
            &["stored[0]"],
        ),
        (
            "endless frames",
            |f| f.forge_table(|t| t["stored"] = json!([u32::MAX, u32::MAX, u32::MAX, u32::MAX])),
            &["stored[0]"],
        ),
        (
            "frames beyond 32 bits",
            |f| f.forge_table(|t| t["stored"][0] = json!(1_u64 << 40)),
            &["not well formed"],
        ),
        (
            "a frame too few",
            |f| f.forge_table(|t| t["stored"] = json!([100, 100, 100])),
            &["stored", "one entry for each chunk"],
        ),
        (
            "a sum that differs",
            |f| f.forge_table(|t| t["stored"] = json!([100, 100, 100, 100])),
            &["stored", "in sum"],
        ),
        (
            "another extent's table",
            |f| f.forge_table(|t| t["raw_len"] = json!(8 << 20)),
            &["raw_len"],
        ),
        (
            "another codec",
            |f| f.forge_table(|t| t["codec"] = json!("lz4")),
            &["codec"],
        ),
        (
            "another digest",
            |f| f.forge_table(|t| t["digest_algorithm"] = json!("md5")),
            &["digest_algorithm"],
        ),
        (
            "another filter",
            |f| {
                f.forge_table(|t| {
                    t["features"] = json!(["planes"]);
                    t["filters"] = json!("??");
                })
            },
            &["filters"],
        ),
        (
            "unknown kinds",
            |f| f.forge_table(|t| t["kinds"] = json!("????")),
            &["kinds"],
        ),
        (
            "digests of no digits",
            |f| f.forge_table(|t| t["digests"] = json!("x".repeat(128))),
            &["digests"],
        ),
    ];
    let two = Two::new().await;
    two.must_be_seen(damages).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_are_not_what_was_stored_are_passed_over() {
    if !has_credentials("damage::objects_that_are_not_what_was_stored_are_passed_over") {
        return;
    }
    let damages: &[Damage] = &[
        (
            "a bit",
            |f| f.change(".zst", |b| b[1000] ^= 1),
            &[".zst has CRC64NVME"],
        ),
        (
            "missing",
            |f| drop(f.files.remove(&f.key(".zst"))),
            &[".zst is not there"],
        ),
        (
            "cut",
            |f| f.change(".zst", |b| b.truncate(b.len() - 1)),
            &[".zst has"],
        ),
        ("empty", |f| f.change(".zst", Vec::clear), &[".zst has"]),
        ("longer", |f| f.change(".zst", |b| b.push(0)), &[".zst has"]),
        (
            "exchanged",
            |f| {
                let keys: Vec<String> = f
                    .files
                    .keys()
                    .filter(|key| key.ends_with(".zst"))
                    .cloned()
                    .collect();
                let first = f.files[&keys[0]].clone();
                let second = f.files.insert(keys[1].clone(), first).expect("it is there");
                f.files.insert(keys[0].clone(), second);
            },
            &[".zst has"],
        ),
        // The store's own checksum is right in these.
        (
            "its seek table",
            |f| {
                f.forge_object(|b| {
                    let at = b.len() - 20;
                    b[at] ^= 1;
                })
            },
            &["the seek table of object", ".zst"],
        ),
        (
            "its last byte",
            |f| f.forge_object(|b| *b.last_mut().expect("bytes") ^= 1),
            &["the seek table of object", ".zst"],
        ),
    ];
    let two = Two::new().await;
    two.must_be_seen(damages).await;
}

/// The head of a frame that asks for a window of 2^31 bytes and promises 2^60.
const GREEDY_FRAME: [u8; 14] = [
    0x28,
    0xb5,
    0x2f,
    0xfd,
    0b1100_0100,
    21 << 3,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0x10,
];
/// The same promise in the single-segment form, where the content is the window.
const GREEDY_SEGMENT: [u8; 13] = [
    0x28,
    0xb5,
    0x2f,
    0xfd,
    0b1110_0100,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0x10,
];
/// The right content size (1 MiB) and a window of 2^31 bytes.
const GREEDY_WINDOW: [u8; 14] = [
    0x28,
    0xb5,
    0x2f,
    0xfd,
    0b1100_0100,
    21 << 3,
    0,
    0,
    0x10,
    0,
    0,
    0,
    0,
    0,
];
/// No content size at all.
const ENDLESS_FRAME: [u8; 6] = [0x28, 0xb5, 0x2f, 0xfd, 0b0000_0100, 0x50];

#[tokio::test(flavor = "multi_thread")]
async fn damage_inside_an_object_is_found_by_reading() {
    if !has_credentials("damage::damage_inside_an_object_is_found_by_reading") {
        return;
    }
    let damages: &[Damage] = &[
        (
            "magic",
            |f| f.forge_object(|b| b[0] ^= 1),
            &["chunk 0 of", ".zst is damaged", "not a zstd frame"],
        ),
        (
            "head",
            |f| f.forge_object(|b| b[4] ^= 0x80),
            &["chunk 0 of", ".zst is damaged"],
        ),
        (
            "content",
            |f| f.forge_object(|b| b[2000] ^= 0x10),
            &["chunk 0 of", ".zst is damaged"],
        ),
        (
            "middle",
            |f| {
                f.forge_object(|b| {
                    let at = b.len() / 2;
                    b[at] ^= 1;
                })
            },
            &[".zst is damaged"],
        ),
        (
            "last frame",
            |f| {
                f.forge_object(|b| {
                    let at = b.len() - 60;
                    b[at] ^= 1;
                })
            },
            &["chunk 3 of", ".zst is damaged"],
        ),
        (
            "zeros",
            |f| f.forge_object(|b| b[100..400_000].fill(0)),
            &["chunk 0 of", ".zst is damaged"],
        ),
        (
            "greedy",
            |f| f.forge_frame(0, &GREEDY_FRAME),
            &[
                "chunk 0 of",
                "is damaged",
                "asks for a window of 2147483648",
            ],
        ),
        (
            "greedy segment",
            |f| f.forge_frame(0, &GREEDY_SEGMENT),
            &["chunk 0 of", "is damaged", "1152921504606846976"],
        ),
        (
            "greedy window",
            |f| f.forge_frame(0, &GREEDY_WINDOW),
            &[
                "chunk 0 of",
                "is damaged",
                "asks for a window of 2147483648",
            ],
        ),
        (
            "endless",
            |f| f.forge_frame(1, &ENDLESS_FRAME),
            &["chunk 1 of", "is damaged", "no content size"],
        ),
        (
            "a digest that differs",
            |f| {
                f.forge_table(|t| {
                    let digests = t["digests"].as_str().expect("text").to_owned();
                    t["digests"] = format!("{}{}", "0".repeat(32), &digests[32..]).into();
                })
            },
            &["chunk 0 of", "is damaged", "chunk has digest"],
        ),
        (
            "frames exchanged in the table",
            |f| {
                f.forge_table(|t| {
                    let digests = t["digests"].as_str().expect("text").to_owned();
                    t["digests"] =
                        format!("{}{}{}", &digests[32..64], &digests[..32], &digests[64..]).into();
                })
            },
            &["is damaged", "chunk has digest"],
        ),
    ];
    let two = Two::new().await;
    two.must_be_found(damages).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_rot_under_the_store_are_found_by_reading() {
    if !has_credentials("damage::bytes_that_rot_under_the_store_are_found_by_reading") {
        return;
    }
    // The store keeps its checksum, and gives other bytes.
    let two = Two::new().await;
    let key = two.whole.key(".zst");
    for at in [5, 5000] {
        let rules = json!([{
            "op": "GetObject", "key_contains": key, "always": true, "action": {"wire": "flip-bit", "bytes": at},
        }]);
        two.scene.server.set_rules(&rules);
        let saver = two.saver();
        let run = saver.cli.run("verify --image 6");
        assert_failed("rot", &run, 20, "read", &[".zst"]);
        let run = two.restore(&saver, "6");
        assert_failed("rot", &run, 20, "read", &[".zst"]);
        assert!(
            cause(&run).contains("damaged") || cause(&run).contains("seek table"),
            "{run:?}"
        );
        assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
        two.scene.server.set_rules(&json!([]));
    }
    two.must_be_whole_again();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_with_a_gap_proves_nothing() {
    if !has_credentials("damage::a_log_with_a_gap_proves_nothing") {
        return;
    }
    let two = Two::new().await;
    two.store
        .delete(&job_key("log/00000001.json"))
        .await
        .expect("deleted");
    let saver = two.saver();
    for command in ["list", "verify", "verify --image 6"] {
        let run = saver.cli.run(command);
        assert_eq!(run.code, 20, "{command}: {run:?}");
        assert!(
            cause(&run).contains("log/00000001.json is missing"),
            "{command}: {run:?}"
        );
    }
    let run = two.restore(&saver, "latest");
    assert_failed("gap", &run, 20, "read", &["has a gap"]);
    assert_eq!(saver.calls("cuCheckpointProcessRestore"), 0);
    // Nor is there a next slot: a save is refused before the target is touched.
    let mut target = two.scene.target();
    let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
    assert_failed("gap", &run, 3, "prepare", &["has a gap"]);
    two.scene.must_compute_on(&mut target);
}
