//! The way to the store: trust, proxy, connections.
//!
//! In: the configuration's timeouts of connections, certificates, proxy, addresses and key, and where it has none the environment (`AWS_CA_BUNDLE`, the proxy variables). Out: an HTTP client for the SDK. What can fail:
//! certificates or a proxy that cannot be used, a key that cannot be read; all are [`StoreError::Refused`], told before anything is asked of the store.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aws_sdk_s3::config::SharedHttpClient;
use aws_smithy_http_client::Connector;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore, rustls_provider::CryptoMode};
use aws_smithy_runtime_api::client::dns::{DnsFuture, ResolveDns, ResolveDnsError};
use aws_smithy_runtime_api::client::http::{
    HttpConnectorSettings, SharedHttpConnector, http_client_fn,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::config::{BucketConfig, Sse, StoreConfig};
use crate::error::one_line;
use crate::store::StoreError;

/// Trusted roots: the system's, or the file in `store.ca_bundle` or `AWS_CA_BUNDLE` instead. None for plain HTTP, where loading them would only cost time.
pub(super) fn tls_context(
    ca_bundle: Option<&Path>,
    plain_http: bool,
    describe: &str,
) -> Result<TlsContext, StoreError> {
    let refused = |what: String| StoreError::Refused {
        operation: "connect",
        key: describe.to_owned(),
        code: what,
        advice: "; see store.ca_bundle and AWS_CA_BUNDLE".to_owned(),
    };
    let named = std::env::var_os("AWS_CA_BUNDLE").map(PathBuf::from);
    let roots = match ca_bundle.map(Path::to_owned).or(named) {
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
    config: &StoreConfig,
    tls: TlsContext,
    proxy: ProxyConfig,
) -> SharedHttpClient {
    let settings = HttpConnectorSettings::builder()
        .connect_timeout(config.connect_timeout)
        .build();
    let connector = Connector::builder()
        .connector_settings(settings)
        .pool_idle_timeout(config.idle_timeout)
        .proxy_config(proxy)
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .tls_context(tls)
        .build_with_resolver(Resolver(Arc::new(config.bucket.resolve.clone())));
    let connector = SharedHttpConnector::new(connector);
    http_client_fn(move |_, _| connector.clone())
}

/// Addresses that are known, and those that the system finds for all other names.
#[derive(Debug, Clone)]
struct Resolver(Arc<BTreeMap<String, IpAddr>>);

impl ResolveDns for Resolver {
    fn resolve_dns<'a>(&'a self, name: &'a str) -> DnsFuture<'a> {
        if let Some(known) = self.0.get(&name.to_ascii_lowercase()) {
            return DnsFuture::ready(Ok(vec![*known]));
        }
        DnsFuture::new(async move {
            let found = tokio::net::lookup_host((name, 0)).await;
            let found = found.map_err(ResolveDnsError::new)?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

/// The proxy on the way to the store.
pub(super) fn store_proxy(
    config: &BucketConfig,
    describe: &str,
) -> Result<ProxyConfig, StoreError> {
    let proxy = match config.proxy.as_deref() {
        None => ProxyConfig::from_env(),
        Some("none") => ProxyConfig::disabled(),
        Some(url) => ProxyConfig::all(url).map_err(|error| StoreError::Refused {
            operation: "connect",
            key: describe.to_owned(),
            code: format!("the proxy {url} cannot be used: {}", one_line(&error)),
            advice: "; see store.proxy".to_owned(),
        })?,
    };
    Ok(match &config.no_proxy {
        Some(hosts) => proxy.no_proxy(hosts),
        None => proxy,
    })
}

/// The key of SSE-C: 32 bytes as they are, or in base64.
pub(super) fn customer_key(
    config: &BucketConfig,
    describe: &str,
) -> Result<Option<[u8; 32]>, StoreError> {
    let Some(Sse::Customer(path)) = &config.sse else {
        return Ok(None);
    };
    let refused = |what: String| StoreError::Refused {
        operation: "connect",
        key: describe.to_owned(),
        code: format!("{}: {what}", path.display()),
        advice: "; see store.sse".to_owned(),
    };
    let bytes = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
    if let Ok(key) = <[u8; 32]>::try_from(bytes.as_slice()) {
        return Ok(Some(key));
    }
    let decoded = STANDARD.decode(bytes.trim_ascii());
    let key = decoded.ok().and_then(|bytes| bytes.try_into().ok());
    let found = bytes.len();
    key.map(Some).ok_or_else(|| {
        refused(format!(
            "expected 32 bytes, or 44 characters of base64, found {found} bytes"
        ))
    })
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
