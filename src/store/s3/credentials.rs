//! What requests are signed with: what the SDK's chain gives, kept as long as it holds, and asked for anew when it is about to end or when the store says that it has.
//!
//! In: the chain. Out: credentials for every request. What can fail: the chain has none, now or any more; as long as those that are kept hold, they do.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use aws_config::SdkConfig;
use aws_credential_types::provider::{self, future};
use aws_sdk_s3::config::{Credentials, ProvideCredentials, SharedCredentialsProvider};

use crate::error::one_line;
use crate::store::{self, StoreError};

/// Credentials are renewed so long before they end, or when half of their time is over.
const RENEWAL: Duration = Duration::from_secs(60);
/// A store that refuses what was just asked for is not helped by asking again at once.
const PAUSE: Duration = Duration::from_secs(1);

/// The codes by which stores say that credentials have ended.
const ENDED: [&str; 3] = [
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
];

/// The chain, and what it gave last.
#[derive(Debug, Clone)]
pub(super) struct Chain(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    chain: SharedCredentialsProvider,
    kept: Mutex<Option<Kept>>,
    /// One asks, the others wait for what it gets.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Clone)]
struct Kept {
    credentials: Credentials,
    renewed_from: Option<SystemTime>,
    asked_at: Instant,
}

impl Kept {
    fn new(credentials: Credentials) -> Self {
        let now = SystemTime::now();
        let renewed_from = credentials.expiry().map(|end| {
            let lasts = end.duration_since(now).unwrap_or_default();
            now + (lasts - RENEWAL.min(lasts / 2))
        });
        Self {
            credentials,
            renewed_from,
            asked_at: Instant::now(),
        }
    }

    fn is_fresh(&self) -> bool {
        self.renewed_from
            .is_none_or(|from| SystemTime::now() < from)
    }

    fn holds(&self) -> bool {
        let end = self.credentials.expiry();
        end.is_none_or(|end| SystemTime::now() < end)
    }
}

impl Chain {
    /// The chain of this configuration, asked once, so that an empty one is told at the start.
    pub(super) async fn open(sdk: &SdkConfig, describe: &str) -> Result<Self, StoreError> {
        let refused = |what: String| {
            StoreError::Refused {
            operation: "connect",
            key: describe.to_owned(),
            code: what,
            advice: "; they come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the AWS profile or the instance's role".to_owned(),
        }
        };
        let chain = sdk
            .credentials_provider()
            .ok_or_else(|| refused("no credentials are set up".to_owned()))?;
        let chain = Self(Arc::new(Shared {
            chain,
            kept: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        }));
        match chain.current().await {
            Ok(_) => Ok(chain),
            Err(error) => Err(refused(format!("no credentials: {}", one_line(&error)))),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Option<Kept>> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fresh(&self) -> Option<Credentials> {
        let kept = self.kept();
        let fresh = kept.as_ref().filter(|kept| kept.is_fresh());
        fresh.map(|kept| kept.credentials.clone())
    }

    async fn current(&self) -> provider::Result {
        if let Some(fresh) = self.fresh() {
            return Ok(fresh);
        }
        let _one_at_once = self.0.asking.lock().await;
        if let Some(fresh) = self.fresh() {
            return Ok(fresh);
        }
        match self.0.chain.provide_credentials().await {
            Ok(found) => {
                *self.kept() = Some(Kept::new(found.clone()));
                Ok(found)
            }
            Err(error) => {
                let kept = self.kept().clone().filter(Kept::holds);
                kept.map(|kept| kept.credentials).ok_or(error)
            }
        }
    }

    /// The store refused a request with this code: whether another try is made with other credentials.
    pub(super) fn are_renewed_after(&self, code: &str) -> bool {
        if !ENDED.contains(&code) {
            return false;
        }
        let mut kept = self.kept();
        match kept.as_mut() {
            // What has no end is as good as it will ever be.
            Some(it) if it.credentials.expiry().is_none() => false,
            Some(it) => {
                if it.asked_at.elapsed() >= PAUSE && it.is_fresh() {
                    tracing::warn!(
                        "the store says that our credentials have ended ({code}): they are asked for anew"
                    );
                    it.renewed_from = Some(SystemTime::UNIX_EPOCH);
                }
                true
            }
            None => true,
        }
    }

    /// What can be told of them. Their source has no method of its own; it is the first word of what they print of themselves, which has no secret in it.
    pub(super) async fn told(&self) -> Option<store::Credentials> {
        let found = self.current().await.ok()?;
        let printed = format!("{found:?}");
        let source = printed
            .split_once("provider_name: \"")
            .and_then(|(_, rest)| rest.split_once('"'));
        let left = found.expiry().map(|end| {
            let left = end.duration_since(SystemTime::now());
            left.unwrap_or_default().as_secs()
        });
        Some(store::Credentials {
            source: source.map_or("the chain", |(name, _)| name).to_owned(),
            seconds_left: left,
        })
    }
}

impl ProvideCredentials for Chain {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.current())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Gives the next key each time, which lasts so long; or none.
    #[derive(Debug)]
    struct Source {
        asked: Arc<AtomicU64>,
        lasts: Option<Duration>,
        fails_from: u64,
    }

    impl ProvideCredentials for Source {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
            if number >= self.fails_from {
                let error = provider::error::CredentialsError::not_loaded("gone");
                return future::ProvideCredentials::ready(Err(error));
            }
            let end = self.lasts.map(|lasts| SystemTime::now() + lasts);
            let mut found = Credentials::builder()
                .access_key_id(format!("KEY{number}"))
                .secret_access_key("secret")
                .provider_name("test");
            found.set_expiry(end);
            future::ProvideCredentials::ready(Ok(found.build()))
        }
    }

    fn chain(lasts: Option<Duration>, fails_from: u64) -> (Chain, Arc<AtomicU64>) {
        let asked = Arc::new(AtomicU64::new(0));
        let source = Source {
            asked: Arc::clone(&asked),
            lasts,
            fails_from,
        };
        let chain = Chain(Arc::new(Shared {
            chain: SharedCredentialsProvider::new(source),
            kept: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        }));
        (chain, asked)
    }

    async fn key(chain: &Chain) -> String {
        chain.current().await.unwrap().access_key_id().to_owned()
    }

    fn age(chain: &Chain) {
        let mut kept = chain.kept();
        let kept = kept.as_mut().unwrap();
        kept.asked_at = kept.asked_at.checked_sub(2 * PAUSE).unwrap();
    }

    #[tokio::test]
    async fn what_lasts_is_asked_for_once_and_what_ends_before_it_does() {
        let (lasting, asked) = chain(None, 9);
        for _ in 0..3 {
            assert_eq!(key(&lasting).await, "KEY1");
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        let hour = Duration::from_secs(3600);
        let (renewed, _) = chain(Some(hour), 9);
        assert_eq!(key(&renewed).await, "KEY1");
        assert_eq!(key(&renewed).await, "KEY1");
        let from = renewed.kept().clone().unwrap().renewed_from.unwrap();
        let left = from.duration_since(SystemTime::now()).unwrap();
        assert!(
            left <= hour - RENEWAL && left > hour - 2 * RENEWAL,
            "{left:?}"
        );
        // Short-lived ones are not asked for with every request.
        let (short, _) = chain(Some(Duration::from_secs(30)), 9);
        assert_eq!(key(&short).await, "KEY1");
        assert_eq!(key(&short).await, "KEY1");
    }

    #[tokio::test]
    async fn what_the_store_calls_ended_is_renewed_if_it_can_be() {
        let (renewed, asked) = chain(Some(Duration::from_secs(3600)), 9);
        assert_eq!(key(&renewed).await, "KEY1");
        assert!(!renewed.are_renewed_after("AccessDenied"));
        // What was just asked for is tried again before others are asked for.
        assert!(renewed.are_renewed_after("ExpiredToken"));
        assert_eq!(key(&renewed).await, "KEY1");
        age(&renewed);
        assert!(renewed.are_renewed_after("ExpiredToken"));
        assert!(renewed.are_renewed_after("ExpiredToken"));
        assert_eq!(key(&renewed).await, "KEY2");
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        let (lasting, _) = chain(None, 9);
        assert_eq!(key(&lasting).await, "KEY1");
        assert!(!lasting.are_renewed_after("ExpiredToken"));
    }

    #[tokio::test]
    async fn a_source_that_fails_costs_nothing_as_long_as_the_last_ones_hold() {
        let (failing, _) = chain(Some(Duration::from_secs(3600)), 2);
        assert_eq!(key(&failing).await, "KEY1");
        age(&failing);
        assert!(failing.are_renewed_after("ExpiredToken"));
        assert_eq!(key(&failing).await, "KEY1");
        let (gone, _) = chain(Some(Duration::ZERO), 2);
        assert_eq!(key(&gone).await, "KEY1");
        assert!(gone.current().await.is_err());
    }
}
