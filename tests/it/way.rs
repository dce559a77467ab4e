//! The way to the store: TLS with a certificate that no system trusts, and proxies. Whole saves and restores go that way; what must not go through a proxy does not.

use std::time::{Duration, SystemTime};

use serde_json::json;

use super::support::scene::Scene;
use super::support::{MetadataServer, Proxy, Target, TlsFront};

/// A scene whose store is reached over TLS alone, with lines of `[store]` that trust it.
fn behind_tls() -> (Scene, TlsFront, String) {
    let mut scene = Scene::new(&[]);
    let front = TlsFront::before(&scene.server);
    scene.server.endpoint.clone_from(&front.endpoint);
    let trust = format!("ca_bundle = \"{}\"\n", front.ca().display());
    (scene, front, trust)
}

/// Every command of a save and a restore works with this configuration, and the target computes on.
fn there_and_back(scene: &Scene, config: &str) -> Target {
    let mut target = scene.target();
    target.wait_for("step 2 ");
    for command in [
        "preflight".to_owned(),
        format!("checkpoint --pid {}", target.pid()),
        "verify".to_owned(),
        format!("restore --pid {}", target.pid()),
    ] {
        let run = scene.saver_with("job", "", config).cli.run(&command);
        assert_eq!(run.code, 0, "{config} {command}: {run:?}");
    }
    scene.must_compute_on(&mut target);
    target
}

#[test]
fn a_job_is_saved_and_restored_over_tls_with_a_private_authority_and_through_a_proxy() {
    let (scene, front, trust) = behind_tls();
    let proxy = Proxy::start(&[]);
    let through = format!("{trust}proxy = \"{}\"\n", proxy.url);
    for config in [&trust, &through] {
        let target = there_and_back(&scene, config);
        scene.must_have_computed_rightly(target);
    }
    let store = front.endpoint.trim_start_matches("https://");
    let tunnels = proxy.requests();
    assert!(!tunnels.is_empty());
    for tunnel in tunnels {
        assert_eq!(tunnel, format!("CONNECT {store} 200"));
    }
}

#[test]
fn a_host_that_is_to_be_reached_directly_is() {
    let (scene, _front, trust) = behind_tls();
    let proxy = Proxy::start(&["--refuse", "403"]);
    for more in [
        "no_proxy = \"localhost\"\n",
        "no_proxy = \"corp,.local,localhost\"\n",
    ] {
        let config = format!("{trust}proxy = \"{}\"\n{more}", proxy.url);
        scene.saver_with("job", "", &config).cli.ok("preflight");
    }
    let without = scene.saver_with("job", "", &format!("{trust}proxy = \"none\"\n"));
    let mut command = without.cli.command("preflight");
    let done = command.env("HTTPS_PROXY", &proxy.url).output();
    assert!(done.expect("it runs").status.success());
    assert_eq!(proxy.requests(), [""; 0]);
}

/// The role's credentials come from the machine's own metadata server, whatever the environment says of proxies.
#[test]
fn metadata_addresses_are_never_asked_for_through_the_proxy() {
    const ROLE: &str = "/latest/meta-data/iam/security-credentials/";
    let (scene, front, trust) = behind_tls();
    let end = SystemTime::now() + Duration::from_secs(3600);
    let role = json!({
        "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z",
        "AccessKeyId": "test", "SecretAccessKey": "testtest", "Token": "token",
        "Expiration": humantime::format_rfc3339_seconds(end).to_string(),
    });
    let mine = format!("{ROLE}job-role");
    let metadata = MetadataServer::start(&json!({"values": {ROLE: "job-role", mine: role}}));
    let proxy = Proxy::start(&[]);
    let config = format!("{trust}proxy = \"{}\"\n", proxy.url);
    let saver = scene.saver_with("job", "", &config).unhurried();
    let mut command = saver.cli.command("preflight --json");
    command
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY")
        .env("AWS_EC2_METADATA_DISABLED", "false")
        .env("AWS_EC2_METADATA_SERVICE_ENDPOINT", &metadata.endpoint);
    for variable in [
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
    ] {
        command.env(variable, &proxy.url);
    }
    let done = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{said}");
    assert!(!metadata.requests().is_empty(), "the role was asked for");
    let store = front.endpoint.trim_start_matches("https://");
    let asked = proxy.requests();
    assert!(!asked.is_empty());
    let others = asked.iter().filter(|it| !it.contains(store)).count();
    assert_eq!(others, 0, "{asked:?}");
}

/// The store encrypts with a key that it is given with every request, and keeps none (SSE-C).
#[test]
fn a_key_of_ones_own_goes_with_every_request() {
    let (scene, front, trust) = behind_tls();
    let key = front.ca().with_file_name("key");
    std::fs::write(&key, [7; 32]).expect("a key");
    let config = format!("{trust}sse = \"customer:{}\"\n", key.display());
    let about_objects = json!([
        "PutObject",
        "CreateMultipartUpload",
        "UploadPart",
        "CompleteMultipartUpload",
        "HeadObject",
        "GetObject"
    ]);
    scene.server.set_rules(&json!([{
        "op": about_objects, "without_header": "x-amz-server-side-encryption-customer-key", "always": true,
        "action": {"status": 400, "code": "InvalidRequest"},
    }]));
    let _computes_on = there_and_back(&scene, &config);
    let run = scene.saver_with("job", "", &trust).cli.run("preflight");
    assert_eq!(run.code, 3, "{run:?}");
}
