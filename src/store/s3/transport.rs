//! The way to the store: trust, proxy, connections, and a first look at the credentials.
//!
//! In: the configuration's connect timeout, and the environment (`AWS_CA_BUNDLE`, the proxy variables). Out: an HTTP client for the SDK. What can fail:
//! certificates that cannot be used, credentials that are not there; both are [`StoreError::Refused`], told before anything is asked of the store.

use std::time::{Duration, SystemTime};

use aws_config::SdkConfig;
use aws_sdk_s3::config::{ProvideCredentials, SharedCredentialsProvider, SharedHttpClient};
use aws_smithy_http_client::Connector;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore, rustls_provider::CryptoMode};
use aws_smithy_runtime_api::client::http::{
    HttpConnectorSettings, SharedHttpConnector, http_client_fn,
};

use crate::error::one_line;
use crate::store::{Credentials, StoreError};

/// Trusted roots: the system's, or the file in `AWS_CA_BUNDLE` instead. None for plain HTTP, where loading them would only cost time.
pub(super) fn tls_context(plain_http: bool, describe: &str) -> Result<TlsContext, StoreError> {
    let refused = |what: String| StoreError::Refused {
        operation: "connect",
        key: describe.to_owned(),
        code: what,
        advice: "; see AWS_CA_BUNDLE".to_owned(),
    };
    let roots = match std::env::var_os("AWS_CA_BUNDLE") {
        _ if plain_http => TrustStore::empty(),
        Some(path) => {
            let pem = std::fs::read(&path)
                .map_err(|error| refused(format!("cannot read {}: {error}", path.display())))?;
            TrustStore::empty().with_pem_certificate(pem)
        }
        None => TrustStore::default(),
    };
    TlsContext::builder()
        .with_trust_store(roots)
        .build()
        .map_err(|error| refused(format!("cannot use the certificates: {}", one_line(&error))))
}

/// One connection pool of our own. No read timeout: it would count from the start of a request, its upload included.
pub(super) fn http_client(
    connect_timeout: Duration,
    tls: TlsContext,
    proxy: ProxyConfig,
) -> SharedHttpClient {
    let settings = HttpConnectorSettings::builder()
        .connect_timeout(connect_timeout)
        .build();
    let connector = Connector::builder()
        .connector_settings(settings)
        .proxy_config(proxy)
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .tls_context(tls)
        .build();
    let connector = SharedHttpConnector::new(connector);
    http_client_fn(move |_, _| connector.clone())
}

/// The credentials' client uses a proxy for HTTPS only: metadata services speak plain HTTP and are reached directly.
pub(super) fn credentials_proxy() -> ProxyConfig {
    let variable = |name: &str| {
        std::env::var(name)
            .or_else(|_| std::env::var(name.to_ascii_lowercase()))
            .ok()
    };
    match variable("HTTPS_PROXY").map(ProxyConfig::https) {
        Some(Ok(proxy)) => proxy.no_proxy(variable("NO_PROXY").unwrap_or_default()),
        Some(Err(_)) | None => ProxyConfig::disabled(),
    }
}

/// Asks the credentials chain once, so that an empty one is told at the start.
pub(super) async fn check_credentials(
    sdk: &SdkConfig,
    describe: &str,
) -> Result<SharedCredentialsProvider, StoreError> {
    let refused = |what: String| {
        StoreError::Refused {
        operation: "connect",
        key: describe.to_owned(),
        code: what,
        advice: "; they come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the AWS profile or the instance's role".to_owned(),
    }
    };
    let provider = sdk
        .credentials_provider()
        .ok_or_else(|| refused("no credentials are set up".to_owned()))?;
    match provider.provide_credentials().await {
        Ok(_) => Ok(provider),
        Err(error) => Err(refused(format!("no credentials: {}", one_line(&error)))),
    }
}

/// What can be told of them. Their source has no method of its own; it is the first word of what they print of themselves, which has no secret in it.
pub(super) fn credentials(found: &aws_sdk_s3::config::Credentials) -> Credentials {
    let printed = format!("{found:?}");
    let source = printed
        .split_once("provider_name: \"")
        .and_then(|(_, rest)| rest.split_once('"'));
    let left = found.expiry().map(|end| {
        end.duration_since(SystemTime::now())
            .unwrap_or_default()
            .as_secs()
    });
    Credentials {
        source: source.map_or("the chain", |(name, _)| name).to_owned(),
        seconds_left: left,
    }
}
